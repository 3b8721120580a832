"""
Deadlines of many connections, at no cost per request.

A connection's deadline is an attribute that its owner sets. This list knows of each connection once, in a bucket of
the time when to look at it; a look that comes too early puts it into a later bucket. So a request that prolongs the
keep-alive by another 75 seconds touches nothing here.
"""

from __future__ import annotations

import threading
from typing import Protocol

NEVER = float("inf")
GONE = -1.0  # the deadline of what need not be looked at any more
GRAIN = 0.25  # seconds of a bucket
NEXT_LOOK = 5.0  # seconds until the next look at what has no deadline now


class Timed(Protocol):
    """
    Something with a deadline.

    Attributes:
        deadline: seconds of the monotonic clock, `NEVER`, or `GONE`.
        look_at: when it is looked at next, 0 for never; this module's to write.
    """

    deadline: float
    look_at: float


class Deadlines:
    """Buckets of connections. `watch` may be called from any thread, `expired` from one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, list[Timed]] = {}

    def watch(self, timed: Timed, now: float) -> None:
        """See to it that it is looked at by its deadline. To be called when that is earlier than its `look_at`."""
        with self._lock:
            self._put(timed, now)

    def expired(self, now: float) -> list[Timed]:
        """Those whose deadline has passed; they are not looked at again until `watch` is called for them."""
        due: list[Timed] = []
        with self._lock:
            for number in [number for number in self._buckets if number * GRAIN <= now]:
                for timed in self._buckets.pop(number):
                    if _bucket(timed.look_at) != number or timed.deadline == GONE:
                        continue  # it was put into an earlier one since
                    if timed.deadline <= now:
                        timed.look_at = 0.0
                        due.append(timed)
                    else:
                        self._put(timed, now)
        return due

    def _put(self, timed: Timed, now: float) -> None:
        # Never left out, since its owner may be setting a deadline just now.
        look_at = min(timed.deadline, now + NEXT_LOOK) if timed.deadline == NEVER else max(timed.deadline, now)
        timed.look_at = look_at
        self._buckets.setdefault(_bucket(look_at), []).append(timed)


def _bucket(when: float) -> int:
    return int(when / GRAIN) + 1
