"""
The supervisor's children: those of our making, and those that the kernel hands to us when their parents die.

A pid is only signalled while it has not been collected: afterwards its number may belong to somebody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from jumpstart_server import system

logger = logging.getLogger(__name__)

COLLECT_GRACE = 2.0  # seconds that a process may take to end after it has closed its channel
ORPHAN_GRACE = 1.0  # seconds that children which the app left behind may take to end on SIGTERM


class Children:
    """
    The table of child processes. For the event loop's thread only.

    Attributes:
        ours: pids of molds and workers that have not been collected.
    """

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        """*on_exit* is called with the pid of each of ours that has ended."""
        self.ours: set[int] = set()
        self._on_exit = on_exit
        self._statuses: dict[int, int] = {}
        self._strangers: set[int] = set()

    def leave_alone(self, but: int | None) -> None:
        """
        Note the children that are there already, except *but*, as none of our business.

        A shell may have become us: ``backend & exec jumpstart serve``.
        """
        self._strangers = set(system.children()) - {but}

    def reap(self) -> None:
        """Collect every child that has ended: ours, and strangers that the kernel hands to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.ours:
                self.ours.discard(pid)
                self._statuses[pid] = status
                self._on_exit(pid)

    def kill(self, pid: int | None) -> None:
        """Kill a process of ours, unless it was collected or never said who it is."""
        if pid in self.ours:
            assert pid is not None
            self._signal(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill all of ours."""
        for pid in self.ours:
            self._signal(pid, signal.SIGKILL)

    async def status_of(self, pid: int) -> str:
        """The exit of *pid* in words; it is given a moment, for its channel closes before it can be collected."""
        give_up = time.monotonic() + COLLECT_GRACE
        while pid in self.ours and time.monotonic() < give_up:
            self.reap()
            if pid in self.ours:
                await asyncio.sleep(0.01)
        if pid in self.ours:
            self._signal(pid, signal.SIGKILL)  # its channel is closed: it is of no use any more
            self.ours.discard(pid)
            return "closed its channel"
        status = self._statuses.pop(pid, None)
        return system.describe_status(status) if status is not None else "unknown"

    async def end_orphans(self) -> None:
        """End what the app left behind (helpers that it forked): they are our children now, and may hold the port."""
        kill_after = time.monotonic() + ORPHAN_GRACE
        told: set[tuple[int, signal.Signals]] = set()
        while orphans := self._orphans():  # the children of one that ends are ours next
            now = time.monotonic()
            if now > kill_after + ORPHAN_GRACE:
                logger.error("giving up on %s", orphans)
                break
            number = signal.SIGTERM if now < kill_after else signal.SIGKILL
            for pid in orphans:
                if (pid, number) not in told:
                    told.add((pid, number))
                    logger.info("ending pid=%d, which the app left behind", pid)
                    self._signal(pid, number)
            self.reap()
            await asyncio.sleep(0.01)

    def _orphans(self) -> list[int]:
        return [pid for pid in system.children() if pid not in self._strangers]

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
