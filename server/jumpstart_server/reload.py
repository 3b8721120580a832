"""
``--reload``: which files have changed since the last look.

By looking at modification times, as it works on every file system, in containers and over networks too. `changes` and
`Patterns` decide; `scan` and `watch` look.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

INCLUDED = ("*.py",)
NEVER = ("__pycache__", ".*")  # folders that are not looked into
SHOWN = 3  # names in a log line

Stamps = dict[str, tuple[int, int]]
"""Path → modification time in nanoseconds, and size."""


@dataclass(frozen=True)
class Patterns:
    """
    Which files count; as of uvicorn's options.

    Attributes:
        include: names or paths with wildcards that count, beside *.py.
        exclude: those that do not, files or folders; it beats *include*.
    """

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @classmethod
    def of(cls, include: Sequence[str], exclude: Sequence[str]) -> Patterns:
        """Of the options. ``*.py`` counts unless it is excluded."""
        return cls((*(each for each in INCLUDED if each not in exclude), *include), (*NEVER, *exclude))

    def counts(self, path: str) -> bool:
        """Whether a file counts; *path* is relative to the folder that is watched."""
        return _matches(path, self.include) and not _matches(path, self.exclude)

    def enters(self, path: str) -> bool:
        """Whether to look into a folder."""
        return not _matches(path, self.exclude)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatch(name, pattern) or fnmatch(path, pattern.rstrip("/")) for pattern in patterns)


def changes(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> list[str]:
    """Files that are new, other than they were, or gone; sorted."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def describe(changed: Sequence[str], folders: Sequence[str]) -> str:
    """For a log line: the first few, as seen from the folder that is watched."""
    names = []
    for path in changed[:SHOWN]:
        folder = next((each for each in folders if path.startswith(each + os.sep)), "")
        names.append(path.removeprefix(folder + os.sep) if folder else path)
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return ", ".join(names) + more


def scan(folders: Sequence[str], patterns: Patterns) -> Stamps:
    """Look at every file that counts. What cannot be read is not there."""
    found: Stamps = {}
    for folder in folders:
        pending = [folder]
        while pending:
            try:
                entries = list(os.scandir(pending.pop()))
            except OSError:
                continue
            for entry in entries:
                relative = os.path.relpath(entry.path, folder)
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if patterns.enters(relative):
                            pending.append(entry.path)
                    elif patterns.counts(relative):
                        status = entry.stat()
                        found[entry.path] = (status.st_mtime_ns, status.st_size)
                except OSError:
                    continue  # gone between the two looks
    return found


async def watch(folders: Sequence[str], patterns: Patterns, interval_s: float) -> AsyncGenerator[list[str], None]:
    """
    Yield what has changed, once it has stopped changing for *interval_s* seconds: an editor or a checkout writes files
    one after the other.
    """
    known = await asyncio.to_thread(scan, folders, patterns)
    while True:
        await asyncio.sleep(interval_s)
        now = await asyncio.to_thread(scan, folders, patterns)
        if now == known:
            continue
        while True:
            await asyncio.sleep(interval_s)
            later = await asyncio.to_thread(scan, folders, patterns)
            if later == now:
                break
            now = later
        changed, known = changes(known, now), now
        if changed:
            yield changed
