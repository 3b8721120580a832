"""How current real-time values are, on the pages of the server."""

from __future__ import annotations

import msgspec

from jumpstart.upkeep import LiveInfo
from jumpstart_server.cli.status import _live as lines
from jumpstart_server.metrics import _live as put
from jumpstart_server.metrics import _Page


def info(**words: object) -> LiveInfo:
    fresh = {"kind": "config", "name": "flags", "version": 3, "origin": "source", "age_s": 2.0, "is_stale": False}
    return msgspec.convert({**fresh, "failures": 0, "failed": 1, "fetched": 7, "error": "", **words}, LiveInfo)


def test_metrics_have_the_oldest_age_the_stale_workers_and_sums() -> None:
    page = _Page()
    never = info(kind="service", name="where", age_s=None, is_stale=True, origin="none")
    put(page, "web", [info(), info(age_s=9.5, is_stale=True, failed=2), never])
    text = page.text()
    for line in (
        'jumpstart_live_age_seconds{tenant="web",kind="config",source="flags"} 9.5',
        'jumpstart_live_stale{tenant="web",kind="config",source="flags"} 1',
        'jumpstart_live_stale{tenant="web",kind="service",source="where"} 1',
        'jumpstart_live_fetches_total{tenant="web",kind="config",source="flags",outcome="ok"} 14',
        'jumpstart_live_fetches_total{tenant="web",kind="config",source="flags",outcome="failed"} 3',
    ):
        assert f"{line}\n" in text
    assert 'age_seconds{tenant="web",kind="service"' not in text  # it has none


def test_the_status_names_what_is_stale_and_why() -> None:
    stale = [
        info(age_s=75.2, is_stale=True, error="OSError: down"),
        info(kind="service", name="where", age_s=None, is_stale=True, origin="default"),
    ]
    assert list(lines(msgspec.to_builtins([info(), *stale]))) == [
        "    config flags is stale, 75 s old, from source: OSError: down",
        "    service where is stale, never fetched, from default",
    ]
