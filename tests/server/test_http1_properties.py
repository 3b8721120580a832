"""Promises for all bytes: any split gives the same, any bytes give an answer, what we send others can read."""

from __future__ import annotations

from typing import Any

import h11
import httptools
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jumpstart_server.http1 import (
    BodyData,
    DefaultFields,
    Event,
    Limits,
    ParseError,
    RequestEnd,
    RequestHead,
    RequestParser,
    ResponseError,
    ResponseFramer,
)
from jumpstart_server.http1.request import HIGH_WATER_BYTES

SMALL = Limits(
    limit_request_line=60,
    limit_request_fields=6,
    limit_request_field_size=40,
    limit_request_body=40,
    limit_request_head=150,
    limit_chunk_extensions=20,
)

# Pieces that make requests, nearly requests, and the borders between them.
FRAGMENTS = st.sampled_from(
    b"GET |POST |get |/|/a?b|/%00|/a#b| HTTP/1.1\r\n| HTTP/1.0\r\n| HTTP/2.0\r\n|GET / HTTP/1.1\r\nHost: a\r\n|"
    b"Host: a\r\n|Host: a b\r\n|Content-Length: 5\r\n|Content-Length: 0\r\n|Content-Length: +5\r\n|"
    b"Transfer-Encoding: chunked\r\n|Transfer-Encoding: gzip\r\n|Connection: close\r\n|Connection: keep-alive\r\n|"
    b"Expect: 100-continue\r\n|X_Y: z\r\n|X: y\r\n|X : y\r\n| folded\r\n|: x\r\n|X: \x00\r\n|\r\n|\r\n\r\n|\r|\n|hello|"
    b"5\r\nhello\r\n|5;ext=1\r\nhello\r\n|0\r\n\r\n|0\r\n|1\r\nx\r\n|ffffffffffffffff\r\n|;|;abcdefgh|"
    b"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx|\x16\x03\x01|\xff|Trailer: x\r\n|http://h/x|*".split(b"|")
)
STREAMS = st.one_of(
    st.binary(max_size=200),
    st.lists(FRAGMENTS, max_size=25).map(b"".join),
    st.tuples(st.just(b"GET / HTTP/1.1\r\nHost: a\r\n"), st.lists(FRAGMENTS, max_size=12).map(b"".join)).map(b"".join),
    st.tuples(
        st.just(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"),
        st.lists(FRAGMENTS, max_size=12).map(b"".join),
    ).map(b"".join),
)
LIMITS = st.sampled_from([SMALL, Limits()])


def drive(segments: list[bytes], limits: Limits) -> list[Any]:
    """Events of a connection that answers at once, body pieces joined; checks what holds at every moment."""
    parser = RequestParser(limits, "refuse" if limits is SMALL else "drop")
    seen: list[Any] = []

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BodyData):
                assert event.data
                if isinstance(seen[-1], bytes):
                    seen[-1] += event.data
                else:
                    seen.append(event.data)
            elif isinstance(event, ParseError):
                seen.append((event.status, event.reason, event.head))
            else:
                seen.append(event)

    for segment in segments:
        events = parser.feed(segment)
        while events:
            take(events)
            events = parser.resume()
        assert parser.buffered_bytes <= max(limits.limit_request_line, limits.limit_request_field_size) + 1 + len(
            segment
        )
    take(parser.eof())
    assert parser.buffered_bytes == 0
    assert not any(isinstance(event, tuple) for event in seen[:-1]), "something came after an error"
    heads = sum(isinstance(event, RequestHead) for event in seen)
    ends = sum(isinstance(event, RequestEnd) for event in seen)
    assert heads - ends in (0, 1) and (heads == ends or isinstance(seen[-1], tuple))
    return seen


@settings(max_examples=250, deadline=None)
@given(STREAMS, LIMITS, st.data())
def test_any_split_gives_the_same(stream: bytes, limits: Limits, data: st.DataObject) -> None:
    whole = drive([stream], limits)
    assert drive([bytes((byte,)) for byte in stream], limits) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    segments = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)])]
    assert drive(segments, limits) == whole


@settings(max_examples=150, deadline=None)
@given(st.lists(STREAMS, max_size=6))
@example([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3000, b"x" * 70000])
def test_bytes_that_come_while_it_rests_are_kept_within_bounds(streams: list[bytes]) -> None:
    parser = RequestParser()
    for stream in streams:
        if parser.wants_data:
            parser.feed(stream)
        assert parser.buffered_bytes <= HIGH_WATER_BYTES + len(stream)
    while parser.resume():
        pass


TOKENS = st.text("abcXYZ019-!~", min_size=1, max_size=10).map(lambda text: b"x-" + text.encode())
VALUES = st.binary(max_size=20).map(lambda raw: bytes(byte for byte in raw if byte >= 0x20 and byte != 0x7F).strip())
PATHS = st.text("abc/%2F.~;=@:|", max_size=20).map(lambda text: b"/" + text.encode())


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["GET", "POST", "PURGE", "M-SEARCH"]),
    PATHS,
    st.text("abc=&%?/", max_size=10).map(str.encode),
    st.lists(st.tuples(TOKENS, VALUES), max_size=8),
    st.lists(st.binary(min_size=1, max_size=50), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_a_valid_request_arrives_as_it_was_sent(
    method: str,
    path: bytes,
    query: bytes,
    fields: list[tuple[bytes, bytes]],
    pieces: list[bytes],
    chunked: bool,
    again: bool,
) -> None:
    body = b"".join(pieces)
    framing = (b"Transfer-Encoding", b"chunked") if chunked else (b"Content-Length", b"%d" % len(body))
    sent = [(b"Host", b"h:1"), *fields, framing]
    data = b"%b %b?%b HTTP/1.1\r\n" % (method.encode(), path, query)
    data += b"".join(b"%b: %b\r\n" % field for field in sent) + b"\r\n"
    data += b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n" if chunked else body
    parser = RequestParser()
    events = parser.feed(data * (1 + again))
    for _ in range(1 + again):
        head = events[0]
        assert isinstance(head, RequestHead) and isinstance(events[-1], RequestEnd)
        assert (head.method, head.path, head.query) == (method, path, query)
        assert head.headers == [(name.lower(), value) for name, value in sent]
        assert b"".join(event.data for event in events[1:-1] if isinstance(event, BodyData)) == body
        events = parser.resume()
    assert not events and parser.is_idle


class Seen:
    """Callbacks for httptools; keeps what came."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


@settings(max_examples=150, deadline=None)
@given(STREAMS)
def test_what_we_take_llhttp_takes_too(stream: bytes) -> None:
    """No request passes here that llhttp, which is laxer in general, would refuse or see a different body in."""
    seen = drive([stream], Limits())
    if not seen or not isinstance(seen[0], RequestHead) or RequestEnd() not in seen:
        return
    head = seen[0]
    if head.target.startswith(b"http") or b"%" in head.target or head.method not in ("GET", "POST"):
        return
    requests: list[Seen] = []

    class All(Seen):
        def on_message_begin(self) -> None:
            requests.append(Seen())

        def on_body(self, data: bytes) -> None:
            requests[-1].on_body(data)

        def on_message_complete(self) -> None:
            requests[-1].complete = True

    parser = httptools.HttpRequestParser(All())
    try:
        parser.feed_data(stream)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        pass  # at a later request, or it minds bytes after `Connection: close`
    assert requests and requests[0].complete
    assert requests[0].body == (seen[1] if isinstance(seen[1], bytes) else b"")


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["GET", "HEAD", "POST"]),
    st.sampled_from(["1.1", "1.0"]),
    st.booleans(),
    st.sampled_from([200, 201, 204, 205, 301, 304, 404, 500]),
    st.lists(st.tuples(TOKENS, VALUES), max_size=5),
    st.lists(st.binary(max_size=60), max_size=4),
    st.sampled_from(["app", "known", "none"]),
    st.sampled_from([0, 75]),
)
def test_others_read_what_we_send(
    method: str,
    version: str,
    keep_alive: bool,
    status: int,
    fields: list[tuple[bytes, bytes]],
    pieces: list[bytes],
    length: str,
    timeout_s: int,
) -> None:
    body = b"".join(pieces)
    own = [(b"content-length", b"%d" % len(body))] if length == "app" else []
    framer = ResponseFramer(method, version, keep_alive)
    data = framer.head(
        status,
        [*fields, *own],
        body_length=len(body) if length == "known" else None,
        defaults=DefaultFields(b"Sun, 06 Nov 1994 08:49:37 GMT", b"jumpstart"),
        keep_alive_timeout_s=timeout_s,
    )
    data += b"".join(buffer for piece in pieces for buffer in framer.body(piece)) + framer.end()
    assert not framer.is_incomplete and not framer.surplus_bytes
    expected = b"" if method == "HEAD" or status in (204, 205, 304) else body

    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "a"), ("content-length", "0")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    if framer.must_close:
        client.receive_data(b"")
    response = client.next_event()
    assert isinstance(response, h11.Response) and response.status_code == status
    received = list(response.headers)
    for name, value in fields:
        assert (name.lower(), value) in received
    content = b""
    while isinstance(event := client.next_event(), h11.Data):
        content += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert content == expected
    assert client.their_state is not h11.DONE if framer.must_close else client.their_state is h11.DONE

    if method != "HEAD":
        seen = Seen()
        parser = httptools.HttpResponseParser(seen)
        parser.feed_data(data)
        assert parser.get_status_code() == status and seen.body == expected
        assert seen.complete or framer.must_close


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=12)), max_size=3), st.binary(max_size=6))
def test_no_header_of_an_app_can_add_a_line(fields: list[tuple[bytes, bytes]], reason: bytes) -> None:
    framer = ResponseFramer("GET")
    try:
        block = framer.head(200, fields, reason=reason, body_length=0)
    except ResponseError:
        return
    assert block.endswith(b"\r\n\r\n") and block.count(b"\r\n\r\n") == 1
    lines = block[:-4].split(b"\r\n")
    assert not any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines)
    assert len(lines) <= len(fields) + 3
