"""Logging of the server's own processes: one handler on our loggers, the root logger left to the app."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s [%(process)d] [%(levelname)s] %(message)s"
OURS = ("jumpstart", "jumpstart_warmup", "jumpstart_server")


def keep_enabled() -> None:
    """
    Undo what `logging.config.dictConfig` does to loggers that it was not told of: by default it switches them off.

    Called after the app's code has run.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in (*OURS, "uvicorn"):
            logger.disabled = False


def set_up_logging(level: str) -> None:
    """Send our loggers, and uvicorn's warnings, to standard error. Called once in each process that we start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S %z"))
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.handlers[:] = [handler]
    uvicorn.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    uvicorn.propagate = False
