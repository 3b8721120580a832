"""The boot ledger: the rules for any history, and the file under kills, several servers and damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ProfileRefusedError
from jumpstart.ledger import BLAMED_FOR, Account, Attempt, Ledger, begun, died, ended, exonerated, healthy, settled
from jumpstart.records import Reason
from tests.jumpstart.store_lab import ROOT

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVER = "0123456789abcdef"
KEY = "k" * 64


def attempt(profile: str, generation: int = 1, server: str = SERVER) -> Attempt:
    return Attempt(server=server, generation=generation, profile=profile, began=NOW)


def account(**words: object) -> Account:
    return Account(voter="f" * 16, **words)  # type: ignore[arg-type]


def failed(known: Account, profile: str, now: datetime = NOW) -> Account:
    one = attempt(profile)
    return died(begun(known, one), one, now)


# -- the rules --


def test_after_one_death_another_profile_after_two_none_and_health_clears_it() -> None:
    once = failed(account(), "p")
    assert once.avoid == {"p"} and once.may_load
    twice = failed(once, "q")
    assert twice.avoid == {"p", "q"} and not twice.may_load
    well = healthy(twice, None)
    assert well.avoid == frozenset() and well.may_load, "once may be chance"
    again = healthy(failed(well, "p"), None)
    assert again.avoid == {"p"}, "twice is not"
    other = begun(again, attempt("q"))
    assert healthy(other, attempt("q")).avoid == {"p"}
    assert healthy(begun(again, attempt("p")), attempt("p")).blamed.keys() == {"q"}, "it is well after all"


def test_when_no_profile_helps_either_profiles_were_not_at_fault() -> None:
    confirmed = healthy(failed(failed(account(), "old"), "old"), None)
    cleared = exonerated(failed(failed(confirmed, "p"), "q"))
    assert cleared.avoid == {"old"} and cleared.may_load and cleared.blamed.keys() == {"old"}
    assert exonerated(failed(healthy(failed(account(), "p"), None), "p")).blamed["p"].times == 1


def test_only_a_boot_that_is_under_way_can_die() -> None:
    assert died(account(), attempt("p"), NOW) == account()
    assert ended(begun(account(), attempt("p")), attempt("p")) == account()
    assert begun(begun(account(), attempt("p")), attempt("q")).attempts == [attempt("q")], "one of each generation"


def test_blame_is_forgotten_in_time_and_so_is_one_by_a_wrong_clock() -> None:
    known = failed(failed(account(), "p"), "p")
    assert settled(known, lambda name: True, NOW + BLAMED_FOR - timedelta(seconds=1))[0].avoid == {"p"}
    assert settled(known, lambda name: True, NOW + BLAMED_FOR)[0].avoid == frozenset()
    assert settled(known, lambda name: True, NOW - timedelta(days=365))[0].avoid == frozenset()


PROFILES = st.sampled_from("pqr")
EVENTS = st.lists(st.tuples(st.sampled_from(["begin", "die", "well", "end", "cold fails", "cold well"]), PROFILES))


@given(EVENTS)
def test_whatever_happens_a_boot_gets_none_that_it_must_not_have(events: list[tuple[str, str]]) -> None:
    known = account()
    streak: list[str] = []  # profiles of the deaths since somebody was well
    for generation, (event, profile) in enumerate(events):
        if event == "cold fails":
            known, streak = exonerated(known), []
        elif event == "cold well":
            known, streak = healthy(known, None), []
        elif known.may_load and profile not in known.avoid:
            one = attempt(profile, generation)
            known = begun(known, one)
            if event == "die":
                known = died(known, one, NOW)
                streak.append(profile)
            elif event == "well":
                known, streak = healthy(known, one), []
                assert profile not in known.blamed
            elif event == "end":
                known = ended(known, one)
        assert len(streak) == len(set(streak)) <= 2
        assert set(streak) <= known.avoid and known.failures == len(streak)
        assert known.may_load == (len(streak) < 2)


@given(st.lists(PROFILES), st.sets(st.integers(0, 9)))
def test_what_dead_servers_were_loading_is_blamed_once(profiles: list[str], alive: set[int]) -> None:
    known = account()
    for number, profile in enumerate(profiles):
        known = begun(known, attempt(profile, server=f"{number:016x}"))
    after, dead = settled(known, lambda name: int(name, 16) in alive, NOW)
    assert {each.profile for each in dead} == set(after.blamed)
    assert after.failures == len(dead) and len(after.attempts) == len(profiles) - len(dead)
    assert settled(after, lambda name: int(name, 16) in alive, NOW) == (after, [])


# -- the file --


def test_a_server_that_lives_is_told_from_one_that_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    ledger = Ledger(folder, KEY)
    name, dead = ledger.come_alive()
    assert dead == []
    ledger.begin(attempt("p", server=name))
    other = Ledger(folder, KEY)  # another server of the same home
    theirs, dead = other.come_alive()
    assert dead == [] and other.open().attempts == [attempt("p", server=name)]
    other.begin(attempt("q", server=theirs))
    other.leave(theirs)
    assert ledger.open().attempts == [attempt("p", server=name)] and ledger.open().failures == 0
    assert ledger.died(name, 2) is None and ledger.died(name, 1) == attempt("p", server=name)
    assert ledger.open().avoid == {"p"}
    ledger.exonerate()
    assert ledger.open().avoid == frozenset()
    ledger.leave(name)
    assert [path.name for path in folder.iterdir() if path.name.endswith(".alive")] == []
    assert Ledger(folder, "x" * 64).read().attempts == []


def test_many_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    ledger = Ledger(folder, KEY)
    name, _ = ledger.come_alive()
    threads = [
        threading.Thread(target=Ledger(folder, KEY).begin, args=(attempt(f"p{number}", number, name),))
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {each.profile for each in ledger.read().attempts} == {f"p{number}" for number in range(20)}
    ledger.leave(name)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"voter": "x"}', b'{"voter": "0123456789abcdef", "failures": "2"}']
)
def test_a_damaged_ledger_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    ledger = Ledger(tmp_path, KEY)
    (tmp_path / f"{KEY}.json").write_bytes(content)
    tmp_path.chmod(0o700)
    assert ledger.open().may_load and ledger.open().avoid == frozenset()
    name, _ = ledger.come_alive()
    ledger.begin(attempt("p", server=name))
    assert [each.profile for each in ledger.read().attempts] == ["p"]
    ledger.leave(name)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileRefusedError) as caught:
        Ledger(tmp_path / "file", KEY).open()
    assert caught.value.reason is Reason.UNSAFE_OWNER
    with pytest.raises(ProfileRefusedError) as caught:
        Ledger(tmp_path / "file" / "ledger", KEY).come_alive()
    assert caught.value.reason in (Reason.UNREADABLE, Reason.UNSAFE_OWNER)


FULL = """
import os, resource, signal, sys
from datetime import UTC, datetime
from pathlib import Path
from jumpstart.errors import ProfileRefusedError
from jumpstart.ledger import Attempt, Ledger
ledger = Ledger(Path(sys.argv[1]), "k" * 64)
name, _ = ledger.come_alive()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    ledger.begin(Attempt(server=name, generation=1, profile="p", began=datetime.now(UTC)))
except ProfileRefusedError as error:
    os.write(1, str(error).encode())
ledger.leave(name)
"""


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FULL, str(tmp_path / "ledger")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("unreadable: ") and "make room" in done.stdout
    left = sorted(path.name for path in (tmp_path / "ledger").iterdir())
    assert left == [f"{KEY}.json", f"{KEY}.lock"], "the account from before the disk was full, and no temporary file"
    assert Ledger(tmp_path / "ledger", KEY).read().attempts == []


def test_a_child_of_another_kind_does_not_keep_a_server_alive(tmp_path: Path) -> None:
    """What a server starts with an exec does not inherit the lock: its death shows although they live on."""
    text = """
import subprocess, sys, os
from pathlib import Path
from datetime import UTC, datetime
from jumpstart.ledger import Attempt, Ledger
ledger = Ledger(Path(sys.argv[1]), "k" * 64)
name, _ = ledger.come_alive()
ledger.begin(Attempt(server=name, generation=1, profile="p", began=datetime.now(UTC)))
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0, stdout=subprocess.DEVNULL)
os.write(1, str(child.pid).encode())
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path / "ledger")], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.read())
        assert parent.wait(30) == -signal.SIGKILL
        os.kill(child, 0)  # it lives on, until its standard input ends
        assert Ledger(tmp_path / "ledger", KEY).open().avoid == {"p"}
