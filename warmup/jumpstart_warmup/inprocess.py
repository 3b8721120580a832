"""
Warm an app up by calling it in this process; the responses are discarded.

What this module promises: it comes to an end. Each request has a timeout, the whole has a budget, streams are left
after a number of chunks or a second, and whatever the app raises is counted and reported, never raised again. (WSGI is
the exception that a thread imposes: nobody can take a thread away from a handler that blocks. `WSGIWarmup` looks at its
budget between requests and between chunks; its caller runs it in a thread, and leaves that when the time is over.)

A handler sees its time as in a real request: `jumpstart.deadline` is what is left of the budget and of its timeout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import msgspec

from jumpstart.context import LINGER_S, RequestContext, request_context
from jumpstart.imports import import_events
from jumpstart_warmup.corpus import MARKER_HEADER, WarmRequest, encodable
from jumpstart_warmup.middleware import WARMUP_KEY, ASGIApp, Clock, WSGIApp
from jumpstart_warmup.routes import Environ, Scope

if TYPE_CHECKING:
    from jumpstart.guard import EffectGuard, Guard

log = logging.getLogger(__name__)

MAX_FAILURES = 20  # reported in full; all are counted
TIMEOUT_S = 10.0  # seconds for one request
STREAM_CHUNKS = 100  # a stream that has sent that much has run its code
STREAM_LIMIT_S = 1.0  # seconds from the start of a response to leaving it
GRACE_S = 0.5  # seconds that an app gets to notice that its client has left


class Failure(msgspec.Struct, frozen=True):
    """A request that did not go as it should. *status* is None when there was none."""

    method: str
    path: str
    status: int | None
    error: str


class Outcome(msgspec.Struct, frozen=True):
    """
    What became of one request.

    Attributes:
        status: None when no response was started.
        error: None when all went well.
        elapsed_s: seconds until the app was done with it.
        cold_events: how many there were in it.
        is_late: the app was not done with it when its time was over.
        events: kind and name of each cold event.
        thread_cpu_s: as in `RequestContext`.
    """

    request: WarmRequest
    status: int | None
    error: str | None
    elapsed_s: float
    cold_events: int
    is_late: bool = False
    events: tuple[tuple[str, str], ...] = ()
    thread_cpu_s: float = 0.0


class WarmupResult(msgspec.Struct):
    """
    What a warm-up came to.

    Attributes:
        requests: sent, that is, `ok` + `failures`.
        failed: the first 20 failures.
        skipped: requests that the budget left no time for.
        statuses: status → how many, so that a warm-up that met nothing but 400s shows.
        cold_events: how many there were in all requests together.
    """

    requests: int = 0
    ok: int = 0
    failures: int = 0
    failed: list[Failure] = []
    skipped: int = 0
    elapsed_s: float = 0.0
    cold_events: int = 0
    statuses: dict[int, int] = {}

    def add(self, outcome: Outcome, *, logs: bool = True) -> None:
        """Count one request, and log it if it failed and *logs*."""
        self.requests += 1
        self.cold_events += outcome.cold_events
        if outcome.status is not None:
            self.statuses[outcome.status] = self.statuses.get(outcome.status, 0) + 1
        if outcome.error is None:
            self.ok += 1
            return
        self.failures += 1
        request = outcome.request
        if len(self.failed) < MAX_FAILURES:
            log.log(
                logging.WARNING if logs else logging.DEBUG,
                "warm-up: %s %s: %s",
                request.method,
                request.path,
                outcome.error,
            )
            self.failed.append(Failure(request.method, request.path, outcome.status, outcome.error))


OnResult = Callable[[Outcome], None]
GuardOf = Callable[[WarmRequest], "Guard | None"]
"""Makes the guard of a request, or says that it has none."""


def guard_of(guard: EffectGuard) -> GuardOf:
    """Each request has a guard, and is called ``GET /checkout`` in its errors and in the report."""
    return lambda request: guard.of(f"{request.method} {_split(request)[0]}")


def _sends(requests: Iterable[WarmRequest]) -> list[WarmRequest]:
    return [request for request in requests for _ in range(request.repeat)]


def _tell(on_result: OnResult | None, outcome: Outcome) -> OnResult | None:
    """Tell the listener, and return it as long as it may be told more: one that raises is told nothing again."""
    if on_result is not None:
        try:
            on_result(outcome)
        except Exception:
            log.exception("warm-up: the listener raised and is switched off")
            return None
    return on_result


def _describe(error: BaseException) -> str:
    """Say what the app raised; whatever its text is, and even when it cannot make one."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text cannot be had: {type(second).__name__})"
    text = encodable(f"{name}: {text}" if text else name)
    return text if len(text) <= 300 else text[:299] + "…"


def _context(
    request: WarmRequest, seconds: float, guard: GuardOf | None, has_left: Callable[[], bool] | None = None
) -> RequestContext:
    """Of a request that has *seconds*; nothing extends a deadline here, since a boot waits."""
    expires = time.monotonic() + seconds
    kept = None if guard is None else guard(request)
    return RequestContext(warmup=True, expires=expires, latest=expires, has_left=has_left, guard=kept)


def _cold_events(context: RequestContext) -> tuple[tuple[str, str], ...]:
    imports = import_events(context) if context.imports else ()
    return (*context.events, *(("import", name) for name in imports))


def _host_header(request: WarmRequest, server: tuple[str, int]) -> str:
    for name, value in request.headers:
        if name.lower() == "host":
            return value
    host, port = server
    shown = f"[{host}]" if ":" in host else host
    return shown if port in (0, 80, 443) else f"{shown}:{port}"


def _split(request: WarmRequest) -> tuple[str, str]:
    raw_path, _, query = request.path.partition("?")
    return raw_path, query


# --- ASGI -----------------------------------------------------------------------------------------------------------


async def warm_asgi(
    app: ASGIApp,
    requests: Iterable[WarmRequest],
    *,
    state: Mapping[str, Any] | None = None,
    budget_s: float,
    clock: Clock = time.monotonic,
    timeout_s: float = TIMEOUT_S,
    client: tuple[str, int] = ("127.0.0.1", 0),
    server: tuple[str, int] = ("127.0.0.1", 80),
    scheme: str = "http",
    root_path: str = "",
    stream_limit_s: float = STREAM_LIMIT_S,
    stream_chunks: int = STREAM_CHUNKS,
    grace_s: float = GRACE_S,
    on_result: OnResult | None = None,
    guard: GuardOf | None = None,
    logs: bool = True,
) -> WarmupResult:
    """
    Send *requests* to an ASGI app, one after the other, in the running asyncio loop.

    Each runs in a task of its own with a warm-up `RequestContext`; the scope says ``"jumpstart.warmup": True``.

    Args:
        state: the lifespan state; each request gets a shallow copy, as from a server.
        budget_s: seconds for all; the request that runs when they end is stopped, the rest is skipped.
        clock: seconds; decides about the budget. Waiting itself is the event loop's.
        timeout_s: seconds for each request, work after the response included.
        server: host and port for the scope, and for the Host header of requests that bring none.
        stream_limit_s: seconds from the start of a response to a disconnect; what was streamed until then counts.
        stream_chunks: chunks after which a response is left.
        grace_s: seconds from a disconnect to cancelling the app, and from that to leaving the task alone.
        guard: refuses effects of the requests; None allows them.
        logs: false where a request that fails is worth no line.

    Raises:
        asyncio.CancelledError: the caller was cancelled; the app's task is cancelled too. Nothing else.
    """
    started = clock()
    result = WarmupResult()
    sends = _sends(requests)
    for number, request in enumerate(sends):
        left_s = budget_s - (clock() - started)
        if left_s <= 0:
            result.skipped = len(sends) - number
            break
        scope = _scope(request, dict(state or {}), client, server, scheme, root_path)
        call = _Call(request, stream_limit_s, stream_chunks, grace_s, guard)
        begun = clock()
        error = await call.run(app, scope, timeout_s, left_s)
        events = _cold_events(call.context)
        took_s, cpu_s = clock() - begun, call.context.thread_cpu_s
        outcome = Outcome(request, call.status, error, took_s, len(events), call.is_late, events, cpu_s)
        result.add(outcome, logs=logs)
        on_result = _tell(on_result, outcome)
    result.elapsed_s = clock() - started
    return result


def _scope(
    request: WarmRequest,
    state: dict[str, Any],
    client: tuple[str, int],
    server: tuple[str, int],
    scheme: str,
    root_path: str,
) -> Scope:
    raw_path, query = _split(request)
    headers = [(b"host", _host_header(request, server).encode("latin-1"))]
    headers += [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in request.headers
        if name.lower() != "host"
    ]
    if request.body:
        headers.append((b"content-length", str(len(request.body)).encode()))
    headers.append((MARKER_HEADER.encode(), b"1"))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": scheme,
        # As uvicorn has it, which ASGI asks for: the path includes the root path.
        "path": root_path + unquote_to_bytes(raw_path).decode("utf-8", "replace"),
        "raw_path": (root_path + raw_path).encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": root_path,
        "headers": headers,
        "client": client,
        "server": server,
        "state": state,
        "extensions": {},
        WARMUP_KEY: True,
    }


class _Call:
    """One request to an ASGI app."""

    def __init__(
        self,
        request: WarmRequest,
        stream_limit_s: float,
        stream_chunks: int,
        grace_s: float,
        guard: GuardOf | None,
    ) -> None:
        self.context = _context(request, math.inf, guard, lambda: self._left.is_set() and not self._complete)
        self.status: int | None = None
        self.is_late = False
        self._request = request
        self._stream_limit_s = stream_limit_s
        self._stream_chunks = stream_chunks
        self._grace_s = grace_s
        self._body_given = False
        self._chunks = 0
        self._complete = False
        self._left = asyncio.Event()  # the client is gone: the response is complete, or nobody wants more of it
        self._wake = asyncio.Event()  # the client is gone, or the app has returned
        self._error: BaseException | None = None
        self._limit: asyncio.TimerHandle | None = None

    async def run(self, app: ASGIApp, scope: Scope, timeout_s: float, left_s: float) -> str | None:
        """Return what went wrong, or None."""
        self.context.expires = self.context.latest = time.monotonic() + min(timeout_s, left_s)
        task = asyncio.create_task(self._guarded(app, scope))
        try:
            timed_out = await self._wait(task, min(timeout_s, left_s))
        finally:
            if self._limit is not None:
                self._limit.cancel()
            if not task.done():
                task.cancel()
        if timed_out and not self._complete:
            self.is_late = True
            limit = f"the budget's last {left_s:.3g} s" if left_s < timeout_s else f"{timeout_s:g} s"
            return f"{'no response' if self.status is None else 'no complete response'} within {limit}"
        return self._verdict()

    async def _wait(self, task: asyncio.Task[None], timeout_s: float) -> bool:
        """Wait until the app is done with the request; return whether that took longer than *timeout_s* seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        task.add_done_callback(lambda _: self._wake.set())
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # seen below: nobody has left
        if task.done():
            return False
        if self._complete:
            # Work after the response belongs to the request; half of it would be worse than none.
            await asyncio.wait({task}, timeout=max(deadline - loop.time(), 0))
        timed_out = not self._left.is_set()
        self._left.set()
        for _ in range(2):
            await asyncio.wait({task}, timeout=self._grace_s)
            if task.done():
                return timed_out
            task.cancel()
        await asyncio.wait({task}, timeout=self._grace_s)
        if not task.done():
            _strays.add(task)
            task.add_done_callback(_strays.discard)
            log.warning("warm-up: %s %s ignores its cancellation and runs on", self._request.method, self._request.path)
        return timed_out

    async def _guarded(self, app: ASGIApp, scope: Scope) -> None:
        with request_context(self.context):
            try:
                await app(scope, self._receive, self._send)
            except asyncio.CancelledError as error:
                self._error = error
                raise
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: an app must not end the boot by answering a request
                self._error = error
                log.debug("warm-up: %s %s raised", self._request.method, self._request.path, exc_info=True)
            finally:
                self.context.lapses = time.monotonic() + LINGER_S

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._body_given:
            self._body_given = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        kind = message["type"]
        if self._left.is_set() and not self._complete:
            await asyncio.sleep(0)  # lets the cancellation reach an app that ignores the next line
            raise ConnectionResetError("the warm-up has left this response")
        if kind == "http.response.start":
            if self.status is not None:
                raise RuntimeError("http.response.start was sent twice")
            self.status = int(message["status"])
            self._limit = asyncio.get_running_loop().call_later(self._stream_limit_s, self._leave)
        elif kind == "http.response.body":
            if self.status is None:
                raise RuntimeError("http.response.body was sent before http.response.start")
            self._chunks += 1
            if not message.get("more_body", False):
                self._complete = True
                self._leave()
            elif self._chunks >= self._stream_chunks:
                self._leave()
            await asyncio.sleep(0)  # as a socket would now and then; else an endless stream stops the loop

    def _leave(self) -> None:
        self._left.set()
        self._wake.set()

    def _verdict(self) -> str | None:
        left_early = self._left.is_set() and not self._complete
        if self._error is not None and not left_early and not isinstance(self._error, asyncio.CancelledError):
            return _describe(self._error)
        if self.status is None:
            return "was cancelled by the app" if self._error is not None else "the app returned without a response"
        if not self._request.is_success(self.status):
            return self._request.complaint(self.status)
        if not self._complete and not left_early:
            return "the app returned before its response was complete"
        return None


_strays: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only


# --- WSGI -----------------------------------------------------------------------------------------------------------


class WSGIWarmup:
    """
    Sends requests to a WSGI app, one after the other, in the thread that calls `run`.

    A handler that blocks cannot be stopped from here: budget and limits are looked at between requests and chunks. So
    another thread may `leave`: it takes what there is, and what still runs is counted as late.
    """

    def __init__(
        self,
        app: WSGIApp,
        requests: Iterable[WarmRequest],
        *,
        budget_s: float,
        clock: Clock = time.monotonic,
        timeout_s: float = TIMEOUT_S,
        client: tuple[str, int] = ("127.0.0.1", 0),
        server: tuple[str, int] = ("127.0.0.1", 80),
        scheme: str = "http",
        root_path: str = "",
        multiprocess: bool = True,
        stream_limit_s: float = STREAM_LIMIT_S,
        stream_chunks: int = STREAM_CHUNKS,
        on_result: OnResult | None = None,
        guard: GuardOf | None = None,
        logs: bool = True,
    ) -> None:
        """
        The environ says ``"jumpstart.warmup": True``. Arguments as for `warm_asgi`; *root_path* is the SCRIPT_NAME.

        Args:
            timeout_s: what each handler is told that it has, at most; nothing enforces it.
            on_result: called in the thread of `run`, or in that of `leave`; never after `leave`.
        """
        self._app = app
        self._sends = _sends(requests)
        self._budget_s = budget_s
        self._clock = clock
        self._timeout_s = timeout_s
        self._client, self._server, self._scheme, self._root_path = client, server, scheme, root_path
        self._multiprocess = multiprocess
        self._stream_limit_s, self._stream_chunks = stream_limit_s, stream_chunks
        self._on_result = on_result
        self._guard = guard
        self._logs = logs
        self._lock = threading.Lock()  # held for what both threads change, never while the app runs
        self._result = WarmupResult()
        self._started = clock()
        self._running: tuple[WarmRequest, RequestContext, float] | None = None
        self._is_over = False

    def run(self) -> WarmupResult:
        """
        Send all, as far as the budget goes.

        Raises:
            KeyboardInterrupt: and nothing else.
        """
        self._started = self._clock()
        deadline = self._started + self._budget_s
        for request in self._sends:
            begun = self._clock()
            with self._lock:
                if self._is_over or begun >= deadline:
                    break
                context = _context(request, min(deadline - begun, self._timeout_s), self._guard)
                self._running = request, context, begun
            environ = _environ(request, self._client, self._server, self._scheme, self._root_path, self._multiprocess)
            with request_context(context):
                status, error = _call_wsgi(
                    self._app, request, environ, self._clock, deadline, self._stream_limit_s, self._stream_chunks
                )
            context.lapses = time.monotonic() + LINGER_S
            with self._lock:
                if self._is_over:
                    break
                self._running = None
                events = _cold_events(context)
                self._count(Outcome(request, status, error, self._clock() - begun, len(events), events=events))
        with self._lock:
            return self._end()

    def leave(self) -> WarmupResult:
        """Return what there is by now; from any thread. A `run` that goes on changes nothing any more."""
        with self._lock:
            if self._running is not None and not self._is_over:
                request, context, begun = self._running
                context.is_stopped = True
                elapsed = self._clock() - begun
                error = f"its handler did not return within {elapsed:.3g} s; going on without it"
                events = _cold_events(context)
                self._count(Outcome(request, None, error, elapsed, len(events), is_late=True, events=events))
            return self._end()

    def _count(self, outcome: Outcome) -> None:
        self._result.add(outcome, logs=self._logs)
        self._on_result = _tell(self._on_result, outcome)

    def _end(self) -> WarmupResult:
        if not self._is_over:
            self._is_over = True
            self._result.skipped = len(self._sends) - self._result.requests
            self._result.elapsed_s = self._clock() - self._started
        return self._result


def _environ(
    request: WarmRequest,
    client: tuple[str, int],
    server: tuple[str, int],
    scheme: str,
    root_path: str,
    multiprocess: bool,
) -> Environ:
    raw_path, query = _split(request)
    environ: Environ = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": root_path,
        "PATH_INFO": unquote_to_bytes(raw_path).decode("latin-1"),
        "QUERY_STRING": query,
        "RAW_URI": request.path,
        "REQUEST_URI": request.path,
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "SERVER_SOFTWARE": "jumpstart",
        "REMOTE_ADDR": client[0],
        "REMOTE_PORT": str(client[1]),
        "HTTP_HOST": _host_header(request, server),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scheme,
        "wsgi.input": BytesIO(request.body),
        "wsgi.input_terminated": True,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": multiprocess,
        "wsgi.run_once": False,
        WARMUP_KEY: True,
    }
    if request.body:
        environ["CONTENT_LENGTH"] = str(len(request.body))
    for name, value in (*request.headers, (MARKER_HEADER, "1")):
        key = name.upper().replace("-", "_")
        if key == "CONTENT_TYPE":
            environ[key] = value
        elif key != "HOST":
            known = environ.get(f"HTTP_{key}")
            environ[f"HTTP_{key}"] = value if known is None else f"{known},{value}"
    return environ


def _call_wsgi(
    app: WSGIApp,
    request: WarmRequest,
    environ: Environ,
    clock: Clock,
    deadline: float,
    stream_limit_s: float,
    stream_chunks: int,
) -> tuple[int | None, str | None]:
    """Return the status (None when there was none) and what went wrong (None when nothing did)."""
    response = _Response()
    try:
        result = app(environ, response.start)
        try:
            begun = clock()
            for number, chunk in enumerate(result, 1):
                response.take(chunk)
                now = clock()
                if number >= stream_chunks or now - begun >= stream_limit_s or now >= deadline:
                    break
            if response.status is None:
                return None, "the app ended without calling start_response"
        finally:
            close = getattr(result, "close", None)
            if close is not None:
                close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, and what a pool throws into a thread that is late
        log.debug("warm-up: %s %s raised", request.method, request.path, exc_info=True)
        return response.status, _describe(error)
    if not request.is_success(response.status):
        return response.status, request.complaint(response.status)
    return response.status, None


class _Response:
    """A response that nobody reads, with the rules of PEP 3333 for start_response."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._sent = False

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Callable[[bytes], object]:
        if exc_info is not None:
            try:
                if self._sent:
                    raise exc_info[1].with_traceback(exc_info[2])
            finally:
                exc_info = None  # no cycle through the traceback
        elif self.status is not None:
            raise AssertionError("start_response was called twice without exc_info")
        self.status = int(status[:3])
        return self.take

    def take(self, chunk: bytes) -> None:
        if self.status is None:
            raise AssertionError("the app sent a chunk before it called start_response")
        if not isinstance(chunk, bytes):
            raise TypeError(f"the app sent {type(chunk).__name__}, not bytes")
        self._sent = self._sent or bool(chunk)
