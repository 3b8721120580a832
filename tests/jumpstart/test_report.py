"""The boot report: every span, every record, and one line for people."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.records import Dropped, Reason, Record, Tally
from jumpstart.report import BootReport, Refusal, SectionReport, Stopwatch, WarmupReport, section_report


class FakeClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# -- spans --


def test_spans_count_from_the_supervisors_start() -> None:
    clock = FakeClock(1002.5)
    watch = Stopwatch("mold 1", 1000.0, clock)
    with watch.span("import the app", "shop"):
        clock.now += 1.25
    (span,) = watch.spans
    assert (span.name, span.process, span.detail) == ("import the app", "mold 1", "shop")
    assert (span.start_s, span.duration_s) == (2.5, 1.25)
    assert watch.since_start() == 3.75


def test_a_stage_that_raises_is_recorded_and_its_error_passed_on() -> None:
    clock = FakeClock(0.0)
    watch = Stopwatch("worker 1", 0.0, clock)
    with pytest.raises(ValueError):
        with watch.span("restores"):
            clock.now = 0.5
            raise ValueError
    assert [(span.name, span.duration_s) for span in watch.spans] == [("restores", 0.5)]


def test_spans_lie_in_each_other_and_bear_the_process_of_their_end() -> None:
    clock = FakeClock(0.0)
    watch = Stopwatch("mold 1", 0.0, clock)
    with watch.span("outer"):
        clock.now = 1.0
        with watch.span("inner"):
            clock.now = 2.0
        watch.process = "worker 2"
        clock.now = 3.0
    inner, outer = watch.spans
    assert (inner.name, inner.process) == ("inner", "mold 1")
    assert (outer.name, outer.process) == ("outer", "worker 2")
    assert outer.start_s <= inner.start_s
    assert inner.start_s + inner.duration_s <= outer.start_s + outer.duration_s


# -- sections --

keys = st.sampled_from("abcdef")


@given(st.sets(keys), st.sets(keys), st.lists(st.tuples(keys, st.sampled_from(Reason)), max_size=5))
def test_every_record_is_accounted_for(offered: set[str], used: set[str], dropped: list[tuple[str, Reason]]) -> None:
    records = [Record(key=key) for key in sorted(offered)]
    tally = Tally()
    for key in sorted(used & offered):
        tally.used(Record(key=key))
    for key, reason in dropped:
        if key in offered:
            tally.drop(Record(key=key), reason)
    report = section_report("modules", records, tally)
    assert report.offered == len(records)
    assert report.used + len({each.key for each in report.dropped}) == report.offered
    silent = offered - tally.used_keys - {each.key for each in tally.dropped}
    assert {each.key for each in report.dropped[len(tally.dropped) :]} == silent
    assert all(each.reason is Reason.NOT_APPLICABLE for each in report.dropped[len(tally.dropped) :])
    assert sum(report.reasons.values()) == len(report.dropped)


def test_a_record_that_was_used_and_then_dropped_is_not_used() -> None:
    tally, record = Tally(), Record(key="a")
    tally.used(record)
    tally.drop(record, Reason.NO_EFFECT)
    report = section_report("starlette", [record], tally)
    assert (report.used, report.reasons) == (0, {"no-effect": 1})


# -- the whole --


def section(name: str, used: int, *dropped: Reason) -> SectionReport:
    losses = [Dropped(str(number), reason) for number, reason in enumerate(dropped)]
    return SectionReport(recorder=name, offered=used + len(dropped), used=used, dropped=losses)


def test_sections_add_up() -> None:
    report = BootReport(
        target="a:b", sections=[section("x", 3, Reason.STALE), section("y", 2, Reason.STALE, Reason.GONE)]
    )
    assert (report.offered, report.used) == (8, 5)
    assert report.dropped_reasons == {"stale": 2, "gone": 1}
    assert report.share == 5 / 8


def test_what_is_not_needed_here_is_in_no_share() -> None:
    assert BootReport(target="a:b").share is None
    unneeded = BootReport(target="a:b", sections=[section("x", 0, Reason.NOT_APPLICABLE)])
    assert unneeded.share is None
    report = BootReport(target="a:b", sections=[section("x", 3, Reason.STALE, Reason.NOT_APPLICABLE)])
    assert report.share == 3 / 4 and "records 3 used (75%), 1 dropped (1 stale), 1 not needed here" in report.summary()


def test_the_line_at_start_says_how_warm_and_why_not() -> None:
    report = BootReport(
        target="a:b",
        sources=["warm-start cache"],
        sections=[section("x", 3, Reason.STALE, Reason.GONE, Reason.STALE)],
        warmup=WarmupReport(sent=4, ok=3, coverage=0.875),
    )
    line = report.summary()
    for words in ("warm coverage 88%", "records 3 used (50%), 3 dropped (1 gone, 2 stale)", "3/4 requests"):
        assert words in line
    assert "cold" not in line and "\n" not in line


def test_a_cold_boot_is_called_cold() -> None:
    line = BootReport(target="a:b").summary()
    assert "cold" in line and "records 0 used" in line and "unknown" in line and "dropped" not in line


@pytest.mark.parametrize(
    ("used", "warmup", "words"),
    [
        (0, None, "unknown (nothing recorded yet)"),
        (0, WarmupReport(), "unknown (nothing recorded yet)"),
        (3, WarmupReport(), "unknown (no requests recorded)"),
        (3, WarmupReport(replay=False), "not measured (replay is off)"),
        (0, WarmupReport(coverage=0.0), "0%"),
    ],
)
def test_coverage_that_is_not_known_says_why(used: int, warmup: WarmupReport | None, words: str) -> None:
    report = BootReport(target="a:b", sections=[section("x", used)], warmup=warmup)
    assert report.summary().startswith(f"warm coverage {words} · ")


def test_a_refusal_reads_as_a_sentence() -> None:
    assert str(Refusal("profile x", Reason.TOO_OLD, "3 days")) == "profile x: too-old (3 days)"
    assert str(Refusal("profile x", Reason.ABSENT)) == "profile x: absent"


def test_a_report_survives_the_way_to_the_supervisor() -> None:
    report = BootReport(
        target="a:b",
        refusals=[Refusal("x", Reason.DAMAGED, "d")],
        sections=[section("x", 1, Reason.STALE)],
        warmup=WarmupReport(),
        recorders_off={"x": "boom"},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=BootReport) == report
    assert msgspec.json.decode(msgspec.json.encode(report), type=BootReport) == report
