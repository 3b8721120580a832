"""
Which real requests are worth repeating elsewhere: those that met cold work, and a sample of all.

`Lookout` is told of requests at their end. What it keeps is judged and scrubbed later, by who takes it: the thread of a
request only puts down what was there. A request that was warm, where nobody samples, costs nothing.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from jumpstart.context import RequestContext
from jumpstart.errors import ConfigError
from jumpstart_warmup.corpus import Headers, WarmRequest, scrub
from jumpstart_warmup.targets import KEPT_HEADERS, MAX_HEADER_VALUE, MAX_TARGET, is_fit_target, is_health_check

AGAIN_AFTER = 300.0  # seconds after which the same cold event on the same route is news again
MAX_KNOWN = 4096  # events of routes that are remembered
MAX_EVENTS = 200  # of one request that are told
MAX_HELD = 1000  # samples that wait to be taken
MAX_COLD = 100  # cold requests that wait to be taken
MAX_BODY = 64 * 1024  # bytes of a body that is kept
SAFE = ("GET", "HEAD")
_WANTED_HEADERS = {name.encode(): name for name in (*KEPT_HEADERS, "user-agent", "content-type")}
_CONTENT_TYPE = re.compile(r"[a-zA-Z0-9][\w.+-]{0,60}/[\w.+-]{1,60}(?:;\s?(?:charset|boundary)=[\w.'\"+-]{1,80})?")

Event = tuple[str, str]


class UnderWay(NamedTuple):
    """
    A request whose response has begun: a stream may take long.

    Attributes:
        rule: the template of its route, if the framework named it.
    """

    context: RequestContext
    method: str
    target: bytes
    headers: Headers
    status: int
    rule: str | None


class Cold(msgspec.Struct, frozen=True):
    """
    A request that met cold work.

    Attributes:
        route: method and template: ``GET /product/{id}``.
        events: kind and name of each, as in `RequestContext`.
    """

    request: WarmRequest
    route: str
    events: tuple[Event, ...]


class Sample(msgspec.Struct, frozen=True):
    """
    One request of a sample.

    Attributes:
        route: method and template.
        status: of its answer.
        at: when it ended, in seconds of the monotonic clock.
        draw: its lot, from 0 up to the rate it was drawn at: those below *f* are a sample of the fraction *f*.
    """

    request: WarmRequest
    route: str
    status: int
    at: float
    draw: float


def parse_routes(routes: Iterable[str], *, option: str = "shadow_routes") -> frozenset[str]:
    """
    Read routes as ``POST /search``: a method and a template or path.

    Raises:
        ConfigError: one is not; the message names it and *option*.
    """
    for route in routes:
        method, _, path = route.partition(" ")
        if not (method.isalpha() and method.isupper() and path.startswith("/")) or method in ("CONNECT", *SAFE):
            raise ConfigError(
                f"{option}: {route!r} must be a method and a path, such as 'POST /search'; GET and HEAD need no listing"
            )
    return frozenset(routes)


class Memory:
    """Which events of which routes were met lately; the oldest make room. Pure."""

    def __init__(self, again_after_s: float = AGAIN_AFTER, limit: int = MAX_KNOWN) -> None:
        self._again_after_s = again_after_s
        self._limit = limit
        self._met: dict[tuple[str, Event], float] = {}  # in the order of their times

    def is_news(self, route: str, events: Iterable[Event], now: float) -> bool:
        """Remember *events*, and say whether any of them was not met on *route* within the last while."""
        news = False
        for event in events:
            key = (route, event)
            met = self._met.get(key)
            if met is None or now - met >= self._again_after_s:
                news = True
                self._met.pop(key, None)
                self._met[key] = now
        while len(self._met) > self._limit:
            del self._met[next(iter(self._met))]
        return news


class _Held(msgspec.Struct, frozen=True):
    """A request as it was, not scrubbed yet; but for cookies and the like, which are never kept."""

    method: str
    target: bytes
    headers: tuple[tuple[str, str], ...]
    body: bytes | None
    route: str
    status: int
    at: float
    draw: float
    events: tuple[Event, ...]


def _wanted(headers: Headers) -> tuple[tuple[str, str], ...]:
    """Those that scrubbing looks at: of a thousand that wait, each might have a megabyte of others."""
    found = []
    for raw_name, raw_value in headers:
        name = (raw_name if isinstance(raw_name, bytes) else raw_name.encode("latin-1", "replace")).lower()
        if name in _WANTED_HEADERS and len(raw_value) <= MAX_HEADER_VALUE:
            value = raw_value.decode("latin-1") if isinstance(raw_value, bytes) else raw_value
            found.append((_WANTED_HEADERS[name], value))
    return tuple(found)


class Lookout:
    """
    Of one process. `met` and `passed` may be called from any thread.

    Attributes:
        rate: the share of requests that is sampled; see `sample`.
        methods: of the routes that the user listed: the bodies of such requests are wanted.
        most: samples that are kept until somebody takes them.
        lost: samples beyond that.
    """

    def __init__(
        self,
        *,
        routes: Collection[str] = (),
        wake: Callable[[], None] = lambda: None,
        tells_cold: bool = True,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            routes: unsafe ones that may be repeated, as ``POST /search``: a method and the template or path.
            wake: called, from any thread, when there is something for `take_cold`.
            tells_cold: false where requests with cold work are of no interest.
        """
        self.rate = 0.0
        self.most = MAX_HELD
        self.methods = frozenset(route.partition(" ")[0] for route in routes)
        self.lost = 0
        self._routes = frozenset(routes)
        self._wake = wake
        self._tells_cold = tells_cold
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._memory = Memory()
        self._cold: deque[_Held] = deque()
        self._samples: deque[_Held] = deque()
        self._judged: dict[bytes, bool] = {}

    def met(
        self,
        route: str,
        events: Sequence[Event],
        method: str,
        target: bytes,
        headers: Headers,
        status: int,
        body: bytes | None = b"",
    ) -> None:
        """A real request on *route*, a template, has met cold work."""
        if not self._tells_cold or not 200 <= status < 400 or not self._may_repeat(method, route, target):
            return
        now = self._clock()
        key = f"{method} {route}"
        with self._lock:
            # One that finds no room is news again the next time.
            if len(self._cold) >= MAX_COLD or not self._memory.is_news(key, events, now):
                return
            held = _Held(method, target, _wanted(headers), body, key, status, now, 0.0, tuple(events[:MAX_EVENTS]))
            self._cold.append(held)
        self._wake()

    def passed(
        self, route: str | None, method: str, target: bytes, headers: Headers, status: int, body: bytes | None = b""
    ) -> None:
        """A real request has ended, where there is a rate; most come to nothing. *route*: if it is known by now."""
        draw = self._draw()
        if draw >= self.rate or not 200 <= status < 400:
            return
        if len(self._samples) >= self.most:
            self.lost += 1
            return
        name = route or target.partition(b"?")[0].decode("latin-1")
        if not self._may_repeat(method, name, target):
            return
        held = _Held(method, target, _wanted(headers), body, f"{method} {name}", status, self._clock(), draw, ())
        with self._lock:
            self._samples.append(held)

    def _may_repeat(self, method: str, route: str, target: bytes) -> bool:
        if len(target) > MAX_TARGET:
            return False
        return method in SAFE or (method in self.methods and self._is_listed(method, route, target))

    def _is_listed(self, method: str, route: str, target: bytes) -> bool:
        path = target.partition(b"?")[0].decode("latin-1")
        return f"{method} {route}" in self._routes or f"{method} {path}" in self._routes

    def take_cold(self) -> list[Cold]:
        """The requests that met cold work since the last call, scrubbed; those that are unfit are not among them."""
        with self._lock:
            held, self._cold = self._cold, deque()
        found = ((self._scrubbed(each), each) for each in held)
        return [Cold(request, each.route, each.events) for request, each in found if request is not None]

    def take_samples(self, limit: int = 100) -> list[Sample]:
        """Up to *limit* requests of the sample, scrubbed, the oldest first."""
        taken: list[Sample] = []
        while len(taken) < limit:
            with self._lock:
                if not self._samples:
                    break
                held = self._samples.popleft()
            request = self._scrubbed(held)
            if request is not None:
                taken.append(Sample(request, held.route, held.status, held.at, held.draw))
        return taken

    def forget_samples(self) -> None:
        """Nobody has time for those that wait."""
        with self._lock:
            self._samples.clear()

    def _scrubbed(self, held: _Held) -> WarmRequest | None:
        if held.method not in SAFE:
            return _listed(held)
        target = held.target.decode("latin-1")
        is_fit = self._judged.get(held.target)  # what costs most of it
        if is_fit is None:
            if len(self._judged) >= MAX_KNOWN:
                self._judged.clear()
            is_fit = self._judged[held.target] = not is_health_check(target) and is_fit_target(target)
        plain = scrub(held.method, "/", held.headers) if is_fit else None
        return None if plain is None else msgspec.structs.replace(plain, path=target)


def _listed(held: _Held) -> WarmRequest | None:
    """
    A request of a route that the user listed; it stays on this host.

    The user has said that it may be repeated, so its target is not judged. Of its headers, those that a safe request
    keeps stay, and the type of its body.
    """
    if held.body is None or len(held.body) > MAX_BODY:
        return None
    plain = scrub("GET", "/", held.headers)
    if plain is None:
        return None
    kinds = [value for name, value in held.headers if name == "content-type" and _CONTENT_TYPE.fullmatch(value)]
    headers = (*plain.headers, *((("content-type", kinds[0]),) if kinds else ()))
    return WarmRequest(method=held.method, path=held.target.decode("latin-1"), headers=headers, body=held.body)
