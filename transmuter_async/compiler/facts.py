"""What the compiler tells while it works: plain facts, handed to the `observe` callable of whoever runs it.

No clock and no bus here; the actor stamps them, nests them and makes events of them (see the telemetry page).
`observe` may raise, to stop a call whose deadline has passed: the compiler lets it through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BreakDone",
    "BreakFailed",
    "BreakStarted",
    "CacheAdvice",
    "CacheEvict",
    "CacheHit",
    "CacheMiss",
    "DiskEvicted",
    "DiskFailed",
    "DiskRejected",
    "Fact",
    "Observe",
    "SegmentFailed",
    "SegmentReady",
    "SegmentStarted",
    "Shapes",
    "unobserved",
]

Shapes = tuple[tuple[str, Any], ...]
"""Sorted `(name, (shape, dtype name))` of a segment's arguments; a sequence has a tuple of `(shape, dtype name)`."""


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A call found a compiled segment."""

    position: int
    shapes: Shapes


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """A call found none; a compile follows. `cold`: the call does not wait for it, it goes on on the host form."""

    position: int
    shapes: Shapes
    cold: bool = False


@dataclass(frozen=True, slots=True)
class CacheEvict:
    """A new segment took the place of the least recently used one, whose shapes these are."""

    position: int
    shapes: Shapes
    cache_size: int


@dataclass(frozen=True, slots=True)
class CacheAdvice:
    """A position keeps missing on one axis: `advice` is the line to paste; once for each axis."""

    position: int
    axis: str
    count: int
    advice: str


@dataclass(frozen=True, slots=True)
class SegmentStarted:
    """Tracing and compiling of a segment start; `tuning`: to try what that name says, beside the program that is used."""

    position: int
    shapes: Shapes
    tuning: str | None = None


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """A segment is ready.

    Attributes:
        shapes: Of the compiled segment's arguments; fewer than at the start where names became static.
        stop: Position of the break node where it ends, or "end".
        compiled: False for a small segment that is left to run eagerly, and for one that was compiled already.
        reason: The value that the break node needs, in words; None at the end.
        host_values: Names that became static values of this position.
        disk_cache: "hit", "miss", "rejected", or None without a cache folder.
    """

    position: int
    shapes: Shapes
    stop: int | str
    compiled: bool
    reason: str | None
    host_values: tuple[str, ...]
    disk_cache: str | None


@dataclass(frozen=True, slots=True)
class SegmentFailed:
    """Tracing or compiling failed."""

    position: int
    shapes: Shapes
    error: BaseException


@dataclass(frozen=True, slots=True)
class BreakStarted:
    """A break node starts to run eagerly."""

    position: int
    node: str
    op_type: str


@dataclass(frozen=True, slots=True)
class BreakDone:
    """It has returned."""

    position: int
    node: str
    op_type: str


@dataclass(frozen=True, slots=True)
class BreakFailed:
    """It raised."""

    position: int
    node: str
    op_type: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class DiskRejected:
    """A file of the disk cache must not be used; it is compiled again and replaced. The reason names the file."""

    reason: str


@dataclass(frozen=True, slots=True)
class DiskFailed:
    """A file of the disk cache could not be written. The call goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class DiskEvicted:
    """A file left the disk cache for room."""

    bytes: int
    reason: str


Fact = (
    CacheHit
    | CacheMiss
    | CacheEvict
    | CacheAdvice
    | SegmentStarted
    | SegmentReady
    | SegmentFailed
    | BreakStarted
    | BreakDone
    | BreakFailed
    | DiskRejected
    | DiskFailed
    | DiskEvicted
)
Observe = Callable[[Fact], None]


def unobserved(fact: Fact) -> None:
    """An `observe` for callers that want no facts."""
