"""`wsgi.file_wrapper`, which the kernel copies to the socket where it can."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from typing import Any

BLOCK_BYTES = 64 * 1024


class FileWrapper:
    """
    An iterable over a file-like object (PEP 3333), closed with it.

    A regular file that is returned as it is goes through sendfile; anything else in blocks.
    """

    def __init__(self, filelike: Any, blksize: int = BLOCK_BYTES) -> None:
        self.filelike = filelike
        self.blksize = blksize
        close = getattr(filelike, "close", None)
        if close is not None:
            self.close = close

    def __iter__(self) -> Iterator[bytes]:
        while data := self.filelike.read(self.blksize):
            yield data

    def extent(self) -> tuple[int, int, int] | None:
        """Descriptor, position and bytes from there to the end; None unless it is a regular file read in binary."""
        filelike = self.filelike
        if isinstance(filelike, io.TextIOBase):
            return None
        try:
            fd = filelike.fileno()
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            position = filelike.tell()
        except (AttributeError, OSError, ValueError, TypeError):
            return None
        # A wrapper may hand out other bytes than its file's: gzip.GzipFile has the fileno of the compressed one.
        inner: Any = getattr(filelike, "file", None) if type(filelike).__module__ == "tempfile" else filelike
        if type(inner) in (io.BufferedReader, io.BufferedRandom):
            inner = inner.raw
        if type(inner) is not io.FileIO or not inner.readable():
            return None
        if not status.st_size:
            return None  # empty, or one of those that the kernel makes up as they are read (/proc)
        return fd, position, max(status.st_size - position, 0)
