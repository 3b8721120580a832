"""What users send stays with them: no profile and no warm-start cache holds any of it."""

from __future__ import annotations

import base64
import secrets
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from jumpstart.boot import BootSettings
from jumpstart.warmstart import WarmStartCache
from tests.integration.server import Serve, Server, run_command, wait_until, write_app

pytestmark = pytest.mark.slow

# What apps do with what they are sent, in the ways that recorders watch: patterns, templates, caches, lazy imports.
SHARED = """
import functools, re
import jinja2
import jumpstart

templates = jinja2.Environment(
    loader=jinja2.DictLoader({"page.html": "Hello {{ name }}", "late.html": "Bye {{ name }}"}), autoescape=True
)

@functools.lru_cache
def parsed(text):
    return text.split("&")

@jumpstart.cached(ttl=60)
def profile_of(token):
    return {"token": token}

@functools.lru_cache
def shipped(number):
    return number * 2

@jumpstart.cached(ttl=600, snapshot="value")
def prices(region):
    return {"region": region}

def handle(texts):
    import decimal, fractions, xml.sax.saxutils
    pages = [templates.get_template("page.html").render(name="you"), prices("eu"), shipped(21)]
    for text in texts:
        re.compile(re.escape(text)).search("something")
        re.compile(f"(?i)^{re.escape(text)}$").match("something")
        templates.get_template("late.html").render(name=text)
        templates.from_string("Dear " + text.replace("{", "").replace("}", "")).render()
        parsed(text)
        profile_of(text)
    return str(pages)
"""

FLASK = (
    SHARED
    + """
from flask import Flask, request

app = Flask(__name__, static_folder=None)

@app.route("/", defaults={"path": ""}, methods=["GET", "POST", "PUT"])
@app.route("/<path:path>", methods=["GET", "POST", "PUT"])
def page(path):
    texts = [path, request.query_string.decode(), *request.headers.values(), *request.cookies.values()]
    texts += [request.get_data().decode("latin-1"), *request.form.values(), *request.args.values()]
    if "fail" in request.args:
        raise LookupError(" ".join(texts))
    return handle(texts)
"""
)

STARLETTE = (
    SHARED
    + """
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

async def page(request):
    texts = [request.url.path, request.url.query, *request.headers.values(), *request.cookies.values()]
    texts += [(await request.body()).decode("latin-1"), *request.query_params.values()]
    if "fail" in request.query_params:
        raise LookupError(" ".join(texts))
    return PlainTextResponse(handle(texts))

app = Starlette(routes=[Route("/{path:path}", page, methods=["GET", "POST", "PUT"])])
"""
)


class Marks:
    """Random texts that stand for secrets and people; each is used once."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}

    def __call__(self, what: str) -> str:
        self.made[what] = secrets.token_hex(12)
        return self.made[what]

    def found_in(self, data: bytes) -> list[str]:
        """What of it is in *data*, in any of the forms in which it may have been kept."""
        lowered = data.lower()
        found = []
        for what, mark in self.made.items():
            raw = mark.encode()
            forms = {raw, raw.hex().encode(), bytes.fromhex(mark), raw[::-1], mark.encode("utf-16-le")}
            # In base64 the text may begin at any of three places; the middle of it looks the same in all files.
            forms |= {base64.b64encode(b"x" * shift + raw)[4:-4] for shift in range(3)}
            forms |= {raw[:12], raw[12:]}  # cut short
            if any(form in data or form.lower() in lowered for form in forms):
                found.append(what)
        return found


def send_secrets(server: Server, mark: Marks) -> int:
    """Requests as they come from users, each with something in it that nobody else may see; return how many."""
    count = 0

    def send(method: str, path: str, **more: Any) -> None:
        nonlocal count
        server.request(method, path, **more)
        count += 1

    for path in ("/account", "/products/7", "/search?q=lamp"):
        send("GET", path, headers={"Cookie": f"session={mark(f'cookie {path}')}; {mark(f'cookie name {path}')}=1"})
        send("GET", path, headers={"Authorization": f"Bearer {mark(f'bearer {path}')}"})
    login = f"{mark('user')}:{mark('password')}"
    send("GET", "/", headers={"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"})
    for name in ("X-Api-Key", "User-Agent", "Referer", "X-Forwarded-For", "Forwarded", "X-Csrf-Token", "If-None-Match"):
        send("GET", "/products/8", headers={name: mark(f"header {name}")})
    for name in ("Accept", "Accept-Language", "Accept-Encoding", "Accept-Charset"):
        send("GET", "/products/9", headers={name: f"text/{mark(f'header {name}')}"})
    for name in ("token", "api_key", "password", "session", "email", "code", "q", "signature", "next", "state"):
        send("GET", f"/search?{name}={mark(f'query {name}')}")
    send("GET", f"/search?email={quote(mark('email') + '@example.org')}&page=2")
    send("GET", f"/search?{mark('query name')}=1")
    for prefix in ("/reset", "/users", "/invite", "/download/token", "/s"):
        send("GET", f"{prefix}/{mark(f'path {prefix}')}")
    send("POST", "/login", data={"user": mark("form user"), "password": mark("form password")})
    send("POST", "/login?next=/account", data={"code": mark("form code")})
    send("PUT", "/api/profile", json={"name": mark("json"), "cards": [mark("card")]})
    send("POST", "/upload", files={"file": (mark("file name"), mark("file").encode())})
    send("GET", f"/products/7?fail=1&token={mark('failed query')}", headers={"Cookie": f"a={mark('failed cookie')}"})
    return count


@pytest.mark.parametrize("text", [FLASK, STARLETTE], ids=["flask", "starlette"])
def test_nothing_that_users_send_is_in_a_profile_or_in_the_cache(serve: Serve, tmp_path: Path, text: str) -> None:
    mark = Marks()
    folder = write_app(tmp_path / "app", "personal", text)
    file = tmp_path / "captured.jumpstart"
    with serve("personal:app", "--lru-cache", "personal:shipped", app_dir=folder) as server:
        sent = send_secrets(server, mark)
        for path in ("/products/7", "/products/7", "/about"):
            assert server.get(path).status_code == 200
        server.status(requests=sent + 3)
        done = run_command("profile", "capture", "-o", str(file), home=server.home)
        assert done.returncode == 0, done.stderr
        store = server.home / "cache" / "warm-start"
        wait_until(lambda: (store / "cache.db").exists(), why="the cache is written while serving")
        while_serving = (store / "cache.db").read_bytes()
    assert len(mark.made) > 40

    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    # It is not for want of anything inside: each of the recorders that could have kept something has kept its own.
    assert b"/products/7" in contents["sections/corpus.json"] and b"/about" in contents["sections/corpus.json"]
    assert b"late.html" in contents["sections/jinja.json"]
    assert b"fractions" in contents["sections/modules.json"]
    assert b"prices" in contents["sections/cached.msgpack"] and b"shipped" in contents["sections/lru-cache.msgpack"]
    assert "sections/bytecode.msgpack" in contents and "sections/regex.json" in contents
    for name, data in {**contents, "the file": file.read_bytes()}.items():
        assert mark.found_in(data) == [], name

    assert mark.found_in(while_serving) == []
    kept = [each for each in store.parent.rglob("*") if each.is_file()]
    assert kept
    for each in kept:
        assert mark.found_in(each.read_bytes()) == [], each.name
    state = WarmStartCache(store).load(BootSettings(target="personal:app", app_dir=str(folder)).state_key)
    assert state is not None and "corpus" in state.sections
    for name, section in state.sections.items():
        assert mark.found_in(section.data) == [], name


def test_marks_are_found_in_all_their_forms() -> None:
    mark = Marks()
    text = mark("x")
    for kept in (
        text.encode(),
        text.upper().encode(),
        base64.b64encode(f"user:{text}".encode()),
        base64.b64encode(f"{text}:pw".encode()),
        text.encode().hex().encode(),
        bytes.fromhex(text),
        text.encode("utf-16-le"),
        text[:15].encode(),
    ):
        assert mark.found_in(b"before " + kept + b" after") == ["x"], kept
    assert mark.found_in(secrets.token_hex(12).encode()) == []
