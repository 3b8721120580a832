"""
The access log of both engines: one line for each request, however it ended. Numbers are those of the cases.

`access_bench.py` has the server with an access log.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from tests.server.access_bench import Bench, make_bench, summary
from tests.server.http_cases import GET, LOGGED
from tests.server.lab import ENGINES, Reply, Words, make_lab
from tests.server.raw_http import until


@pytest.fixture(params=ENGINES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with make_bench(request.param, tmp_path) as bench:
        yield bench


def test_a_request_is_one_line(bench: Bench) -> None:
    """170."""
    with bench.lab.connect() as client:
        for _ in range(2):  # the second one is known by its bytes
            client.get("/?a=%20b", "User-Agent: lab", "X-Request-ID: 7")
            assert client.response().status == 200
            line = bench.line()
            assert summary(line) == ("GET", "/", 200, 6)
            assert (line["query"], line["protocol"], line["client"]) == ("a=%20b", "HTTP/1.1", "127.0.0.1")
            assert (line["user_agent"], line["request_id"]) == ("lab", "7")
            assert 0 < line["app_ms"] <= line["duration_ms"] < 5000
            assert line["queue_ms"] + line["app_ms"] == pytest.approx(line["duration_ms"], abs=0.01)
    bench.settle()


def test_requests_of_one_connection_have_their_lines_in_order(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(b"".join(b"GET /?%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(5)))
        for _ in range(5):
            assert client.response().status == 200
        until(lambda: len(bench.lines) == 5)
    assert [line["query"] for line in bench.lines] == list("01234")


@pytest.mark.parametrize(("method", "status", "sent"), [("HEAD", 200, 0), ("GET", 204, 0), ("GET", 404, 8)])
def test_bytes_are_those_of_the_body_that_went_out(bench: Bench, method: str, status: int, sent: int) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.serve(Reply((b"unwanted",), status), "/x"), method=method)
        assert client.response(method).status == status
    assert summary(bench.line()) == (method, "/x", status, sent)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream_counts_what_it_says_and_not_how_it_is_framed(bench: Bench, version: str) -> None:
    path = bench.lab.serve(Reply((b"x", b"x" * 20_000, b"x" * 300, b"end")), "/x")
    with bench.lab.connect() as client:
        client.get(path, version=version)
        assert len(client.response().body) == 20_304
    line = bench.line()
    assert (*summary(line), line["protocol"]) == ("GET", "/x", 200, 20_304, f"HTTP/{version}")


def test_what_is_beyond_the_length_is_not_counted(bench: Bench) -> None:
    with bench.lab.connect() as client:
        path = bench.lab.serve(Reply((b"12345",), length=3), "/x")
        client.get(path)
        assert client.response().body == b"123"
    assert summary(bench.line()) == ("GET", "/x", 200, 3)


# -- refused --


@pytest.mark.parametrize(
    ("request_", "status", "method", "path"), [case[1:] for case in LOGGED], ids=[case[0] for case in LOGGED]
)
def test_requests_that_are_refused(
    bench: Bench, request_: bytes, status: int, method: str | None, path: str | None
) -> None:
    with bench.lab.connect() as client:
        client.send(request_)
        response = client.response()
        assert response.status == status
    line = bench.line()
    assert summary(line) == (method, path, status, len(response.body))
    assert line["client"] == "127.0.0.1"
    bench.settle()


def test_a_body_that_is_too_large_in_the_end(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get("/echo", "Transfer-Encoding: chunked", method="POST")
        client.send(b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n")
        response = client.response()
    assert summary(bench.line()) == ("POST", "/echo", 413, len(response.body))
    bench.settle()


@pytest.mark.slow
def test_a_head_that_does_not_arrive_in_time(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(b"GET / HT")
        assert client.response().status == 408
    line = bench.line()
    assert (line["method"], line["status"]) == (None, 408)
    assert line["duration_ms"] >= 390
    bench.settle()


def test_a_body_that_does_not_arrive_in_time(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get("/echo", "Content-Length: 5", method="POST")
        client.send(b"12")
        response = client.response()
    line = bench.line()
    assert summary(line) == ("POST", "/echo", 408, len(response.body))
    assert line["duration_ms"] >= 390
    bench.settle()


def test_connections_that_never_asked_leave_no_line(bench: Bench) -> None:
    with bench.lab.connect():
        pass
    with bench.lab.connect() as client:
        client.get("/")
        assert client.response().status == 200
        assert summary(bench.line()) == ("GET", "/", 200, 6)
    bench.settle()


# -- failed and left --


def test_an_app_that_fails_before_its_answer(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.serve(Reply((), fails=True), "/x"))
        response = client.response()
        assert response.status == 500
    assert summary(bench.line()) == ("GET", "/x", 500, len(response.body))
    bench.settle()


def test_an_app_that_fails_in_the_middle_is_500_too(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.serve(Reply((b"half",), length=0, fails=True), "/x"))
        assert not client.response().complete
    assert summary(bench.line()) == ("GET", "/x", 500, 4)
    bench.settle()


@pytest.mark.slow
def test_171_a_client_that_leaves_in_the_middle_is_499_with_what_it_got(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.serve(Words(10), "/x"))
        client.head()
        assert client.line() == b"a"
        client.reset()
    line = bench.line()
    assert (line["status"], line["bytes"] % 10) == (499, 0) and line["bytes"] > 0
    bench.settle()


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_499(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.serve(Words(64 * 1024, 0), "/x"))
        line = bench.line()
    assert line["status"] == 499
    assert 0 < line["bytes"] <= 16 * 1024 * 1024  # what the kernels of both sides hold
    assert line["duration_ms"] >= 390
    bench.settle()


def test_a_client_that_only_stops_sending_gets_its_answer_and_its_status(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(GET)
        client.end()
        assert client.response().status == 200
    assert summary(bench.line()) == ("GET", "/", 200, 6)
    bench.settle()


# -- what else a line may hold --


@pytest.mark.parametrize("engine", ["asgi", "wsgi"])
def test_text_formats_with_headers_of_both_sides_behind_a_proxy(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "%(h)s %({x-cache}o)s %({host}i)s %({server_port}e)s")
    settings = ConnectionSettings(proxies=TrustedProxies("127.0.0.1"))
    with make_lab(engine, settings, Reply(headers=(("X-Cache", "hit"),)), access=log) as lab, lab.connect() as client:
        client.get("/", "X-Forwarded-For: 192.0.2.9")
        assert client.response().status == 200
        client.get("/", "X-Forwarded-For: 192.0.2.9", "Transfer-Encoding: gzip", method="POST")
        assert client.response().status == 501
        assert client.is_closed()
    port = lab.address[1] if engine == "wsgi" else "-"  # an environ has it, and no scope is asked
    assert path.read_text() == f"192.0.2.9 hit test {port}\n127.0.0.1 - - -\n"
    log.close()


@pytest.mark.parametrize("engine", ["asgi", "wsgi"])
def test_a_unix_socket_has_no_host(engine: str, folder: Path) -> None:
    path = folder / "access.log"
    log = AccessLog(str(path), "%(h)s %(s)s")
    with make_lab(engine, uds=folder / "x.sock", access=log) as lab:
        assert lab.ask(GET).status == 200
    assert path.read_text() == "- 200\n"
    log.close()
