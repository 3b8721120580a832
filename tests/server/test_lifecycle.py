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
    Worker,
    advance,
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
        (State.BOOTING, State.SERVING),
        *((state, State.DRAINING) for state in (State.STARTING, State.BOOTING, State.SERVING)),
    }
    assert {a for (a, event), b in NEXT.items() if event is Event.EXITED and b is State.GONE} == {*State} - {State.GONE}
    assert not [state for state, _ in NEXT if state is State.GONE]


def test_a_worker_serves_only_after_it_said_that_it_is_ready() -> None:
    assert [(state, event) for (state, event), b in NEXT.items() if b is State.SERVING] == [
        (State.BOOTING, Event.READY)
    ]


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
