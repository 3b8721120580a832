"""ASGI apps whose lifespan start-up fails: ``app`` says so, ``raising`` raises, ``hanging`` never answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database (failed on purpose)"})
        return
    await hello(send)


async def raising(scope: Message, receive: Receive, send: Send) -> None:
    """
    Says so and then raises, as Starlette does.

    To raise without having said so is how an app tells that it knows no lifespan, which servers take as consent.
    """
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database (raised on purpose)"})
        raise RuntimeError("no database (raised on purpose)")
    await hello(send)


async def hanging(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await asyncio.sleep(3600)
    await hello(send)


async def hello(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": b"hello\n"})
