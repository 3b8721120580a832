"""What all connections of one uvicorn server share."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jumpstart_server.access import AccessLog
from jumpstart_server.asgi.deadlines import Deadlines
from jumpstart_server.asgi.gate import Cap, Gate
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.envelope.cpu import Sampler
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.http1 import DefaultFields, RequestHead
from jumpstart_server.refusals import Refusals
from jumpstart_warmup.observe import Observer

if TYPE_CHECKING:
    from jumpstart_server.asgi.exchange import Exchange


class Service:
    """
    The app, the settings and the fields of every response. One per server, made in its loop with the first connection.

    Attributes:
        told_keep_alive_s: what clients are told about it, in whole seconds; 0 says nothing.
        access: where requests are logged, if they are.
        observer: keeps the books of them.
        upgraded: how many connections have become WebSockets.
        patience_s: how much longer than a moment idle connections are kept when the server drains.
        is_lame: the server will drain soon: every response ends its connection.
        spares_streams: the server drains, and streams may end by themselves.
        ends_streams: apps that stream are told that nobody waits for them.
        refusals: where those are that come to nothing.
        limits: of a request.
        timeout, longest, first_byte_timeout, idle_timeout: of *limits*, as each request wants them: infinity for no
            *timeout*; *longest* is what it may be extended to.
        sampler: says whose CPU time is measured.
        may_sever: a client that has left ends its handler whatever the method.
        gate: lets requests start, or wait.
        deadlines: stops them.
        websocket: the protocol class of connections that are upgraded; None refuses them. With *access* it is one of
            `websocket.logged`.
    """

    def __init__(self, config: Any, server_state: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            config: uvicorn's, loaded; its attribute ``jumpstart`` holds the `ConnectionSettings`, the defaults if not,
                ``jumpstart_access`` the `AccessLog`, ``jumpstart_observer`` the `Observer`, ``jumpstart_cap`` the
                `Cap`, ``jumpstart_limits`` the `RequestLimits`, ``jumpstart_threads`` the `Threads` and
                ``jumpstart_renew`` what `Deadlines` calls, if there are such.
            server_state: uvicorn's.
        """
        self.app = config.loaded_app
        self.settings: ConnectionSettings = getattr(config, "jumpstart", None) or ConnectionSettings()
        self.told_keep_alive_s = int(self.settings.keep_alive)
        self.upgraded = 0
        self.patience_s = 0.0
        self.spares_streams = False
        self.ends_streams = False
        self.is_lame: bool = getattr(config, "jumpstart_lame", False)
        self.root_path: str = config.root_path
        self.access: AccessLog | None = getattr(config, "jumpstart_access", None)
        self.observer: Observer | None = getattr(config, "jumpstart_observer", None)
        self.limits: RequestLimits = getattr(config, "jumpstart_limits", None) or RequestLimits()
        limits = self.limits
        self.timeout = limits.timeout or math.inf
        self.longest = self.timeout + limits.timeout_extension
        self.first_byte_timeout = limits.first_byte_timeout
        self.idle_timeout = limits.idle_timeout
        self.sampler = Sampler()
        self.may_sever = self.limits.on_deadline == "sever"
        self.websocket: Any = config.ws_protocol_class
        if self.access is not None and self.websocket is not None:
            from jumpstart_server.asgi.websocket import logged

            self.websocket = logged(self.websocket)
        self.refusals = Refusals(self.access, clock)
        cap: Cap = getattr(config, "jumpstart_cap", None) or Cap()
        self.gate = Gate(self.limits, cap, server_state.tasks, self.refusals)
        threads, renew = getattr(config, "jumpstart_threads", None), getattr(config, "jumpstart_renew", None)
        loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.limits, self.gate, threads, renew, server_state.connections, loop)
        self._state = server_state
        if threads is not None:
            threads.is_ours = self._is_ours
        self._source: list[tuple[bytes, bytes]] | None = None
        self._defaults = DefaultFields()

    def end_streams(self) -> None:
        """Tell apps that stream, now and from now on, that nobody waits for them."""
        self.ends_streams = True
        for connection in list(self._state.connections):
            exchange: Exchange | None = getattr(connection, "exchange", None)
            if exchange is not None:
                exchange.end_stream()

    def _is_ours(self, descriptor: int) -> bool:
        """Whether it is the socket of a client's connection."""
        for connection in self._state.connections:  # WebSockets, too
            sock = getattr(connection, "transport", None) and connection.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() == descriptor:
                return True
        return False

    def defaults(self) -> DefaultFields:
        """From uvicorn's default headers, a list that it makes anew each second."""
        source = self._state.default_headers
        if source is not self._source:
            known = dict(source)
            others = [field for field in source if field[0] not in (b"date", b"server")]
            self._defaults = DefaultFields(known.get(b"date", b""), known.get(b"server", b""), others)
            self._source = source
        return self._defaults


def describe(head: RequestHead) -> str:
    """Method and path for a log line, without the query, which may hold secrets."""
    return f"{head.method} {head.path.decode('ascii', 'replace')}"
