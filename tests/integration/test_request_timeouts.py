"""Deadlines of requests, in a real server: what clients get, what is logged, who is replaced."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import httpx

from tests.integration.server import Serve, in_parallel, wait_until, write_app

APP = """
import os, sys, time, urllib.request
from urllib.parse import parse_qs

import flask
import jumpstart

app = flask.Flask(__name__)

def wait_in_a_function_with_a_name():
    time.sleep(3.5)

@app.get("/stuck")
def stuck():
    wait_in_a_function_with_a_name()
    return "late"

@app.get("/nap")
def nap():
    time.sleep(0.6)
    return "rested"

@app.get("/pid")
def pid():
    return {"pid": os.getpid(), "left": jumpstart.deadline()}

@app.get("/stream")
def stream():
    def tokens():
        try:
            yield "one "
            while True:
                time.sleep(0.01)
        finally:
            print("the generator is closed", file=sys.stderr)
    return flask.Response(tokens())

@app.post("/ask")
def ask():
    url = flask.request.args["url"]
    try:
        return urllib.request.urlopen(url).read()
    except BaseException as error:
        sys.stderr.write("the handler got " + type(error).__name__ + chr(10))
        raise
"""


def test_1_8_10_11_a_stuck_handler_costs_its_own_request_only(serve: Serve, tmp_path: Path) -> None:
    """The others finish, in the same process; too many such handlers, and it is replaced without a failed request."""
    folder = write_app(tmp_path, "slow", APP)
    access = tmp_path / "access"
    options = ("--timeout", "1", "--threads", "4", "--max-overruns", "1", "--access-logfile", str(access))
    with serve("slow:app", *options, "--access-logformat", "%(m)s %(U)s %(s)s", app_dir=folder) as server:
        server.get("/nap")  # what the first request costs is another story
        first = server.get("/pid").json()
        assert 0.5 < first["left"] <= 1.0

        def one_of_four(number: int) -> tuple[int, str, float]:
            began = time.monotonic()
            response = server.get("/stuck?key=secret" if number == 0 else "/nap")
            return response.status_code, response.text, time.monotonic() - began

        stuck, *others = in_parallel(4, one_of_four)
        assert stuck[:2] == (504, "504 Gateway Timeout: the request took too long\n") and 1.0 <= stuck[2] < 1.5
        assert [other[:2] for other in others] == [(200, "rested")] * 3
        wait_until(lambda: re.search(r"^jumpstart_pool_overruns\S* 1$", server.admin("/metrics").text, re.MULTILINE))
        assert server.get("/pid").json()["pid"] == first["pid"]
        line = server.wait_for_line(r"timeout: GET /stuck is over its timeout of 1 s after 1\.\d+ s, and is stopped")
        assert "secret" not in server.stderr
        assert "wait_in_a_function_with_a_name" in server.stderr[line.start() :]

        broken = b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
            while data := client.recv(65536):
                broken += data
        assert broken.endswith(b"4\r\none \r\n")  # and no last chunk
        wait_until(lambda: "GET /stream 504" in access.read_text())
        server.wait_for_line("the generator is closed")

        codes = in_parallel(2, lambda number: server.get("/stuck").status_code)
        assert codes == [504, 504]
        server.wait_for_line(r"overruns: 2 handlers run on although they were stopped \(--max-overruns\)")
        give_up = time.monotonic() + 20
        while (answer := server.get("/pid")).json()["pid"] == first["pid"]:
            assert answer.status_code == 200 and time.monotonic() < give_up
            time.sleep(0.02)
        lines = access.read_text().splitlines()
        assert sorted(line for line in lines if "/stuck" in line or "/stream" in line) == [
            "GET /stream 504",
            *["GET /stuck 504"] * 3,
        ]
    assert not re.search("internal error|exception in the app", server.stderr)


def test_handlers_that_wait_for_a_peer_are_freed(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path, "slow", APP)
    options = ("--timeout", "1", "--threads", "30", "--on-deadline", "sever", "--max-overruns", "0")
    with (
        socket.create_server(("127.0.0.1", 0), backlog=128) as model,
        serve("slow:app", *options, app_dir=folder) as server,
    ):
        url = f"/ask?url=http://127.0.0.1:{model.getsockname()[1]}/"
        pid = server.get("/pid").json()["pid"]
        assert in_parallel(20, lambda number: server.request("POST", url).status_code) == [504] * 20
        # Clients that leave before the first word.
        for _ in range(5):
            try:
                server.request("POST", url, timeout=0.2)
            except httpx.TimeoutException:
                pass
        wait_until(lambda: server.stderr.count("the handler got RequestTimeout") == 25)
        assert server.get("/pid").json()["pid"] == pid
    assert "overrun" not in server.stderr and "severed" in server.stderr
