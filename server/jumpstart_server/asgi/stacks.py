"""Where a task stands, as text for the log; of threads, `envelope/stacks.py` tells that."""

from __future__ import annotations

import asyncio
import gc
from types import FrameType
from typing import Any

from jumpstart_server.envelope.cpu import Measured
from jumpstart_server.envelope.stacks import is_ours, text_of

DEPTH = 200  # awaits, one in the other

_FRAMES = ("cr_frame", "gi_frame", "ag_frame")
_INNER = ("cr_await", "gi_yieldfrom", "ag_await")


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """
    All frames of a task that waits, from the outermost; `asyncio.Task.get_stack` gives one.

    Those of our own are left out at the begin, as no news.
    """
    frames = _frames(task.get_coro())
    while len(frames) > 1 and is_ours(frames[0]):
        del frames[0]
    return text_of((frame, frame.f_lineno) for frame in frames)


def _frames(awaited: Any) -> list[FrameType]:
    found: list[FrameType] = []
    for _ in range(DEPTH):
        if awaited is None:
            break
        frame = next((each for name in _FRAMES if (each := getattr(awaited, name, None)) is not None), None)
        if frame is not None:
            found.append(frame)
            if frame.f_code is Measured.__await__.__code__:
                awaited = frame.f_locals["coroutine"]
                continue
            awaited = next((each for name in _INNER if (each := getattr(awaited, name, None)) is not None), None)
        else:
            awaited = _behind(awaited)
    return found


def _behind(wrapper: Any) -> Any:
    """What a step of an async generator, or the like, is a step of: only the collector knows."""
    if isinstance(wrapper, asyncio.Future):
        return None
    for each in gc.get_referents(wrapper):
        if any(getattr(each, name, None) is not None for name in _FRAMES):
            return each
    return None
