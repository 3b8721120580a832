"""
uvicorn's WebSocket protocols with a line in the access log, written when the connection ends.

What the handshake came to is read off the bytes that go out, which all of uvicorn's implementations agree on.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from jumpstart_server.access import AccessLog, AccessRecord
from jumpstart_server.http1 import RequestHead
from jumpstart_server.refusals import body_size, host_of
from jumpstart_warmup.observe import CLIENT_CLOSED


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
