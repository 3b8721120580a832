"""What a worker's warm-up came to, in the report and in the log."""

from __future__ import annotations

import logging

import pytest

from jumpstart_server.warming import WarmupNotes, is_rejected
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.inprocess import Outcome, WarmupResult

HOME, CART, GONE = WarmRequest(path="/", weight=8), WarmRequest(path="/cart", weight=2), WarmRequest(path="/gone")


def outcome(request: WarmRequest, status: int | None, *, error: str | None = None, took_s: float = 0.01) -> Outcome:
    return Outcome(request, status, error, took_s, 0)


def warm_up(notes: WarmupNotes, *outcomes: Outcome) -> WarmupResult:
    result = WarmupResult()
    for each in outcomes:
        result.add(each)
        notes.note(each)
        result.elapsed_s += each.elapsed_s
    notes.complain(result)
    return result


def test_coverage_is_the_share_of_recorded_traffic_that_worked() -> None:
    notes = WarmupNotes([], [HOME, CART], [HOME, CART])
    report = notes.report(
        warm_up(notes, outcome(HOME, 200), outcome(CART, 503, error="answered 503")), budget_s=10, replay=True
    )
    assert (report.coverage, report.sent, report.ok, len(report.failures)) == (0.8, 2, 1, 1)


def test_without_replay_there_is_no_coverage() -> None:
    notes = WarmupNotes([GONE], [HOME], [])
    assert notes.report(warm_up(notes, outcome(GONE, 200)), budget_s=10, replay=False).coverage is None


def test_a_400_is_no_coverage_and_the_host_is_named(caplog: pytest.LogCaptureFixture) -> None:
    notes = WarmupNotes([], [HOME, CART], [HOME, CART])
    with caplog.at_level(logging.WARNING, "jumpstart_server.warming"):
        result = warm_up(notes, outcome(HOME, 400), outcome(CART, 400))
    assert notes.report(result, budget_s=10, replay=True).coverage == 0
    assert "none of 2 recorded requests succeeded (statuses: 2 × 400)" in caplog.text
    assert "--warmup-host" in caplog.text


def test_a_4xx_of_the_operators_own_is_named_unless_it_was_expected(caplog: pytest.LogCaptureFixture) -> None:
    meant = WarmRequest(path="/meant", expect_status=404)
    with caplog.at_level(logging.WARNING, "jumpstart_server.warming"):
        warm_up(WarmupNotes([GONE, meant], [], []), outcome(GONE, 404), outcome(meant, 404))
    assert "1 requests of --warmup were answered with 4xx" in caplog.text
    assert "GET /gone: answered 404" in caplog.text
    assert "/meant" not in caplog.text
    assert is_rejected(outcome(GONE, 404))
    assert not is_rejected(outcome(meant, 404))


def test_a_long_warm_up_says_what_took_the_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jumpstart_server.warming"):
        warm_up(WarmupNotes([], [HOME, CART], [HOME, CART]), outcome(HOME, 200), outcome(CART, 200, took_s=4.0))
    assert "warm-up took 4.0 s, 4.0 s of it GET /cart; --warmup-budget limits it" in caplog.text


def test_an_ordinary_warm_up_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jumpstart_server.warming"):
        warm_up(WarmupNotes([], [HOME], [HOME]), outcome(HOME, 200))
    assert not caplog.records


def test_only_what_took_most_of_the_budget_is_too_slow_for_the_next_worker() -> None:
    late = Outcome(GONE, None, "no response", 6.0, 0, is_late=True)
    last = Outcome(CART, None, "no response", 0.2, 0, is_late=True)
    notes = WarmupNotes([GONE], [HOME, CART], [HOME, CART])
    report = notes.report(warm_up(notes, outcome(HOME, 200, took_s=7.0), late, late, last), budget_s=10, replay=True)
    assert report.too_slow == ["GET /gone"]
