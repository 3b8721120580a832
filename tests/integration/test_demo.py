"""`scripts/demo.py`, the first command of the README: what it promises, and that it leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")]

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo.py"
MARKER = "DEMO_TEST_ID"  # not JUMPSTART_…, which the demo keeps from its servers
KINDS = ("cold", "from profile", "second boot")
STEADY = 60  # requests; the statistics do not matter here
TIMEOUT = 120.0  # seconds for a whole demo with one boot of each kind; a fifth of it on an idle machine
END_TIMEOUT = 30.0  # seconds from a signal to the end


class Demo:
    """
    One run of the demo, with a temporary folder of its own.

    Attributes:
        process: the demo; its output goes to files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._marker = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.process: subprocess.Popen[bytes]

    def start(self, *options: str) -> None:
        environ = {**os.environ, "TMPDIR": str(self.temporary), MARKER: self._marker}
        with self._open("stdout") as stdout, self._open("stderr") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(DEMO), "--boots", "1", "--steady", str(STEADY), *options],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environ,
                cwd=self._folder,
            )

    def _open(self, name: str) -> IO[bytes]:
        return (self._folder / name).open("wb")

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def wait_for(self, pattern: str, name: str) -> re.Match[str]:
        """Wait for something in ``stdout`` or ``stderr``; fail when the demo ends before."""
        give_up = time.monotonic() + TIMEOUT
        while True:
            over = self.process.poll() is not None or time.monotonic() > give_up
            found = re.search(pattern, (self._folder / name).read_text())
            if found:
                return found
            assert not over, f"no {pattern!r} in its {name}"
            time.sleep(0.01)

    def wait_for_process(self, words: str) -> None:
        give_up = time.monotonic() + TIMEOUT
        while not any(words in line for line in self.processes()):
            assert self.process.poll() is None and time.monotonic() < give_up, f"no process {words}"
            time.sleep(0.01)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(END_TIMEOUT)

    def processes(self) -> list[str]:
        """Command lines of everything that it started and that lives."""
        wanted = f"{MARKER}={self._marker}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found.append(f"{folder.name} {b' '.join(words).decode()}")
            except OSError:
                continue  # it has ended, or is somebody else's
        return found

    def assert_nothing_is_left(self) -> None:
        assert self.processes() == []
        assert list(self.temporary.iterdir()) == []

    def clean_up(self) -> None:
        """Kill what a failed test leaves, and show what the demo said."""
        if self.process.poll() is None:
            self.end(signal.SIGTERM)
        for line in self.processes():
            os.kill(int(line.split()[0]), signal.SIGKILL)
        print(self.stdout)
        print(self.stderr)


@pytest.fixture
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    started = Demo(tmp_path_factory.mktemp("d"))  # short: Unix sockets live below it
    yield started
    started.clean_up()


def assert_boots_are_as_promised(report: Path, stdout: str) -> None:
    document = json.loads(report.read_text())
    assert document["broken_promises"] == []
    boots = {boot["kind"]: boot for boot in document["boots"]}
    assert tuple(boots) == KINDS
    assert boots["cold"]["cold_events"] > 0
    assert boots["cold"]["cold_requests"] > 0
    assert boots["cold"]["records_used"] == 0
    for kind in KINDS[1:]:
        assert boots[kind]["cold_events"] == 0, boots[kind]["cold_names"]
        assert boots[kind]["cold_requests"] == 0
        assert boots[kind]["records_used"] > 0
        assert boots[kind]["refusals"] == []
    for boot in boots.values():
        assert boot["requests"] == 100 + 150 + STEADY
        assert 0 < boot["ready_s"] < boot["round_s"]
        assert len(boot["first_ms"]) == len(document["requests"])
    header = next(line for line in stdout.splitlines() if "cold  " in line)
    assert re.split(r"\s{2,}", header.strip()) == list(KINDS)
    for label in ("time to ready", "GET  /report", "p99 of the first 100 / p99, steady", "cold events in requests"):
        assert label in stdout


def test_it_shows_cold_and_warm_boots_side_by_side(demo: Demo, tmp_path: Path) -> None:
    report = tmp_path / "boots.json"
    demo.start("--app", "flask", "--json", str(report))

    assert demo.process.wait(TIMEOUT) == 0
    demo.assert_nothing_is_left()
    assert_boots_are_as_promised(report, demo.stdout)
    assert "The example shop on Flask, 2 workers" in demo.stdout


def test_it_stays_up_warm_until_ctrl_c(demo: Demo, tmp_path: Path) -> None:
    report = tmp_path / "boots.json"
    demo.start("--serve", "--port", "0", "--json", str(report))
    demo.wait_for("Ctrl-C ends it", "stdout")
    assert_boots_are_as_promised(report, demo.stdout)

    address = demo.wait_for(r"http://(127\.0\.0\.1:\d+)/report\n", "stdout")[1]
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", "/report")
    response = connection.getresponse()
    assert response.status == 200
    assert b"Harbour" in response.read()
    connection.close()
    words = demo.wait_for(r"  (\S+) (status --admin unix:\S+)\n", "stdout")
    status = subprocess.run([ROOT / words[1], *words[2].split()], capture_output=True, text=True, timeout=30)
    assert "cold events 0, 100.0% of them warm" in status.stdout, status.stderr

    assert demo.end(signal.SIGINT) == 0
    demo.assert_nothing_is_left()


@pytest.mark.parametrize("stage", ["building a profile", "boot 1 of 1, cold"])
def test_ctrl_c_at_any_stage_leaves_nothing(demo: Demo, stage: str) -> None:
    demo.start()
    demo.wait_for(stage, "stderr")
    demo.wait_for_process("jumpstart_server.mold")  # of what comes next

    assert demo.end(signal.SIGINT) == 128 + signal.SIGINT
    assert "Traceback" not in demo.stderr
    demo.assert_nothing_is_left()


def test_a_port_that_is_taken_is_said_before_anything_is_measured(demo: Demo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo.start("--serve", "--port", str(port))

        assert demo.process.wait(TIMEOUT) == 1
    assert f"--port {port}: " in demo.stderr
    assert "choose another one" in demo.stderr
    demo.assert_nothing_is_left()
