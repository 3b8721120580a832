"""
The boot ledger: which profile is being loaded on this host, and which ones processes died of.

A process that dies before it was healthy for a while does not get the same profile again: the next attempt takes
another one, the one after that none. Once a boot has been healthy for a while the count begins anew, and a profile that
was blamed once may be tried again, since once may be chance; one that was blamed twice is left alone for `BLAMED_FOR`.
When the boot without any profile fails as well, the profiles were not at fault.

One file per app, tenant and runtime in the state folder, under a lock, so that several servers of one home may share
it. A server that runs holds the lock of a file of its own: that it is free tells that the server is dead, be it killed,
or the host or its container restarted. `Account` and the functions on it are pure; `Ledger` is the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec

from jumpstart import files
from jumpstart.errors import ProfileRefusedError
from jumpstart.paths import private_folder, why_not_writable
from jumpstart.profile import read_bytes
from jumpstart.records import Reason

BLAMED_FOR = timedelta(days=7)
MAX_BLAMED = 100
MAX_ATTEMPTS = 1000  # of servers that share a home; more are of no use to anybody
NONE_AFTER = 2  # failures in a row: the first leads to another profile, the second to none
ALWAYS_AFTER = 2  # times that a profile was blamed, after which a healthy boot without it does not clear it
LOCK_TIMEOUT_S = 2.0
MAX_BYTES = 1_000_000

_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Name = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """
    A boot that loads a profile and was not healthy for a while yet.

    Attributes:
        server: the name under which its server shows that it lives.
        generation: of that server.
        profile: its id.
        url, path: of the store that it came from; empty for a file.
    """

    server: _Name
    generation: int
    profile: _Text
    url: _Text = ""
    path: _Text = ""
    began: datetime


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """What is held against a profile; *is_open* until a boot was healthy after it."""

    times: int
    last: datetime
    is_open: bool = True

    @property
    def counts(self) -> bool:
        """Whether the profile is not to be loaded."""
        return self.is_open or self.times >= ALWAYS_AFTER


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is known for an app and tenant.

    Attributes:
        voter: under which this host votes, 16 hex digits that say nothing else.
        failures: boots in a row that died before they were healthy.
        attempts: boots under way.
        blamed: by profile id.
    """

    voter: _Name
    failures: int = 0
    attempts: list[Attempt] = []
    blamed: dict[str, Blame] = {}

    @property
    def avoid(self) -> frozenset[str]:
        """Ids of the profiles that are not to be loaded now."""
        return frozenset(profile for profile, blame in self.blamed.items() if blame.counts)

    @property
    def may_load(self) -> bool:
        """Whether the next boot may load any profile at all."""
        return self.failures < NONE_AFTER


def begun(account: Account, attempt: Attempt) -> Account:
    """A boot begins to load a profile."""
    own = (attempt.server, attempt.generation)
    others = [each for each in account.attempts if (each.server, each.generation) != own]
    return msgspec.structs.replace(account, attempts=[*others, attempt][-MAX_ATTEMPTS:])


def died(account: Account, attempt: Attempt, now: datetime) -> Account:
    """A process of this boot died before it was healthy for a while."""
    if attempt not in account.attempts:
        return account
    known = account.blamed.get(attempt.profile)
    times = known.times + 1 if known is not None else 1
    blamed = {**account.blamed, attempt.profile: Blame(times=times, last=now)}
    newest = sorted(blamed.items(), key=lambda item: item[1].last)[-MAX_BLAMED:]
    return msgspec.structs.replace(ended(account, attempt), failures=account.failures + 1, blamed=dict(newest))


def healthy(account: Account, attempt: Attempt | None) -> Account:
    """A boot (*attempt*, or one that loaded none) has served for a while, and so the count begins anew."""
    blamed = {profile: msgspec.structs.replace(blame, is_open=False) for profile, blame in account.blamed.items()}
    if attempt is not None:
        blamed.pop(attempt.profile, None)
        account = ended(account, attempt)
    return msgspec.structs.replace(account, failures=0, blamed=blamed)


def ended(account: Account, attempt: Attempt) -> Account:
    """A boot was ended in order before anybody could tell."""
    return msgspec.structs.replace(account, attempts=[each for each in account.attempts if each != attempt])


def exonerated(account: Account) -> Account:
    """The boot without a profile failed too: what was blamed since the last healthy one was not at fault."""
    blamed = {
        profile: msgspec.structs.replace(blame, is_open=False, times=blame.times - 1) if blame.is_open else blame
        for profile, blame in account.blamed.items()
    }
    return msgspec.structs.replace(
        account, failures=0, blamed={profile: blame for profile, blame in blamed.items() if blame.times > 0}
    )


def settled(account: Account, lives: Callable[[str], bool], now: datetime) -> tuple[Account, list[Attempt]]:
    """Return the account, and the attempts whose server is dead: they count as died. What is too old is forgotten."""
    dead = [attempt for attempt in account.attempts if not lives(attempt.server)]
    for attempt in dead:
        account = died(account, attempt, now)
    # A blame from the future is of a clock that was wrong.
    blamed = {profile: blame for profile, blame in account.blamed.items() if abs(now - blame.last) < BLAMED_FOR}
    return msgspec.structs.replace(account, blamed=blamed), dead


class Ledger:
    """
    The account of *key* in *folder*, which is made when something is written. Any thread or process may use it.

    Every method that reads or writes raises ProfileRefusedError: `UNREADABLE`, or `UNSAFE_OWNER`.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key
        self._file = folder / f"{key}.json"
        self._alive: int | None = None

    # -- what a server does --

    def come_alive(self) -> tuple[str, list[Attempt]]:
        """
        Show from now on that this process lives; return the name under which it does, and what dead servers were
        loading, which is blamed now.

        The process must not fork without an exec: a child would hold the lock with it.
        """
        name = secrets.token_hex(8)
        with self._mapped():
            private_folder(self._folder)
            # Under the lock: whoever looks for dead servers must not find the file before its lock is held.
            with files.locked(self._folder / f"{self._key}.lock", LOCK_TIMEOUT_S):
                descriptor = os.open(self._sign(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._alive = descriptor
        with self._changing() as change:
            for sign in self._folder.glob(f"{self._key}.*.alive"):
                self._lives(sign.name.split(".")[1])  # clears those of dead servers away
            return name, change.dead

    def end(self, name: str, generation: int | None = None) -> None:
        """The server, or only that generation of it, is ended in order: what was under way is nobody's fault."""
        with self._changing() as change:
            for attempt in change.account.attempts:
                if attempt.server == name and generation in (None, attempt.generation):
                    change.account = ended(change.account, attempt)

    def leave(self, name: str) -> None:
        """As `end`, and the server shows itself no more. Raises nothing."""
        with contextlib.suppress(ProfileRefusedError):
            self.end(name)
        if self._alive is not None:
            with contextlib.suppress(OSError):
                self._sign(name).unlink(missing_ok=True)
            os.close(self._alive)
            self._alive = None

    def died(self, server: str, generation: int) -> Attempt | None:
        """A process of that generation died too early; return what it was loading, None where it loaded no profile."""
        with self._changing() as change:
            attempt = _find(change.account, server, generation)
            if attempt is not None:
                change.account = died(change.account, attempt, datetime.now(UTC))
        return attempt

    def healthy(self, server: str, generation: int) -> Attempt | None:
        """That generation has served for a while; return what it had loaded."""
        with self._changing() as change:
            attempt = _find(change.account, server, generation)
            change.account = healthy(change.account, attempt)
        return attempt

    def exonerate(self) -> None:
        """The boot without any profile has failed too."""
        with self._changing() as change:
            change.account = exonerated(change.account)

    # -- what a boot does --

    def open(self) -> Account:
        """Return the account after blaming what dead servers were loading."""
        with self._changing() as change:
            return change.account

    def begin(self, attempt: Attempt) -> None:
        """Note that a boot loads a profile, before it does."""
        with self._changing() as change:
            change.account = begun(change.account, attempt)

    def find(self, server: str, generation: int) -> Attempt | None:
        """What that generation loads: its other processes take the same."""
        return _find(self.read(), server, generation)

    # -- the file --

    def read(self) -> Account:
        """Return the account as it stands; writes nothing."""
        try:
            return msgspec.json.decode(read_bytes(self._file, MAX_BYTES), type=Account)
        except ProfileRefusedError as error:
            if error.reason is not Reason.ABSENT:
                raise
        except (msgspec.MsgspecError, ValueError):
            pass  # another version's, or damaged by a power failure: what it knew is lost, and the next write mends it
        return Account(voter=secrets.token_hex(8))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Change]:
        with self._mapped():
            if not self._folder.exists():
                problem = why_not_writable(self._folder)
                if problem is not None:
                    raise ProfileRefusedError(Reason.UNREADABLE, f"the boot ledger cannot be kept: {problem}")
            private_folder(self._folder)
            with files.locked(self._folder / f"{self._key}.lock", LOCK_TIMEOUT_S):
                before = self.read()
                change = _Change(*settled(before, self._lives, datetime.now(UTC)))
                yield change
                if change.account != before or not self._file.exists():  # else it had another voter next time
                    files.replace(self._file, msgspec.json.encode(change.account), 0o600)
                files.sweep(self._folder)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ProfileRefusedError(Reason.UNREADABLE, f"the boot ledger {self._file} is busy") from error
        except OSError as error:
            raise ProfileRefusedError(
                Reason.UNREADABLE,
                f"the boot ledger {self._file} cannot be kept: {error.strerror}; make room, make it writable for user "
                f"id {os.geteuid()}, or point JUMPSTART_HOME somewhere else",
            ) from error

    def _sign(self, name: str) -> Path:
        return self._folder / f"{self._key}.{name}.alive"

    def _lives(self, name: str) -> bool:
        """Whether the server of that name holds the lock of its file; one that does not is cleared away."""
        try:
            descriptor = os.open(self._sign(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, ValueError):
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            self._sign(name).unlink(missing_ok=True)
            return False
        finally:
            os.close(descriptor)


class _Change:
    def __init__(self, account: Account, dead: list[Attempt]) -> None:
        self.account = account
        self.dead = dead


def _find(account: Account, server: str, generation: int) -> Attempt | None:
    return next((each for each in account.attempts if (each.server, each.generation) == (server, generation)), None)
