"""
Shadow requests: what they save when a flag flips, and what they cost real traffic.

`flip`: the first requests behind a flag pay for a module, a look-up and their like. Without shadow requests one in each
worker, with them one in the whole server. It takes a route that is asked for less often than its cold work takes:
on a busy one all workers have met it before the first of them is done.

`shadow`: one server, in which shadowing is switched on and off every few seconds: two runs of a noisy machine differ by
more than what is to be seen. Each pair of windows beside each other gives a change of the rate and of p99; the figures
are medians of these, with the interval that holds such a median in 95 of 100 cases. Pairs go on-off, off-on, so that
what drifts is taken off. With no shadow request running a window would prove nothing: how many ran is a figure, too.
``scripts/bench shadow --rounds 1`` takes five and a half minutes.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import median_interval
from benchmarks.lab import Lab, Meter
from benchmarks.processes import Failure, RunningServer, free_port
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import FAILURES, ms, of_traffic

WORKERS = 4
FLIP_RATE = 2  # requests a second, of all workers
BUSY_RATE = 40  # requests a second that wait for 50 ms each, and have the others go to all workers
FLIP_S = 60  # before the flip, and after it
PATIENCE_S = 10.0
FRACTION = 0.1
LEAD_S = 1.2  # seconds between a switch and its window: workers tell of their samples each second
WINDOW_S = 2.0
PAIRS = 15
# Hello keeps the processors busy, which leaves few idle moments; where requests wait there are many. Their rate is such
# that a tenth of them is what workers may sample, 8 a second each.
LOADS = {
    "WSGI hello": ("wsgi_apps:hello", "/", 16),
    "ASGI hello": ("asgi_apps:hello", "/", 16),
    "WSGI, 50 ms each": ("wsgi_apps:mixed", "/?ms=50", 8),
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
        options = {"workers": WORKERS, "threads": 2, "shadow_cold": name == WITH}
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


def _switch(admin: int, fraction: float) -> None:
    url = f"http://127.0.0.1:{admin}/shadow/fraction?fraction={fraction}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as answer:
        answer.read()


def measure_cost(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    app, path, connections = LOADS[variant]
    pairs = 2 if lab.quick else PAIRS
    # No limit but that of CPU time, which is the usual one.
    with _serve(lab, app, {"workers": 2, "shadow_rate": 1_000_000}) as (server, port, admin):
        lab.traffic(port, path, connections, LEAD_S)
        meter = Meter(server)
        changes: dict[str, list[float]] = {"rate": [], "p99_ms": []}
        # Over all windows: of one, the kernel's clock of 10 ms says too little.
        cpu_s, answered = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        failures, load_s, sent, done, shadow_cpu_s = 0, 0.0, 0, 0, 0.0

        def window(is_on: bool) -> dict[str, Any]:
            nonlocal failures, load_s, sent, done, shadow_cpu_s
            _switch(admin, FRACTION if is_on else 0.0)
            lab.traffic(port, path, connections, LEAD_S)
            before = _status(admin)["shadow"]
            of_window = Meter(server)
            traffic = lab.traffic(port, path, connections, lab.seconds(WINDOW_S))
            figures = of_traffic(of_window, traffic)
            after = _status(admin)["shadow"]
            failures += traffic.failures
            load_s += traffic.cpu_s
            cpu_s[is_on] += figures["cpu_s"]
            answered[is_on] += traffic.requests
            if is_on:
                sent += sum(after["sent"].values()) - sum(before["sent"].values())
                done += after["done"] - before["done"]
                shadow_cpu_s += after["cpu_s"] - before["cpu_s"]
            elif after["done"] != before["done"]:
                raise Failure("a shadow request ran while they were switched off")
            return figures

        for number in range(pairs):
            first, second = window(number % 2 == 0), window(number % 2 == 1)
            on, off = (first, second) if number % 2 == 0 else (second, first)
            for key, found in changes.items():
                if on[key] and off[key]:
                    found.append(100 * (on[key] / off[key] - 1))
        figures = meter.read(load_s)
    for key, found in changes.items():
        interval = median_interval(found)
        if interval is not None:
            figures |= {
                f"{key}_change": interval.median,
                f"{key}_least": interval.least,
                f"{key}_most": interval.most,
            }
    return {
        **figures,
        "cpu_us_change": 100 * (cpu_s[True] / answered[True] * answered[False] / cpu_s[False] - 1),
        "pairs": pairs,
        "changes": changes,
        "shadow_sent": sent,
        "shadow_done": done,
        "shadow_share": 100 * done / answered[True],
        "shadow_cpu_s": shadow_cpu_s,
        "failures": failures,
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
    title=f"{FRACTION:.0%} of the requests shadowed: what changes for real ones, with 95 % intervals",
    interface="wsgi",
    servers=(WITH,),
    reference=WITH,
    variants=tuple(LOADS),
    columns=(
        Column("rate_change", "req/s %", "{:+.2f}", "more"),
        Column("rate_least", "from", "{:+.2f}"),
        Column("rate_most", "to", "{:+.2f}"),
        Column("p99_ms_change", "p99 %", "{:+.2f}", "less"),
        Column("p99_ms_least", "from", "{:+.2f}"),
        Column("p99_ms_most", "to", "{:+.2f}"),
        Column("cpu_us_change", "CPU/req %", "{:+.2f}", "less"),
        Column("shadow_done", "shadow requests"),
        Column("shadow_share", "of the real %", "{:.2f}"),
        FAILURES,
    ),
    measure=measure_cost,
)

SCENARIOS = (FLIP, COST)
