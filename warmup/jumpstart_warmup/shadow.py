"""
When a shadow request may run: the queue of one worker and its budget. Pure: values and times in, a decision out.

Two lanes. *cold* ones repeat what met cold work in a sibling: each saves a real request from paying for it, so they
wait for an idle moment for a while, and may use what was saved up. *random* ones keep warm what nobody has called cold:
they run at once or not at all, and only on what the budget gives minute by minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from jumpstart.guard import MAX_KINDS, Refusal
from jumpstart_warmup.corpus import WarmRequest

Lane = Literal["cold", "random"]

MOST_COLD, MOST_RANDOM = 64, 8  # that wait
PATIENCE = {"cold": 60.0, "random": 2.0}  # seconds that one waits for an idle moment
SAVED_CPU = 5.0  # seconds on the CPU that are saved up for cold ones
MINUTE = 60.0


class ShadowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """
    What became of shadow requests, of one worker or of several added up.

    Attributes:
        done: those that ran, failed ones too.
        failed: the app raised, answered with 5xx, or was not done in time.
        cold_requests: those that met cold work: what they have spared real requests.
        cold_events: kind → number.
        dropped: reason → number: ``twice``, it waits already; ``full``; ``expired`` and ``busy``, no idle moment came,
            for a cold or a random one; ``budget``; ``one-thread``, real requests have no second one either.
        cpu_s: seconds on the CPU.
        waiting: just now.
        effects: what the guard has refused.
    """

    done: int = 0
    failed: int = 0
    cold_requests: int = 0
    cold_events: dict[str, int] = {}
    dropped: dict[str, int] = {}
    cpu_s: float = 0.0
    waiting: int = 0
    effects: tuple[Refusal, ...] = ()


def add_counts(one: ShadowCounts, two: ShadowCounts) -> ShadowCounts:
    """Both together."""
    return ShadowCounts(
        done=one.done + two.done,
        failed=one.failed + two.failed,
        cold_requests=one.cold_requests + two.cold_requests,
        cold_events=_sum(one.cold_events, two.cold_events),
        dropped=_sum(one.dropped, two.dropped),
        cpu_s=one.cpu_s + two.cpu_s,
        waiting=one.waiting + two.waiting,
        effects=_sum_effects(one.effects, two.effects),
    )


def _sum(one: dict[str, int], two: dict[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + two.get(key, 0) for key in {**one, **two}}


def _sum_effects(one: Iterable[Refusal], two: Iterable[Refusal]) -> tuple[Refusal, ...]:
    counts: dict[tuple[str, str, str], int] = {}
    for each in (*one, *two):
        key = (each.route, each.effect, each.what)
        counts[key] = counts.get(key, 0) + each.count
    merged = sorted((Refusal(*key, count) for key, count in counts.items()), key=lambda each: -each.count)
    return tuple(merged[:MAX_KINDS])


class Allowance:
    """
    A budget that fills up with time, of requests and of seconds on the CPU.

    It begins full, and may fall below nothing, since nobody knows before what a request will take: then it must be made
    up for before the next one runs.
    """

    def __init__(self, per_minute: float, cpu_share: float, now: float) -> None:
        """
        Args:
            per_minute: requests.
            cpu_share: of one core.
        """
        self._per_minute = per_minute
        self._cpu_share = cpu_share
        self._requests = per_minute
        self._cpu_s = SAVED_CPU
        self._at = now

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._at = now
        self._requests = min(self._per_minute, self._requests + passed * self._per_minute / MINUTE)
        most = SAVED_CPU + MINUTE * self._cpu_share
        self._cpu_s = min(most, self._cpu_s + passed * self._cpu_share)

    def allows(self, lane: Lane, now: float) -> bool:
        """Whether a request may run now. Random ones leave alone what is saved up for cold ones."""
        if not self._cpu_share:
            return False
        self._fill(now)
        reserve = SAVED_CPU if lane == "random" else 0.0
        least = 1 + (self._per_minute / 2 if lane == "random" else 0)
        return self._requests >= least and self._cpu_s > reserve

    def spend(self, cpu_s: float, now: float) -> None:
        """One request has taken so much."""
        self._fill(now)
        self._requests -= 1
        self._cpu_s -= cpu_s


class Waiting(msgspec.Struct, frozen=True):
    """A shadow request that has not run yet, and since when. *route* is that of the real one."""

    request: WarmRequest
    lane: Lane
    since: float
    route: str = ""


class ShadowQueue:
    """What waits in one worker, and the books of it."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._lanes: dict[Lane, deque[Waiting]] = {"cold": deque(), "random": deque()}
        self._done = self._failed = self._cold_requests = 0
        self._cold_events: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._cpu_s = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def offer(self, request: WarmRequest, lane: Lane, now: float, route: str = "") -> bool:
        """Let *request* wait, if there is room. One that waits already, in the same lane, need not twice."""
        queue = self._lanes[lane]
        if lane == "random" and not self._allowance.allows(lane, now):
            self.drop("budget")
            return False
        if any(each.request == request for each in queue):
            self.drop("twice")
            return False
        if len(queue) >= (MOST_COLD if lane == "cold" else MOST_RANDOM):
            self.drop("full")
            return False
        queue.append(Waiting(request, lane, now, route))
        return True

    def holds(self, lane: Lane) -> bool:
        """Whether any of *lane* waits."""
        return bool(self._lanes[lane])

    def take(self, now: float, *, idle: bool, very_idle: bool) -> Waiting | None:
        """
        The next one that may run now, cold ones first.

        Args:
            idle: a handler could begin now, and none waits.
            very_idle: and the interpreter has nothing else to do. Random ones want that.
        """
        for lane, queue in self._lanes.items():
            while queue and now - queue[0].since >= PATIENCE[lane]:
                queue.popleft()
                self.drop("expired" if lane == "cold" else "busy")
            if not queue:
                continue
            if not self._allowance.allows(lane, now):
                while lane == "random" and queue:
                    queue.popleft()
                    self.drop("budget")
                continue
            if idle and (lane == "cold" or very_idle):
                return queue.popleft()
            while lane == "random" and queue:  # to look again and again would be a burden on who is busy
                queue.popleft()
                self.drop("busy")
        return None

    def clear(self, reason: str) -> None:
        """None of those that wait will run."""
        for queue in self._lanes.values():
            while queue:
                queue.popleft()
                self.drop(reason)

    def ran(self, *, failed: bool, events: list[tuple[str, str]], cpu_s: float, now: float) -> None:
        """One has ended."""
        self._allowance.spend(cpu_s, now)
        self._done += 1
        self._failed += failed
        self._cpu_s += cpu_s
        if events:
            self._cold_requests += 1
            for kind, _ in events:
                self._cold_events[kind] = self._cold_events.get(kind, 0) + 1

    def drop(self, reason: str) -> None:
        """Count one that will not run; *reason* as in `ShadowCounts`."""
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def counts(self) -> ShadowCounts:
        """The books."""
        return ShadowCounts(
            done=self._done,
            failed=self._failed,
            cold_requests=self._cold_requests,
            cold_events=dict(self._cold_events),
            dropped=dict(self._dropped),
            cpu_s=self._cpu_s,
            waiting=len(self),
        )
