"""
No byte for another: the WSGI engine under a storm of clients that come and go in every way, while threads are switched
nearly everywhere and descriptors are used again at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.wsgi import answers as answers_module
from jumpstart_server.wsgi import connection as connection_module
from jumpstart_server.wsgi import pool as pool_module
from tests.server.raw_http import PATIENCE, Client, make_certificate, until
from tests.server.wsgi_counts import LONG, Guard, check_idle, check_pool, switch_often
from tests.server.wsgi_lab import Environ, Lab, StartResponse, answer

pytestmark = pytest.mark.slow

POISON = b"POISON"
TOKEN_BYTES = b"<0123456789>"
HASTY = ConnectionSettings(header_timeout=0.4, body_timeout=0.4, write_timeout=0.5, keep_alive=0.2)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    switch_often(monkeypatch)
    monkeypatch.setattr(pool_module, "IDLE_TIME", 0.01)
    monkeypatch.setattr(answers_module, "LINGER_TIME", 0.2)
    monkeypatch.setattr(connection_module, "DISCONNECT_GRACE", 0.02)
    guard = Guard(monkeypatch)
    yield guard
    assert not guard.faults, guard.faults[:10]


class App:
    """
    Answers with its request's token, in many ways, and keeps what it was given to misuse it later.

    Attributes:
        closed: iterables that were closed; must be as many as *opened*.
        misused: calls of kept functions that did not raise.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.opened = 0
        self.closed = 0
        self.misused: list[str] = []
        self.misuses = 0
        self._lock = threading.Lock()
        self._kept: deque[tuple[Any, Any, Any]] = deque(maxlen=64)
        self._over = threading.Event()
        self._pause = threading.Event()
        self._haunters = [threading.Thread(target=self._haunt) for _ in range(2)]
        for thread in self._haunters:
            thread.start()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        token = environ["QUERY_STRING"].encode()
        way = environ["PATH_INFO"]
        with self._lock:
            self.requests += 1
        stream = environ["wsgi.input"]
        if way == "/echo":
            body = stream.read()
            assert not body.strip(token), body
        if way in ("/write", "/ignore"):
            write = start_response("200 OK", [])
            self._kept.append((write, start_response, stream))
            write(token)
            return [token]
        if way in ("/stream", "/big"):
            write = start_response("200 OK", [("Content-Type", "text/plain")])
            self._kept.append((write, start_response, stream))
            with self._lock:
                self.opened += 1
            return self._stream(token * (2000 if way == "/big" else 1), 30 if way == "/big" else 4)
        start_response("200 OK", [("Content-Length", str(len(token)))])
        return [token]

    def _stream(self, piece: bytes, count: int) -> Iterator[bytes]:
        try:
            for _ in range(count):
                yield piece
                self._pause.wait(0.0005)
        finally:
            with self._lock:
                self.closed += 1

    def _haunt(self) -> None:
        """Write, start responses and read bodies of requests that are over, or are another thread's."""
        while not self._over.wait(0.0005):
            try:
                write, start_response, stream = self._kept[random.randrange(64)]
            except IndexError:
                continue
            self._misuse("write", write, POISON)
            self._misuse("start_response", lambda start=start_response: start("200 OK", [])(POISON))
            self._misuse("read", stream.read, 1)

    def _misuse(self, name: str, act: Callable[..., Any], *args: Any) -> None:
        self.misuses += 1
        try:
            found = act(*args)
        except (RuntimeError, ValueError, OSError):
            return
        # A body that has come already may be read as long as its request runs; it holds tokens only.
        if name != "read" or found not in TOKEN_BYTES:
            self.misused.append(f"{name} {found!r}")

    def end(self) -> None:
        self._over.set()
        for thread in self._haunters:
            thread.join()
        assert not self.misused, self.misused[:10]


class Storm:
    """Clients on *count* threads that do one thing after another, until *requests* were answered."""

    def __init__(self, lab: Lab, count: int, requests: int, seed: int) -> None:
        self.lab = lab
        self.answered = 0
        self.foreign: list[bytes] = []
        self._numbers = iter(range(1, 10**9))
        self._requests = requests
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._give_up = time.monotonic() + 40
        self._threads = [threading.Thread(target=self._run, args=[seed * 100 + number]) for number in range(count)]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        if not self._errors.empty():
            raise self._errors.get()
        assert not self.foreign, self.foreign[:3]

    def _run(self, seed: int) -> None:
        choose = random.Random(seed)
        ways: list[tuple[Callable[[Client, random.Random], None], int]] = [
            (self.keep_alive, 30),
            (self.pipeline, 6),
            (self.post, 8),
            (self.leave_at_once, 8),
            (self.leave_in_the_middle, 8),
            (self.half_close, 5),
            (self.rest, 1),
            (self.half_a_head, 1),
            (self.ignored_body, 4),
        ]
        try:
            while self.answered < self._requests and time.monotonic() < self._give_up:
                way = choose.choices([way for way, _ in ways], [weight for _, weight in ways])[0]
                with self.lab.connect() as client:
                    try:
                        way(client, choose)
                    except (ConnectionResetError, BrokenPipeError):
                        assert way in (self.rest, self.half_a_head, self.ignored_body), way
        except BaseException as error:
            self._errors.put(error)
            self._requests = 0

    def request(self, way: str, body: int = 0) -> tuple[bytes, bytes]:
        token = b"<%d>" % next(self._numbers)
        head = b"GET /%b?%b HTTP/1.1\r\nHost: a\r\n" % (way.encode(), token)
        if not body:
            return head + b"\r\n", token
        return head.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % (body * len(token)) + token * body, token

    def check(self, client: Client, token: bytes, *, whole: bool = True) -> None:
        response = client.response()
        assert response.status == 200, (response, token)
        self.look(response.body, token)
        assert response.complete or not whole
        self.answered += 1

    def look(self, body: bytes, token: bytes) -> None:
        size = len(body) // len(token) + 1
        if (token * size)[: len(body)] != body:
            self.foreign.append(body[:200])

    # ways

    def keep_alive(self, client: Client, choose: random.Random) -> None:
        same = choose.random() < 0.3
        data, token = self.request("plain")
        for _ in range(choose.randrange(1, 8)):
            if not same:
                data, token = self.request(choose.choice(["plain", "plain", "write", "stream", "echo"]))
            client.send(data)
            self.check(client, token)

    def pipeline(self, client: Client, choose: random.Random) -> None:
        asked = [self.request(choose.choice(["plain", "write", "stream"])) for _ in range(choose.randrange(2, 12))]
        client.send(b"".join(data for data, _ in asked))
        for _, token in asked:
            self.check(client, token)

    def post(self, client: Client, choose: random.Random) -> None:
        data, token = self.request("echo", choose.randrange(1, 3000))
        cut = choose.randrange(len(data))
        client.send(data[:cut])
        client.send(data[cut:])
        self.check(client, token)

    def ignored_body(self, client: Client, choose: random.Random) -> None:
        data, token = self.request("ignore", choose.randrange(1, 3000))
        client.send(data)
        self.check(client, token)
        data, token = self.request("plain")
        client.send(data)
        self.check(client, token)

    def leave_at_once(self, client: Client, choose: random.Random) -> None:
        client.send(self.request(choose.choice(["plain", "write", "stream", "big"]))[0])
        if choose.random() < 0.5:
            client.reset()

    def leave_in_the_middle(self, client: Client, choose: random.Random) -> None:
        data, token = self.request("big")
        client.send(data)
        _, fields = client.head()
        assert ("transfer-encoding", "chunked") in fields
        line = client.line()
        assert line is not None
        self.look(client.exactly(int(line, 16)), token)
        if choose.random() < 0.7:
            client.reset()

    def half_close(self, client: Client, choose: random.Random) -> None:
        data, token = self.request("plain")
        client.send(data)
        client.end()
        self.check(client, token)
        assert client.is_closed()

    def rest(self, client: Client, choose: random.Random) -> None:
        """Ask again at about the time when the connection is closed."""
        data, token = self.request("plain")
        client.send(data)
        self.check(client, token)
        self._pause(choose.uniform(0.15, 0.6))
        data, token = self.request("plain")
        client.send(data)
        data = client.sock.recv(65536)
        if data:
            client.buffer = data
            self.check(client, token)

    def half_a_head(self, client: Client, choose: random.Random) -> None:
        data, _ = self.request("plain")
        client.send(data[:20])
        self._pause(choose.uniform(0.2, 0.8))
        client.send(data[20:])
        status, _ = client.head()
        assert status in (200, 408)

    def _pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)


@pytest.mark.parametrize("streamed", [False, True])
def test_no_client_ever_sees_a_byte_for_another(guard: Guard, streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """And no app can write to a connection when its request is over, whoever has the descriptor by then."""
    caplog.set_level(logging.ERROR)
    app = App()
    try:
        with Lab(HASTY, app, threads=8, stream_bodies=streamed, queue_timeout=0) as lab:
            storm = Storm(lab, 10, 3000, seed=1 + streamed)
            storm.run()
            until(lambda: not lab.connections, LONG)
            check_idle(lab.server)
            highest = max((fd for fd in lab.server._idle), default=0)
            assert highest < 1000
    finally:
        app.end()
    assert storm.answered >= 3000 and app.requests > 3000
    assert app.opened == app.closed
    assert app.misuses > 300 and guard.checks > 10_000
    assert "internal error" not in caplog.text
    print(f"{app.requests} requests, {app.misuses} misuses, {guard.checks} checks")


def test_nor_when_requests_wait_are_shed_and_leave(guard: Guard) -> None:
    """Two threads for ten clients, a queue of five, 0.1 s of patience."""
    app = App()
    shed = [0]
    try:
        with Lab(HASTY, app, threads=2, queue=5, queue_timeout=0.1) as lab:

            class Patient(Storm):
                def check(self, client: Client, token: bytes, *, whole: bool = True) -> None:
                    try:
                        super().check(client, token, whole=whole)
                    except AssertionError as error:
                        if "status=503" not in str(error) or "foreign" in str(error):
                            raise
                        shed[0] += 1
                        raise ConnectionResetError from None

                def _run(self, seed: int) -> None:
                    choose = random.Random(seed)
                    ways = [self.keep_alive, self.pipeline, self.leave_at_once, self.post]
                    try:
                        while self.answered < self._requests and time.monotonic() < self._give_up:
                            with self.lab.connect() as client, contextlib.suppress(ConnectionError):
                                choose.choice(ways)(client, choose)
                    except BaseException as error:
                        self._errors.put(error)
                        self._requests = 0

            storm = Patient(lab, 10, 1500, seed=7)
            storm.run()
            until(lambda: not lab.connections, LONG)
            check_idle(lab.server)
    finally:
        app.end()
    assert storm.answered >= 1500
    assert shed[0]


def test_tls_connections_come_and_go(guard: Guard, tmp_path: Path) -> None:
    """What is deciphered already tells of no event."""
    with Lab(tls=make_certificate(tmp_path), threads=4) as lab:  # a handshake may take long on a busy machine

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            return answer(environ["QUERY_STRING"].encode())(environ, start_response)

        path = lab.app(app)
        errors: list[BaseException] = []

        def ask(seed: int) -> None:
            choose = random.Random(seed)
            try:
                for number in range(25):
                    with lab.connect() as client:
                        tokens = [f"{seed}-{number}-{each}" for each in range(choose.randrange(1, 30))]
                        data = "".join(f"GET {path}?{token} HTTP/1.1\r\nHost: a\r\n\r\n" for token in tokens)
                        client.send(data.encode())
                        if choose.random() < 0.3:
                            continue
                        for token in tokens:
                            assert client.response().body == token.encode()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        until(lambda: not lab.connections, LONG)
        check_idle(lab.server)


def test_the_counts_hold_during_a_storm(guard: Guard) -> None:
    app = App()
    try:
        with Lab(HASTY, app, threads=6, queue_timeout=0) as lab:
            storm = Storm(lab, 6, 1000, seed=3)
            over = threading.Event()
            errors: list[BaseException] = []

            def look() -> None:
                try:
                    while not over.wait(0.001):
                        check_pool(lab.server.pool)
                        stats = lab.server.stats()
                        assert 0 <= stats.busy <= stats.threads <= stats.limit == 6
                        assert 0 <= stats.oldest_wait_s < LONG
                except BaseException as error:
                    errors.append(error)

            looker = threading.Thread(target=look)
            looker.start()
            storm.run()
            over.set()
            looker.join()
            assert not errors, errors
            until(lambda: not lab.connections, LONG)
            check_idle(lab.server)
    finally:
        app.end()


@pytest.mark.parametrize("round", range(4))
def test_a_stop_in_the_middle_of_a_storm(guard: Guard, round: int) -> None:
    """It ends soon, every connection that was accepted is closed, and none is accepted after it."""
    app = App()
    try:
        lab = Lab(HASTY, app, threads=4, queue_timeout=0)
        lab.start()
        over = threading.Event()

        def ask(seed: int) -> None:
            number = 0
            while not over.is_set():
                number += 1
                token = f"<{seed}-{number}>"
                with contextlib.suppress(OSError, AssertionError), Client(socket.socket()) as client:
                    client.sock.connect(lab.address)
                    client.get(f"/plain?{token}")
                    if number % 7:
                        assert client.response().body == token.encode()

        threads = [threading.Thread(target=ask, args=[seed]) for seed in range(5)]
        for thread in threads:
            thread.start()
        until(lambda: app.requests > 50 * (round + 1), LONG)
        began = time.monotonic()
        lab.stop()
        accepted = len(lab.server._all)
        assert lab.stopped.wait(LONG), lab.connections
        assert time.monotonic() - began < LONG / 2
        assert len(lab.server._all) <= accepted
        over.set()
        for thread in threads:
            thread.join()
        lab.close()
    finally:
        app.end()


def test_a_silent_connection_in_the_backlog_does_not_hold_up_the_stop() -> None:
    """The keeper sleeps, for there was no connection yet."""
    with Lab(ConnectionSettings(header_timeout=LONG), answer(), threads=2) as lab:
        pool = lab.server.pool
        until(lambda: pool._keeper_sleeps, PATIENCE)
        lab.server._epoll.unregister(lab.listener.fileno())  # so that it is `stop_accepting` which takes it
        with lab.connect() as client:
            began = time.monotonic()
            lab.stop()
            assert lab.stopped.wait(LONG)
            assert time.monotonic() - began < LONG / 2
            assert client.is_closed()


def test_a_descriptor_that_is_another_ones_by_now_is_not_taken_from_it() -> None:
    """Who comes late for a connection that was closed gives back the one that has its descriptor."""
    with Lab(app=answer(), threads=2) as lab, lab.connect() as client:
        client.get("/")
        assert client.response().status == 200
        check_idle(lab.server)
        (living,) = lab.server._idle.values()
        left, right = socket.socketpair()
        with left, right:
            late = connection_module.Connection(lab.server, left, None, 0.0)
            late.fd = living.fd
            assert not lab.server._own(late)
            assert lab.server._idle == {living.fd: living}
            late.readable = True
            lab.server._idle.pop(living.fd)
            living.readable = True  # an event came in that moment
            lab.server._return(living)
        client.get("/")
        assert client.response().status == 200
        check_idle(lab.server)
