"""``jumpstart keys``: who may produce profiles that this host boots from."""

from __future__ import annotations

from pathlib import Path

import click

from jumpstart.trust import KeyRing
from jumpstart_server.config import environment, paths_of_host


def _ring() -> KeyRing:
    return KeyRing(paths_of_host(environment()).keys)


@click.group()
def keys() -> None:
    """Keys that sign profiles, and keys that are trusted on this host."""


@keys.command()
def new() -> int:
    """Make a new key pair for this host; profiles signed by the old one stay trusted."""
    key = _ring().new()
    click.echo(f"{key.id} {key.name}")
    return 0


@keys.command("list")
def list_keys() -> int:
    """List the trusted keys."""
    for key in _ring().list():
        click.echo(f"{key.id} {key.name}")
    return 0


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
    """Stop trusting the key with this id."""
    revoked = _ring().revoke(key)
    click.echo(f"{revoked.id} {revoked.name} is not trusted any more")
    return 0
