"""Several tenants in one server: each with its own address, processes and fate."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.server import Serve, connects, free_port, run_command, wait_until, working_folder, write_app

pytestmark = pytest.mark.slow

TWO_APPS = """
    import os, pathlib

    def make(name):
        async def app(scope, receive, send):
            if scope["type"] == "lifespan":
                await receive()
                if pathlib.Path(os.environ["DOOM"]).exists() and name == "chat":
                    raise ConnectionRefusedError("the model is away")
                await send({"type": "lifespan.startup.complete"})
                await receive()
                await send({"type": "lifespan.shutdown.complete"})
                return
            if scope["path"] == "/exit":
                os._exit(7)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": name.encode()})
        return app

    web, chat = make("web"), make("chat")
"""


@pytest.fixture
def ports(tmp_path: Path, home: Path) -> tuple[int, int]:
    """The ports of tenants web and chat, whose file lies where the server starts."""
    current = working_folder(home)
    web, chat = free_port(), free_port()
    (current / "jumpstart.toml").write_text(
        f'[tenants.web]\ntarget = "two:web"\nport = {web}\nworkers = 2\n'
        f'[tenants.chat]\ntarget = "two:chat"\nport = {chat}\ncrash_limit = 3\nlifespan = "on"\nthreads = "auto"\n'
    )
    return web, chat


def ask(port: int, path: str = "/") -> str:
    return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, verify=False, timeout=10).text


def test_tenants_are_served_side_by_side_and_told_apart(
    serve: Serve, tmp_path: Path, home: Path, ports: tuple[int, int]
) -> None:
    folder = write_app(tmp_path / "app", "two", TWO_APPS)
    doom = tmp_path / "doom"
    with serve("", "--crash-limit", "3", app_dir=folder, address=(), env={"DOOM": str(doom)}) as server:
        wait_until(lambda: server.admin("/readyz").status_code == 200, 20)
        assert (ask(ports[0]), ask(ports[1])) == ("web", "chat")
        assert server.admin("/readyz").text == "web: 2 workers ready\nchat: 1 worker ready\n"
        assert server.admin("/readyz/chat").text == "1 worker ready\n"
        for name, count in (("web", 2), ("chat", 1)):
            status = server.status(1, tenant=name)
            assert (status["tenant"], status["target"], len(status["workers"])) == (name, f"two:{name}", count)
            assert status["requests"] == 1
        families = {each.name: each for each in text_string_to_metric_families(server.admin("/metrics").text)}
        assert {sample.labels["tenant"] for sample in families["jumpstart_workers"].samples} == {"web", "chat"}
        shown = run_command("status", home=home)
        assert "two:web (tenant web) at" in shown.stdout and "two:chat (tenant chat) at" in shown.stdout
        server.wait_for_line(r"tenant=web worker=1 gen=1 pid=\d+ ready")
        server.wait_for_line(r"tenant=chat worker=0 gen=1 pid=\d+ ready")
        # What the workers say for themselves, too.
        (chat,) = [worker["pid"] for worker in server.status(tenant="chat")["workers"]]
        server.wait_for_line(rf"\[{chat}\] \[\w+\] tenant=chat .*threads = ")

        # One crashes again and again: it is given up, and the other does not notice.
        doom.touch()
        os.kill(chat, signal.SIGKILL)
        server.wait_for_line(r"\[ERROR\] tenant=chat given up after 3 failures in a row", 20)
        assert ask(ports[0]) == "web"
        assert not connects(ports[1])
        assert server.status(tenant="chat")["given_up"].startswith("given up after 3 failures")
        assert (server.admin("/readyz").status_code, server.admin("/readyz/chat").status_code) == (200, 503)

        # A roll tries it again.
        doom.unlink()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: connects(ports[1]), 20)
        assert ask(ports[1]) == "chat"
        assert server.status(tenant="chat")["given_up"] == ""
        wait_until(lambda: (server.status(tenant="web")["last_roll"] or {}).get("outcome") == "done", 20)


def test_a_tenant_that_cannot_boot_keeps_no_other_from_serving(
    serve: Serve, tmp_path: Path, ports: tuple[int, int]
) -> None:
    folder = write_app(tmp_path / "app", "two", TWO_APPS)
    doom = tmp_path / "doom"
    doom.touch()
    with serve("", app_dir=folder, address=(), env={"DOOM": str(doom)}) as server:
        server.wait_for_line(r"\[ERROR\] tenant=chat the app's lifespan start-up failed", 20)
        assert ask(ports[0]) == "web"
        assert not connects(ports[1])
        wait_until(lambda: server.admin("/readyz").status_code == 200)
        document = server.status(tenant="chat")
        assert (document["ready"], document["given_up"]) == (False, "the app's lifespan start-up failed")
        server.wait_for_line("tenant=chat given up; the other tenants serve on. Mend it, and send SIGHUP")
        assert server.stderr.count(f"pid {server.pid} boots two:web (tenant web), two:chat (tenant chat)") == 1
    assert "chat was given up before; the exit code is that of a stop all the same" in server.stderr


def test_when_all_tenants_are_given_up_the_server_ends(serve: Serve, tmp_path: Path, ports: tuple[int, int]) -> None:
    folder = write_app(tmp_path / "app", "two", "raise RuntimeError('nothing here')")
    with serve("", app_dir=folder, address=(), env={"DOOM": "/"}, wait=False) as server:
        assert server.wait(30) == 3
        assert server.stderr.count("RuntimeError: nothing here") == 2  # each of them says why


def test_one_tenant_can_be_named_and_what_is_for_one_is_refused_for_several(
    serve: Serve, tmp_path: Path, ports: tuple[int, int]
) -> None:
    folder = write_app(tmp_path / "app", "two", TWO_APPS)
    with serve("", "--tenant", "chat", app_dir=folder, address=(), env={"DOOM": str(tmp_path / "no")}) as server:
        assert ask(ports[1]) == "chat"
        assert not connects(ports[0])
        assert "tenant=" not in server.stderr
    with serve("two:web", app_dir=folder, address=(), wait=False) as server:
        assert server.wait() == 2
        assert "TARGET is for one tenant, and " in server.stderr
        assert "has web, chat; name one with --tenant" in server.stderr
