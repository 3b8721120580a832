"""``jumpstart serve``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from jumpstart_server.access import AccessLog
from jumpstart_server.cli import Launch, set_up_logging_of, settings_of, settings_options
from jumpstart_warmup.corpus import read_requests


@click.command()
@click.argument("target", required=False)
@settings_options("app", "tenant", "profile", "server")
@click.pass_obj
def serve(launch: Launch, /, target: str | None, config_file: str | None, tenant: str | None, **given: Any) -> int:
    """Serve TARGET (module:app), warm from the last start on this host or from a profile."""
    settings = settings_of(target, config_file, tenant, given)
    set_up_logging_of(settings)
    if settings.tenant.access_logfile:
        AccessLog(settings.tenant.access_logfile).close()  # complain before anything is started
    from jumpstart_server.supervisor import Supervisor

    async def serve_admin(supervisor: Supervisor) -> None:
        # Imported here, while the mold imports the app in another process.
        from jumpstart_server.admin import serve_admin

        await serve_admin(supervisor)

    if settings.tenant.warmup:
        read_requests(Path(settings.tenant.warmup))  # complain before anything is started
    return int(asyncio.run(Supervisor(settings, launch.started, launch.waiting, serve_admin).run()))
