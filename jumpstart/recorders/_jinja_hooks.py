"""
What Jinja2's two recorders see and do inside `jinja2.Environment`: one set of wrappers per process, shared by both.

Wrapped are ``__init__`` and ``overlay``, to know the live environments, and ``compile``, through which every template
goes that a request makes the framework build: the page, its base, its includes and its imports.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import marshal
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from jumpstart.context import cold_event
from jumpstart.imports import when_imported
from jumpstart.recorders._app import plain, text_digest

logger = logging.getLogger(__name__)

# Methods that decide what code comes out; an environment that overrides one is left to itself.
_CODE_METHODS = ("parse", "_parse", "lex", "preprocess", "_tokenize", "_generate", "_compile", "lexer")
_SYNTAX = (
    "block_start_string",
    "block_end_string",
    "variable_start_string",
    "variable_end_string",
    "comment_start_string",
    "comment_end_string",
    "line_statement_prefix",
    "line_comment_prefix",
    "trim_blocks",
    "lstrip_blocks",
    "newline_sequence",
    "keep_trailing_newline",
    "optimized",
    "is_async",
    "sandboxed",
    "newstyle_gettext",
)


class JinjaHooks:
    """The wrappers and what they have seen. Use the module's `hooks`; call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed = False
        self._live: dict[int, weakref.ref[Any]] = {}  # by id: environments may define __eq__; oldest first
        self._seen: dict[int, dict[str, str]] = {}  # environment → name → digest of the source compiled last
        self._original: Callable[..., Any] | None = None
        self.code: dict[str, bytes] = {}
        self.hits: set[str] = set()

    def install(self) -> None:
        """Wrap jinja2 as soon as it is imported; once per process."""
        if not self._installed:
            self._installed = True
            when_imported("jinja2.environment", self._wrap)

    def environments(self) -> list[Any]:
        """The live environments that load templates by name, oldest first."""
        with self._lock:
            live = [reference() for reference in tuple(self._live.values())]
        return [env for env in live if env is not None and getattr(env, "loader", None) is not None]

    def seen(self, env: Any) -> dict[str, str]:
        """Name → source digest of what *env* compiled, under the name that its loader gave."""
        with self._lock:
            return dict(self._seen.get(id(env), ()))

    def compile_again(self, env: Any, source: str, name: str) -> bytes:
        """Compile once more, as the framework would, and return the marshalled code. Not a cold event."""
        assert self._original is not None
        return marshal.dumps(self._original(env, source, name, None))

    def _wrap(self, module: types.ModuleType) -> None:
        environment = module.Environment
        init, overlay, compile_ = environment.__init__, environment.overlay, environment.compile
        self._original = compile_

        @functools.wraps(init)
        def tracked_init(env: Any, *args: Any, **kwargs: Any) -> None:
            init(env, *args, **kwargs)
            self._track(env)

        @functools.wraps(overlay)
        def tracked_overlay(env: Any, *args: Any, **kwargs: Any) -> Any:
            made = overlay(env, *args, **kwargs)
            self._track(made)
            return made

        @functools.wraps(compile_)
        def watched_compile(
            env: Any,
            source: Any,
            name: str | None = None,
            filename: str | None = None,
            raw: bool = False,
            defer_init: bool = False,
        ) -> Any:
            # Without a name it came from a string, which a warm process compiles every time too.
            if name is not None and isinstance(source, str) and not raw and not defer_init:
                code = self._before_compile(env, source, name, filename)
                if code is not None:
                    return code
            return compile_(env, source, name, filename, raw, defer_init)

        environment.__init__ = tracked_init
        environment.overlay = tracked_overlay
        # Jinja2 hides frames marked so from the tracebacks that it shows to template authors.
        environment.compile = getattr(module, "internalcode", lambda function: function)(watched_compile)

    def _track(self, env: Any) -> None:
        key = id(env)

        def forget(_: Any) -> None:
            # No lock: this may run inside any allocation, the ones under our lock included. Each pop is atomic.
            self._live.pop(key, None)
            self._seen.pop(key, None)

        with self._lock:
            self._live[key] = weakref.ref(env, forget)
            self._seen[key] = {}

    def _before_compile(self, env: Any, source: str, name: str, filename: str | None) -> types.CodeType | None:
        if id(env) not in self._live:  # made before the hooks, or by a copy of our own
            self._track(env)
        name, digest = plain(name), text_digest(source)
        seen = self._seen.setdefault(id(env), {})
        if env.loader is not None and env.cache is not None and seen.get(name) != digest:
            # Without a cache every request compiles, warm or not; evicted and compiled again is not news either.
            cold_event("template", name)
        seen[name] = digest
        if not self.code:
            return None
        try:
            key = code_key(env, name, digest)
        except Exception:  # the user's autoescape callable; compiling shows the error where it belongs
            return None
        blob = self.code.get(key) if key is not None else None
        if blob is None or key is None:
            return None
        try:
            code = _with_filename(marshal.loads(blob), filename or "<template>")
        except (EOFError, ValueError, TypeError):
            logger.warning("jinja-bytecode: the recorded code of %s cannot be read; compiling it", name, exc_info=True)
            self.code.pop(key, None)
            return None
        self.hits.add(key)
        return code


def code_key(env: Any, name: str, source_digest: str) -> str | None:
    """
    Everything that decides what code a template becomes, as one digest; None when that cannot be told.

    Left out are environments whose class, extensions or ``finalize`` are not Jinja2's own: these may put anything into
    the code. Custom filters and tests are named in the key (they may replace built-in ones), and templates that use
    one are never recorded: constant folding would have baked their answers in.
    """
    import markupsafe

    jinja2: Any = sys.modules["jinja2"]
    defaults: Any = sys.modules["jinja2.defaults"]
    base = jinja2.Environment
    cls = type(env)
    generator = env.code_generator_class
    if (
        any(getattr(cls, method, None) is not getattr(base, method, None) for method in _CODE_METHODS)
        or not generator.__module__.startswith("jinja2.")
        or env.finalize is not None
        or any(not type(extension).__module__.startswith("jinja2.") for extension in env.extensions.values())
    ):
        return None
    autoescape = env.autoescape(name) if callable(env.autoescape) else env.autoescape
    parts = [
        importlib.util.MAGIC_NUMBER.hex(),
        jinja2.__version__,
        _version_of(markupsafe),
        f"{generator.__module__}.{generator.__qualname__}",
        [repr(getattr(env, option, None)) for option in _SYNTAX],
        [sorted(map(str, getattr(env, option, ()))) for option in ("intercepted_binops", "intercepted_unops")],
        sorted(env.extensions),
        sorted((key, value) for key, value in env.policies.items() if isinstance(value, (str, int, bool))),
        sorted(custom_names(env.filters, defaults.DEFAULT_FILTERS)),
        sorted(custom_names(env.tests, defaults.DEFAULT_TESTS)),
        bool(autoescape),
        name,
        source_digest,
    ]
    return text_digest(json.dumps(parts))


def custom_names(present: dict[str, Any], defaults: dict[str, Any]) -> set[str]:
    """Names of filters or tests that are not Jinja2's own, added or replaced."""
    return {name for name, function in present.items() if defaults.get(name) is not function}


def _version_of(module: Any) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(module.__name__)
    except PackageNotFoundError:
        return "unknown"


def _with_filename(code: types.CodeType, filename: str) -> types.CodeType:
    """The same code as if compiled from *filename*, which names the template's file in tracebacks on this host."""
    constants = tuple(
        _with_filename(constant, filename) if isinstance(constant, types.CodeType) else constant
        for constant in code.co_consts
    )
    return code.replace(co_filename=filename, co_consts=constants)


hooks = JinjaHooks()
