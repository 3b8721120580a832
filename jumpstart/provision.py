"""
The profile of a boot: from a file or out of a store, but none that the boot ledger warns of.

    ledger     what dead boots were loading is blamed; after two failures in a row there is no profile at all
    fetch      a store's local copy is brought up to date (`fetching.py`), in time or not
    choose     one of the valid ones (`choice.py`)
    try out    where it is not proven and nobody is well with it yet, few hosts load it and the others wait for them
    ledger     that this boot loads it is written down before anything of it is used

Raises nothing for what is wrong with files, stores or the ledger: every refusal is handed back with its reason.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jumpstart import files
from jumpstart.choice import Candidate, choose, may_not
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.ledger import Account, Attempt, Ledger
from jumpstart.profile import Profile, Trust, read_bytes
from jumpstart.records import Reason
from jumpstart.report import Refusal
from jumpstart.runtime import runtime_key, sources_digest
from jumpstart.stores import build_of, decode_name, encode_build, is_store, profile_file, reader

if TYPE_CHECKING:
    from jumpstart.fetching import Copied, FetchOrder

LEDGER = "boot ledger"

Share = Callable[[Profile], float]
"""Tells which share of a profile's records applies here."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """
    What a boot asks for.

    Attributes:
        source: what ``--profile`` names: a file, a folder or a URL.
        build: the operator's id of this build, or "": then the sources in *app_dir* tell.
        copies: folder of the local copies of stores; "" keeps none.
        ledger: folder of the boot ledger; "" does without.
        ledger_key: of this app, tenant and runtime.
        server, generation: who boots, as the ledger knows it.
        seed: of the choice; "" is another one at each boot.
    """

    source: str
    app: str
    tenant: str
    app_dir: str
    build: str = ""
    keys: str
    trust: Trust
    max_age_s: float
    fetch_timeout_s: float
    copies: str = ""
    ledger: str = ""
    ledger_key: str = ""
    server: str = ""
    generation: int = 0
    seed: str = ""


@dataclass
class Provision:
    """
    What was found.

    Attributes:
        profile: None when there is none that may be used.
        where: its name in reports.
        refusals: why there is none.
        passed: what else was not as it should be; costs nothing where a profile was found.
        is_reached: the store was.
    """

    profile: Profile | None = None
    where: str = ""
    refusals: list[Refusal] = field(default_factory=list)
    passed: list[Refusal] = field(default_factory=list)
    is_reached: bool = False


def provide(wanted: Wanted, share: Share) -> Provision:
    """Find the profile of this boot."""
    found = Provision()
    ledger = Ledger(Path(wanted.ledger), wanted.ledger_key) if wanted.ledger and wanted.server else None
    account: Account | None = None
    if ledger is not None:
        try:
            account = ledger.open()
        except ProfileRefusedError as error:
            found.passed.append(Refusal(LEDGER, error.reason, error.detail))
            ledger = None
    if account is not None and not account.may_load:
        detail = f"the last {account.failures} boots with one died before they had served for a while; this is without"
        found.refusals.append(Refusal("profile", Reason.CRASHED, detail))
        return found
    try:
        from_store = is_store(wanted.source)
        path = Path() if from_store else profile_file(wanted.source)
    except ConfigError as error:
        found.refusals.append(Refusal("profile", Reason.UNREADABLE, str(error)))
        return found
    avoid = account.avoid if account is not None else frozenset()
    voter = account.voter if account is not None else ""
    if from_store:
        attempt = _from_store(wanted, ledger, voter, avoid, share, found)
    else:
        attempt = _from_file(wanted, path, avoid, found)
    if ledger is not None and attempt is not None:
        try:
            ledger.begin(attempt)
        except ProfileRefusedError as error:
            found.passed.append(Refusal(LEDGER, error.reason, error.detail))
    return found


def _from_file(wanted: Wanted, path: Path, avoid: frozenset[str], found: Provision) -> Attempt | None:
    found.where = f"profile {path.name}"
    parse = reader(Path(wanted.keys), wanted.trust, wanted.max_age_s)
    try:
        profile = parse(read_bytes(path))
    except ProfileRefusedError as error:
        found.refusals.append(Refusal(found.where, error.reason, error.detail))
        return None
    refusal = may_not(Candidate(profile.manifest.id, ""), avoid)
    if refusal is not None:
        found.refusals.append(Refusal(found.where, refusal.reason, refusal.detail))
        return None
    found.profile = profile
    return _attempt(wanted, profile)


def _attempt(wanted: Wanted, profile: Profile, url: str = "", path: str = "") -> Attempt | None:
    if not wanted.server:
        return None
    return Attempt(
        server=wanted.server,
        generation=wanted.generation,
        profile=profile.manifest.id,
        url=url,
        path=path,
        began=datetime.now(UTC),
    )


def _from_store(
    wanted: Wanted, ledger: Ledger | None, voter: str, avoid: frozenset[str], share: Share, found: Provision
) -> Attempt | None:
    from jumpstart.fetching import FetchOrder  # where a file is named, nobody pays for it

    build = wanted.build or sources_digest(Path(wanted.app_dir)).rpartition(":")[2][:16]
    seed = wanted.seed or secrets.token_hex(8)
    order = FetchOrder(
        url=wanted.source,
        copies="",
        app=wanted.app,
        tenant=wanted.tenant,
        build=build,
        keys=wanted.keys,
        trust=wanted.trust,
        max_age_s=wanted.max_age_s,
        seed=seed,
        avoid=sorted(avoid),
    )
    began = time.monotonic()
    under_way = _under_way(wanted, ledger)
    copied = _copied(wanted, order, under_way, found)
    chosen = next((each for each in copied if each.place.id == under_way), None)
    if chosen is None:
        candidates = _candidates(copied, build, avoid, share, found)
        left_s = max(1.0, wanted.fetch_timeout_s - (time.monotonic() - began))
        by_id = {each.place.id: each for each in copied}
        chosen = _tried(wanted, voter, _preferred(candidates, build, seed), by_id, left_s, found)
    if chosen is None:
        detail = f"the store {wanted.source} has none for {wanted.app} and tenant {wanted.tenant} that may be used"
        found.refusals.append(Refusal("profile", _main_reason(found), detail))
        return None
    found.profile = chosen.profile
    made = build_of(chosen.profile.manifest.app) if chosen.place.is_latest else decode_name(chosen.place.build)
    found.where = f"profile {chosen.place.id[:12]} of {'this build' if made == build else f'build {made}'}"
    return _attempt(wanted, chosen.profile, wanted.source, chosen.place.path)


def _copied(wanted: Wanted, order: FetchOrder, under_way: str | None, found: Provision) -> list[Copied]:
    """
    What the local copy of the store holds, brought up to date.

    Where it cannot be kept or written, a copy for this boot alone is made where temporary files are.
    """
    from jumpstart.fetching import COPIES, private_copies, read_copies

    copied: list[Copied] = []
    if wanted.copies:
        try:
            order = msgspec.structs.replace(order, copies=str(private_copies(Path(wanted.copies), wanted.source)))
        except ProfileRefusedError as error:
            found.passed.append(Refusal(COPIES, error.reason, error.detail))
        else:
            if under_way is not None:  # the mold has fetched it a moment ago
                copied, _ = read_copies(order)
                if any(each.place.id == under_way for each in copied):
                    return copied
            copied, is_kept = _fetched(order, wanted.fetch_timeout_s, found)
            if is_kept:
                return copied
    try:
        with files.temporary_folder() as folder:
            order = msgspec.structs.replace(order, copies=str(folder))
            others, _ = _fetched(order, wanted.fetch_timeout_s, found)
    except OSError as error:
        found.passed.append(Refusal(COPIES, Reason.UNREADABLE, f"no temporary folder can be made: {error}"))
        return copied
    ids = {each.place.id for each in others}
    return [*others, *(each for each in copied if each.place.id not in ids)]


def _fetched(order: FetchOrder, timeout_s: float, found: Provision) -> tuple[list[Copied], bool]:
    """What is in the copy after fetching, and whether all of it could be kept there."""
    from jumpstart.fetching import COPIES, fetch, read_copies

    outcome = fetch(order, timeout_s)
    found.is_reached = found.is_reached or outcome.is_reached
    copied, refusals = read_copies(order)
    found.passed += [each for each in (*outcome.refusals, *refusals) if each not in found.passed]
    return copied, all(refusal.where != COPIES for refusal in outcome.refusals)


def _under_way(wanted: Wanted, ledger: Ledger | None) -> str | None:
    """Id of the profile that another process of this generation loads already: all are to have the same."""
    if ledger is None:
        return None
    try:
        attempt = ledger.find(wanted.server, wanted.generation)
    except ProfileRefusedError:
        return None  # `open` has said so
    return attempt.profile if attempt is not None else None


def _candidates(
    copied: list[Copied], build: str, avoid: frozenset[str], share: Share, found: Provision
) -> list[Candidate]:
    """Those that may be loaded here; what is said against the others goes into *found*."""
    by_id = {each.place.id: each for each in copied}
    candidates: list[Candidate] = []
    for each in copied:
        manifest = each.profile.manifest
        where = f"profile {each.place.path}"
        if manifest.runtime != runtime_key():
            made = f"{manifest.runtime.implementation} {manifest.runtime.version} on {manifest.runtime.platform}"
            found.passed.append(Refusal(where, Reason.OTHER_RUNTIME, f"made by {made}"))
            continue
        made = encode_build(build_of(manifest.app)) if each.place.is_latest else each.place.build
        candidate = Candidate(each.place.id, made, votes=each.votes)
        refusal = may_not(candidate, avoid)
        if refusal is not None:
            found.passed.append(Refusal(where, refusal.reason, refusal.detail))
            continue
        candidates.append(candidate)
    own = encode_build(build)
    if not any(each.build == own for each in candidates):  # only then do shares matter, and they take time
        candidates = [Candidate(each.id, each.build, share(by_id[each.id].profile), each.votes) for each in candidates]
    return candidates


def _preferred(candidates: list[Candidate], build: str, seed: str) -> list[Candidate]:
    """In the order in which they would be chosen, each after those before it are gone."""
    left, order = list(candidates), []
    while (chosen := choose(left, build=encode_build(build), avoid=(), seed=seed)) is not None:
        order.append(chosen)
        left.remove(chosen)
    return order


def _tried(
    wanted: Wanted, voter: str, preferred: list[Candidate], by_id: dict[str, Copied], left_s: float, found: Provision
) -> Copied | None:
    """
    The preferred profile, or, where nobody is well with it yet, what the trials of this and other hosts tell.

    A host that does not vote (without a ledger), a store that takes no marks, and one that is down do without trials.
    """
    from jumpstart.fetching import TrialOrder, try_out

    if not preferred:
        return None
    first = by_id[preferred[0].id]
    can_vote = voter and found.is_reached and not wanted.source.startswith(("http://", "https://"))
    if first.votes.healthy > 0 or not can_vote:
        return first
    order = TrialOrder(
        url=wanted.source,
        app=wanted.app,
        tenant=wanted.tenant,
        paths=[by_id[each.id].place.path for each in preferred],
        proven=[each.id for each in preferred if by_id[each.id].profile.manifest.validation is not None],
        host=voter,
        wait_s=left_s,
    )
    outcome = try_out(order)
    found.passed += outcome.refusals
    if not outcome.is_reached:  # it takes no marks
        return first
    return by_id.get(outcome.taken)


def _main_reason(found: Provision) -> Reason:
    """Why there is no profile: what was said of the store or of the profiles in it, else that there are none."""
    reasons = [refusal.reason for refusal in found.passed if refusal.where != LEDGER]
    return reasons[0] if reasons else Reason.ABSENT
