"""
`Cache`: what `jumpstart.cached` keeps of one function, and whether it may be used. It never calls the function.

An entry is *fresh* until its ttl is over or a real-time value that it stands on has changed. After that it is *stale*:
served on for a while, and the first who meets it is told to renew it. Who computes and who waits is decided in
`flights.py`, what happens in the background in `renewals.py`.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from jumpstart.arguments import arguments_of, make_key
from jumpstart.dependencies import Source, Versions, has_seen_newer, is_outdated, note_used

logger = logging.getLogger(__name__)

Snapshot = Literal["value", "key"]
OnChange = Literal["rebuild", "drop"]
Clock = Callable[[], float]
Reads: TypeAlias = Mapping[tuple[Source, str], int]

WAIT_SLICE = 0.1  # seconds; a thread that waits in one long call cannot be stopped when its request is out of time
RETRY_FIRST = 1.0  # seconds; doubled with each failed renewal
RETRY_MOST = 60.0  # seconds
LEASE = 60.0  # seconds after which a renewal that nobody has heard of may be begun again: its event loop was stopped

MISSING: Any = object()


class CacheInfo(NamedTuple):
    """
    Exact counts; the first four fields are those of `functools.lru_cache`.

    Each call that ends is one of these: a hit (*hits*), answered with a stale value (*stale_hits*), answered with what
    another call or a renewal computed meanwhile (*waits*), or it has computed itself (*misses*).

    Attributes:
        currsize: entries; expired ones that nobody asked for since are among them.
        computations: runs of the function: the misses and the renewals in the background.
        errors: how many of the computations raised an `Exception`.
        loads: calls answered from the store that the workers of a host share; they are misses, and no computations.
    """

    hits: int
    misses: int
    maxsize: int | None
    currsize: int
    stale_hits: int = 0
    waits: int = 0
    computations: int = 0
    errors: int = 0
    loads: int = 0


class CacheEntry(NamedTuple):
    """
    One entry as a recorder sees it.

    *age* is in seconds since the value was computed; *stored* is the same object as long as the entry is the same, and
    can be referred to weakly. *is_dependent*: it stands on real-time values of this process.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    age: float
    stored: object
    is_dependent: bool = False


class Stored:
    """An entry. *reads*: the versions that its value stands on; *retry_at*: when a renewal may begin."""

    __slots__ = ("__weakref__", "failures", "is_outdated", "reads", "reference", "retry_at", "since", "value")

    def __init__(self, value: Any, since: float, reads: Versions | None = None) -> None:
        self.value = value
        self.since = since  # monotonic
        self.reads = reads or None
        self.is_outdated = False
        self.retry_at = 0.0
        self.failures = 0
        self.reference: weakref.ref[Any] | None = None  # to the instance, of a method's entry


class Cache:
    """
    The entries of one function, least recently used first. Any thread may call any method.

    Attributes:
        name: ``module:qualname``.
        function: what computes the values.
        wrapper: what `cached` returned for it; calling it fills the cache. Set once, by `cached`.
        depends: what snapshots stand on: the source of the function's module **as it was loaded**. Empty when there
            is none, and then no snapshot may be made. Set once, by `cached`.
        renew: begins a renewal of an entry in the background; False when none can be had now. Set once, by `cached`.
        epoch: grows with each `clear`; what was being computed before is not stored after.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        ttl: float | None = None,
        stale_ttl: float = 0.0,
        maxsize: int | None = 1024,
        snapshot: Snapshot | None = None,
        version: str = "",
        shared: bool = False,
        on_change: OnChange = "rebuild",
        clock: Clock = time.monotonic,
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is {ttl!r}; it must be a number of seconds above 0, or None")
        if not stale_ttl >= 0:
            raise ValueError(f"stale_ttl is {stale_ttl!r}; it must be a number of seconds, 0 or more")
        if stale_ttl and ttl is None:
            raise ValueError(f"stale_ttl is {stale_ttl!r}, but without a ttl nothing becomes stale; set ttl too")
        if maxsize is not None and maxsize < 1:
            raise ValueError(f"maxsize is {maxsize!r}; it must be 1 or more, or None")
        if snapshot not in (None, "value", "key"):
            raise ValueError(f"snapshot is {snapshot!r}; it must be 'value', 'key' or None")
        if on_change not in ("rebuild", "drop"):
            raise ValueError(f"on_change is {on_change!r}; it must be 'rebuild' or 'drop'")
        self.function = function
        self.wrapper: Callable[..., Any] = function
        self.depends: dict[str, str] = {}
        self.renew: Callable[[Hashable, Stored], bool] = lambda key, stored: False
        self.qualname: str = getattr(function, "__qualname__", repr(function))
        self.name = f"{getattr(function, '__module__', '')}:{self.qualname}"
        self.ttl = ttl
        self.stale_ttl = stale_ttl
        self.maxsize = maxsize
        self.snapshot = snapshot
        self.version = version
        self.shared = shared
        self.on_change = on_change
        self.is_async = inspect.iscoroutinefunction(function)
        # Entries of a snapshot outlive their instances by design.
        self.holds_first_weakly = snapshot is None and _is_in_class(self.qualname)
        self.epoch = 0
        self._clock = clock
        # Re-entrant, as that of functools is: the arguments' __eq__ may call cached functions.
        self._lock = threading.RLock()
        self._entries: OrderedDict[Hashable, Stored] = OrderedDict()
        self._keys_by_reference: dict[int, Hashable] = {}
        self._dead: deque[weakref.ref[Any]] = deque()
        self._sweep_after = 64
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._hits = self._misses = self._stale_hits = self._waits = 0
        self._computations = self._errors = self._loads = 0

    def reset_after_fork(self) -> None:
        """Forget that another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    # -- keys --

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return the key of a call. A method's instance is referred to weakly, so that the cache does not keep it."""
        if self.holds_first_weakly and args:
            try:
                args = (weakref.ref(args[0]), *args[1:])
            except TypeError:
                pass  # its class has __slots__ without __weakref__, or it is a tuple, ...: it is held until evicted
        return make_key(args, kwargs) if kwargs else args

    def arguments(self, key: Hashable) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call with that key; None when its instance is gone."""
        args, kwargs = arguments_of(key)
        if self.holds_first_weakly and args and type(args[0]) is weakref.ref:
            instance = args[0]()
            if instance is None:
                return None
            args = (instance, *args[1:])
        return args, kwargs

    def _watched(self, key: Any) -> tuple[Hashable, weakref.ref[Any] | None]:
        """Return the key to store: of a method, one that tells when its instance has gone, by that reference."""
        if not (self.holds_first_weakly and key and type(key[0]) is weakref.ref):
            return key, None
        # The callback may come amid any operation of ours, in any thread: it only takes a note.
        reference = weakref.ref(key[0](), self._dead.append)
        hash(reference)  # now: it cannot be had later
        watched = (reference, *key[1:])
        self._keys_by_reference[id(reference)] = watched
        return watched, reference

    def _bury(self) -> None:
        """Drop the entries of instances that are gone."""
        while self._dead:
            key = self._keys_by_reference.get(id(self._dead.popleft()))
            if key is not None:
                self._remove(key)

    def _remove(self, key: Hashable) -> None:
        stored = self._entries.pop(key, None)
        if stored is not None and stored.reference is not None:
            self._keys_by_reference.pop(id(stored.reference), None)

    # -- looking up --

    def lookup(self, key: Hashable) -> Any:
        """Return the value if it is fresh and the caller may have it, else `MISSING`. Counts a hit, never a miss."""
        with self._lock:
            stored = self._entries.get(key)
            if (
                stored is None
                or (self.ttl is not None and self._clock() - stored.since >= self.ttl)
                or stored.is_outdated
                or (stored.reads is not None and has_seen_newer(stored.reads))
            ):
                return MISSING
            self._entries.move_to_end(key)
            self._hits += 1
            value = stored.value
        if stored.reads is not None:
            note_used(stored.reads)
        return value

    def lookup_stale(self, key: Hashable) -> tuple[Any, Stored | None]:
        """
        Return the value if it is stale and the caller may have it, else `MISSING`.

        The second is the entry if the caller must see to it that it is renewed: nobody else will, for a while.
        """
        with self._lock:
            stored = self._entries.get(key)
            if stored is None:
                return MISSING, None
            now = self._clock()
            if self._is_over(stored, now) or (stored.reads is not None and has_seen_newer(stored.reads)):
                return MISSING, None
            self._entries.move_to_end(key)
            due = None
            if not self._is_stale(stored, now):
                self._hits += 1  # it was renewed since the caller looked
            else:
                self._stale_hits += 1
                if now >= stored.retry_at:
                    stored.retry_at = now + LEASE
                    due = stored
        if stored.reads is not None:
            note_used(stored.reads)
        return stored.value, due

    def _is_over(self, stored: Stored, now: float) -> bool:
        return self.ttl is not None and now - stored.since >= self.ttl + self.stale_ttl

    def _is_stale(self, stored: Stored, now: float) -> bool:
        return stored.is_outdated or (self.ttl is not None and now - stored.since >= self.ttl)

    def is_due(self, key: Hashable, stored: Stored) -> bool:
        """Whether *stored* is the entry still, and stale."""
        with self._lock:
            return self._entries.get(key) is stored and self._is_stale(stored, self._clock())

    # -- counting --

    def count_computation(self, *, is_renewal: bool) -> None:
        with self._lock:
            self._computations += 1
            if not is_renewal:
                self._misses += 1

    def count_load(self, *, is_renewal: bool) -> None:
        with self._lock:
            self._loads += 1
            if not is_renewal:
                self._misses += 1

    def count_error(self) -> None:
        with self._lock:
            self._errors += 1

    def count_wait(self) -> None:
        with self._lock:
            self._waits += 1

    # -- storing --

    def store(
        self, key: Hashable, value: Any, age: float = 0.0, reads: Versions | None = None, epoch: int | None = None
    ) -> Stored | None:
        """
        Enter *value*, computed *age* seconds ago from *reads*.

        None, and nothing is entered, when the cache was cleared since *epoch* or there is an entry that stands on
        something newer. Whoever stores *reads* has had `renewals.follow` listen to their changes before.
        """
        with self._lock:
            if epoch is not None and epoch != self.epoch:
                return None
            self._bury()
            present = self._entries.get(key)
            if present is not None and present.reads and reads and _is_newer(present.reads, reads):
                return None
            stored = Stored(value, self._clock() - age, reads)
            if present is not None:
                stored.reference = present.reference  # the present key stays
            else:
                key, stored.reference = self._watched(key)
            self._entries[key] = stored
            self._entries.move_to_end(key)
            if self.maxsize is not None:
                while len(self._entries) > self.maxsize:
                    self._remove(next(iter(self._entries)))
            self._sweep_after -= 1
            if self._sweep_after <= 0:
                self._sweep()
        # Not under the lock: a source may hold one of its own while it tells us of a change.
        if reads and is_outdated(reads):
            with self._lock:
                stored.is_outdated = True
                if self.on_change == "drop":
                    self.drop(key, stored)
        return stored

    def claim_outdated(self, key: Hashable) -> Stored | None:
        """Return the entry if what it stands on has changed and the caller must see to it that it is renewed."""
        with self._lock:
            stored = self._entries.get(key)
            now = self._clock()
            if stored is None or not stored.is_outdated or now < stored.retry_at:
                return None
            stored.retry_at = now + LEASE
            return stored

    def renewal_failed(self, stored: Stored) -> float:
        """Keep the old value, and return after how many seconds the next renewal may begin."""
        with self._lock:
            stored.failures += 1
            pause = min(RETRY_FIRST * 2.0 ** min(stored.failures - 1, 30), RETRY_MOST)
            stored.retry_at = self._clock() + pause
            return pause

    def renewal_not_begun(self, stored: Stored) -> None:
        """Let the next who meets *stored* try."""
        with self._lock:
            stored.retry_at = 0.0

    def outdate(self, source: Source, keys: frozenset[str]) -> list[tuple[Hashable, Stored]]:
        """
        Mark the entries that stand on older versions of these *keys*, or drop them if that was asked for.

        Return those to renew, the most recently used first.
        """
        versions = {key: source.version(key) for key in keys}
        with self._lock:
            found = [
                (key, stored)
                for key, stored in reversed(self._entries.items())
                if stored.reads
                and not stored.is_outdated
                and any(stored.reads.get((source, name), version) < version for name, version in versions.items())
            ]
            if self.on_change == "drop":
                for key, _ in found:
                    self._remove(key)
                return []
            now = self._clock()
            for _, stored in found:
                stored.is_outdated = True
                stored.retry_at = now + LEASE
            return found

    def drop(self, key: Hashable, stored: Stored) -> None:
        """Remove the entry, if it is still that one."""
        with self._lock:
            if self._entries.get(key) is stored:
                self._remove(key)

    def _sweep(self) -> None:
        """Drop expired entries: once per as many stores as there are entries, so that it stays cheap."""
        if self.ttl is not None:
            now = self._clock()
            for key in [key for key, stored in self._entries.items() if self._is_over(stored, now)]:
                self._remove(key)
        self._sweep_after = max(64, len(self._entries))

    def clear(self) -> None:
        """Drop all entries, those too that are being computed, and reset the counts."""
        with self._lock:
            self.epoch += 1
            self._entries.clear()
            self._keys_by_reference.clear()
            self._dead.clear()
            self._reset_counts()

    # -- for recorders and users --

    def info(self) -> CacheInfo:
        with self._lock:
            self._bury()
            return CacheInfo(
                self._hits,
                self._misses,
                self.maxsize,
                len(self._entries),
                self._stale_hits,
                self._waits,
                self._computations,
                self._errors,
                self._loads,
            )

    def entries(self, *, expired: bool = False, limit: int | None = None) -> list[CacheEntry]:
        """
        Return the entries, least recently used first; stale and expired ones only when asked for.

        With *limit* only that many, the most recently used.
        """
        with self._lock:
            self._bury()
            now = self._clock()
            wanted = (
                (key, stored)
                for key, stored in reversed(self._entries.items())
                if expired or not self._is_stale(stored, now)
            )
            newest = list(itertools.islice(wanted, limit))
        found = []
        for key, stored in newest[::-1]:
            arguments = self.arguments(key)
            if arguments is not None:
                found.append(CacheEntry(*arguments, stored.value, now - stored.since, stored, bool(stored.reads)))
        return found

    def restore(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, age: float) -> bool:
        """
        Enter a value that another process computed *age* seconds ago.

        Returns False, and changes nothing, when it is older than the ttl or the entry is there already.
        """
        if self.ttl is not None and age >= self.ttl:
            return False
        key = self.key(args, kwargs)
        with self._lock:
            stored = self._entries.get(key)
            if stored is not None and not self._is_over(stored, self._clock()):
                return False
            self.store(key, value, max(age, 0.0))
            return key in self._entries


def _is_newer(one: Reads, other: Reads) -> bool:
    """Whether *one* stands on something newer than *other*, and on nothing older."""
    common = [(version, other[place]) for place, version in one.items() if place in other]
    return any(mine > theirs for mine, theirs in common) and all(mine >= theirs for mine, theirs in common)


def _is_in_class(qualname: str) -> bool:
    """Whether a function of that name is defined in the body of a class."""
    owner = qualname.rpartition(".")[0]
    return bool(owner) and not owner.endswith("<locals>")


_registry: weakref.WeakValueDictionary[str, Cache] = weakref.WeakValueDictionary()
_registry_lock = threading.Lock()


def registered() -> dict[str, Cache]:
    """Return the caches of this process by ``module:qualname``; functions inside functions are not among them."""
    with _registry_lock:
        return dict(_registry.items())


def register(cache: Cache) -> None:
    """Make *cache* known to recorders, and note the source that its function was loaded from where that matters."""
    if "<locals>" not in cache.qualname:
        if cache.snapshot is not None or cache.shared:
            from jumpstart.runtime import loaded_dependency  # not at the top: scripts without snapshots do without

            # Now, while the module is being imported: its file may be another one when the entries are recorded.
            cache.depends = loaded_dependency(cache.name.partition(":")[0])
        with _registry_lock:
            _registry[cache.name] = cache
    elif cache.snapshot is not None or cache.shared:
        logger.warning(
            "%s is defined inside a function and cannot be found by name: no snapshots of it, and nothing is shared",
            cache.name,
        )
