"""
The ``jumpstart`` command, and ``python -m jumpstart_server``.

``serve`` starts the process that will import the app before anything else is imported here: both take a while.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from jumpstart_server.spawn import Interpreter, start_interpreter

INTERRUPTED = 130  # the shell's code for an end by Ctrl-C


def main() -> None:
    """Run the command line and exit with the codes of the README."""
    started = time.monotonic()
    _open_standard_streams()
    waiting = _start_ahead(sys.argv[1:])
    if waiting is not None:
        # Until the supervisor has handlers of its own: an import that a KeyboardInterrupt ends may raise anything else.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # *waiting* ends with its channel
    try:
        from jumpstart_server.cli import run

        code = run(started, waiting)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        if waiting is not None:
            waiting.end()  # does nothing when the supervisor has taken it
    sys.exit(code)


def _open_standard_streams() -> None:
    """Where a standard stream is closed, its number would be given to the first socket that we open."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # for the life of the process


def _start_ahead(words: list[str]) -> Interpreter | None:
    if words[:1] != ["serve"] or {"-h", "--help"} & set(words):
        return None
    label = words[1] if len(words) > 1 and not words[1].startswith("-") else "app"
    return start_interpreter(label)


if __name__ == "__main__":
    main()
