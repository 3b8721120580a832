"""The load generators with nothing to wait for but our upstream: what they could show at most."""

from __future__ import annotations

from typing import Any

from benchmarks.lab import Lab, Meter
from benchmarks.processes import Failure
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import RATE, of_traffic
from benchmarks.scenarios.streams import COLUMNS, stream

CORES = Column("server_cores", "its cores", "{:.2f}")
WRK, OWN, VARYING = VARIANTS = ("wrk", "own", "own, differing heads")
CONNECTIONS = 64
SECONDS = 4
STREAMS = 1000


def measure(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    if variant == WRK and not lab.wrk:
        raise Failure("wrk is not installed")
    meter = Meter(lab.upstream)
    seconds = lab.seconds(SECONDS)
    traffic = lab.traffic(lab.upstream.port, "/", CONNECTIONS, seconds, vary=variant == VARYING, own=variant != WRK)
    return of_traffic(meter, traffic)


def measure_streams(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    return stream(lab, lab.upstream.port, STREAMS, Meter(lab.upstream))


SCENARIOS = (
    Scenario(
        name="generators",
        title="The load generators alone, on a server that only sends ready-made bytes",
        interface="",
        servers=("upstream",),
        reference="upstream",
        variants=VARIANTS,
        columns=(RATE, Column("p99_ms", "p99 ms", "{:.2f}", "less"), CORES),
        measure=measure,
    ),
    Scenario(
        name="generators-streams",
        title=f"{STREAMS} token streams straight from the upstream",
        interface="",
        servers=("upstream",),
        reference="upstream",
        variants=("",),
        columns=(*COLUMNS[:5], Column("upstream_late_p99_ms", "tokens leave late, p99 ms", "{:.1f}", "less"), CORES),
        measure=measure_streams,
    ),
)
