"""How much memory there is, how much a worker takes, and what it does about it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.envelope import memory
from jumpstart_server.envelope.memory import (
    ASK_AGAIN,
    JITTER,
    SOFT_PATIENCE,
    Advice,
    Group,
    MemoryGuard,
    MemoryWatch,
    pss_of,
    read_machine,
    rss_of,
)
from jumpstart_server.envelope.sizing import MIB, Allowance

LIMIT = 200 * MIB
BASE = 40 * MIB
SOFT = 0.85
QUIET = Advice()


# -- reading --


def test_what_this_process_takes_is_seen_as_it_grows() -> None:
    before = rss_of()
    assert before is not None and before == pytest.approx(rss_of(os.getpid()), rel=0.2)
    kept = bytearray(os.urandom(1024) * 1024 * 64)
    after = rss_of()
    assert after is not None and after - before > 32 * MIB
    assert len(kept) == 64 * MIB
    shared = pss_of()
    assert shared is not None and 0 < shared <= after * 1.1


def test_of_a_process_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    assert rss_of(2**22 + 1) is None and pss_of(2**22 + 1) is None
    assert Group.find(tmp_path) == Group()
    assert Group().memory_limit() is None and Group().memory_used() is None
    assert Group().oom_kills() is None and Group().tasks_limit() is None


class Host:
    """A /proc and cgroup folders, made of files."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mount = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)

    def belongs(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def mounts(self, *lines: str) -> None:
        first = "22 1 8:1 / / rw - ext4 /dev/sda1 rw"
        (self.proc / "self" / "mountinfo").write_text("\n".join([first, *lines]) + "\n")

    def v2(self, root: str = "/") -> None:
        self.mounts(f"30 23 0:26 {root} {self.mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate")

    def write(self, group: str, **files: str) -> None:
        folder = self.mount / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_least_limit_of_the_group_and_its_parents_counts(host: Host) -> None:
    host.belongs("0::/kubepods/pod1/app")
    host.v2()
    host.write("kubepods", memory_max="8589934592\n", pids_max="max\n")
    host.write("kubepods/pod1", memory_max="1073741824\n", pids_max="400\n")
    host.write(
        "kubepods/pod1/app",
        memory_max="max\n",
        pids_max="500\n",
        memory_current="900\n",
        memory_stat="anon 5\ninactive_file 300\n",
        memory_events="low 0\noom 4\noom_kill 3\noom_group_kill 0\n",
    )
    group = Group.find(host.proc)
    assert group.memory_limit() == 1 << 30
    assert group.tasks_limit() == 400
    assert group.memory_used() == 600
    assert group.oom_kills() == 3


def test_version_1_has_other_names_and_a_number_for_none(host: Host) -> None:
    host.belongs("5:memory:/docker/1", "4:cpu,cpuacct:/", "0::/")
    host.mounts(
        f"35 31 0:32 / {host.mount} rw - cgroup cgroup rw,memory", "36 31 0:33 / /nowhere rw - cgroup2 cgroup2 rw"
    )
    host.write("", memory_limit_in_bytes="9223372036854771712\n")
    host.write(
        "docker/1",
        memory_limit_in_bytes="9223372036854771712\n",
        memory_usage_in_bytes="1000\n",
        memory_stat="cache 3\nhierarchical_memory_limit 9223372036854771712\ntotal_inactive_file 200\n",
        memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    )
    group = Group.find(host.proc)
    assert group.v1 and group.memory_limit() is None
    assert (group.memory_used(), group.oom_kills()) == (800, 2)
    host.write("docker/1", memory_stat="hierarchical_memory_limit 512\n")
    assert Group.find(host.proc).memory_limit() == 512


@pytest.mark.parametrize("root", ["/docker/1", "/"])
def test_a_container_that_sees_its_own_group_as_the_root_finds_its_limit(host: Host, root: str) -> None:
    """With a namespace of its own the path is outside of what is mounted; without, the mount begins at the group."""
    host.belongs("0::/docker/1" if root != "/" else "0::/../../elsewhere")
    host.v2(root)
    host.write("", memory_max="1048576\n")
    assert Group.find(host.proc).memory_limit() == MIB


def test_the_machine_is_the_cgroup_where_that_is_less_than_the_ram(host: Host) -> None:
    host.belongs("0::/a")
    host.v2()
    host.write("a", memory_max="104857600\n", pids_max="77\n")
    machine = read_machine(Group.find(host.proc))
    assert (machine.memory, machine.is_limited, machine.memory_source) == (100 * MIB, True, "the cgroup's limit")
    assert machine.tasks is not None and machine.tasks <= 77
    host.write("a", memory_max=f"{1 << 50}\n")
    machine = read_machine(Group.find(host.proc))
    assert not machine.is_limited and machine.memory is not None and machine.memory < 1 << 50


def test_files_that_make_no_sense_are_no_limit(host: Host) -> None:
    host.belongs("0::/a")
    host.v2()
    host.write("a", memory_max="lots\n", pids_max="\n", memory_events="oom_kill\n")
    group = Group.find(host.proc)
    assert (group.memory_limit(), group.tasks_limit(), group.oom_kills()) == (None, None, None)


# -- deciding --


class Clock:
    """Readings once a second, in MiB."""

    def __init__(self, watch: MemoryWatch) -> None:
        self.watch = watch
        self.now = 0.0
        self.advice: list[Advice] = []

    def read(self, *readings: float, in_flight: int = 3) -> Advice:
        for reading in readings:
            self.now += 1.0
            self.advice.append(self.watch.sample(self.now, int(reading * MIB), in_flight))
            if self.advice[-1].collect:
                self.advice.append(self.watch.sample(self.now, int(reading * MIB), in_flight))
        return self.advice[-1]

    @property
    def renewals(self) -> list[str]:
        return [advice.renew for advice in self.advice if advice.renew]


@pytest.fixture
def clock() -> Clock:
    return Clock(MemoryWatch(LIMIT, SOFT, base=BASE))


def test_below_the_soft_mark_nothing_happens(clock: Clock) -> None:
    assert clock.read(*[169] * 50) == QUIET
    assert set(clock.advice) == {QUIET}


def test_98_a_leak_is_renewed_above_the_soft_mark_after_some_seconds(clock: Clock) -> None:
    clock.read(100, 120, 150, *[180] * int(SOFT_PATIENCE))
    assert not clock.renewals
    assert clock.read(180).renew == "memory: it takes 180 MiB, above 170 MiB for 3 s, with a limit of 200 MiB"
    assert clock.advice[3] == Advice(collect=True, cap=5)


def test_98_above_the_limit_it_is_renewed_at_once(clock: Clock) -> None:
    assert clock.read(100, 201).renew == "memory: it takes 201 MiB, above its limit of 200 MiB"


def test_a_peak_that_a_collection_ends_is_no_reason() -> None:
    watch = MemoryWatch(LIMIT, SOFT, base=BASE)
    assert watch.sample(1.0, 250 * MIB, 1).collect
    assert watch.sample(1.0, 90 * MIB, 1) == QUIET
    assert watch.sample(2.0, 90 * MIB, 1) == QUIET


def test_peaks_between_quiet_moments_do_not_add_up(clock: Clock) -> None:
    for _ in range(20):
        clock.read(180, 180, 100)
    assert not clock.renewals


def test_garbage_is_collected_once_a_minute_at_most(clock: Clock) -> None:
    clock.read(*[180, 100] * 60)
    assert sum(advice.collect for advice in clock.advice) == 2


def test_above_the_soft_mark_there_are_hardly_more_requests_at_once_than_there_were(clock: Clock) -> None:
    clock.read(160, in_flight=40)
    clock.read(180, in_flight=7)
    assert clock.read(185, in_flight=45).cap == 50
    assert clock.read(*[150] * 40, in_flight=0).cap is None
    assert clock.read(180, in_flight=0).cap == 2  # one alone, and the next one that comes as it ends, are served


def test_only_far_above_the_limit_nothing_is_taken_any_more(clock: Clock) -> None:
    assert clock.read(499).cap == 5
    assert clock.read(501).cap == 0
    assert clock.read(399).cap == 5


def test_it_asks_again_where_the_new_one_did_not_come_up(clock: Clock) -> None:
    clock.read(*[210] * int(ASK_AGAIN * 2 + 1))
    assert len(clock.renewals) == 3


def test_workers_that_leak_alike_do_not_ask_at_the_same_time() -> None:
    asked = set()
    for jitter in (0.0, 0.5, 1.0):
        clock = Clock(MemoryWatch(LIMIT, SOFT, base=BASE, jitter=jitter))
        while not clock.renewals:
            clock.read(180)
        asked.add(clock.now)
    assert len(asked) == 3 and max(asked) == SOFT_PATIENCE + JITTER + 1


def test_where_the_warm_worker_is_above_the_soft_mark_the_mark_is_raised() -> None:
    assert MemoryWatch(LIMIT, SOFT, base=180 * MIB).soft_mark == 190 * MIB
    assert MemoryWatch(LIMIT, SOFT, base=100 * MIB).soft_mark == 170 * MIB


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 50)), max_size=200), st.floats(0, 1))
def test_whatever_is_read_renewals_have_a_reason_and_are_rare(readings: list[tuple[int, int]], jitter: float) -> None:
    watch = MemoryWatch(LIMIT, SOFT, base=BASE, jitter=jitter)
    asked = -1e9
    for now, (mebibytes, in_flight) in enumerate(readings):
        advice = watch.sample(float(now), mebibytes * MIB, in_flight)
        if mebibytes <= 170:
            assert advice == QUIET
        else:
            assert advice.cap is not None
        if advice.renew:
            assert mebibytes > 170 and now - asked >= ASK_AGAIN
            asked = now


# -- doing --


class Desk:
    """What a guard has asked for."""

    def __init__(self) -> None:
        self.caps: list[int | None] = []
        self.reasons: list[str] = []

    def guard(self, allowed: Allowance, *, base: int = BASE, group: Group | None = None) -> MemoryGuard:
        return MemoryGuard(
            allowed,
            SOFT,
            base=base,
            shed=lambda most, reason: self.caps.append(most),
            renew=self.reasons.append,
            group=group,
        )


OWN = Allowance(LIMIT, "memory_limit 200 MiB", is_own=True)


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collections so far; what is taken after one can be set with the fixture `after`."""
    calls: list[int] = []
    monkeypatch.setattr(memory, "free_garbage", lambda: calls.append(1))
    return calls


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda size: monkeypatch.setattr(memory, "rss_of", lambda: size)


def test_the_guard_collects_reads_again_and_lifts_the_cap_when_that_helps(
    collected: list[int], after: Callable[[int], None]
) -> None:
    desk = Desk()
    guard = desk.guard(OWN)
    after(90 * MIB)
    guard.look(1.0, 250 * MIB, 5)
    assert (len(collected), desk.caps, desk.reasons) == (1, [], [])
    guard.look(2.0, 250 * MIB, 5)
    assert desk.caps == [7] and len(desk.reasons) == 1
    guard.look(3.0, 90 * MIB, 5)
    assert desk.caps == [7, None]


def test_a_limit_below_what_a_warm_worker_takes_is_not_enforced_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    guard = desk.guard(OWN, base=LIMIT)
    assert "raise it" in caplog.text
    guard.look(1.0, 4 * LIMIT, 5)
    assert not desk.caps and not desk.reasons


def test_a_share_of_the_ram_is_nobodys_limit(host: Host) -> None:
    desk = Desk()
    guard = desk.guard(Allowance(LIMIT, "a share of the RAM"), group=Group())
    guard.look(1.0, 10 * LIMIT, 5)
    assert not desk.caps and not desk.reasons


def test_above_its_share_a_worker_acts_only_when_the_cgroup_is_short(
    host: Host, collected: list[int], after: Callable[[int], None]
) -> None:
    host.belongs("0::/a")
    host.v2()
    host.write("a", memory_max=f"{1000 * MIB}", memory_current=f"{500 * MIB}")
    desk = Desk()
    guard = desk.guard(Allowance(LIMIT, "a share"), group=Group.find(host.proc))
    after(300 * MIB)
    guard.look(1.0, 300 * MIB, 5)
    assert not desk.caps and not collected
    host.write("a", memory_current=f"{900 * MIB}")
    guard.look(2.0, 300 * MIB, 5)
    assert desk.caps == [7] and len(desk.reasons) == 1 and len(collected) == 1


def test_garbage_in_cycles_is_freed() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self
            self.bulk = b"x" * MIB

    gc.disable()
    try:
        for _ in range(64):
            Node()
        before = rss_of()
        memory.free_garbage()
    finally:
        gc.enable()
    after_it = rss_of()
    assert before is not None and after_it is not None and after_it < before - 32 * MIB
