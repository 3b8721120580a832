"""Large bodies, endless answers and a WebSocket in Starlette: ``starlette_transfers:app``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

BLOCK = bytes(64 * 1024)
pushed: asyncio.Queue[str] = asyncio.Queue()
produced = 0  # bytes of the last download


async def upload(request: Request) -> Response:
    size, zeros = 0, True
    async for block in request.stream():
        size += len(block)
        zeros = zeros and not block.strip(b"\0")
    return JSONResponse({"size": size, "zeros": zeros})


async def download(request: Request) -> Response:
    size = int(request.path_params["size"])

    async def produce() -> AsyncIterator[bytes]:
        global produced
        produced = 0
        while produced < size:
            produced += len(BLOCK)
            yield BLOCK

    return StreamingResponse(produce(), headers={"Content-Length": str(size)})


async def show_produced(request: Request) -> Response:
    return PlainTextResponse(str(produced))


async def file(request: Request) -> Response:
    return FileResponse(request.query_params["path"])


async def events(request: Request) -> Response:
    async def produce() -> AsyncIterator[str]:
        while (word := await pushed.get()) != "end":
            yield f"data: {word}\n\n"

    return StreamingResponse(produce(), media_type="text/event-stream")


async def push(request: Request) -> Response:
    await pushed.put(request.path_params["word"])
    return PlainTextResponse("pushed")


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    try:
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if message.get("bytes") is not None:
                await websocket.send_bytes(message["bytes"])
            else:
                await websocket.send_text(message["text"])
    except WebSocketDisconnect:
        pass


app = Starlette(
    routes=[
        Route("/upload", upload, methods=["POST"]),
        Route("/download/{size:int}", download),
        Route("/produced", show_produced),
        Route("/file", file),
        Route("/events", events),
        Route("/push/{word}", push, methods=["POST"]),
        WebSocketRoute("/echo", echo),
    ]
)
