"""The smallest answer, as fast as it goes."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.lab import Lab, Meter
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import CPU_PER_REQUEST, FAILURES, PSS, RATE, of_traffic, speaking

APPS = {"wsgi": "wsgi_apps:hello", "asgi": "asgi_apps:hello"}
THREADS = 4
CONNECTIONS = 64
SECONDS = 4
SAME, DIFFERING = VARIANTS = ("same heads", "differing heads")
COLUMNS = (
    RATE,
    Column("p50_ms", "p50 ms", "{:.2f}", "less"),
    Column("p99_ms", "p99 ms", "{:.2f}", "less"),
    CPU_PER_REQUEST,
    PSS,
    FAILURES,
)


def measure(interface: str, lab: Lab, name: str, variant: str) -> dict[str, Any]:
    with lab.serve(name, interface, APPS[interface], THREADS) as server:
        vary = variant == DIFFERING
        lab.traffic(server.port, "/", CONNECTIONS, lab.seconds(1), vary=vary)
        meter = Meter(server)
        return of_traffic(meter, lab.traffic(server.port, "/", CONNECTIONS, lab.seconds(SECONDS), vary=vary))


SCENARIOS = (
    Scenario(
        name="hello-wsgi",
        title=f"WSGI hello: {CONNECTIONS} connections, {THREADS} threads",
        interface="wsgi",
        servers=speaking("wsgi"),
        reference="granian",
        variants=VARIANTS,
        columns=COLUMNS,
        measure=partial(measure, "wsgi"),
    ),
    Scenario(
        name="hello-asgi",
        title=f"ASGI hello: {CONNECTIONS} connections",
        interface="asgi",
        servers=speaking("asgi"),
        reference="uvicorn",
        variants=VARIANTS,
        columns=COLUMNS,
        measure=partial(measure, "asgi"),
    ),
)
