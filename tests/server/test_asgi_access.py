"""The access log of the ASGI engine: one line for each request, however it ended. Numbers are those of the cases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from tests.server.asgi_lab import Lab, Receive, Scope, Send, answer, echo, until
from tests.server.http_cases import GET, LOGGED, TIGHT

HASTY = ConnectionSettings(
    limits=TIGHT,
    header_timeout=0.4,
    body_timeout=0.4,
    write_timeout=0.4,
    proxies=TrustedProxies("10.0.0.1"),
)
PIECE = 64 * 1024


def piece(body: bytes = b"", more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


class Bench:
    """A server with an access log, and what that holds."""

    def __init__(self, lab: Lab, path: Path) -> None:
        self.lab = lab
        self._path = path
        self._taken = 0

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def line(self) -> dict[str, Any]:
        """The one line that is new, waited for."""
        until(lambda: len(self.lines) > self._taken)
        lines = self.lines[self._taken :]
        self._taken += len(lines)
        assert len(lines) == 1
        return lines[0]

    def settle(self) -> None:
        """Wait until nothing runs, and see that no line has come."""
        until(lambda: not self.lab.connections and not self.lab.tasks)
        assert self.lines[self._taken :] == []


@pytest.fixture(params=["uvloop", "asyncio"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    path = tmp_path / "access.log"
    lab = Lab(request.param, HASTY)
    log = AccessLog(str(path), "json")
    lab.config.jumpstart_access = log  # type: ignore[attr-defined]  # ours
    with lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield Bench(lab, path)
    assert log.lost == 0
    log.close()


def summary(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["method"], line["path"], line["status"], line["bytes"]


def test_a_request_is_one_line(bench: Bench) -> None:
    """170."""
    with bench.lab.connect() as client:
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
    bench.lab.run(asyncio.sleep(0))
    assert [line["query"] for line in bench.lines] == list("01234")


@pytest.mark.parametrize(("method", "status", "sent"), [("HEAD", 200, 0), ("GET", 204, 0), ("GET", 404, 8)])
def test_bytes_are_those_of_the_body_that_went_out(bench: Bench, method: str, status: int, sent: int) -> None:
    with bench.lab.connect() as client:
        client.get(bench.lab.app(answer(b"unwanted", status), "/x"), method=method)
        assert client.response(method).status == status
    assert summary(bench.line()) == (method, "/x", status, sent)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream_counts_what_it_says_and_not_how_it_is_framed(bench: Bench, version: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        for size in (1, 20_000, 300):
            await send(piece(b"x" * size, more=True))
        await send(piece(b"end"))

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"), version=version)
        assert len(client.response().body) == 20_304
    line = bench.line()
    assert (*summary(line), line["protocol"]) == ("GET", "/x", 200, 20_304, f"HTTP/{version}")


def test_what_is_beyond_the_length_is_not_counted(bench: Bench) -> None:
    with bench.lab.connect() as client:
        path = bench.lab.app(answer(b"12345", headers=[(b"content-length", b"3")], length=False), "/x")
        client.get(path)
        assert client.response().body == b"123"
    assert summary(bench.line()) == ("GET", "/x", 200, 3)


def test_background_work_does_not_hold_the_line_back(bench: Bench) -> None:
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer()(scope, receive, send)
        await gate.wait()

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        assert client.response().status == 200
        assert summary(bench.line()) == ("GET", "/x", 200, 6)
        bench.lab.loop.call_soon_threadsafe(gate.set)
    bench.settle()


# ---------------------------------------------------------------------- refused


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


def test_a_head_that_does_not_arrive_in_time(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(b"GET / HT")
        assert client.response().status == 408
    line = bench.line()
    assert (line["method"], line["status"], line["duration_ms"]) == (None, 408, 400.0)
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


# ---------------------------------------------------------------------- failed and left


def test_an_app_that_fails_before_its_answer(bench: Bench) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        raise ValueError("meant")

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        response = client.response()
        assert response.status == 500
    assert summary(bench.line()) == ("GET", "/x", 500, len(response.body))
    bench.settle()


def test_an_app_that_fails_in_the_middle_is_500_too(bench: Bench) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(piece(b"half", more=True))
        raise ValueError("meant")

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        assert not client.response().complete
    assert summary(bench.line()) == ("GET", "/x", 500, 4)
    bench.settle()


def test_171_a_client_that_leaves_before_the_answer_is_499(bench: Bench) -> None:
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        until(begun.is_set)
        client.reset()
        line = bench.line()
    assert summary(line) == ("GET", "/x", 499, 0)
    assert line["app_ms"] > 0
    bench.settle()


def test_171_a_client_that_leaves_in_the_middle_is_499_with_what_it_got(bench: Bench) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        while True:
            await send(piece(b"0123456789", more=True))
            await asyncio.sleep(0.005)

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        client.head()
        assert client.line() == b"a"
        client.reset()
    line = bench.line()
    assert (line["status"], line["bytes"] % 10) == (499, 0) and line["bytes"] > 0
    bench.settle()


def test_a_client_that_takes_nothing_is_499_without_what_waits_for_it(bench: Bench) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        while True:
            await send(piece(b"x" * PIECE, more=True))

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"))
        line = bench.line()
    assert line["status"] == 499
    assert 0 < line["bytes"] <= 16 * 1024 * 1024  # what the kernels of both sides hold, and not what waited for them
    assert line["duration_ms"] >= 390
    bench.settle()


def test_a_client_that_only_stops_sending_gets_its_answer_and_its_status(bench: Bench) -> None:
    with bench.lab.connect() as client:
        client.send(GET)
        client.end()
        assert client.response().status == 200
    assert summary(bench.line()) == ("GET", "/", 200, 6)
    bench.settle()


def test_a_post_whose_client_has_left_is_499_at_once_and_runs_on(bench: Bench) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await gate.wait()
        done.append("paid")
        await answer()(scope, receive, send)

    with bench.lab.connect() as client:
        client.get(bench.lab.app(app, "/x"), "Content-Length: 0", method="POST")
        until(begun.is_set)
        client.reset()
        assert summary(bench.line()) == ("POST", "/x", 499, 0)
        bench.lab.loop.call_soon_threadsafe(gate.set)
        until(lambda: done)
    bench.settle()


@pytest.mark.parametrize("begun_to_answer", [False, True])
def test_171_a_request_that_outlasts_a_stop_is_503(tmp_path: Path, begun_to_answer: bool) -> None:
    path = tmp_path / "access.log"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun_to_answer:
            await send(start())
            await send(piece(b"half", more=True))
        begun.set()
        await asyncio.sleep(60)

    begun = asyncio.Event()
    lab = Lab(app=app, timeout_graceful_shutdown=1)
    log = AccessLog(str(path), "%(s)s %(r)s")
    lab.config.jumpstart_access = log  # type: ignore[attr-defined]  # ours
    with lab, lab.connect() as client:
        client.send(GET)
        until(begun.is_set)
        lab.stop()
        if begun_to_answer:
            assert client.rest().endswith(b"half\r\n")
        else:
            assert client.response().status == 503
    assert path.read_text() == "503 GET / HTTP/1.1\n"
    log.close()


# ---------------------------------------------------------------------- what else a line may hold


def test_text_formats_with_headers_of_both_sides_behind_a_proxy(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    settings = ConnectionSettings(proxies=TrustedProxies("127.0.0.1"))
    lab = Lab(settings=settings, app=answer(headers=[(b"X-Cache", b"hit")]))
    log = AccessLog(str(path), "%(h)s %({x-cache}o)s %({host}i)s %({x}e)s")
    lab.config.jumpstart_access = log  # type: ignore[attr-defined]  # ours
    with lab, lab.connect() as client:
        client.get("/", "X-Forwarded-For: 192.0.2.9")
        assert client.response().status == 200
        client.get("/", "X-Forwarded-For: 192.0.2.9", "Transfer-Encoding: gzip", method="POST")
        assert client.response().status == 501
    assert path.read_text() == "192.0.2.9 hit test -\n127.0.0.1 - - -\n"
    log.close()


def test_a_unix_socket_has_no_host(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    lab = Lab(app=answer(), uds=tmp_path / "socket")
    log = AccessLog(str(path), "%(h)s %(s)s")
    lab.config.jumpstart_access = log  # type: ignore[attr-defined]  # ours
    with lab:
        assert lab.ask(GET).status == 200
    assert path.read_text() == "- 200\n"
    log.close()


# ---------------------------------------------------------------------- WebSockets


async def chat(scope: Scope, receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


def test_a_websocket_is_a_line_when_it_ends(bench: Bench) -> None:
    from websockets.sync.client import connect

    path = bench.lab.app(chat, "/chat")
    with connect(f"ws://127.0.0.1:{bench.lab.address[1]}{path}?a=1", proxy=None, compression=None) as websocket:
        websocket.send("hello")
        assert websocket.recv() == "hello"
        assert bench.lines == []
    line = bench.line()
    assert (line["method"], line["path"], line["query"], line["status"]) == ("GET", "/chat", "a=1", 101)
    assert line["bytes"] == 2 + 5 + 4  # a text frame and a close frame
    assert line["client"] == "127.0.0.1" and line["duration_ms"] > 0
    bench.settle()


def test_a_websocket_that_is_refused_has_the_status_of_the_refusal(bench: Bench) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    async def no(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.close"})

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("meant")

    for app, status in ((no, 403), (broken, 500)):
        path = bench.lab.app(app)
        with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{bench.lab.address[1]}{path}", proxy=None):
            pass
        assert bench.line()["status"] == status
    bench.settle()


def test_a_websocket_whose_client_does_not_wait_is_499(bench: Bench) -> None:
    begun = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "websocket.disconnect":
            pass

    with bench.lab.connect() as client:
        fields = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
        client.get(bench.lab.app(slow, "/x"), *fields, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
        until(begun.is_set)
        client.reset()
    assert summary(bench.line()) == ("GET", "/x", 499, 0)
    bench.settle()
