"""A worker's memory limit, and threads that are sized by it, in real processes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from jumpstart_server.envelope.memory import rss_of
from tests.integration.server import Serve, Server, wait_until, write_app

pytestmark = pytest.mark.slow

MIB = 1 << 20

LEAKS = """
kept = []

async def app(scope, receive, send):
    if scope["type"] != "http":
        raise RuntimeError("http only")
    if scope["path"] == "/leak":
        kept.append(b"x" * (20 << 20))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
"""

LEAKS_WSGI = """
kept = []

def app(environ, start_response):
    if environ["PATH_INFO"] == "/leak":
        kept.append(b"x" * (20 << 20))
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]
"""


def renewals(server: Server) -> int:
    return len(re.findall("is renewed: memory: it takes .* above its limit of 200 MiB", server.stderr))


@pytest.mark.parametrize("text", [LEAKS, LEAKS_WSGI], ids=["asgi", "wsgi"])
def test_98_a_worker_that_leaks_is_replaced_again_and_again_and_no_request_fails(
    serve: Serve, tmp_path: Path, text: str
) -> None:
    """20 MB with each request, four a second: 200 MiB last for some two seconds."""
    folder = write_app(tmp_path / "app", "leaky", text)
    options = ("--memory-limit", "200MiB", "--threads", "auto", "--max-threads", "500")
    with serve("leaky:app", *options, app_dir=folder) as server:
        found = re.search(r"threads = (\d+) = min\(max_threads 500, \(200 MiB − \d.*\) / 1 MiB", server.stderr)
        assert found is not None and 1 <= int(found[1]) < 200
        assert server.admin("/readyz").status_code == 200  # which asks the workers for their counts
        assert re.search(
            rf"^jumpstart_pool_threads_limit\b.* {found[1]}\b", server.admin("/metrics").text, re.MULTILINE
        )
        most = 0
        give_up = time.monotonic() + 60
        while renewals(server) < 2 or "has drained" not in server.stderr:
            assert time.monotonic() < give_up
            answer = server.get("/leak")
            assert (answer.status_code, answer.text) == (200, "ok")
            workers = [worker["pid"] for worker in server.status()["workers"] if worker["pid"]]
            most = max([most, *(rss_of(pid) or 0 for pid in workers)])
            time.sleep(0.25)
        assert most < 500 * MIB
        assert server.get("/").status_code == 200
        wait_until(lambda: len(server.status()["workers"]) == 1, why="the old worker has ended")


def test_what_is_far_above_its_limit_takes_nothing_more_and_tells_when_to_come_back(
    serve: Serve, tmp_path: Path
) -> None:
    """Here no replacement can come up, and memory stays bounded all the same."""
    text = """
    import pathlib
    if pathlib.Path("second").exists():
        raise RuntimeError("no second one")
    kept = []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            if pathlib.Path("second").exists():
                await send({"type": "lifespan.startup.failed", "message": "no second one"})
                return
            pathlib.Path("second").touch()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        kept.append(b"x" * (100 << 20))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
    """
    folder = write_app(tmp_path / "app", "fatal", text)
    with serve("fatal:app", "--memory-limit", "200MiB", app_dir=folder) as server:
        (pid,) = server.worker_pids()
        for _ in range(5):
            assert server.get("/").status_code == 200
        wait_until(lambda: server.get("/").status_code == 503, why="it sheds")
        refused = server.get("/")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "short of memory" in refused.text
        assert server.worker_pids() == [pid]
        assert server.status()["requests"] < 20
