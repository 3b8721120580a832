"""`jumpstart.Service`: addresses that are found anew in the background, and what happens when there are none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import jumpstart
from jumpstart import live
from jumpstart.service import Address, Service
from tests.jumpstart.live_lab import Scripted, no_threads_left, wait_until


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    with no_threads_left():
        yield


def quick(resolve: Any, **options: Any) -> Service:
    return Service("inference", resolve, **{"ttl": 0.05, "negative_ttl": 0.05, "boot_timeout": 0.3, **options})


def test_addresses_are_pairs_or_texts_and_follow_their_source() -> None:
    source = Scripted([("10.0.0.1", 80), ["10.0.0.2", 80], "http://c/", ("10.0.0.1", 80)])
    service = quick(source)
    assert service.addresses() == (Address("10.0.0.1", 80), Address("10.0.0.2", 80), "http://c/")
    assert {service.pick() for _ in range(200)} == set(service.addresses())
    assert str(Address("::1", 80)) == "[::1]:80"
    told: list[frozenset[str]] = []
    service.on_change(told.append)
    source.answer = [("10.0.0.2", 80), ("10.0.0.1", 80), "http://c/"]  # turned round, as name servers do
    fetched = service.info().fetched
    wait_until(lambda: service.info().fetched >= fetched + 2)
    assert (service.info().version, told) == (1, [])
    source.answer = [("10.0.0.2", 80), ("10.0.0.3", 80)]
    wait_until(lambda: service.addresses() == (("10.0.0.2", 80), ("10.0.0.3", 80)))
    wait_until(lambda: told == [{"10.0.0.1:80", "10.0.0.3:80", "http://c/"}])


def test_the_function_is_given_the_name_where_it_asks_for_one() -> None:
    assert quick(lambda name: [(name, 1)]).addresses() == (("inference", 1),)
    assert quick(lambda name="other": [(name, 1)]).addresses() == (("other", 1),)


@pytest.mark.parametrize("bad", [[], "10.0.0.1:80", None, [("10.0.0.1",)], [("h", 0)], [("h", True)], OSError("down")])
def test_stale_addresses_are_used_while_the_source_fails_or_finds_none(bad: Any) -> None:
    source = Scripted([("a", 1)])
    service = quick(source)
    assert service.pick() == ("a", 1)
    source.answer = bad
    wait_until(lambda: service.info().failures >= 2 and service.is_stale)
    assert service.pick() == ("a", 1)
    source.answer = [("b", 1)]
    wait_until(lambda: service.pick() == ("b", 1))


def test_stale_addresses_may_have_an_end() -> None:
    source = Scripted([("a", 1)])
    service = quick(source, stale_ttl=0.1)
    assert service.pick() == ("a", 1)
    source.answer = OSError("registry down")
    wait_until(lambda: service.info().age_s >= 0.16)  # type: ignore[operator]  # it was fetched
    with pytest.raises(jumpstart.SourceUnavailable, match="s old"):
        service.pick()


def test_none_found_is_an_answer_that_is_kept_and_nobody_waits_for_another() -> None:
    source = Scripted([])
    service = quick(source, negative_ttl=60, boot_timeout=0.2)
    for limit in (5.0, 0.2, 0.2):
        began = time.monotonic()
        with pytest.raises(jumpstart.SourceUnavailable, match="resolved to no address"):
            service.addresses()
        assert time.monotonic() - began < limit
    assert source.calls == 1


def test_an_address_that_failed_is_left_out_for_a_while_but_never_all() -> None:
    source = Scripted([("a", 1), ("b", 1)])
    service = quick(source, ttl=60)
    assert len(service.addresses()) == 2
    service.report_failure(("a", 1), seconds=0.3)
    wait_until(lambda: source.calls == 2)  # and is looked up again
    assert {service.pick() for _ in range(50)} == {("b", 1)}
    assert len(service.addresses()) == 2
    service.report_failure(("b", 1))
    assert {service.pick() for _ in range(200)} == {("a", 1), ("b", 1)}
    wait_until(lambda: {service.pick() for _ in range(50)} == {("a", 1)})


def test_defaults_and_profiles_stand_in() -> None:
    live.offer("service", "inference", [["p", 1], "http://q/"], 60)
    assert quick(Scripted(OSError("down")), default=[("d", 1)]).addresses() == (("d", 1),)
    service = quick(Scripted(OSError("down")), default=[("d", 1)], snapshot="value", stale_ttl=0.01)
    assert service.addresses() == (Address("p", 1), "http://q/")
    assert service.info().origin == "profile"


@pytest.mark.parametrize("options", [{"negative_ttl": 0}, {"stale_ttl": -1}, {"ttl": 0}, {"default": "host:1"}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Service("inference", list, **options)
