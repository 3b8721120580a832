"""
The access log: a line for each request that ended, however it ended, in gunicorn's format or as JSON.

The engines make an `AccessRecord` of a request and give it to `AccessLog.write`. A format is compiled once: into a
template and the functions that fill it.

The status is the outcome for whoever reads the log: 499 where the client left before the answer was complete, 500 where
the app failed, also where the head with another status had gone out by then.

Bytes of a client never end a line or look like its end: in a text, all but printable ASCII, the quote and the backslash
become ``\\xNN``, as nginx writes them; JSON has escapes of its own, and is ASCII too.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from jumpstart.errors import ConfigError
from jumpstart_server.logfile import STDOUT, LogFile, cannot_open

logger = logging.getLogger(__name__)

COMBINED = '%(h)s %(l)s %(u)s %(t)s "%(r)s" %(s)s %(b)s "%(f)s" "%(a)s"'  # gunicorn's default
NAMED = {"combined": COMBINED}
JSON = "json"
WARN_INTERVAL = 60.0  # seconds between two warnings about lines that were lost
CUTS = (512, 128, 32)  # bytes that are left of a client's values where a line is too long for its pipe

Field = tuple[bytes, bytes]


class AccessRecord(msgspec.Struct, kw_only=True, gc=False):
    """
    One request that has ended. Times are in seconds.

    Attributes:
        client: the host, without a port; empty where there is none, as behind a Unix socket.
        method: as it came; ``-`` where no request line was understood, and so is *target*.
        target: the request target as it came, still percent-encoded.
        http_version: ``1.0`` or ``1.1``.
        sent: bytes of the body that went out, without those of a transfer coding.
        total_s: from the request's head to the end of the response.
        queue_s: of these, while the request waited for a thread, or for its turn in the event loop.
        app_s: of these, in the app.
        request_headers: names in lower case.
        response_headers: of the app, in any case.
        environ: for ``%({name}e)s``; WSGI only.
    """

    client: str = ""
    method: str = "-"
    target: bytes = b"-"
    http_version: str = "1.1"
    status: int
    sent: int = 0
    total_s: float = 0.0
    queue_s: float = 0.0
    app_s: float = 0.0
    request_headers: Iterable[Field] = ()
    response_headers: Iterable[Field] = ()
    environ: Mapping[str, Any] | None = None


Getter = Callable[[AccessRecord], object]
Format = Callable[[AccessRecord], bytes]


class AccessLog:
    """
    Writes records to a file or to standard output. Every method may be called from any thread.

    Attributes:
        lost: lines that could not be written.
    """

    def __init__(
        self,
        path: str,
        logformat: str = "combined",
        *,
        tenant: str = "",
        must_open: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """
        Open *path*; ``-`` is standard output. Make it in the process that writes, since lines may name its pid.

        Args:
            must_open: if not, a file that cannot be opened costs its lines only, until it is reopened.

        Raises:
            ConfigError: the format is none, or the file cannot be opened.
        """
        self.lost = 0
        self._format = compile_format(logformat, tenant=tenant, pid=os.getpid(), wall_clock_ns=wall_clock_ns)
        self._clock = clock
        self._warning = threading.Lock()
        self._next_warning = float("-inf")
        self._unsaid = 0
        try:
            self._file = LogFile(path, STDOUT, must_open=must_open)
        except (OSError, ValueError) as error:
            raise ConfigError(cannot_open("--access-logfile", path, error)) from None

    def write(self, record: AccessRecord) -> None:
        """Write the line of *record*, by one call of the system. Never raises: what cannot be written is lost."""
        try:
            line = self._format(record)
            limit = self._file.whole_bytes
            if limit and len(line) > limit:
                line = self._shortened(record, limit)
            self._file.write(line)
        except Exception as error:  # whatever it is, no request is worth less than its line
            self._lose(error)

    def reopen(self) -> None:
        """
        Go on in a new file of the same name, after the old one was moved away.

        Raises:
            OSError: it cannot be opened; the old one is used on.
        """
        self._file.reopen()

    def close(self) -> None:
        """Let the file go. Later lines are lost."""
        self._file.close()

    def _shortened(self, record: AccessRecord, limit: int) -> bytes:
        """The line with the client's values cut: a pipe mixes longer ones with those of other processes."""
        line = b""
        for cut in CUTS:
            line = self._format(
                msgspec.structs.replace(
                    record,
                    target=_cut(record.target, cut),
                    request_headers=[(name, _cut(value, cut)) for name, value in record.request_headers],
                    response_headers=[(name, _cut(value, cut)) for name, value in record.response_headers],
                )
            )
            if len(line) <= limit:
                break
        return line

    def _lose(self, error: Exception) -> None:
        with self._warning:
            self.lost += 1
            self._unsaid += 1
            now = self._clock()
            if now < self._next_warning:
                return
            self._next_warning = now + WARN_INTERVAL
            unsaid, self._unsaid = self._unsaid, 0
        if isinstance(error, OSError):
            logger.warning("access log %s: %s; lines lost: %d", self._file.path, error, unsaid)
        else:
            logger.warning("access log %s: lines lost: %d", self._file.path, unsaid, exc_info=error)


def _cut(value: bytes, size: int) -> bytes:
    return value if len(value) <= size else value[:size] + b"..."


# ---------------------------------------------------------------------- formats


def compile_format(
    text: str,
    *,
    option: str = "--access-logformat",
    tenant: str = "",
    pid: int = 0,
    wall_clock_ns: Callable[[], int] = time.time_ns,
) -> Format:
    """
    Return the function that makes a line, with its end, of a record.

    Args:
        text: ``combined``, ``json``, or a text with gunicorn's atoms.
        option: where *text* was read, for messages.

    Raises:
        ConfigError: an atom that is unknown, or a text without any.
    """
    if text == JSON:
        return _json_format(tenant, pid, wall_clock_ns)
    return _text_format(NAMED.get(text, text), option, pid, wall_clock_ns)


ATOM = re.compile(r"%(?:\((?P<name>[^()]*)\)(?P<width>-?\d*)[sd]|(?P<percent>%))")
_SAFE = bytes(byte for byte in range(0x20, 0x7F) if byte not in b'"\\')
_ESCAPES = [chr(byte) if byte in _SAFE else f"\\x{byte:02X}" for byte in range(256)]
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _text_format(text: str, option: str, pid: int, wall_clock_ns: Callable[[], int]) -> Format:
    atoms: dict[str, Getter] = {**_ATOMS, "t": _Clock(wall_clock_ns).clf}
    constants = {"l": "-", "p": f"<{pid}>"}  # as gunicorn writes them
    template: list[str] = []
    getters: list[Getter] = []
    end = 0
    for match in ATOM.finditer(text):
        template.append(_literal(text[end : match.start()], option))
        end = match.end()
        name = match["name"]
        if name is None:
            template.append("%%")
        elif name in constants:
            template.append(f"%{match['width']}s" % constants[name])
        else:
            template.append(f"%{match['width']}s")
            getters.append(atoms.get(name) or _named(name, option))
    template.append(_literal(text[end:], option))
    if len(template) == 1:
        raise ConfigError(f"{option}: {text!r} is not allowed; write combined, json, or a text with atoms: {COMBINED}")
    line = "".join(template) + "\n"

    def make(record: AccessRecord) -> bytes:
        return (line % tuple([getter(record) for getter in getters])).encode("utf-8", "backslashreplace")

    return make


def _literal(text: str, option: str) -> str:
    if "%" in text:
        raise ConfigError(f"{option}: {text[text.index('%') :]!r}: after a % stands (ATOM)s; a % itself is written %%")
    if "\n" in text or "\r" in text:
        raise ConfigError(f"{option}: a line end has no place in it; each request is one line")
    return text


def _named(atom: str, option: str) -> Getter:
    """The function for ``{name}i``, ``{name}o`` or ``{name}e``."""
    name, kind = atom[1:-2].lower(), atom[-1:]
    if not (atom.startswith("{") and atom[-2:-1] == "}" and name and kind in "ioe"):
        allowed = ", ".join([*"hlut", *(each for each in _ATOMS if each not in "hu"), "p", "{header}i", "{header}o"])
        raise ConfigError(f"{option}: unknown atom %({atom})s; allowed are {allowed} and {{variable}}e")
    if kind == "i":
        wanted = name.encode()
        return lambda record: _field(record.request_headers, wanted)
    if kind == "o":
        wanted = name.encode()
        return lambda record: _response_field(record.response_headers, wanted)
    return lambda record: _variable(record.environ, name)


def _escape(value: bytes) -> str:
    if value.translate(None, _SAFE):
        return "".join([_ESCAPES[byte] for byte in value])
    return value.decode("ascii")


def _escape_text(value: str) -> str:
    if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return value
    return _escape(value.encode("utf-8", "surrogatepass"))


def _find(fields: Iterable[Field], wanted: bytes) -> bytes | None:
    """The value of a field whose name is given in lower case; of several, all, joined."""
    found: bytes | None = None
    for name, value in fields:
        if name == wanted:
            found = value if found is None else b"%b, %b" % (found, value)
    return found


def _field(fields: Iterable[Field], wanted: bytes) -> str:
    value = _find(fields, wanted)
    return _escape(value) if value else "-"


def _response_field(fields: Iterable[Field], wanted: bytes) -> str:
    return _field([(name.lower(), value) for name, value in fields], wanted)


def _variable(environ: Mapping[str, Any] | None, name: str) -> str:
    if environ is None:
        return "-"
    value = environ.get(name.upper(), environ.get(name))
    return "-" if value is None or value == "" else _escape_text(str(value))


def _request_line(record: AccessRecord) -> str:
    if record.method == "-":
        return "-"
    return f"{_escape_text(record.method)} {_escape(record.target)} HTTP/{record.http_version}"


def _split(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a target; of one with scheme and host too."""
    path, _, query = target.partition(b"?")
    if path[:1] != b"/" and b"://" in path:
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return path, query


def _user(record: AccessRecord) -> bytes:
    """The name that basic authentication gives; nobody has checked it."""
    kind, _, credentials = (_find(record.request_headers, b"authorization") or b"").partition(b" ")
    if kind.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[0]
    except (binascii.Error, ValueError):
        return b""


def _user_text(record: AccessRecord) -> str:
    # A space would move what follows: this value is not quoted in the common format.
    return _escape(_user(record)).replace(" ", "\\x20") or "-"


_ATOMS: dict[str, Getter] = {
    "h": lambda record: _escape_text(record.client) or "-",
    "u": _user_text,
    "r": _request_line,
    "m": lambda record: _escape_text(record.method),
    "U": lambda record: _escape(_split(record.target)[0]),
    "q": lambda record: _escape(_split(record.target)[1]),
    "H": lambda record: "-" if record.method == "-" else f"HTTP/{record.http_version}",
    "s": lambda record: record.status,
    "B": lambda record: record.sent,
    "b": lambda record: record.sent or "-",
    "f": lambda record: _field(record.request_headers, b"referer"),
    "a": lambda record: _field(record.request_headers, b"user-agent"),
    "T": lambda record: int(record.total_s),
    "D": lambda record: int(record.total_s * 1_000_000),
    "M": lambda record: int(record.total_s * 1000),
    "L": lambda record: f"{record.total_s:.6f}",
}


class _Clock:
    """The date and time as text, made once a second. Threads may make it at once; it is the same then."""

    def __init__(self, wall_clock_ns: Callable[[], int]) -> None:
        self._now_ns = wall_clock_ns
        self._clf = (-1, "")
        self._rfc = (-1, "")

    def clf(self, record: AccessRecord) -> str:
        """In the common log format, in local time. Not by strftime, whose names of months are the locale's."""
        second = self._now_ns() // 1_000_000_000
        known = self._clf
        if known[0] != second:
            now = datetime.fromtimestamp(second, UTC).astimezone()
            known = self._clf = second, f"[{now:%d}/{MONTHS[now.month - 1]}/{now:%Y:%H:%M:%S %z}]"
        return known[1]

    def rfc3339(self) -> str:
        """In UTC, with milliseconds."""
        now_ns = self._now_ns()
        second = now_ns // 1_000_000_000
        known = self._rfc
        if known[0] != second:
            known = self._rfc = second, f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
        return f"{known[1]}.{now_ns // 1_000_000 % 1000:03d}Z"


class _Entry(msgspec.Struct, omit_defaults=True, gc=False):
    """A line of JSON. What has a default is left out when it is that."""

    time: str
    client: str | None
    method: str | None
    path: str | None
    query: str | None
    protocol: str | None
    status: int
    bytes: int
    duration_ms: float
    queue_ms: float
    app_ms: float
    user_agent: str | None
    referer: str | None
    pid: int
    tenant: str
    request_id: str = ""


def _json_format(tenant: str, pid: int, wall_clock_ns: Callable[[], int]) -> Format:
    now = _Clock(wall_clock_ns).rfc3339
    encode = msgspec.json.Encoder().encode

    def make(record: AccessRecord) -> bytes:
        user_agent = referer = request_id = None
        for name, value in record.request_headers:
            if name == b"user-agent":
                user_agent = _decode(value)
            elif name == b"referer":
                referer = _decode(value)
            elif name == b"x-request-id":
                request_id = _decode(value)
        is_request = record.method != "-"
        path, query = _split(record.target) if is_request else (b"", b"")
        entry = _Entry(
            now(),
            _valid(record.client) or None,
            _valid(record.method) if is_request else None,
            _decode(path) if is_request else None,
            _decode(query) if is_request else None,
            f"HTTP/{record.http_version}" if is_request else None,
            record.status,
            record.sent,
            round(record.total_s * 1000, 3),
            round(record.queue_s * 1000, 3),
            round(record.app_s * 1000, 3),
            user_agent,
            referer,
            pid,
            tenant,
            request_id or "",
        )
        line = encode(entry)
        if not line.isascii() or b"\x7f" in line:
            # Some of what is no ASCII ends lines for some readers, or speaks to terminals.
            line = json.dumps(msgspec.to_builtins(entry), separators=(",", ":")).replace("\x7f", "\\u007f").encode()
        return line + b"\n"

    return make


def _decode(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _valid(value: str) -> str:
    """*value* without what UTF-8 cannot hold."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
