"""PEP 3333 on the WSGI engine: answers, their lengths, and `write` (141, 143, 145)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.wsgi_pep_lab import (
    PATIENCE,
    Body,
    Environ,
    Lab,
    StartResponse,
    answering,
    endless,
    failing,
    fields_of,
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(multiprocess=True) as lab:
        yield lab


@pytest.mark.parametrize("empty", [[], [b""], (), [b"", b""], iter([]), iter([b"", b""])])
def test_an_empty_answer_is_an_answer(lab: Lab, empty: Iterable[bytes]) -> None:
    lab.app = answering(empty, "200 OK", [("X-A", "b")])
    response = lab.ask()
    assert (response.status, response.body, response.complete) == (200, b"", True)
    assert fields_of(response) == [("x-a", "b"), ("content-length", "0")]


def test_an_answer_in_hand_gets_its_length(lab: Lab) -> None:
    for body in ([b"hello"], (b"hello",), [b"hel", b"lo"]):
        lab.app = answering(body)
        response = lab.ask()
        assert (response.body, fields_of(response)) == (b"hello", [("content-length", "5")])
    lab.app = answering(iter([b"hello"]))
    response = lab.ask()
    assert (response.body, response.get("transfer-encoding")) == (b"hello", "chunked")
    assert response.get("content-length") is None


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_a_length_of_the_apps_is_kept(lab: Lab, kind: str) -> None:
    lab.app = answering([b"hel", b"lo"] if kind == "list" else iter([b"hel", b"lo"]), headers=[("Content-Length", "5")])
    response = lab.ask()
    assert (response.body, response.complete) == (b"hello", True)
    assert fields_of(response) == [("content-length", "5")] and response.get("transfer-encoding") is None


def test_large_pieces_come_whole_and_in_order(lab: Lab) -> None:
    pieces = [bytes([number]) * 300_000 for number in range(5)]
    lab.app = answering(list(pieces))
    response = lab.ask()
    assert response.body == b"".join(pieces) and response.get("content-length") == "1500000"
    lab.app = answering(iter(pieces))
    assert lab.ask().body == b"".join(pieces)
    response = lab.ask(method="HEAD")
    assert response.complete


@pytest.mark.parametrize("body", ["list", "generator"])
def test_too_much_is_cut_and_logged(lab: Lab, caplog: pytest.LogCaptureFixture, body: str) -> None:
    chunks = [b"hel", b"lo you", b"x"]
    lab.app = answering(chunks if body == "list" else iter(chunks), headers=[("Content-Length", "5")])
    with lab.connect() as client:
        client.get("/")
        assert client.response().body == b"hello"
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next", "nothing of the rest came before it"
    assert "beyond its Content-Length" in caplog.text


def test_an_endless_answer_ends_with_its_length(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """PEP 3333: stop iterating over the response when enough data has been sent."""
    body = Body(endless())
    lab.app = answering(body, headers=[("Content-Length", "2500")])
    assert len(lab.ask().body) == 2500
    assert (body.given, body.closed) == (3, 1)


def test_what_comes_after_the_last_byte_still_runs(lab: Lab) -> None:
    ran: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "5")])
        yield b"hello"
        ran.append("after")

    lab.app = app
    assert lab.ask().complete
    assert ran == ["after"]


@pytest.mark.parametrize("body", ["list", "generator", "write", "nothing"])
def test_too_little_closes_the_connection(lab: Lab, caplog: pytest.LogCaptureFixture, body: str) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [("Content-Length", "50")])
        if body == "write":
            write(b"hello")
        return {"list": [b"hello"], "generator": iter([b"hello"])}.get(body, [])

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        assert not client.response().complete
        assert client.is_closed()
    lab.wait_idle()
    assert "fewer bytes than its Content-Length" in caplog.text


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
@pytest.mark.parametrize("body", [[], [b"oops"], [b"o", b"ops"], "generator", "write"])
def test_an_answer_without_a_body_has_none_and_keeps_the_connection(lab: Lab, status: str, body: Any) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response(status, [("X-A", "b")])
        if body == "write":
            write(b"oops")
            return []
        return endless() if body == "generator" else cast(Iterable[bytes], body)

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        response = client.response()
        assert (response.status, fields_of(response)) == (int(status[:3]), [("x-a", "b")])
        assert response.get("transfer-encoding") is None
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next"


def test_304_keeps_the_length_of_what_it_stands_for(lab: Lab) -> None:
    lab.app = answering([], "304 Not Modified", [("Content-Length", "7")])
    assert fields_of(lab.ask()) == [("content-length", "7")]


@pytest.mark.parametrize("status", ["100 Continue", "101 Switching Protocols", "103 Early Hints", "199 x"])
def test_an_app_cannot_answer_with_an_interim_status(lab: Lab, caplog: pytest.LogCaptureFixture, status: str) -> None:
    """No final answer would follow."""
    assert f"status {status!r}" in failing(lab, answering([], status), caplog)


@pytest.mark.parametrize(
    ("body", "headers", "length"),
    [
        ([], [], None),  # does not claim that the page is empty
        ([], [("Content-Length", "7")], "7"),
        ([b"hello"], [], "5"),
        ([b"hel", b"lo"], [], "5"),
        ([b"hello"], [("content-length", "7")], "7"),
        ("generator", [], None),
        ("generator", [("Content-Length", "7")], "7"),
        ("write", [("Content-Length", "7")], "7"),
    ],
)
def test_head_has_no_body_and_keeps_the_connection(
    lab: Lab, body: Any, headers: list[tuple[str, str]], length: str | None
) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", list(headers))
        if body == "write":
            write(b"hello")
            return [b"more"]
        return endless() if body == "generator" else cast(Iterable[bytes], body)

    lab.app = app
    with lab.connect() as client:
        client.get("/", method="HEAD")
        response = client.response("HEAD")
        assert (response.status, response.get("content-length")) == (200, length)
        assert response.get("transfer-encoding") is None and response.get("connection") != "close"
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next"


def test_chunks_of_a_generator_are_sent_one_by_one_and_empty_ones_not_at_all(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        yield b""
        start_response("201 Created", [("X-A", "b"), ("X-A", "c")])
        yield b""
        yield b"one"
        yield b""
        yield b"two"

    lab.app = app
    with lab.connect() as client:
        client.get("/", "Connection: close")
        raw = client.rest()
    assert raw.startswith(b"HTTP/1.1 201 Created\r\nX-A: b\r\nX-A: c\r\n")
    assert raw.partition(b"\r\n\r\n")[2] == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


def test_nothing_is_sent_before_there_is_a_body(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b""
        raise ValueError("changed my mind")

    failing(lab, app, caplog)


def test_the_first_chunk_does_not_wait_for_the_second(lab: Lab) -> None:
    go_on = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "6")])
        yield b"one"
        assert go_on.wait(PATIENCE)
        yield b"two"

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        assert client.head()[0] == 200
        assert client.exactly(3) == b"one"
        go_on.set()
        assert client.exactly(3) == b"two"


@pytest.mark.parametrize("last", ["list", "tuple", "generator", "lists"])
def test_write_sends_before_the_iterable_does(lab: Lab, last: str) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"one ")
        write(b"")
        write(b"two ")
        kinds: dict[str, Iterable[bytes]] = {"list": [b"three"], "tuple": (b"three",), "lists": [b"th", b"ree"]}
        return kinds.get(last, iter([b"th", b"ree"]))

    lab.app = app
    response = lab.ask()
    assert (response.body, response.complete) == (b"one two three", True)


def test_write_inside_the_iteration_keeps_the_order(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        write = start_response("200 OK", [])
        write(b"1")
        yield b"2"
        write(b"3")
        yield b"4"
        write(b"5")

    lab.app = app
    assert lab.ask().body == b"12345"


def test_write_sends_at_once(lab: Lab) -> None:
    go_on = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"")  # the head alone
        assert go_on.wait(PATIENCE)
        return [b"body"]

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        status, fields = client.head()
        assert (status, ("transfer-encoding", "chunked") in fields) == (200, True)
        go_on.set()
        assert client.line() == b"4"


def test_write_beyond_the_length_raises(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [("Content-Length", "5")])
        write(b"hel")
        write(b"lo you")
        return []

    lab.app = app
    response = lab.ask()
    assert (response.body, response.complete) == (b"hello", True)
    assert "write() beyond the Content-Length" in caplog.text


def test_write_after_the_end_or_from_another_thread_raises(lab: Lab) -> None:
    """The connection may be another request's by then."""
    writes: list[Callable[[bytes], None]] = []
    faults: list[BaseException] = []

    def attempt() -> None:
        try:
            writes[0](b"evil")
        except RuntimeError as error:
            faults.append(error)

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        writes.append(start_response("200 OK", []))
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(PATIENCE)
        return [b"fine"]

    lab.app = app
    assert lab.ask().body == b"fine"
    assert len(faults) == 1
    attempt()
    assert len(faults) == 2

    def later(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        attempt()  # on a thread of the pool, maybe the same one
        start_response("200 OK", [])
        return [b"mine"]

    lab.app = later
    assert lab.ask().body == b"mine"
    assert len(faults) == 3


def test_start_response_after_the_end_raises(lab: Lab) -> None:
    kept: list[StartResponse] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        kept.append(start_response)
        start_response("200 OK", [])
        return []

    lab.app = app
    lab.ask()
    with pytest.raises(RuntimeError):
        kept[0]("200 OK", [])
    with pytest.raises(RuntimeError):
        kept[0]("200 OK", [], (None, None, None))


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["write", "yield"]), st.binary(max_size=20)), max_size=6),
    length=st.one_of(st.none(), st.integers(0, 60)),
    method=st.sampled_from(["GET", "HEAD"]),
    version=st.sampled_from(["1.0", "1.1"]),
)
def test_whatever_an_app_does_the_client_gets_it_in_order_and_can_tell_its_end(
    lab: Lab, steps: list[tuple[str, bytes]], length: int | None, method: str, version: str
) -> None:
    def produce(write: Callable[[bytes], None]) -> Iterator[bytes]:
        for how, data in steps:
            if how == "write":
                write(data)
            else:
                yield data

    bodies: list[Body] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        headers = [("Content-Length", str(length))] if length is not None else []
        bodies.append(Body(produce(start_response("200 OK", headers))))
        return bodies[0]

    lab.app = app
    whole = b"".join(data for _, data in steps)
    logging.disable()
    try:
        with lab.connect() as client:
            client.get("/", version=version, method=method)
            response = client.response(method)
        lab.wait_idle()
    finally:
        logging.disable(logging.NOTSET)
    assert response.status == 200
    assert response.body == (b"" if method == "HEAD" else whole[:length])
    assert response.complete is (method == "HEAD" or length is None or len(whole) >= length)
    assert bodies[0].closed == 1
