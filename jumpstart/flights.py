"""
One computation at a time for each key: who computes, who waits, and what becomes of those who waited.

A *flight* is a computation under way. Whoever finds none leads one; the others wait until it has landed. A leader that
is cancelled or stopped takes nobody along: one of those who waited leads the next. Who has seen newer real-time values
than the flight has read does not take its result. Renewals in the background are flights too, without a caller.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

from jumpstart import renewals, shared_values
from jumpstart.caches import MISSING, WAIT_SLICE, Cache, Stored
from jumpstart.context import cold_event
from jumpstart.dependencies import Collector, Versions, collect, collecting, has_seen_newer, note_current, note_used

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

LOST_CHECK = 0.5  # seconds between looks whether another event loop, whose computation is waited for, still runs
LOOP_RENEWALS = 8  # at a time, of each event loop


class Flight:
    """*owner* is the thread or task that computes, *epoch* that of the cache when it began."""

    __slots__ = ("collector", "epoch", "error", "owner", "reads", "value")

    def __init__(self, owner: object, epoch: int) -> None:
        self.owner = owner
        self.epoch = epoch
        self.collector: Collector | None = None
        self.reads: Versions = {}
        self.value: Any = MISSING
        self.error: Exception | None = None

    def is_mine(self, me: object) -> bool:
        """Whether the current code is part of the computation, which may not wait for itself."""
        if self.owner == me:
            return True
        collector = collecting()
        return collector is not None and self.collector is not None and collector.is_inside(self.collector)


def _outcome(cache: Cache, flight: Flight) -> Any:
    """What a caller gets who has waited; `MISSING`: nothing, or nothing that it may have."""
    if flight.error is not None:
        cache.count_wait()
        raise flight.error
    if flight.value is MISSING or (flight.reads and has_seen_newer(flight.reads)):
        return MISSING
    if flight.reads:
        note_used(flight.reads)
    cache.count_wait()
    return flight.value


def _land(cache: Cache, key: Hashable, flight: Flight, value: Any, age: float = 0.0) -> None:
    """Keep what was computed."""
    flight.value = value
    if flight.reads:
        renewals.follow(cache, flight.reads)
    cache.store(key, value, age, flight.reads, flight.epoch)


def _catch_up(cache: Cache, key: Hashable) -> None:
    """Begin a renewal if what a value stands on has changed meanwhile. After the flight, which it would meet."""
    stored = cache.claim_outdated(key)
    if stored is not None and not cache.renew(key, stored):
        cache.renewal_not_begun(stored)


def _renewal_failed(cache: Cache, stored: Stored, error: BaseException) -> None:
    pause = cache.renewal_failed(stored)
    logger.warning(
        "%s: a value could not be renewed, the old one is kept; next try after %g s: %s: %s",
        *(cache.name, pause, type(error).__name__, error),
    )


class _Flights(Protocol):
    def reset_after_fork(self) -> None: ...


_all: weakref.WeakSet[_Flights] = weakref.WeakSet()


def _after_fork() -> None:
    for flights in list(_all):
        flights.reset_after_fork()


os.register_at_fork(after_in_child=_after_fork)


class _Landed(Flight):
    """A flight that threads wait for."""

    __slots__ = ("landed",)

    def __init__(self, owner: object, epoch: int) -> None:
        super().__init__(owner, epoch)
        self.landed = threading.Event()


class ThreadFlights:
    """The flights of a plain function."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._flights: dict[Hashable, _Landed] = {}
        self._lock = threading.RLock()
        _all.add(self)

    def reset_after_fork(self) -> None:
        """Other threads stay in the parent, and so does what they compute."""
        me = threading.get_ident()
        self._lock = threading.RLock()
        self._flights = {key: flight for key, flight in self._flights.items() if flight.owner == me}
        self._cache.reset_after_fork()

    def get(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a call that `Cache.lookup` had none for."""
        while True:
            value, due = self._cache.lookup_stale(key)
            if due is not None and not self.renew(key, due):
                self._cache.renewal_not_begun(due)
            if value is MISSING:
                value = self._compute(key, args, kwargs)
            if value is not MISSING:
                return value

    def renew(self, key: Hashable, stored: Stored) -> bool:
        """Begin a renewal in the background; False when there are too many already."""
        return renewals.pool.submit(functools.partial(self._renew, key, stored))

    def _renew(self, key: Hashable, stored: Stored) -> None:
        call = self._cache.arguments(key)
        if call is None or not self._cache.is_due(key, stored):
            return
        try:
            if stored.reads:
                note_current(stored.reads)  # or the old results of other cached functions would be used
            if self._compute(key, *call, is_renewal=True) is MISSING:
                self._cache.renewal_not_begun(stored)  # a call computes already; this is for the case that it fails
        except BaseException as error:  # sys.exit() in a function ends no thread of ours
            _renewal_failed(self._cache, stored, error)

    def _compute(
        self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_renewal: bool = False
    ) -> Any:
        """Compute or wait; `MISSING` when what was waited for gave nothing. A renewal does not wait."""
        cache = self._cache
        me = threading.get_ident()
        flight: _Landed | None = None
        leads = False
        value = MISSING
        try:
            with self._lock:
                flight = self._flights.get(key)
                if flight is None or flight.epoch != cache.epoch:
                    if not is_renewal:
                        value = cache.lookup(key)  # it may have landed since the caller looked
                        if value is not MISSING:
                            return value
                    flight = _Landed(me, cache.epoch)
                    leads = True
                    self._flights[key] = flight
            if leads or flight.is_mine(me):
                value = self._run(key, args, kwargs, flight, leads, is_renewal)
        finally:
            if leads and flight is not None:
                # Twice: an exception that a deadline throws into this thread may cut the first short, and comes once.
                try:
                    self._end(key, flight)
                finally:
                    self._end(key, flight)
        if value is not MISSING:
            if leads and flight.reads:
                _catch_up(cache, key)
            return value
        if is_renewal:
            return MISSING
        while not flight.landed.wait(WAIT_SLICE):
            pass
        return _outcome(cache, flight)

    def _end(self, key: Hashable, flight: _Landed) -> None:
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
        flight.landed.set()

    def _run(self, key: Hashable, args: Any, kwargs: Any, flight: Flight, leads: bool, is_renewal: bool) -> Any:
        cache = self._cache
        if not leads:
            flight = Flight(flight.owner, cache.epoch)  # a recursive call with the same arguments
        cold_event("cache", cache.qualname)
        if cache.shared:
            found = shared_values.load(cache, args, kwargs)
            if found is not None:
                cache.count_load(is_renewal=is_renewal)
                _land(cache, key, flight, found.value, found.age)
                return found.value
        cache.count_computation(is_renewal=is_renewal)
        try:
            with collect() as collector:
                flight.collector = collector
                value = cache.function(*args, **kwargs)
        except Exception as error:
            flight.error = error
            cache.count_error()
            raise
        flight.reads = collector.reads
        _land(cache, key, flight, value)
        if cache.shared:
            shared_values.save(cache, args, kwargs, value, is_dependent=bool(flight.reads))
        return value


def sync_wrapper(cache: Cache) -> Callable[..., Any]:
    """Return the function that takes the place of a plain one."""
    flights = ThreadFlights(cache)
    cache.renew = flights.renew
    lookup, get, key_of, has_instance = cache.lookup, flights.get, cache.key, cache.holds_first_weakly
    reference = weakref.ref

    @functools.wraps(cache.function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        key: Hashable
        if kwargs or not args:
            key = key_of(args, kwargs)
        elif has_instance:
            try:
                key = (reference(args[0]), *args[1:])  # `Cache.key`, without the call
            except TypeError:
                key = args
        else:
            key = args
        value = lookup(key)
        return get(key, args, kwargs) if value is MISSING else value

    return wrapper


class _Awaited(Flight):
    """A flight that tasks wait for, of this event loop or another."""

    __slots__ = ("loop", "waiters")

    def __init__(self, owner: object, epoch: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(owner, epoch)
        self.loop = loop
        self.waiters: list[asyncio.Future[None]] = []

    def is_lost(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is of another event loop than *loop*, and that one has stopped."""
        return self.loop is not loop and not _runs(self.loop)


def _runs(loop: asyncio.AbstractEventLoop) -> bool:
    return loop.is_running() and not loop.is_closed()


class TaskFlights:
    """The flights of a coroutine function, on whatever event loops it is called."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._flights: dict[Hashable, _Awaited] = {}
        self._lock = threading.RLock()
        self._last_loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
        self._renewals: set[asyncio.Task[None]] = set()
        self._limits: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        _all.add(self)

    def reset_after_fork(self) -> None:
        """Event loops stay in the parent, and so does what they compute."""
        self._lock = threading.RLock()
        self._flights = {}
        self._renewals = set()
        self._cache.reset_after_fork()

    async def get(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a call that `Cache.lookup` had none for."""
        import asyncio

        self._last_loop = weakref.ref(asyncio.get_running_loop())
        while True:
            value, due = self._cache.lookup_stale(key)
            if due is not None and not self.renew(key, due):
                self._cache.renewal_not_begun(due)
            if value is MISSING:
                value = await self._compute(key, args, kwargs)
            if value is not MISSING:
                return value

    def renew(self, key: Hashable, stored: Stored) -> bool:
        """Begin a renewal on the event loop that last had to do with the function; drop the entry if it has stopped."""
        loop = self._last_loop()
        if loop is not None and _runs(loop):
            try:
                loop.call_soon_threadsafe(self._begin, key, stored, context=contextvars.Context())
                return True
            except RuntimeError:
                pass  # it was closed just now
        self._cache.drop(key, stored)
        return True

    def _begin(self, key: Hashable, stored: Stored) -> None:
        import asyncio

        task = asyncio.get_running_loop().create_task(self._renew(key, stored))
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    async def _renew(self, key: Hashable, stored: Stored) -> None:
        import asyncio

        limit = self._limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(LOOP_RENEWALS))
        try:
            async with limit:
                call = self._cache.arguments(key)
                if call is None or not self._cache.is_due(key, stored):
                    return
                if stored.reads:
                    note_current(stored.reads)
                if await self._compute(key, *call, is_renewal=True) is MISSING:
                    self._cache.renewal_not_begun(stored)
        except (asyncio.CancelledError, GeneratorExit):
            self._cache.renewal_not_begun(stored)  # the event loop ends; another may have more luck
            raise
        except BaseException as error:  # sys.exit() in a function ends no event loop
            _renewal_failed(self._cache, stored, error)

    async def _compute(
        self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_renewal: bool = False
    ) -> Any:
        """As `ThreadFlights._compute`."""
        import asyncio

        cache = self._cache
        loop = asyncio.get_running_loop()
        me = asyncio.current_task()
        leads = False
        waiter: asyncio.Future[None] | None = None
        with self._lock:
            flight = self._flights.get(key)
            if flight is None or flight.epoch != cache.epoch or flight.is_lost(loop):
                if not is_renewal:
                    value = cache.lookup(key)
                    if value is not MISSING:
                        return value
                flight = self._flights[key] = _Awaited(me, cache.epoch, loop)
                leads = True
            elif not flight.is_mine(me):
                if is_renewal:
                    return MISSING
                waiter = loop.create_future()
                flight.waiters.append(waiter)
        if waiter is None:
            try:
                value = await self._run(key, args, kwargs, flight, leads, is_renewal)
            finally:
                if leads:
                    self._end(key, flight)
            if leads and flight.reads:
                _catch_up(cache, key)
            return value
        if flight.loop is loop:
            await waiter
        else:
            while not (await asyncio.wait([waiter], timeout=LOST_CHECK))[0]:
                if flight.is_lost(loop):
                    return MISSING
        return _outcome(cache, flight)

    def _end(self, key: Hashable, flight: _Awaited) -> None:
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
            waiters = flight.waiters
        # Through the loops, the own one too: this may be a coroutine that is closed where none runs.
        for loop in {waiter.get_loop() for waiter in waiters}:
            mine = [waiter for waiter in waiters if waiter.get_loop() is loop]
            with contextlib.suppress(RuntimeError):  # it is closed: nobody waits any more
                loop.call_soon_threadsafe(_wake_all, mine)

    async def _run(self, key: Hashable, args: Any, kwargs: Any, flight: Flight, leads: bool, is_renewal: bool) -> Any:
        cache = self._cache
        if not leads:
            flight = Flight(flight.owner, cache.epoch)
        cold_event("cache", cache.qualname)
        if cache.shared:
            import asyncio

            found = await asyncio.to_thread(shared_values.load, cache, args, kwargs)
            if found is not None:
                cache.count_load(is_renewal=is_renewal)
                _land(cache, key, flight, found.value, found.age)
                return found.value
        cache.count_computation(is_renewal=is_renewal)
        try:
            with collect() as collector:
                flight.collector = collector
                value = await cache.function(*args, **kwargs)
        except Exception as error:
            flight.error = error
            cache.count_error()
            raise
        flight.reads = collector.reads
        _land(cache, key, flight, value)
        if cache.shared:
            await asyncio.to_thread(shared_values.save, cache, args, kwargs, value, is_dependent=bool(flight.reads))
        return value


def _wake_all(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def async_wrapper(cache: Cache) -> Callable[..., Awaitable[Any]]:
    """Return the coroutine function that takes the place of one."""
    flights = TaskFlights(cache)
    cache.renew = flights.renew
    lookup, get, key_of, has_instance = cache.lookup, flights.get, cache.key, cache.holds_first_weakly
    reference = weakref.ref

    @functools.wraps(cache.function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        key: Hashable
        if kwargs or not args:
            key = key_of(args, kwargs)
        elif has_instance:
            try:
                key = (reference(args[0]), *args[1:])  # `Cache.key`, without the call
            except TypeError:
                key = args
        else:
            key = args
        value = lookup(key)
        return await get(key, args, kwargs) if value is MISSING else value

    return wrapper
