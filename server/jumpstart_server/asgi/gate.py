"""
How many requests of a worker run at once (``--limit-concurrency``), and which of the others wait for their turn.

Counted is what runs: idle connections are not, nor what waits. A WebSocket runs as long as it is open; one that finds
no room is refused, since its client has no use for a handshake that takes seconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jumpstart_server.envelope.admission import Admission
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.refusals import Refusals

if TYPE_CHECKING:
    from jumpstart_server.asgi.exchange import Exchange


class Cap:
    """How many requests may run at once just now, since memory is short; None: as many as come."""

    def __init__(self) -> None:
        self.most: int | None = None
        self.reason = ""


class Gate:
    """
    One for all connections of a server, in its event loop only.

    Attributes:
        queue: who waits, and the books.
        is_unlimited: nobody ever waits.
        watch: called when somebody waits, so that somebody calls `look` again and again.
    """

    def __init__(self, limits: RequestLimits, cap: Cap, running: set[asyncio.Task[None]], refusals: Refusals) -> None:
        """*running*: uvicorn's tasks, those of WebSockets too."""
        self.queue: Admission[Exchange] = Admission(limits.queue, limits.queue_timeout)
        self._limit = limits.limit_concurrency or math.inf
        self.is_unlimited = not limits.limit_concurrency
        self.watch: Callable[[], None] = lambda: None
        self._cap = cap
        self._running = running
        self._refusals = refusals

    def enter(self, exchange: Exchange) -> None:
        """Let *exchange*, which may not start now, wait, or have it answered with 503."""
        if self.is_capped:
            exchange.turn_away(self._cap.reason, 1)
        else:
            now = time.monotonic()
            if not self.queue.offer(exchange, now):
                self._refusals.count("queue_full")
                exchange.turn_away("too many requests wait", self.queue.retry_after_s(now))
            self.watch()

    @property
    def is_open(self) -> bool:
        """A request may start now, and none waits that came before it."""
        if self.is_unlimited and self._cap.most is None:
            return True
        return len(self._running) < self._limit and not self.queue.size and not self.is_capped

    @property
    def is_capped(self) -> bool:
        """Memory is short: requests are answered with 503, and none waits."""
        most = self._cap.most
        return most is not None and len(self._running) >= most

    @property
    def is_full(self) -> bool:
        """What cannot wait finds no room."""
        return self.is_capped or len(self._running) >= self._limit

    def look(self, now: float) -> None:
        """Start those whose turn it is; answer those that have waited for too long. *now*: on the monotonic clock."""
        queue = self.queue
        while len(self._running) < self._limit:
            waiter = queue.take(now)
            if waiter is None:
                break
            waiter.item.connection.start(waiter.item)
        while (late := queue.take_late(now)) is not None:
            self._refusals.count("queue_timeout")
            late.item.turn_away("it was not this request's turn in time", queue.retry_after_s(now))

    def turn_all_away(self) -> None:
        """The server ends: nobody's turn will come."""
        while (waiter := self.queue.take_any()) is not None:
            waiter.item.turn_away("the server stops", 0)
