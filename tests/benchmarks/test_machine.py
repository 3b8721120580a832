"""What is read out of /proc."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks import machine
from benchmarks.machine import Stat, descendants, read_stat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks need /proc")


def test_a_process_with_brackets_in_its_name() -> None:
    fields = [str(number) for number in range(4, 53)]  # as proc(5) numbers them
    found = read_stat(f"77 (a) (b c) S {' '.join(fields)}\n")
    ticks = machine.TICKS
    assert found == Stat(77, 4, 22, (14 + 15) / ticks, (16 + 17) / ticks)
    assert read_stat(f"77 (a) Z {' '.join(fields)}\n").ended


def test_a_tree_is_the_process_and_all_below_it() -> None:
    def process(pid: int, parent: int) -> Stat:
        return Stat(pid, parent, 0, 0.0, 0.0)

    everyone = [process(9, 5), process(5, 2), process(2, 1), process(3, 1), process(6, 2), process(4, 3)]
    assert [found.pid for found in descendants(everyone, 2)] == [2, 5, 6, 9]
    assert descendants(everyone, 8) == []


def test_this_process_is_there_and_costs_something() -> None:
    own = next(found for found in machine.tree(os.getpid()) if found.pid == os.getpid())
    assert own.parent == os.getppid()
    assert machine.cpu_s([own]) > 0
    assert machine.threads([own]) >= 1
    assert 1024 < machine.pss_kib([own]) < 10 * 2**20
    assert machine.busy_s() > own.own_cpu_s


def test_a_process_that_has_gone_costs_nothing() -> None:
    gone = Stat(2**22 + 1, 1, 0, 0.0, 0.0)
    assert machine.stat(gone.pid) is None
    assert machine.pss_kib([gone]) == machine.threads([gone]) == 0


def test_the_facts() -> None:
    facts = machine.facts()
    assert facts["cores"] == os.cpu_count()
    assert facts["versions"]["uvicorn"]
