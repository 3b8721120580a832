"""``jumpstart warm URL``: exit code 0 only when the host is warm, and the reason when it is not."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.server import COMMAND, TRACEBACK, Server, clean_environment, run_command, wait_until
from tests.integration.shop import SHOP, running_backend, visit

pytestmark = pytest.mark.slow

# Nearly all of their latency is waiting, so that it settles on a busy machine too.
CALM = """
[[request]]
path = "/chat?n=5&delay_ms=10"
repeat = 3
[[request]]
path = "/cart"
method = "POST"
headers = { Content-Type = "application/x-www-form-urlencoded" }
body = "product=7&count=2"
expect_status = 303
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One shop for all tests here."""
    folder = tmp_path_factory.mktemp("warm")
    with running_backend() as backend:
        with Server(
            "shop.web:app",
            app_dir=SHOP,
            home=folder / "home",
            log=folder / "log",
            env={"SHOP_BACKEND": backend},
        ) as running:
            yield running


@pytest.fixture
def calm(tmp_path: Path) -> Path:
    """Requests whose latency soon settles."""
    path = tmp_path / "calm.toml"
    path.write_text(CALM)
    return path


def warm(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("warm", *arguments, home=server.home)


def test_all_requests_of_a_file_until_the_latency_settles(server: Server, calm: Path) -> None:
    done = warm(server, server.url, "--requests", str(calm))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^warm: settled after \d+ rounds: [\d.]+ ms → [\d.]+ ms$", done.stdout, re.MULTILINE)
    assert re.search(r"^ +[\d.]+ ms → +[\d.]+ ms  POST /cart$", done.stdout, re.MULTILINE)
    rounds = done.stderr.splitlines()  # one line for each round where nobody watches
    assert len(rounds) >= 3
    assert rounds[0].startswith("round 1: p50 ")
    assert "0 errors" in rounds[-1]
    assert server.status()["requests"] >= 3 * 4


def test_the_requests_of_a_profile(server: Server, tmp_path: Path) -> None:
    # What `jumpstart warm` itself has asked for is no evidence: only these are in the profile.
    visit(server, ["/chat?n=4&delay_ms=12", "/chat?n=5&delay_ms=12"])
    file = tmp_path / "captured.jumpstart"
    assert run_command("profile", "capture", "-o", str(file), home=server.home).returncode == 0
    done = warm(server, server.url, "--profile", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    sent = re.findall(r"  (GET \S+)$", done.stdout, re.MULTILINE)
    assert sorted(sent) == ["GET /chat?n=4&delay_ms=12", "GET /chat?n=5&delay_ms=12"]


def test_a_bar_for_people(server: Server, calm: Path) -> None:
    """On a terminal the progress is one line that is drawn over; results go to standard output all the same."""
    ours, theirs = pty.openpty()
    words = [str(COMMAND), "warm", server.url, "--requests", str(calm)]
    environment = clean_environment(server.home, TERM="xterm")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # EIO: the other end is closed
                break
            if not data:
                break
            drawn += data
        os.close(ours)
        assert process.stdout is not None
        results = process.stdout.read()
        assert process.wait(10) == 0
    text = drawn.decode()
    assert "warming" in text
    assert "\r" in text
    assert "%" in text
    assert re.search(r"round \d+: p50 ", text)
    assert "warm: settled" in results
    assert "warming" not in results


def test_errors_are_not_warm(server: Server, tmp_path: Path) -> None:
    requests = tmp_path / "warm.toml"
    requests.write_text('[[request]]\npath = "/about"\nexpect_status = 503\n')
    done = warm(server, server.url, "--requests", str(requests), "--budget", "1")
    assert done.returncode == 1
    assert re.search(r"^NOT WARM: .*GET /about answered 200, expected 503", done.stdout, re.MULTILINE)


def test_500s_are_not_warm(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("def app(environ, start_response):\n    raise ValueError\n")
    requests = tmp_path / "warm.toml"
    requests.write_text('[[request]]\npath = "/"\n')
    with Server("failing:app", app_dir=tmp_path, home=tmp_path / "home", log=tmp_path / "log") as server:
        done = warm(server, server.url, "--requests", str(requests), "--budget", "1")
    assert done.returncode == 1
    assert re.search(r"^NOT WARM: the budget of 1 s ended .*GET / answered 500", done.stdout, re.MULTILINE)
    assert TRACEBACK not in done.stderr


def test_an_unreachable_host_is_not_warm(server: Server, calm: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: refuses
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = warm(server, url, "--requests", str(calm), "--budget", "1")
    assert done.returncode == 1
    assert re.search(rf"^NOT WARM: the budget of 1 s .*connection refused by {url}", done.stdout, re.MULTILINE)
    assert TRACEBACK not in done.stderr


def test_a_host_that_comes_up_within_the_budget_is_waited_for(tmp_path: Path, calm: Path) -> None:
    """What a rollout does: the command is started beside the server."""
    go = tmp_path / "go"
    (tmp_path / "late.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
        "def app(environ, start_response):\n"
        "    time.sleep(0.05)\n"
        "    start_response('303 See Other' if environ['REQUEST_METHOD'] == 'POST' else '200 OK', [])\n"
        "    return [b'ok']\n"
    )
    address = f"unix:{tmp_path}/late.sock"
    late = Server(
        "late:app",
        app_dir=tmp_path,
        home=tmp_path / "home",
        log=tmp_path / "log",
        address=("--bind", address),
        wait=False,
    )
    with late as server:
        wait_until(lambda: server.admin("/livez").status_code == 200)
        told, result = tmp_path / "told", tmp_path / "result"
        command = [str(COMMAND), "warm", address, "--requests", str(calm), "--budget", "30"]
        with (
            told.open("w") as stderr,
            result.open("w") as stdout,
            subprocess.Popen(
                command, env=clean_environment(server.home), cwd=server.home, stdout=stdout, stderr=stderr
            ) as warming,
        ):
            try:
                wait_until(lambda: "connection refused" in told.read_text(), 20)
                go.touch()
                assert warming.wait(40) == 0, result.read_text() + told.read_text()
            finally:
                go.touch()
                warming.kill()


def test_a_budget_that_is_too_short(server: Server, tmp_path: Path) -> None:
    requests = tmp_path / "warm.toml"
    requests.write_text('[[request]]\npath = "/chat?n=10&delay_ms=30"\n')
    done = warm(server, server.url, "--requests", str(requests), "--budget", "0.5")
    assert done.returncode == 1
    assert "NOT WARM: the budget of 0.5 s ended before the host was warm" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "which requests? Name them with --requests"),
        (("--requests", "a", "--profile", "b"), "not both"),
        (("--requests", "/no/such/file.toml"), "cannot be read"),
        (("--requests", "CALM", "--budget", "0"), "must be over 0"),
    ],
)
def test_wrong_usage(server: Server, calm: Path, words: tuple[str, ...], complaint: str) -> None:
    done = warm(server, server.url, *(str(calm) if word == "CALM" else word for word in words))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert TRACEBACK not in done.stderr


def test_a_profile_that_cannot_be_read(server: Server, tmp_path: Path) -> None:
    done = warm(server, server.url, "--profile", str(tmp_path / "none.jumpstart"))
    assert done.returncode != 0
    assert "absent" in done.stderr
    assert TRACEBACK not in done.stderr
