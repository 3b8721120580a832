"""Who hangs and who is busy: the rules, the kernel's counts, and stacks out of a process that holds the GIL."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.heartbeat import (
    BUSY_LIMITS,
    STACK_SIGNAL,
    Pulse,
    Verdict,
    Vitals,
    stacks_of,
    vitals_of,
)
from jumpstart_server.messages import Beat

LIMIT = 30.0


class Ward:
    """A pulse that is looked at once a second, as the watchman does."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.now = 1000.0
        self.busy = 5.0
        self.pulse = Pulse(limit, self.now)
        self.said: list[tuple[float, Verdict]] = []

    def pass_time(self, seconds: float, *, beats: bool = False, cpu: float = 0.0, is_stopped: bool = False) -> None:
        """*cpu* is the share of one processor that the worker uses meanwhile."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.busy += cpu
            if beats:
                self.pulse.beat(self.now, Beat())
            vitals = Vitals(self.busy, is_stopped) if self.pulse.needs_vitals(self.now) else None
            verdict = self.pulse.look(self.now, vitals)
            if verdict is not None:
                self.said.append((self.now - 1000.0, verdict))

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for _, verdict in self.said]


def test_a_worker_that_beats_is_never_suspected_and_never_looked_at() -> None:
    ward = Ward()
    ward.pass_time(500, beats=True, cpu=1.0)
    assert not ward.said and not ward.pulse.needs_vitals(ward.now)


def test_one_that_neither_beats_nor_computes_hangs_and_that_is_said_once() -> None:
    ward = Ward()
    ward.pass_time(10, beats=True)
    ward.pass_time(200)
    assert ward.verdicts == [Verdict.HUNG]
    assert LIMIT < ward.said[0][0] - 10 <= LIMIT + 2


def test_83_one_that_computes_is_busy_and_that_is_said_once() -> None:
    ward = Ward()
    ward.pass_time(LIMIT * 5, cpu=1.0)
    assert ward.verdicts == [Verdict.BUSY]


def test_83_one_that_computes_for_less_than_the_limit_is_not_worth_a_word() -> None:
    ward = Ward()
    ward.pass_time(8, cpu=1.0)
    ward.pass_time(100, beats=True)
    assert not ward.said


def test_one_that_computes_for_far_too_long_is_stuck() -> None:
    ward = Ward()
    ward.pass_time(LIMIT * (BUSY_LIMITS + 1), cpu=1.0)
    assert ward.verdicts == [Verdict.BUSY, Verdict.STUCK]
    assert ward.said[1][0] > LIMIT * BUSY_LIMITS


def test_one_that_stops_to_compute_hangs_a_limit_later() -> None:
    ward = Ward()
    ward.pass_time(LIMIT * 2, cpu=1.0)
    ward.pass_time(LIMIT + 2)
    assert ward.verdicts == [Verdict.BUSY, Verdict.HUNG]


def test_on_a_crowded_machine_a_tenth_of_a_processor_is_computing() -> None:
    ward = Ward()
    ward.pass_time(LIMIT * 3, cpu=0.1)
    assert ward.verdicts == [Verdict.BUSY]


def test_a_beat_ends_all_suspicion() -> None:
    ward = Ward()
    ward.pass_time(LIMIT + 5, cpu=1.0)
    ward.pass_time(1, beats=True)
    ward.pass_time(LIMIT - 2)
    assert ward.verdicts == [Verdict.BUSY]
    ward.pass_time(5)
    assert ward.verdicts == [Verdict.BUSY, Verdict.HUNG]


def test_when_we_were_asleep_ourselves_the_workers_are_not_to_blame() -> None:
    ward = Ward()
    ward.pass_time(5, beats=True)
    ward.now += 3600.0  # their beats lie unread
    ward.pass_time(3)
    assert not ward.said
    ward.pass_time(LIMIT + 2)
    assert ward.verdicts == [Verdict.HUNG]


def test_a_process_that_is_stopped_is_left_alone_and_that_is_said_once() -> None:
    """By a debugger, or by SIGSTOP."""
    ward = Ward()
    ward.pass_time(LIMIT * 20, is_stopped=True)
    assert ward.verdicts == [Verdict.STOPPED]
    ward.pass_time(5, beats=True)
    ward.pass_time(LIMIT * 2)
    assert ward.verdicts == [Verdict.STOPPED, Verdict.HUNG]


def test_without_a_limit_nobody_is_suspected() -> None:
    ward = Ward(0)
    ward.pass_time(1000)
    assert not ward.said and not ward.pulse.needs_vitals(ward.now)


def test_where_the_system_does_not_tell_it_is_taken_for_busy() -> None:
    pulse = Pulse(LIMIT, 0.0)
    verdicts = [pulse.look(float(now), None) for now in range(1, int(LIMIT * BUSY_LIMITS) + 10)]
    assert [each for each in verdicts if each] == [Verdict.BUSY, Verdict.STUCK]


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, 5.0])
def test_short_limits_tell_the_busy_from_the_hung_too(limit: float) -> None:
    for cpu, verdict in ((0.0, Verdict.HUNG), (0.9, Verdict.BUSY)):
        ward = Ward(limit)
        ward.pass_time(limit + 5, cpu=cpu)
        assert ward.verdicts == [verdict]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.02, 0.5, 1.0])), max_size=300))
def test_whatever_happens_no_worker_is_called_hung_that_computed_or_beat_within_the_limit(
    seconds: list[tuple[bool, float]],
) -> None:
    ward = Ward(10.0)
    beat_at, used = ward.now, []
    for beats, cpu in seconds:
        before = len(ward.said)
        ward.pass_time(1, beats=beats, cpu=cpu)
        beat_at = ward.now if beats else beat_at
        used.append(cpu)
        if len(ward.said) > before:
            assert ward.now - beat_at > 10.0
            if ward.said[-1][1] is Verdict.HUNG:
                assert sum(used[-6:]) <= 0.5


# -- the kernel's counts --


def test_the_kernel_counts_who_computes_and_who_sleeps() -> None:
    before = vitals_of(os.getpid())
    assert before is not None and not before.is_stopped
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        sum(range(100_000))
        after = vitals_of(os.getpid())
        if after is not None and after.busy_s > before.busy_s + 0.05:
            return
    raise AssertionError("it does not count")


def test_a_process_that_is_stopped_or_gone_is_seen_as_such() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        give_up = time.monotonic() + 10
        while True:
            vitals = vitals_of(child.pid)
            if vitals is not None and vitals.is_stopped:
                break
            assert time.monotonic() < give_up
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert vitals_of(child.pid) is None


def test_a_command_name_with_brackets_confuses_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    (folder / "stat").write_text(f"7 (a) T 1 (b) S 1 1 1 0 -1 4194560 1 0 0 0 {3 * ticks} {2 * ticks} 0 0 20 0")
    (folder / "schedstat").write_text("5000000000 1500000000 30")
    assert vitals_of(7, tmp_path) == Vitals(6.5, False)


# -- stacks --

HOLDS_THE_GIL = """
import threading, time
from jumpstart_server.heartbeat import offer_stacks

def other_thread():
    time.sleep(60)

def hold():
    print(offer_stacks(), flush=True)
    sum(range(10**13))  # one call in C, which never lets go of the GIL

threading.Thread(target=other_thread, daemon=True).start()
hold()
"""


def test_83_a_process_that_holds_the_gil_writes_the_stacks_of_all_its_threads() -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLDS_THE_GIL], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        descriptor = int(child.stdout.readline())
        first = asyncio.run(stacks_of(child.pid, descriptor))
        again = asyncio.run(stacks_of(child.pid, descriptor))
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    for text in (first, again):
        assert text.count("in other_thread") == 1 and text.count("in hold") == 1


def test_stacks_of_a_process_that_is_gone_are_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert asyncio.run(stacks_of(child.pid, 5)) == ""


def test_a_process_that_offers_no_stacks_is_not_signalled() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    try:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        for descriptor in (-1, 0, 1, 99):
            assert asyncio.run(stacks_of(child.pid, descriptor)) == ""
        child.stdin.write(b"\n")
        child.stdin.close()
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_the_signal_is_none_that_apps_use() -> None:
    assert signal.SIGRTMIN < STACK_SIGNAL < signal.SIGRTMAX
