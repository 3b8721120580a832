"""All threads for sync code, a reserve for requests that others wait for, one fair queue, and exact numbers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from jumpstart.context import RequestContext, enter
from jumpstart_server.asgi.threads import LEAST_RESERVE, MOST_RESERVE, Threads, TurnLimiter
from jumpstart_server.engine import PoolStats

T = TypeVar("T")
PATIENCE = 10.0  # seconds after which a test calls it a hang


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(limited())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # most conditions are of threads
        await asyncio.sleep(0.002)


def request(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task as the server makes one for each request: in a context of its own."""
    return asyncio.get_running_loop().create_task(work, context=Context())


class Gate:
    """Jobs that stay in their threads until it is open."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self._open.wait(PATIENCE)
        with self._lock:
            self.inside -= 1


async def in_thread(work: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(work)


def test_sync_code_gets_all_threads_and_no_more() -> None:
    async def main() -> None:
        threads = Threads(6)
        threads.install()
        assert threads.stats() == PoolStats(limit=6)
        gate = Gate()
        requests = [request(in_thread(gate.wait)) for _ in range(20)]
        await until(lambda: gate.inside == 6)
        await until(lambda: threads.stats().waiting == 14)
        stats = threads.stats()
        assert (stats.threads, stats.busy, stats.peak, stats.limit) == (6, 6, 6, 6)
        await until(lambda: threads.stats().oldest_wait_s > 0.01)
        gate.open()
        await asyncio.gather(*requests)
        stats = threads.stats()
        assert (stats.busy, stats.waiting, stats.peak, stats.oldest_wait_s) == (0, 0, 6, 0.0)
        assert gate.most == 6

    run(main())


def test_13_a_job_that_is_given_up_counts_until_its_thread_is_free() -> None:
    async def main() -> None:
        threads = Threads(1)
        threads.install()
        gate = Gate()

        async def given_up() -> None:
            with anyio.move_on_after(0.01):
                await anyio.to_thread.run_sync(gate.wait)

        task = request(given_up())
        await until(lambda: gate.inside)
        other = request(in_thread(lambda: "ran"))
        await until(lambda: threads.stats().waiting)
        await asyncio.sleep(0.05)
        assert not other.done()
        gate.open()
        assert await other == "ran"
        await task

    run(main())


def test_asyncios_executor_has_as_many_and_is_counted_too() -> None:
    async def main() -> None:
        threads = Threads(3)
        threads.install()
        gate = Gate()
        jobs = [asyncio.ensure_future(asyncio.to_thread(gate.wait)) for _ in range(5)]
        await until(lambda: gate.inside == 3)
        stats = threads.stats()
        assert (stats.threads, stats.busy, stats.waiting, stats.peak) == (3, 3, 2, 3)
        await until(lambda: threads.stats().oldest_wait_s > 0.01)
        jobs.pop().cancel()
        await until(lambda: threads.stats().waiting == 1)
        gate.open()
        await asyncio.gather(*jobs)
        await until(lambda: threads.stats().busy == 0)
        assert threads.stats().waiting == 0
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        await until(lambda: threads.stats().busy == 0)

    run(main())


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("others", [0, 3])
def test_16_who_holds_what_others_wait_for_is_let_in(depth: int, others: int) -> None:
    """
    Each request takes locks of one slot each in threads, one after the other, before its endpoint runs in a thread.

    *others*: jobs before the first lock, such as dependencies that are no context managers.
    """
    locks = [threading.Lock() for _ in range(depth)]
    served: list[int] = []

    async def serve(number: int) -> None:
        for _ in range(others):
            await anyio.to_thread.run_sync(lambda: None)
        for lock in locks:
            await anyio.to_thread.run_sync(lock.acquire)
        await anyio.to_thread.run_sync(served.append, number)
        for lock in reversed(locks):
            lock.release()

    async def main() -> None:
        Threads(4).install()
        await asyncio.gather(*(request(serve(number)) for number in range(24)))

    run(main())
    assert sorted(served) == list(range(24))


def test_threads_that_call_back_and_want_another_thread_do_not_lock_each_other_out() -> None:
    barrier = threading.Barrier(4)

    def outer() -> str:
        barrier.wait(PATIENCE)  # all threads are taken
        return anyio.from_thread.run(in_thread, lambda: "inner")

    async def main() -> list[str]:
        Threads(4).install()
        return await asyncio.gather(*(request(in_thread(outer)) for _ in range(4)))

    assert run(main()) == ["inner"] * 4


def test_who_comes_often_gets_ahead_of_nobody() -> None:
    """Requests that read and read leave the threads to others in turn, and have a small reserve at most."""

    async def main() -> None:
        threads = Threads(4)
        threads.install()
        stop = False

        async def reader() -> None:
            while not stop:
                await anyio.to_thread.run_sync(time.sleep, 0.001)

        readers = [request(reader()) for _ in range(30)]
        await asyncio.sleep(0.1)
        for _ in range(20):
            began = time.monotonic()
            await request(in_thread(lambda: None))
            assert time.monotonic() - began < 1
        assert threads.stats().peak <= 4 + LEAST_RESERVE
        stop = True
        await asyncio.gather(*readers)

    run(main())


def test_the_queue_is_in_the_order_of_coming() -> None:
    async def main() -> list[int]:
        limiter = TurnLimiter(1)
        order: list[int] = []

        async def one(number: int) -> None:
            async with limiter:
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(request(one(number)) for number in range(10)))
        return order

    assert run(main()) == list(range(10))


def test_a_waiter_that_is_cancelled_takes_nothing_with_it() -> None:
    async def main() -> None:
        limiter = TurnLimiter(1)

        async def use() -> None:
            async with limiter:
                pass

        async with limiter:
            waiting = request(use())
            given = request(use())
            await until(lambda: limiter.waiting == 2)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert (waiting.cancelled(), limiter.waiting) == (True, 1)
        given.cancel()  # at the moment when its turn has come
        last = request(use())
        await asyncio.wait([given, last])
        assert given.cancelled() and not last.cancelled()
        assert (limiter.borrowed_tokens, limiter.waiting, limiter.available_tokens) == (0, 0, 1)

    run(main())


def test_it_is_anyios_limiter_to_those_who_use_it_directly() -> None:
    async def main() -> None:
        threads = Threads(2)
        threads.install()
        limiter = anyio.to_thread.current_default_thread_limiter()
        assert (limiter.total_tokens, limiter.available_tokens) == (2, 2)
        limiter.acquire_nowait()
        with pytest.raises(RuntimeError, match="already holding"):
            limiter.acquire_nowait()
        limiter.release()
        with pytest.raises(RuntimeError, match="isn't holding"):
            limiter.release()
        await limiter.acquire()
        limiter.release()
        await limiter.acquire_on_behalf_of("a")
        statistics = limiter.statistics()
        assert (statistics.borrowed_tokens, statistics.borrowers, statistics.tasks_waiting) == (1, ("a",), 0)
        limiter.release_on_behalf_of("a")
        with pytest.raises(TypeError, match="total_tokens must be"):
            limiter.total_tokens = 2.5
        with pytest.raises(ValueError, match="total_tokens must be"):
            limiter.total_tokens = -1

    run(main())


def test_an_app_may_set_the_number_itself() -> None:
    """The remedy that is passed around: more tokens, set in the lifespan. Who waits already profits."""

    async def main() -> None:
        threads = Threads(1)
        threads.install()
        gate = Gate()
        requests = [request(in_thread(gate.wait)) for _ in range(5)]
        await until(lambda: threads.stats().waiting == 4)
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = 3
        await until(lambda: gate.inside == 3)
        assert threads.stats().limit == 3
        limiter.total_tokens = 2
        gate.open()
        await asyncio.gather(*requests)
        limiter.total_tokens = float("inf")
        assert threads.stats().limit == 2**31
        with pytest.raises(anyio.WouldBlock):
            limiter.total_tokens = 0
            limiter.acquire_nowait()

    run(main())


def test_the_reserve_is_small() -> None:
    assert len(TurnLimiter(4)._reserve) - 1 == LEAST_RESERVE
    assert len(TurnLimiter(64)._reserve) - 1 == 16
    assert len(TurnLimiter(1000)._reserve) - 1 == MOST_RESERVE


def test_with_an_anyio_that_is_unknown_the_number_is_right_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from anyio._backends import _asyncio

    limiter: Any = None

    class Elsewhere:
        def set(self, limiter: object) -> None:
            pass

        def get(self) -> object:
            return limiter

    async def main() -> None:
        nonlocal limiter
        limiter = _asyncio.CapacityLimiter(40)
        monkeypatch.setattr(_asyncio, "_default_thread_limiter", Elsewhere())
        monkeypatch.setattr("jumpstart_server.asgi.threads.logger.propagate", True)
        threads = Threads(7)
        threads.install()
        assert limiter.total_tokens == 7
        assert threads.stats() == PoolStats(limit=7)
        assert await in_thread(lambda: "ran") == "ran"

    run(main())
    assert "this anyio is unknown" in caplog.text


def test_a_thread_cannot_go_on_to_another_job_while_it_is_severed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the socket of that other one would be shut down."""
    gate = Gate()
    looks: list[bool] = []
    ended = threading.Event()

    def job() -> None:
        try:
            gate.wait()
        finally:
            ended.set()

    def severing(native_id: int, is_ours: Callable[[int], bool]) -> None:
        gate.open()
        assert ended.wait(PATIENCE)  # its code has ended, and its thread would take the next job
        time.sleep(0.05)
        looks.append(any(not each.is_over for each in threads._jobs.values()))

    async def main() -> None:
        threads.install()
        context = RequestContext()

        async def handler() -> None:
            enter(context)
            await asyncio.to_thread(job)

        task = request(handler())
        await until(lambda: gate.inside)
        threads.stop(context)
        await asyncio.wait({task})

    threads = Threads(1, may_sever=True)
    monkeypatch.setattr("jumpstart_server.asgi.threads.sever", severing)
    run(main())
    assert looks == [True]
