"""`jumpstart.cached` as values expire and change: renewals, waiting, exact counts, in threads and on event loops."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart import cached, renewals
from jumpstart.caches import MISSING, Cache
from jumpstart.context import RequestContext, current, request_context
from jumpstart.dependencies import note_read

THREADS = 1000


class FakeClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Flags:
    """A source as `jumpstart.Config` is one: value and version are swapped together, listeners hear of it after."""

    name = "flags"

    def __init__(self) -> None:
        self.current: dict[str, tuple[Any, int]] = {}
        self.listeners: list[Callable[[frozenset[str]], None]] = []

    def version(self, key: str) -> int:
        return self.current.get(key, (None, 0))[1]

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> None:
        self.listeners.append(listener)

    def get(self, key: str) -> Any:
        value, version = self.current[key]
        note_read(self, key, version)
        return value

    def swap(self, key: str, value: Any) -> None:
        self.current[key] = (value, self.version(key) + 1)

    def tell(self, *keys: str) -> None:
        for listener in self.listeners:
            listener(frozenset(keys))

    def set(self, key: str, value: Any) -> None:
        self.swap(key, value)
        self.tell(key)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_request(call: Callable[[], Any]) -> Any:
    with request_context(RequestContext()):
        return call()


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pool = renewals.Pool(idle_s=0.01)
    monkeypatch.setattr(renewals, "pool", pool)
    yield
    wait_until(lambda: pool._threads == 0 and not pool._jobs)


# -- the decisions --


class Model:
    """What a cache should say, the plain way."""

    def __init__(self, ttl: float, stale_ttl: float, maxsize: int) -> None:
        self.ttl, self.stale_ttl, self.maxsize = ttl, stale_ttl, maxsize
        self.entries: dict[int, tuple[int, float]] = {}  # in the order of use

    def state(self, key: int, now: float) -> tuple[str, Any]:
        if key not in self.entries or now - self.entries[key][1] >= self.ttl + self.stale_ttl:
            return "over", MISSING
        value, since = self.entries[key]
        self.entries[key] = self.entries.pop(key)
        return ("fresh" if now - since < self.ttl else "stale"), value

    def store(self, key: int, value: int, now: float) -> None:
        self.entries.pop(key, None)
        self.entries[key] = (value, now)
        while len(self.entries) > self.maxsize:
            self.entries.pop(next(iter(self.entries)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["get", "store", "wait", "fail", "clear"]), st.integers(0, 4), st.integers(0, 9)),
        max_size=60,
    )
)
def test_a_cache_is_what_its_model_says(steps: list[tuple[str, int, int]]) -> None:
    clock = FakeClock()
    cache = Cache(len, ttl=5, stale_ttl=4, maxsize=3, clock=clock)
    model = Model(5, 4, 3)
    hits = stale = 0
    retry: dict[int, float] = {}
    failures: dict[int, int] = {}
    for step, key, number in steps:
        if step == "wait":
            clock.now += number / 2
        elif step == "store":
            cache.store((key,), number)
            model.store(key, number, clock.now)
            retry.pop(key, None)
            failures.pop(key, None)
        elif step == "clear":
            cache.clear()
            model.entries.clear()
            retry.clear()
            failures.clear()
            hits = stale = 0
        else:
            state, value = model.state(key, clock.now)
            found = cache.lookup((key,))
            assert found == (value if state == "fresh" else MISSING)
            hits += state == "fresh"
            if state != "fresh":
                found, due = cache.lookup_stale((key,))
                assert found == value
                stale += state == "stale"
                assert (due is not None) == (state == "stale" and clock.now >= retry.get(key, 0))
                if due is not None:
                    retry[key] = clock.now + 60
                    if step == "fail":
                        failures[key] = failures.get(key, 0) + 1
                        pause = cache.renewal_failed(due)
                        assert pause == 2 ** (failures[key] - 1)
                        retry[key] = clock.now + pause
        retry = {key: at for key, at in retry.items() if key in model.entries}
        failures = {key: count for key, count in failures.items() if key in model.entries}
        info = cache.info()
        assert (info.hits, info.stale_hits, info.currsize) == (hits, stale, len(model.entries))


def test_options_that_make_no_sense_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"stale_ttl": -1}, {"stale_ttl": 5}, {"on_change": "renew"}]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            cached(**options)(print)


# -- a thousand callers --


def test_a_thousand_threads_as_a_value_expires_compute_once_and_nobody_waits() -> None:
    clock = FakeClock()
    gate, entered = threading.Event(), threading.Event()
    calls: list[object] = []

    @cached(ttl=10, stale_ttl=60, clock=clock)
    def price(item: str) -> int:
        calls.append(current())
        if len(calls) > 1:
            entered.set()
            assert gate.wait(30)
        return len(calls)

    assert price("a") == 1
    clock.now += 10
    results: list[int] = []
    barrier = threading.Barrier(THREADS)

    def call() -> None:
        barrier.wait(60)
        results.append(in_request(lambda: price("a")))

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)  # while the renewal is held at the gate: nobody waits for it
    assert results == [1] * THREADS
    assert entered.wait(20)
    assert not gate.is_set()
    info = price.cache_info()
    assert (info.hits, info.misses, info.stale_hits, info.waits, info.computations) == (0, 1, THREADS, 0, 2)
    gate.set()
    wait_until(lambda: price("a") == 2)
    assert calls == [None, None], "the renewal ran in no request"
    assert price.cache_info().computations == 2


def test_a_thousand_threads_without_stale_ttl_compute_once() -> None:
    clock = FakeClock()
    calls: list[int] = []
    waiting = 0
    gate = threading.Event()

    @cached(ttl=10, clock=clock)
    def price(item: str) -> int:
        calls.append(1)
        assert len(calls) == 1 or gate.wait(30)
        return len(calls)

    price("a")
    clock.now += 10
    results: list[int] = []

    def call() -> None:
        nonlocal waiting
        waiting += 1
        results.append(price("a"))

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(60)
    assert results == [2] * THREADS and len(calls) == 2
    info = price.cache_info()
    assert (info.misses, info.computations) == (2, 2)
    assert info.hits + info.waits + info.stale_hits == THREADS - 1


def test_a_thousand_tasks_as_a_value_expires_compute_once_and_nobody_waits() -> None:
    clock = FakeClock()
    calls: list[int] = []

    async def main() -> None:
        gate = asyncio.Event()

        @cached(ttl=10, stale_ttl=60, clock=clock)
        async def price(item: str) -> int:
            calls.append(1)
            if len(calls) > 1:
                await gate.wait()
            return len(calls)

        assert await price("a") == 1
        clock.now += 10
        assert await asyncio.gather(*(price("a") for _ in range(THREADS))) == [1] * THREADS
        await asyncio.sleep(0)
        assert len(calls) == 2
        gate.set()
        while await price("a") == 1:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0)
        info = price.cache_info()
        assert (info.misses, info.waits, info.computations) == (1, 0, 2) and info.hits == 1
        clock.now += 70
        gate.clear()
        tasks = [asyncio.create_task(price("a")) for _ in range(THREADS)]
        await asyncio.sleep(0.01)
        gate.set()
        assert await asyncio.gather(*tasks) == [3] * THREADS
        info = price.cache_info()
        assert (info.misses, info.waits, info.computations) == (2, THREADS - 1, 3)

    asyncio.run(main())


def test_two_event_loops_compute_once() -> None:
    calls: list[int] = []
    gate, entered = threading.Event(), threading.Event()

    @cached
    async def fetch(key: str) -> int:
        calls.append(1)
        entered.set()
        await asyncio.to_thread(gate.wait, 20)
        return len(calls)

    async def many() -> list[int]:
        return await asyncio.gather(*(fetch("a") for _ in range(10)))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(asyncio.run, many())
        assert entered.wait(10)
        second = pool.submit(asyncio.run, many())
        time.sleep(0.05)  # that the second waits cannot be seen from outside; coming late, it would have hits
        gate.set()
        assert first.result(20) == second.result(20) == [1] * 10
    info = fetch.cache_info()
    assert info.computations == 1 and info.hits + info.waits == 19


def test_an_event_loop_that_has_stopped_holds_nobody() -> None:
    stuck = asyncio.new_event_loop()
    never = stuck.create_future()
    calls: list[int] = []

    @cached
    async def fetch() -> int:
        calls.append(1)
        if len(calls) == 1:
            await never
        return len(calls)

    task = stuck.create_task(fetch())
    stuck.run_until_complete(asyncio.sleep(0))
    assert asyncio.run(fetch()) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        stuck.run_until_complete(task)
    stuck.close()
    assert asyncio.run(fetch()) == 2


# -- failures --


def test_a_renewal_that_fails_keeps_the_old_value_and_backs_off(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    calls: list[int] = []
    failing = True

    @cached(ttl=10, stale_ttl=100, clock=clock)
    def price() -> str:
        calls.append(1)
        if len(calls) > 1 and failing:
            raise (LookupError, SystemExit)[len(calls) % 2]("backend")
        return f"value {len(calls)}"

    price()
    clock.now += 10
    for count, pause in ((2, 1), (3, 2), (4, 4)):
        assert price() == "value 1"
        wait_until(lambda count=count: caplog.text.count("could not be renewed") == count - 1)  # type: ignore[misc]
        clock.now += pause - 0.01
        assert price() == "value 1" and len(calls) == count, "not before the pause is over"
        clock.now += 0.02
    assert price.cache_info().errors == 2, "sys.exit() is no Exception"
    clock.now += 100
    with pytest.raises(LookupError, match="backend"):
        calls.append(1)
        price()
    failing = False
    assert price().startswith("value")


def test_a_result_from_before_cache_clear_is_not_kept() -> None:
    gate, entered = threading.Event(), threading.Event()
    calls: list[int] = []

    @cached
    def price() -> int:
        calls.append(1)
        if len(calls) == 1:
            entered.set()
            assert gate.wait(10)
            return 1
        return 2

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(price)
        assert entered.wait(10)
        price.cache_clear()
        assert price() == 2, "and does not wait for it"
        gate.set()
        assert first.result(10) == 1
    assert price() == 2


# -- methods --


def test_a_method_does_not_keep_its_instance() -> None:
    class Shop:
        @cached(maxsize=None)
        def price(self, item: str) -> list[str]:
            return [item]

        @cached
        async def stock(self, *, item: str) -> str:
            return item

    shop, other = Shop(), Shop()
    assert shop.price("a") is shop.price("a") and other.price("a") is not shop.price("a")
    asyncio.run(shop.stock(item="a"))
    assert asyncio.run(shop.stock(item="a")) == "a"
    assert Shop.stock.cache_info()[:2] == (1, 1)
    gone = weakref.ref(shop)
    del shop
    gc.collect()
    assert gone() is None
    assert Shop.price.cache_info().currsize == 1 and Shop.stock.cache_info().currsize == 0
    for _ in range(100):
        Shop().price("a")
    gc.collect()
    assert Shop.price.cache_info().currsize == 1
    assert Shop.price.__jumpstart_cache__._keys_by_reference.keys() and other.price("a")  # type: ignore[attr-defined]
    assert len(Shop.price.__jumpstart_cache__._keys_by_reference) == 1  # type: ignore[attr-defined]


def test_what_cannot_be_referred_to_weakly_is_kept() -> None:
    class Point(tuple):  # type: ignore[type-arg]
        __slots__ = ()

        @cached(ttl=10)
        def size(self) -> int:
            return len(self)

    class Tools:
        @staticmethod
        @cached
        def double(a: int) -> int:
            return a * 2

        @classmethod
        @cached
        def name(cls) -> str:
            return cls.__name__

    assert Point((1, 2)).size() == 2 and Point((1, 2)).size() == 2
    assert Point.size.cache_info().hits == 1
    tools: Any = Tools
    names = {tools.name(), tools().name()}
    assert Tools.double(2) == Tools.double(2) == 4 and names == {"Tools"}


# -- real-time values --


def test_only_what_stands_on_a_changed_key_is_rebuilt_while_the_old_is_served() -> None:
    flags = Flags()
    flags.set("a", 1)
    flags.set("b", 1)
    gate = threading.Event()
    gate.set()
    calls: list[str] = []

    @cached
    def page(key: str) -> tuple[str, int]:
        calls.append(key)
        value = flags.get(key)
        assert gate.wait(20)
        return key, value

    assert in_request(lambda: (page("a"), page("b"))) == (("a", 1), ("b", 1))
    gate.clear()
    flags.set("a", 2)
    wait_until(lambda: calls == ["a", "b", "a"])
    assert in_request(lambda: page("a")) == ("a", 1), "the old one, at once"
    assert page.cache_info().stale_hits == 1
    gate.set()
    wait_until(lambda: in_request(lambda: page("a")) == ("a", 2))
    assert calls == ["a", "b", "a"], "b stands on something else"
    info = page.cache_info()
    assert (info.misses, info.computations) == (2, 3)


def test_who_has_seen_the_new_version_waits_for_it() -> None:
    flags = Flags()
    flags.set("a", 1)

    @cached
    def inner() -> int:
        return int(flags.get("a"))

    @cached
    def outer() -> int:
        return inner() * 10

    in_request(inner)
    assert in_request(outer) == 10, "stands on what a hit of the inner one stands on"
    flags.swap("a", 2)  # nobody has been told yet
    with request_context(RequestContext()):
        assert outer() == 10
        assert flags.get("a") == 2
        assert outer() == 20 and inner() == 2
    assert in_request(outer) == 20

    async def main() -> None:
        @cached
        async def later() -> int:
            await asyncio.sleep(0)
            return inner() * 100

        assert await later() == 200
        flags.set("a", 3)
        with request_context(RequestContext()):
            assert flags.get("a") == 3 and await later() == 300
        while await later() != 300:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0)

    asyncio.run(main())


def test_on_change_drop_serves_nothing_old() -> None:
    flags = Flags()
    flags.set("a", 1)

    @cached(on_change="drop")
    def page() -> int:
        return int(flags.get("a"))

    in_request(page)
    flags.set("a", 2)
    assert page.cache_info().currsize == 0
    assert in_request(page) == 2
    assert page.cache_info().stale_hits == 0


def test_a_change_during_the_computation_is_not_missed() -> None:
    flags = Flags()
    flags.set("a", 1)
    calls: list[int] = []

    @cached
    def page() -> int:
        value = int(flags.get("a"))
        calls.append(value)
        if len(calls) == 1:
            flags.set("a", 2)
        return value

    assert in_request(page) == 1
    wait_until(lambda: bool(in_request(page) == 2))
    assert calls == [1, 2]


def test_coroutine_functions_are_rebuilt_on_their_loop_or_dropped() -> None:
    flags = Flags()
    flags.set("a", 1)

    @cached
    async def page() -> tuple[int, int]:
        return int(flags.get("a")), id(asyncio.get_running_loop())

    async def main() -> None:
        mine = id(asyncio.get_running_loop())
        assert await page() == (1, mine)
        await asyncio.to_thread(flags.set, "a", 2)
        while page.cache_info().computations == 1:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.001)
        with request_context(RequestContext()):
            assert await page() == (2, mine)
        assert page.cache_info().misses == 1

    asyncio.run(main())
    flags.set("a", 3)
    assert page.cache_info().currsize == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "call", "nested", "swap", "tell", "new"]),
            st.integers(0, 2),
            st.sampled_from("ab"),
        ),
        max_size=40,
    ),
    st.sampled_from(["rebuild", "drop"]),
)
def test_never_an_old_value_after_the_new_one_was_seen(steps: list[tuple[str, int, str]], on_change: Any) -> None:
    flags = Flags()
    for key in "ab":
        flags.set(key, 1)

    @cached(on_change=on_change)
    def inner(key: str) -> int:
        return int(flags.get(key))

    @cached(on_change=on_change)
    def outer(key: str) -> tuple[int, int]:
        return inner("a"), inner(key)

    requests = [RequestContext() for _ in range(3)]
    seen: list[dict[str, int]] = [{"a": 0, "b": 0} for _ in requests]
    for step, caller, key in steps:
        if step == "swap":
            flags.swap(key, flags.current[key][0] + 1)
        elif step == "tell":
            flags.tell(key)
        elif step == "new":
            requests[caller], seen[caller] = RequestContext(), {"a": 0, "b": 0}
        else:
            with request_context(requests[caller]):
                if step == "read":
                    got = {key: flags.get(key)}
                elif step == "call":
                    got = {key: inner(key)}
                else:
                    first, second = outer(key)
                    got = {"a": min(first, second) if key == "a" else first, key: second}
            for name, value in got.items():
                assert value >= seen[caller][name], (steps, name)
                seen[caller][name] = value
    wait_until(lambda: renewals.pool._threads == 0)


def test_threads_that_race_with_changes_never_see_time_go_back() -> None:
    flags = Flags()
    flags.set("a", 1)
    stop = threading.Event()

    @cached
    def page() -> int:
        value = int(flags.get("a"))
        time.sleep(0.0005)
        return value

    def flag() -> int:
        return int(flags.get("a"))

    def caller() -> int:
        rounds = 0
        while not stop.is_set() or rounds < 5:
            with request_context(RequestContext()):
                last = 0
                for value in (read() for read in (page, flag, page, page, flag, page)):
                    assert value >= last
                    last = value
            rounds += 1
        return rounds

    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(caller) for _ in range(8)]
        for number in range(2, 120):
            flags.set("a", number)
            time.sleep(0.002)
        stop.set()
        assert all(each.result(30) >= 5 for each in callers)
    wait_until(lambda: in_request(page) == 119)


# -- the pool and forks --


def test_the_pool_is_bounded_and_says_when_it_is_full() -> None:
    gate = threading.Event()
    running: list[int] = []
    pool = renewals.Pool(threads=2, queue=3, idle_s=0.01)

    def job() -> None:
        running.append(1)
        assert gate.wait(20)

    assert pool.submit(job) and pool.submit(job)
    wait_until(lambda: len(running) == 2)
    assert [pool.submit(job) for _ in range(4)] == [True, True, True, False]
    assert len(running) == 2
    gate.set()
    wait_until(lambda: len(running) == 5 and pool._threads == 0)


def test_a_forked_process_waits_for_nobody_in_its_parent() -> None:
    gate, entered = threading.Event(), threading.Event()
    pid = os.getpid()

    @cached(ttl=10, stale_ttl=10)
    def price() -> int:
        if os.getpid() == pid:
            entered.set()
            assert gate.wait(30)
        return os.getpid()

    thread = threading.Thread(target=price)
    thread.start()
    assert entered.wait(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            done = threading.Event()
            code = 0 if price() == os.getpid() and renewals.pool.submit(done.set) and done.wait(10) else 2
        finally:
            os._exit(code)
    wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    thread.join(10)
    assert price() == pid


def test_logging_is_quiet_when_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert cached(len)((1, 2)) == 2
    assert not caplog.records
