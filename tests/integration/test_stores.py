"""Profiles through a store to servers that boot from it: folder, HTTP, S3; and when it is down, or they are bad."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server import Serve, Server, connects, free_port, run_command, wait_until, write_app
from tests.integration.shop import reasons
from tests.jumpstart.store_lab import temporary_files

pytestmark = pytest.mark.slow

TARGET = "js_store_app:app"  # also its name in stores
FOLDER = "js_store_app~3Aapp/web"
APP = """
import os, signal

def app(environ, start_response):
    if environ["PATH_INFO"] == "/bad":
        import js_bad
    if environ["PATH_INFO"] == "/die":
        os.kill(os.getpid(), signal.SIGKILL)
    import js_lazy
    start_response("200 OK", [("Content-Length", "4")])
    return [b"done"]
"""
BAD = """
import os, signal

if "SEEDING" not in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def app_dir(tmp_path: Path) -> Path:
    folder = write_app(tmp_path / "app", "js_store_app", APP)
    write_app(folder, "js_lazy", "")
    return write_app(folder, "js_bad", BAD)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def run(home: Path, *words: str, env: dict[str, str] | None = None, code: int = 0) -> str:
    home.mkdir(exist_ok=True)
    done = run_command(*words, home=home, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def publish(home: Path, app_dir: Path, store: str, *paths: str, build_id: str = "v1", **env: str) -> str:
    """Build a profile with requests for *paths* and publish it; return its id."""
    requests = home.parent / "requests.toml"
    requests.write_text("".join(f'[[request]]\npath = "{path}"\n' for path in paths))
    file = home.parent / "built.jumpstart"
    options = ("--app-dir", str(app_dir), "--requests", str(requests), "--build-id", build_id)
    run(home, "build", TARGET, "-o", str(file), *options, env={"SEEDING": "1"})
    said = run(home, "profile", "publish", str(file), store, env=env)
    return said.rpartition(".jumpstart:")[0].rpartition("/")[2]


def consumer(serve: Serve, app_dir: Path, store: str, *options: str, **more: Any) -> Server:
    words = ("--profile", store, "--build-id", "v1", "--no-warm-start", *options)
    return serve(TARGET, *words, app_dir=app_dir, **more)


def tenant(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.status()
    return found


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# -- a profile that kills --


def test_a_profile_that_kills_is_tried_once_and_the_store_hears_of_it(
    serve: Serve, app_dir: Path, home: Path, store: Path
) -> None:
    bad = publish(home, app_dir, str(store), "/bad")
    with consumer(serve, app_dir, str(store)) as server:  # it boots, without the only profile that there is
        assert server.get("/").text == "done"
        assert server.stderr.count("booting warm failed") == 1, "the mold was to die of it once"
        assert "with another profile" in server.stderr
        assert tenant(server)["sources"] == [] and "crashed" in reasons(server)
        ledger = tenant(server)["boot_ledger"]
        assert (ledger["failures"], ledger["not_loaded"], ledger["loading"]) == (1, [bad], [])
        shown = run(home, "status")
        assert f"boot ledger: profile {bad[:12]} is not loaded here" in shown
        votes = store / FOLDER / "v1" / f"{bad}.votes"
        wait_until(lambda: {path.suffix for path in votes.iterdir()} == {".trial", ".crashed"})
    good = publish(home, app_dir, str(store), "/")
    with consumer(serve, app_dir, str(store)) as server:  # the next start takes the other one
        assert tenant(server)["sources"] == [f"profile {good[:12]} of this build"]
        assert "booting warm failed" not in server.stderr
        assert tenant(server)["boot_ledger"]["loading"] == [{"profile": good, "generation": 1, "ours": True}]
    listed = run(home, "profile", "list", str(store))
    assert f"{bad}.jumpstart: valid" in listed and "0 healthy, 1 crashed" in listed
    # Another host that crashes of it would make it two, and then nobody chooses it.
    (votes / ("f" * 16 + ".crashed")).touch()
    with consumer(serve, app_dir, str(store), home=home.parent / "elsewhere", wait=False) as server:
        server.wait_ready()
        assert server.get("/").text == "done"
        assert tenant(server)["sources"] == []  # that host trusts nobody yet
        assert reasons(server) >= {"unknown-key"}
    assert temporary_files(home) == [] and temporary_files(store) == []


def test_a_server_that_is_killed_at_boot_takes_another_profile_then_none_until_it_is_healthy(
    serve: Serve, app_dir: Path, home: Path, store: Path
) -> None:
    ids = {publish(home, app_dir, str(store), "/") for _ in range(2)}
    loaded = []
    for _ in range(2):
        with consumer(serve, app_dir, str(store)) as server:
            loaded += [each["profile"] for each in tenant(server)["boot_ledger"]["loading"]]
            server.process.kill()
            server.wait()
    assert set(loaded) == ids, "each once"
    with consumer(serve, app_dir, str(store)) as server:
        assert tenant(server)["sources"] == [] and "crashed" in reasons(server)
        assert sorted(tenant(server)["boot_ledger"]["not_loaded"]) == sorted(ids)
        assert "2 boots with a profile have died" in run(home, "status")
        # Ten seconds of serving clear the account; each of them was blamed only once.
        wait_until(lambda: tenant(server)["boot_ledger"]["failures"] == 0, 30)
        assert tenant(server)["boot_ledger"]["not_loaded"] == []
    with consumer(serve, app_dir, str(store)) as server:
        assert len(tenant(server)["sources"]) == 1


def test_a_worker_that_dies_young_is_replaced_by_one_with_another_profile(
    serve: Serve, app_dir: Path, home: Path, store: Path
) -> None:
    ids = {publish(home, app_dir, str(store), "/") for _ in range(2)}
    with consumer(serve, app_dir, str(store)) as server:
        (first,) = tenant(server)["boot_ledger"]["loading"]
        with pytest.raises(httpx.HTTPError):
            server.get("/die")
        wait_until(lambda: server.get("/").text == "done" and tenant(server)["generation"] == 2, 30)
        (second,) = tenant(server)["boot_ledger"]["loading"]
        assert {first["profile"], second["profile"]} == ids and second["generation"] == 2
        assert "the next one loads another profile" in server.stderr
        vote = store / FOLDER / "v1" / f"{second['profile']}.votes"
        wait_until(lambda: {path.suffix for path in vote.iterdir()} == {".trial", ".healthy"}, 30)
        wait_until(lambda: not tenant(server)["boot_ledger"]["loading"], 30, "it has served for a while")
        ledger = tenant(server)["boot_ledger"]
        assert ledger["loading"] == [] and ledger["failures"] == 0
        with pytest.raises(httpx.HTTPError):
            server.get("/die")  # no longer young: its profile is not to blame
        wait_until(lambda: server.get("/").text == "done", 30)
        assert tenant(server)["generation"] == 2 and tenant(server)["boot_ledger"]["failures"] == 0


# -- stores that are away --


def test_over_http_and_when_it_is_down(serve: Serve, app_dir: Path, home: Path, store: Path) -> None:
    id = publish(home, app_dir, str(store), "/")
    with web_server(store) as url:
        with consumer(serve, app_dir, url) as server:
            assert tenant(server)["sources"] == [f"profile {id[:12]} of this build"] and reasons(server) == set()
            assert server.get("/").text == "done"
            assert tenant(server)["start_method"] == "fork"  # no driver's thread is left in the mold
        assert "read-only over HTTP" in run(
            home, "profile", "publish", str(home.parent / "built.jumpstart"), url, code=2
        )
    with consumer(serve, app_dir, url, "--require-warm") as server:  # the copy of last time is used, with a line
        assert tenant(server)["sources"] == [f"profile {id[:12]} of this build"]
        assert reasons(server) == {"store-unreachable"}
        assert "store-unreachable" in server.stderr
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with consumer(serve, app_dir, url, "--profile-fetch-timeout", "0.5") as server:
            assert "it took over 0.5 s" in server.stderr and reasons(server) == {"store-unreachable"}
            assert server.get("/").text == "done"


def test_without_room_for_copies_and_ledger_it_boots_warm_with_reasons(
    serve: Serve, app_dir: Path, home: Path, store: Path
) -> None:
    id = publish(home, app_dir, str(store), "/")
    (home / "cache").write_text("")  # as root the modes of a read-only folder would not keep us out
    (home / "state").mkdir()
    (home / "state" / "ledger").write_text("")
    with consumer(serve, app_dir, str(store)) as server:
        assert tenant(server)["sources"] == [f"profile {id[:12]} of this build"]
        assert reasons(server) <= {"unsafe-owner", "unreadable"} and reasons(server)
        assert "no boot ledger is kept" in server.stderr


# -- commands --


def test_promote_fetch_and_prune(app_dir: Path, home: Path, store: Path, serve: Serve, tmp_path: Path) -> None:
    old = publish(home, app_dir, str(store), "/", build_id="v0")
    publish(home, app_dir, str(store), "/", build_id="v2")
    run(home, "profile", "promote", str(store), "v0")
    run(home, "profile", "promote", str(store), "v9", code=1)
    with consumer(serve, app_dir, str(store), "--build-id", "v3") as server:  # the nearest: all of both applies
        assert len(tenant(server)["sources"]) == 1
    run(home, "profile", "fetch", str(store), "-o", str(tmp_path / "out.jumpstart"))
    assert old in run(home, "profile", "show", str(tmp_path / "out.jumpstart"))
    newest = publish(home, app_dir, str(store), "/", build_id="v2")
    assert "would remove" in run(home, "profile", "prune", str(store), "--keep", "1", "--builds", "1", "--dry-run")
    half = store / FOLDER / "v2" / ("0" * 32 + ".jumpstart")
    half.write_bytes(b"half of one")
    run(home, "profile", "prune", str(store), "--keep", "1", "--builds", "1")
    assert half.exists(), "somebody may be writing it"
    os.utime(half, (0, 0))
    run(home, "profile", "prune", str(store), "--keep", "1", "--builds", "1")
    left = sorted(str(path.relative_to(store / FOLDER)) for path in (store / FOLDER).rglob("*.jumpstart"))
    assert left == [f"latest/{old}.jumpstart", f"v2/{newest}.jumpstart"]
    damaged = tmp_path / "damaged.jumpstart"
    damaged.write_bytes((tmp_path / "out.jumpstart").read_bytes()[:-200])
    assert "damaged" in run(home, "profile", "publish", str(damaged), str(store), code=1)


# -- S3 --


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server that speaks S3, in a process of its own, with an empty bucket; as environment variables."""
    pytest.importorskip("s3fs", reason="s3fs, the extra `s3`, is not installed")
    pytest.importorskip("moto", reason="moto, which has an S3 server, is not installed")
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "s3.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: connects(port) or process.poll() is not None, 60)
            assert process.poll() is None, (tmp_path / "s3.log").read_text()
            url = f"http://127.0.0.1:{port}"
            assert httpx.put(f"{url}/fleet", timeout=30).status_code == 200
            credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
            yield {"AWS_ENDPOINT_URL": url, **credentials}
        finally:
            process.send_signal(signal.SIGKILL)


def test_through_s3(serve: Serve, app_dir: Path, home: Path, s3: dict[str, str]) -> None:
    store = "s3://fleet/profiles"
    old = publish(home, app_dir, store, "/", build_id="v0", **s3)
    id = publish(home, app_dir, store, "/", **s3)
    listed = run(home, "profile", "list", store, env=s3)
    assert listed.count(": valid") == 2
    run(home, "profile", "promote", store, "v0", env=s3)
    with consumer(serve, app_dir, store, "--profile-fetch-timeout", "60", env=s3) as server:
        assert tenant(server)["sources"] == [f"profile {id[:12]} of this build"] and reasons(server) == set()
        assert tenant(server)["start_method"] == "fork"
        with pytest.raises(httpx.HTTPError):
            server.get("/die")
        wait_until(lambda: "1 crashed" in run(home, "profile", "list", store, env=s3), 60)
    run(home, "profile", "prune", store, "--keep", "1", "--builds", "1", env=s3)
    left = run(home, "profile", "list", store, env=s3)
    assert f"v0/{old}" not in left and f"latest/{old}" in left and f"v1/{id}" in left
    with consumer(serve, app_dir, store, env={**s3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}) as server:
        assert reasons(server) >= {"store-unreachable"} and server.get("/").text == "done"
