"""What /proc tells: the machine, its CPU time, and that of process trees. Linux only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PACKAGES = (
    "jumpstart-server",
    "gunicorn",
    "uvicorn",
    "granian",
    "waitress",
    "hypercorn",
    "a2wsgi",
    "fastapi",
    "uvloop",
    "httptools",
)
WANTED_FILES = 20_000  # open files; the crowd has 10,500 connections


@dataclass(frozen=True)
class Stat:
    """Of one process."""

    pid: int
    parent: int
    started: int  # ticks since boot; with the pid it names one process for good
    own_cpu_s: float
    reaped_cpu_s: float  # of its children that have ended
    ended: bool = False  # a zombie, that nobody has collected yet


def read_stat(text: str) -> Stat:
    """Of the content of /proc/PID/stat. The name in it may hold spaces and brackets."""
    pid, _, rest = text.partition(" ")
    fields = rest.rpartition(")")[2].split()
    user, system, reaped_user, reaped_system = (int(field) for field in fields[11:15])
    return Stat(
        pid=int(pid),
        parent=int(fields[1]),
        started=int(fields[19]),
        own_cpu_s=(user + system) / TICKS,
        reaped_cpu_s=(reaped_user + reaped_system) / TICKS,
        ended=fields[0] in "ZX",
    )


def stat(pid: int) -> Stat | None:
    try:
        return read_stat((PROC / str(pid) / "stat").read_text("utf-8", "replace"))
    except (OSError, IndexError, ValueError):
        return None


def is_running(process: Stat) -> bool:
    """Whether it, and not another that got its number since, is still there."""
    now = stat(process.pid)
    return now is not None and now.started == process.started and not now.ended


def tree(root: int) -> list[Stat]:
    """The process *root* and all its descendants."""
    everyone = [found for path in PROC.iterdir() if path.name.isdigit() and (found := stat(int(path.name)))]
    return descendants(everyone, root)


def descendants(everyone: Iterable[Stat], root: int) -> list[Stat]:
    children: dict[int, list[Stat]] = {}
    found: list[Stat] = []
    for process in everyone:
        children.setdefault(process.parent, []).append(process)
        if process.pid == root:
            found.append(process)
    for process in found:  # it grows on the way
        found.extend(children.get(process.pid, ()))
    return found


def cpu_s(processes: Iterable[Stat]) -> float:
    return sum(process.own_cpu_s + process.reaped_cpu_s for process in processes)


def pss_kib(processes: Iterable[Stat]) -> int:
    """Proportional set size: memory that several processes share is divided between them."""
    total = 0
    for process in processes:
        try:
            text = (PROC / str(process.pid) / "smaps_rollup").read_text()
        except OSError:
            continue  # it has ended
        if match := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE):
            total += int(match[1])
    return total


def threads(processes: Iterable[Stat]) -> int:
    total = 0
    for process in processes:
        try:
            total += sum(1 for _ in (PROC / str(process.pid) / "task").iterdir())
        except OSError:
            continue  # it has ended
    return total


def busy_s() -> float:
    """CPU seconds that all cores have worked so far. Time that a hypervisor took away is not in it."""
    user, nice, system, _idle, _wait, irq, soft, *_ = (
        int(field) for field in (PROC / "stat").read_text().partition("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / TICKS


def raise_file_limit() -> str:
    """Let this process and its children open many files; gives what is wrong with the result, or nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < WANTED_FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (WANTED_FILES, WANTED_FILES))
        except (OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return f"at most {hard:,} open files are allowed here"
    elif soft < WANTED_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return ""


def instruments_nice() -> bool:
    """Whether load generators may put themselves before the servers."""
    return os.geteuid() == 0


def facts() -> dict[str, Any]:
    cpu = re.search(r"^model name\s*:\s*(.+)$", (PROC / "cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", (PROC / "meminfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": versions(),
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of this project, with a + when files of it were changed since; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
