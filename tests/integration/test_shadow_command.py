"""``jumpstart shadow record``, ``replay`` and ``mirror`` between real servers."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import pytest

from jumpstart_warmup.traffic import read_traffic
from tests.integration.server import APPS, COMMAND, Serve, Server, clean_environment, run_command, wait_until

pytestmark = pytest.mark.slow


def requests_of(server: Server) -> int:
    (tenant,) = server.status()["tenants"]
    count: int = tenant["requests"]
    return count


def listeners_of(server: Server) -> int:
    (tenant,) = server.status()["tenants"]
    count: int = tenant["shadow"]["subscribers"]
    return count


def start(server: Server, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(COMMAND), "shadow", *arguments],
        env=clean_environment(server.home),
        cwd=server.home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_traffic_is_recorded_replayed_and_mirrored(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "day.traffic"
    with (
        serve("wsgi_app:app", "-w", "2", app_dir=APPS / "wsgi_bare") as source,
        serve("wsgi_app:app", app_dir=APPS / "wsgi_bare", home=tmp_path / "other") as target,
    ):
        recording = start(source, "record", "-o", str(file), "--limit", "5", "--for", "30")
        mirroring = start(source, "mirror", target.url)
        following = start(source, "mirror", target.url, "--fraction", "0.001")
        with contextlib.ExitStack() as ends:
            for process in (recording, mirroring, following):
                ends.callback(process.wait, 10)
                ends.callback(process.kill)
            wait_until(lambda: listeners_of(source) == 3, 30)

            def visit() -> bool:  # until both have come, and seen enough
                for path in ("/?page=2", "/?token=secret-of-somebody"):
                    source.get(path, headers={"cookie": "session=1", "accept": "*/*"})
                return recording.poll() is not None and requests_of(target) >= 3

            wait_until(visit, timeout=30)
            text, _ = recording.communicate(timeout=10)
            assert recording.returncode == 0, text
            assert text.endswith(f"{file}: 5 requests\n")
            assert file.stat().st_mode & 0o777 == 0o600
            mirroring.send_signal(signal.SIGTERM)  # as Ctrl-C
            text, _ = mirroring.communicate(timeout=10)
            assert mirroring.returncode == 0, text
            assert "answers: " in text and "× 200" in text
            wait_until(lambda: listeners_of(source) == 1, 20)  # who has gone is missed at once, without a request
            done = run_command("shadow", "record", "-o", str(file), "--for", "1", home=source.home)
            assert done.returncode == 2 and "File exists" in done.stderr
            done = run_command("shadow", "fraction", "0.5", home=source.home)
            assert done.returncode == 0, done.stderr
            assert source.status()["tenants"][0]["shadow"]["fraction"] == 0.5
            source.stop()
            text, _ = following.communicate(timeout=20)
            assert following.returncode == 0, text  # what it followed has ended
        found = [each for _, each in read_traffic(file)]
        assert {(each.method, each.path, each.status) for each in found} == {("GET", "/?page=2", 200)}
        assert "secret" not in file.read_text() and "session" not in file.read_text()
        assert [each.t for each in found] == sorted(each.t for each in found)
        before = requests_of(target)
        done = run_command("shadow", "replay", str(file), target.url, home=tmp_path / "other")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("5 requests; answers: 5 × 200\n")
        assert requests_of(target) == before + 5  # a stranger's mark hides nothing from the statistics
        done = run_command("shadow", "replay", str(file), target.url, "--resume", home=tmp_path / "other")
        assert done.returncode == 2 and "leave --resume out" in done.stderr
