"""Golden requests: safe ones, asked through the drivers, of whose answers nothing but status and shape is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from jumpstart.profile import Golden
from jumpstart.records import Record
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.golden import Listener, golden_requests, settled
from jumpstart_warmup.inprocess import WSGIWarmup, warm_asgi
from jumpstart_warmup.middleware import ASGIApp, StartResponse, WSGIApp
from jumpstart_warmup.routes import Environ
from jumpstart_warmup.shapes import Answer, shape_of

REQUESTS = [WarmRequest(path="/a"), WarmRequest(path="/b", weight=7), WarmRequest(path="/raises")]
HTML = [("Content-Type", "text/html")]


def wsgi_app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    assert environ["jumpstart.warmup"] is True, "marked as warm-up requests are"
    if environ["PATH_INFO"] == "/raises":
        raise RuntimeError("no")
    start_response("200 OK", HTML)
    return [b"<p>", environ["PATH_INFO"].encode(), b"</p>"]


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    assert scope["jumpstart.warmup"] is True
    if scope["path"] == "/raises":
        raise RuntimeError("no")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
    for part in (b"<p>", scope["path"].encode()):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"</p>"})


def by_wsgi(app: WSGIApp, listener: Listener) -> None:
    WSGIWarmup(listener.wsgi(app), REQUESTS, budget_s=10, on_result=listener.heard).run()


def by_asgi(app: ASGIApp, listener: Listener) -> None:
    asyncio.run(warm_asgi(listener.asgi(app), REQUESTS, budget_s=10, on_result=listener.heard))


@pytest.mark.parametrize("interface", ["wsgi", "asgi"])
def test_both_drivers_are_listened_to(interface: str) -> None:
    listener = Listener()
    if interface == "wsgi":
        by_wsgi(wsgi_app, listener)
    else:
        by_asgi(asgi_app, listener)
    answers = listener.answers()
    shape = shape_of(200, HTML, b"<p>/x</p>")
    assert [(each.name, each.status, each.shape, each.weight) for each in answers] == [
        ("GET /a", 200, shape, 1),
        ("GET /b", 200, shape, 7),
        ("GET /raises", 0, "", 1),
    ]
    assert all(each.elapsed_s > 0 for each in answers)


@pytest.mark.parametrize("raises", [False, True])
def test_a_500_is_an_answer(raises: bool) -> None:
    def fails(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("500 Internal Server Error", HTML)
        yield b"<p>"
        if raises:
            raise RuntimeError("half of it")

    async def fails_too(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<p>", "more_body": raises})
        raise RuntimeError("as Starlette does when it has answered")

    wsgi, asgi = Listener(), Listener()
    by_wsgi(fails, wsgi)
    by_asgi(fails_too, asgi)
    assert {(each.status, each.shape) for each in (*wsgi.answers(), *asgi.answers())} == {
        (500, "" if raises else shape_of(500, HTML, b"<p>"))
    }


def test_a_stream_has_one_shape_however_much_of_it_came() -> None:
    def shapes(chunks: int) -> set[str]:
        def streams(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            start_response("200 OK", HTML)
            yield b"<p>"
            yield from [b"<b>x</b>"] * 5

        async def streams_too(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
            for part in (b"<p>", *[b"<b>x</b>"] * 5):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        wsgi, asgi = Listener(), Listener()
        limits: dict[str, Any] = {"budget_s": 10, "stream_chunks": chunks}
        WSGIWarmup(wsgi.wsgi(streams), REQUESTS[:1], on_result=wsgi.heard, **limits).run()
        asyncio.run(warm_asgi(asgi.asgi(streams_too), REQUESTS[:1], on_result=asgi.heard, **limits))
        return {each.shape for each in (*wsgi.answers(), *asgi.answers())}

    assert shapes(1) == shapes(3) == {shape_of(200, HTML, b"", is_whole=False)}
    assert shapes(100) == {shape_of(200, HTML, b"<p><b></b>")}


def test_what_was_left_is_no_answer_and_what_is_forgotten_leaves_nothing_behind() -> None:
    listener = Listener()
    by_wsgi(wsgi_app, listener)
    outcome = listener._heard[0][0]
    listener.heard(outcome, is_late=True)
    listener.forget()
    assert listener.answers()[-1].shape == "" and len(listener.answers()) == len(REQUESTS) + 1
    assert listener.answered == {"GET /a", "GET /b"}


def record(target: str, method: str = "GET", **headers: str) -> Record:
    pairs = [[name.replace("_", "-"), value] for name, value in headers.items()]
    data = {"route": target, "method": method, "target": target, "headers": pairs}
    return Record(key=f"{method} {target}", data=data)


def test_only_what_is_safe_is_golden_and_nothing_is_compressed() -> None:
    section = [
        record("/a", accept_encoding="gzip", accept="text/html"),
        record("/pay", "POST"),
        record("/reset?token=abc"),
        record("/logout"),
        record("/long" + "x" * 1000),
        Record(key="GET /forged", data={"route": "/", "method": "DELETE", "target": "/", "headers": []}),
    ]
    assert golden_requests(section) == [WarmRequest(path="/a", headers=(("accept", "text/html"),))]


def test_each_route_has_its_turn_and_there_are_not_too_many() -> None:
    section = [record(f"/a{chr(97 + n)}") for n in range(20)]
    assert len(golden_requests(section, 7)) == 7


def test_what_an_app_answers_in_two_ways_is_not_golden() -> None:
    def answer(name: str, status: int = 200, shape: str = "0" * 32) -> Answer:
        return Answer(name=name, status=status, shape=shape)

    first = [answer("GET /a"), answer("GET /b"), answer("GET /c", 500), answer("GET /d"), answer("GET /e", 0, "")]
    second = [answer("GET /a"), answer("GET /b", shape="1" * 32), answer("GET /c", 500), answer("GET /e", 0, "")]
    assert settled(first, second) == [Golden(request="GET /a", status=200, shape="0" * 32)]
