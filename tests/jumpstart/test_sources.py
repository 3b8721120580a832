"""The ready-made sources, on real files and a real server that dies, lies, is slow, flaps and returns garbage."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jumpstart
from jumpstart import sources
from jumpstart.service import Address
from tests.jumpstart.live_lab import Endpoint, endpoint, no_threads_left, wait_until

BAD_MODES = ("500", "404", "204", "html", "number", "garbage", "truncated", "endless", "drip", "hang")


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    with no_threads_left():
        yield


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as made:
        yield made


def quick(fetch: Any, **options: Any) -> jumpstart.Config:
    return jumpstart.Config("flags", fetch, **{"ttl": 0.1, "timeout": 0.3, "boot_timeout": 0.4, **options})


# ---------------------------------------------------------------------- a file


def test_a_file_is_parsed_again_only_where_it_has_changed(tmp_path: Path) -> None:
    path, parsed = tmp_path / "limits.json", []

    def parse(data: bytes) -> Any:
        parsed.append(data)
        return json.loads(data)

    fetch = sources.file(path, parse=parse)
    path.write_text('{"a": 1}')
    assert fetch() is fetch()
    facts = path.stat()
    other = tmp_path / "new"
    other.write_text('{"a": 2}')
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.rename(path)  # of the same size and time, and another inode
    assert fetch() == {"a": 2}
    assert len(parsed) == 2


def test_toml_and_json_are_told_apart_and_faults_name_the_file(tmp_path: Path) -> None:
    toml = tmp_path / "limits.toml"
    toml.write_text("[a]\nb = 1\n")
    assert sources.file(toml)() == {"a": {"b": 1}}
    toml.write_text("[a")
    with pytest.raises(ValueError, match=r"limits\.toml"):
        sources.file(toml)()
    toml.write_bytes(b"a = '\xff'")
    with pytest.raises(ValueError, match=r"limits\.toml"):
        sources.file(toml)()
    large = tmp_path / "large.json"
    large.write_text(json.dumps("x" * 100))
    with pytest.raises(ValueError, match="larger than 50 bytes"):
        sources.file(large, limit=50)()
    with pytest.raises(FileNotFoundError):
        sources.file(tmp_path / "none.json")()


def test_a_file_that_is_half_written_or_gone_costs_no_value(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    path.write_text('{"a": 1}')
    flags = quick(sources.file(path))
    assert flags["a"] == 1
    path.write_text('{"a": 2')
    wait_until(lambda: "flags.json" in flags.info().error)
    path.unlink()
    wait_until(lambda: "FileNotFoundError" in flags.info().error)
    assert flags["a"] == 1
    path.write_text('{"a": 3}')
    wait_until(lambda: flags["a"] == 3)


# ---------------------------------------------------------------------- an HTTP endpoint


def test_an_unchanged_document_is_not_sent_again(server: Endpoint) -> None:
    fetch = sources.http(server.url)
    assert fetch() is fetch()
    assert server.statuses == [200, 304]
    server.values = {"a": 2}
    assert fetch() == {"a": 2}


@pytest.mark.parametrize("mode", BAD_MODES)
def test_bad_answers_are_errors_that_say_what_came(server: Endpoint, mode: str) -> None:
    server.mode = mode
    fetch = sources.http(server.url, timeout=0.3, limit=100_000)
    began = time.monotonic()
    if mode == "number":
        assert fetch() == 7  # `Config` wants a mapping; another parser may not
        return
    with pytest.raises((ValueError, OSError)) as caught:
        fetch()
    assert time.monotonic() - began < 5
    words = {"html": "<!DOCTYPE", "truncated": "10 bytes are missing", "endless": "larger than", "drip": "too long"}
    assert words.get(mode, mode if mode.isdecimal() else "") in str(caught.value)


def test_no_number_and_no_depth_gets_through() -> None:
    for bad in (b"NaN", b"[" * 100_000, b"", b"\xff", b'{"a": Infinity}'):
        with pytest.raises(ValueError, match="no JSON"):
            sources.parse_json(bad)


def test_only_the_web_is_fetched_from() -> None:
    with pytest.raises(ValueError, match="no http or https URL"):
        sources.http("file:///etc/passwd")


@pytest.mark.parametrize("mode", [*BAD_MODES, "dead"])
def test_in_service_bad_answers_cost_no_value_and_no_time(server: Endpoint, mode: str) -> None:
    flags = quick(sources.http(server.url, timeout=0.3, limit=100_000))
    assert flags["a"] == 1
    if mode == "dead":
        server.close()
    server.mode, server.values = mode, {"a": 2}
    worst, failures = 0.0, flags.info().failed
    end = time.monotonic() + 10
    while flags.info().failed < failures + 2:
        began = time.monotonic()
        assert began < end
        assert flags["a"] == 1
        worst = max(worst, time.monotonic() - began)
    assert worst < 0.25
    assert flags.is_stale
    server.mode = "good"
    if mode == "dead":
        server.open()
    wait_until(lambda: flags["a"] == 2)


@pytest.mark.parametrize("mode", [*BAD_MODES, "dead"])
def test_at_boot_bad_answers_are_waited_out_and_what_stands_in_is_used(server: Endpoint, mode: str) -> None:
    if mode == "dead":
        server.close()
    server.mode = mode
    flags = quick(sources.http(server.url, timeout=0.3, limit=100_000), default={"a": 0})
    began = time.monotonic()
    assert flags["a"] == 0
    assert 0.3 < time.monotonic() - began < 3
    assert (flags.info().origin, flags.info().error != "") == ("default", True)
    if mode == "dead":
        server.open()
    server.mode = "good"
    wait_until(lambda: flags["a"] == 1)


def test_a_server_that_comes_up_within_the_time_of_a_boot_is_met(server: Endpoint) -> None:
    server.close()
    flags = quick(sources.http(server.url), boot_timeout=20)
    flags.refresh()
    wait_until(lambda: flags.info().failed)
    server.open()
    assert (flags["a"], flags.info().origin) == (1, "source")


# ---------------------------------------------------------------------- DNS


def test_names_are_looked_up() -> None:
    assert sources.dns("127.0.0.1", 80)() == [Address("127.0.0.1", 80)]
    assert Address("127.0.0.1", 80) in sources.dns("localhost", 80, family=socket.AF_INET)()


def test_a_name_that_is_not_there_resolves_to_none() -> None:
    def unknown(*words: Any, **more: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def down(*words: Any, **more: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        assert sources.dns("none.invalid", 80)() == []
        patch.setattr(socket, "getaddrinfo", down)
        with pytest.raises(socket.gaierror):
            sources.dns("none.invalid", 80)()
