"""Arguments of calls as keys: of a cache in this process, and the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, cast

_KEYWORDS = object()  # separates positional from keyword arguments in a key


def make_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the key of a call; the order of keyword arguments does not matter. Hashing it may raise TypeError."""
    return (*args, _KEYWORDS, *sorted(kwargs.items())) if kwargs else args


def arguments_of(key: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `make_key` was given."""
    for position, part in enumerate(key):
        if part is _KEYWORDS:
            return key[:position], dict(key[position + 1 :])
    return key, {}


def stable_digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """
    Return 16 hexadecimal digits that are the same for equal arguments in every process.

    Containers and scalars are read by value, so that neither hash randomisation (sets) nor shared references (pickles)
    matter; other objects by their pickle.

    Raises:
        Exception: whatever pickling an argument raises.
    """
    digest = hashlib.sha256()
    for part in _canonical((args, kwargs)):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()[:16]


def _canonical(value: Any) -> Iterator[bytes]:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        yield kind.__name__.encode()
        yield value if kind is bytes else ascii(value).encode()
    elif kind in (tuple, list):
        yield from _sequence(kind.__name__, ([*_canonical(item)] for item in value))
    elif kind in (set, frozenset):
        yield from _sequence(kind.__name__, sorted([*_canonical(item)] for item in value))
    elif kind is dict:
        items = ([*_canonical(key), *_canonical(item)] for key, item in value.items())
        yield from _sequence("dict", sorted(items))
    else:
        import cloudpickle

        yield kind.__qualname__.encode()
        yield cast(bytes, cloudpickle.dumps(value, 5))


def _sequence(kind: str, items: Iterable[list[bytes]]) -> Iterator[bytes]:
    yield kind.encode()
    for item in items:
        yield b"item"
        yield from item
    yield b"end"
