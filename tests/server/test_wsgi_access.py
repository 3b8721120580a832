"""The access log of the WSGI engine: clients that leave, requests that are shed. Numbers are those of the cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jumpstart_server.wsgi.connection import DISCONNECT_GRACE
from tests.server.access_bench import Bench, make_bench, summary
from tests.server.raw_http import Client, until
from tests.server.wsgi_lab import Gate, Lab

pytestmark = pytest.mark.usefixtures("log")


def own(bench: Bench) -> Lab:
    """Its server, as one of this engine."""
    assert isinstance(bench.lab, Lab)
    return bench.lab


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with make_bench("wsgi", tmp_path) as bench:
        yield bench


def wait_for_grace(lab: Lab) -> None:
    """Until a client that has left can be taken for gone: an event has told of it, and a while has passed."""

    def is_over() -> bool:
        left = [connection.gone_at for connection in lab.server._all.values() if connection.gone_at]
        return bool(left) and time.monotonic() - max(left) > DISCONNECT_GRACE

    until(is_over)


@pytest.mark.slow
@pytest.mark.parametrize("leave", [Client.__exit__, Client.reset], ids=["close", "reset"])
def test_171_a_client_that_leaves_before_the_answer_is_499(bench: Bench, leave: Callable[[Client], None]) -> None:
    gate = Gate()
    client = bench.lab.connect()
    client.get(own(bench).app(gate, "/x"))
    until(lambda: gate.entered)
    leave(client)
    wait_for_grace(own(bench))
    gate.open()
    line = bench.line()
    assert summary(line)[:3] == ("GET", "/x", 499)
    assert line["app_ms"] > 0
    bench.settle()


@pytest.mark.parametrize("streamed", [False, True])
def test_171_a_client_that_breaks_off_its_body_is_499(tmp_path: Path, streamed: bool) -> None:
    with make_bench("wsgi-streamed" if streamed else "wsgi", tmp_path) as bench:
        with bench.lab.connect() as client:
            client.get("/echo", "Content-Length: 5", method="POST")
            client.send(b"12")
            until(lambda: [each for each in own(bench).server._all.values() if each.head])
            client.reset()
        assert summary(bench.line()) == ("POST", "/echo", 499, 0)
        bench.settle()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_171_requests_that_are_shed_are_503_with_the_time_they_waited(tmp_path: Path, method: str) -> None:
    """One is too many, and one waits too long."""
    gate = Gate()
    with make_bench("wsgi", tmp_path, threads=1, queue=1, queue_timeout=0.3) as bench:
        lab = own(bench)
        with lab.connect() as first, lab.connect() as second, lab.connect() as third:
            first.get(lab.app(gate, "/first"))
            until(lambda: gate.entered)
            second.get("/second", method=method)
            until(lambda: lab.server.stats().waiting == 1)
            third.get("/third", method=method)
            for client, path in ((third, "/third"), (second, "/second")):
                response = client.response(method)
                assert (response.status, response.get("retry-after")) == (503, "1")
                assert client.is_closed()
                line = bench.line()
                assert summary(line) == (method, path, 503, len(response.body))
                assert line["queue_ms"] >= (290 if path == "/second" else 0)
            gate.open()
            assert first.response().status == 200
            assert summary(bench.line()) == ("GET", "/first", 200, 6)
        bench.settle()


@pytest.mark.slow
def test_171_a_client_that_left_while_its_request_waited_is_499(tmp_path: Path) -> None:
    gate = Gate()
    with make_bench("wsgi", tmp_path, threads=1) as bench:
        lab = own(bench)
        with lab.connect() as first:
            first.get(lab.app(gate, "/first"))
            until(lambda: gate.entered)
            client = lab.connect()
            client.get("/left")
            until(lambda: lab.server.stats().waiting == 1)
            client.sock.close()
            wait_for_grace(lab)
            gate.open()
            assert first.response().status == 200
            until(lambda: len(bench.lines) == 2)
        found = {line["path"]: line for line in bench.lines}
        assert (found["/left"]["status"], found["/first"]["status"]) == (499, 200)
        assert found["/left"]["queue_ms"] >= 500
