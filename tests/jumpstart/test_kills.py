"""
kill -9 at every point of what makes, ships, fetches and keeps profiles: nothing half is ever used, and nothing stays.

For each stage and each of its points: a child is killed there; whoever looks then finds what was there before or what
was to be, whole; the same command once more ends well and leaves no temporary file behind.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jumpstart.fetching import FetchOrder, VoteOrder, carry_out, private_copies, read_copies
from jumpstart.ledger import Ledger
from jumpstart.profile import AppInfo, Profile, write_file
from jumpstart.provision import Wanted, provide
from jumpstart.runtime import runtime_key
from jumpstart.stores import Listing, Place, open_store, parse_index, reader
from jumpstart.trust import KeyRing, TrustedKey
from jumpstart.warmstart import StoredSection, StoredState, WarmStartCache
from jumpstart_server.pidfile import PidFile
from tests.jumpstart.killing import Killer
from tests.jumpstart.store_lab import APP, make_profile, temporary_files

pytestmark = pytest.mark.slow

KEY = "k" * 64
CHANGES = {"open", "os.write"}


def keys_of(folder: Path) -> Path:
    return folder / "home" / "config" / "keys"


def store_of(folder: Path) -> Path:
    return folder / "store"


def publish_one(folder: Path, build: str = "b1") -> Place:
    place, data = make_profile(keys_of(folder), build)
    open_store(str(store_of(folder))).publish(place, data)
    return place


def listed(folder: Path) -> Listing:
    """The store's content; every profile of it is read, and so is the index."""
    store = open_store(str(store_of(folder)))
    listing = store.listing()
    for entry in listing.entries:
        store.read(entry.place, parse(folder))
    if (store_of(folder) / "index.json").exists():
        parse_index((store_of(folder) / "index.json").read_bytes())
    return listing


def parse(folder: Path) -> Callable[[bytes], Profile]:
    return reader(keys_of(folder), "signed", None)


def indexed(folder: Path) -> bool:
    """Whether the index says what there is."""
    found = parse_index((store_of(folder) / "index.json").read_bytes())
    there = listed(folder)
    votes = [path for paths in there.vote_paths.values() for path in paths]
    return {each.path for each in found} == {*(entry.place.path for entry in there.entries), *votes}


def jumpstart(folder: Path, *words: str) -> None:
    """The command itself, in this process, which is a child for this alone."""
    from jumpstart_server.cli import run

    os.environ["JUMPSTART_HOME"] = str(folder / "home")
    sys.argv[:] = ["jumpstart", *words]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    assert run(time.monotonic(), None) == 0


# -- build and capture: a key is made, a file written --


def write_a_profile(folder: Path) -> None:
    write_file(folder / "out.jumpstart", make_profile(keys_of(folder), "new")[1])


def written_before(folder: Path) -> None:
    _, data = make_profile(folder / "other", "old")
    (folder / "out.jumpstart").write_bytes(data)


def the_file_is_whole(folder: Path) -> None:
    name = "other" if (data := (folder / "out.jumpstart").read_bytes()) == original(folder) else "home/config/keys"
    reader(folder / name, "signed", None)(data)
    if (keys_of(folder) / "own.pem").exists():
        KeyRing(keys_of(folder)).own_key()


def original(folder: Path) -> bytes:
    return (folder.parent / "template" / "out.jumpstart").read_bytes()


def the_file_is_new(folder: Path) -> None:
    assert parse(folder)((folder / "out.jumpstart").read_bytes()).manifest.app.build == "new"


# -- keys --


def change_keys(folder: Path) -> None:
    ring, other = KeyRing(keys_of(folder)), KeyRing(folder / "other")
    if not ring.revoked():
        ring.trust(other.public_pem(), "other")
        ring.revoke(other.list()[0].id)
    ring.new()


def two_key_rings(folder: Path) -> None:
    KeyRing(keys_of(folder)).own_key()
    KeyRing(folder / "other").own_key()


def every_key_is_whole(folder: Path) -> None:
    ring = KeyRing(keys_of(folder))
    ring.own_key()
    files = list((keys_of(folder) / "trusted").glob("*.pub"))
    names = {key.name for key in ring.list() if not key.own}
    assert names <= {path.stem for path in files} and all(path.stat().st_size > 100 for path in files)


def the_other_key_is_revoked(folder: Path) -> None:
    ring = KeyRing(keys_of(folder))
    other: TrustedKey = KeyRing(folder / "other").list()[0]
    assert ring.revoked() == [other.id] and ring.list()[0].own and len(ring.list()) >= 2


# -- stores: publish, promote, prune --


def a_store_and_a_file(folder: Path) -> None:
    publish_one(folder)
    (folder / "new.jumpstart").write_bytes(make_profile(keys_of(folder))[1])


def publish(folder: Path) -> None:
    jumpstart(folder, "profile", "publish", str(folder / "new.jumpstart"), str(store_of(folder)))


def both_are_listed(folder: Path) -> None:
    assert len(listed(folder).entries) == 2 and indexed(folder)


def some_are_promoted(folder: Path) -> None:
    store = open_store(str(store_of(folder)))
    store.promote([publish_one(folder)], store.listing())
    for _ in range(2):
        publish_one(folder, "b2")


def promote(folder: Path) -> None:
    jumpstart(folder, "profile", "promote", str(store_of(folder)), "b2")


def something_is_promoted(folder: Path) -> None:
    assert [entry for entry in listed(folder).entries if entry.place.is_latest]


def only_the_new_are_promoted(folder: Path) -> None:
    found = [entry.place.id for entry in listed(folder).entries if entry.place.is_latest]
    assert sorted(found) == sorted(entry.place.id for entry in listed(folder).entries if entry.place.build == "b2")
    assert indexed(folder)


def many_with_votes(folder: Path) -> None:
    store = open_store(str(store_of(folder)))
    for _ in range(3):
        store.vote(publish_one(folder), "1" * 16, "crashed")


def prune(folder: Path) -> None:
    jumpstart(folder, "profile", "prune", str(store_of(folder)), "--keep", "1")


def one_is_always_there(folder: Path) -> None:
    assert listed(folder).entries


def one_is_left_with_its_vote(folder: Path) -> None:
    (entry,) = listed(folder).entries
    assert list(listed(folder).votes) == [entry.place.id] and indexed(folder)


# -- a boot: fetch, choose, the ledger, and the vote --


def two_to_choose_from(folder: Path) -> None:
    for _ in range(2):
        publish_one(folder)


def order_of(folder: Path) -> FetchOrder:
    copies = str(private_copies(folder / "copies", str(store_of(folder))))
    words = {"app": APP, "tenant": "web", "build": "b1", "keys": str(keys_of(folder)), "seed": "1"}
    return FetchOrder(url=str(store_of(folder)), copies=copies, **words)  # type: ignore[arg-type]


def fetch(folder: Path) -> None:
    assert carry_out(order_of(folder)).refusals == []


def copies_are_whole(folder: Path) -> None:
    assert read_copies(order_of(folder))[1] == []


def both_are_copied(folder: Path) -> None:
    assert len(read_copies(order_of(folder))[0]) == 2


def wanted_by(folder: Path) -> Wanted:
    return Wanted(
        source=str(store_of(folder)),
        app=APP,
        tenant="web",
        app_dir=str(folder),
        build="b1",
        keys=str(keys_of(folder)),
        trust="signed",
        max_age_s=3600,
        fetch_timeout_s=30,
        copies=str(folder / "copies"),
    )


def boot(folder: Path) -> None:
    """What supervisor and mold do about profiles, from the start of a server to its end."""
    ledger = Ledger(folder / "ledger", KEY)
    name, _ = ledger.come_alive()
    avoid = ledger.open().avoid
    wanted = dataclasses.replace(wanted_by(folder), ledger=str(folder / "ledger"), ledger_key=KEY, server=name)
    profile = provide(wanted, lambda profile: 1.0).profile
    assert profile is not None and profile.manifest.id not in avoid
    attempt = ledger.healthy(name, 0)
    assert attempt is not None and attempt.profile == profile.manifest.id
    vote = VoteOrder(url=attempt.url, path=attempt.path, voter=ledger.read().voter, verdict="healthy")
    assert carry_out(vote).is_reached
    ledger.leave(name)


def at_most_one_is_blamed(folder: Path) -> None:
    copies_are_whole(folder)
    if (folder / "ledger").is_dir():
        account = Ledger(folder / "ledger", KEY).open()
        assert account.attempts == [] and account.may_load
        assert len(account.avoid) == account.failures <= 1


def all_is_well(folder: Path) -> None:
    account = Ledger(folder / "ledger", KEY).read()
    assert (account.attempts, account.failures, account.avoid) == ([], 0, frozenset())
    assert {path.name for path in (folder / "ledger").iterdir()} == {f"{KEY}.json", f"{KEY}.lock"}
    assert sum(votes.healthy for votes in listed(folder).votes.values()) >= 1


def boot_without_a_place(folder: Path) -> None:
    """No cache folder can be made: the copy is in a temporary one."""
    import tempfile

    tempfile.tempdir = str(folder / "tmp")
    (folder / "tmp").mkdir(exist_ok=True)
    wanted = dataclasses.replace(wanted_by(folder), copies="")
    assert provide(wanted, lambda profile: 1.0).profile is not None


def nothing_temporary(folder: Path) -> None:
    assert list((folder / "tmp").iterdir()) == []


# -- the warm-start cache --


def state(text: bytes) -> StoredState:
    sections = {name: StoredSection(1, "json", text * 20_000) for name in ("modules", "regex")}
    return StoredState(runtime_key(), AppInfo(target=APP), datetime.now(UTC), sections)


def warm_start(folder: Path) -> WarmStartCache:
    return WarmStartCache(folder / "cache" / "warm-start")


def save(folder: Path) -> None:
    warm_start(folder).save("k", state(b"new"))


def saved_before(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    warm_start(folder).save("k", state(b"old"))


def nothing_before(folder: Path) -> None:
    folder.mkdir(exist_ok=True)


def the_state_is_whole_or_absent(folder: Path) -> None:
    found = warm_start(folder).load("k")
    if found is not None:
        assert found.refusals == ()
        assert len({section.data for section in found.sections.values()}) == 1 and len(found.sections) == 2


def a_state_is_whole(folder: Path) -> None:
    the_state_is_whole_or_absent(folder)
    assert warm_start(folder).load("k") is not None


def the_new_state_is_there(folder: Path) -> None:
    found = warm_start(folder).load("k")
    assert found is not None and found.sections["regex"].data.startswith(b"new")
    names = {path.relative_to(folder / "cache").as_posix() for path in (folder / "cache").rglob("*")}
    assert names == {"warm-start", "warm-start.lock", "warm-start/cache.db"}


# -- the file of --pid --


def write_pid(folder: Path) -> None:
    PidFile(str(folder / "x.pid")).write(os.getpid())


def a_pid_or_none(folder: Path) -> None:
    owner = PidFile(str(folder / "x.pid")).owner()
    assert owner is None or owner > 1


def a_pid_alone(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["x.pid"]


@dataclass(frozen=True)
class Stage:
    """
    What is killed, and the promises.

    Attributes:
        prepare: fills the folder that each run has a copy of.
        at_any_time: holds wherever it was killed.
        at_the_end: holds after it ran to its end, be it after a kill.
        points: kinds of points that it must have, or the loop has missed what it is for.
        step: only each so manyth point: most of it is another stage's too.
    """

    run: Callable[[Path], None]
    prepare: Callable[[Path], None]
    at_any_time: Callable[[Path], None]
    at_the_end: Callable[[Path], None]
    points: set[str] = field(default_factory=set)
    step: int = 1


STAGES = [
    Stage(write_a_profile, written_before, the_file_is_whole, the_file_is_new, CHANGES | {"os.rename", "os.link"}),
    Stage(change_keys, two_key_rings, every_key_is_whole, the_other_key_is_revoked, CHANGES | {"os.link", "os.remove"}),
    Stage(publish, a_store_and_a_file, one_is_always_there, both_are_listed, CHANGES | {"os.link", "os.rename"}),
    Stage(promote, some_are_promoted, something_is_promoted, only_the_new_are_promoted, CHANGES | {"os.remove"}),
    Stage(prune, many_with_votes, one_is_always_there, one_is_left_with_its_vote, {"os.remove", "os.rename"}),
    Stage(fetch, two_to_choose_from, copies_are_whole, both_are_copied, CHANGES | {"os.link", "os.mkdir"}),
    Stage(boot, two_to_choose_from, at_most_one_is_blamed, all_is_well, CHANGES | {"os.link", "os.rename"}),
    Stage(boot_without_a_place, two_to_choose_from, one_is_always_there, nothing_temporary, step=4),
    Stage(save, nothing_before, the_state_is_whole_or_absent, the_new_state_is_there, {"sqlite", "sqlite3.connect"}),
    Stage(save, saved_before, a_state_is_whole, the_new_state_is_there, {"sqlite", "sqlite3.connect"}),
    Stage(write_pid, nothing_before, a_pid_or_none, a_pid_alone, CHANGES | {"os.rename"}),
]


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with Killer() as found:
        yield found


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: f"{stage.run.__name__}-{stage.prepare.__name__}")
def test_kill_9_at_any_point(stage: Stage, killer: Killer, tmp_path: Path) -> None:
    name = f"tests.jumpstart.test_kills:{stage.run.__name__}"
    template = tmp_path / "template"
    stage.prepare(template)

    def fresh(point: int) -> Path:
        return Path(shutil.copytree(template, tmp_path / str(point)))

    seen: Counter[str] = Counter()
    for folder, where in killer.each_point(name, fresh, stage.step):
        seen[where] += 1
        stage.at_any_time(folder)
        if where:
            assert killer.run(name, folder).where == ""
        stage.at_the_end(folder)
        assert temporary_files(folder) == []
        shutil.rmtree(folder)
    print(f"killed at {seen.total() - 1} points: {dict(seen)}")
    assert seen.keys() >= stage.points


def test_a_warm_start_cache_that_is_cut_while_sqlite_writes(killer: Killer, tmp_path: Path) -> None:
    """Between two pages, where no point is: the kernel ends it at the first byte beyond a limit."""
    name = "tests.jumpstart.test_kills:save"
    for prepare, check in ((nothing_before, the_state_is_whole_or_absent), (saved_before, a_state_is_whole)):
        template = tmp_path / prepare.__name__
        prepare(template)
        killed = 0
        for limit in [1, 600, *range(4000, 200_000, 12_000)]:
            folder = Path(shutil.copytree(template, tmp_path / "run"))
            run = killer.run(name, folder, bytes_limit=limit)
            check(folder)
            if run.where:
                killed += 1
                killer.run(name, folder)
            the_new_state_is_there(folder)
            shutil.rmtree(folder)
        assert killed > 10


def test_the_points_are_what_they_say(killer: Killer, tmp_path: Path) -> None:
    """Killed in a write, half of the file is there; before a rename, the temporary file is, and the old one."""
    written_before(tmp_path / "template")
    found: dict[str, Path] = {}

    def fresh(point: int) -> Path:
        return Path(shutil.copytree(tmp_path / "template", tmp_path / str(point)))

    for folder, where in killer.each_point("tests.jumpstart.test_kills:write_a_profile", fresh):
        found[where] = folder
    assert len(temporary_files(found["os.rename"])) == 1 and temporary_files(found[""]) == []
    assert (found["os.rename"] / "out.jumpstart").read_bytes() == original(found["os.rename"])
    (half,) = temporary_files(found["os.write"])
    (whole,) = temporary_files(found["os.rename"])
    assert 0 < half.stat().st_size < whole.stat().st_size
