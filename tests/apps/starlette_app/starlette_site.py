"""Starlette with lifespan, a lazy import, a background task and server-sent events: ``starlette_site:app``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

finished: list[str] = []


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, int]]:
    app.state.ticker = asyncio.create_task(asyncio.Event().wait())  # as apps keep one that polls something
    try:
        yield {"started_in": os.getpid()}
    finally:
        app.state.ticker.cancel()


async def home(request: Request) -> Response:
    return JSONResponse({"pid": os.getpid(), "started_in": request.state.started_in})


def lazy(request: Request) -> Response:
    import wordlist  # type: ignore[import-not-found]  # beside this file, on sys.path through --app-dir

    return PlainTextResponse(wordlist.longest())


async def background(request: Request) -> Response:
    name = request.query_params.get("name", "task")

    async def work() -> None:
        await asyncio.sleep(0.01)
        finished.append(name)

    return PlainTextResponse("accepted\n", status_code=202, background=BackgroundTask(work))


async def show_finished(request: Request) -> Response:
    return JSONResponse(finished)


async def events(request: Request) -> Response:
    count = min(int(request.query_params.get("n", "3")), 1000)
    delay_s = min(float(request.query_params.get("delay", "0")), 5.0)

    async def produce() -> AsyncIterator[str]:
        for number in range(count):
            await asyncio.sleep(delay_s)
            yield f"data: {number}\n\n"

    return StreamingResponse(produce(), media_type="text/event-stream")


app = Starlette(
    routes=[
        Route("/", home),
        Route("/lazy", lazy),
        Route("/background", background, methods=["POST"]),
        Route("/finished", show_finished),
        Route("/events", events),
    ],
    lifespan=lifespan,
)
