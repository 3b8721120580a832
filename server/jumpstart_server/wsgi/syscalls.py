"""
System calls that keep the GIL.

`socket.send` lets go of the GIL even for a call that never blocks, and under load a thread that lets go waits behind
all others to have it back: with hundreds of handlers that is most of a request's time. `ctypes.PyDLL` calls hold on to
it. They cost half a microsecond more, so they pay only while threads compete; callers choose.

Each takes a descriptor and trusts the caller that it is the right one: only a connection's owner may call.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import socket
import struct

RECV_BYTES = 64 * 1024
_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)

_libc = ctypes.PyDLL(None, use_errno=True)
_recv = _libc.recv
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_recv.restype = ctypes.c_ssize_t
_send = _libc.send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t
_epoll_wait = _libc.epoll_wait
_epoll_wait.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
_epoll_wait.restype = ctypes.c_int
_get_errno = ctypes.get_errno

_AGAIN = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR))

# struct epoll_event is packed on x86-64 and aligned elsewhere (sys/epoll.h).
_PACKED = os.uname().machine in ("x86_64", "amd64")
_EVENT = struct.Struct("=Iii" if _PACKED else "@Iiii")
_FD = 1 if _PACKED else 2  # its index


def send(fd: int, data: bytes) -> int:
    """
    How many bytes of *data* the kernel took; 0 when it has no room.

    Raises:
        OSError: the connection is broken.
    """
    count: int = _send(fd, data, len(data), _FLAGS)
    if count < 0:
        number = _get_errno()
        if number in _AGAIN:
            return 0
        raise OSError(number, os.strerror(number))
    return count


class Calls:
    """The calls that need memory of their own. One for each thread: another thread may run between call and copy."""

    __slots__ = ("_buffer", "_buffer_at", "_epoll", "_events", "_events_at", "_max_events", "_received")

    def __init__(self, epoll: select.epoll, max_events: int) -> None:
        # Of the system, which gives pages when they are written to: a thousand threads need little of 64 KiB each.
        buffer = mmap.mmap(-1, RECV_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer = (ctypes.c_char * RECV_BYTES).from_buffer(buffer)
        self._buffer_at = ctypes.addressof(self._buffer)
        self._received = memoryview(buffer)
        self._epoll = epoll.fileno()
        events = ctypes.create_string_buffer(_EVENT.size * max_events)
        self._events_at = ctypes.addressof(events)
        self._events = memoryview(events)
        self._max_events = max_events

    def recv(self, fd: int) -> bytes | None:
        """
        Up to 64 KiB of what has come; None if nothing has, empty at the end.

        Raises:
            OSError: the connection is broken.
        """
        count = _recv(fd, self._buffer_at, RECV_BYTES, _FLAGS)
        if count < 0:
            number = _get_errno()
            if number in _AGAIN:
                return None
            raise OSError(number, os.strerror(number))
        return self._received[:count].tobytes()

    def poll(self) -> list[tuple[int, int]]:
        """What is ready now, as pairs of descriptor and events like those of `select.epoll.poll`."""
        count = _epoll_wait(self._epoll, self._events_at, self._max_events, 0)
        if count <= 0:
            return []
        found = self._events[: count * _EVENT.size]
        return [(event[_FD], event[0]) for event in _EVENT.iter_unpack(found)]
