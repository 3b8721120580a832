"""`cached(shared=True)`: values that processes of one host share, and stores that cannot be used."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jumpstart import shared_values
from jumpstart.warmstart import ValueStore

SOURCE = """
from jumpstart import cached
calls = []
VERSION = ""

@cached(ttl=300, shared=True, version=VERSION)
def prices(region, *, vat=True):
    calls.append(region)
    return {region: vat}

@cached(shared=True)
async def stock(item):
    calls.append(item)
    return [item]

@cached(shared=True)
def handle():
    calls.append("handle")
    return (i for i in ())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "host").mkdir(mode=0o700)
    warm_start = tmp_path / "host" / "warm-start"
    shared_values.use_folder(warm_start)
    yield tmp_path / "host" / "shared-values"
    shared_values.use_folder(None)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes the module as one more worker has it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def fresh(source: str = SOURCE) -> Any:
        (tmp_path / "shared_shop.py").write_text(source)
        sys.modules.pop("shared_shop", None)
        import importlib

        importlib.invalidate_caches()
        return importlib.import_module("shared_shop")

    yield fresh
    sys.modules.pop("shared_shop", None)


def test_two_processes_share_values(folder: Path, worker: Callable[..., Any], tmp_path: Path) -> None:
    worker()
    code = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(tmp_path)!r})
from jumpstart import shared_values
shared_values.use_folder(Path({str(folder.with_name("warm-start"))!r}))
import shared_shop
print(shared_shop.prices("eu", vat=False), asyncio.run(shared_shop.stock("a")), len(shared_shop.calls))
print(shared_shop.prices.cache_info().loads)
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
        ).stdout.split("\n")
        for _ in range(2)
    ]
    assert outputs == [["{'eu': False} ['a'] 2", "0", ""], ["{'eu': False} ['a'] 0", "1", ""]]
    shop = worker()
    assert shop.prices("eu", vat=False) == {"eu": False} and shop.calls == []
    info = shop.prices.cache_info()
    assert (info.misses, info.loads, info.computations) == (1, 1, 0)
    assert shop.prices("eu") == {"eu": True} and shop.calls == ["eu"], "other arguments"


def test_values_of_other_code_are_not_used(folder: Path, worker: Callable[..., Any]) -> None:
    worker().prices("eu")
    for source in (SOURCE + "# changed\n", SOURCE.replace('VERSION = ""', 'VERSION = "2"')):
        shop = worker(source)
        shop.prices("eu")
        assert shop.calls == ["eu"]
    assert worker().prices("eu") and not sys.modules["shared_shop"].calls


def test_a_value_keeps_its_age(folder: Path, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shop = worker()
    shop.prices("eu")
    cache = shop.prices.__jumpstart_cache__
    found = shared_values.load(cache, ("eu",), {})
    assert found is not None and found.value == {"eu": True} and 0 <= found.age < 60
    monkeypatch.setattr(cache, "ttl", 1e-9)
    assert shared_values.load(cache, ("eu",), {}) is None


def test_what_cannot_be_shared_is_computed_and_said_once(
    folder: Path, worker: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    shop = worker()
    for _ in range(2):
        shop.handle.cache_clear()
        shop.handle()
        shop.prices(sys._getframe())  # nothing can pickle a frame
    assert shop.calls.count("handle") == 2
    assert len([record for record in caplog.records if "shared" in record.message]) == 2


def corrupt(folder: Path) -> None:
    (folder / "cache.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)


def open_to_others(folder: Path) -> None:
    folder.chmod(0o777)


def in_the_way(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.write_text("a file")


@pytest.mark.parametrize("harm", [corrupt, open_to_others, in_the_way])
def test_a_store_that_cannot_be_used_costs_a_line(
    folder: Path, worker: Callable[..., Any], harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    worker().prices("eu")
    harm(folder)
    with caplog.at_level(logging.WARNING):
        shop = worker()
        assert shop.prices("eu") == {"eu": True} and asyncio.run(shop.stock("a")) == ["a"]
    assert shop.calls == ["eu", "a"]
    assert [record.name for record in caplog.records].count("jumpstart.shared_values") == 1


@pytest.mark.parametrize("kind", ["read-only", "no place"])
def test_a_folder_that_cannot_be_written_costs_a_line(
    folder: Path, worker: Callable[..., Any], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    if kind == "no place" or os.geteuid() == 0:  # root may write into read-only folders; into /proc nobody may
        shared_values.use_folder(Path("/proc/self/jumpstart/warm-start"))
    folder.parent.chmod(0o500)
    try:
        shop = worker()
        assert shop.prices("eu") == {"eu": True} == shop.prices("eu") and shop.prices("us")
        assert shop.calls == ["eu", "us"] and caplog.text.count("not shared") == 1
    finally:
        folder.parent.chmod(0o700)


def test_a_locked_store_holds_nobody_for_long(
    folder: Path, worker: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker().prices("eu")
    descriptor = os.open(folder.with_name("shared-values.lock"), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        shop = worker()
        began = time.monotonic()
        assert all(shop.prices(number) for number in range(20))
        assert time.monotonic() - began < 5, "only the first waits"
        assert len(shop.calls) == 20 and caplog.text.count("not shared") == 1
    finally:
        os.close(descriptor)


def test_a_row_of_a_broken_store_is_none_and_old_values_make_room(tmp_path: Path) -> None:
    folder = tmp_path / "values"
    store = ValueStore(folder, size_limit_bytes=300_000)
    for number in range(12):
        store.put(f"k{number}", bytes([number]) * 50_000)
    kept = [number for number in range(12) if store.get(f"k{number}") is not None]
    assert kept and kept[-1] == 11 and 0 not in kept and kept == list(range(kept[0], 12))
    assert store.get("k11") == b"\x0b" * 50_000
    import sqlite3

    with sqlite3.connect(folder / "cache.db") as connection:
        connection.execute("UPDATE Cache SET value = zeroblob(100)")
    connection.close()
    assert store.get("k11") is None


def test_without_a_server_nothing_is_stored(worker: Callable[..., Any], tmp_path: Path) -> None:
    shop = worker()
    assert shop.prices("eu") == {"eu": True} == shop.prices("eu")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["shared_shop.py"]
