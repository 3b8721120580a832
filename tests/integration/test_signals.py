"""How a server ends: it drains, at any moment of its life, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.server import (
    APPS,
    COMMAND,
    GATED_WSGI,
    TRACEBACK,
    Serve,
    Server,
    clean_environment,
    connects,
    wait_until,
    write_app,
)

pytestmark = [pytest.mark.slow, pytest.mark.real_command]

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"
BOTH = pytest.mark.parametrize(
    ("target", "folder"), [("wsgi_app:app", WSGI), ("asgi_app:app", ASGI)], ids=["wsgi", "asgi"]
)
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])

PROMPT = 4.0  # seconds that an end without work to finish may take on a busy machine; a second is usual

# As `GATED_WSGI`.
GATED_ASGI = """
    import asyncio, os, pathlib

    async def app(scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError
        if scope["path"] == "/gated":
            pathlib.Path(os.environ["STARTED"]).touch()
            while not pathlib.Path(os.environ["GATE"]).exists():
                await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})
"""
GATED = pytest.mark.parametrize("source", [GATED_WSGI, GATED_ASGI], ids=["wsgi", "asgi"])


class Gate:
    """Two files by which a test and its app wait for each other."""

    def __init__(self, folder: Path) -> None:
        self.started, self.gate = folder / "started", folder / "gate"
        self.env = {"STARTED": str(self.started), "GATE": str(self.gate)}

    def wait_started(self, server: Server) -> None:
        wait_until(self.started.exists, 20, f"the app has come to its gate\n{server.stderr}")

    def open(self) -> None:
        self.gate.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def to_supervisor(server: Server, number: signal.Signals) -> None:
    os.kill(server.pid, number)


def to_group(server: Server, number: signal.Signals) -> None:
    os.killpg(server.pid, number)


def ends_promptly(server: Server) -> int:
    began = time.monotonic()
    code = server.wait()
    assert time.monotonic() - began < PROMPT
    return code


# ---------------------------------------------------------------------- while it serves


@pytest.mark.parametrize(
    ("source", "number", "send", "fork"),
    [
        (GATED_WSGI, signal.SIGTERM, to_supervisor, "auto"),
        (GATED_ASGI, signal.SIGTERM, to_supervisor, "auto"),
        (GATED_WSGI, signal.SIGINT, to_group, "auto"),
        (GATED_ASGI, signal.SIGINT, to_supervisor, "auto"),
        (GATED_ASGI, signal.SIGINT, to_group, "never"),
    ],
    ids=["wsgi-SIGTERM", "asgi-SIGTERM", "wsgi-ctrl-c", "asgi-SIGINT", "asgi-spawned-ctrl-c"],
)
def test_a_request_in_flight_is_answered(
    serve: Serve,
    tmp_path: Path,
    gate: Gate,
    source: str,
    number: signal.Signals,
    send: Callable[[Server, signal.Signals], None],
    fork: str,
) -> None:
    """Ctrl-C in a terminal reaches every process of the group; only the supervisor acts on it."""
    folder = write_app(tmp_path / "app", "gated", source)
    options = ("-w", "2", "--fork", fork)
    with serve("gated:app", *options, app_dir=folder, env=gate.env) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "/gated")
        gate.wait_started(server)
        send(server, number)
        server.wait_for_line(rf"{number.name}: draining 2 workers")
        wait_until(lambda: not connects(server.port), why="nothing new is accepted while it drains")
        assert server.process.poll() is None
        gate.open()
        assert (answer.result().status_code, answer.result().text) == (200, "done")
        assert ends_promptly(server) == 0
        assert TRACEBACK not in server.stderr


@BOTH
def test_a_stream_in_flight_is_sent_to_its_end(serve: Serve, target: str, folder: Path) -> None:
    with serve(target, app_dir=folder) as server, server.client() as client:
        with client.stream("GET", "/stream/6?delay=0.1") as answer:
            chunks = answer.iter_raw()
            text = next(chunks)
            server.process.terminate()
            text += b"".join(chunks)
        assert text == b"".join(b"chunk %d\n" % number for number in range(6))
        assert ends_promptly(server) == 0


@BOTH
def test_idle_connections_are_closed(serve: Serve, target: str, folder: Path) -> None:
    with serve(target, app_dir=folder) as server, contextlib.ExitStack() as stack:
        connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=PROMPT) for _ in range(3)]
        for connection in connections:
            stack.enter_context(contextlib.closing(connection))
            connection.connect()
        for connection in connections[1:]:  # the first never says a word
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"hello\n"
        server.process.terminate()
        for connection in connections[1:]:
            assert connection.sock.recv(100) == b""
        assert ends_promptly(server) == 0


@GATED
def test_a_second_signal_ends_it_at_once(serve: Serve, tmp_path: Path, gate: Gate, source: str) -> None:
    folder = write_app(tmp_path / "app", "gated", source)
    with serve("gated:app", app_dir=folder, env=gate.env) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "/gated")
        gate.wait_started(server)
        server.process.send_signal(signal.SIGINT)
        server.wait_for_line("SIGINT: draining 1 worker")
        server.process.send_signal(signal.SIGINT)
        assert ends_promptly(server) == 130
        assert "second SIGINT: stopping at once" in server.stderr
        assert answer.exception() is not None


@GATED
def test_a_second_sigterm_or_a_first_ctrl_c_behind_it_cuts_nothing(
    serve: Serve, tmp_path: Path, gate: Gate, source: str
) -> None:
    """timeout(1) sends it to the process and to its group; others turn Ctrl-C, which we get too, into SIGTERM."""
    folder = write_app(tmp_path / "app", "gated", source)
    with serve("gated:app", app_dir=folder, env=gate.env) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "/gated")
        gate.wait_started(server)
        os.kill(server.status()["mold_pid"], signal.SIGTERM)  # of a group it may be the first to end
        server.process.terminate()
        server.wait_for_line("SIGTERM: draining 1 worker")
        server.process.terminate()
        server.process.send_signal(signal.SIGINT)
        gate.open()
        assert answer.result().status_code == 200
        assert ends_promptly(server) == 0
        assert "is gone" not in server.stderr, "that is no news when everything ends"


@GATED
def test_a_request_that_does_not_end_is_given_up(serve: Serve, tmp_path: Path, gate: Gate, source: str) -> None:
    folder = write_app(tmp_path / "app", "gated", source)
    options = ("--graceful-timeout", "1")
    with serve("gated:app", *options, app_dir=folder, env=gate.env) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "/gated")
        gate.wait_started(server)
        began = time.monotonic()
        assert server.stop() == 0
        assert 0.9 < time.monotonic() - began < 1 + PROMPT
        # A broken connection, or a 500 where the coroutine could still be cancelled; never a 200.
        assert answer.exception() is not None or answer.result().status_code >= 500


@SIGNALS
def test_a_worker_alone_drains_on_sigterm_and_leaves_sigint_to_the_supervisor(
    serve: Serve, number: signal.Signals
) -> None:
    with serve("asgi_app:app", app_dir=ASGI) as server, server.client() as client:
        (worker,) = server.worker_pids()
        with client.stream("GET", "/stream/6?delay=0.1") as answer:
            chunks = answer.iter_raw()
            next(chunks)
            os.kill(worker, number)
            assert len(list(chunks)) >= 5
        if number is signal.SIGTERM:
            wait_until(lambda: server.worker_pids() not in ([], [worker]), why="another has taken its place")
        assert server.get("/").text == "hello\n"
        assert (server.worker_pids() == [worker]) is (number is signal.SIGINT)


# ---------------------------------------------------------------------- while it boots

AT_IMPORT = """
    import os, pathlib, time
    pathlib.Path(os.environ["STARTED"]).touch()
    time.sleep(60)
"""
COMPUTING_AT_IMPORT = """
    import os, pathlib
    pathlib.Path(os.environ["STARTED"]).touch()
    sum(1 for _ in iter(int, 1))
"""
AT_LIFESPAN = """
    import asyncio, os, pathlib

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            pathlib.Path(os.environ["STARTED"]).touch()
            await asyncio.sleep(60)
"""
BLOCKING_AT_LIFESPAN = AT_LIFESPAN.replace("await asyncio.sleep(60)", "__import__('time').sleep(60)")
STAGES = {
    "import": (AT_IMPORT, ()),
    "computing": (COMPUTING_AT_IMPORT, ()),
    "spawned": (AT_IMPORT, ("--fork", "never")),
    "lifespan": (AT_LIFESPAN, ()),
    "blocking-lifespan": (BLOCKING_AT_LIFESPAN, ("--graceful-timeout", "1")),
    "warm-up-wsgi": (GATED_WSGI, ("--warmup", "warm.toml", "--graceful-timeout", "1")),
    "warm-up-asgi": (GATED_ASGI, ("--warmup", "warm.toml", "--graceful-timeout", "1")),
}


@pytest.mark.parametrize(
    ("stage", "number", "send"),
    [
        *((stage, signal.SIGTERM, to_supervisor) for stage in STAGES),
        *((stage, signal.SIGINT, to_group) for stage in ("import", "spawned", "lifespan", "warm-up-asgi")),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_a_signal_while_it_boots(
    serve: Serve,
    tmp_path: Path,
    gate: Gate,
    stage: str,
    number: signal.Signals,
    send: Callable[[Server, signal.Signals], None],
) -> None:
    source, options = STAGES[stage]
    (tmp_path / "warm.toml").write_text('[[request]]\npath = "/gated"\n')
    options = tuple(str(tmp_path / word) if word == "warm.toml" else word for word in options)
    folder = write_app(tmp_path / "app", "booting", source)
    with serve("booting:app", "-w", "2", *options, app_dir=folder, env=gate.env, wait=False) as server:
        gate.wait_started(server)
        assert server.stderr.count("boots booting:app") == 1, "it is said at once what boots"
        send(server, number)
        assert ends_promptly(server) == (130 if number is signal.SIGINT else 0)
        assert f"{number.name}: stopped before it was ready" in server.stderr
        assert TRACEBACK not in server.stderr
        assert "Listening" not in server.stderr


@SIGNALS
def test_a_signal_before_anything_is_set_up_leaves_nothing(
    serve: Serve, tmp_path: Path, number: signal.Signals
) -> None:
    """At first the interpreter's own handling of signals applies; what was started ahead goes too."""
    folder = write_app(tmp_path / "app", "booting", AT_IMPORT)
    for moment in range(6):
        with serve("booting:app", app_dir=folder, env={"STARTED": str(tmp_path / "started")}, wait=False) as server:
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began >= moment * 0.05)  # noqa: B023
            to_group(server, number)
            code = ends_promptly(server)
            # CPython itself exits with 1 when it is interrupted while it imports site.
            assert code in (0, 130, -number) or (code == 1 and "Failed to import the site module" in server.stderr)
            if number is signal.SIGTERM:
                assert TRACEBACK not in server.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_command_that_is_told_to_end_cleans_up(tmp_path: Path, home: Path, number: signal.Signals) -> None:
    """Not only at Ctrl-C: what stops a job is SIGTERM, and a lost terminal sends SIGHUP."""
    app_dir = write_app(
        tmp_path / "app", "slow_app", "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(60)"
    )
    for folder in (home, tmp_path / "tmp"):
        folder.mkdir()
    command = [str(COMMAND), "build", "slow_app:app", "--app-dir", str(app_dir), "-o", str(tmp_path / "x.jumpstart")]
    environment = clean_environment(home, TMPDIR=str(tmp_path / "tmp"))
    plain = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL)}  # the tests may run under nohup
    with subprocess.Popen(  # type: ignore[call-overload]
        command, cwd=tmp_path / "tmp", env=environment, stderr=subprocess.PIPE, text=True, **plain
    ) as build:
        try:
            wait_until(lambda: list(tmp_path.rglob("began")) or build.poll() is not None)
            build.send_signal(number)
            _, text = build.communicate(timeout=30)
        finally:
            build.kill()
    assert build.returncode == 128 + number and TRACEBACK not in text, text
    assert not (tmp_path / "x.jumpstart").exists()
    assert [each for each in (tmp_path / "tmp").iterdir() if each.name != "began"] == []
