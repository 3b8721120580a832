"""FastAPI's ``def`` endpoints, which run on threads: more at once than the usual 40."""

from __future__ import annotations

from typing import Any

from benchmarks.lab import Lab, Meter
from benchmarks.processes import Failure
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import PSS, THREADS, ms, speaking

COUNT = 500
SLEEP_MS, QUICK_SLEEP_MS = 1000, 200
DEADLINE_S = 60.0


def measure(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    sleep_ms = QUICK_SLEEP_MS if lab.quick else SLEEP_MS
    # Only Jumpstart has an option for these threads; the others run the app with anyio's 40.
    with lab.serve(name, "asgi", "fastapi_app:app", COUNT) as server:
        meter = Meter(server)
        got = lab.tool(
            "burst", DEADLINE_S, port=server.port, path=f"/sleep?ms={sleep_ms}", count=COUNT, deadline_s=DEADLINE_S
        )
        figures = meter.read(got["cpu_s"])
    if not got["whole"]:
        raise Failure(f"no request was answered: {got['faults']}")
    return {
        **figures,
        "took_s": got["took_s"],
        "p50_ms": ms(got["total_p50_s"]),
        "p99_ms": ms(got["total_p99_s"]),
        "broken": got["broken"],
        "faults": got["faults"],
    }


SCENARIO = Scenario(
    name="def-endpoints",
    title=f"FastAPI `def` endpoints: {COUNT} requests at once, each sleeps {SLEEP_MS / 1000:.0f} s",
    interface="asgi",
    servers=speaking("asgi"),
    reference="uvicorn",
    variants=("",),
    columns=(
        Column("took_s", "until all are done, s", "{:.2f}", "less"),
        Column("p50_ms", "p50 ms", better="less"),
        Column("p99_ms", "p99 ms", better="less"),
        Column("broken", "broken", better="less"),
        PSS,
        THREADS,
    ),
    measure=measure,
)
