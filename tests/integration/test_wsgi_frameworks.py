"""
What four frameworks expect of a server: large uploads and downloads, events, chunked bodies; memory stays as it is.

Flask, Django and bare Werkzeug on the WSGI engine; Starlette, for comparison, on ASGI, with a WebSocket.
Sizes are 96 MiB; TEST_TRANSFER_MIB=1024 in the environment makes them 1 GiB, which takes some seconds each.
Each framework has one server for all tests here, and one more with ``--stream-bodies``.

A whole body (the default) lies in an unlinked file in the temporary folder while its request runs: it needs free disk
of its own size, and no more. With ``--stream-bodies`` it needs none.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import websockets.asyncio.client
import websockets.exceptions

from tests.integration.server import APPS, Server, wait_until

pytestmark = pytest.mark.slow

FOLDER = APPS / "transfers"
MIB = 1024 * 1024
SIZE = int(os.environ.get("TEST_TRANSFER_MIB", "96")) * MIB
PATIENCE = 60.0  # seconds, for one step of a transfer
GROWTH = 24 * MIB  # of a worker's memory; a body would be four times as much
WSGI = ["flask", "django", "werkzeug"]
ALL = [*WSGI, "starlette"]
BLOCK = bytes(MIB)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The servers' folder for temporary files."""
    return tmp_path_factory.mktemp("temporary")


Started = Callable[..., Server]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Iterator[Started]:
    """``started("flask", "--stream-bodies")`` is the running server of a framework with these options."""
    servers: dict[tuple[str, ...], Server] = {}
    with ExitStack() as stack:

        def of(framework: str, *options: str) -> Server:
            if (framework, *options) not in servers:
                folder = tmp_path_factory.mktemp(framework)
                servers[framework, *options] = stack.enter_context(
                    Server(
                        f"{framework}_transfers:app",
                        *options,
                        app_dir=FOLDER,
                        home=folder / "home",
                        log=folder / "log",
                        env={"TMPDIR": str(temporary)},
                    )
                )
            return servers[framework, *options]

        yield of


def status_kib(pid: int, name: str) -> int:
    """A line of /proc/PID/status in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {name} of {pid}")


def unlinked_files(pid: int) -> list[int]:
    """Sizes of the files without a name that a process holds open; files in memory are none."""
    sizes = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
            if target.startswith("/") and target.endswith("(deleted)") and not target.startswith("/memfd:"):
                sizes.append(link.stat().st_size)
        except OSError:
            continue  # closed meanwhile
    return sizes


class Costs:
    """
    What a worker took while it was watched.

    Attributes:
        memory: bytes by which its memory grew, at its peak.
        disk: bytes in unlinked files, at their peak.
    """

    memory = 0
    disk = 0


@contextmanager
def costs_of(server: Server) -> Iterator[Costs]:
    """Watch the one worker of *server*."""
    (pid,) = server.wait_workers(1)
    assert server.get("/produced").status_code == 200  # what a first request loads is not a transfer's
    costs, done = Costs(), threading.Event()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = status_kib(pid, "VmRSS")

    def watch() -> None:
        while not done.wait(0.02):
            costs.disk = max(costs.disk, sum(unlinked_files(pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield costs
    finally:
        done.set()
        watcher.join()
    costs.memory = (status_kib(pid, "VmHWM") - before) * 1024
    print(f"memory {costs.memory / MIB:+.1f} MiB, disk {costs.disk / MIB:.1f} MiB")
    wait_until(lambda: not unlinked_files(pid), why="its temporary files are gone")
    assert server.worker_pids() == [pid]


@contextmanager
def connected(server: Server, receive_buffer: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE)
        sock.connect(("127.0.0.1", server.port))
        yield sock


def head_of(sock: socket.socket) -> tuple[bytes, bytes]:
    """The head of a response, and what came of the body with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += (more := sock.recv(65536))
        assert more, f"closed after {data!r}"
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def free_disk(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def upload(server: Server, framing: str, *fields: str) -> Any:
    """Send `SIZE` zeros; the JSON that the app answers."""
    head = ["POST /upload HTTP/1.1", "Host: test", "Connection: close", "Content-Type: application/octet-stream"]
    with connected(server) as sock:
        if framing == "length":
            sock.sendall("\r\n".join([*head, *fields, f"Content-Length: {SIZE}", "", ""]).encode())
            if any(field.startswith("Expect") for field in fields):
                assert head_of(sock)[0] == b"HTTP/1.1 100 Continue"
            for _ in range(SIZE // len(BLOCK)):
                sock.sendall(BLOCK)
        else:
            sock.sendall("\r\n".join([*head, *fields, "Transfer-Encoding: chunked", "", ""]).encode())
            chunk = b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK)
            for _ in range(SIZE // len(BLOCK)):
                sock.sendall(chunk)
            sock.sendall(b"0\r\n\r\n")
        with http.client.HTTPResponse(sock) as answer:
            answer.begin()
            body = answer.read()
            assert answer.status == 200, body
            return json.loads(body)


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("framework", ALL)
def test_a_large_upload(started: Started, temporary: Path, framework: str, framing: str) -> None:
    if free_disk(temporary) < 2 * SIZE:
        pytest.skip("not enough disk for the body")
    server = started(framework)
    with costs_of(server) as costs:
        assert upload(server, framing) == {"size": SIZE, "zeros": True}
    assert costs.memory < GROWTH
    assert costs.disk <= (SIZE if framework in WSGI else 0)


@pytest.mark.parametrize(
    ("framework", "framing"),
    [
        *((framework, framing) for framework in WSGI for framing in ("length", "expect")),
        *(("flask", "chunked"), ("werkzeug", "chunked")),  # Django takes a body without Content-Length for none
    ],
)
def test_a_large_upload_that_is_streamed(started: Started, framework: str, framing: str) -> None:
    """Takes neither memory nor disk."""
    options = ("--stream-bodies",) if framing != "expect" else ()
    fields = ("Expect: 100-continue",) if framing == "expect" else ()
    server = started(framework, *options)
    with costs_of(server) as costs:
        answer = upload(server, "chunked" if framing == "chunked" else "length", *fields)
        assert answer == {"size": SIZE, "zeros": True}
    assert costs.memory < GROWTH
    assert costs.disk == 0


def is_stuck(server: Server) -> bool:
    """Whether the app has produced something, and nothing more since the last look."""
    before = int(server.get("/produced").text)
    threading.Event().wait(0.1)
    return 0 < before == int(server.get("/produced").text)


@pytest.mark.parametrize("framework", ALL)
def test_a_large_download_to_a_slow_reader(started: Started, framework: str) -> None:
    """It reads nothing until the app has to wait, and then with a small window: the body never lies in memory."""
    server = started(framework)
    with costs_of(server) as costs, connected(server, receive_buffer=64 * 1024) as sock:
        sock.sendall(f"GET /download/{SIZE} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
        wait_until(lambda: is_stuck(server), PATIENCE, "the app waits for its reader")
        assert int(server.get("/produced").text) < 16 * MIB
        head, rest = head_of(sock)
        assert head.startswith(b"HTTP/1.1 200 ")
        size = len(rest)
        while more := sock.recv(MIB):
            size += len(more)
        assert size == SIZE
    assert costs.memory < GROWTH


@pytest.mark.parametrize("framework", ALL)
def test_a_large_file(started: Started, tmp_path: Path, framework: str) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(SIZE)  # holes: no disk
    server = started(framework)
    with costs_of(server) as costs, connected(server) as sock:
        sock.sendall(f"GET /file?path={path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
        head, rest = head_of(sock)
        assert head.startswith(b"HTTP/1.1 200 ")
        size = len(rest)
        while more := sock.recv(MIB):
            size += len(more)
        assert size == SIZE
    assert costs.memory < GROWTH


@pytest.mark.parametrize("framework", ALL)
def test_server_sent_events_arrive_one_by_one(started: Started, framework: str) -> None:
    """Each is asked for when the one before it has come, so none may wait for another in any buffer."""
    server = started(framework)
    with costs_of(server) as costs, server.client(PATIENCE) as client, server.client(PATIENCE) as pusher:
        assert pusher.post("/push/0").status_code == 200
        with client.stream("GET", "/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in answer.iter_lines() if line)
            for number in range(500):
                assert next(lines) == f"data: {number}"
                pusher.post(f"/push/{number + 1}")
            assert next(lines) == "data: 500"
            pusher.post("/push/end")
            assert next(lines, None) is None
    assert costs.memory < GROWTH


def test_a_websocket_echo(started: Started) -> None:
    async def talk(url: str) -> None:
        async with websockets.asyncio.client.connect(url, proxy=None, max_size=None) as connection:
            for number in range(100):
                await connection.send(f"\u00fc {number}")
                assert await connection.recv() == f"\u00fc {number}"
            for size in (0, 1, 125, 126, 65535, 65536, 8 * MIB):
                await connection.send(bytes(size))
                assert await connection.recv() == bytes(size)
            await connection.send(["in ", "three ", "fragments"])
            assert await connection.recv() == "in three fragments"
            await (await connection.ping(b"are you there"))
            await connection.close(4001, "enough")
            assert connection.close_code == 4001
            with pytest.raises(websockets.exceptions.ConnectionClosed):
                await connection.recv()

    server = started("starlette")
    asyncio.run(asyncio.wait_for(talk(server.url.replace("http", "ws") + "/echo"), PATIENCE))
    assert server.get("/produced").status_code == 200
