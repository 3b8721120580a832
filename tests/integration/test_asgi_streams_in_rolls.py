"""Token streams of apps that listen for their client: whole in a roll, told at once when the server stops."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from tests.integration.server import Serve, Server, wait_until, write_app

pytestmark = pytest.mark.slow

TOKENS = """
    import asyncio

    async def app(scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError
        tokens = int(scope["path"].strip("/"))
        gone = asyncio.Event()

        async def listen():
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        listening = asyncio.create_task(listen())
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(tokens):
            if gone.is_set():
                await send({"type": "http.response.body", "body": b"data: told\\n\\n", "more_body": False})
                break
            await send({"type": "http.response.body", "body": b"data: %d\\n\\n" % number, "more_body": True})
            await asyncio.sleep(0.1)
        else:
            await send({"type": "http.response.body", "body": b"data: end\\n\\n", "more_body": False})
        listening.cancel()
"""


class Reader(threading.Thread):
    """Reads a stream of *tokens*, ten a second."""

    def __init__(self, server: Server, tokens: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._tokens = tokens
        self.text = ""
        self.start()
        wait_until(lambda: "data: 2\n" in self.text)

    def run(self) -> None:
        with self._server.client(timeout=60) as client, client.stream("GET", f"/{self._tokens}") as response:
            for piece in response.iter_text():
                self.text += piece


def test_61_a_roll_lets_token_streams_end_and_a_stop_tells_them_at_once(serve: Serve, tmp_path: Path) -> None:
    write_app(tmp_path, "tokens", TOKENS)
    with serve("tokens:app", "--workers", "1", "--graceful-timeout", "40", app_dir=tmp_path) as server:
        reader = Reader(server, 30)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line(r"\bgen=2 serves, ready in", 30)
        assert "end" not in reader.text  # or the roll came too late to show anything
        reader.join(30)
        assert reader.text.count("data: ") == 31
        assert reader.text.endswith("data: end\n\n")

        # One whose worker drains already hears of the stop, too, and so does one of the worker that serves.
        drained = Reader(server, 600)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line(r"\bgen=3 serves, ready in", 30)
        current = Reader(server, 600)
        assert "told" not in drained.text
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for told in (drained, current):
            told.join(30)
            assert told.text.endswith("data: told\n\n")
        assert time.monotonic() - began < 20
        assert server.wait() == 0


def test_61_streams_in_a_roll_are_told_before_the_time_is_over(serve: Serve, tmp_path: Path) -> None:
    write_app(tmp_path, "tokens", TOKENS)
    with serve("tokens:app", "--workers", "1", "--graceful-timeout", "3", app_dir=tmp_path) as server:
        reader = Reader(server, 600)
        server.process.send_signal(signal.SIGHUP)
        reader.join(40)
        assert reader.text.endswith("data: told\n\n")
