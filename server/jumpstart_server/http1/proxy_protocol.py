"""
The PROXY protocol, versions 1 and 2: the bytes with which a load balancer begins a connection, to say for whom.

Bytes in, answer out; what the answer is does not depend on how the bytes were cut. The header is never guessed: where
the operator has asked for it, a connection without it is refused, or clients could leave it out, or write it.
Reference: HAProxy's doc/proxy-protocol.txt. Extensions (TLVs) are skipped.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from typing import Literal

import msgspec

ProxyProtocol = Literal["off", "v1", "v2", "auto"]

V1_BEGIN = b"PROXY "
V1_BYTES = 107  # the longest line, with its end
V2_BEGIN = b"\r\n\r\n\0\r\nQUIT\n"
V2_FIXED_BYTES = 16
V2_BYTES = 4096  # of addresses and extensions; two paths are 216, nginx takes as many

_PORT = re.compile(rb"0|[1-9][0-9]{0,4}")
_BEGINS: dict[str, tuple[bytes, ...]] = {"v1": (V1_BEGIN,), "v2": (V2_BEGIN,), "auto": (V1_BEGIN, V2_BEGIN)}
_IPv4 = ipaddress.IPv4Address
_IPv6 = ipaddress.IPv6Address
_V1_FAMILIES: dict[bytes, type[_IPv4] | type[_IPv6]] = {b"TCP4": _IPv4, b"TCP6": _IPv6}
_V2_ADDRESS_BYTES = {0: 0, 1: 12, 2: 36, 3: 216}  # family: none, IPv4, IPv6, Unix
_STREAM = 1


class ProxyHeaderError(Exception):
    """The connection does not begin as it must, and is to be closed without an answer. For the peer's operator."""


class ProxyHeader(msgspec.Struct, frozen=True, gc=False):
    """
    What a header says, and what came behind it.

    Attributes:
        client, server: the two ends of the connection that the proxy relays; None where it names none of TCP.
        is_local: the proxy speaks for itself, as in a health check; the connection's own addresses are the true ones.
            Without this and without *client*, nobody knows who the client is.
        rest: the bytes behind the header.
    """

    client: tuple[str, int] | None
    server: tuple[str, int] | None
    is_local: bool
    rest: bytes


def read_proxy_header(data: bytes, version: ProxyProtocol) -> ProxyHeader | None:
    """
    Read the header at the begin of a connection; None while it has not come whole.

    Args:
        data: all bytes of the connection so far. More than `V2_FIXED_BYTES` + `V2_BYTES` are never needed.
        version: which one the operator allows, not ``off``.

    Raises:
        ProxyHeaderError: there is none, or it breaks the rules.
    """
    for begin in _BEGINS[version]:
        if data.startswith(begin):
            return _read_v1(data) if begin is V1_BEGIN else _read_v2(data)
        if begin.startswith(data):
            return None
    raise ProxyHeaderError("no PROXY header" + ("" if version == "auto" else f" of {version}"))


def _read_v1(data: bytes) -> ProxyHeader | None:
    end = data.find(b"\n", 0, V1_BYTES)
    if end < 0:
        if len(data) >= V1_BYTES:
            raise ProxyHeaderError(f"a PROXY line of more than {V1_BYTES} bytes")
        return None
    line = data[len(V1_BEGIN) : end - 1]
    if data[end - 1] != 0x0D or b"\r" in line:
        raise ProxyHeaderError("a PROXY line that does not end in CR LF")
    rest = data[end + 1 :]
    words = line.split(b" ")
    if words[0] == b"UNKNOWN":
        return ProxyHeader(None, None, False, rest)  # whatever else the line holds (2.1)
    family = _V1_FAMILIES.get(words[0])
    if family is None or len(words) != 5:
        raise ProxyHeaderError("a PROXY line that is not TCP4 or TCP6, two addresses and two ports, or UNKNOWN")
    client, server = (_v1_address(family, words[at], words[at + 2]) for at in (1, 2))
    return ProxyHeader(client, server, False, rest)


def _v1_address(family: type[_IPv4] | type[_IPv6], host: bytes, port: bytes) -> tuple[str, int]:
    try:
        text = host.decode("ascii")
        if "%" in text or "/" in text:
            raise ValueError("a zone")
        address = family(text)
    except ValueError:
        raise ProxyHeaderError("a PROXY line with an address that is not one of its family") from None
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise ProxyHeaderError("a PROXY line with a port that is not a number up to 65535")
    return _as_text(address), int(port)


def _read_v2(data: bytes) -> ProxyHeader | None:
    # In the order of the bytes, each as soon as it is there, so that every cut finds the same fault.
    if len(data) > 12 and data[12] not in (0x20, 0x21):
        raise ProxyHeaderError("a PROXY header with an unknown version or command")
    is_local = len(data) > 12 and data[12] == 0x20
    if len(data) > 13 and not is_local and (data[13] >> 4 > 3 or data[13] & 15 > 2):
        raise ProxyHeaderError("a PROXY header with an unknown family or transport")
    if len(data) < V2_FIXED_BYTES:
        return None
    family, transport = data[13] >> 4, data[13] & 15
    length = int.from_bytes(data[14:16])
    if length > V2_BYTES:
        raise ProxyHeaderError(f"a PROXY header of more than {V2_FIXED_BYTES + V2_BYTES} bytes")
    if not is_local and length < _V2_ADDRESS_BYTES[family]:
        raise ProxyHeaderError("a PROXY header that is too short for its addresses")
    end = V2_FIXED_BYTES + length
    if len(data) < end:
        return None
    rest = data[end:]
    if is_local or transport != _STREAM or family not in (1, 2):
        return ProxyHeader(None, None, is_local, rest)  # 2.2: what HTTP cannot come over counts as unspecified
    layout = "!4s4sHH" if family == 1 else "!16s16sHH"
    hosts = struct.unpack_from(layout, data, V2_FIXED_BYTES)
    client, server = (_as_text(_IPv4(hosts[at]) if family == 1 else _IPv6(hosts[at])) for at in (0, 1))
    return ProxyHeader((client, hosts[2]), (server, hosts[3]), False, rest)


def _as_text(address: _IPv4 | _IPv6) -> str:
    """An IPv4 address that a proxy's socket for both families saw is written as one."""
    return str((address.ipv4_mapped or address) if isinstance(address, _IPv6) else address)
