"""The envelope of an ASGI tenant from outside: deadlines of FastAPI endpoints, and what a stop does to streams."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.integration.server import Serve, in_parallel, wait_until, write_app

SHOP = """
    import asyncio, threading, time
    import jumpstart
    from fastapi import Depends, FastAPI, WebSocket
    from fastapi.responses import StreamingResponse

    app = FastAPI()
    pool = threading.Semaphore(1)

    def connection():
        with pool:
            yield "connection"

    @app.get("/sleep")
    def sleep():
        time.sleep(4)

    @app.get("/spin")
    def spin():
        while True:
            time.sleep(0.01)

    @app.get("/wait")
    async def wait():
        await asyncio.sleep(60)

    @app.get("/held")
    def held(one: str = Depends(connection)):
        time.sleep(0.02)
        return one

    @app.get("/quick")
    def quick():
        return "quick"

    @app.get("/tokens")
    async def tokens():
        async def generate():
            for _ in range(1000):
                yield "token "
                if jumpstart.cancelled():
                    return
                await asyncio.sleep(0.05)
        return StreamingResponse(generate())

    @app.websocket("/ws")
    async def ws(websocket: WebSocket):
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app", "shop", SHOP)


def test_3_6_13_16_171_a_fastapi_app_within_its_time(serve: Serve, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    options = ("--timeout", "1", "--threads", "2", "--access-logfile", str(log), "--access-logformat", "json")
    with serve("shop:app", *options, app_dir=folder) as server:
        began = time.monotonic()
        paths = ["/sleep", "/spin", "/wait", "/wait"]
        answers = in_parallel(4, lambda number: server.get(paths[number]))
        assert [answer.status_code for answer in answers] == [504] * 4
        assert 0.9 < time.monotonic() - began < 3
        # Both threads are taken, one of them for seconds; two others are there.
        assert [answer.text for answer in in_parallel(2, lambda _: server.get("/quick"))] == ['"quick"'] * 2
        assert [answer.text for answer in in_parallel(8, lambda _: server.get("/held"))] == ['"connection"'] * 8
        assert (
            len(re.findall(r"timeout: GET /(sleep|spin|wait) is over its timeout of 1 s after 1\.\d+ s", server.stderr))
            == 4
        )
        assert "time.sleep(4)" in server.stderr and "await asyncio.sleep(60)" in server.stderr
        wait_until(lambda: log.read_text().count("\n") == 14)  # a client has its answer before the log its line
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert sorted(line["status"] for line in lines) == [200] * 10 + [504] * 4
        server.wait_for_line("overrun over: a thread has ended")


def test_61_165_51_a_stop_ends_streams_and_websockets_soon(serve: Serve, folder: Path) -> None:
    with serve("shop:app", "--graceful-timeout", "20", app_dir=folder) as server:
        with connect(server.url.replace("http", "ws") + "/ws") as websocket:
            websocket.send("a")
            assert websocket.recv() == "a"
            with server.client() as client, client.stream("GET", "/tokens") as response:
                text = response.iter_text()
                assert next(text).startswith("token ")
                began = time.monotonic()
                server.process.terminate()
                rest = "".join(text)  # a good end: the handler has looked at jumpstart.cancelled()
            with pytest.raises(ConnectionClosed) as closed:
                websocket.recv(timeout=10)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        assert server.wait() == 0 and time.monotonic() - began < 5
        assert len(rest) < 1000
        wait_until(lambda: not server.processes())
        assert "ERROR" not in server.stderr
