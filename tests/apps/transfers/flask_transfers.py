"""Large bodies and endless answers in Flask: ``flask_transfers:app``."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from flask import Flask, Response, request, send_file, stream_with_context

BLOCK = bytes(64 * 1024)
pushed: queue.Queue[str] = queue.Queue()
produced = 0  # bytes of the last download
app = Flask(__name__)


@app.post("/upload")
def upload() -> dict[str, object]:
    size, zeros = 0, True
    while block := request.stream.read(len(BLOCK)):
        size += len(block)
        zeros = zeros and block == BLOCK[: len(block)]
    return {"size": size, "zeros": zeros}


@app.get("/download/<int:size>")
def download(size: int) -> Response:
    def produce() -> Iterator[bytes]:
        global produced
        produced = 0
        while produced < size:
            produced += len(BLOCK)
            yield BLOCK

    stream = stream_with_context(produce())
    return Response(stream, mimetype="application/octet-stream", headers={"Content-Length": str(size)})


@app.get("/produced")
def show_produced() -> str:
    return str(produced)


@app.get("/file")
def file() -> Response:
    return send_file(request.args["path"], mimetype="application/octet-stream")


@app.get("/events")
def events() -> Response:
    def produce() -> Iterator[str]:
        while (word := pushed.get(timeout=60)) != "end":
            yield f"data: {word}\n\n"

    return Response(produce(), mimetype="text/event-stream")


@app.post("/push/<word>")
def push(word: str) -> str:
    pushed.put(word)
    return "pushed"
