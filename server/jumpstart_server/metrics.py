"""Prometheus text exposition (format 0.0.4) of what the supervisor knows. Pure: values in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jumpstart.report import BootReport
from jumpstart.upkeep import LiveInfo
from jumpstart_server.engine import PoolStats
from jumpstart_warmup.coverage import CoverageWindow
from jumpstart_warmup.observe import BUCKETS_S, ObserverSnapshot, warm_coverage
from jumpstart_warmup.shadow import ShadowCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """
    Of one tenant.

    Attributes:
        workers: state → how many workers are in it.
        generation: the number of the current one.
        roll_failed: the last roll did; what was there before serves on.
        given_up: nothing of it runs, since it crashed again and again or cannot boot.
        coverage: how warm the last minute, ten minutes and hour were, as far as there was traffic.
        pools: the threads of each worker.
        live: how current real-time values are, of each worker.
        refusals: reason codes of files and sections that this boot did not use.
        shadow: what became of shadow requests.
        shadow_sent: how many were sent to workers, by lane.
        seeded: outcome and fault code → how many profiles a seeder has made.
    """

    tenant: str
    observed: ObserverSnapshot
    boot: BootReport | None
    workers: Mapping[str, int]
    ready_after_s: float | None
    restarts: int
    generation: int = 1
    given_up: bool = False
    roll_failed: bool = False
    pools: Sequence[PoolStats]
    refusals: Iterable[str]
    coverage: Sequence[CoverageWindow] = ()
    live: Sequence[LiveInfo] = ()
    seeded: Mapping[tuple[str, str], int] = field(default_factory=dict)
    shadow: ShadowCounts = ShadowCounts()  # noqa: RUF009  # frozen
    shadow_sent: Mapping[str, int] = field(default_factory=dict)


class _Page:
    """The format wants the samples of a family together, whichever tenant they are of."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}
        self._samples: list[str] = []  # of the family that was named last

    def family(self, name: str, kind: str, help_text: str) -> None:
        head = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        self._samples = self._families.setdefault(name, head)

    def sample(self, name: str, value: float, **labels: str) -> None:
        text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
        self._samples.append(f"{name}{{{text}}} {value!r}" if text else f"{name} {value!r}")

    def text(self) -> str:
        return "".join(f"{line}\n" for lines in self._families.values() for line in lines)


def render(tenants: Iterable[Figures]) -> str:
    """Render one page."""
    page = _Page()
    for each in tenants:
        _workers(page, each)
        _pools(page, each.tenant, each.pools)
        _boot(page, each.tenant, each.boot, each.refusals)
        _live(page, each.tenant, each.live)
        _seeding(page, each.tenant, each.seeded)
        _shadow(page, each.tenant, each.shadow, each.shadow_sent)
        _traffic(page, each.tenant, each.observed)
        _coverage(page, each.tenant, each.coverage)
    return page.text()


def _workers(page: _Page, figures: Figures) -> None:
    tenant = figures.tenant
    page.family("jumpstart_workers", "gauge", "Worker processes by state.")
    for state, count in figures.workers.items():
        page.sample("jumpstart_workers", count, tenant=tenant, state=state)
    page.family("jumpstart_worker_restarts_total", "counter", "Workers that were replaced after they died.")
    page.sample("jumpstart_worker_restarts_total", figures.restarts, tenant=tenant)
    page.family("jumpstart_generation", "gauge", "Number of the generation that serves.")
    page.sample("jumpstart_generation", figures.generation, tenant=tenant)
    page.family("jumpstart_given_up", "gauge", "1 where nothing of a tenant runs any more, since it cannot be served.")
    page.sample("jumpstart_given_up", int(figures.given_up), tenant=tenant)
    page.family("jumpstart_roll_failed", "gauge", "1 where the last roll has failed, and the old generation serves on.")
    page.sample("jumpstart_roll_failed", int(figures.roll_failed), tenant=tenant)
    if figures.ready_after_s is not None:
        page.family("jumpstart_ready_seconds", "gauge", "Time from start to the first ready worker.")
        page.sample("jumpstart_ready_seconds", figures.ready_after_s, tenant=tenant)


def _pools(page: _Page, tenant: str, pools: Sequence[PoolStats]) -> None:
    """Sums over the workers, but for the longest wait."""
    gauges = (
        ("jumpstart_pool_threads", "Threads for sync code.", [pool.threads for pool in pools]),
        ("jumpstart_pool_threads_busy", "Threads that run sync code.", [pool.busy for pool in pools]),
        ("jumpstart_pool_threads_limit", "Threads for sync code that there may be.", [pool.limit for pool in pools]),
        ("jumpstart_pool_threads_waiting", "Jobs that wait for a thread.", [pool.waiting for pool in pools]),
        ("jumpstart_pool_threads_peak", "Most threads that were busy at once.", [pool.peak for pool in pools]),
        ("jumpstart_pool_overruns", "Handlers that were stopped and run on.", [pool.overruns for pool in pools]),
    )
    for name, text, values in gauges:
        page.family(name, "gauge", text)
        page.sample(name, sum(values), tenant=tenant)
    name = "jumpstart_queue_oldest_wait_seconds"
    page.family(name, "gauge", "How long the job has waited that has waited longest for a thread.")
    page.sample(name, max((pool.oldest_wait_s for pool in pools), default=0.0), tenant=tenant)
    page.family("jumpstart_pool_overloaded", "gauge", "Workers that shed requests sooner, since too many wait.")
    page.sample("jumpstart_pool_overloaded", sum(pool.overloaded for pool in pools), tenant=tenant)
    name = "jumpstart_queue_wait_seconds"
    page.family(name, "histogram", "How long those requests waited for a thread that had to wait, and got one.")
    waits = [sum(counts) for counts in zip(*(pool.waits for pool in pools if pool.waits), strict=True)]
    _histogram(page, name, waits or [0] * (len(BUCKETS_S) + 1), sum(pool.waits_sum_s for pool in pools), tenant=tenant)
    page.family("jumpstart_requests_refused_total", "counter", "Requests that got no service, by reason.")
    refused: Counter[str] = Counter()
    for pool in pools:
        refused.update(pool.refused)
    for reason, count in sorted(refused.items()):
        page.sample("jumpstart_requests_refused_total", count, tenant=tenant, reason=reason)


def _live(page: _Page, tenant: str, live: Sequence[LiveInfo]) -> None:
    """Of each `Config` and `Service`, over the workers: the oldest, how many are stale, and sums."""
    names = sorted({(info.kind, info.name) for info in live})
    found = [(kind, name, [info for info in live if (info.kind, info.name) == (kind, name)]) for kind, name in names]
    page.family("jumpstart_live_age_seconds", "gauge", "Age of the oldest copy of real-time values in a worker.")
    for kind, name, infos in found:
        ages = [info.age_s for info in infos if info.age_s is not None]
        if ages:
            page.sample("jumpstart_live_age_seconds", max(ages), tenant=tenant, kind=kind, source=name)
    page.family("jumpstart_live_stale", "gauge", "Workers whose real-time values are older than their ttl, or missing.")
    for kind, name, infos in found:
        count = sum(info.is_stale for info in infos)
        page.sample("jumpstart_live_stale", count, tenant=tenant, kind=kind, source=name)
    page.family("jumpstart_live_fetches_total", "counter", "Fetches of real-time values, by outcome.")
    for kind, name, infos in found:
        for outcome, total in (("ok", sum(i.fetched for i in infos)), ("failed", sum(i.failed for i in infos))):
            page.sample("jumpstart_live_fetches_total", total, tenant=tenant, kind=kind, source=name, outcome=outcome)


def _histogram(page: _Page, name: str, buckets: Sequence[int], total_s: float, **labels: str) -> None:
    """By `BUCKETS_S`, and the rest."""
    bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
    for bound, count in zip(bounds, accumulate(buckets), strict=True):
        page.sample(f"{name}_bucket", count, **labels, le=bound)
    page.sample(f"{name}_sum", total_s, **labels)
    page.sample(f"{name}_count", sum(buckets), **labels)


def _boot(page: _Page, tenant: str, boot: BootReport | None, refusals: Iterable[str]) -> None:
    page.family("jumpstart_boot_refusals", "gauge", "Files and sections that this boot did not use, by reason.")
    counts: dict[str, int] = {}
    for reason in refusals:
        counts[reason] = counts.get(reason, 0) + 1
    for reason, count in sorted(counts.items()):
        page.sample("jumpstart_boot_refusals", count, tenant=tenant, reason=reason)
    if boot is None:
        return
    if boot.share is not None:
        page.family("jumpstart_boot_records_share", "gauge", "Of the records that the boot had a use for, those used.")
        page.sample("jumpstart_boot_records_share", boot.share, tenant=tenant)
    page.family("jumpstart_boot_records", "gauge", "Records of warm state by recorder and what became of them.")
    for section in boot.sections:
        page.sample("jumpstart_boot_records", section.used, tenant=tenant, recorder=section.recorder, outcome="used")
        for reason, count in sorted(section.reasons.items()):
            page.sample("jumpstart_boot_records", count, tenant=tenant, recorder=section.recorder, outcome=reason)


def _seeding(page: _Page, tenant: str, seeded: Mapping[tuple[str, str], int]) -> None:
    if not seeded:
        return
    page.family("jumpstart_profiles_seeded_total", "counter", "Profiles made here, by what became of them and why.")
    for (outcome, reason), count in sorted(seeded.items()):
        page.sample("jumpstart_profiles_seeded_total", count, tenant=tenant, outcome=outcome, reason=reason)


def _shadow(page: _Page, tenant: str, counts: ShadowCounts, sent: Mapping[str, int]) -> None:
    page.family("jumpstart_shadow_requests_sent_total", "counter", "Shadow requests sent to workers, by their reason.")
    for lane, count in sorted(sent.items()):
        page.sample("jumpstart_shadow_requests_sent_total", count, tenant=tenant, lane=lane)
    page.family("jumpstart_shadow_requests_total", "counter", "Shadow requests that workers have run, by outcome.")
    for outcome, count in (("ok", counts.done - counts.failed), ("failed", counts.failed)):
        page.sample("jumpstart_shadow_requests_total", count, tenant=tenant, outcome=outcome)
    page.family("jumpstart_shadow_requests_dropped_total", "counter", "Shadow requests that were not run, by reason.")
    for reason, count in sorted(counts.dropped.items()):
        page.sample("jumpstart_shadow_requests_dropped_total", count, tenant=tenant, reason=reason)
    page.family("jumpstart_shadow_cold_requests_total", "counter", "Shadow requests with at least one cold event.")
    page.sample("jumpstart_shadow_cold_requests_total", counts.cold_requests, tenant=tenant)
    page.family("jumpstart_shadow_cold_events_total", "counter", "Cold work that shadow requests have done, by kind.")
    for kind, count in sorted(counts.cold_events.items()):
        page.sample("jumpstart_shadow_cold_events_total", count, tenant=tenant, kind=kind)
    page.family("jumpstart_shadow_effects_refused_total", "counter", "What shadow requests were not let do, by kind.")
    refused: Counter[str] = Counter()
    for each in counts.effects:
        refused[each.effect] += each.count
    for effect, count in sorted(refused.items()):
        page.sample("jumpstart_shadow_effects_refused_total", count, tenant=tenant, effect=effect)
    page.family("jumpstart_shadow_cpu_seconds_total", "counter", "CPU time that shadow requests have taken.")
    page.sample("jumpstart_shadow_cpu_seconds_total", counts.cpu_s, tenant=tenant)


def _traffic(page: _Page, tenant: str, observed: ObserverSnapshot) -> None:
    coverage = warm_coverage(observed)
    if coverage is not None:
        page.family("jumpstart_warm_coverage_ratio", "gauge", "Share of requests that ran without a cold event.")
        page.sample("jumpstart_warm_coverage_ratio", coverage, tenant=tenant)
    routes = sorted(observed.routes.items())
    page.family("jumpstart_requests_total", "counter", "Requests by route.")
    for route, stats in routes:
        page.sample("jumpstart_requests_total", stats.requests, tenant=tenant, route=route)
    page.family("jumpstart_request_errors_total", "counter", "Requests answered with 5xx, by route.")
    for route, stats in routes:
        page.sample("jumpstart_request_errors_total", stats.errors, tenant=tenant, route=route)
    page.family("jumpstart_cold_requests_total", "counter", "Requests with at least one cold event, by route.")
    for route, stats in routes:
        page.sample("jumpstart_cold_requests_total", stats.cold_requests, tenant=tenant, route=route)
    page.family("jumpstart_cold_events_total", "counter", "Work in requests that a warm process would not have done.")
    for route, stats in routes:
        for kind, count in sorted(stats.cold_events.items()):
            page.sample("jumpstart_cold_events_total", count, tenant=tenant, route=route, kind=kind)
    page.family("jumpstart_first_calls_total", "counter", "Functions that first ran in a request, with --first-calls.")
    for route, stats in routes:
        if stats.first_calls:
            page.sample("jumpstart_first_calls_total", stats.first_calls, tenant=tenant, route=route)
    page.family(
        "jumpstart_request_duration_seconds", "histogram", "Time from the app's call to its last byte, by route."
    )
    for route, stats in routes:
        name = "jumpstart_request_duration_seconds"
        _histogram(page, name, stats.buckets, stats.latency_sum_s, tenant=tenant, route=route)


def _coverage(page: _Page, tenant: str, windows: Sequence[CoverageWindow]) -> None:
    """A window without requests has no sample, rather than one that says warm or cold."""
    name = "jumpstart_recent_warm_coverage_ratio"
    page.family(name, "gauge", "Share of the requests of the last so many seconds that ran without a cold event.")
    for window in windows:
        page.sample(name, window.share, tenant=tenant, seconds=str(window.seconds))
    name = "jumpstart_route_recent_warm_coverage_ratio"
    page.family(name, "gauge", "The same by route.")
    for window in windows:
        for route, each in sorted(window.routes.items()):
            page.sample(name, each.share, tenant=tenant, route=route, seconds=str(window.seconds))
    name = "jumpstart_route_cold_for_seconds"
    page.family(name, "gauge", "How long ago the latest series of cold requests of a route began, in the last hour.")
    for route, each in sorted(windows[-1].routes.items() if windows else ()):
        if each.cold_for_s is not None:
            page.sample(name, each.cold_for_s, tenant=tenant, route=route)
