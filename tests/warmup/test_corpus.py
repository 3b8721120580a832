"""Warm-up requests: the file of the operator, and what may be kept of real traffic."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart.recorder import WarmSettings
from jumpstart.records import Reason, Record, Tally, merge
from jumpstart_warmup.corpus import (
    MAX_PER_ROUTE,
    MAX_ROUTES,
    CorpusRecorder,
    WarmRequest,
    is_opaque,
    read_requests,
    scrub,
)
from jumpstart_warmup.targets import KEPT_HEADERS


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "warm.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_its_requests_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [[request]]
        path = "/product/42?view=full"

        [[request]]
        path = "/größe?q=a b"
        method = "post"
        headers = { Host = "shop.example", X-Tenant = "acme" }
        json = { items = [1, 2], at = 2026-01-02 }
        repeat = 3
        expect_status = 201

        [[request]]
        path = "/raw"
        method = "PUT"
        body = "a=1"
        """,
    )
    first, second, third = read_requests(path)
    assert first == WarmRequest(path="/product/42?view=full")
    assert second.method == "POST"
    assert second.path == "/gr%C3%B6%C3%9Fe?q=a%20b"
    assert ("content-type", "application/json") in second.headers
    assert ("Host", "shop.example") in second.headers
    assert msgspec.json.decode(second.body) == {"items": [1, 2], "at": "2026-01-02"}
    assert (second.repeat, second.expect_status) == (3, 201)
    assert third.body == b"a=1"
    assert third.headers == ()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('path = "x"', ["request 1", "path", "'/'"]),
        ("method = 'GET'", ["request 1", "path is missing"]),
        ('path = "/"\nmethod = "G T"', ["method", "G T"]),
        ('path = "/"\nmethod = "connect"', ["method", "CONNECT"]),
        ('path = "/"\nbody = "a"\njson = 1', ["both body and json"]),
        ('path = "/"\nbody = 1', ["body must be a string"]),
        ('path = "/"\nrepeat = 0', ["repeat", "1 to 10000"]),
        ('path = "/"\nrepeat = 10001', ["repeat", "10001"]),
        ('path = "/"\nrepeat = true', ["repeat"]),
        ('path = "/"\nexpect_status = 99', ["expect_status", "100 to 599"]),
        ('path = "/"\nheader = {}', ["'header'", "headers"]),
        ('path = "/"\nheaders = { X-A = "a\\nb" }', ["X-A", "control"]),
        ('path = "/"\nheaders = { "X A" = "a" }', ["X A"]),
        ('path = "/"\nheaders = { X-A = 1 }', ["X-A", "string"]),
        ('path = "/"\nheaders = 1', ["headers must be a table"]),
        ('path = "/"\nheaders = { Content-Length = "1" }', ["Content-Length"]),
        ('path = "/a\\u0000"', ["control"]),
        ('path = "/a#b"', ["fragment"]),
    ],
)
def test_a_wrong_table_is_named_with_what_is_allowed(tmp_path: Path, table: str, words: list[str]) -> None:
    path = write(tmp_path, f"[[request]]\n{table}\n")
    with pytest.raises(ConfigError) as caught:
        read_requests(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "a = 1", "request = 1", "[request]\npath='/'", "not toml", "request = [1]"])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"warm\.toml"):
        read_requests(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_requests(tmp_path / "latin.toml")


# --- scrubbing


def test_only_content_negotiation_is_kept_of_the_headers() -> None:
    request = scrub(
        "GET",
        "/product/42?page=2",
        [
            (b"Accept", b"text/html"),
            (b"accept", b"text/plain"),
            ("Accept-Language", "de"),
            (b"cookie", b"session=1"),
            (b"authorization", b"Bearer x"),
            (b"user-agent", b"me"),
            (b"host", b"acme.example"),
            (b"accept-encoding", b"x" * 1000),
        ],
    )
    assert request == WarmRequest(
        path="/product/42?page=2", headers=(("accept", "text/html"), ("accept-language", "de"))
    )


def test_the_host_is_kept_only_where_the_operator_listed_it() -> None:
    headers = [(b"host", b"Shop.example")]
    kept = scrub("GET", "/", headers, hosts={"shop.example"})
    assert kept is not None
    assert kept.headers == (("host", "Shop.example"),)
    other = scrub("GET", "/", headers, hosts={"other.example"})
    assert other is not None
    assert other.headers == ()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "get", "OPTIONS", ""])
def test_only_safe_methods_are_recorded(method: str) -> None:
    assert scrub(method, "/", ()) is None


@given(
    st.text(max_size=20) | st.sampled_from(["GET", "HEAD"]),
    st.text(max_size=80).map(lambda text: "/" + text) | st.text(max_size=80),
    st.lists(st.tuples(st.text(max_size=20) | st.sampled_from(sorted(KEPT_HEADERS)), st.text(max_size=20))),
)
def test_scrub_never_raises_and_is_stable(method: str, target: str, headers: list[tuple[str, str]]) -> None:
    request = scrub(method, target, headers)
    if request is not None:
        assert request.method in ("GET", "HEAD")
        assert request.path.isascii() and request.path.isprintable()
        assert {name for name, _ in request.headers} <= KEPT_HEADERS
        assert all(value.isprintable() for _, value in request.headers)
        assert scrub(request.method, request.path, request.headers) == request


@given(st.text(max_size=80))
def test_is_opaque_never_raises(text: str) -> None:
    assert isinstance(is_opaque(text), bool)


@given(st.binary(min_size=16, max_size=32))
def test_hex_of_random_bytes_is_opaque(data: bytes) -> None:
    text = data.hex()
    assert is_opaque(text) or not any(letter.isdigit() for letter in text)


# --- the recorder


def recorder(hosts: Sequence[str] = ()) -> CorpusRecorder:
    return CorpusRecorder(WarmSettings(), hosts=hosts)


def restored(records: list[Record]) -> tuple[CorpusRecorder, Tally]:
    corpus = recorder()
    tally = Tally()
    corpus.restore(None, records, tally)
    return corpus, tally


def test_what_traffic_asked_for_comes_back_by_route_and_frequency() -> None:
    corpus = recorder()
    for target, times in (("/p/1", 3), ("/p/2", 5), ("/", 4), ("/p/3", 1)):
        for _ in range(times):
            corpus.observe_request("/" if target == "/" else "/p/{id}", "GET", target, [(b"accept", b"text/csv")])
    corpus.observe_request("/p/{id}", "GET", "/p/4?token=x", ())
    corpus.observe_request("/p/{id}", "POST", "/p/4", ())
    records = corpus.capture("ship")
    assert [(record.key, record.weight) for record in records] == [
        ("GET /p/2", 5),
        ("GET /", 4),
        ("GET /p/1", 3),
        ("GET /p/3", 1),
    ]
    assert records[0].data == {
        "route": "/p/{id}",
        "method": "GET",
        "target": "/p/2",
        "headers": [["accept", "text/csv"]],
    }
    through_json = msgspec.json.decode(msgspec.json.encode(records), type=list[Record])
    replay, tally = restored(through_json)
    assert tally.used_keys == {record.key for record in records}
    wanted = ["/p/2", "/", "/p/1", "/p/3"]
    assert [request.path for request in replay.requests_for_warmup(10)] == wanted
    assert [request.path for request in corpus.requests_for_warmup(10)] == wanted
    assert [request.path for request in replay.requests_for_warmup(2)] == wanted[:2]
    assert replay.requests_for_warmup(1)[0].headers == (("accept", "text/csv"),)
    assert replay.requests_for_warmup(0) == []


def test_a_restart_neither_doubles_weights_nor_loses_requests() -> None:
    base = [
        Record(key=f"GET /{n}", data={"route": f"/{n}", "method": "GET", "target": f"/{n}", "headers": []}, weight=10)
        for n in range(3)
    ]
    for _ in range(3):  # three restarts of two workers each
        workers = [restored(base)[0] for _ in range(2)]
        for worker in workers:
            worker.observe_request("/0", "GET", "/0", ())
            worker.capture("host")  # captured repeatedly; the last one counts
        base = merge(base, *(worker.capture("host") for worker in workers))
    assert {record.key: record.weight for record in base} == {"GET /0": 16, "GET /1": 10, "GET /2": 10}


def test_restored_requests_that_were_not_seen_again_are_captured_at_weight_0() -> None:
    data = {"route": "/a", "method": "GET", "target": "/a", "headers": []}
    corpus, _ = restored([Record(key="GET /a", data=data, weight=7)])
    (record,) = corpus.capture("host")
    assert (record.key, record.weight) == ("GET /a", 0)
    corpus.observe_request("/a", "GET", "/a", ())
    (record,) = corpus.capture("host")
    assert record.weight == 1
    assert corpus.requests_for_warmup(5)[0].weight == 8


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"route": "/a", "method": "POST", "target": "/a", "headers": []},
        {"route": "/a", "method": "GET", "target": "/b", "headers": []},
        {"route": 1, "method": "GET", "target": "/a", "headers": []},
        {"route": "/a", "method": "GET", "target": "/a", "headers": {}},
        {"route": "/a", "method": "GET", "target": "/a", "headers": [["a"]]},
        {"route": "/a", "method": "GET", "target": "/a", "headers": [["accept", 1]]},
        {"route": "r" * 1000, "method": "GET", "target": "/a", "headers": []},
    ],
)
def test_a_bad_record_costs_that_record(data: dict[str, object]) -> None:
    good = Record(key="GET /g", data={"route": "/g", "method": "GET", "target": "/g", "headers": []})
    corpus, tally = restored([Record(key="GET /a", data=data), good])
    assert [(drop.key, drop.reason) for drop in tally.dropped] == [("GET /a", Reason.MALFORMED)]
    assert [request.path for request in corpus.requests_for_warmup(9)] == ["/g"]


def test_a_route_that_no_message_could_hold_is_spelt_out() -> None:
    corpus = recorder()
    for _ in range(2):
        corpus.observe_request("/\udcff/{}", "GET", "/%FF/1", ())
        corpus.observe_request("/a\udcff", "GET", "/a", ())
    (record,) = corpus.capture("host")
    assert (record.key, record.weight, record.data["route"]) == ("GET /a", 2, "/a\\udcff")
    msgspec.json.encode(record)


def test_a_forged_profile_cannot_smuggle_headers_in() -> None:
    data = {"route": "/", "method": "GET", "target": "/", "headers": [["cookie", "a=b"], ["accept", "text/csv"]]}
    corpus, _ = restored([Record(key="GET /", data=data)])
    assert corpus.requests_for_warmup(1)[0].headers == (("accept", "text/csv"),)


def test_tables_are_bounded_and_the_hot_ones_stay() -> None:
    corpus = recorder()
    for n in range(50):
        for _ in range(50):
            corpus.observe_request("/hot", "GET", "/hot", ())
        corpus.observe_request("/p", "GET", f"/p/{n}", ())
    for n in range(MAX_ROUTES + 100):
        corpus.observe_request(f"/r{n}", "GET", f"/r{n}", ())
    records = corpus.capture("host")
    routes = {record.data["route"] for record in records}
    assert len(routes) == MAX_ROUTES
    assert records[0].key == "GET /hot"
    assert records[0].weight == 50 * 50
    assert sum(record.data["route"] == "/p" for record in records) == MAX_PER_ROUTE
    assert all(record.weight <= 50 * 50 for record in records)
    assert sum(record.weight for record in records if record.data["route"] == "/p") <= 50


def test_too_many_records_are_dropped_with_a_reason() -> None:
    records = [
        Record(key=f"GET /{n}", data={"route": "/{n}", "method": "GET", "target": f"/{n}", "headers": []}, weight=n)
        for n in range(8)
    ]
    corpus, tally = restored(records)
    assert [request.path for request in corpus.requests_for_warmup(99)] == ["/7", "/6", "/5", "/4", "/3"]
    assert {drop.reason for drop in tally.dropped} == {Reason.NOT_APPLICABLE}
    assert len(tally.dropped) == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=200))
def test_weights_never_overcount(seen: list[tuple[int, int]]) -> None:
    corpus = recorder()
    for route, target in seen:
        corpus.observe_request(f"/{route}", "GET", f"/{route}/{target}", ())
    for record in corpus.capture("host"):
        true = sum(f"GET /{route}/{target}" == record.key for route, target in seen)
        assert 1 <= record.weight <= true


def test_threads_lose_no_count() -> None:
    corpus = recorder()

    def work() -> None:
        for n in range(500):
            corpus.observe_request("/a", "GET", f"/a/{n % 3}", ())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(record.weight for record in corpus.capture("host")) == 2000
