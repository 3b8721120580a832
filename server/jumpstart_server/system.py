"""The few things that we ask of Linux and that the standard library does not offer. Elsewhere they do nothing."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
DROP_SYN = (  # linux/filter.h, classic BPF; a TCP socket's filter sees the TCP header first, with its flags in byte 13
    (0x30, 0, 0, 13),  # load them
    (0x54, 0, 0, 0x12),  # of these, SYN and ACK
    (0x15, 0, 1, 0x02),  # only SYN?
    (0x06, 0, 0, 0),  # then keep no byte of the packet,
    (0x06, 0, 0, 0xFFFFFFFF),  # else all
)

IS_LINUX = sys.platform == "linux"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parent dies: how a worker outlives its mold."""
    if IS_LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, patience_s: float = 2.0) -> None:
    """
    Have the kernel kill this process when *parent* dies, even while it holds the GIL.

    Waits up to *patience_s* seconds until *parent* has adopted us (after a double fork), then exits at once if it is
    gone already. In a container *parent* may be PID 1.
    """
    if not IS_LINUX:
        return
    give_up = time.monotonic() + patience_s
    while os.getppid() != parent and time.monotonic() < give_up:
        time.sleep(0.001)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def take_no_more(sock: socket.socket) -> None:
    """
    Have the kernel drop each SYN for a listening TCP socket; connections that it has begun can be accepted.

    Who connects meanwhile is not answered, tries again a second later, and is refused once the socket is closed.
    """
    if IS_LINUX and sock.family in (socket.AF_INET, socket.AF_INET6):
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in DROP_SYN))
        try:
            sock.setsockopt(
                socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(DROP_SYN), ctypes.addressof(code))
            )
        except OSError:
            pass  # a kernel without filters: who connects in the last millisecond may see a reset


def listener_of(connected: socket.socket) -> int:
    """The pid of who made the Unix socket at the other end listen; 0 where that cannot be known."""
    if not IS_LINUX:
        return 0
    try:
        found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return 0
    pid: int = struct.unpack("3i", found)[0]
    return max(pid, 0)


def children() -> list[int]:
    """The pids of this process's children, adopted ones too; empty where the kernel does not list them."""
    found: list[int] = []
    try:
        for task in Path("/proc/self/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
    except OSError:
        pass  # not Linux, or a kernel without CONFIG_PROC_CHILDREN
    return found


def has_ended(pid: int) -> bool:
    """Whether our child has ended, and waits to be collected."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def group_members(leader: int) -> list[int]:
    """The living processes of a process group, without its leader; empty where the kernel does not list them."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold anything: state, parent, group.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if int(group) == leader and state not in (b"Z", b"X") and path.parent.name != str(leader):
            found.append(int(path.parent.name))
    return found


def dump_stacks_after(seconds: float) -> None:
    """Write the stacks of all threads to standard error when *seconds* have passed, unless `cancel_dump` is called."""
    try:
        # Descriptor 2 and not sys.stderr, which apps replace by things without a descriptor.
        faulthandler.dump_traceback_later(seconds, exit=False, file=2)
    except (OSError, RuntimeError, ValueError):
        pass  # a help for people who look for a stuck import, and nothing more


def cancel_dump() -> None:
    """Forget what `dump_stacks_after` was to do."""
    faulthandler.cancel_dump_traceback_later()


def end_at_once() -> None:
    """End this process without a word to anybody: it has lost its descriptors, and the way to its parent with them."""
    os._exit(1)


def describe_status(status: int) -> str:
    """A wait status in words: ``exit code 3``, ``SIGKILL``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


_connect = ctypes.CDLL(None).connect
_NOBODY = struct.pack("H14x", socket.AF_UNSPEC)
_NO_LINGERING = struct.pack("ii", 1, 0)


def reset_at_close(sock: socket.socket) -> None:
    """
    Let the close be a reset, which nobody takes for the end of a body; what is not sent yet is lost.

    Raises:
        OSError: the socket is closed.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)


def reset_connection(sock: socket.socket) -> bool:
    """
    Reset a TCP connection without closing it, whoever else has a copy of it; whether that was done.

    A socket that is connected to nobody is reset (connect(2), AF_UNSPEC). Unix sockets have no such thing.
    """
    if sock.family == socket.AF_UNIX:
        return False
    failed: int = _connect(sock.fileno(), _NOBODY, len(_NOBODY))
    return not failed
