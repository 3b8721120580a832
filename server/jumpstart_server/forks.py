"""
Children that an app forks, in its handlers or elsewhere.

A child has copies of everything: the clients' sockets, the epoll, the thread or the event loop that runs the handler.

* **It serves nobody.** When it comes out of the handler, by a return or by ``sys.exit()``, it would go on as a second
  server on the same connections. So it ends there. (Children of `subprocess` and `multiprocessing` never come out.)
* **Its signals are its own.** The worker's event loop would hear of them, since both write to the same wake-up socket.
* **It holds connections open.** A close ends a connection only when nobody has a copy, so where there are children
  (`has_children`) connections are shut down before they are closed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

from jumpstart_server.early_signals import HELD_SIGNALS, ignore

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # that mean something to a worker

in_child = False  # this process was forked off the one that serves
has_children = False  # the app has forked some, which may have ended since
_mask = threading.local()


def _forked() -> None:
    global in_child
    in_child = True


def _has_forked() -> None:
    global has_children
    has_children = True


os.register_at_fork(after_in_parent=_has_forked, after_in_child=_forked)


def serve_here() -> None:
    """This process serves, whoever forked it."""
    global in_child, has_children
    in_child = has_children = False


def leave_signals_to_children() -> None:
    """From now on, children of this process get the defaults of the signals that mean something to it. Once only."""
    os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_leave_signals)


def _hold_signals() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *HELD_SIGNALS))


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _leave_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, *HELD_SIGNALS):
        if number in SIGNALS or signal.getsignal(number) is ignore:  # or it is a handler of the app's
            signal.signal(number, signal.SIG_DFL)
    _let_signals_come()


def shut_down(descriptor: int) -> None:
    """End the connection of a socket's *descriptor*, for those who have a copy of it too; it is still to be closed."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        return
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client was first
    finally:
        sock.detach()


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
