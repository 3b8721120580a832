"""
Recording the entries of caches: pickling them, the limits of a capture, and what a repeated capture need not do again.

Shared by the recorders of `jumpstart.cached` and of `functools.lru_cache` functions.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jumpstart.arguments import make_key
from jumpstart.recorder import Purpose
from jumpstart.records import Record

logger = logging.getLogger(__name__)

NOT_AS_LOADED = "its module's source is not the one that was loaded, or not to be found"
MAX_ENTRY_BYTES = 1024 * 1024
MAX_TOTAL_BYTES = 32 * 1024 * 1024  # per capture
MAX_ENTRIES = 2_000  # of one function; the most recently used, which is what the first requests will ask for
MAX_TOTAL_ENTRIES = 10_000  # per capture; to pickle that many takes half a second

_SCALARS = frozenset({str, bytes, int, float, bool, type(None)})


def pickled(value: object) -> bytes:
    """
    Pickle *value* for a record.

    Raises:
        ValueError: it is larger than `MAX_ENTRY_BYTES`.
        Exception: whatever its pickling raises.
    """
    data: bytes
    if type(value) in _SCALARS:
        import pickle

        data = pickle.dumps(value, 5)  # the same bytes at a tenth of the price
    else:
        import cloudpickle  # not at the top: processes that restore nothing do not need it

        data = cloudpickle.dumps(value, 5)
    if len(data) > MAX_ENTRY_BYTES:
        raise ValueError(f"{len(data)} bytes; the limit is {MAX_ENTRY_BYTES}")
    return data


def pickled_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """
    Pickle the arguments of a call, making sure that they are found again: a copy must be an equal key.

    Raises:
        ValueError: it is not (objects that are equal only to themselves), or is too large.
        Exception: whatever their pickling raises.
    """
    data = pickled((args, kwargs))
    copy = unpickled(data)
    key, copied = make_key(args, kwargs), make_key(*copy)
    if key != copied or hash(key) != hash(copied):
        raise ValueError("a copy of the arguments does not equal them")
    return data


def unpickled(data: bytes) -> Any:
    """Unpickle what a trusted profile holds."""
    import pickle

    return pickle.loads(data)


class Memo:
    """
    What has been made of the entries of caches, so that a repeated capture costs only what is new.

    An entry is known by the identity of its two objects. They are referred to weakly where that is possible; others,
    which are plain data, are kept alive until the second capture after the last that asked for them. Only what one
    capture asked for is known to the next. Not for use by several threads at a time.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[Callable[[], Any], Callable[[], Any], Record | None]] = {}
        self._asked: dict[tuple[str, int], tuple[Callable[[], Any], Callable[[], Any], Record | None]] = {}

    def begin(self, *, anew: bool) -> None:
        """Begin a capture; with *anew* nothing is known, as values that are changed in place demand."""
        self._known, self._asked = {} if anew else self._asked, {}

    def record(self, name: str, entry: object, value: object, make: Callable[[], Record]) -> Record | None:
        """
        Return what *make* returned for that entry of the function *name*, or None when it raised then.

        Raises:
            BaseException: whatever *make* raises, the first time.
        """
        place = (name, id(entry))
        known = self._known.get(place)
        if known is not None and known[0]() is entry and known[1]() is value:
            self._asked[place] = known
            return known[2]
        record: Record | None = None
        try:
            record = make()
        finally:
            self._asked[place] = (_reference(entry), _reference(value), record)
        return record


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class Budget:
    """The limits of one capture, over all functions."""

    def __init__(self) -> None:
        self.entries = MAX_TOTAL_ENTRIES
        self.bytes = MAX_TOTAL_BYTES

    def limit(self) -> int:
        """How many entries the next function may bring."""
        return min(MAX_ENTRIES, self.entries)

    def take(self, record: Record) -> bool:
        """Whether *record* is within the limits; then it is counted."""
        size = len(record.data["args"]) + len(record.data.get("value") or b"")
        if size > self.bytes or not self.entries:
            return False
        self.bytes -= size
        self.entries -= 1
        return True


class Collector:
    """The entries that one recorder, called *label* in the log, has recorded. Not for several threads at a time."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._memo = Memo()
        self._budget = Budget()
        self._reported: set[str] = set()

    def begin(self, purpose: Purpose) -> None:
        """Begin a capture. One that is shipped takes nothing from memory: values may have been changed in place."""
        self._memo.begin(anew=purpose == "ship")
        self._budget = Budget()

    def limit(self) -> int:
        """How many entries the next function may bring."""
        return self._budget.limit()

    def collect(
        self, name: str, newest_first: Iterable[tuple[object, object, Callable[[], Record]]]
    ) -> dict[str, Record]:
        """
        Return the records of the function *name*, oldest first, as far as the limits reach.

        Args:
            newest_first: of each entry the two objects that it is known by, and what makes its record.
        """
        records: dict[str, Record] = {}
        for entry, value, make in newest_first:
            try:
                record = self._memo.record(name, entry, value, make)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # objects may raise anything when they are pickled
                self.report_once(name, f"{type(error).__name__}: {error}")
                continue
            if record is None:
                continue
            if not self._budget.take(record):
                self.report_once("the rest", f"more than {MAX_TOTAL_BYTES} bytes")
                break
            records.setdefault(record.key, record)
        return dict(reversed(records.items()))

    def report_once(self, name: str, why: str) -> None:
        """Log why entries of *name* are not recorded, the first time."""
        if name not in self._reported:
            self._reported.add(name)
            logger.warning("%s: entries of %s are not recorded: %s", self._label, name, why)
