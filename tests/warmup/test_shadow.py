"""When a shadow request may run: what waits, for how long, and what it may cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.shadow import (
    MOST_COLD,
    SAVED_CPU,
    Allowance,
    Lane,
    ShadowCounts,
    ShadowQueue,
    add_counts,
)

PAGE, OTHER = WarmRequest(path="/page"), WarmRequest(path="/other")


def queue(per_minute: float = 600, cpu_share: float = 0.5) -> ShadowQueue:
    return ShadowQueue(Allowance(per_minute, cpu_share, 0.0))


def test_cold_ones_go_first_and_random_ones_want_more_idleness() -> None:
    waiting = queue()
    assert waiting.offer(PAGE, "random", 100.0)
    assert waiting.offer(OTHER, "cold", 100.0)
    taken = waiting.take(101.0, idle=True, very_idle=False)
    assert taken is not None
    assert taken.request == OTHER
    assert waiting.take(101.0, idle=True, very_idle=False) is None
    assert waiting.counts().dropped == {"busy": 1}
    assert waiting.offer(PAGE, "random", 101.0)
    taken = waiting.take(101.0, idle=True, very_idle=True)
    assert taken is not None
    assert taken.request == PAGE
    assert len(waiting) == 0


def test_what_waits_too_long_is_dropped_and_said() -> None:
    waiting = queue()
    waiting.offer(PAGE, "random", 1.0)
    waiting.offer(OTHER, "cold", 0.0)
    assert waiting.take(3.0, idle=False, very_idle=False) is None
    assert waiting.counts().dropped == {"busy": 1}
    assert waiting.take(61.0, idle=True, very_idle=True) is None
    assert waiting.counts().dropped == {"busy": 1, "expired": 1}


def test_the_same_request_waits_once_and_there_is_an_end_to_waiting() -> None:
    waiting = queue()
    assert waiting.offer(PAGE, "cold", 0.0)
    assert not waiting.offer(PAGE, "cold", 0.0)
    for number in range(MOST_COLD + 5):
        waiting.offer(WarmRequest(path=f"/{number}"), "cold", 0.0)
    assert len(waiting) == MOST_COLD
    assert waiting.counts().dropped == {"twice": 1, "full": 6}


def test_a_share_of_nothing_is_none_at_all() -> None:
    waiting = queue(cpu_share=0.0)
    waiting.offer(PAGE, "cold", 0.0)
    assert waiting.take(50.0, idle=True, very_idle=True) is None


def test_cold_work_may_use_what_was_saved_up_and_random_ones_may_not() -> None:
    allowance = Allowance(600, 0.02, 0.0)
    assert not allowance.allows("random", 0.0)
    assert allowance.allows("cold", 0.0)
    assert allowance.allows("random", 1.0)
    allowance.spend(SAVED_CPU / 2, 1.0)
    assert not allowance.allows("random", 2.0)
    assert allowance.allows("cold", 2.0)
    allowance.spend(SAVED_CPU, 2.0)
    assert not allowance.allows("cold", 3.0)
    assert allowance.allows("cold", 3.0 + SAVED_CPU / 0.02)


@given(
    per_minute=st.integers(1, 200),
    share=st.floats(0.001, 1),
    lane=st.sampled_from(["cold", "random"]),
    steps=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2)), max_size=200),
)
def test_no_more_is_spent_than_the_budget_gives(
    per_minute: int, share: float, lane: Lane, steps: list[tuple[float, float]]
) -> None:
    allowance, now, spent, number, largest = Allowance(per_minute, share, 0.0), 0.0, 0.0, 0, 0.0
    for pause, cpu_s in steps:
        now += pause
        if allowance.allows(lane, now):
            allowance.spend(cpu_s, now)
            spent, number, largest = spent + cpu_s, number + 1, max(largest, cpu_s)
    saved = SAVED_CPU if lane == "cold" else 0.0
    assert spent <= saved + share * now + largest + 1e-6
    assert number <= per_minute + per_minute * now / 60 + 1e-6


def test_the_books_add_up() -> None:
    waiting = queue()
    waiting.ran(failed=True, events=[], cpu_s=0.5, now=1.0)
    waiting.ran(failed=False, events=[("import", "a"), ("import", "b"), ("template", "t")], cpu_s=0.25, now=2.0)
    counts = waiting.counts()
    expected = ShadowCounts(done=2, failed=1, cold_requests=1, cold_events={"import": 2, "template": 1}, cpu_s=0.75)
    assert counts == expected
    both = add_counts(
        counts, ShadowCounts(done=1, cold_events={"import": 1, "regex": 1}, dropped={"busy": 1}, waiting=3)
    )
    assert both.cold_events == {"import": 3, "template": 1, "regex": 1}
    assert (both.done, both.failed, both.waiting, both.dropped, both.cpu_s) == (3, 1, 3, {"busy": 1}, 0.75)
