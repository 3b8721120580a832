"""
The effect guard in drivers of databases that speak in C, in threads of their own, or past every audit.

No database is needed: what is refused is refused before anything is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from jumpstart import EffectRefused
from jumpstart.context import RequestContext, request_context
from jumpstart.guard import EffectGuard

INSERT = "insert into orders values (1, 'somebody')"
SHOWN = "insert into orders values (?, ?)"
CLOSED_PORT = 9
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@pytest.fixture
def guard() -> EffectGuard:
    return EffectGuard(folders=[])


@contextlib.contextmanager
def guarded(guard: EffectGuard) -> Iterator[None]:
    with request_context(RequestContext(warmup=True, guard=guard.of("GET /shop"))):
        yield


def refused(guard: EffectGuard, call: Callable[[], object]) -> tuple[str, str]:
    with guarded(guard), pytest.raises(EffectRefused) as raised:
        call()
    return raised.value.effect, raised.value.what


async def refused_late(guard: EffectGuard, call: Callable[[], Any]) -> tuple[str, str]:
    with guarded(guard), pytest.raises(EffectRefused) as raised:
        await call()
    return raised.value.effect, raised.value.what


def test_psycopg_neither_connects_nor_inserts(guard: EffectGuard) -> None:
    psycopg = pytest.importorskip("psycopg")
    address = f"host=127.0.0.1 port={CLOSED_PORT}"
    assert refused(guard, lambda: psycopg.connect(address)) == ("connect", f"127.0.0.1:{CLOSED_PORT}")
    assert refused(guard, lambda: psycopg.connect("host=/run/db"))[1] == "unix:/run/db/.s.PGSQL.5432"
    with guarded(EffectGuard([f"127.0.0.1:{CLOSED_PORT}"])), pytest.raises(psycopg.OperationalError):
        psycopg.connect(address)  # allowed, and nobody is there
    composed = psycopg.sql.SQL("insert into {} values (1)").format(psycopg.sql.Identifier("orders"))
    for kind in (psycopg.Cursor, psycopg.AsyncCursor):  # in place of a cursor there is nothing: it is not reached
        assert refused(guard, partial(kind.execute, None, INSERT)) == ("sql", SHOWN)
        assert refused(guard, partial(kind.executemany, None, composed, []))[0] == "sql"
        assert refused(guard, partial(kind.copy, None, "copy orders from stdin"))[0] == "sql"


@LOOPS
def test_asyncpg_inserts_nothing_and_its_pool_keeps_its_places(
    guard: EffectGuard, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    asyncpg = pytest.importorskip("asyncpg")

    async def main() -> None:
        where = {"host": "127.0.0.1", "port": CLOSED_PORT, "user": "me", "database": "shop"}
        assert await refused_late(guard, lambda: asyncpg.connect(**where)) == ("connect", f"127.0.0.1:{CLOSED_PORT}")
        pool = await asyncpg.create_pool(**where, min_size=0, max_size=1)
        for _ in range(2):  # one place: were it lost, the second would wait for ever
            assert (await asyncio.wait_for(refused_late(guard, lambda: pool.fetch("select 1")), 10))[0] == "connect"
        with pytest.raises(OSError):
            await asyncio.wait_for(pool.fetch("select 1"), 10)
        pool.terminate()
        kind = asyncpg.Connection
        assert refused(guard, partial(kind.execute, None, INSERT)) == ("sql", SHOWN)
        assert refused(guard, partial(kind._get_statement, None, INSERT, None))[0] == "sql"
        assert refused(guard, partial(kind.copy_records_to_table, None, "orders", records=[])) == ("sql", "copy orders")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@LOOPS
def test_aiosqlite_takes_no_row_from_a_shadow_request_and_serves_the_next_real_one(
    guard: EffectGuard, tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Each of its connections has a thread, which works for whoever comes."""
    aiosqlite = pytest.importorskip("aiosqlite")

    async def main() -> None:
        async with aiosqlite.connect(tmp_path / "shop.db") as real:
            await real.execute("create table orders (id integer, who text)")
            assert await refused_late(guard, lambda: real.execute(INSERT)) == ("sql", SHOWN)
            with guarded(guard):  # a connection of its own, whose thread begins here
                async with aiosqlite.connect(tmp_path / "shop.db") as own:
                    assert await (await own.execute("select count(*) from orders")).fetchone() == (0,)
                with pytest.raises(EffectRefused):
                    await aiosqlite.connect(tmp_path / "new.db")
            await real.execute(INSERT)
            await real.commit()
            assert await (await real.execute("select count(*) from orders")).fetchone() == (1,)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert not (tmp_path / "new.db").exists()


def test_pymysql_inserts_nothing(guard: EffectGuard) -> None:
    pymysql = pytest.importorskip("pymysql")
    connection = pymysql.connect(host="127.0.0.1", port=CLOSED_PORT, defer_connect=True)
    assert refused(guard, lambda: connection.query(INSERT)) == ("sql", SHOWN)
    assert refused(guard, lambda: connection.query(b"delete from orders"))[0] == "sql"
    assert refused(guard, connection.connect)[0] == "connect"
