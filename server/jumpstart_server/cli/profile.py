"""``jumpstart profile``: what is inside a profile, is it whole, what changed; and capture from a running server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from jumpstart.errors import JumpstartError, ProfileRefusedError
from jumpstart.profile import Profile, read_profile, write_file
from jumpstart.profile_view import describe, describe_diff, diff_profiles
from jumpstart.records import Reason
from jumpstart.trust import KeyRing
from jumpstart_server.cli.client import AdminClient
from jumpstart_server.config import environment, paths_of_host


def _read(file: str) -> Profile:
    """Read a profile of any age and signer; for looking, not for booting."""
    ring = KeyRing(paths_of_host(environment()).keys)
    return read_profile(Path(file), trust="data-only", verify=ring.verify, now=datetime.now(UTC), max_age=None)


@click.group()
def profile() -> None:
    """Profiles: show, verify, diff, capture."""


@profile.command()
@click.argument("file")
@click.option("-v", "--verbose", is_flag=True, help="The data of each record too.")
def show(file: str, verbose: bool) -> int:
    """List everything that is inside FILE."""
    found = _read(file)
    for line in describe(found, verbose=verbose):
        click.echo(line)
    for refusal in found.refusals:
        click.echo(f"not used: {refusal}")
    return 0


@profile.command()
@click.argument("file")
def verify(file: str) -> int:
    """Tell whole from broken: exit 0 when FILE is whole and signed by a trusted key, 1 otherwise."""
    try:
        found = _read(file)
        refusals = list(found.refusals)
        for name in found.sections:
            try:
                _, malformed = found.records(name)
            except ProfileRefusedError as error:
                click.echo(f"{file}: section {name}: {error}")
                refusals.append(error)  # type: ignore[arg-type]  # only counted from here on
                continue
            for record in malformed:
                click.echo(f"{file}: section {name}: record {record.key}: {record.reason} {record.detail}".rstrip())
    except ProfileRefusedError as error:
        click.echo(f"{file}: {error}")
        return 1
    for refusal in found.refusals:
        click.echo(f"{file}: {refusal}")
    if refusals:
        return 1
    total = sum(section.info.records for section in found.sections.values())
    click.echo(f"{file}: whole, {total} records, signed by {found.signed_by}")
    return 0


@profile.command()
@click.argument("old")
@click.argument("new")
def diff(old: str, new: str) -> int:
    """Compare two profiles, record by record; exit 1 when they differ."""
    changes = diff_profiles(_read(old), _read(new))
    lines = describe_diff(changes)
    for line in lines:
        click.echo(line)
    return 1 if lines else 0


@profile.command()
@click.option("-o", "--output", required=True, metavar="FILE", help="The profile to write: NAME.jumpstart.")
@click.option("--admin", metavar="ADDRESS", help="Admin address; by default the one server of this user.")
def capture(output: str, admin: str | None) -> int:
    """Write what a running server knows now to a signed file."""
    data = AdminClient.find(admin, paths_of_host(environment())).capture()
    if not data:
        raise JumpstartError(f"{Reason.ABSENT}: the server sent nothing")
    write_file(Path(output), data)
    click.echo(f"{output}: {len(data):,} bytes")
    return 0
