"""What the log says of a worker that died, and how numbers are worded."""

from __future__ import annotations

import pytest

from jumpstart_server.messages import Beat
from jumpstart_server.tier import count, last_seen


@pytest.mark.parametrize(
    ("beat", "oom_kills", "said"),
    [
        (None, 0, ""),
        (Beat(rss=54 << 20, in_flight=3), 0, " · seen last 0.4 s before with 54 MiB resident, 3 requests in flight"),
        (Beat(rss=0, in_flight=1), 0, " · seen last 0.4 s before with 1 request in flight"),
        (None, 1, " · the kernel has killed 1 process of this control group for want of memory"),
        (
            Beat(rss=3 << 30, in_flight=0),
            2,
            " · seen last 0.4 s before with 3 GiB resident, 0 requests in flight"
            " · the kernel has killed 2 processes of this control group for want of memory",
        ),
    ],
)
def test_85_a_death_is_told_with_all_that_may_explain_it(beat: Beat | None, oom_kills: int, said: str) -> None:
    assert last_seen(beat, 0.42, oom_kills) == said


def test_one_is_no_plural() -> None:
    assert [count(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
