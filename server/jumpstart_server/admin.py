"""
The admin address: what runs, how warm, why not; and the capture of profiles.

A Starlette app on uvicorn, in the supervisor's own event loop. By default it listens on a Unix socket in the host's
state folder, which only this user may enter; whoever may connect may also capture a profile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jumpstart.errors import JumpstartError
from jumpstart.paths import HostPaths, private_folder
from jumpstart_server import metrics
from jumpstart_server.addresses import SUN_PATH_LIMIT, Address, bind, describe, parse_address
from jumpstart_server.admin_connections import AdminConnection
from jumpstart_server.engine import PoolStats
from jumpstart_server.processes import Member
from jumpstart_server.seeding import pack_capture
from jumpstart_server.settings import Settings
from jumpstart_server.supervisor import Supervisor
from jumpstart_server.tier import Tier, count
from jumpstart_warmup.observe import ObserverSnapshot, warm_coverage
from jumpstart_warmup.traffic import VERSION, Header, recorded

logger = logging.getLogger(__name__)

LONGEST_WAIT = 5.0  # seconds that sync code may wait for a thread before a worker counts as saturated
TEMPORARY = Path("/tmp")  # and not TMPDIR, which need not be the same for a server and for who looks for it
PROFILE_TYPE = "application/vnd.jumpstart-profile+zip"


def admin_address(settings: Settings) -> Address | None:
    """
    Where the admin pages are, or None when they are off.

    Raises:
        ConfigError: ``--admin`` is not an address.
    """
    text = settings.server.admin
    if text == "off":
        return None
    if text != "auto":
        return parse_address(text, option="--admin")
    paths = HostPaths(Path(settings.home_cache), Path(settings.home_state), Path(settings.home_config))
    return Address(path=str(run_folder(paths) / f"{os.getpid()}.sock"))


def run_folder(paths: HostPaths) -> Path:
    """
    The folder of admin sockets, made if need be.

    Under the state folder where socket paths may be that long, else in `TEMPORARY`.

    Raises:
        ProfileRefusedError: it belongs to somebody else.
    """
    folder = paths.run
    if len(os.fsencode(folder)) > SUN_PATH_LIMIT - len("/1234567890.sock"):
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        folder = TEMPORARY / _temporary_name() / digest
        private_folder(folder.parent)
    return private_folder(folder)


def _temporary_name() -> str:
    return f"jumpstart-{os.geteuid()}"


async def serve_admin(supervisor: Supervisor) -> None:
    """
    Serve the pages until cancelled, where the settings say; return at once when they are off.

    Raises:
        AddressInUseError, ConfigError, ProfileRefusedError: there is no such place to serve on.
    """
    address = admin_address(supervisor.settings)
    if address is None:
        return
    if supervisor.settings.server.admin == "auto":
        await asyncio.to_thread(clean_stale, Path(address.path).parent)
    bound = bind(address)
    if address.path:
        bound.listen()  # at once: to others that look, a socket where nobody listens is one of a dead server
    if address.host:
        logger.info("Admin pages at: %s", describe(bound))  # with the real port, where 0 was asked for
    config = uvicorn.Config(
        admin_app(supervisor),
        loop="none",
        http=AdminConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    try:
        await _QuietServer(config).serve([bound])
    finally:
        bound.close()
        if address.path:
            _remove_socket(Path(address.path), supervisor.settings)


def _remove_socket(socket_file: Path, settings: Settings) -> None:
    socket_file.unlink(missing_ok=True)
    if settings.server.admin == "auto" and socket_file.parent.parent.name == _temporary_name():
        try:
            socket_file.parent.rmdir()  # the folder of this state folder, in the system's temporary one
        except OSError:
            pass  # another server of the same state folder is in it


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the supervisor's


def admin_app(supervisor: Supervisor) -> Starlette:
    """
    The pages as an ASGI app.

    ``/readyz`` speaks for the server: it is ready when every tenant has come up, but for those that were given up, and
    as long as one of them can take requests. ``/readyz/NAME`` speaks for one tenant.
    """

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        if supervisor.stopping:
            return PlainTextResponse("stopping\n", 503)
        found = [(tier, *await readiness(tier)) for tier in supervisor.tiers.values()]
        if len(found) == 1:
            _, is_ready, text = found[0]
            return PlainTextResponse(text, 200 if is_ready else 503)
        text = "".join(f"{tier.settings.tenant_name}: {text}" for tier, _, text in found)
        may_go = all(tier.is_up or tier.given_up for tier, _, _ in found) and any(is_ready for _, is_ready, _ in found)
        return PlainTextResponse(text, 200 if may_go else 503)

    async def readyz_of_one(request: Request) -> Response:
        tier = supervisor.tiers.get(request.path_params["tenant"])
        if tier is None:
            return _no_such_tenant(supervisor)
        if supervisor.stopping:
            return PlainTextResponse("stopping\n", 503)
        is_ready, text = await readiness(tier)
        return PlainTextResponse(text, 200 if is_ready else 503)

    async def boot(request: Request) -> Response:
        return _json({"tenants": [boot_document(tier) for tier in supervisor.tiers.values()]})

    async def status(request: Request) -> Response:
        return _json(await status_document(supervisor))

    async def metrics_page(request: Request) -> Response:
        observed = await asyncio.gather(*(tier.observed() for tier in supervisor.tiers.values()))
        figures = [figures_of(tier, each) for tier, each in zip(supervisor.tiers.values(), observed, strict=True)]
        return Response(metrics.render(figures), media_type=metrics.CONTENT_TYPE)

    async def capture(request: Request) -> Response:
        if (name := foreign(request)) is not None:
            return _foreign_page(name)
        tier = tier_of(request)
        if tier is None:
            return _no_such_tenant(supervisor)
        if not tier.accepting:
            return PlainTextResponse(f"no worker is ready: {tier.waiting_for()}\n", 503)
        try:
            captured = await tier.capture()
            data = await asyncio.to_thread(pack_capture, tier.settings, captured, supervisor.uptime_s())
        except JumpstartError as error:
            return PlainTextResponse(f"{error}\n", 500)
        return Response(data, media_type=PROFILE_TYPE)

    async def sample(request: Request) -> Response:
        if (name := foreign(request)) is not None:
            return _foreign_page(name)
        tier = tier_of(request)
        if tier is None:
            return _no_such_tenant(supervisor)
        fraction = _fraction_of(request, "1")
        if fraction is None or not fraction:
            return PlainTextResponse("fraction must be over 0 and at most 1\n", 400)
        return StreamingResponse(_sampled(tier, fraction), media_type="application/jsonl")

    async def shadow(request: Request) -> Response:
        if (name := foreign(request)) is not None:
            return _foreign_page(name)
        tier = tier_of(request)
        if tier is None:
            return _no_such_tenant(supervisor)
        fraction = _fraction_of(request, "")
        if fraction is None:
            return PlainTextResponse("fraction must be from 0 to 1\n", 400)
        return _json({"fraction": tier.shadowing.shadow(fraction, tier.settings.tenant)})

    own = {"localhost", socket.gethostname().lower(), urlsplit(f"//{supervisor.settings.server.admin}").hostname or ""}

    def foreign(request: Request) -> str | None:
        if request.client is None:  # a Unix socket, where no browser comes
            return None
        return foreign_name(request.headers.get("host", ""), request.headers.get("origin", ""), own)

    def tier_of(request: Request) -> Tier | None:
        name = request.path_params.get("tenant")
        if name is None and len(supervisor.tiers) == 1:
            name = next(iter(supervisor.tiers))
        return supervisor.tiers.get(name or "")

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/readyz/{tenant}", readyz_of_one),
            Route("/boot", boot),
            Route("/status", status),
            Route("/metrics", metrics_page),
            Route("/shadow/sample", sample),
            Route("/shadow/sample/{tenant}", sample),
            Route("/shadow/fraction", shadow, methods=["POST"]),
            Route("/shadow/fraction/{tenant}", shadow, methods=["POST"]),
            Route("/capture", capture, methods=["POST"]),
            Route("/capture/{tenant}", capture, methods=["POST"]),
        ]
    )


def foreign_name(host: str, origin: str, own: Collection[str]) -> str | None:
    """
    The name by which a page in somebody's browser may have come here, or None when none did.

    Such a page can have any name of its own lead to this address (DNS rebinding), but not a number, and not one of the
    names in *own*. Only what changes something or hands out requests is kept from it.

    Args:
        host: the Host header.
        origin: the Origin header, which no command line sends.
    """
    if origin:
        return origin
    name = urlsplit(f"//{host}").hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name if name.lower() not in own else None
    return None


def _foreign_page(name: str) -> Response:
    text = f"this page is not for browsers, nor for any name that leads here; {name!r} is no name of this server.\n"
    return PlainTextResponse(f"{text}Ask by number, as in http://127.0.0.1:PORT, or by the name in --admin.\n", 403)


def _fraction_of(request: Request, default: str) -> float | None:
    """The parameter of that name; None when it is no number from 0 to 1."""
    try:
        fraction = float(request.query_params.get("fraction", default))
    except ValueError:
        return None
    return fraction if 0 <= fraction <= 1 else None


async def _sampled(tier: Tier, fraction: float) -> AsyncIterator[bytes]:
    """A file of recorded traffic that grows as long as its reader stays."""
    with tier.shadowing.subscribe(fraction) as samples:
        began = time.monotonic()
        yield msgspec.json.encode(Header(VERSION, tier.settings.tenant_name, fraction)) + b"\n"
        async for batch in samples:
            lines = [recorded(each.request, max(each.at - began, 0.0), each.status) for each in batch]
            yield b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _no_such_tenant(supervisor: Supervisor) -> Response:
    return PlainTextResponse(f"name a tenant at the end of the path: {', '.join(supervisor.tiers)}\n", 404)


async def readiness(tier: Tier) -> tuple[bool, str]:
    """Whether a tenant can take requests, and why not."""
    if not tier.accepting:
        return False, f"no worker is ready: {tier.waiting_for()}\n"
    await tier.observed()  # what workers report by themselves may be seconds old
    accepting = tier.accepting
    saturated = [member for member in accepting if is_saturated(member)]
    lines = [describe_pool(member) for member in saturated]
    if saturated and len(saturated) == len(accepting):
        return False, "\n".join(["no thread is free", *lines, ""])
    return True, "\n".join([f"{count(len(accepting), 'worker')} ready", *lines, ""])


def figures_of(tier: Tier, observed: ObserverSnapshot) -> metrics.Figures:
    """What the metrics say of a tenant."""
    return metrics.Figures(
        tenant=tier.settings.tenant_name,
        observed=observed,
        coverage=tier.coverage.windows(time.monotonic()),
        boot=tier.boot,
        workers=Counter(str(member.worker.state) for member in tier.members),
        ready_after_s=tier.ready_after_s,
        restarts=tier.restarts,
        generation=tier.generation,
        given_up=bool(tier.given_up),
        roll_failed=tier.last_roll is not None and tier.last_roll.outcome == "failed",
        pools=[member.stats.pool for member in tier.members if member.stats is not None],
        live=[info for member in tier.members if member.stats is not None for info in member.stats.live],
        refusals=[str(refusal.reason) for refusal in tier.refusals()],
        seeded=tier.seeding.counts(),
        shadow=tier.shadowing.counts(),
        shadow_sent=tier.shadowing.sent(),
    )


def pool_of(member: Member) -> PoolStats:
    """A worker's threads as it has last told."""
    return member.stats.pool if member.stats is not None else PoolStats()


def is_saturated(member: Member) -> bool:
    """Whether sync code has waited for a thread of this worker for so long that clients should go elsewhere."""
    pool = pool_of(member)
    return pool.overloaded or pool.oldest_wait_s > LONGEST_WAIT


def describe_pool(member: Member) -> str:
    """One line with the numbers."""
    pool = pool_of(member)
    return (
        f"worker {member.worker.slot}: {pool.busy} of {pool.limit} threads busy, {pool.waiting} waiting, "
        f"the longest for {pool.oldest_wait_s:.1f} s"
    )


def _json(document: dict[str, Any]) -> Response:
    return Response(msgspec.json.format(msgspec.json.encode(document), indent=2), media_type="application/json")


def boot_document(tier: Tier) -> dict[str, Any]:
    """The boot report with every span, as JSON types."""
    report = tier.boot or tier.mold_report
    document: dict[str, Any] = msgspec.to_builtins(report) if report is not None else {}
    document.update(
        {
            "tenant": tier.settings.tenant_name,
            "target": tier.settings.target,
            "records_share": report.share if report is not None else None,
            "ready_after_s": tier.ready_after_s,
            "start_method": tier.start_method,
            "start_reasons": tier.mold_report.start_reasons if tier.mold_report is not None else [],
            "refusals": msgspec.to_builtins(tier.refusals()),
            "spans": msgspec.to_builtins(tier.spans()),
        }
    )
    return document


async def status_document(supervisor: Supervisor) -> dict[str, Any]:
    """What runs, how warm, why not; as JSON types."""
    tenants = await asyncio.gather(*(tenant_document(tier) for tier in supervisor.tiers.values()))
    return {
        "pid": os.getpid(),
        "uptime_s": supervisor.uptime_s(),
        "stopping": supervisor.stopping,
        "tenants": tenants,
    }


async def tenant_document(tier: Tier) -> dict[str, Any]:
    """Of one tenant. A worker that did not answer in time is *stale*: its numbers are."""
    before = {id(member): member.stats for member in tier.accepting}
    observed = await tier.observed()
    boot = tier.boot
    return {
        "tenant": tier.settings.tenant_name,
        "target": tier.settings.target,
        "addresses": tier.urls(),
        "ready": bool(tier.accepting) and not tier.stopping,
        "ready_after_s": tier.ready_after_s,
        "waiting_for": "" if tier.accepting else tier.waiting_for(),
        "generation": tier.generation,
        "start_method": tier.start_method,
        "start_reasons": tier.mold_report.start_reasons if tier.mold_report is not None else [],
        "mold_pid": tier.mold.pid if tier.mold is not None else None,
        "restarts": tier.restarts,
        "last_roll": msgspec.to_builtins(tier.last_roll),
        "given_up": tier.given_up,
        "envelope": {
            name: getattr(tier.settings.tenant, name) for name in ("timeout", "memory_limit", "queue", "queue_timeout")
        },
        "workers": [
            {
                "slot": member.worker.slot,
                "pid": member.worker.pid,
                "generation": member.worker.generation,
                "state": str(member.worker.state),
                "request_bytes": member.memory.bytes_each,
                **msgspec.structs.asdict(pool_of(member)),
                "live": msgspec.to_builtins(member.stats.live) if member.stats is not None else [],
                "stale": id(member) in before and member.stats is before[id(member)],
            }
            for member in sorted(tier.members, key=lambda member: member.worker.slot)
        ],
        "boot": boot.summary() if boot is not None else "",
        "sources": boot.sources if boot is not None else [],
        "refusals": msgspec.to_builtins(tier.refusals()),
        "boot_ledger": tier.profiles.describe(),
        "seeding": tier.seeding.describe(),
        "shadow": tier.shadowing.describe(),
        "records_used": boot.used if boot is not None else 0,
        "records_share": boot.share if boot is not None else None,
        "records_dropped": boot.dropped_reasons if boot is not None else {},
        "warm_coverage": warm_coverage(observed),
        "coverage": [window.document() for window in tier.coverage.windows(time.monotonic())],
        "cold_events": sum(sum(stats.cold_events.values()) for stats in observed.routes.values()),
        "requests": sum(stats.requests for stats in observed.routes.values()),
        "errors": sum(stats.errors for stats in observed.routes.values()),
        "routes": msgspec.to_builtins(observed.routes),
        "warmup_routes": msgspec.to_builtins(observed.warmup),
    }


def clean_stale(folder: Path) -> list[Path]:
    """Return the admin sockets that somebody serves, and remove those that nobody does."""
    living = []
    for path in sorted(folder.glob("*.sock")):
        if not path.is_socket():
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                continue
            except OSError:
                pass
        living.append(path)
    return living
