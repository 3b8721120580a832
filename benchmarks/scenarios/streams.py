"""Token streams, as language models give them, through blocking WSGI handlers: a thread for each stream."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.lab import Lab, Meter
from benchmarks.processes import Failure
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import PSS, THREADS, WITHOUT_THREADS, WSGI_WITH_THREADS, ms

TOKENS, QUICK_TOKENS = 20, 5
INTERVAL_MS = 100
THREAD_COUNT = 1000
RAMP_S = 0.5  # streams begin evenly within this
DEADLINE_S = 30.0  # a stream that has not ended by then is broken
VARIANTS = ("200 at once", "500 at once", "1000 at once")
COLUMNS = (
    Column("total_p50_s", "stream p50 s", "{:.2f}", "less"),
    Column("total_p99_s", "stream p99 s", "{:.2f}", "less"),
    Column("first_p50_ms", "first token p50 ms", better="less"),
    Column("first_p99_ms", "first token p99 ms", better="less"),
    Column("gap_p99_ms", "gap p99 ms", better="less"),
    Column("cpu_us", "CPU µs/token", better="less"),
    Column("broken", "broken", better="less"),
    PSS,
    THREADS,
)


def measure(app: str, lab: Lab, name: str, variant: str) -> dict[str, Any]:
    count = int(variant.partition(" ")[0])
    address = f"127.0.0.1:{lab.upstream.port}"
    with lab.serve(name, "wsgi", app, THREAD_COUNT, BENCH_UPSTREAM=address) as server:
        return stream(lab, server.port, count, Meter(server, lab.upstream))


def stream(lab: Lab, port: int, count: int, meter: Meter) -> dict[str, Any]:
    """The figures of *count* streams at once."""
    tokens = QUICK_TOKENS if lab.quick else TOKENS
    lab.upstream.late_p99_s()
    got = lab.tool(
        "burst",
        DEADLINE_S,
        port=port,
        path=f"/stream?n={tokens}&ms={INTERVAL_MS}",
        count=count,
        tokens=tokens,
        ramp_s=RAMP_S,
        deadline_s=DEADLINE_S,
    )
    figures = meter.read(got["cpu_s"])
    if not got["tokens"]:
        raise Failure(f"not one token came: {got['faults']}")
    return {
        **figures,
        **{key: got[key] for key in ("total_p50_s", "total_p99_s", "whole", "broken", "faults", "tokens")},
        "first_p50_ms": ms(got["first_p50_s"]),
        "first_p99_ms": ms(got["first_p99_s"]),
        "gap_p99_ms": ms(got["gap_p99_s"]),
        "cpu_us": 1e6 * figures["cpu_s"] / got["tokens"],
        "upstream_late_p99_ms": ms(lab.upstream.late_p99_s()),
    }


def scenario(name: str, what: str, app: str) -> Scenario:
    ideal = TOKENS * INTERVAL_MS / 1000
    return Scenario(
        name=name,
        title=f"Token streams, {what}: {TOKENS} tokens, one each {INTERVAL_MS} ms (ideal {ideal:.1f} s)",
        interface="wsgi",
        servers=WSGI_WITH_THREADS,
        absent=WITHOUT_THREADS,
        reference="waitress",
        variants=VARIANTS,
        columns=COLUMNS,
        measure=partial(measure, app),
    )


SCENARIOS = (
    scenario("streams-sleeping", "the WSGI handler sleeps between them", "wsgi_apps:sleeping_stream"),
    scenario("streams-upstream", "the WSGI handler reads them from an upstream", "wsgi_apps:upstream_stream"),
)
