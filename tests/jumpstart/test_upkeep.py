"""The rules of what is fetched again and again, with a clock of our own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jumpstart.upkeep import LONGEST_RETRY, MAX_FLYING, Origin, Rules, Upkeep

RULES = Rules(ttl=10.0, timeout=5.0)


def answered(kept: Upkeep[Any], now: float, value: Any, lot: float = 0.0) -> bool:
    return kept.succeeded(kept.begin(now), now, value, changed=value != kept.value, lot=lot)


def test_it_is_fetched_a_little_before_its_ttl_and_stale_after() -> None:
    for lot, due in ((0.0, 108.0), (0.999, 109.5)):
        kept = Upkeep[int](RULES)
        assert kept.may_begin(100.0)
        answered(kept, 100.0, 1, lot)
        kept.ended(1)
        assert kept.due == pytest.approx(due, abs=0.01) == kept.next_event()
        assert not kept.is_stale(110.0)
        assert kept.is_stale(110.1)
        assert kept.age(110.0) == 10.0


def test_pauses_between_tries_grow_to_a_limit_and_an_answer_ends_them() -> None:
    kept, now, pauses = Upkeep[int](RULES), 0.0, []
    for _ in range(12):
        attempt = kept.begin(now)
        assert kept.failed_with(attempt, now, "down", 1.0)
        pauses.append(kept.due - now)
        now = kept.due
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == LONGEST_RETRY
    assert kept.error == "down"
    answered(kept, now, 1)
    assert (kept.failures, kept.failed, kept.error) == (0, 12, "")


def test_a_negative_answer_is_kept_for_its_own_ttl() -> None:
    kept = Upkeep[int](Rules(ttl=300.0, timeout=5.0, negative_ttl=20.0))
    kept.failed_with(kept.begin(0.0), 0.0, "no address", 1.0)
    assert kept.due == 20.0


def test_a_fetch_that_hangs_counts_once_and_is_asked_again() -> None:
    kept = Upkeep[int](RULES)
    first = kept.begin(0.0)
    assert not kept.may_begin(4.0)
    assert kept.next_event() == 5.0
    assert kept.give_up(5.0, 1.0)
    assert not kept.give_up(6.0, 1.0)
    assert kept.may_begin(5.5)
    assert not kept.failed_with(first, 7.0, "at last", 1.0)
    assert kept.failed == 1


def test_so_many_may_hang_and_no_more_until_one_ends() -> None:
    kept, now = Upkeep[int](RULES), 0.0
    for _ in range(MAX_FLYING):
        assert kept.may_begin(now)
        kept.begin(now)
        now += RULES.timeout
        kept.give_up(now, 1.0)
        now = kept.due
    assert kept.is_stuck
    assert not kept.may_begin(now + 1e6)
    assert "give the client that fetches a timeout" in kept.error
    kept.ended(1)
    assert not kept.is_stuck
    assert kept.may_begin(now)


def test_a_late_answer_counts_unless_there_is_a_newer_one() -> None:
    kept = Upkeep[str](RULES)
    slow = kept.begin(0.0)
    kept.give_up(5.0, 0.0)
    quick = kept.begin(6.0)
    assert kept.succeeded(slow, 6.5, "slow", changed=True, lot=0.0)
    assert kept.succeeded(quick, 7.0, "quick", changed=True, lot=0.0)
    kept = Upkeep[str](RULES)
    slow = kept.begin(0.0)
    kept.give_up(5.0, 0.0)
    assert kept.succeeded(kept.begin(6.0), 6.1, "quick", changed=True, lot=0.0)
    assert not kept.succeeded(slow, 6.5, "slow", changed=True, lot=0.0)
    assert kept.value == "quick"


def test_what_stands_in_never_replaces_anything() -> None:
    kept = Upkeep[str](RULES)
    assert kept.fall_back("profile", -3600.0, Origin.PROFILE)
    assert kept.is_stale(0.0)
    assert kept.age(0.0) == 3600.0
    assert not kept.fall_back("default", 0.0, Origin.DEFAULT)
    answered(kept, 1.0, "profile")
    assert (kept.version, kept.origin, kept.is_stale(1.0)) == (1, Origin.SOURCE, False)


class Machine(RuleBasedStateMachine):
    """Whatever happens, in any order: the last good value stays, versions only grow, no more fetches than allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Upkeep[int] = Upkeep(Rules(ttl=3.0, timeout=1.0))
        self.now = 0.0
        self.running: list[int] = []
        self.good: int | None = None
        self.newest = 0  # attempt that has answered
        self.version = 0

    @rule(seconds=st.floats(0.0, 20.0), lot=st.floats(0.0, 0.99))
    def time_passes(self, seconds: float, lot: float) -> None:
        self.now += seconds
        self.kept.give_up(self.now, lot)

    @precondition(lambda self: self.kept.may_begin(self.now))
    @rule()
    def begin(self) -> None:
        self.running.append(self.kept.begin(self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), value=st.integers(0, 3), lot=st.floats(0.0, 0.99))
    def succeed(self, data: st.DataObject, value: int, lot: float) -> None:
        attempt = data.draw(st.sampled_from(self.running))
        changed = value != self.kept.value
        assert self.kept.succeeded(attempt, self.now, value, changed=changed, lot=lot) is (attempt > self.newest)
        if attempt > self.newest:
            self.good, self.newest = value, attempt
            assert self.now < self.kept.due < self.now + 3.0
            assert self.kept.age(self.now) == 0.0
        self.kept.ended(attempt)
        self.running.remove(attempt)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), lot=st.floats(0.0, 0.99))
    def fail(self, data: st.DataObject, lot: float) -> None:
        attempt = data.draw(st.sampled_from(self.running))
        if self.kept.failed_with(attempt, self.now, "no", lot):
            assert self.now < self.kept.due <= self.now + LONGEST_RETRY
        self.running.remove(attempt)

    @rule(lot=st.floats(0.0, 0.99))
    def fork(self, lot: float) -> None:
        due = self.kept.due
        self.kept.forked(self.now, lot)
        assert self.now <= self.kept.due <= max(self.now, due)
        self.running.clear()

    @rule(value=st.integers(10, 12))
    def fall_back(self, value: int) -> None:
        if self.kept.fall_back(value, self.now - 100.0, Origin.DEFAULT):
            assert self.good is None
            self.good = value

    @invariant()
    def the_last_good_value_stays(self) -> None:
        assert self.kept.value == self.good

    @invariant()
    def versions_only_grow(self) -> None:
        assert self.kept.version >= self.version
        assert (self.kept.version == 0) == (self.good is None)
        self.version = self.kept.version

    @invariant()
    def it_is_asked_again_some_time(self) -> None:
        assert len(self.running) <= MAX_FLYING
        if len(self.running) < MAX_FLYING:
            assert self.kept.next_event() <= max(self.now, 0.0) + LONGEST_RETRY


TestMachine = Machine.TestCase
