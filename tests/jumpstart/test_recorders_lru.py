"""Entries of named `functools.lru_cache` functions, from one process to the next."""

from __future__ import annotations

import functools
import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from jumpstart.context import RequestContext, request_context
from jumpstart.recorder import WarmSettings
from jumpstart.recorders import _entries, lru
from jumpstart.recorders.lru import LruCacheRecorder, cache_entries
from jumpstart.records import Reason, Record, Tally

SOURCE = """
import functools
calls = []

@functools.lru_cache(maxsize=4)
def bounded(a, *rest, b=0):
    "Bounded."
    calls.append(("bounded", a, rest, b))
    return [a, rest, b]

@functools.cache
def unbounded(a, b=1):
    calls.append(("unbounded", a, b))
    return {a: b}

@functools.lru_cache(typed=True)
def typed(a, b=None):
    calls.append(("typed", a, b))
    return type(a).__name__

@functools.lru_cache
def bare():
    calls.append(("bare",))
    return None

class Shop:
    def __init__(self, name):
        self.name = name

    @functools.lru_cache(maxsize=None)
    def price(self, item):
        return len(item)

@functools.lru_cache
def unpicklable(n):
    return (i for i in range(n))
"""


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functools, "lru_cache", functools.lru_cache)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a recorder and a fresh module `lru_shop` as a new process would have them."""
    (tmp_path / "lru_shop.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    original = functools.lru_cache

    def start(pattern: str = "lru_shop:*") -> tuple[LruCacheRecorder, Any]:
        functools.lru_cache = original
        sys.modules.pop("lru_shop", None)
        recorder = LruCacheRecorder(WarmSettings(lru_cache=(pattern,) if pattern else ()))
        recorder.observe()
        import lru_shop  # type: ignore[import-not-found]  # written above

        return recorder, lru_shop

    yield start
    sys.modules.pop("lru_shop", None)


def through_a_file(records: list[Record]) -> list[Record]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(records), type=list[Record])


def fill(shop: Any) -> None:
    shop.bounded(1)
    shop.bounded("x", 2, b=(3, 4))
    shop.bounded((5,))
    shop.bounded(1)  # the most recent now
    shop.unbounded("k")
    shop.unbounded(a="k", b=2)
    shop.typed(1)
    shop.typed(1.0)
    shop.typed(1, b="q")
    shop.bare()


def test_three_processes_compute_once(process: Callable[..., Any]) -> None:
    recorder, shop = process()
    fill(shop)
    records = recorder.capture("host")
    assert len(records) == len({record.key for record in records}) == 9
    for _ in range(2):
        recorder, shop = process()
        tally = Tally()
        records = through_a_file(records)
        recorder.restore(None, records, tally)
        assert not tally.dropped and len(tally.used_keys) == 9
        assert shop.calls == []
        assert shop.bounded.cache_info().currsize == 3
        captured = recorder.capture("ship")
        assert captured == records
        fill(shop)
        assert shop.calls == []
        assert shop.typed(1.0) == "float" and shop.typed(1) == "int"
        records = captured


def test_values_of_a_replaced_source_are_not_recorded(process: Callable[..., Any], tmp_path: Path) -> None:
    """``git pull`` under a running server: what the old code has computed is not for the new code."""
    recorder, shop = process()
    shop.bare()
    [record] = recorder.capture("ship")
    source = tmp_path / "lru_shop.py"
    source.write_text(SOURCE.replace('"Bounded."', '"bounded."'))
    assert recorder.capture("ship") == recorder.capture("host") == []
    source.unlink()
    assert recorder.capture("ship") == []
    source.write_text(SOURCE)
    assert recorder.capture("ship") == [record]


def test_a_repeated_capture_costs_only_what_is_new(
    process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, shop = process()
    pickled: list[object] = []
    original = _entries.pickled

    def spy(value: object) -> bytes:
        pickled.append(value)
        return original(value)

    monkeypatch.setattr(lru, "pickled", spy)
    fill(shop)
    records = recorder.capture("host")
    assert len(pickled) == 9
    assert recorder.capture("host") == records and len(pickled) == 9
    shop.bounded(99)
    assert len(recorder.capture("host")) == 10 and len(pickled) == 10
    shop.bare.cache_clear()
    shop.unbounded.cache_clear()
    shop.unbounded("k")["k"] = "another"  # the same key object, another value
    key = records[3].key
    [record] = [each for each in recorder.capture("host") if each.key == key]
    assert pickle.loads(record.data["value"]) == {"k": "another"}
    assert len(pickled) == 11


def test_the_most_recently_used_entries_are_recorded_in_order(
    process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_entries, "MAX_ENTRIES", 3)
    monkeypatch.setattr(_entries, "MAX_TOTAL_ENTRIES", 5)
    recorder, shop = process()
    for number in range(10):
        shop.bounded(number)
        shop.unbounded(number)
        shop.typed(number)
    shop.bounded(7)
    arguments = [pickle.loads(record.data["args"])[0][0] for record in recorder.capture("host")]
    assert arguments == [8, 9, 7, 8, 9]


def test_the_order_of_use_is_kept(process: Callable[..., Any]) -> None:
    recorder, shop = process()
    fill(shop)
    records = recorder.capture("host")
    recorder, shop = process()
    recorder.restore(None, records, Tally())
    shop.bounded("new1")
    shop.bounded("new2")  # evicts the least recently used: ("x", 2, b=(3, 4))
    shop.calls.clear()
    shop.bounded(1)
    shop.bounded((5,))
    assert shop.calls == []
    shop.bounded("x", 2, b=(3, 4))
    assert len(shop.calls) == 1


def test_a_patched_function_looks_and_works_as_ever(process: Callable[..., Any]) -> None:
    _, shop = process()
    assert type(shop.bounded) is functools._lru_cache_wrapper
    assert list(inspect.signature(shop.bounded).parameters) == ["a", "rest", "b"]
    assert shop.bounded.__doc__ == "Bounded."
    assert shop.bounded.__wrapped__.__code__.co_name == "bounded"
    assert shop.bounded.__wrapped__(7) == [7, (), 0]
    assert shop.bounded.cache_parameters() == {"maxsize": 4, "typed": False}
    assert shop.bare.cache_parameters() == {"maxsize": 128, "typed": False}
    assert pickle.loads(pickle.dumps(shop.bounded)) is shop.bounded
    shop.bounded(1)
    shop.bounded(1)
    assert shop.bounded.cache_info()[:2] == (1, 1)
    shop.bounded.cache_clear()
    assert shop.bounded.cache_info()[:2] == (0, 0)
    one, two = shop.Shop("one"), shop.Shop("two")
    assert one.price("abc") == two.price("abc") == 3
    assert shop.Shop.price.cache_info().currsize == 2
    with pytest.raises(TypeError):
        functools.lru_cache(maxsize="many")  # type: ignore[call-overload]


def test_misses_in_requests_are_cold_events(process: Callable[..., Any]) -> None:
    _, shop = process()
    request = RequestContext()
    with request_context(request):
        shop.bounded(1)
        shop.bounded(1)
    assert request.events == [("lru-cache", "bounded")]


def test_without_patterns_nothing_is_patched(process: Callable[..., Any]) -> None:
    original = functools.lru_cache
    recorder, shop = process("")
    assert functools.lru_cache is original
    fill(shop)
    assert recorder.capture("host") == []


def test_what_cannot_be_carried_is_skipped_and_said_once(
    process: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Results that cannot be pickled, too large ones, and arguments that equal only themselves."""
    recorder, shop = process()
    shop.unpicklable(3)
    shop.unpicklable(4)
    shop.Shop("one").price("abc")
    shop.unbounded("large" * 300_000)
    shop.unbounded("small")
    with caplog.at_level(logging.WARNING):
        assert [record.data["fn"] for record in recorder.capture("host")] == ["lru_shop:unbounded"]
        recorder.capture("host")
    assert len(caplog.records) == 3


def test_records_that_do_not_apply_are_dropped(process: Callable[..., Any]) -> None:
    recorder, shop = process()
    shop.bounded(1)
    [record] = recorder.capture("host")

    def restored(data: dict[str, Any], pattern: str = "lru_shop:*", tally: Tally | None = None) -> list[Reason]:
        recorder, shop = process(pattern)
        shop.typed("present")
        tally = tally or Tally()
        recorder.restore(None, [Record(key="k", data={**record.data, **data})], tally)
        return [dropped.reason for dropped in tally.dropped]

    assert restored({}) == []
    assert restored({}, "other:*") == [Reason.NOT_APPLICABLE]
    assert restored({"fn": "lru_shop:absent"}) == [Reason.GONE]
    assert restored({"fn": 3}) == [Reason.MALFORMED]
    assert restored({"args": b"rubbish"}) == [Reason.FAILED]
    assert restored({"value": b"rubbish"}) == [Reason.FAILED]
    assert restored({"args": pickle.dumps((([],), {}))}) == [Reason.FAILED]
    assert restored({"fn": "lru_shop:typed", "args": pickle.dumps((("present",), {}))}) == [Reason.NOT_APPLICABLE]
    assert restored({}, tally=Tally(deadline=0, clock=lambda: 1)) == [Reason.DEADLINE]


def test_functions_that_were_decorated_too_early_are_reported_once(
    process: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    process("")
    recorder = LruCacheRecorder(WarmSettings(lru_cache=("lru_shop:bound*", "lru_shop:Sh*")))
    for _ in range(2):
        recorder.restore(None, [], Tally())
    assert [record.getMessage().split(" ")[3] for record in caplog.records] == ["lru_shop:bounded"]


def test_entries_are_read_whatever_the_form_of_the_key() -> None:
    @functools.lru_cache(maxsize=2, typed=True)
    def f(*args: Any, **kwargs: Any) -> int:
        return len(args) + len(kwargs)

    assert cache_entries(f) == []
    f(1, "a", x=2, y=None)
    assert cache_entries(f) == [((1, "a"), {"x": 2, "y": None}, 4)]
    f(x=1)
    f()
    assert cache_entries(f) == [((), {"x": 1}, 1), ((), {}, 0)]
    assert cache_entries(ModuleType) == []
