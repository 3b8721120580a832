"""A coroutine's time on the CPU, among others in one thread."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from jumpstart_server.envelope.cpu import EVERY, PATHS, Measured, Sampler
from jumpstart_warmup.observe import Observer
from tests.server.asgi_lab import Lab, Receive, Scope, Send, answer, until


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_waiting_costs_nothing_and_others_are_not_counted() -> None:
    async def work() -> str:
        compute(0.03)
        await asyncio.sleep(0.05)
        compute(0.02)
        return "done"

    async def other() -> None:
        for _ in range(5):
            compute(0.02)
            await asyncio.sleep(0)

    async def main() -> float:
        measured = Measured(work())

        async def run() -> str:
            return await measured

        result, _ = await asyncio.gather(run(), other())
        assert result == "done"
        return measured.cpu_s

    assert 0.05 <= asyncio.run(main()) < 0.1  # the other one alone takes 0.1


def test_errors_and_cancellation_pass_through() -> None:
    seen: list[str] = []

    async def fails() -> None:
        raise LookupError("mine")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            seen.append("closed")

    async def main() -> None:
        with pytest.raises(LookupError, match="mine"):
            await Measured(fails())

        async def run() -> None:
            await Measured(waits())

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["cancelled", "closed"]


def test_an_error_that_the_coroutine_handles_lets_it_go_on() -> None:
    async def patient() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            await asyncio.sleep(0)
            return "late"
        return "?"

    async def main() -> Any:
        return await Measured(patient())

    assert asyncio.run(main()) == "late"


def test_a_route_that_waits_shows_a_small_share_of_cpu_and_one_that_computes_a_large_one() -> None:
    observer = Observer()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.05)
        await answer()(scope, receive, send)

    async def computes(scope: Scope, receive: Receive, send: Send) -> None:
        compute(0.05)
        await answer()(scope, receive, send)

    with Lab(observer=observer) as lab:
        lab.app(waits, "/waits")
        lab.app(computes, "/computes")
        with lab.connect() as client:
            for path in ("/waits", "/computes", "/waits", "/computes"):
                client.get(path)
                assert client.response().status == 200
        until(lambda: not lab.tasks)
    routes = observer.snapshot().routes
    idle, busy = routes["GET /waits"], routes["GET /computes"]
    assert (idle.requests, busy.requests) == (2, 2)
    assert (idle.cpu_requests, busy.cpu_requests) == (1, 1)  # the first of each path
    assert idle.cpu_latency_s >= 0.05
    assert idle.cpu_s < 0.025
    assert busy.cpu_s >= 0.05


def test_after_the_first_of_a_path_about_one_in_so_many_is_measured() -> None:
    sampler = Sampler()
    taken = 0
    for _ in range(100 * EVERY):
        sampler.left -= 1
        if not (sampler.left and (sampler.is_full or b"/" in sampler.known)):
            sampler.take(b"/")
            taken += 1
    assert 50 < taken < 200


def test_no_more_paths_are_remembered_than_so_many() -> None:
    sampler = Sampler()
    for number in range(2 * PATHS):
        sampler.take(b"/%d" % number)
    assert len(sampler.known) == PATHS
    assert sampler.is_full
