"""`LogFile`: what a line costs where nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jumpstart_server.logfile import LogFile, StalledError

ROOT = Path(__file__).parents[2]
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


def test_the_path_of_a_stream_is_the_stream_for_another_user_too() -> None:
    """Who has become another user may not open it by its name, as containers' images have it."""
    source = """
import os
import subprocess
import sys
from jumpstart_server.logfile import LogFile
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
for path in ("/dev/stdout", "/dev/stderr", "-"):
    log = LogFile(path, 1)
    log.write(f"{path}\\n".encode())
    log.reopen()
    log.write(b"again\\n")
"""
    folders = (ROOT, ROOT / "server", ROOT / "warmup")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.stdout, done.stderr) == ("/dev/stdout\nagain\n-\nagain\n", "/dev/stderr\nagain\n")
