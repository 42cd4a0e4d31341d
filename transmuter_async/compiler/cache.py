"""The cache of compiled segments: for each position the most recently used ones, and the kept function beside them.

No locks: the actor's run thread is its one owner. A segment lives exactly as long as its entry (and the calls that run
it), so eviction frees the program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transmuter_async.compiler.advice import Advisor
from transmuter_async.compiler.facts import CacheEvict, Observe, Shapes
from transmuter_async.compiler.segment import Layout, Making, Segment, entry_key
from transmuter_async.errors import NeedsValue

__all__ = ["CacheStatistics", "PositionStatistics", "ProgramStatistics", "SegmentCache", "order_of"]


@dataclass(slots=True)
class _Position:
    position: int = 0
    layouts: list[Layout] = field(default_factory=list)
    segments: OrderedDict[tuple[Layout, tuple[Any, ...]], Segment] = field(default_factory=OrderedDict)
    statics: frozenset[str] = frozenset()
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class PositionStatistics:
    """Counts of one place since the cache was made or cleared; `place` is the way to its first node."""

    place: tuple[Any, ...]
    position: int
    segments: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class ProgramStatistics:
    """One program that the cache holds: the shapes of its arguments, what it took to make it, and the bytes of its code."""

    position: int
    shapes: Shapes
    making: Making
    code_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What the cache holds, and its counts. `kept` is the number of functions kept outside of the LRU, `made` tells of each program."""

    segments: int
    programs: int
    kept: int
    hits: int
    misses: int
    evictions: int
    positions: tuple[PositionStatistics, ...]
    made: tuple[ProgramStatistics, ...] = ()


@dataclass(frozen=True, slots=True)
class _Last:
    segment: Segment
    reads: tuple[tuple[str, tuple[int, ...], np.dtype, bytes | None], ...]
    held: _Position | None


class SegmentCache:
    """Segments by position and key, at most `cache_size` for each position, least recently used out first.

    Attributes:
        code_bytes: Of the programs held, the kept ones too, where jax tells.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.code_bytes = 0
        self._positions: dict[tuple[Any, ...], _Position] = {}
        self.advisor = Advisor()
        self.bare_breaks: dict[tuple[Any, ...], NeedsValue] = {}  # breaks that no segment leads to
        self._kept: dict[Layout, dict[tuple[Any, ...], Segment]] = {}
        self._last: _Last | None = None

    def like_last(self, values: Mapping[str, Any], observe: Observe) -> Segment | None:
        """The segment that `remember` was told of, if these arrays lead to it again: most calls are like the one before.

        It counts and tells what `find` and its caller would, without making a key: where the processor has done something else
        meanwhile, each object that is not touched saves part of a microsecond.
        """
        last = self._last
        if last is None:
            return None
        for name, shape, dtype, data in last.reads:
            value = values.get(name)
            if type(value) is not np.ndarray or value.shape != shape or value.dtype is not dtype:
                return None
            if data is not None and value.tobytes() != data:
                return None
        if last.held is not None:
            last.held.hits += 1
            observe(last.segment.hit)
        return last.segment

    def remember(self, segment: Segment, values: Mapping[str, Any], *, kept: bool) -> None:
        """For `like_last`: this segment is the most recently used one of the graph's first position, and all of the call.

        Args:
            segment: With a program and without host values of its own.
            values: The arrays that led to it.
            kept: It is the kept function, whose calls are not counted.
        """
        layout = segment.layout
        if any(values[name].dtype == object for name in layout.values):
            return
        reads = [(name, values[name].shape, values[name].dtype, None) for name in layout.arguments]
        fixed = [(name, values[name].shape, values[name].dtype, values[name].tobytes()) for name in layout.values]
        self._last = _Last(segment, (*reads, *fixed), None if kept else self._positions[segment.place])

    def kept(self, values: Mapping[str, Any]) -> Segment | None:
        """The kept function for these inputs of the graph, if it is the one."""
        for layout, segments in self._kept.items():
            found = segments.get(entry_key(layout, values))
            if found is not None:
                return found
        return None

    def find(self, place: tuple[Any, ...], values: Mapping[str, Any]) -> Segment | None:
        """The segment at a position for these values; it becomes the most recently used one."""
        held = self._positions.get(place)
        if held is None:
            return None
        for layout in held.layouts:
            if not all(name in values for name in layout.arguments + layout.values):
                continue
            key = (layout, entry_key(layout, values))
            found = held.segments.get(key)
            if found is not None:
                held.segments.move_to_end(key)
                self._last = None
                return found
        return None

    def stop(self, place: tuple[Any, ...]) -> int | None:
        """Where the segments of a place stop, as the most recently used one does; None while there is none."""
        held = self._positions.get(place)
        return next(reversed(held.segments.values())).stop if held is not None and held.segments else None

    def statics(self, place: tuple[Any, ...]) -> frozenset[str]:
        """Names that are static values of a position, as far as known."""
        held = self._positions.get(place)
        return frozenset() if held is None else held.statics

    def count(self, place: tuple[Any, ...], *, hit: bool) -> None:
        """Count a lookup."""
        held = self._positions.get(place)
        if held is None:
            held = self._positions[place] = _Position()
        if hit:
            held.hits += 1
        else:
            held.misses += 1

    def put(self, segment: Segment, observe: Observe, *, keep: bool = False) -> None:
        """Store a segment, telling of an eviction.

        Args:
            segment: From a `CompileJob`.
            observe: Is told `CacheEvict`.
            keep: Keep it outside of the LRU (the function compiled for the shapes given to `compile`); only a graph
                without breaks has one.
        """
        self._last = None
        held = self._positions.setdefault(segment.place, _Position(segment.position))
        held.position = segment.position
        held.statics |= frozenset(segment.host_values)
        if keep and segment.place == (0,) and segment.needs is None:
            self._replace(self._kept.setdefault(segment.layout, {}), segment.key, segment)
            return
        if segment.layout not in held.layouts:
            held.layouts.append(segment.layout)
        key = (segment.layout, segment.key)
        self._replace(held.segments, key, segment)
        held.segments.move_to_end(key)
        while len(held.segments) > self.cache_size:
            _, evicted = held.segments.popitem(last=False)
            self.code_bytes -= evicted.code_bytes
            held.evictions += 1
            if all(layout != evicted.layout for layout, _ in held.segments):
                held.layouts.remove(evicted.layout)
            observe(CacheEvict(evicted.position, evicted.shapes, self.cache_size))

    def swap(self, segment: Segment) -> bool:
        """Put a segment in the place of one that is held under the same key; False where there is none any more."""
        kept = self._kept.get(segment.layout, {})
        if segment.place == (0,) and segment.key in kept:
            self._last = None
            self._replace(kept, segment.key, segment)
            return True
        held = self._positions.get(segment.place)
        key = (segment.layout, segment.key)
        if held is None or key not in held.segments:
            return False
        self._last = None
        self._replace(held.segments, key, segment)
        return True

    def _replace(self, held: dict[Any, Segment], key: Any, segment: Segment) -> None:
        before = held.get(key)
        self.code_bytes += segment.code_bytes - (0 if before is None else before.code_bytes)
        held[key] = segment

    def clear(self) -> None:
        """Drop every segment, the kept ones too; counts start again."""
        held: list[dict[Any, Segment]] = [*self._kept.values(), *(each.segments for each in self._positions.values())]
        self._positions.clear()
        self._kept.clear()
        self._last = None
        self.bare_breaks.clear()
        self.code_bytes = 0
        for segments in held:
            while segments:
                # One by one: XLA takes some 10 ms to free a program, with the interpreter's lock in hand.
                segments.popitem()

    def segments(self) -> tuple[Segment, ...]:
        """Everything held, in graph order, least recently used first; kept functions first of all."""
        kept = [segment for segments in self._kept.values() for segment in segments.values()]
        cached = [
            s for place in sorted(self._positions, key=order_of) for s in self._positions[place].segments.values()
        ]
        return (*kept, *cached)

    def statistics(self) -> CacheStatistics:
        """Counts, for `explain` and `statistics()`."""
        segments = self.segments()
        positions = tuple(
            PositionStatistics(
                place=place,
                position=held.position,
                segments=len(held.segments),
                hits=held.hits,
                misses=held.misses,
                evictions=held.evictions,
            )
            for place, held in sorted(self._positions.items(), key=lambda item: order_of(item[0]))
        )
        return CacheStatistics(
            segments=len(segments),
            programs=sum(segment.program is not None for segment in segments),
            kept=sum(map(len, self._kept.values())),
            hits=sum(p.hits for p in positions),
            misses=sum(p.misses for p in positions),
            evictions=sum(p.evictions for p in positions),
            positions=positions,
            made=tuple(
                ProgramStatistics(s.position, s.shapes, s.making, s.code_bytes)
                for s in segments
                if s.making is not None
            ),
        )


def order_of(place: tuple[Any, ...]) -> tuple[str, ...]:
    """Graph order of places, which mix indices and attribute names."""
    return tuple(f"{part:08d}" if isinstance(part, int) else str(part) for part in place)
