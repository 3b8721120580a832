"""PEP 3333 on the WSGI engine: `close()` is called once, whoever leaves or raises (140, 48)."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.wsgi.connection import DISCONNECT_GRACE
from jumpstart_server.wsgi.exchange import ClientGoneError
from tests.server.wsgi_pep_lab import (
    PATIENCE,
    Body,
    Environ,
    Lab,
    StartResponse,
    answering,
    endless,
    failing,
    until,
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(multiprocess=True) as lab:
        yield lab


@pytest.fixture
def one_thread() -> Iterator[Lab]:
    with Lab(threads=1) as lab:
        yield lab


class Watch:
    """
    An app around a `Body` that notes where it was called and closed.

    Attributes:
        called_on: the threads.
        contexts: what the context variable said as it was closed.
    """

    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def __init__(self, chunks: Iterable[bytes], error: BaseException | None = None, **fields: str) -> None:
        self.status = "200 OK"
        self.fields = list(fields.items())
        self.called_on: list[int] = []
        self.contexts: list[str] = []
        self.body = Body(chunks, error, self._closing)

    def _closing(self) -> None:
        self.contexts.append(self.variable.get())

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        self.called_on.append(threading.get_ident())
        self.variable.set("set")
        start_response(self.status, self.fields)
        return self.body

    def check(self) -> None:
        until(lambda: self.body.closed)
        assert self.body.closed == 1
        assert self.contexts == ["set"]
        assert self.body.closed_on == self.called_on


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("chunks", [[], [b"a", b"b"], [b"", b"a"]])
def test_close_is_called_once_when_all_went_well(lab: Lab, method: str, chunks: list[bytes]) -> None:
    lab.app = watch = Watch(chunks)
    assert lab.ask(method=method, body=b"x" if method == "POST" else None).complete
    watch.check()


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_close_is_called_once_where_there_is_no_body(lab: Lab, status: str) -> None:
    lab.app = watch = Watch([b"a"])
    watch.status = status
    lab.ask()
    watch.check()


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("chunks", [[], [b""], [b"a"]])
def test_close_is_called_once_when_the_body_raises(
    lab: Lab, caplog: pytest.LogCaptureFixture, error: BaseException, chunks: list[bytes]
) -> None:
    lab.app = watch = Watch(chunks, error)
    lab.ask()
    watch.check()
    assert type(error).__name__ in caplog.text


def test_close_is_called_once_where_the_iteration_never_began(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Body):
        def __iter__(self) -> Iterator[bytes]:
            raise ValueError("no iterator")

    body = Broken([])
    failing(lab, answering(body), caplog)
    assert body.closed == 1
    assert body.given == 0


def test_close_is_called_once_where_the_app_was_not_ready(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    for body in (Body([b"too early"]), Body([]), Body([cast(bytes, "text")])):
        failing(lab, lambda environ, start_response, body=body: body, caplog)  # type: ignore[misc]
        assert body.closed == 1


def test_close_is_called_once_when_too_much_or_too_little_came(lab: Lab) -> None:
    for length in ("1", "100"):
        lab.app = watch = Watch([b"a", b"b", b"c"])
        watch.fields = [("Content-Length", length)]
        lab.ask()
        watch.check()


@pytest.mark.parametrize("error", [ValueError("close failed"), SystemExit(3)])
def test_close_that_raises_is_logged_and_the_answer_stands(
    lab: Lab, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    body = Body([b"a"], on_close=fail)
    lab.app = answering(body)
    with lab.connect() as client:
        client.get("/")
        response = client.response()
        assert (response.status, response.body, response.complete) == (200, b"a", True)
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next", "the connection is as good as ever"
    assert body.closed == 1
    assert type(error).__name__ in caplog.text


def test_close_that_raises_after_the_body_did(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("close failed")

    body = Body([], LookupError("the first"), fail)
    text = failing(lab, answering(body), caplog)
    assert "close failed" in text and "the first" in text
    assert body.closed == 1


@pytest.mark.parametrize("how", ["close", "reset", "end"])
@pytest.mark.slow
def test_a_client_that_leaves_ends_a_stream_and_closes_it_once(
    lab: Lab, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Cases 40 and 140, also where the client closes one half only and reads no more."""
    pause = threading.Event()

    def slow() -> Iterator[bytes]:
        while True:
            pause.wait(0.01)
            yield b"tick"

    lab.app = watch = Watch(slow())
    client = lab.connect()
    client.get("/")
    assert client.head()[0] == 200
    if how == "reset":
        client.reset()
    elif how == "end":
        client.end()
    else:
        client.sock.close()
    began = time.monotonic()
    watch.check()
    assert time.monotonic() - began < PATIENCE / 4  # within a second where the machine is idle
    client.sock.close()
    lab.wait_idle()
    assert caplog.text == "", "clients leave all the time"


@pytest.mark.slow
def test_empty_chunks_are_enough_to_notice_that_the_client_has_left(lab: Lab) -> None:
    pause = threading.Event()

    def silent() -> Iterator[bytes]:
        while True:
            pause.wait(0.01)
            yield b""

    lab.app = watch = Watch(silent())
    with lab.connect() as client:
        client.get("/")
        until(lambda: watch.body.given)
    watch.check()


def stuck(body: Body) -> Callable[[], bool]:
    """Whether *body* has not been asked for more since the last look."""
    last = [-1]

    def look() -> bool:
        before, last[0] = last[0], body.given
        time.sleep(0.05)
        return before == body.given > 0

    return look


@pytest.mark.slow
def test_a_client_that_leaves_while_nothing_more_fits_ends_the_stream_too(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.app = watch = Watch(endless(b"x" * 10_000))
    client = lab.connect(receive_buffer=4096)
    client.get("/")
    until(stuck(watch.body))
    client.reset()
    watch.check()
    lab.wait_idle()
    assert caplog.text == ""


@pytest.mark.slow
def test_a_slow_reader_holds_the_handler_and_not_the_memory(lab: Lab) -> None:
    """Case 43: what the kernel keeps for the two is all that is taken from the app."""
    lab.app = watch = Watch(endless(b"x" * 10_000))
    client = lab.connect(receive_buffer=4096)
    client.get("/")
    until(stuck(watch.body))
    given = watch.body.given
    assert given * 10_000 < 16 * 1024 * 1024  # tcp_wmem's maximum is 4 MiB
    client.head()
    until(lambda: client.more() and watch.body.given > given)
    client.reset()
    watch.check()


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with Lab(settings=ConnectionSettings(write_timeout=0.2)) as lab:
        lab.app = watch = Watch(endless(b"x" * 10_000))
        with lab.connect(receive_buffer=4096) as client:
            client.get("/")
            watch.check()
            with pytest.raises(ConnectionResetError):
                client.rest()
    assert caplog.text == ""


@pytest.mark.slow
def test_a_request_whose_client_left_before_its_turn_is_not_run(one_thread: Lab) -> None:
    """Case 140: gone before the start."""
    lab = one_thread
    go_on, calls = threading.Event(), list[str]()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        calls.append(environ["PATH_INFO"])
        assert go_on.wait(PATIENCE)
        start_response("200 OK", [])
        return Body([b"done"])

    lab.app = app
    with lab.connect() as first:
        first.get("/first")
        until(lambda: calls)
        second = lab.connect()
        second.get("/second")
        until(lambda: lab.server.stats().waiting == 1)
        second.reset()

        def is_known() -> bool:
            waiting = list(lab.server._waiting)
            return bool(waiting[0].gone_at) and time.monotonic() - waiting[0].gone_at > DISCONNECT_GRACE

        until(is_known)
        go_on.set()
        assert first.response().body == b"done"
        until(lambda: lab.server.stats().waiting == 0)
    lab.wait_idle()
    assert calls == ["/first"]


@pytest.mark.slow
def test_a_handler_that_writes_learns_that_the_client_left_and_is_told_again(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[BaseException] = []
    pause = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        while len(told) < 5:
            try:
                pause.wait(0.005)
                write(b"x")
            except ClientGoneError as error:
                told.append(error)
        return body

    body = Body([b"more"])
    lab.app = app
    client = lab.connect()
    client.get("/")
    client.head()
    client.sock.close()
    until(lambda: body.closed)
    lab.wait_idle()
    assert (len(told), body.closed) == (5, 1)
    assert isinstance(told[0], OSError)  # what code that writes to a client expects
    assert caplog.text == ""


@pytest.mark.slow
def test_close_that_raises_after_the_client_left_is_logged(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("close failed")

    pause = threading.Event()
    body = Body(iter(lambda: (pause.wait(0.005), b"x")[1], b""), on_close=fail)
    lab.app = answering(body)
    client = lab.connect()
    client.get("/")
    client.head()
    client.sock.close()
    until(lambda: body.closed)
    lab.wait_idle()
    assert body.closed == 1
    assert caplog.text.count("ValueError: close failed") == 1
