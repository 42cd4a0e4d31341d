"""Where a graph breaks, why, and what the user can do about it; and what the cache holds for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transmuter_async.compiler.cache import SegmentCache
from transmuter_async.compiler.prepare import PreparedGraph
from transmuter_async.compiler.segment import Segment
from transmuter_async.errors import NeedsValue

__all__ = ["Break", "Explanation", "SegmentRow", "explain"]


@dataclass(frozen=True, slots=True)
class Break:
    """One place where a graph breaks.

    Attributes:
        id: Stable: `B1` the output's shape depends on values, `B2` a condition, `B3` a loop, `B4` another value that
            the operator needs on the host.
        position: Of the node, in the file.
        node: Its name.
        op_type: Its operator.
        value: The tensor that is needed.
        producer: The node that computes it, None for a graph input.
        reason: What is needed, in words.
        hint: What the user can do.
    """

    id: str
    position: int
    node: str
    op_type: str
    value: str
    producer: str | None
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One compiled segment.

    Attributes:
        position: Of its first node, in the file.
        stop: Position of the break node after it, or "end".
        node_count: Nodes that its program computes.
        kind: "program", "host" (small, runs eagerly), or "known" (everything was known while tracing).
        shapes: Sorted `(name, (shape, dtype))` of its arguments.
        statics: Names whose values are part of its key.
        kept: Whether it is the function kept outside of the LRU.
    """

    position: int
    stop: int | str
    node_count: int
    kind: str
    shapes: tuple[tuple[str, Any], ...]
    statics: tuple[str, ...]
    kept: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Segments and breaks of a compiled model, as far as calls and specs have found them.

    Attributes:
        node_count: Top-level nodes of the file.
        traced: Nodes left after passes and folding.
        graph_break: True, False, or None while nothing has been compiled that tells.
    """

    node_count: int
    traced: int
    graph_break: bool | None
    segments: tuple[SegmentRow, ...]
    breaks: tuple[Break, ...]

    def to_dict(self) -> Mapping[str, Any]:
        """The same as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.node_count} nodes in the file, {self.traced} after folding."]
        if self.graph_break is None:
            lines.append("Nothing is compiled yet: run a call, or warm it, to see segments and breaks.")
        elif not self.graph_break:
            lines.append("No breaks: the whole graph is one program.")
        for row in self.segments:
            shapes = ", ".join(f"{name}:{_shape(shape)}" for name, shape in row.shapes) or "no arguments"
            statics = f", by value {', '.join(row.statics)}" if row.statics else ""
            kept = ", kept" if row.kept else ""
            lines.append(
                f"  segment at {row.position} to {row.stop}: {row.node_count} nodes, {row.kind}{kept} ({shapes}{statics})"
            )
        for item in self.breaks:
            origin = "a graph input" if item.producer is None else f"computed by {item.producer!r}"
            lines.append(
                f"  break {item.id} at {item.position}: {item.op_type} {item.node!r} needs {item.reason}; "
                f"{item.value!r} is {origin}. {item.hint}"
            )
        return "\n".join(lines)


def explain(prepared: PreparedGraph, cache: SegmentCache) -> Explanation:
    """What a prepared graph's cache tells about it. For the thread that owns the cache."""
    held = cache.segments()
    kept = cache.statistics().kept
    rows = tuple(_row(segment, kept=index < kept) for index, segment in enumerate(held))
    breaks = {(*segment.place[:-1], segment.stop): segment.needs for segment in held if segment.needs is not None}
    return Explanation(
        node_count=prepared.model.node_count,
        traced=len(prepared.nodes),
        graph_break=prepared.graph_break,
        segments=rows,
        breaks=tuple(_break(needs) for _, needs in sorted(breaks.items(), key=lambda item: (item[1].position, str(item[0])))),
    )


def _row(segment: Segment, *, kept: bool) -> SegmentRow:
    return SegmentRow(
        position=segment.position,
        stop="end" if segment.needs is None else segment.needs.position,
        node_count=segment.node_count,
        kind="host" if segment.eager else "program" if segment.program is not None else "known",
        shapes=segment.shapes,
        statics=segment.layout.values,
        kept=kept,
    )


def _break(needs: NeedsValue) -> Break:
    return Break(
        id=_break_id(needs),
        position=needs.position,
        node=needs.node,
        op_type=needs.operator.rpartition(":")[2],
        value=needs.value,
        producer=needs.producer,
        reason=needs.reason,
        hint=needs.hint,
    )


def _break_id(needs: NeedsValue) -> str:
    if "depends on values" in needs.reason:
        return "B1"
    kind = needs.operator.rpartition(":")[2]
    return {"If": "B2", "Loop": "B3", "Scan": "B3", "SequenceMap": "B3"}.get(kind, "B4")


def _shape(shape: Any) -> str:
    if shape and isinstance(shape[0], tuple) and len(shape) == 2 and isinstance(shape[1], str):
        return f"{shape[1]}{list(shape[0])}"
    return str(shape)
