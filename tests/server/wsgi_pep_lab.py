"""
A laboratory for PEP 3333: the WSGI engine on a real socket, with an app that a test sets, and a client of raw bytes.

    with Lab() as lab:                       # afterwards no thread, descriptor or temporary file is left
        lab.app = answering([b"hello"])
        assert lab.ask().body == b"hello"
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.wsgi.server import WSGIServer
from jumpstart_warmup.observe import Observer
from tests.server import raw_http
from tests.server.raw_http import Client, Response

PATIENCE = 20.0  # seconds; a busy machine may be slow, a hang never ends
StartResponse = Callable[..., Callable[[bytes], None]]
Environ = dict[str, Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of *condition*, polled."""
    return raw_http.until(condition, PATIENCE)


def _descriptors() -> Counter[str]:
    """What this process holds open of the kinds that a server opens."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # that of the listing itself
        kind = target.partition(":")[0] if target.endswith("]") else target
        if kind in ("socket", "pipe", "anon_inode") or target.endswith("(deleted)"):
            found[kind] += 1
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("jumpstart-")}


class Lab:
    """
    One server; use it as a context manager.

    Attributes:
        app: what answers.
    """

    def __init__(
        self,
        app: App | None = None,
        *,
        settings: ConnectionSettings | None = None,
        threads: int = 4,
        uds: Path | None = None,
        tls: tuple[Path, Path] | None = None,
        **more: Any,
    ) -> None:
        """*more*: as of `WSGIServer`."""
        self.app: App = app or answering([b"hello"])
        self._before = (_descriptors(), _threads())
        self._listener = socket.socket(socket.AF_UNIX if uds else socket.AF_INET)
        self._listener.bind(str(uds) if uds else ("127.0.0.1", 0))
        self._listener.listen(128)
        self.address = self._listener.getsockname()
        context = None
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
        self._is_tls = tls is not None
        self.server = WSGIServer(
            lambda environ, start_response: self.app(environ, start_response),
            [self._listener],
            settings or ConnectionSettings(),
            threads=threads,
            observer=Observer(),
            tls=context,
            **more,
        )

    def __enter__(self) -> Lab:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop_accepting()
        self.server.close(PATIENCE)
        self._listener.close()
        if kind is None:
            descriptors, threads = self._before
            until(lambda: _threads() <= threads)
            until(lambda: not _descriptors() - descriptors)

    @property
    def busy(self) -> int:
        """Handlers that run."""
        return self.server.stats().busy

    def wait_idle(self) -> None:
        """Until the server is done with every request that was sent."""
        until(lambda: not self.busy)

    def connect(self, *, receive_buffer: int = 0) -> Client:
        """A connection. *receive_buffer*: bytes that the kernel keeps for the client; little makes a slow reader."""
        sock = socket.socket(self._listener.family)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE)
        sock.connect(self.address)
        if self._is_tls:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            sock = context.wrap_socket(sock)
        client = Client(sock)
        sock.settimeout(PATIENCE)
        return client

    def ask(self, path: str = "/", *fields: str, method: str = "GET", body: bytes | None = None) -> Response:
        """One request on a connection of its own; its handler has ended when this returns."""
        lines = [f"{method} {path} HTTP/1.1", "Host: test", *fields]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        with self.connect() as client:
            client.send("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
            response = client.response(method)
        self.wait_idle()
        return response

    def environ(self, path: str = "/", *fields: str, **more: Any) -> Environ:
        """What an app sees of a request; ``body`` is what it reads."""
        seen: Environ = {}

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            seen.update(environ)
            seen["body"] = environ["wsgi.input"].read()
            start_response("200 OK", [])
            return []

        self.app = app
        assert self.ask(path, *fields, **more).status == 200
        return seen


class Body:
    """
    An iterable that tells how it was closed.

    Attributes:
        closed: how often.
        given: chunks.
        closed_on: the threads.
    """

    def __init__(
        self,
        chunks: Iterable[bytes],
        error: BaseException | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self.closed = 0
        self.given = 0
        self.closed_on: list[int] = []
        self._chunks = iter(chunks)
        self._error = error
        self._on_close = on_close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = next(self._chunks)
        except StopIteration:
            if self._error is not None:
                raise self._error from None
            raise
        self.given += 1
        return chunk

    def close(self) -> None:
        self.closed += 1
        self.closed_on.append(threading.get_ident())
        self._on_close()


def answering(body: Iterable[bytes], status: str = "200 OK", headers: Iterable[tuple[str, str]] = ()) -> App:
    """An app that always says the same."""
    fields = list(headers)

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, list(fields))
        return body

    return app


def endless(chunk: bytes = b"x" * 1000) -> Iterator[bytes]:
    while True:
        yield chunk
