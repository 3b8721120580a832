"""What a computation has read, and what its caller has seen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from jumpstart.context import RequestContext, request_context
from jumpstart.dependencies import Versions, collect, collecting, has_seen_newer, is_outdated, note_read, note_used


class Flags:
    """A source as `jumpstart.Config` is one."""

    name = "flags"

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}

    def version(self, key: str) -> int:
        return self.versions.get(key, 0)

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> None:
        raise AssertionError("reading subscribes nobody")


def test_a_computation_stands_on_the_oldest_version_that_it_has_read() -> None:
    flags = Flags()
    with collect() as outer:
        note_read(flags, "a", 3)
        with pytest.raises(LookupError), collect() as inner:
            assert inner.is_inside(outer) and inner.is_inside(inner) and not outer.is_inside(inner)
            note_read(flags, "a", 2)
            flags.versions["b"] = 7
            note_read(flags, "b")
            raise LookupError
        assert inner.reads == {(flags, "a"): 2, (flags, "b"): 7}
        note_used({(flags, "c"): 1})
    assert outer.reads == {(flags, "a"): 2, (flags, "b"): 7, (flags, "c"): 1}
    assert collecting() is None
    note_read(flags, "d")
    assert (flags, "d") not in outer.reads
    assert not is_outdated({(flags, "b"): 7}) and is_outdated({(flags, "b"): 6})


def test_tasks_of_a_computation_are_part_of_it_until_it_ends() -> None:
    flags = Flags()
    ended = asyncio.Event()

    async def read(key: str) -> None:
        note_read(flags, key)

    async def late() -> None:
        await ended.wait()
        note_read(flags, "late")

    async def main() -> None:
        with collect() as collector:
            await asyncio.gather(read("a"), asyncio.to_thread(note_read, flags, "b"))
            left = asyncio.create_task(late())
            await asyncio.sleep(0)
        ended.set()
        await left
        assert collector.reads == {(flags, "a"): 0, (flags, "b"): 0}

    asyncio.run(main())


def test_each_caller_has_seen_its_own() -> None:
    flags = Flags()
    old: Versions = {(flags, "a"): 1}
    same: Versions = {(flags, "a"): 2}
    first, second = RequestContext(), RequestContext()
    with request_context(first):
        note_read(flags, "a", 2)
        note_read(flags, "a", 1)  # by a part of it that was slow
        assert has_seen_newer(old)
    with request_context(second):
        note_read(flags, "a", 1)
        assert not has_seen_newer(old)
    with request_context(first):
        assert has_seen_newer(old) and not has_seen_newer(same) and not has_seen_newer({})
    found: list[bool] = []

    def outside() -> None:
        found.append(has_seen_newer(old))
        note_read(flags, "a", 2)
        found.append(has_seen_newer(old))

    for _ in range(2):
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
    assert found == [False, True] * 2
