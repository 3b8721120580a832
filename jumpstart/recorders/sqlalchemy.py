"""SQLAlchemy: the mappers are configured before the fork instead of in the first request that uses one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from jumpstart.context import cold_event
from jumpstart.imports import when_imported
from jumpstart.recorder import Recorder
from jumpstart.records import Record, Tally

logger = logging.getLogger(__name__)


class SqlalchemyRecorder(Recorder):
    """Runs `sqlalchemy.orm.configure_mappers`, which opens no connection. It has no records of its own."""

    name: ClassVar[str] = "sqlalchemy"

    def observe(self) -> None:
        when_imported("sqlalchemy.orm", _listen)

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        orm: Any = sys.modules.get("sqlalchemy.orm")
        if orm is None:
            return
        try:
            orm.configure_mappers()
        except Exception as error:
            # Perhaps a relationship names a class whose module only a request imports: not an error of the app's yet.
            logger.warning("sqlalchemy: the mappers could not be configured before the first request: %s", error)
            _forget_failure()


def _listen(orm: Any) -> None:
    event: Any = sys.modules["sqlalchemy.event"]
    event.listen(orm.Mapper, "before_configured", _before_configured)


def _before_configured() -> None:
    cold_event("mappers", "configure")


def _forget_failure() -> None:
    """
    Undo the mark that a failed attempt leaves on a mapper.

    SQLAlchemy refuses every later attempt once one has failed; an app whose last mapped classes are imported by its
    first request would be broken by having been warmed.
    """
    mapperlib: Any = sys.modules["sqlalchemy.orm.mapper"]
    for registry in mapperlib._all_registries():
        for mapper in registry.mappers:
            mapper.__dict__.pop("_configure_failed", None)
            for prop in mapper._props.values():
                if prop._configure_started and not prop._configure_finished:
                    prop._configure_started = False
