"""
Jinja2: templates by name (`JinjaRecorder`), and their compiled code (`JinjaBytecodeRecorder`).

A name is enough to be warm: the framework loads and compiles the template itself, before the worker is ready. What is
recorded is what the environments' own caches hold, so that base templates, includes and imports are in it, evicted ones
are not, and a restored process records what it restored. A template whose source has changed is compiled all the same
(its name is still asked for) and reported as stale.

Loaders that may need a connection (a database, a function of the user's) are asked in the workers, never in the mold.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.recorders._app import instances, plain, text_digest
from jumpstart.recorders._jinja_hooks import code_key, custom_names, hooks
from jumpstart.records import Reason, Record, Tally

logger = logging.getLogger(__name__)


class JinjaRecorder(Recorder):
    """Records the names of compiled templates; restores by loading them."""

    name: ClassVar[str] = "jinja"

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._settled: set[str] = set()

    def observe(self) -> None:
        hooks.install()

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        if records and "jinja2" in sys.modules:
            _make_lazy_environments(app)
            self._load(records, tally, late=False)

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        """What the mold could not do: environments made during start-up, and loaders that may need a connection."""
        if records and "jinja2" in sys.modules:
            self._load(records, tally, late=True)

    def capture(self, purpose: Purpose) -> list[Record]:
        if "jinja2" not in sys.modules:
            return []
        records: dict[str, Record] = {}
        digests: dict[str, list[str | None]] = {}
        for env in hooks.environments():
            for name in _cached_names(env):
                source = _known_digest(env, name)
                others = digests.setdefault(name, [])
                if source in others:
                    continue
                # Several environments may know different templates by one name: all but the first get a longer key.
                key = name if not others else f"{name}#{(source or '')[7:19]}"
                others.append(source)
                records[key] = Record(key=key, data={"name": name} | ({"source": source} if source else {}))
        return list(records.values())

    def _load(self, records: Sequence[Record], tally: Tally, *, late: bool) -> None:
        environments = hooks.environments()
        for record in records:
            if record.key in self._settled:
                continue
            if tally.out_of_time():
                self._settle(record, tally, Reason.DEADLINE)
                continue
            name = record.data.get("name")
            if not isinstance(name, str):
                self._settle(record, tally, Reason.MALFORMED, "no name")
                continue
            ready = [env for env in environments if late or _is_local(env.loader)]
            matching, changed = _sort_by_source(ready, name, record.data.get("source"))
            if matching or changed:
                self._load_into(matching or changed, record, name, tally, changed=not matching)
            elif environments and len(ready) == len(environments):
                self._settle(record, tally, Reason.GONE, name)
            # Otherwise the workers may find it; if they do not, it counts as not applicable.

    def _load_into(self, targets: list[Any], record: Record, name: str, tally: Tally, *, changed: bool) -> None:
        cached = False
        for env in targets:
            try:
                env.get_template(name)
            except Exception as error:  # its syntax, or whatever the user's loader and extensions raise
                logger.debug("jinja: template %s", name, exc_info=True)
                self._settle(record, tally, Reason.FAILED, f"{type(error).__name__}: {error}")
                return
            cached = cached or name in _cached_names(env)
        if not cached:
            self._settle(record, tally, Reason.NO_EFFECT, "the environment keeps no templates")
        elif changed:
            self._settle(record, tally, Reason.STALE, "its source has changed; it was compiled anew")
        else:
            self._settled.add(record.key)
            tally.used(record)

    def _settle(self, record: Record, tally: Tally, reason: Reason, detail: str = "") -> None:
        self._settled.add(record.key)
        tally.drop(record, reason, detail)


class JinjaBytecodeRecorder(Recorder):
    """
    Records templates' compiled code, so that loading one skips lexing, parsing and code generation.

    It only answers `Environment.compile`; which templates are loaded is up to `JinjaRecorder` and to requests.
    """

    name: ClassVar[str] = "jinja-bytecode"
    encoding: ClassVar[Literal["json", "msgpack"]] = "msgpack"
    needs_trust: ClassVar[bool] = True
    runtime_bound: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._reported: set[str] = set()
        self._unfit: set[str] = set()  # code keys of templates that use custom filters

    def observe(self) -> None:
        hooks.install()

    def restore_early(self, records: Sequence[Record], tally: Tally) -> None:
        """Lay the code ready; it is unmarshalled when a template with exactly its source and settings is loaded."""
        for record in records:
            code, key = record.data.get("code"), record.data.get("fits")
            if isinstance(code, bytes) and isinstance(key, str):
                hooks.code[key] = code
            else:
                self._reported.add(record.key)
                tally.drop(record, Reason.MALFORMED, "no code")

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self._report_hits(records, tally)

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self._report_hits(records, tally)

    def capture(self, purpose: Purpose) -> list[Record]:
        if "jinja2" not in sys.modules:
            return []
        records: dict[str, Record] = {}
        for env in hooks.environments():
            for name, digest in hooks.seen(env).items():
                try:
                    key = code_key(env, name, digest)
                    code = self._code(env, name, digest, key) if key is not None else None
                except Exception:  # the user's loader, autoescape callable or extension
                    logger.debug("jinja-bytecode: %s", name, exc_info=True)
                    continue
                if code is not None and key is not None:
                    records[key] = Record(key=f"{name}#{key[7:23]}", data={"fits": key, "code": code})
        return list(records.values())

    def _code(self, env: Any, name: str, digest: str, key: str) -> bytes | None:
        if key in self._unfit or not _is_local(env.loader):
            return None
        if key not in hooks.code:
            source = env.loader.get_source(env, name)[0]
            if text_digest(source) != digest:
                return None  # changed on disk since: what runs here is not what a new process would compile
            if _uses_custom(env, source, name):
                self._unfit.add(key)
                return None
            hooks.code[key] = hooks.compile_again(env, source, name)
        return hooks.code[key]

    def _report_hits(self, records: Sequence[Record], tally: Tally) -> None:
        for record in records:
            if record.key not in self._reported and record.data.get("fits") in hooks.hits:
                self._reported.add(record.key)
                tally.used(record)


def _make_lazy_environments(app: Any) -> None:
    """
    Have the frameworks make the environments that they would make on the first request.

    `FlaskRecorder` does it too; here it makes the order of the two recorders irrelevant.
    """
    for flask in instances(app, "flask.app", "Flask"):
        _ = flask.jinja_env
    handler = getattr(sys.modules.get("django.template"), "engines", None)
    if handler is None or not sys.modules["django.conf"].settings.configured:
        return
    for alias in handler:
        if "jinja2" in str(handler.templates[alias].get("BACKEND", "")).lower():
            _ = handler[alias]


def _sort_by_source(environments: list[Any], name: str, wanted: Any) -> tuple[list[Any], list[Any]]:
    """The environments that know *name* with the recorded source, and those that know it with another one."""
    matching: list[Any] = []
    changed: list[Any] = []
    for env in environments:
        digest = _source_digest(env, name)
        if digest is not None:
            (matching if wanted in (None, digest) else changed).append(env)
    return matching, changed


def _source_digest(env: Any, name: str) -> str | None:
    import jinja2

    try:
        return text_digest(env.loader.get_source(env, name)[0])
    except jinja2.TemplateNotFound:
        return None
    except Exception:  # a loader of the user's, or one that has no sources
        logger.debug("jinja: the loader of %s raised", name, exc_info=True)
        return None


def _known_digest(env: Any, name: str) -> str | None:
    return hooks.seen(env).get(name) or (_source_digest(env, name) if _is_local(env.loader) else None)


def _cached_names(env: Any) -> list[str]:
    """Names in the environment's cache that its present loader loaded, least recently used first."""
    cache, loader = env.cache, env.loader
    if cache is None:
        return []
    keys = list(cache)
    if not isinstance(cache, dict):
        keys.reverse()  # LRUCache iterates from the most recently used
    return [plain(key[1]) for key in keys if isinstance(key, tuple) and len(key) == 2 and key[0]() is loader]


def _is_local(loader: Any) -> bool:
    """Whether the loader reads files or memory only; others may open connections, which must not be forked."""
    import jinja2

    source = getattr(type(loader), "get_source", None)
    local: list[Any] = [jinja2.FileSystemLoader, jinja2.PackageLoader, jinja2.DictLoader]
    if any(source is cls.get_source for cls in local):
        return True
    if source is jinja2.ChoiceLoader.get_source:
        return all(_is_local(inner) for inner in loader.loaders)
    if source is jinja2.PrefixLoader.get_source:
        return all(_is_local(inner) for inner in loader.mapping.values())
    dispatching = getattr(sys.modules.get("flask.templating"), "DispatchingJinjaLoader", None)
    if dispatching is not None and source is dispatching.get_source:
        return all(inner is None or _is_local(inner) for inner in _flask_loaders(loader.app))
    return False


def _flask_loaders(app: Any) -> Iterator[Any]:
    yield app.jinja_loader
    for blueprint in app.iter_blueprints():
        yield blueprint.jinja_loader


def _uses_custom(env: Any, source: str, name: str) -> bool:
    """Whether the template names a filter or test that is not Jinja2's own; its code may hold that one's answers."""
    from jinja2 import nodes

    defaults: Any = sys.modules["jinja2.defaults"]
    filters = custom_names(env.filters, defaults.DEFAULT_FILTERS)
    tests = custom_names(env.tests, defaults.DEFAULT_TESTS)
    if not filters and not tests:
        return False
    tree = env.parse(source, name)
    return any(node.name in filters for node in tree.find_all(nodes.Filter)) or any(
        node.name in tests for node in tree.find_all(nodes.Test)
    )
