"""
`jumpstart.Config` and `jumpstart.Service`: which of them the app uses, and the last values where it asked for that.

Both are fetched anew in each worker before it is ready, whether a record names them or not (`jumpstart.boot`): what
this adds is the values for the case that a source is down, and their account in the report. Values decide what the app
computes, and addresses whom it trusts, so that records of either kind come from signed profiles only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.recorders._entries import MAX_ENTRY_BYTES
from jumpstart.records import Reason, Record, Tally

if TYPE_CHECKING:
    from jumpstart.live import Live

logger = logging.getLogger(__name__)


class LiveData(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Record.data` of these recorders: *value* was fetched at *created*; without that there is none."""

    name: str
    value: Any = None
    created: datetime | None = None


class _LiveRecorder(Recorder):
    needs_trust: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        super().__init__(settings)
        self._now = now
        self._fit: dict[str, tuple[Any, bool]] = {}  # name → data as last captured, and whether it can be recorded

    def restore_early(self, records: Sequence[Record], tally: Tally) -> None:
        """Before the import, since the app may read while it is imported."""
        from jumpstart import live  # a boot without such records does not pay for it

        for record in records:
            try:
                data = msgspec.convert(record.data, LiveData)
            except msgspec.ValidationError as error:
                tally.drop(record, Reason.MALFORMED, str(error))
                continue
            if data.created is not None:
                live.offer(self.name, data.name, data.value, (self._now() - data.created).total_seconds())

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        """Account for what the boot has fetched by now."""
        for record in records:
            found = _find(self.name, record.data["name"])
            if found is None:
                tally.drop(record, Reason.GONE, f"the app has no {self.name} {record.data['name']!r}")
                continue
            info = found.info()
            if info.origin in ("source", "profile"):
                tally.used(record)
            else:
                tally.drop(record, Reason.FAILED, info.error or "its source has not answered")

    def capture(self, purpose: Purpose) -> list[Record]:
        return [self._record(each) for each in _registered() if each.kind == self.name]

    def _record(self, each: Live[Any]) -> Record:
        data: dict[str, Any] = {"name": each.name}
        value = each.record()
        if value is not None and self._is_fit(each, value[0]):
            created = datetime.fromtimestamp(self._now().timestamp() - value[1], UTC)
            data |= {"value": value[0], "created": created.isoformat().replace("+00:00", "Z")}
        return Record(key=each.name, data=data)

    def _is_fit(self, each: Live[Any], data: Any) -> bool:
        """Whether *data* is what JSON gives back; said once where it is not."""
        known = self._fit.get(each.name)
        if known is not None and known[0] is data:
            return known[1]
        problem = _why_unfit(data)
        if problem and (known is None or known[1]):
            logger.warning("%s %s: its value is not recorded: %s", each.noun, each.name, problem)
        self._fit[each.name] = (data, not problem)
        return not problem


class ConfigRecorder(_LiveRecorder):
    """Of `jumpstart.Config`."""

    name: ClassVar[str] = "config"


class ServiceRecorder(_LiveRecorder):
    """Of `jumpstart.Service`."""

    name: ClassVar[str] = "service"


def _why_unfit(data: Any) -> str:
    from jumpstart.config import same

    try:
        encoded = msgspec.json.encode(data)
        if not same(msgspec.json.decode(encoded), data):
            return "it holds other types than JSON has"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(encoded) > MAX_ENTRY_BYTES:
        return f"{len(encoded)} bytes; the limit is {MAX_ENTRY_BYTES}"
    return ""


def _registered() -> list[Live[Any]]:
    if "jumpstart.live" not in sys.modules:
        return []
    from jumpstart import live

    return live.registered()


def _find(kind: str, name: str) -> Live[Any] | None:
    return next((each for each in _registered() if (each.kind, each.name) == (kind, name)), None)
