"""
The loop: one thread owns an epoll; it accepts, reads, parses, spools bodies and keeps the time.

A complete request goes to the pool. The thread that runs the handler writes to the socket itself and gives the connection
back by changing its owner: sockets are registered once, edge-triggered, so that neither side makes a system call for that.
A request on a kept connection costs one recv, one hand-over to a thread and one send.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from jumpstart_server.http1 import (
    BodyData,
    DefaultFields,
    Event,
    HeaderMap,
    Limits,
    ParseError,
    RequestEnd,
    RequestHead,
    RequestParser,
    error_response,
    http_date,
)
from jumpstart_server.pool import ThreadPool
from jumpstart_server.wsgi.connection import CLOSED, LINGERING, READING, RUNNING, Connection

logger = logging.getLogger(__name__)

READ_BYTES = 64 * 1024  # of one recv
SPOOL_BYTES = 512 * 1024  # of a body in memory; the rest goes to a temporary file
LINGER_TIME = 2.0  # seconds that an answer to a request we did not read has to arrive before the socket is closed
LINGER_BYTES = 256 * 1024  # read and dropped meanwhile
TICK = 0.25  # seconds between looks at the deadlines
ACCEPT_BURST = 64  # connections accepted before others have their turn
ACCEPT_PAUSE = 0.5  # seconds without accepting when descriptors have run out
BASE_EVENTS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET


@dataclass(frozen=True)
class EngineSettings:
    """
    What the engine needs to know; times in seconds, 0 is no limit.

    Attributes:
        header_timeout: from the first byte of a request (or the connection's begin) to the end of its head.
        body_timeout: between two pieces of a body.
        write_timeout: until the client takes any byte of a response that waits.
        keep_alive: of an idle connection between requests.
    """

    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    keep_alive: float = 75.0
    limits: Limits = field(default_factory=Limits)
    header_map: HeaderMap = "drop"
    root_path: str = ""
    multiprocess: bool = False
    server_header: bool = False


Handle = Callable[["WSGIEngine", Connection, RequestHead], None]


class WSGIEngine:
    """
    Serves connections of *listeners* with *handle*, which runs on *pool* and must end by `hand_back` or `close`.

    `start`, `drain` and `stop` may be called from any thread, once each.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        pool: ThreadPool,
        handle: Handle,
        bases: Sequence[dict[str, Any]],
        settings: EngineSettings,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            bases: for each listener what all environments of its connections have in common.
        """
        self.settings = settings
        self.draining = False
        self.connections: dict[int, Connection] = {}
        self._listeners = dict(zip((sock.fileno() for sock in listeners), zip(listeners, bases)))
        self._pool = pool
        self._handle = handle
        self._tls = tls
        self._clock = clock
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="jumpstart-http", daemon=True)
        self._stopped = False
        self._resume_accepting: float | None = None
        self.defaults = DefaultFields(b"")
        self._dated = 0
        self._set_date()
        self._drained: Callable[[], None] | None = None

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def drain(self, done: Callable[[], None]) -> None:
        """Accept no more, close idle connections, finish what runs; then call *done* in the loop's thread."""

        def begin() -> None:
            self.draining = True
            self._drained = done
            for number, (listener, base) in self._listeners.items():
                self._accept(listener, base)  # what is in the backlog would be reset otherwise
                self._epoll.unregister(number)
            self._listeners.clear()
            for connection in list(self.connections.values()):
                if connection.served:
                    self._close_idle(connection)

        self._post(begin)

    def stop(self) -> None:
        """Close everything that the loop owns, and end the loop."""
        self._post(self._end)
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _end(self) -> None:
        self._stopped = True

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # it is awake already

    # ------------------------------------------------------------------ from the handler's thread, which owns the connection

    def hand_back(self, connection: Connection) -> None:
        """The response is written and the connection stays: wait for the next request."""
        events = connection.parser.resume()
        if events:
            self._pipelined(connection, events)
            return
        connection.deadline = self._clock() + self.settings.keep_alive if self.settings.keep_alive else float("inf")
        connection.owner = READING
        # From here on the loop may close it at any moment.
        if connection.readable:  # bytes came while the handler ran; their edge is spent
            self._post(lambda: self._read(connection))
        elif self.draining:
            self._post(lambda: self._close_idle(connection))

    def _close_idle(self, connection: Connection) -> None:
        if connection.owner == READING and connection.parser.is_idle:
            self._close(connection)

    def _pipelined(self, connection: Connection, events: list[Event]) -> None:
        """The next request came with the last one. To the back of the queue with it: others wait too."""
        if isinstance(events[-1], RequestEnd) and len(events) == 2 and isinstance(events[0], RequestHead):
            connection.head = events[0]
            self._dispatch(connection)
        else:
            connection.owner = READING
            self._post(lambda: self._events(connection, events))

    def close(self, connection: Connection) -> None:
        """Close a connection that the caller owns."""
        self._close(connection)

    def linger(self, connection: Connection) -> None:
        """The answer is sent but the request was not read to its end: closing now might destroy the answer on its way."""
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(connection)
            return
        connection.deadline = self._clock() + LINGER_TIME
        connection.received = 0
        connection.owner = LINGERING
        self._post(lambda: self._drop(connection))

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        epoll = self._epoll
        epoll.register(self._wake_read, select.EPOLLIN)
        for number in self._listeners:
            epoll.register(number, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        next_tick = self._clock() + TICK
        connections = self.connections
        try:
            while not self._stopped:
                for number, mask in epoll.poll(TICK):
                    connection = connections.get(number)
                    if connection is not None:
                        try:
                            self._ready(connection, mask)
                        except Exception:
                            logger.exception("internal error on a connection; it is closed")
                            if connection.owner != RUNNING:
                                self._close(connection)
                    elif number == self._wake_read:
                        self._run_inbox()
                    elif number in self._listeners:
                        self._accept(*self._listeners[number])
                now = self._clock()
                if now >= next_tick:
                    next_tick = now + TICK
                    self._tick(now)
                if self._drained is not None and not connections:
                    done, self._drained = self._drained, None
                    done()
        except Exception:
            logger.critical("the HTTP loop ended by an internal error", exc_info=True)
        finally:
            for connection in list(connections.values()):
                if connection.owner != RUNNING:
                    self._close(connection)
            epoll.close()
            os.close(self._wake_read)

    def _run_inbox(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass
        while self._inbox:
            self._inbox.popleft()()

    def _accept(self, listener: socket.socket, base: dict[str, Any]) -> None:
        for _ in range(ACCEPT_BURST):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    logger.error("cannot accept: %s; trying again in %.1f s", error.strerror, ACCEPT_PAUSE)
                    self._epoll.unregister(listener.fileno())
                    self._resume_accepting = self._clock() + ACCEPT_PAUSE
                    return
                continue  # this client is gone again
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            settings = self.settings
            deadline = self._clock() + (settings.header_timeout or float("inf"))
            parser = RequestParser(settings.limits, settings.header_map)
            connection = Connection(sock, peer, base, parser, deadline)
            self.connections[connection.fd] = connection
            self._epoll.register(connection.fd, BASE_EVENTS)  # says at once what has come already

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            connection.gone = True
        owner = connection.owner
        if owner == READING:
            self._read(connection)
        elif owner == RUNNING:
            connection.readable = True
            if connection.owner == READING:  # it was handed back between the two lines above
                self._read(connection)
        else:
            self._drop(connection)

    def _read(self, connection: Connection) -> None:
        if connection.owner != READING:
            return
        connection.readable = False
        if connection.handshaking and not self._handshake(connection):
            return
        while connection.owner == READING:
            try:
                data = connection.sock.recv(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                self._close(connection)
                return
            if not data:
                self._events(connection, connection.parser.eof())
                if connection.owner == READING:
                    self._close(connection)
                return
            if connection.parser.is_idle:
                # The head has its time from its first byte; absolute, so that a byte now and then does not prolong it.
                connection.deadline = self._clock() + (self.settings.header_timeout or float("inf"))
            events = connection.parser.feed(data)
            if events:
                self._events(connection, events)
            if len(data) < READ_BYTES and not connection.gone and not connection.secure:
                return  # the socket is empty, and its next byte is a new edge

    def _handshake(self, connection: Connection) -> bool:
        assert isinstance(connection.sock, ssl.SSLSocket)
        try:
            connection.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            self._close(connection)
            return False
        connection.handshaking = False
        return True

    def _events(self, connection: Connection, events: list[Event]) -> None:
        """Act on what the parser found; the loop owns the connection."""
        for event in events:
            kind = type(event)
            if kind is RequestHead:
                assert isinstance(event, RequestHead)
                connection.head = event
                if event.has_body:
                    connection.body = tempfile.SpooledTemporaryFile(SPOOL_BYTES)
                    connection.body_bytes = 0
                    connection.deadline = self._clock() + (self.settings.body_timeout or float("inf"))
                    if event.expects_continue:
                        self._send_now(connection, b"HTTP/1.1 100 Continue\r\n\r\n")
            elif kind is BodyData:
                assert isinstance(event, BodyData) and connection.body is not None
                connection.body.write(event.data)
                connection.body_bytes += len(event.data)
                connection.deadline = self._clock() + (self.settings.body_timeout or float("inf"))
            elif kind is RequestEnd:
                self._dispatch(connection)
            else:
                assert isinstance(event, ParseError)
                self._refuse(connection, event)

    def _dispatch(self, connection: Connection) -> None:
        head = connection.head
        assert head is not None
        connection.owner = RUNNING
        connection.served += 1
        connection.head = None
        connection.received = self._clock()
        self._pool.submit(lambda: self._handle(self, connection, head))

    def _refuse(self, connection: Connection, error: ParseError) -> None:
        logger.info("%s from %s", error.detail, connection.peer)
        self._answer_and_linger(connection, error.status, error.reason)

    def _answer_and_linger(self, connection: Connection, status: int, reason: str) -> None:
        connection.drop_body()
        self._send_now(connection, error_response(status, reason))
        self.linger(connection)

    def _send_now(self, connection: Connection, data: bytes) -> None:
        """Send a few bytes from the loop; a client that cannot take them at once does without."""
        try:
            connection.sock.send(data)
        except OSError:
            pass

    def _drop(self, connection: Connection) -> None:
        """Read and forget, up to a limit, until the client has read our answer and closed."""
        while connection.owner == LINGERING:
            try:
                data = connection.sock.recv(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                data = b""
            connection.received += len(data)
            if not data or connection.received > LINGER_BYTES:
                self._close(connection)

    def _tick(self, now: float) -> None:
        """Close what has had its time."""
        self._set_date()
        if self._resume_accepting is not None and now >= self._resume_accepting:
            self._resume_accepting = None
            for number in self._listeners:
                self._epoll.register(number, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        for connection in list(self.connections.values()):
            if connection.deadline > now or connection.owner == RUNNING:
                continue
            if connection.owner == READING and not connection.parser.is_idle and not connection.handshaking:
                self._answer_and_linger(connection, 408, "the request did not arrive in time")
            else:
                self._close(connection)

    def _set_date(self) -> None:
        now = int(datetime.now(UTC).timestamp())
        if now != self._dated:
            self._dated = now
            server = b"jumpstart" if self.settings.server_header else b""
            self.defaults = DefaultFields(http_date(now), server)

    def _close(self, connection: Connection) -> None:
        """Close; the caller owns the connection. It leaves the table first: the number may be given away at once."""
        if connection.owner == CLOSED:
            return
        connection.owner = CLOSED
        self.connections.pop(connection.fd, None)
        connection.drop_body()
        try:
            connection.sock.close()
        except OSError:
            pass
        if self._drained is not None:
            self._post(lambda: None)  # the loop looks whether this was the last
