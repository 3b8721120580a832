"""Responses: framing by method, version and status; what an app may not say; groups H and K of the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jumpstart_server.http1 import response as module
from jumpstart_server.http1.response import (
    DefaultFields,
    ResponseError,
    ResponseFramer,
    encode_fields,
    encode_status,
    error_response,
    http_date,
)

PLAIN = [(b"Content-Type", b"text/plain")]


def lines_of(framer: ResponseFramer, status: int = 200, headers: Any = (), **options: Any) -> list[bytes]:
    block = framer.head(status, headers, **options)
    assert block.endswith(b"\r\n\r\n")
    return block[:-4].split(b"\r\n")


def sent(framer: ResponseFramer, *pieces: bytes) -> bytes:
    return b"".join([*(buffer for piece in pieces for buffer in framer.body(piece)), framer.end()])


def length(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-length", value)]


# Framing


def test_a_length_of_the_apps_is_kept() -> None:
    framer = ResponseFramer("GET")
    assert lines_of(framer, 200, [*PLAIN, *length(b"5")]) == [
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/plain",
        b"Content-Length: 5",
    ]
    assert not framer.is_chunked and framer.takes_body and framer.head_sent and framer.status == 200
    assert sent(framer, b"he", b"", b"llo") == b"hello"
    assert not framer.must_close and not framer.is_incomplete


def test_without_a_length_http_1_1_gets_chunks() -> None:
    framer = ResponseFramer("GET")
    assert not framer.takes_body
    assert lines_of(framer, 200, PLAIN)[-1] == b"Transfer-Encoding: chunked"
    assert framer.is_chunked
    assert sent(framer, b"hello", b"", b"x" * 17) == b"5\r\nhello\r\n11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n"
    assert not framer.must_close and framer.end() == b""


def test_without_a_length_http_1_0_gets_the_end_of_the_connection() -> None:
    framer = ResponseFramer("GET", "1.0", keep_alive=True)
    assert lines_of(framer) == [b"HTTP/1.1 200 OK", b"Connection: close"]
    assert sent(framer, b"hello", b" world") == b"hello world"
    assert framer.must_close and not framer.is_incomplete


def test_a_body_in_hand_gets_its_length() -> None:
    framer = ResponseFramer("GET")
    assert lines_of(framer, body_length=0) == [b"HTTP/1.1 200 OK", b"Content-Length: 0"]
    assert sent(framer) == b"" and not framer.must_close
    assert b"Content-Length: 3" in lines_of(ResponseFramer("GET"), 200, length(b"3"), body_length=5)


@pytest.mark.parametrize(
    ("method", "status", "headers", "expected"),
    [
        ("HEAD", 200, length(b"5"), [b"Content-Length: 5"]),
        ("HEAD", 200, [], []),
        ("GET", 304, length(b"5"), [b"Content-Length: 5"]),
        ("GET", 304, [], []),
        ("GET", 204, length(b"5"), []),
        ("GET", 204, [], []),
        ("HEAD", 204, length(b"0"), []),
        ("GET", 205, length(b"5"), [b"Content-Length: 0"]),
        ("GET", 205, [], [b"Content-Length: 0"]),
    ],
)
def test_responses_without_a_body_never_have_one(
    method: str, status: int, headers: list[tuple[bytes, bytes]], expected: list[bytes]
) -> None:
    framer = ResponseFramer(method)
    assert lines_of(framer, status, headers, body_length=7)[1:] == expected
    assert not framer.takes_body and framer.plain(5) == 0
    assert sent(framer, b"hello") == b""
    assert not framer.must_close and not framer.is_incomplete


def test_too_much_body_is_cut() -> None:
    framer = ResponseFramer("GET")
    framer.head(200, length(b"5"))
    assert sent(framer, b"hel", b"lo you", b"x") == b"hello"
    assert framer.surplus_bytes == 5 and not framer.must_close


def test_too_little_body_closes_the_connection() -> None:
    framer = ResponseFramer("GET")
    framer.head(200, length(b"5"))
    assert sent(framer, b"hell") == b"hell"
    assert framer.must_close and framer.is_incomplete


@pytest.mark.parametrize("headers", [[], length(b"5")])
def test_an_aborted_body_has_no_last_chunk(headers: list[tuple[bytes, bytes]]) -> None:
    framer = ResponseFramer("GET")
    framer.head(200, headers)
    framer.body(b"he")
    framer.abort()
    framer.abort()
    assert framer.must_close and framer.is_incomplete and framer.end() == b""


def test_an_abort_after_the_end_changes_nothing() -> None:
    framer = ResponseFramer("GET")
    framer.head(200, ())
    framer.end()
    framer.abort()
    assert not framer.must_close and not framer.is_incomplete


def test_large_data_is_not_copied() -> None:
    data = b"x" * (module.JOIN_BYTES + 1)
    framer = ResponseFramer("GET")
    framer.head(200, ())
    assert framer.body(data)[1] is data
    framer = ResponseFramer("GET")
    framer.head(200, length(b"%d" % len(data)))
    assert framer.body(data)[0] is data


def test_plain_bytes_are_counted() -> None:
    framer = ResponseFramer("GET")
    framer.head(200, length(b"5"))
    assert (framer.plain(3), framer.plain(3), framer.surplus_bytes) == (3, 2, 1)
    assert framer.end() == b"" and not framer.must_close
    framer = ResponseFramer("GET", "1.0")
    framer.head(200, ())
    assert framer.plain(10**9) == 10**9
    framer = ResponseFramer("GET")
    framer.head(200, ())
    with pytest.raises(ResponseError, match="plain"):
        framer.plain(1)


def test_the_order_of_calls_is_checked() -> None:
    framer = ResponseFramer("GET")
    early: list[Callable[[], object]] = [lambda: framer.body(b"x"), framer.end, lambda: framer.plain(1)]
    for call in early:
        with pytest.raises(ResponseError):
            call()
    framer.head(200, ())
    late: list[Callable[[], object]] = [lambda: framer.head(200, ()), framer.interim]
    for call in late:
        with pytest.raises(ResponseError):
            call()
    framer.end()
    with pytest.raises(ResponseError, match="after the end"):
        framer.body(b"x")


def test_interim_responses() -> None:
    framer = ResponseFramer("GET")
    assert framer.interim() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert framer.interim(103, [(b"link", b"</a>")]) == b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    with pytest.raises(ResponseError):
        framer.interim(103, [(b"link", b"a\nb")])
    assert ResponseFramer("GET", "1.0").interim() == b""


# The connection


@pytest.mark.parametrize(
    ("version", "keep_alive", "timeout_s", "expected"),
    [
        ("1.1", True, 0, []),
        ("1.1", True, 75, [b"Connection: keep-alive", b"Keep-Alive: timeout=75"]),
        ("1.1", False, 75, [b"Connection: close"]),
        ("1.0", True, 0, [b"Connection: keep-alive"]),
        ("1.0", True, 75, [b"Connection: keep-alive", b"Keep-Alive: timeout=75"]),
        ("1.0", False, 0, [b"Connection: close"]),
    ],
)
def test_what_the_client_is_told_of_the_connection(
    version: str, keep_alive: bool, timeout_s: int, expected: list[bytes]
) -> None:
    framer = ResponseFramer("GET", version, keep_alive)
    assert lines_of(framer, 200, length(b"0"), keep_alive_timeout_s=timeout_s)[2:] == expected
    assert framer.must_close is not keep_alive


def test_an_app_may_close_the_connection_but_not_keep_it() -> None:
    framer = ResponseFramer("GET")
    assert lines_of(framer, 200, [(b"Connection", b"Close")], body_length=0)[-1] == b"Connection: close"
    assert framer.must_close and framer.dropped_fields == ()
    framer = ResponseFramer("GET", keep_alive=False)
    assert lines_of(framer, 200, [(b"connection", b"keep-alive")], body_length=0)[-1] == b"Connection: close"
    assert framer.dropped_fields == (b"connection",)


def test_the_shell_may_close_until_the_head() -> None:
    framer = ResponseFramer("GET")
    framer.must_close = True
    assert lines_of(framer)[-1] == b"Connection: close"


@pytest.mark.parametrize(
    "name", [b"Transfer-Encoding", b"keep-alive", b"Upgrade", b"TE", b"Trailer", b"Proxy-Connection"]
)
def test_hop_by_hop_fields_of_an_app_are_dropped(name: bytes) -> None:
    framer = ResponseFramer("GET")
    assert lines_of(framer, 200, [(name, b"chunked")], body_length=0) == [b"HTTP/1.1 200 OK", b"Content-Length: 0"]
    assert framer.dropped_fields == (name,)


# Fields


def test_default_fields_stand_back_behind_the_apps() -> None:
    defaults = DefaultFields(http_date(784111777), b"jumpstart", [(b"X-A", b"1"), (b"X-A", b"2")])
    date, server = b"Date: Sun, 06 Nov 1994 08:49:37 GMT", b"Server: jumpstart"
    extra = [b"X-A: 1", b"X-A: 2"]
    for headers, expected in (
        ([], [date, server]),
        ([(b"dAte", b"x")], [server]),
        ([(b"server", b"x")], [date]),
        ([(b"date", b"x"), (b"Server", b"x")], []),
    ):
        lines = lines_of(ResponseFramer("GET"), 204, headers, defaults=defaults)
        assert lines[1 + len(headers) :] == [*expected, *extra]
    assert lines_of(ResponseFramer("GET"), 204, defaults=DefaultFields()) == [b"HTTP/1.1 204 No Content"]


@pytest.mark.parametrize("value", [b"a\r\nEvil: 1", b"a\nb", b"a\rb", b"a\0b", b"\n", b"\r\n"])
def test_a_value_cannot_bring_a_line_of_its_own(value: bytes) -> None:
    framer = ResponseFramer("GET")
    with pytest.raises(ResponseError, match="X-A"):
        framer.head(200, [*PLAIN, (b"X-A", value)])
    assert lines_of(framer, 500, body_length=0)[0] == b"HTTP/1.1 500 Internal Server Error"  # the framer is as before
    cases: list[dict[str, Any]] = [{"date": value}, {"server": value}, {"extra": [(b"a", value)]}]
    for options in cases:
        with pytest.raises(ResponseError):
            DefaultFields(**options)


def test_an_iterator_of_headers_is_enough() -> None:
    with pytest.raises(ResponseError, match="line end"):
        ResponseFramer("GET").head(200, iter([(b"X-A", b"a\nb")]))


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\r\nb", b"\xc3\xa9", b"a\0", b" a"])
def test_a_name_must_be_a_token(name: bytes) -> None:
    with pytest.raises(ResponseError, match="header name"):
        ResponseFramer("GET").head(200, [(name, b"x")])
    with pytest.raises(ResponseError, match="header name"):
        DefaultFields(extra=[(name, b"x")])


@pytest.mark.parametrize("value", [b"", b"-1", b"+5", b"5, 5", b"1_0", b"x"])
def test_a_length_must_be_a_number(value: bytes) -> None:
    with pytest.raises(ResponseError, match="Content-Length"):
        ResponseFramer("GET").head(200, length(value))


def test_two_lengths_must_agree() -> None:
    assert lines_of(ResponseFramer("GET"), 200, length(b"5") * 2) == [b"HTTP/1.1 200 OK", b"Content-Length: 5"]
    with pytest.raises(ResponseError, match="two values"):
        ResponseFramer("GET").head(200, length(b"5") + length(b"6"))


@pytest.mark.parametrize("status", [0, 99, 1000, -200])
def test_a_status_has_three_digits(status: int) -> None:
    with pytest.raises(ResponseError, match="status"):
        ResponseFramer("GET").head(status, ())


@pytest.mark.parametrize("status", [100, 101, 103, 199])
def test_an_interim_status_is_no_response(status: int) -> None:
    framer = ResponseFramer("GET")
    with pytest.raises(ResponseError, match=str(status)):
        framer.head(status, ())
    assert framer.head(500, ()).startswith(b"HTTP/1.1 500")


def test_reason_phrases() -> None:
    assert lines_of(ResponseFramer("GET"), 204, reason=b"Fine \xe9")[0] == b"HTTP/1.1 204 Fine \xe9"
    assert lines_of(ResponseFramer("GET"), 204, reason=b"")[0] == b"HTTP/1.1 204 "
    assert lines_of(ResponseFramer("GET"), 299)[0] == b"HTTP/1.1 299 "
    for reason in (b"a\nb", b"a\rb", b"a\0b"):
        with pytest.raises(ResponseError, match="reason"):
            ResponseFramer("GET").head(200, (), reason=reason)


def test_what_is_remembered_is_bounded() -> None:
    for number in range(1500):
        ResponseFramer("GET").head(200, [(b"x-%d" % number, b"")], reason=b"r%d" % number)
        encode_status(f"200 r{number}")
    for cache in (module._meanings, module._status_lines, module._statuses):
        assert len(cache) <= module.NAMES


# WSGI's words


def test_a_wsgi_status() -> None:
    assert encode_status("404 Not Found") == encode_status("404 Not Found") == (404, b"Not Found")
    assert encode_status("299") == (299, b"")
    for wrong in ("OK", "20 x", "2000 x", "٢٠٠ x", "", "200 \u20ac", " 200 OK"):
        with pytest.raises(ResponseError):
            encode_status(wrong)
    others: list[Any] = [200, b"200 OK", ["200"]]
    for other in others:
        with pytest.raises(ResponseError, match="must be str"):
            encode_status(other)


def test_wsgi_headers() -> None:
    assert encode_fields([("A", "é")]) == [(b"A", b"\xe9")]
    cases: list[tuple[Any, str]] = [
        ([("A", "\u20ac")], "Latin-1"),
        ([("B", "b"), ("A", 5)], "must be str"),
        ([(b"A", "b")], "must be str"),
        ([("A", "b", "c")], "tuple"),
        (["AB", "abc"], "tuple"),
        ([5], "tuple"),
    ]
    for headers, message in cases:
        with pytest.raises(ResponseError, match=message):
            encode_fields(headers)
    with pytest.raises(ResponseError, match="list of tuples"):
        encode_fields(iter([("A", 5)]))  # type: ignore[arg-type]


# Our own


def test_our_own_answers() -> None:
    assert error_response(431, "too much") == (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Content-Length: 46\r\nConnection: close\r\n\r\n431 Request Header Fields Too Large: too much\n"
    )
    busy = error_response(503, headers=[(b"Retry-After", b"1")], method="HEAD", defaults=DefaultFields(server=b"j"))
    assert busy.endswith(b"Content-Length: 24\r\nServer: j\r\nConnection: close\r\n\r\n") and b"Retry-After: 1" in busy
    assert error_response(499).endswith(b"499 Error\n")
