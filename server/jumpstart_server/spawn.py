"""
Starting the processes that hold the app: always a fresh interpreter, which then reads what it is to be.

An interpreter takes as long to start and to import the server's own code as settings take to be parsed. So
`jumpstart serve` starts the first one before it does anything else, and tells it its role when it knows.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from jumpstart_server.early_signals import HELD_SIGNALS

OF_THE_SERVICE_MANAGER = frozenset(
    {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
)
"""Variables that are for this process alone: a child that heeds them would take our sockets, or speak for us."""


class Interpreter:
    """A child that waits for its `Start`, or has had it. *control* is our end of its channel."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self._is_ours_to_end = True

    def tell(self, message: bytes, descriptors: list[int]) -> None:
        """
        Send the first message, with the sockets that it names.

        Raises:
            OSError: the process is gone.
        """
        socket.send_fds(self.control, [message], descriptors)

    def release(self) -> None:
        """Leave its end, and its collection, to somebody who collects all children."""
        self._is_ours_to_end = False

    def end(self) -> None:
        """Kill and collect it, unless it was collected or released."""
        if self._is_ours_to_end:
            self._is_ours_to_end = False
            self.control.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def start_interpreter(label: str) -> Interpreter:
    """
    Start ``python -m jumpstart_server.mold``.

    It inherits the environment and the flags of this interpreter. SIGINT is blocked in it until it has a handler, so
    that a Ctrl-C in its first moments leaves no traceback of ours on the terminal; `HELD_SIGNALS` are, too.

    Args:
        label: shown by ps; nothing else.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        # -P: a folder of the user's with a file called logging.py must not come first on sys.path.
        safe_path = [] if "-P" in flags else ["-P"]
        words = [sys.executable, *flags, *safe_path, "-m", "jumpstart_server.mold", str(theirs.fileno()), label]
        _keep_listeners()
        pid = os.posix_spawn(
            sys.executable,
            words,
            without_service_variables(os.environ),
            setsigmask=[signal.SIGINT, *HELD_SIGNALS],
            setsigdef=[signal.SIGCHLD],
        )
    return Interpreter(pid, ours)


def without_service_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """*environ* as children get it."""
    return {name: value for name, value in environ.items() if name not in OF_THE_SERVICE_MANAGER}


def _keep_listeners() -> None:
    """
    Inherited sockets that listen (``--fd``, systemd's) are ours: molds get copies of their own beside `Start`.

    An app would hand them on to its subprocesses, and the port would be held when all of us are gone.
    """
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208  # pathlib costs an import of its own
    except OSError:
        return
    for number in numbers:
        try:
            if number > 2 and os.get_inheritable(number) and _listens(number):
                os.set_inheritable(number, False)
        except OSError:
            pass  # the descriptor of that very listing


def _listens(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as held:
        return bool(held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
