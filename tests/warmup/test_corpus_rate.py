"""How many new targets the corpus judges: each costs as much as many requests."""

from __future__ import annotations

from jumpstart.recorder import WarmSettings
from jumpstart_warmup.corpus import JUDGED_A_SECOND, JUDGED_AT_ONCE, CorpusRecorder


class Looks:
    """Headers that count who reads them: only who judges does."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Looks:
        self.number += 1
        return self

    def __next__(self) -> tuple[str, str]:
        raise StopIteration


def test_new_targets_are_judged_at_a_bounded_rate_and_known_ones_always_counted() -> None:
    now = 100.0
    corpus = CorpusRecorder(WarmSettings(), clock=lambda: now)
    looks = Looks()
    corpus.observe_request("/hot", "GET", "/hot", looks)
    for number in range(3 * JUDGED_AT_ONCE):
        corpus.observe_request("/item/{}", "GET", f"/item/{number}", looks)
        corpus.observe_request("/hot", "GET", "/hot", looks)
    assert looks.number == JUDGED_AT_ONCE
    now += 2
    for number in range(3 * JUDGED_AT_ONCE):
        corpus.observe_request("/item/{}", "GET", f"/item/1{number}", looks)
    assert looks.number == JUDGED_AT_ONCE + 2 * JUDGED_A_SECOND
    weights = {record.key: record.weight for record in corpus.capture("host")}
    assert weights["GET /hot"] == 3 * JUDGED_AT_ONCE + 1
