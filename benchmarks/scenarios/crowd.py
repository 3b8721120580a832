"""Connections that ask for nothing, beside normal traffic: how much of its throughput is left."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.lab import TOOL_S, Lab, Meter
from benchmarks.load.crowd import CONNECT_S
from benchmarks.processes import Failure, Tool
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import PSS, THREADS, of_any_traffic

SILENT, SLOW = 10_000, 500
CONNECTIONS = 64
THREAD_COUNT = 4
SECONDS = 4


def measure(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    seconds = lab.seconds(SECONDS)
    with lab.serve(name, "wsgi", "wsgi_apps:hello", THREAD_COUNT) as server:
        lab.traffic(server.port, "/", CONNECTIONS, lab.seconds(2), own=True)
        before = lab.traffic(server.port, "/", CONNECTIONS, seconds, own=True)
        if not before.rate:
            raise Failure("no request was answered before they came")
        options = {"port": server.port, "silent": SILENT, "slow": SLOW}
        with Tool("crowd", options, CONNECT_S + seconds + 2 * TOOL_S) as crowd:
            gathered = crowd.say()
            meter = Meter(server)
            figures = of_any_traffic(meter, lab.traffic(server.port, "/", CONNECTIONS, seconds, own=True))
            left = crowd.finish()
        after = lab.traffic(server.port, "/", CONNECTIONS, seconds, own=True)
    alone = [traffic.rate for traffic in (before, after) if traffic.rate]
    return {
        **figures,
        "before_rate": before.rate,
        "after_rate": after.rate,
        # Of both, since a machine may drift meanwhile.
        "kept": figures["rate"] / fmean(alone),
        "gathered": gathered["open"],
        "left": left["open"],
    }


SCENARIO = Scenario(
    name="crowd",
    title=f"WSGI hello beside {SILENT:,} silent connections and {SLOW} slow ones: throughput kept",
    interface="wsgi",
    servers=("jumpstart", "gunicorn", "granian", "waitress"),
    reference="granian",
    variants=("",),
    columns=(
        Column("kept", "kept", "{:.0%}", "more"),
        Column("before_rate", "req/s before", better="more"),
        Column("rate", "req/s beside them", better="more"),
        Column("after_rate", "req/s after", better="more"),
        Column("p99_ms", "p99 ms beside them", "{:.1f}", "less"),
        Column("failures", "failures", better="less"),
        Column("gathered", "connections made"),
        Column("left", "still open at the end"),
        PSS,
        THREADS,
    ),
    measure=measure,
)
