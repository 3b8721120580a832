"""Starts a daemon thread while it is imported, which a fork would lose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def tick() -> None:
    while True:
        time.sleep(60)


threading.Thread(target=tick, name="ticker-of-the-app", daemon=True).start()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "6")])
    return [b"hello\n"]
