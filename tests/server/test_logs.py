"""Our loggers speak through one handler; the root logger is the app's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from jumpstart_server.logs import OURS, set_up_logging

NAMES = (*OURS, "uvicorn")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = {}
    for name in NAMES:
        logger = logging.getLogger(name)
        before[name] = (logger.handlers[:], logger.level, logger.propagate)
    yield
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def test_each_line_says_when_who_and_how_grave_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info")
    set_up_logging("info")
    logging.getLogger("jumpstart_server.worker").info("worker=%d ready", 3)
    logging.getLogger("jumpstart.boot").debug("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.endswith("[INFO] worker=3 ready")
    assert line.startswith("20") and "] [" in line


def test_the_apps_root_logger_is_left_alone() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    set_up_logging("debug")
    assert (root.handlers, root.level) == before
    assert all(not logging.getLogger(name).propagate for name in NAMES)


@pytest.mark.parametrize(("level", "expected"), [("debug", logging.WARNING), ("critical", logging.CRITICAL)])
def test_uvicorn_is_heard_when_it_warns(level: str, expected: int) -> None:
    set_up_logging(level)
    assert logging.getLogger("uvicorn").level == expected
    assert logging.getLogger("jumpstart_warmup").level == logging.getLevelName(level.upper())


def test_lines_go_to_standard_error_as_it_is_now() -> None:
    set_up_logging("info")
    (handler,) = logging.getLogger("jumpstart").handlers
    assert isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
