"""`jumpstart.Config` with real threads: what reads see, whatever the source does, and what a fork leaves of it."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jumpstart
from jumpstart import hooks, live
from jumpstart.config import TOMBSTONES, Config, Values, same
from jumpstart.context import RequestContext, request_context
from jumpstart.dependencies import collect, is_outdated
from jumpstart.polling import poller
from tests.jumpstart.live_lab import Scripted, no_threads_left, wait_until


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    with no_threads_left():
        yield


def quick(source: Any, **options: Any) -> Config:
    return Config("flags", source, **{"ttl": 0.05, "boot_timeout": 0.3, **options})


def in_child(check: Callable[[], bool]) -> bool:
    """What *check* says in a forked process."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_it_is_a_mapping_that_follows_its_source() -> None:
    source = Scripted({"a": 1, "b": [2]})
    flags = quick(source)
    assert source.calls == 0  # nothing is fetched before it is used
    assert dict(flags) == {"a": 1, "b": [2]}
    assert (flags["a"], flags.get("c", 3), "a" in flags, "c" in flags, len(flags)) == (1, 3, True, False, 2)
    with pytest.raises(KeyError):
        flags["c"]
    assert (flags.is_stale, flags.info().origin) == (False, "source")
    assert flags.age is not None and flags.age < 5
    source.answer = {"a": 2}
    wait_until(lambda: flags["a"] == 2)
    assert flags.version("a") == flags.version("b") == 2
    assert "b" not in flags


def test_only_the_first_read_waits_and_all_first_readers_share_one_fetch() -> None:
    source = Scripted({"a": 1})
    source.gate.clear()
    flags = quick(source, boot_timeout=20, timeout=20)
    seen: list[int] = []
    readers = [threading.Thread(target=lambda: seen.append(flags["a"])) for _ in range(20)]
    for reader in readers:
        reader.start()
    wait_until(lambda: source.calls)
    assert seen == []
    source.gate.set()
    for reader in readers:
        reader.join()
    assert (seen, source.calls) == ([1] * 20, 1)
    source.gate.clear()
    wait_until(lambda: source.calls == 2)
    began = time.monotonic()
    assert [flags["a"] for _ in range(1000)] == [1] * 1000
    assert time.monotonic() - began < 1
    source.gate.set()


@pytest.mark.parametrize(
    "bad", [OSError("down"), None, 7, "text", [("a", 2)], {1: 2}, {"a": -1}, SystemExit(1), StopIteration()]
)
def test_the_last_good_value_outlives_failures_lies_and_garbage(bad: Any) -> None:
    source = Scripted({"a": 1})
    flags = quick(source, validate=lambda values: values["a"] >= 0)
    assert flags["a"] == 1
    source.answer = bad
    wait_until(lambda: flags.info().failures >= 2)
    assert dict(flags) == {"a": 1}
    assert flags.info().error
    wait_until(lambda: flags.is_stale)
    source.answer = {"a": 2}
    wait_until(lambda: flags["a"] == 2)
    assert (flags.info().failures, flags.info().error) == (0, "")


def test_a_validator_may_raise() -> None:
    def validate(values: Any) -> None:
        if values["limit"] > 10:
            raise ValueError("a limit above 10")

    flags = quick(Scripted({"limit": 11}), validate=validate, boot_timeout=0.1)
    with pytest.raises(jumpstart.SourceUnavailable, match="a limit above 10"):
        flags["limit"]


def test_a_source_that_is_down_from_the_start_is_waited_for_once() -> None:
    source = Scripted(OSError("no route"))
    flags = quick(source)
    began = time.monotonic()
    with pytest.raises(jumpstart.SourceUnavailable, match=r"configuration 'flags' has no value: OSError: no route"):
        flags["a"]
    assert 0.25 < time.monotonic() - began < 5
    assert source.calls > 1  # and was asked again meanwhile
    began = time.monotonic()
    for _ in range(100):
        assert flags.get("a", "fallback") == "fallback"
    assert time.monotonic() - began < 0.3
    told: list[frozenset[str]] = []
    flags.on_change(told.append)
    source.answer = {"a": 1}
    wait_until(lambda: told == [frozenset({"a"})])  # reads have been without: to them this is a change
    assert flags["a"] == 1


def test_a_default_stands_in_and_counts_as_stale() -> None:
    source = Scripted(OSError("down"))
    flags = quick(source, default={"a": 0})
    assert flags["a"] == 0
    assert (flags.info().origin, flags.is_stale, flags.age) == ("default", True, None)
    source.answer = {"a": 1}
    wait_until(lambda: flags["a"] == 1)


def test_a_profile_stands_in_with_its_age_where_values_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    live.offer("config", "flags", {"a": 5}, 3600)
    assert quick(Scripted(OSError("down")), default={"a": 0}).get("a") == 0
    flags = quick(Scripted(OSError("down")), default={"a": 0}, snapshot="value")
    assert flags["a"] == 5
    assert flags.age is not None and 3600 <= flags.age < 3700
    assert re.search(r"the profile's value is used, 36\d\d s old", caplog.text)
    picky = quick(Scripted(OSError("down")), default={"a": 0}, snapshot="value", validate=lambda each: each["a"] < 5)
    assert picky["a"] == 0  # what a profile brings is validated, too


def test_a_fetch_that_hangs_stops_no_other_and_is_tried_again() -> None:
    hung, fine = Scripted({"a": 1}), Scripted({"b": 1})
    hung.gate.clear()
    first = Config("hung", hung, ttl=0.05, timeout=0.1, boot_timeout=0.1, default={"a": 0})
    second = Config("fine", fine, ttl=0.05)
    assert (first["a"], second["b"]) == (0, 1)
    fine.answer = {"b": 2}
    wait_until(lambda: second["b"] == 2)
    wait_until(lambda: hung.calls >= 2)
    assert "no answer within 0.1 s" in first.info().error
    hung.gate.set()
    wait_until(lambda: first["a"] == 1)


def test_a_source_that_flaps_never_loses_a_value_and_versions_only_grow() -> None:
    turn = iter(range(1_000_000))

    def flap() -> Any:
        number = next(turn)
        if number % 3 == 1:
            raise OSError("flap")
        return 7 if number % 3 == 2 else {"a": number}

    flags = Config("flags", flap, ttl=0.01)
    seen, end = [(flags["a"], flags.version("a"))], time.monotonic() + 10
    while len({value for value, _ in seen}) < 6:
        assert time.monotonic() < end
        seen.append((flags["a"], flags.version("a")))
    assert [value for value, _ in seen] == sorted(value for value, _ in seen)
    assert [version for _, version in seen] == sorted(version for _, version in seen)


def test_coroutine_functions_keep_their_loop_and_are_cut_off() -> None:
    loops, hang = [], False

    async def fetch() -> Any:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(30 if hang else 0)
        return {"n": len(loops)}

    flags = quick(fetch, timeout=0.2)
    assert flags["n"] >= 1
    wait_until(lambda: len(loops) >= 3)
    assert len(set(map(id, loops))) == 1
    hang = True
    wait_until(lambda: flags.info().failures >= 2)
    assert flags["n"] >= 1
    hang = False
    wait_until(lambda: flags.info().failures == 0)


def test_ready_waits_without_blocking_the_event_loop() -> None:
    source = Scripted({"a": 1})
    source.gate.clear()
    flags = quick(source, boot_timeout=20)

    async def main() -> None:
        waiting = asyncio.create_task(flags.ready())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        source.gate.set()
        await waiting
        assert flags["a"] == 1

    asyncio.run(main())


def test_a_view_is_one_version() -> None:
    source = Scripted({"a": 1, "b": 1})
    flags = quick(source)
    view = flags.view()
    source.answer = {"a": 2, "b": 2}
    wait_until(lambda: flags["a"] == 2)
    assert (view["a"], view["b"], view.version, "a" in view) == (1, 1, 1, True)
    assert dict(flags.view()) == {"a": 2, "b": 2}


def test_changes_are_told_by_key_and_a_callback_that_raises_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source = Scripted({"a": 1, "b": 1, "gone": 1})
    flags = quick(source)
    told: list[frozenset[str]] = []
    keys: list[frozenset[str]] = []

    @flags.on_change
    def broken(changed: frozenset[str]) -> None:
        raise RuntimeError("a callback")

    flags.on_change(told.append)
    flags.subscribe(keys.append)
    assert flags["a"] == 1
    source.answer = {"a": 1, "b": 2, "new": 1}
    wait_until(lambda: told)
    assert told == [{"b", "gone", "new"}]
    assert {"b", "gone", "new", "*"} in keys
    assert "a callback" in caplog.text
    assert flags.version("a") == 1
    source.answer = {"a": True, "b": 2, "new": 1}  # equal to Python, and not the same to who asks for its type
    wait_until(lambda: told[1:])
    assert told[1:] == [{"a"}]


def test_reads_are_dependencies_of_what_is_computed_from_them() -> None:
    source = Scripted({"a": 1, "b": 1})
    flags = quick(source)
    with collect() as one:
        assert flags["a"] == 1
    with collect() as whole:
        assert dict(flags) == {"a": 1, "b": 1}
    with collect() as absent:
        assert flags.get("c") is None
    source.answer = {"a": 1, "b": 2}
    wait_until(lambda: flags["b"] == 2)
    assert (is_outdated(one.reads), is_outdated(whole.reads), is_outdated(absent.reads)) == (False, True, False)
    source.answer = {"a": 1, "b": 2, "c": 3}
    wait_until(lambda: "c" in flags)
    assert (is_outdated(one.reads), is_outdated(absent.reads)) == (False, True)


def test_the_request_that_fetches_first_has_met_a_cold_event_and_no_other_has() -> None:
    flags = quick(Scripted({"a": 1}))
    for expected in ([("config", "flags")], []):
        with request_context(RequestContext(events=[])) as request:
            assert flags["a"] == 1
        assert request.events == expected


def test_a_first_read_waits_no_longer_than_its_request_may() -> None:
    source = Scripted({"a": 1})
    source.gate.clear()
    flags = quick(source, boot_timeout=20, timeout=20)
    began = time.monotonic()
    with request_context(RequestContext(expires=began + 0.1)), pytest.raises(jumpstart.SourceUnavailable):
        flags["a"]
    assert time.monotonic() - began < 5
    source.gate.set()
    assert flags["a"] == 1


def test_a_fetch_that_reads_its_own_values_does_not_wait_for_itself() -> None:
    flags: Config = quick(lambda: {"n": flags.get("n", 0) + 1}, boot_timeout=20)
    assert flags["n"] == 1
    wait_until(lambda: flags["n"] > 1)


def test_a_child_has_the_values_at_once_and_follows_the_source_by_itself() -> None:
    source = Scripted({"n": 1})
    flags = quick(lambda: {"n": source().get("n"), "pid": os.getpid()})
    assert flags["n"] == 1

    def check() -> bool:
        inherited = flags["pid"] == os.getppid() and flags.version("n") == 1
        source.answer = {"n": 2}
        wait_until(lambda: flags["n"] == 2)
        return inherited and flags["pid"] == os.getpid()

    assert in_child(check)
    assert flags["n"] == 1


def test_a_fork_in_the_middle_of_a_fetch_leaves_the_child_able_to_fetch() -> None:
    source = Scripted({"n": 1})
    source.gate.clear()
    flags = quick(source, boot_timeout=20, timeout=20)
    reader = threading.Thread(target=lambda: flags["n"])
    reader.start()
    wait_until(lambda: source.calls)

    def check() -> bool:
        source.gate = threading.Event()
        source.gate.set()
        return bool(flags["n"] == 1)

    assert in_child(check)
    source.gate.set()
    reader.join()


def test_before_workers_are_forked_there_is_no_thread_and_after_it_goes_on() -> None:
    source = Scripted({"n": 1})
    flags = quick(source)
    assert flags["n"] == 1
    hooks.before_fork(5)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("jumpstart")], names
    calls = source.calls
    source.answer = {"n": 2}
    assert flags["n"] == 1  # reads of hooks that come later start nothing
    assert not poller.is_running()
    assert source.calls == calls
    asyncio.run(hooks.after_restore(5))
    wait_until(lambda: flags["n"] == 2)


def test_what_stood_in_before_the_fork_is_fetched_again_in_the_worker() -> None:
    source = Scripted(OSError("down"))
    flags = quick(source, default={"n": 0})
    assert flags["n"] == 0
    hooks.before_fork(5)
    source.answer = {"n": 1}

    async def worker() -> list[str]:
        await hooks.after_restore(5)
        return await live.settle_all()

    assert asyncio.run(worker()) == []
    assert flags["n"] == 1


def test_what_grew_old_before_the_fork_is_fetched_again_before_the_worker_is_ready() -> None:
    source = Scripted({"n": 1})
    flags = quick(source, boot_timeout=0.1)
    assert flags["n"] == 1
    hooks.before_fork(5)
    wait_until(lambda: flags.is_stale)
    source.answer = OSError("down")

    async def worker() -> list[str]:
        await hooks.after_restore(5)
        return await live.settle_all()

    (line,) = asyncio.run(worker())
    assert re.fullmatch(r"configuration flags: source down, its value of \d+ s ago is used", line)
    assert flags["n"] == 1
    hooks.before_fork(5)
    source.answer = {"n": 2}
    assert asyncio.run(worker()) == []
    assert flags["n"] == 2


def test_a_boot_reports_what_stands_in_or_is_refused() -> None:
    kept = Config("kept", Scripted(OSError("down")), boot_timeout=0.1, default={"a": 1})
    assert asyncio.run(live.settle_all()) == ["configuration kept: source down, the default is used"]
    kept.close()
    needed = Config("needed", Scripted(OSError("no route")), boot_timeout=0.1, on_down="refuse")
    with pytest.raises(jumpstart.SourceUnavailable, match=r"'needed' refuses to start .*OSError: no route"):
        asyncio.run(live.settle_all())
    needed.close()


def test_closed_it_keeps_its_values_and_its_source_is_left_alone() -> None:
    source = Scripted({"a": 1})
    flags = quick(source)
    assert flags["a"] == 1
    flags.close()
    wait_until(lambda: not poller.is_running())
    calls = source.calls
    assert flags["a"] == 1
    assert not poller.is_running()
    assert source.calls == calls


def test_one_that_is_dropped_is_fetched_no_more() -> None:
    source = Scripted({"a": 1})
    flags = quick(source)
    # In a context of its own, since who has read is remembered with what.
    assert contextvars.Context().run(flags.get, "a") == 1
    del flags
    wait_until(lambda: not poller.is_running())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ttl": 0}, ValueError),
        ({"ttl": float("nan")}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"boot_timeout": 0}, ValueError),
        ({"on_down": "panic"}, ValueError),
        ({"snapshot": "key"}, ValueError),
        ({"on_down": "refuse", "default": {}}, ValueError),
        ({"default": 5}, TypeError),
        ({"fetch": 5}, TypeError),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Config("flags", **{"fetch": dict, **options})


def test_a_script_that_ends_does_not_wait_for_a_fetch() -> None:
    code = (
        "import jumpstart, threading; gate = threading.Event()\n"
        "first = iter([{'a': 1}])\n"
        "flags = jumpstart.Config('flags', lambda: next(first, None) or gate.wait(), ttl=0.01)\n"
        "print(flags['a'])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


keys = st.sampled_from("abcde")
sets = st.dictionaries(keys, st.one_of(st.integers(0, 2), st.booleans(), st.floats(0, 2), st.lists(st.integers(0, 1))))


@given(st.lists(sets, min_size=1, max_size=12))
def test_versions_grow_with_what_changed_and_with_nothing_else(answers: list[dict[str, Any]]) -> None:
    flags = Config("pure", dict)
    kept: Values | None = None
    for answer in answers:
        before = kept
        version = 1 if before is None else before.version + 1
        kept, changed = flags._merge(before, flags._check(answer), version)
        assert set(kept.values) == set(answer)
        assert all(same(kept.values[key], answer[key]) for key in answer)
        if before is None:
            continue
        assert ("*" in changed) == bool(changed) == (kept.version > before.version)
        for key in "abcde":
            absent = object()
            is_same = same(before.values.get(key, absent), kept.values.get(key, absent))
            assert is_same == (key not in changed)
            assert kept.version_of(key) == (before.version_of(key) if is_same else version)


def test_marks_of_keys_that_are_gone_are_forgotten_and_versions_do_not_shrink() -> None:
    flags = Config("pure", dict)
    kept, _ = flags._merge(None, flags._check({"stays": 1}), 1)
    for number in range(3 * TOMBSTONES):
        before = kept.version_of("0")
        kept, _ = flags._merge(kept, flags._check({"stays": 1, str(number): 1}), number + 2)
        assert kept.version_of("0") >= before
        assert len(kept.marks) <= TOMBSTONES + 10
    assert kept.version_of("stays") == 1


def test_cached_values_follow_the_keys_that_they_were_computed_from() -> None:
    source = Scripted({"rate": 2, "other": 1})
    flags = quick(source)
    calls: list[int] = []

    @jumpstart.cached
    def price(item: int) -> int:
        calls.append(item)
        return int(flags["rate"]) * item

    assert [price(3), price(3)] == [6, 6]
    source.answer = {"rate": 2, "other": 2}
    wait_until(lambda: flags["other"] == 2)
    assert price(3) == 6
    assert calls == [3]
    source.answer = {"rate": 5, "other": 2}
    wait_until(lambda: flags["rate"] == 5)
    assert price(3) == 15  # this caller has seen the new rate
    wait_until(lambda: calls.count(3) == 2)
