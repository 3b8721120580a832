"""
Which of several valid profiles a boot loads. Decides; does nothing.

    never        one that was being loaded when a process died on this host (the boot ledger says so)
    never        one that crashed several consumers, and few are well with it (their votes say so)
    first        those of this very build
    then         the nearest, by the share of their records that apply here
    among equals at random, so that a bad profile hits few hosts; one with a vote against it seldom
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jumpstart.records import Reason

OUTVOTED_AFTER = 2  # hosts that a profile crashed: one may have had another trouble
HEALTHY_PER_CRASH = 20  # hosts that are well with a profile for each that crashed, so that it is still chosen
EQUAL_SHARES = 0.05  # shares that differ by less tell nothing about which profile is better


@dataclass(frozen=True)
class Votes:
    """
    What the consumers of a profile have said of it.

    Attributes:
        healthy: hosts that have served with it for a while.
        crashed: hosts where a process that loaded it died before that.
    """

    healthy: int = 0
    crashed: int = 0

    @property
    def is_outvoted(self) -> bool:
        """Whether it crashed several consumers, more than bad luck explains."""
        return self.crashed >= OUTVOTED_AFTER and self.healthy < self.crashed * HEALTHY_PER_CRASH

    @property
    def weight(self) -> float:
        """
        How likely it is chosen beside one that nobody has spoken against: above 0, at most 1.

        Praise alone gives no advantage, or all hosts would end up with the same profile.
        """
        return (1 + self.healthy) / (1 + self.healthy + 4 * self.crashed)


@dataclass(frozen=True)
class Candidate:
    """
    A valid profile for this app, tenant and runtime.

    Attributes:
        build: that it was made from.
        share: of its records, how many apply here; between 0 and 1.
    """

    id: str
    build: str
    share: float = 1.0
    votes: Votes = Votes()


@dataclass(frozen=True)
class PassedOver:
    """A candidate that may not be chosen, and why."""

    id: str
    reason: Reason
    detail: str


def may_not(candidate: Candidate, avoid: Collection[str]) -> PassedOver | None:
    """Say why *candidate* may not be chosen at all, or None; *avoid* are the ids that the boot ledger names."""
    if candidate.id in avoid:
        return PassedOver(candidate.id, Reason.CRASHED, "it was being loaded when a process died on this host")
    votes = candidate.votes
    if votes.is_outvoted:
        return PassedOver(
            candidate.id, Reason.OUTVOTED, f"it crashed {votes.crashed} hosts, {votes.healthy} are well with it"
        )
    return None


def choose(candidates: Sequence[Candidate], *, build: str, avoid: Collection[str], seed: object) -> Candidate | None:
    """
    Return the profile to load, or None when there is none that may be and of which something applies.

    The order of *candidates* does not matter; the same *seed* (text or a number) gives the same choice.
    """
    allowed = [each for each in candidates if may_not(each, avoid) is None]
    equals = [each for each in allowed if build and each.build == build]
    if not equals:
        nearest = max((each.share for each in allowed), default=0.0)
        equals = [each for each in allowed if each.share > 0 and each.share >= nearest - EQUAL_SHARES]
    if not equals:
        return None
    equals.sort(key=lambda each: each.id)
    dice = random.Random(str(seed))  # spreads load: nothing rests on that nobody can guess it
    return dice.choices(equals, [each.votes.weight for each in equals])[0]
