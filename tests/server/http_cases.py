"""Bytes that clients send, and what is right for them, whichever engine answers. Numbers are those of the cases."""

from __future__ import annotations

import logging
import struct

import pytest
from hypothesis import strategies as st

from jumpstart_server.http1 import Limits

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def errors(log: pytest.LogCaptureFixture) -> list[str]:
    """What was logged at ERROR and above."""
    return [record.getMessage() for record in log.records if record.levelno >= logging.ERROR]


def post(fields: bytes, body: bytes = b"") -> bytes:
    return b"POST /echo HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n%b" % (fields, body)


CHUNKED = b"Transfer-Encoding: chunked"
REFUSED: list[tuple[str, bytes, int]] = [
    ("111 length and coding", post(b"Content-Length: 5\r\n" + CHUNKED, b"0\r\n\r\n"), 400),
    *(
        (f"113 length {value!r}", post(b"Content-Length: " + value, b"12345"), 400)
        for value in (b"+5", b"1_0", b"0x5", b"-1", b"", b"5, 5", "١".encode())
    ),
    ("113 two lengths", post(b"Content-Length: 5\r\nContent-Length: 5", b"12345"), 400),
    ("115 control before chunked", post(b"Transfer-Encoding: \x0bchunked", b"0\r\n\r\n"), 400),
    ("115 no-break space before chunked", post(b"Transfer-Encoding: \xa0chunked", b"0\r\n\r\n"), 400),
    ("116 ,chunked", post(b"Transfer-Encoding: ,chunked", b"0\r\n\r\n"), 400),
    *(
        (f"116 {value!r}", post(b"Transfer-Encoding: " + value, b"0\r\n\r\n"), 501)
        for value in (b"xchunked", b"chunked, identity", b"identity", b"gzip, chunked")
    ),
    *(
        (f"118 name {name!r}", post(name + b": 5"), 400)
        for name in (b"Content-Length ", b"Content-Length\t", b"Content-Length\xa0", b"\x85Content-Length", b" a")
    ),
    ("120 folded", b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", 400),
    *(
        (f"121 line {line!r}", b"GET / HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % line, 400)
        for line in (b": a", b"a", b"\xffa: b", b"a(: b", b"a\0: b", b"a: b\0", b"a: b\rc")
    ),
    ("123 1.32", b"GET / HTTP/1.32\r\nHost: a\r\n\r\n", 400),
    ("123 2.0", b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    ("123 01.1", b"GET / HTTP/01.1\r\nHost: a\r\n\r\n", 400),
    ("123 0.9", b"GET /\r\n\r\n", 400),
    ("125 LF in extension", post(CHUNKED, b"5;a\nb\r\n12345\r\n0\r\n\r\n"), 400),
    ("125 CR in extension", post(CHUNKED, b"5;a\rb\r\n12345\r\n0\r\n\r\n"), 400),
    ("125 long extension", post(CHUNKED, b"5;%b\r\n12345\r\n0\r\n\r\n" % (b"a" * 65536)), 400),
    ("125 many extensions", post(CHUNKED, b"1;abcdefgh\r\nx\r\n" * 5000), 400),
    ("130 length in trailer", post(CHUNKED, b"0\r\nContent-Length: 5\r\n\r\n"), 400),
    ("chunk longer than it says", post(CHUNKED, b"5\r\n123456\r\n0\r\n\r\n"), 400),
    ("no host", b"GET / HTTP/1.1\r\n\r\n", 400),
    ("two hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    ("133 long line", b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"a" * 5000), 414),
    ("133 long field", b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (b"a" * 9000), 431),
    ("133 many fields", b"GET / HTTP/1.1\r\nHost: a\r\n%b\r\n" % (b"X: a\r\n" * 101), 431),
    ("136 no slash", b"GET x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("136 star", b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("136 connect", b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    *(
        (f"136 target {target!r}", b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target, 400)
        for target in (b"/#a", b"/\\", b"/\0", b"/%00", "/ü".encode())
    ),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ("expectation", b"POST / HTTP/1.1\r\nHost: a\r\nExpect: gold\r\nContent-Length: 1\r\n\r\n", 417),
]

# Bodies that end before they are whole, behind the first fields of a head (126).
CUT_SHORT = [
    b"Content-Length: 10\r\n\r\n12345",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\n123",
]

# What requests are made of, in good and in bad order; and the statuses that they may be answered with.
WORDS = st.sampled_from(
    [
        *(b"GET ", b"POST ", b"/", b"/echo", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\r\n\r\n", b"Host: a\r\n", b":"),
        *(
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Connection: close\r\n",
            b"0\r\n\r\n",
            b"5\r\n",
        ),
        *(b"12345", b"\n", b"\r", b"\0", b"Expect: 100-continue\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n"),
        *(GET, b"\xff", b" ", b"Upgrade: h2c\r\n"),
    ]
)
STATUSES = (100, 200, 400, 403, 404, 413, 414, 417, 426, 431, 500, 501, 505)

# PROXY headers, and what does not begin with one.
PROXY_V1 = b"PROXY TCP4 192.0.2.7 198.51.100.1 56324 443\r\n"
PROXY_V2 = (
    b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes([192, 0, 2, 7, 198, 51, 100, 1]) + struct.pack("!HH", 56324, 443)
)
PROXY_V2_LOCAL = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0"
FORWARDED = b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 203.0.113.9\r\nX-Forwarded-Proto: https\r\n\r\n"
NO_PROXY_HEADER = [
    (GET, "no PROXY header"),
    (b"\x16\x03\x01", "no PROXY header"),
    (b"PROXY TCP4 nonsense\r\n" + GET, "a PROXY line that"),
    (PROXY_V2[:12] + b"\x31", "unknown version"),
]
PROXY_CUT_SHORT = [b"", b"PROX", PROXY_V1[:-1], PROXY_V2[:5], PROXY_V2[:-1]]

# Requests that limits refuse; the limits are in `TIGHT`. With status, and method and path for the access log.
LOGGED = [
    ("no request", b"\r\nno request\r\n\r\n", 400, None, None),
    ("emoji", b"GET /\xf0\x9f\x98\x80 HTTP/1.1\r\nHost: a\r\n\r\n", 400, None, None),
    ("no Host", b"GET / HTTP/1.1\r\n\r\n", 400, None, None),
    ("414", b"GET /" + b"x" * 300 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, None, None),
    ("431", b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 400 + b"\r\n\r\n", 431, None, None),
    ("505", b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, None, None),
    ("501", b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501, None, None),
    ("413", b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n", 413, "POST", "/echo"),
]
TIGHT = Limits(limit_request_body=1000, limit_request_line=200, limit_request_field_size=300)
