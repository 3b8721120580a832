"""Connections that an ASGI worker cannot serve: no TLS, no descriptors, copies in children that the app has forked."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import time
from pathlib import Path

import pytest

from tests.integration.server import Serve, Server, wait_until, write_app
from tests.server.raw_http import Client, make_certificate

HELLO = """
    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello"})
"""


def connect(server: Server, tls: bool = False) -> Client:
    sock = socket.create_connection(("127.0.0.1", server.port), 10)
    if tls:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    return Client(sock)


def test_26_135_handshakes_have_their_time_and_what_is_no_tls_is_refused(serve: Serve, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "hello", HELLO)
    certificate, key = make_certificate(tmp_path)
    log = tmp_path / "access.log"
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--header-timeout", "1")
    with serve("hello:app", *options, "--access-logfile", str(log), app_dir=folder) as server:
        with connect(server) as silent, connect(server) as plain:
            began = time.monotonic()
            plain.get("/")
            assert plain.is_closed()
            assert silent.is_closed() and 0.5 < time.monotonic() - began < 4
        with connect(server, tls=True) as client:
            client.get("/")
            assert client.response().body == b"hello"
            client.sock.shutdown(socket.SHUT_WR)
        server.wait_for_line(r"refused client=.* no TLS: HTTP_REQUEST")
        server.wait_for_line(r"refused client=.* 408 the TLS handshake was not done in time")
        wait_until(lambda: len(log.read_text().splitlines()) == 3)
        assert sorted(re.findall(r'" (\d{3}) ', log.read_text())) == ["200", "400", "408"]
        assert "Traceback" not in server.stderr and "eof_received" not in server.stderr


def test_without_descriptors_connections_wait(serve: Serve, tmp_path: Path) -> None:
    """None of them is reset, and one line says what is wrong."""
    limit = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    """
    folder = write_app(tmp_path / "app", "hello", limit + HELLO)
    with serve("hello:app", "--fork", "never", app_dir=folder) as server:
        clients = [connect(server) for _ in range(80)]
        try:
            server.wait_for_line("cannot accept connections: .*Too many open files")
            for client in clients[:20]:
                client.sock.close()
            for client in clients[20:]:
                client.get("/", "Connection: close")
            for client in clients[20:]:
                assert client.response().body == b"hello"
        finally:
            for client in clients:
                client.sock.close()
        assert server.stderr.count("cannot accept connections") == 1


FORKS = """
    import asyncio, os, sys, time

    async def answer(send, body, *headers):
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})

    def fork_in_thread():
        return os.fork()

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/hello":
            await answer(send, b"hello")
            return
        if path == "/thread":
            pid = await asyncio.to_thread(fork_in_thread)
        elif path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            pid = os.fork()
            await send({"type": "http.response.body", "body": b"two"})
            os.waitpid(pid, 0)
            return
        else:
            pid = os.fork()
        if pid == 0:
            if path == "/exit":
                sys.exit(7)
            if path == "/await":
                await asyncio.sleep(60)
            if path == "/stays":
                time.sleep(60)
                os._exit(0)
            if path == "/return":
                return
            await answer(send, b"child")
        if path == "/stays":
            await answer(send, str(pid).encode(), (b"connection", b"close"))
        else:
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                await asyncio.sleep(0.01)
            await answer(send, b"parent")
"""


@pytest.fixture
def forking(serve: Serve, tmp_path: Path) -> Server:
    return serve("forking:app", "--timeout", "20", app_dir=write_app(tmp_path / "app", "forking", FORKS))


def test_a_child_of_a_handler_never_answers_and_holds_no_client(forking: Server) -> None:
    with forking as server:
        for path in ("/return", "/exit", "/answers", "/await", "/thread"):
            with connect(server) as client:
                client.get(path)
                assert client.response().body == b"parent", path
                client.get("/hello")  # on the same connection: nothing of a child's is in between
                assert client.response().body == b"hello", path
        with connect(server) as client:
            client.get("/stream")
            assert client.response().body == b"onetwo"
        with connect(server) as client:
            began = time.monotonic()
            client.get("/stays")
            pid = int(client.response().body)
            assert client.is_closed() and time.monotonic() - began < 4
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: pid not in server.processes() or None, why="the child is gone")
        assert server.get("/hello").text == "hello"
