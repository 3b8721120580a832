"""
A laboratory for the ASGI protocol: uvicorn's server with `JumpstartProtocol` in a thread, and a client of raw bytes.

    lab.app("/hello", hello)                        # what answers there
    with lab.connect() as client:
        client.send(b"GET /hello HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        assert client.response().status == 200
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvicorn
import uvloop

from jumpstart_server.access import AccessLog
from jumpstart_server.asgi import JumpstartProtocol, ProxiedProtocol
from jumpstart_server.asgi.service import Service
from jumpstart_server.asgi.threads import Threads
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_warmup.observe import Observer
from tests.server.lab import BaseLab, Described, Reply, Tell, Told, Words
from tests.server.raw_http import PATIENCE, Client, Response, until

__all__ = [
    "App",
    "Client",
    "Lab",
    "Receive",
    "Response",
    "Scope",
    "Send",
    "answer",
    "echo",
    "piece",
    "read_body",
    "start",
    "until",
]

T = TypeVar("T")
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """The message that begins an answer."""
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def piece(body: bytes = b"", more: bool = False) -> dict[str, Any]:
    """A message of a body, the last by default."""
    return {"type": "http.response.body", "body": body, "more_body": more}


class Lab(BaseLab):
    """One server; use it as a context manager."""

    def __init__(
        self,
        settings: ConnectionSettings | None = None,
        app: App | None = None,
        uds: Path | None = None,
        tls: tuple[Path, Path] | None = None,
        limits: RequestLimits | None = None,
        threads: Threads | None = None,
        observer: Observer | None = None,
        access: AccessLog | None = None,
        **config: Any,
    ) -> None:
        super().__init__(uds=uds, tls=tls)
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
        ours: Any = self.config
        ours.jumpstart = settings or ConnectionSettings()
        ours.jumpstart_limits, ours.jumpstart_threads = limits, threads
        ours.jumpstart_observer, ours.jumpstart_access = observer, access
        ours.jumpstart_renew = self._take_renewal
        self.renewals: list[str] = []  # why the server wants to be replaced
        self.threads = threads
        self.server = uvicorn.Server(self.config)
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="lab")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        if self.threads is not None:
            self.threads.install()
        await self.server.serve([self.listener])

    def _take_renewal(self, reason: str) -> None:
        self.renewals.append(reason)

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

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    @property
    def service(self) -> Service:
        """What its connections share; there once one of them was."""
        state: Any = self.server.server_state
        service: Service = state.jumpstart
        return service

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def tasks(self) -> int:
        return len(self.server.server_state.tasks)

    @property
    def busy(self) -> int:
        return self.tasks

    def adapt(self, described: Described) -> App:
        """As an ASGI app."""
        match described:
            case Words():
                return _words(described)
            case Tell():
                return _tell
            case _:
                return lambda scope, receive, send: _reply(described, receive, send)


async def _reply(reply: Reply, receive: Receive, send: Send) -> None:
    if reply.door is not None:
        reply.door.entered += 1
        while not reply.door.opened.is_set():  # noqa: ASYNC110  # a test's thread opens it
            await asyncio.sleep(0.002)
    if reply.pause:
        await asyncio.sleep(reply.pause)
    pieces = reply.pieces
    if reply.echo or reply.note is not None:
        body, whole = await read_body(receive)
        if reply.note is not None and whole:
            reply.note(body)
        pieces = (body,) if reply.echo else pieces
    if reply.fails and not pieces:
        raise ValueError("no more")
    fields = [(name.lower().encode(), value.encode()) for name, value in reply.fields]
    await send({"type": "http.response.start", "status": reply.status, "headers": fields})
    if len(pieces) == 1 and not reply.fails:
        await send({"type": "http.response.body", "body": pieces[0]})
        return
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if reply.fails:
        await asyncio.sleep(0.02)
        raise ValueError("no more")
    await send({"type": "http.response.body"})


def _words(words: Words) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * words.size, "more_body": True})
                await asyncio.sleep(words.pause)
        finally:
            words.closed.set()

    return app


async def _tell(scope: Scope, receive: Receive, send: Send) -> None:
    told = Told(
        host=dict(scope["headers"])[b"host"].decode(),
        path=scope["path"],
        query=scope["query_string"].decode(),
        scheme=scope["scheme"],
        client=scope["client"],
        server=scope["server"],
    )
    await answer(json.dumps(asdict(told)).encode())(scope, receive, send)


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
