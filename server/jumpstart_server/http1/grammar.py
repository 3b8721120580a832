"""
The words of HTTP/1.1, as tables and patterns: tokens, field values, hosts, request targets.

Tables are strings of the bytes that are allowed: ``data.translate(None, TABLE)`` is what is left when they are taken
away, so it is empty for good data. That is one pass in C, several times faster than a regular expression. A single byte
is looked for as a number, ``0x25 in data``: with ``b"%" in data`` it costs nine times as much, because Python tries the
other reading first.
"""

from __future__ import annotations

import re

TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # RFC 9110 5.6.2, tchar
VCHAR = bytes(range(0x21, 0x7F))
FIELD_VALUE = b"\t " + VCHAR + bytes(range(0x80, 0x100))  # RFC 9110 5.5, field-vchar, SP, HTAB; no other control

# Where the data is short, taking bytes away costs less than half of itself: the rest makes a table of *TABLE* anew each
# time. These are made once, and change the bytes that are not allowed and no others. So good data is equal to
# ``data.translate(TABLE)``; it is the same object then, which takes no time to see.


def _marking(allowed: bytes) -> bytes:
    return bytes(byte if byte in allowed else byte ^ 0x80 for byte in range(256))


FIELD_VALUES = _marking(FIELD_VALUE)

# uri-host [":" port] of RFC 9110 7.2 with the host of RFC 3986 3.2.2. No userinfo. It may be empty.
HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+(?:%25[0-9A-Za-z\-._~]+)?\]|(?:[0-9A-Za-z\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?"
)
ABSOLUTE = re.compile(rb"https?://([^/?#]+)(/[^?#]*)?(?:\?([^#]*))?", re.IGNORECASE)

# Bytes of a path and of a query that pass. RFC 3986 would refuse "<>\^`{|} too, but browsers send some of them raw in
# queries (the URL standard's percent-encode sets) and every server in front of us passes them. A fragment never
# travels (RFC 9112 3.2.1). A backslash in a path is a slash to some and a letter to others, so neither; raw bytes of
# 0x80 and above are no URI (RFC 3986 2).
PATH = VCHAR.translate(None, b"#\\?")
QUERY = VCHAR.translate(None, b"#")
PERCENT = 0x25
PATHS = _marking(PATH)
QUERIES = _marking(QUERY)


def is_token(name: bytes) -> bool:
    """Whether *name* is a token (RFC 9110 5.6.2): one allowed byte or more."""
    return bool(name) and not name.translate(None, TOKEN)


def split_list(value: bytes) -> list[bytes]:
    """The elements of a comma-separated list in lower case, empty ones kept (RFC 9110 5.6.1)."""
    return [element.strip(b" \t").lower() for element in value.split(b",")]


class TargetError(ValueError):
    """A request target that is not one; the message says why."""


def split_target(method: str, target: bytes) -> tuple[bytes, bytes, bytes | None]:
    """
    Split a request target into path, query and, of an absolute form, the authority (RFC 9112 3.2).

    Path and query stay as they came, percent-encoded. ``*`` has the path ``*``, as in uvicorn.

    Raises:
        TargetError: none of the forms, or a byte that has no place in it.
    """
    host = None
    if target.startswith(b"/"):
        path, _, query = target.partition(b"?")
    elif target == b"*":
        if method != "OPTIONS":
            raise TargetError("the target * belongs to OPTIONS")
        return b"*", b"", None
    else:
        form = ABSOLUTE.fullmatch(target)
        if form is None:
            raise TargetError("the target is neither a path nor an absolute URL of http")
        host, path, query = form[1], form[2] or b"/", form[3] or b""
        if not HOST.fullmatch(host) or host.startswith(b":"):
            raise TargetError("the target's host is not one")
    if path.translate(PATHS) != path or (query and query.translate(QUERIES) != query):
        raise TargetError("a byte that has no place in a target; it should be percent-encoded")
    if PERCENT in path and b"%00" in path:
        raise TargetError("an encoded NUL in the path")
    return path, query, host
