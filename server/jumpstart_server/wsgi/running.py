"""A handler: it is run, counted, and what comes next on its connection is seen to."""

from __future__ import annotations

import contextvars
import threading
import time

from jumpstart.context import RequestContext
from jumpstart_server.access import AccessLog, AccessRecord
from jumpstart_server.http1 import Event, RequestHead, State
from jumpstart_server.wsgi import pace
from jumpstart_server.wsgi.answers import Answers
from jumpstart_server.wsgi.connection import IDLE, UNREAD, Connection
from jumpstart_server.wsgi.environ import Environ
from jumpstart_server.wsgi.exchange import Exchange
from jumpstart_server.wsgi.pool import PoolThread
from jumpstart_server.wsgi.table import SECOND_LOOK, Setup
from jumpstart_server.wsgi.timers import NEVER
from jumpstart_warmup.middleware import MARKER_KEY
from jumpstart_warmup.observe import CLIENT_CLOSED
from jumpstart_warmup.sampling import MAX_BODY
from jumpstart_warmup.targets import is_probe

RESTING = State.RESTING  # to look for a member of an enumeration costs more than a call


class Runner(Answers):
    """Runs the app. Methods that return a bool say whether the connection is still the caller's, and to be put back."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._app = setup.app
        self._observer = setup.observer
        self._access = setup.access
        self._context = contextvars.copy_context()
        self._paces = pace.Paces()
        self._timeout = setup.limits.timeout or NEVER
        self._latest = self._timeout + setup.limits.timeout_extension
        self._most: int | None = None
        self._most_reason = ""

    def shed(self, most: int | None, reason: str) -> None:
        """Answer requests with 503 while *most* of them run; None ends that."""
        self._most_reason = reason
        self._most = most

    def _run(
        self,
        thread: PoolThread,
        connection: Connection,
        head: RequestHead,
        environ: Environ,
        key: pace.Key,
        began: float,
    ) -> bool:
        """Run the handler and send its response; as `_read`."""
        pool = self.pool
        most = self._most
        if most is not None and pool.stats().busy >= most:
            return self._shed(connection, 1, "memory", self._most_reason)
        connection.deadline = NEVER
        connection.fresh = False
        quick = self._paces.is_quick(key)
        if not quick:
            pool.turn_busy(thread)
            began = self._clock()
        if began >= self._date_until:
            self._renew_date(began)
        context = RequestContext(
            expires=began + self._timeout, latest=began + self._latest, has_left=connection.is_left
        )
        exchange = Exchange(connection, head, environ, began, context, threading.get_ident())
        if connection.queued_at:
            exchange.queued = began - connection.queued_at
            connection.queued_at = 0.0
        thread.began = began
        thread.job = exchange
        thread.quick = quick
        cpu_began = -1.0 if quick else time.thread_time()
        self._context.copy().run(exchange.run, self._app, thread.interrupts)
        cpu_s = -1.0 if quick else time.thread_time() - cpu_began
        thread.quick = False
        thread.job = None
        ended = self._clock()
        if thread.busy:
            pool.turn_seeking(thread)
        self.steps += 1
        self._paces.note(key, ended - began - exchange.sending)
        if connection.gone_at and exchange.status < 500 and connection.has_left():
            exchange.status = CLIENT_CLOSED  # what was at hand was sent: it may have closed its sending side only
        if not exchange.is_accounted:
            self._account(exchange, ended, cpu_s)
        reader = connection.reader
        if reader is not None or connection.body is not None:
            connection.drop_body()
        if exchange.broken:
            connection.reset_on_close()
            self._close(connection)
            return False
        if exchange.must_close:
            if connection.parser.state is State.CLOSED and not connection.readable and not connection.has_input():
                self._close(connection)
                return False
            return self._linger(connection)
        if reader is not None and not reader.complete:
            if reader.refusal is not None:
                return self._linger(connection)
            connection.phase = UNREAD
            connection.received = 0
            connection.readable = True
            self._await_more(connection)
            return True
        connection.phase = IDLE
        parser = connection.parser
        if parser.state is RESTING:
            events = parser.resume()
            if events or not parser.is_idle:
                return self._go_on(thread, connection, events, ended)
        connection.deadline = ended + self.settings.keep_alive
        if self._draining:
            connection.deadline = ended + SECOND_LOOK
        self._watch(connection, ended)
        return True

    def _account(self, exchange: Exchange, ended: float, cpu_s: float = -1.0) -> None:
        """Put a request into the books and the access log."""
        environ, head = exchange.environ, exchange.head
        if exchange.timed_out:
            exchange.status = 504
        self._observer.count(
            exchange.context,
            method=head.method,
            target=head.origin_form,
            headers=head.headers,
            status=exchange.status,
            elapsed_s=ended - exchange.began,
            evidence=MARKER_KEY not in environ and not is_probe(environ.get("HTTP_USER_AGENT", "")),
            rule=exchange.rule,
            cpu_s=cpu_s,
            body=self._body_to_keep(exchange) if head.has_body else b"",
        )
        if self._access is not None:
            self._write_line(self._access, exchange, environ, ended)

    def _body_to_keep(self, exchange: Exchange) -> bytes | None:
        """The body of a request that may be repeated, if it is short; None if it is not at hand."""
        lookout, connection = self._observer.lookout, exchange.connection
        if lookout is None or exchange.head.method not in lookout.methods or exchange.timed_out:
            return None
        if connection.body is None or connection.length > MAX_BODY:
            return None
        try:
            connection.body.seek(0)
            body: bytes = connection.body.read()
            return body
        except (OSError, ValueError):  # the app has closed it
            return None

    def _write_line(self, access: AccessLog, exchange: Exchange, environ: Environ, ended: float) -> None:
        head = exchange.head
        elapsed = ended - exchange.began
        access.write(
            AccessRecord(
                client=environ.get("REMOTE_ADDR") or "",  # unless the app has taken it out
                method=head.method,
                target=head.target,
                http_version=head.http_version,
                status=exchange.status,
                sent=exchange.sent_bytes,
                total_s=exchange.queued + elapsed,
                queue_s=exchange.queued,
                app_s=elapsed,
                request_headers=head.headers,
                response_headers=exchange.response_fields,
                environ=environ,
            )
        )

    # ------------------------------------------------------------------ what comes next on the connection

    def _next(self, thread: PoolThread, connection: Connection) -> bool:
        """The rest of a request that was answered long ago has come; as `_read`."""
        connection.phase = IDLE
        now = self._clock()
        events = connection.parser.resume()
        if events or not connection.parser.is_idle:
            return self._go_on(thread, connection, events, now)
        connection.deadline = now + self.settings.keep_alive
        self._watch(connection, now)
        return True

    def _go_on(self, thread: PoolThread, connection: Connection, events: list[Event], now: float) -> bool:
        """Some of the next request has come behind the last one; as `_read`."""
        connection.head = None
        connection.began = now
        if events:  # not now: a client that sends a thousand requests at once must not keep us from all others
            connection.parsed = events
            connection.deadline = NEVER
            connection.readable = True
            return True
        if connection.parser.state is State.CLOSED:
            self._close(connection)
            return False
        self._await_more(connection)
        return True
