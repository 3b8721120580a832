"""What a boot gets of a store: a few valid profiles in a copy of its own, in time, whatever the store does."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart import fetching
from jumpstart.choice import Votes
from jumpstart.errors import ConfigError
from jumpstart.fetching import (
    FetchOrder,
    TrialOrder,
    VoteOrder,
    carry_out,
    cast_vote,
    fetch,
    fetch_order,
    private_copies,
    read_copies,
    try_out,
)
from jumpstart.profile import Validation
from jumpstart.provision import Provision, Wanted, provide
from jumpstart.records import Reason, Record
from jumpstart.runtime import runtime_key
from jumpstart.stores import LATEST, Entry, Listing, Place, Store, open_store
from jumpstart.trust import KeyRing
from tests.jumpstart.store_lab import APP, ROOT, make_profile, temporary_files

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Fleet:
    """A folder store, the keys that sign for it, and a host that fetches from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "store"
        self.folder.mkdir()
        self.keys = root / "keys"
        KeyRing(self.keys).own_key()
        self.store = open_store(str(self.folder))

    def publish(self, build: str = "b1", **words: object) -> Place:
        place, data = make_profile(self.keys, build, **words)  # type: ignore[arg-type]
        self.store.publish(place, data)
        return place

    def order(self, **words: object) -> FetchOrder:
        url = str(words.pop("url", self.folder))
        copies = str(private_copies(self.root / "copies", url))
        plain: dict[str, object] = {"app": APP, "tenant": "web", "build": "b1", "keys": str(self.keys), "seed": "1"}
        return FetchOrder(url=url, copies=copies, **{**plain, **words})  # type: ignore[arg-type]

    def copied(self, order: FetchOrder) -> set[str]:
        return {each.place.id for each in read_copies(order)[0]}

    def provide(self, **words: object) -> Provision:
        plain: dict[str, object] = {
            **{"source": str(self.folder), "app": APP, "tenant": "web", "app_dir": str(self.root), "build": "b1"},
            **{"keys": str(self.keys), "trust": "signed", "max_age_s": 3600.0, "fetch_timeout_s": 10.0},
            **{"copies": str(self.root / "copies"), "seed": "1"},
        }
        return provide(Wanted(**{**plain, **words}), lambda profile: 1.0)  # type: ignore[arg-type]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def reasons(found: Provision) -> set[Reason]:
    return {refusal.reason for refusal in [*found.refusals, *found.passed]}


# -- which ones --

ENTRIES = st.lists(
    st.builds(
        lambda build, number, hours: Entry(
            Place("a", "web", LATEST, f"{number:032x}")
            if build == LATEST
            else Place.of("a", "web", build, f"{number:032x}"),
            1,
            NOW - timedelta(hours=hours),
        ),
        st.sampled_from(["now", "before", LATEST]),
        st.integers(0, 20),
        st.integers(0, 100),
    )
)


@given(ENTRIES, st.sets(st.integers(0, 20)), st.text(max_size=3))
def test_this_builds_come_first_each_once_and_never_the_avoided(
    entries: list[Entry], avoid: set[int], seed: str
) -> None:
    avoided = {f"{number:032x}" for number in avoid}
    listing = Listing(entries, {f"{7:032x}": Votes(0, 2)})
    found = fetch_order(listing, "now", avoided, seed)
    ids = [entry.place.id for entry in found]
    assert len(ids) == len(set(ids))
    assert set(ids) == {entry.place.id for entry in entries} - avoided - {f"{7:032x}"}
    ranks = [{"now": 0, LATEST: 1, "before": 2}[entry.place.build] for entry in found]
    assert ranks == sorted(ranks)


def test_hosts_that_boot_at_once_spread_over_what_there_is() -> None:
    entries = [Entry(Place.of("a", "web", "now", f"{number:032x}"), 1, NOW) for number in range(5)]
    first = Counter(fetch_order(Listing(entries), "now", (), str(seed))[0].place.id for seed in range(500))
    assert len(first) == 5 and min(first.values()) > 60


# -- the copy --


def test_the_copy_holds_what_is_valid_and_follows_the_store(fleet: Fleet, tmp_path: Path) -> None:
    good = [fleet.publish() for _ in range(2)]
    stranger, data = make_profile(tmp_path / "stranger")
    fleet.store.publish(stranger, data)
    (fleet.folder / good[0].folder / ("e" * 32 + ".jumpstart")).write_bytes(b"half")
    order = fleet.order()
    outcome = fetch(order, 30)
    assert outcome.is_reached
    assert sorted(refusal.reason for refusal in outcome.refusals) == [Reason.DAMAGED, Reason.UNKNOWN_KEY]
    assert fleet.copied(order) == {place.id for place in good}
    fleet.store.remove(good[0], fleet.store.listing())
    fetch(order, 30)
    assert fleet.copied(order) == {good[1].id}, "what was withdrawn is not used from the copy either"
    fleet.folder.rename(tmp_path / "away")
    outcome = fetch(order, 30)
    assert not outcome.is_reached and [each.reason for each in outcome.refusals] == [Reason.STORE_UNREACHABLE]
    assert fleet.copied(order) == {good[1].id}
    assert temporary_files(tmp_path) == []


def test_a_host_fetches_a_bounded_number_and_other_builds_only_where_this_one_has_none(fleet: Fleet) -> None:
    for _ in range(6):
        fleet.publish()
        fleet.publish("b0")
    order = fleet.order()
    fetch(order, 30)
    assert len(fleet.copied(order)) == fetching.WANTED
    other = fleet.order(build="b9")
    fetch(other, 30)
    assert len(fleet.copied(other)) <= fetching.WANTED + fetching.MAX_DOWNLOADS


@pytest.mark.slow
def test_a_store_that_vanishes_or_changes_while_it_is_read_is_survived(fleet: Fleet) -> None:
    """Publishers and pruners at work all the time: what a boot gets is whole, or there is a reason."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            place = fleet.publish()
            fleet.store.remove(place, fleet.store.listing())

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(30):
            outcome = carry_out(fleet.order(seed=str(number)))
            assert outcome.is_reached
            assert {refusal.reason for refusal in outcome.refusals} <= {Reason.ABSENT}
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_full_disk_costs_the_copy_and_says_so(fleet: Fleet) -> None:
    import msgspec

    fleet.publish()
    order = fleet.order()
    text = (
        "import os, resource, signal, sys, msgspec\n"
        "from jumpstart.fetching import FetchOrder, carry_out\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "outcome = carry_out(msgspec.json.decode(sys.argv[1], type=FetchOrder))\n"
        "os.write(1, ''.join(str(each) for each in outcome.refusals).encode())\n"
    )
    words = [sys.executable, "-c", text, msgspec.json.encode(order).decode()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "copies of profiles: unreadable" in done.stdout and "make room" in done.stdout
    assert fleet.copied(order) == set() and temporary_files(fleet.root) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100


# -- in time --


def children() -> set[str]:
    """Pids of all children, of whatever thread, zombies too."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_a_store_that_does_not_answer_costs_its_deadline_and_no_process(fleet: Fleet) -> None:
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        order = fleet.order(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        outcome = fetch(order, 0.5)
        assert 0.4 < time.monotonic() - began < 10
    assert not outcome.is_reached
    assert [(each.reason, each.detail) for each in outcome.refusals] == [
        (Reason.STORE_UNREACHABLE, "it took over 0.5 s")
    ]
    assert children() == before


@pytest.mark.slow
def test_a_child_that_reads_a_store_ends_with_the_boot_that_started_it(fleet: Fleet) -> None:
    text = (
        "import os, signal, sys, threading, msgspec\n"
        "from jumpstart import fetching\n"
        "order = msgspec.json.decode(sys.argv[1], type=fetching.FetchOrder)\n"
        "real = fetching.subprocess.Popen\n"
        "def popen(*arguments, **words):\n"
        "    child = real(*arguments, **words)\n"
        "    os.write(1, str(child.pid).encode())\n"
        "    return child\n"
        "fetching.subprocess.Popen = popen\n"
        "fetching.fetch(order, 60)\n"
    )
    import msgspec

    with socket.create_server(("127.0.0.1", 0)) as silent:
        order = fleet.order(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        words = [sys.executable, "-c", text, msgspec.json.encode(order).decode()]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as boot:
            assert boot.stdout is not None
            child = int(os.read(boot.stdout.fileno(), 100))
            silent.settimeout(30)
            connection, _ = silent.accept()  # the child is at work
            boot.send_signal(signal.SIGKILL)
            boot.wait()
        connection.settimeout(30)
        while connection.recv(1000):
            pass  # its end closes the connection
        connection.close()
    give_up = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_driver_that_is_not_there_is_a_reason(fleet: Fleet) -> None:
    outcome = fetch(fleet.order(url="nosuchprotocol://bucket"), 60)
    assert [each.reason for each in outcome.refusals] == [Reason.STORE_UNREACHABLE]


def test_votes_are_cast_where_the_store_takes_them(fleet: Fleet, tmp_path: Path) -> None:
    place = fleet.publish()
    vote = VoteOrder(url=str(fleet.folder), path=place.path, voter="1" * 16, verdict="crashed")
    assert cast_vote(vote, 30).is_reached
    assert fleet.store.listing().votes == {place.id: Votes(0, 1)}
    wrong = VoteOrder(url=str(fleet.folder), path="../../etc/passwd", voter="1" * 16, verdict="crashed")
    assert cast_vote(wrong, 30).refusals[0].reason is Reason.MALFORMED


# -- on trial --


def test_of_hosts_that_boot_in_the_same_instant_few_try_a_bad_profile(fleet: Fleet) -> None:
    """Thirty hosts, half of which prefer the bad one; those that try it vote that they crashed."""
    good, bad = fleet.publish(), fleet.publish()
    tried: Counter[str] = Counter()
    failed: list[Reason] = []
    barrier = threading.Barrier(30)

    def boot(number: int) -> None:
        paths = [bad.path, good.path] if number % 2 else [good.path, bad.path]
        host = f"{number:016x}"
        barrier.wait(60)
        while paths:
            order = TrialOrder(url=str(fleet.folder), app=APP, tenant="web", paths=paths, host=host, wait_s=60)
            outcome = try_out(order)
            if not outcome.taken:
                failed.extend(each.reason for each in outcome.refusals)
                return
            tried[outcome.taken] += 1
            is_bad = outcome.taken == bad.id
            fleet.store.vote(bad if is_bad else good, host, "crashed" if is_bad else "healthy")
            if not is_bad:
                return
            paths = [good.path]

    threads = [threading.Thread(target=boot, args=(number,)) for number in range(30)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert not failed and tried[good.id] == 30
    assert 1 <= tried[bad.id] <= 5


def test_who_waits_for_the_trials_of_others_waits_no_longer_than_asked(fleet: Fleet) -> None:
    place = fleet.publish()
    for number in range(3):
        fleet.store.vote(place, f"{number:016x}", "trial")
    words = {"url": str(fleet.folder), "app": APP, "tenant": "web", "paths": [place.path]}
    order = TrialOrder(**words, host="f" * 16, wait_s=0.1)  # type: ignore[arg-type]
    proven = msgspec.structs.replace(order, proven=[place.id])
    assert try_out(proven).taken == place.id, "of a proven one no news is no reason to boot cold"
    assert [each.reason for each in try_out(order).refusals] == [Reason.UNTRIED]
    fleet.store.vote(place, "0" * 16, "crashed")
    for each in (proven, order):
        outcome = try_out(each)
        assert not outcome.taken and [each.reason for each in outcome.refusals] == [Reason.UNTRIED]
    fleet.store.vote(place, f"{1:016x}", "healthy")
    assert try_out(order).taken == place.id
    fleet.store.prune([], fleet.store.listing())
    fleet.store.remove(place, fleet.store.listing())
    assert not list(fleet.folder.rglob("*.trial")), "marks go with the profile"


def test_a_profile_that_nobody_is_well_with_is_on_trial_proven_or_not(fleet: Fleet) -> None:
    ledger = {"ledger": str(fleet.root / "ledger"), "ledger_key": "k" * 64, "server": "a" * 16}
    proof = Validation(golden=1, matched=1, warm_coverage=1.0, first_request_s=0.01, cold_first_request_s=0.1)
    proven = fleet.publish(validation=proof)
    found = fleet.provide(**ledger)
    assert found.profile is not None and found.profile.manifest.id == proven.id
    assert len(list(fleet.folder.rglob("*.trial"))) == 1
    for name in ("1", "2", "3"):  # the three have asked; nobody has voted
        fleet.store.vote(proven, name * 16, "trial")
    late = {"ledger": str(fleet.root / "late"), "ledger_key": "k" * 64, "server": "b" * 16, "fetch_timeout_s": 1.0}
    found = fleet.provide(**late)
    assert found.profile is not None and found.profile.manifest.id == proven.id, "in the end, since it is proven"
    assert len(list(fleet.folder.rglob("*.trial"))) == 4, "but it has asked for nothing"
    fleet.store.vote(proven, "1" * 16, "healthy")
    found = fleet.provide(**late | {"fetch_timeout_s": 60.0, "ledger": str(fleet.root / "later")})
    assert found.profile is not None and not found.passed


def test_a_store_that_takes_no_marks_costs_a_line_and_not_the_profile(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = fleet.publish()
    ledger = {"ledger": str(fleet.root / "ledger"), "ledger_key": "k" * 64, "server": "a" * 16}

    def refuse(*arguments: object) -> None:
        raise ConfigError("read-only")

    monkeypatch.setattr(Store, "vote", refuse)
    found = fleet.provide(**ledger)
    assert found.profile is not None and found.profile.manifest.id == place.id
    assert "read-only" in [each.detail for each in found.passed]


# -- which one it is --


def test_this_build_is_chosen_and_else_the_nearest(fleet: Fleet) -> None:
    other = fleet.publish("b0")
    found = fleet.provide()
    assert found.profile is not None and found.profile.manifest.id == other.id and found.where.endswith("of build b0")
    own = fleet.publish()
    found = fleet.provide()
    assert found.profile is not None and found.profile.manifest.id == own.id and found.where.endswith("of this build")
    assert found.refusals == found.passed == []
    fleet.store.vote(own, "1" * 16, "crashed")
    fleet.store.vote(own, "2" * 16, "crashed")
    found = fleet.provide()
    assert found.profile is not None and found.profile.manifest.id == other.id
    assert reasons(found) == {Reason.OUTVOTED}


def test_of_another_runtime_tenant_or_app_none_is_taken(fleet: Fleet) -> None:
    import msgspec

    fleet.publish(runtime=msgspec.structs.replace(runtime_key(), version="2.7.18"))
    fleet.publish(tenant="genai")
    fleet.publish(app="other:app")
    found = fleet.provide()
    assert found.profile is None and reasons(found) == {Reason.OTHER_RUNTIME}


def test_an_empty_store_is_a_reason_too(fleet: Fleet) -> None:
    found = fleet.provide()
    assert found.profile is None and [each.reason for each in found.refusals] == [Reason.ABSENT]
    found = fleet.provide(source=str(fleet.root / "nowhere"))
    assert found.profile is None and reasons(found) == {Reason.STORE_UNREACHABLE}


def test_without_a_place_for_copies_one_is_used_all_the_same(fleet: Fleet) -> None:
    place = fleet.publish(records=[Record(key="a"), Record(key="b")])
    (fleet.root / "file").write_text("")
    found = fleet.provide(copies=str(fleet.root / "file" / "copies"))
    assert found.profile is not None and found.profile.manifest.id == place.id
    assert len(found.profile.records("names")[0]) == 2
    assert found.passed != [] and reasons(found) <= {Reason.UNREADABLE, Reason.UNSAFE_OWNER}
