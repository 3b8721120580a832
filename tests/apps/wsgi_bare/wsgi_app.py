"""A plain WSGI callable whose endpoints show what a server does: ``wsgi_app:app``; ``wsgi_app:make_app`` makes one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qs

from jumpstart import is_warmup

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    query = {name: values[0] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
    path = environ["PATH_INFO"]
    if path.startswith("/stream"):
        start_response("200 OK", [("Content-Type", "text/plain")])
        return chunks(int(path.rpartition("/")[2] or 0), float(query.get("delay", "0")))
    body = answer(path, query, environ)
    status = "404 Not Found" if body is None else "200 OK"
    body = body or b""
    start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


def answer(path: str, query: dict[str, str], environ: Environ) -> bytes | None:
    """The body for a path, or None for one that there is not."""
    if path == "/":
        return b"hello\n"
    if path == "/pid":
        return str(os.getpid()).encode()
    if path == "/thread":
        return threading.current_thread().name.encode()
    if path == "/threads":
        return str(threading.active_count()).encode()
    if path == "/sleep":
        time.sleep(float(query.get("s", "0.1")))
        return b"slept\n"
    if path == "/spin":
        until = time.monotonic() + float(query.get("s", "0.1"))
        while time.monotonic() < until:
            pass
        return b"spun\n"
    if path == "/lazy":
        import lazy_part  # type: ignore[import-not-found]  # beside this file, on sys.path through --app-dir

        return str(lazy_part.VALUE).encode()
    if path == "/crash":
        raise RuntimeError("crashed on purpose")
    if path == "/exit":
        os._exit(1)
    if path == "/warmup":
        return str(is_warmup()).encode()
    if path == "/echo":
        return bytes(environ["wsgi.input"].read())
    if path == "/environ":
        return "\n".join(f"{name}={environ[name]!r}" for name in sorted(environ)).encode()
    return None


def chunks(count: int, delay_s: float) -> Iterator[bytes]:
    for number in range(count):
        time.sleep(delay_s)
        yield f"chunk {number}\n".encode()


def make_app() -> Callable[[Environ, StartResponse], Iterable[bytes]]:
    """For ``--factory``."""
    return app
