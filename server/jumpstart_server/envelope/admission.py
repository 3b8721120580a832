"""
Who may wait for a slot, for how long, and who is next: controlled delay with adaptive LIFO.

After "Fail at Scale" (Maurer, ACM Queue 13, 8, 2015): a queue that stands makes every request wait as long as it is
allowed to wait, and serves those whose clients have given up. So under overload a newcomer may wait for a short time
only, and the newest is served first: it is the one that somebody still waits for.

There, a queue that was not empty for 100 ms is overloaded. That is a measure for handlers of a millisecond; here they
may take seconds, and a burst of them is no overload if it is served in time. So the measure is the time that the
operator lets requests wait. Overload is when both are true:

- the oldest has waited for more than half of it;
- at the rate at which slots become free a newcomer would have to wait for more than half of it, too.

The two halves together mean: a burst on an idle server is overload exactly if it cannot be served in the time.
Under overload a newcomer may wait for half of the time; who came before it may still wait for all of it.
Overload is over when the queue is empty, or a newcomer would have to wait for less than a quarter.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from jumpstart_warmup.observe import BUCKETS_S

T = TypeVar("T")

SLOTS = 16  # parts of the time over which the rate is measured
LONGEST_RETRY = 60  # seconds that a client is told to stay away at most


class Waiter(NamedTuple, Generic[T]):
    """Somebody who waits, and since when, in seconds of the caller's clock."""

    item: T
    since: float


class Admission(Generic[T]):
    """
    A bounded queue. Pure: every method is given the time. One caller at a time.

    Who was taken in comes out once: from `take` in time, from `take_late` after it, or by `withdraw`.

    Attributes:
        limit: how many may wait.
        size: how many wait; to be read at any time.
        is_overloaded: newcomers may wait for half of the time only, and the newest is next. As of the last call.
        waits: how long those waited that got a slot, by `BUCKETS_S`, and the rest; not cumulative.
        waits_sum_s: seconds, of all of them.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        """
        Args:
            limit: most that may wait.
            timeout_s: how long one may wait, in seconds; 0 for ever, and then there is no overload either.
        """
        self.size = 0
        self.is_overloaded = False
        self.waits = [0] * (len(BUCKETS_S) + 1)
        self.waits_sum_s = 0.0
        self.limit = limit
        self._timeout_s = timeout_s or math.inf
        self._half_s = self._timeout_s / 2
        # Both are in the order in which they came, and who is in the second came after all in the first.
        self._patient: deque[Waiter[T]] = deque()  # may wait for all of the time
        self._hurried: deque[Waiter[T]] = deque()  # came under overload
        self._late: deque[Waiter[T]] = deque()
        self._slot_s = self._half_s / SLOTS if timeout_s else 1.0  # seconds
        self._standing_since = 0.0
        # Of this time at most: slots of time, how many were taken in each, and the sum.
        self._slots: deque[int] = deque()
        self._taken: deque[int] = deque()
        self._taken_sum = 0

    def __iter__(self) -> Iterator[T]:
        """All that wait."""
        return (waiter.item for queue in (self._late, self._patient, self._hurried) for waiter in queue)

    def offer(self, item: T, now: float) -> bool:
        """Take *item* in; False if too many wait already."""
        if self.size >= self.limit:
            return False
        if self.size:
            if self.is_overloaded or not self._is_calm(now):
                self._look(now)
        else:
            self.is_overloaded = False
            self._standing_since = now
            self._slots.clear()
            self._taken.clear()
            self._taken_sum = 0
        (self._hurried if self.is_overloaded else self._patient).append(Waiter(item, now))
        self.size += 1
        return True

    def take(self, now: float) -> Waiter[T] | None:
        """Who gets the slot that is free now. Never one whose time is up."""
        if not self.is_overloaded and self._is_calm(now):
            waiter = self._patient.popleft()
        else:
            self._look(now)
            self._put_late_aside(now)
            queue = self._hurried or self._patient
            if not queue:
                return None
            waiter = queue.pop() if self.is_overloaded else queue.popleft()
        self.size -= 1
        waited = max(now - waiter.since, 0.0)
        self.waits[bisect_left(BUCKETS_S, waited)] += 1
        self.waits_sum_s += waited
        self._count(now)
        return waiter

    def take_late(self, now: float) -> Waiter[T] | None:
        """One whose time is up; it is to be told so."""
        self._look(now)
        self._put_late_aside(now)
        if not self._late:
            return None
        self.size -= 1
        return self._late.popleft()

    def take_any(self) -> Waiter[T] | None:
        """Anyone, whoever it is: when there will be no slots any more."""
        for queue in (self._late, self._patient, self._hurried):
            if queue:
                self.size -= 1
                return queue.popleft()
        return None

    def withdraw(self, item: T) -> bool:
        """Let *item* wait no longer; False if it does not wait. Takes time in proportion to the queue's length."""
        for queue in (self._patient, self._hurried, self._late):
            for waiter in queue:
                if waiter.item is item:
                    queue.remove(waiter)
                    self.size -= 1
                    return True
        return False

    def oldest_wait_s(self, now: float) -> float:
        """How long that one has waited that has waited longest, in seconds; 0 if none waits."""
        return max((now - queue[0].since for queue in (self._late, self._patient, self._hurried) if queue), default=0.0)

    def expected_wait_s(self, now: float) -> float:
        """How long a newcomer would wait behind all others, in seconds, at the rate of late; infinite without any."""
        if not self.size:
            return 0.0
        first = self._forget(now)
        if not self._taken_sum:
            return math.inf
        span = now - max(self._standing_since, first * self._slot_s)
        return self.size * span / self._taken_sum

    def retry_after_s(self, now: float) -> int:
        """
        When a client that is sent away may try again, in whole seconds: when those that wait are served, about.

        If none of them was served yet, nobody can know; then in as long a time as that lasts already.
        """
        expected = self.expected_wait_s(now)
        if expected == math.inf:
            expected = now - self._standing_since
        return max(1, math.ceil(min(expected, self._timeout_s, LONGEST_RETRY)))

    def next_look(self, now: float) -> float:
        """When `take_late` should be called next, in seconds of the caller's clock; infinite if none waits."""
        if self._late:
            return now
        ends = [math.inf]
        if self._patient:
            since = self._patient[0].since
            ends.append(since + self._timeout_s)
            if now < since + self._half_s:
                ends.append(since + self._half_s)
        if self._hurried:
            ends.append(self._hurried[0].since + self._half_s)
        return min(ends)

    def _is_calm(self, now: float) -> bool:
        """Whether one waits, and none for so long that `_look` could find anything."""
        patient = self._patient
        return bool(patient) and now < patient[0].since + self._half_s

    def _look(self, now: float) -> None:
        """Is it overloaded?"""
        if self.is_overloaded:
            if not self._patient and not self._hurried:
                self.is_overloaded = False
            elif self.expected_wait_s(now) < self._half_s / 2:
                self.is_overloaded = False
                self._patient.extend(self._hurried)
                self._hurried.clear()
        elif self._patient and now >= self._patient[0].since + self._half_s:
            self.is_overloaded = self.expected_wait_s(now) > self._half_s

    def _put_late_aside(self, now: float) -> None:
        for queue, limit in ((self._patient, self._timeout_s), (self._hurried, self._half_s)):
            while queue and now >= queue[0].since + limit:
                self._late.append(queue.popleft())

    def _count(self, now: float) -> None:
        """One was taken."""
        slot = int(now / self._slot_s)
        if self._slots and self._slots[-1] == slot:
            self._taken[-1] += 1
        else:
            self._slots.append(slot)
            self._taken.append(1)
            self._forget(now)
        self._taken_sum += 1

    def _forget(self, now: float) -> int:
        """Count those no more that were taken long ago. Returns the first slot of time that counts."""
        first = int(now / self._slot_s) - SLOTS + 1
        while self._slots and self._slots[0] < first:
            self._slots.popleft()
            self._taken_sum -= self._taken.popleft()
        return first
