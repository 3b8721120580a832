"""Modules that requests import lazily: a warm process has imported them before it serves."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from jumpstart import imports
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.records import Reason, Record, Tally
from jumpstart.runtime import is_as_loaded, loaded_dependency

logger = logging.getLogger(__name__)


class ModulesRecorder(Recorder):
    """
    Records the modules that requests import, in order, and imports them at boot.

    A record is used when the module was not there before and is there afterwards. One that the app now imports by
    itself does not apply, and is not captured again.
    """

    name: ClassVar[str] = "modules"

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._restored: dict[str, Record] = {}

    def observe(self) -> None:
        imports.install()

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        before = set(sys.modules)
        for record in records:
            if record.key in before:
                tally.drop(record, Reason.NOT_APPLICABLE, "the app imports it by itself")
            elif tally.out_of_time():
                self._restored[record.key] = record  # the next boot may have more time
                tally.drop(record, Reason.DEADLINE)
            else:
                self._import(record, tally)

    def _import(self, record: Record, tally: Tally) -> None:
        try:
            importlib.import_module(record.key)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # scripts call sys.exit() when imported; that may not end the boot
            logger.warning("module %s was not preloaded: %s: %s", record.key, type(error).__name__, error)
            tally.drop(record, Reason.FAILED, f"{type(error).__name__}: {error}")
            return
        if record.key in sys.modules:
            self._restored[record.key] = record
            tally.used(record)
        else:
            tally.drop(record, Reason.NO_EFFECT, "not in sys.modules after its import")

    def capture(self, purpose: Purpose) -> list[Record]:
        records = dict(self._restored)
        for name in imports.lazy_imports():
            if name in records or not _can_be_imported_by_name(name):
                continue
            depends = loaded_dependency(name)
            if is_as_loaded(depends):
                records[name] = Record(key=name, depends=depends)
        return list(records.values())


def _can_be_imported_by_name(name: str) -> bool:
    """Whether *name* came from a finder, which a module that code has put into `sys.modules` by hand did not."""
    spec = imports.spec_of(sys.modules.get(name))
    return name != "__main__" and spec is not None and spec.name == name
