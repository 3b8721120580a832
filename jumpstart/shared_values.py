"""
Values of ``cached(shared=True)`` functions that the workers of a host share.

They live beside the warm-start cache, in a store of the same make and under the same rules: it is read and written only
while its folder belongs to this user alone, since values are pickled. Each row names the function, the digest of the
source that it was loaded from, the user's version, this Python and the arguments, so that nobody gets a value of other
code. A store that is broken, full, read-only or busy costs a log line, and is let alone for a while; the value is then
computed, as it would be without. Without the server there is no store.

Workers that miss at the same moment each compute: a lock for the whole host would let one that hangs hold all others.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from jumpstart.arguments import stable_digest
from jumpstart.context import unguarded

if TYPE_CHECKING:
    from pathlib import Path

    from jumpstart.caches import Cache
    from jumpstart.warmstart import ValueStore

logger = logging.getLogger(__name__)

PAUSE = 30.0  # seconds for which a store that could not be used is let alone
MAX_VALUE_BYTES = 4 * 1024 * 1024

_store: ValueStore | None = None
_resume_at = 0.0  # monotonic
_told: set[str] = set()


class Found(NamedTuple):
    value: Any
    age: float


def use_folder(warm_start: Path | None) -> None:
    """Share values beside the warm-start cache in that folder; None: not at all. For the server, at boot."""
    global _store, _resume_at
    _resume_at = 0.0
    _told.clear()
    if warm_start is None:
        _store = None
        return
    from jumpstart.warmstart import ValueStore  # not at the top: scripts do without

    _store = ValueStore(warm_start.with_name("shared-values"))


def load(cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    """Return the value that a worker of this host has stored, if it is fresh. Never raises an `Exception`."""
    store = _store
    if store is None or time.monotonic() < _resume_at:
        return None
    key = _key(cache, args, kwargs)
    if key is None:
        return None
    try:
        with unguarded():
            row = store.get(key)
        if row is None:
            return None
        stamp, _, data = row.partition(b"\n")
        age = max((datetime.now(UTC) - datetime.fromisoformat(stamp.decode())).total_seconds(), 0.0)
        if cache.ttl is not None and age >= cache.ttl:
            return None
        import pickle

        return Found(pickle.loads(data), age)
    except Exception as error:
        _failed(error)
        return None


def save(cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, *, is_dependent: bool) -> None:
    """
    Store *value* for the other workers. Never raises an `Exception`.

    A value *is_dependent* that stands on real-time values: each process counts their versions by itself.
    """
    store = _store
    if store is None or time.monotonic() < _resume_at:
        return
    key = _key(cache, args, kwargs)
    if key is None:
        return
    if is_dependent:
        _tell(f"{cache.name} reads real-time values, so its values are not shared")
        return
    try:
        import cloudpickle

        data: bytes = cloudpickle.dumps(value, 5)
    except Exception as error:
        _tell(f"a value of {cache.name} cannot be pickled and is not shared: {type(error).__name__}: {error}")
        return
    if len(data) > MAX_VALUE_BYTES:
        _tell(f"a value of {cache.name} has {len(data)} bytes and is not shared; the limit is {MAX_VALUE_BYTES}")
        return
    try:
        with unguarded():
            store.put(key, datetime.now(UTC).isoformat().encode() + b"\n" + data)
    except Exception as error:
        _failed(error)


def _key(cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if not cache.depends or "<locals>" in cache.qualname:
        _tell(f"{cache.name} has no source whose changes could be seen, so its values are not shared")
        return None
    try:
        digest = stable_digest(args, kwargs)
    except Exception as error:
        _tell(f"arguments of {cache.name} cannot be pickled: not shared: {type(error).__name__}: {error}")
        return None
    parts = [sys.version, str(sorted(cache.depends.items())), cache.version]
    code = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return f"{hashlib.sha256(cache.name.encode()).hexdigest()[:32]}-{code}-{digest}"


def _failed(error: Exception) -> None:
    global _resume_at
    _resume_at = time.monotonic() + PAUSE
    _tell(f"values are not shared between workers, and that is tried again every {PAUSE:g} s: {error}")


def _tell(message: str) -> None:
    if message not in _told and len(_told) < 1000:
        _told.add(message)
        logger.warning("%s", message)
