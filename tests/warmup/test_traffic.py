"""Recorded traffic: the file, and its replay against real servers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart.errors import ConfigError
from jumpstart_warmup import traffic
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.traffic import Header, InOrder, Outcome, Recorded, Replay, Writer, mirror, read_traffic, recorded
from tests.server.raw_http import make_certificate


class Bare:
    """The least of an HTTP server: it reads a head, keeps the request line and answers."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.marked = 0
        self.answer = b"200 OK"
        self.hold = asyncio.Event()
        self.hold.set()
        self.loop: asyncio.AbstractEventLoop | None = None

    def release(self) -> None:
        """Answer those that are held; from any thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.hold.set)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.lines.append(head.partition(b"\r\n")[0])
            self.marked += b"\r\nx-jumpstart-warmup: 1\r\n" in head
            await self.hold.wait()
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\nok" % self.answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextlib.contextmanager
def serve(app: Bare, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """In a thread with a loop of its own."""
    app.loop = loop = asyncio.new_event_loop()
    started = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    async def main() -> None:
        server = await asyncio.start_server(app, sock=listener, limit=65536, ssl=tls)
        started.set()
        try:
            await stop.wait()
        finally:
            server.close()
            app.hold.set()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(10)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


def make(path: Path, count: int, gap_s: float = 0.01, status: int = 200) -> Path:
    with Writer(path, Header(1, "web")) as writer:
        for number in range(count):
            writer.write(Recorded(number * gap_s, "GET", f"/p/{number}", (("accept", "*/*"),), status=status))
    return path


# --- the file -------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.lists(
        st.builds(
            Recorded,
            t=st.floats(0, 1e6),
            method=st.sampled_from(["GET", "HEAD", "POST"]),
            path=st.from_regex(r"/[\x21-\x7e]{0,40}", fullmatch=True),
            headers=st.lists(st.tuples(st.just("accept"), st.from_regex(r"[ -~]{0,20}", fullmatch=True))).map(tuple),
            body=st.binary(max_size=40),
            status=st.integers(0, 599),
        ),
        max_size=5,
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, requests: list[Recorded]) -> None:
    path = tmp_path_factory.mktemp("traffic") / "file"
    with Writer(path, Header(1)) as writer:
        for each in requests:
            writer.write(each)
    found = list(read_traffic(path))
    assert [each for _, each in found] == requests
    for number, (at, _) in enumerate(found):  # from every place on
        assert [each for _, each in read_traffic(path, at)] == requests[number + 1 :]


def test_a_recorder_that_was_killed_leaves_a_file_that_reads(tmp_path: Path) -> None:
    path = make(tmp_path / "file", 3)
    path.write_bytes(path.read_bytes()[:-5])
    assert [each.path for _, each in read_traffic(path)] == ["/p/0", "/p/1"]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 4))))
def test_requests_of_several_workers_come_into_order(times: list[tuple[float, float]]) -> None:
    """Each is told of up to some seconds after its time, and all are let go, none before one that was earlier."""
    told = sorted(times, key=lambda each: each[0] + each[1])
    order, found = InOrder(hold_s=5.0), list[Recorded]()
    for at, _ in told:
        found += order.take(Recorded(at, "GET", f"/{at}"))
    found += order.rest()
    assert [each.t for each in found] == sorted(at for at, _ in times)
    found += order.take(Recorded(0.0, "GET", "/much-later")) + order.rest()
    assert [each.t for each in found] == sorted(each.t for each in found)
    assert found[-1].path == "/much-later"


def test_a_recording_is_not_written_over_another(tmp_path: Path) -> None:
    make(tmp_path / "file", 1)
    with pytest.raises(ConfigError, match="File exists"):
        Writer(tmp_path / "file", Header(1))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "no recorded request"),
        (b'{"t":-1,"method":"GET","path":"/"}', "seconds from 0 on"),
        (b'{"t":1,"method":"CONNECT","path":"/"}', "HTTP method"),
        (b'{"t":1,"method":"GET / HTTP/1.1","path":"/"}', "HTTP method"),
        (b'{"t":1,"method":"GET","path":"/a b"}', "visible ASCII"),
        (b'{"t":1,"method":"GET","path":"//x\\r\\nHost: y"}', "visible ASCII"),
        (b'{"t":1,"method":"GET","path":"/","headers":[["a","b\\r\\nc: d"]]}', "no header"),
        (b'{"t":1,"method":"GET","path":"/","headers":[["Content-Length","5"]]}', "no header"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes, expected: str) -> None:
    path = make(tmp_path / "file", 1)
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ConfigError, match=expected) as raised:
        list(read_traffic(path))
    assert f"byte {path.stat().st_size}" in str(raised.value)


@pytest.mark.parametrize("text", [b"", b"[[request]]\n", b'{"jumpstart_traffic": 2}\n', b"\xff\xfe\n"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"no file of recorded traffic|format 2"):
        list(read_traffic(path))


def test_percentiles_are_near_enough() -> None:
    outcome = Outcome()
    assert outcome.percentile_ms(0.5) is None
    for number in range(1, 1001):
        outcome.answered(200, number / 1000)
    assert 500 <= (outcome.percentile_ms(0.5) or 0) <= 525
    assert 990 <= (outcome.percentile_ms(0.99) or 0) <= 1040
    assert len(outcome.latencies) < 200


# --- the replay -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_are_sent_marked_and_counted(tmp_path: Path) -> None:
    path = make(tmp_path / "file", 50, status=201)
    app = Bare()
    with serve(app) as url:
        work = Replay(path, url + "/prefix", state=tmp_path / "state")
        outcome = asyncio.run(work.run())
    assert sorted(app.lines) == sorted(b"GET /prefix/p/%d HTTP/1.1" % number for number in range(50))
    assert app.marked == 50
    assert outcome.statuses == {200: 50} and outcome.differing == 50
    assert outcome.is_clean and work.stopped is None
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "least_s"), [({"rate": 100.0}, 0.28), ({"speed": 2.0}, 0.28), ({}, 0.0)])
def test_it_is_as_fast_as_it_was_told(tmp_path: Path, options: dict[str, float], least_s: float) -> None:
    path = make(tmp_path / "file", 30, gap_s=0.02)
    with serve(Bare()) as url:
        began = time.monotonic()
        outcome = asyncio.run(Replay(path, url, **options).run())  # type: ignore[arg-type]  # floats, all of them
    assert outcome.sent == 30
    assert time.monotonic() - began >= least_s


@pytest.mark.slow
def test_errors_and_5xx_are_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "file", 30)
    app = Bare()
    app.answer = b"500 No"
    with serve(app) as url:
        assert not asyncio.run(Replay(path, url).run()).is_clean
    monkeypatch.setattr(traffic, "UNREACHABLE_PAUSE_S", 0.0)
    work = Replay(path, url, concurrency=2, state=tmp_path / "state")
    outcome = asyncio.run(work.run())
    assert work.stopped is not None and "cannot be reached" in work.stopped
    assert 20 <= outcome.sent < 25 and outcome.statuses == {}
    assert (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_replay_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    path, state = make(tmp_path / "file", 300), tmp_path / "state"
    app = Bare()

    async def cut(work: Replay) -> None:
        running = asyncio.create_task(work.run())
        while work.outcome.sent < 100:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.001)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    with serve(app) as url:
        asyncio.run(cut(Replay(path, url, state=state, concurrency=4)))
        first = len(app.lines)
        assert 100 <= first < 300
        with pytest.raises(ConfigError, match="another file or to"):
            Replay(path, url + "/other", state=state, resume=True)
        work = Replay(path, url, state=state, resume=True, concurrency=4)
        outcome = asyncio.run(work.run())
        with pytest.raises(ConfigError, match="leave --resume out"):
            Replay(path, url, state=state, resume=True)
    assert len(set(app.lines)) == 300  # none was left out
    assert len(app.lines) - 300 <= 4  # and only those that were under way came twice
    assert outcome.sent >= 300


# The kernel's high-water mark of this program; getrusage's would be that of the test before it started this one.
CHILD = """
import asyncio, re, sys
from pathlib import Path
from jumpstart_warmup.traffic import Replay
work = Replay(Path(sys.argv[1]), sys.argv[2], state=Path(sys.argv[3]), resume=sys.argv[4] == "resume", concurrency=16)
outcome = asyncio.run(work.run())
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(outcome.sent, sum(outcome.errors.values()), peak)
"""


@pytest.mark.slow
def test_a_long_file_replays_in_bounded_memory_and_survives_a_kill(tmp_path: Path) -> None:
    """``TRAFFIC_REQUESTS=100000`` for a day's traffic; a tenth of the file must take as much memory as all of it."""
    count = int(os.environ.get("TRAFFIC_REQUESTS", "5000"))
    app = Bare()

    def start(path: Path, url: str, how: str) -> subprocess.Popen[str]:
        state = path.with_suffix(".state")
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), url, str(state), how], stdout=subprocess.PIPE, text=True
        )

    with serve(app) as url:
        short = start(make(tmp_path / "short", count // 10), url, "anew")
        sent, errors, small = map(int, short.communicate(timeout=300)[0].split())
        assert (sent, errors) == (count // 10, 0)
        app.lines.clear()
        path = make(tmp_path / "long", count)
        killed = start(path, url, "anew")
        try:
            deadline = time.monotonic() + 60
            while not path.with_suffix(".state").exists() or len(app.lines) < count // 10:
                assert time.monotonic() < deadline and killed.poll() is None
                time.sleep(0.01)
        finally:
            killed.kill()
            killed.communicate()
        rest = start(path, url, "resume")
        sent, errors, large = map(int, rest.communicate(timeout=600)[0].split())
    assert errors == 0
    assert len(set(app.lines)) == count
    assert large < small + 8 * 1024, f"{small} KiB for a tenth, {large} KiB for all"
    if count > 50_000:
        print(f"{count} requests, {len(app.lines) - count} of them twice, {small} → {large} KiB", file=sys.stderr)
    assert large < 100 * 1024


# --- the mirror -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mirror_drops_what_a_slow_host_has_no_time_for() -> None:
    app = Bare()
    app.hold.clear()
    outcome = Outcome()

    async def source() -> AsyncIterator[Recorded]:
        for number in range(100):
            yield recorded(WarmRequest(path=f"/{number}"), number)
            await asyncio.sleep(0)
        app.release()

    with serve(app) as url:
        asyncio.run(mirror(source(), url, outcome, concurrency=2, queue=10, timeout_s=20))
    assert outcome.dropped >= 80
    assert outcome.sent + outcome.dropped == 100
    assert outcome.statuses == {200: outcome.sent}


@pytest.mark.slow
def test_a_host_with_tls_is_spoken_to_when_its_certificate_is_trusted(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    path = make(tmp_path / "file", 4)
    app, mirrored = Bare(), Outcome()

    async def source() -> AsyncIterator[Recorded]:
        for number in range(3):
            yield Recorded(0.0, "GET", f"/{number}")

    with serve(app, context) as url:
        assert asyncio.run(Replay(path, url, verify=certificate).run()).statuses == {200: 4}
        asyncio.run(mirror(source(), url, mirrored, verify=False))
        assert mirrored.statuses == {200: 3}
        arrived = len(app.lines)
        work = Replay(path, url)
        stranger = asyncio.run(work.run())
        assert len(app.lines) == arrived == app.marked == 7
    assert stranger.statuses == {} and stranger.sent == 4
    assert all("CERTIFICATE_VERIFY_FAILED" in text for text in stranger.errors)


def test_the_format_is_what_the_documentation_shows() -> None:
    line = msgspec.json.encode(recorded(WarmRequest(path="/a?b=c", headers=(("accept", "*/*"),)), 1.23456, 200))
    assert line == b'{"t":1.2346,"method":"GET","path":"/a?b=c","headers":[["accept","*/*"]],"status":200}'
    assert line.decode() in (Path(__file__).parents[2] / "docs" / "shadow.md").read_text("utf-8")
