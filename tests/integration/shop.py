"""The example shop for tests: its back end, copies of it, a visit to all of its pages, and what was cold in one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.integration.server import ROOT, Server

SHOP = ROOT / "examples" / "shop"
WARM_TOML = SHOP / "warm.toml"
TWINS = ("shop.web:app", "shop.flask_web:app")
LRU = ("--lru-cache", "shop.catalog:*")
COOKIE = {"Cookie": "cart=3x2.7x1"}

PAGES = (
    "/",
    "/products",
    "/products/7",
    "/search?q=habour+lamp+under+45.00",
    "/cart",
    "/invoice/2024-00017",
    "/invoice/2024-00017?format=mail",
    "/report",
    "/export.csv",
    "/export.csv?format=zip",
    "/about",
    "/api/prices/us",
    "/chat?n=3&delay_ms=1",
    "/healthz",
)


@contextlib.contextmanager
def running_backend() -> Iterator[str]:
    """The shop's back end on a free port; yields HOST:PORT for ``SHOP_BACKEND``."""
    command = [sys.executable, str(SHOP / "backend.py"), "--port", "0", "--watch-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
            process.stdin.close()
            process.wait(10)
        finally:
            process.kill()


def copy_of_shop(folder: Path) -> Path:
    """Copy the app to *folder*, which must not exist, as a deployment would: sources only."""
    shutil.copytree(SHOP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def visit(server: Server, pages: Sequence[str] = PAGES) -> None:
    """Ask for each page once, on a connection of its own."""
    for page in pages:
        response = server.get(page, headers=COOKIE)
        assert response.status_code == 200, f"{page}: {response.status_code}\n{response.text[:500]}"


def cold_events(server: Server) -> list[str]:
    """Names of all cold events in requests so far; as many as were counted, or the test fails."""
    status = server.status()
    names = [f"{route}: {name}" for route, stats in status["routes"].items() for name in stats["cold_names"]]
    assert bool(names) == bool(status["cold_events"])
    return names


def boot_report(server: Server) -> dict[str, Any]:
    """The JSON of ``/boot``, of the first tenant."""
    document: dict[str, Any] = server.admin("/boot").json()["tenants"][0]
    return document


def sections(server: Server) -> dict[str, dict[str, Any]]:
    """The sections of the boot report by recorder."""
    return {section["recorder"]: section for section in boot_report(server)["sections"]}


def reasons(server: Server) -> set[str]:
    """Reason codes of the files and sections that this boot did not use."""
    return {refusal["reason"] for refusal in server.status()["refusals"]}


def warnings(server: Server) -> list[str]:
    """Lines of the log at WARNING and above."""
    return [line for line in server.stderr.splitlines() if "[WARNING]" in line or "[ERROR]" in line]
