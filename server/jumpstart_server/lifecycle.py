"""
The life of a worker, as a table; when a dead one is started again; what a failed boot leads to. Decides; does nothing.

    STARTING → BOOTING → READY → SERVING → DRAINING → GONE, and from each state straight to DRAINING and to GONE
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jumpstart.errors import JumpstartError

HEALTHY_AFTER = 10.0  # seconds of serving after which earlier failures are forgotten
FIRST_DELAY = 0.1  # seconds before the second start in a row that failed; doubles
LONGEST_DELAY = 30.0  # seconds


class LifecycleError(JumpstartError):
    """An event that the table does not know: a mistake of ours."""


class State(enum.StrEnum):
    STARTING = "starting"  # asked for; no word from it yet
    BOOTING = "booting"  # exists: lifespan start-up, late restores, warm-up
    READY = "ready"  # warm; in a roll it waits for its siblings
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


class Event(enum.StrEnum):
    HELLO = "hello"
    READY = "ready"
    ACCEPT = "accept"
    DRAIN_ASKED = "drain-asked"
    EXITED = "exited"


NEXT: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.HELLO): State.BOOTING,
    (State.STARTING, Event.DRAIN_ASKED): State.DRAINING,
    (State.STARTING, Event.EXITED): State.GONE,
    (State.BOOTING, Event.READY): State.READY,
    (State.BOOTING, Event.DRAIN_ASKED): State.DRAINING,
    (State.BOOTING, Event.EXITED): State.GONE,
    (State.READY, Event.ACCEPT): State.SERVING,
    (State.READY, Event.DRAIN_ASKED): State.DRAINING,
    (State.READY, Event.EXITED): State.GONE,
    (State.SERVING, Event.DRAIN_ASKED): State.DRAINING,
    (State.SERVING, Event.EXITED): State.GONE,
    # What it had sent before it heard of the drain may still arrive.
    (State.DRAINING, Event.HELLO): State.DRAINING,
    (State.DRAINING, Event.READY): State.DRAINING,
    (State.DRAINING, Event.DRAIN_ASKED): State.DRAINING,
    (State.DRAINING, Event.EXITED): State.GONE,
}


@dataclass(frozen=True)
class Worker:
    """A worker as the rules see it; *since* is when it entered *state*, on the monotonic clock."""

    slot: int
    generation: int
    state: State = State.STARTING
    since: float = 0.0
    pid: int | None = None


def advance(worker: Worker, event: Event, now: float) -> Worker:
    """
    Return *worker* after *event*.

    Raises:
        LifecycleError: the table has no such step.
    """
    state = NEXT.get((worker.state, event))
    if state is None:
        raise LifecycleError(f"worker {worker.slot}: {event} while {worker.state}")
    return worker if state is worker.state else replace(worker, state=state, since=now)


@dataclass(frozen=True)
class Restarts:
    """How often starts of a process have failed in a row."""

    failures: int = 0

    def after_exit(self, served_s: float | None) -> tuple[Restarts, float]:
        """
        Return the new count and the seconds to wait before the next start.

        A process that served is replaced at once, until it dies young again and again; one that never came to serve is
        tried again ever more slowly.

        Args:
            served_s: seconds that it served, or None when it never became ready.
        """
        if served_s is not None and served_s >= HEALTHY_AFTER:
            return Restarts(), 0.0
        failures = self.failures + 1
        if served_s is not None and failures == 1:
            return Restarts(failures), 0.0
        return Restarts(failures), min(FIRST_DELAY * 2 ** min(failures - 1, 20), LONGEST_DELAY)


def is_hopeless(restarts: Restarts, limit: int, served_s: Iterable[float]) -> bool:
    """
    Whether to end the attempts to replace what dies: *limit* failures in a row, and nobody who is in good health.

    Args:
        limit: as of ``--crash-limit``; 0 is never.
        served_s: for how long each worker that serves has done so.
    """
    return 0 < limit <= restarts.failures and not any(served >= HEALTHY_AFTER for served in served_s)


class Verdict(enum.Enum):
    """What a boot that failed leads to."""

    COLD = "once more, without warm state"
    KEEP = "the generation that serves goes on, the roll has failed"
    RETRY = "again, after a while"
    GIVE_UP = "the tenant is given up"


def after_boot_failure(*, may_try_cold: bool, in_roll: bool, was_ready: bool) -> Verdict:
    """
    Decide.

    Args:
        may_try_cold: warm state was used, may be at fault, and the user does not insist on it.
        in_roll: it was a new generation, beside one that serves.
        was_ready: the tenant has served before, so that the app can boot.
    """
    if may_try_cold and (in_roll or not was_ready):
        return Verdict.COLD
    if in_roll:
        return Verdict.KEEP
    return Verdict.RETRY if was_ready else Verdict.GIVE_UP
