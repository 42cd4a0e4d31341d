"""What a compiled run of nodes is, and its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from transmuter_async.compiler.alarms import Alarm
from transmuter_async.compiler.facts import CacheHit, Shapes
from transmuter_async.compiler.tuning import Tuning
from transmuter_async.compiler.values import fingerprint, signature
from transmuter_async.errors import NeedsValue

__all__ = ["Layout", "Making", "Segment", "entry_key"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a segment looks at, so what its key is made of.

    Attributes:
        arguments: Names that enter by shape and dtype.
        values: Names that enter by value: static values, and host values of earlier segments.
    """

    arguments: tuple[str, ...]
    values: tuple[str, ...]


def entry_key(layout: Layout, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a segment with this layout for these values."""
    # Every call of a model comes here: `map` saves the frames of comprehensions.
    read = values.__getitem__
    return (
        tuple(map(signature, map(read, layout.arguments))),
        tuple(map(fingerprint, map(read, layout.values))) if layout.values else (),
    )


@dataclass(frozen=True, slots=True)
class Making:
    """What it took to make a program; the times are zero for one that was read from disk.

    Attributes:
        planning: Nanoseconds in which nodes were walked to find where the segment ends and what it needs.
        tracing: Nanoseconds in which they were traced and lowered to StableHLO.
        compiling: Nanoseconds that XLA took.
        operations: Operations of the StableHLO module that XLA was given.
    """

    planning: int
    tracing: int
    compiling: int
    operations: int

    def __str__(self) -> str:
        size = f"{self.operations:,} operations"
        if not self.compiling:
            return f"{size}, read from disk"
        steps = (("planned", self.planning), ("traced", self.tracing), ("compiled by XLA", self.compiling))
        return f"{size}; {', '.join(f'{name} in {took / 1e9:.2f} s' for name, took in steps)}"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A compiled run of nodes `[index, stop)`.

    Attributes:
        place: The way to its first node: its index, or for one in a body that runs on the host, the way there.
        position: Of its first node, in the file.
        stop: Index of the break node after it; the number of nodes at the end.
        needs: Why it stops there; None at the end.
        layout: With `key` its place in the cache.
        shapes: Of its arguments, for events.
        program: Called with (weights, arguments, seed); None where nothing is computed on the device.
        eager: The nodes run on the host on each call.
        arguments: Names of the program's arguments: those of the layout, less what no program can take (strings).
        outputs: Names of the values that the program returns.
        host_outputs: Values known while tracing that later nodes read.
        alarms: What the number beside the outputs means.
        host_values: Names that became static with this segment.
        node_count: Nodes of the segment that are really computed by the program.
        donated: Arguments that the program consumes.
        lowerings: Forms other than the plain one that its operators take, `(node, operator, name)`.
        tuning: What autotuning chose for it; None while it was not tuned.
        making: What it took to make the program; None without one.
        hit: What an observer is told when a call finds it.
        code_bytes: Of the program, where jax tells.
    """

    place: tuple[Any, ...]
    index: int
    position: int
    stop: int
    needs: NeedsValue | None
    layout: Layout
    key: tuple[Any, ...]
    shapes: Shapes
    program: Any
    eager: bool
    weights: tuple[jax.Array, ...]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    host_outputs: Mapping[str, Any]
    alarms: tuple[Alarm, ...]
    uses_seed: bool
    host_values: tuple[str, ...]
    node_count: int
    donated: tuple[str, ...] = ()
    lowerings: tuple[tuple[str, str, str], ...] = ()
    tuning: Tuning | None = None
    making: Making | None = None
    hit: CacheHit = field(init=False)
    code_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hit", CacheHit(self.position, self.shapes))
        analysis = None if self.program is None else self.program.memory_analysis()  # takes jax 0.1 ms
        object.__setattr__(self, "code_bytes", int(getattr(analysis, "generated_code_size_in_bytes", 0)))
