"""
A fixed number of connections, each with one request under way at any time.

The answers are compared with the first one's length and end, which is cheap; what differs goes through the parser.
"""

from __future__ import annotations

import gc
import itertools
import select
import socket
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.response import BadResponse, ResponseReader

OK = b"HTTP/1.1 200"
CONNECT_TIMEOUT = 3  # seconds; loopback takes microseconds unless the server has stopped accepting


@dataclass
class Tally:
    """What happened; `latencies` are of the answers with status 200, in seconds."""

    latencies: array[float] = field(default_factory=lambda: array("d"))
    within: int = 0  # of these, how many came before the time was up
    bad_status: int = 0
    broken: int = 0  # closed or malformed in the middle of an answer, or before the first of a connection
    refused: int = 0  # connections that could not be made
    reconnected: int = 0  # the server closed a connection between two requests, as it may
    unanswered: int = 0

    def failures(self) -> int:
        return self.bad_status + self.broken + self.refused + self.unanswered


class Connection:
    """One connection; `socket` is None while there is none."""

    __slots__ = ("answered", "reader", "sent_at", "socket")

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.reader: ResponseReader | None = None
        self.sent_at = 0.0
        self.answered = 0


def heads(port: int, path: str, *, vary: bool) -> Callable[[], bytes]:
    """What gives the next request. With *vary*, no two are the same."""
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode()
    if not vary:
        same = head + b"\r\n"
        return lambda: same
    start = head + b"X-Request-Id: "
    count = itertools.count(time.monotonic_ns())  # no other process has these
    return lambda: start + b"%016x\r\n\r\n" % next(count)


class ClosedLoop:
    """Runs the load once: `run`."""

    def __init__(self, port: int, path: str = "/", connections: int = 64, *, vary: bool = False) -> None:
        self._address = ("127.0.0.1", port)
        self._next = heads(port, path, vary=vary)
        self._connections = [Connection() for _ in range(connections)]
        self._by_fd: dict[int, Connection] = {}
        self._epoll = select.epoll()
        self._length = 0  # of the usual answer
        self._end = b""  # its last bytes
        self.tally = Tally()

    def run(self, seconds: float, drain_s: float = 10.0) -> float:
        """Load for *seconds*, then wait up to *drain_s* for what is under way. Gives the seconds that it loaded."""
        for connection in self._connections:
            self._connect(connection)
        started = time.monotonic()
        end = started + seconds
        for connection in list(self._by_fd.values()):
            self._send(connection)
        self._pump(end, more=True)
        loaded = time.monotonic() - started
        self.tally.within = len(self.tally.latencies)
        self._pump(time.monotonic() + drain_s, more=False)
        self.tally.unanswered += sum(bool(connection.sent_at) for connection in self._by_fd.values())
        for connection in list(self._by_fd.values()):
            self._drop(connection)
        self._epoll.close()
        return loaded

    def _pump(self, end: float, *, more: bool) -> None:
        """Handle answers until *end*; with *more*, send the next request after each, else end when all have come."""
        clock, poll, by_fd = time.monotonic, self._epoll.poll, self._by_fd
        latencies, following = self.tally.latencies, self._next
        while (left := end - clock()) > 0:
            if not more and not any(connection.sent_at for connection in by_fd.values()):
                return
            if not by_fd:
                time.sleep(min(left, 0.01))
            if more and len(by_fd) < len(self._connections):
                self._connect_again()
            for fd, _ in poll(min(left, 0.2)):
                connection = by_fd[fd]
                assert connection.socket is not None
                try:
                    data = connection.socket.recv(65536)
                except BlockingIOError:
                    continue
                except OSError:
                    self._lost(connection)
                    continue
                usual = (
                    len(data) == self._length
                    and connection.reader is None
                    and data.startswith(OK)
                    and data.endswith(self._end)
                )
                if not usual and not self._read(connection, data):
                    continue
                now = clock()
                latencies.append(now - connection.sent_at)
                connection.answered += 1
                if more:
                    connection.sent_at = now
                    try:
                        connection.socket.send(following())
                    except OSError:
                        self._lost(connection)
                else:
                    connection.sent_at = 0.0

    def _read(self, connection: Connection, data: bytes) -> bool:
        """Whether *data* completes an answer that counts, on a connection that goes on."""
        if not data:
            self._lost(connection)
            return False
        if not connection.sent_at:  # bytes that nobody asked for
            self.tally.broken += 1
            self._drop(connection)
            return False
        whole = connection.reader is None
        reader = connection.reader or ResponseReader()
        connection.reader = reader
        try:
            reader.feed(data)
        except BadResponse:
            self.tally.broken += 1
            self._drop(connection)
            return False
        if not reader.complete:
            return False
        connection.reader = None
        if reader.status != 200:
            self.tally.bad_status += 1
            self._drop(connection)
            return False
        if reader.close:
            self.tally.latencies.append(time.monotonic() - connection.sent_at)
            self.tally.reconnected += 1
            self._drop(connection)
            return False
        if whole and not self._length:
            self._length, self._end = len(data), data[-12:]
        return True

    def _lost(self, connection: Connection) -> None:
        """The server closed it. Between two requests it may; what was just sent is then sent again."""
        reader = connection.reader
        if reader is not None:
            reader.end()
        if reader is not None and reader.complete and reader.status == 200:
            self.tally.latencies.append(time.monotonic() - connection.sent_at)
        elif not connection.sent_at or (connection.answered and reader is None):
            self.tally.reconnected += 1
        else:
            self.tally.broken += 1
        self._drop(connection)

    def _connect(self, connection: Connection) -> None:
        try:
            connection.socket = socket.create_connection(self._address, CONNECT_TIMEOUT)
        except OSError:
            self.tally.refused += 1
            return
        connection.socket.setblocking(False)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.answered = 0
        self._by_fd[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN)

    def _connect_again(self) -> None:
        for connection in self._connections:
            if connection.socket is None:
                self._connect(connection)
                if connection.socket is None:
                    return  # it accepts nothing just now
                self._send(connection)

    def _send(self, connection: Connection) -> None:
        assert connection.socket is not None
        connection.sent_at = time.monotonic()
        try:
            connection.socket.send(self._next())
        except OSError:
            self._lost(connection)

    def _drop(self, connection: Connection) -> None:
        assert connection.socket is not None
        del self._by_fd[connection.socket.fileno()]
        connection.socket.close()  # which takes it out of the epoll
        connection.socket = connection.reader = None
        connection.sent_at = 0.0


def run(
    port: int, path: str = "/", connections: int = 64, seconds: float = 4.0, *, vary: bool = False
) -> dict[str, Any]:
    loop = ClosedLoop(port, path, connections, vary=vary)
    gc.disable()
    loaded = loop.run(seconds)
    tally = loop.tally
    return {
        "rate": tally.within / loaded,
        "latencies_us": [round(latency * 1e6) for latency in tally.latencies],
        "failures": tally.failures(),
        "bad_status": tally.bad_status,
        "broken": tally.broken,
        "refused": tally.refused,
        "unanswered": tally.unanswered,
        "reconnected": tally.reconnected,
    }
