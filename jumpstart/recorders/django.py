"""
Django: the URL resolver, templates and translation catalogues, made by Django itself before the first request.

Recorded are names only: templates from the cached loaders of the configured engines and of the form renderer, and
languages from the catalogue cache. Middleware needs nothing: the handler loads it when the app is made. A template
whose source has changed is compiled all the same, and reported as stale.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from jumpstart.context import cold_event
from jumpstart.imports import when_imported
from jumpstart.recorder import Purpose, Recorder
from jumpstart.recorders._app import plain, text_digest
from jumpstart.records import Reason, Record, Tally

logger = logging.getLogger(__name__)

FORMS = "forms"  # label of the form renderer's own engine; those of settings.TEMPLATES are "engine:ALIAS"
MAX_OVERRIDES = 8  # templates of one name that extend each other


class DjangoRecorder(Recorder):
    """Populates the URL resolver; with records, also loads templates and catalogues."""

    name: ClassVar[str] = "django"

    def observe(self) -> None:
        when_imported("django.urls.resolvers", _watch_resolver)
        when_imported("django.template.base", _watch_templates)
        when_imported("django.utils.translation.trans_real", _watch_translations)

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        if not _is_ready():
            return
        languages = [record for record in records if record.data.get("kind") == "language"]
        templates = [record for record in records if record.data.get("kind") == "template"]
        already_open = {id(connection) for connection in _open_connections()}
        try:
            _load_languages(languages, tally)
            _populate([str(record.data.get("language")) for record in languages if record.key in tally.used_keys])
            _load_templates(templates, tally)
        finally:
            # A module of the app may query while it is imported. A connection must not be shared by forked processes.
            for connection in _open_connections():
                if id(connection) not in already_open:
                    logger.warning("django: closing the connection %r that warming opened", connection.alias)
                    connection.close()

    def capture(self, purpose: Purpose) -> list[Record]:
        if not _is_ready():
            return []
        return [*_captured_languages(), *_captured_templates()]


def _is_ready() -> bool:
    settings = getattr(sys.modules.get("django.conf"), "settings", None)
    apps = getattr(sys.modules.get("django.apps"), "apps", None)
    return settings is not None and apps is not None and bool(settings.configured and apps.ready)


def _open_connections() -> list[Any]:
    connections = getattr(sys.modules.get("django.db"), "connections", None)
    if connections is None:
        return []
    return [each for each in connections.all(initialized_only=True) if each.connection is not None]


# URLs


def _populate(languages: Sequence[str]) -> None:
    """Import the URLconf and fill the resolver, once per language, since translated patterns differ."""
    from django.conf import settings
    from django.urls import get_resolver
    from django.utils import translation

    if not getattr(settings, "ROOT_URLCONF", None):
        return
    active = _active_translation()
    try:
        resolver = get_resolver()
        for language in dict.fromkeys((settings.LANGUAGE_CODE, *languages)):
            if settings.USE_I18N:
                translation.activate(language)
            _ = resolver.reverse_dict  # populates when this language has not been
            _populate_namespaces(resolver, "")
        if settings.USE_I18N:
            from django.conf.urls.i18n import is_language_prefix_patterns_used

            is_language_prefix_patterns_used(settings.ROOT_URLCONF)
    except Exception:  # the app's URLconf; the first request will show it in full
        logger.warning("django: the URL resolver could not be populated", exc_info=True)
    finally:
        _reactivate(active)


def _populate_namespaces(resolver: Any, prefix: str) -> None:
    """Have Django make the resolvers that `reverse` uses below a namespace: it looks for a name that nobody gives."""
    from django.urls import NoReverseMatch, reverse

    for namespace, (_, inner) in list(resolver.namespace_dict.items()):
        try:
            reverse(f"{prefix}{namespace}:jumpstart no such view")
        except NoReverseMatch:
            pass
        _populate_namespaces(inner, f"{prefix}{namespace}:")


def _active_translation() -> Any:
    real: Any = sys.modules.get("django.utils.translation.trans_real")
    return getattr(real._active, "value", None) if real is not None else None


def _reactivate(active: Any) -> None:
    real: Any = sys.modules.get("django.utils.translation.trans_real")
    if real is None:
        return
    if active is None:
        real.deactivate()
    else:
        real._active.value = active


# Translations


def _load_languages(records: Sequence[Record], tally: Tally) -> None:
    from django.conf import settings

    if not records:
        return
    if not settings.USE_I18N:
        return  # not applicable
    from django.utils.translation import trans_real

    for record in records:
        language = record.data.get("language")
        if tally.out_of_time():
            tally.drop(record, Reason.DEADLINE)
        elif not isinstance(language, str):
            tally.drop(record, Reason.MALFORMED, "no language")
        elif not (language == settings.LANGUAGE_CODE or trans_real.check_for_language(language)):
            tally.drop(record, Reason.GONE, language)
        else:
            try:
                trans_real.translation(language)  # loads and caches the catalogue, activates nothing
            except Exception as error:
                tally.drop(record, Reason.FAILED, f"{type(error).__name__}: {error}")
            else:
                tally.used(record)


def _captured_languages() -> list[Record]:
    real: Any = sys.modules.get("django.utils.translation.trans_real")
    known = [plain(name) for name in list(getattr(real, "_translations", ()))]
    return [Record(key=f"language:{name}", data={"kind": "language", "language": name}) for name in known]


# Templates


def _engines(*, make: bool) -> dict[str, Any]:
    """Django's own template engines by label; with *make* those too that the first request would make."""
    engines: dict[str, Any] = {}
    handler = getattr(sys.modules.get("django.template"), "engines", None)
    if handler is not None:
        for alias in list(handler) if make else list(handler._engines):
            engine = getattr(handler[alias], "engine", None)  # other backends, such as Jinja2, have none
            if engine is not None:
                engines[f"engine:{alias}"] = engine
    renderers: Any = sys.modules.get("django.forms.renderers")
    if renderers is not None and (make or renderers.get_default_renderer.cache_info().currsize):
        renderer = renderers.get_default_renderer()
        if make or "engine" in vars(renderer):
            engine = getattr(getattr(renderer, "engine", None), "engine", None)
            if engine is not None:
                engines[FORMS] = engine
    return engines


def _cached_loaders(engine: Any) -> list[Any]:
    cached: Any = sys.modules.get("django.template.loaders.cached")
    loaders = vars(engine).get("template_loaders")  # a cached property; None when nothing was loaded yet
    return [] if cached is None or not loaders else [each for each in loaders if isinstance(each, cached.Loader)]


def _captured_templates() -> list[Record]:
    records: dict[str, Record] = {}
    for label, engine in _engines(make=False).items():
        for loader in _cached_loaders(engine):
            found = [each for each in list(loader.get_template_cache.values()) if hasattr(each, "nodelist")]
            for name in dict.fromkeys(plain(str(template.origin.template_name)) for template in found):
                for depth, template in enumerate(_overrides(loader, name)):
                    key = f"{label}:{name}" + (f"#{depth}" if depth else "")
                    data = {"kind": "template", "name": name, "engine": label, "source": text_digest(template.source)}
                    records.setdefault(key, Record(key=key, data=data | ({"depth": depth} if depth else {})))
    return list(records.values())


def _overrides(loader: Any, name: str) -> Iterator[Any]:
    """
    The cached template of that name, then those of the same name that it extends.

    Django caches the latter under the name and a hash of the origins that were skipped to reach it.
    """
    skipped: list[Any] = []
    while len(skipped) < MAX_OVERRIDES:
        template = loader.get_template_cache.get(loader.cache_key(name, skipped))
        if not hasattr(template, "nodelist"):
            return
        yield template
        skipped.append(template.origin)


def _load_templates(records: Sequence[Record], tally: Tally) -> None:
    if not records:
        return
    try:
        import django.forms.renderers  # so that the renderer's engine is among them
        import django.template  # noqa: F401

        engines = _engines(make=True)
    except Exception as error:  # a template tag library of the app's
        logger.warning("django: the template engines could not be made", exc_info=True)
        for record in records:
            tally.drop(record, Reason.FAILED, f"{type(error).__name__}: {error}")
        return
    for record in records:
        if tally.out_of_time():
            tally.drop(record, Reason.DEADLINE)
            continue
        engine = engines.get(str(record.data.get("engine")))
        if engine is None:
            tally.drop(record, Reason.GONE, "no such engine")
            continue
        _load_template(engine, record, tally)


def _load_template(engine: Any, record: Record, tally: Tally) -> None:
    from django.template import TemplateDoesNotExist

    name, depth = record.data.get("name"), record.data.get("depth", 0)
    if not isinstance(name, str) or not isinstance(depth, int) or not 0 <= depth < MAX_OVERRIDES:
        tally.drop(record, Reason.MALFORMED, "no name")
        return
    if not all(_reads_files_only(loader) for loader in engine.template_loaders):
        return  # a loader of the user's may open a connection, which must not be forked: not applicable
    try:
        skipped: list[Any] = []
        for _ in range(depth):
            skipped.append(engine.find_template(name, skip=skipped)[0].origin)
        template = engine.find_template(name, skip=skipped)[0]
    except TemplateDoesNotExist:
        tally.drop(record, Reason.GONE, name)
    except Exception as error:  # its syntax, or a tag library that cannot be imported
        logger.debug("django: template %s", name, exc_info=True)
        tally.drop(record, Reason.FAILED, f"{type(error).__name__}: {error}")
    else:
        keys = [(loader, loader.cache_key(name, skipped)) for loader in _cached_loaders(engine)]
        if not any(loader.get_template_cache.get(key) is template for loader, key in keys):
            tally.drop(record, Reason.NO_EFFECT, "the engine keeps no templates")
        elif record.data.get("source") not in (None, text_digest(template.source)):
            tally.drop(record, Reason.STALE, "its source has changed; it was compiled anew")
        else:
            tally.used(record)


def _reads_files_only(loader: Any) -> bool:
    inner = getattr(loader, "loaders", None)
    if inner is not None and type(loader).__module__ == "django.template.loaders.cached":
        return all(_reads_files_only(each) for each in inner)
    return str(type(loader).get_contents.__module__).startswith("django.template.loaders.")


# Cold events


def _watch_resolver(module: types.ModuleType) -> None:
    populate = module.URLResolver._populate
    depth = threading.local()

    @functools.wraps(populate)
    def watched(resolver: Any) -> None:
        outermost = not getattr(depth, "inside", False)
        if not outermost:
            populate(resolver)
            return
        depth.inside = True  # included resolvers populate from within: one event for all
        try:
            name = resolver.urlconf_name
            cold_event("urlconf", name if isinstance(name, str) else getattr(name, "__name__", "<patterns>"))
            populate(resolver)
        finally:
            depth.inside = False

    module.URLResolver._populate = watched


def _watch_templates(module: types.ModuleType) -> None:
    compile_nodelist = module.Template.compile_nodelist

    @functools.wraps(compile_nodelist)
    def watched(template: Any) -> Any:
        # From a string, or by an engine without a cache, a warm process compiles every time too.
        if getattr(template.origin, "loader", None) is not None and _cached_loaders(template.engine):
            cold_event("template", plain(str(template.name)))
        return compile_nodelist(template)

    module.Template.compile_nodelist = watched


def _watch_translations(module: types.ModuleType) -> None:
    init = module.DjangoTranslation.__init__

    @functools.wraps(init)
    def watched(catalogue: Any, language: str, domain: Any = None, localedirs: Any = None) -> None:
        if domain in (None, "django"):  # others, such as JavaScript's, are made anew by each request that asks
            cold_event("translation", plain(language))
        init(catalogue, language, domain=domain, localedirs=localedirs)

    module.DjangoTranslation.__init__ = watched
