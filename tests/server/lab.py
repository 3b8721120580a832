"""
What the laboratories of both engines share: a socket of their own, clients of raw bytes, apps that are described once.

    with make_lab("asgi") as lab:                  # or one of the other `ENGINES`
        path = lab.serve(Reply((b"one", b"two")))  # an app of that engine which answers so
        with lab.connect() as client:
            client.get(path)
            assert client.response().body == b"onetwo"

`asgi_lab.py` and `wsgi_lab.py` make a server of the one and the other kind out of it, for apps of that kind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from tests.server.raw_http import PATIENCE, Client, Response, until

ASGI = ("asgi",)
WSGI = ("wsgi", "wsgi-streamed")
ENGINES = (*ASGI, *WSGI)  # a WSGI handler gets its body whole, or reads it from the socket
ALL = (*ENGINES, "wsgi-crowded")  # a handler runs all the time: threads compete, and other system calls are made


class Door:
    """
    Where requests wait until it is opened.

    Attributes:
        entered: how many have come.
        is_open: whether they may pass.
    """

    def __init__(self) -> None:
        self.entered = 0
        self.opened = threading.Event()

    def open(self) -> None:
        self.opened.set()


@dataclass(frozen=True)
class Reply:
    """
    An app of either engine.

    Attributes:
        pieces: the body. More than one are a stream.
        headers: besides ``Content-Length``.
        length: ``Content-Length``; None for that of the one piece, 0 for none.
        door: where it waits before it does anything.
        pause: seconds for which it does nothing before it does anything else.
        echo: the body is that of the request.
        note: called with the request's body when it was read to its end.
        fails: raises ValueError("no more") when the pieces are sent.
    """

    pieces: tuple[bytes, ...] = (b"hello\n",)
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    length: int | None = None
    door: Door | None = None
    pause: float = 0.0
    echo: bool = False
    note: Callable[[bytes], object] | None = None
    fails: bool = False

    @property
    def fields(self) -> list[tuple[str, str]]:
        """All headers."""
        length = self.length
        if length is None and len(self.pieces) == 1 and not self.echo:
            length = len(self.pieces[0])
        return [*self.headers, *([("Content-Length", str(length))] if length else [])]


class Words:
    """
    An app of either engine whose body goes on until it is closed.

    Attributes:
        closed: set when it was.
        size: bytes of each word.
        pause: seconds between two.
    """

    def __init__(self, size: int = 5, pause: float = 0.005) -> None:
        self.closed = threading.Event()
        self.size = size
        self.pause = pause


class Tell:
    """An app of either engine that answers, as JSON, what it is told: see `Told`."""


@dataclass(frozen=True)
class Told:
    """What an app is told of its request and of the connection."""

    host: str
    path: str
    query: str
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int | None]


Described = Reply | Words | Tell
HELLO = Reply()
ECHO = Reply(echo=True)


def descriptors() -> dict[int, str]:
    """The open descriptors of this process, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # no Path object for each of thousands
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            pass  # the folder's own
    return found


class BaseLab:
    """
    One server on a socket of its own; use it as a context manager.

    Attributes:
        apps: what answers, by path.
        address: where it listens.
        tls: whether clients have to speak TLS.
    """

    def __init__(self, *, uds: Path | None = None, tls: tuple[Path, Path] | None = None) -> None:
        self.apps: dict[str, Any] = {}
        self.tls = tls is not None
        self._numbers = itertools.count()
        self.listener = socket.socket(socket.AF_UNIX if uds else socket.AF_INET, socket.SOCK_STREAM)
        self.listener.bind(str(uds) if uds else ("127.0.0.1", 0))
        self.listener.listen(1024)
        self.address = self.listener.getsockname()

    def __enter__(self) -> BaseLab:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Begin to drain, as a worker does."""
        raise NotImplementedError

    def adapt(self, described: Described) -> Any:
        """An app of this engine that does so."""
        raise NotImplementedError

    @property
    def connections(self) -> int:
        raise NotImplementedError

    @property
    def busy(self) -> int:
        """Requests that their app has not done with."""
        raise NotImplementedError

    def serve(self, described: Described, path: str = "") -> str:
        """Let such an app answer at a path of its own, which is returned."""
        path = path or f"/{next(self._numbers)}"
        self.apps[path] = self.adapt(described)
        return path

    def connect(self, *, receive_buffer: int = 0) -> Client:
        """A connection. *receive_buffer*: bytes that the kernel keeps for the client; little makes a slow reader."""
        sock = socket.socket(self.listener.family if self.listener.fileno() >= 0 else socket.AF_INET)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE)
        sock.connect(self.address)
        if self.tls:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            sock = context.wrap_socket(sock, suppress_ragged_eofs=False)
        return Client(sock)

    def ask(self, data: bytes) -> Response:
        """One request on a connection of its own."""
        with self.connect() as client:
            client.send(data)
            return client.response()

    def wait_idle(self) -> None:
        """Until nobody is connected and no app runs."""
        until(lambda: not self.connections and not self.busy)

    @contextlib.contextmanager
    def back_to_baseline(self) -> Iterator[None]:
        """Connections, handlers and descriptors are as many afterwards as before."""
        self.wait_idle()
        before = len(descriptors())
        yield
        self.wait_idle()
        until(lambda: len(descriptors()) <= before)


@contextlib.contextmanager
def make_lab(
    engine: str,
    settings: ConnectionSettings | None = None,
    app: Described | None = None,
    *,
    uds: Path | None = None,
    tls: tuple[Path, Path] | None = None,
    access: AccessLog | None = None,
) -> Iterator[BaseLab]:
    """A running server of one of the `ENGINES`; *app* answers everywhere; else ``/`` greets and ``/echo`` echoes."""
    from tests.server import asgi_lab, wsgi_lab

    lab: BaseLab
    if engine == "asgi":
        lab = asgi_lab.Lab(settings=settings, uds=uds, tls=tls, access=access)
    else:
        streamed = engine == "wsgi-streamed"
        lab = wsgi_lab.Lab(settings, uds=uds, tls=tls, access=access, stream_bodies=streamed)
    if app is not None:
        lab.apps = Everywhere(lab.adapt(app))
    with lab, contextlib.ExitStack() as stack:
        lab.serve(HELLO, "/") if app is None else None
        lab.serve(ECHO, "/echo") if app is None else None
        if engine == "wsgi-crowded":
            assert isinstance(lab, wsgi_lab.Lab)
            stack.enter_context(lab.crowded())
        yield lab


class Everywhere(dict[str, Any]):
    """One app for every path."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __missing__(self, path: str) -> Any:
        return self._app
