"""
Finds the framework objects inside the ``app`` that the server was given.

What a user hands over is seldom the framework's object itself: it is wrapped in middleware, bound, partially applied,
or mounts further apps. The walk reads instance dictionaries and closures only. It never goes through ``getattr`` of
unknown objects, and asks for ``type()`` instead of `isinstance`, which reads ``__class__``: a proxy or a property of
the user's could run code or open a connection.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

MAX_OBJECTS = 2000  # a chain of middleware is some ten long; this bounds closures that lead everywhere

# Where middleware keeps what it wraps: Starlette, asgiref, a2wsgi, Werkzeug, whitenoise, Sentry, and habits.
LINKS = (
    "app",
    "_app",
    "asgi_app",
    "wsgi_app",
    "wsgi_application",
    "application",
    "_application",
    "wrapped",
    "_wrapped",
    "__wrapped__",
    "inner",
    "middleware_stack",
    "router",
)

_DEAD_ENDS = (str, bytes, int, float, type, type(None))


def text_digest(text: str) -> str:
    """The digest under which records remember a text such as a template's source."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def plain(text: str) -> str:
    """*text* as an exact `str`: frameworks pass names as `SafeString` or `Markup`, whose `str()` is themselves."""
    return str.__str__(text)


def instances(app: Any, module: str, name: str) -> list[Any]:
    """Instances of class *name* of *module* in *app*, outermost first; none when the module was never imported."""
    wanted = getattr(sys.modules.get(module), name, None)
    if not isinstance(wanted, type):
        return []
    return [found for found in walk(app) if issubclass(type(found), wanted)]


def walk(app: Any) -> list[Any]:
    """Every object that *app* consists of as far as can be seen, outermost first, each once."""
    found: list[Any] = []
    seen: set[int] = set()
    queue: list[Any] = [app]
    while queue and len(found) < MAX_OBJECTS:
        candidate = queue.pop(0)
        if id(candidate) in seen or issubclass(type(candidate), _DEAD_ENDS):
            continue
        seen.add(id(candidate))
        found.append(candidate)
        queue.extend(_inside(candidate))
    return found


def _inside(candidate: Any) -> Iterator[Any]:
    kind = type(candidate)
    if issubclass(kind, functools.partial):
        yield candidate.func
        yield from (value for value in candidate.args if callable(value))
        return
    if kind is types.MethodType:
        yield candidate.__self__
        return
    if kind is types.FunctionType:
        if (wrapped := vars(candidate).get("__wrapped__")) is not None:
            yield wrapped
        for cell in candidate.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if callable(value):
                yield value
        return
    attributes = _attributes(candidate)
    for link in LINKS:
        if link in attributes:
            yield attributes[link]
    mounts: Any = attributes.get("mounts")  # werkzeug.middleware.dispatcher
    if issubclass(type(mounts), dict):
        yield from mounts.values()
    routes: Any = attributes.get("routes")
    if issubclass(type(routes), list):
        yield from _mounted(routes)


def _mounted(routes: list[Any]) -> Iterator[Any]:
    """What Starlette's routes lead to apart from endpoints, which would use up the walk's budget."""
    routing = sys.modules.get("starlette.routing")
    kinds = tuple(kind for name in ("Mount", "Host") if isinstance(kind := getattr(routing, name, None), type))
    for route in routes:
        if kinds and issubclass(type(route), kinds):
            yield route
        elif (included := _attributes(route).get("original_router")) is not None:  # FastAPI's include_router
            yield included


def _attributes(candidate: Any) -> Mapping[str, Any]:
    try:
        return object.__getattribute__(candidate, "__dict__")  # type: ignore[no-any-return]  # the object's own dict
    except AttributeError:
        pass
    slots = {name for cls in type(candidate).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)}
    values = {}
    for name in slots.intersection((*LINKS, "mounts", "routes")):
        try:
            values[name] = object.__getattribute__(candidate, name)
        except AttributeError:
            pass
    return values
