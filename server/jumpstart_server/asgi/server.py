"""
The ASGI engine: uvicorn's server with our HTTP protocol and our lifespan, which accepts when the worker is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from jumpstart.errors import AppShutdownError
from jumpstart.report import Stopwatch
from jumpstart.target import Interface
from jumpstart_server.access import AccessLog
from jumpstart_server.asgi.lifespan import Lifespan
from jumpstart_server.asgi.protocol import JumpstartProtocol
from jumpstart_server.asgi.proxied import ProxiedProtocol
from jumpstart_server.asgi.threads import Threads
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.engine import CANCEL_GRACE, BecomeReady, PoolStats
from jumpstart_server.logs import keep_enabled
from jumpstart_server.settings import TenantSettings
from jumpstart_warmup.observe import Observer


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
    ) -> None:
        """
        Args:
            app: the user's own, as ASGI 3.
            listeners: bound, and listening when *become_ready* returns.
            observer: keeps the books of requests.
            access: where requests are logged, if they are.
            stopwatch: takes the time of the app's start-up.
        """
        self._listeners = listeners
        self._threads = Threads(tenant.threads)
        self._lifespan = Lifespan(app, tenant.lifespan)
        self._server = _WarmServer(
            _uvicorn_config(app, tenant, observer, access),
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
        await self._server.serve(self._listeners)
        if self._lifespan.failure:
            raise AppShutdownError(f"the app's lifespan shut-down failed\n{self._lifespan.failure}")

    def drain(self) -> None:
        """As of `Engine`."""
        self._server.drain()

    def stats(self) -> PoolStats:
        """As of `Engine`."""
        return self._threads.stats()


class _Config(uvicorn.Config):
    """uvicorn's, with what our HTTP protocol wants to know; it leaves the app as it is."""

    jumpstart: ConnectionSettings
    jumpstart_access: AccessLog | None
    jumpstart_observer: Observer | None

    def load(self) -> None:
        """uvicorn's calls the app without arguments to see whether it is a factory. We know that it is none."""
        app, self.app = self.app, _nothing
        super().load()
        self.app = self.loaded_app = app


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """Stands for the app while uvicorn looks at it."""


def _uvicorn_config(app: Any, tenant: TenantSettings, observer: Observer | None, access: AccessLog | None) -> _Config:
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
    config.jumpstart_observer = observer
    return config


class _WarmServer(uvicorn.Server):
    """uvicorn's server, which accepts when the worker is ready and leaves signals to the worker."""

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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

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
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait already, or closing the sockets would reset them; then drain."""
        for sock in sockets or ():
            for _ in range(self.config.backlog):
                try:
                    waiting, _ = sock.accept()
                except OSError:
                    break
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, waiting, ssl=self.config.ssl)
        for server in self.servers:
            server.close()
        self._stopped_accepting()
        await super().shutdown(sockets)

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
