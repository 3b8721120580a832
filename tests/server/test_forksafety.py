"""The audit names whatever must not exist before a fork, in a process that has just that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jumpstart_server.system import IS_LINUX

ROOT = Path(__file__).parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "server", "warmup"))}
pytestmark = pytest.mark.skipif(not IS_LINUX, reason="Linux only")

# Each case says what it has; one process runs them all, each cleaned up before the next.
CHILD = """
import _thread, asyncio, contextlib, json, os, select, socket, tempfile, threading
from jumpstart_server.forksafety import reasons_not_to_fork

found = {}
def audit(name, own=()):
    found[name] = reasons_not_to_fork(set(own))

audit("nothing")

stop = threading.Event()
thread = threading.Thread(target=stop.wait, name="metrics flusher")
thread.start()
audit("thread")
stop.set()
thread.join()

lock, done = _thread.allocate_lock(), _thread.allocate_lock()
lock.acquire(), done.acquire()
def native():
    lock.acquire()
    done.release()
native_id = _thread.start_new_thread(native, ())
while len(os.listdir("/proc/self/task")) < 2:
    pass
audit("native thread")
lock.release()
done.acquire()
while len(os.listdir("/proc/self/task")) > 1:
    pass

with socket.create_server(("127.0.0.1", 0)) as server:
    audit("listening")
    audit("own", [server.fileno()])
    with socket.create_connection(server.getsockname()) as client:
        audit("connection", [server.fileno()])
        found["port"] = server.getsockname()[1]
with socket.socket(socket.AF_UNIX) as unix:
    audit("unix")
a, b = socket.socketpair()
audit("pair")
a.close(), b.close()

loop = asyncio.new_event_loop()
audit("loop")
loop.close()
with contextlib.closing(select.epoll()):
    audit("epoll")

with tempfile.TemporaryFile() as file:
    r, w = os.pipe()
    audit("files and pipes")
    os.close(r), os.close(w)

audit("nothing again")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    run = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, env=ENVIRON, check=False
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, list[str]] = json.loads(run.stdout)
    return answer


def test_a_quiet_process_may_be_forked(found: dict[str, list[str]]) -> None:
    assert found["nothing"] == []
    assert found["files and pipes"] == []
    assert found["nothing again"] == []


def test_95_a_thread_is_named(found: dict[str, list[str]]) -> None:
    assert found["thread"] == ["thread 'metrics flusher' is running"]


def test_a_thread_that_python_does_not_know_is_named_too(found: dict[str, list[str]]) -> None:
    (reason,) = found["native thread"]
    assert reason.startswith("native thread '") and reason.endswith("' is running")


def test_96_sockets_are_named_by_what_they_are_connected_to(found: dict[str, list[str]]) -> None:
    port = found["port"]
    (reason,) = found["listening"]
    assert reason.startswith(f"socket ('127.0.0.1', {port}) (descriptor ") and reason.endswith("is open")
    (reason,) = found["connection"]
    assert reason.startswith(f"connection to ('127.0.0.1', {port}) (descriptor ")
    (reason,) = found["unix"]
    assert reason.startswith("socket (unnamed)")
    assert [reason.partition(" (")[0] for reason in found["pair"]] == ["connection to"] * 2


def test_the_servers_own_sockets_do_not_count(found: dict[str, list[str]]) -> None:
    assert found["own"] == []


def test_an_event_loop_is_named(found: dict[str, list[str]]) -> None:
    assert any("an event loop exists" in reason and "eventpoll" in reason for reason in found["loop"])
    (reason,) = found["epoll"]
    assert reason.startswith("an event loop exists (descriptor ")


def test_a_socket_as_standard_stream_is_what_everyone_expects() -> None:
    import socket

    ours, theirs = socket.socketpair()
    source = "from jumpstart_server.forksafety import reasons_not_to_fork; print(reasons_not_to_fork(set()))"
    with ours, theirs:
        run = subprocess.run(
            [sys.executable, "-c", source],
            stdin=theirs.fileno(),
            capture_output=True,
            text=True,
            env=ENVIRON,
            check=True,
        )
    assert run.stdout.strip() == "[]"
