"""When a server seeds, and what counts as traffic."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.boot import BootSettings
from jumpstart.lineage import MAX_CARRIED
from jumpstart.recorder import WarmSettings
from jumpstart.records import Record
from jumpstart_server.learning import Learning
from jumpstart_server.messages import Section
from jumpstart_server.profiles import evidence
from jumpstart_server.seeding import LONGEST_PAUSE, Progress, is_due, pause_after, publish_url
from jumpstart_server.settings import AppSettings, HostSettings, ProfileSettings, Settings, TenantSettings
from jumpstart_warmup.corpus import CorpusRecorder
from jumpstart_warmup.observe import Observer, ObserverSnapshot, RouteStats

SETTINGS = ProfileSettings(seed=True, seed_requests=1000, seed_after=600, prove_requests=100, max_age=86_400)
FRESH = Progress(since=50.0, requests=7)


@pytest.mark.parametrize(
    ("progress", "requests", "now", "due"),
    [
        (FRESH, 1007, 650.0, True),
        (FRESH, 1006, 650.0, False),
        (FRESH, 1007, 649.0, False),
        (Progress(since=50.0, requests=7, has_published=True), 90_000, 50 + 43_199, False),
        (Progress(since=50.0, requests=7, has_published=True), 90_000, 50 + 43_200, True),
        (Progress(since=50.0, requests=7, has_published=True), 1006, 50 + 43_200, False),  # drained meanwhile
        (Progress(since=50.0, requests=7, failures=1, tried=700.0), 5000, 1299.0, False),
        (Progress(since=50.0, requests=7, failures=1, tried=700.0), 5000, 1300.0, True),
    ],
)
def test_a_profile_is_due_when_both_are_reached(progress: Progress, requests: int, now: float, due: bool) -> None:
    assert is_due(progress, SETTINGS, requests, now) is due


def test_nothing_is_captured_that_could_only_be_rejected_as_drained() -> None:
    settings = msgspec.structs.replace(SETTINGS, seed_requests=1, prove_requests=100)
    assert not is_due(FRESH, settings, 100, 650.0)
    assert is_due(FRESH, settings, 107, 650.0)


@given(st.integers(1, 10_000), st.floats(0, 1e6))
def test_failures_are_tried_again_ever_more_seldom_but_for_ever(failures: int, after: float) -> None:
    assert 0 < pause_after(failures, after) <= pause_after(failures + 1, after) <= LONGEST_PAUSE


def test_health_checks_and_warm_up_are_no_traffic() -> None:
    stats = RouteStats(requests=5)
    observed = ObserverSnapshot(
        routes={"GET /": stats, "GET /healthz": stats, "GET /api/health": stats, "GET /health/{}": stats},
        warmup={"GET /warm": stats},
    )
    assert list(evidence(observed)) == ["GET /"]
    observed = ObserverSnapshot(
        routes={"GET /a": RouteStats(requests=5, marked=2), "GET /b": RouteStats(requests=3, marked=3)}
    )
    assert {key: each.requests for key, each in evidence(observed).items()} == {"GET /a": 3}


@pytest.mark.parametrize(
    ("target", "headers", "evidence", "warmup", "is_recorded"),
    [
        ("/a", [], True, False, True),
        ("/a", [], False, False, False),  # marked by a client, or shadowed
        ("/a", [], True, True, False),
        ("/healthz", [], True, False, False),
        ("/a", [("User-Agent", "kube-probe/1.29")], True, False, False),
        ("/a", [("User-Agent", "Mozilla/5.0")], True, False, True),
    ],
)
def test_only_real_traffic_is_recorded_as_hot(
    target: str, headers: list[tuple[str, str]], evidence: bool, warmup: bool, is_recorded: bool
) -> None:
    corpus = CorpusRecorder(WarmSettings())
    observer = Observer(corpus)
    context = observer.begin(warmup=warmup)
    observer.end(
        context,
        route=target,
        method="GET",
        target=target,
        headers=headers,
        status=200,
        elapsed_s=0.1,
        evidence=evidence,
    )
    assert [record.key for record in corpus.capture("ship")] == (["GET /a"] if is_recorded else [])
    counted = sum(stats.requests - stats.marked for stats in observer.snapshot().routes.values())
    assert counted == (evidence and not warmup)


def test_what_a_server_hands_down_is_what_it_saw_and_what_was_not_carried_for_too_long() -> None:
    learning = Learning(BootSettings(target="a:b", app_dir="."))
    base = {"names": Section(1, "json", [Record(key=key, weight=0, carried=MAX_CARRIED) for key in ("old", "used")])}
    learning.learnt((1, 0, 7), base)
    learning.learnt((1, 1, 8), {"names": Section(1, "json", [Record(key="used", weight=2), Record(key="new")])})
    learning.gone((1, 1, 8))
    more = {"names": Section(1, "json", [Record(key="young", weight=0, carried=3)])}
    (section,) = learning.handed_down([more]).values()
    assert {each.key: (each.weight, each.carried) for each in section.records} == {
        "used": (2, 0),
        "new": (1, 0),
        "young": (0, 4),
    }
    kept = {each.key: each.carried for each in learning.merged([more])["names"].records}
    assert kept == {"old": MAX_CARRIED, "used": 0, "new": 0, "young": 3}, "in the host's own cache nothing ages"


@pytest.mark.parametrize(
    ("publish", "profile", "url"),
    [
        ("/srv/store", "", "/srv/store"),
        ("", "s3://bucket/x", "s3://bucket/x"),
        ("/srv/store", "s3://bucket/x", "/srv/store"),
        ("", "/srv/x.jumpstart", ""),
        ("", "", ""),
    ],
)
def test_it_publishes_where_it_is_told_or_where_it_boots_from(publish: str, profile: str, url: str) -> None:
    settings = Settings(
        app=AppSettings(),
        tenant=TenantSettings(profile=profile),
        profile=ProfileSettings(publish=publish),
        server=HostSettings(),
    )
    assert publish_url(settings) == url
