"""Where threads stand, as text for the log."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Mapping
from types import FrameType

FRAMES = 60  # of one thread; deep recursion need not fill the log


def frames_of_threads() -> Mapping[int, FrameType]:
    """The innermost frame of each thread, by its identity. Do not keep it: it keeps the locals of all of them."""
    return sys._current_frames()


def stack_of(frame: FrameType | None) -> str:
    """
    The frames of a thread, the innermost last as in a traceback, those of the server in front of the app's left out.

    Args:
        frame: the innermost one; None for a thread that has just ended.
    """
    if frame is None:
        return "  (it has just ended)"
    walked: list[tuple[FrameType, int]] = []
    each: FrameType | None = frame
    while each is not None:
        walked.append((each, each.f_lineno))
        each = each.f_back
    begin = 0
    for index, (outer, _) in enumerate(reversed(walked)):
        if is_ours(outer):
            begin = index + 1
        elif begin:
            break  # from here on it is the app's, whoever it calls
    shown = walked[: len(walked) - begin] or walked
    left_out = len(shown) - FRAMES
    text = text_of(reversed(shown[:FRAMES]))
    return f"  ({left_out} more)\n{text}" if left_out > 0 else text


def stacks_of(threads: Iterable[tuple[str, int]], frames: Mapping[int, FrameType]) -> str:
    """Several stacks, each under the name of its thread. *threads*: names and identities."""
    return "\n".join(f"{name}\n{stack_of(frames.get(ident))}" for name, ident in threads)


def text_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Frames and their lines, from the outermost, as in a traceback."""
    return "".join(traceback.StackSummary.extract(frames, capture_locals=False).format()).rstrip()


def is_ours(frame: FrameType) -> bool:
    """Whether it is the server's code."""
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in ("jumpstart_server", "jumpstart_warmup")
