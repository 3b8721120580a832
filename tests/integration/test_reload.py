"""``--reload``: a source file that changes brings new workers, which take over when they are ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.load import Load
from tests.integration.server import Serve, wait_until, write_app

pytestmark = pytest.mark.slow

APP = """
    import pathlib

    VERSION = "one"

    async def app(scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": VERSION.encode()})
"""


def test_a_change_is_served_a_mistake_is_not_and_neither_fails_a_request(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "edited", APP)
    with serve("edited:app", "--reload", "--reload-delay", "0.1", app_dir=folder) as server:
        server.wait_for_line(rf"watching {folder} for changes")
        with Load(server.port, 20) as load:
            write_app(folder, "edited", APP.replace("one", "two"))
            server.wait_for_line("changed: edited.py; reloading", 20)
            wait_until(lambda: server.get("/").text == "two", 20)
            write_app(folder, "edited", APP.replace('"one"', "one"))
            server.wait_for_line("the roll to gen=3 has failed, the server goes on as before", 20)
            server.wait_for_line("NameError: name 'one' is not defined")
            assert server.get("/").text == "two"
            (folder / "notes.txt").write_text("not a source")
            write_app(folder, "edited", APP.replace("one", "three"))
            wait_until(lambda: server.get("/").text == "three", 20)
        assert load.failures == {}
        assert "notes.txt" not in server.stderr


def test_an_app_that_cannot_boot_at_first_is_tried_again_when_it_changes(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "edited", APP + "\n    1 / 0\n")
    with serve("edited:app", "--reload", app_dir=folder, wait=False) as server:
        server.wait_for_line("ZeroDivisionError: division by zero", 20)
        server.wait_for_line("waiting for changes")
        write_app(folder, "edited", APP)
        server.wait_ready()
        assert server.get("/").text == "one"
