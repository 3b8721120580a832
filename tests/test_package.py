"""What is shipped: the names, the files and the version."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import jumpstart

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "jumpstart": ROOT / "jumpstart",
    "jumpstart_warmup": ROOT / "warmup" / "jumpstart_warmup",
    "jumpstart_server": ROOT / "server" / "jumpstart_server",
}


@pytest.mark.parametrize("name", jumpstart.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(jumpstart, name) is not None


def test_public_names_are_few_sorted_and_all_that_a_star_gives() -> None:
    assert jumpstart.__all__ == sorted(jumpstart.__all__, key=lambda name: (not name[0].isupper(), name))
    namespace: dict[str, object] = {}
    exec("from jumpstart import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(jumpstart.__all__)


def test_an_app_that_imports_the_public_names_gets_no_server() -> None:
    heavy = (
        "jumpstart_server",
        "jumpstart_warmup",
        "uvicorn",
        "starlette",
        "click",
        "httpx",
        "cryptography",
        "diskcache",
    )
    source = f"import sys, jumpstart; print([name for name in {heavy!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


def test_a_worker_of_a_wsgi_app_does_without_what_asgi_needs() -> None:
    others = ("uvicorn", "starlette", "anyio", "click", "multiprocessing")
    source = (
        "import sys, jumpstart_server.mold, jumpstart_server.wsgi.engine; "
        f"print([name for name in {others!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


def test_the_version_is_one() -> None:
    version = jumpstart.__version__
    assert str(Version(version)) == version
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    releases = [heading for heading in headings if heading != "Unreleased"]
    assert releases[0] == version
    assert releases == sorted(releases, key=Version, reverse=True)


def test_every_module_can_be_imported() -> None:
    names = [
        ".".join([package, *path.relative_to(folder).with_suffix("").parts])
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    assert len(names) > 30
    for name in names:
        importlib.import_module(name)


def test_every_package_says_that_it_is_typed() -> None:
    for folder in PACKAGES.values():
        assert (folder / "py.typed").is_file()


@pytest.mark.slow
def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel's own builder is not installed")
    source = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.glob("*.whl")
    assert path.name == f"jumpstart_server-{jumpstart.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = f"jumpstart_server-{jumpstart.__version__}.dist-info"
        scripts = wheel.read(f"{info}/entry_points.txt").decode()
        licences = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == expected
    assert {name.split("/")[0] for name in shipped} == set(PACKAGES)
    assert all(f"{package}/py.typed" in shipped for package in PACKAGES)
    assert "jumpstart = jumpstart_server.__main__:main" in scripts
    assert licences
