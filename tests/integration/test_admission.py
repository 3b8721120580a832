"""Two real workers and more requests than threads: who takes a connection, what is told, and what an app can break."""

from __future__ import annotations

import contextlib
import select
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server import Serve, Server, wait_until, write_app

pytestmark = pytest.mark.slow

APP = """
    import os, pathlib, time

    def app(environ, start_response):
        path = environ["PATH_INFO"]
        if path == "/held":
            while not pathlib.Path(os.environ["GATE"]).exists():
                time.sleep(0.01)
        elif path == "/close-all":
            os.closerange(3, 4096)
        body = str(os.getpid()).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]
"""
GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"


def ask(server: Server, path: bytes, stack: contextlib.ExitStack) -> socket.socket:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
    sock.sendall(GET % path)
    return sock


def test_18_31_35_108_requests_go_where_threads_are_and_the_others_are_told(serve: Serve, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    folder = write_app(tmp_path / "app", "app", APP)
    options = ("-w", "2", "--threads", "6", "--queue", "4", "--queue-timeout", "60")
    with serve("app:app", *options, app_dir=folder, env={"GATE": str(gate)}) as server, contextlib.ExitStack() as stack:
        pids = server.wait_workers(2)

        def workers() -> list[dict[str, Any]]:
            return list(server.status()["workers"])

        def busy() -> list[int]:
            return sorted(int(worker["busy"]) for worker in workers())

        # Connections of one at a time go to whoever waits for them; one of the two is full sooner than the other.
        held = []
        while max(busy()) < 6:
            held.append(ask(server, b"/held", stack))
            wait_until(lambda: sum(busy()) == len(held))
        # What comes at the very moment at which a worker becomes full may still be taken by it, and waits.
        probe = ask(server, b"/", stack)

        def late() -> int:
            return sum(int(worker["waiting"]) for worker in workers())

        wait_until(lambda: select.select([probe], [], [], 0)[0] or late())
        waiting = [probe] if late() else []
        answered = {server.get("/").text for _ in range(20)}
        assert len(answered) == 1  # none went to the full one, where it would have waited
        assert late() == len(waiting)
        assert server.admin("/readyz").status_code == 200
        while sum(busy()) < 12:
            before = sum(busy())
            held.append(ask(server, b"/held", stack))
            wait_until(lambda before=before: sum(busy()) == before + 1)  # type: ignore[misc]

        def counts() -> tuple[int, int]:
            """That wait and that were refused."""
            now = workers()
            return sum(each["waiting"] for each in now), sum(each["refused"].get("queue_full", 0) for each in now)

        # One at a time: who of the two takes it is a matter of luck, and who has no room refuses it. So both queues
        # fill up, and then nothing is taken any more.
        while counts()[0] < 8:
            assert len(waiting) < 200
            waiting.append(ask(server, b"/", stack))
            wait_until(lambda: sum(counts()) == len(waiting))
        assert [worker["waiting"] for worker in workers()] == [4, 4]
        shed = counts()[1]
        waiting += [ask(server, b"/", stack) for _ in range(12)]
        wait_until(lambda: counts() == (8, shed + 12))
        waits, refused = counts()
        line = f'jumpstart_requests_refused_total{{tenant="web",reason="queue_full"}} {refused}'
        assert line in server.admin("/metrics").text
        # 18: the workers say that they are full, when it has lasted; they live all the same.
        wait_until(lambda: server.admin("/readyz").status_code == 503, 15)
        assert "no thread is free" in server.admin("/readyz").text
        assert server.admin("/livez").status_code == 200
        gate.touch()
        statuses = sorted(sock.recv(65536).split()[1] for sock in waiting)
        assert statuses == [b"200"] * waits + [b"503"] * refused
        assert {sock.recv(65536).split()[1] for sock in held} == {b"200"}
        wait_until(lambda: busy() == [0, 0])
        wait_until(lambda: server.admin("/readyz").status_code == 200)
        assert f'jumpstart_queue_wait_seconds_count{{tenant="web"}} {waits}' in server.admin("/metrics").text

        # An app that closes all descriptors costs its worker, which is replaced, and a line or two. It is a matter of
        # luck whether a thread of the pool finds out or the event loop, which aborts the process.
        lines = server.stderr.count("\n")
        with contextlib.suppress(OSError):
            ask(server, b"/close-all", stack).recv(65536)
        wait_until(lambda: len(set(server.worker_pids()) - set(pids)) == 1 and len(server.worker_pids()) == 2, 30)
        server.wait_workers(2)
        assert server.get("/").status_code == 200
        assert server.stderr.count("\n") - lines <= 5
        assert server.stderr.count("internal error") == 0
