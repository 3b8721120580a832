"""
The file of ``--env-file``: ``NAME=VALUE`` lines, for the app's processes and for our own options.

    # a comment                      export is allowed, as in a file that shells read too
    export DEBUG=1
    GREETING = hello there           # from a blank and a hash on it is a comment
    SINGLE = 'as it stands, \n too'
    DOUBLE = "one\ntwo \"quoted\""   # backslashes as in C; may go on over several lines, as single quotes may
    WHERE = ${HOME}/data             # left as it stands: there is no substitution
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from jumpstart.errors import ConfigError

_NAME = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=[ \t]*", re.ASCII)
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_REST = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|$)")
_BARE = re.compile(r"[^\n]*")
_COMMENT = re.compile(r"(?:^|[ \t])#.*")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\n": ""}


def parse_env_file(text: str, place: str) -> dict[str, str]:
    """
    Return the variables of *text*; of two with one name the last counts.

    Args:
        place: names the file in errors.

    Raises:
        ConfigError: a line is none of these; the message names it by its number.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        end = text.find("\n", position)
        line = text[position : end if end >= 0 else len(text)]
        if not line.strip() or line.lstrip().startswith("#"):
            position += len(line) + 1
            continue
        position += len(line) - len(line.lstrip())
        number = text.count("\n", 0, position) + 1
        begun = _NAME.match(text, position)
        if begun is None:
            raise ConfigError(f"{place}, line {number}: write NAME=VALUE")
        name = begun.group(1)
        value, position = _value(text, begun.end(), f"{place}, line {number}: {name}")
        if "\0" in value:
            raise ConfigError(f"{place}, line {number}: {name}: holds a NUL, which no variable can")
        found[name] = value
    return found


def _value(text: str, position: int, place: str) -> tuple[str, int]:
    """The value that begins at *position*, and where the next line does."""
    quote = text[position : position + 1]
    if quote not in ("'", '"') or not quote:
        bare = _BARE.match(text, position)
        assert bare is not None  # it matches nothing, too
        return _COMMENT.sub("", bare.group()).strip(), bare.end() + 1
    quoted = (_SINGLE if quote == "'" else _DOUBLE).match(text, position)
    if quoted is None:
        raise ConfigError(f"{place}: its {quote} is never closed")
    rest = _REST.match(text, quoted.end())
    if rest is None:
        raise ConfigError(f"{place}: something follows its closing {quote}; quote the whole value")
    value = quoted.group(1)
    if quote == '"':
        value = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found.group(1), found.group(1)), value, flags=re.DOTALL)
    return value, rest.end()


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set *variables* for this process and for those that it starts."""
    os.environ.update(variables)
