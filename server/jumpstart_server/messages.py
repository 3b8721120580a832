"""
What the processes say to each other: small named messages, length-prefixed MessagePack over a Unix socket pair.

The supervisor holds one pair with each mold and one with each worker. A new worker's end travels to the mold as a file
descriptor beside `Fork`, so that no sibling ever holds it, and its closing tells both sides of the other's death.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from jumpstart.profile import Encoding, Golden
from jumpstart.records import Record
from jumpstart.report import BootReport
from jumpstart.upkeep import LiveInfo
from jumpstart_server.engine import PoolStats
from jumpstart_server.settings import Settings
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.observe import ObserverSnapshot
from jumpstart_warmup.sampling import Cold, Sample
from jumpstart_warmup.shadow import Lane, ShadowCounts
from jumpstart_warmup.shapes import Answer

LENGTH = struct.Struct(">I")
MAX_DESCRIPTORS = 253  # SCM_MAX_FD in linux/net/scm.h: more cannot be sent at once
MAX_MESSAGE = 1 << 30  # bytes; a captured bytecode section of a large app is some 50 MB


class Section(msgspec.Struct, frozen=True):
    """One recorder's captured records on their way to the supervisor."""

    version: int
    encoding: Encoding
    records: list[Record]


# supervisor → mold or spawned worker


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """
    First message to a process.

    Attributes:
        role: ``mold`` forks workers; ``worker`` boots the app and serves by itself; ``builder`` captures a profile;
            ``prover`` boots, answers golden requests, and ends; ``seeder`` proves a profile and publishes it.
        started: the supervisor's start on the monotonic clock, in seconds.
        listeners: how many bound sockets come along.
        requests: for a builder: the file of requests.
        golden: for a prover: what it is asked.
        profile: for a seeder: the file.
        cold: boot from nothing, whatever the settings say.
        server: the supervisor's name in the boot ledger, or "" to keep none.
        replay, too_slow, recent: as of `Fork`, for a spawned worker.
        is_alone: no other tenant runs; log lines need not name it then.
    """

    role: str
    settings: Settings
    started: float
    generation: int = 0
    slot: int = 0
    supervisor_pid: int = 0
    listeners: int = 0
    requests: str = ""
    golden: list[WarmRequest] = []
    profile: str = ""
    cold: bool = False
    replay: bool = True
    too_slow: list[str] = []
    recent: list[WarmRequest] = []
    server: str = ""
    is_alone: bool = True


class Fork(msgspec.Struct, frozen=True, tag=True):
    """
    Fork a worker for *slot*; its end of the control pair comes along.

    Attributes:
        replay: whether it runs warm-up requests; not when its forerunners died of them.
        too_slow: names of those that it does not run, for an earlier worker has waited for them in vain.
        recent: requests that met cold work in other workers lately; it runs them too.
    """

    slot: int
    replay: bool = True
    too_slow: list[str] = []
    recent: list[WarmRequest] = []


# mold → supervisor


class MoldReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The mold is warm. With ``report.start_method == "spawn"`` it ends by itself, and workers must be spawned."""

    report: BootReport


class BootFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """
    A process will not come up; *text* tells the operator why, with the app's traceback.

    Attributes:
        may_be_state: warm state, if there was any, may be the reason.
    """

    exit_code: int
    text: str
    may_be_state: bool = False


# supervisor → worker


class Accept(msgspec.Struct, frozen=True, tag=True):
    """The sockets listen: start accepting."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """
    Finish the requests in flight and exit.

    Attributes:
        patience_s: how long connections that are kept may wait for one more request, which is answered with
            ``Connection: close``. A client that asks just as its idle connection is closed would see a failure.
        is_stop: the server stops, so that streams are told to end; in a roll others serve on, and they have time.
    """

    patience_s: float = 0.0
    is_stop: bool = True


class LameDuck(msgspec.Struct, frozen=True, tag=True):
    """The worker will be told to drain in a while: answer with ``Connection: close`` from now on, and accept."""


class Reopen(msgspec.Struct, frozen=True, tag=True):
    """Open the log files anew: somebody has moved them away. For molds too."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """
    Answer with `Stats`, or with `Captured` when *capture* is set or there are *golden* requests.

    Attributes:
        golden: to be asked of the app, twice, beside what it does otherwise.
    """

    number: int
    capture: bool = False
    golden: list[WarmRequest] = []


class Shadow(msgspec.Struct, frozen=True, tag=True):
    """Run *request*, of *route*, as a shadow request, when there is nothing better to do."""

    request: WarmRequest
    lane: Lane
    route: str = ""


class SampleRate(msgspec.Struct, frozen=True, tag=True):
    """Send `Sampled` with this share of the real requests from now on, *most* of them in a second."""

    rate: float
    most: int


# worker → supervisor


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker exists; it is booting."""

    pid: int


class StoppedAccepting(msgspec.Struct, frozen=True, tag=True):
    """A worker that drains has taken all connections that waited; it takes no more."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker is warm and may accept."""

    report: BootReport


class ShutdownFailed(msgspec.Struct, frozen=True, tag=True):
    """A worker has drained, but the app's own shut-down failed; *text* tells its author why. The worker ends now."""

    text: str


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """
    Request statistics of a worker since its start; *number* 0 when nobody asked.

    Attributes:
        pool: the threads that run the app's sync code.
        shadow: what became of the shadow requests that it was sent.
        live: how current its real-time values are.
    """

    number: int
    observed: ObserverSnapshot
    pool: PoolStats = PoolStats()
    shadow: ShadowCounts = ShadowCounts()
    live: list[LiveInfo] = []


class MetCold(msgspec.Struct, frozen=True, tag=True):
    """A real request has met cold work in this worker."""

    cold: Cold


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """Real requests, as `SampleRate` asked for; *lost* more since the last time."""

    samples: list[Sample]
    lost: int = 0


class Renew(msgspec.Struct, frozen=True, tag=True):
    """A worker wants to be replaced, the new one ready first; *reason* is for the log: memory, overruns …"""

    reason: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """
    A worker's event loop is alive; once a second while it serves.

    Attributes:
        rss: its resident set in bytes; 0 where the system does not tell.
        in_flight: requests that run.
        stacks: descriptor of the memory file that it writes its stacks to when it is asked; -1 for none.
    """

    rss: int = 0
    in_flight: int = 0
    stacks: int = -1


class Learnt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that a worker knows and a next boot would want; replaces what it sent before."""

    sections: dict[str, Section]


class Captured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """
    Answer to `Ask(capture=True)`, and a builder's result.

    Attributes:
        failures: requests that did not go as they should, in words.
        rejected: requests that were answered with 4xx, which nobody had said would be.
        golden: how the golden requests were answered that were asked for; of a builder, those of its corpus.
    """

    number: int
    sections: dict[str, Section]
    observed: ObserverSnapshot
    failures: list[str] = []
    rejected: list[str] = []
    golden: list[Golden] = []


class Proved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prover's result: how it came up, and how it answered each golden request the first time."""

    report: BootReport
    answers: list[Answer]


class Seeded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """
    A seeder's result.

    Attributes:
        outcome: ``published``; ``rejected``, it is not proven; or ``failed``, nobody can tell.
        place: in the store.
        faults: codes of why it is not proven.
        lines: what there is to say, in words.
    """

    outcome: str
    place: str = ""
    faults: list[str] = []
    lines: list[str] = []


Message = (
    Start
    | Fork
    | MoldReady
    | BootFailed
    | Accept
    | Drain
    | LameDuck
    | Reopen
    | Ask
    | Hello
    | WorkerReady
    | StoppedAccepting
    | Renew
    | Beat
    | ShutdownFailed
    | Stats
    | Learnt
    | Captured
    | Proved
    | Seeded
    | Shadow
    | SampleRate
    | MetCold
    | Sampled
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:  # a lone surrogate, out of a request or an error's text
        body = _encoder.encode(_printable(msgspec.to_builtins(message, builtin_types=(bytes,))))
    return LENGTH.pack(len(body)) + body


def _printable(value: Any) -> Any:
    """*value* with every text such that UTF-8 can hold it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(each) for each in value]
    return value


class ChannelClosedError(ConnectionError):
    """The process at the other end is gone."""


def _decode(body: bytes) -> Message:
    """What is no message comes from no process of ours any more, whoever writes there."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ChannelClosedError(f"not a message: {error}") from error


class BlockingChannel:
    """One end of a control pair, for a process without an event loop. One thread only."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, message: Message) -> None:
        """
        Raises:
            ChannelClosedError: the other end is gone.
        """
        try:
            self.sock.sendall(encode(message))
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> Message:
        """
        Wait for the next message.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        size = self._need(LENGTH.size)
        (length,) = LENGTH.unpack(bytes(self._buffer[:size]))
        if length > MAX_MESSAGE:
            raise ChannelClosedError(f"a message of {length} bytes")
        total = self._need(size + length)
        body = bytes(self._buffer[size:total])
        del self._buffer[:total]
        return _decode(body)

    def said(self, limit_s: float) -> Iterator[Message]:
        """
        Yield what the other end says until it closes.

        Raises:
            TimeoutError: that took longer than *limit_s* seconds in all; 0 is no limit.
        """
        give_up = time.monotonic() + limit_s
        while True:
            self.sock.settimeout(max(give_up - time.monotonic(), 0.001) if limit_s else None)
            try:
                message = self.receive()
            except ChannelClosedError:
                return
            yield message

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just received."""
        return self._descriptors.popleft()

    def _need(self, count: int) -> int:
        while len(self._buffer) < count:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, 65536, MAX_DESCRIPTORS)
            except TimeoutError:
                raise  # of a socket that has one: nobody is gone
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # the kernel passes them on without that mark
                self._descriptors.append(descriptor)
            if not data:
                raise ChannelClosedError("closed")
            self._buffer += data
        return count


class Channel:
    """One end of a control pair in an event loop. Sending never waits; receiving is for one task."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Channel:
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer)

    def send(self, message: Message) -> None:
        """Queue a message; when the other end is gone it is dropped, and `receive` says so."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def flush(self) -> None:
        """Wait until all that was sent is in the kernel, where the other end finds it even when we are gone."""
        self._writer.transport.set_write_buffer_limits(high=0)  # or it would not wait for the last 64 KiB
        try:
            await self._writer.drain()
        except ConnectionError:
            pass  # receive() reports the other end's death

    async def receive(self) -> Message:
        """
        Raises:
            ChannelClosedError: the other end is gone.
        """
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_MESSAGE:
                raise ChannelClosedError(f"a message of {length} bytes")
            return _decode(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ChannelClosedError(str(error)) from error

    def close(self) -> None:
        self._writer.close()
