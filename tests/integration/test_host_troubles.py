"""A full disk, a home that cannot be written, a clock that is a year off: the server serves, and gives a reason."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumpstart.trust import KeyRing
from tests.integration.fleet import Fleet
from tests.integration.server import TRACEBACK, Server
from tests.integration.shop import reasons

pytestmark = pytest.mark.slow

# Every process of the server has a clock that is so many days off: `datetime.now` and `time.time`.
CLOCK = """
import ctypes, datetime, gc, os, time

if "DAYS_OFF" in os.environ:
    seconds = float(os.environ["DAYS_OFF"]) * 86_400
    real, real_time = datetime.datetime.now, time.time
    methods = gc.get_referents(datetime.datetime.__dict__)[0]
    methods["now"] = classmethod(lambda cls, tz=None: real(tz) + datetime.timedelta(seconds=seconds))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
    time.time = lambda: real_time() + seconds
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A store with one profile."""
    (tmp_path / "store").mkdir()
    fleet = Fleet(tmp_path, str(tmp_path / "store"))
    fleet.good = fleet.build("good", "/", "/about")
    return fleet


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, as the home of a host."""
    place = tmp_path / "small"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(place)]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def trusting(home: Path, fleet: Fleet) -> Path:
    home.mkdir(exist_ok=True)
    for seeder in fleet.seeders:
        ring = KeyRing(seeder / "config" / "keys")
        KeyRing(home / "config" / "keys").trust(ring.public_pem(), seeder.name)
    return home


def assert_serves(server: Server) -> dict[str, object]:
    server.wait_ready()
    assert server.get("/").text == "done" and server.get("/about").text == "done"
    assert TRACEBACK not in server.stderr
    found: dict[str, object] = server.status()
    return found


def test_a_full_disk(fleet: Fleet, small_disk: Path) -> None:
    """Warm from the store all the same; what cannot be kept is named, and nothing half is left."""
    home = trusting(small_disk, fleet)
    (home / "state" / "run").mkdir(parents=True)
    for folder in ("", "state", "state/run"):
        (home / folder).chmod(0o700)
    with (home / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError):
        while True:
            ballast.write(bytes(4096))
    with fleet.server(home, "--profile", fleet.store) as server:
        status = assert_serves(server)
        assert status["sources"] == [f"profile {fleet.good[:12]} of this build"]
        assert reasons(server) == {"unreadable"}
        assert "make room" in server.stderr
    assert [path.name for path in home.rglob("*") if path.name.endswith(".tmp")] == []
    (home / "ballast").unlink()
    with fleet.server(home, "--profile", fleet.store) as server:
        assert_serves(server)
        assert reasons(server) == set()


def test_a_home_that_cannot_be_written(fleet: Fleet, small_disk: Path) -> None:
    home = trusting(small_disk, fleet)
    subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
    with fleet.server(home, "--profile", fleet.store, "--admin", "127.0.0.1:0") as server:
        server.wait_ready()
        assert server.get("/").text == "done"
        assert "not used: copies of profiles: unreadable" in server.stderr
        assert re.search(r"no boot ledger is kept: .*Read-only|no boot ledger is kept: .*not writable", server.stderr)
        assert "warm coverage 100% · records" in server.stderr
        assert TRACEBACK not in server.stderr


@pytest.mark.parametrize(("days", "reason"), [("366", "too-old"), ("-366", "from-the-future")])
def test_a_clock_that_is_a_year_off(fleet: Fleet, tmp_path: Path, days: str, reason: str) -> None:
    """It serves and says so; when the clock is right again, so is everything that was kept meanwhile."""
    home = trusting(tmp_path / "host", fleet)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    off = {"PYTHONPATH": str(tmp_path / "clock"), "DAYS_OFF": days}
    with fleet.server(home, "--profile", fleet.store, **off) as server:
        status = assert_serves(server)
        assert status["sources"] == [] and reason in reasons(server)
        assert f": {reason} (" in server.stderr
    with fleet.server(home, "--profile", fleet.store) as server:
        status = assert_serves(server)
        assert status["sources"] == [f"profile {fleet.good[:12]} of this build"]
        assert reasons(server) == set()
