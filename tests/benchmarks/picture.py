"""Ratios on a logarithmic axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Row", "draw"]

LEFT, RIGHT, TOP, HEIGHT, WIDTH = 190, 60, 46, 20, 720
TICKS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32, 64, 128, 256)

LEGEND = (
    "filled: batch 1; green faster, blue within its bound, red above; the red mark is the bound",
    "rings: other sizes and larger batches",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A name, its ratio, further ratios (larger batches), and its bound."""

    name: str
    ratio: float
    others: tuple[float, ...] = ()
    bound: float | None = None


def draw(rows: Sequence[Row], title: str) -> str:
    """The picture: filled dots for the first ratio, rings for the others, a mark for the bound; 1 is a line."""
    values = [value for row in rows for value in (row.ratio, *row.others, row.bound or row.ratio)] or [1.0]
    low = max((tick for tick in TICKS if tick <= min(*values, 0.5)), default=TICKS[0])
    high = min((tick for tick in TICKS if tick >= max(*values, 2.0)), default=TICKS[-1])
    scale = (WIDTH - LEFT - RIGHT) / math.log(high / low)

    def x(value: float) -> float:
        return LEFT + math.log(min(max(value, low), high) / low) * scale

    bottom = TOP + HEIGHT * len(rows)
    size = f'viewBox="0 0 {WIDTH} {bottom + 62}" width="{WIDTH}" height="{bottom + 62}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{bottom + 62}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" fill="#222222">{escape(title)}</text>',
        *_axis(low, high, x, bottom),
    ]
    for number, row in enumerate(rows):
        y = TOP + HEIGHT * number + HEIGHT / 2
        within = row.bound is None or row.ratio <= row.bound
        colour = "#1a7f5a" if row.ratio <= 1 else "#2b6cb0" if within else "#c0392b"
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#222222">{escape(row.name)}</text>')
        lines.append(
            f'<line x1="{x(1):.1f}" y1="{y:.1f}" x2="{x(row.ratio):.1f}" y2="{y:.1f}" stroke="{colour}" stroke-width="2"/>'
        )
        if row.bound is not None:
            place = x(row.bound)
            lines.append(
                f'<line x1="{place:.1f}" y1="{y - 7:.1f}" x2="{place:.1f}" y2="{y + 7:.1f}" stroke="#c0392b" stroke-width="1.5"/>'
            )
        lines += [
            f'<circle cx="{x(other):.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="#777777"/>' for other in row.others
        ]
        lines.append(f'<circle cx="{x(row.ratio):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        lines.append(f'<text x="{WIDTH - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#222222">{row.ratio:.2f}</text>')
    for number, words in enumerate(LEGEND):
        lines.append(f'<text x="{LEFT}" y="{bottom + 38 + 15 * number}" font-size="11" fill="#555555">{words}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axis(low: float, high: float, x: object, bottom: int) -> Iterator[str]:
    assert callable(x)
    for tick in TICKS:
        if not low <= tick <= high:
            continue
        place = x(tick)
        stroke = "#444444" if tick == 1 else "#dddddd"
        yield f'<line x1="{place:.1f}" y1="{TOP - 6}" x2="{place:.1f}" y2="{bottom + 4}" stroke="{stroke}"/>'
        text = f"{tick:g}" if tick >= 1 else f"1/{round(1 / tick)}"
        yield f'<text x="{place:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555555">{text}</text>'
