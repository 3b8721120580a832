"""The traceback of an app that cannot be imported is the app's: what we put into imports is not in it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumpstart import imports
from jumpstart.errors import AppLoadError
from jumpstart.recorder import WarmSettings
from jumpstart.recorders import bytecode
from jumpstart.recorders.bytecode import BytecodeRecorder
from jumpstart.records import Tally
from jumpstart.target import load_app

NAMES = ("jt_app", "jt_inner")
GOOD = {"jt_app": "import jt_inner\napp = len\n", "jt_inner": "value = 1\n"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def write(folder: Path, **sources: str) -> None:
    for name, source in (GOOD | sources).items():
        (folder / f"{name}.py").write_text(source)


def warm(folder: Path) -> BytecodeRecorder:
    """A recorder that has put its loader into imports, with code of a whole app."""
    write(folder)
    first = BytecodeRecorder(WarmSettings())
    load_app("jt_app:app", app_dir=folder)
    records = [record for record in first.capture("ship") if record.key in NAMES]
    assert len(records) == 2
    for name in NAMES:
        del sys.modules[name]
    recorder = BytecodeRecorder(WarmSettings())
    recorder.restore_early(records, Tally())
    return recorder


def failure(folder: Path) -> str:
    with pytest.raises(AppLoadError) as caught:
        load_app("jt_app:app", app_dir=folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sources", "shown", "last"),
    [
        ({"jt_app": "def f(:\n"}, ["jt_app"], "SyntaxError"),
        ({"jt_inner": "def f(:\n"}, ["jt_app", "jt_inner"], "SyntaxError"),
        ({"jt_inner": "1 / 0\n"}, ["jt_app", "jt_inner"], "ZeroDivisionError"),
        ({"jt_inner": "import no_such_thing\n"}, ["jt_app", "jt_inner"], "ModuleNotFoundError"),
        ({"jt_app": "1 / 0\n"}, ["jt_app"], "ZeroDivisionError"),
    ],
)
def test_our_loader_is_not_in_the_traceback(folder: Path, sources: dict[str, str], shown: list[str], last: str) -> None:
    warm(folder)
    write(folder, **sources)
    text = failure(folder)
    places = [line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")]
    assert places == [str(folder / f"{name}.py") for name in shown]
    assert last in text.splitlines()[-1]
    assert "more" not in text  # of frames that were left out


def test_an_error_of_ours_shows_where_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(folder)
    monkeypatch.setattr(bytecode, "_fix_co_filename", None)
    text = failure(folder)
    assert f'File "{bytecode.__file__}"' in text and text.endswith("TypeError: 'NoneType' object is not callable")
    assert imports.__file__ not in text


def test_a_module_that_was_broken_after_its_import_is_not_spoken_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = warm(folder)
    load_app("jt_app:app", app_dir=folder)
    write(folder, jt_inner="def f(:\n")
    with caplog.at_level(logging.INFO):
        keys = [record.key for record in recorder.capture("ship")]
    assert "jt_app" in keys and "jt_inner" not in keys
    assert caplog.text == ""
