"""Flask: the Jinja environment and the URL map are there before the first request, wherever the app hides."""

from __future__ import annotations

from pathlib import Path

import pytest

from jumpstart.recorders._app import instances, walk
from tests.jumpstart.apps_warm import Boot, as_json, boot

APP = """
import functools
from flask import Blueprint, Flask, render_template, render_template_string
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix

inner = Flask("inner", template_folder="templates", root_path=__file__.rpartition("/")[0])
shop = Blueprint("shop", __name__, template_folder="shop_templates")
for number in range(30):
    inner.add_url_rule(f"/x/<int:a>/{number}", f"x{number}", lambda a: str(a))

@inner.get("/")
def index():
    return render_template("page.html", n=1)

@shop.get("/shop")
def shop_page():
    return render_template("shop.html", n=2) + render_template_string("{{ 1 }}")

inner.register_blueprint(shop)
inner.wsgi_app = ProxyFix(inner.wsgi_app)
outer = Flask("outer")

def decorated(wrapped):
    @functools.wraps(wrapped)
    def call(environ, start_response):
        return wrapped(environ, start_response)
    return call

app = decorated(functools.partial(DispatcherMiddleware(outer.wsgi_app, {"/in": inner})))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flask_app.py").write_text(APP)
    for name, templates in {
        "templates": {
            "page.html": '{% extends "base.html" %}{% block b %}{{ n }}{% endblock %}',
            "base.html": "<b>{% block b %}{% endblock %}",
        },
        "shop_templates": {"shop.html": "shop {{ n }}"},
    }.items():
        (tmp_path / name).mkdir()
        for file, source in templates.items():
            (tmp_path / name / file).write_text(source)
    return tmp_path


def start(folder: Path, records: Boot | None = None, **options: object) -> Boot:
    after = "[a._got_first_request, 'jinja_env' in vars(a), a.url_map._remap]"
    after = f"[{after} for a in (sys.modules['flask_app'].inner, sys.modules['flask_app'].outer)]"
    captured = as_json({"jinja": records.captured["jinja"]}) if records else None
    return boot(folder, "flask_app:app", options.pop("paths", []), captured, after=after, **options)  # type: ignore[arg-type]


def test_the_first_boot_prepares_every_flask_app_without_a_request(folder: Path) -> None:
    assert start(folder, restore=False).after == [[False, False, True], [False, False, True]]
    prepared = start(folder)
    assert prepared.after == [[False, True, False], [False, True, False]]
    assert (prepared.threads, prepared.loops) == (1, 0)


def test_templates_of_app_and_blueprints_are_warm_in_the_next_process(folder: Path) -> None:
    paths = ["/in/", "/in/shop"]
    cold = start(folder, paths=paths)
    assert cold.cold("template") == ["page.html", "base.html", "shop.html"]
    warm = start(folder, cold, paths=paths)
    assert warm.cold("template") == []
    assert warm.responses == cold.responses == [(200, "<b>1"), (200, "shop 21")]
    assert warm.used["jinja"] == ["base.html", "page.html", "shop.html"]


def test_an_app_whose_environment_cannot_be_made_still_boots(folder: Path) -> None:
    (folder / "flask_app.py").write_text(APP + "\ninner.jinja_options = {'extensions': ['no.such.extension']}\n")
    warm = start(folder, paths=["/in/x/1/2"])
    assert warm.responses == [(200, "1")]
    assert warm.after == [[True, False, False], [False, True, False]]


class Lazy:
    """Like Django's lazy objects and Werkzeug's proxies: whatever is asked of it makes it do its work."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")

    @property  # type: ignore[misc]  # the whole point: mypy knows __class__ as an attribute
    def __class__(self) -> type:
        raise AssertionError("asked for __class__")


class Slotted:
    __slots__ = ("app",)


def test_the_walk_asks_nothing_of_objects_that_it_does_not_know() -> None:
    middleware = Slotted()
    middleware.app = Lazy()  # type: ignore[attr-defined]
    assert [type(found) for found in walk(middleware)] == [Slotted, Lazy]
    assert [type(found) for found in walk(Slotted())] == [Slotted]


def test_the_walk_ends_in_cycles_and_in_endless_chains() -> None:
    class Link:
        app: object

    first = Link()
    first.app = first
    assert walk(first) == [first]
    last = first
    for _ in range(5000):
        last.app = Link()
        last = last.app
    assert 1000 < len(walk(first)) <= 2000
    assert instances(first, "no.such.module", "App") == []
