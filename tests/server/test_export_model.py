"""What an export takes from the settings: routes, addresses, figures and their reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import Address
from jumpstart_server.export.model import MARGIN, Figure, longest, reachable, tenants_of, total, with_all_routes
from jumpstart_server.settings import AppSettings, HostSettings, ProfileSettings, Settings, TenantSettings
from tests.server.export_lab import TWO, tenants_from


def settings(name: str = "web", admin: str = "auto", **tenant: Any) -> Settings:
    return Settings(
        app=AppSettings(target="shop:app"),
        tenant=TenantSettings(**tenant),
        profile=ProfileSettings(),
        server=HostSettings(admin=admin),
        tenant_name=name,
    )


def refused(*all_settings: Settings, routes: bool = False, proxy: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        tenants = tenants_of(all_settings)
        if routes:
            tenants = with_all_routes(tenants)
        if proxy:
            reachable(tenants, proxy)
    return str(caught.value)


# -- routes --


def test_routes_are_whole_segments_the_longest_first(tmp_path: Path) -> None:
    web, genai = with_all_routes(tenants_from(tmp_path, TWO))
    assert (web.routes, genai.routes) == (("/",), ("/chat", "/v1"))
    (one,) = tenants_of([settings(routes=("/a/", "/a/b", "/", "/a/b/"))])
    assert one.routes == ("/a/b", "/a", "/")


@pytest.mark.parametrize(
    "route", ["chat", "", "/a//b", "/a b", "/a/*", '/"', "/a;", "/a{", "/../x", "/a/./b", "/%2f", "//"]
)
def test_a_route_that_is_no_path_is_refused(route: str) -> None:
    text = refused(settings("genai", routes=(route,)))
    assert text.startswith(f"[tenants.genai] routes: {route!r} is not allowed; write the begin of a path")


def test_a_route_of_two_tenants_is_refused_with_both_names() -> None:
    text = refused(settings("a", port=1, routes=("/x/",)), settings("b", port=2, routes=("/x",)))
    assert text == "[tenants.a] and [tenants.b] routes: both have /x; leave the path to one of them"


def test_only_one_tenant_may_have_the_rest() -> None:
    text = refused(settings("a", port=1), settings("b", port=2), routes=True)
    assert text.startswith("[tenants.a] and [tenants.b] have no routes; write which paths are theirs: routes = [")
    text = refused(settings("a", port=1, routes=("/",)), settings("b", port=2), routes=True)
    assert text.startswith("[tenants.b] has no routes") and "that of [tenants.a] already" in text


# -- addresses --


def test_where_it_listens_is_not_always_where_it_is_reached() -> None:
    (one,) = tenants_of([settings(bind=("0.0.0.0:80", "[::]:81", "unix:/run/a", "10.0.0.1:1"))])
    assert [str(each) for each in one.addresses] == ["127.0.0.1:80", "[::1]:81", "unix:/run/a", "10.0.0.1:1"]
    assert one.binds[0] == Address(host="0.0.0.0", port=80)


@pytest.mark.parametrize(
    ("tenant", "words"),
    [
        ({"port": 0}, "[tenants.web] port 0 is another one at each start, which nginx cannot know; choose one"),
        ({"fd": 3}, "[tenants.web] bind: nginx cannot tell what fd://3 is; write the socket's address"),
        ({"bind": ("unix:a.sock",)}, "[tenants.web] bind unix:a.sock: nginx needs the whole path"),
        ({"proxy_protocol": "auto"}, "[tenants.web] proxy_protocol = 'auto': what this writes for nginx speaks plain"),
        ({"root_path": "/shop"}, "[tenants.web] root_path /shop is what nginx strips, and routes / are not all under"),
    ],
)
def test_an_address_that_a_proxy_cannot_use_is_refused(tenant: dict[str, Any], words: str) -> None:
    assert refused(settings(**tenant), routes=True, proxy="nginx").startswith(words)


@pytest.mark.parametrize("name", ["a b", "ä", "-a", "a-", "x" * 51, 'a"'])
def test_a_name_that_no_engine_takes_is_refused(name: str) -> None:
    assert refused(settings(name)).startswith(f"[tenants.{name}]: the engines take no such name")


@pytest.mark.parametrize(
    ("admin", "address"),
    [("auto", None), ("off", None), ("127.0.0.1:0", None), ("0.0.0.0:9", "127.0.0.1:9"), ("unix:/a", "unix:/a")],
)
def test_the_admin_pages_are_known_where_their_address_is_fixed(admin: str, address: str | None) -> None:
    (one,) = tenants_of([settings(admin=admin)])
    assert (str(one.admin_address) if one.admin_address else None) == address


def test_a_proxy_that_is_not_believed_is_told() -> None:
    believed = ("127.0.0.1:1", "unix:/a", "localhost:2", "0.0.0.0:3")
    assert tenants_of([settings(bind=believed)])[0].distrust() == ""
    text = tenants_of([settings(bind=("10.0.0.1:1",))])[0].distrust()
    assert "forwarded_allow_ips = '127.0.0.1,::1,unix:' does not name the proxy of 10.0.0.1:1" in text
    assert "proxy_headers is off" in tenants_of([settings(proxy_headers=False)])[0].distrust()


# -- figures --


seconds = st.integers(0, 10_000).map(lambda each: each / 4)


@given(seconds, seconds, seconds, seconds, seconds)
def test_a_proxy_is_more_patient_than_every_limit_of_ours(
    queue: float, timeout: float, extension: float, first: float, idle: float
) -> None:
    (one,) = tenants_of(
        [
            settings(
                queue_timeout=queue,
                timeout=timeout,
                timeout_extension=extension,
                first_byte_timeout=first,
                idle_timeout=idle,
            )
        ]
    )
    time, silence = one.request_time(), one.silence()
    assert (time.value is None) == (not queue or not timeout)
    if time.value is not None:
        assert time.value >= queue + timeout + extension + MARGIN
    if silence.value is not None:
        until_first = first or timeout + extension
        assert silence.value >= queue + until_first + MARGIN
        assert silence.value >= (idle or timeout + extension) + MARGIN
        assert timeout or (first and idle)
    else:
        assert not queue or not timeout


def test_figures_say_where_they_come_from(tmp_path: Path) -> None:
    _, genai = tenants_from(tmp_path, TWO)
    time = genai.request_time()
    assert (time.value, time.text) == (
        715,
        "[tenants.genai] queue_timeout 10 + timeout 600 + timeout_extension 100 + 5",
    )
    assert genai.stop_time() == Figure(130, "[tenants.genai] drain_delay 0 + graceful_timeout 120 + 10")
    assert genai.startup_time().value == 250
    assert genai.memory(spare=1) == Figure(4 << 30, "[tenants.genai] (workers 1 + 1) × memory_limit 2 GiB")
    assert genai.tasks().value == 2 * (500 + 16) + 64
    assert genai.threads == 500 and genai.streams


@given(seconds)
def test_idle_connections_end_before_ours_do(keep_alive: float) -> None:
    (one,) = tenants_of([settings(keep_alive=keep_alive)])
    value = one.idle_connection().value
    assert value is not None and (value < keep_alive or value == keep_alive == 0)


@pytest.mark.parametrize(
    ("tenant", "streams"),
    [
        ({}, False),
        ({"idle_timeout": 5}, True),
        ({"timeout": 0}, True),
        ({"timeout": 61}, True),
        ({"timeout": 60}, False),
    ],
)
def test_who_streams_shows_in_the_envelope(tenant: dict[str, Any], streams: bool) -> None:
    assert tenants_of([settings(**tenant)])[0].streams is streams


def test_figures_add_up_and_the_endless_one_wins() -> None:
    one, two, endless = Figure(1, "a"), Figure(2, "b"), Figure(None, "for ever")
    assert longest([one, two]) == two
    assert longest([one, endless, two]) == total([one, endless]) == endless
    assert total([one, two], more=5, why="c") == Figure(8, "a + b + c")
