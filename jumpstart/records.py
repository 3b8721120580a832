"""
Records: the unit of warm state, valid or invalid on its own.

A *section* is one recorder's list of records. A record says what it depends on; when any of that changed, the record
is dropped with a `Reason` and the others are kept. Nothing here does I/O.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

Digests = Callable[[str], str | None]
"""Answers a dependency such as ``module:shop.catalog`` with its present digest, or None when it is not there."""


class Reason(enum.StrEnum):
    """Why a file, a section or a record was not used. The values are an API: logs, metrics and reports show them."""

    # a whole file or cache
    ABSENT = "absent"  # there is none
    UNREADABLE = "unreadable"  # the operating system says no
    DAMAGED = "damaged"  # not whole: truncated, flipped, not a profile
    FORMAT = "format"  # another version of the format
    TOO_LARGE = "too-large"  # over a cap on bytes, members or records
    UNSIGNED = "unsigned"
    UNKNOWN_KEY = "unknown-key"  # signed, by a key that this host does not trust
    REVOKED_KEY = "revoked-key"  # signed, by a key that this host does not trust any more
    BAD_SIGNATURE = "bad-signature"
    TOO_OLD = "too-old"
    FROM_THE_FUTURE = "from-the-future"
    UNSAFE_OWNER = "unsafe-owner"  # a cache folder that others own or may write
    UNCHECKED = "unchecked"  # used, whoever made it: `--trust any` was given
    STORE_UNREACHABLE = "store-unreachable"  # the store did not answer, or not in time
    CRASHED = "crashed"  # a process that was loading it died on this host; the boot ledger says so
    OUTVOTED = "outvoted"  # it crashed several other hosts
    UNTRIED = "untried"  # other hosts try it, and have not said in time how they fare
    # a file or a section
    OTHER_RUNTIME = "other-runtime"  # another Python, platform or machine
    OTHER_APP = "other-app"  # nothing wrong with it; what applies is used
    NEEDS_TRUST = "needs-trust"  # holds code or pickles, and `--trust data-only` was given
    NO_RECORDER = "no-recorder"  # no recorder of that name and version here
    RECORDER_ERROR = "recorder-error"  # the recorder raised and was switched off
    DISABLED = "disabled"  # the configuration switched it off
    # a record
    MALFORMED = "malformed"
    STALE = "stale"  # what it depends on has changed
    GONE = "gone"  # what it depends on is not there any more
    NOT_APPLICABLE = "not-applicable"  # valid, but this process has no use for it
    FAILED = "failed"  # restoring it raised
    NO_EFFECT = "no-effect"  # restored, and a check shows that the app does not use it
    DEADLINE = "deadline"  # the stage ran out of time


MAX_WEIGHT = 2**53  # as JSON numbers go


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    One entry of a section.

    Attributes:
        key: unique within its section; stable between processes and hosts (no ids, no absolute paths).
        data: what the recorder needs to restore it: JSON types, and bytes in a ``msgpack`` section.
        depends: dependency → digest at capture, e.g. ``{"module:shop.catalog": "sha256:…"}``.
        weight: how often it was seen to be of use; merging adds weights.
        carried: how many profiles in a row have brought it along without new evidence; see `jumpstart.lineage`.
    """

    key: str
    data: dict[str, Any] = {}
    depends: dict[str, str] = {}
    weight: int = 1
    carried: int = 0


class Dropped(msgspec.Struct, frozen=True):
    """A record that was not used, and why."""

    key: str
    reason: Reason
    detail: str = ""


class Tally:
    """
    What became of a section's records; handed to a recorder's restore hooks, which report each record once.

    A record that no hook reports counts as `Reason.NOT_APPLICABLE`.
    """

    def __init__(self, deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline = deadline
        self._clock = clock
        self.used_keys: set[str] = set()
        self.dropped: list[Dropped] = []

    def used(self, record: Record) -> None:
        """The record is in place, and the recorder has checked that it took effect."""
        self.used_keys.add(record.key)

    def drop(self, record: Record, reason: Reason, detail: str = "") -> None:
        """The record is of no use here."""
        self.dropped.append(Dropped(record.key, reason, detail))

    def set_deadline(self, deadline: float | None) -> None:
        """Set when the present stage must be over, on the clock; None is never."""
        self._deadline = deadline

    def out_of_time(self) -> bool:
        """Whether the stage's deadline has passed; then drop the rest with `Reason.DEADLINE`."""
        return self._deadline is not None and self._clock() >= self._deadline


def split_valid(records: Iterable[Record], digests: Digests, tally: Tally) -> list[Record]:
    """Return the records whose dependencies hold; tally the others as `STALE` or `GONE`."""
    valid = []
    for record in records:
        for dependency, wanted in record.depends.items():
            present = digests(dependency)
            if present != wanted:
                tally.drop(record, Reason.GONE if present is None else Reason.STALE, dependency)
                break
        else:
            valid.append(record)
    return valid


def merge(*sections: Iterable[Record], limit: int = 20_000) -> list[Record]:
    """
    Merge sections of one recorder: first-seen order is kept, a later record replaces an earlier one of the same key,
    their weights add up, to `MAX_WEIGHT` at most, and the least `Record.carried` counts: who saw it used knows best.
    Past *limit* records the lightest are left out.
    """
    merged: dict[str, Record] = {}
    for section in sections:
        for record in section:
            known = merged.get(record.key)
            if known is not None:
                weight = min(known.weight + record.weight, MAX_WEIGHT)
                record = msgspec.structs.replace(record, weight=weight, carried=min(known.carried, record.carried))
            merged[record.key] = record
    if len(merged) <= limit:
        return list(merged.values())
    kept = {record.key for record in sorted(merged.values(), key=lambda record: -record.weight)[:limit]}
    return [record for record in merged.values() if record.key in kept]


def merge_valid(sections: Iterable[Iterable[Record]], digests: Digests, tally: Tally) -> list[Record]:
    """
    Merge what is valid in each of *sections* of one recorder; tally the keys that have no valid record in any.

    Checked before it is merged: what the host's cache kept of the last build must not hide what a profile brings.
    """
    checked = Tally()
    valid = merge(*[split_valid(section, digests, checked) for section in sections])
    alive = {record.key for record in valid}
    tally.dropped += {dropped.key: dropped for dropped in checked.dropped if dropped.key not in alive}.values()
    return valid


Sections = Mapping[str, list[Record]]
"""Recorder name → its records."""
