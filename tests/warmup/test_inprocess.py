"""Warming an app in this process: every app comes to an end, and every failure is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from flask import Flask
from flask import request as flask_request
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

import jumpstart.context
from jumpstart_warmup import inprocess
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.inprocess import Outcome, WarmupResult, WSGIWarmup, warm_asgi
from jumpstart_warmup.middleware import ObservedASGI, ObservedWSGI
from jumpstart_warmup.observe import Observer


def warm_wsgi(app: Any, requests: list[WarmRequest], **kwargs: Any) -> WarmupResult:
    return WSGIWarmup(app, requests, **kwargs).run()


def warm(app: Any, *requests: WarmRequest, budget_s: float = 5, **kwargs: Any) -> WarmupResult:
    async def main() -> WarmupResult:
        result = await warm_asgi(app, requests or [WarmRequest()], budget_s=budget_s, **kwargs)
        assert asyncio.all_tasks() == {asyncio.current_task()} | inprocess._strays, "a task is left behind"
        return result

    return asyncio.run(main())


async def answer(send: Any, status: int = 200, body: bytes = b"x") -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


# --- ASGI


def test_a_bare_app_sees_a_complete_scope_marked_as_warmup() -> None:
    scopes = []
    bodies = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        bodies.append(await receive())
        assert jumpstart.context.is_warmup()
        jumpstart.context.cold_event("template", "a.html")
        scope["state"]["mine"] = 1
        await answer(send)
        assert await receive() == {"type": "http.disconnect"}

    request = WarmRequest("POST", "/gr%C3%B6%2Fa?q=1", (("Accept", "a/b"),), b"abc", repeat=2)
    told: list[Outcome] = []
    result = warm(app, request, state={"db": 1}, server=("shop.example", 8000), root_path="/api", on_result=told.append)
    assert (result.requests, result.ok, result.failures, result.skipped) == (2, 2, 0, 0)
    assert result.cold_events == 2
    assert result.statuses == {200: 2}
    assert [outcome.cold_events for outcome in told] == [1, 1]
    scope = scopes[1]
    assert scope["state"] == {"db": 1, "mine": 1}
    assert scope["jumpstart.warmup"] is True
    assert scope["path"] == "/api/grö/a"
    assert scope["raw_path"] == b"/api/gr%C3%B6%2Fa"
    assert scope["query_string"] == b"q=1"
    assert scope["headers"] == [
        (b"host", b"shop.example:8000"),
        (b"accept", b"a/b"),
        (b"content-length", b"3"),
        (b"x-jumpstart-warmup", b"1"),
    ]
    assert bodies[0] == {"type": "http.request", "body": b"abc", "more_body": False}
    assert not jumpstart.context.is_warmup()


def test_a_host_header_of_the_request_wins() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        await answer(send, 200 if hosts == [b"a.example"] else 500)

    assert warm(app, WarmRequest(headers=(("Host", "a.example"),))).ok == 1


def test_statuses_are_judged_by_what_was_expected() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, int(scope["path"][1:]))

    result = warm(
        app,
        WarmRequest(path="/404"),
        WarmRequest(path="/500"),
        WarmRequest(path="/404", expect_status=200),
        WarmRequest(path="/503", expect_status=503),
    )
    assert (result.ok, result.failures) == (2, 2)
    assert [failure.error for failure in result.failed] == [
        "answered 500, expected less than 500",
        "answered 404, expected 200",
    ]


def test_what_the_app_raises_is_a_counted_failure() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/before":
            raise ValueError("before")
        if path == "/exit":
            raise SystemExit(3)
        if path == "/cancel":
            raise asyncio.CancelledError
        if path == "/silent":
            return
        if path == "/early":
            await send({"type": "http.response.body"})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/after":
            raise ValueError("after")
        if path == "/twice":
            await send({"type": "http.response.start", "status": 200, "headers": []})

    paths = ["/before", "/after", "/exit", "/cancel", "/silent", "/early", "/twice", "/incomplete"]
    result = warm(app, *(WarmRequest(path=path) for path in paths))
    errors = {failure.path: failure.error for failure in result.failed}
    assert errors == {
        "/before": "ValueError: before",
        "/after": "ValueError: after",
        "/exit": "SystemExit: 3",
        "/cancel": "was cancelled by the app",
        "/silent": "the app returned without a response",
        "/early": "RuntimeError: http.response.body was sent before http.response.start",
        "/twice": "RuntimeError: http.response.start was sent twice",
        "/incomplete": "the app returned before its response was complete",
    }


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad \udcff"), "ValueError: bad \\udcff"),
        (ValueError("\ud800" * 500), "ValueError: \\ud800\\ud800"),
        (Unspeakable(), "Unspeakable: (its text cannot be had: RuntimeError)"),
        (SystemExit("\udcff"), "SystemExit: \\udcff"),
    ],
    ids=["one", "many", "no text", "exit"],
)
def test_what_an_app_raises_can_be_logged_and_sent(error: BaseException, words: str) -> None:
    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        raise error

    def wsgi(environ: Any, start_response: Any) -> Any:
        raise error

    for result in (warm(asgi, WarmRequest()), warm_wsgi(wsgi, [WarmRequest()], budget_s=5)):
        (failure,) = result.failed
        assert failure.error.startswith(words)
        assert len(failure.error) <= 300
        msgspec.json.encode(result)


def test_a_hanging_app_costs_its_timeout_and_no_more() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/hang":
            await asyncio.sleep(60)
        await answer(send)

    begun = time.monotonic()
    result = warm(app, WarmRequest(path="/hang"), WarmRequest(), timeout_s=0.1, grace_s=0.05)
    assert time.monotonic() - begun < 2
    assert (result.ok, result.failures) == (1, 1)
    assert result.failed[0].error == "no response within 0.1 s"


def test_an_app_that_ignores_its_cancellation_is_left_alone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                pass

    result = warm(app, timeout_s=0.05, grace_s=0.05)
    assert result.failures == 1


def test_the_budget_skips_the_rest() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await answer(send)

    result = warm(app, WarmRequest(repeat=1000), budget_s=0.2)
    assert 1 <= result.requests < 10
    assert result.skipped == 1000 - result.requests
    assert result.elapsed_s < 2
    assert warm(app, WarmRequest(repeat=3), budget_s=0).skipped == 3


@pytest.mark.parametrize("kind", ["patient", "busy", "deaf"])
def test_an_endless_stream_does_not_hold_up_the_boot(kind: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            try:
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            except OSError:
                if kind != "deaf":
                    raise
            if kind == "patient":
                await asyncio.sleep(0.01)

    begun = time.monotonic()
    result = warm(app, stream_limit_s=0.1, grace_s=0.05)
    assert time.monotonic() - begun < 2
    assert (result.ok, result.failed) == (1, [])


def test_starlette_streams_sse_and_background_tasks() -> None:
    done: list[str] = []

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(0.005)
        finally:
            done.append("closed")

    async def sse(request: Request) -> StreamingResponse:
        return StreamingResponse(endless(), media_type="text/event-stream")

    async def after() -> None:
        await asyncio.sleep(0.05)
        done.append("background")

    async def background(request: Request) -> PlainTextResponse:
        assert request.state.db == 1
        return PlainTextResponse("ok", background=BackgroundTask(after))

    async def broken(request: Request) -> PlainTextResponse:
        raise ValueError("broken")

    app = Starlette(routes=[Route("/sse", sse), Route("/background", background), Route("/broken", broken)])
    result = warm(
        app,
        *(WarmRequest(path=path) for path in ("/sse", "/background", "/broken")),
        state={"db": 1},
        stream_limit_s=0.1,
    )
    assert [failure.path for failure in result.failed] == ["/broken"]
    assert result.failed[0].error == "ValueError: broken"
    assert sorted(done) == ["background", "closed"]


def test_fastapi_with_a_body() -> None:
    app = FastAPI()

    @app.post("/items")
    async def items(item: dict[str, int]) -> JSONResponse:
        return JSONResponse(item, status_code=201)

    request = WarmRequest("POST", "/items", (("content-type", "application/json"),), b'{"a": 1}', expect_status=201)
    assert warm(app, request).ok == 1


def test_cancelling_the_warmup_cancels_the_app() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await warm_asgi(app, [WarmRequest()], budget_s=30)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["cancelled"]


def test_the_first_failures_are_told_and_all_are_counted() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("x" * 1000)

    def listener(outcome: Outcome) -> None:
        raise RuntimeError("harmless")

    result = warm(app, WarmRequest(repeat=30), on_result=listener)
    assert result.failures == 30
    assert len(result.failed) == 20
    assert len(result.failed[0].error) == 300


def test_the_observer_keeps_warmup_apart_and_shares_the_context() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        jumpstart.context.cold_event("template", "a.html")
        await answer(send)

    observer = Observer()
    result = warm(ObservedASGI(app, observer))
    snapshot = observer.snapshot()
    assert snapshot.routes == {}
    assert snapshot.warmup["GET /"].cold_events == {"template": 1}
    assert result.cold_events == 1


# --- WSGI


def test_a_bare_wsgi_app_sees_a_complete_environ() -> None:
    environs: list[dict[str, Any]] = []
    closed: list[int] = []

    class Body:
        def __iter__(self) -> Iterator[bytes]:
            yield b"a"
            assert jumpstart.context.is_warmup()
            yield b"b"

        def close(self) -> None:
            closed.append(1)

    def app(environ: Any, start_response: Any) -> Body:
        environs.append(environ)
        assert environ["wsgi.input"].read() == b"abc"
        start_response("200 OK", [])(b"early")
        return Body()

    request = WarmRequest("POST", "/gr%C3%B6?q=1", (("Accept", "a"), ("Content-Type", "b/c")), b"abc")
    result = warm_wsgi(app, [request], budget_s=5, server=("shop.example", 80), root_path="/api")
    assert (result.ok, closed) == (1, [1])
    environ = environs[0]
    assert environ["PATH_INFO"] == "/grö".encode().decode("latin-1")
    assert environ["SCRIPT_NAME"] == "/api"
    assert environ["HTTP_HOST"] == "shop.example"
    assert environ["CONTENT_TYPE"] == "b/c"
    assert environ["CONTENT_LENGTH"] == "3"
    assert environ["HTTP_ACCEPT"] == "a"
    assert environ["HTTP_X_JUMPSTART_WARMUP"] == "1"
    assert environ["jumpstart.warmup"] is True
    assert not jumpstart.context.is_warmup()


def test_wsgi_apps_pass_the_validator_of_the_standard_library() -> None:
    from wsgiref.validate import validator

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"x"]

    result = warm_wsgi(validator(app), [WarmRequest(path="/a")], budget_s=5)
    assert result.failed == []


def test_wsgi_failures_are_counted_and_close_is_called_once() -> None:
    closed: list[str] = []

    class Body:
        def __init__(self, path: str) -> None:
            self.path = path
            self.left = 2

        def __iter__(self) -> Body:
            return self

        def __next__(self) -> bytes:
            self.left -= 1
            if self.path == "/mid" and self.left == 0:
                raise ValueError("mid")
            if self.left < 0 and self.path != "/endless":
                raise StopIteration
            return b"x"

        def close(self) -> None:
            closed.append(self.path)
            if self.path == "/close":
                raise ValueError("close")

    def app(environ: Any, start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if path == "/before":
            raise SystemExit(1)
        if path == "/silent":
            return []
        if path == "/nostart":
            return Body(path)
        start_response("503 No" if path == "/503" else "200 OK", [])
        if path == "/twice":
            start_response("200 OK", [])
        if path == "/text":
            return ["text"]
        return Body(path)

    paths = ["/before", "/silent", "/nostart", "/twice", "/text", "/mid", "/close", "/503", "/endless", "/ok"]
    result = warm_wsgi(app, [WarmRequest(path=path) for path in paths], budget_s=5)
    assert {failure.path: failure.error for failure in result.failed} == {
        "/before": "SystemExit: 1",
        "/silent": "the app ended without calling start_response",
        "/nostart": "AssertionError: the app sent a chunk before it called start_response",
        "/twice": "AssertionError: start_response was called twice without exc_info",
        "/text": "TypeError: the app sent str, not bytes",
        "/mid": "ValueError: mid",
        "/close": "ValueError: close",
        "/503": "answered 503, expected less than 500",
    }
    assert result.ok == 2
    assert closed == ["/nostart", "/mid", "/close", "/503", "/endless", "/ok"]


def test_a_wsgi_app_may_replace_its_headers_with_exc_info_until_it_has_sent() -> None:
    import sys

    def app(environ: Any, start_response: Any) -> list[bytes]:
        write = start_response("200 OK", [])
        if environ["PATH_INFO"] == "/late":
            write(b"x")
        try:
            raise ValueError("boom")
        except ValueError:
            start_response("418 No", [], sys.exc_info())
        return [b"x"]

    result = warm_wsgi(app, [WarmRequest(expect_status=418), WarmRequest(path="/late")], budget_s=5)
    assert result.ok == 1
    assert result.failed[0].error == "ValueError: boom"


def test_the_wsgi_budget_skips_the_rest() -> None:
    now = [0.0]

    def app(environ: Any, start_response: Any) -> list[bytes]:
        now[0] += 1
        start_response("200 OK", [])
        return [b"x"]

    result = warm_wsgi(app, [WarmRequest(repeat=10)], budget_s=3, clock=lambda: now[0])
    assert (result.requests, result.skipped, result.elapsed_s) == (3, 7, 3)


def test_flask_is_warmed_and_knows() -> None:
    app = Flask("shop")

    @app.post("/items/<int:number>")
    def items(number: int) -> Any:
        assert jumpstart.context.is_warmup()
        jumpstart.context.cold_event("template", "a.html")
        return {"n": number, "got": flask_request.get_json()}, 201

    observer = Observer()
    request = WarmRequest("POST", "/items/3", (("content-type", "application/json"),), b"{}", expect_status=201)
    result = warm_wsgi(ObservedWSGI(app, observer), [request], budget_s=5)
    assert result.failed == []
    assert result.cold_events == 1
    assert list(observer.snapshot().warmup) == ["POST /items/<int:number>"]


def test_a_wsgi_handler_is_told_what_is_left_of_budget_and_timeout() -> None:
    seen: list[tuple[float | None, float | None]] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        before = jumpstart.deadline()
        seen.append((before, jumpstart.extend_deadline(60)))
        while environ["PATH_INFO"] == "/wait" and not jumpstart.cancelled():
            time.sleep(0.01)
        start_response("200 OK", [])
        return [b"x"]

    requests = [WarmRequest(), WarmRequest(path="/wait"), WarmRequest(path="/skipped")]
    result = warm_wsgi(app, requests, budget_s=0.5)
    assert (result.ok, result.skipped) == (2, 1)
    assert all(0 < before <= 0.5 and extended <= before for before, extended in seen if before and extended)
    assert len(seen) == 2
    assert 0.45 < result.elapsed_s < 2
    seen.clear()
    warm_wsgi(app, [WarmRequest()], budget_s=60, timeout_s=2)
    assert seen[0][0] is not None and 1 < seen[0][0] <= 2


def test_an_asgi_app_is_told_what_is_left_and_when_nobody_waits_any_more() -> None:
    seen: list[float | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(jumpstart.deadline())
        while scope["path"] == "/wait" and not jumpstart.cancelled():  # noqa: ASYNC110  # as an app would
            await asyncio.sleep(0.01)
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not jumpstart.cancelled():
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            seen.append(None)
            return
        await answer(send)
        assert not jumpstart.cancelled() or scope["path"] == "/wait", "what follows the response is part of it"

    result = warm(app, WarmRequest(), WarmRequest(path="/stream"), timeout_s=3)
    assert (result.ok, result.failures) == (2, 0)
    assert seen[2] is None and all(each is not None and 2 < each <= 3 for each in seen[:2])
    result = warm(app, WarmRequest(path="/wait"), budget_s=0.3)
    assert result.elapsed_s < 2


def test_what_blocks_is_left_counted_and_changes_nothing_afterwards() -> None:
    gate, entered = threading.Event(), threading.Event()
    noted: list[Outcome] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        if environ["PATH_INFO"] == "/blocks":
            entered.set()
            assert gate.wait(10)
            assert jumpstart.cancelled()
        start_response("200 OK", [])
        return [b"x"]

    requests = [WarmRequest(), WarmRequest(path="/blocks"), WarmRequest(path="/rest", repeat=3)]
    warmup = WSGIWarmup(app, requests, budget_s=60, on_result=noted.append)
    thread = threading.Thread(target=warmup.run)
    thread.start()
    assert entered.wait(10)
    result = warmup.leave()
    assert (result.requests, result.ok, result.failures, result.skipped) == (2, 1, 1, 3)
    assert (result.failed[0].method, result.failed[0].path) == ("GET", "/blocks")
    before = msgspec.json.encode(result)
    gate.set()
    thread.join(10)
    assert msgspec.json.encode(warmup.leave()) == before
    assert [(each.request.path, each.is_late) for each in noted] == [("/", False), ("/blocks", True)]
