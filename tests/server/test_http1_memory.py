"""What parser and framer remember must never be seen: the answer is that of one that has seen nothing before."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.http1 import Event, ParseError, RequestParser, ResponseFramer, head, response
from jumpstart_server.http1.events import HeaderMap
from jumpstart_server.settings import TenantSettings

LINES = [
    *(b"GET / HTTP/1.1", b"GET /a?b HTTP/1.1", b"POST / HTTP/1.1", b"GET / HTTP/1.0", b"GET http://b/ HTTP/1.1"),
    *(
        b"GET  / HTTP/1.1",
        b"GET /\\ HTTP/1.1",
        b"GET / HTTP/1.1\n",
        b" GET / HTTP/1.1",
        b"GET /%b HTTP/1.1" % (b"a" * 5000),
    ),
]
BLOCKS = [
    *(b"Host: a", b"Host: a\r\nX-Y: z", b"Host: a\r\nX_Y: z", b"Host: a\r\nContent-Length: 0", b"X: no host"),
    *(b"Host: a\r\nConnection: keep-alive", b"Host: a\r\nConnection: upgrade\r\nUpgrade: foo", b"Host: a\r\nX y: z"),
]


@given(st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(BLOCKS)), max_size=6))
def test_a_parser_says_of_each_request_what_a_new_one_would(heads: list[tuple[bytes, bytes]]) -> None:
    parser = RequestParser()
    for line, block in heads:
        data = b"%b\r\n%b\r\n\r\n" % (line, block)
        new = RequestParser()
        events: list[Event] = parser.feed(data)
        assert events == new.feed(data)
        assert events
        if isinstance(events[-1], ParseError) or parser.state != new.state or parser.state.name == "CLOSED":
            return
        for event in events:
            if hasattr(event, "headers"):
                event.headers.append((b"mine", b""))  # the list is the receiver's own
        parser.resume()


FIELD_LINES = [
    *(
        b"Host: a",
        b"host: a ",
        b"Host: b",
        b"Host: a b",
        b"HOST:a",
        b"Accept: x",
        b"Accept: \x00",
        b"Accept:\ty",
        b"X-Id: 1",
    ),
    *(b"X-Id: 2", b"X_Id: 3", b"X Id: 4", b"X-Id: a\nb", b"X-Id: a\rb", b"Cookie: \xff", b": x", b"X-Id", b" folded"),
    *(b"Connection: close", b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: foo", b"Content-Length: 0"),
    *(
        b"Content-Length: 3",
        b"Content-Length: +3",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Expect: x",
    ),
    *(b"User-Agent: " + b"u" * 300, b"X-Id: " + b"i" * 9000),
]
# Mostly heads that pass and are like one another: otherwise no parser lives long enough to remember anything.
HEAD_LINES = st.one_of(
    st.tuples(st.just(b"Host: a"), st.sampled_from(FIELD_LINES)).map(list),
    st.lists(st.sampled_from(FIELD_LINES), max_size=5),
    st.lists(st.sampled_from([b"X-Id: 1", b"X-Id: 2", b"Accept: x", b"Content-Length: 3"]), max_size=4).map(
        lambda lines: [b"Host: a", *lines]
    ),
)


@given(
    st.lists(st.tuples(st.sampled_from(LINES), HEAD_LINES), max_size=8),
    st.sampled_from(["drop", "refuse", "dangerous"]),
)
def test_heads_in_any_order_say_what_they_say_without_any_memory(
    heads: list[tuple[bytes, list[bytes]]], header_map: HeaderMap
) -> None:
    requests = []
    for line, lines in heads:
        body = (
            b"abc" if b"Content-Length: 3" in lines else b"0\r\n\r\n" if b"Transfer-Encoding: chunked" in lines else b""
        )
        requests.append(b"\r\n".join([line, *lines]) + b"\r\n\r\n" + body)
    alone: list[list[Event]] = []
    for request in requests:
        for memory in (head.repeated_lines, head._names, head._hosts):
            memory.clear()
        alone.append(RequestParser(header_map=header_map).feed(request))
    for _ in range(2):  # the second time with all lines known
        parser = RequestParser(header_map=header_map)
        for request, events in zip(requests, alone):
            assert parser.feed(request) == events
            assert parser.resume() == []
            if parser.state.name != "REQUEST_LINE":
                parser = RequestParser(header_map=header_map)


FIELDS = st.sampled_from(
    [(b"content-type", b"a"), (b"Content-Length", b"3"), (b"Connection", b"close"), (b"date", b"x"), (b"te", b"x")]
)


@given(
    st.lists(FIELDS, max_size=3, unique_by=lambda field: field[0]),
    st.sampled_from([200, 204, 205, 304]),
    st.sampled_from(["GET", "HEAD"]),
    st.sampled_from(["1.0", "1.1"]),
    st.booleans(),
    st.sampled_from([None, 3]),
)
def test_a_framer_says_the_same_again(
    fields: list[tuple[bytes, bytes]], status: int, method: str, version: str, keep_alive: bool, length: int | None
) -> None:
    response._prepared.clear()
    said = []
    for _ in range(2):
        framer = ResponseFramer(method, version, keep_alive)
        head = framer.head(status, fields, body_length=length)
        said.append((head, framer.must_close, framer.dropped_fields, framer.body(b"abc"), framer.end()))
    assert said[0] == said[1]


def test_cookies_are_not_remembered() -> None:
    response._prepared.clear()
    ResponseFramer("GET").head(200, [(b"Set-Cookie", b"secret")], body_length=0)
    assert not response._prepared


def test_connection_settings_are_the_operators() -> None:
    settings = ConnectionSettings.of(
        TenantSettings(limit_request_line=1, header_map="refuse", body_timeout=2, keep_alive=3)
    )
    assert (settings.limits.limit_request_line, settings.limits.limit_request_fields) == (1, 100)
    assert (settings.header_map, settings.body_timeout, settings.keep_alive) == ("refuse", 2, 3)
    own = ConnectionSettings()
    theirs = dataclasses.replace(ConnectionSettings.of(TenantSettings()), proxies=None, proxy_senders=None)
    assert theirs == own
