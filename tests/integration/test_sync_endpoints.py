"""
Sync code of ASGI apps on a real server: all threads, no deadlock, streams without a hand-over per chunk, and its limits
seen from outside.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.server import Serve, Server, wait_until, write_app

pytestmark = pytest.mark.slow

FASTAPI = """
    import asyncio, os, threading, time
    from pathlib import Path

    from fastapi import Depends, FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel
    from starlette.background import BackgroundTask
    from starlette.middleware.base import BaseHTTPMiddleware

    app = FastAPI()
    slots = threading.BoundedSemaphore(int(os.environ.get("SLOTS", "1")))
    audit = threading.Lock()
    ended = []

    class Answer(BaseModel):
        text: str

    def connection():
        slots.acquire()
        try:
            yield "connection"
        finally:
            slots.release()

    def settings():
        return "settings"

    def transaction(settings: str = Depends(settings), connection: str = Depends(connection)):
        audit.acquire()
        try:
            yield connection
        finally:
            audit.release()

    @app.get("/sleep")
    def sleep(seconds: float = 1.0):
        time.sleep(seconds)
        return threading.current_thread().name

    @app.get("/locked")
    def locked(connection: str = Depends(connection)) -> Answer:
        return Answer(text=connection)

    @app.get("/nested")
    def nested(transaction: str = Depends(transaction)) -> Answer:
        return Answer(text=transaction)

    @app.get("/executor")
    async def executor(seconds: float = 1.0):
        await asyncio.to_thread(time.sleep, seconds)

    @app.get("/gated")
    def gated():
        while not Path(os.environ["GATE"]).exists():
            time.sleep(0.01)

    @app.get("/health")
    async def health():
        return "well"

    def tokens(count, pause, name):
        try:
            for number in range(count):
                if pause:
                    time.sleep(pause)
                yield b"%d\\n" % number
        finally:
            ended.append([name, threading.current_thread() is not threading.main_thread(), time.monotonic()])

    @app.get("/stream")
    def stream(count: int = 10, pause: float = 0.0, name: str = ""):
        return StreamingResponse(tokens(count, pause, name), background=BackgroundTask(ended.append, ["background"]))

    @app.get("/ended")
    async def what_ended():
        return [ended, time.monotonic()]

    class Wrapping(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            return await call_next(request)

    wrapped = Wrapping(app)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app", "site_of_test", FASTAPI)


async def _ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def ask_at_once(server: Server, path: str, count: int, timeout: float = 30.0) -> list[bytes]:
    """So many GETs, each on a connection of its own; answers with their heads."""
    request = f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode()

    async def main() -> list[bytes]:
        async with asyncio.timeout(timeout):
            return await asyncio.gather(*(_ask(server.port, request) for _ in range(count)))

    return asyncio.run(main())


def assert_all_ok(answers: list[bytes]) -> None:
    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}


# ---------------------------------------------------------------------- all threads


@pytest.mark.parametrize("path", ["/sleep", "/executor"])
def test_15_five_hundred_sync_endpoints_at_once(serve: Serve, folder: Path, path: str) -> None:
    """
    With anyio's own 40 threads it would be 33 seconds, with asyncio's six or so even more.

    The last request comes while the first still sleeps, on a busy machine too.
    """
    with serve("site_of_test:app", "--threads", "500", app_dir=folder) as server:
        began = time.monotonic()
        assert_all_ok(ask_at_once(server, f"{path}?seconds=2.5", 500))
        assert time.monotonic() - began < 6
        (worker,) = server.status()["workers"]
        assert (worker["peak"], worker["limit"], worker["busy"], worker["waiting"]) == (500, 500, 0, 0)


def test_one_thread_more_is_not_there(serve: Serve, folder: Path) -> None:
    with serve("site_of_test:app", "--threads", "4", app_dir=folder) as server:
        began = time.monotonic()
        assert_all_ok(ask_at_once(server, "/sleep?seconds=0.3", 12))
        assert time.monotonic() - began >= 0.85
        assert server.status()["workers"][0]["peak"] <= 4 + 2  # an answer is made ready in a thread, in the reserve


# ---------------------------------------------------------------------- no deadlock


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("path", ["/locked", "/nested"])
def test_16_dependencies_that_hold_what_others_wait_for(serve: Serve, folder: Path, path: str, slots: int) -> None:
    """
    N threads, N + 20 requests, a pool of 1 or N - 1 connections that a ``yield`` dependency holds.

    All threads stand in the pool's ``get``; the request with the connection needs a thread for its endpoint.
    """
    with serve("site_of_test:app", "--threads", "4", app_dir=folder, env={"SLOTS": str(slots)}) as server:
        for _ in range(3):
            assert_all_ok(ask_at_once(server, path, 24, timeout=10))
        assert server.status()["workers"][0]["busy"] == 0


# ---------------------------------------------------------------------- streams


def test_166_a_stream_of_many_chunks_is_whole(serve: Serve, folder: Path) -> None:
    with serve("site_of_test:app", app_dir=folder) as server:
        answer = server.get("/stream?count=20000&name=a")
        assert answer.text == "".join(f"{number}\n" for number in range(20_000))
        ended, _ = server.get("/ended").json()
        assert [each[:2] for each in ended] == [["a", True], ["background"]]


@pytest.mark.parametrize("app", ["app", "wrapped"])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_166_a_stream_is_closed_in_a_thread_when_its_client_leaves(
    serve: Serve, folder: Path, app: str, pause: float
) -> None:
    with serve(f"site_of_test:{app}", app_dir=folder) as server:
        for number in range(4):
            with server.client() as client:
                with client.stream("GET", f"/stream?count=100000000&pause={pause}&name={number}") as answer:
                    assert next(answer.iter_raw())
            left = time.monotonic()
            ended = wait_until(lambda: [each for each in server.get("/ended").json()[0] if each[0] == str(number)])  # noqa: B023
            assert time.monotonic() - left < 2  # it is within one, on a machine that is not busy with other things
            assert [each[1] for each in ended] == [True]
        wait_until(lambda: server.status()["workers"][0]["busy"] == 0)
        assert server.get("/sleep?seconds=0").status_code == 200


def test_streams_do_not_starve_endpoints(serve: Serve, folder: Path) -> None:
    """More endless streams than threads: each goes on, and an endpoint gets its thread in turn."""
    with serve("site_of_test:app", "--threads", "4", app_dir=folder) as server:
        with server.client() as client:
            streams = [client.stream("GET", f"/stream?count=100000&pause=0.01&name={number}") for number in range(10)]
            answers = [stream.__enter__() for stream in streams]
            for answer in answers:
                lines = answer.iter_lines()
                assert [next(lines) for _ in range(5)] == ["0", "1", "2", "3", "4"]
            began = time.monotonic()
            assert server.get("/sleep?seconds=0").status_code == 200
            assert time.monotonic() - began < 5
            for stream in streams:
                stream.__exit__(None, None, None)
        wait_until(lambda: len(server.get("/ended").json()[0]) == 10)


def test_token_streams_at_once_from_blocking_generators(serve: Serve, folder: Path) -> None:
    with serve("site_of_test:app", "--threads", "200", app_dir=folder) as server:
        began = time.monotonic()
        answers = ask_at_once(server, "/stream?count=20&pause=0.1", 200)
        took = time.monotonic() - began
    assert_all_ok(answers)
    assert all(answer.endswith(b"0\r\n\r\n") for answer in answers)
    assert took < 8  # ideal 2


def test_a_stop_closes_streams_that_do_not_end(serve: Serve, folder: Path) -> None:
    with serve("site_of_test:app", "--graceful-timeout", "1", app_dir=folder) as server:
        with server.client() as client, client.stream("GET", "/stream?count=100000&pause=0.01") as answer:
            assert next(answer.iter_raw())
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 5


def test_55_a_stream_that_lasts_goes_on(serve: Serve, folder: Path) -> None:
    """No limit that there is counts against a response that moves, however slowly."""
    limits = ("--header-timeout", "1", "--body-timeout", "1", "--write-timeout", "1", "--keep-alive", "1")
    with serve("site_of_test:app", *limits, app_dir=folder) as server:
        assert server.get("/stream?count=2&pause=1.6").text == "0\n1\n"


# ---------------------------------------------------------------------- seen from outside


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gate"
    yield path
    path.touch()


def test_18_not_ready_when_requests_wait_for_long(serve: Serve, folder: Path, gate: Path) -> None:
    """A health page that is async says that all is well; the admin page knows better."""
    with serve("site_of_test:app", "--threads", "2", app_dir=folder, env={"GATE": str(gate)}) as server:
        clients = [threading.Thread(target=server.get, args=("/gated",), kwargs={"timeout": 60}) for _ in range(5)]
        for client in clients:
            client.start()
        wait_until(lambda: server.status()["workers"][0]["waiting"] == 3)
        assert server.admin("/readyz").status_code == 200  # a short queue is nothing
        assert 'jumpstart_pool_threads_waiting{tenant="web"} 3' in server.admin("/metrics").text
        wait_until(lambda: server.admin("/readyz").status_code == 503, 15)
        text = server.admin("/readyz").text
        assert text.startswith("no thread is free\nworker 0: 2 of 2 threads busy, 3 waiting, the longest for ")
        assert server.admin("/livez").status_code == 200
        assert server.get("/health").status_code == 200
        gate.touch()
        wait_until(lambda: server.admin("/readyz").status_code == 200)
        for client in clients:
            client.join()


# ---------------------------------------------------------------------- lifespan

LIFESPAN = """
    import contextlib, os

    from starlette.applications import Starlette

    where = os.environ["WHERE"]

    @contextlib.asynccontextmanager
    async def lifespan(app):
        if where == "start":
            raise LookupError("at the start")
        yield
        if where == "end":
            raise LookupError("at the end")

    framework = Starlette(lifespan=lifespan)

    async def bare(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            if where == "start":
                raise LookupError("at the start")
            await send({"type": "lifespan.startup.complete"})
            await receive()
            raise LookupError("at the end")
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})
"""


@pytest.mark.parametrize("app", ["framework", "bare"])
def test_161_a_shut_down_that_fails_is_said_once_and_in_the_exit_code(serve: Serve, tmp_path: Path, app: str) -> None:
    folder = write_app(tmp_path / "app", "lives", LIFESPAN)
    with serve(f"lives:{app}", "-w", "2", app_dir=folder, env={"WHERE": "end"}) as server:
        server.wait_workers(2)
        assert server.get("/").status_code == 404
        assert server.stop() == 3
        assert server.stderr.count("the app's lifespan shut-down failed") == 2  # one line for each worker
        assert server.stderr.count("Traceback (most recent call last)") == 1
        assert server.stderr.count("LookupError: at the end") == 1


def test_161_a_start_up_that_fails_ends_the_boot(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "lives", LIFESPAN)
    for app, options in (("framework", ()), ("bare", ("--lifespan", "on"))):
        with serve(f"lives:{app}", *options, app_dir=folder, env={"WHERE": "start"}, wait=False) as server:
            assert server.wait() == 3
            assert server.stderr.count("the app's lifespan start-up failed") == 1
            assert server.stderr.count("LookupError: at the start") == 1


def test_161_a_start_up_that_raises_goes_on_without_lifespan(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "lives", LIFESPAN)
    with serve("lives:bare", app_dir=folder, env={"WHERE": "start"}) as server:
        assert server.get("/").status_code == 404
        assert "going on without it: LookupError: at the start" in server.stderr


# ---------------------------------------------------------------------- behind Starlette's own middleware

ENDS = """
    import asyncio, os
    from pathlib import Path

    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route, WebSocketRoute

    done = Path(os.environ["DONE"])
    opened = []

    class Wrapping(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            return await call_next(request)

    async def mail():
        await asyncio.sleep(0.8)
        done.touch()

    async def background(request):
        return PlainTextResponse("accepted", background=BackgroundTask(mail))

    async def big(request):
        async def body():
            for _ in range(3200):
                yield bytes(65536)
        return StreamingResponse(body())

    async def connection(request):
        opened.append(1)
        try:
            await asyncio.sleep(60)
        finally:
            opened.pop()

    async def count(request):
        return PlainTextResponse(str(len(opened)))

    async def socket(websocket):
        try:
            await websocket.accept()
            await websocket.send_text("hello")
            message = await websocket.receive()
        finally:
            done.write_text(f"{message['type']} {message['code']}")

    app = Starlette(
        routes=[
            Route("/background", background), Route("/big", big), Route("/connection", connection),
            Route("/count", count), WebSocketRoute("/socket", socket),
        ],
        middleware=[Middleware(Wrapping)],
    )
"""


@pytest.fixture
def ending(serve: Serve, tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    done = tmp_path / "done"
    with serve("ends:app", app_dir=write_app(tmp_path / "app", "ends", ENDS), env={"DONE": str(done)}) as server:
        yield server, done


def test_45_background_work_outlives_its_client_and_the_order_to_stop(ending: tuple[Server, Path]) -> None:
    server, done = ending
    assert server.get("/background").text == "accepted"  # the connection is closed at once
    assert not done.exists()
    assert server.stop() == 0
    assert done.exists()


def test_46_a_stream_through_the_server_is_not_held_in_memory(ending: tuple[Server, Path]) -> None:
    server, _ = ending
    (pid,) = server.worker_pids()

    def resident_kib() -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

    before = resident_kib()
    with server.client() as client, client.stream("GET", "/big") as answer:
        size = 0
        for part in answer.iter_raw():
            if not size:
                time.sleep(0.5)  # a slow reader: whoever reads ahead has time to
            size += len(part)
    assert size == 3200 * 65536
    assert resident_kib() - before < 30_000


def test_50_what_a_request_has_open_is_closed_when_its_client_leaves(ending: tuple[Server, Path]) -> None:
    server, _ = ending

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            server.get("/connection", timeout=0.3)

    clients = [threading.Thread(target=leave) for _ in range(5)]
    for client in clients:
        client.start()
    wait_until(lambda: server.get("/count").text == "5")
    for client in clients:
        client.join()
    wait_until(lambda: server.get("/count").text == "0", 5)


def test_165_a_websocket_handler_ends_in_order_when_the_server_stops(ending: tuple[Server, Path]) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    server, done = ending
    with connect(server.url.replace("http", "ws") + "/socket", proxy=None) as websocket:
        assert websocket.recv(timeout=5) == "hello"
        server.process.terminate()
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(timeout=5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    assert server.wait() == 0
    assert done.read_text() == "websocket.disconnect 1012"
