"""What parser and framer remember must never be seen: the answer is that of one that has seen nothing before."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.http1 import Event, ParseError, RequestParser, ResponseFramer, response
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
