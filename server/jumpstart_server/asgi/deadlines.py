"""
Requests whose time is over: found by a look at all connections, each `SWEEP`, and what becomes of their handlers.

The exchange gives the client its answer and cancels the task; nothing waits for the app. A task that goes on all the
same, and sync code that a thread still runs, is an *overrun*: it is cancelled again some times, and counted until it
ends. Too many of them, and the worker asks to be replaced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from jumpstart_server.asgi.gate import Gate
from jumpstart_server.asgi.stacks import stack_of_task
from jumpstart_server.asgi.threads import Threads
from jumpstart_server.envelope.limits import RequestLimits

if TYPE_CHECKING:
    from jumpstart_server.asgi.exchange import Exchange

logger = logging.getLogger(__name__)

SWEEP = 0.1  # seconds between two looks; no timer per request
OVERRUN_GRACE = 1.0  # seconds that a handler may take to end after it was stopped
PAUSES = (2.0, 4.0, 8.0, 16.0)  # seconds until it is cancelled again; then it is left alone
BURST = 20  # stacks in one look; when hundreds are over at once they wait for the same thing


class _Stopped:
    """A task that was cancelled and has not ended."""

    __slots__ = ("is_overrun", "next", "pauses", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.pauses = list(PAUSES)
        self.next = now + self.pauses.pop(0)
        self.is_overrun = False


class Deadlines:
    """
    One for all requests of a server, in its event loop only.

    Attributes:
        orphans: that have lost their connection, and whose handlers run.
        is_asleep: `watch` is to be called with the next one.
    """

    def __init__(
        self,
        limits: RequestLimits,
        gate: Gate,
        threads: Threads | None,
        renew: Callable[[str], None] | None,
        connections: Collection[object],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """
        Args:
            threads: that run sync code of the app; None where others than ours do.
            renew: is told, once, why this process should be replaced.
            connections: uvicorn's; those of ours have an ``exchange``.
        """
        self.orphans: set[Exchange] = set()
        self._connections = connections
        self._limits = limits
        self._gate = gate
        self._threads = threads
        self._renew = renew
        self._loop = loop
        self._has_limits = bool(limits.timeout or limits.first_byte_timeout or limits.idle_timeout)
        self.is_asleep = self._has_limits
        self._timer: asyncio.TimerHandle | None = None
        self._stacks = 0  # in this look
        self._stopped: dict[Exchange, _Stopped] = {}
        gate.watch = self.watch

    @property
    def overruns(self) -> int:
        """How many handlers run on although they were stopped: tasks and threads."""
        tasks = sum(1 for stopped in self._stopped.values() if stopped.is_overrun)
        return tasks + (0 if self._threads is None else self._threads.overruns)

    def watch(self) -> None:
        """There is something to look at."""
        if self._timer is None:
            self.is_asleep = False
            self._timer = self._loop.call_later(SWEEP, self._sweep)

    def stop(self, exchange: Exchange, task: asyncio.Task[None], message: str) -> None:
        """Cancel the handler of *exchange* and interrupt its threads, now and again as long as it goes on."""
        if self._threads is not None:
            self._threads.stop(exchange.context)
        task.cancel(message)
        self._stopped[exchange] = _Stopped(time.monotonic())
        self.watch()

    def stop_for_nobody(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        """The client has left: as `stop`, but a task that goes on may do so; it may have to clean up."""
        if self._threads is not None:
            self._threads.stop(exchange.context)
        task.cancel("the client left")
        self.watch()

    def stacks(self, exchange: Exchange, task: asyncio.Task[None]) -> str:
        """Where the handler stands, for the log."""
        self._stacks += 1
        if self._stacks > BURST:
            return "  (many are over at once; see those before)"
        found = [stack_of_task(task)]
        if self._threads is not None:
            found += self._threads.stacks(exchange.context)
        return "\n".join(found)

    def _sweep(self) -> None:
        self._timer = None
        self._stacks = 0
        now = time.monotonic()
        running = self._running() if self._has_limits else []
        for exchange in running:
            if exchange.due <= now:
                exchange.look_at_the_clock(now)
        self._gate.look(now)
        for exchange, stopped in list(self._stopped.items()):
            self._press(exchange, stopped, now)
        if self._threads is not None:
            self._threads.press(now)
        if self._renew is not None and self.overruns > self._limits.max_overruns:
            renew, self._renew = self._renew, None
            renew(f"overruns: {self.overruns} handlers run on although they were stopped (--max-overruns)")
        is_busy = self._threads is not None and self._threads.has_stopped
        if self._stopped or self._gate.queue.size or is_busy or running:
            self.watch()
        else:
            self.is_asleep = self._has_limits

    def _running(self) -> list[Exchange]:
        """Whose handlers run and have not answered. Nobody keeps a list of these: that would cost each request."""
        held: list[Exchange | None] = [getattr(connection, "exchange", None) for connection in self._connections]
        return [*self.orphans, *(each for each in held if each is not None and each.task is not None)]

    def _press(self, exchange: Exchange, stopped: _Stopped, now: float) -> None:
        task = exchange.task
        if task is None or task.done():
            del self._stopped[exchange]
            if stopped.is_overrun:
                logger.info("overrun over: %s", exchange.describe(now))
            return
        if now - stopped.since >= OVERRUN_GRACE and not stopped.is_overrun:
            stopped.is_overrun = True
            logger.warning(
                "overrun: %s runs on %.1f s after it was cancelled\n%s",
                *(exchange.describe(now), now - stopped.since, self.stacks(exchange, task)),
            )
        if now >= stopped.next:
            task.cancel("the request was stopped before")
            stopped.next = now + stopped.pauses.pop(0) if stopped.pauses else float("inf")
