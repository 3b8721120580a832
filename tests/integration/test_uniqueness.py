"""No two workers share what they draw, and hooks of the app run around captures, restores and forks."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from tests.integration.server import Serve, Server, in_parallel, wait_until, write_app

pytestmark = [pytest.mark.slow, pytest.mark.real_command]

WORKERS = 4
BATCHES = 3  # per worker, of `COUNT` values of each kind
COUNT = 300

# Draws everything once while it is imported, so that what a fork copies is there to be copied.
DRAWING = """
import os, random, secrets, ssl, tempfile, uuid
import email.utils
import jumpstart

def shop_reference(rng=random):
    return "%016x" % rng.getrandbits(64)

OWN = random.Random()  # a generator of the app's own: nobody but the app can reseed it

@jumpstart.on_restore
def reseed():
    OWN.seed()

KINDS = {
    "random": shop_reference,
    "own": lambda: shop_reference(OWN),
    "shuffled": lambda: "".join(random.sample("0123456789abcdefghijklmnopqrstuvwxyz", 30)),
    "uuid1": lambda: uuid.uuid1().hex,
    "uuid4": lambda: uuid.uuid4().hex,
    "secrets": lambda: secrets.token_urlsafe(16),
    "urandom": lambda: os.urandom(12).hex(),
    "ssl": lambda: ssl.RAND_bytes(12).hex(),
    "tempfile": lambda: next(tempfile._get_candidate_names()) + next(tempfile._get_candidate_names()),
    "message-id": email.utils.make_msgid,
}
for draw in KINDS.values():
    draw()

def drawn():
    lines = [str(os.getpid())]
    for name, draw in KINDS.items():
        lines += [name + " " + draw() for _ in range(COUNT)]
    return "\\n".join(lines).encode()
"""

WSGI = (
    f"COUNT = {COUNT}\n"
    + DRAWING
    + """
def app(environ, start_response):
    body = drawn()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""
)

ASGI = (
    f"COUNT = {COUNT}\n"
    + DRAWING
    + """
async def app(scope, receive, send):
    assert scope["type"] == "http"
    body = drawn()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
"""
)


@pytest.mark.parametrize("text", [WSGI, ASGI], ids=["wsgi", "asgi"])
def test_no_two_workers_draw_the_same(serve: Serve, tmp_path: Path, text: str) -> None:
    """Random numbers, ids, keys and temporary names, tens of thousands of them, of workers that are forks."""
    with serve(
        "draws:app", "-w", str(WORKERS), "--no-warm-start", app_dir=write_app(tmp_path / "app", "draws", text)
    ) as server:
        assert server.status()["start_method"] == "fork"
        wait_until(lambda: len(server.worker_pids()) == WORKERS, 30)
        values: dict[str, list[str]] = {}
        pids: dict[str, int] = {}
        sequences: dict[str, set[int]] = {}  # of uuid1, by process
        # All at once, so that they draw within the same microseconds.
        while len(pids) < WORKERS or min(pids.values()) < BATCHES:
            for answer in in_parallel(2 * WORKERS, lambda _: server.get("/").text):
                pid, *lines = answer.splitlines()
                pids[pid] = pids.get(pid, 0) + 1
                for line in lines:
                    kind, _, value = line.partition(" ")
                    values.setdefault(kind, []).append(value)
                    if kind == "uuid1":
                        sequences.setdefault(pid, set()).add(uuid.UUID(value).clock_seq)
            assert sum(pids.values()) < 2000, f"not all workers answer: {pids}"
    assert set(values) >= {"random", "own", "uuid1", "uuid4", "secrets", "ssl", "tempfile"}
    for kind, drawn in values.items():
        assert len(drawn) >= WORKERS * BATCHES * COUNT
        assert len(set(drawn)) == len(drawn), f"{kind}: {len(drawn) - len(set(drawn))} values came twice"
    # That two processes ask at the very same moment is left to chance above; here is what tells them apart then.
    assert sum(map(len, sequences.values())) == len(set().union(*sequences.values())), sequences


HOOKED = """
import os, pathlib, socket, time
import jumpstart

notes = pathlib.Path(os.environ["NOTES"])
pool = [socket.socketpair()]  # would keep the process from being forked

def note(text):
    with notes.open("a") as file:
        file.write(f"{text} {os.getpid()}\\n")

@jumpstart.on_capture
def close():
    for sock in pool.pop():
        sock.close()
    note("closed")

@jumpstart.on_capture
def told(purpose):
    note("captured-for-" + purpose)

@jumpstart.on_restore
def reopen():
    pool.append(socket.socketpair())
    note("reopened")

@jumpstart.on_restore
async def in_the_loop():
    note("awaited")

@jumpstart.on_restore
def fails():
    raise LookupError("no such region")

@jumpstart.on_restore
def hangs():
    time.sleep(3600)

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        note("lifespan")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    if len(pool) != 1:
        raise RuntimeError("the pool is not open")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
"""


def noted(notes: Path) -> list[tuple[str, int]]:
    return [(text, int(pid)) for text, pid in (line.split() for line in notes.read_text().splitlines())]


def test_hooks_close_before_the_fork_and_open_in_every_worker(serve: Serve, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    folder = write_app(tmp_path / "app", "hooked", HOOKED)
    with serve("hooked:app", "-w", "2", "--restore-timeout", "1", app_dir=folder, env={"NOTES": str(notes)}) as server:
        assert server.status()["start_method"] == "fork"  # the sockets were closed before the audit
        workers = wait_until(lambda: pids if len(pids := server.worker_pids()) == 2 else None, 30)
        assert server.get("/").status_code == 200
        mold = noted(notes)[0][1]
        assert noted(notes)[:2] == [("captured-for-fork", mold), ("closed", mold)]  # the last one registered first
        for worker in workers:
            assert [text for text, pid in noted(notes) if pid == worker][:3] == ["reopened", "awaited", "lifespan"]
        file = tmp_path / "captured.jumpstart"
        capture(server, file)
        assert {text for text, _ in noted(notes)} >= {"captured-for-ship"}
        assert server.get("/").status_code == 200  # the pool is still open
        assert len([text for text, _ in noted(notes) if text == "closed"]) == 1
        assert len(re.findall(r"on_restore hook hooked:fails raised", server.stderr)) == 2
        assert "LookupError: no such region" in server.stderr
        assert len(re.findall(r"on_restore hook hooked:hangs was left", server.stderr)) == 2


def capture(server: Server, file: Path) -> None:
    from tests.integration.server import run_command

    done = run_command("profile", "capture", "-o", str(file), home=server.home)
    assert done.returncode == 0, done.stderr
