"""
The corpus: which requests warm a process up.

They come from a TOML file that the operator wrote (`read_requests`) or from real traffic (`CorpusRecorder`). What comes
from real traffic goes through `scrub` first, which is written to lose too much rather than too little: a request that
is not recorded costs some warmth, a recorded password costs somebody's account. Two rules carry it: headers are kept by
an allow-list, and a request whose target looks as if it held a secret or a person is not recorded at all (taking the
parameter out would leave a request that nobody ever made).
"""

from __future__ import annotations

import re
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from jumpstart.context import MARKER_HEADER as MARKER_HEADER  # part of this module's interface
from jumpstart.errors import ConfigError
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.records import Reason, Record, Tally
from jumpstart_warmup.targets import KEPT_HEADERS, is_fit_header, is_fit_target, is_probe
from jumpstart_warmup.targets import is_opaque as is_opaque  # part of this module's interface

MAX_FILE_TARGET = 8190  # bytes; what servers accept as a request line by default (gunicorn, nginx)
MAX_BODY = 10 * 1024 * 1024  # bytes of one body in a file of warm-up requests
MAX_REPEAT = 10_000
MAX_ROUTES = 500
MAX_PER_ROUTE = 5
# To judge a target costs some 0.2 ms, many times a small request. Where nearly each is new (searches, articles by
# number), a sample tells as well which of them are hot: those come again.
JUDGED_A_SECOND = 50
JUDGED_AT_ONCE = 1000
MAX_ROUTE_NAME = 512

Headers = Iterable[tuple[str | bytes, str | bytes]]


def encodable(text: str) -> str:
    r"""*text* with lone surrogates as ``\udcff``: what an app raises goes into logs, reports and messages."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class WarmRequest(msgspec.Struct, frozen=True):
    """
    One request to replay.

    Attributes:
        path: the request target in origin form: path, percent-encoded, with its query.
        headers: pairs of name and value; the driver adds host, content-length and the marker.
        repeat: how many times it is sent in one pass.
        expect_status: the only status that counts as success; None takes everything below 500.
        weight: how often real traffic asked for it.
    """

    method: str = "GET"
    path: str = "/"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    repeat: int = 1
    expect_status: int | None = None
    weight: int = 1

    @property
    def name(self) -> str:
        """For people: ``GET /cart``."""
        return f"{self.method} {self.path}"

    def is_success(self, status: int) -> bool:
        """Whether *status* is what this request should be answered with."""
        return status == self.expect_status if self.expect_status is not None else status < 500

    def complaint(self, status: int) -> str:
        """Say what is wrong with *status*, which is no success."""
        return f"answered {status}, expected {self.expect_status or 'less than 500'}"


# --- a file of warm-up requests -------------------------------------------------------------------------------------

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_KEYS = ("path", "method", "headers", "body", "json", "repeat", "expect_status")
_DRIVER_HEADERS = frozenset({"content-length", "transfer-encoding", "connection", MARKER_HEADER})


def read_requests(path: Path) -> list[WarmRequest]:
    """
    Read a TOML file of ``[[request]]`` tables.

    Characters that may not stand in a URL (spaces, letters beyond ASCII) are percent-encoded; methods become upper
    case.

    Raises:
        ConfigError: it names the file, the number of the request (from 1), the key, and what is allowed.
    """
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text, which TOML has to be") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    for key in document:
        if key != "request":
            raise ConfigError(f"{path}: unknown key {key!r}; allowed are [[request]] tables only")
    tables = document.get("request")
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{path}: holds no request; write at least one [[request]] table")
    return [_request_of_table(table, f"{path}: request {number}") for number, table in enumerate(tables, 1)]


def _request_of_table(table: Any, where: str) -> WarmRequest:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: is not a table; write [[request]]")
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}; allowed are {', '.join(_KEYS)}")
    headers = _headers_of_table(table.get("headers", {}), where)
    body = b""
    if "body" in table and "json" in table:
        raise ConfigError(f"{where}: has both body and json; give one of them")
    if "body" in table:
        if not isinstance(table["body"], str):
            raise ConfigError(f"{where}: body must be a string")
        body = table["body"].encode()
    elif "json" in table:
        body = msgspec.json.encode(table["json"])
        if not any(name.lower() == "content-type" for name, _ in headers):
            headers = (*headers, ("content-type", "application/json"))
    if len(body) > MAX_BODY:
        raise ConfigError(f"{where}: the body has {len(body)} bytes; allowed are {MAX_BODY}")
    return WarmRequest(
        method=_method_of_table(table.get("method", "GET"), where),
        path=_path_of_table(table, where),
        headers=headers,
        body=body,
        repeat=_whole_number(table.get("repeat", 1), 1, MAX_REPEAT, f"{where}: repeat"),
        expect_status=(
            _whole_number(table["expect_status"], 100, 599, f"{where}: expect_status")
            if "expect_status" in table
            else None
        ),
    )


def _path_of_table(table: dict[str, Any], where: str) -> str:
    path = table.get("path")
    if path is None:
        raise ConfigError(f"{where}: path is missing")
    if not isinstance(path, str) or not path.startswith("/"):
        raise ConfigError(f"{where}: path must be a string that starts with '/', got {path!r}")
    if _CONTROL.search(path):
        raise ConfigError(f"{where}: path must not hold control characters, got {path!r}")
    if "#" in path:
        raise ConfigError(f"{where}: path must not hold a fragment ('#'; write %23), got {path!r}")
    target = quote(path, safe="/?&=:@!$'()*+,;~%-._[]")
    if len(target) > MAX_FILE_TARGET:
        raise ConfigError(f"{where}: path has {len(target)} bytes; allowed are {MAX_FILE_TARGET}")
    return target


def _method_of_table(method: Any, where: str) -> str:
    if not isinstance(method, str) or not _TOKEN.fullmatch(method) or method.upper() == "CONNECT":
        raise ConfigError(f"{where}: method must be an HTTP method such as GET or POST (not CONNECT), got {method!r}")
    return method.upper()


def _headers_of_table(table: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: headers must be a table of strings")
    for name, value in table.items():
        if not _TOKEN.fullmatch(name):
            raise ConfigError(f"{where}: headers: {name!r} is not a header name (letters, digits and hyphens)")
        if name.lower() in _DRIVER_HEADERS:
            raise ConfigError(f"{where}: headers: {name!r} is set by Jumpstart; leave it out")
        if not isinstance(value, str):
            raise ConfigError(f"{where}: headers: {name!r} must be a string, got {value!r}")
        if _CONTROL.search(value) or not value.isascii():
            raise ConfigError(f"{where}: headers: {name!r} must be ASCII without control characters, got {value!r}")
    return tuple((name, value.strip()) for name, value in table.items())


def _whole_number(value: Any, low: int, high: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{where} must be a whole number from {low} to {high}, got {value!r}")
    return value


# --- scrubbing of real requests -------------------------------------------------------------------------------------


def scrub(method: str, target: str, headers: Headers, *, hosts: Collection[str] = ()) -> WarmRequest | None:
    """
    Return what may be kept of a real request, or None when it is not fit to be recorded. Pure; never raises.

    Fit are GET and HEAD whose target is visible ASCII of at most 2 KiB and looks as if it named no secret and no person
    and ordered nothing (`jumpstart_warmup.targets` decides). Ordinary identifiers (``/product/42``, UUIDs with their
    hyphens) and search terms stay, since without them there is nothing to replay.

    Of the headers, content negotiation stays in its known shapes, the first of each name. ``Host`` stays only when it
    is one of *hosts*, names that the operator listed: a client chooses it freely, and where customers have subdomains
    it names one. A replay without it is sent to the host name that the driver was given, which is what an app with a
    single name expects; apps that choose by virtual host need the list.

    The health checks of load balancers are not fit: they tell nothing of what is hot.
    """
    if method not in ("GET", "HEAD") or not is_fit_target(target):
        return None
    kept: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = (raw_name.decode("latin-1") if isinstance(raw_name, bytes) else raw_name).lower()
        if name in kept or not (name in KEPT_HEADERS or name == "user-agent" or (name == "host" and hosts)):
            continue
        value = (raw_value.decode("latin-1") if isinstance(raw_value, bytes) else raw_value).strip()
        if name == "user-agent":
            if is_probe(value):
                return None
            continue
        if value.lower() not in hosts if name == "host" else not is_fit_header(name, value):
            continue
        kept[name] = value
    return WarmRequest(method=method, path=target, headers=tuple(sorted(kept.items())))


# --- the recorder ---------------------------------------------------------------------------------------------------


class _Counter:
    """
    A count by Space-Saving (Metwally et al. 2005): a newcomer to a full table takes over the lightest one's count as
    its possible error. *count* never undercounts; *sure*, without the error, never overcounts.
    """

    __slots__ = ("count", "error")

    def __init__(self, inherited: int = 0) -> None:
        self.count = inherited
        self.error = inherited

    @property
    def sure(self) -> int:
        return self.count - self.error


class _Seen(_Counter):
    __slots__ = ("request",)

    def __init__(self, request: WarmRequest, inherited: int) -> None:
        super().__init__(inherited)
        self.request = request


class _Route(_Counter):
    __slots__ = ("seen",)

    def __init__(self, inherited: int) -> None:
        super().__init__(inherited)
        self.seen: dict[str, _Seen] = {}


class _Restored(msgspec.Struct, frozen=True):
    record: Record
    route: str
    request: WarmRequest


class CorpusRecorder(Recorder):
    """
    Counts which scrubbed requests real traffic makes, and brings them back as the requests of the next warm-up.

    At most 500 routes and 5 distinct requests (method and target) of each; the lightest make room. All methods may be
    called from any thread. A request's headers are those of the first one seen.

    Weights: `capture` is cumulative for this process and returns **only what this process counted itself**. Restored
    requests come back too, at weight 0 when they were not seen again, so that nothing is lost where the base is not at
    hand; in ``merge(base at boot, latest capture of each worker)`` they add nothing, and no restart doubles a weight.
    """

    name: ClassVar[str] = "corpus"
    counts: ClassVar[bool] = True

    def __init__(
        self, settings: WarmSettings, *, hosts: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """*hosts*: the names whose ``Host`` header may be recorded; see `scrub`. *clock*: in seconds."""
        super().__init__(settings)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._lock = threading.Lock()
        self._routes: dict[str, _Route] = {}
        self._restored: dict[str, _Restored] = {}
        self._clock = clock
        self._judgements = float(JUDGED_AT_ONCE)
        self._judged_at = clock()

    def observe_request(self, route: str, method: str, target: str, headers: Headers, number: int = 1) -> None:
        """
        Count *number* real requests under their *route*, unless `scrub` finds them unfit, or too many are new just now.

        The caller has checked that the answer was a 2xx or 3xx and that the request is evidence, that is, neither
        warm-up nor shadow. *headers* are read only when the target is new.
        """
        if method not in ("GET", "HEAD"):
            return
        if not route.isascii():
            route = encodable(route)
        with self._lock:
            known = self._routes.get(route)
            seen = known.seen.get(f"{method} {target}") if known is not None else None
            if known is not None and seen is not None:
                known.count += number
                seen.count += number
                return
        if not self._may_judge():
            return
        request = scrub(method, target, headers, hosts=self._hosts)
        if request is not None:
            self.record(route, request, number)

    def _may_judge(self) -> bool:
        """Take one of the targets that may be judged just now, if there is one left."""
        with self._lock:
            now = self._clock()
            self._judgements = min(JUDGED_AT_ONCE, self._judgements + (now - self._judged_at) * JUDGED_A_SECOND)
            self._judged_at = now
            if self._judgements < 1:
                return False
            self._judgements -= 1
            return True

    def record(self, route: str, request: WarmRequest, number: int = 1) -> None:
        """Count *number* requests that are scrubbed already."""
        key = f"{request.method} {request.path}"
        with self._lock:
            known = self._routes.get(route)
            if known is None:
                known = self._routes[route] = _Route(_make_room(self._routes, MAX_ROUTES))
            seen = known.seen.get(key)
            if seen is None:
                seen = known.seen[key] = _Seen(request, _make_room(known.seen, MAX_PER_ROUTE))
            known.count += number
            seen.count += number

    def capture(self, purpose: Purpose) -> list[Record]:
        """Return every request known, heaviest first; see the class about weights."""
        records: dict[str, Record] = {}
        with self._lock:
            for route, known in self._routes.items():
                for key, seen in known.seen.items():
                    # Two routes may claim one target after a change of the app; the counts belong together.
                    earlier = records[key].weight if key in records else 0
                    records[key] = _record(key, route, seen.request, earlier + seen.sure)
            for key, restored in self._restored.items():
                if key not in records:
                    records[key] = msgspec.structs.replace(restored.record, weight=0)
        return sorted(records.values(), key=lambda record: (-record.weight, record.key))

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        """Take *records* as the requests to replay. They are scrubbed again: their file need not be signed."""
        per_route: dict[str, int] = {}
        restored: dict[str, _Restored] = {}
        for record in sorted(records, key=lambda record: (-record.weight, record.key)):
            entry = _restored(record, self._hosts)
            if entry is None:
                tally.drop(record, Reason.MALFORMED, "not a scrubbed request")
                continue
            if entry.route not in per_route and len(per_route) >= MAX_ROUTES:
                tally.drop(record, Reason.NOT_APPLICABLE, f"more than {MAX_ROUTES} routes")
                continue
            if per_route.get(entry.route, 0) >= MAX_PER_ROUTE:
                tally.drop(record, Reason.NOT_APPLICABLE, f"more than {MAX_PER_ROUTE} requests of {entry.route}")
                continue
            per_route[entry.route] = per_route.get(entry.route, 0) + 1
            restored[record.key] = entry
            tally.used(record)
        with self._lock:
            self._restored.update(restored)

    def requests_for_warmup(self, limit: int) -> list[WarmRequest]:
        """
        Return at most *limit* requests: the most frequent of each route, then the second of each, and so on.

        Routes come by their traffic; ties by name, so that the order is the same in every process. Restored weights
        and this process's own counts are added.
        """
        weights: dict[tuple[str, str], tuple[int, WarmRequest]] = {}
        with self._lock:
            for key, restored in self._restored.items():
                weights[restored.route, key] = (restored.record.weight, restored.request)
            for route, known in self._routes.items():
                for key, seen in known.seen.items():
                    earlier = weights.get((route, key), (0, None))[0]
                    weights[route, key] = (earlier + seen.sure, seen.request)
        routes: dict[str, list[tuple[int, str, WarmRequest]]] = {}
        for (route, key), (weight, request) in weights.items():
            routes.setdefault(route, []).append((weight, key, msgspec.structs.replace(request, weight=weight)))
        ordered = sorted(routes.items(), key=lambda item: (-sum(weight for weight, _, _ in item[1]), item[0]))
        columns = [sorted(requests, key=lambda entry: (-entry[0], entry[1])) for _, requests in ordered]
        depth = max((len(column) for column in columns), default=0)
        passes = [column[rank][2] for rank in range(depth) for column in columns if rank < len(column)]
        return passes[: max(limit, 0)]


def _make_room(table: dict[str, Any], limit: int) -> int:
    """Take the lightest counter out of a full *table* and return the count that its successor inherits."""
    if len(table) < limit:
        return 0
    lightest = min(table, key=lambda key: table[key].count)
    inherited: int = table.pop(lightest).count
    return inherited


def _record(key: str, route: str, request: WarmRequest, weight: int) -> Record:
    data = {
        "route": route,
        "method": request.method,
        "target": request.path,
        "headers": [list(header) for header in request.headers],
    }
    return Record(key=key, data=data, weight=weight)


def _restored(record: Record, hosts: Collection[str]) -> _Restored | None:
    data = record.data
    route, method, target, headers = (data.get(name) for name in ("route", "method", "target", "headers"))
    if not (isinstance(route, str) and isinstance(method, str) and isinstance(target, str)):
        return None
    if not isinstance(headers, list) or len(route) > MAX_ROUTE_NAME or record.key != f"{method} {target}":
        return None
    pairs: list[tuple[str | bytes, str | bytes]] = []
    for header in headers:
        if not (
            isinstance(header, list | tuple) and len(header) == 2 and all(isinstance(part, str) for part in header)
        ):
            return None
        pairs.append((header[0], header[1]))
    request = scrub(method, target, pairs, hosts=hosts)
    if request is None:
        return None
    kept = msgspec.structs.replace(record, weight=max(record.weight, 0))
    return _Restored(kept, route, request)
