"""
What SQL statements do, as far as their words tell: for the effect guard. Pure.

A statement is read by its words, since nobody here speaks every dialect. What is in doubt is taken for one that writes:
a shadow request that is refused costs some warmth, a row that is written twice costs somebody's order.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence

# Comments, strings, quoted names. Whether a backslash escapes a quote depends on the database.
_OTHER_NOISE = r"--[^\n]*|/\*.*?\*/|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|\$(\w*)\$.*?\$\1\$"
_NOISE = re.compile(rf"'(?:[^']|'')*'|{_OTHER_NOISE}", re.DOTALL)
_NOISE_WITH_ESCAPES = re.compile(rf"'(?:[^'\\]|''|\\.)*'|{_OTHER_NOISE}", re.DOTALL)
_RUN_COMMENT = "/*!"  # MySQL runs what is in it
_WORD = re.compile(r"[a-z_]\w*|[=(]")
_LITERAL = re.compile(
    r"'(?:[^'\\]|''|\\.)*(?:'|$)|\"(?:[^\"]|\"\")*(?:\"|$)|\$(\w*)\$.*?\$\1\$|(?<![\w.$:])\d[\w.]*", re.DOTALL
)
_QUOTED_NAME = re.compile(r"\"[\w.$-]*\"")


def _set_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READS = _set_of("""
    select with values table explain use set savepoint release rollback commit end
    pragma reset fetch declare close discard unlisten deallocate begin start
    """)
_WRITES = _set_of("""
    insert update delete merge into create drop alter truncate call exec execute global persist password nextval setval
    pg_notify pg_terminate_backend pg_cancel_backend pg_logical_emit_message get_lock load_extension
    lo_import lo_export lo_create lo_creat lo_unlink lo_put lo_from_bytea
    """)
_WRITING_FRONTS = ("pg_advisory_lock", "pg_advisory_xact", "pg_try_advisory", "dblink")
_LOCKS = frozenset((("for", "share"), ("for", "key"), ("for", "no"), ("lock", "in")))  # rows that others may want
# BEGIN may open a block of a procedural language; BEGIN IMMEDIATE and EXCLUSIVE lock what others write to.
_TRANSACTIONS = _set_of("""
    begin start transaction tran work deferred concurrent isolation level read only write committed uncommitted
    repeatable serializable not deferrable with consistent snapshot
    """)
_PRAGMAS_THAT_WRITE = _set_of("""
    user_version application_id auto_vacuum encoding page_size schema_version writable_schema default_cache_size
    """)
_PRAGMAS_THAT_DO = _set_of("incremental_vacuum optimize wal_checkpoint")


@functools.lru_cache(maxsize=512)
def is_read_only(sql: str) -> bool:
    """
    Whether *sql*, one statement or several, changes and locks nothing in a database, as far as its words tell.

    A function that it calls may do anything; of those only well-known ones are recognised. When in doubt, False.
    """
    lowered = sql.lower()
    if _RUN_COMMENT in lowered:
        return False
    noises = (_NOISE, _NOISE_WITH_ESCAPES) if "\\" in lowered else (_NOISE,)
    return all(_reads(_WORD.findall(part)) for noise in noises for part in noise.sub(" ", lowered).split(";"))


def _reads(words: Sequence[str]) -> bool:
    while words and words[0] == "(":
        words = words[1:]
    if not words:
        return True
    first = words[0]
    if first in ("show", "describe", "desc"):
        return True
    if first not in _READS:
        return False
    if first == "pragma":
        name = next((word for word in reversed(words[1:4]) if word in _PRAGMAS_THAT_WRITE | _PRAGMAS_THAT_DO), "")
        return not name or (name in _PRAGMAS_THAT_WRITE and not {"=", "("} & set(words))
    if first in ("begin", "start"):
        return _TRANSACTIONS.issuperset(words)
    if first == "declare" and "cursor" not in words:
        return False
    return not (
        any(word in _WRITES or word.startswith(_WRITING_FRONTS) for word in words)
        or not _LOCKS.isdisjoint(itertools.pairwise(words))
    )


def without_values(sql: str) -> str:
    """*sql* in one line, with ``?`` for strings and numbers: it goes into logs, and they may be somebody's."""
    line = " ".join(sql.split())
    return _LITERAL.sub(lambda found: found[0] if _QUOTED_NAME.fullmatch(found[0]) else "?", line)
