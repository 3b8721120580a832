"""How a server leaves: not ready first, then what waits is served, what runs is finished, and what stays is ended."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.integration.server import (
    APPS,
    GATED_WSGI,
    TRACEBACK,
    Serve,
    Server,
    connects,
    wait_until,
    write_app,
)

pytestmark = pytest.mark.slow

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"
BOTH = pytest.mark.parametrize(
    ("target", "folder"), [("wsgi_app:app", WSGI), ("asgi_app:app", ASGI)], ids=["wsgi", "asgi"]
)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def ask(connection: http.client.HTTPConnection, path: str = "/") -> http.client.HTTPResponse:
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    return answer


@BOTH
def test_before_it_drains_a_lame_duck_is_not_ready_and_serves_on(serve: Serve, target: str, folder: Path) -> None:
    with serve(target, "-w", "2", "--drain-delay", "2", app_dir=folder) as server:
        server.wait_workers(2)
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        assert ask(kept).getheader("Connection") != "close"
        began = time.monotonic()
        server.process.terminate()
        server.wait_for_line("not ready from now on; draining in 2 s")
        assert server.admin("/readyz").status_code == 503
        for connection in (kept, http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)):
            answer = ask(connection)
            assert (answer.status, answer.getheader("Connection")) == (200, "close")
            connection.close()
        assert time.monotonic() - began < 2, "all of that was while it accepted"
        assert server.wait() == 0
        assert time.monotonic() - began > 2
        assert server.stderr.rstrip().endswith("stopped")
        assert "SIGTERM: draining 2 workers" in server.stderr


def test_a_second_ctrl_c_ends_a_lame_duck_at_once(serve: Serve) -> None:
    with serve("asgi_app:app", "--drain-delay", "30", app_dir=ASGI) as server:
        server.process.send_signal(signal.SIGINT)
        server.wait_for_line("not ready from now on")
        server.process.send_signal(signal.SIGINT)
        assert server.wait(5) == 130


ONE_AT_A_TIME = """
    import time

    def app(environ, start_response):
        time.sleep(0.4)
        start_response("200 OK", [("Content-Length", "2")])
        return [b"ok"]
"""


def test_58_75_what_waits_to_be_accepted_or_for_a_thread_is_served(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "slow", ONE_AT_A_TIME)
    with serve("slow:app", "--threads", "1", app_dir=folder) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(4)]
        for client in clients:
            client.sendall(GET)
        server.process.terminate()
        for client in clients:
            with client, client.makefile("rb") as answer:
                text = answer.read()
            assert text.startswith(b"HTTP/1.1 200 ") and b"connection: close" in text.lower(), text
        assert server.wait() == 0


@BOTH
def test_60_65_connections_that_are_kept_are_closed_promptly_and_those_in_use_with_their_answer(
    serve: Serve, target: str, folder: Path
) -> None:
    with serve(target, app_dir=folder) as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        ask(idle)
        last: list[str | None] = []

        def go_on() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            while not last or last[-1] != "close":
                last.append(ask(connection, "/stream/2?delay=0.02").getheader("Connection"))
            connection.close()

        looping = threading.Thread(target=go_on)
        looping.start()
        wait_until(lambda: len(last) > 3)
        server.process.terminate()
        began = time.monotonic()
        assert idle.sock.recv(1) == b""
        assert time.monotonic() - began < 1.5, "a tenth of it is usual"
        idle.close()
        looping.join(5)
        assert not looping.is_alive() and last[-1] == "close"
        assert server.wait() == 0


ENDLESS = """
    import asyncio, os, pathlib, time

    def wsgi(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        try:
            while True:
                yield b"data: x\\n\\n"
                time.sleep(0.05)
        finally:
            pathlib.Path(os.environ["ENDED"]).touch()

    async def asgi(scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"data: x", "more_body": True})
                await asyncio.sleep(0.05)
        finally:
            pathlib.Path(os.environ["ENDED"]).touch()
"""


@pytest.mark.parametrize("app", ["wsgi", "asgi"])
def test_61_a_stream_without_end_holds_up_no_end(serve: Serve, tmp_path: Path, app: str) -> None:
    folder = write_app(tmp_path / "app", "endless", ENDLESS)
    ended = tmp_path / "ended"
    options = ("--graceful-timeout", "1", "--timeout", "0")
    with serve(f"endless:{app}", *options, app_dir=folder, env={"ENDED": str(ended)}) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            client.sendall(GET)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            server.process.terminate()
            assert server.wait() == 0
            assert time.monotonic() - began < 1 + 3
        assert ended.exists() or app == "wsgi"


STAYS = """
    import threading, time

    def app(environ, start_response):
        threading.Thread(target=time.sleep, args=(600,)).start()
        start_response("200 OK", [("Content-Length", "2")])
        return [b"ok"]
"""


def test_66_a_thread_that_the_app_left_running_is_waited_for_within_limits(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "stays", STAYS)
    with serve("stays:app", "--graceful-timeout", "1", app_dir=folder) as server:
        assert server.get("/").text == "ok"
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 1 + 2 + 3


def test_73_no_thread_of_ours_keeps_a_worker_from_ending(serve: Serve) -> None:
    with serve("wsgi_app:app", "--threads", "8", app_dir=WSGI) as server:
        threads = [threading.Thread(target=server.get, args=("/",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 4
        assert not re.search(r"killed|giving up", server.stderr)


def test_sigquit_waits_for_no_request(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "gated", GATED_WSGI)
    env = {"STARTED": str(tmp_path / "started"), "GATE": str(tmp_path / "gate")}
    with serve("gated:app", "-w", "2", app_dir=folder, env=env) as server:
        errors: list[Exception] = []

        def wait_for_it() -> None:
            try:
                server.get("/gated")
            except Exception as error:
                errors.append(error)

        client = threading.Thread(target=wait_for_it)
        client.start()
        wait_until((tmp_path / "started").exists)
        began = time.monotonic()
        server.process.send_signal(signal.SIGQUIT)
        assert server.wait() == 0
        assert time.monotonic() - began < 4
        client.join(10)
        assert errors
        assert "SIGQUIT: stopping 2 workers, requests in flight are not waited for" in server.stderr
        assert TRACEBACK not in server.stderr


def hangs_in_its_lifespan(serve: Serve, tmp_path: Path, *options: str) -> Server:
    source = """
        import asyncio, os, pathlib

        async def wait_for_ever():
            await asyncio.sleep(600)

        async def app(scope, receive, send):
            pathlib.Path(os.environ["STARTED"]).touch()
            await wait_for_ever()
    """
    folder = write_app(tmp_path / "app", "hangs", source)
    env = {"STARTED": str(tmp_path / "started")}
    return serve("hangs:app", *options, app_dir=folder, env=env, wait=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_63_a_start_up_that_never_ends_is_ended_by_a_signal(
    serve: Serve, tmp_path: Path, number: signal.Signals
) -> None:
    with hangs_in_its_lifespan(serve, tmp_path) as server:
        wait_until((tmp_path / "started").exists, 20)
        began = time.monotonic()
        assert server.stop(number) == (130 if number is signal.SIGINT else 0)
        assert time.monotonic() - began < 3


def test_63_a_start_up_that_never_ends_has_its_time_and_says_where_it_stood(serve: Serve, tmp_path: Path) -> None:
    with hangs_in_its_lifespan(serve, tmp_path, "--startup-timeout", "1.5") as server:
        assert server.wait() == 3
        assert "worker 0 was not ready within --startup-timeout 1.5 s" in server.stderr
        assert "Timeout (" in server.stderr and "Thread 0x" in server.stderr


def test_88_no_request_is_served_before_the_start_up_is_complete(serve: Serve, tmp_path: Path) -> None:
    source = """
        import asyncio, os, pathlib

        ready = False

        async def app(scope, receive, send):
            global ready
            if scope["type"] == "lifespan":
                await receive()
                while not pathlib.Path(os.environ["GATE"]).exists():
                    await asyncio.sleep(0.01)
                ready = True
                await send({"type": "lifespan.startup.complete"})
                await receive()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": str(ready).encode()})
    """
    gate = tmp_path / "gate"
    folder = write_app(tmp_path / "app", "starts", source)
    with serve("starts:app", "-w", "2", app_dir=folder, env={"GATE": str(gate)}, wait=False) as server:
        wait_until(lambda: server.admin("/readyz").text.count("booting") == 2, 20)
        gate.touch()
        server.wait_ready()
        assert {server.get("/").text for _ in range(10)} == {"True"}
        # A roll, too: while the new ones start, the old ones answer.
        gate.unlink()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: [each["state"] for each in server.status()["workers"]].count("booting") == 2, 20)
        assert {server.get("/").text for _ in range(10)} == {"True"}
        assert connects(server.port)
        gate.touch()
        server.wait_for_line("gen=2 serves")
        assert {server.get("/").text for _ in range(10)} == {"True"}
