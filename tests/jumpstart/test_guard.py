"""The effect guard: nothing arrives at the other end, and the report names it; outside a guard all of it works."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import logging
import logging.handlers
import multiprocessing
import os
import shelve
import signal
import smtplib
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

import jumpstart
from jumpstart import EffectRefused, is_warmup, renewals
from jumpstart.context import RequestContext, request_context
from jumpstart.errors import ConfigError
from jumpstart.guard import MAX_KINDS, OTHER, Effect, EffectGuard, parse_allowed
from jumpstart.statements import is_read_only, without_values

ROUTE = "POST /checkout"


@pytest.fixture
def guard(tmp_path: Path) -> EffectGuard:
    """One that allows nothing but writes to a folder; the system's temporary one holds the tests' own files."""
    free = tmp_path / "temporary"
    free.mkdir()
    return EffectGuard(folders=[str(free)])


@contextlib.contextmanager
def guarded(guard: EffectGuard) -> Iterator[None]:
    with request_context(RequestContext(warmup=True, guard=guard.of(ROUTE))):
        yield


def report(guard: EffectGuard) -> dict[tuple[str, str], int]:
    refusals = guard.refusals()
    assert {each.route for each in refusals} <= {ROUTE}
    assert sum(each.count for each in refusals) == guard.refused
    return {(each.effect, each.what): each.count for each in refusals}


def refused(guard: EffectGuard, call: Callable[[], object]) -> EffectRefused:
    with guarded(guard), pytest.raises(EffectRefused) as raised:
        call()
    assert str(raised.value).startswith(f"{ROUTE}: ")
    assert "jumpstart.is_warmup()" in str(raised.value)
    return raised.value


# --- other ends -----------------------------------------------------------------------------------------------------


class Payments(ThreadingHTTPServer):
    """A payment service; keeps the bodies of what was posted to it."""

    def __init__(self) -> None:
        self.paid: list[bytes] = []
        self.connections = 0
        super().__init__(("127.0.0.1", 0), _Pay)
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def get_request(self) -> Any:
        request = super().get_request()
        self.connections += 1
        return request


class _Pay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Payments

    def do_POST(self) -> None:
        self.server.paid.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


class Mail(socketserver.ThreadingTCPServer):
    """As much of SMTP as `smtplib` needs; keeps the mails."""

    daemon_threads = True

    def __init__(self) -> None:
        self.mails: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Take)
        self.port: int = self.server_address[1]


class _Take(socketserver.StreamRequestHandler):
    server: Mail

    def handle(self) -> None:
        self.wfile.write(b"220 ready\r\n")
        while line := self.rfile.readline():
            verb = line[:4].upper()
            if verb == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                mail = b""
                while (line := self.rfile.readline()) != b".\r\n":
                    mail += line
                self.server.mails.append(mail)
            elif verb == b"QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            self.wfile.write(b"250 ok\r\n")


@contextlib.contextmanager
def running(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.fixture
def payments() -> Iterator[Payments]:
    with running(Payments()) as server:
        yield server


@pytest.fixture
def mail() -> Iterator[Mail]:
    with running(Mail()) as server:
        yield server


# --- connections ----------------------------------------------------------------------------------------------------


def test_a_mail_is_not_sent(guard: EffectGuard, mail: Mail) -> None:
    def send() -> None:
        with smtplib.SMTP("127.0.0.1", mail.port) as client:
            client.sendmail("a@example.com", ["b@example.com"], "Subject: hello\r\n\r\nhello")

    error = refused(guard, send)
    assert (error.route, error.effect, error.what) == (ROUTE, "connect", f"127.0.0.1:{mail.port}")
    assert "shadow_allow" in str(error)
    assert mail.mails == []
    with smtplib.SMTP("127.0.0.1", mail.port) as client:  # a connection that is open
        refused(guard, lambda: client.sendmail("a@example.com", ["b@example.com"], "hello"))
        assert mail.mails == []
        client.sendmail("a@example.com", ["b@example.com"], "a real one")
    assert mail.mails == [b"a real one\r\n"]
    assert report(guard) == {
        ("connect", f"127.0.0.1:{mail.port}"): 1,
        ("send", f"127.0.0.1:{mail.port}"): 1,
    }


def test_a_payment_is_not_made_on_a_new_connection(guard: EffectGuard, payments: Payments) -> None:
    refused(guard, lambda: urllib.request.urlopen(payments.url, data=b"urllib"))
    refused(guard, lambda: httpx.post(payments.url, content=b"httpx", trust_env=False))
    assert payments.connections == 0
    with urllib.request.urlopen(payments.url, data=b"urllib") as response:
        assert response.read() == b"ok"
    assert httpx.post(payments.url, content=b"httpx", trust_env=False).text == "ok"
    assert payments.paid == [b"urllib", b"httpx"]
    assert report(guard) == {("connect", f"127.0.0.1:{payments.port}"): 2}


def test_a_payment_is_not_made_on_a_connection_that_is_kept_alive(guard: EffectGuard, payments: Payments) -> None:
    """And the connection is as good as before for the next real request."""
    plain = http.client.HTTPConnection("127.0.0.1", payments.port)

    def pay(body: bytes) -> bytes:
        plain.request("POST", "/", body)
        return plain.getresponse().read()

    refused(guard, lambda: pay(b"unborn"))
    assert pay(b"1") == b"ok"
    refused(guard, lambda: pay(b"shadow"))
    assert pay(b"2") == b"ok"
    assert payments.connections == 1
    plain.close()
    with httpx.Client(trust_env=False) as client:
        client.post(payments.url, content=b"3")
        refused(guard, lambda: client.post(payments.url, content=b"shadow"))
        assert client.post(payments.url, content=b"4").text == "ok"
    assert payments.paid == [b"1", b"2", b"3", b"4"]
    assert report(guard)["send", f"127.0.0.1:{payments.port}"] == 2


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_asynchronous_clients_are_guarded_in_both_loops(
    guard: EffectGuard, payments: Payments, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def by_streams(body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", payments.port)
        try:
            return await on_stream(reader, writer, body)
        finally:
            writer.close()

    async def on_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> bytes:
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        return await reader.readuntil(b"ok")

    async def refuses(call: Callable[[], Any]) -> None:
        with guarded(guard), pytest.raises(EffectRefused):
            await asyncio.create_task(call())  # a task takes its context along

    async def main() -> None:
        await refuses(lambda: by_streams(b"shadow"))
        reader, writer = await asyncio.open_connection("127.0.0.1", payments.port)
        await on_stream(reader, writer, b"1")
        await refuses(lambda: on_stream(reader, writer, b"shadow"))
        assert (await on_stream(reader, writer, b"2")).endswith(b"ok")
        writer.close()
        async with httpx.AsyncClient(trust_env=False) as client:
            await refuses(lambda: client.post(payments.url, content=b"shadow"))
            await client.post(payments.url, content=b"3")
            await refuses(lambda: client.post(payments.url, content=b"shadow"))
            assert (await client.post(payments.url, content=b"4")).text == "ok"
        await refuses(lambda: asyncio.create_subprocess_exec("true"))
        await refuses(lambda: asyncio.create_subprocess_shell("true"))
        await refuses(
            lambda: asyncio.get_running_loop().create_datagram_endpoint(
                asyncio.DatagramProtocol, remote_addr=("127.0.0.1", payments.port)
            )
        )

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert payments.paid == [b"1", b"2", b"3", b"4"]
    assert {effect for effect, _ in report(guard)} == {"connect", "send", "process"}


def test_aiohttp_is_guarded_on_uvloop(guard: EffectGuard, payments: Payments) -> None:
    aiohttp = pytest.importorskip("aiohttp")

    async def main() -> None:
        async with aiohttp.ClientSession() as session:

            async def pay(body: bytes) -> bytes:
                async with session.post(payments.url, data=body) as response:
                    found: bytes = await response.read()
                    return found

            for body in (b"1", b"2"):
                with guarded(guard), pytest.raises(EffectRefused):
                    await pay(b"shadow")
                assert await pay(body) == b"ok"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert payments.paid == [b"1", b"2"]
    assert guard.refused == 2


def test_datagrams_and_unix_sockets_are_guarded(guard: EffectGuard, tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own,
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as client,
    ):
        end.bind(("127.0.0.1", 0))
        end.setblocking(False)
        address = end.getsockname()
        refused(guard, lambda: own.sendto(b"shadow", address))
        refused(guard, lambda: own.sendmsg([b"shadow"], [], 0, address))
        refused(guard, lambda: own.connect(address))
        own.connect(address)
        for call in (own.send, own.sendall, lambda data: own.sendmsg([data])):
            refused(guard, lambda call=call: call(b"shadow"))  # type: ignore[misc]  # mypy and defaults of a lambda
        with pytest.raises(BlockingIOError):
            end.recv(100)
        own.send(b"real")
        end.settimeout(5)
        assert end.recv(100) == b"real"
        path = str(tmp_path / "socket")
        listener.bind(path)
        listener.listen()
        assert refused(guard, lambda: client.connect(path)).what == f"unix:{path}"
        client.connect(path)
        refused(guard, lambda: client.sendall(b"shadow"))
        allowing = EffectGuard([f"unix:{path}"])
        with guarded(allowing):
            client.sendall(b"allowed")
    one, other = socket.socketpair()  # what event loops wake themselves with
    with one, other, guarded(guard):
        one.send(b"x")
        assert other.recv(1) == b"x"


@pytest.mark.parametrize("entry", ["127.0.0.1:{}", "127.0.0.1:*", "127.0.0.0/8:{}", "localhost:{}"])
def test_what_is_allowed_works(payments: Payments, entry: str) -> None:
    allowing = EffectGuard([entry.format(payments.port)])
    with guarded(allowing):
        assert httpx.post(payments.url, content=b"1", trust_env=False).text == "ok"
        with urllib.request.urlopen(f"http://localhost:{payments.port}", data=b"2") as response:
            assert response.read() == b"ok"
    assert payments.paid == [b"1", b"2"]
    assert allowing.refused == 0


def test_an_allowed_name_stands_for_its_addresses(payments: Payments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are made to addresses; which of them a name has is what the app was told when it looked it up."""

    def lookup(host: str, port: Any, *args: Any, **kwargs: Any) -> Any:
        assert host == "pay.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port or 0))]

    allowing = EffectGuard([f"pay.example:{payments.port}"])
    monkeypatch.setattr(socket, "getaddrinfo", lookup)  # in the place of the one that is watched: nothing is noted
    with guarded(allowing):
        with socket.create_connection(("pay.example", payments.port)) as connection:
            connection.send(b"")
        with pytest.raises(EffectRefused):
            socket.create_connection(("pay.example", payments.port + 1))


def test_an_event_loop_does_not_wait_for_a_name(guard: EffectGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others need its thread. Who asks first is refused; the look-up goes on beside it, for the next."""
    may_answer = threading.Event()

    def lookup(host: str, *args: Any, **kwargs: Any) -> Any:
        assert may_answer.wait(10)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    allowing = EffectGuard(["slow.example:9"])
    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def connect() -> None:
        with guarded(allowing), socket.socket() as client:
            client.connect(("127.0.0.1", 9))

    with pytest.raises(EffectRefused):
        asyncio.run(connect())
    may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "jumpstart-names":
            thread.join(10)
    with pytest.raises(ConnectionRefusedError):  # allowed now, and nobody is there
        asyncio.run(connect())


# --- files, processes, signals --------------------------------------------------------------------------------------


def test_files_are_written_in_the_temporary_folder_only(guard: EffectGuard, tmp_path: Path) -> None:
    home, free = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    old, inner = home / "old", home / "inner"
    old.write_text("old")
    inner.mkdir()
    (free / "link").symlink_to(old)
    (free / "out").symlink_to(home)
    open_file = (home / "log").open("a")
    before = sorted(home.iterdir())
    descriptor = os.open(home, os.O_RDONLY)
    unbound = socket.socket(socket.AF_UNIX)
    calls: list[Callable[[], object]] = [
        lambda: (home / "new").write_text("x"),
        lambda: old.open("a"),
        lambda: old.open("r+"),
        lambda: (free / "link").write_text("x"),
        lambda: (free / "out" / "new").write_text("x"),
        lambda: (free / ".." / "home" / "new").write_text("x"),
        lambda: os.open(home / "new", os.O_CREAT),
        lambda: os.truncate(old, 0),
        lambda: old.unlink(),
        lambda: os.remove("old", dir_fd=descriptor),
        lambda: old.rename(free / "taken"),
        lambda: (free / "link").rename(home / "given"),
        lambda: os.link(old, home / "twin"),
        lambda: (home / "link").symlink_to(old),
        lambda: (home / "folder").mkdir(),
        lambda: os.mkdir("folder", dir_fd=descriptor),
        lambda: inner.rmdir(),
        lambda: old.chmod(0o600),
        lambda: os.utime(old),
        lambda: os.mkfifo(home / "pipe"),
        lambda: sqlite3.connect(home / "new.db"),
        lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor),
        lambda: os.write(open_file.fileno(), b"x"),
        lambda: os.pwritev(open_file.fileno(), [b"x"], 0),
        lambda: os.sendfile(open_file.fileno(), descriptor, 0, 1),
        lambda: shelve.open(str(home / "new")),  # noqa: SIM115  # it is refused
        lambda: unbound.bind(str(home / "socket")),
    ]
    for call in calls:
        assert refused(guard, call).effect == "write"
    os.close(descriptor)
    unbound.close()
    assert sorted(home.iterdir()) == before
    assert old.read_text() == "old"
    with guarded(guard):
        assert old.read_text() == "old"
        (free / "new").write_text("x")
        (free / "new").rename(free / "moved")
        (free / "moved").unlink()
        (free / "link").unlink()  # the link, and not what it leads to
        with Path(os.devnull).open("w") as null:
            null.write("x")
        open_file.write("a line of a log\n")
        open_file.flush()
        (home / "__pycache__").mkdir()
        (home / "__pycache__" / "lazy.cpython-311.pyc").write_bytes(b"")
    open_file.close()
    (home / "new").write_text("x")
    assert guard.refused == len(calls)
    with guarded(EffectGuard([f"file:{home}"], folders=[])):
        (home / "allowed").write_text("x")


def test_no_process_is_started_and_no_signal_sent(guard: EffectGuard, tmp_path: Path) -> None:
    mark = tmp_path / "temporary" / "mark"
    command = [sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    fork = multiprocessing.get_context("fork")
    spawn = multiprocessing.get_context("spawn")
    calls: list[Callable[[], object]] = [
        lambda: subprocess.run(command),
        lambda: subprocess.run(f"touch {mark}", shell=True),
        lambda: os.system(f"touch {mark}"),
        lambda: os.popen(f"touch {mark}"),
        lambda: os.posix_spawn(command[0], command, {}),
        lambda: os.spawnv(os.P_NOWAIT, command[0], command),
        lambda: os.execv(command[0], command),
        lambda: os.fork(),
        lambda: fork.Process(target=mark.touch).start(),
        lambda: spawn.Process(target=mark.touch).start(),
        lambda: ProcessPoolExecutor(1).submit(os.getpid),
        lambda: spawn.Lock(),  # it starts a process that minds it
    ]
    for call in calls:
        assert refused(guard, call).effect == "process"
    assert refused(guard, lambda: subprocess.run(["curl", "--password=secret"])).what == "curl"
    assert refused(guard, lambda: subprocess.run("PASSWORD=secret curl", shell=True)).what == "/bin/sh -c curl"
    assert not mark.exists()
    assert refused(guard, lambda: os.kill(os.getpid(), signal.SIGKILL)).what == f"SIGKILL to {os.getpid()}"
    refused(guard, lambda: os.killpg(os.getpgrp(), signal.SIGKILL))
    with guarded(guard):
        os.kill(os.getpid(), 0)
    assert any("touch" in what for effect, what in report(guard) if effect == "process")
    assert subprocess.run(["true"]).returncode == 0


# --- threads --------------------------------------------------------------------------------------------------------


def test_pools_of_threads_take_the_guard_along_for_the_job_only(guard: EffectGuard, payments: Payments) -> None:
    def pay(body: bytes) -> str:
        return httpx.post(payments.url, content=body, trust_env=False).text

    with ThreadPoolExecutor(1) as pool:  # its thread is started in the guarded request
        with guarded(guard):
            assert isinstance(pool.submit(pay, b"shadow").exception(10), EffectRefused)
            with pytest.raises(EffectRefused):
                list(pool.map(pay, [b"shadow"]))
        assert pool.submit(pay, b"1").result(10) == "ok"

        came: list[BaseException | None] = []
        told = threading.Event()

        def then(done: Future[bytes]) -> None:
            try:
                pay(done.result())
                came.append(None)
            except BaseException as error:
                came.append(error)
            told.set()

        held = threading.Event()
        for begin, kind in ((lambda: guarded(guard), EffectRefused), (contextlib.nullcontext, type(None))):
            held.clear()
            told.clear()
            with begin():
                job = pool.submit(lambda: (held.wait(10) and b"1") or b"")
                job.add_done_callback(then)  # called in the thread of the pool
            held.set()
            assert told.wait(10) and isinstance(came[-1], kind), came

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for run in (
            lambda: asyncio.to_thread(pay, b"shadow"),
            lambda: loop.run_in_executor(None, pay, b"shadow"),
            lambda: anyio.to_thread.run_sync(pay, b"shadow"),
        ):
            with guarded(guard), pytest.raises(EffectRefused):
                await run()
        assert await asyncio.to_thread(pay, b"2") == "ok"
        assert await anyio.to_thread.run_sync(pay, b"3") == "ok"

    asyncio.run(main())
    assert payments.paid == [b"1", b"1", b"2", b"3"]


def test_a_thread_of_its_own_is_not_started(guard: EffectGuard) -> None:
    """The guard could not follow, nor stay with a thread that may serve others."""
    ran: list[int] = []
    error = refused(guard, threading.Thread(target=ran.append, args=(1,), name="mailer").start)
    assert (error.effect, error.what) == ("thread", "mailer")
    assert "ThreadPoolExecutor" in str(error)
    refused(guard, threading.Timer(0, ran.append, (1,)).start)
    with ThreadPool(1) as pool:
        refused(guard, lambda: pool.apply(ran.append, (1,)))
    assert ran == []
    thread = threading.Thread(target=ran.append, args=(2,))
    thread.start()
    thread.join(10)
    assert ran == [2]


def test_code_that_runs_in_a_copy_of_the_context_is_guarded(guard: EffectGuard, tmp_path: Path) -> None:
    with guarded(guard):
        copied = copy_context()
    with pytest.raises(EffectRefused):
        copied.run((tmp_path / "late").write_text, "x")


async def _next_job(queue: asyncio.Queue[Path]) -> None:
    while True:
        (await queue.get()).write_text(str(is_warmup()))


def test_a_task_that_outlives_its_request_is_no_part_of_it_for_ever(guard: EffectGuard, tmp_path: Path) -> None:
    """An app may start a task that serves all later requests in whichever request comes first."""

    async def main() -> None:
        queue: asyncio.Queue[Path] = asyncio.Queue()
        context = RequestContext(warmup=True, guard=guard.of(ROUTE))
        with request_context(context):
            tasks = [asyncio.create_task(_next_job(queue)) for _ in range(2)]
            await asyncio.sleep(0)
        queue.put_nowait(tmp_path / "early")
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        context.lapses = time.monotonic()
        queue.put_nowait(tmp_path / "later")
        while not queue.empty() or not (tmp_path / "later").exists():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in results} == {EffectRefused, asyncio.CancelledError}

    asyncio.run(main())
    assert not (tmp_path / "early").exists()
    assert (tmp_path / "later").read_text() == "False"


# --- what real requests share with it -------------------------------------------------------------------------------


def test_a_module_is_imported_whole(guard: EffectGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does then it does once in each process; half of it would stay for real requests."""
    text = f"""
import pathlib, threading
pathlib.Path({str(tmp_path)!r}, "imported").write_text("x")
thread = threading.Thread(target=lambda: None)
thread.start()
def call():
    pathlib.Path({str(tmp_path)!r}, "called").write_text("x")
"""
    (tmp_path / "lazy_module_with_effects.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with guarded(guard):
        module = importlib.import_module("lazy_module_with_effects")
    module.thread.join(10)
    assert (tmp_path / "imported").exists()
    assert refused(guard, module.call).what == str(tmp_path / "called")
    del sys.modules["lazy_module_with_effects"]


def test_log_lines_are_written_and_files_rotated_but_nobody_is_sent_one(
    guard: EffectGuard, mail: Mail, tmp_path: Path
) -> None:
    rotating = logging.handlers.RotatingFileHandler(tmp_path / "app.log", maxBytes=10, backupCount=1, delay=True)
    mailing = logging.handlers.SMTPHandler(("127.0.0.1", mail.port), "a@example.com", ["b@example.com"], "hello")
    log = logging.Logger("app")
    log.addHandler(mailing)
    log.addHandler(rotating)
    with guarded(guard):
        log.error("the first")
        log.error("the second")
    rotating.close()
    assert (tmp_path / "app.log").read_text() == "the second\n"
    assert (tmp_path / "app.log.1").read_text() == "the first\n"
    assert mail.mails == []
    assert report(guard) == {("connect", f"127.0.0.1:{mail.port}"): 2}


def test_a_default_for_a_failure_is_not_kept_for_real_requests(guard: EffectGuard, payments: Payments) -> None:
    """Neither by the one who asks next, nor by one who has waited for the same computation."""
    computing = threading.Event()

    @jumpstart.cached(ttl=300)
    def answer() -> str:
        computing.set()
        while is_warmup() and not others:
            time.sleep(0.001)
        try:
            return httpx.post(payments.url, content=b"1", trust_env=False).text
        except Exception:
            return "a default"

    others: list[Future[str]] = []
    with ThreadPoolExecutor(2) as pool:

        def shadow() -> str:
            with guarded(guard):
                return answer()

        refusal = pool.submit(shadow)
        assert computing.wait(10)
        others.append(pool.submit(answer))
        assert isinstance(refusal.exception(10), EffectRefused)
        assert others[0].result(10) == "ok"


def test_a_stale_value_is_renewed_for_whoever_asks(guard: EffectGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Event()
    numbers = iter(range(100))

    @jumpstart.cached(ttl=0.001, stale_ttl=300)
    def number() -> int:
        value = next(numbers)
        if value:
            renewed.set()
            assert not is_warmup()
        return value

    number()
    time.sleep(0.002)
    monkeypatch.setattr(renewals, "pool", renewals.Pool(idle_s=0.01))  # without a thread of another test
    with guarded(guard):
        assert number() == 0
    assert renewed.wait(10)
    assert guard.refused == 0


# --- databases ------------------------------------------------------------------------------------------------------


def test_sqlite_takes_no_row_on_a_connection_that_is_open(guard: EffectGuard, tmp_path: Path) -> None:
    class OwnCursor(sqlite3.Cursor):
        pass

    connection = sqlite3.connect(tmp_path / "shop.db", check_same_thread=False)
    assert type(connection).__name__ == "Connection" and isinstance(connection, sqlite3.Connection)
    connection.execute("create table orders (id integer)")
    insert = "insert into orders values (?)"
    connection.execute(insert, (1,))
    connection.commit()
    calls: list[Callable[[], object]] = [
        lambda: connection.execute(insert, (2,)),  # prepared before, and in the connection's cache
        lambda: connection.executemany(insert, [(2,)]),
        lambda: connection.executescript("select 1; insert into orders values (2)"),
        lambda: connection.cursor().execute(insert, (2,)),
        lambda: connection.cursor(OwnCursor).executemany(insert, [(2,)]),
        lambda: connection.execute("with a as (select 2) insert into orders select * from a"),
        lambda: connection.execute("delete from orders"),
        lambda: connection.execute("pragma user_version = 5"),
        lambda: connection.backup(sqlite3.connect(":memory:")),
    ]
    for call in calls:
        assert refused(guard, call).effect == "sql"
    with guarded(guard):
        assert connection.execute("select id from orders").fetchall() == [(1,)]
        again = sqlite3.connect(tmp_path / "shop.db")  # as apps do that connect once a request
        assert again.execute("select count(*) from orders").fetchone() == (1,)
    assert isinstance(connection.cursor(OwnCursor), OwnCursor)
    again.execute(insert, (2,))
    again.commit()
    assert connection.execute("select id from orders").fetchall() == [(1,), (2,)]
    connection.close()
    again.close()


def test_sqlalchemy_takes_no_row(guard: EffectGuard, tmp_path: Path) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/shop.db")
    orders = sqlalchemy.Table("orders", sqlalchemy.MetaData(), sqlalchemy.Column("id", sqlalchemy.Integer))

    def insert(number: int) -> None:
        with engine.begin() as connection:
            connection.execute(orders.insert().values(id=number))

    def count() -> object:
        with engine.connect() as connection:
            return connection.execute(sqlalchemy.select(sqlalchemy.func.count()).select_from(orders)).scalar()

    orders.metadata.create_all(engine)
    error = refused(guard, lambda: insert(1))
    assert error.effect == "sql" and error.what.startswith("INSERT INTO orders")
    with guarded(guard):
        assert count() == 0
    insert(2)
    assert count() == 1
    engine.dispose()


@pytest.mark.slow
def test_django_takes_no_row(tmp_path: Path) -> None:
    """In a process of its own: Django's settings are for good."""
    pytest.importorskip("django")
    code = """
import sys, django
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}})
from jumpstart import EffectRefused
from jumpstart.context import RequestContext, request_context
from jumpstart.guard import EffectGuard
guard = EffectGuard()
django.setup()
from django.db import connection, models, transaction
class Order(models.Model):
    class Meta:
        app_label = "shop"
with connection.schema_editor() as editor:
    editor.create_model(Order)
with request_context(RequestContext(warmup=True, guard=guard.of("POST /order"))):
    try:
        with transaction.atomic():
            Order.objects.create()
    except EffectRefused as error:
        print(error.effect, error.route, error.what.split(" (")[0])
    print(Order.objects.count())
with transaction.atomic():
    Order.objects.create()
print(Order.objects.count(), guard.refused)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "shop.db")], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.splitlines() == ['sql POST /order INSERT INTO "shop_order"', "0", "1 1"]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 1", True),
        ("  -- insert\n /* delete */ select 'insert into x; delete', \"update\" from t;", True),
        ("(select 1) union (select 2)", True),
        ("WITH a AS (SELECT 1) SELECT * FROM a", True),
        ("WITH a AS (DELETE FROM t RETURNING *) SELECT * FROM a", False),
        ("select * from t for update", False),  # a lock that real requests would wait for
        ("select * from t for no key update", False),
        ("select * from t for share", False),
        ("select pg_advisory_lock(1)", False),
        ("SELECT pg_advisory_unlock_all(); CLOSE ALL; UNLISTEN *; RESET ALL", True),  # asyncpg, after each use
        ("select 1 /*! ; delete from t */", False),
        (r"select * from t where a = '\'; delete from t; --'", False),
        (r"select * from t where a like 'x\%' escape '\' and b = 'new'", True),
        ("begin charge_card(1); end", False),
        ("begin transaction isolation level serializable read only", True),
        ("declare a cursor for select * from t", True),
        ("declare a int := charge_card(1)", False),
        ("show create table t", True),
        ("select * into copy from t", False),
        ("select nextval('s')", False),
        ("explain analyze insert into t values (1)", False),
        ("select 1; drop table t", False),
        ("replace into t values (1)", False),
        ("select replace(name, 'a', 'b') from t", True),
        ("update t set a = 1", False),
        ("BEGIN IMMEDIATE", False),
        ("BEGIN", True),
        ("savepoint a", True),
        ("PRAGMA foreign_keys = ON", True),
        ("pragma main.user_version", True),
        ("pragma main.user_version = 7", False),
        ("pragma wal_checkpoint(truncate)", False),
        ("set global x = 1", False),
        ("vacuum", False),
        ("copy t from stdin", False),
        ("", True),
    ],
)
def test_statements_that_only_read_are_told_by_their_words(sql: str, expected: bool) -> None:
    assert is_read_only(sql) is expected


def test_a_refused_statement_is_named_without_the_values_in_it() -> None:
    sql = """insert into "users" values ('o''neil@example.com', "b@example.com", 4711,
        $$secret$$)"""
    assert without_values(sql) == 'insert into "users" values (?, ?, ?, ?)'


@given(st.text(max_size=60), st.sampled_from(["insert into t values (1)", "delete from t", "drop table t"]))
def test_no_statement_in_front_hides_one_that_writes(front: str, write: str) -> None:
    quotes = "'\"`[/$-"
    front = "".join(letter for letter in front if letter not in quotes)
    assert not is_read_only(f"{front}; {write}")


# --- the report and the setting -------------------------------------------------------------------------------------


def test_the_report_is_bounded(guard: EffectGuard) -> None:
    for number in range(MAX_KINDS + 50):
        with pytest.raises(EffectRefused):
            guard.of(ROUTE).refuse(Effect.CONNECT, f"10.0.0.{number}:80")
    refusals = guard.refusals()
    assert len(refusals) == MAX_KINDS + 1
    assert guard.refused == sum(each.count for each in refusals) == MAX_KINDS + 50
    assert (refusals[0].route, refusals[0].count) == (OTHER, 50)
    with pytest.raises(EffectRefused) as raised:
        guard.of(ROUTE).refuse(Effect.CONNECT, "x" * 5000)
    assert len(raised.value.what) == 200


@pytest.mark.parametrize("entry", ["host", "host:0", "host:70000", "::1:80", "unix:relative", "file:x", "a b:1", ":1"])
def test_an_entry_that_is_none_is_refused_with_its_name(entry: str) -> None:
    with pytest.raises(ConfigError, match="shadow_allow") as raised:
        parse_allowed([entry])
    assert repr(entry) in str(raised.value)
