"""``jumpstart build``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from jumpstart.errors import ConfigError
from jumpstart_server.cli import SettingsCommand, set_up_logging_of, settings_of, settings_options
from jumpstart_server.cli.proof import PROVE, reject, show_proof
from jumpstart_server.exits import ExitCode


@click.command(cls=SettingsCommand)
@click.argument("target", required=False)
@click.option("--requests", metavar="FILE", help="TOML file of requests to learn from; run once.")
@click.option("-o", "--output", default="", metavar="FILE", help="The profile to write: NAME.jumpstart.")
@click.option("--allow-failures", is_flag=True, help="Exit 0 also when requests failed.")
@click.option("--prove", is_flag=True, help=PROVE)
@settings_options(
    *("app", "tenant", "profile", "server"),
    but=(
        *("bind", "host", "port", "uds", "fd", "profile", "admin", "pid"),
        *("seed", "seed_requests", "seed_after", "publish"),
    ),
)
def build(
    target: str | None,
    requests: str | None,
    output: str,
    allow_failures: bool,
    prove: bool,
    config_file: str | None,
    tenant: str | None,
    **given: Any,
) -> int:
    """
    Produce a profile off line: boot TARGET cold, run requests, and write what that taught it to a signed file.

    Exits 1 when a request failed, or when none succeeded; the file is written all the same.
    With --prove it also exits 1 when the profile is not proven: then it is kept as NAME.jumpstart.rejected, with the
    reasons beside it, and what is at NAME.jumpstart stays as it is.
    """
    from jumpstart.profile import write_file
    from jumpstart_server import profiles
    from jumpstart_warmup.corpus import read_requests

    if not output:
        raise click.UsageError(
            "-o is missing: the profile to write; for example: jumpstart build shop.web:app -o shop.jumpstart"
        )
    settings = settings_of(target, config_file, tenant, given)
    set_up_logging_of(settings)
    if requests is not None:
        read_requests(Path(requests))  # complain before the app is booted
    path = Path(output)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: no such folder")
    built = profiles.build(settings, str(Path(requests).absolute()) if requests else "")
    for kind, texts in (("request failed", built.failures), ("request answered with 4xx", built.rejected)):
        for text, count in Counter(texts).items():
            click.echo(f"{kind}: {text}{f' ({count} times)' if count > 1 else ''}", err=True)
    data = built.data
    if prove:
        proof = show_proof(settings, data, str(path))
        if not proof.is_proven:
            reject(path, proof, data)
            return ExitCode.INTERNAL
        data = profiles.stamp(settings, data, proof.validation)
    write_file(path, data)
    counts = ", ".join(f"{len(section.records)} {name}" for name, section in sorted(built.sections.items()))
    click.echo(f"{path}: {len(data):,} bytes; {built.requests} requests; records: {counts or 'none'}")
    if requests is None:
        click.echo("without --requests it holds only what the import taught; see jumpstart build --help", err=True)
        return ExitCode.CLEAN
    if built.succeeded and built.requests:
        return ExitCode.CLEAN
    what = "not all requests succeeded" if built.failures else "no request succeeded"
    click.echo(f"{what}; {path} is written all the same, and holds what the others taught", err=True)
    return ExitCode.CLEAN if allow_failures else ExitCode.INTERNAL
