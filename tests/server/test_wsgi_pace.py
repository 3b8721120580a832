"""Which handlers are taken for quick, and how long a thread may hold the GIL."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart_server.wsgi import pace
from jumpstart_server.wsgi.pace import MAX_ROUTES, QUICK, Key, Paces, SwitchInterval

paths = st.sampled_from([b"/", b"/a", b"/shop/1", b"/shop/2", b"/shop/", b"*", b"/shop/*", b""])
keys = st.tuples(st.sampled_from(["GET", "POST"]), paths)
times = st.one_of(st.floats(0, 0.0005), st.floats(0.002, 10))


class Naive:
    """A weighted mean for each path, and for each folder of what was new in it."""

    def __init__(self) -> None:
        self.means: dict[tuple[str, bytes], float] = {}

    def note(self, key: Key, seconds: float) -> None:
        if key not in self.means:
            self.means[key] = seconds
            method, path = key
            key = (method, path[: path.rfind(b"/") + 1] + b"*")
        before = self.means.setdefault(key, seconds)
        weight = pace.DOWN if seconds < before else pace.UP
        self.means[key] = before + weight * (seconds - before)

    def is_quick(self, key: Key) -> bool:
        method, path = key
        folder = (method, path[: path.rfind(b"/") + 1] + b"*")
        return self.means.get(key, self.means.get(folder, 1.0)) < QUICK


@given(st.lists(st.tuples(keys, times), max_size=80))
def test_a_guess_from_the_times_before(noted: list[tuple[Key, float]]) -> None:
    paces, naive = Paces(), Naive()
    for key, seconds in noted:
        assert paces.is_quick(key) == naive.is_quick(key)
        paces.note(key, seconds)
        naive.note(key, seconds)


def test_what_was_never_seen_may_take_long() -> None:
    assert not Paces().is_quick(("GET", b"/"))


def test_one_long_time_is_enough_and_some_short_ones_make_up_for_it() -> None:
    paces = Paces()
    key = ("GET", b"/report")
    for _ in range(1000):
        paces.note(key, 0.0001)
    assert paces.is_quick(key)
    paces.note(key, 1.0)
    assert not paces.is_quick(key)
    for _ in range(20):
        paces.note(key, 0.0001)
    assert paces.is_quick(key)


def test_what_takes_long_just_now_is_slow_before_it_ends() -> None:
    paces = Paces()
    for path in (b"/known", b"/folder/1"):
        for _ in range(10):
            paces.note(("GET", path), 0.0001)
    paces.note_overdue(("GET", b"/known"))
    paces.note_overdue(("GET", b"/folder/new"))
    assert not paces.is_quick(("GET", b"/known"))
    assert not paces.is_quick(("GET", b"/folder/other"))
    assert paces.is_quick(("GET", b"/folder/1"))


@given(st.integers(1, 3 * MAX_ROUTES))
@settings(max_examples=20)
def test_memory_is_bounded(folders: int) -> None:
    paces = Paces()
    for number in range(3 * MAX_ROUTES):
        paces.note(("GET", b"/%d/%d" % (number % folders, number)), 0.0001)
        assert len(paces._seconds) <= MAX_ROUTES + 1


def test_from_many_threads() -> None:
    paces = Paces()
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(3000):
                key = ("GET", b"/%d/%d" % (number % 3, first * number))
                paces.is_quick(key)
                paces.note(key, 0.0001)
                if not number % 50:
                    paces.note_overdue(key)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(paces._seconds) <= MAX_ROUTES + 1 + len(threads)


@given(st.lists(st.tuples(st.floats(0, 0.1), st.booleans(), st.floats(0, 2)), max_size=50))
def test_the_interval_is_short_while_somebody_computes_and_a_moment_longer(
    looks: list[tuple[float, bool, float]],
) -> None:
    interval = SwitchInterval()
    now, computed_at = 1000.0, -1000.0
    for lag, moved, wait in looks:
        if lag > pace.LAG and not moved:
            computed_at = now
        expected = pace.SHORT if now < computed_at + pace.CALM else pace.LONG
        assert interval.look(now, lag, moved) == expected
        now += wait
