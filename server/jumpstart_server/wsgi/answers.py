"""Answers of our own, in the place of an app's: refused, shed, too late. And how connections end."""

from __future__ import annotations

import logging
import socket
from datetime import UTC, datetime

from jumpstart_server.connection_settings import LINGER_TIME
from jumpstart_server.http1 import DefaultFields, ParseError, RequestHead, error_response, http_date
from jumpstart_server.wsgi.connection import BODY, HEAD, IDLE, LINGERING, TRAILERS, UNREAD, Connection
from jumpstart_server.wsgi.table import LAST_LOOK, Connections, Setup
from jumpstart_server.wsgi.timers import NEVER
from jumpstart_server.wsgi.waiting import Waiting
from jumpstart_warmup.observe import CLIENT_CLOSED

logger = logging.getLogger(__name__)


class Answers(Connections):
    """Connections that can be told something, and whose requests may wait for a thread."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._waiting = Waiting(setup.limits.queue, setup.limits.queue_timeout)
        self._queue = self._waiting.queue  # to see whether it is empty, at no cost
        self._date_until = 0.0

    def _renew_date(self, now: float) -> None:
        wall = datetime.now(UTC).timestamp()
        self.default_fields = DefaultFields(http_date(wall))
        self._date_until = now + 1.0 - wall % 1.0

    def _answer(
        self,
        connection: Connection,
        status: int,
        reason: str,
        head: RequestHead | None = None,
        *,
        retry_after: int = 0,
    ) -> bool:
        """An answer of our own, the last one."""
        now = self._clock()
        if now >= self._date_until:
            self._renew_date(now)
        headers = [(b"Retry-After", b"%d" % retry_after)] if retry_after else []
        method = "GET" if head is None else head.method
        data = error_response(status, reason, method=method, headers=headers, defaults=self.default_fields)
        queued = now - connection.queued_at if connection.queued_at else 0.0
        self.refusals.write_line(connection.peer, status, data, head, now - connection.began, queued)
        connection.queued_at = 0.0
        try:
            connection.sock.send(data)  # a few hundred bytes, which fit in any send buffer
        except OSError:
            self._close(connection)
            return False
        return self._linger(connection)

    def _refuse(self, connection: Connection, error: ParseError) -> bool:
        self.refusals.note(connection.peer, error.detail)
        if connection.phase == UNREAD:
            return self._linger(connection)
        return self._answer(connection, error.status, error.reason, error.head)

    def _no_room(self, connection: Connection, error: OSError) -> bool:
        logger.error("cannot keep the body of a request: %s", error)
        return self._answer(connection, 507, "there is no room for the body", connection.head)

    # ------------------------------------------------------------------ requests that do not begin

    def _enqueue(self, connection: Connection) -> bool:
        connection.deadline = NEVER
        now = self._clock()
        if not self._waiting.add(connection, now):
            return self._shed(connection, self._waiting.retry_after_s(now), "queue_full", "too many requests wait")
        self.pool.job_waits()
        return False

    def _shed(self, connection: Connection, retry_after_s: int, reason: str, words: str) -> bool:
        """A request that does not begin; as `_answer`."""
        self.refusals.count(reason)
        self.refusals.note(connection.peer, f"503 {words}: {describe(connection.head)}")
        return self._answer(connection, 503, words, connection.head, retry_after=retry_after_s)

    def _shed_late(self, now: float) -> bool:
        """Shed a request that has waited for too long, if there is one."""
        if not self._queue.size:
            return False
        retry_after_s = self._waiting.retry_after_s(now)
        late = self._waiting.take_late(now)
        if late is None:
            return False
        if self._shed(late, retry_after_s, "queue_timeout", "no thread became free in time"):
            self._return(late)
        return True

    def _left_queue(self, connection: Connection, now: float) -> None:
        """The client has left before its request began: nobody waits for the answer."""
        waited = now - connection.queued_at
        self.refusals.count("client_left")
        self.refusals.write_line(connection.peer, CLIENT_CLOSED, b"", connection.head, now - connection.began, waited)
        self._close(connection)

    # ------------------------------------------------------------------ ends

    def _linger(self, connection: Connection) -> bool:
        """
        Close our side, and drop what the client still sends until it closes its own.

        A close with unread bytes in the socket is a reset, which may destroy the answer on its way (RFC 9112 9.6).
        """
        connection.drop_body()
        connection.phase = LINGERING
        connection.received = 0
        connection.known = None
        now = self._clock()
        connection.deadline = now + LINGER_TIME
        connection.readable = True
        if connection.is_tls:
            connection.say_goodbye()
            connection.is_tls = False  # what still comes is dropped, and need not be deciphered
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(connection)
            return False
        self._timers.watch(connection, now)
        return True

    def _lost(self, connection: Connection) -> None:
        """The connection broke while a request came."""
        if connection.phase in (HEAD, BODY, TRAILERS) and connection.head is not None:
            total = self._clock() - connection.began
            self.refusals.write_line(connection.peer, CLIENT_CLOSED, b"", connection.head, total)
        self._close(connection)

    def _abandon(self, connection: Connection) -> None:
        """An error of ours while this thread had a connection: nobody else would close it."""
        if connection.queued_at or self._idle.get(connection.fd) is connection:
            return  # it is another thread's by now, or nobody's
        if self._all.get(connection.fd) is connection:
            self.refusals.count("internal_error")
            connection.reset_on_close()
            self._close(connection)

    def _expired(self, connection: Connection, now: float) -> None:
        """The time of a connection that nobody else owns is over."""
        phase = connection.phase
        if phase in (HEAD, BODY, TRAILERS):
            what = {HEAD: "head", BODY: "body", TRAILERS: "trailers"}[phase]
            self.refusals.note(connection.peer, f"408 the {what} of the request did not arrive in time")
            if self._answer(connection, 408, f"the {what} did not arrive in time", connection.head):
                self._return(connection)
        elif phase == UNREAD:
            if self._linger(connection):
                self._return(connection)
        elif phase == IDLE and connection.has_input():
            # It came just now. A close would be a reset, and the request lost.
            connection.deadline = now + LAST_LOOK
            self._timers.watch(connection, now)
            connection.readable = True
            self._return(connection)
        else:
            self._close(connection)


def describe(head: RequestHead | None) -> str:
    """Method and path, for the log."""
    return "" if head is None else f"{head.method} {head.path.decode('ascii', 'replace')}"
