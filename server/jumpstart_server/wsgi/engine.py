"""The WSGI server as an `Engine`: what the worker's event loop sees of it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

from jumpstart.errors import ConfigError
from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.engine import CANCEL_GRACE, BecomeReady, PoolStats
from jumpstart_server.settings import TenantSettings
from jumpstart_server.tls import server_context
from jumpstart_server.wsgi.server import WSGIServer
from jumpstart_warmup.observe import Observer

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
    ) -> None:
        """
        Args:
            app: the user's own, since the server itself keeps *observer*'s books.
            listeners: bound, and listening when *become_ready* returns.

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
        self._server = WSGIServer(
            app,
            listeners,
            ConnectionSettings.of(tenant),
            threads=tenant.threads,
            observer=observer,
            script_name=tenant.root_path.encode().decode("latin-1"),
            multiprocess=tenant.workers > 1,
            queue=tenant.queue,
            queue_timeout=tenant.queue_timeout,
            stream_bodies=tenant.stream_bodies,
            tls=server_context(tenant.ssl_certfile, tenant.ssl_keyfile) if tenant.ssl_certfile else None,
            access=access,
        )

    async def serve(self) -> None:
        """As of `Engine`."""
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

        self._server.stop_accepting()
        self._stopped_accepting()
        self._server.when_empty(tell)
        try:
            await asyncio.wait_for(emptied.wait(), self._tenant.graceful_timeout)
        except TimeoutError:
            pass
        self._server.close(POOL_GRACE)

    def drain(self) -> None:
        """As of `Engine`."""
        self._drain_asked.set()

    def stats(self) -> PoolStats:
        """As of `Engine`."""
        return self._server.stats()
