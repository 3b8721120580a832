"""Clients that have left before a WSGI app sees them."""

from __future__ import annotations

from collections.abc import Iterable

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from tests.server.http_cases import FORWARDED, GET
from tests.server.wsgi_lab import Environ, Lab, StartResponse, answer


def test_a_client_that_has_left_already_is_not_taken_for_one_over_a_unix_socket() -> None:
    seen: list[Environ] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ)
        return answer()(environ, start_response)

    lab = Lab(ConnectionSettings(proxies=TrustedProxies("unix:")), app)
    for _ in range(10):
        client = lab.connect()
        client.send(FORWARDED)
        client.reset()
    with lab, lab.connect() as other:  # accepted after them
        other.send(GET)
        assert other.response().status == 200
    assert {environ["REMOTE_ADDR"] for environ in seen} == {"127.0.0.1"}
    assert {environ["wsgi.url_scheme"] for environ in seen} == {"http"}
