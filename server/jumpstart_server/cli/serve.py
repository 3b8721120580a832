"""``jumpstart serve``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import click

from jumpstart.errors import ConfigError
from jumpstart_server.access import AccessLog
from jumpstart_server.cli import (
    Launch,
    SettingsCommand,
    set_up_logging_of,
    settings_of_all,
    settings_options,
    warn_of_unknown,
)
from jumpstart_server.config import environment
from jumpstart_server.host import Host
from jumpstart_server.settings import Settings
from jumpstart_warmup.corpus import read_requests


@click.command(cls=SettingsCommand)
@click.argument("target", required=False)
@settings_options("app", "tenant", "profile", "server")
@click.pass_obj
def serve(launch: Launch, /, target: str | None, config_file: str | None, tenant: str | None, **given: Any) -> int:
    """
    Serve TARGET (module:app), warm from the last start on this host or from a profile.

    A module alone, such as shop.web or mysite.wsgi, means its attribute app, or else application.

    Without --tenant every tenant of the file is served.
    """

    def read() -> list[Settings]:
        """Complain before anything is started."""
        tenants = settings_of_all(target, config_file, tenant, given)
        for settings in tenants:
            if settings.tenant.warmup:
                read_requests(Path(settings.tenant.warmup))
        return tenants

    def reread() -> list[Settings]:
        try:
            return read()
        except click.ClickException as error:
            raise ConfigError(error.format_message()) from None

    environ = environment()
    warn_of_unknown(environ)
    tenants = read()
    set_up_logging_of(tenants[0])
    for settings in tenants:
        if settings.tenant.access_logfile:
            AccessLog(settings.tenant.access_logfile).close()  # complain before anything is started
    from jumpstart_server.supervisor import Supervisor

    async def serve_admin(supervisor: Supervisor) -> None:
        # Imported here, while the mold imports the app in another process.
        from jumpstart_server.admin import serve_admin

        await serve_admin(supervisor)

    supervisor = Supervisor(
        tenants,
        launch.started,
        launch.waiting,
        serve_beside=serve_admin,
        reread=reread,
        host=Host(tenants, environ, os.getpid()),
    )
    return int(asyncio.run(supervisor.run()))
