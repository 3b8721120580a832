"""A real server, a flag that flips, and a handler that does harm: only the user's own request does it."""

from __future__ import annotations

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.integration.server import Serve, wait_until

pytestmark = pytest.mark.slow

APP = """
import os, pathlib, sqlite3, subprocess, sys, threading, urllib.request

from jumpstart import EffectRefused

OUT = pathlib.Path(os.environ["OUT"])
database = sqlite3.connect(OUT / "shop.db", check_same_thread=False, isolation_level=None, timeout=10)
database.execute("create table if not exists orders (pid integer)")
lock = threading.Lock()

def insert():
    with lock:
        database.execute("insert into orders values (?)", (os.getpid(),))

EFFECTS = [
    lambda: urllib.request.urlopen(os.environ["PAY"], data=b"1").read(),
    lambda: (OUT / f"file-{os.getpid()}").write_text("x"),
    lambda: subprocess.run([sys.executable, "-c", f"open({str(OUT)!r} + '/process-{os.getpid()}', 'w')"]),
    insert,
]

def app(environ, start_response):
    if environ["PATH_INFO"] == "/page":
        import colorsys  # what nobody has imported: cold, so that the siblings are sent this request
        for effect in EFFECTS:
            try:
                effect()
            except EffectRefused:  # and on to the next, for this test
                pass
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]
"""


class _Pay(BaseHTTPRequestHandler):
    paid = 0

    def do_POST(self) -> None:
        type(self).paid += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_shadow_request_does_nothing_to_others(serve: Serve, tmp_path: Path) -> None:
    out, temporary, app = tmp_path / "out", tmp_path / "temporary", tmp_path / "app"
    for folder in (out, temporary, app):
        folder.mkdir()
    (app / "shop.py").write_text(APP)
    pay = ThreadingHTTPServer(("127.0.0.1", 0), _Pay)
    thread = threading.Thread(target=pay.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        env = {"OUT": str(out), "TMPDIR": str(temporary), "PAY": f"http://127.0.0.1:{pay.server_address[1]}/"}
        with serve("shop:app", "-w", "2", app_dir=app, env=env) as server:
            assert server.get("/page").text == "ok"

            def refusals() -> list[str] | None:
                (tenant,) = server.status()["tenants"]
                text = json.dumps(tenant["shadow"])
                wanted = ("connect", "write", "process", "sql")
                return [text] if all(f'"effect": "{effect}"' in text for effect in wanted) else None

            (text,) = wait_until(refusals, timeout=20, why="the sibling's shadow request was refused all four")
            assert "GET /page" in text
            line = server.wait_for_line("shadow request: GET /page was refused: connect 127.0.0.1:")
            assert line
            assert "EffectRefused" not in server.stderr  # a request that failed is counted, and no line each time
            # A worker that comes later runs what was shared before it is ready, under the guard too.
            server.process.send_signal(signal.SIGTTIN)
            wait_until(lambda: len(server.status()["tenants"][0]["workers"]) == 3, 20)
            wait_until(lambda: server.status()["tenants"][0]["warmup_routes"]["GET /page"]["requests"] == 2, 20)
    finally:
        pay.shutdown()
        thread.join(10)
        pay.server_close()
    assert _Pay.paid == 1
    assert len(list(out.glob("file-*"))) == 1
    assert len(list(out.glob("process-*"))) == 1
    import sqlite3

    database = sqlite3.connect(out / "shop.db")
    assert database.execute("select count(*) from orders").fetchall() == [(1,)]
    database.close()
