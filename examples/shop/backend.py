"""
The shop's back end: configuration and service discovery, 20 ms away.

``python backend.py`` listens on 127.0.0.1:9100 and prints its port on the first line. It ends on SIGTERM and on Ctrl-C,
with ``--watch-stdin`` also when its standard input closes, so that it cannot outlive the program that started it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlsplit

CONFIG = {
    "title": "Harbour & Meadow",
    "announcement": "Orders before noon leave today.",
    "free_shipping_cents": 6000,
    "shipping_cents": 490,
}


def answer(target: str) -> tuple[int, dict[str, Any]]:
    """Status and body for a request target."""
    parts = urlsplit(target)
    if parts.path == "/config":
        return 200, CONFIG
    name = parse_qs(parts.query).get("name", [""])[0]
    if parts.path == "/discovery" and name:
        number = zlib.crc32(name.encode())
        return 200, {"name": name, "address": f"10.0.{number % 200}.{number // 200 % 200}:{7000 + number % 1000}"}
    return 404, {"error": "ask for /config or /discovery?name=SERVICE"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    latency_s = 0.02

    def do_GET(self) -> None:
        time.sleep(self.latency_s)
        status, content = answer(self.path)
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the first line of the output is the port, and there is no other."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a whole fleet of workers may boot at once


def main() -> None:
    parser = argparse.ArgumentParser(description="configuration and service discovery for the example shop")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9100, help="0 takes a free one")
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--watch-stdin", action="store_true", help="exit when standard input closes")
    options = parser.parse_args()
    Handler.latency_s = options.latency_ms / 1000

    def stop(signum: int, frame: FrameType | None) -> None:
        # shutdown() waits for the loop that this signal interrupted, hence the thread
        threading.Thread(target=server.shutdown, daemon=True).start()

    def watch_stdin() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
            pass
        server.shutdown()

    with Server((options.host, options.port), Handler) as server:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        if options.watch_stdin:
            threading.Thread(target=watch_stdin, daemon=True).start()
        print(server.server_address[1], flush=True)
        server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
