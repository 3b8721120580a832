"""Shadow requests are run in idle moments, one at a time, and stopped when they take too long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jumpstart.context import current
from jumpstart_server.settings import TenantSettings
from jumpstart_server.shadow_runner import ASGIDriver, Driver, Ran, ShadowRunner, Shadows, WSGIDriver
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.inprocess import Outcome
from jumpstart_warmup.sampling import Cold
from jumpstart_warmup.shadow import Allowance, ShadowQueue

PAGE = WarmRequest(path="/page")


class FakeDriver:
    """Takes as long as it is let."""

    def __init__(self) -> None:
        self.begun: list[WarmRequest] = []
        self.may_end = asyncio.Event()

    async def run(self, request: WarmRequest) -> Ran:
        self.begun.append(request)
        await self.may_end.wait()
        return Ran(Outcome(request, 200, None, 0.1, 1, events=(("import", "decimal"),)), 0.01)

    def close(self) -> None:
        self.may_end.set()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # whatever it looks at
            await asyncio.sleep(0.005)


def test_nothing_runs_without_room_and_then_one_after_the_other() -> None:
    async def scene() -> None:
        room, looks = [False], [0]

        def has_room() -> bool:
            looks[0] += 1
            return room[0]

        driver, waiting = FakeDriver(), ShadowQueue(Allowance(600, 0.5, time.monotonic()))
        # On a machine that is busy the loop is late now and then; here that is not to matter.
        runner = ShadowRunner(driver, waiting, has_room=has_room, clock=_steady())
        runner.start()
        runner.offer(PAGE, "cold")
        runner.offer(WarmRequest(path="/other"), "cold")
        await until(lambda: looks[0] > 3)
        assert driver.begun == []
        room[0] = True
        await until(lambda: driver.begun)
        for _ in range(5):
            await asyncio.sleep(0)
        assert driver.begun == [PAGE]
        driver.may_end.set()
        await until(lambda: waiting.counts().done == 2)
        assert waiting.counts().cold_events == {"import": 2}
        runner.stop()
        runner.offer(PAGE, "cold")
        assert len(waiting) == 0

    asyncio.run(scene())


def test_cold_work_in_a_request_drawn_at_random_is_told_and_in_a_cold_one_is_not() -> None:
    """Who runs a cold one was told of it; what one at random meets is news to the others."""

    async def scene() -> None:
        driver, waiting, told = FakeDriver(), ShadowQueue(Allowance(600, 0.5, time.monotonic())), list[Cold]()
        driver.may_end.set()
        runner = ShadowRunner(driver, waiting, has_room=lambda: True, on_cold=told.append, clock=_steady())
        runner.start()
        runner.offer(PAGE, "cold")
        runner.offer(WarmRequest(path="/page/7"), "random", "GET /page/{id}")
        await until(lambda: waiting.counts().done == 2)
        assert told == [Cold(WarmRequest(path="/page/7"), "GET /page/{id}", (("import", "decimal"),))]
        runner.stop()

    asyncio.run(scene())


def test_a_process_that_was_busy_is_not_woken_again_and_again_by_random_ones() -> None:
    """Each look at the event loop takes the GIL from handlers; breaks grow until one finds an idle moment."""

    async def scene() -> None:
        now, cpu, room, looks = [1000.0], [0.0], [False], [0]

        async def sleep(seconds: float) -> None:
            now[0] += seconds
            await asyncio.sleep(0)

        def has_room() -> bool:
            looks[0] += 1
            return room[0]

        driver, waiting = FakeDriver(), ShadowQueue(Allowance(6000, 1.0, 900.0))
        driver.may_end.set()
        clocks: dict[str, Any] = {"clock": lambda: now[0], "cpu_clock": lambda: cpu[0], "sleep": sleep}
        runner = ShadowRunner(driver, waiting, has_room=has_room, **clocks)
        runner.start()
        for tenth in range(600):  # a minute, with ten a second
            runner.offer(WarmRequest(path=f"/{tenth}"), "random")
            now[0] += 0.1
            for _ in range(5):
                await asyncio.sleep(0)
        assert looks[0] <= 8  # after 0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5 and 47.5 s
        assert waiting.counts().dropped == {"busy": 600}
        runner.offer(PAGE, "cold")  # these are looked at all the same
        room[0] = True
        await until(lambda: waiting.counts().done == 1)
        now[0] += 20
        runner.offer(PAGE, "random")
        await until(lambda: waiting.counts().done == 2)
        assert not runner.has_break()
        now[0] += 1.0
        cpu[0] += 0.5  # it has computed half of the time, for whomever
        assert runner.has_break()
        now[0] += 1.0
        assert not runner.has_break()
        runner.stop()

    asyncio.run(scene())


def test_nothing_runs_beside_the_one_thread_of_an_app() -> None:
    async def scene() -> None:
        shadows = Shadows(TenantSettings(threads=1))
        shadows.offer(PAGE, "cold")
        shadows.begin(None, has_room=lambda: True, send=lambda _: None)
        shadows.offer(PAGE, "random")
        assert shadows.counts().dropped == {"one-thread": 2}
        assert shadows.counts().waiting == 0
        assert shadows.lookout is not None  # the others may have more
        shadows.stop()

    asyncio.run(scene())


def _steady() -> Callable[[], float]:
    """A clock that sees no more of a pause than was asked for."""
    ticks = [time.monotonic()]

    def clock() -> float:
        ticks[0] += 0.005
        return ticks[0]

    return clock


def wsgi(gone: threading.Event) -> Any:
    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        context = current()
        assert context is not None
        assert context.warmup
        assert environ["HTTP_X_JUMPSTART_WARMUP"] == "1"
        if environ["PATH_INFO"] == "/slow":
            try:
                while True:
                    time.sleep(0.01)
            finally:
                gone.set()
        if environ["PATH_INFO"] == "/broken":
            raise ValueError("no")
        start_response("200 OK", [])
        return [threading.current_thread().name.encode()]

    return app


def test_a_wsgi_handler_is_stopped_when_its_time_is_over_and_the_next_one_runs() -> None:
    async def scene() -> None:
        gone = threading.Event()
        driver = WSGIDriver(wsgi(gone), timeout_s=0.2, guard=None)
        slow = await driver.run(WarmRequest(path="/slow"))
        assert slow.outcome.is_late
        assert gone.is_set()
        broken = await driver.run(WarmRequest(path="/broken"))
        assert broken.outcome.error == "ValueError: no"
        thread = next(thread for thread in threading.enumerate() if thread.name == "jumpstart-shadow")
        good = await driver.run(PAGE)
        assert (good.outcome.status, good.outcome.error) == (200, None)
        assert good.cpu_s > 0
        driver.close()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    asyncio.run(scene())


@pytest.mark.parametrize("path", ["/page", "/slow"])
def test_an_asgi_app_is_called_in_a_task_with_the_lifespan_state(path: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["state"] == {"answer": 42}
        assert scope["jumpstart.warmup"] is True
        sum(range(100_000))
        if scope["path"] == "/slow":
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def scene() -> None:
        driver: Driver = ASGIDriver(app, {"answer": 42}, timeout_s=0.5, guard=None)
        ran = await driver.run(WarmRequest(path=path))
        assert ran.cpu_s > 0
        assert ran.outcome.is_late is (path == "/slow")
        assert (ran.outcome.error is None) is (path == "/page")
        driver.close()

    asyncio.run(scene())
