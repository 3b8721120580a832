"""Clients behind proxies, as an ASGI app sees them: WebSockets, Unix sockets, clients that have left."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from jumpstart_server.http1 import ProxyProtocol
from tests.server.asgi_lab import Client, Lab, Receive, Scope, Send, answer, until
from tests.server.http_cases import FORWARDED, GET
from tests.server.http_cases import PROXY_V2 as V2

LOCAL = "127.0.0.1,::1"


async def who(scope: Scope, receive: Receive, send: Send) -> None:
    """Tells what the scope says of the connection."""
    told = {name: scope[name] for name in ("client", "scheme", "server")}
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept", "headers": [(b"x-told", json.dumps(told).encode())]})
        await send({"type": "websocket.close"})
    else:
        await answer(json.dumps(told).encode())(scope, receive, send)


def trusting(text: str | None, **more: Any) -> ConnectionSettings:
    return ConnectionSettings(proxies=None if text is None else TrustedProxies(text), **more)


def proxied(
    version: ProxyProtocol = "auto", senders: str = LOCAL, proxies: str | None = None, **more: Any
) -> ConnectionSettings:
    return trusting(proxies, proxy_protocol=version, proxy_senders=TrustedProxies(senders), **more)


def read_told(client: Client) -> dict[str, Any]:
    response = client.response()
    assert response.status == 200
    found: dict[str, Any] = json.loads(response.body)
    return found


pytestmark = pytest.mark.usefixtures("log")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A server that trusts the proxies on its own host."""
    with Lab(settings=trusting(LOCAL), app=who) as lab:
        yield lab


@pytest.fixture(scope="module")
def behind() -> Iterator[Lab]:
    """A server that wants PROXY headers, and trusts the headers of 192.0.2.7 and of its own host."""
    with Lab(settings=proxied(proxies=f"192.0.2.7,{LOCAL}"), app=who) as lab:
        yield lab


def test_a_websocket_has_the_same_client(lab: Lab) -> None:
    handshake = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: " + "A" * 22 + "==",
    )
    for fields, client_host, scheme in (
        ((), "127.0.0.1", "ws"),
        (("X-Forwarded-For: 6.6.6.6, 192.0.2.7", "X-Forwarded-Proto: https"), "192.0.2.7", "wss"),
        (("X-Forwarded-For: 192.0.2.7", "X-Forwarded-Proto: wss"), "192.0.2.7", "wss"),
    ):
        with lab.connect() as client:
            client.get("/", *handshake, *fields)
            status, headers = client.head()
            assert status == 101
            found = json.loads(dict(headers)["x-told"])
            assert (found["client"][0], found["scheme"], found["server"]) == (client_host, scheme, list(lab.address))
    until(lambda: not lab.tasks)


def test_a_client_that_has_left_already_is_not_taken_for_one_over_a_unix_socket() -> None:
    """Who resets the connection has no address any more, and its request is served all the same."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    with Lab(settings=trusting("unix:"), app=app) as lab:
        held = threading.Event()

        def hold() -> None:
            held.set()
            time.sleep(0.1)  # until the client is gone: the connection is accepted after that

        lab.loop.call_soon_threadsafe(hold)
        assert held.wait(5)
        client = lab.connect()
        client.send(FORWARDED)
        client.reset()
        with lab.connect() as other:
            other.send(GET)  # is accepted after it
            other.rest()
        until(lambda: not lab.connections)
    for scope in seen:
        assert scope["scheme"] == "http"
        assert scope["client"] is None or scope["client"][0] == "127.0.0.1"


def test_a_websocket_behind_a_proxy_header(behind: Lab) -> None:
    with behind.connect() as client:
        client.send(
            V2 + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
        )
        status, headers = client.head()
        assert status == 101
        found = json.loads(dict(headers)["x-told"])
        assert found == {"client": ["192.0.2.7", 56324], "scheme": "ws", "server": ["198.51.100.1", 443]}
    until(lambda: not behind.tasks)


def test_a_unix_socket_is_the_server(folder: Path) -> None:
    path = folder / "x.sock"
    with Lab(settings=trusting("unix:"), app=who, uds=path) as lab, lab.connect() as client:
        client.send(FORWARDED)
        assert read_told(client) == {"client": ["203.0.113.9", 0], "scheme": "https", "server": [str(path), None]}
