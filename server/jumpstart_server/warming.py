"""What became of a worker's warm-up requests: for its report, and for the person who reads the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jumpstart.report import WarmupReport
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.inprocess import Outcome, WarmupResult

logger = logging.getLogger(__name__)

TOO_SLOW = 0.5  # of the budget: what took less, and was cut, may only have come last
LONG_WARMUP = 1.0  # seconds after which the log says what took the time; every boot pays it


def is_rejected(outcome: Outcome) -> bool:
    """A 4xx that nobody said was meant: a misspelt path, say."""
    status = outcome.status
    return outcome.error is None and status is not None and status >= 400 and outcome.request.expect_status is None


def describe(outcome: Outcome) -> str:
    """Request and status in words."""
    return f"{outcome.request.name}: answered {outcome.status}"


class WarmupNotes:
    """
    Listens to one worker's warm-up.

    *own* are the operator's requests, from ``--warmup``; *recorded* those of the corpus, and *replayed* those of them
    that are sent.
    """

    def __init__(
        self, own: Sequence[WarmRequest], recorded: Sequence[WarmRequest], replayed: Sequence[WarmRequest]
    ) -> None:
        self._own = set(own)
        self._recorded = recorded
        self._replayed = replayed
        self._worked: set[WarmRequest] = set()
        self._rejected: list[str] = []
        self._slowest: Outcome | None = None
        self._late: list[Outcome] = []

    def note(self, outcome: Outcome) -> None:
        """Take the outcome of one request."""
        if self._slowest is None or outcome.elapsed_s > self._slowest.elapsed_s:
            self._slowest = outcome
        if outcome.is_late:
            self._late.append(outcome)
        # What was recorded had succeeded: a 400 here is an app that does not know the warm-up's Host, say.
        if outcome.error is None and outcome.status is not None and outcome.status < 400:
            self._worked.add(outcome.request)
        elif is_rejected(outcome) and outcome.request in self._own:
            self._rejected.append(describe(outcome))

    def complain(self, result: WarmupResult) -> None:
        """Log what somebody could mend."""
        if self._rejected:
            logger.warning(
                "warm-up: %d requests of --warmup were answered with 4xx; give expect_status where that is meant: %s",
                *(len(self._rejected), "; ".join(self._rejected[:5])),
            )
        if self._replayed and not self._worked:
            logger.warning(
                "warm-up: none of %d recorded requests succeeded (statuses: %s); if the app checks the Host header, "
                "name one of its own with --warmup-host",
                *(len(self._replayed), ", ".join(f"{count} × {status}" for status, count in result.statuses.items())),
            )
        if result.elapsed_s > LONG_WARMUP and self._slowest is not None:
            logger.warning(
                "warm-up took %.1f s, %.1f s of it %s; --warmup-budget limits it, --no-replay does without",
                *(result.elapsed_s, self._slowest.elapsed_s, self._slowest.request.name),
            )

    def report(self, result: WarmupResult, *, budget_s: float, replay: bool) -> WarmupReport:
        """The warm-up, which had *budget_s* seconds, as the boot report holds it."""
        too_slow = [each.request.name for each in self._late if each.elapsed_s >= TOO_SLOW * budget_s]
        total = sum(request.weight for request in self._recorded)
        covered = sum(request.weight for request in self._recorded if request in self._worked)
        return WarmupReport(
            sent=result.requests,
            ok=result.ok,
            skipped=result.skipped,
            failures=[f"{failure.method} {failure.path}: {failure.error}" for failure in result.failed],
            elapsed_s=result.elapsed_s,
            cold_events=result.cold_events,
            replay=replay,
            too_slow=list(dict.fromkeys(too_slow)),
            coverage=covered / total if total and self._replayed else None,
        )
