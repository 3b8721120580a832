"""
Freeing a thread that waits for a peer: the very socket that it waits on is shut down.

An exception cannot reach a handler that is blocked in ``recv``: it is raised when the call returns. Which is what it
does at once when its socket is shut down. The kernel says what a thread is blocked in (``/proc/self/task/N/syscall``:
the call and its arguments), whoever made it: Python's `socket` and `ssl`, `http.client`, httpx, or a database driver
in C.

Shut down are stream sockets only that are connected or just connecting, over TCP or a Unix socket with a name, and only
while the thread is blocked in reading, writing, or polling that one alone. Not: listening sockets, connections of the
server's own clients, pairs of sockets inside the process or to its children, files, pipes. A thread that waits for a
lock, sleeps, or waits in an event loop for many sockets is left as it is.

Where it must not be used: where a connection carries other requests too. That is so with multiplexed protocols (HTTP/2
or gRPC clients shared between threads, a message broker's connection) if a handler's own thread reads the socket for
all. An ordinary pool (requests, httpx with HTTP/1.1, SQLAlchemy) lends a connection to one request at a time, and sees
that it is broken afterwards; a driver that does not test its connections hands a broken one to the next request.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# Numbers of system calls (asm/unistd.h): those with the descriptor in front, and those with an array of pollfd.
_BY_MACHINE = {
    "x86_64": ({0, 1, 19, 20, 42, 44, 45, 46, 47, 299}, {7, 271}),
    "aarch64": ({63, 64, 65, 66, 203, 206, 207, 211, 212, 243}, {73}),
}
_WITH_FD, _POLLS = _BY_MACHINE.get(platform.machine(), (set(), set()))
_POLLFD = struct.Struct("=ihh")
_TCP_SYN_SENT = 2  # linux/tcp_states.h


def is_possible() -> bool:
    """Whether this kernel tells where threads are blocked, in words that are known here."""
    return bool(_WITH_FD) and bool(_syscall(threading.get_native_id()))


def sever(native_id: int, is_ours: Callable[[int], bool]) -> str | None:
    """
    Shut down the socket that a thread is blocked on; None if there is none that may be, else what it was, for the log.

    Args:
        native_id: the thread's, as the kernel counts.
        is_ours: whether a descriptor belongs to the server, and must stay.
    """
    before = _syscall(native_id)
    fd = _blocked_on(before)
    if fd is None or is_ours(fd):
        return None
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    # A copy, so that it is this socket that is shut down or none, whatever the thread does from now on.
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    try:
        peer = _peer_of(sock)
        if peer is None or _syscall(native_id) != before:
            return None
        # Not the method of `ssl.SSLSocket`; of a copy it is the plain socket's anyway.
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return None  # it is not connected any more, and the call about to return
    finally:
        sock.close()
    return f"fd={fd} peer={peer}"


def _syscall(native_id: int) -> bytes:
    """What the kernel says a thread is blocked in; empty if it runs, has ended, or nobody may know."""
    try:
        return Path(f"/proc/self/task/{native_id}/syscall").read_bytes()
    except OSError:
        return b""


def _blocked_on(line: bytes) -> int | None:
    """The one descriptor that a blocked call is about."""
    words = line.split()
    if len(words) < 4 or not words[0].isdigit():  # "running", or "-1 …" outside a system call
        return None
    number = int(words[0])
    first, second = int(words[1], 16), int(words[2], 16)
    if number in _WITH_FD:
        return first
    if number in _POLLS and second == 1:
        return _polled(first)
    return None


def _polled(address: int) -> int | None:
    """The descriptor in a pollfd of this process. Read through a file: a bad address is an error then, and no crash."""
    try:
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            data = memory.read(_POLLFD.size)
    except (OSError, OverflowError, ValueError):
        return None
    if len(data) != _POLLFD.size:
        return None
    fd: int = _POLLFD.unpack(data)[0]
    return fd if fd >= 0 else None


def _peer_of(sock: socket.socket) -> str | None:
    """The peer of a connected stream socket that may be shut down."""
    if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        return None
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return None
    try:
        peer = sock.getpeername()
    except OSError:
        if (
            sock.family != socket.AF_UNIX
            and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_SYN_SENT
        ):
            return "(connecting)"
        raise
    if sock.family == socket.AF_UNIX:
        name = peer or sock.getsockname()  # a client has a name on the other side only, a server on its own
        return f"unix:{name!r}" if name else None
    return f"[{peer[0]}]:{peer[1]}" if sock.family == socket.AF_INET6 else f"{peer[0]}:{peer[1]}"
