"""
The WSGI apps: a hello, a handler that waits, and two that stream tokens.

All answer 200 to any path, since the harness asks for ``/`` to see whether a server is up.
"""

from __future__ import annotations

import http.client
import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse

# waitress logs a line for each request that has to wait for a thread. The others log nothing then.
logging.getLogger("waitress.queue").setLevel(logging.ERROR)

HELLO = b"Hello, world"
HELLO_HEADERS = [("Content-Type", "text/plain"), ("Content-Length", str(len(HELLO)))]
STREAM_HEADERS = [("Content-Type", "application/x-ndjson"), ("Cache-Control", "no-store")]


def hello(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    start_response("200 OK", HELLO_HEADERS.copy())
    return [HELLO]


def waiting(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """Sleeps for ``?ms=`` milliseconds, then says hello."""
    query = parse_qs(environ.get("QUERY_STRING", ""))
    time.sleep(int(query.get("ms", ["0"])[0]) / 1000)
    start_response("200 OK", HELLO_HEADERS.copy())
    return [HELLO]


def sleeping_stream(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """Streams ``?n=`` tokens, one each ``?ms=`` milliseconds. The handler itself sleeps between them."""
    query = parse_qs(environ.get("QUERY_STRING", ""))
    if "n" not in query:
        return hello(environ, start_response)
    start_response("200 OK", STREAM_HEADERS.copy())
    return _sleeping_tokens(int(query["n"][0]), int(query["ms"][0]) / 1000)


def _sleeping_tokens(count: int, interval_s: float) -> Iterator[bytes]:
    due = time.monotonic()
    for number in range(count):
        due += interval_s
        time.sleep(max(0.0, due - time.monotonic()))
        yield b'{"token": %6d}\n' % number


def mixed(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """A stream where ``?n=`` asks for tokens, else a handler that waits."""
    return (sleeping_stream if "n=" in environ.get("QUERY_STRING", "") else waiting)(environ, start_response)


def upstream_stream(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """Passes on what the upstream at $BENCH_UPSTREAM (HOST:PORT) streams, as it arrives."""
    query = environ.get("QUERY_STRING", "")
    if "n=" not in query:
        return hello(environ, start_response)
    start_response("200 OK", STREAM_HEADERS.copy())
    return _upstream_tokens("/stream?" + query)


def _upstream_tokens(path: str) -> Iterator[bytes]:
    connection = http.client.HTTPConnection(os.environ["BENCH_UPSTREAM"], timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        while part := response.read1(65536):
            yield part
    finally:
        connection.close()
