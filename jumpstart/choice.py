"""
Which of several valid profiles a boot loads. Decides; does nothing.

    never        one that was being loaded when a process died on this host (the boot ledger says so)
    never        one that crashed several consumers, and few are well with it (their votes say so)
    first        those of this very build
    then         the nearest, by the share of their records that apply here
    among equals at random, so that a bad profile hits few hosts; one with a vote against it seldom
    on trial     one that nobody is well with yet is loaded by the first `TRIALS` hosts that ask; the others wait
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jumpstart.records import Reason

OUTVOTED_AFTER = 2  # hosts that a profile crashed: one may have had another trouble
HEALTHY_PER_CRASH = 20  # hosts that are well with a profile for each that crashed, so that it is still chosen
TRIALS = 3  # hosts that try a profile: more than OUTVOTED_AFTER, so that one host's trouble does not decide
TRIAL_TIMEOUT_S = 300.0  # after which a host that tries a profile and has not voted counts as crashed
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


@dataclass(frozen=True)
class Ballot:
    """
    What a store knows of one profile.

    Attributes:
        healthy, crashed: names of hosts. One that is in both has crashed: it was healthy too briefly.
        marks: of the hosts that asked to try it, when they asked: seconds by the clock of the store, never of a host.
    """

    healthy: frozenset[str] = frozenset()
    crashed: frozenset[str] = frozenset()
    marks: Mapping[str, float] = field(default_factory=dict)

    @property
    def trying(self) -> list[str]:
        """The hosts that may try it: the first ones that asked."""
        return sorted(self.marks, key=lambda host: (self.marks[host], host))[:TRIALS]

    def votes(self, now: float | None = None) -> Votes:
        """The votes; with *now*, and while nobody is well, hosts that have vanished in their trial count as crashed."""
        healthy = self.healthy - self.crashed
        vanished: set[str] = set()
        if now is not None and not healthy:
            vanished = {host for host in self.trying if now - self.marks[host] > TRIAL_TIMEOUT_S}
        return Votes(len(healthy), len(self.crashed | vanished))


@dataclass(frozen=True)
class Step:
    """
    What a host does next about profiles that may be on trial.

    Attributes:
        kind: ``take`` the profile *id*; write a ``mark`` that asks to try it; ``wait`` for what others find out; or
            there is ``none`` left.
    """

    kind: Literal["take", "mark", "wait", "none"]
    id: str = ""


def next_step(ids: Sequence[str], ballots: Mapping[str, Ballot], host: str, now: float) -> Step:
    """
    Decide on the next step of *host* among the profiles *ids*, the preferred one first.

    ``wait`` ends by itself: `TRIAL_TIMEOUT_S` after the last mark each profile is either proven or outvoted.

    Args:
        now: seconds, by the clock of the store.
    """
    known = {id: ballots.get(id, Ballot()) for id in ids}
    votes = {id: ballot.votes(now) for id, ballot in known.items()}
    allowed = [id for id in ids if not votes[id].is_outvoted]
    for id in sorted(allowed, key=lambda each: (each != ids[0], votes[each].healthy == 0)):
        if votes[id].healthy or host in known[id].trying:
            return Step("take", id)
        if host not in known[id].marks and len(known[id].marks) < TRIALS:
            return Step("mark", id)
    return Step("wait" if allowed else "none")
