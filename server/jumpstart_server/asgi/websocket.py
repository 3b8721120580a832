"""
What is ours about WebSockets, which uvicorn's protocols speak: a peer that leaves is no error, and the access log.

A line is written when the connection ends. What the handshake came to is read off the bytes that go out, which all of
uvicorn's implementations agree on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from jumpstart_server.access import AccessLog, AccessRecord
from jumpstart_server.asgi.exchange import App, Message, Receive, Scope, Send
from jumpstart_server.http1 import RequestHead
from jumpstart_server.refusals import body_size, host_of
from jumpstart_warmup.observe import CLIENT_CLOSED

logger = logging.getLogger(__name__)

DEPARTURES = frozenset(("WebSocketDisconnect", "WebSocketDisconnected"))  # Starlette's; Falcon's, Litestar's


def without_departures(app: App) -> App:
    """*app* that returns when it raises what it was told: its peer has left, or the server stops. No error is that."""

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        is_over = False

        async def watched() -> Message:
            nonlocal is_over
            message = await receive()
            is_over = is_over or message["type"] == "websocket.disconnect"
            return message

        try:
            await app(scope, watched, send)
        except Exception as error:
            if not is_over or type(error).__name__ not in DEPARTURES:
                raise
            logger.debug("the peer left: WebSocket %s", scope.get("path"))

    return quiet


class _Watch:
    """A transport that counts what is written to it and remembers the status line."""

    __slots__ = ("_transport", "sent", "status")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.status = 0
        self.sent = 0  # bytes after the head

    def write(self, data: bytes) -> None:
        if self.status or not data:
            self.sent += len(data)
        else:
            self.status = int(data[9:12])  # of "HTTP/1.1 101"
            self.sent = body_size(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def logged(kind: Any) -> Any:
    """
    *kind*, a WebSocket protocol class of uvicorn's, with a line for each connection.

    The status is 101, or the one that the handshake was refused with; 499 where the client did not wait for either.
    """

    class LoggedWebSocket(kind):  # type: ignore[misc]  # it is known at run time only
        def begin_line(self, access: AccessLog, head: RequestHead, client: object) -> None:
            """To be called before `connection_made`."""
            self._line = access, head, host_of(client), time.monotonic()

        def connection_made(self, transport: asyncio.Transport) -> None:
            self._watch = _Watch(transport)
            super().connection_made(self._watch)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            access, head, host, began = self._line
            seconds = time.monotonic() - began
            access.write(
                AccessRecord(
                    client=host,
                    method=head.method,
                    target=head.target,
                    http_version=head.http_version,
                    status=self._watch.status or CLIENT_CLOSED,
                    sent=self._watch.sent,
                    total_s=seconds,
                    app_s=seconds,
                    request_headers=head.headers,
                )
            )

    return LoggedWebSocket
