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
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from jumpstart import files
from jumpstart._version import __version__
from jumpstart.archive import (
    DEFAULT,
    MIB,
    ArchiveMember,
    Caps,
    inflate,
    is_as_written,
    needed,
    pack,
    read_directory,
)
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.lineage import Lineage
from jumpstart.records import Dropped, Reason, Record
from jumpstart.report import Refusal
from jumpstart.runtime import RuntimeKey, runtime_key
from jumpstart.trust import Signature

FORMAT = 1
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
# A value of one byte becomes an object of up to 70: by these limits a section takes up some 200 MB at most.
MAX_VALUES = 2_000_000  # in the records of a section; the largest documents that frameworks make have some 100,000
SMALL_MSGPACK = 2 * MIB  # counting would cost a small section more than it guards against
FUTURE_TOLERANCE = timedelta(minutes=5)  # clocks of a fleet differ by seconds

Encoding = Literal["json", "msgpack"]
Trust = Literal["signed", "data-only", "any"]
"""
Whose profiles are used: those by trusted keys (``signed``); others too, but without the sections that hold code or
pickles (``data-only``); everybody's, with all that is in them (``any``, which `boot` complains of each time).
"""
Sign = Callable[[bytes], Signature]
Verify = Callable[[bytes, Signature], None]

RecorderName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
MAX_TEXT = 1000  # characters of a text in a manifest
MAX_VERSIONS = 5000  # installed distributions that a manifest names
MAX_GOLDEN = 50  # golden requests; a proof asks them some times over
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
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
        versions: of the installed distributions, by name; for people.
    """

    target: _Text
    build: _Text = ""
    sources: _Text = ""
    distributions: _Text = ""
    versions: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=MAX_VERSIONS)] = {}


class Seeding(msgspec.Struct, frozen=True, kw_only=True):
    """The yield of the seeding run. `warm_coverage` is a share between 0 and 1, or None if it was not measured."""

    requests: _Count = 0
    routes: _Count = 0
    duration_s: _Amount = 0.0
    warm_coverage: _Share | None = None


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """
    A request of the corpus, and how the seeder answered it.

    Attributes:
        request: method, space, target: the key of its record in the section ``corpus``.
        shape: digest of the answer's structure, see `jumpstart_warmup.shapes`; nothing of its content.
    """

    request: _Text
    status: Annotated[int, msgspec.Meta(ge=100, le=599)]
    shape: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a fresh consumer did with the profile before it was published.

    Attributes:
        golden, matched: how many recorded requests it was asked, and how many it answered alike.
        warm_coverage: share of the golden requests, by their traffic, that ran without a cold event.
        first_request_s, cold_first_request_s: mean latency of the first request to each golden target in seconds, with
            and without the profile.
        used: share of the records that were used, or None where that was not measured.
        cold_events, cold_boot_events: in these first requests, with and without the profile.
    """

    golden: _Count
    matched: _Count
    warm_coverage: _Share
    first_request_s: _Amount
    cold_first_request_s: _Amount
    used: _Share | None = None
    cold_events: _Count = 0
    cold_boot_events: _Count = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """
    ``manifest.json``. Fields that a later Jumpstart adds are ignored; what must not be ignored raises `format`.

    Attributes:
        id: hex of a UUID4.
        created: UTC.
        producer: such as ``jumpstart 0.1.0``.
        host: name of the host that it was made on, for the operator: nothing is decided by it.
    """

    format: int
    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    created: Annotated[datetime, msgspec.Meta(tz=True)]
    producer: _Text
    host: _Text = ""
    runtime: RuntimeKey
    app: AppInfo
    tenant: _Text
    sections: list[SectionInfo]
    seeding: Seeding = Seeding()
    lineage: Lineage = Lineage()
    golden: Annotated[list[Golden], msgspec.Meta(max_length=MAX_GOLDEN)] = []
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
        trusted: whether recorders that need trust may be given their sections: it is signed, or anybody is trusted.
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
        ProfileRefusedError: it is no array at all (`Reason.MALFORMED`), of over *limit* records, or of so many values
            that they would take up far more memory than the section's bytes do.
    """
    items: Sequence[bytes | msgspec.Raw] = (
        _split_json(data, limit) if encoding == "json" else _split_msgpack(data, limit)
    )
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


def _split_json(data: bytes, limit: int) -> list[bytes]:
    """The records of a JSON array, one on each line."""
    if len(data) < 2 or data[:1] != b"[" or data[-1:] != b"]":
        raise ProfileRefusedError(Reason.MALFORMED, "the section is not a json array with one record on each line")
    _check_count(data.count(b"\n") + 1, limit)
    # Each value but the first of an array or object has a comma before it; those inside texts count too.
    _check_values(data.count(b",") + data.count(b"[") + data.count(b"{"))
    return data[1:-1].split(b",\n") if len(data) > 2 else []


def _split_msgpack(data: bytes, limit: int) -> list[msgspec.Raw]:
    """The records of a msgpack array, each still encoded."""
    if data[:1] != b"\xdd" or len(data) < 5:  # "array 32", as `encode_section` writes it
        raise ProfileRefusedError(Reason.MALFORMED, "the section is not a msgpack array of 32 bits")
    _check_count(int.from_bytes(data[1:5], "big"), limit)
    if len(data) > SMALL_MSGPACK:
        _check_values(count_msgpack_values(data, MAX_VALUES))
    try:
        return msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise ProfileRefusedError(Reason.MALFORMED, f"the section is not a msgpack array: {error}") from error


def _check_count(count: int, limit: int) -> None:
    if count > limit:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"the section has {count} records, {limit} are allowed")


def _check_values(count: int) -> None:
    if count > MAX_VALUES:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"the section has over {MAX_VALUES} values in its records")


_MSGPACK_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_MSGPACK_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # extensions: their type, and 1 to 16 bytes
_MSGPACK_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_MSGPACK_SIZED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_MSGPACK_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def count_msgpack_values(data: bytes, limit: int) -> int:
    """Count the values in *data*, up to a little more than *limit*, without making any. What is malformed ends it."""
    position, count, end = 0, 0, len(data)
    while position < end and count <= limit:
        count += 1
        kind = data[position]
        position += 1
        if 0xA0 <= kind <= 0xBF:
            position += kind & 0x1F
        elif kind in _MSGPACK_FIXED:
            position += _MSGPACK_FIXED[kind]
        elif kind in _MSGPACK_SIZED:
            width, more = _MSGPACK_SIZED[kind]
            position += width + int.from_bytes(data[position : position + width], "big") + more
        elif kind in _MSGPACK_NESTED:
            position += _MSGPACK_NESTED[kind][0]
    return count


# -- writing --


def is_plain(text: str) -> bool:
    """Whether a manifest may hold *text* as the name or version of a distribution: metadata may be anything."""
    return text.isascii() and text.isprintable() and len(text) <= MAX_TEXT


def new_manifest(
    *,
    app: AppInfo,
    tenant: str,
    sections: Iterable[EncodedSection],
    now: datetime,
    seeding: Seeding | None = None,
    lineage: Lineage | None = None,
    golden: Sequence[Golden] = (),
    validation: Validation | None = None,
) -> Manifest:
    """Return the manifest of a profile made by this process; *now* must be aware."""
    import uuid

    return Manifest(
        format=FORMAT,
        id=uuid.uuid4().hex,
        created=now.astimezone(UTC),
        producer=f"jumpstart {__version__}",
        host=os.uname().nodename[:MAX_TEXT],
        runtime=runtime_key(),
        app=app,
        tenant=tenant,
        sections=sorted((section.info for section in sections), key=lambda info: info.recorder),
        seeding=seeding or Seeding(),
        lineage=lineage or Lineage(),
        golden=list(golden),
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
    try:
        # Mode as for any output file: who may read a profile is for the umask to say.
        files.sweep(path.parent)
        files.replace(path, data)
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
    ``trust="data-only"`` such files, and unsigned ones, are accepted as not `Profile.trusted`, with ``trust="any"`` as
    if they were. *now* must be aware; *max_age* None is any age.

    Raises:
        ProfileRefusedError: the file as a whole may not be used. No other exception, whatever the bytes are.
    """
    return parse_profile(
        read_bytes(path, caps.file_bytes), trust=trust, verify=verify, now=now, max_age=max_age, caps=caps
    )


def read_bytes(path: Path, limit: int = DEFAULT.file_bytes) -> bytes:
    """Return the bytes of a regular file; raises ProfileRefusedError as `read_profile` does, of over *limit* too."""
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
    return Profile(manifest, signed_by, signed_by is not None or trust == "any", sections, refusals, caps.records)


def _check_signature(
    data: bytes,
    members: Mapping[str, ArchiveMember],
    encoded: bytes,
    trust: Trust,
    verify: Verify,
    caps: Caps,
    refusals: list[Refusal],
) -> str | None:
    """Return the id of the trusted key; without one, raise or, where that is allowed, note it."""
    try:
        member = members.get(SIGNATURE)
        if member is None:
            raise ProfileRefusedError(Reason.UNSIGNED, "the profile has no signature")
        try:
            signature = _decode_object(inflate(data, member, caps.signature_bytes, caps), Signature)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProfileRefusedError(Reason.BAD_SIGNATURE, f"the signature is malformed: {error}") from error
        try:
            verify(encoded, signature)
        except OSError as error:
            raise ProfileRefusedError(Reason.UNREADABLE, f"the trusted keys cannot be read: {error}") from error
    except ProfileRefusedError as error:
        if trust == "signed":
            raise
        if trust == "any":
            refusals.append(Refusal("signature", Reason.UNCHECKED, f"taken all the same: {error}"))
        else:
            refusals.append(Refusal("signature", error.reason, error.detail))
        return None
    return signature.key


class _Format(msgspec.Struct):
    format: int


_T = TypeVar("_T")


def _decode_object(encoded: bytes, kind: type[_T]) -> _T:
    """
    Decode JSON, refusing objects that name a field twice: readers differ in which of the two they take.

    Raises:
        MsgspecError, ValueError, RecursionError: it is not JSON, or not of that *kind*.
    """
    import json

    json.loads(encoded.decode(), object_pairs_hook=_unique_fields)  # of bytes, it would take UTF-16 too
    return msgspec.json.decode(encoded, type=kind)


def _unique_fields(pairs: list[tuple[str, object]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)[:100]!r} comes twice")


def _parse_manifest(encoded: bytes, caps: Caps) -> Manifest:
    try:
        # The version first: another version's manifest may have any shape.
        version = _decode_object(encoded, _Format).format
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
