"""What the parser is told and what it says: limits in, events out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

HeaderMap = Literal["drop", "refuse", "dangerous"]

NO_LIMIT_BYTES = 1024 * 1024  # of a line where the limit is 0: memory is bounded all the same
NO_LIMIT_FIELDS = 32768  # gunicorn's ceiling
EXCERPT_BYTES = 64


@dataclass(frozen=True)
class Limits:
    """
    What a request may cost, with gunicorn's names and defaults.

    A limit of 0 means none; lines stay below `NO_LIMIT_BYTES` even so.
    """

    limit_request_line: int = 4094  # bytes without the line end; over it 414
    limit_request_fields: int = 100  # over it 431
    limit_request_field_size: int = 8190  # bytes of a field line without its end; over it 431
    limit_request_body: int = 0  # bytes after chunked coding is undone; over it 413
    limit_request_head: int = 128 * 1024  # bytes of all lines together; 100 fields of 8 KiB are 800 KiB a connection
    limit_chunk_extensions: int = 16 * 1024  # bytes in one body, whitespace and semicolons counted; over it 400


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """
    A request line and its fields.

    Attributes:
        method: in upper case, as it came.
        target: as it came; `path` and `query` are its parts, still percent-encoded.
        http_version: ``1.0`` or ``1.1``.
        headers: names in lower case, values without outer whitespace, in order. The Host of an absolute target has
            replaced the field (RFC 9112 3.2.2). The list is the receiver's own.
        keep_alive: whether the client wants the connection kept (RFC 9112 9.3).
        expects_continue: the client may wait for ``100 Continue`` before it sends the body.
        upgrade: what Upgrade names, if Connection names Upgrade; RequestEnd follows as ever.
    """

    method: str
    target: bytes
    path: bytes
    query: bytes
    http_version: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    content_length: int | None
    chunked: bool
    expects_continue: bool
    upgrade: bytes | None

    @property
    def has_body(self) -> bool:
        """Whether `BodyData` may come before `RequestEnd`."""
        return self.chunked or bool(self.content_length)

    @property
    def origin_form(self) -> bytes:
        """Path and query, also where the target is an absolute one."""
        if self.target[:1] == b"/":
            return self.target
        return self.path + b"?" + self.query if self.query else self.path


class BodyData(msgspec.Struct, frozen=True, gc=False):
    """A piece of the body, never empty. Where pieces end says nothing."""

    data: bytes


class RequestEnd(msgspec.Struct, frozen=True, gc=False):
    """The request is complete; the parser rests until `RequestParser.resume`."""


class ParseError(msgspec.Struct, frozen=True, gc=False):
    """
    The bytes are no request that we take: answer *status*, close. Nothing follows.

    Attributes:
        reason: for the answer and the log, without bytes of the client's.
        excerpt: the first 64 bytes of the request line, as far as they have come (so no credentials from fields).
        head: the request, if its head was in order, for the access log. With 413 for a Content-Length it is here only.
    """

    status: int
    reason: str
    excerpt: bytes
    head: RequestHead | None = None

    @property
    def detail(self) -> str:
        """Reason and excerpt in one line that is safe to log."""
        return f"{self.status} {self.reason}: {ascii(self.excerpt)[1:]}"


Event = RequestHead | BodyData | RequestEnd | ParseError
