"""
The threads that run handlers, and who of them waits for events.

There is no thread in front of the pool that reads and hands over: a hand-over between two threads costs more than
reading and parsing. Each thread looks for work itself and does it. At any time it is

=========  ===============================================================================================
seeking    takes the next event; also while it runs a handler that is known to be quick
polling    blocked in epoll_wait
parked     waits to be woken, last come first served; leaves after `IDLE_TIME`
busy       runs a handler that may take long
=========  ===============================================================================================

Two rules keep events from lying around. Who turns busy sees to it first that another one seeks or polls (`_attend`).
And the keeper, a thread that runs no handlers, looks every `TICK` while there is traffic: a quick handler that was not
quick is counted busy, and when nobody seeks or polls somebody is woken; when all threads are busy it polls itself, so
that requests are read into the queue, are shed in time, and clients that leave are noticed.

Counts are changed under one lock, which is never held during a system call.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jumpstart_server.connection_settings import COMPLAINT_PAUSE
from jumpstart_server.engine import PoolStats
from jumpstart_server.envelope.interrupt import Interrupts
from jumpstart_server.wsgi.syscalls import Calls

logger = logging.getLogger(__name__)

IDLE_TIME = 30.0  # seconds that a thread is parked before it ends
TICK = 0.005  # seconds between the keeper's looks while there is traffic
RESTLESS = 1.0  # seconds without traffic after which it looks no more, until it is woken
MAX_EVENTS = 64  # taken at once
LIVELY = 1000.0  # handlers a second that return; then events are found soon enough by those who return
MAX_WAITING = 1  # threads that wait for events, or are about to
LONGEST_PAUSE = 0.1  # seconds that a thread waits at its end if threads fail again and again
FORGIVEN = 10.0  # seconds without a failure after which the next one is the first again
START_PAUSE = 1.0  # seconds without starting threads after the system refused one
SATURATED_POLL = 0.02  # seconds that the keeper waits for events when it is the only one to do so


class Crew(Protocol):
    """What the pool does its work with: the engine."""

    def handle(self, thread: PoolThread, fd: int, events: int) -> None:
        """Act on an event; may run a handler. The keeper passes itself, and runs none."""

    def next_job(self, thread: PoolThread) -> bool:
        """Run a whole request that waits, if there is one."""

    def has_job(self) -> bool:
        """Whether there is one. Called under the pool's lock: it must only look."""

    def overdue(self, job: Any) -> None:
        """A job that was thought to be quick is not."""

    def note_lag(self, now: float, lag_s: float) -> None:
        """The keeper waited so long for the GIL, in seconds."""

    def broken(self) -> None:
        """The epoll is closed, as by an app that closes all descriptors: nothing can be served any more."""

    def saturated(self, now: float) -> None:
        """The keeper's: all threads are busy. Called again and again, before it looks for events."""

    def tick(self, now: float, restless: bool) -> float:
        """
        The keeper's: timers. Returns when it wants to be called next, in seconds of the monotonic clock.

        *restless*: there is traffic.
        """


class PoolThread(threading.Thread):
    """
    One thread.

    Attributes:
        calls: system calls with memory of its own.
        job: what it runs, for its name; None between jobs.
        began: when it began that, in seconds of the monotonic clock.
        quick: it runs a handler and counts as seeking all the same.
        busy: it is counted as busy, by itself or by the keeper.
        runs_handlers: false for the keeper.
        interrupts: how its job is interrupted; from its start on.
        is_overrun: what it runs was stopped and goes on; another thread may run in its place.
        is_surplus: there are enough without it; it ends when it has done what it does.
    """

    interrupts: Interrupts

    def __init__(self, pool: ThreadPool, number: int, calls: Calls, target: Callable[[PoolThread], None]) -> None:
        self.number = number
        self.calls = calls
        self.job: object = None
        self.began = 0.0
        self.quick = False
        self.busy = False
        self.runs_handlers = True
        self.is_overrun = False
        self.is_surplus = False
        self.bell = threading.Lock()
        self.bell.acquire()
        self._pool = pool
        self._target_of = target
        super().__init__(daemon=True)

    @property
    def name(self) -> str:
        """Named after what it runs."""
        job = self.job
        return f"jumpstart-{self.number}" if job is None else f"jumpstart-{self.number} {job}"

    @name.setter
    def name(self, value: str) -> None:
        pass  # threading gives it one

    def run(self) -> None:
        self.interrupts = Interrupts()
        self._target_of(self)


class ThreadPool:
    """
    Up to *size* threads, started on demand, that take events from *epoll* and give them to the crew.

    Attributes:
        size: the limit.
        crowded: more than one thread wants the GIL; calls that keep it pay.
        max_overruns: threads whose job was stopped and goes on that others may run in the place of.
    """

    def __init__(self, size: int, epoll: select.epoll, crew: Crew, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        self._start_again_at = 0.0
        self._complain_again_at = 0.0
        self.max_overruns = 0
        self.crowded = False
        self._epoll = epoll
        self._crew = crew
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._events: deque[tuple[int, int]] = deque()
        self._threads: dict[int, PoolThread] = {}
        self._parked: list[PoolThread] = []
        self._seeking = 0
        self._polling = 0
        self._returns = 0  # from handlers that took long, since the keeper's last look
        self._lively = False  # so many that no thread need wait for events
        self._looked_at = 0.0
        self._busy = 0
        self._peak = 0
        self._overruns = 0
        self._numbers = 0
        self._failures = 0
        self._failed_at = 0.0
        self._broken = False
        self._stopping = False
        self._saturated = False
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes one of those that poll
        epoll.register(self._alarm, select.EPOLLIN | select.EPOLLET)
        self._restless_until = 0.0
        self._is_stirred = False  # there was traffic since the last tick began
        self._keeper_sleeps = False
        self._keeper = PoolThread(self, 0, Calls(epoll, MAX_EVENTS), self._keep)
        self._keeper.runs_handlers = False

    def start(self) -> None:
        """
        Start the keeper and the first thread.

        Raises:
            RuntimeError: the system has no thread to give.
        """
        with self._lock:
            self._looked_at = self._clock()
            first = self._new_thread()
        self._start(first)
        self._keeper.start()

    def stop(self, timeout_s: float) -> bool:
        """
        End the threads that run nothing, and the others when they are done; wait up to *timeout_s* for them.

        Returns whether all have ended. Requests and events that wait are left.
        """
        with self._lock:
            self._stopping = True
            self._seeking += len(self._parked)
            for thread in self._parked:
                thread.bell.release()
            self._parked.clear()
            self._ring_keeper()
        self._epoll.modify(self._alarm, select.EPOLLIN)  # no edges any more: it wakes all who poll, for ever
        os.eventfd_write(self._alarm, 1)
        with self._lock:
            self._ended.wait_for(lambda: not self._threads, timeout_s)
            left = len(self._threads)
        if self._keeper.ident is not None:
            self._keeper.join(timeout_s or 0.1)
        if left or self._keeper.is_alive():
            return False
        os.close(self._alarm)
        return True

    def stats(self) -> PoolStats:
        """The counts, exact at this moment; what waits is the crew's to know."""
        with self._lock:
            busy = sum(thread.job is not None and not thread.is_overrun for thread in self._threads.values())
            self._peak = max(self._peak, busy)
            return PoolStats(
                threads=len(self._threads),
                busy=busy,
                peak=self._peak,
                limit=self.size,
                overruns=self._overruns,
            )

    def jobs(self) -> list[PoolThread]:
        """The threads that run something, the one that began first in front."""
        with self._lock:
            running = [thread for thread in self._threads.values() if thread.job is not None]
        return sorted(running, key=lambda thread: thread.began)

    def keeper_lag_s(self) -> float:
        """How long the keeper has not looked although it should, in seconds; without end when it is dead."""
        if self._keeper.ident is None or self._keeper_sleeps:
            return 0.0
        return self._clock() - self._looked_at if self._keeper.is_alive() else math.inf

    @property
    def is_saturated(self) -> bool:
        """All threads are busy, and no other can be started."""
        return self._saturated

    @property
    def free(self) -> int:
        """How many more handlers could begin now; about."""
        return self.size + self._replaced() - self._busy

    # ------------------------------------------------------------------ what the crew calls

    def turn_busy(self, me: PoolThread) -> None:
        """The calling thread is about to do something that may take long."""
        fresh = None
        with self._lock:
            if not me.busy:
                self._count_busy(me)
                fresh = self._attend()
        if fresh is not None:
            self._start(fresh)

    def turn_seeking(self, me: PoolThread) -> None:
        """The calling thread has done it."""
        with self._lock:
            self._count_seeking(me)

    def note_overrun(self, thread: PoolThread, job: object) -> int | None:
        """
        *job* was stopped and goes on: let another thread run in the place of the one that has it.

        Returns how many such jobs there are now; None if it has ended meanwhile.
        """
        with self._lock:
            if thread.job is not job or not thread.busy or thread.is_overrun:
                return None
            thread.is_overrun = True
            self._overruns += 1
            self._saturated = False
            overruns = self._overruns
            fresh = self._attend()
        if fresh is not None:
            self._start(fresh)
        return overruns

    def job_waits(self) -> None:
        """There is a whole request for `Crew.next_job`."""
        with self._lock:
            fresh = None if self._seeking else self._wake_one()
        if fresh is not None:
            self._start(fresh)

    @property
    def has_events(self) -> bool:
        """Whether there are events that no thread has taken yet."""
        return bool(self._events)

    def stir(self) -> None:
        """See to it that the keeper does not sleep. From any thread; those of the pool need not."""
        with self._lock:
            self._stir()

    def post(self, fd: int, events: int) -> None:
        """Have a thread look at *fd* as if an event had come. From any thread."""
        self._events.append((fd, events))
        self.job_waits()

    # ------------------------------------------------------------------ under the lock

    def _count_busy(self, thread: PoolThread) -> None:
        thread.busy = True
        self._seeking -= 1
        self._busy += 1
        if self._busy > self._peak:
            self._peak = self._busy

    def _count_seeking(self, me: PoolThread) -> None:
        if me.busy:
            me.busy = False
            self._busy -= 1
            self._seeking += 1
            self._returns += 1
            self._saturated = False
            self.crowded = self._seeking + self._busy > 1
            if me.is_overrun:
                me.is_overrun = False
                self._overruns -= 1
                me.is_surplus = len(self._threads) > self.size + self._replaced()
            if self._keeper_sleeps:
                self._stir()

    def _replaced(self) -> int:
        """How many threads there may be beyond the size."""
        return min(self._overruns, self.max_overruns)

    def _attend(self) -> PoolThread | None:
        """See to it that somebody takes the next event; as `_wake_one`."""
        self.crowded = self._seeking + self._busy > 1
        if self._lively and not self._events and not self._crew.has_job():
            return None  # the next one to return will look
        if self._seeking or (self._polling and not self._events and not self._crew.has_job()):
            return None
        return self._wake_one()

    def _wake_one(self) -> PoolThread | None:
        """Wake a thread; where a new one is needed, return it: the caller starts it when it has let go of the lock."""
        if self._parked:
            self._seeking += 1
            self._parked.pop().bell.release()
        elif self._polling:
            os.eventfd_write(self._alarm, 1)
        elif len(self._threads) < self.size + self._replaced() and not self._stopping and self._may_start():
            return self._new_thread()
        else:
            self._saturated = True
            self._ring_keeper()
        return None

    def _new_thread(self) -> PoolThread:
        self._numbers += 1
        thread = PoolThread(self, self._numbers, Calls(self._epoll, MAX_EVENTS), self._work)
        self._threads[self._numbers] = thread
        self._seeking += 1
        return thread

    def _stir(self) -> None:
        # In this order with its own look under the lock: it sees that it was stirred, or we see it sleep.
        self._restless_until = self._clock() + RESTLESS
        self._is_stirred = True
        self._ring_keeper()

    def _ring_keeper(self) -> None:
        if self._keeper_sleeps:
            self._keeper_sleeps = False
            self._keeper.bell.release()

    # ------------------------------------------------------------------ a thread

    def _start(self, thread: PoolThread) -> None:
        """
        Start a thread that is counted already.

        Raises:
            RuntimeError: the system has no thread to give, and there is none.
        """
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._threads[thread.number]
                self._seeking -= 1
                left = len(self._threads)
                self._start_again_at = self._clock() + START_PAUSE
                if left:
                    self._attend()  # which starts no other one now
            if not left:
                raise
            self._complain_of_starts(left)

    def _may_start(self) -> bool:
        """Whether the system has not refused a thread just now."""
        return not self._start_again_at or self._clock() >= self._start_again_at

    def _complain_of_starts(self, left: int) -> None:
        now = self._clock()
        if now >= self._complain_again_at:
            self._complain_again_at = now + COMPLAINT_PAUSE
            logger.error(
                "the system has no thread to give; going on with %d, trying again each %g s", left, START_PAUSE
            )

    def _work(self, me: PoolThread) -> None:
        crew = self._crew
        events = self._events
        try:
            while not self._stopping:
                if me.busy:
                    self.turn_seeking(me)
                if me.is_surplus:
                    return
                if crew.next_job(me):
                    continue
                try:
                    fd, mask = events.popleft()
                except IndexError:
                    if not self._look(me):
                        return
                    continue
                crew.handle(me, fd, mask)
        except BaseException:
            self._failed(me, f"internal error in {me.name}; it is replaced")
        finally:
            self._end(me)

    def _failed(self, me: PoolThread, line: str) -> None:
        """Say so, and wait if threads fail again and again: what fails at once must not take all the time there is."""
        if not self._is_whole():
            self._end_all()
            return
        now = self._clock()
        logger.critical(line, exc_info=True)
        self._failures = self._failures + 1 if now - self._failed_at < FORGIVEN else 0
        self._failed_at = now
        if self._failures:
            if me.runs_handlers:
                self.turn_busy(me)  # others go on meanwhile
            time.sleep(min(0.001 * 2 ** min(self._failures, 10), LONGEST_PAUSE))

    def _is_whole(self) -> bool:
        """Whether the epoll is still ours. To poll would take an event from it that no thread acts on."""
        try:
            self._epoll.register(self._alarm)
        except FileExistsError:
            return True
        except (OSError, ValueError):
            pass
        return False  # closed; or another file has its number by now

    def _end_all(self) -> None:
        with self._lock:
            self._stopping = True
            was_broken, self._broken = self._broken, True
        if not was_broken:
            logger.critical("the descriptors of this process were closed (os.closerange?); it can serve nothing more")
            self._crew.broken()

    def _look(self, me: PoolThread) -> bool:
        """Wait for events; false to end."""
        if self.crowded:
            found = me.calls.poll()
            if found:
                self._events.extend(found)
                return True
        with self._lock:
            if self._stopping:
                return False
            self._count_seeking(me)
            if self._events or self._crew.has_job():  # which came since, and whose bringer saw that we seek
                return True
            self._seeking -= 1
            self.crowded = self._seeking + self._busy > 1
            # One is enough: others would be woken while it works, and wait for the GIL with what they took.
            park = self._lively or self._polling + self._seeking >= MAX_WAITING
            if park:
                self._parked.append(me)
            else:
                patience = IDLE_TIME if self._polling else -1  # one stays
                self._polling += 1
        if park:
            return self._park(me)
        found = []
        try:
            found = self._epoll.poll(patience, MAX_EVENTS)
        finally:
            with self._lock:
                self._polling -= 1
                self._seeking += 1
                self.crowded = self._seeking + self._busy > 1
                if found:
                    self._stir()
                is_spare = not found and self._polling > 0
        self._events.extend(found)
        return not self._stopping and not is_spare

    def _park(self, me: PoolThread) -> bool:
        """Sleep until woken; false when nobody did."""
        if me.bell.acquire(timeout=IDLE_TIME):
            return not self._stopping
        with self._lock:
            if me in self._parked:
                self._parked.remove(me)
                self._seeking += 1  # `_end` takes it off
                return False
        me.bell.acquire()  # woken at the last moment
        return not self._stopping

    def _end(self, me: PoolThread) -> None:
        with self._lock:
            if me.busy:
                self._busy -= 1
            else:
                self._seeking -= 1
            if me.is_overrun:
                self._overruns -= 1
            self._threads.pop(me.number, None)
            self._saturated = False
            fresh = None if self._stopping else self._attend()
            self._ended.notify_all()
        if fresh is not None:
            self._start(fresh)

    # ------------------------------------------------------------------ the keeper

    def _keep(self, me: PoolThread) -> None:
        next_tick = 0.0
        while not self._stopping:
            now = self._clock()
            restless = now < self._restless_until or self._seeking > 0
            try:
                if now >= next_tick or (next_tick == math.inf and self._is_stirred):
                    next_tick = now + RESTLESS  # should it fail
                    self._is_stirred = False
                    next_tick = self._crew.tick(now, restless)
                self._watch(now)
                if self._saturated:
                    self._crew.saturated(now)
                    self._read_ahead(me)
                    continue
            except Exception:
                self._failed(me, "internal error in the keeper; it goes on")
            if restless:
                began = self._clock()
                time.sleep(TICK)
                ended = self._clock()
                self._crew.note_lag(ended, ended - began - TICK)
                continue
            with self._lock:
                if self._stopping or self._saturated or self._seeking or self._clock() < self._restless_until:
                    continue
                if self._is_stirred:  # since the last tick; the keeper may have had no CPU for long
                    next_tick = 0.0
                    continue
                self._keeper_sleeps = True
            if me.bell.acquire(timeout=min(max(next_tick - now, TICK), 3600.0)):
                next_tick = 0.0
                continue
            with self._lock:
                if self._keeper_sleeps:
                    self._keeper_sleeps = False
                    continue
            me.bell.acquire()  # rung at the last moment

    def _watch(self, now: float) -> None:
        """Count quick handlers that are not quick as busy; wake somebody when nobody waits for events."""
        slow = []
        with self._lock:
            self._lively = self._returns > LIVELY * (now - self._looked_at)
            self._returns = 0
            self._looked_at = now
            for thread in self._threads.values() if self._seeking else ():
                job = thread.job
                if thread.quick and not thread.busy and job is not None and now - thread.began > TICK:
                    self._count_busy(thread)
                    slow.append(job)
            fresh = self._attend()
        if fresh is not None:
            self._start(fresh)
        for job in slow:
            self._crew.overdue(job)

    def _read_ahead(self, me: PoolThread) -> None:
        """All threads are busy: read requests into the queue, and notice who leaves."""
        for fd, mask in self._epoll.poll(SATURATED_POLL, MAX_EVENTS):
            self._crew.handle(me, fd, mask)
        while True:
            try:
                fd, mask = self._events.popleft()
            except IndexError:
                return
            self._crew.handle(me, fd, mask)
