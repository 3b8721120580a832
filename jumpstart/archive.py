"""
The container of a profile: a ZIP archive that any tool opens, written the same for the same content.

The archive comment, which is the last `COMMENT_BYTES` bytes of the file, is ``sha256:`` and the hex SHA-256 of all
bytes before it, so that any damage shows.

The reader is written for hostile bytes: it has its own ZIP parser (central directory only, no ZIP64, no encryption, no
data descriptors), since `zipfile` builds objects for as many members as a file claims to have.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jumpstart.errors import ProfileRefusedError
from jumpstart.records import Reason

COMMENT_PREFIX = b"sha256:"
COMMENT_BYTES = len(COMMENT_PREFIX) + 64
MIB = 1024 * 1024


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


def pack(members: Iterable[tuple[str, bytes]]) -> bytes:
    """Return an archive of *members* in their order. The same arguments give the same bytes."""
    # Only a seeder writes; a consumer's boot does not pay for these imports.
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members:
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3  # Unix, wherever it is made
            member.external_attr = 0o644 << 16
            archive.writestr(member, data, compresslevel=6)
        # A placeholder of the final length, since the length is part of what the digest covers.
        archive.comment = COMMENT_PREFIX + b"0" * 64
    body = buffer.getvalue()[:-COMMENT_BYTES]
    return body + _comment(body)


def is_as_written(data: bytes) -> bool:
    """Whether the archive's comment is the digest of the rest."""
    return len(data) > COMMENT_BYTES and _comment(memoryview(data)[:-COMMENT_BYTES]) == data[-COMMENT_BYTES:]


def _comment(body: bytes | memoryview) -> bytes:
    return COMMENT_PREFIX + hashlib.sha256(body).hexdigest().encode()


_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_STORED, _DEFLATED = 0, 8
_ENCRYPTED_OR_STREAMED = 0x1 | 0x8  # flag bits: encrypted; sizes follow the data
_MEMBER_NAME = re.compile(rb"manifest\.(json|sig)|sections/[a-z0-9][a-z0-9-]{0,63}\.(json|msgpack)")


@dataclass(frozen=True)
class ArchiveMember:
    """What the central directory says; `size` when inflated, `packed` as stored, `offset` of its local header."""

    name: str
    method: int
    packed: int
    size: int
    offset: int


def damaged(detail: str) -> ProfileRefusedError:
    """The error for bytes that are no archive of ours, or not whole."""
    return ProfileRefusedError(Reason.DAMAGED, detail)


def read_directory(data: bytes, caps: Caps) -> dict[str, ArchiveMember]:
    """Parse the central directory. Only names that a profile can have are accepted, each once."""
    end = data.rfind(b"PK\x05\x06", max(0, len(data) - _END.size - COMMENT_BYTES))
    if end < 0 or end + _END.size > len(data):
        raise damaged("not a profile, or cut short: there is no archive directory at its end")
    _, _, _, _, count, directory_bytes, position, _ = _END.unpack_from(data, end)
    if count > caps.sections + 2:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{count} members, {caps.sections + 2} are allowed")
    if position + directory_bytes > end:
        raise damaged("the archive directory lies outside the file")
    limit = position + directory_bytes
    members: dict[str, ArchiveMember] = {}
    for _ in range(count):
        member, position = _member(data, position, limit)
        if member.name in members:
            raise damaged(f"the archive has {member.name!r} twice")
        members[member.name] = member
    if position != limit:
        raise damaged("the archive directory has another length than it says")
    total = sum(member.size for member in members.values())
    if total > caps.total_bytes:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{total} bytes when inflated, {caps.total_bytes} are allowed")
    return members


def _member(data: bytes, position: int, limit: int) -> tuple[ArchiveMember, int]:
    """Parse one entry of the central directory; return it and where the next one begins."""
    if position + _ENTRY.size > limit:
        raise damaged("the archive directory is cut short")
    entry = _ENTRY.unpack_from(data, position)
    magic, flags, method = entry[0], entry[3], entry[4]
    packed, size, name_bytes, extra_bytes, comment_bytes = entry[8:13]
    begin = position + _ENTRY.size
    following = begin + name_bytes + extra_bytes + comment_bytes
    if magic != b"PK\x01\x02" or following > limit:
        raise damaged("the archive directory is damaged")
    name = data[begin : begin + name_bytes]
    if not _MEMBER_NAME.fullmatch(name):
        raise damaged(f"the archive has a member that is not ours: {name[:100]!r}")
    if flags & _ENCRYPTED_OR_STREAMED or method not in (_STORED, _DEFLATED):
        raise damaged(f"{name.decode()} is stored in a way that profiles do not use")
    return ArchiveMember(name.decode(), method, packed, size, entry[16]), following


def needed(members: Mapping[str, ArchiveMember], name: str) -> ArchiveMember:
    """Return a member; raises ProfileRefusedError when it is missing."""
    member = members.get(name)
    if member is None:
        raise damaged(f"{name} is missing")
    return member


def inflate(data: bytes, member: ArchiveMember, cap: int, caps: Caps) -> bytes:
    """Return a member's bytes; never inflates past the size that the directory says, nor past *cap*."""
    if member.size > cap:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{member.name}: {member.size} bytes, {cap} are allowed")
    if member.size > MIB and member.size > member.packed * caps.ratio:
        raise ProfileRefusedError(
            Reason.TOO_LARGE, f"{member.name}: {member.size} bytes out of {member.packed}; that is a ZIP bomb"
        )
    if member.offset + _LOCAL.size > len(data):
        raise damaged(f"{member.name} lies outside the file")
    header = _LOCAL.unpack_from(data, member.offset)
    begin = member.offset + _LOCAL.size + int(header[9]) + int(header[10])
    if header[0] != b"PK\x03\x04" or begin + member.packed > len(data):
        raise damaged(f"{member.name} lies outside the file")
    packed = memoryview(data)[begin : begin + member.packed]
    if member.method == _STORED:
        content, whole = bytes(packed), True
    else:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = inflater.decompress(packed, member.size + 1)
        except zlib.error as error:
            raise damaged(f"{member.name} cannot be inflated") from error
        whole = inflater.eof and not inflater.unused_data
    if not whole or len(content) != member.size:
        raise damaged(f"{member.name} has another size than it says")
    return content
