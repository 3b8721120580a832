"""Which single workers are to be replaced, and who is next: one at a time, with a pause where they go young."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from jumpstart_server.lifecycle import Restarts, State
from jumpstart_server.processes import Member

PAUSE = 1.0  # seconds between two renewals at most, where the workers are replaced young


class Renewals:
    """Those of one tenant, in the order in which they were asked for. For the event loop's thread only."""

    def __init__(self, spawn_task: Callable[[Coroutine[Any, Any, None]], None], go_on: Callable[[], None]) -> None:
        """*go_on*: called when a pause is over."""
        self._spawn_task = spawn_task
        self._go_on = go_on
        self._asked: dict[Member, str] = {}
        self._restarts = Restarts()
        self._is_pausing = False

    def ask(self, member: Member, reason: str) -> bool:
        """Have a worker that serves replaced. Asking again changes nothing, and is answered with False."""
        if not member.is_accepting or member in self._asked:
            return False
        self._asked[member] = reason
        return True

    def gone(self, member: Member) -> None:
        """A worker has ended by itself."""
        self._asked.pop(member, None)

    def clear(self) -> None:
        """All workers are replaced at once."""
        self._asked.clear()
        self._restarts = Restarts()

    def next(self, members: Iterable[Member]) -> tuple[Member, str] | None:
        """Who is to be replaced now, and why; None in a pause, and while one of *members* is about to take a place."""
        if self._is_pausing or any(_is_on_its_way(each) for each in members):
            return None
        self._asked = {member: reason for member, reason in self._asked.items() if member.is_accepting}
        return next(iter(self._asked.items()), None)

    def done(self, old: Member) -> None:
        """Another worker accepts in the place of *old*."""
        self._asked.pop(old, None)
        self._restarts, delay = self._restarts.after_exit(time.monotonic() - old.worker.since)
        # It went well, so the pause is short: a worker that leaks is above its limit while it waits for its turn.
        self._pause(min(delay, PAUSE))

    def failed(self) -> float:
        """A worker died before it could take the place. Returns how many seconds the next attempt waits."""
        self._restarts, delay = self._restarts.after_exit(None)
        self._pause(delay)
        return delay

    def _pause(self, delay: float) -> None:
        if delay:
            self._is_pausing = True
            self._spawn_task(self._end_pause(delay))

    async def _end_pause(self, delay: float) -> None:
        await asyncio.sleep(delay)
        self._is_pausing = False
        self._go_on()


def _is_on_its_way(member: Member) -> bool:
    return member.replaces is not None and member.worker.state in (State.STARTING, State.BOOTING, State.READY)
