"""What the parser of requests makes of bytes, whole and byte by byte: for the tests of heads and of framing."""

from __future__ import annotations

from typing import Any

from jumpstart_server.http1 import (
    BodyData,
    Event,
    ParseError,
    RequestEnd,
    RequestHead,
    RequestParser,
)

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def both_ways(data: bytes, **options: Any) -> list[Event]:
    """The events of *data* in one segment and in segments of a byte, which must be the same."""
    whole = RequestParser(**options).feed(data)
    parser = RequestParser(**options)
    pieces = [event for byte in data for event in parser.feed(bytes((byte,)))]
    assert joined(pieces) == joined(whole)
    return whole


def joined(events: list[Event]) -> list[Any]:
    """Events with neighbouring body pieces joined, and errors without their excerpt."""
    out: list[Any] = []
    for event in events:
        if isinstance(event, BodyData) and out and isinstance(out[-1], bytes):
            out[-1] += event.data
        elif isinstance(event, BodyData):
            out.append(event.data)
        elif isinstance(event, ParseError):
            out.append((event.status, event.reason, event.head))
        else:
            out.append(event)
    return out


def head_of(data: bytes, **options: Any) -> RequestHead:
    events = both_ways(data, **options)
    assert events and isinstance(events[0], RequestHead), events
    return events[0]


def refusal(data: bytes, **options: Any) -> tuple[int, str]:
    """Status and reason with which *data* ends; a parser that refused takes nothing more."""
    events = both_ways(data, **options)
    assert events, "the parser wants more"
    error = events[-1]
    assert isinstance(error, ParseError), events
    assert not any(isinstance(event, RequestEnd) for event in events)
    return error.status, error.reason


def status_of(data: bytes, **options: Any) -> int:
    return refusal(data, **options)[0]


def with_field(line: bytes, request_line: bytes = b"POST / HTTP/1.1") -> bytes:
    return request_line + b"\r\nHost: a\r\n" + line + b"\r\n\r\n"


def body_of(events: list[Event]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, BodyData))
