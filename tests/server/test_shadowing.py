"""Who repeats what, and who listens."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jumpstart_server.lifecycle import State, Worker
from jumpstart_server.messages import MetCold, Sampled, SampleRate, Shadow
from jumpstart_server.processes import Member
from jumpstart_server.settings import TenantSettings
from jumpstart_server.shadowing import MOST_UNREAD, RECENT_FOR, Relay, Shadowing
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.sampling import Cold, Sample


def cold(route: str = "GET /shop", *names: str, path: str = "/shop") -> Cold:
    return Cold(WarmRequest(path=path), route, tuple(("import", name) for name in names or ("decimal",)))


def sample(draw: float, path: str = "/shop", **more: Any) -> Sample:
    return Sample(WarmRequest(path=path, **more), "GET /shop", 200, 1.0, draw)


def test_cold_work_is_shared_once_with_all_others() -> None:
    relay: Relay[str] = Relay()
    assert relay.share(cold(), ["b", "c", "d"], 0.0) == ["b", "c", "d"]
    assert relay.share(cold(), ["a", "c", "d"], 1.0) == []
    assert relay.share(cold("GET /shop", "decimal", "email"), ["a", "c"], 2.0) == ["a", "c"]
    assert relay.share(cold(), ["b"], 1000.0) == ["b"]
    assert (relay.shared, relay.sent["cold"], relay.dropped) == (3, 6, {"known": 1})


def test_a_lone_worker_has_nobody_to_share_with_but_the_next_one_hears_of_it() -> None:
    relay: Relay[str] = Relay()
    assert relay.share(cold(), [], 0.0) == []
    assert relay.pick([]) is None
    assert relay.dropped == {"alone": 2}
    assert relay.recent(1.0) == [WarmRequest(path="/shop")]
    assert relay.recent(RECENT_FOR + 1) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["/a", "/b"]), st.integers(0, 4), st.floats(0, 20))))
def test_each_worker_is_sent_an_event_of_a_route_at_most_once_in_a_while(
    meetings: list[tuple[int, str, int, float]],
) -> None:
    relay: Relay[int] = Relay()
    sent: dict[tuple[int, str, int], float] = {}
    now = 0.0
    for origin, route, event, pause in meetings:
        now += pause
        others = [worker for worker in range(4) if worker != origin]
        for worker in relay.share(cold(route, str(event), path=route), others, now):
            assert worker != origin
            assert now - sent.get((worker, route, event), -1e9) >= 300
            sent[worker, route, event] = now
    assert len(relay.recent(now)) == len({route for _, route, _, _ in meetings})


def test_random_ones_take_turns() -> None:
    relay: Relay[str] = Relay()
    assert sorted(str(relay.pick(["a", "b", "c"])) for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


class Heard(Member):
    def __init__(self, slot: int) -> None:
        super().__init__(Worker(slot, 1, State.SERVING))
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)


def test_a_tenant_relays_and_listens() -> None:
    async def scene() -> None:
        workers = [Heard(0), Heard(1), Heard(2)]
        shadowing = Shadowing(lambda: workers)
        for worker in workers:
            shadowing.accepts(worker, TenantSettings(shadow=0.1))
            assert worker.heard.pop() == SampleRate(0.1, 8)
        shadowing.met(workers[0], MetCold(cold()), 0.0)
        assert [worker.heard for worker in workers] == [[], *[[Shadow(WarmRequest(path="/shop"), "cold")]] * 2]
        for worker in workers:
            worker.heard.clear()

        with shadowing.subscribe(0.5) as half, shadowing.subscribe(0.05) as little:
            assert workers[0].heard == [SampleRate(0.5, 1000)]
            listed = sample(0.0, "/search", method="POST", body=b"{}")
            shadowing.sampled(workers[0], Sampled([sample(0.4), sample(0.01), listed], lost=3))
            assert await anext(half) == [sample(0.4), sample(0.01)]
            assert await anext(little) == [sample(0.01)]
            assert (half.dropped, little.dropped) == (3, 3)
            sent = [message for worker in workers[1:] for message in worker.heard if isinstance(message, Shadow)]
            assert {message.request.path for message in sent} == {"/shop", "/search"}
            assert shadowing.sent() == {"cold": 2, "random": 2}
            shadowing.sampled(workers[0], Sampled([sample(0.3)] * (MOST_UNREAD + 5)))
            assert half.dropped == 8
            waiting = asyncio.ensure_future(anext(little))
            await asyncio.sleep(0)
            shadowing.end()
            await asyncio.wait({waiting})
            assert isinstance(waiting.exception(), StopAsyncIteration)
            assert [len(batch) async for batch in half] == [MOST_UNREAD]
        assert workers[0].heard[-1] == SampleRate(0.1, 8)
        assert shadowing.describe()["subscribers"] == 0

    asyncio.run(scene())


def test_the_fraction_is_what_was_last_asked_for_also_for_workers_that_come_later() -> None:
    workers = [Heard(0), Heard(1)]
    shadowing, settings = Shadowing(lambda: workers), TenantSettings(shadow=0.1)
    for worker in workers:
        shadowing.accepts(worker, settings)
    assert shadowing.shadow(0.0, settings) == 0.0
    assert [worker.heard[-1] for worker in workers] == [SampleRate(0.0, 8)] * 2
    shadowing.sampled(workers[0], Sampled([sample(0.0)]))  # drawn before, and on its way
    assert shadowing.sent()["random"] == 0
    assert shadowing.shadow(0.5, settings) == 0.5
    late = Heard(2)
    shadowing.accepts(late, settings)
    assert late.heard == [SampleRate(0.5, 8)]
    assert shadowing.shadow(0.5, TenantSettings(replay=False)) == 0.0


def test_nothing_is_drawn_where_nothing_may_be_repeated() -> None:
    worker = Heard(0)
    shadowing = Shadowing(lambda: [worker])
    shadowing.accepts(worker, TenantSettings(shadow=1.0, replay=False))
    assert worker.heard == []
