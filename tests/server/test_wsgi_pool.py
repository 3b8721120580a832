"""The thread pool of the WSGI engine, with a crew of its own: no thread is lost and no event lies around."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jumpstart_server.wsgi import pool as pool_module
from jumpstart_server.wsgi.pool import PoolThread, ThreadPool
from tests.server.raw_http import until
from tests.server.wsgi_counts import LONG, check_idle_pool, check_pool, names_of

GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"


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

    def broken(self) -> None:
        pass

    def saturated(self, now: float) -> None:
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
    until(lambda: not names_of(crew.pool), LONG)  # its books are closed just before its last thread is gone
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
    """It goes on with those that it has, reads on, and asks again later: the want may be over."""
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
        assert crew.pool.stats().threads == 1
        again = threading.Event()
        for _ in range(3):
            ring(crew.on(lambda thread: crew.run(thread, lambda: again.wait(LONG))))
        until(lambda: crew.pool.stats().busy == 3, LONG)
        again.set()
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
