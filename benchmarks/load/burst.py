"""
Many requests at once, one a connection, each answer followed to its end: streams of tokens, or plain answers.

A token is a line of the body. An answer is whole when its status is 200, its end came, and it had all its tokens.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from array import array
from typing import Any

from benchmarks.figures import percentile
from benchmarks.load.response import BadResponse, ResponseReader


class Request:
    """One connection with its one request."""

    __slots__ = ("begun", "first", "last", "reader", "socket", "tokens")

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.reader = ResponseReader()
        self.begun = self.first = self.last = 0.0
        self.tokens = 0


class Burst:
    """Runs the requests once: `run`."""

    def __init__(self, port: int, path: str, count: int, tokens: int) -> None:
        self._address = ("127.0.0.1", port)
        self._head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        self._count = count
        self._tokens = tokens
        self._by_fd: dict[int, Request] = {}
        self._epoll = select.epoll()
        self.whole_s = array("d")
        self.first_s = array("d")
        self.gaps_s = array("d")
        self.tokens = 0
        self.broken: dict[str, int] = {}

    def run(self, ramp_s: float, deadline_s: float) -> float:
        """Begin all of them evenly within *ramp_s*, follow them until *deadline_s*; gives how long it took."""
        started = now = time.monotonic()
        deadline = started + deadline_s
        begun = 0
        while (begun < self._count or self._by_fd) and now < deadline:
            due = self._count if now >= started + ramp_s else int(self._count * (now - started) / ramp_s) + 1
            while begun < due:
                begun += 1
                self._begin()
                if begun % 50 == 0:
                    self._handle(0)
            wait = deadline - now if begun == self._count else ramp_s / self._count
            self._handle(min(wait, 1.0))
            now = time.monotonic()
        for request in list(self._by_fd.values()):
            self._finish(request, "late")
        self._epoll.close()
        return now - started

    def _begin(self) -> None:
        request = Request()
        request.socket.setblocking(False)
        request.begun = time.monotonic()
        request.socket.connect_ex(self._address)
        self._by_fd[request.socket.fileno()] = request
        self._epoll.register(request.socket, select.EPOLLOUT)

    def _handle(self, timeout_s: float) -> None:
        by_fd, clock = self._by_fd, time.monotonic
        for fd, mask in self._epoll.poll(timeout_s):
            request = by_fd[fd]
            try:
                if mask & select.EPOLLOUT:
                    request.socket.send(self._head)
                    self._epoll.modify(fd, select.EPOLLIN)
                    continue
                data = request.socket.recv(65536)
            except BlockingIOError:
                continue
            except OSError as error:
                self._finish(request, "reset" if isinstance(error, ConnectionResetError) else "no connection")
                continue
            now = clock()
            reader = request.reader
            if not data:
                reader.end()
                self._finish(request, "" if reader.complete else "closed early")
                continue
            try:
                body = reader.feed(data)
            except BadResponse:
                self._finish(request, "malformed")
                continue
            if body:
                if not request.first:
                    request.first = now
                elif self._tokens:
                    self.gaps_s.append(now - request.last)
                request.last = now
                request.tokens += body.count(b"\n")
            if reader.complete:
                self._finish(request, "")

    def _finish(self, request: Request, fault: str) -> None:
        del self._by_fd[request.socket.fileno()]
        request.socket.close()
        if request.first:
            self.first_s.append(request.first - request.begun)
        self.tokens += request.tokens
        if not fault and request.reader.status != 200:
            fault = f"status {request.reader.status}"
        elif not fault and request.tokens != self._tokens:
            fault = "tokens missing"
        if fault:
            self.broken[fault] = self.broken.get(fault, 0) + 1
        else:
            self.whole_s.append(time.monotonic() - request.begun)


def run(
    port: int, path: str, count: int, tokens: int = 0, ramp_s: float = 0.0, deadline_s: float = 30.0
) -> dict[str, Any]:
    burst = Burst(port, path, count, tokens)
    gc.disable()
    took = burst.run(ramp_s, deadline_s)
    return {
        "took_s": took,
        "whole": len(burst.whole_s),
        "broken": count - len(burst.whole_s),
        "faults": burst.broken,
        "tokens": burst.tokens,
        "total_p50_s": percentile(burst.whole_s, 0.5),
        "total_p99_s": percentile(burst.whole_s, 0.99),
        "first_p50_s": percentile(burst.first_s, 0.5),
        "first_p99_s": percentile(burst.first_s, 0.99),
        "gap_p99_s": percentile(burst.gaps_s, 0.99),
    }
