"""A sync generator as a body: whole and in order, bounded, in one context, and closed when nobody reads any more."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import ModuleType
from typing import Any, TypeVar

import anyio.from_thread
import anyio.to_thread
import pytest
import starlette.concurrency
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart_server.asgi import streams
from jumpstart_server.asgi.streams import BYTES, CHUNKS, iterate
from jumpstart_server.asgi.threads import Threads

T = TypeVar("T")
PATIENCE = 10.0  # seconds after which a test calls it a hang

original = starlette.concurrency.iterate_in_threadpool


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(streams.logger, "propagate", True)
    return caplog


def run(main: Callable[[Threads], Coroutine[Any, Any, T]], threads: int = 8) -> T:
    """Run *main* in a loop with threads as the server has them; all of them are free in the end."""

    async def limited() -> T:
        pool = Threads(threads)
        pool.install()
        async with asyncio.timeout(PATIENCE):
            result = await main(pool)
            await until(lambda: not pool.stats().busy)
        return result

    return asyncio.run(limited())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # most conditions are of threads
        await asyncio.sleep(0.002)


class Body:
    """A generator that tells what happens to it."""

    def __init__(self, count: int = 1_000_000, chunk: bytes = b"x", pause: float = 0.0) -> None:
        self.made = 0
        self.ends: list[str] = []  # names of the threads where its finally ran
        self._count = count
        self._chunk = chunk
        self._pause = pause

    def __call__(self) -> Iterator[bytes]:
        try:
            while self.made < self._count:
                time.sleep(self._pause)
                self.made += 1
                yield self._chunk
        finally:
            self.ends.append(threading.current_thread().name)

    def was_closed_once_in_a_thread(self) -> bool:
        return len(self.ends) == 1 and self.ends[0] != threading.main_thread().name


async def read(chunks: AsyncIterator[T]) -> list[T]:
    return [chunk async for chunk in chunks]


def test_166_twenty_thousand_chunks_whole_and_in_order() -> None:
    async def main(pool: Threads) -> list[bytes]:
        return await read(iterate(b"%d" % number for number in range(20_000)))

    assert run(main) == [b"%d" % number for number in range(20_000)]


chunk = st.one_of(st.binary(max_size=10), st.text(max_size=5), st.binary().map(bytearray), st.integers(), st.none())


@settings(max_examples=50, deadline=None)
@given(st.lists(chunk), st.sampled_from([iter, list, tuple]))
def test_any_iterable_of_anything(chunks: list[Any], kind: Any) -> None:
    async def main(pool: Threads) -> list[Any]:
        return await read(iterate(kind(chunks)))

    assert run(main) == chunks


def test_what_is_not_iterable_is_an_error_of_the_reader() -> None:
    async def main(pool: Threads) -> None:
        with pytest.raises(TypeError, match="not iterable"):
            await read(iterate(7))  # type: ignore[arg-type]

    run(main)


def test_an_exception_comes_after_the_chunks_before_it_and_from_its_place() -> None:
    def body() -> Iterator[bytes]:
        yield b"a"
        yield b"b"
        raise LookupError("in the generator")

    async def main(pool: Threads) -> list[bytes]:
        chunks: list[bytes] = []
        with pytest.raises(LookupError, match="in the generator") as caught:
            async for chunk in iterate(body()):
                chunks.append(chunk)
        assert caught.traceback[-1].name == "body"
        return chunks

    assert run(main) == [b"a", b"b"]


def test_it_runs_ahead_of_its_reader_so_far_and_no_farther() -> None:
    small, large = Body(), Body(chunk=bytes(10_000))

    async def main(pool: Threads) -> None:
        for body, most in ((small, CHUNKS + 2), (large, BYTES // 10_000 + 3)):
            stream = iterate(body())
            assert await anext(stream)
            await until(lambda: not pool.stats().busy)  # the reader is slow: its thread serves others
            made = body.made
            assert 1 < made <= most
            for _ in range(made + 1):  # and comes back when there is room
                assert await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await until(body.was_closed_once_in_a_thread)

    run(main)


def test_nothing_runs_ahead_of_a_chunk_that_may_change() -> None:
    def body() -> Iterator[memoryview]:
        buffer = bytearray(1)
        for number in range(50):
            buffer[0] = number
            yield memoryview(buffer)

    async def main(pool: Threads) -> list[int]:
        seen = []
        async for view in iterate(body()):
            await asyncio.sleep(0.001)
            seen.append(view[0])
        return seen

    assert run(main) == list(range(50))


def test_every_step_sees_the_context_of_the_request_and_of_the_steps_before() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    def body() -> Iterator[str]:
        yield name.get()
        name.set("set inside")
        for _ in range(3 * CHUNKS):
            yield name.get()

    async def main(pool: Threads) -> list[str]:
        name.set("of the request")
        chunks: list[str] = []
        async for chunk in iterate(body()):
            if len(chunks) == 5:
                await until(lambda: not pool.stats().busy)  # the rest runs in another turn
            chunks.append(chunk)
        assert name.get() == "of the request"
        return chunks

    first, *rest = run(main)
    assert first == "of the request" and set(rest) == {"set inside"}


def test_a_generator_may_call_the_event_loop() -> None:
    async def inside() -> str:
        return threading.current_thread().name

    def body() -> Iterator[str]:
        yield anyio.from_thread.run(inside)

    async def main(pool: Threads) -> list[str]:
        return await read(iterate(body()))

    assert run(main) == [threading.current_thread().name]


# ---------------------------------------------------------------------------------------- nobody reads any more


async def keep(stream: AsyncIterator[bytes], started: asyncio.Event, inside: bool) -> None:
    """Read one chunk; then wait, in the stream or (as in ``send``) outside of it."""
    await anext(stream)
    started.set()
    if inside:
        await read(stream)
    else:
        await asyncio.sleep(PATIENCE)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_166_it_is_closed_once_and_soon_when_its_reader_is_cancelled(pause: float, inside: bool) -> None:
    body = Body(pause=pause)

    async def main(pool: Threads) -> float:
        stream = iterate(body())  # held here: no collector helps
        started = asyncio.Event()
        reader = asyncio.create_task(keep(stream, started, inside))
        await started.wait()
        reader.cancel()
        began = time.monotonic()
        await until(lambda: body.ends)
        took = time.monotonic() - began
        await stream.aclose()  # type: ignore[attr-defined]
        return took

    assert run(main) < 1
    assert body.was_closed_once_in_a_thread()
    gc.collect()
    assert len(body.ends) == 1


def test_it_is_closed_when_a_reader_stops_in_the_middle_and_forgets_it() -> None:
    body = Body()

    async def reads_some() -> None:
        async for _ in iterate(body()):
            return

    async def main(pool: Threads) -> None:
        await asyncio.create_task(reads_some())
        await until(body.was_closed_once_in_a_thread)

    run(main)


def test_it_is_closed_while_all_threads_are_taken() -> None:
    body = Body()

    async def main(pool: Threads) -> None:
        stream = iterate(body())
        started = asyncio.Event()
        reader = asyncio.create_task(keep(stream, started, inside=False))
        await started.wait()
        await until(lambda: not pool.stats().busy)
        gate = threading.Event()
        blocked = asyncio.ensure_future(anyio.to_thread.run_sync(gate.wait, PATIENCE))
        await until(lambda: pool.stats().busy)
        for _ in range(CHUNKS):  # it wants to go on, and has to wait for a thread
            await anext(stream)
        reader.cancel()
        await until(body.was_closed_once_in_a_thread)
        gate.set()
        await blocked

    run(main, threads=1)


def test_another_task_may_read_on() -> None:
    async def main(pool: Threads) -> list[bytes]:
        stream = iterate(Body(count=5)())
        first: bytes = await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        return [first, *await asyncio.create_task(read(stream))]

    assert run(main) == [b"x"] * 5


def test_who_comes_too_late_to_read_on_does_not_take_it_for_the_end() -> None:
    body = Body()

    async def main(pool: Threads) -> None:
        stream = iterate(body())
        await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await until(lambda: body.ends)
        with pytest.raises(RuntimeError, match="the task that read this stream has ended"):
            await read(stream)

    run(main)


def test_one_that_was_never_begun_needs_no_end() -> None:
    """Python does not run the finally of a generator that has not started."""
    body = Body()

    async def main(pool: Threads) -> None:
        stream = iterate(body())
        await stream.aclose()  # type: ignore[attr-defined]
        assert pool.stats().threads == 0

    run(main)
    assert not body.ends


def test_a_generator_that_fails_in_its_end_is_logged(log: pytest.LogCaptureFixture) -> None:
    def body() -> Iterator[bytes]:
        try:
            while True:
                yield b"x"
        finally:
            raise LookupError("while closing")

    async def main(pool: Threads) -> None:
        stream = iterate(body())
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: log.records)

    run(main)
    assert "a generator raised when it was closed" in log.text and "while closing" in log.text


def test_an_iterator_that_is_no_generator_is_left_as_it_is() -> None:
    """An open file belongs to whoever has opened it."""

    class File:
        closed = False

        def __iter__(self) -> Iterator[bytes]:
            return self

        def __next__(self) -> bytes:
            return b"line\n"

        def close(self) -> None:
            self.closed = True

    file = File()

    async def main(pool: Threads) -> None:
        stream = iterate(file)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    run(main)
    assert not file.closed


def test_a_thread_stops_with_the_loop() -> None:
    """A worker that ends cancels what is left; the thread must not run on for ever."""
    body = Body(pause=0.005)

    async def main() -> None:
        Threads(2).install()
        stream = iterate(body())
        await anext(stream)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(main())
    give_up = time.monotonic() + PATIENCE
    while not body.ends and time.monotonic() < give_up:
        time.sleep(0.002)
    assert len(body.ends) == 1


# ---------------------------------------------------------------------------------------- threads are shared


def test_more_streams_than_threads_all_go_on_and_let_others_in() -> None:
    """With one thread for each to its end, the first two would run and nobody else."""

    async def main(pool: Threads) -> None:
        bodies = [Body(pause=0.005) for _ in range(6)]
        readers = [asyncio.create_task(read(iterate(body()))) for body in bodies]
        await until(lambda: all(body.made >= 3 for body in bodies))
        began = time.monotonic()
        assert await asyncio.create_task(anyio.to_thread.run_sync(lambda: "an endpoint")) == "an endpoint"
        assert time.monotonic() - began < 2
        assert pool.stats().peak <= 2
        for reader in readers:
            reader.cancel()
        await until(lambda: all(body.was_closed_once_in_a_thread() for body in bodies))

    run(main, threads=2)


def test_a_stream_that_always_has_a_chunk_leaves_the_loop_to_others() -> None:
    """A thread that keeps pace with its reader must not keep the loop for the two of them."""

    async def main(pool: Threads) -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(other())
        async for _ in iterate(b"x" for _ in range(20 * CHUNKS)):
            time.sleep(0.0005)  # noqa: ASYNC251  # as a send does; the thread is quicker
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return turns

    assert run(main) >= 15


# ---------------------------------------------------------------------------------------- in place of Starlette's


def module_with(function: Any) -> ModuleType:
    module = ModuleType("looks_like_starlette")
    setattr(module, streams.NAME, function)
    return module


def test_it_takes_the_place_of_starlettes_wherever_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastapi.concurrency
    import starlette.responses

    places = (starlette.concurrency, starlette.responses, fastapi.concurrency)
    for place in places:
        monkeypatch.setattr(place, streams.NAME, original)
    monkeypatch.setitem(sys.modules, "of_the_app", module_with(original))
    streams._replace(starlette.concurrency)
    assert all(getattr(place, streams.NAME) is iterate for place in places)
    assert sys.modules["of_the_app"].__dict__[streams.NAME] is iterate
    streams._replace(starlette.concurrency)  # once more does no harm
    assert getattr(starlette.concurrency, streams.NAME) is iterate


async def takes_more(iterator: Any, limiter: Any) -> AsyncIterator[Any]:
    yield anyio.to_thread


async def does_more(iterator: Any) -> AsyncIterator[Any]:
    yield logging.getLogger(iterator)


def is_something_else(iterator: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (takes_more, "takes other arguments"),
        (does_more, "uses getLogger, logging"),
        (is_something_else, "is no async generator function"),
        (None, "is no async generator function"),
    ],
)
def test_a_starlette_that_looks_different_is_left_alone(function: Any, why: str, log: pytest.LogCaptureFixture) -> None:
    module = module_with(function)
    streams._replace(module)
    assert getattr(module, streams.NAME) is function
    assert why in log.text and "chunk by chunk" in log.text
