"""The service manager's protocol: what it passes, what it is told, and that nobody else speaks for us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.config import load_settings
from jumpstart_server.spawn import OF_THE_SERVICE_MANAGER, without_service_variables
from jumpstart_server.systemd import ActivatedSocket, Notifier, activated_sockets, addresses_of_tenant

PID = 4711
TWO = [ActivatedSocket(3, "web"), ActivatedSocket(4, "genai")]


@contextlib.contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """Who listens at *address*, a path or @NAME."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        sock.settimeout(10)
        yield sock


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as name:
        yield Path(name)


def test_the_sockets_are_for_the_process_that_is_named() -> None:
    environ = {"LISTEN_PID": str(PID), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "web:genai"}
    assert activated_sockets(environ, PID) == [*TWO, ActivatedSocket(5, "unknown")]
    assert activated_sockets(environ, PID + 1) == []
    assert activated_sockets({"LISTEN_FDS": "3"}, PID) == []


@pytest.mark.parametrize("text", ["", "x", "-1", "²", "9" * 50])
def test_a_number_of_sockets_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        activated_sockets({"LISTEN_PID": str(PID), "LISTEN_FDS": text}, PID)


def test_a_tenant_without_an_address_takes_what_is_passed() -> None:
    alone = addresses_of_tenant((), TWO, "web", has_address=False, is_alone=True)
    assert alone == ("fd://3", "fd://4")
    assert addresses_of_tenant((), TWO, "genai", has_address=False, is_alone=False) == ("fd://4",)
    assert addresses_of_tenant((), TWO, "other", has_address=False, is_alone=False) == ()
    assert addresses_of_tenant(("h:1",), TWO, "web", has_address=True, is_alone=True) == ("h:1",)


def test_a_socket_can_be_asked_for_by_name() -> None:
    twice = [*TWO, ActivatedSocket(5, "genai")]
    asked = ("h:1", "fd://genai", "fd://7")
    found = addresses_of_tenant(asked, twice, "web", has_address=True, is_alone=True)
    assert found == ("h:1", "fd://4", "fd://5", "fd://7")
    with pytest.raises(ConfigError, match=r"^--bind fd://shop: .* but web, genai; correct the name"):
        addresses_of_tenant(("fd://shop",), TWO, "web", has_address=True, is_alone=True)
    with pytest.raises(ConfigError, match="but none at all"):
        addresses_of_tenant(("fd://shop",), (), "web", has_address=True, is_alone=True)


@given(st.lists(st.sampled_from(["h:1", "fd://3", "fd://9", "unix:/x", "fd://-1", "fd://"])), st.booleans())
def test_what_asks_for_no_name_stays_as_it_is(bind: list[str], alone: bool) -> None:
    assert addresses_of_tenant(bind, TWO, "web", has_address=True, is_alone=alone) == tuple(bind)


def test_the_settings_take_them_before_a_platforms_port_and_after_an_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "web:genai", "PORT": "5000"}
    tenant = load_settings({}, environ, cwd=tmp_path).tenant
    assert (tenant.bind, tenant.port, tenant.host) == (("fd://3", "fd://4"), None, "")
    assert load_settings({"tenant.bind": ("fd://web",)}, environ, cwd=tmp_path).tenant.bind == ("fd://3",)
    assert not caplog.messages
    assert load_settings({"tenant.port": "1"}, environ, cwd=tmp_path).tenant.bind == ()
    assert caplog.messages == ["the service manager passed 2 sockets, and an address of another kind is given"]
    (tmp_path / "jumpstart.toml").write_text("[tenants.web]\n[tenants.genai]\n")
    assert load_settings({}, environ, tenant="genai", cwd=tmp_path).tenant.bind == ("fd://4",)


def test_children_get_none_of_its_variables() -> None:
    environ = dict.fromkeys(OF_THE_SERVICE_MANAGER, "1")
    assert without_service_variables({**environ, "PATH": "/bin"}) == {"PATH": "/bin"}
    assert {"LISTEN_FDS", "NOTIFY_SOCKET", "WATCHDOG_USEC"} <= OF_THE_SERVICE_MANAGER


@pytest.mark.parametrize("abstract", [False, True])
def test_every_state_is_told(folder: Path, abstract: bool) -> None:
    address = f"@{folder.name}" if abstract else str(folder / "notify")
    notifier = Notifier({"NOTIFY_SOCKET": address}, PID, clock_us=lambda: 42)
    assert notifier.is_wanted
    with manager(address) as heard:
        notifier.ready("2 workers\nserve")
        notifier.reloading()
        notifier.stopping("draining", within_s=1.5)
        notifier.status("quiet")
        notifier.status("")
        assert [heard.recv(1000).decode().split("\n") for _ in range(4)] == [
            ["READY=1", f"MAINPID={PID}", "STATUS=2 workers serve"],
            ["RELOADING=1", "MONOTONIC_USEC=42"],
            ["STOPPING=1", "EXTEND_TIMEOUT_USEC=1500000", "STATUS=draining"],
            ["STATUS=quiet"],
        ]
        heard.setblocking(False)
        with pytest.raises(BlockingIOError):
            heard.recv(1000)


def test_nobody_to_tell_costs_nothing_and_one_that_is_gone_a_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Notifier({}, PID).ready()
    assert not caplog.messages
    Notifier({"NOTIFY_SOCKET": "vsock:2:1"}, PID).ready()
    gone = Notifier({"NOTIFY_SOCKET": str(folder / "gone")}, PID)
    with caplog.at_level(logging.WARNING):
        gone.ready()
        gone.stopping()
    assert len(caplog.messages) == 2
    assert "neither a path nor an abstract socket" in caplog.messages[0]
    assert "cannot be told READY=1" in caplog.messages[1]


@pytest.mark.parametrize(("watched", "is_fed"), [(PID, True), (PID + 1, False), (None, True)])
def test_the_watchdog_is_fed_at_half_of_its_time_and_a_boot_asks_for_time(
    folder: Path, watched: int | None, is_fed: bool
) -> None:
    environ = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "40000"}
    if watched is not None:
        environ["WATCHDOG_PID"] = str(watched)
    notifier = Notifier(environ, PID)

    async def serve() -> list[str]:
        task = asyncio.create_task(notifier.run())
        said: list[str] = []
        heard.settimeout(None)
        for _ in range(4 if is_fed else 1):
            said.append((await asyncio.to_thread(heard.recv, 1000)).decode())
        notifier.ready()
        assert (await asyncio.to_thread(heard.recv, 1000)).decode().startswith("READY=1")
        if is_fed:
            said.append((await asyncio.to_thread(heard.recv, 1000)).decode())
        task.cancel()
        return said

    with manager(environ["NOTIFY_SOCKET"]) as heard:
        said = asyncio.run(asyncio.wait_for(serve(), 20))
    extend = "EXTEND_TIMEOUT_USEC=30000000"
    assert said == ([extend, "WATCHDOG=1", extend, "WATCHDOG=1", "WATCHDOG=1"] if is_fed else [extend])
