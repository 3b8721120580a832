"""What all tests share."""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
PACKAGES = ("jumpstart", "warmup/jumpstart_warmup", "server/jumpstart_server")

# On a machine that others use too, an example may take its time; what hangs is caught by pytest's own limits.
settings.register_profile("jumpstart", deadline=None)
settings.load_profile("jumpstart")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the packages once, or hundreds of servers would each do so where Python writes no bytecode by itself."""
    if not hasattr(session.config, "workerinput"):  # not once more in each process of pytest-xdist
        for package in PACKAGES:
            compileall.compile_dir(str(ROOT / package), quiet=2)
