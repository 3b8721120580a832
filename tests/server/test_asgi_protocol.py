"""ASGI through real sockets, on uvloop and on asyncio. Numbers are those of the cases in the project's collection."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import logging
import resource
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jumpstart_server.asgi import ASGIMisuseError, ClientGoneError
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.http1 import Limits, ResponseError
from tests.server.asgi_lab import Client, Lab, Receive, Scope, Send, answer, echo, read_body, until
from tests.server.http_cases import CHUNKED, CUT_SHORT, GET, REFUSED, STATUSES, WORDS, post
from tests.server.raw_http import make_certificate

LOOPS = ["uvloop", "asyncio"]
HASTY = ConnectionSettings(
    limits=Limits(limit_request_body=100_000),
    header_timeout=0.3,
    body_timeout=0.3,
    write_timeout=0.4,
    keep_alive=0.3,
)


@pytest.fixture(scope="module", params=LOOPS)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A server with the defaults."""
    with Lab(request.param) as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


@pytest.fixture(scope="module", params=LOOPS)
def hasty(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A server with short times and a small body limit."""
    with Lab(request.param, HASTY) as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def errors(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.ERROR]


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def piece(body: bytes = b"", more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


# ---------------------------------------------------------------------------------------- plain requests


def test_a_short_answer_has_its_length_and_the_connection_stays(lab: Lab) -> None:
    with lab.connect() as client:
        for _ in range(3):
            client.send(GET)
            response = client.response()
            assert (response.status, response.body) == (200, b"hello\n")
            assert response.get("content-length") == "6"
            assert response.get("date")
            assert response.get("keep-alive") == "timeout=75"  # 180


def test_a_body_in_one_piece_needs_no_length_of_the_app(lab: Lab) -> None:
    response = lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % lab.app(answer(b"abc", length=False)).encode())
    assert (response.get("content-length"), response.body) == ("3", b"abc")


@pytest.mark.parametrize(("version", "framing"), [("1.1", "chunked"), ("1.0", None)])
def test_a_stream_is_chunked_or_ends_with_the_connection(lab: Lab, version: str, framing: str | None) -> None:
    """56."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        for word in (b"one ", b"", b"two ", b"three"):
            await send(piece(word, more=True))
        await send(piece())

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, version=version)
        response = client.response()
        assert (response.body, response.complete) == (b"one two three", True)
        assert response.get("transfer-encoding") == framing
        if version == "1.0":
            assert response.get("connection") == "close"
        else:
            client.send(GET)
            assert client.response().status == 200


def test_http_1_0_is_kept_where_the_client_asks(lab: Lab) -> None:
    with lab.connect() as client:
        for _ in range(2):
            client.get("/", "Connection: keep-alive", version="1.0")
            assert client.response().get("connection") == "keep-alive"
        client.get("/", version="1.0")
        assert client.response().get("connection") == "close"
        assert client.is_closed()


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304), ("HEAD", 404)])
def test_no_body_where_there_may_be_none(lab: Lab, method: str, status: int) -> None:
    path = lab.app(answer(b"unwanted", status))
    with lab.connect() as client:
        client.get(path, method=method)
        response = client.response(method)
        assert response.status == status
        assert response.get("content-length") == (None if status == 204 else "8")
        client.send(GET)  # nothing of the body is in the way
        assert client.response().body == b"hello\n"


def test_scope(lab: Lab) -> None:
    """163."""
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        await answer()(scope, receive, send)

    lab.app(app, "/a/bö/")
    with lab.connect() as client:
        client.get("/a%2Fb%C3%B6/?x=%20&y", "X-Tab: \t v ", "X_Y: dropped", "Cookie: a=1", "Cookie: b=2")
        assert client.response().status == 200
        name = client.sock.getsockname()
    assert seen.pop("headers") == [
        (b"host", b"test"),
        (b"x-tab", b"v"),
        (b"cookie", b"a=1"),
        (b"cookie", b"b=2"),
    ]
    assert seen == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "server": lab.address,
        "client": name,
        "scheme": "http",
        "method": "GET",
        "root_path": "",
        "path": "/a/bö/",
        "raw_path": b"/a%2Fb%C3%B6/",
        "query_string": b"x=%20&y",
        "state": {},
    }


def test_what_an_app_does_to_its_scope_stays_in_its_request(lab: Lab) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((list(scope["headers"]), dict(scope["state"]), dict(scope["asgi"])))
        scope["headers"].append((b"x-added", b"1"))
        scope["state"]["added"] = True  # 160
        scope["asgi"]["added"] = True
        await answer()(scope, receive, send)

    path = lab.app(app)
    with lab.connect() as client:
        for _ in range(3):
            client.get(path)
            assert client.response().status == 200
    assert seen[0] == seen[1] == seen[2]


def test_root_path_is_in_path_and_not_in_raw_path() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        await answer()(scope, receive, send)

    with Lab(app=app, root_path="/shop") as lab:
        assert lab.ask(b"GET /cart HTTP/1.1\r\nHost: a\r\n\r\n").status == 200
    assert (seen["root_path"], seen["path"], seen["raw_path"]) == ("/shop", "/shop/cart", b"/cart")


def test_a_unix_socket_has_no_client_address(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        await answer()(scope, receive, send)

    with Lab(app=app, uds=tmp_path / "socket") as lab:
        assert lab.ask(GET).status == 200
    assert (seen["client"], seen["server"]) == (None, (str(tmp_path / "socket"), None))


# ---------------------------------------------------------------------------------------- bodies of requests


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_an_upload_comes_back(lab: Lab, chunked: bool, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    if chunked:
        pieces = [body[i : i + 50_000] for i in range(0, size, 50_000)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces) + b"0\r\n\r\n"
        framing = b"Transfer-Encoding: chunked"
    else:
        data, framing = body, b"Content-Length: %d" % size
    with lab.connect() as client:
        for _ in range(2):
            client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n%b" % (framing, data))
            response = client.response()
            assert response.body == body


def test_an_upload_in_single_bytes_takes_linear_time(lab: Lab) -> None:
    """103: each chunk has one byte, and the app takes them all at once."""
    size = 300_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, _ = await read_body(receive)
        await answer(b"%d" % len(body))(scope, receive, send)

    path = lab.app(app)
    began = time.monotonic()
    with lab.connect() as client:
        client.get(path, "Transfer-Encoding: chunked", method="POST")
        client.send(b"1\r\nx\r\n" * size + b"0\r\n\r\n")
        assert client.response().body == b"%d" % size
    assert time.monotonic() - began < 4


def test_reading_stops_while_the_app_does_not_take_the_body(lab: Lab) -> None:
    """Memory for an upload is bounded by the high-water mark and what one read brings."""
    held: list[int] = []
    gate: list[asyncio.Event] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        gate.append(asyncio.Event())
        await gate[0].wait()
        exchange = receive.__self__  # type: ignore[attr-defined]
        held.append(exchange.unread_bytes)
        body, _ = await read_body(receive)
        await answer(b"%d" % len(body))(scope, receive, send)

    path = lab.app(app)
    size = 20_000_000
    with lab.connect() as client:
        client.get(path, f"Content-Length: {size}", method="POST")
        client.sock.setblocking(False)
        sent = 0
        stuck_since = time.monotonic()
        while time.monotonic() - stuck_since < 0.3:  # until nothing was taken for a while
            with contextlib.suppress(BlockingIOError):
                sent += client.sock.send(bytes(min(65536, size - sent)))
                stuck_since = time.monotonic()
        assert sent < size
        lab.loop.call_soon_threadsafe(gate[0].set)
        client.sock.settimeout(5)
        client.send(bytes(size - sent))
        assert client.response().body == b"%d" % size
    assert held[0] <= 64 * 1024 + 256 * 1024


def test_continue_is_sent_when_the_app_reads_and_not_before(lab: Lab) -> None:
    gate: list[asyncio.Event] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        gate.append(asyncio.Event())
        await gate[0].wait()
        await echo(scope, receive, send)

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Content-Length: 5", method="POST")
        until(lambda: gate)
        client.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.more()
        client.sock.settimeout(5)
        lab.loop.call_soon_threadsafe(gate[0].set)
        assert client.response().status == 100
        client.send(b"12345")
        assert client.response().body == b"12345"
        client.send(GET)
        assert client.response().status == 200


def test_an_app_that_does_not_want_the_body_spares_the_client_sending_it(lab: Lab) -> None:
    path = lab.app(answer(b"no", 403))
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Content-Length: 5", method="POST")
        response = client.response()
        assert (response.status, response.get("connection")) == (403, "close")
        assert client.is_closed()


@pytest.mark.parametrize("size", [9000, 200_000])
def test_a_small_body_that_the_app_ignores_does_not_cost_the_connection(lab: Lab, size: int) -> None:
    """23, 128."""
    with lab.connect() as client:
        client.get("/", f"Content-Length: {size}", method="POST")
        response = client.response()
        assert response.get("connection") != "close"
        client.send(bytes(size) + GET)
        assert client.response().status == 200


def test_a_large_body_that_the_app_ignores_does(lab: Lab) -> None:
    """23: and the answer arrives although the client goes on sending."""
    with lab.connect() as client:
        client.get("/", "Content-Length: 3000000", method="POST")
        client.send(bytes(200_000))
        response = client.response()
        assert (response.status, response.get("connection"), response.body) == (200, "close", b"hello\n")
        assert client.is_closed()


@pytest.mark.parametrize("cut", CUT_SHORT)
def test_a_body_that_is_cut_short_is_never_seen_whole(lab: Lab, cut: bytes) -> None:
    """126."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(await read_body(receive))

    path = lab.app(app)
    with lab.back_to_baseline():
        for leave in (Client.end, Client.reset):
            with lab.connect() as client:
                client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b" % (path.encode(), cut))
                until(lambda: lab.tasks)
                leave(client)
                until(lambda: not lab.tasks)
    assert [whole for _, whole in seen] == [False, False]


# ---------------------------------------------------------------------------------------- pipelining


def test_pipelined_requests_are_answered_in_order(lab: Lab) -> None:
    """128."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        number = int(scope["query_string"])
        await asyncio.sleep(0.03 if number == 0 else 0)
        await answer(b"%d" % number)(scope, receive, send)

    path = lab.app(app).encode()
    with lab.connect() as client:
        client.send(
            b"".join(b"GET %b?%d HTTP/1.1\r\nHost: a\r\n\r\n" % (path, number) for number in range(1000))
        )  # 138
        assert [client.response().body for _ in range(1000)] == [b"%d" % number for number in range(1000)]


def test_a_pipelined_request_follows_an_unread_body(lab: Lab) -> None:
    """128."""
    with lab.connect() as client:
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc" + GET)
        assert [client.response().status for _ in range(2)] == [200, 200]


def test_bytes_after_connection_close_are_ignored(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    """128."""
    with lab.connect() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + GET + b"\0\0 nonsense")
        assert client.response().get("connection") == "close"
        assert client.is_closed()
    assert not log.records


def test_a_good_request_and_a_bad_one(lab: Lab) -> None:
    """128."""
    with lab.connect() as client:
        client.send(GET + b"GET /a b HTTP/1.1\r\n\r\n")
        assert [client.response().status for _ in range(2)] == [200, 400]
        assert client.is_closed()


def test_a_client_that_closes_its_side_still_gets_its_answers(lab: Lab) -> None:
    with lab.connect() as client:
        client.send(GET * 3)
        client.end()
        assert [client.response().status for _ in range(3)] == [200, 200, 200]
        assert client.is_closed()


# ---------------------------------------------------------------------------------------- faulty requests (G)


@pytest.mark.parametrize(("data", "status"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused(lab: Lab, data: bytes, status: int, log: pytest.LogCaptureFixture) -> None:
    """Group G: the status, `Connection: close`, a close, and no word at ERROR."""
    with lab.connect() as client:
        client.send(data)
        response = client.response()
        assert (response.status, response.get("connection"), response.complete) == (status, "close", True)
        assert client.is_closed()
    assert not errors(log)
    assert lab.ask(GET).status == 200


def test_130_a_harmless_trailer_changes_nothing(lab: Lab) -> None:
    response = lab.ask(post(CHUNKED, b"2\r\nab\r\n0\r\nX-Forwarded-Proto: https\r\n\r\n"))
    assert response.body == b"ab"


def test_136_absolute_form_wins_over_host(lab: Lab) -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await answer()(scope, receive, send)

    path = lab.app(app)
    assert lab.ask(b"GET http://real%b?q HTTP/1.1\r\nHost: other\r\n\r\n" % path.encode()).status == 200
    assert seen[0]["headers"] == [(b"host", b"real")]
    assert (seen[0]["path"], seen[0]["raw_path"], seen[0]["query_string"]) == (path, path.encode(), b"q")


@pytest.mark.parametrize("framing", ["Content-Length: 5000000", "Transfer-Encoding: chunked"])
def test_133_a_body_over_the_limit_is_refused_and_the_answer_arrives(hasty: Lab, framing: str) -> None:
    """413 before the body is read, through a client that goes on sending for a while."""
    with hasty.connect() as client:
        client.get("/echo", framing, method="POST")
        with contextlib.suppress(ConnectionError):
            for _ in range(5):
                client.send(b"8000\r\n%b\r\n" % bytes(0x8000))
        assert client.response().status == 413
        assert client.is_closed()


def test_135_the_reason_is_logged_and_not_too_often(log: pytest.LogCaptureFixture) -> None:
    with Lab(app=answer()) as lab:
        for _ in range(40):
            lab.ask(b"GET /\xf0\x9f\x98\x80 HTTP/1.1\r\nHost: a\r\nCookie: secret\r\n\r\n")
    lines = [record for record in log.records if record.name == "jumpstart_server.refusals"]
    assert 10 <= len(lines) <= 30  # ten a second
    line = lines[0].getMessage()
    assert lines[0].levelno == logging.INFO
    assert "127.0.0.1" in line and "400" in line and r"/\xf0\x9f" in line
    assert "secret" not in line


def test_138_a_request_in_single_bytes(lab: Lab) -> None:
    with lab.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc":
            client.send(bytes((byte,)))
        assert client.response().body == b"abc"


def test_28_after_garbage_and_resets_all_is_as_before(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    with lab.back_to_baseline():
        for number in range(60):
            client = lab.connect()
            client.send((b"\0garbage", GET, b"GET / HT", post(b"Content-Length: 9", b"1"))[number % 4])
            client.reset()
    assert lab.ask(GET).status == 200
    assert not errors(log)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS | st.binary(max_size=20), max_size=12), st.booleans())
def test_any_bytes_get_an_answer_or_a_close(
    lab: Lab, log: pytest.LogCaptureFixture, words: list[bytes], well_begun: bool
) -> None:
    """Never a hang, never a traceback. When the client has said all, everything it is sent is a series of responses."""
    log.clear()
    with lab.connect() as client:
        try:
            client.send((GET if well_begun else b"") + b"".join(words))
            client.end()
            while client.buffer or client.more():
                assert client.response().status in STATUSES
        except (ConnectionError, AssertionError) as error:
            if isinstance(error, AssertionError) and "closed without" not in str(error):
                raise
    assert not [line for line in errors(log) if "exception in the app" not in line]


# ---------------------------------------------------------------------------------------- disconnects (B)


@pytest.mark.parametrize("leave", [Client.__exit__, Client.reset], ids=["close", "reset"])
def test_40_a_stream_ends_within_a_second_after_its_client(lab: Lab, log: pytest.LogCaptureFixture, leave: Any) -> None:
    """Although it waits for something else than send."""
    ended: list[float] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.sleep(60)
            yield b"never"
        finally:
            ended.append(time.monotonic())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        async with contextlib.aclosing(events()) as stream:
            async for event in stream:
                await send(piece(event, more=True))

    path = lab.app(app)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        assert client.head()[0] == 200
        assert client.line() == b"5"
        left = time.monotonic()
        leave(client)
        until(lambda: ended)
    assert ended[0] - left < 1
    assert not errors(log)  # 51


def test_send_raises_when_the_client_has_left(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    raised: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"
        await send(start())
        try:
            while True:
                await send(piece(b"x" * 1000, more=True))
                await asyncio.sleep(0)
        except OSError as error:
            raised.append(error)
            raise

    path = lab.app(app)
    client = lab.connect()
    client.get(path)
    until(lambda: lab.tasks)
    client.sock.close()
    until(lambda: raised)
    assert isinstance(raised[0], ClientGoneError)
    until(lambda: not lab.tasks)
    assert not errors(log)


def test_50_first_the_message_then_the_cancellation(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    open_resources = 0
    story: list[str] = []

    @contextlib.asynccontextmanager
    async def database() -> AsyncIterator[None]:
        nonlocal open_resources
        open_resources += 1
        try:
            yield
        finally:
            open_resources -= 1

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            story.append("disconnect")

        listener = asyncio.create_task(listen())
        try:
            async with database():
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            story.append("cancelled")
            raise
        finally:
            listener.cancel()

    path = lab.app(app)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path)
        until(lambda: open_resources)
        client.sock.close()
        until(lambda: not open_resources)
    assert story == ["disconnect", "cancelled"]
    assert not errors(log)


def test_a_post_that_has_not_answered_runs_to_its_end(lab: Lab) -> None:
    """Half a payment is worse than one that nobody waits for."""
    done: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await read_body(receive) == (b"ok", True)
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.sleep(0.7)  # longer than the grace
        done.append("paid")
        with contextlib.suppress(OSError):
            await answer()(scope, receive, send)

    path = lab.app(app)
    with lab.back_to_baseline():
        client = lab.connect()
        client.get(path, "Content-Length: 2", method="POST")
        client.send(b"ok")
        until(lambda: lab.tasks)
        client.sock.close()
        until(lambda: done)


def test_45_what_runs_after_the_response_is_not_cancelled(lab: Lab) -> None:
    done: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer()(scope, receive, send)
        await asyncio.sleep(0.7)
        done.append("mail sent")

    path = lab.app(app)
    client = lab.connect()
    client.get(path)
    assert client.response().status == 200
    client.reset()
    assert lab.tasks  # counted in the drain
    until(lambda: done)


def test_background_work_does_not_keep_the_next_request_waiting(lab: Lab) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer()(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"  # the exchange is over for this app
        await asyncio.sleep(0.5)

    path = lab.app(app)
    began = time.monotonic()
    with lab.connect() as client:
        for _ in range(3):
            client.get(path)
            assert client.response().status == 200
    assert time.monotonic() - began < 0.4


def test_41_resets_in_the_middle_of_a_large_body_leave_nothing_behind(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    chunk = bytes(1_000_000)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        for number in range(10):
            await send(piece(chunk, more=number < 9))

    path = lab.app(app)

    def burst(count: int) -> None:
        for _ in range(count):
            client = lab.connect()
            client.get(path)
            assert client.sock.recv(10)
            client.reset()
        until(lambda: not lab.tasks and not lab.connections)
        gc.collect()

    with lab.back_to_baseline():
        burst(20)
        before = resident_bytes()
        burst(200)
        until(lambda: resident_bytes() - before < 20_000_000)
    assert not errors(log)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_43_a_slow_reader_costs_the_high_water_mark(lab: Lab) -> None:
    sent = 0
    chunk = bytes(100_000)
    most = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent, most
        transport = send.__self__._connection._transport  # type: ignore[attr-defined]
        await send(start())
        for _ in range(200):
            await send(piece(chunk, more=True))
            sent += len(chunk)
            most = max(most, transport.get_write_buffer_size())
        await send(piece())

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path)
        previous = -1
        while sent != previous or not sent:  # until it does not move any more
            previous = sent
            time.sleep(0.1)
        assert sent < 20_000_000
        response = client.response()  # and it goes on when the client does
        assert (len(response.body), response.complete) == (20_000_000, True)
    assert most < 64 * 1024 + 2 * len(chunk)


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_53_an_exception_in_the_middle_of_a_body_can_be_seen(
    lab: Lab, log: pytest.LogCaptureFixture, framing: str
) -> None:
    """No last chunk, fewer bytes than announced, or a reset."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(200, *([(b"content-length", b"100")] if framing == "length" else [])))
        await send(piece(b"half", more=True))
        await asyncio.sleep(0.02)
        raise ValueError("no more")

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, version="1.0" if framing == "close" else "1.1")
        if framing == "close":
            with pytest.raises(ConnectionResetError):
                client.rest()
        else:
            response = client.response()
            assert (response.body, response.complete) == (b"half", False)
            assert client.is_closed()
    until(lambda: log.records)
    assert "no more" in log.text and "Traceback" in log.text


def test_starlette_streams_are_closed(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    """166: a sync generator, which Starlette runs in threads, and an async one that waits."""
    from starlette.responses import StreamingResponse

    ended: list[str] = []

    def sync_stream() -> Iterator[bytes]:
        try:
            while True:
                time.sleep(0.01)
                yield b"x" * 100
        finally:
            ended.append("sync")

    async def async_stream() -> AsyncIterator[bytes]:
        try:
            yield b"x"
            await asyncio.sleep(60)
        finally:
            ended.append("async")

    for make in (async_stream, sync_stream):

        async def app(scope: Scope, receive: Receive, send: Send, make: Any = make) -> None:
            stream = make()
            try:
                await StreamingResponse(stream)(scope, receive, send)  # type: ignore[arg-type]
            finally:
                if make is sync_stream:
                    stream.close()

        path = lab.app(app)
        client = lab.connect()
        client.get(path)
        assert client.head()[0] == 200
        left = time.monotonic()
        client.sock.close()
        expected = make.__name__.partition("_")[0]
        until(lambda expected=expected: expected in ended)  # type: ignore[misc]
        assert time.monotonic() - left < 1.2
    until(lambda: not lab.tasks)
    assert not errors(log)


# ---------------------------------------------------------------------------------------- apps that misbehave (I)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def _only_start(scope: Scope, receive: Receive, send: Send) -> None:
    await send(start())


async def _body_first(scope: Scope, receive: Receive, send: Send) -> None:
    await send(piece(b"a"))


async def _two_starts(scope: Scope, receive: Receive, send: Send) -> None:
    await send(start())
    await send(start())


async def _unknown_type(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.trailers"})


async def _no_type(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"status": 200})


async def _no_status(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start"})


async def _not_a_message(scope: Scope, receive: Receive, send: Send) -> None:
    await send("hello")  # type: ignore[arg-type]


async def _raises(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("oh")


async def _exits(scope: Scope, receive: Receive, send: Send) -> None:
    raise SystemExit(3)


async def _cancels(scope: Scope, receive: Receive, send: Send) -> None:
    raise asyncio.CancelledError


async def _swallows(scope: Scope, receive: Receive, send: Send) -> None:
    with contextlib.suppress(RuntimeError):
        await send(piece(b"a"))


def _sends(start: dict[str, Any], body: Any = b"") -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start)
        await send({"type": "http.response.body", "body": body})

    return app


MISUSE = {
    "returns without a response": _nothing,
    "returns without a body": _only_start,
    "body first": _body_first,
    "two starts": _two_starts,
    "unknown type": _unknown_type,
    "no type": _no_type,
    "no status": _no_status,
    "not a message": _not_a_message,
    "raises": _raises,
    "exits": _exits,
    "cancels itself": _cancels,
    "swallows its error": _swallows,
    "status as text": _sends({"type": "http.response.start", "status": "200"}),
    "status out of range": _sends(start(99)),
    "header injection": _sends(start(200, (b"x", b"a\r\nEvil: 1"))),  # 153
    "header name injection": _sends(start(200, (b"x: 1\r\nEvil", b"1"))),
    "header with NUL": _sends(start(200, (b"x", b"a\0"))),
    "headers as text": _sends({"type": "http.response.start", "status": 200, "headers": [("x", "y")]}),
    "headers not pairs": _sends({"type": "http.response.start", "status": 200, "headers": [b"x"]}),
    "headers a number": _sends({"type": "http.response.start", "status": 200, "headers": 7}),
    "headers a mapping": _sends({"type": "http.response.start", "status": 200, "headers": {b"x": b"y"}}),
    "length no number": _sends(start(200, (b"content-length", b"ten"))),
    "two lengths": _sends(start(200, (b"content-length", b"1"), (b"content-length", b"2"))),
    "body as text": _sends(start(), "text"),
    "body none": _sends(start(), None),
}


@pytest.mark.parametrize("app", MISUSE.values(), ids=MISUSE.keys())
def test_misuse_is_an_error_in_the_log_and_a_500(lab: Lab, app: Any, log: pytest.LogCaptureFixture) -> None:
    path = lab.app(app)
    with lab.connect() as client:
        client.get(path)
        response = client.response()
        assert (response.status, response.get("connection")) == (500, "close")
        assert response.get("evil") is None
        assert client.is_closed()
    assert len(errors(log)) == 1
    assert path in errors(log)[0]
    assert lab.ask(GET).status == 200


@pytest.mark.parametrize("wrong", [piece(b"again"), start(), {"type": "nonsense"}])
def test_a_message_after_the_end_is_an_error_and_harms_nobody(
    lab: Lab, wrong: dict[str, Any], log: pytest.LogCaptureFixture
) -> None:
    raised: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer()(scope, receive, send)
        try:
            await send(wrong)
        except ASGIMisuseError as error:
            raised.append(error)
            raise

    path = lab.app(app)
    with lab.connect() as client:
        for _ in range(2):
            client.get(path)
            assert client.response().body == b"hello\n"
        client.send(GET)
        assert client.response().body == b"hello\n"
    until(lambda: len(raised) == 2 and len(errors(log)) == 2)


def test_an_error_page_may_follow_a_refused_head(lab: Lab) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _sends(start(200, (b"x", b"a\nb")))(scope, receive, send)
        except ResponseError:
            await answer(b"page", 500)(scope, receive, send)

    response = lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % lab.app(app).encode())
    assert (response.status, response.body) == (500, b"page")


def test_a_body_longer_than_its_length_is_cut(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    path = lab.app(_sends(start(200, (b"content-length", b"3")), b"abcdef"))
    with lab.connect() as client:
        client.get(path)
        assert client.response().body == b"abc"
        client.send(GET)
        assert client.response().status == 200
    assert "3 bytes beyond" in errors(log)[0]


def test_a_body_shorter_than_its_length_is_seen_to_be(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    path = lab.app(_sends(start(200, (b"content-length", b"10")), b"abc"))
    with lab.connect() as client:
        client.get(path)
        response = client.response()
        assert (response.body, response.complete) == (b"abc", False)
    until(lambda: errors(log))
    assert "fewer bytes" in errors(log)[0]


def test_hop_by_hop_headers_are_ours(lab: Lab) -> None:
    path = lab.app(answer(b"abc", headers=[(b"Transfer-Encoding", b"chunked"), (b"Keep-Alive", b"timeout=9")]))
    response = lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
    assert (response.body, response.get("transfer-encoding")) == (b"abc", None)
    assert response.get("keep-alive") == "timeout=75"


def test_the_app_may_close_the_connection(lab: Lab) -> None:
    path = lab.app(answer(headers=[(b"Connection", b"close")]))
    with lab.connect() as client:
        client.get(path)
        assert client.response().get("connection") == "close"
        assert client.is_closed()


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_other_kinds_of_bytes_are_taken(lab: Lab, kind: Any) -> None:
    path = lab.app(_sends(start(), kind(b"abc")))
    assert lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode()).body == b"abc"


def test_several_may_wait_in_receive(lab: Lab) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        waiting = [asyncio.create_task(receive()) for _ in range(3)]  # type: ignore[arg-type, var-annotated]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        await answer()(scope, receive, send)
        kinds = [(await task)["type"] for task in waiting[1:]]
        assert kinds == ["http.disconnect"] * 2

    path = lab.app(app)
    assert lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode()).status == 200
    until(lambda: not lab.tasks)


var: contextvars.ContextVar[str] = contextvars.ContextVar("var")


def test_158_contexts_are_clean_between_requests(lab: Lab) -> None:
    """Also after a body that made reading pause, and when requests are pipelined."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(var.get("unset"))
        var.set("leaked")
        await asyncio.sleep(0)
        await echo(scope, receive, send)

    path = lab.app(app)
    body = bytes(500_000)
    with lab.connect() as client:
        for _ in range(3):
            client.get(path, f"Content-Length: {len(body)}", method="POST")
            client.send(body)
            assert client.response().body == body
        client.get(path)
        client.get(path)
        client.get(path)
        for _ in range(3):
            assert client.response().status == 200
    assert seen == ["unset"] * 6


def test_160_lifespan_state_and_context_are_seen() -> None:
    seen: list[tuple[Any, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            scope["state"]["pool"] = "pool"
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        seen.append((dict(scope["state"]), var.get("unset")))
        scope["state"]["mine"] = True
        await answer()(scope, receive, send)

    with Lab(app=app, lifespan="on") as lab:
        for _ in range(2):
            assert lab.ask(GET).status == 200
    assert seen == [({"pool": "pool"}, "unset")] * 2


# ---------------------------------------------------------------------------------------- times (A 26, 101, K 180)


def took(began: float, expected: float, slack: float = 0.35) -> bool:
    return expected - 0.05 <= time.monotonic() - began <= expected + slack


def test_101_a_connection_that_says_nothing_is_closed(hasty: Lab) -> None:
    with hasty.back_to_baseline():
        began = time.monotonic()
        with hasty.connect() as client:
            assert client.is_closed()
            assert took(began, 0.3)


def test_26_a_head_that_dribbles_has_its_time_and_no_more(hasty: Lab) -> None:
    for first in (b"", GET):  # on a new connection, and on one that was idle
        with hasty.connect() as client:
            if first:
                client.send(first)
                assert client.response().status == 200
            began = time.monotonic()
            client.send(b"GET / HTTP/1.1\r\n")
            client.sock.settimeout(0.05)
            while True:
                try:
                    if client.more():
                        break
                except TimeoutError:
                    client.send(b"X: y\r\n")
            client.sock.settimeout(5)
            assert took(began, 0.3)
            assert client.response().status == 408
            assert client.is_closed()


def test_26_a_body_that_stops_is_answered(hasty: Lab) -> None:
    with hasty.back_to_baseline(), hasty.connect() as client:
        client.get("/echo", "Content-Length: 5", method="POST")
        began = time.monotonic()
        client.send(b"1")
        assert client.response().status == 408
        assert took(began, 0.3)
        assert client.is_closed()


def test_a_body_that_dribbles_is_taken(hasty: Lab) -> None:
    """The time is one between two pieces."""
    with hasty.connect() as client:
        client.get("/echo", "Content-Length: 5", method="POST")
        for byte in b"12345":
            time.sleep(0.12)
            client.send(bytes((byte,)))
        assert client.response().body == b"12345"


def test_a_slow_app_is_not_a_slow_client(hasty: Lab) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await echo(scope, receive, send)

    path = hasty.app(app)
    with hasty.connect() as client:
        client.get(path, "Content-Length: 90000", method="POST")
        client.send(bytes(90_000))
        assert len(client.response().body) == 90_000
        client.get(path, "Content-Length: 5", "Expect: 100-continue", method="POST")
        assert client.response().status == 100
        client.send(b"12345")
        assert client.response().body == b"12345"


@pytest.mark.parametrize("when", ["sending", "closing", "idle"])
def test_26_a_client_that_takes_nothing_is_cut(hasty: Lab, when: str, log: pytest.LogCaptureFixture) -> None:
    """While the app sends, after its response when the connection is to be closed, and when it is to be kept."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(200, *([(b"connection", b"close")] if when == "closing" else [])))
        await send(piece(bytes(30_000_000), more=when == "sending"))
        await send(piece()) if when == "sending" else None

    path = hasty.app(app)
    with hasty.back_to_baseline():
        client = Client(socket.socket())
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sock.connect(hasty.address)
        began = time.monotonic()
        client.get(path)
        until(lambda: hasty.tasks or hasty.connections)
        until(lambda: not hasty.tasks and not hasty.connections)
        assert time.monotonic() - began < 4  # after it lingered, or kept alive
        client.sock.close()
    assert not errors(log)


def test_a_slow_reader_is_not_cut(hasty: Lab) -> None:
    size = 3_000_000
    path = hasty.app(answer(bytes(size)))
    with Client(socket.socket()) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sock.connect(hasty.address)
        client.get(path)
        received = 0
        began = time.monotonic()
        while time.monotonic() - began < 1.2:  # three times as long as write_timeout
            received += len(client.sock.recv(30_000))
            time.sleep(0.05)
        while received < size:
            received += len(client.sock.recv(1_000_000))


def test_180_an_idle_connection_is_kept_and_closed(hasty: Lab) -> None:
    with hasty.connect() as client:
        for _ in range(5):
            client.send(GET)
            assert client.response().status == 200
            time.sleep(0.15)
        client.send(GET)
        assert client.response().status == 200
        began = time.monotonic()
        assert client.is_closed()
        assert took(began, 0.3)


def test_180_a_request_that_waits_behind_a_busy_loop_is_not_lost(hasty: Lab) -> None:
    """The loop stands still over the end of an idle time; timers ring before sockets are read."""
    with hasty.connect() as client:
        client.send(GET)
        assert client.response().status == 200
        hasty.loop.call_soon_threadsafe(time.sleep, 0.5)
        client.send(GET)
        assert client.response().status == 200


def test_no_keep_alive() -> None:
    with Lab(settings=ConnectionSettings(keep_alive=0), app=answer()) as lab, lab.connect() as client:
        client.send(GET)
        assert client.response().get("connection") == "close"
        assert client.is_closed()


def test_21_30_idle_and_silent_connections_are_in_nobodys_way(lab: Lab) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(60):
            client = stack.enter_context(lab.connect())
            if number % 2:
                client.send(GET)
                assert client.response().status == 200
        began = time.monotonic()
        assert lab.ask(GET).status == 200
        assert time.monotonic() - began < 0.05 + 0.1  # a shared machine


# ---------------------------------------------------------------------------------------- WebSockets and other upgrades


async def _socket_echo(scope: Scope, receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept", "headers": [(b"x-state", json.dumps(scope["state"]).encode())]})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


def test_a_websocket_echoes(lab: Lab) -> None:
    from websockets.sync.client import connect

    path = lab.app(_socket_echo)
    with lab.connect() as client:
        client.send(GET)  # on a connection that has served a request before
        assert client.response().status == 200
        with connect(f"ws://127.0.0.1:{lab.address[1]}{path}", sock=client.sock, proxy=None) as websocket:
            for text in ("one", "two" * 50_000):
                websocket.send(text)
                assert websocket.recv() == text
    until(lambda: not lab.tasks)


def test_a_websocket_frame_behind_its_handshake_is_not_lost(lab: Lab) -> None:
    path = lab.app(_socket_echo)
    with lab.connect() as client:
        client.send(
            b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n\x81\x82\0\0\0\0hi" % path.encode()
        )
        assert client.head()[0] == 101
        assert client.exactly(4) == b"\x81\x02hi"
    until(lambda: not lab.tasks)


@pytest.mark.parametrize(
    "fields", [("Upgrade: h2c",), ("Upgrade: foo/2",), ("Upgrade: websocket", "Content-Length: 2")]
)
def test_other_upgrades_are_ignored(lab: Lab, fields: tuple[str, ...]) -> None:
    with lab.connect() as client:
        client.get("/echo", "Connection: upgrade", *fields, method="POST")
        client.send(b"ok" if len(fields) > 1 else b"")
        assert client.response().status == 200
        client.send(GET)
        assert client.response().status == 200


# ---------------------------------------------------------------------------------------- drain


@pytest.mark.parametrize("loop", LOOPS)
def test_60_65_drain(loop: str) -> None:
    gate: list[asyncio.Event] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        gate.append(asyncio.Event())
        await gate[-1].wait()
        await answer()(scope, receive, send)

    begun: list[str] = []

    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])

    with Lab(loop) as lab, lab.connect() as idle, lab.connect() as busy, lab.connect() as half, lab.connect() as fresh:
        lab.app(answer(), "/")
        idle.send(GET)
        assert idle.response().status == 200
        busy.get(lab.app(slow))
        busy.get(lab.app(never))  # pipelined
        half.send(GET[:10])
        until(lambda: gate)
        until(lambda: lab.connections == 4)
        lab.run(asyncio.sleep(0.02))  # the half head has been read
        began = time.monotonic()
        lab.stop()
        assert idle.is_closed() and fresh.is_closed()
        assert time.monotonic() - began < 0.5
        half.send(GET[10:])
        response = half.response()
        assert (response.status, response.get("connection")) == (200, "close")
        lab.loop.call_soon_threadsafe(gate[0].set)
        response = busy.response()
        assert (response.status, response.get("connection")) == (200, "close")
        assert busy.is_closed() and half.is_closed()
    assert not begun


def test_58_a_request_that_came_with_the_stop_is_served() -> None:
    with Lab(app=answer()) as lab, lab.connect() as client, lab.connect() as other:
        until(lambda: lab.connections == 2)
        client.send(GET)
        assert client.response().status == 200
        lab.loop.call_soon_threadsafe(
            lambda: [connection.shutdown() for connection in lab.server.server_state.connections]
        )
        for waiting in (client, other):
            waiting.send(GET)
            assert waiting.response().get("connection") == "close"


def test_61_streams_that_do_not_end_are_cancelled_when_the_time_is_over() -> None:
    cancelled: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await send(start())
            await send(piece(b"x", more=True))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(scope["path"])
            raise

    with Lab(app=app, timeout_graceful_shutdown=0) as lab:
        with lab.connect() as stream, lab.connect() as waiting:
            stream.get("/stream")
            assert stream.head()[0] == 200
            waiting.get("/waiting")
            until(lambda: lab.tasks == 2)
            lab.stop()
            assert waiting.response().status == 503
            stream.rest()
    assert sorted(cancelled) == ["/stream", "/waiting"]


@pytest.mark.parametrize("loop", LOOPS)
def test_165_a_websocket_is_told_of_the_stop(loop: str) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    story: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
            await send({"type": "websocket.accept"})
            story.append(await receive())
        finally:
            story.append("finally")

    with Lab(loop, app=app) as lab:
        with connect(f"ws://127.0.0.1:{lab.address[1]}/", proxy=None) as websocket:
            lab.stop()
            with pytest.raises(ConnectionClosed) as closed:
                websocket.recv(timeout=5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    assert story == [{"type": "websocket.disconnect", "code": 1012}, "finally"]


# ---------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("loop", LOOPS)
def test_tls(loop: str, certificate: tuple[Path, Path], log: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["scheme"])
        await echo(scope, receive, send)

    with Lab(loop, app=app, tls=certificate) as lab:
        with lab.connect() as client:
            for size in (0, 400_000):
                client.get("/", f"Content-Length: {size}", method="POST")
                client.send(bytes(size))
                assert client.response().body == bytes(size)
            client.send(b"nonsense\r\n\r\n")
            assert client.response().status == 400
            assert client.is_closed()
        with lab.connect() as client:  # leaves without an answer
            client.get("/", "Content-Length: 10", method="POST")
            until(lambda: lab.tasks)
        until(lambda: not lab.tasks and not lab.connections)
    assert set(seen) == {"https"}
    assert not errors(log)
