"""Bytecode from a profile: only where there is no valid ``.pyc``, only for the very same source, else invisible."""

from __future__ import annotations

import marshal
import os
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jumpstart.recorder import WarmSettings
from jumpstart.recorders.bytecode import BytecodeRecorder, read_pyc
from jumpstart.records import Record, Tally

PROGRAM = """
import sys, msgspec
sys.path.insert(0, sys.argv[1])
from jumpstart.recorder import WarmSettings
from jumpstart.recorders.bytecode import BytecodeRecorder
from jumpstart.records import Record, Tally
from pathlib import Path
before, after, purpose = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
recorder, tally = BytecodeRecorder(WarmSettings()), Tally()
recorder.observe()
if before.exists():
    records = msgspec.msgpack.decode(before.read_bytes(), type=list[Record])
    recorder.restore_early(records, tally)
compiled = []
real = compile
import builtins
def spy(source, name, *args, **kwargs):
    compiled.append(str(name))
    return real(source, name, *args, **kwargs)
builtins.compile = spy
import shop_pkg, shop_pkg.prices
builtins.compile = real
if before.exists():
    recorder.restore(None, records, tally)
import inspect, importlib.resources, pkgutil, traceback
try:
    shop_pkg.prices.fails()
except ZeroDivisionError as error:
    frame = traceback.extract_tb(error.__traceback__)[-1]
print(msgspec.json.encode({
    "used": sorted(tally.used_keys),
    "dropped": {d.key: d.reason for d in tally.dropped},
    "compiled": len([name for name in compiled if "shop_pkg" in name]),
    "value": shop_pkg.prices.value,
    "file": shop_pkg.prices.__file__,
    "trace": [frame.filename, frame.line],
    "source": inspect.getsource(shop_pkg.prices.fails),
    "resource": importlib.resources.files("shop_pkg").joinpath("data.txt").read_text(),
    "pkgutil": pkgutil.get_data("shop_pkg", "data.txt").decode(),
    "modules": [m.name for m in pkgutil.iter_modules(shop_pkg.__path__)],
}).decode())
after.write_bytes(msgspec.msgpack.encode([r for r in recorder.capture(purpose) if r.key.startswith("shop_pkg")]))
"""


def shop(folder: Path, value: int = 1) -> Path:
    package = folder / "shop_pkg"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "prices.py").write_text(f"value = {value}\n\ndef fails():\n    return 1 / 0\n")
    (package / "data.txt").write_text("text")
    return folder


def run(folder: Path, before: Path, after: Path, purpose: str = "host", write: bool = False) -> dict[str, Any]:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "" if write else "1"}
    command = [sys.executable, "-c", PROGRAM, str(folder), str(before), str(after), purpose]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = msgspec.json.decode(done.stdout)
    return result


def keys(path: Path) -> list[str]:
    return [record.key for record in msgspec.msgpack.decode(path.read_bytes(), type=list[Record])]


def test_a_host_without_pycache_compiles_once_and_other_folders_profit(tmp_path: Path) -> None:
    """Three generations; the third lives in another folder, as a deploy does."""
    first, second, third = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    app = shop(tmp_path / "app")
    assert run(app, tmp_path / "none", first)["compiled"] == 2
    result = run(app, first, second)
    assert result["compiled"] == 0
    assert result["used"] == ["shop_pkg", "shop_pkg.prices"]
    assert keys(first) == keys(second) == ["shop_pkg", "shop_pkg.prices"]
    moved = shop(tmp_path / "moved")
    result = run(moved, second, third)
    assert result["compiled"] == 0
    assert result["file"] == str(moved / "shop_pkg" / "prices.py")
    assert result["trace"] == [str(moved / "shop_pkg" / "prices.py"), "return 1 / 0"]
    assert result["source"] == "def fails():\n    return 1 / 0\n"
    assert result["resource"] == result["pkgutil"] == "text"
    assert result["modules"] == ["prices"]


def test_code_of_another_source_is_not_used(tmp_path: Path) -> None:
    app = shop(tmp_path / "app")
    run(app, tmp_path / "none", tmp_path / "1")
    shop(app, value=2)  # behind the back of the boot's check
    result = run(app, tmp_path / "1", tmp_path / "2")
    assert result["value"] == 2
    assert result["used"] == ["shop_pkg"]
    assert result["dropped"] == {"shop_pkg.prices": "stale"}
    assert keys(tmp_path / "2") == ["shop_pkg", "shop_pkg.prices"]


def test_a_valid_pycache_file_wins_and_is_not_recorded_for_the_host(tmp_path: Path) -> None:
    app = shop(tmp_path / "app")
    run(app, tmp_path / "none", tmp_path / "1", purpose="ship", write=True)
    assert keys(tmp_path / "1") == ["shop_pkg", "shop_pkg.prices"]
    result = run(app, tmp_path / "1", tmp_path / "2")
    assert result["compiled"] == 0
    assert result["dropped"] == {"shop_pkg": "not-applicable", "shop_pkg.prices": "not-applicable"}
    assert keys(tmp_path / "2") == []


def test_damaged_code_costs_its_record_only(tmp_path: Path) -> None:
    app = shop(tmp_path / "app")
    run(app, tmp_path / "none", tmp_path / "1")
    records = msgspec.msgpack.decode((tmp_path / "1").read_bytes(), type=list[Record])
    for code in (b"", marshal.dumps("not code"), records[1].data["code"][:20]):
        damaged = msgspec.structs.replace(records[1], data={**records[1].data, "code": code})
        (tmp_path / "bad").write_bytes(msgspec.msgpack.encode([records[0], damaged]))
        result = run(app, tmp_path / "bad", tmp_path / "2")
        assert result["value"] == 1
        assert result["dropped"] == {"shop_pkg.prices": "failed"}
        assert keys(tmp_path / "2") == ["shop_pkg", "shop_pkg.prices"]


def test_records_for_another_level_or_without_sense_are_dropped() -> None:
    recorder, tally = BytecodeRecorder(WarmSettings()), Tally()
    recorder.restore_early(
        [
            Record(key="other_level", data={"code": b"", "opt": sys.flags.optimize + 1, "src": ""}),
            Record(key="malformed", data={"code": "text"}),
            Record(key="json", data={"code": b"", "opt": sys.flags.optimize, "src": ""}),
        ],
        tally,
    )
    assert [str(dropped.reason) for dropped in tally.dropped] == ["not-applicable", "malformed", "not-applicable"]
    assert recorder._finder is None


def test_profiles_carry_no_bytecode_when_told_not_to() -> None:
    assert BytecodeRecorder(WarmSettings(bytecode=False)).capture("ship") == []


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_read_pyc_judges_as_the_import_system_does(tmp_path: Path, mode: py_compile.PycInvalidationMode) -> None:
    source = tmp_path / "judged.py"
    source.write_text("a = 1")
    assert read_pyc(str(source)) is None
    cached = py_compile.compile(str(source), invalidation_mode=mode)
    assert cached is not None
    body = read_pyc(str(source))
    assert body is not None and marshal.loads(body).co_filename == str(source)
    assert read_pyc(str(source), header_only=True) == b""
    source.write_text("a = 1000")
    unchecked = mode is py_compile.PycInvalidationMode.UNCHECKED_HASH
    assert (read_pyc(str(source)) is not None) is unchecked
    for broken in (b"", b"\0" * 16, Path(cached).read_bytes()[:4] + b"\xff" * 12):
        Path(cached).write_bytes(broken)
        assert read_pyc(str(source)) is None
