"""From samples to tables: medians, ratios, Markdown. Values in, text out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Spread, ratio, spread
from benchmarks.scenario import Scenario
from benchmarks.servers import SERVERS, label

BUSY_CORES = 0.85  # a load generator of one thread that used this much, its start and end included, was at its limit
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
ALWAYS = ("load_cores", "others_cores")
ERROR_LENGTH = 160

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One server in one variant of a scenario, over the rounds."""

    server: str
    label: str
    good: int  # rounds with figures
    rounds: int
    figures: Mapping[str, Spread]
    ratio: float | None
    errors: tuple[str, ...]  # each once

    def median(self, key: str) -> float | None:
        return self.figures[key].median if key in self.figures else None


def rows(scenario: Scenario, samples: Iterable[Sample], variant: str, reference: str) -> list[Row]:
    """Best first; those without figures last."""
    by_server: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample["variant"] == variant:
            by_server.setdefault(sample["server"], []).append(sample)
    main = scenario.columns[0]
    keys = [*(column.key for column in scenario.columns), *ALWAYS]
    base = _by_round(by_server.get(reference, ()), main.key)
    found = [
        Row(
            server=server,
            label=label(server, scenario.interface),
            good=sum("error" not in sample for sample in mine),
            rounds=len(mine),
            figures={key: value for key in keys if (value := spread(list(_by_round(mine, key).values())))},
            ratio=ratio(_by_round(mine, main.key), base),
            errors=tuple(dict.fromkeys(sample["error"] for sample in mine if "error" in sample)),
        )
        for server, mine in by_server.items()
    ]

    def rank(row: Row) -> float:
        value = row.median(main.key)
        return math.inf if value is None else -value if main.better == "more" else value

    return sorted(found, key=rank)


def _by_round(samples: Iterable[Sample], key: str) -> dict[int, float]:
    return {sample["round"]: sample[key] for sample in samples if isinstance(sample.get(key), int | float)}


def one_line(text: str, limit: int = ERROR_LENGTH) -> str:
    """Fit for a table's cell: the end of a log is worth more than its begin."""
    flat = re.sub(r"\s+", " ", text).replace("|", "/").strip()
    return flat if len(flat) <= limit else f"{flat[: limit // 3]} … {flat[-(limit - limit // 3) :]}"


def table(scenario: Scenario, found: Sequence[Row], reference: str) -> list[str]:
    """The lines of a Markdown table, with a line for each failure under it."""
    main, *others = _used(scenario, found)
    # A ratio to nothing is no column.
    compared = any(row.ratio is not None for row in found) and len(found) > 1
    heads = ["server", main.heading, "least–most"]
    heads += [f"× {label(reference, scenario.interface)}"] if compared else []
    heads += [column.heading for column in others]
    heads += ["load, cores", "others, cores", "rounds"]
    lines = [_line(heads), "|" + " --- |" + " ---: |" * (len(heads) - 1)]
    bounded = main.key == "rate"  # by what a load generator can ask for
    limited = False
    for row in found:
        name = f"**{row.label}**" if row.server == "jumpstart" else row.label
        if not row.good:
            lines.append(_line([name, "failed", *[""] * (len(heads) - 3), f"0/{row.rounds}"]))
            continue
        mark = ""
        if bounded and (row.median("load_cores") or 0) >= BUSY_CORES:
            mark, limited = " †", True
        cells = [name, main.show(row.median(main.key)) + mark]
        main_spread = row.figures.get(main.key)
        cells.append(f"{main.show(main_spread.least)}–{main.show(main_spread.most)}" if main_spread else "–")
        if compared:
            cells.append("–" if row.ratio is None else f"{row.ratio:.2f}")
        cells += [column.show(row.median(column.key)) for column in others]
        cells += [_cores(row.median("load_cores")), _cores(row.median("others_cores")), f"{row.good}/{row.rounds}"]
        lines.append(_line(cells))
    lines += [
        _line([label(server, scenario.interface), "not measured", *[""] * (len(heads) - 2)])
        for server in scenario.absent
    ]
    notes = [f"- {row.label} failed: {one_line(error)}" for row in found for error in row.errors]
    notes += [f"- {label(server, scenario.interface)}: {why}" for server, why in scenario.absent.items()]
    if limited:
        notes.append("- † the load generator was at its limit: the server can do this or more")
    return [*lines, "", *notes, *([""] if notes else [])]


def _used(scenario: Scenario, found: Sequence[Row]) -> list[Any]:
    """The columns that have a figure in some row; the main one always."""
    main, *others = scenario.columns
    return [main, *(column for column in others if any(column.key in row.figures for row in found))]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cores(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def section(scenario: Scenario, run: Mapping[str, Any]) -> str:
    """A scenario's part of the report; *run* is what the runner stored."""
    reference = run["reference"]
    lines = [f"### {scenario.title}", "", f"`{scenario.name}`, {_conditions(run)}", ""]
    for variant in scenario.variants:
        found = rows(scenario, run["samples"], variant, reference)
        if not found:
            continue
        generators = _generators(run["samples"], variant)
        head = ", ".join(filter(None, [f"**{variant}**" if variant else "", generators and f"load by {generators}"]))
        lines += [head[0].upper() + head[1:], ""] if head else []
        lines += table(scenario, found, reference)
    if scenario.interface:
        silent = [name for name, server in SERVERS.items() if scenario.interface not in server.interfaces]
        if silent:
            lines += [f"No {scenario.interface.upper()}: {', '.join(silent)}.", ""]
    return "\n".join(lines)


def _generators(samples: Iterable[Sample], variant: str) -> str:
    found = {sample["generator"] for sample in samples if sample["variant"] == variant and "generator" in sample}
    return " and ".join("our own generator" if name == "own" else name for name in sorted(found))


def _conditions(run: Mapping[str, Any]) -> str:
    done = 1 + max((sample["round"] for sample in run["samples"]), default=-1)
    text = f"{done} round{'s' if done != 1 else ''}, begun {run['started']}"
    if done < run["rounds"]:
        text += f"; **ended early: {run['rounds']} rounds were asked for**"
    if run["quick"]:
        text += "; **a quick trial: times too short to compare**"
    return "; ".join([text, *run["notes"]]) + "."


def machine_line(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = f" Commit {facts['commit']}." if facts["commit"] else ""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; Linux {facts['kernel']}; "
        f"{facts['python']}. {versions}.{commit}"
    )


def document(scenarios: Iterable[Scenario], runs: Mapping[str, Mapping[str, Any]], plot: str | None) -> str:
    """The whole report; *plot* is the address of the picture."""
    there = [scenario for scenario in scenarios if scenario.name in runs]
    lines: list[str] = []
    machines: dict[str, list[str]] = {}
    for scenario in there:
        machines.setdefault(machine_line(runs[scenario.name]["machine"]), []).append(scenario.name)
    for facts, names in machines.items():
        lines += [facts if len(machines) == 1 else f"{', '.join(names)}: {facts}", ""]
    if plot:
        lines += [f"![The main figure of each table, as bars]({plot})", ""]
    return "\n".join(lines) + "\n" + "\n".join(section(scenario, runs[scenario.name]) for scenario in there)


def replace_between(page: str, text: str) -> str:
    """
    *page* with *text* between its two marks.

    Raises:
        ValueError: it has not exactly one of each, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"there is not one {BEGIN} with one {END} after it")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"
