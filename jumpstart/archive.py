"""
The container of a profile: a ZIP archive that any tool opens, written the same for the same content.

The archive comment, which is the last `COMMENT_BYTES` bytes of the file, is ``sha256:`` and the hex SHA-256 of all
bytes before it, so that any damage shows.

The reader is written for hostile bytes: it has its own ZIP parser, since `zipfile` builds objects for as many members
as a file claims to have. It takes one layout only, the one that `pack` writes: members end to end from the first byte,
then the directory, then its end, then the comment. Nothing lies before, between or behind them, nothing overlaps, and
each member's own header says what the directory says, so that every tool reads the same file. The reference is
`docs/profile-format.md`.
"""

from __future__ import annotations

import hashlib
import re
import stat
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
_MEMBER_NAME = re.compile(rb"manifest\.(json|sig)|sections/[a-z0-9][a-z0-9-]{0,63}\.(json|msgpack)")


@dataclass(frozen=True)
class ArchiveMember:
    """What the directory says; `size` when inflated, `packed` as stored, `begin` where its bytes begin in the file."""

    name: str
    method: int
    packed: int
    size: int
    begin: int


def damaged(detail: str) -> ProfileRefusedError:
    """The error for bytes that are no archive of ours, or not whole."""
    return ProfileRefusedError(Reason.DAMAGED, detail)


def read_directory(data: bytes, caps: Caps) -> dict[str, ArchiveMember]:
    """Check the layout of the whole archive. Only names that a profile can have are accepted, each once."""
    end = data.rfind(b"PK\x05\x06", max(0, len(data) - _END.size - COMMENT_BYTES))
    if end < 0 or end + _END.size > len(data):
        raise damaged("not a profile, or cut short: there is no archive directory at its end")
    _, disk, first_disk, here, count, directory_bytes, position, comment_bytes = _END.unpack_from(data, end)
    if count > caps.sections + 2:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{count} members, {caps.sections + 2} are allowed")
    if disk or first_disk or here != count:
        raise damaged("the archive is one part of several")
    if position + directory_bytes != end:
        raise damaged("the archive directory does not lie where it says")
    if end + _END.size + comment_bytes < len(data):
        raise damaged("something follows the archive")
    members: dict[str, ArchiveMember] = {}
    free = 0  # where the next member begins, since they come in the order of the directory
    for _ in range(count):
        member, position, free = _member(data, position, end, free)
        if member.name in members:
            raise damaged(f"the archive has {member.name!r} twice")
        members[member.name] = member
    if position != end:
        raise damaged("the archive directory has another length than it says")
    if free != end - directory_bytes:
        raise damaged("something lies between the members and the archive directory")
    total = sum(member.size for member in members.values())
    if total > caps.total_bytes:
        raise ProfileRefusedError(Reason.TOO_LARGE, f"{total} bytes when inflated, {caps.total_bytes} are allowed")
    return members


def _member(data: bytes, position: int, limit: int, offset: int) -> tuple[ArchiveMember, int, int]:
    """Parse one entry of the directory, of the member at *offset*; return where the next entry and member begin."""
    if position + _ENTRY.size > limit:
        raise damaged("the archive directory is cut short")
    entry = _ENTRY.unpack_from(data, position)
    magic, flags, method = entry[0], entry[3], entry[4]
    packed, size, name_bytes, extra_bytes, comment_bytes = entry[8:13]
    begin = position + _ENTRY.size
    following = begin + name_bytes
    if magic != b"PK\x01\x02" or following > limit:
        raise damaged("the archive directory is damaged")
    name = data[begin:following]
    if not _MEMBER_NAME.fullmatch(name):
        raise damaged(f"the archive has a member that is not ours: {name[:100]!r}")
    label = name.decode()
    # Flags: encrypted, sizes after the data, names in other encodings. Extra fields: ZIP64, other names, other owners.
    if flags or extra_bytes or comment_bytes or entry[13] or method not in (_STORED, _DEFLATED):
        raise damaged(f"{label} is stored in a way that profiles do not use")
    if stat.S_IFMT(entry[15] >> 16) not in (0, stat.S_IFREG):
        raise damaged(f"{label} is no regular file")
    content = offset + _LOCAL.size + name_bytes
    if entry[16] != offset or content + packed > limit:
        raise damaged(f"{label} does not lie where the one before it ends")
    local = _LOCAL.unpack_from(data, offset)
    # From the version that is needed to the lengths of name and extra field, both headers have the same fields.
    if local[0] != b"PK\x03\x04" or local[1:] != entry[2:12] or data[offset + _LOCAL.size : content] != name:
        raise damaged(f"{label} has a header of its own that differs from the archive directory")
    return ArchiveMember(label, method, packed, size, content), following, content + packed


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
    packed = memoryview(data)[member.begin : member.begin + member.packed]
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
