"""
PEP 3333 in the handler's thread: builds the environment, runs the app, and writes the response to the socket itself.

A slow client blocks its own thread and nobody else; nothing is buffered for it beyond the chunk in hand.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import sys
from collections.abc import Callable, Iterable
from io import BytesIO
from types import TracebackType
from typing import Any
from urllib.parse import unquote_to_bytes

from jumpstart_server.http1 import RequestHead, ResponseError, ResponseFramer, error_response
from jumpstart_server.wsgi.connection import Connection
from jumpstart_server.wsgi.engine import WSGIEngine

logger = logging.getLogger(__name__)

Environ = dict[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
WSGIApp = Callable[[Environ, Callable[..., Callable[[bytes], None]]], Iterable[bytes]]

JOIN_BYTES = 64 * 1024  # up to here head and chunk are joined for one send
SENDFILE_BYTES = 1024 * 1024  # of one sendfile call
NAMES = 1024  # header names whose environment key is remembered

_keys: dict[bytes, str] = {b"content-type": "CONTENT_TYPE", b"content-length": "CONTENT_LENGTH"}


class ClientGoneError(ConnectionError):
    """The client has left, or does not take what it is sent; ends the request without a word in the log."""


class FileWrapper:
    """``wsgi.file_wrapper``: an iterable over a file, which the server may send without looking at it."""

    def __init__(self, filelike: Any, block_size: int = 64 * 1024) -> None:
        self.filelike = filelike
        self.block_size = block_size

    def __iter__(self) -> FileWrapper:
        return self

    def __next__(self) -> bytes:
        data: bytes = self.filelike.read(self.block_size)
        if data:
            return data
        raise StopIteration

    def close(self) -> None:
        close = getattr(self.filelike, "close", None)
        if close is not None:
            close()


def base_environ(listener: socket.socket, *, scheme: str, multiprocess: bool, root_path: str) -> Environ:
    """What all environments of a listening socket's connections have in common."""
    name = listener.getsockname()
    host, port = (str(name[0]), str(name[1])) if listener.family != socket.AF_UNIX else ("localhost", "80")
    return {
        "SCRIPT_NAME": root_path,
        "SERVER_NAME": host,
        "SERVER_PORT": port,
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scheme,
        "wsgi.input_terminated": True,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": multiprocess,
        "wsgi.run_once": False,
        "wsgi.file_wrapper": FileWrapper,
    }


def build_environ(connection: Connection, head: RequestHead) -> Environ:
    """Build the environment of one request; path bytes pass undamaged as latin-1."""
    environ = connection.base.copy()
    path = head.path.decode("latin-1")
    if "%" in path:
        path = unquote_to_bytes(head.path).decode("latin-1")
    script_name = environ["SCRIPT_NAME"]
    if script_name and (path == script_name or path.startswith(script_name + "/")):
        path = path[len(script_name) :]
    target = head.target.decode("latin-1")
    environ["REQUEST_METHOD"] = head.method
    environ["PATH_INFO"] = path
    environ["QUERY_STRING"] = head.query.decode("latin-1")
    environ["REQUEST_URI"] = environ["RAW_URI"] = target
    environ["SERVER_PROTOCOL"] = "HTTP/1.1" if head.http_version == "1.1" else "HTTP/1.0"
    peer = connection.peer
    if peer:  # empty for a Unix socket
        environ["REMOTE_ADDR"] = peer[0]
        environ["REMOTE_PORT"] = str(peer[1])
    for name, raw in head.headers:
        key = _keys.get(name) or _learn(name)
        value = raw.decode("latin-1")
        if key in environ:
            value = environ[key] + ("; " if key == "HTTP_COOKIE" else ",") + value
        environ[key] = value
    body = connection.body
    environ["wsgi.input"] = BytesIO() if body is None else body
    if head.chunked:
        # The body is here already, and its length known; it is not chunked any more.
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        environ["CONTENT_LENGTH"] = str(connection.body_bytes)
    return environ


def _learn(name: bytes) -> str:
    key = "HTTP_" + name.decode("latin-1").upper().replace("-", "_")
    if len(_keys) < NAMES:
        _keys[name] = key
    return key


class Gateway:
    """Runs one WSGI app; called by the engine with each request, on a thread of the pool."""

    def __init__(self, app: WSGIApp) -> None:
        self.app = app

    def handle(self, engine: WSGIEngine, connection: Connection, head: RequestHead) -> None:
        """Answer *head*, then give the connection back or close it. Nothing escapes but SystemExit and the like."""
        response = _Response(engine, connection, head)
        if connection.body is not None:
            connection.body.seek(0)
        keep = False
        try:
            if not connection.gone:
                keep = response.run(self.app)
        finally:
            connection.drop_body()
            if keep:
                engine.hand_back(connection)
            else:
                engine.close(connection)


class _Response:
    """One response on its way."""

    __slots__ = ("_connection", "_defaults", "_framer", "_head", "_request", "_sent", "_write_timeout", "_keep_alive_s")

    def __init__(self, engine: WSGIEngine, connection: Connection, request: RequestHead) -> None:
        settings = engine.settings
        self._connection = connection
        self._request = request
        self._defaults = engine.defaults
        self._framer = ResponseFramer(request.method, request.http_version, request.keep_alive and not engine.draining)
        self._write_timeout = settings.write_timeout or None
        self._keep_alive_s = 0
        self._head: tuple[int, bytes, list[tuple[bytes, bytes]]] | None = None
        self._sent = False

    def run(self, app: WSGIApp) -> bool:
        """Run the app and write its response; return whether the connection may be kept."""
        environ = build_environ(self._connection, self._request)
        try:
            result = app(environ, self._start_response)
            try:
                self._write_all(result)
            finally:
                close = getattr(result, "close", None)
                if close is not None:
                    close()
        except ClientGoneError:
            return False
        except BaseException as error:
            logger.exception("%s %s: the app raised", self._request.method, environ["RAW_URI"])
            if not isinstance(error, Exception):
                logger.warning("%s in a handler ends the request, not the server", type(error).__name__)
            self._framer.abort()
            if not self._sent:
                self._try_send(error_response(500, method=self._request.method, defaults=self._defaults))
            return False
        return not self._framer.must_close

    def _write_all(self, result: Iterable[bytes]) -> None:
        framer = self._framer
        kind = type(result)
        if (kind is list or kind is tuple) and len(result) == 1:  # type: ignore[arg-type]  # the usual case, in one send
            chunk = result[0]  # type: ignore[index]
            if not self._sent:
                head = self._take_head(len(chunk))
                parts = framer.body(_checked(chunk))
                self._send(b"".join((head, *parts, framer.end())))
                return
        if kind is FileWrapper and self._send_file(result):  # type: ignore[arg-type]
            return
        connection = self._connection
        for chunk in result:
            if chunk:
                self._write(_checked(chunk))
            if connection.gone:
                raise ClientGoneError("the client has left")
        last = b"" if self._sent else self._take_head(0)
        last += framer.end()
        if last:
            self._send(last)
        if framer.is_incomplete:
            logger.error("the app announced more bytes than it gave; the connection is closed")

    def _write(self, chunk: bytes) -> None:
        head = b"" if self._sent else self._take_head(None)
        parts = self._framer.body(chunk)
        if len(chunk) <= JOIN_BYTES:
            data = b"".join((head, *parts))
            if data:
                self._send(data)
            return
        for part in (head, *parts):
            if part:
                self._send(part)

    def _take_head(self, body_length: int | None) -> bytes:
        if self._head is None:
            raise RuntimeError("the app produced a body before it called start_response")
        status, reason, headers = self._head
        data = self._framer.head(
            status,
            headers,
            reason=reason,
            body_length=body_length,
            defaults=self._defaults,
            keep_alive_timeout_s=self._keep_alive_s,
        )
        self._sent = True
        return data

    def _start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], None]:
        if exc_info is not None:
            try:
                if self._sent and exc_info[1] is not None:
                    raise exc_info[1].with_traceback(exc_info[2])
            finally:
                exc_info = None  # no cycle through the frame
        elif self._head is not None:
            raise RuntimeError("start_response was called twice without exc_info")
        code = status[:3]
        if not (code.isdecimal() and code.isascii() and status[3:4] in ("", " ")):
            raise ResponseError(f"status {status!r}: write three digits, a space and a reason")
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self._head = (int(code), status[4:].encode("latin-1"), encoded)
        return self._write_checked

    def _write_checked(self, chunk: bytes) -> None:
        self._write(_checked(chunk))

    def _send_file(self, wrapper: FileWrapper) -> bool:
        """Have the kernel send the file; return False where that cannot be."""
        connection = self._connection
        if connection.secure or self._sent:
            return False
        try:
            number = wrapper.filelike.fileno()
            offset = wrapper.filelike.tell()
            size = os.fstat(number).st_size - offset
        except (AttributeError, OSError, ValueError):
            return False
        self._send(self._take_head(max(size, 0)))
        left = self._framer.plain(max(size, 0)) if self._framer.takes_body else 0
        while left:
            try:
                sent = os.sendfile(connection.sock.fileno(), number, offset, min(left, SENDFILE_BYTES))
            except BlockingIOError:
                self._wait_for_room()
                continue
            except OSError as error:
                raise ClientGoneError(str(error)) from None
            if not sent:
                break  # the file was cut meanwhile
            offset += sent
            left -= sent
            if connection.gone:
                raise ClientGoneError("the client has left")
        tail = self._framer.end()
        if left:
            self._framer.abort()
            self._framer.must_close = True
        if tail:
            self._send(tail)
        return True

    def _send(self, data: bytes) -> None:
        try:
            sent = self._connection.sock.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            sent = 0
        except OSError as error:
            raise ClientGoneError(str(error)) from None
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        sock = self._connection.sock
        while rest:
            self._wait_for_room()
            try:
                rest = rest[sock.send(rest) :]
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                continue
            except OSError as error:
                raise ClientGoneError(str(error)) from None

    def _wait_for_room(self) -> None:
        waiter = select.poll()
        waiter.register(self._connection.sock, select.POLLOUT)
        timeout = self._write_timeout
        if not waiter.poll(None if timeout is None else timeout * 1000):
            raise ClientGoneError(f"the client took nothing for {timeout:g} s")

    def _try_send(self, data: bytes) -> None:
        try:
            self._send(data)
        except ClientGoneError:
            pass


def _checked(chunk: Any) -> bytes:
    if type(chunk) is bytes:
        return chunk
    if isinstance(chunk, (bytes, bytearray, memoryview)):
        return bytes(chunk)
    raise TypeError(f"the app yielded {type(chunk).__name__}; WSGI asks for bytes")
