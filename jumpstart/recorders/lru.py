"""
Entries of `functools.lru_cache` functions that the operator has named.

Only named ones: a result may be a live object, or depend on time, locale or a secret, and nobody but the app's author
can say that it does not. Entries are read from the C wrapper through `gc.get_referents`, without a patch. Filling them
needs one: `functools.lru_cache` is replaced while the app is imported, and puts a Python function between the C wrapper
and a function that was named. Hits never reach it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from jumpstart import imports
from jumpstart.arguments import stable_digest
from jumpstart.context import cold_event
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.recorders._entries import NOT_AS_LOADED, Collector, pickled, pickled_arguments, unpickled
from jumpstart.records import Reason, Record, Tally
from jumpstart.runtime import is_as_loaded, loaded_dependency

logger = logging.getLogger(__name__)

Entry = tuple[tuple[Any, ...], dict[str, Any], Any]


class _Wrapper(NamedTuple):
    reference: weakref.ref[Any]
    depends: dict[str, str]  # on the source that was loaded


class LruData(msgspec.Struct, frozen=True):
    """`Record.data` of this recorder: *args* is a pickled ``(args, kwargs)``, *value* a pickled result."""

    fn: str
    args: bytes
    value: bytes


class _Seed(threading.local):
    """The result that the next miss in this thread takes instead of calling the function."""

    present = False
    taken = False
    value: Any = None


class LruCacheRecorder(Recorder):
    """
    Records the entries of named functions, least recently used first, and enters them in that order.

    A record is used when the C wrapper missed, took the recorded result and now holds it.
    """

    name: ClassVar[str] = "lru-cache"
    encoding: ClassVar[Literal["json", "msgpack"]] = "msgpack"
    needs_trust: ClassVar[bool] = True
    runtime_bound: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._seed = _Seed()
        self._wrappers: dict[str, _Wrapper] = {}
        self._collector = Collector(self.name)
        self._missed: dict[str, Record] = {}  # for want of time; the next boot may have more

    def _is_named(self, module: str, qualname: str) -> bool:
        for pattern in self.settings.lru_cache:
            of_module, _, of_name = pattern.partition(":")
            if fnmatchcase(module, of_module) and fnmatchcase(qualname, of_name or "*"):
                return True
        return False

    def observe(self) -> None:
        if self.settings.lru_cache:
            functools.lru_cache = self._patched(functools.lru_cache)

    def _patched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
            module, qualname = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
            # One defined inside a function has no name of its own: each call of the outer function makes another.
            if not self._is_named(module, qualname) or "<locals>" in qualname:
                return original(maxsize, typed)(function)
            wrapper = original(maxsize, typed)(self._shim(function, qualname))
            functools.update_wrapper(wrapper, function)  # so that __wrapped__ is the user's function
            # Now, while the module is being imported: its file may be another one when the entries are recorded.
            self._wrappers[f"{module}:{qualname}"] = _Wrapper(weakref.ref(wrapper), loaded_dependency(module))
            return wrapper

        @functools.wraps(original)
        def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
            if callable(maxsize) and isinstance(typed, bool):  # @lru_cache without parentheses
                return wrap(maxsize, 128, typed)
            if maxsize is not None and not isinstance(maxsize, int):
                return original(maxsize, typed)  # raises
            return lambda function: wrap(function, maxsize, typed)

        return lru_cache

    def _shim(self, function: Callable[..., Any], qualname: str) -> Callable[..., Any]:
        seed = self._seed

        def shim(*args: Any, **kwargs: Any) -> Any:
            if seed.present:
                seed.present, seed.taken = False, True
                return seed.value
            cold_event("lru-cache", qualname)
            return function(*args, **kwargs)

        return shim

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self._report_unpatched()
        for record in records:
            try:
                data = msgspec.convert(record.data, LruData)
            except msgspec.ValidationError as error:
                tally.drop(record, Reason.MALFORMED, str(error))
                continue
            module, _, qualname = data.fn.partition(":")
            if not self._is_named(module, qualname):
                tally.drop(record, Reason.NOT_APPLICABLE, f"{data.fn} is not named in the configuration")
                continue
            known = self._wrappers.get(data.fn)
            wrapper = known.reference() if known is not None else None
            if wrapper is None:
                tally.drop(record, Reason.GONE, f"no lru_cache function {data.fn} that could be filled")
            elif tally.out_of_time():
                self._missed[record.key] = record
                tally.drop(record, Reason.DEADLINE)
            else:
                self._enter(wrapper, record, data, tally)

    def _enter(self, wrapper: Any, record: Record, data: LruData, tally: Tally) -> None:
        seed = self._seed
        try:
            args, kwargs = unpickled(data.args)
            seed.value, seed.taken, seed.present = unpickled(data.value), False, True
            before = wrapper.cache_info()
            wrapper(*args, **kwargs)
            after = wrapper.cache_info()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # unpickling runs the app's code, and a bad record costs that record only
            tally.drop(record, Reason.FAILED, f"{type(error).__name__}: {error}")
            return
        finally:
            seed.present, seed.value = False, None
        if seed.taken and after.currsize and after.misses > before.misses:
            tally.used(record)
        elif after.hits > before.hits:
            tally.drop(record, Reason.NOT_APPLICABLE, "computed already")
        else:
            tally.drop(record, Reason.NO_EFFECT)

    def _report_unpatched(self) -> None:
        """Say which functions a pattern names that were decorated before `observe`: they cannot be filled."""
        if not self.settings.lru_cache:
            return
        for name, module in list(sys.modules.items()):
            if not self._is_named_module(name):
                continue
            for value in list(imports.namespace_of(module).values()):
                if type(value) is not functools._lru_cache_wrapper or getattr(value, "__module__", None) != name:
                    continue
                qualname = getattr(value, "__qualname__", None)  # that of a partial object has none
                function = f"{name}:{qualname}"
                if qualname and self._is_named(name, qualname) and function not in self._wrappers:
                    self._collector.report_once(function, "it was decorated before Jumpstart could see it")

    def _is_named_module(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern.partition(":")[0]) for pattern in self.settings.lru_cache)

    def capture(self, purpose: Purpose) -> list[Record]:
        """
        Return the entries of each function, least recently used first, as far as the limits reach.

        Functions whose module's file is no longer what was loaded are left out: their values belong to the old code.
        """
        records: dict[str, Record] = {}
        self._collector.begin(purpose)
        for name, known in list(self._wrappers.items()):
            wrapper = known.reference()
            if wrapper is None:
                continue
            if not is_as_loaded(known.depends):
                self._collector.report_once(name, NOT_AS_LOADED)
                continue
            typed = wrapper.cache_parameters()["typed"]
            pairs = reversed(_newest_pairs(wrapper, self._collector.limit()))
            records |= self._collector.collect(
                name,
                (
                    (key, value, functools.partial(_record, name, key, value, typed, known.depends))
                    for key, value in pairs
                ),
            )
        return list((self._missed | records).values())


def _record(name: str, key: Any, value: Any, typed: bool, depends: dict[str, str]) -> Record:
    arguments = _arguments_of(key, typed=typed)
    if arguments is None:
        raise ValueError("a key of unknown form")
    data = {"fn": name, "args": pickled_arguments(*arguments), "value": pickled(value)}
    return Record(key=f"{name}({stable_digest(*arguments)})", data=data, depends=depends)


def cache_entries(wrapper: Any) -> list[Entry]:
    """
    Return ``(args, kwargs, value)`` of a `functools.lru_cache` wrapper's entries, least recently used first.

    Empty when the wrapper's insides do not look as they do in CPython 3.11 to 3.13. Any thread may call it.
    """
    if type(wrapper) is not functools._lru_cache_wrapper:
        return []
    typed = wrapper.cache_parameters()["typed"]
    entries = []
    for key, value in _newest_pairs(wrapper, None):
        arguments = _arguments_of(key, typed=typed)
        if arguments is not None:
            entries.append((*arguments, value))
    return entries


def _newest_pairs(wrapper: Any, limit: int | None) -> list[tuple[Any, Any]]:
    """The wrapper's own key objects and results, least recently used first; the *limit* most recently used of them."""
    referents = gc.get_referents(wrapper)
    pairs: list[tuple[Any, Any]] = []
    if wrapper.cache_parameters()["maxsize"] is None:
        for referent in referents:
            if type(referent) is dict and referent is not wrapper.__dict__:
                # In the order of insertion. A copy, in one step: other threads insert.
                pairs = list(itertools.islice(reversed(referent.copy().items()), limit))[::-1]
                break
    else:
        # The wrapper's type comes first; then each link of the list gives key, result and its own type.
        links = referents[1:] if referents[0] is type(wrapper) else referents
        for key, value, kind in zip(links[0::3], links[1::3], links[2::3]):
            if type(kind) is not type or kind.__name__ != "_lru_list_elem":
                break
            pairs.append((key, value))
    return pairs if limit is None else pairs[max(0, len(pairs) - limit) :]


@functools.cache
def _keyword_mark() -> object:
    """The object that separates keyword from positional arguments in keys; one per interpreter."""

    @functools.cache
    def probe(**kwargs: int) -> None: ...

    probe(a=1)
    for referent in gc.get_referents(probe):
        if type(referent) is dict and referent is not probe.__dict__:
            for key in referent:
                return key[0]
    return object()


def _arguments_of(key: Any, *, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take a key of `functools.lru_cache` apart; None when it is not of the expected form."""
    if type(key) is not tuple:
        return (key,), {}  # a single int or str stands for itself
    mark = _keyword_mark()
    positional = next((position for position, part in enumerate(key) if part is mark), None)
    if positional is None:
        if typed and len(key) % 2:
            return None
        return (key[: len(key) // 2] if typed else key), {}
    rest = key[positional + 1 :]
    if typed:  # name and value of each keyword, then the types of all arguments
        keywords, remainder = divmod(len(rest) - positional, 3)
        if remainder:
            return None
        rest = rest[: 2 * keywords]
    if len(rest) % 2 or not all(isinstance(name, str) for name in rest[0::2]):
        return None
    return key[:positional], dict(zip(rest[0::2], rest[1::2]))
