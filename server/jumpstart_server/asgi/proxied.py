"""
Connections that begin with a PROXY header: the same protocol, with a first stage before its first byte.

A class of its own, so that connections without it ask nothing about it. The header counts as a part of the first
request's head: it has to come within ``header_timeout``, and what is closed while idle is closed here too.
"""

from __future__ import annotations

import asyncio

from jumpstart_server.asgi.protocol import LEAVING, JumpstartProtocol
from jumpstart_server.http1 import ProxyHeaderError, read_proxy_header


class ProxiedProtocol(JumpstartProtocol):
    """`JumpstartProtocol` where ``config.jumpstart`` asks for the PROXY protocol."""

    __slots__ = ("_opening",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opening: bytes | None = b""  # what has come; None when the header is whole
        senders = self._settings.proxy_senders
        if senders is None or not senders.trusts(self._peer_host()):
            self._refuse_connection("the peer may not speak the PROXY protocol (--proxy-allow-from)")

    def data_received(self, data: bytes) -> None:
        if self._opening is None:
            super().data_received(data)
        elif self._phase <= LEAVING:
            self._open(self._opening + data)

    def _open(self, data: bytes) -> None:
        try:
            header = read_proxy_header(data, self._settings.proxy_protocol)
        except ProxyHeaderError as error:
            self._refuse_connection(str(error))
            return
        if header is None:
            self._opening = data
            return
        self._opening = None
        if header.client is not None:
            self._client, self._server = header.client, header.server
            self._trust(header.client[0])
        elif not header.is_local:
            self._trust("")  # the proxy is trusted, but what it relays may be anybody's
        if header.rest:
            super().data_received(header.rest)

    def _refuse_connection(self, detail: str) -> None:
        """By a close without an answer, as the specification wants it: the peer is a proxy, or does not belong here."""
        self.service.refusals.note(self._client, detail)
        self._abort()
