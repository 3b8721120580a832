"""What all connections of one uvicorn server share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.http1 import DefaultFields, RequestHead

logger = logging.getLogger(__name__)

LINES_PER_SECOND = 10  # about refused requests; noise on an open port must not fill a disk


class Service:
    """
    The app, the settings and the fields of every response. One per server, made with its first connection.

    Attributes:
        told_keep_alive_s: what clients are told about it, in whole seconds; 0 says nothing.
    """

    def __init__(self, config: Any, server_state: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            config: uvicorn's, loaded; its attribute ``jumpstart`` holds the `ConnectionSettings`, the defaults if not.
            server_state: uvicorn's.
        """
        self.app = config.loaded_app
        self.settings: ConnectionSettings = getattr(config, "jumpstart", None) or ConnectionSettings()
        self.told_keep_alive_s = int(self.settings.keep_alive)
        self.root_path: str = config.root_path
        self.websocket: Any = config.ws_protocol_class
        self._state = server_state
        self._clock = clock
        self._source: list[tuple[bytes, bytes]] | None = None
        self._defaults = DefaultFields()
        self._second = 0
        self._lines = 0
        self._unsaid = 0

    def defaults(self) -> DefaultFields:
        """From uvicorn's default headers, a list that it makes anew each second."""
        source = self._state.default_headers
        if source is not self._source:
            known = dict(source)
            others = [field for field in source if field[0] not in (b"date", b"server")]
            self._defaults = DefaultFields(known.get(b"date", b""), known.get(b"server", b""), others)
            self._source = source
        return self._defaults

    def log_refusal(self, client: object, detail: str) -> None:
        """Log why a client got no service: an event of the client's making, so INFO, and not too often."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._lines = second, 0
        if self._lines >= LINES_PER_SECOND:
            self._unsaid += 1
            return
        self._lines += 1
        unsaid, self._unsaid = self._unsaid, 0
        logger.info("refused client=%s %s%s", client, detail, f" (and {unsaid} before it)" if unsaid else "")


def describe(head: RequestHead) -> str:
    """Method and path for a log line, without the query, which may hold secrets."""
    return f"{head.method} {head.path.decode('ascii', 'replace')}"
