"""
What a service manager that speaks systemd's protocol tells us and wants to hear: activated sockets and notifications.

Both protocols are a few variables and a datagram (sd_listen_fds(3), sd_notify(3)); they need nothing of systemd.
`config.py` reads the variables, and `spawn.py` takes them out for children, who would speak for us otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jumpstart.errors import ConfigError

logger = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
UNNAMED = "unknown"  # what systemd calls a socket whose unit gives no FileDescriptorName=
PATIENCE = 1.0  # seconds to wait for a service manager that does not read
EXTENSION = 30.0  # seconds by which a boot that goes on moves the manager's time limit
LOOK_INTERVAL = 5.0  # seconds between two such moves


@dataclass(frozen=True)
class ActivatedSocket:
    """A socket that we were started with; *name* is its ``FileDescriptorName=``."""

    descriptor: int
    name: str


def activated_sockets(environ: Mapping[str, str], pid: int) -> list[ActivatedSocket]:
    """
    Return the sockets that the service manager passed to the process *pid*; none where they are for another.

    Raises:
        ConfigError: the variables are there and make no sense.
    """
    if environ.get("LISTEN_PID") != str(pid):
        return []
    text = environ.get("LISTEN_FDS", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise ConfigError(f"LISTEN_FDS={text}: not a number of sockets; the service manager that started us sets it")
    names = environ.get("LISTEN_FDNAMES", "").split(":") if environ.get("LISTEN_FDNAMES") else []
    return [
        ActivatedSocket(FIRST_DESCRIPTOR + index, names[index] if index < len(names) else UNNAMED)
        for index in range(int(text))
    ]


def addresses_of_tenant(
    bind: Sequence[str],
    sockets: Sequence[ActivatedSocket],
    tenant: str,
    *,
    has_address: bool,
    is_alone: bool,
    option: str = "--bind",
) -> tuple[str, ...]:
    """
    Return *bind* with the activated sockets in it, each as ``fd://NUMBER``. Pure.

    ``fd://NAME`` stands for all sockets of that name. A tenant without any address takes all sockets when it is alone,
    and those that bear its name when it is not. *option* is where *bind* stands, for the error.

    Raises:
        ConfigError: there is no socket of a name that *bind* asks for.
    """
    if not has_address:
        return tuple(f"fd://{each.descriptor}" for each in sockets if is_alone or each.name == tenant)
    resolved: list[str] = []
    for text in bind:
        name = text.removeprefix("fd://")
        if name == text or not name[:1].isalpha():
            resolved.append(text)
            continue
        found = [f"fd://{each.descriptor}" for each in sockets if each.name == name]
        if not found:
            passed = ", ".join(each.name for each in sockets) or "none at all"
            raise ConfigError(
                f"{option} {text}: the service manager passed no socket of this name (FileDescriptorName=), but "
                f"{passed}; correct the name, or name the socket's number: fd://3"
            )
        resolved += found
    return tuple(resolved)


class Notifier:
    """
    Tells the service manager how we are. Does nothing where there is none; never raises. For one thread.

    `run` keeps the manager patient while we boot and feeds its watchdog for as long as the event loop turns.
    """

    def __init__(
        self, environ: Mapping[str, str], pid: int, clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000
    ) -> None:
        """
        Args:
            environ: ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID`` are read.
            pid: ours.
            clock_us: CLOCK_MONOTONIC in microseconds.
        """
        self._pid = pid
        self._clock_us = clock_us
        self._address = _socket_address(environ.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_seconds(environ, pid)
        self._is_ready = False
        self._complained = False

    @property
    def is_wanted(self) -> bool:
        """Whether anybody listens."""
        return self._address is not None

    def ready(self, status: str = "") -> None:
        """The first worker accepts, or a roll has ended."""
        self._is_ready = True
        self._send("READY=1", f"MAINPID={self._pid}", *_status(status))

    def reloading(self, status: str = "") -> None:
        """A roll begins. `ready` ends it, however it went: the server that we are is ready again."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={self._clock_us()}", *_status(status))

    def stopping(self, status: str = "", *, within_s: float = 0.0) -> None:
        """We drain; it may take *within_s* seconds, which the manager is asked to wait."""
        self._is_ready = True
        extension = [f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}"] if within_s else []
        self._send("STOPPING=1", *extension, *_status(status))

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send(*_status(text))

    async def run(self) -> None:
        """Until cancelled: ask for more time while we are not ready, and feed the watchdog at half of its time."""
        if self._address is None:
            return
        interval = min(LOOK_INTERVAL, self._watchdog_s / 2) if self._watchdog_s else LOOK_INTERVAL
        while True:
            if not self._is_ready:
                self._send(f"EXTEND_TIMEOUT_USEC={int(EXTENSION * 1e6)}", patience_s=0.0)
            if self._watchdog_s:
                self._send("WATCHDOG=1", patience_s=0.0)
            await asyncio.sleep(interval)

    def _send(self, *lines: str, patience_s: float = PATIENCE) -> None:
        """Without *patience_s* what finds no room is left out: its like comes again, and the event loop has to turn."""
        if self._address is None or not lines:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(patience_s)
                sender.sendto("\n".join(lines).encode("utf-8", "backslashreplace"), self._address)
        except BlockingIOError:
            pass
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("NOTIFY_SOCKET: the service manager cannot be told %s: %s", lines[0], error)


def _status(text: str) -> list[str]:
    return [f"STATUS={' '.join(text.split())}"] if text else []


def _socket_address(text: str) -> str | bytes | None:
    if text.startswith("@"):
        return b"\0" + os.fsencode(text[1:])
    if text.startswith("/"):
        return text
    if text:
        logger.warning("NOTIFY_SOCKET=%s: neither a path nor an abstract socket; nobody is notified", text)
    return None


def _watchdog_seconds(environ: Mapping[str, str], pid: int) -> float:
    """0 where there is no watchdog, or it looks at another process."""
    text = environ.get("WATCHDOG_USEC", "")
    if not (text.isascii() and text.isdecimal()) or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return 0.0
    return int(text) / 1e6
