"""Fixtures of the tests that run real servers; `server.py` tells how to use them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.server import Serve, Server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The host's state folder of this test's servers."""
    return tmp_path / "home"


@pytest.fixture
def serve(tmp_path: Path, home: Path, request: pytest.FixtureRequest) -> Serve:
    """Makes servers: ``with serve("asgi_app:app", "-w", "2", app_dir=APPS / "asgi_bare") as server``."""
    forked = request.node.get_closest_marker("real_command") is None
    numbers = itertools.count(1)
    host = home

    def make(
        target: str,
        *options: str,
        app_dir: Path | None = None,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        address: tuple[str, ...] = ("--port", "0"),
        wait: bool = True,
        pass_fds: tuple[int, ...] = (),
    ) -> Server:
        return Server(
            target,
            *options,
            app_dir=app_dir,
            home=home or host,
            log=tmp_path / f"stderr-{next(numbers)}.log",
            env=env,
            address=address,
            wait=wait,
            pass_fds=pass_fds,
            forked=forked,
        )

    return make
