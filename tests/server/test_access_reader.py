"""Access logs are read back into the statistics of a running server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_server.access import AccessRecord, compile_format
from jumpstart_server.access_reader import compile_reader, lines_of, read_log

FORMATS = [
    "json",
    '%(h)s %(l)s %(u)s %(t)s "%(r)s" %(s)s %(b)s "%(f)s" "%(a)s" %(D)s',
    "%(t)s %(m)s %(U)s %(s)s %(L)s",
    '"%(r)s" 100%% %(s)s took %(M)sms %(p)s "%({x-request-id}i)s"',
]


def write(logformat: str, *records: AccessRecord, second: int = 1_780_000_000) -> list[str]:
    make = compile_format(logformat, tenant="web", pid=7, wall_clock_ns=lambda: second * 10**9)
    return [make(record).decode() for record in records]


@pytest.mark.parametrize("logformat", FORMATS)
@given(
    method=st.sampled_from(["GET", "POST"]),
    target=st.sampled_from([b"/", b"/chat?q=1", b"/item/17", b"/a%20b/%22"]),
    status=st.integers(100, 599),
    duration=st.floats(0.002, 900),
    user_agent=st.binary(max_size=20),
)
def test_what_we_write_we_read(
    logformat: str, method: str, target: bytes, status: int, duration: float, user_agent: bytes
) -> None:
    record = AccessRecord(
        client="10.0.0.7",
        method=method,
        target=target,
        status=status,
        total_s=duration,
        request_headers=[(b"user-agent", user_agent), (b"x-request-id", b"1 2")],
    )
    [text] = write(logformat, record)
    line = compile_reader(logformat)(text.rstrip("\n"))
    assert line is not None
    assert (line.method, line.path, line.status) == (method, target.partition(b"?")[0].decode(), status)
    assert line.duration_s == pytest.approx(duration, abs=0.001)
    if "(t)" in logformat or logformat == "json":
        assert line.ended == 1_780_000_000


def test_a_log_becomes_statistics_by_route() -> None:
    records = [AccessRecord(method="GET", target=b"/item/%d" % n, status=200, total_s=0.02) for n in range(3)]
    records += [AccessRecord(method="POST", target=b"/chat", status=504, total_s=40.0)]
    records += [AccessRecord(method="GET", target=b"/wp-admin.php", status=404, total_s=0.01)]
    lines = write("json", *records) + write("json", records[0], second=1_780_000_060)
    stats = read_log([*lines, "\n", "no line of ours\n"], compile_reader("json"))
    assert (stats.lines, stats.odd, stats.period_s) == (6, 1, 60)
    assert stats.routes["web"]["GET /item/{}"].requests == 4
    assert stats.routes["web"]["POST /chat"].errors == 1
    assert stats.routes["web"]["POST /chat"].latency_sum_s == 40
    assert stats.routes["web"]["GET (not found)"].requests == 1


def test_tenants_of_one_log_are_told_apart() -> None:
    lines = []
    for tenant in ("web", "genai"):
        make = compile_format("json", tenant=tenant, pid=7, wall_clock_ns=lambda: 0)
        lines.append(make(AccessRecord(method="GET", target=b"/", status=200, total_s=0.1)).decode())
    stats = read_log(lines, compile_reader("json"))
    assert {tenant: list(routes) for tenant, routes in stats.routes.items()} == {"web": ["GET /"], "genai": ["GET /"]}


def test_requests_that_were_none_are_left_out() -> None:
    [text] = write("json", AccessRecord(status=400))
    stats = read_log([text], compile_reader("json"))
    assert (stats.lines, stats.odd) == (0, 1)


def test_a_format_without_durations_says_so() -> None:
    with pytest.raises(ConfigError, match=r"how long a request took.*%\(D\)s"):
        compile_reader("combined")
    with pytest.raises(ConfigError, match="no status"):
        compile_reader("%(m)s %(D)s")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.log"):
        list(lines_of([str(tmp_path / "nowhere.log")]))
