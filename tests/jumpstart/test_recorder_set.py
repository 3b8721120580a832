"""The recorders of a process: found once, called together, switched off one by one."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

import jumpstart.recorders
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.recorders import RecorderSet, load_recorders
from jumpstart.records import MAX_WEIGHT, Reason, Record, Tally, merge


class Good(Recorder):
    name: ClassVar[str] = "good"

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self.calls: list[tuple[str, list[str]]] = []

    def observe(self) -> None:
        self.calls.append(("observe", []))

    def restore_early(self, records: Sequence[Record], tally: Tally) -> None:
        self.calls.append(("restore_early", [record.key for record in records]))
        tally.used(records[0])

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self.calls.append(("restore", [record.key for record in records]))
        for record in records[:1]:
            tally.drop(record, Reason.STALE)

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self.calls.append(("restore_late", [record.key for record in records]))

    def capture(self, purpose: Purpose) -> list[Record]:
        return [Record(key=purpose)]


class Bad(Recorder):
    """Raises in the hook that it is told to."""

    name: ClassVar[str] = "bad"

    def __init__(self, settings: WarmSettings, hook: str = "", error: BaseException | None = None) -> None:
        super().__init__(settings)
        self.hook = hook
        self.error = error or ZeroDivisionError("on purpose")
        self.called: list[str] = []

    def _call(self, hook: str) -> None:
        self.called.append(hook)
        if hook == self.hook:
            raise self.error

    def observe(self) -> None:
        self._call("observe")

    def restore_early(self, records: Sequence[Record], tally: Tally) -> None:
        self._call("restore_early")

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self._call("restore")

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self._call("restore_late")

    def capture(self, purpose: Purpose) -> list[Record]:
        self._call("capture")
        return []


HOOKS = ["observe", "restore_early", "restore", "restore_late", "capture"]


def boot(recorders: RecorderSet) -> tuple[dict[str, Tally], dict[str, list[Record]]]:
    sections = {name: [Record(key=f"{name}{number}") for number in range(3)] for name in ("bad", "good")}
    tallies: dict[str, Tally] = {}
    recorders.observe()
    recorders.restore_early(sections, tallies)
    recorders.restore(None, sections, tallies)
    asyncio.run(recorders.restore_late(None, sections, tallies))
    return tallies, recorders.capture("ship")


def test_each_hook_gets_the_records_that_none_has_tallied() -> None:
    good = Good(WarmSettings())
    tallies, captured = boot(RecorderSet([good]))
    assert good.calls == [
        ("observe", []),
        ("restore_early", ["good0", "good1", "good2"]),
        ("restore", ["good1", "good2"]),
        ("restore_late", ["good2"]),
    ]
    assert captured == {"good": [Record(key="ship")]}
    assert tallies["good"].used_keys == {"good0"}


def test_without_records_recorders_prepare_frameworks_all_the_same() -> None:
    good = Good(WarmSettings())
    recorders = RecorderSet([good])
    recorders.restore_early({}, {})
    recorders.restore("app", {}, {})
    assert good.calls == [("restore", [])]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [ZeroDivisionError("on purpose"), SystemExit(3)])
def test_a_recorder_that_raises_is_switched_off_and_harms_nothing(
    hook: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Bad(WarmSettings(), hook, error), Good(WarmSettings())
    recorders = RecorderSet([bad, good])
    tallies, captured = boot(recorders)
    assert recorders.off == {"bad": f"{hook}: {type(error).__name__}: {error}"}
    assert bad.called == HOOKS[: HOOKS.index(hook) + 1]
    assert recorders.get("bad") is None and recorders.get("good") is good and recorders.get("none") is None
    assert len(good.calls) == 4 and captured == {"good": [Record(key="ship")]}
    if hook != "capture":
        assert {dropped.reason for dropped in tallies["bad"].dropped} == {Reason.RECORDER_ERROR}
        assert [dropped.key for dropped in tallies["bad"].dropped] == ["bad0", "bad1", "bad2"]
    assert "Traceback" in caplog.text and "bad" in caplog.text


def test_a_capture_that_is_no_list_of_records_switches_off() -> None:
    bad = Bad(WarmSettings())
    bad.capture = lambda purpose: [{"key": "k"}]  # type: ignore[method-assign, list-item]
    recorders = RecorderSet([bad])
    assert recorders.capture("host") == {}
    assert list(recorders.off) == ["bad"]


def test_ctrl_c_and_cancellation_pass_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        RecorderSet([Bad(WarmSettings(), "observe", KeyboardInterrupt())]).observe()
    recorders = RecorderSet([Bad(WarmSettings(), "restore_late", asyncio.CancelledError())])
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(recorders.restore_late(None, {}, {}))
    assert not recorders.off


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points that the test says are installed."""
    installed: list[EntryPoint] = []
    monkeypatch.setattr(jumpstart.recorders, "_entry_points", lambda: tuple(installed))
    return installed


def add(plug_ins: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, **classes: Any) -> None:
    module = type(sys)("plugged_in")
    module.__dict__.update(classes)
    monkeypatch.setitem(sys.modules, "plugged_in", module)
    plug_ins += [EntryPoint(name, f"plugged_in:{name}", jumpstart.recorders.GROUP) for name in classes]


def names(recorders: list[Recorder]) -> list[str]:
    return [recorder.name for recorder in recorders]


def test_built_in_recorders_come_in_order_and_can_be_disabled(plug_ins: list[EntryPoint]) -> None:
    every = names(load_recorders(WarmSettings()))
    assert every[:7] == ["modules", "bytecode", "regex", "lru-cache", "config", "service", "cached"]
    left = names(load_recorders(WarmSettings(disabled=("regex", "lru-cache", "nothing-of-that-name"))))
    assert left == [name for name in every if name not in ("regex", "lru-cache")]


def test_plug_ins_are_added_and_broken_ones_left_out(
    plug_ins: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Duplicate(Good):
        name = "modules"

    class Misnamed(Good):
        name = "Not A Name"

    class NotOne:
        name = "not-one"

        def __init__(self, settings: WarmSettings) -> None: ...

    def exits(settings: WarmSettings) -> None:
        raise SystemExit(1)

    add(plug_ins, monkeypatch, Good=Good, Dup=Duplicate, Mis=Misnamed, Not=NotOne, Exits=exits)
    plug_ins.append(EntryPoint("gone", "no_such_module_at_all:Recorder", jumpstart.recorders.GROUP))
    plug_ins.append(EntryPoint("less", "json:no_such_name", jumpstart.recorders.GROUP))
    built_in = [name for name in names(load_recorders(WarmSettings())) if name != "good"]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert names(load_recorders(WarmSettings())) == [*built_in, "good"]
    assert len(caplog.records) == 6


def test_entry_points_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[str] = []

    def entry_points(group: str) -> list[EntryPoint]:
        lookups.append(group)
        raise OSError("unreadable metadata harms nothing")

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    jumpstart.recorders._entry_points.cache_clear()
    try:
        assert isinstance(RecorderSet.load(WarmSettings()), RecorderSet)
        load_recorders(WarmSettings())
    finally:
        jumpstart.recorders._entry_points.cache_clear()
    assert lookups == ["jumpstart.recorders"]


def test_loading_recorders_imports_no_framework() -> None:
    code = (
        "import sys; from jumpstart.recorder import WarmSettings; from jumpstart.recorders import RecorderSet\n"
        "recorders = RecorderSet.load(WarmSettings()); recorders.observe(); recorders.restore(None, {}, {})\n"
        "recorders.capture('host')\n"
        "heavy = 'jinja2 django flask starlette fastapi sqlalchemy cloudpickle pydantic diskcache cryptography'\n"
        "print([name for name in heavy.split() if name in sys.modules], recorders.off)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] {}\n"


def test_no_restart_multiplies_a_weight() -> None:
    """Whoever merges has the base: what was restored weighs nothing when it is captured again."""

    class Keeps(Recorder):
        name = "keeps"

        def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
            self.records = [*records, Record(key="new")]

        def capture(self, purpose: Purpose) -> list[Record]:
            return self.records

    base = [Record(key="old", weight=7)]
    for _ in range(100):
        workers = []
        for _ in range(12):
            recorders = RecorderSet([Keeps(WarmSettings())])
            recorders.restore(None, {"keeps": base}, {})
            workers.append(recorders.capture("host")["keeps"])
        base = merge(base, *workers)
    weights = {record.key: record.weight for record in base}
    assert weights == {"old": 7, "new": 12}


def test_a_weight_has_an_end() -> None:
    heavy = [Record(key="a", weight=MAX_WEIGHT - 1)]
    [merged] = merge(heavy, heavy, heavy)
    assert merged.weight == MAX_WEIGHT
