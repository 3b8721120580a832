"""Requests that have come whole and wait for a thread: `Admission`, for many threads, and what is logged about it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from jumpstart_server.envelope.admission import Admission
from jumpstart_server.envelope.stacks import frames_of_threads, stacks_of
from jumpstart_server.wsgi.connection import Connection
from jumpstart_server.wsgi.pool import ThreadPool

logger = logging.getLogger(__name__)

BUSY_WARNING = 10.0  # seconds that a request may wait for a thread before the stacks of all are logged; or overload
BUSY_WARNING_PAUSE = 60.0
STACKS = 10  # of handlers that run, in that warning


class Waiting:
    """
    The queue of one server. Every method may be called from any thread; `warn` from one at a time.

    Attributes:
        queue: who waits, and the books; to be changed by the methods here only. Its `size` may be read by anybody.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        """As of `Admission`."""
        self.queue: Admission[Connection] = Admission(limit, timeout_s)
        self._lock = threading.Lock()
        self._warned_at = -BUSY_WARNING_PAUSE
        self._was_overloaded = False
        self._overloaded_at = 0.0

    def __len__(self) -> int:
        return self.queue.size

    @property
    def room(self) -> int:
        """How many more may wait."""
        return max(0, self.queue.limit - self.queue.size)

    def __iter__(self) -> Iterator[Connection]:
        """Those that wait now."""
        with self._lock:
            return iter(list(self.queue))

    def add(self, connection: Connection, now: float) -> bool:
        """Take over *connection*, which has a whole request; False if too many wait, and it is still the caller's."""
        connection.queued_at = now  # before another thread has it
        with self._lock:
            added = self.queue.offer(connection, now)
        if not added:
            connection.queued_at = 0.0
        return added

    def take(self, now: float) -> Connection | None:
        """The one whose turn it is, now the caller's."""
        with self._lock:
            waiter = self.queue.take(now)
        return None if waiter is None else waiter.item

    def take_late(self, now: float) -> Connection | None:
        """One that has waited for too long, now the caller's."""
        with self._lock:
            waiter = self.queue.take_late(now)
        return None if waiter is None else waiter.item

    def take_any(self) -> Connection | None:
        """Anyone, now the caller's."""
        with self._lock:
            waiter = self.queue.take_any()
        return None if waiter is None else waiter.item

    def next_look(self, now: float) -> float:
        """When to call `take_late` next, in seconds of the monotonic clock."""
        with self._lock:
            return self.queue.next_look(now)

    def retry_after_s(self, now: float) -> int:
        """When a client that is sent away may try again, in seconds."""
        with self._lock:
            return self.queue.retry_after_s(now)

    def oldest_wait_s(self, now: float) -> float:
        """How long the oldest one has waited, in seconds; 0 if none does."""
        with self._lock:
            return self.queue.oldest_wait_s(now)

    def books(self) -> tuple[list[int], float]:
        """How long requests have waited that got a thread: by `BUCKETS_S`, and the sum in seconds."""
        with self._lock:
            return self.queue.waits.copy(), self.queue.waits_sum_s

    def warn(self, now: float, pool: ThreadPool) -> None:
        """Say when overload begins and ends, and where the handlers are meanwhile, so that nobody needs to ask."""
        is_overloaded = self.queue.is_overloaded
        if is_overloaded != self._was_overloaded:
            self._was_overloaded = is_overloaded
            if is_overloaded:
                self._overloaded_at = now
            else:
                logger.warning("the overload is over after %.1f s", now - self._overloaded_at)
        if not self.queue.size or not pool.is_saturated or now - self._warned_at < BUSY_WARNING_PAUSE:
            return
        waited = self.oldest_wait_s(now)
        if waited < BUSY_WARNING and not is_overloaded:
            return
        self._warned_at = now
        jobs = pool.jobs()
        names = [(f"{thread.name}, for {now - thread.began:.1f} s", thread.ident or 0) for thread in jobs[:STACKS]]
        logger.warning(
            "all %d threads are busy, %d requests wait, one for %.0f s%s\n%s",
            len(jobs),
            self.queue.size,
            waited,
            "; overloaded: the newest are served first, and the others shed sooner" if is_overloaded else "",
            stacks_of(names, frames_of_threads()),
        )
