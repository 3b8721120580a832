"""
The profile file, `NAME.jumpstart`: what a warmed process knew, for other hosts.

An archive (`archive.py`) of ``manifest.json``, ``manifest.sig`` and ``sections/RECORDER.json|.msgpack``. The
**signature** over the manifest, and through it each section's size and SHA-256, decide what may be believed. The
archive's own digest only tells damage: a mismatch alone costs a note, since whatever it hit is checked again by
signature and hashes.

For any bytes the reader returns a profile or raises `ProfileRefusedError`, and nothing of a section is decoded before
its hash was checked.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from jumpstart._version import __version__
from jumpstart.archive import (
    DEFAULT,
    ArchiveMember,
    Caps,
    inflate,
    is_as_written,
    needed,
    pack,
    read_directory,
)
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.records import Dropped, Reason, Record
from jumpstart.report import Refusal
from jumpstart.runtime import RuntimeKey, runtime_key
from jumpstart.trust import Signature

FORMAT = 1
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
FUTURE_TOLERANCE = timedelta(minutes=5)  # clocks of a fleet differ by seconds

Encoding = Literal["json", "msgpack"]
Trust = Literal["signed", "data-only"]
Sign = Callable[[bytes], Signature]
Verify = Callable[[bytes, Signature], None]

RecorderName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class SectionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says about a section. `size` and `sha256` are of its bytes when inflated."""

    recorder: RecorderName
    version: _Count
    encoding: Encoding
    records: _Count
    size: _Count
    sha256: _Sha256

    @property
    def path(self) -> str:
        """Its member of the archive."""
        return f"sections/{self.recorder}.{self.encoding}"


class AppInfo(msgspec.Struct, frozen=True, kw_only=True):
    """
    Which app the state is of.

    Attributes:
        target: such as ``shop.web:app``.
        build: the operator's build id, or "".
        sources, distributions: digests, see `jumpstart.runtime`.
    """

    target: _Text
    build: _Text = ""
    sources: _Text = ""
    distributions: _Text = ""


class Seeding(msgspec.Struct, frozen=True, kw_only=True):
    """The yield of the seeding run. `warm_coverage` is a share between 0 and 1, or None if it was not measured."""

    requests: _Count = 0
    routes: _Count = 0
    duration_s: _Amount = 0.0
    warm_coverage: _Share | None = None


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a fresh consumer did with the profile before it was published.

    Attributes:
        golden, matched: how many recorded requests it was asked, and how many it answered alike.
        warm_coverage: share between 0 and 1.
        first_request_s, cold_first_request_s: latency of the first request, with and without the profile.
    """

    golden: _Count
    matched: _Count
    warm_coverage: _Share
    first_request_s: _Amount
    cold_first_request_s: _Amount


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """
    ``manifest.json``. Fields that a later Jumpstart adds are ignored; what must not be ignored raises `format`.

    Attributes:
        id: hex of a UUID4.
        created: UTC.
        producer: such as ``jumpstart 0.1.0``; says nothing about the host.
    """

    format: int
    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    created: Annotated[datetime, msgspec.Meta(tz=True)]
    producer: _Text
    runtime: RuntimeKey
    app: AppInfo
    tenant: _Text
    sections: list[SectionInfo]
    seeding: Seeding = Seeding()
    validation: Validation | None = None


@dataclass(frozen=True)
class EncodedSection:
    """A section ready to be written; `dropped` are the records that could not be encoded."""

    info: SectionInfo
    data: bytes
    dropped: list[Dropped] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """A section whose bytes have the size and hash that the manifest says; not decoded yet."""

    info: SectionInfo
    data: bytes


@dataclass(frozen=True)
class Profile:
    """
    A profile that may be used.

    Attributes:
        signed_by: id of the trusted key that signed it, or None.
        trusted: whether recorders that need trust may be given their sections.
        sections: the sections that are whole, by recorder name.
        refusals: what is wrong with the rest.
    """

    manifest: Manifest
    signed_by: str | None
    trusted: bool
    sections: dict[str, Section]
    refusals: list[Refusal]
    record_limit: int = DEFAULT.records

    def records(self, name: str) -> tuple[list[Record], list[Dropped]]:
        """
        Decode a section; the second list are its malformed records.

        Raises:
            KeyError: no such section.
            ProfileRefusedError: the section as a whole cannot be decoded.
        """
        section = self.sections[name]
        records, dropped = decode_section(section.data, section.info.encoding, self.record_limit)
        if len(records) + len(dropped) != section.info.records:
            raise ProfileRefusedError(
                Reason.MALFORMED,
                f"section {name} holds {len(records) + len(dropped)} records, its manifest says {section.info.records}",
            )
        return records, dropped


# -- sections --


def encode_section(recorder: str, version: int, encoding: Encoding, records: Iterable[Record]) -> EncodedSection:
    """Encode a recorder's records. One that holds something the encoding cannot carry costs only itself."""
    encode = msgspec.json.encode if encoding == "json" else msgspec.msgpack.encode
    parts, dropped = [], []
    for record in records:
        try:
            parts.append(encode(record))
        except Exception as error:  # whatever a recorder put in: cycles, surrogates, objects with hooks that raise
            dropped.append(Dropped(record.key, Reason.MALFORMED, f"cannot be encoded: {error}"))
    if encoding == "json":
        data = b"[" + b",\n".join(parts) + b"]"
    else:
        data = b"\xdd" + len(parts).to_bytes(4, "big") + b"".join(parts)  # msgpack's "array 32"
    info = SectionInfo(
        recorder=recorder,
        version=version,
        encoding=encoding,
        records=len(parts),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    return EncodedSection(info, data, dropped)


def decode_section(data: bytes, encoding: Encoding, limit: int) -> tuple[list[Record], list[Dropped]]:
    """
    Decode the bytes of a section. A malformed record costs only itself; its key in the second list is its position.

    Raises:
        ProfileRefusedError: it is no array at all (`Reason.MALFORMED`), or of over *limit* records.
    """
    try:
        if encoding == "json":
            items = msgspec.json.decode(data, type=list[msgspec.Raw])
        else:
            items = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise ProfileRefusedError(Reason.MALFORMED, f"the section is not a {encoding} array: {error}") from error
    if len(items) > limit:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"the section has {len(items)} records, {limit} are allowed")
    decoder = msgspec.json.Decoder(Record) if encoding == "json" else msgspec.msgpack.Decoder(Record)
    records: list[Record] = []
    dropped: list[Dropped] = []
    seen: set[str] = set()
    for position, item in enumerate(items):
        try:
            record = decoder.decode(item)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            dropped.append(Dropped(f"#{position}", Reason.MALFORMED, str(error)))
            continue
        if record.key in seen:
            dropped.append(Dropped(f"#{position}", Reason.MALFORMED, f"second record of key {record.key!r}"))
            continue
        seen.add(record.key)
        records.append(record)
    return records, dropped


# -- writing --


def new_manifest(
    *,
    app: AppInfo,
    tenant: str,
    sections: Iterable[EncodedSection],
    now: datetime,
    seeding: Seeding | None = None,
    validation: Validation | None = None,
) -> Manifest:
    """Return the manifest of a profile made by this process; *now* must be aware."""
    import uuid

    return Manifest(
        format=FORMAT,
        id=uuid.uuid4().hex,
        created=now.astimezone(UTC),
        producer=f"jumpstart {__version__}",
        runtime=runtime_key(),
        app=app,
        tenant=tenant,
        sections=sorted((section.info for section in sections), key=lambda info: info.recorder),
        seeding=seeding or Seeding(),
        validation=validation,
    )


def write_profile(path: Path, manifest: Manifest, sections: Mapping[str, bytes], sign: Sign) -> None:
    """
    Write a profile: temporary file in the same folder, fsync, rename. The same arguments give the same bytes.

    Raises:
        ValueError: *sections* (by recorder name) are not those of the manifest.
        ConfigError: it cannot be written; *path* is then as it was, and no temporary file is left.
    """
    write_file(path, pack_profile(manifest, sections, sign))


def pack_profile(manifest: Manifest, sections: Mapping[str, bytes], sign: Sign) -> bytes:
    """Return the bytes of a profile file; raises ValueError as `write_profile` does."""
    members: dict[str, bytes] = {}
    for info in manifest.sections:
        data = sections.get(info.recorder)
        if data is None or len(data) != info.size or hashlib.sha256(data).hexdigest() != info.sha256:
            raise ValueError(f"section {info.recorder} is not the one that the manifest describes")
        members[info.path] = data
    if len(members) != len(manifest.sections) or len(sections) != len(members):
        raise ValueError("the manifest and the sections do not name the same recorders")
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    # A manifest that this very version would refuse must not be shipped.
    msgspec.json.decode(encoded, type=Manifest)
    signature = msgspec.json.encode(sign(encoded))
    ordered = [(MANIFEST, encoded), (SIGNATURE, signature), *sorted(members.items())]
    return pack(ordered)


def write_file(path: Path, data: bytes) -> None:
    """Write the bytes of a profile as `write_profile` does; raises ConfigError like it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            # Mode as for any output file: who may read a profile is for the umask to say.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot write the profile {path}: {error.strerror}; make room or choose another folder"
        ) from error


# -- reading --


def read_profile(
    path: Path,
    *,
    trust: Trust,
    verify: Verify,
    now: datetime,
    max_age: timedelta | None,
    caps: Caps = DEFAULT,
) -> Profile:
    """
    Read and check a profile file; sections that are damaged are left out and noted.

    *verify* raises ProfileRefusedError for a signature that is not to be trusted (`KeyRing.verify`). With
    ``trust="data-only"`` such files, and unsigned ones, are accepted as not `Profile.trusted`. *now* must be aware;
    *max_age* None is any age.

    Raises:
        ProfileRefusedError: the file as a whole may not be used. No other exception, whatever the bytes are.
    """
    return parse_profile(
        _read_file(path, caps.file_bytes), trust=trust, verify=verify, now=now, max_age=max_age, caps=caps
    )


def _read_file(path: Path, limit: int) -> bytes:
    try:
        # Symbolic links are followed: "latest" is often one, and the signature decides, not the path. Without
        # O_NONBLOCK opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ProfileRefusedError(Reason.UNREADABLE, f"{path} is not a regular file")
            if found.st_size > limit:
                raise ProfileRefusedError(Reason.TOO_LARGE, f"{path} has {found.st_size} bytes, {limit} are allowed")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(limit + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise ProfileRefusedError(Reason.ABSENT, f"{path} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ProfileRefusedError(Reason.UNREADABLE, f"cannot read {path}: {detail}") from error
    if len(data) > limit:  # it grew while it was read
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{path} has over {limit} bytes")
    return data


def parse_profile(
    data: bytes,
    *,
    trust: Trust,
    verify: Verify,
    now: datetime,
    max_age: timedelta | None,
    caps: Caps = DEFAULT,
) -> Profile:
    """As `read_profile`, for the bytes of a file."""
    refusals: list[Refusal] = []
    if not is_as_written(data):
        refusals.append(Refusal("container", Reason.DAMAGED, "the file is not the one that was written"))
    members = read_directory(data, caps)
    encoded = inflate(data, needed(members, MANIFEST), caps.manifest_bytes, caps)
    signed_by = _check_signature(data, members, encoded, trust, verify, caps, refusals)
    manifest = _parse_manifest(encoded, caps)
    _check_fresh(manifest, now, max_age)
    unknown = members.keys() - {MANIFEST, SIGNATURE} - {info.path for info in manifest.sections}
    if unknown:
        raise ProfileRefusedError(Reason.DAMAGED, f"the archive has a member that is not ours: {min(unknown)!r}")
    sections = {}
    for info in manifest.sections:
        try:
            sections[info.recorder] = Section(info, _section_bytes(data, members, info, caps))
        except ProfileRefusedError as error:
            refusals.append(Refusal(f"section {info.recorder}", error.reason, error.detail))
    return Profile(manifest, signed_by, signed_by is not None, sections, refusals, caps.records)


def _check_signature(
    data: bytes,
    members: Mapping[str, ArchiveMember],
    encoded: bytes,
    trust: Trust,
    verify: Verify,
    caps: Caps,
    refusals: list[Refusal],
) -> str | None:
    """Return the id of the trusted key; without one, raise or, for data only, note it."""
    try:
        member = members.get(SIGNATURE)
        if member is None:
            raise ProfileRefusedError(Reason.UNSIGNED, "the profile has no signature")
        try:
            signature = msgspec.json.decode(inflate(data, member, caps.signature_bytes, caps), type=Signature)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProfileRefusedError(Reason.BAD_SIGNATURE, f"the signature is malformed: {error}") from error
        try:
            verify(encoded, signature)
        except OSError as error:
            raise ProfileRefusedError(Reason.UNREADABLE, f"the trusted keys cannot be read: {error}") from error
    except ProfileRefusedError as error:
        if trust == "signed":
            raise
        refusals.append(Refusal("signature", error.reason, error.detail))
        return None
    return signature.key


class _Format(msgspec.Struct):
    format: int


def _parse_manifest(encoded: bytes, caps: Caps) -> Manifest:
    try:
        # The version first: another version's manifest may have any shape.
        version = msgspec.json.decode(encoded, type=_Format).format
        if version != FORMAT:
            raise ProfileRefusedError(Reason.FORMAT, f"format {version}; this Jumpstart reads format {FORMAT}")
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProfileRefusedError(Reason.DAMAGED, f"the manifest is malformed: {error}") from error
    if len(manifest.sections) > caps.sections:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{len(manifest.sections)} sections, {caps.sections} are allowed")
    if len({info.recorder for info in manifest.sections}) != len(manifest.sections):
        raise ProfileRefusedError(Reason.DAMAGED, "the manifest names a section twice")
    return manifest


def _check_fresh(manifest: Manifest, now: datetime, max_age: timedelta | None) -> None:
    age = now - manifest.created
    if age < -FUTURE_TOLERANCE:
        raise ProfileRefusedError(
            Reason.FROM_THE_FUTURE, f"made at {manifest.created.isoformat()}, {-age} from now; compare the clocks"
        )
    if max_age is not None and age > max_age:
        raise ProfileRefusedError(
            Reason.TOO_OLD, f"made at {manifest.created.isoformat()}, {age} ago; {max_age} is allowed"
        )


def _section_bytes(data: bytes, members: Mapping[str, ArchiveMember], info: SectionInfo, caps: Caps) -> bytes:
    member = needed(members, info.path)
    if info.records > caps.records:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{info.records} records, {caps.records} are allowed")
    if member.size != info.size:
        raise ProfileRefusedError(Reason.DAMAGED, f"{member.size} bytes, the manifest says {info.size}")
    content = inflate(data, member, caps.section_bytes, caps)
    if hashlib.sha256(content).hexdigest() != info.sha256:
        raise ProfileRefusedError(Reason.DAMAGED, "its bytes are not those that were signed")
    return content
