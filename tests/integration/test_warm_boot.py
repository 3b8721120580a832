"""A restart on the same host is warm by itself, and nothing that is wrong with its store can stop it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jumpstart.boot import BootSettings
from jumpstart.warmstart import WarmStartCache
from tests.integration.server import TRACEBACK, Serve, Server, wait_until
from tests.integration.shop import (
    LRU,
    PAGES,
    SHOP,
    TWINS,
    boot_report,
    cold_events,
    copy_of_shop,
    reasons,
    running_backend,
    sections,
    visit,
    warnings,
)

pytestmark = pytest.mark.slow

COLD = 5  # at least so many cold events has a cold visit to a few pages


@pytest.fixture(scope="module")
def backend() -> Iterator[dict[str, str]]:
    """The shop's back end, as environment variables for a server."""
    with running_backend() as address:
        yield {"SHOP_BACKEND": address}


def store_of(home: Path) -> Path:
    return home / "cache" / "warm-start"


def stored_targets(home: Path, app_dir: Path, target: str = "shop.web:app") -> set[str]:
    """Paths of the requests in the host's store."""
    key = BootSettings(target=target, app_dir=str(app_dir)).state_key
    state = WarmStartCache(store_of(home)).load(key)
    if state is None or "corpus" not in state.sections:
        return set()
    return {record.data["target"] for record in state.records("corpus")[0]}


# -- warm by itself --


def test_the_second_boot_is_warm_and_stays_so(serve: Serve, backend: dict[str, str]) -> None:
    """No option, no profile: 0 cold events for pages seen before; also by recorders alone, and after an idle run."""
    target = TWINS[0]  # the frameworks have a file of their own
    with serve(target, *LRU, app_dir=SHOP, env=backend) as server:
        assert server.status()["records_used"] == 0
        visit(server)
        cold = cold_events(server)
        assert len(cold) > 40
        assert {name.split(": ")[1].split()[0] for name in cold} >= {"import", "template", "regex", "cache"}
        assert "lru-cache prices" in {name.split(": ")[1] for name in cold}
    with serve(target, *LRU, app_dir=SHOP, env=backend) as server:
        visit(server)
        assert cold_events(server) == []
        status = server.status()
        assert status["sources"] == ["warm-start cache"]
        assert status["warm_coverage"] == 1.0
        assert boot_report(server)["warmup"]["coverage"] == 1.0
    with serve(target, *LRU, app_dir=SHOP, env=backend) as server:
        idle = sections(server)
    with serve(target, *LRU, "--no-replay", app_dir=SHOP, env=backend) as server:
        visit(server)
        assert cold_events(server) == []
        assert boot_report(server)["warmup"]["sent"] == 0
        last = sections(server)
    for name in ("modules", "cached", "jinja", "lru-cache", "corpus"):
        assert last[name]["used"] == last[name]["offered"] >= idle[name]["used"] > 0, name
    # Some patterns of the standard library depend on the hash seed: each process compiles others. Those that nothing
    # asked for are not kept, or the store would grow with each restart.
    assert not dropped_keys(idle["regex"]) & dropped_keys(last["regex"])


def dropped_keys(section: dict[str, Any]) -> set[str]:
    return {record["key"] for record in section["dropped"]}


def test_without_warm_start_nothing_is_written_or_read(serve: Serve, backend: dict[str, str], home: Path) -> None:
    with serve("shop.web:app", "--no-warm-start", app_dir=SHOP, env=backend) as server:
        visit(server, PAGES[:4])
    assert not (home / "cache").exists()
    with serve("shop.web:app", app_dir=SHOP, env=backend) as server:
        visit(server, PAGES[:4])
    before = (store_of(home) / "cache.db").read_bytes()
    with serve("shop.web:app", "--no-warm-start", app_dir=SHOP, env=backend) as server:
        visit(server, PAGES[:4])
        assert len(cold_events(server)) > COLD
        assert server.status()["records_used"] == 0
        assert server.status()["sources"] == []
    assert (store_of(home) / "cache.db").read_bytes() == before


def test_what_one_worker_has_seen_both_know_after_a_restart(serve: Serve, backend: dict[str, str]) -> None:
    with serve("shop.web:app", "-w", "2", app_dir=SHOP, env=backend) as server:
        wait_until(lambda: len(server.worker_pids()) == 2)
        visit_with(server, 0, PAGES[:6])
        visit_with(server, 1, PAGES[6:])
    with serve("shop.web:app", "-w", "2", "--no-replay", app_dir=SHOP, env=backend) as server:
        wait_until(lambda: len(server.worker_pids()) == 2)
        for slot in (0, 1):
            visit_with(server, slot, PAGES)
        assert cold_events(server) == []
        assert server.status(requests=2 * len(PAGES))["requests"] == 2 * len(PAGES)


def visit_with(server: Server, slot: int, pages: tuple[str, ...]) -> None:
    """Visit while only the worker in *slot* of two can answer."""
    other = server.worker_pids()[1 - slot]
    os.kill(other, signal.SIGSTOP)
    try:
        visit(server, pages)
    finally:
        os.kill(other, signal.SIGCONT)


def test_what_was_learnt_survives_kill_9(serve: Serve, backend: dict[str, str], home: Path) -> None:
    """It is in the store some seconds after it was learnt, whatever becomes of worker and supervisor then."""
    pages = {page for page in PAGES if page != "/healthz"}
    with serve("shop.web:app", app_dir=SHOP, env=backend) as server:
        visit(server)
        wait_until(lambda: stored_targets(home, SHOP) >= pages, 15, "everything is in the store")
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: server.worker_pids() not in ([], [worker]), 15, "the worker is replaced")
        server.process.kill()
        server.wait()
    with serve("shop.web:app", "--no-replay", app_dir=SHOP, env=backend) as server:
        visit(server)
        assert cold_events(server) == []


def test_require_warm_wants_something_to_use(serve: Serve, backend: dict[str, str]) -> None:
    with serve("shop.web:app", "--require-warm", app_dir=SHOP, env=backend, wait=False) as server:
        assert server.wait() == 4
        assert "no record was used" in server.stderr
        assert TRACEBACK not in server.stderr
    with serve("shop.web:app", app_dir=SHOP, env=backend) as server:
        visit(server, PAGES[:2])
    with serve("shop.web:app", "--require-warm", app_dir=SHOP, env=backend) as server:
        visit(server, PAGES[:2])
        assert cold_events(server) == []


# -- a store that cannot be used --


def garbage(store: Path) -> None:
    store.mkdir(mode=0o700)
    (store / "cache.db").write_bytes(b"SQLite format 3\0" + os.urandom(8192))


def wrong_mode(store: Path) -> None:
    store.mkdir()
    store.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "code", "heals"),
    [
        (garbage, "damaged", True),
        (wrong_mode, "unsafe-owner", False),
    ],
)
def test_a_bad_store_costs_one_line(
    serve: Serve, backend: dict[str, str], home: Path, spoil: Callable[[Path], None], code: str, heals: bool
) -> None:
    """
    The server serves, says once what is wrong, and a store that is merely broken is replaced by a good one.

    tests/jumpstart/test_warmstart.py knows more ways to spoil it.
    """
    store = store_of(home)
    store.parent.mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    spoil(store)
    with serve("shop.web:app", app_dir=SHOP, env=backend) as server:
        visit(server, PAGES[:2])
        assert code in reasons(server)
    (line,) = warnings(server)
    assert f"warm-start cache: {code}" in line
    assert TRACEBACK not in server.stderr
    if heals:
        with serve("shop.web:app", app_dir=SHOP, env=backend) as server:
            visit(server, PAGES[:2])
            assert cold_events(server) == []
            assert reasons(server) == set()


def test_a_bad_store_is_refused_where_warmth_is_required(serve: Serve, backend: dict[str, str], home: Path) -> None:
    store_of(home).parent.mkdir(parents=True, mode=0o700)
    garbage(store_of(home))
    with serve("shop.web:app", "--require-warm", app_dir=SHOP, env=backend, wait=False) as server:
        assert server.wait() == 4
        assert "warm-start cache: damaged" in server.stderr


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, full but for a page or two."""
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_costs_one_line(serve: Serve, backend: dict[str, str], home: Path, tiny_disk: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "cache").symlink_to(tiny_disk, target_is_directory=True)
    with serve("shop.web:app", app_dir=SHOP, env=backend) as server:
        visit(server)
        server.wait_for_line("not kept for the next start")
        visit(server, PAGES[:2])
    (line,) = warnings(server)
    assert "unreadable" in line
    assert "make room" in line
    assert TRACEBACK not in server.stderr


# -- a new build of the app --


def test_a_changed_template_and_module_cost_only_their_own_records(
    serve: Serve, backend: dict[str, str], tmp_path: Path
) -> None:
    """Reason stale, by name, in the report; everything else is used, and the change is what is served."""
    app = copy_of_shop(tmp_path / "release")
    with serve("shop.web:app", *LRU, app_dir=app, env=backend) as server:
        visit(server)
    about = app / "shop" / "templates" / "about.html"
    about.write_text(about.read_text().replace("{% block", "<!-- changed -->{% block", 1))
    catalog = app / "shop" / "catalog.py"
    catalog.write_text(catalog.read_text() + "\nCHANGED = True\n")
    with serve("shop.web:app", *LRU, "--no-replay", app_dir=app, env=backend) as server:
        found = sections(server)
        visit(server, ["/about"])
        visit(server)
    stale = {
        (name, record["key"])
        for name, section in found.items()
        for record in section["dropped"]
        if record["reason"] == "stale"
    }
    assert ("jinja", "about.html") in stale
    assert {key.partition("(")[0] for name, key in stale if name == "lru-cache"} == {
        "shop.catalog:prices",
        "shop.catalog:related",
    }
    assert {(name, key) for name, key in stale if name not in ("lru-cache", "bytecode")} == {("jinja", "about.html")}
    assert {key.partition("#")[0] for name, key in stale if name == "bytecode"} <= {"shop.catalog"}
    for name in ("modules", "cached", "corpus"):
        assert found[name]["used"] == found[name]["offered"] > 0, name
    assert found["jinja"]["used"] == found["jinja"]["offered"] - 1
