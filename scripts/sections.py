"""
What each section of a profile gains: the same boot with all of it, without one section, and with none.

Two kinds of boot. *Without replay* the first users meet what the recorders alone have made warm: the times of their
requests and the cold events in them tell what a section is for. *With replay*, the default, warm-up requests make up
for a section that is not there, before the port opens: the time to ready and the processor's time tell what it saves.

Boots take turns, and figures are medians. The table is Markdown, on standard output; docs/profile.md has one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jumpstart_warmup.corpus import WarmRequest, read_requests
from scripts._boots import JUMPSTART, ROOT, SHOP, Interrupts, ask, environment, run, running_backend, serving

REQUESTS = SHOP / "warm.toml"
COLD, WHOLE = "nothing: cold", "whole profile"
BYTECODE = "bytecode"


@dataclass(frozen=True)
class App:
    """What is booted; *env* beside the shop's."""

    target: str
    folder: Path
    requests: Path
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """
    One boot, seen from outside.

    Attributes:
        ready_s: from the command to the open port.
        first_ms: the first request of each route, summed.
        cold_events: in these, by the server's own count.
        cpu_s: of all its processes, from start to end.
    """

    ready_s: float
    first_ms: float
    cold_events: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/sections", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="boots of each kind (5)")
    parser.add_argument("--app", choices=["starlette", "flask", "django"], action="append", help="all by default")
    options = parser.parse_args()
    interrupts = Interrupts()
    interrupts.install()
    for name in options.app or ("starlette", "flask", "django"):
        with tempfile.TemporaryDirectory(prefix="js") as folder, running_backend(interrupts) as backend:
            print("\n".join(measure(name, Path(folder), backend, options.rounds, interrupts)), flush=True)


def measure(name: str, folder: Path, backend: str, rounds: int, interrupts: Interrupts) -> Iterator[str]:
    """The lines of the table of one app."""
    home, compiled = folder / "home", folder / "compiled"
    env = environment(home, backend, compiled)
    app = _app(name, folder, env)
    env = {**env, **app.env}
    profile = folder / "app.jumpstart"
    words = (app.target, "--app-dir", app.folder, *app.options)
    run([JUMPSTART, "build", *words, "--requests", app.requests, "-o", profile], interrupts, env)
    with zipfile.ZipFile(profile) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    sections = {each["recorder"]: each["size"] for each in manifest["sections"]}
    requests = read_requests(app.requests)
    kinds = [COLD, WHOLE, *(each for each in sections if each not in (BYTECODE, "corpus"))]
    found: dict[tuple[str, str], list[Figures]] = {}
    for _ in range(rounds):
        for mode in ("--no-replay", "--replay"):
            for kind in kinds:
                figures = boot(words, profile, kind, mode, requests, interrupts, env, folder)
                found.setdefault((mode, kind), []).append(figures)
        for kind in (WHOLE, BYTECODE):  # where nothing is compiled: a fresh container
            with tempfile.TemporaryDirectory(prefix="js") as empty:
                bare = {**env, "PYTHONPYCACHEPREFIX": empty, "PYTHONDONTWRITEBYTECODE": "1"}
                figures = boot(words, profile, kind, "--replay", requests, interrupts, bare, folder)
            found.setdefault(("bare", kind), []).append(figures)
    yield f"\n**{name}**: {app.target}, {len(requests)} requests, medians of {rounds}\n"
    yield "| boot | KiB, inflated | first requests, ms | cold events in them | ready, s | CPU, s |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for kind in kinds:
        plain, replayed = found["--no-replay", kind], found["--replay", kind]
        size = f"{sections[kind] / 1024:,.0f}" if kind in sections else ""
        label = f"without `{kind}`" if kind in sections else kind
        yield (
            f"| {label} | {size} | {_median(plain, 'first_ms'):.0f} | {_median(plain, 'cold_events'):.0f} "
            f"| {_median(replayed, 'ready_s'):.2f} | {_median(replayed, 'cpu_s'):.2f} |"
        )
    for kind, label in ((WHOLE, "whole profile, nothing compiled"), (BYTECODE, "the same without `bytecode`")):
        size = f"{sections[kind] / 1024:,.0f}" if kind in sections else ""
        bare_boots = found["bare", kind]
        yield f"| {label} | {size} | | | {_median(bare_boots, 'ready_s'):.2f} | {_median(bare_boots, 'cpu_s'):.2f} |"


def _app(name: str, folder: Path, env: Mapping[str, str]) -> App:
    if name in ("starlette", "flask"):
        target = "shop.web:app" if name == "starlette" else "shop.flask_web:app"
        return App(target, SHOP, REQUESTS, ("--lru-cache", "shop.catalog:*"))
    # The Django site with its admin that the tests serve.
    site = ROOT / "tests" / "apps" / "django_app"
    database = folder / "site.sqlite3"
    subprocess.run([sys.executable, site / "prepare.py", database], env=env, check=True)
    requests = folder / "django.toml"
    paths = ("/", "/admin/login/?next=/admin/")
    requests.write_text("".join(f'[[request]]\npath = "{path}"\n' for path in paths))
    return App("project.wsgi:application", site, requests, env={"DJANGO_DB": str(database)})


def boot(
    words: Sequence[str | Path],
    profile: Path,
    kind: str,
    mode: str,
    requests: Sequence[WarmRequest],
    interrupts: Interrupts,
    env: Mapping[str, str],
    folder: Path,
) -> Figures:
    """Boot once, be the first user of each route, and stop it."""
    options: list[str | Path] = [*words, "--no-warm-start", mode]
    if kind != COLD:
        options += ["--profile", profile]
    if kind not in (COLD, WHOLE):
        options += ["--disable-recorder", kind]
    with children() as spent:
        with serving(options, interrupts, env, folder / "admin") as server:
            first_ms = sum(ask(server.port, request) for request in requests)
            status = server.status_after(len(requests))
    return Figures(server.ready_s, first_ms, status["cold_events"], spent[0])


@contextmanager
def children() -> Iterator[list[float]]:
    """CPU seconds of the children that end within the block, theirs included; in a list, at its end."""
    before = os.times()
    spent: list[float] = []
    yield spent
    after = os.times()
    spent.append(after.children_user + after.children_system - before.children_user - before.children_system)


def _median(boots: Sequence[Figures], key: str) -> float:
    return statistics.median(getattr(each, key) for each in boots)


if __name__ == "__main__":
    main()
