"""``jumpstart advise``: does this traffic belong into this envelope?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from jumpstart.errors import ConfigError
from jumpstart_server.access_reader import compile_reader, lines_of, read_log
from jumpstart_server.advise import Advice, Envelope, Verdict, difference, judge, measure, seconds, tenants_for
from jumpstart_server.cli.client import AdminClient
from jumpstart_server.config import DEFAULT_FILES, environment, load_all, paths_of_host
from jumpstart_warmup.observe import RouteStats

ROUTES_SHOWN = 30


@click.command()
@click.option("--admin", metavar="ADDRESS", help="Admin address; by default the one server of this user.")
@click.option("--for", "period", type=click.FloatRange(min=1), metavar="SECONDS", help="Look for so long from now on.")
@click.option("--access-log", "logs", multiple=True, metavar="FILE", help="An access log instead; repeatable.")
@click.option("--access-logformat", "logformat", default="json", metavar="FORMAT", help="Of the log. [default: json]")
@click.option("-c", "--config", "config_file", metavar="FILE", help="Whose tenants an access log is held against.")
@click.option("--timeout", type=click.FloatRange(min=0), default=30.0, help="Of a tenant that no file names. [30 s]")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Of a tenant that no file names, in all.")
def advise(
    admin: str | None,
    period: float | None,
    logs: tuple[str, ...],
    logformat: str,
    config_file: str | None,
    timeout: float,
    threads: int,
) -> int:
    """Hold each route against its tenant's envelope: it belongs, or tune one value, or give it a tenant of its own."""
    if logs:
        stats = read_log(lines_of(logs), compile_reader(logformat))
        if not stats.lines:
            raise ConfigError(f"{', '.join(logs)}: no request in {stats.odd} lines; is --access-logformat right?")
        length = period or stats.period_s
        if length is None:
            raise ConfigError("the log does not tell how long it took; say it with --for SECONDS")
        if stats.odd:
            click.echo(f"{stats.odd} lines are of another form, or no requests: left out", err=True)
        known = _configured(config_file)
        envelopes = []
        for tenant in stats.routes:
            if tenant not in known:
                what = f"tenant {tenant}" if tenant else "the log's tenant"
                of_threads = f"{threads} threads" if threads else "threads unknown"
                click.echo(f"{what} is in no configuration file: --timeout {timeout:g} s, {of_threads}", err=True)
            envelopes.append(known.get(tenant) or Envelope(tenant, timeout_s=timeout, threads=threads))
        _tell(envelopes, stats.routes, length, {}, knows_cold=False)
        return 0
    client = AdminClient.find(admin, paths_of_host(environment()))
    document = client.get("/status")
    before: dict[str, dict[str, RouteStats]] = {}
    length = document["uptime_s"]
    if period is not None:
        before = _routes(document)
        click.echo(f"looking for {period:g} s …", err=True)
        began = time.monotonic()
        time.sleep(period)
        document = client.get("/status")
        length = time.monotonic() - began
    routes = {tenant: difference(now, before.get(tenant, {})) for tenant, now in _routes(document).items()}
    memory = {each["tenant"]: _memory_each(each) for each in _tenants(document)}
    _tell([_envelope(each) for each in _tenants(document)], routes, length, memory)
    return 0


def _configured(config_file: str | None) -> dict[str, Envelope]:
    """The tenants of ``-c``, or of the file that is here; none where there is no file."""
    if config_file is None and not any(Path(name).is_file() for name in DEFAULT_FILES):
        return {}
    envelopes = {}
    for settings in load_all({}, environment(), config_file=config_file):
        tenant = settings.tenant
        threads = tenant.threads * tenant.workers if isinstance(tenant.threads, int) else 0
        envelopes[settings.tenant_name] = Envelope(
            settings.tenant_name,
            timeout_s=tenant.timeout,
            threads=threads,
            workers=tenant.workers,
            memory_limit=tenant.memory_limit,
        )
    return envelopes


def _tenants(document: dict[str, Any]) -> Sequence[dict[str, Any]]:
    tenants: list[dict[str, Any]] = document["tenants"]
    return tenants


def _routes(document: dict[str, Any]) -> dict[str, dict[str, RouteStats]]:
    return {each["tenant"]: msgspec.convert(each["routes"], dict[str, RouteStats]) for each in _tenants(document)}


def _envelope(tenant: dict[str, Any]) -> Envelope:
    limits = tenant["envelope"]
    workers = tenant["workers"]
    return Envelope(
        tenant["tenant"],
        timeout_s=limits["timeout"],
        threads=sum(worker["limit"] for worker in workers),
        workers=max(len(workers), 1),
        memory_limit=limits["memory_limit"],
    )


def _memory_each(tenant: dict[str, Any]) -> float | None:
    """Bytes of a request in flight, in the worker where they are most."""
    known = [worker["request_bytes"] for worker in tenant["workers"] if worker["request_bytes"] is not None]
    return max(known, default=None)


def _tell(
    envelopes: Sequence[Envelope],
    routes: dict[str, dict[str, RouteStats]],
    length_s: float,
    memory: Mapping[str, float | None],
    *,
    knows_cold: bool = True,
) -> None:
    port = 8001
    for envelope in envelopes:
        uses = measure(routes.get(envelope.tenant, {}), length_s, knows_cold=knows_cold)
        advice = [judge(use, envelope, memory.get(envelope.tenant)) for use in uses]
        for line in describe(envelope, advice, length_s):
            click.echo(line)
        toml = tenants_for(advice, envelope, port=port)
        if toml:
            click.echo(f"\n{toml}")
            port += toml.count("[tenants.")


def describe(envelope: Envelope, advice: Sequence[Advice], length_s: float) -> Iterator[str]:
    """The findings as lines for a person."""
    requests = sum(each.use.requests for each in advice)
    busy = sum(each.use.busy for each in advice)
    of_threads = f" of {envelope.threads}" if envelope.threads else ""
    in_use = f"{busy:.1f}{of_threads} threads in use on average"
    yield f"{envelope.tenant or 'all'}: {requests} requests in {length_s:.0f} s, {in_use}"
    if not advice:
        return
    yield f"  {'in use':>8} {'req/s':>8} {'p50':>8} {'p99':>8} {'waits':>6} {'cold':>6}  route: verdict"
    for each in advice[:ROUTES_SHOWN]:
        use = each.use
        waits = "–" if use.wait_share is None else f"{use.wait_share:.0%}"
        cold = "–" if use.cold_share is None else f"{use.cold_share:.0%}"
        yield (
            f"  {use.busy:>8.2f} {use.rate:>8.2f} {seconds(use.p50_s):>8} {seconds(use.p99_s):>8} {waits:>6} {cold:>6}"
            f"  {use.route}: {each.verdict.value}"
        )
        for broken in each.broken:
            remedy = f"; {broken.remedy}" if each.verdict is Verdict.TUNE else ""
            yield f"{'':>10}{broken.invariant.value}: {broken.measured}{remedy}"
    if len(advice) > ROUTES_SHOWN:
        yield f"  … and {len(advice) - ROUTES_SHOWN} more routes"
