"""
The one background thread of a process that sees to it that values are fetched again in time.

It never fetches: each fetch has a thread for as long as it lasts, so that one that hangs stops no other. The thread
starts with the first value that is used, ends when there is none left, and is not there while `suspended`: a process
that workers are forked from must have no threads. A fork leaves it behind; the child starts its own.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)

LONGEST_SLEEP = 30.0  # seconds; so that it ends some time after its last value was dropped


class Polled(Protocol):
    """What is polled. Hashable by identity; referred to weakly."""

    def look(self) -> float:
        """Begin or give up fetches as the time demands; returns the seconds until it wants to be asked again."""


class Poller:
    """One per process. Any thread may call it."""

    def __init__(self) -> None:
        self._items: weakref.WeakSet[Polled] = weakref.WeakSet()
        self.reset()

    def reset(self) -> None:
        """Begin anew without a thread: after a fork, whose child has only the thread that forked."""
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._news = False
        self._stopping = False
        self.suspended = False

    def add(self, item: Polled) -> None:
        """Look after *item* from now on, and look at it at once. Does nothing while suspended."""
        with self._changed:
            if self.suspended:
                return
            self._items.add(item)
            self._news = True
            if self._thread is None:
                self._stopping = False
                self._thread = _Thread(self)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads, or the interpreter ends
                    self._thread = None
                    logger.warning("real-time values are not fetched: their thread cannot be started", exc_info=True)
            else:
                self._changed.notify()

    def drop(self, item: Polled) -> None:
        """Leave *item* alone from now on."""
        with self._changed:
            self._items.discard(item)
            self.wake_locked()

    def wake(self) -> None:
        """Look at all of them at once."""
        with self._changed:
            self.wake_locked()

    def wake_locked(self) -> None:
        self._news = True
        self._changed.notify()

    def suspend(self) -> None:
        """End the thread and start none until `resume`; what is under way goes on. Waits for the thread's end."""
        with self._changed:
            self.suspended = True
            self._stopping = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def resume(self) -> None:
        """Let `add` start the thread again."""
        with self._changed:
            self.suspended = False

    def is_running(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def run(self) -> None:
        """The thread."""
        while True:
            with self._changed:
                self._news = False
                items = list(self._items)
                if self._stopping or not items:
                    self._thread = None
                    return
            pause = min(LONGEST_SLEEP, *map(_look, items), LONGEST_SLEEP)
            items.clear()  # what nobody else refers to ends here
            until = time.monotonic() + pause
            with self._changed:
                while not self._news and not self._stopping and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)


def _look(item: Polled) -> float:
    try:
        return item.look()
    except Exception:
        logger.exception("internal error: %r was not looked at", item)
        return LONGEST_SLEEP


class _Thread(threading.Thread):
    def __init__(self, poller: Poller) -> None:
        super().__init__(name="jumpstart-polling", daemon=True)
        self._poller = poller

    def run(self) -> None:
        self._poller.run()


poller = Poller()
