"""Profiles that this server makes can be read by it, and a builder that fails says why."""

from __future__ import annotations

import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from jumpstart.errors import AppLoadError, ColdBootRefusedError, ConfigError, JumpstartError
from jumpstart.profile import read_profile
from jumpstart.records import Record
from jumpstart.report import BootReport
from jumpstart.trust import KeyRing
from jumpstart_server.messages import (
    BlockingChannel,
    BootFailed,
    Captured,
    Hello,
    Message,
    Section,
    WorkerReady,
    encode,
)
from jumpstart_server.profiles import Built, _await_capture, build, pack
from jumpstart_server.settings import AppSettings, HostSettings, ProfileSettings, Settings, TenantSettings
from jumpstart_warmup.observe import ObserverSnapshot, RouteStats

APPS = Path(__file__).parents[1] / "apps"
NOW = datetime.now(UTC)


def settings_for(root: Path, target: str, app_dir: Path) -> Settings:
    return Settings(
        app=AppSettings(target=target, app_dir=str(app_dir)),
        tenant=TenantSettings(startup_timeout=60),
        profile=ProfileSettings(),
        server=HostSettings(),
        tenant_name="shop",
        home_cache=str(root / "cache"),
        home_state=str(root / "state"),
        home_config=str(root / "config"),
    )


def test_a_packed_profile_is_signed_by_this_host_and_says_where_it_comes_from(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "js_site:app", tmp_path)
    (tmp_path / "js_site.py").write_text("app = 1\n")
    record = Record(key="k", data={"code": b"\0"}, weight=3)
    observed = ObserverSnapshot(
        routes={"GET /": RouteStats(requests=4, cold_requests=1)}, warmup={"GET /warm": RouteStats(requests=2)}
    )
    sections = {"code": Section(2, "msgpack", [record]), "names": Section(1, "json", [Record(key="n")])}
    path = tmp_path / "x.jumpstart"
    path.write_bytes(pack(settings, sections, observed, 1.23456, NOW))
    verify = KeyRing(tmp_path / "config" / "keys").verify
    profile = read_profile(path, trust="signed", verify=verify, now=NOW, max_age=timedelta(days=1))
    assert profile.trusted and profile.refusals == []
    assert profile.records("code") == ([record], [])
    assert profile.sections["code"].info.version == 2
    manifest = profile.manifest
    assert (manifest.tenant, manifest.app.target) == ("shop", "js_site:app")
    assert manifest.app.sources.startswith("sha256:") and manifest.app.distributions.startswith("sha256:")
    assert manifest.seeding is not None
    seeding = manifest.seeding
    assert (seeding.requests, seeding.routes, seeding.duration_s, seeding.warm_coverage) == (4, 1, 1.235, 0.75)


def test_a_record_that_cannot_be_encoded_costs_only_itself(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "a:b", tmp_path)
    sections = {"names": Section(1, "json", [Record(key="a"), Record(key="b", data={"x": object()})])}
    path = tmp_path / "x.jumpstart"
    path.write_bytes(pack(settings, sections, ObserverSnapshot(), 0.0, NOW))
    verify = KeyRing(tmp_path / "config" / "keys").verify
    profile = read_profile(path, trust="signed", verify=verify, now=NOW, max_age=None)
    assert [record.key for record in profile.records("names")[0]] == ["a"]


# -- what a builder says --

CAPTURED = Captured(number=0, sections={}, observed=ObserverSnapshot(), failures=["GET /: 500"])


def hear(tmp_path: Path, *messages: Message, tail: bytes = b"") -> Captured:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            speaker = threading.Thread(target=theirs.sendall, args=(b"".join(map(encode, messages)) + tail,))
            speaker.start()
            speaker.join()
        return _await_capture(BlockingChannel(ours), settings_for(tmp_path, "a:b", tmp_path))


def test_what_was_captured_counts_even_if_the_builder_dies_after(tmp_path: Path) -> None:
    ready = WorkerReady(report=BootReport(target="a:b"))
    assert hear(tmp_path, Hello(1), ready, CAPTURED) == CAPTURED
    assert hear(tmp_path, Hello(1), CAPTURED, tail=b"\0\0") == CAPTURED


def test_a_builder_that_dies_before_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AppLoadError, match="ended before it had captured anything"):
        hear(tmp_path, Hello(1))


@pytest.mark.parametrize(
    ("code", "error"), [(2, ConfigError), (3, AppLoadError), (4, ColdBootRefusedError), (1, JumpstartError)]
)
def test_a_builder_that_cannot_boot_is_heard_with_its_kind_of_error(
    tmp_path: Path, code: int, error: type[JumpstartError]
) -> None:
    with pytest.raises(error, match="the traceback") as caught:
        hear(tmp_path, BootFailed(exit_code=code, text="the traceback"))
    assert type(caught.value) is error


def test_a_build_succeeds_when_nothing_failed_and_something_was_taught() -> None:
    def built(requests: int, failures: int = 0, rejected: int = 0) -> bool:
        return Built(b"", {}, requests, ["x"] * failures, ["y"] * rejected).succeeded

    assert built(0) and built(3) and built(3, rejected=2)
    assert not built(3, failures=1) and not built(3, rejected=3)


# -- real builders --


@pytest.mark.slow
def test_an_app_is_built_cold_from_a_file_of_requests(tmp_path: Path) -> None:
    requests = tmp_path / "warm.toml"
    requests.write_text('[[request]]\npath = "/"\n[[request]]\npath = "/lazy"\n[[request]]\npath = "/fail"\n')
    app = tmp_path / "app"
    app.mkdir()
    (app / "js_lazy.py").write_text("VALUE = b'lazy'\n")
    (app / "js_built.py").write_text(
        "def app(environ, start_response):\n"
        "    if environ['PATH_INFO'] == '/fail':\n        raise ValueError\n"
        "    if environ['PATH_INFO'] == '/lazy':\n        import js_lazy\n"
        "    start_response('200 OK', [])\n    return [b'x']\n"
    )
    built = build(settings_for(tmp_path, "js_built:app", app), str(requests))
    assert built.requests == 3
    assert len(built.failures) == 1 and "/fail" in built.failures[0]
    assert "js_lazy" in [record.key for record in built.sections["modules"].records]
    path = tmp_path / "x.jumpstart"
    path.write_bytes(built.data)
    verify = KeyRing(tmp_path / "config" / "keys").verify
    profile = read_profile(path, trust="signed", verify=verify, now=datetime.now(UTC), max_age=timedelta(days=1))
    assert set(profile.sections) == set(built.sections)


@pytest.mark.slow
def test_an_app_that_cannot_be_imported_ends_the_builder_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "js_raises.py").write_text("raise RuntimeError('no database')\n")
    with pytest.raises(AppLoadError, match="no database"):
        build(settings_for(tmp_path, "js_raises:app", tmp_path), "")
