"""What becomes of WSGI requests that are over their time, and of those whose client has left."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import logging
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import jumpstart
from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.wsgi.files import FileWrapper
from tests.server.raw_http import PATIENCE, Client, make_certificate, until
from tests.server.wsgi_counts import Guard, check_idle
from tests.server.wsgi_lab import App, Environ, Lab, StartResponse, answer, descriptors

SHORT = RequestLimits(timeout=0.3)
SLACK = 0.25  # seconds
LOOSE = 1.5  # seconds, on a busy machine
SLOW = 20.0  # seconds that a handler waits which nobody stops


class Story:
    """
    Says what its handlers saw.

    Attributes:
        told: the words, in order.
    """

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, word: str) -> None:
        self.told.append(word)

    def has(self, *words: str) -> bool:
        until(lambda: len(self.told) >= len(words))
        return self.told == list(words)


def compute(seconds: float = SLOW) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))


def computing(story: Story) -> App:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            compute()
        except BaseException as error:
            story(type(error).__name__)
            raise
        return answer()(environ, start_response)

    return app


class Body:
    """A body that counts how often it is closed."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        self.closed += 1


def back_at_rest(lab: Lab, threads: int) -> None:
    """After a fault everything is as it was: no connection, no job, no overrun, as many threads as there may be."""
    until(lambda: not lab.connections and not lab.busy)
    stats = lab.server.stats()
    assert (stats.overruns, stats.waiting) == (0, 0)
    until(lambda: lab.server.stats().threads <= threads)
    check_idle(lab.server)
    until(lambda: not lab.server._deadlines._stops)
    assert not lab.server._overrunning


def timeouts_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.getMessage().startswith("timeout: ")]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


# ------------------------------------------------------------------ the answer


def a_function_with_a_name() -> None:
    time.sleep(1.8)


def test_1_8_a_handler_that_sleeps_is_answered_in_time_and_logged(
    log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """And counted as an overrun until it returns."""
    lines = tmp_path / "access"
    access = AccessLog(str(lines), "json")

    def sleeping(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        a_function_with_a_name()
        return answer()(environ, start_response)

    with Lab(threads=2, limits=SHORT, access=access) as lab:
        lab.app(sleeping, "/slow")
        lab.app(answer(), "/fast")
        with lab.back_to_baseline():
            with lab.connect() as client:
                began = time.monotonic()
                client.get("/slow?secret=1")
                response = client.response()
                took = time.monotonic() - began
                assert response.status == 504
                assert response.body == b"504 Gateway Timeout: the request took too long\n"
                assert response.get("connection") == "close"
                assert client.is_closed()
                assert 0.3 <= took < 0.3 + LOOSE
                (line,) = timeouts_in(log)
                assert line.startswith("timeout: GET /slow is over its timeout of 0.3 s after ")
                assert "a_function_with_a_name\n    time.sleep(1.8)" in line and "thread jumpstart-" in line
                assert "secret" not in line and "jumpstart_server" not in line
                assert json.loads(until(lines.read_text))["status"] == 504  # though the handler runs
                assert lab.busy == 1
                for _ in range(5):
                    assert lab.ask(b"GET /fast HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").status == 200
                until(lambda: lab.server.stats().overruns == 1)
                assert lab.busy == 0  # its slot is free
        back_at_rest(lab, 2)
        assert [json.loads(line)["status"] for line in lines.read_text().splitlines()] == [504] + 5 * [200]
        (stats,) = [stats for route, stats in lab.server._observer.snapshot().routes.items() if route == "GET /slow"]
        assert (stats.requests, stats.errors) == (1, 1)
    access.close()


def test_a_handler_that_computes_is_interrupted(log: pytest.LogCaptureFixture) -> None:
    story = Story()
    with Lab(threads=2, limits=SHORT) as lab:
        lab.app(computing(story), "/")
        with lab.connect() as client:
            client.get("/")
            assert client.response().status == 504
        assert story.has("RequestTimeout")
        back_at_rest(lab, 2)
        assert lab.server.stats().threads <= 2
    assert "exception in the app" not in log.text and "overrun" not in log.text


@pytest.mark.parametrize("timeout", [0.3, 2.0])
def test_6_the_clock_starts_when_the_handler_is_called(timeout: float) -> None:
    """Time in the queue does not count. Right to a quarter of a second."""
    began_at: list[float] = []
    release = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/hold":
            release.wait(PATIENCE)
            return answer()(environ, start_response)
        began_at.append(time.monotonic())
        left = jumpstart.deadline()
        assert left is not None and timeout - 0.1 < left <= timeout
        compute()
        raise AssertionError

    with Lab(app=app, threads=1, limits=RequestLimits(timeout=timeout)) as lab:
        with lab.connect() as first, lab.connect() as client:
            first.get("/hold")
            until(lambda: lab.busy == 1)
            client.get("/queued")
            until(lambda: lab.server.stats().waiting == 1)
            time.sleep(min(timeout / 2, 0.2))
            release.set()
            assert first.response().status == 200
            assert client.response().status == 504
            assert timeout <= time.monotonic() - began_at[0] < timeout + SLACK
        back_at_rest(lab, 1)


def test_5_the_next_request_on_the_thread_has_its_own_time(log: pytest.LogCaptureFixture) -> None:
    """Also when the exception for the last one could not be raised any more."""
    empty: list[int] = []
    lock = threading.Lock()
    lock.acquire()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/late":
            try:
                lock.acquire(True, 0.6)
                empty[0]
            except IndexError:
                pass
            return answer(b"late")(environ, start_response)
        for _ in range(1000):
            str(_)
        return answer(b"next")(environ, start_response)

    with Lab(app=app, threads=1, limits=SHORT) as lab:
        for _ in range(3):
            with lab.connect() as client, lab.connect() as other:
                client.get("/late")
                assert client.response().status == 504
                other.get("/next")
                assert other.response().body == b"next"
        back_at_rest(lab, 1)
    assert len(timeouts_in(log)) == 3


def test_10_11_others_finish(log: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/stuck":
            time.sleep(2.0)
        else:
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                jumpstart.extend_deadline(0.5)
                time.sleep(0.01)
        return answer()(environ, start_response)

    limits = RequestLimits(timeout=0.5, timeout_extension=10)
    with Lab(app=app, threads=4, limits=limits) as lab:
        clients = [lab.connect() for _ in range(4)]
        for number, client in enumerate(clients):
            client.get("/stuck" if number == 0 else "/long")
        assert [client.response().status for client in clients] == [504, 200, 200, 200]
        for client in clients:
            client.sock.close()
        back_at_rest(lab, 4)
    assert len(timeouts_in(log)) == 1


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("tls", [False, True])
def test_a_response_that_has_begun_is_broken_so_that_it_shows(
    version: str, length: bool, tls: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    lines = tmp_path / "access"
    access = AccessLog(str(lines), "%(s)s %(B)s")
    bodies: list[Body] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def pieces() -> Iterator[bytes]:
            yield b"one"
            compute()
            yield b"two"

        start_response("200 OK", [("Content-Length", "6")] if length else [])
        bodies.append(Body(pieces()))
        return bodies[0]

    with Lab(app=app, threads=2, limits=SHORT, access=access, tls=make_certificate(tmp_path) if tls else None) as lab:
        with lab.back_to_baseline(), lab.connect() as client:
            client.get("/", version=version)
            assert client.head()[0] == 200
            with contextlib.suppress(OSError):  # a reset, or an end without TLS's good-bye
                while client.more():
                    pass
                assert (length or version == "1.1") and not tls
            assert client.buffer == (b"3\r\none\r\n" if version == "1.1" and not length else b"one")
        back_at_rest(lab, 2)
    access.close()
    assert lines.read_text() == "504 3\n"
    assert bodies[0].closed == 1
    assert len(timeouts_in(log)) == 1


@pytest.mark.parametrize("tls", [False, True])
def test_head_and_the_request_behind_it(tls: bool, tmp_path: Path) -> None:
    story = Story()
    with Lab(app=computing(story), threads=2, limits=SHORT, tls=make_certificate(tmp_path) if tls else None) as lab:
        with lab.connect() as client:
            client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\nGET /second HTTP/1.1\r\nHost: a\r\n\r\n")
            response = client.response("HEAD")
            assert response.status == 504 and response.get("connection") == "close"
            assert client.is_closed()  # no body, and no answer to the second
        assert story.has("RequestTimeout")
        back_at_rest(lab, 2)


# ------------------------------------------------------------------ limits


def test_55_the_times_until_the_first_byte_and_between_two(log: pytest.LogCaptureFixture) -> None:
    def streaming(*pauses: float) -> App:
        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            start_response("200 OK", [])
            for pause in pauses:
                compute(pause)
                yield b"x"

        return app

    limits = RequestLimits(first_byte_timeout=0.6, idle_timeout=0.4)
    with Lab(threads=4, limits=limits) as lab:
        lab.app(streaming(SLOW), "/late")
        lab.app(streaming(*[0.2] * 6), "/long")
        lab.app(streaming(0.5, 0.1, SLOW), "/pause")
        with lab.connect() as late, lab.connect() as long, lab.connect() as pause:
            began = time.monotonic()
            for client, path in ((late, "/late"), (long, "/long"), (pause, "/pause")):
                client.get(path)
            assert late.response().status == 504
            assert 0.6 <= time.monotonic() - began < 0.6 + LOOSE
            broken = pause.response()
            assert (broken.body, broken.complete) == (b"xx", False)
            whole = long.response()
            assert (whole.body, whole.complete) == (b"xxxxxx", True)
        back_at_rest(lab, 4)
    lines = sorted(line.split(" after ")[0] for line in timeouts_in(log))
    assert lines == [
        "timeout: GET /late is over its first_byte_timeout of 0.6 s",
        "timeout: GET /pause is over its idle_timeout of 0.4 s",
    ]


def test_handlers_may_have_more_time_as_far_as_the_operator_allows() -> None:
    story = Story()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        granted = jumpstart.extend_deadline(100)
        assert granted is not None
        story(f"{granted:.1f}")
        compute()
        raise AssertionError

    for extension, granted in ((0.0, "0.5"), (0.5, "1.0")):
        story.told.clear()
        with Lab(app=app, threads=1, limits=RequestLimits(timeout=0.5, timeout_extension=extension)) as lab:
            began = time.monotonic()
            assert lab.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").status == 504
            assert 0.5 + extension <= time.monotonic() - began < 0.5 + extension + LOOSE
            assert story.has(granted)


def test_without_a_limit_there_is_none() -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        assert jumpstart.deadline() is None and jumpstart.extend_deadline(1) is None
        time.sleep(0.3)
        return answer()(environ, start_response)

    with Lab(app=app, threads=1) as lab:
        assert lab.ask(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").status == 200


def test_a_handler_may_give_up_by_itself(log: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        raise jumpstart.RequestTimeout

    with Lab(app=app, threads=1) as lab:
        assert lab.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").status == 504
    assert "timeout: GET / has given up" in log.text


# ------------------------------------------------------------------ handlers that make it hard


def test_a_handler_that_swallows_it_cannot_send(log: pytest.LogCaptureFixture) -> None:
    story = Story()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        with contextlib.suppress(BaseException):
            compute()
        story("swallowed")
        assert jumpstart.cancelled() and jumpstart.deadline() == 0
        write = start_response("200 OK", [("Content-Length", "2")])
        try:
            write(b"ok")
        except ConnectionError as error:
            story(type(error).__name__)
        return [b"ok"]

    with Lab(app=app, threads=1, limits=SHORT) as lab:
        with lab.back_to_baseline(), lab.connect() as client:
            client.get("/")
            assert client.response().status == 504
            assert client.is_closed()
        assert story.has("swallowed", "ClientGoneError")
        back_at_rest(lab, 1)


def test_a_generator_that_swallows_it_is_closed_once() -> None:
    story = Story()
    bodies: list[Body] = []

    def pieces() -> Iterator[bytes]:
        for _ in range(1000):
            try:
                compute()
            except BaseException as error:
                story(type(error).__name__)
            yield b"more"

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        bodies.append(Body(pieces()))
        return bodies[0]

    with Lab(app=app, threads=1, limits=SHORT) as lab:
        with lab.back_to_baseline():
            assert lab.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").status == 504
        back_at_rest(lab, 1)
    assert story.told == ["RequestTimeout"]
    assert bodies[0].closed == 1


@pytest.mark.parametrize("way", ["in the app", "before the first piece", "between two", "in close"])
def test_what_the_app_gave_is_closed_once_and_whole(way: str) -> None:
    """Whenever it is interrupted; and `close` itself is not."""
    story = Story()

    class Closing(Body):
        def close(self) -> None:
            if way == "in close":
                time.sleep(0.5)
            for _ in range(1000):
                str(_)
            super().close()
            story("closed")

    def pieces() -> Iterator[bytes]:
        if way == "before the first piece":
            compute()
        yield b"one"
        if way == "between two":
            compute()

    bodies = []

    class Callable_:
        def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            start_response("200 OK", [("Content-Length", "3" if way == "in close" else "6")])
            bodies.append(Closing(pieces()))
            if way == "in the app":
                with contextlib.suppress(IndexError):
                    threading.Event().wait(0.6)  # it cannot be raised before this is over
            return bodies[0]

    with Lab(app=Callable_(), threads=1, limits=SHORT) as lab:
        with lab.back_to_baseline(), lab.connect() as client:
            client.get("/")
            response = client.response()
            expected = (200, True) if way == "in close" else (200, False) if way == "between two" else (504, True)
            assert (response.status, response.complete) == expected
        if way == "in the app" and not story.told:
            return  # it was interrupted before it gave anything to be closed
        assert story.has("closed")
        assert [body.closed for body in bodies] == [1]
        back_at_rest(lab, 1)


@pytest.mark.parametrize("way", ["list", "chunks", "write", "file"])
@pytest.mark.parametrize("tls", [False, True])
def test_a_handler_whose_client_does_not_read(way: str, tls: bool, tmp_path: Path) -> None:
    story = Story()
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(24 * 1024 * 1024)
    block = bytes(1024 * 1024)
    half = block * 12

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        if way == "list":
            return [half, half]
        if way == "file":
            return FileWrapper(big.open("rb"))
        if way == "chunks":
            return Body(block for _ in range(24))
        try:
            for _ in range(24):
                write(block)
        except ConnectionError as error:
            story(type(error).__name__)
            raise
        return []

    with Lab(
        app=app, threads=1, limits=RequestLimits(timeout=1.0), tls=make_certificate(tmp_path) if tls else None
    ) as lab:
        with lab.back_to_baseline(), lab.connect() as client:
            client.get("/")
            assert client.head()[0] == 200
            until(lambda: not lab.busy)
            size = 0
            with contextlib.suppress(OSError):
                size = len(client.rest())
            assert size < 24 * 1024 * 1024
        if way == "write":
            assert story.has("ClientGoneError")
        back_at_rest(lab, 1)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("expects", [False, True])
def test_a_handler_that_waits_for_its_body(tls: bool, expects: bool, tmp_path: Path) -> None:
    """It is freed, and the client is told."""
    story = Story()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            environ["wsgi.input"].read()
        except BaseException as error:
            story(type(error).__name__)
            raise
        raise AssertionError

    settings = ConnectionSettings(body_timeout=SLOW)
    certificate = make_certificate(tmp_path) if tls else None
    with Lab(settings, app, threads=1, limits=SHORT, stream_bodies=True, tls=certificate) as lab:
        with lab.back_to_baseline(), lab.connect() as client:
            expect = b"Expect: 100-continue\r\n" if expects else b""
            client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n" + expect + b"\r\n")
            if expects:
                assert client.response().status == 100
            client.send(b"12345")
            response = client.response()
            assert (response.status, response.get("connection")) == (504, "close") or expects
            assert client.is_closed()
        assert len(story.told) == 1 and story.told[0] in ("RequestBodyError", "RequestTimeout")
        back_at_rest(lab, 1)


# ------------------------------------------------------------------ overruns


def test_33_overruns_are_replaced_up_to_a_limit_and_the_counts_return(log: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    reasons: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/stuck":
            release.wait(12 * PATIENCE)
        return answer()(environ, start_response)

    limits = RequestLimits(timeout=0.3, max_overruns=2)
    with Lab(app=app, threads=2, limits=limits, renew=reasons.append, queue_timeout=0) as lab:

        def get(path: str) -> Client:
            client = lab.connect()
            client.get(path)
            return client

        def be_stuck(number: int) -> None:
            clients = [get("/stuck") for _ in range(number)]
            assert [client.response().status for client in clients] == [504] * number
            for client in clients:
                client.sock.close()

        assert lab.ask(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").status == 200
        before = lab.server.stats()
        be_stuck(2)
        until(lambda: lab.server.stats().overruns == 2)
        with get("/") as client:
            assert client.response().status == 200
        assert 3 <= lab.server.stats().threads <= 4 and not reasons
        be_stuck(2)
        until(lambda: lab.server.stats().overruns == 4)
        until(lambda: reasons)
        assert reasons == ["overruns: 3 handlers run on although they were stopped (--max-overruns)"]
        with get("/") as waiting:  # no thread is left, and no other one is started
            until(lambda: lab.server.stats().waiting == 1)
            assert lab.server.stats().threads == 4
            release.set()
            assert waiting.response().status == 200
        back_at_rest(lab, 2)
        after = lab.server.stats()
        assert (after.limit, after.busy, after.overruns) == (before.limit, 0, 0)
        assert len(reasons) == 1
        clients = [get("/") for _ in range(4)]
        assert [client.response().status for client in clients] == [200] * 4
        for client in clients:
            client.sock.close()
    assert log.text.count("overrun over after") == 4


def test_an_overrun_does_not_hold_up_the_stop() -> None:
    release = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        release.wait(12 * PATIENCE)
        return answer()(environ, start_response)

    lab = Lab(app=app, threads=1, limits=RequestLimits(timeout=0.3))
    lab.start()
    with lab.connect() as client:
        client.get("/")
        assert client.response().status == 504
        until(lambda: lab.server.stats().overruns == 1)
        lab.stop()
        assert lab.stopped.wait(PATIENCE)
    release.set()
    lab.close()


def test_a_request_that_begins_behind_the_back_of_the_keeper_has_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper has seen that nothing runs, and loses the CPU before it goes to sleep."""
    idle, begun = threading.Event(), threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        begun.set()
        compute()
        return answer()(environ, start_response)

    lab = Lab(app=app, limits=SHORT)
    tick = lab.server.tick

    def slow_tick(now: float, restless: bool) -> float:
        next_tick = tick(now, restless)
        if next_tick == float("inf") and not begun.is_set():
            idle.set()
            begun.wait(PATIENCE)
        return next_tick

    monkeypatch.setattr(lab.server, "tick", slow_tick)
    with lab, lab.connect() as client:
        assert idle.wait(PATIENCE)
        client.get("/")
        assert client.response().status == 504


# ------------------------------------------------------------------ sever


@pytest.fixture
def model() -> Iterator[socket.socket]:
    """A language model that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        yield listener


def asking(model: socket.socket, story: Callable[[str], None], timeout: float | None = None) -> App:
    """A handler that waits for the model, after some words of its own."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        host, port = model.getsockname()
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
        except BaseException as error:
            story(type(error).__name__)
            raise
        finally:
            connection.close()
        return answer()(environ, start_response)

    return app


def test_a_handler_that_waits_for_a_peer_is_freed(model: socket.socket, log: pytest.LogCaptureFixture) -> None:
    story = Story()
    with Lab(threads=2, limits=RequestLimits(timeout=0.5, on_deadline="sever")) as lab:
        lab.app(asking(model, story), "/")
        with lab.back_to_baseline():
            assert lab.ask(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n").status == 504
            assert story.has("RequestTimeout")
        back_at_rest(lab, 2)
    host, port = model.getsockname()
    assert "severed: the socket that POST / waited on was shut down, fd=" in log.text
    assert f"peer={host}:{port}" in log.text
    assert "overrun" not in log.text


def test_without_it_the_same_handler_is_an_overrun(model: socket.socket) -> None:
    story = Story()
    with Lab(threads=2, limits=RequestLimits(timeout=0.3)) as lab:
        lab.app(asking(model, story), "/")
        assert lab.ask(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n").status == 504
        until(lambda: lab.server.stats().overruns == 1)
        model.accept()[0].close()
        assert story.has("RequestTimeout")
        back_at_rest(lab, 2)


def test_no_client_is_severed_nor_what_another_handler_waits_on(model: socket.socket) -> None:
    """A handler that polls its own client's connection is not our business; the others go on."""
    story = Story()
    release = threading.Event()

    def patient(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        with socket.create_connection(model.getsockname()) as sock:
            jumpstart.extend_deadline(20)
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            story("waits")
            ready = poll.poll(1500)
            story("nothing came" if not ready else "severed")
        return answer()(environ, start_response)

    limits = RequestLimits(timeout=0.4, timeout_extension=20, on_deadline="sever")
    with Lab(threads=8, limits=limits) as lab:
        lab.app(patient, "/patient")
        lab.app(asking(model, lambda word: None), "/stuck")
        with lab.connect() as client:
            client.get("/patient")
            assert story.has("waits")
            stuck = [lab.connect() for _ in range(5)]
            for each in stuck:
                each.get("/stuck")
            assert [each.response().status for each in stuck] == [504] * 5
            for each in stuck:
                each.sock.close()
            assert client.response().status == 200
        assert story.has("waits", "nothing came")
        release.set()
        back_at_rest(lab, 8)


# ------------------------------------------------------------------ clients that leave


def test_handlers_can_ask_whether_the_client_is_there(log: pytest.LogCaptureFixture) -> None:
    story = Story()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        assert not jumpstart.cancelled()
        story("waits")
        give_up = time.monotonic() + PATIENCE
        while not jumpstart.cancelled() and time.monotonic() < give_up:
            time.sleep(0.01)
        story("cancelled")
        return answer()(environ, start_response)

    with Lab(app=app, threads=1) as lab:
        with lab.back_to_baseline():
            with lab.connect() as client:
                client.get("/", method="POST")
                assert story.has("waits")
            assert story.has("waits", "cancelled")
    assert not [record for record in log.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("method", "stopped"), [("GET", True), ("POST", False)])
def test_a_handler_whose_client_has_left_is_interrupted_if_its_method_is_safe(
    method: str, stopped: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    lines = tmp_path / "access"
    access = AccessLog(str(lines), "%(s)s")
    story = Story()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        story("begins")
        try:
            compute(1.5)
        except BaseException as error:
            story(type(error).__name__)
            raise
        story("ends")
        return answer()(environ, start_response)

    with Lab(app=app, threads=1, access=access) as lab:
        with lab.back_to_baseline():
            with lab.connect() as client:
                client.get("/", method=method)
                assert story.has("begins")
            assert story.has("begins", "RequestTimeout" if stopped else "ends")
        back_at_rest(lab, 1)
    access.close()
    assert lines.read_text() == "499\n"
    assert not [record for record in log.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("way", ["close", "reset"])
def test_300_handlers_whose_clients_leave_before_the_first_token_are_free_soon(
    model: socket.socket, way: str, log: pytest.LogCaptureFixture
) -> None:
    with Lab(threads=300, limits=RequestLimits(timeout=60, on_deadline="sever")) as lab:
        lab.app(asking(model, lambda word: None), "/")
        with lab.back_to_baseline():
            clients = [lab.connect() for _ in range(300)]
            for client in clients:
                client.get("/", method="POST")
            until(lambda: lab.busy == 300, 30)
            began = time.monotonic()
            for client in clients:
                client.sock.close() if way == "close" else client.reset()
            until(lambda: lab.busy == 0, 30)
            took = time.monotonic() - began
            gc.collect()  # what an exception cut short in the client's library
        back_at_rest(lab, 300)
    print(f"300 handlers free after {took:.2f} s")
    assert took < 6  # 1.5 on a quiet machine


def test_handlers_whose_clients_leave_in_the_middle_of_a_stream_are_free_sooner() -> None:
    def tokens(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        for _ in range(200):
            time.sleep(0.1)
            yield b"token "

    with Lab(app=tokens, threads=100, limits=RequestLimits(timeout=60, on_deadline="sever")) as lab:
        with lab.back_to_baseline():
            clients = [lab.connect() for _ in range(100)]
            for client in clients:
                client.get("/")
            for client in clients:
                assert client.head()[0] == 200
            began = time.monotonic()
            for client in clients:
                client.sock.close()
            until(lambda: lab.busy == 0, 30)
            took = time.monotonic() - began
        back_at_rest(lab, 100)
    print(f"100 streams over after {took:.2f} s")
    assert took < 3  # 0.3 on a quiet machine


# ------------------------------------------------------------------ a storm


def test_deadlines_at_about_the_end_of_their_requests(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has one whole answer, its own or 504, or a broken stream; what was opened is closed; all is free."""
    opened, closed, faults = [0], [0], []
    lock = threading.Lock()

    class Counted(Body):
        def __init__(self, pieces: Iterator[bytes]) -> None:
            super().__init__(pieces)
            with lock:
                opened[0] += 1

        def close(self) -> None:
            super().close()
            with lock:
                closed[0] += 1
            if self.closed != 1:
                faults.append(f"closed {self.closed} times")

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        way, token = environ["PATH_INFO"][1:], environ["QUERY_STRING"].encode()
        pause = int(token) % 7 * 0.003 + 0.092

        def pieces() -> Iterator[bytes]:
            for _ in range(10):
                time.sleep(pause / 10)
                compute(0.0005)
                yield token + b"."

        if way == "stream":
            start_response("200 OK", [])
            return Counted(pieces())
        time.sleep(pause - 0.005)
        if way == "list":
            compute(0.005)
        else:
            time.sleep(0.005)
        start_response("200 OK", [("Content-Length", str(len(token)))])
        return [token]

    statuses: dict[str, int] = {}

    def ask(lab: Lab, seed: int) -> None:
        try:
            client: Client | None = None
            for number in range(24):
                token = str(seed * 1000 + number)
                way = ("stream", "list", "sleep")[number % 3]
                client = client or lab.connect()
                client.get(f"/{way}?{token}")
                response = client.response()
                expected = (f"{token}." * 10 if way == "stream" else token).encode()
                if response.status == 504:
                    kind = "504"
                elif response.complete:
                    kind = "whole"
                    assert response.body == expected
                else:
                    kind = "broken"
                    assert way == "stream" and expected.startswith(response.body)
                with lock:
                    statuses[kind] = statuses.get(kind, 0) + 1
                if kind != "whole":
                    client.sock.close()
                    client = None
            if client is not None:
                client.sock.close()
        except BaseException as error:
            faults.append(repr(error))

    before = len(descriptors())
    guard = Guard(monkeypatch)
    with Lab(app=app, threads=8, limits=RequestLimits(timeout=0.1), queue_timeout=0) as lab:
        threads = [threading.Thread(target=ask, args=[lab, seed]) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert faults == []
        back_at_rest(lab, 8)
        assert (opened[0], opened[0] - closed[0]) == (64, 0)
    assert len(descriptors()) <= before + 1
    assert guard.faults == [] and guard.checks > 192
    assert statuses["504"] and statuses["whole"] and sum(statuses.values()) == 192
    assert "internal error" not in log.text and "exception in the app" not in log.text
    print(statuses)


def test_the_keeper_sees_a_deadline_when_there_is_no_other_traffic() -> None:
    """It sleeps then."""
    story = Story()
    with Lab(app=computing(story), threads=1, limits=RequestLimits(timeout=1.6)) as lab, lab.connect() as client:
        client.get("/")
        began = time.monotonic()
        assert client.response().status == 504
        assert 1.5 < time.monotonic() - began < 1.6 + LOOSE
    assert sys.getswitchinterval() > 0
