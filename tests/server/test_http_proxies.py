"""Clients behind proxies, as apps of both engines see them: headers of trusted ones, and the PROXY protocol."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from jumpstart_server.http1 import ProxyProtocol
from tests.server.http_cases import FORWARDED, GET, NO_PROXY_HEADER, PROXY_CUT_SHORT
from tests.server.http_cases import PROXY_V1 as V1
from tests.server.http_cases import PROXY_V2 as V2
from tests.server.http_cases import PROXY_V2_LOCAL as V2_LOCAL
from tests.server.lab import BaseLab, Tell, make_lab
from tests.server.raw_http import Client, until

pytestmark = pytest.mark.usefixtures("log")

LOCAL = "127.0.0.1,::1"


def trusting(text: str | None, **more: Any) -> ConnectionSettings:
    return ConnectionSettings(proxies=None if text is None else TrustedProxies(text), **more)


def proxied(
    version: ProxyProtocol = "auto", senders: str = LOCAL, proxies: str | None = None, **more: Any
) -> ConnectionSettings:
    return trusting(proxies, proxy_protocol=version, proxy_senders=TrustedProxies(senders), **more)


def told(client: Client, *fields: str) -> dict[str, Any]:
    client.get("/", *fields)
    return read_told(client)


def read_told(client: Client) -> dict[str, Any]:
    response = client.response()
    assert response.status == 200
    found: dict[str, Any] = json.loads(response.body)
    return {name: found[name] for name in ("client", "scheme", "server")}


@pytest.fixture(scope="module", params=["asgi", "wsgi"])
def lab(request: pytest.FixtureRequest) -> Iterator[BaseLab]:
    """A server that trusts the proxies on its own host."""
    with make_lab(request.param, trusting(LOCAL), Tell()) as lab:
        yield lab


@pytest.fixture(scope="module", params=["asgi", "wsgi"])
def behind(request: pytest.FixtureRequest) -> Iterator[BaseLab]:
    """A server that wants PROXY headers, and trusts the headers of 192.0.2.7 and of its own host."""
    with make_lab(request.param, proxied(proxies=f"192.0.2.7,{LOCAL}"), Tell()) as lab:
        yield lab


both = pytest.mark.parametrize("engine", ["asgi", "wsgi"])


def test_178_a_trusted_proxy_says_who_the_client_is_request_by_request(lab: BaseLab) -> None:
    with lab.connect() as client:
        own = list(client.sock.getsockname())
        assert told(client) == {"client": own, "scheme": "http", "server": list(lab.address)}
        for _ in range(2):
            for number in (7, 7, 8):  # the second 7 is known by its bytes
                found = told(client, f"X-Forwarded-For: 6.6.6.6, 192.0.2.{number}", "X-Forwarded-Proto: https")
                assert found == {"client": [f"192.0.2.{number}", 0], "scheme": "https", "server": list(lab.address)}
        assert told(client, "X-Forwarded-For: 6.6.6.6", "X-Forwarded-For: 192.0.2.7:99")["client"] == ["192.0.2.7", 99]
        assert told(client, "X-Forwarded-For: garbage")["client"] == own
        assert told(client) == {"client": own, "scheme": "http", "server": list(lab.address)}


def test_130_a_trailer_says_nothing_about_the_client(lab: BaseLab) -> None:
    with lab.connect() as client:
        client.send(
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\nab\r\n0\r\nX-Forwarded-Proto: https\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n"
        )
        found = read_told(client)
        assert (found["client"][0], found["scheme"]) == ("127.0.0.1", "http")


@both
@pytest.mark.parametrize("trust", [None, "10.0.0.0/8,unix:", ""])
def test_nobody_else_is_believed(engine: str, trust: str | None) -> None:
    with make_lab(engine, trusting(trust), Tell()) as lab, lab.connect() as client:
        client.send(FORWARDED)
        assert read_told(client) == {
            "client": list(client.sock.getsockname()),
            "scheme": "http",
            "server": list(lab.address),
        }


@both
def test_176_peers_over_a_unix_socket_are_trusted_by_their_own_word(engine: str, folder: Path) -> None:
    for number, (trust, client_host, scheme) in enumerate(
        [
            ("unix:", ["203.0.113.9", 0], "https"),
            ("*", ["203.0.113.9", 0], "https"),
            (f"{LOCAL},0.0.0.0/0", None, "http"),
        ]
    ):
        path = folder / f"{number}.sock"
        with make_lab(engine, trusting(trust), Tell(), uds=path) as lab, lab.connect() as client:
            client.send(FORWARDED)
            found = read_told(client)
            assert (found["client"], found["scheme"]) == (client_host, scheme)


# -- the PROXY protocol --


@pytest.mark.parametrize("header", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_proxy_header_says_who_the_client_is_on_the_whole_connection(
    behind: BaseLab, header: bytes, size: int
) -> None:
    data = header + GET
    with behind.connect() as client:
        for at in range(0, len(data), size):
            client.send(data[at : at + size])
        for _ in range(2):
            found = read_told(client)
            assert found == {"client": ["192.0.2.7", 56324], "scheme": "http", "server": ["198.51.100.1", 443]}
            client.send(GET)
        read_told(client)


def test_a_header_alone_waits_for_its_request(behind: BaseLab) -> None:
    with behind.connect() as client:
        client.send(V1)
        until(lambda: behind.connections)
        client.send(GET + GET)
        assert read_told(client) == read_told(client)


def test_headers_are_believed_of_those_whom_the_proxy_names_and_not_of_the_proxy(behind: BaseLab) -> None:
    others = V1.replace(b"192.0.2.7", b"192.0.2.8")
    for header, host, scheme in (
        (V2, "203.0.113.9", "https"),
        (V1, "203.0.113.9", "https"),
        (others, "192.0.2.8", "http"),
    ):
        with behind.connect() as client:
            client.send(header + FORWARDED)
            found = read_told(client)
            assert (found["client"][0], found["scheme"]) == (host, scheme)


def test_a_proxy_that_speaks_for_itself_is_its_own_client(behind: BaseLab) -> None:
    with behind.connect() as client:
        client.send(V2_LOCAL + GET + FORWARDED)
        assert read_told(client)["client"] == list(client.sock.getsockname())
        assert read_told(client)["client"] == ["203.0.113.9", 0]


def test_an_unknown_client_is_served_and_not_believed(behind: BaseLab) -> None:
    with behind.connect() as client:
        client.send(b"PROXY UNKNOWN\r\n" + FORWARDED)
        found = read_told(client)
        assert (found["client"], found["scheme"]) == (list(client.sock.getsockname()), "http")


@pytest.mark.parametrize(("data", "reason"), NO_PROXY_HEADER)
def test_a_connection_that_does_not_begin_so_is_closed_without_an_answer(
    behind: BaseLab, data: bytes, reason: str, log: pytest.LogCaptureFixture
) -> None:
    with behind.back_to_baseline(), behind.connect() as client:
        client.send(data)
        assert client.is_closed()
    until(lambda: [record for record in log.records if reason in record.getMessage()])
    assert all(record.levelno == logging.INFO for record in log.records)


@pytest.mark.parametrize("data", PROXY_CUT_SHORT)
def test_a_client_that_leaves_in_the_middle_of_the_header_leaves_nothing_behind(behind: BaseLab, data: bytes) -> None:
    with behind.back_to_baseline(), behind.connect() as client:
        client.send(data)
        client.end()
        assert client.is_closed()


@both
@pytest.mark.parametrize(("version", "header"), [("v1", V2), ("v2", V1)])
def test_one_version_may_be_all_that_is_taken(engine: str, version: ProxyProtocol, header: bytes) -> None:
    with make_lab(engine, proxied(version), Tell()) as lab:
        with lab.connect() as client:
            client.send(header + GET)
            assert client.is_closed()
        with lab.connect() as client:
            client.send((V1 if version == "v1" else V2) + GET)
            assert read_told(client)["client"] == ["192.0.2.7", 56324]


@both
def test_who_may_not_send_a_header_may_not_connect(engine: str, folder: Path, log: pytest.LogCaptureFixture) -> None:
    with make_lab(engine, proxied(senders="10.0.0.0/8,unix:"), Tell()) as lab:
        with lab.connect() as client:
            assert client.is_closed()
        until(lambda: not lab.connections)
    assert any("--proxy-allow-from" in record.getMessage() for record in log.records)
    with make_lab(engine, proxied(senders="unix:"), Tell(), uds=folder / "x.sock") as lab, lab.connect() as client:
        client.send(V1 + GET)
        assert read_told(client)["client"] == ["192.0.2.7", 56324]
    with make_lab(engine, proxied(senders=LOCAL), Tell(), uds=folder / "y.sock") as lab, lab.connect() as client:
        assert client.is_closed()


@both
@pytest.mark.parametrize("trickle", [b"", V1[:1], V1])
def test_the_header_and_the_head_behind_it_share_one_time(engine: str, trickle: bytes) -> None:
    with make_lab(engine, proxied(header_timeout=0.3), Tell()) as lab, lab.connect() as client:
        began = time.monotonic()
        for at in range(len(trickle)):
            client.send(trickle[at : at + 1])
        assert client.is_closed()
        assert 0.2 < time.monotonic() - began < 2


@both
def test_a_stop_does_not_wait_for_a_header(engine: str) -> None:
    with make_lab(engine, proxied(), Tell()) as lab, lab.connect() as client:
        client.send(V1[:10])
        until(lambda: lab.connections)
        began = time.monotonic()
        lab.stop()
        assert client.is_closed()
        assert time.monotonic() - began < 3
