"""Everything at once: rolls, killed workers and killed molds, while requests go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.load import Load
from tests.integration.server import APPS, Serve, Server, wait_until

pytestmark = pytest.mark.slow

RATE = 30.0  # requests a second
ROUNDS = 2
SEEN_WITHIN = 1.0  # seconds after a kill in which its connections find out


def roll(server: Server) -> None:
    before = server.status()["generation"]
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: server.status()["generation"] > before, 30, "the new generation serves")


@pytest.mark.parametrize(
    ("target", "folder"),
    [("wsgi_app:app", APPS / "wsgi_bare"), ("asgi_app:app", APPS / "asgi_bare")],
    ids=["wsgi", "asgi"],
)
def test_a_storm_of_rolls_and_kills_fails_only_what_was_in_flight_in_a_killed_worker(
    serve: Serve, target: str, folder: Path
) -> None:
    kills: list[float] = []
    with serve(target, "-w", "2", app_dir=folder) as server:
        server.wait_workers(2)
        with Load(server.port, RATE) as load:
            for _ in range(ROUNDS):
                roll(server)
                killed = server.wait_workers(2)[0]
                kills.append(time.monotonic())
                os.kill(killed, signal.SIGKILL)
                server.wait_workers(2, instead_of=[killed])
                roll(server)
                mold = server.mold_pid()
                os.kill(mold, signal.SIGKILL)
                wait_until(lambda: server.status()["mold_pid"] not in (None, mold), 20)  # noqa: B023
        not_by_a_kill = [
            at for at in load.failed_at if not any(-SEEN_WITHIN < at - kill < SEEN_WITHIN for kill in kills)
        ]
        assert not_by_a_kill == [], load.failures
        assert len(load.failed_at) <= 2 * ROUNDS, load.failures
        assert load.seen["200"] > RATE
        # Nothing is left of it: there are two workers, the mold and the supervisor.
        wait_until(
            lambda: (
                [each["state"] for each in server.status()["workers"]] == ["serving"] * 2
                and len(server.processes()) == 4
            ),
            20,
            "the processes are as many as at the start",
        )
