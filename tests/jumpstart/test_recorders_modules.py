"""Modules that requests import: recorded in order, imported at boot."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumpstart import imports
from jumpstart.context import RequestContext, request_context
from jumpstart.recorder import WarmSettings
from jumpstart.recorders.modules import ModulesRecorder
from jumpstart.records import Reason, Record, Tally


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "_lazy", {})
    before = set(sys.modules)
    yield tmp_path
    forget(before)


def forget(before: set[str]) -> None:
    for name in set(sys.modules) - before:
        del sys.modules[name]


def reasons(tally: Tally) -> dict[str, Reason]:
    return {dropped.key: dropped.reason for dropped in tally.dropped}


def test_a_second_and_a_third_process_get_the_modules_in_order(folder: Path) -> None:
    (folder / "first_lazy.py").write_text("import second_lazy")
    (folder / "second_lazy.py").write_text("")
    before = set(sys.modules)
    recorder = ModulesRecorder(WarmSettings())
    recorder.observe()
    request = RequestContext()
    with request_context(request):
        importlib.import_module("first_lazy")
    imports.import_events(request)
    records = recorder.capture("host")
    assert [record.key for record in records] == ["first_lazy", "second_lazy"]
    assert set(records[0].depends) == {"module:first_lazy"}
    for _ in range(2):
        forget(before)
        imports._lazy.clear()
        recorder, tally = ModulesRecorder(WarmSettings()), Tally()
        recorder.restore(None, records, tally)
        assert tally.used_keys == {"first_lazy", "second_lazy"} and not tally.dropped
        assert {"first_lazy", "second_lazy"} <= set(sys.modules)
        assert recorder.capture("host") == records


def test_a_module_whose_source_was_replaced_or_removed_is_not_recorded(folder: Path) -> None:
    file = folder / "pulled_lazy.py"
    file.write_text("")
    recorder = ModulesRecorder(WarmSettings())
    recorder.observe()
    with request_context(RequestContext()) as request:
        importlib.import_module("pulled_lazy")
    imports.import_events(request)
    [record] = recorder.capture("host")
    file.write_text("# pulled")
    assert recorder.capture("host") == []
    file.unlink()
    assert recorder.capture("host") == []
    file.write_text("")
    assert recorder.capture("host") == [record]


def test_a_module_that_raises_or_exits_costs_its_record_only(folder: Path) -> None:
    (folder / "exits_mod.py").write_text("raise SystemExit(3)")
    (folder / "raises_mod.py").write_text("1 / 0")
    (folder / "good_mod.py").write_text("")
    (folder / "vanishing_mod.py").write_text("import sys; sys.modules[__name__] = None")
    tally = Tally()
    recorder = ModulesRecorder(WarmSettings())
    names = ["exits_mod", "raises_mod", "absent_mod", "good_mod", "json"]
    recorder.restore(None, [Record(key=name) for name in names], tally)
    assert tally.used_keys == {"good_mod"}
    assert reasons(tally) == {
        "exits_mod": Reason.FAILED,
        "raises_mod": Reason.FAILED,
        "absent_mod": Reason.FAILED,
        "json": Reason.NOT_APPLICABLE,
    }
    assert [record.key for record in recorder.capture("ship")] == ["good_mod"]


def test_ctrl_c_while_a_module_is_imported_is_not_swallowed(folder: Path) -> None:
    (folder / "interrupted_mod.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        ModulesRecorder(WarmSettings()).restore(None, [Record(key="interrupted_mod")], Tally())


def test_out_of_time_keeps_the_rest_for_the_next_boot(folder: Path) -> None:
    (folder / "late_mod.py").write_text("")
    recorder, tally = ModulesRecorder(WarmSettings()), Tally(deadline=0, clock=lambda: 1)
    recorder.restore(None, [Record(key="late_mod")], tally)
    assert reasons(tally) == {"late_mod": Reason.DEADLINE}
    assert "late_mod" not in sys.modules
    assert [record.key for record in recorder.capture("host")] == ["late_mod"]


def test_modules_without_a_spec_of_their_name_are_not_recorded(folder: Path) -> None:
    sys.modules["made_by_hand"] = type(sys)("made_by_hand")
    imports._lazy.update(dict.fromkeys(["made_by_hand", "__main__", "gone_again", "json"]))
    assert [record.key for record in ModulesRecorder(WarmSettings()).capture("host")] == ["json"]
