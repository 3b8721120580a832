"""WSGI requests through real sockets: environ, bodies, memory, pipelining. Numbers are those of the cases."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.server.http_cases import (
    CUT_SHORT,
    GET,
    errors,
    post,
)
from tests.server.lab import make_lab
from tests.server.raw_http import Client, until
from tests.server.wsgi_lab import Environ, Gate, Lab, StartResponse, answer, echo

pytestmark = pytest.mark.usefixtures("log")


@pytest.fixture(scope="module", params=["wsgi", "wsgi-streamed", "wsgi-crowded"])
def running(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with make_lab(request.param) as lab:
        assert isinstance(lab, Lab)
        yield lab


@pytest.fixture
def lab(running: Lab) -> Iterator[Lab]:
    """A server with the defaults; each test leaves it idle."""
    yield running
    running.wait_idle()


def get(path: str, *fields: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path.encode(), b"".join(field + b"\r\n" for field in fields))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- one request after another --


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_was_asked_before_is_answered_anew(lab: Lab, method: str) -> None:
    """A repeated request is known again by its bytes; everything that differs in another is seen."""
    seen: list[Environ] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ)
        environ["added"] = True
        return answer()(environ, start_response)

    path = lab.app(app)
    with lab.connect() as client:
        for field in ("X: 1", "X: 1", "X: 1", "X: 2", "X: 1"):
            client.get(path, field, method=method)
            assert client.response(method).status == 200
    assert [environ["HTTP_X"] for environ in seen] == ["1", "1", "1", "2", "1"]
    assert len({id(environ["wsgi.input"]) for environ in seen}) == 5
    assert all(environ["REQUEST_METHOD"] == method for environ in seen)
    lab.apps[path] = answer(b"new")
    assert lab.ask(get(path)).body == b"new"


def test_environ(lab: Lab) -> None:
    seen: Environ = {}

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        return answer()(environ, start_response)

    lab.app(app, "/a/b\xc3\xb6/")
    with lab.connect() as client:
        client.get(
            "/a%2Fb%C3%B6/?x=%20&y", "X-Tab: \t v ", "X_Y: dropped", "Cookie: a=1", "Cookie: b=2", "X: 1", "X: 2"
        )
        assert client.response().status == 200
        host, port = client.sock.getsockname()
    told = {name: value for name, value in seen.items() if name.startswith("HTTP_")}
    assert told == {"HTTP_HOST": "test", "HTTP_X_TAB": "v", "HTTP_COOKIE": "a=1; b=2", "HTTP_X": "1,2"}  # 131
    assert (seen["REMOTE_ADDR"], seen["REMOTE_PORT"]) == (host, str(port))
    assert (seen["SERVER_NAME"], seen["SERVER_PORT"]) == (lab.address[0], str(lab.address[1]))
    assert (seen["SCRIPT_NAME"], seen["QUERY_STRING"], seen["wsgi.url_scheme"]) == ("", "x=%20&y", "http")
    assert seen["RAW_URI"] == seen["REQUEST_URI"] == "/a%2Fb%C3%B6/?x=%20&y"
    assert "CONTENT_LENGTH" not in seen


def test_an_app_may_do_what_it_likes_to_its_environ(lab: Lab, log: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        environ.clear()
        return answer()(environ, start_response)

    path = lab.app(app)
    with lab.connect() as client:
        for _ in range(3):
            client.get(path)
            assert client.response().status == 200
    assert not errors(log)


var: contextvars.ContextVar[str] = contextvars.ContextVar("var")


def test_158_contexts_are_clean_between_requests(lab: Lab) -> None:
    """Also after a body, for a request that is known again, and when requests are pipelined."""
    seen: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(var.get("unset"))
        var.set("leaked")
        return echo(environ, start_response)

    path = lab.app(app)
    body = bytes(500_000)
    with lab.connect() as client:
        for _ in range(2):
            client.get(path, f"Content-Length: {len(body)}", method="POST")
            client.send(body)
            assert client.response().body == body
        for _ in range(2):
            client.get(path)
            assert client.response().status == 200
        client.send(get(path) * 2)
        for _ in range(2):
            assert client.response().status == 200
    assert seen == ["unset"] * 6


def test_a_unix_socket_has_no_client_address(folder: Path) -> None:
    seen: Environ = {}

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        return answer()(environ, start_response)

    with Lab(app=app, uds=folder / "x.sock") as lab:
        with lab.connect() as client:
            for _ in range(3):
                client.send(GET)
                assert client.response().status == 200
            client.send(b"nonsense\r\n\r\n")
            assert client.response().status == 400
            assert client.is_closed()
    assert (seen["REMOTE_ADDR"], seen["REMOTE_PORT"]) == ("", "")
    assert (seen["SERVER_NAME"], seen["SERVER_PORT"]) == ("localhost", "80")


def test_a_large_body_comes_whole_over_a_unix_socket(folder: Path) -> None:
    body = bytes(range(256)) * 20_000
    with Lab(app=echo, uds=folder / "x.sock") as lab, lab.connect() as client:
        client.send(post(b"Content-Length: %d" % len(body), body))
        assert client.response().body == body


# -- bodies --


@pytest.mark.slow
def test_103_a_spooled_upload_is_not_kept_in_memory() -> None:
    """Its first half MiB is, and the rest lies in a file without a name, which is gone afterwards."""
    most: list[int] = []
    size = 60_000_000

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        gc.collect()
        most.append(resident_bytes())
        rest, number = size, 0
        while data := environ["wsgi.input"].read(1_000_000):
            number += 1
            rest -= len(data)
        return answer(b"%d" % rest)(environ, start_response)

    with Lab(app=app) as lab, lab.back_to_baseline(), lab.connect() as client:
        before = resident_bytes()
        client.get("/", f"Content-Length: {size}", method="POST")
        piece = bytes(1_000_000)
        for _ in range(size // len(piece)):
            client.send(piece)
        assert client.response().body == b"0"
        assert most[0] - before < 20_000_000


def test_23_a_body_that_does_not_come_blocks_no_thread() -> None:
    """Two threads; three clients announce a body that their handlers would not read, and send a part of it."""
    with Lab(app=answer(), threads=2) as lab, contextlib.ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(lab.connect())
            client.get("/", "Content-Length: 100000", method="POST")
            client.send(bytes(9000))
        until(lambda: lab.connections == 3)
        assert lab.ask(GET).status == 200
        until(lambda: not lab.busy)


@pytest.mark.parametrize("cut", CUT_SHORT)
def test_a_body_that_is_cut_short_is_never_seen_whole(lab: Lab, cut: bytes, log: pytest.LogCaptureFixture) -> None:
    """126: the app is not called, or its read raises."""
    seen: list[bytes | OSError] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            seen.append(environ["wsgi.input"].read())
        except OSError as error:
            seen.append(error)
            raise
        return answer()(environ, start_response)

    path = lab.app(app).encode()
    with lab.back_to_baseline():
        for expect in (b"", b"Expect: 100-continue\r\n"):
            for leave in (Client.end, Client.reset):
                with lab.connect() as client:
                    client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b%b" % (path, expect, cut))
                    until(lambda: lab.connections)
                    leave(client)
                    if leave is Client.end:
                        assert client.response().status == 400
                        assert client.is_closed()
                    until(lambda: not lab.connections)
    assert not [what for what in seen if isinstance(what, bytes)]
    assert len(seen) >= 2  # the handler reads it where the client expects to be told
    assert not errors(log)


def test_an_app_that_reads_on_in_spite_of_an_error_gets_it_again(lab: Lab) -> None:
    seen: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        for _ in range(2):
            try:
                environ["wsgi.input"].read()
            except OSError as error:
                seen.append(str(error))
        return answer(b"I know")(environ, start_response)

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Transfer-Encoding: chunked", method="POST")
        assert client.response().status == 100
        client.send(b"5\r\n12345\r\nnonsense\r\n")
        response = client.response()
        assert (response.status, response.body, response.get("connection")) == (200, b"I know", "close")
        assert client.is_closed()
    assert len(seen) == 2 and seen[0] == seen[1]


def test_an_app_that_answers_before_it_finds_the_body_broken(lab: Lab) -> None:
    """The head has gone out and promised to keep the connection; it is closed all the same, and at once."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"early"
        with contextlib.suppress(OSError):
            environ["wsgi.input"].read()
        yield b"late"

    path = lab.app(app)
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Transfer-Encoding: chunked", method="POST")
        client.send(b"5\r\n12345\r\n")
        status, _ = client.head()
        assert status == 200
        client.send(b"nonsense\r\n")
        assert client.rest() == b"5\r\nearly\r\n4\r\nlate\r\n0\r\n\r\n"


# -- pipelining --


def test_138_many_small_pipelined_requests_in_one_segment(lab: Lab) -> None:
    """As many as fit into one read, which is more than Python's stack is deep."""
    number = 64 * 1024 // len(GET) - 1
    with lab.connect() as client:
        client.send(GET * number)
        for _ in range(number):
            assert client.response().status == 200


def test_bytes_after_connection_close_do_not_cost_the_answer(lab: Lab) -> None:
    """They come in a segment of their own while the handler runs; a close over them would be a reset."""
    gate = Gate(answer(bytes(1_000_000)))
    path = lab.app(gate)
    with lab.connect() as client:
        client.send(get(path, b"Connection: close"))
        until(lambda: gate.entered)
        client.send(GET * 100)
        gate.open()
        response = client.response()
        assert (len(response.body), response.complete) == (1_000_000, True)
        assert client.is_closed()
