"""
The host's own store of warm state: what this host's last process of an app knew, so that a restart boots warm.

Kept in SQLite through diskcache, in a folder that only this user can write to. Three things that diskcache does are not
wanted here, and are taken away:

- It pickles what is not bytes or text, and unpickles what the database says is a pickle. `BytesOnlyDisk` stores and
  returns bytes only; any other row is refused.
- It opens and deletes files that the database names. Values stay inside SQLite; a row with a file name is refused.
- It takes settings, pragmas among them, from the database. `_inspect` refuses a database with any setting, table, view
  or trigger that diskcache would not have made, and every setting is pinned.

A lock file beside the folder lets one process in at a time, since diskcache's own start-up waits up to 60 s for a lock.
Each call opens and closes everything: between calls there is no descriptor and no connection that a fork could share.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import sqlite3
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jumpstart.archive import DEFAULT, MIB
from jumpstart.errors import ProfileRefusedError
from jumpstart.paths import private_folder, why_not_writable
from jumpstart.profile import AppInfo, Encoding, RecorderName, decode_section
from jumpstart.records import Dropped, Reason, Record
from jumpstart.report import Refusal
from jumpstart.runtime import RuntimeKey

logger = logging.getLogger(__name__)

FORMAT = 1
SIZE_LIMIT_BYTES = 256 * MIB
SECTION_LIMIT_BYTES = 64 * MIB
MAX_ROWS = 10_000  # a state has some ten rows
SQLITE_TIMEOUT_S = 1.0
LOCK_TIMEOUT_S = 1.0
DATABASE = "cache.db"  # diskcache's name for it
_FRAME = b"JSW1"
_KEY_SEPARATOR = "\n"
_MANIFEST_ROW = "manifest"

# Every setting that diskcache has, so that none is taken from the database. A database with other values is refused and
# moved aside, so changing one costs each host its warm start once.
_SETTINGS: dict[str, object] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",  # evicting single rows would leave half a state; see `choose_evictions`
    "size_limit": 2**40,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 2048,
    # No memory maps (mmap, and the index of a write-ahead log): when the file is cut short under them, the process dies
    # of SIGBUS.
    "sqlite_journal_mode": "delete",
    "sqlite_mmap_size": 0,
    # Whole under kill -9 without a single fsync, of which diskcache's start-up would make some forty; after a power
    # failure the checksums tell what is whole.
    "sqlite_synchronous": 0,
    "disk_min_file_size": 2**62,
    "disk_pickle_protocol": 5,
}
_UNUSABLE_NOW = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_AUTH,
    }
)


@dataclass(frozen=True)
class StoredSection:
    """A recorder's section, encoded as in a profile."""

    version: int
    encoding: Encoding
    data: bytes


@dataclass(frozen=True)
class StoredState:
    """
    The warm state of one app and tenant on this host.

    Attributes:
        saved: aware time.
        sections: by recorder name.
        refusals: sections that were stored and are not whole; empty when saving.
    """

    runtime: RuntimeKey
    app: AppInfo
    saved: datetime
    sections: Mapping[str, StoredSection]
    refusals: Sequence[Refusal] = field(default_factory=tuple)

    def records(self, name: str, limit: int = DEFAULT.records) -> tuple[list[Record], list[Dropped]]:
        """Decode a section, as `jumpstart.profile.Profile.records` does; raises KeyError and ProfileRefusedError."""
        section = self.sections[name]
        return decode_section(section.data, section.encoding, limit)


class _SectionRow(msgspec.Struct, frozen=True):
    name: RecorderName
    version: int
    encoding: Encoding
    size: Annotated[int, msgspec.Meta(ge=0)]


class _StateRow(msgspec.Struct, frozen=True):
    """What the manifest row of a state holds."""

    format: int
    runtime: RuntimeKey
    app: AppInfo
    saved: Annotated[datetime, msgspec.Meta(tz=True)]
    sections: list[_SectionRow]


class _RowRefusedError(Exception):
    """A row that this module never writes."""


class _BusyError(Exception):
    """Another process holds the cache."""


class WarmStartCache:
    """
    The store in *folder*, which is made when something is saved. Holds nothing open; any thread or process may use it.

    A *key* names an app and tenant: printable, up to 500 characters; another is a ValueError. Otherwise every method
    raises ProfileRefusedError and nothing else: `Reason.DAMAGED` (a broken database is moved aside with its folder, and
    the next save starts afresh), `Reason.UNREADABLE` (busy, read-only, full), `Reason.UNSAFE_OWNER`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        size_limit_bytes: int = SIZE_LIMIT_BYTES,
        section_limit_bytes: int = SECTION_LIMIT_BYTES,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._size_limit = size_limit_bytes
        self._section_limit = section_limit_bytes
        self._lock_timeout_s = lock_timeout_s
        self._clock = clock

    def load(self, key: str) -> StoredState | None:
        """Return the state saved under *key*, or None. Sections that are not whole are left out and noted in it."""
        _check_key(key)
        if not self._exists():
            return None
        with self._opened() as rows:
            return _load_state(rows, key)

    def save(self, key: str, state: StoredState) -> list[Refusal]:
        """
        Replace the state under *key*, all or nothing; the oldest states of other keys make room for it.

        Return the sections that were not stored since they are too large.
        """
        _check_key(key)
        sections, refusals = choose_sections(state.sections, self._section_limit, self._size_limit)
        row = _StateRow(
            FORMAT,
            state.runtime,
            state.app,
            state.saved,
            [_SectionRow(name, each.version, each.encoding, len(each.data)) for name, each in sections.items()],
        )
        try:
            encoded = msgspec.json.encode(row)
            msgspec.json.decode(encoded, type=_StateRow)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProfileRefusedError(Reason.MALFORMED, f"warm state of {key} cannot be stored: {error}") from error
        with self._opened() as rows:
            with rows.transact():
                _make_room(rows, key, sum(each.size for each in row.sections), self._size_limit)
                _put(rows, key, _MANIFEST_ROW, encoded)
                for name, section in sections.items():
                    _put(rows, key, f"section/{name}", section.data)
        return refusals

    def forget(self, key: str) -> None:
        """Remove the state under *key*, if there is one: it was being loaded when a process died, say."""
        _check_key(key)
        if not self._exists():
            return
        with self._opened() as rows:
            with rows.transact():
                for row in _rows_by_state(rows).get(key, []):
                    rows.delete(row)

    def keys(self) -> list[str]:
        """Return the keys of all states."""
        if not self._exists():
            return []
        with self._opened() as rows:
            return sorted(_rows_by_state(rows))

    def why_not_writable(self) -> str | None:
        """Say why nothing could be saved, or None when it could, as far as a cheap look tells. Makes nothing."""
        # The lock file stands beside the folder; the folder itself is looked at where it is there.
        return why_not_writable(self._folder) or why_not_writable(self._folder.parent)

    # -- opening --

    def _exists(self) -> bool:
        """Whether there is something to read. A folder that could not be written to either is refused, empty or not."""
        try:
            if not os.path.lexists(self._folder):
                return False
            private_folder(self._folder)
            return os.path.lexists(self._folder / DATABASE)
        except (OSError, ValueError) as error:
            raise self._unusable(error) from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """The open cache, alone; maps everything that can go wrong."""
        private_folder(self._folder)
        directory = str(self._folder.absolute())
        if "$" in directory:
            # diskcache expands variables in it, and would leave the folder that was just checked.
            raise ProfileRefusedError(Reason.UNREADABLE, f"the path {directory} holds a '$'; choose one without")
        try:
            open_rows = _cache_class()
        except (ImportError, OSError) as error:  # no descriptor left to read diskcache with, say
            raise self._unusable(error) from error
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked())
            except (OSError, _BusyError) as error:
                raise self._unusable(error) from error
            try:
                _inspect(self._folder / DATABASE, 2 * self._size_limit + 16 * MIB)
                with contextlib.closing(open_rows(directory)) as rows:
                    yield rows
            except ProfileRefusedError:
                raise
            except Exception as error:
                # Broad, since a database can make diskcache raise nearly anything (KeyError, TypeError, ValueError),
                # and a cache may never stop a boot.
                if self._is_unusable(error):
                    raise self._unusable(error) from error
                detail = f"the warm-start cache {self._folder} is damaged: {_first(error)}; {self._move_aside()}"
                raise ProfileRefusedError(Reason.DAMAGED, detail) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Beside the folder, not in it: the folder may be moved aside while others wait.
        path = self._folder.with_name(f"{self._folder.name}.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            give_up = self._clock() + self._lock_timeout_s
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock() >= give_up:
                        raise _BusyError("another process holds it") from None
                    time.sleep(0.005)
            try:
                yield
            finally:
                # Said explicitly: a child that was forked meanwhile would keep the lock with its copy.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    @staticmethod
    def _is_unusable(error: BaseException) -> bool:
        first = _first(error)
        if isinstance(first, sqlite3.Error):
            return (getattr(first, "sqlite_errorcode", None) or 0) & 0xFF in _UNUSABLE_NOW
        import diskcache

        return isinstance(first, (OSError, MemoryError, _BusyError, diskcache.Timeout))

    def _unusable(self, error: BaseException) -> ProfileRefusedError:
        first = _first(error)
        code = (getattr(first, "sqlite_errorcode", None) or 0) & 0xFF
        number = first.errno if isinstance(first, OSError) else None
        if code in (sqlite3.SQLITE_FULL,) or number in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room on its disk"
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or isinstance(first, _BusyError) or not str(first):
            remedy = "it will be free again when that process is done"
        else:
            remedy = f"make it writable for user id {os.geteuid()} or point JUMPSTART_HOME somewhere else"
        said = str(first) or "another process holds it"
        return ProfileRefusedError(
            Reason.UNREADABLE, f"the warm-start cache {self._folder} cannot be used: {said}; {remedy}"
        )

    def _move_aside(self) -> str:
        """Rename the folder, keeping one such at most; return what became of it."""
        try:
            prefix = f"{self._folder.name}.broken-"
            for old in self._folder.parent.iterdir():
                if old.name.startswith(prefix):
                    shutil.rmtree(old, ignore_errors=True)
            aside = self._folder.with_name(f"{prefix}{uuid.uuid4().hex[:8]}")
            self._folder.rename(aside)
        except OSError as error:
            logger.warning("cannot move %s aside: %s", self._folder, error)
            return "remove it"
        return f"moved to {aside.name}"


class ValueStore:
    """
    Single values by key in a *folder* of their own, as `WarmStartCache` keeps states: same rules, same errors.

    The values that were entered first make room for others.
    """

    def __init__(self, folder: Path, *, size_limit_bytes: int = 64 * MIB, lock_timeout_s: float = 0.25) -> None:
        self._cache = WarmStartCache(folder, size_limit_bytes=size_limit_bytes, lock_timeout_s=lock_timeout_s)
        self._size_limit = size_limit_bytes

    def get(self, key: str) -> bytes | None:
        """Return the value, or None. A row that is not whole is none."""
        _check_key(key)
        if not self._cache._exists():
            return None
        with self._cache._opened() as rows:
            try:
                return _get(rows, key, "value")
            except _RowRefusedError:
                return None

    def put(self, key: str, value: bytes) -> None:
        """Enter or replace a value."""
        _check_key(key)
        with self._cache._opened() as rows:
            with rows.transact():
                count, volume = len(rows), rows.volume()
                if count >= MAX_ROWS or volume + len(value) > self._size_limit:
                    for row in list(itertools.islice(rows, max(count // 2, 1))):
                        rows.delete(row)
                _put(rows, key, "value", value)


# -- decisions --


def choose_sections(
    sections: Mapping[str, StoredSection], section_limit: int, total_limit: int
) -> tuple[dict[str, StoredSection], list[Refusal]]:
    """Leave out sections over *section_limit* bytes, then the largest until all fit into *total_limit* bytes."""
    kept = dict(sections)
    refusals = []
    total = sum(len(section.data) for section in kept.values())
    for name, section in sorted(sections.items(), key=lambda item: (-len(item[1].data), item[0])):
        size = len(section.data)
        limit = section_limit if size > section_limit else total_limit
        if size > section_limit or total > total_limit:
            refusals.append(Refusal(f"section {name}", Reason.TOO_LARGE, f"{size} bytes; {limit} are allowed"))
            total -= size
            del kept[name]
    return kept, refusals


def choose_evictions(others: Sequence[tuple[str, datetime | None, int]], needed: int, limit: int) -> list[str]:
    """
    Choose which *others* (key, time saved, bytes) go so that *needed* bytes fit into *limit*: oldest first.

    Those without a time are not whole and always go.
    """
    gone = [key for key, saved, _ in others if saved is None]
    whole = sorted((saved, key, size) for key, saved, size in others if saved is not None)
    total = needed + sum(size for _, _, size in whole)
    for _, key, size in whole:
        if total <= limit:
            break
        gone.append(key)
        total -= size
    return gone


# -- rows --


def _check_key(key: str) -> None:
    if not (0 < len(key) <= 500 and key.isprintable()):
        raise ValueError(f"key {key!r} is not printable text of up to 500 characters")


def _row_key(key: str, part: str) -> str:
    return f"{key}{_KEY_SEPARATOR}{part}"


def _frame(row_key: str, payload: bytes) -> bytes:
    return _FRAME + _checksum(row_key, payload) + payload


def _unframe(row_key: str, framed: bytes) -> bytes:
    payload = framed[len(_FRAME) + 32 :]
    if framed[: len(_FRAME)] != _FRAME or framed[len(_FRAME) : len(_FRAME) + 32] != _checksum(row_key, payload):
        raise _RowRefusedError("its checksum does not fit")
    return payload


def _checksum(row_key: str, payload: bytes) -> bytes:
    # The key is hashed too, so that a row cannot take the place of another.
    checksum = hashlib.sha256(row_key.encode() + b"\0")
    checksum.update(payload)
    return checksum.digest()


def _put(rows: Any, key: str, part: str, payload: bytes) -> None:
    row_key = _row_key(key, part)
    rows.set(row_key, _frame(row_key, payload))


def _get(rows: Any, key: str, part: str) -> bytes | None:
    row_key = _row_key(key, part)
    framed = rows.get(row_key)
    return None if framed is None else _unframe(row_key, framed)


def _load_state(rows: Any, key: str) -> StoredState | None:
    try:
        row = _state_row(rows, key)
    except (_RowRefusedError, msgspec.MsgspecError) as error:
        # Costs this state only; the next save replaces it.
        raise ProfileRefusedError(Reason.DAMAGED, f"the warm state of {key} is damaged: {error}") from error
    if row is None:
        return None
    sections, refusals = {}, []
    for each in row.sections:
        try:
            data = _get(rows, key, f"section/{each.name}")
        except _RowRefusedError as error:
            refusals.append(Refusal(f"section {each.name}", Reason.DAMAGED, str(error)))
            continue
        if data is None or len(data) != each.size:
            refusals.append(Refusal(f"section {each.name}", Reason.DAMAGED, "it is missing or has another size"))
            continue
        sections[each.name] = StoredSection(each.version, each.encoding, data)
    return StoredState(row.runtime, row.app, row.saved, sections, tuple(refusals))


def _state_row(rows: Any, key: str) -> _StateRow | None:
    """Return the manifest row of a state; None if it is absent or of another format; raises if it is not whole."""
    encoded = _get(rows, key, _MANIFEST_ROW)
    if encoded is None:
        return None
    if msgspec.json.decode(encoded, type=_Format).format != FORMAT:
        return None  # another Jumpstart's; the next save replaces it
    return msgspec.json.decode(encoded, type=_StateRow)


class _Format(msgspec.Struct):
    format: int


def _rows_by_state(rows: Any) -> dict[str, list[str]]:
    by_state: dict[str, list[str]] = {}
    for count, row in enumerate(rows.iterkeys()):
        if count >= MAX_ROWS:
            raise _RowRefusedError(f"it has over {MAX_ROWS} rows")
        by_state.setdefault(row.rpartition(_KEY_SEPARATOR)[0], []).append(row)
    return by_state


def _make_room(rows: Any, key: str, needed: int, limit: int) -> None:
    by_state = _rows_by_state(rows)
    others: list[tuple[str, datetime | None, int]] = []
    for other in by_state.keys() - {key}:
        try:
            row = _state_row(rows, other)
        except (_RowRefusedError, msgspec.MsgspecError):
            row = None
        if row is None:
            others.append((other, None, 0))
        else:
            others.append((other, row.saved, sum(each.size for each in row.sections)))
    for gone in [key, *choose_evictions(others, needed, limit)]:
        for row_key in by_state.get(gone, []):
            rows.delete(row_key)


# -- diskcache without its teeth --


def _first(error: BaseException) -> BaseException:
    """The error that began it: diskcache's ROLLBACK fails in its turn after SQLite has rolled back by itself."""
    while isinstance(error, sqlite3.Error) and isinstance(error.__context__, (sqlite3.Error, OSError)):
        error = error.__context__
    return error


def _inspect(database: Path, limit: int) -> None:
    """
    Raise if *database* exists and is not one that diskcache has made with our settings, or is locked.

    Only names, settings and triggers are looked at; rows are refused one by one as they are read.
    """
    import diskcache

    try:
        found = database.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise _RowRefusedError(f"{database.name} is not a regular file")
    if found.st_size == 0:
        return  # whoever was to make it was killed: there is nothing in it that could be lost
    if found.st_size > limit:
        raise _RowRefusedError(f"it has {found.st_size} bytes, {limit} are allowed")
    with contextlib.closing(
        sqlite3.connect(database, timeout=SQLITE_TIMEOUT_S, isolation_level=None, cached_statements=0)
    ) as connection:
        # Another program that holds a lock would make diskcache wait for 60 s; here it costs SQLITE_TIMEOUT_S.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master LIMIT 100"):
            ours = (
                (kind == "table" and name in ("Settings", "Cache"))
                or (kind == "index" and (name.startswith("Cache_") or name.startswith("sqlite_autoindex_")))
                # diskcache's triggers count rows; one that selects could compute for ever.
                or (kind == "trigger" and name.startswith("Settings_") and not _selects(sql))
            )
            if not ours:
                raise _RowRefusedError(f"it has a {kind} {name!r} that is not ours")
        known = diskcache.DEFAULT_SETTINGS.keys() | {"count", "size", "hits", "misses"}
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'Settings'").fetchone() is None:
            return
        for name, value in connection.execute("SELECT key, value FROM Settings LIMIT 100"):
            if name not in known or (name in _SETTINGS and value != _SETTINGS[name]):
                raise _RowRefusedError(f"it has a setting {name!r} that is not ours")


def _selects(sql: str) -> bool:
    text = sql.lower()
    return "select" in text or "with" in text or len(text) > 500


@cache
def _cache_class() -> Any:
    diskcache = _import_diskcache()

    class BytesOnlyDisk(diskcache.Disk):  # type: ignore[misc, name-defined]  # diskcache has no types
        """Stores and returns bytes under text keys, inside the database; refuses everything else."""

        def put(self, key: object) -> tuple[str, bool]:
            if type(key) is not str:
                raise _RowRefusedError(f"a key is {type(key).__name__}")
            return key, True

        def get(self, key: object, raw: object) -> str:
            if type(key) is not str or not raw:
                raise _RowRefusedError("a key is not plain text")
            return key

        def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, memoryview]:
            if type(value) is not bytes or read:
                raise _RowRefusedError(f"a value is {type(value).__name__}")
            return 0, _MODE_RAW, None, memoryview(value)

        def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
            if mode != _MODE_RAW or filename is not None or type(value) is not bytes or read:
                raise _RowRefusedError("it is not stored as plain bytes")
            return value

        def filename(self, key: object = None, value: object = None) -> tuple[str, str]:
            raise _RowRefusedError("values are never stored in files")

        def remove(self, file_path: object) -> None:
            """Nothing: a row's file name is not ours, whatever it points to."""

    class Cache(diskcache.Cache):  # type: ignore[misc, name-defined]  # diskcache has no types
        def __init__(self, directory: str) -> None:
            try:
                super().__init__(directory, timeout=SQLITE_TIMEOUT_S, disk=BytesOnlyDisk, **_SETTINGS)
            except BaseException:
                if hasattr(self, "_local"):
                    self.close()  # its constructor leaves the connection open when it fails
                raise

    return Cache


def _import_diskcache() -> Any:
    """
    Import diskcache, which takes 50 ms, where something is stored; without Django, which it would import if installed.

    That would cost another 110 ms, and put modules into the process that the app should be seen to import.
    """
    hidden = "django" not in sys.modules
    if hidden:
        sys.modules["django"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        import diskcache
    finally:
        if hidden:
            del sys.modules["django"]
    return diskcache


_MODE_RAW = 1  # diskcache.core.MODE_RAW
