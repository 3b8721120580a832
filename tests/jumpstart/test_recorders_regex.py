"""Seeded regular expressions behave as compiled ones, and a damaged seed costs only itself."""

from __future__ import annotations

import _sre  # type: ignore[import-not-found]  # not in typeshed
import fnmatch
import importlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jumpstart.context import RequestContext, request_context
from jumpstart.recorder import WarmSettings
from jumpstart.recorders.regex import MAX_TOTAL_BYTES, RegexRecorder
from jumpstart.records import Reason, Record, Tally

compiler: Any = re._compiler  # type: ignore[attr-defined]  # what `re` calls on a miss


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the patches of `observe` after the test."""
    monkeypatch.setattr(compiler, "compile", compiler.compile)
    monkeypatch.setattr(compiler, "_sre", compiler._sre)
    re.purge()
    yield
    re.purge()


class Process:
    """As if a process had just started: nothing cached, nothing patched but by its own recorder."""

    def __init__(self, records: list[Record] = []) -> None:  # noqa: B006  # never changed
        re.purge()
        if isinstance(getattr(compiler.compile, "__self__", None), RegexRecorder):
            compiler.compile = compiler.compile.__self__._original
            compiler._sre = _sre
        self.parsed: list[Any] = []
        self.recorder = RegexRecorder(WarmSettings())
        self.recorder.observe()
        original = self.recorder._original
        assert original is not None

        def spy(pattern: Any, flags: int = 0) -> Any:
            self.parsed.append(pattern)
            return original(pattern, flags)

        self.recorder._original = spy
        self.tally = Tally()
        # Through JSON and back, as in a profile.
        self.records = msgspec.json.decode(msgspec.json.encode(records), type=list[Record])
        self.recorder.restore_early(self.records, self.tally)

    def close(self) -> None:
        compiler.compile.__self__._original = _ORIGINAL

    def restore(self) -> None:
        self.recorder.restore(None, self.records, self.tally)

    def capture(self) -> list[Record]:
        return self.recorder.capture("host")


_ORIGINAL = compiler.compile


def test_three_processes_parse_once() -> None:
    process = Process()
    for pattern in ("a(?P<word>b+)c", b"\xff(x)", "[:alpha]|\u00e9é"):
        re.compile(pattern, re.IGNORECASE)
    assert len(process.parsed) == 3
    records = process.capture()
    process.close()
    for _ in range(2):
        process = Process(records)
        assert re.compile("a(?P<word>b+)c", re.IGNORECASE).match("ABBC")["word"] == "BB"  # type: ignore[index]
        assert re.compile(b"\xff(x)", re.IGNORECASE).match(b"\xffX")
        assert re.compile("[:alpha]|\u00e9é", re.IGNORECASE)
        assert process.parsed == []
        process.restore()
        assert len(process.tally.used_keys) == 3
        assert process.capture() == records
        process.close()


def test_patterns_of_requests_are_cold_events_and_compiled_at_the_next_boot() -> None:
    process = Process()
    request = RequestContext()
    with request_context(request):
        re.compile("lazy(x)" + "y" * 100)
        re.match(b"lazy", b"lazy")
    assert request.events == [("regex", ("lazy(x)" + "y" * 100)[:80]), ("regex", "b'lazy'")]
    records = process.capture()
    assert all(record.data["lazy"] for record in records)
    process.close()
    process = Process(records)
    process.restore()
    assert len(process.tally.used_keys) == 2
    request = RequestContext()
    with request_context(request):
        re.compile("lazy(x)" + "y" * 100)
    assert request.events == [] and process.parsed == []
    assert process.capture() == records
    process.close()


def test_what_nothing_asks_for_is_neither_used_nor_captured_again() -> None:
    process = Process()
    re.compile("of an earlier build")
    records = process.capture()
    process.close()
    process = Process(records)
    process.restore()
    assert not process.tally.used_keys and not process.tally.dropped
    assert process.capture() == []
    process.close()


def test_damaged_code_is_dropped_and_the_pattern_compiled() -> None:
    process = Process()
    re.compile("good+")
    [record] = process.capture()
    process.close()
    for change, reason in (
        ({"code": [99999, 1]}, Reason.FAILED),
        ({"code": []}, Reason.FAILED),
        ({"code": [-1]}, Reason.FAILED),
        ({"groups": -5}, Reason.FAILED),
        ({"code": "text"}, Reason.MALFORMED),
        ({"magic": 1}, Reason.STALE),
        ({"all_flags": int(re.LOCALE)}, Reason.MALFORMED),
        ({"type": "bytes", "pattern": "\u20ac"}, Reason.MALFORMED),
    ):
        process = Process([msgspec.structs.replace(record, data={**record.data, **change})])
        assert re.compile("good+").fullmatch("goodd")
        process.restore()
        assert [dropped.reason for dropped in process.tally.dropped] == [reason], change
        assert process.parsed == ["good+"]
        process.close()


def test_what_cannot_be_recorded_is_compiled_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    process = Process()

    class Text(str):
        pass

    re.compile("d", re.DEBUG)
    re.compile(b"l", re.LOCALE)
    re.compile(b"(?L)inline")
    re.compile("x" * 20_001)
    re.compile("[\ud800-\udfff]")
    re.compile(Text("subclass"))
    with pytest.raises(re.error):
        re.compile("(")
    with pytest.raises(TypeError):
        re.compile(3)  # type: ignore[call-overload]
    assert process.capture() == []
    process.close()


def test_out_of_time_leaves_the_seeds_in_place() -> None:
    process = Process()
    with request_context(RequestContext()):
        re.compile("late")
    records = process.capture()
    process.close()
    process = Process(records)
    process.recorder.restore(None, process.records, late := Tally(deadline=0, clock=lambda: 1))
    assert [dropped.reason for dropped in late.dropped] == [Reason.DEADLINE]
    assert process.capture() == records
    assert re.compile("late") and process.parsed == []
    process.close()


PIECES = st.sampled_from(
    ["a", "B", r"\d", r"\w", r"\s", ".", "[a-f]", "[^x-z]", "é", "(a|b)", "(?:ab)", r"\bA", "^", "$", "(?=a)", "(?<!b)"]
)
PATTERNS = st.lists(st.tuples(PIECES, st.sampled_from(["", "?", "*?", "{1,3}", "+"])), max_size=6).map(
    lambda parts: "".join(f"(?:{piece}){repeat}" for piece, repeat in parts)
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=PATTERNS,
    flags=st.sampled_from([0, re.IGNORECASE, re.MULTILINE | re.DOTALL, re.ASCII, re.VERBOSE]),
    texts=st.lists(st.text("aAbBcé1 \n", max_size=12), min_size=1, max_size=5),
    binary=st.booleans(),
)
def test_a_seeded_pattern_behaves_as_the_compiled_one(pattern: str, flags: int, texts: list[str], binary: bool) -> None:
    source: Any = pattern.encode("latin-1") if binary else pattern
    process = Process()
    compiled = re.compile(source, flags)
    records = process.capture()
    process.close()
    process = Process(records)
    seeded = re.compile(source, flags)
    assert process.parsed == []
    process.close()
    assert seeded == compiled and seeded is not compiled
    assert (seeded.flags, seeded.groups, dict(seeded.groupindex)) == (
        compiled.flags,
        compiled.groups,
        dict(compiled.groupindex),
    )
    for text in texts:
        subject: Any = text.encode("latin-1") if binary else text
        assert [(m.span(), m.groups()) for m in seeded.finditer(subject)] == [
            (m.span(), m.groups()) for m in compiled.finditer(subject)
        ]


CONSTANT = "a constant(s?) of this module"
FAMILY = ("one of( several)", "another of( several)")


class Reader:
    pattern = "a class( attribute)"

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, text: str) -> None:
        re.compile(self.pattern)
        re.compile(self.text)
        re.search(text, "")


def test_what_users_type_is_neither_recorded_nor_named() -> None:
    """Patterns made of input: escaped, translated, handed on, kept in an object, in a thread without a request."""
    typed = "".join(["hunter2 ", "4111-1111"])
    process = Process()
    process.restore()
    request = RequestContext()
    kept = {"pattern": f"kept {typed}"}
    with request_context(request):
        re.sub(re.escape(typed), "<b>", "text")
        fnmatch.filter(["a"], f"{typed}*")
        re.compile(f"(?i){typed}")
        re.compile(typed.encode())
        re.compile(kept["pattern"])
        Reader(f"an instance's {typed}").read(f"an argument {typed}")
    assert request.events == [("regex", "a class( attribute)")]
    thread = threading.Thread(target=re.compile, args=(f"no request {typed}",))
    thread.start()
    thread.join()
    assert [record.data["pattern"] for record in process.capture()] == ["a class( attribute)"]
    process.close()


def test_what_stands_in_the_program_is_learnt_from_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import re\nWORDS = ['b', 'c']\nre.compile('in an ' + '|'.join(WORDS))\n"
    (tmp_path / "js_lazy_patterns.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = Process()
    process.restore()
    request = RequestContext()
    with request_context(request):
        re.match("a literal(!)", "")
        re.match(CONSTANT, "")
        for each in FAMILY:
            re.match(each, "")
        for each in ("a literal of( a loop)", "one more( of it)"):
            [re.split(each, text) for text in ("", "")]
        importlib.import_module("js_lazy_patterns")
    patterns = [record.data["pattern"] for record in process.capture()]
    assert patterns == [
        "a literal(!)",
        CONSTANT,
        *FAMILY,
        "a literal of( a loop)",
        "one more( of it)",
        "in an b|c",
    ]
    assert [what for _, what in request.events] == patterns
    process.close()


def test_djangos_lazy_patterns_are_known_by_their_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = pytest.importorskip("django.utils.regex_helper")
    monkeypatch.setattr(helper, "_lazy_re_compile", helper._lazy_re_compile)
    process = Process()
    declared = helper._lazy_re_compile("".join(["declared ", "at( import)"]))
    process.restore()
    request = RequestContext()
    with request_context(request):
        declared.match("")
        helper._lazy_re_compile("".join(["declared for ", "a( user)"])).match("")
    assert request.events == [("regex", "declared at( import)")]
    process.close()


def test_the_recorder_holds_two_megabytes_at_most() -> None:
    process = Process()
    for number in range(300):
        compiler.compile(f"{number:05}" * 100)
    assert 100 < len(process.capture()) < 300
    size = sum(len(record.data["pattern"]) + 8 * len(record.data["code"]) for record in process.capture())
    assert MAX_TOTAL_BYTES * 0.9 < size <= MAX_TOTAL_BYTES
    records = process.capture()
    more = [msgspec.structs.replace(each, data={**each.data, "flags": 8}, key=f"{each.key}m") for each in records[:20]]
    process.close()
    process = Process(records + more)
    assert {dropped.reason for dropped in process.tally.dropped} == {Reason.TOO_LARGE}
    assert len(process.tally.dropped) >= 19
    process.close()
