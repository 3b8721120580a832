"""
Boots an app in a fresh process as a mold and a worker would: observe, restore, requests, capture.

Run as a program it does so once and prints what happened as JSON; tests call `boot`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import msgspec

RECORDERS = {
    "sqlalchemy": "jumpstart.recorders.sqlalchemy:SqlalchemyRecorder",
    "django": "jumpstart.recorders.django:DjangoRecorder",
    "openapi": "jumpstart.recorders.starlette:OpenapiRecorder",
    "starlette": "jumpstart.recorders.starlette:StarletteRecorder",
    "jinja-bytecode": "jumpstart.recorders.jinja:JinjaBytecodeRecorder",
    "jinja": "jumpstart.recorders.jinja:JinjaRecorder",
    "flask": "jumpstart.recorders.flask:FlaskRecorder",
}


class Boot(msgspec.Struct):
    """What one process did: cold events and CPU per request, responses, and each recorder's tally and capture."""

    events: list[list[tuple[str, str]]]
    cpu_ms: list[float]
    responses: list[tuple[int, str]]
    used: dict[str, list[str]]
    dropped: dict[str, dict[str, str]]
    captured: dict[str, list[dict[str, Any]]]
    boot_cpu_ms: float
    threads: int
    loops: int
    after: Any = None

    def cold(self, kind: str) -> list[str]:
        """What was cold of that kind, over all requests."""
        return [what for request in self.events for each, what in request if each == kind]


def boot(
    folder: Path,
    target: str,
    requests: list[str],
    records: dict[str, list[dict[str, Any]]] | None = None,
    *,
    recorders: list[str] | None = None,
    restore: bool = True,
    prelude: str = "",
    after: str = "",
) -> Boot:
    """Boot *target* from *folder* in a new process; *prelude* runs before it, *after* (an expression) at its end."""
    job = {
        "folder": str(folder),
        "target": target,
        "requests": requests,
        "records": records or {},
        "recorders": recorders or list(RECORDERS),
        "restore": restore,
        "prelude": textwrap.dedent(prelude),
        "after": after,
    }
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(folder)])}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        input=msgspec.msgpack.encode(job),
        capture_output=True,
        cwd=folder,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.msgpack.decode(done.stdout.rpartition(b"\n--boot--\n")[2], type=Boot)


def _main() -> None:
    from jumpstart.context import RequestContext, request_context
    from jumpstart.recorder import WarmSettings
    from jumpstart.records import Record, Tally, split_valid
    from jumpstart.runtime import digest

    job = msgspec.msgpack.decode(sys.stdin.buffer.read())
    sys.path[:] = [job["folder"], *[entry for entry in sys.path if entry != str(Path(__file__).parent)]]
    exec(job["prelude"], {})
    made = {}
    for name in job["recorders"]:
        module, _, cls = RECORDERS[name].partition(":")
        made[name] = getattr(importlib.import_module(module), cls)(WarmSettings(app_dir=job["folder"]))
    tallies = {name: Tally() for name in made}
    begin = time.process_time()
    for recorder in made.values():
        recorder.observe()
    records = {name: [msgspec.convert(record, Record) for record in job["records"].get(name, [])] for name in made}
    if job["restore"]:
        for name, recorder in made.items():
            recorder.restore_early(records[name], tallies[name])
    module, _, attribute = job["target"].partition(":")
    app = getattr(importlib.import_module(module), attribute)
    if job["restore"]:
        for name, recorder in made.items():
            records[name] = split_valid(records[name], digest, tallies[name])
            recorder.restore(app, records[name], tallies[name])
    boot_cpu = time.process_time() - begin
    import threading

    threads, loops = threading.active_count(), _count_loops()

    async def serve() -> None:
        if job["restore"]:
            for name, recorder in made.items():
                await recorder.restore_late(app, records[name], tallies[name])
        for path in job["requests"]:
            context = RequestContext()
            start = time.process_time()
            with request_context(context):
                responses.append(await _request(app, path))
            cpu.append((time.process_time() - start) * 1000)
            events.append(context.events)

    events: list[Any] = []
    cpu: list[float] = []
    responses: list[tuple[int, str]] = []
    asyncio.run(serve())
    captured = {name: recorder.capture("ship") for name, recorder in made.items()}
    again = {name: recorder.capture("ship") for name, recorder in made.items()}
    assert captured == again, "capture is not repeatable"
    result = Boot(
        events=events,
        cpu_ms=cpu,
        responses=responses,
        used={name: sorted(tally.used_keys) for name, tally in tallies.items()},
        dropped={name: {each.key: str(each.reason) for each in tally.dropped} for name, tally in tallies.items()},
        captured=msgspec.to_builtins(captured, builtin_types=(bytes,)),
        boot_cpu_ms=boot_cpu * 1000,
        threads=threads,
        loops=loops,
        after=eval(job["after"], {"app": app, "sys": sys}) if job["after"] else None,
    )
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n--boot--\n" + msgspec.msgpack.encode(result))


def _count_loops() -> int:
    import gc

    return sum(isinstance(each, asyncio.AbstractEventLoop) for each in gc.get_objects())


async def _request(app: Any, path: str) -> tuple[int, str]:
    import inspect

    target = app if inspect.isfunction(app) or inspect.ismethod(app) else type(app).__call__
    return await _asgi(app, path) if inspect.iscoroutinefunction(target) else _wsgi(app, path)


async def _asgi(app: Any, path: str) -> tuple[int, str]:
    status, body = 0, b""
    plain, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": plain,
        "raw_path": plain.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"testserver")],
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
        "state": {},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app(scope, receive, send)
    return status, body.decode()


def _wsgi(app: Any, path: str) -> tuple[int, str]:
    import io

    statuses: list[str] = []
    plain, _, query = path.partition("?")
    environ = {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": plain,
        "QUERY_STRING": query,
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    chunks = app(environ, lambda status, headers, exc_info=None: statuses.append(status))
    try:
        body = b"".join(chunks)
    finally:
        getattr(chunks, "close", lambda: None)()
    return int(statuses[0][:3]), body.decode()


def as_json(records: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The records after a trip through JSON, as a profile's data sections would bring them back."""
    return json.loads(json.dumps(records))  # type: ignore[no-any-return]


if __name__ == "__main__":
    _main()
