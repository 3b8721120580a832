"""
What the workers learnt, merged, for the host's warm-start cache and for profiles.

The supervisor is the one writer. It handles records as opaque data: nothing of the app is imported or unpickled here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from jumpstart.boot import BootSettings
from jumpstart.errors import ProfileRefusedError
from jumpstart.lineage import hand_down
from jumpstart.profile import AppInfo, encode_section
from jumpstart.records import Reason, Record, merge
from jumpstart.report import BootReport, Refusal
from jumpstart.runtime import runtime_key
from jumpstart.warmstart import StoredSection, StoredState, WarmStartCache
from jumpstart_server.messages import Section

logger = logging.getLogger(__name__)

# A record dropped for one of these will not come to life again by itself; for the others (a deadline, a recorder that
# was switched off) it may. One that does not apply is kept where a worker learns it anew: else each restart would add
# what only its predecessor had a use for, such as the patterns that the standard library makes from unordered sets.
DEAD = frozenset({Reason.STALE, Reason.GONE, Reason.MALFORMED, Reason.FAILED, Reason.NO_EFFECT, Reason.NOT_APPLICABLE})

CACHE = "warm-start cache"
"""Where a boot report says that something is wrong with it."""

Identity = tuple[int, int, int]
"""Generation, slot and pid of a worker."""


def merge_sections(
    base: Mapping[str, Section], learnt: Iterable[Mapping[str, Section]], dead: Mapping[str, set[str]]
) -> dict[str, Section]:
    """
    Merge what was known at the start with what each worker knows now. Pure.

    A record that this boot found *dead* is left out of the base; a worker that learnt it anew brings it back. Sections
    of different versions are not mixed: the workers' version wins.
    """
    merged: dict[str, Section] = {}
    for name, section in base.items():
        gone = dead.get(name, set())
        records = [record for record in section.records if record.key not in gone]
        merged[name] = Section(section.version, section.encoding, records)
    for sections in learnt:
        for name, section in sections.items():
            known = merged.get(name)
            if known is None or (known.version, known.encoding) != (section.version, section.encoding):
                merged[name] = section
            else:
                merged[name] = Section(section.version, section.encoding, merge(known.records, section.records))
    return {name: section for name, section in merged.items() if section.records}


def add_unknown(
    ours: Mapping[str, Section], stored: Mapping[str, Section], dead: Mapping[str, set[str]]
) -> dict[str, Section]:
    """
    Add what another server of the same app has stored meanwhile. Pure.

    Records that we know too stay as they are: their weights are in ours already.
    """
    merged = dict(ours)
    for name, section in stored.items():
        known = merged.get(name)
        if known is not None and (known.version, known.encoding) != (section.version, section.encoding):
            continue
        keys = {record.key for record in known.records} if known is not None else set()
        keys |= dead.get(name, set())
        new = [record for record in section.records if record.key not in keys]
        if new:
            merged[name] = Section(section.version, section.encoding, [*(known.records if known else []), *new])
    return merged


class Learning:
    """The books of one supervisor. `save` may be called from any task; the others from the event loop only."""

    def __init__(self, settings: BootSettings) -> None:
        self.settings = settings
        self._cache = WarmStartCache(Path(settings.warm_start)) if settings.warm_start else None
        self._base: dict[str, Section] | None = None
        self._learnt: dict[Identity, dict[str, Section]] = {}
        self._of_the_gone: dict[str, Section] = {}
        self._dead: dict[str, set[str]] = {}
        self._dirty = False
        self._forgotten = False  # what the cache held is not to be trusted
        self._complained: set[Reason] = set()
        self._saving = asyncio.Lock()
        self._loading = threading.Lock()

    def learnt(self, worker: Identity, sections: dict[str, Section]) -> None:
        """Note everything that *worker* knows now; it replaces what it knew before."""
        self._learnt[worker] = sections
        self._dirty = True

    def gone(self, worker: Identity) -> None:
        """A worker has ended; what it knew is kept, once, however many workers come and go."""
        sections = self._learnt.pop(worker, None)
        if sections is not None:
            self._of_the_gone = merge_sections(self._of_the_gone, [sections], {})

    def dropped(self, report: BootReport) -> None:
        """
        Note which records a boot could not use, so that they are not kept for ever.

        Whatever the boot said about the cache itself is not said again when it is written.
        """
        self._complained.update(refusal.reason for refusal in report.refusals if refusal.where == CACHE)
        for section in report.sections:
            dead = {record.key for record in section.dropped if record.reason in DEAD}
            if dead:
                self._dead.setdefault(section.recorder, set()).update(dead)
                self._dirty = True

    def has_state(self) -> bool:
        """Whether a boot may have used warm state: a profile is named, or the cache holds something for this app."""
        return bool(self.settings.profile or self._loaded_base())

    def forget(self) -> None:
        """What the cache holds made a boot fail: begin afresh, and replace it at the next save."""
        with self._loading:
            self._base = {}
        self._learnt.clear()
        self._of_the_gone.clear()
        self._forgotten = True
        self._dirty = True

    def merged(self, more: Iterable[Mapping[str, Section]] = ()) -> dict[str, Section]:
        """All that is known, with *more* captured just now. Reads the cache the first time."""
        return merge_sections(self._loaded_base(), [self._of_the_gone, *self._learnt.values(), *more], self._dead)

    def handed_down(self, more: Iterable[Mapping[str, Section]] = ()) -> dict[str, Section]:
        """`merged`, for a profile: without what many before it have carried along, and nobody has needed anew."""
        more = list(more)
        seen = merge_sections({}, [self._of_the_gone, *self._learnt.values(), *more], {})
        sections = {}
        for name, section in self.merged(more).items():
            fresh = {record.key for record in seen[name].records if record.weight} if name in seen else set()
            records = hand_down(section.records, fresh)
            if records:
                sections[name] = Section(section.version, section.encoding, records)
        return sections

    async def save(self) -> None:
        """Write the warm-start cache if there is something new. A cache that cannot be written costs one line."""
        if self._cache is None:
            return
        async with self._saving:
            if not self._dirty:
                return
            self._dirty = False
            learnt = [self._of_the_gone, *self._learnt.values()]
            dead = {name: set(keys) for name, keys in self._dead.items()}
            await asyncio.to_thread(self._save, learnt, dead)

    def _save(self, learnt: list[dict[str, Section]], dead: dict[str, set[str]]) -> None:
        assert self._cache is not None
        sections = merge_sections(self._loaded_base(), learnt, dead)
        if not self._forgotten:
            sections = add_unknown(sections, self._load_base(), dead)
        self._forgotten = False
        stored = {}
        for name, section in sections.items():
            encoded = encode_section(name, section.version, section.encoding, section.records)
            stored[name] = StoredSection(section.version, section.encoding, encoded.data)
        state = StoredState(
            runtime=runtime_key(),
            app=AppInfo(target=self.settings.target),
            saved=datetime.now(UTC),
            sections=stored,
        )
        try:
            for refusal in self._cache.save(self.settings.state_key, state):
                self._complain(refusal)
        except ProfileRefusedError as error:
            self._complain(Refusal(CACHE, error.reason, error.detail))

    def _loaded_base(self) -> dict[str, Section]:
        with self._loading:
            if self._base is None:
                self._base = self._load_base()
            return self._base

    def _load_base(self) -> dict[str, Section]:
        if self._cache is None:
            return {}
        try:
            stored = self._cache.load(self.settings.state_key)
        except ProfileRefusedError:
            return {}  # the mold's boot report has said so
        base = {}
        for name, section in stored.sections.items() if stored is not None else ():
            try:
                records: list[Record] = stored.records(name)[0] if stored is not None else []
            except ProfileRefusedError:
                continue
            base[name] = Section(section.version, section.encoding, records)
        return base

    def _complain(self, refusal: Refusal) -> None:
        if refusal.reason not in self._complained:  # once: the next attempt comes in seconds
            self._complained.add(refusal.reason)
            logger.warning("not kept for the next start: %s", refusal)
