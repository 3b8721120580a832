"""
Connections of the admin address: uvicorn's protocol with limits, since health checks come the same way.

Whoever can reach the address can open connections to it, and the event loop behind it is the one that keeps the
workers alive. Connections without a request count for nothing: the oldest of them gives way to a new one.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTIONS = 50  # at once
PATIENCE = 10.0  # seconds for the head of a request to come, and for a client to take what was sent


class AdminConnection(HttpToolsProtocol):
    """One connection; it is cut when a head, or the client's next read, takes longer than `PATIENCE`."""

    _timer: asyncio.TimerHandle | None = None
    _came_at = 0.0

    @property
    def is_idle(self) -> bool:
        """No request runs on it."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the new one."""
        super().connection_made(transport)
        self._came_at = self.loop.time()
        self._start_timer()
        if len(self.connections) <= CONNECTIONS:
            return
        idle = [each for each in self.connections if isinstance(each, AdminConnection) and each.is_idle]
        min(idle, key=lambda each: each._came_at).cut()  # this one at worst

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a head does not prolong its time."""
        if self.is_idle and self._timer is None:
            self._start_timer()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """A request has come."""
        self._stop_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client does not take what is sent."""
        super().pause_writing()
        self._start_timer()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._stop_timer()
        super().resume_writing()

    def cut(self) -> None:
        """End it now."""
        self._stop_timer()
        self.connections.discard(self)
        self.transport.abort()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(PATIENCE, self.cut)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
