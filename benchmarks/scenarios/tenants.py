"""
The headline: short requests and token streams on one shared tier, or on a tenant each.

The situation of "HHVM optimizations for GenAI" (Meta, May 2025): a tier of a couple of hundred threads that short
requests share with streams, each of which holds a thread for seconds while it waits for a language model. Scaled down:
streams of a few seconds, so that a sample takes half a minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.lab import Lab, Meter
from benchmarks.processes import RunningServer
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import PSS, THREADS, ms

SHARED_THREADS, STREAM_THREADS = 200, 1000
SHORT_MS = 20  # what a short request waits for, a database say
SHORT_RATE = 150  # a second
TOKENS, INTERVAL_MS = 60, 100
STREAM_S = TOKENS * INTERVAL_MS / 1000
SECONDS = 12
PATIENCE_S = 30.0
IN_FLIGHT = {"120 streams at once": 120, "240 streams at once": 240}  # on average, by Little's law
APP = "wsgi_apps:mixed"

TWO, ONE, ALONE = "jumpstart, two tenants", "jumpstart, one tier", "jumpstart, no streams"


def measure(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    short = {"path": f"/?ms={SHORT_MS}", "rate": SHORT_RATE, "tokens": 0}
    stream = {"path": f"/stream?n={TOKENS}&ms={INTERVAL_MS}", "rate": IN_FLIGHT[variant] / STREAM_S, "tokens": TOKENS}
    seconds = lab.seconds(SECONDS)
    with _serve(lab, name) as (server, short_port, stream_port):
        meter = Meter(server)
        got = lab.tool(
            "mix",
            STREAM_S + seconds + PATIENCE_S,
            short={**short, "port": short_port},
            streams=None if name == ALONE else {**stream, "port": stream_port},
            warm_s=STREAM_S + 1,
            seconds=seconds,
            patience_s=PATIENCE_S,
        )
        figures = meter.read(got["cpu_s"])
    streams = got.get("streams", {})
    return {
        **figures,
        "short_mean_ms": ms(got["short"]["mean_s"]),
        "short_p99_ms": ms(got["short"]["p99_s"]),
        "short_failures": got["short"]["failures"],
        "first_mean_ms": ms(streams.get("first_mean_s")),
        "first_p99_ms": ms(streams.get("first_p99_s")),
        "stream_mean_s": streams.get("mean_s"),
        "stream_p99_s": streams.get("p99_s"),
        "stream_failures": streams.get("failures"),
        "faults": {kind: got[kind]["faults"] for kind in ("short", "streams") if kind in got},
    }


@contextlib.contextmanager
def _serve(lab: Lab, name: str) -> Iterator[tuple[RunningServer, int, int]]:
    """A server, the port of short requests and that of streams."""
    if name == TWO:
        with lab.serve_tenants(APP, {"web": SHARED_THREADS, "genai": STREAM_THREADS}) as (server, ports):
            yield server, ports["web"], ports["genai"]
    else:
        with lab.serve(name.partition(",")[0], "wsgi", APP, SHARED_THREADS) as server:
            yield server, server.port, server.port


SCENARIO = Scenario(
    name="tenants",
    title=f"{SHORT_RATE} short requests a second ({SHORT_MS} ms) beside token streams of {STREAM_S:g} s: "
    f"one tier of {SHARED_THREADS} threads, or two tenants ({SHARED_THREADS} and {STREAM_THREADS} threads)",
    interface="wsgi",
    servers=(TWO, ONE, "gunicorn", "granian", ALONE),
    reference=ALONE,
    variants=tuple(IN_FLIGHT),
    columns=(
        Column("short_mean_ms", "short, mean ms", "{:,.1f}", "less"),
        Column("short_p99_ms", "short, p99 ms", "{:,.1f}", "less"),
        Column("short_failures", "short, failed", better="less"),
        Column("first_mean_ms", "first token, mean ms", better="less"),
        Column("first_p99_ms", "first token, p99 ms", better="less"),
        Column("stream_mean_s", "stream, mean s", "{:.2f}", "less"),
        Column("stream_p99_s", "stream, p99 s", "{:.2f}", "less"),
        Column("stream_failures", "streams, failed", better="less"),
        PSS,
        THREADS,
    ),
    measure=measure,
)
