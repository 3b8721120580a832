"""Starting, watching and ending the processes: servers, load generators, the upstream."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks import machine
from benchmarks.load.response import BadResponse, ResponseReader
from benchmarks.servers import APPS, Launch, Server

START_S = 30.0  # for a server to answer its first request
END_S = 3.0  # for a process to end after it was asked
# Whatever else the caller's environment holds could change a server: WEB_CONCURRENCY, PORT, GRANIAN_..., PYTHON....
PASSED_ON = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "USER")


class Failure(Exception):
    """A measurement failed: the server did not start, did not answer, or a load generator gave nothing."""


def environment(**more: str) -> dict[str, str]:
    return {**{name: os.environ[name] for name in PASSED_ON if name in os.environ}, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A process with all its descendants. As a context manager it ends them when left."""

    def __init__(
        self,
        command: Sequence[str],
        environ: dict[str, str],
        folder: Path,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
    ) -> None:
        # In a session of its own: Ctrl-C reaches us alone, and we end them in order.
        self.child = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )

    def tree(self) -> list[machine.Stat]:
        return machine.tree(self.child.pid)

    def cpu_s(self) -> float:
        return machine.cpu_s(self.tree())

    def end(self) -> None:
        """Ask it to end; kill what is left of its tree after a while."""
        before = self.tree()
        try:
            if self.child.poll() is None:
                self.child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.child.wait(END_S)
        finally:  # a second Ctrl-C cuts the waiting short, not the killing
            self._kill(before)

    def _kill(self, before: list[machine.Stat]) -> None:
        """Whatever is left, orphans too; then wait until it is gone, so that the next sample has the machine."""
        left = {old.pid: old for old in [*before, *self.tree()]}.values()
        for process in left:
            if machine.is_running(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.child.wait()
        until = time.monotonic() + END_S
        while any(map(machine.is_running, left)) and time.monotonic() < until:
            time.sleep(0.005)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class Tool(Process):
    """One of ours from `benchmarks.load`: it prints JSON, a line each time that it has something to say."""

    def __init__(self, name: str, options: dict[str, Any], limit_s: float) -> None:
        self.name = name
        self._until = time.monotonic() + limit_s
        self._read = b""
        super().__init__(
            [sys.executable, "-m", "benchmarks.load", name, json.dumps(options), str(int(limit_s) + 5)],
            environment(PYTHONDONTWRITEBYTECODE="1"),
            machine.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,  # ours: what goes wrong in it is to be seen
        )

    def say(self) -> dict[str, Any]:
        """
        The next of its lines.

        Raises:
            Failure: it ended without one, or its time is up.
        """
        assert self.child.stdout is not None
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.child.stdout], [], [], max(0.0, self._until - time.monotonic()))
            if not ready:
                raise Failure(f"{self.name} said nothing within its time")
            data = os.read(self.child.stdout.fileno(), 1 << 20)
            if not data:
                raise Failure(f"{self.name} ended with status {self.child.wait()}")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def finish(self) -> dict[str, Any]:
        """Let it come to its end, and give its last line."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        return self.say()


class Upstream(Tool):
    """What apps stream from."""

    def __init__(self, limit_s: float) -> None:
        super().__init__("upstream", {}, limit_s)
        self.port: int = self.say()["port"]

    def late_p99_s(self) -> float | None:
        """How late its tokens left since this was last asked."""
        answer: dict[str, Any] = json.loads(get(self.port, "/stats")[1])
        late: float | None = answer["late_p99_s"]
        return late


class RunningServer(Process):
    """A server under test. `wait_until_ready` before use; its folder goes when it ends."""

    def __init__(
        self,
        server: Server,
        interface: str,
        app: str,
        threads: int,
        programs: Path,
        more: dict[str, str],
        *,
        config: str = "",
        port: int = 0,
    ) -> None:
        """*config*: the text of a jumpstart.toml, which says all else; then *port* is one of its ports."""
        self.name = server.name
        self.port = port or free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="benchmarks-"))
        (self._folder / "jumpstart.toml").write_text(config)
        self._log = self._folder / "log"
        launch = Launch(interface, app, self.port, threads, programs)
        environ = environment(
            PYTHONPATH=str(APPS),
            JUMPSTART_HOME=str(self._folder / "home"),
            BENCH_APP=app,
            BENCH_THREADS=str(threads),
            **more,
        )
        try:
            with self._log.open("wb") as log:
                command = [server.command(launch)[0], "serve"] if config else server.command(launch)
                super().__init__(command, environ, self._folder, stdout=log, stderr=log)
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise Failure(f"{server.name} cannot be started: {error}") from None

    def wait_until_ready(self, port: int = 0) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.child.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                status, _ = get(port or self.port, "/", timeout_s=5)
                if status == 200:
                    return
            time.sleep(0.02)
        raise Failure(f"{self.name} did not answer; its log ends with: {self.log_end()}")

    def log_end(self, size: int = 600) -> str:
        try:
            return self._log.read_bytes()[-size:].decode(errors="replace").strip() or "(nothing)"
        except OSError:
            return "(no log)"

    def end(self) -> None:
        super().end()
        shutil.rmtree(self._folder, ignore_errors=True)


def get(port: int, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """
    Status and body, over a connection of its own.

    Raises:
        OSError: no connection, or it broke.
        ValueError: what came is no response.
    """
    reader = ResponseReader()
    body = b""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        while not reader.complete:
            data = connection.recv(65536)
            try:
                body += reader.feed(data)
            except BadResponse as error:
                raise ValueError(str(error)) from None
            if not data:
                reader.end()
                if not reader.complete:
                    raise ConnectionResetError("closed in the middle of an answer")
    return reader.status, body


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end us as Ctrl-C does: through the context managers that end what was started."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
