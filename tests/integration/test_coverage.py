"""Warm coverage over time: a route that turns cold is seen at once, in its tenant and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jumpstart_server.cli.status import describe_status
from tests.integration.server import Serve, free_port, wait_until, write_app

pytestmark = pytest.mark.slow

APP = """
    import os, pathlib

    FLAG = pathlib.Path(os.environ["FLAG"])

    def new_price():
        return 7

    def app(environ, start_response):
        start_response("200 OK", [])
        if environ["PATH_INFO"] == "/deals" and FLAG.exists():
            import colorsys
            new_price()
        return [b"here"]
"""

TOML = """
    [tenants.shop]
    target = "priced:app"
    port = {shop}
    first_calls = true

    [tenants.other]
    target = "priced:app"
    port = {other}
"""


def test_a_flag_that_flips_lowers_the_coverage_of_its_route_and_tenant(
    serve: Serve, tmp_path: Path, home: Path
) -> None:
    current = home.parent / (home.name + "-cwd")
    current.mkdir()
    ports = {"shop": free_port(), "other": free_port()}
    (current / "jumpstart.toml").write_text(TOML.format(**ports))
    folder = write_app(tmp_path / "app", "priced", APP)
    flag = tmp_path / "flag"
    with serve("", app_dir=folder, address=(), env={"FLAG": str(flag)}) as server:
        wait_until(lambda: server.admin("/readyz").text.count("worker ready") == len(ports), 60)

        def ask(tenant: str, path: str, times: int) -> None:
            for _ in range(times):
                assert httpx.get(f"http://127.0.0.1:{ports[tenant]}{path}", timeout=30).text == "here"

        def minute(tenant: str, requests: int) -> dict[str, float]:
            window = server.status(requests, tenant=tenant)["coverage"][0]
            assert window["seconds"] == 60
            routes = {name: each["warm_coverage"] for name, each in window["routes"].items()}
            return {"all": window["warm_coverage"], **routes}

        ask("shop", "/deals", 2)
        ask("shop", "/cart", 2)
        ask("other", "/cart", 2)
        assert minute("shop", 4) == {"all": 1, "GET /deals": 1, "GET /cart": 1}

        flag.touch()
        ask("shop", "/deals", 2)
        assert minute("shop", 6) == {"all": pytest.approx(5 / 6), "GET /deals": 0.75, "GET /cart": 1}
        assert minute("other", 2) == {"all": 1, "GET /cart": 1}

        text = "\n".join(describe_status(server.admin("/status").json()))
        assert "warm requests lately: 83.3% of 6 in 60 s" in text
        assert "warm requests lately: 100.0% of 2 in 60 s" in text
        (line,) = [line for line in text.splitlines() if "GET /deals cold, since" in line]
        assert line.startswith("  1 of 4 × GET /deals cold, since ")
        assert "import 1" in line

        families = {each.name: each for each in text_string_to_metric_families(server.admin("/metrics").text)}
        found = {
            (sample.labels["tenant"], sample.labels["route"]): sample.value
            for sample in families["jumpstart_route_recent_warm_coverage_ratio"].samples
            if sample.labels["seconds"] == "60"
        }
        assert found == {("shop", "GET /deals"): 0.75, ("shop", "GET /cart"): 1, ("other", "GET /cart"): 1}
        assert [sample.labels["route"] for sample in families["jumpstart_route_cold_for_seconds"].samples] == [
            "GET /deals"
        ]

        deals = server.status(tenant="shop")["routes"]["GET /deals"]
        if sys.version_info >= (3, 12):
            assert any(name.endswith(" new_price") for name in deals["first_call_names"])
            assert "ran for the first time: app/priced.py" in text
        else:
            assert deals["first_calls"] == 0
            assert "--first-calls needs Python 3.12" in server.stderr
