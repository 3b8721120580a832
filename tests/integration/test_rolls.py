"""A roll: SIGHUP starts a new generation beside the old one, which serves until all of the new one is ready."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.load import Load
from tests.integration.server import (
    APPS,
    TRACEBACK,
    Serve,
    Server,
    connects,
    free_port,
    run_command,
    wait_until,
    working_folder,
    write_app,
)

pytestmark = pytest.mark.slow

WSGI = APPS / "wsgi_bare"

# Answers with its version, once a file is there if the path asks for it; slow at the first request of a process.
VERSIONED = """
    import asyncio, os, pathlib

    VERSION = "one"
    first = True

    async def app(scope, receive, send):
        global first
        if scope["type"] != "http":
            raise NotImplementedError
        path = scope["path"]
        if path == "/first" and first:
            first = False
            await asyncio.sleep(1.0)
        if path == "/gated":
            pathlib.Path(os.environ["STARTED"]).touch()
            while not pathlib.Path(os.environ["GATE"]).exists():
                await asyncio.sleep(0.01)
        body = f"{VERSION} {os.getpid()}".encode()
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})
"""


def roll(server: Server, generation: int) -> None:
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_line(rf"\bgen={generation} serves, ready in", 30)


def serves(server: Server, version: str) -> None:
    """The old generation takes what has connected until it hears of the drain; from then on the new one is alone."""

    def is_alone() -> bool:
        return {server.get("/").text.split()[0] for _ in range(10)} == {version}

    wait_until(is_alone, why=f"version {version} serves")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app", "versioned", VERSIONED)


def change(folder: Path, version: str) -> None:
    write_app(folder, "versioned", VERSIONED.replace('VERSION = "one"', version))


@contextlib.contextmanager
def in_flight(server: Server, tmp_path: Path) -> Iterator[list[Any]]:
    """A request that waits for its gate; its answer is in the list afterwards."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.get("/gated").text))
    thread.start()
    try:
        wait_until((tmp_path / "started").exists)
        yield answers
    finally:
        (tmp_path / "gate").touch()
        thread.join(20)


def test_68_a_request_in_flight_in_the_old_generation_is_answered_and_the_new_code_serves(
    serve: Serve, folder: Path, tmp_path: Path
) -> None:
    env = {"STARTED": str(tmp_path / "started"), "GATE": str(tmp_path / "gate")}
    with serve("versioned:app", "-w", "2", app_dir=folder, env=env) as server:
        old = server.wait_workers(2)
        with in_flight(server, tmp_path) as answers:
            change(folder, 'VERSION = "two"')
            roll(server, 2)
            serves(server, "two")
            assert "draining" in {worker["state"] for worker in server.status()["workers"]}
            assert not answers
        assert answers[0].startswith("one ")
        wait_until(lambda: len(server.status()["workers"]) == 2, why="the old ones are gone")
        assert not set(server.worker_pids()) & set(old)
        status = server.status()
        assert status["last_roll"] == {"generation": 2, "outcome": "done", "why": ""}
        assert (status["generation"], status["restarts"]) == (2, 0)
        assert "is gone" not in server.stderr


def test_70_a_roll_that_fails_leaves_the_old_generation_serving_and_is_named(
    serve: Serve, folder: Path, home: Path
) -> None:
    with serve("versioned:app", "-w", "2", "--startup-timeout", "2.5", app_dir=folder) as server:
        old = server.wait_workers(2)
        # It cannot be imported; it dies at its import; it hangs there; its workers die.
        failures = {
            "VERSION = 1 / 0": ("importing versioned failed", "ZeroDivisionError: division by zero"),
            "os._exit(3)": ("the mold ended (exit code 3) while it imported the app", ""),
            "import time; time.sleep(60)": ("the app was not imported within --startup-timeout 2.5 s", ""),
            "import asyncio; asyncio.Runner = lambda **_: os._exit(9)": (
                "ended (never said hello) before all were ready",
                "",
            ),
        }
        for number, (source, (why, traceback)) in enumerate(failures.items(), start=2):
            change(folder, source)
            server.process.send_signal(signal.SIGHUP)
            server.wait_for_line(rf"\[ERROR\] the roll to gen={number} has failed, the server goes on as before", 20)
            found = server.status()["last_roll"]
            assert (found["generation"], found["outcome"]) == (number, "failed")
            assert why in found["why"]
            assert server.stderr.count(traceback) == 1 or not traceback
            assert server.get("/").text.split()[0] == "one"
            assert server.worker_pids() == old
        assert server.stderr.count(TRACEBACK) == 1
        assert 'jumpstart_roll_failed{tenant="web"} 1' in server.admin("/metrics").text
        told = run_command("status", home=home)
        assert told.returncode == 1
        assert re.search("last roll, to generation 5: failed, worker [01] of gen=5 ended", told.stdout)
        # What was wrong is mended.
        change(folder, 'VERSION = "two"')
        roll(server, 6)
        serves(server, "two")
        assert run_command("status", home=home).returncode == 0


def test_71_rolls_under_load_fail_no_request(serve: Serve, folder: Path) -> None:
    with serve("versioned:app", "-w", "2", app_dir=folder) as server:
        server.wait_workers(2)
        with Load(server.port, 40) as load:
            for generation in range(2, 7):
                roll(server, generation)
        assert load.failures == {}
        assert load.seen["200"] > 40


def test_71_rolls_of_wsgi_workers_under_load_fail_no_request(serve: Serve) -> None:
    with serve("wsgi_app:app", "-w", "2", app_dir=WSGI) as server:
        server.wait_workers(2)
        with Load(server.port, 40) as load:
            for generation in range(2, 5):
                roll(server, generation)
        assert load.failures == {}
        assert load.seen["200"] > 20


def test_93_new_workers_get_no_request_before_they_are_warm(serve: Serve, folder: Path, tmp_path: Path) -> None:
    """The first request of a process takes a second; no client sees that."""
    warm = tmp_path / "warm.toml"
    warm.write_text('[[request]]\npath = "/first"\n')
    with serve("versioned:app", "-w", "2", "--warmup", str(warm), app_dir=folder) as server:
        server.wait_workers(2)
        with Load(server.port, 20, "/first") as load:
            for generation in range(2, 4):
                roll(server, generation)
        assert load.failures == {}
        assert max(load.times) < 0.8, sorted(load.times)[-5:]


def test_of_two_rolls_the_newer_one_wins(serve: Serve, folder: Path) -> None:
    with serve("versioned:app", app_dir=folder) as server:
        change(folder, "import time; time.sleep(60)")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: (server.status()["last_roll"] or {}).get("outcome") == "running")
        change(folder, 'VERSION = "three"')
        roll(server, 3)
        serves(server, "three")
        server.wait_for_line("the roll to gen=2 is abandoned: a newer one begins")


def test_a_roll_reads_the_configuration_anew_and_says_what_cannot_change(
    serve: Serve, folder: Path, home: Path
) -> None:
    current = working_folder(home)
    file = current / "jumpstart.toml"
    port = free_port()
    head = '[app]\ntarget = "versioned:app"\n[server]\nlog_level = "info"\n'
    file.write_text(f"{head}[tenants.web]\nworkers = 1\nport = {port}\n")
    with serve("", app_dir=folder, address=()) as server:
        server.wait_workers(1)
        file.write_text("[tenants.web]\nworkers = 0\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line(r"\[ERROR\] nothing is changed: .*workers: 0 is not allowed")
        assert server.status()["generation"] == 1
        file.write_text(f"{head.replace('info', 'error')}[tenants.web]\nworkers = 2\nport = {free_port()}\n")
        roll(server, 2)
        server.wait_workers(2)
        server.wait_for_line(r"\[WARNING\] \[server\] log_level: changes with the next start")
        server.wait_for_line(r"\[WARNING\] \[tenants.web\] port: changes with the next start")
        assert connects(port)


def test_a_roll_before_anything_serves_is_a_new_start(serve: Serve, folder: Path, tmp_path: Path) -> None:
    change(folder, f"pathlib.Path({str(tmp_path / 'there')!r}).touch(); import time; time.sleep(60)")
    with serve("versioned:app", app_dir=folder, wait=False) as server:
        wait_until((tmp_path / "there").exists, 20)
        change(folder, 'VERSION = "two"')
        server.process.send_signal(signal.SIGHUP)
        server.wait_ready()
        assert server.get("/").text.split()[0] == "two"


def test_spawned_workers_roll_too(serve: Serve, folder: Path) -> None:
    with serve("versioned:app", "--fork", "never", app_dir=folder) as server, Load(server.port, 20) as load:
        change(folder, 'VERSION = "two"')
        roll(server, 2)
        serves(server, "two")
        assert load.failures == {}
