"""A flood of one tenant is that tenant's own trouble."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles

import httpx
import pytest

from tests.integration.server import Serve, free_port, wait_until, working_folder, write_app

pytestmark = pytest.mark.slow

THREADS = 10
FLOOD = 10 * THREADS

APPS = """
    import time

    def make(seconds):
        def app(environ, start_response):
            time.sleep(seconds)
            start_response("200 OK", [("Content-Length", "2")])
            return [b"ok"]
        return app

    slow, quick = make(1.5), make(0.05)
"""


def ask(port: int) -> tuple[int, float, str]:
    """Status, seconds, and when to come again."""
    began = time.monotonic()
    answer = httpx.get(f"http://127.0.0.1:{port}/", trust_env=False, verify=False, timeout=30)
    return answer.status_code, time.monotonic() - began, answer.headers.get("Retry-After", "")


def test_110_a_flood_of_one_tenant_leaves_the_other_as_it_was(serve: Serve, tmp_path: Path, home: Path) -> None:
    """How much slower the other one becomes is measured in the benchmarks; here it must not wait for the flood."""
    folder = write_app(tmp_path / "app", "two", APPS)
    current = working_folder(home)
    noisy, quiet = free_port(), free_port()
    (current / "jumpstart.toml").write_text(
        f'[tenants.noisy]\ntarget = "two:slow"\nport = {noisy}\nthreads = {THREADS}\nqueue = {THREADS}\n'
        f'[tenants.quiet]\ntarget = "two:quick"\nport = {quiet}\nthreads = {THREADS}\n'
    )
    with serve("", app_dir=folder, address=()) as server, ThreadPoolExecutor(FLOOD) as pool:
        wait_until(lambda: server.admin("/readyz").status_code == 200, 20)
        start = threading.Barrier(FLOOD)

        def join_in() -> tuple[int, float, str]:
            start.wait(20)
            return ask(noisy)

        flood = [pool.submit(join_in) for _ in range(FLOOD)]
        wait_until(lambda: server.status(tenant="noisy")["workers"][0]["busy"] == THREADS, 20)
        answers = [ask(quiet) for _ in range(20)]
        assert [status for status, _, _ in answers] == [200] * 20
        assert quantiles((seconds for _, seconds, _ in answers), n=100)[98] < 1  # a request to the other one takes 1.5
        results = [each.result() for each in flood]
        statuses = Counter(status for status, _, _ in results)
        assert statuses[200] >= THREADS and statuses[200] + statuses[503] == FLOOD and statuses[503] >= FLOOD / 2
        assert all(retry_after.isdigit() for status, _, retry_after in results if status == 503)
        after = server.status(tenant="noisy")["workers"][0]
        assert (after["busy"], after["waiting"]) == (0, 0)
        assert ask(noisy)[0] == 200
