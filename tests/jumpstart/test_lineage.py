"""Nothing lives for ever that nobody uses, and a profile names where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.lineage import MAX_ANCESTORS, MAX_CARRIED, Lineage, hand_down
from jumpstart.profile import MAX_GOLDEN, AppInfo, Manifest, Profile, new_manifest
from jumpstart.profile_view import describe
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.recorders import RecorderSet
from jumpstart.records import Record, merge

KEYS = st.sampled_from("abcde")
RECORDS = st.lists(
    st.builds(Record, key=KEYS, weight=st.integers(0, 9), carried=st.integers(-2, MAX_CARRIED + 3)),
    unique_by=lambda record: record.key,
)


def by_key(records: Sequence[Record]) -> dict[str, Record]:
    return {record.key: record for record in records}


@given(RECORDS, st.frozensets(KEYS))
def test_what_was_seen_begins_anew_and_what_was_not_comes_closer_to_its_end(
    records: list[Record], seen: frozenset[str]
) -> None:
    handed = by_key(hand_down(records, seen))
    for record in records:
        if record.key in seen:
            assert handed[record.key].carried == 0
        elif record.carried >= MAX_CARRIED:
            assert record.key not in handed
        else:
            assert handed[record.key].carried == max(record.carried, 0) + 1
    assert list(handed) == [record.key for record in records if record.key in handed]


@given(st.lists(st.frozensets(KEYS), max_size=40))
def test_a_record_is_there_exactly_as_long_as_its_last_use_is_not_too_many_profiles_ago(
    uses: list[frozenset[str]],
) -> None:
    records = [Record(key=key) for key in "abcde"]
    alive = dict.fromkeys("abcde", 0)  # key → profiles since its last use
    for seen in uses:
        records = hand_down(records, seen)
        alive = {key: 0 if key in seen else count + 1 for key, count in alive.items()}
        alive = {key: count for key, count in alive.items() if count <= MAX_CARRIED}
        assert {record.key: record.carried for record in records} == alive


@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_in_any_order_of_merging_the_one_who_saw_it_used_is_believed(sections: list[list[Record]]) -> None:
    least: dict[str, int] = {}
    for section in sections:
        for record in section:
            least[record.key] = min(least.get(record.key, record.carried), record.carried)
    for order in permutations(sections):
        assert {record.key: record.carried for record in merge(*order)} == least


class Names(Recorder):
    """Knows what it was given, and what the test says that it has seen."""

    name = "names"

    def __init__(self, *seen: str) -> None:
        super().__init__(WarmSettings())
        self.seen = seen

    def capture(self, purpose: Purpose) -> list[Record]:
        return [Record(key=key) for key in self.seen]


def test_what_a_process_was_given_weighs_nothing_in_its_capture_and_keeps_its_count() -> None:
    recorders = RecorderSet([Names("old", "new")])
    recorders.restore(None, {"names": [Record(key="old", weight=5, carried=3)]}, {})
    captured = recorders.capture("ship")["names"]
    assert captured == [Record(key="old", weight=0, carried=3), Record(key="new")]
    fresh = {record.key for record in captured if record.weight}
    assert hand_down(captured, fresh) == [Record(key="old", weight=0, carried=4), Record(key="new")]


@given(st.lists(st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}"), max_size=40))
def test_a_lineage_counts_all_its_ancestors_and_names_the_nearest(ids: list[str]) -> None:
    lineage = Lineage()
    for profile in ids:
        lineage = lineage.descend(profile)
    assert lineage.generation == len(ids)
    assert lineage.ancestors == ids[::-1][:MAX_ANCESTORS]
    assert msgspec.json.decode(msgspec.json.encode(lineage), type=Lineage) == lineage


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("golden", [{"request": "GET /", "status": 200, "shape": "0" * 32}] * (MAX_GOLDEN + 1)),
        ("golden", [{"request": "GET /", "status": 200, "shape": "see below"}]),
        ("lineage", {"generation": 40, "ancestors": ["a" * 32] * (MAX_ANCESTORS + 1)}),
        ("lineage", {"generation": -1}),
        ("lineage", {"ancestors": ["../../etc"]}),
    ],
)
def test_a_manifest_that_claims_too_much_is_malformed(name: str, value: object) -> None:
    manifest = new_manifest(app=AppInfo(target="a:b"), tenant="web", sections=[], now=datetime.now(UTC))
    document = msgspec.to_builtins(manifest)
    msgspec.json.decode(msgspec.json.encode(document), type=Manifest)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({**document, name: value}), type=Manifest)


def test_show_prints_it() -> None:
    manifest: Manifest = new_manifest(
        app=AppInfo(target="a:b"),
        tenant="web",
        sections=[],
        now=datetime.now(UTC),
        lineage=Lineage().descend("b" * 32).descend("a" * 32),
    )
    lines = describe(Profile(manifest, None, False, {}, []))
    assert f"lineage: generation 2, captured in a process that booted from {'a' * 12}, {'b' * 12}" in lines
