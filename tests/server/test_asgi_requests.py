"""What an ASGI app is told and given, and what its requests leave to each other. Numbers are those of the cases."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.asgi_lab import Client, Lab, Receive, Scope, Send, answer, echo, read_body, until
from tests.server.http_cases import CUT_SHORT, GET

pytestmark = pytest.mark.usefixtures("log")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A server with the defaults."""
    with Lab() as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


# -- scope --


def test_scope(lab: Lab) -> None:
    """163."""
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        await answer()(scope, receive, send)

    lab.app(app, "/a/bö/")
    with lab.connect() as client:
        client.get("/a%2Fb%C3%B6/?x=%20&y", "X-Tab: \t v ", "X_Y: dropped", "Cookie: a=1", "Cookie: b=2")
        assert client.response().status == 200
        name = client.sock.getsockname()
    assert seen.pop("headers") == [
        (b"host", b"test"),
        (b"x-tab", b"v"),
        (b"cookie", b"a=1"),
        (b"cookie", b"b=2"),
    ]
    assert seen == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "server": lab.address,
        "client": name,
        "scheme": "http",
        "method": "GET",
        "root_path": "",
        "path": "/a/bö/",
        "raw_path": b"/a%2Fb%C3%B6/",
        "query_string": b"x=%20&y",
        "state": {},
    }


def test_what_an_app_does_to_its_scope_stays_in_its_request(lab: Lab) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((list(scope["headers"]), dict(scope["state"]), dict(scope["asgi"])))
        scope["headers"].append((b"x-added", b"1"))
        scope["state"]["added"] = True  # 160
        scope["asgi"]["added"] = True
        await answer()(scope, receive, send)

    path = lab.app(app)
    with lab.connect() as client:
        for _ in range(3):
            client.get(path)
            assert client.response().status == 200
    assert seen[0] == seen[1] == seen[2]


def test_root_path_is_in_path_and_not_in_raw_path() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        await answer()(scope, receive, send)

    with Lab(app=app, root_path="/shop") as lab:
        assert lab.ask(b"GET /cart HTTP/1.1\r\nHost: a\r\n\r\n").status == 200
    assert (seen["root_path"], seen["path"], seen["raw_path"]) == ("/shop", "/shop/cart", b"/cart")


def test_a_unix_socket_has_no_client_address(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        await answer()(scope, receive, send)

    with Lab(app=app, uds=tmp_path / "socket") as lab:
        assert lab.ask(GET).status == 200
    assert (seen["client"], seen["server"]) == (None, (str(tmp_path / "socket"), None))


# -- bodies --


def test_reading_stops_while_the_app_does_not_take_the_body(lab: Lab) -> None:
    """Memory for an upload is bounded by the high-water mark and what one read brings."""
    held: list[int] = []
    gate: list[asyncio.Event] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        gate.append(asyncio.Event())
        await gate[0].wait()
        exchange = receive.__self__  # type: ignore[attr-defined]
        held.append(exchange.unread_bytes)
        body, _ = await read_body(receive)
        await answer(b"%d" % len(body))(scope, receive, send)

    path = lab.app(app)
    size = 20_000_000
    with lab.connect() as client:
        client.get(path, f"Content-Length: {size}", method="POST")
        client.sock.setblocking(False)
        sent = 0
        stuck_since = time.monotonic()
        while time.monotonic() - stuck_since < 0.3:  # until nothing was taken for a while
            with contextlib.suppress(BlockingIOError):
                sent += client.sock.send(bytes(min(65536, size - sent)))
                stuck_since = time.monotonic()
        assert sent < size
        lab.loop.call_soon_threadsafe(gate[0].set)
        client.sock.settimeout(5)
        client.send(bytes(size - sent))
        assert client.response().body == b"%d" % size
    assert held[0] <= 64 * 1024 + 256 * 1024


@pytest.mark.parametrize("cut", CUT_SHORT)
def test_a_body_that_is_cut_short_is_never_seen_whole(lab: Lab, cut: bytes) -> None:
    """126."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(await read_body(receive))

    path = lab.app(app)
    with lab.back_to_baseline():
        for leave in (Client.end, Client.reset):
            with lab.connect() as client:
                client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b" % (path.encode(), cut))
                until(lambda: lab.tasks)
                leave(client)
                until(lambda: not lab.tasks)
    assert [whole for _, whole in seen] == [False, False]


def test_several_may_wait_in_receive(lab: Lab) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        waiting = [asyncio.create_task(receive()) for _ in range(3)]  # type: ignore[arg-type, var-annotated]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        await answer()(scope, receive, send)
        kinds = [(await task)["type"] for task in waiting[1:]]
        assert kinds == ["http.disconnect"] * 2

    path = lab.app(app)
    assert lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode()).status == 200
    until(lambda: not lab.tasks)


# -- contexts --


var: contextvars.ContextVar[str] = contextvars.ContextVar("var")


def test_158_contexts_are_clean_between_requests(lab: Lab) -> None:
    """Also after a body that made reading pause, and when requests are pipelined."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(var.get("unset"))
        var.set("leaked")
        await asyncio.sleep(0)
        await echo(scope, receive, send)

    path = lab.app(app)
    body = bytes(500_000)
    with lab.connect() as client:
        for _ in range(3):
            client.get(path, f"Content-Length: {len(body)}", method="POST")
            client.send(body)
            assert client.response().body == body
        client.get(path)
        client.get(path)
        client.get(path)
        for _ in range(3):
            assert client.response().status == 200
    assert seen == ["unset"] * 6


def test_160_lifespan_state_and_context_are_seen() -> None:
    seen: list[tuple[Any, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            scope["state"]["pool"] = "pool"
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        seen.append((dict(scope["state"]), var.get("unset")))
        var.set("leaked")
        scope["state"]["mine"] = True
        await answer()(scope, receive, send)

    class Within(Lab):
        """A server that somebody started in a context, as tracers do."""

        async def _serve(self) -> None:
            var.set("of the server")
            await super()._serve()

    with Within(app=app, lifespan="on") as lab:
        for _ in range(2):
            assert lab.ask(GET).status == 200
    assert seen == [({"pool": "pool"}, "of the server")] * 2


# -- WebSockets --


async def _socket_echo(scope: Scope, receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept", "headers": [(b"x-state", json.dumps(scope["state"]).encode())]})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


def test_a_websocket_echoes(lab: Lab) -> None:
    from websockets.sync.client import connect

    path = lab.app(_socket_echo)
    with lab.connect() as client:
        client.send(GET)  # on a connection that has served a request before
        assert client.response().status == 200
        with connect(f"ws://127.0.0.1:{lab.address[1]}{path}", sock=client.sock, proxy=None) as websocket:
            for text in ("one", "two" * 50_000):
                websocket.send(text)
                assert websocket.recv() == text
    until(lambda: not lab.tasks)


def test_a_websocket_frame_behind_its_handshake_is_not_lost(lab: Lab) -> None:
    path = lab.app(_socket_echo)
    with lab.connect() as client:
        client.send(
            b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n\x81\x82\0\0\0\0hi" % path.encode()
        )
        assert client.head()[0] == 101
        assert client.exactly(4) == b"\x81\x02hi"
    until(lambda: not lab.tasks)
