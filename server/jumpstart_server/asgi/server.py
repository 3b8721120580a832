"""
The ASGI engine: uvicorn's server with our HTTP protocol and our lifespan, which accepts when the worker is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn

from jumpstart.errors import AppShutdownError
from jumpstart.report import Stopwatch
from jumpstart.target import Interface
from jumpstart_server import forks
from jumpstart_server.access import AccessLog
from jumpstart_server.asgi.exchange import Exchange
from jumpstart_server.asgi.gate import Cap
from jumpstart_server.asgi.lifespan import Lifespan
from jumpstart_server.asgi.listeners import Listeners
from jumpstart_server.asgi.protocol import JumpstartProtocol
from jumpstart_server.asgi.proxied import ProxiedProtocol
from jumpstart_server.asgi.service import Service
from jumpstart_server.asgi.threads import Threads
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.engine import CANCEL_GRACE, BecomeReady, PoolStats
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.logs import keep_enabled
from jumpstart_server.settings import TenantSettings
from jumpstart_warmup.observe import Observer
from jumpstart_warmup.sampling import UnderWay

STREAM_NOTICE = 1.0  # seconds before graceful_timeout, or a tenth of that, when streams hear that it is nearly over
LIFESPAN_GRACE = 1.0  # seconds beyond graceful_timeout for the app's shut-down; what was learnt is to be told yet
LAST_WORDS = 0.2  # seconds before the end, for answers to requests that will not be served


def as_asgi3(app: Any, interface: Interface) -> Any:
    """An ASGI 3 app of one that speaks *interface*, ``asgi`` or ``asgi2``."""
    if interface == "asgi":
        return app
    from uvicorn.middleware.asgi2 import ASGI2Middleware

    return ASGI2Middleware(app)


class ASGIServer:
    """An `Engine` for ASGI 3 apps."""

    def __init__(
        self,
        app: Any,
        tenant: TenantSettings,
        listeners: list[socket.socket],
        *,
        observer: Observer | None = None,
        access: AccessLog | None = None,
        become_ready: BecomeReady,
        stopped_accepting: Callable[[], None],
        stopwatch: Stopwatch,
        renew: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            app: the user's own, as ASGI 3.
            listeners: bound, and listening when *become_ready* returns.
            observer: keeps the books of requests.
            access: where requests are logged, if they are.
            stopwatch: takes the time of the app's start-up.
            renew: is told why this process should be replaced.
        """
        self._listeners = listeners
        self._threads = Threads(tenant.first_threads, tenant.max_overruns, may_sever=tenant.on_deadline == "sever")
        self._lifespan = Lifespan(app, tenant.lifespan)
        self._cap = Cap()
        self._server = _WarmServer(
            _uvicorn_config(app, tenant, observer, access, self._cap, self._threads, renew),
            self._lifespan,
            become_ready,
            stopped_accepting,
            stopwatch,
        )

    @property
    def started(self) -> bool:
        return self._server.started

    async def serve(self) -> None:
        """As of `Engine`."""
        self._threads.install()
        forks.serve_here()
        _end_children_of(asyncio.get_running_loop())
        await self._server.serve(self._listeners)
        if self._lifespan.failure:
            raise AppShutdownError(f"the app's lifespan shut-down failed\n{self._lifespan.failure}")

    def lame_duck(self) -> None:
        """As of `Engine`."""
        self._server.lame_duck()

    def drain(self, patience_s: float = 0.0, *, is_stop: bool = True) -> None:
        """As of `Engine`."""
        service = self._server.service
        if service is not None:
            service.patience_s = patience_s
            service.spares_streams = not is_stop
            if is_stop:
                service.end_streams()
            else:
                limit = service.limits.graceful_timeout
                notice = min(max(STREAM_NOTICE, limit / 10), limit / 2)
                asyncio.get_running_loop().call_later(limit - notice, service.end_streams)
        self._server.drain()

    def stats(self) -> PoolStats:
        """As of `Engine`."""
        stats = self._threads.stats()
        service = self._server.service
        if service is None:
            return stats
        queue = service.gate.queue
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + queue.size,
            oldest_wait_s=max(stats.oldest_wait_s, queue.oldest_wait_s(time.monotonic())),
            overruns=service.deadlines.overruns,
            overloaded=queue.is_overloaded,
            waits=queue.waits.copy(),
            waits_sum_s=queue.waits_sum_s,
            refused=dict(service.refusals.counts),
        )

    def resize(self, threads: int) -> None:
        """As of `Engine`."""
        self._threads.resize(threads)

    def shed(self, most: int | None, reason: str = "") -> None:
        """As of `Engine`."""
        self._cap.most, self._cap.reason = most, reason

    def is_alive(self) -> bool:
        """As of `Engine`."""
        return True  # all of it is in the event loop

    def upgraded(self) -> int:
        """As of `Engine`."""
        return self._server.service.upgraded if self._server.service is not None else 0

    def in_flight(self) -> int:
        """As of `Engine`."""
        return len(self._server.server_state.tasks)

    def underway(self) -> list[UnderWay]:
        """As of `Engine`."""
        held: list[Exchange | None] = [
            getattr(each, "exchange", None) for each in self._server.server_state.connections
        ]
        found = [each.underway() for each in held if each is not None]
        return [each for each in found if each is not None]

    def has_room(self) -> bool:
        """As of `Engine`."""
        service, stats = self._server.service, self._threads.stats()
        return service is not None and service.gate.is_open and not stats.waiting and stats.busy < stats.limit


class _Config(uvicorn.Config):
    """uvicorn's, with what our HTTP protocol wants to know; it leaves the app as it is."""

    jumpstart: ConnectionSettings
    jumpstart_access: AccessLog | None
    jumpstart_cap: Cap
    jumpstart_limits: RequestLimits
    jumpstart_observer: Observer | None
    jumpstart_renew: Callable[[str], None] | None
    jumpstart_threads: Threads
    jumpstart_lame = False

    def load(self) -> None:
        """uvicorn's calls the app without arguments to see whether it is a factory. We know that it is none."""
        app, self.app = self.app, _nothing
        super().load()
        self.app = self.loaded_app = app


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """Stands for the app while uvicorn looks at it."""


def _uvicorn_config(
    app: Any,
    tenant: TenantSettings,
    observer: Observer | None,
    access: AccessLog | None,
    cap: Cap,
    threads: Threads,
    renew: Callable[[str], None] | None,
) -> _Config:
    config = _Config(
        app,
        interface="asgi3",
        loop="none",
        http=JumpstartProtocol if tenant.proxy_protocol == "off" else ProxiedProtocol,
        ws="auto",
        lifespan="off",  # ours takes its place
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=tenant.backlog,
        root_path=tenant.root_path,
        proxy_headers=False,  # our protocol reads them
        timeout_graceful_shutdown=max(1, round(tenant.graceful_timeout)),
        ssl_certfile=tenant.ssl_certfile or None,
        ssl_keyfile=tenant.ssl_keyfile or None,
    )
    config.jumpstart = ConnectionSettings.of(tenant)
    config.jumpstart_access = access
    config.jumpstart_cap = cap
    config.jumpstart_limits = RequestLimits.of(tenant)
    config.jumpstart_observer = observer
    config.jumpstart_renew = renew
    config.jumpstart_threads = threads
    return config


def _end_children_of(loop: asyncio.AbstractEventLoop) -> None:
    """Have a child that an app forks end when it comes to *loop*, which is its parent's."""
    kept = weakref.ref(loop)

    def end_soon() -> None:
        loop = kept()
        if loop is not None and not loop.is_closed():
            loop.call_soon(forks.end_child)

    os.register_at_fork(after_in_child=end_soon)


class _WarmServer(uvicorn.Server):
    """
    uvicorn's server, which accepts by itself when the worker is ready, and leaves signals to the worker.

    Attributes:
        service: what the connections share; None until it accepts.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        lifespan: Lifespan,
        become_ready: BecomeReady,
        stopped_accepting: Callable[[], None],
        stopwatch: Stopwatch,
    ) -> None:
        super().__init__(config)
        self._own_lifespan = lifespan
        self._become_ready = become_ready
        self._stopped_accepting = stopped_accepting
        self._stopwatch = stopwatch
        self._drain_asked = asyncio.Event()
        self._listeners: Listeners | None = None
        self.service: Service | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def lame_duck(self) -> None:
        config: Any = self.config
        config.jumpstart_lame = True
        if self.service is not None:
            self.service.is_lame = True

    def drain(self) -> None:
        self.should_exit = True
        self._drain_asked.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """
        Start the app, make it warm, and listen, unless a drain is asked first.

        Raises:
            AppLoadError: the app's lifespan start-up failed.
        """
        lifespan: Any = self._own_lifespan
        self.lifespan = lifespan
        booting = asyncio.ensure_future(self._boot())
        draining = asyncio.ensure_future(self._drain_asked.wait())
        await asyncio.wait({booting, draining}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        if not booting.done():
            booting.cancel()
            await asyncio.wait({booting}, timeout=CANCEL_GRACE)
        elif not booting.cancelled():
            booting.result()
        if self.should_exit:
            await lifespan.shutdown()
            return
        state: Any = self.server_state
        self.service = state.jumpstart = Service(self.config, state)
        self._listeners = Listeners(
            sockets or (),
            self._protocol,
            self.service.refusals,
            backlog=self.config.backlog,
            tls=self.config.ssl,
            handshake_timeout_s=self.service.settings.header_timeout,
        )
        await self._listeners.start()
        self.servers = []
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if self._listeners is not None:
            await self._listeners.look()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait already, or closing the sockets would reset them; then drain."""
        assert self._listeners is not None and self.service is not None, "it has accepted"
        await self._listeners.stop()
        self._stopped_accepting()
        # What still waits for its turn when the time is over is told so; what runs is cancelled by uvicorn then.
        loop, limit = asyncio.get_running_loop(), self.service.limits.graceful_timeout
        self._own_lifespan.end_by = loop.time() + limit + LIFESPAN_GRACE
        last_words = loop.call_later(max(limit - LAST_WORDS, 0.0), self.service.gate.turn_all_away)
        try:
            await super().shutdown(sockets)
        finally:
            last_words.cancel()

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def _boot(self) -> None:
        with self._stopwatch.span("lifespan start-up"):
            await self._own_lifespan.startup()
        keep_enabled()  # start-up code configures logging as often as modules do
        await self._become_ready(self._own_lifespan.state)
