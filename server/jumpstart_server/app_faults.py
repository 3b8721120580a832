"""What is logged, and how often, about apps that do what is the server's to do; for both engines."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

NAMES_WARNED_OF = 64

_warned_of: set[bytes] = set()


def warn_of_dropped(names: tuple[bytes, ...]) -> None:
    """Say, once for each name, that a header which the app has set was left out. From any thread."""
    for name in names:
        name = name.lower()
        if name not in _warned_of and len(_warned_of) < NAMES_WARNED_OF:
            _warned_of.add(name)
            logger.warning("the app's header %s is the server's to set; it is left out", name.decode("latin-1"))
