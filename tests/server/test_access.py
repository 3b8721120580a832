"""The access log: formats, values that cannot break a line, and a file that may be moved, full or gone."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import re
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server import logfile
from jumpstart_server.access import COMBINED, AccessLog, AccessRecord, compile_format
from jumpstart_server.logfile import LogFile, ShortWriteError

NOON = 1_764_504_000 * 1_000_000_000 + 123_456_789  # 2025-11-30 12:00:00 UTC, in nanoseconds

RECORD = AccessRecord(
    client="192.0.2.7",
    method="GET",
    target=b"/shop/caf%C3%A9?q=1&r=2",
    status=200,
    sent=5120,
    total_s=1.2345678,
    queue_s=0.25,
    app_s=0.75,
    request_headers=[
        (b"host", b"example.org"),
        (b"user-agent", b"curl/8"),
        (b"referer", b"https://example.org/"),
        (b"x-request-id", b"abc-1"),
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"x-forwarded-for", b"10.0.0.2"),
        (b"authorization", b"Basic " + base64.b64encode(b"jo smith:secret")),
    ],
    response_headers=[(b"Content-Type", b"text/html"), (b"X-Cache", b"hit")],
    environ={"REMOTE_USER": "jo", "wsgi.url_scheme": "https", "EMPTY": ""},
)
REFUSED = AccessRecord(status=400)  # no request line was understood


def line(text: str, record: AccessRecord = RECORD, **more: Any) -> str:
    made = compile_format(text, pid=77, wall_clock_ns=lambda: NOON, **more)(record)
    assert made.endswith(b"\n")
    return made[:-1].decode("utf-8")


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC-02:00")  # two hours east
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# ---------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("atom", "expected", "of_refused"),
    [
        ("h", "192.0.2.7", "-"),
        ("l", "-", "-"),
        ("u", "jo\\x20smith", "-"),
        ("t", "[30/Nov/2025:14:00:00 +0200]", "[30/Nov/2025:14:00:00 +0200]"),
        ("r", "GET /shop/caf%C3%A9?q=1&r=2 HTTP/1.1", "-"),
        ("m", "GET", "-"),
        ("U", "/shop/caf%C3%A9", "-"),
        ("q", "q=1&r=2", ""),
        ("H", "HTTP/1.1", "-"),
        ("s", "200", "400"),
        ("B", "5120", "0"),
        ("b", "5120", "-"),
        ("f", "https://example.org/", "-"),
        ("a", "curl/8", "-"),
        ("T", "1", "0"),
        ("D", "1234567", "0"),
        ("M", "1234", "0"),
        ("L", "1.234568", "0.000000"),
        ("p", "<77>", "<77>"),
        ("{host}i", "example.org", "-"),
        ("{X-Request-ID}i", "abc-1", "-"),
        ("{x-forwarded-for}i", "10.0.0.1, 10.0.0.2", "-"),
        ("{absent}i", "-", "-"),
        ("{x-cache}o", "hit", "-"),
        ("{Content-Type}o", "text/html", "-"),
        ("{remote_user}e", "jo", "-"),
        ("{wsgi.url_scheme}e", "https", "-"),
        ("{empty}e", "-", "-"),
    ],
)
def test_the_atoms_of_gunicorn(atom: str, expected: str, of_refused: str) -> None:
    """170."""
    assert line(f"<%({atom})s>") == f"<{expected}>"
    assert line(f"<%({atom})s>", REFUSED) == f"<{of_refused}>"


def test_combined_is_gunicorns_default() -> None:
    expected = (
        '192.0.2.7 - jo\\x20smith [30/Nov/2025:14:00:00 +0200] "GET /shop/caf%C3%A9?q=1&r=2 HTTP/1.1" 200 5120 '
        '"https://example.org/" "curl/8"'
    )
    assert line("combined") == line(COMBINED) == expected
    assert line("combined", REFUSED) == '- - - [30/Nov/2025:14:00:00 +0200] "-" 400 - "-" "-"'


def test_widths_percent_signs_and_letters_of_any_kind() -> None:
    assert line("%(s)6s|%(m)-5s|%(D)d|100 %%|naïve %(p)8s|") == "   200|GET  |1234567|100 %|naïve     <77>|"


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", ""),
        (b"*", "*", ""),
        (b"http://example.org/a/b?c=/d?e", "/a/b", "c=/d?e"),
        (b"http://example.org", "/", ""),
        (b"//a/b?", "//a/b", ""),
    ],
)
def test_targets_of_all_kinds(target: bytes, path: str, query: str) -> None:
    record = msgspec.structs.replace(RECORD, target=target)
    assert line("%(U)s %(q)s", record) == f"{path} {query}"
    assert (json.loads(line("json", record))["path"], json.loads(line("json", record))["query"]) == (path, query)


@pytest.mark.parametrize(
    "value",
    [b"Bearer abc", b"Basic", b"Basic !!", b"Basic " + base64.b64encode(b""), b"Basic " + base64.b64encode(b":x")],
)
def test_a_user_is_named_by_basic_authentication_only(value: bytes) -> None:
    assert line("%(u)s", AccessRecord(status=200, request_headers=[(b"authorization", value)])) == "-"


def test_json_has_everything_in_one_object() -> None:
    """170."""
    assert json.loads(line("json", tenant="genai")) == {
        "time": "2025-11-30T12:00:00.123Z",
        "client": "192.0.2.7",
        "method": "GET",
        "path": "/shop/caf%C3%A9",
        "query": "q=1&r=2",
        "protocol": "HTTP/1.1",
        "status": 200,
        "bytes": 5120,
        "duration_ms": 1234.568,
        "queue_ms": 250.0,
        "app_ms": 750.0,
        "user_agent": "curl/8",
        "referer": "https://example.org/",
        "request_id": "abc-1",
        "pid": 77,
        "tenant": "genai",
    }


def test_json_says_null_where_there_was_no_request() -> None:
    entry = json.loads(line("json", REFUSED))
    assert {name for name, value in entry.items() if value is None} == {
        *("client", "method", "path", "query", "protocol", "user_agent", "referer")
    }
    assert "request_id" not in entry


def test_the_time_is_made_once_a_second() -> None:
    now = [NOON]
    make = compile_format("%(t)s", wall_clock_ns=lambda: now[0])
    assert make(RECORD) == make(RECORD) == b"[30/Nov/2025:14:00:00 +0200]\n"
    now[0] += 1_000_000_000
    assert make(RECORD) == b"[30/Nov/2025:14:00:01 +0200]\n"
    as_json = compile_format("json", wall_clock_ns=lambda: now[0])
    assert json.loads(as_json(RECORD))["time"] == "2025-11-30T12:00:01.123Z"
    now[0] += 900_000_000
    assert json.loads(as_json(RECORD))["time"] == "2025-11-30T12:00:02.023Z"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "%(h)s %(x)s",
            "unknown atom %(x)s; allowed are h, l, u, t, r, m, U, q, H, s, B, b, f, a, T, D, M, L, p, {hea",
        ),
        ("%({x}y)s", "unknown atom %({x}y)s"),
        ("%({}i)s", "unknown atom %({}i)s"),
        ("%()s", "unknown atom %()s"),
        ("jsn", "'jsn' is not allowed; write combined, json, or a text with atoms: %(h)s"),
        ("", "'' is not allowed"),
        ("%(h)s 100%", "'%': after a % stands (ATOM)s; a % itself is written %%"),
        ("%(h)s %h", "'%h': after a %"),
        ("%(h)x", "'%(h)x': after a %"),
        ("%(h)s\n%(t)s", "a line end has no place in it"),
    ],
)
def test_a_format_that_is_wrong_is_refused_with_what_is_right(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_format(text, option="JUMPSTART_ACCESS_LOGFORMAT")
    assert str(caught.value).startswith(f"JUMPSTART_ACCESS_LOGFORMAT: {said}")


# ---------------------------------------------------------------------- what clients send


VALUES = st.binary(max_size=60)
TEXTS = st.text(max_size=30)
RECORDS = st.builds(
    AccessRecord,
    client=TEXTS,
    method=TEXTS,
    target=VALUES,
    status=st.integers(100, 999),
    sent=st.integers(0, 2**63),
    total_s=st.floats(0, 1e6),
    queue_s=st.floats(0, 1e6),
    app_s=st.floats(0, 1e6),
    request_headers=st.lists(
        st.tuples(
            st.sampled_from([b"user-agent", b"referer", b"x-request-id", b"authorization", b"x"]),
            VALUES | VALUES.map(lambda value: b"Basic " + base64.b64encode(value)),
        )
    ),
    response_headers=st.lists(st.tuples(st.sampled_from([b"X-A", b"x-a"]), VALUES)),
    environ=st.none() | st.dictionaries(st.just("X"), TEXTS | VALUES | st.integers()),
)
ALL_ATOMS = (
    '%(h)s %(l)s %(u)s %(t)s "%(r)s" "%(m)s" "%(U)s" "%(q)s" %(H)s %(s)s %(B)s %(b)s "%(f)s" "%(a)s" %(T)s %(D)s %(M)s '
    '%(L)s %(p)s "%({x}i)s" "%({x-a}o)s" "%({x}e)s"'
)


@given(RECORDS)
def test_any_bytes_give_one_line_of_printable_ascii_that_no_client_can_forge(record: AccessRecord) -> None:
    made = compile_format(ALL_ATOMS)(record)
    assert re.fullmatch(rb"[ -~]*\n", made)
    assert made.count(b'"') == ALL_ATOMS.count('"')
    assert all(re.fullmatch(rb"x[0-9A-F]{2}.*", rest, re.DOTALL) for rest in made.split(b"\\")[1:])


@given(RECORDS)
def test_any_bytes_give_one_line_of_json(record: AccessRecord) -> None:
    made = compile_format("json")(record)
    assert re.fullmatch(rb"[ -~]*\n", made)
    entry = json.loads(made)
    assert (entry["status"], entry["bytes"]) == (record.status, record.sent)


def test_what_is_escaped_and_what_is_not() -> None:
    value = b'a b\r\nc"d\\e\x00\x1b[31m\x7f\xc3\xa9 ~'
    record = AccessRecord(status=200, request_headers=[(b"user-agent", value)])
    assert line("%(a)s", record) == r"a b\x0D\x0Ac\x22d\x5Ce\x00\x1B[31m\x7F\xC3\xA9 ~"
    assert json.loads(line("json", record))["user_agent"] == value.decode()


# ---------------------------------------------------------------------- the file


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AccessLog]:
    before = count_descriptors()
    log = AccessLog(str(tmp_path / "access.log"), "%(s)s %(r)s")
    yield log
    log.close()
    assert count_descriptors() == before


def test_each_line_is_one_write(log: AccessLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = os.write

    def write(number: int, data: bytes) -> int:
        written.append(data)
        return real(number, data)

    monkeypatch.setattr(os, "write", write)
    log.write(RECORD)
    log.write(REFUSED)
    expected = [b"200 GET /shop/caf%C3%A9?q=1&r=2 HTTP/1.1\n", b"400 -\n"]
    assert written == expected
    assert (tmp_path / "access.log").read_bytes() == b"".join(expected)


def test_it_appends_to_what_others_write(log: AccessLog, tmp_path: Path) -> None:
    log.write(REFUSED)
    with (tmp_path / "access.log").open("a") as other:
        other.write("other\n")
    log.write(REFUSED)
    assert (tmp_path / "access.log").read_text() == "400 -\nother\n400 -\n"


def test_reopening_goes_on_in_a_new_file(log: AccessLog, tmp_path: Path) -> None:
    log.write(RECORD)
    (tmp_path / "access.log").rename(tmp_path / "access.log.1")
    log.write(RECORD)
    log.reopen()
    log.write(REFUSED)
    assert (tmp_path / "access.log.1").read_text().count("\n") == 2
    assert (tmp_path / "access.log").read_text() == "400 -\n"


def test_what_cannot_be_reopened_is_used_on(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AccessLog(str(folder / "access.log"), "%(s)s")
    folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        log.reopen()
    log.write(REFUSED)
    assert (tmp_path / "moved" / "access.log").read_text() == "400\n"
    assert log.lost == 0
    log.close()


def test_threads_that_write_while_it_is_reopened_lose_no_line_and_hit_no_other_file(tmp_path: Path) -> None:
    """Descriptors are reused at once here: a line that went to a closed one would show in a victim, or be lost."""
    before = count_descriptors()
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "%({n}e)s")
    victims = tmp_path / "victims"
    stop = threading.Event()

    def steal() -> None:
        while not stop.is_set():
            with victims.open("ab") as taken:
                taken.write(b"")

    def work(number: int) -> None:
        for count in range(400):
            log.write(AccessRecord(status=200, environ={"N": f"{number}-{count}"}))

    thief = threading.Thread(target=steal)
    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in (thief, *workers):
        thread.start()
    rotations = 0
    while any(worker.is_alive() for worker in workers):
        rotations += 1
        path.rename(tmp_path / f"access.log.{rotations}")
        log.reopen()
    for worker in workers:
        worker.join()
    log.close()
    stop.set()
    thief.join()
    lines = [line for file in tmp_path.glob("access.log*") for line in file.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{number}-{count}" for number in range(4) for count in range(400))
    assert victims.read_bytes() == b""
    assert log.lost == 0
    assert count_descriptors() == before


def test_after_close_lines_are_lost_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(str(tmp_path / "access.log"))
    log.close()
    log.write(RECORD)
    assert log.lost == 1
    assert (tmp_path / "access.log").read_text() == ""


def test_a_full_disk_costs_lines_and_one_warning_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = AccessLog("/dev/full", clock=lambda: now[0])
    for _ in range(5):
        log.write(RECORD)
    assert log.lost == 5
    assert [record.getMessage() for record in caplog.records] == [
        f"access log /dev/full: [Errno {errno.ENOSPC}] No space left on device; lines lost: 1"
    ]
    now[0] = 59.9
    log.write(RECORD)
    assert len(caplog.records) == 1
    now[0] = 60.0
    log.write(RECORD)
    assert caplog.records[1].getMessage().endswith("lines lost: 6")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    log.close()


def test_a_line_that_only_began_to_fit_is_ended_before_the_next(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = LogFile(str(tmp_path / "log"), 1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        file.write(b"12345\n")
        with pytest.raises(ShortWriteError):
            file.write(b"67890\n")
        with pytest.raises(OSError):
            file.write(b"lost\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "log").read_bytes() == b"12345\n6789"
    file.write(b"next\n")
    file.write(b"and\n")
    assert (tmp_path / "log").read_bytes() == b"12345\n6789\nnext\nand\n"
    file.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for number in ends:
        try:
            os.close(number)
        except OSError:
            pass


def through(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, logformat: str) -> AccessLog:
    """A log on standard output, which is a pipe."""
    monkeypatch.setattr("jumpstart_server.access.STDOUT", pipe[1])
    return AccessLog("-", logformat)


def test_a_closed_pipe_costs_lines_only(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = through(pipe, monkeypatch, "combined")
    log.write(REFUSED)
    log.reopen()
    log.write(REFUSED)
    assert os.read(pipe[0], 10_000).count(b"\n") == 2
    os.close(pipe[0])
    log.write(REFUSED)
    assert log.lost == 1
    assert "Broken pipe" in caplog.text
    log.close()
    os.fstat(pipe[1])  # standard output is not ours to close


@pytest.mark.parametrize("logformat", ["combined", "json"])
def test_a_line_is_cut_to_what_a_pipe_takes_whole(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, logformat: str
) -> None:
    log = through(pipe, monkeypatch, logformat)
    record = AccessRecord(
        method="GET",
        target=b"/" + b"\xff" * 4000,
        status=200,
        request_headers=[(b"user-agent", b"\x01" * 8000), (b"referer", b"x" * 8000)],
    )
    log.write(record)
    made = os.read(pipe[0], 100_000)
    assert made.endswith(b"\n") and len(made) <= select.PIPE_BUF
    assert b"..." in made
    if logformat == "json":
        assert json.loads(made)["status"] == 200
    log.close()


def test_a_file_takes_lines_of_any_length(log: AccessLog, tmp_path: Path) -> None:
    log.write(AccessRecord(method="GET", target=b"/" + b"x" * 20_000, status=200))
    assert len((tmp_path / "access.log").read_bytes()) > 20_000


def test_a_record_that_cannot_be_written_hurts_nobody(
    log: AccessLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken: Any = AccessRecord(method="GET", target=None, status=200)  # type: ignore[arg-type]  # it is meant to be wrong
    log.write(broken)
    log.write(REFUSED)
    assert (log.lost, (tmp_path / "access.log").read_text()) == (1, "400 -\n")
    assert "lines lost: 1" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / "absent" / "access.log", "No such file or directory"),
        (lambda folder: folder, "Is a directory"),
        (lambda folder: fifo(folder / "fifo"), "No such device or address"),
        (lambda folder: f"{folder}/nul\0", "embedded null byte"),
    ],
    ids=["no folder", "a folder", "a FIFO that nobody reads", "a NUL"],
)
def test_a_file_that_cannot_be_opened_is_named_with_a_remedy(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    path = str(make(tmp_path))
    with pytest.raises(ConfigError) as caught:
        AccessLog(path)
    assert str(caught.value).startswith(f"--access-logfile {path}: cannot be opened: {why}; name a file in a folder")


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_one_that_need_not_open_loses_lines_until_it_is_reopened(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    log = AccessLog(str(folder / "access.log"), "%(s)s", must_open=False)
    log.write(REFUSED)
    assert log.lost == 1
    folder.mkdir()
    assert [file.path for file in logfile.open_files() if file.path.startswith(str(tmp_path))] == [
        str(folder / "access.log")
    ]
    log.reopen()
    log.write(REFUSED)
    assert (folder / "access.log").read_text() == "400\n"
    log.close()


def test_several_processes_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    source = """if True:
        import sys
        from jumpstart_server.access import AccessLog, AccessRecord
        log, number = AccessLog(sys.argv[1], "%(s)s %(a)s"), int(sys.argv[2])
        for _ in range(200):
            log.write(AccessRecord(status=200 + number, request_headers=[(b"user-agent", b"%d" % number * 6000)]))
    """
    writers = [subprocess.Popen([sys.executable, "-c", source, str(path), str(number)]) for number in range(4)]
    assert [writer.wait(30) for writer in writers] == [0] * 4
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(f"{200 + number} {str(number) * 6000}" for number in range(4) for _ in range(200))
