"""A worker that is short of memory takes no more requests at once than it is told; both engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from jumpstart_server.asgi.gate import Cap
from jumpstart_server.asgi.threads import Threads, TurnLimiter, turn
from tests.server import asgi_lab, wsgi_lab
from tests.server.raw_http import Client, Response, until

GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"
REASON = "the worker is short of memory"


class Shop:
    """An engine with a handler that waits at ``/wait`` until `open`, and one that answers at ``/quick``."""

    def __init__(self, connect: Callable[[], Client], shed: Callable[[int | None], None]) -> None:
        self.connect = connect
        self.shed = shed
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)

    def begin(self) -> Client:
        """A request that runs."""
        client = self.connect()
        client.send(GET % b"/wait")
        assert self.entered.acquire(timeout=10)
        return client

    def ask(self, path: bytes = b"/quick") -> Response:
        with self.connect() as client:
            client.send(GET % path)
            return client.response()


@pytest.fixture(params=["asgi", "wsgi"])
def shop(request: pytest.FixtureRequest) -> Any:
    if request.param == "wsgi":
        with wsgi_lab.Lab() as lab:
            shop = Shop(lab.connect, lambda most: lab.server.shed(most, REASON))

            def wait(environ: Any, start_response: Any) -> list[bytes]:
                shop.entered.release()
                assert shop.gate.wait(10)
                return quick(environ, start_response)

            def quick(environ: Any, start_response: Any) -> list[bytes]:
                start_response("200 OK", [("Content-Length", "2")])
                return [b"ok"]

            lab.app(wait, "/wait")
            lab.app(quick, "/quick")
            yield shop
            shop.gate.set()
        return
    cap = Cap()
    asgi = asgi_lab.Lab()
    asgi.config.jumpstart_cap = cap  # type: ignore[attr-defined]  # as the engine does

    def shed(most: int | None) -> None:
        cap.most, cap.reason = most, REASON

    with asgi:
        shop = Shop(asgi.connect, shed)

        async def wait_async(scope: Any, receive: Any, send: Any) -> None:
            shop.entered.release()
            await asyncio.to_thread(shop.gate.wait, 10)
            await quick_async(scope, receive, send)

        async def quick_async(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        asgi.app(wait_async, "/wait")
        asgi.app(quick_async, "/quick")
        yield shop
        shop.gate.set()


def test_beyond_the_cap_requests_get_503_and_when_to_come_back(shop: Shop) -> None:
    shop.shed(2)
    running = [shop.begin(), shop.begin()]
    refused = shop.ask()
    assert (refused.status, refused.get("retry-after"), refused.get("connection")) == (503, "1", "close")
    assert REASON.encode() in refused.body
    shop.gate.set()
    assert [client.response().status for client in running] == [200, 200]
    for client in running:
        client.sock.close()
    assert shop.ask().status == 200


def test_with_a_cap_of_none_everything_is_taken_again(shop: Shop) -> None:
    shop.shed(0)
    assert shop.ask().status == 503
    shop.shed(None)
    assert shop.ask().status == 200


def test_a_connection_that_is_kept_hears_it_too(shop: Shop) -> None:
    with shop.connect() as client:
        for _ in range(3):  # WSGI knows a request that it sees again, and takes a shorter way
            client.send(GET % b"/quick")
            assert client.response().status == 200
        shop.shed(0)
        client.send(GET % b"/quick")
        assert client.response().status == 503


def test_a_body_that_is_still_to_come_does_not_confuse_it(shop: Shop) -> None:
    shop.shed(0)
    with shop.connect() as client:
        client.send(b"POST /quick HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n" + b"x" * 50_000)
        client.send(b"x" * 50_000)
        assert client.response().status == 503
    shop.shed(None)
    assert shop.ask().status == 200


def test_a_wsgi_engine_whose_keeper_does_not_look_is_not_alive() -> None:
    with wsgi_lab.Lab() as lab:
        pool = lab.server.pool
        pool.stir()
        with pool._lock:  # which it needs for each look
            until(lambda: pool.keeper_lag_s() > 0.3)
        until(lambda: pool.keeper_lag_s() < 0.3)
    assert pool.keeper_lag_s() == float("inf")


def test_threads_of_asgi_apps_can_become_more_when_the_worker_is_warm() -> None:
    async def main() -> None:
        threads = Threads(2)
        threads.install()
        threads.resize(6)
        assert threads.stats().limit == 6
        gate, entered = threading.Event(), threading.Semaphore(0)

        def work() -> None:
            entered.release()
            assert gate.wait(10)

        jobs = [asyncio.ensure_future(anyio.to_thread.run_sync(work)) for _ in range(6)]
        loop = asyncio.get_running_loop()
        more = [loop.run_in_executor(None, work) for _ in range(6)]
        for _ in range(12):
            assert await anyio.to_thread.run_sync(lambda: entered.acquire(timeout=10), limiter=anyio.CapacityLimiter(1))
        gate.set()
        await asyncio.gather(*jobs, *more)

    asyncio.run(main())


def test_an_app_that_has_set_the_limiter_itself_keeps_its_own_number() -> None:
    async def main() -> None:
        threads = Threads(2)
        threads.install()
        anyio.to_thread.current_default_thread_limiter().total_tokens = 3
        threads.resize(6)
        assert anyio.to_thread.current_default_thread_limiter().total_tokens == 3

    asyncio.run(main())


def test_with_more_threads_the_reserve_grows_too() -> None:
    async def main() -> None:
        limiter = TurnLimiter(8)
        limiter.resize(1000)
        assert limiter.total_tokens == 1000
        limiter.total_tokens = 0  # so that only the reserve is left
        turn.set(31)
        for _ in range(31):
            limiter.acquire_on_behalf_of_nowait(object())
            turn.set(31)
        with pytest.raises(anyio.WouldBlock):
            limiter.acquire_on_behalf_of_nowait(object())

    asyncio.run(main())
