"""
The timers of connections, at no cost per request.

A connection's deadline is an attribute that its owner sets. This list holds each connection once, in a bucket of the
time when to look at it; a look that comes too early puts it into a later bucket. So a request that prolongs the
keep-alive by another 75 seconds touches nothing here.

The owner sets a deadline without a lock: it writes `deadline`, then reads `look_at`. Here it is the other way round,
`look_at` is written and then `deadline` read again. So one of the two sees that the deadline has become earlier.
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


class Timers:
    """Buckets of connections. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, set[Timed]] = {}

    def __len__(self) -> int:
        """How many it holds."""
        with self._lock:
            return sum(map(len, self._buckets.values()))

    def watch(self, timed: Timed, now: float) -> None:
        """See to it that it is looked at by its deadline. To be called when that is earlier than its `look_at`."""
        with self._lock:
            self._take_out(timed)
            self._put(timed, now)

    def forget(self, timed: Timed) -> None:
        """Hold it no longer."""
        with self._lock:
            self._take_out(timed)

    def expired(self, now: float) -> list[Timed]:
        """Those whose deadline has passed; they are not looked at again until `watch` is called for them."""
        due: list[Timed] = []
        with self._lock:
            for number in [number for number in self._buckets if number * GRAIN <= now]:
                for timed in self._buckets.pop(number):
                    timed.look_at = 0.0
                    deadline = timed.deadline
                    if deadline == GONE:
                        continue
                    if deadline <= now:
                        due.append(timed)
                    else:
                        self._put(timed, now)
        return due

    def _put(self, timed: Timed, now: float) -> None:
        while True:
            deadline = timed.deadline
            # What has no deadline is not left out: its owner may be about to set one.
            look_at = now + NEXT_LOOK if deadline == NEVER else max(deadline, now)
            timed.look_at = look_at
            if timed.deadline >= deadline:
                break
        self._buckets.setdefault(_bucket(look_at), set()).add(timed)

    def _take_out(self, timed: Timed) -> None:
        if timed.look_at:
            number = _bucket(timed.look_at)
            bucket = self._buckets.get(number)
            if bucket is not None:
                bucket.discard(timed)
                if not bucket:
                    del self._buckets[number]


def _bucket(when: float) -> int:
    return int(when / GRAIN) + 1
