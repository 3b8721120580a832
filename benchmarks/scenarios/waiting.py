"""A thousand handlers that wait, for a database, say: what is measured is the cost of threads."""

from __future__ import annotations

from typing import Any

from benchmarks.lab import Lab, Meter
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import (
    CPU_PER_REQUEST,
    FAILURES,
    PSS,
    RATE,
    THREADS,
    WITHOUT_THREADS,
    WSGI_WITH_THREADS,
    of_traffic,
)

COUNT = 1000  # connections, and threads
WAIT_MS = 100
SECONDS = 5
IDEAL = COUNT * 1000 / WAIT_MS


def measure(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    path = f"/?ms={WAIT_MS}"
    with lab.serve(name, "wsgi", "wsgi_apps:waiting", COUNT) as server:
        lab.traffic(server.port, path, COUNT, lab.seconds(2))
        meter = Meter(server)
        figures = of_traffic(meter, lab.traffic(server.port, path, COUNT, lab.seconds(SECONDS)))
    return {**figures, "of_ideal": figures["rate"] / IDEAL}


SCENARIO = Scenario(
    name="waiting",
    title=f"{COUNT} WSGI handlers that wait {WAIT_MS} ms: {COUNT} connections, {COUNT} threads (ideal {IDEAL:,.0f}/s)",
    interface="wsgi",
    servers=WSGI_WITH_THREADS,
    absent=WITHOUT_THREADS,
    reference="granian",
    variants=("",),
    columns=(
        RATE,
        Column("of_ideal", "of ideal", "{:.0%}", "more"),
        Column("p50_ms", "p50 ms", better="less"),
        Column("p99_ms", "p99 ms", better="less"),
        CPU_PER_REQUEST,
        PSS,
        THREADS,
        FAILURES,
    ),
    measure=measure,
)
