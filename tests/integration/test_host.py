"""What ties a server to its host: systemd, the pid file, another user, and signals in its first second."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server import (
    APPS,
    ROOT,
    TRACEBACK,
    Serve,
    Server,
    clean_environment,
    connects,
    free_port,
    is_alive,
    run_command,
    wait_until,
    working_folder,
    write_app,
)

pytestmark = pytest.mark.slow

WSGI, ASGI = APPS / "wsgi_bare", APPS / "asgi_bare"
PROMPT = 4.0  # seconds that an end without work to finish may take on a busy machine; a tenth is usual


def python_for_everybody() -> str:
    """One of this version that other users may run, for ours may be in root's home; empty where there is none."""
    own = Path(sys.executable).resolve()
    system = Path(f"/usr/bin/python3.{sys.version_info[1]}")
    for found in (own, system):
        folders = [found, *found.parents, *Path(__file__).resolve().parents, *Path(httpx.__file__).resolve().parents]
        if found.exists() and all(folder.stat().st_mode & stat.S_IXOTH for folder in folders):
            return str(found)
    return ""


PYTHON = python_for_everybody()
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
FOR_EVERYBODY = pytest.mark.skipif(not PYTHON, reason="no Python of this version here that other users may run")
OUR_PATH = os.pathsep.join(
    [str(ROOT), *(str(ROOT / name) for name in ("server", "warmup")), str(Path(httpx.__file__).parents[1])]
)


def run_by_everybody(server: Server) -> Server:
    """Have another user's interpreter run the command: ``python -m jumpstart_server``."""
    server._words[:1] = [PYTHON, "-m", "jumpstart_server"]
    server._environment["PYTHONPATH"] = OUR_PATH
    return server


SELF = """
    import json, multiprocessing, os, signal, subprocess, sys, time

    at_import = {"uid": os.getuid(), "gid": os.getgid()}

    LISTS = "import os; print([n for n in os.listdir('/dev/fd') if int(n) > 2 and os.path.exists('/dev/fd/' + n)])"

    def end_of_child():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        os.kill(child.pid, signal.SIGHUP)
        child.join(20)
        return child.exitcode

    def app(environ, start_response):
        if environ["PATH_INFO"] == "/late":
            import colorsys
        said = {
            "at_import": at_import,
            "end_of_child": environ["PATH_INFO"] == "/fork" and end_of_child(),
            "uids": os.getresuid(),
            "gids": os.getresgid(),
            "groups": os.getgroups(),
            "environ": dict(os.environ),
            "of_child": environ["PATH_INFO"] == "/child" and subprocess.run(
                [sys.executable, "-c", LISTS], close_fds=False, capture_output=True, text=True
            ).stdout,
        }
        start_response("200 OK", [])
        return [json.dumps(said).encode()]
"""


# Becomes the command with two sockets, as systemd would have it.
AS_SYSTEMD = """
import fcntl, os, sys
first, second, names, *words = sys.argv[1:]
held = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in (first, second)]
for place, number in enumerate(held, 3):
    os.dup2(number, place)
passed = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": names}
os.execve(words[0], words, {**os.environ, **passed})
"""


def of_itself(server: Server, path: str = "/") -> dict[str, Any]:
    answer: dict[str, Any] = server.get(path).json()
    return answer


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may come into, as pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


# ---------------------------------------------------------------------- systemd


@contextlib.contextmanager
def heard_at(address: Path) -> Iterator[list[str]]:
    """What a service manager hears there, as it comes."""
    heard: list[str] = []

    def listen() -> None:
        while (text := manager.recv(1000).decode()) != "end":
            heard.append(text)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
                own.sendto(b"end", str(address))
            thread.join()


def test_systemd_is_told_and_nobody_else_speaks_for_us(serve: Serve, shared: Path, tmp_path: Path) -> None:
    """Also: the pid file and the variables of a file, seen from the app."""
    (tmp_path / "prod.env").write_text("GREETING='hello there'  # a comment\nHOME=/elsewhere\nJUMPSTART_WORKERS=2\n")
    pid_file = tmp_path / "x.pid"
    folder = write_app(tmp_path / "app", "itself", SELF)
    env = {
        **{"NOTIFY_SOCKET": str(shared / "notify"), "WATCHDOG_USEC": "400000"},
        **{"LISTEN_FDS": "1", "LISTEN_PID": "1", "HOME": "/home/of/mine"},
    }
    options = ("--env-file", str(tmp_path / "prod.env"), "--pid", str(pid_file))
    with heard_at(shared / "notify") as heard, serve("itself:app", *options, app_dir=folder, env=env) as server:

        def hears(state: str, count: int = 1) -> None:
            wait_until(lambda: sum(text.startswith(state) for text in heard) >= count, 20, f"{state} in {heard}")

        assert pid_file.read_text() == f"{server.pid}\n"
        hears("READY=1")
        assert heard[0] == "EXTEND_TIMEOUT_USEC=30000000"
        ready = next(text for text in heard if text.startswith("READY=1"))
        assert ready.splitlines()[:2] == ["READY=1", f"MAINPID={server.pid}"]
        assert "STATUS=ready" in ready
        hears("WATCHDOG=1", 3)
        os.kill(server.pid, signal.SIGHUP)
        hears("RELOADING=1")
        hears("READY=1", 2)
        assert any(re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", text) for text in heard)
        server.wait_for_line("gen=2 serves")

        environ = of_itself(server)["environ"]
        assert environ["GREETING"] == "hello there"
        assert environ["HOME"] == "/home/of/mine", "what is set already wins"
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID"} & set(environ)
        server.wait_workers(2)
        assert of_itself(server, "/fork")["end_of_child"] == -signal.SIGHUP, "what we ignore a child does not"

        with serve("itself:app", "--pid", str(pid_file), app_dir=folder, wait=False) as second:
            assert second.wait() == 2
            assert f"--pid {pid_file}: process {server.pid} is running; stop it" in second.stderr
        assert pid_file.read_text() == f"{server.pid}\n"

        assert server.stop() == 0
        hears("STOPPING=1")
        assert not pid_file.exists()


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="there is no systemd-socket-activate here")
def test_sockets_that_systemd_passes_are_served(serve: Serve, shared: Path, tmp_path: Path) -> None:
    port, path = free_port(), shared / "x.sock"
    folder = write_app(tmp_path / "app", "itself", SELF)
    server = serve("itself:app", app_dir=folder, address=(), wait=False)
    variables = [word for name, value in server._environment.items() for word in ("-E", f"{name}={value}")]
    listen = ["-l", f"127.0.0.1:{port}", "-l", str(path), "--fdname=web:local"]
    server._words[:0] = ["systemd-socket-activate", *listen, *variables]
    with server:
        wait_until(lambda: connects(port), why="systemd listens")  # and starts us for this connection
        answer = httpx.get(f"http://127.0.0.1:{port}/child", trust_env=False, timeout=30)  # waits until we are ready
        assert answer.status_code == 200
        assert not {name for name in answer.json()["environ"] if name.startswith("LISTEN_")}
        assert answer.json()["of_child"] == "[]\n", "a child of the app would hold the port"
        server.wait_ready()
        assert server.urls == [f"http://127.0.0.1:{port}", f"unix:{path}"]
        assert server.status()["workers"][0]["state"] == "serving"
        server.wait_for_line("forked")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://unix/").status_code == 200


def test_each_tenant_takes_the_sockets_of_its_name_or_those_it_asks_for(serve: Serve, home: Path) -> None:
    """From the jumpstart.toml of the current folder; no target is given."""
    current = working_folder(home)
    (current / "jumpstart.toml").write_text(
        f'[app]\ntarget = "wsgi_app:app"\napp_dir = "{WSGI}"\n[tenants.web]\n[tenants.genai]\nbind = "fd://local"\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        numbers = (first.fileno(), second.fileno())
        server = serve("", address=(), pass_fds=numbers)
        server._words[:0] = [sys.executable, "-c", AS_SYSTEMD, *map(str, numbers), "local:web"]
        with server:
            for name, sock in (("web", second), ("genai", first)):
                port = sock.getsockname()[1]
                server.wait_for_line(f"tenant={name} Listening at: http://127.0.0.1:{port} ")
                assert httpx.get(f"http://127.0.0.1:{port}", trust_env=False).text == "hello\n"
            words = ("profile", "capture", "-o", str(home / "x.jumpstart"))
            for more, code, says in (
                (("--tenant", "genai"), 0, "x.jumpstart: "),
                ((), 2, "name a tenant with --tenant; this server has web, genai"),
                (("--tenant", "shop/../web"), 2, "--tenant shop/../web: this server has web, genai"),
            ):
                captured = run_command(*words, *more, home=home)
                assert (captured.returncode, says in captured.stdout + captured.stderr) == (code, True), captured
        nobody = serve("", address=(), wait=False)
        with nobody:
            assert nobody.wait() == 2
            assert "bind fd://local: the service manager passed no socket of this name" in nobody.stderr


# ---------------------------------------------------------------------- another user


@AS_ROOT
@FOR_EVERYBODY
@pytest.mark.parametrize("fork", ["auto", "never"])
def test_the_app_runs_as_another_user_and_the_server_as_root(
    serve: Serve, shared: Path, tmp_path: Path, fork: str
) -> None:
    nobody = pwd.getpwnam("nobody")
    folder = write_app(shared / "app", "itself", SELF)
    logs = shared / "logs"  # root's: the app's user may make nothing there
    logs.mkdir(mode=0o755)
    access, errors, path = logs / "access.log", logs / "error.log", shared / "x.sock"
    options = (
        *("--user", "nobody", "--fork", fork, "--access-logfile", str(access), "--error-logfile", str(errors)),
        *("--uds-permissions", "660", "--capture-output"),
    )

    def start() -> Server:
        return run_by_everybody(serve("itself:app", *options, app_dir=folder, address=("--uds", str(path)), wait=False))

    def listening(server: Server) -> None:
        wait_until(lambda: errors.exists() and "ready in" in errors.read_text(), 30, f"it is ready\n{server.stderr}")
        server.url = f"unix:{path}"

    with start() as server:
        listening(server)
        said = of_itself(server)
        assert said["at_import"] == {"uid": nobody.pw_uid, "gid": nobody.pw_gid}
        assert set(said["uids"]) == {nobody.pw_uid}
        assert set(said["gids"]) == {nobody.pw_gid}
        assert 0 not in said["groups"]
        assert (said["environ"]["HOME"], said["environ"]["USER"]) == (nobody.pw_dir, "nobody")
        assert Path(f"/proc/{server.pid}").stat().st_uid == 0
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (nobody.pw_uid, nobody.pw_gid, 0o660)
        of_itself(server, "/late")

        # Files that are moved away: the supervisor makes the new ones, for the others may not.
        for file in (access, errors):
            file.rename(f"{file}.1")
        os.kill(server.pid, signal.SIGUSR1)
        wait_until(lambda: access.exists() and errors.exists(), why="they are made anew")
        wait_until(lambda: of_itself(server) and access.read_text().count('"GET / HTTP/1.1" 200'), why="lines go there")
        assert "cannot be opened" not in errors.read_text()
        assert access.stat().st_uid == nobody.pw_uid

    # The warm-start cache is root's: written by the supervisor, read before the privileges go.
    errors.unlink()
    with start() as server:
        listening(server)
        assert server.status()["records_used"] > 0
        assert not server.status()["refusals"]
        (worker,) = server.worker_pids()
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        wait_until(lambda: not is_alive(worker), why="who has become somebody else still dies with the supervisor")


@AS_ROOT
@FOR_EVERYBODY
def test_a_builder_too_and_what_the_user_may_not_read_is_named(
    serve: Serve, shared: Path, tmp_path: Path, home: Path
) -> None:
    folder = write_app(
        shared / "app", "itself", "import os\nprint('imported by', os.getuid())\n" + textwrap.dedent(SELF)
    )
    words = [PYTHON, "-m", "jumpstart_server", "build", "itself:app", "--app-dir", str(folder)]
    (shared / "warm.toml").write_text('[[request]]\npath = "/late"\n')
    profile = tmp_path / "x.jumpstart"
    built = subprocess.run(
        [*words, "--requests", str(shared / "warm.toml"), "--user", "65534", "--group", "0", "-o", str(profile)],
        env=clean_environment(home, PYTHONPATH=OUR_PATH),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert built.returncode == 0, built.stderr
    assert "imported by 65534" in built.stdout

    options = ("--user", "nobody", "--profile", str(profile), "--no-warm-start")
    with run_by_everybody(serve("itself:app", *options, app_dir=folder)) as server:  # the keys are root's alone
        assert not server.status()["refusals"]
        assert server.status()["records_used"] > 0

    locked = tmp_path / "locked"
    write_app(locked, "itself", SELF)
    locked.chmod(0o700)
    with run_by_everybody(serve("itself:app", "--user", "nobody", app_dir=locked, wait=False)) as server:
        assert server.wait() == 2
        assert f"--app-dir {locked}: nobody may not read it; let that user or its group in" in server.stderr
        assert TRACEBACK not in server.stderr


@FOR_EVERYBODY
@pytest.mark.parametrize(
    ("user", "error"),
    [
        ("root", "--user root: only root may become another user, and this is user id 65534; start it as root"),
        ("no-such-user", "--user no-such-user: there is no such user"),
        ("65534", "--user 65534 --group 1: only root may become another user"),
    ],
)
def test_who_may_not_become_another_user_is_told(shared: Path, user: str, error: str) -> None:
    words = [PYTHON, "-m", "jumpstart_server", "serve", "a:b", "--user", user]
    as_nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    ended = subprocess.run(
        [*words, *(["--group", "1"] if user == "65534" else [])],
        env=clean_environment(shared, PYTHONPATH=OUR_PATH),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        **as_nobody,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {error}" if os.geteuid() == 0 else "error: --user")


# ---------------------------------------------------------------------- signals in the first second

HARMLESS = (
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU),
    signal.SIGWINCH,
)


def is_prepared(server: Server) -> bool:
    """Whether it has come to its first line: before, the interpreter's own handling of signals applies."""
    try:
        text = Path(f"/proc/{server.pid}/status").read_text()
    except OSError:
        return False
    (blocked,) = (line.split()[1] for line in text.splitlines() if line.startswith("SigBlk"))
    return bool(int(blocked, 16) >> (signal.SIGHUP - 1) & 1)


@pytest.mark.parametrize("to_all", [False, True], ids=["to-the-command", "to-its-group"])
def test_signals_that_ask_for_no_end_end_nothing_at_any_moment(serve: Serve, to_all: bool) -> None:
    with serve("wsgi_app:app", app_dir=WSGI, wait=False) as server:
        wait_until(lambda: is_prepared(server), why="it has come to its first line")
        give_up = time.monotonic() + 0.5  # each SIGHUP from the moment on that it means something is a roll
        for number in itertools.cycle(HARMLESS):
            if time.monotonic() > give_up:
                break
            (os.killpg if to_all else os.kill)(server.pid, number)
            time.sleep(0.01)
        server.wait_ready()
        for number in HARMLESS:
            (os.killpg if to_all else os.kill)(server.pid, number)
        wait_until(lambda: server.status()["workers"][0]["state"] == "serving", why="it serves")
        assert server.get("/").text == "hello\n"

        server.process.terminate()
        give_up = time.monotonic() + PROMPT
        while server.process.poll() is None and time.monotonic() < give_up:
            for number in HARMLESS:
                (os.killpg if to_all else os.kill)(server.pid, number)
            time.sleep(0.005)
        assert server.wait() == 0
        assert TRACEBACK not in server.stderr


@pytest.mark.real_command
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT], ids=lambda value: value.name)
def test_signals_that_ask_for_an_end_end_it_at_any_moment(serve: Serve, tmp_path: Path, number: signal.Signals) -> None:
    slow = write_app(tmp_path / "app", "slow", "import time\ntime.sleep(60)\n")
    for moment in range(5):
        with serve("slow:app", app_dir=slow, wait=False) as server:
            wait_until(lambda: is_prepared(server), why="it has come to its first line")
            time.sleep(moment * 0.08)
            began = time.monotonic()
            os.kill(server.pid, number)
            code = server.wait()
            assert time.monotonic() - began < PROMPT
            assert code == (130 if number is signal.SIGINT else 0), server.stderr
            assert server.stderr.count(f"{number.name}: stopped before it was ready\n") == 1, "whatever the moment"
            assert TRACEBACK not in server.stderr
            with contextlib.suppress(OSError):
                assert not list(server._cwd.glob("core*"))
