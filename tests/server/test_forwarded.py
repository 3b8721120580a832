"""Who is the client behind trusted proxies: cases 130, 176 and 178, and what may not be believed."""

from __future__ import annotations

import ipaddress
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.forwarded import HOPS, REMEMBERED_BYTES, TrustedProxies

PEER = ("127.0.0.1", 50000)
TRUST = TrustedProxies("127.0.0.1, ::1, 10.0.0.0/8, 2001:db8::/32")


def lines(*values: str, proto: str | None = None) -> list[tuple[bytes, bytes]]:
    fields = [(b"host", b"a"), *((b"x-forwarded-for", value.encode("latin-1")) for value in values)]
    return fields if proto is None else [*fields, (b"x-forwarded-proto", proto.encode())]


def client(*values: str, trust: TrustedProxies = TRUST) -> Any:
    return trust.origin(PEER, "http", lines(*values))[0]


# -- whom to trust --


@pytest.mark.parametrize(
    ("text", "trusted", "others"),
    [
        ("127.0.0.1,::1", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1"], ["127.0.0.2", "", None]),
        ("10.0.0.0/8", ["10.0.0.0", "10.255.255.255", "::ffff:10.1.2.3"], ["11.0.0.0", "::a01:203", None]),
        (" 192.0.2.1 ,, 192.0.2.3 ", ["192.0.2.1", "192.0.2.3"], ["192.0.2.2"]),
        ("10.1.2.3/32", ["10.1.2.3"], ["10.1.2.4"]),
        ("::ffff:10.0.0.0/104", ["10.9.9.9", "::ffff:10.9.9.9"], ["11.0.0.0"]),
        ("::ffff:192.0.2.1", ["192.0.2.1", "::ffff:c000:201"], ["192.0.2.2"]),
        ("fe80::/10", ["fe80::1", "fe80::1%eth0"], ["2001:db8::1"]),
        ("2001:DB8::/32", ["2001:db8:1::", "2001:0DB8::1"], ["2001:db9::", "32.1.13.184"]),
        ("0.0.0.0/0", ["8.8.8.8", "::ffff:8.8.8.8"], ["::1", None, ""]),
        ("unix:", [None], ["127.0.0.1", ""]),
        ("unix", [None], ["127.0.0.1", ""]),
        ("10.0.0.1,unix:", [None, "10.0.0.1"], ["10.0.0.2", ""]),
        ("*", ["8.8.8.8", "::1", None, "", "what is this"], []),
        ("10.0.0.1, *", ["8.8.8.8", None], []),
        ("", [], ["127.0.0.1", None, ""]),
    ],
)
def test_peers_are_trusted_by_address_network_and_kind(
    text: str, trusted: list[str | None], others: list[str | None]
) -> None:
    proxies = TrustedProxies(text)
    for _ in range(2):  # found, then remembered
        assert [host for host in trusted if not proxies.trusts(host)] == []
        assert [host for host in others if proxies.trusts(host)] == []


@pytest.mark.parametrize(
    "word",
    ["localhost", "nginx", "10.0.0.0/33", "10.0.0", "256.0.0.1", "fe80::1%eth0", "unix:/run/x", "/8", "::1/", "**"],
)
def test_a_word_that_is_none_is_an_error_that_names_it_and_what_is_allowed(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrustedProxies(f"127.0.0.1,{word}", option="--proxy-allow-from")
    assert str(caught.value).startswith(f"--proxy-allow-from: {word!r} is not allowed; write addresses")
    for allowed in ("10.0.0.1", "::1", "10.0.0.0/8", "unix:", "*"):
        assert allowed in str(caught.value)


@pytest.mark.parametrize(("word", "meant"), [("10.0.0.1/8", "10.0.0.0/8"), ("2001:db8::1/32", "2001:db8::/32")])
def test_an_address_that_means_its_network_is_told_the_network(word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is an address in a network; write {meant} "):
        TrustedProxies(word)


@given(
    st.text(max_size=20) | st.lists(st.sampled_from([*"0.:/,%*[] ", "1", "255", "::", "unix:", "ffff"])).map("".join)
)
@example("\ud800")
@example("1" * 5000)
def test_any_text_is_trust_or_a_configuration_error(text: str) -> None:
    try:
        TrustedProxies(text)
    except ConfigError:
        pass


# -- who the client is --


@pytest.mark.parametrize(
    ("values", "found"),
    [
        # 178: the rightmost one that is not trusted
        (["192.0.2.7"], ("192.0.2.7", 0)),
        (["192.0.2.7, 10.0.0.1"], ("192.0.2.7", 0)),
        (["6.6.6.6, 192.0.2.7, 10.0.0.1, 127.0.0.1"], ("192.0.2.7", 0)),
        (["6.6.6.6,192.0.2.7"], ("192.0.2.7", 0)),
        (["2001:db9::7, 2001:db8::1"], ("2001:db9::7", 0)),
        # 178: lines are one list, in their order
        (["6.6.6.6", "192.0.2.7", "10.0.0.1"], ("192.0.2.7", 0)),
        (["192.0.2.7", "10.0.0.1"], ("192.0.2.7", 0)),
        (["10.0.0.1", "192.0.2.7"], ("192.0.2.7", 0)),
        # all of them trusted: the farthest
        (["10.0.0.2, 10.0.0.1"], ("10.0.0.2", 0)),
        (["::1"], ("::1", 0)),
        # ports
        (["192.0.2.7:567"], ("192.0.2.7", 567)),
        (["192.0.2.7:0, 10.0.0.1:80"], ("192.0.2.7", 0)),
        (["[2001:db9::7]:567"], ("2001:db9::7", 567)),
        (["[2001:db9::7]"], ("2001:db9::7", 0)),
        (["[::1]:567"], ("::1", 567)),
        (["::ffff:192.0.2.7"], ("::ffff:192.0.2.7", 0)),
        (["192.0.2.7, ::ffff:10.0.0.1"], ("192.0.2.7", 0)),
        # empty elements and whitespace do not count
        ([" , 192.0.2.7\t ,, 10.0.0.1 , "], ("192.0.2.7", 0)),
        (["192.0.2.7", ""], ("192.0.2.7", 0)),
        ([""], PEER),
        ([" , ,"], PEER),
        ([], PEER),
        # garbage: the last good one before it, or the peer
        (["garbage"], PEER),
        (["192.0.2.7, garbage"], PEER),
        (["192.0.2.7, garbage, 10.0.0.1"], ("10.0.0.1", 0)),
        (["192.0.2.7, unknown"], PEER),
        (["_hidden, 10.0.0.1"], ("10.0.0.1", 0)),
        (["192.0.2.7;"], PEER),
        (['"192.0.2.7"'], PEER),
        (["192.0.2.7 10.0.0.1"], PEER),
        (["192.0.2.7:"], PEER),
        (["192.0.2.7:x"], PEER),
        (["192.0.2.7:-1"], PEER),
        (["192.0.2.7:65536"], PEER),
        (["192.0.2.7:" + "9" * 5000], PEER),
        (["192.0.2"], PEER),
        (["192.0.2.07"], PEER),
        (["3221225991"], PEER),
        (["192.0.2.7/24"], PEER),
        (["[2001:db9::7"], PEER),
        (["[2001:db9::7]x"], PEER),
        (["[2001:db9::7]:"], PEER),
        (["[192.0.2.7]"], PEER),
        (["[]"], PEER),
        (["fe80::1%eth0"], PEER),
        (["fe80::1%<script>"], PEER),
        (["192.0.2.\xb2"], PEER),
        (["192.0.2.7:\xb2"], PEER),
        (["for=192.0.2.7"], PEER),
    ],
)
def test_178_the_first_untrusted_address_from_the_right(values: list[str], found: tuple[str, int]) -> None:
    for _ in range(2):  # found, then remembered
        assert client(*values) == found


def test_with_everybody_trusted_the_farthest_counts_and_garbage_ends_it_all_the_same() -> None:
    everybody = TrustedProxies("*")
    assert client("6.6.6.6, 192.0.2.7", trust=everybody) == ("6.6.6.6", 0)
    assert client("garbage, 192.0.2.7", trust=everybody) == ("192.0.2.7", 0)


def test_176_without_an_address_of_its_own_a_trusted_peer_speaks_for_its_clients() -> None:
    trust = TrustedProxies("unix:")
    assert trust.origin(None, "http", lines("192.0.2.7", proto="https")) == (("192.0.2.7", 0), "https")
    assert trust.origin(None, "http", lines()) == (None, "http")
    assert trust.origin(None, "http", lines("garbage")) == (None, "http")


def test_a_long_chain_is_looked_at_for_so_many_hops_only() -> None:
    """A client may send thousands of addresses that are trusted; they cost no more than a real chain's."""
    near = ", ".join(["10.0.0.1"] * HOPS)
    assert client(f"192.0.2.7, {near}") == ("10.0.0.1", 0)
    shorter = ", ".join(["10.0.0.1"] * (HOPS - 1))
    assert client(f"192.0.2.7, {shorter}") == ("192.0.2.7", 0)
    assert client(*["10.0.0.1"] * 5000) == ("10.0.0.1", 0)


def test_a_long_header_is_not_kept() -> None:
    trust = TrustedProxies("127.0.0.1")
    for number in range(50):
        assert client("a" * REMEMBERED_BYTES + f",192.0.2.{number}", trust=trust) == (f"192.0.2.{number}", 0)
    assert trust._remembered_client.cache_info().currsize == 0  # type: ignore[attr-defined]  # of functools


# -- over what it came --


@pytest.mark.parametrize(
    ("values", "scheme"),
    [
        (["https"], "https"),
        (["http"], "http"),
        (["HTTPS"], "https"),
        (["wss"], "https"),
        (["ws"], "http"),
        (["https, http"], "http"),
        (["http", "https"], "https"),
        (["http , https "], "https"),
        (["https,"], None),
        ([""], None),
        (["ftp"], None),
        (["https://"], None),
        (["\xb2"], None),
        ([], None),
    ],
)
def test_the_scheme_is_what_the_nearest_proxy_says(values: list[str], scheme: str | None) -> None:
    headers = [(b"x-forwarded-proto", value.encode("latin-1")) for value in values]
    for own in ("http", "https"):
        assert TRUST.origin(PEER, own, headers) == (PEER, scheme or own)


@pytest.mark.parametrize(
    "field",
    [
        (b"forwarded", b"for=6.6.6.6;proto=https"),
        (b"x-forwarded-ssl", b"on"),
        (b"x-forwarded-protocol", b"ssl"),
        (b"x-real-ip", b"6.6.6.6"),
        (b"x_forwarded_for", b"6.6.6.6"),
        (b"front-end-https", b"on"),
    ],
)
def test_no_other_header_is_believed(field: tuple[bytes, bytes]) -> None:
    assert TRUST.origin(PEER, "http", [field]) == (PEER, "http")


# -- whatever comes --

addresses = st.ip_addresses().map(str)
elements = st.one_of(
    addresses,
    st.sampled_from(
        ["10.0.0.1", "127.0.0.1", "::1", "10.9.9.9:80", "[::1]:1", "192.0.2.7:99", "", " ", "garbage", "[", ":"]
    ),
    st.text("0123456789abcdef.:[]% ", max_size=12),
)


@given(st.lists(elements, max_size=10), st.lists(st.integers(0, 9), max_size=3))
def test_the_lines_that_a_list_is_cut_into_do_not_matter(elements: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(elements)) for cut in cuts), len(elements)]
    pieces = [", ".join(elements[begin:end]) for begin, end in itertools.pairwise(borders)]
    assert client(*pieces) == client(", ".join(elements))


@given(st.lists(elements, max_size=10))
def test_what_a_client_wrote_itself_changes_nothing(elements: list[str]) -> None:
    """Its proxy puts its address behind whatever it sent."""
    assert client(", ".join([*elements, "192.0.2.7", "10.0.0.1"])) == ("192.0.2.7", 0)


@given(st.lists(st.tuples(st.sampled_from([b"x-forwarded-for", b"x-forwarded-proto", b"x"]), st.binary(max_size=40))))
def test_any_bytes_give_an_address_and_a_scheme(headers: list[tuple[bytes, bytes]]) -> None:
    found, scheme = TRUST.origin(PEER, "http", headers)
    assert scheme in ("http", "https")
    assert found is not None
    ipaddress.ip_address(found[0])
    assert 0 <= found[1] <= 65535


@given(addresses, st.integers(0, 65535))
def test_an_address_and_its_port_come_through_unchanged(host: str, port: int) -> None:
    trust = TrustedProxies("")
    written = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert trust.origin(PEER, "http", lines(written))[0] == (host, port)
    assert trust.origin(PEER, "http", lines(host))[0] == (host, 0)
