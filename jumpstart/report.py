"""
The boot report: every stage as a span, every section with what was used and what was dropped and why.

Spans count from the supervisor's start on the system-wide monotonic clock, so that those of different processes of one
host line up. The report is data; the log line, the admin page and the metrics are made from it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from jumpstart.lineage import Lineage
from jumpstart.records import Dropped, Reason, Record, Tally


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """
    One stage of a boot.

    Attributes:
        start_s: seconds since the supervisor started.
        duration_s: seconds.
        detail: what a reader of the report wants to know beside the time.
    """

    name: str
    process: str
    start_s: float
    duration_s: float
    detail: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """A file, section or part of one that was not used: where, why (an API), and the words for a person."""

    where: str
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class SectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """
    What became of one recorder's records.

    Attributes:
        dropped: each record that was not used, with its reason.
    """

    recorder: str
    offered: int
    used: int
    dropped: list[Dropped] = []

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(str(record.reason) for record in self.dropped))


class WarmupReport(msgspec.Struct, frozen=True, kw_only=True):
    """
    Warm-up requests of one worker.

    Attributes:
        coverage: share of the recorded traffic whose routes they covered; None when that was not measured.
        replay: whether recorded requests were to be replayed.
        too_slow: requests that would cost the next worker as much of its budget, and give it nothing.
    """

    sent: int = 0
    ok: int = 0
    skipped: int = 0
    failures: list[str] = []
    elapsed_s: float = 0.0
    cold_events: int = 0
    coverage: float | None = None
    replay: bool = True
    too_slow: list[str] = []


class BootReport(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a process came up.

    Attributes:
        sources: where warm state came from: ``profile shop.jumpstart`` and ``warm-start cache``.
        lineage: of what is captured in this process; None where it booted from no profile.
        start_method: ``fork`` or ``spawn``, with *start_reasons* when it is spawn.
    """

    target: str
    interface: str = ""
    sources: list[str] = []
    refusals: list[Refusal] = []
    sections: list[SectionReport] = []
    spans: list[Span] = []
    lineage: Lineage | None = None
    start_method: str = ""
    start_reasons: list[str] = []
    warmup: WarmupReport | None = None
    recorders_off: dict[str, str] = {}

    @property
    def offered(self) -> int:
        return sum(section.offered for section in self.sections)

    @property
    def used(self) -> int:
        return sum(section.used for section in self.sections)

    @property
    def share(self) -> float | None:
        """
        How many of the records that this process has a use for were used, 0…1; None where there are none.

        Records that are valid and not needed here count neither way: bytecode beside a ``__pycache__``, above all.
        """
        needed = self.offered - self.dropped_reasons.get(str(Reason.NOT_APPLICABLE), 0)
        return self.used / needed if needed > 0 else None

    @property
    def dropped_reasons(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for section in self.sections:
            total.update(section.reasons)
        return dict(total)

    def summary(self) -> str:
        """The records part of the line that the server prints at start."""
        share = "" if self.share is None else f" ({self.share:.0%})"
        parts = [f"warm coverage {self._coverage()}", f"records {self.used} used{share}"]
        reasons = self.dropped_reasons
        unneeded = reasons.pop(str(Reason.NOT_APPLICABLE), 0)
        if reasons:
            words = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            parts[-1] += f", {sum(reasons.values())} dropped ({words})"
        if unneeded:
            parts[-1] += f", {unneeded} not needed here"
        if self.warmup is not None and self.warmup.sent:
            skipped = f", {self.warmup.skipped} skipped" if self.warmup.skipped else ""
            parts.append(f"warm-up {self.warmup.ok}/{self.warmup.sent} requests{skipped}")
        if not self.sources:
            parts.append("cold")
        return " · ".join(parts)

    def _coverage(self) -> str:
        """The share, or why there is none: replay is off, there are no recorded requests, or nothing at all."""
        warmup = self.warmup
        if warmup is not None and warmup.coverage is not None:
            return f"{warmup.coverage:.0%}"
        if warmup is not None and not warmup.replay:
            return "not measured (replay is off)"
        return "unknown (no requests recorded)" if self.used else "unknown (nothing recorded yet)"


def section_report(recorder: str, records: list[Record], tally: Tally) -> SectionReport:
    """Close a section's books; records that nobody reported are `NOT_APPLICABLE`."""
    reported = {dropped.key for dropped in tally.dropped} | tally.used_keys
    silent = [Dropped(record.key, Reason.NOT_APPLICABLE) for record in records if record.key not in reported]
    used = len(tally.used_keys - {dropped.key for dropped in tally.dropped})
    return SectionReport(recorder=recorder, offered=len(records), used=used, dropped=[*tally.dropped, *silent])


class Stopwatch:
    """Collects the spans of one process."""

    def __init__(self, process: str, started: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.process = process
        self.started = started
        self.spans: list[Span] = []
        self._clock = clock

    @contextlib.contextmanager
    def span(self, name: str, detail: str = "") -> Iterator[None]:
        """Time the block; it is recorded also when it raises."""
        begin = self._clock()
        try:
            yield
        finally:
            self.add(name, begin, self._clock(), detail)

    def add(self, name: str, begin: float, end: float, detail: str = "") -> None:
        self.spans.append(
            Span(
                name=name,
                process=self.process,
                start_s=round(begin - self.started, 6),
                duration_s=round(end - begin, 6),
                detail=detail,
            )
        )

    def since_start(self) -> float:
        """Seconds since the supervisor started."""
        return self._clock() - self.started
