"""
The upstream that apps stream from, in a process of its own: ``python -m benchmarks.load upstream {}``.

``GET /stream?n=20&ms=100`` answers with n tokens, one each ms milliseconds; ``GET /stats`` tells how late tokens left
since it was last asked. Any other path is answered at once, so that it can also stand for a server without an app.
It prints its port, and ends when its standard input closes.
"""

from __future__ import annotations

import gc
import heapq
import json
import select
import socket
import time
from array import array
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.figures import percentile

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 12\r\n\r\nHello, world"


class Stream:
    """One connection."""

    __slots__ = ("interval_s", "left", "received", "sent", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received = b""
        self.interval_s = 0.0
        self.left = 0
        self.sent = 0


class Upstream:
    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._streams: dict[int, Stream] = {}
        self._due: list[tuple[float, int, Stream]] = []  # a heap; the number makes each entry comparable
        self._count = 0
        self._late_s = array("d")

    def serve(self) -> None:
        """Until standard input ends."""
        self._epoll.register(0, select.EPOLLIN | select.EPOLLHUP)
        listener = self._listener.fileno()
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0
            for fd, _ in self._epoll.poll(wait):
                if fd == listener:
                    self._accept()
                elif fd == 0:
                    return
                else:
                    self._receive(self._streams[fd])
            self._send_due()

    def _accept(self) -> None:
        for _ in range(64):
            try:
                connection, _address = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._streams[connection.fileno()] = Stream(connection)
            self._epoll.register(connection, select.EPOLLIN)

    def _receive(self, stream: Stream) -> None:
        try:
            data = stream.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(stream)
            return
        stream.received += data
        while not stream.left and b"\r\n\r\n" in stream.received:
            head, _, stream.received = stream.received.partition(b"\r\n\r\n")
            self._answer(stream, head)

    def _answer(self, stream: Stream, head: bytes) -> None:
        target = head.split(b" ", 2)[1]
        if not target.startswith((b"/stream?", b"/stats")):
            self._send(stream, HELLO)
            return
        url = urlsplit(target.decode("latin-1"))
        if url.path == "/stats":
            body = json.dumps({"late_p99_s": percentile(self._late_s, 0.99)}).encode()
            self._late_s = array("d")
            self._send(stream, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        query = parse_qs(url.query)
        stream.left = int(query["n"][0])
        stream.sent = 0
        stream.interval_s = int(query["ms"][0]) / 1000
        self._send(stream, STREAM_HEAD)
        self._schedule(time.monotonic() + stream.interval_s, stream)

    def _schedule(self, due: float, stream: Stream) -> None:
        self._count += 1
        heapq.heappush(self._due, (due, self._count, stream))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, _, stream = heapq.heappop(self._due)
            if not stream.left:
                continue  # it has gone
            token = b'{"token": %6d}\n' % stream.sent
            stream.sent += 1
            stream.left -= 1
            chunk = b"%x\r\n%s\r\n" % (len(token), token)
            now = time.monotonic()
            self._late_s.append(now - due)
            if stream.left:
                self._schedule(due + stream.interval_s, stream)
                self._send(stream, chunk)
            else:
                self._send(stream, chunk + b"0\r\n\r\n")

    def _send(self, stream: Stream, data: bytes) -> None:
        try:
            stream.socket.send(data)
        except OSError:  # it has gone, or takes nothing of a few hundred bytes: the same to us
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        stream.left = 0
        if self._streams.pop(stream.socket.fileno(), None) is not None:
            stream.socket.close()


def run(port: int = 0) -> dict[str, Any]:
    upstream = Upstream(port)
    print(json.dumps({"port": upstream.port}), flush=True)
    gc.disable()
    upstream.serve()
    return {}
