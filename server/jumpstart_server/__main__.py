"""
The ``jumpstart`` command, and ``python -m jumpstart_server``.

``serve`` starts the process that will import the app before anything else is imported here: both take a while. Before
that even, it sees to its signals, for they may come at any moment.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from jumpstart_server import early_signals

TYPE_CHECKING = False  # typing's own costs as much as all else that is imported before the signals are seen to
if TYPE_CHECKING:
    from jumpstart_server.spawn import Interpreter

INTERRUPTED = 130  # the shell's code for an end by Ctrl-C
STOPPED = 0  # asked to end, and did, as after a longer life


def main() -> None:
    """Run the command line and exit with the codes of the README."""
    started = time.monotonic()
    words = sys.argv[1:]
    if is_serve := words[:1] == ["serve"] and not {"-h", "--help"} & set(words):
        _prepare_for_signals()
    else:
        _end_in_order()
    _open_standard_streams()
    waiting = _start_ahead(words) if is_serve else None
    try:
        from jumpstart_server.cli import run

        code = run(started, waiting)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        if waiting is not None:
            waiting.end()  # does nothing when the supervisor has taken it
    sys.exit(128 + _ended_by[0] if _ended_by and code == INTERRUPTED else code)


_ended_by: list[int] = []  # signals that `_end_in_order` has turned into a Ctrl-C


def _end_in_order() -> None:
    """Have commands that end by SIGTERM or SIGHUP clean up and say what they say at a Ctrl-C; nohup stays nohup."""

    def as_interrupt(number: int, frame: object) -> None:
        _ended_by.append(number)
        signal.raise_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, as_interrupt)


def _prepare_for_signals() -> None:
    """
    Until the supervisor has handlers of its own.

    What asks for an end ends us at once: as PID 1 we would never see it otherwise, SIGQUIT would leave a core file, and
    an import that a KeyboardInterrupt ends may raise anything else. *waiting* ends with its channel. Other signals are
    held back; the supervisor lets them in when it has handlers for them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, lambda caught, _: _stop(caught))
    early_signals.hold()


def _stop(number: int) -> None:
    """As the supervisor says it; there is no log yet."""
    try:
        os.write(2, f"{signal.Signals(number).name}: stopped before it was ready\n".encode())
    except OSError:
        pass  # closed, or read by nobody
    os._exit(INTERRUPTED if number == signal.SIGINT else STOPPED)


def _open_standard_streams() -> None:
    """Where a standard stream is closed, its number would be given to the first socket that we open."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # for the life of the process


def _start_ahead(words: list[str]) -> Interpreter | None:
    from jumpstart_server.spawn import start_interpreter

    label = words[1] if len(words) > 1 and not words[1].startswith("-") else "app"
    return start_interpreter(label)


if __name__ == "__main__":
    main()
