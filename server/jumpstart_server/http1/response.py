"""
Responses: what an app says in, well-framed bytes out. The app's word on framing is checked and never passed on blindly.

How a body ends (RFC 9112 6.3), decided once in `ResponseFramer.head`:

=====================================  ======================================================
HEAD, 1xx, 204, 205, 304               at once; body bytes are dropped
the app or *body_length* gave a size   after so many bytes; more are cut, fewer abort
HTTP/1.1                               with the last chunk
HTTP/1.0                               with the connection
=====================================  ======================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Literal

from jumpstart.errors import JumpstartError
from jumpstart_server.http1.grammar import is_token, split_list

Fields = Iterable[tuple[bytes, bytes]]

JOIN_BYTES = 16 * 1024  # up to here to copy a chunk costs less than another buffer in sendmsg
CR, LF, NUL = 0x0D, 0x0A, 0x00  # numbers: see grammar.py
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"Connection: close\r\n\r\n"
_KEEP_ALIVE = b"Connection: keep-alive\r\n\r\n"
NAMES = 1024  # remembered at most, of fields and of status lines

# What a field name of the app's means to us.
_PLAIN, _LENGTH, _CONNECTION, _HOP, _DATE, _SERVER, _COOKIE = range(7)
_MEANINGS = {
    b"content-length": _LENGTH,
    b"connection": _CONNECTION,
    b"date": _DATE,
    b"server": _SERVER,
    b"set-cookie": _COOKIE,  # a secret of one client: not to be remembered
    # Hop by hop: ours to say, not an app's (PEP 3333, RFC 9110 7.6.1). Trailers are announced by nobody here.
    b"transfer-encoding": _HOP,
    b"keep-alive": _HOP,
    b"proxy-connection": _HOP,
    b"upgrade": _HOP,
    b"te": _HOP,
    b"trailer": _HOP,
}
_meanings: dict[bytes, int] = {}
_status_lines: dict[tuple[int, bytes | None], bytes] = {}
_statuses: dict[str, tuple[int, bytes]] = {}
_keep_alive: dict[int, bytes] = {}

# Status line and fields as they go out; Content-Length; 1 for Date and 2 for Server; Connection: close; fields dropped.
_Prepared = tuple[bytes, int | None, int, bool, tuple[bytes, ...]]
_prepared: dict[tuple[int, bytes | None, tuple[tuple[bytes, bytes], ...]], _Prepared] = {}
PREPARED_BYTES = 512  # of a head that is remembered, in case the app says the same again; half the cost of making one
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class ResponseError(JumpstartError):
    """A response that cannot be sent as it is: the app's fault, or its server's. For the app's author."""


def http_date(timestamp: float) -> bytes:
    """The value of Date for a time in seconds since 1970 (RFC 9110 5.6.7)."""
    return formatdate(timestamp, usegmt=True).encode()


class DefaultFields:
    """
    Fields that each response gets: Date and Server unless the app sets its own, and others of the operator's.

    Immutable and shared by all connections; the shell makes a new one each second, for the date.
    """

    __slots__ = ("blocks",)

    def __init__(self, date: bytes = b"", server: bytes = b"", extra: Fields = ()) -> None:
        """
        Args:
            date: value of Date, from `http_date`; empty for none.
            server: value of Server; empty for none.

        Raises:
            ResponseError: a name or value that is none.
        """
        others = b"".join(b"%b: %b\r\n" % _checked(name, value) for name, value in extra)
        dated = b"Date: %b\r\n" % _checked(b"date", date)[1] if date else b""
        named = b"Server: %b\r\n" % _checked(b"server", server)[1] if server else b""
        # Indexed by what the app has set: 1 for Date, 2 for Server.
        self.blocks = (dated + named + others, named + others, dated + others, others)


NO_DEFAULTS = DefaultFields()


class ResponseFramer:
    """
    One response: `head`, then `body` any number of times, then `end`. Not thread-safe: one caller at a time.

    Attributes:
        must_close: the connection must be closed after the response; final only after `end`. The shell may set it
            before `head` (a drain, an unread body).
        is_incomplete: `end` came before the announced length. Close without further bytes, so that the client sees it.
        surplus_bytes: body bytes beyond Content-Length, which were cut. Worth a line in the log.
        sent_bytes: of the body, that were given out so far, without those of the chunked coding.
        dropped_fields: names of the app's hop-by-hop fields, which were left out. Worth a line in the log, once.
    """

    __slots__ = (
        "_ended",
        "_framing",
        "_is_head",
        "_modern",
        "_remaining",
        "dropped_fields",
        "head_sent",
        "is_incomplete",
        "must_close",
        "sent_bytes",
        "status",
        "surplus_bytes",
    )

    def __init__(self, method: str, http_version: str = "1.1", keep_alive: bool = True) -> None:
        """
        Args:
            keep_alive: `RequestHead.keep_alive`, and the server wants it too (it is not draining, say).
        """
        self._is_head = method == "HEAD"
        self._modern = http_version == "1.1"
        self._framing: Literal["", "none", "length", "chunked", "close"] = ""
        self._remaining = 0
        self._ended = False
        self.head_sent = False
        self.must_close = not keep_alive
        self.is_incomplete = False
        self.surplus_bytes = 0
        self.sent_bytes = 0
        self.dropped_fields: tuple[bytes, ...] = ()
        self.status = 0

    @property
    def is_chunked(self) -> bool:
        """Whether the body goes in chunks; if not, `plain` may stand for `body` (sendfile)."""
        return self._framing == "chunked"

    @property
    def takes_body(self) -> bool:
        """Whether body bytes go out at all; false before `head`."""
        return self._framing not in ("", "none")

    @property
    def ends_with_close(self) -> bool:
        """Whether only the connection's close ends the body, so that a cut must be a reset to be seen."""
        return self._framing == "close"

    def interim(self, status: int = 100, headers: Fields = ()) -> bytes:
        """
        An interim response, 100 or 103, to be sent before the head; empty for HTTP/1.0 (RFC 9110 15.2).

        Raises:
            ResponseError: the head was sent, or a field is none.
        """
        if self.head_sent:
            raise ResponseError(f"an interim response ({status}) after the head of the response")
        if not self._modern:
            return b""
        if status == 100:
            return CONTINUE
        fields = b"".join(b"%b: %b\r\n" % _checked(name, value) for name, value in headers)
        return _status_line(status, None) + fields + b"\r\n"

    def head(
        self,
        status: int,
        headers: Fields,
        *,
        reason: bytes | None = None,
        body_length: int | None = None,
        defaults: DefaultFields = NO_DEFAULTS,
        keep_alive_timeout_s: int = 0,
    ) -> bytes:
        """
        Decide the framing; return status line and fields.

        Args:
            headers: the app's, in any case, in order; names and values are bytes.
            reason: the app's phrase; None for the usual one.
            body_length: of the whole body, where the caller has it already. Content-Length, if the app gave none.
            keep_alive_timeout_s: how long the server keeps an idle connection, told to the client; 0 to say nothing.

        Raises:
            ResponseError: a status below 200, after which the client would wait for another; a status, name or value
                that would break the message; two lengths; a second head.
                Nothing has changed: an error page may be sent with this framer.
        """
        if self.head_sent:
            raise ResponseError("a second head for one response")
        headers = tuple(headers)
        try:
            prepared = _prepared.get((status, reason, headers))
        except TypeError:  # a list among them, say, which is as good
            prepared = None
        if prepared is None:
            prepared = _prepare(status, reason, headers)
        start, length, own, says_close, dropped = prepared
        close = self.must_close or says_close
        out = [start]
        if length is not None and status != 204 and status != 205:
            out.append(b"Content-Length: %d\r\n" % length)  # RFC 9110 8.6; of HEAD and 304 as for GET and 200

        if self._is_head or status == 204 or status == 304:
            self._framing = "none"
        elif status == 205:
            self._framing = "none"
            out.append(b"Content-Length: 0\r\n")  # RFC 9110 15.3.6
        elif length is not None:
            self._framing = "length"
            self._remaining = length
        elif body_length is not None:
            self._framing = "length"
            self._remaining = body_length
            out.append(b"Content-Length: %d\r\n" % body_length)
        elif self._modern:
            self._framing = "chunked"
            out.append(b"Transfer-Encoding: chunked\r\n")
        else:
            self._framing = "close"
            close = True
        out.append(defaults.blocks[own])
        if close:
            out.append(_CLOSE)
        elif keep_alive_timeout_s:
            out.append(_keep_alive.get(keep_alive_timeout_s) or _keep_alive_fields(keep_alive_timeout_s))
        else:
            out.append(b"\r\n" if self._modern else _KEEP_ALIVE)
        self.status = status
        self.must_close = close
        self.dropped_fields = dropped
        self.head_sent = True
        return b"".join(out)

    def body(self, data: bytes) -> tuple[bytes, ...]:
        """
        What to send for a piece of the body: no buffer, one, or three. Large data is not copied.

        Raises:
            ResponseError: before `head` or after `end`.
        """
        framing = self._framing
        if not framing or self._ended:
            raise ResponseError("body data before the head" if not framing else "body data after the end")
        size = len(data)
        if not size or framing == "none":
            return ()  # an empty chunk would end the body
        if framing == "chunked":
            self.sent_bytes += size
            if size <= JOIN_BYTES:
                return (b"%x\r\n%b\r\n" % (size, data),)
            return b"%x\r\n" % size, data, b"\r\n"
        if framing == "length":
            if size > self._remaining:
                self.surplus_bytes += size - self._remaining
                self.sent_bytes += self._remaining
                data = data[: self._remaining]
                self._remaining = 0
                return (data,) if data else ()
            self._remaining -= size
        self.sent_bytes += size
        return (data,)

    def plain(self, size: int) -> int:
        """
        Account for *size* body bytes that go out some other way (sendfile); return how many of them may.

        Raises:
            ResponseError: before `head`, after `end`, or the body goes in chunks.
        """
        if not self._framing or self._ended or self.is_chunked:
            raise ResponseError("plain bytes have no place here")
        if self._framing == "none":
            return 0
        if self._framing == "length":
            self.surplus_bytes += max(size - self._remaining, 0)
            size = min(size, self._remaining)
            self._remaining -= size
        self.sent_bytes += size
        return size

    def end(self) -> bytes:
        """
        End the response; return its last bytes, often none. A second call does nothing.

        An app that failed in the middle must not be ended: call `abort`.

        Raises:
            ResponseError: before `head`.
        """
        if not self._framing:
            raise ResponseError("the end of a response before its head")
        if self._ended:
            return b""
        self._ended = True
        if self._framing == "chunked":
            return LAST_CHUNK
        if self._framing == "length" and self._remaining:
            self.is_incomplete = self.must_close = True
        return b""

    def abort(self) -> None:
        """The body will not be whole: `must_close` becomes true, and no last chunk is ever given out."""
        if not self._ended:
            self._ended = True
            self.must_close = True
            self.is_incomplete = self.head_sent and self._framing != "none"


def encode_status(status: str) -> tuple[int, bytes]:
    """
    Code and phrase of a WSGI status such as ``200 OK``, for `ResponseFramer.head`.

    Raises:
        ResponseError: it is not three digits, alone or with a space and a phrase (PEP 3333).
    """
    try:
        return _statuses[status]
    except (KeyError, TypeError):
        pass
    if not isinstance(status, str):
        raise ResponseError(f"the status must be str, not {type(status).__name__}")
    code, _, phrase = status.partition(" ")
    if not (len(code) == 3 and code.isascii() and code.isdecimal()):
        raise ResponseError(f"status {status!r} does not begin with a number of three digits")
    parsed = int(code), _latin(phrase, "the status")
    if len(_statuses) < NAMES and len(status) < 256:
        _statuses[status] = parsed
    return parsed


def encode_fields(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """
    Names and values of a WSGI app as bytes, for `ResponseFramer.head`.

    Raises:
        ResponseError: one of them is no str, or has a character that Latin-1 has not (PEP 3333).
    """
    try:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    except (AttributeError, UnicodeEncodeError, TypeError, ValueError):
        pass
    for field in headers:  # slowly, to name the culprit
        if not (isinstance(field, tuple) and len(field) == 2):
            raise ResponseError(f"{field!r} is not a header: it must be a tuple of name and value")
        for text in field:
            if not isinstance(text, str):
                raise ResponseError(f"header {field[0]!r}: name and value must be str, not {type(text).__name__}")
            _latin(text, f"header {field[0]!r}")
    raise ResponseError("the headers are not a list of tuples of name and value")


def error_response(
    status: int,
    detail: str = "",
    *,
    method: str = "GET",
    headers: Fields = (),
    defaults: DefaultFields = NO_DEFAULTS,
) -> bytes:
    """A whole plain-text response of our own with ``Connection: close``; without the body for HEAD."""
    phrase = _PHRASES.get(status, b"Error").decode()
    text = f"{status} {phrase}{': ' if detail else ''}{detail}\n".encode()
    framer = ResponseFramer(method, keep_alive=False)
    fields = [(b"Content-Type", b"text/plain; charset=utf-8"), (b"Content-Length", b"%d" % len(text)), *headers]
    return b"".join([framer.head(status, fields, defaults=defaults), *framer.body(text)])


def _prepare(status: int, reason: bytes | None, headers: tuple[tuple[bytes, bytes], ...]) -> _Prepared:
    """What the app says in a head, checked."""
    if 100 <= status < 200:
        raise ResponseError(f"status {status} announces a response and is none: no other would follow")
    length: int | None = None
    own = 0
    close = False
    private = False
    dropped: list[bytes] = []
    out = [_status_lines.get((status, reason)) or _status_line(status, reason)]
    for field in headers:
        name, value = field
        meaning = _meanings.get(name)
        if meaning is None:
            meaning = _learn(name)
        if meaning:
            if meaning == _LENGTH:
                length = _parse_length(value, length)
                continue
            if meaning == _DATE:
                own |= 1
            elif meaning == _SERVER:
                own |= 2
            elif meaning == _COOKIE:
                private = True
            else:
                if meaning == _CONNECTION and b"close" in split_list(value):
                    close = True
                else:
                    dropped.append(name)
                continue
        out.append(b"%b: %b\r\n" % field)
    block = b"".join(out)
    # One CR and one LF for each line and none inside: all fields checked for injection at once.
    if block.count(b"\n") != len(out) or block.count(b"\r") != len(out) or NUL in block:
        raise ResponseError(_name_the_fault(headers))
    prepared = block, length, own, close, tuple(dropped)
    if len(block) <= PREPARED_BYTES and not private:
        if len(_prepared) >= NAMES:
            _prepared.clear()
        try:
            _prepared[status, reason, headers] = prepared
        except TypeError:
            pass  # not hashable
    return prepared


def _status_line(status: int, reason: bytes | None) -> bytes:
    if not 100 <= status <= 999:
        raise ResponseError(f"status {status} is not between 100 and 999")
    phrase = _PHRASES.get(status, b"") if reason is None else reason
    if CR in phrase or LF in phrase or NUL in phrase:
        raise ResponseError(f"the reason phrase {phrase!r} holds a line end or NUL")
    line = b"HTTP/1.1 %d %b\r\n" % (status, phrase)
    if len(_status_lines) < NAMES and len(line) < 256:
        _status_lines[status, reason] = line
    return line


def _keep_alive_fields(timeout_s: int) -> bytes:
    fields = b"Connection: keep-alive\r\nKeep-Alive: timeout=%d\r\n\r\n" % timeout_s
    if len(_keep_alive) < NAMES:
        _keep_alive[timeout_s] = fields
    return fields


def _latin(text: str, what: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as error:
        raise ResponseError(f"{what} has a character that Latin-1 has not: {text[error.start]!r}") from None


def _learn(name: bytes) -> int:
    if not is_token(name):
        raise ResponseError(f"{name!r} is not a header name")
    meaning = _MEANINGS.get(name.lower(), _PLAIN)
    if len(_meanings) < NAMES and len(name) < 256:
        _meanings[name] = meaning
    return meaning


def _parse_length(value: bytes, seen: int | None) -> int:
    digits = value.strip(b"\t ")
    if not digits.isdigit():
        raise ResponseError(f"Content-Length {value!r} is not a decimal number")
    length = int(digits)
    if seen is not None and seen != length:
        raise ResponseError(f"two values for Content-Length, {seen} and {length}")
    return length


def _checked(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if not is_token(name):
        raise ResponseError(f"{name!r} is not a header name")
    if CR in value or LF in value or NUL in value:
        raise ResponseError(_holds_line_end(name))
    return name, value


def _name_the_fault(headers: Fields) -> str:
    for name, value in headers:
        if CR in value or LF in value or NUL in value:
            return _holds_line_end(name)
    return "a header value holds a line end or NUL"


def _holds_line_end(name: bytes) -> str:
    return f"the value of {name.decode('latin-1')} holds a line end or NUL"  # not the value: it may be a secret
