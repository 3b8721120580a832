"""
Shadow requests: what they save when a flag flips, and what they cost real traffic.

`flip`: the first requests behind a flag pay for a module, a look-up and their like. Without shadow requests one in each
worker, with them one in the whole server. It takes a route that is asked for less often than its cold work takes:
on a busy one all workers have met it before the first of them is done.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, Meter
from benchmarks.processes import RunningServer, free_port
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import CPU_PER_REQUEST, FAILURES, RATE, ms, of_traffic

WORKERS = 4
FLIP_RATE = 2  # requests a second, of all workers
BUSY_RATE = 40  # requests a second that wait for 50 ms each, and have the others go to all workers
FLIP_S = 60  # before the flip, and after it
PATIENCE_S = 10.0
LOAD_S = 60
CONNECTIONS = 16
FRACTION = 0.1
# Hello keeps the processors busy, which leaves few idle moments; where requests wait there are many.
LOADS = {
    "WSGI hello": ("wsgi_apps:hello", "/"),
    "ASGI hello": ("asgi_apps:hello", "/"),
    "WSGI, 20 ms each": ("wsgi_apps:mixed", "/?ms=20"),
}

WITH, WITHOUT = "jumpstart, shadow requests", "jumpstart, none"


@contextlib.contextmanager
def _serve(lab: Lab, app: str, options: dict[str, Any], **environ: str) -> Iterator[tuple[RunningServer, int, int]]:
    """A server, its port, and that of its admin pages."""
    admin = free_port()
    with lab.serve_tenants(app, {"web": 8}, options, admin=f"127.0.0.1:{admin}", **environ) as (server, ports):
        yield server, ports["web"], admin


def _status(admin: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/status", timeout=10) as answer:
        (tenant,) = json.load(answer)["tenants"]
    found: dict[str, Any] = tenant
    return found


def _cold(status: dict[str, Any]) -> int:
    return sum(int(route["cold_requests"]) for route in status["routes"].values())


def measure_flip(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    seconds = lab.seconds(FLIP_S)
    short = {"path": "/", "rate": FLIP_RATE, "tokens": 0}
    busy = {"path": "/busy", "rate": BUSY_RATE, "tokens": 0}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        flag = Path(folder) / "flag"
        options = {"workers": WORKERS, "threads": 1, "shadow_cold": name == WITH}
        with _serve(lab, "flip_app:app", options, BENCH_FLAG=str(flag)) as (server, port, admin):

            def load(warm_s: float) -> dict[str, Any]:
                got = lab.tool(
                    "mix",
                    warm_s + seconds + PATIENCE_S,
                    short={**short, "port": port},
                    streams={**busy, "port": port},
                    warm_s=warm_s,
                    seconds=seconds,
                    patience_s=PATIENCE_S,
                )
                figures: dict[str, Any] = got["short"]
                return {**figures, "cpu_s": got["cpu_s"]}

            before = load(lab.seconds(5))
            cold = _cold(_status(admin))
            flag.touch()
            meter = Meter(server)
            after = load(0.0)
            figures = meter.read(after["cpu_s"])
            status = _status(admin)
    return {
        **figures,
        "before_p99_ms": ms(before["p99_s"]),
        "after_p99_ms": ms(after["p99_s"]),
        "before_longest_ms": ms(before["longest_s"]),
        "after_longest_ms": ms(after["longest_s"]),
        "cold": _cold(status) - cold,
        "shadow_cold": status["shadow"]["cold_requests"],
        "failures": before["failures"] + after["failures"],
    }


def measure_cost(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    # No limit but that of CPU time, which is the usual one.
    options = {"workers": 2, "shadow": FRACTION, "shadow_rate": 1_000_000} if name == WITH else {"workers": 2}
    app, path = LOADS[variant]
    with _serve(lab, app, options) as (server, port, admin):
        lab.traffic(port, path, CONNECTIONS, lab.seconds(3))
        before = _status(admin)["shadow"]
        meter = Meter(server)
        figures = of_traffic(meter, lab.traffic(port, path, CONNECTIONS, lab.seconds(LOAD_S)))
        shadow = _status(admin)["shadow"]
    return {
        **figures,
        "shadow_sent": sum(shadow["sent"].values()) - sum(before["sent"].values()),
        "shadow_done": shadow["done"] - before["done"],
        "shadow_cpu_s": shadow["cpu_s"] - before["cpu_s"],
    }


FLIP = Scenario(
    name="flip",
    title=f"A flag flips: {WORKERS} workers, {FLIP_RATE} requests a second, the minute before and the minute after",
    interface="wsgi",
    servers=(WITH, WITHOUT),
    reference=WITHOUT,
    variants=("",),
    columns=(
        Column("after_p99_ms", "p99 ms after", "{:,.1f}", "less"),
        Column("before_p99_ms", "p99 ms before", "{:,.1f}", "less"),
        Column("after_longest_ms", "longest ms after", "{:,.1f}", "less"),
        Column("before_longest_ms", "longest ms before", "{:,.1f}", "less"),
        Column("cold", "cold requests", better="less"),
        Column("shadow_cold", "cold shadow requests"),
        FAILURES,
    ),
    measure=measure_flip,
)

COST = Scenario(
    name="shadow",
    title=f"2 workers, {CONNECTIONS} connections, with {FRACTION:.0%} of the requests shadowed and with none",
    interface="wsgi",
    servers=(WITH, WITHOUT),
    reference=WITHOUT,
    variants=tuple(LOADS),
    columns=(
        RATE,
        Column("p99_ms", "p99 ms", "{:,.2f}", "less"),
        CPU_PER_REQUEST,
        Column("shadow_sent", "shadow requests sent"),
        Column("shadow_done", "run"),
        Column("shadow_cpu_s", "their CPU s", "{:.2f}"),
        FAILURES,
    ),
    measure=measure_cost,
)

SCENARIOS = (FLIP, COST)
