"""
What the import system tells us: which modules requests import, and when a framework has arrived.

One finder, first in `sys.meta_path`, does both. It never loads anything itself:

* **Observing**: `find_spec` notes the name in the current request's context and lets the other finders work.
* **Post-import hooks**: for a name that somebody waits for, the other finders' spec is returned with its class swapped
  for one that notices the end of the import (the import system then sets ``spec._initializing`` to False, in every
  CPython since 3.3, and `import` itself relies on it). The loader and the module are never wrapped, so that inspect,
  pkgutil and importlib.resources see what they always see; the spec gets its class back at that moment.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from jumpstart import context

logger = logging.getLogger(__name__)

MAX_IMPORTS = 5_000  # names noted per request; litellm's largest first request imports about 500
MAX_LAZY = 20_000  # names remembered per process; as many as a merged section holds

Callback = Callable[[ModuleType], None]


def namespace_of(module: object) -> dict[str, Any]:
    """
    The globals of an entry of `sys.modules`; empty when it is no module.

    Programs put any object there: proxies, None, modules that are loaded when an attribute of theirs is asked for
    (`importlib.util.LazyLoader`). So nothing of theirs runs here: no property, no ``__getattr__``.
    """
    try:
        namespace = object.__getattribute__(module, "__dict__")
    except Exception:  # none, or a property of that name
        return {}
    return namespace if type(namespace) is dict else {}


def spec_of(module: object) -> ModuleSpec | None:
    """The spec of an entry of `sys.modules`, read as `namespace_of` does; None when it has none that is a real one."""
    spec = namespace_of(module).get("__spec__")
    return spec if issubclass(type(spec), ModuleSpec) else None


def file_of(module: object) -> str | None:
    """The ``__file__`` of an entry of `sys.modules`, read as `namespace_of` does; None when it has none."""
    file = namespace_of(module).get("__file__")
    return file if type(file) is str else None


# What `import` itself does when another thread is at a module: returns at once when none is, and on a deadlock.
_wait_for_import: Callable[[str], None] = importlib._bootstrap._lock_unlock_module  # type: ignore[attr-defined]

_lock = threading.Lock()
_hooks: dict[str, list[Callback]] = {}
_lazy: dict[str, None] = {}


class _WatchedSpec(ModuleSpec):
    """A spec whose import is being watched; see the module's docstring."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # mypy forbids what CPython allows
            _fire(self.name)


def _watch(spec: ModuleSpec) -> None:
    if type(spec) is ModuleSpec:
        spec.__class__ = _WatchedSpec
    elif type(spec) is not _WatchedSpec:
        logger.warning("cannot watch the import of %s: its spec is a %s", spec.name, type(spec).__qualname__)


class ImportObserver:
    """The finder. `install` puts the only instance in place."""

    jumpstart_finder = True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        request = context.current()
        if request is not None and len(request.imports) < MAX_IMPORTS:
            request.imports.append(name)
        if name not in _hooks:
            return None
        spec = find_after(self, name, path, target)
        if spec is not None:
            _watch(spec)
        return spec


_observer = ImportObserver()


def install() -> None:
    """Put the observer first in `sys.meta_path`; does nothing when it is there already."""
    if _observer not in sys.meta_path:
        sys.meta_path.insert(0, _observer)


def find_after(
    finder: object, name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """
    Ask the finders that come after *finder* in `sys.meta_path`; those before it have had their turn.

    For finders that change what others find. Asking `importlib.util.find_spec` instead would come back to *finder*.
    """
    finders: list[Any] = list(sys.meta_path)
    for position, other in enumerate(finders):
        if other is finder:
            finders = finders[position + 1 :]
            break
    for other in finders:
        find_spec = getattr(other, "find_spec", None)
        spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def when_imported(name: str, callback: Callback) -> None:
    """
    Call *callback* with the module *name*: now if it is imported, else once, right after, in the importing thread.

    While another thread is importing it, it waits for that. A callback that raises is logged with its traceback and
    does not break the import. An import that fails keeps the callback for the next attempt. The observer is installed
    when it is not.
    """
    install()
    with _lock:
        _hooks.setdefault(name, []).append(callback)
    # Another thread may have asked the finders already, before there was a hook: wait until it is through.
    _wait_for_import(name)
    module = sys.modules.get(name)
    if module is None:
        return
    spec = spec_of(module)
    if spec is not None and getattr(spec, "_initializing", False):
        _watch(spec)  # this thread is importing it, or waiting would have been a deadlock
        if getattr(spec, "_initializing", False):
            return
    _fire(name)


def _fire(name: str) -> None:
    """Hand the module to those who wait for it, if its import succeeded."""
    module = sys.modules.get(name)
    if module is None:
        return
    with _lock:
        callbacks = _hooks.pop(name, [])
    for callback in callbacks:
        try:
            callback(module)
        except Exception:
            logger.exception("a hook on the import of %s failed", name)


def import_events(request: context.RequestContext) -> list[str]:
    """
    Return the modules that a finished *request* imported, in order: the ``what`` of its cold ``import`` events.

    Optional modules that are not installed, and names that were only looked for, are left out. The names are
    remembered for `lazy_imports`. Call it once per request, from any thread; *request* is not changed.
    """
    if not request.imports:
        return []
    names = [name for name in dict.fromkeys(request.imports) if sys.modules.get(name) is not None]
    with _lock:
        for name in names:
            if len(_lazy) >= MAX_LAZY:
                break
            _lazy.setdefault(name)
    return names


def lazy_imports() -> list[str]:
    """Return the modules that requests of this process have imported, in the order in which that happened."""
    with _lock:
        return list(_lazy)
