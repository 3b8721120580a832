"""Connects to OPENS_SOCKET_TO=HOST:PORT while it is imported, and keeps the connection, which forks would share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

host, _, port = os.environ["OPENS_SOCKET_TO"].rpartition(":")
connection = socket.create_connection((host, int(port)), timeout=5)


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "6")])
    return [b"hello\n"]
