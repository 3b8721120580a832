"""
Connections that ask for nothing: silent ones never send a byte, slow ones send a head, one byte each second.

Once all are open it prints a line, and goes on until its standard input closes; then it prints what became of them.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

AT_ONCE = 200  # connections that are being made at any time, so that no backlog overflows
CONNECT_S = 20.0  # for all of them
RESET = struct.pack("ii", 1, 0)  # close by reset: leaves nothing in TIME_WAIT
SLOW_HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


class Crowd:
    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._epoll = select.epoll()
        self._open: dict[int, socket.socket] = {}
        self._slow: set[int] = set()
        self.closed = 0
        self.failed = 0

    def gather(self, silent: int, slow: int) -> None:
        """Open all connections, the slow ones last. Those that cannot be had within `CONNECT_S` have failed."""
        end = time.monotonic() + CONNECT_S
        total, begun = silent + slow, 0
        making: set[int] = set()
        while (begun < total or making) and time.monotonic() < end:
            while begun < total and len(making) < AT_ONCE:
                begun += 1
                fd = self._connect()
                making.add(fd)
                if begun > silent:
                    self._slow.add(fd)
            for fd, mask in self._epoll.poll(0.1):
                if mask & (select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP):
                    self._forget(fd)
                    if fd in making:
                        making.remove(fd)
                        self.failed += 1
                    else:
                        self.closed += 1
                elif fd in making:
                    making.remove(fd)
                    self._epoll.modify(fd, select.EPOLLRDHUP)
                    if fd in self._slow:
                        self._open[fd].send(SLOW_HEAD)
        for fd in making:
            self._forget(fd)
        self.failed += len(making) + total - begun

    def hold(self) -> None:
        """Keep them until standard input ends."""
        self._epoll.register(0, select.EPOLLIN | select.EPOLLHUP)
        due = time.monotonic() + 1
        while True:
            for fd, _ in self._epoll.poll(max(0.0, due - time.monotonic())):
                if fd == 0:
                    return
                self._forget(fd)
                self.closed += 1
            if time.monotonic() >= due:
                due += 1
                for fd in self._slow:
                    try:
                        self._open[fd].send(b"a")
                    except OSError:
                        pass  # the next poll tells

    def count(self) -> int:
        return len(self._open)

    def leave(self) -> None:
        for fd in list(self._open):
            self._forget(fd)

    def _connect(self) -> int:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.connect_ex(self._address)
        fd = connection.fileno()
        self._open[fd] = connection
        self._epoll.register(fd, select.EPOLLOUT | select.EPOLLRDHUP)
        return fd

    def _forget(self, fd: int) -> None:
        self._slow.discard(fd)
        self._open.pop(fd).close()


def run(port: int, silent: int, slow: int) -> dict[str, Any]:
    crowd = Crowd(port)
    crowd.gather(silent, slow)
    print(json.dumps({"open": crowd.count(), "failed": crowd.failed}), flush=True)
    crowd.hold()
    left = crowd.count()
    crowd.leave()
    return {"open": left, "closed": crowd.closed, "failed": crowd.failed}
