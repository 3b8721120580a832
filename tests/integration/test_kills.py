"""
kill -9 in real commands and boots, at a few points: what runs next is fine, and no process or temporary file stays.

`tests/jumpstart/test_kills.py` has every point of each stage.
"""

from __future__ import annotations

import functools
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.fleet import BUILD, TARGET, Fleet
from tests.integration.server import (
    COMMAND,
    LISTENING,
    MARKER,
    Server,
    clean_environment,
    marked_processes,
    run_command,
    wait_until,
)
from tests.integration.test_host_troubles import trusting
from tests.jumpstart.store_lab import temporary_files

pytestmark = pytest.mark.slow

# $KILL is ROLE EVENT NUMBER FOLDER: a process with ROLE in its command line ends itself at that event below FOLDER;
# only one does, which takes the file `armed` away.
SITE = """
import os, signal, sys

role, event, number, folder = os.environ["KILL"].split()
left = int(number)

def look(name, arguments):
    global left
    if name == event and str(arguments[1 if name in ("os.rename", "os.link") else 0]).startswith(folder):
        left -= 1
        if not left:
            os.unlink(os.path.join(os.path.dirname(__file__), "armed"))
            os.kill(os.getpid(), signal.SIGKILL)

if role in sys.orig_argv and os.path.exists(os.path.join(os.path.dirname(__file__), "armed")):
    sys.addaudithook(look)
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A store with two profiles."""
    (tmp_path / "store").mkdir()
    fleet = Fleet(tmp_path, str(tmp_path / "store"))
    fleet.good = fleet.build("good", "/", "/about")
    fleet.build("other", "/")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    return fleet


def killing(fleet: Fleet, role: str, event: str, number: int, folder: Path) -> dict[str, str]:
    (fleet.root / "site" / "armed").touch()
    return {"PYTHONPATH": str(fleet.root / "site"), "KILL": f"{role} {event} {number} {folder}"}


@pytest.mark.parametrize(("role", "event", "number", "what"), [
    ("build", "os.link", 1, "home/config/keys"),  # the host's own key
    ("build", "os.rename", 1, "out.jumpstart"),
    ("jumpstart_server.mold", "open", 1, "app"),  # the process that builds
])  # fmt: skip
def test_a_build_that_is_killed(fleet: Fleet, role: str, event: str, number: int, what: str) -> None:
    root = fleet.root
    (root / "home").mkdir()
    words = ["build", TARGET, "--app-dir", str(fleet.app_dir), "--requests", str(root / "good.toml"), *BUILD]
    words += ["-o", str(root / "out.jumpstart")]
    env = {**killing(fleet, role, event, number, root / what), MARKER: f"kill-{role}-{event}"}
    killed = subprocess.run(
        [str(COMMAND), *words], env=clean_environment(root / "home", **env), cwd=root, capture_output=True, timeout=60
    )
    assert killed.returncode == (3 if "mold" in role else -signal.SIGKILL), killed.stderr
    assert not (root / "out.jumpstart").exists()
    wait_until(lambda: not marked_processes(f"kill-{role}-{event}"), why="no process of it is left")
    again = run_command(*words, home=root / "home")
    assert again.returncode == 0, again.stderr
    assert run_command("profile", "verify", str(root / "out.jumpstart"), home=root / "home").returncode == 0
    assert temporary_files(root) == []


def has_ended_or_listens(server: Server) -> bool:
    return server.process.poll() is not None or LISTENING.search(server.stderr) is not None


def test_boots_that_are_killed(fleet: Fleet) -> None:
    """Mold or supervisor: the same start goes on with another profile, or the next start is fine."""
    root = fleet.root
    points = [
        ("serve", "open", 1, "state/ledger"),
        ("serve", "open", 3, "state/ledger"),  # it has shown that it lives
        ("jumpstart_server.mold", "os.link", 1, "cache/profiles"),  # the copy gets its name
        ("jumpstart_server.mold", "os.rename", 1, "state/ledger"),  # what it loads is noted down
        ("jumpstart_server.mold", "open", 1, "../app"),  # it was
    ]
    for number, (role, event, count, what) in enumerate(points):
        home = trusting(root / f"host-{number}", fleet)
        folder = fleet.app_dir if what == "../app" else home / what
        env = killing(fleet, role, event, count, folder)
        with fleet.server(home, "--profile", fleet.store, **env) as server:
            wait_until(functools.partial(has_ended_or_listens, server), 60)
            if role == "serve":
                assert server.wait() == -signal.SIGKILL
            else:
                assert "booting warm failed" in server.stderr, (event, what, server.stderr)
                server.wait_ready()
                assert server.get("/").text == "done"
        with fleet.server(home, "--profile", fleet.store) as server:
            server.wait_ready()
            assert server.get("/").text == "done"
            status = server.status()
            assert len(status["sources"]) == 1, (event, what)
        assert temporary_files(home) == [] and list(home.rglob("*.alive")) == []
