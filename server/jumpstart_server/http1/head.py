"""
Heads: one request line, field lines, and what they say together about framing and the connection. Functions only.

Each raises `Refused` with the status that the fault deserves, or returns None where the caller decides.
"""

from __future__ import annotations

import re

from jumpstart_server.http1.events import RequestHead
from jumpstart_server.http1.grammar import (
    FIELD_VALUES,
    HOST,
    TOKEN,
    TargetError,
    is_token,
    split_list,
    split_target,
)

METHOD_BYTES = 32  # BASELINE-CONTROL, the longest one registered, has 16
LENGTH_DIGITS = 18  # a Content-Length over 10**18 is no body that anyone sends

VERSIONS = {b"HTTP/1.1": "1.1", b"HTTP/1.0": "1.0"}
METHODS = {
    name.encode(): name
    for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND", "REPORT")
}
FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"))

# Field lines that clients repeat word for word, parsed once: a third of the time of a browser's head. Only names whose
# values are no secrets and mostly the same; emptied when full, so that it costs little where it does not help.
REPEATED = frozenset(
    b"host user-agent accept accept-language accept-encoding connection content-type content-length cache-control"
    b" pragma upgrade-insecure-requests dnt priority origin sec-fetch-dest sec-fetch-mode sec-fetch-site"
    b" sec-fetch-user sec-ch-ua sec-ch-ua-mobile sec-ch-ua-platform te via x-forwarded-proto x-forwarded-port"
    b" x-forwarded-host x-requested-with".split()
)
REPEATED_LINES = 1024
REPEATED_BYTES = 256
repeated_lines: dict[bytes, tuple[bytes, bytes]] = {}
NAMES = 1024
NAME_BYTES = 64
_names: dict[bytes, bytes] = {}  # as they come, that were found valid → in lower case
_hosts: set[bytes] = set()  # that were found valid

_VERSION = re.compile(rb"HTTP/[0-9]\.[0-9]")

# method, target, path, query, host of an absolute target, version
RequestLine = tuple[str, bytes, bytes, bytes, bytes | None, str]


class Refused(Exception):
    """Carries status and reason of a `ParseError` up to the parser; never leaves this package."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason


def parse_request_line(line: bytes) -> RequestLine:
    """RFC 9112 3: three words, one space between them."""
    words = line.split(b" ")
    if len(words) != 3:
        raise Refused(400, "the request line is not method, target and version with one space between them")
    word, target, version_word = words
    method = METHODS.get(word) or _parse_method(word)
    version = VERSIONS.get(version_word)
    if version is None:
        if _VERSION.fullmatch(version_word):
            raise Refused(505, "a version other than HTTP/1.0 and HTTP/1.1")
        raise Refused(400, "the request line does not end in a version")
    try:
        path, query, host = split_target(method, target)
    except TargetError as error:
        raise Refused(400, str(error)) from None
    return method, target, path, query, host, version


def _parse_method(word: bytes) -> str:
    if not is_token(word):
        raise Refused(400, "the method is not a token")
    if word == b"CONNECT":
        raise Refused(501, "CONNECT is for proxies")
    if len(word) > METHOD_BYTES or word != word.upper():
        raise Refused(501, "an unknown method")  # ASGI promises upper case, and methods are case-sensitive
    return word.decode()


def parse_field(line: bytes) -> tuple[bytes, bytes] | None:
    """Name in lower case and value without outer whitespace (RFC 9112 5), or None for a faulty line."""
    name, colon, value = line.partition(b":")
    lowered = _names.get(name)
    if lowered is None:
        if not name or name.translate(None, TOKEN):
            return None
        lowered = _learn(name)
    if not colon or value.translate(FIELD_VALUES) != value:
        return None
    field = lowered, value.strip(b"\t ")
    if lowered in REPEATED and len(line) <= REPEATED_BYTES:
        if len(repeated_lines) >= REPEATED_LINES:
            repeated_lines.clear()
        repeated_lines[line] = field
    return field


def _learn(name: bytes) -> bytes:
    """A valid name in lower case, for the next time too."""
    lowered = name.lower()
    if len(name) <= NAME_BYTES:
        if len(_names) >= NAMES:
            _names.clear()
        _names[name] = lowered
    return lowered


def fault_of(line: bytes) -> str:
    name, colon, _ = line.partition(b":")
    if line[0] in b"\t ":
        return "a field that begins with whitespace (folded lines are not accepted)"
    if not colon:
        return "a field without a colon"
    if not name:
        return "a field without a name"
    if name[-1] in b"\t ":
        return "whitespace between a field's name and its colon"
    if name.translate(None, TOKEN):
        return "a byte that has no place in a field name"
    return "a control character in a field value"


def assemble(line: RequestLine, fields: list[tuple[bytes, bytes]]) -> RequestHead:
    """Work out what the fields say about framing and the connection."""
    method, target, path, query, target_host, version = line
    hosts = 0
    length: int | None = None
    codings: bytes | None = None
    connection: bytes | None = None
    expect: bytes | None = None
    upgrade: bytes | None = None
    for name, value in fields:
        if name not in FRAMING:
            continue
        if name == b"host":
            hosts += 1
            if hosts > 1:
                raise Refused(400, "more than one Host")
            if value not in _hosts:
                _check_host(value)
        elif name == b"connection":
            connection = value if connection is None else connection + b"," + value
        elif name == b"content-length":
            if length is not None:
                raise Refused(400, "more than one Content-Length")
            length = _parse_length(value)
        elif name == b"transfer-encoding":
            codings = value if codings is None else codings + b"," + value
        elif name == b"expect":
            expect = value if expect is None else expect + b"," + value
        else:
            upgrade = value if upgrade is None else upgrade + b"," + value
    modern = version == "1.1"
    if modern and not hosts:
        raise Refused(400, "no Host")  # RFC 9112 3.2, also where an absolute target makes it needless
    if codings is not None:
        _check_codings(codings, modern, length)
    options = () if connection is None else split_list(connection)
    keep_alive = b"close" not in options and (modern or b"keep-alive" in options)
    if expect is not None and modern and expect.lower() != b"100-continue":
        raise Refused(417, "an expectation other than 100-continue")
    return RequestHead(
        method,
        target,
        path,
        query,
        version,
        fields if target_host is None else _with_host(fields, target_host),
        keep_alive,
        length,
        codings is not None,
        expect is not None and modern and bool(length or codings),
        upgrade if modern and b"upgrade" in options else None,
    )


def _check_host(value: bytes) -> None:
    if not HOST.fullmatch(value):
        raise Refused(400, "a Host that is not one")
    if len(value) <= REPEATED_BYTES:
        if len(_hosts) >= REPEATED_LINES:
            _hosts.clear()
        _hosts.add(value)


def _parse_length(value: bytes) -> int:
    """RFC 9112 6.3: digits only; a list, even of equal values, is refused, which it allows."""
    if not value.isdigit():  # of bytes: ASCII digits, one at least
        raise Refused(400, "a Content-Length that is not a decimal number")
    if len(value) > LENGTH_DIGITS:
        raise Refused(413, "a Content-Length beyond all bounds")
    return int(value)


def _check_codings(codings: bytes, modern: bool, length: int | None) -> None:
    """Accept exactly ``chunked`` (RFC 9112 6.1 and 6.3)."""
    if length is not None:
        raise Refused(400, "both Content-Length and Transfer-Encoding")
    if not modern:
        raise Refused(400, "Transfer-Encoding in HTTP/1.0")
    words = split_list(codings)
    if words == [b"chunked"]:
        return
    if not all(is_token(word.partition(b";")[0].rstrip(b"\t ")) for word in words):
        raise Refused(400, "a Transfer-Encoding that is not a list of codings")
    if words.count(b"chunked") > 1:
        raise Refused(400, "chunked more than once")
    raise Refused(501, "a transfer coding other than chunked")


def _with_host(fields: list[tuple[bytes, bytes]], host: bytes) -> list[tuple[bytes, bytes]]:
    """RFC 9112 3.2.2: the host of an absolute target takes the place of what Host says."""
    return [(b"host", host), *(field for field in fields if field[0] != b"host")]
