"""
Where a host keeps its state, and the check that nobody else can write there.

Nothing here reads the environment: `host_paths` is handed it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jumpstart.errors import ProfileRefusedError
from jumpstart.records import Reason

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class HostPaths:
    """
    The three roots of a host's state. None of them need exist.

    Attributes:
        cache: may be deleted at any time; costs a colder boot.
        state: what happened on this host.
        config: what the operator decided, the keys above all.
    """

    cache: Path
    state: Path
    config: Path

    @property
    def warm_start(self) -> Path:
        """The folder of the warm-start cache."""
        return self.cache / "warm-start"

    @property
    def profiles(self) -> Path:
        """The folder of the local copies of stores of profiles."""
        return self.cache / "profiles"

    @property
    def keys(self) -> Path:
        """The folder of the key ring."""
        return self.config / "keys"

    @property
    def run(self) -> Path:
        """Sockets and process ids of running servers."""
        return self.state / "run"

    @property
    def ledger(self) -> Path:
        """The folder of the boot ledger."""
        return self.state / "ledger"


def host_paths(environ: Mapping[str, str], home: Path) -> HostPaths:
    """
    Return the roots that *environ* asks for: ``$JUMPSTART_HOME/{cache,state,config}``, else the XDG folders.

    As the XDG specification says, a variable that is empty or holds a relative path counts as unset. A relative
    ``$JUMPSTART_HOME`` is taken from the current folder.
    """
    own = environ.get("JUMPSTART_HOME", "")
    if own:
        root = Path(own).absolute()
        return HostPaths(cache=root / "cache", state=root / "state", config=root / "config")

    def xdg(variable: str, default: Path) -> Path:
        value = environ.get(variable, "")
        return (Path(value) if value and Path(value).is_absolute() else default) / "jumpstart"

    return HostPaths(
        cache=xdg("XDG_CACHE_HOME", home / ".cache"),
        state=xdg("XDG_STATE_HOME", home / ".local" / "state"),
        config=xdg("XDG_CONFIG_HOME", home / ".config"),
    )


def private_folder(path: Path) -> Path:
    """
    Return *path*, a folder that only this user can write to; it and missing parents are made with mode 0700.

    Raises:
        ProfileRefusedError: `Reason.UNSAFE_OWNER`: it is a symlink, not a folder, another user's, or writable by
            others; `Reason.UNREADABLE`: the operating system does not let us make or look at it.
    """
    try:
        _make_private(path)
        found = path.lstat()
    except FileExistsError as error:
        raise ProfileRefusedError(
            Reason.UNSAFE_OWNER, f"{error.filename} is in the way: it is not a folder; move it away"
        ) from error
    except OSError as error:
        raise ProfileRefusedError(
            Reason.UNREADABLE,
            f"cannot make or open the folder {path}: {error.strerror}; make it writable for user id {os.geteuid()} "
            "or point JUMPSTART_HOME somewhere else",
        ) from error
    problem = _problem(found)
    if problem is not None:
        raise ProfileRefusedError(Reason.UNSAFE_OWNER, f"{path} {problem}")
    return path


def why_not_writable(path: Path) -> str | None:
    """
    Say why the folder *path* could not be made or written to, or None when it could. Makes nothing.

    A cheap look at the nearest folder that is there; what it promises, the file system may still break.
    """
    for folder in (path, *path.parents):
        try:
            found = folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            return f"{folder} cannot be looked at: {getattr(error, 'strerror', None) or error}"
        if not stat.S_ISDIR(found.st_mode):
            return f"{folder} is not a folder"
        effective = os.access in os.supports_effective_ids
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=effective):
            return f"{folder} is not writable for user id {os.geteuid()}"
        return None
    return f"{path} has no parent"


def _make_private(path: Path) -> None:
    # Not os.makedirs: its mode applies to the last folder only.
    missing = [path]
    for parent in path.parents:
        if os.path.lexists(parent):
            break
        missing.append(parent)
    for folder in reversed(missing):
        if not os.path.lexists(folder):
            with contextlib.suppress(FileExistsError):  # another process was faster; what it made is checked below
                folder.mkdir(0o700)
    if not path.is_symlink() and not path.is_dir():
        raise FileExistsError(17, "not a folder", str(path))


def _problem(found: os.stat_result) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link; replace it by a folder of your own"
    if found.st_uid != os.geteuid():
        return (
            f"belongs to user id {found.st_uid}, this process runs as {os.geteuid()}; "
            "change its owner or point JUMPSTART_HOME somewhere else"
        )
    if found.st_mode & OTHERS_MAY_WRITE:
        return (
            f"(owner: user id {found.st_uid}) may be written by others (mode {stat.S_IMODE(found.st_mode):04o}); "
            "chmod it to 0700"
        )
    return None
