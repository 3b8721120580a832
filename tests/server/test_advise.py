"""Which routes belong into an envelope, and what the others need."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.advise import (
    ENOUGH,
    LEAST_SPREAD,
    Envelope,
    Invariant,
    MemoryOfRequests,
    Verdict,
    difference,
    judge,
    measure,
    quantile,
    tenants_for,
)
from jumpstart_warmup.observe import BUCKETS_S, RouteStats

WEB = Envelope("web", timeout_s=30, threads=200, workers=2, memory_limit=2 * 2**30)


def stats(requests: int, each_s: float, *, cpu_share: float | None = None, cold: int = 0) -> RouteStats:
    buckets = [0] * (len(BUCKETS_S) + 1)
    buckets[bisect_left(BUCKETS_S, each_s)] = requests
    total = requests * each_s
    return RouteStats(
        requests=requests,
        cold_requests=cold,
        latency_sum_s=total,
        longest_s=each_s,
        cpu_requests=0 if cpu_share is None else requests,
        cpu_s=0.0 if cpu_share is None else cpu_share * total,
        cpu_latency_s=0.0 if cpu_share is None else total,
        buckets=tuple(buckets),
    )


def test_occupancy_is_littles_law() -> None:
    [use] = measure({"GET /": stats(600, 0.5)}, 60)
    assert use.rate == 10
    assert use.busy == 5
    assert use.mean_s == 0.5


def test_short_requests_belong() -> None:
    [use] = measure({"GET /": stats(60_000, 0.02, cpu_share=0.4)}, 60)
    advice = judge(use, WEB)
    assert advice.verdict is Verdict.BELONGS
    assert tenants_for([advice], WEB) == ""


def test_one_broken_invariant_is_tuned() -> None:
    [use] = measure({"GET /report": stats(100, 28, cpu_share=0.95)}, 600)
    advice = judge(use, WEB)
    assert advice.verdict is Verdict.TUNE
    [broken] = advice.broken
    assert broken.invariant is Invariant.TIME
    assert broken.remedy == "timeout = 60"


def test_streams_of_a_language_model_get_a_tenant_of_their_own() -> None:
    """What Meta found: long, waiting nine tenths of their time, many at once."""
    uses = measure({"GET /": stats(6000, 0.02, cpu_share=0.5), "POST /chat/{id}": stats(900, 45, cpu_share=0.02)}, 300)
    advice = [judge(use, WEB, memory_each=1.5 * 2**20) for use in uses]
    by_route = {each.use.route: each for each in advice}
    assert by_route["GET /"].verdict is Verdict.BELONGS
    chat = by_route["POST /chat/{id}"]
    assert chat.verdict is Verdict.MOVE
    assert {broken.invariant for broken in chat.broken} == {Invariant.TIME, Invariant.THREADS, Invariant.WORK}
    tenant = tomllib.loads(tenants_for(advice, WEB))["tenants"]["chat"]
    assert tenant["routes"] == ["/chat"]
    assert tenant["threads"] >= chat.use.busy  # 135 in use on average
    assert tenant["timeout"] >= 2 * 45
    assert tenant["idle_timeout"] == 60


def test_memory_and_cold_requests_count() -> None:
    [use] = measure({"GET /big": stats(100, 2, cpu_share=0.9, cold=50)}, 600)
    advice = judge(use, WEB, memory_each=40 * 2**20)
    assert {broken.invariant for broken in advice.broken} == {Invariant.MEMORY, Invariant.WARM}
    assert advice.verdict is Verdict.MOVE


def test_what_was_not_measured_breaks_nothing() -> None:
    [use] = measure({"GET /slow": stats(100, 20, cold=100)}, 600, knows_cold=False)
    assert use.wait_share is None
    assert use.cold_share is None
    assert judge(use, WEB).verdict is Verdict.BELONGS


def test_few_requests_prove_nothing() -> None:
    [use] = measure({"GET /": stats(ENOUGH - 1, 50)}, 60)
    assert judge(use, WEB).verdict is Verdict.TOO_FEW


def test_no_timeout_is_not_broken() -> None:
    [use] = measure({"GET /": stats(100, 500)}, 6000)
    advice = judge(use, Envelope("web", timeout_s=0, threads=0))
    assert Invariant.TIME not in {broken.invariant for broken in advice.broken}


@given(
    routes=st.dictionaries(
        st.from_regex(r"(GET|POST) /[a-z{}/]{0,12}", fullmatch=True), st.integers(ENOUGH, 2000), min_size=1, max_size=6
    ),
    each_s=st.floats(1, 900),
)
def test_any_proposal_is_toml_with_room_for_its_routes(routes: dict[str, int], each_s: float) -> None:
    uses = measure({route: stats(n, each_s, cpu_share=0.01) for route, n in routes.items()}, 60)
    tight = Envelope("web", timeout_s=0.5, threads=1)
    advice = [judge(use, tight) for use in uses]
    tenants = tomllib.loads(tenants_for(advice, tight)).get("tenants", {})
    moved = [each for each in advice if each.verdict is Verdict.MOVE]
    assert bool(moved) == bool(tenants)
    assert len({tenant["bind"] for tenant in tenants.values()}) == len(tenants)
    for tenant in tenants.values():
        assert 1 <= tenant["threads"] <= 1000
        assert tenant["timeout"] >= 10


@given(times=st.lists(st.floats(0, 2000), min_size=1, max_size=200), share=st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_real_one(times: list[float], share: float) -> None:
    buckets = [0] * (len(BUCKETS_S) + 1)
    for each in times:
        buckets[bisect_left(BUCKETS_S, each)] += 1
    real = sorted(times)[max(math.ceil(share * len(times) - 1e-9) - 1, 0)]
    found = quantile(buckets, share)
    index = bisect_left(BUCKETS_S, real)
    if index == len(BUCKETS_S):
        assert found == math.inf
    else:
        assert (BUCKETS_S[index - 1] if index else 0) <= found <= BUCKETS_S[index] * (1 + 1e-9)


def test_the_difference_of_two_looks() -> None:
    before = {"GET /": stats(10, 0.5, cpu_share=0.5), "GET /old": stats(5, 1)}
    now = {"GET /": stats(30, 0.5, cpu_share=0.5), "GET /old": stats(5, 1), "GET /new": stats(3, 2)}
    found = difference(now, before)
    assert set(found) == {"GET /", "GET /new"}
    assert found["GET /"].requests == 20
    assert found["GET /"].latency_sum_s == pytest.approx(10)
    assert sum(found["GET /"].buckets) == 20
    assert found["GET /new"] == now["GET /new"]


def test_no_time_is_longer_than_the_longest() -> None:
    """A bucket from 2.5 to 5 s says little about requests that all took 3."""
    [use] = measure({"GET /report": stats(60, 3.0)}, 60)
    assert use.p50_s <= use.p99_s <= 3.0
    assert judge(use, Envelope("web", timeout_s=4, threads=100)).verdict is Verdict.BELONGS


@given(base=st.integers(10**7, 10**9), each=st.integers(0, 10**7), loads=st.lists(st.integers(0, 500), min_size=ENOUGH))
def test_memory_of_a_request_is_the_slope(base: int, each: int, loads: list[int]) -> None:
    memory = MemoryOfRequests()
    for in_flight in loads:
        memory.add(in_flight, base + each * in_flight)
    if max(loads) - min(loads) < LEAST_SPREAD:
        assert memory.bytes_each is None
    else:
        assert memory.bytes_each == pytest.approx(each, rel=1e-3, abs=10)


def test_unknown_memory_is_no_look() -> None:
    memory = MemoryOfRequests()
    for in_flight in range(100):
        memory.add(in_flight, 0)
    assert memory.bytes_each is None
