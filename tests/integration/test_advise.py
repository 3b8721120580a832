"""``jumpstart advise``: from a running server, and from its access log."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.integration.server import Serve, in_parallel, run_command, write_app

pytestmark = pytest.mark.slow

APP = """
import time

def app(environ, start_response):
    if environ["PATH_INFO"].startswith("/chat"):
        time.sleep(1.05)  # waits for its model
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ok"]
"""


def test_a_route_that_waits_is_told_from_one_that_works(serve: Serve, home: Path, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "mixed", APP)
    log = tmp_path / "access.log"
    options = ("--threads", "30", "--timeout", "1.2", "--access-logfile", str(log), "--access-logformat", "json")
    with serve("mixed:app", *options, app_dir=folder) as server:

        def work(number: int) -> int:
            return server.get("/chat/7" if number % 2 else "/").status_code

        assert set(in_parallel(50, work)) == {200}
        server.status(requests=50)
        done = run_command("advise", home=home)
        assert done.returncode == 0, done.stderr
    lines = {line.split(": ")[0].split()[-1]: line for line in done.stdout.splitlines() if " GET /" in line[20:]}
    assert "a tenant of its own" in lines["/chat/{}"]
    assert "a tenant of its own" not in lines["/"]
    assert "waits for others" in done.stdout
    toml = tomllib.loads(done.stdout[done.stdout.index("# GET /chat") :])
    assert toml["tenants"]["chat"]["routes"] == ["/chat"]

    done = run_command(
        "advise", "--access-log", str(log), "--timeout", "1.2", "--threads", "30", "--for", "4", home=home
    )
    assert done.returncode == 0, done.stderr
    assert "50 requests in 4 s" in done.stdout
    assert "time: 1 % take more than" in done.stdout

    done = run_command("advise", "--access-log", str(log), "--access-logformat", "combined", home=home)
    assert done.returncode == 2
    assert "how long a request took" in done.stderr
