"""
Reads access logs back: into the same statistics by route that a running server keeps.

A log in JSON is read by its keys, any other by the format that it was written in: the one of ``--access-logformat``. It
must tell the request line, the status, and how long each took.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote_to_bytes

import msgspec

from jumpstart.errors import ConfigError
from jumpstart_server.access import ATOM, JSON, MONTHS, NAMED, compile_format
from jumpstart_warmup.observe import BUCKETS_S, MAX_ROUTES, OTHER, RouteStats
from jumpstart_warmup.routes import NOT_FOUND, normalise_path

_UNITS = {"D": 1e-6, "M": 1e-3, "L": 1.0, "T": 1.0}  # seconds of a duration atom's unit, finest first
_PATTERNS = {"s": r"\d{3}", "D": r"\d+", "M": r"\d+", "T": r"\d+", "L": r"\d+\.\d+", "t": r"\[[^\]]*\]", "m": r"\S+"}
_QUOTED = '[^"]*?'
_MONTH_NUMBERS = {name: number for number, name in enumerate(MONTHS, 1)}


@dataclass(frozen=True)
class Line:
    """
    One request of a log.

    Attributes:
        ended: seconds since 1970, None where the format does not tell.
        tenant: whose request it was; empty where the format does not tell.
    """

    method: str
    path: str
    status: int
    duration_s: float
    ended: float | None
    tenant: str = ""


@dataclass
class LogStats:
    """
    A whole log.

    Attributes:
        routes: tenant → route → statistics, as of `jumpstart_warmup.observe.ObserverSnapshot`.
        lines: that were requests.
        odd: lines that the format does not explain.
        first, last: ends of requests, in seconds since 1970; None where no line tells.
    """

    routes: dict[str, dict[str, RouteStats]] = field(default_factory=dict)
    lines: int = 0
    odd: int = 0
    first: float | None = None
    last: float | None = None

    @property
    def period_s(self) -> float | None:
        """From the first to the last; None where that is no time."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return self.last - self.first


Reader = Callable[[str], Line | None]


def compile_reader(logformat: str, *, option: str = "--access-logformat") -> Reader:
    """
    Return the function that reads a line; None is a line of another form, or of no request.

    Raises:
        ConfigError: the format is none, or does not tell what must be known.
    """
    if logformat == JSON:
        return _read_json
    text = NAMED.get(logformat, logformat)
    compile_format(text, option=option)  # complains about what is no format
    names = [match["name"] for match in ATOM.finditer(text) if match["name"]]
    duration = next((atom for atom in _UNITS if atom in names), None)
    if duration is None:
        raise ConfigError(
            f"{option}: {logformat!r} does not tell how long a request took; use json, or a format with %(D)s, %(M)s "
            "or %(L)s"
        )
    if "s" not in names or not ("r" in names or {"m", "U"} <= set(names)):
        raise ConfigError(f"{option}: {logformat!r} tells no status (%(s)s) or no request line (%(r)s)")
    return _text_reader(text, duration)


def _text_reader(text: str, duration: str) -> Reader:
    pattern = ""
    end = 0
    seen: set[str] = set()
    for match in ATOM.finditer(text):
        pattern += re.escape(text[end : match.start()])
        end = match.end()
        name = match["name"]
        if name is None:
            pattern += "%"
        elif name in {"s", "r", "m", "U", "t", duration} and name not in seen:
            seen.add(name)
            pattern += f" *(?P<{name}>{_PATTERNS.get(name, _QUOTED)}) *"
        else:
            pattern += _PATTERNS.get(name, ".*?")
    compiled = re.compile(pattern + re.escape(text[end:]) + r"\s*")
    unit = _UNITS[duration]

    def read(line: str) -> Line | None:
        found = compiled.fullmatch(line)
        if found is None:
            return None
        groups = found.groupdict()
        if groups.get("r") is not None:
            parts = groups["r"].split(" ")
            if len(parts) != 3:
                return None
            method, target = parts[0], parts[1]
        else:
            method, target = groups["m"], groups["U"]
        ended = _clf_time(groups["t"]) if groups.get("t") else None
        return Line(method, target.partition("?")[0], int(groups["s"]), float(groups[duration]) * unit, ended)

    return read


def _clf_time(text: str) -> float | None:
    day, _, rest = text[1:-1].partition("/")
    month, _, rest = rest.partition("/")
    try:
        return datetime.strptime(f"{day}/{_MONTH_NUMBERS.get(month, 0)}/{rest}", "%d/%m/%Y:%H:%M:%S %z").timestamp()
    except ValueError:
        return None


class _Entry(msgspec.Struct):
    """The keys of a JSON line that matter here."""

    method: str | None
    path: str | None
    status: int
    duration_ms: float
    time: datetime | None = None
    tenant: str = ""


_decode = msgspec.json.Decoder(_Entry).decode


def _read_json(line: str) -> Line | None:
    try:
        entry = _decode(line)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    if entry.method is None or entry.path is None:
        return None
    time = entry.time if entry.time is None or entry.time.tzinfo else entry.time.replace(tzinfo=UTC)
    ended = None if time is None else time.timestamp()
    return Line(entry.method, entry.path, entry.status, entry.duration_ms / 1000, ended, entry.tenant)


def read_log(lines: Iterable[str], reader: Reader) -> LogStats:
    """Put all *lines* into statistics by tenant and route; memory does not grow with the log."""
    stats = LogStats()
    books: dict[str, dict[str, _Book]] = {}
    for text in lines:
        if not text.strip():
            continue
        line = reader(text.rstrip("\r\n"))
        if line is None:
            stats.odd += 1
            continue
        stats.lines += 1
        if line.ended is not None:
            stats.first = line.ended if stats.first is None else min(stats.first, line.ended)
            stats.last = line.ended if stats.last is None else max(stats.last, line.ended)
        table = books.setdefault(line.tenant, {})
        key = f"{line.method} {_route(line)}"
        if key not in table and len(table) >= MAX_ROUTES:
            key = OTHER
        table.setdefault(key, _Book()).add(line)
    stats.routes = {tenant: {key: book.stats() for key, book in table.items()} for tenant, table in books.items()}
    return stats


def _route(line: Line) -> str:
    if line.status == 404:
        return NOT_FOUND
    return normalise_path(unquote_to_bytes(line.path).decode("utf-8", "replace") or "/")


class _Book:
    __slots__ = ("buckets", "errors", "latency_sum_s", "longest_s", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.latency_sum_s = 0.0
        self.longest_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)

    def add(self, line: Line) -> None:
        self.requests += 1
        self.errors += line.status >= 500
        self.latency_sum_s += line.duration_s
        self.longest_s = max(self.longest_s, line.duration_s)
        self.buckets[bisect_left(BUCKETS_S, line.duration_s)] += 1

    def stats(self) -> RouteStats:
        return RouteStats(
            requests=self.requests,
            errors=self.errors,
            latency_sum_s=self.latency_sum_s,
            longest_s=self.longest_s,
            buckets=tuple(self.buckets),
        )


def lines_of(files: Iterable[str]) -> Iterator[str]:
    """
    The lines of *files*, one after the other.

    Raises:
        ConfigError: a file cannot be read.
    """
    for name in files:
        try:
            with Path(name).open(encoding="utf-8", errors="replace") as file:
                yield from file
        except OSError as error:
            raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
