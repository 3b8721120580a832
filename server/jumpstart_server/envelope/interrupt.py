"""
Raising `jumpstart.RequestTimeout` in the thread of a handler: never in our own code, never in the next request.

CPython raises an exception that another thread asked for (`PyThreadState_SetAsyncExc`) at the target's next look at its
"eval breaker": after a call of C code, at the begin of a Python function, at a jump backwards. That is not at once, and
not always in the frame where the target stood:

- In a call that blocks, it waits until the call returns.
- When that call raises, no look comes before the frame is left: the exception shows up one frame further out, which may
  be the frame of whoever called the handler.

So there are two rules. `Interrupts.fire` asks only while the innermost Python frame of the target is the app's, and it
looks and asks in one go (`_ask`), so that the target cannot have moved in between. Then at most one exception is on its
way when the handler has returned to us. And whoever runs a handler disarms afterwards, before it does anything that
counts: `disarm` takes back what has not been raised yet, and what is raised on the way there is caught (`call`).

`finally` blocks of the app may be cut short, as by Ctrl-C. What must run whole (a WSGI iterable's ``close``) is to be
called after `disarm`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Final, TypeVar

from jumpstart.deadlines import RequestTimeout

T = TypeVar("T")

PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds until it is raised again in a handler that swallowed it

# Where an exception out of nowhere leaves a lock locked, or half of a thing done. `wait` of threading is made for it.
PROTECTED: Final = frozenset(
    {"jumpstart", "jumpstart_warmup", "jumpstart_server", "logging", "importlib", "_frozen_importlib", "threading"}
)
_WAITS: Final = frozenset({"wait", "wait_for"})

IS_AVAILABLE: Final = sys.implementation.name == "cpython" and bool(getattr(sys, "_is_gil_enabled", lambda: True)())
"""False where threads do not take turns: there nobody can look at a thread and ask before it moves on."""

# A library object of our own: `ctypes.pythonapi` is everybody's, and somebody may set other types.
_set_async_exc = ctypes.PyDLL(None).PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int
_NULL = ctypes.py_object()

_code_of = operator.attrgetter("f_code")


class Interrupts:
    """
    The jobs of one thread, which another thread may interrupt.

    `arm`, `disarm` and `call` are for the thread itself, `fire` for any other one.

    Attributes:
        job: what may be interrupted. The thread itself may set it, in the place of `arm`; and to None, in the place of
            `disarm`, if it then finds that nobody has *fired*.
        fired: somebody has fired, or is at it.
    """

    __slots__ = ("_ident", "_lock", "fired", "job")

    def __init__(self, ident: int = 0) -> None:
        """*ident*: the thread's; 0 for the calling thread."""
        self._ident = ident or threading.get_ident()
        self._lock = threading.Lock()
        self.job: object = None
        self.fired = False

    def arm(self, job: object) -> None:
        """
        From now on `fire` may interrupt *job*.

        Whatever follows may be left by `RequestTimeout` until `disarm` has returned, `disarm` itself included.
        """
        self.job = job

    def disarm(self) -> None:
        """
        From its return on nothing is raised any more, and no exception is on its way.

        Raises:
            RequestTimeout: it arrived on the way in. Call again; it happens once.
        """
        while True:
            try:
                # In this order, which is the other way round in `fire`: we see that it is at it, or it sees no job.
                self.job = None
                if self.fired:
                    with self._lock:
                        self.fired = False
                        _set_async_exc(self._ident, _NULL)
            except RequestTimeout:
                continue
            return

    def call(self, job: object, function: Callable[[], T]) -> T:
        """
        Run *function* as *job*, and return what it returns even when its time was over in the last moment.

        Raises:
            RequestTimeout: it was interrupted, and did not swallow that.
        """
        results: list[T] = []
        error: BaseException | None = None
        try:
            try:
                self.job = job
                # In C from the function's return to where its result is kept: nothing can be raised in between.
                results.extend(map(operator.call, (function,)))
            except BaseException as caught:
                error = caught
        except RequestTimeout as caught:  # in the clause above
            error = caught
        while True:
            try:
                self.disarm()
                break
            except RequestTimeout:
                continue
        if results:
            return results[0]
        if error is None:
            error = StopIteration()  # which `map` takes for its end
        try:
            raise error
        finally:
            del error  # no cycle through the frame

    @contextlib.contextmanager
    def hold(self, job: object) -> Iterator[bool]:
        """
        Keep the thread from ending *job* for the length of the block; False if it does not run it.

        The job runs on; it is `disarm` that waits. To be held for some microseconds.
        """
        with self._lock:
            self.fired = True  # so that the target comes to the lock
            yield self.job is job

    def fire(self, job: object) -> bool:
        """
        Have `RequestTimeout` raised in the thread if it runs *job* and stands in the app's code; whether it will be.

        If not, try again a little later: it may be in a place where nothing may be raised.
        """
        frame = sys._current_frames().get(self._ident)
        if frame is None or not IS_AVAILABLE or is_protected(frame):
            return False
        code = frame.f_code
        del frame  # it keeps the locals of the handler
        with self._lock:  # where the target waits if it comes to `disarm` meanwhile
            self.fired = True  # if it does not come to it, something is taken back that is not there
            return self.job is job and _ask(self._ident, code)


class Stopping:
    """
    The interruption of one job, again and again with growing pauses, for a handler that swallows it.

    Attributes:
        fired: how often it was raised, or is on its way.
    """

    __slots__ = ("_interrupts", "_job", "_next", "fired")

    def __init__(self, interrupts: Interrupts, job: object) -> None:
        self._interrupts = interrupts
        self._job = job
        self._next = 0.0
        self.fired = 0

    def press(self, now: float) -> None:
        """Fire if it is time to; to be called often. *now*: seconds of the monotonic clock."""
        if now < self._next or self.fired > len(PAUSES):
            return
        if self._interrupts.fire(self._job):
            self.fired += 1
            if self.fired <= len(PAUSES):
                self._next = now + PAUSES[self.fired - 1]


def is_protected(frame: FrameType) -> bool:
    """Whether nothing may be raised in *frame*."""
    name = frame.f_globals.get("__name__")
    if not isinstance(name, str):
        return False
    top = name.partition(".")[0]
    return top in PROTECTED and not (top == "threading" and frame.f_code.co_name in _WAITS)


def _ask(ident: int, code: CodeType) -> bool:
    """
    Ask for the exception if the innermost frame of the thread runs *code*.

    A chain of iterators that are all written in C: from the look at the frames to the request no Python code runs, so
    this thread keeps the GIL, and the other one stands still. Up to CPython 3.11 the collector of garbage, whose
    finalizers may let others run, comes whenever something is allocated; later it waits for Python code. So it is off
    meanwhile.
    """
    switch_collector = sys.version_info < (3, 12) and gc.isenabled()
    if switch_collector:
        gc.disable()
    frames = itertools.starmap(sys._current_frames, ((),))
    codes = map(_code_of, map(operator.itemgetter(ident), frames))
    there = itertools.compress((ident,), map(functools.partial(operator.is_, code), codes))
    try:
        return bool(list(map(_set_async_exc, there, (RequestTimeout,))))
    except KeyError:  # the thread has ended
        return False
    finally:
        if switch_collector:
            gc.enable()
