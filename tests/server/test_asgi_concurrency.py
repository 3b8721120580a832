"""How many requests run at once, who waits for how long, and what a stop tells those that run. Cases by number."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jumpstart
from jumpstart_server.access import AccessLog
from jumpstart_server.envelope.limits import RequestLimits
from tests.server.asgi_lab import Client, Lab, Receive, Scope, Send, answer, echo, piece, start, until


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def errors(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.ERROR]


class Gated:
    """An app whose requests stand until they are let go."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.inside = 0
        self.started: list[str] = []
        self.gate = asyncio.Event()
        self.path = lab.app(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.inside += 1
        self.started.append(scope["query_string"].decode())
        await self.gate.wait()
        self.inside -= 1
        await answer(b"done")(scope, receive, send)

    def open(self) -> None:
        self.lab.loop.call_soon_threadsafe(self.gate.set)

    def ask(self, query: str = "", *fields: str, method: str = "GET") -> Client:
        client = self.lab.connect()
        client.get(f"{self.path}?{query}", *fields, method=method)
        return client


@contextlib.contextmanager
def make(tmp_path: Path, **limits: Any) -> Iterator[tuple[Lab, Gated]]:
    access = AccessLog(str(tmp_path / "access.log"), "json")
    with Lab(limits=RequestLimits(**limits), access=access) as lab:
        lab.app(answer(), "/")
        with lab.connect() as client:
            client.get("/")
            assert client.response().status == 200
        yield lab, Gated(lab)
        until(lambda: not lab.tasks and not lab.connections and not lab.service.gate.queue.size)
        assert not lab.service.deadlines.orphans
    access.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Lab, Gated]]:
    """Two run, three wait, for half a second."""
    with make(tmp_path, limit_concurrency=2, queue=3, queue_timeout=0.5) as both:
        yield both


def waiting(lab: Lab) -> int:
    return lab.service.gate.queue.size


def test_106_idle_connections_count_for_nothing(two: tuple[Lab, Gated]) -> None:
    lab, _ = two
    idle = [lab.connect() for _ in range(10)]
    try:
        for client in idle:
            client.get("/")
            assert client.response().status == 200
        with lab.connect() as client:
            client.get("/")
            assert client.response().status == 200
    finally:
        for client in idle:
            client.sock.close()


def test_105_what_does_not_run_waits_and_what_may_not_wait_is_503(two: tuple[Lab, Gated], tmp_path: Path) -> None:
    lab, gated = two
    running = [gated.ask(f"run{n}") for n in range(2)]
    until(lambda: gated.inside == 2)
    queued = []
    for n in range(3):
        queued.append(gated.ask(f"wait{n}"))
        until(lambda n=n: waiting(lab) == n + 1)  # type: ignore[misc]
    with gated.ask("late") as late:
        response = late.response()
        assert response.status == 503 and int(response.get("retry-after") or 0) >= 1
        assert late.is_closed()
    gated.open()
    for client in (*running, *queued):
        with client:
            assert client.response().body == b"done"
    assert gated.started == ["run0", "run1", "wait0", "wait1", "wait2"]
    assert lab.service.refusals.counts == {"queue_full": 1}
    until(lambda: len((tmp_path / "access.log").read_text().splitlines()) == 7)
    assert [json.loads(line)["status"] for line in (tmp_path / "access.log").read_text().splitlines()].count(503) == 1


def test_105_a_flood_is_answered_and_costs_no_tasks(tmp_path: Path) -> None:
    with make(tmp_path, limit_concurrency=5, queue=20, queue_timeout=30) as (lab, gated):
        clients = [gated.ask() for _ in range(200)]
        until(lambda: gated.inside == 5 and waiting(lab) == 20)
        until(lambda: lab.service.refusals.counts.get("queue_full") == 175)
        assert lab.tasks == 5 and lab.connections <= 200
        gated.open()
        statuses = []
        for client in clients:
            with client:
                statuses.append(client.response().status)
        assert (statuses.count(200), statuses.count(503)) == (25, 175)
        assert lab.service.gate.queue.waits_sum_s > 0 and sum(lab.service.gate.queue.waits) == 20


def test_108_171_who_has_waited_too_long_is_503_and_never_starts(two: tuple[Lab, Gated], tmp_path: Path) -> None:
    lab, gated = two
    running = [gated.ask(f"run{n}") for n in range(2)]
    until(lambda: gated.inside == 2)
    began = time.monotonic()
    with gated.ask("wait", method="POST") as client:
        response = client.response()
        assert response.status == 503 and response.get("retry-after")
        assert 0.2 <= time.monotonic() - began < 2
    gated.open()
    for client in running:
        with client:
            assert client.response().body == b"done"
    assert gated.started == ["run0", "run1"]
    assert lab.service.refusals.counts == {"queue_timeout": 1}
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    (line,) = [line for line in lines if line["status"] == 503]
    assert line["queue_ms"] >= 200 and line["app_ms"] == 0


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_who_leaves_the_queue_does_not_start(tmp_path: Path, leave: str) -> None:
    with make(tmp_path, limit_concurrency=1, queue=3, queue_timeout=30) as (lab, gated):
        with gated.ask("run") as client:
            until(lambda: gated.inside == 1)
            other = gated.ask("gone")
            until(lambda: waiting(lab) == 1)
            other.reset() if leave == "reset" else other.sock.close()
            until(lambda: waiting(lab) == 0)
            gated.open()
            assert client.response().body == b"done"
        assert gated.started == ["run"]
        lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
        assert [line["status"] for line in lines if "gone" in str(line)] == [499]


def test_bodies_come_while_their_requests_wait(two: tuple[Lab, Gated]) -> None:
    lab, gated = two
    running = [gated.ask() for _ in range(2)]
    until(lambda: gated.inside == 2)
    with lab.connect() as client:
        client.send(f"POST {lab.app(echo)} HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab".encode())
        until(lambda: waiting(lab) == 1)
        client.send(b"cd")
        gated.open()
        assert client.response().body == b"abcd"
    for client in running:
        client.sock.close()


def test_a_websocket_that_finds_no_room_is_refused(two: tuple[Lab, Gated]) -> None:
    lab, gated = two
    running = [gated.ask() for _ in range(2)]
    until(lambda: gated.inside == 2)
    with lab.connect() as client:
        fields = "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"
        client.get("/ws", *fields, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
        assert client.response().status == 503
    gated.open()
    for client in running:
        with client:
            assert client.response().status == 200


# ---------------------------------------------------------------------------------------------------------------------


def test_61_a_stop_tells_streams_and_leaves_the_others_alone(log: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, bool]] = []
    slow_began = threading.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        """As sse-starlette does it."""
        await receive()
        await send(start())
        await send(piece(b"event", more=True))
        seen.append(("begin", jumpstart.cancelled()))
        message = await receive()
        seen.append((message["type"], jumpstart.cancelled()))

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        slow_began.set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await receive()  # nobody tells it anything
        seen.append(("slow", jumpstart.cancelled()))
        await answer(b"slow")(scope, receive, send)

    with Lab(timeout_graceful_shutdown=10) as lab, lab.connect() as one, lab.connect() as other:
        one.get(lab.app(stream))
        until(lambda: seen)
        other.get(lab.app(slow))
        assert slow_began.wait(5)
        began = time.monotonic()
        lab.stop()
        response = one.response()
        assert not response.complete and time.monotonic() - began < 2
        assert other.response().body == b"slow"
    assert seen == [("begin", False), ("http.disconnect", True), ("slow", False)]
    assert errors(log) == []


def test_61_a_stream_that_begins_in_a_drain_is_told_too(log: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    lab_stops = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        seen.append("begun")
        await asyncio.to_thread(lab_stops.wait, 5)
        await asyncio.sleep(0.2)
        await send(start())
        await send(piece(b"x", more=True))
        seen.append((await receive())["type"])
        await send(piece())  # a good end all the same

    with Lab(timeout_graceful_shutdown=10) as lab, lab.connect() as client:
        client.get(lab.app(app))
        until(lambda: seen)
        lab.stop()
        lab_stops.set()
        assert client.response().complete
    assert seen == ["begun", "http.disconnect"] and errors(log) == []


def test_61_starlettes_event_streams_end_promptly(log: pytest.LogCaptureFixture) -> None:
    """One that asks whether its client is there, as all examples do."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    closed = threading.Event()

    async def events(request: Request) -> StreamingResponse:
        async def generate() -> Any:
            try:
                while not await request.is_disconnected():
                    yield "data: x\n\n"
                    await asyncio.sleep(0.02)
            finally:
                closed.set()

        return StreamingResponse(generate(), media_type="text/event-stream")

    app: Any = Starlette(routes=[Route("/events", events)])
    with Lab(app=app, timeout_graceful_shutdown=20) as lab, lab.connect() as client:
        client.get("/events")
        client.exactly(200)
        began = time.monotonic()
        lab.stop()
        client.rest()
        assert closed.wait(5) and time.monotonic() - began < 3
    assert errors(log) == []
