"""Jinja2: what one process compiled, another one has compiled before its first request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jumpstart.apps_warm import as_json, boot

APP = """
import jinja2

pages = jinja2.Environment(loader=jinja2.FileSystemLoader("templates"), autoescape=True)
mails = jinja2.Environment(loader=jinja2.PrefixLoader({"mail": jinja2.DictLoader({"page.html": "mail {{ n }}"})}))
other = jinja2.Environment(loader=jinja2.DictLoader({"page.html": "another page {{ n }}"}))
overlaid = pages.overlay(trim_blocks=True)
text = jinja2.Environment(loader=None)
calls = []
def load(name):
    calls.append(name)
    return f"odd {name}" if name == "odd" else None
odd = jinja2.Environment(loader=jinja2.FunctionLoader(load))

def app(environ, start_response):
    start_response("200 OK", [])
    if environ["PATH_INFO"] == "/mail":
        body = mails.get_template("mail/page.html").render(n=1) + other.get_template("page.html").render(n=2)
    elif environ["PATH_INFO"] == "/string":
        body = text.from_string("{{ 1 + 1 }}").render()
    elif environ["PATH_INFO"] == "/odd":
        body = odd.get_template("odd").render()
    elif environ["PATH_INFO"] == "/overlay":
        body = overlaid.get_template("block.html").render()
    else:
        body = pages.get_template("page.html").render(n=3, items=["<a>"])
    return [body.encode()]
"""
TEMPLATES = {
    "base.html": "<h1>{% block title %}{% endblock %}</h1>{% block body %}{% endblock %}",
    "macros.html": "{% macro item(x) %}<li>{{ x|upper }}</li>{% endmacro %}",
    "part.html": "part {{ n }}",
    "block.html": "{% if true %}\nblock{% endif %}",
    "page.html": """{% extends "base.html" %}{% from "macros.html" import item %}{% block title %}{{ n }}{% endblock %}
        {% block body %}{% for x in items %}{{ item(x) }}{% endfor %}{% include "part.html" %}{% endblock %}""",
}
PATHS = ["/", "/mail", "/string", "/odd", "/overlay"]
JINJA = ["jinja-bytecode", "jinja"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jinja_app.py").write_text(APP)
    (tmp_path / "templates").mkdir()
    for name, source in TEMPLATES.items():
        (tmp_path / "templates" / name).write_text(source)
    return tmp_path


def start(folder: Path, records: dict[str, list[dict[str, Any]]] | None = None, **options: Any) -> Any:
    return boot(folder, "jinja_app:app", PATHS, records, recorders=JINJA, **options)


def test_templates_are_compiled_before_the_first_request(folder: Path) -> None:
    cold = start(folder)
    assert {"page.html", "base.html", "macros.html", "part.html", "odd", "block.html"} <= set(cold.cold("template"))
    assert [str(record["key"]).partition("#")[0] for record in cold.captured["jinja"]].count("page.html") == 2
    warm = start(folder, as_json({"jinja": cold.captured["jinja"]}), after="len(sys.modules['jinja_app'].calls)")
    assert warm.cold("template") == []
    assert warm.responses == cold.responses
    assert warm.dropped["jinja"] == {}
    assert len(warm.used["jinja"]) == len(cold.captured["jinja"]) == 8
    assert {r["key"] for r in warm.captured["jinja"]} == {r["key"] for r in cold.captured["jinja"]}
    # Twice, since its source is compared: both in the worker, since the loader might have opened a connection.
    assert warm.after == 2


def test_a_loader_that_may_need_a_connection_is_not_asked_before_the_fork(folder: Path) -> None:
    records = {"jinja": [{"key": "odd", "data": {"name": "odd"}}]}
    script = """
        import jumpstart.recorders.jinja as recorded
        restore = recorded.JinjaRecorder.restore
        def watched(self, app, records, tally):
            restore(self, app, records, tally)
            import jinja_app
            assert jinja_app.calls == [], jinja_app.calls
        recorded.JinjaRecorder.restore = watched
    """
    warm = start(folder, records, prelude=script)
    assert warm.used["jinja"] == ["odd"]
    assert "odd" not in warm.cold("template")


def test_a_changed_template_is_stale_and_the_others_are_used(folder: Path) -> None:
    cold = start(folder)
    (folder / "templates" / "part.html").write_text("changed {{ n }}")
    (folder / "templates" / "block.html").unlink()
    warm = boot(folder, "jinja_app:app", ["/"], as_json({"jinja": cold.captured["jinja"]}), recorders=["jinja"])
    assert warm.dropped["jinja"] == {"part.html": "stale", "block.html": "gone"}
    assert "changed 3" in warm.responses[0][1]
    assert warm.cold("template") == [], "it is compiled anew all the same"
    assert {"page.html", "base.html", "macros.html"} <= set(warm.used["jinja"])


def test_a_broken_template_costs_only_itself(folder: Path) -> None:
    (folder / "templates" / "broken.html").write_text("{% if %}")
    records = [{"key": name, "data": {"name": name}} for name in ("broken.html", "base.html")]
    warm = boot(folder, "jinja_app:app", ["/"], {"jinja": [*records, {"key": "x", "data": {}}]}, recorders=["jinja"])
    assert warm.dropped["jinja"] == {"broken.html": "failed", "x": "malformed"}
    assert warm.used["jinja"] == ["base.html"]


def test_recorded_code_saves_parsing_and_gives_the_same_pages(folder: Path) -> None:
    cold = start(folder)
    assert len(cold.captured["jinja-bytecode"]) >= 6
    no_parser = """
        import jinja2
        def refuse(*args): raise AssertionError(f"parsed {args[1:]}")
        import jinja2.parser
        jinja2.parser.Parser.parse = refuse
    """
    records = cold.captured
    warm = boot(folder, "jinja_app:app", ["/", "/overlay"], records, recorders=JINJA, prelude=no_parser)
    assert warm.responses == [cold.responses[0], cold.responses[4]]
    assert {"page.html", "base.html", "macros.html", "part.html"} <= {
        key.partition("#")[0] for key in warm.used["jinja-bytecode"]
    }
    assert {r["key"] for r in warm.captured["jinja-bytecode"]} <= {r["key"] for r in cold.captured["jinja-bytecode"]}


def test_code_for_another_source_or_other_settings_is_not_used(folder: Path) -> None:
    records = start(folder).captured
    (folder / "templates" / "part.html").write_text("changed {{ n }}")
    (folder / "jinja_app.py").write_text(APP.replace("autoescape=True", "autoescape=False"))
    warm = start(folder, records)
    assert "changed 3" in warm.responses[0][1]
    assert "<A>" in warm.responses[0][1]
    assert not [key for key in warm.used["jinja-bytecode"] if key.startswith(("part", "macros"))]


def test_templates_that_use_custom_filters_are_not_shipped_as_code(folder: Path) -> None:
    """Constant folding bakes a filter's answer into the code; the filter of the next build may answer otherwise."""
    app = APP + "\npages.filters['shout'] = lambda text: text + '!'\n"
    (folder / "jinja_app.py").write_text(app)
    (folder / "templates" / "part.html").write_text("{{ 'a'|shout }}")
    names = [str(record["key"]).partition("#")[0] for record in start(folder).captured["jinja-bytecode"]]
    assert "part.html" not in names
    assert "base.html" in names


def test_damaged_code_is_compiled_instead(folder: Path) -> None:
    records = start(folder).captured["jinja-bytecode"]
    damaged = [{**record, "data": {**record["data"], "code": b"\xe3junk"}} for record in records]
    malformed = [{"key": "bad", "data": {"code": "text"}}]
    warm = start(folder, {"jinja-bytecode": damaged + malformed})
    assert warm.responses[0][0] == 200 and "part 3" in warm.responses[0][1]
    assert warm.used["jinja-bytecode"] == []
    assert warm.dropped["jinja-bytecode"] == {"bad": "malformed"}


def test_recorded_code_names_the_file_of_this_host_in_tracebacks(folder: Path, tmp_path: Path) -> None:
    records = start(folder).captured
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "templates").mkdir(parents=True)
    (elsewhere / "jinja_app.py").write_text(APP.replace('"templates"', "__file__[:-12] + 'templates'"))
    for name, source in TEMPLATES.items():
        (elsewhere / "templates" / name).write_text(source)
    page = "sys.modules['jinja_app'].pages.get_template('page.html')"
    after = f"[{page}.filename, {page}.root_render_func.__code__.co_filename]"
    warm = start(elsewhere, records, after=after)
    assert warm.after == [str(elsewhere / "templates" / "page.html")] * 2
    assert [key for key in warm.used["jinja-bytecode"] if key.startswith("page.html")]


def test_an_app_without_jinja_never_imports_it(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from jumpstart.recorder import WarmSettings
from jumpstart.records import Record, Tally
from jumpstart.recorders.jinja import JinjaBytecodeRecorder, JinjaRecorder
from jumpstart.recorders.flask import FlaskRecorder
from jumpstart.recorders.django import DjangoRecorder
from jumpstart.recorders.starlette import OpenapiRecorder, StarletteRecorder
from jumpstart.recorders.sqlalchemy import SqlalchemyRecorder
records = [Record(key="a", data={"name": "a", "kind": "template"})]
for cls in (JinjaBytecodeRecorder, JinjaRecorder, FlaskRecorder, DjangoRecorder, OpenapiRecorder, StarletteRecorder,
            SqlalchemyRecorder):
    recorder = cls(WarmSettings())
    recorder.observe()
    recorder.restore(print, records, Tally())
    asyncio.run(recorder.restore_late(print, records, Tally()))
    assert recorder.capture("host") == []
loaded = {"jinja2", "flask", "django", "starlette", "fastapi", "sqlalchemy"} & set(sys.modules)
assert not loaded, loaded
"""
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=root)
