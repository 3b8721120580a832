"""The load generators, on our own upstream and on servers that misbehave."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

if sys.platform != "linux":
    pytest.skip("the benchmarks need epoll", allow_module_level=True)

from benchmarks.load.burst import Burst
from benchmarks.load.closed_loop import ClosedLoop, heads
from benchmarks.processes import Failure, Tool, Upstream, get

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@contextmanager
def server(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where each connection gets *handle* and is then closed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def one(connection: socket.socket) -> None:
        with connection:
            try:
                handle(connection)
            except OSError:
                pass  # the client has gone

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def ask(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        part = connection.recv(4096)
        if not part:
            raise ConnectionError
        data += part
    return data


def always(answer: bytes, requests: int = 10**9) -> Callable[[socket.socket], None]:
    """Gives *answer* to that many requests of a connection."""

    def handle(connection: socket.socket) -> None:
        for _ in range(requests):
            ask(connection)
            connection.sendall(answer)

    return handle


def loaded(handle: Callable[[socket.socket], None], drain_s: float = 5.0) -> ClosedLoop:
    with server(handle) as port:
        loop = ClosedLoop(port, "/", 2)
        loop.run(0.1, drain_s)
        return loop


def test_equal_heads_and_differing_ones() -> None:
    same = heads(80, "/x", vary=False)
    assert same() == same() == b"GET /x HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n"
    differing = heads(80, "/x", vary=True)
    made = {differing() for _ in range(100)}
    assert len(made) == 100
    assert len({len(head) for head in made}) == 1


def test_a_closed_loop_counts_answers() -> None:
    tally = loaded(always(HELLO)).tally
    assert tally.failures() == tally.reconnected == 0
    assert len(tally.latencies) >= tally.within > 2
    assert all(0 < latency < 1 for latency in tally.latencies)


def test_answers_of_other_lengths_count_too() -> None:
    def handle(connection: socket.socket) -> None:
        for number in range(10**9):
            ask(connection)
            body = b"x" * (number % 7)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    tally = loaded(handle).tally
    assert tally.failures() == 0
    assert len(tally.latencies) > 2


def test_a_connection_may_be_closed_between_requests() -> None:
    for answer in (HELLO, HELLO.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")):
        tally = loaded(always(answer, requests=1)).tally
        assert tally.failures() == 0
        assert tally.reconnected > 1
        assert len(tally.latencies) > 1


def test_a_body_may_end_with_the_connection() -> None:
    tally = loaded(always(b"HTTP/1.0 200 OK\r\n\r\nhello", requests=1)).tally
    assert tally.failures() == 0
    assert len(tally.latencies) > 1


def test_wrong_answers_are_failures() -> None:
    assert loaded(always(HELLO.replace(b"200 OK", b"503 No"))).tally.bad_status > 0
    assert loaded(always(HELLO[:-1], requests=1)).tally.broken > 0
    assert loaded(always(b"nonsense\r\n\r\n")).tally.broken > 0
    silent = loaded(lambda connection: (ask(connection), connection.recv(1), None)[2], drain_s=0.05).tally
    assert (silent.unanswered, silent.failures(), len(silent.latencies)) == (2, 2, 0)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    loop = ClosedLoop(port, "/", 2)
    loop.run(0.05)
    assert loop.tally.refused >= 2
    burst = Burst(port, "/", 2, 0)
    burst.run(0.0, 5.0)
    assert burst.broken == {"no connection": 2}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n", "closed early"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n0\r\n\r\n", "tokens missing"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n\n\n", "status 500"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\n\r\none\ntwo\n", None),
    ],
)
def test_a_stream_is_whole_or_it_has_a_fault(answer: bytes, fault: str | None) -> None:
    with server(always(answer, requests=1)) as port:
        burst = Burst(port, "/", 3, tokens=2)
        burst.run(0.01, 5.0)
    assert burst.broken == ({fault: 3} if fault else {})
    assert len(burst.whole_s) == (0 if fault else 3)


def test_a_stream_that_does_not_end_is_late() -> None:
    def handle(connection: socket.socket) -> None:
        ask(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\none\n")
        connection.recv(1)

    with server(handle) as port:
        burst = Burst(port, "/", 1, tokens=2)
        assert burst.run(0.0, 0.1) < 1
    assert burst.broken == {"late": 1}
    assert (burst.tokens, len(burst.first_s), len(burst.whole_s)) == (1, 1, 0)


@pytest.mark.slow
def test_the_upstream_streams_on_time() -> None:
    with Upstream(60) as upstream:
        assert get(upstream.port, "/")[0] == 200
        burst = Burst(upstream.port, "/stream?n=4&ms=20", 20, tokens=4)
        burst.run(0.02, 10.0)
        assert burst.broken == {}
        assert burst.tokens == 80
        assert min(burst.whole_s) >= 0.08
        assert min(burst.first_s) >= 0.02
        assert len(burst.gaps_s) <= 60
        late = upstream.late_p99_s()
        assert late is not None
        assert 0 <= late < 5
        assert upstream.late_p99_s() is None  # since it was last asked
    assert upstream.child.returncode is not None


@pytest.mark.slow
def test_a_crowd_is_held_and_counted() -> None:
    with server(lambda connection: (connection.recv(100), connection.recv(1), None)[2]) as port:
        with Tool("crowd", {"port": port, "silent": 5, "slow": 3}, 60) as crowd:
            assert crowd.say() == {"open": 8, "failed": 0}
            left = crowd.finish()
    assert (left["open"], left["closed"], left["failed"]) == (8, 0, 0)


@pytest.mark.slow
def test_a_tool_that_fails_is_a_failure() -> None:
    with pytest.raises(Failure, match="ended with status"), Tool("nonsense", {}, 60) as tool:
        tool.finish()
    with pytest.raises(Failure, match="within its time"), Tool("upstream", {}, 0) as tool:
        tool.say()
        tool.say()
