"""
The WSGI server of one worker: accepts, reads, hands requests to the handlers' threads, and ends.

Everything but `WSGIServer.drain`, `tick` and the start runs on the threads of the pool (`pool.py`), each of which owns
the connection that it works on (`connection.py`).
"""

from __future__ import annotations

import contextvars
import logging
import select
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from io import BytesIO
from typing import cast

import msgspec

from jumpstart.context import RequestContext
from jumpstart_server import forks
from jumpstart_server.access import AccessLog, AccessRecord
from jumpstart_server.connection_settings import DISCARD_BYTES, LINGER_BYTES, LINGER_TIME, ConnectionSettings
from jumpstart_server.engine import PoolStats
from jumpstart_server.http1 import (
    BodyData,
    DefaultFields,
    Event,
    ParseError,
    ProxyHeaderError,
    RequestEnd,
    RequestHead,
    State,
    error_response,
    http_date,
    read_proxy_header,
)
from jumpstart_server.refusals import Refusals
from jumpstart_server.wsgi import pace
from jumpstart_server.wsgi.body import BodyReader, Spools
from jumpstart_server.wsgi.connection import (
    BODY,
    HEAD,
    IDLE,
    LINGERING,
    PREFACE,
    PROBE_TIME,
    TRAILERS,
    UNREAD,
    Address,
    Connection,
)
from jumpstart_server.wsgi.deadlines import GONE, NEVER, Deadlines
from jumpstart_server.wsgi.environ import Environ
from jumpstart_server.wsgi.exchange import SEIZING, Exchange, Seizure, WSGIApp
from jumpstart_server.wsgi.files import FileWrapper
from jumpstart_server.wsgi.listeners import ACCEPTS, Listeners
from jumpstart_server.wsgi.pool import PoolThread, ThreadPool
from jumpstart_server.wsgi.syscalls import RECV_BYTES
from jumpstart_server.wsgi.timeouts import TimeLimits, Timeouts
from jumpstart_server.wsgi.waiting import Waiting
from jumpstart_warmup.observe import CLIENT_CLOSED, MARKER_KEY, Observer

logger = logging.getLogger(__name__)

READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
SECOND_LOOK = 0.1  # seconds that an idle connection has left when the server drains
SWEEP = 0.25  # seconds between looks at deadlines
KNOWN_BYTES = 2048  # of a request that is remembered, to know it again
LAST_LOOK = 1.0  # seconds for a request that came as its connection was to be closed


class WSGIServer:
    """
    Attributes:
        settings: limits and times of connections.
        pool: the threads.
        script_name: the path prefix that a proxy strips.
        keeps_connections: false while it drains or soon will, or where keep-alive is off.
        told_keep_alive_s: what clients are told about it, in whole seconds; 0 says nothing.
        default_fields: what each response says besides, Date above all; another object each second.
        refusals: where clients that got no service are logged.
        steps: requests and chunks of streams so far; about.
    """

    def __init__(
        self,
        app: WSGIApp,
        listeners: Iterable[socket.socket],
        settings: ConnectionSettings,
        *,
        threads: int,
        observer: Observer,
        script_name: str = "",
        multiprocess: bool = False,
        queue: int = 1000,
        queue_timeout: float = 10.0,
        stream_bodies: bool = False,
        tls: ssl.SSLContext | None = None,
        access: AccessLog | None = None,
        on_broken: Callable[[], None] | None = None,
        limits: TimeLimits = TimeLimits(),  # noqa: B008  # frozen
        renew: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            listeners: bound and listening.
            threads: most handlers at once.
            queue: requests that may wait for a thread; more are answered with 503.
            queue_timeout: seconds that one may wait, 0 for ever; then 503.
            stream_bodies: run handlers when the head has come, and not when the body has.
            on_broken: called, from any thread, when this process can serve nothing more.
            limits: of requests that run.
            renew: is told, from another thread, why this process should be replaced.
        """
        self.settings = settings
        self.script_name = script_name
        self.keeps_connections = settings.keep_alive > 0
        self.told_keep_alive_s = int(settings.keep_alive)
        self._app = app
        self._observer = observer
        self._multiprocess = multiprocess
        self._stream_bodies = stream_bodies
        self._tls = tls
        self._access = access
        self._on_broken = on_broken
        self.refusals = Refusals(access)
        self._clock = time.monotonic
        self._context = contextvars.copy_context()
        self._epoll = select.epoll()
        self._listeners = Listeners(listeners, self._epoll, self._open, self._clock)
        self.pool = ThreadPool(threads, self._epoll, self)
        self._idle: dict[int, Connection] = {}  # that nobody owns
        self._all: dict[int, Connection] = {}
        self._waiting = Waiting(queue, queue_timeout)
        self._queue = self._waiting.queue  # to see whether it is empty, at no cost
        self._probed: deque[tuple[float, Connection]] = deque()  # until when, and whose requests waited; ours
        self.spools = Spools()
        self._deadlines = Deadlines()
        self._paces = pace.Paces()
        self._most: int | None = None
        self._most_reason = ""
        self._draining = False
        self._patience = SECOND_LOOK
        self._when_empty: Callable[[], None] | None = None
        self._date_until = 0.0
        self.default_fields = DefaultFields()
        self.steps = 0
        self._steps_before = 0
        self._interval = pace.SwitchInterval()
        self._interval_set = 0.0
        self._timeout = limits.timeout or NEVER
        self._latest = self._timeout + limits.timeout_extension
        self._overrunning: set[Connection] = set()  # whose handlers do not end, and whose clients know
        self._timeouts = Timeouts(
            limits, self.pool, is_ours=self._is_ours, account=self._account, abandon=self._overrun, renew=renew
        )

    # ------------------------------------------------------------------ start and end

    def start(self) -> None:
        """
        Start the threads, then accept.

        Raises:
            RuntimeError: the system has no thread to give.
        """
        forks.serve_here()
        self.note_lag(self._clock(), 0.0)
        self.pool.start()
        self._listeners.start()

    def shed(self, most: int | None, reason: str) -> None:
        """Answer requests with 503 while *most* of them run; None ends that."""
        self._most_reason = reason
        self._most = most

    def stop_accepting(self, patience_s: float = 0.0) -> None:
        """
        Take the connections that wait already, then no more.

        Those that are kept are closed with their next answer, or when they have been idle for *patience_s* more.
        """
        self._patience = max(SECOND_LOOK, patience_s)
        self._draining = True
        self.keeps_connections = False
        self._listeners.stop()
        self._hurry(self._clock())
        self.pool.stir()

    def _hurry(self, now: float) -> None:
        """Give connections without a request a moment for one that is on its way."""
        for connection in list(self._idle.values()):
            phase = connection.phase
            if phase != IDLE and phase != PREFACE:
                continue
            deadline = now + (self._patience if phase == IDLE else LAST_LOOK)
            if connection.deadline > deadline and self._own(connection):
                if connection.phase == phase:
                    connection.deadline = min(connection.deadline, deadline)
                    self._deadlines.watch(connection, now)
                self._return(connection)

    def when_empty(self, callback: Callable[[], None]) -> None:
        """Have *callback* called, from any thread, when the last connection is closed; after `stop_accepting`."""
        self._when_empty = callback
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if self._draining and self._when_empty is not None and len(self._all) == len(self._overrunning):
            self._when_empty()

    def _overrun(self, exchange: Exchange) -> None:
        """A handler runs on, and nobody waits for it any more, nor shall the end of the server."""
        self._overrunning.add(exchange.connection)
        if exchange.is_over:
            self._overrunning.discard(exchange.connection)  # it was closed meanwhile
        self._tell_if_empty()

    def _is_ours(self, fd: int) -> bool:
        return fd in self._all or fd in self._listeners

    def close(self, timeout_s: float) -> None:
        """End the threads, wait up to *timeout_s* for handlers, and close every connection that nobody owns."""
        ended = self.pool.stop(timeout_s)
        waiting = [connection for _, connection in self._probed]
        while (connection := self._waiting.take_any()) is not None:
            waiting.append(connection)
        for connection in waiting:
            if self._answer(connection, 503, "the server stops", connection.head):
                self._close(connection)
        for connection in list(self._idle.values()):
            if self._own(connection):
                self._close(connection)
        if ended:
            for connection in list(self._all.values()):
                self._close(connection)
            self._epoll.close()
            return
        now = self._clock()
        for thread in self.pool.jobs():
            exchange = thread.job
            if isinstance(exchange, Exchange) and not exchange.is_accounted:
                exchange.is_accounted = True
                with SEIZING:
                    seizure = exchange.seize()
                    if seizure is Seizure.ANSWERED:
                        exchange.answer_late(503, "the server stops")
                    elif seizure is Seizure.CUT:
                        exchange.cut_off()
                logger.warning("cut short by the stop after %.1f s: %s", now - exchange.began, exchange)
                self.refusals.write_line(
                    exchange.connection.peer, 503, b"", exchange.head, now - exchange.began + exchange.queued
                )

    # ------------------------------------------------------------------ what requests ask

    def base_environ(self, connection: Connection) -> Environ:
        """What all requests of a connection have in common."""
        peer = connection.peer
        server = connection.local or connection.sock.getsockname()
        if isinstance(server, tuple):
            name, server_port = str(server[0]), str(server[1])
        else:  # over a Unix socket there is no address, and apps index it all the same
            name, server_port = "localhost", "80"
        return {
            "SCRIPT_NAME": self.script_name,
            "SERVER_NAME": name,
            "SERVER_PORT": server_port,
            "REMOTE_ADDR": "" if peer is None else peer[0],
            "REMOTE_PORT": "" if peer is None else str(peer[1]),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "https" if connection.is_tls else "http",
            "wsgi.input_terminated": True,
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": self._multiprocess,
            "wsgi.run_once": False,
            "wsgi.file_wrapper": FileWrapper,
        }

    # ------------------------------------------------------------------ connections: open, own, close

    def _open(self, sock: socket.socket, peer: Address | None) -> None:
        """Take a new connection into the tables."""
        settings = self.settings
        now = self._clock()
        sock.setblocking(False)
        if peer is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        has_header = settings.proxy_protocol != "off"
        if has_header:
            senders = settings.proxy_senders
            if senders is None or not senders.trusts(None if peer is None else peer[0]):
                self.refusals.note(peer, "the peer may not speak the PROXY protocol (--proxy-allow-from)")
                sock.close()
                return
        if self._tls is not None:
            sock.getpeername()  # raises where the client has left; wrap_socket would raise too, and leave it open
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection = Connection(self, sock, peer, now, tls=self._tls is not None)
        if has_header or connection.is_tls:
            connection.phase = PREFACE
        # It is ours until it is put back: an event of one that had its descriptor before may come at any time.
        self._all[connection.fd] = connection
        self._deadlines.watch(connection, now)
        try:
            self._epoll.register(connection.fd, READ)
        except OSError:
            self._close(connection)
            raise
        self._return(connection)

    def _own(self, connection: Connection) -> bool:
        """Become the owner of a connection, if nobody is and it is not closed."""
        found = self._idle.pop(connection.fd, None)
        if found is connection:
            return True
        if found is not None:  # it was closed meanwhile, and this one has its descriptor now
            self._return(found)
        return False

    def _put_back(self, connection: Connection) -> bool:
        """Give up a connection, unless something has come for it meanwhile: then it is still the caller's, and True."""
        self._idle[connection.fd] = connection
        return connection.readable and self._own(connection)

    def _carry_on(self, thread: PoolThread, connection: Connection) -> None:
        """Something more has come for a connection; when nothing has, give it up."""
        while not self._queue.size and not self.pool.has_events:
            if not self._read(thread, connection) or not self._put_back(connection):
                return
        self._post(connection)  # others come first

    def _close(self, connection: Connection) -> None:
        self._all.pop(connection.fd, None)
        connection.close()
        self._deadlines.forget(connection)
        if self._overrunning:
            self._overrunning.discard(connection)
        if self._draining:
            self._tell_if_empty()

    # ------------------------------------------------------------------ what the pool calls

    def handle(self, thread: PoolThread, fd: int, events: int) -> None:
        """Act on an event."""
        connection = self._idle.pop(fd, None)
        if connection is None:
            connection = self._all.get(fd)
            if connection is None:
                if fd in self._listeners:
                    self._listeners.accept(fd, self._room())
                return
            if events & LEFT and not connection.gone_at:
                connection.gone_at = self._clock()
            connection.readable = True
            connection = self._idle.pop(fd, None)
            if connection is None:
                return  # its owner will see
        elif events & LEFT and not connection.gone_at:
            connection.gone_at = self._clock()
        try:
            if self._read(thread, connection) and self._put_back(connection):
                self._carry_on(thread, connection)
        except BaseException:
            self._abandon(connection)
            raise

    def next_job(self, thread: PoolThread) -> bool:
        """Run a request that waits."""
        if not self._queue.size:
            if self._listeners.is_resting:
                self._listeners.resume()
            return False
        now = self._clock()
        connection = self._waiting.take(now)
        if connection is None:
            return self._shed_late(now)
        head = connection.head
        assert head is not None
        if self._queue.size:
            self.pool.job_waits()
        if connection.gone_at and connection.has_left():
            if connection.probe():
                self._probed.append((now + PROBE_TIME, connection))
            else:
                self._left_queue(connection, now)
            return True
        try:
            environ = connection.make_environ(head)
            key = (head.method, head.path)
            if self._run(thread, connection, head, environ, key, now) and self._put_back(connection):
                self._carry_on(thread, connection)
        except BaseException:
            self._abandon(connection)
            raise
        return True

    def broken(self) -> None:
        """As of `Crew`."""
        if self._on_broken is not None:
            self._on_broken()

    def _left_queue(self, connection: Connection, now: float) -> None:
        """The client has left before its request began: nobody waits for the answer."""
        waited = now - connection.queued_at
        self.refusals.count("client_left")
        self.refusals.write_line(connection.peer, CLIENT_CLOSED, b"", connection.head, now - connection.began, waited)
        self._close(connection)

    def _look_at_probed(self, now: float) -> float:
        """Clients that send no more have had the time to answer a probe. Returns when to look again."""
        while self._probed and self._probed[0][0] <= now:
            _, connection = self._probed.popleft()
            if connection.is_reset():
                self._left_queue(connection, now)
                continue
            connection.gone_at = 0.0  # it reads
            if self._enqueue(connection):
                self._return(connection)
        return self._probed[0][0] if self._probed else NEVER

    def has_job(self) -> bool:
        """As of `Crew`."""
        return self._queue.size > 0

    def overdue(self, job: Exchange) -> None:
        """Take its kind for slow from now on: others like it may be on their way, and it may run for long."""
        self._paces.note_overdue((job.head.method, job.head.path))

    def tick(self, now: float, restless: bool) -> float:
        """Timers."""
        self._mind_listeners(now)
        for timed in self._deadlines.expired(now):
            connection = cast(Connection, timed)
            try:
                if self._own(connection):
                    if connection.deadline <= now:
                        self._expired(connection, now)
                    else:
                        self._deadlines.watch(connection, now)
                        self._return(connection)
                elif connection.deadline != GONE:
                    self._deadlines.watch(connection, now)  # its owner may have set another one
            except Exception:  # the others' time is over all the same
                logger.critical("internal error at the deadline of a connection", exc_info=True)
        if self._draining:
            self._hurry(now)  # those that were put back as the drain began
        while self._shed_late(now):
            pass
        self._waiting.warn(now, self.pool)
        look = min(self._timeouts.look(now), self._look_at_probed(now))
        if not (restless or self._all or self._listeners.accept_again < NEVER or look < NEVER):
            return NEVER
        return min(now + (SECOND_LOOK / 2 if self._draining else SWEEP), self._waiting.next_look(now), look)

    def saturated(self, now: float) -> None:
        """
        As of `Crew`: leave new connections to workers with a free thread, but not for long.

        When all workers are full, none of them would take a connection, and clients would not hear that they are shed.
        """
        listeners = self._listeners
        if not self._multiprocess:
            return
        if listeners.is_resting:
            self._mind_listeners(now)
            return
        listeners.rest()
        if not self.pool.is_saturated:  # or the thread that has become free saw them rest
            listeners.resume()

    def _mind_listeners(self, now: float) -> None:
        listeners = self._listeners
        if now < listeners.accept_again:
            return
        if listeners.is_resting and self.pool.is_saturated:
            listeners.accept_waiting(self._waiting.room)
        else:
            listeners.resume()

    def _room(self) -> int:
        """How many connections to accept at once: where there are other workers, no more than there are threads."""
        return max(1, self.pool.free) if self._multiprocess else ACCEPTS

    def stats(self) -> PoolStats:
        """The threads and the queue, at this moment."""
        waiting = self._waiting
        waits, waits_sum_s = waiting.books()
        return msgspec.structs.replace(
            self.pool.stats(),
            waiting=len(waiting),
            oldest_wait_s=waiting.oldest_wait_s(self._clock()),
            overloaded=self._queue.is_overloaded,
            waits=waits,
            waits_sum_s=waits_sum_s,
            refused=self.refusals.counts.copy(),
        )

    def note_lag(self, now: float, lag_s: float) -> None:
        """Set the switch interval by how long the keeper waited for the GIL."""
        steps = self.steps
        interval = self._interval.look(now, lag_s, steps != self._steps_before)
        self._steps_before = steps
        if interval != self._interval_set:
            self._interval_set = interval
            sys.setswitchinterval(interval)

    # ------------------------------------------------------------------ reading, by the owner

    def _read(self, thread: PoolThread, connection: Connection) -> bool:
        """Read once and act on it. Whether the connection is still the caller's, and to be put back."""
        if connection.parsed:
            events, connection.parsed = connection.parsed, []
            connection.readable = True
            return self._take(thread, connection, events, b"")
        connection.readable = False
        phase = connection.phase
        if phase == PREFACE and connection.is_tls:
            return self._shake_hands(thread, connection)
        try:
            data = connection.receive(thread)
        except OSError:
            self._lost(connection)
            return False
        if data is None:
            return True
        if connection.gone_at:
            connection.readable = True  # the end is behind it, of which no event will tell again
        if phase == IDLE and data == connection.known and data:
            head = connection.known_head
            assert head is not None
            connection.began = now = self._clock()
            if self._queue.size or not thread.runs_handlers:
                connection.head = head
                return self._enqueue(connection)
            environ = connection.known_environ.copy()
            environ["wsgi.input"] = BytesIO()
            return self._run(thread, connection, head, environ, connection.known_key, now)
        if len(data) == RECV_BYTES or connection.is_tls:
            connection.readable = True  # there may be more, of which no event will tell
        if not data:
            return self._client_done(thread, connection)
        if phase == PREFACE:
            return self._read_preface(thread, connection, data)
        if phase == LINGERING:
            connection.received += len(data)
            if connection.received > LINGER_BYTES:
                self._close(connection)
                return False
            return True
        parsed = connection.parser.feed(data)
        if not parsed and phase == HEAD:
            return True  # a few bytes of a client that sends slowly; its deadline stays
        return self._take(thread, connection, parsed, data)

    def _shake_hands(self, thread: PoolThread, connection: Connection) -> bool:
        """TLS; as `_read`. It computes for a millisecond or more, so somebody else waits for events."""
        if thread.runs_handlers:
            self.pool.turn_busy(thread)
        try:
            if connection.shake_hands():
                connection.phase = IDLE
                connection.readable = True  # a request may have come with the last of it
            return True
        except (OSError, ValueError) as error:
            self.refusals.note(connection.peer, f"no TLS: {error}")
            self._close(connection)
            return False

    def _read_preface(self, thread: PoolThread, connection: Connection, data: bytes) -> bool:
        """A PROXY header; as `_read`."""
        connection.preface += data
        try:
            header = read_proxy_header(connection.preface, self.settings.proxy_protocol)
        except ProxyHeaderError as error:
            self.refusals.note(connection.peer, str(error))
            self._close(connection)
            return False
        if header is None:
            return True
        connection.preface = b""
        connection.phase = IDLE
        proxies = self.settings.proxies
        if header.client is not None:
            connection.peer, connection.local = header.client, header.server
            connection.trusted = proxies is not None and proxies.trusts(header.client[0])
        elif not header.is_local:
            connection.trusted = proxies is not None and proxies.trusts("")
        if not header.rest:
            return True
        return self._take(thread, connection, connection.parser.feed(header.rest), b"")

    def _client_done(self, thread: PoolThread, connection: Connection) -> bool:
        """The client sends no more."""
        if connection.phase not in (HEAD, BODY, TRAILERS):
            self._close(connection)
            return False
        events = connection.parser.eof()
        if not events:
            self._close(connection)
            return False
        return self._take(thread, connection, events, b"")

    def _take(self, thread: PoolThread, connection: Connection, events: list[Event], data: bytes) -> bool:
        """Act on what the parser found; as `_read`."""
        if len(events) == 2 and type(events[0]) is RequestHead and type(events[1]) is RequestEnd:  # as most come
            connection.head = events[0]
            connection.began = self._clock()
            return self._whole(thread, connection, data)
        ready = False
        for event in events:
            if isinstance(event, RequestHead):
                connection.head = event
                if connection.phase == IDLE:
                    connection.began = self._clock()
                connection.phase = BODY
                if event.has_body and (self._stream_bodies or event.expects_continue):
                    connection.reader = BodyReader(connection, event)
                    ready = True
            elif isinstance(event, BodyData):
                if connection.phase == UNREAD:
                    connection.received += len(event.data)
                    if connection.received > DISCARD_BYTES:
                        return self._linger(connection)
                elif connection.reader is not None:
                    connection.reader.add(event.data)
                else:
                    try:
                        connection.take_body(event.data)
                    except OSError as error:
                        return self._no_room(connection, error)
            elif isinstance(event, ParseError):
                return self._refuse(connection, event)
            elif connection.phase == UNREAD:
                return self._next(thread, connection)
            else:
                if connection.reader is not None:
                    connection.reader.complete = True
                elif connection.body is not None:
                    try:
                        connection.body.seek(0)  # writes what is left of it
                    except OSError as error:
                        return self._no_room(connection, error)
                ready = True
        if ready:
            return self._whole(thread, connection, data)
        self._await_more(connection)
        return True

    def _no_room(self, connection: Connection, error: OSError) -> bool:
        logger.error("cannot keep the body of a request: %s", error)
        return self._answer(connection, 507, "there is no room for the body", connection.head)

    def _await_more(self, connection: Connection) -> None:
        """A request has not come whole."""
        now = self._clock()
        if connection.parser.state is State.TRAILERS:
            # They have the time of a head, and a byte now and then does not prolong it.
            if connection.phase == BODY or connection.deadline == NEVER:
                connection.deadline = now + (self.settings.header_timeout or NEVER)
            if connection.phase == BODY:
                connection.phase = TRAILERS
        elif connection.phase in (BODY, UNREAD):
            connection.deadline = now + (self.settings.body_timeout or NEVER)
        elif connection.parser.is_idle:
            return
        elif connection.phase != HEAD:
            connection.phase = HEAD
            connection.began = now
            if not connection.fresh or self._draining:  # then it had been given a moment only
                connection.deadline = now + (self.settings.header_timeout or NEVER)
        self._watch(connection, now)

    def _watch(self, connection: Connection, now: float) -> None:
        if connection.deadline < connection.look_at or not connection.look_at:
            self._deadlines.watch(connection, now)

    def _whole(self, thread: PoolThread, connection: Connection, data: bytes) -> bool:
        """A request has come whole: run it, or let it wait for a thread."""
        head = connection.head
        assert head is not None
        if self._queue.size or not thread.runs_handlers:
            return self._enqueue(connection)
        key = (head.method, head.path)
        environ = connection.make_environ(head)
        if data == connection.seen:  # for the second time running
            if not head.has_body and _is_worth_knowing(head, connection):
                connection.known = data
                connection.known_head = head
                connection.known_key = key
                connection.known_environ = environ.copy()
        elif len(data) <= KNOWN_BYTES:
            connection.seen = data
        return self._run(thread, connection, head, environ, key, self._clock())

    def _enqueue(self, connection: Connection) -> bool:
        connection.deadline = NEVER
        now = self._clock()
        if not self._waiting.add(connection, now):
            return self._shed(connection, self._waiting.retry_after_s(now), "queue_full", "too many requests wait")
        self.pool.job_waits()
        return False

    # ------------------------------------------------------------------ requests

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
        exchange = Exchange(connection, head, environ, began, context)
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
        if parser.state is State.RESTING:
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
            evidence=MARKER_KEY not in environ,
            rule=exchange.rule,
            cpu_s=cpu_s,
        )
        if self._access is not None:
            self._write_line(self._access, exchange, environ, ended)

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

    def _renew_date(self, now: float) -> None:
        wall = datetime.now(UTC).timestamp()
        self.default_fields = DefaultFields(http_date(wall))
        self._date_until = now + 1.0 - wall % 1.0

    # ------------------------------------------------------------------ answers of our own, and ends

    def _refuse(self, connection: Connection, error: ParseError) -> bool:
        self.refusals.note(connection.peer, error.detail)
        if connection.phase == UNREAD:
            return self._linger(connection)
        return self._answer(connection, error.status, error.reason, error.head)

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

    def _abandon(self, connection: Connection) -> None:
        """An error of ours while this thread had a connection: nobody else would close it."""
        if connection.queued_at or self._idle.get(connection.fd) is connection:
            return  # it is another thread's by now, or nobody's
        if self._all.get(connection.fd) is connection:
            self.refusals.count("internal_error")
            connection.reset_on_close()
            self._close(connection)

    def _lost(self, connection: Connection) -> None:
        """The connection broke while a request came."""
        if connection.phase in (HEAD, BODY, TRAILERS) and connection.head is not None:
            total = self._clock() - connection.began
            self.refusals.write_line(connection.peer, CLIENT_CLOSED, b"", connection.head, total)
        self._close(connection)

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
        self._deadlines.watch(connection, now)
        return True

    def _return(self, connection: Connection) -> None:
        """Give up a connection without a look at what has come for it."""
        if self._put_back(connection):
            self._post(connection)

    def _post(self, connection: Connection) -> None:
        """Give up a connection, and have a thread look at it when it comes to its turn."""
        connection.readable = False
        self._idle[connection.fd] = connection
        self.pool.post(connection.fd, select.EPOLLIN)

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
            self._deadlines.watch(connection, now)
            connection.readable = True
            self._return(connection)
        else:
            self._close(connection)


def _is_worth_knowing(head: RequestHead, connection: Connection) -> bool:
    """Whether the bytes just read are this request and nothing else, and one like it may come."""
    if connection.is_tls:
        return False  # there may be another record, of which no event will tell, so each is followed by a look
    return head.keep_alive and head.upgrade is None and not connection.parser.buffered_bytes


def describe(head: RequestHead | None) -> str:
    """Method and path, for the log."""
    return "" if head is None else f"{head.method} {head.path.decode('ascii', 'replace')}"
