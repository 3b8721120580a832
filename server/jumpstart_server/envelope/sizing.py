"""
How many threads a worker gets with ``threads = "auto"``, from memory, with the arithmetic in words. Acts on nothing.

    threads = (memory limit − what a warm worker takes) / request_memory, from 1 to max_threads

The limit is `memory_limit`, or the worker's share of what the machine allows: the cgroup's limit or the RAM, less a
reserve for supervisor and molds, divided by all workers that are served together. In such a share what a worker takes
by itself has to fit twice, since in a roll the next generation boots beside the one that serves. The kernel's limits on
threads count too: a thread that it refuses would be one that requests wait for in vain.
"""

from __future__ import annotations

import re
from decimal import Decimal

import msgspec

from jumpstart.errors import ConfigError

MIB = 1 << 20
REQUEST_MEMORY = MIB  # bytes; of a handler that renders a page. An app that knows better says so
RESERVE = 128 * MIB  # for the supervisor, a mold, and a worker that boots beside the one that it replaces
RESERVE_SHARE = 8  # a small limit is not eaten up by the reserve: at most an eighth of it
SPARE_THREADS = 16  # of a worker, beside its pool: the event loop, the keeper, what the app starts by itself
SPARE_PROCESSES = 64  # tasks of the cgroup that are not workers' threads: supervisor, molds, an entry point's shell

_UNITS = {
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **dict.fromkeys(("", "b", "bytes"), 1),
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_size(value: object, *, option: str) -> int:
    """
    Bytes of ``2GiB``, ``1.5MiB``, ``512M`` (as 512MiB), ``500MB`` (decimal) or a whole number.

    Args:
        value: a text, or a number out of TOML.
        option: where it stands, for the error.

    Raises:
        ConfigError: it is none of these, or not a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = _UNITS.get(match[2].lower())
        size = Decimal(match[1]) * unit if unit is not None else Decimal("NaN")
        if size == size.to_integral_value() and size < 2**63:
            return int(size)
    raise ConfigError(f"{option}: {value!r} is not allowed; write a size: 512MiB, 1.5GiB, 512M, 500MB, or bytes")


def show_size(size: int) -> str:
    """In GiB or MiB, whichever fits, to a MiB or a tenth of one, so that sums can be followed; small ones in bytes."""
    if abs(size) < MIB / 10:
        return f"{size} bytes"
    if abs(size) < 1024 * MIB:
        return f"{size / MIB:.1f}".removesuffix(".0") + " MiB"
    return f"{size / (1024 * MIB):.3f}".rstrip("0").rstrip(".") + " GiB"


class Machine(msgspec.Struct, frozen=True):
    """
    What this host, or the cgroup that we are in, allows.

    Attributes:
        memory: bytes; None where nobody can say.
        memory_source: what *memory* is, in words: ``the cgroup's limit``, ``the RAM``.
        is_limited: it is the cgroup's, and the kernel kills what takes more.
        tasks: threads and processes that may exist; None without a limit.
        tasks_source: whose limit that is: ``pids.max``, ``RLIMIT_NPROC``.
    """

    memory: int | None
    memory_source: str = "the RAM"
    is_limited: bool = False
    tasks: int | None = None
    tasks_source: str = ""


class Allowance(msgspec.Struct, frozen=True):
    """
    The memory of one worker.

    Attributes:
        size: bytes; None where nobody can say.
        text: where it comes from, with its arithmetic.
        is_own: ``memory_limit`` was given; else it is a share of the machine's.
    """

    size: int | None
    text: str
    is_own: bool = False


class Sizing(msgspec.Struct, frozen=True):
    """
    A number of threads and its reason.

    Attributes:
        threads: at least 1, even where there is no memory for one.
        arithmetic: ``1000 = min(max_threads 1000, (2048 MiB − 96 MiB) / 1.5 MiB = 1301)``.
        fits: there is memory for one request at least.
    """

    threads: int
    arithmetic: str
    fits: bool = True


def reserve_of(memory: int) -> int:
    """What workers do not get of the machine's *memory*, in bytes."""
    return min(RESERVE, memory // RESERVE_SHARE)


def allowance(memory_limit: int, machine: Machine, workers: int) -> Allowance:
    """
    The memory of one worker.

    Args:
        memory_limit: as set, in bytes; 0 when it is not.
        workers: of all tenants that are served together.
    """
    if memory_limit:
        return Allowance(memory_limit, f"memory_limit {show_size(memory_limit)}", is_own=True)
    if machine.memory is None:
        return Allowance(None, "no memory limit is known")
    reserve = reserve_of(machine.memory)
    size = (machine.memory - reserve) // workers
    text = f"({machine.memory_source} {show_size(machine.memory)} − {show_size(reserve)} reserve)"
    if workers == 1:
        return Allowance(size, f"{text} = {show_size(size)}")
    return Allowance(size, f"{text} / {workers} workers = {show_size(size)}")


def size_threads(
    allowed: Allowance, machine: Machine, *, base: int, request_memory: int, max_threads: int, workers: int
) -> Sizing:
    """
    How many threads a worker gets.

    Args:
        base: bytes that a warm worker takes without any request.
        request_memory: bytes of one request; 0 when it is not set.
        workers: of all tenants that are served together.
    """
    caps = [(max_threads, f"max_threads {max_threads}")]
    fits = True
    if allowed.size is not None:
        each = request_memory or REQUEST_MEMORY
        times = 1 if allowed.is_own else 2
        room = (allowed.size - times * base) // each
        fits = room >= 1
        by_default = "" if request_memory else " (request_memory's default)"
        bases = show_size(base) if allowed.is_own else f"{times} × {show_size(base)}"
        caps.append((room, f"({show_size(allowed.size)} − {bases}) / {show_size(each)}{by_default} = {room}"))
    if (tasks := tasks_of_worker(machine, workers)) is not None and tasks < max_threads:
        caps.append((tasks, f"{machine.tasks_source} {machine.tasks} leaves {tasks}"))
    threads = max(min(cap for cap, _ in caps), 1)
    text = f"{threads} = min({', '.join(words for _, words in caps)})" if len(caps) > 1 else f"{threads} = {caps[0][1]}"
    if not fits:
        text += ", and at least 1"
    return Sizing(threads, f"{text}; {allowed.text}", fits)


def tasks_of_worker(machine: Machine, workers: int) -> int | None:
    """How many threads the kernel lets the pool of one of *workers* have; None without a limit."""
    if machine.tasks is None:
        return None
    return max((machine.tasks - SPARE_PROCESSES) // workers - SPARE_THREADS, 1)
