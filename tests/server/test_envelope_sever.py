"""Which socket a blocked thread waits on, and that no other is shut down."""

from __future__ import annotations

import os
import select
import socket
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from jumpstart_server.envelope.sever import is_possible, sever
from tests.server.raw_http import PATIENCE, make_certificate, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")


def nobody(fd: int) -> bool:
    return False


class Waiter(threading.Thread):
    """Runs something that blocks, and keeps what comes of it."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._wait = wait
        self.result: object = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._wait()
        except Exception as error:
            self.result = error

    def is_freed(self, is_ours: Callable[[int], bool] = nobody) -> str:
        """It is severed within some time, and ends."""
        assert self.native_id is not None
        number = self.native_id
        what = until(lambda: sever(number, is_ours))
        assert what
        self.join(PATIENCE)
        assert not self.is_alive()
        return what

    def is_left(self, is_ours: Callable[[int], bool] = nobody) -> bool:
        """Nothing is done to it, however often one looks."""
        assert self.native_id is not None
        give_up = time.monotonic() + 0.3
        while time.monotonic() < give_up:
            if sever(self.native_id, is_ours) is not None:
                return False
        return self.is_alive()


@pytest.fixture
def model() -> Iterator[socket.socket]:
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_socket(model: socket.socket, timeout: float | None) -> None:
    with socket.create_connection(model.getsockname(), timeout) as sock:
        waiter = Waiter(lambda: sock.recv(10))
        assert waiter.is_freed() == f"fd={sock.fileno()} peer={address(model)}"
        assert waiter.result == b""


def test_a_call_that_writes(model: socket.socket) -> None:
    with socket.create_connection(model.getsockname()) as sock:
        waiter = Waiter(lambda: sock.sendall(bytes(64 * 1024 * 1024)))
        waiter.is_freed()
        assert isinstance(waiter.result, OSError)


def test_tls(model: socket.socket, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname = False
    theirs.verify_mode = ssl.CERT_NONE
    accepted: list[socket.socket] = []
    server = threading.Thread(target=lambda: accepted.append(ours.wrap_socket(model.accept()[0], server_side=True)))
    server.start()
    with theirs.wrap_socket(socket.create_connection(model.getsockname())) as sock:
        server.join(PATIENCE)
        waiter = Waiter(lambda: sock.recv(10))
        waiter.is_freed()
        assert waiter.result == b"" or isinstance(waiter.result, OSError)
    accepted[0].close()


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_peer_that_does_not_accept(timeout: float | None) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, socket.socket() as first:
        first.connect(listener.getsockname())  # there is no room for another one
        waiter = Waiter(lambda: socket.create_connection(listener.getsockname(), timeout))
        assert waiter.is_freed().endswith("(connecting)")
        assert isinstance(waiter.result, OSError)


def test_clients_of_http(model: socket.socket) -> None:
    url = f"http://{address(model)}/"
    waiters = [
        Waiter(lambda: urllib.request.urlopen(url)),
        Waiter(lambda: urllib.request.urlopen(url, timeout=60)),
        Waiter(lambda: httpx.get(url, timeout=None, trust_env=False)),
        Waiter(lambda: httpx.get(url, timeout=60, trust_env=False)),
    ]
    for waiter in waiters:
        assert waiter.is_freed().endswith(address(model))
        assert isinstance(waiter.result, Exception)


def test_a_driver_that_polls_and_reads(model: socket.socket) -> None:
    """As psycopg does."""
    with socket.create_connection(model.getsockname()) as sock:
        sock.setblocking(False)
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        waiter = Waiter(lambda: (poll.poll(60_000), sock.recv(10)))
        waiter.is_freed()
        assert isinstance(waiter.result, tuple) and waiter.result[1] == b""


def test_a_database_over_a_unix_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sock:
        listener.bind(str(tmp_path / "db"))
        listener.listen()
        sock.connect(str(tmp_path / "db"))
        waiter = Waiter(lambda: sock.recv(10))
        assert str(tmp_path / "db") in waiter.is_freed()


def test_it_is_possible_here_and_the_operator_hears_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_possible()
    monkeypatch.setattr("jumpstart_server.envelope.sever._WITH_FD", set())
    assert not is_possible()


def test_what_must_stay(model: socket.socket) -> None:
    """Ours, listeners, pairs, pipes, many sockets at once, and what is no call on a descriptor."""
    left, right = socket.socketpair()
    reading, writing = os.pipe()
    event = threading.Event()
    with left, right, socket.create_connection(model.getsockname()) as sock:
        other = socket.create_server(("127.0.0.1", 0))
        waiters = [
            (Waiter(lambda: sock.recv(10)), lambda fd: fd == sock.fileno()),
            (Waiter(other.accept), nobody),
            (Waiter(lambda: left.recv(10)), nobody),
            (Waiter(lambda: os.read(reading, 10)), nobody),
            (Waiter(event.wait), nobody),
            (Waiter(lambda: select.select([sock, left], [], [], 60)), nobody),
        ]
        for waiter, is_ours in waiters:
            assert waiter.is_left(is_ours)
        event.set()
        os.write(writing, b"x")
        right.send(b"x")
        for end in ((model.accept()[0]), socket.create_connection(other.getsockname())):
            with end:
                if end.getsockname() == model.getsockname():
                    end.sendall(b"x")
        for waiter, _ in waiters:
            waiter.join(PATIENCE)
            assert not waiter.is_alive()
        assert waiters[0][0].result == b"x"
        accepted = waiters[1][0].result
        assert isinstance(accepted, tuple)
        accepted[0].close()
        other.close()
    os.close(reading)
    os.close(writing)


def test_a_thread_that_runs_or_has_ended() -> None:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    waiter = Waiter(spin)
    assert waiter.is_left()
    over.set()
    waiter.join(PATIENCE)
    assert waiter.native_id is not None and sever(waiter.native_id, nobody) is None
