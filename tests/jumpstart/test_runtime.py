"""Digests of what records depend on: located without importing, independent of paths."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from jumpstart import runtime
from jumpstart.runtime import (
    digest,
    distributions_digest,
    installed_distributions,
    is_app_module,
    is_as_loaded,
    loaded_dependency,
    module_dependency,
    runtime_key,
    sources_digest,
)

PYTHON = f"python-{runtime_key().version}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


def test_the_runtime_key_names_this_python() -> None:
    key = runtime_key()
    assert key.implementation == sys.implementation.name
    assert key.version.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert key.cache_tag == sys.implementation.cache_tag
    assert bytes.fromhex(key.magic) == importlib.util.MAGIC_NUMBER
    assert key == runtime_key()


@pytest.mark.parametrize("name", ["sys", "zipimport", "json.decoder", "importlib._bootstrap", "os", "wave", "_ssl"])
def test_the_standard_library_is_as_old_as_its_python(name: str) -> None:
    assert digest(f"module:{name}") == PYTHON


@pytest.mark.parametrize(
    "dependency",
    ["module:nosuch", "module:os.nosuch", "module:", "module:.", "module:a..b", "file:/etc/passwd", "x", ""],
)
def test_what_is_not_there_has_no_digest(dependency: str) -> None:
    assert digest(dependency) is None


def test_modules_are_located_without_importing_them_or_their_parents(site: Path) -> None:
    write(site / "jsparent" / "__init__.py", "raise RuntimeError('imported')")
    write(site / "jsparent" / "child" / "__init__.py", "raise RuntimeError('imported')")
    write(site / "jsparent" / "child" / "leaf.py", "raise RuntimeError('imported')")
    for name in ("jsparent", "jsparent.child", "jsparent.child.leaf"):
        assert str(digest(f"module:{name}")).startswith("sha256:")
        assert name not in sys.modules


def test_a_digest_follows_the_bytes_and_not_the_place(site: Path, tmp_path: Path) -> None:
    file = write(site / "jsmoving.py", "a = 1")
    first = digest("module:jsmoving")
    write(file, "a = 22")
    assert digest("module:jsmoving") != first
    file.unlink()
    write(site / "jsmoving" / "__init__.py", "a = 1")
    assert digest("module:jsmoving") == first
    assert module_dependency("jsmoving") == {"module:jsmoving": first}
    assert module_dependency("jsnosuch") == {}


def test_a_dependency_is_noted_of_what_was_loaded(site: Path) -> None:
    """The file may be replaced under the running process; a reload notes it anew, a lost source is never valid."""
    file = write(site / "jsloaded.py", "a = 1")
    module = importlib.import_module("jsloaded")
    try:
        noted = loaded_dependency("jsloaded")
        assert noted == module_dependency("jsloaded") and is_as_loaded(noted)
        write(file, "a = 22")
        assert loaded_dependency("jsloaded") == noted != module_dependency("jsloaded")
        assert not is_as_loaded(noted)
        importlib.invalidate_caches()
        importlib.reload(module)
        assert loaded_dependency("jsloaded") == module_dependency("jsloaded")
        file.unlink()
        assert not is_as_loaded(loaded_dependency("jsloaded"))
        assert not is_as_loaded({})
    finally:
        del sys.modules["jsloaded"]


def test_a_file_of_the_same_size_and_time_is_told_apart(site: Path) -> None:
    """Deploy tools keep modification times, or set all of them to one."""
    file = write(site / "jstimes.py", "a = 1")
    os.utime(file, ns=(0, 0))
    first = digest("module:jstimes")
    successor = write(site / "jstimes.new", "a = 2")
    os.utime(successor, ns=(0, 0))
    successor.replace(file)
    assert digest("module:jstimes") != first


def test_the_main_script_has_no_digest(site: Path) -> None:
    write(site / "__main__.py", "a = 1")
    assert module_dependency("__main__") == {}


def test_namespace_packages_and_what_is_below_them(site: Path) -> None:
    write(site / "jsspace" / "inner" / "leaf.py")
    assert digest("module:jsspace") == "namespace"
    assert digest("module:jsspace.inner") == "namespace"
    assert str(digest("module:jsspace.inner.leaf")).startswith("sha256:")
    assert "jsspace" not in sys.modules


def test_a_module_in_a_zip_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("jszipped.py", "a = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "lib.zip"))
    write(tmp_path / "plain" / "jsplain.py", "a = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "plain"))
    assert digest("module:jszipped") == digest("module:jsplain") is not None


def test_a_loaded_module_answers_by_its_spec_and_odd_objects_do_no_harm(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    write(site / "jsodd.py", "a = 1")
    monkeypatch.setitem(sys.modules, "jsodd", Hostile())
    assert str(digest("module:jsodd")).startswith("sha256:")
    monkeypatch.setitem(sys.modules, "jsmade", ModuleType("jsmade"))
    assert digest("module:jsmade") is None
    assert digest("module:pytest") is not None


def test_our_own_finders_are_not_asked_and_broken_ones_are_passed_over(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ours:
        jumpstart_finder = True

        def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
            raise AssertionError("asked")

    class Broken:
        def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
            raise RuntimeError("broken")

    write(site / "jsbehind.py")
    monkeypatch.setattr(sys, "meta_path", [Ours(), Broken(), *sys.meta_path])
    assert digest("module:jsbehind") is not None


def test_distributions_are_known_by_version() -> None:
    assert digest("dist:pytest") == pytest.__version__
    assert digest("dist:no-such-distribution") is None
    installed = installed_distributions()
    assert ("pytest", pytest.__version__) in installed
    assert distributions_digest(installed) == distributions_digest(reversed(installed))
    assert distributions_digest(installed) != distributions_digest([*installed, ("new", "1")])
    assert distributions_digest(installed).startswith("sha256:")


def test_the_sources_digest_takes_the_apps_sources_and_nothing_else(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        write(root / "app.py", "a")
        write(root / "pkg" / "b.py", "b")
    write(two / ".git" / "x.py")
    write(two / "pkg" / "__pycache__" / "x.py")
    write(two / "node_modules" / "x.py")
    write(two / "env" / "pyvenv.cfg")
    write(two / "env" / "x.py")
    write(two / "readme.txt")
    assert sources_digest(one) == sources_digest(two)
    write(two / "pkg" / "b.py", "c")
    assert sources_digest(one) != sources_digest(two)


def test_the_sources_digest_says_when_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write(tmp_path / f"m{number}.py")
    monkeypatch.setattr(runtime, "MAX_SOURCE_FILES", 2)
    assert sources_digest(tmp_path).startswith("sha256-partial:")
    monkeypatch.setattr(runtime, "MAX_SOURCE_FILES", 3)
    assert sources_digest(tmp_path).startswith("sha256:")
    write(tmp_path / "link.py").unlink()
    (tmp_path / "link.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(runtime, "MAX_SOURCE_FILES", 9)
    assert sources_digest(tmp_path).startswith("sha256:")


def test_the_apps_own_modules_are_told_from_installed_ones(site: Path) -> None:
    write(site / "jsown.py")
    write(site / "jsenv" / "pyvenv.cfg")
    write(site / "jsenv" / "inside.py")
    write(site / "site-packages" / "jsinstalled.py")
    assert is_app_module("jsown", site)
    assert not is_app_module("jsenv.inside", site)
    assert not is_app_module("jsnosuch", site)
    assert not is_app_module("pytest", site)
    assert not is_app_module("os", Path("/"))
    assert not is_app_module("sys", Path("/"))
    module = ModuleType("jsfree")
    assert not is_app_module(module, site)
    module.__file__ = str(site / "site-packages" / "jsinstalled.py")
    assert not is_app_module(module, site)
    module.__file__ = str(site / "jsown.py")
    assert is_app_module(module, site)
