"""What the processes say to each other arrives whole, in order, with its descriptors, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import get_args

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from jumpstart.records import Dropped, Reason, Record
from jumpstart.report import BootReport, Refusal, SectionReport, Span, WarmupReport
from jumpstart_server.engine import PoolStats
from jumpstart_server.messages import (
    LENGTH,
    MAX_MESSAGE,
    Accept,
    Ask,
    Beat,
    BlockingChannel,
    BootFailed,
    Captured,
    Channel,
    ChannelClosedError,
    Drain,
    Fork,
    Hello,
    LameDuck,
    Learnt,
    Message,
    MetCold,
    MoldReady,
    Proved,
    Renew,
    Reopen,
    Sampled,
    SampleRate,
    Section,
    Seeded,
    Shadow,
    ShutdownFailed,
    Start,
    Stats,
    StoppedAccepting,
    WorkerReady,
    encode,
)
from jumpstart_server.settings import AppSettings, HostSettings, ProfileSettings, Settings, TenantSettings
from jumpstart_warmup.corpus import WarmRequest
from jumpstart_warmup.observe import ObserverSnapshot, RouteStats
from jumpstart_warmup.sampling import Cold, Sample
from jumpstart_warmup.shapes import Answer

REPORT = BootReport(
    target="a:b",
    interface="wsgi",
    sources=["profile x.jumpstart"],
    refusals=[Refusal("profile x", Reason.TOO_OLD, "3 days")],
    sections=[SectionReport(recorder="modules", offered=2, used=1, dropped=[Dropped("k", Reason.STALE, "module:m")])],
    spans=[Span(name="import", process="mold 1", start_s=0.1, duration_s=0.2)],
    start_method="spawn",
    start_reasons=["thread 'x' is running"],
    warmup=WarmupReport(sent=2, ok=1, failures=["GET /: 500"], coverage=0.5),
    recorders_off={"regex": "restore: ValueError: x"},
)
SETTINGS = Settings(
    app=AppSettings(target="a:b"),
    tenant=TenantSettings(bind=("127.0.0.1:0",), fd=None, port=0),
    profile=ProfileSettings(lru_cache=("a:*",)),
    server=HostSettings(),
)
OBSERVED = ObserverSnapshot(
    routes={"GET /": RouteStats(requests=1, cold_events={"import": 2}, cold_names=("import x",))}
)
SECTIONS = {"bytecode": Section(1, "msgpack", [Record(key="k", data={"code": b"\0\xff"}, depends={"module:m": "x"})])}
MESSAGES: list[Message] = [
    Start(role="mold", settings=SETTINGS, started=1.5, generation=2, slot=3, supervisor_pid=4, requests="r.toml"),
    Fork(3),
    StoppedAccepting(),
    ShutdownFailed("Traceback …"),
    MoldReady(report=REPORT),
    BootFailed(exit_code=3, text="Traceback …\n\udcff".encode("utf-8", "replace").decode()),
    Accept(),
    Drain(),
    LameDuck(),
    Reopen(),
    Beat(rss=1 << 33, in_flight=3, stacks=7),
    Renew("memory"),
    Ask(7, capture=True),
    Hello(4711),
    WorkerReady(report=REPORT),
    Stats(
        number=7, observed=OBSERVED, pool=PoolStats(threads=4, busy=2, waiting=1, peak=4, limit=8, oldest_wait_s=0.5)
    ),
    Learnt(sections=SECTIONS),
    Captured(number=7, sections=SECTIONS, observed=OBSERVED, failures=["GET /: 500"]),
    Proved(report=REPORT, answers=[Answer(name="GET /", status=200, shape="0" * 32)]),
    Shadow(WarmRequest(path="/a?b=c", body=b"\xff"), "cold"),
    SampleRate(0.25, 8),
    MetCold(Cold(WarmRequest(), "GET /", (("import", "decimal"),))),
    Sampled([Sample(WarmRequest(), "GET /", 200, 1.5, 0.01)], lost=2),
    Seeded(outcome="rejected", faults=["drained"], lines=["not proven: drained"]),
]


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    theirs.settimeout(20)
    with ours, theirs:
        yield ours, theirs


def test_every_message_has_an_example_here() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    with pair() as (ours, theirs):
        BlockingChannel(ours).send(message)
        assert BlockingChannel(theirs).receive() == message


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=4), st.integers(1, 700))
def test_messages_in_tiny_pieces_arrive_whole_and_in_order(messages: list[Message], piece: int) -> None:
    data = b"".join(map(encode, messages))
    with pair() as (ours, theirs):

        def write() -> None:
            for start in range(0, len(data), piece):
                ours.send(data[start : start + piece])

        writer = threading.Thread(target=write)
        writer.start()
        channel = BlockingChannel(theirs)
        received = [channel.receive() for _ in messages]
        writer.join()
    assert received == messages


def test_event_loops_speak_the_same_and_learn_of_a_closed_peer() -> None:
    async def talk(ours: socket.socket, theirs: socket.socket) -> None:
        one, other = await Channel.open(ours), await Channel.open(theirs)
        for message in MESSAGES:
            one.send(message)
        await one.flush()
        assert [await other.receive() for _ in MESSAGES] == MESSAGES
        one.close()
        with pytest.raises(ChannelClosedError):
            await other.receive()
        other.send(Accept())  # to nobody: dropped
        await other.flush()
        other.close()

    with pair() as (ours, theirs):
        asyncio.run(talk(ours, theirs))


def large() -> Learnt:
    records = [Record(key=str(number), data={"code": os.urandom(2048)}) for number in range(1000)]
    return Learnt(sections={"bytecode": Section(1, "msgpack", records)})


def test_a_message_larger_than_any_buffer_crosses_from_a_loop_to_a_blocking_process() -> None:
    message = large()

    async def send(sock: socket.socket) -> None:
        channel = await Channel.open(sock)
        channel.send(message)
        await channel.flush()
        channel.close()

    with pair() as (ours, theirs):
        sender = threading.Thread(target=lambda: asyncio.run(send(ours)))
        sender.start()
        assert BlockingChannel(theirs).receive() == message
        sender.join()


# -- descriptors --


def test_descriptors_travel_beside_their_message_and_in_order() -> None:
    with pair() as (ours, theirs), pair() as (a, b):
        channel = BlockingChannel(theirs)
        socket.send_fds(ours, [encode(Fork(1))], [a.fileno()])
        socket.send_fds(ours, [encode(Fork(2))], [b.fileno()])
        for slot, original in ((1, a), (2, b)):
            assert channel.receive() == Fork(slot)
            with socket.socket(fileno=channel.take_descriptor()) as received:
                assert os.fstat(received.fileno()).st_ino == os.fstat(original.fileno()).st_ino
                assert received.fileno() != original.fileno()


def test_many_listeners_travel_at_once() -> None:
    """``--bind`` is repeatable, without a limit that a user would meet."""
    count = 40
    with pair() as (ours, theirs), contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        socket.send_fds(ours, [encode(Drain())], [each.fileno() for each in sockets])
        channel = BlockingChannel(theirs)
        assert channel.receive() == Drain()
        for each in sockets:
            number = channel.take_descriptor()
            assert os.fstat(number).st_ino == os.fstat(each.fileno()).st_ino
            os.close(number)


def test_a_descriptor_whose_message_comes_in_pieces_is_there_with_the_message() -> None:
    data = encode(Fork(5))
    with pair() as (ours, theirs), pair() as (a, _):
        socket.send_fds(ours, [data[:3]], [a.fileno()])
        ours.sendall(data[3:] + encode(Drain()))
        channel = BlockingChannel(theirs)
        assert channel.receive() == Fork(5)
        os.close(channel.take_descriptor())
        assert channel.receive() == Drain()
        with pytest.raises(IndexError):
            channel.take_descriptor()


def test_received_descriptors_are_not_handed_on_to_the_apps_subprocesses() -> None:
    with pair() as (ours, theirs), pair() as (a, _):
        socket.send_fds(ours, [encode(Fork(1))], [a.fileno()])
        channel = BlockingChannel(theirs)
        channel.receive()
        number = channel.take_descriptor()
        try:
            assert not os.get_inheritable(number)
        finally:
            os.close(number)


# -- ends --


def test_a_closed_peer_is_said_at_once_also_in_the_middle_of_a_message() -> None:
    for part in (b"", encode(Fork(1))[:2], encode(Fork(1))[:-1]):
        with pair() as (ours, theirs):
            ours.sendall(part)
            ours.close()
            with pytest.raises(ChannelClosedError):
                BlockingChannel(theirs).receive()
            with pytest.raises(ChannelClosedError):
                BlockingChannel(theirs).send(Drain())


def test_what_was_sent_before_the_peer_closed_still_arrives() -> None:
    with pair() as (ours, theirs):
        BlockingChannel(ours).send(Hello(1))
        ours.close()
        channel = BlockingChannel(theirs)
        assert channel.receive() == Hello(1)
        with pytest.raises(ChannelClosedError):
            channel.receive()


def test_an_absurd_length_is_not_waited_for() -> None:
    async def receive(sock: socket.socket) -> None:
        channel = await Channel.open(sock)
        try:
            await channel.receive()
        finally:
            channel.close()

    for blocking in (True, False):
        with pair() as (ours, theirs):
            ours.sendall(LENGTH.pack(MAX_MESSAGE + 1))
            with pytest.raises(ChannelClosedError, match=f"a message of {MAX_MESSAGE + 1} bytes"):
                if blocking:
                    BlockingChannel(theirs).receive()
                else:
                    asyncio.run(receive(theirs))


def test_silence_ends_a_wait_that_has_a_limit_and_a_close_one_without() -> None:
    with pair() as (ours, theirs):
        BlockingChannel(ours).send(Hello(1))
        said = BlockingChannel(theirs).said(0.05)
        assert next(said) == Hello(1)
        with pytest.raises(TimeoutError):
            next(said)
        ours.close()
        assert list(BlockingChannel(theirs).said(0)) == []


def test_messages_cannot_be_changed() -> None:
    for message in MESSAGES:
        for name in message.__struct_fields__:
            with pytest.raises(AttributeError):
                setattr(message, name, None)
    assert msgspec.msgpack.decode(encode(Accept())[LENGTH.size :]) == {"type": "Accept"}


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_161_what_was_sent_before_the_end_arrives_whole_at_a_reader_that_is_slow(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A worker's last words are larger than the kernel's buffer, and the supervisor is busy when they come."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    last = ShutdownFailed("the app's lifespan shut-down failed")
    big = Learnt(sections={"modules": Section(1, "json", [Record(key="k" * 10_000 + str(n)) for n in range(4)])})

    def speak() -> None:
        async def worker() -> None:
            channel = await Channel.open(theirs)
            channel.send(big)
            channel.send(last)
            await channel.flush()
            channel.close()

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(worker())

    speaker = threading.Thread(target=speak)
    speaker.start()
    speaker.join(0.2)
    assert speaker.is_alive(), "it waits until everything is in the kernel"
    with ours:
        channel = BlockingChannel(ours)
        assert [channel.receive(), channel.receive()] == [big, last]
    speaker.join(10)
    assert not speaker.is_alive()
