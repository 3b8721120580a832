"""What wrk prints."""

from __future__ import annotations

import pytest

from benchmarks.load import wrk

PRINTED = """\
Running 4s test @ http://127.0.0.1:9999/
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    13.46ms    2.76ms  30.03ms   75.00%
    Req/Sec     4.76k   224.47     5.22k    70.00%
  Latency Distribution
     50%   950.00us
     75%   14.54ms
     90%   16.92ms
     99%    1.25s
  18954 requests in 4.00s, 2.64MB read
Requests/sec:   4737.29
Transfer/sec:    675.99KB
"""


def test_the_figures() -> None:
    figures = wrk.read(PRINTED)
    assert figures == {
        "rate": 4737.29,
        "requests": 18954,
        "p50_s": pytest.approx(0.00095),
        "p99_s": 1.25,
        "failures": 0,
    }


def test_errors_of_all_kinds_are_failures() -> None:
    more = "  Socket errors: connect 1, read 20, write 300, timeout 4000\n  Non-2xx or 3xx responses: 50000\n"
    assert wrk.read(PRINTED.replace("Requests/sec", more + "Requests/sec"))["failures"] == 54321


def test_without_answers_there_are_no_percentiles() -> None:
    figures = wrk.read("  0 requests in 1.00s, 0.00B read\nRequests/sec:      0.00\n")
    assert (figures["requests"], figures["p50_s"], figures["p99_s"]) == (0, None, None)


def test_anything_else_is_an_error() -> None:
    with pytest.raises(ValueError, match="unable to connect"):
        wrk.read("unable to connect to 127.0.0.1:9999 Connection refused\n")


def test_it_is_given_whole_seconds() -> None:
    command = wrk.command("wrk", 1234, "/x?y=1", 64, 1.6)
    assert command == ["wrk", "-t1", "-c64", "-d2s", "--latency", "--timeout=10s", "http://127.0.0.1:1234/x?y=1"]
    assert "-d1s" in wrk.command("wrk", 1234, "/", 1, 0.2)
