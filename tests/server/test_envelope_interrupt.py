"""Interrupting handlers: what may be hit, and that nothing else ever is."""

from __future__ import annotations

import functools
import gc
import logging
import queue
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest

from jumpstart.deadlines import RequestTimeout
from jumpstart_server.envelope.interrupt import PAUSES, Interrupts, Stopping
from tests.server.raw_http import PATIENCE, until

pytestmark = pytest.mark.skipif(sys.implementation.name != "cpython", reason="of CPython")


class Runner(threading.Thread):
    """A thread that runs one function after the other through `Interrupts.call`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.SimpleQueue[tuple[object, Callable[[], object]] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.interrupts: Interrupts
        self.start()
        until(lambda: hasattr(self, "interrupts"))

    def run(self) -> None:
        self.interrupts = Interrupts()
        while (entry := self.jobs.get()) is not None:
            job, function = entry
            try:
                result: object = self.interrupts.call(job, function)
            except BaseException as error:
                result = error
            self.results.put(result)

    def begin(self, function: Callable[[], object], job: object = "job") -> None:
        self.jobs.put((job, function))

    def end(self) -> None:
        self.jobs.put(None)
        self.join(PATIENCE)
        assert not self.is_alive()


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.end()


def our_module(source: str) -> dict[str, Callable[..., object]]:
    """Functions that look like code of this package."""
    module = types.ModuleType("jumpstart_server.lab")
    exec(source, module.__dict__)
    return module.__dict__


def spin(entered: threading.Event) -> None:
    entered.set()
    while True:
        sum(range(10))


def test_a_handler_that_computes_is_interrupted(runner: Runner) -> None:
    entered = threading.Event()
    runner.begin(functools.partial(spin, entered))
    assert entered.wait(PATIENCE)
    until(lambda: runner.interrupts.fire("job"))
    error = runner.results.get(timeout=PATIENCE)
    assert isinstance(error, RequestTimeout)
    runner.begin(lambda: "next")
    assert runner.results.get(timeout=PATIENCE) == "next"


def test_nothing_is_raised_for_another_job(runner: Runner) -> None:
    entered, over = threading.Event(), threading.Event()

    def wait() -> str:
        entered.set()
        while not over.is_set():
            time.sleep(0.001)
        return "whole"

    runner.begin(wait, "second")
    assert entered.wait(PATIENCE)
    assert not any(runner.interrupts.fire("first") for _ in range(100))
    over.set()
    assert runner.results.get(timeout=PATIENCE) == "whole"
    assert not runner.interrupts.fire("second")


def test_nor_in_our_own_code_or_in_that_of_logging(runner: Runner) -> None:
    entered, over = threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def createLock(self) -> None:
            super().createLock()
            self.waits = True

    ours = our_module(
        "def wait(entered, over):\n    entered.set()\n    while not over.is_set(): pass\n    return 'whole'"
    )
    runner.begin(functools.partial(ours["wait"], entered, over))
    assert entered.wait(PATIENCE)
    assert not any(runner.interrupts.fire("job") for _ in range(100))
    over.set()
    assert runner.results.get(timeout=PATIENCE) == "whole"

    # A thread that waits for the lock of a handler stands in logging's code.
    handler = Slow()
    assert handler.lock is not None
    with handler.lock:
        runner.begin(functools.partial(handler.handle, logging.makeLogRecord({})))
        until(lambda: in_module(runner, "logging"))
        assert not runner.interrupts.fire("job")
    handler.close()
    assert isinstance(runner.results.get(timeout=PATIENCE), NotImplementedError)


def in_module(runner: Runner, name: str) -> bool:
    frame = sys._current_frames().get(runner.ident or 0)
    return frame is not None and frame.f_globals.get("__name__") == name


def test_a_handler_that_waits_for_an_event_gets_it_when_the_wait_ends(runner: Runner) -> None:
    event = threading.Event()
    runner.begin(event.wait)
    until(lambda: in_module(runner, "threading"))
    until(lambda: runner.interrupts.fire("job"))
    event.set()
    assert isinstance(runner.results.get(timeout=PATIENCE), RequestTimeout)
    assert event.is_set()  # and its lock is not left locked
    event.clear()


def test_what_was_not_raised_is_taken_back(runner: Runner) -> None:
    """The call that it waited in raises, so that it would come out in the code that has called the handler."""
    entered = threading.Event()
    lock = threading.Lock()
    lock.acquire()

    empty: list[int] = []

    def handler() -> object:
        entered.set()
        try:
            lock.acquire(True, 0.3)
            empty[0]  # leaves without a look at what is on its way
        except IndexError:
            pass
        return "whole"

    for _ in range(3):
        entered.clear()
        runner.begin(handler)
        assert entered.wait(PATIENCE)
        until(lambda: runner.interrupts.fire("job"))
        result = runner.results.get(timeout=PATIENCE)
        assert result == "whole" or isinstance(result, RequestTimeout)
        runner.begin(lambda: [str(number) for number in range(100)][-1])
        assert runner.results.get(timeout=PATIENCE) == "99"


def test_a_job_that_is_held_does_not_end(runner: Runner) -> None:
    """So that what is done to it cannot hit the next one."""
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        over.wait(PATIENCE)
        ended.set()
        return "whole"

    runner.begin(wait)
    assert begun.wait(PATIENCE)
    with runner.interrupts.hold("another") as runs:
        assert not runs
    with runner.interrupts.hold("job") as runs:
        assert runs
        over.set()
        assert ended.wait(PATIENCE)
        with pytest.raises(queue.Empty):
            runner.results.get(timeout=0.1)
    assert runner.results.get(timeout=PATIENCE) == "whole"
    with runner.interrupts.hold("job") as runs:
        assert not runs


def test_it_is_raised_again_in_a_handler_that_swallows_it(runner: Runner) -> None:
    entered = threading.Event()
    swallowed: list[BaseException] = []

    def stubborn() -> str:
        entered.set()
        while len(swallowed) < 3:
            try:
                while True:
                    sum(range(10))
            except BaseException as error:
                swallowed.append(error)
        return "in the end"

    runner.begin(stubborn)
    assert entered.wait(PATIENCE)
    stopping = Stopping(runner.interrupts, "job")
    now = 100.0

    def is_pressed(times: int) -> bool:
        stopping.press(now)
        return stopping.fired == times

    for times in (1, 2, 3):
        until(functools.partial(is_pressed, times))
        until(functools.partial(lambda times: len(swallowed) == times, times))
        stopping.press(now + PAUSES[times - 1] - 0.01)
        assert stopping.fired == times
        now += PAUSES[times - 1]
    assert runner.results.get(timeout=PATIENCE) == "in the end"
    for _ in range(10):
        now += 100
        stopping.press(now)
    assert stopping.fired == 3


def test_it_is_not_raised_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts()
    monkeypatch.setattr(Interrupts, "fire", lambda self, job: True)
    stopping = Stopping(interrupts, "job")
    for second in range(1000):
        stopping.press(float(second))
    assert stopping.fired == len(PAUSES) + 1


@pytest.mark.parametrize("error", [ValueError, StopIteration, SystemExit, KeyboardInterrupt, RequestTimeout])
def test_what_a_job_raises_is_raised(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        Interrupts().call("job", fail)


def test_a_thread_that_has_ended_is_not_found() -> None:
    runner = Runner()
    runner.interrupts.arm("job")
    runner.end()
    assert not runner.interrupts.fire("job")


# ------------------------------------------------------------------ the race


OURS = our_module(
    """
def critical(seen):
    try:
        for number in range(20):
            len(str(number))
    except BaseException:
        seen.append(1)
        raise
"""
)


class Job:
    """One job of the race: up to 2 ms of something, and a deadline at about its end."""

    def __init__(self, number: int, choose: random.Random, locks: list[threading.Lock], seen: list[int]) -> None:
        self.number = number
        self.way = choose.randrange(len(WAYS))
        self.length = choose.random() * 0.002
        self.expires = 0.0
        self.slack = choose.gauss(0, 0.0004)
        self.lock = choose.choice(locks)
        self.seen = seen
        self.done = 0
        self.is_over = False  # its time
        self.cleaned = 0

    def begin(self) -> None:
        self.expires = time.monotonic() + max(self.length + self.slack, 0.0)

    def __call__(self) -> int:
        WAYS[self.way](self, time.monotonic() + self.length)
        return self.number


def compute(job: Job, end: float) -> None:
    while time.monotonic() < end:
        OURS["critical"](job.seen)


def nested(job: Job, end: float) -> None:
    try:
        try:
            compute(job, end)
        except Exception:  # which it is not
            job.seen.append(2)
        finally:
            job.cleaned += 1
    except ValueError:
        pass


def swallow(job: Job, end: float) -> None:
    while time.monotonic() < end:
        try:
            compute(job, end)
        except BaseException:
            pass


def generate(job: Job, end: float) -> None:
    def numbers() -> Iterator[int]:
        while time.monotonic() < end:
            yield 1

    for _ in numbers():
        OURS["critical"](job.seen)


def locked(job: Job, end: float) -> None:
    while time.monotonic() < end:
        with job.lock:
            len("x")


def failing_calls(job: Job, end: float) -> None:
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    while time.monotonic() < end:
        try:
            waiting.get(timeout=0.0002)
        except queue.Empty:
            continue


def sleep(job: Job, end: float) -> None:
    time.sleep(max(end - time.monotonic(), 0.0))


def sort(job: Job, end: float) -> None:
    while time.monotonic() < end:
        sorted(range(20), key=lambda number: -number)


WAYS = (compute, nested, swallow, generate, locked, failing_calls, sleep, sort)


class Race:
    """Some threads that run jobs, and one that interrupts those whose time is over."""

    def __init__(self, threads: int, jobs: int, seed: int) -> None:
        choose = random.Random(seed)
        self.locks = [threading.Lock() for _ in range(3)]
        self.seen: list[int] = []
        self.todo = [Job(number, choose, self.locks, self.seen) for number in range(jobs)]
        self.left = iter(list(self.todo))
        self.faults: list[str] = []
        self.timed_out = 0
        self.threads = threads
        self.running: list[tuple[Interrupts, Job] | None] = [None] * threads
        self.ended = [False] * threads
        self.fired = 0

    def work(self, number: int) -> None:
        try:
            interrupts = Interrupts()
            for job in self.left:
                job.begin()
                self.running[number] = (interrupts, job)
                try:
                    result = interrupts.call(job, job)
                    if result != job.number:
                        self.faults.append(f"{job.number} gave {result}")
                except RequestTimeout:
                    self.timed_out += 1
                    if not job.is_over:
                        self.faults.append(f"{job.number} was interrupted in another's place")
                self.running[number] = None
                job.done += 1
                for count in range(30):  # an exception that comes late would end this thread
                    str(count)
            self.ended[number] = True
        except BaseException as error:
            self.faults.append(f"thread {number} died of {error!r}")
            raise

    def watch(self) -> None:
        while not all(self.ended) and not self.faults:
            now = time.monotonic()
            for entry in self.running:
                if entry is None:
                    continue
                interrupts, job = entry
                if job.expires and now >= job.expires:
                    job.is_over = True
                    self.fired += interrupts.fire(job)
            time.sleep(0.0001)

    def run(self) -> None:
        threads = [threading.Thread(target=self.work, args=[number], daemon=True) for number in range(self.threads)]
        for thread in threads:
            thread.start()
        self.watch()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def race(threads: int, jobs: int, seed: int, interval_s: float) -> Race:
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        race = Race(threads, jobs, seed)
        race.run()
    finally:
        sys.setswitchinterval(before)
    assert race.faults == []
    assert race.seen == []  # never in our own code, never as an Exception
    assert [job.done for job in race.todo] == [1] * jobs
    for lock in race.locks:
        assert lock.acquire(timeout=1)
        lock.release()
    return race


@pytest.mark.parametrize("interval_s", [1e-5, 0.005])
def test_thousands_of_deadlines_hit_their_own_jobs_only(interval_s: float) -> None:
    """Of threads none dies, each job is done once, no lock stays locked."""
    gc.collect()
    ended = race(4, 2500, 1, interval_s)
    assert ended.fired > 200 and ended.timed_out > 100


def test_garbage_that_is_collected_meanwhile_does_not_let_the_handler_move_on(runner: Runner) -> None:
    """Between the look at the handler's frame and the request, the collector may run: CPython 3.11 does so in C."""
    seen: list[int] = []

    def handler() -> None:
        while True:
            OURS["critical"](seen)

    def let_others_run(phase: str, info: object) -> None:
        if threading.get_ident() == here:
            time.sleep(0.0001)

    here, before, interval = threading.get_ident(), gc.get_threshold(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    gc.callbacks.append(let_others_run)
    try:
        for threshold in range(1, 12):
            runner.begin(handler)
            gc.collect(0)
            gc.set_threshold(threshold)
            while not runner.interrupts.fire("job"):
                pass
            gc.set_threshold(*before)
            assert isinstance(runner.results.get(timeout=PATIENCE), RequestTimeout)
            assert gc.isenabled() and seen == []
    finally:
        gc.callbacks.remove(let_others_run)
        sys.setswitchinterval(interval)
        gc.set_threshold(*before)
