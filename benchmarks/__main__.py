"""
The command: ``scripts/bench``, or ``python -m benchmarks`` in the project's folder.

It first makes its own virtual environment and goes on in there. docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import environment, runner
from benchmarks.lab import Lab
from benchmarks.processes import interruptible
from benchmarks.scenarios import SCENARIOS
from benchmarks.servers import SERVERS

RESULTS = environment.HERE / "results"
PAGE = environment.ROOT / "docs" / "benchmarks.md"
ROUNDS = 5


def parser() -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        number = int(text)
        if number < 1:
            raise ValueError
        return number

    made = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure Jumpstart beside other Python servers, in turns, on this machine."
    )
    add = made.add_argument
    # Not choices: argparse would refuse to have none.
    add("scenario", nargs="*", metavar="SCENARIO", help=f"all by default: {', '.join(SCENARIOS)}")
    add("--only", nargs="+", action="extend", choices=list(SERVERS), metavar="SERVER", help=", ".join(SERVERS))
    add("--rounds", type=positive, metavar="N", help=f"how often each server is measured ({ROUNDS}; 1 with --quick)")
    add("--quick", action="store_true", help="a short trial of everything, not for comparing")
    add(
        "--seconds", type=float, metavar="S", help="how long each load of requests lasts, instead of the scenario's own"
    )
    add(
        "--reference", choices=list(SERVERS), metavar="SERVER", help="what ratios are to, instead of the scenario's own"
    )
    add("--out", type=Path, metavar="DIR", help="where results go (benchmarks/results, or benchmarks/results/quick)")
    add(
        "--quiet-cores", type=float, default=0.4, metavar="N", help="a sample begins when others use less (%(default)s)"
    )
    add("--quiet-wait", type=float, metavar="S", help="but is not put off for longer than this (20; 1 with --quick)")
    add("--report", action="store_true", help="measure nothing: make the report again from what is stored")
    add("--write-docs", action="store_true", help="put the report into docs/benchmarks.md")
    add("--no-install", action="store_true", help="take the servers of the environment that this runs in, as they are")
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    unknown = [name for name in options.scenario if name not in SCENARIOS]
    if unknown:
        parser().error(f"no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    out: Path = options.out or (RESULTS / "quick" if options.quick else RESULTS)
    if not options.report:
        if not options.no_install and not environment.inside():
            try:
                environment.prepare()
            except (OSError, subprocess.SubprocessError) as error:
                runner.say(f"scripts/bench: the environment could not be made: {error}")
                return 1
            environment.enter(list(arguments))
        _measure(options, out)
    if not runner.stored(out, SCENARIOS.values()):
        runner.say(f"scripts/bench: there are no results in {out}")
        return 1
    print(runner.write_report(out, SCENARIOS.values()))
    runner.say(f"stored in {out}")
    if options.write_docs:
        try:
            runner.write_docs(out, SCENARIOS.values(), PAGE)
        except ValueError as error:
            runner.say(f"scripts/bench: --write-docs: {error}")
            return 1
    return 0


def _measure(options: argparse.Namespace, out: Path) -> None:
    plan = runner.Plan(
        scenarios=tuple(SCENARIOS[name] for name in dict.fromkeys(options.scenario or SCENARIOS)),
        only=options.only or (),
        rounds=options.rounds or (1 if options.quick else ROUNDS),
        out=out,
        quick=options.quick,
        reference=options.reference,
        quiet_cores=options.quiet_cores,
        quiet_wait_s=options.quiet_wait if options.quiet_wait is not None else 1.0 if options.quick else 20.0,
    )
    with interruptible(), Lab(environment.programs(), quick=options.quick, seconds=options.seconds) as lab:
        runner.run(plan, lab)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        runner.say("interrupted; what was measured so far is stored")
        status = 130
    sys.exit(status)
