"""
Which route a request belongs to: the template that its framework found, or a guess from the path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import MutableMapping
from typing import Any

from jumpstart_warmup.corpus import is_opaque

Scope = MutableMapping[str, Any]
Environ = dict[str, Any]

NOT_FOUND = "(not found)"

MAX_SEGMENTS = 8
_PLACEHOLDER = "{}"
_REST = "…"
_NAMELIKE = re.compile(r"[A-Za-z0-9_.~!$'()*+,:&-]*")
_DIGITS = re.compile(r"[0-9]{4}|^[0-9][0-9.,:_-]*$")
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")


@functools.lru_cache(maxsize=2048)
def normalise_path(path: str) -> str:
    """
    Guess a route from a (decoded) path: segments that look like values become ``{}``, from the ninth on ``…``.

    Values are numbers, anything with four digits in a row, UUIDs, opaque strings, more than 40 characters, characters
    beyond those of names, what stands behind an equals sign, and the parameters of a segment (RFC 3986 3.3), such as
    ``;jsessionid=``. Pure and idempotent.
    """
    segments = path.split("/")
    head = segments[: MAX_SEGMENTS + 1]  # the first is what stands before the leading slash: nothing
    shown = [_shown(segment) for segment in head]
    if len(segments) > len(head):
        shown.append(_REST)
    return "/".join(shown)


def _shown(segment: str) -> str:
    name, semicolon, _ = segment.partition(";")
    shown = name if _is_name(name) else _PLACEHOLDER
    return f"{shown};{_PLACEHOLDER}" if semicolon else shown


def _is_name(segment: str) -> bool:
    return (
        len(segment) <= 40
        and _NAMELIKE.fullmatch(segment) is not None
        and _DIGITS.search(segment) is None
        and _UUID.fullmatch(segment) is None
        and not is_opaque(segment)
    )


def route_of_scope(scope: Scope, root_path: str = "", status: int = 0) -> str:
    """
    Return the route that answered an ASGI request, after the app has run.

    Starlette and FastAPI leave their route in the scope: its template, behind the prefix of the mounts it lies in.
    Other frameworks (Django among them) leave nothing: then the path is normalised, except for a 404, whose path anyone
    could have made up: ``(not found)``.

    Args:
        scope: the very scope the app was called with.
        root_path: its ``root_path`` before the call; mounts lengthen it.
        status: the status of the response, 0 when not known.
    """
    route = scope.get("route")
    template = getattr(route, "path", None)
    if isinstance(template, str):
        fastapi = scope.get("fastapi")
        if isinstance(fastapi, dict):  # FastAPI: the prefix of include_router() is not in the route itself
            effective = fastapi.get("effective_route_context")
            if effective is not None and getattr(effective, "original_route", None) is route:
                longer = getattr(effective, "path", None)
                template = longer if isinstance(longer, str) else template
        inner_root = scope.get("root_path") or ""
        mount = ""
        if inner_root != root_path and inner_root.startswith(root_path):
            mount = normalise_path(inner_root[len(root_path) :])
        # A Mount whose app leaves no route of its own (static files, WSGI) is itself the route.
        return mount + ("/{path}" if _is_mount(route) else template) or "/"
    if status == 404:
        return NOT_FOUND
    path = scope.get("path") or "/"
    return normalise_path(path[len(root_path) :] if root_path and path.startswith(root_path) else path)


def _is_mount(route: Any) -> bool:
    return not hasattr(route, "methods") and hasattr(route, "routes")


def werkzeug_rule(environ: Environ, root_path: str = "") -> str | None:
    """The rule that Werkzeug (Flask) has found for a request, or None."""
    rule = getattr(getattr(environ.get("werkzeug.request"), "url_rule", None), "rule", None)
    if not isinstance(rule, str):
        return None
    inner_root = environ.get("SCRIPT_NAME", "")  # longer inside a DispatcherMiddleware
    return normalise_path(inner_root[len(root_path) :]) + rule if inner_root != root_path else rule
