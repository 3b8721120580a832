"""PEP 3333 over ASGI: the adapter driven as a server drives it, without a server."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast
from wsgiref.validate import validator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart_server.pool import ThreadPool
from jumpstart_server.wsgi_adapter import CHUNKS_IN_FLIGHT, SPOOL_BYTES, ClientGoneError, WSGIAdapter

PATIENCE = 20.0  # seconds
StartResponse = Callable[..., Callable[[bytes], None]]
App = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]
LOGGER = "jumpstart_server.wsgi"


class Client:
    """
    The server's side of one ASGI exchange: sends a request, collects the answer.

    Attributes:
        reading: cleared, it reads nothing more: `send` waits, as it does for a socket whose buffer is full.
        gone: set, it has hung up: pending sends return, as uvicorn's do, and `receive` says so.
    """

    def __init__(self, body: Iterable[bytes] = (b"",), *, leaves_while_sending: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.gone = asyncio.Event()
        self.got_one = asyncio.Event()
        self._leaves = leaves_while_sending
        chunks = list(body)
        self._request = [
            {"type": "http.request", "body": chunk, "more_body": leaves_while_sending or number < len(chunks) - 1}
            for number, chunk in enumerate(chunks)
        ]

    async def receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop(0)
        if not self._leaves:
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if not self.gone.is_set():
            waits = [asyncio.ensure_future(self.reading.wait()), asyncio.ensure_future(self.gone.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if not self.gone.is_set():
            self.messages.append(message)
            self.got_one.set()

    def hang_up(self) -> None:
        self.gone.set()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return list(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    def check(self) -> None:
        """One head, then body messages, of which only the last is the last."""
        assert [message["type"] for message in self.messages] == [
            "http.response.start",
            *["http.response.body"] * (len(self.messages) - 1),
        ]
        assert [message.get("more_body", False) for message in self.messages[1:-1]] == [True] * (len(self.messages) - 2)
        assert self.messages[-1].get("more_body", False) is False


def scope(method: str = "GET", path: str = "/", **more: Any) -> dict[str, Any]:
    raw, _, query = path.partition("?")
    made = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw,
        "raw_path": raw.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(b"host", b"example.org")],
        "server": ("127.0.0.1", 8000),
        "client": ("10.0.0.9", 1234),
    }
    return {**made, **more}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(4, "test-wsgi")
    yield pool
    pool.close(PATIENCE)
    assert pool.threads == 0


class Server:
    """Runs exchanges in an event loop of their own."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool = pool

    def get(self, app: App, client_body: Iterable[bytes] = (b"",), **words: Any) -> Client:
        async def main() -> Client:
            client = Client(client_body)
            await self.serve(app, client, **words)
            return client

        client: Client = self.run(main())
        client.check()
        return client

    async def serve(self, app: App, client: Client, /, **words: Any) -> None:
        adapter = WSGIAdapter(app, self.pool, multiprocess=True)
        await adapter(scope(**words), client.receive, client.send)

    def run(self, work: Any) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(work, PATIENCE)

        return asyncio.run(limited())


@pytest.fixture
def server(pool: ThreadPool) -> Server:
    return Server(pool)


def environ_of(runs: Server, client_body: Iterable[bytes] = (b"",), **words: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        seen["body"] = environ["wsgi.input"].read()
        start_response("200 OK", [])
        return []

    runs.get(app, client_body, **words)
    return seen


class Body:
    """An iterable that counts how often it is closed."""

    def __init__(self, chunks: Iterable[bytes], error: BaseException | None = None) -> None:
        self.closed = 0
        self.given = 0
        self._chunks = iter(chunks)
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = next(self._chunks)
        except StopIteration:
            if self._error is not None:
                raise self._error from None
            raise
        self.given += 1
        return chunk

    def close(self) -> None:
        self.closed += 1


def answering(body: Iterable[bytes], status: str = "200 OK", headers: Iterable[tuple[str, str]] = ()) -> App:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, list(headers))
        return body

    return app


# -- under wsgiref's validator --


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE"])
@pytest.mark.filterwarnings("error")
def test_the_standard_librarys_validator_has_no_complaint(server: Server, method: str) -> None:
    has_body = method in ("POST", "PUT")

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(10) + environ["wsgi.input"].readline()
        body += b"".join(environ["wsgi.input"]) + b"".join(environ["wsgi.input"].readlines())
        environ["wsgi.errors"].flush()
        start_response("200 OK", [("Content-Type", "text/plain"), ("X-Length", str(len(body)))])
        return [] if method == "HEAD" else [b"got ", body]

    headers = [(b"host", b"h"), (b"x-a", b"1")]
    if has_body:
        headers += [(b"content-type", b"text/plain"), (b"content-length", b"26")]
    chunks = [b"first\nsecond\n", b"third\nfourth\n"] if has_body else [b""]
    client = server.get(cast(App, validator(cast(Any, app))), chunks, method=method, path="/a/b?c=d", headers=headers)
    assert client.status == 200
    if has_body:
        assert client.body == b"got first\nsecond\nthird\nfourth\n"


def test_the_environment_has_what_the_pep_asks_for(server: Server) -> None:
    environ = environ_of(server, path="/a%20b?x=1&y=%20")
    assert {key: environ[key] for key in environ if key.isupper() and not key.startswith("HTTP_")} == {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/a b",
        "QUERY_STRING": "x=1&y=%20",
        "REQUEST_URI": "/a%20b?x=1&y=%20",
        "RAW_URI": "/a%20b?x=1&y=%20",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "8000",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "10.0.0.9",
        "REMOTE_PORT": "1234",
    }
    assert environ["wsgi.version"] == (1, 0)
    assert environ["wsgi.url_scheme"] == "http"
    assert environ["wsgi.errors"] is sys.stderr
    assert (environ["wsgi.multithread"], environ["wsgi.multiprocess"], environ["wsgi.run_once"]) == (True, True, False)
    assert type(environ) is dict


def test_path_bytes_pass_undamaged(server: Server) -> None:
    environ = environ_of(server, path="/%E5%C3%B6%2F+%00")
    assert environ["PATH_INFO"].encode("latin-1") == b"/\xe5\xc3\xb6/+\0"
    assert environ["RAW_URI"] == "/%E5%C3%B6%2F+%00"
    environ = environ_of(server, path="/", raw_path=None)
    assert environ["PATH_INFO"] == "/"


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=20))
def test_any_path_bytes_pass_undamaged(pool: ThreadPool, raw: bytes) -> None:
    quoted = "/" + "".join(f"%{byte:02x}" for byte in raw)
    assert environ_of(Server(pool), path=quoted)["PATH_INFO"].encode("latin-1") == b"/" + raw


def test_a_path_in_text_only_is_taken_from_there(server: Server) -> None:
    environ = environ_of(server, raw_path=b"", path="/ö")
    assert environ["PATH_INFO"].encode("latin-1") == "/ö".encode()


def test_the_prefix_that_a_proxy_strips_is_the_script_name(server: Server) -> None:
    """uvicorn puts the root path before the path that came."""
    environ = environ_of(server, path="/shop/cart", root_path="/shop")
    assert (environ["SCRIPT_NAME"], environ["PATH_INFO"]) == ("/shop", "/cart")
    environ = environ_of(server, path="/shop/shop", root_path="/shop")
    assert (environ["SCRIPT_NAME"], environ["PATH_INFO"]) == ("/shop", "/shop")


def test_headers_are_joined_and_those_that_could_pass_for_others_are_dropped(server: Server) -> None:
    headers = [
        (b"x-a", b"1"),
        (b"x-a", b"2"),
        (b"cookie", b"a=1"),
        (b"cookie", b"b=2"),
        (b"x_forwarded_for", b"evil"),
        (b"x-forwarded-for", b"good"),
        (b"x-latin", b"\xe9"),
        (b"content-type", b"text/plain"),
        (b"transfer-encoding", b"chunked"),
    ]
    environ = environ_of(server, headers=headers)
    assert {key: value for key, value in environ.items() if key.startswith("HTTP_")} == {
        "HTTP_X_A": "1,2",
        "HTTP_COOKIE": "a=1; b=2",
        "HTTP_X_FORWARDED_FOR": "good",
        "HTTP_X_LATIN": "é",
    }
    assert environ["CONTENT_TYPE"] == "text/plain"


def test_over_a_unix_socket_there_is_still_a_remote_address(server: Server) -> None:
    """Apps index it; gunicorn gives them an empty one too."""
    environ = environ_of(server, client=None, server=("/run/x.sock", None))
    assert environ["REMOTE_ADDR"] == ""
    assert environ["SERVER_PORT"].isdecimal() and environ["SERVER_NAME"]


def test_only_http_is_served(server: Server) -> None:
    with pytest.raises(RuntimeError, match="cannot serve websocket"):
        server.run(server.serve(answering([]), Client(), type="websocket"))


# -- request bodies --


def test_a_body_has_the_length_that_came_whatever_was_announced(server: Server) -> None:
    environ = environ_of(server, [b"abc", b"de"], method="POST", headers=[(b"transfer-encoding", b"chunked")])
    assert (environ["CONTENT_LENGTH"], environ["body"]) == ("5", b"abcde")
    environ = environ_of(server, method="POST", headers=[(b"content-length", b"0")])
    assert (environ["CONTENT_LENGTH"], environ["body"]) == ("0", b"")
    assert "CONTENT_LENGTH" not in environ_of(server)


@pytest.mark.parametrize(("size", "on_disk"), [(SPOOL_BYTES, False), (SPOOL_BYTES + 1, True)])
def test_a_large_body_lies_on_disk(server: Server, size: int, on_disk: bool) -> None:
    seen: list[Any] = []

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"]
        seen.append(body)
        seen.append(body._rolled)
        seen.append(body.read())
        start_response("200 OK", [])
        return []

    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    chunks = [data[start : start + 65536] for start in range(0, len(data), 65536)]
    server.get(app, chunks, method="POST")
    assert seen[1] is on_disk
    assert seen[2] == data
    assert seen[0].closed


def test_a_client_that_leaves_while_it_sends_never_reaches_the_app(server: Server) -> None:
    called: list[int] = []

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        called.append(1)
        return []

    async def main() -> None:
        client = Client([b"half"], leaves_while_sending=True)
        await server.serve(app, client, method="POST")
        assert client.messages == []

    server.run(main())
    assert called == []


# -- answers --


@pytest.mark.parametrize("empty", [[], [b""], (), [b"", b""], iter([])])
def test_an_empty_answer_is_an_answer(server: Server, empty: Iterable[bytes]) -> None:
    client = server.get(answering(empty, "200 OK", [("X-A", "b")]))
    assert (client.status, client.body) == (200, b"")
    assert client.headers == [(b"x-a", b"b"), (b"content-length", b"0")]


def test_an_answer_of_one_chunk_gets_its_length(server: Server) -> None:
    assert server.get(answering([b"hello"])).headers == [(b"content-length", b"5")]
    assert server.get(answering((b"hello",))).headers == [(b"content-length", b"5")]
    assert server.get(answering([b"hel", b"lo"])).headers == []
    assert server.get(answering([b"hello"], headers=[("Content-Length", "5")])).headers == [(b"content-length", b"5")]


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_an_answer_without_a_body_gets_no_length(server: Server, status: str) -> None:
    assert server.get(answering([], status)).headers == []


def test_head_does_not_claim_that_the_page_is_empty(server: Server) -> None:
    assert server.get(answering([]), method="HEAD").headers == []
    assert server.get(answering([], headers=[("Content-Length", "7")]), method="HEAD").headers == [
        (b"content-length", b"7")
    ]
    assert server.get(answering([b"hello"]), method="HEAD").headers == [(b"content-length", b"5")]


def test_chunks_of_a_generator_are_sent_one_by_one_and_empty_ones_not_at_all(server: Server) -> None:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        yield b""
        start_response("201 Created", [("X-A", "b"), ("X-A", "c")])
        yield b""
        yield b"one"
        yield b""
        yield b"two"

    client = server.get(app)
    assert client.status == 201
    assert client.headers == [(b"x-a", b"b"), (b"x-a", b"c")]
    assert [message["body"] for message in client.messages[1:]] == [b"one", b"two", b""]


def test_nothing_is_sent_before_there_is_a_body(server: Server) -> None:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b""
        raise ValueError("changed my mind")

    assert server.get(app).status == 500


def test_the_first_chunk_does_not_wait_for_the_second(server: Server) -> None:
    go_on = threading.Event()

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"one"
        assert go_on.wait(PATIENCE)
        yield b"two"

    async def main() -> None:
        client = Client()
        exchange = asyncio.ensure_future(server.serve(app, client))
        while len(client.messages) < 2:
            client.got_one.clear()
            await client.got_one.wait()
        assert client.messages[1]["body"] == b"one"
        go_on.set()
        await exchange
        assert client.body == b"onetwo"

    server.run(main())


def test_write_sends_before_the_iterable_does(server: Server) -> None:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"one ")
        write(b"two ")
        return [b"three"]

    assert server.get(app).body == b"one two three"


def test_files_go_through_the_wrapper(server: Server) -> None:
    import io

    file = io.BytesIO(b"x" * 20_000)

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](file, 8192)
        return wrapped

    assert server.get(app).body == b"x" * 20_000
    assert file.closed


# -- start_response --


def test_exc_info_replaces_a_head_that_was_not_sent(server: Server) -> None:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("X-A", "first")])
        try:
            raise ValueError
        except ValueError:
            start_response("503 Busy", [("X-A", "second")], sys.exc_info())
        return [b"sorry"]

    client = server.get(app)
    assert (client.status, client.headers[0], client.body) == (503, (b"x-a", b"second"), b"sorry")


def test_exc_info_raises_when_the_head_was_sent(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"begun"
        try:
            raise LookupError("the original")
        except LookupError:
            start_response("500 Oops", [], sys.exc_info())
        yield b"never"

    async def main() -> None:
        client = Client()
        with pytest.raises(Exception, match="after the response had begun"):
            await server.serve(app, client)
        assert client.status == 200 and client.body == b"begun"
        assert client.messages[-1]["more_body"] is True, "a broken answer cannot be taken for a whole one"

    server.run(main())
    assert "LookupError: the original" in caplog.text


def failing(server: Server, app: App, caplog: pytest.LogCaptureFixture) -> str:
    """Serve *app*, which must give a clean 500 and one log record; return that with its traceback."""
    caplog.clear()
    client = server.get(app, path="/some/where?x")
    assert (client.status, client.body) == (500, b"Internal Server Error")
    assert (b"content-length", b"21") in client.headers
    records = [record for record in caplog.records if record.name == LOGGER and record.levelno == logging.ERROR]
    assert [record.getMessage() for record in records] == ["GET /some/where?x: the app raised"]
    return caplog.text


def test_a_second_head_without_a_reason_is_a_mistake(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        start_response("201 Created", [])
        return [b"x"]

    assert "start_response was called twice" in failing(server, app, caplog)


@pytest.mark.parametrize("status", ["", "OK", "2000 OK", "20 OK", "-20 OK", " 200 OK", "099 x", "600 x", "２００ OK"])
def test_a_status_that_is_none_is_a_mistake(server: Server, caplog: pytest.LogCaptureFixture, status: str) -> None:
    assert f"status {status!r}" in failing(server, answering([b"x"], status), caplog)


@pytest.mark.parametrize(
    "header",
    [
        ("X-A", "a\r\nSet-Cookie: x=1"),
        ("X-A", "a\nb"),
        ("X-A\r\nX-B", "c"),
        ("X-A", "a\0"),
        ("X-A", "\u20ac"),
        ("X-A", 3),
    ],
)
def test_a_header_that_would_break_the_message_is_a_mistake(
    server: Server, caplog: pytest.LogCaptureFixture, header: tuple[str, str]
) -> None:
    failing(server, answering([b"x"], headers=[header]), caplog)


def test_a_body_before_the_head_is_a_mistake(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    assert "before it called start_response" in failing(server, lambda environ, start: [b"x"], caplog)
    assert "before it called start_response" in failing(server, lambda environ, start: [], caplog)


@pytest.mark.parametrize("body", [["text"], [b"", None], 3, None, [bytearray(b"x")]])
def test_a_body_that_is_not_bytes_is_a_mistake(server: Server, caplog: pytest.LogCaptureFixture, body: Any) -> None:
    assert "TypeError" in failing(server, answering(body), caplog)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt()])
def test_an_app_that_raises_costs_one_request(
    server: Server, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("X-Secret", "y")])
        raise error

    text = failing(server, app, caplog)
    assert type(error).__name__ in text
    assert server.get(answering([b"fine"])).body == b"fine"


# -- close() --


def test_close_is_called_once_when_all_went_well(server: Server) -> None:
    body = Body([b"a", b"b"])
    assert server.get(answering(body)).body == b"ab"
    assert body.closed == 1


def test_close_is_called_once_when_the_body_raises(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    body = Body([], ValueError("boom"))
    failing(server, answering(body), caplog)
    assert body.closed == 1
    body = Body([b"a"], ValueError("boom"))
    with pytest.raises(Exception, match="after the response had begun"):
        server.get(answering(body))
    assert body.closed == 1


def test_close_that_raises_is_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Body):
        def close(self) -> None:
            super().close()
            raise ValueError("close failed")

    body = Broken([b"a"])

    async def main() -> Client:
        client = Client()
        try:
            await server.serve(answering(body), client)
        except Exception:
            pass  # the server may cut the connection; the answer is whole
        return client

    client = server.run(main())
    client.check()
    assert client.body == b"a"
    assert body.closed == 1
    assert "close failed" in caplog.text


async def when(condition: Callable[[], bool]) -> None:
    """Wait until *condition* holds; the test's own limit ends it."""
    while not condition():  # noqa: ASYNC110  # what is waited for happens in threads
        await asyncio.sleep(0.001)


def endless() -> Iterator[bytes]:
    while True:
        yield b"x" * 1000


def test_a_client_that_leaves_ends_a_stream_and_closes_it_once(server: Server) -> None:
    body = Body(endless())

    async def main() -> None:
        client = Client()
        exchange = asyncio.ensure_future(server.serve(answering(body), client))
        await when(lambda: len(client.messages) > 10)
        client.hang_up()
        await exchange

    server.run(main())
    assert body.closed == 1


def test_a_client_that_leaves_while_nothing_more_fits_ends_the_stream_too(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = Body(endless())

    async def main() -> None:
        client = Client()
        client.reading.clear()
        exchange = asyncio.ensure_future(server.serve(answering(body), client))
        await when(lambda: body.given >= CHUNKS_IN_FLIGHT)
        client.hang_up()
        await exchange

    server.run(main())
    assert body.closed == 1
    assert caplog.text == "", "clients leave all the time"


def test_a_slow_reader_holds_the_handler_and_not_the_memory(server: Server) -> None:
    body = Body(endless())

    async def main() -> None:
        client = Client()
        client.reading.clear()
        exchange = asyncio.ensure_future(server.serve(answering(body), client))
        await when(lambda: body.given >= CHUNKS_IN_FLIGHT)
        for _ in range(200):
            await asyncio.sleep(0)
        assert body.given <= CHUNKS_IN_FLIGHT + 1
        client.reading.set()
        await when(lambda: body.given > 10 * CHUNKS_IN_FLIGHT)
        client.hang_up()
        await exchange

    server.run(main())


def test_a_handler_that_produces_nothing_yet_learns_of_it_at_its_next_chunk(server: Server) -> None:
    go_on, raised = threading.Event(), list[BaseException]()

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        assert go_on.wait(PATIENCE)
        try:
            write(b"hello?")
        except ClientGoneError as error:
            raised.append(error)
            raise
        return []

    async def main() -> None:
        client = Client()
        exchange = asyncio.ensure_future(server.serve(app, client))
        await when(lambda: server.pool.busy == 1)
        client.hang_up()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not exchange.done(), "its body and its thread are still in use"
        go_on.set()
        await exchange
        assert client.messages == []

    server.run(main())
    assert len(raised) == 1


def test_a_handler_that_swallows_the_news_is_told_again(server: Server) -> None:
    count = [0]

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"x")
        while count[0] < 5:
            try:
                write(b"x")
            except ClientGoneError:
                count[0] += 1
        return [b"more"]

    async def main() -> None:
        client = Client()
        exchange = asyncio.ensure_future(server.serve(app, client))
        await when(lambda: len(client.messages) > 2)
        client.hang_up()
        await exchange

    server.run(main())
    assert count[0] == 5


def test_a_server_that_gives_up_a_request_ends_its_handler_first(server: Server) -> None:
    body = Body(endless())

    async def main() -> None:
        client = Client()
        exchange = asyncio.ensure_future(server.serve(answering(body), client))
        await when(lambda: len(client.messages) > 2)
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
        assert body.closed == 1

    server.run(main())


def test_an_error_while_sending_ends_the_handler_and_is_passed_on(server: Server) -> None:
    body = Body(endless())

    class Broken(Client):
        async def send(self, message: dict[str, Any]) -> None:
            if len(self.messages) == 3:
                raise RuntimeError("Response content longer than Content-Length")
            await super().send(message)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="longer than"):
            await server.serve(answering(body), Broken())

    server.run(main())
    assert body.closed == 1


# -- requests do not touch each other --


def test_context_variables_do_not_leak_between_requests_and_come_from_the_server(pool: ThreadPool) -> None:
    ours: contextvars.ContextVar[str] = contextvars.ContextVar("ours", default="unset")
    theirs: contextvars.ContextVar[str] = contextvars.ContextVar("theirs", default="unset")
    single = ThreadPool(1)
    seen: list[tuple[str, str]] = []

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        seen.append((ours.get(), theirs.get()))
        theirs.set("left behind")
        start_response("200 OK", [])
        yield b"x"
        seen.append((ours.get(), theirs.get()))

    async def main() -> None:
        for number in range(2):
            ours.set(f"request {number}")
            await Server(single).serve(app, Client())
            assert theirs.get() == "unset"

    Server(single).run(main())
    single.close(PATIENCE)
    assert seen == [(f"request {number}", word) for number in range(2) for word in ("unset", "left behind")]


def test_requests_run_side_by_side_up_to_the_pools_size(server: Server) -> None:
    together = threading.Barrier(4)

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        together.wait(PATIENCE)
        start_response("200 OK", [])
        return [environ["PATH_INFO"].encode()]

    async def main() -> None:
        clients = [Client() for _ in range(8)]
        await asyncio.gather(*(server.serve(app, client, path=f"/{number}") for number, client in enumerate(clients)))
        assert [client.body for client in clients] == [f"/{number}".encode() for number in range(8)]

    server.run(main())


def test_nothing_of_a_request_is_kept_after_it(server: Server) -> None:
    class Thing:
        pass

    seen: list[weakref.ref[Thing]] = []

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        thing = Thing()
        environ["thing"] = thing
        seen.append(weakref.ref(thing))
        start_response("200 OK", [])
        return [b"x"]

    async def main() -> None:
        await server.serve(app, Client())
        await when(lambda: server.pool.busy == 0)

    server.run(main())
    gc.collect()
    assert seen[0]() is None


def test_a_closed_pool_refuses_and_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    pool = ThreadPool(1)
    pool.close()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            await Server(pool).serve(answering([]), Client())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
