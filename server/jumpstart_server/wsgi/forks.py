"""
Handlers that fork.

A child has copies of everything: the clients' sockets, the epoll, the thread that runs the handler. When it comes out
of the handler, by a return or by ``sys.exit()``, it would go on as a second server on the same connections. So it ends
there. (Children of `subprocess` and `multiprocessing` never come out.)
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import NoReturn

logger = logging.getLogger(__name__)

in_child = False  # this process was forked off the one that serves


def _forked() -> None:
    global in_child
    in_child = True


os.register_at_fork(after_in_child=_forked)


def serve_here() -> None:
    """This process serves, whoever forked it."""
    global in_child
    in_child = False


def end_child(error: BaseException | None = None) -> NoReturn:
    """End the child: with the status of `SystemExit`, with 1 and a traceback for another *error*, else with 0."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    else:
        logger.warning("a child that a handler forked came back from it, and is ended; its response is not sent")
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(code & 0xFF)
