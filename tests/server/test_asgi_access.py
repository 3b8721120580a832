"""The access log of the ASGI engine: clients that leave, a stop, WebSockets. Numbers are those of the cases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumpstart_server.access import AccessLog
from tests.server.access_bench import Bench, make_bench, summary
from tests.server.asgi_lab import Lab, Receive, Scope, Send, answer, piece, start, until
from tests.server.http_cases import GET


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with make_bench("asgi", tmp_path) as bench:
        yield bench


def own(bench: Bench) -> Lab:
    """Its server, as one of this engine."""
    assert isinstance(bench.lab, Lab)
    return bench.lab


def test_background_work_does_not_hold_the_line_back(bench: Bench) -> None:
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer()(scope, receive, send)
        await gate.wait()

    with bench.lab.connect() as client:
        client.get(own(bench).app(app, "/x"))
        assert client.response().status == 200
        assert summary(bench.line()) == ("GET", "/x", 200, 6)
        own(bench).loop.call_soon_threadsafe(gate.set)
    bench.settle()


# ---------------------------------------------------------------------- failed and left


def test_171_a_client_that_leaves_before_the_answer_is_499(bench: Bench) -> None:
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    with bench.lab.connect() as client:
        client.get(own(bench).app(app, "/x"))
        until(begun.is_set)
        client.reset()
        line = bench.line()
    assert summary(line) == ("GET", "/x", 499, 0)
    assert line["app_ms"] > 0
    bench.settle()


def test_a_post_whose_client_has_left_is_499_at_once_and_runs_on(bench: Bench) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await gate.wait()
        done.append("paid")
        await answer()(scope, receive, send)

    with bench.lab.connect() as client:
        client.get(own(bench).app(app, "/x"), "Content-Length: 0", method="POST")
        until(begun.is_set)
        client.reset()
        assert summary(bench.line()) == ("POST", "/x", 499, 0)
        own(bench).loop.call_soon_threadsafe(gate.set)
        until(lambda: done)
    bench.settle()


@pytest.mark.parametrize("begun_to_answer", [False, True])
def test_171_a_request_that_outlasts_a_stop_is_503(tmp_path: Path, begun_to_answer: bool) -> None:
    path = tmp_path / "access.log"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun_to_answer:
            await send(start())
            await send(piece(b"half", more=True))
        begun.set()
        await asyncio.sleep(60)

    begun = asyncio.Event()
    lab = Lab(app=app, timeout_graceful_shutdown=1)
    log = AccessLog(str(path), "%(s)s %(r)s")
    lab.config.jumpstart_access = log  # type: ignore[attr-defined]  # ours
    with lab, lab.connect() as client:
        client.send(GET)
        until(begun.is_set)
        lab.stop()
        if begun_to_answer:
            assert client.rest().endswith(b"half\r\n")
        else:
            assert client.response().status == 503
    assert path.read_text() == "503 GET / HTTP/1.1\n"
    log.close()


# ---------------------------------------------------------------------- WebSockets


async def chat(scope: Scope, receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


def test_a_websocket_is_a_line_when_it_ends(bench: Bench) -> None:
    from websockets.sync.client import connect

    path = own(bench).app(chat, "/chat")
    with connect(f"ws://127.0.0.1:{bench.lab.address[1]}{path}?a=1", proxy=None, compression=None) as websocket:
        websocket.send("hello")
        assert websocket.recv() == "hello"
        assert bench.lines == []
    line = bench.line()
    assert (line["method"], line["path"], line["query"], line["status"]) == ("GET", "/chat", "a=1", 101)
    assert line["bytes"] == 2 + 5 + 4  # a text frame and a close frame
    assert line["client"] == "127.0.0.1" and line["duration_ms"] > 0
    bench.settle()


def test_a_websocket_that_is_refused_has_the_status_of_the_refusal(bench: Bench) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    async def no(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.close"})

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("meant")

    for app, status in ((no, 403), (broken, 500)):
        path = own(bench).app(app)
        with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{bench.lab.address[1]}{path}", proxy=None):
            pass
        assert bench.line()["status"] == status
    bench.settle()


def test_a_websocket_whose_client_does_not_wait_is_499(bench: Bench) -> None:
    begun = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "websocket.disconnect":
            pass

    with bench.lab.connect() as client:
        fields = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
        client.get(own(bench).app(slow, "/x"), *fields, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
        until(begun.is_set)
        client.reset()
    assert summary(bench.line()) == ("GET", "/x", 499, 0)
    bench.settle()
