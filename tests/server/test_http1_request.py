"""Heads of requests: what is taken and what is refused, with the status of each fault. Groups G and K of the cases."""

from __future__ import annotations

import pytest

from jumpstart_server.http1 import (
    HeaderMap,
    ParseError,
    RequestEnd,
    RequestHead,
    RequestParser,
    State,
)
from tests.server.parsing import GET, both_ways, head_of, refusal, status_of, with_field


def test_a_request_becomes_a_head_and_its_end() -> None:
    events = both_ways(b"GET /a%2Fb/?x=%20&y HTTP/1.1\r\nHost: h:80\r\nX-Two-Words:\t a b \t\r\nAccept:\r\n\r\n")
    assert events == [
        RequestHead(
            method="GET",
            target=b"/a%2Fb/?x=%20&y",
            path=b"/a%2Fb/",
            query=b"x=%20&y",
            http_version="1.1",
            headers=[(b"host", b"h:80"), (b"x-two-words", b"a b"), (b"accept", b"")],
            keep_alive=True,
            content_length=None,
            chunked=False,
            expects_continue=False,
            upgrade=None,
        ),
        RequestEnd(),
    ]


def test_repeated_lines_give_lists_of_their_own() -> None:
    first, second = head_of(GET), head_of(GET)
    assert first.headers == second.headers and first.headers is not second.headers


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"close", False),
        (b"1.1", b"Close", False),
        (b"1.1", b"x, close", False),
        (b"1.1", b"keep-alive, close", False),
        (b"1.1", b"closed", True),
        (b"1.0", b"", False),
        (b"1.0", b"Keep-Alive", True),
        (b"1.0", b"keep-alive, close", False),
    ],
)
def test_whether_the_connection_is_kept(version: bytes, connection: bytes, keep_alive: bool) -> None:
    data = with_field(b"Connection: " + connection, b"GET / HTTP/" + version)
    assert head_of(data).keep_alive is keep_alive


def test_connection_fields_are_one_list() -> None:
    assert head_of(with_field(b"Connection: keep-alive\r\nConnection: close")).keep_alive is False


@pytest.mark.parametrize(
    ("line", "version", "upgrade"),
    [
        (b"Connection: Upgrade\r\nUpgrade: websocket", b"1.1", b"websocket"),
        (b"Connection: keep-alive, upgrade\r\nUpgrade: a\r\nUpgrade: b", b"1.1", b"a,b"),
        (b"Upgrade: websocket", b"1.1", None),
        (b"Connection: upgrade", b"1.1", None),
        (b"Connection: upgrade\r\nUpgrade: websocket", b"1.0", None),
    ],
)
def test_upgrade_counts_if_connection_names_it(line: bytes, version: bytes, upgrade: bytes | None) -> None:
    assert head_of(with_field(line, b"GET / HTTP/" + version)).upgrade == upgrade


def test_what_comes_after_an_upgrade_is_handed_over_as_it_is() -> None:
    parser = RequestParser()
    parser.feed(with_field(b"Connection: upgrade\r\nUpgrade: x", b"GET / HTTP/1.1") + b"\x81\x00")
    parser.feed(b"\r\n\xff")
    assert parser.take_rest() == b"\x81\x00\r\n\xff"
    assert parser.state is State.CLOSED and parser.feed(GET) == [] and parser.resume() == []


@pytest.mark.parametrize(
    ("line", "version", "expects"),
    [
        (b"Content-Length: 5\r\nExpect: 100-continue", b"1.1", True),
        (b"Transfer-Encoding: chunked\r\nExpect: 100-Continue", b"1.1", True),
        (b"Content-Length: 0\r\nExpect: 100-continue", b"1.1", False),
        (b"Expect: 100-continue", b"1.1", False),
        (b"Content-Length: 5\r\nExpect: 100-continue", b"1.0", False),
        (b"Content-Length: 5\r\nExpect: whatever", b"1.0", False),
    ],
)
def test_whether_the_client_waits_for_100(line: bytes, version: bytes, expects: bool) -> None:
    assert head_of(with_field(line, b"POST / HTTP/" + version)).expects_continue is expects


@pytest.mark.parametrize("value", [b"200-ok", b"100-continue, x", b""])
def test_other_expectations_are_refused(value: bytes) -> None:
    assert status_of(with_field(b"Content-Length: 5\r\nExpect: " + value)) == 417


# Request lines


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (b"HTTP/1.32", 400),
        (b"HTTP/01.1", 400),
        (b"HTTP/1", 400),
        (b"http/1.1", 400),
        (b"HTTP/1.1x", 400),
        (b"ICY/1.1", 400),
        (b"HTTP/\xb9.1", 400),
        (b"HTTP/2.0", 505),
        (b"HTTP/0.9", 505),
        (b"HTTP/1.2", 505),
        (b"HTTP/3.0", 505),
    ],
)
def test_versions(version: bytes, status: int) -> None:
    assert status_of(with_field(b"X: y", b"GET / " + version)) == status


@pytest.mark.parametrize(
    "line",
    [
        b"GET /",
        b"GET",
        b"GET  / HTTP/1.1",
        b"GET /  HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b" GET / HTTP/1.1",
        b"GET\t/ HTTP/1.1",
        b"GET / a HTTP/1.1",
        b"G(T / HTTP/1.1",
        b"G\x80T / HTTP/1.1",
        b"(GET / HTTP/1.1",
        b"\r/ GET HTTP/1.1",
        b"GET /\rx HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_lines_that_are_no_request(line: bytes) -> None:
    assert status_of(with_field(b"X: y", line)) == 400


def test_noise_without_line_ends_is_refused_at_its_first_byte() -> None:
    (error,) = RequestParser().feed(b"\x16\x03\x01")
    assert isinstance(error, ParseError) and error.status == 400
    assert error.detail == "400 this does not begin like a request: '\\x16\\x03\\x01'"


def test_the_preface_of_http2_gets_505() -> None:
    assert status_of(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == 505


@pytest.mark.parametrize(
    ("method", "status"), [(b"get", 501), (b"Get", 501), (b"A" * 33, 501), (b"CONNECT", 501), (b"", 400)]
)
def test_methods_that_are_not_taken(method: bytes, status: int) -> None:
    assert status_of(with_field(b"X: y", method + b" / HTTP/1.1")) == status


@pytest.mark.parametrize("method", ["PURGE", "M-SEARCH", "BASELINE-CONTROL", "A" * 32])
def test_any_method_in_upper_case_is_taken(method: str) -> None:
    assert head_of(with_field(b"X: y", method.encode() + b" / HTTP/1.1")).method == method


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", b"/", b""),
        (b"/?", b"/", b""),
        (b"/?a?b", b"/", b"a?b"),
        (b"//x/y", b"//x/y", b""),
        (b"/%zz", b"/%zz", b""),
        (b"/a;b=c@d:e", b"/a;b=c@d:e", b""),
        (b'/a|{}[]^`"<>', b'/a|{}[]^`"<>', b""),
        (b"/?q=a|b\\c", b"/", b"q=a|b\\c"),
        (b"/?q=%00", b"/", b"q=%00"),
        (b"/%E5%C3%B6%2F", b"/%E5%C3%B6%2F", b""),
    ],
)
def test_targets_that_are_taken(target: bytes, path: bytes, query: bytes) -> None:
    head = head_of(with_field(b"X: y", b"GET " + target + b" HTTP/1.1"))
    assert (head.target, head.path, head.query) == (target, path, query)


@pytest.mark.parametrize(
    "target",
    [
        b"x",
        b"*",
        b"?a",
        b"/a#b",
        b"/?a#b",
        b"/a\\b",
        b"\\a",
        b"/a\x00b",
        b"/a%00b",
        b"/?a=\x00",
        b"/\xc3\xa9",
        b"/?\xc3\xa9",
        b"/\xf0\x9f\x98\x80",
        b"/a\x7f",
        b"/a\tb",
        b"http:///x",
        b"http://:80/x",
        b"http://u:p@h/x",
        b"http://h/a#b",
        b"http://h\\x/",
        b"http://h/%00",
        b"ftp://h/x",
        b"h:80",
    ],
)
def test_targets_that_are_refused(target: bytes) -> None:
    assert status_of(with_field(b"X: y", b"GET " + target + b" HTTP/1.1")) == 400


@pytest.mark.parametrize(
    ("target", "host", "path", "query"),
    [
        (b"http://evil.example/p?q", b"evil.example", b"/p", b"q"),
        (b"HTTPS://h:8443", b"h:8443", b"/", b""),
        (b"http://h?q", b"h", b"/", b"q"),
        (b"http://[::1]:80/", b"[::1]:80", b"/", b""),
    ],
)
def test_the_host_of_an_absolute_target_replaces_the_field(
    target: bytes, host: bytes, path: bytes, query: bytes
) -> None:
    head = head_of(b"GET " + target + b" HTTP/1.1\r\nAccept: b\r\nHost: other\r\n\r\n")
    assert (head.target, head.path, head.query) == (target, path, query)
    assert head.headers == [(b"host", host), (b"accept", b"b")]


def test_an_absolute_target_does_not_stand_in_for_host() -> None:
    assert status_of(b"GET http://h/ HTTP/1.1\r\nX: y\r\n\r\n") == 400
    assert head_of(b"GET http://h/ HTTP/1.0\r\nX: y\r\n\r\n").headers == [(b"host", b"h"), (b"x", b"y")]


def test_a_star_belongs_to_options() -> None:
    assert head_of(with_field(b"X: y", b"OPTIONS * HTTP/1.1")).path == b"*"


# Fields


@pytest.mark.parametrize(
    "line",
    [
        b"X : a",
        b"X\t: a",
        b" X: a",
        b"X\xa0: a",
        b"X\x85: a",
        b"\xa0X: a",
        b"\x85X: a",
        b": a",
        b":",
        b"nocolon",
        b"host",
        b"X(: a",
        b"X\x80: a",
        b"X\xc3\xa9: a",
        b'X"Y: a',
        b"X Y: a",
        b"X\x00: a",
        b"X: a\r\n c",
        b"X: a\r\n\tc",
        b"X: a\r\n ",
        b"X: a\x00b",
        b"X: a\x01b",
        b"X: a\x0bb",
        b"X: a\x7fb",
        b"X: a\rb",
        b"X: a\nb",
        b"X: a\nY: b",
        b"X: a\r",
        b"X: a\n",
    ],
)
def test_fields_that_are_refused(line: bytes) -> None:
    assert status_of(with_field(line)) == 400


def test_each_fault_in_a_field_is_named() -> None:
    for line, words in {
        b" X: a": "begins with whitespace",
        b"X : a": "between a field's name and its colon",
        b"nocolon": "without a colon",
        b": a": "without a name",
        b"X(: a": "in a field name",
        b"X: \x00": "control character",
        b"X: a\nY: b": "LF without CR",
    }.items():
        assert words in refusal(with_field(line))[1]


def test_values_keep_what_is_above_ascii() -> None:
    assert head_of(with_field(b"X: \xa0caf\xc3\xa9\x85")).headers[1] == (b"x", b"\xa0caf\xc3\xa9\x85")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\nHost: a\n\n", b"GET / HTTP/1.1\r\nHost: a\n\r\n", b"\nGET /"])
def test_line_ends_without_cr_are_refused(data: bytes) -> None:
    assert status_of(data) == 400


def test_line_ends_without_lf_are_no_line_ends() -> None:
    assert both_ways(b"GET / HTTP/1.1\rHost: a\r\r") == []
    assert status_of(b"GET / HTTP/1.1\rHost: a\r\r\n") == 400


def test_a_few_empty_lines_before_a_request_are_skipped() -> None:
    assert head_of(b"\r\n" * 4 + GET).method == "GET"
    assert status_of(b"\r\n" * 5 + GET) == 400


@pytest.mark.parametrize(
    "host",
    [b"a b", b"a/b", b"a@b", b"u:p@h", b"a,b c", b"h:8x", b"h:-1", b"h:123456", b"\xc3\xa9", b"[::1", b"a\\b", b"%zz",
     b"[g::1]", b"a\"b", b"h#f", b"h?q", b"<a>", b"::1", b"a\tb"],
)  # fmt: skip
def test_hosts_that_are_none(host: bytes) -> None:
    assert status_of(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") == 400
    assert status_of(b"GET / HTTP/1.0\r\nHost: " + host + b"\r\n\r\n") == 400


@pytest.mark.parametrize("host", [b"", b"h", b"h:", b"h:80", b"a_b.c-d~", b"127.0.0.1:8000", b"[::1]:8000", b"%41",
                                  b"[fe80::1%25eth0]"])  # fmt: skip
def test_hosts_that_are_taken(host: bytes) -> None:
    assert head_of(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n").headers == [(b"host", host)]


def test_no_host_and_two_hosts_are_refused() -> None:
    assert refusal(b"GET / HTTP/1.1\r\n\r\n") == (400, "no Host")
    assert refusal(b"GET / HTTP/1.1\r\nX: y\r\n\r\n") == (400, "no Host")
    assert head_of(b"GET / HTTP/1.0\r\n\r\n").headers == []
    for version in (b"1.0", b"1.1"):
        assert status_of(b"GET / HTTP/" + version + b"\r\nHost: a\r\nHost: a\r\n\r\n") == 400


@pytest.mark.parametrize(("header_map", "names"), [("drop", [b"host"]), ("dangerous", [b"host", b"x_forwarded_for"])])
def test_names_with_underscores_are_dropped_or_taken(header_map: HeaderMap, names: list[bytes]) -> None:
    head = head_of(with_field(b"X_Forwarded_For: 1.2.3.4"), header_map=header_map)
    assert [name for name, _ in head.headers] == names


def test_names_with_underscores_may_be_refused() -> None:
    assert status_of(with_field(b"X_Forwarded_For: 1.2.3.4"), header_map="refuse") == 400


def test_an_underscore_makes_no_length() -> None:
    events = both_ways(with_field(b"Content_Length: 5\r\nTransfer_Encoding: chunked"))
    assert isinstance(events[0], RequestHead) and events[0].content_length is None and not events[0].chunked
