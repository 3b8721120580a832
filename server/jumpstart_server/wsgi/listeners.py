"""The listening sockets: who accepts, how many at once, and what happens when there are no descriptors left."""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable

from jumpstart_server.wsgi.connection import Address
from jumpstart_server.wsgi.deadlines import NEVER

logger = logging.getLogger(__name__)

ACCEPTS = 16  # connections at one event; the others stay for other workers
NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
ACCEPT_PAUSE = 1.0  # seconds without accepting after the descriptors ran out


class Listeners:
    """
    Sockets that listen, in an epoll. Every method may be called from any thread.

    Attributes:
        accept_again: when to call `resume`, in seconds of the monotonic clock; `NEVER` if accepting is not paused.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        epoll: select.epoll,
        take: Callable[[socket.socket, Address | None], None],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            take: is given each new connection and its peer, None over a Unix socket. An OSError of its costs that one.
        """
        self.accept_again = NEVER
        self._sockets = {sock.fileno(): sock for sock in sockets}
        self._epoll = epoll
        self._take = take
        self._clock = clock
        self._lock = threading.Lock()  # held from an accept until the connection is taken
        self._stopped = False

    def start(self) -> None:
        """Wait for connections."""
        for fd, sock in self._sockets.items():
            sock.setblocking(False)
            # Level-triggered, since some may be left for others; exclusive, so that one worker wakes and not all.
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def __contains__(self, fd: int) -> bool:
        return fd in self._sockets

    def accept(self, fd: int) -> bool:
        """Accept some of the connections that wait at a listener; whether there may be more."""
        for _ in range(ACCEPTS):
            with self._lock:
                listener = self._sockets.get(fd)
                if listener is None:
                    return False
                try:
                    sock, peer = listener.accept()
                except (InterruptedError, ConnectionAbortedError):
                    continue
                except BlockingIOError:
                    return False
                except OSError as error:
                    if error.errno in NO_DESCRIPTORS:
                        logger.error("cannot accept connections: %s; trying again in %.0f s", error, ACCEPT_PAUSE)
                        self._pause(fd)
                    return False
                try:
                    self._take(sock, None if sock.family == socket.AF_UNIX else (str(peer[0]), peer[1]))
                except OSError as error:  # it was reset meanwhile, or the epoll is full
                    logger.debug("a connection was lost as it was accepted: %s", error)
                    sock.close()
        return True

    def resume(self) -> None:
        """Wait for connections again, after a pause."""
        self.accept_again = NEVER
        with self._lock:
            for fd in () if self._stopped else list(self._sockets):
                try:
                    self._epoll.register(fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)
                except FileExistsError:
                    pass

    def stop(self) -> None:
        """Take the connections that wait already, then no more."""
        self._stopped = True
        for fd in list(self._sockets):
            self._unregister(fd)
            while self.accept(fd):
                pass
        with self._lock:  # so that no thread is in the middle of an accept
            self._sockets.clear()

    def _pause(self, fd: int) -> None:
        if not self._stopped:
            self._unregister(fd)
            self.accept_again = self._clock() + ACCEPT_PAUSE

    def _unregister(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # it is paused
