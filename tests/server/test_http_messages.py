"""HTTP on both engines: plain requests, bodies, pipelining, and what is refused. Numbers are those of the cases."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jumpstart_server import forks
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.http1 import Limits
from tests.server.http_cases import CHUNKED, CUT_SHORT, GET, REFUSED, STATUSES, WORDS, errors, post
from tests.server.lab import ALL, ENGINES, BaseLab, Door, Reply, Tell, make_lab
from tests.server.raw_http import PATIENCE, Client, until

pytestmark = pytest.mark.usefixtures("log")
several = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=ALL)
def running(request: pytest.FixtureRequest) -> Iterator[BaseLab]:
    with make_lab(request.param) as lab:
        yield lab


@pytest.fixture
def lab(running: BaseLab) -> Iterator[BaseLab]:
    """A server with the defaults; each test leaves it idle."""
    yield running
    running.wait_idle()


@pytest.fixture(scope="module", params=ENGINES)
def small(request: pytest.FixtureRequest) -> Iterator[BaseLab]:
    """A server with a small body limit."""
    with make_lab(request.param, ConnectionSettings(limits=Limits(limit_request_body=100_000))) as lab:
        yield lab


def get(path: str, *fields: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path.encode(), b"".join(field + b"\r\n" for field in fields))


# -- plain requests --


def test_a_short_answer_has_its_length_and_the_connection_stays(lab: BaseLab) -> None:
    with lab.connect() as client:
        for _ in range(3):
            client.send(GET)
            response = client.response()
            assert (response.status, response.body) == (200, b"hello\n")
            assert response.get("content-length") == "6"
            assert response.get("date")
            assert response.get("keep-alive") == "timeout=75"  # 180


def test_a_body_in_one_piece_needs_no_length_of_the_app(lab: BaseLab) -> None:
    response = lab.ask(get(lab.serve(Reply((b"abc",), length=0))))
    assert (response.get("content-length"), response.body) == ("3", b"abc")


@pytest.mark.parametrize(("version", "framing"), [("1.1", "chunked"), ("1.0", None)])
def test_a_stream_is_chunked_or_ends_with_the_connection(lab: BaseLab, version: str, framing: str | None) -> None:
    """56."""
    path = lab.serve(Reply((b"one ", b"", b"two ", b"three")))
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


def test_http_1_0_is_kept_where_the_client_asks(lab: BaseLab) -> None:
    with lab.connect() as client:
        for _ in range(2):
            client.get("/", "Connection: keep-alive", version="1.0")
            assert client.response().get("connection") == "keep-alive"
        client.get("/", version="1.0")
        assert client.response().get("connection") == "close"
        assert client.is_closed()


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304), ("HEAD", 404)])
def test_no_body_where_there_may_be_none(lab: BaseLab, method: str, status: int) -> None:
    path = lab.serve(Reply((b"unwanted",), status))
    with lab.connect() as client:
        client.get(path, method=method)
        response = client.response(method)
        assert response.status == status
        assert response.get("content-length") == (None if status == 204 else "8")
        client.send(GET)  # nothing of the body is in the way
        assert client.response().body == b"hello\n"


def test_the_app_may_close_the_connection(lab: BaseLab) -> None:
    path = lab.serve(Reply(headers=(("Connection", "close"),)))
    with lab.connect() as client:
        client.get(path)
        assert client.response().get("connection") == "close"
        assert client.is_closed()


def test_a_body_longer_than_its_length_is_cut(lab: BaseLab, log: pytest.LogCaptureFixture) -> None:
    path = lab.serve(Reply((b"abcdef",), length=3))
    with lab.connect() as client:
        client.get(path)
        assert client.response().body == b"abc"
        client.send(GET)
        assert client.response().status == 200
    assert "3 bytes beyond" in errors(log)[0]


def test_a_body_shorter_than_its_length_is_seen_to_be(lab: BaseLab, log: pytest.LogCaptureFixture) -> None:
    path = lab.serve(Reply((b"abc",), length=10))
    with lab.connect() as client:
        client.get(path)
        response = client.response()
        assert (response.body, response.complete) == (b"abc", False)
    until(lambda: errors(log))
    assert "fewer bytes" in errors(log)[0]


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("has_children", [False, True])  # of the app, with copies of the connection
def test_53_an_exception_in_the_middle_of_a_body_can_be_seen(
    lab: BaseLab, log: pytest.LogCaptureFixture, framing: str, has_children: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No last chunk, fewer bytes than announced, or a reset."""
    monkeypatch.setattr(forks, "has_children", has_children)
    path = lab.serve(Reply((b"half",), length=100 if framing == "length" else 0, fails=True))
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


def test_an_app_that_fails_costs_its_answer_and_nothing_else(lab: BaseLab, log: pytest.LogCaptureFixture) -> None:
    path = lab.serve(Reply((), fails=True))
    with lab.connect() as client:
        client.get(path)
        response = client.response()
        assert (response.status, response.get("connection")) == (500, "close")
        assert client.is_closed()
    assert len(errors(log)) == 1
    assert path in errors(log)[0]
    assert lab.ask(GET).status == 200


# -- bodies of requests --


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_an_upload_comes_back(lab: BaseLab, chunked: bool, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    if chunked:
        pieces = [body[i : i + 50_000] for i in range(0, size, 50_000)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces) + b"0\r\n\r\n"
        framing = CHUNKED
    else:
        data, framing = body, b"Content-Length: %d" % size
    with lab.connect() as client:
        for _ in range(2):
            client.send(post(framing, data))
            assert client.response().body == body


@pytest.mark.slow
def test_103_an_upload_in_single_bytes_takes_linear_time(lab: BaseLab) -> None:
    """Each chunk has one byte, and the app takes them all at once."""
    size = 100_000
    sizes: list[int] = []
    path = lab.serve(Reply(note=lambda body: sizes.append(len(body))))
    began = time.monotonic()
    with lab.connect() as client:
        client.get(path, "Transfer-Encoding: chunked", method="POST")
        client.send(b"1\r\nx\r\n" * size + b"0\r\n\r\n")
        assert client.response().status == 200
    assert sizes == [size]
    assert time.monotonic() - began < 4  # quadratic: minutes


def test_continue_is_sent_when_the_app_reads_and_not_before(lab: BaseLab) -> None:
    door = Door()
    path = lab.serve(Reply(echo=True, door=door))
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Content-Length: 5", method="POST")
        until(lambda: door.entered)
        client.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.more()
        client.sock.settimeout(PATIENCE)
        door.open()
        assert client.response().status == 100
        client.send(b"12345")
        assert client.response().body == b"12345"
        client.send(GET)
        assert client.response().status == 200


def test_a_client_that_does_not_wait_for_continue_needs_none(lab: BaseLab) -> None:
    with lab.connect() as client:
        for _ in range(2):
            client.send(post(b"Expect: 100-continue\r\nContent-Length: 5", b"12345"))
            assert client.response().body == b"12345"


def test_an_app_that_does_not_want_the_body_spares_the_client_sending_it(lab: BaseLab) -> None:
    path = lab.serve(Reply((b"no",), 403))
    with lab.connect() as client:
        client.get(path, "Expect: 100-continue", "Content-Length: 5", method="POST")
        response = client.response()
        assert (response.status, response.get("connection")) == (403, "close")
        assert client.is_closed()


@pytest.mark.parametrize("size", [9000, 200_000])
def test_23_128_a_small_body_that_the_app_ignores_does_not_cost_the_connection(lab: BaseLab, size: int) -> None:
    with lab.connect() as client:
        client.get("/", f"Content-Length: {size}", method="POST")
        client.send(bytes(size) + GET)
        for _ in range(2):
            response = client.response()
            assert response.status == 200 and response.get("connection") != "close"


@pytest.mark.parametrize("engine", ["asgi", "wsgi-streamed"])
def test_23_a_large_body_that_the_app_ignores_does_where_nobody_has_read_it(engine: str) -> None:
    """And the answer arrives although the client goes on sending."""
    with make_lab(engine) as lab, lab.connect() as client:
        client.get("/", "Content-Length: 3000000", method="POST")
        client.send(bytes(200_000))
        response = client.response()
        assert (response.status, response.get("connection"), response.body) == (200, "close", b"hello\n")
        assert client.is_closed()


@pytest.mark.parametrize("engine", ["asgi", "wsgi-streamed"])
def test_reading_stops_while_the_app_does_not_take_the_body(engine: str) -> None:
    """Memory for an upload is what one read brings, and the kernel's."""
    door = Door()
    size = 20_000_000
    with make_lab(engine, app=Reply(echo=True, door=door)) as lab, lab.connect() as client:
        client.get("/", f"Content-Length: {size}", method="POST")
        until(lambda: door.entered)
        client.sock.setblocking(False)
        sent = 0
        stuck_since = time.monotonic()
        while time.monotonic() - stuck_since < 0.3:  # until nothing was taken for a while
            with contextlib.suppress(BlockingIOError):
                sent += client.sock.send(bytes(min(65536, size - sent)))
                stuck_since = time.monotonic()
        assert sent < size
        door.open()
        client.sock.settimeout(PATIENCE)
        client.send(bytes(size - sent))
        assert len(client.response().body) == size


@pytest.mark.parametrize("cut", CUT_SHORT)
def test_126_a_body_that_is_cut_short_is_never_seen_whole(
    lab: BaseLab, cut: bytes, log: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    path = lab.serve(Reply(note=seen.append)).encode()
    with lab.back_to_baseline():
        for leave in (Client.end, Client.reset):
            with lab.connect() as client:
                client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%b" % (path, cut))
                until(lambda: lab.connections)
                leave(client)
                lab.wait_idle()
    assert not seen
    assert not errors(log)


# -- pipelining --


@pytest.mark.slow
def test_128_138_pipelined_requests_are_answered_in_order(lab: BaseLab) -> None:
    with lab.connect() as client:
        path = lab.serve(Tell()).encode()
        client.send(
            get(lab.serve(Reply((b"first",), pause=0.03)))
            + b"".join(b"GET %b?%d HTTP/1.1\r\nHost: a\r\n\r\n" % (path, number) for number in range(1000))
        )
        assert client.response().body == b"first"
        found = [json.loads(client.response().body)["query"] for _ in range(1000)]
        assert found == [str(number) for number in range(1000)]


def test_128_a_pipelined_request_follows_a_body(lab: BaseLab) -> None:
    """Read, unread, and one that is in the way of another."""
    with lab.connect() as client:
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc" + GET)
        assert [client.response().status for _ in range(2)] == [200, 200]
        client.send(post(b"Content-Length: 3", b"abc") + GET + post(CHUNKED, b"3\r\ndef\r\n0\r\n\r\n") + GET)
        assert [client.response().body for _ in range(4)] == [b"abc", b"hello\n", b"def", b"hello\n"]


def test_128_bytes_after_connection_close_are_ignored(lab: BaseLab, log: pytest.LogCaptureFixture) -> None:
    with lab.connect() as client:
        client.send(get("/", b"Connection: close") + GET + b"\0\0 nonsense")
        assert client.response().get("connection") == "close"
        assert client.is_closed()
    assert not log.records


def test_128_a_good_request_and_a_bad_one(lab: BaseLab) -> None:
    with lab.connect() as client:
        client.send(GET + b"GET /a b HTTP/1.1\r\n\r\n")
        assert [client.response().status for _ in range(2)] == [200, 400]
        assert client.is_closed()


def test_a_client_that_closes_its_side_still_gets_its_answers(lab: BaseLab) -> None:
    for number in (1, 3):
        with lab.connect() as client:
            client.send(GET * number)
            client.end()
            assert [client.response().status for _ in range(number)] == [200] * number
            assert client.is_closed()


# -- faulty requests (G) --


@pytest.mark.parametrize(("data", "status"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused(lab: BaseLab, data: bytes, status: int, log: pytest.LogCaptureFixture) -> None:
    """Group G: the status, `Connection: close`, a close, and no word at ERROR."""
    with lab.connect() as client:
        client.send(data)
        response = client.response()
        assert (response.status, response.get("connection"), response.complete) == (status, "close", True)
        assert client.is_closed()
    assert not errors(log)
    assert lab.ask(GET).status == 200


def test_130_a_harmless_trailer_changes_nothing(lab: BaseLab) -> None:
    response = lab.ask(post(CHUNKED, b"2\r\nab\r\n0\r\nX-Forwarded-Proto: https\r\n\r\n"))
    assert response.body == b"ab"


def test_136_absolute_form_wins_over_host(lab: BaseLab) -> None:
    path = lab.serve(Tell())
    told = json.loads(lab.ask(b"GET http://real%b?q HTTP/1.1\r\nHost: other\r\n\r\n" % path.encode()).body)
    assert (told["host"], told["path"], told["query"]) == ("real", path, "q")


@pytest.mark.parametrize("framing", ["Content-Length: 5000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)], ids=["unasked", "expected"])
def test_133_a_body_over_the_limit_is_refused_and_the_answer_arrives(
    small: BaseLab, framing: str, expect: tuple[str, ...], log: pytest.LogCaptureFixture
) -> None:
    """413 before the body is read, through a client that goes on sending for a while."""
    with small.back_to_baseline():
        with small.connect() as client:
            client.get("/echo", framing, *expect, method="POST")
            with contextlib.suppress(ConnectionError):
                for _ in range(5):
                    client.send(b"8000\r\n%b\r\n" % bytes(0x8000))
            response = client.response()
            if response.status == 100:
                response = client.response()
            assert (response.status, response.complete) == (413, True)
            assert client.is_closed()
    assert not errors(log)


@pytest.mark.parametrize("engine", ["asgi", "wsgi"])
def test_135_the_reason_is_logged_and_not_too_often(engine: str, log: pytest.LogCaptureFixture) -> None:
    with make_lab(engine) as lab:
        for _ in range(40):
            lab.ask(b"GET /\xf0\x9f\x98\x80 HTTP/1.1\r\nHost: a\r\nCookie: secret\r\n\r\n")
    lines = [record for record in log.records if record.name == "jumpstart_server.refusals"]
    assert 10 <= len(lines) <= 30  # ten a second
    line = lines[0].getMessage()
    assert lines[0].levelno == logging.INFO
    assert "127.0.0.1" in line and "400" in line and r"/\xf0\x9f" in line
    assert "secret" not in log.text


def test_138_a_request_in_single_bytes(lab: BaseLab) -> None:
    with lab.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post(b"Content-Length: 3", b"abc"):
            client.send(bytes((byte,)))
        assert client.response().body == b"abc"


@pytest.mark.parametrize("engine", ["asgi", "wsgi"])
def test_138_reading_stops_while_pipelined_requests_wait(engine: str) -> None:
    """Memory is bounded by one read and the kernel's buffers, however much a client sends."""
    door = Door()
    with make_lab(engine, app=Reply(door=door)) as lab, lab.connect() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        client.send(GET)
        until(lambda: door.entered)
        client.sock.settimeout(0.2)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 100_000_000:
                sent += client.sock.send(GET * 1000)
        assert sent < 30_000_000
        door.open()
        client.sock.settimeout(PATIENCE)
        assert client.response().status == 200
        client.reset()


def test_28_after_garbage_and_resets_all_is_as_before(lab: BaseLab, log: pytest.LogCaptureFixture) -> None:
    with lab.back_to_baseline():
        for number in range(60):
            client = lab.connect()
            client.send((b"\0garbage", GET, b"GET / HT", post(b"Content-Length: 9", b"1"))[number % 4])
            client.reset()
    assert lab.ask(GET).status == 200
    assert not errors(log)


@several
@given(st.lists(WORDS | st.binary(max_size=20), max_size=12), st.booleans())
def test_any_bytes_get_an_answer_or_a_close(
    lab: BaseLab, log: pytest.LogCaptureFixture, words: list[bytes], well_begun: bool
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
    # An app that knows two paths fails for any other; of everything else there is no word.
    assert not [line for line in errors(log) if "exception in the app" not in line]


SERIES = st.lists(
    st.sampled_from(
        [
            *(
                GET,
                get("/", b"X: y"),
                post(b"Content-Length: 5", b"12345"),
                post(CHUNKED, b"5;a\r\n12345\r\n0\r\nT: a\r\n\r\n"),
            ),
            *(post(b"Expect: 100-continue\r\nContent-Length: 5", b"12345"), post(b"Content-Length: 0")),
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
            b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        ]
    ),
    max_size=4,
)
LAST = st.sampled_from([b"", GET[:-1], get("/", b"Connection: close"), *(case[1] for case in REFUSED)]).filter(
    lambda data: len(data) < 2000
)


def answers_to(lab: BaseLab, parts: Iterable[bytes]) -> bytes:
    """All that comes, but for interim answers, which depend on how much was there, and dates."""
    with lab.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.send(part)
            client.end()
        data = client.rest().replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    return b"\r\n".join(line for line in data.split(b"\r\n") if not line.startswith(b"Date:"))


@several
@given(SERIES, LAST, st.data())
def test_any_split_of_the_bytes_gives_the_same_answers(
    lab: BaseLab, series: list[bytes], last: bytes, more: st.DataObject
) -> None:
    data = b"".join(series) + last
    cuts = sorted(more.draw(st.sets(st.integers(1, max(len(data) - 1, 1)), max_size=12)))
    parts = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)])]
    assert answers_to(lab, parts) == answers_to(lab, [data])
