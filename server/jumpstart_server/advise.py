"""
Does this traffic belong into this envelope? Measures each route against its tenant's invariants. Pure.

A tier is tuned for one kind of traffic. A route of another kind breaks what the tier takes for granted:

===========  =======================================================================================================
time         its requests end well within ``timeout``
threads      it leaves most threads to others (Little's law: threads in use = requests a second × seconds of each)
work         it works while it holds a thread, or holds it briefly; long waits for others want many cheap threads
memory       what all threads need at once is within ``memory_limit``
warm         its requests find everything warm
===========  =======================================================================================================

None broken: it belongs. One: tune that. More than one: a tenant of its own, as Meta found for language-model traffic.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jumpstart_warmup.observe import BUCKETS_S, OTHER, RouteStats
from jumpstart_warmup.routes import NOT_FOUND

TIME_SHARE = 0.8  # of the timeout that the slowest hundredth may take
THREAD_SHARE = 0.5  # of a tier's threads that one route may hold on average
WAIT_SHARE = 0.9  # of a request's time from which on it is one that waits for others
LONG_WAIT = 1.0  # seconds of a request below which its waiting harms nobody
COLD_SHARE = 0.05  # of the requests that may find something cold
ENOUGH = 20  # requests, or looks, below which nothing is concluded
LEAST_SPREAD = 10  # requests in flight between the quietest and the busiest look at a worker
HEADROOM = 2.0  # threads for a peak over the mean in use; time over the slowest hundredth
TIMEOUTS = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600)  # seconds that people write
LEAST_THREADS = 8
MOST_THREADS = 1000


class Invariant(enum.StrEnum):
    TIME = "time"
    THREADS = "threads"
    WORK = "work"
    MEMORY = "memory"
    WARM = "warm"


class Verdict(enum.StrEnum):
    TOO_FEW = "too few requests"
    BELONGS = "belongs"
    TUNE = "tune"
    MOVE = "a tenant of its own"


@dataclass(frozen=True)
class Envelope:
    """
    What a tenant's processes may do.

    Attributes:
        timeout_s: 0 for none.
        threads: of all its workers together; 0 where nobody knows.
        workers: processes.
        memory_limit: bytes of a worker; 0 for none.
    """

    tenant: str
    timeout_s: float
    threads: int
    workers: int = 1
    memory_limit: int = 0


@dataclass(frozen=True)
class Use:
    """
    One route over a period.

    Attributes:
        rate: requests a second.
        mean_s: seconds of a request.
        p50_s, p99_s: at most so long; infinity beyond the last bound of the histogram.
        busy: requests in flight on average, by Little's law.
        wait_share: of their time that they did not compute, 0…1; None where it was not measured.
        cold_share: of the requests that found something cold, 0…1; None where it was not measured.
    """

    route: str
    requests: int
    errors: int
    rate: float
    mean_s: float
    p50_s: float
    p99_s: float
    busy: float
    wait_share: float | None
    cold_share: float | None


@dataclass(frozen=True)
class Broken:
    """An invariant that a route breaks: what was measured, and what to do if it is the only one."""

    invariant: Invariant
    measured: str
    remedy: str


@dataclass(frozen=True)
class Advice:
    """What is to be done about a route."""

    use: Use
    broken: tuple[Broken, ...]

    @property
    def verdict(self) -> Verdict:
        if self.use.requests < ENOUGH:
            return Verdict.TOO_FEW
        return (Verdict.BELONGS, Verdict.TUNE)[len(self.broken)] if len(self.broken) < 2 else Verdict.MOVE


class MemoryOfRequests:
    """
    How many bytes a request in flight takes: the slope of a worker's resident set over its requests in flight.

    A worker's own size falls out of it, and so does what it keeps for ever. Routes cannot be told apart this way.
    """

    def __init__(self) -> None:
        self._count = 0
        self._x = self._y = self._xx = self._xy = 0.0
        self._least, self._most = math.inf, 0

    def add(self, in_flight: int, rss: int) -> None:
        """One look at the worker; *rss* in bytes, 0 where that is not known."""
        if rss <= 0:
            return
        self._count += 1
        self._least, self._most = min(self._least, in_flight), max(self._most, in_flight)
        self._x += in_flight
        self._y += rss
        self._xx += in_flight * in_flight
        self._xy += in_flight * rss

    @property
    def bytes_each(self) -> float | None:
        """None until the number of requests has varied enough for an answer."""
        if self._count < ENOUGH or self._most - self._least < LEAST_SPREAD:
            return None
        spread = self._count * self._xx - self._x * self._x
        return max((self._count * self._xy - self._x * self._y) / spread, 0.0)


def measure(routes: Mapping[str, RouteStats], period_s: float, *, knows_cold: bool = True) -> list[Use]:
    """
    What each route did in *period_s* seconds, the one that holds most threads first.

    Args:
        knows_cold: the books tell cold requests; those made from an access log do not.
    """
    period_s = max(period_s, 1e-3)
    uses = []
    for route, stats in routes.items():
        if not stats.requests:
            continue
        measured = stats.cpu_latency_s
        uses.append(
            Use(
                route=route,
                requests=stats.requests,
                errors=stats.errors,
                rate=stats.requests / period_s,
                mean_s=stats.latency_sum_s / stats.requests,
                p50_s=quantile(stats.buckets, 0.5, stats.longest_s),
                p99_s=quantile(stats.buckets, 0.99, stats.longest_s),
                busy=stats.latency_sum_s / period_s,
                wait_share=min(max(1 - stats.cpu_s / measured, 0.0), 1.0) if measured > 0 else None,
                cold_share=stats.cold_requests / stats.requests if knows_cold else None,
            )
        )
    return sorted(uses, key=lambda use: (-use.busy, use.route))


def quantile(buckets: Sequence[int], share: float, longest_s: float = math.inf) -> float:
    """
    The time in seconds that *share* of the requests did not exceed, interpolated within its bucket.

    Never more than *longest_s*, the longest of them; 0 where there were no requests.
    """
    total = sum(buckets)
    if not total:
        return 0.0
    wanted = share * total
    below = 0
    for index, count in enumerate(buckets):
        if count and below + count >= wanted:
            low = BUCKETS_S[index - 1] if index else 0.0
            high = min(BUCKETS_S[index] if index < len(BUCKETS_S) else math.inf, longest_s)
            return low + (high - low) * (wanted - below) / count if high > low else high
        below += count
    return longest_s


def difference(now: Mapping[str, RouteStats], before: Mapping[str, RouteStats]) -> dict[str, RouteStats]:
    """The requests between two looks at a server's books."""
    routes = {}
    for route, stats in now.items():
        old = before.get(route, RouteStats())
        if stats.requests > old.requests:
            routes[route] = RouteStats(
                requests=stats.requests - old.requests,
                cold_requests=max(stats.cold_requests - old.cold_requests, 0),
                errors=max(stats.errors - old.errors, 0),
                latency_sum_s=max(stats.latency_sum_s - old.latency_sum_s, 0.0),
                longest_s=stats.longest_s,
                cpu_requests=max(stats.cpu_requests - old.cpu_requests, 0),
                cpu_s=max(stats.cpu_s - old.cpu_s, 0.0),
                cpu_latency_s=max(stats.cpu_latency_s - old.cpu_latency_s, 0.0),
                buckets=tuple(max(a - b, 0) for a, b in zip(stats.buckets, old.buckets, strict=True)),
            )
    return routes


def judge(use: Use, envelope: Envelope, memory_each: float | None = None) -> Advice:
    """
    Hold a route against the envelope.

    Args:
        memory_each: bytes that a request in flight takes, where that is known; it is known per worker, not per route.
    """
    if use.requests < ENOUGH:
        return Advice(use, ())
    checks = (
        _time(use, envelope),
        _threads(use, envelope),
        _work(use),
        _memory(use, envelope, memory_each),
        _warm(use),
    )
    return Advice(use, tuple(broken for broken in checks if broken is not None))


def _time(use: Use, envelope: Envelope) -> Broken | None:
    if not envelope.timeout_s or use.p99_s <= TIME_SHARE * envelope.timeout_s:
        return None
    return Broken(
        Invariant.TIME,
        f"1 % take more than {seconds(use.p99_s)} of the {envelope.timeout_s:g} s of timeout",
        f"timeout = {_timeout_for(use.p99_s)}",
    )


def _threads(use: Use, envelope: Envelope) -> Broken | None:
    if not envelope.threads or use.busy <= THREAD_SHARE * envelope.threads:
        return None
    per_worker = _threads_for(use.busy / envelope.workers)
    return Broken(
        Invariant.THREADS,
        f"holds {use.busy:.1f} of {envelope.threads} threads on average",
        f"threads = {per_worker}",
    )


def _work(use: Use) -> Broken | None:
    if use.wait_share is None or use.wait_share < WAIT_SHARE or use.mean_s < LONG_WAIT:
        return None
    return Broken(
        Invariant.WORK,
        f"waits for others {use.wait_share:.0%} of {seconds(use.mean_s)}",
        "more threads, which cost memory only",
    )


def _memory(use: Use, envelope: Envelope, memory_each: float | None) -> Broken | None:
    if memory_each is None or not envelope.memory_limit or use.mean_s < LONG_WAIT:
        return None
    wanted = memory_each * envelope.threads / envelope.workers
    if wanted <= envelope.memory_limit:
        return None
    return Broken(
        Invariant.MEMORY,
        f"{memory_each / 2**20:.2f} MiB a request × {envelope.threads // envelope.workers} threads of a worker "
        f"is more than its {envelope.memory_limit / 2**20:.0f} MiB",
        'threads = "auto"',
    )


def _warm(use: Use) -> Broken | None:
    if use.cold_share is None or use.cold_share <= COLD_SHARE:
        return None
    return Broken(
        Invariant.WARM,
        f"{use.cold_share:.0%} of its requests find something cold",
        "a profile, or a request of it in warmup; jumpstart status names what is cold",
    )


def tenants_for(advice: Iterable[Advice], envelope: Envelope, *, port: int = 8001) -> str:
    """
    The TOML of the tenants that the routes need which do not belong: one for each first part of their paths.

    Empty where all belong. The addresses are proposals: *port* and those after it.
    """
    groups: dict[str, list[Advice]] = {}
    for each in advice:
        if each.verdict is Verdict.MOVE:
            groups.setdefault(_prefix(each.use.route), []).append(each)
    return "\n".join(_tenant(prefix, group, envelope, port + n) for n, (prefix, group) in enumerate(groups.items()))


def _tenant(prefix: str, group: Sequence[Advice], envelope: Envelope, port: int) -> str:
    busy = sum(each.use.busy for each in group)
    longest = max(each.use.p99_s for each in group)
    timeout = _timeout_for(longest)
    why = sorted({broken.invariant.value for each in group for broken in each.broken})
    lines = [
        f"# {', '.join(each.use.route for each in group)}",
        f"# breaks of {envelope.tenant or 'its tier'}: {', '.join(why)}",
        f"[tenants.{_name(prefix, envelope.tenant)}]",
        f'bind = "127.0.0.1:{port}"',
        f'routes = ["{prefix}"]',
        f"threads = {_threads_for(busy)}  # {HEADROOM:g} × {busy:.1f} in use on average, for one worker",
        f"timeout = {timeout}  # {HEADROOM:g} × {seconds(longest)}, which 1 % exceed",
    ]
    if timeout > 60:
        lines.append("idle_timeout = 60  # a stream that says nothing for so long is dead")
    return "\n".join(lines) + "\n"


def _threads_for(busy: float) -> int:
    wanted = max(math.ceil(busy * HEADROOM), LEAST_THREADS)
    return min(math.ceil(wanted / 10) * 10 if wanted > 10 else wanted, MOST_THREADS)


def _timeout_for(longest_s: float) -> int:
    index = bisect_left(TIMEOUTS, longest_s * HEADROOM)
    return TIMEOUTS[min(index, len(TIMEOUTS) - 1)]


def _prefix(route: str) -> str:
    """``/chat`` of ``POST /chat/{id}``: where a proxy tells the tenants apart."""
    path = route.partition(" ")[2]
    if path in (OTHER, NOT_FOUND) or not path.startswith("/"):
        return "/"
    first = path[1:].partition("/")[0]
    return "/" if not first or "{" in first else f"/{first}"


def _name(prefix: str, taken: str) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in prefix.strip("/").lower()) or "slow"
    return name if name != taken else f"{name}-slow"


def seconds(value: float) -> str:
    """A time for a person."""
    if value == math.inf:
        return f"{BUCKETS_S[-1]:g} s"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"
