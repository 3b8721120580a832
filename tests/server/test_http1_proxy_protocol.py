"""PROXY protocol, versions 1 and 2: what is read, what is refused; how the bytes are cut does not matter."""

from __future__ import annotations

import ipaddress
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jumpstart_server.http1 import ProxyHeader, ProxyHeaderError, ProxyProtocol, read_proxy_header
from jumpstart_server.http1.proxy_protocol import V1_BYTES, V2_BEGIN, V2_BYTES, V2_FIXED_BYTES

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CLIENT, SERVER = ("192.0.2.7", 56324), ("198.51.100.1", 443)
V1 = b"PROXY TCP4 192.0.2.7 198.51.100.1 56324 443\r\n"


def binary(address: bytes, *, command: int = 0x21, family: int = 0x11, length: int | None = None) -> bytes:
    size = len(address) if length is None else length
    return V2_BEGIN + bytes([command, family]) + size.to_bytes(2) + address


FOUR = bytes([192, 0, 2, 7, 198, 51, 100, 1]) + struct.pack("!HH", 56324, 443)
SIX = ipaddress.ip_address("2001:db8::7").packed + ipaddress.ip_address("::1").packed + struct.pack("!HH", 1, 65535)
PATHS = b"/run/client".ljust(108, b"\0") + b"/run/server".ljust(108, b"\0")
TLV = b"\x02\x00\x0bexample.org\x04\x00\x01\x00"


def outcome(data: bytes, version: ProxyProtocol = "auto") -> ProxyHeader | str | None:
    try:
        return read_proxy_header(data, version)
    except ProxyHeaderError as error:
        return str(error)


def in_pieces(pieces: list[bytes], version: ProxyProtocol) -> ProxyHeader | str | None:
    """As a shell reads: no more once there is an answer. What comes later is the request's."""
    data = b""
    for at, piece in enumerate(pieces):
        data += piece
        found = outcome(data, version)
        if isinstance(found, str):
            return found
        if found is not None:
            return ProxyHeader(found.client, found.server, found.is_local, b"".join([found.rest, *pieces[at + 1 :]]))
        assert len(data) < V2_FIXED_BYTES + V2_BYTES
    return None


# -- what is read --


@pytest.mark.parametrize(
    ("data", "client", "server"),
    [
        (V1, CLIENT, SERVER),
        (b"PROXY TCP4 255.255.255.255 255.255.255.255 65535 65535\r\n", *[("255.255.255.255", 65535)] * 2),
        (b"PROXY TCP4 0.0.0.0 1.2.3.4 0 80\r\n", ("0.0.0.0", 0), ("1.2.3.4", 80)),
        (b"PROXY TCP6 2001:DB8::7 ::1 1 65535\r\n", ("2001:db8::7", 1), ("::1", 65535)),
        (b"PROXY TCP6 ::ffff:192.0.2.7 ::ffff:198.51.100.1 56324 443\r\n", CLIENT, SERVER),
        (
            b"PROXY TCP6 " + b" ".join([b"ffff:" * 7 + b"ffff"] * 2) + b" 65535 65535\r\n",
            *[("ffff:" * 7 + "ffff", 65535)] * 2,
        ),
        (b"PROXY UNKNOWN\r\n", None, None),
        (b"PROXY UNKNOWN " + b" ".join([b"ffff:" * 7 + b"ffff"] * 2) + b" 65535 65535\r\n", None, None),
        (b"PROXY UNKNOWN what ever \xff\r\n", None, None),
        (binary(FOUR), CLIENT, SERVER),
        (binary(FOUR + TLV), CLIENT, SERVER),
        (binary(FOUR + b"not even a TLV"), CLIENT, SERVER),
        (binary(FOUR.ljust(V2_BYTES, b"\0")), CLIENT, SERVER),
        (binary(SIX, family=0x21), ("2001:db8::7", 1), ("::1", 65535)),
        (binary(SIX + TLV, family=0x21), ("2001:db8::7", 1), ("::1", 65535)),
        (binary(PATHS, family=0x31), None, None),
        (binary(b"", family=0x00), None, None),
        (binary(TLV, family=0x00), None, None),
        (binary(FOUR, family=0x12), None, None),  # datagrams: not what HTTP/1.1 comes over
        (binary(FOUR, family=0x10), None, None),
    ],
)
def test_a_header_says_who_the_client_is(
    data: bytes, client: tuple[str, int] | None, server: tuple[str, int] | None
) -> None:
    version: ProxyProtocol = "v2" if data.startswith(V2_BEGIN) else "v1"
    for allowed in (version, "auto"):
        assert outcome(data + GET, allowed) == ProxyHeader(client, server, False, GET)
        assert outcome(data, allowed) == ProxyHeader(client, server, False, b"")
        assert outcome(data[:-1], allowed) is None


@pytest.mark.parametrize("address", [b"", FOUR, PATHS, TLV])
@pytest.mark.parametrize("family", [0x00, 0x11, 0x31, 0xFF])
def test_a_proxy_may_speak_for_itself(address: bytes, family: int) -> None:
    """LOCAL: family and addresses are skipped, whatever they are."""
    data = binary(address, command=0x20, family=family)
    assert outcome(data + GET) == ProxyHeader(None, None, True, GET)


# -- what is refused --


@pytest.mark.parametrize(
    "data", [GET, b"\x16\x03\x01", b"P0", b"PROXZ", b"PROXYTCP4", b"proxy TCP4", b" ", b"\r\n\r\n\0\r\nQUIX"]
)
@pytest.mark.parametrize("version", ["v1", "v2", "auto"])
def test_a_connection_without_the_header_is_refused_and_not_guessed_at(data: bytes, version: ProxyProtocol) -> None:
    assert outcome(data, version) == "no PROXY header" + ("" if version == "auto" else f" of {version}")


def test_the_other_version_is_none() -> None:
    assert outcome(V1, "v2") == "no PROXY header of v2"
    assert outcome(binary(FOUR), "v1") == "no PROXY header of v1"


@pytest.mark.parametrize(
    "line",
    [
        b"PROXY \r\n",
        b"PROXY\r\n",
        b"PROXY  UNKNOWN\r\n",
        b"PROXY UNKNOWN\n",
        b"PROXY UNKNOWN\r\r\n",
        b"PROXY UNKNOWN\rx\r\n",
        b"PROXY unknown\r\n",
        b"PROXY UNKNOWNX\r\n",
        b"PROXY TCP4\r\n",
        b"PROXY TCP5 1.2.3.4 1.2.3.4 1 2\r\n",
        b"PROXY UDP4 1.2.3.4 1.2.3.4 1 2\r\n",
        b"PROXY tcp4 1.2.3.4 1.2.3.4 1 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2 3\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2 \r\n",
        b"PROXY TCP4  1.2.3.4 1.2.3.4 1 2\r\n",
        b"PROXY TCP4\t1.2.3.4 1.2.3.4 1 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\n",
        b"PROXY TCP4 1.2.3 1.2.3.4 1 2\r\n",
        b"PROXY TCP4 1.2.3.04 1.2.3.4 1 2\r\n",
        b"PROXY TCP4 1.2.3.4/8 1.2.3.4 1 2\r\n",
        b"PROXY TCP4 ::1 ::1 1 2\r\n",
        b"PROXY TCP6 1.2.3.4 1.2.3.4 1 2\r\n",
        b"PROXY TCP6 ::1 1.2.3.4 1 2\r\n",
        b"PROXY TCP6 fe80::1%eth0 ::1 1 2\r\n",
        b"PROXY TCP6 [::1] ::1 1 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 01 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 +1 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 -1 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 65536 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 999999 2\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 \r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\n\r\n",
        b"PROXY TCP4 1.2.3.\xff 1.2.3.4 1 2\r\n",
        b"PROXY UNKNOWN".ljust(V1_BYTES - 1, b"x") + b"\r\n",
        b"PROXY UNKNOWN".ljust(V1_BYTES, b"x"),
        b"PROXY ".ljust(100_000, b"x"),
    ],
)
def test_a_line_that_breaks_the_rules_is_refused(line: bytes) -> None:
    assert isinstance(outcome(line + GET, "v1"), str)
    assert isinstance(outcome(line + GET, "auto"), str)


def test_the_longest_line_passes() -> None:
    line = b"PROXY UNKNOWN".ljust(V1_BYTES - 2, b"x").replace(b"UNKNOWNx", b"UNKNOWN ") + b"\r\n"
    assert len(line) == V1_BYTES
    assert outcome(line) == ProxyHeader(None, None, False, b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *(
            (binary(FOUR, command=command), "version or command")
            for command in (0x11, 0x22, 0x2F, 0x31, 0x01, 0x00, 0xFF)
        ),
        *((binary(FOUR, family=family), "family or transport") for family in (0x41, 0xF1, 0x13, 0x1F, 0x03, 0xFF)),
        (binary(FOUR[:-1]), "too short"),
        (binary(FOUR, family=0x21), "too short"),
        (binary(SIX, family=0x31), "too short"),
        (binary(b"", family=0x11), "too short"),
        (binary(FOUR, length=V2_BYTES + 1), f"more than {V2_FIXED_BYTES + V2_BYTES}"),
        (binary(FOUR, length=65535), f"more than {V2_FIXED_BYTES + V2_BYTES}"),
        (binary(b"", command=0x20, length=65535), f"more than {V2_FIXED_BYTES + V2_BYTES}"),
    ],
)
def test_a_binary_header_that_breaks_the_rules_is_refused(data: bytes, words: str) -> None:
    found = outcome(data, "v2")
    assert isinstance(found, str)
    assert words in found
    assert outcome(data, "auto") == found


def test_a_wrong_byte_is_refused_before_the_rest_has_come() -> None:
    assert isinstance(outcome(V2_BEGIN + b"\x11"), str)
    assert isinstance(outcome(V2_BEGIN + b"\x21\x41"), str)
    assert isinstance(outcome(b"G"), str)


# -- any bytes, however cut --

TEXTS = [V1, V1[:20], V1[20:], b"PROXY ", b"PROXY UNKNOWN", b"TCP6 ", b"::1 ", b"1 ", b"65536", b"\r\n", b"\n", b"\r"]
PARTS = [
    V2_BEGIN,
    V2_BEGIN[:5],
    V2_BEGIN[5:],
    b"\x21",
    b"\x20",
    b"\x11",
    b"\0\x0c",
    FOUR,
    b"\xff",
    b" ",
    b"x" * 60,
    GET,
]
WHOLE = [binary(FOUR), binary(SIX, family=0x21), binary(TLV, command=0x20), binary(PATHS, family=0x31)]
FRAGMENTS = st.sampled_from([*TEXTS, *PARTS, *WHOLE])
STREAMS = st.one_of(st.binary(max_size=60), st.lists(FRAGMENTS, max_size=6).map(b"".join))
VERSIONS: st.SearchStrategy[ProxyProtocol] = st.sampled_from(["v1", "v2", "auto"])


@given(STREAMS, VERSIONS, st.lists(st.integers(1, 40), max_size=8))
@example(V1 + GET, "auto", [1] * 8)
@example(binary(FOUR, command=0x31, family=0x41, length=65535), "v2", [12, 1, 1, 1, 1])
def test_any_bytes_cut_anyhow_give_the_same_answer(data: bytes, version: ProxyProtocol, sizes: list[int]) -> None:
    whole = outcome(data, version)
    pieces, rest = [], data
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert in_pieces([*pieces, rest], version) == whole
    assert in_pieces([data[at : at + 1] for at in range(len(data))], version) == (whole if data else None)


@given(
    st.ip_addresses(v=4) | st.ip_addresses(v=6), st.integers(0, 65535), st.binary(max_size=30), st.binary(max_size=9)
)
def test_both_versions_carry_any_client(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, extensions: bytes, rest: bytes
) -> None:
    name, family, layout = ("TCP4", 0x11, "!HH") if ip.version == 4 else ("TCP6", 0x21, "!HH")
    text = f"PROXY {name} {ip} {ip} {port} 80\r\n".encode()
    packed = binary(ip.packed * 2 + struct.pack(layout, port, 80) + extensions, family=family)
    shown = str(getattr(ip, "ipv4_mapped", None) or ip)
    for header in (text, packed):
        assert outcome(header + rest) == ProxyHeader((shown, port), (shown, 80), False, rest)
