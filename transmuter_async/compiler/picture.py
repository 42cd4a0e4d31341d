"""An explanation drawn as SVG: the graph as one strip from top to bottom, a block for each segment, a notch for each break.

A block is as high as the logarithm of its nodes, so a model of thousands fits a screen. Text stands to the right of the
strip, in rows that never overlap: each row is as high as its block or its lines, whichever is more.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, cast
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from transmuter_async.compiler.explain import Break, Explanation, PlaceRow

__all__ = ["draw"]

_WIDTH = 960
_STRIP_X, _STRIP_WIDTH, _TEXT_X = 24, 64, 112
_LINE = 16
_CHARACTERS = 108  # what fits beside the strip at 12 px in a monospaced face
_ROWS = 400
"""Rows drawn at most; the rest is said in one line, so that a picture stays below a few hundred kB."""

_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2933}"
    ".h{font-weight:600;font-size:15px}.b{font-weight:600}.q{fill:#52606d}"
    ".program{fill:#2f6fb3}.host{fill:#9aa5b1}.known{fill:#cbd2d9}.inner{stroke:#2f6fb3;stroke-width:2;fill:#dbe9f7}"
    ".break{fill:#d64545}.r{fill:#a61b1b}"
)


def draw(explanation: Explanation) -> str:
    """The picture of an explanation, a complete SVG document, readable at a glance for thousands of nodes."""
    rows: list[tuple[int, int, PlaceRow | Break]] = []
    rows += [(place.position, 1, place) for place in explanation.places]
    rows += [(item.position, 0, item) for item in explanation.breaks]
    rows.sort(key=lambda row: row[:2])
    left_out = len(rows) - _ROWS
    parts: list[str] = []
    y = 24
    for text in _headline(explanation):
        parts.append(_text(24, y, text, "h" if y == 24 else "q"))
        y += 20
    y += 8
    slowest = max((place.nanoseconds for place in explanation.places), default=0)
    for _, kind, row in rows[:_ROWS]:
        block, y = _place(cast("PlaceRow", row), y, slowest) if kind else _break(cast("Break", row), y)
        parts += block
    if left_out > 0:
        parts.append(_text(_TEXT_X, y + _LINE, f"… and {left_out} more segments and breaks", "q"))
        y += _LINE * 2
    height = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img"><title>Segments and breaks</title><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _headline(explanation: Explanation) -> list[str]:
    breaks = len(explanation.breaks)
    if explanation.graph_break is None and not explanation.places:
        state = "nothing is compiled yet"
    elif not breaks:
        state = "no breaks: one program"
    else:
        state = f"{breaks} break{'s' * (breaks != 1)}, {len(explanation.places)} segments"
    lines = [f"{explanation.node_count} nodes, {state}"]
    if breaks:
        first = explanation.ranked()[0]
        if first.nanoseconds:
            lines.append(
                f"the most expensive break: {first.op_type} at {first.position}, {_time(first.nanoseconds)} in all"
            )
    return lines


def _place(place: PlaceRow, y: int, slowest: int) -> tuple[list[str], int]:
    kind = "program" if place.programs else "host" if place.host else "known"
    title = {
        "program": f"{place.programs} program{'s' * (place.programs != 1)}",
        "host": "on the host: too small for a program of its own",
        "known": "known before it runs",
    }[kind]
    where = " in a body" if place.inner else ""
    lines = [
        (f"{place.position} – {place.stop}{where}: {place.node_count} nodes, {title}", "b"),
        (f"hit {place.hits}, missed {place.misses}, evicted {place.evictions}", "q"),
    ]
    if place.runs:
        each = _time(place.nanoseconds / place.runs)
        lines.append((f"ran {place.runs} times, {each} each, {_time(place.nanoseconds)} in all", "q"))
    block = max(18, round(14 * math.log2(2 + place.node_count)))
    height = max(block, _LINE * len(lines)) + 8
    inner = 16 if place.inner else 0
    style = "inner" if place.inner else kind
    box = f'x="{_STRIP_X + inner}" y="{y}" width="{_STRIP_WIDTH - inner}" height="{height - 4}" rx="3"'
    parts = [f'<rect class="{style}" {box}/>']
    if slowest and place.nanoseconds:
        share = round((_STRIP_WIDTH - inner) * place.nanoseconds / slowest)
        parts.append(
            f'<rect x="{_STRIP_X + inner}" y="{y + height - 9}" width="{share}" height="5" fill="#f0b429">'
            f"<title>share of the measured time</title></rect>"
        )
    parts += [_text(_TEXT_X, y + 13 + _LINE * i, text, style) for i, (text, style) in enumerate(lines)]
    return parts, y + height


def _break(item: Break, y: int) -> tuple[list[str], int]:
    origin = "a graph input" if item.producer is None else f"computed by {item.producer}"
    said = [f"break {item.id} at {item.position}: {item.op_type} {item.node} needs {item.reason}"]
    said.append(f"{item.value} is {origin}. {item.hint}")
    if item.count:
        gain = f"; without it: saves {item.gain}" if item.gain else ""
        said.append(f"reached {item.count} times, {_time(item.nanoseconds / item.count)} each{gain}")
    lines = [line for text in said for line in textwrap.wrap(text, _CHARACTERS, break_long_words=True)]
    height = _LINE * len(lines) + 10
    middle = y + height // 2
    bar = f"M{_STRIP_X} {middle - 4}h{_STRIP_WIDTH}v8h-{_STRIP_WIDTH}z"
    arrow = f"M{_STRIP_X + _STRIP_WIDTH} {middle}l10 -7v14z"
    parts = [f'<path class="break" d="{bar}{arrow}"/>']
    parts += [_text(_TEXT_X, y + 14 + _LINE * i, line, "r" if i == 0 else "q") for i, line in enumerate(lines)]
    return parts, y + height


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(text[: _CHARACTERS + 20])}</text>'


def _time(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.0f} ns"
