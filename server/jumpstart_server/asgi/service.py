"""What all connections of one uvicorn server share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.http1 import DefaultFields, RequestHead
from jumpstart_server.refusals import Refusals
from jumpstart_warmup.observe import Observer


class Service:
    """
    The app, the settings and the fields of every response. One per server, made with its first connection.

    Attributes:
        told_keep_alive_s: what clients are told about it, in whole seconds; 0 says nothing.
        access: where requests are logged, if they are.
        observer: keeps the books of them.
        refusals: where those are that come to nothing.
        websocket: the protocol class of connections that are upgraded; None refuses them. With *access* it is one of
            `websocket.logged`.
    """

    def __init__(self, config: Any, server_state: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            config: uvicorn's, loaded; its attribute ``jumpstart`` holds the `ConnectionSettings`, the defaults if not,
                ``jumpstart_access`` the `AccessLog` and ``jumpstart_observer`` the `Observer`, if there are such.
            server_state: uvicorn's.
        """
        self.app = config.loaded_app
        self.settings: ConnectionSettings = getattr(config, "jumpstart", None) or ConnectionSettings()
        self.told_keep_alive_s = int(self.settings.keep_alive)
        self.root_path: str = config.root_path
        self.access: AccessLog | None = getattr(config, "jumpstart_access", None)
        self.observer: Observer | None = getattr(config, "jumpstart_observer", None)
        self.websocket: Any = config.ws_protocol_class
        if self.access is not None and self.websocket is not None:
            from jumpstart_server.asgi.websocket import logged

            self.websocket = logged(self.websocket)
        self.refusals = Refusals(self.access, clock)
        self._state = server_state
        self._source: list[tuple[bytes, bytes]] | None = None
        self._defaults = DefaultFields()

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
