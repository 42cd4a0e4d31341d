"""Why a call would compile, and what would spare it: the nearest cached key, and buckets for an axis that keeps changing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transmuter_async.compiler.facts import CacheAdvice, Shapes
from transmuter_async.compiler.segment import Layout, Segment, entry_key
from transmuter_async.compiler.values import shapes_of
from transmuter_async.graph import TensorType

if TYPE_CHECKING:
    from transmuter_async.compiler.cache import SegmentCache
    from transmuter_async.compiler.prepare import PreparedGraph
    from transmuter_async.compiler.prepared import Prepared

__all__ = ["Advisor", "Difference", "Why", "buckets_for", "why"]

MISSES_BEFORE_ADVICE = 4
"""Misses of one position that differ from each other on one axis only, before the advice is given."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a call differs from a cached key.

    Attributes:
        name: The argument.
        axis: The axis whose size differs; None where rank, dtype or value do.
        dimension: The axis' name in the graph, or `name[axis]`; the argument's name where `axis` is None.
        cached: What the cached key has.
        called: What the call has.
    """

    name: str
    axis: int | None
    dimension: str
    cached: Any
    called: Any


@dataclass(frozen=True, slots=True)
class Why:
    """Whether a call would find its first segment, and what differs from the nearest cached one if not.

    Attributes:
        hit: "kept", "cached", or None for a miss.
        position: Of the segment that was looked up: 0. What later ones get depends on values that only a run computes.
        shapes: Of the call's arguments.
        differences: From the nearest cached key; empty on a hit, or when nothing is cached.
        later: Positions of cached segments after breaks.
        advice: The line to paste that would make the call a hit, None where there is none.
    """

    hit: str | None
    position: int
    shapes: Shapes
    differences: tuple[Difference, ...]
    later: tuple[int, ...]
    advice: str | None

    def __str__(self) -> str:
        if self.hit is not None:
            lines = [f"hit: the program at position {self.position} is {self.hit}"]
        elif not self.differences:
            lines = [f"miss: nothing is compiled at position {self.position} yet"]
        else:
            said = ", ".join(f"{d.dimension} {d.cached} → {d.called}" for d in self.differences)
            lines = [f"miss at position {self.position}: {said}"]
        if self.advice:
            lines.append(self.advice)
        if self.later:
            lines.append(f"segments at {', '.join(map(str, self.later))} follow breaks: their keys are known when it runs")
        return "\n".join(lines)


def why(prepared: Prepared, cache: SegmentCache, inputs: Mapping[str, Any]) -> Why:
    """Tell, without running, whether a call would find its program. For the thread that owns the cache.

    Args:
        prepared: The graph.
        cache: Its cache; nothing in it changes, not even what was used last.
        inputs: As a call would give them.
    """
    values = prepared.admitted(inputs)
    shapes = tuple(shapes_of(name, values[name]) for name in sorted(values))
    held = cache.segments()
    first = [segment for segment in held if segment.place == (0,)]
    later = tuple(sorted({segment.position for segment in held if segment.place != (0,)}))
    for segment in first:
        if _fits(segment.layout, values) and entry_key(segment.layout, values) == segment.key:
            kept = cache.kept(values) is segment
            return Why("kept" if kept else "cached", 0, shapes, (), later, None)
    differences = min((_differences(prepared, segment, values) for segment in first), key=len, default=())
    return Why(None, 0, shapes, differences, later, _advice(differences))


def _fits(layout: Layout, values: Mapping[str, Any]) -> bool:
    return all(name in values for name in (*layout.arguments, *layout.values))


def _differences(prepared: PreparedGraph, segment: Segment, values: Mapping[str, Any]) -> tuple[Difference, ...]:
    found: list[Difference] = []
    for name, cached in segment.shapes:
        if name not in values:
            continue
        _, now_described = shapes_of(name, values[name])
        if not _is_tensor(cached) or not _is_tensor(now_described):
            if cached != now_described:
                found.append(Difference(name, None, name, cached, now_described))
            continue
        (shape, dtype), (called, called_dtype) = cached, now_described
        if dtype != called_dtype:
            found.append(Difference(name, None, name, dtype, called_dtype))
        if len(shape) != len(called):
            found.append(Difference(name, None, name, shape, called))
            continue
        for axis, (was, now) in enumerate(zip(shape, called, strict=True)):
            dimension = axis_name(prepared, name, axis)
            if was != now and all(dimension != other.dimension for other in found):
                found.append(Difference(name, axis, dimension, was, now))
    for place, name in enumerate(segment.layout.values):
        if name in values:
            key = entry_key(Layout((), (name,)), values)[1][0]
            if key != segment.key[1][place]:
                found.append(Difference(name, None, name, "another value", values[name]))
    return tuple(found)


def _advice(differences: Sequence[Difference]) -> str | None:
    moved = [d for d in differences if d.axis is not None]
    if not moved or len(moved) != len(differences):
        return None
    buckets = {d.dimension: buckets_for((d.cached, d.called)) for d in moved}
    text = "; ".join(f"a bucket of {sizes[-1]} would serve both" for sizes in buckets.values())
    return f"{text}: batching=Batching(buckets={buckets!r})"


def buckets_for(sizes: Iterable[int]) -> list[int]:
    """Powers of two, at least 8, each of which some of the sizes would be padded to."""
    return sorted({max(8, 1 << max(0, int(size) - 1).bit_length()) for size in sizes})


def axis_name(prepared: PreparedGraph, name: str, axis: int) -> str:
    """The graph's name for an axis of a value, or `name[axis]`."""
    for value in prepared.graph.inputs:
        if value.name == name and isinstance(value.type, TensorType) and value.type.shape is not None:
            dim = value.type.shape[axis] if axis < len(value.type.shape) else None
            if isinstance(dim, str):
                return dim
    return f"{name}[{axis}]"


def _is_tensor(described: Any) -> bool:
    """Whether the shapes of a fact describe a tensor: `(shape, dtype name)`, while a sequence has one for each element."""
    return len(described) == 2 and isinstance(described[1], str)


@dataclass(slots=True)
class _Seen:
    last: dict[str, Any] | None = None
    sizes: dict[str, set[int]] = field(default_factory=dict)
    advised: set[str] = field(default_factory=set)


class Advisor:
    """Watches the misses of a cache. Owned by it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], _Seen] = {}

    def missed(self, prepared: PreparedGraph, place: tuple[Any, ...], position: int, shapes: Shapes) -> CacheAdvice | None:
        """Take note of a miss; the advice, once for each axis, when one axis is what keeps changing."""
        seen = self._seen.setdefault(place, _Seen())
        now = dict(shapes)
        before, seen.last = seen.last, now
        if before is None or before.keys() != now.keys():
            return None
        moved: dict[str, tuple[int, int]] = {}
        for name, described in now.items():
            if described == before[name]:
                continue
            if not _is_tensor(described) or not _is_tensor(before[name]):
                return None
            (shape, dtype), (was, was_dtype) = described, before[name]
            if dtype != was_dtype or len(was) != len(shape):
                return None
            for axis, (a, b) in enumerate(zip(was, shape, strict=True)):
                if a != b:
                    moved.setdefault(axis_name(prepared, name, axis), (a, b))
        if len(moved) != 1:
            return None
        [(dimension, pair)] = moved.items()
        sizes = seen.sizes.setdefault(dimension, set())
        sizes.update(pair)
        if len(sizes) < MISSES_BEFORE_ADVICE or dimension in seen.advised:
            return None
        seen.advised.add(dimension)
        line = f"batching=Batching(buckets={{{dimension!r}: {buckets_for(sizes)}}})"
        return CacheAdvice(position, dimension, len(sizes), line)
