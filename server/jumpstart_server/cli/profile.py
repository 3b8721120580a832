"""``jumpstart profile``: what is inside a profile, is it whole, what changed; capture from a running server; stores."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from jumpstart.boot import full_target
from jumpstart.choice import Votes
from jumpstart.errors import ConfigError, JumpstartError, ProfileRefusedError
from jumpstart.fetching import fetch_order
from jumpstart.profile import Profile, read_bytes, read_profile, write_file
from jumpstart.profile_view import describe, describe_diff, diff_profiles
from jumpstart.records import Reason
from jumpstart.stores import (
    HALF_WRITTEN_AFTER,
    Dated,
    Listing,
    Place,
    Store,
    build_of,
    choose_removals,
    decode_name,
    encode_build,
    open_store,
    reader,
)
from jumpstart.trust import KeyRing
from jumpstart_server.cli import Group
from jumpstart_server.cli.client import AdminClient
from jumpstart_server.cli.proof import proof_options, proof_settings, reject, show_proof, stamped
from jumpstart_server.config import environment, paths_of_host


def _read(file: str) -> Profile:
    """Read a profile of any age and signer; for looking, not for booting."""
    ring = KeyRing(paths_of_host(environment()).keys)
    return read_profile(Path(file), trust="data-only", verify=ring.verify, now=datetime.now(UTC), max_age=None)


@click.group(cls=Group)
def profile() -> None:
    """Profiles: show, verify, diff, capture; publish, fetch, list, promote, prune in a store."""


@profile.command()
@click.argument("file")
@click.option("-v", "--verbose", is_flag=True, help="The data of each record too.")
def show(file: str, verbose: bool) -> int:
    """List everything that is inside FILE."""
    keys = KeyRing(paths_of_host(environment()).keys).trusted()
    for line in describe(_read(file), verbose=verbose, keys=keys):
        click.echo(line)
    return 0


@profile.command()
@click.argument("file")
@proof_options
def verify(file: str, prove: bool, config_file: str | None, tenant: str | None, **given: Any) -> int:
    """
    Tell whole from broken: exit 0 when FILE is whole and signed by a trusted key, 1 otherwise.

    With --prove it must also be of use to the app that is here.
    """
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
    if prove:
        settings = proof_settings(found.manifest, config_file, tenant, given)
        return int(not show_proof(settings, read_bytes(Path(file)), file).is_proven)
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
@proof_options
def capture(
    output: str, admin: str | None, prove: bool, config_file: str | None, tenant: str | None, **given: Any
) -> int:
    """
    Write what a running server knows now to a signed file. --tenant names one of several.

    With --prove only a profile that is of use is written to FILE; another is kept as FILE.rejected, with the reasons.
    """
    data = AdminClient.find(admin, paths_of_host(environment())).capture(tenant)
    if not data:
        raise JumpstartError(f"{Reason.ABSENT}: the server sent nothing")
    if prove:
        settings = proof_settings(_parse()(data).manifest, config_file, None, given)
        proof = show_proof(settings, data, output)
        if not proof.is_proven:
            reject(Path(output), proof, data)
            return 1
        data = stamped(settings, data, proof, output)
    write_file(Path(output), data)
    click.echo(f"{output}: {len(data):,} bytes")
    return 0


# -- stores --


def _of_app(text: str = "by default every one") -> Callable[[Callable[..., int]], Callable[..., int]]:
    def add(command: Callable[..., int]) -> Callable[..., int]:
        command = click.option("--tenant", metavar="NAME", help="The tenant; " + text + ".")(command)
        return click.option("--app", metavar="NAME", help="The app, by --name or target; " + text + ".")(command)

    return add


def _parse(max_age_s: float | None = None) -> Callable[[bytes], Profile]:
    return reader(paths_of_host(environment()).keys, "signed", max_age_s)


@profile.command()
@click.argument("file")
@click.argument("store")
@click.option("--name", metavar="NAME", help="The app's name, where it is served with --name; by default its target.")
@click.option("--build-id", metavar="ID", help="Its build; by default what the profile says.")
@proof_options
def publish(
    file: str,
    store: str,
    name: str | None,
    build_id: str | None,
    prove: bool,
    config_file: str | None,
    tenant: str | None,
    **given: Any,
) -> int:
    """
    Put FILE into STORE, a folder or a URL, when it is whole and signed by a trusted key.

    With --prove only one that is of use to the app that is here; of another FILE.rejected.txt says why it is none.
    """
    data = read_bytes(Path(file))
    found = _parse()(data)
    if found.refusals:
        raise ProfileRefusedError(found.refusals[0].reason, f"{file}: {found.refusals[0]}")
    manifest = found.manifest
    if prove:
        settings = proof_settings(manifest, config_file, tenant, given)
        proof = show_proof(settings, data, file)
        if not proof.is_proven:
            reject(Path(file), proof)
            return 1
        data = stamped(settings, data, proof, file)
    app = name or full_target(manifest.app.target)
    place = Place.of(app, manifest.tenant, build_id or build_of(manifest.app), manifest.id)
    open_store(store).publish(place, data)
    click.echo(f"{place.path}: {len(data):,} bytes")
    return 0


@profile.command()
@click.argument("store")
@click.option("-o", "--output", required=True, metavar="FILE", help="The profile to write: NAME.jumpstart.")
@_of_app("needed where the store has several")
@click.option("--build-id", metavar="ID", default="", help="Prefer this build.")
@click.option("--id", "wanted", metavar="ID", default="", help="This profile; its first digits will do.")
def fetch(store: str, output: str, app: str | None, tenant: str | None, build_id: str, wanted: str) -> int:
    """Write a valid profile of STORE to a file: of the build that is named, else a promoted one, else the newest."""
    listing, app, tenant = _one_app(open_store(store), app, tenant)
    for entry in fetch_order(listing, build_id, (), secrets.token_hex(8)):
        if not entry.place.id.startswith(wanted):
            continue
        try:
            data, _ = open_store(store).read(entry.place, _parse())
        except ProfileRefusedError as error:
            click.echo(f"not used: {entry.place.path}: {error}", err=True)
            continue
        write_file(Path(output), data)
        click.echo(f"{output}: {entry.place.path}, {len(data):,} bytes")
        return 0
    raise JumpstartError(f"{Reason.ABSENT}: {store} has no valid profile of {app}, tenant {tenant}")


@profile.command(name="list")
@click.argument("store")
@_of_app()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_(store: str, app: str | None, tenant: str | None, as_json: bool) -> int:
    """List what STORE holds: whether it is valid here, its age, its coverage, and what its consumers say."""
    opened = open_store(store)
    listing = opened.listing(app, tenant)
    rows = []
    for entry in listing.entries:
        row: dict[str, Any] = {"path": entry.place.path, "bytes": entry.size, "problem": ""}
        votes = listing.votes.get(entry.place.id, Votes())
        row.update(healthy=votes.healthy, crashed=votes.crashed, outvoted=votes.is_outvoted)
        try:
            _, found = opened.read(entry.place, _parse())
            row.update(created=found.manifest.created, coverage=found.manifest.seeding.warm_coverage)
            row.update(proven=found.manifest.validation is not None)
            if found.refusals:
                row["problem"] = str(found.refusals[0])
        except ProfileRefusedError as error:
            row["problem"] = str(error)
        rows.append(row)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    for row in rows:
        click.echo(_describe_row(row, datetime.now(UTC)))
    return 0


def _describe_row(row: dict[str, Any], now: datetime) -> str:
    parts = [row["problem"] or "valid"]
    if "created" in row:
        coverage = row["coverage"]
        parts.append(f"{(now - row['created']).total_seconds() / 3600:.1f} h old")
        parts.append("coverage not measured" if coverage is None else f"coverage {coverage:.0%}")
        parts += ["proven"] if row["proven"] else []
    parts.append(f"{row['healthy']} healthy, {row['crashed']} crashed{' (not chosen)' if row['outvoted'] else ''}")
    return f"{row['path']}: {' · '.join(parts)}"


@profile.command()
@click.argument("store")
@click.argument("build")
@_of_app("needed where the store has several")
def promote(store: str, build: str, app: str | None, tenant: str | None) -> int:
    """Make the valid profiles of BUILD the `latest` of STORE: what builds that have none of their own boot from."""
    opened = open_store(store)
    listing, app, tenant = _one_app(opened, app, tenant)
    places = []
    for entry in listing.entries:
        if entry.place.build != encode_build(build):
            continue
        try:
            opened.read(entry.place, _parse())
        except ProfileRefusedError as error:
            click.echo(f"not promoted: {entry.place.path}: {error}", err=True)
            continue
        places.append(entry.place)
    if not places:
        raise JumpstartError(f"{Reason.ABSENT}: {store} has no valid profile of build {build}")
    for place in opened.promote(places, listing):
        click.echo(place.path)
    return 0


@profile.command()
@click.argument("store")
@click.option("--keep", metavar="N", type=click.IntRange(1), default=3, show_default=True, help="Profiles of a build.")
@click.option("--builds", metavar="N", type=click.IntRange(1), default=5, show_default=True, help="Builds of a tenant.")
@_of_app()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(store: str, keep: int, builds: int, app: str | None, tenant: str | None, dry_run: bool) -> int:
    """
    Keep the newest valid profiles of STORE and remove the others, with what is not whole an hour after it was written.

    Profiles by keys that are not trusted here are neither counted nor removed.
    """
    opened = open_store(store)
    listing = opened.listing(app, tenant)
    now = datetime.now(UTC)
    valid, removed = [], []
    for entry in listing.entries:
        try:
            _, found = opened.read(entry.place, _parse())
            valid.append(Dated(entry.place, found.manifest.created))
        except ProfileRefusedError as error:
            if error.reason is Reason.DAMAGED and now - entry.modified > HALF_WRITTEN_AFTER:
                removed.append(entry.place)
            else:
                click.echo(f"left alone: {entry.place.path}: {error}", err=True)
    removed += choose_removals(valid, keep, builds)
    if not dry_run:
        opened.prune(removed, listing)
    for place in removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {place.path}")
    return 0


def _one_app(store: Store, app: str | None, tenant: str | None) -> tuple[Listing, str, str]:
    listing = store.listing(app, tenant)
    found = sorted({(entry.place.app, entry.place.tenant) for entry in listing.entries})
    if not found:
        raise JumpstartError(f"{Reason.ABSENT}: {store.url} has no profiles{f' of {app}' if app else ''}")
    if len(found) > 1:
        names = ", ".join(f"--app {decode_name(name)} --tenant {decode_name(of)}" for name, of in found)
        raise ConfigError(f"{store.url} has profiles of several; name one: {names}")
    return listing, decode_name(found[0][0]), decode_name(found[0][1])
