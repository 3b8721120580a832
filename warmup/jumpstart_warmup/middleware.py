"""
Middleware that opens and closes an entry of the books (`observe.py`) for each request.

It changes nothing that passes through, and never buffers. The engines keep the books themselves; this is for requests
that the process makes itself.

Whom to believe. A request is *warm-up* (`jumpstart.is_warmup()` is true, its statistics are kept apart) when this
process made it itself (scope or environ key ``jumpstart.warmup``, which no client can set), or when it carries the
marker header and *trust_warmup_header* is on: apps may skip billing and mails in warm-up, so an outsider must not be
able to ask for it. With the marker header alone, from anyone, a request is merely no *evidence*: it is counted like any
other, so that nobody hides from the statistics, but it does not enter the corpus. All that a stranger gains is that his
own request is not replayed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any
from urllib.parse import quote

from jumpstart.context import RequestContext, current, request_context
from jumpstart_warmup.corpus import MARKER_HEADER
from jumpstart_warmup.observe import CLIENT_CLOSED, Observer
from jumpstart_warmup.routes import NOT_FOUND, Environ, Scope, normalise_path, route_of_scope, werkzeug_rule

Clock = Callable[[], float]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
StartResponse = Callable[..., Callable[[bytes], object]]
WSGIApp = Callable[[Environ, StartResponse], Iterable[bytes]]


WARMUP_KEY = "jumpstart.warmup"
"""Scope or environ key, True inside warm-up and shadow requests that this process makes."""

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
