"""The listening sockets: who accepts, how many at once, and what happens when there are no descriptors left."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable

from jumpstart_server.connection_settings import ACCEPT_PAUSE, ACCEPTS, COMPLAINT_PAUSE, NO_DESCRIPTORS
from jumpstart_server.wsgi.connection import Address
from jumpstart_server.wsgi.timers import NEVER

logger = logging.getLogger(__name__)

REST = 0.1  # seconds that connections are left to other workers
SHORT_REST = 0.005  # seconds until some more are taken, if nobody else takes them
TURNED_AWAY = 128  # connections at once, where there is no room for them


class Listeners:
    """
    Sockets that listen, in an epoll. Every method may be called from any thread.

    Attributes:
        accept_again: when to call `resume` or `accept_waiting`, in seconds of the monotonic clock; `NEVER` while it
            accepts.
        is_resting: connections are left to other workers.
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
        self.is_resting = False
        self._failures = 0  # to accept, since the last line about them
        self._complained_at = -COMPLAINT_PAUSE
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

    def accept(self, fd: int, limit: int = ACCEPTS) -> bool:
        """Accept up to *limit* of the connections that wait at a listener; whether there may be more."""
        for _ in range(min(limit, ACCEPTS)):
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
                        self._pause(error)
                    return False
                try:
                    self._take(sock, None if sock.family == socket.AF_UNIX else (str(peer[0]), peer[1]))
                except OSError as error:  # it was reset meanwhile, or the epoll is full
                    logger.debug("a connection was lost as it was accepted: %s", error)
                    sock.close()
        return True

    def rest(self) -> None:
        """Leave connections to other workers for a moment. To be called where all threads are busy."""
        with self._lock:
            if self._stopped or self.accept_again < NEVER:
                return
            self.is_resting = True
            self.accept_again = self._clock() + REST
            self._unregister_all()

    def accept_waiting(self, room: int) -> None:
        """
        Nobody has taken those that wait since `rest`: take some of them, and rest on.

        Where there is no *room* for them to wait here, there was none elsewhere either: many are taken, to be told so.
        """
        more = False
        for fd in list(self._sockets):
            for _ in range(1 if room else TURNED_AWAY // ACCEPTS):
                more = self.accept(fd, room or ACCEPTS)
                if not more:
                    break
        if self.is_resting:
            self.accept_again = self._clock() + (SHORT_REST if more and (not room or room > ACCEPTS) else REST)

    def resume(self) -> None:
        """Wait for connections again, after a pause or a rest."""
        with self._lock:
            self.accept_again = NEVER
            self.is_resting = False
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
        self.accept_again = NEVER
        self.is_resting = False
        with self._lock:  # so that no thread is in the middle of an accept
            self._sockets.clear()

    def _pause(self, error: OSError) -> None:
        """The system has none to give, whichever listener asks."""
        self._failures += 1
        now = self._clock()
        if now - self._complained_at >= COMPLAINT_PAUSE:
            self._complained_at = now
            logger.error(
                "cannot accept connections: %s; trying again each %g s (failed %d times since the last such line)",
                error,
                ACCEPT_PAUSE,
                self._failures,
            )
            self._failures = 0
        if not self._stopped:
            self._unregister_all()
            self.is_resting = False
            self.accept_again = now + ACCEPT_PAUSE

    def _unregister_all(self) -> None:
        for fd in list(self._sockets):
            self._unregister(fd)

    def _unregister(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # it is paused
