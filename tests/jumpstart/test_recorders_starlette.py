"""Starlette and FastAPI: routers, middleware and the OpenAPI document, without a request and without lying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jumpstart.apps_warm import Boot, as_json, boot

APP = """
import asyncio
import threading
from fastapi import APIRouter, Depends, FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
import models

built = []
ran = []

class Loopy:
    def __init__(self, app):
        built.append(asyncio.get_running_loop() is not None)
        self.app = app
    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)

def dependency():
    ran.append(1)
    return 1

inner = APIRouter(prefix="/inner", dependencies=[Depends(dependency)])
@inner.get("/{thing}")
def get_thing(thing: int) -> models.Thing:
    return models.Thing(id=thing)

outer = APIRouter(prefix="/outer")
@outer.get("/{anything:path}/first")
def first(anything: str) -> list[models.Thing]:
    return []
outer.include_router(inner)

api = FastAPI(title="API", middleware=[Middleware(Loopy)])
@api.get("/direct")
def direct() -> models.Thing:
    return models.Thing(id=0)
api.include_router(outer)

async def hello(request):
    return PlainTextResponse("hello")

app = Loopy.__new__(Loopy)
app.app = Starlette(routes=[Route("/", hello), Mount("/api", app=api)], middleware=[Middleware(Loopy)])
"""
MODELS = """
from pydantic import BaseModel

class Thing(BaseModel):
    id: int
"""
RECORDERS = ["openapi", "starlette"]
NO_GENERATION = """
    import fastapi.applications
    def refuse(**_): raise AssertionError("get_openapi was called")
    fastapi.applications.get_openapi = refuse
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "web.py").write_text(APP)
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def start(folder: Path, paths: list[str], records: Any = None, **options: Any) -> Boot:
    return boot(folder, "web:app", paths, as_json(records) if records else None, recorders=RECORDERS, **options)


def test_routers_and_middleware_are_built_before_the_first_request(folder: Path) -> None:
    paths = ["/", "/api/outer/inner/7"]
    after = "[sys.modules['web'].built, sys.modules['web'].ran]"
    cold = start(folder, paths, restore=False, after=after)
    assert cold.cold("router") == ["/outer", "/outer/inner"]
    assert cold.cold("middleware") == ["Starlette", "FastAPI"]
    warm = start(folder, paths, after=after)
    assert warm.events == [[], []]
    assert warm.responses == cold.responses == [(200, "hello"), (200, '{"id":7}')]
    # User middleware is made once each, inside the loop; the dependency runs for the request only.
    assert warm.after == cold.after == [[True, True], [1]]
    assert (warm.threads, warm.loops) == (1, 0)


def test_no_dependency_and_no_endpoint_runs_while_routers_are_built(folder: Path) -> None:
    assert start(folder, [], after="sys.modules['web'].ran").after == []


def test_the_document_is_used_without_being_generated(folder: Path) -> None:
    cold = start(folder, ["/api/openapi.json"])
    assert cold.cold("openapi") == ["API"]
    assert [record["key"] for record in cold.captured["openapi"]] == ["openapi:0:API"]
    assert set(cold.captured["openapi"][0]["depends"]) >= {"module:web", "module:models"}
    warm = start(folder, ["/api/openapi.json"], cold.captured, prelude=NO_GENERATION)
    assert warm.responses == cold.responses
    assert warm.used == {"openapi": ["openapi:0:API"], "starlette": ["openapi-built:0:API"]}
    assert warm.events == [[]]
    assert warm.captured == cold.captured


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("models.py", "id: int", "id: int\n    name: str = ''"), ("web.py", 'title="API"', 'title="API", version="2"')],
)
def test_a_document_of_another_build_is_stale_and_the_framework_builds_the_new_one(
    folder: Path, file: str, old: str, new: str
) -> None:
    cold = start(folder, ["/api/openapi.json"])
    (folder / file).write_text((folder / file).read_text().replace(old, new))
    warm = start(folder, ["/api/openapi.json"], cold.captured)
    assert warm.dropped["openapi"] == {"openapi:0:API": "stale"}
    assert warm.used["starlette"] == ["openapi-built:0:API"]
    assert warm.events == [[]], "built before the first request all the same"
    assert warm.responses != cold.responses
    assert warm.responses == start(folder, ["/api/openapi.json"]).responses


@pytest.mark.parametrize("file", ["models.py", "web.py"])
def test_the_document_of_a_replaced_source_is_not_recorded(folder: Path, file: str) -> None:
    """``git pull`` under a running server: the document that the old code has built is not the new code's."""
    change = f"import pathlib; pathlib.Path({str(folder / file)!r}).open('a').write('\\n# pulled')"
    replacing = APP.replace("async def hello(request):", f"async def hello(request):\n    {change}")
    (folder / "web.py").write_text(replacing)
    cold = start(folder, ["/", "/api/openapi.json"])
    assert cold.cold("openapi") == ["API"] and cold.captured["openapi"] == []
    (folder / "web.py").write_text(replacing)
    (folder / "models.py").write_text(MODELS)
    gone = f"import pathlib; pathlib.Path({str(folder / file)!r}).unlink()"
    (folder / "web.py").write_text(replacing.replace(change, gone))
    assert start(folder, ["/api/openapi.json", "/"]).captured["openapi"] == []


def test_routes_that_depend_on_the_environment_make_a_document_stale(folder: Path) -> None:
    (folder / "web.py").write_text(APP + "\nimport os\nif 'EXTRA' in os.environ:\n    api.get('/extra')(lambda: 1)\n")
    cold = start(folder, ["/api/openapi.json"])
    warm = start(folder, ["/api/openapi.json"], cold.captured, prelude="import os; os.environ['EXTRA'] = '1'")
    assert warm.dropped["openapi"] == {"openapi:0:API": "stale"}
    assert '"/extra"' in warm.responses[0][1]


def test_an_overridden_openapi_is_called_and_no_document_of_ours_used(folder: Path) -> None:
    plain = start(folder, ["/api/openapi.json"])
    (folder / "web.py").write_text(
        APP
        + """
calls = []
def custom():
    calls.append(1)
    if not api.openapi_schema:
        api.openapi_schema = {**FastAPI.openapi(api), "x-mine": True}
    return api.openapi_schema
api.openapi = custom
"""
    )
    records = plain.captured
    records["openapi"][0]["depends"] = {}
    warm = start(folder, ["/api/openapi.json"], records, after="len(sys.modules['web'].calls)")
    assert warm.dropped["openapi"] == {"openapi:0:API": "not-applicable"}
    assert warm.used["starlette"] == ["openapi-built:0:API"]
    assert warm.cold("openapi") == []
    assert warm.after == 2
    assert '"x-mine":true' in warm.responses[0][1]
    assert warm.captured["openapi"] == []


def test_a_fastapi_that_ignores_the_document_is_noticed(folder: Path) -> None:
    cold = start(folder, ["/api/openapi.json"])
    ignoring = """
        import fastapi
        def openapi(self):
            self.openapi_schema = {"openapi": "3.1.0", "made": "anew"}
            return self.openapi_schema
        fastapi.FastAPI.openapi = openapi
    """
    warm = start(folder, ["/api/openapi.json"], cold.captured, prelude=ignoring)
    assert warm.dropped["openapi"] == {"openapi:0:API": "no-effect"}
    assert '"made":"anew"' in warm.responses[0][1]


def test_malformed_and_foreign_records_cost_only_themselves(folder: Path) -> None:
    records = {
        "openapi": [{"key": "a", "data": {"app": "0:API"}}, {"key": "b", "data": {"app": "9:X", "document": {"x": 1}}}],
        "starlette": [{"key": "c", "data": {"kind": "openapi-built", "app": 3}}, {"key": "d", "data": {}}],
    }
    warm = start(folder, ["/api/direct"], records)
    assert warm.dropped == {"openapi": {"a": "malformed", "b": "gone"}, "starlette": {"c": "gone", "d": "malformed"}}
    assert warm.responses == [(200, '{"id":0}')]


def test_a_middleware_that_cannot_be_built_is_left_to_the_request(folder: Path) -> None:
    (folder / "web.py").write_text(
        APP.replace('"API", middleware=[Middleware(Loopy)]', '"API", middleware=[Middleware(Loopy, 1)]')
    )
    warm = start(folder, ["/"])
    assert warm.responses == [(200, "hello")]
