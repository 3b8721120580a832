"""`jumpstart.cached`, with and without a profile."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jumpstart import cached, caches
from jumpstart.arguments import stable_digest
from jumpstart.caches import CacheInfo
from jumpstart.context import RequestContext, request_context
from jumpstart.recorder import WarmSettings
from jumpstart.recorders import _entries
from jumpstart.recorders import cached as cached_recorder
from jumpstart.recorders.cached import CachedRecorder, version_digest
from jumpstart.records import Reason, Record, Tally


class FakeClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_results_are_kept_by_arguments() -> None:
    calls: list[Any] = []

    @cached
    def double(a: int, *, by: int = 2, plus: int = 0) -> int:
        """Doubles."""
        calls.append((a, by))
        return a * by + plus

    assert double(1) == double(1) == 2
    assert double(1, by=3, plus=1) == double(1, plus=1, by=3) == 4
    assert calls == [(1, 2), (1, 3)]
    assert double.cache_info() == CacheInfo(hits=2, misses=2, maxsize=1024, currsize=2, computations=2)
    assert double.__wrapped__(1) == 2 and len(calls) == 3
    assert double.__doc__ == "Doubles." and list(inspect.signature(double).parameters) == ["a", "by", "plus"]
    double.cache_clear()
    assert double.cache_info() == CacheInfo(0, 0, 1024, 0)


def test_the_least_recently_used_entry_goes_first() -> None:
    @cached(maxsize=2)
    def square(a: int) -> int:
        return a * a

    for number in (1, 2, 1, 3, 1, 2):
        square(number)
    assert square.cache_info() == CacheInfo(hits=2, misses=4, maxsize=2, currsize=2, computations=4)


def test_a_value_past_its_ttl_is_computed_anew() -> None:
    clock = FakeClock()

    @cached(ttl=10, maxsize=None, clock=clock)
    def when(a: int) -> float:
        return clock.now

    assert when(1) == 1000
    clock.now += 9.9
    assert when(1) == 1000
    clock.now += 0.1
    assert when(1) == 1010


def test_expired_entries_do_not_pile_up() -> None:
    clock = FakeClock()

    @cached(ttl=10, maxsize=None, clock=clock)
    def same(a: int) -> int:
        return a

    for number in range(1000):
        clock.now += 1
        same(number)
    assert same.cache_info().currsize < 100


def test_options_out_of_range_are_refused() -> None:
    for options in ({"ttl": 0}, {"ttl": -1}, {"maxsize": 0}, {"snapshot": "values"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            cached(**options)(print)


def test_methods_are_bound() -> None:
    class Shop:
        @cached
        def price(self, item: str) -> int:
            return len(item)

    shop = Shop()
    assert shop.price("abc") == 3
    assert Shop.price.cache_info().currsize == 1


def test_exceptions_are_not_cached() -> None:
    calls: list[int] = []

    @cached
    def flaky() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError("first")
        return "fine"

    with pytest.raises(LookupError):
        flaky()
    assert flaky() == "fine"
    with pytest.raises(TypeError, match="unhashable"):
        cached(len)([])


def test_one_thread_computes_and_the_others_wait() -> None:
    calls: list[int] = []
    entered, leave = threading.Event(), threading.Event()

    @cached
    def slow(key: str) -> object:
        calls.append(1)
        entered.set()
        assert leave.wait(10)
        if key == "bad":
            raise LookupError("shared")
        return object()

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(slow, "good") for _ in range(8)]
        assert entered.wait(10)
        leave.set()
        assert len({id(future.result(10)) for future in futures}) == 1
    assert len(calls) == 1
    info = slow.cache_info()
    assert (info.hits + info.waits, info.misses, info.computations) == (7, 1, 1)
    entered.clear()
    leave.clear()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(slow, "bad") for _ in range(4)]
        assert entered.wait(10)
        wait_until(lambda: pool._work_queue.qsize() == 0)
        time.sleep(0.05)  # the last one has left the queue and must reach the flight; later ones would only recompute
        leave.set()
        assert all(isinstance(future.exception(10), LookupError) for future in futures)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Stopped(BaseException):
    """As a deadline throws it into a thread."""


def test_a_thread_that_is_stopped_takes_nobody_along() -> None:
    entered = threading.Event()
    leave = threading.Event()
    calls: list[int] = []

    @cached
    def slow() -> str:
        calls.append(1)
        if len(calls) == 1:
            entered.set()
            assert leave.wait(10)
            raise Stopped
        return "computed by another"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow)
        assert entered.wait(10)
        second = pool.submit(slow)
        leave.set()
        assert isinstance(first.exception(10), Stopped)
        assert second.result(10) == "computed by another"


def test_recursion_with_the_same_arguments_does_not_wait_for_itself() -> None:
    depth: list[int] = []

    @cached
    def again() -> int:
        depth.append(1)
        return again() if len(depth) < 3 else 7

    assert again() == 7

    @cached
    async def later() -> int:
        depth.append(1)
        return await later() if len(depth) < 6 else 8

    assert asyncio.run(later()) == 8


def test_many_threads_and_keys_compute_each_once() -> None:
    counts: dict[int, int] = {}

    @cached(maxsize=None)
    def count(key: int) -> int:
        counts[key] = counts.get(key, 0) + 1
        time.sleep(0.0005)
        return key

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(count, [number % 25 for number in range(1000)]))
    assert results == [number % 25 for number in range(1000)]
    assert counts == dict.fromkeys(range(25), 1)
    info = count.cache_info()
    assert (info.hits + info.waits, info.misses) == (975, 25)


def test_coroutine_functions_compute_once_per_loop_and_survive_cancellation() -> None:
    calls: list[str] = []

    @cached
    async def fetch(key: str) -> str:
        calls.append(key)
        await asyncio.sleep(0.01)
        if key == "bad":
            raise LookupError
        return key.upper()

    assert inspect.iscoroutinefunction(fetch)

    async def main() -> None:
        assert await asyncio.gather(*(fetch("a") for _ in range(5))) == ["A"] * 5
        assert calls == ["a"] and (fetch.cache_info().waits, fetch.cache_info().misses) == (4, 1)
        first = asyncio.create_task(fetch("b"))
        second = asyncio.create_task(fetch("b"))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == "B"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert calls == ["a", "b", "b"]
        errors = await asyncio.gather(*(fetch("bad") for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in errors] == [LookupError] * 3
        assert calls.count("bad") == 1

    asyncio.run(main())
    assert asyncio.run(fetch("a")) == "A"


def test_misses_in_requests_are_cold_events() -> None:
    @cached
    def fill(a: int) -> int:
        return a

    request = RequestContext()
    with request_context(request):
        fill(1)
        fill(1)
    fill(2)
    assert request.events == [("cache", fill.__qualname__)]  # type: ignore[attr-defined]


def test_digests_of_arguments_are_the_same_in_every_process() -> None:
    arguments = (
        '(({"b", "a", "c"}, frozenset([1, "x"]), {"k": [1, 2.5, None]}, b"\\xff", "\\ud800"), {"z": 1, "a": True})'
    )
    code = f"from jumpstart.arguments import stable_digest; print(stable_digest(*{arguments}))"
    digests = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert digests == {stable_digest(*eval(arguments))}
    different = [((1,), {}), ((True,), {}), (("1",), {}), ((b"1",), {}), (((1,),), {}), (([1],), {}), ((), {"a": 1})]
    different += [((datetime(2026, 1, 1),), {}), (("a", "b"), {}), (("ab",), {}), ((("a",), "b"), {})]
    assert len({stable_digest(args, kwargs) for args, kwargs in different}) == len(different)


# -- the recorder --

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)

PRELUDE = "VERSION = '1'\nFAILING = ()\nHANG = 0\n"
SOURCE = """
import asyncio
from jumpstart import cached
calls = []

@cached(ttl=300, snapshot="value", version=VERSION)
def prices(region, *, vat=True):
    calls.append(region)
    return {region: vat}

@cached(snapshot="key")
def rates(currency):
    calls.append(currency)
    if currency in FAILING:
        raise ConnectionError(currency)
    return currency.lower()

@cached(ttl=0.001, snapshot="key")
async def stock(item):
    calls.append(item)
    await asyncio.sleep(HANG)
    return item

@cached
def private(a):
    return a
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a recorder and a fresh module `cached_shop` as a new process would have them, so many seconds later."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "cached_shop.py").write_text("")

    def fresh(
        later: float = 0, version: str = "1", failing: tuple[str, ...] = (), hang: float = 0
    ) -> tuple[CachedRecorder, Any]:
        module: Any = type(sys)("cached_shop")
        module.VERSION, module.FAILING, module.HANG = version, failing, hang
        exec(SOURCE, module.__dict__)
        monkeypatch.setitem(sys.modules, "cached_shop", module)
        return CachedRecorder(WarmSettings(), now=lambda: NOW + timedelta(seconds=later)), module

    return fresh


def restored(recorder: CachedRecorder, records: list[Record], tally: Tally | None = None) -> Tally:
    """Restore as a boot does: what one phase has tallied is not handed to the next."""
    tally = tally or Tally()
    recorder.restore(None, records, tally)
    dropped = {drop.key for drop in tally.dropped}
    left = [record for record in records if record.key not in tally.used_keys | dropped]
    asyncio.run(recorder.restore_late(None, left, tally))
    return tally


def through_a_file(records: list[Record]) -> list[Record]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(records), type=list[Record])


def reasons(tally: Tally) -> list[Reason]:
    return [dropped.reason for dropped in tally.dropped]


def test_three_processes_compute_values_once_and_keys_at_boot(start: Callable[..., Any]) -> None:
    recorder, shop = start()
    shop.prices("eu")
    shop.prices("us", vat=False)
    shop.rates("EUR")
    asyncio.run(shop.stock("apple"))
    shop.private(1)
    records = through_a_file(recorder.capture("ship"))
    assert len(records) == 4
    assert all(set(record.depends) == {"module:cached_shop"} for record in records)
    assert "value" not in records[2].data and "created" not in records[2].data
    later = 0
    for _ in range(2):
        later += 100
        recorder, shop = start(later)
        tally = restored(recorder, records)
        assert len(tally.used_keys) == 4 and not tally.dropped
        assert sorted(shop.calls) == ["EUR", "apple"]
        shop.calls.clear()
        assert shop.prices("eu") == {"eu": True} and shop.prices("us", vat=False) == {"us": False}
        assert shop.rates("EUR") == "eur"
        assert shop.calls == []
        captured = through_a_file(recorder.capture("host"))
        assert [record.key for record in captured] == [record.key for record in records]
        records = captured


def test_a_value_keeps_its_age_across_processes(start: Callable[..., Any]) -> None:
    """Computed at 0, carried at 200 and at 290: at 301 it is too old, whoever carried it."""
    recorder, shop = start()
    shop.prices("eu")
    records = recorder.capture("host")
    for later in (200, 290):
        recorder, shop = start(later)
        assert restored(recorder, records).used_keys
        records = recorder.capture("host")
    recorder, shop = start(301)
    assert reasons(restored(recorder, records)) == [Reason.STALE]
    recorder, shop = start(-5000)  # a wall clock that was set back
    assert restored(recorder, records).used_keys
    assert recorder.capture("host")[0].data["created"].startswith(f"{NOW - timedelta(seconds=5000):%Y-%m-%dT%H:%M}")


def test_a_value_that_stands_on_real_time_values_is_computed_anew(start: Callable[..., Any]) -> None:
    class Flags:
        name = "flags"

        def version(self, key: str) -> int:
            return 1

        def subscribe(self, listener: Callable[[frozenset[str]], None]) -> None: ...

    recorder, shop = start()
    flags = Flags()
    cache = caches.registered()["cached_shop:prices"]
    cache.store(("eu",), {"eu": "as configured there"}, 0.0, {(flags, "vat"): 1})
    [record] = recorder.capture("host")
    assert "value" not in record.data
    recorder, shop = start()
    assert restored(recorder, through_a_file([record])).used_keys == {record.key}
    assert shop.calls == ["eu"] and shop.prices("eu") == {"eu": True}


def test_records_that_do_not_apply_are_dropped(start: Callable[..., Any]) -> None:
    recorder, shop = start()
    shop.prices("eu")
    [record] = recorder.capture("host")

    def dropped(data: dict[str, Any], version: str = "1", tally: Tally | None = None, warm: bool = False) -> Any:
        recorder, shop = start(version=version)
        if warm:
            shop.prices("eu")
        return reasons(restored(recorder, [Record(key="k", data={**record.data, **data})], tally))

    assert dropped({}) == []
    assert dropped({}, version="2") == [Reason.STALE]
    assert dropped({}, warm=True) == [Reason.NOT_APPLICABLE]
    assert dropped({"fn": "cached_shop:absent"}) == [Reason.GONE]
    assert dropped({"fn": "cached_shop:private", "version": version_digest("")}) == [Reason.NOT_APPLICABLE]
    assert dropped({"created": "yesterday"}) == [Reason.MALFORMED]
    assert dropped({"args": b"rubbish"}) == [Reason.FAILED]
    assert dropped({"args": pickle.dumps((([],), {}))}) == [Reason.FAILED]
    assert dropped({}, tally=Tally(deadline=0, clock=lambda: 1)) == [Reason.DEADLINE]


def test_a_key_that_fails_twice_is_forgotten(start: Callable[..., Any]) -> None:
    recorder, shop = start()
    shop.rates("EUR")
    shop.rates("USD")
    records = recorder.capture("host")
    kept = []
    for _ in range(2):
        recorder, shop = start(failing=("USD",))
        tally = restored(recorder, records)
        assert len(tally.used_keys) == 1 and reasons(tally) == [Reason.FAILED]
        records = through_a_file(recorder.capture("host"))
        kept.append(len(records))
    assert kept == [2, 1]


def test_recomputation_stops_at_the_deadline_and_the_keys_stay(start: Callable[..., Any]) -> None:
    recorder, shop = start()
    for number in range(20):
        asyncio.run(shop.stock(f"item{number}"))
    records = recorder.capture("host")
    recorder, shop = start(hang=60)
    tally = restored(recorder, records, Tally(deadline=time.monotonic() + 0.1))
    assert len(shop.calls) == 8  # at a time
    assert reasons(tally) == [Reason.DEADLINE] * 20
    assert len(recorder.capture("host")) == 20


def test_what_cannot_be_pickled_is_skipped_and_said_once(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    recorder, shop = start()
    shop.prices("eu")
    shop.prices(object())
    shop.prices("large" * 300_000)
    for _ in range(2):
        assert len(recorder.capture("host")) == 1
    said = [message for message in caplog.messages if shop.prices.__module__ in message]
    assert len(said) == 1  # of modules that other tests left, more may be said


def test_values_of_a_replaced_source_are_not_recorded(
    start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``git pull`` under a running server: what the old code has computed is not for the new code."""
    source = tmp_path / "cached_pulled.py"
    names = {"prices", "rates"}

    def load(text: str) -> Any:
        source.write_text(text)
        sys.modules.pop("cached_pulled", None)
        importlib.invalidate_caches()
        return importlib.import_module("cached_pulled")

    def keys(recorder: CachedRecorder) -> list[str]:
        return [record.key.partition("(")[0] for record in recorder.capture("host") if "pulled" in record.key]

    try:
        shop = load(PRELUDE + SOURCE)
        shop.prices("eu")
        shop.rates("EUR")
        recorder = CachedRecorder(WarmSettings())
        assert keys(recorder) == [f"cached_pulled:{name}" for name in sorted(names)]
        [depends, _] = [record.depends for record in recorder.capture("host") if "pulled" in record.key]
        before = source.stat()
        source.write_text((PRELUDE + SOURCE).replace("FAILING = ()", "FAILING = []"))
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # as deploy tools do, and of the same size
        assert keys(recorder) == keys(CachedRecorder(WarmSettings())) == []
        assert "not the one that was loaded" in caplog.text
        source.write_text(PRELUDE + SOURCE)
        assert [record.depends for record in recorder.capture("host") if "pulled" in record.key] == [depends] * 2
        source.unlink()
        assert keys(recorder) == []
        shop = load(PRELUDE + SOURCE + "\n")
        shop.prices("eu")
        assert keys(recorder) == ["cached_pulled:prices"], "the new code's value"
    finally:
        sys.modules.pop("cached_pulled", None)


def test_a_function_without_a_source_has_no_snapshots() -> None:
    """Such records would be valid for ever."""
    module: Any = type(sys)("cached_from_nowhere")
    module.VERSION = ""
    exec(SOURCE, module.__dict__)
    module.prices("eu")
    assert not [record for record in CachedRecorder(WarmSettings()).capture("ship") if "nowhere" in record.key]


def spy_on_pickled(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[object]:
    seen: list[object] = []
    original = _entries.pickled

    def spy(value: object) -> bytes:
        seen.append(value)
        data: bytes = original(value)
        return data

    for module in modules:
        monkeypatch.setattr(module, "pickled", spy)
    return seen


def test_a_repeated_capture_pickles_only_what_is_new(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, shop = start()
    pickled = spy_on_pickled(monkeypatch, _entries, cached_recorder)
    shop.prices("eu")
    shop.prices(object())  # that it cannot be recorded is remembered too
    records = recorder.capture("host")
    count = len(pickled)
    assert recorder.capture("host") == records and len(pickled) == count
    shop.prices("us")
    assert [record.data["value"] for record in recorder.capture("host")] != [records[0].data["value"]]
    assert len(pickled) == count + 2
    shop.prices.cache_clear()
    shop.prices("eu")["eu"] = "computed anew"
    [record] = recorder.capture("host")
    assert pickle.loads(record.data["value"]) == {"eu": "computed anew"}
    shop.prices("eu")["eu"] = "changed in place"
    [record] = recorder.capture("ship")
    assert pickle.loads(record.data["value"]) == {"eu": "changed in place"}


def test_a_dropped_entry_is_not_kept_alive(start: Callable[..., Any]) -> None:
    recorder, shop = start()
    value = Fragile(shop)
    shop.__dict__["VERSION"] = "1"
    cache = caches.registered()["cached_shop:prices"]
    cache.store(("fragile",), value)
    recorder.capture("host")
    gone = weakref.ref(value)
    del value
    shop.prices.cache_clear()
    gc.collect()
    assert gone() is None


class Fragile:
    """A value that can be referred to weakly."""

    def __init__(self, shop: Any) -> None:
        self.name = shop.__name__


def test_the_most_recently_used_entries_are_recorded_in_order(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_entries, "MAX_ENTRIES", 3)
    monkeypatch.setattr(_entries, "MAX_TOTAL_ENTRIES", 4)
    recorder, shop = start()
    for number in range(10):
        shop.prices(number)
        shop.rates(str(number))
    shop.prices(0)
    records = recorder.capture("host")
    assert [pickle.loads(record.data["args"])[0][0] for record in records] == [8, 9, 0, "9"]
    monkeypatch.setattr(_entries, "MAX_TOTAL_BYTES", 60)
    records = recorder.capture("host")
    assert [pickle.loads(record.data["args"])[0][0] for record in records] == [0, "9"], "the newest of each"


@pytest.mark.parametrize(
    ("function", "error"),
    [
        *[("def", error) for error in ("SystemExit(5)", "KeyboardInterrupt", "StopIteration")],
        # No KeyboardInterrupt: in the main thread it may be the operator's.
        *[("async def", error) for error in ("SystemExit(5)", "asyncio.CancelledError")],
    ],
)
def test_whatever_a_function_raises_costs_its_record(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: str, function: str
) -> None:
    source = f"{SOURCE}\n@cached(snapshot='key')\n{function} raising(n):\n    if FAILING: raise {error}\n    return n\n"
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", source)
    recorder, shop = start()
    for number in range(20):
        result = shop.raising(number)
        if function == "async def":
            asyncio.run(result)
    records = recorder.capture("host")
    assert len(records) == 20
    recorder, shop = start(failing=("all",))
    tally = restored(recorder, records, Tally(deadline=time.monotonic() + 10))
    assert reasons(tally) == [Reason.FAILED] * 20


def test_arguments_that_exit_when_they_are_unpickled_cost_their_record(start: Callable[..., Any]) -> None:
    recorder, shop = start()
    shop.prices("eu")
    [record] = recorder.capture("host")
    recorder, shop = start()
    exiting = msgspec.structs.replace(record, key="exits", data={**record.data, "args": b"csys\nexit\n(tR."})
    tally = restored(recorder, [exiting, record])
    assert reasons(tally) == [Reason.FAILED] and tally.used_keys == {record.key}


def test_functions_inside_functions_have_no_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):

        @cached(snapshot="value")
        def inner() -> None: ...

    assert "inner" in caplog.text
    assert not [name for name in caches.registered() if "<locals>" in name]
