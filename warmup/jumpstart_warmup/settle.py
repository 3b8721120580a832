"""
When is a host warm? When going on does not make it faster.

A warm-up sends its requests in rounds. The rule looks at the last `WINDOW` rounds: no errors in them, and their medians
and their 95th percentiles lie close together and close to the best rounds so far. «Close» is a share of the best or an
absolute floor, whichever is more, since a host that answers in 0.3 ms varies by a multiple of that for reasons that
have nothing to do with warmth. Pure: values in, a verdict out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WINDOW = 3  # rounds; two may agree by luck
P50_TOLERANCE = 0.25  # of the best median
P95_TOLERANCE = 0.5  # of the best 95th percentile: tails are noisy, all the more with few requests
P50_FLOOR_S = 0.001  # the scheduler of a busy host
P95_FLOOR_S = 0.004  # a garbage collection, a time slice lost


class Round(msgspec.Struct, frozen=True):
    """
    One pass over all requests.

    Attributes:
        latencies_s: seconds of each answered request, in any order.
        errors: requests that failed or were not answered as expected.
    """

    latencies_s: tuple[float, ...]
    errors: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """
    Whether a host is warm, and why (not).

    Attributes:
        reason: for people: ``settled after 5 rounds: 12.1 ms → 0.9 ms``.
        first_ms: median of the first round in milliseconds; None when nothing was answered in it.
        settled_ms: median of the last round in milliseconds, settled or not.
    """

    settled: bool
    reason: str
    first_ms: float | None = None
    settled_ms: float | None = None


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of *values*, which must not be empty; *share* in 0…1."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def judge(rounds: Sequence[Round], *, window: int = WINDOW) -> Verdict:
    """Decide from all rounds so far, oldest first, whether the host is warm."""
    if not rounds:
        return Verdict(False, "no round was completed")
    first = _median_ms(rounds[0])
    last = _median_ms(rounds[-1])
    if len(rounds) < window:
        return Verdict(False, f"{len(rounds)} of at least {window} rounds were completed", first, last)
    recent = rounds[-window:]
    errors = sum(each.errors for each in recent)
    if errors:
        return Verdict(False, f"{errors} requests failed in the last {window} rounds", first, last)
    if any(not each.latencies_s for each in recent):
        return Verdict(False, f"nothing was answered in one of the last {window} rounds", first, last)
    clean = [each for each in rounds if each.latencies_s and not each.errors]
    for name, share, tolerance, floor_s in (
        ("median", 0.5, P50_TOLERANCE, P50_FLOOR_S),
        ("95th percentile", 0.95, P95_TOLERANCE, P95_FLOOR_S),
    ):
        best = min(percentile(each.latencies_s, share) for each in clean)
        worst = max(percentile(each.latencies_s, share) for each in recent)
        if worst - best > max(best * tolerance, floor_s):
            changing = f"the {name} still moves between {best * 1000:.1f} ms and {worst * 1000:.1f} ms"
            return Verdict(False, changing, first, last)
    text = f"settled after {len(rounds)} rounds: {_show(first)} → {_show(last)}"
    return Verdict(True, text, first, last)


def _median_ms(each: Round) -> float | None:
    return percentile(each.latencies_s, 0.5) * 1000 if each.latencies_s else None


def _show(value_ms: float | None) -> str:
    return "no answer" if value_ms is None else f"{value_ms:.1f} ms"
