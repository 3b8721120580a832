"""The WSGI engine through real sockets: HTTP. Numbers are those of the cases in the project's collection."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import json
import logging
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from jumpstart_server.http1 import Limits, ProxyProtocol
from jumpstart_server.wsgi.connection import DISCONNECT_GRACE, HEAD
from tests.server.http_cases import (
    CHUNKED,
    CUT_SHORT,
    FORWARDED,
    GET,
    LOGGED,
    NO_PROXY_HEADER,
    PROXY_CUT_SHORT,
    PROXY_V1,
    PROXY_V2,
    PROXY_V2_LOCAL,
    REFUSED,
    STATUSES,
    TIGHT,
    WORDS,
    post,
)
from tests.server.raw_http import PATIENCE, Client, make_certificate, until
from tests.server.wsgi_lab import Environ, Gate, Lab, StartResponse, answer, echo, stream

HASTY = ConnectionSettings(
    limits=Limits(limit_request_body=100_000),
    header_timeout=0.3,
    body_timeout=0.3,
    write_timeout=0.4,
    keep_alive=0.3,
)
# Deadlines are looked at every quarter of a second, on a machine that others use too.
SLACK = 2.0
LOCAL = "127.0.0.1,::1"


@pytest.fixture(params=["spooled", "streamed", "crowded"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """
    A server with the defaults.

    Bodies are spooled, or read by the handlers; or a handler runs all the time, so that threads compete and other
    system calls are made.
    """
    with Lab(stream_bodies=request.param == "streamed") as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        if request.param != "crowded":
            yield lab
            return
        gate = Gate()
        with lab.connect() as client:
            client.get(lab.app(gate))
            until(lambda: gate.entered)
            lab.held = 1
            yield lab
            lab.held = 0
            gate.open()
            assert client.response().status == 200


@pytest.fixture(params=["spooled", "streamed"])
def hasty(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A server with short times and a small body limit."""
    with Lab(HASTY, stream_bodies=request.param == "streamed") as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a socket, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as name:
        yield Path(name)


def errors(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.ERROR]


def wait_for_grace(lab: Lab) -> None:
    """Until a client that has left can be taken for gone: an event has told of it, and a while has passed."""

    def is_over() -> bool:
        left = [connection.gone_at for connection in lab.server._all.values() if connection.gone_at]
        return bool(left) and time.monotonic() - max(left) > DISCONNECT_GRACE

    until(is_over)


def get(path: str, *fields: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path.encode(), b"".join(field + b"\r\n" for field in fields))


# ---------------------------------------------------------------------------------------- plain requests


def test_a_short_answer_has_its_length_and_the_connection_stays(lab: Lab) -> None:
    with lab.connect() as client:
        for _ in range(3):
            client.send(GET)
            response = client.response()
            assert (response.status, response.body) == (200, b"hello\n")
            assert response.get("content-length") == "6"
            assert response.get("date")
            assert response.get("keep-alive") == "timeout=75"  # 180


def test_a_body_in_one_piece_needs_no_length_of_the_app(lab: Lab) -> None:
    response = lab.ask(get(lab.app(answer(b"abc", length=False))))
    assert (response.get("content-length"), response.body) == ("3", b"abc")


@pytest.mark.parametrize(("version", "framing"), [("1.1", "chunked"), ("1.0", None)])
def test_a_stream_is_chunked_or_ends_with_the_connection(lab: Lab, version: str, framing: str | None) -> None:
    """56."""
    path = lab.app(stream(b"one ", b"", b"two ", b"three"))
    with lab.connect() as client:
        client.get(path, version=version)
        response = client.response()
        assert (response.body, response.complete) == (b"one two three", True)
        assert response.get("transfer-encoding") == framing
        if version == "1.0":
            assert response.get("connection") == "close"
        else:
            client.send(GET)
            assert client.response().status == 200


def test_http_1_0_is_kept_where_the_client_asks(lab: Lab) -> None:
    with lab.connect() as client:
        for _ in range(2):
            client.get("/", "Connection: keep-alive", version="1.0")
            assert client.response().get("connection") == "keep-alive"
        client.get("/", version="1.0")
        assert client.response().get("connection") == "close"
        assert client.is_closed()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_was_asked_before_is_answered_anew(lab: Lab, method: str) -> None:
    """A repeated request is known again by its bytes; everything that differs in another is seen."""
    seen: list[Environ] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ)
        environ["added"] = True
        return answer()(environ, start_response)

    path = lab.app(app)
    with lab.connect() as client:
        for field in ("X: 1", "X: 1", "X: 1", "X: 2", "X: 1"):
            client.get(path, field, method=method)
            assert client.response(method).status == 200
    assert [environ["HTTP_X"] for environ in seen] == ["1", "1", "1", "2", "1"]
    assert len({id(environ["wsgi.input"]) for environ in seen}) == 5
    assert all(environ["REQUEST_METHOD"] == method for environ in seen)
    lab.apps[path] = answer(b"new")
    assert lab.ask(get(path)).body == b"new"


def test_environ(lab: Lab) -> None:
    seen: Environ = {}

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        return answer()(environ, start_response)

    lab.app(app, "/a/b\xc3\xb6/")
    with lab.connect() as client:
        client.get(
            "/a%2Fb%C3%B6/?x=%20&y", "X-Tab: \t v ", "X_Y: dropped", "Cookie: a=1", "Cookie: b=2", "X: 1", "X: 2"
        )
        assert client.response().status == 200
        host, port = client.sock.getsockname()
    told = {name: value for name, value in seen.items() if name.startswith("HTTP_")}
    assert told == {"HTTP_HOST": "test", "HTTP_X_TAB": "v", "HTTP_COOKIE": "a=1; b=2", "HTTP_X": "1,2"}  # 131
    assert (seen["REMOTE_ADDR"], seen["REMOTE_PORT"]) == (host, str(port))
    assert (seen["SERVER_NAME"], seen["SERVER_PORT"]) == (lab.address[0], str(lab.address[1]))
    assert (seen["SCRIPT_NAME"], seen["QUERY_STRING"], seen["wsgi.url_scheme"]) == ("", "x=%20&y", "http")
    assert seen["RAW_URI"] == seen["REQUEST_URI"] == "/a%2Fb%C3%B6/?x=%20&y"
    assert "CONTENT_LENGTH" not in seen


def test_a_unix_socket_has_no_client_address(folder: Path) -> None:
    seen: Environ = {}

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        return answer()(environ, start_response)

    with Lab(app=app, uds=folder / "x.sock") as lab:
        with lab.connect() as client:
            for _ in range(3):
                client.send(GET)
                assert client.response().status == 200
            client.send(b"nonsense\r\n\r\n")
            assert client.response().status == 400
            assert client.is_closed()
    assert (seen["REMOTE_ADDR"], seen["REMOTE_PORT"]) == ("", "")
    assert (seen["SERVER_NAME"], seen["SERVER_PORT"]) == ("localhost", "80")


def test_a_large_body_comes_whole_over_a_unix_socket(folder: Path) -> None:
    body = bytes(range(256)) * 20_000
    with Lab(app=echo, uds=folder / "x.sock") as lab, lab.connect() as client:
        client.send(post(b"Content-Length: %d" % len(body), body))
        assert client.response().body == body


# ---------------------------------------------------------------------------------------- bodies of requests


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_an_upload_comes_back(lab: Lab, chunked: bool, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    if chunked:
        pieces = [body[i : i + 50_000] for i in range(0, size, 50_000)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces) + b"0\r\n\r\n"
        framing = CHUNKED
    else:
        data, framing = body, b"Content-Length: %d" % size
    with lab.connect() as client:
        for _ in range(2):
            client.send(post(framing, data))
            response = client.response()
            assert response.body == body


@pytest.mark.slow
def test_an_upload_in_single_bytes_takes_linear_time(lab: Lab) -> None:
    """103: each chunk has one byte, and the app takes them all at once."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        return answer(b"%d" % len(environ["wsgi.input"].read()))(environ, start_response)

    size = 300_000
    path = lab.app(app)
    began = time.monotonic()
    with lab.connect() as client:
        client.get(path, "Transfer-Encoding: chunked", method="POST")
        client.send(b"1\r\nx\r\n" * size + b"0\r\n\r\n")
        assert client.response().body == b"%d" % size
    assert time.monotonic() - began < 10  # quadratic: minutes


@pytest.mark.slow
def test_103_a_spooled_upload_is_not_kept_in_memory() -> None:
    """Its first half MiB is, and the rest lies in a file without a name, which is gone afterwards."""
    most: list[int] = []
    size = 60_000_000

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        gc.collect()
        most.append(resident_bytes())
        rest, number = size, 0
        while data := environ["wsgi.input"].read(1_000_000):
            number += 1
            rest -= len(data)
        return answer(b"%d" % rest)(environ, start_response)

    with Lab(app=app) as lab, lab.back_to_baseline(), lab.connect() as client:
        before = resident_bytes()
        client.get("/", f"Content-Length: {size}", method="POST")
        piece = bytes(1_000_000)
        for _ in range(size // len(piece)):
            client.send(piece)
        assert client.response().body == b"0"
        assert most[0] - before < 20_000_000


@pytest.mark.slow
def test_reading_stops_while_the_app_does_not_take_the_body() -> None:
    """Where handlers read bodies themselves, memory for an upload is what one read brings, and the kernel's."""
    gate = Gate(echo)
    size = 20_000_000
    with Lab(app=gate, stream_bodies=True) as lab, lab.connect() as client:
        client.get("/", f"Content-Length: {size}", method="POST")
        until(lambda: gate.entered)
        client.sock.setblocking(False)
        sent = 0
        stuck_since = time.monotonic()
        while time.monotonic() - stuck_since < 0.3:  # until nothing was taken for a while
            with contextlib.suppress(BlockingIOError):
                sent += client.sock.send(bytes(min(65536, size - sent)))
                stuck_since = time.monotonic()
        assert sent < size
        gate.open()
        client.sock.settimeout(PATIENCE)
        client.send(bytes(size - sent))
        assert len(client.response().body) == size


def test_continue_is_sent_when_the_app_reads_and_not_before(lab: Lab) -> None:
    gate = Gate(echo)
    path = lab.app(gate)
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Content-Length: 5", method="POST")
        until(lambda: gate.entered)
        client.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.more()
        client.sock.settimeout(PATIENCE)
        gate.open()
        assert client.response().status == 100
        client.send(b"12345")
        assert client.response().body == b"12345"
        client.send(GET)
        assert client.response().status == 200


def test_a_client_that_does_not_wait_for_continue_needs_none(lab: Lab) -> None:
    with lab.connect() as client:
        for _ in range(2):
            client.send(post(b"Expect: 100-continue\r\nContent-Length: 5", b"12345"))
            assert client.response().body == b"12345"


def test_an_app_that_does_not_want_the_body_spares_the_client_sending_it(lab: Lab) -> None:
    path = lab.app(answer(b"no", "403 Forbidden"))
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Content-Length: 5", method="POST")
        response = client.response()
        assert (response.status, response.get("connection")) == (403, "close")
        assert client.is_closed()


@pytest.mark.parametrize("size", [9000, 200_000])
def test_a_small_body_that_the_app_ignores_does_not_cost_the_connection(lab: Lab, size: int) -> None:
    """23, 128."""
    with lab.connect() as client:
        client.get("/", f"Content-Length: {size}", method="POST")
        client.send(bytes(size) + GET)
        for _ in range(2):
            response = client.response()
            assert response.status == 200 and response.get("connection") != "close"


def test_a_large_body_that_the_app_ignores_does_where_nobody_has_read_it(lab: Lab) -> None:
    """23: and the answer arrives although the client goes on sending."""
    with Lab(app=answer(), stream_bodies=True) as streaming, streaming.connect() as client:
        client.get("/", "Content-Length: 3000000", method="POST")
        client.send(bytes(200_000))
        response = client.response()
        assert (response.status, response.get("connection"), response.body) == (200, "close", b"hello\n")
        assert client.is_closed()


def test_23_a_body_that_does_not_come_blocks_no_thread() -> None:
    """Two threads; three clients announce a body that their handlers would not read, and send a part of it."""
    with Lab(app=answer(), threads=2) as lab, contextlib.ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(lab.connect())
            client.get("/", "Content-Length: 100000", method="POST")
            client.send(bytes(9000))
        until(lambda: lab.connections == 3)
        assert lab.ask(GET).status == 200
        until(lambda: not lab.busy)


@pytest.mark.parametrize("cut", CUT_SHORT)
def test_a_body_that_is_cut_short_is_never_seen_whole(lab: Lab, cut: bytes, log: pytest.LogCaptureFixture) -> None:
    """126: the app is not called, or its read raises."""
    seen: list[bytes | OSError] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            seen.append(environ["wsgi.input"].read())
        except OSError as error:
            seen.append(error)
            raise
        return answer()(environ, start_response)

    path = lab.app(app).encode()
    with lab.back_to_baseline():
        for expect in (b"", b"Expect: 100-continue\r\n"):
            for leave in (Client.end, Client.reset):
                with lab.connect() as client:
                    client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b%b" % (path, expect, cut))
                    until(lambda: lab.connections)
                    leave(client)
                    if leave is Client.end:
                        assert client.response().status == 400
                        assert client.is_closed()
                    until(lambda: not lab.connections)
    assert not [what for what in seen if isinstance(what, bytes)]
    assert len(seen) >= 2  # the handler reads it where the client expects to be told
    assert not errors(log)


def test_an_app_that_reads_on_in_spite_of_an_error_gets_it_again(lab: Lab) -> None:
    seen: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        for _ in range(2):
            try:
                environ["wsgi.input"].read()
            except OSError as error:
                seen.append(str(error))
        return answer(b"I know")(environ, start_response)

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Transfer-Encoding: chunked", method="POST")
        assert client.response().status == 100
        client.send(b"5\r\n12345\r\nnonsense\r\n")
        response = client.response()
        assert (response.status, response.body, response.get("connection")) == (200, b"I know", "close")
        assert client.is_closed()
    assert len(seen) == 2 and seen[0] == seen[1]


def test_an_app_that_answers_before_it_finds_the_body_broken(lab: Lab) -> None:
    """The head has gone out and promised to keep the connection; it is closed all the same, and at once."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"early"
        with contextlib.suppress(OSError):
            environ["wsgi.input"].read()
        yield b"late"

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Transfer-Encoding: chunked", method="POST")
        client.send(b"5\r\n12345\r\n")
        status, _ = client.head()
        assert status == 200
        client.send(b"nonsense\r\n")
        assert client.rest() == b"5\r\nearly\r\n4\r\nlate\r\n0\r\n\r\n"


# ---------------------------------------------------------------------------------------- pipelining


@pytest.mark.slow
def test_pipelined_requests_are_answered_in_order(lab: Lab) -> None:
    """128, 138."""
    gate = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        number = environ["QUERY_STRING"]
        if number == "0":
            assert gate.wait(PATIENCE)
        return answer(number.encode())(environ, start_response)

    path = lab.app(app).encode()
    with lab.connect() as client:
        client.send(b"".join(b"GET %b?%d HTTP/1.1\r\nHost: a\r\n\r\n" % (path, number) for number in range(1000)))
        gate.set()
        assert [client.response().body for _ in range(1000)] == [b"%d" % number for number in range(1000)]


def test_138_many_small_pipelined_requests_in_one_segment(lab: Lab) -> None:
    """As many as fit into one read, which is more than Python's stack is deep."""
    number = 64 * 1024 // len(GET) - 1
    with lab.connect() as client:
        client.send(GET * number)
        for _ in range(number):
            assert client.response().status == 200


def test_138_reading_stops_while_pipelined_requests_wait() -> None:
    """Memory is bounded by one read and the kernel's buffers, however much a client sends."""
    gate = Gate()
    with Lab(app=gate) as lab, lab.connect() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        client.send(GET)
        until(lambda: gate.entered)
        client.sock.settimeout(0.2)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 100_000_000:
                sent += client.sock.send(GET * 1000)
        assert sent < 30_000_000
        gate.open()
        client.sock.settimeout(PATIENCE)
        assert client.response().status == 200
        client.reset()


def test_a_pipelined_request_follows_a_body(lab: Lab) -> None:
    """128: read, unread, and one that is in the way of another."""
    with lab.connect() as client:
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc" + GET)
        assert [client.response().status for _ in range(2)] == [200, 200]
        client.send(post(b"Content-Length: 3", b"abc") + GET + post(CHUNKED, b"3\r\ndef\r\n0\r\n\r\n") + GET)
        assert [client.response().body for _ in range(4)] == [b"abc", b"hello\n", b"def", b"hello\n"]


def test_bytes_after_connection_close_are_ignored(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    """128."""
    with lab.connect() as client:
        client.send(get("/", b"Connection: close") + GET + b"\0\0 nonsense")
        assert client.response().get("connection") == "close"
        assert client.is_closed()
    assert not log.records


def test_bytes_after_connection_close_do_not_cost_the_answer(lab: Lab) -> None:
    """They come in a segment of their own while the handler runs; a close over them would be a reset."""
    gate = Gate(answer(bytes(1_000_000)))
    path = lab.app(gate)
    with lab.connect() as client:
        client.send(get(path, b"Connection: close"))
        until(lambda: gate.entered)
        client.send(GET * 100)
        gate.open()
        response = client.response()
        assert (len(response.body), response.complete) == (1_000_000, True)
        assert client.is_closed()


def test_a_good_request_and_a_bad_one(lab: Lab) -> None:
    """128."""
    with lab.connect() as client:
        client.send(GET + b"GET /a b HTTP/1.1\r\n\r\n")
        assert [client.response().status for _ in range(2)] == [200, 400]
        assert client.is_closed()


def test_a_client_that_closes_its_side_still_gets_its_answers(lab: Lab) -> None:
    for number in (1, 3):
        with lab.connect() as client:
            client.send(GET * number)
            client.end()
            assert [client.response().status for _ in range(number)] == [200] * number
            assert client.is_closed()
    until(lambda: not lab.connections)


def test_a_client_that_closes_its_side_before_the_server_looks_is_not_forgotten() -> None:
    """Bytes and their end are one event then, of which no second one tells."""
    lab = Lab(app=answer())
    clients = [lab.connect() for _ in range(3)]
    for number, client in enumerate(clients):
        client.send(GET * number)
        client.end()
    with lab:
        for number, client in enumerate(clients):
            assert [client.response().status for _ in range(number)] == [200] * number
            assert client.is_closed()
            client.sock.close()
        until(lambda: not lab.connections)


@pytest.mark.slow
def test_a_client_that_closes_its_side_gets_an_answer_that_was_whole_in_time(lab: Lab) -> None:
    """It may only have closed its sending side. An answer at hand is sent; a stream is not kept up for it."""
    gate = Gate()
    path = lab.app(gate)
    with lab.connect() as client:
        client.get(path)
        until(lambda: gate.entered)
        client.end()
        wait_for_grace(lab)
        gate.open()
        assert client.response().body == b"hello\n"
        assert client.is_closed()


# ---------------------------------------------------------------------------------------- faulty requests (G)


@pytest.mark.parametrize(("data", "status"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused(lab: Lab, data: bytes, status: int, log: pytest.LogCaptureFixture) -> None:
    """Group G: the status, `Connection: close`, a close, and no word at ERROR."""
    with lab.connect() as client:
        client.send(data)
        response = client.response()
        assert (response.status, response.get("connection"), response.complete) == (status, "close", True)
        assert client.is_closed()
    assert not errors(log)
    assert lab.ask(GET).status == 200


def test_130_a_harmless_trailer_changes_nothing(lab: Lab) -> None:
    response = lab.ask(post(CHUNKED, b"2\r\nab\r\n0\r\nX-Forwarded-Proto: https\r\n\r\n"))
    assert response.body == b"ab"


def test_136_absolute_form_wins_over_host(lab: Lab) -> None:
    seen: list[Environ] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ)
        return answer()(environ, start_response)

    path = lab.app(app)
    assert lab.ask(b"GET http://real%b?q HTTP/1.1\r\nHost: other\r\n\r\n" % path.encode()).status == 200
    assert (seen[0]["HTTP_HOST"], seen[0]["PATH_INFO"], seen[0]["QUERY_STRING"]) == ("real", path, "q")


@pytest.mark.parametrize("framing", ["Content-Length: 5000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)])
def test_133_a_body_over_the_limit_is_refused_and_the_answer_arrives(
    hasty: Lab, framing: str, expect: tuple[str, ...], log: pytest.LogCaptureFixture
) -> None:
    """413 before the body is read, through a client that goes on sending for a while."""
    with hasty.back_to_baseline():
        with hasty.connect() as client:
            client.get("/echo", framing, *expect, method="POST")
            with contextlib.suppress(ConnectionError):
                for _ in range(5):
                    client.send(b"8000\r\n%b\r\n" % bytes(0x8000))
            response = client.response()
            if response.status == 100:
                response = client.response()
            assert (response.status, response.complete) == (413, True)
            assert client.is_closed()
    assert not errors(log)


def test_135_the_reason_is_logged_and_not_too_often(log: pytest.LogCaptureFixture) -> None:
    with Lab(app=answer()) as lab:
        for _ in range(40):
            lab.ask(b"GET /\xf0\x9f\x98\x80 HTTP/1.1\r\nHost: a\r\nCookie: secret\r\n\r\n")
    lines = [record for record in log.records if record.name.startswith("jumpstart_server")]
    assert 10 <= len(lines) <= 40  # ten a second
    line = lines[0].getMessage()
    assert lines[0].levelno == logging.INFO
    assert "127.0.0.1" in line and "400" in line and r"/\xf0\x9f" in line
    assert "secret" not in log.text


def test_138_a_request_in_single_bytes(lab: Lab) -> None:
    with lab.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post(b"Content-Length: 3", b"abc"):
            client.send(bytes((byte,)))
        assert client.response().body == b"abc"


def test_28_after_garbage_and_resets_all_is_as_before(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    with lab.back_to_baseline():
        for number in range(60):
            client = lab.connect()
            client.send((b"\0garbage", GET, b"GET / HT", post(b"Content-Length: 9", b"1"))[number % 4])
            client.reset()
    assert lab.ask(GET).status == 200
    until(lambda: not lab.busy)
    assert not errors(log)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS | st.binary(max_size=20), max_size=12), st.booleans())
def test_any_bytes_get_an_answer_or_a_close(
    lab: Lab, log: pytest.LogCaptureFixture, words: list[bytes], well_begun: bool
) -> None:
    """Never a hang, never a traceback. When the client has said all, everything it is sent is a series of responses."""
    log.clear()
    with lab.connect() as client:
        try:
            client.send((GET if well_begun else b"") + b"".join(words))
            client.end()
            while client.buffer or client.more():
                assert client.response().status in STATUSES
        except (ConnectionError, AssertionError) as error:
            if isinstance(error, AssertionError) and "closed without" not in str(error):
                raise
    # An app that knows two paths fails for any other; of everything else there is no word.
    assert not [line for line in errors(log) if "exception in the app" not in line]


SERIES = st.lists(
    st.sampled_from(
        [
            *(
                GET,
                get("/", b"X: y"),
                post(b"Content-Length: 5", b"12345"),
                post(CHUNKED, b"5;a\r\n12345\r\n0\r\nT: a\r\n\r\n"),
            ),
            *(post(b"Expect: 100-continue\r\nContent-Length: 5", b"12345"), post(b"Content-Length: 0")),
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
            b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        ]
    ),
    max_size=4,
)
LAST = st.sampled_from([b"", GET[:-1], get("/", b"Connection: close"), *(case[1] for case in REFUSED)]).filter(
    lambda data: len(data) < 2000
)


def answers_to(lab: Lab, parts: Iterable[bytes]) -> bytes:
    """All that comes, but for interim answers, which depend on how much was there, and dates."""
    with lab.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.send(part)
            client.end()
        data = client.rest().replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    return b"\r\n".join(line for line in data.split(b"\r\n") if not line.startswith(b"Date:"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SERIES, LAST, st.data())
def test_any_split_of_the_bytes_gives_the_same_answers(
    lab: Lab, series: list[bytes], last: bytes, more: st.DataObject
) -> None:
    data = b"".join(series) + last
    cuts = sorted(more.draw(st.sets(st.integers(1, max(len(data) - 1, 1)), max_size=12)))
    parts = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)])]
    assert answers_to(lab, parts) == answers_to(lab, [data])


# ---------------------------------------------------------------------------------------- disconnects (B)


class Words:
    """A body that goes on until it is closed, a word each time that it is told to."""

    def __init__(self, size: int = 5, pause: float = 0.005) -> None:
        self.closed = threading.Event()
        self.given = 0
        self._size = size
        self._pause = pause

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        return self

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.closed.wait(self._pause)
            self.given += 1
            yield b"x" * self._size

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


@pytest.mark.slow
@pytest.mark.parametrize("leave", [Client.__exit__, Client.reset, Client.end], ids=["close", "reset", "end"])
def test_40_a_stream_is_closed_after_its_client_has_left(
    lab: Lab, log: pytest.LogCaptureFixture, leave: Callable[[Client], None]
) -> None:
    words = Words()
    path = lab.app(words)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        assert client.head()[0] == 200
        assert client.line() == b"5"
        left = time.monotonic()
        leave(client)
        assert words.closed.wait(PATIENCE)
        assert time.monotonic() - left < 1 + SLACK
        client.sock.close()
    assert not errors(log)  # 51


@pytest.mark.slow
def test_40_a_client_that_left_while_the_handler_waited_gets_nothing_more(
    lab: Lab, log: pytest.LogCaptureFixture
) -> None:
    """It had sent more by then, which nobody will answer."""
    words = Words()
    gate = Gate(words)
    path = lab.app(gate)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        until(lambda: gate.entered)
        client.send(GET)
        client.sock.close()
        wait_for_grace(lab)
        gate.open()
        assert words.closed.wait(PATIENCE)
    assert not errors(log)


@pytest.mark.slow
def test_a_client_that_left_while_its_request_waited_is_not_served() -> None:
    gate = Gate()
    called: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        called.append(environ["PATH_INFO"])
        return gate(environ, start_response)

    with Lab(app=app, threads=1) as lab, lab.back_to_baseline():
        with lab.connect() as first, lab.connect() as last:
            first.get("/first")
            until(lambda: gate.entered)
            left = lab.connect()
            left.get("/left")
            until(lambda: lab.server.stats().waiting == 1)
            left.reset()
            last.get("/last")
            until(lambda: lab.server.stats().waiting == 2)
            wait_for_grace(lab)
            gate.open()
            assert first.response().status == last.response().status == 200
    assert called == ["/first", "/last"]


@pytest.mark.slow
def test_a_post_runs_to_its_end_when_nobody_waits_for_it(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    """Half a payment is worse than one that nobody waits for."""
    done: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        done.append(environ["wsgi.input"].read().decode())
        return answer()(environ, start_response)

    gate = Gate(app)
    path = lab.app(gate)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path, "Content-Length: 2", method="POST")
        client.send(b"ok")
        until(lambda: gate.entered)
        client.sock.close()
        gate.open()
        until(lambda: done)
    assert done == ["ok"]
    assert not errors(log)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("in_pieces", [True, False])
def test_41_resets_in_the_middle_of_a_large_body_leave_nothing_behind(
    lab: Lab, log: pytest.LogCaptureFixture, in_pieces: bool
) -> None:
    chunk = bytes(1_000_000)
    path = lab.app(stream(*[chunk] * 10) if in_pieces else answer(bytes(10_000_000)))

    def burst(count: int) -> None:
        for _ in range(count):
            client = lab.connect()
            client.get(path)
            assert client.sock.recv(10)
            client.reset()
        until(lambda: not lab.busy and not lab.connections)
        gc.collect()

    with lab.back_to_baseline():
        burst(20)
        before = resident_bytes()
        burst(200)
        until(lambda: resident_bytes() - before < 20_000_000)
    assert not errors(log)


def test_43_a_slow_reader_costs_the_kernels_buffers(lab: Lab) -> None:
    """Nothing is produced ahead of a client that does not read, and it goes on when that does."""
    chunk = bytes(100_000)
    given = 0

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        nonlocal given
        start_response("200 OK", [])
        for _ in range(300):
            given += 1
            yield chunk

    path = lab.app(app)
    with Client(socket.socket()) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sock.connect(lab.address)
        client.get(path)
        previous = -1
        while given != previous or not given:  # until it does not move any more
            previous = given
            time.sleep(0.1)
        assert given < 200
        response = client.response()
        assert (len(response.body), response.complete) == (30_000_000, True)


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_53_an_exception_in_the_middle_of_a_body_can_be_seen(
    lab: Lab, log: pytest.LogCaptureFixture, framing: str
) -> None:
    """No last chunk, fewer bytes than announced, or a reset."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Length", "100")] if framing == "length" else [])
        yield b"half"
        raise ValueError("no more")

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, version="1.0" if framing == "close" else "1.1")
        if framing == "close":
            with pytest.raises(ConnectionResetError):
                client.rest()
        else:
            response = client.response()
            assert (response.body, response.complete) == (b"half", False)
            assert client.is_closed()
    until(lambda: log.records)
    assert "no more" in log.text and "Traceback" in log.text


def test_a_body_shorter_than_its_length_is_seen_to_be(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    path = lab.app(answer(b"abc", headers=[("Content-Length", "10")], length=False))
    with lab.connect() as client:
        client.get(path)
        response = client.response()
        assert (response.body, response.complete) == (b"abc", False)
    until(lambda: errors(log))
    assert "fewer bytes" in errors(log)[0]


def test_a_body_longer_than_its_length_is_cut(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    path = lab.app(answer(b"abcdef", headers=[("Content-Length", "3")], length=False))
    with lab.connect() as client:
        client.get(path)
        assert client.response().body == b"abc"
        client.send(GET)
        assert client.response().status == 200
    assert "3 bytes beyond" in errors(log)[0]


def test_an_app_that_fails_costs_its_answer_and_nothing_else(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        raise ValueError("oh")

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path)
        response = client.response()
        assert (response.status, response.get("connection")) == (500, "close")
        assert client.is_closed()
    assert len(errors(log)) == 1
    assert path in errors(log)[0]
    assert lab.ask(GET).status == 200


def test_an_app_may_do_what_it_likes_to_its_environ(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        environ.clear()
        return answer()(environ, start_response)

    path = lab.app(app)
    with lab.connect() as client:
        for _ in range(3):
            client.get(path)
            assert client.response().status == 200
    assert not errors(log)


def test_the_app_may_close_the_connection(lab: Lab) -> None:
    path = lab.app(answer(headers=[("Connection", "close")]))
    with lab.connect() as client:
        client.get(path)
        assert client.response().get("connection") == "close"
        assert client.is_closed()


var: contextvars.ContextVar[str] = contextvars.ContextVar("var")


def test_158_contexts_are_clean_between_requests(lab: Lab) -> None:
    """Also after a body, for a request that is known again, and when requests are pipelined."""
    seen: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(var.get("unset"))
        var.set("leaked")
        return echo(environ, start_response)

    path = lab.app(app)
    body = bytes(500_000)
    with lab.connect() as client:
        for _ in range(2):
            client.get(path, f"Content-Length: {len(body)}", method="POST")
            client.send(body)
            assert client.response().body == body
        for _ in range(2):
            client.get(path)
            assert client.response().status == 200
        client.send(get(path) * 2)
        for _ in range(2):
            assert client.response().status == 200
    assert seen == ["unset"] * 6


# ---------------------------------------------------------------------------------------- times (A 26, 101, K 180)


def took(began: float, expected: float) -> bool:
    return expected - 0.05 <= time.monotonic() - began <= expected + SLACK


@pytest.mark.slow
def test_101_100_a_connection_that_says_nothing_is_closed(hasty: Lab) -> None:
    with hasty.back_to_baseline():
        began = time.monotonic()
        with hasty.connect() as client:
            assert client.is_closed()
            assert took(began, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", GET], ids=["a new connection", "one that was idle"])
def test_26_a_head_that_dribbles_has_its_time_and_no_more(hasty: Lab, first: bytes) -> None:
    with hasty.connect() as client:
        if first:
            client.send(first)
            assert client.response().status == 200
        began = time.monotonic()
        client.send(b"GET / HTTP/1.1\r\n")
        client.sock.settimeout(0.05)
        while True:
            try:
                if client.more():
                    break
            except TimeoutError:
                client.send(b"X: y\r\n")
        client.sock.settimeout(PATIENCE)
        assert took(began, 0.3)
        assert client.response().status == 408
        assert client.is_closed()


@pytest.mark.slow
@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)])
def test_26_a_body_that_stops_is_answered(hasty: Lab, expect: tuple[str, ...], log: pytest.LogCaptureFixture) -> None:
    with hasty.back_to_baseline(), hasty.connect() as client:
        client.get("/echo", "Content-Length: 5", *expect, method="POST")
        began = time.monotonic()
        client.send(b"1")
        response = client.response()
        if response.status == 100:
            response = client.response()
        assert response.status == 408
        assert took(began, 0.3)
        assert client.is_closed()
    assert not errors(log)


@pytest.mark.slow
def test_26_a_body_that_stops_behind_its_answer_is_not_waited_for(hasty: Lab) -> None:
    """The handler has not read it, and the connection was to be kept."""
    with hasty.back_to_baseline(), hasty.connect() as client:
        client.get("/", "Content-Length: 5", method="POST")
        client.send(b"1")
        until(lambda: hasty.connections)
        assert client.response().status in (200, 408)  # streamed, spooled
        assert client.is_closed()


@pytest.mark.slow
def test_a_body_that_dribbles_is_taken(hasty: Lab) -> None:
    """The time is one between two pieces."""
    with hasty.connect() as client:
        client.get("/echo", "Content-Length: 5", method="POST")
        for byte in b"12345":
            time.sleep(0.12)
            client.send(bytes((byte,)))
        assert client.response().body == b"12345"


@pytest.mark.slow
def test_a_slow_app_is_not_a_slow_client(hasty: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        time.sleep(0.9)  # longer than the time, and than it takes to look
        return echo(environ, start_response)

    path = hasty.app(app)
    with hasty.connect() as client:
        client.get(path, "Content-Length: 90000", method="POST")
        client.send(bytes(90_000))
        assert len(client.response().body) == 90_000
        client.get(path, "Content-Length: 5", "Expect: 100-continue", method="POST")
        assert client.response().status == 100
        client.send(b"12345")
        assert client.response().body == b"12345"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pieces", "one piece", "file"])
def test_26_a_client_that_takes_nothing_is_cut(hasty: Lab, kind: str, log: pytest.LogCaptureFixture) -> None:
    size = 30_000_000

    def file(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        handle = tempfile.TemporaryFile()  # noqa: SIM115  # the server closes it
        handle.truncate(size)
        start_response("200 OK", [])
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](handle)
        return wrapped

    apps = {"pieces": stream(*[bytes(size // 30)] * 30), "one piece": answer(bytes(size)), "file": file}
    path = hasty.app(apps[kind])
    with hasty.back_to_baseline():
        client = Client(socket.socket())
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sock.connect(hasty.address)
        began = time.monotonic()
        client.get(path)
        until(lambda: hasty.busy)
        until(lambda: not hasty.busy and not hasty.connections)
        assert took(began, 0.4)
        client.sock.close()
    assert not errors(log)


@pytest.mark.slow
def test_a_slow_reader_is_not_cut(hasty: Lab) -> None:
    size = 3_000_000
    path = hasty.app(answer(bytes(size)))
    with Client(socket.socket()) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sock.connect(hasty.address)
        client.get(path)
        received = 0
        began = time.monotonic()
        while time.monotonic() - began < 1.2:  # three times as long as write_timeout
            received += len(client.sock.recv(30_000))
            time.sleep(0.05)
        while received < size:
            received += len(client.sock.recv(1_000_000))


@pytest.mark.slow
def test_180_an_idle_connection_is_kept_and_closed(hasty: Lab) -> None:
    with hasty.connect() as client:
        for _ in range(6):
            client.send(GET)
            assert client.response().status == 200
            time.sleep(0.15)
        client.send(GET)
        assert client.response().status == 200
        began = time.monotonic()
        assert client.is_closed()
        assert took(began, 0.3)


def test_180_a_request_that_comes_as_the_idle_time_ends_is_not_lost(lab: Lab) -> None:
    """The time is over when the keeper looks; the request has come, and perhaps nobody has read it yet."""
    for _ in range(50):
        with lab.connect() as client:
            client.send(GET)
            assert client.response().status == 200
            client.send(GET)
            lab.server.tick(time.monotonic() + 1000, False)
            assert client.response().status == 200


def test_no_keep_alive() -> None:
    with Lab(ConnectionSettings(keep_alive=0), answer()) as lab, lab.connect() as client:
        client.send(GET)
        assert client.response().get("connection") == "close"
        assert client.is_closed()


def test_21_25_30_idle_and_silent_connections_are_in_nobodys_way() -> None:
    with Lab(app=answer(), threads=4) as lab, contextlib.ExitStack() as stack:
        for number in range(60):
            client = stack.enter_context(lab.connect())
            if number % 2:
                client.send(GET)
                assert client.response().status == 200
        began = time.monotonic()
        assert lab.ask(GET).status == 200
        assert time.monotonic() - began < 1  # the deadlines of the others are a minute away
        until(lambda: not lab.busy)


@pytest.mark.slow
def test_105_more_requests_than_may_wait_are_refused(lab: Lab) -> None:
    """The one thread hangs: ten wait, and nobody else does."""
    gate = Gate()
    with Lab(app=gate, threads=1, queue=10) as small, contextlib.ExitStack() as stack:
        first = stack.enter_context(small.connect())
        first.send(GET)
        until(lambda: gate.entered)
        clients = [stack.enter_context(small.connect()) for _ in range(200)]
        for client in clients:
            client.send(GET)
        until(lambda: small.connections <= 11 or _all_answered(clients, 190))
        gate.open()
        statuses = [client.response().status for client in clients]
        assert sorted(statuses) == [200] * 10 + [503] * 190
        assert first.response().status == 200
        assert small.server.stats().threads == 1


def _all_answered(clients: list[Client], number: int) -> bool:
    """Whether so many have an answer to read."""
    found = 0
    for client in clients:
        client.sock.setblocking(False)
        try:
            found += bool(client.sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            pass
        finally:
            client.sock.settimeout(PATIENCE)
    return found >= number


@pytest.mark.parametrize(
    "fields", [("Upgrade: h2c",), ("Upgrade: foo/2",), ("Upgrade: websocket", "Content-Length: 2")]
)
def test_upgrades_are_ignored(lab: Lab, fields: tuple[str, ...]) -> None:
    with lab.connect() as client:
        for _ in range(2):
            client.get("/echo", "Connection: upgrade", *fields, method="POST")
            client.send(b"ok" if len(fields) > 1 else b"")
            assert client.response().status == 200
        client.send(GET)
        assert client.response().status == 200
        client.get("/", "Connection: upgrade, close", "Upgrade: h2c")
        assert client.response().get("connection") == "close"
        assert client.is_closed()


# ---------------------------------------------------------------------------------------- drain


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_60_65_drain(streamed: bool) -> None:
    gate = Gate()
    begun: list[str] = []

    def never(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        begun.append(environ["PATH_INFO"])
        return answer()(environ, start_response)

    with (
        Lab(stream_bodies=streamed) as lab,
        lab.connect() as idle,
        lab.connect() as busy,
        lab.connect() as half,
        lab.connect() as fresh,
    ):
        lab.app(answer(), "/")
        for _ in range(2):  # the second one is known by its bytes
            idle.send(GET)
            assert idle.response().status == 200
        busy.send(get(lab.app(gate)) + get(lab.app(never)))  # pipelined
        half.send(GET[:10])
        until(lambda: gate.entered)
        until(lambda: lab.connections == 4)
        until(lambda: [each for each in lab.server._all.values() if each.phase == HEAD])
        began = time.monotonic()
        lab.stop()
        assert idle.is_closed() and fresh.is_closed()
        assert time.monotonic() - began < 0.5 + SLACK
        half.send(GET[10:])
        response = half.response()
        assert (response.status, response.get("connection")) == (200, "close")
        gate.open()
        response = busy.response()
        assert (response.status, response.get("connection")) == (200, "close")
        assert busy.is_closed() and half.is_closed()
    assert not begun


@pytest.mark.slow
@pytest.mark.parametrize("first", [GET, get("/", b"X: y")], ids=["known", "parsed"])
def test_60_a_response_that_began_before_the_stop_does_not_keep_its_connection(first: bytes) -> None:
    """Its head had promised to."""
    gate = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"first"
        assert gate.wait(PATIENCE)
        yield b"last"

    with Lab(app=app) as lab, lab.connect() as client:
        gate.set()
        client.send(GET)
        assert client.response().body == b"firstlast"
        gate.clear()
        client.send(first)
        assert client.head()[0] == 200
        lab.stop()
        gate.set()
        assert client.rest().endswith(b"last\r\n0\r\n\r\n")


@pytest.mark.slow
def test_65_a_client_that_goes_on_asking_is_closed_after_an_answer() -> None:
    with Lab(app=answer()) as lab, lab.connect() as client:
        client.send(GET)
        assert client.response().status == 200
        lab.stop()
        client.send(GET)
        assert client.response().get("connection") == "close"
        assert client.is_closed()


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100_000])
def test_58_what_waits_to_be_accepted_is_served(size: int) -> None:
    """Nothing has been accepted when it is told to stop. One client has sent half a head by then."""
    lab = Lab(app=echo)
    clients = [lab.connect() for _ in range(40)]
    data = post(b"Content-Length: %d" % size, bytes(size))
    slow, *others = clients
    slow.send(data[:20])
    for client in others:
        client.send(data)
    lab.listener.setblocking(False)
    lab.server.pool.start()  # and no listener is in the epoll
    lab.stop()
    for client in [*others, slow]:
        if client is slow:
            time.sleep(0.8)  # longer than an idle connection has left
            slow.send(data[20:])
        response = client.response()
        assert (response.status, response.get("connection"), len(response.body)) == (200, "close", size)
        client.sock.close()
    lab.__exit__(None, None, None)


@pytest.mark.slow
def test_a_stop_waits_for_nobody_who_says_nothing() -> None:
    """A connection that was made and forgotten, one with half a PROXY header."""
    settings = ConnectionSettings(proxy_protocol="auto", proxy_senders=TrustedProxies(LOCAL))
    with Lab(settings, answer()) as lab, lab.connect() as half, lab.connect() as silent:
        half.send(PROXY_V1[:10])
        until(lambda: lab.connections == 2)
        began = time.monotonic()
        lab.stop()
        assert half.is_closed() and silent.is_closed()
        assert time.monotonic() - began < 1 + SLACK


@pytest.mark.slow
def test_61_what_the_end_does_not_wait_for_is_closed_with_a_503_if_it_has_not_begun(tmp_path: Path) -> None:
    """One handler hangs, one request waits behind it, and one client has sent half a head."""
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "%(s)s %(r)s")
    gate = Gate()
    lab = Lab(app=gate, threads=1, access=log)
    lab.start()
    with lab.connect() as running, lab.connect() as waiting, lab.connect() as half:
        running.get("/running")
        until(lambda: gate.entered)
        waiting.get("/waiting")
        half.send(GET[:10])
        until(lambda: lab.server.stats().waiting == 1 and lab.connections == 3)
        lab.stop()
        lab.server.close(0.1)
        assert waiting.response().status == 503
        assert waiting.is_closed() and half.is_closed()
        gate.open()
        assert running.response().status == 200  # it ended after all, since this process did not
    until(lambda: not lab.threads)
    assert sorted(path.read_text().splitlines()) == ["503 GET /running HTTP/1.1", "503 GET /waiting HTTP/1.1"]
    lab.close()
    log.close()


# ---------------------------------------------------------------------------------------- proxies (K 178, 176, G 130)


def who(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """Tells what the environ says of the connection."""
    told = [environ[name] for name in ("REMOTE_ADDR", "REMOTE_PORT", "wsgi.url_scheme", "SERVER_NAME", "SERVER_PORT")]
    return answer(json.dumps(told).encode())(environ, start_response)


def trusting(text: str | None, **more: Any) -> ConnectionSettings:
    return ConnectionSettings(proxies=None if text is None else TrustedProxies(text), **more)


def proxied(
    version: ProxyProtocol = "auto", senders: str = LOCAL, proxies: str | None = None, **more: Any
) -> ConnectionSettings:
    return trusting(proxies, proxy_protocol=version, proxy_senders=TrustedProxies(senders), **more)


def read_told(client: Client) -> list[str]:
    response = client.response()
    assert response.status == 200
    found: list[str] = json.loads(response.body)
    return found


def told(client: Client, *fields: str) -> list[str]:
    client.get("/", *fields)
    return read_told(client)


def of_socket(client: Client) -> list[str]:
    """Address and port that the server sees."""
    host, port = client.sock.getsockname()
    return [host, str(port)]


@pytest.fixture
def near() -> Iterator[Lab]:
    """A server that trusts the proxies on its own host."""
    with Lab(trusting(LOCAL), who) as lab:
        yield lab


@pytest.fixture
def behind() -> Iterator[Lab]:
    """A server that wants PROXY headers, and trusts the headers of 192.0.2.7 and of its own host."""
    with Lab(proxied(proxies=f"192.0.2.7,{LOCAL}"), who) as lab:
        yield lab


def test_178_a_trusted_proxy_says_who_the_client_is_request_by_request(near: Lab) -> None:
    server = [near.address[0], str(near.address[1])]
    with near.connect() as client:
        own = of_socket(client)
        assert told(client) == [*own, "http", *server]
        for _ in range(2):
            for number in (7, 7, 8):  # the second 7 is known by its bytes
                found = told(client, f"X-Forwarded-For: 6.6.6.6, 192.0.2.{number}", "X-Forwarded-Proto: https")
                assert found == [f"192.0.2.{number}", "0", "https", *server]
        found = told(client, "X-Forwarded-For: 6.6.6.6", "X-Forwarded-For: 192.0.2.7:99")
        assert found[:2] == ["192.0.2.7", "99"]
        assert told(client, "X-Forwarded-For: garbage")[:2] == own
        assert told(client) == [*own, "http", *server]


def test_130_a_trailer_says_nothing_about_the_client(near: Lab) -> None:
    with near.connect() as client:
        client.send(post(CHUNKED, b"2\r\nab\r\n0\r\nX-Forwarded-Proto: https\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n"))
        found = read_told(client)
        assert (found[0], found[2]) == ("127.0.0.1", "http")


@pytest.mark.parametrize("trust", [None, "10.0.0.0/8,unix:", ""])
def test_nobody_else_is_believed(trust: str | None) -> None:
    with Lab(trusting(trust), who) as lab, lab.connect() as client:
        client.send(FORWARDED)
        assert read_told(client)[:3] == [*of_socket(client), "http"]


def test_176_peers_over_a_unix_socket_are_trusted_by_their_own_word(folder: Path) -> None:
    for number, (trust, client_address, scheme) in enumerate(
        [
            ("unix:", ["203.0.113.9", "0"], "https"),
            ("*", ["203.0.113.9", "0"], "https"),
            (f"{LOCAL},0.0.0.0/0", ["", ""], "http"),
        ]
    ):
        with Lab(trusting(trust), who, uds=folder / f"{number}.sock") as lab, lab.connect() as client:
            client.send(FORWARDED)
            assert read_told(client)[:3] == [*client_address, scheme]


def test_a_client_that_has_left_already_is_not_taken_for_one_over_a_unix_socket() -> None:
    seen: list[Environ] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ)
        return who(environ, start_response)

    lab = Lab(trusting("unix:"), app)
    for _ in range(10):
        client = lab.connect()
        client.send(FORWARDED)
        client.reset()
    with lab, lab.connect() as other:  # accepted after them
        assert told(other)[0] == "127.0.0.1"
    assert {environ["REMOTE_ADDR"] for environ in seen} == {"127.0.0.1"}
    assert {environ["wsgi.url_scheme"] for environ in seen} == {"http"}


@pytest.mark.parametrize("header", [PROXY_V1, PROXY_V2], ids=["v1", "v2"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_proxy_header_says_who_the_client_is_on_the_whole_connection(behind: Lab, header: bytes, size: int) -> None:
    data = header + GET
    with behind.connect() as client:
        for at in range(0, len(data), size):
            client.send(data[at : at + size])
        for _ in range(3):
            assert read_told(client) == ["192.0.2.7", "56324", "http", "198.51.100.1", "443"]
            client.send(GET)
        read_told(client)


def test_a_header_alone_waits_for_its_request(behind: Lab) -> None:
    with behind.connect() as client:
        client.send(PROXY_V1)
        until(lambda: behind.connections)
        client.send(GET + GET)
        assert read_told(client) == read_told(client)


def test_headers_are_believed_of_those_whom_the_proxy_names_and_not_of_the_proxy(behind: Lab) -> None:
    others = PROXY_V1.replace(b"192.0.2.7", b"192.0.2.8")
    for header, host, scheme in (
        (PROXY_V2, "203.0.113.9", "https"),
        (PROXY_V1, "203.0.113.9", "https"),
        (others, "192.0.2.8", "http"),
    ):
        with behind.connect() as client:
            client.send(header + FORWARDED)
            found = read_told(client)
            assert (found[0], found[2]) == (host, scheme)


def test_a_proxy_that_speaks_for_itself_is_its_own_client(behind: Lab) -> None:
    with behind.connect() as client:
        client.send(PROXY_V2_LOCAL + GET + FORWARDED)
        assert read_told(client)[:2] == of_socket(client)
        assert read_told(client)[:2] == ["203.0.113.9", "0"]


def test_an_unknown_client_is_served_and_not_believed(behind: Lab) -> None:
    with behind.connect() as client:
        client.send(b"PROXY UNKNOWN\r\n" + FORWARDED)
        assert read_told(client)[:3] == [*of_socket(client), "http"]


@pytest.mark.parametrize(("data", "reason"), NO_PROXY_HEADER)
def test_a_connection_that_does_not_begin_so_is_closed_without_an_answer(
    behind: Lab, data: bytes, reason: str, log: pytest.LogCaptureFixture
) -> None:
    with behind.back_to_baseline(), behind.connect() as client:
        client.send(data)
        assert client.is_closed()
    until(lambda: [record for record in log.records if reason in record.getMessage()])
    assert all(record.levelno == logging.INFO for record in log.records)


@pytest.mark.parametrize("data", PROXY_CUT_SHORT)
def test_a_client_that_leaves_in_the_middle_of_the_header_leaves_nothing_behind(behind: Lab, data: bytes) -> None:
    with behind.back_to_baseline(), behind.connect() as client:
        client.send(data)
        client.end()
        assert client.is_closed()


@pytest.mark.parametrize(("version", "header"), [("v1", PROXY_V2), ("v2", PROXY_V1)])
def test_one_version_may_be_all_that_is_taken(version: ProxyProtocol, header: bytes) -> None:
    with Lab(proxied(version), who) as lab:
        with lab.connect() as client:
            client.send(header + GET)
            assert client.is_closed()
        with lab.connect() as client:
            client.send((PROXY_V1 if version == "v1" else PROXY_V2) + GET)
            assert read_told(client)[:2] == ["192.0.2.7", "56324"]


def test_who_may_not_send_a_header_may_not_connect(folder: Path, log: pytest.LogCaptureFixture) -> None:
    with Lab(proxied(senders="10.0.0.0/8,unix:"), who) as lab:
        with lab.connect() as client:
            assert client.is_closed()
        until(lambda: log.records)
    assert any("--proxy-allow-from" in record.getMessage() for record in log.records)
    with Lab(proxied(senders="unix:"), who, uds=folder / "x.sock") as lab, lab.connect() as client:
        client.send(PROXY_V1 + GET)
        assert read_told(client)[:2] == ["192.0.2.7", "56324"]
    with Lab(proxied(senders=LOCAL), who, uds=folder / "y.sock") as lab, lab.connect() as client:
        assert client.is_closed()


@pytest.mark.slow
@pytest.mark.parametrize("trickle", [b"", PROXY_V1[:1], PROXY_V1], ids=["nothing", "a byte", "a header"])
def test_the_header_and_the_head_behind_it_share_one_time(trickle: bytes) -> None:
    with Lab(proxied(header_timeout=0.3), who) as lab, lab.connect() as client:
        began = time.monotonic()
        for at in range(len(trickle)):
            client.send(trickle[at : at + 1])
        assert client.is_closed()
        assert took(began, 0.3)


# ---------------------------------------------------------------------------------------- TLS


@pytest.fixture(params=["spooled", "streamed"])
def safe(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[Lab]:
    """A server that speaks TLS."""
    with Lab(tls=certificate, stream_bodies=request.param == "streamed") as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


def test_tls(safe: Lab, log: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ["wsgi.url_scheme"])
        return echo(environ, start_response)

    path = safe.app(app)
    with safe.back_to_baseline():
        with safe.connect() as client:
            for size in (0, 400_000, 3_000_000):
                client.get(path, f"Content-Length: {size}", method="POST")
                client.send(bytes(size))
                assert client.response().body == bytes(size)
            client.get(path)
            assert client.response().status == 200
            client.send(b"nonsense\r\n\r\n")
            assert client.response().status == 400
            assert client.is_closed()  # and said so: an end without a word would raise
        with safe.connect() as client:  # leaves without an answer
            client.get(path, "Content-Length: 10", method="POST")
            until(lambda: safe.connections)
    assert set(seen) == {"https"}
    assert not errors(log)


def test_tls_requests_in_records_of_their_own_are_all_answered(safe: Lab) -> None:
    """Several may have come when the first is read, of which no second event tells."""
    with safe.connect() as client:
        for number in (1, 2, 20):
            for _ in range(number):
                client.send(GET)
            assert [client.response().status for _ in range(number)] == [200] * number


def test_tls_streams_and_files_come_whole(safe: Lab) -> None:
    def file(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        handle = tempfile.TemporaryFile()  # noqa: SIM115  # the server closes it
        handle.write(b"x" * 2_000_000)
        handle.seek(0)
        start_response("200 OK", [])
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](handle)
        return wrapped

    with safe.connect() as client:
        client.get(safe.app(file))
        assert client.response().body == b"x" * 2_000_000
        client.get(safe.app(stream(b"a" * 100_000, b"b" * 100_000)), version="1.0")
        assert client.response().body == b"a" * 100_000 + b"b" * 100_000


def test_tls_an_answer_to_a_client_that_goes_on_sending_arrives(certificate: tuple[Path, Path]) -> None:
    """133."""
    with Lab(HASTY, echo, tls=certificate) as lab, lab.connect() as client:
        client.get("/", "Content-Length: 5000000", method="POST")
        for _ in range(5):
            client.send(bytes(0x8000))
        response = client.response()
        assert (response.status, response.complete) == (413, True)


def test_53_over_tls_a_cut_is_not_taken_for_an_end(safe: Lab) -> None:
    """A body that ends with the connection, and fails: there is no good-bye."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"half"
        raise ValueError("meant")

    with safe.connect() as client:
        client.get(safe.app(app), version="1.0")
        with pytest.raises(OSError):
            client.rest()


@pytest.mark.slow
def test_40_over_tls_a_client_that_leaves_is_noticed(safe: Lab, log: pytest.LogCaptureFixture) -> None:
    words = Words()
    with safe.back_to_baseline():
        client = safe.connect()
        client.get(safe.app(words))
        assert client.head()[0] == 200
        client.sock.close()
        assert words.closed.wait(PATIENCE)
    assert not errors(log)


@pytest.mark.slow
def test_28_connections_that_speak_no_tls_leave_nothing_behind(
    certificate: tuple[Path, Path], log: pytest.LogCaptureFixture
) -> None:
    with Lab(ConnectionSettings(header_timeout=0.3), answer(), tls=certificate) as lab:
        with lab.back_to_baseline():
            for data in (b"", GET, b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
                for leave in (Client.reset, Client.end, lambda client: None):
                    with Client(socket.create_connection(lab.address, PATIENCE)) as client:
                        client.send(data)
                        with contextlib.suppress(OSError):  # which it has by now, perhaps
                            leave(client)
                            if leave is not Client.reset:
                                client.rest()  # an alert perhaps, and the end
        assert lab.ask(GET).status == 200
    assert not errors(log)


# ---------------------------------------------------------------------------------------- the access log (J 171)


class Bench:
    """A server with an access log, and what that holds."""

    def __init__(self, lab: Lab, path: Path) -> None:
        self.lab = lab
        self._path = path
        self._taken = 0

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def line(self) -> dict[str, Any]:
        """The one line that is new, waited for."""
        until(lambda: len(self.lines) > self._taken)
        lines = self.lines[self._taken :]
        self._taken += len(lines)
        assert len(lines) == 1
        return lines[0]

    def settle(self) -> None:
        """Wait until nothing runs, and see that no line has come."""
        until(lambda: not self.lab.connections and not self.lab.busy)
        assert self.lines[self._taken :] == []


TIGHT_AND_HASTY = ConnectionSettings(
    limits=TIGHT, header_timeout=0.4, body_timeout=0.4, write_timeout=0.4, proxies=TrustedProxies("10.0.0.1")
)


@contextlib.contextmanager
def make_bench(folder: Path, **more: Any) -> Iterator[Bench]:
    path = folder / "access.log"
    access = AccessLog(str(path), "json")
    with Lab(TIGHT_AND_HASTY, access=access, **more) as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield Bench(lab, path)
    assert access.lost == 0
    access.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with make_bench(tmp_path) as bench:
        yield bench


def summary(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["method"], line["path"], line["status"], line["bytes"]


def test_a_request_is_one_line(bench: Bench) -> None:
    """170."""
    with bench.lab.connect() as client:
        for _ in range(2):  # the second one is known by its bytes
            client.get("/?a=%20b", "User-Agent: lab", "X-Request-ID: 7")
            assert client.response().status == 200
            line = bench.line()
            assert summary(line) == ("GET", "/", 200, 6)
            assert (line["query"], line["protocol"], line["client"]) == ("a=%20b", "HTTP/1.1", "127.0.0.1")
            assert (line["user_agent"], line["request_id"]) == ("lab", "7")
            assert 0 < line["app_ms"] <= line["duration_ms"] < 5000
            assert line["queue_ms"] + line["app_ms"] == pytest.approx(line["duration_ms"], abs=0.01)
    bench.settle()


def test_requests_of_one_connection_have_their_lines_in_order(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(b"".join(b"GET /?%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(5)))
        for _ in range(5):
            assert client.response().status == 200
        until(lambda: len(bench.lines) == 5)
    assert [line["query"] for line in bench.lines] == list("01234")


@pytest.mark.parametrize(
    ("method", "status", "sent"), [("HEAD", "200 OK", 0), ("GET", "204 No Content", 0), ("GET", "404 Not Found", 8)]
)
def test_bytes_are_those_of_the_body_that_went_out(bench: Bench, method: str, status: str, sent: int) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.app(answer(b"unwanted", status), "/x"), method=method)
        assert client.response(method).status == int(status[:3])
    assert summary(bench.line()) == (method, "/x", int(status[:3]), sent)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream_counts_what_it_says_and_not_how_it_is_framed(bench: Bench, version: str) -> None:
    path = bench.lab.app(stream(b"x", b"x" * 20_000, b"x" * 300, b"end"), "/x")
    with bench.lab.connect() as client:
        client.get(path, version=version)
        assert len(client.response().body) == 20_304
    line = bench.line()
    assert (*summary(line), line["protocol"]) == ("GET", "/x", 200, 20_304, f"HTTP/{version}")


@pytest.mark.parametrize(
    ("request_", "status", "method", "path"), [case[1:] for case in LOGGED], ids=[case[0] for case in LOGGED]
)
def test_requests_that_are_refused(
    bench: Bench, request_: bytes, status: int, method: str | None, path: str | None
) -> None:
    with bench.lab.connect() as client:
        client.send(request_)
        response = client.response()
        assert response.status == status
    line = bench.line()
    assert summary(line) == (method, path, status, len(response.body))
    assert line["client"] == "127.0.0.1"
    bench.settle()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_that_is_too_large_in_the_end(tmp_path: Path, streamed: bool) -> None:
    with make_bench(tmp_path, stream_bodies=streamed) as bench:
        with bench.lab.connect() as client:
            client.get("/echo", "Transfer-Encoding: chunked", method="POST")
            client.send(b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n")
            response = client.response()
        assert summary(bench.line()) == ("POST", "/echo", 413, len(response.body))
        bench.settle()


@pytest.mark.slow
def test_a_head_that_does_not_arrive_in_time(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(b"GET / HT")
        assert client.response().status == 408
    line = bench.line()
    assert (line["method"], line["status"]) == (None, 408)
    assert line["duration_ms"] >= 390
    bench.settle()


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_that_does_not_arrive_in_time(tmp_path: Path, streamed: bool) -> None:
    with make_bench(tmp_path, stream_bodies=streamed) as bench:
        with bench.lab.connect() as client:
            client.get("/echo", "Content-Length: 5", method="POST")
            client.send(b"12")
            response = client.response()
        line = bench.line()
        assert summary(line) == ("POST", "/echo", 408, len(response.body))
        assert line["duration_ms"] >= 390
        bench.settle()


def test_connections_that_never_asked_leave_no_line(bench: Bench) -> None:
    with bench.lab.connect():
        pass
    with bench.lab.connect() as client:
        client.get("/")
        assert client.response().status == 200
        assert summary(bench.line()) == ("GET", "/", 200, 6)
    bench.settle()


def test_an_app_that_fails_before_its_answer(bench: Bench) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        raise ValueError("meant")

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        response = client.response()
        assert response.status == 500
    assert summary(bench.line()) == ("GET", "/x", 500, len(response.body))
    bench.settle()


def test_an_app_that_fails_in_the_middle_is_500_too(bench: Bench) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"half"
        raise ValueError("meant")

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        assert not client.response().complete
    assert summary(bench.line()) == ("GET", "/x", 500, 4)
    bench.settle()


@pytest.mark.slow
@pytest.mark.parametrize("leave", [Client.__exit__, Client.reset], ids=["close", "reset"])
def test_171_a_client_that_leaves_before_the_answer_is_499(bench: Bench, leave: Callable[[Client], None]) -> None:
    gate = Gate()
    client = bench.lab.connect()
    client.get(bench.lab.app(gate, "/x"))
    until(lambda: gate.entered)
    leave(client)
    wait_for_grace(bench.lab)
    gate.open()
    line = bench.line()
    assert summary(line)[:3] == ("GET", "/x", 499)
    assert line["app_ms"] > 0
    bench.settle()


@pytest.mark.slow
def test_171_a_client_that_leaves_in_the_middle_is_499_with_what_it_got(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.app(Words(10), "/x"))
        client.head()
        assert client.line() == b"a"
        client.reset()
    line = bench.line()
    assert (line["status"], line["bytes"] % 10) == (499, 0) and line["bytes"] > 0
    bench.settle()


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_499(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.app(Words(64 * 1024, 0), "/x"))
        line = bench.line()
    assert line["status"] == 499
    assert 0 < line["bytes"] <= 16 * 1024 * 1024  # what the kernels of both sides hold
    assert line["duration_ms"] >= 390
    bench.settle()


@pytest.mark.parametrize("streamed", [False, True])
def test_171_a_client_that_breaks_off_its_body_is_499(tmp_path: Path, streamed: bool) -> None:
    with make_bench(tmp_path, stream_bodies=streamed) as bench:
        with bench.lab.connect() as client:
            client.get("/echo", "Content-Length: 5", method="POST")
            client.send(b"12")
            until(lambda: [each for each in bench.lab.server._all.values() if each.head])
            client.reset()
        assert summary(bench.line()) == ("POST", "/echo", 499, 0)
        bench.settle()


def test_a_client_that_only_stops_sending_gets_its_answer_and_its_status(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(GET)
        client.end()
        assert client.response().status == 200
    assert summary(bench.line()) == ("GET", "/", 200, 6)
    bench.settle()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_171_requests_that_are_shed_are_503_with_the_time_they_waited(tmp_path: Path, method: str) -> None:
    """One is too many, and one waits too long."""
    gate = Gate()
    with make_bench(tmp_path, threads=1, queue=1, queue_timeout=0.3) as bench:
        lab = bench.lab
        with lab.connect() as first, lab.connect() as second, lab.connect() as third:
            first.get(lab.app(gate, "/first"))
            until(lambda: gate.entered)
            second.get("/second", method=method)
            until(lambda: lab.server.stats().waiting == 1)
            third.get("/third", method=method)
            for client, path in ((third, "/third"), (second, "/second")):
                response = client.response(method)
                assert (response.status, response.get("retry-after")) == (503, "1")
                assert client.is_closed()
                line = bench.line()
                assert summary(line) == (method, path, 503, len(response.body))
                assert line["queue_ms"] >= (290 if path == "/second" else 0)
            gate.open()
            assert first.response().status == 200
            assert summary(bench.line()) == ("GET", "/first", 200, 6)
        bench.settle()


@pytest.mark.slow
def test_171_a_client_that_left_while_its_request_waited_is_499(tmp_path: Path) -> None:
    gate = Gate()
    with make_bench(tmp_path, threads=1) as bench:
        lab = bench.lab
        with lab.connect() as first:
            first.get(lab.app(gate, "/first"))
            until(lambda: gate.entered)
            client = lab.connect()
            client.get("/left")
            until(lambda: lab.server.stats().waiting == 1)
            client.sock.close()
            wait_for_grace(lab)
            gate.open()
            assert first.response().status == 200
            until(lambda: len(bench.lines) == 2)
        found = {line["path"]: line for line in bench.lines}
        assert (found["/left"]["status"], found["/first"]["status"]) == (499, 200)
        assert found["/left"]["queue_ms"] >= 500


def test_text_formats_with_headers_of_both_sides_behind_a_proxy(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "%(h)s %({x-cache}o)s %({host}i)s %({server_port}e)s")
    settings = ConnectionSettings(proxies=TrustedProxies("127.0.0.1"))
    with Lab(settings, answer(headers=[("X-Cache", "hit")]), access=log) as lab, lab.connect() as client:
        client.get("/", "X-Forwarded-For: 192.0.2.9")
        assert client.response().status == 200
        client.get("/", "X-Forwarded-For: 192.0.2.9", "Transfer-Encoding: gzip", method="POST")
        assert client.response().status == 501
        assert client.is_closed()
    assert path.read_text() == f"192.0.2.9 hit test {lab.address[1]}\n127.0.0.1 - - -\n"
    log.close()


def test_a_unix_socket_has_no_host(folder: Path) -> None:
    path = folder / "access.log"
    log = AccessLog(str(path), "%(h)s %(s)s")
    with Lab(app=answer(), uds=folder / "x.sock", access=log) as lab:
        assert lab.ask(GET).status == 200
    assert path.read_text() == "- 200\n"
    log.close()
