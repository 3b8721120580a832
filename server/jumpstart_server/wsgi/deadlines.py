"""
Requests whose time is over, or whose client has left: what the keeper does to them and to their handlers.

There is no timer per request. The keeper looks at what runs (`Deadlines.look`), some times a second, and each request
says itself when it is over: `RequestContext.expires`, which its handler may move, and the time of its last send.

A request that is over is logged, with the stack of its thread; its client is answered; its handler is interrupted (and
severed from what it waits for, where the operator wants that) until it ends. One that does not end is an overrun: its
thread goes on, and the pool has another one in its place, up to a limit.

A client that has left ends its handler too, unless that may be half-way through something: with ``on_deadline =
"interrupt"`` only those of safe methods are interrupted, all others run to their end; with ``"sever"``, where a handler
that streams from a model is mostly a POST, all are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING

from jumpstart_server.envelope.interrupt import Stopping
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.envelope.sever import is_possible, sever
from jumpstart_server.envelope.stacks import frames_of_threads, stack_of, stacks_of
from jumpstart_server.wsgi.exchange import SEIZING, Exchange, Seizure
from jumpstart_server.wsgi.timers import NEVER

if TYPE_CHECKING:
    from jumpstart_server.wsgi.pool import PoolThread, ThreadPool

logger = logging.getLogger(__name__)

PRESS = 0.05  # seconds between attempts to stop a handler
LOOK = 0.25  # seconds between looks at what runs; less where a limit is shorter
LOOK_AFTER = 0.1  # seconds between looks at clients of whom an event said that they have left
OVERRUN_GRACE = 0.5  # seconds that a handler may take to end after it was stopped
SEND_GRACE = 0.2  # seconds beyond its time for a response that is on its way
ON_ITS_WAY = 0.02  # seconds since the last send in which it may be
SEVER_PAUSE = 0.1  # seconds that a handler has to notice before the next socket that it waits on is severed
SEVERS = 50  # of one handler
STACKS = 10  # of other threads in the log
STACKS_PAUSE = 60.0  # seconds between logs of those
BURST = 20  # lines of a kind, or stacks, in one look; when hundreds are over at once they wait for the same thing
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))


class _Stop:
    """
    A handler that is to end.

    Attributes:
        is_late: its time is over; else its client has left.
    """

    __slots__ = ("exchange", "is_late", "is_overrun", "next_sever", "severed", "since", "stopping", "thread")

    def __init__(self, thread: PoolThread, exchange: Exchange, now: float) -> None:
        self.thread = thread
        self.exchange = exchange
        self.since = now
        self.stopping = Stopping(thread.interrupts, exchange)
        self.severed = 0
        self.next_sever = 0.0
        self.is_late = False
        self.is_overrun = False


class Deadlines:
    """For one server; the keeper's only."""

    def __init__(
        self,
        limits: RequestLimits,
        pool: ThreadPool,
        *,
        is_ours: Callable[[int], bool],
        account: Callable[[Exchange, float], None],
        abandon: Callable[[Exchange], None],
        renew: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            is_ours: whether a descriptor is the server's.
            account: puts a request into the books and the access log; its handler will not.
            abandon: is told of the exchange of each overrun.
            renew: is told, once, why this process should be replaced. From the keeper's thread.
        """
        self._limits = limits
        self._pool = pool
        self._is_ours = is_ours
        self._account = account
        self._abandon = abandon
        self._renew = renew
        self._stops: dict[Exchange, _Stop] = {}
        self._stacks_at = -STACKS_PAUSE
        self._stacks_logged = 0  # in this look
        self._severed: list[str] = []
        pool.max_overruns = limits.max_overruns
        if limits.on_deadline == "sever" and not is_possible():
            logger.warning("--on-deadline sever interrupts only: this system does not tell what threads wait for")
        shortest = min(filter(None, (limits.timeout, limits.first_byte_timeout, limits.idle_timeout)), default=NEVER)
        self._latest_look = min(max(shortest, PRESS), LOOK)

    def look(self, now: float) -> float:
        """Act on what is over; when to look next, in seconds of the monotonic clock."""
        limits = self._limits
        jobs = self._pool.jobs()
        next_look = now + self._latest_look if jobs else NEVER
        has_one_limit = not (limits.first_byte_timeout or limits.idle_timeout)
        self._stacks_logged = 0
        for thread in jobs:
            exchange = thread.job
            if not isinstance(exchange, Exchange):
                continue
            expires = exchange.context.expires
            if expires > now and has_one_limit and not exchange.connection.gone_at:  # as most are
                if expires < next_look:
                    next_look = expires
                continue
            stop = self._stops.get(exchange)
            if stop is not None and stop.is_late:
                continue
            due, option = _due(limits, exchange)
            if due <= now and not _is_sending(exchange, due, now):
                if stop is None:
                    stop = self._stops[exchange] = _Stop(thread, exchange, now)
                stop.is_late = True
                try:
                    self._time_out(thread, exchange, option, now)
                except Exception:
                    logger.critical("internal error at the deadline of %s", exchange, exc_info=True)
            elif stop is None and exchange.connection.gone_at and self._should_leave(exchange):
                logger.debug("the client left, and its handler is stopped: %s", exchange)
                exchange.is_left = True
                self._stops[exchange] = _Stop(thread, exchange, now)
            else:
                next_look = min(next_look, max(due, now + PRESS))
                if exchange.connection.gone_at:
                    next_look = min(next_look, now + LOOK_AFTER)
        for stop in list(self._stops.values()):
            try:
                self._press(stop, time.monotonic())
            except Exception:
                logger.critical("internal error while a handler was stopped: %s", stop.exchange, exc_info=True)
        if self._severed:
            self._log_severed()
        return now + PRESS if self._stops else next_look

    def _should_leave(self, exchange: Exchange) -> bool:
        """Whether a handler is to end since its client has left."""
        if self._limits.on_deadline != "sever" and exchange.head.method not in SAFE_METHODS:
            return False
        return exchange.has_left()

    def _time_out(self, thread: PoolThread, exchange: Exchange, option: str, now: float) -> None:
        """The time of a request is over, unless it ends by itself in this moment."""
        with SEIZING:
            seizure = exchange.seize()
            if seizure is Seizure.OVER:
                return
            try:
                self._log(thread, exchange, option, now)
            finally:
                if seizure is Seizure.ANSWERED:
                    exchange.answer_late()
                elif seizure is Seizure.CUT:
                    exchange.cut_off()
                if exchange.timed_out:
                    exchange.is_accounted = True
                    self._account(exchange, now)

    def _log(self, thread: PoolThread, exchange: Exchange, option: str, now: float) -> None:
        frames = frames_of_threads()
        logger.error(
            "timeout: %s is over its %s of %g s after %.2f s, and is stopped; thread jumpstart-%d\n%s",
            exchange,
            option,
            getattr(self._limits, option),
            now - exchange.began,
            thread.number,
            self._stack(frames, thread),
        )
        if now - self._stacks_at >= STACKS_PAUSE:
            self._stacks_at = now
            others = [other for other in self._pool.jobs() if other is not thread][:STACKS]
            if others:
                names = [(f"{other.name}, for {now - other.began:.1f} s", other.ident or 0) for other in others]
                logger.warning("what other threads did at that time:\n%s", stacks_of(names, frames))

    def _press(self, stop: _Stop, now: float) -> None:
        """Have a handler end; see what has become of it."""
        exchange, thread = stop.exchange, stop.thread
        if exchange.is_over:
            del self._stops[exchange]
            if stop.is_overrun:
                logger.info("overrun over after %.1f s: %s", now - stop.since, exchange)
            return
        stop.stopping.press(now)
        if self._limits.on_deadline == "sever" and now >= stop.next_sever and stop.severed < SEVERS:
            self._sever(stop, now)
        if not stop.is_overrun and stop.is_late and now - stop.since >= OVERRUN_GRACE:
            overruns = self._pool.note_overrun(thread, exchange)
            if overruns is None:
                return
            stop.is_overrun = True
            self._abandon(exchange)
            logger.warning(
                "overrun: %s runs on %.1f s after it was stopped; %d such handlers\n%s",
                exchange,
                now - stop.since,
                overruns,
                self._stack(frames_of_threads(), thread),
            )
            if overruns > self._limits.max_overruns and self._renew is not None:
                renew, self._renew = self._renew, None
                renew(f"overruns: {overruns} handlers run on although they were stopped (--max-overruns)")

    def _sever(self, stop: _Stop, now: float) -> None:
        native_id = stop.thread.native_id
        if native_id is None:
            return
        with stop.thread.interrupts.hold(stop.exchange) as runs:
            severed = sever(native_id, self._is_ours) if runs else None
        if severed is not None:
            stop.severed += 1
            stop.next_sever = now + SEVER_PAUSE
            self._severed.append(f"severed: the socket that {stop.exchange} waited on was shut down, {severed}")

    def _stack(self, frames: Mapping[int, FrameType], thread: PoolThread) -> str:
        self._stacks_logged += 1
        if self._stacks_logged > BURST:
            return "  (its stack is left out: there are enough above)"
        return stack_of(frames.get(thread.ident or 0))

    def _log_severed(self) -> None:
        severed, self._severed = self._severed, []
        for line in severed[:BURST]:
            logger.info(line)
        if len(severed) > BURST:
            logger.info("severed: %d others", len(severed) - BURST)


def _due(limits: RequestLimits, exchange: Exchange) -> tuple[float, str]:
    """When the time of a request is over, in seconds of the monotonic clock, and by which option."""
    due, option = exchange.context.expires, "timeout"
    sent_at = exchange.sent_at
    if not sent_at:
        if limits.first_byte_timeout and exchange.began + limits.first_byte_timeout < due:
            due, option = exchange.began + limits.first_byte_timeout, "first_byte_timeout"
    elif limits.idle_timeout and not exchange.in_send and sent_at + limits.idle_timeout < due:
        due, option = sent_at + limits.idle_timeout, "idle_timeout"
    return due, option


def _is_sending(exchange: Exchange, due: float, now: float) -> bool:
    """
    Whether a response may be going out whole in this moment.

    To cut it off would cost the next request on the connection, of which the client has been told that it is kept.
    """
    return now - due < SEND_GRACE and (exchange.in_send or now - exchange.sent_at < ON_ITS_WAY)
