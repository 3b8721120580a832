"""The admin pages say what runs, how warm and why not; on a supervisor that is made up for the purpose."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jumpstart.errors import AddressInUseError, ConfigError, JumpstartError, ProfileRefusedError
from jumpstart.lineage import Lineage
from jumpstart.paths import HostPaths
from jumpstart.profile import Golden, parse_profile
from jumpstart.records import Reason, Record
from jumpstart.report import BootReport, Refusal, SectionReport, Span
from jumpstart.trust import KeyRing
from jumpstart_server.addresses import SUN_PATH_LIMIT, Address
from jumpstart_server.admin import PROFILE_TYPE, admin_address, admin_app, clean_stale, run_folder, serve_admin
from jumpstart_server.cli.status import describe_status
from jumpstart_server.engine import PoolStats
from jumpstart_server.lifecycle import State, Worker
from jumpstart_server.messages import Section, Stats
from jumpstart_server.processes import Launcher, Member
from jumpstart_server.profile_watch import ProfileWatch
from jumpstart_server.questions import Capture
from jumpstart_server.seeding import Seeding
from jumpstart_server.settings import AppSettings, HostSettings, ProfileSettings, Settings, TenantSettings
from jumpstart_server.shadowing import Shadowing
from jumpstart_server.supervisor import Supervisor
from jumpstart_server.tier import Roll, Tier
from jumpstart_warmup.coverage import Coverage
from jumpstart_warmup.observe import ObserverSnapshot, RouteStats

OBSERVED = ObserverSnapshot(
    routes={"GET /": RouteStats(requests=4, cold_requests=1, errors=1, cold_events={"import": 2})},
    warmup={"GET /": RouteStats(requests=9)},
)
GOLDEN = Golden(request="GET /", status=200, shape="0" * 32)
REPORT = BootReport(
    target="js:app", interface="wsgi", sources=["warm-start cache"], start_method="spawn", start_reasons=["thread 'x'"]
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a socket, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as name:
        yield Path(name)


def settings_for(root: Path, admin: str = "auto") -> Settings:
    return Settings(
        app=AppSettings(target="js:app", app_dir=str(root)),
        tenant=TenantSettings(),
        profile=ProfileSettings(),
        server=HostSettings(admin=admin),
        tenant_name="shop",
        home_cache=str(root / "c"),
        home_state=str(root / "s"),
        home_config=str(root / "k"),
    )


class FakeTier:
    """What the pages look at of a tenant."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.accepting: list[Member] = []
        self.members: list[Member] = []
        self.boot: BootReport | None = None
        self.mold_report: BootReport | None = None
        self.mold = None
        self.start_method = "spawn"
        self.ready_after_s: float | None = None
        self.is_up = self.stopping = False
        self.restarts = 0
        self.generation = 1
        self.given_up = ""
        self.last_roll: Roll | None = None
        self.capture_error: JumpstartError | None = None
        self.answers = False
        self.profiles = ProfileWatch(lambda work: work.close())  # no profile is named, so there is no ledger
        self.seeding = Seeding(cast(Tier, self), cast(Launcher, None))
        self.shadowing = Shadowing(lambda: self.members)
        self.coverage = Coverage()

    def serve(self) -> None:
        worker = Member(Worker(0, 1, State.SERVING, pid=41))
        worker.stats = Stats(number=1, observed=OBSERVED, pool=PoolStats(threads=3, busy=1, limit=40))
        self.members = [Member(Worker(1, 1, State.BOOTING)), worker]
        self.accepting = [worker]
        self.boot = self.mold_report = REPORT
        self.ready_after_s = 1.25
        self.is_up = True
        self.coverage.add(None, OBSERVED, time.monotonic())

    def waiting_for(self) -> str:
        return "the app's import"

    def urls(self) -> list[str]:
        return ["http://127.0.0.1:8000"]

    def refusals(self) -> list[Refusal]:
        return [Refusal("profile x", Reason.TOO_OLD, "3 days")]

    def spans(self) -> list[Span]:
        return [Span(name="import the app", process="mold 1", start_s=0.1, duration_s=0.5)]

    async def observed(self) -> ObserverSnapshot:
        if self.answers:
            for member in self.accepting:
                member.stats = Stats(number=2, observed=OBSERVED)
        return OBSERVED

    async def capture(self) -> Capture:
        if self.capture_error is not None:
            raise self.capture_error
        lineage = Lineage().descend("a" * 32)
        sections = {"names": Section(1, "json", [Record(key="a")])}
        return Capture(sections=sections, golden=[GOLDEN], lineage=lineage, observed=OBSERVED)


class FakeSupervisor:
    """What the pages look at."""

    def __init__(self, *tenants: Settings) -> None:
        self.settings = tenants[0]
        self.stopping = False
        self.tiers = {settings.tenant_name: FakeTier(settings) for settings in tenants}

    def uptime_s(self) -> float:
        return 2.5


class Pages:
    def __init__(self, *tenants: Settings) -> None:
        self.supervisor = FakeSupervisor(*tenants)
        self.tier = next(iter(self.supervisor.tiers.values()))

    def __call__(self, path: str, method: str = "GET") -> httpx.Response:
        async def ask() -> httpx.Response:
            app = admin_app(cast(Supervisor, self.supervisor))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path)

        return asyncio.run(ask())

    def tenant(self, path: str) -> dict[str, Any]:
        """The document of the only tenant."""
        (document,) = self(path).json()["tenants"]
        assert isinstance(document, dict)
        return document


@pytest.fixture
def pages(folder: Path) -> Pages:
    return Pages(settings_for(folder))


# -- pages --


def test_a_living_server_says_so_whatever_its_workers_do(pages: Pages) -> None:
    answer = pages("/livez")
    assert (answer.status_code, answer.text) == (200, "ok\n")


def test_not_ready_says_what_it_waits_for_ready_how_many_and_stopping_that(pages: Pages) -> None:
    answer = pages("/readyz")
    assert (answer.status_code, answer.text) == (503, "no worker is ready: the app's import\n")
    pages.tier.serve()
    answer = pages("/readyz")
    assert (answer.status_code, answer.text) == (200, "1 worker ready\n")
    pages.supervisor.stopping = True
    answer = pages("/readyz")
    assert (answer.status_code, answer.text) == (503, "stopping\n")


def test_18_a_server_whose_threads_are_all_busy_for_long_is_alive_and_not_ready(pages: Pages) -> None:
    pages.tier.serve()
    (worker,) = pages.tier.accepting
    pool = PoolStats(threads=4, busy=4, waiting=12, peak=4, limit=4, oldest_wait_s=6.25)
    worker.stats = Stats(number=1, observed=OBSERVED, pool=pool)
    answer = pages("/readyz")
    assert answer.status_code == 503
    assert answer.text == "no thread is free\nworker 0: 4 of 4 threads busy, 12 waiting, the longest for 6.2 s\n"
    assert pages("/livez").status_code == 200
    assert pages.tenant("/status")["workers"][0] | msgspec.structs.asdict(pool) == pages.tenant("/status")["workers"][0]
    assert "busy 4 of 4, waiting 12 up to 6.2 s" in "\n".join(describe_status(pages("/status").json()))
    # As long as one worker has room, the server has.
    other = Member(Worker(1, 1, State.SERVING, pid=42))
    pages.tier.accepting.append(other)
    answer = pages("/readyz")
    assert (answer.status_code, answer.text.partition("\n")[0]) == (200, "2 workers ready")
    assert "worker 0: 4 of 4 threads busy" in answer.text and "worker 1" not in answer.text
    # A short queue is no reason to go elsewhere.
    pages.tier.accepting.remove(other)
    worker.stats = Stats(number=1, observed=OBSERVED, pool=msgspec.structs.replace(pool, oldest_wait_s=4.9))
    answer = pages("/readyz")
    assert (answer.status_code, answer.text) == (200, "1 worker ready\n")


def test_the_boot_page_is_there_from_the_first_moment(pages: Pages) -> None:
    document = pages.tenant("/boot")
    assert document["target"] == "js:app" and document["ready_after_s"] is None and document["start_reasons"] == []
    pages.tier.serve()
    document = pages.tenant("/boot")
    assert document["sources"] == ["warm-start cache"]
    assert (document["start_method"], document["start_reasons"]) == ("spawn", ["thread 'x'"])
    assert document["refusals"] == [{"where": "profile x", "reason": "too-old", "detail": "3 days"}]
    assert document["spans"][0]["name"] == "import the app"


def test_the_status_page_tells_the_workers_and_the_traffic(pages: Pages) -> None:
    document = pages.tenant("/status")
    assert (document["ready"], document["waiting_for"], document["workers"]) == (False, "the app's import", [])
    pages.tier.serve()
    document = pages.tenant("/status")
    assert (document["tenant"], document["target"]) == ("shop", "js:app")
    assert pages("/status").json()["pid"] == os.getpid()
    assert (document["ready"], document["waiting_for"]) == (True, "")
    assert [(worker["slot"], worker["state"], worker["threads"]) for worker in document["workers"]] == [
        (0, "serving", 3),
        (1, "booting", 0),
    ]
    assert (document["requests"], document["errors"]) == (4, 1)
    assert (document["cold_events"], document["warm_coverage"]) == (2, 0.75)
    assert [(each["seconds"], each["warm_coverage"]) for each in document["coverage"]] == [
        (60, 0.75),
        (600, 0.75),
        (3600, 0.75),
    ]


def test_a_worker_that_does_not_answer_is_marked_and_its_numbers_are_old(pages: Pages) -> None:
    pages.tier.serve()
    silent, new = pages.tenant("/status")["workers"]
    assert (silent["stale"], new["stale"]) == (True, False)  # nothing is expected of one that is not ready
    pages.tier.answers = True
    answering, _ = pages.tenant("/status")["workers"]
    assert answering["stale"] is False


def test_the_text_tells_boot_and_traffic_apart_and_counts_errors(pages: Pages) -> None:
    pages.tier.serve()
    text = "\n".join(describe_status(pages("/status").json()))
    assert "\nat boot: warm coverage unknown" in text
    assert "real requests since: 4, errors 1, cold events 2, 75.0% of them warm" in text
    assert "4 × GET /, mean 0.0 ms, errors 1, cold requests 1" in text
    assert "warm requests lately: 75.0% of 4 in 60 s, 75.0% of 4 in 10 min, 75.0% of 4 in 60 min" in text
    assert "  1 of 4 × GET / cold, since 0 s ago, " in text
    assert "worker 0 pid 41 serving, threads 3, busy 1 of 40, does not answer: its numbers are old" in text


def test_the_metrics_page_is_for_prometheus(pages: Pages) -> None:
    pages.tier.serve()
    answer = pages("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    workers = {sample.labels["state"]: sample.value for sample in families["jumpstart_workers"].samples}
    assert workers == {"serving": 1, "booting": 1}
    assert families["jumpstart_pool_threads"].samples[0].value == 3


def test_a_profile_is_captured_by_post_only_and_from_workers_that_serve(pages: Pages, folder: Path) -> None:
    assert pages("/capture").status_code == 405
    assert pages("/capture", "POST").status_code == 503
    pages.tier.serve()
    answer = pages("/capture", "POST")
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROFILE_TYPE)
    profile = parse_profile(
        answer.content,
        trust="signed",
        verify=KeyRing(folder / "k" / "keys").verify,
        now=datetime.now(UTC),
        max_age=timedelta(days=1),
    )
    assert profile.records("names") == ([Record(key="a")], [])
    assert profile.manifest.golden == [GOLDEN]
    assert profile.manifest.lineage == Lineage(generation=1, ancestors=["a" * 32])
    assert profile.manifest.seeding.requests == 4, "warm-up requests do not count"
    pages.tier.capture_error = ConfigError("the key cannot be made")
    answer = pages("/capture", "POST")
    assert (answer.status_code, answer.text) == (500, "the key cannot be made\n")


def test_other_pages_do_not_exist(pages: Pages) -> None:
    assert pages("/").status_code == 404
    assert pages("/status", "POST").status_code == 405


# -- several tenants --


@pytest.fixture
def two(folder: Path) -> Pages:
    shop = settings_for(folder)
    return Pages(shop, msgspec.structs.replace(shop, tenant_name="chat"))


def test_the_server_is_ready_when_every_tenant_has_come_up(two: Pages) -> None:
    shop, chat = two.supervisor.tiers.values()
    shop.serve()
    answer = two("/readyz")
    assert answer.status_code == 503
    assert answer.text == "shop: 1 worker ready\nchat: no worker is ready: the app's import\n"
    assert (two("/readyz/shop").status_code, two("/readyz/chat").status_code) == (200, 503)
    chat.serve()
    assert two("/readyz").status_code == 200
    # From then on one of them is enough: the other's trouble is not this one's.
    chat.accepting.clear()
    assert (two("/readyz").status_code, two("/readyz/chat").status_code) == (200, 503)
    shop.accepting.clear()
    assert two("/readyz").status_code == 503


def test_a_tenant_that_was_given_up_keeps_no_other_from_being_ready(two: Pages) -> None:
    shop, chat = two.supervisor.tiers.values()
    shop.serve()
    chat.given_up = "the app's lifespan start-up failed"
    assert (two("/readyz").status_code, two("/readyz/chat").status_code) == (200, 503)
    shop.given_up, shop.accepting = "it too", []
    assert two("/readyz").status_code == 503
    assert two("/readyz/other").text == "name a tenant at the end of the path: shop, chat\n"


def test_pages_tell_every_tenant(two: Pages) -> None:
    shop, chat = two.supervisor.tiers.values()
    shop.serve()
    chat.serve()
    chat.last_roll = Roll(2, "failed", "importing js failed")
    document = two("/status").json()
    assert [each["tenant"] for each in document["tenants"]] == ["shop", "chat"]
    text = "\n".join(describe_status(document))
    assert "js:app (tenant shop) at" in text and "js:app (tenant chat) at" in text
    assert text.count("last roll, to generation 2: failed, importing js failed") == 1
    assert [each["tenant"] for each in two("/boot").json()["tenants"]] == ["shop", "chat"]
    families = {family.name: family for family in text_string_to_metric_families(two("/metrics").text)}
    assert {sample.labels["tenant"] for sample in families["jumpstart_workers"].samples} == {"shop", "chat"}
    assert two("/capture", "POST").status_code == 404
    assert two("/capture/chat", "POST").status_code == 200


# -- addresses --


def test_by_default_it_is_a_socket_that_only_this_user_can_reach(folder: Path) -> None:
    address = admin_address(settings_for(folder))
    assert address is not None
    path = Path(address.path)
    assert path.name == f"{os.getpid()}.sock" and path.is_relative_to(folder / "s")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_it_can_be_elsewhere_or_off(folder: Path) -> None:
    assert admin_address(settings_for(folder, "off")) is None
    assert admin_address(settings_for(folder, "127.0.0.1:9001")) == Address(host="127.0.0.1", port=9001)
    assert admin_address(settings_for(folder, "unix:/x")) == Address(path="/x")
    with pytest.raises(ConfigError):
        admin_address(settings_for(folder, "unix:"))


def test_where_paths_are_too_long_for_sockets_the_temporary_folder_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    deep, other = folder / ("x" * SUN_PATH_LIMIT), folder / ("y" * SUN_PATH_LIMIT)
    first = run_folder(HostPaths(folder, deep, folder))
    assert len(os.fsencode(first / "1234567890.sock")) <= SUN_PATH_LIMIT
    assert stat.S_IMODE(first.stat().st_mode) == 0o700 == stat.S_IMODE(first.parent.stat().st_mode)
    assert run_folder(HostPaths(folder, deep, folder)) == first != run_folder(HostPaths(folder, other, folder))


def test_a_folder_that_others_may_write_is_not_used(folder: Path) -> None:
    (folder / "s").mkdir()
    (folder / "s" / "run").mkdir()
    (folder / "s" / "run").chmod(0o777)
    with pytest.raises(ProfileRefusedError):
        admin_address(settings_for(folder))


def test_sockets_of_dead_servers_are_removed_and_those_of_living_ones_listed(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "1.sock"))
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(folder / "2.sock"))
        living.listen()
        assert clean_stale(folder) == [folder / "2.sock"]
    assert not (folder / "1.sock").exists()
    assert clean_stale(folder / "none") == []


# -- the server --


def test_it_serves_until_it_is_cancelled_and_leaves_nothing_behind(folder: Path) -> None:
    path = folder / "a.sock"

    async def main() -> None:
        supervisor: Any = FakeSupervisor(settings_for(folder, f"unix:{path}"))
        serving = asyncio.create_task(serve_admin(supervisor))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            while True:
                try:
                    answer = await client.get("/livez")
                    break
                except httpx.ConnectError:
                    assert not serving.done()
                    await asyncio.sleep(0.005)
            assert answer.text == "ok\n"
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    async def limited() -> None:
        await asyncio.wait_for(main(), 20)

    asyncio.run(limited())
    assert not path.exists()


def test_what_dead_servers_left_is_removed_when_one_starts(folder: Path) -> None:
    supervisor: Any = FakeSupervisor(settings_for(folder))
    address = admin_address(supervisor.settings)
    assert address is not None
    left = Path(address.path).with_name("1.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))

    async def main() -> None:
        serving = asyncio.create_task(serve_admin(supervisor))
        async with asyncio.timeout(20):
            while True:
                await asyncio.sleep(0.005)
                if Path(address.path).exists() and not left.exists():
                    break
        assert clean_stale(left.parent) == [Path(address.path)]  # it listens as soon as it is there
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(main())


def test_an_address_that_is_taken_is_said_so_and_left_to_its_owner(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))
        owner.listen()
        supervisor: Any = FakeSupervisor(settings_for(folder, f"unix:{path}"))
        with pytest.raises(AddressInUseError):
            asyncio.run(serve_admin(supervisor))
    assert path.exists()


def test_records_used_are_counted_over_sections(pages: Pages) -> None:
    pages.tier.serve()
    pages.tier.boot = BootReport(target="js:app", sections=[SectionReport(recorder="x", offered=2, used=2)])
    document = pages.tenant("/status")
    assert (document["records_used"], document["records_dropped"]) == (2, {})
