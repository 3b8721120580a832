"""
The effect guard: what a request that nobody asked for may not do to others.

A shadow request runs the app's own code, which may send mail, charge a card or write a row. The guard of its
`RequestContext` refuses that with `EffectRefused` before anything leaves the process. Here is what is allowed and what
was refused; `jumpstart/effects.py` notices effects and asks.

The guard steps aside while a module is imported: what a module does then it does once in each process, whoever imports
it, and one that is refused in the middle would leave half of itself behind for real requests (a metric that is
registered twice, a model that is there already).

It is a guard against accidents, not a sandbox: code that means to get around it can. docs/shadow.md says what it sees.
"""

from __future__ import annotations

import contextvars
import importlib
import ipaddress
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from types import FrameType

import msgspec

from jumpstart.context import current
from jumpstart.errors import ConfigError, EffectRefused
from jumpstart.statements import is_read_only, without_values

logger = logging.getLogger(__name__)

MAX_KINDS = 200  # refusals that are told apart; the rest are counted together
MAX_WHAT = 200  # characters
MAX_ADDRESSES = 1000  # of one allowed name; a service behind DNS that changes has some dozens
RESOLVE_AGAIN_S = 30.0  # seconds in which an allowed name is looked up here at most once
OTHER = "(other)"


class Effect(StrEnum):
    """What is refused."""

    CONNECT = "connect"  # a new connection, or a datagram
    SEND = "send"  # on a connection that is open
    WRITE = "write"  # to the file system
    PROCESS = "process"
    SIGNAL = "signal"
    THREAD = "thread"  # one that the guard could not follow
    SQL = "sql"  # a statement that writes


_VERBS = {
    Effect.CONNECT: "connect to",
    Effect.SEND: "send to",
    Effect.WRITE: "write to",
    Effect.PROCESS: "start the process",
    Effect.SIGNAL: "send the signal",
    Effect.THREAD: "start the thread",
    Effect.SQL: "run the statement",
}
_REMEDIES = {
    Effect.CONNECT: ", or list the address in shadow_allow if a second request to it does no harm",
    Effect.SEND: ", or list the address in shadow_allow if a second request to it does no harm",
    Effect.WRITE: ", or list the folder as file:/FOLDER in shadow_allow",
    Effect.THREAD: ", or use a ThreadPoolExecutor or asyncio.to_thread, into which the guard follows",
}


class Refusal(msgspec.Struct, frozen=True):
    """How often one thing was refused to one route."""

    route: str
    effect: str
    what: str
    count: int


# --- what is allowed ------------------------------------------------------------------------------------------------

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Allowed(msgspec.Struct, frozen=True):
    """
    What ``shadow_allow`` lists.

    Attributes:
        networks: addresses or networks, each with its port; None stands for every port.
        names: host names in lower case, likewise.
        sockets: paths of Unix sockets.
        folders: real paths of folders that may be written to.
    """

    networks: tuple[tuple[Network, int | None], ...] = ()
    names: tuple[tuple[str, int | None], ...] = ()
    sockets: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def parse_allowed(entries: Iterable[str], *, option: str = "shadow_allow") -> Allowed:
    """
    Read ``host:port``, ``host:*``, ``[IPv6]:port``, ``network/bits:port``, ``unix:/path`` and ``file:/folder``.

    Raises:
        ConfigError: an entry is none of these; the message names it and *option*.
    """
    networks: list[tuple[Network, int | None]] = []
    names: list[tuple[str, int | None]] = []
    sockets: list[str] = []
    folders: list[str] = []
    for entry in entries:
        kind, _, path = entry.partition(":")
        if kind in ("unix", "file"):
            if not path.startswith("/"):
                raise ConfigError(f"{option}: {entry!r} must have an absolute path: {kind}:/path")
            (sockets if kind == "unix" else folders).append(os.path.realpath(path))
            continue
        host, colon, port_text = entry.rpartition(":")
        port = None if port_text == "*" else int(port_text) if port_text.isascii() and port_text.isdigit() else -1
        bare = host.removeprefix("[").removesuffix("]")
        if not colon or not bare or (port is not None and not 0 < port < 65536) or (":" in bare and bare == host):
            raise ConfigError(f"{option}: {entry!r} must be host:port, host:*, [IPv6]:port, unix:/path or file:/folder")
        try:
            networks.append((ipaddress.ip_network(bare, strict=False), port))
        except ValueError:
            if not re.fullmatch(r"[\w.-]+", bare):
                raise ConfigError(f"{option}: {bare!r} in {entry!r} is no host name, address or network") from None
            if bare.lower() == "localhost":
                networks += [(ipaddress.ip_network("127.0.0.0/8"), port), (ipaddress.ip_network("::1"), port)]
            names.append((bare.lower(), port))
    return Allowed(tuple(networks), tuple(names), tuple(sockets), tuple(folders))


class KnownNames:
    """
    Which addresses allowed host names have: connections are made to addresses.

    What the app looks up itself is noted by `effects`; what it learnt by other means is looked up here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[str, set[str]] = {}
        self._asked_at: dict[str, float] = {}

    def want(self, name: str) -> None:
        """Note what *name*, in lower case, has from now on."""
        with self._lock:
            self._addresses.setdefault(name, set())

    def note(self, name: str, addresses: Iterable[str]) -> None:
        """Take the result of somebody's look-up."""
        with self._lock:
            known = self._addresses.get(name)
            if known is not None and len(known) < MAX_ADDRESSES:
                known.update(addresses)

    def has(self, name: str, address: str) -> bool:
        """
        Whether *name* has *address*. May wait for a look-up, once in a while; in the thread of an event loop, which
        others need, the look-up is for the next one who asks.
        """
        with self._lock:
            if address in self._addresses.get(name, ()):
                return True
            now = time.monotonic()
            if now - self._asked_at.get(name, -RESOLVE_AGAIN_S) < RESOLVE_AGAIN_S:
                return False
            self._asked_at[name] = now
        if _is_in_event_loop():
            thread = threading.Thread(target=self._look_up, args=(name,), name="jumpstart-names", daemon=True)
            contextvars.Context().run(thread.start)
            return False
        self._look_up(name)
        with self._lock:
            return address in self._addresses.get(name, ())

    def _look_up(self, name: str) -> None:
        import socket  # loaded long since where somebody connects

        try:
            self.note(name, {str(each[4][0]) for each in socket.getaddrinfo(name, None)})
        except OSError:
            pass  # asked again in a while


def _is_in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


names = KnownNames()

_FREE_FILES = re.compile(r"/dev/(?:null|zero|full|tty|stdout|stderr|fd/\d+|pts/\d+)")
_BYTECODE = re.compile(r".+\.pyc(?:\.\d+)?")  # with the number of importlib's temporary file


def _is_bytecode(path: Path) -> bool:
    """What an import writes beside the source. Refused, it would break the import."""
    if path.name == "__pycache__" or (sys.pycache_prefix and path.is_relative_to(sys.pycache_prefix)):
        return True
    return path.parent.name == "__pycache__" and _BYTECODE.fullmatch(path.name) is not None


# --- the guard ------------------------------------------------------------------------------------------------------

_RUNS_IMPORT = importlib._bootstrap._load_unlocked.__code__  # type: ignore[attr-defined]  # loads a module, runs it


def _imports_under_way() -> int:
    """How many modules the current thread is importing, one inside the other."""
    frame: FrameType | None = sys._getframe()
    number = 0
    while frame is not None:
        number += frame.f_code is _RUNS_IMPORT
        frame = frame.f_back
    return number


def _temporary_folders() -> tuple[str, ...]:
    """Where anybody may write; without a real one, Python takes the working folder, which is no such place."""
    folder = tempfile.gettempdir()
    return () if os.path.realpath(folder) == str(Path.cwd()) else (folder,)


class EffectGuard:
    """
    The guard of a tenant in one process. From any thread.

    The first one of a process installs the watch points, for good: a Python audit hook cannot be taken out. Make it
    before the app is imported; SQLite connections that are open already are not watched.
    """

    def __init__(self, allow: Iterable[str] = (), *, folders: Iterable[str] | None = None) -> None:
        """
        Args:
            allow: as `parse_allowed` takes it.
            folders: that may be written to; by default the system's temporary folder.

        Raises:
            ConfigError: *allow* is wrong.
        """
        from jumpstart import effects  # it imports socket, which `import jumpstart` need not

        self._allowed = parse_allowed(allow)
        free = _temporary_folders() if folders is None else folders
        self._folders = (*(os.path.realpath(folder) for folder in free), *self._allowed.folders)
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], int] = {}
        self.refused = 0
        for name, _ in self._allowed.names:
            names.want(name)
        effects.install()

    def of(self, route: str) -> Guard:
        """The guard of one request; *route* is its name in errors and in the report, as ``GET /checkout``."""
        return Guard(self, route)

    def refusals(self) -> tuple[Refusal, ...]:
        """What was refused so far, the most frequent first; `MAX_KINDS` kinds at most, and the rest as one."""
        with self._lock:
            found = [Refusal(*key, count) for key, count in self._counts.items()]
        return tuple(sorted(found, key=lambda each: -each.count))

    def note(self, route: str, effect: Effect, what: str) -> None:
        """Count a refusal; the first of its kind is logged."""
        key = (route, effect.value, what)
        with self._lock:
            self.refused += 1
            is_new = key not in self._counts
            if is_new and len(self._counts) >= MAX_KINDS:
                key, is_new = (OTHER, effect.value, OTHER), False
            self._counts[key] = self._counts.get(key, 0) + 1
        if is_new:  # outside of the request: its guard has no say in where the line goes
            line = "shadow request: %s was refused: %s %s"
            contextvars.Context().run(logger.warning, line, route, effect.value, what)

    def allows_address(self, host: str, port: int) -> bool:
        """Whether *host*, a name or an address, may be spoken to at *port*."""
        allowed = self._allowed
        bare = host.partition("%")[0].lower()  # fe80::1%eth0
        try:
            address: Address = ipaddress.ip_address(bare)
        except ValueError:
            if bare == "localhost":
                return self.allows_address("127.0.0.1", port)
            return any(name == bare.rstrip(".") and at in (None, port) for name, at in allowed.names)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        for network, at in allowed.networks:
            if at in (None, port) and address.version == network.version and address in network:
                return True
        return any(at in (None, port) and names.has(name, str(address)) for name, at in allowed.names)

    def allows_socket(self, path: str) -> bool:
        """Whether the Unix socket at *path* may be spoken to."""
        return os.path.realpath(path) in self._allowed.sockets

    def allows_write(self, path: str, *, follow: bool) -> bool:
        """
        Whether *path* may be written to.

        Args:
            follow: the file that a symbolic link leads to is meant, and not the link.
        """
        plain = Path(path).absolute()
        if _FREE_FILES.fullmatch(str(plain)):
            return True
        real = Path(os.path.realpath(plain)) if follow else Path(os.path.realpath(plain.parent), plain.name)
        return _is_bytecode(real) or any(real.is_relative_to(folder) for folder in self._folders)


class Guard:
    """The guard of one request, in ``RequestContext.guard``. Made where the request is about to run."""

    __slots__ = ("_imports", "_of", "_writes", "route")

    def __init__(self, of: EffectGuard, route: str, *, writes: bool = False) -> None:
        self._of = of
        self._writes = writes
        self._imports = _imports_under_way()  # those that the whole server may run in
        self.route = route

    def of_logging(self) -> Guard:
        """The guard of a log line: files may be opened, written and rotated for it."""
        return Guard(self._of, self.route, writes=True)

    def refuse(self, effect: Effect, what: str) -> None:
        """
        Count the refusal, unless a module is being imported, or the request was over long ago.

        Raises:
            EffectRefused: always, but for these.
        """
        request = current()
        if request is not None and time.monotonic() >= request.lapses:
            return
        if _imports_under_way() > self._imports:
            return
        what = what.encode("utf-8", "backslashreplace").decode()
        what = what if len(what) <= MAX_WHAT else what[: MAX_WHAT - 1] + "…"
        self._of.note(self.route, effect, what)
        message = (
            f"{self.route}: a shadow or warm-up request may not {_VERBS[effect]} {what}. "
            f"Skip it where jumpstart.is_warmup() is true{_REMEDIES.get(effect, '')}"
        )
        raise EffectRefused(message, self.route, effect.value, what)

    def check_address(self, host: str, port: int, effect: Effect = Effect.CONNECT) -> None:
        """
        Raises:
            EffectRefused: nobody may speak to it; as the following.
        """
        if not self._of.allows_address(host, port):
            self.refuse(effect, f"{f'[{host}]' if ':' in host else host}:{port}")

    def check_socket(self, path: str, effect: Effect = Effect.CONNECT) -> None:
        """A Unix socket; those without a name are this process's own pairs."""
        if path and not self._of.allows_socket(path):
            self.refuse(effect, f"unix:{path}")

    def check_write(self, path: str, *, follow: bool = True) -> None:
        """A path that is about to be opened for writing, made, renamed, removed."""
        if not self._writes and not self._of.allows_write(path, follow=follow):
            self.refuse(Effect.WRITE, str(Path(path).absolute()))

    def check_sql(self, sql: object) -> None:
        """A statement for a database, wherever it is: an address that is allowed may be read from."""
        text = sql.decode("utf-8", "replace") if isinstance(sql, bytes) else str(sql)
        if not is_read_only(text):
            self.refuse(Effect.SQL, without_values(text))
