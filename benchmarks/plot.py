"""The plot: a panel of bars for each table, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, COLUMNS = 960, 2
BAR, GAP, HEAD, PAD = 16, 6, 44, 20
NAMES = 130  # pixels for the servers' names
VALUES = 80  # pixels for the figures at the ends of the bars
OURS, THEIRS, INK, FAINT = "#c2410c", "#94a3b8", "#1e293b", "#64748b"


@dataclass(frozen=True)
class Bar:
    label: str
    value: float | None  # None: it failed
    text: str
    ours: bool


@dataclass(frozen=True)
class Panel:
    title: str
    note: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return HEAD + len(self.bars) * (BAR + GAP) + PAD


def draw(panels: Sequence[Panel]) -> str:
    pairs = [panels[at : at + COLUMNS] for at in range(0, len(panels), COLUMNS)]
    height = PAD + sum(max(panel.height for panel in pair) for pair in pairs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    top = PAD
    for pair in pairs:
        for column, panel in enumerate(pair):
            left = PAD + column * (WIDTH - PAD) // COLUMNS
            parts += _panel(panel, left, top, (WIDTH - PAD) // COLUMNS - PAD)
        top += max(panel.height for panel in pair)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: int, top: int, width: int) -> list[str]:
    parts = [
        _text(left, top + 12, panel.title, weight="bold"),
        _text(left, top + 28, panel.note, fill=FAINT),
    ]
    most = max((bar.value for bar in panel.bars if bar.value is not None), default=0.0)
    for number, bar in enumerate(panel.bars):
        y = top + HEAD + number * (BAR + GAP)
        base = left + NAMES
        length = round((width - NAMES - VALUES) * bar.value / most, 1) if bar.value is not None and most > 0 else 0
        parts += [
            _text(base - 8, y + 12, bar.label, anchor="end", weight="bold" if bar.ours else "normal"),
            f'<rect x="{base}" y="{y}" width="{max(length, 1)}" height="{BAR}" fill="{OURS if bar.ours else THEIRS}"/>',
            _text(base + max(length, 1) + 6, y + 12, bar.text),
        ]
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{escape(text)}</text>'
    )
