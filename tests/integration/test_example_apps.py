"""The example shop and the apps that other tests serve answer right without our server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jumpstart_server.config import load_settings
from jumpstart_warmup.corpus import read_requests

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples" / "shop"
APPS = ROOT / "tests" / "apps"
WARM_UP: list[dict[str, Any]] = tomllib.loads((SHOP / "warm.toml").read_text())["request"]


@contextlib.contextmanager
def app_dir(folder: Path) -> Iterator[None]:
    """As ``--app-dir``: import from *folder*; forget the modules from there at the end."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]


@contextlib.contextmanager
def running_backend() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, str(SHOP / "backend.py"), "--port", "0", "--watch-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process, f"127.0.0.1:{int(process.stdout.readline())}"
            process.stdin.close()
            process.wait(10)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    with running_backend() as (_, address), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_BACKEND", address)
        yield address


class Shop:
    """Both twins, asked in the same way."""

    def __init__(self) -> None:
        self.starlette = importlib.import_module("shop.web").app
        self.flask = importlib.import_module("shop.flask_web").app

    def ask_starlette(self, request: dict[str, Any]) -> httpx.Response:
        return ask_asgi(self.starlette, request)

    def ask_flask(self, request: dict[str, Any]) -> httpx.Response:
        transport = httpx.WSGITransport(self.flask)
        with httpx.Client(transport=transport, base_url="http://shop.example") as client:
            return client.request(*arguments(request), headers=request.get("headers"), content=request.get("body"))


def arguments(request: dict[str, Any]) -> tuple[str, str]:
    return request.get("method", "GET"), request["path"]


def ask_asgi(app: Any, request: dict[str, Any]) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
            return await client.request(
                *arguments(request), headers=request.get("headers"), content=request.get("body")
            )

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def shop(backend: str) -> Iterator[Shop]:
    with app_dir(SHOP):
        yield Shop()


@pytest.mark.parametrize("request_", WARM_UP, ids=lambda request: " ".join(arguments(request)))
def test_the_twins_answer_every_warm_up_request_alike(shop: Shop, request_: dict[str, Any]) -> None:
    starlette, flask = shop.ask_starlette(request_), shop.ask_flask(request_)

    assert starlette.status_code == flask.status_code == request_.get("expect_status", 200)
    assert starlette.headers.get("content-type") == flask.headers["content-type"] or starlette.status_code == 303
    assert starlette.headers.get("location") == flask.headers.get("location")
    if flask.headers["content-type"] == "application/json":
        assert starlette.json() == flask.json()
    elif starlette.status_code == 200:
        assert starlette.content == flask.content
        assert starlette.content


def test_warm_up_asks_every_route(shop: Shop) -> None:
    asked = {(method, path.partition("?")[0]) for method, path in map(arguments, WARM_UP)}

    for route in shop.starlette.routes:
        for method in route.methods - {"HEAD"}:
            matching = [path for asked_method, path in asked if asked_method == method and route.path_regex.match(path)]
            assert matching, f"{method} {route.path} is not in warm.toml"


def test_its_files_are_what_jumpstart_reads() -> None:
    settings = load_settings({}, {}, config_file=str(SHOP / "jumpstart.toml"))

    assert settings.target == "shop.web:app"
    assert Path(settings.app.app_dir).resolve() == SHOP
    assert settings.warm.lru_cache == ("shop.catalog:*",)
    assert [request.path for request in read_requests(Path(settings.tenant.warmup))] == [r["path"] for r in WARM_UP]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/products/999", 404, "We sell nothing with the number"),
        ("/products/LAM-0009", 200, "Harbour lamp"),
        ("/products?kind=spoon", 404, "We sell no spoons"),
        ("/?region=mars", 404, "We do not deliver to"),
        ("/api/prices/mars", 404, "We do not deliver to"),
        ("/invoice/17", 404, "they look like 2024-00017"),
        ("/search?q=medow+%22clock%22", 200, "We looked for <em>meadow clock</em>"),
        ("/search?q=%3Cscript%3E", 200, "0 found for “&lt;script&gt;”"),
        ("/products/17", 200, '<a href="/about">care</a>'),
        ("/chat?n=0", 400, "a whole number from 1 to 2000 is allowed"),
        ("/chat?n=3&delay_ms=6000", 400, "a whole number from 0 to 5000 is allowed"),
    ],
)
def test_the_twins_answer_odd_requests_alike(shop: Shop, path: str, status: int, text: str) -> None:
    for answer in (shop.ask_starlette({"path": path}), shop.ask_flask({"path": path})):
        assert answer.status_code == status
        assert text in answer.text


def test_what_is_put_into_the_cart_is_in_the_cart(shop: Shop) -> None:
    for ask in (shop.ask_starlette, shop.ask_flask):
        added = ask(
            {
                "method": "POST",
                "path": "/cart",
                "headers": {"Content-Type": "application/x-www-form-urlencoded", "Cookie": "cart=3x2"},
                "body": "product=7&count=2",
            }
        )
        assert added.cookies["cart"] == "3x2.7x2"
        shown = ask({"path": "/cart", "headers": {"Cookie": "cart=3x2.7x2"}}).text
        assert "Granite mug" in shown
        assert "Saffron mug" in shown


def test_the_chat_streams_as_many_tokens_as_asked(shop: Shop) -> None:
    chat_only = importlib.import_module("shop.chat").app
    request = {"path": "/chat?n=5&delay_ms=0"}
    for answer in (shop.ask_starlette(request), shop.ask_flask(request), ask_asgi(chat_only, request)):
        events = answer.text.strip().split("\n\n")
        assert len(events) == 6
        assert events[-1] == 'event: done\ndata: {"tokens": 5}'


@pytest.mark.parametrize("module", ["web", "flask_web"])
def test_without_its_back_end_the_shop_says_what_to_start(module: str) -> None:
    script = f"""
import asyncio, httpx
from shop.{module} import app
async def ask():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop.example") as client:
        return await client.get("/")
if {module!r} == "web":
    answer = asyncio.run(ask())
else:
    answer = httpx.Client(transport=httpx.WSGITransport(app), base_url="http://shop.example").get("/")
print(answer.status_code, answer.text)
"""
    output = run_python(SHOP, "-c", script, SHOP_BACKEND="127.0.0.1:1").stdout

    assert output.startswith("503 ")
    assert "Start it with `python examples/shop/backend.py`, or set SHOP_BACKEND=HOST:PORT" in output


def test_the_back_end_ends_on_sigterm_and_with_its_parent() -> None:
    with running_backend() as (process, address):
        assert httpx.get(f"http://{address}/config").json()["title"] == "Harbour & Meadow"
        assert httpx.get(f"http://{address}/discovery?name=stock").json()["name"] == "stock"
        assert httpx.get(f"http://{address}/else").status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    with running_backend() as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def run_python(folder: Path, *argv: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with *folder* as its app dir, the way a server would import from there."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), **environ}
    done = subprocess.run([sys.executable, *argv], env=environ, capture_output=True, text=True, timeout=60)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def test_the_flask_app() -> None:
    with app_dir(APPS / "flask_app"):
        app = importlib.import_module("flask_site").create_app()
        client = app.test_client()

        assert "Ada: " in client.get("/").text
        assert "<p>by Alan</p>" in client.get("/books/4").text
        assert client.get("/books/99").status_code == 404
        assert client.get("/lazy").json == {"mean": "1/2"}
        assert client.post("/echo", data=b"body").data == b"body"
        assert client.get("/crash").status_code == 500
        app.extensions["engine"].dispose()


def test_the_flask_app_with_a_database_file(tmp_path: Path) -> None:
    script = "from flask_site import app; print(app.test_client().get('/').text)"
    for _ in "new", "there already":
        output = run_python(APPS / "flask_app", "-c", script, FLASK_APP_DB=str(tmp_path / "site.db")).stdout
        assert output.count("<li>") == 3


def test_the_fastapi_app() -> None:
    script = """
from fastapi.testclient import TestClient
from fastapi_site import app
with TestClient(app) as client:
    assert client.get("/").json() == {"greeting": "hello from lifespan"}
    assert [item["name"] for item in client.get("/items/").json()] == ["mug", "lamp"]
    assert client.get("/items/2").json()["price"] == 42
    assert client.get("/items/3").status_code == 404
    assert client.post("/items/", json={"name": "clock", "price": 9}).json()["id"] == 3
    assert client.post("/items/", json={"name": "", "price": 9}).status_code == 422
    assert client.get("/thread").json()["ledgers"] == 0
    assert client.get("/lazy").json() == {"half": "0.5", "third": "1/3"}
    assert client.get("/stream/2").text == "line 0\\nline 1\\n"
    assert client.get("/docs").status_code == 200
    assert "/items/{id}" in client.get("/openapi.json").json()["paths"]
    with client.websocket_connect("/ws") as websocket:
        websocket.send_text("hi")
        assert websocket.receive_text() == "echo: hi"
"""
    run_python(APPS / "fastapi_app", "-c", script)


def test_the_starlette_app() -> None:
    script = """
import os
from starlette.testclient import TestClient
from starlette_site import app
with TestClient(app) as client:
    assert client.get("/").json() == {"pid": os.getpid(), "started_in": os.getpid()}
    assert client.get("/lazy").text == "blanket"
    assert client.post("/background?name=x").status_code == 202
    assert client.get("/finished").json() == ["x"]
    assert client.get("/events?n=2").text == "data: 0\\n\\ndata: 1\\n\\n"
"""
    run_python(APPS / "starlette_app", "-c", script)


def test_the_django_app(tmp_path: Path) -> None:
    database = str(tmp_path / "site.db")
    run_python(APPS / "django_app", str(APPS / "django_app" / "prepare.py"), database)
    script = """
import asyncio, json
import project.wsgi, project.asgi
from django.test import AsyncClient, Client
client = Client()
assert "Apples</a>" in client.get("/").text
assert "<p>The end.</p>" in client.get("/notes/1/").text
assert client.get("/notes/99/").status_code == 404
assert client.get("/lazy/").json() == {"mean": "1.5"}
assert client.get("/language/").json() == {"language": "en", "yes": "yes", "monday": "Monday"}
assert client.get("/language/", headers={"accept-language": "de"}).json()["monday"] == "Montag"
assert b"".join(client.get("/stream/2/")) == b"line 0\\nline 1\\n"
assert client.get("/admin/").status_code == 302
assert 'name="password"' in client.get("/admin/login/").text
assert client.login(username="admin", password="admin")
assert "Plums" in client.get("/admin/pages/note/").text.title()
assert json.loads(asyncio.run(AsyncClient().get("/async/")).content) == {"notes": 3}
"""
    run_python(APPS / "django_app", "-c", script, DJANGO_DB=database)


BARE = [
    ("/", "hello\n"),
    ("/pid", str(os.getpid())),
    ("/sleep?s=0.01", "slept\n"),
    ("/spin?s=0.01", "spun\n"),
    ("/lazy", "lazily imported"),
    ("/warmup", "False"),
    ("/stream/2", "chunk 0\nchunk 1\n"),
]


def test_the_bare_wsgi_app() -> None:
    with app_dir(APPS / "wsgi_bare"):
        app = importlib.import_module("wsgi_app").make_app()
        with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://bare.example") as client:
            for path, text in BARE:
                assert client.get(path).text == text
            assert int(client.get("/threads").text) >= 1
            assert client.get("/thread").text == "MainThread"
            assert client.post("/echo", content=b"body").text == "body"
            assert client.get("/else").status_code == 404
            with pytest.raises(RuntimeError, match="crashed on purpose"):
                client.get("/crash")


def test_the_bare_asgi_app() -> None:
    with app_dir(APPS / "asgi_bare"):
        app = importlib.import_module("asgi_app").make_app()
        for path, text in BARE:
            assert ask_asgi(app, {"path": path}).text == text
        assert int(ask_asgi(app, {"path": "/threads"}).text) >= 1
        assert ask_asgi(app, {"path": "/thread"}).text == "MainThread"
        assert ask_asgi(app, {"method": "POST", "path": "/echo", "body": b"body"}).text == "body"
        assert ask_asgi(app, {"path": "/else"}).status_code == 404
        with pytest.raises(RuntimeError, match="crashed on purpose"):
            ask_asgi(app, {"path": "/crash"})


@pytest.mark.parametrize(("folder", "module"), [("wsgi_bare", "wsgi_app"), ("asgi_bare", "asgi_app")])
def test_the_bare_apps_can_end_their_process(folder: str, module: str) -> None:
    arguments_ = "'/exit', {}, None"
    call = f"asyncio.run(answer({arguments_}))" if folder == "asgi_bare" else f"answer({arguments_})"
    script = f"import asyncio; from {module} import answer; {call}"

    assert run_python(APPS / folder, "-c", script, check=False).returncode == 1


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("raises", 1, "RuntimeError: the database password is missing (raised on purpose)"),
        ("exits", 7, ""),
        ("no_app", 1, "ImportError: cannot import name 'app' from 'no_app'"),
    ],
)
def test_broken_apps_break_as_they_say(module: str, code: int, message: str) -> None:
    done = run_python(APPS / "broken", "-c", f"from {module} import app", check=False)

    assert done.returncode == code
    assert message in done.stderr


def test_the_syntax_error_is_one(tmp_path: Path) -> None:
    shutil.copy(APPS / "broken" / "syntax_error.py.txt", tmp_path / "syntax_error.py")

    assert "SyntaxError" in run_python(tmp_path, "-c", "import syntax_error", check=False).stderr


def test_apps_that_are_not_fit_for_a_fork_still_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = """
import threading, starts_thread, opens_socket, makes_loop
print([thread.name for thread in threading.enumerate()], opens_socket.connection.fileno() > 0)
makes_loop.loop.close()
"""
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        output = run_python(APPS / "broken", "-c", script, OPENS_SOCKET_TO=address).stdout

    assert output == "['MainThread', 'ticker-of-the-app'] True\n"


def test_start_ups_that_fail() -> None:
    with app_dir(APPS / "broken"):
        module = importlib.import_module("startup_fails")

    async def start(app: Any) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        with contextlib.suppress(RuntimeError, TimeoutError):
            await asyncio.wait_for(app({"type": "lifespan"}, receive, send), 0.05)
        return sent

    for app, message in ((module.app, "failed on purpose"), (module.raising, "raised on purpose")):
        assert message in json.dumps(asyncio.run(start(app)))
    assert asyncio.run(start(module.hanging)) == []
