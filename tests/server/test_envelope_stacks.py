"""Where threads stand, as the log shows it."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jumpstart_server.envelope.stacks import FRAMES, frames_of_threads, stack_of, stacks_of
from tests.server.raw_http import PATIENCE, until


def module(name: str, source: str) -> dict[str, Callable[..., Any]]:
    made = types.ModuleType(name)
    exec(source, made.__dict__)
    return made.__dict__


class Blocked(threading.Thread):
    """Runs *function* with something to call that blocks until `end`."""

    def __init__(self, function: Callable[[Callable[[], object]], object]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._entered = threading.Event()
        self._over = threading.Lock()
        self._over.acquire()
        self.start()
        assert self._entered.wait(PATIENCE)

    def run(self) -> None:
        self._function(self.wait_for_the_end)

    def wait_for_the_end(self) -> None:
        self._entered.set()
        self._over.acquire()

    @property
    def stack(self) -> str:
        return stack_of(frames_of_threads().get(self.ident or 0))

    def end(self) -> None:
        self._over.release()
        self.join(PATIENCE)


@pytest.fixture
def blocked() -> Iterator[list[Blocked]]:
    threads: list[Blocked] = []
    yield threads
    for thread in threads:
        thread.end()


def test_the_server_in_front_of_the_app_is_left_out_and_behind_it_is_not(blocked: list[Blocked]) -> None:
    inner = module("jumpstart_server.inner", "def ours_inside(call):\n    call()")["ours_inside"]
    app = module("shop", "def view(call, inner):\n    inner(call)")["view"]
    outer = module("jumpstart_server.outer", "def ours_outside(call, app, inner):\n    app(call, inner)")[
        "ours_outside"
    ]
    blocked.append(Blocked(lambda call: outer(call, app, inner)))
    names = [line.rpartition(" in ")[2] for line in blocked[0].stack.splitlines() if line.startswith("  File")]
    assert names == ["view", "ours_inside", "wait_for_the_end"]


def test_what_is_ours_alone_is_shown_whole(blocked: list[Blocked]) -> None:
    ours = module("jumpstart_server.outer", "def ours(call):\n    call()")["ours"]
    blocked.append(Blocked(ours))
    assert "in ours" in blocked[0].stack or "in wait_for_the_end" in blocked[0].stack


def test_a_deep_one_is_cut_at_its_outer_end(blocked: list[Blocked]) -> None:
    def deep(call: Callable[[], object], depth: int = 300) -> None:
        if depth:
            deep(call, depth - 1)
        else:
            call()

    blocked.append(Blocked(deep))
    lines = blocked[0].stack.splitlines()
    assert lines[0].endswith(" more)") and int(lines[0].split()[0].strip("(")) > 300 - FRAMES
    assert lines[-2].endswith("in wait_for_the_end")


def test_several_stand_under_their_names(blocked: list[Blocked]) -> None:
    blocked += [Blocked(lambda call: call()) for _ in range(2)]
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    until(lambda: ended.ident not in frames_of_threads())
    threads = [("first", blocked[0].ident or 0), ("second", blocked[1].ident or 0), ("third", 0)]
    text = stacks_of(threads, frames_of_threads())
    assert text.startswith("first\n  File ") and "\nsecond\n  File " in text
    assert text.endswith("third\n  (it has just ended)")
