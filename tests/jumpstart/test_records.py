"""Records: each valid on its own, merged without loss, accounted for to the last one."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.records import Dropped, Reason, Record, Tally, merge, merge_valid, split_valid

keys = st.sampled_from([*"abcdef"])
records = st.builds(
    lambda key, weight, data: Record(key=key, weight=weight, data={"x": data}),
    keys,
    st.integers(0, 9),
    st.integers(0, 3),
)
sections = st.lists(st.lists(records, max_size=8), max_size=4)
dependent = st.builds(
    lambda key, depends: Record(key=key, depends=depends),
    keys,
    st.dictionaries(st.sampled_from(["module:m", "module:n", "dist:d"]), st.sampled_from(["1", "2"]), max_size=3),
)
worlds = st.dictionaries(st.sampled_from(["module:m", "module:n", "dist:d"]), st.sampled_from(["1", "2"]))


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# -- merge --


@given(sections)
def test_merging_keeps_every_key_once_in_first_seen_order_and_the_last_data(parts: list[list[Record]]) -> None:
    flat = [record for part in parts for record in part]
    merged = merge(*parts)
    assert [record.key for record in merged] == list(dict.fromkeys(record.key for record in flat))
    for record in merged:
        same = [other for other in flat if other.key == record.key]
        assert record.data == same[-1].data
        assert record.weight == sum(other.weight for other in same)


@given(sections)
def test_merging_in_steps_is_merging_at_once(parts: list[list[Record]]) -> None:
    stepwise: list[Record] = []
    for part in parts:
        stepwise = merge(stepwise, part)
    assert stepwise == merge(*parts)
    assert merge(merge(*parts)) == merge(*parts)


@given(sections, st.integers(0, 8))
def test_past_the_limit_the_lightest_are_left_out(parts: list[list[Record]], limit: int) -> None:
    everything, kept = merge(*parts), merge(*parts, limit=limit)
    assert len(kept) == min(limit, len(everything))
    assert kept == [record for record in everything if record in kept]
    left_out = [record.weight for record in everything if record not in kept]
    assert not kept or not left_out or max(left_out) <= min(record.weight for record in kept)


def test_merging_nothing() -> None:
    assert merge() == merge([], []) == []


# -- validity --


def is_valid(record: Record, world: dict[str, str]) -> bool:
    return all(world.get(dependency) == wanted for dependency, wanted in record.depends.items())


@given(st.lists(dependent, max_size=8), worlds)
def test_a_record_is_kept_when_all_that_it_depends_on_is_as_it_was(given_: list[Record], world: dict[str, str]) -> None:
    tally = Tally()
    valid = split_valid(given_, world.get, tally)
    assert valid == [record for record in given_ if is_valid(record, world)]
    assert len(valid) + len(tally.dropped) == len(given_)
    for dropped in tally.dropped:
        assert dropped.reason is (Reason.GONE if dropped.detail not in world else Reason.STALE)


@given(st.lists(st.lists(dependent, max_size=6), max_size=3), worlds)
def test_a_key_is_lost_only_when_no_source_has_a_valid_record(parts: list[list[Record]], world: dict[str, str]) -> None:
    tally = Tally()
    valid = merge_valid(parts, world.get, tally)
    alive = {record.key for part in parts for record in part if is_valid(record, world)}
    offered = {record.key for part in parts for record in part}
    assert {record.key for record in valid} == alive
    assert sorted(dropped.key for dropped in tally.dropped) == sorted(offered - alive)


def test_a_stale_record_of_the_cache_does_not_hide_the_valid_one_of_a_profile() -> None:
    new = Record(key="k", data={"x": "new"}, depends={"module:m": "2"})
    old = Record(key="k", data={"x": "old"}, depends={"module:m": "1"})
    for parts in ([[new], [old]], [[old], [new]]):
        tally = Tally()
        assert merge_valid(parts, {"module:m": "2"}.get, tally) == [new]
        assert tally.dropped == []


# -- tallies --


def test_a_tally_knows_when_its_stage_is_over() -> None:
    clock = FakeClock()
    tally = Tally(deadline=101.0, clock=clock)
    assert not tally.out_of_time()
    clock.now = 101.0
    assert tally.out_of_time()
    tally.set_deadline(102.0)
    assert not tally.out_of_time()
    tally.set_deadline(None)
    clock.now = 1e9
    assert not tally.out_of_time()
    assert not Tally().out_of_time()


def test_a_tally_notes_what_became_of_records() -> None:
    tally = Tally()
    tally.used(Record(key="a"))
    tally.used(Record(key="a"))
    tally.drop(Record(key="b"), Reason.FAILED, "boom")
    assert tally.used_keys == {"a"}
    assert tally.dropped == [Dropped("b", Reason.FAILED, "boom")]


def test_reasons_are_an_api() -> None:
    """Dashboards and alerts know these words: add to them, never change one."""
    assert {str(reason) for reason in Reason} >= {
        "absent", "unreadable", "damaged", "format", "too-large", "unsigned", "unknown-key", "bad-signature", "too-old",
        "from-the-future", "unsafe-owner", "other-runtime", "other-app", "needs-trust", "no-recorder", "recorder-error",
        "disabled", "malformed", "stale", "gone", "not-applicable", "failed", "no-effect", "deadline",
    }  # fmt: skip
    assert all(str(reason).replace("-", "").isalpha() and str(reason).islower() for reason in Reason)


def test_records_cannot_be_changed_and_leave_out_defaults() -> None:
    assert msgspec.json.encode(Record(key="a")) == b'{"key":"a"}'
    assert msgspec.json.decode(b'{"key":"a","weight":3}', type=Record) == Record(key="a", weight=3)
