"""What all tests share."""

from __future__ import annotations

import compileall
import gc
import signal
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
PACKAGES = ("jumpstart", "warmup/jumpstart_warmup", "server/jumpstart_server")

# On a machine that others use too, an example may take its time; what hangs is caught by pytest's own limits.
settings.register_profile("jumpstart", deadline=None)
settings.load_profile("jumpstart")


def pytest_sessionstart(session: pytest.Session) -> None:
    """
    See to what would make servers behave otherwise here.

    A shell starts jobs in the background with SIGINT ignored, and all their children would inherit that. And the
    packages are compiled once, or hundreds of servers would each do so where Python writes no bytecode by itself.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(session.config, "workerinput"):  # not once more in each process of pytest-xdist
        for package in PACKAGES:
            compileall.compile_dir(str(ROOT / package), quiet=2)


def pytest_collection_finish() -> None:
    """Some thousand collected tests are not looked through again by each run of the garbage collector."""
    gc.collect()
    gc.freeze()
