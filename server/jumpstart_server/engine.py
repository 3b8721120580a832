"""What a worker asks of its engine: the part that speaks ASGI or WSGI on the sockets, and owns the app's threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

BecomeReady = Callable[[dict[str, Any]], Awaitable[None]]

CANCEL_GRACE = 1.0  # seconds that tasks of the app may take to end after they were cancelled


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """
    The threads that run the app's sync code, at one moment.

    Attributes:
        threads: that live.
        busy: that run something now.
        waiting: jobs that wait for a thread.
        peak: most that were busy at once since the start.
        limit: how many there may be, without a reserve.
        oldest_wait_s: how long the job has waited that has waited longest; 0 when none waits.
    """

    threads: int = 0
    busy: int = 0
    waiting: int = 0
    peak: int = 0
    limit: int = 0
    oldest_wait_s: float = 0.0


class Engine(Protocol):
    """
    One of them per worker, used in the worker's event loop only.

    It is made from the app, the tenant's settings, the bound sockets and two callbacks: ``become_ready(state)`` is
    awaited once after the app's own start-up and before the first connection is accepted, ``stopped_accepting()`` is
    called once in a drain, when all connections that waited are taken and no more will be.
    """

    @property
    def started(self) -> bool:
        """Whether it has come so far as to accept."""

    async def serve(self) -> None:
        """
        Start the app, become ready, accept; return when it was drained.

        Raises:
            AppLoadError: the app's start-up failed.
            AppShutdownError: its shut-down failed; everything was drained all the same.
        """

    def drain(self) -> None:
        """
        Take no more connections, finish the requests in flight, end the app; `serve` then returns.

        Before it accepts, this ends the start-up. Again and again does no harm.
        """

    def stats(self) -> PoolStats:
        """Look at the threads."""
