"""
`jumpstart` commands without the start of an interpreter for each: one process imports the command once and forks.

Each fork runs `jumpstart_server.__main__.main` with arguments, environment, working folder and standard streams of its
own, and ends as the command does. What depends on how an interpreter starts (``PYTHONPATH``) and on its first moments
(signals at boot) is tested with `subprocess` and the command itself. An import of the command costs 0.3 seconds of a
processor, one of the supervisor half a second, and the tests run some hundreds of each.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[2]
# What commands import when they need it.
PRELOADED = (
    *("admin", "advise", "config", "early_signals", "envfile", "problems", "profiles", "spawn", "supervisor"),
    *("cli", "cli.build", "cli.foreign", "cli.profile", "cli.serve", "cli.status", "export.model"),
)
LIMIT_ORDER = 1 << 20


def run(
    command: Path, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """
    Run a command to its end, output captured.

    Raises:
        subprocess.TimeoutExpired: it took longer than *timeout* seconds, and was killed.
    """
    argv = [str(command), *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _server().run({"argv": argv, "env": dict(env), "cwd": str(cwd)}, out, err, timeout)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read().decode(), err.read().decode())


class Serving:
    """
    A ``jumpstart serve`` in a fork, in a session of its own; what the tests use of `subprocess.Popen`.

    A process of ours is its parent, waits for it, and tells its exit code through a pipe.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: IO[bytes]) -> None:
        self._pipe, theirs = os.pipe()
        self.returncode: int | None = None
        try:
            self.pid = _server().serve({"argv": list(argv), "env": dict(env), "cwd": str(cwd)}, log, theirs, self._pipe)
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As of `subprocess.Popen`."""
        if self.returncode is None:
            if not select.select([self._pipe], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"serve, pid {self.pid}", timeout or 0)
            self.returncode = _read_number(self._pipe)
            os.close(self._pipe)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Server:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.commands", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def run(self, order: dict[str, object], out: IO[bytes], err: IO[bytes], timeout: float) -> int:
        socket.send_fds(self._control, [json.dumps(order).encode()], [out.fileno(), err.fileno()])
        pid = int(self._control.recv(LIMIT_ORDER))
        self._control.settimeout(timeout)
        try:
            return int(self._control.recv(LIMIT_ORDER))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._control.settimeout(None)
            self._control.recv(LIMIT_ORDER)
            raise subprocess.TimeoutExpired(str(order["argv"]), timeout) from None
        finally:
            self._control.settimeout(None)

    def serve(self, order: dict[str, object], log: IO[bytes], theirs: int, ours: int) -> int:
        socket.send_fds(self._control, [json.dumps({**order, "stay": True}).encode()], [log.fileno(), theirs])
        assert self._control.recv(LIMIT_ORDER) == b"begun"
        return _read_number(ours)

    def end(self) -> None:
        self._control.close()
        self.process.wait(60)


def _read_number(pipe: int) -> int:
    """The next line; byte by byte, for another may stand behind it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(pipe, 1)
        assert byte, "the process between has died"
        line += byte
    return int(line)


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
        atexit.register(_servers[0].end)
    return _servers[0]


# -- in the process that forks --


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(f"jumpstart_server.{name}")
    parents: list[int] = []
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.set_inheritable(False)
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, LIMIT_ORDER, 2)
            if not data:
                for pid in parents:  # so that the time of all is in the sum
                    os.waitpid(pid, 0)
                return
            order = json.loads(data)
            if any(word.startswith("s3:") for word in order["argv"]):
                importlib.import_module("s3fs")  # a second; tests/integration/test_stores.py alone wants it
            if "stay" in order:
                _reap(parents)
                parents.append(_start_parent(control, order, *descriptors))
                for descriptor in descriptors:
                    os.close(descriptor)
                control.send(b"begun")
                continue
            pid = os.fork()
            if not pid:
                control.close()
                _become(order, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(str(pid).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # who asked is gone
                control.send(str(code).encode())


def _reap(parents: list[int]) -> None:
    parents[:] = [pid for pid in parents if os.waitpid(pid, os.WNOHANG) == (0, 0)]


def _start_parent(control: socket.socket, order: dict[str, object], log: int, pipe: int) -> int:
    """Fork a process that forks the server, waits for it, and writes its pid, then its exit code, into *pipe*."""
    parent = os.fork()
    if parent:
        return parent
    control.close()
    pid = os.fork()
    if not pid:
        os.close(pipe)
        os.setsid()
        _become(order, log, os.dup(log))
    os.close(log)
    os.write(pipe, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # who asked is gone
        os.write(pipe, f"{code}\n".encode())
    os._exit(0)


def _become(order: dict[str, object], out: int, err: int) -> NoReturn:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(order["env"])  # type: ignore[call-overload]
    time.tzset()
    os.chdir(str(order["cwd"]))
    sys.argv[:] = order["argv"]  # type: ignore[call-overload]
    from jumpstart_server.__main__ import main

    main()
    raise AssertionError("the command has not ended")


if __name__ == "__main__":
    main()
