"""The thread pool: grows on demand, never past its size, and loses neither work nor threads."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart_server.pool import ThreadPool

PATIENCE = 20.0  # seconds; a busy machine may be slow, a broken pool never gets there


def eventually(condition: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture
def make() -> Iterator[Callable[[int], ThreadPool]]:
    pools: list[ThreadPool] = []

    def build(size: int) -> ThreadPool:
        pools.append(ThreadPool(size, f"test-{size}"))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close(PATIENCE)
        assert pool.threads == 0


class Gate:
    """Work that holds its thread until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self) -> None:
        self.entered.release()
        assert self._open.wait(PATIENCE)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._open.set()


def run_one(pool: ThreadPool) -> None:
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(PATIENCE)
    assert eventually(lambda: pool.busy == 0)


def test_a_pool_without_work_has_no_threads(make: Callable[[int], ThreadPool]) -> None:
    pool = make(8)
    assert (pool.threads, pool.busy) == (0, 0)


def test_work_one_after_the_other_needs_one_thread(make: Callable[[int], ThreadPool]) -> None:
    pool = make(8)
    for _ in range(50):
        run_one(pool)
    assert pool.threads == 1


def test_threads_come_as_work_does_and_stop_at_the_size(make: Callable[[int], ThreadPool]) -> None:
    pool, gate = make(3), Gate()
    for count in (1, 2, 3):
        pool.submit(gate)
        gate.wait_for(1)
        assert (pool.threads, pool.busy) == (count, count)
    late = threading.Event()
    pool.submit(late.set)
    assert (pool.threads, pool.busy) == (3, 3)
    assert not late.is_set()
    gate.open()
    assert late.wait(PATIENCE)
    assert eventually(lambda: pool.busy == 0)
    assert pool.threads == 3


def test_work_starts_in_the_order_in_which_it_came(make: Callable[[int], ThreadPool]) -> None:
    pool, order, done = make(1), list[int](), threading.Event()
    for number in range(100):
        pool.submit(lambda number=number: order.append(number))  # type: ignore[misc]  # mypy on lambda defaults
    pool.submit(done.set)
    assert done.wait(PATIENCE)
    assert order == list(range(100))


class Odd(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Odd()])
def test_an_error_that_escapes_is_logged_and_costs_no_thread(
    make: Callable[[int], ThreadPool], caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    pool, ran_on = make(1), list[int]()

    def fail() -> None:
        ran_on.append(threading.get_ident())
        raise error

    for _ in range(3):
        pool.submit(fail)
    run_one(pool)
    assert len(ran_on) == 3 and len(set(ran_on)) == 1
    assert (pool.threads, pool.busy) == (1, 0)
    records = [record for record in caplog.records if record.name == "jumpstart_server.pool"]
    assert [record.levelno for record in records] == [logging.ERROR] * 3
    assert records[0].exc_info is not None and records[0].exc_info[1] is error


def test_threads_bear_the_pools_name_and_end_with_the_process(make: Callable[[int], ThreadPool]) -> None:
    pool, seen = make(1), list[threading.Thread]()
    pool.submit(lambda: seen.append(threading.current_thread()))
    run_one(pool)
    assert seen[0].name.startswith("test-1-")
    assert seen[0].daemon


def test_deep_recursion_is_an_error_and_no_crash(make: Callable[[int], ThreadPool]) -> None:
    pool, caught = make(1), list[BaseException]()

    def recurse() -> None:
        recurse()

    def work() -> None:
        try:
            recurse()
        except RecursionError as error:
            caught.append(error)

    pool.submit(work)
    run_one(pool)
    assert len(caught) == 1


def test_nothing_of_a_request_outlives_it(make: Callable[[int], ThreadPool]) -> None:
    class Request:
        def __call__(self) -> None:
            pass

    pool, request = make(1), Request()
    seen = weakref.ref(request)
    pool.submit(request)
    del request
    assert eventually(lambda: pool.busy == 0 and gc.collect() >= 0 and seen() is None)


def test_a_race_of_thousands_of_jobs_loses_none_and_the_books_return_to_zero(
    make: Callable[[int], ThreadPool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "jumpstart_server.pool")
    pool, lock, count = make(8), threading.Lock(), [0]
    most = [0]

    def work() -> None:
        with lock:
            count[0] += 1
            most[0] = max(most[0], pool.busy)
            number = count[0]
        if number % 10 == 0:
            raise ValueError

    def submit() -> None:
        for _ in range(1000):
            pool.submit(work)

    submitters = [threading.Thread(target=submit) for _ in range(4)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    assert eventually(lambda: count[0] == 4000 and pool.busy == 0)
    assert 1 <= pool.threads <= 8
    assert most[0] <= 8
    run_one(pool)
    before = pool.threads
    run_one(pool)
    assert pool.threads == before, "an idle thread is used before a new one is started"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 12))
def test_there_are_never_more_threads_than_jobs_or_the_size(size: int, jobs: int) -> None:
    pool, gate = ThreadPool(size), Gate()
    for _ in range(jobs):
        pool.submit(gate)
    gate.wait_for(min(size, jobs))
    assert (pool.threads, pool.busy) == (min(size, jobs),) * 2
    gate.open()
    pool.close(PATIENCE)
    assert (pool.threads, pool.busy) == (0, 0)


# -- the end --


def test_closing_runs_what_is_queued_and_takes_no_more(make: Callable[[int], ThreadPool]) -> None:
    pool, gate, ran = make(1), Gate(), list[int]()
    pool.submit(gate)
    for number in range(5):
        pool.submit(lambda number=number: ran.append(number))  # type: ignore[misc]  # mypy on lambda defaults
    gate.wait_for(1)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(gate)
    gate.open()
    assert eventually(lambda: pool.threads == 0)
    assert ran == list(range(5))
    pool.close(PATIENCE)  # again: nothing


def test_closing_waits_no_longer_than_it_was_told(make: Callable[[int], ThreadPool]) -> None:
    pool, gate = make(1), Gate()
    pool.submit(gate)
    gate.wait_for(1)
    begin = time.monotonic()
    pool.close(0.02)
    assert time.monotonic() - begin < PATIENCE / 2
    assert pool.threads == 1
    gate.open()
    assert eventually(lambda: pool.threads == 0)


def test_closing_a_pool_that_never_worked(make: Callable[[int], ThreadPool]) -> None:
    pool = make(2)
    pool.close(PATIENCE)
    assert pool.threads == 0


@pytest.mark.parametrize("round_", range(20))
def test_work_that_was_taken_is_run_however_close_the_end_is(round_: int) -> None:
    pool, taken, ran = ThreadPool(2), list[int](), list[int]()
    start = threading.Barrier(2)

    def submit() -> None:
        start.wait(PATIENCE)
        for number in range(200):
            try:
                pool.submit(lambda number=number: ran.append(number))  # type: ignore[misc]  # mypy on lambda defaults
            except RuntimeError:
                return
            taken.append(number)

    submitter = threading.Thread(target=submit)
    submitter.start()
    start.wait(PATIENCE)
    pool.close(PATIENCE)
    submitter.join()
    assert eventually(lambda: pool.threads == 0)
    assert sorted(ran) == taken


# -- a system that has no more threads to give --


def no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_first_thread_work_is_refused_and_not_kept(
    make: Callable[[int], ThreadPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, ran = make(2), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                pool.submit(lambda: ran.append("refused"))
        assert (pool.threads, pool.busy) == (0, 0)
    run_one(pool)
    assert ran == []
    run_one(pool)
    assert pool.threads == 1


def test_without_further_threads_those_that_live_go_on(
    make: Callable[[int], ThreadPool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, gate, late = make(2), Gate(), threading.Event()
    pool.submit(gate)
    gate.wait_for(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        pool.submit(late.set)
    assert pool.threads == 1
    assert "cannot start thread 2 of 2" in caplog.text
    gate.open()
    assert late.wait(PATIENCE)
