"""The command, with Jumpstart alone, out of the environment that the tests run in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine, processes
from benchmarks.processes import Failure, Process, RunningServer
from benchmarks.servers import SERVERS, Launch, Server

ROOT = Path(__file__).parents[2]
JUMPSTART = Path(sys.executable).parent / "jumpstart"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks need epoll and /proc")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


@LINUX
@pytest.mark.slow
@pytest.mark.skipif(not JUMPSTART.exists(), reason="the project is not installed here")
def test_a_quick_hello_with_jumpstart_alone(tmp_path: Path) -> None:
    done = bench(
        *("hello-wsgi", "--quick", "--seconds", "1", "--quiet-wait", "0", "--only", "jumpstart"),
        *("--no-install", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads((tmp_path / "hello-wsgi.json").read_text("utf-8"))
    assert [sample.get("error") for sample in data["samples"]] == [None, None], data["samples"]
    assert [sample["variant"] for sample in data["samples"]] == ["same heads", "differing heads"]
    for sample in data["samples"]:
        assert sample["rate"] > 10
        assert sample["failures"] == 0
        assert 0 < sample["p50_ms"] <= sample["p99_ms"]
        assert sample["cpu_us"] > 1
        assert sample["pss_mib"] > 5
    assert data["samples"][1]["generator"] == "own"
    assert "| **jumpstart** |" in done.stdout
    assert done.stdout.strip() in (tmp_path / "benchmarks.md").read_text("utf-8")
    assert (tmp_path / "benchmarks.svg").is_file()


@pytest.mark.slow
def test_usage(tmp_path: Path) -> None:
    assert bench("--help").returncode == 0
    wrong = bench("hello")
    assert wrong.returncode == 2
    assert "no scenario 'hello'; there are tenants," in wrong.stderr
    empty = bench("--report", "--out", str(tmp_path))
    assert (empty.returncode, empty.stdout) == (1, "")
    assert "there are no results" in empty.stderr


@pytest.mark.parametrize("server", SERVERS.values(), ids=lambda each: each.name)
def test_every_server_is_told_where_to_listen_and_what_to_serve(server: Server) -> None:
    for interface in server.interfaces:
        words = " ".join(server.command(Launch(interface, "module:app", 1234, 77, Path("bin"))))
        assert "127.0.0.1" in words
        assert "1234" in words
        assert ":app" in words
        if interface == "wsgi" and not server.fixed_threads and server.name != "uvicorn":
            assert "77" in words


@LINUX
@pytest.mark.slow
def test_a_server_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    def broken(launch: Launch) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no such app')"]

    with pytest.raises(Failure, match="its log ends with: no such app"):
        with RunningServer(Server("broken", ("wsgi",), broken), "wsgi", "x:y", 1, tmp_path, {}) as server:
            folder = server._folder
            server.wait_until_ready()
    assert not folder.exists()
    with pytest.raises(Failure, match="cannot be started"):
        RunningServer(SERVERS["granian"], "wsgi", "x:y", 1, tmp_path, {})


@LINUX
@pytest.mark.slow
def test_descendants_end_with_the_process_even_when_they_do_not_want_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_S", 1.0)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)\n"
        "time.sleep(60)"
    )
    process = Process([sys.executable, "-c", parent], processes.environment(), ROOT, stdout=subprocess.PIPE)
    with process:
        assert process.child.stdout is not None
        assert process.child.stdout.readline() == b"1\n"
        tree = process.tree()
        assert len(tree) == 2
    assert not any(map(machine.is_running, tree))


def test_servers_do_not_see_the_callers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEB_CONCURRENCY", "PORT", "GRANIAN_WORKERS", "PYTHONDONTWRITEBYTECODE", "JUMPSTART_THREADS"):
        monkeypatch.setenv(name, "3")
    given = processes.environment(BENCH_APP="x")
    assert "PATH" in given
    assert given["BENCH_APP"] == "x"
    assert "3" not in given.values()
