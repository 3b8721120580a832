"""What `jumpstart export` writes for systemd and Kubernetes, done by hand: what they expect is what comes of it."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from jumpstart_server.export import kubernetes
from jumpstart_server.export.kubernetes import KubernetesOptions
from jumpstart_server.export.yaml import plain
from tests.integration.server import (
    COMMAND,
    Serve,
    clean_environment,
    connects,
    free_port,
    run_command,
    wait_until,
    write_app,
)
from tests.server.export_lab import tenants_from

pytestmark = pytest.mark.slow

APP = """
def app(environ, start_response):
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]
"""


def test_a_pods_arguments_give_what_its_probes_ask_for(serve: Serve, tmp_path: Path) -> None:
    write_app(tmp_path, "shop_web", APP)
    port, admin = free_port(), free_port()
    text = f"""
        [app]
        target = "shop_web:app"
        app_dir = "{tmp_path}"
        [server]
        admin = "127.0.0.1:{admin}"
        [tenants.web]
        bind = "127.0.0.1:{port}"
        drain_delay = 1
        [tenants.other]
        bind = "unix:{tmp_path}/other.sock"
    """
    options = KubernetesOptions(image="shop:1", config=str(tmp_path / "jumpstart.toml"))
    deployment: dict[str, Any] = plain(kubernetes.objects(tenants_from(tmp_path, text), options)[0])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["jumpstart"] and container["args"][0] == "serve"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}

    def probe(name: str) -> int:
        asked = container[name]["httpGet"]
        return httpx.get(f"http://127.0.0.1:{ports[asked['port']]}{asked['path']}", trust_env=False).status_code

    with serve("", *container["args"][1:], address=()) as server:
        assert server.url == f"http://0.0.0.0:{port}"
        wait_until(lambda: probe("startupProbe") == 200)
        assert (probe("readinessProbe"), probe("livenessProbe")) == (200, 200)
        assert httpx.get(f"http://127.0.0.1:{ports['http']}", trust_env=False).text == "ok"
        server.process.send_signal(signal.SIGTERM)
        # Lame duck: no new traffic is asked for, and what comes is served.
        wait_until(lambda: probe("readinessProbe") == 503)
        assert httpx.get(f"http://127.0.0.1:{ports['http']}", trust_env=False).text == "ok"
        assert server.wait() == 0


def values(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


def test_a_units_command_takes_the_sockets_of_its_socket_unit(tmp_path: Path) -> None:
    activate = shutil.which("systemd-socket-activate")
    if activate is None:
        pytest.skip("systemd-socket-activate is not installed")
    write_app(tmp_path, "shop_web", APP)
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    (tmp_path / "jumpstart.toml").write_text(
        f"""
        [app]
        target = "shop_web:app"
        [tenants.web]
        bind = "127.0.0.1:{port}"
        [tenants.other]
        bind = "unix:/run/other.sock"
        """
    )
    words = ("export", "systemd", "--per-tenant", "--sockets", "--command", str(COMMAND), "-o", f"{tmp_path}/units/")
    done = run_command(*words, home=home, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    service = dict(
        re.findall(r"^(\w+)=(.*)$", (tmp_path / "units" / "jumpstart-web.service").read_text(), re.MULTILINE)
    )
    sock = dict(re.findall(r"^(\w+)=(.*)$", (tmp_path / "units" / "jumpstart-web.socket").read_text(), re.MULTILINE))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        process = subprocess.Popen(
            [
                *(activate, "-l", sock["ListenStream"], "--fdname", sock["FileDescriptorName"]),
                *("-E", f"NOTIFY_SOCKET={tmp_path}/notify", "-E", f"JUMPSTART_HOME={home}"),
                *shlex.split(service["ExecStart"]),
            ],
            cwd=service["WorkingDirectory"],
            env=clean_environment(home),
        )
        try:
            wait_until(lambda: connects(port), 10, "the socket listens before the server runs")
            assert httpx.get(f"http://127.0.0.1:{port}", timeout=30, trust_env=False).text == "ok"
            said = ""
            while "READY=1" not in said:
                said = manager.recv(4096).decode()
            assert f"MAINPID={process.pid}" in said
            process.terminate()
            while "STOPPING=1" not in said:
                said = manager.recv(4096).decode()
            assert process.wait(20) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
