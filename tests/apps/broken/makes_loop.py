"""Makes an event loop while it is imported, whose epoll forks would share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

loop = asyncio.new_event_loop()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "6")])
    return [b"hello\n"]
