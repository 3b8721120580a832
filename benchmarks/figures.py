"""Medians, percentiles, ratios, and the order in which servers take turns. Values in, values out."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds."""

    median: float
    least: float
    most: float


def percentile(values: Iterable[float], share: float) -> float | None:
    """The least of *values* that at least *share* (0 to 1) of them do not exceed; None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> Spread | None:
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def ratio(mine: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    """
    The median of the ratios within each round; both map a round to a figure.

    A machine that is slower in one round is so for both.
    """
    ratios = [value / reference[number] for number, value in mine.items() if reference.get(number)]
    return statistics.median(ratios) if ratios else None


def median_interval(values: Sequence[float], share: float = 0.95, resamples: int = 4000) -> Spread | None:
    """
    The median of *values*, and between what it lies with a probability of *share*: by the percentile bootstrap.

    The same values always give the same interval.
    """
    if not values:
        return None
    source = random.Random(len(values))
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(resamples))
    cut = round((1 - share) / 2 * resamples)
    return Spread(statistics.median(values), medians[cut], medians[-cut - 1])


def turns(items: Sequence[T], number: int) -> list[T]:
    """The order of round *number*: A B C, then B C A, then C A B, and again."""
    if not items:
        return []
    first = number % len(items)
    return [*items[first:], *items[:first]]
