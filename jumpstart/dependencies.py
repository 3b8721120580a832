"""
Which real-time values a computation has read, and which of them its caller has seen.

A source (`jumpstart.Config`) calls `note_read` for each key that somebody reads. What computes a value that is kept
(`jumpstart.cached`) wraps the computation in `collect` and so learns what the value stands on. Each caller (a request;
outside of requests a thread or task) has a memory of the newest versions that it has seen, so that it can be kept from
being given something older.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from jumpstart import context


class Source(Protocol):
    """
    A named set of values that change. Hashable by identity, and can be referred to weakly.

    `version` grows whenever the value of *key* changed; 0: it was never fetched. It is cheap, and safe in any thread.
    Listeners are called off the request path, after the swap, with the keys that changed.
    """

    @property
    def name(self) -> str: ...
    def version(self, key: str) -> int: ...
    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> None: ...


Versions: TypeAlias = dict[tuple[Source, str], int]


_lock = threading.Lock()  # held for a few dictionary operations, which call nothing


class Collector:
    """
    What one computation has read.

    Attributes:
        reads: the **oldest** version that it has read of each key, since the result may stand on that one.
        parent: of the computation that this one is part of.
    """

    __slots__ = ("__weakref__", "is_open", "parent", "reads")

    def __init__(self, parent: Collector | None) -> None:
        self.reads: Versions = {}
        self.parent = parent
        self.is_open = True

    def add(self, reads: Mapping[tuple[Source, str], int]) -> None:
        """Count what another computation has read as read by this one, since it uses its result."""
        with _lock:
            for place, version in reads.items():
                if version < self.reads.get(place, version + 1):
                    self.reads[place] = version

    def is_inside(self, other: Collector) -> bool:
        """Whether this computation is *other*, or a part of it."""
        each: Collector | None = self
        while each is not None:
            if each is other:
                return True
            each = each.parent
        return False


_collector: ContextVar[Collector | None] = ContextVar("jumpstart_collector", default=None)
_seen: ContextVar[Versions | None] = ContextVar("jumpstart_seen", default=None)  # outside of requests


def note_read(source: Source, key: str, version: int | None = None) -> None:
    """
    Say that the current code reads *key* of *source*.

    Pass the *version* of the very value that is handed out, read together with it. Without it `source.version` is
    asked, which is right only where value and version cannot change between the two.
    """
    read = {(source, key): source.version(key) if version is None else version}
    note_seen(read)
    collector = _collector.get()
    if collector is not None and collector.is_open:
        collector.add(read)


def note_used(reads: Mapping[tuple[Source, str], int]) -> None:
    """Say that the current code uses a value that was computed from *reads*."""
    note_seen(reads)
    collector = _collector.get()
    if collector is not None and collector.is_open:
        collector.add(reads)


def note_seen(reads: Mapping[tuple[Source, str], int]) -> None:
    """Say that the current caller knows these versions now."""
    request = context.current()
    seen = _seen.get() if request is None else request.seen
    if seen is None:
        seen = {}
        if request is None:
            _seen.set(seen)
        else:
            request.seen = seen
    if any(version > seen.get(place, -1) for place, version in reads.items()):
        with _lock:  # threads of one request share what it has seen, which must not go back
            for place, version in reads.items():
                if version > seen.get(place, -1):
                    seen[place] = version


def note_current(reads: Mapping[tuple[Source, str], int]) -> None:
    """Say that the current caller wants nothing that is older than what the sources have now."""
    note_seen({(source, key): source.version(key) for source, key in reads})


def has_seen_newer(reads: Mapping[tuple[Source, str], int]) -> bool:
    """Whether the current caller has seen a newer version of any of *reads*."""
    request = context.current()
    seen = _seen.get() if request is None else request.seen
    if not seen:
        return False
    return any(seen.get(place, -1) > version for place, version in reads.items())


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)


def is_outdated(reads: Mapping[tuple[Source, str], int]) -> bool:
    """Whether any source has a newer version by now."""
    return any(source.version(key) > version for (source, key), version in reads.items())


def collecting() -> Collector | None:
    """The collector of the computation that the current code is part of."""
    return _collector.get()


@contextlib.contextmanager
def collect() -> Iterator[Collector]:
    """
    Collect the reads of the block, and of the threads and tasks in it that copy its context.

    Afterwards they count as reads of the computation around it too, whether the block ended well or not.
    """
    parent = _collector.get()
    collector = Collector(parent)
    token = _collector.set(collector)
    try:
        yield collector
    finally:
        _collector.reset(token)
        collector.is_open = False
        if parent is not None and parent.is_open and collector.reads:
            parent.add(collector.reads)
