"""
Applications of four frameworks, unchanged, under two workers of sixteen threads: cold, and warm after a restart.

Each test visits every route from many clients at once, then starts the same server on the same host again: what the
first one learnt is there before the second accepts anything, so that no request meets a cold event.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest
import websockets.asyncio.client

from tests.integration.server import APPS, Serve, Server, in_parallel, make_flask_db, wait_until

pytestmark = pytest.mark.slow

CLIENTS = 12  # at once
OPTIONS = ("-w", "2", "--threads", "16")

Check = Callable[[httpx.Response], bool]


def ok(text: str) -> Check:
    return lambda answer: answer.status_code == 200 and text in answer.text


def same(value: object) -> Check:
    return lambda answer: answer.status_code == 200 and answer.json() == value


def status_of(code: int) -> Check:
    return lambda answer: answer.status_code == code


def visit(server: Server, routes: Mapping[str, Check]) -> None:
    """GET every route from several clients at once, each in an order of its own, on a connection that is kept."""
    paths = list(routes)

    def client_of(number: int) -> None:
        start = number % len(paths)
        with server.client() as client:
            for path in paths[start:] + paths[:start]:
                answer = client.get(path)
                assert routes[path](answer), f"{path}: {answer.status_code} {answer.text[:300]}"

    in_parallel(CLIENTS, client_of)


def cold_then_warm(
    serve: Serve, target: str, folder: Path, use: Callable[[Server], None], env: Mapping[str, str] | None = None
) -> None:
    """Start a server and *use* it, then do the same again on the same host, where nothing may be cold any more."""
    with serve(target, *OPTIONS, app_dir=folder, env=env) as server:
        status = server.status()
        assert (status["start_method"], status["records_used"]) == ("fork", 0)
        use(server)
        assert server.status()["restarts"] == 0
        assert server.status()["cold_events"] > 0  # or the second half says nothing
    with serve(target, *OPTIONS, app_dir=folder, env=env) as server:
        status = server.status()
        assert status["records_used"] > 0
        assert status["refusals"] == []
        use(server)
        status = server.status()
        assert status["restarts"] == 0
        cold = {route: stats["cold_names"] for route, stats in status["routes"].items() if stats["cold_requests"]}
        assert cold == {}
        assert (status["cold_events"], status["warm_coverage"]) == (0, 1.0)


def test_flask(serve: Serve, tmp_path: Path) -> None:
    """With Jinja2 templates, SQLAlchemy and an import inside a handler."""
    folder = APPS / "flask_app"
    env = make_flask_db(tmp_path / "site.db")

    def use(server: Server) -> None:
        visit(
            server,
            {
                "/": ok("Ada: "),
                "/books/4": ok("<p>by Alan</p>"),
                "/books/99": status_of(404),
                "/lazy": same({"mean": "1/2"}),
            },
        )
        body = b"x" * 100_000
        posted = in_parallel(CLIENTS, lambda _: server.request("POST", "/echo", content=body).content)
        assert posted == [body] * CLIENTS

    cold_then_warm(serve, "flask_site:app", folder, use, env)


DJANGO: dict[str, Check] = {
    "/": ok("Apples</a>"),
    "/notes/1/": ok("<p>The end.</p>"),
    "/notes/99/": status_of(404),
    "/lazy/": same({"mean": "1.5"}),
    "/language/": same({"language": "en", "yes": "yes", "monday": "Monday"}),
    "/async/": same({"notes": 3}),
    "/stream/3": status_of(301),
    "/stream/3/": ok("line 0\nline 1\nline 2\n"),
    "/admin/": status_of(302),
    "/admin/login/": ok('name="password"'),
}


@pytest.fixture(scope="module")
def django_db(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("django") / "site.db")
    subprocess.run([sys.executable, str(APPS / "django_app" / "prepare.py"), path], check=True)
    return path


@pytest.mark.parametrize("interface", ["wsgi", "asgi"])
def test_django(serve: Serve, django_db: str, interface: str) -> None:
    """With templates, sessions, translations, an async view and its admin."""

    def use(server: Server) -> None:
        visit(server, DJANGO)
        with server.client() as client:
            page = client.get("/admin/login/")
            token = page.cookies["csrftoken"]
            form = {"username": "admin", "password": "admin", "csrfmiddlewaretoken": token, "next": "/admin/"}
            assert client.post("/admin/login/", data=form).headers["location"] == "/admin/"

    cold_then_warm(serve, f"project.{interface}:application", APPS / "django_app", use, {"DJANGO_DB": django_db})


def test_fastapi(serve: Serve) -> None:
    """With documentation, dependencies that yield, threads, streams and WebSockets."""

    async def talk(url: str) -> list[str | bytes]:
        async def one(number: int) -> str | bytes:
            async with websockets.asyncio.client.connect(url, proxy=None) as socket:
                await socket.send(f"hi {number}")
                return await socket.recv()

        return await asyncio.gather(*(one(number) for number in range(CLIENTS)))

    def use(server: Server) -> None:
        visit(
            server,
            {
                "/": same({"greeting": "hello from lifespan"}),
                "/items/": ok('"name":"mug"'),
                "/items/2": ok('"price":42'),
                "/items/3": status_of(404),
                "/items/x": status_of(422),
                "/lazy": same({"half": "0.5", "third": "1/3"}),
                "/stream/3": ok("line 0\nline 1\nline 2\n"),
                "/thread": ok("AnyIO worker thread"),
                "/docs": ok("swagger-ui"),
                "/openapi.json": ok('"/items/{id}"'),
            },
        )
        created = in_parallel(CLIENTS, lambda _: server.request("POST", "/items/", json={"name": "clock", "price": 9}))
        assert {(answer.status_code, answer.json()["id"]) for answer in created} == {(201, 3)}
        assert server.request("POST", "/items/", json={"name": "", "price": 9}).status_code == 422
        answers = asyncio.run(talk(server.url.replace("http", "ws") + "/ws"))
        assert answers == [f"echo: hi {number}" for number in range(CLIENTS)]
        # Each dependency that was opened has been closed again, in whichever worker is asked.
        assert {server.get("/thread").json()["ledgers"] for _ in range(6)} == {0}

    cold_then_warm(serve, "fastapi_site:app", APPS / "fastapi_app", use)


def test_starlette(serve: Serve) -> None:
    """With lifespan state, server-sent events and background tasks."""

    def started_where_it_serves(answer: httpx.Response) -> bool:
        state: dict[str, int] = answer.json()
        return state["pid"] == state["started_in"]

    def use(server: Server) -> None:
        visit(
            server,
            {"/": started_where_it_serves, "/lazy": ok("blanket"), "/events?n=2": ok("data: 0\n\ndata: 1\n\n")},
        )
        with server.client() as client, client.stream("GET", "/events?n=3&delay=0.05") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert [line for line in answer.iter_lines() if line] == ["data: 0", "data: 1", "data: 2"]
        with server.client() as client:  # one connection, hence one worker
            assert client.post("/background?name=x").status_code == 202
            wait_until(lambda: "x" in json.loads(client.get("/finished").text), why="the background task has run")

    cold_then_warm(serve, "starlette_site:app", APPS / "starlette_app", use)
