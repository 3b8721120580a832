"""Hooks around captures and restores, and what makes forked processes unlike each other."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import random
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jumpstart
from jumpstart import hooks


@pytest.fixture(autouse=True)
def no_hooks() -> Iterator[None]:
    hooks.clear()
    yield
    hooks.clear()


def noting(calls: list[str], name: str) -> Callable[[], None]:
    return lambda: calls.append(name)


def after_restore(limit_s: float = 10) -> None:
    asyncio.run(hooks.after_restore(limit_s))


def test_restores_call_in_the_order_of_registration_and_captures_in_reverse() -> None:
    calls: list[str] = []
    for name in ("first", "second", "third"):
        jumpstart.on_restore(noting(calls, f"restore {name}"))
        jumpstart.on_capture(noting(calls, f"capture {name}"))
    assert calls == []  # nothing happens without the server
    hooks.before_fork(10)
    assert calls == ["capture third", "capture second", "capture first"]
    calls.clear()
    after_restore()
    assert calls == ["restore first", "restore second", "restore third"]


def test_they_are_decorators_and_count_once() -> None:
    calls: list[str] = []

    @jumpstart.on_capture
    @jumpstart.on_restore
    def hook() -> None:
        calls.append("called")

    assert hook.__name__ == "hook"
    assert jumpstart.on_restore(hook) is hook
    after_restore()
    assert calls == ["called"]
    with pytest.raises(TypeError, match="must be callable"):
        jumpstart.on_restore("shop:reopen")  # type: ignore[type-var]  # what the test is about


def test_only_hooks_that_ask_for_the_purpose_are_called_while_requests_run() -> None:
    calls: list[str] = []
    jumpstart.on_capture(noting(calls, "close the pool"))

    @jumpstart.on_capture
    def flush(purpose: str) -> None:
        calls.append(f"flush {purpose}")

    @jumpstart.on_capture
    async def awaited(*, purpose: str) -> None:
        await asyncio.sleep(0)
        calls.append(f"awaited {purpose}")

    hooks.before_fork(10)
    assert calls == ["flush fork", "close the pool"]  # and there is no loop that could await
    calls.clear()
    asyncio.run(hooks.before_capture("host", 10))
    asyncio.run(hooks.before_capture("ship", 10))
    assert calls == ["awaited host", "flush host", "awaited ship", "flush ship"]


def test_coroutine_functions_run_in_the_loop_and_others_in_threads() -> None:
    where: dict[str, object] = {}

    @jumpstart.on_restore
    async def awaited() -> None:
        where["awaited"] = asyncio.get_running_loop(), threading.current_thread()

    @jumpstart.on_restore
    def called() -> None:
        where["called"] = threading.current_thread().name

    async def main() -> None:
        await hooks.after_restore(10)
        assert where["awaited"] == (asyncio.get_running_loop(), threading.main_thread())

    asyncio.run(main())
    assert str(where["called"]).startswith("jumpstart-hook tests.jumpstart.test_hooks:")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jumpstart-hook")]


def test_a_hook_that_raises_is_named_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    @jumpstart.on_restore
    @jumpstart.on_capture
    def exits() -> None:
        sys.exit(3)

    @jumpstart.on_restore
    async def times_out_by_itself() -> None:
        raise TimeoutError

    @jumpstart.on_restore
    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    jumpstart.on_restore(noting(calls, "restored"))
    jumpstart.on_capture(noting(calls, "captured"))
    after_restore()
    hooks.before_fork(10)
    assert calls == ["restored", "captured"]
    raised = [record.getMessage() for record in caplog.records]
    names = (
        ("on_restore", "exits"),
        ("on_restore", "times_out"),
        ("on_restore", "is_cancelled"),
        ("on_capture", "exits"),
    )
    assert len(raised) == len(names)
    for message, (kind, name) in zip(raised, names):
        assert message.startswith(f"{kind} hook tests.jumpstart.test_hooks:") and name in message
        assert message.endswith("raised")
    assert all(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("kind", ["sync", "async", "before a fork"])
def test_a_hook_that_hangs_is_left_at_the_deadline(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()
    calls: list[str] = []

    def hangs() -> None:
        released.wait(60)

    async def hangs_in_the_loop() -> None:
        await asyncio.sleep(60)

    try:
        if kind == "before a fork":
            jumpstart.on_capture(noting(calls, "the next one"))
            jumpstart.on_capture(hangs)
            hooks.before_fork(0.2)
        else:
            jumpstart.on_restore(hangs if kind == "sync" else hangs_in_the_loop)
            jumpstart.on_restore(noting(calls, "the next one"))
            after_restore(0.2)
    finally:
        released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("jumpstart-hook"):
            thread.join(10)
    assert calls == ["the next one"]
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert "hangs" in caplog.text and "was left" in caplog.text


def test_the_end_of_the_boot_ends_a_hook_too() -> None:
    async def main() -> None:
        async def hangs() -> None:
            await asyncio.sleep(60)

        jumpstart.on_restore(hangs)
        task = asyncio.create_task(hooks.after_restore(0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_hooks_of_every_kind_of_callable() -> None:
    calls: list[str] = []

    class Pool:
        def reopen(self, purpose: str = "none") -> None:
            calls.append(purpose)

    pool = Pool()
    jumpstart.on_restore(pool.reopen)
    jumpstart.on_capture(pool.reopen)
    jumpstart.on_capture(functools.partial(calls.append, "partial"))
    jumpstart.on_capture(threading.Lock().locked)  # a built-in
    after_restore()
    hooks.before_fork(10)
    assert calls == ["none", "partial", "fork"]


@pytest.mark.filterwarnings("error")  # of a coroutine that nobody awaits
def test_what_is_async_and_does_not_look_so_is_awaited(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    async def open_pool() -> None:
        await asyncio.sleep(0)
        calls.append(threading.current_thread().name)

    @functools.wraps(open_pool)
    def wrapped() -> Any:
        return open_pool()

    class Pool:
        async def __call__(self) -> None:
            await open_pool()
            raise LookupError("no such region")

    jumpstart.on_restore(Pool())
    jumpstart.on_restore(wrapped)
    after_restore()
    assert calls == [threading.current_thread().name] * 2, "in the event loop"
    assert "Pool object" in caplog.text and "no such region" in caplog.text
    jumpstart.on_capture(Pool())
    hooks.before_fork(10)
    assert len(calls) == 2, "before forks there is no event loop"


# -- uniqueness --


def in_forks(draw: Callable[[], str], count: int = 4) -> list[list[str]]:
    """What *draw* returns in *count* forks, each after `make_unique`."""
    drawn = []
    for _ in range(count):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                hooks.make_unique()
                os.write(writer, draw().encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            drawn.append(file.read().split())
        os.waitpid(pid, 0)
    return drawn


def test_uuid1_differs_between_forks_by_its_sequence_number_and_keeps_the_node() -> None:
    """Two processes that ask at the same moment must differ in something else than the time."""
    here = uuid.uuid1()  # so that libuuid has drawn its sequence number before the fork
    drawn = in_forks(lambda: " ".join(str(uuid.uuid1()) for _ in range(1000)))
    sequences = set()
    for each in drawn:
        ids = [uuid.UUID(text) for text in each]
        assert len(set(ids)) == 1000
        assert {(found.version, found.variant, found.node) for found in ids} == {(1, uuid.RFC_4122, here.node)}
        assert abs(ids[-1].time - here.time) < 600 * 10**7
        assert len({found.clock_seq for found in ids}) == 1
        sequences.add(ids[0].clock_seq)
    assert len(sequences) == len(drawn)


def test_the_name_that_is_replaced_in_uuid_is_there() -> None:
    assert "_generate_time_safe" in inspect.getsource(uuid.uuid1)


def test_numpy_is_reseeded_if_it_is_there_and_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    stand_in = types.ModuleType("numpy.random")
    stand_in.seed = lambda: seeded.append("fresh")  # type: ignore[attr-defined]  # a module's global
    monkeypatch.setattr(hooks, "_unique_uuid1", lambda: None)
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    hooks.make_unique()
    assert "numpy.random" not in sys.modules
    monkeypatch.setitem(sys.modules, "numpy.random", stand_in)
    hooks.make_unique()
    assert seeded == ["fresh"]


def test_a_module_that_cannot_be_reseeded_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "_unique_uuid1", lambda: None)
    monkeypatch.setitem(sys.modules, "numpy.random", types.ModuleType("numpy.random"))
    hooks.make_unique()
    assert "numpy.random" in caplog.text


def test_python_reseeds_random_in_a_fork() -> None:
    random.seed(1)
    drawn = in_forks(lambda: str(random.getrandbits(64)))
    assert len({each[0] for each in drawn}) == len(drawn)
