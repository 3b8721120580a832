"""
The boot of a process: find warm state, check it, import the app around it, and account for every record.

    boot()                     in the mold (or a spawned worker), with the garbage collector off
      find_state               a profile file, then the host's warm-start cache; both apply, together
      recorders.observe
      recorders.restore_early  what the import profits from
      load_app
      recorders.restore        no threads, sockets or loops: workers are forked afterwards
    Booted.restore_late        in each worker, in its event loop

Nothing here may stop a boot but the app itself, and `require_warm`. Whatever is refused is in the report with a reason.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from jumpstart import shared_values
from jumpstart.errors import AppLoadError, ColdBootRefusedError, ConfigError, ProfileRefusedError, SourceUnavailable
from jumpstart.lineage import Lineage
from jumpstart.profile import Profile, Trust
from jumpstart.recorder import Recorder, WarmSettings
from jumpstart.recorders import RecorderSet
from jumpstart.records import Dropped, Reason, Record, Tally, merge, merge_valid, split_valid
from jumpstart.report import BootReport, Refusal, Stopwatch, section_report
from jumpstart.runtime import digest, runtime_key
from jumpstart.target import DEFAULT_ATTRIBUTES, Interface, detect_interface, load_app, parse_target
from jumpstart.warmstart import StoredState, WarmStartCache

logger = logging.getLogger(__name__)

RESTORE_PATIENCE_S = 1.0  # beyond the deadline, which recorders keep by themselves between two records


class BootSettings(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a boot needs to know.

    Attributes:
        name: the app's name in profiles and in the warm-start cache; by default target and folder.
        profile: a profile file, or a store of profiles (a folder or URL), or "".
        build: the operator's id of this build; "" is told from the app's sources, where a store is asked.
        copies: folder of the local copies of stores, or "" to keep none.
        fetch_timeout_s: for a store.
        profile_seed: of the choice among equal profiles; "" is another one each time.
        ledger: folder of the boot ledger, or "" to do without.
        server, generation: who boots, as the ledger knows it; without a server there is no ledger.
        warm_start: folder of the host's warm-start cache, or "" to do without.
        keys: folder of the key ring.
        max_age_s: of a profile.
        restore_timeout_s: for all restores of a process together; 0 is no limit.
    """

    target: str
    app_dir: str
    factory: bool = False
    interface: Interface | None = None
    name: str = ""
    tenant: str = "web"
    profile: str = ""
    build: str = ""
    copies: str = ""
    fetch_timeout_s: float = 10
    profile_seed: str = ""
    ledger: str = ""
    server: str = ""
    generation: int = 0
    trust: Trust = "signed"
    max_age_s: float = 86_400
    warm_start: str = ""
    keys: str = ""
    require_warm: bool = False
    restore_timeout_s: float = 30
    warm: WarmSettings = WarmSettings()

    @property
    def app(self) -> str:
        """The app's name in stores."""
        return self.name or full_target(self.target)

    @property
    def state_key(self) -> str:
        """Where the warm-start cache keeps what this app learns, per tenant and runtime."""
        runtime = runtime_key()
        owner = self.name or f"{full_target(self.target)} in {self.app_dir}"
        words = (owner, self.tenant, runtime.implementation, runtime.version, runtime.platform)
        return hashlib.sha256("\0".join(words).encode()).hexdigest()


def full_target(text: str) -> str:
    """*text* with the attribute that it leaves out, so that ``shop.web`` and ``shop.web:app`` are one app."""
    try:
        target = parse_target(text)
    except ConfigError:
        return text
    return text if target.attribute is not None else f"{target.module}:{DEFAULT_ATTRIBUTES[0]}"


class WarmState:
    """
    Records found for this boot, by recorder, before any validity check but trust, version and runtime.

    Attributes:
        disabled: names of recorders that the operator switched off.
        offers: one list of records for each source that has the section, the freshest last.
        sections: the same as one list, each key once.
        sources: in words, for the report.
        lineage: of what is captured later; None where there is no profile.
        refusals: what was found and may not be used.
        passed: of these, what costs this boot nothing where records are used all the same: a store that is down and
            was fetched before, a profile that another was chosen for, no place to keep anything for the next start.
    """

    def __init__(self, disabled: Sequence[str] = ()) -> None:
        self.disabled = disabled
        self.offers: dict[str, list[Sequence[Record]]] = {}
        self.sections: dict[str, list[Record]] = {}
        self.malformed: dict[str, list[Dropped]] = {}
        self.sources: list[str] = []
        self.lineage: Lineage | None = None
        self.refusals: list[Refusal] = []
        self.passed: list[Refusal] = []

    def refuse(self, where: str, reason: Reason, detail: str = "") -> None:
        self.refusals.append(Refusal(where, reason, detail))

    def pass_over(self, refusal: Refusal) -> None:
        """Note a refusal that is one of `passed`."""
        self.refusals.append(refusal)
        self.passed.append(refusal)

    def add(self, name: str, records: Sequence[Record], malformed: Sequence[Dropped]) -> None:
        """Add a section. Its records come after those that are there; of one key, the last valid one is used."""
        self.offers.setdefault(name, []).append(records)
        self.sections[name] = merge(self.sections.get(name, ()), records)
        self.malformed.setdefault(name, []).extend(malformed)


def find_state(settings: BootSettings, recorders: RecorderSet) -> WarmState:
    """Read the profile and the warm-start cache that *settings* name. Never raises for what is wrong with them."""
    state = WarmState(settings.warm.disabled)
    if settings.profile:
        if settings.trust == "any":
            detail = "--trust any: profiles are used whoever made them, and the code that is in them is run"
            logger.warning("%s; say --trust signed, and `jumpstart keys trust` those who may make profiles", detail)
            state.refuse("trust", Reason.UNCHECKED, detail)
        _find_profile(settings, recorders, state)
    if settings.warm_start:
        _find_warm_start(settings, recorders, state)
    return state


def _find_profile(settings: BootSettings, recorders: RecorderSet, state: WarmState) -> None:
    from jumpstart.provision import Wanted, provide  # a boot without a profile does not pay for it

    def share(profile: Profile) -> float:
        _add_to_path(settings.app_dir)  # which records apply is a question to the app's files
        return share_that_applies(profile, recorders)

    wanted = Wanted(
        source=settings.profile,
        app=settings.app,
        tenant=settings.tenant,
        app_dir=settings.app_dir,
        build=settings.build,
        keys=settings.keys,
        trust=settings.trust,
        max_age_s=settings.max_age_s,
        fetch_timeout_s=settings.fetch_timeout_s,
        copies=settings.copies,
        ledger=settings.ledger,
        ledger_key=settings.state_key,
        server=settings.server,
        generation=settings.generation,
        seed=settings.profile_seed,
    )
    found = provide(wanted, share)
    state.refusals += found.refusals
    for refusal in found.passed:
        state.pass_over(refusal)
    profile, where = found.profile, found.where
    if profile is None:
        return
    state.sources.append(where)
    state.lineage = profile.manifest.lineage.descend(profile.manifest.id)
    for refusal in profile.refusals:
        state.refuse(f"{where} {refusal.where}", refusal.reason, refusal.detail)
    theirs = profile.manifest.app.target
    if full_target(theirs) != full_target(settings.target):
        state.refuse(where, Reason.OTHER_APP, f"made from {theirs}, this is {settings.target}; what applies is used")
    _offer_profile(profile, where, recorders, state)


def share_that_applies(profile: Profile, recorders: RecorderSet) -> float:
    """The share of the records of *profile* whose recorder is here and whose dependencies are unchanged."""
    total = applying = 0
    for info in profile.manifest.sections:
        total += info.records
        recorder = recorders.get(info.recorder)
        if recorder is None or recorder.version != info.version or info.recorder not in profile.sections:
            continue
        if recorder.needs_trust and not profile.trusted:
            continue
        try:
            records, _ = profile.records(info.recorder)
        except ProfileRefusedError:
            continue
        applying += len(split_valid(records, digest, Tally()))
    return applying / total if total else 0.0


def _offer_profile(profile: Profile, where: str, recorders: RecorderSet, state: WarmState) -> None:
    same_runtime = profile.manifest.runtime == runtime_key()
    if not same_runtime:
        made, here = profile.manifest.runtime, runtime_key()
        theirs = f"{made.implementation} {made.version} on {made.platform}"
        detail = f"made by {theirs}, this is {here.implementation} {here.version} on {here.platform}"
        state.refuse(where, Reason.OTHER_RUNTIME, detail)
    for name, section in profile.sections.items():
        place = f"{where} section {name}"
        recorder = _welcoming(recorders, place, name, section.info.version, state)
        if recorder is None:
            continue
        if recorder.runtime_bound and not same_runtime:
            state.refuse(place, Reason.OTHER_RUNTIME)
        elif recorder.needs_trust and not profile.trusted:
            state.refuse(place, Reason.NEEDS_TRUST, "it holds code or pickles and the file is not by a trusted key")
        else:
            try:
                state.add(name, *profile.records(name))
            except ProfileRefusedError as error:
                state.refuse(place, error.reason, error.detail)


def _welcoming(recorders: RecorderSet, place: str, name: str, version: int, state: WarmState) -> Recorder | None:
    """The recorder that understands a section, or None when there is none, which is then noted."""
    recorder = recorders.get(name)
    if name in state.disabled:
        state.refuse(place, Reason.DISABLED, "by the configuration")
    elif recorder is None:
        state.refuse(place, Reason.NO_RECORDER, f"there is no recorder called {name} here, or it is switched off")
    elif recorder.version != version:
        state.refuse(place, Reason.NO_RECORDER, f"written by version {version}, here is version {recorder.version}")
        return None
    return recorder


def _find_warm_start(settings: BootSettings, recorders: RecorderSet, state: WarmState) -> None:
    where = "warm-start cache"
    cache = WarmStartCache(Path(settings.warm_start))
    try:
        stored = cache.load(settings.state_key)
    except ProfileRefusedError as error:
        state.refuse(where, error.reason, error.detail)
        return
    if stored is None:
        problem = cache.why_not_writable()
        if problem is not None:
            remedy = "make it writable, point JUMPSTART_HOME somewhere else, or say --no-warm-start"
            detail = f"nothing can be kept for the next start: {problem}; {remedy}"
            state.pass_over(Refusal(where, Reason.UNREADABLE, detail))
        return
    state.sources.append(where)
    for refusal in stored.refusals:
        state.refuse(f"{where} {refusal.where}", refusal.reason, refusal.detail)
    _offer_stored(stored, where, recorders, state)


def _offer_stored(stored: StoredState, where: str, recorders: RecorderSet, state: WarmState) -> None:
    for name in stored.sections:
        place = f"{where} section {name}"
        if _welcoming(recorders, place, name, stored.sections[name].version, state) is not None:
            try:
                state.add(name, *stored.records(name))
            except ProfileRefusedError as error:
                state.refuse(place, error.reason, error.detail)


class Booted:
    """
    An imported app, as warm as it can be before a worker's event loop runs.

    Attributes:
        app: what the target named.
        interface: what it speaks.
    """

    def __init__(
        self,
        app: Any,
        interface: Interface,
        settings: BootSettings,
        recorders: RecorderSet,
        state: WarmState,
        tallies: dict[str, Tally],
        valid: dict[str, list[Record]],
        stopwatch: Stopwatch,
    ) -> None:
        self.app = app
        self.interface = interface
        self.settings = settings
        self.recorders = recorders
        self.stopwatch = stopwatch
        self._state = state
        self._tallies = tallies
        self._valid = valid

    async def restore_late(self) -> None:
        """
        Restore what needs an event loop or connections. In a worker, after lifespan start-up, before it is ready.

        Raises:
            AppLoadError: a source of real-time values is down that the app refuses to start without.
        """
        await self._fetch_live()
        deadline = _deadline(self.settings)
        for tally in self._tallies.values():
            tally.set_deadline(deadline)
        limit = self.settings.restore_timeout_s
        with self.stopwatch.span("late restores"):
            try:
                # Recorders look at the deadline between records; this is for a record that hangs.
                async with asyncio.timeout(limit + RESTORE_PATIENCE_S if limit else None):
                    await self.recorders.restore_late(self.app, self._valid, self._tallies)
            except TimeoutError:
                logger.warning("late restores took longer than %.0f s and were left", limit)

    async def _fetch_live(self) -> None:
        """Wait for the first values of `Config` and `Service`, which have deadlines of their own."""
        if "jumpstart.live" not in sys.modules:
            return
        from jumpstart import live

        began, lines = time.monotonic(), list[str]()
        try:
            lines = await live.settle_all()
        except SourceUnavailable as error:
            lines = [str(error)]
            raise AppLoadError(str(error)) from error
        finally:
            self.stopwatch.add("real-time values", began, time.monotonic(), "; ".join(lines))

    def report(self, start_method: Literal["", "fork", "spawn"] = "", reasons: Sequence[str] = ()) -> BootReport:
        """The books as they stand now."""
        return BootReport(
            target=self.settings.target,
            interface=self.interface,
            sources=self._state.sources,
            refusals=self._state.refusals,
            sections=[
                section_report(name, records, self._tallies[name]) for name, records in self._state.sections.items()
            ],
            spans=list(self.stopwatch.spans),
            lineage=self._state.lineage,
            start_method=start_method,
            start_reasons=list(reasons),
            recorders_off=dict(self.recorders.off),
        )


def boot(
    settings: BootSettings, recorders: RecorderSet, stopwatch: Stopwatch, state: WarmState | None = None
) -> Booted:
    """
    Boot the app of *settings*, from whatever warm state there is. The garbage collector is off afterwards.

    Args:
        state: what `find_state` found, where this process may not look any more: it has dropped its privileges.

    Raises:
        ConfigError, AppLoadError: the app cannot be loaded.
        ColdBootRefusedError: the settings require warmth, and something was refused or nothing was there to use.
    """
    gc.disable()  # 3 to 27 % of an import; the caller freezes and enables it
    with stopwatch.span("find warm state"):
        state = state or find_state(settings, recorders)
        shared_values.use_folder(Path(settings.warm_start) if settings.warm_start else None)
    tallies = {name: Tally() for name in state.sections}
    with stopwatch.span("check records"):
        _add_to_path(settings.app_dir)
        valid = {name: merge_valid(offers, digest, tallies[name]) for name, offers in state.offers.items()}
        for name, malformed in state.malformed.items():
            tallies[name].dropped.extend(malformed)
    deadline = _deadline(settings)
    for tally in tallies.values():
        tally.set_deadline(deadline)
    with stopwatch.span("early restores"):
        recorders.observe()
        recorders.restore_early(valid, tallies)
    with stopwatch.span("import the app"):
        app = load_app(settings.target, app_dir=Path(settings.app_dir), factory=settings.factory)
        interface = settings.interface or detect_interface(app, settings.target)
    if settings.interface is not None:
        _warn_of_another_interface(settings.interface, app, settings.target)
    with stopwatch.span("restores"):
        recorders.restore(app, valid, tallies)
    booted = Booted(app, interface, settings, recorders, state, tallies, valid, stopwatch)
    if settings.require_warm:
        _require_warm(booted.report(), state.passed)
    return booted


def _warn_of_another_interface(named: Interface, app: Any, target: str) -> None:
    """A slip in ``--interface`` would show as a 500 for every request, and nowhere else."""
    try:
        looks_like = detect_interface(app, target)
    except ConfigError:
        return  # what cannot be told is what the option is for
    if looks_like != named and "asgi2" not in (looks_like, named):
        logger.warning(
            "%s looks like %s by its signature, and --interface says %s", target, looks_like.upper(), named.upper()
        )


def _add_to_path(app_dir: str) -> None:
    """Records of the app's own modules are checked against their files, so these must be found before the import."""
    if app_dir not in sys.path:
        sys.path.insert(0, app_dir)


def _deadline(settings: BootSettings) -> float | None:
    return time.monotonic() + settings.restore_timeout_s if settings.restore_timeout_s else None


def _require_warm(report: BootReport, passed: Sequence[Refusal]) -> None:
    wishes = (Reason.DISABLED, Reason.UNCHECKED)  # the operator's own
    refusals = [refusal for refusal in report.refusals if refusal.reason not in wishes]
    if report.used:
        refusals = [refusal for refusal in refusals if refusal not in passed]
    if refusals:
        reasons = "\n".join(f"  {refusal}" for refusal in refusals)
        raise ColdBootRefusedError(f"--require-warm: this boot would not be warm\n{reasons}")
    if report.used == 0:
        found = " and ".join(report.sources) or "no profile was given and the warm-start cache has nothing for this app"
        dropped = ", ".join(f"{count} {reason}" for reason, count in report.dropped_reasons.items())
        raise ColdBootRefusedError(f"--require-warm: no record was used: {found} ({dropped or 'none offered'})")
