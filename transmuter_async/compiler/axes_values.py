"""What is known of a value while axes are followed: its axes as products of atoms, and what stands on their padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transmuter_async.compiler.axes_live import ONE_AND_OTHER, Live, point
from transmuter_async.compiler.axes_spans import EVERYTHING, Span
from transmuter_async.compiler.sizes import ONE, Poly, poly

__all__ = [
    "GARBAGE",
    "JUDGES",
    "LARGE",
    "MASK",
    "NAN",
    "POISON",
    "WILD",
    "Atom",
    "Axis",
    "Dim",
    "Mask",
    "Mixes",
    "Mixing",
    "Poison",
    "State",
    "Tensor",
    "Undecided",
    "constant",
    "everywhere",
    "is_unit",
    "labels",
    "merged",
    "plain",
    "size_of",
    "within",
]

LARGE = 1 << 16
"""Known arrays above this many elements are followed by shape only."""


@dataclass(frozen=True, slots=True)
class Mixes:
    """An operator that mixes rows of a batch, or reads padding.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        axis: The dimension that it mixes.
        why: In words.
    """

    node: str
    op_type: str
    axis: str
    why: str

    def __str__(self) -> str:
        return f"{self.op_type} {self.node!r} ({self.axis}): {self.why}"


@dataclass(frozen=True, slots=True)
class Mask:
    """Padding that has to be put back to a value before a node reads it.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        output: Its first output, which tells it.
        axis: Of its first input, which has `rank` axes.
        dim: The padded dimension.
        factor: Elements of the axis for each of the dimension.
        fill: "" for zero, "-inf", or the name of a value of one element.
    """

    node: str
    op_type: str
    output: str
    axis: int
    rank: int
    dim: str
    factor: int
    fill: str


class Mixing(Exception):
    """A rule's verdict. `result` lets the walk go on, so that all such operators are found; without one it is poisoned."""

    def __init__(self, axis: str, why: str, result: list[Any] | None = None) -> None:
        super().__init__(why)
        self.axis = axis
        self.why = why
        self.result = result


class Undecided(Exception):
    """Whether a node mixes depends on sizes that only a call knows."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A followed dimension. `kind` is "batch" or "padded"; `largest` the largest size that a program has, None: any."""

    name: str
    kind: str
    largest: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What stands beyond the true length: `kind` is "constant", "masked" (at most `value` plus a finite score),
    "garbage" (finite, from `low` to `high`) or "wild" (it may be NaN or infinite). All but wild hold wherever no wild axis
    is beyond its own length as well. `source` names the inputs whose padding it comes from; `flat`: the mask behind it
    changes along no other padded axis; `live`: what stands where such an input holds data, see `axes_live`.
    """

    kind: str
    value: Any = None
    source: frozenset[str] = frozenset()
    flat: bool = True
    low: float = -math.inf
    high: float = math.inf
    live: tuple[Live, ...] = ()

    @property
    def span(self) -> Span:
        """The interval that its elements lie in."""
        if self.kind == "constant":
            value = float(np.asarray(self.value).astype(np.float64))
            return EVERYTHING if math.isnan(value) else (value, value)
        return self.low, self.high

    @property
    def finite(self) -> bool:
        """Whether no NaN or infinity can stand there (the sum of a mask may overflow: it counts as not finite)."""
        if self.kind == "constant":
            return bool(np.all(np.isfinite(np.asarray(self.value, np.float64))))
        return self.kind == "garbage"

    def is_constant(self, value: float) -> bool:
        """Whether it is known to be this number."""
        return self.kind == "constant" and bool(np.asarray(self.value).astype(np.float64) == value)

    def hidden(self) -> bool:
        """Whether Softmax gives it a probability of exactly zero beside any unmasked score."""
        return self.kind in ("constant", "masked") and bool(np.asarray(self.value).astype(np.float64) <= MASK)


MASK = -10_000.0
"""exp underflows to zero in float32 below -104: with scores under 4 900 in magnitude this difference is always below it."""

JUDGES = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "Trilu"})
"""Operators whose results may be masks although they depend on inputs."""

GARBAGE = State("garbage")


def within(span: Span) -> State:
    """The state of something finite between bounds."""
    return State("garbage", low=span[0], high=span[1])


WILD = State("wild")
NAN = State("wild", "nan")
"""NaN or finite, but not infinite: what Softmax makes of a row that is masked everywhere."""


def constant(value: Any) -> State:
    """The state of a known padding."""
    return State("constant", np.asarray(value))


def everywhere(value: Any) -> State:
    """The state of a number that stands on padding and on data."""
    return State("constant", np.asarray(value), live=(point(value),) * ONE_AND_OTHER)


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of an axis: a followed dimension, or a plain size (`dim` None). `level`: the values do not change along it."""

    size: Poly
    dim: str | None = None
    state: State = GARBAGE
    level: bool = False


Axis = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of a value.

    Attributes:
        axes: None where not even the rank is known; such a value carries no followed dimension.
        content: `("iota", dim)`: the index along the dimension; `("columns", dims)`: such along the last axis, one for
            each column; `("isnan", name)`: IsNaN of a value; `("selected", number, flipped)`: positions from a NonZero;
            `("atmost", dim, "", inputs)`: integers of which none is above the dimension's size, by the way they are made;
            where they are zero, so is everything in a row of the inputs; `("number", name)`: an input;
            `("size", polynomial)`: a size as a float;
            `("everywhere", number)`: that number in every place.
        taint: Where it took in a padded size or a row's place.
        fed: Whether it depends on what the caller gives, not on sizes and weights alone.
        kind: Of its dtype: "f", "i", "b", or "" where it is something else or not known.
    """

    axes: tuple[Axis, ...] | None
    content: tuple[Any, ...] | None = None
    taint: Mixes | None = None
    fed: bool = True
    kind: str = ""

    @property
    def dims(self) -> frozenset[str]:
        """The followed dimensions that it carries."""
        return labels(self.axes or ())


class Poison:
    """Stands for the results of a node that was refused; whatever reads it is not judged again."""


POISON = Poison()


def plain(size: Any) -> Axis:
    """An axis that is not followed."""
    return (Atom(poly(size)),)


def labels(axes: Iterable[Axis]) -> frozenset[str]:
    """The followed dimensions in some axes."""
    return frozenset(atom.dim for axis in axes for atom in axis if atom.dim is not None)


def size_of(axis: Axis) -> Poly:
    """The size of an axis."""
    total = ONE
    for atom in axis:
        total = total * atom.size
    return total


def is_unit(axis: Axis) -> bool:
    """Whether an axis has one element."""
    return not labels([axis]) and size_of(axis) == ONE


def merged(atoms: Sequence[Atom]) -> Axis:
    """Atoms as one axis, plain neighbours joined."""
    out: list[Atom] = []
    for atom in atoms:
        if atom.dim is None and atom.size == ONE:
            continue
        if atom.dim is None and out and out[-1].dim is None:
            out[-1] = Atom(out[-1].size * atom.size)
        else:
            out.append(atom)
    return tuple(out) or (Atom(ONE),)
