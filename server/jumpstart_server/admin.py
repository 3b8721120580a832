"""
The admin address: what runs, how warm, why not; and the capture of profiles.

A Starlette app on uvicorn, in the supervisor's own event loop. By default it listens on a Unix socket in the host's
state folder, which only this user may enter; whoever may connect may also capture a profile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jumpstart.errors import JumpstartError
from jumpstart.paths import HostPaths, private_folder
from jumpstart_server import metrics
from jumpstart_server.addresses import SUN_PATH_LIMIT, Address, bind, describe, parse_address
from jumpstart_server.engine import PoolStats
from jumpstart_server.processes import Member
from jumpstart_server.profiles import pack
from jumpstart_server.settings import Settings
from jumpstart_server.supervisor import Supervisor
from jumpstart_warmup.observe import warm_coverage

logger = logging.getLogger(__name__)

LONGEST_WAIT = 5.0  # seconds that sync code may wait for a thread before a worker counts as saturated
TEMPORARY = Path("/tmp")  # and not TMPDIR, which need not be the same for a server and for who looks for it
CONNECTIONS = 50  # at once; it shares an event loop with what keeps the workers alive
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
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=CONNECTIONS,
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
    """The pages as an ASGI app."""

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        if supervisor.stopping:
            return PlainTextResponse("stopping\n", 503)
        if not supervisor.accepting:
            return PlainTextResponse(f"no worker is ready: {supervisor.waiting_for()}\n", 503)
        await supervisor.observed()  # what workers report by themselves may be seconds old
        saturated = [member for member in supervisor.accepting if is_saturated(member)]
        lines = [describe_pool(member) for member in saturated]
        if saturated and len(saturated) == len(supervisor.accepting):
            return PlainTextResponse("\n".join(["no thread is free", *lines, ""]), 503)
        return PlainTextResponse("\n".join([f"{len(supervisor.accepting)} workers ready", *lines, ""]))

    async def boot(request: Request) -> Response:
        return _json(boot_document(supervisor))

    async def status(request: Request) -> Response:
        return _json(await status_document(supervisor))

    async def metrics_page(request: Request) -> Response:
        observed = await supervisor.observed()
        stats = [member.stats for member in supervisor.members.values() if member.stats is not None]
        text = metrics.render(
            tenant=supervisor.settings.tenant_name,
            observed=observed,
            boot=supervisor.boot,
            workers=Counter(str(member.worker.state) for member in supervisor.members.values()),
            ready_after_s=supervisor.ready_after_s,
            restarts=supervisor.restarts,
            pools=[each.pool for each in stats],
            refusals=[str(refusal.reason) for refusal in supervisor.refusals()],
        )
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def capture(request: Request) -> Response:
        if not supervisor.accepting:
            return PlainTextResponse(f"no worker is ready: {supervisor.waiting_for()}\n", 503)
        try:
            sections = await supervisor.capture()
            observed = await supervisor.observed()
            seconds = supervisor.uptime_s()
            data = await asyncio.to_thread(pack, supervisor.settings, sections, observed, seconds, datetime.now(UTC))
        except JumpstartError as error:
            return PlainTextResponse(f"{error}\n", 500)
        return Response(data, media_type=PROFILE_TYPE)

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/boot", boot),
            Route("/status", status),
            Route("/metrics", metrics_page),
            Route("/capture", capture, methods=["POST"]),
        ]
    )


def pool_of(member: Member) -> PoolStats:
    """A worker's threads as it has last told."""
    return member.stats.pool if member.stats is not None else PoolStats()


def is_saturated(member: Member) -> bool:
    """Whether sync code has waited for a thread of this worker for so long that clients should go elsewhere."""
    return pool_of(member).oldest_wait_s > LONGEST_WAIT


def describe_pool(member: Member) -> str:
    """One line with the numbers."""
    pool = pool_of(member)
    return (
        f"worker {member.worker.slot}: {pool.busy} of {pool.limit} threads busy, {pool.waiting} waiting, "
        f"the longest for {pool.oldest_wait_s:.1f} s"
    )


def _json(document: dict[str, Any]) -> Response:
    return Response(msgspec.json.format(msgspec.json.encode(document), indent=2), media_type="application/json")


def boot_document(supervisor: Supervisor) -> dict[str, Any]:
    """The boot report with every span, as JSON types."""
    report = supervisor.boot or supervisor.mold_report
    document: dict[str, Any] = msgspec.to_builtins(report) if report is not None else {}
    document.update(
        {
            "target": supervisor.settings.target,
            "ready_after_s": supervisor.ready_after_s,
            "start_method": supervisor.start_method,
            "start_reasons": supervisor.mold_report.start_reasons if supervisor.mold_report is not None else [],
            "refusals": msgspec.to_builtins(supervisor.refusals()),
            "spans": msgspec.to_builtins(supervisor.spans()),
        }
    )
    return document


async def status_document(supervisor: Supervisor) -> dict[str, Any]:
    """What runs, how warm, why not; as JSON types. A worker that did not answer in time is *stale*: its numbers are."""
    before = {id(member): member.stats for member in supervisor.accepting}
    observed = await supervisor.observed()
    boot = supervisor.boot
    return {
        "tenant": supervisor.settings.tenant_name,
        "target": supervisor.settings.target,
        "pid": os.getpid(),
        "addresses": supervisor.urls(),
        "ready": bool(supervisor.accepting) and not supervisor.stopping,
        "ready_after_s": supervisor.ready_after_s,
        "waiting_for": "" if supervisor.accepting else supervisor.waiting_for(),
        "uptime_s": supervisor.uptime_s(),
        "generation": supervisor.generation,
        "start_method": supervisor.start_method,
        "start_reasons": supervisor.mold_report.start_reasons if supervisor.mold_report is not None else [],
        "mold_pid": supervisor.mold.pid if supervisor.mold is not None else None,
        "restarts": supervisor.restarts,
        "workers": [
            {
                "slot": member.worker.slot,
                "pid": member.worker.pid,
                "generation": member.worker.generation,
                "state": str(member.worker.state),
                **msgspec.structs.asdict(pool_of(member)),
                "stale": id(member) in before and member.stats is before[id(member)],
            }
            for member in sorted(supervisor.members.values(), key=lambda member: member.worker.slot)
        ],
        "boot": boot.summary() if boot is not None else "",
        "sources": boot.sources if boot is not None else [],
        "refusals": msgspec.to_builtins(supervisor.refusals()),
        "records_used": boot.used if boot is not None else 0,
        "records_dropped": boot.dropped_reasons if boot is not None else {},
        "warm_coverage": warm_coverage(observed),
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
