"""What an app, a client or the machine can do wrong, and what the server keeps to all the same."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jumpstart.boot import BootSettings
from jumpstart.warmstart import WarmStartCache
from jumpstart_server.messages import Hello, encode
from tests.integration.server import (
    APPS,
    GATED_WSGI,
    MARKER,
    TRACEBACK,
    Serve,
    Server,
    connects,
    free_port,
    in_parallel,
    is_alive,
    wait_until,
    write_app,
)
from tests.integration.shop import boot_report, warnings

pytestmark = pytest.mark.slow

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"

PROMPT = 4.0  # seconds that an end without work to finish may take on a busy machine; a second is usual

HELLO = """
def app(environ, start_response):
    start_response("200 OK", [("Content-Length", "6")])
    return [b"hello\\n"]
"""


@pytest.fixture
def app(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the module ``faulty`` and returns its folder."""
    return lambda text: write_app(tmp_path / "app", "faulty", text)


def by_shell(server: Server, script: str) -> Server:
    """Have a shell run *script* first, in which ``exec "$@"`` becomes the server."""
    server._words[:] = ["sh", "-c", script, "sh", *server._words]
    return server


def stops_promptly(server: Server) -> None:
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < PROMPT


@contextlib.contextmanager
def request_in_flight(server: Server, folder: Path) -> Iterator[None]:
    """A request to the app `GATED_WSGI` is in the app, and is answered with 200 when this is left."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "/gated")
        try:
            wait_until((folder / "started").exists, 20, "the app has come to its gate")
            yield
        finally:
            (folder / "gate").touch()
        assert (answer.result().status_code, answer.result().text) == (200, "done")


def gates(folder: Path) -> dict[str, str]:
    return {"STARTED": str(folder / "started"), "GATE": str(folder / "gate")}


# ---------------------------------------------------------------------- what processes tell each other

# Writes what the client sends to every Unix socket of its own.
RAVING = """
import os, socket

def app(environ, start_response):
    body = environ["wsgi.input"].read()
    for entry in os.listdir("/proc/self/fd") if body else ():
        try:
            copy = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with copy:
            if copy.family == socket.AF_UNIX:
                copy.send(body.replace(b"PID", str(os.getpid()).encode()))
    start_response("200 OK", [])
    return [b"ok"]
"""


@pytest.mark.parametrize(
    ("nonsense", "fork"),
    [
        (b"\0\0\0\4oops", "auto"),
        (b"\xff\xff\xff\xffoops", "never"),
        (b"GET / HTTP/1.1\r\n\r\n" * 5, "auto"),
        (encode(Hello(2**22 + 1)), "never"),
        (encode(Hello(2**22 + 1)), "auto"),
    ],
    ids=["no-message", "too-long", "other-protocol", "out-of-turn-spawned", "out-of-turn"],
)
def test_nonsense_on_a_control_channel_costs_that_worker_only(
    serve: Serve, app: Callable[[str], Path], nonsense: bytes, fork: str
) -> None:
    with serve("faulty:app", "-w", "2", "--fork", fork, app_dir=app(RAVING)) as server:
        before = server.wait_workers(2)
        with contextlib.suppress(Exception):  # it may be gone before it has answered
            server.request("POST", "/", content=nonsense)
        wait_until(lambda: not all(map(is_alive, before)), why="the worker that raved is ended")
        (sibling,) = filter(is_alive, before)
        assert [server.get("/").status_code for _ in range(10)] == [200] * 10
        (raving,) = set(before) - {sibling}
        after = server.wait_workers(2, instead_of=[raving])
        assert sibling in after
        assert server.status()["restarts"] == 1
        stops_promptly(server)


def test_a_worker_that_calls_another_process_itself_does_it_no_harm(serve: Serve, app: Callable[[str], Path]) -> None:
    with subprocess.Popen(["sleep", "100"]) as bystander, serve("faulty:app", "-w", "2", app_dir=app(RAVING)) as server:
        try:
            before = server.wait_workers(2)
            with contextlib.suppress(Exception):
                server.request("POST", "/", content=encode(Hello(bystander.pid)))
            wait_until(lambda: not all(map(is_alive, before)), why="the worker that raved is ended")
            wait_until(lambda: len(server.worker_pids()) == 2)
            assert bystander.poll() is None
            stops_promptly(server)
            assert bystander.poll() is None
        finally:
            bystander.kill()


SURROGATES = """
import json, jumpstart, re

def app(environ, start_response):
    body = environ["wsgi.input"].read()
    if environ["PATH_INFO"] == "/raises":
        raise ValueError("bad \\udcff")
    if body:
        jumpstart.cold_event("lookup", json.loads(body))
        re.search(re.escape(json.loads(body)), "x")
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]
"""


def test_lone_surrogates_from_a_client_disturb_neither_status_nor_stop(
    serve: Serve, app: Callable[[str], Path]
) -> None:
    """Such a text cannot be UTF-8; here it comes into the name of a cold event and into a pattern."""
    with serve("faulty:app", app_dir=app(SURROGATES)) as server:
        (worker,) = server.worker_pids()
        assert server.request("POST", "/", content=rb'"\ud800"').status_code == 200
        began = time.monotonic()
        names = [name for route in server.status()["routes"].values() for name in route["cold_names"]]
        assert time.monotonic() - began < 1.5  # a worker that does not answer costs the page two seconds
        assert any("ud800" in name for name in names)
        assert server.get("/").text == "ok"
        assert server.worker_pids() == [worker]
        stops_promptly(server)
    assert TRACEBACK not in server.stderr
    with serve("faulty:app", app_dir=app(SURROGATES)) as server:
        assert server.get("/").text == "ok"


def test_lone_surrogates_in_the_error_of_a_warm_up_request(
    serve: Serve, app: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "warm.toml").write_text('[[request]]\npath = "/raises"\n')
    with serve("faulty:app", "--warmup", str(tmp_path / "warm.toml"), app_dir=app(SURROGATES)) as server:
        (failure,) = boot_report(server)["warmup"]["failures"]
        assert "ValueError: bad" in failure
        assert server.get("/").text == "ok"
        stops_promptly(server)


# ---------------------------------------------------------------------- what the app starts

CHILD_OF_MULTIPROCESSING = """
import multiprocessing, time

def loop():
    while True:
        time.sleep(1)

multiprocessing.get_context("fork").Process(target=loop, daemon=True).start()
"""
FORKED_HELPER = """
import os, time

if not os.fork():
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize("child", [CHILD_OF_MULTIPROCESSING, FORKED_HELPER], ids=["multiprocessing", "fork"])
def test_an_app_with_a_child_since_its_import_is_served_and_stopped(
    serve: Serve, app: Callable[[str], Path], child: str
) -> None:
    """The child inherits neither the port nor the channels by which processes know of each other's death."""
    with serve("faulty:app", app_dir=app(child + HELLO)) as server:
        status = server.status()
        assert status["start_method"] == "spawn"
        assert re.fullmatch(r"child process \d+ is running", "; ".join(status["start_reasons"]))
        (first,) = server.worker_pids()
        os.kill(first, signal.SIGKILL)
        server.wait_workers(1, instead_of=[first])
        assert server.get("/").text == "hello\n"
        stops_promptly(server)
        assert not connects(server.port)
        assert not server.processes()


def test_a_child_of_the_app_keeps_no_port_when_all_of_ours_are_killed(serve: Serve, app: Callable[[str], Path]) -> None:
    with serve("faulty:app", app_dir=app(FORKED_HELPER + HELLO)) as server:
        children = server.processes() - {server.pid, *server.worker_pids()}
        assert children
        server.process.kill()
        server.wait()
        wait_until(lambda: not connects(server.port), why="the port is free")
        wait_until(lambda: server.processes() <= children, why="what is ours is gone")
        for pid in server.processes():  # that of nobody any more: only we can know it
            os.kill(pid, signal.SIGKILL)


LEAVING = """
import shlex, subprocess

def app(environ, start_response):
    words = environ["wsgi.input"].read().decode()
    if words:
        subprocess.Popen(shlex.split(words), start_new_session=True)
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]
"""
STUBBORN = "sh -c \"trap '' TERM; exec sleep 100\""
TREE = "sh -c \"sh -c 'sleep 100; true'; true\""
STUBBORN_TREE = "sh -c \"trap '' TERM; sleep 100; true\""


def test_what_the_app_started_is_ended_at_stop(serve: Serve, app: Callable[[str], Path]) -> None:
    with serve("faulty:app", app_dir=app(LEAVING)) as server:
        for command in ("sleep 100", STUBBORN, TREE, STUBBORN_TREE):
            before = server.processes()
            server.request("POST", "/", content=command)
            wait_until(lambda: server.processes() > before, why="the app has started it")  # noqa: B023
        stops_promptly(server)
        assert not server.processes()


def test_a_child_that_was_there_before_the_server_is_left_alone(
    serve: Serve, app: Callable[[str], Path], tmp_path: Path
) -> None:
    """As in ``backend & exec jumpstart serve …``, the usual start script of a container."""
    note = tmp_path / "backend.pid"
    script = f'env -u {MARKER} sleep 100 & echo $! > {note}; exec "$@"'
    with by_shell(serve("faulty:app", app_dir=app(LEAVING)), script) as server:
        backend = int(note.read_text())
        try:
            server.request("POST", "/", content="sleep 100")
            stops_promptly(server)
            assert not server.processes()
            assert is_alive(backend)
            assert f"pid={backend}," not in server.stderr
        finally:
            os.kill(backend, signal.SIGKILL)


# ---------------------------------------------------------------------- warm state that does not fit


def test_a_failed_boot_leaves_the_store_alone(serve: Serve, app: Callable[[str], Path]) -> None:
    """The database is down for a moment; the boot after it is warm again."""
    fails_at_times = """
        import os

        if "DOWN" in os.environ:
            raise RuntimeError("the database is down")

        def app(environ, start_response):
            import colorsys
            start_response("200 OK", [("Content-Length", "2")])
            return [b"ok"]
    """
    folder = app(fails_at_times)
    with serve("faulty:app", app_dir=folder) as server:
        server.get("/a")
    with serve("faulty:app", app_dir=folder) as server:
        used = server.status()["records_used"]
        assert used > 0
    with serve("faulty:app", app_dir=folder, env={"DOWN": "1"}, wait=False) as server:
        assert server.wait() == 3
        assert "RuntimeError: the database is down" in server.stderr
    with serve("faulty:app", app_dir=folder) as server:
        assert server.status()["records_used"] == used
        assert server.status()["refusals"] == []


def test_a_recorded_request_that_kills_later_workers_does_not_keep_them_away(
    serve: Serve, app: Callable[[str], Path], tmp_path: Path
) -> None:
    doom = tmp_path / "doom"
    killing = f"""
        import os, pathlib, jumpstart

        def app(environ, start_response):
            if environ["PATH_INFO"] == "/x" and jumpstart.is_warmup() and pathlib.Path({str(doom)!r}).exists():
                os._exit(9)
            start_response("200 OK", [("Content-Length", "2")])
            return [b"ok"]
    """
    folder = app(killing)
    with serve("faulty:app", app_dir=folder) as server:
        server.get("/x")
    with serve("faulty:app", "-w", "2", app_dir=folder) as server:
        assert boot_report(server)["warmup"]["sent"] == 1
        killed, sibling = server.wait_workers(2)
        doom.touch()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not is_alive(killed))
        assert server.get("/x").text == "ok"
        assert sibling in server.wait_workers(2, instead_of=[killed])
        assert server.status()["restarts"] <= 3
        assert "is gone (exit code 9)" in server.stderr
        assert server.get("/x").text == "ok"


def test_a_warm_up_request_that_never_returns_costs_its_budget_only(
    serve: Serve, app: Callable[[str], Path], tmp_path: Path
) -> None:
    """With one thread too, the worker that says it is ready can answer."""
    blocking = """
        import threading

        def app(environ, start_response):
            if environ["PATH_INFO"] == "/blocks":
                threading.Event().wait()
            start_response("200 OK", [("Content-Length", "2")])
            return [b"ok"]
    """
    (tmp_path / "warm.toml").write_text('[[request]]\npath = "/blocks"\n')
    options = ("--threads", "1", "--warmup", str(tmp_path / "warm.toml"), "--warmup-budget", "0.5")
    with serve("faulty:app", *options, app_dir=app(blocking)) as server:
        spans = {span["name"]: span["duration_s"] for span in boot_report(server)["spans"]}
        assert 0.4 < spans["warm-up requests"] < 2.5
        assert [server.get("/", timeout=3).text for _ in range(3)] == ["ok"] * 3
        stops_promptly(server)


def test_two_servers_on_one_store_keep_what_each_has_learnt(
    serve: Serve, app: Callable[[str], Path], home: Path
) -> None:
    """Neither saw the other's routes at its own start; the last to write drops nothing."""
    folder = app(HELLO)

    def stored() -> dict[str, int]:
        key = BootSettings(target="faulty:app", app_dir=str(folder)).state_key
        state = WarmStartCache(home / "cache" / "warm-start").load(key)
        records = state.records("corpus")[0] if state is not None and "corpus" in state.sections else []
        return {record.data["target"]: record.weight for record in records}

    with serve("faulty:app", app_dir=folder) as first, serve("faulty:app", app_dir=folder) as second:
        second.get("/b")
        wait_until(lambda: stored() == {"/b": 1}, why="the second server has written")
        first.get("/a")
        first.get("/a")
        assert first.stop() == 0
        assert stored() == {"/a": 2, "/b": 1}
        second.get("/c")
    assert stored() == {"/a": 2, "/b": 1, "/c": 1}
    with serve("faulty:app", app_dir=folder) as server:
        assert boot_report(server)["warmup"]["sent"] == 3
    assert stored() == {"/a": 2, "/b": 1, "/c": 1}


# ---------------------------------------------------------------------- what the machine does not give


def limit_descriptors(pid: int) -> tuple[int, int]:
    """Leave process *pid* no descriptor to open; return the limit that it had."""
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    return resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))  # the standard streams have all numbers below


@pytest.mark.parametrize("fork", ["auto", "never"])
def test_a_supervisor_without_descriptors_goes_on_with_the_workers_it_has(serve: Serve, fork: str) -> None:
    with serve("wsgi_app:app", "-w", "2", "--fork", fork, app_dir=WSGI) as server:
        killed, sibling = server.wait_workers(2)
        before = limit_descriptors(server.pid)
        os.kill(killed, signal.SIGKILL)
        server.wait_for_line(r"cannot start worker=0: .*Too many open files; again in")
        assert [server.get("/").status_code for _ in range(10)] == [200] * 10
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        assert sibling in server.wait_workers(2, instead_of=[killed])
        assert server.get("/").text == "hello\n"
        stops_promptly(server)
        assert TRACEBACK not in server.stderr


def test_a_supervisor_without_descriptors_can_be_stopped(serve: Serve) -> None:
    with serve("wsgi_app:app", "-w", "2", app_dir=WSGI) as server:
        server.wait_workers(2)
        server.get("/")
        limit_descriptors(server.pid)
        stops_promptly(server)
        assert TRACEBACK not in server.stderr


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(serve: Serve, app: Callable[[str], Path], closed: str) -> None:
    talking = """
        import sys

        print("at import")

        def app(environ, start_response):
            print("in a request")
            print("in a request", file=sys.stderr)
            start_response("200 OK", [("Content-Length", "2")])
            return [b"ok"]
    """
    port = free_port()
    silent = serve("faulty:app", app_dir=app(talking), address=("--port", str(port)), wait=False)
    with by_shell(silent, f'exec "$@" {closed}') as server:
        server.url = f"http://127.0.0.1:{port}"
        assert wait_until(lambda: server.get("/"), 20, "it serves").text == "ok"
        stops_promptly(server)


def test_standard_streams_that_the_app_replaced_by_its_logger(serve: Serve, app: Callable[[str], Path]) -> None:
    """Such a stream has no descriptor."""
    to_logger = """
        import logging, sys

        class ToLogger:
            def write(self, text):
                logging.getLogger("of the app").error(text.rstrip())
            def flush(self):
                pass

        sys.stdout = sys.stderr = ToLogger()
    """
    with serve("faulty:app", app_dir=app(f"{to_logger}\n{HELLO_INDENTED}")) as server:
        assert server.get("/").text == "hello\n"
        stops_promptly(server)


HELLO_INDENTED = HELLO.replace("\n", "\n        ")

# ---------------------------------------------------------------------- what the app sets for its whole process


def test_an_app_that_ignores_the_end_of_children(serve: Serve, app: Callable[[str], Path]) -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    with serve("faulty:app", "-w", "2", app_dir=app(ignoring + HELLO)) as server:
        killed, sibling = server.wait_workers(2)
        os.kill(killed, signal.SIGKILL)
        assert sibling in server.wait_workers(2, instead_of=[killed])
        assert server.get("/").text == "hello\n"
        stops_promptly(server)


@pytest.mark.parametrize("fork", ["auto", "never"])
def test_a_start_from_a_shell_that_ignores_the_end_of_children(serve: Serve, fork: str) -> None:
    ignoring = serve("wsgi_app:app", "-w", "2", "--fork", fork, app_dir=WSGI)
    with by_shell(ignoring, "trap '' CHLD; exec \"$@\"") as server:
        killed, sibling = server.wait_workers(2)
        os.kill(killed, signal.SIGKILL)
        assert sibling in server.wait_workers(2, instead_of=[killed])
        assert server.get("/").text == "hello\n"
        stops_promptly(server)


@pytest.mark.parametrize("fork", ["auto", "never"])
def test_an_app_that_configures_logging_does_not_silence_the_server(
    serve: Serve, app: Callable[[str], Path], fork: str
) -> None:
    """``disable_existing_loggers`` is what dictConfig does by default."""
    configuring = """
        import logging.config

        logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})

        def app(environ, start_response):
            raise ValueError("a bug of the app")
    """
    with serve("faulty:app", "--fork", fork, app_dir=app(configuring)) as server:
        assert server.get("/").status_code == 500
        server.wait_for_line("^ValueError: a bug of the app")
        assert TRACEBACK in server.stderr


@pytest.mark.parametrize(
    "handler",
    ["signal.SIG_DFL", "signal.default_int_handler", "lambda *_: os._exit(7)"],
    ids=["default", "keyboard-interrupt", "exit"],
)
def test_a_handler_of_the_app_for_sigint_cuts_no_request_in_flight(
    serve: Serve, app: Callable[[str], Path], tmp_path: Path, handler: str
) -> None:
    """Ctrl-C in a terminal reaches the whole process group."""
    folder = app(f"import os, signal\nsignal.signal(signal.SIGINT, {handler})\n{GATED_WSGI}")
    with serve("faulty:app", "-w", "2", app_dir=folder, env=gates(tmp_path)) as server:
        server.wait_workers(2)
        with request_in_flight(server, tmp_path):
            os.killpg(server.pid, signal.SIGINT)
            server.wait_for_line("SIGINT: draining 2 workers")
            wait_until(lambda: not connects(server.port), why="nothing new is accepted while it drains")
        assert server.wait() == 0
        assert TRACEBACK not in server.stderr
        assert "is gone" not in server.stderr


# ---------------------------------------------------------------------- signals and ends


def test_signals_without_a_meaning_are_ignored_and_named(
    serve: Serve, app: Callable[[str], Path], tmp_path: Path
) -> None:
    with serve("faulty:app", "-w", "2", app_dir=app(GATED_WSGI), env=gates(tmp_path)) as server:
        workers = server.wait_workers(2)
        with request_in_flight(server, tmp_path):
            for number in (signal.SIGWINCH, signal.SIGUSR2):
                server.process.send_signal(number)
                server.wait_for_line(rf"\[INFO\] {number.name} does nothing here$")
        assert server.worker_pids() == workers
        assert warnings(server) == []
        stops_promptly(server)


def answers_until_it_ends(server: Server, enough: threading.Event) -> Counter[str]:
    """What a client sees who connects anew for each request until it is refused; sets *enough* after some."""
    seen: Counter[str] = Counter()
    while not seen["ConnectionRefusedError"]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        try:
            connection.request("GET", "/")
            seen[str(connection.getresponse().status)] += 1
        except (OSError, http.client.HTTPException) as error:
            seen[type(error).__name__] += 1
        finally:
            connection.close()
        if seen["200"] >= 20:
            enough.set()
    return seen


@pytest.mark.parametrize(("target", "folder"), [("wsgi_app:app", WSGI), ("asgi_app:app", ASGI)], ids=["wsgi", "asgi"])
def test_a_stop_resets_no_connection(serve: Serve, target: str, folder: Path) -> None:
    """Each connection that the kernel took is answered, however fast they come."""
    enough = threading.Event()
    with serve(target, "-w", "2", app_dir=folder) as server:
        server.wait_workers(2)

        def work(number: int) -> Counter[str]:
            if number:
                return answers_until_it_ends(server, enough)
            assert enough.wait(10)
            stops_promptly(server)
            return Counter()

        seen = sum(in_parallel(13, work), Counter())
        assert set(seen) == {"200", "ConnectionRefusedError"}, seen


def test_a_mold_that_is_stuck_is_replaced(serve: Serve) -> None:
    """Takes as long as the supervisor's patience with a fork: ten seconds."""
    with serve("wsgi_app:app", "-w", "2", app_dir=WSGI) as server:
        workers, mold = server.wait_workers(2), server.mold_pid()
        os.kill(mold, signal.SIGSTOP)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        server.wait_for_line(rf"mold pid={mold} does not fork within \d+ s and is replaced", 20)
        server.wait_workers(2, instead_of=workers)
        assert server.mold_pid() != mold
        assert server.get("/").text == "hello\n"
        stops_promptly(server)
