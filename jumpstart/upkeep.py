"""
When a value that changes is fetched again, and what is known of it. Pure: the clock and the lots are handed in.

One `Upkeep` belongs to one source. Its rules: the last good value is never lost to a failure; the version grows with
each change and never shrinks; an answer that comes late counts unless a later question was answered before; a source
that hangs is asked again, until `MAX_FLYING` questions hang, and then when one of them ends.
"""

from __future__ import annotations

import enum
import math
from typing import Generic, NamedTuple, TypeVar

import msgspec

V = TypeVar("V")

MAX_FLYING = 8  # fetches of one source that may hang at a time; with the pauses between them, an outage of minutes
FIRST_RETRY = 0.5  # seconds at most before the second try of a source that has failed
LONGEST_RETRY = 30.0  # seconds between tries of a source that stays down, unless its ttl is longer


class Origin(enum.StrEnum):
    """Where the present value comes from."""

    NONE = "none"
    DEFAULT = "default"
    PROFILE = "profile"
    SOURCE = "source"


class Rules(NamedTuple):
    """
    All in seconds.

    Attributes:
        ttl: for how long a value is fresh. It is fetched anew somewhat earlier, at a moment drawn by lot.
        timeout: of one fetch.
        negative_ttl: before the second try; None for a part of the ttl. Later tries wait longer and longer.
    """

    ttl: float
    timeout: float
    negative_ttl: float | None = None


class LiveInfo(msgspec.Struct, frozen=True, kw_only=True):
    """
    How current a value is.

    Attributes:
        version: grows with each change; 0: there never was a value.
        origin: ``source``, ``profile``, ``default`` or ``none``.
        age_s: seconds since the source gave it; None where it never did.
        failures: fetches that failed since the last that did not; *failed* and *fetched* count all.
        error: of the last failure, "" after a success.
    """

    kind: str
    name: str
    version: int
    origin: str
    age_s: float | None
    is_stale: bool
    failures: int
    failed: int
    fetched: int
    error: str


class Upkeep(Generic[V]):
    """
    What is known of one source. Not for several threads at a time.

    Attributes:
        value: the last good one, None while *version* is 0.
        version: grows with each value that differs from the one before.
        origin: of the value.
        since: when the value was fetched, on the clock.
        failures: fetches that failed since the last that did not.
        failed, fetched: all of them.
        error: of the last failure, "" after a success.
        due: when to fetch next, on the clock.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.value: V | None = None
        self.version = 0
        self.origin = Origin.NONE
        self.since = -math.inf
        self.failures = 0
        self.failed = 0
        self.fetched = 0
        self.error = ""
        self.due = -math.inf
        self._attempts = 0
        self._answered = 0  # the latest attempt that brought a value
        self._flying: dict[int, float] = {}  # attempt → when it began; those that have not ended
        self._settled: set[int] = set()  # of these, what has answered or is over its time

    # -- questions

    def age(self, now: float) -> float:
        """Seconds since the value was fetched; infinity where it never was."""
        return now - self.since

    def is_stale(self, now: float) -> bool:
        """Whether the value is older than its ttl, or did not come from the source."""
        return self.origin is not Origin.SOURCE or self.age(now) > self.rules.ttl

    def may_begin(self, now: float) -> bool:
        """Whether a fetch is due and possible."""
        return now >= self.due and not (self._flying.keys() - self._settled) and len(self._flying) < MAX_FLYING

    @property
    def is_stuck(self) -> bool:
        """Whether so many fetches hang that none begins until one of them ends."""
        return len(self._flying) >= MAX_FLYING and not (self._flying.keys() - self._settled)

    def next_event(self) -> float:
        """When to look again, on the clock: a fetch is due, or one that is under way is over its time."""
        running = [began for attempt, began in self._flying.items() if attempt not in self._settled]
        if running:
            return min(running) + self.rules.timeout
        return self.due if len(self._flying) < MAX_FLYING else math.inf

    def info(self, kind: str, name: str, now: float) -> LiveInfo:
        """For status pages."""
        age = self.age(now)
        return LiveInfo(
            kind=kind,
            name=name,
            version=self.version,
            origin=str(self.origin),
            age_s=round(age, 3) if age < math.inf else None,
            is_stale=self.is_stale(now),
            failures=self.failures,
            failed=self.failed,
            fetched=self.fetched,
            error=self.error,
        )

    # -- events

    def begin(self, now: float) -> int:
        """A fetch begins; returns its number."""
        self._attempts += 1
        self._flying[self._attempts] = now
        return self._attempts

    def ended(self, attempt: int) -> None:
        """What has fetched is gone: its thread, or the process that it was in."""
        self._flying.pop(attempt, None)
        self._settled.discard(attempt)

    def give_up(self, now: float, lot: float) -> bool:
        """Count fetches that are over their time as failed; whether there was one."""
        late = [
            attempt
            for attempt, began in self._flying.items()
            if attempt not in self._settled and now >= began + self.rules.timeout
        ]
        for attempt in late:
            self._settled.add(attempt)
            stuck = f"; {MAX_FLYING} fetches hang: give the client that fetches a timeout" if self.is_stuck else ""
            self._fail(now, f"no answer within {self.rules.timeout:g} s{stuck}", lot)
        return bool(late)

    def failed_with(self, attempt: int, now: float, error: str, lot: float) -> bool:
        """The fetch has failed; False where that was counted before, since it took too long."""
        is_news = attempt in self._flying and attempt not in self._settled
        self.ended(attempt)
        if is_news:
            self._fail(now, error, lot)
        return is_news

    def succeeded(self, attempt: int, now: float, value: V, *, changed: bool, lot: float) -> bool:
        """The fetch has brought *value*; False where a later one has brought another before, and it is dropped."""
        if attempt <= self._answered:
            return False
        self._answered = attempt
        if attempt in self._flying:
            self._settled.add(attempt)
        self.fetched += 1
        self.failures = 0
        self.error = ""
        self._take(value, now, Origin.SOURCE, changed=changed)
        self.due = now + self.rules.ttl * (0.8 + 0.15 * lot)
        return True

    def fall_back(self, value: V, since: float, origin: Origin) -> bool:
        """Use *value* while nothing better is known; False where there is something."""
        if self.version:
            return False
        self._take(value, since, origin, changed=True)
        return True

    def ask_soon(self, now: float) -> None:
        """Have the next fetch begin at once."""
        self.due = min(self.due, now)

    def forked(self, now: float, lot: float) -> None:
        """This is a copy in another process: the fetches under way are not its own, and siblings have the same due."""
        self.due = now + max(self.due - now, 0.0) * (0.5 + 0.5 * lot)
        self._flying.clear()
        self._settled.clear()

    def _take(self, value: V, since: float, origin: Origin, *, changed: bool) -> None:
        if changed or not self.version:
            self.version += 1
        self.value, self.since, self.origin = value, since, origin

    def _fail(self, now: float, error: str, lot: float) -> None:
        self.failures += 1
        self.failed += 1
        self.error = error
        rules = self.rules
        first = min(rules.ttl, FIRST_RETRY) if rules.negative_ttl is None else rules.negative_ttl
        longest = max(rules.ttl, LONGEST_RETRY, first)
        pause = min(first * 2.0 ** min(self.failures - 1, 30), longest)
        self.due = now + pause * (0.5 + 0.5 * lot)
