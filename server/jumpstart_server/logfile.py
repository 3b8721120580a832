"""
A file that many processes and threads append lines to, and that may be moved away under them.

One line is one ``write`` on a descriptor opened with O_APPEND, which the kernel never mixes with another's. There is no
lock: a thread that writes holds a reference to the descriptor, which is closed when the last reference goes. So after
`reopen` or `close` nobody writes to a closed descriptor, nor to one whose number has been given to a connection.
"""

from __future__ import annotations

import os
import select
import stat
import weakref
from collections.abc import Callable

STREAM = "-"  # the file name that stands for a standard stream
STDOUT, STDERR = 1, 2
PATHS_OF_STREAMS = {"/dev/stdout": STDOUT, "/dev/stderr": STDERR}
"""Not opened: another user may not open by its name the pipe that root made."""

PATIENCE = 0.2  # seconds to wait once for the reader of a full pipe; lines are dropped from then on until it reads

_open_files: weakref.WeakSet[LogFile] = weakref.WeakSet()


class ShortWriteError(OSError):
    """Less than the whole line went out."""


class StalledError(OSError):
    """The pipe is full, and nobody reads it."""


class _Descriptor:
    """A descriptor that is closed when nobody uses it any more."""

    __slots__ = ("_owned", "number")

    def __init__(self, number: int, *, owned: bool) -> None:
        self.number = number
        self._owned = owned

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # which is gone when the interpreter ends
        if self._owned:
            close(self.number)


class LogFile:
    """
    One log file, or a standard stream. All methods may be called from any thread and from signal handlers.

    Attributes:
        path: as given; ``-`` is the stream.
        whole_bytes: only a write up to this size is sure not to be mixed with another's; 0 is any size. Pipes have such
            a limit (POSIX's PIPE_BUF), files have none.
    """

    def __init__(self, path: str, stream: int, *, must_open: bool = True) -> None:
        """
        Open *path*, or take the descriptor *stream* where it is ``-``.

        Args:
            must_open: if not, a file that cannot be opened is one that takes no lines until it is reopened.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        self._stream = stream
        self._torn = False
        self._stalled = False
        self._descriptor: _Descriptor | None = None
        self.whole_bytes = 0
        try:
            self.reopen()
        except OSError:
            if must_open:
                raise
        _open_files.add(self)

    def write(self, line: bytes) -> None:
        """
        Write *line*, with its line end, at once or not at all.

        Raises:
            OSError: it is not written whole. The next line begins on a line of its own all the same.
        """
        descriptor = self._descriptor
        if descriptor is None:
            raise OSError("the log file is not open")
        torn = self._torn
        if torn:
            line = b"\n" + line
        if self.whole_bytes:
            self._wait_for_room(descriptor.number)
        written = os.write(descriptor.number, line)
        if written < len(line):
            self._torn = True
            raise ShortWriteError(f"no room for more than {written} of {len(line)} bytes")
        if torn:
            self._torn = False

    def _wait_for_room(self, number: int) -> None:
        """A log shipper that has stopped must not stop the server: see that a write to its pipe would not wait."""
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        if poll.poll(0) or (not self._stalled and poll.poll(PATIENCE * 1000)):
            self._stalled = False
            return
        self._stalled = True
        raise StalledError("the pipe is full, and nobody reads it")

    def reopen(self) -> None:
        """
        Open the file of this name anew, and make it if need be; then write there. A stream stays as it is.

        Raises:
            OSError: it cannot be opened. The one before is used on.
        """
        if self.path == STREAM or self.path in PATHS_OF_STREAMS:
            fresh = _Descriptor(PATHS_OF_STREAMS.get(self.path, self._stream), owned=False)
        else:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY
            # Not blocking while it is opened: a FIFO that nobody reads would stop us here for ever.
            fresh = _Descriptor(os.open(self.path, flags | os.O_NONBLOCK, 0o666), owned=True)
            os.set_blocking(fresh.number, True)
        mode = os.fstat(fresh.number).st_mode
        self.whole_bytes = select.PIPE_BUF if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else 0
        self._torn = False
        self._descriptor = fresh

    def close(self) -> None:
        """Take no more; what is being written is written."""
        self._descriptor = None
        _open_files.discard(self)

    def onto(self, *numbers: int) -> None:
        """Let the descriptors *numbers* lead to this file too."""
        descriptor = self._descriptor
        if descriptor is not None:
            for number in numbers:
                os.dup2(descriptor.number, number)


def open_files() -> list[LogFile]:
    """All that are open in this process."""
    return list(_open_files)


def cannot_open(option: str, path: str, error: Exception) -> str:
    """What to tell the operator about a log file that *option* names."""
    why = getattr(error, "strerror", None) or error
    return f"{option} {path}: cannot be opened: {why}; name a file in a folder that exists and that this user may write"
