"""Who gets a thread of the WSGI engine, who waits, who is sent away, and which worker takes a connection."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from jumpstart_server.admin import is_saturated
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.engine import PoolStats
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.wsgi.server import WSGIServer
from jumpstart_warmup.observe import Observer
from tests.server.raw_http import until
from tests.server.wsgi_counts import LONG, check_idle
from tests.server.wsgi_lab import Environ, Gate, Lab, StartResponse, answer

pytestmark = pytest.mark.slow

GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"


def sleeper(seconds: float) -> object:
    pause = threading.Event()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        pause.wait(seconds)
        return answer()(environ, start_response)

    return app


def ask_all(clients: list[socket.socket], data: bytes, within: float = LONG) -> tuple[list[bytes], list[float]]:
    """Send *data* on each at once. Returns the first line of each answer, and after how many seconds it came."""
    lines = [b""] * len(clients)
    took = [0.0] * len(clients)
    with selectors.DefaultSelector() as selector:
        for number, client in enumerate(clients):
            selector.register(client, selectors.EVENT_READ, number)
        began = time.monotonic()
        for client in clients:
            client.sendall(data)
        while selector.get_map():
            assert time.monotonic() < began + within
            for key, _ in selector.select(1.0):
                lines[key.data] = clients[key.data].recv(65536).partition(b"\r\n")[0]
                took[key.data] = time.monotonic() - began
                selector.unregister(key.fileobj)
    return lines, took


def test_31_105_a_burst_of_ten_times_the_threads_is_served_and_its_waits_are_told() -> None:
    """1000 requests at once for 100 threads of 100 ms. The queue is never empty for a second, and nobody is shed."""
    with Lab(threads=100, queue=1000) as lab, ExitStack() as stack:
        path = lab.app(sleeper(0.1)).encode()  # type: ignore[arg-type]
        clients = [stack.enter_context(lab.connect()).sock for _ in range(1000)]
        for _ in range(2):  # the second time on kept connections
            lines, took = ask_all(clients, GET % path)
            assert set(lines) == {b"HTTP/1.1 200 OK"}
            assert max(took) < 8
        stats = lab.server.stats()
        assert (stats.waiting, stats.overloaded, stats.refused, stats.peak) == (0, False, {}, 100)
        assert 1000 < sum(stats.waits) <= 2000
        mean_s = stats.waits_sum_s / sum(stats.waits)
        assert 0.1 < mean_s < max(took)
        check_idle(lab.server)


def test_108_what_is_shed_is_told_when_to_come_again_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Lab(threads=1, queue=3, queue_timeout=2.0) as lab, ExitStack() as stack:
        ran: list[str] = []
        gate = Gate()

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            ran.append(environ["QUERY_STRING"])
            return gate(environ, start_response)

        path = lab.app(app)
        clients = {
            name: stack.enter_context(lab.connect()) for name in ["running", "first", "second", "third", "fourth"]
        }
        began = time.monotonic()
        for name, client in clients.items():
            client.get(f"{path}?{name}")
            if name == "running":
                until(lambda: ran == ["running"], LONG)
            elif name != "fourth":
                until(lambda name=name: lab.server.stats().waiting == ["first", "second", "third"].index(name) + 1)  # type: ignore[misc]
        response = clients["fourth"].response()
        assert (response.status, response.get("retry-after")) == (503, "1")
        assert b"too many requests wait" in response.body
        for name in ("first", "second", "third"):
            response = clients[name].response()
            assert (response.status, response.get("retry-after")) == (503, "2")  # nobody was served for so long
            assert b"no thread became free in time" in response.body
        assert 1.9 < time.monotonic() - began < 4
        gate.open()
        assert clients["running"].response().status == 200
        until(lambda: not lab.busy)
        assert ran == ["running"]
        stats = lab.server.stats()
        assert stats.refused == {"queue_full": 1, "queue_timeout": 3}
        assert (stats.waiting, sum(stats.waits)) == (0, 0)
        with lab.connect() as client:
            client.get(path)
            assert client.response().status == 200
        check_idle(lab.server)
    refused = [record.message for record in caplog.records if "503 " in record.message]
    assert len(refused) == 4 and all(f"GET {path}" in line for line in refused)


def test_108_under_overload_the_newest_is_next_and_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """The handler hangs; when it comes back, the newest is served, and the oldest is shed at its own time."""
    with Lab(threads=1, queue_timeout=3.0) as lab, ExitStack() as stack:
        gate = Gate()
        order: list[str] = []

        def note(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            order.append(environ["QUERY_STRING"])
            return answer()(environ, start_response)

        held, path = lab.app(gate), lab.app(note)
        busy = stack.enter_context(lab.connect())
        busy.get(held)
        until(lambda: gate.entered)
        clients = [stack.enter_context(lab.connect()) for _ in range(5)]
        for number, client in enumerate(clients):
            if number == 3:
                until(lambda: lab.server.stats().overloaded, LONG)
            client.get(f"{path}?{number}")
            until(lambda number=number: lab.server.stats().waiting == number + 1)  # type: ignore[misc]
        gate.open()
        assert [client.response().status for client in (busy, *clients)] == [200] * 6
        assert order == ["4", "3", "2", "1", "0"]
        until(lambda: "overload is over" in caplog.text)
        assert not lab.server.stats().overloaded
        with lab.connect() as client:
            client.get(path)
            assert client.response().status == 200
        check_idle(lab.server)
    assert "overloaded: the newest are served first" in caplog.text


@pytest.mark.parametrize(("pool", "saturated"), [(PoolStats(), False), (PoolStats(overloaded=True), True)])
def test_18_a_worker_that_is_overloaded_is_not_ready(pool: PoolStats, saturated: bool) -> None:
    """Its oldest requests are shed before they have waited for as long as makes it so otherwise."""
    member: Any = SimpleNamespace(stats=SimpleNamespace(pool=pool))
    assert is_saturated(member) == saturated


# ------------------------------------------------------------------------------------------------ several workers


@contextmanager
def two_workers(threads: int, queue: int) -> Iterator[tuple[Lab, Lab]]:
    """Two servers with one listening socket between them, each with an app of its own. The second is not started."""
    with Lab(threads=threads, queue=queue, multiprocess=True) as one:
        other = Lab(threads=threads, queue=queue, multiprocess=True)
        other.listener.close()
        other.listener = one.listener.dup()
        other.address = one.address
        other.server.close(0)
        other.server = WSGIServer(
            other._dispatch,
            [other.listener],
            ConnectionSettings(),
            threads=threads,
            observer=Observer(),
            limits=RequestLimits(queue=queue),
            multiprocess=True,
        )
        try:
            yield one, other
        finally:
            other.stop()
            other.close()


def test_connections_go_to_the_worker_that_has_free_threads() -> None:
    """
    One is full of handlers that wait: all that come are answered by the other, and none waits in a queue.

    When both are full they are taken all the same, wait, and are shed.
    """
    with two_workers(threads=4, queue=5) as (one, other), ExitStack() as stack:
        gates = {one: Gate(), other: Gate()}
        for worker, name in ((one, b"one"), (other, b"other")):
            worker.app(gates[worker], "/held")
            worker.app(answer(name), "/")
        busy = [stack.enter_context(one.connect()) for _ in range(4)]
        for client in busy:
            client.get("/held")
        until(lambda: gates[one].entered == 4 and one.server.pool.is_saturated, LONG)
        until(lambda: one.server._listeners.is_resting, LONG)
        other.start()
        for _ in range(50):
            response = one.ask(GET % b"/")
            assert response.body == b"other"
        assert one.server.stats().waiting == 0
        assert (sum(one.server.stats().waits), sum(other.server.stats().waits)) == (0, 0)

        more = [stack.enter_context(one.connect()) for _ in range(4)]
        for client in more:
            client.get("/held")
        until(lambda: gates[other].entered == 4 and other.server.pool.is_saturated, LONG)
        statuses = []
        waiting = [stack.enter_context(one.connect()).sock for _ in range(40)]
        lines: list[bytes] = []
        asker = threading.Thread(target=lambda: lines.extend(ask_all(waiting, GET % b"/")[0]))
        asker.start()

        def refused() -> int:
            return sum(each.server.refusals.counts.get("queue_full", 0) for each in (one, other))

        until(lambda: refused() + one.server.stats().waiting + other.server.stats().waiting == 40, LONG)
        waits = 40 - refused()
        assert 5 <= waits <= 10  # all of both queues, unless the machine is so busy that one worker comes too late

        for gate in gates.values():
            gate.open()
        asker.join()
        statuses = sorted(line.split()[1] for line in lines)
        assert statuses == [b"200"] * waits + [b"503"] * (40 - waits)
        for client in [*busy, *more]:
            assert client.response().status == 200
        until(lambda: not one.server._listeners.is_resting and not other.server._listeners.is_resting, LONG)
        answered = {one.ask(GET % b"/").body for _ in range(50)}
        assert answered <= {b"one", b"other"}
        check_idle(one.server)
        check_idle(other.server)


def test_a_worker_with_few_free_threads_takes_as_many_connections() -> None:
    """Of 20 at once for a worker with one thread that is free and one with 20, nearly none waits."""
    with two_workers(threads=20, queue=100) as (one, other), ExitStack() as stack:
        gates = {one: Gate(), other: Gate()}
        for worker in (one, other):
            worker.app(gates[worker], "/held")
        for _ in range(19):
            stack.enter_context(one.connect()).get("/held")
        until(lambda: gates[one].entered == 19, LONG)
        other.start()
        clients = []
        for _ in range(20):
            clients.append(stack.enter_context(one.connect()))
            clients[-1].get("/held")
        until(lambda: gates[one].entered + gates[other].entered + one.server.stats().waiting == 39, LONG)
        assert one.server.stats().waiting <= 5
        for gate in gates.values():
            gate.open()
        for client in clients:
            assert client.response().status == 200
