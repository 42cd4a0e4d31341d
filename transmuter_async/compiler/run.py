"""The state of one pass over nodes: values by name, what is counted, shadowed and lifted, and the limits that hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.compiler.alarms import Alarm
from transmuter_async.graph import Node
from transmuter_async.operators import RECIPES, ChannelsLast, Half, first_alarm

__all__ = [
    "FOLD_BYTES",
    "LIFT_BYTES",
    "MAX_ELEMENTS",
    "MAX_VISITS",
    "SHADOW_ELEMENTS",
    "Opaque",
    "Run",
    "Scope",
    "has_traced",
    "is_opaque",
]

MAX_ELEMENTS = 1 << 30
"""Elements of any one planned tensor: sizes may come from a stranger's file, or from a value at a break."""

FOLD_BYTES = 64 << 10
"""Known values larger than this are computed by the program, not folded into it."""

MAX_VISITS = 1 << 20
"""Nodes that one pass may walk: the body of a loop is tried before it is traced, so loops in loops in loops multiply."""

SHADOW_ELEMENTS = 4096
"""Values of more elements are not followed on the host while a segment is planned."""

LIFT_BYTES = 256
"""Known values larger than this enter a program as an argument, not as a constant."""


class Opaque:
    """Stands for a value that a trace can neither know nor compute with."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "a value that only exists when the program runs"


class Scope:
    """Values by name; a subgraph's scope sees those of the graphs around it. `reads` notes what was read of an outermost one."""

    __slots__ = ("outer", "reads", "values")

    def __init__(
        self, values: dict[str, Any] | None = None, *, outer: Scope | None = None, reads: set[str] | None = None
    ) -> None:
        self.values = {} if values is None else values
        self.outer = outer
        self.reads = reads

    def read(self, name: str) -> Any:
        """The value of a name; KeyError for one that is not defined."""
        if name in self.values:
            if self.reads is not None:
                self.reads.add(name)
            value = self.values[name]
            if isinstance(value, Half):
                value = value.rounded()
            return value.plain() if isinstance(value, ChannelsLast) else value
        if self.outer is None:
            raise KeyError(name)
        return self.outer.read(name)

    def as_it_lies(self, name: str) -> Any:
        """The same, but a `ChannelsLast` or `Half` value is given as such."""
        scope: Scope | None = self
        while scope is not None:
            if isinstance(found := scope.values.get(name), (ChannelsLast, Half)):
                return found
            scope = None if name in scope.values else scope.outer
        return self.read(name)


@dataclass(slots=True)
class Run:
    """One pass over nodes: a host run, a plan, or the trace of a program. Owned by one thread.

    Attributes:
        tracing: Whether JAX values are computed with. Off, everything is numpy.
        seed: The run's random key, (2,) uint32, host or traced.
        bounds: "check", "clamp" or "nan".
        shadows: While planning, `id(tracer) -> (tracer, its value in this call, names it comes from)`; else None.
        statics: While planning, the arguments that turned out to be needed on the host.
        lift: Gives the argument that stands for a large known array.
        weights: By `id` of an initializer or Constant of a body: what stands for it, where the caller gives weights of its own.
        producers: Node by output name, for the text of breaks.
        lowerings: Names of the forms that operators may take, see `operators.lowering`; none: plain ones.
        taken: What was taken, `(node, operator, name of the lowering)`.
        wide: Whether float16 is computed as float32, see `operators.half`.
        prepare: Gives what a recipe makes of weights, once for all programs; None where it would take too much memory.
        gave_turn: `time.monotonic()` when the trace last let other threads have the interpreter.
        fold_limit: Where constants are folded, the bytes that a result may take: above them `TooLargeToFold` is raised.
    """

    tracing: bool
    seed: Any = field(default_factory=lambda: np.zeros(2, np.uint32))
    bounds: str = "check"
    nonfinite: str = "ignore"
    platform: str = "cpu"
    shadows: dict[int, tuple[Any, np.ndarray, frozenset[str]]] | None = None
    statics: set[str] = field(default_factory=set)
    lift: Callable[[np.ndarray], Any] = lambda array: array
    weights: Mapping[int, Any] = field(default_factory=dict)
    producers: Mapping[str, Node] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)
    alarm: Any = None
    iterations: tuple[Any, ...] = ()
    used_seed: bool = False
    warned: bool = False
    traced_nodes: int = 0
    depth: int = 0
    lowerings: frozenset[str] = frozenset()
    taken: dict[tuple[str, str, str], None] = field(default_factory=dict)
    prepare: Callable[[tuple[Any, ...], str, tuple[float, ...]], np.ndarray | None] = lambda arrays, recipe, arguments: (
        RECIPES[recipe](*arrays, *arguments)
    )
    wide: bool = False
    fold_limit: int | None = None
    visits: int = 0
    gave_turn: float = 0.0

    def raise_alarm(self, bad: Any, alarm: Alarm) -> None:
        """Note that `bad` (traced bool) means `alarm`; an error beats a warning, then the first node wins."""
        self.alarms.append(alarm)
        number = len(self.alarms)
        if alarm.kind == "nonfinite" and self.nonfinite == "warn":
            number = -number
        self.absorb(jnp.where(bad, np.int32(number), np.int32(0)))

    def absorb(self, number: Any) -> None:
        """Take an alarm's number; 0 is none, below 0 a warning."""
        self.alarm = number if self.alarm is None else first_alarm(self.alarm, number)


def has_traced(value: Any) -> bool:
    """Whether a value is, or holds, a JAX value."""
    if isinstance(value, list):
        return any(map(has_traced, value))
    return isinstance(value, (jax.Array, ChannelsLast))


def is_opaque(value: Any) -> bool:
    """Whether a value is, or holds, one that a trace can neither know nor compute with."""
    if isinstance(value, list):
        return any(map(is_opaque, value))
    return isinstance(value, Opaque)
