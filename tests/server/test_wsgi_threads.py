"""The WSGI engine's threads under real requests: none is lost, counts are right. Numbers are those of the cases."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest

from jumpstart_server.wsgi import pool as pool_module
from tests.server.raw_http import until
from tests.server.wsgi_counts import (
    LONG,
    check_idle,
    check_pool,
    finish,
    hold_all,
    names_of,
    switch_often,
)
from tests.server.wsgi_lab import Environ, Gate, Lab, StartResponse, answer

GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"


def test_the_counts_while_handlers_are_held() -> None:
    with Lab(threads=5) as lab:
        gate = Gate()
        clients = hold_all(lab, gate, 3)
        stats = lab.server.stats()
        assert (stats.busy, stats.peak, stats.limit, stats.waiting, stats.oldest_wait_s) == (3, 3, 5, 0, 0.0)
        assert 3 <= stats.threads <= 5
        path = next(iter(lab.apps))
        names = [name for name in names_of(lab.server.pool) if path in name]
        assert len(names) == 3 and all(name.endswith(f"GET {path}") for name in names)
        assert [thread.name in names for thread in lab.server.pool.jobs()] == [True] * 3
        check_pool(lab.server.pool)
        gate.open()
        finish(clients)
        check_idle(lab.server)
        stats = lab.server.stats()
        assert (stats.busy, stats.peak, stats.waiting) == (0, 3, 0)
        assert not [name for name in names_of(lab.server.pool) if "GET" in name]


@pytest.mark.slow
def test_a_thousand_threads_at_once() -> None:
    with Lab(threads=1000) as lab:
        meet = threading.Barrier(1000)

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            meet.wait(LONG)
            return answer()(environ, start_response)

        path = lab.app(app)
        clients = [lab.connect() for _ in range(1000)]
        for client in clients:
            client.get(path)
        finish(clients)
        stats = lab.server.stats()
        assert (stats.peak, stats.limit) == (1000, 1000)
        assert stats.threads <= 1000
        check_idle(lab.server)


def too_deep(depth: int = 0) -> int:
    return too_deep(depth + 1) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, GeneratorExit, RecursionError, MemoryError, StopIteration, OSError]
)
def test_28_no_thread_is_lost_to_an_error(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """In the handler, in its iterable, in close(), and in write()."""

    def fail() -> None:
        if error is RecursionError:
            too_deep()
        raise error("on purpose")

    class Closing:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"body"])

        def close(self) -> None:
            fail()

    def at_once(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        fail()
        return []

    def later(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"first"
        fail()

    def at_close(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Length", "4")])
        return Closing()

    def after_write(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])(b"written")
        fail()
        return []

    with Lab(threads=3) as lab:
        lab.app(answer(), "/")
        for app in (at_once, later, at_close, after_write):
            path = lab.app(app)
            for _ in range(5):
                with lab.connect() as client:
                    client.get(path)
                    response = client.response()
                    assert response.status == (500 if app is at_once else 200)
                    assert response.complete == (app in (at_once, at_close))
                assert lab.ask(GET % b"/").status == 200
        check_idle(lab.server)
        assert lab.server.stats().threads <= 3
    assert "internal error" not in caplog.text


def test_28_nor_to_connections_that_break() -> None:
    with Lab(threads=2) as lab:
        lab.app(answer(), "/")
        for data in (b"", b"\x16\x03\x01 garbage", b"GET / HTTP/1.1\r\n", GET % b"/", b"\0" * 70_000):
            for _ in range(6):
                client = lab.connect()
                client.send(data)
                client.reset()
        assert lab.ask(GET % b"/").status == 200
        until(lambda: not lab.connections, LONG)
        check_idle(lab.server)
        assert 1 <= lab.server.stats().threads <= 2


@pytest.mark.parametrize("kept", [False, True], ids=["silent", "idle keep-alive"])
def test_21_25_30_silent_connections_take_no_thread(kept: bool) -> None:
    """The case asks for 50 ms; of five tries one at least is as fast on a machine that others use too."""
    with Lab(threads=4) as lab:
        lab.app(answer(), "/")
        others = [lab.connect() for _ in range(6)]
        if kept:
            for client in others:
                client.send(GET % b"/")
                assert client.response().status == 200
        took = []
        for _ in range(5):
            began = time.monotonic()
            assert lab.ask(GET % b"/").status == 200
            took.append(time.monotonic() - began)
        assert min(took) < 0.05
        for client in others:
            with client:
                client.send(GET % b"/")
                assert client.response().status == 200


def test_36b_106_idle_connections_are_not_counted() -> None:
    """Neither against the threads nor against the queue."""
    with Lab(threads=2, queue=2) as lab:
        lab.app(answer(), "/")
        idle = [lab.connect() for _ in range(40)]
        for client in idle:
            client.send(GET % b"/")
            assert client.response().status == 200
        check_idle(lab.server)
        gate = Gate()
        busy = hold_all(lab, gate, 2)
        waiting = [lab.connect() for _ in range(2)]
        for client in waiting:
            client.send(GET % b"/")
        until(lambda: lab.server.stats().waiting == 2, LONG)
        gate.open()
        finish([*busy, *waiting])
        for client in idle:
            client.send(GET % b"/")
            finish([client])


# -- quick, and then not --


@pytest.mark.slow
@pytest.mark.parametrize("idle_first", [False, True])
def test_a_quick_handler_that_suddenly_blocks_stops_nobody(idle_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if idle_first:
        monkeypatch.setattr(pool_module, "RESTLESS", 0.05)
    with Lab(threads=4) as lab:
        free = threading.Event()
        blocked = threading.Semaphore(0)
        hold = [False]

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            if hold[0]:
                blocked.release()
                assert free.wait(LONG)
            return answer()(environ, start_response)

        path = lab.app(app)
        lab.app(answer(), "/")
        with lab.connect() as first, lab.connect() as second, lab.connect() as other:
            for client in (first, second, other):
                for _ in range(20):
                    client.get(path if client is not other else "/")
                    assert client.response().status == 200
            assert lab.server._paces.is_quick(("GET", path.encode()))
            if idle_first:
                until(lambda: lab.server.pool._keeper_sleeps, LONG)
            hold[0] = True
            for client in (first, second):
                client.get(path)
                assert blocked.acquire(timeout=LONG)
            longest = 0.0
            for _ in range(100):
                began = time.monotonic()
                other.get("/")
                assert other.response().status == 200
                longest = max(longest, time.monotonic() - began)
            assert lab.server.stats().busy == 2
            free.set()
            assert first.response().status == second.response().status == 200
        assert longest < 1.0
        check_idle(lab.server)


@pytest.mark.slow
def test_pipelined_requests_neither_recurse_nor_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 in one go, beside another client, on one thread."""
    switch_often(monkeypatch, 1e-4)
    with Lab(threads=1) as lab:
        order: list[str] = []

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            order.append(environ["QUERY_STRING"])
            return answer(environ["QUERY_STRING"].encode())(environ, start_response)

        path = lab.app(app).encode()
        with lab.connect() as many, lab.connect() as one:
            many.sock.settimeout(LONG)
            many.send(b"".join(GET % (path + b"?%d" % number) for number in range(1000)))
            for number in range(10):
                one.get(path.decode() + "?one")
                assert one.response().body == b"one"
                if number == 5:
                    many.send(b"".join(GET % (path + b"?%d" % number) for number in range(1000, 2000)))
            for number in range(2000):
                response = many.response()
                assert (response.status, response.body) == (200, b"%d" % number)
        own = [query for query in order if query != "one"]
        assert own == [str(number) for number in range(2000)]
        check_idle(lab.server)
