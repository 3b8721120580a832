"""
The shape of a response: a digest that tells whether an app still answers alike, and nothing of what it answered.

A shape is made of the status, the media type, the place of a redirect without its values, and the body's structure:

- JSON: the names of an object's fields with the kinds of their values (null, boolean, number, text), recursively. An
  array is the set of its elements' shapes, however many there are. Names that look like values (ids, dates) are one.
- HTML: the set of tags, each with the set of tags that stand directly in it: a list of ten products has the shape of
  one of three.
- all else: whether there is anything.

Bodies are read up to `MAX_BODY` bytes; of a longer one, and of a stream that goes on, only status, type and that it is
long count; of one that is compressed, also how. Pure.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from jumpstart_warmup.routes import normalise_path

MAX_BODY = 256 * 1024  # bytes that are looked at
MAX_DEPTH = 50  # of JSON or HTML; what lies deeper does not count
VOID = frozenset(  # HTML has no end of them
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
)
OPTIONAL_END = frozenset(("dd", "dt", "li", "option", "p", "td", "th", "tr"))  # the next one of them ends it

Headers = list[tuple[str, str]]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a process answered a golden request.

    Attributes:
        name: of the request: ``GET /cart``.
        weight: how often real traffic asked for it.
        status, shape: 0 and "" when there was no whole answer.
        elapsed_s: seconds until the app was done with it.
        cold_events: how many there were in it.
    """

    name: str
    weight: int = 1
    status: int = 0
    shape: str = ""
    elapsed_s: float = 0.0
    cold_events: int = 0


def shape_of(status: int, headers: Headers, body: bytes, *, is_whole: bool = True) -> str:
    """
    Return the shape as 32 hexadecimal digits.

    Args:
        body: as the app sent it, in the identity encoding; its first `MAX_BODY` bytes will do.
        is_whole: whether that is all of it.
    """
    kind = coding = location = ""
    for name, value in headers:
        if name.lower() == "content-type":
            kind = value.partition(";")[0].strip().lower()
        elif name.lower() == "content-encoding" and value.strip().lower() != "identity":
            coding = value.strip().lower()
        elif name.lower() == "location":
            location = normalise_path(urlsplit(value).path)
    structure = _structure(kind, body) if is_whole and len(body) <= MAX_BODY else "long"
    if coding and body:  # such bytes differ where the content does not, by the time in a header of gzip's, say
        structure = ["coded", coding]
    words = msgspec.json.encode([status, kind, location, structure])
    return hashlib.sha256(words).hexdigest()[:32]


def _structure(kind: str, body: bytes) -> Any:
    if not body:
        return "empty"
    try:
        if kind == "application/json" or kind.endswith("+json"):
            return ["json", _json_shape(msgspec.json.decode(body), MAX_DEPTH)]
        if kind in ("text/html", "application/xhtml+xml"):
            return ["html", _html_shape(body.decode("utf-8", "replace"))]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "malformed"
    return "some"


def _json_shape(value: Any, depth: int) -> Any:
    if depth == 0:
        return "…"
    if isinstance(value, dict):
        fields: dict[str, set[str]] = {}
        for name, inner in value.items():
            known = normalise_path("/" + name.replace("/", ""))[1:]
            fields.setdefault(known, set()).add(_words(_json_shape(inner, depth - 1)))
        return {"object": [[name, sorted(shapes)] for name, shapes in sorted(fields.items())]}
    if isinstance(value, list):
        return {"array": sorted({_words(_json_shape(inner, depth - 1)) for inner in value})}
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "text"


def _words(shape: Any) -> str:
    return msgspec.json.encode(shape).decode()


@functools.cache
def _html_reader() -> Callable[[str], set[str]]:
    """Made at the first use: what an app imports lazily should not be there for our sake."""
    from html.parser import HTMLParser

    class Tags(HTMLParser):
        """Collects which tag stands in which."""

        def __init__(self) -> None:
            super().__init__()
            self.pairs: set[str] = set()
            self._open: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in OPTIONAL_END and self._open[-1:] == [tag]:
                self._open.pop()
            self.pairs.add(f"{self._open[-1] if self._open else ''}>{tag}")
            if tag not in VOID and len(self._open) < MAX_DEPTH:
                self._open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag in self._open:
                while self._open.pop() != tag:
                    pass

    def read(text: str) -> set[str]:
        tags = Tags()
        tags.feed(text)
        tags.close()
        return tags.pairs

    return read


def _html_shape(text: str) -> list[str]:
    return sorted(_html_reader()(text))
