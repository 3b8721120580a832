"""
A laboratory for PEP 3333: the WSGI engine on a real socket, with an app that a test sets, and a client of raw bytes.

    with Lab() as lab:                       # afterwards no thread, descriptor or temporary file is left
        lab.app = answering([b"hello"])
        assert lab.ask().body == b"hello"
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from jumpstart_server.connection_settings import ConnectionSettings
from tests.server import raw_http, wsgi_lab
from tests.server.raw_http import Client, Response
from tests.server.wsgi_lab import App, Environ, StartResponse

__all__ = ["App", "Body", "Environ", "Lab", "StartResponse", "answering", "endless", "failing", "fields_of", "until"]

PATIENCE = 20.0  # seconds; a busy machine may be slow, a hang never ends
LOGGER = "jumpstart_server.wsgi.exchange"
OWN = {"connection", "keep-alive", "date", "transfer-encoding"}  # fields of the server's


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of *condition*, polled."""
    return raw_http.until(condition, PATIENCE)


class Lab:
    """
    One server; use it as a context manager.

    Attributes:
        app: what answers.
        server: the engine.
        address: where it listens.
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
        self._lab = wsgi_lab.Lab(
            settings,
            lambda environ, start_response: self.app(environ, start_response),
            threads=threads,
            uds=uds,
            tls=tls,
            **more,
        )
        self.server = self._lab.server
        self.address = self._lab.address

    def __enter__(self) -> Lab:
        self._lab.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop_accepting()
        self._lab.listener.close()
        if kind is None:
            self._lab.close(PATIENCE)
        else:
            self.server.close(PATIENCE)

    @property
    def busy(self) -> int:
        """Handlers that run."""
        return self._lab.busy

    def wait_idle(self) -> None:
        """Until the server is done with every request that was sent."""
        until(lambda: not self.busy)

    def connect(self, *, receive_buffer: int = 0) -> Client:
        """As of the other laboratories, with more patience."""
        client = self._lab.connect(receive_buffer=receive_buffer)
        client.sock.settimeout(PATIENCE)
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


def fields_of(response: Response) -> list[tuple[str, str]]:
    """Without those that each response has."""
    return [field for field in response.headers if field[0] not in OWN]


def failing(lab: Lab, app: App, caplog: pytest.LogCaptureFixture) -> str:
    """Serve *app*, which must give a clean 500 and one error in the log; return that with its traceback."""
    caplog.clear()
    lab.app = app
    response = lab.ask("/some/where?x")
    assert (response.status, response.body) == (500, b"500 Internal Server Error\n")
    assert response.complete and response.get("connection") == "close"
    records = [record for record in caplog.records if record.name == LOGGER and record.levelno == logging.ERROR]
    assert [record.getMessage() for record in records] == ["exception in the app: GET /some/where"]
    return caplog.text
