"""Django: admin, translations and templates are as warm in a new process as names can make them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jumpstart.apps_warm import Boot, as_json, boot

SETTINGS = """
from pathlib import Path
BASE = Path(__file__).parent
SECRET_KEY = "x"
ROOT_URLCONF = "urls"
ALLOWED_HOSTS = ["*"]
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("de", "German"), ("fr", "French")]
USE_I18N = True
INSTALLED_APPS = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
    "django.contrib.sessions", "django.contrib.messages", "django.contrib.staticfiles"]
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
    "DIRS": [BASE / "templates"], "OPTIONS": {"context_processors": ["django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth", "django.contrib.messages.context_processors.messages"]}},
    {"BACKEND": "django.template.backends.jinja2.Jinja2", "DIRS": [BASE / "jinja"]}]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE / "db.sqlite3"}}
STATIC_URL = "/static/"
"""
URLS = """
from django.conf.urls.i18n import i18n_patterns
from django.contrib import admin
from django.http import HttpResponse
from django.shortcuts import render
from django.template import Context, Template
from django.urls import path, reverse
from django.utils.translation import gettext_lazy as _

def page(request):
    return render(request, "page.html", {"n": reverse("shop")})

def shop(request):
    return render(request, "shop.jinja", {"n": 2})

def string(request):
    return HttpResponse(Template("{{ n }}").render(Context({"n": 1})))

urlpatterns = [path("page", page), path("string", string)]
urlpatterns += i18n_patterns(path("admin/", admin.site.urls), path(_("shop"), shop, name="shop"))
"""
WSGI = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.wsgi import get_wsgi_application
app = get_wsgi_application()
"""
TEMPLATES = {
    "templates/page.html": '{% extends "base.html" %}{% load i18n %}{% block b %}'
    '{% translate "Yes" %} {{ n }}{% include "part.html" %}{% endblock %}',
    "templates/base.html": "<b>{% block b %}{% endblock %}</b>",
    "templates/part.html": " part",
    "templates/admin/base_site.html": '{% extends "admin/base_site.html" %}{% block title %}mine{% endblock %}',
    "jinja/shop.jinja": "{% include 'inner.jinja' %} {{ n }}",
    "jinja/inner.jinja": "inner",
}
PATHS = ["/page", "/string", "/de/admin/login/", "/en/admin/login/", "/fr/shop"]
RECORDERS = ["django", "jinja"]


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = project(tmp_path_factory.mktemp("migrated"))
    code = "import wsgi; from django.core.management import call_command; call_command('migrate', verbosity=0)"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    return (folder / "db.sqlite3").read_bytes()


@pytest.fixture
def folder(tmp_path: Path, migrated: bytes) -> Path:
    (tmp_path / "db.sqlite3").write_bytes(migrated)
    return project(tmp_path)


def project(folder: Path) -> Path:
    for name, source in {"settings.py": SETTINGS, "urls.py": URLS, "wsgi.py": WSGI, **TEMPLATES}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    return folder


def start(folder: Path, paths: list[str], records: Any = None, **options: Any) -> Boot:
    return boot(folder, "wsgi:app", paths, as_json(records) if records else None, recorders=RECORDERS, **options)


CONNECTIONS = "[c.connection is not None for c in sys.modules['django.db'].connections.all(initialized_only=True)]"


def test_nothing_is_cold_after_a_restore(folder: Path) -> None:
    cold = start(folder, PATHS, restore=False)
    assert {status for status, _ in cold.responses} == {200}
    assert cold.cold("urlconf") and {"de", "fr"} == set(cold.cold("translation")), "English comes with django.setup()"
    assert {"page.html", "base.html", "part.html", "admin/login.html", "admin/base_site.html"} <= set(
        cold.cold("template")
    )
    assert "django/forms/widgets/text.html" in cold.cold("template"), "the form renderer has an engine of its own"
    assert "engine:django:admin/base_site.html#1" in [record["key"] for record in cold.captured["django"]]

    warm = start(folder, PATHS, cold.captured)
    assert [warm.cold(kind) for kind in ("urlconf", "translation", "template")] == [[], [], []]
    assert warm.dropped == {"django": {}, "jinja": {}}
    assert set(warm.used["django"]) == {record["key"] for record in cold.captured["django"]}
    assert set(warm.used["jinja"]) == {"shop.jinja", "inner.jinja"}
    assert [status for status, _ in warm.responses] == [200] * 5
    assert warm.responses[0] == cold.responses[0] and warm.responses[4] == cold.responses[4]
    assert {record["key"] for record in warm.captured["django"]} == {
        record["key"] for record in cold.captured["django"]
    }
    assert (warm.threads, warm.loops) == (1, 0)


def test_without_records_the_resolver_is_populated_and_nothing_is_left_open_or_active(folder: Path) -> None:
    after = f"[any({CONNECTIONS}), hasattr(sys.modules['django.utils.translation.trans_real']._active, 'value')]"
    warm = start(folder, [], after=after)
    assert warm.after == [False, False]
    warm = start(folder, ["/string"])
    assert warm.cold("urlconf") == []
    assert "urls" in start(folder, ["/page"], restore=False).cold("urlconf")


def test_a_changed_template_is_stale_and_the_others_are_used(folder: Path) -> None:
    cold = start(folder, ["/page"], restore=False)
    records = cold.captured
    (folder / "templates/part.html").write_text(" changed")
    records["django"] += [
        {"key": "gone", "data": {"kind": "template", "name": "no.html", "engine": "engine:django"}},
        {"key": "engine", "data": {"kind": "template", "name": "page.html", "engine": "engine:other"}},
        {"key": "bad", "data": {"kind": "template", "engine": "engine:django"}},
        {"key": "xx", "data": {"kind": "language", "language": "tlh"}},
        {"key": "lang", "data": {"kind": "language"}},
    ]
    warm = start(folder, ["/page"], records)
    assert warm.dropped["django"] == {
        "engine:django:part.html": "stale",
        "gone": "gone",
        "engine": "gone",
        "bad": "malformed",
        "xx": "gone",
        "lang": "malformed",
    }
    assert {"engine:django:page.html", "engine:django:base.html"} <= set(warm.used["django"])
    assert " changed" in warm.responses[0][1]
    assert warm.cold("template") == []


def test_a_urlconf_that_queries_does_not_leave_a_connection_to_be_forked(folder: Path) -> None:
    query = "\nfrom django.db import connection\nconnection.cursor().execute('select 1')\n"
    (folder / "urls.py").write_text(URLS + query)
    assert start(folder, [], after=CONNECTIONS).after == [False]


def test_a_broken_urlconf_and_a_broken_template_are_left_to_the_requests(folder: Path) -> None:
    (folder / "urls.py").write_text("raise RuntimeError('broken')")
    (folder / "templates/part.html").write_text("{% nonsense %}")
    record = {"kind": "template", "name": "part.html", "engine": "engine:django"}
    warm = start(folder, [], {"django": [{"key": "part", "data": record}]})
    assert warm.dropped["django"] == {"part": "failed"}


def test_templates_are_not_asked_of_loaders_that_may_need_a_connection(folder: Path) -> None:
    (folder / "loader.py").write_text(
        "from django.template import Origin\nfrom django.template.loaders.base import Loader\n"
        "class Mine(Loader):\n"
        "    def get_template_sources(self, name): yield Origin(name, name, self)\n"
        "    def get_contents(self, origin): return 'mine'\n"
    )
    cached = '"loaders": [("django.template.loaders.cached.Loader", ["loader.Mine"])],'
    settings = SETTINGS.replace('"APP_DIRS": True,', "").replace('"OPTIONS": {', '"OPTIONS": {' + cached, 1)
    (folder / "settings.py").write_text(settings)
    cold = start(folder, ["/page"], restore=False)
    assert cold.responses[0] == (200, "mine") and cold.cold("template") == ["page.html"]
    warm = start(folder, ["/page"], cold.captured)
    assert warm.cold("template") == ["page.html"]
    assert [key for key in warm.used["django"] if "page" in key] == []
