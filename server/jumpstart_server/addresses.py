"""
Addresses: from ``host:port``, ``[::1]:8000``, ``unix:/path`` and ``fd://3`` to sockets that are bound only.

A socket that is bound and does not listen refuses connections, which is what a server that is not ready should do.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from jumpstart.errors import AddressInUseError, ConfigError
from jumpstart_server import system
from jumpstart_server.privileges import Identity, give_socket
from jumpstart_server.settings import TenantSettings

logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
LAST_PORT = 65535
NO_SUCH_ADDRESS = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
SUN_PATH_LIMIT = 100  # bytes; sockaddr_un holds 108 on Linux, 104 on BSD and macOS


@dataclass(frozen=True)
class Address:
    """
    One place to serve on: exactly one of *host* (with *port*), *path* or *fd* is set.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    fd: int = -1

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        if self.fd >= 0:
            return f"fd://{self.fd}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int = DEFAULT_PORT, *, option: str = "--bind") -> Address:
    """
    Parse one address, given with *option*.

    Raises:
        ConfigError: it is none of the forms; the message lists them.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if path:
            return Address(path=path)
    elif text.startswith("fd://"):
        if _is_number(text[5:]):
            return Address(fd=int(text[5:]))
    else:
        host, port = text, str(default_port)
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            port = rest[1:] if rest.startswith(":") else (port if bracket and not rest else "")
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if text == host and host.isdecimal() and host.isascii():
            hint = f"write :{text}, or HOST:{text}" if _is_port(text) else f"a port is at most {LAST_PORT}"
            raise ConfigError(f"{option} {text}: {text} is read as a host; {hint}")
        if port.isdecimal() and port.isascii() and not _is_port(port):
            raise ConfigError(f"{option} {text}: a port is at most {LAST_PORT}")
        if _is_port(port) and "/" not in host:
            return Address(host=host or "0.0.0.0", port=int(port))
    raise ConfigError(f"{option} {text}: write HOST:PORT, [IPV6]:PORT, unix:PATH or fd://NUMBER")


def parse_permissions(text: str, *, option: str = "--uds-permissions") -> int:
    """
    Parse file permissions as ``chmod`` takes them: octal digits, with or without ``0o``.

    Raises:
        ConfigError: it is none.
    """
    digits = text.removeprefix("0o")
    if not digits or digits.strip("01234567") or len(digits) > 4 or int(digits, 8) > 0o777:
        raise ConfigError(f"{option}: {text!r} is not allowed; write three octal digits, such as 660 or 022")
    return int(digits, 8)


def socket_permissions(tenant: TenantSettings) -> int:
    """
    Of the Unix sockets that a tenant serves on.

    Everybody may connect by default, as with uvicorn and gunicorn: a proxy mostly runs as another user. These are the
    same local processes that may connect to 127.0.0.1, which is the default address.
    """
    permissions = parse_permissions(tenant.uds_permissions)
    return permissions & ~parse_permissions(tenant.umask) if tenant.umask else permissions


def _is_port(text: str) -> bool:
    return _is_number(text) and int(text) <= LAST_PORT


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10  # int() refuses thousands of digits, C has 32 bits


def addresses_of(tenant: TenantSettings) -> list[Address]:
    """The addresses that the settings ask for; 127.0.0.1:8000 when they name none."""
    if tenant.bind:
        return [parse_address(text) for text in tenant.bind]
    if tenant.uds:
        return [Address(path=tenant.uds)]
    if tenant.fd is not None:
        return [Address(fd=tenant.fd)]
    port = DEFAULT_PORT if tenant.port is None else tenant.port
    return [Address(host=tenant.host or DEFAULT_HOST, port=port)]


def bind(address: Address, permissions: int | None = None, owner: Identity | None = None) -> socket.socket:
    """
    Return a bound, non-blocking socket that does not listen yet and is not inherited by children.

    Args:
        permissions: of the file of a Unix socket; by default as the umask has it. Given, it changes the umask of the
            whole process for a moment: no other thread may make files then.
        owner: who gets the file of a Unix socket.

    Raises:
        AddressInUseError: another process has the address.
        ConfigError: it cannot be bound for another reason.
    """
    try:
        if address.fd >= 0:
            bound = _duplicate(address)
        elif address.path:
            bound = _bind_path(address, permissions)
            if owner is not None:
                give_socket(address.path, owner)
        else:
            bound = _bind_internet(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"{address} is in use by another process") from None
        raise ConfigError(f"cannot serve on {address}: {error.strerror or error}{_remedy(error, address)}") from None
    except (ValueError, OverflowError) as error:  # a NUL in a path, a host name that cannot be encoded, a huge number
        raise ConfigError(f"cannot serve on {address}: {error}") from None
    bound.setblocking(False)
    return bound


def _remedy(error: OSError, address: Address) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"; this host has no address {address.host}: 0.0.0.0 is all that it has, 127.0.0.1 itself"
    if error.errno == errno.EACCES and 0 < address.port < 1024:
        return "; ports below 1024 are root's, see --user"
    return ""


def _duplicate(address: Address) -> socket.socket:
    number = os.dup(address.fd)
    try:
        bound = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
    problem = _why_not_to_serve_on(bound)
    if problem:
        bound.close()
        raise ConfigError(f"cannot serve on {address}: {problem}")
    return bound


def _why_not_to_serve_on(inherited: socket.socket) -> str:
    if inherited.type != socket.SOCK_STREAM:
        return "not a stream socket"
    try:
        inherited.getpeername()
    except OSError:
        return ""
    return "a connection, not a socket that listens; with systemd, say Accept=no in the socket's unit"


def _bind_internet(address: Address) -> socket.socket:
    """``::`` means all addresses of both families, whatever the system's default; without IPv6 those of IPv4."""
    try:
        return _bind_host(address)
    except OSError as error:
        if error.errno not in NO_SUCH_ADDRESS or ":" not in address.host:
            raise
        if address.host.strip("0:"):
            raise ConfigError(f"cannot serve on {address}: no such address here, perhaps no IPv6 at all") from None
        logger.warning("there is no IPv6 here: 0.0.0.0:%d in place of %s", address.port, address)
        return _bind_host(Address(host="0.0.0.0", port=address.port))


def _bind_host(address: Address) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, name = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and name[0] == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(name)
    except BaseException:
        bound.close()
        raise
    return bound


def _bind_path(address: Address, permissions: int | None) -> socket.socket:
    path = Path(address.path)
    if len(os.fsencode(address.path)) > SUN_PATH_LIMIT:
        raise ConfigError(
            f"cannot serve on {address}: the path is longer than {SUN_PATH_LIMIT} bytes, which sockets do not take"
        )
    remove_dead_socket(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind_with(bound, address.path, permissions)
    except BaseException:
        bound.close()
        raise
    return bound


def _bind_with(bound: socket.socket, path: str, permissions: int | None) -> None:
    """
    Bind to a path that does not exist; a symbolic link counts as something that exists.

    By the umask and not by chmod afterwards, which would follow a link that somebody puts there in between.
    """
    if permissions is None:
        bound.bind(path)
        return
    before = os.umask(0o777 & ~permissions)
    try:
        bound.bind(path)
    finally:
        os.umask(before)


FileIdentity = tuple[int, int]


def identify(address: Address) -> FileIdentity | None:
    """Device and inode of the file of a Unix socket that was just bound; None where there is no file."""
    try:
        found = Path(address.path).lstat() if address.path else None
    except FileNotFoundError:
        found = None
    return (found.st_dev, found.st_ino) if found is not None else None


def listen(bound: socket.socket, address: Address, identity: FileIdentity | None, backlog: int) -> None:
    """
    Let clients come. Of servers that hold one address without listening, the first to come here has it.

    Args:
        identity: of the file of a Unix socket, when it was bound.

    Raises:
        OSError: it cannot listen. EADDRINUSE: another server has the address meanwhile, or the file is gone.
    """
    if identity is not None and identify(address) != identity:
        raise OSError(errno.EADDRINUSE, "another server has put its socket there, or the file was removed")
    bound.listen(backlog)


def remove_socket_file(address: Address, identity: FileIdentity | None) -> None:
    """
    Unlink the file of a socket of ours; nothing where somebody, another server perhaps, has put something else there.

    Raises:
        OSError: the folder does not allow it.
    """
    if identity is not None and identify(address) == identity:
        Path(address.path).unlink(missing_ok=True)


def remove_dead_socket(path: Path) -> None:
    """
    Unlink a socket file that nobody serves any more; a live one or anything else that lies there is left alone.

    Raises:
        AddressInUseError: somebody serves on it.
        ConfigError: something that is not a socket lies there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"unix:{path}: something that is not a socket lies there; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
        listener = system.listener_of(probe)
    by = f"process {listener}" if listener else "another process"
    raise AddressInUseError(f"unix:{path} is in use by {by}")


def describe(bound: socket.socket, *, tls: bool = False) -> str:
    """The URL of a bound socket, with the real port."""
    scheme = "https" if tls else "http"
    name = bound.getsockname()
    if bound.family == socket.AF_UNIX:
        return f"unix:{name if isinstance(name, str) else os.fsdecode(name)}"
    return f"{scheme}://{Address(host=name[0], port=name[1])}"
