"""
Starting the processes that hold the app: always a fresh interpreter, which then reads what it is to be.

An interpreter takes as long to start and to import the server's own code as settings take to be parsed. So
`jumpstart serve` starts the first one before it does anything else, and tells it its role when it knows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jumpstart_server import system
from jumpstart_server.early_signals import HELD_SIGNALS

EXIT_GRACE = 5.0  # seconds for the app's exit hooks, in a process that has done what it was for
HELPER_GRACE = 1.0  # seconds that processes which the app left behind may take to end on SIGTERM
LOOK_INTERVAL = 0.005  # seconds

OF_THE_SERVICE_MANAGER = frozenset(
    {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
)
"""Variables that are for this process alone: a child that heeds them would take our sockets, or speak for us."""


class Interpreter:
    """A child that waits for its `Start`, or has had it. *control* is our end of its channel."""

    def __init__(self, pid: int, control: socket.socket, *, leads_group: bool = False) -> None:
        self.pid = pid
        self.control = control
        self._leads_group = leads_group
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

    def end(self, patience_s: float = 0.0) -> None:
        """
        Kill and collect it, unless it was collected or released, or ends by itself within *patience_s* seconds.

        Where it leads a group, what the app has started and left there is ended too.
        """
        if self._is_ours_to_end:
            self._is_ours_to_end = False
            try:
                _wait_until(lambda: system.has_ended(self.pid), patience_s)
            finally:
                self.control.close()
                os.kill(self.pid, signal.SIGKILL)
                if self._leads_group:
                    _end_group(self.pid)
                os.waitpid(self.pid, 0)


@contextlib.contextmanager
def lone_interpreter(label: str) -> Iterator[Interpreter]:
    """
    An interpreter that serves nobody, for the length of the context; nothing of it is left then.

    What runs to the end of the context may end by itself, with its exit hooks. It leads a process group, so that
    helpers which the app has started can be found, and Ctrl-C is for us alone.
    """
    interpreter = start_interpreter(label, leads_group=True)
    patience_s = 0.0
    try:
        yield interpreter
        patience_s = EXIT_GRACE
    finally:
        interpreter.end(patience_s)


def _end_group(leader: int) -> None:
    """End the others of a group, while its *leader* is not collected, so that the number is no other group's."""
    if system.group_members(leader):
        os.killpg(leader, signal.SIGTERM)
        _wait_until(lambda: not system.group_members(leader), HELPER_GRACE)
        os.killpg(leader, signal.SIGKILL)


def _wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up and not is_so():
        time.sleep(LOOK_INTERVAL)


def start_interpreter(label: str, *, leads_group: bool = False) -> Interpreter:
    """
    Start ``python -m jumpstart_server.mold``.

    It inherits the environment and the flags of this interpreter. SIGINT is blocked in it until it has a handler, so
    that a Ctrl-C in its first moments leaves no traceback of ours on the terminal; `HELD_SIGNALS` are, too.

    Args:
        label: shown by ps; nothing else.
        leads_group: it leads a process group of its own; else it is in ours.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        # -P: a folder of the user's with a file called logging.py must not come first on sys.path.
        safe_path = [] if "-P" in flags else ["-P"]
        words = [sys.executable, *flags, *safe_path, "-m", "jumpstart_server.mold", str(theirs.fileno()), label]
        _keep_listeners()
        group: dict[str, Any] = {"setpgroup": 0} if leads_group else {}
        pid = os.posix_spawn(
            sys.executable,
            words,
            without_service_variables(os.environ),
            setsigmask=[signal.SIGINT, *HELD_SIGNALS],
            setsigdef=[signal.SIGCHLD],
            **group,
        )
    return Interpreter(pid, ours, leads_group=leads_group)


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
