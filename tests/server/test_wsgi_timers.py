"""Timers: each is looked at in time, whatever its owner does meanwhile, and nothing is held twice or for ever."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.wsgi.timers import GONE, GRAIN, NEVER, NEXT_LOOK, Timers


class Thing:
    """What an owner does with a connection's deadline, as in `server.py`."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.look_at = 0.0

    def put_off(self, deadlines: Timers, deadline: float, now: float) -> None:
        self.deadline = deadline
        if deadline < self.look_at or not self.look_at:
            deadlines.watch(self, now)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.floats(0.01, 100)),
        st.tuples(st.just("set"), st.integers(0, 30), st.one_of(st.just(NEVER), st.floats(0.0, 100))),
        st.tuples(st.just("close"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("wait"), st.floats(0.0, 30)),
    ),
    max_size=60,
)


@given(steps)
def test_what_is_due_is_told_once_and_in_time(steps: list[tuple[object, ...]]) -> None:
    """A naive model: a list of things, each looked at every time."""
    deadlines = Timers()
    now = 1000.0
    things: list[Thing] = []
    for kind, *values in steps:
        if kind == "open":
            (patience,) = values
            thing = Thing(now + float(str(patience)))
            deadlines.watch(thing, now)
            things.append(thing)
        elif kind == "wait":
            now += float(str(values[0]))
            due = deadlines.expired(now)
            assert len(set(map(id, due))) == len(due)
            must = [thing for thing in things if thing.deadline + GRAIN <= now]
            may = [thing for thing in things if thing.deadline <= now]
            assert set(map(id, must)) <= set(map(id, due)) <= set(map(id, may))
            assert not deadlines.expired(now)
            things = [thing for thing in things if thing not in due]
        elif things:
            thing = things[int(str(values[0])) % len(things)]
            if kind == "set":
                thing.put_off(deadlines, now + float(str(values[1])), now)
            else:
                thing.deadline = GONE
                if values[1]:
                    deadlines.forget(thing)
                    deadlines.forget(thing)
                things.remove(thing)
        assert len(deadlines) >= len(things)
    for thing in things:
        thing.deadline = GONE
    deadlines.expired(now + 1000)
    assert len(deadlines) == 0 and not deadlines._buckets


def test_a_closed_one_is_not_kept() -> None:
    """Ten thousand connections a second, each with 75 seconds of keep-alive, would be memory without end."""
    deadlines = Timers()
    thing = Thing(1075.0)
    deadlines.watch(thing, 1000.0)
    thing.put_off(deadlines, 1010.0, 1000.0)
    assert len(deadlines) == 1
    deadlines.forget(thing)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None and not deadlines._buckets


class Interleaved(Thing):
    """Its owner acts in the middle of a look: at the *turn*-th time that the look reads or writes an attribute."""

    def __init__(self, deadline: float, turn: int, act: Callable[[Interleaved], None]) -> None:
        self._values = {"deadline": deadline, "look_at": 0.0}
        self._turn = -1
        self.turn, self.act = turn, act

    def arm(self) -> None:
        self._turn = self.turn

    def _step(self) -> None:
        self._turn -= 1
        if self._turn == -1:
            self._turn = -2
            self.act(self)
        elif self._turn < -2:
            self._turn = -2

    def raw(self, name: str) -> float:
        return self._values[name]

    def set_raw(self, name: str, value: float) -> None:
        self._values[name] = value

    @property
    def deadline(self) -> float:
        self._step()
        return self._values["deadline"]

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._values["deadline"] = value

    @property
    def look_at(self) -> float:
        self._step()
        return self._values["look_at"]

    @look_at.setter
    def look_at(self, value: float) -> None:
        self._step()
        self._values["look_at"] = value
        self._step()


@pytest.mark.parametrize("before", [1075.0, NEVER, 1000.1], ids=str)
@pytest.mark.parametrize("after", [1003.0, 1075.0, NEVER], ids=str)
def test_an_owner_that_sets_a_deadline_in_the_middle_of_a_look_is_heard(before: float, after: float) -> None:
    """At each point between two reads; then it is looked at by the new one, and by no later time."""
    for turn in itertools.count():
        deadlines = Timers()
        watches: list[bool] = []

        def owner(thing: Interleaved, watches: list[bool] = watches) -> None:
            thing.set_raw("deadline", after)
            # It would wait for the lock here, and watch when the look is over.
            watches.append(after < thing.raw("look_at") or not thing.raw("look_at"))

        thing = Interleaved(1000.2, turn, owner)
        deadlines.watch(thing, 1000.0)
        thing.set_raw("deadline", before)
        thing.arm()
        due = deadlines.expired(1000.6)
        if due or watches == [True]:  # the server's tick does so for those that somebody owns
            deadlines.watch(thing, 1000.6)
        if not watches:
            assert turn > 3
            break
        assert len(deadlines) == 1
        assert thing.raw("look_at") <= after, turn
        if before == NEVER:
            assert thing.raw("look_at") <= max(1000.6 + NEXT_LOOK, min(after, 1075.0)), turn


def test_watch_and_look_from_many_threads() -> None:
    """Owners that put off, bring forward and close while others look; every one that is due is told."""
    deadlines = Timers()
    clock = itertools.count(1000)
    told: set[int] = set()
    lock = threading.Lock()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            due = deadlines.expired(next(clock) / 10)
            with lock:
                told.update(map(id, due))

    def own(things: list[Thing]) -> None:
        for number, thing in enumerate(things):
            deadlines.watch(thing, next(clock) / 10)
            for put_off in (50.0, NEVER, 5.0, 0.1, 20.0):
                now = next(clock) / 10
                thing.put_off(deadlines, now + put_off, now)
            if number % 2:
                thing.deadline = GONE
                deadlines.forget(thing)

    all_things = [[Thing(NEVER) for _ in range(300)] for _ in range(4)]
    threads = [threading.Thread(target=own, args=[things]) for things in all_things]
    looker = threading.Thread(target=look)
    for thread in [looker, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    looker.join()
    due = deadlines.expired(1e9)
    told.update(map(id, due))
    living = [thing for things in all_things for thing in things if thing.deadline != GONE]
    assert {id(thing) for thing in living} <= told
    assert len(deadlines) == 0
