"""
A laboratory for the ASGI protocol: uvicorn's server with `JumpstartProtocol` in a thread, and a client of raw bytes.

    lab.app("/hello", hello)                        # what answers there
    with lab.connect() as client:
        client.send(b"GET /hello HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        assert client.response().status == 200
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvicorn

from jumpstart_server.asgi import JumpstartProtocol, ProxiedProtocol
from jumpstart_server.connection_settings import ConnectionSettings
from tests.server.raw_http import PATIENCE, Client, Response, until

__all__ = ["App", "Client", "Lab", "Receive", "Response", "Scope", "Send", "answer", "echo", "read_body", "until"]

T = TypeVar("T")
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Lab:
    """One server; use it as a context manager."""

    def __init__(
        self,
        loop: str = "uvloop",
        settings: ConnectionSettings | None = None,
        app: App | None = None,
        uds: Path | None = None,
        tls: tuple[Path, Path] | None = None,
        **config: Any,
    ) -> None:
        self.apps: dict[str, App] = {}
        self._numbers = itertools.count()
        self._uds = uds
        self.tls = tls is not None
        certfile, keyfile = tls or (None, None)
        self.config = uvicorn.Config(
            app or self._dispatch,
            http=JumpstartProtocol if settings is None or settings.proxy_protocol == "off" else ProxiedProtocol,
            lifespan=config.pop("lifespan", "off"),
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=config.pop("timeout_graceful_shutdown", 2),
            ssl_certfile=certfile,
            ssl_keyfile=keyfile,
            **config,
        )
        self.config.jumpstart = settings or ConnectionSettings()  # type: ignore[attr-defined]  # ours
        self.server = uvicorn.Server(self.config)
        self.loop: asyncio.AbstractEventLoop
        self._kind = loop
        self._listener = socket.socket(socket.AF_UNIX if uds else socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(str(uds) if uds else ("127.0.0.1", 0))
        self._listener.listen(1024)
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, name=f"lab-{loop}")

    def _run(self) -> None:
        if self._kind == "uvloop":
            import uvloop

            factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        else:
            factory = asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve([self._listener]))

    def __enter__(self) -> Lab:
        self._thread.start()
        until(lambda: self.server.started and self.server.server_state.default_headers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.server.should_exit = True

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.apps[scope["path"]](scope, receive, send)

    def app(self, app: App, path: str = "") -> str:
        """Let *app* answer at a path of its own, which is returned."""
        path = path or f"/{next(self._numbers)}"
        self.apps[path] = app
        return path

    def connect(self) -> Client:
        sock = socket.socket(self._listener.family if self._listener.fileno() >= 0 else socket.AF_INET)
        sock.settimeout(PATIENCE)
        sock.connect(self.address)
        if self.tls:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            sock = context.wrap_socket(sock)
        return Client(sock)

    def ask(self, data: bytes) -> Response:
        """One request on a connection of its own."""
        with self.connect() as client:
            client.send(data)
            return client.response()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def tasks(self) -> int:
        return len(self.server.server_state.tasks)

    @contextlib.contextmanager
    def back_to_baseline(self) -> Iterator[None]:
        """Connections, tasks and descriptors are as many afterwards as before."""
        until(lambda: not self.connections and not self.tasks)
        before = len(list(Path("/proc/self/fd").iterdir()))
        yield
        until(lambda: not self.connections and not self.tasks)
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


def answer(
    body: bytes = b"hello\n", status: int = 200, headers: list[tuple[bytes, bytes]] | None = None, length: bool = True
) -> App:
    """An app that always says the same."""
    fields = list(headers or [])
    if length:
        fields.append((b"content-length", b"%d" % len(body)))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    return app


async def read_body(receive: Receive) -> tuple[bytes, bool]:
    """The body, and whether it came whole."""
    body: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(body), False
        body.append(message["body"])
        if not message["more_body"]:
            return b"".join(body), True


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the request's body back."""
    body, whole = await read_body(receive)
    if whole:
        await answer(body)(scope, receive, send)
