"""``jumpstart keys``: who may produce profiles that this host boots from."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from jumpstart.errors import ProfileRefusedError
from jumpstart.profile import read_profile
from jumpstart.trust import KeyRing
from jumpstart_server.cli import Group
from jumpstart_server.config import environment, paths_of_host


def _ring() -> KeyRing:
    return KeyRing(paths_of_host(environment()).keys)


@click.group(cls=Group)
def keys() -> None:
    """Keys that sign profiles, and keys that are trusted on this host."""


@keys.command()
def new() -> int:
    """Make a new key pair for this host; profiles signed by the old one stay trusted until it is revoked."""
    key = _ring().new()
    click.echo(f"{key.id} {key.name}")
    return 0


@keys.command("list")
@click.argument("files", nargs=-1)
def list_keys(files: tuple[str, ...]) -> int:
    """List the trusted keys, or, of each profile in FILES, whose key has signed it; exit 1 when one is not trusted."""
    ring = _ring()
    if not files:
        for key in ring.list():
            click.echo(f"{key.id} {key.name}{' (signs the profiles of this host)' if key.own else ''}")
        for revoked in ring.revoked():
            click.echo(f"{revoked} (revoked)")
        return 0
    code = 0
    trusted = ring.trusted()
    for file in files:
        try:
            profile = read_profile(Path(file), trust="signed", verify=ring.verify, now=datetime.now(UTC), max_age=None)
        except ProfileRefusedError as error:
            click.echo(f"{file}: {error}")
            code = 1
            continue
        assert profile.signed_by is not None  # or it would have been refused
        click.echo(f"{file}: {profile.signed_by} {trusted[profile.signed_by].name}, on {profile.manifest.host}")
    return code


@keys.command()
def show() -> int:
    """Print this host's public key, to be trusted on others; it is made if there is none."""
    click.echo(_ring().public_pem(), nl=False)
    return 0


@keys.command()
@click.argument("file")
@click.option("--name", default="", help="What to call it; by default the file's name.")
def trust(file: str, name: str) -> int:
    """Trust the public key in FILE (``jumpstart keys show`` on the host that makes profiles)."""
    path = Path(file)
    key = _ring().trust(path, name or path.stem)
    click.echo(f"{key.id} {key.name}")
    return 0


@keys.command()
@click.argument("key")
def revoke(key: str) -> int:
    """Stop trusting the key with this id, for good and from the next boot on: what it has signed is refused then."""
    revoked = _ring().revoke(key)
    click.echo(f"{revoked.id} {revoked.name} is not trusted any more")
    return 0
