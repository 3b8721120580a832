"""
The profile file, `NAME.jumpstart`: what a warmed process knew, for other hosts.

A ZIP archive of ``manifest.json``, ``manifest.sig`` and ``sections/RECORDER.json|.msgpack``. Two checks, each for its
own purpose:

- The **signature** over the manifest, and through it each section's size and SHA-256, decide what may be believed.
- The **container digest** tells damage: the archive comment, which is the last `COMMENT_BYTES` bytes of the file, is
  ``sha256:`` and the hex SHA-256 of all bytes before it. A mismatch alone costs a note, not the file, since whatever it
  hit is checked again by signature and hashes.

The reader is written for hostile bytes: it has its own ZIP parser (central directory only, no ZIP64, no encryption, no
data descriptors), since `zipfile` builds objects for as many members as a file claims to have. For any bytes it returns
a profile or raises `ProfileRefusedError`, and nothing of a section is decoded before its hash was checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from jumpstart._version import __version__
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.records import Dropped, Reason, Record
from jumpstart.report import Refusal
from jumpstart.runtime import RuntimeKey, runtime_key
from jumpstart.trust import Signature

FORMAT = 1
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
COMMENT_PREFIX = b"sha256:"
COMMENT_BYTES = len(COMMENT_PREFIX) + 64
FUTURE_TOLERANCE = timedelta(minutes=5)  # clocks of a fleet differ by seconds
MIB = 1024 * 1024

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


@dataclass(frozen=True)
class Caps:
    """
    What a profile may cost at most, whatever it says about itself.

    Attributes:
        file_bytes, manifest_bytes, signature_bytes, section_bytes: of the file, and of its members when inflated.
        total_bytes: of all members when inflated.
        sections, records: how many there may be of each; records per section.
        ratio: how many times larger a member of over 1 MiB may be than it is when compressed.
    """

    file_bytes: int = 256 * MIB
    manifest_bytes: int = MIB
    signature_bytes: int = 4096
    section_bytes: int = 64 * MIB
    total_bytes: int = 256 * MIB
    sections: int = 64
    records: int = 100_000
    ratio: int = 200  # JSON of warm state compresses 7 to 9 times; deflate can reach 1032


DEFAULT = Caps()


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
    # Only a seeder writes; a consumer's boot does not pay for these imports.
    import io
    import zipfile

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
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in ordered:
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3  # Unix, wherever it is made
            member.external_attr = 0o644 << 16
            archive.writestr(member, data, compresslevel=6)
        # A placeholder of the final length, since the length is part of what the digest covers.
        archive.comment = COMMENT_PREFIX + b"0" * 64
    body = buffer.getvalue()[:-COMMENT_BYTES]
    return body + _container_comment(body)


def _container_comment(body: bytes | memoryview) -> bytes:
    return COMMENT_PREFIX + hashlib.sha256(body).hexdigest().encode()


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
    body = memoryview(data)[:-COMMENT_BYTES]
    if len(data) <= COMMENT_BYTES or _container_comment(body) != data[-COMMENT_BYTES:]:
        refusals.append(Refusal("container", Reason.DAMAGED, "the file is not the one that was written"))
    members = _members(data, caps)
    encoded = _inflate(data, _needed(members, MANIFEST), caps.manifest_bytes, caps)
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
    members: Mapping[str, _Member],
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
            signature = msgspec.json.decode(_inflate(data, member, caps.signature_bytes, caps), type=Signature)
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


def _section_bytes(data: bytes, members: Mapping[str, _Member], info: SectionInfo, caps: Caps) -> bytes:
    member = _needed(members, info.path)
    if info.records > caps.records:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{info.records} records, {caps.records} are allowed")
    if member.size != info.size:
        raise ProfileRefusedError(Reason.DAMAGED, f"{member.size} bytes, the manifest says {info.size}")
    content = _inflate(data, member, caps.section_bytes, caps)
    if hashlib.sha256(content).hexdigest() != info.sha256:
        raise ProfileRefusedError(Reason.DAMAGED, "its bytes are not those that were signed")
    return content


# -- the archive --

_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_STORED, _DEFLATED = 0, 8
_ENCRYPTED_OR_STREAMED = 0x1 | 0x8  # flag bits: encrypted; sizes follow the data
_MEMBER_NAME = re.compile(rb"manifest\.(json|sig)|sections/[a-z0-9][a-z0-9-]{0,63}\.(json|msgpack)")


@dataclass(frozen=True)
class _Member:
    """What the central directory says; `size` when inflated, `packed` as stored, `offset` of its local header."""

    name: str
    method: int
    packed: int
    size: int
    offset: int


def _damaged(detail: str) -> ProfileRefusedError:
    return ProfileRefusedError(Reason.DAMAGED, detail)


def _members(data: bytes, caps: Caps) -> dict[str, _Member]:
    """Parse the central directory. Only names that a profile can have are accepted, each once."""
    end = data.rfind(b"PK\x05\x06", max(0, len(data) - _END.size - COMMENT_BYTES))
    if end < 0 or end + _END.size > len(data):
        raise _damaged("not a profile, or cut short: there is no archive directory at its end")
    _, _, _, _, count, directory_bytes, position, _ = _END.unpack_from(data, end)
    if count > caps.sections + 2:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{count} members, {caps.sections + 2} are allowed")
    if position + directory_bytes > end:
        raise _damaged("the archive directory lies outside the file")
    limit = position + directory_bytes
    members: dict[str, _Member] = {}
    for _ in range(count):
        member, position = _member(data, position, limit)
        if member.name in members:
            raise _damaged(f"the archive has {member.name!r} twice")
        members[member.name] = member
    if position != limit:
        raise _damaged("the archive directory has another length than it says")
    total = sum(member.size for member in members.values())
    if total > caps.total_bytes:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{total} bytes when inflated, {caps.total_bytes} are allowed")
    return members


def _member(data: bytes, position: int, limit: int) -> tuple[_Member, int]:
    """Parse one entry of the central directory; return it and where the next one begins."""
    if position + _ENTRY.size > limit:
        raise _damaged("the archive directory is cut short")
    entry = _ENTRY.unpack_from(data, position)
    magic, flags, method = entry[0], entry[3], entry[4]
    packed, size, name_bytes, extra_bytes, comment_bytes = entry[8:13]
    begin = position + _ENTRY.size
    following = begin + name_bytes + extra_bytes + comment_bytes
    if magic != b"PK\x01\x02" or following > limit:
        raise _damaged("the archive directory is damaged")
    name = data[begin : begin + name_bytes]
    if not _MEMBER_NAME.fullmatch(name):
        raise _damaged(f"the archive has a member that is not ours: {name[:100]!r}")
    if flags & _ENCRYPTED_OR_STREAMED or method not in (_STORED, _DEFLATED):
        raise _damaged(f"{name.decode()} is stored in a way that profiles do not use")
    return _Member(name.decode(), method, packed, size, entry[16]), following


def _needed(members: Mapping[str, _Member], name: str) -> _Member:
    member = members.get(name)
    if member is None:
        raise _damaged(f"{name} is missing")
    return member


def _inflate(data: bytes, member: _Member, cap: int, caps: Caps) -> bytes:
    """Return a member's bytes; never inflates past the size that the directory says, nor past *cap*."""
    if member.size > cap:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{member.name}: {member.size} bytes, {cap} are allowed")
    if member.size > MIB and member.size > member.packed * caps.ratio:
        raise ProfileRefusedError(
            Reason.TOO_LARGE, f"{member.name}: {member.size} bytes out of {member.packed}; that is a ZIP bomb"
        )
    if member.offset + _LOCAL.size > len(data):
        raise _damaged(f"{member.name} lies outside the file")
    header = _LOCAL.unpack_from(data, member.offset)
    begin = member.offset + _LOCAL.size + int(header[9]) + int(header[10])
    if header[0] != b"PK\x03\x04" or begin + member.packed > len(data):
        raise _damaged(f"{member.name} lies outside the file")
    packed = memoryview(data)[begin : begin + member.packed]
    if member.method == _STORED:
        content, whole = bytes(packed), True
    else:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = inflater.decompress(packed, member.size + 1)
        except zlib.error as error:
            raise _damaged(f"{member.name} cannot be inflated") from error
        whole = inflater.eof and not inflater.unused_data
    if not whole or len(content) != member.size:
        raise _damaged(f"{member.name} has another size than it says")
    return content


# -- showing --


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
        ("tenant", a.manifest.tenant, b.manifest.tenant),
        *_struct_fields("runtime", a.manifest.runtime, b.manifest.runtime),
        *_struct_fields("app", a.manifest.app, b.manifest.app),
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
    return [(f"{prefix}.{name}", str(getattr(a, name)), str(getattr(b, name))) for name in a.__struct_fields__]


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


def describe(profile: Profile, *, verbose: bool = False) -> list[str]:
    """Return the lines of `jumpstart profile show`: all that is inside; with *verbose* also what each record holds."""
    manifest = profile.manifest
    signed = f"key {profile.signed_by}" if profile.signed_by else "nobody that is trusted here"
    coverage = manifest.seeding.warm_coverage
    lines = [
        f"id: {manifest.id}",
        f"created: {manifest.created.isoformat()}",
        f"producer: {_shown(manifest.producer)}",
        f"signed by: {_shown(signed)}",
        f"app: {_shown(manifest.app.target)}",
        f"build: {_shown(manifest.app.build) or '-'}",
        f"sources: {_shown(manifest.app.sources) or '-'}",
        f"distributions: {_shown(manifest.app.distributions) or '-'}",
        f"tenant: {_shown(manifest.tenant)}",
        f"runtime: {' '.join(_shown(str(part)) for part in msgspec.structs.astuple(manifest.runtime))}",
        f"seeding: {manifest.seeding.requests} requests, {manifest.seeding.routes} routes, "
        f"{manifest.seeding.duration_s:.1f} s, warm coverage {'-' if coverage is None else f'{coverage:.1%}'}",
    ]
    if manifest.validation is not None:
        proof = manifest.validation
        lines.append(
            f"validation: {proof.matched} of {proof.golden} golden requests, warm coverage {proof.warm_coverage:.1%}, "
            f"first request {proof.first_request_s * 1000:.1f} ms (cold: {proof.cold_first_request_s * 1000:.1f} ms)"
        )
    else:
        lines.append("validation: none")
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
        lines.append(f"  {_shown(record.key)}")
        if verbose:
            lines.extend(f"    {_shown(label)} = {_shown(repr(value))}" for label, value in record.data.items())
            lines.extend(f"    needs {_shown(label)} = {_shown(value)}" for label, value in record.depends.items())
    lines.extend(f"  dropped {drop.key}: {_shown(drop.detail)}" for drop in dropped)
    return lines


def _shown(text: str) -> str:
    """Escape what could move a terminal's cursor or hide a line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
