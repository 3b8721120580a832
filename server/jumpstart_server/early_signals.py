"""Signals before the supervisor has handlers, and after. Imports next to nothing: it comes before everything else."""

from __future__ import annotations

import signal
from types import FrameType

HELD_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU)
"""Would end or stop a process that has no handler for them."""


def ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. Not SIG_IGN, which programs that an app runs would inherit."""


def hold() -> None:
    """From now on they wait in the kernel; of each kind one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)


def let_in(*more: signal.Signals) -> None:
    """There are handlers now; what has waited comes at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*HELD_SIGNALS, *more))
