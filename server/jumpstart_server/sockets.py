"""The sockets of one tenant, from the binding of its addresses to the end. They listen when a worker is ready."""

from __future__ import annotations

import errno
import socket

from jumpstart.errors import AddressInUseError, ConfigError
from jumpstart_server import system
from jumpstart_server.addresses import (
    Address,
    FileIdentity,
    addresses_of,
    bind,
    describe,
    identify,
    listen,
    remove_socket_file,
    socket_permissions,
)
from jumpstart_server.privileges import identity_of
from jumpstart_server.settings import Settings


class TenantSockets:
    """
    For the event loop's thread only.

    Attributes:
        all: bound, in the order of the addresses; empty once they are closed.
        is_listening: connections are taken by the kernel, and by workers.
    """

    def __init__(self, settings: Settings) -> None:
        """
        Bind the addresses.

        Raises:
            AddressInUseError, ConfigError: one cannot be bound.
        """
        tenant = settings.tenant
        self.all: list[socket.socket] = []
        self.is_listening = False
        self._tls = bool(tenant.ssl_certfile)
        self._bound: list[tuple[socket.socket, Address, FileIdentity | None]] = []
        permissions = socket_permissions(tenant)
        owner = identity_of(settings.server.user, settings.server.group)
        try:
            for address in addresses_of(tenant):
                sock = bind(address, permissions, owner)
                self.all.append(sock)
                self._bound.append((sock, address, identify(address)))
        except BaseException:
            self.close()
            raise

    def listen(self, backlog: int) -> None:
        """
        Open the ports; again and again does no harm.

        Raises:
            AddressInUseError, ConfigError: one cannot be listened on.
        """
        if self.is_listening:
            return
        for sock, address, file in self._bound:
            try:
                listen(sock, address, file, backlog)
            except OSError as error:
                kind = AddressInUseError if error.errno == errno.EADDRINUSE else ConfigError
                raise kind(f"cannot listen on {describe(sock)}: {error.strerror}") from None
        self.is_listening = True

    def take_no_more(self) -> None:
        """Have newcomers try again: what connects after the last accept would be reset by the closing."""
        for sock, address, _ in self._bound:
            if address.fd < 0:  # one that we were given lives on, and resets nobody
                system.take_no_more(sock)

    def close(self) -> list[str]:
        """Close them, here and in all processes; return the paths whose files cannot be removed."""
        left = []
        for sock, address, file in self._bound:
            if address.fd < 0 and self.is_listening:
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # in every copy, also one that a child of the app inherited
                except OSError:
                    pass  # macOS does not know this for listening sockets
            sock.close()
            try:
                remove_socket_file(address, file)
            except OSError:
                left.append(address.path)
        self._bound.clear()
        self.all.clear()
        self.is_listening = False
        return left

    def urls(self) -> list[str]:
        """The addresses, with real ports."""
        return [describe(sock, tls=self._tls) for sock in self.all]
