"""
Requests: any bytes in, events out; strict, with limits, linear in time and bounded in memory.

Two paths through a head. The fast one takes a head that lies whole in one segment, as nearly all do, and accepts it or
has no opinion. The other goes line by line, whatever the segments, and is the only one that finds faults in lines. So
what is refused, and why, does not depend on how the bytes were cut; tests hold the two against each other.

Why not llhttp (httptools), which this started on: it cannot stop between two pipelined requests, shows trailers as
headers, has no limits, takes ``gzip, chunked`` and ``,chunked`` for chunked, HTTP/2.0 and HTTP/0.9 for versions, two
spaces for one, and a head without Host or with two. Putting that right in callbacks costs more than parsing here.
"""

from __future__ import annotations

import enum
import re

from jumpstart_server.http1.events import (
    EXCERPT_BYTES,
    NO_LIMIT_BYTES,
    NO_LIMIT_FIELDS,
    BodyData,
    Event,
    HeaderMap,
    Limits,
    ParseError,
    RequestEnd,
    RequestHead,
)
from jumpstart_server.http1.grammar import TOKEN
from jumpstart_server.http1.head import (
    FRAMING,
    Refused,
    RequestLine,
    assemble,
    fault_of,
    parse_field,
    parse_request_line,
    repeated_lines,
)

HIGH_WATER_BYTES = 64 * 1024  # kept for the next requests while one is served; asyncio's default buffer limit
REPEAT_BYTES = 2048  # of field lines that a connection remembers; a browser's with its cookies are about that long
EMPTY_LINES = 4  # before a request line; RFC 9112 2.2 asks for one at least
CHUNK_DIGITS = 16  # 64 bits, leading zeros counted
END = RequestEnd()
LF, UNDERSCORE = 0x0A, 0x5F

# Trailers are dropped; these would mean an attack or a muddle (RFC 9110 6.5.1: framing, routing, authentication,
# request modifiers, content format).
FORBIDDEN_TRAILERS = frozenset(
    b"content-length transfer-encoding host connection keep-alive proxy-connection te trailer upgrade expect"
    b" authorization proxy-authorization cookie content-encoding content-type content-range cache-control range"
    b" max-forwards if-match if-none-match if-modified-since if-unmodified-since if-range".split()
)
# RFC 9112 7.1.1, where whitespace before the semicolon is the only whitespace allowed outside the extension.
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})([ \t]*+;[\t -~\x80-\xff]*+)?+\r\n")


class State(enum.IntEnum):
    """Where in a request the parser is. From `RESTING` on no byte is looked at, in `CLOSED` none is kept."""

    REQUEST_LINE = 0
    FIELDS = 1
    BODY = 2
    CHUNK_SIZE = 3
    CHUNK_DATA = 4
    CHUNK_END = 5
    TRAILERS = 6
    RESTING = 7
    CLOSED = 8


# Plain module names: to look up an enum's member costs as much again as the comparison.
REQUEST_LINE, FIELDS, BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILERS, RESTING, CLOSED = State


class RequestParser:
    """
    The requests of one connection, one after the other. Not thread-safe: one caller at a time.

    After `RequestEnd` the parser rests: bytes are kept, and looked at by `resume`, which the shell calls when it has
    answered. After `ParseError`, and after a request that ends the connection (`RequestHead.keep_alive` false), bytes
    are dropped.
    """

    __slots__ = (
        "_body_bytes",
        "_data",
        "_eof",
        "_extension_bytes",
        "_field_limit",
        "_fields",
        "_head",
        "_head_bytes",
        "_known_block",
        "_known_fields",
        "_known_first",
        "_known_framing",
        "_known_head",
        "_known_line",
        "_line",
        "_line_limit",
        "_opening",
        "_pending",
        "_pending_bytes",
        "_pos",
        "_refuse_underscores",
        "_remaining",
        "_request_line",
        "_size_limit",
        "_skipped",
        "_state",
        "_take_underscores",
        "_taken",
        "limits",
    )

    def __init__(self, limits: Limits | None = None, header_map: HeaderMap = "drop") -> None:
        """
        Args:
            limits: the defaults of `Limits` if None.
            header_map: names with ``_``, which WSGI cannot tell from names with ``-``: left out, refused with 400, or
                taken, as in gunicorn.
        """
        self.limits = limits = limits or Limits()
        self._line_limit = min(limits.limit_request_line or NO_LIMIT_BYTES, limits.limit_request_head)
        self._field_limit = limits.limit_request_fields or NO_LIMIT_FIELDS
        self._size_limit = limits.limit_request_field_size or NO_LIMIT_BYTES
        self._refuse_underscores = header_map == "refuse"
        self._take_underscores = header_map == "dangerous"
        self._data = b""  # the segment in hand, read up to _pos
        self._pos = 0
        self._pending: list[bytes] = []  # segments that came while the parser rested
        self._pending_bytes = 0
        self._eof = False
        self._line = bytearray()  # of a line whose end has not come
        self._fields: list[tuple[bytes, bytes]] = []
        self._state: State = REQUEST_LINE
        # The last head of this connection. Clients repeat their field lines, and often the request line too; to compare
        # costs next to nothing, to parse is most of the work. Per connection: they may hold secrets.
        self._known_block: bytes | None = None  # the field lines, then what they say
        self._known_fields: list[tuple[bytes, bytes]] = []
        self._known_framing: list[tuple[bytes, bytes]] = []  # those of the fields that matter to framing
        self._known_head: RequestHead | None = None
        self._known_first = b""  # the request line, and its words
        self._known_line: RequestLine | None = None
        self._start_request()

    def _start_request(self) -> None:
        self._state = REQUEST_LINE
        self._opening = b""  # the request line, for `ParseError.excerpt`
        self._head: RequestHead | None = None
        self._request_line: RequestLine | None = None
        self._skipped = 0  # empty lines before the request line
        self._head_bytes = 0  # of all lines of the head, then of the trailers
        self._taken = 0  # field lines or trailers so far, those left out too

    # What the shell asks

    @property
    def state(self) -> State:
        """For logs and timers: which of the shell's time limits applies."""
        return self._state

    @property
    def buffered_bytes(self) -> int:
        """Bytes held that no event has carried: at most a line, and what came after the request was complete."""
        return len(self._line) + len(self._data) - self._pos + self._pending_bytes

    @property
    def wants_data(self) -> bool:
        """Whether the shell should go on reading; memory is bounded only if it heeds this."""
        return self._state != RESTING or self.buffered_bytes < HIGH_WATER_BYTES

    @property
    def is_idle(self) -> bool:
        """Between requests, with not a byte of the next one: closing now harms nobody."""
        return self._state == REQUEST_LINE and not self._line

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes of the connection, in segments of any size, and return what they complete."""
        if self._state >= RESTING:
            if self._state == RESTING and data:
                self._pending.append(data)
                self._pending_bytes += len(data)
            return []
        self._data = data
        self._pos = 0
        return self._advance()

    def resume(self) -> list[Event]:
        """Go on to the next request, with the bytes that have come already; nothing unless the parser rests."""
        if self._state != RESTING:
            return []
        if self._head is not None and not self._head.keep_alive:
            self._close()  # it asked for an upgrade, which was not granted, and for the end
            return []
        self._start_request()
        if self._pending:
            self._data = b"".join([self._data[self._pos :], *self._pending])
            self._pos = 0
            self._pending.clear()
            self._pending_bytes = 0
        elif self._pos == len(self._data) and not self._eof:
            self._data = b""
            self._pos = 0
            return []
        return self._advance()

    def eof(self) -> list[Event]:
        """
        The client sends no more. A request that is not whole becomes a `ParseError`, never a `RequestEnd`.

        While the parser rests this is only noted: complete requests that wait are still served.
        """
        self._eof = True
        return self._cut_short() if self._state < RESTING else []

    def take_rest(self) -> bytes:
        """Hand over the bytes after the request, to whoever speaks the upgraded protocol, and close the parser."""
        rest = b"".join([self._data[self._pos :], *self._pending])
        self._close()
        return rest

    # The machine

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        try:
            state = self._state
            if state <= FIELDS:
                head = None if state == FIELDS or self._line else self._head_at_once()
                if head is None:
                    head = self._head_by_lines()
                if head is not None:
                    if head.content_length or head.chunked:
                        self._begin_body(head, events)
                    else:
                        self._head = head
                        events = [head]
                        self._end_request(head, events)
            else:
                assert self._head is not None
                if state == BODY:
                    self._read_body(self._head, events)
                else:
                    self._read_chunks(self._head, events)
        except Refused as refusal:
            events.append(self._fail(refusal.status, refusal.reason))
        if self._eof and self._state < RESTING:
            events += self._cut_short()
        return events

    def _begin_body(self, head: RequestHead, events: list[Event]) -> None:
        self._head = head
        if head.chunked:
            events.append(head)
            self._state = CHUNK_SIZE
            self._body_bytes = 0
            self._extension_bytes = 0
            self._head_bytes = 0
            self._taken = 0
            self._read_chunks(head, events)
        else:
            assert head.content_length is not None
            if 0 < self.limits.limit_request_body < head.content_length:
                raise Refused(413, "the body is over limit_request_body")
            events.append(head)
            self._state = BODY
            self._remaining = head.content_length
            self._read_body(head, events)

    def _end_request(self, head: RequestHead, events: list[Event]) -> None:
        events.append(END)
        if head.keep_alive or head.upgrade is not None:
            self._state = RESTING
        else:
            self._close()

    def _fail(self, status: int, reason: str) -> ParseError:
        excerpt = self._opening or bytes(self._line[:EXCERPT_BYTES]) or self._data[self._pos :]
        error = ParseError(status, reason, excerpt[:EXCERPT_BYTES], self._head)
        self._close()
        return error

    def _close(self) -> None:
        self._state = CLOSED
        self._data = b""
        self._pos = 0
        self._line.clear()
        self._fields = []
        self._pending.clear()
        self._pending_bytes = 0

    def _cut_short(self) -> list[Event]:
        if self.is_idle:
            self._close()
            return []
        return [self._fail(400, f"the client left in the middle of the {'head' if self._state <= FIELDS else 'body'}")]

    # Heads

    def _head_at_once(self) -> RequestHead | None:
        """The head, if all of it is in hand and no line has a fault; else None, and nothing has changed."""
        data = self._data
        start = self._pos
        end = data.find(b"\r\n\r\n", start)
        if end < 0 or end - start > self.limits.limit_request_head:
            return None
        first, _, block = data[start:end].partition(b"\r\n")
        line = self._known_line
        if line is None or first != self._known_first:
            if not first or first[0] not in TOKEN or LF in first or len(first) > self._line_limit:
                return None
            self._opening = first
            line = parse_request_line(first)
        known = self._known_head
        if known is None or line[4] is not None or line[5] != known.http_version:
            known = None  # the same fields would mean something else
        elif block == self._known_block:
            self._pos = end + 4
            self._opening = self._known_first = first
            self._known_line = line
            return self._head_like(known, line, self._known_fields.copy())
        self._opening = first
        lines = block.split(b"\r\n")
        if len(lines) > self._field_limit:
            return None
        if len(block) > self._size_limit and max(map(len, lines)) > self._size_limit:
            return None
        fields: list[tuple[bytes, bytes]] = []
        repeated = repeated_lines.get
        for text in lines:
            field = repeated(text)
            if field is None:
                field = parse_field(text)
                if field is None:
                    return None
                if UNDERSCORE in field[0] and not self._take_underscores:
                    if self._refuse_underscores:
                        return None
                    continue
            fields.append(field)
        self._pos = end + 4
        framing = [field for field in fields if field[0] in FRAMING]
        if known is not None and framing == self._known_framing:
            head = self._head_like(known, line, fields)
        else:
            head = assemble(line, fields)
        if line[4] is None and len(block) <= REPEAT_BYTES:
            self._known_block = block
            self._known_fields = fields.copy()
            self._known_framing = framing
            self._known_head = head
            self._known_first = first
            self._known_line = line
        return head

    @staticmethod
    def _head_like(known: RequestHead, line: RequestLine, fields: list[tuple[bytes, bytes]]) -> RequestHead:
        """A head that says of framing and connection what *known* says."""
        method, target, path, query, _, version = line
        return RequestHead(
            method,
            target,
            path,
            query,
            version,
            fields,
            known.keep_alive,
            known.content_length,
            known.chunked,
            known.expects_continue,
            known.upgrade,
        )

    def _head_by_lines(self) -> RequestHead | None:
        """The head, once its last line has come. This is where lines are refused."""
        if self._state == REQUEST_LINE:
            line = self._take_request_line()
            if line is None:
                return None
            self._opening = line
            self._request_line = parse_request_line(line)
            self._head_bytes = len(line) + 2
            self._fields = []
            self._state = FIELDS
        while line := self._take_field_line():
            field = parse_field(line)
            if field is None:
                raise Refused(400, fault_of(line))
            if UNDERSCORE in field[0] and not self._take_underscores:
                if self._refuse_underscores:
                    raise Refused(400, "a field name with an underscore")
                continue
            self._fields.append(field)
        if line is None:
            return None
        assert self._request_line is not None
        fields, self._fields = self._fields, []
        return assemble(self._request_line, fields)

    def _take_request_line(self) -> bytes | None:
        while True:
            if not self._line and self._pos < len(self._data):
                first = self._data[self._pos]
                if first not in TOKEN and first != 0x0D:
                    # At once, because a TLS handshake or noise may have no line end.
                    raise Refused(400, "this does not begin like a request")
            line = self._take_line(self._line_limit, 414, "the request line is over limit_request_line")
            if line or line is None:
                return line
            self._skipped += 1
            if self._skipped > EMPTY_LINES:
                raise Refused(400, "empty lines instead of a request")

    def _take_field_line(self) -> bytes | None:
        """The next line of head or trailers; empty at their end, None if it has not come."""
        room = max(self.limits.limit_request_head - self._head_bytes, 0)
        if self._size_limit <= room:
            line = self._take_line(self._size_limit, 431, "a field is over limit_request_field_size")
        else:
            line = self._take_line(room, 431, "the head is over limit_request_head")
        if line:
            self._head_bytes += len(line) + 2
            self._taken += 1
            if self._taken > self._field_limit:
                raise Refused(431, "more fields than limit_request_fields")
        return line

    def _take_line(
        self, limit: int, status: int, too_long: str, bare: str = "a line that ends in LF without CR"
    ) -> bytes | None:
        """
        The next line without its CRLF, or None if its end has not come.

        Length comes before everything else, so that a line in pieces is refused for what it would be in one.
        """
        data = self._data
        end = data.find(b"\n", self._pos)
        if end < 0:
            self._line += data[self._pos :]
            self._pos = len(data)
            if len(self._line) - self._line.endswith(b"\r") > limit:
                raise Refused(status, too_long)
            return None
        line = data[self._pos : end]
        if self._line:
            self._line += line
            line = bytes(self._line)
        if len(line) - line.endswith(b"\r") > limit:
            raise Refused(status, too_long)
        if not line.endswith(b"\r"):
            raise Refused(400, bare)
        self._pos = end + 1
        self._line.clear()
        return line[:-1]

    # Bodies

    def _read_body(self, head: RequestHead, events: list[Event]) -> None:
        data = self._data
        start = self._pos
        piece = data[start : start + self._remaining]  # no copy if it is all of data
        if piece:
            events.append(BodyData(piece))
            self._pos = start + len(piece)
            self._remaining -= len(piece)
        if not self._remaining:
            self._end_request(head, events)

    def _read_chunks(self, head: RequestHead, events: list[Event]) -> None:
        pieces: list[bytes] = []  # a segment of many small chunks is one event
        try:
            ended = self._take_chunks(pieces)
        finally:
            if pieces:
                events.append(BodyData(pieces[0] if len(pieces) == 1 else b"".join(pieces)))
        if ended:
            self._end_request(head, events)

    def _take_chunks(self, pieces: list[bytes]) -> bool:
        """Append chunk data to *pieces*; True after the last trailer (RFC 9112 7.1)."""
        data = self._data
        while True:
            if self._state == CHUNK_SIZE:
                size = self._take_chunk_size()
                if size is None:
                    return False
                end = self._pos + size
                if size and data.startswith(b"\r\n", end):  # the whole chunk is in hand
                    pieces.append(data[self._pos : end])
                    self._pos = end + 2
                    continue
                self._remaining = size
                self._state = CHUNK_DATA if size else TRAILERS
            elif self._state == CHUNK_DATA:
                piece = data[self._pos : self._pos + self._remaining]
                if not piece:
                    return False
                pieces.append(piece)
                self._pos += len(piece)
                self._remaining -= len(piece)
                if not self._remaining:
                    self._state = CHUNK_END
            elif self._state == CHUNK_END:
                if not self._line and data.startswith(b"\r\n", self._pos):
                    self._pos += 2
                else:
                    fault = "chunk data longer than its size, or without CRLF after it"
                    if self._take_line(0, 400, fault, fault) is None:
                        return False
                self._state = CHUNK_SIZE
            else:
                while line := self._take_field_line():
                    field = parse_field(line)
                    if field is None:
                        raise Refused(400, fault_of(line))
                    if field[0] in FORBIDDEN_TRAILERS:
                        raise Refused(400, "a trailer with a name that is forbidden there")
                return line is not None

    def _take_chunk_size(self) -> int | None:
        match = None if self._line else _CHUNK.match(self._data, self._pos)
        if match is not None:
            self._pos = match.end()
        else:
            room = self.limits.limit_chunk_extensions - self._extension_bytes
            line = self._take_line(CHUNK_DIGITS + room, 400, "chunk extensions over limit_chunk_extensions")
            if line is None:
                return None
            match = _CHUNK.fullmatch(line + b"\r\n")
            if match is None:
                raise Refused(400, "a chunk size that is not 1 to 16 hexadecimal digits, or a faulty extension")
        digits, extension = match.groups()
        if extension:
            self._extension_bytes += len(extension)
            if self._extension_bytes > self.limits.limit_chunk_extensions:
                raise Refused(400, "chunk extensions over limit_chunk_extensions")
        size = int(digits, 16)
        self._body_bytes += size
        if 0 < self.limits.limit_request_body < self._body_bytes:
            raise Refused(413, "the body is over limit_request_body")
        return size
