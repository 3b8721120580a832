"""
WSGI on the ASGI server: the whole body is spooled, then the handler runs on a thread of the pool.

A room of its own with one door, `WSGIAdapter`: an engine that talks to sockets itself can replace it without its
neighbours noticing. Chunks travel to the event loop with a bounded number in flight, so that a slow reader blocks its
own thread and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, MutableMapping
from types import TracebackType
from typing import IO, Any
from urllib.parse import unquote_to_bytes
from wsgiref.util import FileWrapper

from jumpstart_server.pool import ThreadPool

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]
Environ = dict[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]

SPOOL_BYTES = 512 * 1024  # of a body in memory; the rest goes to a temporary file
CHUNKS_IN_FLIGHT = 4  # between a handler's thread and the event loop


class ClientGoneError(ConnectionError):
    """Raised in a handler's thread where it produces output for a client that has left."""


class WSGIAdapter:
    """An ASGI 3 app that serves a WSGI app from a thread pool."""

    def __init__(self, app: Callable[..., Iterable[bytes]], pool: ThreadPool, *, multiprocess: bool) -> None:
        self.app = app
        self.pool = pool
        self.multiprocess = multiprocess

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a WSGI app cannot serve {scope['type']}")
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as body:
            length = await _spool(receive, body)
            if length is None:
                return  # the client left before it had sent the request
            environ = build_environ(scope, body, length, multiprocess=self.multiprocess)
            exchange = _Exchange(self.app, environ, asyncio.get_running_loop())
            self.pool.submit(exchange.run_in_context(contextvars.copy_context()))
            watcher = asyncio.ensure_future(_until_disconnect(receive, exchange))
            try:
                await exchange.pass_on(send)
            finally:
                watcher.cancel()
                exchange.client_gone()
                try:
                    await exchange.finished.wait()  # the body's file is the thread's until then
                except asyncio.CancelledError:
                    pass  # the worker ends, and does not wait for a handler that does not


async def _spool(receive: Receive, body: IO[bytes]) -> int | None:
    """Copy the request body into *body* and rewind it; return its length, or None when the client left."""
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        body.write(chunk)
        length += len(chunk)
        if not message.get("more_body", False):
            body.seek(0)
            return length


async def _until_disconnect(receive: Receive, exchange: _Exchange) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.client_gone()


def build_environ(scope: Scope, body: IO[bytes], length: int, *, multiprocess: bool) -> Environ:
    """Build the environment of PEP 3333 from an ASGI HTTP scope; path bytes pass undamaged as latin-1."""
    root_path: str = scope.get("root_path", "")
    path = unquote_to_bytes(scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    script_name = root_path.encode().decode("latin-1")
    path = path.removeprefix(script_name) if script_name else path
    query = scope["query_string"].decode("latin-1")
    target = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1") + (f"?{query}" if query else "")
    server = scope.get("server") or ("localhost", None)
    client = scope.get("client") or ("", "")  # over a Unix socket there is none, and apps index it all the same
    environ: Environ = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": script_name,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "REQUEST_URI": target,
        "RAW_URI": target,
        "SERVER_NAME": str(server[0]),
        "SERVER_PORT": str(server[1] if server[1] is not None else 80),
        "REMOTE_ADDR": str(client[0]),
        "REMOTE_PORT": str(client[1]),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope.get("scheme", "http"),
        "wsgi.input": body,
        "wsgi.input_terminated": True,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": multiprocess,
        "wsgi.run_once": False,
        "wsgi.file_wrapper": FileWrapper,
    }
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if "_" in name or name in ("transfer-encoding", "content-length"):
            continue  # x_y would pass itself off as x-y; the spooled body has a length of its own
        key = "CONTENT_TYPE" if name == "content-type" else "HTTP_" + name.upper().replace("-", "_")
        if key in environ:
            value = environ[key] + ("; " if name == "cookie" else ",") + value
        environ[key] = value
    if length or any(name == b"content-length" for name, _ in scope["headers"]):
        environ["CONTENT_LENGTH"] = str(length)
    return environ


class _Exchange:
    """One request: a handler's thread on one side, the event loop on the other."""

    def __init__(self, app: Callable[..., Iterable[bytes]], environ: Environ, loop: asyncio.AbstractEventLoop) -> None:
        self.finished = asyncio.Event()
        self._app = app
        self._environ = environ
        self._loop = loop
        self._outbox: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()
        self._credits = threading.Semaphore(CHUNKS_IN_FLIGHT)
        self._gone = False
        self._head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._head_sent = False

    # The event loop's side

    def client_gone(self) -> None:
        """Let the handler's thread find out at its next chunk."""
        self._gone = True
        self._credits.release()

    async def pass_on(self, send: Send) -> None:
        """Send what the thread produces; re-raise its error, which makes the server cut the connection."""
        while (item := await self._outbox.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            await send(item)
            self._credits.release()

    # The thread's side

    def run_in_context(self, context: contextvars.Context) -> Callable[[], None]:
        return lambda: context.run(self._run)

    def _run(self) -> None:
        try:
            self._handle()
            self._post(None)
        except ClientGoneError:
            self._post(None)
        except BaseException as error:
            logger.exception("%s %s: the app raised", self._environ["REQUEST_METHOD"], self._environ["RAW_URI"])
            if self._head_sent:
                self._post(_HandlerFailedError("the app raised after the response had begun"))
            else:
                self._post_failure()
            if not isinstance(error, Exception):
                logger.warning("%s in a handler ends the request, not the server", type(error).__name__)
        finally:
            self._call_loop(self.finished.set)

    def _handle(self) -> None:
        iterable = self._app(self._environ, self._start_response)
        try:
            single = isinstance(iterable, (list, tuple)) and len(iterable) == 1
            for chunk in iterable:
                if not isinstance(chunk, bytes):
                    raise TypeError(f"the app yielded {type(chunk).__name__}, WSGI asks for bytes")
                if chunk:
                    self._write(chunk, length=len(chunk) if single else None)
                elif self._gone:
                    raise ClientGoneError
            if not self._head_sent:
                # Apps may answer HEAD without the body that GET has, and without its length.
                self._send_head(length=None if self._environ["REQUEST_METHOD"] == "HEAD" else 0)
            self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(iterable, "close", None)
            if close is not None:
                close()

    def _start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], None]:
        if exc_info is not None:
            try:
                if self._head_sent and exc_info[1] is not None:
                    raise exc_info[1].with_traceback(exc_info[2])
            finally:
                exc_info = None  # no cycle through the frame
        elif self._head is not None:
            raise RuntimeError("start_response was called twice without exc_info")
        code = status.split(" ", 1)[0]
        if not (code.isascii() and code.isdecimal() and len(code) == 3 and "100" <= code <= "599"):
            raise ValueError(f"status {status!r}: write three digits, 100 to 599, and a reason")
        encoded = []
        for name, value in headers:
            if any(character in name + value for character in "\r\n\0"):
                raise ValueError(f"header {name!r}: holds a line break or NUL")
            encoded.append((name.lower().encode("latin-1"), value.encode("latin-1")))
        self._head = (int(code), encoded)
        return self._write

    def _write(self, chunk: bytes, length: int | None = None) -> None:
        if not self._head_sent:
            self._send_head(length)
        self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _send_head(self, length: int | None) -> None:
        if self._head is None:
            raise RuntimeError("the app produced a body before it called start_response")
        status, headers = self._head
        bodiless = status < 200 or status in (204, 304)
        if length is not None and not bodiless and all(name != b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", str(length).encode())]
        self._head_sent = True
        self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _send(self, message: dict[str, Any]) -> None:
        self._credits.acquire()
        if self._gone:
            self._credits.release()
            raise ClientGoneError("the client has left")
        self._post(message)

    def _post_failure(self) -> None:
        body = b"Internal Server Error"
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        self._post({"type": "http.response.start", "status": 500, "headers": headers})
        self._post({"type": "http.response.body", "body": body, "more_body": False})
        self._post(None)

    def _post(self, item: dict[str, Any] | BaseException | None) -> None:
        self._call_loop(self._outbox.put_nowait, item)

    def _call_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop was closed: the process is ending and nobody waits


class _HandlerFailedError(Exception):
    """The response was begun and cannot be completed; the server cuts the connection so that the client can tell."""
