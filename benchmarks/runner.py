"""Runs scenarios round by round, the servers in turns, and stores every sample as soon as it is there."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine, plot, report
from benchmarks.figures import turns
from benchmarks.lab import Lab
from benchmarks.processes import Failure
from benchmarks.scenario import Column, Scenario

PLOT, REPORT = "benchmarks.svg", "benchmarks.md"


@dataclass(frozen=True)
class Plan:
    """What to run, and how."""

    scenarios: tuple[Scenario, ...]
    only: Collection[str]  # servers; empty: all
    rounds: int
    out: Path
    quick: bool
    reference: str | None
    quiet_cores: float
    quiet_wait_s: float


def run(plan: Plan, lab: Lab) -> None:
    plan.out.mkdir(parents=True, exist_ok=True)
    notes = [note for note in (machine.raise_file_limit(),) if note]
    if not lab.wrk:
        notes.append("wrk is not installed, so that all load is by our own generator")
    if not machine.instruments_nice():
        notes.append("the load generators had no right to go before the servers")
    facts = machine.facts()
    for scenario in plan.scenarios:
        _run_one(plan, scenario, lab, facts, notes)


def _run_one(plan: Plan, scenario: Scenario, lab: Lab, facts: dict[str, Any], notes: list[str]) -> None:
    servers = [
        name
        for name in scenario.servers
        if not plan.only or not scenario.interface or name.partition(",")[0] in plan.only
    ]
    if not servers:
        say(f"{scenario.name}: none of the chosen servers takes part")
        return
    data: dict[str, Any] = {
        "scenario": scenario.name,
        "title": scenario.title,
        "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "rounds": plan.rounds,
        "quick": plan.quick,
        "reference": plan.reference or scenario.reference,
        "notes": notes,
        "machine": facts,
        "samples": [],
    }
    say(f"{scenario.name}: {scenario.title}")
    for number in range(plan.rounds):
        for variant in scenario.variants:
            for name in turns(servers, number):
                lab.wait_for_quiet(plan.quiet_cores, plan.quiet_wait_s)
                sample: dict[str, Any] = {"server": name, "variant": variant, "round": number}
                try:
                    sample.update(scenario.measure(lab, name, variant))
                except Failure as failure:
                    sample["error"] = str(failure)
                data["samples"].append(sample)
                _store(plan.out / f"{scenario.name}.json", data)
                say(f"  {number + 1}/{plan.rounds} {variant:16} {name:10} {_summary(scenario, sample)}")


def _summary(scenario: Scenario, sample: Mapping[str, Any]) -> str:
    if "error" in sample:
        return "failed: " + report.one_line(sample["error"])
    shown = [
        f"{column.heading} {column.show(sample[column.key])}"
        for column in scenario.columns
        if sample.get(column.key) is not None
    ]
    return f"{'; '.join(shown)} [load {sample['load_cores']:.2f}, others {sample['others_cores']:.2f} cores]"


def _store(path: Path, data: Mapping[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    new.replace(path)


def stored(folder: Path, scenarios: Iterable[Scenario]) -> dict[str, dict[str, Any]]:
    """The runs that *folder* holds, by scenario."""
    return {
        scenario.name: json.loads(path.read_text("utf-8"))
        for scenario in scenarios
        if (path := folder / f"{scenario.name}.json").is_file()
    }


def panels(scenarios: Iterable[Scenario], runs: Mapping[str, Mapping[str, Any]]) -> list[plot.Panel]:
    """One for each table that compares servers."""
    found = []
    for scenario in scenarios:
        if scenario.name not in runs or not scenario.interface:
            continue
        main = scenario.columns[0]
        for variant in scenario.variants:
            rows = report.rows(scenario, runs[scenario.name]["samples"], variant, "")
            if not rows:
                continue
            found.append(
                plot.Panel(
                    title=scenario.name + (f": {variant}" if variant else ""),
                    note=f"{main.heading}; {main.better} is better",
                    bars=[_bar(row, main) for row in rows],
                )
            )
    return found


def _bar(row: report.Row, column: Column) -> plot.Bar:
    value = row.median(column.key)
    text = "failed" if value is None else column.show(value)
    # The times are those of whole answers only: a bar alone would flatter who broke the others.
    if broken := row.median("broken"):
        text += f", {broken:,.0f} broken"
    return plot.Bar(row.label, value, text, ours=row.server == "jumpstart")


def write_report(folder: Path, scenarios: Collection[Scenario]) -> str:
    """`REPORT` and `PLOT` in *folder*, from what is stored there; gives the report's text."""
    runs = stored(folder, scenarios)
    (folder / PLOT).write_text(plot.draw(panels(scenarios, runs)), "utf-8")
    text = report.document(scenarios, runs, PLOT)
    (folder / REPORT).write_text(f"# Side by side\n\n{text}", "utf-8")
    return text


def write_docs(folder: Path, scenarios: Collection[Scenario], page: Path) -> None:
    """
    Put the report into *page*, between its marks, and the plot beside it.

    Raises:
        ValueError: there is nothing to put there, or it was a quick trial.
    """
    runs = stored(folder, scenarios)
    if not runs:
        raise ValueError(f"there are no results in {folder}")
    if quick := [name for name, data in runs.items() if data["quick"]]:
        raise ValueError(f"results of a quick trial are not for the docs: {', '.join(quick)}")
    text = report.document(scenarios, runs, PLOT)
    page.write_text(report.replace_between(page.read_text("utf-8"), text), "utf-8")
    (page.parent / PLOT).write_text(plot.draw(panels(scenarios, runs)), "utf-8")


def say(text: str) -> None:
    """Progress goes to standard error; standard output is for the report."""
    print(text, file=sys.stderr, flush=True)
