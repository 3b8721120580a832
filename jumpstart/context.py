"""
The request that the current code runs for: how an app learns that it is being warmed, and how cold work is put to it.

The server (or a test) opens one `RequestContext` per request; recorders' hooks call `cold_event` from whatever thread
or task the work happens in, since context variables follow both.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from types import CodeType

    from jumpstart.dependencies import Versions
    from jumpstart.guard import Guard

MARKER_HEADER = "x-jumpstart-warmup"
"""Sent with the value ``1`` by every warm-up and shadow request; pass it on with `warmup_headers`."""

LINGER_S = 10.0
"""Seconds after a warm-up or shadow request for which what it left behind still counts as a part of it."""

MAX_EVENTS = 1000  # per request; a first request of a large app imports a few hundred modules


class RequestContext(msgspec.Struct, eq=False, kw_only=True):
    """
    One request in flight.

    Attributes:
        warmup: it is a warm-up or shadow request: nobody reads its response.
        thread_cpu_s: of a warm-up request, seconds on the CPU of threads that ran code for it beside its own.
        events: cold events as ``(kind, what)``: ``("import", "decimal")``, ``("template", "cart.html")``.
        imports: names of modules whose import began in it, in order; those that failed are not in `sys.modules` after.
        guard: refuses what the request would do to others (`jumpstart/guard.py`); for requests that have no client.
        lapses: when what has outlived a warm-up or shadow request, such as a task that serves others from then on, is
            no longer taken for a part of it, in seconds of the monotonic clock.
        first_calls: code of the app that had never run before, in order; None for none, and where nobody looks
            (`jumpstart/first_calls.py`).
        seen: the newest versions of real-time values that it has read (`jumpstart/dependencies.py`).
        expires: when its time is over, in seconds of the monotonic clock; infinity for never. The server stops it then,
            and looks again first, since `jumpstart.extend_deadline` may have moved it.
        latest: where *expires* can be moved at most.
        is_stopped: its time was over; the server has answered in its place.
        has_left: whether its client has gone away; None where nobody can tell.
    """

    warmup: bool = False
    expires: float = math.inf
    latest: float = math.inf
    is_stopped: bool = False
    has_left: Callable[[], bool] | None = None
    thread_cpu_s: float = 0.0
    events: list[tuple[str, str]] = []
    imports: list[str] = []
    guard: Guard | None = None
    lapses: float = math.inf
    seen: Versions | None = None
    first_calls: list[CodeType] | None = None


_current: ContextVar[RequestContext | None] = ContextVar("jumpstart_request", default=None)


def current() -> RequestContext | None:
    """The request that this code runs for, or None outside one."""
    return _current.get()


@contextlib.contextmanager
def request_context(context: RequestContext) -> Iterator[RequestContext]:
    """Make *context* the current one for the block, and for the threads and tasks that copy its context."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def enter(context: RequestContext) -> None:
    """Make *context* the current one until the end of the caller's `contextvars.Context`, which is its own."""
    _current.set(context)


def is_warmup() -> bool:
    """
    Whether the current code runs inside a warm-up or shadow request, whose response nobody reads.

    False outside any request, and in a plain script or test without the server.
    """
    context = _current.get()
    return context is not None and context.warmup and (context.lapses == math.inf or time.monotonic() < context.lapses)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Let the block do what the guard of the request refuses: work of our own that the app did not ask for."""
    context = _current.get()
    if context is None or context.guard is None:
        yield
        return
    with request_context(msgspec.structs.replace(context, guard=None)):
        yield


def warmup_headers() -> dict[str, str]:
    """
    Return the headers that mark what the current request asks of other services; empty in ordinary requests.

    ``client.get(url, headers=jumpstart.warmup_headers())``: a service on Jumpstart does not take such a request for
    evidence of what is hot, and others may leave it out of their bills and statistics.
    """
    return {MARKER_HEADER: "1"} if is_warmup() else {}


def cold_event(kind: str, what: str) -> None:
    """
    Count work that a warm process would not have done against the current request.

    Recorders call it from their hooks; outside a request it does nothing.
    """
    context = _current.get()
    if context is not None and len(context.events) < MAX_EVENTS:
        context.events.append((kind, what))
