"""
Two classes of requests side by side, each begun at a rate of its own whatever becomes of the others: an open loop.

Short requests and long streams of tokens (lines of the body), each over a connection of its own. A time begins when the
request was due, so that a server which keeps us waiting does not spare itself the requests that come meanwhile.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from array import array
from statistics import fmean
from typing import Any

from benchmarks.figures import percentile
from benchmarks.load.response import BadResponse, ResponseReader


class Class:
    """One class of requests and what became of them; only those that were due after the warm-up count."""

    def __init__(self, port: int, path: str, rate: float, tokens: int) -> None:
        self.address = ("127.0.0.1", port)
        self.head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
        self.interval_s = 1 / rate
        self.tokens = tokens
        self.total_s = array("d")
        self.first_s = array("d")
        self.count = 0
        self.faults: dict[str, int] = {}

    def figures(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "failures": self.count - len(self.total_s),
            "faults": self.faults,
            "mean_s": fmean(self.total_s) if self.total_s else None,
            "p99_s": percentile(self.total_s, 0.99),
            "longest_s": max(self.total_s) if self.total_s else None,
            "first_mean_s": fmean(self.first_s) if self.first_s else None,
            "first_p99_s": percentile(self.first_s, 0.99),
        }


class Request:
    __slots__ = ("counts", "due", "first", "kind", "reader", "socket", "tokens")

    def __init__(self, kind: Class, due: float, counts: bool) -> None:
        self.kind = kind
        self.due = due
        self.counts = counts
        self.socket = socket.socket()
        self.reader = ResponseReader()
        self.first = 0.0
        self.tokens = 0


class Mix:
    """Runs the load once: `run`."""

    def __init__(self, classes: list[Class]) -> None:
        self._classes = classes
        self._by_fd: dict[int, Request] = {}
        self._epoll = select.epoll()

    def run(self, warm_s: float, seconds: float, patience_s: float) -> None:
        """Load for *warm_s* that do not count and *seconds* that do; wait up to *patience_s* for what is under way."""
        started = time.monotonic()
        counted = started + warm_s
        end = counted + seconds
        due = [started + kind.interval_s * (n + 1) / (len(self._classes) + 1) for n, kind in enumerate(self._classes)]
        while (now := time.monotonic()) < end:
            for number, kind in enumerate(self._classes):
                while due[number] <= now:
                    self._begin(kind, due[number], due[number] >= counted)
                    due[number] += kind.interval_s
            self._handle(max(min(due) - time.monotonic(), 0.0))
        until = end + patience_s
        while any(request.counts for request in self._by_fd.values()) and time.monotonic() < until:
            self._handle(0.2)
        for request in list(self._by_fd.values()):
            self._finish(request, "late")
        self._epoll.close()

    def _begin(self, kind: Class, due: float, counts: bool) -> None:
        request = Request(kind, due, counts)
        kind.count += counts
        request.socket.setblocking(False)
        request.socket.connect_ex(kind.address)
        self._by_fd[request.socket.fileno()] = request
        self._epoll.register(request.socket, select.EPOLLOUT)

    def _handle(self, timeout_s: float) -> None:
        for fd, mask in self._epoll.poll(timeout_s):
            request = self._by_fd[fd]
            try:
                if mask & select.EPOLLOUT:
                    request.socket.send(request.kind.head)
                    self._epoll.modify(fd, select.EPOLLIN)
                    continue
                data = request.socket.recv(65536)
            except BlockingIOError:
                continue
            except OSError as error:
                self._finish(request, "reset" if isinstance(error, ConnectionResetError) else "no connection")
                continue
            if not data:
                request.reader.end()
                self._finish(request, "" if request.reader.complete else "closed early")
                continue
            try:
                body = request.reader.feed(data)
            except BadResponse:
                self._finish(request, "malformed")
                continue
            if body:
                request.first = request.first or time.monotonic()
                request.tokens += body.count(b"\n")
            if request.reader.complete:
                self._finish(request, "")

    def _finish(self, request: Request, fault: str) -> None:
        now = time.monotonic()
        del self._by_fd[request.socket.fileno()]
        request.socket.close()
        if not request.counts:
            return
        kind = request.kind
        if not fault and request.reader.status != 200:
            fault = f"status {request.reader.status}"
        elif not fault and request.tokens != kind.tokens:
            fault = "tokens missing"
        if fault:
            kind.faults[fault] = kind.faults.get(fault, 0) + 1
            return
        kind.total_s.append(now - request.due)
        kind.first_s.append(request.first - request.due)


def run(
    short: dict[str, Any], streams: dict[str, Any] | None, warm_s: float, seconds: float, patience_s: float = 30.0
) -> dict[str, Any]:
    """*short* and *streams* are the arguments of `Class`; without *streams* the short ones are alone."""
    classes = {"short": Class(**short)}
    if streams is not None:
        classes["streams"] = Class(**streams)
    gc.disable()
    Mix(list(classes.values())).run(warm_s, seconds, patience_s)
    return {name: kind.figures() for name, kind in classes.items()}
