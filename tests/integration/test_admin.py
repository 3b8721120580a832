"""The admin address and ``jumpstart status``: what runs, how warm, why not."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from jumpstart.paths import host_paths
from jumpstart_server.admin import run_folder
from tests.integration.server import TRACEBACK, Serve, Server, run_command, wait_until

pytestmark = pytest.mark.slow

APP = """
import os, time
time.sleep(float(os.environ.get("IMPORT_S", "0")))

def app(environ, start_response):
    if environ["PATH_INFO"] == "/slow":
        time.sleep(1.5)
    if environ["PATH_INFO"] == "/lazy":
        import colorsys
    if environ["PATH_INFO"] == "/raises":
        raise ValueError
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ok"]
"""


@pytest.fixture
def app_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "plain.py").write_text(APP)
    return folder


def sockets(home: Path) -> list[Path]:
    """Admin sockets of this host, living or not."""
    return sorted(run_folder(host_paths({"JUMPSTART_HOME": str(home)}, home)).glob("*.sock"))


def metrics(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, **labels: str) -> float:
    """Of the one sample that has these labels among others."""
    (found,) = [sample.value for sample in family.samples if labels.items() <= sample.labels.items()]
    return float(found)


def test_pages_over_the_socket(serve: Serve, app_dir: Path, home: Path) -> None:
    with serve("plain:app", "-w", "2", app_dir=app_dir) as server:
        wait_until(lambda: len(server.worker_pids()) == 2)
        for path in ("/", "/", "/lazy", "/raises", '/od"d%5Croute'):
            server.get(path)
        assert server.admin("/livez").text == "ok\n"
        ready = server.admin("/readyz")
        assert (ready.status_code, ready.text) == (200, "2 workers ready\n")
        (boot,) = server.admin("/boot").json()["tenants"]
        assert boot["ready_after_s"] > 0
        names = [span["name"] for span in boot["spans"]]
        assert names[0] == "start the interpreter"
        assert {"find warm state", "check records", "import the app", "restores", "warm-up requests"} <= set(names)
        assert all(span["duration_s"] >= 0 and span["start_s"] >= 0 for span in boot["spans"])
        status = server.status(requests=5)
        assert status["ready"] is True
        assert status["addresses"] == [server.url]
        assert status["requests"] == 5
        assert status["routes"]["GET /lazy"]["cold_names"] == ["import colorsys"]
        assert server.admin("/nothing").status_code == 404
        assert server.admin("/capture").status_code == 405  # GET captures nothing
        assert sockets(home)[0].parent.stat().st_mode & 0o777 == 0o700
    assert sockets(home) == []


def test_metrics_are_prometheus(serve: Serve, app_dir: Path) -> None:
    with serve("plain:app", "-w", "2", app_dir=app_dir) as server:
        wait_until(lambda: len(server.worker_pids()) == 2)
        for path in ("/", "/", "/lazy", "/raises"):
            server.get(path)
        server.status(requests=4)
        answer = server.admin("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = metrics(answer.text)
    assert value(found["jumpstart_workers"], state="serving", tenant="web") == 2
    assert value(found["jumpstart_requests"], route="GET /") == 2
    assert value(found["jumpstart_request_errors"], route="GET /raises") == 1
    assert value(found["jumpstart_cold_requests"], route="GET /lazy") == 1
    assert value(found["jumpstart_cold_events"], route="GET /lazy", kind="import") == 1
    assert value(found["jumpstart_warm_coverage_ratio"]) == 0.75
    assert value(found["jumpstart_ready_seconds"]) > 0
    duration = found["jumpstart_request_duration_seconds"]
    assert duration.type == "histogram"
    mine = [sample for sample in duration.samples if sample.labels["route"] == "GET /"]
    buckets = [sample.value for sample in mine if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    assert [sample.value for sample in mine if sample.name.endswith("_count")] == [2]


def test_pages_over_a_port(serve: Serve, app_dir: Path, home: Path) -> None:
    with serve("plain:app", "--admin", "127.0.0.1:0", app_dir=app_dir) as server:
        url = server.wait_for_line(r"Admin pages at: (http://127\.0\.0\.1:\d+)$").group(1)
        with httpx.Client(base_url=url, trust_env=False) as client:
            assert client.get("/livez").text == "ok\n"
            assert client.get("/readyz").status_code == 200
            assert client.get("/boot").json()["tenants"][0]["target"] == "plain:app"
            assert client.get("/status").json()["pid"] == server.pid
            assert "jumpstart_workers" in metrics(client.get("/metrics").text)
            # A page in somebody's browser, by DNS rebinding or not.
            for lies in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                for method, path in (
                    ("POST", "/capture"),
                    ("POST", "/shadow/fraction?fraction=1"),
                    ("GET", "/shadow/sample"),
                ):
                    refused = client.request(method, path, headers=lies)
                    assert refused.status_code == 403 and "evil.example" in refused.text
            assert client.get("/metrics", headers={"host": "a-name.in.the.cluster"}).status_code == 200
            assert client.post("/shadow/fraction?fraction=0").status_code == 200
        # Health checks come whoever else holds connections, silent ones and half heads, and those are not kept.
        host, port = url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as crowd:
            held = [crowd.enter_context(socket.create_connection((host, int(port)))) for _ in range(60)]
            for sock in held[30:]:
                sock.sendall(b"GET /status HTTP/1.1\r\nHo")
            assert httpx.get(f"{url}/livez", trust_env=False).text == "ok\n"
            assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
            for sock in held:
                sock.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1000) == b""
        shown = run_command("status", "--admin", url.removeprefix("http://"), home=home)
        assert shown.returncode == 0, shown.stderr
        assert f"pid {server.pid}" in shown.stdout
        assert sockets(home) == []


def test_pages_over_a_socket_of_choice(serve: Serve, app_dir: Path, home: Path, tmp_path: Path) -> None:
    place = f"unix:{tmp_path}/admin.sock"
    with serve("plain:app", "--admin", place, app_dir=app_dir):
        wait_until(lambda: run_command("status", "--admin", place, home=home).returncode == 0)
    assert not (tmp_path / "admin.sock").exists()


def test_an_admin_address_in_use_costs_a_line(serve: Serve, app_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with serve("plain:app", "--admin", address, app_dir=app_dir) as server:
            server.wait_for_line(rf"\[WARNING\] no admin pages: {address} is in use")
            assert server.get("/").text == "ok"
            assert TRACEBACK not in server.stderr


def test_no_admin_pages(serve: Serve, app_dir: Path, home: Path) -> None:
    with serve("plain:app", "--admin", "off", app_dir=app_dir) as server:
        assert server.get("/").text == "ok"
        assert sockets(home) == []
        shown = run_command("status", home=home)
        assert shown.returncode == 2
        assert "no running server found" in shown.stderr


def test_an_address_that_is_none_is_a_mistake_in_usage(serve: Serve, app_dir: Path, home: Path) -> None:
    with serve("plain:app", "--admin", "http://x/", app_dir=app_dir, wait=False) as server:
        assert server.wait() == 2
        assert "--admin http://x/: write HOST:PORT" in server.stderr
    asked = run_command("status", "--admin", "http://x/", home=home)
    assert asked.returncode == 2
    assert "--admin http://x/: write HOST:PORT" in asked.stderr


def test_what_is_not_ready_says_why(serve: Serve, app_dir: Path, home: Path) -> None:
    """Until the first worker is ready: alive, not ready, and the port refuses."""
    slow = {"IMPORT_S": "6"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serve("plain:app", app_dir=app_dir, env=slow, address=("--port", str(port)), wait=False) as server:
        wait_until(lambda: server.admin("/livez").status_code == 200)
        ready = server.admin("/readyz")
        assert ready.status_code == 503
        assert ready.text == "no worker is ready: the app is being imported\n"
        status = server.status()
        assert status["ready"] is False
        assert status["waiting_for"] == "the app is being imported"
        assert server.admin("/capture", "POST").status_code == 503
        metrics(server.admin("/metrics").text)
        shown = run_command("status", home=home)
        assert "not ready: the app is being imported" in shown.stdout
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
        wait_until(lambda: server.admin("/readyz").status_code == 200)
        server.wait_ready()


def test_what_stops_is_not_ready(serve: Serve, app_dir: Path) -> None:
    with serve("plain:app", app_dir=app_dir) as server:
        with slow_request(server):
            server.process.terminate()
            wait_until(lambda: server.admin("/readyz").status_code == 503)
            assert server.admin("/readyz").text == "stopping\n"
            assert server.status()["ready"] is False
        assert server.wait() == 0


@contextlib.contextmanager
def slow_request(server: Server) -> Iterator[None]:
    """One request in flight, which must be answered in the end."""
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(server.get("/slow").status_code))
    thread.start()
    try:
        wait_until(lambda: server.status()["workers"][0]["busy"] == 1)
        yield
    finally:
        thread.join(10)
    assert answers == [200]


def test_status_for_people_and_for_programs(serve: Serve, app_dir: Path, home: Path) -> None:
    with serve("plain:app", app_dir=app_dir) as server:
        server.get("/lazy")
        shown = run_command("status", home=home)
        assert shown.returncode == 0, shown.stderr
        assert f"pid {server.pid}, up " in shown.stdout
        assert f"plain:app (tenant web) at {server.url}" in shown.stdout
        assert "1 × GET /lazy" in shown.stdout
        assert "cold: import colorsys" in shown.stdout
        document = json.loads(run_command("status", "--json", home=home).stdout)
        assert document["tenants"][0]["cold_events"] == 1
        boot = run_command("status", "--boot", home=home)
        assert "import the app" in boot.stdout
        assert "ready in" in boot.stdout
        assert json.loads(run_command("status", "--boot", "--json", home=home).stdout)["tenants"][0]["spans"]


def test_of_two_servers_one_is_chosen(serve: Serve, app_dir: Path, home: Path, tmp_path: Path) -> None:
    with serve("plain:app", app_dir=app_dir) as one, serve("plain:app", app_dir=app_dir) as two:
        wait_until(lambda: len(sockets(home)) == 2)
        for command in (("status",), ("profile", "capture", "-o", str(tmp_path / "x.jumpstart"))):
            asked = run_command(*command, home=home)
            assert asked.returncode == 2
            assert "2 servers run; choose one:" in asked.stderr
            choices = [line.split("--admin ")[1] for line in asked.stderr.splitlines() if "--admin " in line]
            assert len(choices) == 2
            for server in (one, two):
                assert f"pid {server.pid}, plain:app at {server.url}: --admin unix:" in asked.stderr
        pids = set()
        for choice in choices:
            chosen = run_command("status", "--admin", choice, "--json", home=home)
            assert chosen.returncode == 0, chosen.stderr
            pids.add(json.loads(chosen.stdout)["pid"])
        assert pids == {one.pid, two.pid}


def test_a_killed_server_leaves_no_choice_behind(serve: Serve, app_dir: Path, home: Path) -> None:
    with serve("plain:app", app_dir=app_dir) as server:
        wait_until(lambda: server.admin("/livez").status_code == 200)
        server.process.kill()
        server.wait()
    assert len(sockets(home)) == 1
    with serve("plain:app", app_dir=app_dir) as server:
        wait_until(lambda: server.admin("/livez").status_code == 200)
        shown = run_command("status", "--json", home=home)
        assert json.loads(shown.stdout)["pid"] == server.pid
        assert len(sockets(home)) == 1
    gone = run_command("status", home=home)
    assert gone.returncode == 2
    assert "no running server found" in gone.stderr


def test_a_run_folder_of_others_costs_a_line(serve: Serve, app_dir: Path) -> None:
    """Somebody else could put a socket there and be asked instead of the server."""
    with tempfile.TemporaryDirectory(prefix="js") as short:  # or the pages would be in the system's temporary folder
        home = Path(short)
        run = home / "state" / "run"
        run.mkdir(parents=True)
        run.chmod(0o777)
        with serve("plain:app", app_dir=app_dir, home=home) as server:
            server.wait_for_line(r"\[WARNING\] no admin pages: .*unsafe-owner")
            assert server.get("/").text == "ok"
        shown = run_command("status", home=home)
    assert shown.returncode != 0
    assert "may be written by others" in shown.stderr
