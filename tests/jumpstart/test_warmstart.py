"""The host's warm-start cache: whole or refused, never unpickled, never in the way."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import pickle
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from jumpstart import warmstart
from jumpstart.errors import ProfileRefusedError
from jumpstart.profile import AppInfo, encode_section
from jumpstart.records import Reason, Record
from jumpstart.runtime import runtime_key
from jumpstart.warmstart import StoredSection, StoredState, WarmStartCache, choose_evictions, choose_sections

NOW = datetime(2025, 6, 1, 12, tzinfo=UTC)
RECORDS = [Record(key="a", data={"x": b"bytes"}), Record(key="b")]


def state(saved: datetime = NOW, **sections: bytes) -> StoredState:
    return StoredState(
        runtime=runtime_key(),
        app=AppInfo(target="shop.web:app"),
        saved=saved,
        sections={name: StoredSection(1, "json", data) for name, data in sections.items()},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "warm-start"


@pytest.fixture
def cache(folder: Path) -> WarmStartCache:
    return WarmStartCache(folder)


def refused(call: Callable[[], object]) -> ProfileRefusedError:
    with pytest.raises(ProfileRefusedError) as caught:
        call()
    assert "\n" not in caught.value.detail and caught.value.detail
    return caught.value


def sql(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as connection:
        connection.execute(statement, values)


def broken_folders(folder: Path) -> list[Path]:
    return [path for path in folder.parent.iterdir() if ".broken-" in path.name]


# -- the good case --


def test_what_was_saved_is_loaded(cache: WarmStartCache) -> None:
    encoded = encode_section("values", 3, "msgpack", RECORDS)
    saved = StoredState(
        runtime_key(), AppInfo(target="a:b", build="7"), NOW, {"values": StoredSection(3, "msgpack", encoded.data)}
    )
    assert cache.save("shop/web", saved) == []
    loaded = cache.load("shop/web")
    assert loaded == saved
    assert loaded is not None and loaded.records("values") == (RECORDS, [])
    assert cache.load("shop/genai") is None
    assert cache.keys() == ["shop/web"]


def test_an_empty_host_is_not_an_error_and_nothing_is_made_by_looking(cache: WarmStartCache, folder: Path) -> None:
    assert cache.load("k") is None
    assert cache.keys() == []
    cache.forget("k")
    assert not folder.exists()


def test_saving_replaces_and_forgetting_removes(cache: WarmStartCache, folder: Path) -> None:
    cache.save("k", state(one=b"1", two=b"2"))
    cache.save("other", state(one=b"o"))
    cache.save("k", state(two=b"22"))
    loaded = cache.load("k")
    assert loaded is not None and {name: each.data for name, each in loaded.sections.items()} == {"two": b"22"}
    with closing(sqlite3.connect(folder / "cache.db")) as connection:
        assert connection.execute("SELECT count(*) FROM Cache").fetchone() == (4,)
    cache.forget("k")
    assert cache.load("k") is None and cache.keys() == ["other"]


def open_descriptors() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def test_nothing_stays_open(cache: WarmStartCache) -> None:
    cache.save("k", state(one=b"1"))  # what is imported on first use is not counted
    gc.collect()
    before = open_descriptors()
    cache.save("k", state(one=b"1"))
    cache.load("k")
    gc.collect()
    assert open_descriptors() == before


@pytest.mark.parametrize("key", ["", "a\nb", "\ud800", "x" * 501])
def test_odd_keys_are_a_mistake_of_the_caller(cache: WarmStartCache, key: str) -> None:
    with pytest.raises(ValueError):
        cache.load(key)
    with pytest.raises(ValueError):
        cache.save(key, state())


# -- limits --


def test_sections_that_are_too_large_are_left_out_with_a_reason(folder: Path) -> None:
    cache = WarmStartCache(folder, size_limit_bytes=25, section_limit_bytes=20)
    refusals = cache.save("k", state(huge=b"x" * 21, large=b"x" * 20, small=b"x" * 10))
    assert [(refusal.where, refusal.reason) for refusal in refusals] == [
        ("section huge", Reason.TOO_LARGE),
        ("section large", Reason.TOO_LARGE),
    ]
    loaded = cache.load("k")
    assert loaded is not None and list(loaded.sections) == ["small"]


def test_the_oldest_states_of_others_make_room(folder: Path) -> None:
    cache = WarmStartCache(folder, size_limit_bytes=100)
    for age, key in enumerate(["new", "middle", "old"]):
        cache.save(key, state(NOW - timedelta(hours=age), one=b"x" * 30))
    cache.save("now", state(NOW, one=b"x" * 60))
    assert cache.keys() == ["new", "now"]


def test_what_goes_is_decided_by_age_and_wholeness() -> None:
    others = [("b", NOW, 10), ("a", NOW - timedelta(1), 10), ("broken", None, 0)]
    assert choose_evictions(others, 80, 100) == ["broken"]
    assert choose_evictions(others, 81, 100) == ["broken", "a"]
    assert choose_evictions(others, 100, 100) == ["broken", "a", "b"]
    kept, refusals = choose_sections({name: StoredSection(1, "json", b"xx") for name in "ab"}, 2, 3)
    assert list(kept) == ["b"] and [refusal.where for refusal in refusals] == ["section a"]


# -- hostile rows --


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os.mkdir, (str(self.path),))


def test_a_planted_pickle_is_not_unpickled_and_costs_its_section(
    cache: WarmStartCache, folder: Path, tmp_path: Path
) -> None:
    cache.save("k", state(one=b"1", two=b"2"))
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    sql(folder, "UPDATE Cache SET mode = 4, value = ? WHERE key LIKE '%/one'", bomb)
    loaded = cache.load("k")
    assert loaded is not None and list(loaded.sections) == ["two"]
    assert [(refusal.where, refusal.reason) for refusal in loaded.refusals] == [("section one", Reason.DAMAGED)]
    assert not (tmp_path / "exploded").exists()


def test_a_planted_pickle_as_a_key_is_not_unpickled(cache: WarmStartCache, folder: Path, tmp_path: Path) -> None:
    cache.save("k", state(one=b"1"))
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    sql(folder, "INSERT INTO Cache (key, raw, mode, value) VALUES (?, 0, 1, x'00')", bomb)
    assert cache.load("k") is not None
    assert refused(lambda: cache.save("k", state())).reason is Reason.DAMAGED
    assert not (tmp_path / "exploded").exists()


def test_files_that_rows_name_are_neither_read_nor_removed(cache: WarmStartCache, folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    cache.save("k", state(one=b"1", two=b"2"))
    sql(folder, "UPDATE Cache SET mode = 2, filename = ? WHERE key LIKE '%/one'", str(precious))
    sql(folder, "UPDATE Cache SET filename = '../../precious' WHERE key LIKE '%/two'")
    loaded = cache.load("k")
    assert loaded is not None and not loaded.sections and len(loaded.refusals) == 2
    cache.save("k", state(one=b"1"))
    cache.forget("k")
    assert precious.read_text() == "data"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE Cache SET value = x'00' WHERE key LIKE '%/one'",
        "UPDATE Cache SET value = substr(value, 1, length(value) - 1) WHERE key LIKE '%/one'",
        "UPDATE Cache SET value = 'text' WHERE key LIKE '%/one'",
        "UPDATE Cache SET value = NULL WHERE key LIKE '%/one'",
        "UPDATE Cache SET value = (SELECT value FROM Cache WHERE key LIKE '%/two') WHERE key LIKE '%/one'",
        "UPDATE Cache SET expire_time = 1 WHERE key LIKE '%/one'",
        "DELETE FROM Cache WHERE key LIKE '%/one'",
    ],
)
def test_a_damaged_section_costs_only_itself(cache: WarmStartCache, folder: Path, change: str) -> None:
    cache.save("k", state(one=b"1", two=b"2"))
    sql(folder, change)
    loaded = cache.load("k")
    assert loaded is not None and list(loaded.sections) == ["two"]
    assert [refusal.where for refusal in loaded.refusals] == ["section one"]


def test_a_damaged_manifest_costs_its_state_only(cache: WarmStartCache, folder: Path) -> None:
    cache.save("k", state(one=b"1"))
    cache.save("other", state(one=b"1"))
    sql(folder, "UPDATE Cache SET value = x'00' WHERE key LIKE 'k%manifest'")
    assert refused(lambda: cache.load("k")).reason is Reason.DAMAGED
    assert cache.load("other") is not None and not broken_folders(folder)
    cache.save("other", state(two=b"2"))
    assert cache.keys() == ["other"]
    cache.save("k", state(one=b"1"))
    assert cache.load("k") is not None


def test_another_versions_state_is_absent(cache: WarmStartCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.save("k", state(one=b"1"))
    monkeypatch.setattr(warmstart, "FORMAT", 2)
    assert cache.load("k") is None


def test_state_that_could_not_be_read_back_is_not_saved(cache: WarmStartCache) -> None:
    assert refused(lambda: cache.save("k", state(NOW, **{"no/name": b""}))).reason is Reason.MALFORMED


# -- hostile and broken databases --


def break_database(folder: Path, how: str) -> None:
    database = folder / "cache.db"
    size = database.stat().st_size
    match how:
        case "garbage":
            database.write_bytes(b"garbage" * 1000)
        case "cut":
            os.truncate(database, size // 2)
        case "scrambled":
            data = bytearray(database.read_bytes())
            data[100:] = b"\xa5" * (size - 100)
            database.write_bytes(data)
        case "folder":
            database.unlink()
            database.mkdir()
        case "fifo":
            database.unlink()
            os.mkfifo(database)
        case "symlink":
            database.rename(folder.parent / "elsewhere.db")
            database.symlink_to(folder.parent / "elsewhere.db")
        case "pragma":
            sql(folder, "INSERT INTO Settings VALUES ('sqlite_writable_schema', 1)")
        case "attribute":
            sql(folder, "INSERT INTO Settings VALUES ('_disk', 'x')")
        case "policy":
            sql(folder, "UPDATE Settings SET value = 'least-recently-used' WHERE key = 'eviction_policy'")
        case "disk":
            sql(folder, "INSERT INTO Settings VALUES ('disk__directory', '/')")
        case "trigger":
            sql(
                folder,
                "CREATE TRIGGER Settings_evil AFTER UPDATE ON Settings BEGIN "
                "INSERT INTO Settings SELECT 1, 2 FROM Settings a, Settings b; END",
            )
        case "view":
            sql(folder, "DROP TABLE Cache")
            sql(folder, "CREATE VIEW Cache AS SELECT 1 AS key")
        case "columns":
            sql(folder, "DROP TABLE Cache")
            sql(folder, "CREATE TABLE Cache (key, raw, expire_time, filename)")
        case "count":
            sql(folder, "DELETE FROM Cache")
            sql(folder, "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 10001) "
                "INSERT INTO Cache (key, raw) SELECT 'k' || x, 1 FROM n")  # fmt: skip


WAYS = [
    "garbage", "cut", "scrambled", "folder", "fifo", "symlink", "pragma", "attribute", "policy", "disk", "trigger",
    "view", "columns", "count",
]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_a_broken_database_is_moved_aside_once_and_the_next_save_works(
    cache: WarmStartCache, folder: Path, how: str
) -> None:
    for _ in range(2):
        cache.save("k", state(one=b"1" * 20_000, two=b"2" * 20_000))
        break_database(folder, how)
        error = refused(cache.keys if how == "count" else lambda: cache.load("k"))
        assert error.reason is Reason.DAMAGED
        assert str(folder) in error.detail and "moved to" in error.detail
        assert len(broken_folders(folder)) == 1
        assert cache.load("k") is None
    gc.collect()


def test_any_cut_and_any_scrambled_page_is_refused_or_harmless(cache: WarmStartCache, folder: Path) -> None:
    cache.save("k", state(one=b"1" * 9000, two=b"2"))
    whole = (folder / "cache.db").read_bytes()
    wanted = cache.load("k")
    assert wanted is not None
    hits = [whole[:length] for length in range(0, len(whole), len(whole) // 12)]
    for page in range(0, len(whole), 4096):
        hits.append(whole[:page] + os.urandom(64) + whole[page + 64 :])
        hits.append(whole[: page + 2000] + os.urandom(64) + whole[page + 2064 :])
    for hit in hits:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "cache.db").write_bytes(hit)
        try:
            loaded = cache.load("k")
        except ProfileRefusedError:
            continue
        for name, section in loaded.sections.items() if loaded else ():
            assert section == wanted.sections[name]
    gc.collect()


def test_a_database_that_is_far_too_large_is_refused(cache: WarmStartCache, folder: Path) -> None:
    cache.save("k", state(one=b"1"))
    os.truncate(folder / "cache.db", 2**40)
    assert refused(lambda: cache.load("k")).reason is Reason.DAMAGED


# -- the operating system says no --


def sqlite_error(code: int, text: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (sqlite_error(sqlite3.SQLITE_FULL, "database or disk is full"), "make room"),
        (sqlite_error(sqlite3.SQLITE_READONLY, "attempt to write a readonly database"), "make it writable"),
        (sqlite_error(sqlite3.SQLITE_IOERR_WRITE, "disk I/O error"), "make it writable"),
        (OSError(28, "No space left on device"), "make room"),
        (PermissionError(13, "Permission denied"), "make it writable"),
    ],
)
def test_a_full_or_read_only_folder_is_named_with_its_remedy_and_kept(
    cache: WarmStartCache, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    cache.save("k", state(one=b"1"))

    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(warmstart, "_put", fail)
        refusal = refused(lambda: cache.save("k", state(one=b"2")))
    assert refusal.reason is Reason.UNREADABLE
    assert str(folder) in refusal.detail and remedy in refusal.detail
    loaded = cache.load("k")
    assert loaded is not None and loaded.sections["one"].data == b"1"  # all or nothing


def test_sqlites_own_errors_are_told_apart(cache: WarmStartCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real 'disk is full', with the failing ROLLBACK that follows it in diskcache."""
    cache.save("k", state(one=b"1"))

    def fill(rows: Any, *rest: Any) -> None:
        rows._sql("PRAGMA max_page_count = 1")
        real(rows, *rest)

    real = warmstart._put
    with monkeypatch.context() as patch:
        patch.setattr(warmstart, "_put", fill)
        refusal = refused(lambda: cache.save("k", state(one=b"2" * 1_000_000)))
    assert refusal.reason is Reason.UNREADABLE and "make room" in refusal.detail
    assert cache.load("k") is not None


def test_a_file_in_place_of_the_folder_and_a_foreign_owner(
    cache: WarmStartCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    assert refused(lambda: cache.save("k", state())).reason is Reason.UNSAFE_OWNER
    folder.unlink()
    cache.save("k", state())
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert refused(lambda: cache.load("k")).reason is Reason.UNSAFE_OWNER


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(cache: WarmStartCache, folder: Path) -> None:
    cache.save("k", state())
    folder.chmod(0o500)
    (folder / "cache.db").chmod(0o400)
    assert refused(lambda: cache.save("k", state())).reason is Reason.UNREADABLE


def test_a_path_that_diskcache_would_expand_is_refused(tmp_path: Path) -> None:
    assert refused(lambda: WarmStartCache(tmp_path / "$HOME").save("k", state())).reason is Reason.UNREADABLE


# -- several processes --


def test_a_busy_cache_costs_a_bounded_wait(folder: Path) -> None:
    cache = WarmStartCache(folder, lock_timeout_s=0.05)
    cache.save("k", state(one=b"1"))
    with (folder.parent / "warm-start.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refusal = refused(lambda: cache.load("k"))
    assert refusal.reason is Reason.UNREADABLE and "another process holds it" in refusal.detail
    assert cache.load("k") is not None


def test_another_program_that_locks_the_database_costs_a_bounded_wait(
    cache: WarmStartCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.save("k", state(one=b"1"))
    monkeypatch.setattr(warmstart, "SQLITE_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        refusal = refused(lambda: cache.load("k"))
        assert time.monotonic() - began < 1
    assert refusal.reason is Reason.UNREADABLE and "locked" in refusal.detail
    assert cache.load("k") is not None


SAVER = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from jumpstart.profile import AppInfo
from jumpstart.runtime import runtime_key
from jumpstart.warmstart import StoredSection, StoredState, WarmStartCache
cache = WarmStartCache(Path(sys.argv[1]), lock_timeout_s=20)
for number in range(5):
    data = (sys.argv[2] * 5000).encode()
    sections = {name: StoredSection(1, "json", data) for name in ("one", "two", "three")}
    now = datetime(2025, 6, 1, tzinfo=UTC)
    cache.save("shared", StoredState(runtime_key(), AppInfo(target="a:b"), now, sections))
    cache.save(sys.argv[2], StoredState(runtime_key(), AppInfo(target="a:b"), now, sections))
    state = cache.load("shared")
    assert len({section.data for section in state.sections.values()}) == 1 and not state.refusals
"""


@pytest.mark.slow
def test_concurrent_savers_never_mix_their_states(folder: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", SAVER, str(folder), name], cwd=Path(__file__).parents[2])
        for name in ("a", "b", "c")
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert WarmStartCache(folder).keys() == ["a", "b", "c", "shared"]


@pytest.mark.slow
def test_a_saver_that_is_killed_leaves_the_old_state(folder: Path) -> None:
    cache = WarmStartCache(folder)
    cache.save("k", state(one=b"old"))
    script = (
        "import os, signal; from jumpstart import warmstart\n"
        "real = warmstart._put\n"
        "def put(rows, key, part, data):\n"
        "    real(rows, key, part, data)\n"
        "    if part.startswith('section'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "warmstart._put = put\n" + SAVER.replace('"shared"', '"k"')
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(folder), "x"], cwd=Path(__file__).parents[2], timeout=60
    )
    assert process.returncode == -9
    loaded = cache.load("k")
    assert loaded is not None and loaded.sections["one"].data == b"old" and not loaded.refusals


def test_a_process_that_cannot_even_import_diskcache_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(warmstart, "_cache_class", no_descriptors)
    with pytest.raises(ProfileRefusedError) as caught:
        WarmStartCache(tmp_path / "cache").save("key", state())
    assert caught.value.reason is Reason.UNREADABLE
    assert "Too many open files" in caught.value.detail
