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
"""

from __future__ import annotations

import asyncio
import itertools
import logging
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

from jumpstart_server.engine import PoolStats

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Slots of the reserve; turns beyond are not told apart. Enough for as many sync dependencies one behind the other, and
# little enough beside the limit: a request that reads files all the time may have one too.
LEAST_RESERVE, MOST_RESERVE = 8, 32

turn: ContextVar[int] = ContextVar("jumpstart_turn", default=0)  # how many threads this request has had


class Threads:
    """The threads for sync code of one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._meter = _Meter()
        self._limiter: Any = None
        self._executor = _Executor(limit, self._meter)
        self._live: Callable[[], int] = lambda: 0

    def install(self) -> None:
        """Become the running loop's. Before the first sync code of the app runs there."""
        asyncio.get_running_loop().set_default_executor(self._executor)
        try:
            from anyio._backends import _asyncio as backend

            self._limiter = TurnLimiter(self._limit, self._meter)
            backend._default_thread_limiter.set(self._limiter)
            self._live = lambda: len(backend._threadpool_workers.get(set()))
        except (ImportError, AttributeError):
            pass
        if anyio.to_thread.current_default_thread_limiter() is not self._limiter:
            logger.warning("this anyio is unknown: sync code has no reserve of threads, and is not counted")
            self._limiter = anyio.to_thread.current_default_thread_limiter()
            self._limiter.total_tokens = self._limit

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
        )


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
        self._meter = meter or _Meter()
        self._last = int(max(LEAST_RESERVE, min(MOST_RESERVE, total_tokens // 4)))  # number of the last slot
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
        while self._ordinary < self._total and self._hand_on(0):
            pass

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
        if self._ordinary < self._total:
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
            if self.waiting and self._ordinary < self._total:
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


class _Executor(ThreadPoolExecutor):
    """
    A thread pool that counts.

    Attributes:
        started: threads, which live as long as the pool.
    """

    def __init__(self, limit: int, meter: _Meter) -> None:
        super().__init__(limit, thread_name_prefix="jumpstart-executor", initializer=self._count_thread)
        self.started = 0
        self._meter = meter
        self._waiting: dict[int, float] = {}  # number of a job → when it came, in the order of their coming
        self._numbers = itertools.count()

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
            future = super().submit(self._work, number, fn, args, kwargs)
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
