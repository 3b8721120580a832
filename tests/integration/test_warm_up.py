"""Warm-up requests inside a worker, before it is ready: what the app sees of them, and what they may not do."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from jumpstart.boot import BootSettings
from jumpstart.records import Record
from jumpstart.warmstart import WarmStartCache
from tests.integration.server import TRACEBACK, Serve, wait_until, write_app
from tests.integration.shop import boot_report

pytestmark = pytest.mark.slow

APP = """
import asyncio, os, pathlib, time
import jumpstart

def answer(method, path):
    with open(os.environ["SEEN"], "a") as file:
        file.write(f"{method} {path} {'warm-up' if jumpstart.is_warmup() else 'real'}\\n")
    if path == "/raises":
        raise ValueError("no such luck")
    return 404 if path == "/missing" else 200

def wsgi(environ, start_response):
    status = answer(environ["REQUEST_METHOD"], environ["PATH_INFO"])
    if environ["PATH_INFO"] == "/slow":
        time.sleep(3)
        answer("after", "/slow")
    elif environ["PATH_INFO"] == "/polite":
        while not jumpstart.cancelled():
            time.sleep(0.01)
    start_response(f"{status} Whatever", [("Content-Type", "text/plain")])
    return [b"ok"]

async def asgi(scope, receive, send):
    if scope["type"] != "http":
        raise RuntimeError(scope["type"])
    status = answer(scope["method"], scope["path"])
    if scope["path"] == "/slow":
        await asyncio.sleep(3)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
"""


class App:
    """An app that notes each call, and whether it believed to be warming up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "app"
        self.folder.mkdir()
        (self.folder / "noting.py").write_text(APP)
        self._seen = folder / "seen"
        self._seen.touch()
        self.env = {"SEEN": str(self._seen)}

    def seen_so_far(self) -> list[str]:
        return self._seen.read_text().splitlines()

    def seen(self) -> list[str]:
        """``METHOD PATH warm-up|real`` of each call since the last time."""
        lines = self.seen_so_far()
        self._seen.write_text("")
        return lines

    def requests(self, text: str) -> str:
        path = self.folder / "warm.toml"
        path.write_text(text)
        return str(path)

    def corpus(self, home: Path, target: str) -> dict[str, Record]:
        """The recorded requests in the host's store, by key."""
        key = BootSettings(target=target, app_dir=str(self.folder)).state_key
        state = WarmStartCache(home / "cache" / "warm-start").load(key)
        if state is None or "corpus" not in state.sections:
            return {}
        return {record.key: record for record in state.records("corpus")[0]}


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path)


both = pytest.mark.parametrize("target", ["noting:wsgi", "noting:asgi"])

SIX = """
[[request]]
path = "/a"
repeat = 2
[[request]]
path = "/b"
method = "POST"
json = { x = 1 }
[[request]]
path = "/raises"
[[request]]
path = "/missing"
expect_status = 200
[[request]]
path = "/missing"
expect_status = 404
"""


@both
def test_an_app_knows_warm_up_from_real_requests(serve: Serve, app: App, target: str) -> None:
    """Each worker runs them before it is ready; failures are named and never fatal; statistics are kept apart."""
    with serve(target, "--warmup", app.requests(SIX), app_dir=app.folder, env=app.env) as server:
        assert app.seen() == [
            *["GET /a warm-up"] * 2,
            "POST /b warm-up",
            "GET /raises warm-up",
            *["GET /missing warm-up"] * 2,
        ]
        warmup = boot_report(server)["warmup"]
        assert (warmup["sent"], warmup["ok"], warmup["skipped"]) == (6, 4, 0)
        first, second = warmup["failures"]
        assert "GET /raises" in first
        assert "ValueError: no such luck" in first
        assert "GET /missing: answered 404, expected 200" in second
        assert "warm-up 4/6 requests" in server.status()["boot"]
        # Nobody outside can make the app believe that it is warming up: it may skip billing then.
        assert server.get("/a", headers={"X-Jumpstart-Warmup": "1"}).text == "ok"
        assert app.seen() == ["GET /a real"]
        status = server.status(requests=1)
        assert status["requests"] == 1
        assert sum(stats["requests"] for stats in status["warmup_routes"].values()) == 6


@both
def test_the_budget_ends_a_warm_up(serve: Serve, app: App, target: str) -> None:
    slow = '[[request]]\npath = "/a"\n[[request]]\npath = "/slow"\n[[request]]\npath = "/b"\n'
    begun = time.monotonic()
    with serve(target, "--warmup", app.requests(slow), "--warmup-budget", "0.5", app_dir=app.folder, env=app.env) as s:
        spans = {span["name"]: span["duration_s"] for span in boot_report(s)["spans"]}
        assert 0.4 < spans["warm-up requests"] < 2.5
        warmup = boot_report(s)["warmup"]
        assert (warmup["sent"], warmup["ok"], warmup["skipped"], warmup["too_slow"]) == (2, 1, 1, ["GET /slow"])
        assert "warm-up 1/2 requests, 1 skipped" in s.status()["boot"]
        assert re.search(r"\[WARNING\] warm-up: GET /slow: (its handler did not return|no response) within ", s.stderr)
        assert s.get("/a").text == "ok"
        if target == "noting:wsgi":  # the handler goes on; what becomes of it concerns nobody
            wait_until(lambda: "after /slow warm-up" in app.seen_so_far(), why="the slow handler has returned")
        assert [line for line in app.seen() if "/b" in line] == []

        # It is waited for once: the next workers do without, and come to what it kept from being sent.
        s.process.send_signal(signal.SIGHUP)
        s.wait_for_line("gen=2 boots noting:")
        s.wait_for_line("gen=2 serves")
        assert app.seen() == ["GET /a warm-up", "GET /b warm-up"]
        assert s.stderr.count("not sent, since an earlier worker waited for it in vain: GET /slow") == 1
    assert time.monotonic() - begun < 20
    assert TRACEBACK not in s.stderr and "InvalidStateError" not in s.stderr


def test_a_handler_that_looks_at_its_deadline_ends_with_the_budget(serve: Serve, app: App) -> None:
    polite = app.requests('[[request]]\npath = "/polite"\n')
    with serve("noting:wsgi", "--warmup", polite, "--warmup-budget", "0.5", app_dir=app.folder, env=app.env) as server:
        warmup = boot_report(server)["warmup"]
        assert (warmup["sent"], warmup["ok"]) == (1, 1)
        assert 0.4 < warmup["elapsed_s"] < 1.4


@both
def test_only_real_requests_are_evidence(serve: Serve, app: App, home: Path, target: str) -> None:
    """What warm-up asks for is not recorded, adds no weight; POST is recorded by nobody and replayed by nobody."""
    with serve(target, "--warmup", app.requests(SIX), app_dir=app.folder, env=app.env) as server:
        server.get("/b", headers={"X-Jumpstart-Warmup": "1"})
    assert app.corpus(home, target) == {}
    app.seen()
    with serve(target, app_dir=app.folder, env=app.env) as server:
        for _ in range(3):
            server.get("/a")
        server.request("POST", "/a", content=b"x")
        server.get("/missing")
        server.get("/raises")
    assert {key: record.weight for key, record in app.corpus(home, target).items()} == {"GET /a": 3}
    app.seen()
    with serve(target, app_dir=app.folder, env=app.env) as server:
        assert boot_report(server)["warmup"]["sent"] == 1
        assert app.seen() == ["GET /a warm-up"]
    assert {key: record.weight for key, record in app.corpus(home, target).items()} == {"GET /a": 3}
    with serve(target, "--no-replay", app_dir=app.folder, env=app.env):
        assert app.seen() == []
    assert set(app.corpus(home, target)) == {"GET /a"}


def test_each_worker_warms_itself_up(serve: Serve, app: App) -> None:
    one = app.requests('[[request]]\npath = "/a"\n')
    with serve("noting:wsgi", "-w", "2", "--warmup", one, app_dir=app.folder, env=app.env) as server:
        server.wait_for_line(r"worker=0 .* ready")
        server.wait_for_line(r"worker=1 .* ready")
        assert app.seen() == ["GET /a warm-up"] * 2


def test_a_bad_file_of_requests_is_an_error_before_anything_starts(serve: Serve, app: App) -> None:
    bad = app.requests('[[request]]\npath = "no-slash"\n')
    with serve("noting:wsgi", "--warmup", bad, app_dir=app.folder, env=app.env, wait=False) as server:
        assert server.wait() == 2
        assert "request 1: path must be a string that starts with '/'" in server.stderr
        assert "Traceback" not in server.stderr


# Blocks its event loop, so that it hears of nothing.
BLOCKING_ASGI = """
    import os, pathlib, time

    async def app(scope, receive, send):
        assert scope["type"] == "http"
        pathlib.Path(os.environ["STARTED"]).touch()
        while not pathlib.Path(os.environ["GATE"]).exists():
            time.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})
"""


def test_a_worker_that_is_not_wanted_while_it_warms_up_is_no_error(serve: Serve, tmp_path: Path) -> None:
    started, gate = tmp_path / "started", tmp_path / "gate"
    gate.touch()
    folder = write_app(tmp_path / "app", "gated", BLOCKING_ASGI)
    (folder / "warm.toml").write_text('[[request]]\npath = "/gated"\n')
    env = {"STARTED": str(started), "GATE": str(gate)}
    with serve("gated:app", "--warmup", str(folder / "warm.toml"), app_dir=folder, env=env) as server:
        for path in (gate, started):
            path.unlink()
        server.process.send_signal(signal.SIGTTIN)
        wait_until(started.exists, why="the second worker has begun its warm-up")
        server.process.send_signal(signal.SIGTTOU)
        server.wait_for_line(r"\[INFO\] worker=1 .* is not wanted any more; it had not served yet, and is killed")
        server.wait_for_line(r"\[INFO\] worker=1 .* is gone \(SIGKILL\)")
        assert "[ERROR]" not in server.stderr and "drained" not in server.stderr
