"""Settings of several tenants from one reading, and what a running server can take over of a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jumpstart.errors import ConfigError
from jumpstart_server.config import keep_fixed, load_all
from jumpstart_server.settings import Settings

TWO = """
[app]
target = "shop:app"
[tenants.web]
port = 8001
workers = 3
[tenants.chat]
target = "chat:app"
port = 8002
timeout = 600
"""


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(
        self, text: str, line: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **more: Any
    ) -> list[Settings]:
        (self.folder / "jumpstart.toml").write_text(text)
        return load_all(line or {}, environ or {}, cwd=self.folder, **more)

    def refused(self, text: str, **more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            self.load(text, **more)
        return str(caught.value)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_every_tenant_has_its_own_settings_and_shares_the_rest(desk: Desk) -> None:
    web, chat = desk.load(TWO, {"tenant.threads": "7", "server.log_level": "error"}, {"JUMPSTART_KEEP_ALIVE": "9"})
    assert [each.tenant_name for each in (web, chat)] == ["web", "chat"]
    assert (web.target, chat.target) == ("shop:app", "chat:app")
    assert (web.tenant.timeout, chat.tenant.timeout) == (30, 600)
    for each in (web, chat):
        assert (each.tenant.threads, each.tenant.keep_alive, each.server.log_level) == (7, 9, "error")
        assert each.all_workers == 4, "they share the memory"


def test_one_that_is_named_may_be_told_anything(desk: Desk) -> None:
    (chat,) = desk.load(TWO, {"tenant.port": "9000", "tenant.target": "other:app"}, tenant="chat")
    assert (chat.tenant_name, chat.tenant.port, chat.target) == ("chat", 9000, "other:app")
    (only,) = desk.load("[tenants.shop]\nworkers = 2\n", {"tenant.port": "9000"})
    assert (only.tenant_name, only.tenant.port, only.all_workers) == ("shop", 9000, 0)
    (none,) = desk.load("")
    assert none.tenant_name == "web"


@pytest.mark.parametrize(
    ("line", "environ", "place"),
    [
        ({"tenant.bind": ("1.2.3.4:80",)}, {}, "--bind"),
        ({"tenant.port": "80"}, {}, "--port"),
        ({"tenant.profile": "x"}, {}, "--profile"),
        ({"tenant.warmup": "x"}, {}, "--warmup"),
        ({"tenant.target": "a:b", "app.target": "a:b"}, {}, "TARGET"),
        ({}, {"JUMPSTART_UDS": "/x"}, "JUMPSTART_UDS"),
    ],
)
def test_what_only_one_can_have_is_refused_for_several(
    desk: Desk, line: dict[str, Any], environ: dict[str, str], place: str
) -> None:
    text = desk.refused(TWO, line=line, environ=environ)
    assert text.startswith(f"{place} is for one tenant")
    assert "has web, chat; name one with --tenant" in text


@pytest.mark.parametrize(
    ("web", "chat", "clash"),
    [
        ("port = 8001", "port = 8001", True),
        ("", "", True),
        ('bind = "0.0.0.0:8001"', 'bind = "127.0.0.1:8001"', True),
        ('bind = "localhost:8001"', 'bind = ["127.0.0.1:8009", "127.0.0.1:8001"]', True),
        ('bind = "[::]:8001"', 'bind = "127.0.0.1:8001"', True),
        ('uds = "/tmp/x"', 'bind = "unix:/tmp/x"', True),
        ('bind = "127.0.0.1:8001"', 'bind = "127.0.0.2:8001"', False),
        ("port = 0", "port = 0", False),
        ('uds = "/tmp/x"', 'uds = "/tmp/y"', False),
    ],
)
def test_two_tenants_on_one_address_are_named_both(desk: Desk, web: str, chat: str, clash: bool) -> None:
    text = f"[tenants.web]\n{web}\n[tenants.chat]\n{chat}\n"
    if clash:
        assert desk.refused(text).startswith("[tenants.web] and [tenants.chat] have one address, ")
    else:
        assert len(desk.load(text)) == 2


def test_a_port_of_the_platform_cannot_be_shared(desk: Desk) -> None:
    assert "have one address, 0.0.0.0:5000" in desk.refused("[tenants.web]\n[tenants.chat]\n", environ={"PORT": "5000"})


def test_a_new_reading_changes_all_but_what_is_bound_and_the_process_itself(desk: Desk) -> None:
    before, _ = desk.load(TWO)
    (desk.folder / "jumpstart.toml").unlink()
    changed = TWO.replace("8001", "8003").replace("workers = 3", "workers = 5\nbacklog = 7")
    after, _ = desk.load(changed + "[server]\nlog_level = 'error'\n")
    kept, lines = keep_fixed(before, after)
    assert (kept.tenant.workers, kept.tenant.port, kept.tenant.backlog) == (5, 8001, before.tenant.backlog)
    assert kept.server == before.server
    assert [line.partition(":")[0] for line in lines] == ["[server] log_level", "[tenants.web] port, backlog"]
    assert keep_fixed(before, before) == (before, [])
