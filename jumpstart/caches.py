"""
`cached`: a cache for functions whose content a profile may carry.

`Cache` decides (bounds, age, what is a hit) under one lock and never calls the function; the two wrappers, sync and
async, compute, one at a time per key. Everything here works without the server.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload

from jumpstart.context import cold_event

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Snapshot = Literal["value", "key"]
Clock = Callable[[], float]

WAIT_SLICE = 0.1  # seconds; a thread that waits in one long call cannot be stopped when its request is out of time

_KEYWORDS = object()  # separates positional from keyword arguments in a key
_MISSING: Any = object()


class CacheInfo(NamedTuple):
    """As `functools.lru_cache` reports it. A call that waited for another call's result counts as a hit."""

    hits: int
    misses: int
    maxsize: int | None
    currsize: int


class CacheEntry(NamedTuple):
    """
    One entry as a recorder sees it.

    *age* is in seconds since the value was computed; *stored* is the same object as long as the entry is the same, and
    can be referred to weakly.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    age: float
    stored: object


class CachedFunction(Protocol[P, R_co]):
    """What `cached` returns: a function, or a coroutine function, with the cache's controls."""

    @property
    def __wrapped__(self) -> Callable[P, R_co]: ...
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CachedFunction[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R_co]: ...
    def cache_info(self) -> CacheInfo: ...
    def cache_clear(self) -> None: ...


class _Stored:
    __slots__ = ("__weakref__", "since", "value")

    def __init__(self, value: Any, since: float) -> None:
        self.value = value
        self.since = since  # monotonic


class Cache:
    """
    The entries of one function, least recently used first. Any thread may call any method.

    Attributes:
        name: ``module:qualname``.
        function: what computes the values.
        wrapper: what `cached` returned for it; calling it fills the cache. Set once, by `cached`.
        depends: what snapshots stand on: the source of the function's module **as it was loaded**. Empty when there
            is none, and then no snapshot may be made. Set once, by `cached`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        ttl: float | None = None,
        maxsize: int | None = 1024,
        snapshot: Snapshot | None = None,
        version: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is {ttl!r}; it must be a number of seconds above 0, or None")
        if maxsize is not None and maxsize < 1:
            raise ValueError(f"maxsize is {maxsize!r}; it must be 1 or more, or None")
        if snapshot not in (None, "value", "key"):
            raise ValueError(f"snapshot is {snapshot!r}; it must be 'value', 'key' or None")
        self.function = function
        self.wrapper: Callable[..., Any] = function
        self.depends: dict[str, str] = {}
        self.qualname: str = getattr(function, "__qualname__", repr(function))
        self.name = f"{getattr(function, '__module__', '')}:{self.qualname}"
        self.ttl = ttl
        self.maxsize = maxsize
        self.snapshot = snapshot
        self.version = version
        self.is_async = inspect.iscoroutinefunction(function)
        self._clock = clock
        # Re-entrant, as that of functools is: the arguments' __eq__ may call cached functions.
        self._lock = threading.RLock()
        self._entries: OrderedDict[Hashable, _Stored] = OrderedDict()
        self._hits = 0
        self._misses = 0
        self._sweep_after = 64

    def lookup(self, key: Hashable) -> Any:
        """Return the value, or `_MISSING`. Counts a hit, never a miss: `missed` does."""
        with self._lock:
            stored = self._entries.get(key)
            if stored is None or self._expired(stored):
                return _MISSING
            self._entries.move_to_end(key)
            self._hits += 1
            return stored.value

    def missed(self) -> None:
        with self._lock:
            self._misses += 1

    def store(self, key: Hashable, value: Any, age: float = 0.0) -> None:
        """Enter *value*, computed *age* seconds ago."""
        with self._lock:
            self._entries[key] = _Stored(value, self._clock() - age)
            self._entries.move_to_end(key)
            if self.maxsize is not None:
                while len(self._entries) > self.maxsize:
                    self._entries.popitem(last=False)
            self._sweep_after -= 1
            if self._sweep_after <= 0:
                self._sweep()

    def _expired(self, stored: _Stored) -> bool:
        return self.ttl is not None and self._clock() - stored.since >= self.ttl

    def _sweep(self) -> None:
        """Drop expired entries: once per as many stores as there are entries, so that it stays cheap."""
        if self.ttl is not None:
            for key in [key for key, stored in self._entries.items() if self._expired(stored)]:
                del self._entries[key]
        self._sweep_after = max(64, len(self._entries))

    def clear(self) -> None:
        """Drop all entries and reset the counts."""
        with self._lock:
            self._entries.clear()
            self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        """Return the counts; expired entries that nobody asked for since are among `currsize`."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, self.maxsize, len(self._entries))

    def entries(self, *, expired: bool = False, limit: int | None = None) -> list[CacheEntry]:
        """
        Return the entries, least recently used first; those past their ttl only when asked for.

        With *limit* only that many, the most recently used.
        """
        with self._lock:
            now = self._clock()
            wanted = (
                (key, stored) for key, stored in reversed(self._entries.items()) if expired or not self._expired(stored)
            )
            newest = list(itertools.islice(wanted, limit))
        return [
            CacheEntry(*_arguments_of(key), stored.value, now - stored.since, stored) for key, stored in newest[::-1]
        ]

    def restore(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, age: float) -> bool:
        """
        Enter a value that another process computed *age* seconds ago.

        Returns False, and changes nothing, when it is older than the ttl or the entry is there already.
        """
        if self.ttl is not None and age >= self.ttl:
            return False
        key = make_key(args, kwargs)
        with self._lock:
            stored = self._entries.get(key)
            if stored is not None and not self._expired(stored):
                return False
            self.store(key, value, max(age, 0.0))
            return key in self._entries


_registry: weakref.WeakValueDictionary[str, Cache] = weakref.WeakValueDictionary()
_registry_lock = threading.Lock()


def registered() -> dict[str, Cache]:
    """Return the caches of this process by ``module:qualname``; functions inside functions are not among them."""
    with _registry_lock:
        return dict(_registry.items())


def _register(cache: Cache) -> None:
    if "<locals>" not in cache.qualname:
        if cache.snapshot is not None:
            from jumpstart.runtime import loaded_dependency  # not at the top: scripts without snapshots do without

            # Now, while the module is being imported: its file may be another one when the entries are recorded.
            cache.depends = loaded_dependency(cache.name.partition(":")[0])
        with _registry_lock:
            _registry[cache.name] = cache
    elif cache.snapshot is not None:
        logger.warning("%s is defined inside a function and cannot be found by name: no snapshots of it", cache.name)


def make_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the key of a call; the order of keyword arguments does not matter. Hashing it may raise TypeError."""
    return (*args, _KEYWORDS, *sorted(kwargs.items())) if kwargs else args


def _arguments_of(key: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for position, part in enumerate(key):
        if part is _KEYWORDS:
            return key[:position], dict(key[position + 1 :])
    return key, {}


@overload
def cached(
    fn: None = None,
    *,
    ttl: float | None = None,
    maxsize: int | None = 1024,
    snapshot: Snapshot | None = None,
    version: str = "",
    clock: Clock = time.monotonic,
) -> Callable[[Callable[P, R]], CachedFunction[P, R]]: ...
@overload
def cached(
    fn: Callable[P, R],
    *,
    ttl: float | None = None,
    maxsize: int | None = 1024,
    snapshot: Snapshot | None = None,
    version: str = "",
    clock: Clock = time.monotonic,
) -> CachedFunction[P, R]: ...
def cached(
    fn: Callable[..., Any] | None = None,
    *,
    ttl: float | None = None,
    maxsize: int | None = 1024,
    snapshot: Snapshot | None = None,
    version: str = "",
    clock: Clock = time.monotonic,
) -> Any:
    """
    Cache a function's results, and let a profile carry them to the next process.

    Works on functions, methods and coroutine functions; arguments must be hashable. Calls with the same arguments that
    come while one is computing wait for its result. Exceptions are not cached; those who waited get the same one.
    A call that is cancelled or stopped while it computes takes nobody along: one of those who waited computes instead.

    Args:
        ttl: seconds for which a value is good, counted on from its computation across restarts; None: for ever.
        maxsize: how many entries to keep; the least recently used goes first. None: all.
        snapshot: ``"value"`` puts arguments and results (pickled) into profiles, ``"key"`` the arguments only, and the
            results are computed anew at boot; None: nothing.
        version: change it when stored results are no longer right although the function's module is unchanged.
        clock: monotonic seconds, for tests.

    Raises:
        ValueError: an option is out of range.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        cache = Cache(function, ttl=ttl, maxsize=maxsize, snapshot=snapshot, version=version, clock=clock)
        wrapper: Any = _async_wrapper(cache) if cache.is_async else _sync_wrapper(cache)
        wrapper.cache_info = cache.info
        wrapper.cache_clear = cache.clear
        wrapper.__jumpstart_cache__ = cache  # and keeps it alive in the registry
        cache.wrapper = wrapper
        _register(cache)
        return wrapper

    return decorate if fn is None else decorate(fn)


_Waiter = TypeVar("_Waiter")


class _Flight(Generic[_Waiter]):
    """A computation under way. *owner* is the thread or task that computes; *landed* what the others wait for."""

    __slots__ = ("error", "landed", "owner", "value")

    def __init__(self, owner: object, landed: _Waiter) -> None:
        self.owner = owner
        self.landed = landed
        self.value: Any = _MISSING
        self.error: Exception | None = None


def _sync_wrapper(cache: Cache) -> Callable[..., Any]:
    function = cache.function
    flights: dict[Hashable, _Flight[threading.Event]] = {}
    lock = threading.RLock()

    def land(key: Hashable, flight: _Flight[threading.Event]) -> None:
        with lock:
            if flights.get(key) is flight:
                del flights[key]
        flight.landed.set()

    def compute(key: Hashable, args: Any, kwargs: Any) -> Any:
        """Compute or wait; `_MISSING` when the computation waited for gave neither value nor error."""
        me = threading.get_ident()
        flight: _Flight[threading.Event] | None = None
        leads = False
        try:
            with lock:
                flight = flights.get(key)
                if flight is None:
                    value = cache.lookup(key)  # it may have landed since the caller looked
                    if value is not _MISSING:
                        return value
                    flight = _Flight(me, threading.Event())
                    leads = True
                    flights[key] = flight
            if leads or flight.owner == me:  # a recursive call with the same arguments may not wait for itself
                cache.missed()
                cold_event("cache", cache.qualname)
                try:
                    flight.value = value = function(*args, **kwargs)
                except Exception as error:
                    flight.error = error
                    raise
                cache.store(key, value)
                return value
        finally:
            if leads and flight is not None:
                # Twice: an exception that a deadline throws into this thread may cut the first short, and comes once.
                try:
                    land(key, flight)
                finally:
                    land(key, flight)
        while not flight.landed.wait(WAIT_SLICE):
            pass
        return _result(cache, flight)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        key = make_key(args, kwargs) if kwargs else args
        value = cache.lookup(key)
        while value is _MISSING:
            value = compute(key, args, kwargs)
        return value

    return wrapper


def _async_wrapper(cache: Cache) -> Callable[..., Awaitable[Any]]:
    import asyncio  # not at the top: it is a third of a small script's start, and sync functions do without

    function = cache.function
    # By loop as well: what belongs to one event loop cannot be awaited in another.
    flights: dict[tuple[asyncio.AbstractEventLoop, Hashable], _Flight[asyncio.Event]] = {}

    async def compute(key: Hashable, args: Any, kwargs: Any) -> Any:
        place = (asyncio.get_running_loop(), key)
        me = asyncio.current_task()
        flight = flights.get(place)
        if flight is not None and flight.owner is not me:
            await flight.landed.wait()
            return _result(cache, flight)
        leads = flight is None
        if flight is None:
            flights[place] = flight = _Flight(me, asyncio.Event())
        try:
            cache.missed()
            cold_event("cache", cache.qualname)
            flight.value = value = await function(*args, **kwargs)
            cache.store(key, value)
            return value
        except Exception as error:
            flight.error = error
            raise
        finally:
            if leads:
                del flights[place]
                flight.landed.set()

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        key = make_key(args, kwargs) if kwargs else args
        value = cache.lookup(key)
        while value is _MISSING:
            value = await compute(key, args, kwargs)
        return value

    return wrapper


def _result(cache: Cache, flight: _Flight[Any]) -> Any:
    if flight.error is not None:
        raise flight.error
    if flight.value is not _MISSING:
        with cache._lock:
            cache._hits += 1
    return flight.value


def stable_digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """
    Return 16 hexadecimal digits that are the same for equal arguments in every process.

    Containers and scalars are read by value, so that neither hash randomisation (sets) nor shared references (pickles)
    matter; other objects by their pickle.

    Raises:
        Exception: whatever pickling an argument raises.
    """
    digest = hashlib.sha256()
    for part in _canonical((args, kwargs)):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()[:16]


def _canonical(value: Any) -> Iterator[bytes]:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        yield kind.__name__.encode()
        yield value if kind is bytes else ascii(value).encode()
    elif kind in (tuple, list):
        yield from _sequence(kind.__name__, ([*_canonical(item)] for item in value))
    elif kind in (set, frozenset):
        yield from _sequence(kind.__name__, sorted([*_canonical(item)] for item in value))
    elif kind is dict:
        items = ([*_canonical(key), *_canonical(item)] for key, item in value.items())
        yield from _sequence("dict", sorted(items))
    else:
        import cloudpickle

        yield kind.__qualname__.encode()
        yield cast(bytes, cloudpickle.dumps(value, 5))


def _sequence(kind: str, items: Iterable[list[bytes]]) -> Iterator[bytes]:
    yield kind.encode()
    for item in items:
        yield b"item"
        yield from item
    yield b"end"
