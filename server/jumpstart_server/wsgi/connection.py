"""
A connection, and who owns it.

At any moment one thread owns a connection: the engine's loop while it waits for bytes, a handler's thread from the moment
a request is handed over until its response is written. Only the owner reads, writes or closes the socket, so a descriptor
is never used after it was closed and given to another connection. The loop may at any time set `readable` and `gone` of a
connection that it does not own; the handler looks at them.

    READING ── request complete ──> RUNNING ── response written ──> READING
       │                               │
       └──────────> CLOSED <───────────┴──> LINGERING ──> CLOSED
"""

from __future__ import annotations

import enum
import socket
import ssl
from typing import IO, Any

from jumpstart_server.http1 import RequestHead, RequestParser


class Owner(enum.IntEnum):
    """Who may touch the socket, and what for."""

    READING = 0  # the loop: waits for a request, or for the rest of one
    RUNNING = 1  # a handler's thread, or the queue in front of it
    LINGERING = 2  # the loop: the last answer is sent; what the client still sends is read and dropped
    CLOSED = 3


READING, RUNNING, LINGERING, CLOSED = Owner


class Connection:
    """
    One client.

    Attributes:
        deadline: when the loop closes it, on the monotonic clock; meaningless while RUNNING.
        readable: bytes, or the end, arrived while a handler owned it.
        gone: the client has closed its side, or the connection was reset.
        head, body, body_bytes: the request that is being read; body is a spooled file or None.
        served: requests so far.
        secure: TLS; *handshaking* until it is established.
    """

    __slots__ = (
        "base",
        "body",
        "body_bytes",
        "deadline",
        "fd",
        "gone",
        "handshaking",
        "head",
        "owner",
        "parser",
        "peer",
        "readable",
        "received",
        "secure",
        "served",
        "sock",
    )

    def __init__(self, sock: socket.socket, peer: Any, base: dict[str, Any], parser: RequestParser, deadline: float) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.base = base
        self.parser = parser
        self.deadline = deadline
        self.owner: Owner = READING
        self.readable = False
        self.gone = False
        self.head: RequestHead | None = None
        self.body: IO[bytes] | None = None
        self.body_bytes = 0
        self.received = 0.0
        self.served = 0
        self.secure = isinstance(sock, ssl.SSLSocket)
        self.handshaking = self.secure

    def drop_body(self) -> None:
        if self.body is not None:
            self.body.close()
            self.body = None
        self.body_bytes = 0
