"""The threads of the WSGI engine: none is lost, no event lies around, and the counts are right."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jumpstart_server.wsgi import pool as pool_module
from jumpstart_server.wsgi import waiting as waiting_module
from jumpstart_server.wsgi.pool import PoolThread, ThreadPool
from tests.server.raw_http import Client, until
from tests.server.wsgi_counts import LONG, check_idle, check_idle_pool, check_pool, names_of, switch_often
from tests.server.wsgi_lab import Environ, Gate, Lab, StartResponse, answer

GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"

# ------------------------------------------------------------------------------------------ with a crew of its own


class Crew:
    """
    Does what it is told at an event: a function for each descriptor, given the thread.

    Attributes:
        jobs: what waits for a thread.
        after_no_job: called once when a thread has found no job, before it goes on to look for events.
        at_tick: called once by the keeper, when it is about to sleep.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.actions: dict[int, Callable[[PoolThread], None]] = {}
        self.jobs: deque[Callable[[PoolThread], None]] = deque()
        self.after_no_job: Callable[[], None] | None = None
        self.at_tick: Callable[[], None] | None = None
        self.next_tick = 0.02
        self.read_by_keeper = threading.Event()
        self.before_stop_ends: Callable[[], object] = lambda: None
        self.ticks = 0
        self.pool: ThreadPool

    def handle(self, thread: PoolThread, fd: int, events: int) -> None:
        action = self.actions.get(fd)
        if action is not None:
            os.eventfd_read(fd)
            if thread.runs_handlers:
                action(thread)
            else:
                self.jobs.append(action)
                self.read_by_keeper.set()
                self.pool.job_waits()

    def next_job(self, thread: PoolThread) -> bool:
        if self.jobs:
            self.jobs.popleft()(thread)
            return True
        act, self.after_no_job = self.after_no_job, None
        if act is not None:
            act()
        return False

    def has_job(self) -> bool:
        return bool(self.jobs)

    def overdue(self, job: Any) -> None:
        pass

    def note_lag(self, now: float, lag_s: float) -> None:
        pass

    def tick(self, now: float, restless: bool) -> float:
        self.ticks += 1
        if not restless:
            act, self.at_tick = self.at_tick, None
            if act is not None:
                act()
        return now + self.next_tick

    # for tests

    def on(self, action: Callable[[PoolThread], None]) -> int:
        """A descriptor at whose event a thread calls *action*."""
        fd = os.eventfd(0)
        self.actions[fd] = action
        self.epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        return fd

    def run(self, thread: PoolThread, work: Callable[[], object], *, quick: bool = False) -> None:
        """As the server runs a handler."""
        thread.began = time.monotonic()
        thread.job = "work"
        if quick:
            thread.quick = True
        else:
            self.pool.turn_busy(thread)
        work()
        thread.quick = False
        thread.job = None
        if thread.busy:
            self.pool.turn_seeking(thread)


@contextmanager
def crew_of(size: int) -> Iterator[Crew]:
    crew = Crew()
    crew.pool = ThreadPool(size, crew.epoll, crew)
    crew.pool.start()
    began = time.monotonic()
    try:
        yield crew
    finally:
        began = time.monotonic()
        stopped = crew.pool.stop(LONG)
        crew.before_stop_ends()
        assert stopped and time.monotonic() - began < LONG / 2
        crew.epoll.close()
        for fd in crew.actions:
            os.close(fd)
    assert not names_of(crew.pool)
    with crew.pool._lock:
        assert (crew.pool._seeking, crew.pool._polling, crew.pool._busy, crew.pool._parked) == (0, 0, 0, [])


def ring(fd: int) -> None:
    os.eventfd_write(fd, 1)


def elsewhere(work: Callable[[], object]) -> None:
    """Call *work* on another thread, and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def block(began: threading.Event, free: threading.Event) -> None:
    began.set()
    assert free.wait(LONG)


def start_all(crew: Crew, count: int) -> None:
    """Bring it about that there are *count* threads, and all are idle."""
    meet = threading.Barrier(count)
    fds = [crew.on(lambda thread: crew.run(thread, lambda: meet.wait(LONG))) for _ in range(count)]
    for fd in fds:
        ring(fd)
    until(lambda: crew.pool.stats().threads == count, LONG)
    check_idle_pool(crew.pool)


def test_a_job_that_comes_as_the_only_thread_goes_to_poll_is_run() -> None:
    """Its bringer saw that a thread seeks, and woke nobody; the thread had looked for jobs already."""
    done = threading.Event()
    with crew_of(1) as crew:

        def bring() -> None:
            crew.jobs.append(lambda thread: done.set())
            elsewhere(crew.pool.job_waits)

        crew.after_no_job = bring
        ring(crew.on(lambda thread: None))
        assert done.wait(LONG)
        check_idle_pool(crew.pool)


def test_a_job_wakes_a_thread_that_polls() -> None:
    done = threading.Event()
    with crew_of(1) as crew:
        check_idle_pool(crew.pool)
        crew.jobs.append(lambda thread: done.set())
        crew.pool.job_waits()
        assert done.wait(LONG)


def test_a_posted_event_wakes_a_thread_that_polls() -> None:
    done = threading.Event()
    with crew_of(1) as crew:
        check_idle_pool(crew.pool)
        fd = os.eventfd(1)  # which the epoll does not know
        crew.actions[fd] = lambda thread: done.set()
        crew.pool.post(fd, select.EPOLLIN)
        assert done.wait(LONG)


@pytest.mark.parametrize("as_job", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_what_was_taken_with_a_slow_event_does_not_wait_for_it(as_job: bool, quick: bool) -> None:
    """All threads have been started, and one polls or is parked; nothing more comes, which would wake it."""
    free, done = threading.Event(), threading.Event()
    with crew_of(2) as crew:
        start_all(crew, 2)
        late = os.eventfd(1)
        crew.actions[late] = lambda thread: done.set()

        def slow(thread: PoolThread) -> None:
            if as_job:
                crew.jobs.append(lambda thread: done.set())
            else:
                crew.pool._events.append((late, select.EPOLLIN))  # as if both had come together
            crew.run(thread, lambda: free.wait(LONG) and None, quick=quick)

        ring(crew.on(slow))
        assert done.wait(LONG)
        free.set()
        check_idle_pool(crew.pool)


def test_a_quick_handler_that_blocks_after_a_long_rest_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins at the very moment when the keeper decides to sleep, for an hour."""
    monkeypatch.setattr(pool_module, "RESTLESS", 0.05)
    began, free, done = threading.Event(), threading.Event(), threading.Event()
    with crew_of(2) as crew:
        check_idle_pool(crew.pool)
        blocking = crew.on(lambda thread: crew.run(thread, lambda: block(began, free), quick=True))
        other = crew.on(lambda thread: done.set())

        def as_it_decides() -> None:
            crew.next_tick = 3600.0
            ring(blocking)
            assert began.wait(LONG)

        crew.at_tick = as_it_decides
        assert began.wait(LONG)
        ring(other)
        assert done.wait(LONG)
        free.set()
        check_idle_pool(crew.pool)


def test_a_quick_handler_that_blocks_after_a_slow_one_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keeper sleeps while the slow one runs; its thread goes on to other work without having polled."""
    monkeypatch.setattr(pool_module, "RESTLESS", 0.05)
    slow, began, free, done = threading.Event(), threading.Event(), threading.Event(), threading.Event()
    with crew_of(2) as crew:
        crew.next_tick = 3600.0

        def first(thread: PoolThread) -> None:
            crew.run(thread, lambda: slow.wait(LONG))
            crew.run(thread, lambda: block(began, free), quick=True)

        ring(crew.on(first))
        until(lambda: crew.pool._busy and crew.pool._keeper_sleeps, LONG)
        poll_here = threading.Event()
        hold = crew.on(lambda thread: crew.run(thread, lambda: poll_here.wait(LONG)))
        ring(hold)
        until(lambda: crew.pool._busy == 2, LONG)
        until(lambda: crew.pool._saturated, LONG)
        poll_here.set()
        until(lambda: crew.pool._busy == 1 and crew.pool._keeper_sleeps, LONG)
        slow.set()
        assert began.wait(LONG)
        ring(crew.on(lambda thread: done.set()))
        assert done.wait(LONG)
        until(lambda: crew.pool._busy == 1, LONG)  # the keeper has seen it
        free.set()
        check_idle_pool(crew.pool)


def test_when_all_threads_are_busy_the_keeper_reads() -> None:
    free, done = threading.Event(), threading.Event()
    with crew_of(2) as crew:
        for _ in range(2):
            ring(crew.on(lambda thread: crew.run(thread, lambda: free.wait(LONG))))
        until(lambda: crew.pool.is_saturated, LONG)
        ring(crew.on(lambda thread: done.set()))
        assert crew.read_by_keeper.wait(LONG)
        check_pool(crew.pool)
        assert not done.is_set()
        free.set()
        assert done.wait(LONG)
        check_idle_pool(crew.pool)


def test_idle_threads_retire_down_to_one_that_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "IDLE_TIME", 0.05)
    with crew_of(30) as crew:
        meet = threading.Barrier(30)
        for _ in range(30):
            ring(crew.on(lambda thread: crew.run(thread, lambda: meet.wait(LONG))))
        until(lambda: crew.pool.stats().peak == 30, LONG)
        until(lambda: crew.pool.stats().threads == 1, LONG)
        check_idle_pool(crew.pool)
        done = threading.Event()
        ring(crew.on(lambda thread: done.set()))
        assert done.wait(LONG)


def test_a_thread_is_replaced_when_the_server_itself_fails(caplog: pytest.LogCaptureFixture) -> None:
    with crew_of(2) as crew:
        for error in (ZeroDivisionError, SystemExit, IndexError, MemoryError):
            done = threading.Event()

            def fail(thread: PoolThread, error: type[BaseException] = error) -> None:
                raise error

            def fail_busy(thread: PoolThread, error: type[BaseException] = error) -> None:
                crew.pool.turn_busy(thread)
                raise error

            for action in (fail, fail_busy):
                ring(crew.on(action))
                check_idle_pool(crew.pool)
            crew.jobs.append(fail)
            crew.pool.job_waits()
            check_idle_pool(crew.pool)
            ring(crew.on(lambda thread, done=done: done.set()))  # type: ignore[misc]
            assert done.wait(LONG)
        until(lambda: sum("is replaced" in record.message for record in caplog.records) == 12, LONG)


def test_the_system_has_no_thread_to_give(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on with those that it has, and reads on."""
    free, done = threading.Event(), threading.Event()
    with crew_of(8) as crew:
        check_idle_pool(crew.pool)
        with monkeypatch.context() as patch:
            patch.setattr(PoolThread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start")))
            ring(crew.on(lambda thread: crew.run(thread, lambda: free.wait(LONG))))
            until(lambda: crew.pool.is_saturated, LONG)
            check_pool(crew.pool)
            ring(crew.on(lambda thread: done.set()))
            assert crew.read_by_keeper.wait(LONG)
        free.set()
        assert done.wait(LONG)
        check_idle_pool(crew.pool)
        assert crew.pool.stats().threads == crew.pool.size == 1
    assert "no thread to give" in caplog.text


@pytest.mark.slow
def test_the_keeper_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with crew_of(1) as crew:
        crew.at_tick = lambda: [][0]
        until(lambda: "in the keeper" in caplog.text, LONG)
        ticks = crew.ticks
        until(lambda: crew.ticks > ticks, LONG)


@pytest.mark.slow
def test_stop_ends_threads_in_whatever_they_do() -> None:
    """Polling, parked, seeking, starting, with events and jobs coming all the time."""

    def disturb(crew: Crew, fds: list[int], over: threading.Event) -> None:
        while not over.is_set():
            for fd in fds:
                ring(fd)
            crew.jobs.append(lambda thread: None)
            crew.pool.job_waits()

    def stop(number: int) -> None:
        with crew_of(8) as crew:
            start_all(crew, 8)
            fds = [crew.on(lambda thread: crew.run(thread, lambda: None)) for _ in range(8)]
            over = threading.Event()
            disturber = threading.Thread(target=disturb, args=[crew, fds, over])
            disturber.start()
            ticks = crew.ticks
            until(lambda: crew.ticks > ticks + number % 3, LONG)

            def end() -> None:
                over.set()
                disturber.join()

            crew.before_stop_ends = end

    for number in range(40):
        stop(number)


@pytest.mark.slow
def test_counts_never_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked under the lock while jobs, events, quick, slow and blocking work, parking and retiring go on."""
    monkeypatch.setattr(pool_module, "IDLE_TIME", 0.002)
    interval = threading.Event()
    with crew_of(12) as crew:
        done = [0]
        lock = threading.Lock()

        def work(thread: PoolThread, number: int) -> None:
            pause = (0.0, 0.0, 0.0005, 0.008)[number % 4]
            crew.run(thread, lambda: interval.wait(pause) and None, quick=bool(number % 3))
            with lock:
                done[0] += 1

        fds = [crew.on(lambda thread, number=number: work(thread, number)) for number in range(24)]  # type: ignore[misc]
        over = time.monotonic() + 2.0
        jobs = 0
        while time.monotonic() < over:
            for fd in fds:
                ring(fd)
            for number in range(6):
                crew.jobs.append(lambda thread, number=number: work(thread, number))  # type: ignore[misc]
                crew.pool.job_waits()
                jobs += 1
            check_pool(crew.pool)
            until(lambda: len(crew.jobs) < 30, LONG)
        until(lambda: not crew.jobs, LONG)
        check_idle_pool(crew.pool)
        assert done[0] > jobs


# ------------------------------------------------------------------------------------------ with the real server


def hold_all(lab: Lab, gate: Gate, count: int) -> list[Client]:
    """Have *count* handlers wait at *gate*."""
    path = lab.app(gate)
    before = gate.entered
    clients = [lab.connect() for _ in range(count)]
    for client in clients:
        client.get(path)
    until(lambda: gate.entered == before + count, LONG)
    return clients


def wait_for_waiting(lab: Lab, count: int) -> None:
    until(lambda: lab.server.stats().waiting == count, LONG)


def finish(clients: Iterable[Client]) -> None:
    for client in clients:
        with client:
            client.sock.settimeout(LONG)
            assert client.response().status == 200


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


# ---------------------------------------------------------------------------------------------------- the queue


def test_requests_wait_in_order() -> None:
    with Lab(threads=2) as lab:
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
            assert 0.25 < time.monotonic() - began < 0.3 + 3.0
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
    with Lab(threads=1) as lab:
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
    with Lab(threads=2) as lab:
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
            until(lambda: "all 2 threads are busy, 1 requests wait, one for 0 s" in caplog.text, LONG)
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


# ------------------------------------------------------------------------------------------- quick, and then not


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
