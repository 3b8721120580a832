"""`LogFile`: what a line costs where nobody reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from jumpstart_server.logfile import LogFile, StalledError

LINE = b"x" * 200 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_pipe_that_nobody_reads_costs_lines_and_nothing_else(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = LogFile("-", writer)
    written = 0
    with pytest.raises(StalledError, match="nobody reads it"):
        while True:
            log.write(LINE)
            written += 1
    for _ in range(1000):  # at once: it is not waited for again
        with pytest.raises(StalledError):
            log.write(LINE)
    assert len(os.read(reader, 1 << 20)) == written * len(LINE)
    log.write(LINE)
    assert os.read(reader, 1 << 20) == LINE
    log.close()
