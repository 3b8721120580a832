"""
Boots of the example shop, and what its first users meet.

Start reading at `boot_and_measure`. Everything that is started here ends with its `with` block, whatever happens:
`Interrupts` turns signals into an exception that never comes between the start of a process and the note that it is
ours.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from jumpstart_warmup.corpus import WarmRequest

ROOT = Path(__file__).resolve().parents[1]
SHOP = ROOT / "examples" / "shop"
JUMPSTART = Path(sys.executable).with_name("jumpstart")

FIRST_REQUESTS = 100
SETTLING_REQUESTS = 150  # between the first ones and those that count as steady; by then every worker saw every route
BOOT_TIMEOUT = 60.0  # seconds until ready
STOP_TIMEOUT = 15.0  # seconds from SIGTERM to the end; then SIGKILL
REQUEST_TIMEOUT = 30.0  # seconds
LOG_LINES = 40  # kept of a server's log, for the message when it fails

LISTENING = re.compile(r"Listening at: http://127\.0\.0\.1:(\d+)")


class DemoError(Exception):
    """The demo cannot go on; the message is for people."""


class Stopped(BaseException):
    """A signal asked for the end. Not an `Exception`, so that nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """
    SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread: once, so that cleaning up is not interrupted.
    """

    def __init__(self) -> None:
        self._holds = 0
        self._waiting = 0
        self._raised = False

    def install(self) -> None:
        """Take the signals over, for the rest of this process. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._came)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes inside is raised at the end."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if self._waiting and not self._holds:
                self._raise(self._waiting)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._waiting = number
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        if not self._raised:
            self._raised = True
            raise Stopped(number)


# --- processes ------------------------------------------------------------------------------------------------------


def environment(home: Path, backend: str, bytecode: Path) -> dict[str, str]:
    """
    What every process gets: this environment, but none of its settings for servers.

    Bytecode goes to the folder *bytecode* and not beside the sources: so it does not depend on who ran what in this
    tree before, nor on PYTHONDONTWRITEBYTECODE, which many container images set, and which makes every boot slower by
    the same compiles.
    """
    dropped = {"PORT", "WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS", "PYTHONDONTWRITEBYTECODE"}
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("JUMPSTART_") and name not in dropped
    }
    return {
        **kept,
        "JUMPSTART_HOME": str(home),
        "SHOP_BACKEND": backend,
        "PYTHONPYCACHEPREFIX": str(bytecode),
    }


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    interrupts: Interrupts,
    environ: Mapping[str, str] | None = None,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """
    Run *command* in a process group of its own, and end the whole group at the end.

    Raises:
        DemoError: it left processes behind (which are gone now).
    """
    process: subprocess.Popen[str] | None = None
    try:
        with interrupts.held():
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env=environ,
                text=True,
                process_group=0,  # Ctrl-C is for us alone; we end what we started
            )
        yield process
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            pass
    left = process.poll() is None or not _group_is_gone(process.pid, patience_s=2.0)
    if left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    if left and sys.exception() is None:
        raise DemoError(f"{process.args!r} left processes behind; they were killed")


def _group_is_gone(group: int, patience_s: float) -> bool:
    give_up = time.monotonic() + patience_s
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # macOS says so of a group of zombies
            return True
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)


@contextlib.contextmanager
def running_backend(interrupts: Interrupts) -> Iterator[str]:
    """The shop's back end on a free port; gives its address."""
    command: list[str | Path] = [
        sys.executable,
        SHOP / "backend.py",
        "--port",
        "0",
        "--latency-ms",
        "20",
        "--watch-stdin",
    ]
    with running(command, interrupts, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.isdigit():
            raise DemoError(f"the example's back end did not start: it said {line!r}")
        yield f"127.0.0.1:{line}"


def run(command: Sequence[str | Path], interrupts: Interrupts, environ: Mapping[str, str]) -> str:
    """
    Run *command* to its end and return its output.

    Raises:
        DemoError: it failed.
    """
    with running(command, interrupts, environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate()
    if process.returncode:
        words = " ".join(str(word) for word in command[1:3])
        raise DemoError(f"jumpstart {words} failed with exit code {process.returncode}:\n{output.rstrip()}")
    return output.strip()


# --- a server -------------------------------------------------------------------------------------------------------


class Server:
    """
    A `jumpstart serve` that runs. Made by `serving`.

    Attributes:
        process_started: the monotonic time just before its start.
        ready_s: seconds from then until it listened.
    """

    def __init__(self, process: subprocess.Popen[str], started: float, admin: Path, echo: bool) -> None:
        self.process = process
        self.port = 0
        self.ready_s = math.nan
        self.admin = admin
        self.process_started = started
        self._echo = echo
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._listening = threading.Event()
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._read_log, args=[process.stderr], daemon=True)
        self._reader.start()

    def _read_log(self, stream: IO[str]) -> None:
        for line in stream:
            now = time.monotonic()
            found = LISTENING.search(line)
            if found and not self.port:
                self.ready_s, self.port = now - self.process_started, int(found[1])
                self._listening.set()
            self._log.append(line)
            if self._echo:
                print(line, end="", file=sys.stderr, flush=True)
        self._listening.set()  # the end of the log; nobody need wait any more

    def wait_until_ready(self) -> None:
        """
        Return when the port is open.

        Raises:
            DemoError: it is not, and will not be; the message holds the server's log.
        """
        self._listening.wait(BOOT_TIMEOUT)
        if not self.port:
            raise DemoError(f"a boot failed: {self.describe_end()}")

    def describe_end(self) -> str:
        """Say how it ended, with the end of its log."""
        try:
            how = f"exit code {self.process.wait(1)}"
        except subprocess.TimeoutExpired:
            how = f"not ready after {BOOT_TIMEOUT:g} s"
        return f"{how}; its log ends with\n{''.join(self._log).rstrip()}"

    def status(self) -> dict[str, Any]:
        """The server's own account: `jumpstart status --json`, without the start of another interpreter."""
        connection = _UnixConnection(self.admin)
        try:
            connection.request("GET", "/status")
            whole = json.loads(connection.getresponse().read())
            document: dict[str, Any] = {**whole["tenants"][0], "pid": whole["pid"]}
        except (OSError, KeyError, http.client.HTTPException, ValueError) as error:
            raise DemoError(f"the admin address of a server does not answer: {error!r}") from None
        finally:
            connection.close()
        return document

    def status_after(self, requests: int) -> dict[str, Any]:
        """The same, once these many requests are counted: a worker counts after it has answered."""
        give_up = time.monotonic() + REQUEST_TIMEOUT
        while (document := self.status())["requests"] < requests and time.monotonic() < give_up:
            time.sleep(0.05)
        return document


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("admin", timeout=REQUEST_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@contextlib.contextmanager
def serving(
    arguments: Sequence[str | Path],
    interrupts: Interrupts,
    environ: Mapping[str, str],
    admin: Path,
    *,
    port: int = 0,
    echo: bool = False,
) -> Iterator[Server]:
    """
    `jumpstart serve` with *arguments*; the server listens when the block begins, and has ended after it.

    Raises:
        DemoError: it does not boot, or did not end with exit code 0.
    """
    command = [JUMPSTART, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port), "--admin", f"unix:{admin}"]
    started = time.monotonic()
    with running(command, interrupts, environ, stderr=subprocess.PIPE) as process:
        server = Server(process, started, admin, echo)
        server.wait_until_ready()
        yield server
        process.terminate()
        try:
            code = process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise DemoError(f"a server did not end within {STOP_TIMEOUT:g} s of SIGTERM") from None
        if code != 0:
            raise DemoError(f"a server that was asked to end did not do so cleanly: {server.describe_end()}")


# --- what users meet ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boot:
    """
    One boot, measured. Times of requests are in milliseconds, from before the connection to the last byte.

    Attributes:
        kind: which of the boots that are compared.
        ready_s: from the start of the command until it accepted connections.
        round_s: from the start of the command until each route had been answered once.
        first_ms: the first request of each route, in the order of warm.toml.
        first_p99_ms: of the first `FIRST_REQUESTS` requests; those of `first_ms` are among them.
        steady_p99_ms: of requests of the same mix, later.
        cold_events: imports, compiles, cache fills and the like inside these requests; the server's own count.
        cold_names: of some of them, by route.
        pss_mib: memory of all its processes, shared pages divided among those that share them. None where the system
            does not tell.
    """

    kind: str
    ready_s: float
    round_s: float
    first_ms: list[float]
    first_p50_ms: float
    first_p99_ms: float
    steady_p50_ms: float
    steady_p99_ms: float
    cold_events: int
    cold_requests: int
    requests: int
    cold_names: dict[str, list[str]]
    records_used: int
    records_dropped: dict[str, int]
    refusals: list[str]
    start_method: str
    pss_mib: float | None

    @property
    def first_over_steady(self) -> float:
        return self.first_p99_ms / self.steady_p99_ms


def boot_and_measure(
    kind: str,
    arguments: Sequence[str | Path],
    requests: Sequence[WarmRequest],
    steady: int,
    interrupts: Interrupts,
    environ: Mapping[str, str],
    admin: Path,
) -> Boot:
    """
    Boot the shop, be its first users one after the other, and stop it.

    Raises:
        DemoError: it did not boot, answer or end as it should.
    """
    with serving(arguments, interrupts, environ, admin) as server:
        first_ms = [ask(server.port, request) for request in requests]
        round_s = time.monotonic() - server.process_started
        rest = FIRST_REQUESTS - len(requests)
        early_ms = [*first_ms, *ask_in_turn(server.port, requests, rest)]
        ask_in_turn(server.port, requests, SETTLING_REQUESTS)
        steady_ms = ask_in_turn(server.port, requests, steady)
        status = server.status_after(len(first_ms) + rest + SETTLING_REQUESTS + steady)
        pss_mib = memory_mib(status)
    routes: dict[str, Any] = status["routes"]
    return Boot(
        kind=kind,
        ready_s=server.ready_s,
        round_s=round_s,
        first_ms=first_ms,
        first_p50_ms=percentile(early_ms, 0.5),
        first_p99_ms=percentile(early_ms, 0.99),
        steady_p50_ms=percentile(steady_ms, 0.5),
        steady_p99_ms=percentile(steady_ms, 0.99),
        cold_events=status["cold_events"],
        cold_requests=sum(stats["cold_requests"] for stats in routes.values()),
        requests=status["requests"],
        cold_names={route: stats["cold_names"] for route, stats in routes.items() if stats["cold_names"]},
        records_used=status["records_used"],
        records_dropped=status["records_dropped"],
        refusals=[f"{each['where']}: {each['reason']} ({each['detail']})" for each in status["refusals"]],
        start_method=status["start_method"],
        pss_mib=pss_mib,
    )


def ask_in_turn(port: int, requests: Sequence[WarmRequest], count: int) -> list[float]:
    """Send *count* requests round robin, one at a time; return their milliseconds."""
    return [ask(port, requests[number % len(requests)]) for number in range(count)]


def ask(port: int, request: WarmRequest) -> float:
    """
    Send *request* on a connection of its own, as somebody new; return the milliseconds until its last byte.

    Raises:
        DemoError: the answer is not what the request expects.
    """
    headers = {**dict(request.headers), "Connection": "close"}
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT)
    try:
        connection.request(request.method, request.path, request.body or None, headers)
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"{request.method} {request.path} was not answered: {error!r}") from None
    finally:
        connection.close()
    elapsed_ms = (time.perf_counter() - begun) * 1000
    if not request.is_success(response.status):
        raise DemoError(f"{request.method} {request.path} {request.complaint(response.status)}")
    return elapsed_ms


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: the smallest value that *share* of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def memory_mib(status: Mapping[str, Any]) -> float | None:
    """The proportional set size of supervisor, mold and workers together, or None off Linux."""
    pids = [status["pid"], status["mold_pid"], *(worker["pid"] for worker in status["workers"])]
    total_kib = 0
    try:
        for pid in pids:
            if pid is not None:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total_kib += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    except OSError:
        return None
    return total_kib / 1024
