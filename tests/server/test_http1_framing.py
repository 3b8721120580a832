"""Bodies, limits and pipelines of requests: what is taken and what is refused. Groups G and K of the cases."""

from __future__ import annotations

import time

import pytest

from jumpstart_server.http1 import (
    BodyData,
    Limits,
    ParseError,
    RequestEnd,
    RequestHead,
    RequestParser,
    State,
)
from jumpstart_server.http1 import head as module
from jumpstart_server.http1.events import NO_LIMIT_BYTES
from jumpstart_server.http1.request import HIGH_WATER_BYTES
from tests.server.parsing import CHUNKED, GET, body_of, both_ways, head_of, refusal, status_of, with_field


@pytest.mark.parametrize(
    "value",
    [
        b"+5",
        b"-1",
        b"1_0",
        b"0x5",
        b"",
        b"5, 5",
        b"5,5",
        b"5 5",
        b"5;",
        b"5.0",
        b"\xd9\xa1",
        b"\xb2",
        b"5\x0b",
        b"\xa05",
    ],
)
def test_lengths_that_are_refused(value: bytes) -> None:
    assert status_of(with_field(b"Content-Length: " + value)) == 400


@pytest.mark.parametrize(("first", "second"), [(b"5", b"5"), (b"5", b"6"), (b"0", b"0")])
def test_two_lengths_are_refused(first: bytes, second: bytes) -> None:
    assert status_of(with_field(b"Content-Length: " + first + b"\r\nContent-Length: " + second)) == 400


def test_lengths_that_are_taken() -> None:
    assert head_of(with_field(b"Content-Length:\t 05 ")).content_length == 5
    assert head_of(with_field(b"Content-Length: " + b"9" * 18)).content_length == 10**18 - 1
    assert status_of(with_field(b"Content-Length: " + b"9" * 19)) == 413


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b",chunked", 400),
        (b"chunked,", 400),
        (b"", 400),
        (b"\x0bchunked", 400),
        (b"\xa0chunked", 400),
        (b"chunked\x85", 400),
        (b"chunked chunked", 400),
        (b"chunked, chunked", 400),
        (b'"chunked"', 400),
        (b"chunked;a", 501),
        (b"xchunked", 501),
        (b"chunkedx", 501),
        (b"chunked, identity", 501),
        (b"identity", 501),
        (b"gzip, chunked", 501),
        (b"gzip", 501),
    ],
)
def test_transfer_codings_that_are_refused(value: bytes, status: int) -> None:
    assert status_of(with_field(b"Transfer-Encoding: " + value)) == status


@pytest.mark.parametrize("value", [b"chunked", b"CHUNKED", b"\t Chunked \t"])
def test_chunked_is_taken(value: bytes) -> None:
    events = both_ways(with_field(b"Transfer-Encoding: " + value) + b"0\r\n\r\n")
    assert isinstance(events[0], RequestHead) and events[0].chunked and events[0].content_length is None
    assert events[1:] == [RequestEnd()]


def test_both_lengths_or_codings_of_old_are_refused() -> None:
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked"
    assert status_of(with_field(both)) == 400
    assert status_of(with_field(b"\r\n".join(reversed(both.split(b"\r\n"))))) == 400
    assert status_of(with_field(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked")) == 400
    assert status_of(with_field(b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked")) == 501
    assert status_of(with_field(b"Transfer-Encoding: chunked", b"POST / HTTP/1.0")) == 400


# Bodies


def test_a_body_of_a_length() -> None:
    events = both_ways(with_field(b"Content-Length: 5") + b"hello")
    assert events[1:] == [BodyData(b"hello"), RequestEnd()]
    assert isinstance(events[0], RequestHead) and events[0].has_body


def test_a_whole_segment_of_body_is_not_copied() -> None:
    parser = RequestParser()
    parser.feed(with_field(b"Content-Length: 1000"))
    segment = b"x" * 999
    (event,) = parser.feed(segment)
    assert isinstance(event, BodyData) and event.data is segment


@pytest.mark.parametrize(
    "chunks",
    [
        b"5\r\nhello\r\n0\r\n\r\n",
        b"2\r\nhe\r\n3\r\nllo\r\n000\r\n\r\n",
        b"0000000000000005\r\nhello\r\n0\r\n\r\n",
        b'5;a=b;c="d \xff";;\r\nhello\r\n0;x\r\n\r\n',
        b"5 \t;a\r\nhello\r\n0\r\nX-Checksum: 1\r\nX-Forwarded-Proto: https\r\n\r\n",
    ],
)
def test_chunked_bodies(chunks: bytes) -> None:
    events = both_ways(CHUNKED + chunks)
    assert isinstance(events[0], RequestHead) and isinstance(events[-1], RequestEnd)
    assert body_of(events) == b"hello"
    assert events[0].headers == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]  # trailers are dropped


def test_many_small_chunks_in_a_segment_are_one_event() -> None:
    assert RequestParser().feed(CHUNKED + b"1\r\nx\r\n" * 100)[1:] == [BodyData(b"x" * 100)]


def test_the_end_of_a_chunk_in_another_segment() -> None:
    parser = RequestParser()
    parser.feed(CHUNKED + b"5\r\nhello")
    assert parser.feed(b"\r\n0\r\n\r\n") == [RequestEnd()]


def test_hexadecimal_digits_in_both_cases() -> None:
    for size in (b"1a", b"1A"):
        assert body_of(both_ways(CHUNKED + size + b"\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n")) == b"x" * 26


@pytest.mark.parametrize(
    "chunks",
    [
        b"0x5\r\n",
        b"+5\r\n",
        b"-5\r\n",
        b" 5\r\n",
        b"5 \r\n",
        b"5_0\r\n",
        b"\r\n",
        b";a\r\n",
        b"g\r\n",
        b"\xb2\r\n",
        b"00000000000000005\r\n",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"5\nhello",
        b"5;a\nb\r\n",
        b"5;a\rb\r\n",
        b"5;a\x00\r\n",
        b"5,a\r\n",
        b"5\r\r\n",
        b"5\r\nhelloX",
        b"5\r\nhello\n",
        b"5\r\nhello\rX",
        b"5\r\nhello0\r\n\r\n",
        b"0\r\n\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\n folded\r\n\r\n",
        b"0\r\nContent-Length: 5\r\n\r\n",
        b"0\r\ntransfer-encoding: chunked\r\n\r\n",
        b"0\r\nHost: evil\r\n\r\n",
        b"0\r\nAuthorization: x\r\n\r\n",
        b"0\r\nTrailer: x\r\n\r\n",
    ],
)
def test_chunks_and_trailers_that_are_refused(chunks: bytes) -> None:
    assert status_of(CHUNKED + chunks) == 400


def test_chunk_extensions_are_limited_over_the_whole_body() -> None:
    assert status_of(CHUNKED + b"5;" + b"x" * 65536) == 400
    assert status_of(CHUNKED + b"1;aa\r\nx\r\n" * 6000) == 400
    assert status_of(CHUNKED + b"5" + b" " * 65536) == 400
    limits = Limits(limit_chunk_extensions=6)
    assert body_of(both_ways(CHUNKED + b"1;a\r\nx\r\n" * 3 + b"0\r\n\r\n", limits=limits)) == b"xxx"
    assert status_of(CHUNKED + b"1;a\r\nx\r\n" * 4, limits=limits) == 400
    assert status_of(CHUNKED + b"1;abcdef\r\n", limits=limits) == 400


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"GET / HT", "head"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", "head"),
        (with_field(b"Content-Length: 5") + b"hell", "body"),
        (CHUNKED, "body"),
        (CHUNKED + b"5\r\nhello", "body"),
        (CHUNKED + b"5\r\nhello\r\n", "body"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", "body"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r", "body"),
    ],
)
def test_a_request_that_is_cut_short_never_ends(data: bytes, where: str) -> None:
    parser = RequestParser()
    assert RequestEnd() not in parser.feed(data)
    (error,) = parser.eof()
    assert isinstance(error, ParseError) and error.status == 400 and where in error.reason
    assert (error.head is None) == (where == "head")
    assert parser.state is State.CLOSED and parser.eof() == []


def test_an_end_between_requests_is_none_of_a_request() -> None:
    assert RequestParser().eof() == []
    parser = RequestParser()
    parser.feed(GET)
    assert parser.eof() == [] and parser.resume() == [] and parser.state is State.CLOSED


def test_what_waits_is_served_after_the_client_has_stopped_sending() -> None:
    parser = RequestParser()
    parser.feed(GET * 2 + b"GET /cut")
    assert parser.eof() == []
    assert parser.resume()[1:] == [RequestEnd()]
    (error,) = parser.resume()
    assert isinstance(error, ParseError) and error.excerpt == b"GET /cut"


# Limits


@pytest.mark.parametrize("limit", [50, 4094])
def test_request_lines_are_limited(limit: int) -> None:
    limits = Limits(limit_request_line=limit)
    path = b"/" + b"x" * (limit - len("GET / HTTP/1.1"))
    assert head_of(with_field(b"X: y", b"GET " + path + b" HTTP/1.1"), limits=limits).path == path
    assert status_of(with_field(b"X: y", b"GET " + path + b"x HTTP/1.1"), limits=limits) == 414
    assert status_of(b"GET " + path * 2, limits=limits) == 414


def test_field_lines_are_limited() -> None:
    line = b"X: " + b"y" * 8187
    assert len(head_of(with_field(line)).headers[1][1]) == 8187
    assert refusal(with_field(line + b"y"))[0] == 431
    assert refusal(with_field(b"A: b\r\n" + line * 2))[0] == 431
    assert refusal(GET[:-2] + b"x" * 8191) == (431, "a field is over limit_request_field_size")


def test_the_number_of_fields_is_limited() -> None:
    assert len(head_of(with_field(b"\r\n".join([b"X: y"] * 99))).headers) == 100
    assert status_of(with_field(b"\r\n".join([b"X: y"] * 100))) == 431
    assert status_of(with_field(b"\r\n".join([b"X_Y: z"] * 100))) == 431  # those left out count


def test_the_head_is_limited_as_a_whole() -> None:
    limits = Limits(limit_request_head=100)
    assert len(with_field(b"X: " + b"y" * 71)) == 100 + len(b"\r\n\r\n")
    assert head_of(with_field(b"X: " + b"y" * 71), limits=limits).headers[1][1] == b"y" * 71
    assert refusal(with_field(b"X: " + b"y" * 72), limits=limits) == (431, "the head is over limit_request_head")
    assert status_of(b"GET /" + b"x" * 100, limits=limits) == 414
    assert status_of(with_field(b"\r\n".join([b"X: " + b"y" * 8000] * 20))) == 431


def test_trailers_are_limited_like_fields() -> None:
    assert status_of(CHUNKED + b"0\r\n" + b"X: " + b"y" * 9000) == 431
    assert status_of(CHUNKED + b"0\r\n" + b"X: y\r\n" * 101) == 431


def test_no_limit_still_has_a_bound() -> None:
    limits = Limits(0, 0, 0, 0, limit_request_head=4 * 1024 * 1024)
    assert len(RequestParser(limits).feed(with_field(b"\r\n".join([b"X: y"] * 2000)))) == 2
    assert len(RequestParser(limits).feed(with_field(b"X: " + b"y" * 500_000))) == 2
    (error,) = RequestParser(limits).feed(GET[:-2] + b"y" * (NO_LIMIT_BYTES + 1))
    assert isinstance(error, ParseError) and error.status == 431


def test_a_body_over_the_limit_is_refused_before_it_comes() -> None:
    limits = Limits(limit_request_body=5)
    assert body_of(both_ways(with_field(b"Content-Length: 5") + b"hello", limits=limits)) == b"hello"
    (error,) = both_ways(with_field(b"Content-Length: 6"), limits=limits)
    assert isinstance(error, ParseError) and error.status == 413
    assert error.head is not None and error.head.method == "POST"


def test_chunked_bodies_are_counted_too() -> None:
    limits = Limits(limit_request_body=5)
    assert body_of(both_ways(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", limits=limits)) == b"hello"
    events = both_ways(CHUNKED + b"3\r\nhel\r\n3\r\n", limits=limits)
    assert isinstance(events[-1], ParseError) and events[-1].status == 413 and body_of(events) == b"hel"


# Pipelining and memory


def test_pipelined_requests_come_one_by_one() -> None:
    parser = RequestParser()
    events = parser.feed(b"".join(GET.replace(b"/ ", b"/%d " % number) for number in range(3)))
    paths = []
    while events:
        head, end = events
        assert isinstance(head, RequestHead) and isinstance(end, RequestEnd)
        paths.append(head.path)
        assert parser.state is State.RESTING and not parser.is_idle
        events = parser.resume()
    assert paths == [b"/0", b"/1", b"/2"]
    assert parser.is_idle and parser.resume() == []


def test_a_body_then_a_request() -> None:
    parser = RequestParser()
    assert body_of(parser.feed(with_field(b"Content-Length: 5") + b"hello" + GET)) == b"hello"
    assert len(parser.resume()) == 2
    parser.resume()
    assert body_of(parser.feed(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" + GET)) == b"hello"
    assert len(parser.resume()) == 2


def test_a_faulty_request_waits_for_its_turn() -> None:
    parser = RequestParser()
    assert parser.feed(GET + b"GET x HTTP/1.1\r\nHost: a\r\n\r\n")[1:] == [RequestEnd()]
    (error,) = parser.resume()
    assert isinstance(error, ParseError) and error.status == 400 and error.excerpt == b"GET x HTTP/1.1"
    assert error.head is None
    assert parser.feed(GET) == [] and parser.resume() == [] and parser.buffered_bytes == 0


def test_bytes_after_close_are_dropped() -> None:
    parser = RequestParser()
    assert parser.feed(with_field(b"Connection: close") + GET)[1:] == [RequestEnd()]
    assert parser.feed(GET) == [] and parser.resume() == [] and parser.wants_data


def test_an_upgrade_and_close_can_be_both() -> None:
    data = with_field(b"Connection: upgrade, close\r\nUpgrade: x", b"GET / HTTP/1.1") + GET
    parser = RequestParser()
    parser.feed(data)
    assert parser.take_rest() == GET
    parser = RequestParser()
    assert len(parser.feed(data)) == 2 and parser.resume() == [] and parser.state is State.CLOSED


def test_a_request_in_pieces_between_others() -> None:
    parser = RequestParser()
    parser.feed(GET + GET[:10])
    assert parser.feed(GET[10:12]) == [] and parser.feed(b"") == []
    assert parser.resume() == [] and not parser.is_idle
    assert len(parser.feed(GET[12:])) == 2


def test_reading_stops_while_much_waits() -> None:
    parser = RequestParser()
    parser.feed(GET)
    while parser.wants_data:
        parser.feed(GET * 100)
    assert HIGH_WATER_BYTES <= parser.buffered_bytes < HIGH_WATER_BYTES + len(GET) * 100
    count = 0
    while parser.resume():
        count += 1
    assert count > 1000 and parser.wants_data and parser.buffered_bytes == 0


def test_bytes_that_come_one_by_one_cost_linear_time() -> None:
    """120 KiB of head and 200 kB of body, a byte at a time: a second or so; with a copy each, minutes."""
    head = with_field(b"\r\n".join([b"X: " + b"y" * 8000] * 15) + b"\r\nContent-Length: 200000")
    parser = RequestParser()
    start = time.monotonic()
    for byte in head:
        parser.feed(bytes((byte,)))
        assert parser.buffered_bytes < 8192
    for _ in range(199_999):
        assert len(parser.feed(b"x")) == 1
    assert parser.feed(b"x")[-1] == RequestEnd()
    assert time.monotonic() - start < 15


def test_a_cache_of_lines_stays_small() -> None:
    parser = RequestParser()
    for number in range(3000):
        assert len(parser.feed(b"GET / HTTP/1.1\r\nHost: h%d\r\nUser-Agent: %d\r\n\r\n" % (number, number))) == 2
        parser.resume()
    assert len(module.repeated_lines) <= module.REPEATED_LINES and len(module._hosts) <= module.REPEATED_LINES
    assert len(parser.feed(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % (b"h" * 300))) == 2
    assert b"h" * 300 not in module._hosts


def test_an_excerpt_is_64_bytes_of_the_first_line() -> None:
    (error,) = RequestParser().feed(b"GET /" + b"x" * 100 + b" HTTP/1.1\r\nHost: a\r\nAuthorization : secret\r\n\r\n")
    assert isinstance(error, ParseError) and error.excerpt == b"GET /" + b"x" * 59
    assert "secret" not in error.detail
