"""What a scenario is. The scenarios themselves are in `benchmarks.scenarios`, a module each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.lab import Lab

Better = Literal["more", "less", ""]


@dataclass(frozen=True)
class Column:
    """A figure of a sample, as a column of its table."""

    key: str
    heading: str
    form: str = "{:,.0f}"
    better: Better = ""

    def show(self, value: float | None) -> str:
        return "–" if value is None else self.form.format(value)


@dataclass(frozen=True)
class Scenario:
    """
    `measure` takes the lab, the server's name and the variant, and gives the figures of one sample by their keys.

    It starts the server and ends it. What it raises as `Failure` becomes the sample's error.
    """

    name: str
    title: str
    interface: str  # wsgi or asgi; empty where no server takes part
    servers: tuple[str, ...]
    reference: str  # the server that ratios are to
    variants: tuple[str, ...]
    columns: tuple[Column, ...]  # the first one is the one that ratios, order and plot are made of
    measure: Callable[[Lab, str, str], dict[str, Any]]
    absent: Mapping[str, str] = field(default_factory=dict)  # servers that cannot take part, and why
