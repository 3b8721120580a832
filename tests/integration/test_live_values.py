"""`Config` and `Service` in a server: fetched by each worker before it is ready, whatever becomes of their source."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.server import Serve, Server, wait_until, write_app
from tests.jumpstart.live_lab import Endpoint, endpoint

pytestmark = pytest.mark.slow

APP = """
import json, os, jumpstart
from jumpstart import sources

flags = jumpstart.Config(
    "flags", sources.http(os.environ["FLAGS"], timeout=0.5), ttl=0.2, timeout=0.5, boot_timeout=0.6, snapshot="value",
    on_down=os.environ.get("ON_DOWN", "profile"),
)
inference = jumpstart.Service("inference", lambda name: [(name, 80)], ttl=0.2)
at_import = flags["a"] if "ON_DOWN" not in os.environ else None  # in the process that workers are forked from


def app(environ, start_response):
    body = {"pid": os.getpid(), "a": flags["a"], "to": str(inference.pick()), "at_import": at_import}
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(body).encode()]
"""


@pytest.fixture
def flags() -> Iterator[Endpoint]:
    with endpoint() as made:
        yield made


def answers(server: Server, count: int = 2) -> dict[int, dict[str, Any]] | None:
    """What *count* workers say, once all of them have been met."""
    found: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + 10
    while len(found) < count and time.monotonic() < end:
        answer = server.get("/").json()
        found[answer.pop("pid")] = answer
    return found if len(found) == count else None


def see(server: Server, **expected: Any) -> bool:
    found = answers(server)
    return found is not None and all(answer.items() >= expected.items() for answer in found.values())


def test_each_worker_follows_the_source_and_outlives_it(serve: Serve, flags: Endpoint, tmp_path: Path) -> None:
    app_dir = write_app(tmp_path / "app", "shop", APP)
    env = {"FLAGS": flags.url}
    with serve("shop:app", "-w", "2", app_dir=app_dir, env=env) as server:
        assert see(server, a=1, to="inference:80", at_import=1)
        status = server.status(requests=2)
        assert (status["start_method"], status["start_reasons"]) == ("fork", [])  # no thread was left behind
        assert status["cold_events"] == 0
        boot = server.admin("/boot").json()["tenants"][0]
        assert "real-time values" in {span["name"] for span in boot["spans"]}
        flags.values = {"a": 2}
        wait_until(lambda: see(server, a=2))
        flags.mode = "html"

        def both_are_stale() -> bool:
            workers = server.status()["workers"]
            infos = [info for worker in workers for info in worker["live"] if info["name"] == "flags"]
            return len(infos) == 2 and all(info["is_stale"] and "<!DOCTYPE" in info["error"] for info in infos)

        wait_until(both_are_stale)
        began = time.monotonic()
        assert see(server, a=2)
        assert time.monotonic() - began < 5
        samples = {
            (sample.name, sample.labels["source"], sample.labels.get("outcome")): sample.value
            for family in text_string_to_metric_families(server.admin("/metrics").text)
            for sample in family.samples
            if sample.name.startswith("jumpstart_live")
        }
        assert samples["jumpstart_live_stale", "flags", None] == 2
        assert samples["jumpstart_live_age_seconds", "flags", None] > 0.2
        assert samples["jumpstart_live_fetches_total", "flags", "failed"] >= 2
        assert samples["jumpstart_live_fetches_total", "inference", "ok"] >= 2
    flags.close()
    with serve("shop:app", "-w", "2", app_dir=app_dir, env=env) as server:  # the source is dead, the host remembers
        assert see(server, a=2, at_import=2)
        server.wait_for_line(r"configuration flags: its source is down .* the profile's value is used, \d+ s old")
        (span,) = [
            span
            for span in server.admin("/boot").json()["tenants"][0]["spans"]
            if span["name"] == "real-time values" and span["detail"]
        ][:1]
        assert "source down, the profile's value is used" in span["detail"]
        flags.open()
        flags.mode, flags.values = "good", {"a": 3}
        wait_until(lambda: see(server, a=3))


def test_a_boot_is_refused_where_the_app_says_so(serve: Serve, flags: Endpoint, tmp_path: Path) -> None:
    app_dir = write_app(tmp_path / "app", "shop", APP)
    flags.mode = "hang"
    env = {"FLAGS": flags.url, "ON_DOWN": "refuse"}
    with serve("shop:app", app_dir=app_dir, env=env, wait=False) as server:
        assert server.wait() == 3
        assert "configuration 'flags' refuses to start without its source" in server.stderr
        assert "Traceback" not in server.stderr
