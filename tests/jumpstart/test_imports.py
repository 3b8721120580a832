"""The import observer: what requests import, and hooks that run when a module has arrived."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jumpstart import imports, runtime
from jumpstart.context import RequestContext, request_context
from jumpstart.imports import file_of, spec_of, when_imported
from jumpstart.recorder import WarmSettings
from jumpstart.recorders import load_recorders
from jumpstart.records import Tally


@pytest.fixture
def observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, with the observer installed for the test only."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "_hooks", {})
    monkeypatch.setattr(imports, "_lazy", {})
    before = set(sys.modules)
    imports.install()
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_it_is_installed_first_and_once(observed: Path) -> None:
    imports.install()
    assert [finder for finder in sys.meta_path if isinstance(finder, imports.ImportObserver)] == [sys.meta_path[0]]
    assert getattr(sys.meta_path[0], "jumpstart_finder", False)


def test_imports_of_a_request_are_its_events_in_order(observed: Path) -> None:
    """Failed optional imports, probes and repetitions are none."""
    (observed / "inner_mod.py").write_text("")
    (observed / "outer_mod.py").write_text("import inner_mod")
    (observed / "probed_mod.py").write_text("")
    request = RequestContext()
    with request_context(request):
        importlib.import_module("outer_mod")
        importlib.import_module("outer_mod")
        assert importlib.util.find_spec("probed_mod") is not None
        with pytest.raises(ImportError):
            importlib.import_module("absent_mod")
    assert imports.import_events(request) == ["outer_mod", "inner_mod"]
    assert imports.lazy_imports() == ["outer_mod", "inner_mod"]
    assert imports.import_events(RequestContext()) == []


def test_imports_outside_requests_are_not_remembered(observed: Path) -> None:
    (observed / "eager_mod.py").write_text("")
    importlib.import_module("eager_mod")
    assert imports.lazy_imports() == []


def test_what_is_remembered_is_bounded(observed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "MAX_LAZY", 2)
    monkeypatch.setattr(imports, "MAX_IMPORTS", 3)
    request = RequestContext()
    for number in range(5):
        (observed / f"bounded{number}.py").write_text("")
    with request_context(request):
        for number in range(5):
            importlib.import_module(f"bounded{number}")
    assert imports.import_events(request) == ["bounded0", "bounded1", "bounded2"]
    assert imports.lazy_imports() == ["bounded0", "bounded1"]


def test_a_hook_runs_at_once_for_a_module_that_is_there(observed: Path) -> None:
    got: list[ModuleType] = []
    imports.when_imported("json", got.append)
    assert got == [sys.modules["json"]]


def test_a_hook_runs_after_the_module_and_leaves_everything_as_it_is(observed: Path) -> None:
    (observed / "hooked_pkg").mkdir()
    (observed / "hooked_pkg" / "__init__.py").write_text("state = 'half'\nstate = 'whole'\ndef f():\n    return 1\n")
    (observed / "hooked_pkg" / "data.txt").write_text("text")
    got: list[tuple[str, int]] = []
    imports.when_imported("hooked_pkg", lambda module: got.append((module.state, threading.get_ident())))
    assert importlib.util.find_spec("hooked_pkg") is not None  # a probe neither imports nor uses up the hook
    assert got == []
    module = importlib.import_module("hooked_pkg")
    assert got == [("whole", threading.get_ident())]
    assert type(module.__spec__) is ModuleSpec
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__) is SourceFileLoader
    assert inspect.getsource(module.f) == "def f():\n    return 1\n"
    assert importlib.resources.files("hooked_pkg").joinpath("data.txt").read_text() == "text"
    importlib.reload(module)
    assert len(got) == 1


@pytest.mark.parametrize("kind", ["extension", "builtin-less namespace"])
def test_hooks_run_for_modules_of_any_kind(observed: Path, kind: str) -> None:
    (observed / "namespace_pkg").mkdir()
    name = "namespace_pkg" if kind != "extension" else "_testcapi"
    if kind == "extension" and (name in sys.modules or importlib.util.find_spec(name) is None):
        pytest.skip("this Python has no extension module to try")
    got: list[str] = []
    imports.when_imported(name, lambda module: got.append(module.__name__))
    importlib.import_module(name)
    assert got == [name]


def test_a_hook_that_raises_is_logged_and_breaks_nothing(observed: Path, caplog: pytest.LogCaptureFixture) -> None:
    (observed / "victim_mod.py").write_text("x = 1")
    got: list[int] = []

    def broken(module: ModuleType) -> None:
        raise ZeroDivisionError("in a hook")

    imports.when_imported("victim_mod", broken)
    imports.when_imported("victim_mod", lambda module: got.append(module.x))
    with caplog.at_level(logging.ERROR):
        importlib.import_module("victim_mod")
    assert got == [1]
    assert "victim_mod" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_failed_import_keeps_the_hook_for_the_next_attempt(observed: Path) -> None:
    (observed / "flaky_mod.py").write_text("raise ImportError('not yet')")
    got: list[str] = []
    imports.when_imported("flaky_mod", lambda module: got.append(module.__name__))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("flaky_mod")
    assert got == []
    (observed / "flaky_mod.py").write_text("y = 12345")
    importlib.invalidate_caches()
    importlib.import_module("flaky_mod")
    assert got == ["flaky_mod"]


def test_a_hook_set_while_the_module_is_being_imported_runs_when_it_is_done(observed: Path) -> None:
    (observed / "busy_mod.py").write_text(
        "from jumpstart import imports\n"
        "seen = []\n"
        "imports.when_imported('busy_mod', lambda module: seen.append(module.late))\n"
        "assert seen == []\n"
        "late = 'late'\n"
    )
    assert importlib.import_module("busy_mod").seen == ["late"]


def test_hooks_and_imports_of_many_threads_do_not_miss_each_other(observed: Path) -> None:
    """Each hook is called exactly once, whichever comes first."""
    names = [f"raced{number}" for number in range(30)]
    for name in names:
        (observed / f"{name}.py").write_text("z = sum(range(1000))")
    got: list[str] = []
    start = threading.Barrier(3)

    def register() -> None:
        start.wait()
        for name in names:
            imports.when_imported(name, lambda module: got.append(module.__name__))

    def load(order: list[str]) -> None:
        start.wait()
        for name in order:
            importlib.import_module(name)

    threads = [
        threading.Thread(target=register),
        threading.Thread(target=load, args=(names,)),
        threading.Thread(target=load, args=(names[::-1],)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(names)


def test_another_finder_that_asks_find_spec_does_not_recurse(observed: Path) -> None:
    """As wrapt and OpenTelemetry do it."""
    (observed / "wrapped_mod.py").write_text("")

    class Nosy:
        busy = False

        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if self.busy or name != "wrapped_mod":
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    sys.meta_path.insert(1, Nosy())
    got: list[str] = []
    imports.when_imported("wrapped_mod", lambda module: got.append(module.__name__))
    importlib.import_module("wrapped_mod")
    assert got == ["wrapped_mod"]


def test_running_a_watched_module_as_a_program_works(tmp_path: Path) -> None:
    (tmp_path / "prog_mod.py").write_text("print('ran as', __name__)")
    code = (
        "import runpy; from jumpstart import imports\n"
        "imports.when_imported('prog_mod', print)\n"
        "runpy.run_module('prog_mod', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "ran as __main__\n"


def test_odd_entries_of_sys_modules_are_read_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies, None, modules that load themselves when they are looked at: every recorder walks over them."""

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise SystemExit(name)

        __spec__ = property(lambda self: 1 / 0)
        __file__ = property(lambda self: 1 / 0)
        __path__ = property(lambda self: 1 / 0)

    class Hidden(Odd):
        __dict__ = property(lambda self: 1 / 0)  # what a proxy may do

    (tmp_path / "js_unloaded.py").write_text("raise AssertionError('loaded by looking at it')")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("js_unloaded")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    unloaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unloaded)
    slots = type("Slots", (), {"__slots__": ()})()
    odd = {"js_odd": Odd(), "js_hidden": Hidden(), "js_slots": slots, "js_class": Odd, "js_unloaded": unloaded}
    for name, module in odd.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "js_none", None)  # forbids an import
    for name in (*odd, "js_none"):
        spec_of(sys.modules[name]), file_of(sys.modules[name])
        assert runtime.loaded_dependency(f"{name}.below") == {}
        assert not runtime.is_app_module(name, Path("/nonexistent"))
        monkeypatch.setitem(imports._lazy, name, None)
    when_imported("js_odd", lambda module: None)
    settings = WarmSettings(lru_cache=("js_*",), app_dir=str(tmp_path))
    for recorder in load_recorders(settings):
        recorder.restore(object(), [], Tally())
        captured = {record.key for record in recorder.capture("host")}
        assert not captured.intersection({*odd, "js_none"} - {"js_unloaded"})
    assert type(unloaded).__name__ == "_LazyModule", "it has not been loaded"
