"""The load generators' reader of responses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.response import BadResponse, ResponseReader

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\none\r\n\n\r\nc;name=value\r\n\r\n0\r\n\r\ntwo \n\r\n0\r\nX-Trailer: yes\r\n\r\n"
)
CHUNKED_BODY = b"one\r\n\n\r\n0\r\n\r\ntwo \n"
SIZED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nConnection: close\r\n\r\nwrong"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\nServer: x\r\n\r\nall that comes"


def read(parts: list[bytes]) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    return reader, b"".join([reader.feed(part) for part in parts])


def test_a_chunked_body() -> None:
    reader, body = read([CHUNKED])
    assert (reader.status, body, reader.complete, reader.close) == (200, CHUNKED_BODY, True, False)
    assert reader.body_bytes == len(CHUNKED_BODY)


def test_a_body_with_its_length() -> None:
    reader, body = read([SIZED])
    assert (reader.status, body, reader.complete, reader.close) == (404, b"wrong", True, True)


def test_an_empty_body() -> None:
    reader, body = read([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
    assert (body, reader.complete) == (b"", True)


def test_a_body_that_ends_with_the_connection() -> None:
    reader, body = read([UNTIL_CLOSE])
    assert (body, reader.complete, reader.close) == (b"all that comes", False, True)
    reader.end()
    assert reader.complete


def test_http_1_0_may_keep_the_connection() -> None:
    reader, _ = read([b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 0\r\n\r\n"])
    assert not reader.close


@pytest.mark.parametrize("whole", [CHUNKED, SIZED])
def test_a_response_that_is_cut_is_not_complete(whole: bytes) -> None:
    for length in range(len(whole)):
        reader, _ = read([whole[:length]])
        reader.end()
        assert not reader.complete, whole[:length]


@given(st.sampled_from([CHUNKED, SIZED, UNTIL_CLOSE]), st.lists(st.integers(0, 200), max_size=20))
def test_any_split_of_the_bytes_gives_the_same(whole: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    once, body = read([whole])
    split, same_body = read([part for at, end in itertools.pairwise(places) if (part := whole[at:end])])
    assert same_body == body
    assert (split.status, split.complete, split.close, split.body_bytes) == (
        once.status,
        once.complete,
        once.close,
        once.body_bytes,
    )


def test_tokens_in_one_read_and_one_token_in_several() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    parts = [
        reader.feed(data) for data in (b"4\r\none\n\r\n4\r\ntwo\n\r\n", b"6\r\nth", b"ree\n", b"\r\n0\r\n\r", b"\n")
    ]
    assert parts == [b"one\ntwo\n", b"th", b"ree\n", b"", b""]
    assert reader.complete


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        SIZED + b"x",
        CHUNKED + b"x",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nsix\r\nnumber\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nlonger\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 100,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_what_is_no_response_is_an_error(data: bytes) -> None:
    with pytest.raises(BadResponse):
        read([data])
