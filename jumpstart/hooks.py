"""
Hooks of the app around captures and restores, and what makes forked processes unlike each other.

As in CRaC and SnapStart: what an app must do before its state is taken (`on_capture`, last registered first called) and
after a process was made from such a state (`on_restore`, in the order of registration). Without the server nothing
calls them. A hook that raises is logged by its name and harms nothing; one that does not return is left behind.

A fork copies what makes random values. Python itself reseeds `random`; OpenSSL, `secrets`, ``os.urandom`` and, by its
process id, `tempfile` know about forks. `make_unique` does the rest.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

logger = logging.getLogger(__name__)

LEAST_S = 0.5  # seconds that a hook has when others before it have used up the time

CaptureFor = Literal["fork", "host", "ship"]
"""What is captured: the process that workers are forked from, the host's warm-start cache, or a profile file."""

Hook = TypeVar("Hook", bound=Callable[..., Any])

_capture_hooks: list[Callable[..., Any]] = []
_restore_hooks: list[Callable[..., Any]] = []


def on_capture(hook: Hook) -> Hook:
    """
    Have *hook* called before the state of this process is taken; usable as a decorator.

    That is: in the process that imported the app, before workers are forked from it (`"fork"`: close what must not be
    shared, such as connections); and in processes that serve, before what they have learnt is recorded (`"host"`: every
    few seconds while there is news, `"ship"`: for a profile file). In the latter requests run: close nothing there. A
    hook that has a parameter ``purpose`` is told which of them it is; one without is called before forks only.

    The last one registered is called first. A coroutine function runs in the server's event loop, and where there is
    none, before forks, not at all; other functions run in a thread of their own.

    Raises:
        TypeError: *hook* cannot be called.
    """
    return _register(_capture_hooks, hook)


def on_restore(hook: Hook) -> Hook:
    """
    Have *hook* called, without arguments, in each process that serves, before it does anything else; usable as a
    decorator.

    That is after the app's import, all restores that need no event loop and the fork, and before lifespan start-up,
    warm-up requests and the first connection. Open there what `on_capture` has closed, and reseed what is the app's own
    (a module's `random.Random()`, say). Hooks are called in the order of registration; a coroutine function runs in the
    server's event loop, other functions in a thread of their own.

    Raises:
        TypeError: *hook* cannot be called.
    """
    return _register(_restore_hooks, hook)


def _register(hooks: list[Callable[..., Any]], hook: Hook) -> Hook:
    if not callable(hook):
        raise TypeError(f"a hook must be callable, got {hook!r}")
    if hook not in hooks:
        hooks.append(hook)
    return hook


def clear() -> None:
    """Forget all hooks; for tests."""
    _capture_hooks.clear()
    _restore_hooks.clear()


# -- for the server --


def before_fork(limit_s: float) -> None:
    """Call the `on_capture` hooks that are no coroutine functions; *limit_s* seconds for all, 0 for no limit."""
    deadline = _deadline(limit_s)
    for hook, call in _capture_calls("fork"):
        if not _is_async(hook):
            thread = _Thread(hook, call)
            thread.join(_left(deadline))
            if thread.is_alive():
                _report_left("on_capture", hook, limit_s)
            elif thread.error is not None:
                _report("on_capture", hook, thread.error)
            elif inspect.iscoroutine(thread.result):
                thread.result.close()  # it is async, and did not look so


async def before_capture(purpose: Literal["host", "ship"], limit_s: float) -> None:
    """Call the `on_capture` hooks that ask for it, in a process that serves."""
    await _call_all("on_capture", _capture_calls(purpose), limit_s)


async def after_restore(limit_s: float) -> None:
    """Call the `on_restore` hooks, in the event loop of a process that is about to serve."""
    await _call_all("on_restore", [(hook, hook) for hook in list(_restore_hooks)], limit_s)


def _capture_calls(purpose: CaptureFor) -> list[tuple[Callable[..., Any], Callable[[], Any]]]:
    calls: list[tuple[Callable[..., Any], Callable[[], Any]]] = []
    for hook in reversed(list(_capture_hooks)):
        if _takes_purpose(hook):
            calls.append((hook, functools.partial(hook, purpose=purpose)))
        elif purpose == "fork":
            calls.append((hook, hook))
    return calls


def _takes_purpose(hook: Callable[..., Any]) -> bool:
    try:
        return "purpose" in inspect.signature(hook).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False


def _is_async(hook: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(hook)


async def _call_all(kind: str, calls: Sequence[tuple[Callable[..., Any], Callable[[], Any]]], limit_s: float) -> None:
    """One after the other; *limit_s* seconds for all of them together, 0 for no limit."""
    if not calls:
        return
    import asyncio  # not at the top: apps import this module in scripts, too

    deadline = _deadline(limit_s)
    for hook, call in calls:
        try:
            async with asyncio.timeout(_left(deadline)) as limit:
                result = call() if _is_async(hook) else await _in_thread(hook, call)
                if inspect.iscoroutine(result):  # also of what does not look async: a wrapper, an object's __call__
                    await result
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # sys.exit() in a hook may not end the worker
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if limit.expired():
                _report_left(kind, hook, limit_s)
            else:
                _report(kind, hook, error)


async def _in_thread(hook: Callable[..., Any], call: Callable[[], Any]) -> Any:
    import asyncio

    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    thread = _Thread(hook, call, lambda: loop.call_soon_threadsafe(end))
    await over
    thread.join()
    if thread.error is not None:
        raise thread.error
    return thread.result


class _Thread(threading.Thread):
    """Runs a hook; a thread of its own, since one that hangs keeps it."""

    def __init__(
        self, hook: Callable[..., Any], call: Callable[[], Any], over: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(name=f"jumpstart-hook {_name(hook)}", daemon=True)
        self.error: BaseException | None = None
        self.result: Any = None
        self._call = call
        self._over = over
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        if self._over is not None:
            try:
                self._over()
            except RuntimeError:
                pass  # its event loop is closed: nobody waits any more


def _report(kind: str, hook: Callable[..., Any], error: BaseException) -> None:
    logger.error("%s hook %s raised", kind, _name(hook), exc_info=error)


def _report_left(kind: str, hook: Callable[..., Any], limit_s: float) -> None:
    logger.error(
        "%s hook %s was left: it was not done when the %g s for all of them were over (--restore-timeout)",
        *(kind, _name(hook), limit_s),
    )


def _name(hook: Callable[..., Any]) -> str:
    return f"{getattr(hook, '__module__', '')}:{getattr(hook, '__qualname__', None) or repr(hook)}"


def _deadline(limit_s: float) -> float | None:
    return time.monotonic() + limit_s if limit_s else None


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(LEAST_S, deadline - time.monotonic())


# -- uniqueness --


def make_unique() -> None:
    """
    Make a forked process unlike its siblings: nothing that it draws may be what they draw. Right after the fork.

    - `uuid.uuid1`: libuuid's sequence number and last time are copied by a fork, and two processes that ask within the
      same microsecond get the same id. It is replaced by one with a sequence number from the process id.
    - ``numpy.random``'s global generator, if numpy was imported.
    - OpenSSL's generator gets fresh entropy; it would see the fork by itself.

    What cannot be seen from here is the app's: a generator of its own, which it may have seeded on purpose.
    """
    if "uuid" in sys.modules:
        _unique_uuid1()
    for name, reseed in (("numpy.random", _reseed_numpy), ("_ssl", _reseed_ssl)):
        module = sys.modules.get(name)
        if module is not None:
            try:
                reseed(module)
            except Exception:  # a stand-in of the app's, or a version that does it differently
                logger.warning("the random state of %s is the same in all workers", name, exc_info=True)


def _reseed_numpy(module: Any) -> None:
    module.seed()


def _reseed_ssl(module: Any) -> None:
    module.RAND_add(os.urandom(32), 32.0)


_EPOCH = 0x01B21DD213814000  # 100 ns units from the Gregorian calendar's beginning to Unix time


def _unique_uuid1() -> None:
    import uuid

    original = getattr(uuid, "_generate_time_safe", None)
    if original is None:
        return  # then Python draws a new sequence number for each, from `random`
    node = uuid.UUID(bytes=original()[0]).node  # not `getnode`, which asks this function, or may start a program
    # Processes of one host that live at the same time have different ids, near ones different remainders.
    sequence = os.getpid() & 0x3FFF
    lock = threading.Lock()
    last = 0

    def generate_time_safe() -> tuple[bytes, int]:
        nonlocal last
        with lock:
            last = max(last + 1, time.time_ns() // 100 + _EPOCH)
            stamp = last
        fields = (
            stamp & 0xFFFFFFFF,
            (stamp >> 32) & 0xFFFF,
            (stamp >> 48) & 0x0FFF,
            sequence >> 8,
            sequence & 0xFF,
            node,
        )
        return uuid.UUID(fields=fields, version=1).bytes, 0

    uuid._generate_time_safe = generate_time_safe  # type: ignore[attr-defined]  # private; checked above
