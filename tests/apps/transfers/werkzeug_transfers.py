"""Large bodies and endless answers with bare Werkzeug: ``werkzeug_transfers:app``."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from werkzeug import Request, Response
from werkzeug.wsgi import wrap_file

BLOCK = bytes(64 * 1024)
pushed: queue.Queue[str] = queue.Queue()
produced = 0  # bytes of the last download


def count(request: Request) -> dict[str, object]:
    size, zeros = 0, True
    while block := request.stream.read(len(BLOCK)):
        size += len(block)
        zeros = zeros and block == BLOCK[: len(block)]
    return {"size": size, "zeros": zeros}


def produce(size: int) -> Iterator[bytes]:
    global produced
    produced = 0
    while produced < size:
        produced += len(BLOCK)
        yield BLOCK


def events() -> Iterator[str]:
    while (word := pushed.get(timeout=60)) != "end":
        yield f"data: {word}\n\n"


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    return answer(Request(environ))(environ, start_response)


def answer(request: Request) -> Response:
    name, _, rest = request.path.removeprefix("/").partition("/")
    if name == "upload":
        return Response(json.dumps(count(request)), mimetype="application/json")
    if name == "download":
        return Response(produce(int(rest)), headers={"Content-Length": rest})
    if name == "file":
        file = Path(request.args["path"]).open("rb")  # noqa: SIM115  closed by the server
        return Response(wrap_file(request.environ, file), direct_passthrough=True)
    if name == "events":
        return Response(events(), mimetype="text/event-stream")
    if name == "push":
        pushed.put(rest)
    return Response(str(produced))
