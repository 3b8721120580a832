"""
The connections of a server: who owns which, how they come, wait, and go.

The lowest of the floors that a `WSGIServer` is built from, each a class that knows those below it: connections (here),
answers of our own (`answers.py`), handlers (`running.py`), reading (`reading.py`), and the server itself. They are one
object, since a request passes all of them twice and each step between objects would cost it something.
"""

from __future__ import annotations

import select
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.http1 import DefaultFields, State
from jumpstart_server.refusals import Refusals
from jumpstart_server.wsgi.body import Spools
from jumpstart_server.wsgi.connection import BODY, HEAD, IDLE, PREFACE, TRAILERS, UNREAD, Address, Connection
from jumpstart_server.wsgi.environ import Environ
from jumpstart_server.wsgi.exchange import Exchange, WSGIApp
from jumpstart_server.wsgi.files import FileWrapper
from jumpstart_server.wsgi.pool import ThreadPool
from jumpstart_server.wsgi.timers import NEVER, Timers
from jumpstart_warmup.observe import Observer

READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
SECOND_LOOK = 0.1  # seconds that an idle connection has left when the server drains
LAST_LOOK = 1.0  # seconds for a request that came as its connection was to be closed


@dataclass(frozen=True)
class Setup:
    """What a server is made from; `WSGIServer` says what each is."""

    app: WSGIApp
    settings: ConnectionSettings
    observer: Observer
    limits: RequestLimits
    script_name: str
    multiprocess: bool
    stream_bodies: bool
    tls: ssl.SSLContext | None
    access: AccessLog | None


class Connections:
    """
    All connections of one server.

    Attributes:
        settings: limits and times of connections.
        pool: the threads; the server's to make.
        script_name: the path prefix that a proxy strips.
        keeps_connections: false while it drains or soon will, or where keep-alive is off.
        told_keep_alive_s: what clients are told about it, in whole seconds; 0 says nothing.
        default_fields: what each response says besides, Date above all; another object each second.
        refusals: where clients that got no service are logged.
        steps: requests and chunks of streams so far; about.
    """

    pool: ThreadPool

    def __init__(self, setup: Setup) -> None:
        settings = setup.settings
        self.settings = settings
        self.script_name = setup.script_name
        self.keeps_connections = settings.keep_alive > 0
        self.told_keep_alive_s = int(settings.keep_alive)
        self.default_fields = DefaultFields()
        self.refusals = Refusals(setup.access)
        self.steps = 0
        self.spools = Spools()
        self._multiprocess = setup.multiprocess
        self._tls = setup.tls
        self._clock = time.monotonic
        self._epoll = select.epoll()
        self._idle: dict[int, Connection] = {}  # that nobody owns
        self._all: dict[int, Connection] = {}
        self._timers = Timers()
        self._draining = False
        self._patience = SECOND_LOOK
        self._when_empty: Callable[[], None] | None = None
        self._overrunning: set[Connection] = set()  # whose handlers do not end, and whose clients know

    def base_environ(self, connection: Connection) -> Environ:
        """What all requests of a connection have in common."""
        peer = connection.peer
        server = connection.local or connection.sock.getsockname()
        if isinstance(server, tuple):
            name, server_port = str(server[0]), str(server[1])
        else:  # over a Unix socket there is no address, and apps index it all the same
            name, server_port = "localhost", "80"
        return {
            "SCRIPT_NAME": self.script_name,
            "SERVER_NAME": name,
            "SERVER_PORT": server_port,
            "REMOTE_ADDR": "" if peer is None else peer[0],
            "REMOTE_PORT": "" if peer is None else str(peer[1]),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "https" if connection.is_tls else "http",
            "wsgi.input_terminated": True,
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": self._multiprocess,
            "wsgi.run_once": False,
            "wsgi.file_wrapper": FileWrapper,
        }

    # ------------------------------------------------------------------ open, own, close

    def _open(self, sock: socket.socket, peer: Address | None) -> None:
        """Take a new connection into the tables."""
        settings = self.settings
        now = self._clock()
        sock.setblocking(False)
        if peer is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        has_header = settings.proxy_protocol != "off"
        if has_header:
            senders = settings.proxy_senders
            if senders is None or not senders.trusts(None if peer is None else peer[0]):
                self.refusals.note(peer, "the peer may not speak the PROXY protocol (--proxy-allow-from)")
                sock.close()
                return
        if self._tls is not None:
            sock.getpeername()  # raises where the client has left; wrap_socket would raise too, and leave it open
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection = Connection(self, sock, peer, now, tls=self._tls is not None)
        if has_header or connection.is_tls:
            connection.phase = PREFACE
        # It is ours until it is put back: an event of one that had its descriptor before may come at any time.
        self._all[connection.fd] = connection
        self._timers.watch(connection, now)
        try:
            self._epoll.register(connection.fd, READ)
        except OSError:
            self._close(connection)
            raise
        self._return(connection)

    def _own(self, connection: Connection) -> bool:
        """Become the owner of a connection, if nobody is and it is not closed."""
        found = self._idle.pop(connection.fd, None)
        if found is connection:
            return True
        if found is not None:  # it was closed meanwhile, and this one has its descriptor now
            self._return(found)
        return False

    def _put_back(self, connection: Connection) -> bool:
        """Give up a connection, unless something has come for it meanwhile: then it is still the caller's, and True."""
        self._idle[connection.fd] = connection
        return connection.readable and self._own(connection)

    def _return(self, connection: Connection) -> None:
        """Give up a connection without a look at what has come for it."""
        if self._put_back(connection):
            self._post(connection)

    def _post(self, connection: Connection) -> None:
        """Give up a connection, and have a thread look at it when it comes to its turn."""
        connection.readable = False
        self._idle[connection.fd] = connection
        self.pool.post(connection.fd, select.EPOLLIN)

    def _close(self, connection: Connection) -> None:
        self._all.pop(connection.fd, None)
        connection.close()
        self._timers.forget(connection)
        if self._overrunning:
            self._overrunning.discard(connection)
        if self._draining:
            self._tell_if_empty()

    # ------------------------------------------------------------------ until when they may wait

    def _await_more(self, connection: Connection) -> None:
        """A request has not come whole."""
        now = self._clock()
        if connection.parser.state is State.TRAILERS:
            # They have the time of a head, and a byte now and then does not prolong it.
            if connection.phase == BODY or connection.deadline == NEVER:
                connection.deadline = now + (self.settings.header_timeout or NEVER)
            if connection.phase == BODY:
                connection.phase = TRAILERS
        elif connection.phase in (BODY, UNREAD):
            connection.deadline = now + (self.settings.body_timeout or NEVER)
        elif connection.parser.is_idle:
            return
        elif connection.phase != HEAD:
            connection.phase = HEAD
            connection.began = now
            if not connection.fresh or self._draining:  # then it had been given a moment only
                connection.deadline = now + (self.settings.header_timeout or NEVER)
        self._watch(connection, now)

    def _watch(self, connection: Connection, now: float) -> None:
        if connection.deadline < connection.look_at or not connection.look_at:
            self._timers.watch(connection, now)

    def _hurry(self, now: float) -> None:
        """Give connections without a request a moment for one that is on its way."""
        for connection in list(self._idle.values()):
            phase = connection.phase
            if phase != IDLE and phase != PREFACE:
                continue
            deadline = now + (self._patience if phase == IDLE else LAST_LOOK)
            if connection.deadline > deadline and self._own(connection):
                if connection.phase == phase:
                    connection.deadline = min(connection.deadline, deadline)
                    self._timers.watch(connection, now)
                self._return(connection)

    # ------------------------------------------------------------------ the last one

    def when_empty(self, callback: Callable[[], None]) -> None:
        """Have *callback* called, from any thread, when the last connection is closed; after `stop_accepting`."""
        self._when_empty = callback
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if self._draining and self._when_empty is not None and len(self._all) == len(self._overrunning):
            self._when_empty()

    def _overrun(self, exchange: Exchange) -> None:
        """A handler runs on, and nobody waits for it any more, nor shall the end of the server."""
        self._overrunning.add(exchange.connection)
        if exchange.is_over:
            self._overrunning.discard(exchange.connection)  # it was closed meanwhile
        self._tell_if_empty()
