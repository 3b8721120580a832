"""Stores of profiles: names, a folder for real, retention, and what a killed or full-handed writer leaves behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart import files
from jumpstart.choice import Votes
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.profile import AppInfo
from jumpstart.records import Reason
from jumpstart.stores import (
    INDEX,
    LATEST,
    Dated,
    FolderBackend,
    Place,
    Store,
    build_of,
    choose_removals,
    decode_name,
    encode_build,
    encode_name,
    is_store,
    open_store,
    parse_index,
    parse_path,
    profile_file,
    reader,
)
from jumpstart.trust import KeyRing
from tests.jumpstart.store_lab import ROOT, make_profile, temporary_files

ID = "0123456789abcdef" * 2


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    KeyRing(tmp_path / "keys").own_key()
    return tmp_path / "keys"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


# -- names --


@given(st.text())
def test_any_name_is_one_harmless_part_of_a_path(text: str) -> None:
    word = encode_name(text)
    assert word == Path(word).name != "" and not word.startswith(".") and len(word) <= 200
    place = Place.of(text, text, text, ID)
    assert parse_path(place.path) == (place, "", "")
    assert parse_path(place.vote_path("0" * 16, "crashed")) == (place, "0" * 16, "crashed")
    if len(word) < 150:
        assert decode_name(word) == text


@given(st.text(max_size=30), st.text(max_size=30))
def test_two_names_are_two_words(one: str, other: str) -> None:
    assert (encode_name(one) == encode_name(other)) == (one == other)
    assert encode_name("x" * 300 + one) != encode_name("x" * 300 + one + "y")


@pytest.mark.parametrize(
    "path",
    [
        f"../web/b1/{ID}.jumpstart",
        f"app/../b1/{ID}.jumpstart",
        f"/web/b1/{ID}.jumpstart",
        f"app/web/.hidden/{ID}.jumpstart",
        f"app/web/b1/{ID}.zip",
        f"app/web/b1/{ID}",
        "app/web/b1/../../x.jumpstart",
        "app/web/b1/.jumpstart-00000000-1-00000000.tmp",
        f"app/web/b1/{ID}.votes/../../x.healthy",
        f"app/web/b1/{ID}.votes/{'0' * 16}.praised",
        f"app/web/b1/{ID}.jumpstart/{'0' * 16}.healthy",
        INDEX,
        "",
    ],
)
def test_other_names_are_not_looked_at(path: str) -> None:
    assert parse_path(path) is None


def test_a_build_is_the_operators_word_or_the_sources_and_never_latest_by_accident() -> None:
    assert build_of(AppInfo(target="a:b", build="v7", sources="sha256:" + "ab" * 32)) == "v7"
    assert build_of(AppInfo(target="a:b", sources="sha256:" + "ab" * 32)) == "ab" * 8
    assert build_of(AppInfo(target="a:b")) == "unknown"
    assert encode_build(LATEST) != LATEST and decode_name(encode_build(LATEST)) == LATEST
    assert not Place.of("a", "t", LATEST, ID).is_latest and Place("a", "t", LATEST, ID).is_latest


def test_what_profile_names_is_a_file_or_a_store(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "folder.jumpstart").mkdir()
    (tmp_path / "plain").write_bytes(b"")
    stores = [str(tmp_path / "there"), str(tmp_path / "absent"), f"file://{tmp_path}/there", "s3://b/x", "https://h/x"]
    assert [name for name in stores if not is_store(name)] == []
    one_file = [str(tmp_path / "plain"), str(tmp_path / "absent.jumpstart"), str(tmp_path / "folder.jumpstart")]
    assert [name for name in [*one_file, f"file://{tmp_path}/x.jumpstart"] if is_store(name)] == []
    assert profile_file(f"file://{tmp_path}/x.jumpstart") == tmp_path / "x.jumpstart"
    with pytest.raises(ConfigError, match="three slashes"):
        is_store("file://srv/profiles")
    with pytest.raises(ConfigError):
        open_store("nosuchprotocol://x")


# -- a folder --


def test_what_is_published_is_listed_read_and_indexed(folder: Path, keys: Path) -> None:
    store = open_store(f"file://{folder}")
    place, data = make_profile(keys, "a/b ü")
    store.publish(place, data)
    store.publish(place, data)  # again, as a job that is repeated does
    store.vote(place, "1" * 16, "healthy")
    store.vote(place, "1" * 16, "healthy")
    store.vote(place, "2" * 16, "crashed")
    listing = store.listing("js_site:app", "web")
    assert [entry.place for entry in listing.entries] == [place]
    assert listing.votes == {place.id: Votes(healthy=1, crashed=1)}
    found, profile = store.read(place, reader(keys, "signed", None))
    assert found == data and profile.trusted
    assert [each.path for each in parse_index((folder / INDEX).read_bytes())] == [place.path]
    assert store.listing("other").entries == [] and store.listing("js_site:app", "genai").entries == []
    assert temporary_files(folder) == []


def test_what_is_not_what_its_name_says_is_refused(folder: Path, keys: Path, tmp_path: Path) -> None:
    store = open_store(str(folder))
    place, data = make_profile(keys)
    parse = reader(keys, "signed", 3600)
    (folder / place.folder).mkdir(parents=True)

    def reason_for(content: bytes, where: Place = place) -> Reason:
        (folder / where.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / where.path).write_bytes(content)
        with pytest.raises(ProfileRefusedError) as caught:
            store.read(where, parse)
        return caught.value.reason

    assert reason_for(data[: len(data) // 2]) is Reason.DAMAGED
    assert reason_for(b"") is Reason.DAMAGED
    assert reason_for(make_profile(keys)[1]) is Reason.DAMAGED  # another one's bytes
    assert reason_for(data, Place.of("js_site:app", "genai", "b1", place.id)) is Reason.DAMAGED
    assert reason_for(make_profile(tmp_path / "stranger")[1]) is Reason.UNKNOWN_KEY
    old, its = make_profile(keys, age=timedelta(hours=2))
    assert reason_for(its, old) is Reason.TOO_OLD
    (folder / place.path).unlink()
    with pytest.raises(ProfileRefusedError) as caught:
        store.read(place, parse)  # it has vanished between list and get
    assert caught.value.reason is Reason.ABSENT
    os.mkfifo(folder / place.path)
    with pytest.raises(ProfileRefusedError) as caught:
        store.read(place, parse)
    assert caught.value.reason is Reason.UNREADABLE


def test_a_folder_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(ProfileRefusedError) as caught:
        open_store(str(tmp_path / "absent")).listing()
    assert caught.value.reason is Reason.STORE_UNREACHABLE


def test_a_promoted_build_takes_the_place_of_the_last_one(folder: Path, keys: Path) -> None:
    store = open_store(str(folder))
    old, new, other = make_profile(keys, "b1"), make_profile(keys, "b2"), make_profile(keys, "b2", tenant="genai")
    for place, data in (old, new, other):
        store.publish(place, data)
    store.promote([old[0]], store.listing("js_site:app", "web"))
    store.vote(Place("js_site~3Aapp", "web", LATEST, old[0].id), "1" * 16, "healthy")
    store.promote([new[0]], store.listing("js_site:app", "web"))
    latest = [entry.place for entry in store.listing().entries if entry.place.is_latest]
    assert latest == [Place("js_site~3Aapp", "web", LATEST, new[0].id)]
    assert store.listing().votes == {}  # they went with the profile
    assert len(store.listing().entries) == 4
    assert len(parse_index((folder / INDEX).read_bytes())) == 4


def test_publishers_at_once_lose_nothing(folder: Path, keys: Path) -> None:
    made = [make_profile(keys, f"b{number % 3}") for number in range(12)]
    threads = [threading.Thread(target=open_store(str(folder)).publish, args=each) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {entry.place for entry in open_store(str(folder)).listing().entries} == {place for place, _ in made}
    assert {each.path for each in parse_index((folder / INDEX).read_bytes())} == {place.path for place, _ in made}


# -- retention --

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DATED = st.builds(
    lambda app, build, number, hours: Dated(
        Place.of(app, "web", build, f"{number:032x}"), NOW - timedelta(hours=hours)
    ),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["x", "y", "z"]),
    st.integers(0, 10**6),
    st.integers(0, 100),
)


@given(st.lists(DATED, unique_by=lambda each: each.place.path), st.integers(1, 3), st.integers(1, 3))
def test_what_is_kept_is_bounded_and_the_newest(valid: list[Dated], keep: int, builds: int) -> None:
    removed = set(choose_removals(valid, keep, builds))
    kept = [each for each in valid if each.place not in removed]
    for app in {each.place.app for each in valid}:
        of_app = [each for each in valid if each.place.app == app]
        assert max(of_app, key=lambda each: (each.created, each.place.build, each.place.id)) in kept
        assert len({each.place.build for each in kept if each.place.app == app}) <= builds
    for build in {(each.place.app, each.place.build) for each in kept}:
        mine = [each for each in kept if (each.place.app, each.place.build) == build]
        gone = [each for each in valid if (each.place.app, each.place.build) == build and each not in mine]
        assert len(mine) <= keep
        assert all(lost.created <= held.created for lost in gone for held in mine)


def test_latest_is_no_build_among_others() -> None:
    latest = Dated(Place("a", "web", LATEST, "0" * 32), NOW - timedelta(days=9))
    builds = [Dated(Place.of("a", "web", f"b{n}", f"{n:032x}"), NOW - timedelta(days=n)) for n in range(4)]
    assert choose_removals([latest, *builds], 1, 2) == [builds[2].place, builds[3].place]


# -- writers that are stopped --

PUBLISH = """
from pathlib import Path
from jumpstart.stores import Place, open_store
place = Place(*sys.argv[3].split("/")[:3], sys.argv[3].split("/")[3][:32])
store, data = open_store(sys.argv[2]), Path(sys.argv[4]).read_bytes()
armed()
store.publish(place, data)
"""


@pytest.mark.slow
def test_a_disk_that_is_full_costs_the_publication_and_nothing_else(folder: Path, keys: Path, tmp_path: Path) -> None:
    place, data = make_profile(keys)
    (tmp_path / "one").write_bytes(data)
    text = "def armed(): ...\n" + PUBLISH

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, len(data) // 2))

    words = [sys.executable, "-c", "import sys\n" + text, "0", str(folder), place.path, str(tmp_path / "one")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert done.returncode == 1 and "ConfigError: cannot write" in done.stderr and "make room" in done.stderr
    assert temporary_files(folder) == [] and open_store(str(folder)).listing().entries == []


def test_files_without_nameless_ones_are_whole_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS: the temporary file has a name, and what a killed process left of one is cleared away."""
    monkeypatch.setattr(files, "_open_nameless", lambda folder, mode: None)
    assert files.write_new(tmp_path / "a", b"one")
    assert not files.write_new(tmp_path / "a", b"two")
    files.replace(tmp_path / "b", b"three")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"one", "b": b"three"}
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    mine = tmp_path / files.temporary_name()
    host = mine.name.split("-")[1]
    dead = tmp_path / f".jumpstart-{host}-{gone.stdout.strip()}-00000000.tmp"
    other, ancient = (tmp_path / f".jumpstart-ffffffff-1-0000000{n}.tmp" for n in range(2))
    for path in (mine, dead, other, ancient):
        path.touch()
    os.utime(ancient, (0, 0))
    assert files.sweep(tmp_path) == 2
    assert mine.exists() and other.exists() and not dead.exists() and not ancient.exists()


def test_a_damaged_index_is_a_store_that_cannot_be_read() -> None:
    for data in (b"", b"{}", b"[" * 10_000, msgspec.json.encode({"format": 1, "objects": [["x", -1]]})):
        with pytest.raises(ProfileRefusedError) as caught:
            parse_index(data)
        assert caught.value.reason is Reason.STORE_UNREACHABLE


def test_a_store_in_a_folder_of_another_depth_holds_nothing(folder: Path) -> None:
    deep = folder / "a" / "b" / "c" / "d" / "e" / "f"
    deep.mkdir(parents=True)
    (deep / f"{ID}.jumpstart").write_bytes(b"")
    assert Store(FolderBackend(folder)).listing().entries == []


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_what_fsspec_has_a_driver_for_is_a_store(kind: str, folder: Path, keys: Path) -> None:
    """Whole objects (memory), and files that are written under another name and moved (local)."""
    pytest.importorskip("fsspec", reason="fsspec comes with the extra `s3`")
    url = f"memory://{folder.name}-{os.getpid()}" if kind == "memory" else f"local://{folder}"
    store = open_store(url)
    place, data = make_profile(keys, "b/1")
    parse = reader(keys, "signed", None)
    store.publish(place, data)
    store.vote(place, "1" * 16, "crashed")
    listing = open_store(url).listing("js_site:app", "web")
    assert [(entry.place, entry.size) for entry in listing.entries] == [(place, len(data))]
    assert abs(datetime.now(UTC) - listing.entries[0].modified) < timedelta(minutes=5)
    assert listing.votes == {place.id: Votes(0, 1)}
    assert store.read(place, parse)[0] == data
    assert [each.path for each in parse_index(store.backend.read(INDEX, 10_000))] == [place.path]
    with pytest.raises(ProfileRefusedError) as caught:
        store.backend.read(place.path, len(data) - 1)
    assert caught.value.reason is Reason.TOO_LARGE
    (latest,) = store.promote([place], listing)
    store.remove(place, listing)
    store.remove(place, listing)  # gone already
    assert [entry.place for entry in store.listing().entries] == [latest]
    with pytest.raises(ProfileRefusedError) as caught:
        store.read(place, parse)
    assert caught.value.reason is Reason.ABSENT
    assert temporary_files(folder) == []


def test_only_one_module_knows_fsspec() -> None:
    found = [
        path.name
        for folder in ("jumpstart", "warmup", "server")
        for path in (ROOT / folder).rglob("*.py")
        if any(
            line.split()[:2] in (["import", "fsspec"], ["from", "fsspec.core"])
            for line in path.read_text().splitlines()
        )
    ]
    assert found == ["stores.py"]
    done = subprocess.run(
        [sys.executable, "-c", "import sys, jumpstart.boot, jumpstart.stores; print('fsspec' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False", done.stderr
