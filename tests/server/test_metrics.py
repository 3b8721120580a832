"""The metrics page parses, adds up, and loses no digits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jumpstart.records import Dropped, Reason
from jumpstart.report import BootReport, SectionReport
from jumpstart_server.engine import PoolStats
from jumpstart_server.metrics import CONTENT_TYPE, Figures, render
from jumpstart_warmup.coverage import CoverageWindow, RouteCoverage
from jumpstart_warmup.observe import BUCKETS_S, ObserverSnapshot, RouteStats

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def figures(**words: Any) -> Figures:
    plain: dict[str, Any] = {
        "tenant": "web",
        "observed": ObserverSnapshot(),
        "boot": None,
        "workers": {"serving": 2},
        "ready_after_s": 1.5,
        "restarts": 0,
        "pools": [PoolStats(threads=4, busy=1, limit=40)],
        "refusals": [],
    }
    return Figures(**{**plain, **words})


def page(**words: Any) -> str:
    return render([figures(**words)])


def parsed(text: str) -> Samples:
    assert text.endswith("\n")
    samples: Samples = {}
    names: set[str] = set()
    for family in text_string_to_metric_families(text):
        assert family.name not in names, "a family stands in one place"
        names.add(family.name)
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"twice: {key}"
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset({"tenant": "web", **labels}.items())]


counts = st.integers(0, 2**53)
stats = st.builds(
    lambda buckets, errors, total, cold: RouteStats(
        requests=sum(buckets), errors=errors, latency_sum_s=total, buckets=tuple(buckets), cold_events=cold
    ),
    st.lists(st.integers(0, 10**9), min_size=len(BUCKETS_S) + 1, max_size=len(BUCKETS_S) + 1),
    counts,
    st.floats(0, 1e12),
    st.dictionaries(st.text(max_size=5), counts, max_size=3),
)
hostile = st.text(st.sampled_from('ab"\\\n\r\t{},= #é\u2028\x00'), max_size=8) | st.text(max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(hostile, stats, max_size=4))
def test_any_route_parses_back_with_every_digit(routes: dict[str, RouteStats]) -> None:
    samples = parsed(page(observed=ObserverSnapshot(routes=routes)))
    for route, expected in routes.items():
        assert value(samples, "jumpstart_requests_total", route=route) == expected.requests
        assert value(samples, "jumpstart_request_errors_total", route=route) == expected.errors
        for kind, count in expected.cold_events.items():
            assert value(samples, "jumpstart_cold_events_total", route=route, kind=kind) == count
        name = "jumpstart_request_duration_seconds"
        assert value(samples, f"{name}_sum", route=route) == expected.latency_sum_s
        cumulated = [
            (float(dict(labels)["le"]), count)
            for (sample, labels), count in samples.items()
            if sample == f"{name}_bucket" and dict(labels)["route"] == route
        ]
        cumulated.sort()
        bounds, totals = zip(*cumulated, strict=True)
        assert bounds == (*BUCKETS_S, math.inf)
        assert list(totals) == sorted(totals)
        assert [b - a for a, b in zip((0, *totals), totals, strict=False)] == list(expected.buckets)
        assert totals[-1] == value(samples, f"{name}_count", route=route)


def test_a_counter_of_millions_still_counts_by_ones() -> None:
    one, two = (
        value(
            parsed(page(observed=ObserverSnapshot(routes={"GET /": RouteStats(requests=count)}))),
            "jumpstart_requests_total",
            route="GET /",
        )
        for count in (12_345_678, 12_345_679)
    )
    assert two - one == 1


def test_processes_and_threads_are_there() -> None:
    samples = parsed(page(workers={"serving": 2, "booting": 1}, restarts=3))
    assert value(samples, "jumpstart_workers", state="serving") == 2
    assert value(samples, "jumpstart_workers", state="booting") == 1
    assert value(samples, "jumpstart_worker_restarts_total") == 3
    assert value(samples, "jumpstart_pool_threads") == 4
    assert value(samples, "jumpstart_pool_threads_busy") == 1
    assert value(samples, "jumpstart_ready_seconds") == 1.5


def test_threads_of_workers_are_added_up_and_the_longest_wait_is_told() -> None:
    one = PoolStats(threads=4, busy=4, waiting=3, peak=4, limit=4, oldest_wait_s=6.5)
    two = PoolStats(threads=2, busy=1, peak=2, limit=4)
    samples = parsed(page(pools=[one, two]))
    assert value(samples, "jumpstart_pool_threads") == 6
    assert value(samples, "jumpstart_pool_threads_busy") == 5
    assert value(samples, "jumpstart_pool_threads_limit") == 8
    assert value(samples, "jumpstart_pool_threads_waiting") == 3
    assert value(samples, "jumpstart_pool_threads_peak") == 6
    assert value(samples, "jumpstart_queue_oldest_wait_seconds") == 6.5
    assert value(parsed(page(pools=[])), "jumpstart_queue_oldest_wait_seconds") == 0


def test_what_is_not_known_is_left_out() -> None:
    text = page(ready_after_s=None)
    assert "jumpstart_ready_seconds" not in text
    assert "jumpstart_warm_coverage_ratio" not in text
    assert "jumpstart_boot_records" not in text
    parsed(text)


def test_the_boot_is_there_with_its_reasons() -> None:
    section = SectionReport(
        recorder="modules", offered=4, used=1, dropped=[Dropped("a", Reason.STALE), Dropped("b", Reason.STALE)]
    )
    samples = parsed(page(boot=BootReport(target="a:b", sections=[section]), refusals=["too-old", "too-old", "absent"]))
    assert value(samples, "jumpstart_boot_records", recorder="modules", outcome="used") == 1
    assert value(samples, "jumpstart_boot_records", recorder="modules", outcome="stale") == 2
    assert value(samples, "jumpstart_boot_refusals", reason="too-old") == 2
    assert value(samples, "jumpstart_boot_refusals", reason="absent") == 1


def test_warm_coverage_counts_ordinary_requests_only() -> None:
    observed = ObserverSnapshot(
        routes={"GET /": RouteStats(requests=4, cold_requests=1)},
        warmup={"GET /": RouteStats(requests=100, cold_requests=100)},
    )
    samples = parsed(page(observed=observed))
    assert value(samples, "jumpstart_warm_coverage_ratio") == pytest.approx(0.75)
    assert value(samples, "jumpstart_cold_requests_total", route="GET /") == 1


def test_recent_coverage_is_told_by_window_and_route_and_only_where_there_was_traffic() -> None:
    cold = RouteCoverage(requests=4, cold_requests=1, cold_for_s=12.5)
    routes = {"GET /": cold, "GET /warm": RouteCoverage(requests=4)}
    samples = parsed(page(coverage=[CoverageWindow(seconds=600, requests=8, cold_requests=1, routes=routes)]))
    assert value(samples, "jumpstart_recent_warm_coverage_ratio", seconds="600") == 0.875
    assert value(samples, "jumpstart_route_recent_warm_coverage_ratio", seconds="600", route="GET /") == 0.75
    assert value(samples, "jumpstart_route_recent_warm_coverage_ratio", seconds="600", route="GET /warm") == 1
    cold_for = {key: each for key, each in samples.items() if key[0] == "jumpstart_route_cold_for_seconds"}
    assert list(cold_for.values()) == [12.5]
    assert "recent_warm_coverage_ratio{" not in page()


def test_first_calls_are_told_where_they_were() -> None:
    routes = {"GET /": RouteStats(requests=4, first_calls=3), "GET /b": RouteStats(requests=1)}
    samples = parsed(page(observed=ObserverSnapshot(routes=routes)))
    assert value(samples, "jumpstart_first_calls_total", route="GET /") == 3
    assert sum(name == "jumpstart_first_calls_total" for name, _ in samples) == 1


def test_a_hostile_tenant_is_escaped_too() -> None:
    samples = parsed(page(tenant='x"\n\\'))
    assert samples["jumpstart_worker_restarts_total", frozenset({("tenant", 'x"\n\\')})] == 0


def test_the_content_type_names_the_format() -> None:
    assert "version=0.0.4" in CONTENT_TYPE and "utf-8" in CONTENT_TYPE


def test_several_tenants_share_the_families_and_have_samples_of_their_own() -> None:
    observed = ObserverSnapshot(routes={"GET /": RouteStats(requests=3)})
    text = render([figures(observed=observed), figures(tenant="chat", workers={"booting": 1}, given_up=True)])
    samples = parsed(text)
    assert value(samples, "jumpstart_workers", state="serving") == 2
    assert samples["jumpstart_workers", frozenset({"tenant": "chat", "state": "booting"}.items())] == 1
    assert value(samples, "jumpstart_given_up") == 0
    assert samples["jumpstart_given_up", frozenset({("tenant", "chat")})] == 1
    assert {dict(labels)["tenant"] for _, labels in samples} == {"web", "chat"}
