"""Deadlines of ASGI requests: what the client and the app see, and what is logged. Numbers are those of the cases."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import jumpstart
from jumpstart_server import forks
from jumpstart_server.access import AccessLog
from jumpstart_server.asgi.stacks import stack_of_task
from jumpstart_server.asgi.threads import Threads
from jumpstart_server.envelope.cpu import Measured
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_warmup.observe import Observer
from tests.server.asgi_lab import App, Lab, Receive, Scope, Send, answer, echo, piece, read_body, start, until
from tests.server.raw_http import Response

TIMEOUT = 0.5  # seconds
SOON = 0.6  # seconds beyond, on a busy machine; the promise is 0.25


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def messages(log: pytest.LogCaptureFixture, level: int = logging.ERROR) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= level]


class Room:
    """A server with limits, and its books."""

    def __init__(self, path: Path, limits: RequestLimits, *, threads: int = 4, may_sever: bool = False) -> None:
        self._path = path
        self.access = AccessLog(str(path), "json")
        self.observer = Observer()
        self.pool = Threads(threads, limits.max_overruns, may_sever=may_sever)
        self.lab = Lab(limits=limits, threads=self.pool, observer=self.observer, access=self.access)

    def __enter__(self) -> Room:
        self.lab.__enter__()
        self.lab.app(answer(), "/")
        assert self.lab.ask(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").status == 200
        return self

    def __exit__(self, *_: Any) -> None:
        until(lambda: not self.lab.tasks and not self.lab.connections)
        until(lambda: not self.lab.service.deadlines.overruns and not self.lab.service.deadlines.orphans)
        assert self.lab.run(self.stats()).busy == 0
        self.lab.__exit__(None, None, None)
        self.access.close()

    async def stats(self) -> Any:
        return self.pool.stats()

    def timed(self, app: App, method: str = "GET") -> tuple[Response, float]:
        path = self.lab.app(app)
        began = time.monotonic()
        with self.lab.connect() as client:
            client.get(path, method=method)
            response = client.response()
            took = time.monotonic() - began
            assert client.is_closed()
        return response, took

    def lines(self, path: str = "") -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self._path.read_text().splitlines()) if line["path"] != "/"]

    def line(self) -> dict[str, Any]:
        until(self.lines)
        (line,) = self.lines()
        return line

    def errors_counted(self) -> int:
        return sum(stats.errors for stats in self.observer.snapshot().routes.values())


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with Room(tmp_path / "access.log", RequestLimits(timeout=TIMEOUT, timeout_extension=10)) as room:
        yield room


def test_3_6_a_coroutine_is_cancelled_once_and_its_client_gets_504(room: Room, log: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    async def inner() -> None:
        await asyncio.sleep(60)  # here it stands

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await inner()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    response, took = room.timed(app)
    assert response.status == 504 and b"too long" in response.body
    assert TIMEOUT <= took < TIMEOUT + SOON
    until(lambda: seen)
    (message,) = messages(log)
    assert message.startswith("timeout: GET /") and "timeout of 0.5 s" in message and "after 0." in message
    assert "await asyncio.sleep(60)  # here it stands" in message and "in inner" in message
    assert room.line()["status"] == 504
    until(lambda: not room.lab.tasks)
    assert seen == ["cancelled"] and room.errors_counted() == 1
    assert len(room.lines()) == 1


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("has_children", [False, True])  # of the app, with copies of the connection
def test_3_a_stream_over_its_time_breaks_so_that_it_can_be_seen(
    room: Room, framing: str, has_children: bool, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "has_children", has_children)
    headers = [(b"content-length", b"100000")] if framing == "length" else []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(200, *headers))
        while True:
            await send(piece(b"token ", more=True))
            await asyncio.sleep(0.05)

    path = room.lab.app(app)
    with room.lab.connect() as client:
        version = "1.0" if framing == "close" else "1.1"
        client.send(f"GET {path} HTTP/{version}\r\nHost: a\r\n\r\n".encode())
        if framing == "close":
            with pytest.raises(ConnectionResetError):
                client.rest()
        else:
            response = client.response()
            assert response.status == 200 and response.body.startswith(b"token token ") and not response.complete
    assert room.line()["status"] == 504
    assert len(messages(log)) == 1


def test_no_answer_and_no_chunk_in_time(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    limits = RequestLimits(first_byte_timeout=0.3, idle_timeout=0.3)

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())  # which sends nothing yet
        await asyncio.sleep(60)

    async def steady(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        for _ in range(8):
            await send(piece(b"x", more=True))
            await asyncio.sleep(0.1)
        await send(piece())

    async def stalls(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(piece(b"x", more=True))
        await asyncio.sleep(60)

    with Room(tmp_path / "access.log", limits) as room:
        assert room.timed(late)[0].status == 504
        assert "first_byte_timeout of 0.3 s" in messages(log)[-1]
        assert room.lab.ask(f"GET {room.lab.app(steady)} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).complete
        assert not room.lab.ask(f"GET {room.lab.app(stalls)} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).complete
        assert "idle_timeout of 0.3 s" in messages(log)[-1]
        assert len(messages(log)) == 2


def test_a_slow_upload_is_the_clients_time(room: Room) -> None:
    path = room.lab.app(echo)
    with room.lab.connect() as client:
        client.send(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\n".encode())
        for _ in range(8):
            time.sleep(TIMEOUT / 4)
            client.send(b"x")
        assert client.response().body == b"x" * 8


def test_background_work_has_no_deadline(room: Room, log: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    left: list[float | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        left.append(jumpstart.deadline())
        await send(start())
        await send(piece(b"done"))
        await asyncio.sleep(2 * TIMEOUT)
        left.append(jumpstart.deadline())
        left.append(jumpstart.cancelled())
        done.set()

    with room.lab.connect() as client:
        client.get(room.lab.app(app))
        assert client.response().body == b"done"
    assert done.wait(5)
    assert left[0] is not None and 0 < left[0] <= TIMEOUT
    assert left[1:] == [None, False]
    assert not messages(log)


def test_a_handler_asks_for_more_time(room: Room) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        granted = await anyio.to_thread.run_sync(jumpstart.extend_deadline, 2 * TIMEOUT)
        assert granted is not None and granted > TIMEOUT
        await asyncio.sleep(1.5 * TIMEOUT)
        assert not jumpstart.cancelled()
        await answer()(scope, receive, send)

    assert room.lab.ask(f"GET {room.lab.app(app)} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).status == 200


def test_an_app_that_swallows_its_cancellation_is_an_overrun(room: Room, log: pytest.LogCaptureFixture) -> None:
    cancellations = 0
    raised: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal cancellations
        while cancellations < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancellations += 1
                assert jumpstart.cancelled()
                try:
                    await send(start())
                except OSError as error:
                    raised.append(error)

    response, took = room.timed(app)
    assert response.status == 504 and took < TIMEOUT + SOON
    until(lambda: room.lab.service.deadlines.overruns == 1)
    until(lambda: not room.lab.tasks)
    assert cancellations == 2 and "time is over" in str(raised[0]) and len(raised) == 2
    assert [line for line in messages(log, logging.WARNING) if "after it was cancelled" in line]
    until(lambda: any(line.startswith("overrun over") for line in messages(log, logging.INFO)))
    assert len(room.lines()) == 1


def sync_app(code: Callable[[], Any]) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(str(await anyio.to_thread.run_sync(code)).encode())(scope, receive, send)

    return app


def test_13_the_answer_does_not_wait_for_a_thread_and_its_slot_is_free(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    with Room(tmp_path / "access.log", RequestLimits(timeout=TIMEOUT), threads=1) as room:
        response, took = room.timed(sync_app(lambda: gate.wait(30)))
        assert response.status == 504 and took < TIMEOUT + SOON
        assert "in a thread" in messages(log)[0] and "gate.wait(30)" in messages(log)[0]
        # The only thread is taken, and there is one in its place.
        assert (
            room.lab.ask(f"GET {room.lab.app(sync_app(lambda: 5))} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).body == b"5"
        )
        until(lambda: room.lab.run(room.stats()).overruns == 1)
        gate.set()
        until(lambda: room.lab.run(room.stats()).overruns == 0)
    assert [line["status"] for line in room.lines()] == [504, 200]


def test_a_thread_gets_request_timeout(room: Room) -> None:
    seen: list[BaseException | None] = []

    def spin() -> None:
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            seen.append(error)
            raise

    response, took = room.timed(sync_app(spin))
    assert response.status == 504 and took < TIMEOUT + SOON
    until(lambda: seen)
    assert isinstance(seen[0], jumpstart.RequestTimeout)
    assert room.lab.ask(f"GET {room.lab.app(sync_app(lambda: 5))} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).body == b"5"


def test_a_thread_that_waits_on_a_socket_is_severed(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    ended: list[object] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as model,
        Room(tmp_path / "access.log", RequestLimits(timeout=TIMEOUT), may_sever=True) as room,
    ):

        def ask_the_model() -> None:
            with socket.create_connection(model.getsockname()) as sock:
                try:
                    ended.append(sock.recv(1))
                except BaseException as error:
                    ended.append(error)
                    raise

        assert room.timed(sync_app(ask_the_model))[0].status == 504
        until(lambda: ended)
    assert any("is shut down" in line for line in messages(log, logging.INFO))


def test_with_sever_a_client_that_leaves_frees_the_thread_of_its_post(tmp_path: Path) -> None:
    """It waits for a model, and nothing has come: the usual case."""
    ended: list[object] = []
    limits = RequestLimits(timeout=60, on_deadline="sever")
    with (
        socket.create_server(("127.0.0.1", 0)) as model,
        Room(tmp_path / "access.log", limits, threads=1, may_sever=True) as room,
    ):

        def ask_the_model() -> None:
            with socket.create_connection(model.getsockname()) as sock:
                try:
                    ended.append(sock.recv(1))
                except BaseException as error:
                    ended.append(error)
                    raise

        with room.lab.connect() as client:
            client.get(room.lab.app(sync_app(ask_the_model)), method="POST")
            until(lambda: room.lab.run(room.stats()).busy == 1)
        began = time.monotonic()
        until(lambda: ended)
        assert time.monotonic() - began < 1.5 + SOON
        assert room.line()["status"] == 499


def test_16_too_many_overruns_ask_for_another_worker_and_take_threads(tmp_path: Path) -> None:
    """Each that is allowed is replaced; beyond them the pool shrinks, and never to nothing."""
    gate = threading.Event()
    limits = RequestLimits(timeout=0.2, max_overruns=1)
    with Room(tmp_path / "access.log", limits, threads=2) as room:
        for _ in range(2):
            assert room.timed(sync_app(lambda: gate.wait(30)))[0].status == 504
        until(lambda: room.lab.renewals)
        assert "2 handlers run on" in room.lab.renewals[0]
        assert (
            room.lab.ask(f"GET {room.lab.app(sync_app(lambda: 5))} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).body == b"5"
        )
        gate.set()
    assert len(room.lab.renewals) == 1


def test_a_client_that_leaves_frees_the_thread_of_its_stream(tmp_path: Path) -> None:
    """Half a second after it has left, by interruption."""
    seen: list[BaseException] = []
    inside = threading.Event()

    def spin() -> None:
        inside.set()
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            seen.append(error)
            raise

    with Room(tmp_path / "access.log", RequestLimits(timeout=60)) as room:
        path = room.lab.app(sync_app(spin))
        room.lab.app(answer(), "/")
        with room.lab.connect() as client:
            client.get(path)
            assert inside.wait(5)
        until(lambda: seen)
        assert room.line()["status"] == 499


def test_171_51_a_client_that_leaves_in_its_upload_is_499_and_no_error(
    room: Room, log: pytest.LogCaptureFixture
) -> None:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def upload(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    app = Starlette(routes=[Route("/{rest:path}", upload, methods=["POST"])])
    for leave in ("close", "reset"):
        path = room.lab.app(app)  # type: ignore[arg-type]  # Starlette's types say MutableMapping
        with room.lab.connect() as client:
            client.send(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc".encode())
            until(lambda: room.lab.tasks)
            client.reset() if leave == "reset" else client.sock.close()
        until(lambda: not room.lab.tasks and not room.lab.connections)
    until(lambda: len(room.lines()) == 2)
    assert [line["status"] for line in room.lines()] == [499, 499]
    assert messages(log) == [] and room.errors_counted() == 0


def test_51_an_app_that_ends_as_it_is_told_is_no_error(room: Room, log: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        assert (await receive())["type"] == "http.disconnect"

    with room.lab.connect() as client:
        client.get(room.lab.app(app))
        until(lambda: room.lab.tasks)
    assert room.line()["status"] == 499
    assert messages(log) == []


def test_an_app_that_raises_generator_exit_is_answered(room: Room, log: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise GeneratorExit

    assert room.timed(app)[0].status == 500
    assert "exception in the app" in messages(log)[0]
    assert room.line()["status"] == 500


def test_thousands_of_deadlines_leave_nothing_behind(tmp_path: Path) -> None:
    """In the moment when the answer is ready, and around it."""
    statuses: list[int] = []
    with Room(tmp_path / "access.log", RequestLimits(timeout=0.1)) as room:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(0.1 + int(scope["query_string"]) / 10_000)
            await answer()(scope, receive, send)

        path = room.lab.app(app)
        for _ in range(5):
            clients = [room.lab.connect() for _ in range(100)]
            for number, client in enumerate(clients):
                client.get(f"{path}?{number * 12}")
            for client in clients:
                with client:
                    statuses.append(client.response().status)
    assert set(statuses) <= {200, 504} and len(statuses) == 500
    assert sorted(line["status"] for line in room.lines()) == sorted(statuses)


def test_code_of_asyncios_executor_is_stopped_too(tmp_path: Path) -> None:
    seen: list[BaseException] = []

    def spin() -> None:
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            seen.append(error)
            raise

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.to_thread(spin)

    async def quick(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(await asyncio.to_thread(bytes, b"quick"))(scope, receive, send)

    with Room(tmp_path / "access.log", RequestLimits(timeout=TIMEOUT), threads=1) as room:
        assert room.timed(app)[0].status == 504
        until(lambda: seen)
        assert isinstance(seen[0], jumpstart.RequestTimeout)
        assert room.lab.ask(f"GET {room.lab.app(quick)} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).body == b"quick"


def test_a_sync_generator_over_its_time_is_ended_and_frees_its_thread(room: Room) -> None:
    """That of a stream: Starlette runs it in a thread."""
    from jumpstart_server.asgi.streams import iterate

    seen: list[str] = []

    def tokens() -> Iterator[bytes]:
        try:
            while True:
                time.sleep(0.02)
                yield b"token "
        except GeneratorExit:
            seen.append("closed")
            raise
        except jumpstart.RequestTimeout:
            seen.append("timeout")
            raise

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        async for chunk in iterate(tokens()):
            await send(piece(chunk, more=True))

    response = room.lab.ask(f"GET {room.lab.app(app)} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert response.body.startswith(b"token ") and not response.complete
    until(lambda: seen)
    until(lambda: room.lab.run(room.stats()).busy == 0)


def test_a_thread_may_ask_whether_its_client_is_there(room: Room) -> None:
    """A POST that has not begun to answer is not stopped; it can stop by itself."""
    seen: list[bool] = []

    def work() -> None:
        seen.append(jumpstart.cancelled())
        while not jumpstart.cancelled():
            time.sleep(0.005)
        seen.append(True)

    with room.lab.connect() as client:
        client.get(room.lab.app(sync_app(work)), method="POST")
        until(lambda: seen)
    until(lambda: len(seen) == 2)
    assert seen == [False, True]


def test_deadlines_in_threads_hit_no_other_request_and_kill_no_thread(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """In the moment when the code returns, and around it; each outcome is the request's own."""
    statuses: list[int] = []
    with Room(tmp_path / "access.log", RequestLimits(timeout=0.1), threads=40) as room:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            number = int(scope["query_string"])

            def work() -> int:
                end = time.monotonic() + 0.08 + (number % 50) / 500
                while time.monotonic() < end:
                    time.sleep(0.0005)
                return number

            body = str(await anyio.to_thread.run_sync(work)).encode()
            await answer(body)(scope, receive, send)

        path = room.lab.app(app)
        for _ in range(20):
            clients = [room.lab.connect() for _ in range(40)]
            for number, client in enumerate(clients):
                client.get(f"{path}?{number}")
            for number, client in enumerate(clients):
                with client:
                    response = client.response()
                    statuses.append(response.status)
                    assert response.status == 504 or response.body == str(number).encode()
        assert set(statuses) == {200, 504}
        until(lambda: not room.pool.has_stopped)
        ours = [thread for thread in threading.enumerate() if thread.name == "AnyIO worker thread"]
        assert room.lab.run(room.stats()).threads == len(ours)
    assert all(message.startswith("timeout: ") for message in messages(log))


def test_a_stack_goes_through_generators_and_what_is_measured() -> None:
    async def innermost() -> None:
        await asyncio.sleep(60)

    async def steps() -> AsyncIterator[int]:
        await innermost()
        yield 1

    async def outermost() -> None:
        async for _ in steps():
            pass

    async def main() -> str:
        async def run() -> None:
            await Measured(outermost())

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        try:
            return stack_of_task(task)
        finally:
            task.cancel()

    text = asyncio.run(main())
    assert [name for name in ("outermost", "steps", "innermost", "sleep") if f"in {name}\n" not in text] == []
