"""
The WSGI server of one worker: what it is made of, its start and end, and what the threads of the pool call.

Everything but `WSGIServer.stop_accepting`, `close`, `tick` and the start runs on the threads of the pool (`pool.py`),
each of which owns the connection that it works on (`connection.py`).
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

import msgspec

from jumpstart_server import forks
from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ACCEPTS, ConnectionSettings
from jumpstart_server.engine import PoolStats
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.wsgi import pace
from jumpstart_server.wsgi.connection import PROBE_TIME, Connection
from jumpstart_server.wsgi.deadlines import Deadlines
from jumpstart_server.wsgi.exchange import SEIZING, Exchange, Seizure, WSGIApp
from jumpstart_server.wsgi.listeners import Listeners
from jumpstart_server.wsgi.pool import PoolThread, ThreadPool
from jumpstart_server.wsgi.reading import Reader
from jumpstart_server.wsgi.table import SECOND_LOOK, Setup
from jumpstart_server.wsgi.timers import GONE, NEVER
from jumpstart_warmup.observe import Observer

logger = logging.getLogger(__name__)

LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
SWEEP = 0.25  # seconds between looks at deadlines


class WSGIServer(Reader):
    """The top floor: `Connections` says what the attributes are."""

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
        stream_bodies: bool = False,
        tls: ssl.SSLContext | None = None,
        access: AccessLog | None = None,
        on_broken: Callable[[], None] | None = None,
        limits: RequestLimits = RequestLimits(),  # noqa: B008  # frozen
        renew: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            listeners: bound and listening.
            threads: most handlers at once.
            stream_bodies: run handlers when the head has come, and not when the body has.
            on_broken: called, from any thread, when this process can serve nothing more.
            limits: of requests: how long they may run, how many may wait for a thread, and how long.
            renew: is told, from another thread, why this process should be replaced.
        """
        super().__init__(
            Setup(
                app=app,
                settings=settings,
                observer=observer,
                limits=limits,
                script_name=script_name,
                multiprocess=multiprocess,
                stream_bodies=stream_bodies,
                tls=tls,
                access=access,
            )
        )
        self._on_broken = on_broken
        self._listeners = Listeners(listeners, self._epoll, self._open, self._clock)
        self.pool = ThreadPool(threads, self._epoll, self)
        self._probed: deque[tuple[float, Connection]] = deque()  # until when, and whose requests waited; ours
        self._steps_before = 0
        self._interval = pace.SwitchInterval()
        self._interval_set = 0.0
        self._deadlines = Deadlines(
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

    def _carry_on(self, thread: PoolThread, connection: Connection) -> None:
        """Something more has come for a connection; when nothing has, give it up."""
        while not self._queue.size and not self.pool.has_events:
            if not self._read(thread, connection) or not self._put_back(connection):
                return
        self._post(connection)  # others come first

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
        for timed in self._timers.expired(now):
            connection = cast(Connection, timed)
            try:
                if self._own(connection):
                    if connection.deadline <= now:
                        self._expired(connection, now)
                    else:
                        self._timers.watch(connection, now)
                        self._return(connection)
                elif connection.deadline != GONE:
                    self._timers.watch(connection, now)  # its owner may have set another one
            except Exception:  # the others' time is over all the same
                logger.critical("internal error at the deadline of a connection", exc_info=True)
        if self._draining:
            self._hurry(now)  # those that were put back as the drain began
        while self._shed_late(now):
            pass
        self._waiting.warn(now, self.pool)
        look = min(self._deadlines.look(now), self._look_at_probed(now))
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

    def has_room(self) -> bool:
        """Whether a handler could begin at once, and none waits."""
        most, busy = self._most, self.pool.stats().busy
        return busy < self.pool.size and not self._queue.size and (most is None or busy < most)

    def note_lag(self, now: float, lag_s: float) -> None:
        """Set the switch interval by how long the keeper waited for the GIL."""
        steps = self.steps
        interval = self._interval.look(now, lag_s, steps != self._steps_before)
        self._steps_before = steps
        if interval != self._interval_set:
            self._interval_set = interval
            sys.setswitchinterval(interval)
