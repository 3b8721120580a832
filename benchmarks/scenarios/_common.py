"""Columns and choices that several scenarios share."""

from __future__ import annotations

from typing import Any

from benchmarks.lab import Meter, Traffic
from benchmarks.processes import Failure
from benchmarks.scenario import Column
from benchmarks.servers import SERVERS


def speaking(interface: str) -> tuple[str, ...]:
    return tuple(server.name for server in SERVERS.values() if interface in server.interfaces)


WSGI_WITH_THREADS = tuple(name for name in speaking("wsgi") if not SERVERS[name].fixed_threads)
WITHOUT_THREADS = {server.name: server.fixed_threads for server in SERVERS.values() if server.fixed_threads}

RATE = Column("rate", "req/s", better="more")
CPU_PER_REQUEST = Column("cpu_us", "CPU µs/req", better="less")
PSS = Column("pss_mib", "PSS MiB", better="less")
THREADS = Column("threads", "threads")
FAILURES = Column("failures", "failures", better="less")


def ms(value: float | None) -> float | None:
    return None if value is None else value * 1000


def of_traffic(meter: Meter, traffic: Traffic) -> dict[str, Any]:
    """
    The figures of one closed loop.

    Raises:
        Failure: no request was answered.
    """
    if not traffic.requests:
        raise Failure(f"no request was answered; {traffic.failures} failed")
    return of_any_traffic(meter, traffic)


def of_any_traffic(meter: Meter, traffic: Traffic) -> dict[str, Any]:
    """The same where no answer is a result too: a rate of nothing."""
    figures = meter.read(traffic.cpu_s)
    return {
        **figures,
        "generator": traffic.generator,
        "rate": traffic.rate,
        "requests": traffic.requests,
        "p50_ms": ms(traffic.p50_s),
        "p99_ms": ms(traffic.p99_s),
        "cpu_us": 1e6 * figures["cpu_s"] / traffic.requests if traffic.requests else None,
        "failures": traffic.failures,
    }
