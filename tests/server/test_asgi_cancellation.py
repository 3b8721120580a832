"""What the ASGI engine cancels and what it lets run: clients that leave, a stop. Numbers are those of the cases."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse

from jumpstart_server.asgi import ClientGoneError
from jumpstart_server.connection_settings import ConnectionSettings
from tests.server.asgi_lab import Client, Lab, Receive, Scope, Send, answer, echo, piece, start, until
from tests.server.http_cases import GET, errors

pytestmark = pytest.mark.usefixtures("log")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A server with the defaults."""
    with Lab() as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


# -- clients that leave (B) --


@pytest.mark.parametrize("leave", [Client.__exit__, Client.reset], ids=["close", "reset"])
def test_40_a_stream_ends_within_a_second_after_its_client(lab: Lab, log: pytest.LogCaptureFixture, leave: Any) -> None:
    """Although it waits for something else than send."""
    ended: list[float] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.sleep(60)
            yield b"never"
        finally:
            ended.append(time.monotonic())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        async with contextlib.aclosing(events()) as stream:
            async for event in stream:
                await send(piece(event, more=True))

    path = lab.app(app)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        assert client.head()[0] == 200
        assert client.line() == b"5"
        left = time.monotonic()
        leave(client)
        until(lambda: ended)
    assert ended[0] - left < 1
    assert not errors(log)  # 51


def test_send_raises_when_the_client_has_left(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    raised: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"
        await send(start())
        try:
            while True:
                await send(piece(b"x" * 1000, more=True))
                await asyncio.sleep(0)
        except OSError as error:
            raised.append(error)
            raise

    path = lab.app(app)
    client = lab.connect()
    client.get(path)
    until(lambda: lab.tasks)
    client.sock.close()
    until(lambda: raised)
    assert isinstance(raised[0], ClientGoneError)
    until(lambda: not lab.tasks)
    assert not errors(log)


def test_50_first_the_message_then_the_cancellation(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    open_resources = 0
    story: list[str] = []

    @contextlib.asynccontextmanager
    async def database() -> AsyncIterator[None]:
        nonlocal open_resources
        open_resources += 1
        try:
            yield
        finally:
            open_resources -= 1

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            story.append("disconnect")

        listener = asyncio.create_task(listen())
        try:
            async with database():
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            story.append("cancelled")
            raise
        finally:
            listener.cancel()

    path = lab.app(app)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        until(lambda: open_resources)
        client.sock.close()
        until(lambda: not open_resources)
    assert story == ["disconnect", "cancelled"]
    assert not errors(log)


def test_51_a_handler_that_looks_whether_its_client_is_there_ends_without_a_word(
    lab: Lab, log: pytest.LogCaptureFixture
) -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        while not await request.is_disconnected():  # noqa: ASYNC110  as apps do
            await asyncio.sleep(0.01)
        seen.append(True)
        await PlainTextResponse("nobody reads this")(scope, receive, send)  # type: ignore[arg-type]

    path = lab.app(app)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        until(lambda: lab.tasks)
        client.reset()
        until(lambda: seen)
    assert not errors(log)


def test_45_what_runs_after_the_response_is_not_cancelled(lab: Lab) -> None:
    done: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer()(scope, receive, send)
        await asyncio.sleep(0.7)
        done.append("mail sent")

    path = lab.app(app)
    client = lab.connect()
    client.get(path)
    assert client.response().status == 200
    client.reset()
    assert lab.tasks  # counted in the drain
    until(lambda: done)


def test_background_work_does_not_keep_the_next_request_waiting(lab: Lab) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer()(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"  # the exchange is over for this app
        await asyncio.sleep(0.5)

    path = lab.app(app)
    began = time.monotonic()
    with lab.connect() as client:
        for _ in range(3):
            client.get(path)
            assert client.response().status == 200
    assert time.monotonic() - began < 0.4


def test_starlette_streams_are_closed(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    """166: a sync generator, which Starlette runs in threads, and an async one that waits."""

    ended: list[str] = []

    def sync_stream() -> Iterator[bytes]:
        try:
            while True:
                time.sleep(0.01)
                yield b"x" * 100
        finally:
            ended.append("sync")

    async def async_stream() -> AsyncIterator[bytes]:
        try:
            yield b"x"
            await asyncio.sleep(60)
        finally:
            ended.append("async")

    for make in (async_stream, sync_stream):

        async def app(scope: Scope, receive: Receive, send: Send, make: Any = make) -> None:
            stream = make()
            try:
                await StreamingResponse(stream)(scope, receive, send)  # type: ignore[arg-type]
            finally:
                if make is sync_stream:
                    stream.close()

        path = lab.app(app)
        client = lab.connect()
        client.get(path)
        assert client.head()[0] == 200
        left = time.monotonic()
        client.sock.close()
        expected = make.__name__.partition("_")[0]
        until(lambda expected=expected: expected in ended)  # type: ignore[misc]
        assert time.monotonic() - left < 1.2
    until(lambda: not lab.tasks)
    assert not errors(log)


def test_43_a_slow_reader_costs_the_high_water_mark(lab: Lab) -> None:
    sent = 0
    chunk = bytes(100_000)
    most = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent, most
        transport = send.__self__.connection.transport  # type: ignore[attr-defined]
        await send(start())
        for _ in range(200):
            await send(piece(chunk, more=True))
            sent += len(chunk)
            most = max(most, transport.get_write_buffer_size())
        await send(piece())

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path)
        until(lambda: sent)
        previous = -1
        while sent != previous:  # until it does not move any more
            previous = sent
            time.sleep(0.1)
        assert sent < 20_000_000
        response = client.response()  # and it goes on when the client does
        assert (len(response.body), response.complete) == (20_000_000, True)
    assert most < 64 * 1024 + 2 * len(chunk)


# -- a busy loop, and a stop --


def test_180_a_request_that_waits_behind_a_busy_loop_is_not_lost() -> None:
    """The loop stands still over the end of an idle time; timers ring before sockets are read."""
    with Lab(settings=ConnectionSettings(keep_alive=0.3), app=answer()) as lab, lab.connect() as client:
        client.send(GET)
        assert client.response().status == 200
        lab.loop.call_soon_threadsafe(time.sleep, 0.5)
        client.send(GET)
        assert client.response().status == 200


def test_58_a_request_that_came_with_the_stop_is_served() -> None:
    with Lab(app=answer()) as lab, lab.connect() as client, lab.connect() as other:
        until(lambda: lab.connections == 2)
        client.send(GET)
        assert client.response().status == 200
        lab.loop.call_soon_threadsafe(
            lambda: [connection.shutdown() for connection in lab.server.server_state.connections]
        )
        for waiting in (client, other):
            waiting.send(GET)
            assert waiting.response().get("connection") == "close"


def test_61_streams_that_do_not_end_are_cancelled_when_the_time_is_over() -> None:
    cancelled: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await send(start())
            await send(piece(b"x", more=True))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(scope["path"])
            raise

    with Lab(app=app, timeout_graceful_shutdown=0) as lab:
        with lab.connect() as stream, lab.connect() as waiting:
            stream.get("/stream")
            assert stream.head()[0] == 200
            waiting.get("/waiting")
            until(lambda: lab.tasks == 2)
            lab.stop()
            assert waiting.response().status == 503
            stream.rest()
    assert sorted(cancelled) == ["/stream", "/waiting"]


def test_165_a_websocket_is_told_of_the_stop() -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    story: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
            await send({"type": "websocket.accept"})
            story.append(await receive())
        finally:
            story.append("finally")

    with Lab(app=app) as lab:
        with connect(f"ws://127.0.0.1:{lab.address[1]}/", proxy=None) as websocket:
            lab.stop()
            with pytest.raises(ConnectionClosed) as closed:
                websocket.recv(timeout=5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    assert story == [{"type": "websocket.disconnect", "code": 1012}, "finally"]
