"""Sources that behave as a test tells them: a function, and an HTTP server that can do everything wrong."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jumpstart import live
from jumpstart.polling import poller


def wait_until(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@contextmanager
def no_threads_left() -> Iterator[None]:
    """Close all real-time values that the block has made, and see their threads end."""
    before = set(live._all)
    yield
    for each in set(live._all) - before:
        each.close()
    live._offers.clear()
    poller.resume()
    poller.wake()  # those that were dropped without a word it finds out at its next look only
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("jumpstart-")])


class Scripted:
    """A fetch function: returns *answer*, raises it where it is an error, or waits for *gate* while that is closed."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> Any:
        self.calls += 1
        answer = self.answer
        assert self.gate.wait(30)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Endpoint:
    """
    An HTTP server on a port of its own, with entity tags.

    *mode* is ``good``, a status such as ``500``, ``html``, ``number``, ``garbage``, ``truncated``, ``endless``,
    ``drip`` or ``hang``. `close` makes it dead, `open` alive again, on the same port.
    """

    def __init__(self) -> None:
        self.values: Any = {"a": 1}
        self.mode = "good"
        self.port = 0
        self.statuses: list[int] = []
        self.released = threading.Event()
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/flags.json"

    def open(self) -> None:
        self.released.clear()
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.answer(self)

            def log_message(self, *words: Any) -> None: ...

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *words: Any) -> None: ...  # clients that have left

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), name="endpoint")
        self.thread.start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body, status, kind = json.dumps(self.values).encode(), 200, "application/json"
        tag = f'"{hash(body)}"'
        match self.mode:
            case "html":
                body, kind = b"<!DOCTYPE html><p>Sign in", "text/html"
            case "number":
                body = b"7"
            case "garbage":
                body = bytes(range(256))
            case "hang":
                self.released.wait(30)
                return
            case mode if mode.isdecimal():
                status, body = int(mode), b"{}"
        if self.mode == "good" and handler.headers.get("If-None-Match") == tag:
            status, body = 304, b""
        self.statuses.append(status)
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        if self.mode == "good":
            handler.send_header("ETag", tag)
        if self.mode == "endless":
            handler.end_headers()
            while not self.released.is_set():
                handler.wfile.write(b" " * 65536)
            return
        handler.send_header("Content-Length", str(len(body) + 10 * (self.mode == "truncated")))
        handler.end_headers()
        if self.mode == "drip":
            for position in range(len(body)):
                handler.wfile.write(body[position : position + 1])
                if self.released.wait(0.1):
                    return
            return
        handler.wfile.write(body)


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    try:
        yield made
    finally:
        made.close()
