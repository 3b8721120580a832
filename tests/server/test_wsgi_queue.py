"""Requests that wait for a WSGI thread: in order, not too many, not too long. Numbers are those of the cases."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable

import pytest

from jumpstart_server.wsgi import waiting as waiting_module
from tests.server.raw_http import until
from tests.server.wsgi_counts import LONG, check_idle, check_pool, finish, hold_all, wait_for_waiting
from tests.server.wsgi_lab import Environ, Gate, Lab, StartResponse, answer

GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"


def test_requests_wait_in_order() -> None:
    with Lab(threads=2, queue_timeout=0) as lab:  # else, where they wait for long, the newest are served first
        gate, last_gate = Gate(), Gate()
        order: list[str] = []
        busy = [*hold_all(lab, gate, 1), *hold_all(lab, last_gate, 1)]

        def note(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            order.append(environ["QUERY_STRING"])
            return answer()(environ, start_response)

        path = lab.app(note)
        waiting = []
        for number in range(30):
            client = lab.connect()
            client.get(f"{path}?{number}")
            waiting.append(client)
            wait_for_waiting(lab, number + 1)
        stats = lab.server.stats()
        assert (stats.busy, stats.waiting, stats.threads) == (2, 30, 2)
        first = stats.oldest_wait_s
        until(lambda: lab.server.stats().oldest_wait_s > max(first, 0.01), LONG)
        check_pool(lab.server.pool)
        assert not order
        gate.open()  # one thread is free now
        finish(waiting)
        assert order == [str(number) for number in range(30)]
        last_gate.open()
        finish(busy)
        check_idle(lab.server)
        assert lab.server.stats().oldest_wait_s == 0.0


def test_35_a_full_queue_is_answered_at_once_and_recovers() -> None:
    with Lab(threads=2, queue=3, queue_timeout=0) as lab:
        lab.app(answer(), "/")
        for _ in range(2):
            gate = Gate()
            busy = hold_all(lab, gate, 2)
            waiting = []
            for number in range(3):
                waiting.append(lab.connect())
                waiting[-1].send(GET % b"/")
                wait_for_waiting(lab, number + 1)
            for _ in range(20):
                with lab.connect() as client:
                    began = time.monotonic()
                    client.send(GET % b"/")
                    response = client.response()
                    assert (response.status, response.get("connection")) == (503, "close")
                    assert response.get("retry-after") == "1"
                    assert client.is_closed()
                    assert time.monotonic() - began < LONG / 3
            assert lab.server.stats().waiting == 3
            gate.open()
            finish([*busy, *waiting])
            check_idle(lab.server)


@pytest.mark.slow
def test_what_waits_too_long_is_answered_and_never_run() -> None:
    with Lab(threads=2, queue_timeout=0.3) as lab:
        gate, ran = Gate(), []
        busy = hold_all(lab, gate, 2)

        def note(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            ran.append(environ["PATH_INFO"])
            return answer()(environ, start_response)

        path = lab.app(note)
        clients = [lab.connect() for _ in range(10)]
        began = time.monotonic()
        for client in clients:
            client.get(path)
        for client in clients:
            response = client.response()
            assert (response.status, response.get("retry-after")) == (503, "1")
            assert 0.25 < time.monotonic() - began < LONG
        assert not ran and lab.server.stats().waiting == 0
        gate.open()
        finish(busy)
        with clients[0], lab.connect() as client:
            client.get(path)
            assert client.response().status == 200
        for client in clients:
            client.sock.close()
        assert len(ran) == 1
        check_idle(lab.server)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["end", "reset"])
@pytest.mark.parametrize("together", [False, True])
def test_a_client_that_leaves_while_it_waits_costs_no_thread(by: str, together: bool) -> None:
    """Also where its request and its leaving are one event."""
    with Lab(threads=1, queue_timeout=0) as lab:
        gate, ran = Gate(), []
        busy = hold_all(lab, gate, 1)

        def note(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            ran.append(environ["PATH_INFO"])
            return answer()(environ, start_response)

        path = lab.app(note)
        others = [lab.connect() for _ in range(5)]
        for client in others:
            client.get(path)
            if not together:
                until(lambda: lab.server.stats().waiting, LONG)
            if by == "end":
                client.sock.close()
            else:
                client.reset()
        with lab.connect():  # when this one is accepted, all before it are
            until(lambda: lab.connections == 2 + len(lab.server._waiting), LONG)
        # A reset before the request was read leaves no request.
        until(lambda: [each.gone_at > 0 for each in lab.server._waiting] == [True] * (lab.connections - 1), LONG)
        last = max([each.gone_at for each in lab.server._waiting], default=0.0)
        until(lambda: time.monotonic() - last > 0.6, LONG)
        gate.open()
        finish(busy)
        until(lambda: not lab.connections, LONG)
        assert not ran
        check_idle(lab.server)


@pytest.mark.slow
def test_it_says_where_the_handlers_are_when_requests_wait_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting_module, "BUSY_WARNING", 0.2)
    caplog.set_level(logging.WARNING)
    with Lab(threads=2, queue_timeout=0) as lab:
        gate = Gate()

        def stuck_in_here(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            return gate(environ, start_response)

        path = lab.app(stuck_in_here)
        lab.app(answer(), "/")
        clients = [lab.connect() for _ in range(2)]
        for client in clients:
            client.get(path)
        until(lambda: gate.entered == 2, LONG)
        until(lambda: lab.server.stats().busy == 2, LONG)
        assert "threads are busy" not in caplog.text  # nobody waits
        with lab.connect() as client:
            client.send(GET % b"/")
            until(lambda: re.search(r"all 2 threads are busy, 1 requests wait, one for \d+ s", caplog.text), LONG)
            until(lambda: lab.server.stats().oldest_wait_s > 0.8, LONG)
            gate.open()
            assert client.response().status == 200
        finish(clients)
        check_idle(lab.server)
    assert caplog.text.count("stuck_in_here") == 2
    assert caplog.text.count(f"GET {path}, for ") == 2
    assert caplog.text.count("threads are busy") == 1  # and not again for a while


@pytest.mark.slow
def test_31_clients_that_go_on_asking_are_served_in_turn() -> None:
    with Lab(threads=2) as lab:
        pause = threading.Event()

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            pause.wait(0.05)
            return answer()(environ, start_response)

        path = lab.app(app)
        counts = [0, 0, 0]
        over = threading.Event()

        def ask(number: int) -> None:
            with lab.connect() as client:
                while not over.is_set():
                    client.get(path)
                    assert client.response().status == 200
                    counts[number] += 1

        threads = [threading.Thread(target=ask, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: sum(counts) >= 60, LONG)
        over.set()
        for thread in threads:
            thread.join()
        assert max(counts) / min(counts) <= 1.5, counts
        check_idle(lab.server)


@pytest.mark.slow
def test_33_capacity_is_what_it_was_after_long_requests() -> None:
    with Lab(threads=4) as lab:
        check_idle(lab.server)
        for _ in range(5):
            gate = Gate()
            clients = hold_all(lab, gate, 4)
            assert lab.server.stats().busy == 4
            gate.open()
            finish(clients)
            check_idle(lab.server)
            stats = lab.server.stats()
            assert (stats.busy, stats.waiting, stats.peak, stats.limit) == (0, 0, 4, 4)


@pytest.mark.slow
def test_105_a_handler_that_blocks_fills_the_queue_and_nothing_else() -> None:
    """5000 requests: the queue is bounded, the others are shed, and memory does not grow with them."""
    with Lab(threads=2, queue=100, queue_timeout=0) as lab:
        gate = Gate()
        path = lab.app(gate)
        busy = hold_all(lab, gate, 2)
        waiting = [lab.connect() for _ in range(100)]
        for client in waiting:
            client.get(path)
        until(lambda: lab.server.stats().waiting == 100, LONG)
        statuses = []
        resident = 0
        for number in range(5000):
            with lab.connect() as client:
                client.get(path)
                statuses.append(client.response().status)
            if number == 1000:
                resident = rss_bytes()
        assert statuses == [503] * 5000
        assert lab.server.stats().waiting == 100
        assert rss_bytes() - resident < 16 * 1024 * 1024
        gate.open()
        finish([*busy, *waiting])
        check_idle(lab.server)


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
