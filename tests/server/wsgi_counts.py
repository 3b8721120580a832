"""What must be true of the WSGI engine's private books: at any moment, while handlers are held, and afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jumpstart_server.wsgi import pace
from jumpstart_server.wsgi.connection import Connection
from jumpstart_server.wsgi.pool import PoolThread, ThreadPool
from jumpstart_server.wsgi.server import WSGIServer
from tests.server.raw_http import Client, until
from tests.server.wsgi_lab import Gate, Lab

LONG = 30.0  # seconds; a busy machine may be slow, a lost wake-up never gets there


def check_pool(pool: ThreadPool) -> None:
    """Holds at any moment."""
    with pool._lock:
        threads = list(pool._threads.values())
        busy = sum(thread.busy for thread in threads)
        counts = (pool._seeking, pool._polling, pool._busy, len(pool._parked))
        assert min(counts) >= 0, counts
        assert pool._busy == busy, (counts, busy)
        assert sum(counts) == len(threads), (counts, len(threads))
        assert len(threads) <= pool.size
        assert pool._peak >= busy


def check_idle_pool(pool: ThreadPool) -> None:
    """Comes true when nothing is left to do."""

    def is_idle() -> bool:
        check_pool(pool)
        with pool._lock:
            return not (
                pool._seeking or pool._busy or pool._events or pool._saturated or pool.crowded or pool._polling < 1
            )

    until(is_idle, LONG)
    assert not pool.jobs()


def check_idle(server: WSGIServer) -> None:
    """Comes true when no request is in flight: nothing is busy or waits, and every connection lies where it should."""
    until(lambda: not (server.stats().busy or server.stats().waiting), LONG)
    check_idle_pool(server.pool)
    until(lambda: server._idle == server._all, LONG)
    until(lambda: len(server._timers) == len(server._all), LONG)
    for connection in list(server._all.values()):
        assert connection.queued_at == 0.0 and not connection.parsed


class Guard:
    """
    Watches all connections: who closes twice, sends on a closed one, or works on one that another thread owns.

    Attributes:
        faults: what was seen.
        checks: how often it has looked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faults: list[str] = []
        self.checks = 0
        self._owners: dict[Connection, int] = {}
        self._closed: set[int] = set()
        for name in ("_read", "_run", "_take", "_answer", "_linger", "_enqueue"):
            monkeypatch.setattr(WSGIServer, name, self._owned(name, getattr(WSGIServer, name)))
        for name in ("send", "_send_rest", "send_file"):
            monkeypatch.setattr(Connection, name, self._open(name, getattr(Connection, name)))
        close = Connection.close

        def close_once(connection: Connection) -> None:
            if connection.sock.fileno() < 0:
                self.faults.append(f"closed twice: {connection.fd}")
            if self._owners.get(connection, threading.get_ident()) != threading.get_ident():
                self.faults.append(f"closed by another than its owner: {connection.fd}")
            close(connection)

        monkeypatch.setattr(Connection, "close", close_once)

    def _owned(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        owners = self._owners

        def wrapper(server: WSGIServer, *args: Any, **words: Any) -> Any:
            connection = next(arg for arg in args if isinstance(arg, Connection))
            me = threading.get_ident()
            owner = owners.get(connection)
            if owner not in (None, me):
                self.faults.append(f"{name} of {connection.fd} by two threads")
            owners[connection] = me
            self.checks += 1
            if name == "_enqueue":
                del owners[connection]  # a thread may take it before we return
                return method(server, *args, **words)
            try:
                return method(server, *args, **words)
            finally:
                # The outermost one lets go; a connection that was queued inside is another thread's by now.
                if owner is None and owners.get(connection) == me:
                    del owners[connection]

        return wrapper

    def _open(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(connection: Connection, *args: Any) -> Any:
            self.checks += 1
            if connection.sock.fileno() != connection.fd or connection.server._all.get(connection.fd) is not connection:
                self.faults.append(f"{name} on {connection.fd}, which is closed")
            return method(connection, *args)

        return wrapper


def switch_often(monkeypatch: pytest.MonkeyPatch, interval_s: float = 1e-5) -> None:
    """Let the interpreter switch threads nearly everywhere, as long as a server runs."""
    monkeypatch.setattr(pace, "LONG", interval_s)
    monkeypatch.setattr(pace, "SHORT", interval_s)


def names_of(pool: ThreadPool) -> list[str]:
    """Of its threads."""
    return [
        thread.name
        for thread in threading.enumerate()
        if isinstance(thread, PoolThread) and thread._pool is pool and thread.runs_handlers
    ]


def hold_all(lab: Lab, gate: Gate, count: int) -> list[Client]:
    """Have *count* handlers wait at *gate*."""
    path = lab.app(gate)
    before = gate.entered
    clients = [lab.connect() for _ in range(count)]
    for client in clients:
        client.get(path)
    until(lambda: gate.entered == before + count, LONG)
    return clients


def finish(clients: Iterable[Client]) -> None:
    for client in clients:
        with client:
            client.sock.settimeout(LONG)
            assert client.response().status == 200


def wait_for_waiting(lab: Lab, count: int) -> None:
    until(lambda: lab.server.stats().waiting == count, LONG)
