"""What must not be left behind by the WSGI engine's own errors, slow trailers, and many uploads that stand still."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.wsgi import body as body_module
from jumpstart_server.wsgi import connection as connection_module
from jumpstart_server.wsgi import deadlines as deadlines_module
from jumpstart_server.wsgi import listeners as listeners_module
from jumpstart_server.wsgi import server as server_module
from jumpstart_server.wsgi.body import LEAST_SPOOL_BYTES, SPOOL_BYTES, Spool, Spools
from jumpstart_server.wsgi.connection import Connection
from jumpstart_server.wsgi.server import WSGIServer
from tests.server.raw_http import until
from tests.server.wsgi_counts import LONG, check_idle, switch_often
from tests.server.wsgi_lab import Environ, Lab, StartResponse, answer, echo

POST = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_26_trailers_have_the_time_of_a_head_however_often_a_byte_comes(streamed: bool) -> None:
    settings = ConnectionSettings(header_timeout=0.5, body_timeout=20)
    with Lab(settings, echo, stream_bodies=streamed) as lab, lab.connect() as client:
        client.send(POST % b"/" + b"X-Slow: ")
        client.sock.setblocking(False)
        began = time.monotonic()
        data = b""
        while not data:
            assert time.monotonic() < began + LONG
            client.send(b"a")
            time.sleep(0.05)
            try:
                data = client.sock.recv(65536)
            except BlockingIOError:
                pass
        assert data.startswith(b"HTTP/1.1 408 ")
        assert 0.4 < time.monotonic() - began < 5
        client.sock.close()
        with lab.connect() as other:
            other.send(POST % b"/" + b"X-Quick: a\r\n\r\n")
            assert other.response().body == b"hello"
        until(lambda: not lab.connections)
        check_idle(lab.server)


def test_spools_go_to_files_sooner_when_they_are_many() -> None:
    spools = Spools(limit=1024 * 1024)
    bodies = [Spool(spools) for _ in range(100)]
    for _ in range(SPOOL_BYTES // 8192):
        for body in bodies:
            body.write(b"x" * 8192)
    assert spools.held <= 1024 * 1024 + 100 * (LEAST_SPOOL_BYTES + 8192)
    assert sum(not body.is_file for body in bodies) < 100
    for body in bodies:
        body.seek(0)
        assert len(body.read()) == SPOOL_BYTES
        body.close()
        body.close()
    assert spools.held == 0
    one = Spool(spools)
    one.write(b"x" * SPOOL_BYTES)
    assert not one.is_file and spools.held == SPOOL_BYTES
    one.write(b"x")
    assert one.is_file and spools.held == 0
    one.close()


@pytest.mark.slow
def test_103_uploads_that_stand_still_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "SPOOLS_BYTES", 0)
    with Lab(app=echo) as lab, ExitStack() as stack:
        lab.server.spools.limit = 1_000_000
        clients = [stack.enter_context(lab.connect()) for _ in range(20)]
        for client in clients:
            client.get("/", "Content-Length: 300001", method="POST")
            client.send(bytes(300_000))
        until(lambda: sum(connection.length for connection in lab.server._all.values()) == 20 * 300_000, LONG)
        assert 0 < lab.server.spools.held <= 1_000_000 + 20 * 65536
        for client in clients:
            client.send(b"x")
            assert client.response().body == bytes(300_000) + b"x"
        until(lambda: lab.server.spools.held == 0, LONG)  # a client may have its answer before the handler has ended
        check_idle(lab.server)


@pytest.mark.slow
def test_38_a_connection_is_closed_when_the_server_itself_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose request waited; and the thread is replaced."""
    take = WSGIServer._take
    with Lab(threads=2) as lab:
        lab.app(answer(), "/")

        def fail(server: WSGIServer, thread: object, connection: object, events: list[object], data: bytes) -> bool:
            if b"/fail" in data:
                raise ZeroDivisionError
            return take(server, thread, connection, events, data)  # type: ignore[arg-type]

        monkeypatch.setattr(WSGIServer, "_take", fail)
        for number in range(1, 4):
            with lab.connect() as client:
                client.get("/fail")
                with pytest.raises(ConnectionResetError):
                    client.response()
            until(lambda: not lab.connections)
            assert lab.server.stats().refused == {"internal_error": number}
            assert lab.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").status == 200
        check_idle(lab.server)
    assert caplog.text.count("it is replaced") == 3


@pytest.mark.slow
def test_a_lack_of_descriptors_is_one_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners_module, "ACCEPT_PAUSE", 0.01)
    lack = OSError(24, "Too many open files")
    with Lab() as lab:
        lab.app(answer(), "/")
        listeners = lab.server._listeners

        class Empty:
            tries = 0

            def accept(self) -> socket.socket:
                self.tries += 1
                raise lack

        real, empty = dict(listeners._sockets), Empty()
        for fd in real:
            listeners._sockets[fd] = empty  # type: ignore[assignment]
        with lab.connect() as client:
            client.get("/")
            until(lambda: empty.tries > 5, LONG)
            assert caplog.text.count("cannot accept connections") == 1
            listeners._complained_at -= 60
            tries = empty.tries
            until(lambda: empty.tries > tries, LONG)
            until(lambda: caplog.text.count("cannot accept connections") == 2, LONG)
            listeners._sockets.update(real)
            assert client.response().status == 200
    assert "failed 1 times" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("over", ["tcp", "unix"])
@pytest.mark.parametrize("kind", ["list", "iterable", "queued"])
def test_a_client_that_has_closed_its_sending_side_is_answered(kind: str, over: str, tmp_path: Path) -> None:
    """RFC 9112 9.6 allows it; ``nc -N`` does it. It looks like one that has left, until one writes to it."""
    with Lab(threads=1, uds=tmp_path / "socket" if over == "unix" else None) as lab:

        def slow(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            time.sleep(1.0)
            body = answer()(environ, start_response)
            return body if kind != "iterable" else iter(body)

        path = lab.app(slow)
        with ExitStack() as stack:
            clients = [stack.enter_context(lab.connect()) for _ in range(2 if kind == "queued" else 1)]
            for client in clients:
                client.get(path)
                client.end()
            for client in clients:
                while (response := client.response()).status == 100:
                    pass
                assert (response.status, response.body) == (200, b"hello\n")
        until(lambda: not lab.connections)
        check_idle(lab.server)


@pytest.mark.slow
def test_a_probe_never_gets_into_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper sends it while the handler may begin to answer at any moment."""
    monkeypatch.setattr(connection_module, "DISCONNECT_GRACE", 0.0)
    monkeypatch.setattr(deadlines_module, "LOOK", 0.001)
    monkeypatch.setattr(server_module, "SWEEP", 0.001)
    switch_often(monkeypatch)
    probe, probes = Connection.probe, [0]

    def count(connection: Connection) -> bool:
        probes[0] += 1
        return probe(connection)

    monkeypatch.setattr(Connection, "probe", count)
    with Lab(threads=8) as lab:
        choose = random.Random(1)

        def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            time.sleep(choose.random() * 0.02)
            return answer(environ["QUERY_STRING"].encode())(environ, start_response)

        path = lab.app(app)
        for number in range(40):
            with ExitStack() as stack:
                clients = [stack.enter_context(lab.connect()) for _ in range(8)]
                for client in clients:
                    client.get(f"{path}?{number}")
                    client.end()
                for client in clients:
                    head, _, body = client.rest().rpartition(b"\r\n\r\n")
                    assert body == b"%d" % number
                    interim, _, last = head.rpartition(b"HTTP/1.1 200 OK")
                    assert interim in (b"", b"HTTP/1.1 100 Continue\r\n\r\n") and b"HTTP/" not in last
        assert probes[0] > 50
        until(lambda: not lab.connections)
        check_idle(lab.server)
