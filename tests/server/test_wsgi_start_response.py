"""PEP 3333 on the WSGI engine: `start_response`, and apps that misuse it (142)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest

from tests.server.wsgi_pep_lab import (
    App,
    Body,
    Environ,
    Lab,
    StartResponse,
    answering,
    failing,
    fields_of,
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(multiprocess=True) as lab:
        yield lab


@pytest.fixture
def one_thread() -> Iterator[Lab]:
    with Lab(threads=1) as lab:
        yield lab


def test_exc_info_replaces_a_head_that_was_not_sent(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [("X-A", "first"), ("Content-Length", "100")])
        yield b""
        try:
            raise ValueError
        except ValueError:
            start_response("503 Busy", [("X-A", "second")], sys.exc_info())
        yield b"sorry"

    lab.app = app
    response = lab.ask()
    assert (response.status, fields_of(response), response.body) == (503, [("x-a", "second")], b"sorry")


def test_exc_info_may_be_there_at_the_first_call(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            raise ValueError
        except ValueError:
            start_response("500 Oops", [], sys.exc_info())
        return [b"sorry"]

    lab.app = app
    response = lab.ask()
    assert (response.status, response.body) == (500, b"sorry")


@pytest.mark.parametrize("how", ["yield", "write"])
def test_exc_info_raises_when_the_head_was_sent(lab: Lab, caplog: pytest.LogCaptureFixture, how: str) -> None:
    raised: list[BaseException] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        write = start_response("200 OK", [])
        if how == "write":
            write(b"begun")
        else:
            yield b"begun"
        try:
            raise LookupError("the original")
        except LookupError:
            try:
                start_response("500 Oops", [], sys.exc_info())
            except LookupError as error:
                raised.append(error)
                raise
        yield b"never"

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        response = client.response()
        assert (response.status, response.body) == (200, b"begun")
        assert not response.complete, "a broken answer cannot be taken for a whole one"
        assert client.is_closed()
    lab.wait_idle()
    assert len(raised) == 1
    assert "LookupError: the original" in caplog.text


def test_an_exc_info_without_an_exception_raises_too(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"begun"
        start_response("500 Oops", [], sys.exc_info())
        yield b"never"

    lab.app = app
    assert lab.ask().body == b"begun"
    assert "after the response has begun" in caplog.text


def test_a_second_head_without_a_reason_is_a_mistake(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        start_response("201 Created", [])
        return [b"x"]

    assert "start_response was called twice" in failing(lab, app, caplog)


def test_a_mistake_may_be_mended_by_the_app(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            start_response("200 OK", [("X-A", "a\nb")])
        except Exception:
            start_response("400 Bad", [])
        return [b"sorry"]

    lab.app = app
    assert lab.ask().status == 400


def test_headers_may_be_anything_that_holds_pairs(lab: Lab) -> None:
    pairs = [("X-Pair", "b")]  # not said by another test: nothing is remembered of it
    for headers in (iter(pairs), pairs, tuple(pairs), [["X-Pair", "b"]], dict(pairs).items()):

        def app(environ: Environ, start_response: StartResponse, headers: Any = headers) -> Iterable[bytes]:
            start_response("200 OK", headers)
            return []

        lab.app = app
        assert fields_of(lab.ask())[0] == ("x-pair", "b")


@pytest.mark.parametrize("status", ["", "OK", "2000 OK", "20 OK", "-20 OK", " 200 OK", "099 x", "600 x", "２００ OK"])
def test_a_status_that_is_none_is_a_mistake(lab: Lab, caplog: pytest.LogCaptureFixture, status: str) -> None:
    assert f"status {status!r}" in failing(lab, answering([b"x"], status), caplog)


@pytest.mark.parametrize("status", [200, None, b"200 OK", "200 OK\r\nX-Evil: 1", "200 O\nK", "200 \0", "200 \u20ac"])
def test_a_status_that_would_break_the_message_is_a_mistake(
    lab: Lab, caplog: pytest.LogCaptureFixture, status: Any
) -> None:
    failing(lab, answering([b"x"], status), caplog)


@pytest.mark.parametrize("status", ["200", "299 Fine ", "404 Nicht \xfcberall", "599 x"])
def test_other_statuses_pass(lab: Lab, status: str) -> None:
    lab.app = answering([b"x"], status)
    with lab.connect() as client:
        client.get("/")
        line = client.line()
    assert line is not None and line.strip() == f"HTTP/1.1 {status}".strip().encode("latin-1")


@pytest.mark.parametrize(
    "header",
    [
        ("X-A", "a\r\nSet-Cookie: x=1"),
        ("X-A", "a\nb"),
        ("X-A", "a\rb"),
        ("X-A", "a\0"),
        ("X-A\r\nX-B", "c"),
        ("X-A:", "c"),
        ("X A", "c"),
        ("", "c"),
        ("X-A", "\u20ac"),
        ("X-\u20ac", "a"),
        ("X-A", 3),
        ("X-A", None),
        ("X-A", b"a"),
        ("X-A", ["a"]),
        ("X-A",),
        ("X-A", "b", "c"),
        3,
        ("Content-Length", "-1"),
        ("Content-Length", "five"),
    ],
)
def test_a_header_that_would_break_the_message_is_a_mistake(
    lab: Lab, caplog: pytest.LogCaptureFixture, header: Any
) -> None:
    """Case 153."""
    for _ in range(2):  # nothing of it is remembered
        failing(lab, answering([b"x"], headers=[header]), caplog)


@pytest.mark.parametrize("headers", [None, 3])
def test_headers_that_are_no_list_are_a_mistake(lab: Lab, caplog: pytest.LogCaptureFixture, headers: Any) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", headers)
        return []

    failing(lab, app, caplog)


def test_hop_by_hop_headers_are_left_out_and_warned_of_once(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 155."""
    monkeypatch.setattr("jumpstart_server.app_faults._warned_of", set())
    names = ["Transfer-Encoding", "Keep-Alive", "Proxy-Connection", "Upgrade", "TE", "Trailer"]
    fields = [("X-A", "1"), *((name, "x") for name in names), ("Connection", "upgrade"), ("X-B", "2")]
    for _ in range(3):
        lab.app = answering([b"hello"], headers=fields)
        response = lab.ask()
        assert fields_of(response) == [("x-a", "1"), ("x-b", "2"), ("content-length", "5")]
        assert response.get("transfer-encoding") is None and response.body == b"hello"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(names) + 1
    assert [name for name in (*names, "Connection") if not any(name.lower() in line for line in warnings)] == []


def test_an_app_may_ask_for_the_connections_end(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.app = answering([b"bye"], headers=[("Connection", "close")])
    with lab.connect() as client:
        client.get("/")
        response = client.response()
        assert (response.get("connection"), response.body) == ("close", b"bye")
        assert client.is_closed()
    assert caplog.text == ""


def test_a_body_before_the_head_is_a_mistake(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    for body in ([b"x"], [], iter([b"x"]), iter([])):
        app = cast(App, lambda environ, start_response, body=body: body)
        assert "before it called start_response" in failing(lab, app, caplog)


@pytest.mark.parametrize(
    "body", [["text"], [b"", None], 3, None, [bytearray(b"x")], "text", b"bytes", iter(["text"]), [memoryview(b"x")]]
)
def test_a_body_that_is_not_bytes_is_a_mistake(lab: Lab, caplog: pytest.LogCaptureFixture, body: Any) -> None:
    assert "TypeError" in failing(lab, answering(body), caplog)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("where", ["call", "iteration"])
def test_an_app_that_raises_costs_one_request(
    one_thread: Lab, caplog: pytest.LogCaptureFixture, error: BaseException, where: str
) -> None:
    def call(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("X-Secret", "y")])
        raise error

    lab = one_thread
    text = failing(lab, call if where == "call" else answering(Body([], error)), caplog)
    assert type(error).__name__ in text
    lab.app = answering([b"fine"])
    assert lab.ask().body == b"fine"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("length", [None, "100"])
def test_an_answer_that_breaks_off_is_never_whole(
    lab: Lab, caplog: pytest.LogCaptureFixture, version: str, length: str | None
) -> None:
    """Case 53: no last chunk; and where only the close ends the body, a reset."""
    headers = [("Content-Length", length)] if length else []
    lab.app = answering(Body([b"half"], ValueError("boom")), headers=headers)
    with lab.connect() as client:
        client.get("/", version=version)
        if version == "1.0" and length is None:
            with pytest.raises(ConnectionResetError):
                client.response()
        else:
            response = client.response()
            assert (response.status, response.body, response.complete) == (200, b"half", False)
            assert client.is_closed()
    lab.wait_idle()
    assert caplog.text.count("ValueError: boom") == 1
