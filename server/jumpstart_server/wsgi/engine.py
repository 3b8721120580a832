"""The WSGI server as an `Engine`: what the worker's event loop sees of it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

from jumpstart.errors import ConfigError
from jumpstart_server import system
from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.engine import CANCEL_GRACE, BecomeReady, PoolStats
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.settings import TenantSettings
from jumpstart_server.tls import server_context
from jumpstart_server.wsgi.exchange import Exchange
from jumpstart_server.wsgi.server import WSGIServer
from jumpstart_warmup.observe import Observer
from jumpstart_warmup.sampling import UnderWay

KEEPER_PATIENCE = 5.0  # seconds that the pool's keeper may be late; it looks each few milliseconds
POOL_GRACE = 0.2  # seconds that handlers may take to end when their clients have been given up


class WSGIEngine:
    """An `Engine` for WSGI apps."""

    def __init__(
        self,
        app: Any,
        tenant: TenantSettings,
        listeners: list[socket.socket],
        *,
        observer: Observer,
        access: AccessLog | None = None,
        become_ready: BecomeReady,
        stopped_accepting: Callable[[], None],
        renew: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            app: the user's own, since the server itself keeps *observer*'s books.
            listeners: bound, and listening when *become_ready* returns.
            renew: is told why this process should be replaced.

        Raises:
            ConfigError: certificate or key cannot be used, or this is not Linux.
        """
        if sys.platform != "linux":
            raise ConfigError("WSGI apps are served on Linux only: the server is built on epoll")
        self.started = False
        self._tenant = tenant
        self._become_ready = become_ready
        self._stopped_accepting = stopped_accepting
        self._drain_asked = asyncio.Event()
        self._patience_s = 0.0
        self._ask_renewal = renew
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = WSGIServer(
            app,
            listeners,
            ConnectionSettings.of(tenant),
            threads=tenant.first_threads,
            observer=observer,
            script_name=tenant.root_path.encode().decode("latin-1"),
            multiprocess=tenant.workers > 1,
            stream_bodies=tenant.stream_bodies,
            tls=server_context(tenant.ssl_certfile, tenant.ssl_keyfile) if tenant.ssl_certfile else None,
            access=access,
            on_broken=system.end_at_once,
            limits=RequestLimits.of(tenant),
            renew=None if renew is None else self._renew,
        )

    async def serve(self) -> None:
        """As of `Engine`."""
        self._loop = asyncio.get_running_loop()
        booting = asyncio.ensure_future(self._become_ready({}))
        draining = asyncio.ensure_future(self._drain_asked.wait())
        await asyncio.wait({booting, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not booting.done():
            booting.cancel()
            await asyncio.wait({booting}, timeout=CANCEL_GRACE)
            draining.cancel()
            return
        try:
            booting.result()
            if self._drain_asked.is_set():
                return
            self._server.start()
            self.started = True
            await draining
            await self._drain()
        finally:
            draining.cancel()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        emptied = asyncio.Event()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(emptied.set)
            except RuntimeError:
                pass  # the loop is closed: it was not waited for

        self._server.stop_accepting(self._patience_s)
        self._stopped_accepting()
        self._server.when_empty(tell)
        try:
            await asyncio.wait_for(emptied.wait(), self._tenant.graceful_timeout)
        except TimeoutError:
            pass
        self._server.close(POOL_GRACE)

    def lame_duck(self) -> None:
        """As of `Engine`."""
        self._server.keeps_connections = False

    def _renew(self, reason: str) -> None:
        """From a thread of the server."""
        if self._loop is not None and self._ask_renewal is not None:
            try:
                self._loop.call_soon_threadsafe(self._ask_renewal, reason)
            except RuntimeError:
                pass  # the loop is closed: it ends anyway

    def drain(self, patience_s: float = 0.0, *, is_stop: bool = True) -> None:
        """As of `Engine`."""
        self._patience_s = patience_s
        self._drain_asked.set()

    def stats(self) -> PoolStats:
        """As of `Engine`."""
        return self._server.stats()

    def resize(self, threads: int) -> None:
        """As of `Engine`."""
        self._server.pool.size = threads

    def shed(self, most: int | None, reason: str = "") -> None:
        """As of `Engine`."""
        self._server.shed(most, reason)

    def is_alive(self) -> bool:
        """As of `Engine`."""
        return self._server.pool.keeper_lag_s() < KEEPER_PATIENCE

    def upgraded(self) -> int:
        """As of `Engine`."""
        return 0

    def in_flight(self) -> int:
        """As of `Engine`."""
        return self._server.stats().busy

    def underway(self) -> list[UnderWay]:
        """As of `Engine`."""
        running = [thread.job for thread in self._server.pool.jobs()]
        return [
            UnderWay(each.context, each.head.method, each.head.origin_form, each.head.headers, each.status, each.rule)
            for each in running
            if isinstance(each, Exchange)
            and each.status
            and not each.timed_out
            and (each.context.events or each.context.imports)
        ]

    def has_room(self) -> bool:
        """As of `Engine`."""
        return self._server.has_room()
