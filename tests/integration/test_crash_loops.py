"""Workers that die: what the log says of it, how long others are tried in their place, and when that ends."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.server import APPS, TRACEBACK, Serve, Server, connects, is_alive, wait_until, write_app

pytestmark = pytest.mark.slow

ASGI = APPS / "asgi_bare"

DIES_YOUNG = """
    import os, threading

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            threading.Timer(0.2, os._exit, (1,)).start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
"""


@pytest.mark.parametrize("options", [(), ("--fork", "never", "-w", "2")], ids=["forked", "spawned"])
def test_80_a_worker_that_dies_young_again_and_again_ends_the_server(
    serve: Serve, tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder = write_app(tmp_path / "app", "doomed", DIES_YOUNG)
    with serve("doomed:app", "--crash-limit", "4", *options, app_dir=folder, wait=False) as server:
        assert server.wait(30) == 3
        waits = re.findall(r"worker=0 gen=1 .* is gone \(exit code 1\); another starts(?: in (\S+) s)?", server.stderr)
        assert waits == ["", "0.2", "0.4"]
        assert server.stderr.count("[ERROR] given up after 4 failures in a row (--crash-limit)") == 1
        assert "the last one ended with exit code 1" in server.stderr
        assert not connects(server.port) if server.url else True


FAILS_LATER = """
    import os, pathlib

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            if pathlib.Path(os.environ["DOOM"]).exists():
                raise ConnectionRefusedError("the database is away")
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
"""


def test_80_81_a_start_up_that_fails_again_and_again_is_told_twice_in_full(serve: Serve, tmp_path: Path) -> None:
    """It has served before: so it is tried again, and what is wrong is said first and last, not each time."""
    doom = tmp_path / "doom"
    folder = write_app(tmp_path / "app", "fails", FAILS_LATER)
    options = ("--lifespan", "on", "--crash-limit", "4")
    with serve("fails:app", *options, app_dir=folder, env={"DOOM": str(doom)}) as server:
        (worker,) = server.wait_workers(1)
        doom.touch()
        os.kill(worker, signal.SIGKILL)
        assert server.wait(30) == 3
        assert server.stderr.count("[ERROR] the app's lifespan start-up failed") == 3
        assert server.stderr.count(TRACEBACK) == 2
        assert server.stderr.count("ConnectionRefusedError: the database is away") == 2


def test_80_what_is_mended_in_time_serves_again(serve: Serve, tmp_path: Path) -> None:
    doom = tmp_path / "doom"
    folder = write_app(tmp_path / "app", "fails", FAILS_LATER)
    with serve("fails:app", "--lifespan", "on", app_dir=folder, env={"DOOM": str(doom)}) as server:
        (worker,) = server.wait_workers(1)
        doom.touch()
        os.kill(worker, signal.SIGKILL)
        server.wait_for_line(r"is gone \(exit code 3\); another starts in 0\.2 s")
        doom.unlink()
        server.wait_workers(1, instead_of=[worker])
        assert server.get("/").status_code == 200


def test_81_an_app_that_is_not_where_it_was_looked_for_is_said_so_with_the_place(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "elsewhere", "")
    with serve("nowhere:app", app_dir=folder, wait=False) as server:
        assert server.wait() == 3
        (line,) = [line for line in server.stderr.splitlines() if "[ERROR]" in line]
        assert "nowhere" in line and str(folder) in line


def test_85_deaths_are_named_with_signal_memory_and_requests_in_flight(serve: Serve, tmp_path: Path) -> None:
    waiting = """
        import asyncio, ctypes, os, signal

        async def app(scope, receive, send):
            if scope["type"] != "http":
                raise NotImplementedError
            if scope["path"] == "/segv":
                ctypes.string_at(0)
            if scope["path"] == "/abort":
                os.abort()
            await asyncio.sleep(60)
    """
    with serve("waiting:app", app_dir=write_app(tmp_path / "app", "waiting", waiting)) as server:
        for path, name in (("/segv", "SIGSEGV"), ("/abort", "SIGABRT")):
            (before,) = server.wait_workers(1)
            with pytest.raises(httpx.HTTPError):
                server.get(path)
            server.wait_for_line(
                rf"pid={before} is gone \({name}\); .* · seen last [\d.]+ s before with [\d.]+ [KMG]iB resident, \d req"
            )
            server.wait_workers(1, instead_of=[before])
        (before,) = server.wait_workers(1)
        with httpx.Client(base_url=server.url, timeout=0.5, trust_env=False) as client:
            for _ in range(2):
                with pytest.raises(httpx.ReadTimeout):
                    client.get("/")
        with pytest.raises(httpx.HTTPError), httpx.stream("GET", server.url, timeout=10, trust_env=False):
            pass
        os.kill(before, signal.SIGKILL)
        server.wait_for_line(rf"pid={before} is gone \(SIGKILL\); another starts.* seen last [\d.]+ s before with ")


HELD = """
    import os, re, time

    async def app(scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError
        if scope["path"] == "/hold":
            re.match("(a+)+$", "a" * 26 + "b")  # backtracks for seconds, and holds the GIL all the while
        if scope["path"] == "/hang":
            time.sleep(3600)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
"""


def test_83_a_worker_that_computes_is_left_alone_and_one_that_hangs_is_replaced(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "held", HELD)
    with serve("held:app", "--worker-healthcheck-timeout", "2", app_dir=folder) as server:
        (worker,) = server.wait_workers(1)
        assert server.get("/hold", timeout=60).text == str(worker), "a regular expression that holds the GIL for long"
        assert server.worker_pids() == [worker]
        assert "is renewed" not in server.stderr and "is gone" not in server.stderr
        with pytest.raises(httpx.HTTPError):
            server.get("/hang", timeout=20)
        server.wait_for_line(rf"worker=0 gen=1 pid={worker} gives no sign of life .* it hangs, and is replaced")
        server.wait_for_line(rf"worker=0 gen=1 pid={worker} is renewed: hung")
        assert "in app" in server.stderr, "the stacks say where it stands"
        server.wait_workers(1, instead_of=[worker])
        assert server.get("/").text != str(worker)
        wait_until(lambda: not is_alive(worker))


def test_86_a_child_that_a_handler_leaves_to_us_is_collected_and_means_nothing(serve: Serve, tmp_path: Path) -> None:
    leaving = """
        import subprocess

        def app(environ, start_response):
            subprocess.run(["sh", "-c", "(exit 3) & exit 0"], check=True)
            start_response("200 OK", [("Content-Length", "2")])
            return [b"ok"]
    """
    with serve("leaving:app", app_dir=write_app(tmp_path / "app", "leaving", leaving)) as server:
        workers = server.wait_workers(1)
        for _ in range(5):
            assert server.get("/").text == "ok"
        wait_until(lambda: not zombies_of(server), why="none of them stays a zombie")
        assert server.worker_pids() == workers
        assert server.process.poll() is None


def zombies_of(server: Server) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == server.pid and state == "Z":
                found.append(folder.name)
    return found


def test_90_a_killed_worker_is_replaced_within_a_second_while_its_sibling_serves(serve: Serve) -> None:
    with serve("asgi_app:app", "-w", "2", app_dir=ASGI) as server:
        killed, sibling = server.wait_workers(2)
        began = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        while len(server.worker_pids()) < 2 or killed in server.worker_pids():
            assert server.get("/").status_code == 200
        assert time.monotonic() - began < 3, "a third of that on a machine that does nothing else"
        assert sibling in server.worker_pids()


def test_91_when_the_supervisor_is_killed_its_workers_are_gone_and_the_port_is_free(serve: Serve) -> None:
    with serve("asgi_app:app", "-w", "2", app_dir=ASGI) as server:
        server.wait_workers(2)
        server.process.kill()
        server.wait()
        wait_until(lambda: not server.processes(), 2)
        # Another server may have the number by now, for a moment.
        wait_until(lambda: not connects(server.port), 20)
