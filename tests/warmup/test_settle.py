"""When a host counts as warm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jumpstart_warmup.settle import P50_FLOOR_S, WINDOW, Round, judge, percentile

latencies = st.lists(st.floats(0.0001, 10), min_size=1, max_size=20).map(tuple)
rounds = st.lists(st.builds(Round, latencies, st.integers(0, 2)), max_size=8)


def steady(seconds: float, times: int = 4) -> Round:
    return Round((seconds,) * times)


def test_a_host_that_does_not_get_faster_any_more_is_warm() -> None:
    verdict = judge([steady(0.5), steady(0.1), steady(0.01), steady(0.01), steady(0.01)])
    assert verdict.settled
    assert verdict.reason == "settled after 5 rounds: 500.0 ms → 10.0 ms"
    assert (verdict.first_ms, verdict.settled_ms) == (500.0, 10.0)


def test_a_host_that_still_gets_faster_is_not() -> None:
    verdict = judge([steady(0.4), steady(0.2), steady(0.1), steady(0.05)])
    assert not verdict.settled
    assert "median" in verdict.reason


def test_a_tail_that_still_moves_is_seen() -> None:
    slow_tail = Round((0.01,) * 9 + (0.5,))
    verdict = judge([slow_tail, slow_tail, steady(0.01, 10), steady(0.01, 10)])
    assert not verdict.settled
    assert "95th" in verdict.reason


def test_a_host_that_became_slower_than_it_was_is_not_warm() -> None:
    assert not judge([steady(0.01)] + [steady(0.1)] * 3).settled


def test_no_rounds_too_few_rounds_and_empty_rounds() -> None:
    assert not judge([]).settled
    assert not judge([steady(0.01)] * 2).settled
    verdict = judge([Round(()), Round(()), Round(())])
    assert not verdict.settled
    assert verdict.first_ms is None


def test_noise_under_the_floor_does_not_count() -> None:
    assert judge([steady(0.0001), steady(0.0009), steady(0.0003)]).settled


@given(rounds)
def test_a_verdict_needs_a_window_of_clean_rounds(given_rounds: list[Round]) -> None:
    verdict = judge(given_rounds)
    recent = given_rounds[-WINDOW:]
    if verdict.settled:
        assert len(recent) == WINDOW
        assert not any(each.errors for each in recent)
    assert verdict.reason


@given(rounds, st.floats(0.0001, 10))
def test_an_unchanging_host_settles_whatever_came_before(before: list[Round], seconds: float) -> None:
    slower = [Round(tuple(value + seconds for value in each.latencies_s), each.errors) for each in before]
    assert judge([*slower, *[steady(seconds)] * WINDOW]).settled


@given(rounds, st.integers(1, 5))
def test_errors_in_the_window_always_forbid(before: list[Round], errors: int) -> None:
    assert not judge([*before, steady(0.01), Round((0.01,), errors), steady(0.01)]).settled


@given(st.lists(st.floats(0.02, 1), min_size=1, max_size=9))
def test_the_order_within_a_round_does_not_matter(values: list[float]) -> None:
    assert judge([Round(tuple(values))] * 3) == judge([Round(tuple(sorted(values)))] * 3)
    assert judge([Round(tuple(values))] * 3).settled


@given(latencies, st.floats(0, 1))
def test_a_percentile_is_one_of_the_values(values: tuple[float, ...], share: float) -> None:
    assert percentile(values, share) in values
    assert percentile(values, 1) == max(values)
    assert P50_FLOOR_S > 0
