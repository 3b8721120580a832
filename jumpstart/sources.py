"""
Ready-made sources: a file, an HTTP endpoint, DNS. Each returns a function for `Config` or `Service`.

    flags = jumpstart.Config("flags", fetch=sources.http("https://config.internal/flags.json"), ttl=10)
    limits = jumpstart.Config("limits", fetch=sources.file("/etc/shop/limits.toml"), ttl=1)
    inference = jumpstart.Service("inference", resolve=sources.dns("inference.internal", 8080))

What they return may be called from one thread at a time, as `Config` and `Service` do. They keep no connection, so that
nothing is shared by forked workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jumpstart.service import Address

Parse = Callable[[bytes], Any]

LIMIT_BYTES = 16 * 1024 * 1024
_CHUNK = 64 * 1024


def file(path: str | os.PathLike[str], *, parse: Parse | None = None, limit: int = LIMIT_BYTES) -> Callable[[], Any]:
    """
    Read a TOML (``.toml``) or JSON file; anew where its time, size or inode has changed.

    Write it to another name and rename it: one that is half written costs a failed fetch.

    Args:
        parse: makes the values of the file's bytes, instead.
        limit: bytes; a larger file is an error.
    """
    location = Path(path)
    parse = parse or (_parse_toml if location.suffix == ".toml" else parse_json)
    known: tuple[tuple[int, int, int], Any] | None = None

    def fetch() -> Any:
        nonlocal known
        with location.open("rb") as stream:
            facts = os.fstat(stream.fileno())
            mark = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if known is not None and known[0] == mark:
                return known[1]
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"{location} is larger than {limit} bytes")
        try:
            values = parse(data)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        known = (mark, values)
        return values

    return fetch


def http(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: float = 5.0,
    parse: Parse | None = None,
    limit: int = LIMIT_BYTES,
    context: Any = None,
) -> Callable[[], Any]:
    """
    GET a JSON document; with ``If-None-Match`` once the server has given an ``ETag``.

    Redirects are followed, and the proxies of the environment used, as `urllib.request` does: httpx would cost each
    boot a tenth of a second.

    Args:
        headers: to send, for instance ``Authorization``.
        timeout: seconds for the whole answer, however slowly it drips.
        parse: makes the values of the body, instead of JSON.
        limit: bytes of the body.
        context: an `ssl.SSLContext`.

    Raises:
        ValueError: *url* is not one of http or https.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no http or https URL")
    parse = parse or parse_json
    known: tuple[str, Any] | None = None  # entity tag and values

    def fetch() -> Any:
        nonlocal known
        import urllib.error
        import urllib.request

        request = urllib.request.Request(url, headers={"Accept": "application/json", **(headers or {})})
        if known is not None:
            request.add_header("If-None-Match", known[0])
        until = time.monotonic() + timeout
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=context) as response:
                if response.status != 200:
                    raise ValueError(f"{url} answered {response.status}")
                body = _read(response, until, limit)
                tag = response.headers.get("ETag")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 304 and known is not None:
                return known[1]
            raise ValueError(f"{url} answered {error.code}") from None
        try:
            values = parse(body)
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from error
        known = (tag, values) if tag else None
        return values

    return fetch


def _read(response: Any, until: float, limit: int) -> bytes:
    """
    The body, whole.

    Raises:
        ValueError: it is too long, or was cut off.
        TimeoutError: it took too long.
    """
    body = bytearray()
    while chunk := response.read1(_CHUNK):
        body += chunk
        if len(body) > limit:
            raise ValueError(f"the answer is larger than {limit} bytes")
        if time.monotonic() >= until:
            raise TimeoutError("the answer took too long")
    if response.length:
        raise ValueError(f"the answer was cut off: {response.length} bytes are missing")
    return bytes(body)


def parse_json(data: bytes) -> Any:
    """
    Raises:
        ValueError: it is no JSON; the message shows how it begins, an HTML page for instance.
    """
    import json

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error}); it begins with {data[:40]!r}") from None


def _parse_toml(data: bytes) -> Any:
    import tomllib

    return tomllib.loads(data.decode())


def dns(host: str, port: int, *, family: int = 0) -> Callable[[], list[Address]]:
    """
    Look up the addresses of *host* with the system's resolver (``getaddrinfo``); of both families unless one is given.

    A name that is not there resolves to none. The resolver tells no ttl: give `Service` one.
    """

    def resolve() -> list[Address]:
        import socket

        try:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
                return []
            raise
        return list(dict.fromkeys(Address(str(address[0]), int(address[1])) for *_, address in found))

    return resolve
