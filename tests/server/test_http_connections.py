"""Connections on both engines: clients that leave or dally, idle ones, a stop, TLS. Numbers are those of the cases."""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.http1 import Limits
from tests.server.http_cases import GET, errors
from tests.server.lab import ALL, ENGINES, BaseLab, Door, Reply, Tell, Words, make_lab
from tests.server.raw_http import PATIENCE, Client, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("log")]

HASTY = ConnectionSettings(
    limits=Limits(limit_request_body=100_000),
    header_timeout=0.3,
    body_timeout=0.3,
    write_timeout=0.4,
    keep_alive=0.3,
)
SLACK = 2.0  # the WSGI engine looks at its deadlines every quarter of a second, on a machine that others use too


@pytest.fixture(scope="module", params=ALL)
def running(request: pytest.FixtureRequest) -> Iterator[BaseLab]:
    with make_lab(request.param) as lab:
        yield lab


@pytest.fixture
def lab(running: BaseLab) -> Iterator[BaseLab]:
    """A server with the defaults; each test leaves it idle."""
    yield running
    running.wait_idle()


@pytest.fixture(scope="module", params=ENGINES)
def running_hasty(request: pytest.FixtureRequest) -> Iterator[BaseLab]:
    with make_lab(request.param, HASTY) as lab:
        yield lab


@pytest.fixture
def hasty(running_hasty: BaseLab) -> Iterator[BaseLab]:
    """A server with short times."""
    yield running_hasty
    running_hasty.wait_idle()


# -- clients that leave (B) --


@pytest.mark.parametrize("leave", [Client.__exit__, Client.reset], ids=["close", "reset"])
def test_40_a_stream_is_closed_within_a_second_after_its_client_has_left(
    lab: BaseLab, log: pytest.LogCaptureFixture, leave: Callable[[Client], None]
) -> None:
    words = Words()
    path = lab.serve(words)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        assert client.head()[0] == 200
        assert client.line() == b"5"
        left = time.monotonic()
        leave(client)
        assert words.closed.wait(PATIENCE)
        assert time.monotonic() - left < 1 + SLACK
    assert not errors(log)  # 51


def test_a_post_runs_to_its_end_when_nobody_waits_for_it(lab: BaseLab, log: pytest.LogCaptureFixture) -> None:
    """Half a payment is worse than one that nobody waits for. It takes longer than a client that has left is given."""
    done: list[bytes] = []
    door = Door()
    path = lab.serve(Reply(door=door, pause=0.6, note=done.append))
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path, "Content-Length: 2", method="POST")
        client.send(b"ok")
        until(lambda: door.entered)
        client.sock.close()
        door.open()
        until(lambda: done)
    assert done == [b"ok"]
    assert not errors(log)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("in_pieces", [True, False])
def test_41_resets_in_the_middle_of_a_large_body_leave_nothing_behind(
    lab: BaseLab, log: pytest.LogCaptureFixture, in_pieces: bool
) -> None:
    path = lab.serve(Reply((bytes(1_000_000),) * 10 if in_pieces else (bytes(10_000_000),)))

    def burst(count: int) -> None:
        for _ in range(count):
            client = lab.connect()
            client.get(path)
            assert client.sock.recv(10)
            client.reset()
        lab.wait_idle()
        gc.collect()

    with lab.back_to_baseline():
        burst(20)
        before = resident_bytes()
        burst(100)
        until(lambda: resident_bytes() - before < 20_000_000)
    assert not errors(log)


def test_43_a_slow_reader_gets_all_in_the_end(lab: BaseLab) -> None:
    """What is produced ahead of it is bounded: each engine has its own test of that."""
    path = lab.serve(Reply((bytes(100_000),) * 200))
    with lab.connect(receive_buffer=65536) as client:
        client.get(path)
        threading.Event().wait(0.2)
        response = client.response()
        assert (len(response.body), response.complete) == (20_000_000, True)


# -- times (A 26, 101, K 180) --


def took(began: float, expected: float) -> bool:
    return expected - 0.05 <= time.monotonic() - began <= expected + SLACK


def test_101_100_a_connection_that_says_nothing_is_closed(hasty: BaseLab) -> None:
    with hasty.back_to_baseline():
        began = time.monotonic()
        with hasty.connect() as client:
            assert client.is_closed()
            assert took(began, 0.3)


@pytest.mark.parametrize("first", [b"", GET], ids=["a new connection", "one that was idle"])
def test_26_a_head_that_dribbles_has_its_time_and_no_more(hasty: BaseLab, first: bytes) -> None:
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


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)], ids=["unasked", "expected"])
def test_26_a_body_that_stops_is_answered(
    hasty: BaseLab, expect: tuple[str, ...], log: pytest.LogCaptureFixture
) -> None:
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


def test_a_body_that_dribbles_is_taken(hasty: BaseLab) -> None:
    """The time is one between two pieces."""
    with hasty.connect() as client:
        client.get("/echo", "Content-Length: 5", method="POST")
        for byte in b"12345":
            time.sleep(0.12)
            client.send(bytes((byte,)))
        assert client.response().body == b"12345"


def test_a_slow_app_is_not_a_slow_client(hasty: BaseLab) -> None:
    path = hasty.serve(Reply(echo=True, pause=0.6))  # longer than the time, and than it takes to look
    with hasty.connect() as client:
        client.get(path, "Content-Length: 90000", method="POST")
        client.send(bytes(90_000))
        assert len(client.response().body) == 90_000
        client.get(path, "Content-Length: 5", "Expect: 100-continue", method="POST")
        assert client.response().status == 100
        client.send(b"12345")
        assert client.response().body == b"12345"


@pytest.mark.parametrize("kind", ["pieces", "one piece", "closing"])
def test_26_a_client_that_takes_nothing_is_cut(hasty: BaseLab, kind: str, log: pytest.LogCaptureFixture) -> None:
    """While the app sends, and after its response, whether the connection is to be kept then or to be closed."""
    pieces = (bytes(1_000_000),) * 30 if kind == "pieces" else (bytes(30_000_000),)
    path = hasty.serve(Reply(pieces, headers=(("Connection", "close"),) if kind == "closing" else ()))
    with hasty.back_to_baseline(), hasty.connect(receive_buffer=4096) as client:
        began = time.monotonic()
        client.get(path)
        until(lambda: hasty.busy or hasty.connections)
        until(lambda: not hasty.busy and not hasty.connections)
        assert took(began, 0.4)
    assert not errors(log)


def test_a_slow_reader_is_not_cut(hasty: BaseLab) -> None:
    size = 3_000_000
    path = hasty.serve(Reply((bytes(size),)))
    with hasty.connect(receive_buffer=65536) as client:
        client.get(path)
        received = 0
        began = time.monotonic()
        while time.monotonic() - began < 0.9:  # twice as long as write_timeout
            received += len(client.sock.recv(30_000))
            time.sleep(0.05)
        while received < size:
            received += len(client.sock.recv(1_000_000))


def test_180_an_idle_connection_is_kept_and_closed(hasty: BaseLab) -> None:
    with hasty.connect() as client:
        for _ in range(4):
            client.send(GET)
            assert client.response().status == 200
            time.sleep(0.15)
        client.send(GET)
        assert client.response().status == 200
        began = time.monotonic()
        assert client.is_closed()
        assert took(began, 0.3)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_keep_alive(engine: str) -> None:
    with make_lab(engine, ConnectionSettings(keep_alive=0)) as lab, lab.connect() as client:
        client.send(GET)
        assert client.response().get("connection") == "close"
        assert client.is_closed()


def test_21_25_30_idle_and_silent_connections_are_in_nobodys_way(lab: BaseLab) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(60):
            client = stack.enter_context(lab.connect())
            if number % 2:
                client.send(GET)
                assert client.response().status == 200
        times = []
        for _ in range(5):
            began = time.monotonic()
            assert lab.ask(GET).status == 200
            times.append(time.monotonic() - began)
        assert min(times) < 0.05, times  # of five tries one at least, on a machine that others use too
        assert max(times) < 5  # the deadlines of the others are a minute away
        until(lambda: not lab.busy)


# -- other protocols --


@pytest.mark.parametrize(
    "fields", [("Upgrade: h2c",), ("Upgrade: foo/2",), ("Upgrade: websocket", "Content-Length: 2")]
)
def test_upgrades_are_ignored(lab: BaseLab, fields: tuple[str, ...]) -> None:
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


# -- a stop --


@pytest.mark.parametrize("engine", ENGINES)
def test_60_65_drain(engine: str) -> None:
    door = Door()
    begun: list[bytes] = []
    with (
        make_lab(engine) as lab,
        lab.connect() as idle,
        lab.connect() as busy,
        lab.connect() as half,
        lab.connect() as fresh,
    ):
        for _ in range(2):  # the second one is known by its bytes
            idle.send(GET)
            assert idle.response().status == 200
        busy.get(lab.serve(Reply(door=door)))
        busy.get(lab.serve(Reply(note=begun.append)))  # pipelined
        half.send(GET[:10])
        until(lambda: door.entered and lab.connections == 4)
        threading.Event().wait(0.1)  # the half head has been read
        began = time.monotonic()
        lab.stop()
        assert idle.is_closed() and fresh.is_closed()
        assert time.monotonic() - began < 0.5 + SLACK
        half.send(GET[10:])
        response = half.response()
        assert (response.status, response.get("connection")) == (200, "close")
        door.open()
        response = busy.response()
        assert (response.status, response.get("connection")) == (200, "close")
        assert busy.is_closed() and half.is_closed()
    assert not begun


# -- TLS --


@pytest.mark.parametrize("engine", ENGINES)
def test_tls(engine: str, certificate: tuple[Path, Path], log: pytest.LogCaptureFixture) -> None:
    with make_lab(engine, tls=certificate) as lab:
        with lab.back_to_baseline():
            with lab.connect() as client:
                client.get(lab.serve(Tell()))
                told: dict[str, Any] = json.loads(client.response().body)
                assert told["scheme"] == "https"
                for size in (0, 400_000, 3_000_000):
                    client.get("/echo", f"Content-Length: {size}", method="POST")
                    client.send(bytes(size))
                    assert client.response().body == bytes(size)
                client.send(b"nonsense\r\n\r\n")
                assert client.response().status == 400
                assert client.is_closed()  # and said so: an end without a word would raise
            with lab.connect() as client:  # leaves without an answer
                client.get("/echo", "Content-Length: 10", method="POST")
                until(lambda: lab.connections)
    assert not errors(log)


@pytest.mark.parametrize("engine", ENGINES)
def test_28_connections_that_speak_no_tls_leave_nothing_behind(
    engine: str, certificate: tuple[Path, Path], log: pytest.LogCaptureFixture
) -> None:
    with make_lab(engine, ConnectionSettings(header_timeout=1.0), tls=certificate) as lab:
        with lab.back_to_baseline():
            for data in (GET, b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
                for leave in (Client.reset, Client.end):
                    with Client(socket.create_connection(lab.address, PATIENCE)) as client:
                        client.send(data)
                        with contextlib.suppress(OSError):  # which it has by now, perhaps
                            leave(client)
                            if leave is Client.end:
                                client.rest()  # an alert perhaps, and the end
        assert lab.ask(GET).status == 200
    assert not errors(log)


@pytest.mark.parametrize("engine", ENGINES)
def test_133_over_tls_an_answer_to_a_client_that_goes_on_sending_arrives(
    engine: str, certificate: tuple[Path, Path]
) -> None:
    with make_lab(engine, HASTY, tls=certificate) as lab, lab.connect() as client:
        client.get("/echo", "Content-Length: 5000000", method="POST")
        for _ in range(5):
            client.send(bytes(0x8000))
        response = client.response()
        assert (response.status, response.complete) == (413, True)


@pytest.mark.parametrize("engine", ENGINES)
def test_53_over_tls_a_cut_is_not_taken_for_an_end(engine: str, certificate: tuple[Path, Path]) -> None:
    """A body that ends with the connection, and fails: there is no good-bye."""
    with make_lab(engine, app=Reply((b"half",), length=0, fails=True), tls=certificate) as lab:
        with lab.connect() as client:
            client.get("/", version="1.0")
            with pytest.raises(OSError):
                client.rest()


@pytest.mark.parametrize("engine", ENGINES)
def test_40_over_tls_a_client_that_leaves_is_noticed(
    engine: str, certificate: tuple[Path, Path], log: pytest.LogCaptureFixture
) -> None:
    words = Words()
    with make_lab(engine, tls=certificate) as lab:
        path = lab.serve(words)
        with lab.back_to_baseline():
            client = lab.connect()
            client.get(path)
            assert client.head()[0] == 200
            client.sock.close()
            assert words.closed.wait(PATIENCE)
    assert not errors(log)
