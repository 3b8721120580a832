"""How many threads a worker gets with ``threads = "auto"``, and how sizes are written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.envelope.sizing import (
    MIB,
    REQUEST_MEMORY,
    RESERVE,
    Machine,
    Sizing,
    allowance,
    parse_size,
    reserve_of,
    show_size,
    size_threads,
    tasks_of_worker,
)

GIB = 1024 * MIB
UNLIMITED = Machine(None)


def size(
    machine: Machine = UNLIMITED,
    *,
    limit: int = 0,
    base: int = 96 * MIB,
    request: int = 0,
    most: int = 1000,
    workers: int = 1,
) -> Sizing:
    allowed = allowance(limit, machine, workers)
    return size_threads(allowed, machine, base=base, request_memory=request, max_threads=most, workers=workers)


# -- sizes --


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("2GiB", 2 * GIB),
        ("1.5MiB", MIB * 3 // 2),
        ("512M", 512 * MIB),
        ("512m", 512 * MIB),
        ("500MB", 500_000_000),
        ("1 kb", 1000),
        (" 12 KiB ", 12 * 1024),
        ("1t", 1 << 40),
        ("7", 7),
        ("7B", 7),
        ("0", 0),
        (0, 0),
        (1 << 40, 1 << 40),
    ],
)
def test_a_size_is_read_with_the_units_that_people_write(written: object, size: int) -> None:
    assert parse_size(written, option="--x") == size


@pytest.mark.parametrize(
    "written",
    [
        *("", " ", "MiB", "x", "1x", "1.5", "-1", "+1", "1e3", "1_000", "0x10", "1,5GiB", "1.5.5M", "1 G i B", "٣"),
        *("1.0000001k", "9" * 40, "9" * 5000, -1, 1.5, True, None, [1], float("nan")),
    ],
)
def test_what_is_no_size_is_refused_with_the_place_and_what_is_allowed(written: object) -> None:
    with pytest.raises(ConfigError, match=r"^jumpstart.toml: \[tenants.web\] memory_limit: .* 512MiB"):
        parse_size(written, option="jumpstart.toml: [tenants.web] memory_limit")


@given(st.integers(0, 1023) | st.integers(0, 2**62 // MIB // 128).map(lambda count: count * 128))
def test_a_size_that_is_shown_is_read_as_itself(mebibytes: int) -> None:
    assert parse_size(show_size(mebibytes * MIB), option="--x") == mebibytes * MIB


@given(st.integers(0, 2**45))
def test_a_size_is_shown_in_the_unit_that_fits(size: int) -> None:
    number, unit = show_size(size).split()
    worth = {"bytes": 1, "MiB": MIB, "GiB": GIB}[unit]
    assert abs(float(number) * worth - size) <= (0 if worth == 1 else MIB)
    assert float(number) < 1024 or unit != "MiB" or size > GIB - MIB
    assert unit != "GiB" or size >= GIB


@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_whatever_is_written_is_a_size_or_an_error_for_the_operator(written: object) -> None:
    try:
        assert parse_size(written, option="--x") >= 0
    except ConfigError:
        pass


# -- threads --


def test_threads_are_the_memory_that_is_left_by_what_a_request_takes() -> None:
    found = size(limit=GIB, base=24 * MIB, request=2 * MIB)
    assert found == Sizing(500, "500 = min(max_threads 1000, (1 GiB − 24 MiB) / 2 MiB = 500); memory_limit 1 GiB")


def test_max_threads_is_the_most() -> None:
    found = size(limit=2 * GIB, request=MIB * 3 // 2)
    assert found.arithmetic.startswith("1000 = min(max_threads 1000, (2 GiB − 96 MiB) / 1.5 MiB = 1301)")
    assert size(limit=2 * GIB, most=20).threads == 20


def test_without_request_memory_the_default_is_named() -> None:
    assert "/ 1 MiB (request_memory's default) = 1952" in size(limit=2 * GIB).arithmetic
    assert REQUEST_MEMORY == MIB


def test_without_a_memory_limit_workers_share_what_the_machine_has() -> None:
    machine = Machine(4 * GIB, "the cgroup's limit", is_limited=True)
    found = size(machine, workers=4, base=92 * MIB)
    assert found.threads == (4096 - 128) // 4 - 2 * 92
    assert "(992 MiB − 2 × 92 MiB) / 1 MiB" in found.arithmetic  # in a roll each worker is there twice
    assert "(the cgroup's limit 4 GiB − 128 MiB reserve) / 4 workers = 992 MiB" in found.arithmetic


def test_a_memory_limit_is_for_each_worker_and_is_not_divided() -> None:
    machine = Machine(4 * GIB, "the cgroup's limit", is_limited=True)
    assert size(machine, limit=GIB, workers=4).threads == size(machine, limit=GIB, workers=1).threads


def test_where_nobody_knows_the_memory_max_threads_decides() -> None:
    assert size(UNLIMITED) == Sizing(1000, "1000 = max_threads 1000; no memory limit is known")


def test_a_limit_on_tasks_counts_too_and_is_named() -> None:
    machine = Machine(64 * GIB, tasks=500, tasks_source="pids.max")
    found = size(machine, workers=2)
    assert found.threads == (500 - 64) // 2 - 16
    assert "pids.max 500 leaves 202" in found.arithmetic
    assert tasks_of_worker(Machine(None), 4) is None
    assert tasks_of_worker(Machine(None, tasks=10), 4) == 1


def test_without_memory_for_one_request_there_is_one_thread_and_it_is_said() -> None:
    found = size(limit=50 * MIB)
    assert (found.threads, found.fits) == (1, False)
    assert "= -46), and at least 1" in found.arithmetic


def test_a_small_machine_is_not_eaten_up_by_the_reserve() -> None:
    assert reserve_of(64 * GIB) == RESERVE
    assert reserve_of(256 * MIB) == 32 * MIB


SIZES = st.integers(1, 1 << 40)


@given(
    limit=st.just(0) | SIZES,
    memory=st.none() | SIZES,
    tasks=st.none() | st.integers(1, 100_000),
    base=SIZES,
    request=st.just(0) | SIZES,
    most=st.integers(1, 10_000),
    workers=st.integers(1, 1024),
)
def test_whatever_the_machine_the_number_can_be_used_and_is_the_one_in_the_text(
    limit: int, memory: int | None, tasks: int | None, base: int, request: int, most: int, workers: int
) -> None:
    machine = Machine(memory, tasks=tasks, tasks_source="pids.max")
    found = size(machine, limit=limit, base=base, request=request, most=most, workers=workers)
    assert 1 <= found.threads <= most
    first, *others = re.findall(r"\d+", found.arithmetic)
    assert int(first) == found.threads
    allowed = allowance(limit, machine, workers).size
    if found.fits and allowed is not None:
        assert (1 if limit else 2) * base + found.threads * (request or REQUEST_MEMORY) <= allowed
    assert others
