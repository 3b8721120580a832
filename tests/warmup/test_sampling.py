"""Which real requests are told of: those that met cold work, once, and a sample."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.context import RequestContext
from jumpstart.errors import ConfigError
from jumpstart_warmup.observe import Observer
from jumpstart_warmup.sampling import MAX_BODY, MAX_COLD, Cold, Lookout, Memory, UnderWay, parse_routes
from jumpstart_warmup.traffic import USER_AGENT

HEADERS = [(b"accept", b"text/html"), (b"cookie", b"who=me"), (b"authorization", b"Basic x")]
COLD = [("import", "decimal")]


def lookout(**more: Any) -> tuple[Lookout, list[None]]:
    woken: list[None] = []
    return Lookout(wake=lambda: woken.append(None), clock=lambda: 0.0, **more), woken


def met(told: Lookout, route: str = "/shop", target: bytes = b"/shop", **more: Any) -> list[Cold]:
    values = {"events": COLD, "method": "GET", "headers": HEADERS, "status": 200, **more}
    told.met(route, target=target, **values)
    return told.take_cold()


def test_a_request_that_met_cold_work_is_told_of_once_and_scrubbed() -> None:
    told, woken = lookout()
    (cold,) = met(told)
    assert (cold.route, cold.events, cold.request.name) == ("GET /shop", (("import", "decimal"),), "GET /shop")
    assert cold.request.headers == (("accept", "text/html"),)
    assert len(woken) == 1
    assert met(told, target=b"/shop?page=2") == []
    assert len(met(told, events=[*COLD, ("template", "x.html")])) == 1
    assert len(met(told, route="/other", target=b"/other")) == 1


def test_a_request_has_its_own_headers_and_no_others_are_held() -> None:
    """A path may be cold in one language only; and a thousand that wait may not hold a megabyte each."""
    told, _ = lookout()
    told.rate = 1.0
    for language in (b"de", b"fr"):
        headers = [(b"accept-language", language), *HEADERS, (b"x-large", b"x" * 8000), (b"accept", b"x" * 8000)]
        told.passed("/shop", "GET", b"/shop", headers, 200)
        assert len(msgspec.json.encode(told._samples[-1].headers)) < 100
    told.passed("/shop", "GET", b"/shop?q=" + b"x" * 4000, HEADERS, 200)
    languages = [dict(each.request.headers)["accept-language"] for each in told.take_samples()]
    assert languages == ["de", "fr"]


def test_what_finds_no_room_is_news_again() -> None:
    told, _ = lookout()
    routes = [f"/page-{number}" for number in range(MAX_COLD + 1)]
    for route in routes:
        told.met(route, COLD, "GET", b"/shop", HEADERS, 200)
    assert len(told.take_cold()) == MAX_COLD
    assert len(met(told, routes[-1])) == 1


def test_what_another_server_mirrors_is_no_sample_even_without_its_mark() -> None:
    """A proxy may drop headers that it does not know; two servers that mirror each other must not make a loop of it."""
    told, _ = lookout()
    told.rate = 1.0
    told.passed("/shop", "GET", b"/shop", [(b"user-agent", USER_AGENT.encode())], 200)
    assert told.take_samples() == []


def test_what_may_not_be_repeated_is_not_told_of() -> None:
    told, _ = lookout()
    assert met(told, method="POST") == []
    assert met(told, status=500) == []
    assert met(told, status=404) == []
    assert met(told, target=b"/reset?token=abcd") == []
    assert met(told, route="/healthz", target=b"/healthz") == []
    silent, woken = lookout(tells_cold=False)
    assert met(silent) == []
    assert woken == []


def test_a_listed_route_is_told_of_with_its_body_and_the_type_of_that() -> None:
    told, _ = lookout(routes=["POST /search"])
    typed = [*HEADERS, (b"content-type", b"application/json")]
    (cold,) = met(told, "/search", b"/search", method="POST", headers=typed, body=b"{}")
    assert cold.request.body == b"{}"
    assert cold.request.headers == (("accept", "text/html"), ("content-type", "application/json"))
    assert told.methods == {"POST"}
    large, _ = lookout(routes=["POST /search"])
    assert met(large, "/search", b"/search", method="POST", body=b"x" * (MAX_BODY + 1)) == []
    assert met(told, "/cart", b"/cart", method="POST") == []
    assert met(told, "/search", b"/search", method="DELETE") == []


@pytest.mark.parametrize("route", ["search", "POST", "POST search", "post /search", "GET /search", "POST  /x", ""])
def test_what_is_no_route_is_refused_by_name(route: str) -> None:
    assert parse_routes(["POST /search", "QUERY /a/{id}"]) == {"POST /search", "QUERY /a/{id}"}
    with pytest.raises(ConfigError, match=r"--shadow-route: '.*' must be a method and a path"):
        parse_routes(["POST /ok", route], option="--shadow-route")


def test_a_sample_is_drawn_and_old_ones_make_room() -> None:
    draws = iter([0.05, 0.2, 0.09, *[0.0] * 1500])
    told, _ = lookout(draw=lambda: next(draws))
    told.rate = 0.1
    for number in range(3):
        told.passed(None, "GET", b"/page/%d" % number, HEADERS, 200)
    samples = told.take_samples()
    assert [(each.request.path, each.draw) for each in samples] == [("/page/0", 0.05), ("/page/2", 0.09)]
    assert told.take_samples() == []
    for _ in range(1100):
        told.passed("/page/{id}", "GET", b"/page/7", HEADERS, 200)
    assert told.lost == 100
    assert sum(len(told.take_samples(300)) for _ in range(5)) == 1000


def test_the_observer_tells_of_real_requests_only() -> None:
    told, _ = lookout()
    observer = Observer()
    observer.lookout = told
    told.rate = 1.0
    values: dict[str, Any] = {"method": "GET", "target": b"/shop", "headers": HEADERS, "status": 200, "elapsed_s": 0.1}
    observer.count(RequestContext(events=list(COLD)), **values, evidence=True)
    assert [cold.route for cold in told.take_cold()] == ["GET /shop"]
    assert len(told.take_samples()) == 1
    # Marked by whoever sent it: it may warm the others here, but is no sample of the traffic.
    observer.count(RequestContext(events=[("template", "a")]), **values, evidence=False)
    assert len(told.take_cold()) == 1
    assert told.take_samples() == []
    observer.count(RequestContext(), **values, evidence=True)
    assert told.take_cold() == []
    observer.count(RequestContext(warmup=True, events=[("template", "b")]), **values, evidence=False)
    assert told.take_cold() == []


def test_a_request_that_takes_long_is_told_of_before_its_end_and_once() -> None:
    told, _ = lookout(routes=["POST /search"])
    observer = Observer()
    observer.lookout = told
    context = RequestContext(events=list(COLD))
    stream = UnderWay(context, "GET", b"/stream/7000?page=2", HEADERS, 200, None)
    others = [
        UnderWay(RequestContext(), "GET", b"/warm", HEADERS, 200, None),
        UnderWay(context, "POST", b"/search", HEADERS, 200, None),  # its body may not be whole
    ]
    observer.look([stream, *others])
    (cold,) = told.take_cold()
    assert (cold.route, cold.events) == ("GET /stream/{}", (("import", "decimal"),))
    observer.look([stream])
    values: dict[str, Any] = {"headers": HEADERS, "status": 200, "elapsed_s": 60.0, "evidence": True}
    observer.count(context, method="GET", target=stream.target, **values)
    assert told.take_cold() == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.floats(0, 50))))
def test_an_event_is_news_once_in_a_while(meetings: list[tuple[str, str, float]]) -> None:
    memory, last, now = Memory(again_after_s=60.0), dict[tuple[str, str], float](), 0.0
    for route, event, pause in meetings:
        now += pause
        expected = now - last.get((route, event), -1e9) >= 60.0
        assert memory.is_news(route, [("kind", event)], now) is expected
        if expected:
            last[route, event] = now


def test_a_memory_is_bounded() -> None:
    memory = Memory(limit=10)
    for number in range(100):
        assert memory.is_news("route", [("import", str(number))], 0.0)
    assert memory.is_news("route", [("import", "0")], 0.0)  # forgotten
    assert not memory.is_news("route", [("import", "99")], 0.0)
