"""What a WSGI request leaves to the next, to those beside it, and to a child that its handler forks: nothing."""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.server.raw_http import Client
from tests.server.wsgi_pep_lab import (
    PATIENCE,
    Body,
    Environ,
    Lab,
    StartResponse,
    answering,
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(multiprocess=True) as lab:
        yield lab


@pytest.fixture
def one_thread() -> Iterator[Lab]:
    with Lab(threads=1) as lab:
        yield lab


def test_context_variables_do_not_leak_between_requests_and_come_from_the_server() -> None:
    ours: contextvars.ContextVar[str] = contextvars.ContextVar("ours", default="unset")
    theirs: contextvars.ContextVar[str] = contextvars.ContextVar("theirs", default="unset")
    seen: list[tuple[str, str]] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        seen.append((ours.get(), theirs.get()))
        theirs.set("left behind")
        start_response("200 OK", [])
        yield b"x"
        seen.append((ours.get(), theirs.get()))

    def start() -> Lab:
        ours.set("of the server")
        return Lab(app, threads=1)

    lab = contextvars.copy_context().run(start)
    with lab, lab.connect() as client:
        for number in range(4):  # the same bytes, which are known again, and others
            client.get("/" if number < 3 else "/other")
            assert client.response().complete
    assert seen == [("of the server", word) for _ in range(4) for word in ("unset", "left behind")]


@pytest.mark.slow
def test_an_abandoned_flask_stream_leaves_no_context_behind(one_thread: Lab) -> None:
    """Case 38: teardown runs as often as in requests that end well, in the abandoned one and in those after it."""
    import flask

    teardowns: list[str] = []
    pause = threading.Event()
    flask_app = flask.Flask("abandoned")

    @flask_app.route("/stream")
    def stream() -> flask.Response:
        def produce() -> Iterator[str]:
            while True:
                pause.wait(0.005)
                yield flask.request.path
                if "short" in flask.request.args:
                    return

        return flask.Response(flask.stream_with_context(produce()))

    @flask_app.route("/<int:number>")
    def normal(number: int) -> str:
        return flask.request.path

    @flask_app.teardown_request
    def teardown(error: BaseException | None) -> None:
        teardowns.append(flask.request.path)

    lab = one_thread
    lab.app = flask_app.wsgi_app
    assert lab.ask("/stream?short").body == b"/stream"
    of_a_stream, teardowns[:] = teardowns.copy(), []  # two: as the view returns, and as the stream ends
    client = lab.connect()
    client.get("/stream")
    assert client.head()[0] == 200
    client.sock.close()
    with lab.connect() as other:
        for number in range(5):
            other.get(f"/{number}")
            assert other.response().body == f"/{number}".encode()
            lab.wait_idle()
            assert not flask.has_request_context()
    assert teardowns == [*of_a_stream, *(f"/{number}" for number in range(5))]


def test_requests_run_side_by_side(lab: Lab) -> None:
    together = threading.Barrier(4)

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        together.wait(PATIENCE)
        start_response("200 OK", [])
        return [environ["PATH_INFO"].encode()]

    lab.app = app
    clients = [lab.connect() for _ in range(8)]
    for number, client in enumerate(clients):
        client.get(f"/{number}")
    for number, client in enumerate(clients):
        with client:
            assert client.response().body == f"/{number}".encode()


def test_pipelined_requests_are_answered_in_order(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        body = environ["wsgi.input"].read() + environ["PATH_INFO"].encode()
        return [body] if len(body) % 2 else iter([body])

    lab.app = app
    with lab.connect() as client:
        request = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
        client.send(b"".join(request % (number, number, b"x" * number) for number in range(9)))
        assert [client.response().body for _ in range(9)] == [b"x" * number + b"/%d" % number for number in range(9)]


def test_nothing_of_a_request_is_kept_after_it(lab: Lab) -> None:
    class Thing:
        pass

    seen: list[weakref.ref[Thing]] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        thing = Thing()
        environ["thing"] = thing
        seen.append(weakref.ref(thing))
        start_response("200 OK", [])
        if environ["PATH_INFO"] == "/fails":
            raise ValueError(thing)
        return [b"x"]

    lab.app = app
    logging.disable()
    try:
        with lab.connect() as client:  # kept open
            for path in ("/", "/", "/", "/other"):
                client.get(path)
                client.response()
            lab.ask("/fails")
            lab.wait_idle()
            gc.collect()
            assert [reference() for reference in seen] == [None] * 5
    finally:
        logging.disable(logging.NOTSET)


def test_the_client_class_of_the_lab_is_not_wrong_about_ends(lab: Lab) -> None:
    """Fakes and helpers are tested themselves: a response that is cut is not complete."""
    lab.app = answering(Body([b"x"], ValueError()))
    with lab.connect() as client:
        assert isinstance(client, Client)
        client.get("/")
        assert not client.response().complete


# ---------------------------------------------------------------------- handlers that fork


@pytest.mark.parametrize("how", ["exit", "raise", "return", "yield"])
def test_a_child_that_a_handler_forks_does_not_serve(how: str) -> None:
    """It has copies of all connections; what it says or does with them would be a second answer."""
    statuses: list[int] = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/fork":
            pid = os.fork()
            if not pid:
                if how == "exit":
                    sys.exit(7)
                if how == "raise":
                    raise ValueError("in the child")
                start_response("200 OK", [("Content-Length", "5")])
                return [b"child"] if how == "return" else iter([b"child"])
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        start_response("200 OK", [("Content-Length", "2")])
        return [b"ok"]

    with Lab(app) as lab, lab.connect() as client:
        for _ in range(3):
            client.send(b"GET /fork HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.response().body == b"ok"
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert client.response().body == b"ok"
    assert statuses == [{"exit": 7, "raise": 1, "return": 0, "yield": 0}[how]] * 3
