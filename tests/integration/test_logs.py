"""Logs of real servers: whole lines from many workers, files that are moved away. Numbers are those of the cases."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from tests.integration.server import (
    APPS,
    GATED_WSGI,
    Serve,
    Server,
    in_parallel,
    run_command,
    wait_until,
    write_app,
)

pytestmark = pytest.mark.slow

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"
COMBINED = re.compile(r'127\.0\.0\.1 - - \[[^]]+\] "GET /pid\?[0-9]+-[0-9]+ HTTP/1\.1" 200 \d+ "-" "(x+)"')
PROMPT = 4.0  # seconds that workers may take to reopen on a busy machine; they are to do it within one
RESET = struct.pack("ii", 1, 0)

# Waits until its client has left.
PATIENT = """
    import os, pathlib

    async def app(scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError
        pathlib.Path(os.environ["STARTED"]).touch()
        while (await receive())["type"] != "http.disconnect":
            pass
"""
TALKATIVE = """
    import sys

    print("printed while it is imported", flush=True)

    def app(environ, start_response):
        print("printed by a request", file=sys.stderr, flush=True)
        start_response("200 OK", [("Content-Length", "2")])
        return [b"ok"]
"""
OWN_FORMATTER = """
    import logging

    class Shouting(logging.Formatter):
        def format(self, record):
            return "SHOUT " + record.getMessage()
"""


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def reopen(server: Server) -> None:
    server.process.send_signal(signal.SIGUSR1)


def ask_every_worker(server: Server, pids: list[int], mark: str) -> None:
    """Send requests until each worker has answered one."""
    seen: set[int] = set()

    def answered() -> bool:
        seen.add(int(server.get(f"/pid?{mark}").text))
        return seen >= set(pids)

    wait_until(answered, 20, f"{pids} answer")


@pytest.mark.parametrize(("fork", "workers"), [("auto", 4), ("never", 2)])
def test_168_every_line_is_whole_and_all_workers_go_on_in_the_new_file(
    serve: Serve, tmp_path: Path, fork: str, workers: int
) -> None:
    """Of several workers, with lines longer than a buffer that somebody might have, while the file is moved away."""
    access, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    error, moved_error = tmp_path / "error.log", tmp_path / "error.log.1"
    options = ("-w", str(workers), "--fork", fork, "--access-logfile", str(access), "--error-logfile", str(error))
    server = serve("asgi_app:app", *options, app_dir=ASGI, wait=False)
    with server:
        wait_until(lambda: "Listening at" in "".join(lines_of(error)), 30, "it is ready")
        found = re.search(r"Listening at: (\S+)", error.read_text())
        assert found is not None
        server.url = found[1]
        pids = server.wait_workers(workers)

        def work(number: int) -> None:
            with server.client() as client:
                for count in range(60):
                    fields = {"User-Agent": "x" * (5000 + count)}
                    assert client.get(f"/pid?{number}-{count}", headers=fields).status_code == 200
                    if number == 0 and count == 30:
                        access.rename(moved)
                        error.rename(moved_error)
                        reopen(server)

        in_parallel(6, work)
        wait_until(lambda: len(lines_of(moved) + lines_of(access)) == 6 * 60, 30, "the last lines are written")
        lines = [*lines_of(moved), *lines_of(access)]
        matches = [COMBINED.fullmatch(line) for line in lines]
        assert all(matches), [line for line, match in zip(lines, matches) if not match][:3]
        counts = collections.Counter(len(match[1]) for match in matches if match)
        assert counts == {5000 + count: 6 for count in range(60)}

        wait_until(access.exists, PROMPT, "the new file is there")
        ask_every_worker(server, pids, "0-1")  # each has read its order by then, or does so within the second
        wait_until(lambda: "SIGUSR1: log files are opened anew" in error.read_text())
        wait_until(
            lambda: nobody_has_open(server, moved) and nobody_has_open(server, moved_error), PROMPT, "all moved on"
        )
        before = moved.read_bytes()
        ask_every_worker(server, pids, "0-2")
        assert moved.read_bytes() == before
        assert server.stderr == ""
        assert server.stop() == 0
    assert f"SIGTERM: draining {workers} workers" in error.read_text()


def nobody_has_open(server: Server, path: Path) -> bool:
    found = []
    for pid in server.processes():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if entry.readlink() == path:
                        found.append(pid)
    return not found


def test_168_the_signal_may_reach_workers_and_the_mold_themselves(serve: Serve, tmp_path: Path) -> None:
    access, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    with serve("asgi_app:app", "-w", "2", "--access-logfile", str(access), app_dir=ASGI) as server:
        pids = server.wait_workers(2)
        mold = server.mold_pid()
        ask_every_worker(server, pids, "1")
        access.rename(moved)
        for pid in (*pids, mold):
            os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: nobody_has_open(server, moved), PROMPT, "all moved on")
        ask_every_worker(server, pids, "2")
        assert (server.worker_pids(), server.mold_pid()) == (pids, mold)
        assert "?2 " not in moved.read_text()


def test_a_worker_that_starts_later_writes_to_the_new_file(serve: Serve, tmp_path: Path) -> None:
    access, error = tmp_path / "access.log", tmp_path / "error.log"
    options = ("--access-logfile", str(access), "--error-logfile", str(error))
    server = serve("asgi_app:app", *options, app_dir=ASGI, wait=False)
    with server:
        wait_until(lambda: "Listening at" in "".join(lines_of(error)), 30, "it is ready")
        (first,) = server.wait_workers(1)
        access.rename(tmp_path / "access.log.1")
        error.rename(tmp_path / "error.log.1")
        reopen(server)
        wait_until(lambda: nobody_has_open(server, tmp_path / "error.log.1"), PROMPT, "all moved on")
        os.kill(first, signal.SIGKILL)
        server.wait_workers(1, instead_of=[first])
        assert nobody_has_open(server, tmp_path / "error.log.1")
        assert nobody_has_open(server, tmp_path / "access.log.1")


def test_170_json_through_standard_output(serve: Serve) -> None:
    with serve("wsgi_app:app", "--access-log", "--access-logformat", "json", app_dir=WSGI) as server:
        assert server.get("/pid?a=1", headers={"X-Request-ID": "r-1"}).status_code == 200
        found = server.wait_for_line(r"^\{.*\}$")
        entry = json.loads(found[0])
        assert (entry["path"], entry["query"], entry["status"], entry["tenant"]) == ("/pid", "a=1", 200, "web")
        assert (entry["request_id"], [entry["pid"]]) == ("r-1", server.worker_pids())


def test_without_the_option_there_is_no_access_log(serve: Serve) -> None:
    with serve("asgi_app:app", app_dir=ASGI) as server:
        assert server.get("/pid").status_code == 200
        assert "/pid" not in server.stderr


def test_171_a_client_that_leaves_is_499(serve: Serve, tmp_path: Path) -> None:
    access, started = tmp_path / "access.log", tmp_path / "started"
    folder = write_app(tmp_path / "app", "patient", PATIENT)
    options = ("--access-logfile", str(access), "--access-logformat", "%(s)s %(r)s %(b)s")
    with serve("patient:app", *options, app_dir=folder, env={"STARTED": str(started)}) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            wait_until(started.exists)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        wait_until(lambda: lines_of(access) == ["499 GET /x HTTP/1.1 -"], 2)


def test_171_a_request_that_outlasts_the_stop_is_503(serve: Serve, tmp_path: Path) -> None:
    access, started = tmp_path / "access.log", tmp_path / "started"
    folder = write_app(tmp_path / "app", "patient", PATIENT)
    options = ("--access-logfile", str(access), "--access-logformat", "%(s)s %(r)s", "--graceful-timeout", "1")
    with serve("patient:app", *options, app_dir=folder, env={"STARTED": str(started)}) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            wait_until(started.exists)
            assert server.stop() == 0
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
    assert lines_of(access) == ["503 GET /x HTTP/1.1"]


def test_a_full_disk_does_not_hurt_a_request(serve: Serve) -> None:
    with serve("asgi_app:app", "--access-logfile", "/dev/full", app_dir=ASGI) as server:
        for _ in range(20):
            assert server.get("/pid").status_code == 200
        server.wait_for_line(r"\[WARNING\] access log /dev/full: .*No space left on device; lines lost: 1$")
        assert server.stderr.count("lines lost") == 1


def test_a_folder_that_goes_away_does_not_keep_a_worker_from_coming_back(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with serve("asgi_app:app", "--access-logfile", str(folder / "access.log"), app_dir=ASGI) as server:
        (first,) = server.wait_workers(1)
        folder.rename(tmp_path / "gone")
        os.kill(first, signal.SIGKILL)
        server.wait_workers(1, instead_of=[first])
        assert server.get("/pid").status_code == 200
        server.wait_for_line("lines lost: 1$")
        folder.mkdir()
        reopen(server)
        wait_until((folder / "access.log").exists, PROMPT)


def test_what_the_app_prints_is_captured(serve: Serve, tmp_path: Path) -> None:
    error = tmp_path / "error.log"
    folder = write_app(tmp_path / "app", "talkative", TALKATIVE)
    with serve("talkative:app", "--log-file", str(error), "--capture-output", app_dir=folder, wait=False) as server:
        found = wait_until(lambda: re.search(r"Listening at: (\S+)", "\n".join(lines_of(error))), 30, "it is ready")
        server.url = found[1]
        assert server.get("/").text == "ok"
        text = error.read_text()
        assert "printed while it is imported\n" in text and "printed by a request\n" in text
        assert server.stderr == ""


def test_a_log_configuration_may_name_classes_of_the_app(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "gated", GATED_WSGI)
    write_app(folder, "shouting", OWN_FORMATTER)
    config = tmp_path / "log.json"
    config.write_text(
        json.dumps(
            {
                "version": 1,
                "formatters": {"own": {"()": "shouting.Shouting"}},
                "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own"}},
                "root": {"handlers": ["own"], "level": "INFO"},
            }
        )
    )
    with serve("gated:app", "--log-config", str(config), "--log-level", "debug", app_dir=folder) as server:
        assert server.get("/").text == "done"
        assert "No module named 'shouting'; in this process it is not applied" in " ".join(server.stderr.split())
        assert server.get("/", headers={"Host": "\x01"}).status_code == 400
        server.wait_for_line("^SHOUT refused client=")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--access-logfile", "absent/a.log"),
            "absent/a.log: cannot be opened: No such file or directory; name a file",
        ),
        (("--error-logfile", "absent/e.log"), "absent/e.log: cannot be opened: No such file or directory; name a file"),
        (("--access-logformat", "%(h)s %(nope)s"), "--access-logformat: unknown atom %(nope)s; allowed are h, l, u, t"),
        (("--log-config", "absent.ini"), "absent.ini: cannot be read"),
        (("--capture-output",), "--capture-output: name a file with --error-logfile"),
    ],
)
def test_mistakes_end_the_command_before_anything_is_started(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    began = time.monotonic()
    done = run_command("serve", "asgi_app:app", "--app-dir", str(ASGI), "--port", "0", *words, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - began < 20
