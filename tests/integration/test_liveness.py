"""Who hangs is replaced, the new one ready first; who computes is left alone."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path

import httpx
import pytest

from tests.integration.server import Serve, wait_until, write_app

pytestmark = pytest.mark.slow

LIMIT = ("--worker-healthcheck-timeout", "2")

HANGS = """
import time

async def app(scope, receive, send):
    if scope["path"] == "/hang":
        time.sleep(600)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
"""

COMPUTES = """
import time

def hold_the_gil(seconds):
    give_up = time.monotonic() + seconds
    sum(range(200_000_000))  # one call in C, some seconds long
    while time.monotonic() < give_up:
        sum(range(20_000_000))

hold_the_gil(4)  # at its boot

def app(environ, start_response):
    if environ["PATH_INFO"] == "/compute":
        hold_the_gil(8)
    start_response("200 OK", [("Content-Length", "4")])
    return [b"done"]
"""


def test_a_worker_whose_event_loop_is_blocked_is_replaced_and_its_stacks_are_in_the_log(
    serve: Serve, tmp_path: Path
) -> None:
    folder = write_app(tmp_path / "app", "hangs", HANGS)
    with serve("hangs:app", *LIMIT, app_dir=folder) as server:
        (hung,) = server.worker_pids()

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                server.get("/hang", timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: len(pids := server.worker_pids()) == 1 and hung not in pids, 60, "it is replaced")
        (fresh,) = server.worker_pids()
        assert fresh != hung
        assert server.get("/").text == "ok"
        found = server.wait_for_line(
            rf"worker=0 gen=1 pid={hung} gives no sign of life for (\d+) s .*hangs, and is replaced"
        )
        assert 2 <= int(found[1]) < 60
        assert re.search(r'File ".*hangs.py", line \d+ in app', server.stderr)
        asking.join(30)
        assert not asking.is_alive(), "the client of a worker that is killed hears of it"
        log = server.stderr
        assert log.index(f"pid={fresh} ready") < log.index(f"pid={hung} is not gone"), "the new one was ready first"
        wait_until(lambda: len(server.status()["workers"]) == 1, why="the hung worker has ended")


def test_83_a_worker_that_holds_the_gil_is_not_replaced_at_its_boot_nor_in_a_request(
    serve: Serve, tmp_path: Path
) -> None:
    """For four times the limit; in the log are its stacks, once."""
    folder = write_app(tmp_path / "app", "computes", COMPUTES)
    with serve("computes:app", *LIMIT, app_dir=folder) as server:
        (pid,) = server.worker_pids()
        assert server.get("/compute", timeout=120).text == "done"
        assert server.worker_pids() == [pid]
        (said,) = re.findall("gives no sign of life.*", server.stderr)
        assert "left alone" in said
        assert re.search(r'File ".*computes.py", line \d+ in hold_the_gil', server.stderr)
