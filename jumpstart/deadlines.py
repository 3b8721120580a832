"""
How much time the current request has left, and how its handler learns that it should stop.

The server stops a request that has passed its deadline: a coroutine is cancelled, a thread gets `RequestTimeout`. Code
that waits for something can do better than to be stopped: wait for `deadline()` seconds at most, and look at
`cancelled()` between two steps. All of it works without the server, where no request has a deadline.
"""

from __future__ import annotations

import math
import time

from jumpstart.context import current


class RequestTimeout(BaseException):  # Python's own TimeoutError aside, this is what the field calls it
    """
    Raised in the thread of a handler whose request has passed its deadline, or whose client has left.

    There is nobody to answer any more: the client has got 504 or a broken stream, or is gone. Not an `Exception`, so
    that ``except Exception`` of a retry loop does not swallow it. Let it pass; what must be undone belongs into
    ``with`` and ``finally``. A WSGI handler may raise it too, when it finds that too little time is left: its client
    gets 504.
    """


def deadline() -> float | None:
    """
    Seconds that the current request has left, 0 when its time is over.

    None where there is no limit: outside a request, without the server, or with ``timeout = 0``.
    """
    context = current()
    if context is None or context.expires == math.inf:
        return None
    return max(context.expires - time.monotonic(), 0.0)


def extend_deadline(seconds: float) -> float | None:
    """
    Let the current request go on for *seconds* from now, if it has less; a deadline never comes nearer.

    The server grants it up to the tenant's ``timeout_extension``, which is 0 by default: an operator decides whether
    handlers may. Returns what `deadline` says afterwards; compare it with what was asked for.

    Raises:
        ValueError: *seconds* is negative or not finite.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds must be a finite number >= 0, not {seconds!r}")
    context = current()
    if context is not None and context.expires != math.inf:
        context.expires = max(context.expires, min(time.monotonic() + seconds, context.latest))
    return deadline()


def cancelled() -> bool:
    """
    Whether nobody waits for the current request's response any more: its client has left, or its time is over.

    False outside a request, and without the server. From any thread or task that runs for the request.
    """
    context = current()
    if context is None:
        return False
    if context.is_stopped or context.expires <= time.monotonic():
        return True
    return context.has_left is not None and context.has_left()
