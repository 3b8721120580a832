"""What workers learnt is merged without loss, and kept for the next start without ever being in the way."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.boot import BootSettings
from jumpstart.records import Dropped, Reason, Record
from jumpstart.report import BootReport, SectionReport
from jumpstart.warmstart import WarmStartCache
from jumpstart_server.learning import DEAD, Learning, merge_sections
from jumpstart_server.messages import Section

keys = st.sampled_from([*"abcde"])
names = st.sampled_from(["modules", "regex"])
records = st.builds(lambda key, data: Record(key=key, data={"x": data}), keys, st.integers(0, 2))
unique = st.lists(records, max_size=5, unique_by=lambda record: record.key)
section = st.builds(lambda version, records: Section(version, "json", records), st.integers(1, 2), unique)
known = st.dictionaries(names, section)
dead_keys = st.dictionaries(names, st.sets(keys))


def content(sections: dict[str, Section]) -> dict[str, dict[str, Any]]:
    return {name: {record.key: record.data for record in each.records} for name, each in sections.items()}


@given(known, st.lists(known, max_size=3), dead_keys)
def test_everything_that_lives_is_kept_and_nothing_else(
    base: dict[str, Section], learnt: list[dict[str, Section]], dead: dict[str, set[str]]
) -> None:
    merged = merge_sections(base, learnt, dead)
    assert all(each.records for each in merged.values()), "an empty section is not worth keeping"
    for name in {"modules", "regex"}:
        versions = [each[name].version for each in (base, *learnt) if name in each]
        sources = [
            {name: each[name]} for each in (base, *learnt) if name in each and each[name].version == versions[-1]
        ]
        present = content(merged).get(name, {})
        if versions and present:
            assert merged[name].version == versions[-1]
        learnt_keys = {record.key for each in learnt if name in each for record in each[name].records}
        base_keys = {record.key for record in base[name].records} if name in base else set()
        assert present.keys() <= learnt_keys | (base_keys - dead.get(name, set()))
        if len(set(versions)) == 1:
            assert present.keys() == learnt_keys | (base_keys - dead.get(name, set()))
            for key, data in present.items():
                said = [record.data for each in sources for record in each[name].records if record.key == key]
                assert data == said[-1], "the last word counts"


@given(known, st.lists(known, max_size=3), dead_keys)
def test_merging_what_was_merged_changes_no_content(
    base: dict[str, Section], learnt: list[dict[str, Section]], dead: dict[str, set[str]]
) -> None:
    once = merge_sections(base, learnt, dead)
    assert merge_sections(once, [], {}) == once
    assert content(merge_sections(once, learnt[-1:], {})).keys() == content(once).keys()
    assert merge_sections(base, learnt, dead) == once, "the arguments are left as they were"


def test_a_dead_record_goes_and_one_that_a_worker_learnt_anew_comes_back() -> None:
    base = {"modules": Section(1, "json", [Record(key="a"), Record(key="b")])}
    dead = {"modules": {"a", "b"}}
    assert merge_sections(base, [], dead) == {}
    learnt = [{"modules": Section(1, "json", [Record(key="b", data={"x": "new"})])}]
    assert content(merge_sections(base, learnt, dead)) == {"modules": {"b": {"x": "new"}}}


def test_sections_of_another_version_or_encoding_are_not_mixed() -> None:
    base = {"modules": Section(1, "json", [Record(key="a")]), "code": Section(1, "json", [Record(key="c")])}
    learnt = [
        {"modules": Section(2, "json", [Record(key="b")]), "code": Section(1, "msgpack", [Record(key="d")])},
        {"modules": Section(2, "json", [Record(key="e")])},
    ]
    merged = merge_sections(base, learnt, {})
    assert (merged["modules"].version, [record.key for record in merged["modules"].records]) == (2, ["b", "e"])
    assert (merged["code"].encoding, [record.key for record in merged["code"].records]) == ("msgpack", ["d"])


def test_a_restart_does_not_multiply_weights_that_workers_do_not_count() -> None:
    base = {"corpus": Section(1, "json", [Record(key="a", weight=5)])}
    restored = [{"corpus": Section(1, "json", [Record(key="a", weight=0)])}] * 4
    assert merge_sections(base, restored, {})["corpus"].records[0].weight == 5


# -- the books of a supervisor --


@pytest.fixture
def settings(tmp_path: Path) -> BootSettings:
    return BootSettings(target="a:b", app_dir="/x", warm_start=str(tmp_path / "warm"))


def stored(settings: BootSettings) -> dict[str, list[str]]:
    state = WarmStartCache(Path(settings.warm_start)).load(settings.state_key)
    if state is None:
        return {}
    return {name: sorted(record.key for record in state.records(name)[0]) for name in state.sections}


def modules(*keys: str, data: str = "") -> dict[str, Section]:
    return {"modules": Section(1, "json", [Record(key=key, data={"x": data}) for key in keys])}


def report(recorder: str, *dropped: tuple[str, Reason]) -> BootReport:
    losses = [Dropped(key, reason) for key, reason in dropped]
    return BootReport(
        target="a:b", sections=[SectionReport(recorder=recorder, offered=len(losses), used=0, dropped=losses)]
    )


def save(learning: Learning) -> None:
    asyncio.run(learning.save())


def make(settings: BootSettings) -> Learning:
    return Learning(settings)


def test_what_workers_learnt_is_there_at_the_next_start(settings: BootSettings) -> None:
    learning = make(settings)
    learning.learnt((1, 0, 100), modules("a"))
    learning.learnt((1, 1, 101), modules("b"))
    save(learning)
    assert stored(settings) == {"modules": ["a", "b"]}
    second = make(settings)
    second.learnt((1, 0, 200), modules("c"))
    save(second)
    assert stored(settings) == {"modules": ["a", "b", "c"]}


def test_a_worker_that_says_more_replaces_what_it_said(settings: BootSettings) -> None:
    learning = make(settings)
    learning.learnt((1, 0, 100), modules("a", data="old"))
    learning.learnt((1, 0, 100), modules("a", "b", data="new"))
    assert content(learning.merged()) == {"modules": {"a": {"x": "new"}, "b": {"x": "new"}}}


def test_what_was_captured_just_now_comes_on_top(settings: BootSettings) -> None:
    learning = make(settings)
    learning.learnt((1, 0, 100), modules("a", data="learnt"))
    assert content(learning.merged([modules("a", data="captured")])) == {"modules": {"a": {"x": "captured"}}}
    assert content(learning.merged()) == {"modules": {"a": {"x": "learnt"}}}


def test_records_that_a_boot_found_dead_are_not_kept_for_ever(settings: BootSettings) -> None:
    first = make(settings)
    first.learnt((1, 0, 1), modules("stale", "gone", "late", "fine"))
    save(first)
    second = make(settings)
    second.dropped(report("modules", ("stale", Reason.STALE), ("gone", Reason.GONE), ("late", Reason.DEADLINE)))
    save(second)
    assert stored(settings) == {"modules": ["fine", "late"]}


def test_what_may_come_to_life_again_is_not_dead() -> None:
    assert DEAD.isdisjoint({Reason.DEADLINE, Reason.RECORDER_ERROR, Reason.DISABLED, Reason.NO_RECORDER})
    assert {Reason.STALE, Reason.GONE, Reason.MALFORMED} <= DEAD


def test_nothing_new_is_nothing_written(settings: BootSettings) -> None:
    learning = make(settings)
    save(learning)
    assert not Path(settings.warm_start).exists()
    learning.dropped(report("modules"))
    save(learning)
    assert not Path(settings.warm_start).exists()


def test_without_a_cache_everything_is_known_and_nothing_is_written(tmp_path: Path) -> None:
    learning = Learning(BootSettings(target="a:b", app_dir="/x"))
    learning.learnt((1, 0, 1), modules("a"))
    save(learning)
    assert content(learning.merged()) == {"modules": {"a": {"x": ""}}}


def test_a_cache_that_cannot_be_written_costs_one_line(
    settings: BootSettings, caplog: pytest.LogCaptureFixture
) -> None:
    Path(settings.warm_start).mkdir(mode=0o700)
    Path(settings.warm_start).chmod(0o777)
    learning = make(settings)
    for number in range(3):
        learning.learnt((1, 0, 1), modules(str(number)))
        save(learning)
    lines = [record for record in caplog.records if record.name == "jumpstart_server.learning"]
    assert len(lines) == 1
    assert lines[0].levelno == logging.WARNING
    assert "unsafe-owner" in lines[0].getMessage()


def test_saves_at_the_same_time_do_not_lose_anything(settings: BootSettings) -> None:
    learning = make(settings)

    async def main() -> None:
        tasks = []
        for number in range(5):
            learning.learnt((1, number, number), modules(str(number)))
            tasks.append(asyncio.create_task(learning.save()))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await learning.save()

    asyncio.run(main())
    assert stored(settings) == {"modules": [str(number) for number in range(5)]}
