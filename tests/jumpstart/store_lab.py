"""Profiles for stores: signed by a host's key, of any build, with records that depend on what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from jumpstart.profile import AppInfo, Validation, encode_section, new_manifest, pack_profile
from jumpstart.records import Record
from jumpstart.runtime import RuntimeKey
from jumpstart.stores import Place
from jumpstart.trust import KeyRing

ROOT = Path(__file__).parents[2]
APP = "js_site:app"


def make_profile(
    keys: Path,
    build: str = "b1",
    *,
    app: str = APP,
    tenant: str = "web",
    records: Sequence[Record] = (Record(key="a"),),
    age: timedelta = timedelta(),
    runtime: RuntimeKey | None = None,
    validation: Validation | None = None,
) -> tuple[Place, bytes]:
    """Return the bytes of a profile signed with the own key of *keys*, and its place in a store."""
    section = encode_section("names", 1, "json", records)
    info = AppInfo(target=app, build=build)
    manifest = new_manifest(app=info, tenant=tenant, sections=[section], now=datetime.now(UTC) - age)
    if runtime is not None:
        manifest = msgspec.structs.replace(manifest, runtime=runtime)
    manifest = msgspec.structs.replace(manifest, validation=validation)
    data = pack_profile(manifest, {"names": section.data}, KeyRing(keys).sign)
    return Place.of(app, tenant, build, manifest.id), data


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
