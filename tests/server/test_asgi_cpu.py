"""A coroutine's time on the CPU, among others in one thread."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from jumpstart_server.asgi.cpu import Measured


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
