"""What a profile holds, and what differs between two, in structs and in lines for a person. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from jumpstart.errors import ProfileRefusedError
from jumpstart.profile import Profile
from jumpstart.records import Record
from jumpstart.trust import TrustedKey


@dataclass(frozen=True)
class SectionDiff:
    """Keys of records that only the second profile has, only the first, or both with different content."""

    name: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


@dataclass(frozen=True)
class ProfileDiff:
    """
    What differs between two profiles.

    Attributes:
        manifest: ``(field, first, second)`` of the fields that differ, other than id, time and sections.
        sections: the sections that differ.
    """

    manifest: tuple[tuple[str, str, str], ...]
    sections: tuple[SectionDiff, ...]


def diff_profiles(a: Profile, b: Profile) -> ProfileDiff:
    """Compare; a section that is missing or cannot be decoded counts as empty. Weights do not count as changes."""
    fields = []
    for label, first, second in (
        ("producer", a.manifest.producer, b.manifest.producer),
        ("host", a.manifest.host, b.manifest.host),
        ("tenant", a.manifest.tenant, b.manifest.tenant),
        *_struct_fields("runtime", a.manifest.runtime, b.manifest.runtime),
        *_struct_fields("app", a.manifest.app, b.manifest.app),
        *_version_fields(a.manifest.app.versions, b.manifest.app.versions),
    ):
        if first != second:
            fields.append((label, first, second))
    sections = []
    for name in sorted(a.sections.keys() | b.sections.keys()):
        before, after = _by_key(a, name), _by_key(b, name)
        difference = SectionDiff(
            name,
            added=tuple(key for key in after if key not in before),
            removed=tuple(key for key in before if key not in after),
            changed=tuple(key for key in after if key in before and _content(after[key]) != _content(before[key])),
        )
        if difference.added or difference.removed or difference.changed:
            sections.append(difference)
    return ProfileDiff(tuple(fields), tuple(sections))


def _struct_fields(prefix: str, a: msgspec.Struct, b: msgspec.Struct) -> list[tuple[str, str, str]]:
    names = [name for name in a.__struct_fields__ if name != "versions"]
    return [(f"{prefix}.{name}", str(getattr(a, name)), str(getattr(b, name))) for name in names]


def _version_fields(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [(f"app.versions.{name}", a.get(name, "none"), b.get(name, "none")) for name in sorted(a.keys() | b.keys())]


def _by_key(profile: Profile, name: str) -> dict[str, Record]:
    try:
        records, _ = profile.records(name)
    except (KeyError, ProfileRefusedError):
        return {}
    return {record.key: record for record in records}


def _content(record: Record) -> tuple[object, object]:
    return record.data, record.depends


def describe_diff(diff: ProfileDiff) -> list[str]:
    """Return the lines of `jumpstart profile diff`; none if nothing differs."""
    lines = [f"{label}: {_shown(first)} -> {_shown(second)}" for label, first, second in diff.manifest]
    for section in diff.sections:
        lines.append(
            f"section {section.name}: {len(section.added)} added, {len(section.removed)} removed, "
            f"{len(section.changed)} changed"
        )
        for sign, keys in (("+", section.added), ("-", section.removed), ("~", section.changed)):
            lines.extend(f"  {sign} {_shown(key)}" for key in keys)
    return lines


def describe(profile: Profile, *, verbose: bool = False, keys: Mapping[str, TrustedKey] | None = None) -> list[str]:
    """
    Return the lines of `jumpstart profile show`: all that is inside.

    Args:
        verbose: also what each record holds.
        keys: the trusted keys by id, to say whose the signature is.
    """
    manifest = profile.manifest
    signer = (keys or {}).get(profile.signed_by or "")
    signed = f"key {profile.signed_by}" if profile.signed_by else "nobody that is trusted here"
    if signer is not None:
        signed += f" ({signer.name})"
    coverage = manifest.seeding.warm_coverage
    lines = [
        f"id: {manifest.id}",
        f"created: {manifest.created.isoformat()}",
        f"producer: {_shown(manifest.producer)}" + (f" on {_shown(manifest.host)}" if manifest.host else ""),
        f"signed by: {_shown(signed)}",
        f"app: {_shown(manifest.app.target)}",
        *(
            f"{label}: {_shown(value)}"
            for label, value in (
                ("build", manifest.app.build),
                ("sources", manifest.app.sources),
                ("distributions", manifest.app.distributions),
            )
            if value
        ),
        f"tenant: {_shown(manifest.tenant)}",
        f"runtime: {' '.join(_shown(str(part)) for part in msgspec.structs.astuple(manifest.runtime))}",
        f"seeding: {manifest.seeding.requests} requests, {manifest.seeding.routes} routes, "
        f"{manifest.seeding.duration_s:.1f} s, "
        + ("no real requests" if coverage is None else f"warm coverage {coverage:.1%}"),
    ]
    if manifest.lineage.generation:
        ids = ", ".join(each[:12] for each in manifest.lineage.ancestors)
        lines.append(f"lineage: generation {manifest.lineage.generation}, captured in a process that booted from {ids}")
    if manifest.golden:
        lines.append(f"golden requests: {len(manifest.golden)}")
    if verbose:
        lines.extend(
            f"  golden {_shown(each.request)}: status {each.status}, shape {each.shape}" for each in manifest.golden
        )
        lines.extend(f"made with: {_shown(f'{name} {text}')}" for name, text in manifest.app.versions.items())
    if manifest.validation is not None:
        proof = manifest.validation
        used = "" if proof.used is None else f", {proof.used:.0%} of the records used"
        lines.append(
            f"validation: {proof.matched} of {proof.golden} golden requests, warm coverage {proof.warm_coverage:.1%}"
            f"{used}, first request {proof.first_request_s * 1000:.1f} ms with {proof.cold_events} cold events "
            f"(cold: {proof.cold_first_request_s * 1000:.1f} ms with {proof.cold_boot_events})"
        )
    lines.extend(
        f"refused: {refusal.where}: {refusal.reason}: {_shown(refusal.detail)}" for refusal in profile.refusals
    )
    for name in profile.sections:
        lines.extend(_describe_section(profile, name, verbose))
    return lines


def _describe_section(profile: Profile, name: str, verbose: bool) -> Sequence[str]:
    info = profile.sections[name].info
    lines = [f"section {name}: version {info.version}, {info.encoding}, {info.records} records, {info.size} bytes"]
    try:
        records, dropped = profile.records(name)
    except ProfileRefusedError as error:
        return [*lines, f"  refused: {error.reason}: {_shown(error.detail)}"]
    for record in records:
        carried = f" (carried along by {record.carried} profiles)" if record.carried else ""
        lines.append(f"  {_shown(record.key)}{carried}")
        if verbose:
            lines.extend(f"    {_shown(label)} = {_shown(repr(value))}" for label, value in record.data.items())
            lines.extend(f"    needs {_shown(label)} = {_shown(value)}" for label, value in record.depends.items())
    lines.extend(f"  dropped {drop.key}: {_shown(drop.detail)}" for drop in dropped)
    return lines


def _shown(text: str) -> str:
    """Escape what could move a terminal's cursor or hide a line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
