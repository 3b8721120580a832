"""
Every error that Jumpstart raises on purpose, named by who can mend it.

The command line maps the classes to exit codes (`EXIT_CODES` in `jumpstart_server/cli`); nothing else exits.
"""

from __future__ import annotations

from jumpstart.records import Reason


class JumpstartError(Exception):
    """Root of all errors of this package."""


class ConfigError(JumpstartError):
    """A wrong option, key, value or file; the message names the place and what is allowed. For the operator."""


class AddressInUseError(JumpstartError):
    """Another process holds the address. For the operator."""


class AppLoadError(JumpstartError):
    """The app could not be imported, found, built or started. For the app's author."""


class AppShutdownError(JumpstartError):
    """The app's own shut-down failed; its requests were all served before. For the app's author."""


class ColdBootRefusedError(JumpstartError):
    """`--require-warm` was given and the boot would have been cold; the message says why."""


class ProfileRefusedError(JumpstartError):
    """
    A whole profile (or warm-start cache) that may not be used.

    Attributes:
        reason: the code that logs, metrics and the boot report show.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class EffectRefused(BaseException):
    """
    Raised in the app inside a shadow request, in place of something that others would have noticed.

    Not an `Exception`, as `asyncio.CancelledError` is none: an app that answers failures with a default value would
    keep that in its caches, from which real requests would get it, and clients would try again or take the host for
    dead. Let it pass; what must be undone belongs into ``with`` and ``finally``.

    Attributes:
        route: of the request, as ``GET /checkout``.
        effect: ``connect``, ``send``, ``write``, ``process``, ``signal``, ``thread`` or ``sql``.
        what: the address, path, command or statement.
    """

    def __init__(self, message: str, route: str, effect: str, what: str) -> None:
        super().__init__(message)
        self.route = route
        self.effect = effect
        self.what = what


class SourceUnavailable(JumpstartError):
    """
    A `jumpstart.Config` or `jumpstart.Service` has no value: its source never answered, and nothing stands in for it.
    """
