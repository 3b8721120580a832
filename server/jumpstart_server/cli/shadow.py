"""``jumpstart shadow``: a sample of real traffic, to a file, from a file to a host, or on to a host as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from jumpstart.errors import ConfigError, JumpstartError
from jumpstart_server.cli import Group
from jumpstart_server.cli.client import AdminClient
from jumpstart_server.config import environment, paths_of_host
from jumpstart_warmup.traffic import VERSION, Header, InOrder, Outcome, Recorded, Replay, Writer, mirror

TELL_EVERY_S = 5.0  # seconds between two lines about how far it is

admin_option = click.option("--admin", metavar="ADDRESS", help="Admin address; by default the one server of this user.")
tenant_option = click.option("--tenant", metavar="NAME", help="Whose traffic, where the server has several tenants.")
fraction_option = click.option(
    "--fraction", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Of the requests."
)
period_option = click.option("--for", "period", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS")
concurrency_option = click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=8, show_default=True, help="Requests at once."
)
timeout_option = click.option("--timeout", default=30.0, show_default=True, help="Seconds for one request.")
ca_option = click.option("--ca-file", metavar="FILE", help="Certificates to trust.")
insecure_option = click.option("--insecure", is_flag=True, help="Do not check the certificate.")


@click.group(cls=Group)
def shadow() -> None:
    """Record a sample of real traffic, replay it to a host, or mirror it as it comes."""


def _verify(ca_file: str | None, insecure: bool) -> bool | Path:
    return False if insecure else (Path(ca_file) if ca_file else True)


@shadow.command()
@click.argument("fraction", type=click.FloatRange(0, 1))
@admin_option
@tenant_option
def fraction(fraction: float, admin: str | None, tenant: str | None) -> int:
    """Shadow FRACTION of a running server's requests from now on, in place of --shadow; 0 is none."""
    done = AdminClient.find(admin, paths_of_host(environment())).shadow(fraction, tenant)
    if done != fraction:
        raise JumpstartError("this tenant has --no-replay: nothing of its traffic is sent again")
    click.echo(f"{done:g} of the requests, until the server ends")
    return 0


@shadow.command()
@click.option("-o", "--output", required=True, metavar="FILE", help="A new file.")
@period_option
@fraction_option
@click.option("--limit", type=click.IntRange(min=1), metavar="NUMBER", help="Stop after so many requests.")
@admin_option
@tenant_option
def record(
    output: str, period: float | None, fraction: float, limit: int | None, admin: str | None, tenant: str | None
) -> int:
    """Write a scrubbed sample of a running server's requests to a file, until Ctrl-C, --for or --limit."""
    client = AdminClient.find(admin, paths_of_host(environment()))
    header = Header(VERSION, tenant or "", fraction, datetime.now(UTC).isoformat(timespec="seconds"))
    with Writer(Path(output), header) as writer:
        order = InOrder()

        async def write() -> None:
            taken = 0
            async with asyncio.timeout(period):
                async for each in sampled(client, tenant, fraction):
                    for one in order.take(each):
                        writer.write(one)
                    taken += 1
                    if limit is not None and taken >= limit:
                        return

        try:
            with contextlib.suppress(TimeoutError, KeyboardInterrupt):
                asyncio.run(write())
        finally:
            for one in order.rest():
                writer.write(one)
    click.echo(f"{output}: {writer.count} requests")
    return 0


async def sampled(client: AdminClient, tenant: str | None, fraction: float) -> AsyncIterator[Recorded]:
    """
    What a running server samples, as it comes, until the server stops.

    Raises:
        ConfigError: it has no such tenant, or several.
        JumpstartError: it does not answer.
    """
    import httpx

    address = client.address
    transport = httpx.AsyncHTTPTransport(uds=address.path or None)
    base = "http://admin" if address.path else f"http://{address}"
    path = f"/shadow/sample/{quote(tenant, safe='')}" if tenant else "/shadow/sample"
    limits = httpx.Timeout(10.0, read=None)  # there may be no traffic for hours
    decoder = msgspec.json.Decoder(Recorded)
    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url=base, timeout=limits) as http,
            http.stream("GET", path, params={"fraction": fraction}) as response,
        ):
            if response.status_code == 404:
                text = (await response.aread()).decode("utf-8", "replace")
                raise ConfigError(f"--tenant: {text.strip()}")
            if response.status_code != 200:
                raise JumpstartError(f"{address}{path}: {response.status_code}")
            lines = response.aiter_lines()
            await anext(lines)
            async for line in lines:
                yield decoder.decode(line)
    except httpx.RemoteProtocolError:
        return  # the server has ended
    except httpx.HTTPError as error:
        raise JumpstartError(f"the admin address {address} does not answer: {error}") from None


@shadow.command()
@click.argument("file")
@click.argument("url")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Requests a second.")
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), metavar="X", help="1 is as it was recorded.")
@concurrency_option
@click.option("--resume", is_flag=True, help="Go on where a replay of this file to this URL was ended.")
@timeout_option
@ca_option
@insecure_option
def replay(
    file: str,
    url: str,
    rate: float | None,
    speed: float | None,
    concurrency: int,
    resume: bool,
    timeout: float,
    ca_file: str | None,
    insecure: bool,
) -> int:
    """Send the requests of FILE to URL, in their order; exit 0 only when all were answered, and none with a 5xx."""
    if rate is not None and speed is not None:
        raise ConfigError("--rate and --speed both say when a request is sent; give one, not both")
    work = Replay(
        Path(file),
        url,
        state=Path(f"{file}.state"),
        resume=resume,
        rate=rate,
        speed=speed,
        concurrency=concurrency,
        timeout_s=timeout,
        verify=_verify(ca_file, insecure),
    )
    try:
        asyncio.run(_told(work.run(), work.outcome))
    except KeyboardInterrupt:
        _sum_up(work.outcome)
        click.echo(f"stopped; go on with: jumpstart shadow replay {file} {url} --resume", err=True)
        raise
    _sum_up(work.outcome)
    if work.stopped is not None:
        click.echo(f"{work.stopped}; go on with --resume", err=True)
    return 0 if work.outcome.is_clean and work.stopped is None else 1


@shadow.command("mirror")
@click.argument("url")
@fraction_option
@period_option
@concurrency_option
@admin_option
@tenant_option
@timeout_option
@ca_option
@insecure_option
def mirror_command(
    url: str,
    fraction: float,
    period: float | None,
    concurrency: int,
    admin: str | None,
    tenant: str | None,
    timeout: float,
    ca_file: str | None,
    insecure: bool,
) -> int:
    """Send a sample of a running server's requests on to URL as they come, until Ctrl-C or --for."""
    client = AdminClient.find(admin, paths_of_host(environment()))
    outcome = Outcome()

    async def work() -> None:
        async with asyncio.timeout(period):
            await mirror(
                sampled(client, tenant, fraction),
                url,
                outcome,
                concurrency=concurrency,
                timeout_s=timeout,
                verify=_verify(ca_file, insecure),
            )

    with contextlib.suppress(TimeoutError, KeyboardInterrupt):
        asyncio.run(_told(work(), outcome))
    _sum_up(outcome)
    return 0 if not outcome.sent or outcome.is_clean else 1


async def _told(work: object, outcome: Outcome) -> None:
    """Await *work*, and say now and then how far it is."""

    async def tell() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            errors = sum(outcome.errors.values())
            click.echo(f"{time.monotonic() - began:.0f} s: {outcome.sent} sent, {errors} not answered", err=True)

    telling = asyncio.create_task(tell())
    try:
        await work  # type: ignore[misc]  # a coroutine of any result
    finally:
        telling.cancel()


def _sum_up(outcome: Outcome) -> None:
    statuses = ", ".join(f"{count} × {status}" for status, count in sorted(outcome.statuses.items())) or "none"
    click.echo(f"{outcome.sent} requests; answers: {statuses}")
    for text, count in sorted(outcome.errors.items(), key=lambda each: -each[1]):
        click.echo(f"  {count} × {text}")
    if outcome.differing:
        click.echo(f"  {outcome.differing} with another status than was recorded")
    if outcome.dropped:
        click.echo(f"  {outcome.dropped} dropped: the target is too slow for them")
    if outcome.behind_s >= 1:
        click.echo(f"  up to {outcome.behind_s:.1f} s behind: --concurrency is too low, or the target too slow")
    marks = [(name, outcome.percentile_ms(share)) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))]
    if outcome.latencies:
        click.echo("  " + ", ".join(f"{name} {value:.1f} ms" for name, value in marks if value is not None))
    sys.stdout.flush()
