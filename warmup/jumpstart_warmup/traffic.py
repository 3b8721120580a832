"""
Recorded traffic: a file of requests with their times, and its replay to a host.

The file is JSON lines. The first is ``{"jumpstart_traffic": 1, …}``, each other one a `Recorded` request, in the order
of their times. It is read and written line by line: a day's traffic takes no more memory than a minute's. What is
recorded went through `scrub` before (docs/shadow.md).
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import re
import ssl
import time
from collections.abc import AsyncIterable, Callable, Iterator
from pathlib import Path
from typing import IO, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from jumpstart.errors import ConfigError
from jumpstart.files import replace
from jumpstart_warmup.corpus import MARKER_HEADER, WarmRequest, encodable
from jumpstart_warmup.http import BODY_LIMIT_BYTES, parse_url, ssl_context

VERSION = 1
MAX_LINE = 16 * 1024 * 1024  # bytes; a body of 10 MiB in base64, and its headers
MAX_KINDS = 20  # of errors that are told apart
SAVE_EVERY_S = 1.0  # seconds between two notes of how far a replay is
UNREACHABLE_LIMIT = 20  # attempts in a row that could not connect; then a replay ends
UNREACHABLE_PAUSE_S = 0.25
HOLD_S = 5.0  # seconds; a worker tells of its requests each second, a busy one a little later
QUEUE = 1000  # requests that a mirror holds back; more are dropped
GROWTH = 1.05  # of one latency bucket over the one before: percentiles are that exact

_TARGET = re.compile(r"/[\x21-\x7e]*")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,20}")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,100}")
_VALUE = re.compile(r"[\x20-\x7e\t]*")
_SET_HERE = frozenset({"content-length", "transfer-encoding", "connection", "user-agent", MARKER_HEADER})
USER_AGENT = "jumpstart-shadow/1"  # is not sampled, as what has the marker; so no proxy can make a loop

Clock = Callable[[], float]


class Header(msgspec.Struct, frozen=True):
    """The first line; *jumpstart_traffic* is the version of the format."""

    jumpstart_traffic: int
    tenant: str = ""
    fraction: float = 1.0
    recorded_at: str = ""


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    One request of the file.

    Attributes:
        t: seconds since the recording began.
        body: base64 in the file.
        status: of its answer then; 0 when not known.
    """

    t: float
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    status: int = 0

    @property
    def request(self) -> WarmRequest:
        """As the drivers take it."""
        return WarmRequest(method=self.method, path=self.path, headers=self.headers, body=self.body)


def recorded(request: WarmRequest, t: float, status: int = 0) -> Recorded:
    """*request* as a line of the file."""
    return Recorded(round(t, 4), request.method, request.path, request.headers, request.body, status)


# --- the file -------------------------------------------------------------------------------------------------------


class InOrder:
    """
    Puts requests of several workers, each of which tells of its own now and then, into the order of their times. Pure.

    Those of the last *hold_s* seconds are held back. One that comes later than that is given the time of the last that
    was let go.
    """

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._held: list[tuple[float, int, Recorded]] = []
        self._count = 0  # decides between equal times
        self._newest = self._last = 0.0

    def take(self, each: Recorded) -> list[Recorded]:
        """Hold *each*, and let go what is old enough."""
        self._count += 1
        heapq.heappush(self._held, (each.t, self._count, each))
        self._newest = max(self._newest, each.t)
        ready = []
        while self._held and self._held[0][0] <= self._newest - self._hold_s:
            ready.append(self._pop())
        return ready

    def rest(self) -> list[Recorded]:
        """Let go all."""
        return [self._pop() for _ in range(len(self._held))]

    def _pop(self) -> Recorded:
        at, _, each = heapq.heappop(self._held)
        self._last = max(self._last, at)
        return each if at == self._last else msgspec.structs.replace(each, t=self._last)


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # scrubbed or not, it is what people asked for


class Writer:
    """Writes a file of traffic; what is whole on the disk is whole in the file, should the process die."""

    def __init__(self, path: Path, header: Header) -> None:
        """
        Raises:
            ConfigError: the file cannot be made, or is there already.
        """
        try:
            self._file = open(path, "xb", buffering=0, opener=_for_us_alone)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made: {error.strerror}") from error
        self.count = 0
        self._file.write(msgspec.json.encode(header) + b"\n")

    def write(self, request: Recorded) -> None:
        """Append one."""
        self._file.write(msgspec.json.encode(request) + b"\n")
        self.count += 1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_traffic(path: Path, offset: int = 0) -> Iterator[tuple[int, Recorded]]:
    """
    Yield each request with the place in the file behind it, from *offset* (such a place) on.

    A last line without an end, of a recorder that was killed, is left out.

    Raises:
        ConfigError: the file cannot be read or is no such file; the message names the line, or the place in the file.
    """
    try:
        with path.open("rb") as file:
            read_header(file, path)
            if offset:
                file.seek(offset)
            decoder = msgspec.json.Decoder(Recorded)
            while line := file.readline(MAX_LINE):
                at = file.tell()
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINE:
                        raise ConfigError(f"{path}: the line that ends behind byte {at} is too long")
                    return
                yield at, _checked(decoder, line, f"{path}: the line that ends at byte {at}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def read_header(file: IO[bytes], path: Path) -> Header:
    """Read the first line; raises `ConfigError` when it is none."""
    try:
        header = msgspec.json.decode(file.readline(64 * 1024), type=Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is no file of recorded traffic (jumpstart shadow record makes one)") from error
    if header.jumpstart_traffic != VERSION:
        raise ConfigError(f"{path}: has format {header.jumpstart_traffic}; this version reads format {VERSION}")
    return header


def _checked(decoder: msgspec.json.Decoder[Recorded], line: bytes, where: str) -> Recorded:
    try:
        found = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: is no recorded request: {error}") from error
    if not (math.isfinite(found.t) and found.t >= 0):
        raise ConfigError(f"{where}: t must be seconds from 0 on, got {found.t}")
    if not _METHOD.fullmatch(found.method) or found.method == "CONNECT":
        raise ConfigError(f"{where}: method must be an HTTP method, got {found.method!r}")
    if not _TARGET.fullmatch(found.path):
        raise ConfigError(f"{where}: path must be visible ASCII that starts with '/', got {found.path!r}")
    for name, value in found.headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or name.lower() in _SET_HERE:
            raise ConfigError(f"{where}: {name!r}: {value!r} is no header that a replay may send")
    return found


# --- what became of it ----------------------------------------------------------------------------------------------


class Outcome(msgspec.Struct):
    """
    What became of a replay or a mirror, in bounded memory.

    Attributes:
        sent: requests that were sent, answered or not.
        statuses: status → answers.
        errors: what went wrong → how often, for requests without an answer.
        differing: answers with another status than was recorded.
        dropped: by a mirror whose target is too slow.
        latencies: number of a bucket → answers; see `percentile_ms`.
    """

    sent: int = 0
    statuses: dict[int, int] = {}
    errors: dict[str, int] = {}
    differing: int = 0
    dropped: int = 0
    latencies: dict[int, int] = {}
    behind_s: float = 0.0

    def answered(self, status: int, latency_s: float, expected: int = 0) -> None:
        """Count an answer."""
        self.sent += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.differing += bool(expected) and status != expected
        bucket = max(math.ceil(math.log(max(latency_s, 1e-6) / 1e-6, GROWTH)), 0)
        self.latencies[bucket] = self.latencies.get(bucket, 0) + 1

    def failed(self, text: str) -> None:
        """Count a request that got no answer."""
        self.sent += 1
        if text not in self.errors and len(self.errors) >= MAX_KINDS:
            text = "(other)"
        self.errors[text] = self.errors.get(text, 0) + 1

    def percentile_ms(self, share: float) -> float | None:
        """Milliseconds within which *share* of the answers came, 5 % too much at most; None without answers."""
        total = sum(self.latencies.values())
        seen = 0
        for bucket in sorted(self.latencies):
            seen += self.latencies[bucket]
            if seen >= share * total:
                return 1e-3 * GROWTH**bucket
        return None

    @property
    def is_clean(self) -> bool:
        """Whether everything was answered, and nothing with a 5xx."""
        return bool(self.sent) and not self.errors and all(status < 500 for status in self.statuses)


class Position(msgspec.Struct):
    """
    How far a replay is: every request before *offset* is done with.

    Attributes:
        file: size and first bytes of the file, so that another one is not taken for it.
    """

    url: str
    file: str
    offset: int
    outcome: Outcome


def fingerprint(path: Path) -> str:
    """What tells a file of traffic from another. Raises `ConfigError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            return f"{os.fstat(file.fileno()).st_size}:{len(head)}:{hash_of(head)}"
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def hash_of(data: bytes) -> str:
    """Of some bytes, in short."""
    import hashlib

    return hashlib.sha256(data).hexdigest()[:16]


def read_position(path: Path, url: str, file: str) -> Position:
    """
    Read how far the replay of *file*, a `fingerprint`, to *url* was.

    Raises:
        ConfigError: there is no such note, or it is of another replay.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Position)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no replay to go on with; leave --resume out") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if (found.url, found.file) != (url, file):
        raise ConfigError(f"{path}: is of a replay of another file or to {found.url}; remove it, or leave --resume out")
    return found


# --- sending --------------------------------------------------------------------------------------------------------


class _Sender:
    """
    Sends requests to one host. Each has a connection of its own, so that all workers of the host get some.

    It needs a tenth of the time that httpx takes, which would be minutes for a day's traffic.
    """

    def __init__(self, url: str, timeout_s: float, verify: bool | Path) -> None:
        base, self._socket_path = parse_url(url)
        parts = urlsplit(base)
        self._tls = ssl_context(verify) if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._timeout_s = timeout_s

    async def send(self, each: Recorded, outcome: Outcome, clock: Clock) -> bool:
        """Send one, and count it; false when the host could not be reached."""
        loop = asyncio.get_running_loop()
        answer = _Answer(loop, self._head(each), each.method == "HEAD")
        begun = clock()
        is_connected = False
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._socket_path is not None:
                    await loop.create_unix_connection(lambda: answer, self._socket_path)
                else:
                    await loop.create_connection(lambda: answer, self._host, self._port, ssl=self._tls)
                is_connected = True
                status = await answer.status
            outcome.answered(status, clock() - begun, each.status)
        except TimeoutError:
            outcome.failed(f"no answer within {self._timeout_s:g} s" if is_connected else "cannot be reached in time")
        except (OSError, ssl.CertificateError) as error:
            text = f"{type(error).__name__}: {error}" if is_connected else f"cannot be reached: {error}"
            outcome.failed(encodable(text))
        finally:
            answer.leave()
        return is_connected

    def _head(self, each: Recorded) -> bytes:
        names = {name.lower() for name, _ in each.headers}
        lines = [f"{each.method} {self._prefix}{each.path} HTTP/1.1"]
        if "host" not in names:
            lines.append(f"host: {self._authority}")
        lines += [f"{name}: {value}" for name, value in each.headers]
        if each.body or each.method in ("POST", "PUT", "PATCH"):
            lines.append(f"content-length: {len(each.body)}")
        lines += [f"user-agent: {USER_AGENT}", f"{MARKER_HEADER}: 1", "connection: close", "", ""]
        return "\r\n".join(lines).encode("ascii") + each.body


class _Answer(asyncio.Protocol):
    """
    One exchange on a connection.

    Attributes:
        status: of the answer, when it is complete, or a MiB of it has come: a stream has run its code by then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, request: bytes, is_head: bool) -> None:
        self.status: asyncio.Future[int] = loop.create_future()
        self._request = request
        self._is_head = is_head
        self._received = 0
        self._code = 0
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")
        if self._received > BODY_LIMIT_BYTES and self._code:
            self._end()

    def on_headers_complete(self) -> None:
        code = self._parser.get_status_code()
        self._code = code if code >= 200 else 0
        if self._is_head and self._code:
            self._end()

    def on_message_complete(self) -> None:
        if self._code:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._code and error is None:  # a body that ends with its connection
            self._end()
        self._fail("the connection was closed before the answer was complete")

    def leave(self) -> None:
        """Close the connection; nobody wants more of it."""
        if self._transport is not None:
            self._transport.abort()
        if self.status.done() and not self.status.cancelled():
            self.status.exception()  # an error that came after the time was over is no news

    def _end(self) -> None:
        if not self.status.done():
            self.status.set_result(self._code)

    def _fail(self, text: str) -> None:
        if not self.status.done():
            self.status.set_exception(ConnectionError(text))


class Replay:
    """
    Sends a file to a host, in the order of the file.

    Attributes:
        outcome: what became of it so far.
        stopped: why it ended before the file did; None when it did not.
    """

    def __init__(
        self,
        path: Path,
        url: str,
        *,
        state: Path | None = None,
        resume: bool = False,
        rate: float | None = None,
        speed: float | None = None,
        concurrency: int = 8,
        timeout_s: float = 30.0,
        verify: bool | Path = True,
        clock: Clock = time.monotonic,
    ) -> None:
        """
        Args:
            state: where it is noted how far the replay is; removed at the end.
            resume: go on where that says; requests that were under way are sent again, *concurrency* at most.
            rate: requests a second.
            speed: 1 is as fast as they came when they were recorded, 10 is ten times that. Without *rate* and *speed*
                the next is sent when one is done.
            timeout_s: for one request.

        Raises:
            ConfigError: file, URL or state are not what they should be.
        """
        self._path, self._url, self._state = path, url, state
        self._rate, self._speed, self._concurrency = rate, speed, concurrency
        self._timeout_s, self._verify, self._clock = timeout_s, verify, clock
        self._file = fingerprint(path)
        self._offset = 0
        self.outcome = Outcome()
        self.stopped: str | None = None
        parse_url(url)
        with path.open("rb") as file:
            read_header(file, path)
        if resume and state is not None:
            position = read_position(state, url, self._file)
            self._offset, self.outcome = position.offset, position.outcome
        self._running: dict[int, int] = {}  # place behind a request that is under way → place before it
        self._unreachable = 0
        self._saved_at = clock()

    async def run(self) -> Outcome:
        """
        Send all. Cancelled, it notes how far it is; the state is as good after a kill, and up to a second older.

        Raises:
            ConfigError: a line of the file is none.
        """
        sender = _Sender(self._url, self._timeout_s, self._verify)
        requests = self._paced(read_traffic(self._path, self._offset))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._send_all(sender, requests))
        except BaseExceptionGroup as group_of_errors:
            raise group_of_errors.exceptions[0] from None
        finally:
            self._save(is_done=False)
        if self.stopped is None:
            self._save(is_done=True)
        return self.outcome

    def _paced(self, found: Iterator[tuple[int, Recorded]]) -> Iterator[tuple[int, Recorded, float]]:
        """With the time at which each is due."""
        started = self._clock()
        first: float | None = None
        for number, (at, each) in enumerate(found):
            first = each.t if first is None else first
            if self._rate is not None:
                yield at, each, started + number / self._rate
            elif self._speed is not None:
                yield at, each, started + (each.t - first) / self._speed
            else:
                yield at, each, 0.0

    async def _send_all(self, sender: _Sender, requests: Iterator[tuple[int, Recorded, float]]) -> None:
        for at, each, due in requests:
            self._running[at] = self._offset
            self._offset = at
            now = self._clock()
            if due > now:
                await asyncio.sleep(due - now)
            elif due:
                self.outcome.behind_s = max(self.outcome.behind_s, now - due)
            if await sender.send(each, self.outcome, self._clock):
                self._unreachable = 0
            else:
                self._unreachable += 1
                if self._unreachable >= UNREACHABLE_LIMIT:
                    self.stopped = f"{self._url} cannot be reached"
                    return
                await asyncio.sleep(UNREACHABLE_PAUSE_S)
            del self._running[at]
            if self._clock() - self._saved_at >= SAVE_EVERY_S:
                self._save(is_done=False)
            if self.stopped is not None:
                return

    def _save(self, *, is_done: bool) -> None:
        self._saved_at = self._clock()
        if self._state is None:
            return
        if is_done:
            self._state.unlink(missing_ok=True)
            return
        offset = min(self._running.values(), default=self._offset)
        position = Position(encodable(self._url), self._file, offset, self.outcome)
        replace(self._state, msgspec.json.encode(position))


async def mirror(
    requests: AsyncIterable[Recorded],
    url: str,
    outcome: Outcome,
    *,
    concurrency: int = 8,
    timeout_s: float = 30.0,
    verify: bool | Path = True,
    queue: int = QUEUE,
    clock: Clock = time.monotonic,
) -> None:
    """
    Send *requests* on to another host as they come, until they end; the answers are counted in *outcome*.

    A host that is slow or away costs requests and nothing else: *queue* wait at most, and what comes then is dropped.

    Raises:
        ConfigError: the URL is none. Otherwise what *requests* raises.
    """
    sender = _Sender(url, timeout_s, verify)
    waiting: asyncio.Queue[Recorded | None] = asyncio.Queue(queue)

    async def send_all() -> None:
        while (each := await waiting.get()) is not None:
            if not await sender.send(each, outcome, clock):
                await asyncio.sleep(UNREACHABLE_PAUSE_S)

    senders = [asyncio.create_task(send_all()) for _ in range(concurrency)]
    try:
        async for each in requests:
            try:
                waiting.put_nowait(each)
            except asyncio.QueueFull:
                outcome.dropped += 1
        for _ in senders:
            await waiting.put(None)
        await asyncio.gather(*senders)
    finally:
        for task in senders:
            task.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
