"""Warm coverage over time: the last minute says what the share since the start hides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_warmup.coverage import MAX_ROUTES, QUIET_S, WINDOWS_S, Coverage, CoverageWindow
from jumpstart_warmup.observe import OTHER, ObserverSnapshot, RouteStats


def books(requests: int, cold: int = 0, route: str = "GET /a", **more: Any) -> ObserverSnapshot:
    """As a worker tells them: since its start."""
    stats = RouteStats(requests=requests, cold_requests=cold, cold_events={"import": cold} if cold else {}, **more)
    return ObserverSnapshot(routes={route: stats})


def window(coverage: Coverage, now: float, seconds: int) -> CoverageWindow:
    (found,) = [each for each in coverage.windows(now) if each.seconds == seconds]
    return found


def test_a_fall_is_seen_after_a_million_warm_requests() -> None:
    coverage = Coverage()
    coverage.add(None, books(1_000_000), 1000)
    coverage.add(books(1_000_000), books(1_000_010, 5), 1605)
    minute, hour = window(coverage, 1610, 60), window(coverage, 1610, 3600)
    assert (minute.requests, minute.share) == (10, 0.5)
    assert minute.routes["GET /a"].cold_events == {"import": 5}
    assert minute.routes["GET /a"].cold_for_s == 5
    assert (hour.requests, hour.cold_requests) == (1_000_010, 5)


def test_what_is_over_leaves_the_windows_and_no_traffic_is_no_window() -> None:
    coverage = Coverage()
    coverage.add(None, books(4, 4), 0)
    assert [each.seconds for each in coverage.windows(0)] == list(WINDOWS_S)
    assert [each.seconds for each in coverage.windows(61)] == [600, 3600]
    assert [each.seconds for each in coverage.windows(601)] == [3600]
    assert coverage.windows(3601) == []


def test_a_series_of_cold_requests_ends_where_it_was_quiet() -> None:
    coverage = Coverage()
    coverage.add(None, books(1, 1), 0)
    coverage.add(books(1, 1), books(2, 2), QUIET_S)
    assert window(coverage, QUIET_S, 600).routes["GET /a"].cold_for_s == QUIET_S
    coverage.add(books(2, 2), books(3, 3), 2 * QUIET_S + 1)
    assert window(coverage, 2 * QUIET_S + 2, 600).routes["GET /a"].cold_for_s == 1
    coverage.add(books(3, 3), books(9, 3), 10 * QUIET_S)
    assert window(coverage, 10 * QUIET_S, 60).routes["GET /a"].cold_for_s is None, "it was warm in this minute"


def test_a_worker_that_came_later_counts_from_its_start() -> None:
    coverage = Coverage()
    coverage.add(None, books(3, 1), 5)
    coverage.add(None, books(2, 1), 6)
    assert (window(coverage, 7, 60).requests, window(coverage, 7, 60).cold_requests) == (5, 2)


def test_first_calls_do_not_make_a_request_cold() -> None:
    coverage = Coverage()
    coverage.add(None, books(3, first_calls=7, first_call_requests=2), 5)
    route = window(coverage, 7, 60).routes["GET /a"]
    assert (route.share, route.first_calls, route.first_call_requests) == (1, 7, 2)


def test_routes_beyond_the_limit_are_counted_together() -> None:
    coverage = Coverage()
    many = {f"GET /{number}": RouteStats(requests=2, cold_requests=1) for number in range(MAX_ROUTES + 7)}
    coverage.add(None, ObserverSnapshot(routes=many), 0)
    minute = window(coverage, 1, 60)
    assert len(minute.routes) == MAX_ROUTES + 1
    assert minute.routes[OTHER].requests == 14
    assert minute.requests == 2 * len(many)


def test_the_document_has_the_coldest_routes_first() -> None:
    coverage = Coverage()
    coverage.add(None, books(9, route="GET /warm"), 0)
    coverage.add(None, books(4, 1, route="GET /cold"), 0)
    document = window(coverage, 1, 60).document()
    assert list(document["routes"]) == ["GET /cold", "GET /warm"]
    assert document["routes"]["GET /cold"]["warm_coverage"] == 0.75
    assert document["warm_coverage"] == pytest.approx(12 / 13)


reports = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["GET /a", "GET /b"]), st.booleans(), st.floats(0, 400)), max_size=60
)


@given(reports)
def test_windows_count_each_request_once_and_grow_with_their_length(
    requests: list[tuple[int, str, bool, float]],
) -> None:
    """Requests of three workers, reported one by one: each is in the long windows, and in the short ones if young."""
    coverage, now = Coverage(), 0.0
    seen = dict.fromkeys(range(3), ObserverSnapshot())
    ended: list[tuple[float, bool]] = []
    for worker, route, cold, pause in requests:
        now += pause
        old = seen[worker].routes.get(route, RouteStats())
        stats = RouteStats(requests=old.requests + 1, cold_requests=old.cold_requests + cold)
        after = ObserverSnapshot(routes={**seen[worker].routes, route: stats})
        coverage.add(seen[worker], after, now)
        seen[worker] = after
        ended.append((now, cold))
    windows = {each.seconds: each for each in coverage.windows(now)}
    counts = [windows[seconds].requests if seconds in windows else 0 for seconds in WINDOWS_S]
    assert counts == sorted(counts)
    for seconds, step in zip(WINDOWS_S, (10, 60, 60), strict=True):
        found = windows.get(seconds)
        # A step is dropped when its begin is too old: what is younger by a step is in for sure, what is older is not.
        least = [cold for at, cold in ended if at > now - seconds + step]
        most = [cold for at, cold in ended if at > now - seconds]
        assert len(least) <= (found.requests if found else 0) <= len(most)
        assert sum(least) <= (found.cold_requests if found else 0) <= sum(most)
        if found:
            assert found.requests == sum(each.requests for each in found.routes.values())
            assert 0 <= found.share <= 1
