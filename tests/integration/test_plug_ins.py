"""Recorders that others have written: found through their entry point, and harmless whatever they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.server import APPS, Serve
from tests.integration.shop import boot_report, sections

pytestmark = pytest.mark.slow

PLUG_IN = '''
from jumpstart.recorder import Recorder
from jumpstart.records import Record

class Good(Recorder):
    """Remembers one record for ever."""
    name = "good"
    def restore(self, app, records, tally):
        for record in records:
            tally.used(record)
    def capture(self, purpose):
        return [Record(key="remembered", data={"for": purpose})]

def boom(*arguments):
    raise RuntimeError("boom")

async def late_boom(*arguments):
    raise RuntimeError("boom")

class Early(Good):
    name = "bad-early"
    restore_early = boom

class Observe(Recorder):
    name = "bad-observe"
    observe = boom

class Restore(Recorder):
    name = "bad-restore"
    restore = boom

class Late(Recorder):
    name = "bad-late"
    restore_late = late_boom

class Capture(Recorder):
    name = "bad-capture"
    capture = boom

class Nonsense(Recorder):
    name = "bad-nonsense"
    def capture(self, purpose):
        return {"not": "a list"}

class Init(Recorder):
    name = "bad-init"
    def __init__(self, settings):
        raise RuntimeError("boom")

class Exits(Recorder):
    name = "bad-exits"
    def restore(self, app, records, tally):
        raise SystemExit(7)
'''
CLASSES = ("Good", "Early", "Observe", "Restore", "Late", "Capture", "Nonsense", "Init", "Exits")


@pytest.fixture
def plugged_in(tmp_path: Path) -> dict[str, str]:
    """The environment in which a distribution with these recorders is installed."""
    site = tmp_path / "site"
    info = site / "odd_recorders-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "odd_recorders.py").write_text(PLUG_IN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-recorders\nVersion: 1.0\n")
    points = "".join(f"{name.lower()} = odd_recorders:{name}\n" for name in CLASSES)
    (info / "entry_points.txt").write_text(f"[jumpstart.recorders]\n{points}missing = odd_recorders:Missing\n")
    return {"PYTHONPATH": str(site)}


def test_recorders_that_raise_are_switched_off(serve: Serve, plugged_in: dict[str, str]) -> None:
    """Each is logged with its traceback and named in the boot report; requests and good recorders do not notice."""
    for has_records in (False, True):
        with serve("wsgi_app:app", "-w", "2", app_dir=APPS / "wsgi_bare", env=plugged_in) as server:
            for _ in range(4):
                assert server.get("/").status_code == 200
            off = boot_report(server)["recorders_off"]
            for name, hook in (("observe", "observe"), ("restore", "restore"), ("late", "restore_late")):
                assert off[f"bad-{name}"] == f"{hook}: RuntimeError: boom"
                server.wait_for_line(rf"recorder bad-{name} is switched off: {hook}\(\) raised")
            assert off["bad-exits"] == "restore: SystemExit: 7"
            assert "good" not in off
            server.wait_for_line(r"recorder plug-in init = odd_recorders:Init is left out")
            server.wait_for_line(r"recorder plug-in missing = odd_recorders:Missing is left out")
            found = sections(server)
            if has_records:
                assert off["bad-early"] == "restore_early: RuntimeError: boom"
                (lost,) = found["bad-early"]["dropped"]
                assert (lost["key"], lost["reason"]) == ("remembered", "recorder-error")
                assert found["good"]["used"] == found["good"]["offered"] == 1
            else:
                assert "good" not in found
        server.wait_for_line(r"recorder bad-capture is switched off: capture\(\) raised")
        server.wait_for_line(r"recorder bad-nonsense is switched off: capture\(\) raised")


def test_a_plug_in_can_be_switched_off(serve: Serve, plugged_in: dict[str, str]) -> None:
    names = ("good", "bad-observe", "bad-restore", "bad-late", "bad-exits", "bad-early", "bad-capture", "bad-nonsense")
    options = [word for name in names for word in ("--disable-recorder", name)]
    with serve("wsgi_app:app", *options, app_dir=APPS / "wsgi_bare", env=plugged_in) as server:
        server.get("/")
        assert boot_report(server)["recorders_off"] == {}
    assert "is switched off" not in server.stderr
