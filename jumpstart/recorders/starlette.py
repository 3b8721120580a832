"""
Starlette and FastAPI: routers that FastAPI builds on the first request, middleware stacks, and the OpenAPI document.

**Routers** are built in the mold: FastAPI 0.165 makes the dependants, response fields and handlers of an included
router when a request first passes it (10 to 16 ms per router, measured). No endpoint or dependency runs for it.

**Middleware stacks** are built in the worker, inside its loop, not in the mold: constructors of user middleware run
then, and some make loop-bound clients, start threads or register metrics that must not be registered twice. The main
app's stack is built by its lifespan start-up anyway; left over are mounted apps, and ``--lifespan off``.

**OpenAPI**: that the document was built is recorded by `StarletteRecorder` (nothing but that fact, so it holds for any
build); the document itself by `OpenapiRecorder`, which is tried first.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from jumpstart import context
from jumpstart.context import cold_event
from jumpstart.imports import file_of, spec_of, when_imported
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.recorders._app import instances, text_digest, walk
from jumpstart.records import Reason, Record, Tally
from jumpstart.runtime import is_app_module, is_as_loaded, loaded_dependency

logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024  # litellm's, the largest seen, is 3 MB


class StarletteRecorder(Recorder):
    """Builds routers and middleware stacks, and OpenAPI documents where a record says that they were asked for."""

    name: ClassVar[str] = "starlette"

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._app: Any = None

    def observe(self) -> None:
        when_imported("fastapi.routing", _watch_routers)
        when_imported("fastapi.openapi.utils", _watch_openapi)
        when_imported("starlette.applications", functools.partial(_watch_middleware, "Starlette"))
        when_imported("fastapi.applications", functools.partial(_watch_middleware, "FastAPI"))

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        if "starlette.applications" not in sys.modules:
            return
        self._app = app
        for part in walk(app):
            for router in _included_routers(part):
                _build_router(router)
        self._build_documents(records, tally)

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        """Build the stacks of apps whose lifespan nobody runs. Needs no records."""
        for found in instances(app, "starlette.applications", "Starlette"):
            if found.middleware_stack is None:
                try:
                    found.middleware_stack = found.build_middleware_stack()
                except Exception:  # the first request to that app will meet the same error
                    logger.warning("starlette: the middleware of %r could not be built", found, exc_info=True)

    def capture(self, purpose: Purpose) -> list[Record]:
        return [
            Record(key=f"openapi-built:{label}", data={"kind": "openapi-built", "app": label})
            for label, app in _fastapi_apps(self._app)
            if app.openapi_schema is not None
        ]

    def _build_documents(self, records: Sequence[Record], tally: Tally) -> None:
        apps = dict(_fastapi_apps(self._app))
        for record in records:
            app = apps.get(str(record.data.get("app")))
            if record.data.get("kind") != "openapi-built":
                tally.drop(record, Reason.MALFORMED, "unknown kind")
            elif app is None:
                tally.drop(record, Reason.GONE, "no such FastAPI app")
            elif tally.out_of_time():
                tally.drop(record, Reason.DEADLINE)
            else:
                try:
                    app.openapi()  # the document's recorder may have set it already; then this costs nothing
                except Exception as error:
                    logger.debug("starlette: app.openapi()", exc_info=True)
                    tally.drop(record, Reason.FAILED, f"{type(error).__name__}: {error}")
                else:
                    tally.used(record)


class OpenapiRecorder(Recorder):
    """
    Records FastAPI's finished OpenAPI documents: 64 ms of schema generation per route, seconds for a large app.

    A document is served as it is, so it must come from a trusted profile. It is tied to what it was made from: the
    routes and settings of the app, the installed distributions, and the source of every loaded module that is not
    part of one. What that cannot see is a schema that depends on the environment or on data; such apps override
    ``openapi()`` or switch this recorder off. Apps that override it are left alone here.

    Order: before `StarletteRecorder`, which has the framework build what is still missing.
    """

    name: ClassVar[str] = "openapi"
    needs_trust: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._app: Any = None
        self._captured: dict[str, tuple[Any, Record]] = {}
        self._depends: dict[str, str] = {}  # the source of modules as it was loaded
        self._looked_at: set[str] = set()
        self._unknown: set[str] = set()  # modules whose source was gone before it could be noted
        self._distributions: list[str] = []

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        if "fastapi.applications" not in sys.modules:
            return
        self._app = app
        self._distributions = list(_distributions())
        self._note_modules()
        apps = dict(_fastapi_apps(app))
        for record in records:
            found = apps.get(str(record.data.get("app")))
            document = record.data.get("document")
            if not isinstance(document, dict) or not document:
                tally.drop(record, Reason.MALFORMED, "no document")
            elif found is None:
                tally.drop(record, Reason.GONE, "no such FastAPI app")
            elif not _is_frameworks_own(found):
                tally.drop(record, Reason.NOT_APPLICABLE, "the app overrides openapi()")
            elif record.data.get("routes") != _routes_digest(found, self._distributions):
                tally.drop(record, Reason.STALE, "routes, settings or installed distributions have changed")
            elif _use_document(found, document):
                tally.used(record)
            else:
                tally.drop(record, Reason.NO_EFFECT, "this FastAPI builds its document anew")

    def capture(self, purpose: Purpose) -> list[Record]:
        """Return the documents; none when what they were made from is no longer what lies there."""
        records: list[Record] = []
        if self._app is None:
            return records
        self._note_modules()
        if not self._is_as_loaded():
            return records
        for label, app in _fastapi_apps(self._app):
            document = app.openapi_schema
            if document is None or not _is_frameworks_own(app):
                continue
            known = self._captured.get(label)
            if known is None or known[0] is not document:
                record = self._record(label, app, document)
                if record is None:
                    continue
                self._captured[label] = known = (document, record)
            records.append(known[1])
        return records

    def _record(self, label: str, app: Any, document: Any) -> Record | None:
        try:
            encoded = msgspec.json.encode(document)
            if len(encoded) > MAX_DOCUMENT_BYTES or msgspec.json.decode(encoded) != document:
                return None
        except (TypeError, ValueError, msgspec.MsgspecError):  # holds what JSON cannot: not ours to ship
            return None
        routes = _routes_digest(app, self._distributions)
        data = {"app": label, "document": msgspec.json.decode(encoded), "routes": routes}
        return Record(key=f"openapi:{label}", data=data, depends=dict(self._depends))

    def _note_modules(self) -> None:
        """Note the source of modules that have come since the last time; as soon as can be, see `loaded_dependency`."""
        for name in self._own_modules():
            depends = loaded_dependency(name)
            self._depends.update(depends)
            spec = spec_of(sys.modules.get(name))
            if not depends and spec is not None and spec.name == name:  # others were made at run time, from no source
                self._unknown.add(name)

    def _is_as_loaded(self) -> bool:
        """Whether what documents are made from is still what this process has loaded."""
        if self._unknown:
            logger.info("openapi: no document is recorded: the source of %s is gone", min(self._unknown))
            return False
        if self._distributions != list(_distributions()):
            return False
        return not self._depends or is_as_loaded(self._depends)  # without: the app is all in distributions

    def _own_modules(self) -> Iterator[str]:
        """Modules whose source no distribution's version stands for: the app's, and editable installs."""
        app_dir = Path(self.settings.app_dir) if self.settings.app_dir else None
        installed = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        ours = str(Path(__file__).parent.parent) + os.sep
        for name, module in list(sys.modules.items()):
            if name in self._looked_at:
                continue
            self._looked_at.add(name)
            file = file_of(module)
            if file is None or name == "__main__" or file.startswith(ours):
                continue
            if (app_dir is not None and is_app_module(name, app_dir)) or not file.startswith(installed):
                yield name


def _fastapi_apps(app: Any) -> list[tuple[str, Any]]:
    """FastAPI apps in *app* with labels that are the same in another process: position and title."""
    found = instances(app, "fastapi.applications", "FastAPI") if app is not None else []
    return [(f"{index}:{each.title}", each) for index, each in enumerate(found)]


def _included_routers(part: Any) -> Iterator[Any]:
    try:
        routes = object.__getattribute__(part, "__dict__").get("routes")
    except AttributeError:
        return
    if isinstance(routes, list):
        yield from (route for route in routes if hasattr(type(route), "effective_candidates"))


def _build_router(router: Any) -> None:
    """Have FastAPI (0.165's `_IncludedRouter`) build what the first request to *router* would."""
    try:
        low_priority = getattr(router, "effective_low_priority_routes", None)
        if low_priority is not None:
            low_priority()
        for candidate in router.effective_candidates():
            if hasattr(type(candidate), "effective_candidates"):
                _build_router(candidate)
    except Exception:  # an error in a dependency's signature, say: the first request will show it
        logger.warning("starlette: a router could not be built before the first request", exc_info=True)


def _is_frameworks_own(app: Any) -> bool:
    """Whether ``openapi`` is FastAPI's, neither overridden in a subclass nor assigned to the app."""
    fastapi: Any = sys.modules["fastapi.applications"]
    method = getattr(app.openapi, "__func__", None)
    return method is fastapi.FastAPI.openapi and "openapi" not in vars(app)


def _use_document(app: Any, document: dict[str, Any]) -> bool:
    """Set *document* as FastAPI would have; True when `app.openapi()` then answers with it and builds nothing."""
    schema, version = app.openapi_schema, getattr(app, "_openapi_routes_version", None)
    app.openapi_schema = document
    routes_version = getattr(app.router, "_get_routes_version", None)
    if callable(routes_version):
        app._openapi_routes_version = routes_version()
    if app.openapi() is document:
        return True
    # openapi() has just built its own, which is as warm; put nothing of ours in its way.
    if app.openapi_schema is document:
        app.openapi_schema = schema
        app._openapi_routes_version = version
    return False


def _routes_digest(app: Any, distributions: list[str]) -> str:
    """What the document is made from apart from the source of modules."""
    parts: list[Any] = [distributions, sys.version]
    settings = (
        "title",
        "version",
        "openapi_version",
        "summary",
        "description",
        "terms_of_service",
        "contact",
        "license_info",
        "openapi_tags",
        "servers",
        "separate_input_output_schemas",
        "openapi_external_docs",
    )
    parts.append([repr(getattr(app, name, None)) for name in settings])
    parts.extend(_describe(app.routes))
    parts.extend(_describe(app.webhooks.routes))
    return text_digest(msgspec.json.encode(parts).decode())


def _describe(routes: Iterable[Any]) -> Iterator[list[Any]]:
    for route in _effective(routes):
        endpoint = getattr(route, "endpoint", None)
        yield [
            getattr(route, "path", None),
            sorted(getattr(route, "methods", None) or ()),
            getattr(route, "name", None),
            [getattr(endpoint, "__module__", ""), getattr(endpoint, "__qualname__", type(endpoint).__qualname__)],
            bool(getattr(route, "include_in_schema", True)),
            str(getattr(route, "status_code", None)),
            str(getattr(route, "operation_id", None)),
            [str(tag) for tag in getattr(route, "tags", None) or ()],
            getattr(route, "deprecated", None),
        ]


def _effective(routes: Iterable[Any]) -> Iterator[Any]:
    """The routes with those of included routers in their place."""
    for route in routes:
        contexts = getattr(route, "effective_route_contexts", None)
        if callable(contexts):
            yield from contexts()
        else:
            yield route


def _distributions() -> Iterator[str]:
    """Names and versions of what is installed, from folder names alone: reading the metadata takes 100 times longer."""
    for folder in sys.path:
        try:
            names = [entry.name for entry in Path(folder or ".").iterdir()]
        except OSError:  # a zip file, or not there
            continue
        yield from sorted(name for name in names if name.endswith((".dist-info", ".egg-info")))


def _watch_routers(module: types.ModuleType) -> None:
    included = getattr(module, "_IncludedRouter", None)
    if included is None or not hasattr(included, "_build_effective_context"):
        return  # a FastAPI that builds its routers at once
    build = included._build_effective_context

    @functools.wraps(build)
    def watched(router: Any, route: Any) -> Any:
        request = context.current()
        if request is not None:
            prefixes = (getattr(each, "prefix", "") for each in (router.include_context, router.original_router))
            event = ("router", "".join(map(str, prefixes)))
            if not request.events or request.events[-1] != event:  # one for the router, not one for each route
                cold_event(*event)
        return build(router, route)

    included._build_effective_context = watched


def _watch_openapi(module: types.ModuleType) -> None:
    # fastapi.applications takes the function from this module when it is imported, that is, after this hook.
    targets = [module, sys.modules.get("fastapi.applications")]
    watched = _counting(module.get_openapi, lambda *_, **options: ("openapi", str(options.get("title", ""))))
    for target in targets:
        if target is not None and hasattr(target, "get_openapi"):
            target.get_openapi = watched  # type: ignore[attr-defined]  # a module's global


def _watch_middleware(name: str, module: types.ModuleType) -> None:
    cls = getattr(module, name)
    if "build_middleware_stack" in vars(cls):
        cls.build_middleware_stack = _counting(
            cls.build_middleware_stack, lambda app: ("middleware", type(app).__name__)
        )


def _counting(function: Callable[..., Any], describe: Callable[..., tuple[str, str]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        cold_event(*describe(*args, **kwargs))
        return function(*args, **kwargs)

    return counted
