"""PEP 3333 on the WSGI engine: environ, `start_response`, answers, `close()`; and what a request leaves to the next."""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast
from wsgiref.validate import validator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.wsgi import exchange as exchange_module
from jumpstart_server.wsgi.connection import DISCONNECT_GRACE
from jumpstart_server.wsgi.exchange import ClientGoneError
from tests.server.raw_http import Client, Response
from tests.server.wsgi_pep_lab import PATIENCE, App, Body, Environ, Lab, StartResponse, answering, endless, until

LOGGER = "jumpstart_server.wsgi.exchange"
OWN = {"connection", "keep-alive", "date", "transfer-encoding"}  # fields of the server's


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(multiprocess=True) as lab:
        yield lab


@pytest.fixture
def one_thread() -> Iterator[Lab]:
    with Lab(threads=1) as lab:
        yield lab


def fields_of(response: Response) -> list[tuple[str, str]]:
    """Without those that each response has."""
    return [field for field in response.headers if field[0] not in OWN]


def failing(lab: Lab, app: App, caplog: pytest.LogCaptureFixture) -> str:
    """Serve *app*, which must give a clean 500 and one error in the log; return that with its traceback."""
    caplog.clear()
    lab.app = app
    response = lab.ask("/some/where?x")
    assert (response.status, response.body) == (500, b"500 Internal Server Error\n")
    assert response.complete and response.get("connection") == "close"
    records = [record for record in caplog.records if record.name == LOGGER and record.levelno == logging.ERROR]
    assert [record.getMessage() for record in records] == ["exception in the app: GET /some/where"]
    return caplog.text


# -- under wsgiref's validator --


def read_all(environ: Environ) -> bytes:
    """By every way to read."""
    stream = environ["wsgi.input"]
    return b"".join([stream.read(10), stream.readline(), b"".join(stream), *stream.readlines(), stream.read(1)])


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("kind", ["list", "generator", "write", "file"])
@pytest.mark.parametrize("stream_bodies", [False, True])
def test_the_standard_librarys_validator_has_no_complaint(
    method: str, kind: str, stream_bodies: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    has_body = method in ("POST", "PUT")
    faults: list[BaseException] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = read_all(environ)
        environ["wsgi.errors"].write("")
        environ["wsgi.errors"].writelines([])
        environ["wsgi.errors"].flush()
        write = start_response("200 OK", [("Content-Type", "text/plain"), ("X-Length", str(len(body)))])
        if method == "HEAD":
            return []
        if kind == "write":
            write(b"got ")
            return [body]
        if kind == "generator":
            return (piece for piece in (b"got ", body))
        if kind == "file":
            import io

            wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](io.BytesIO(b"got " + body))
            return wrapped
        return [b"got ", body]

    checked = cast(App, validator(cast(Any, app)))

    def watched(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return checked(environ, start_response)
        except BaseException as error:
            faults.append(error)
            raise

    fields = ["X-A: 1", *(["Content-Type: text/plain"] if has_body else [])]
    body = b"first\nsecond\nthird\nfourth\n" if has_body else None
    with Lab(watched, stream_bodies=stream_bodies) as lab:
        response = lab.ask("/a/b?c=d", *fields, method=method, body=body)
    assert faults == []
    assert response.status == 200 and response.complete
    if method != "HEAD":
        assert response.body == b"got " + (body or b"")
    gc.collect()  # an iterator that was not closed says so as it goes
    assert "without being closed" not in capsys.readouterr().err


# -- environ (150, 151, 156) --


def test_the_environment_has_what_the_pep_asks_for(lab: Lab) -> None:
    environ = lab.environ("/a%20b?x=1&y=%20")
    assert environ["REMOTE_PORT"].isdecimal()
    assert {key: environ[key] for key in environ if key.isupper() and not key.startswith("HTTP_")} == {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/a b",
        "QUERY_STRING": "x=1&y=%20",
        "REQUEST_URI": "/a%20b?x=1&y=%20",
        "RAW_URI": "/a%20b?x=1&y=%20",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": str(lab.address[1]),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "REMOTE_PORT": environ["REMOTE_PORT"],
    }
    assert environ["HTTP_HOST"] == "test"
    assert environ["wsgi.version"] == (1, 0)
    assert environ["wsgi.url_scheme"] == "http"
    assert environ["wsgi.input_terminated"] is True
    assert environ["wsgi.errors"].writable() and callable(environ["wsgi.file_wrapper"])
    assert (environ["wsgi.multithread"], environ["wsgi.multiprocess"], environ["wsgi.run_once"]) == (True, True, False)


def test_an_app_may_do_as_it_likes_with_its_environment(lab: Lab) -> None:
    """It is a dict, of one request only, also where the connection knows the request again."""
    seen: list[Environ] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(dict(environ))
        assert type(environ) is dict
        environ.clear()
        environ["left"] = "behind"
        start_response("200 OK", [])
        return []

    lab.app = app
    with lab.connect() as client:
        for _ in range(3):
            client.get("/same")
            assert client.response().status == 200
    assert [sorted(environ) for environ in seen] == [sorted(seen[0])] * 3
    assert "left" not in seen[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/%E5%C3%B6%2F", b"/\xe5\xc3\xb6/"),
        ("/+%2B%25", b"/++%"),
        ("/a;b=c,d", b"/a;b=c,d"),
        ("/%zz%", b"/%zz%"),  # no escape: as it came
        ("//a//b", b"//a//b"),
        ("/a/../b/./", b"/a/../b/./"),
    ],
)
def test_path_bytes_pass_undamaged(lab: Lab, path: str, expected: bytes) -> None:
    environ = lab.environ(path)
    assert environ["PATH_INFO"].encode("latin-1") == expected
    assert environ["RAW_URI"] == environ["REQUEST_URI"] == path


@settings(max_examples=25)
@given(st.binary(max_size=20).filter(lambda raw: b"\0" not in raw))
def test_any_path_bytes_pass_undamaged(lab: Lab, raw: bytes) -> None:
    quoted = "/" + "".join(f"%{byte:02x}" for byte in raw)
    assert lab.environ(quoted)["PATH_INFO"].encode("latin-1") == b"/" + raw


@pytest.mark.parametrize("path", ["/\xe9", "/caf\xc3\xa9?x", "/?q=\xff"])
def test_raw_bytes_beyond_ascii_are_refused(lab: Lab, path: str) -> None:
    """A URI has none; and never a 500 (a2wsgi)."""
    assert lab.ask(path).status == 400


def test_an_absolute_target_is_its_path(lab: Lab) -> None:
    environ = lab.environ("http://elsewhere.example/a%20b?c")
    assert (environ["PATH_INFO"], environ["QUERY_STRING"], environ["HTTP_HOST"]) == ("/a b", "c", "elsewhere.example")


@pytest.mark.parametrize("path", ["/cart", "/shop", "/shopping", "/shop/cart", "/"])
def test_the_prefix_that_a_proxy_strips_is_the_script_name(path: str) -> None:
    """The path comes without it, so nothing is taken away; as with ASGI, and as PEP 3333 rebuilds the URL."""
    with Lab(script_name="/shop") as lab:
        environ = lab.environ(path)
    assert (environ["SCRIPT_NAME"], environ["PATH_INFO"]) == ("/shop", path)


def test_headers_are_joined_and_those_that_could_pass_for_others_are_dropped(lab: Lab) -> None:
    fields = [
        "X-A: 1",
        "x-a: 2",
        "Cookie: a=1",
        "Cookie: b=2",
        "X_Forwarded_For: evil",
        "X-Forwarded-For: good",
        "X-Latin: \xe9",
        "X-Empty:",
        "Content-Type: text/plain",
        "Proxy: http://evil.example",  # httpoxy: libraries take HTTP_PROXY for the way out
    ]
    environ = lab.environ("/", *fields)
    assert {key: value for key, value in environ.items() if key.startswith("HTTP_")} == {
        "HTTP_HOST": "test",
        "HTTP_X_A": "1,2",
        "HTTP_COOKIE": "a=1; b=2",
        "HTTP_X_FORWARDED_FOR": "good",
        "HTTP_X_LATIN": "\xe9",
        "HTTP_X_EMPTY": "",
    }
    assert environ["CONTENT_TYPE"] == "text/plain"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_protocol_is_the_clients(lab: Lab, version: str) -> None:
    seen: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.append(environ["SERVER_PROTOCOL"])
        start_response("200 OK", [])
        return []

    lab.app = app
    with lab.connect() as client:
        client.get("/", version=version)
        client.response()
    assert seen == [f"HTTP/{version}"]


def test_over_a_unix_socket_there_are_still_addresses(tmp_path: Path) -> None:
    """Apps index them; gunicorn gives an empty client too."""
    with Lab(uds=tmp_path / "socket") as lab:
        environ = lab.environ()
    assert (environ["REMOTE_ADDR"], environ["REMOTE_PORT"]) == ("", "")
    assert environ["SERVER_PORT"] == "80" and environ["SERVER_NAME"] == "localhost"


# -- answers (141, 143, 145) --


@pytest.mark.parametrize("empty", [[], [b""], (), [b"", b""], iter([]), iter([b"", b""])])
def test_an_empty_answer_is_an_answer(lab: Lab, empty: Iterable[bytes]) -> None:
    lab.app = answering(empty, "200 OK", [("X-A", "b")])
    response = lab.ask()
    assert (response.status, response.body, response.complete) == (200, b"", True)
    assert fields_of(response) == [("x-a", "b"), ("content-length", "0")]


def test_an_answer_in_hand_gets_its_length(lab: Lab) -> None:
    for body in ([b"hello"], (b"hello",), [b"hel", b"lo"]):
        lab.app = answering(body)
        response = lab.ask()
        assert (response.body, fields_of(response)) == (b"hello", [("content-length", "5")])
    lab.app = answering(iter([b"hello"]))
    response = lab.ask()
    assert (response.body, response.get("transfer-encoding")) == (b"hello", "chunked")
    assert response.get("content-length") is None


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_a_length_of_the_apps_is_kept(lab: Lab, kind: str) -> None:
    lab.app = answering([b"hel", b"lo"] if kind == "list" else iter([b"hel", b"lo"]), headers=[("Content-Length", "5")])
    response = lab.ask()
    assert (response.body, response.complete) == (b"hello", True)
    assert fields_of(response) == [("content-length", "5")] and response.get("transfer-encoding") is None


def test_large_pieces_come_whole_and_in_order(lab: Lab) -> None:
    pieces = [bytes([number]) * 300_000 for number in range(5)]
    lab.app = answering(list(pieces))
    response = lab.ask()
    assert response.body == b"".join(pieces) and response.get("content-length") == "1500000"
    lab.app = answering(iter(pieces))
    assert lab.ask().body == b"".join(pieces)
    response = lab.ask(method="HEAD")
    assert response.complete


@pytest.mark.parametrize("body", ["list", "generator"])
def test_too_much_is_cut_and_logged(lab: Lab, caplog: pytest.LogCaptureFixture, body: str) -> None:
    chunks = [b"hel", b"lo you", b"x"]
    lab.app = answering(chunks if body == "list" else iter(chunks), headers=[("Content-Length", "5")])
    with lab.connect() as client:
        client.get("/")
        assert client.response().body == b"hello"
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next", "nothing of the rest came before it"
    assert "beyond its Content-Length" in caplog.text


def test_an_endless_answer_ends_with_its_length(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """PEP 3333: stop iterating over the response when enough data has been sent."""
    body = Body(endless())
    lab.app = answering(body, headers=[("Content-Length", "2500")])
    assert len(lab.ask().body) == 2500
    assert (body.given, body.closed) == (3, 1)


def test_what_comes_after_the_last_byte_still_runs(lab: Lab) -> None:
    ran: list[str] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "5")])
        yield b"hello"
        ran.append("after")

    lab.app = app
    assert lab.ask().complete
    assert ran == ["after"]


@pytest.mark.parametrize("body", ["list", "generator", "write", "nothing"])
def test_too_little_closes_the_connection(lab: Lab, caplog: pytest.LogCaptureFixture, body: str) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [("Content-Length", "50")])
        if body == "write":
            write(b"hello")
        return {"list": [b"hello"], "generator": iter([b"hello"])}.get(body, [])

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        assert not client.response().complete
        assert client.is_closed()
    lab.wait_idle()
    assert "fewer bytes than its Content-Length" in caplog.text


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
@pytest.mark.parametrize("body", [[], [b"oops"], [b"o", b"ops"], "generator", "write"])
def test_an_answer_without_a_body_has_none_and_keeps_the_connection(lab: Lab, status: str, body: Any) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response(status, [("X-A", "b")])
        if body == "write":
            write(b"oops")
            return []
        return endless() if body == "generator" else cast(Iterable[bytes], body)

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        response = client.response()
        assert (response.status, fields_of(response)) == (int(status[:3]), [("x-a", "b")])
        assert response.get("transfer-encoding") is None
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next"


def test_304_keeps_the_length_of_what_it_stands_for(lab: Lab) -> None:
    lab.app = answering([], "304 Not Modified", [("Content-Length", "7")])
    assert fields_of(lab.ask()) == [("content-length", "7")]


@pytest.mark.parametrize("status", ["100 Continue", "101 Switching Protocols", "103 Early Hints", "199 x"])
def test_an_app_cannot_answer_with_an_interim_status(lab: Lab, caplog: pytest.LogCaptureFixture, status: str) -> None:
    """No final answer would follow."""
    assert f"status {status!r}" in failing(lab, answering([], status), caplog)


@pytest.mark.parametrize(
    ("body", "headers", "length"),
    [
        ([], [], None),  # does not claim that the page is empty
        ([], [("Content-Length", "7")], "7"),
        ([b"hello"], [], "5"),
        ([b"hel", b"lo"], [], "5"),
        ([b"hello"], [("content-length", "7")], "7"),
        ("generator", [], None),
        ("generator", [("Content-Length", "7")], "7"),
        ("write", [("Content-Length", "7")], "7"),
    ],
)
def test_head_has_no_body_and_keeps_the_connection(
    lab: Lab, body: Any, headers: list[tuple[str, str]], length: str | None
) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", list(headers))
        if body == "write":
            write(b"hello")
            return [b"more"]
        return endless() if body == "generator" else cast(Iterable[bytes], body)

    lab.app = app
    with lab.connect() as client:
        client.get("/", method="HEAD")
        response = client.response("HEAD")
        assert (response.status, response.get("content-length")) == (200, length)
        assert response.get("transfer-encoding") is None and response.get("connection") != "close"
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next"


def test_chunks_of_a_generator_are_sent_one_by_one_and_empty_ones_not_at_all(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        yield b""
        start_response("201 Created", [("X-A", "b"), ("X-A", "c")])
        yield b""
        yield b"one"
        yield b""
        yield b"two"

    lab.app = app
    with lab.connect() as client:
        client.get("/", "Connection: close")
        raw = client.rest()
    assert raw.startswith(b"HTTP/1.1 201 Created\r\nX-A: b\r\nX-A: c\r\n")
    assert raw.partition(b"\r\n\r\n")[2] == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


def test_nothing_is_sent_before_there_is_a_body(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b""
        raise ValueError("changed my mind")

    failing(lab, app, caplog)


def test_the_first_chunk_does_not_wait_for_the_second(lab: Lab) -> None:
    go_on = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "6")])
        yield b"one"
        assert go_on.wait(PATIENCE)
        yield b"two"

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        assert client.head()[0] == 200
        assert client.exactly(3) == b"one"
        go_on.set()
        assert client.exactly(3) == b"two"


@pytest.mark.parametrize("last", ["list", "tuple", "generator", "lists"])
def test_write_sends_before_the_iterable_does(lab: Lab, last: str) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"one ")
        write(b"")
        write(b"two ")
        kinds: dict[str, Iterable[bytes]] = {"list": [b"three"], "tuple": (b"three",), "lists": [b"th", b"ree"]}
        return kinds.get(last, iter([b"th", b"ree"]))

    lab.app = app
    response = lab.ask()
    assert (response.body, response.complete) == (b"one two three", True)


def test_write_inside_the_iteration_keeps_the_order(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        write = start_response("200 OK", [])
        write(b"1")
        yield b"2"
        write(b"3")
        yield b"4"
        write(b"5")

    lab.app = app
    assert lab.ask().body == b"12345"


def test_write_sends_at_once(lab: Lab) -> None:
    go_on = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"")  # the head alone
        assert go_on.wait(PATIENCE)
        return [b"body"]

    lab.app = app
    with lab.connect() as client:
        client.get("/")
        status, fields = client.head()
        assert (status, ("transfer-encoding", "chunked") in fields) == (200, True)
        go_on.set()
        assert client.line() == b"4"


def test_write_beyond_the_length_raises(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [("Content-Length", "5")])
        write(b"hel")
        write(b"lo you")
        return []

    lab.app = app
    response = lab.ask()
    assert (response.body, response.complete) == (b"hello", True)
    assert "write() beyond the Content-Length" in caplog.text


def test_write_after_the_end_or_from_another_thread_raises(lab: Lab) -> None:
    """The connection may be another request's by then."""
    writes: list[Callable[[bytes], None]] = []
    faults: list[BaseException] = []

    def attempt() -> None:
        try:
            writes[0](b"evil")
        except RuntimeError as error:
            faults.append(error)

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        writes.append(start_response("200 OK", []))
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(PATIENCE)
        return [b"fine"]

    lab.app = app
    assert lab.ask().body == b"fine"
    assert len(faults) == 1
    attempt()
    assert len(faults) == 2

    def later(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        attempt()  # on a thread of the pool, maybe the same one
        start_response("200 OK", [])
        return [b"mine"]

    lab.app = later
    assert lab.ask().body == b"mine"
    assert len(faults) == 3


def test_start_response_after_the_end_raises(lab: Lab) -> None:
    kept: list[StartResponse] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        kept.append(start_response)
        start_response("200 OK", [])
        return []

    lab.app = app
    lab.ask()
    with pytest.raises(RuntimeError):
        kept[0]("200 OK", [])
    with pytest.raises(RuntimeError):
        kept[0]("200 OK", [], (None, None, None))


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["write", "yield"]), st.binary(max_size=20)), max_size=6),
    length=st.one_of(st.none(), st.integers(0, 60)),
    method=st.sampled_from(["GET", "HEAD"]),
    version=st.sampled_from(["1.0", "1.1"]),
)
def test_whatever_an_app_does_the_client_gets_it_in_order_and_can_tell_its_end(
    lab: Lab, steps: list[tuple[str, bytes]], length: int | None, method: str, version: str
) -> None:
    def produce(write: Callable[[bytes], None]) -> Iterator[bytes]:
        for how, data in steps:
            if how == "write":
                write(data)
            else:
                yield data

    bodies: list[Body] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        headers = [("Content-Length", str(length))] if length is not None else []
        bodies.append(Body(produce(start_response("200 OK", headers))))
        return bodies[0]

    lab.app = app
    whole = b"".join(data for _, data in steps)
    logging.disable()
    try:
        with lab.connect() as client:
            client.get("/", version=version, method=method)
            response = client.response(method)
        lab.wait_idle()
    finally:
        logging.disable(logging.NOTSET)
    assert response.status == 200
    assert response.body == (b"" if method == "HEAD" else whole[:length])
    assert response.complete is (method == "HEAD" or length is None or len(whole) >= length)
    assert bodies[0].closed == 1


# -- start_response (142) --


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
    monkeypatch.setattr(exchange_module, "_warned_of", set())
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


# -- close() (140, 48) --


class Watch:
    """
    An app around a `Body` that notes where it was called and closed.

    Attributes:
        called_on: the threads.
        contexts: what the context variable said as it was closed.
    """

    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def __init__(self, chunks: Iterable[bytes], error: BaseException | None = None, **fields: str) -> None:
        self.status = "200 OK"
        self.fields = list(fields.items())
        self.called_on: list[int] = []
        self.contexts: list[str] = []
        self.body = Body(chunks, error, self._closing)

    def _closing(self) -> None:
        self.contexts.append(self.variable.get())

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        self.called_on.append(threading.get_ident())
        self.variable.set("set")
        start_response(self.status, self.fields)
        return self.body

    def check(self) -> None:
        until(lambda: self.body.closed)
        assert self.body.closed == 1
        assert self.contexts == ["set"]
        assert self.body.closed_on == self.called_on


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("chunks", [[], [b"a", b"b"], [b"", b"a"]])
def test_close_is_called_once_when_all_went_well(lab: Lab, method: str, chunks: list[bytes]) -> None:
    lab.app = watch = Watch(chunks)
    assert lab.ask(method=method, body=b"x" if method == "POST" else None).complete
    watch.check()


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_close_is_called_once_where_there_is_no_body(lab: Lab, status: str) -> None:
    lab.app = watch = Watch([b"a"])
    watch.status = status
    lab.ask()
    watch.check()


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("chunks", [[], [b""], [b"a"]])
def test_close_is_called_once_when_the_body_raises(
    lab: Lab, caplog: pytest.LogCaptureFixture, error: BaseException, chunks: list[bytes]
) -> None:
    lab.app = watch = Watch(chunks, error)
    lab.ask()
    watch.check()
    assert type(error).__name__ in caplog.text


def test_close_is_called_once_where_the_iteration_never_began(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Body):
        def __iter__(self) -> Iterator[bytes]:
            raise ValueError("no iterator")

    body = Broken([])
    failing(lab, answering(body), caplog)
    assert body.closed == 1
    assert body.given == 0


def test_close_is_called_once_where_the_app_was_not_ready(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    for body in (Body([b"too early"]), Body([]), Body([cast(bytes, "text")])):
        failing(lab, lambda environ, start_response, body=body: body, caplog)  # type: ignore[misc]
        assert body.closed == 1


def test_close_is_called_once_when_too_much_or_too_little_came(lab: Lab) -> None:
    for length in ("1", "100"):
        lab.app = watch = Watch([b"a", b"b", b"c"])
        watch.fields = [("Content-Length", length)]
        lab.ask()
        watch.check()


@pytest.mark.parametrize("error", [ValueError("close failed"), SystemExit(3)])
def test_close_that_raises_is_logged_and_the_answer_stands(
    lab: Lab, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    body = Body([b"a"], on_close=fail)
    lab.app = answering(body)
    with lab.connect() as client:
        client.get("/")
        response = client.response()
        assert (response.status, response.body, response.complete) == (200, b"a", True)
        lab.app = answering([b"next"])
        client.get("/")
        assert client.response().body == b"next", "the connection is as good as ever"
    assert body.closed == 1
    assert type(error).__name__ in caplog.text


def test_close_that_raises_after_the_body_did(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("close failed")

    body = Body([], LookupError("the first"), fail)
    text = failing(lab, answering(body), caplog)
    assert "close failed" in text and "the first" in text
    assert body.closed == 1


@pytest.mark.parametrize("how", ["close", "reset", "end"])
@pytest.mark.slow
def test_a_client_that_leaves_ends_a_stream_and_closes_it_once(
    lab: Lab, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Cases 40 and 140, also where the client closes one half only and reads no more."""
    pause = threading.Event()

    def slow() -> Iterator[bytes]:
        while True:
            pause.wait(0.01)
            yield b"tick"

    lab.app = watch = Watch(slow())
    client = lab.connect()
    client.get("/")
    assert client.head()[0] == 200
    if how == "reset":
        client.reset()
    elif how == "end":
        client.end()
    else:
        client.sock.close()
    began = time.monotonic()
    watch.check()
    assert time.monotonic() - began < PATIENCE / 4  # within a second where the machine is idle
    client.sock.close()
    lab.wait_idle()
    assert caplog.text == "", "clients leave all the time"


@pytest.mark.slow
def test_empty_chunks_are_enough_to_notice_that_the_client_has_left(lab: Lab) -> None:
    pause = threading.Event()

    def silent() -> Iterator[bytes]:
        while True:
            pause.wait(0.01)
            yield b""

    lab.app = watch = Watch(silent())
    with lab.connect() as client:
        client.get("/")
        until(lambda: watch.body.given)
    watch.check()


def stuck(body: Body) -> Callable[[], bool]:
    """Whether *body* has not been asked for more since the last look."""
    last = [-1]

    def look() -> bool:
        before, last[0] = last[0], body.given
        time.sleep(0.05)
        return before == body.given > 0

    return look


@pytest.mark.slow
def test_a_client_that_leaves_while_nothing_more_fits_ends_the_stream_too(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.app = watch = Watch(endless(b"x" * 10_000))
    client = lab.connect(receive_buffer=4096)
    client.get("/")
    until(stuck(watch.body))
    client.reset()
    watch.check()
    lab.wait_idle()
    assert caplog.text == ""


@pytest.mark.slow
def test_a_slow_reader_holds_the_handler_and_not_the_memory(lab: Lab) -> None:
    """Case 43: what the kernel keeps for the two is all that is taken from the app."""
    lab.app = watch = Watch(endless(b"x" * 10_000))
    client = lab.connect(receive_buffer=4096)
    client.get("/")
    until(stuck(watch.body))
    given = watch.body.given
    assert given * 10_000 < 16 * 1024 * 1024  # tcp_wmem's maximum is 4 MiB
    client.head()
    until(lambda: client.more() and watch.body.given > given)
    client.reset()
    watch.check()


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with Lab(settings=ConnectionSettings(write_timeout=0.2)) as lab:
        lab.app = watch = Watch(endless(b"x" * 10_000))
        with lab.connect(receive_buffer=4096) as client:
            client.get("/")
            watch.check()
            with pytest.raises(ConnectionResetError):
                client.rest()
    assert caplog.text == ""


@pytest.mark.slow
def test_a_request_whose_client_left_before_its_turn_is_not_run(one_thread: Lab) -> None:
    """Case 140: gone before the start."""
    lab = one_thread
    go_on, calls = threading.Event(), list[str]()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        calls.append(environ["PATH_INFO"])
        assert go_on.wait(PATIENCE)
        start_response("200 OK", [])
        return Body([b"done"])

    lab.app = app
    with lab.connect() as first:
        first.get("/first")
        until(lambda: calls)
        second = lab.connect()
        second.get("/second")
        until(lambda: lab.server.stats().waiting == 1)
        second.reset()

        def is_known() -> bool:
            waiting = list(lab.server._waiting)
            return bool(waiting[0].gone_at) and time.monotonic() - waiting[0].gone_at > DISCONNECT_GRACE

        until(is_known)
        go_on.set()
        assert first.response().body == b"done"
        until(lambda: lab.server.stats().waiting == 0)
    lab.wait_idle()
    assert calls == ["/first"]


@pytest.mark.slow
def test_a_handler_that_writes_learns_that_the_client_left_and_is_told_again(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[BaseException] = []
    pause = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        while len(told) < 5:
            try:
                pause.wait(0.005)
                write(b"x")
            except ClientGoneError as error:
                told.append(error)
        return body

    body = Body([b"more"])
    lab.app = app
    client = lab.connect()
    client.get("/")
    client.head()
    client.sock.close()
    until(lambda: body.closed)
    lab.wait_idle()
    assert (len(told), body.closed) == (5, 1)
    assert isinstance(told[0], OSError)  # what code that writes to a client expects
    assert caplog.text == ""


@pytest.mark.slow
def test_close_that_raises_after_the_client_left_is_logged(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("close failed")

    pause = threading.Event()
    body = Body(iter(lambda: (pause.wait(0.005), b"x")[1], b""), on_close=fail)
    lab.app = answering(body)
    client = lab.connect()
    client.get("/")
    client.head()
    client.sock.close()
    until(lambda: body.closed)
    lab.wait_idle()
    assert body.closed == 1
    assert caplog.text.count("ValueError: close failed") == 1


# -- requests do not touch each other --


def test_context_variables_do_not_leak_between_requests_and_come_from_the_server() -> None:
    ours: contextvars.ContextVar[str] = contextvars.ContextVar("ours", default="unset")
    theirs: contextvars.ContextVar[str] = contextvars.ContextVar("theirs", default="unset")
    seen: list[tuple[str, str]] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        seen.append((ours.get(), theirs.get()))
        theirs.set("left behind")
        start_response("200 OK", [])
        yield b"x"
        seen.append((ours.get(), theirs.get()))

    def start() -> Lab:
        ours.set("of the server")
        return Lab(app, threads=1)

    lab = contextvars.copy_context().run(start)
    with lab, lab.connect() as client:
        for number in range(4):  # the same bytes, which are known again, and others
            client.get("/" if number < 3 else "/other")
            assert client.response().complete
    assert seen == [("of the server", word) for _ in range(4) for word in ("unset", "left behind")]


@pytest.mark.slow
def test_an_abandoned_flask_stream_leaves_no_context_behind(one_thread: Lab) -> None:
    """Case 38: teardown runs as often as in requests that end well, in the abandoned one and in those after it."""
    import flask

    teardowns: list[str] = []
    pause = threading.Event()
    flask_app = flask.Flask("abandoned")

    @flask_app.route("/stream")
    def stream() -> flask.Response:
        def produce() -> Iterator[str]:
            while True:
                pause.wait(0.005)
                yield flask.request.path
                if "short" in flask.request.args:
                    return

        return flask.Response(flask.stream_with_context(produce()))

    @flask_app.route("/<int:number>")
    def normal(number: int) -> str:
        return flask.request.path

    @flask_app.teardown_request
    def teardown(error: BaseException | None) -> None:
        teardowns.append(flask.request.path)

    lab = one_thread
    lab.app = flask_app.wsgi_app
    assert lab.ask("/stream?short").body == b"/stream"
    of_a_stream, teardowns[:] = teardowns.copy(), []  # two: as the view returns, and as the stream ends
    client = lab.connect()
    client.get("/stream")
    assert client.head()[0] == 200
    client.sock.close()
    with lab.connect() as other:
        for number in range(5):
            other.get(f"/{number}")
            assert other.response().body == f"/{number}".encode()
            lab.wait_idle()
            assert not flask.has_request_context()
    assert teardowns == [*of_a_stream, *(f"/{number}" for number in range(5))]


def test_requests_run_side_by_side(lab: Lab) -> None:
    together = threading.Barrier(4)

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        together.wait(PATIENCE)
        start_response("200 OK", [])
        return [environ["PATH_INFO"].encode()]

    lab.app = app
    clients = [lab.connect() for _ in range(8)]
    for number, client in enumerate(clients):
        client.get(f"/{number}")
    for number, client in enumerate(clients):
        with client:
            assert client.response().body == f"/{number}".encode()


def test_pipelined_requests_are_answered_in_order(lab: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        body = environ["wsgi.input"].read() + environ["PATH_INFO"].encode()
        return [body] if len(body) % 2 else iter([body])

    lab.app = app
    with lab.connect() as client:
        request = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
        client.send(b"".join(request % (number, number, b"x" * number) for number in range(9)))
        assert [client.response().body for _ in range(9)] == [b"x" * number + b"/%d" % number for number in range(9)]


def test_nothing_of_a_request_is_kept_after_it(lab: Lab) -> None:
    class Thing:
        pass

    seen: list[weakref.ref[Thing]] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        thing = Thing()
        environ["thing"] = thing
        seen.append(weakref.ref(thing))
        start_response("200 OK", [])
        if environ["PATH_INFO"] == "/fails":
            raise ValueError(thing)
        return [b"x"]

    lab.app = app
    logging.disable()
    try:
        with lab.connect() as client:  # kept open
            for path in ("/", "/", "/", "/other"):
                client.get(path)
                client.response()
            lab.ask("/fails")
            lab.wait_idle()
            gc.collect()
            assert [reference() for reference in seen] == [None] * 5
    finally:
        logging.disable(logging.NOTSET)


def test_the_client_class_of_the_lab_is_not_wrong_about_ends(lab: Lab) -> None:
    """Fakes and helpers are tested themselves: a response that is cut is not complete."""
    lab.app = answering(Body([b"x"], ValueError()))
    with lab.connect() as client:
        assert isinstance(client, Client)
        client.get("/")
        assert not client.response().complete


# ---------------------------------------------------------------------- handlers that fork


@pytest.mark.parametrize("how", ["exit", "raise", "return", "yield"])
def test_a_child_that_a_handler_forks_does_not_serve(how: str) -> None:
    """It has copies of all connections; what it says or does with them would be a second answer."""
    statuses: list[int] = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/fork":
            pid = os.fork()
            if not pid:
                if how == "exit":
                    sys.exit(7)
                if how == "raise":
                    raise ValueError("in the child")
                start_response("200 OK", [("Content-Length", "5")])
                return [b"child"] if how == "return" else iter([b"child"])
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        start_response("200 OK", [("Content-Length", "2")])
        return [b"ok"]

    with Lab(app) as lab, lab.connect() as client:
        for _ in range(3):
            client.send(b"GET /fork HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.response().body == b"ok"
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert client.response().body == b"ok"
    assert statuses == [{"exit": 7, "raise": 1, "return": 0, "yield": 0}[how]] * 3
