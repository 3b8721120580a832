"""Entries of `jumpstart.cached` functions that the app has marked with ``snapshot=``."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import msgspec

from jumpstart import caches
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.records import Reason, Record, Tally
from jumpstart.runtime import module_dependency

logger = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 1024 * 1024
MAX_TOTAL_BYTES = 32 * 1024 * 1024  # per capture
CONCURRENCY = 8  # recomputations at a time: enough to hide latency, too few to flood a backend at a deploy
MAX_FAILURES = 2  # boots in which recomputing an entry may fail before it is forgotten


class CachedData(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    `Record.data` of this recorder.

    *args* is a pickled ``(args, kwargs)``; *value* a pickled result, None if it is to be computed; *created* its time;
    *version* the digest of the user's version; *failures* in how many boots computing it has failed.
    """

    fn: str
    args: bytes
    version: str
    value: bytes | None = None
    created: datetime | None = None
    failures: int = 0


def pickled(value: object) -> bytes:
    """
    Pickle *value* for a record.

    Raises:
        ValueError: it is larger than `MAX_ENTRY_BYTES`.
        Exception: whatever its pickling raises.
    """
    import cloudpickle  # not at the top: processes that restore nothing do not need it

    data: bytes = cloudpickle.dumps(value, 5)
    if len(data) > MAX_ENTRY_BYTES:
        raise ValueError(f"{len(data)} bytes; the limit is {MAX_ENTRY_BYTES}")
    return data


def pickled_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """
    Pickle the arguments of a call, making sure that they are found again: a copy must be an equal key.

    Raises:
        ValueError: it is not (objects that are equal only to themselves), or is too large.
        Exception: whatever their pickling raises.
    """
    data = pickled((args, kwargs))
    copy = unpickled(data)
    key, copied = caches.make_key(args, kwargs), caches.make_key(*copy)
    if key != copied or hash(key) != hash(copied):
        raise ValueError("a copy of the arguments does not equal them")
    return data


def unpickled(data: bytes) -> Any:
    """Unpickle what a trusted profile holds."""
    import pickle

    return pickle.loads(data)


def version_digest(version: str) -> str:
    return hashlib.sha256(version.encode()).hexdigest()[:16]


class CachedRecorder(Recorder):
    """
    Records values (restored with their age) or keys (computed anew in each worker, `CONCURRENCY` at a time).

    A record is used when its entry is in the cache afterwards.
    """

    name: ClassVar[str] = "cached"
    encoding: ClassVar[Literal["json", "msgpack"]] = "msgpack"
    needs_trust: ClassVar[bool] = True
    runtime_bound: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        super().__init__(settings)
        self._now = now
        self._missed: dict[str, Record] = {}  # what this boot had no time for or could not compute
        self._reported: set[str] = set()

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        for record, data, cache in self._applicable(records, tally):
            if data.value is None:
                continue  # in restore_late
            if tally.out_of_time():
                self._miss(record)
                tally.drop(record, Reason.DEADLINE)
                continue
            age = (self._now() - data.created).total_seconds() if data.created is not None else 0.0
            if cache.ttl is not None and age >= cache.ttl:
                tally.drop(record, Reason.STALE, f"{age:.0f} s old; its ttl is {cache.ttl:g} s")
                continue
            try:
                args, kwargs = unpickled(data.args)
                restored = cache.restore(args, kwargs, unpickled(data.value), age)
            except Exception as error:
                tally.drop(record, Reason.FAILED, f"{type(error).__name__}: {error}")
                continue
            if restored:
                tally.used(record)
            else:
                tally.drop(record, Reason.NOT_APPLICABLE, "computed already")

    def _applicable(self, records: Sequence[Record], tally: Tally) -> Iterator[tuple[Record, CachedData, caches.Cache]]:
        functions = caches.registered()
        for record in records:
            try:
                data = msgspec.convert(record.data, CachedData)
            except msgspec.ValidationError as error:
                tally.drop(record, Reason.MALFORMED, str(error))
                continue
            cache = functions.get(data.fn)
            if cache is None:
                tally.drop(record, Reason.GONE, f"no cached function {data.fn}")
            elif cache.snapshot != ("key" if data.value is None else "value"):
                tally.drop(record, Reason.NOT_APPLICABLE, f"{data.fn} now has snapshot={cache.snapshot!r}")
            elif data.version != version_digest(cache.version):
                tally.drop(record, Reason.STALE, f"{data.fn} has another version")
            else:
                yield record, data, cache

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        waiting = iter([*self._applicable(records, tally)])
        left = {record.key: record for record in records}

        async def run() -> None:
            for record, data, cache in waiting:
                if data.value is not None:
                    continue  # `restore` has had it
                if tally.out_of_time():
                    return
                error = await _compute(cache, data)
                if tally.out_of_time() and error is not None:
                    return
                left.pop(record.key, None)
                if error is None:
                    tally.used(record)
                    continue
                logger.warning("%s was not computed at boot: %s", record.key, error)
                tally.drop(record, Reason.FAILED, error)
                if data.failures + 1 < MAX_FAILURES:
                    self._miss(record, failures=data.failures + 1)

        runners = [asyncio.create_task(run()) for _ in range(CONCURRENCY)]
        try:
            pending: set[asyncio.Task[None]] = set(runners)
            while pending and not tally.out_of_time():
                _, pending = await asyncio.wait(pending, timeout=0.05)
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
        dropped = {drop.key for drop in tally.dropped}
        for record in left.values():
            if record.key not in dropped and record.key not in tally.used_keys and tally.out_of_time():
                tally.drop(record, Reason.DEADLINE)
                self._miss(record)

    def _miss(self, record: Record, **changes: Any) -> None:
        self._missed[record.key] = msgspec.structs.replace(record, data={**record.data, **changes})

    def capture(self, purpose: Purpose) -> list[Record]:
        records: dict[str, Record] = {}
        total = 0
        now = self._now()
        for cache in caches.registered().values():
            if cache.snapshot is None:
                continue
            depends = module_dependency(cache.name.partition(":")[0])
            for entry in cache.entries(expired=cache.snapshot == "key"):
                try:
                    record = _record(cache, entry, depends, now)
                except Exception as error:  # objects may raise anything when they are pickled
                    self._report_once(cache.name, error)
                    continue
                total += len(record.data["args"]) + len(record.data.get("value") or b"")
                if total > MAX_TOTAL_BYTES:
                    self._report_once("the rest", ValueError(f"more than {MAX_TOTAL_BYTES} bytes"))
                    return list(records.values())
                records[record.key] = record
        return [*records.values(), *(record for key, record in self._missed.items() if key not in records)]

    def _report_once(self, name: str, error: Exception) -> None:
        if name not in self._reported:
            self._reported.add(name)
            logger.warning("cached: entries of %s are not recorded: %s: %s", name, type(error).__name__, error)


async def _compute(cache: caches.Cache, data: CachedData) -> str | None:
    """Call the cached function as a request would; return what went wrong."""
    try:
        args, kwargs = unpickled(data.args)
        if cache.is_async:
            await cache.wrapper(*args, **kwargs)
        else:
            await asyncio.to_thread(cache.wrapper, *args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _record(cache: caches.Cache, entry: caches.CacheEntry, depends: dict[str, str], now: datetime) -> Record:
    data: dict[str, Any] = {
        "fn": cache.name,
        "args": pickled_arguments(entry.args, entry.kwargs),
        "version": version_digest(cache.version),
    }
    if cache.snapshot == "value":
        data["value"] = pickled(entry.value)
        created = datetime.fromtimestamp(now.timestamp() - entry.age, UTC)
        data["created"] = created.isoformat().replace("+00:00", "Z")
    key = f"{cache.name}({caches.stable_digest(entry.args, entry.kwargs)})"
    return Record(key=key, data=data, depends=depends)
