"""
The recorder protocol: one class per kind of warm state, found through the entry point group ``jumpstart.recorders``.

A recorder implements only the hooks it needs. One that raises is switched off for the rest of the process, logged with
its traceback, and harms nothing. Hooks, in the order in which a boot calls them:

1. `observe`         before the app is imported: install what sees cold work (see `jumpstart.imports.when_imported`)
2. `restore_early`   before the app is imported: what the import itself profits from (bytecode, regular expressions)
3. `restore`         after the import, in the process that workers are forked from: **no threads, sockets or loops**
4. `restore_late`    in each worker, inside its event loop and after lifespan start-up: what needs connections
5. `capture`         while serving, from any thread: everything that a process like this would want back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from jumpstart.records import Record, Tally

Purpose = Literal["host", "ship"]
"""What a capture is for: the host's own warm-start cache, or a profile file for other hosts."""


class WarmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the operator says about warm state.

    Attributes:
        lru_cache: patterns ``module:qualname`` (fnmatch in both halves) of `functools.lru_cache` functions to record.
        bytecode: whether profile files carry bytecode for hosts that have no ``__pycache__``.
        disabled: names of recorders that are switched off.
        app_dir: the folder that the app was imported from; modules under it are the app's own.
    """

    lru_cache: tuple[str, ...] = ()
    bytecode: bool = True
    disabled: tuple[str, ...] = ()
    app_dir: str = ""


class Recorder:
    """Base class of recorders; every hook does nothing unless overridden."""

    name: ClassVar[str]
    """Its section's name in profiles: lower-case letters, digits and hyphens."""
    version: ClassVar[int] = 1
    """Raise it when the meaning of a record changes; sections of another version are not offered."""
    encoding: ClassVar[Literal["json", "msgpack"]] = "json"
    """``msgpack`` when records hold bytes."""
    needs_trust: ClassVar[bool] = False
    """Records hold code, pickles or anything else that decides what the app computes: signed profiles only."""
    counts: ClassVar[bool] = False
    """The weights that it captures are counts of its own, without what was restored. Else `RecorderSet` sets them."""
    runtime_bound: ClassVar[bool] = False
    """Records mean something to the same Python version and platform only."""

    def __init__(self, settings: WarmSettings) -> None:
        self.settings = settings

    def observe(self) -> None:
        """Install hooks. Called once per process, before the app is imported."""

    def restore_early(self, records: Sequence[Record], tally: Tally) -> None:
        """Restore before the app is imported."""

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        """Restore after the app was imported; called with no records too, so that frameworks can be prepared."""

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        """Restore in a worker, before it is ready."""

    def capture(self, purpose: Purpose) -> list[Record]:
        """Return the records that a process like this one would want; called repeatedly."""
        return []
