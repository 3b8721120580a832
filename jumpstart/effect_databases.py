"""
Watch points of the effect guard in drivers of databases.

Their statements go out by code in C, over files and connections that were opened before, so that no audit sees them.
Statements are read by their words (`jumpstart/statements.py`). What a driver does with an error in the middle is
minded: a connection that is refused may not cost its pool a place.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jumpstart.context import current
from jumpstart.errors import EffectRefused
from jumpstart.guard import Effect, Guard
from jumpstart.watching import Method, before, guard_of_request, replace


def _check_sql(sql: Any) -> None:
    request = current()
    if request is not None and request.guard is not None:
        request.guard.check_sql(sql)


def _watch_sqlite3(module: ModuleType) -> None:
    """Its classes cannot be changed; so connections become ones of subclasses, which bear the same names."""

    class Statements:
        def execute(self, sql: Any, *args: Any) -> Any:
            _check_sql(sql)
            return super().execute(sql, *args)  # type: ignore[misc]  # mixed in, in front of sqlite3's

        def executemany(self, sql: Any, *args: Any) -> Any:
            _check_sql(sql)
            return super().executemany(sql, *args)  # type: ignore[misc]

        def executescript(self, sql: Any) -> Any:
            _check_sql(sql)
            return super().executescript(sql)  # type: ignore[misc]

    class Cursor(Statements):
        pass

    class Connection(Statements):
        def cursor(self, factory: Any = module.Cursor) -> Any:
            return super().cursor(watched(factory))  # type: ignore[misc]

        def backup(self, *args: Any, **kwargs: Any) -> Any:
            if (guard := guard_of_request()) is not None:
                guard.refuse(Effect.SQL, "(a backup into another database)")
            return super().backup(*args, **kwargs)  # type: ignore[misc]

        def deserialize(self, *args: Any, **kwargs: Any) -> Any:
            if (guard := guard_of_request()) is not None:
                guard.refuse(Effect.SQL, "(another content of the whole database)")
            return super().deserialize(*args, **kwargs)  # type: ignore[misc]

        def blobopen(self, *args: Any, **kwargs: Any) -> Any:
            if (guard := guard_of_request()) is not None and not kwargs.get("readonly"):
                guard.refuse(Effect.SQL, "(a blob that is open for writing)")
            return super().blobopen(*args, **kwargs)  # type: ignore[misc]

    @functools.lru_cache(maxsize=64)
    def watched(kind: Any) -> Any:
        if not isinstance(kind, type) or issubclass(kind, Statements):
            return kind
        mixin = Connection if issubclass(kind, module.Connection) else Cursor
        namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        return type(kind.__name__, (mixin, kind), namespace)

    def make(original: Method) -> Method:
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 4:  # timeout, detect_types, isolation_level, check_same_thread, factory
                args = (*args[:4], watched(args[4]), *args[5:])
            else:
                kwargs["factory"] = watched(kwargs.get("factory", module.Connection))
            return original(database, *args, **kwargs)

        return connect

    replace(module, "connect", make)
    module.dbapi2.connect = module.connect


def _watch_sqlalchemy(module: ModuleType) -> None:
    event = sys.modules["sqlalchemy.event"]

    def before(connection: Any, cursor: Any, statement: Any, *args: Any) -> None:
        _check_sql(statement)

    event.listen(module.Engine, "before_cursor_execute", before)


def _watch_django(module: ModuleType) -> None:
    def execute(guard: Guard, cursor: Any, sql: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_sql(sql)

    def callproc(guard: Guard, cursor: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_sql(f"call {name}")

    replace(module.CursorWrapper, "_execute_with_wrappers", before(execute))
    replace(module.CursorWrapper, "callproc", before(callproc))


def _watch_aiosqlite(module: ModuleType) -> None:
    """Each connection has a thread, which works for whoever comes: the job brings the request along."""

    def execute(original: Method) -> Method:
        async def method(connection: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            if guard_of_request() is None:
                return await original(connection, function, *args, **kwargs)
            return await original(connection, contextvars.copy_context().run, function, *args, **kwargs)

        return method

    def connect(original: Method) -> Method:
        async def method(connection: Any) -> Any:
            if guard_of_request() is not None:
                connection._connector = functools.partial(contextvars.copy_context().run, connection._connector)
            return await original(connection)

        return method

    replace(module.Connection, "_execute", execute)
    replace(module.Connection, "_connect", connect)


def _text_of(sql: Any) -> Any:
    """A statement as text, where it is put together of parts."""
    as_string = getattr(sql, "as_string", None)
    return sql if as_string is None else as_string(None)


def _check_postgres(guard: Guard, parameters: dict[str, Any]) -> None:
    """Where libpq, which is no Python, is about to connect to."""
    hosts = str(parameters.get("hostaddr") or parameters.get("host") or "/var/run/postgresql").split(",")
    ports = str(parameters.get("port") or "5432").split(",")
    for number, host in enumerate(hosts):
        port = ports[min(number, len(ports) - 1)] or "5432"
        if host.startswith(("/", "@")):
            guard.check_socket(f"{host}/.s.PGSQL.{port}")
        else:
            guard.check_address(host, int(port))


def _watch_psycopg(module: ModuleType) -> None:
    def connect(guard: Guard, conninfo: str, *args: Any, **kwargs: Any) -> None:
        given = sys.modules["psycopg.conninfo"].conninfo_to_dict(conninfo)
        defaults = {
            option.keyword.decode(): option.val.decode()
            for option in sys.modules["psycopg.pq"].Conninfo.get_defaults()
            if option.val is not None
        }
        _check_postgres(guard, {**defaults, **given})

    replace(module, "connect", before(connect))


def _watch_psycopg_cursors(module: ModuleType) -> None:
    def check(guard: Guard, cursor: Any, query: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_sql(_text_of(query))

    kind = module.Cursor if hasattr(module, "Cursor") else module.AsyncCursor
    for name in ("execute", "executemany", "stream", "copy"):
        replace(kind, name, before(check))


def _watch_psycopg2(module: ModuleType) -> None:
    """Where it connects to. Its cursors are C's: their statements are not seen."""

    def connect(guard: Guard, dsn: Any, *args: Any, **kwargs: Any) -> None:
        _check_postgres(guard, sys.modules["psycopg2.extensions"].parse_dsn(dsn))

    replace(module, "_connect", before(connect))


def _watch_asyncpg(module: ModuleType) -> None:
    def check(guard: Guard, connection: Any, query: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_sql(query)

    def copy(guard: Guard, connection: Any, table: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_sql(f"copy {table}")

    for name in ("execute", "_get_statement", "_copy_in"):
        replace(module.Connection, name, before(check))
    replace(module.Connection, "copy_records_to_table", before(copy))


def _watch_asyncpg_statements(module: ModuleType) -> None:
    """Prepared by a real request, and kept."""

    def check(guard: Guard, statement: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_sql(statement.get_query())

    for name in ("fetch", "fetchval", "fetchrow", "fetchmany", "executemany", "cursor"):
        if hasattr(module.PreparedStatement, name):
            replace(module.PreparedStatement, name, before(check))


def _watch_asyncpg_pools(module: ModuleType) -> None:
    """It takes a place back for an `Exception` only."""

    def make(original: Method) -> Method:
        async def acquire(holder: Any) -> Any:
            try:
                return await original(holder)
            except EffectRefused:
                holder._pool._queue.put_nowait(holder)
                raise

        return acquire

    replace(module.PoolConnectionHolder, "acquire", make)


def _watch_pymysql(module: ModuleType) -> None:
    def check(guard: Guard, connection: Any, sql: Any, *args: Any, **kwargs: Any) -> None:
        guard.check_sql(sql)

    replace(module.Connection, "query", before(check))


LIBRARIES: dict[str, Callable[[ModuleType], None]] = {
    "sqlite3": _watch_sqlite3,
    "sqlalchemy.engine": _watch_sqlalchemy,
    "django.db.backends.utils": _watch_django,
    "aiosqlite.core": _watch_aiosqlite,
    "psycopg.generators": _watch_psycopg,
    "psycopg.cursor": _watch_psycopg_cursors,
    "psycopg.cursor_async": _watch_psycopg_cursors,
    "psycopg2": _watch_psycopg2,
    "asyncpg.connection": _watch_asyncpg,
    "asyncpg.prepared_stmt": _watch_asyncpg_statements,
    "asyncpg.pool": _watch_asyncpg_pools,
    "pymysql.connections": _watch_pymysql,
}
"""Module → what to do with it when it has been imported."""
