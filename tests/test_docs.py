"""What is written for people agrees with the code: codes, options, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jumpstart.records import Reason
from jumpstart_server.cli import cli
from jumpstart_server.exits import ExitCode
from jumpstart_server.proving import Fault
from jumpstart_server.settings_reference import render

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = ["README.md", "ARCHITECTURE.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
REASONS = (ROOT / "docs" / "reasons.md").read_text("utf-8")


def test_the_reference_of_settings_is_as_made() -> None:
    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == render(), "run scripts/docs"


def test_every_reason_code_is_explained_once_and_no_other() -> None:
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", REASONS, re.MULTILINE)) == sorted([*Reason, *Fault])


def test_every_exit_code_is_explained_in_both_places() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", REASONS, re.MULTILINE)}
    assert listed == {*ExitCode, 130}
    short = README.partition("Exit codes: ")[2].partition("\n\n")[0]
    assert {int(code) for code in re.findall(r"\b(\d) ", short)} == {*ExitCode} - {ExitCode.INTERRUPTED}


def test_the_readme_is_short_and_knows_every_command() -> None:
    assert len(README.splitlines()) <= 150
    for name in cli.list_commands(None):  # type: ignore[arg-type]  # it does not look at its context
        assert f"`jumpstart {name} " in README


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("option", sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README + REASONS))))
def test_options_that_are_named_exist(option: str) -> None:
    of_commands = {"--requests", "--allow-failures", "--help", "--serve", "--boot", "--json", "--for", "--access-log"}
    of_commands |= {"--prove"}
    assert option in of_commands or f"`{option}`" in render()
