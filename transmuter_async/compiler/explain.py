"""Where a graph breaks, why, and what the user can do about it; and what the cache holds for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transmuter_async.compiler.axes import Mixes
from transmuter_async.compiler.cache import SegmentCache, order_of
from transmuter_async.compiler.dense import rewritten
from transmuter_async.compiler.picture import draw
from transmuter_async.compiler.prepare import PreparedGraph
from transmuter_async.compiler.scales import merged
from transmuter_async.compiler.segment import Making, Segment
from transmuter_async.compiler.tuning import Trial
from transmuter_async.errors import NeedsValue

__all__ = ["Break", "Explanation", "LoweringRow", "PlaceRow", "SegmentRow", "Timings", "TunedRow", "explain"]


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
        count: How often it was reached, as far as measured.
        nanoseconds: What its node took in all.
        gain: What it would save to be rid of it, by what was measured; None while nothing was.
    """

    id: str
    position: int
    node: str
    op_type: str
    value: str
    producer: str | None
    reason: str
    hint: str
    count: int = 0
    nanoseconds: int = 0
    gain: str | None = None


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """One stretch of the graph between breaks, with all the programs that were compiled for it.

    Attributes:
        position: Of its first node, in the file.
        stop: Position of the break node after it, or "end".
        inner: Whether it lies in the body of an If or Loop that runs on the host.
        node_count: Nodes that its largest program computes.
        programs: Compiled programs that the cache holds, kept ones included.
        host: Signatures that run on the host because they are small.
        hits: Look-ups that found a segment, since the cache was made; likewise `misses` and `evictions`.
        runs: Runs that were measured.
        nanoseconds: What they took in all.
        compile_nanoseconds: What its compiles took in all.
    """

    position: int
    stop: int | str
    inner: bool
    node_count: int
    programs: int
    host: int
    hits: int
    misses: int
    evictions: int
    runs: int = 0
    nanoseconds: int = 0
    compile_nanoseconds: int = 0


Timings = Mapping[tuple[str, int], tuple[int, int]]
"""Count and nanoseconds by `("segment" | "break" | "compile", position)`, as whoever owns the clock measured them."""


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
        making: What it took to make the program; None without one.
        code_bytes: Of the program, where jax tells.
    """

    position: int
    stop: int | str
    node_count: int
    kind: str
    shapes: tuple[tuple[str, Any], ...]
    statics: tuple[str, ...]
    kept: bool
    making: Making | None = None
    code_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoweringRow:
    """The forms that one node takes in programs.

    Attributes:
        node: Its name.
        operator: Its operator.
        names: What it takes; what each name means is in `lowering.LOWERINGS`.
    """

    node: str
    operator: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TunedRow:
    """What autotuning chose for one program.

    Attributes:
        position: Of its first node, in the file.
        shapes: Sorted `(name, (shape, dtype))` of its arguments.
        chosen: What is used, "default" where nothing was faster; None while it is not tuned.
        trials: What was tried, with the times of the shortest calls; the default program was called in the same turns.
        values: "call" where inputs were those of a call, "drawn" where only their shapes were known.
        nanoseconds: What tuning took in all.
        note: Why nothing was tried; empty without.
    """

    position: int
    shapes: tuple[tuple[str, Any], ...]
    chosen: str | None
    trials: tuple[Trial, ...] = ()
    values: str = ""
    nanoseconds: int = 0
    note: str = ""

    def lines(self) -> list[str]:
        """In words."""
        shapes = ", ".join(f"{name}:{_shape(shape)}" for name, shape in self.shapes) or "no arguments"
        head = f"  tuned at {self.position} ({shapes})"
        if self.chosen is None:
            return [f"{head}: not yet"]
        if self.note:
            return [f"{head}: {self.chosen}; nothing was tried: {self.note}"]
        inputs = "inputs of a call" if self.values == "call" else "inputs that were drawn"
        lines = [f"{head}: {self.chosen} ({self.nanoseconds / 1e9:.1f} s, with {inputs})"]
        for trial in self.trials:
            if trial.ratio is None:
                what = f"OUT, {trial.out}" if trial.wrong else str(trial.out)
            else:
                ours, default = (trial.nanoseconds or 0) / 1e3, (trial.default_nanoseconds or 0) / 1e3
                what = f"{ours:.0f} µs, the default {default:.0f} µs ({trial.ratio:.2f})"
                what += f"; {trial.out}" if trial.out else ""
            lines.append(f"    {trial.name}: {what}")
        return lines


@dataclass(frozen=True, slots=True)
class Explanation:
    """Segments and breaks of a compiled model, as far as calls and specs have found them.

    Attributes:
        node_count: Top-level nodes of the file.
        traced: Nodes left after passes and folding.
        graph_break: True, False, or None while nothing has been compiled that tells.
        padding: Buckets in words, None without.
        added: Those of them that the file does not have.
        dense: NonZero nodes that are gone, since what follows works on all rows.
        mixes: Operators that mix rows or read padding, which `allow_mixing=True` accepts.
        notes: What else there is to say: devices, donated inputs.
        lowerings: Where programs compute an operator in another form than the plain one, in the order of nodes.
        tuned: What autotuning chose for each program; empty without `autotune=True`.
        verbose: Whether the text tells both.
    """

    node_count: int
    traced: int
    graph_break: bool | None
    segments: tuple[SegmentRow, ...]
    breaks: tuple[Break, ...]
    places: tuple[PlaceRow, ...] = ()
    padding: str | None = None
    mixes: tuple[Mixes, ...] = ()
    dense: tuple[str, ...] = ()
    added: int = 0
    notes: tuple[str, ...] = ()
    lowerings: tuple[LoweringRow, ...] = ()
    tuned: tuple[TunedRow, ...] = ()
    verbose: bool = False

    def to_dict(self) -> Mapping[str, Any]:
        """The same as plain values, ready for JSON."""
        return asdict(self)

    def svg(self) -> str:
        """The graph as a strip of segments and breaks, an SVG document."""
        return draw(self)

    def ranked(self) -> tuple[Break, ...]:
        """The breaks, the most expensive one by what was measured first."""
        return tuple(sorted(self.breaks, key=lambda item: -self._cost(item)))

    def _cost(self, item: Break) -> int:
        after = [place for place in self.places if place.position > item.position]
        again = after[0].compile_nanoseconds if after and after[0].misses > 1 else 0
        return item.nanoseconds + again

    def __str__(self) -> str:
        lines = [f"{self.node_count} nodes in the file, {self.traced - self.added} of them left after folding."]
        if self.added:
            by = "the dense rewrite" if self.dense else "passes over the graph"
            lines[0] = f"{lines[0][:-1]}, and {self.added} added by {by}."
        if self.graph_break is None:
            lines.append("Nothing is compiled yet: run a call, or warm it, to see segments and breaks.")
        elif not self.graph_break:
            lines.append("No breaks: the whole graph is one program.")
        if self.padding is not None:
            lines.append(self.padding)
        lines.extend(self.notes)
        if self.dense:
            shown = ", ".join(map(repr, self.dense[:4])) + (
                f" and {len(self.dense) - 4} more" if len(self.dense) > 4 else ""
            )
            lines.append(f"Dense: all rows instead of those that NonZero {shown} selects, with the same result.")
        lines.extend(f"  mixes, allowed by allow_mixing=True: {each}" for each in self.mixes)
        for row in self.segments:
            shapes = ", ".join(f"{name}:{_shape(shape)}" for name, shape in row.shapes) or "no arguments"
            statics = f", by value {', '.join(row.statics)}" if row.statics else ""
            kept = ", kept" if row.kept else ""
            lines.append(
                f"  segment at {row.position} to {row.stop}: {row.node_count} nodes, {row.kind}{kept} ({shapes}{statics})"
            )
            if self.verbose and row.making is not None:
                code = f"; {row.code_bytes / 1e3:.0f} kB of code" if row.code_bytes else ""
                lines.append(f"    {row.making}{code}")
        for item in self.ranked():
            origin = "a graph input" if item.producer is None else f"computed by {item.producer!r}"
            lines.append(
                f"  break {item.id} at {item.position}: {item.op_type} {item.node!r} needs {item.reason}; "
                f"{item.value!r} is {origin}. {item.hint}" + (f" Would save {item.gain}." if item.gain else "")
            )
        if self.verbose:
            lines.extend(f"  {row.operator} {row.node!r}: {', '.join(row.names)}" for row in self.lowerings)
            if not self.lowerings:
                lines.append("  Every operator of the programs takes its plain form.")
            for tuned in self.tuned:
                lines.extend(tuned.lines())
        return "\n".join(lines)


def explain(prepared: PreparedGraph, cache: SegmentCache, timings: Timings | None = None) -> Explanation:
    """What a prepared graph's cache tells about it. For the thread that owns the cache."""
    timings = timings or {}
    held = cache.segments()
    kept = cache.statistics().kept
    rows = tuple(_row(segment, kept=index < kept) for index, segment in enumerate(held))
    breaks = {(*segment.place[:-1], segment.stop): segment.needs for segment in held if segment.needs is not None}
    breaks |= cache.bare_breaks
    places = _places(held, cache, timings)
    return Explanation(
        node_count=prepared.model.node_count,
        traced=len(prepared.nodes),
        graph_break=prepared.graph_break,
        segments=rows,
        padding=None if prepared.padding is None else prepared.padding.describe(),
        dense=rewritten(prepared.graph),
        added=_added(prepared),
        mixes=() if prepared.padding is None else prepared.padding.mixes,
        notes=_notes(prepared, held),
        breaks=tuple(
            _break(needs, places, timings)
            for _, needs in sorted(breaks.items(), key=lambda item: (item[1].position, str(item[0])))
        ),
        places=places,
        lowerings=_lowerings(held),
        tuned=_tuned(held) if prepared.options.autotune else (),
    )


def _tuned(held: Sequence[Segment]) -> tuple[TunedRow, ...]:
    rows = []
    for segment in held:
        found = segment.tuning
        if segment.program is None:
            continue
        if found is None:
            rows.append(TunedRow(segment.position, segment.shapes, None))
        else:
            parts = (found.chosen, found.trials, found.values, found.nanoseconds, found.note)
            rows.append(TunedRow(segment.position, segment.shapes, *parts))
    return tuple(rows)


def _lowerings(held: Sequence[Segment]) -> tuple[LoweringRow, ...]:
    """By node, over all programs that are held, those of one graph place after the other."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for segment in sorted(held, key=lambda each: order_of(each.place)):
        for node, operator, name in segment.lowerings:
            names.setdefault((node, operator), {})[name] = None
    return tuple(LoweringRow(node, operator, tuple(found)) for (node, operator), found in names.items())


def _notes(prepared: PreparedGraph, held: Sequence[Segment]) -> tuple[str, ...]:
    notes = []
    if prepared.placement.mesh is not None:
        notes.append(f"Programs over {len(prepared.placement.devices)} devices: {prepared.placement}.")
    if prepared.wide:
        notes.append("Programs compute float16 as float32, and round what leaves them.")
    if changed := merged(prepared.graph):
        count = f"{len(changed)} convolution" + "s" * (len(changed) > 1)
        notes.append(f"The weights of {count} hold the factors and offsets of channels that follow them in the file.")
    if prepared.options.donate:
        used = sorted({name for segment in held for name in segment.donated})
        notes.append(
            f"Donated: {', '.join(prepared.options.donate)}; consumed by programs: {', '.join(used) or 'none yet'}."
        )
    return tuple(notes)


def _added(prepared: PreparedGraph) -> int:
    """How many of the nodes that are left come from no node of the file."""
    return sum((node.name, node.op_type) not in prepared.declared.nodes for node in prepared.nodes)


def _row(segment: Segment, *, kept: bool) -> SegmentRow:
    return SegmentRow(
        position=segment.position,
        stop="end" if segment.needs is None else segment.needs.position,
        node_count=segment.node_count,
        kind="host" if segment.eager else "program" if segment.program is not None else "known",
        shapes=segment.shapes,
        statics=segment.layout.values,
        kept=kept,
        making=segment.making,
        code_bytes=segment.code_bytes,
    )


def _places(held: Sequence[Segment], cache: SegmentCache, timings: Timings) -> tuple[PlaceRow, ...]:
    counts = {row.place: row for row in cache.statistics().positions}
    rows = []
    for place, group in itertools.groupby(sorted(held, key=lambda s: order_of(s.place)), key=lambda s: s.place):
        segments = list(group)
        first, count = segments[-1], counts.get(place)
        runs, nanoseconds = timings.get(("segment", first.position), (0, 0))
        rows.append(
            PlaceRow(
                position=first.position,
                stop="end" if first.needs is None else first.needs.position,
                inner=len(place) > 1,
                node_count=max(segment.node_count for segment in segments),
                programs=sum(segment.program is not None for segment in segments),
                host=sum(segment.eager for segment in segments),
                hits=0 if count is None else count.hits,
                misses=0 if count is None else count.misses,
                evictions=0 if count is None else count.evictions,
                runs=runs,
                nanoseconds=nanoseconds,
                compile_nanoseconds=timings.get(("compile", first.position), (0, 0))[1],
            )
        )
    return tuple(rows)


def _gain(position: int, places: Sequence[PlaceRow], timings: Timings) -> str | None:
    """What the hint would gain: the node's own time on each call, and compiles that only its values cause."""
    count, nanoseconds = timings.get(("break", position), (0, 0))
    if not count:
        return None
    gain = f"{nanoseconds / count / 1e3:.0f} µs a call"
    after = next((place for place in places if place.position > position), None)
    if after is not None and after.misses > 1 and after.compile_nanoseconds:
        each = after.compile_nanoseconds / after.misses / 1e9
        gain += (
            f", and the compile of the segment after it ({each:.2f} s) on all but the first of {after.misses} misses"
        )
    return gain


def _break(needs: NeedsValue, places: Sequence[PlaceRow], timings: Timings) -> Break:
    count, nanoseconds = timings.get(("break", needs.position), (0, 0))
    return Break(
        id=_break_id(needs),
        position=needs.position,
        node=needs.node,
        op_type=needs.operator.rpartition(":")[2],
        value=needs.value,
        producer=needs.producer,
        reason=needs.reason,
        hint=needs.hint,
        count=count,
        nanoseconds=nanoseconds,
        gain=_gain(needs.position, places, timings),
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
