"""ASGI apps that misbehave (I): an error in the log and a 500, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from jumpstart_server.asgi import ASGIMisuseError
from jumpstart_server.http1 import ResponseError
from tests.server.asgi_lab import Lab, Receive, Scope, Send, answer, echo, piece, start, until
from tests.server.http_cases import GET, errors

pytestmark = pytest.mark.usefixtures("log")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A server with the defaults."""
    with Lab() as lab:
        lab.app(answer(), "/")
        lab.app(echo, "/echo")
        yield lab


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
    "interim status": _sends(start(103)),  # 145
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


def test_hop_by_hop_headers_are_ours(lab: Lab, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """155: left out, and warned of once."""
    monkeypatch.setattr("jumpstart_server.app_faults._warned_of", set())
    path = lab.app(answer(b"abc", headers=[(b"Transfer-Encoding", b"chunked"), (b"Keep-Alive", b"timeout=9")]))
    for _ in range(2):
        response = lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
        assert (response.body, response.get("transfer-encoding")) == (b"abc", None)
        assert response.get("keep-alive") == "timeout=75"
    warnings = [record.getMessage().lower() for record in log.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and "transfer-encoding" in warnings[0] and "keep-alive" in warnings[1]


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_other_kinds_of_bytes_are_taken(lab: Lab, kind: Any) -> None:
    path = lab.app(_sends(start(), kind(b"abc")))
    assert lab.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode()).body == b"abc"
