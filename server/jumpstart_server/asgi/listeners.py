"""
The listening sockets: who accepts, how many at once, and what happens when there are no descriptors left.

The loop's own server, in C, takes half the time for a connection. But where there is no descriptor for one, it resets
the connection and says nothing; and a TLS handshake that fails there is nobody's. So it accepts as long as there are
descriptors to spare (`MARGIN`), and no TLS; else we do it here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterable

from jumpstart_server.connection_settings import ACCEPT_PAUSE, ACCEPTS, COMPLAINT_PAUSE, NO_DESCRIPTORS
from jumpstart_server.refusals import Refusals

logger = logging.getLogger(__name__)

MARGIN = 64  # free descriptors that there are to be for the loop's own server; at most a quarter of all
LOOK_EACH = 8  # of its connections
FOR_EVER = 365 * 86_400.0  # seconds, where None would be a default


class Listeners:
    """Sockets that listen, in the running event loop, which alone may call the methods."""

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        protocol: Callable[[], asyncio.Protocol],
        refusals: Refusals,
        *,
        backlog: int,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 0.0,
    ) -> None:
        """
        Args:
            protocol: makes the protocol of a connection.
            backlog: the sockets', which the loop's own server sets again.
            tls: for connections that begin with a handshake, which may take *handshake_timeout_s*; 0 is for ever.
        """
        self._sockets = list(sockets)
        self._protocol = protocol
        self._refusals = refusals
        self._backlog = backlog
        self._tls = tls
        self._handshake_timeout_s = (handshake_timeout_s or FOR_EVER) if tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []  # the loop's own, while they accept
        self._accepted = 0  # by them
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._failures = 0  # to accept, since the last line about them
        self._complained_at = -COMPLAINT_PAUSE

    async def start(self) -> None:
        """Accept."""
        for sock in self._sockets:
            sock.setblocking(False)
        if self._tls is not None or not self._has_descriptors(1):
            self._start_reading()
            return
        for sock in self._sockets:  # of a copy, since a server closes its own
            server = await self._loop.create_server(self._counted, sock=sock.dup(), backlog=self._backlog)
            self._servers.append(server)

    async def look(self) -> None:
        """To be called often: let the loop's own server accept, or not."""
        if self._servers:
            if not self._has_descriptors(1):
                self._accept_ourselves()
        elif self._tls is None and self._pause is None and self._has_descriptors(2):
            self._stop_reading()
            await self.start()

    async def stop(self) -> None:
        """Take the connections that wait already, then no more; the sockets are still to be closed."""
        self._close_servers()
        self._stop_reading()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for sock in self._sockets:
            while self._accept(sock):
                pass
        self._stop_reading()
        if self._pause is not None:
            self._pause.cancel()
        if self._opening:
            _, late = await asyncio.wait(self._opening, timeout=1.0 if self._tls is None else self._handshake_timeout_s)
            for task in late:
                task.cancel()

    def _counted(self) -> asyncio.Protocol:
        self._accepted += 1
        if self._accepted % LOOK_EACH == 0 and not self._has_descriptors(1):
            self._loop.call_soon(self._accept_ourselves)
        return self._protocol()

    def _has_descriptors(self, margins: int) -> bool:
        """Whether so many times `MARGIN` are free. New ones have the lowest free number, so one tells."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return True
        try:
            lowest = os.dup(self._sockets[0].fileno())
        except OSError:
            return False
        os.close(lowest)
        return lowest < limit - margins * min(MARGIN, limit // 4)

    def _accept_ourselves(self) -> None:
        if self._servers:
            self._close_servers()
            self._start_reading()

    def _close_servers(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _start_reading(self) -> None:
        self._pause = None
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _stop_reading(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())

    def _accept(self, sock: socket.socket) -> bool:
        """Accept some of the connections that wait; whether there may be more."""
        for _ in range(ACCEPTS):
            try:
                accepted, peer = sock.accept()
            except (InterruptedError, ConnectionAbortedError):
                continue
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    self._rest(error)
                return False
            task = self._loop.create_task(self._open(accepted, peer))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, sock: socket.socket, peer: object) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:  # TLS's are of this kind
            sock.close()
            client = peer if isinstance(peer, tuple) else None
            if isinstance(error, ssl.SSLError):  # HTTP_REQUEST, say: plain HTTP
                self._refusals.note(client, f"no TLS: {error.reason or error}")
                self._refusals.write_line(client, 400, b"")
            elif self._tls is not None and isinstance(error, ConnectionAbortedError):
                self._refusals.note(client, "408 the TLS handshake was not done in time")
                self._refusals.write_line(client, 408, b"", total_s=self._handshake_timeout_s or 0.0)
            else:
                logger.debug("a connection was lost as it was opened: %s", error)

    def _rest(self, error: OSError) -> None:
        """There are no descriptors, whichever listener asks."""
        self._failures += 1
        now = self._loop.time()
        if now - self._complained_at >= COMPLAINT_PAUSE:
            self._complained_at = now
            logger.error(
                "cannot accept connections: %s; trying again each %g s (failed %d times since the last such line)",
                *(error, ACCEPT_PAUSE, self._failures),
            )
            self._failures = 0
        self._stop_reading()
        if self._pause is None:
            self._pause = self._loop.call_later(ACCEPT_PAUSE, self._start_reading)
