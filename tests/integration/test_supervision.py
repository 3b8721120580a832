"""What happens when a process of the server dies, and when its workers may not be forked."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.server import APPS, Serve, Server, is_alive, wait_until, write_app

pytestmark = pytest.mark.slow

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"
BROKEN = APPS / "broken"

GONE_WITHIN = 2.0  # seconds from the supervisor's death to that of everything else


# ---------------------------------------------------------------------- a worker dies


@pytest.mark.parametrize("fork", ["auto", "never"])
def test_a_killed_worker_is_replaced_while_its_sibling_serves(serve: Serve, fork: str) -> None:
    with serve("wsgi_app:app", "-w", "2", "--fork", fork, app_dir=WSGI) as server:
        killed, sibling = server.wait_workers(2)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not is_alive(killed))
        assert [server.get("/").status_code for _ in range(20)] == [200] * 20
        assert sibling in server.wait_workers(2, instead_of=[killed])
        gone = rf"worker=0 gen=1 pid={killed} is gone \(SIGKILL\); another starts · seen last [\d.]+ s before with "
        assert re.search(gone, server.stderr, re.MULTILINE)
        assert server.status()["restarts"] == 1


def test_an_app_that_ends_its_process_costs_its_request_only(serve: Serve) -> None:
    with serve("asgi_app:app", app_dir=ASGI) as server:
        (first,) = server.worker_pids()
        with pytest.raises(httpx.HTTPError):
            server.get("/exit")
        server.wait_workers(1, instead_of=[first])
        assert server.get("/").text == "hello\n"
        assert f"pid={first} is gone (exit code 1)" in server.stderr


def test_a_crash_is_named_by_its_signal(serve: Serve, tmp_path: Path) -> None:
    crashing = """
        import ctypes

        def app(environ, start_response):
            if environ["PATH_INFO"] == "/crash":
                ctypes.string_at(0)
            start_response("200 OK", [("Content-Length", "2")])
            return [b"ok"]
    """
    with serve("crashing:app", app_dir=write_app(tmp_path / "app", "crashing", crashing)) as server:
        (first,) = server.worker_pids()
        with pytest.raises(httpx.HTTPError):
            server.get("/crash")
        server.wait_for_line(rf"pid={first} is gone \(SIGSEGV\); another starts")
        server.wait_workers(1, instead_of=[first])
        assert server.get("/").text == "ok"


DOOMED = """
    import os, pathlib

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            if pathlib.Path(os.environ["DOOM"]).exists():
                os._exit(9)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
"""


def test_a_worker_that_dies_again_and_again_is_started_ever_more_slowly(serve: Serve, tmp_path: Path) -> None:
    """The database is away: workers that serve go on, replacements are tried, and not in a hot loop."""
    doom = tmp_path / "doom"
    folder = write_app(tmp_path / "app", "doomed", DOOMED)
    with serve("doomed:app", "-w", "2", app_dir=folder, env={"DOOM": str(doom)}) as server:
        killed, sibling = server.wait_workers(2)
        doom.touch()
        os.kill(killed, signal.SIGKILL)
        server.wait_for_line(r"is gone \(exit code 9\); another starts in 0\.8 s")
        delays = re.findall(
            r"worker=0 gen=1 pid=\d+ is gone \(.*\); another starts(?: in (\S+) s)?(?: ·|$)", server.stderr, re.M
        )
        assert delays == ["", "0.2", "0.4", "0.8"]
        assert server.get("/").text == str(sibling)
        doom.unlink()
        server.wait_workers(2, instead_of=[killed])


# ---------------------------------------------------------------------- the mold dies


def test_a_killed_mold_is_replaced_and_its_workers_serve_on(serve: Serve) -> None:
    with serve("wsgi_app:app", "-w", "2", app_dir=WSGI) as server:
        workers = server.wait_workers(2)
        mold = server.mold_pid()
        os.kill(mold, signal.SIGKILL)
        server.wait_for_line(rf"mold pid={mold} gen=1 is gone \(SIGKILL\); its workers serve on")
        assert server.get("/").text == "hello\n"
        wait_until(lambda: server.status()["mold_pid"] not in (None, mold), why="there is another mold")
        assert server.status()["generation"] == 2
        assert server.worker_pids() == workers

        os.kill(workers[0], signal.SIGKILL)
        server.wait_workers(2, instead_of=[workers[0]])
        assert [worker["generation"] for worker in server.status()["workers"]] == [2, 1]
        assert server.get("/").text == "hello\n"


def test_mold_and_worker_killed_together(serve: Serve) -> None:
    """The worker's replacement waits for the mold's."""
    with serve("wsgi_app:app", "-w", "2", app_dir=WSGI) as server:
        workers = server.wait_workers(2)
        for pid in (server.mold_pid(), workers[0]):
            os.kill(pid, signal.SIGKILL)
        assert server.get("/").text == "hello\n"
        assert workers[1] in server.wait_workers(2, instead_of=[workers[0]])
        assert [worker["generation"] for worker in server.status()["workers"]] == [2, 1]


def test_everything_but_the_supervisor_killed(serve: Serve) -> None:
    with serve("asgi_app:app", "-w", "2", app_dir=ASGI) as server:
        server.wait_workers(2)
        before = server.processes() - {server.pid}
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        server.wait_workers(2, instead_of=before)
        assert server.get("/").text == "hello\n"


# ---------------------------------------------------------------------- the supervisor dies

AT_IMPORT = """
    import os, pathlib, time
    pathlib.Path(os.environ["STARTED"]).touch()
    time.sleep(60)
"""
COMPUTING_AT_START_UP = """
    import os, pathlib

    async def app(scope, receive, send):
        pathlib.Path(os.environ["STARTED"]).touch()
        sum(1 for _ in iter(int, 1))
"""


def all_goes_with_the_supervisor(server: Server) -> None:
    assert len(server.processes()) >= 2
    server.process.kill()
    server.wait()
    wait_until(lambda: not server.processes(), GONE_WITHIN, "the kernel has ended what the supervisor started")


@pytest.mark.parametrize("fork", ["auto", "never"])
def test_when_the_supervisor_is_killed_all_is_gone(serve: Serve, fork: str) -> None:
    with serve("wsgi_app:app", "-w", "2", "--fork", fork, app_dir=WSGI) as server:
        server.wait_workers(2)
        all_goes_with_the_supervisor(server)


@pytest.mark.parametrize("source", [AT_IMPORT, COMPUTING_AT_START_UP], ids=["importing", "computing"])
def test_when_the_supervisor_is_killed_while_it_boots_all_is_gone(serve: Serve, tmp_path: Path, source: str) -> None:
    started = tmp_path / "started"
    folder = write_app(tmp_path / "app", "booting", source)
    with serve("booting:app", app_dir=folder, env={"STARTED": str(started)}, wait=False) as server:
        wait_until(started.exists, 20)
        all_goes_with_the_supervisor(server)


# ---------------------------------------------------------------------- spawned instead of forked


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("starts_thread", "thread 'ticker-of-the-app' is running"),
        ("opens_socket", "connection to ('127.0.0.1', {port}) (descriptor"),
        ("makes_loop", "an event loop exists (descriptor"),
    ],
)
def test_95_96_an_app_that_is_not_fit_for_a_fork_is_spawned(serve: Serve, module: str, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        env = {"OPENS_SOCKET_TO": f"127.0.0.1:{port}"}
        with serve(f"{module}:app", "-w", "2", app_dir=BROKEN, env=env) as server:
            status = server.status()
            assert status["start_method"] == "spawn"
            assert reason.format(port=port) in "; ".join(status["start_reasons"])
            line = server.wait_for_line(r"workers are spawned, not forked: (.*)")
            assert reason.format(port=port) in line[1]
            assert server.get("/").text == "hello\n"
            wait_until(lambda: server.status()["mold_pid"] is None, why="the mold that was of no use is gone")


def test_fork_never(serve: Serve) -> None:
    with serve("asgi_app:app", "-w", "2", "--fork", "never", app_dir=ASGI) as server:
        status = server.status()
        assert (status["start_method"], status["mold_pid"]) == ("spawn", None)
        server.wait_workers(2)
        assert len(server.processes()) == 3


# ---------------------------------------------------------------------- children of the app

HELPERS = """
    import subprocess, sys

    def app(environ, start_response):
        if environ["PATH_INFO"] == "/orphan":  # sh ends at once; what it leaves is adopted by the supervisor
            subprocess.run(["sh", "-c", "(sleep 0.1; exit 3) & (exit 4) &"], check=True)
            body = b"left"
        else:
            body = str(subprocess.run([sys.executable, "-c", "raise SystemExit(7)"]).returncode).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]
"""


def children_of(pid: int) -> dict[int, str]:
    """Pid → state of every child of *pid*, zombies too."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == pid:
                found[int(folder.name)] = state
    return found


def test_helpers_of_the_app_are_collected_and_disturb_nobody(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "helpers", HELPERS)
    with serve("helpers:app", "-w", "2", app_dir=folder) as server:
        workers = server.wait_workers(2)
        ours = {*workers, server.mold_pid()}
        for _ in range(3):
            assert server.get("/orphan").text == "left"
        assert server.get("/").text == "7"
        wait_until(lambda: set(children_of(server.pid)) == ours, why="the orphans are collected, ours live")
        assert server.worker_pids() == workers
        assert server.status()["restarts"] == 0
        assert "is gone" not in server.stderr


def test_a_worker_that_stops_answering_holds_up_no_status(serve: Serve) -> None:
    """A handler that keeps the event loop to itself costs the status page two seconds, not its answer."""
    with serve("asgi_app:app", "-w", "2", app_dir=ASGI) as server:
        workers = server.wait_workers(2)
        os.kill(workers[0], signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert server.status()["ready"]
            assert time.monotonic() - began < 5
        finally:
            os.kill(workers[0], signal.SIGCONT)
