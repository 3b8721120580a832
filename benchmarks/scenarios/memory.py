"""What idle threads cost: memory with many of them started, less that with few."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import machine
from benchmarks.lab import Lab, Meter
from benchmarks.processes import Failure
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios._common import WITHOUT_THREADS, WSGI_WITH_THREADS

FEW, MANY = 10, 1000
SETTLE_S = 1.0


def idle(lab: Lab, name: str, threads: int) -> dict[str, Any]:
    """Memory and threads of a server after MANY requests at once, which have all ended."""
    sleep_ms = 2000 if threads == MANY else 5  # so long that each request finds all started threads busy
    with lab.serve(name, "wsgi", "wsgi_apps:waiting", threads) as server:
        meter = Meter(server)
        got = lab.tool("burst", 30, port=server.port, path=f"/?ms={sleep_ms}", count=MANY)
        if got["broken"]:
            raise Failure(f"{got['broken']} of {MANY} requests failed: {got['faults']}")
        time.sleep(SETTLE_S)
        tree = server.tree()
        figures = meter.read(got["cpu_s"])
        return {**figures, "pss_kib": machine.pss_kib(tree), "threads": machine.threads(tree)}


def measure(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    few, many = idle(lab, name, FEW), idle(lab, name, MANY)
    more_kib, more_threads = many["pss_kib"] - few["pss_kib"], many["threads"] - few["threads"]
    if more_threads <= 0:
        raise Failure(f"it had {many['threads']} threads where {MANY} were asked for")
    # Not all servers have started all threads by then.
    per_thread_kib = more_kib / more_threads
    return {
        **many,
        "more_mib": per_thread_kib * (MANY - FEW) / 1024,
        "per_thread_kib": per_thread_kib,
        "few_mib": few["pss_kib"] / 1024,
        "many_mib": many["pss_kib"] / 1024,
    }


SCENARIO = Scenario(
    name="memory",
    title=f"Memory of {MANY} idle threads over that of {FEW} (PSS)",
    interface="wsgi",
    servers=WSGI_WITH_THREADS,
    absent=WITHOUT_THREADS,
    reference="gunicorn",
    variants=("",),
    columns=(
        Column("more_mib", "MiB more", "{:.1f}", "less"),
        Column("per_thread_kib", "KiB per thread", "{:.1f}", "less"),
        Column("few_mib", f"MiB with {FEW}", "{:.0f}", "less"),
        Column("many_mib", f"MiB with {MANY}", "{:.0f}", "less"),
        Column("threads", "threads of the processes"),
    ),
    measure=measure,
)
