"""Requests that have come whole and wait for a thread: first come, first served, and none for too long."""

from __future__ import annotations

import logging
import sys
import traceback
from collections import deque
from collections.abc import Sequence

from jumpstart_server.wsgi.connection import Connection
from jumpstart_server.wsgi.pool import PoolThread

logger = logging.getLogger(__name__)

BUSY_WARNING = 10.0  # seconds that a request may wait for a thread before the stacks of all are logged
BUSY_WARNING_PAUSE = 60.0
STACKS = 10  # of handlers that run, in that warning


class Waiting(deque[Connection]):
    """
    The queue of one server; a deque, so that asking whether it is empty costs nothing.

    Every method may be called from any thread; `take_expired` and `warn` from one at a time.
    """

    def __init__(self, limit: int, patience_s: float) -> None:
        """
        Args:
            limit: most requests.
            patience_s: how long one may wait, in seconds; 0 for ever.
        """
        super().__init__()
        self._limit = limit
        self._patience_s = patience_s
        self._warned_at = -BUSY_WARNING_PAUSE

    @property
    def is_full(self) -> bool:
        return len(self) >= self._limit

    def add(self, connection: Connection, now: float) -> None:
        """Take over *connection*, which has a whole request."""
        connection.queued_at = now
        self.append(connection)

    def take(self) -> Connection | None:
        """The one that has waited longest, now the caller's."""
        try:
            return self.popleft()
        except IndexError:
            return None

    def take_expired(self, now: float) -> Connection | None:
        """The next one that has waited for too long, now the caller's."""
        patience = self._patience_s
        try:
            if not patience or now - self[0].queued_at <= patience:
                return None
            connection = self.popleft()
        except IndexError:
            return None
        if now - connection.queued_at > patience:
            return connection
        self.appendleft(connection)  # a thread has taken the first meanwhile
        return None

    def oldest_wait_s(self, now: float) -> float:
        """How long the first one has waited, in seconds; 0 if none does."""
        try:
            since = self[0].queued_at
        except IndexError:
            return 0.0
        return max(now - since, 0.0) if since else 0.0  # 0 where a thread has just taken it

    def warn(self, now: float, jobs: Sequence[PoolThread]) -> None:
        """Say where the handlers are when requests have waited for long, so that nobody needs to ask."""
        waited = self.oldest_wait_s(now)
        if waited < BUSY_WARNING or now - self._warned_at < BUSY_WARNING_PAUSE:
            return
        self._warned_at = now
        frames = sys._current_frames()
        text = [f"all {len(jobs)} threads are busy, {len(self)} requests wait, one for {waited:.0f} s"]
        for thread in jobs[:STACKS]:
            frame = frames.get(thread.ident or 0)
            text.append(f"{thread.name}, for {now - thread.began:.1f} s")
            text.append("".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (just ended)")
        logger.warning("\n".join(text))
