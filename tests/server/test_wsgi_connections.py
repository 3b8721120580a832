"""Connections of the WSGI engine: clients that leave, times, a stop, TLS. Numbers are those of the cases."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from jumpstart_server.http1 import Limits
from jumpstart_server.wsgi.connection import DISCONNECT_GRACE
from tests.server.http_cases import (
    GET,
    PROXY_V1,
    errors,
    post,
)
from tests.server.lab import Words, make_lab
from tests.server.raw_http import PATIENCE, Client, until
from tests.server.wsgi_lab import Environ, Gate, Lab, StartResponse, answer, echo, stream

pytestmark = pytest.mark.usefixtures("log")


@pytest.fixture(scope="module", params=["wsgi", "wsgi-streamed", "wsgi-crowded"])
def running(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with make_lab(request.param) as lab:
        assert isinstance(lab, Lab)
        yield lab


@pytest.fixture
def lab(running: Lab) -> Iterator[Lab]:
    """A server with the defaults; each test leaves it idle."""
    yield running
    running.wait_idle()


@pytest.fixture(params=["wsgi", "wsgi-streamed"])
def hasty(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A server with short times."""
    with make_lab(request.param, HASTY) as lab:
        assert isinstance(lab, Lab)
        yield lab


def get(path: str, *fields: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path.encode(), b"".join(field + b"\r\n" for field in fields))


HASTY = ConnectionSettings(
    limits=Limits(limit_request_body=100_000),
    header_timeout=0.3,
    body_timeout=0.3,
    write_timeout=0.4,
    keep_alive=0.3,
)


SLACK = 2.0


LOCAL = "127.0.0.1,::1"


def took(began: float, expected: float) -> bool:
    return expected - 0.05 <= time.monotonic() - began <= expected + SLACK


def wait_for_grace(lab: Lab) -> None:
    """Until a client that has left can be taken for gone: an event has told of it, and a while has passed."""

    def is_over() -> bool:
        left = [connection.gone_at for connection in lab.server._all.values() if connection.gone_at]
        return bool(left) and time.monotonic() - max(left) > DISCONNECT_GRACE

    until(is_over)


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


# -- clients that leave (B) --


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


@pytest.mark.slow
def test_40_a_stream_is_closed_after_its_client_has_closed_its_side(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    words = Words()
    path = lab.serve(words)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        assert client.head()[0] == 200
        assert client.line() == b"5"
        left = time.monotonic()
        client.end()
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
    gate = Gate(lab.adapt(words))
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
        until(lambda: given)
        previous = -1
        while given != previous:  # until it does not move any more
            previous = given
            time.sleep(0.1)
        assert given < 200
        response = client.response()
        assert (len(response.body), response.complete) == (30_000_000, True)


# -- times (A) --


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
def test_26_a_client_that_takes_nothing_of_a_file_is_cut(hasty: Lab, log: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        handle = tempfile.TemporaryFile()  # noqa: SIM115  # the server closes it
        handle.truncate(30_000_000)
        start_response("200 OK", [])
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](handle)
        return wrapped

    path = hasty.app(app)
    with hasty.back_to_baseline(), hasty.connect(receive_buffer=4096) as client:
        began = time.monotonic()
        client.get(path)
        until(lambda: hasty.busy)
        until(lambda: not hasty.busy and not hasty.connections)
        assert took(began, 0.4)
    assert not errors(log)


def test_180_a_request_that_comes_as_the_idle_time_ends_is_not_lost(lab: Lab) -> None:
    """The time is over when the keeper looks; the request has come, and perhaps nobody has read it yet."""
    for _ in range(50):
        with lab.connect() as client:
            client.send(GET)
            assert client.response().status == 200
            client.send(GET)
            lab.server.tick(time.monotonic() + 1000, False)
            assert client.response().status == 200


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


# -- a stop --


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
        assert running.response().status == 503  # told by the stop, in its place
    until(lambda: not lab.threads)
    assert sorted(path.read_text().splitlines()) == ["503 GET /running HTTP/1.1", "503 GET /waiting HTTP/1.1"]
    lab.close()
    log.close()


# -- TLS --


@pytest.fixture(params=["spooled", "streamed"])
def safe(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[Lab]:
    """A server that speaks TLS."""
    with Lab(tls=certificate, stream_bodies=request.param == "streamed") as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


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
