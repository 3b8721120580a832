"""
What each request cost, and what was cold in it.

`Observer` keeps the books; `ObservedASGI` and `ObservedWSGI` are middleware that open and close an entry for each
request, change nothing that passes through, and never buffer.

Whom to believe. A request is *warm-up* (`jumpstart.is_warmup()` is true, its statistics are kept apart) when this
process made it itself (scope or environ key ``jumpstart.warmup``, which no client can set), or when it carries the
marker header and *trust_warmup_header* is on: apps may skip billing and mails in warm-up, so an outsider must not be
able to ask for it. With the marker header alone, from anyone, a request is merely no *evidence*: it is counted like any
other, so that nobody hides from the statistics, but it does not enter the corpus. All that a stranger gains is that his
own request is not replayed.
"""

from __future__ import annotations

import asyncio
import functools
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from jumpstart.context import RequestContext, current, request_context
from jumpstart.imports import import_events
from jumpstart_warmup.corpus import MARKER_HEADER, MAX_ROUTE_NAME, CorpusRecorder, Headers, is_opaque
from jumpstart_warmup.sampling import Event, Lookout
from jumpstart_warmup.targets import is_health_check

Clock = Callable[[], float]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
WSGIApp = Callable[[Environ, StartResponse], Iterable[bytes]]

WARMUP_KEY = "jumpstart.warmup"
"""Scope or environ key, True inside warm-up and shadow requests that this process makes."""

_MILLISECONDS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_SECONDS = (1, 2.5, 5, 10, 15, 20, 30, 45, 60, 90, 120, 300, 600)
BUCKETS_S = (*(bound / 1000 for bound in _MILLISECONDS), *map(float, _SECONDS))
"""Upper bounds (inclusive) of the latency histogram in seconds; one more bucket takes the rest."""

MAX_ROUTES = 1000
MAX_CELLS = 256  # kinds of finished requests that are counted together before they go into the books
MAX_NAMES = 50
OTHER = "(other)"
NOT_FOUND = "(not found)"
CLIENT_CLOSED = 499  # nginx's status for a client that left before the answer was complete

# --- routes ---------------------------------------------------------------------------------------------------------

MAX_SEGMENTS = 8
_PLACEHOLDER = "{}"
_REST = "…"
_NAMELIKE = re.compile(r"[A-Za-z0-9_.~!$'()*+,;=:&-]*")
_DIGITS = re.compile(r"[0-9]{4}|^[0-9][0-9.,:_-]*$")
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@functools.lru_cache(maxsize=2048)
def normalise_path(path: str) -> str:
    """
    Guess a route from a (decoded) path: segments that look like values become ``{}``, from the ninth on ``…``.

    Values are numbers, anything with four digits in a row, UUIDs, opaque strings, more than 40 characters, and
    characters beyond those of names. Pure and idempotent.
    """
    segments = path.split("/")
    head = segments[: MAX_SEGMENTS + 1]  # the first is what stands before the leading slash: nothing
    shown = [segment if _is_name(segment) else _PLACEHOLDER for segment in head]
    if len(segments) > len(head):
        shown.append(_REST)
    return "/".join(shown)


def _is_name(segment: str) -> bool:
    return (
        len(segment) <= 40
        and _NAMELIKE.fullmatch(segment) is not None
        and _DIGITS.search(segment) is None
        and _UUID.fullmatch(segment) is None
        and not is_opaque(segment)
    )


def route_of_scope(scope: Scope, root_path: str = "", status: int = 0) -> str:
    """
    Return the route that answered an ASGI request, after the app has run.

    Starlette and FastAPI leave their route in the scope: its template, behind the prefix of the mounts it lies in.
    Other frameworks (Django among them) leave nothing: then the path is normalised, except for a 404, whose path anyone
    could have made up: ``(not found)``.

    Args:
        scope: the very scope the app was called with.
        root_path: its ``root_path`` before the call; mounts lengthen it.
        status: the status of the response, 0 when not known.
    """
    route = scope.get("route")
    template = getattr(route, "path", None)
    if isinstance(template, str):
        fastapi = scope.get("fastapi")
        if isinstance(fastapi, dict):  # FastAPI: the prefix of include_router() is not in the route itself
            effective = fastapi.get("effective_route_context")
            if effective is not None and getattr(effective, "original_route", None) is route:
                longer = getattr(effective, "path", None)
                template = longer if isinstance(longer, str) else template
        inner_root = scope.get("root_path") or ""
        mount = ""
        if inner_root != root_path and inner_root.startswith(root_path):
            mount = normalise_path(inner_root[len(root_path) :])
        # A Mount whose app leaves no route of its own (static files, WSGI) is itself the route.
        return mount + ("/{path}" if _is_mount(route) else template) or "/"
    if status == 404:
        return NOT_FOUND
    path = scope.get("path") or "/"
    return normalise_path(path[len(root_path) :] if root_path and path.startswith(root_path) else path)


def _is_mount(route: Any) -> bool:
    return not hasattr(route, "methods") and hasattr(route, "routes")


# --- the books ------------------------------------------------------------------------------------------------------


class RouteStats(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the requests of one route came to.

    Attributes:
        requests: all of them, failed ones too.
        marked: those that were marked as warm-up or shadow requests by their client, and are no evidence.
        cold_requests: those with at least one cold event.
        errors: those with a status of 500 or more.
        latency_sum_s: seconds from the call of the app to the last chunk, summed.
        longest_s: the longest of them.
        cpu_requests: those whose CPU time was measured: a sample.
        cpu_s: their seconds on the CPU, of thread or coroutine, summed.
        cpu_latency_s: their part of *latency_sum_s*.
        buckets: how many fell into each of `BUCKETS_S`, and the rest; not cumulative.
        cold_events: kind → number.
        cold_names: the last names of cold events, ``kind name``, oldest first, each once.
    """

    requests: int = 0
    marked: int = 0
    cold_requests: int = 0
    errors: int = 0
    latency_sum_s: float = 0.0
    longest_s: float = 0.0
    cpu_requests: int = 0
    cpu_s: float = 0.0
    cpu_latency_s: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    cold_events: dict[str, int] = {}
    cold_names: tuple[str, ...] = ()


class ObserverSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """
    The books at one moment, of one process or of several merged. Keys are ``METHOD route``.

    Attributes:
        routes: ordinary requests.
        warmup: warm-up and shadow requests.
    """

    routes: dict[str, RouteStats] = {}
    warmup: dict[str, RouteStats] = {}


class _Entry:
    """One route's books, changed under the observer's lock."""

    __slots__ = (
        "buckets",
        "cold_events",
        "cold_names",
        "cold_requests",
        "cpu_latency_s",
        "cpu_requests",
        "cpu_s",
        "errors",
        "latency_sum_s",
        "longest_s",
        "marked",
        "requests",
    )

    def __init__(self) -> None:
        self.cpu_requests = 0
        self.cpu_s = 0.0
        self.cpu_latency_s = 0.0
        self.requests = 0
        self.marked = 0
        self.cold_requests = 0
        self.errors = 0
        self.latency_sum_s = 0.0
        self.longest_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.cold_events: dict[str, int] = {}
        self.cold_names: dict[str, None] = {}

    def add_cold(self, events: Iterable[tuple[str, str]]) -> None:
        self.cold_requests += 1
        for kind, what in events:
            self.cold_events[kind] = self.cold_events.get(kind, 0) + 1
            name = f"{kind} {what}"
            self.cold_names.pop(name, None)
            self.cold_names[name] = None
        while len(self.cold_names) > MAX_NAMES:
            del self.cold_names[next(iter(self.cold_names))]

    def stats(self) -> RouteStats:
        return RouteStats(
            requests=self.requests,
            marked=self.marked,
            cold_requests=self.cold_requests,
            errors=self.errors,
            latency_sum_s=self.latency_sum_s,
            longest_s=self.longest_s,
            cpu_requests=self.cpu_requests,
            cpu_s=self.cpu_s,
            cpu_latency_s=self.cpu_latency_s,
            buckets=tuple(self.buckets),
            cold_events=dict(self.cold_events),
            cold_names=tuple(self.cold_names),
        )


_CellKey = tuple[str, bytes, str | None, int, bool]  # method, target, rule, status, evidence


class _Cell:
    """Requests that were alike, and are not in the books yet."""

    __slots__ = ("buckets", "cpu_latency_s", "cpu_requests", "cpu_s", "elapsed_s", "headers", "longest_s")

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.elapsed_s = 0.0
        self.longest_s = 0.0
        self.cpu_requests = 0
        self.cpu_s = 0.0
        self.cpu_latency_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)

    def add(self, elapsed_s: float, cpu_s: float) -> None:
        self.elapsed_s += elapsed_s
        self.longest_s = max(self.longest_s, elapsed_s)
        self.buckets[bisect_left(BUCKETS_S, elapsed_s)] += 1
        if cpu_s >= 0:
            self.add_cpu(elapsed_s, cpu_s)

    def add_cpu(self, elapsed_s: float, cpu_s: float) -> None:
        self.cpu_requests += 1
        self.cpu_s += cpu_s
        self.cpu_latency_s += elapsed_s


class Observer:
    """
    The books of one process. Every method may be called from any thread.

    Attributes:
        lookout: is told of real requests that may be worth repeating elsewhere.
    """

    def __init__(self, corpus: CorpusRecorder | None = None) -> None:
        """*corpus*: takes the requests that are evidence of what is hot."""
        self._corpus = corpus
        self._lock = threading.Lock()
        self._routes: dict[str, _Entry] = {}
        self._warmup: dict[str, _Entry] = {}
        self._changes = 0
        self._cells: dict[_CellKey, _Cell] = {}
        self.lookout: Lookout | None = None

    @property
    def requests(self) -> int:
        """Ordinary ones that have ended so far."""
        self.settle()
        with self._lock:
            return sum(entry.requests for entry in self._routes.values())

    @property
    def changes(self) -> int:
        """Grows when there is something that a next process would want to know."""
        self.settle()
        return self._changes

    def begin(self, *, warmup: bool) -> RequestContext:
        """Open an entry; the caller makes the context the current one and hands it to `end` exactly once."""
        return RequestContext(warmup=warmup)

    def wants_target(self, *, status: int, evidence: bool) -> bool:
        """Whether `end` would use target and headers; otherwise the caller may pass nothing for them."""
        return evidence and self._corpus is not None and 200 <= status < 400

    def end(
        self,
        context: RequestContext,
        *,
        route: str,
        method: str,
        target: str,
        headers: Headers,
        status: int,
        elapsed_s: float,
        evidence: bool,
    ) -> None:
        """
        Close the entry.

        Args:
            route: the template, such as ``/product/{id}``, without the method.
            target: path and query as the client sent them, without the root path; "" where `wants_target` is False.
            status: 499 when the client left, 500 when the handler raised.
            evidence: it shows what is hot: neither warm-up nor shadow, nor marked as one.
        """
        cell = _Cell(headers)
        cell.add(elapsed_s, -1.0)
        self._book(context, route, method, target, status, cell, evidence)

    def _book(
        self,
        context: RequestContext,
        route: str,
        method: str,
        target: str,
        status: int,
        cell: _Cell,
        evidence: bool,
    ) -> list[Event]:
        """Put requests that are alike into the books: as many as the buckets of *cell* say. Returns what was cold."""
        events = context.events
        if context.imports:
            events = [*events, *(("import", name) for name in import_events(context))]
        key = f"{method if method in _METHODS else 'OTHER'} {route}"
        table = self._warmup if context.warmup else self._routes
        number = sum(cell.buckets)
        with self._lock:
            entry = table.get(key)
            if entry is None:
                entry = self._open(table, key)
                self._changes += 1
            entry.requests += number
            if not evidence:
                entry.marked += number
            entry.latency_sum_s += cell.elapsed_s
            entry.longest_s = max(entry.longest_s, cell.longest_s)
            entry.cpu_requests += cell.cpu_requests
            entry.cpu_s += cell.cpu_s
            entry.cpu_latency_s += cell.cpu_latency_s
            for index, count in enumerate(cell.buckets):
                entry.buckets[index] += count
            if status >= 500:
                entry.errors += number
            if events:
                entry.add_cold(events)
                self._changes += 1
        is_evidence = evidence and not context.warmup and target and 200 <= status < 400
        if is_evidence and self._corpus is not None and not is_health_check(target):
            self._corpus.observe_request(route[:MAX_ROUTE_NAME], method, target, cell.headers, number)
        return events

    def count(
        self,
        context: RequestContext,
        *,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        status: int,
        elapsed_s: float,
        evidence: bool,
        rule: str | None = None,
        cpu_s: float = -1.0,
        body: bytes | None = b"",
    ) -> None:
        """
        Close an entry, as `end` does; cheap for a request like one before it, since it is only counted.

        Args:
            context: the current one while it ran.
            target: path and query as they came.
            rule: the template of the route, if the framework named it; else the path is normalised.
            evidence: as in `end`.
            cpu_s: seconds on the CPU; negative where nobody measured them.
            body: of the request, where the lookout wants it; None for one that is not at hand.
        """
        key = (method, target, rule, status, evidence)
        lookout = self.lookout
        if lookout is not None and lookout.rate and evidence:
            lookout.passed(rule, method, target, headers, status, body)
        if context.events or context.imports or context.warmup:
            cell = _Cell(headers)
            cell.add(elapsed_s, cpu_s)
            route, events = self._settle_one(context, key, cell)
            if events and lookout is not None and not context.warmup:
                lookout.met(route, events, method, target, headers, status, body)
            return
        with self._lock:
            known = self._cells.get(key)
            if known is None:
                known = self._cells[key] = _Cell(headers)
            known.elapsed_s += elapsed_s
            if elapsed_s > known.longest_s:
                known.longest_s = elapsed_s
            known.buckets[bisect_left(BUCKETS_S, elapsed_s)] += 1
            if cpu_s >= 0:
                known.add_cpu(elapsed_s, cpu_s)
            full = len(self._cells) >= MAX_CELLS
        if full:
            self.settle()

    def settle(self) -> None:
        """Put what `count` has counted into the books and the corpus."""
        if not self._cells:
            return
        with self._lock:
            cells, self._cells = self._cells, {}
        for key, cell in cells.items():
            self._settle_one(RequestContext(), key, cell)

    def _settle_one(self, context: RequestContext, key: _CellKey, cell: _Cell) -> tuple[str, list[Event]]:
        method, raw_target, rule, status, evidence = key
        target = raw_target.decode("latin-1")
        if rule is None:
            rule = NOT_FOUND if status == 404 else normalise_path(unquote(target.partition("?")[0]) or "/")
        return rule, self._book(context, rule, method, target, status, cell, evidence)

    def _open(self, table: dict[str, _Entry], key: str) -> _Entry:
        if len(table) >= MAX_ROUTES:
            key = OTHER
        return table.setdefault(key[:MAX_ROUTE_NAME], _Entry())

    def snapshot(self) -> ObserverSnapshot:
        """Copy the books."""
        self.settle()
        with self._lock:
            return ObserverSnapshot(
                routes={key: entry.stats() for key, entry in self._routes.items()},
                warmup={key: entry.stats() for key, entry in self._warmup.items()},
            )


def merge_snapshots(*snapshots: ObserverSnapshot) -> ObserverSnapshot:
    """Add the books of several processes; past 1000 routes the rarest go to ``(other)``. Pure."""
    return ObserverSnapshot(
        routes=_merge_tables([snapshot.routes for snapshot in snapshots]),
        warmup=_merge_tables([snapshot.warmup for snapshot in snapshots]),
    )


def _merge_tables(tables: Iterable[dict[str, RouteStats]]) -> dict[str, RouteStats]:
    merged: dict[str, RouteStats] = {}
    for table in tables:
        for key, stats in table.items():
            merged[key] = _add(merged[key], stats) if key in merged else stats
    if len(merged) > MAX_ROUTES + 1:
        by_traffic = sorted(merged, key=lambda key: (key != OTHER, -merged[key].requests, key))
        for key in by_traffic[MAX_ROUTES + 1 :]:
            rare = merged.pop(key)
            merged[OTHER] = _add(merged[OTHER], rare) if OTHER in merged else rare
    return merged


def _add(one: RouteStats, two: RouteStats) -> RouteStats:
    names = dict.fromkeys(one.cold_names)
    for name in two.cold_names:
        names.pop(name, None)
        names[name] = None
    kinds = [*one.cold_events, *(kind for kind in two.cold_events if kind not in one.cold_events)]
    return RouteStats(
        requests=one.requests + two.requests,
        marked=one.marked + two.marked,
        cold_requests=one.cold_requests + two.cold_requests,
        errors=one.errors + two.errors,
        latency_sum_s=one.latency_sum_s + two.latency_sum_s,
        longest_s=max(one.longest_s, two.longest_s),
        cpu_requests=one.cpu_requests + two.cpu_requests,
        cpu_s=one.cpu_s + two.cpu_s,
        cpu_latency_s=one.cpu_latency_s + two.cpu_latency_s,
        buckets=tuple(a + b for a, b in zip(one.buckets, two.buckets, strict=True)),
        cold_events={kind: one.cold_events.get(kind, 0) + two.cold_events.get(kind, 0) for kind in kinds},
        cold_names=tuple(names)[-MAX_NAMES:],
    )


def warm_coverage(snapshot: ObserverSnapshot) -> float | None:
    """Share (0…1) of ordinary requests without a cold event, each route by its traffic; None when there were none."""
    requests = sum(stats.requests for stats in snapshot.routes.values())
    if not requests:
        return None
    return 1 - sum(stats.cold_requests for stats in snapshot.routes.values()) / requests


# --- ASGI -----------------------------------------------------------------------------------------------------------

MARKER_BYTES = MARKER_HEADER.encode()
"""The marker header in a scope."""


class ObservedASGI:
    """
    ASGI 3 middleware: one entry of the books per HTTP request; WebSockets and lifespan pass untouched.

    A request ends when the app returns or raises; its latency when the last chunk was sent. Exceptions pass unchanged.
    A request that is cancelled, or whose client leaves before the answer is complete, counts with status 499; a handler
    that raises, or returns without a complete answer, with 500.
    """

    def __init__(
        self,
        app: ASGIApp,
        observer: Observer,
        *,
        clock: Clock = time.monotonic,
        trust_warmup_header: bool = False,
    ) -> None:
        self.app = app
        self._observer = observer
        self._clock = clock
        self._trust = trust_warmup_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, self._clock)
        own = scope.get(WARMUP_KEY) is True
        marked = own
        for header in scope["headers"]:  # a plain loop takes half the time of any() with a generator
            if header[0] == MARKER_BYTES:
                marked = True
        warmup = own or (marked and self._trust)
        if warmup:
            scope[WARMUP_KEY] = True  # so that apps need not know about headers
        root_path = scope.get("root_path") or ""
        context = _context(self._observer, own, warmup)
        started = self._clock()
        failed: BaseException | None = None
        try:
            with request_context(context):
                await self.app(scope, exchange.receive, exchange.send)
        except BaseException as error:
            failed = error
            raise
        finally:
            finished = self._clock() if exchange.finished is None else exchange.finished
            status = exchange.final_status(failed)
            wanted = self._observer.wants_target(status=status, evidence=not marked)
            self._observer.end(
                context,
                route=route_of_scope(scope, root_path, status),
                method=scope["method"],
                target=_target_of_scope(scope, root_path) if wanted else "",
                headers=scope["headers"] if wanted else (),
                status=status,
                elapsed_s=finished - started,
                evidence=not marked,
            )


def _context(observer: Observer, own: bool, warmup: bool) -> RequestContext:
    if own:  # the in-process driver counts cold events in the context that it opened
        context = current()
        if context is not None and context.warmup:
            return context
    return observer.begin(warmup=warmup)


class _Exchange:
    """What went through one request's receive and send."""

    __slots__ = ("_clock", "_receive", "_send", "disconnected", "finished", "status")

    def __init__(self, receive: Receive, send: Send, clock: Clock) -> None:
        self._receive = receive
        self._send = send
        self._clock = clock
        self.status = 0
        self.finished: float | None = None
        self.disconnected = False

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError:  # ASGI 2.4: the client is gone
            self.disconnected = True
            raise
        kind = message["type"]
        if kind == "http.response.start":
            self.status = message["status"]
        elif kind == "http.response.body":
            if not message.get("more_body", False):
                self.finished = self._clock()
        elif kind == "http.response.pathsend":  # the server sends the file; nothing follows
            self.finished = self._clock()

    def final_status(self, failed: BaseException | None) -> int:
        if self.finished is not None:  # what fails after the answer (a background task) did not fail the request
            return self.status
        if self.disconnected or isinstance(failed, asyncio.CancelledError):
            return CLIENT_CLOSED
        return 500


def _target_of_scope(scope: Scope, root_path: str) -> str:
    raw_path = scope.get("raw_path")
    path = raw_path.decode("latin-1") if raw_path else quote(scope["path"])
    if root_path and path.startswith(root_path):
        path = path[len(root_path) :] or "/"
    query: bytes = scope.get("query_string", b"")
    return f"{path}?{query.decode('latin-1')}" if query else path


# --- WSGI -----------------------------------------------------------------------------------------------------------

MARKER_KEY = "HTTP_" + MARKER_HEADER.upper().replace("-", "_")
"""The marker header in an environ."""


class ObservedWSGI:
    """
    WSGI middleware: one entry of the books per request, closed when the server closes the iterable.

    Lists, tuples and the server's own file wrapper are handed through as they are, because servers look at their type
    (for Content-Length, for sendfile): their entry closes at once. Any other iterable is wrapped, closed exactly once,
    and its code runs in the request's context. Exceptions and ``exc_info`` pass unchanged. An iterable that is closed
    before its end, while the client still waited for bytes, counts with status 499.
    """

    def __init__(
        self,
        app: WSGIApp,
        observer: Observer,
        *,
        clock: Clock = time.monotonic,
        trust_warmup_header: bool = False,
    ) -> None:
        self.app = app
        self._observer = observer
        self._clock = clock
        self._trust = trust_warmup_header

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        own = environ.get(WARMUP_KEY) is True
        marked = own or MARKER_KEY in environ
        warmup = own or (marked and self._trust)
        if warmup:
            environ[WARMUP_KEY] = True
        context = _context(self._observer, own, warmup)
        entry = _Open(self._observer, environ, start_response, self._clock, context, not marked)
        try:
            with request_context(entry.context):
                result = self.app(environ, entry.start_response)
        except BaseException:
            entry.end(failed=True)
            raise
        wrapper = environ.get("wsgi.file_wrapper")
        if type(result) in (list, tuple) or (isinstance(wrapper, type) and isinstance(result, wrapper)):
            entry.end()
            return result
        return _Body(result, entry)


class _Open:
    """The open entry of one WSGI request."""

    __slots__ = (
        "_clock",
        "_environ",
        "_evidence",
        "_method",
        "_observer",
        "_root_path",
        "_rule",
        "_start_response",
        "_started",
        "context",
        "response_headers",
        "sent_bytes",
        "status",
    )

    def __init__(
        self,
        observer: Observer,
        environ: Environ,
        start_response: StartResponse,
        clock: Clock,
        context: RequestContext,
        evidence: bool,
    ) -> None:
        self._observer = observer
        self._environ = environ
        self._start_response = start_response
        self._clock = clock
        self._evidence = evidence
        self._method: str = environ["REQUEST_METHOD"]
        self._root_path: str = environ.get("SCRIPT_NAME", "")
        self._rule: str | None = None
        self._started = clock()
        self.context = context
        self.status = 0
        self.sent_bytes = 0
        self.response_headers: list[tuple[str, str]] = []

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None, /
    ) -> Callable[[bytes], object]:
        if self._rule is None:
            # Flask takes its request out of the environ before the iterable is closed; here it still is.
            self._rule = werkzeug_rule(self._environ, self._root_path)
        if exc_info is None:
            write = self._start_response(status, headers)
        else:
            write = self._start_response(status, headers, exc_info)
        self.response_headers = headers
        try:
            self.status = int(status[:3])
        except ValueError:  # the server's to refuse; it did not
            self.status = 500
        return write

    def end(self, *, failed: bool = False, abandoned: bool = False) -> None:
        status = self.status
        if failed or not status:
            status = 500
        elif abandoned and self._is_incomplete():
            status = CLIENT_CLOSED
        wanted = self._observer.wants_target(status=status, evidence=self._evidence)
        self._observer.end(
            self.context,
            route=self._rule or self._fallback_route(status),
            method=self._method,
            target=_target_of_environ(self._environ, self._root_path) if wanted else "",
            headers=_headers_of_environ(self._environ) if wanted else (),
            status=status,
            elapsed_s=self._clock() - self._started,
            evidence=self._evidence,
        )

    def _fallback_route(self, status: int) -> str:
        return NOT_FOUND if status == 404 else normalise_path(self._environ.get("PATH_INFO") or "/")

    def _is_incomplete(self) -> bool:
        """Whether the client was to get more; servers need not ask for the end of an iterable that has given all."""
        if self._method == "HEAD" or self.status in (204, 304):
            return False
        for name, value in self.response_headers:
            if name.lower() == "content-length":
                return not value.isdecimal() or self.sent_bytes < int(value)
        return True


class _Body:
    """The app's iterable, in the request's context."""

    __slots__ = ("_closed", "_entry", "_exhausted", "_failed", "_iterator", "_result")

    def __init__(self, result: Iterable[bytes], entry: _Open) -> None:
        self._result = result
        self._entry = entry
        self._iterator: Iterator[bytes] | None = None
        self._exhausted = False
        self._failed = False
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with request_context(self._entry.context):
            try:
                if self._iterator is None:
                    self._iterator = iter(self._result)
                chunk = next(self._iterator)
            except StopIteration:
                self._exhausted = True
                raise
            except BaseException:
                self._failed = True
                raise
        self._entry.sent_bytes += len(chunk)
        return chunk

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            close = getattr(self._result, "close", None)
            if close is not None:
                with request_context(self._entry.context):
                    close()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._entry.end(failed=self._failed, abandoned=not self._exhausted)


def werkzeug_rule(environ: Environ, root_path: str = "") -> str | None:
    """The rule that Werkzeug (Flask) has found for a request, or None."""
    rule = getattr(getattr(environ.get("werkzeug.request"), "url_rule", None), "rule", None)
    if not isinstance(rule, str):
        return None
    inner_root = environ.get("SCRIPT_NAME", "")  # longer inside a DispatcherMiddleware
    return normalise_path(inner_root[len(root_path) :]) + rule if inner_root != root_path else rule


def _target_of_environ(environ: Environ, root_path: str) -> str:
    path = environ.get("PATH_INFO", "")
    inner_root = environ.get("SCRIPT_NAME", "")
    if inner_root.startswith(root_path):
        path = inner_root[len(root_path) :] + path
    target = quote(path.encode("latin-1", "replace"), safe="/:@!$&'()*+,;=~-._") or "/"
    query = environ.get("QUERY_STRING", "")
    return f"{target}?{query}" if query else target


def _headers_of_environ(environ: Environ) -> Iterator[tuple[str | bytes, str | bytes]]:
    for key, value in environ.items():
        if key.startswith("HTTP_"):
            yield key[5:].replace("_", "-").lower(), value
