"""
Bytecode for hosts that have none: images without ``__pycache__``, read-only folders, ``PYTHONDONTWRITEBYTECODE``.

There, compiling is up to four fifths of the time that an import takes. Where a valid ``.pyc`` exists it is used, as
ever. A record is tied to the source by the SHA-256 of the very bytes that lie there when the module is loaded: reading
and hashing them is 1 to 4 % of an import, against the risk of running other code than the file shows.
"""

from __future__ import annotations

import _imp
import hashlib
import importlib.util
import io
import logging
import marshal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, Literal

import msgspec

from jumpstart import imports
from jumpstart.recorder import Purpose, Recorder, WarmSettings
from jumpstart.records import Reason, Record, Tally

logger = logging.getLogger(__name__)

MAX_TOTAL_BYTES = 128 * 1024 * 1024  # per capture; 4,400 modules of litellm are about 80 MB
HOST_COMPILE_SECONDS = 1.0  # spent on compiling per capture while serving; the next capture goes on from there
PYC_HEADER = 16  # bytes, PEP 552

_fix_co_filename: Callable[[CodeType, str], None] = _imp._fix_co_filename  # type: ignore[attr-defined]  # not in typeshed


class BytecodeData(msgspec.Struct, frozen=True):
    """`Record.data` of this recorder: *opt* is `sys.flags.optimize`, *src* the source's SHA-256 in hexadecimal."""

    code: bytes
    opt: int
    src: str


class _Seed:
    """A restored record, and what became of it: None while its module is not imported."""

    __slots__ = ("data", "detail", "outcome", "record")

    def __init__(self, record: Record, data: BytecodeData) -> None:
        self.record = record
        self.data = data
        self.outcome: Reason | bool | None = None
        self.detail = ""


class BytecodeLoader(SourceFileLoader):
    """The usual loader of source files, except that its code comes from a record while that matches the source."""

    def __init__(self, fullname: str, path: str, seed: _Seed) -> None:
        super().__init__(fullname, path)
        self._seed = seed

    def get_code(self, fullname: str) -> CodeType | None:
        seed = self._seed
        try:
            if hashlib.sha256(self.get_data(self.path)).hexdigest() != seed.data.src:
                seed.outcome, seed.detail = Reason.STALE, self.path
                return super().get_code(fullname)
            code = marshal.loads(seed.data.code)
            if not isinstance(code, CodeType):
                raise TypeError(f"{type(code).__name__} instead of code")
        except (OSError, EOFError, TypeError, ValueError) as error:
            seed.outcome, seed.detail = Reason.FAILED, f"{type(error).__name__}: {error}"
            logger.warning("bytecode of %s is not usable: %s", fullname, seed.detail)
            return super().get_code(fullname)
        _fix_co_filename(code, self.path)  # tracebacks name the file here, not the seeder's
        seed.outcome = True
        return code


class BytecodeFinder:
    """Hands modules with a record and without a valid ``.pyc`` to `BytecodeLoader`; everything else falls through."""

    jumpstart_finder = True

    def __init__(self, seeds: dict[str, _Seed]) -> None:
        self._seeds = seeds

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        seed = self._seeds.get(name)
        if seed is None:
            return None
        spec = imports.find_after(self, name, path, target)
        # Subclasses of the loader rewrite source (coverage, type checkers, pytest): what they do must still happen.
        if spec is not None and type(spec.loader) is SourceFileLoader:
            source = spec.loader.path
            if read_pyc(source, header_only=True) is None:
                spec.loader = BytecodeLoader(name, source, seed)
            elif seed.outcome is None:
                seed.outcome, seed.detail = Reason.NOT_APPLICABLE, "it has a valid __pycache__ file"
        return spec


class BytecodeRecorder(Recorder):
    """
    Records marshalled code by module.

    A record is used when its module was loaded from it. Modules are unmarshalled one by one, on import.
    """

    name: ClassVar[str] = "bytecode"
    encoding: ClassVar[Literal["json", "msgpack"]] = "msgpack"
    needs_trust: ClassVar[bool] = True
    runtime_bound: ClassVar[bool] = True

    def __init__(self, settings: WarmSettings) -> None:
        super().__init__(settings)
        self._seeds: dict[str, _Seed] = {}
        self._finder: BytecodeFinder | None = None
        self._first: frozenset[str] = frozenset()  # imported before any record could be used
        self._with_pyc: set[str] = set()
        self._compiled: dict[str, Record] = {}

    def observe(self) -> None:
        self._first = frozenset(sys.modules)

    def restore_early(self, records: Sequence[Record], tally: Tally) -> None:
        for record in records:
            try:
                data = msgspec.convert(record.data, BytecodeData)
            except msgspec.ValidationError as error:
                tally.drop(record, Reason.MALFORMED, str(error))
                continue
            if data.opt != sys.flags.optimize:
                tally.drop(record, Reason.NOT_APPLICABLE, f"compiled with -O level {data.opt}")
            elif record.key in sys.modules:
                tally.drop(record, Reason.NOT_APPLICABLE, "imported before")
            else:
                self._seeds[record.key] = _Seed(record, data)
        if self._seeds and self._finder is None:
            self._finder = BytecodeFinder(self._seeds)
            observed = bool(sys.meta_path) and isinstance(sys.meta_path[0], imports.ImportObserver)
            sys.meta_path.insert(1 if observed else 0, self._finder)

    def restore(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self._report(records, tally)

    async def restore_late(self, app: Any, records: Sequence[Record], tally: Tally) -> None:
        self._report(records, tally)

    def _report(self, records: Sequence[Record], tally: Tally) -> None:
        """Tally the records whose modules were imported meanwhile; the others may still be."""
        for record in records:
            seed = self._seeds.get(record.key)
            if seed is None or seed.outcome is None:
                continue
            if isinstance(seed.outcome, Reason):
                tally.drop(record, seed.outcome, seed.detail)
            else:
                tally.used(record)

    def capture(self, purpose: Purpose) -> list[Record]:
        """
        Return code of the imported modules: of all of them to ship, of those without a valid ``.pyc`` for this host.

        While serving, compiling is limited to `HOST_COMPILE_SECONDS` a call, and what was compiled is remembered.
        """
        if purpose == "ship" and not self.settings.bytecode:
            return []
        records: list[Record] = []
        total = 0
        stop = time.monotonic() + HOST_COMPILE_SECONDS if purpose == "host" else None
        for name, module in list(sys.modules.items()):
            loader = _source_loader(name, module)
            if loader is None or name in self._first or (purpose == "host" and name in self._with_pyc):
                continue
            record = self._record(name, loader, purpose, stop)
            if record is None:
                continue
            total += len(record.data["code"])
            if total > MAX_TOTAL_BYTES:
                logger.warning("bytecode: more than %d bytes; %s and later modules are left out", MAX_TOTAL_BYTES, name)
                break
            records.append(record)
        return records

    def _record(self, name: str, loader: SourceFileLoader, purpose: Purpose, stop: float | None) -> Record | None:
        try:
            body = read_pyc(loader.path, header_only=purpose == "host")
            if purpose == "host" and body is not None:
                self._with_pyc.add(name)
                return None
            source = loader.get_data(loader.path)
        except OSError:
            return None  # the source is gone; whether the code belongs to any cannot be said any more
        digest = hashlib.sha256(source).hexdigest()
        known = self._known(name, digest)
        if known is not None:
            return known
        if body is None:
            if stop is not None and time.monotonic() >= stop:
                return None
            try:
                body = marshal.dumps(loader.source_to_code(source, loader.path))
            except (SyntaxError, ValueError) as error:  # edited after it was imported
                logger.debug("bytecode of %s is not recorded: %s", name, error)
                return None
        data = {"code": body, "opt": sys.flags.optimize, "src": digest}
        # No `depends`: the loader compares *src* with the bytes that it reads, and only for modules that need the
        # record. Checking all of them before the import would cost more than most boots gain.
        record = Record(key=name, data=data)
        if purpose == "host":
            self._compiled[name] = record
        return record

    def _known(self, name: str, digest: str) -> Record | None:
        compiled = self._compiled.get(name)
        if compiled is not None and compiled.data["src"] == digest:
            return compiled
        seed = self._seeds.get(name)
        if seed is not None and seed.data.src == digest and seed.outcome is not Reason.FAILED:
            return seed.record
        return None


def _source_loader(name: str, module: ModuleType) -> SourceFileLoader | None:
    """The loader of a module that the import system loaded from a source file of that name, unchanged."""
    spec = imports.spec_of(module)
    if spec is None or spec.name != name or name == "__main__":
        return None
    loader: Any = spec.loader
    return loader if type(loader) in (SourceFileLoader, BytecodeLoader) else None


def read_pyc(source_path: str, *, header_only: bool = False) -> bytes | None:
    """
    Return the marshalled code from the ``__pycache__`` file of *source_path*, or None where the import system would
    not use that file. With *header_only* the bytes are empty.

    Raises:
        OSError: the source cannot be read. A missing or unreadable ``.pyc`` is None.
    """
    try:
        with io.open_code(importlib.util.cache_from_source(source_path)) as file:
            header = file.read(PYC_HEADER)
            body = b"" if header_only else file.read()
    except (OSError, NotImplementedError):
        return None
    if len(header) < PYC_HEADER or header[:4] != importlib.util.MAGIC_NUMBER:
        return None
    flags = int.from_bytes(header[4:8], "little")
    if flags & ~0b11:
        return None
    if not flags & 0b1:
        stat = Path(source_path).stat()
        stamp = (int(stat.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little")
        size = (stat.st_size & 0xFFFFFFFF).to_bytes(4, "little")
        return body if header[8:] == stamp + size else None
    mode = _imp.check_hash_based_pycs
    if mode != "never" and (flags & 0b10 or mode == "always"):
        source_hash = importlib.util.source_hash(Path(source_path).read_bytes())
        return body if header[8:] == source_hash else None
    return body
