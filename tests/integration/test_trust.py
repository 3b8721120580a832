"""Whose profiles a host boots from: keys that are trusted, exchanged and revoked, and what `--trust any` costs."""

from __future__ import annotations

import base64
import stat
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.integration.server import Serve, Server, run_command, write_app

pytestmark = pytest.mark.slow

APP = """
import jumpstart

@jumpstart.cached(ttl=3600, snapshot="value")
def prices(region):
    return {"region": region}

def app(environ, start_response):
    prices("eu")
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]
"""


class Host:
    """A host's state folder, and the commands run on it."""

    def __init__(self, home: Path, app: Path) -> None:
        home.mkdir(exist_ok=True)
        self.home = home
        self.app = app

    def run(self, *words: str, code: int = 0) -> str:
        done: subprocess.CompletedProcess[str] = run_command(*words, home=self.home)
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout

    def build(self, file: Path, requests: Path) -> Path:
        requests.write_text('[[request]]\npath = "/"\n')
        self.run("build", "priced:app", "--app-dir", str(self.app), "--requests", str(requests), "-o", str(file))
        return file


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app", "priced", APP)


@pytest.fixture
def seeder(tmp_path: Path, app: Path) -> Host:
    return Host(tmp_path / "seeder", app)


@pytest.fixture
def consumer(home: Path, app: Path) -> Host:
    return Host(home, app)


def refusals(server: Server) -> dict[str, str]:
    return {refusal["where"]: refusal["reason"] for refusal in server.status()["refusals"]}


def cached(server: Server) -> dict[str, Any] | None:
    boot = server.admin("/boot").json()["tenants"][0]
    return next((section for section in boot["sections"] if section["recorder"] == "cached"), None)


def test_trusting_anybody_works_and_is_said_at_each_boot(
    serve: Serve, seeder: Host, consumer: Host, tmp_path: Path
) -> None:
    file = seeder.build(tmp_path / "a.jumpstart", tmp_path / "warm.toml")
    options = ("--profile", str(file), "--no-warm-start")
    with serve("priced:app", *options, "--trust", "data-only", app_dir=consumer.app) as server:
        assert "needs-trust" in refusals(server).values()
        assert cached(server) is None
    for _ in range(2):
        with serve("priced:app", *options, "--trust", "any", "--require-warm", app_dir=consumer.app) as server:
            section = cached(server)
            assert section is not None and section["used"] == 1
            found = refusals(server)
            assert found["trust"] == "unchecked"
            assert found[f"profile {file.name} signature"] == "unchecked"
            assert set(found.values()) == {"unchecked"}
            assert "[WARNING]" in server.wait_for_line(r".*--trust any: profiles are used whoever made them.*")[0]
            assert "unchecked" in run_command("status", home=consumer.home).stdout
            assert 'jumpstart_boot_refusals{tenant="web",reason="unchecked"}' in server.admin("/metrics").text


def test_keys_are_exchanged_and_revoked(serve: Serve, seeder: Host, consumer: Host, tmp_path: Path) -> None:
    first = seeder.build(tmp_path / "first.jumpstart", tmp_path / "warm.toml")
    public = tmp_path / "first.pub"
    public.write_text(seeder.run("keys", "show"))
    old = seeder.run("keys", "list").split()[0]
    new = seeder.run("keys", "new").split()[0]
    second = seeder.build(tmp_path / "second.jumpstart", tmp_path / "warm.toml")
    (tmp_path / "second.pub").write_text(seeder.run("keys", "show"))
    assert f"{new} own (signs the profiles of this host)" in seeder.run("keys", "list")
    assert f"{old} retired-{old}" in seeder.run("keys", "list")  # what it has signed is good on the seeder

    assert "unknown-key" in consumer.run("keys", "list", str(first), code=1)
    for name in ("first", "second"):
        consumer.run("keys", "trust", str(tmp_path / f"{name}.pub"))
    said = consumer.run("keys", "list", str(first), str(second)).splitlines()
    assert said[0].startswith(f"{first}: {old} first, on ") and said[1].startswith(f"{second}: {new} second, on ")
    shown = consumer.run("profile", "show", str(first))
    assert f"signed by: key {old} (first)" in shown and " on " in shown.splitlines()[2]

    options = ("--no-warm-start", "--profile")
    with serve("priced:app", *options, str(first), "--require-warm", app_dir=consumer.app) as server:
        consumer.run("keys", "revoke", old)
        assert server.get("/").status_code == 200  # it serves on
    assert f"{old} (revoked)" in consumer.run("keys", "list")
    consumer.run("keys", "trust", str(public), code=2)  # nor can it be trusted again by mistake
    with serve("priced:app", *options, str(first), app_dir=consumer.app) as server:
        assert "revoked-key" in refusals(server).values()
    with serve("priced:app", *options, str(second), "--require-warm", app_dir=consumer.app) as server:
        assert refusals(server) == {}

    # The private keys of both hosts: for nobody else to read, and in no profile.
    for host in (seeder, consumer):
        for path in (host.home / "config" / "keys").rglob("*.pem"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    own = (seeder.home / "config" / "keys" / "own.pem").read_bytes()
    raw = load_pem_private_key(own, password=None).private_bytes_raw()  # type: ignore[union-attr]  # it is Ed25519
    with zipfile.ZipFile(second) as archive:
        contents = b"".join(archive.read(name) for name in archive.namelist())
    for secret in (raw, raw.hex().encode(), base64.b64encode(raw)[:-4], own.splitlines()[1]):
        assert secret not in second.read_bytes() + contents
