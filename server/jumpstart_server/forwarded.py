"""
Who is the client, when a proxy stands between: X-Forwarded-For and X-Forwarded-Proto of proxies that are trusted.

Values in, values out; from any thread. Once per connection a shell asks `TrustedProxies.trusts`; only where that says
yes does it ask `TrustedProxies.origin` of each request.

Not read, because whoever reads one more header trusts one more header that the proxy perhaps does not overwrite and
clients may then write themselves: ``Forwarded`` (RFC 7239), which nginx passes through untouched; ``X-Forwarded-Ssl``
and ``X-Forwarded-Protocol``, which gunicorn reads beside X-Forwarded-Proto; ``X-Real-IP``.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable, Iterable

from jumpstart.errors import ConfigError

Address = tuple[str, int]  # host and port, 0 for a port that nobody knows
_IP = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HOPS = 64  # addresses that are looked at; no chain of proxies is as long, but a header of a client's making may be
REMEMBERED = 1024  # answers kept, of each kind
REMEMBERED_BYTES = 256  # of a header whose answer is kept: ten addresses

_NAMES = frozenset((b"x-forwarded-for", b"x-forwarded-proto"))
_SCHEMES = {b"http": "http", b"https": "https", b"ws": "http", b"wss": "https"}


class TrustedProxies:
    """
    The peers whose word about their clients is taken.

    Attributes:
        text: as it was given.
    """

    __slots__ = ("_all", "_networks", "_remembered_client", "_remembered_trust", "_single", "_unix", "text")

    def __init__(self, text: str, *, option: str = "--forwarded-allow-ips") -> None:
        """
        Args:
            text: addresses, networks, ``unix:`` (peers over a Unix socket) and ``*`` (all), with commas between them.
            option: for the message.

        Raises:
            ConfigError: a word is none of these.
        """
        self.text = text
        self._all = False
        self._unix = False
        self._single: set[_IP] = set()
        self._networks: list[_Network] = []
        for word in filter(None, map(str.strip, text.split(","))):
            if word == "*":
                self._all = True
            elif word in ("unix:", "unix"):
                self._unix = True
            else:
                network = _parse_network(word, option)
                if network.num_addresses == 1:
                    self._single.add(network.network_address)
                else:
                    self._networks.append(network)
        self._remembered_trust: Callable[[str], bool] = functools.lru_cache(REMEMBERED)(self._find_trust)
        self._remembered_client: Callable[[bytes], Address | None] = functools.lru_cache(REMEMBERED)(self._find_client)

    def __repr__(self) -> str:
        return f"TrustedProxies({self.text!r})"

    def trusts(self, host: str | None) -> bool:
        """
        Whether the peer may speak for its clients.

        Args:
            host: its address; None for one over a Unix socket, "" for one that is not known. Never take a peer whose
                address could not be read for one over a Unix socket: one that has reset its connection has none.
        """
        if self._all:
            return True
        if host is None:
            return self._unix
        return self._remembered_trust(host)

    def _find_trust(self, host: str) -> bool:
        ip = _parse_ip(host.partition("%")[0])  # fe80::1%eth0: the kernel says over which interface
        return ip is not None and (ip in self._single or any(ip in network for network in self._networks))

    def origin(
        self, peer: Address | None, scheme: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[Address | None, str]:
        """
        Who sent the request, and over what: ``http`` or ``https``. Only for a peer that `trusts` has named.

        X-Forwarded-For is read from its end, since each proxy adds the address that it has seen: the first one that is
        not trusted is the client; if all are trusted, the one that is farthest away. What lies beyond a word that is no
        address is not believed. Of X-Forwarded-Proto the last word counts, which the nearest proxy wrote.

        Args:
            peer: whom the connection is from; None over a Unix socket.
            scheme: of the connection.
            headers: of the request, names in lower case.

        Returns:
            *peer* and *scheme* where the headers say nothing usable. A port that they do not give is 0.
        """
        forwarded: bytes | None = None
        for name, value in headers:
            if name in _NAMES:
                if name == b"x-forwarded-proto":
                    scheme = _SCHEMES.get(value) or _last_scheme(value, scheme)
                elif forwarded is None:
                    forwarded = value
                else:
                    forwarded += b"," + value  # several lines are one list (RFC 9110 5.3)
        if forwarded is None:
            return peer, scheme
        find = self._remembered_client if len(forwarded) <= REMEMBERED_BYTES else self._find_client
        return find(forwarded) or peer, scheme

    def _find_client(self, forwarded: bytes) -> Address | None:
        client = None
        for word in reversed(forwarded.rsplit(b",", HOPS)[-HOPS:]):
            word = word.strip(b"\t ")
            if not word:
                continue  # RFC 9110 5.6.1.2: empty elements do not count
            address = _parse_address(word)
            if address is None:
                break
            client = address
            if not self.trusts(client[0]):
                break
        return client


def _last_scheme(value: bytes, default: str) -> str:
    return _SCHEMES.get(value.rpartition(b",")[2].strip(b"\t ").lower(), default)


def _parse_network(word: str, option: str) -> _Network:
    try:
        if "%" in word:
            raise ValueError("a zone")
        network: _Network = ipaddress.ip_network(word, strict=False)
    except ValueError:
        allowed = "addresses (10.0.0.1, ::1), networks (10.0.0.0/8), unix: for peers over a Unix socket, or * for all"
        raise ConfigError(f"{option}: {word!r} is not allowed; write {allowed}") from None
    address, slash, _ = word.partition("/")
    if slash and _parse_ip(address) != _unmapped(network.network_address):
        raise ConfigError(f"{option}: {word!r} is an address in a network; write {network} for the network")
    if isinstance(network, ipaddress.IPv6Network) and network.prefixlen >= 96:
        inner = network.network_address.ipv4_mapped
        if inner is not None:
            return ipaddress.IPv4Network((inner, network.prefixlen - 96))
    return network


def _parse_ip(text: str) -> _IP | None:
    try:
        return _unmapped(ipaddress.ip_address(text))
    except ValueError:
        return None


def _unmapped(ip: _IP) -> _IP:
    """``::ffff:10.0.0.1`` is how a socket for both families shows 10.0.0.1."""
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def _parse_address(word: bytes) -> Address | None:
    """``1.2.3.4``, ``1.2.3.4:567``, ``::1``, ``[::1]`` or ``[::1]:567``; None for anything else."""
    try:
        host = word.decode("ascii")
    except UnicodeDecodeError:
        return None
    port = ""
    if host.startswith("["):
        host, bracket, port = host[1:].partition("]")
        if not bracket or ":" not in host or (port and port[0] != ":") or port == ":":
            return None
        port = port[1:]
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
        if not port:
            return None
    # A zone may hold anything, and means nothing on another host.
    if "%" in host or _parse_ip(host) is None or (port and not (port.isdecimal() and len(port) <= 5)):
        return None
    number = int(port or 0)
    return (host, number) if number <= 65535 else None
