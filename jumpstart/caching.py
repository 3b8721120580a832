"""`jumpstart.cached`: the decorator. Everything that it does works without the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from jumpstart.caches import Cache, CacheInfo, Clock, OnChange, Snapshot, register
from jumpstart.flights import async_wrapper, sync_wrapper

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


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


@overload
def cached(
    fn: None = None,
    *,
    ttl: float | None = None,
    stale_ttl: float = 0.0,
    maxsize: int | None = 1024,
    snapshot: Snapshot | None = None,
    version: str = "",
    shared: bool = False,
    on_change: OnChange = "rebuild",
    clock: Clock = time.monotonic,
) -> Callable[[Callable[P, R]], CachedFunction[P, R]]: ...
@overload
def cached(
    fn: Callable[P, R],
    *,
    ttl: float | None = None,
    stale_ttl: float = 0.0,
    maxsize: int | None = 1024,
    snapshot: Snapshot | None = None,
    version: str = "",
    shared: bool = False,
    on_change: OnChange = "rebuild",
    clock: Clock = time.monotonic,
) -> CachedFunction[P, R]: ...
def cached(
    fn: Callable[..., Any] | None = None,
    *,
    ttl: float | None = None,
    stale_ttl: float = 0.0,
    maxsize: int | None = 1024,
    snapshot: Snapshot | None = None,
    version: str = "",
    shared: bool = False,
    on_change: OnChange = "rebuild",
    clock: Clock = time.monotonic,
) -> Any:
    """
    Keep a function's results, renew them in the background, and let a profile carry them to the next process.

    Works on functions, methods and coroutine functions; arguments must be hashable. Calls with the same arguments that
    come while one is computing wait for its result, on other event loops too. Exceptions are not cached; those who
    waited get the same one. A call that is cancelled or stopped while it computes takes nobody along: one of those who
    waited computes instead.

    `jumpstart.Config` keys that the function reads, itself or through other cached functions, are what its result
    stands on. When one changes, only the results that stand on it are computed anew, in the background. A caller (a
    request; outside of requests a thread or task) that has seen the new version of a key never gets a result of an
    older one: it computes, or waits for who does.

    A method's instance is not kept alive: its entries go when it goes. It is where it cannot be referred to weakly
    (``__slots__`` without ``__weakref__``) and with *snapshot*, until its entries are evicted.

    Args:
        ttl: seconds for which a value is good, counted on from its computation across restarts; None: for ever.
        stale_ttl: for how many seconds after that the old value is served, while one computation in the background
            renews it and nobody waits. If that fails the old value stays until then, and it is tried again after 1 s,
            2 s, and so on up to 60 s.
        maxsize: how many entries to keep; the least recently used goes first. None: all.
        snapshot: ``"value"`` puts arguments and results (pickled) into profiles, ``"key"`` the arguments only, and the
            results are computed anew at boot; None: nothing. Results that stand on `jumpstart.Config` keys are always
            computed anew.
        version: change it when stored results are no longer right although the function's module is unchanged.
        shared: the workers of a host share results, pickled, in a store beside the warm-start cache. For what takes
            longer than the 10 ms that the store may take. Without the server it does nothing.
        on_change: what becomes of a result when a key that it stands on changes: ``"rebuild"`` serves the old one,
            to who has not seen the new version, until the new one is there; ``"drop"`` drops it at once.
        clock: monotonic seconds, for tests.

    Raises:
        ValueError: an option is out of range.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        cache = Cache(
            function,
            ttl=ttl,
            stale_ttl=stale_ttl,
            maxsize=maxsize,
            snapshot=snapshot,
            version=version,
            shared=shared,
            on_change=on_change,
            clock=clock,
        )
        wrapper: Any = async_wrapper(cache) if cache.is_async else sync_wrapper(cache)
        wrapper.cache_info = cache.info
        wrapper.cache_clear = cache.clear
        wrapper.__jumpstart_cache__ = cache  # and keeps it alive in the registry
        cache.wrapper = wrapper
        register(cache)
        return wrapper

    return decorate if fn is None else decorate(fn)
