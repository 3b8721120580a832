"""Requests that a worker asks of its own app: what golden ones may do beside real ones, and how long they may take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jumpstart.guard import EffectGuard
from jumpstart_server import driving
from jumpstart_server.driving import AppDriver
from jumpstart_server.settings import TenantSettings
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.middleware import StartResponse
from jumpstart_warmup.routes import Environ

REQUESTS = [WarmRequest(path="/writes"), WarmRequest(path="/reads", repeat=3)]


class App:
    """Writes a line for each request to ``/writes``; takes its time where it is asked for ``/slow``."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.asked: list[str] = []

    def answer(self, path: str) -> None:
        self.asked.append(path)
        if path == "/writes":
            with self.file.open("a") as file:
                file.write("x")

    def wsgi(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        self.answer(environ["PATH_INFO"])
        if environ["PATH_INFO"] == "/slow":
            time.sleep(1.5)
        start_response("200 OK", [])
        return [b"x"]

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self.answer(scope["path"])
        if scope["path"] == "/slow":
            await asyncio.sleep(60)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    def driver(self, interface: Any, threads: int = 4) -> AppDriver:
        tenant = TenantSettings(threads=threads)
        assert tenant.guard == "shadow", "the default"
        app = self.wsgi if interface == "wsgi" else self.asgi
        return AppDriver(app, interface, tenant, EffectGuard(folders=()))


@pytest.mark.parametrize("interface", ["wsgi", "asgi3"])
def test_golden_requests_beside_real_ones_have_no_effects_and_others_do_as_warm_up_requests(
    interface: str, tmp_path: Path
) -> None:
    app = App(tmp_path / "written")
    golden = asyncio.run(app.driver(interface).golden(REQUESTS, beside_others=True))
    assert [each.request for each in golden] == ["GET /reads"] and not app.file.exists()
    golden = asyncio.run(app.driver(interface).golden(REQUESTS, beside_others=False))
    assert [each.request for each in golden] == ["GET /writes", "GET /reads"] and app.file.read_text() == "xx"


def test_nothing_is_asked_beside_the_one_thread_of_an_app(tmp_path: Path) -> None:
    app = App(tmp_path / "written")
    assert asyncio.run(app.driver("wsgi", threads=1).golden(REQUESTS, beside_others=True)) == []
    assert app.asked == []
    assert len(asyncio.run(app.driver("wsgi", threads=1).golden(REQUESTS, beside_others=False))) == 2


@pytest.mark.parametrize("interface", ["wsgi", "asgi3"])
def test_what_is_slow_leaves_others_their_time_and_what_has_none_has_no_answer(
    interface: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "GOLDEN_BUDGET", 2.0)
    monkeypatch.setattr(driving, "PATIENCE", 0.0)
    app = App(tmp_path / "written")
    slow = [WarmRequest(path="/slow"), *REQUESTS, WarmRequest(path="/slow?again"), WarmRequest(path="/slow?3")]
    answers = asyncio.run(app.driver(interface).answers(slow))
    assert [(each.name, bool(each.shape)) for each in answers[:3]] == [
        ("GET /slow", False),
        ("GET /writes", True),
        ("GET /reads", True),
    ]
    assert "GET /slow?3" not in {each.name for each in answers}, "it was not given the time that the first one had"
