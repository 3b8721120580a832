"""
CPU time of a coroutine: what `time.thread_time` is for a thread.

An event loop runs many coroutines in one thread, so the thread's clock says nothing about one of them. But each step of
a coroutine, from one ``await`` that waits to the next, runs in one piece.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

EVERY = 32  # requests of which one is measured; a measurement costs as much as a tenth of a small request
PATHS = 1024


class Measured(Generic[T]):
    """
    Await it instead of the coroutine. Tasks that the coroutine starts, and threads, are not counted.

    Attributes:
        cpu_s: seconds on the CPU so far.
    """

    __slots__ = ("_clock", "_coroutine", "cpu_s")

    def __init__(self, coroutine: Coroutine[Any, Any, T], clock: Callable[[], float] = time.thread_time) -> None:
        self.cpu_s = 0.0
        self._coroutine = coroutine
        self._clock = clock

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, clock = self._coroutine, self._clock
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                began = clock()
                try:
                    waited_for = coroutine.send(value) if error is None else coroutine.throw(error)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self.cpu_s += clock() - began
                value = error = None
                try:
                    value = yield waited_for
                except BaseException as thrown:
                    error = thrown
        finally:
            coroutine.close()
            error = None  # no cycle through the frame


class Sampler:
    """
    Whose CPU time is measured: the first request of each path, and then one in about `EVERY`.

    Each request asks, so it looks by itself: it is one of the sample when *left*, of which it takes 1 off, comes to 0,
    or when its path is not among those *known* and these are not all; then it calls `take`.

    Attributes:
        left: requests until the next one of the sample.
        known: paths that were measured; at most `PATHS`.
        is_full: no more paths are remembered.
    """

    __slots__ = ("is_full", "known", "left")

    def __init__(self) -> None:
        self.left = EVERY
        self.known: set[bytes] = set()
        self.is_full = False

    def take(self, path: bytes) -> None:
        """A request for *path* is measured."""
        if not self.is_full:
            self.known.add(path)
            self.is_full = len(self.known) >= PATHS
        if self.left <= 0:
            self.left = random.randint(1, 2 * EVERY - 1)  # an even beat would miss every other route of a steady client
