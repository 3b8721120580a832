"""
A real server for a test: ``jumpstart serve`` in a process of its own, and everything about it that a test asks for.

Use the fixture `serve` of `conftest.py`, which fills in a fresh folder for the host's state::

    def test_something(serve: Serve) -> None:
        with serve("asgi_app:app", "-w", "2", app_dir=APPS / "asgi_bare") as server:
            assert server.get("/").text == "hello\n"       # a connection of its own for each call
            assert server.status()["records_used"] == 0    # JSON of the admin socket
        # here it was told to stop, ended with exit code 0, and left no process behind

What it does by itself

- Port 0, read back from the line "Listening at"; entering ``with`` waits until it is ready, unless ``wait=False``.
- One state folder (``JUMPSTART_HOME``) per test: a second ``serve(…)`` in the same test is a restart on the same host.
  ``home=other_folder`` is another host. ``cwd`` of the server is an empty folder.
- Standard error goes to a file: `stderr` is all of it so far, `wait_for_line` waits for something in it. It is printed
  at the end, which pytest shows when the test fails.
- Leaving ``with`` stops a server that still runs with SIGTERM and asserts exit code 0 (a test that ends it otherwise
  does so itself, and says with `wait` which code it expects), then asserts that no process of it is left: each carries
  ``TEST_OF_JUMPSTART`` in its environment. What is left is killed, and the test fails.
- A session and process group of its own: ``os.killpg(server.pid, …)`` is Ctrl-C in a terminal.

Wait with `wait_until`, never with a bare sleep.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import httpx

from jumpstart.paths import host_paths
from jumpstart_server.admin import run_folder
from tests.integration import commands

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
APPS = ROOT / "tests" / "apps"
COMMAND = Path(sys.executable).parent / "jumpstart"

MARKER = "TEST_OF_JUMPSTART"  # not JUMPSTART_…: no option is called so, and the server would say it
READY_TIMEOUT = 30.0  # seconds; a boot takes half a second on an idle machine
STOP_TIMEOUT = 15.0
GONE_TIMEOUT = 3.0  # for what a killed supervisor leaves to the kernel
POLL = 0.01

OF_OTHER_SERVERS = ("PORT", "WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS", "PYTHONPATH")
LISTENING = re.compile(r"Listening at: (\S+) \(\d+\)")
TRACEBACK = "Traceback (most recent call last)"

# Tells in $STARTED that a request has arrived, and answers it when $GATE is there.
GATED_WSGI = """
import os, pathlib, time

def app(environ, start_response):
    if environ["PATH_INFO"] == "/gated":
        pathlib.Path(os.environ["STARTED"]).touch()
        while not pathlib.Path(os.environ["GATE"]).exists():
            time.sleep(0.01)
    start_response("200 OK", [("Content-Length", "4")])
    return [b"done"]
"""


def wait_until(condition: Callable[[], T | None], timeout: float = 10.0, why: str = "") -> T:
    """
    Return the first true value of *condition*, polled; fail after *timeout* seconds with *why* and the last value.

    An httpx error while polling counts as not yet.
    """
    give_up = time.monotonic() + timeout
    while True:
        value: Any
        try:
            value = condition()
        except httpx.HTTPError as error:
            value = error
        if value and not isinstance(value, httpx.HTTPError):
            return value  # type: ignore[no-any-return]  # it is what *condition* returned
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {timeout:g} s: {why or condition} (last: {value!r})")
        time.sleep(POLL)


def is_alive(pid: int) -> bool:
    """A zombie counts as gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def marked_processes(marker: str) -> set[int]:
    """Pids of all living processes whose environment at their exec holds *marker* (forks inherit it)."""
    wanted = f"{MARKER}={marker}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0") and is_alive(int(folder.name)):
                    found.add(int(folder.name))
            except OSError:
                continue  # gone meanwhile, or not ours to look at
    return found


def working_folder(home: Path) -> Path:
    """Where the server with that home runs, and looks for its jumpstart.toml; made when it is not there."""
    folder = home.parent / (home.name + "-cwd")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """The environment without what would configure a server, with *home* as the host's state folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JUMPSTART_") and name not in OF_OTHER_SERVERS
    }
    return {**kept, "JUMPSTART_HOME": str(home), **more}


def run_command(
    *arguments: str, home: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run another ``jumpstart`` command (status, build, profile …) to its end, output captured."""
    environment = clean_environment(home, **(env or {}))
    if arguments[:1] != ("serve",) and "PYTHONPATH" not in environment:
        return commands.run(COMMAND, arguments, environment, cwd or home, timeout)
    return subprocess.run(
        [str(COMMAND), *arguments],
        env=environment,
        cwd=cwd or home,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def in_parallel(count: int, work: Callable[[int], T]) -> list[T]:
    """Call *work* with 0 … *count* - 1 on as many threads, all at once; return the results in order."""
    barrier = threading.Barrier(count)

    def start_together(number: int) -> T:
        barrier.wait(10)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start_together, range(count)))


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connects(port: int) -> bool:
    """Whether somebody listens on a port of the loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except (ConnectionError, TimeoutError):
        return False


def write_app(folder: Path, name: str, text: str) -> Path:
    """Write the module *name* into *folder* (made if need be), which is returned for ``app_dir``."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def make_flask_db(path: Path) -> dict[str, str]:
    """
    Fill a database for ``flask_app``; return the environment that names it.

    The app would fill it in its first request, which two of at once must not.
    """
    env = {"FLASK_APP_DB": str(path)}
    words = [sys.executable, "-c", "import flask_site; flask_site.app.test_client().get('/')"]
    subprocess.run(words, cwd=APPS / "flask_app", env={**os.environ, **env}, check=True)
    return env


class Server:
    """
    One ``jumpstart serve``, as a context manager; see the module.

    Attributes:
        process: the supervisor.
        url: of the first address; "" until it is ready.
        home: the host's state folder.
    """

    def __init__(
        self,
        target: str,
        *options: str,
        app_dir: Path | None,
        home: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
        address: tuple[str, ...] = ("--port", "0"),
        wait: bool = True,
        pass_fds: tuple[int, ...] = (),
        forked: bool = True,
    ) -> None:
        """
        Args:
            options: of ``serve``, beside app folder and address.
            app_dir: ``--app-dir``; None gives none, which makes it the current folder: a new one, beside *home*.
            log: file for standard error.
            env: variables on top of the test's own.
            address: options that say where to listen; () gives none.
            wait: whether ``with`` waits until it is ready.
            pass_fds: descriptors that the server inherits.
            forked: from a process that has imported it already (`commands.py`), where nothing else is asked that only
                the command itself can have.
        """
        self._forked = forked
        self.home = home
        self.url = ""
        self.urls: list[str] = []
        self._log = log
        self._wait = wait
        self._marker = uuid.uuid4().hex
        self._pass_fds = pass_fds
        folder = ("--app-dir", str(app_dir)) if app_dir is not None else ()
        self._words = [str(COMMAND), "serve", *([target] if target else []), *folder, *address, *options]
        self._environment = clean_environment(home, **{MARKER: self._marker, **(env or {})})
        self._cwd = working_folder(home)
        self._expected: int | None = None
        self.process: subprocess.Popen[bytes] | commands.Serving

    # ------------------------------------------------------------------ from start to end

    def __enter__(self) -> Server:
        self.start()
        if self._wait:
            try:
                self.wait_ready()
            except BaseException:
                self._clean_up()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.process.poll() is None:
                code = self.stop()
                assert code == 0, f"exit code {code} after SIGTERM"
        finally:
            left = self._clean_up()
        if kind is None:
            assert not left, f"left running: {left}"

    def start(self) -> None:
        """Start the process; part of ``with``."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as stderr:
            if self._forked and self._is_plain():
                self.process = commands.Serving(self._words, self._environment, self._cwd, stderr)
                return
            self.process = subprocess.Popen(
                self._words,
                env=self._environment,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )

    def _is_plain(self) -> bool:
        """Whether it needs nothing that only a start of the command can give."""
        changed = {name for name, value in self._environment.items() if os.environ.get(name) != value}
        is_special = any(name.startswith(("PYTHON", "LD_", "TZ")) for name in changed)
        return self._words[0] == str(COMMAND) and not self._pass_fds and not is_special

    def _clean_up(self) -> list[str]:
        """Kill what is left, print standard error, return the command lines of what was left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT)
        give_up = time.monotonic() + GONE_TIMEOUT
        while (left := self.processes()) and time.monotonic() < give_up:
            time.sleep(POLL)
        lines = [f"{pid}: {command_line(pid)}" for pid in left]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        print(f"--- {' '.join(self._words[1:])} (exit code {self.process.returncode})\n{self.stderr}")
        return lines

    def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Wait until it listens, and read the address from its log; fail when it ends before."""
        wait_until(lambda: LISTENING.search(self.stderr) or self.process.poll() is not None, timeout, "server is ready")
        self.urls = LISTENING.findall(self.stderr)
        assert self.urls, f"ended with exit code {self.process.returncode} before it was ready\n{self.stderr}"
        self.url = self.urls[0]

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = STOP_TIMEOUT) -> int:
        """Send a signal to the supervisor and return its exit code."""
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = STOP_TIMEOUT) -> int:
        """Wait until the supervisor has ended by itself and return its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            left = [f"{pid}: {command_line(pid)}" for pid in self.processes()]
            raise AssertionError(f"still running after {timeout:g} s: {left}\n{self.stderr}") from None

    # ------------------------------------------------------------------ what it says

    @property
    def stderr(self) -> str:
        """Everything that its processes have written to standard error (and output) so far."""
        return self._log.read_text(errors="replace")

    def wait_for_line(self, pattern: str, timeout: float = 10.0) -> re.Match[str]:
        """Wait until a line of standard error matches the regular expression *pattern*."""
        return wait_until(
            lambda: re.search(pattern, self.stderr, re.MULTILINE), timeout, f"a line like {pattern!r}\n{self.stderr}"
        )

    def admin(self, path: str, method: str = "GET", timeout: float = 10.0) -> httpx.Response:
        """Ask the admin socket; raises httpx.HTTPError while it is not there yet."""
        address = str(run_folder(host_paths(self._environment, Path.home())) / f"{self.pid}.sock")
        with socket.socket(socket.AF_UNIX) as probe:  # httpx leaks the socket of a connection that fails
            try:
                probe.connect(address)
            except OSError as error:
                raise httpx.ConnectError(f"{address}: {error}") from None
        transport = httpx.HTTPTransport(uds=address, verify=False)
        with httpx.Client(transport=transport, base_url="http://admin", timeout=timeout) as client:
            return client.request(method, path)

    def status(self, requests: int = 0, *, tenant: str | None = None) -> dict[str, Any]:
        """
        The JSON of ``/status`` and in it that of *tenant*, by default the first.

        Waits until it has *requests*: one is counted a moment after its client has the answer.
        """

        def look() -> dict[str, Any] | None:
            document: dict[str, Any] = self.admin("/status").json()
            found = next(each for each in document["tenants"] if tenant in (None, each["tenant"]))
            return {**document, **found} if found["requests"] >= requests else None

        return wait_until(look, why=f"{requests} requests are counted")

    # ------------------------------------------------------------------ its processes

    @property
    def pid(self) -> int:
        """Of the supervisor, which leads its process group."""
        return self.process.pid

    def processes(self) -> set[int]:
        """Pids of everything that belongs to it and lives, the supervisor too."""
        own = {self.pid} if self.process.poll() is None else set()
        return own | marked_processes(self._marker)

    def worker_pids(self) -> list[int]:
        """Pids of the workers that serve, in the order of their slots."""
        return [worker["pid"] for worker in self.status()["workers"] if worker["state"] == "serving"]

    def wait_workers(self, count: int, *, instead_of: Collection[int] = ()) -> list[int]:
        """Wait until *count* workers serve and none is one of *instead_of*; return their pids in the order of slots."""

        def all_there() -> list[int]:
            pids = self.worker_pids()
            return pids if len(pids) == count and not set(pids) & set(instead_of) else []

        return wait_until(all_there, 20, f"{count} workers serve, none of {list(instead_of)}\n{self.stderr}")

    def mold_pid(self) -> int:
        """Pid of the mold; fails when there is none."""
        pid = self.status()["mold_pid"]
        assert isinstance(pid, int), "there is no mold"
        return pid

    # ------------------------------------------------------------------ requests

    @property
    def port(self) -> int:
        """Of the first address."""
        return int(self.url.rpartition(":")[2])

    @contextlib.contextmanager
    def client(self, timeout: float = 15.0) -> Iterator[httpx.Client]:
        """A client with keep-alive connections; addresses that are Unix sockets work too."""
        with self._client(timeout) as client:
            yield client

    def _client(self, timeout: float) -> httpx.Client:
        # verify=False: reading the system's certificates costs more than the request.
        if self.url.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:"), verify=False)
            return httpx.Client(transport=transport, base_url="http://unix", timeout=timeout)
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, verify=False)

    def request(self, method: str, path: str, *, timeout: float = 15.0, **more: Any) -> httpx.Response:
        """One request on a connection of its own."""
        with self._client(timeout) as client:
            return client.request(method, path, **more)

    def get(self, path: str = "/", **more: Any) -> httpx.Response:
        """GET on a connection of its own; keyword arguments as of `request`."""
        return self.request("GET", path, **more)


class Serve(Protocol):
    """The fixture `serve`: a `Server` with its folders filled in; arguments as of `Server`."""

    def __call__(
        self,
        target: str,
        *options: str,
        app_dir: Path | None = None,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        address: tuple[str, ...] = ("--port", "0"),
        wait: bool = True,
        pass_fds: tuple[int, ...] = (),
    ) -> Server: ...
