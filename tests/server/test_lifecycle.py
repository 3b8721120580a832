"""The table of a worker's life, and how patiently a dead one is started again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.lifecycle import (
    FIRST_DELAY,
    HEALTHY_AFTER,
    LONGEST_DELAY,
    NEXT,
    Event,
    LifecycleError,
    Restarts,
    State,
    Verdict,
    Worker,
    advance,
    after_boot_failure,
    is_hopeless,
)

ORDER = list(State)
served = st.none() | st.floats(0, 1e6)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_a_step_of_the_table_or_an_error(state: State, event: Event) -> None:
    worker = Worker(3, 2, state, since=5.0, pid=77)
    if (state, event) not in NEXT:
        with pytest.raises(LifecycleError, match=f"worker 3: {event} while {state}"):
            advance(worker, event, 9.0)
        return
    after = advance(worker, event, 9.0)
    assert after.state is NEXT[state, event]
    assert (after.slot, after.generation, after.pid) == (3, 2, 77)
    assert after.since == (5.0 if after.state is state else 9.0)


def test_the_table_is_what_the_diagram_says() -> None:
    forward = {(a, b) for (a, _), b in NEXT.items() if a is not b and b is not State.GONE}
    assert forward == {
        (State.STARTING, State.BOOTING),
        (State.BOOTING, State.READY),
        (State.READY, State.SERVING),
        *((state, State.DRAINING) for state in (State.STARTING, State.BOOTING, State.READY, State.SERVING)),
    }
    assert {a for (a, event), b in NEXT.items() if event is Event.EXITED and b is State.GONE} == {*State} - {State.GONE}
    assert not [state for state, _ in NEXT if state is State.GONE]


def test_a_worker_serves_only_after_it_said_that_it_is_ready_and_was_told_to() -> None:
    ways = {b: [(a, event) for (a, event), to in NEXT.items() if to is b and a is not b] for b in State}
    assert ways[State.READY] == [(State.BOOTING, Event.READY)]
    assert ways[State.SERVING] == [(State.READY, Event.ACCEPT)]


@given(st.lists(st.sampled_from(Event), max_size=30))
def test_a_life_only_moves_on_and_gone_is_final(events: list[Event]) -> None:
    worker = Worker(0, 1)
    for now, event in enumerate(events, start=1):
        before = worker
        try:
            worker = advance(before, event, float(now))
        except LifecycleError:
            assert (before.state, event) not in NEXT
            continue
        assert before.state is not State.GONE
        assert ORDER.index(worker.state) >= ORDER.index(before.state)
        assert worker.since in (before.since, float(now))
    if Event.EXITED in events:
        assert worker.state is State.GONE


# -- restarts --


@given(st.lists(served, max_size=60))
def test_the_wait_before_a_restart_is_bounded_whatever_happened(lives: list[float | None]) -> None:
    restarts = Restarts()
    for life in lives:
        restarts, delay = restarts.after_exit(life)
        assert 0 <= delay <= LONGEST_DELAY
        assert restarts.failures >= 0


@given(st.lists(st.none() | st.floats(0, HEALTHY_AFTER, exclude_max=True), min_size=1, max_size=400))
def test_the_wait_never_shrinks_while_starts_go_on_failing(lives: list[float | None]) -> None:
    restarts, delays = Restarts(), []
    for life in lives:
        restarts, delay = restarts.after_exit(life)
        delays.append(delay)
    assert delays == sorted(delays)
    assert restarts.failures == len(lives)


def test_a_process_that_never_served_is_tried_ever_more_slowly() -> None:
    restarts, delays = Restarts(), []
    for _ in range(12):
        restarts, delay = restarts.after_exit(None)
        delays.append(delay)
    assert delays[:4] == [FIRST_DELAY, FIRST_DELAY * 2, FIRST_DELAY * 4, FIRST_DELAY * 8]
    assert delays[-1] == LONGEST_DELAY
    assert Restarts(10**9).after_exit(None)[1] == LONGEST_DELAY


@given(st.integers(0, 10**6), st.floats(HEALTHY_AFTER, 1e9))
def test_one_that_served_for_a_while_is_replaced_at_once_and_forgiven(failures: int, life: float) -> None:
    assert Restarts(failures).after_exit(life) == (Restarts(), 0.0)


def test_one_that_died_young_is_replaced_at_once_only_the_first_time() -> None:
    restarts, delay = Restarts().after_exit(0.5)
    assert delay == 0
    restarts, delay = restarts.after_exit(0.5)
    assert delay == FIRST_DELAY * 2
    assert restarts.failures == 2


# -- the end of the attempts --


@given(st.integers(0, 100), st.integers(0, 20), st.lists(st.floats(0, 100), max_size=4))
def test_80_hopeless_is_many_failures_in_a_row_and_nobody_in_good_health(
    failures: int, limit: int, served_s: list[float]
) -> None:
    found = is_hopeless(Restarts(failures), limit, served_s)
    healthy = any(each >= HEALTHY_AFTER for each in served_s)
    assert found == (limit > 0 and failures >= limit and not healthy)


def test_80_a_worker_that_dies_a_second_after_it_was_ready_is_hopeless_in_the_end() -> None:
    restarts, waited, lives = Restarts(), 0.0, 0
    while not is_hopeless(restarts, 8, []):
        restarts, delay = restarts.after_exit(1.0)
        waited += delay
        lives += 1
    assert lives == 8
    assert 10 < waited < 60


# -- a boot that failed --


@pytest.mark.parametrize(
    ("may_try_cold", "in_roll", "was_ready", "verdict"),
    [
        (True, False, False, Verdict.COLD),
        (True, True, True, Verdict.COLD),
        (True, False, True, Verdict.RETRY),  # the app has booted with this state before
        (False, True, True, Verdict.KEEP),
        (False, False, True, Verdict.RETRY),
        (False, False, False, Verdict.GIVE_UP),
    ],
)
def test_what_a_boot_that_failed_leads_to(may_try_cold: bool, in_roll: bool, was_ready: bool, verdict: Verdict) -> None:
    assert after_boot_failure(may_try_cold=may_try_cold, in_roll=in_roll, was_ready=was_ready) is verdict


@given(st.booleans(), st.booleans())
def test_70_a_roll_that_fails_never_ends_what_serves(may_try_cold: bool, was_ready: bool) -> None:
    verdict = after_boot_failure(may_try_cold=may_try_cold, in_roll=True, was_ready=was_ready)
    assert verdict in (Verdict.COLD, Verdict.KEEP)
