"""
What a boot wants of a store of profiles: a few valid ones in a local copy, in time, and its vote afterwards.

A boot never waits longer than its deadline for a store, and never runs a store's driver in its own process: drivers
bring event loops and threads, and the mold is to be forked. So a child process (a thread, for a folder) fills the local
copy, which has the layout of a store; when the store is down, the copy is what there is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jumpstart import files
from jumpstart.choice import Candidate, Step, Votes, may_not, next_step
from jumpstart.errors import ConfigError, JumpstartError, ProfileRefusedError
from jumpstart.paths import private_folder
from jumpstart.profile import Profile, Trust, read_bytes
from jumpstart.records import Reason
from jumpstart.report import Refusal
from jumpstart.stores import (
    LOCK_TIMEOUT_S,
    MAX_INDEX_BYTES,
    Entry,
    FolderBackend,
    Listing,
    Place,
    Store,
    Verdict,
    encode_build,
    open_store,
    parse_path,
    reader,
    words_of,
)

VOTES = "votes.json"  # in the local copy: what the store said when it was last reached
WANTED = 3  # valid profiles of this build, to choose one of at random
MAX_DOWNLOADS = 8  # for one boot
COPIES = "copies of profiles"  # where a refusal says that something is wrong with the local copy
WAITED = "other hosts try it out, and none was well with it in time"
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 2.0  # between two looks at the trials of others
SETTLE_S = 0.1  # from writing a mark to looking who was first; in a folder
COARSE_SETTLE_S = 1.2  # in other stores, whose times are whole seconds
TRIAL_MARGIN_S = 2.0  # that a trial may take over its time before it is given up
MAX_COPIES = 16  # that a host keeps of one app and tenant


class FetchOrder(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """
    What a boot wants of a store.

    Attributes:
        copies: folder of the local copy of this very store, private to this user.
        keys: folder of the key ring.
        seed: spreads what many hosts that boot at once fetch.
        avoid: ids that the boot ledger names.
    """

    url: str
    copies: str
    app: str
    tenant: str
    build: str
    keys: str
    trust: Trust = "signed"
    max_age_s: float = 86_400
    seed: str = ""
    avoid: list[str] = []


class VoteOrder(msgspec.Struct, frozen=True, kw_only=True, tag="vote"):
    """A vote to cast; *path* is the profile's in the store."""

    url: str
    path: str
    voter: str
    verdict: Verdict


class TrialOrder(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """
    Find out which profile a host may load, where nobody is well with the preferred one yet.

    Attributes:
        paths: of the profiles in the store, the preferred one first.
        proven: ids of those among them that were proven before they were published.
        host: the name under which it votes.
        wait_s: how long it may wait for what the trials of other hosts tell.
    """

    url: str
    app: str
    tenant: str
    paths: list[str]
    host: str
    wait_s: float
    proven: list[str] = []


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """
    What came of an order.

    Attributes:
        is_reached: the store was listed; else the local copy is what there is.
        refusals: everything that was not as it should be; none of it stops a boot.
        taken: of a trial, the id of the profile to load; "" is none.
    """

    is_reached: bool = False
    refusals: list[Refusal] = []
    taken: str = ""


_Order = FetchOrder | VoteOrder | TrialOrder


def copy_folder(copies: Path, url: str) -> Path:
    """The folder of the local copy of a store, below *copies*."""
    return copies / hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def fetch(order: FetchOrder, timeout_s: float) -> Outcome:
    """
    Bring the local copy up to date, within *timeout_s* seconds. Raises nothing; leaves no thread or process behind.

    Only a folder that hangs (a mount whose server is gone) leaves its thread, which nothing can end.
    """
    return _within(order, timeout_s)


def cast_vote(order: VoteOrder, timeout_s: float) -> Outcome:
    """Cast a vote, if the store takes it, within *timeout_s* seconds. Raises nothing."""
    return _within(order, timeout_s)


def try_out(order: TrialOrder) -> Outcome:
    """Find out which profile may be loaded, within about the seconds that the order names. Raises nothing."""
    return _within(order, order.wait_s + TRIAL_MARGIN_S)


def is_folder(url: str) -> bool:
    """Whether a store is a folder, which needs no driver."""
    return "://" not in url or url.startswith("file://")


def _within(order: _Order, timeout_s: float) -> Outcome:
    try:
        outcome = _in_thread(order, timeout_s) if is_folder(order.url) else _in_child(order, timeout_s)
    except Exception as error:  # no process, no thread, no memory: the boot goes on without
        return _unreachable(order, words_of(error))
    return outcome or _unreachable(order, f"it took over {timeout_s:g} s")


def _unreachable(order: _Order, detail: str) -> Outcome:
    return Outcome(refusals=[Refusal(f"store {order.url}", Reason.STORE_UNREACHABLE, detail)])


def _in_thread(order: _Order, timeout_s: float) -> Outcome | None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(carry_out(order)), name="profile store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcomes[0] if outcomes else None


def _in_child(order: _Order, timeout_s: float) -> Outcome | None:
    give_up = time.monotonic() + timeout_s
    # -P: a folder of the user's with a file called logging.py must not come first on sys.path.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "jumpstart.fetching"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # drivers warn; what went wrong is in the outcome
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            # The pipe stays open: its end tells the child that we are gone.
            child.stdin.write(msgspec.json.encode(order) + b"\n")
            child.stdin.flush()
            answer = b""
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                while selector.select(max(0.0, give_up - time.monotonic())):
                    part = os.read(child.stdout.fileno(), 65_536)
                    if not part:
                        break
                    answer += part
                else:
                    return None
        except BrokenPipeError:
            answer = b""
        finally:
            child.kill()
    try:
        return msgspec.json.decode(answer, type=Outcome)
    except (msgspec.MsgspecError, ValueError):
        return _unreachable(order, f"what reads the store ended with status {child.returncode} and no answer")


def main() -> None:
    """In the child: one order on standard input, its outcome on standard output."""
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = msgspec.json.encode(carry_out(msgspec.json.decode(line, type=_Order)))
    while answer:
        answer = answer[os.write(1, answer) :]


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the other end is closed
    os.kill(os.getpid(), signal.SIGKILL)


def carry_out(order: _Order) -> Outcome:
    """Do it, in this process; raises nothing."""
    try:
        store = open_store(order.url)
        if isinstance(order, VoteOrder):
            found = parse_path(order.path)
            if found is None:
                return Outcome(refusals=[Refusal(order.path, Reason.MALFORMED, "is not the path of a profile")])
            store.vote(found[0], order.voter, order.verdict)
            return Outcome(is_reached=True)
        return _try_out(order, store) if isinstance(order, TrialOrder) else _fetch(order, store)
    except ProfileRefusedError as error:
        return Outcome(refusals=[Refusal(f"store {order.url}", error.reason, error.detail)])
    except JumpstartError as error:
        return _unreachable(order, str(error))
    except Exception as error:  # drivers raise what they like, and a store may never stop a boot
        return _unreachable(order, words_of(error))


def _fetch(order: FetchOrder, store: Store) -> Outcome:
    listing = store.listing(order.app, order.tenant)
    copies = Store(FolderBackend(Path(order.copies)))
    refusals: list[Refusal] = []
    parse = reader(Path(order.keys), order.trust, order.max_age_s)
    with contextlib.suppress(TimeoutError), files.locked(Path(order.copies, ".lock"), LOCK_TIMEOUT_S):
        _forget_withdrawn(copies, listing, order)
        own = fetched = 0
        for entry in fetch_order(listing, order.build, order.avoid, order.seed):
            is_own = entry.place.build == encode_build(order.build)
            if fetched >= MAX_DOWNLOADS or own >= WANTED or (own and not is_own):
                break
            try:
                if not Path(order.copies, entry.place.path).exists():
                    fetched += 1
                    data, _ = store.read(entry.place, parse)
                    copies.backend.create(entry.place.path, data)
                else:
                    copies.read(entry.place, parse)
                own += is_own
            except ProfileRefusedError as error:
                refusals.append(Refusal(f"profile {entry.place.path}", error.reason, error.detail))
            except ConfigError as error:  # the local copy cannot be written
                refusals.append(Refusal(COPIES, Reason.UNREADABLE, str(error)))
                break
        try:
            votes = {id: (each.healthy, each.crashed) for id, each in listing.votes.items()}
            files.replace(Path(order.copies, VOTES), msgspec.json.encode(votes))
        except OSError as error:
            refusals.append(Refusal(COPIES, Reason.UNREADABLE, f"cannot write {VOTES}: {error.strerror}"))
    return Outcome(is_reached=True, refusals=refusals)


def _try_out(order: TrialOrder, store: Store) -> Outcome:
    began = time.monotonic()
    pause = FIRST_PAUSE_S
    places = {found[0].id: found[0] for path in order.paths if (found := parse_path(path)) is not None}
    while True:
        listing = store.listing(order.app, order.tenant)
        moments = [at for ballot in listing.ballots.values() for at in ballot.marks.values()]
        # The store's clock as far as it is seen, and our own stopwatch: clocks of hosts differ.
        now = max(moments, default=0.0) + time.monotonic() - began
        step: Step = next_step(list(places), listing.ballots, order.host, now)
        if step.kind in ("take", "none"):
            reason = "other hosts have found that it crashes them"
            refusals = [] if step.id else [Refusal(f"store {order.url}", Reason.OUTVOTED, reason)]
            return Outcome(is_reached=True, taken=step.id, refusals=refusals)
        if step.kind == "mark" and step.id in places:
            store.vote(places[step.id], order.host, "trial")
        if time.monotonic() - began > order.wait_s:
            # Of a proven profile no news is no reason to boot cold; a crash is.
            unblamed = [id for id in places if id in order.proven and not listing.votes.get(id, Votes()).crashed]
            if unblamed:
                return Outcome(is_reached=True, taken=unblamed[0])
            return Outcome(is_reached=True, refusals=[Refusal(f"store {order.url}", Reason.UNTRIED, WAITED)])
        # Also after a mark: one that was written before it may be seen a moment after it.
        time.sleep(pause if step.kind == "wait" else SETTLE_S if is_folder(order.url) else COARSE_SETTLE_S)
        pause = min(pause * 1.5, LAST_PAUSE_S)


def fetch_order(listing: Listing, build: str, avoid: Collection[str], seed: str) -> list[Entry]:
    """
    Return the profiles worth fetching, each id once: those of this build in random order, those of ``latest``, then
    the others, the newest first. Pure.
    """
    word = encode_build(build)
    dice = random.Random(seed)  # spreads load: nothing rests on that nobody can guess it
    kept = [
        entry
        for entry in listing.entries
        if may_not(Candidate(entry.place.id, entry.place.build, 1.0, listing.votes.get(entry.place.id, Votes())), avoid)
        is None
    ]
    kept.sort(key=lambda entry: (entry.modified, entry.place), reverse=True)
    own = [entry for entry in kept if entry.place.build == word]
    dice.shuffle(own)
    latest = [entry for entry in kept if entry.place.is_latest]
    dice.shuffle(latest)
    others = [entry for entry in kept if not entry.place.is_latest and entry.place.build != word]
    by_id: dict[str, Entry] = {}
    for entry in [*own, *latest, *others]:
        by_id.setdefault(entry.place.id, entry)
    return list(by_id.values())


def _forget_withdrawn(copies: Store, listing: Listing, order: FetchOrder) -> None:
    """What the store does not have any more is not used from the copy either; and the copy stays small."""
    there = {entry.place for entry in listing.entries}
    held = copies.listing(order.app, order.tenant).entries
    kept = sorted((each for each in held if each.place in there), key=lambda each: each.modified, reverse=True)
    with contextlib.suppress(ConfigError):
        copies.backend.tidy()
        for entry in held:
            if entry not in kept[:MAX_COPIES]:
                copies.backend.remove(entry.place.path)


@dataclass(frozen=True)
class Copied:
    """A valid profile of the local copy, with what other hosts say of it."""

    place: Place
    profile: Profile
    votes: Votes


def read_copies(order: FetchOrder) -> tuple[list[Copied], list[Refusal]]:
    """Read and check what the local copy holds for *order*; raises nothing."""
    copies = Store(FolderBackend(Path(order.copies)))
    parse = reader(Path(order.keys), order.trust, order.max_age_s)
    try:
        entries = copies.listing(order.app, order.tenant).entries
    except ProfileRefusedError as error:
        return [], [Refusal(COPIES, error.reason, error.detail)]
    votes = _read_votes(Path(order.copies, VOTES))
    found: dict[str, Copied] = {}
    refusals = []
    for entry in sorted(entries, key=lambda entry: entry.place.is_latest):
        if entry.place.id in found:
            continue
        try:
            _, profile = copies.read(entry.place, parse)
        except ProfileRefusedError as error:
            refusals.append(Refusal(f"profile {entry.place.path}", error.reason, error.detail))
            continue
        found[entry.place.id] = Copied(entry.place, profile, votes.get(entry.place.id, Votes()))
    return list(found.values()), refusals


def _read_votes(path: Path) -> dict[str, Votes]:
    try:
        counted = msgspec.json.decode(read_bytes(path, MAX_INDEX_BYTES), type=dict[str, tuple[int, int]])
    except (ProfileRefusedError, msgspec.MsgspecError, ValueError):
        return {}
    return {id: Votes(max(0, healthy), max(0, crashed)) for id, (healthy, crashed) in counted.items()}


def private_copies(copies: Path, url: str) -> Path:
    """Make the folder of the local copy of a store; raises ProfileRefusedError as `private_folder` does."""
    return private_folder(copy_folder(copies, url))


if __name__ == "__main__":
    main()
