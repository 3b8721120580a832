"""Medians, percentiles, ratios, turns."""

from __future__ import annotations

import random

import pytest

from benchmarks.figures import Spread, median_interval, percentile, ratio, spread, turns


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.501, 51), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_a_percentile_is_the_least_value_that_the_share_does_not_exceed(share: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), share) == expected


def test_percentiles_of_few_values() -> None:
    assert percentile([], 0.99) is None
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 9.0], 0.5) == 1.0
    assert percentile([1.0, 9.0], 0.99) == 9.0


def test_a_spread_is_median_least_and_most() -> None:
    assert spread([5.0, 1.0, 3.0]) == Spread(3.0, 1.0, 5.0)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)
    assert spread([]) is None


def test_a_ratio_is_made_within_rounds() -> None:
    """The machine was ten times slower in round 1; twice as fast is twice as fast all the same."""
    assert ratio({0: 200.0, 1: 20.0, 2: 200.0}, {0: 100.0, 1: 10.0, 2: 100.0}) == 2.0


def test_rounds_that_one_of_the_two_lacks_give_no_ratio() -> None:
    assert ratio({0: 4.0, 1: 100.0}, {0: 2.0}) == 2.0
    assert ratio({0: 4.0, 1: 6.0}, {0: 0.0, 1: 2.0}) == 3.0
    assert ratio({0: 4.0}, {1: 2.0}) is None
    assert ratio({}, {0: 1.0}) is None


def test_the_interval_of_a_median_holds_it_nearly_always_and_is_narrow() -> None:
    source, inside, widths = random.Random(7), 0, []
    for _ in range(100):
        values = [source.gauss(1.0, 2.0) for _ in range(40)]
        found = median_interval(values, resamples=300)
        assert found is not None
        assert found.least <= found.median <= found.most
        inside += found.least <= 1.0 <= found.most
        widths.append(found.most - found.least)
    assert inside >= 85
    assert 0.8 < sum(widths) / 100 < 2.4  # 4 standard errors of a median are 1.6
    assert median_interval([]) is None
    assert median_interval([3.0, 3.0]) == Spread(3.0, 3.0, 3.0)


def test_servers_take_turns() -> None:
    orders = ["".join(turns("ABC", number)) for number in range(4)]
    assert orders == ["ABC", "BCA", "CAB", "ABC"]
    assert turns([], 3) == []


def test_over_as_many_rounds_as_servers_each_is_once_at_each_place() -> None:
    for place in range(5):
        assert sorted(turns("ABCDE", number)[place] for number in range(5)) == list("ABCDE")
