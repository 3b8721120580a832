"""
`jumpstart` commands without the start of an interpreter for each: one process imports the command once and forks.

Each fork runs `jumpstart_server.__main__.main` with arguments, environment, working folder and standard streams of its
own, and ends as the command does. What depends on how an interpreter starts (``PYTHONPATH``, ``serve``) is tested with
`subprocess` and the command itself, as is everything about signals. An import of the command costs 0.3 seconds of a
processor, and the tests run some hundreds.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
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
    *("admin", "advise", "config", "early_signals", "envfile", "problems", "profiles", "spawn"),
    *("cli", "cli.build", "cli.foreign", "cli.profile", "cli.status", "export.model"),
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

    def end(self) -> None:
        self._control.close()
        self.process.wait(60)


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
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.set_inheritable(False)
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, LIMIT_ORDER, 2)
            if not data:
                return
            order = json.loads(data)
            if any(word.startswith("s3:") for word in order["argv"]):
                importlib.import_module("s3fs")  # a second; tests/integration/test_stores.py alone wants it
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
