"""
Warm coverage over time: which share of the requests of the last minute, ten minutes and hour ran without cold work.

The share since the start hides what happens now: after a million warm requests, a flag that makes a route cold moves it
by nothing. So the differences between successive books (`observe.py`) of each worker are kept in steps of time, the
young ones fine, the old ones coarse. Bounded: `MAX_ROUTES` routes in each of some seventy steps.

Workers report every few seconds, and when somebody asks: what a window shows is as late as that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from jumpstart_warmup.observe import OTHER, ObserverSnapshot, RouteStats

WINDOWS_S = (60, 600, 3600)
MAX_ROUTES = 200  # in a step; the others are counted together
QUIET_S = 60.0  # without a cold request: what comes after that is a new series

_FINE_S, _COARSE_S = 10.0, 60.0
_NOTHING = RouteStats()


class RouteCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """
    One route's requests in a window.

    Attributes:
        cold_events: kind → number.
        first_calls: functions that ran for the first time; 0 where nobody looks (`jumpstart/first_calls.py`).
        first_call_requests: requests with at least one of those.
        cold_for_s: how long ago the latest series of cold requests has begun, which may be before the window; None
            where there was none in it.
    """

    requests: int = 0
    cold_requests: int = 0
    cold_events: dict[str, int] = {}
    first_calls: int = 0
    first_call_requests: int = 0
    cold_for_s: float | None = None

    @property
    def share(self) -> float:
        """Warm coverage: of the requests, those without a cold event."""
        return 1 - self.cold_requests / self.requests


class CoverageWindow(msgspec.Struct, frozen=True, kw_only=True):
    """
    What ended within the last *seconds*, as far as there was traffic.

    Attributes:
        routes: those that had requests, by ``METHOD route``.
    """

    seconds: int
    requests: int
    cold_requests: int
    routes: dict[str, RouteCoverage]

    @property
    def share(self) -> float:
        """Warm coverage: of the requests, those without a cold event."""
        return 1 - self.cold_requests / self.requests

    def document(self) -> dict[str, Any]:
        """As JSON types, the coldest routes first."""
        routes = sorted(self.routes.items(), key=lambda item: (-item[1].cold_requests, item[0]))
        return {
            "seconds": self.seconds,
            "requests": self.requests,
            "cold_requests": self.cold_requests,
            "warm_coverage": self.share,
            "routes": {name: {"warm_coverage": each.share, **msgspec.to_builtins(each)} for name, each in routes},
        }


class _Step:
    __slots__ = ("began", "routes")

    def __init__(self, began: float) -> None:
        self.began = began
        self.routes: dict[str, RouteCoverage] = {}

    def add(self, route: str, more: RouteCoverage) -> None:
        if route not in self.routes and len(self.routes) >= MAX_ROUTES:
            route = OTHER
        self.routes[route] = _sum(self.routes.get(route), more)


class Coverage:
    """The requests of one tenant, over time. Clocks are monotonic, in seconds, and passed in."""

    def __init__(self) -> None:
        self._fine: deque[_Step] = deque(maxlen=int(WINDOWS_S[0] / _FINE_S))
        self._coarse: deque[_Step] = deque(maxlen=int(WINDOWS_S[-1] / _COARSE_S))
        self._series: dict[str, tuple[float, float]] = {}  # route → first and last cold request, oldest last one first

    def add(self, before: ObserverSnapshot | None, after: ObserverSnapshot, now: float) -> None:
        """Take the books of a worker; *before* were its last ones. What is new in them ended about now."""
        known: Mapping[str, RouteStats] = before.routes if before is not None else {}
        for route, stats in after.routes.items():
            more = _difference(known.get(route, _NOTHING), stats)
            if more.requests > 0:
                _step_of(self._fine, now, _FINE_S).add(route, more)
                _step_of(self._coarse, now, _COARSE_S).add(route, more)
            if more.cold_requests > 0:
                self._was_cold(route, now)

    def _was_cold(self, route: str, now: float) -> None:
        first, last = self._series.pop(route, (now, now))
        self._series[route] = (first if now - last <= QUIET_S else now, now)
        if len(self._series) > MAX_ROUTES:
            del self._series[next(iter(self._series))]

    def windows(self, now: float) -> list[CoverageWindow]:
        """The last minute, ten minutes and hour; without those in which there were no requests."""
        found = []
        for seconds in WINDOWS_S:
            steps = self._fine if seconds <= WINDOWS_S[0] else self._coarse
            routes: dict[str, RouteCoverage] = {}
            for step in steps:
                if step.began > now - seconds:
                    for route, more in step.routes.items():
                        routes[route] = _sum(routes.get(route), more)
            for route, each in routes.items():
                if each.cold_requests and route in self._series:
                    first, _ = self._series[route]
                    routes[route] = msgspec.structs.replace(each, cold_for_s=now - first)
            requests = sum(each.requests for each in routes.values())
            if requests:
                cold = sum(each.cold_requests for each in routes.values())
                found.append(CoverageWindow(seconds=seconds, requests=requests, cold_requests=cold, routes=routes))
        return found


def _step_of(steps: deque[_Step], now: float, length: float) -> _Step:
    began = now - now % length
    if not steps or steps[-1].began < began:
        steps.append(_Step(began))
    return steps[-1]


def _difference(before: RouteStats, after: RouteStats) -> RouteCoverage:
    kinds = {kind: count - before.cold_events.get(kind, 0) for kind, count in after.cold_events.items()}
    return RouteCoverage(
        requests=after.requests - before.requests,
        cold_requests=after.cold_requests - before.cold_requests,
        cold_events={kind: count for kind, count in kinds.items() if count},
        first_calls=after.first_calls - before.first_calls,
        first_call_requests=after.first_call_requests - before.first_call_requests,
    )


def _sum(one: RouteCoverage | None, two: RouteCoverage) -> RouteCoverage:
    if one is None:
        return two
    kinds = dict(one.cold_events)
    for kind, count in two.cold_events.items():
        kinds[kind] = kinds.get(kind, 0) + count
    return RouteCoverage(
        requests=one.requests + two.requests,
        cold_requests=one.cold_requests + two.cold_requests,
        cold_events=kinds,
        first_calls=one.first_calls + two.first_calls,
        first_call_requests=one.first_call_requests + two.first_call_requests,
    )
