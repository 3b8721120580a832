"""
YAML with comments, written from plain values. Pure.

Texts are written as JSON has them, which YAML reads as they are; so nothing here is taken for a number or a date by
accident. There is no dependency: a library would write the values, and not the comments.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INDENT = 2
WIDTH = 118
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True)
class Noted:
    """A value with a comment: behind it where it is one line, else above."""

    value: Any
    comment: str


def to_yaml(value: Any, *, head: str = "") -> str:
    """
    One document.

    Args:
        value: of dicts with text keys, lists, texts, numbers, True, False and None; each may be `Noted`.
        head: comment above it.
    """
    return "\n".join([*_comment(head, ""), *_lines(value, 0)]) + "\n"


def plain(value: Any) -> Any:
    """The value without its comments: what a reader of the document gets."""
    if isinstance(value, Noted):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value


def _lines(value: Any, depth: int) -> Iterator[str]:
    pad = " " * depth
    if isinstance(value, Noted):
        yield from _comment(value.comment, pad)
        yield from _lines(value.value, depth)
    elif isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _entry(f"{pad}{_key(key)}:", each, depth)
    elif _is_list(value) and value:
        for each in value:
            yield from _item(each, depth)
    else:
        yield pad + _scalar(value)


def _entry(start: str, value: Any, depth: int) -> Iterator[str]:
    pad = " " * depth
    comment = value.comment if isinstance(value, Noted) else ""
    inner = value.value if isinstance(value, Noted) else value
    if (isinstance(inner, Mapping) or _is_list(inner)) and inner:
        yield from _comment(comment, pad)
        yield start
        yield from _lines(inner, depth + INDENT)
        return
    line = f"{start} {_scalar(inner)}"
    if comment.strip() and comment.isprintable() and len(line) + len(comment) + 4 <= WIDTH:
        yield f"{line}  # {comment}"
    else:
        yield from _comment(comment, pad)
        yield line


def _item(value: Any, depth: int) -> Iterator[str]:
    pad = " " * depth
    if isinstance(value, Noted):
        yield from _comment(value.comment, pad)
        value = value.value
    if (isinstance(value, Mapping) or _is_list(value)) and value:
        first, *rest = _lines(value, depth + INDENT)
        if first.lstrip().startswith("#"):
            yield f"{pad}-"
            yield first
        else:
            yield f"{pad}- {first.lstrip()}"
        yield from rest
    else:
        yield f"{pad}- {_scalar(value)}"


def _comment(text: str, pad: str) -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(line, WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) and key.lower() not in _WORDS else _scalar(key)


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if _is_list(value):
        return "[]"
    return _UNPRINTABLE.sub(_escape, json.dumps(value, ensure_ascii=False))


def _escape(match: re.Match[str]) -> str:
    """YAML takes printable characters only, and names others as JSON does, or by eight digits."""
    char = match[0]
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"
