"""Fixtures of the tests of both engines; `lab.py` tells what the engines are called."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.raw_http import make_certificate


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged from INFO on."""
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that nobody signed, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a socket, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as name:
        yield Path(name)
