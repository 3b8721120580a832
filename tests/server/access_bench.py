"""A server of either engine with an access log, and what that holds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jumpstart_server.access import AccessLog
from jumpstart_server.connection_settings import ConnectionSettings
from jumpstart_server.forwarded import TrustedProxies
from tests.server.asgi_lab import Lab as ASGILab
from tests.server.http_cases import TIGHT
from tests.server.lab import ECHO, HELLO, BaseLab
from tests.server.raw_http import until
from tests.server.wsgi_lab import Lab as WSGILab

TIGHT_AND_HASTY = ConnectionSettings(
    limits=TIGHT, header_timeout=0.4, body_timeout=0.4, write_timeout=0.4, proxies=TrustedProxies("10.0.0.1")
)


class Bench:
    """A server with an access log, and what that holds."""

    def __init__(self, lab: BaseLab, path: Path) -> None:
        self.lab = lab
        self._path = path
        self._taken = 0

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def line(self) -> dict[str, Any]:
        """The one line that is new, waited for."""
        until(lambda: len(self.lines) > self._taken)
        lines = self.lines[self._taken :]
        self._taken += len(lines)
        assert len(lines) == 1
        return lines[0]

    def settle(self) -> None:
        """Wait until nothing runs, and see that no line has come."""
        until(lambda: not self.lab.connections and not self.lab.busy)
        assert self.lines[self._taken :] == []


@contextlib.contextmanager
def make_bench(engine: str, folder: Path, **more: Any) -> Iterator[Bench]:
    """*more*: as of the engine's own laboratory."""
    path = folder / "access.log"
    access = AccessLog(str(path), "json")
    lab: BaseLab
    if engine == "asgi":
        lab = ASGILab(settings=TIGHT_AND_HASTY, access=access, **more)
    else:
        lab = WSGILab(TIGHT_AND_HASTY, access=access, stream_bodies=engine == "wsgi-streamed", **more)
    with lab:
        lab.serve(HELLO, "/")
        lab.serve(ECHO, "/echo")
        yield Bench(lab, path)
    assert access.lost == 0
    access.close()


def summary(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["method"], line["path"], line["status"], line["bytes"]
