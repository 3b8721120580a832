"""
The threads that run sync code of ASGI apps: ``def`` endpoints and dependencies, background tasks, files.

anyio's default limiter and asyncio's default executor both get as many as the tenant has, started on demand.

**The reserve.** A request may hold what others wait for in their threads: a ``yield`` dependency has entered and holds
a connection of a pool of ten, and a thousand requests stand in the pool's ``get``. If they had all threads, the one
that would free the connection could not run its endpoint, and everything would stand still for ever. So jobs of
requests that have had a thread before are let in beside the limit. Slot *n* of the reserve is for jobs with a *turn* of
at least *n* only (the first job of a request has turn 0), since what blocks at one turn is freed by a request that has
come further; with one slot for all, dependencies that nest would lock each other out again. Apart from that there is
one queue, and it is fair: a request that reads a file in ten thousand pieces gets ahead of nobody.

**Requests that are stopped** (`Threads.stop`). The task that waits for a thread is cancelled and gives its place back
at once, so that another thread takes it; nothing waits for the code that still runs. Its thread gets
`jumpstart.RequestTimeout` (`envelope/interrupt.py`), again and again, and with ``--on-deadline sever`` the socket that
it waits on is shut down (`envelope/sever.py`); as long as it runs on it is an overrun.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from jumpstart.context import RequestContext, current
from jumpstart_server import forks
from jumpstart_server.engine import PoolStats
from jumpstart_server.envelope.interrupt import Interrupts, Stopping
from jumpstart_server.envelope.sever import sever
from jumpstart_server.envelope.stacks import frames_of_threads, stack_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Slots of the reserve; turns beyond are not told apart. Enough for as many sync dependencies one behind the other, and
# little enough beside the limit: a request that reads files all the time may have one too.
LEAST_RESERVE, MOST_RESERVE = 8, 32

THREAD_GRACE = 1.0  # seconds that sync code may take to end after it was stopped; then it is an overrun

SEVERS = 3  # sockets of one piece of code; some try again, with a new connection

turn: ContextVar[int] = ContextVar("jumpstart_turn", default=0)  # how many threads this request has had


class Threads:
    """
    The threads for sync code of one event loop.

    Attributes:
        overruns: threads that run on although the time of their requests is over.
        is_ours: whether a descriptor is one of the server's, which are not shut down.
    """

    def __init__(self, limit: int, max_overruns: int = 16, *, may_sever: bool = False) -> None:
        """
        Args:
            max_overruns: so many threads that run on are replaced; each one more is one less for other requests.
            may_sever: the socket that a thread waits on is shut down when its request is stopped.
        """
        self._limit = limit
        self._max_overruns = max_overruns
        self._may_sever = may_sever
        self._meter = _Meter()
        self._limiter: Any = None
        self._jobs: dict[int, _Job] = {}  # by thread
        self._stopped: set[_Job] = set()
        self._executor = _Executor(limit, self._meter, self._jobs)
        self._live: Callable[[], int] = lambda: 0
        self.overruns = 0
        self._replaced = 0  # threads that run on after they were stopped, for whatever reason
        self.is_ours: Callable[[int], bool] = lambda _: False

    def install(self) -> None:
        """Become the running loop's. Before the first sync code of the app runs there."""
        asyncio.get_running_loop().set_default_executor(self._executor)
        try:
            from anyio._backends import _asyncio as backend

            self._limiter = TurnLimiter(self._limit, self._meter)
            backend._default_thread_limiter.set(self._limiter)
            self._live = lambda: len(backend._threadpool_workers.get(set()))
            _watch_jobs(backend.AsyncIOBackend, self._jobs)
        except (ImportError, AttributeError):
            pass
        if anyio.to_thread.current_default_thread_limiter() is not self._limiter:
            logger.warning("this anyio is unknown: sync code has no reserve of threads, and is not counted")
            self._limiter = anyio.to_thread.current_default_thread_limiter()
            self._limiter.total_tokens = self._limit

    def resize(self, limit: int) -> None:
        """Have as many; an app that has set the limiter's size itself, as FastAPI advises, keeps its own."""
        self._executor.resize(limit)
        if isinstance(self._limiter, TurnLimiter) and self._limiter.total_tokens == self._limit:
            self._limiter.resize(limit)
        self._limit = limit

    def stop(self, context: RequestContext) -> None:
        """Interrupt the code of a request whose ``is_stopped`` is set. In the event loop only, as the following."""
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.context is context and job.stopping is None:
                self._stopped.add(job)
                job.stop(now)
                self._sever(job)

    def stacks(self, context: RequestContext) -> list[str]:
        """Where the code of a request stands, for the log; a text for each thread."""
        frames = frames_of_threads()
        return [
            f"in a thread:\n{stack_of(frames.get(ident))}"
            for ident, job in list(self._jobs.items())
            if job.context is context
        ]

    @property
    def has_stopped(self) -> bool:
        """There is code that was stopped and has not ended: call `press`."""
        return bool(self._stopped)

    def press(self, now: float) -> None:
        """Interrupt again what was stopped and goes on; count it. To be called often."""
        if not self._stopped:
            return
        running = overruns = 0
        for job in list(self._stopped):
            if job.is_over:
                self._stopped.discard(job)
                if job.is_overrun:
                    logger.info("overrun over: a thread has ended %.1f s after it was stopped", now - job.since)
                continue
            if job.stopping is not None:
                job.stopping.press(now)
            self._sever(job)
            running += 1
            if now - job.since >= THREAD_GRACE and job.context is not None and job.context.is_stopped:
                overruns += 1
                if not job.is_overrun:
                    job.is_overrun = True
                    stack = stack_of(frames_of_threads().get(job.ident))
                    logger.warning("overrun: a thread runs on %.1f s after it was stopped\n%s", now - job.since, stack)
        self.overruns = overruns
        if running != self._replaced:
            self._replaced = running
            beyond = max(running - self._max_overruns, 0)
            if isinstance(self._limiter, TurnLimiter):
                self._limiter.withhold(beyond)
            in_executor = sum(self._executor.owns(job.ident) for job in self._stopped)
            self._executor.resize(max(self._limit + in_executor - beyond, 1))

    def _sever(self, job: _Job) -> None:
        if not self._may_sever or job.severed >= SEVERS:
            return
        with job.interrupts.hold(job) as runs:  # or the thread might wait on another job's socket by then
            what = sever(job.native_id, self.is_ours) if runs else None
        if what is not None:
            job.severed += 1
            logger.info("a thread of a request that was stopped waited on %s, which is shut down", what)

    def stats(self) -> PoolStats:
        """In the event loop only."""
        limiter, executor = self._limiter, self._executor
        if not isinstance(limiter, TurnLimiter):
            return PoolStats(limit=self._limit)
        return PoolStats(
            threads=self._live() + executor.started,
            busy=self._meter.busy,
            waiting=limiter.waiting + executor.waiting,
            peak=self._meter.peak,
            limit=int(min(limiter.total_tokens, 2**31)),  # an app may set it, to infinity too
            oldest_wait_s=max(limiter.oldest_wait_s(), executor.oldest_wait_s()),
            overruns=self.overruns,
        )


class _Job:
    """
    A piece of sync code, in whatever thread it runs.

    Attributes:
        is_over: it has returned or raised.
        stopping: set when its request was stopped.
        since: when that was.
        severed: how many sockets were shut down that it waited on.
    """

    __slots__ = (
        "_function",
        "_jobs",
        "context",
        "ident",
        "interrupts",
        "is_over",
        "is_overrun",
        "native_id",
        "severed",
        "since",
        "stopping",
    )

    def __init__(self, context: RequestContext | None, function: Callable[..., Any], jobs: dict[int, _Job]) -> None:
        self.context = context
        self.is_over = self.is_overrun = False
        self.stopping: Stopping | None = None
        self.since = 0.0
        self.severed = 0
        self._function = function
        self._jobs = jobs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        interrupts: Interrupts | None = getattr(_own, "interrupts", None)
        if interrupts is None:
            interrupts = _own.interrupts = Interrupts()
        self.interrupts = interrupts
        self.ident = ident = threading.get_ident()
        self.native_id = threading.get_native_id()
        self._jobs[ident] = self
        context = self.context
        began = time.thread_time() if context is not None and context.warmup else 0.0
        try:
            return interrupts.call(self, functools.partial(self._function, *args, **kwargs))
        finally:
            self.is_over = True
            if began and context is not None:  # a shadow request has a budget
                context.thread_cpu_s += time.thread_time() - began
            if forks.in_child:
                forks.end_child(sys.exc_info()[1])
            del self._jobs[ident]

    def stop(self, now: float) -> None:
        """From the event loop."""
        self.since = now
        self.stopping = Stopping(self.interrupts, self)
        self.stopping.press(now)


_own = threading.local()


def _watch_jobs(backend: Any, jobs: dict[int, _Job]) -> None:
    """Have sync code that anyio's threads run for requests known in *jobs*, in place of who was told before."""
    original = getattr(backend.run_sync_in_worker_thread, "jumpstart_original", backend.run_sync_in_worker_thread)

    @functools.wraps(original)
    def run_sync(
        cls: Any, func: Callable[..., Any], args: Any, abandon_on_cancel: bool = False, limiter: Any = None
    ) -> Any:
        context = current()
        if context is not None:
            func = _Job(context, func, jobs)
        return original(func, args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)

    run_sync.jumpstart_original = original  # type: ignore[attr-defined]  # so that it is not wrapped again and again
    backend.run_sync_in_worker_thread = classmethod(run_sync)


class _Meter:
    """Counts what is busy. From any thread."""

    def __init__(self) -> None:
        self.busy = 0
        self.peak = 0
        self.lock = threading.Lock()

    def begin(self) -> None:
        with self.lock:
            self.busy += 1
            self.peak = max(self.peak, self.busy)

    def end(self) -> None:
        with self.lock:
            self.busy -= 1


class _Waiter:
    __slots__ = ("event", "number", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.since = time.monotonic()
        self.event = asyncio.Event()


class TurnLimiter(anyio.CapacityLimiter):
    """
    anyio's limiter with a reserve; see the module. For one event loop only, but any thread may read `waiting`.

    Attributes:
        waiting: how many wait for a thread.
    """

    def __new__(cls, total_tokens: float, meter: _Meter | None = None) -> Self:
        return object.__new__(cls)

    def __init__(self, total_tokens: float, meter: _Meter | None = None) -> None:
        self.waiting = 0
        self._total = total_tokens
        self._withheld = 0
        self._meter = meter or _Meter()
        self._last = _last_slot(total_tokens)
        self._slots: dict[object, int] = {}  # borrower → slot of the reserve, 0 for none
        self._ordinary = 0  # borrowers with slot 0
        self._reserve: list[object] = [None] * (self._last + 1)  # who has slot n; the first is not used
        self._queues: list[OrderedDict[object, _Waiter]] = [OrderedDict() for _ in range(self._last + 1)]  # by turn
        self._numbers = itertools.count()

    async def __aenter__(self) -> None:
        await self.acquire_on_behalf_of(asyncio.current_task())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release_on_behalf_of(asyncio.current_task())

    @property
    def total_tokens(self) -> float:
        return self._total

    @total_tokens.setter
    def total_tokens(self, value: float) -> None:
        if not isinstance(value, int) and value != float("inf"):
            raise TypeError("total_tokens must be an int or math.inf")
        if value < 0:
            raise ValueError("total_tokens must be >= 0")
        self._total = value
        self._fill()

    def withhold(self, tokens: int) -> None:
        """Lend so many less, and one at least."""
        self._withheld = tokens
        self._fill()

    def _has_room(self) -> bool:
        if not self._withheld:
            return self._ordinary < self._total
        return self._ordinary < max(self._total - self._withheld, min(self._total, 1))

    def _fill(self) -> None:
        while self._has_room() and self._hand_on(0):
            pass

    def resize(self, total_tokens: int) -> None:
        """Have so many, and a reserve that goes with them; it never becomes smaller."""
        more = _last_slot(total_tokens) - self._last
        if more > 0:
            self._reserve += [None] * more
            self._queues += [OrderedDict() for _ in range(more)]
            self._last += more
        self.total_tokens = total_tokens

    @property
    def borrowed_tokens(self) -> int:
        return len(self._slots)

    @property
    def available_tokens(self) -> float:
        return max(0, self._total - self._ordinary)

    def acquire_nowait(self) -> None:
        self.acquire_on_behalf_of_nowait(asyncio.current_task())

    def acquire_on_behalf_of_nowait(self, borrower: object) -> None:
        if borrower in self._slots:
            raise RuntimeError("this borrower is already holding one of this CapacityLimiter's tokens")
        # A free place has no waiter who may have it: who gives one back hands it on.
        own = min(turn.get(), self._last)
        if self._has_room():
            self._lend(borrower, 0)
        elif slot := next((n for n in range(own, 0, -1) if self._reserve[n] is None), 0):
            self._lend(borrower, slot)
        else:
            raise anyio.WouldBlock
        turn.set(own + 1)

    async def acquire(self) -> None:
        await self.acquire_on_behalf_of(asyncio.current_task())

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            self.acquire_on_behalf_of_nowait(borrower)
        except anyio.WouldBlock:
            pass
        else:
            return
        own = min(turn.get(), self._last)
        queue = self._queues[own]
        waiter = queue[borrower] = _Waiter(next(self._numbers))
        self.waiting += 1
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.event.is_set():
                self.release_on_behalf_of(borrower)
            else:
                del queue[borrower]
                self.waiting -= 1
            raise
        turn.set(own + 1)

    def release(self) -> None:
        self.release_on_behalf_of(asyncio.current_task())

    def release_on_behalf_of(self, borrower: object) -> None:
        slot = self._slots.pop(borrower, None)
        if slot is None:
            raise RuntimeError("this borrower isn't holding any of this CapacityLimiter's tokens")
        self._meter.end()
        if slot:
            self._reserve[slot] = None
            if self.waiting:
                self._hand_on(slot)
        else:
            self._ordinary -= 1
            if self.waiting and self._has_room():
                self._hand_on(0)

    def statistics(self) -> anyio.CapacityLimiterStatistics:
        return anyio.CapacityLimiterStatistics(len(self._slots), self._total, tuple(self._slots), self.waiting)

    def oldest_wait_s(self) -> float:
        """How long the first in the queue has waited; 0 when none waits."""
        heads = [next(iter(queue.values())).since for queue in self._queues if queue]
        return time.monotonic() - min(heads) if heads else 0.0

    def _lend(self, borrower: object, slot: int) -> None:
        self._slots[borrower] = slot
        if slot:
            self._reserve[slot] = borrower
        else:
            self._ordinary += 1
        self._meter.begin()

    def _hand_on(self, slot: int) -> bool:
        """Give a place to who has waited longest among those that may have it; whether there was any."""
        first: OrderedDict[object, _Waiter] | None = None
        number = -1
        for queue in self._queues[slot:]:
            if queue and (first is None or next(iter(queue.values())).number < number):
                first, number = queue, next(iter(queue.values())).number
        if first is None:
            return False
        borrower, waiter = first.popitem(last=False)
        self.waiting -= 1
        self._lend(borrower, slot)
        waiter.event.set()
        return True


def _last_slot(total_tokens: float) -> int:
    """Number of the last slot of the reserve."""
    return int(max(LEAST_RESERVE, min(MOST_RESERVE, total_tokens // 4)))


class _Executor(ThreadPoolExecutor):
    """
    A thread pool that counts.

    Attributes:
        started: threads, which live as long as the pool.
    """

    def __init__(self, limit: int, meter: _Meter, jobs: dict[int, _Job]) -> None:
        super().__init__(limit, thread_name_prefix="jumpstart-executor", initializer=self._count_thread)
        self.started = 0
        self._jobs = jobs
        self._meter = meter
        self._waiting: dict[int, float] = {}  # number of a job → when it came, in the order of their coming
        self._numbers = itertools.count()

    def resize(self, limit: int) -> None:
        """Have so many at most from now on; those that live beyond it stay."""
        self._max_workers = limit

    def owns(self, ident: int) -> bool:
        """Whether that thread is one of the pool's."""
        return any(thread.ident == ident for thread in list(self._threads))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def oldest_wait_s(self) -> float:
        """As of `TurnLimiter.oldest_wait_s`. From any thread."""
        try:
            return time.monotonic() - next(iter(self._waiting.values()))
        except (StopIteration, RuntimeError):  # none, or it changed meanwhile: then they do not wait long
            return 0.0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        number = next(self._numbers)
        self._waiting[number] = time.monotonic()
        try:
            future = super().submit(self._work, number, _Job(current(), fn, self._jobs), args, kwargs)
        except BaseException:
            del self._waiting[number]
            raise
        future.add_done_callback(lambda _: self._waiting.pop(number, None))  # cancelled before its turn
        return future

    def _work(self, number: int, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        self._waiting.pop(number, None)
        self._meter.begin()
        try:
            return fn(*args, **kwargs)
        finally:
            self._meter.end()

    def _count_thread(self) -> None:
        with self._meter.lock:
            self.started += 1
