"""``jumpstart check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import addresses_of
from jumpstart_server.cli import SettingsCommand, command_line_of, say, settings_options
from jumpstart_server.config import (
    Sources,
    environment,
    load_all,
    load_settings,
    tenant_names,
    unknown_variables,
)
from jumpstart_server.envelope.explain import Finding, Tenant, explain, findings
from jumpstart_server.envelope.memory import read_machine
from jumpstart_server.exits import ExitCode
from jumpstart_server.export.model import tenants_of, with_all_routes
from jumpstart_server.logfile import STREAM
from jumpstart_server.problems import texts_of
from jumpstart_warmup.corpus import read_requests


@click.command(cls=SettingsCommand)
@click.argument("target", required=False)
@settings_options("app", "tenant", "profile", "server")
def check(target: str | None, config_file: str | None, tenant: str | None, **given: Any) -> int:
    """
    Explain what the configuration comes to: every limit with its source, and what the limits mean together.

    Takes what serve takes. Starts nothing, and does not import the app. What cannot work is an error, with file, key
    and remedy, and exit code 2; what can and is hardly meant is a warning.
    """
    command_line = command_line_of(target, given)
    environ = environment()
    for line in unknown_variables(environ):
        say.warning(line)
    tenants: list[Tenant] = []
    refused: list[str] = []
    for name in [tenant] if tenant is not None else tenant_names(config_file, Path.cwd()):
        try:
            tenants.append(_load(command_line, environ, config_file, name))
        except ConfigError as error:  # the others' may be wrong too, and all of it is told at once
            refused += texts_of(error)
    if not refused:
        try:
            load_all(command_line, environ, config_file=config_file, tenant=tenant)  # what they cannot have together
        except ConfigError as error:
            refused += texts_of(error)
    machine = read_machine()
    workers = sum(each.limits.workers for each in tenants)
    for each in tenants:
        click.echo("\n".join(explain(each, machine, workers)) + "\n")
    if len(tenants) > 1 and not any(each.limits.routes for each in tenants):
        click.echo("No tenant has routes, which jumpstart export needs for a proxy in front of them.\n")
    found = [*_without_app(tenants), *_files(tenants), *findings(tenants, machine), *_routes(tenants)]
    for text in dict.fromkeys(refused):
        say.error(text)
    for finding in found:
        click.echo(str(finding), err=True)
    if refused or any(finding.is_error for finding in found):
        return ExitCode.USAGE
    return ExitCode.CLEAN


def _load(
    command_line: Mapping[str, Any], environ: Mapping[str, str], config_file: str | None, name: str | None
) -> Tenant:
    sources: Sources = {}
    settings = load_settings(command_line, environ, config_file=config_file, tenant=name, sources=sources)
    return Tenant(settings, sources, tuple(str(address) for address in addresses_of(settings.tenant)))


def _without_app(tenants: list[Tenant]) -> list[Finding]:
    text = "no app is named; give TARGET as module:attribute, or [app] target in jumpstart.toml"
    return [Finding(True, f"[tenants.{each.name}] target", text) for each in tenants if not each.settings.target]


def _files(tenants: list[Tenant]) -> Iterator[Finding]:
    """Files and folders that serve would miss, beside those that a reading of the settings refuses."""
    for each in tenants:
        server = each.settings.server
        for place, file in (
            *((each.place("uds"), each.limits.uds), (each.place("access_logfile"), each.limits.access_logfile)),
            *((each.sources.get(f"server.{key}", key), getattr(server, key)) for key in ("error_logfile", "pid")),
        ):
            if file and file != STREAM and not Path(file).parent.is_dir():
                yield Finding(True, f"{place} {file}", f"there is no folder {Path(file).parent}; make it")
        for folder in server.reload_dir:
            if not Path(folder).is_dir():
                yield Finding(False, f"{each.sources.get('server.reload_dir', '')} {folder}", "no such folder")
        if each.limits.warmup:
            try:
                read_requests(Path(each.limits.warmup))
            except ConfigError as error:
                yield Finding(True, each.place("warmup"), str(error))
        path = each.limits.profile
        if path and "://" not in path and not Path(path).exists():
            must = each.settings.profile.require_warm
            means = "it does not start without one (require_warm)" if must else "it boots without one"
            yield Finding(must, f"{each.place('profile')} {path}", f"no such file or folder; {means}")


def _routes(tenants: list[Tenant]) -> Iterator[Finding]:
    """What `jumpstart export` would refuse, where the file has routes at all."""
    if not any(each.limits.routes for each in tenants):
        return
    try:
        with_all_routes(tenants_of([each.settings for each in tenants]))
    except ConfigError as error:
        yield Finding(False, "jumpstart export", str(error))
