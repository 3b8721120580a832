"""Admission: nobody is lost or served twice, nobody waits for too long, and what counts as overload."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.envelope.admission import Admission

STEPS = st.lists(
    st.tuples(st.sampled_from(["offer", "offer", "take", "late", "any", "withdraw"]), st.floats(0, 3)), max_size=200
)


@given(steps=STEPS, limit=st.integers(0, 20), timeout_s=st.sampled_from([0.0, 0.5, 2.0, 10.0]))
def test_nobody_is_lost_or_comes_out_twice_or_waits_for_too_long(
    steps: list[tuple[str, float]], limit: int, timeout_s: float
) -> None:
    queue: Admission[int] = Admission(limit, timeout_s)
    now = 1000.0
    since: dict[int, float] = {}
    inside: set[int] = set()
    served = 0
    for number, (what, pause) in enumerate(steps):
        now += pause
        if what == "offer":
            assert queue.offer(number, now) == (len(inside) < limit)
            if queue.size > len(inside):
                inside.add(number)
                since[number] = now
        elif what == "withdraw":
            chosen = min(inside, default=-1)
            assert queue.withdraw(chosen) == (chosen in inside)
            inside.discard(chosen)
        else:
            waiter = queue.take_any() if what == "any" else (queue.take if what == "take" else queue.take_late)(now)
            if waiter is None:
                assert not inside if what == "any" else True
            else:
                inside.remove(waiter.item)  # it waited, and comes out once
                assert waiter.since == since[waiter.item]
                waited = now - waiter.since
                if what == "take":
                    served += 1
                    assert not timeout_s or waited <= timeout_s + 1e-6
                elif what == "late":
                    assert timeout_s and waited >= timeout_s / 2 - 1e-6
        assert queue.size == len(inside)
        assert queue.oldest_wait_s(now) == pytest.approx(now - min((since[each] for each in inside), default=now))
        assert 1 <= queue.retry_after_s(now) <= 60
    if timeout_s:
        while (waiter := queue.take_late(now + timeout_s + 1)) is not None:
            inside.remove(waiter.item)
        assert not inside
    else:
        assert not queue.is_overloaded
    assert sum(queue.waits) == served


@given(steps=STEPS, timeout_s=st.sampled_from([0.5, 2.0, 10.0]))
def test_next_look_is_early_enough(steps: list[tuple[str, float]], timeout_s: float) -> None:
    """Who looks when it says finds the late ones at once; before that there are none."""
    queue: Admission[int] = Admission(100, timeout_s)
    now = 0.0
    for number, (what, pause) in enumerate(steps):
        now += pause
        if what == "offer":
            queue.offer(number, now)
        elif what == "take":
            queue.take(now)
        while queue.take_late(now) is not None:
            pass
        then = queue.next_look(now)
        assert then > now or queue.size
        if not queue.size:
            assert then == math.inf
        elif then > now:
            assert queue.take_late(now + (then - now) * 0.99) is None
            now = then


@given(pauses=st.lists(st.floats(0, 0.1), min_size=1, max_size=50), extra=st.floats(0, 4.9))
def test_first_come_first_served_while_it_is_not_overloaded(pauses: list[float], extra: float) -> None:
    queue: Admission[int] = Admission(1000, 20.0)
    now = 0.0
    for number, pause in enumerate(pauses):
        now += pause
        queue.offer(number, now)
    now += extra
    order = [waiter.item for _ in pauses if (waiter := queue.take(now)) is not None]
    assert order == list(range(len(pauses)))


class Simulation:
    """
    Slots that are busy for a time each, requests that come when told, and the queue between them.

    Attributes:
        waits: of those that were served, by when they came.
        shed: when those came that were not, and how long they had waited then.
        full: how many found no place.
    """

    def __init__(self, slots: int, service_s: float, *, limit: int = 1000, timeout_s: float = 10.0) -> None:
        self.queue: Admission[float] = Admission(limit, timeout_s)
        self.now = 0.0
        self.waits: list[tuple[float, float]] = []
        self.shed: list[tuple[float, float]] = []
        self.full = 0
        self.overloaded: list[float] = []
        self._service_s = service_s
        self._free = slots
        self._ends: deque[float] = deque()

    def run(self, comes: list[float], until: float, *, again: bool = False) -> None:
        """*again*: who was served, or sent away, comes again at once."""
        coming = deque(comes)
        while self.now < until:
            at = min(
                until,
                coming[0] if coming else math.inf,
                self._ends[0] if self._ends else math.inf,
                max(self.queue.next_look(self.now), self.now + 0.001),
            )
            self.now = at
            back = 0
            while self._ends and self._ends[0] <= at:
                self._ends.popleft()
                self._free += 1
                back += again
            while (late := self.queue.take_late(at)) is not None:
                self.shed.append((late.since, at - late.since))
                back += again
            while coming and coming[0] <= at:
                coming.popleft()
                back += 1
            for _ in range(back):
                if self._free and not self.queue.size:
                    self._begin(at, 0.0)
                elif not self.queue.offer(at, at):
                    self.full += 1
            while self._free and (waiter := self.queue.take(at)) is not None:
                self._begin(waiter.since, at - waiter.since)
            if self.queue.is_overloaded:
                self.overloaded.append(at)

    def _begin(self, since: float, waited: float) -> None:
        self.waits.append((since, waited))
        self._free -= 1
        self._ends.append(self.now + self._service_s)


@pytest.mark.parametrize("service_s", [0.01, 0.1, 0.9])
def test_a_burst_that_can_be_served_in_time_is_served(service_s: float) -> None:
    """Ten times as many as there are slots, at once; with the last of 0.9 s each they wait for up to 8.1 s."""
    bench = Simulation(100, service_s)
    bench.run([0.0] * 1000, 20.0)
    assert len(bench.waits) == 1000
    assert not bench.shed and not bench.full and not bench.overloaded
    assert max(wait for _, wait in bench.waits) == pytest.approx(9 * service_s)


def test_a_burst_with_others_behind_it_is_served() -> None:
    """It stands for ten seconds; those that come meanwhile, half as many as could be served, are not shed either."""
    bench = Simulation(100, 0.45)
    bench.run(sorted([0.0] * 1000 + [number / 100 for number in range(2000)]), 40.0)
    assert len(bench.waits) == 3000 and not bench.shed and not bench.full


@pytest.mark.parametrize(("service_s", "wait_s"), [(0.1, 0.9), (0.4, 3.6)])
def test_31_clients_that_ask_again_and_again_are_served_in_turn(service_s: float, wait_s: float) -> None:
    """1000 clients for 100 slots: the queue is never empty, and nobody is shed."""
    bench = Simulation(100, service_s)
    bench.run([0.0] * 1000, 30.0, again=True)
    assert not bench.shed and not bench.full and not bench.overloaded
    assert max(wait for _, wait in bench.waits) == pytest.approx(wait_s)
    steady = [wait for since, wait in bench.waits if since > wait_s]
    assert min(steady) == pytest.approx(wait_s)


def test_108_under_overload_those_that_are_served_have_waited_for_a_moment_only() -> None:
    """Twice as many as can be served. First come first served would let each wait for ten seconds, and half in vain."""
    bench = Simulation(10, 0.1)
    bench.run([number / 200 for number in range(60 * 200)], 61.0)
    late = sorted(wait for since, wait in bench.waits if since > 15)
    assert len(late) > 0.95 * 100 * (60 - 15)  # no slot is idle
    assert late[len(late) // 2] < 0.1
    assert late[int(len(late) * 0.95)] < 1.0
    assert max(wait for _, wait in bench.waits) <= 10.0
    assert max(wait for since, wait in bench.shed if since > 15) == pytest.approx(5.0, abs=0.1)


def test_when_the_overload_is_over_it_is_first_come_first_served_again() -> None:
    bench = Simulation(10, 0.1)
    comes = [number / 200 for number in range(20 * 200)]
    bench.run(sorted(comes + [20 + number / 50 for number in range(60 * 50)]), 80.0)
    assert bench.overloaded and 20 < bench.overloaded[-1] < 50
    calm = [(since, wait) for since, wait in bench.waits if since > bench.overloaded[-1] + 10]
    assert len(calm) > 500 and max(wait for _, wait in calm) < 0.1


def test_clients_that_ask_again_do_not_keep_it_overloaded() -> None:
    """
    A flood has begun the overload; then 1000 clients remain, which could be served in turn in 0.9 s.

    Newest first for ever would serve a hundred of them, and starve the others.
    """
    bench = Simulation(100, 0.1, limit=20_000)
    bench.run([0.0] * 12_000, 8.0)
    assert bench.overloaded
    bench.run([8.0] * 1000, 60.0, again=True)
    assert bench.overloaded[-1] < 30
    steady = [wait for since, wait in bench.waits if since > bench.overloaded[-1] + 10]
    assert max(steady) / min(steady) < 1.5


def test_handlers_that_hang_are_overload_after_half_of_the_time() -> None:
    bench = Simulation(1, math.inf, timeout_s=4.0)
    bench.run([0.0, 1.0, 2.5, 3.0], 20.0)
    assert bench.overloaded[0] == pytest.approx(3.0, abs=0.01)  # the one that came at 1.0, behind the one that hangs
    assert [since for since, _ in sorted(bench.shed)] == [1.0, 2.5, 3.0]
    waited = [wait for _, wait in sorted(bench.shed)]
    assert waited == pytest.approx([4.0, 4.0, 2.0], abs=0.01)  # the last was a newcomer under overload


def test_the_newest_is_next_under_overload_and_those_before_it_come_back() -> None:
    queue: Admission[str] = Admission(10, 4.0)
    for number, name in enumerate("abc"):
        assert queue.offer(name, number * 0.1)
    assert queue.take_late(2.05) is None
    assert queue.is_overloaded  # nobody was served in two seconds
    assert queue.offer("d", 2.1) and queue.offer("e", 2.2)
    assert [waiter.item for _ in range(3) if (waiter := queue.take(2.3)) is not None] == ["e", "d", "c"]
    assert queue.take_late(3.9) is None
    late = queue.take_late(4.05)
    assert late is not None and late.item == "a" and queue.take(4.05) is not None  # b came 0.1 s later
    assert queue.size == 0 and queue.take(4.2) is None


def test_a_newcomer_under_overload_waits_for_half_of_the_time() -> None:
    queue: Admission[str] = Admission(10, 4.0)
    queue.offer("a", 0.0)
    queue.offer("b", 2.5)
    queue.offer("c", 2.6)
    assert queue.is_overloaded
    late = queue.take_late(4.1)
    assert late is not None and late.item == "a"
    assert queue.take_late(4.4) is None
    assert queue.next_look(4.4) == 4.5
    late = queue.take_late(4.51)
    assert late is not None and late.item == "b"
    assert queue.take(4.7) is None  # its time is up, too: it never starts
    late = queue.take_late(4.7)
    assert late is not None and late.item == "c"
    assert queue.offer("d", 4.8) and not queue.is_overloaded


def test_how_long_to_stay_away() -> None:
    queue: Admission[int] = Admission(100, 10.0)
    assert queue.retry_after_s(0.0) == 1
    for number in range(100):
        queue.offer(number, 0.0)
    assert queue.retry_after_s(0.1) == 1
    assert queue.retry_after_s(4.5) == 5  # nobody was served yet, and that for long
    for number in range(20):
        queue.take(0.1 * number)
    assert queue.expected_wait_s(2.0) == pytest.approx(8.0)
    assert queue.retry_after_s(2.0) == 8
    forever: Admission[int] = Admission(1, 0.0)
    forever.offer(0, 0.0)
    assert forever.retry_after_s(1e6) == 60
    assert forever.next_look(1e6) == math.inf


def test_the_rate_is_that_of_late() -> None:
    queue: Admission[int] = Admission(2000, 32.0)
    for number in range(2000):
        queue.offer(number, 0.0)
    now = 0.0
    rates = []
    for rate in (100, 50):
        for _ in range(10 * rate if rate == 100 else 17 * rate):
            now += 1 / rate
            assert queue.take(now) is not None
        rates.append(queue.size / queue.expected_wait_s(now))
    assert rates == [pytest.approx(100, rel=0.02), pytest.approx(50, rel=0.02)]
