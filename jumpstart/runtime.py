"""
What this process runs on, and the present digests of what records depend on.

A digest never holds a path, so that a profile made in one folder fits an app deployed to another. Modules are located
without importing them or their parents: asking must not warm, change or break anything.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from jumpstart.imports import file_of, namespace_of, spec_of

logger = logging.getLogger(__name__)

MAX_SOURCE_FILES = 5_000
MAX_SOURCE_BYTES = 100 * 1024 * 1024
THIRD_PARTY = frozenset({"site-packages", "dist-packages"})
NOT_SOURCES = THIRD_PARTY | {"__pycache__", "node_modules"}


class RuntimeKey(msgspec.Struct, frozen=True):
    """
    What bytecode, pickles and other runtime-bound records are bound to; equal keys may exchange them.

    Attributes:
        implementation: ``sys.implementation.name``, such as ``cpython``.
        version: such as ``3.11.7``.
        cache_tag: such as ``cpython-311``.
        platform: such as ``linux-x86_64``.
        magic: hex of `importlib.util.MAGIC_NUMBER`.
    """

    implementation: str
    version: str
    cache_tag: str
    platform: str
    magic: str


def runtime_key() -> RuntimeKey:
    """Return the key of this process."""
    return RuntimeKey(
        implementation=sys.implementation.name,
        version=_python_version(),
        cache_tag=sys.implementation.cache_tag or "",
        platform=sysconfig.get_platform(),
        magic=importlib.util.MAGIC_NUMBER.hex(),
    )


def _python_version() -> str:
    # Not platform.python_version(): importing platform costs milliseconds at every boot.
    info = sys.version_info
    suffix = {"alpha": f"a{info.serial}", "beta": f"b{info.serial}", "candidate": f"rc{info.serial}"}
    return f"{info.major}.{info.minor}.{info.micro}{suffix.get(info.releaselevel, '')}"


def digest(dependency: str) -> str | None:
    """
    Return the present digest of ``module:NAME`` or ``dist:NAME``, or None if it is not there or of an unknown kind.

    Modules: ``python-3.11.7`` for the standard library, ``sha256:…`` of the file's bytes, or ``namespace``.
    Distributions: their version. Never raises, never imports what it looks for; any thread may call it.
    """
    kind, _, name = dependency.partition(":")
    if not name:
        return None
    if kind == "module":
        return _module_digest(name)
    if kind == "dist":
        return _distribution_version(name)
    return None


def module_dependency(name: str) -> dict[str, str]:
    """
    Return ``{"module:NAME": digest}`` for a record's ``depends``, or ``{}`` if there is no such module now.

    A record that stands on the module must not be made from an empty answer: without ``depends`` it is valid for ever.
    """
    dependency = f"module:{name}"
    present = digest(dependency)
    return {} if present is None else {dependency: present}


_loaded: dict[str, tuple[importlib.machinery.ModuleSpec, dict[str, str]]] = {}


def loaded_dependency(name: str) -> dict[str, str]:
    """
    Return the `module_dependency` of the source that this process **loaded**, which may have been replaced since.

    It is noted when it is first asked for after the module was loaded, and again after a reload: ask as early as can
    be, while the module is being imported or right after. Files are replaced under running servers (``git pull``, then
    a restart), and what the old code has computed must not pass for the new code's.
    """
    spec = _loaded_spec(name)
    if spec is None:
        return module_dependency(name)
    noted = _loaded.get(name)
    if noted is None or noted[0] is not spec:  # a reload makes another spec
        _loaded[name] = noted = (spec, module_dependency(name))
    return noted[1]


def is_as_loaded(depends: Mapping[str, str]) -> bool:
    """
    Whether the dependencies noted by `loaded_dependency` still hold, so that a record may stand on them.

    False without any: nobody could tell when such a record is out of date.
    """
    return bool(depends) and all(digest(dependency) == noted for dependency, noted in depends.items())


def _module_digest(name: str) -> str | None:
    if name == "__main__":
        return None  # in each process another one; and a finder would offer any __main__.py on the path
    spec = _locate(name)
    if spec is None:
        return None
    if spec.origin in ("built-in", "frozen"):
        return f"python-{_python_version()}"
    if not spec.has_location or spec.origin is None:
        return "namespace" if spec.submodule_search_locations is not None else None
    if _is_stdlib(spec.origin):
        return f"python-{_python_version()}"
    return _file_digest(spec.origin) or _loader_digest(spec)


def _distribution_version(name: str) -> str | None:
    import importlib.metadata

    try:
        # None comes from a distribution whose metadata is broken, whatever the annotation says.
        version: Any = importlib.metadata.version(name)
    except Exception as error:  # metadata providers are plug-ins and may raise anything
        if not isinstance(error, importlib.metadata.PackageNotFoundError):
            logger.debug("metadata of distribution %r cannot be read: %r", name, error)
        return None
    return version if isinstance(version, str) else None


# -- locating without importing --


def _locate(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find the spec of a dotted name without importing it or its parents."""
    loaded = _loaded_spec(name)
    if loaded is not None:
        return loaded
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        spec = _loaded_spec(prefix) or _find(prefix, path)
        if spec is None:
            return None
        if end < len(parts):
            path = _search_path(prefix, spec)
            if path is None:
                return None
    return spec


def _loaded_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    spec = spec_of(sys.modules.get(name))
    # `python -m` gives __main__ the spec of the module it came from.
    return spec if spec is not None and spec.name == name else None


def _find(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in list(sys.meta_path):
        if getattr(finder if isinstance(finder, type) else type(finder), "jumpstart_finder", False):
            continue  # ours would answer from a profile; the question is what is really there
        try:
            spec = finder.find_spec(name, path)
        except Exception as error:  # finders are plug-ins; one that fails here does not know the module
            if isinstance(error, KeyError) and path is not None:
                spec = _nested_namespace(name, path)
                if spec is not None:
                    return spec
            logger.debug("finder %r failed for %r: %r", finder, name, error)
            continue
        if spec is not None:
            return spec
    return None


def _nested_namespace(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    # For a namespace package below another package, PathFinder needs the parent in sys.modules (KeyError), and we do
    # not import it. By then it has found folders of that name and no module.
    leaf = name.rpartition(".")[2]
    folders = [entry for entry in (str(Path(base, leaf)) for base in path) if Path(entry).is_dir()]
    if not folders:
        return None
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = folders
    return spec


def _search_path(name: str, spec: importlib.machinery.ModuleSpec) -> list[str] | None:
    # A loaded package may have extended its path (pkgutil.extend_path). The path object of a namespace package looks
    # its parent up in sys.modules when it is iterated, and fails if that is not imported; `_path` is its plain list.
    for candidate in (namespace_of(sys.modules.get(name)).get("__path__"), spec.submodule_search_locations):
        try:
            if candidate is not None:
                return [str(entry) for entry in candidate]
        except Exception:
            entries = getattr(candidate, "_path", None)
            if entries is not None:
                return [str(entry) for entry in entries]
    return None


# -- files --


@cache
def _stdlib_folders() -> tuple[str, ...]:
    folders = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return tuple(sorted(folder + os.sep for folder in folders))


@lru_cache(maxsize=20_000)  # asked for each dependency at each capture, and resolving a path costs ten stats
def _is_stdlib(path: str) -> bool:
    real = os.path.realpath(path)
    return any(
        real.startswith(folder) and THIRD_PARTY.isdisjoint(Path(real[len(folder) :]).parts)
        for folder in _stdlib_folders()
    )


# By all that tells a file from its successor: deploy tools keep modification times, or set them all to one.
_digests: dict[str, tuple[tuple[int, int, int, int, int], str]] = {}
_digests_lock = threading.Lock()


def _file_digest(path: str) -> str | None:
    try:
        with _digests_lock:
            known = _digests.get(path)
        if known is not None and known[0] == _file_state(Path(path).stat()):
            return known[1]
        with Path(path).open("rb") as file:
            state = _file_state(os.fstat(file.fileno()))
            value = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return None
    with _digests_lock:
        _digests[path] = (state, value)
    return value


def _file_state(found: os.stat_result) -> tuple[int, int, int, int, int]:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


def _loader_digest(spec: importlib.machinery.ModuleSpec) -> str | None:
    """The digest of a module that is no file of its own, such as one inside a ZIP archive on the path."""
    get_data = getattr(spec.loader, "get_data", None)
    if get_data is None:
        return None
    try:
        return "sha256:" + hashlib.sha256(get_data(spec.origin)).hexdigest()
    except Exception:  # loaders are plug-ins
        return None


# -- the app --


def sources_digest(app_dir: Path) -> str:
    """
    Return a digest of the relative paths and bytes of all ``*.py`` files below *app_dir*.

    Hidden folders, virtual environments, ``__pycache__``, ``node_modules`` and ``site-packages`` are left out. Past
    `MAX_SOURCE_FILES` or `MAX_SOURCE_BYTES` it stops, and the digest starts with ``sha256-partial:`` instead of
    ``sha256:``. Files that cannot be read count as such; it never raises.
    """
    total = hashlib.sha256()
    size = 0
    for count, file in enumerate(_source_files(app_dir), start=1):
        try:
            data = file.read_bytes()
        except OSError:
            data = None
        size += len(data or b"")
        if count > MAX_SOURCE_FILES or size > MAX_SOURCE_BYTES:
            return f"sha256-partial:{total.hexdigest()}"
        name = os.fsencode(file.relative_to(app_dir).as_posix())
        # Lengths keep one file's end from being read as the next one's beginning.
        total.update(b"%d:%b" % (len(name), name))
        total.update(b"unreadable" if data is None else b"%d:%b" % (len(data), data))
    return f"sha256:{total.hexdigest()}"


def _source_files(app_dir: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(app_dir):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in NOT_SOURCES and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(names) if name.endswith(".py"))


def installed_distributions() -> list[tuple[str, str]]:
    """Return normalised names and versions of all installed distributions; those without metadata are left out."""
    import importlib.metadata

    installed = set()
    for distribution in importlib.metadata.distributions():
        try:
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            installed.add((name, distribution.version))
        except Exception as error:  # a half-removed package has no metadata file; what it raises differs by version
            logger.debug("a distribution without readable metadata is left out: %r", error)
    return sorted(installed)


def distributions_digest(installed: Iterable[tuple[str, str]]) -> str:
    """Return a digest of what `installed_distributions` has returned."""
    lines = sorted(f"{name}=={version}" for name, version in installed)
    return "sha256:" + hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def is_app_module(module: ModuleType | str, app_dir: Path) -> bool:
    """Whether the module (or the one of that name) is a file below *app_dir*, and not an installed package's."""
    file = _origin(module)
    if file is None or _is_stdlib(file):
        return False
    root = Path(os.path.realpath(app_dir))
    real = Path(os.path.realpath(file))
    if not real.is_relative_to(root) or real == root:
        return False
    relative = real.relative_to(root)
    if not THIRD_PARTY.isdisjoint(relative.parts):
        return False
    return not any(_is_environment(root / parent) for parent in relative.parents if parent != Path())


def _origin(module: ModuleType | str) -> str | None:
    if isinstance(module, str):
        loaded = sys.modules.get(module)
        if loaded is None:
            spec = _locate(module)
            return spec.origin if spec is not None and spec.has_location else None
        module = loaded
    return file_of(module)


@cache
def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists()
