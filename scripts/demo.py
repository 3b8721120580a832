"""
The demo: boot the example shop cold, from a profile, and a second time, and print the boots side by side.

``scripts/demo`` installs first and then runs this. How a boot is measured is in `_boots.py`; here is the order of
things, and what is printed. The table goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jumpstart_warmup.corpus import WarmRequest, read_requests
from scripts._boots import (
    FIRST_REQUESTS,
    JUMPSTART,
    ROOT,
    SETTLING_REQUESTS,
    SHOP,
    Boot,
    DemoError,
    Interrupts,
    Stopped,
    ask_in_turn,
    boot_and_measure,
    environment,
    run,
    running_backend,
    serving,
)

TARGETS = {"starlette": "shop.web:app", "flask": "shop.flask_web:app"}
REQUESTS = SHOP / "warm.toml"
COLD, PROFILE, SECOND = KINDS = ("cold", "from profile", "second boot")
LABEL_WIDTH = 44
COLUMN_WIDTH = 15


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    app: str
    workers: int
    boots: int
    steady: int
    json: Path | None
    serve: bool
    port: int


def parse_arguments(arguments: Sequence[str]) -> Options:
    def positive(text: str) -> int:
        number = int(text)
        if number < 1:
            raise ValueError
        return number

    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Boot the example shop cold, from a profile, and a second time; print the boots side by side.",
    )
    parser.add_argument("--app", choices=sorted(TARGETS), default="starlette", help="which of the twins (%(default)s)")
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="processes that serve (%(default)s)")
    parser.add_argument("--boots", type=positive, default=3, metavar="N", help="boots of each kind (%(default)s)")
    parser.add_argument(
        "--steady", type=positive, default=600, metavar="N", help="requests that steady latency is taken from (600)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every boot and the medians there")
    parser.add_argument("--serve", action="store_true", help="stay up with the shop, warm, until Ctrl-C")
    parser.add_argument(
        "--port", type=int, default=8000, help="where --serve listens; 0 takes a free one (%(default)s)"
    )
    return Options(**vars(parser.parse_args(arguments)))


def main() -> int:
    options = parse_arguments(sys.argv[1:])
    interrupts = Interrupts()
    interrupts.install()
    try:
        return Demo(options, interrupts).run()
    except Stopped as signal_:
        say(f"\nstopped by {signal_}; nothing is left running")
        return 128 + signal_.number
    except DemoError as error:
        say(f"scripts/demo: {error}")
        return 1


def say(text: str) -> None:
    """Tell how far things are, without getting into the table."""
    print(text, file=sys.stderr, flush=True)


class Demo:
    """One run, in a temporary folder that is gone afterwards."""

    def __init__(self, options: Options, interrupts: Interrupts) -> None:
        self._options = options
        self._interrupts = interrupts
        self._requests = read_requests(REQUESTS)
        self._backend = ""
        self._folder: Path

    def run(self) -> int:
        """Return the exit code: 0 when everything was as promised."""
        options = self._options
        if options.serve:
            check_port(options.port)
        if options.json is not None and not options.json.absolute().parent.is_dir():
            raise DemoError(f"--json {options.json}: no such folder")
        with self._temporary_folder() as folder, running_backend(self._interrupts) as backend:
            self._folder, self._backend = folder, backend
            self._prepare()
            boots = self._measure()
            broken = broken_promises(boots)
            print("\n".join(describe(options, self._requests, boots)), flush=True)
            if options.json is not None:
                document = document_of(options, self._requests, boots, broken)
                options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            if broken:
                raise DemoError("not as promised:\n" + "\n".join(f"  {line}" for line in broken))
            if options.serve:
                self._serve()
        return 0

    @contextlib.contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        folder: tempfile.TemporaryDirectory[str] | None = None
        try:
            with self._interrupts.held():
                folder = tempfile.TemporaryDirectory(prefix="jumpstart-demo-")
            yield Path(folder.name)
        finally:
            if folder is not None:
                folder.cleanup()

    # Three homes are three hosts: one that knows nothing, one that trusts the key of the profile, and one that
    # served before.

    def _home(self, name: str) -> Path:
        home = self._folder / name
        home.mkdir(mode=0o700, exist_ok=True)
        return home

    def _environment(self, home: Path) -> dict[str, str]:
        return environment(home, self._backend, self._folder / "bytecode")

    @property
    def _app(self) -> list[str | Path]:
        return [TARGETS[self._options.app], "--app-dir", SHOP]

    @property
    def _profile(self) -> Path:
        return self._folder / "shop.jumpstart"

    @property
    def _admin(self) -> Path:
        return self._folder / "admin.sock"

    def _arguments(self, kind: str) -> list[str | Path]:
        arguments = [*self._app, "--workers", str(self._options.workers)]
        if kind == COLD:
            return [*arguments, "--no-warm-start"]
        if kind == PROFILE:  # the profile alone, without what a boot before it has left on this host
            return [*arguments, "--no-warm-start", "--profile", self._profile, "--lru-cache", "shop.catalog:*"]
        return arguments

    def _prepare(self) -> None:
        """Build the profile, and boot once so that the second boot is one. Both leave bytecode for all that follow."""
        say("building a profile from examples/shop/warm.toml …")
        command = [JUMPSTART, "build", *self._app, "--lru-cache", "shop.catalog:*"]
        command += ["--requests", REQUESTS, "-o", self._profile]
        say("  " + run(command, self._interrupts, self._environment(self._home("builder"))).splitlines()[-1])
        say("a first boot on this host, which keeps what its workers learn …")
        environ = self._environment(self._home("second"))
        with serving(self._arguments(SECOND), self._interrupts, environ, self._admin) as server:
            # Also for this process, whose own first requests would else be part of what is measured.
            ask_in_turn(server.port, self._requests, 2 * len(self._requests))

    def _measure(self) -> list[Boot]:
        boots = []
        total = self._options.boots
        for number in range(total):
            for kind in KINDS:  # in turn, so that what else this machine does falls on all of them
                home = {COLD: f"cold-{number}", PROFILE: "builder", SECOND: "second"}[kind]
                boot = boot_and_measure(
                    kind,
                    self._arguments(kind),
                    self._requests,
                    self._options.steady,
                    self._interrupts,
                    self._environment(self._home(home)),
                    self._admin,
                )
                boots.append(boot)
                say(
                    f"boot {number + 1} of {total}, {kind}: ready in {boot.ready_s:.2f} s, "
                    f"{boot.cold_events} cold events in {boot.requests} requests"
                )
        return boots

    def _serve(self) -> None:
        """Stay up until a signal, which is how this is meant to end."""
        arguments = self._arguments(PROFILE)
        environ = self._environment(self._home("builder"))
        try:
            with serving(
                arguments, self._interrupts, environ, self._admin, port=self._options.port, echo=True
            ) as server:
                for line in self._invitation(server.port):
                    print(line, flush=True)
                server.process.wait()
                raise DemoError(f"the server ended by itself: {server.describe_end()}")
        except Stopped as signal_:
            if signal_.number == signal.SIGHUP:
                raise
            say("stopped; nothing is left running")

    def _invitation(self, port: int) -> Iterator[str]:
        jumpstart = JUMPSTART.relative_to(ROOT) if JUMPSTART.is_relative_to(ROOT) else JUMPSTART
        yield ""
        yield "The shop is up, warm. Try"
        for path in ("/", "/products/7", "/search?q=habour+lamp", "/report", "/chat?n=20&delay_ms=50"):
            yield f"  http://127.0.0.1:{port}{path}"
        yield "and, from another terminal in this folder,"
        yield f"  {jumpstart} status --admin unix:{self._admin}"
        yield f"  {jumpstart} profile show {self._profile}"
        yield "Ctrl-C ends it."


def check_port(port: int) -> None:
    """
    Complain about a port that is taken before minutes of measuring, not after.

    Raises:
        DemoError: it is taken, or none.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise DemoError(f"--port {port}: {error}; choose another one") from None


# --- what is printed ------------------------------------------------------------------------------------------------


def broken_promises(boots: Sequence[Boot]) -> list[str]:
    """What is not as the README says; empty when all is well."""
    broken = []
    for boot in boots:
        if boot.kind == COLD:
            if not boot.cold_events:
                broken.append("a cold boot had no cold events, so that there is nothing to compare with")
            continue
        if boot.cold_events:
            names = "; ".join(f"{route}: {', '.join(found)}" for route, found in boot.cold_names.items())
            broken.append(f"{boot.kind}: {boot.cold_events} cold events in {boot.cold_requests} requests ({names})")
        if not boot.records_used:
            broken.append(f"{boot.kind}: no record was used")
        broken += [f"{boot.kind}: not used: {refusal}" for refusal in boot.refusals]
    return list(dict.fromkeys(broken))


@dataclass(frozen=True)
class Row:
    """One line of the table: the median of *value* over the boots of each kind."""

    label: str
    value: Callable[[Boot], float | None]
    format: str  # of the number, as str.format takes it


def rows(requests: Sequence[WarmRequest]) -> list[Row | str]:
    """The lines of the table; a string is a heading."""

    def first(number: int) -> Callable[[Boot], float]:
        return lambda boot: boot.first_ms[number]

    return [
        Row("time to ready [1]", lambda boot: boot.ready_s, "{:.2f} s"),
        Row("time until each route was answered once", lambda boot: boot.round_s, "{:.2f} s"),
        "first request to each route [2]",
        *(
            Row(f"  {request.method:<4} {request.path}", first(number), "{:.1f} ms")
            for number, request in enumerate(requests)
        ),
        "all requests",
        Row(f"  median of the first {FIRST_REQUESTS}", lambda boot: boot.first_p50_ms, "{:.1f} ms"),
        Row("  median, steady [3]", lambda boot: boot.steady_p50_ms, "{:.1f} ms"),
        Row(f"  p99 of the first {FIRST_REQUESTS}", lambda boot: boot.first_p99_ms, "{:.1f} ms"),
        Row("  p99, steady [3]", lambda boot: boot.steady_p99_ms, "{:.1f} ms"),
        Row(f"  p99 of the first {FIRST_REQUESTS} / p99, steady", lambda boot: boot.first_over_steady, "{:.1f} ×"),
        Row("cold events in requests [4]", lambda boot: boot.cold_events, "{:g}"),
        Row("requests that were cold", lambda boot: boot.cold_requests, "{:g}"),
        Row("records used", lambda boot: boot.records_used, "{:g}"),
        Row("memory of all processes together (PSS)", lambda boot: boot.pss_mib, "{:.0f} MiB"),
    ]


def median(row: Row, boots: Sequence[Boot], kind: str) -> float | None:
    values = [value for boot in boots if boot.kind == kind and (value := row.value(boot)) is not None]
    return statistics.median(values) if values else None


def describe(options: Options, requests: Sequence[WarmRequest], boots: Sequence[Boot]) -> Iterator[str]:
    """The table and its notes, as lines."""
    width = LABEL_WIDTH + COLUMN_WIDTH * len(KINDS)
    yield ""
    yield f"The example shop on {options.app.title()}, {options.workers} worker{'s' * (options.workers > 1)}"
    yield "=" * width
    yield " " * LABEL_WIDTH + "".join(f"{kind:>{COLUMN_WIDTH}}" for kind in KINDS)
    yield "-" * width
    for row in rows(requests):
        if isinstance(row, str):
            yield row
            continue
        values = [median(row, boots, kind) for kind in KINDS]
        cells = ["-" if value is None else row.format.format(value) for value in values]
        yield f"{row.label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)
    yield "=" * width
    yield from notes(options, requests)


def notes(options: Options, requests: Sequence[WarmRequest]) -> Iterator[str]:
    """How the numbers came about."""
    many = options.boots > 1
    each = f"the median of {options.boots} boots of each kind, taken in turn" if many else "of one boot of each kind"
    yield f"Each number is {each}, on this machine in this run:"
    yield f"{describe_machine()}. Other machines, and other work on this one, give others."
    yield ""
    yield f"{COLD:<13} an empty host: no profile, no cache, no warm-up requests (--no-warm-start)"
    yield f"{PROFILE:<13} an empty host and the file that `jumpstart build` made (--no-warm-start --profile FILE)"
    yield f"{SECOND:<13} no options (but --workers), on a host where it served {2 * len(requests)} requests before"
    yield "All find the bytecode of every module on disk. The back end of the shop answers after 20 ms."
    yield ""
    text = f"""\
[1] From the start of the command until the port accepts; a boot that warms up does its work here.
[2] One request at a time, each on a new connection, in this order, at once after ready. The first one to
    a route is always the first that its worker gets for it; what routes share (the template engine, say) is
    paid by whichever comes first. Each worker is cold for itself, so that later users meet the same again
    in the other workers: see the requests that were cold, and the p99 of the first {FIRST_REQUESTS}, of which these
    {len(requests)} are a part.
[3] Of {options.steady} requests of this mix in the same boot, after the first {FIRST_REQUESTS + SETTLING_REQUESTS}.
[4] Imports, template and pattern compiles, fills of caches and the like inside requests; the server's own
    count, over all requests of a boot."""
    yield from text.splitlines()


def describe_machine() -> str:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{os.cpu_count()} CPUs{load}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def document_of(
    options: Options, requests: Sequence[WarmRequest], boots: Sequence[Boot], broken: Sequence[str]
) -> dict[str, Any]:
    """Everything, for ``--json``."""
    return {
        "app": options.app,
        "workers": options.workers,
        "machine": describe_machine(),
        "steady_requests": options.steady,
        "requests": [f"{request.method} {request.path}" for request in requests],
        "medians": {
            kind: {row.label.strip(): median(row, boots, kind) for row in rows(requests) if isinstance(row, Row)}
            for kind in KINDS
        },
        "boots": [asdict(boot) for boot in boots],
        "broken_promises": list(broken),
    }


if __name__ == "__main__":
    sys.exit(main())
