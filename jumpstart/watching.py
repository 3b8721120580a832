"""How a method that is not ours is made to ask the effect guard first (`jumpstart/effects.py`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from jumpstart.context import current
from jumpstart.guard import Guard

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


def guard_of_request() -> Guard | None:
    """The guard of the request that this code runs for, if it has one."""
    request = current()
    return request.guard if request is not None else None


def replace(owner: Any, name: str, make: Callable[[Method], Method]) -> None:
    """Put ``make(original)`` in the place of ``owner.name``, where there is one."""
    original = getattr(owner, name, None)
    if original is None:
        logger.warning("the effect guard does not know this %s: it has no %s", owner, name)
        return
    setattr(owner, name, functools.wraps(original)(make(original)))


def before(check: Callable[..., None]) -> Callable[[Method], Method]:
    """Make a method that, inside a guarded request, first calls *check* with the guard and all arguments."""

    def make(original: Method) -> Method:
        def method(*args: Any, **kwargs: Any) -> Any:
            request = current()
            if request is not None and request.guard is not None:
                check(request.guard, *args, **kwargs)
            return original(*args, **kwargs)

        return method

    return make
