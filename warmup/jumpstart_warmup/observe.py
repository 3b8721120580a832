"""What the requests of a process came to, by route: number, latency, CPU time, and what was cold in them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from types import CodeType
from urllib.parse import unquote

import msgspec

from jumpstart.context import RequestContext
from jumpstart.first_calls import name_of
from jumpstart.imports import import_events
from jumpstart_warmup.corpus import MAX_ROUTE_NAME, CorpusRecorder, Headers
from jumpstart_warmup.routes import NOT_FOUND, normalise_path
from jumpstart_warmup.sampling import SAFE, Event, Lookout, UnderWay
from jumpstart_warmup.targets import is_health_check

_MILLISECONDS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_SECONDS = (1, 2.5, 5, 10, 15, 20, 30, 45, 60, 90, 120, 300, 600)
BUCKETS_S = (*(bound / 1000 for bound in _MILLISECONDS), *map(float, _SECONDS))
"""Upper bounds (inclusive) of the latency histogram in seconds; one more bucket takes the rest."""

MAX_ROUTES = 1000
MAX_CELLS = 256  # kinds of finished requests that are counted together before they go into the books
MAX_NAMES = 50
OTHER = "(other)"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CLIENT_CLOSED = 499  # nginx's status for a client that left before the answer was complete


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
        first_calls: functions that had never run before; always 0 without ``--first-calls``.
        first_call_requests: those with at least one of them.
        first_call_names: the last of them, oldest first, each once.
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
    first_calls: int = 0
    first_call_requests: int = 0
    first_call_names: tuple[str, ...] = ()


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
        "first_call_names",
        "first_call_requests",
        "first_calls",
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
        self.first_calls = 0
        self.first_call_requests = 0
        self.first_call_names: dict[str, None] = {}

    def add_first_calls(self, codes: Sequence[CodeType]) -> None:
        self.first_call_requests += 1
        self.first_calls += len(codes)
        for code in codes[-MAX_NAMES:]:
            name = name_of(code)
            self.first_call_names.pop(name, None)
            self.first_call_names[name] = None
        while len(self.first_call_names) > MAX_NAMES:
            del self.first_call_names[next(iter(self.first_call_names))]

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
            first_calls=self.first_calls,
            first_call_requests=self.first_call_requests,
            first_call_names=tuple(self.first_call_names),
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
            evidence: it shows what is hot: neither warm-up nor shadow, nor marked as one, nor by a load balancer.
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
        events = _events_of(context)
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
            if context.first_calls:
                entry.add_first_calls(context.first_calls)
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
        if context.events or context.imports or context.warmup or context.first_calls:
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
        rule = rule or _rule_of(target, status)
        return rule, self._book(context, rule, method, target, status, cell, evidence)

    def look(self, underway: Iterable[UnderWay]) -> None:
        """Tell the lookout what was cold so far in requests that may take long; what is told twice is no news there."""
        lookout = self.lookout
        if lookout is None:
            return
        for each in underway:
            events = _events_of(each.context)
            if events and each.method in SAFE:  # the body of another may not be whole
                rule = each.rule or _rule_of(each.target.decode("latin-1"), each.status)
                lookout.met(rule, events, each.method, each.target, each.headers, each.status)

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


def _events_of(context: RequestContext) -> list[Event]:
    if not context.imports:
        return context.events
    return [*context.events, *(("import", name) for name in import_events(context))]


def _rule_of(target: str, status: int) -> str:
    """A route for the books, where the framework named none."""
    return NOT_FOUND if status == 404 else normalise_path(unquote(target.partition("?")[0]) or "/")


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
        first_calls=one.first_calls + two.first_calls,
        first_call_requests=one.first_call_requests + two.first_call_requests,
        first_call_names=tuple(dict.fromkeys((*one.first_call_names, *two.first_call_names)))[-MAX_NAMES:],
    )


def warm_coverage(snapshot: ObserverSnapshot) -> float | None:
    """Share (0…1) of ordinary requests without a cold event, each route by its traffic; None when there were none."""
    requests = sum(stats.requests for stats in snapshot.routes.values())
    if not requests:
        return None
    return 1 - sum(stats.cold_requests for stats in snapshot.routes.values()) / requests
