"""A line chart as SVG, with nothing but text: for figures that go into a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["chart"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 70, 170, 34, 46
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d6a9f", "#e09f3e", "#555555")

Lines = Mapping[str, Sequence[tuple[float, float]]]


def chart(panels: Sequence[tuple[str, str, str, Lines]]) -> str:
    """Panels below each other, each `(title, what is along x, what is along y, points by line)`. x is spaced by doubling."""
    height = HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {index * HEIGHT})">')
        parts.extend(_panel(*panel))
        parts.append("</g>")
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(title: str, along: str, up: str, lines: Lines) -> list[str]:
    xs = sorted({x for points in lines.values() for x, _ in points})
    top = _round_up(max((y for points in lines.values() for _, y in points), default=1.0))
    first, last = math.log2(xs[0]), math.log2(xs[-1])
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share = 0.5 if first == last else (math.log2(x) - first) / (last - first)
        return LEFT + share * width, TOP + (1 - y / top) * height

    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for step in range(5):
        value = top * step / 4
        _, y = place(xs[0], value)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in xs:
        x, _ = place(value, 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    middle = LEFT + width / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(along)}</text>')
    parts.append(
        f'<text transform="translate(14 {TOP + height / 2:.1f}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'
    )
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        dots = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots)
        y = TOP + 14 + 18 * index
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 30}" y="{y}">{escape(name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 10, … times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 10) if step * power >= value * (1 - 1e-9))
