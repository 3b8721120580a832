"""One worker is replaced, the new one ready first: after so many requests, or because there are more or fewer."""

from __future__ import annotations

import http.client
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.integration.load import Load
from tests.integration.server import APPS, GATED_WSGI, Serve, in_parallel, wait_until, write_app

pytestmark = pytest.mark.slow

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"
BOTH = pytest.mark.parametrize(
    ("target", "folder"), [("wsgi_app:app", WSGI), ("asgi_app:app", ASGI)], ids=["wsgi", "asgi"]
)
RENEWED = r"worker=0 gen=1 pid=(\d+) is renewed: \d+ requests \(--max-requests 10\)"


@BOTH
def test_76_replacing_a_worker_after_so_many_requests_resets_and_refuses_nothing(
    serve: Serve, target: str, folder: Path
) -> None:
    with serve(target, "--max-requests", "10", app_dir=folder) as server:

        def ask(count: int) -> Counter[str]:
            """On one connection for as long as it is kept."""
            seen: Counter[str] = Counter()
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            for _ in range(count):
                try:
                    connection.request("GET", "/")
                    answer = connection.getresponse()
                    answer.read()
                    seen[str(answer.status)] += 1
                except (OSError, http.client.HTTPException) as error:
                    seen[repr(error)] += 1
                    connection.close()
            connection.close()
            return seen

        assert ask(200) == {"200": 200}
        server.wait_for_line(RENEWED)
        assert sum(in_parallel(20, lambda _: ask(20)), Counter()) == {"200": 400}
        wait_until(lambda: len(set(re.findall(RENEWED, server.stderr))) >= 2, why="it is replaced again and again")
        wait_until(lambda: [worker["state"] for worker in server.status()["workers"]] == ["serving"])
        assert server.status()["restarts"] == 0, "nothing died"
        assert "is gone" not in server.stderr


def test_78_a_request_that_takes_long_outlives_two_replacements(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "gated", GATED_WSGI)
    env = {"STARTED": str(tmp_path / "started"), "GATE": str(tmp_path / "gate")}
    options = ("--max-requests", "10", "--threads", "4")
    with serve("gated:app", *options, app_dir=folder, env=env) as server:
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(server.get("/gated", timeout=40).text))
        thread.start()
        wait_until((tmp_path / "started").exists)
        with Load(server.port, 60) as load:
            wait_until(lambda: len(re.findall(r" gen=1 pid=\d+ ready$", server.stderr, re.M)) >= 3, 30)
        assert load.failures == {}
        assert not answers
        (tmp_path / "gate").touch()
        thread.join(20)
        assert answers == ["done"]


def test_78_pings_of_the_admin_address_do_not_count(serve: Serve) -> None:
    with serve("asgi_app:app", "--max-requests", "10", app_dir=ASGI) as server:
        (before,) = server.wait_workers(1)
        for _ in range(30):
            assert server.admin("/readyz").status_code == 200
        assert server.get("/").text == "hello\n"
        assert server.status(1)["requests"] == 1
        assert server.worker_pids() == [before]


SOCKETS = """
    async def app(scope, receive, send):
        if scope["type"] != "websocket":
            raise NotImplementedError
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hello"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
"""


def test_78_websockets_count_once_each(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "sockets", SOCKETS)
    with serve("sockets:app", "--max-requests", "4", app_dir=folder) as server:
        url = f"ws://127.0.0.1:{server.port}/"
        (before,) = server.wait_workers(1)
        for _ in range(3):
            with connect(url) as peer:
                assert peer.recv() == "hello"
        assert "is renewed" not in server.stderr
        with connect(url) as peer:
            assert peer.recv() == "hello"
            server.wait_for_line(rf"pid={before} is renewed: 4 requests \(--max-requests 4\)")
        server.wait_workers(1, instead_of=[before])


def test_a_signal_for_one_worker_more_and_one_less(serve: Serve) -> None:
    with serve("asgi_app:app", app_dir=ASGI) as server:
        (first,) = server.wait_workers(1)
        with Load(server.port, 40) as load:
            for number in (2, 3):
                server.process.send_signal(signal.SIGTTIN)
                assert server.wait_workers(number)[0] == first
            for number in (2, 1):
                server.process.send_signal(signal.SIGTTOU)
                assert server.wait_workers(number)[0] == first
            server.process.send_signal(signal.SIGTTOU)
            server.wait_for_line("1 worker already; it stays so")
        assert load.failures == {}
        assert server.worker_pids() == [first]
        # The number holds also for what dies.
        os.kill(first, signal.SIGKILL)
        server.wait_workers(1, instead_of=[first])
