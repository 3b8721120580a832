"""
The recorders of this process: found once, called together, and switched off one by one when they raise.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.metadata
import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.records import Reason, Record, Sections, Tally

logger = logging.getLogger(__name__)

GROUP = "jumpstart.recorders"

# In the order in which each hook is called. `modules` restores first, so that the others find what it has imported;
# `openapi` comes before `starlette`, which has the framework build what is still missing.
BUILT_IN = (
    "jumpstart.recorders.modules:ModulesRecorder",
    "jumpstart.recorders.bytecode:BytecodeRecorder",
    "jumpstart.recorders.regex:RegexRecorder",
    "jumpstart.recorders.lru:LruCacheRecorder",
    "jumpstart.recorders.live:ConfigRecorder",
    "jumpstart.recorders.live:ServiceRecorder",
    "jumpstart.recorders.cached:CachedRecorder",
    "jumpstart.recorders.jinja:JinjaRecorder",
    "jumpstart.recorders.jinja:JinjaBytecodeRecorder",  # after: its records are settled by what that one restored
    "jumpstart.recorders.flask:FlaskRecorder",
    "jumpstart.recorders.starlette:OpenapiRecorder",
    "jumpstart.recorders.starlette:StarletteRecorder",
    "jumpstart.recorders.django:DjangoRecorder",
    "jumpstart.recorders.sqlalchemy:SqlalchemyRecorder",
)

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")

# What a hook may raise to end more than itself: the operator's Ctrl-C, and the end of the boot stage that awaits it.
_PASS_ON = (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)


@functools.lru_cache(maxsize=1)
def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    """The plug-ins installed here. Looking through all distributions' metadata takes tens of milliseconds: once."""
    try:
        return tuple(importlib.metadata.entry_points(group=GROUP))
    except Exception:
        logger.exception("the entry points of %s cannot be read; plug-ins are left out", GROUP)
        return ()


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def load_recorders(settings: WarmSettings) -> list[Recorder]:
    """
    Return the recorders that *settings* leave on: the built-in ones, then plug-ins by name.

    One that cannot be imported or made, is none, or bears another's name is logged and left out.
    """
    sources: list[tuple[str, Callable[[], Any]]] = [
        (target, functools.partial(_load, target)) for target in BUILT_IN if not _is_disabled(target, settings)
    ]
    plug_ins = sorted(_entry_points(), key=lambda entry_point: entry_point.name)
    sources += [(f"plug-in {entry_point.name} = {entry_point.value}", entry_point.load) for entry_point in plug_ins]
    recorders: dict[str, Recorder] = {}
    for where, load in sources:
        recorder = _make(where, load, settings)
        if recorder is None or recorder.name in settings.disabled:
            continue
        if recorder.name in recorders:
            logger.warning("recorder %s is left out: there is one called %r already", where, recorder.name)
            continue
        recorders[recorder.name] = recorder
    return list(recorders.values())


def _is_disabled(target: str, settings: WarmSettings) -> bool:
    """Whether a built-in recorder need not even be imported: its module's name is its own name, for most of them."""
    module, _, name = target.rpartition(".")[2].partition(":")
    return module in settings.disabled and name.lower() == f"{module}recorder"


def _make(where: str, load: Callable[[], Any], settings: WarmSettings) -> Recorder | None:
    try:
        recorder = load()(settings)
    except _PASS_ON:
        raise
    except BaseException:  # a plug-in that exits on import may not end the server
        logger.exception("recorder %s is left out: it cannot be made", where)
        return None
    name = getattr(recorder, "name", None)
    if not isinstance(recorder, Recorder) or not isinstance(name, str) or not _NAME.fullmatch(name):
        logger.error("recorder %s is left out: not a Recorder with a name of lower-case letters and hyphens", where)
        return None
    return recorder


class RecorderSet:
    """
    A process's recorders. Its methods call one hook of each and raise nothing but KeyboardInterrupt and cancellation.

    A recorder whose hook raises is logged with its traceback and not called again; those of its records that were not
    tallied yet are dropped with `Reason.RECORDER_ERROR`. Records that a tally knows already are not handed out again.

    Attributes:
        recorders: all of them, in the order in which they are called, switched off or not.
        off: name → error, of those switched off.
    """

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self.recorders = tuple(recorders)
        self.off: dict[str, str] = {}
        self._by_name = {recorder.name: recorder for recorder in self.recorders}
        # What each was given, with `Record.carried`: its weight is in the base already.
        self._restored: dict[str, dict[str, int]] = {}
        self._capturing = threading.Lock()

    @classmethod
    def load(cls, settings: WarmSettings) -> RecorderSet:
        """The set of `load_recorders`."""
        return cls(load_recorders(settings))

    def get(self, name: str) -> Recorder | None:
        """The recorder of a section, or None when there is none or it was switched off."""
        return None if name in self.off else self._by_name.get(name)

    def observe(self) -> None:
        """Install all hooks, before the app is imported. Once per process."""
        for recorder in self._on():
            call_hook(self.off, recorder, "observe")

    def restore_early(self, sections: Sections, tallies: dict[str, Tally]) -> None:
        """Restore what the app's import profits from."""
        self._note_base(sections)
        for recorder in self._on():
            records, tally = _open(recorder, sections, tallies)
            if records:
                call_hook(self.off, recorder, "restore_early", records, tally)
        self._close(sections, tallies)

    def restore(self, app: Any, sections: Sections, tallies: dict[str, Tally]) -> None:
        """Restore after the app's import; recorders without records are called too."""
        self._note_base(sections)
        for recorder in self._on():
            records, tally = _open(recorder, sections, tallies)
            call_hook(self.off, recorder, "restore", app, records, tally)
        self._close(sections, tallies)

    async def restore_late(self, app: Any, sections: Sections, tallies: dict[str, Tally]) -> None:
        """Restore in a worker, in its event loop."""
        for recorder in self._on():
            records, tally = _open(recorder, sections, tallies)
            try:
                await recorder.restore_late(app, records, tally)
            except _PASS_ON:
                raise
            except BaseException as error:
                _switch_off(self.off, recorder, "restore_late", error)
        self._close(sections, tallies)

    def capture(self, purpose: Purpose) -> dict[str, list[Record]]:
        """
        Return what each recorder would want back, by name. Any thread; one capture at a time.

        A record that was restored weighs nothing, but where the recorder counts (`Recorder.counts`): whoever merges has
        the base, and no restart multiplies a weight. So what weighs something was seen to be of use in this process;
        the rest keeps its `Record.carried`.
        """
        captured: dict[str, list[Record]] = {}
        with self._capturing:
            for recorder in self._on():
                records = call_hook(self.off, recorder, "capture", purpose)
                if recorder.name in self.off:
                    continue
                if isinstance(records, list) and all(isinstance(record, Record) for record in records):
                    captured[recorder.name] = self._without_base(recorder, records)
                else:
                    _switch_off(self.off, recorder, "capture", TypeError("capture() must return a list of records"))
        return captured

    def _without_base(self, recorder: Recorder, records: list[Record]) -> list[Record]:
        known = self._restored.get(recorder.name, {})
        kept = []
        for record in records:
            weight = record.weight if recorder.counts or record.key not in known else 0
            carried = 0 if weight else known.get(record.key, 0)
            if (weight, carried) != (record.weight, record.carried):
                record = msgspec.structs.replace(record, weight=weight, carried=carried)
            kept.append(record)
        return kept

    def _note_base(self, sections: Sections) -> None:
        for name, records in sections.items():
            if records and name in self._by_name:
                self._restored.setdefault(name, {}).update({record.key: record.carried for record in records})

    def _on(self) -> list[Recorder]:
        return [recorder for recorder in self.recorders if recorder.name not in self.off]

    def _close(self, sections: Sections, tallies: dict[str, Tally]) -> None:
        """Drop the records of recorders that are off, so that reports say why they were of no use."""
        for name in self.off:
            if name in self._by_name and name in sections:
                records, tally = _open(self._by_name[name], sections, tallies)
                for record in records:
                    tally.drop(record, Reason.RECORDER_ERROR, self.off[name])


def _open(recorder: Recorder, sections: Sections, tallies: dict[str, Tally]) -> tuple[Sequence[Record], Tally]:
    """The records of *recorder* that nobody has reported yet, and its tally."""
    tally = tallies.setdefault(recorder.name, Tally())
    records = sections.get(recorder.name, [])
    settled = tally.used_keys.union(dropped.key for dropped in tally.dropped)
    return [record for record in records if record.key not in settled] if settled else records, tally


def call_hook(off: dict[str, str], recorder: Recorder, hook: str, *args: Any) -> Any:
    """Call a hook and return its result. When it raises, log the traceback, note it in *off*, return None."""
    try:
        return getattr(recorder, hook)(*args)
    except _PASS_ON:
        raise
    except BaseException as error:
        _switch_off(off, recorder, hook, error)
        return None


def _switch_off(off: dict[str, str], recorder: Recorder, hook: str, error: BaseException) -> None:
    off[recorder.name] = f"{hook}: {type(error).__name__}: {error}"
    logger.error("recorder %s is switched off: %s() raised", recorder.name, hook, exc_info=error)
