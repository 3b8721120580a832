"""
``--user`` and ``--group``: who the processes that run the app are, while the supervisor stays root for ports and logs.

The supervisor hands over what these processes open by name (`give_file`). What only root may read, the warm-start cache
and the keys, `mold.py` reads before it calls `drop`; what workers learn comes back as messages, and the supervisor
writes it. So the app's user can write nothing that root, or the next boot, would trust.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from jumpstart.errors import ConfigError, JumpstartError


class PrivilegesError(JumpstartError):
    """The kernel did not let us become somebody else, or let us come back."""


@dataclass(frozen=True)
class Identity:
    """
    Who the app's processes are to be.

    Attributes:
        user: their name; empty where the password file has none, or no user was asked for.
        home: their home folder; empty where it is not known.
    """

    uid: int
    gid: int
    user: str = ""
    home: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether this process is that already."""
        return (self.uid, self.gid) == (os.geteuid(), os.getegid())

    def __str__(self) -> str:
        return self.user or f"user id {self.uid}"

    @property
    def variables(self) -> dict[str, str]:
        """What a login would set: an app must not look for its files in root's home."""
        known = {"HOME": self.home, "USER": self.user, "LOGNAME": self.user}
        return {name: value for name, value in known.items() if value}


def identity_of(user: str, group: str, *, options: tuple[str, str] = ("--user", "--group")) -> Identity | None:
    """
    Return who ``--user`` and ``--group`` mean, each a name or a number; None where they ask for no change.

    Args:
        options: where the two stand, for the error.

    Raises:
        ConfigError: there is no such user or group, or this process may not become them.
    """
    if not user and not group:
        return None
    identity = _look_up(user, group, options)
    if identity.is_ours:
        return None
    if os.geteuid() != 0:
        given = " ".join(f"{option} {value}" for option, value in zip(options, (user, group), strict=True) if value)
        raise ConfigError(
            f"{given}: only root may become another user, and this is user id {os.geteuid()}; "
            "start it as root, or leave the option out"
        )
    return identity


def _look_up(user: str, group: str, options: tuple[str, str]) -> Identity:
    uid, gid, name, home = os.geteuid(), os.getegid(), "", ""
    if user:
        try:
            entry = pwd.getpwuid(int(user)) if _is_number(user) else pwd.getpwnam(user)
        except (KeyError, ValueError):  # a NUL, or what the system's names cannot hold
            if not _is_number(user):
                raise ConfigError(f"{options[0]} {user}: there is no such user") from None
            if not group:
                raise ConfigError(
                    f"{options[0]} {user}: no user has this number; name its group too, with --group"
                ) from None
            uid = int(user)
        else:
            uid, gid, name, home = entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir
    if group:
        try:
            gid = int(group) if _is_number(group) else grp.getgrnam(group).gr_gid
        except (KeyError, ValueError):
            raise ConfigError(f"{options[1]} {group}: there is no such group") from None
    return Identity(uid, gid, name, home)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def drop(identity: Identity) -> None:
    """
    Become *identity*, for good: its groups, then its group, then its user.

    The kernel forgets meanwhile that this process is to die with its parent: call `system.die_with_parent` afterwards.

    Raises:
        PrivilegesError: we could not, or could go back.
    """
    try:
        if identity.user:
            os.initgroups(identity.user, identity.gid)
        else:
            os.setgroups([identity.gid])
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    except OSError as error:
        raise PrivilegesError(f"--user: cannot become {identity}: {error.strerror or error}") from error
    if identity.uid == 0:
        return
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise PrivilegesError(f"--user: became {identity}, but may become root again; this kernel or container is not safe")


def give_file(path: str, identity: Identity) -> None:
    """
    Make the file *path* if need be, and give it to *identity*, who is to open it by its name.

    Only regular files that are root's or *identity*'s, under one name: whoever may write to the folder must not have
    root give away another file by a link. Others are left as they are.

    Raises:
        ConfigError: it cannot be made, or *identity* may not come to it.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        number = os.open(path, flags, 0o640)
    except OSError as error:
        if Path(path).exists():
            return  # a link, a pipe that nobody reads: whether it can be opened shows when it is
        raise ConfigError(f"{path}: cannot be made: {error.strerror or error}") from None
    try:
        found = os.fstat(number)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in (0, os.geteuid(), identity.uid):
            os.fchown(number, identity.uid, identity.gid)
    finally:
        os.close(number)


def give_socket(path: str, identity: Identity) -> None:
    """
    Give the file of a Unix socket that was just bound to *identity*, as gunicorn does: so ``660`` lets its group in.

    Raises:
        ConfigError: it cannot be given.
    """
    try:
        os.chown(path, identity.uid, identity.gid, follow_symlinks=False)
    except OSError as error:
        raise ConfigError(f"unix:{path}: cannot be given to {identity}: {error.strerror or error}") from None


def unreachable(paths: dict[str, str], identity: Identity) -> str | None:
    """
    Say which of *paths* (option → path) this process, which is *identity* now, may not read; None when it may all.
    """
    for option, path in paths.items():
        may_read = os.access(path, os.R_OK) and (os.access(path, os.X_OK) or not Path(path).is_dir())
        if path and not may_read:
            return f"{option} {path}: {identity} may not read it; let that user or its group in, also into its folders"
    return None
