"""
May this process be forked into workers? An audit by name, because «something is wrong» helps nobody.

What must not exist before a fork: other threads (they vanish in the child, with the locks that they hold), sockets
(two processes speak on one connection), event loops (their descriptors are shared). Measured with a real app: running
such things in the parent and the child gave HTTP 500s.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from jumpstart_server.system import IS_LINUX, children


def reasons_not_to_fork(own_descriptors: set[int]) -> list[str]:
    """
    Return why workers must be spawned instead of forked from this process; empty when forking is safe.

    Args:
        own_descriptors: sockets of the server itself: the control channel and the listening sockets.
    """
    if not IS_LINUX:
        return ["forking is only used on Linux"]
    return [*_threads(), *_descriptors(own_descriptors), *(f"child process {pid} is running" for pid in children())]


def _threads() -> list[str]:
    python_threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    reasons = [f"thread {thread.name!r} is running" for thread in python_threads]
    known = {thread.native_id for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in known:
            try:
                name = (task / "comm").read_text().strip()
            except OSError:
                continue  # it has ended meanwhile
            reasons.append(f"native thread {name!r} is running")
    return reasons


def _descriptors(own: set[int]) -> list[str]:
    reasons = []
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        try:
            kind = str(entry.readlink())
        except OSError:
            continue  # the descriptor of this very listing
        if kind.startswith("socket:") and number not in own and not _is_inherited(number):
            reasons.append(f"{_describe_socket(number)} is open")
        elif kind.startswith("anon_inode:[eventpoll]") or kind.startswith("anon_inode:[io_uring]"):
            reasons.append(f"an event loop exists (descriptor {number}, {kind.removeprefix('anon_inode:')})")
    return sorted(reasons)


def _is_inherited(number: int) -> bool:
    """Standard streams may be sockets (inetd, systemd's journal); sharing them is what everyone expects."""
    return number <= 2


def _describe_socket(number: int) -> str:
    try:
        with socket.socket(fileno=os.dup(number)) as held:
            try:
                peer = held.getpeername()
            except OSError:
                return f"socket {held.getsockname() or '(unnamed)'} (descriptor {number})"
            return f"connection to {peer or '(unnamed)'} (descriptor {number})"
    except OSError:
        return f"socket (descriptor {number})"
