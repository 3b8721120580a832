"""
Files that are there whole or not at all, whoever is killed meanwhile and however full the disk is.

`write_new` gives the file its name when it is whole (``O_TMPFILE``, then a hard link), so that not even ``kill -9``
leaves anything behind. Where the file system has no such files, and for `replace`, which has to rename, there is a
temporary file with a name that `sweep` knows: whoever writes into the same folder next clears away what a killed
process left there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

TEMPORARY = re.compile(r"\.jumpstart-([0-9a-f]{8})-(\d{1,10})-[0-9a-f]{8}\.tmp")  # host, process, random
STALE_AFTER_S = 600.0  # seconds after which a temporary file of another host is nobody's; writing one takes far less
_NO_NAMELESS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EPERM})


def write_new(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """
    Write a file that is not there yet, synced to disk; return False when there is one of that name, which stays.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    nameless = _open_nameless(path.parent, mode)
    if nameless is None:
        return _write_named(path, data, mode, lambda temporary: _link(temporary, path))
    try:
        _fill(nameless, data)
        made = _name(nameless, path)
    finally:
        os.close(nameless)
    sync_folder(path.parent)
    return made


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file in the place of the one that may be there; raises OSError as `write_new` does."""

    def rename(temporary: Path) -> bool:
        temporary.replace(path)
        return True

    _write_named(path, data, mode, rename)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """
    A folder for this user alone, where the system keeps temporary ones, until the context ends.

    Those of killed processes go first.

    Raises:
        OSError: it cannot be made.
    """
    import shutil
    import tempfile  # both cost a boot more than all of this module, and hardly any boot needs them

    place = Path(tempfile.gettempdir())
    sweep(place)
    folder = place / temporary_name()
    folder.mkdir(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> int:
    """Remove the temporary files and folders that killed processes left in *folder*; return how many."""
    removed = 0
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            found = TEMPORARY.fullmatch(path.name)
            if found is not None:
                with contextlib.suppress(OSError):
                    if _is_nobodys(path, found[1], int(found[2])):
                        if path.is_dir() and not path.is_symlink():
                            import shutil

                            shutil.rmtree(path)
                        else:
                            path.unlink()
                        removed += 1
    return removed


def temporary_name() -> str:
    """A name for a temporary file that `sweep` knows, and whose process it can look for."""
    return f".jumpstart-{_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _is_nobodys(path: Path, host: str, pid: int) -> bool:
    if host == _host():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # it is another user's, and lives
        return False
    return datetime.now(UTC).timestamp() - path.stat().st_mtime >= STALE_AFTER_S  # file times are of the wall clock


@cache
def _host() -> str:
    """Names the space that process ids are of: this boot of this host, and its container."""
    words = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            words.append(str(Path(path).readlink()) if path.endswith("pid") else Path(path).read_text())
    return hashlib.sha256("\0".join([os.uname().nodename, *words]).encode()).hexdigest()[:8]


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """
    Hold the lock file *path*, made if need be; it goes with the process.

    Raises:
        TimeoutError: another process has held it for *timeout_s* seconds.
        OSError: it cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        give_up = clock() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock() >= give_up:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds it", str(path)) from None
                time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # said, since a child that was forked meanwhile has a copy
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in *folder* on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_nameless(folder: Path, mode: int) -> int | None:
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").is_dir():
        return None
    try:
        return os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in _NO_NAMELESS_FILES and folder.is_dir():
            return None
        raise


def _write_named(path: Path, data: bytes, mode: int, finish: Callable[[Path], bool]) -> bool:
    temporary = path.with_name(temporary_name())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            _fill(descriptor, data)
        finally:
            os.close(descriptor)
        made = finish(temporary)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return made


def _fill(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


def _name(descriptor: int, path: Path) -> bool:
    # Through /proc, since linking a descriptor itself takes a privilege; and relative to an open folder, since Python
    # has the link followed only then.
    links = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(descriptor), path, src_dir_fd=links, follow_symlinks=True)
    except FileExistsError:
        return False
    finally:
        os.close(links)
    return True
