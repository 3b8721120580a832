"""
CPU time of a coroutine: what `time.thread_time` is for a thread.

An event loop runs many coroutines in one thread, so the thread's clock says nothing about one of them. But each step of
a coroutine, from one ``await`` that waits to the next, runs in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
