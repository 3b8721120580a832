"""What forked workers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.server import APPS, Serve, Server, in_parallel

pytestmark = [pytest.mark.slow, pytest.mark.real_command]

WORKERS = 4


def pss_mb(pids: list[int]) -> float:
    """Proportional set size of processes together, in MiB: a page that four share counts a quarter in each."""
    kilobytes = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                kilobytes += int(line.split()[1])
    return kilobytes / 1024


def measure(server: Server, paths: list[str]) -> float:
    """Of all of its processes, the mold and the supervisor too, after some requests to every worker's port."""
    server.wait_workers(WORKERS)
    for path in paths * 3:
        for answer in in_parallel(4 * WORKERS, lambda _: server.get(path)):  # noqa: B023
            assert answer.status_code == 200
    return pss_mb(sorted(server.processes()))


def test_forked_workers_share_memory(serve: Serve, tmp_path: Path) -> None:
    """Four workers and their mold need less together than four that were spawned."""
    total = {}
    for fork in ("auto", "never"):
        options = ("-w", str(WORKERS), "--threads", "4", "--fork", fork)
        with serve("fastapi_site:app", *options, app_dir=APPS / "fastapi_app", home=tmp_path / fork) as server:
            assert server.status()["start_method"] == ("fork" if fork == "auto" else "spawn")
            total[fork] = measure(server, ["/", "/openapi.json"])
    print(
        f"FastAPI, {WORKERS} workers, PSS with supervisor: forked {total['auto']:.0f} MiB (with the mold), "
        f"spawned {total['never']:.0f} MiB"
    )
    assert total["auto"] < total["never"] * 0.85
