"""Exit codes of the command, and which error leads to which."""

from __future__ import annotations

import enum

from jumpstart.errors import (
    AddressInUseError,
    AppLoadError,
    AppShutdownError,
    ColdBootRefusedError,
    ConfigError,
    JumpstartError,
    ProfileRefusedError,
)


class ExitCode(enum.IntEnum):
    """As the README lists them."""

    CLEAN = 0
    INTERNAL = 1
    USAGE = 2
    APP = 3  # the app failed to boot, or in its own shut-down
    COLD = 4  # --require-warm
    ADDRESS_IN_USE = 5
    INTERRUPTED = 130  # a second Ctrl-C, or one before anything was set up; the shell's code for it


_BY_ERROR: tuple[tuple[type[JumpstartError], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (AppLoadError, ExitCode.APP),
    (AppShutdownError, ExitCode.APP),
    (ColdBootRefusedError, ExitCode.COLD),
    (AddressInUseError, ExitCode.ADDRESS_IN_USE),
    (ProfileRefusedError, ExitCode.INTERNAL),
)


def exit_code(error: BaseException) -> ExitCode:
    """The exit code for an error that ends the command."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.INTERNAL)
