"""A plain ASGI callable whose endpoints show what a server does: ``asgi_app:app``; ``asgi_app:make_app`` makes one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from jumpstart import is_warmup

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TEXT = [(b"content-type", b"text/plain")]
started: list[int] = []  # pids whose lifespan start-up ran; a fork inherits those of its mold


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    if scope["type"] != "http":
        raise NotImplementedError(scope["type"])
    query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
    path = scope["path"]
    if path.startswith("/stream"):
        await send({"type": "http.response.start", "status": 200, "headers": TEXT})
        for number in range(int(path.rpartition("/")[2] or 0)):
            await asyncio.sleep(float(query.get("delay", "0")))
            await send({"type": "http.response.body", "body": f"chunk {number}\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    body = await answer(path, query, receive)
    status = 404 if body is None else 200
    body = body or b""
    headers = [*TEXT, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            started.append(os.getpid())
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return


async def answer(path: str, query: dict[str, str], receive: Receive) -> bytes | None:
    """The body for a path, or None for one that there is not."""
    if path == "/":
        return b"hello\n"
    if path == "/pid":
        return str(os.getpid()).encode()
    if path == "/thread":
        return threading.current_thread().name.encode()
    if path == "/threads":
        return str(threading.active_count()).encode()
    if path == "/started":
        return ",".join(map(str, started)).encode()
    if path == "/sleep":
        await asyncio.sleep(float(query.get("s", "0.1")))
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
        return await whole_body(receive)
    return None


async def whole_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def make_app() -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """For ``--factory``."""
    return app
