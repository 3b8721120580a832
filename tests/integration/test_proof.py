"""Profiles prove themselves before they are shipped, and a running server ships its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from jumpstart_server.proving import ROUNDS
from tests.integration.server import Serve, is_alive, run_command, wait_until, write_app

APP = """
import atexit, json, os, subprocess

if os.environ.get("SHOP_NOTES"):
    helper = subprocess.Popen(["sleep", "600"])

    def note(text):
        with open(os.environ["SHOP_NOTES"], "a") as notes:
            notes.write(f"{text} {helper.pid}\\n")

    note("booted")
    atexit.register(note, "exited")

def app(environ, start_response):
    import shop_heavy, decimal, xml.dom.minidom
    body = {"path": environ["PATH_INFO"], "price": str(decimal.Decimal(5))}
    if os.environ.get("SHOP_CHANGED"):
        body["news"] = [1]
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(body).encode()]
"""
HEAVY = """
import os
from jumpstart.context import current

if os.environ.get("SHOP_BAD") and current() is None:  # where a profile imports it, and no request does
    os._exit(9)
"""
WARM = '[[request]]\npath = "/"\n[[request]]\npath = "/products"\n'


@pytest.fixture
def app_dir(tmp_path: Path) -> Path:
    write_app(tmp_path / "app", "shop_heavy", HEAVY)
    return write_app(tmp_path / "app", "shop_app", APP)


def test_a_profile_is_published_when_it_is_proven_and_kept_with_the_reason_when_not(
    app_dir: Path, home: Path, tmp_path: Path
) -> None:
    home.mkdir()
    (tmp_path / "warm.toml").write_text(WARM)
    file, store = tmp_path / "x.jumpstart", tmp_path / "store"
    build = ["build", "shop_app:app", "--app-dir", str(app_dir), "--requests", str(tmp_path / "warm.toml")]
    done = run_command(*build, "-o", str(file), "--prove", home=home, env={"SHOP_NOTES": str(tmp_path / "notes")})
    assert done.returncode == 0, done.stderr
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    helpers = [int(pid) for text, pid in notes if text == "booted"]
    assert len(helpers) == 1 + 2 * ROUNDS and [text for text, _ in notes].count("exited") == len(helpers)
    assert not [pid for pid in helpers if is_alive(pid)], "what the app starts ends with its process"
    assert "2 of 2 golden requests answered alike, warm coverage 100%" in done.stdout
    show = run_command("profile", "show", str(file), home=home).stdout
    assert "golden requests: 2" in show and "validation: 2 of 2 golden requests" in show

    publish = ["profile", "publish", str(file), str(store), "--prove", "--app-dir", str(app_dir)]
    done = run_command(*publish, home=home, env={"SHOP_BAD": "1"})
    assert done.returncode == 1 and "boot-failed" in done.stderr
    assert "boot-failed" in (tmp_path / "x.jumpstart.rejected.txt").read_text() and not store.exists()
    done = run_command(*publish, home=home, env={"SHOP_CHANGED": "1"})
    assert done.returncode == 1 and "no-golden" in done.stderr, "the app answers otherwise, with and without it"
    done = run_command(*publish, home=home)
    assert done.returncode == 0 and list(store.rglob("*.jumpstart")), done.stderr

    before = file.read_bytes()
    done = run_command(*build, "-o", str(file), "--prove", "--prove-coverage", "0", "--prove-used", "1",
                       "--prove-routes", "3", home=home)  # fmt: skip
    assert done.returncode == 1 and "drained" in done.stderr
    assert "seed where there is traffic" in done.stderr, "and the remedy"
    assert file.read_bytes() == before and (tmp_path / "x.jumpstart.rejected").exists()


def test_a_server_seeds_from_real_traffic_and_its_consumer_says_where_it_comes_from(
    serve: Serve, app_dir: Path, home: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    seed = ("--seed", "--seed-requests", "8", "--seed-after", "0", "--prove-requests", "8", "--publish", str(store))
    with serve("shop_app:app", *seed, app_dir=app_dir) as server, server.client() as client:
        for number in range(6):
            client.get("/")
            client.get("/healthz")
            client.get("/marked", headers={"X-Jumpstart-Warmup": "1"})
            if number == 5:
                server.status(18)
                client.get("/marked", headers={"X-Jumpstart-Warmup": "1"})
                assert server.status(19)["seeding"]["last"] == "", "13 requests were health checks or marked"
        for _ in range(6):
            client.get("/products")
        seeding = wait_until(lambda: (s := server.status()["seeding"])["last"] and s, 60, "a profile is published")
        assert (seeding["last"], seeding["published"]) == ("published", True), seeding
        assert 'jumpstart_profiles_seeded_total{tenant="web",outcome="published",reason=""} 1' in (
            server.admin("/metrics").text
        )
        server.wait_for_line("seeding: published ")
    (file,) = store.rglob("*.jumpstart")
    show = run_command("profile", "show", "-v", str(file), home=home).stdout
    assert "validation: 2 of 2 golden requests" in show and "GET /products" in show
    assert "healthz" not in show and "/marked" not in show

    run_command("keys", "show", home=home)
    captured = tmp_path / "again.jumpstart"
    with serve("shop_app:app", "--no-warm-start", "--profile", str(store), app_dir=app_dir) as server:
        assert server.get("/").status_code == 200
        server.status(1)
        done = run_command("profile", "capture", "-o", str(captured), home=home)
        assert done.returncode == 0, done.stderr
    show = run_command("profile", "show", str(captured), home=home).stdout
    assert f"lineage: generation 1, captured in a process that booted from {file.stem[:12]}" in show
    assert "GET /products (carried along by 1 profiles)" in show, "warm-up requests are no evidence"
    assert "GET /\n" in show and "shop_heavy (carried along by 1 profiles)" in show


def test_a_profile_that_fails_is_kept_and_serving_goes_on(serve: Serve, app_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("not a folder")
    seed = ("--seed", "--seed-requests", "1", "--seed-after", "0", "--prove-requests", "0")
    with serve("shop_app:app", *seed, "--publish", str(store), app_dir=app_dir) as server:
        server.get("/")
        seeding = wait_until(lambda: (s := server.status()["seeding"])["last"] and s, 60, "it has failed")
        assert seeding["last"] == "failed" and not seeding["published"]
        assert "store" in json.dumps(seeding["lines"])
        assert server.get("/").status_code == 200
        (kept,) = tmp_path.rglob("rejected/*.jumpstart")
        assert str(store) in kept.with_name(kept.name + ".txt").read_text()
        assert f"kept as {kept}" in server.stderr


STUCK = """
import os, pathlib, time

first, second = (pathlib.Path(os.environ["SHOP_NOTES"] + each) for each in ("", ".stuck"))
if first.exists():
    second.touch()
    time.sleep(600)
first.touch()

def app(environ, start_response):
    start_response("200 OK", [])
    return [b"x"]
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_in_the_middle_of_a_proof_leaves_nothing(
    serve: Serve, tmp_path: Path, number: signal.Signals
) -> None:
    seed = ("--seed", "--seed-requests", "1", "--seed-after", "0", "--prove-requests", "0")
    folder, notes = write_app(tmp_path / "app", "stuck", STUCK), tmp_path / "notes"
    store, env = tmp_path / "store", {"SHOP_NOTES": str(notes)}
    with serve("stuck:app", *seed, "--publish", str(store), app_dir=folder, env=env) as server:
        server.get("/")
        wait_until(notes.with_suffix(".stuck").exists, 60, "a consumer boots")
        server.stop(number)
        wait_until(lambda: not server.processes(), 60, "all of its processes end")
    kept = {path for path in tmp_path.rglob("rejected/*") if number == signal.SIGTERM or path.suffix == ".jumpstart"}
    assert not kept and not list(store.rglob("*.jumpstart"))
