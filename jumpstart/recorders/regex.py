"""
Compiled regular expressions: 5 to 9 % of an app's import, and what no ``.pyc`` can hold.

A compiled pattern is a list of integers that `re` hands to the C module ``_sre``. This recorder notes the list when a
pattern is compiled and hands it to ``_sre`` again in the next process, without parsing. ``_sre`` checks each list, so a
damaged one is an exception, and the pattern is compiled as ever.

**Nothing personal.** Once the app is imported, only patterns that stand in the program's text are learnt: a literal of
a function that is being called, a global or class attribute it can see, or anything that a module compiles while it is
imported. All others may be made of what a user has typed (``re.escape(query)``, ``fnmatch``). They are neither kept
nor named, and they are no cold events: a warm process compiles them too.

Two things are replaced, both inside ``re._compiler`` (CPython 3.11 to 3.13): ``compile``, which `re` calls when its own
cache of 512 patterns has no answer, and the name ``_sre``, to see the arguments of ``_sre.compile``. Where a later
Python does it differently, nothing is recorded and nothing breaks.
"""

from __future__ import annotations

import _sre  # type: ignore[import-not-found]  # not in typeshed
import functools
import hashlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any, ClassVar, Literal

import msgspec

from jumpstart import context
from jumpstart.imports import when_imported
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.records import Reason, Record, Tally

logger = logging.getLogger(__name__)

MAX_PATTERNS = 5_000
MAX_PATTERN = 20_000  # characters
MAX_CODE = 200_000  # integers of one pattern
MAX_TOTAL_BYTES = 2 * 1024 * 1024  # of text and code, about 15 times what the frameworks' imports come to together
MAX_FRAMES = 40  # looked through for a literal: stdlib helpers are a few calls deep, frameworks' some more
MAX_FRAMES_GLOBALS = 8  # of these, those whose globals are looked through, which takes longer
MAX_COMPILED = 450  # lazy patterns put into re's own cache, which holds 512

_UNRECORDED = int(re.DEBUG) | int(re.LOCALE) | 1  # prints; depends on the process's locale; re.TEMPLATE (3.11, 3.12)

Key = tuple[type, str | bytes, int]


class RegexData(msgspec.Struct, frozen=True):
    """
    `Record.data` of this recorder: the arguments of ``re.compile`` and of ``_sre.compile``.

    *pattern* is text; that of a bytes pattern is its Latin-1 reading. *lazy*: requests compile it, not the import.
    """

    type: Literal["str", "bytes"]
    pattern: str
    flags: int
    all_flags: int
    code: list[int]
    groups: int
    group_index: dict[str, int]
    index_group: list[str | None]
    magic: int
    lazy: bool = False

    def key(self) -> Key:
        if self.type == "str":
            return (str, self.pattern, self.flags)
        return (bytes, self.pattern.encode("latin-1"), self.flags)


class _Entry:
    """What is known of one pattern. *hits* counts how often this process asked for it."""

    __slots__ = ("arguments", "failed", "hits", "lazy", "record")

    def __init__(self, arguments: tuple[Any, ...] | None, *, lazy: bool, record: Record | None = None) -> None:
        self.arguments = arguments  # of _sre.compile; None once it refused them
        self.lazy = lazy
        self.record = record
        self.hits = 0
        self.failed = ""


class RegexRecorder(Recorder):
    """
    Records patterns as they are compiled, and seeds them before the app is imported.

    A record is used when the import asked for its pattern, or when the pattern is one that requests compile and it was
    put into re's cache. Patterns of an earlier build that nothing asks for are not captured again.
    """

    name: ClassVar[str] = "regex"
    version: ClassVar[int] = 2  # 1 had patterns that were made of users' input
    encoding: ClassVar[Literal["json", "msgpack"]] = "json"
    needs_trust: ClassVar[bool] = True
    runtime_bound: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._entries: dict[Key, _Entry] = {}
        self._declared: set[str | bytes] = set()  # texts that code will compile later
        self._size = 0  # bytes, see `_size_of`
        self._is_imported = False  # the app: from now on users' input comes in, in whatever thread
        self._original: Callable[..., re.Pattern[Any]] | None = None
        self._passed = threading.local()  # arguments of the last _sre.compile in this thread

    def observe(self) -> None:
        compiler: Any = sys.modules.get("re._compiler")
        if compiler is None or getattr(compiler, "_sre", None) is not _sre or self._original is not None:
            logger.info("regular expressions are not recorded on this Python")
            return
        shim = ModuleType("_sre", _sre.__doc__)
        shim.__dict__.update(_sre.__dict__)
        shim.__dict__["compile"] = self._sre_compile
        self._original = compiler.compile
        compiler._sre = shim
        compiler.compile = self._compile
        when_imported("django.utils.regex_helper", self._watch_django)

    def _sre_compile(self, *arguments: Any) -> Any:
        self._passed.arguments = arguments
        return _sre.compile(*arguments)

    def _compile(self, p: Any, flags: int = 0) -> Any:
        """Stands in for ``re._compiler.compile``; its arguments keep those names."""
        assert self._original is not None
        if (type(p) is not str and type(p) is not bytes) or int(flags) & _UNRECORDED or len(p) > MAX_PATTERN:
            return self._original(p, flags)
        key = (type(p), p, int(flags))
        is_lazy = context.current() is not None
        entry = self._entries.get(key)
        if entry is not None:
            entry.hits += 1
            entry.lazy = entry.lazy or is_lazy
            if entry.arguments is not None:
                try:
                    return _sre.compile(*entry.arguments)
                except (RuntimeError, TypeError, ValueError, OverflowError) as error:
                    entry.arguments, entry.failed = None, f"{type(error).__name__}: {error}"
                    logger.warning("recorded code of the pattern %.80r is not usable: %s", p, entry.failed)
        self._passed.arguments = None
        pattern = self._original(p, flags)
        passed = getattr(self._passed, "arguments", None)
        self._passed.arguments = None  # each thread would keep its last alive
        # Parsing can warn, and warning can compile other patterns: the arguments must be those of this one.
        if entry is None and passed is not None and passed[0] is p and self._learn(key, passed, lazy=is_lazy):
            context.cold_event("regex", str(p[:80]) if isinstance(p, str) else repr(p[:80]))
        return pattern

    def _learn(self, key: Key, passed: tuple[Any, ...], *, lazy: bool) -> bool:
        """Whether the pattern was taken up, so that the next process need not compile it."""
        if passed[1] & _UNRECORDED or len(passed[2]) > MAX_CODE or not _is_text(key[1]):
            return False
        entry = _Entry(passed, lazy=lazy)
        entry.hits = 1
        if not self._has_room(entry):
            return False
        if (lazy or self._is_imported) and not self._is_in_program_text(key[1], sys._getframe(2)):
            return False
        self._keep(key, entry)
        return True

    def _is_in_program_text(self, pattern: str | bytes, frame: FrameType | None) -> bool:
        return pattern in self._declared or is_in_program_text(pattern, frame)

    def _has_room(self, entry: _Entry) -> bool:
        return len(self._entries) < MAX_PATTERNS and self._size + _size_of(entry) <= MAX_TOTAL_BYTES

    def _keep(self, key: Key, entry: _Entry) -> None:
        self._size += _size_of(entry)
        self._entries[key] = entry

    def _watch_django(self, module: ModuleType) -> None:
        """Django declares its patterns at import and compiles them at the first use, out of a closure."""
        declare: Callable[..., Any] = module._lazy_re_compile

        @functools.wraps(declare)
        def watched(regex: Any, flags: int = 0) -> Any:
            if type(regex) in (str, bytes) and len(self._declared) < MAX_PATTERNS and len(regex) <= MAX_PATTERN:
                is_import = not self._is_imported and context.current() is None
                if is_import or is_in_program_text(regex, sys._getframe(1)):
                    self._declared.add(regex)
            return declare(regex, flags)

        module._lazy_re_compile = watched  # type: ignore[attr-defined]  # a module's global

    def restore_early(self, records: Sequence[Record], tally: Tally) -> None:
        for record in records[:MAX_PATTERNS]:
            try:
                data = msgspec.convert(record.data, RegexData)
                key = data.key()
            except (msgspec.ValidationError, UnicodeEncodeError) as error:
                tally.drop(record, Reason.MALFORMED, str(error))
                continue
            if data.magic != _sre.MAGIC:
                tally.drop(record, Reason.STALE, f"_sre.MAGIC is {_sre.MAGIC}, not {data.magic}")
            elif (data.flags | data.all_flags) & _UNRECORDED:
                tally.drop(record, Reason.MALFORMED, "flags that are never recorded")
            elif key not in self._entries:
                names = tuple(data.index_group)
                arguments = (key[1], data.all_flags, data.code, data.groups, data.group_index, names)
                entry = _Entry(arguments, lazy=data.lazy, record=record)
                if self._has_room(entry):
                    self._keep(key, entry)
                else:
                    tally.drop(record, Reason.TOO_LARGE, f"more than {MAX_TOTAL_BYTES} bytes of patterns")

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        """Put the patterns that requests compile into re's cache, and tally what the import made use of."""
        self._is_imported = True
        compiled = 0
        for record, key, entry in self._of(records):
            if entry.lazy and not entry.hits and not entry.failed and compiled < MAX_COMPILED:
                if tally.out_of_time():
                    tally.drop(record, Reason.DEADLINE)
                    continue
                compiled += 1
                try:
                    re.compile(key[1], key[2])
                except (re.error, ValueError, OverflowError, RecursionError) as error:
                    entry.failed = entry.failed or f"{type(error).__name__}: {error}"
            self._report(record, entry, tally)

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        for record, _, entry in self._of(records):
            self._report(record, entry, tally)

    def _of(self, records: Sequence[Record]) -> list[tuple[Record, Key, _Entry]]:
        keys = {entry.record.key: (key, entry) for key, entry in list(self._entries.items()) if entry.record}
        return [(record, *keys[record.key]) for record in records if record.key in keys]

    def _report(self, record: Record, entry: _Entry, tally: Tally) -> None:
        if entry.failed:
            tally.drop(record, Reason.FAILED, entry.failed)
        elif entry.hits or entry.lazy:
            tally.used(record)

    def capture(self, purpose: Purpose) -> list[Record]:
        records = []
        for key, entry in list(self._entries.items()):
            if entry.arguments is None or not (entry.hits or entry.lazy):
                continue
            if entry.record is None or entry.record.data.get("lazy", False) != entry.lazy:
                entry.record = _record(key, entry.arguments, lazy=entry.lazy)
            records.append(entry.record)
        return records


def _size_of(entry: _Entry) -> int:
    """Bytes in memory, roughly: text and code's list."""
    text, _, code, *_ = entry.arguments or ("", 0, ())
    return len(text) + 8 * len(code)


def is_in_program_text(pattern: str | bytes, frame: FrameType | None) -> bool:
    """
    Whether *pattern* was written by a programmer: it can be seen in the code that *frame* and its callers run.

    Compared by value: whatever its origin, a text that stands in the code tells nothing about a user. False when in
    doubt, as for texts put together at run time.
    """
    for depth in range(MAX_FRAMES):
        if frame is None:
            return False
        code = frame.f_code
        if _has(code.co_consts, pattern) or _is_import(frame):
            return True
        if depth < MAX_FRAMES_GLOBALS and (_has(frame.f_globals, pattern) or _has_class_attribute(frame, pattern)):
            return True
        frame = frame.f_back
    return False


def _has(values: Iterable[Any], pattern: str | bytes) -> bool:
    """Whether *pattern* is among *values* (of a dict, too), or in a tuple or frozenset, which nobody appends to."""
    kind = type(pattern)
    for value in list(values.values()) if isinstance(values, dict) else values:
        found = type(value)
        if found is kind:
            if value == pattern:
                return True
        elif (found is tuple or found is frozenset) and any(type(each) is kind and each == pattern for each in value):
            return True
    return False


def _is_import(frame: FrameType) -> bool:
    """Whether a module's body is being run by the import system: it does so once, whoever asks first."""
    caller = frame.f_back
    return (
        frame.f_code.co_name == "<module>"
        and caller is not None
        and caller.f_code.co_filename.startswith("<frozen importlib")
    )


def _has_class_attribute(frame: FrameType, pattern: str | bytes) -> bool:
    """Whether a method is running whose class has *pattern* for an attribute; what instances have may be anything."""
    code = frame.f_code
    if not code.co_argcount:
        return False
    own: Any = frame.f_locals.get(code.co_varnames[0])
    cls = own if issubclass(type(own), type) else type(own)
    try:
        return any(_has(dict(vars(each)), pattern) for each in cls.__mro__ if each.__module__ != "builtins")
    except Exception:  # metaclasses are the app's code, and may not break its patterns
        return False


def _is_text(pattern: str | bytes) -> bool:
    """Whether JSON can hold it: a str with lone surrogates it cannot."""
    if isinstance(pattern, str):
        try:
            pattern.encode()
        except UnicodeEncodeError:
            return False
    return True


def _record(key: Key, arguments: tuple[Any, ...], *, lazy: bool) -> Record:
    kind, pattern, flags = key
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    _, all_flags, code, groups, group_index, index_group = arguments
    data = RegexData(
        type="bytes" if kind is bytes else "str",
        pattern=text,
        flags=flags,
        all_flags=int(all_flags),
        code=[int(number) for number in code],  # some are named constants, a subclass of int
        groups=groups,
        group_index=dict(group_index),
        index_group=list(index_group),
        magic=_sre.MAGIC,
        lazy=lazy,
    )
    digest = hashlib.sha256(f"{kind.__name__}:{flags}:{text}".encode()).hexdigest()[:16]
    return Record(key=f"{text[:60]!r}#{digest}", data=msgspec.to_builtins(data))
