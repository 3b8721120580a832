"""
From the words on the command line to the app object: ``module:attr``, factories, and which interface it speaks.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from jumpstart.errors import AppLoadError, ConfigError
from jumpstart.imports import namespace_of

Interface = Literal["asgi", "asgi2", "wsgi"]

DEFAULT_ATTRIBUTES = ("app", "application")  # uvicorn users write the first, mod_wsgi and gunicorn users the second


@dataclass(frozen=True)
class Target:
    """
    A parsed target.

    Attributes:
        module: dotted module name.
        attribute: dotted attribute path, or None for the default attributes.
        arguments: positional and keyword arguments when the target was written as a call, ``module:create_app("x")``.
    """

    module: str
    attribute: str | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def parse_target(text: str) -> Target:
    """
    Parse ``module``, ``module:attr``, ``module:a.b`` or ``module:create_app("literal", key=1)``.

    Raises:
        ConfigError: the text is none of these; the message shows what is.
    """
    module, _, expression = text.partition(":")
    if not module or not all(part.isidentifier() for part in module.split(".")):
        hint = " (write a dotted module, not a file)" if "/" in module or module.endswith(".py") else ""
        raise ConfigError(f"target {text!r}: {module!r} is not a module name{hint}; write module:attribute")
    if not expression:
        return Target(module, None)
    try:
        node = ast.parse(expression, mode="eval").body
        if isinstance(node, ast.Call):
            positional = tuple(ast.literal_eval(argument) for argument in node.args)
            keywords = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords if word.arg}
            if len(keywords) != len(node.keywords):
                raise ValueError("** is not allowed")
            return Target(module, _dotted(node.func), (positional, keywords))
        return Target(module, _dotted(node))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:  # all that ast raises for a text
        raise ConfigError(
            f"target {text!r}: {expression!r} is neither an attribute (app, pkg.app) nor a call with literal "
            f'arguments (create_app("x")): {error or "nested too deeply"}'
        ) from None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("only names and dots are allowed")


def load_app(text: str, *, app_dir: Path, factory: bool = False) -> Any:
    """
    Import the target and return the app; *app_dir* becomes the first entry of `sys.path` if it is not there yet.

    Raises:
        ConfigError: the target or the folder is wrong as written.
        AppLoadError: importing it, finding the attribute or calling the factory failed; the message carries the
            traceback of the app's own frames.
    """
    target = parse_target(text)
    if not app_dir.is_dir():
        raise ConfigError(f"--app-dir {app_dir}: no such folder")
    if str(app_dir) not in sys.path:
        sys.path.insert(0, str(app_dir))
    module = _import(target.module, text, app_dir)
    found = _attribute(module, target, text)
    if target.arguments is None and not factory:
        return found
    positional, keywords = target.arguments or ((), {})
    try:
        return found(*positional, **keywords)
    except SystemExit as error:
        raise AppLoadError(f"the factory {text} called sys.exit({error.code!r})\n{_own_frames(error)}") from error
    except BaseException as error:  # KeyboardInterrupt too: our processes ignore SIGINT, so it is the app's own
        raise AppLoadError(f"the factory {text} raised\n{_own_frames(error)}") from error


def _import(name: str, text: str, app_dir: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            raise AppLoadError(
                f"no module named {missing!r} for target {text!r}: looked in {app_dir} (--app-dir) and sys.path; "
                f"is the name right, and is the folder the one that contains {name.split('.')[0]!r}?"
            ) from error
        raise AppLoadError(f"importing {name} failed\n{_own_frames(error)}") from error
    except SystemExit as error:
        raise AppLoadError(f"{name} called sys.exit({error.code!r}) at import\n{_own_frames(error)}") from error
    except BaseException as error:  # KeyboardInterrupt too: our processes ignore SIGINT, so it is the app's own
        raise AppLoadError(f"importing {name} failed\n{_own_frames(error)}") from error


def _attribute(module: ModuleType, target: Target, text: str) -> Any:
    names = DEFAULT_ATTRIBUTES if target.attribute is None else (target.attribute,)
    for name in names:
        try:
            return functools.reduce(getattr, name.split("."), module)
        except AttributeError:
            continue
        except BaseException as error:  # a module's __getattr__, a property: the app's code as well
            raise AppLoadError(f"target {text!r}: looking for {name} raised\n{_own_frames(error)}") from error
    callables = sorted(
        name for name, value in namespace_of(module).items() if not name.startswith("_") and callable(value)
    )
    offer = f"; it has {', '.join(callables[:8])}" if callables else ""
    raise AppLoadError(f"target {text!r}: module {target.module} has no {' or '.join(names)}{offer}")


def _own_frames(error: BaseException) -> str:
    """
    The traceback without the frames of importlib and of what we put into imports, which tell an app's author nothing.

    Ours at the end, below all of the app's, stay: there the error is ours. A syntax error has its place without them.
    """
    folder = Path(__file__).parent
    machinery = (str(folder / "recorders") + os.sep, str(folder / "imports.py"))

    def is_ours(filename: str) -> bool:
        return filename.startswith(machinery)

    here = {__file__, importlib.__file__}
    shown = traceback.TracebackException.from_exception(error)
    links: list[traceback.TracebackException] = [shown]
    while links:
        link = links.pop()
        frames = [
            frame for frame in link.stack if frame.filename not in here and "<frozen importlib" not in frame.filename
        ]
        theirs = [number for number, frame in enumerate(frames) if not is_ours(frame.filename)]
        is_syntax = link.exc_type is not None and issubclass(link.exc_type, SyntaxError)
        end = len(frames) if is_syntax else max(theirs, default=-1)
        link.stack[:] = [frame for number, frame in enumerate(frames) if number > end or not is_ours(frame.filename)]
        links += [next_link for next_link in (link.__cause__, link.__context__) if next_link is not None]
    return "".join(shown.format()).rstrip()


def detect_interface(app: Any, text: str = "the app") -> Interface:
    """
    Tell ASGI 3, ASGI 2 (a class or double callable) and WSGI apart by looking at what would be called.

    Raises:
        ConfigError: it is not callable or its signature fits neither; the remedy is ``--interface``.
    """
    if not callable(app):
        raise ConfigError(f"{text} is {type(app).__name__!r}, which is not callable: neither a WSGI nor an ASGI app")
    try:
        with warnings.catch_warnings(action="ignore"):  # of what the app does (Python 3.13: a partial as __call__)
            return _interface(app, text)
    except ConfigError:
        raise
    except BaseException as error:  # proxies raise anything when an attribute is asked for
        raise ConfigError(
            f"{text}: cannot tell WSGI from ASGI: looking at it raised {type(error).__name__}: {error}; "
            "say --interface asgi or --interface wsgi"
        ) from error


def _interface(app: Any, text: str) -> Interface:
    called = _innermost(app)
    if inspect.iscoroutinefunction(called):
        return "asgi"
    if inspect.isclass(app) and hasattr(app, "__await__"):
        return "asgi"
    count = _required_positionals(_routine(app))
    if count == 3:
        return "asgi"
    if count == 2:
        return "wsgi"
    if count == 1 and not inspect.isfunction(app):
        return "asgi2"  # a class, or an object that is called twice
    hints = {0: "a factory? then add --factory", 1: "if it is of ASGI 2, say --interface asgi2"}
    hint = hints.get(count, "say --interface asgi or --interface wsgi")
    raise ConfigError(f"{text}: cannot tell WSGI from ASGI by its signature; {hint}")


def _innermost(app: Any) -> Any:
    called = app
    for _ in range(20):  # a chain longer than this is a cycle
        if isinstance(called, functools.partial):
            called = called.func
        elif hasattr(called, "__wrapped__"):
            called = called.__wrapped__
        elif called is (routine := _routine(called)):
            break
        else:
            called = routine
    return called


def _routine(called: Any) -> Any:
    """What runs when an instance is called; anything whose signature speaks for itself is returned as it is."""
    for _ in range(20):
        if inspect.isroutine(called) or inspect.isclass(called) or isinstance(called, functools.partial):
            break
        if hasattr(called, "__wrapped__"):
            break
        called = called.__call__  # may be an instance again, or a static method, which inspect.signature cuts short
    return called


def _required_positionals(called: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return -1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return -1
    return sum(1 for parameter in parameters if parameter.kind in kinds and parameter.default is parameter.empty)
