"""What a worker asks of its engine: the part that speaks ASGI or WSGI on the sockets, and owns the app's threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from jumpstart_warmup.sampling import UnderWay

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
        overloaded: so many wait, for so long, that newcomers are shed sooner.
        waits: how long those waited that had to, and got a thread, by `BUCKETS_S`, and the rest; not cumulative. May be
            empty.
        waits_sum_s: seconds, of all of them.
        refused: requests that got no service, by reason.
        overruns: handlers that run on although their requests were stopped.
    """

    threads: int = 0
    busy: int = 0
    waiting: int = 0
    peak: int = 0
    limit: int = 0
    oldest_wait_s: float = 0.0
    overloaded: bool = False
    waits: list[int] = []
    waits_sum_s: float = 0.0
    refused: dict[str, int] = {}
    overruns: int = 0


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

    def lame_duck(self) -> None:
        """Answer with ``Connection: close`` from now on; go on accepting."""

    def drain(self, patience_s: float = 0.0, *, is_stop: bool = True) -> None:
        """
        Take no more connections, finish the requests in flight, end the app; `serve` then returns.

        Connections that are kept are closed with the answer to their next request, or without one after *patience_s*.
        Before it accepts, this ends the start-up. Again and again does no harm, and a stop may follow a roll.

        Args:
            is_stop: nobody serves on: apps that listen for their client while they stream are told at once that it has
                left. Otherwise they are told when ``--graceful-timeout`` is nearly over.
        """

    def stats(self) -> PoolStats:
        """Look at the threads."""

    def resize(self, threads: int) -> None:
        """Have so many threads at most; once, when the worker is warm and before it accepts."""

    def shed(self, most: int | None, reason: str = "") -> None:
        """Answer new requests with 503 while *most* of them run; None ends that. *reason* is what clients are told."""

    def is_alive(self) -> bool:
        """Whether the engine's own threads do their work; that of the event loop shows in that it answers."""

    def upgraded(self) -> int:
        """How many connections have become WebSockets; the observer does not count these."""

    def in_flight(self) -> int:
        """How many requests run."""

    def underway(self) -> list[UnderWay]:
        """The requests whose response has begun, and which have met cold work."""

    def has_room(self) -> bool:
        """Whether one more request could begin at once, and none waits."""
