"""The reference of all options, `docs/settings.md`, made from their declarations; `scripts/docs` writes it."""

from __future__ import annotations

import sys
from typing import Any

from jumpstart_server.settings import SECTIONS, Option, declared_options

INTRODUCTION = """# Settings

Made from the declarations in `server/jumpstart_server/settings.py` by `scripts/docs`; do not edit by hand.

Precedence: command line, then the environment variable, then `jumpstart.toml` (or `[tool.jumpstart]` in
`pyproject.toml`), then the default. Paths in a file are relative to that file. Lists are repeated options on the
command line, comma-separated in the environment, arrays in TOML. Times are in seconds.
"""

TABLES = {"app": "[app]", "tenant": "[tenants.NAME]", "profile": "[profile]", "server": "[server]"}


def render() -> str:
    """The page as Markdown."""
    lines = [INTRODUCTION]
    for section, struct in SECTIONS.items():
        summary = (struct.__doc__ or "").strip().partition(": ")[2]
        lines += [f"## {TABLES[section]}", "", summary[:1].upper() + summary[1:], ""]
        lines += ["| key | command line | environment | default | meaning |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(option) for option in declared_options() if option.section == section]
        lines.append("")
    return "\n".join(lines)


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    if option.is_flag and option.flags:
        flags += f", `--no-{option.flags[0][2:]}`"
    environment = ", ".join(f"`{name}`" for name in (option.env, *option.other_env)) if option.flags else ""
    choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    unit = f" ({option.unit})" if option.unit else ""
    cells = [f"`{option.key}`", flags, environment, _default(option), f"{option.help}{choices}{unit}"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(option: Option) -> str:
    value: Any = option.default
    if value is None or value in ("", ()):
        return ""
    if option.is_flag:
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(render())
