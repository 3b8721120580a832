"""
kill -9 at each point of a stage: each time that it is about to touch a file of ours, in a child forked for that point.

A *point* is what changes a file: what the interpreter reports to an audit hook (open for writing, rename, link, remove,
mkdir, …, a step of SQLite, a connection), and each `os.write`, which it does not report; of files below the stage's
folder only. A child ends itself just before it, in a write when half of it is written. Reading, closing and syncing are
no points, since whoever is killed there leaves what he leaves at the next change. Other files, of the interpreter or of
a library, are none either: what happens to them is nobody's business here.

One process imports everything once and forks for each point, which takes milliseconds; so stages can be killed at all
of their points. A stage is a function of a folder, named ``module:function``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
STEPS = 40  # instructions of SQLite's machine between two points
WITH_PATH = {  # audit event: position of the path that tells whether it is ours
    **{"open": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0},
    **{"os.truncate": 0, "os.chmod": 0, "shutil.rmtree": 0, "sqlite3.connect": 0},
}
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
LIMIT_POINTS = 2000
# What the stages import when they need it; each child would do so again.
PRELOADED = (
    *("diskcache", "cryptography.hazmat.primitives.serialization", "cryptography.exceptions"),
    *("jumpstart_server.cli.profile", "jumpstart_server.cli.foreign", "jumpstart.fetching"),
)


@dataclass(frozen=True)
class Run:
    """What became of a run: *where* it was killed (empty: it ran to its end), and after how many points it ended."""

    where: str
    points: int


class Killer:
    """Runs stages in children that it forks; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.jumpstart.killing"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def run(self, stage: str, folder: Path, point: int = 0, bytes_limit: int = 0) -> Run:
        """
        Run *stage* in *folder*; kill it at that *point*, or when it writes beyond *bytes_limit* into a file.

        Raises:
            AssertionError: the stage raised; its traceback is on standard error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        order = [stage, str(folder), point, bytes_limit]
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        where, points, code = json.loads(self._process.stdout.readline())
        assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ), f"{stage} ended with {code} ({where})"
        return Run(where if code else "", points)

    def each_point(self, stage: str, folders: Callable[[int], Path], step: int = 1) -> Iterator[tuple[Path, str]]:
        """
        Run *stage* again and again, killed at its first, second, … point, each time in a folder of its own.

        Yields the folder and where it was killed; the last time an empty text: it ran to its end.
        """
        for point in range(1, LIMIT_POINTS, step):
            folder = folders(point)
            run = self.run(stage, folder, point)
            yield folder, run.where
            if not run.where:
                return
        raise AssertionError(f"{stage} has over {LIMIT_POINTS} points")


# -- in the process that forks --


def main() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # children do not copy what they never change
    for line in sys.stdin.buffer:
        stage, folder, point, bytes_limit = json.loads(line)
        module, _, name = stage.partition(":")
        work = getattr(importlib.import_module(module), name)
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            _run(work, Path(folder), point, bytes_limit, theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as said:
            where, _, points = said.read().decode().rpartition(" ")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGXFSZ:
            where = f"over {bytes_limit} bytes"
        os.write(1, json.dumps([where, int(points or 0), code]).encode() + b"\n")


def _run(work: Callable[[Path], object], folder: Path, point: int, bytes_limit: int, tell: int) -> NoReturn:
    code = 1
    try:
        if bytes_limit:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_limit, bytes_limit))
        points = _Points(folder, point, tell)
        points.arm()
        work(folder)
        points.finish()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(code)


class _Points:
    def __init__(self, folder: Path, last: int, tell: int) -> None:
        self._folder = str(folder)
        self._last = last
        self._tell = tell
        self._count = 0
        self._is_over = False
        self._write = os.write

    def arm(self) -> None:
        sys.addaudithook(self._audit)
        os.write = self._halved(os.write)
        connect = sqlite3.connect

        def watched(*arguments: Any, **words: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **words)
            connection.set_progress_handler(lambda: self._reach("sqlite"), STEPS)
            return connection

        sqlite3.connect = watched  # type: ignore[assignment]  # in a child for this alone

    def finish(self) -> None:
        self._is_over = True
        self._write(self._tell, f" {self._count}".encode())

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not arguments[2] & CHANGING:
            return
        if event == "socket.connect" or (event in WITH_PATH and self._is_ours(arguments[WITH_PATH[event]])):
            self._reach(event)

    def _halved(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(descriptor: int, data: bytes) -> int:
            if not self._is_over and self._is_ours(descriptor):
                self._reach("os.write", lambda: real(descriptor, bytes(data)[: len(data) // 2]))
            return real(descriptor, data)

        return write

    def _is_ours(self, path: object) -> bool:
        if isinstance(path, int):
            with contextlib.suppress(OSError):
                return str(Path(f"/proc/self/fd/{path}").readlink()).startswith(self._folder)
            return False
        return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(self._folder)

    def _reach(self, where: str, before: Callable[[], object] | None = None) -> None:
        if self._is_over:
            return
        self._count += 1
        if self._count == self._last:
            self._is_over = True
            if before is not None:
                before()
            self._write(self._tell, f"{where} {self._count}".encode())
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
