"""Tables, the picture, and the part of the page that is replaced."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot, report, runner
from benchmarks.lab import Lab
from benchmarks.scenario import Column, Scenario
from benchmarks.scenarios import SCENARIOS
from benchmarks.servers import SERVERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")


def never(lab: Lab, name: str, variant: str) -> dict[str, Any]:
    raise AssertionError


SCENARIO = Scenario(
    name="trial",
    title="A trial",
    interface="wsgi",
    servers=("jumpstart", "granian", "gunicorn"),
    absent={"hypercorn": "it has no such option"},
    reference="granian",
    variants=("small", "large"),
    columns=(Column("rate", "req/s", better="more"), Column("p99_ms", "p99 ms", "{:.1f}", "less"), Column("no", "no")),
    measure=never,
)
FACTS = {
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "python": "CPython 3.13",
    "versions": {"granian": "2.0"},
    "commit": "abc",
}


def sample(server: str, number: int, rate: float, **more: Any) -> dict[str, Any]:
    common = {"server": server, "variant": "small", "round": number, "load_cores": 0.5, "others_cores": 0.25}
    return {**common, "rate": rate, "p99_ms": 1.5, "generator": "wrk", **more}


SAMPLES = [
    sample("jumpstart", 0, 3000.0),
    sample("granian", 0, 1000.0, load_cores=0.95),
    {"server": "gunicorn", "variant": "small", "round": 0, "error": "it did\nnot | start"},
    sample("jumpstart", 1, 100.0, p99_ms=2.5),
    sample("granian", 1, 50.0, load_cores=0.95),
    {"server": "gunicorn", "variant": "small", "round": 1, "error": "it did\nnot | start"},
    {"server": "jumpstart", "variant": "small", "round": 2, "error": "no answer"},
    sample("granian", 2, 1000.0, load_cores=0.95),
]
RUN = {
    "reference": "granian",
    "started": "2030-01-01 00:00 UTC",
    "rounds": 3,
    "quick": False,
    "notes": [],
    "machine": FACTS,
    "samples": SAMPLES,
}


def cells(text: str, server: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if re.match(rf"\| \**{re.escape(server)}\b", line)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_of_medians_and_ratios() -> None:
    text = report.section(SCENARIO, RUN)
    heads = ["server", "req/s", "least–most", "× granian", "p99 ms", "load, cores", "others, cores", "rounds"]
    assert cells(text, "server") == heads
    assert cells(text, "jumpstart") == [
        *("**jumpstart**", "1,550", "100–3,000", "2.50", "2.0", "0.50", "0.25", "2/3"),
    ]
    assert cells(text, "granian")[1:4] == ["1,000 †", "50–1,000", "1.00"]
    assert "† the load generator was at its limit" in text
    assert "**small**, load by wrk" in text.lower()
    assert "large" not in text  # nothing was measured there
    assert "3 rounds, begun 2030-01-01" in text


def test_who_failed_or_was_not_measured_is_a_row_with_its_reason() -> None:
    text = report.section(SCENARIO, RUN)
    assert cells(text, "gunicorn")[:2] == ["gunicorn (gthread)", "failed"]
    assert cells(text, "gunicorn")[-1] == "0/2"
    assert "- gunicorn (gthread) failed: it did not / start\n" in text
    assert "- jumpstart failed: no answer\n" in text
    assert cells(text, "hypercorn")[:2] == ["hypercorn", "not measured"]
    assert "- hypercorn: it has no such option" in text


def test_all_rows_of_a_table_are_equally_long() -> None:
    lines = [line for line in report.section(SCENARIO, RUN).splitlines() if line.startswith("|")]
    assert len(lines) == 6
    assert len({line.count("|") for line in lines}) == 1


def test_the_best_is_first_whichever_way_is_better() -> None:
    found = report.rows(SCENARIO, SAMPLES, "small", "granian")
    assert [row.server for row in found] == ["jumpstart", "granian", "gunicorn"]
    fields = {**SCENARIO.__dict__, "columns": (Column("rate", "s", better="less"),)}
    found = report.rows(Scenario(**fields), SAMPLES, "small", "granian")
    assert [row.server for row in found] == ["granian", "jumpstart", "gunicorn"]


def test_without_the_reference_there_is_no_column_of_ratios() -> None:
    alone = {**RUN, "samples": [SAMPLES[0]]}
    assert cells(report.section(SCENARIO, alone), "server")[3] == "p99 ms"


def test_what_a_run_lacks_is_said() -> None:
    text = report.section(SCENARIO, {**RUN, "samples": SAMPLES[:3], "quick": True, "notes": ["wrk is not installed"]})
    assert "1 round, begun" in text
    assert "**ended early: 3 rounds were asked for**" in text
    assert "**a quick trial" in text
    assert "; wrk is not installed." in text


def test_a_long_error_keeps_its_end() -> None:
    line = report.one_line("begin " + "x" * 1000 + " the end", limit=60)
    assert line.startswith("begin")
    assert line.endswith("the end")
    assert len(line) <= 63


def test_the_part_between_the_marks_is_replaced() -> None:
    page = f"before\n\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.replace_between(page, "new\n")
    assert once == f"before\n\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    assert report.replace_between(once, "new") == once


@pytest.mark.parametrize(
    "page",
    [
        "none",
        report.BEGIN,
        report.END + report.BEGIN,
        report.BEGIN + report.BEGIN + report.END,
        report.BEGIN + report.END + report.END,
    ],
)
def test_a_page_without_its_marks_is_left_alone(page: str) -> None:
    with pytest.raises(ValueError):
        report.replace_between(page, "new")


def store(folder: Path, **more: Any) -> None:
    (folder / "trial.json").write_text(json.dumps({**RUN, **more}), "utf-8")


def test_the_docs_are_written_from_what_is_stored(tmp_path: Path) -> None:
    page = tmp_path / "docs.md"
    page.write_text(f"# Page\n{report.BEGIN}\n{report.END}\n", "utf-8")
    with pytest.raises(ValueError, match="no results"):
        runner.write_docs(tmp_path, [SCENARIO], page)
    store(tmp_path, quick=True)
    with pytest.raises(ValueError, match="quick trial are not for the docs: trial"):
        runner.write_docs(tmp_path, [SCENARIO], page)
    store(tmp_path)
    runner.write_docs(tmp_path, [SCENARIO], page)
    text = page.read_text("utf-8")
    assert text.startswith("# Page\n")
    assert "A CPU, 2 cores, 8.0 GiB; Linux 6.1; CPython 3.13. granian 2.0. Commit abc." in text
    assert "### A trial" in text
    assert "](benchmarks.svg)" in text
    assert (tmp_path / "benchmarks.svg").is_file()


def test_the_picture_has_a_bar_for_everyone() -> None:
    (panel,) = runner.panels([SCENARIO], {"trial": RUN})
    assert [(bar.label, bar.value, bar.text, bar.ours) for bar in panel.bars] == [
        ("jumpstart", 1550.0, "1,550", True),
        ("granian", 1000.0, "1,000", False),
        ("gunicorn (gthread)", None, "failed", False),
    ]
    assert panel.note == "req/s; more is better"
    root = xml.etree.ElementTree.fromstring(plot.draw([panel, panel, panel]))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("jumpstart") == 3
    widths = [float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect")][1:4]
    assert widths[0] > widths[1] > widths[2]
    assert widths[1] / widths[0] == pytest.approx(1000 / 1550, rel=0.01)


def test_broken_answers_are_in_the_picture() -> None:
    fields = {**SCENARIO.__dict__, "columns": (Column("rate", "s", better="less"), Column("broken", "broken"))}
    (panel,) = runner.panels([Scenario(**fields)], {"trial": {**RUN, "samples": [sample("granian", 0, 9.0, broken=7)]}})
    assert panel.bars[0].text == "9, 7 broken"


def test_names_in_the_picture_are_escaped() -> None:
    panel = plot.Panel("a < b", "&", [plot.Bar("<x>", 0.0, "0", False)])
    xml.etree.ElementTree.fromstring(plot.draw([panel]))


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_every_scenario_is_sound(scenario: Scenario) -> None:
    assert scenario.variants
    assert scenario.columns[0].better
    assert len({column.key for column in scenario.columns}) == len(scenario.columns)
    if scenario.interface:
        assert scenario.servers[0].partition(",")[0] == "jumpstart"
        assert scenario.reference in scenario.servers
        assert not set(scenario.absent) & set(scenario.servers)
        assert all(scenario.interface in SERVERS[name.partition(",")[0]].interfaces for name in scenario.servers)
    assert f"`{scenario.name}`" in PAGE


def test_the_page_has_its_marks_and_its_links_lead_somewhere() -> None:
    report.replace_between(PAGE, "")
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert "://" in link or (ROOT / "docs" / link).exists(), link
