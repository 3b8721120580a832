"""
Cold boots against warm ones: what the first twenty seconds of a server give, beside other servers.

Apps that others wrote, Django's admin and Datasette, and the example shop on Flask. Two workers each. Four users ask
all pages in turns, from the start of the command on, 25 times a second each, or as soon as they have their answer; who
finds no open port tries again. That is a load which a warm server bears with ease: what is lost is lost to the boot.

    ready           seconds from the command to the first answer
    first 100       p99 of the first hundred requests over the p99 of the steady ones
    capacity lost   1 − answers in the first 20 s / (20 s × the steady rate), as in "HHVM Jump-Start" (CGO 2021)

Servers take turns, and figures are medians. The tables are Markdown, on standard output; docs/benchmarks.md has them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import environment
from benchmarks.figures import percentile
from benchmarks.processes import Failure, Process, free_port, interruptible
from benchmarks.servers import APPS

SHOP = environment.ROOT / "examples" / "shop"
DJANGO = environment.ROOT / "tests" / "apps" / "django_app"
WINDOW_S, STEADY_S = 20.0, 6.0  # from the command's start; after that
USERS = 4
PACE_S = 0.04  # of each user: seconds between two requests at least
FIRST = 100  # requests
SLOW_S = 60.0


@dataclass(frozen=True)
class App:
    """What is served; *pages* are asked in turns."""

    title: str
    target: str
    folder: Path
    interface: str
    pages: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Boot:
    ready_s: float
    first_over_steady: float
    lost: float
    rate: float


Command = Callable[[App, int, Path], list[str]]


def program(name: str) -> str:
    return str(environment.programs() / name)


def jumpstart(*options: str) -> Command:
    def command(app: App, port: int, profile: Path) -> list[str]:
        chosen = [word.format(profile=profile) for word in options]
        words = ["serve", app.target, "--app-dir", str(app.folder), "-w", "2", "-b", f"127.0.0.1:{port}"]
        return [program("jumpstart"), *words, "--no-warm-start", "--admin", "off", *chosen]

    return command


def gunicorn(app: App, port: int, profile: Path) -> list[str]:
    words = (
        "--preload",
        "-k",
        "gthread",
        "--threads",
        "8",
        "-w",
        "2",
        "-b",
        f"127.0.0.1:{port}",
        "--log-level",
        "error",
    )
    return [program("gunicorn"), *words, "--no-control-socket", app.target]


def uvicorn(app: App, port: int, profile: Path) -> list[str]:
    words = ("--host", "127.0.0.1", "--port", str(port), "--workers", "2", "--no-access-log", "--log-level", "error")
    return [program("uvicorn"), *words, app.target]


def granian(app: App, port: int, profile: Path) -> list[str]:
    threads = ("--blocking-threads", "8") if app.interface == "wsgi" else ()
    words = ("--interface", app.interface, "--host", "127.0.0.1", "--port", str(port), "--workers", "2", *threads)
    return [program("granian"), *words, "--log-level", "error", app.target]


def servers(app: App) -> dict[str, Command]:
    other = {"gunicorn --preload": gunicorn} if app.interface == "wsgi" else {"uvicorn": uvicorn}
    warm = {"jumpstart, from a profile": jumpstart("--profile", "{profile}", "--lru-cache", "shop.catalog:*")}
    return {**warm, "jumpstart, cold": jumpstart("--no-replay"), **other, "granian": granian}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/cold", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="boots of each kind (3)")
    parser.add_argument("--app", choices=["shop", "django", "datasette"], action="append", help="all by default")
    options = parser.parse_args(arguments)
    if not environment.inside():
        environment.prepare()
        os.chdir(environment.ROOT)
        os.execv(environment.PYTHON, [str(environment.PYTHON), "-m", "benchmarks.cold", *arguments])
    with interruptible(), tempfile.TemporaryDirectory(prefix="cold-") as folder:
        for name in options.app or ("shop", "django", "datasette"):
            with prepared(name, Path(folder)) as app:
                print("\n".join(measure(app, Path(folder), options.rounds)), flush=True)
    return 0


@contextlib.contextmanager
def prepared(name: str, folder: Path) -> Iterator[App]:
    """The app *name*, with what it needs."""
    if name == "datasette":
        database = folder / "figures.db"
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("CREATE TABLE city (name TEXT, people INTEGER)")
            connection.executemany("INSERT INTO city VALUES (?, ?)", [(f"city {n}", n * n) for n in range(500)])
        pages: tuple[str, ...] = (
            "/",
            "/figures",
            "/figures/city",
            "/figures/city.json",
            "/figures/city/7",
            "/-/versions.json",
        )
        yield App("Datasette", "datasette_app:app", APPS, "asgi", pages, {"BENCH_DB": str(database)})
    elif name == "django":
        database = folder / "site.sqlite3"
        subprocess.run([sys.executable, DJANGO / "prepare.py", database], check=True, timeout=SLOW_S)
        pages = ("/", "/admin/login/?next=/admin/")
        yield App(
            "Django and its admin's log-in",
            "project.wsgi:application",
            DJANGO,
            "wsgi",
            pages,
            {"DJANGO_DB": str(database)},
        )
    else:
        port = free_port()
        command = [sys.executable, str(SHOP / "backend.py"), "--port", str(port), "--latency-ms", "20"]
        pages = (
            "/",
            "/products",
            "/products/7",
            "/search?q=lamp",
            "/report",
            "/export.csv",
            "/about",
            "/api/prices/eu",
        )
        with Process(command, dict(os.environ), SHOP):
            env = {"SHOP_BACKEND": f"127.0.0.1:{port}"}
            yield App("The example shop on Flask", "shop.flask_web:app", SHOP, "wsgi", pages, env)


def measure(app: App, folder: Path, rounds: int) -> Iterator[str]:
    """The lines of the table of one app."""
    compiled = folder / "compiled"
    env = {**os.environ, **app.env, "PYTHONPATH": str(app.folder), "JUMPSTART_HOME": str(folder / "home")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PYTHONPYCACHEPREFIX"] = str(compiled)
    profile, requests = folder / "app.jumpstart", folder / "warm.toml"
    requests.write_text("".join(f'[[request]]\npath = "{page}"\n' for page in app.pages))
    words = ("build", app.target, "--app-dir", app.folder, "--lru-cache", "shop.catalog:*")
    command = [program("jumpstart"), *map(str, words), "--requests", str(requests), "-o", str(profile)]
    subprocess.run(command, env=env, check=True, timeout=SLOW_S, stdout=subprocess.DEVNULL)
    found: dict[tuple[str, bool], list[Boot]] = {}
    for _ in range(rounds):
        for is_compiled in (True, False):
            for name, of in servers(app).items():
                with tempfile.TemporaryDirectory(prefix="cold-") as empty:
                    more = {} if is_compiled else {"PYTHONPYCACHEPREFIX": empty, "PYTHONDONTWRITEBYTECODE": "1"}
                    port = free_port()
                    found.setdefault((name, is_compiled), []).append(
                        boot(of(app, port, profile), {**env, **more}, folder, port, app.pages)
                    )
    yield f"\n**{app.title}**, {len(app.pages)} pages, medians of {rounds}\n"
    yield "| server | `__pycache__` | ready, s | first 100, p99 over steady | capacity lost in 20 s | steady, req/s |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for (name, is_compiled), boots in found.items():
        label = f"**{name}**" if "profile" in name else name
        cells = [
            f"{_median(boots, 'ready_s'):.2f}",
            f"{_median(boots, 'first_over_steady'):.1f}",
            f"{_median(boots, 'lost'):.1%}",
            f"{_median(boots, 'rate'):,.0f}",
        ]
        yield f"| {label} | {'yes' if is_compiled else 'no'} | {' | '.join(cells)} |"


def _median(boots: Sequence[Boot], key: str) -> float:
    values: list[float] = [getattr(each, key) for each in boots]
    return statistics.median(values)


def boot(command: Sequence[str], env: dict[str, str], folder: Path, port: int, pages: Sequence[str]) -> Boot:
    """
    Start the server, be its users, and end it.

    Raises:
        Failure: it did not answer.
    """
    with (folder / "log").open("wb") as log, Process(command, env, folder, stdout=log, stderr=log) as process:
        began = time.monotonic()
        ends: list[list[tuple[float, float]]] = [[] for _ in range(USERS)]
        users = [
            threading.Thread(target=_use, args=(port, pages, number, began, ends[number])) for number in range(USERS)
        ]
        for each in users:
            each.start()
        for each in users:
            each.join()
        if process.child.poll() is not None:
            raise Failure(f"{command[0]} ended: {(folder / 'log').read_text()[-500:]}")
    answers = sorted(answer for each in ends for answer in each)
    if len(answers) < 2 * FIRST:
        raise Failure(f"{command[0]} gave {len(answers)} answers: {(folder / 'log').read_text()[-500:]}")
    steady = [took for end, took in answers if end > WINDOW_S]
    rate = len(steady) / STEADY_S
    first = percentile([took for _, took in answers[:FIRST]], 0.99)
    usual = percentile(steady, 0.99)
    assert first is not None and usual is not None
    within = sum(end <= WINDOW_S for end, _ in answers)
    return Boot(answers[0][0], first / usual, 1 - within / (WINDOW_S * rate), rate)


def _use(port: int, pages: Sequence[str], number: int, began: float, ends: list[tuple[float, float]]) -> None:
    """Ask at our pace until the time is over; note when each answer was whole, since *began*, and how long it took."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SLOW_S)
    due = began
    while (now := time.monotonic()) < began + WINDOW_S + STEADY_S:
        if now < due:
            time.sleep(due - now)
            now = due
        due = max(due, now) + PACE_S
        try:
            connection.request("GET", pages[number % len(pages)])
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            time.sleep(0.01)
            continue
        end = time.monotonic()
        if response.status == 200:
            ends.append((end - began, end - now))
        number += 1
    connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
