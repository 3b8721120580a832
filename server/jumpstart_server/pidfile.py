"""The file of ``--pid``: who is serving, for scripts that send signals. One living owner at a time."""

from __future__ import annotations

import os
from pathlib import Path

from jumpstart import files
from jumpstart.errors import ConfigError


class PidFile:
    """Written by `write`, taken away by `remove` while it still names us."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._pid = 0

    def write(self, pid: int) -> None:
        """
        Write *pid*, whole or not at all; a file that is left over from a dead process is replaced.

        Call after the addresses are bound: who reads it may count on them.

        Raises:
            ConfigError: a living process is named in it, something else lies there, or it cannot be written.
        """
        owner = self.owner()
        if owner not in (None, pid) and _is_alive(owner):
            raise ConfigError(f"--pid {self.path}: process {owner} is running; stop it, or name another file")
        try:
            self._replace(pid)
        except OSError as error:
            raise ConfigError(f"--pid {self.path}: cannot be written: {error.strerror or error}") from None
        self._pid = pid

    def owner(self) -> int | None:
        """
        The pid that the file holds; None where there is no file, or an empty one.

        Raises:
            ConfigError: it holds something else, which is somebody's, or cannot be read.
        """
        try:
            if not self.path.is_file() and os.path.lexists(self.path):
                raise ConfigError(f"--pid {self.path}: something that is not a file lies there; name another file")
            text = self.path.read_bytes()[:64].strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"--pid {self.path}: cannot be read: {error.strerror or error}") from None
        if not text:
            return None
        if not (text.isdigit() and 0 < int(text) < 1 << 31):
            raise ConfigError(f"--pid {self.path}: holds something that is not a pid; remove it or name another file")
        return int(text)

    def remove(self) -> None:
        """Unlink the file if it is ours still. Never raises."""
        if not self._pid:
            return
        try:
            if self.owner() == self._pid:
                self.path.unlink()
        except (OSError, ConfigError):
            pass  # the folder is gone, or somebody has put something else there
        self._pid = 0

    def _replace(self, pid: int) -> None:
        files.sweep(self.path.parent)
        files.replace(self.path, f"{pid}\n".encode(), 0o644)
        self.path.chmod(0o644)  # whatever the umask: it is for others to read


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
