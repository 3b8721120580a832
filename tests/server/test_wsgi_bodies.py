"""
Request bodies on the WSGI engine: `wsgi.input` as a file, whole or streamed, ``100 Continue``, and bodies that fail.

Three kinds: kept in memory, spooled to a temporary file, read from the socket by the handler.
"""

from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart_server.connection_settings import DISCARD_BYTES, ConnectionSettings
from jumpstart_server.http1 import Limits
from jumpstart_server.wsgi import body as body_module
from jumpstart_server.wsgi.body import SPOOL_BYTES, RequestBodyError
from tests.server.raw_http import Client, make_certificate
from tests.server.wsgi_pep_lab import PATIENCE, Environ, Lab, StartResponse, answering, until

KINDS = ["memory", "spooled", "streamed"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def streaming() -> Iterator[Lab]:
    with Lab(stream_bodies=True) as lab:
        yield lab


@pytest.fixture(scope="module", params=["whole", "streaming"])
def either(request: pytest.FixtureRequest) -> Lab:
    return cast(Lab, request.getfixturevalue("lab" if request.param == "whole" else "streaming"))


def post(*fields: str, path: str = "/") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: test", *fields, "", ""]).encode()


def chunked(pieces: Iterable[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


class Reader:
    """
    An app that reads with *read*.

    Attributes:
        calls: requests so far.
        got: what *read* returned, for each request.
        errors: what it raised.
    """

    def __init__(self, read: Callable[[Any], Any], *, lets_through: bool = True) -> None:
        self.calls = 0
        self.got: list[Any] = []
        self.errors: list[BaseException] = []
        self._read = read
        self._lets_through = lets_through

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        self.calls += 1
        try:
            self.got.append(self._read(environ["wsgi.input"]))
        except BaseException as error:
            self.errors.append(error)
            if self._lets_through:
                raise
        start_response("200 OK", [])
        return [b"done"]

    def wait_called(self) -> None:
        until(lambda: self.calls)

    def wait_failed(self) -> None:
        until(lambda: self.errors)


# -- file semantics (146) --

Operation = tuple[str, Any]
SIZES = st.one_of(st.none(), st.integers(-1, 12), st.sampled_from([100, 70_000]))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), SIZES),
        st.tuples(st.just("readline"), SIZES),
        st.tuples(st.just("readlines"), SIZES),
        st.tuples(st.just("next"), st.none()),
    ),
    max_size=12,
)
PIECES = st.lists(st.one_of(st.text("ab\n\r", max_size=12).map(str.encode), st.binary(max_size=30)), max_size=8)


def perform(stream: Any, operations: list[Operation]) -> list[Any]:
    """The results of *operations*, then of what is left and what is there after the end."""
    results: list[Any] = []
    for name, argument in operations:
        if name == "next":
            results.append(next(iter(stream), None))
        elif argument is None:
            results.append(getattr(stream, name)())
        else:
            results.append(getattr(stream, name)(argument))
    results.append(list(stream))
    results += [stream.read(), stream.read(5), stream.readline(), stream.readlines(), list(stream)]
    return results


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_input_is_a_file(kind: str, framing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the standard library's own files over the same bytes."""
    with monkeypatch.context() as patch, Lab(stream_bodies=kind == "streamed") as lab:
        if kind == "spooled":
            patch.setattr(body_module, "SPOOL_BYTES", 1)

        @settings(max_examples=80)
        @given(PIECES, OPERATIONS)
        def check(pieces: list[bytes], operations: list[Operation]) -> None:
            body = b"".join(pieces)
            # readlines(hint) stops at hint bytes in BytesIO, beyond them in other files.
            in_memory = kind == "memory" or (kind == "spooled" and len(body) <= 1)
            model: Any = io.BytesIO(body) if in_memory else io.BufferedReader(cast(Any, io.BytesIO(body)))

            def read(stream: Any) -> list[Any]:
                if kind == "spooled" and len(body) > 1:
                    assert isinstance(stream, tempfile.SpooledTemporaryFile) and stream._rolled  # type: ignore[attr-defined]
                return perform(stream, operations)

            lab.app = reader = Reader(read)
            with lab.connect() as client:
                if framing == "length":
                    client.send(post(f"Content-Length: {len(body)}"))
                    for piece in pieces:
                        client.send(piece)
                else:
                    client.send(post("Transfer-Encoding: chunked"))
                    client.send(chunked(pieces))
                assert client.response().status == 200, reader.errors
            assert reader.got == [perform(model, operations)]

        check()


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "POST"])
def test_without_a_body_the_input_is_empty(either: Lab, method: str) -> None:
    either.app = reader = Reader(lambda stream: perform(stream, [("read", 5), ("readline", None)]))
    assert either.ask(method=method).status == 200
    assert reader.got == [[b"", b"", [], b"", b"", b"", [], []]]


def test_reading_beyond_the_length_returns_nothing(either: Lab) -> None:
    """Case 148: and takes nothing of the next request."""
    either.app = reader = Reader(lambda stream: [stream.read(3), stream.read(100), stream.read(1), stream.read()])
    with either.connect() as client:
        client.send(post("Content-Length: 5") + b"hello" + post("Content-Length: 2") + b"hi")
        assert [client.response().status, client.response().status] == [200, 200]
    assert reader.got == [[b"hel", b"lo", b"", b""], [b"hi", b"", b"", b""]]


# -- what the environ says of a body (156) --


def test_a_whole_body_has_the_length_that_came_whatever_was_announced(lab: Lab) -> None:
    environ = lab.environ(method="POST", body=b"abcde")
    assert (environ["CONTENT_LENGTH"], environ["body"]) == ("5", b"abcde")
    environ = lab.environ(method="POST", body=b"")
    assert (environ["CONTENT_LENGTH"], environ["body"]) == ("0", b"")
    assert "CONTENT_LENGTH" not in lab.environ()
    assert "HTTP_CONTENT_LENGTH" not in environ


def environ_of_chunked(lab: Lab, body: list[bytes]) -> Environ:
    seen: Environ = {}

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        seen["body"] = environ["wsgi.input"].read()
        start_response("200 OK", [])
        return []

    lab.app = app
    with lab.connect() as client:
        client.send(post("Transfer-Encoding: chunked") + chunked(body))
        assert client.response().status == 200
    return seen


@pytest.mark.parametrize("body", [[], [b"abc", b"de"]])
def test_a_chunked_body_is_one_without_its_coding(lab: Lab, streaming: Lab, body: list[bytes]) -> None:
    """An app that saw HTTP_TRANSFER_ENCODING might undo the coding once more, as Bottle does."""
    environ = environ_of_chunked(lab, body)
    assert (environ["CONTENT_LENGTH"], environ["body"]) == (str(len(b"".join(body))), b"".join(body))
    assert "HTTP_TRANSFER_ENCODING" not in environ and environ["wsgi.input_terminated"] is True
    environ = environ_of_chunked(streaming, body)
    assert environ["body"] == b"".join(body)
    assert environ.get("CONTENT_LENGTH") in (None, "0"), "nobody knows it yet, or it is empty"
    assert "CONTENT_LENGTH" not in environ or not body
    assert "HTTP_TRANSFER_ENCODING" not in environ and environ["wsgi.input_terminated"] is True


def test_a_streamed_body_has_the_length_that_was_announced(streaming: Lab) -> None:
    assert streaming.environ(method="POST", body=b"abcde")["CONTENT_LENGTH"] == "5"
    assert "CONTENT_LENGTH" not in streaming.environ()


@pytest.mark.parametrize(("size", "on_disk"), [(SPOOL_BYTES, False), (SPOOL_BYTES + 1, True), (3_000_000, True)])
def test_a_large_body_lies_on_disk_and_is_gone_afterwards(lab: Lab, size: int, on_disk: bool) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    streams: list[Any] = []

    def read(stream: Any) -> tuple[bool, bytes]:
        streams.append(stream)
        return stream._rolled, stream.read()

    lab.app = reader = Reader(read)
    assert lab.ask(method="POST", body=data).status == 200
    assert reader.got == [(on_disk, data)]
    until(lambda: streams[0].closed)  # after the answer


def test_a_body_without_room_is_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*words: Any, **more: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    lab.app = reader = Reader(lambda stream: stream.read())
    assert lab.ask(method="POST", body=b"x" * (SPOOL_BYTES + 1)).status == 507
    assert reader.got == [] and "No space left" in caplog.text


def test_an_app_may_close_its_input(either: Lab) -> None:
    either.app = Reader(lambda stream: stream.close())
    with either.connect() as client:
        for _ in range(2):
            client.send(post("Content-Length: 5") + b"hello")
            assert client.response().status == 200


@pytest.mark.parametrize("kind", ["whole", "streaming"])
@pytest.mark.parametrize("body", ["length", "chunked"])
def test_a_client_that_leaves_in_the_middle_is_never_taken_for_one_that_sent_all(
    lab: Lab, streaming: Lab, kind: str, body: str
) -> None:
    """Whole bodies: the app is not called. Streamed ones: reading raises, by whatever method."""
    sent = (
        post("Content-Length: 20") + b"half\nof it"
        if body == "length"
        else post("Transfer-Encoding: chunked") + b"14\r\nhalf\nof it"
    )
    used = lab if kind == "whole" else streaming
    methods: list[Callable[[Any], Any]] = [
        lambda stream: stream.read(),
        lambda stream: stream.read(20),
        lambda stream: [stream.read(5), stream.read(15)],
        lambda stream: stream.readlines(),
        lambda stream: [stream.readline(), stream.readline()],
        list,
        lambda stream: [stream.read1(5), stream.read1(), stream.read1(), stream.read1()],
    ]
    for read in methods:
        for goes in (Client.reset, Client.end, lambda client: client.sock.close()):
            used.app = reader = Reader(read)
            with used.connect() as client:
                client.send(sent)
                if kind == "streaming":
                    reader.wait_called()
                goes(client)
                if goes is Client.end:
                    assert client.response().status == 400
                elif kind == "streaming":
                    reader.wait_failed()
            used.wait_idle()
            assert reader.got == []
            assert [type(error) for error in reader.errors] == [RequestBodyError] * (kind == "streaming")


@pytest.mark.parametrize("lets_through", [True, False])
def test_an_app_may_answer_for_a_body_that_did_not_come(streaming: Lab, lets_through: bool) -> None:
    streaming.app = Reader(lambda stream: stream.read(), lets_through=lets_through)
    with streaming.connect() as client:
        client.send(post("Content-Length: 20") + b"half")
        client.end()
        response = client.response()
        assert (response.status, response.get("connection")) == (400 if lets_through else 200, "close")
        assert client.is_closed()


def test_reading_on_after_the_error_raises_again(streaming: Lab) -> None:
    raised: list[str] = []

    def read(stream: Any) -> None:
        for name in ("read", "readline", "readlines", "read"):
            try:
                getattr(stream, name)()
            except OSError as error:
                raised.append(str(error))

    streaming.app = Reader(read)
    with streaming.connect() as client:
        client.send(post("Content-Length: 20") + b"half")
        client.end()
        client.response()
    assert len(raised) == 4 and len(set(raised)) == 1


@pytest.mark.slow
def test_a_body_that_is_too_slow_is_a_408(caplog: pytest.LogCaptureFixture) -> None:
    for stream_bodies in (False, True):
        caplog.clear()
        reader = Reader(lambda stream: stream.read())
        with Lab(reader, settings=ConnectionSettings(body_timeout=0.3), stream_bodies=stream_bodies) as lab:
            with lab.connect() as client:
                client.send(post("Content-Length: 20") + b"half")
                response = client.response()
                assert (response.status, response.get("connection")) == (408, "close")
                assert client.is_closed()
            lab.wait_idle()
        assert reader.got == [] and len(reader.errors) == stream_bodies
        assert "Traceback" not in caplog.text, "that is the client's doing"


@pytest.mark.parametrize("stream_bodies", [False, True])
@pytest.mark.parametrize("body", ["length", "chunked", "late"])
def test_a_body_over_the_limit_is_a_413(stream_bodies: bool, body: str) -> None:
    reader = Reader(lambda stream: stream.read())
    limits = ConnectionSettings(limits=Limits(limit_request_body=10))
    with Lab(reader, settings=limits, stream_bodies=stream_bodies) as lab, lab.connect() as client:
        if body == "length":
            client.send(post("Content-Length: 11") + b"x" * 11)
        else:
            client.send(post("Transfer-Encoding: chunked") + b"8\r\n12345678\r\n")
            if body == "late" and stream_bodies:
                until(lambda: lab.busy)
            client.send(b"8\r\n12345678\r\n0\r\n\r\n")
        response = client.response()
        assert (response.status, response.get("connection")) == (413, "close")
        assert client.is_closed()
    assert reader.got == []


@pytest.mark.parametrize("stream_bodies", [False, True])
def test_a_body_at_the_limit_passes(stream_bodies: bool) -> None:
    reader = Reader(lambda stream: stream.read())
    limits = ConnectionSettings(limits=Limits(limit_request_body=10))
    with Lab(reader, settings=limits, stream_bodies=stream_bodies) as lab, lab.connect() as client:
        client.send(post("Content-Length: 10") + b"x" * 10)
        assert client.response().status == 200
        client.send(post("Transfer-Encoding: chunked") + b"5\r\n12345\r\n5\r\n12345\r\n0\r\n\r\n")
        assert client.response().status == 200
    assert reader.got == [b"x" * 10, b"1234512345"]


def test_chunks_that_are_none_are_a_400(streaming: Lab) -> None:
    streaming.app = reader = Reader(lambda stream: stream.read())
    with streaming.connect() as client:
        client.send(post("Transfer-Encoding: chunked") + b"5\r\nhello\r\nzz\r\n")
        assert client.response().status == 400
        assert client.is_closed()
    assert reader.got == []


def test_a_streamed_body_comes_as_it_is_sent(streaming: Lab) -> None:
    seen: list[bytes] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        for line in environ["wsgi.input"]:
            seen.append(line)
        start_response("200 OK", [])
        return []

    streaming.app = app
    sent: list[bytes] = []
    with streaming.connect() as client:
        client.send(post("Transfer-Encoding: chunked"))
        for number in range(5):
            sent.append(b"%d\n" % number)
            client.send(b"2\r\n%b\r\n" % sent[-1])
            until(lambda: seen == sent)
        client.send(b"0\r\n\r\n")
        assert client.response().status == 200


def test_an_app_may_answer_while_it_reads(streaming: Lab) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        for line in environ["wsgi.input"]:
            yield line.upper()

    streaming.app = app
    with streaming.connect() as client:
        client.send(post("Transfer-Encoding: chunked"))
        client.send(b"4\r\nabc\n\r\n")
        assert client.head()[0] == 200
        assert client.exactly(len(b"4\r\nABC\n\r\n")) == b"4\r\nABC\n\r\n"
        client.send(b"4\r\nefg\n\r\n0\r\n\r\n")
        assert client.exactly(len(b"4\r\nEFG\n\r\n0\r\n\r\n")) == b"4\r\nEFG\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("read", [0, 3])
def test_a_little_that_was_not_read_is_dropped_and_the_connection_kept(streaming: Lab, framing: str, read: int) -> None:
    body = b"x" * 100_000
    streaming.app = Reader(lambda stream: stream.read(read))
    with streaming.connect() as client:
        for _ in range(3):
            if framing == "length":
                client.send(post(f"Content-Length: {len(body)}") + body)
            else:
                client.send(post("Transfer-Encoding: chunked") + chunked([body[:50_000], body[50_000:]]))
            response = client.response()
            assert (response.status, response.get("connection")) == (200, "keep-alive")


def test_what_was_not_read_may_come_after_the_answer(streaming: Lab) -> None:
    streaming.app = answering([b"done"])
    with streaming.connect() as client:
        client.send(post("Content-Length: 10") + b"12345")
        assert client.response().body == b"done"
        streaming.app = reader = Reader(lambda stream: stream.read())
        client.send(b"67890" + post("Content-Length: 2") + b"hi")
        assert client.response().status == 200
    assert reader.got == [b"hi"]


def test_much_that_was_not_read_costs_the_connection(streaming: Lab) -> None:
    streaming.app = answering([b"done"])
    with streaming.connect() as client:
        client.send(post(f"Content-Length: {DISCARD_BYTES * 2}") + b"12345")
        response = client.response()
        assert (response.body, response.get("connection")) == (b"done", "close")
        assert client.is_closed()


def test_a_chunked_rest_without_end_costs_the_connection(streaming: Lab) -> None:
    """Nobody could say so in the head; the answer arrives all the same."""
    streaming.app = answering([b"done"])
    with streaming.connect() as client:
        client.send(post("Transfer-Encoding: chunked") + b"5\r\n12345\r\n")
        assert client.response().body == b"done"
        with pytest.raises((ConnectionError, AssertionError)):
            for _ in range(1000):
                client.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            raise AssertionError("62 MiB went in")
    until(lambda: not streaming.server._all)


def test_another_thread_cannot_read(streaming: Lab) -> None:
    """It could not know that the connection is not another request's by then."""
    errors: list[BaseException] = []

    def attempt(stream: Any) -> None:
        try:
            stream.read(1)
        except RuntimeError as error:
            errors.append(error)

    def read(stream: Any) -> Any:
        thread = threading.Thread(target=attempt, args=(stream,))
        thread.start()
        thread.join(PATIENCE)
        return stream

    streaming.app = reader = Reader(read)
    with streaming.connect() as client:
        client.send(post("Content-Length: 5"))
        assert client.response().status == 200
        assert len(errors) == 1
        streaming.wait_idle()
        attempt(reader.got[0])
        assert len(errors) == 2
        client.send(b"12345")


@pytest.mark.parametrize("kind", ["whole", "streaming"])
def test_who_keeps_the_input_gets_an_error_and_not_an_end(lab: Lab, streaming: Lab, kind: str) -> None:
    used = lab if kind == "whole" else streaming
    used.app = reader = Reader(lambda stream: stream)
    assert used.ask(method="POST", body=b"hello").status == 200
    with pytest.raises((RuntimeError, ValueError)):
        reader.got[0].read()


def test_a_streamed_body_over_tls(tmp_path: Path) -> None:
    """Records that lie deciphered in memory raise no event."""
    body = bytes(range(256)) * 4000
    reader = Reader(lambda stream: b"".join([stream.read(10), stream.readline(), *stream]))
    with Lab(reader, stream_bodies=True, tls=make_certificate(tmp_path)) as lab:
        with lab.connect() as client:
            client.send(post(f"Content-Length: {len(body)}") + body + post(*EXPECT))
            assert client.response().status == 200
            assert client.head()[0] == 100
            client.send(b"hello" + post("Transfer-Encoding: chunked") + chunked([body[:70_000], body[70_000:]]))
            assert [client.response().status, client.response().status] == [200, 200]
        with lab.connect() as client:
            client.send(post("Content-Length: 20") + b"half")
            until(lambda: reader.calls == 4)
        reader.wait_failed()
    assert reader.got == [body, b"hello", body]
    assert [type(error) for error in reader.errors] == [RequestBodyError]


# -- Expect: 100-continue --

EXPECT = ("Content-Length: 5", "Expect: 100-continue")


def test_100_continue_is_sent_when_the_app_reads(either: Lab) -> None:
    go_on = threading.Event()

    def read(stream: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return [stream.read(2), stream.read()]

    either.app = reader = Reader(read)
    with either.connect() as client:
        client.send(post(*EXPECT))
        until(lambda: either.busy)
        client.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.more()  # nothing yet
        client.sock.settimeout(PATIENCE)
        go_on.set()
        assert client.line() == b"HTTP/1.1 100 Continue" and client.line() == b""
        client.send(b"hello")
        response = client.response()
        assert (response.status, response.get("connection")) == (200, "keep-alive")
        client.send(post(*EXPECT))
        assert client.head()[0] == 100
        client.send(b"again")
        assert client.response().status == 200
    assert reader.got == [[b"he", b"llo"], [b"ag", b"ain"]]


@pytest.mark.parametrize("app", ["whole", "generator", "error"])
def test_100_continue_is_not_sent_when_the_app_does_not_read(
    either: Lab, app: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the connection ends: nobody can tell whether the body will come."""
    either.app = answering([b"no"] if app == "whole" else iter([b"no"]), "403 Forbidden" if app != "error" else "")
    with either.connect() as client:
        client.send(post(*EXPECT))
        response = client.response()
        assert (response.status, response.get("connection")) == (500 if app == "error" else 403, "close")
        assert client.is_closed()


@pytest.mark.parametrize("how", ["write", "yield"])
def test_100_continue_is_not_sent_after_the_head(either: Lab, how: str) -> None:
    got: list[bytes] = []

    def app(environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        write = start_response("200 OK", [])
        if how == "write":
            write(b"one")
        else:
            yield b"one"
        got.append(environ["wsgi.input"].read())
        yield b"two"

    either.app = app
    with either.connect() as client:
        client.send(post(*EXPECT))
        status, fields = client.head()
        assert status == 200 and ("connection", "close") in fields
        assert client.exactly(8) == b"3\r\none\r\n"
        client.send(b"hello")
        assert client.rest() == b"3\r\ntwo\r\n0\r\n\r\n"
    assert got == [b"hello"]


def test_100_continue_is_not_sent_when_the_body_came_anyway(either: Lab) -> None:
    either.app = reader = Reader(lambda stream: stream.read())
    with either.connect() as client:
        client.send(post(*EXPECT) + b"hello")
        response = client.response()
        assert (response.status, response.get("connection")) == (200, "keep-alive")
    assert reader.got == [b"hello"]


def test_100_continue_for_a_chunked_body(either: Lab) -> None:
    either.app = reader = Reader(lambda stream: stream.readlines())
    with either.connect() as client:
        client.send(post("Transfer-Encoding: chunked", "Expect: 100-Continue"))
        assert client.head()[0] == 100
        client.send(chunked([b"a\n", b"b"]))
        assert client.response().status == 200
    assert reader.got == [[b"a\n", b"b"]]


def test_http_1_0_has_no_100_continue(either: Lab) -> None:
    either.app = reader = Reader(lambda stream: stream.read())
    with either.connect() as client:
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello")
        assert client.response().status == 200
    assert reader.got == [b"hello"]


def test_a_client_that_waits_for_100_continue_and_leaves(either: Lab, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    def read(stream: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return stream.read()

    either.app = reader = Reader(read)
    client = either.connect()
    client.send(post(*EXPECT))
    until(lambda: either.busy)
    client.reset()
    go_on.set()
    either.wait_idle()
    assert reader.got == [] and [type(error) for error in reader.errors] == [RequestBodyError]
    assert "Traceback" not in caplog.text
