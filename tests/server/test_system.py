"""What we ask of Linux, asked for real, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jumpstart_server.system import IS_LINUX, describe_status

ROOT = Path(__file__).parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "server", "warmup"))}
linux = pytest.mark.skipif(not IS_LINUX, reason="Linux only")


def child(source: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=ENVIRON)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_an_exit_code_in_words(code: int) -> None:
    assert describe_status(code << 8) == f"exit code {code}"


def test_a_signal_in_words() -> None:
    assert describe_status(signal.SIGKILL) == "SIGKILL"
    assert describe_status(signal.SIGSEGV | 0x80) == "SIGSEGV"  # with a core
    assert describe_status(60) in ("signal 60", "SIGRTMAX-4")


@linux
def test_a_process_dies_with_its_parent_even_while_it_holds_the_gil() -> None:
    source = """
import os, sys
from jumpstart_server.system import die_with_parent
parent = os.getpid()
pid = os.fork()
if pid == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
    (1 << 60_000_000) ** 3
    os._exit(0)
os.waitpid(pid, 0)
"""
    process = child(source)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert eventually(lambda: not is_running(grandchild))


@linux
def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    process = child("from jumpstart_server.system import die_with_parent\ndie_with_parent(1 << 22, patience_s=0.01)\n")
    process.communicate(timeout=60)
    assert process.returncode == 1


@linux
def test_a_grandchild_is_adopted_and_only_then_bound_to_its_new_parent() -> None:
    source = """
import os
from jumpstart_server.system import adopt_orphans, die_with_parent
adopt_orphans()
supervisor = os.getpid()
between = os.fork()
if between == 0:
    if os.fork() == 0:
        die_with_parent(supervisor)
        os._exit(7 if os.getppid() == supervisor else 8)
    os._exit(0)
os.waitpid(between, 0)
pid, status = os.wait()
print(os.waitstatus_to_exitcode(status), flush=True)
"""
    process = child(source)
    out, _ = process.communicate(timeout=60)
    assert out.strip() == "7"
