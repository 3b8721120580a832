"""The environ of PEP 3333, from a parsed head. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from jumpstart_server.http1 import RequestHead

Environ = dict[str, Any]

NAMES = 1024  # remembered at most
_keys: dict[bytes, str] = {
    b"content-type": "CONTENT_TYPE",
    b"content-length": "",  # of the body that we hand over, which the caller knows
    b"transfer-encoding": "",  # undone by us; apps that see it undo it again (Bottle)
    b"proxy": "",  # HTTP_PROXY is the address of an outgoing proxy to many libraries (httpoxy, CVE-2016-5385)
}


def fill(environ: Environ, head: RequestHead) -> None:
    """
    Add what the request says to a copy of its connection's environ.

    Path bytes pass undamaged: percent-decoded, then as Latin-1. Fields that came more than once are joined. The length
    and the input are the caller's.
    """
    raw_path = head.path  # a percent sign is looked for as a number, which is five times as fast
    path = raw_path.decode("latin-1") if 0x25 not in raw_path else unquote_to_bytes(raw_path).decode("latin-1")
    environ["REQUEST_METHOD"] = head.method
    environ["PATH_INFO"] = path
    environ["QUERY_STRING"] = head.query.decode("latin-1")
    environ["RAW_URI"] = environ["REQUEST_URI"] = head.target.decode("latin-1")
    environ["SERVER_PROTOCOL"] = "HTTP/1.1" if head.http_version == "1.1" else "HTTP/1.0"
    for name, value in head.headers:
        key = _keys.get(name)
        if key is None:
            key = _learn(name)
        if not key:
            continue
        text = value.decode("latin-1")
        if key in environ:
            text = f"{environ[key]}{'; ' if key == 'HTTP_COOKIE' else ','}{text}"
        environ[key] = text


def _learn(name: bytes) -> str:
    key = "HTTP_" + name.decode("latin-1").upper().replace("-", "_")
    if len(_keys) < NAMES and len(name) < 256:
        _keys[name] = key
    return key
