"""Entries of `jumpstart.cached` functions that the app has marked with ``snapshot=``."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import msgspec

from jumpstart import caches
from jumpstart.arguments import stable_digest
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.recorders._entries import NOT_AS_LOADED, Collector, pickled, pickled_arguments, unpickled
from jumpstart.records import Reason, Record, Tally
from jumpstart.runtime import is_as_loaded

logger = logging.getLogger(__name__)

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


def version_digest(version: str) -> str:
    return hashlib.sha256(version.encode()).hexdigest()[:16]


class CachedRecorder(Recorder):
    """
    Records values (restored with their age) or keys (computed anew in each worker, `CONCURRENCY` at a time).

    Values that stand on real-time values are recorded as keys: the next process has other ones.

    A record is used when its entry is in the cache afterwards.
    """

    name: ClassVar[str] = "cached"
    encoding: ClassVar[Literal["json", "msgpack"]] = "msgpack"
    needs_trust: ClassVar[bool] = True
    runtime_bound: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        super().__init__(settings)
        self._now = now
        self._collector = Collector(self.name)
        self._missed: dict[str, Record] = {}  # what this boot had no time for or could not compute

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
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # unpickling runs the app's code, and a bad record costs that record only
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
            elif cache.snapshot is None or (data.value is not None and cache.snapshot != "value"):
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
        """
        Return the entries of each function, least recently used first, as far as the limits reach.

        Functions whose module's file is no longer what was loaded are left out: their values belong to the old code.
        """
        records: dict[str, Record] = {}
        now = self._now()
        self._collector.begin(purpose)
        for cache in caches.registered().values():
            if cache.snapshot is None:
                continue
            if not is_as_loaded(cache.depends):
                self._collector.report_once(cache.name, NOT_AS_LOADED)
                continue
            entries = reversed(cache.entries(expired=cache.snapshot == "key", limit=self._collector.limit()))
            records |= self._collector.collect(
                cache.name, ((entry.stored, None, functools.partial(_record, cache, entry, now)) for entry in entries)
            )
        return [*records.values(), *(record for key, record in self._missed.items() if key not in records)]


async def _compute(cache: caches.Cache, data: CachedData) -> str | None:
    """Call the cached function as a request would; return what went wrong."""
    if not cache.is_async:
        return await asyncio.to_thread(_call, cache, data)
    try:
        args, kwargs = unpickled(data.args)
        await cache.wrapper(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return repr(error)  # its own, of something that it awaits
    except BaseException as error:  # sys.exit() in a function may not end the worker
        return f"{type(error).__name__}: {error}"
    return None


def _call(cache: caches.Cache, data: CachedData) -> str | None:
    """In a thread, and nothing is raised there: asyncio cannot pass on StopIteration, and would wait for ever."""
    try:
        args, kwargs = unpickled(data.args)
        cache.wrapper(*args, **kwargs)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def _record(cache: caches.Cache, entry: caches.CacheEntry, now: datetime) -> Record:
    data: dict[str, Any] = {
        "fn": cache.name,
        "args": pickled_arguments(entry.args, entry.kwargs),
        "version": version_digest(cache.version),
    }
    if cache.snapshot == "value" and not entry.is_dependent:
        data["value"] = pickled(entry.value)
        created = datetime.fromtimestamp(now.timestamp() - entry.age, UTC)
        data["created"] = created.isoformat().replace("+00:00", "Z")
    key = f"{cache.name}({stable_digest(entry.args, entry.kwargs)})"
    return Record(key=key, data=data, depends=cache.depends)
