"""``--prove``, wherever a profile is made or shipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jumpstart.errors import ConfigError, JumpstartError
from jumpstart.profile import Manifest
from jumpstart.trust import KeyRing
from jumpstart_server.cli import set_up_logging_of, settings_of, settings_options
from jumpstart_server.settings import Settings, boot_settings, declared_options

if TYPE_CHECKING:
    from jumpstart_server.proving import Proof

F = TypeVar("F", bound=Callable[..., Any])

PROVE = "Before it is kept: a fresh process boots from it alone, and must answer like the seeder and be warm."
REJECTED = ".rejected"
REASONS = ".txt"
_OF_A_PROOF = ("prove_coverage", "prove_used", "prove_requests", "prove_routes", "max_age", "trust")


def proof_options(command: F) -> F:
    """Add ``--prove`` and what it needs to a command that takes a file: the app, and the gates."""
    kept = ("app_dir", "factory", "env_file", *_OF_A_PROOF)
    but = [option.key for option in declared_options() if option.key not in kept]
    command = settings_options("app", "profile", but=but)(command)
    return click.option("--prove", is_flag=True, help=PROVE + " Exits 1 where it does not.")(command)


def proof_settings(manifest: Manifest, config_file: str | None, tenant: str | None, given: dict[str, Any]) -> Settings:
    """The settings of a proof; of the profile's own tenant, where the configuration has several and none is named."""
    target = manifest.app.target
    try:
        settings = settings_of(target, config_file, tenant, given)
    except ConfigError:
        if tenant is not None:
            raise
        settings = settings_of(target, config_file, manifest.tenant, given)
    set_up_logging_of(settings)
    return settings


def show_proof(settings: Settings, data: bytes, name: str) -> Proof:
    """
    Prove *data* and print the figures, and what is wrong.

    Raises:
        JumpstartError: the app does not boot without the profile either.
    """
    from jumpstart_server.proving import prove  # brings the server, which other commands can do without

    proof = prove(settings, data)
    for line in proof.describe():
        click.echo(f"{name}: {line}", err=not proof.is_proven)
    return proof


def stamped(settings: Settings, data: bytes, proof: Proof, name: str) -> bytes:
    """
    Return the proven profile *data* with the figures of its *proof*, by which consumers know that it is proven.

    They are covered by its signature, and another host's is not ours to replace: consumers may not trust our key.
    """
    from jumpstart_server.profiles import read_as_boot, stamp

    signed_by = read_as_boot(settings, data).signed_by
    key = KeyRing(Path(boot_settings(settings).keys)).trusted().get(signed_by or "")
    if key is not None and key.own:
        return stamp(settings, data, proof.validation)
    click.echo(
        f"{name}: the figures are not kept in it, and it is not marked as proven: key {signed_by}, which signed it, is "
        "not this host's own; prove it where it is made (build --prove)",
        err=True,
    )
    return data


def reject(path: Path, proof: Proof, data: bytes | None = None) -> None:
    """
    Keep a profile that is not proven for inspection: *data*, where given, as NAME.rejected, the reasons beside it.

    Raises:
        JumpstartError: they cannot be written.
    """
    from jumpstart.profile import write_file

    rejected = path.with_name(path.name + REJECTED)
    reasons = rejected.with_name(rejected.name + REASONS)
    try:
        reasons.write_text("".join(f"{line}\n" for line in proof.describe()))
    except OSError as error:
        raise JumpstartError(f"cannot write {reasons}: {error.strerror}") from error
    if data is not None:
        write_file(rejected, data)
    click.echo(
        f"{path if data is None else rejected} is kept for inspection, {reasons} says why it is not proven", err=True
    )
