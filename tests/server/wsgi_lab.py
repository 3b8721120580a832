"""
A laboratory for the WSGI engine: a `WSGIServer` on a socket of its own in this process, and clients of raw bytes.

    lab.app(hello, "/hello")                        # what answers there
    with lab.connect() as client:
        client.send(b"GET /hello HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        assert client.response().status == 200

When it closes, it looks for threads and descriptors that were left.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.envelope.limits import RequestLimits
from jumpstart_server.wsgi.pool import PoolThread
from jumpstart_server.wsgi.server import WSGIServer
from jumpstart_warmup.observe import Observer
from tests.server.lab import BaseLab, Described, Reply, Tell, Told, Words
from tests.server.lab import descriptors as descriptors
from tests.server.raw_http import PATIENCE, until

Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], None]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class Lab(BaseLab):
    """One server; use it as a context manager. It listens at once, and accepts from `start` on."""

    def __init__(
        self,
        settings: ConnectionSettings | None = None,
        app: App | None = None,
        *,
        threads: int = 8,
        uds: Path | None = None,
        tls: tuple[Path, Path] | None = None,
        access: AccessLog | None = None,
        limits: RequestLimits = RequestLimits(),  # noqa: B008  # frozen
        queue: int = 1000,
        queue_timeout: float = 10.0,
        observer: Observer | None = None,
        **more: Any,
    ) -> None:
        """*queue* and *queue_timeout* are the limits'; *more* goes to `WSGIServer`."""
        self._before = descriptors()
        self._interval = sys.getswitchinterval()
        super().__init__(uds=uds, tls=tls)
        self.held = 0  # connections with busy handlers that are there on purpose
        context = None
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
        self.server = WSGIServer(
            app or self._dispatch,
            [self.listener],
            settings or ConnectionSettings(),
            threads=threads,
            observer=observer or Observer(),
            tls=context,
            access=access,
            limits=replace(limits, queue=queue, queue_timeout=queue_timeout),
            **more,
        )
        self.stopped = threading.Event()  # and every connection was closed
        self._stopping = False
        self.closed = False

    def __enter__(self) -> Lab:
        self.start()
        return self

    def start(self) -> None:
        self.server.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            assert self.stopped.wait(PATIENCE), f"{self.connections} connections are left"
        self.close()

    def stop(self) -> None:
        """Begin to drain, as a worker does."""
        if not self._stopping:
            self._stopping = True
            self.server.stop_accepting()
            self.listener.close()
            self.server.when_empty(self.stopped.set)

    def close(self, timeout_s: float = PATIENCE) -> None:
        """End the server; nothing of it may be left if its handlers end within that time."""
        if self.closed:
            return
        self.closed = True
        self.server.close(timeout_s)
        until(lambda: not self.threads)
        sys.setswitchinterval(self._interval)
        until(lambda: not self.left_descriptors)

    @property
    def threads(self) -> list[str]:
        """Names of the server's threads that live."""
        return [
            thread.name
            for thread in threading.enumerate()
            if isinstance(thread, PoolThread) and thread._pool is self.server.pool
        ]

    @property
    def left_descriptors(self) -> list[str]:
        """What is open now and was not before; temporary files are among them, which have no names."""
        return [what for fd, what in descriptors().items() if fd not in self._before]

    def _dispatch(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        app: App = self.apps[environ["PATH_INFO"]]
        return app(environ, start_response)

    def app(self, app: App, path: str = "") -> str:
        """Let *app* answer at a path of its own, which is returned."""
        path = path or f"/{next(self._numbers)}"
        self.apps[path] = app
        return path

    @property
    def connections(self) -> int:
        return len(self.server._all) - self.held

    @property
    def busy(self) -> int:
        """Handlers that run."""
        return self.server.stats().busy - self.held

    @contextlib.contextmanager
    def crowded(self) -> Iterator[None]:
        """A handler runs all the while."""
        gate = Gate()
        with self.connect() as client:
            client.get(self.app(gate))
            until(lambda: gate.entered)
            self.held = 1
            yield
            self.held = 0
            gate.open()
            assert client.response().status == 200

    def adapt(self, described: Described) -> App:
        """As a WSGI app."""
        match described:
            case Words():
                return _Stream(described)
            case Tell():
                return _tell
            case _:
                return lambda environ, start_response: _reply(described, environ, start_response)


def _reply(reply: Reply, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    if reply.door is not None:
        reply.door.entered += 1
        assert reply.door.opened.wait(12 * PATIENCE)
    if reply.pause:
        threading.Event().wait(reply.pause)
    pieces = reply.pieces
    if reply.echo or reply.note is not None:
        body = environ["wsgi.input"].read()
        if reply.note is not None:
            reply.note(body)
        pieces = (body,) if reply.echo else pieces
    if reply.fails and not pieces:
        raise ValueError("no more")
    start_response(f"{reply.status} Whatever", reply.fields)
    if len(pieces) == 1 and not reply.fails:
        return list(pieces)
    return _pieces(pieces, reply.fails)


def _pieces(pieces: tuple[bytes, ...], fails: bool) -> Iterator[bytes]:
    yield from pieces
    if fails:
        raise ValueError("no more")


class _Stream:
    """`Words` as a WSGI app, and its body."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        return self

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self._words.closed.wait(self._words.pause)
            yield b"x" * self._words.size

    def close(self) -> None:
        assert not self._words.closed.is_set()
        self._words.closed.set()


def _tell(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    address = environ["REMOTE_ADDR"]
    told = Told(
        host=environ["HTTP_HOST"],
        path=environ["PATH_INFO"],
        query=environ["QUERY_STRING"],
        scheme=environ["wsgi.url_scheme"],
        client=(address, int(environ["REMOTE_PORT"])) if address else None,
        server=(environ["SERVER_NAME"], int(environ["SERVER_PORT"])),
    )
    return answer(json.dumps(asdict(told)).encode())(environ, start_response)


class Gate:
    """
    An app that waits until it is opened.

    Attributes:
        entered: how many have come.
    """

    def __init__(self, then: App | None = None) -> None:
        self.entered = 0
        self._then = then or answer()
        self._open = threading.Event()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        self.entered += 1
        assert self._open.wait(12 * PATIENCE)
        return self._then(environ, start_response)

    def open(self) -> None:
        self._open.set()


def answer(
    body: bytes = b"hello\n",
    status: str = "200 OK",
    headers: list[tuple[str, str]] | None = None,
    length: bool = True,
) -> App:
    """An app that always says the same."""
    fields = list(headers or [])
    if length:
        fields.append(("Content-Length", str(len(body))))

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, list(fields))
        return [body]

    return app


def stream(*pieces: bytes) -> App:
    """An app that gives its body piece by piece."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield from pieces

    return app


def echo(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """Sends the request's body back."""
    return answer(environ["wsgi.input"].read())(environ, start_response)
