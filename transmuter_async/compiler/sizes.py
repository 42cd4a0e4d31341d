"""Sizes as polynomials of a graph's dimensions, and the shape arithmetic of ONNX graphs on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from transmuter_async.compiler.run import Run, Scope
from transmuter_async.compiler.trace import run_node
from transmuter_async.errors import TransmuterError
from transmuter_async.graph import Node, dtype_of

__all__ = ["ONE", "Bounds", "Poly", "Sizes", "compute_sizes", "poly"]


class Poly:
    """A polynomial with integer coefficients. Immutable, hashable."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[tuple[str, ...], int]) -> None:
        self.terms = {key: value for key, value in terms.items() if value}

    @classmethod
    def symbol(cls, name: str) -> Poly:
        """The dimension itself."""
        return cls({(name,): 1})

    def constant(self) -> int | None:
        """Its number, None where it has symbols."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    def symbols(self) -> frozenset[str]:
        """The symbols in it."""
        return frozenset(name for key in self.terms for name in key)

    def __add__(self, other: Poly) -> Poly:
        terms = dict(self.terms)
        for key, value in other.terms.items():
            terms[key] = terms.get(key, 0) + value
        return Poly(terms)

    def __sub__(self, other: Poly) -> Poly:
        return self + other * Poly({(): -1})

    def __mul__(self, other: Poly) -> Poly:
        terms: dict[tuple[str, ...], int] = {}
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                key = tuple(sorted(a + b))
                terms[key] = terms.get(key, 0) + x * y
        return Poly(terms)

    def divide(self, other: Poly) -> Poly | None:
        """The exact quotient by a single term; None where there is none."""
        if len(other.terms) != 1:
            return ONE if self == other and self.terms else None
        ((below, factor),) = other.terms.items()
        terms = {}
        for key, value in self.terms.items():
            left = Counter(key)
            left.subtract(Counter(below))
            if value % factor or any(count < 0 for count in left.values()):
                return None
            terms[tuple(sorted(left.elements()))] = value // factor
        return Poly(terms)

    def at(self, values: Mapping[str, int]) -> int | None:
        """Its number for given sizes, None where one is not given."""
        if not self.symbols() <= values.keys():
            return None
        return sum(value * math.prod(values[name] for name in key) for key, value in self.terms.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __repr__(self) -> str:
        return " + ".join("*".join([*([str(v)] if v != 1 or not k else []), *k]) for k, v in self.terms.items()) or "0"


ONE = Poly({(): 1})


def poly(value: Any) -> Poly:
    """An integer, or a polynomial, as one."""
    return value if isinstance(value, Poly) else Poly({(): int(value)})


class Bounds:
    """What is known of symbols: those given are at least 1 (0 where they may be `empty`) and at most their bound."""

    def __init__(self, largest: Mapping[str, int | None], empty: Iterable[str] = ()) -> None:
        self.largest = dict(largest)
        self.empty = frozenset(empty)

    def span(self, value: Poly) -> tuple[float, float]:
        """Bounds of a polynomial, infinite where nothing is known."""
        low = high = 0.0
        for key, factor in value.terms.items():
            least, most = 1.0, 1.0
            for name in key:
                if name not in self.largest:
                    least, most = (-math.inf, math.inf) if "?" in name else (least, math.inf)
                    continue
                bound = self.largest[name]
                least = min(least, 0.0) if name in self.empty else least
                most *= math.inf if bound is None else bound
            low += factor * (least if factor > 0 else most)
            high += factor * (most if factor > 0 else least)
        return low, high

    def compare(self, op: str, left: Poly, right: Poly) -> bool | None:
        """Whether a comparison holds for all values of the symbols; None where it depends."""
        low, high = self.span(left - right)
        if op == "Equal":
            return True if low == high == 0 else False if low > 0 or high < 0 else None
        if op in ("Greater", "GreaterOrEqual"):
            strict = op == "Greater"
            if low > 0 or (low == 0 and not strict):
                return True
            return False if high < 0 or (high == 0 and strict) else None
        return self.compare({"Less": "Greater", "LessOrEqual": "GreaterOrEqual"}[op], right, left)


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Integers (or truth values) that are polynomials of dimensions. `values` is an object array of `Poly`."""

    values: np.ndarray
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.int64))

    def symbols(self) -> frozenset[str]:
        """All symbols."""
        return frozenset(name for value in self.values.reshape(-1) for name in value.symbols())

    def known(self) -> np.ndarray | None:
        """The numbers, where no symbol is left."""
        numbers = [value.constant() for value in self.values.reshape(-1)]
        if any(number is None for number in numbers):
            return None
        return np.array(numbers, np.int64).astype(self.dtype).reshape(self.values.shape)


def object_array(values: list[Poly], shape: tuple[int, ...]) -> np.ndarray:
    """Polynomials as an array."""
    out = np.empty(len(values), object)
    out[:] = values
    return out.reshape(shape)


_MOVES = frozenset(
    {
        "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Reshape", "Identity", "Flatten", "Transpose", "Expand",
        "GatherElements", "Tile", "Split",
    }
)  # fmt: skip
_COMPARE = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})


def compute_sizes(node: Node, values: list[Any], bounds: Bounds) -> Any:
    """The node on sizes and known arrays: `Sizes`, or None where the result is no polynomial for sure."""
    if node.domain:
        return None
    op = node.op_type
    if op in _MOVES and len(node.outputs) == 1:
        return _moved(node, values)
    arrays = [None if v is None else _polys(v) for v in values]
    if any(a is None for a, v in zip(arrays, values, strict=True) if v is not None):
        return None
    given = [a for a in arrays if a is not None]
    first = next(v for v in values if isinstance(v, Sizes))
    if op in _COMPARE:
        return _each(given, lambda a, b: _truth(bounds.compare(op, a, b)), np.dtype(bool))
    if op == "Cast":
        to = dtype_of(int(node.attributes["to"]))  # type: ignore[call-overload]
        if to.kind == "b":
            return _each(given, lambda a: _truth(_negated(bounds.compare("Equal", a, poly(0)))), np.dtype(bool))
        return Sizes(given[0], to) if to.kind in "iu" and to.itemsize >= 4 else None
    if op == "Not":
        return _each(given, lambda a: ONE - a, np.dtype(bool))
    if op == "Where":
        return _each(given, _where, values[1].dtype)
    if op in _ARITHMETIC:
        made = given[0]
        for other in given[1:]:
            step = _each([made, other], lambda a, b: _ARITHMETIC[op](bounds, a, b), first.dtype)
            if step is None:
                return None
            made = step.values
        return Sizes(made, first.dtype)
    if op in ("ReduceProd", "ReduceSum") and given[0].ndim <= 1 and len(given) <= 2:
        total = ONE if op == "ReduceProd" else poly(0)
        for item in given[0].reshape(-1):
            total = total * item if op == "ReduceProd" else total + item
        keep = int(node.attributes.get("keepdims", 1))  # type: ignore[call-overload]
        return Sizes(object_array([total], (1,) * (given[0].ndim if keep else 0)), first.dtype)
    return None


def _quotient(bounds: Bounds, a: Poly, b: Poly) -> Poly | None:
    return a.divide(b)


def _smaller(bounds: Bounds, a: Poly, b: Poly) -> Poly | None:
    less = bounds.compare("LessOrEqual", a, b)
    return None if less is None else a if less else b


def _larger(bounds: Bounds, a: Poly, b: Poly) -> Poly | None:
    less = bounds.compare("LessOrEqual", a, b)
    return None if less is None else b if less else a


_ARITHMETIC: dict[str, Callable[[Bounds, Poly, Poly], Poly | None]] = {
    "Add": lambda bounds, a, b: a + b,
    "Sub": lambda bounds, a, b: a - b,
    "Mul": lambda bounds, a, b: a * b,
    "And": lambda bounds, a, b: a * b,
    "Div": _quotient,
    "Min": _smaller,
    "Max": _larger,
}


def _where(condition: Poly, a: Poly, b: Poly) -> Poly | None:
    chosen = condition.constant()
    return None if chosen is None else a if chosen else b


def _truth(value: bool | None) -> Poly | None:
    return None if value is None else poly(value)


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _each(arrays: list[np.ndarray], step: Callable[..., Poly | None], dtype: np.dtype) -> Sizes | None:
    spread = np.broadcast_arrays(*arrays)
    made = [step(*items) for items in zip(*(array.reshape(-1) for array in spread), strict=True)]
    if any(item is None for item in made):
        return None
    return Sizes(object_array([item for item in made if item is not None], spread[0].shape), dtype)


def _polys(value: Any) -> np.ndarray | None:
    if isinstance(value, Sizes):
        return value.values
    if value.dtype.kind not in "iub" or value.size > 4096:
        return None
    return object_array([poly(int(item)) for item in value.reshape(-1)], value.shape)


def _moved(node: Node, values: list[Any]) -> Sizes | None:
    """An operator that only moves elements, run on their numbers."""
    table: list[Poly] = []
    moving = range(len(values)) if node.op_type == "Concat" else range(1)
    stand_ins: list[Any] = []
    dtype = np.dtype(np.int64)
    for index, value in enumerate(values):
        if index not in moving or value is None:
            if isinstance(value, Sizes):
                return None
            stand_ins.append(value)
            continue
        array = _polys(value)
        if array is None:
            return None
        dtype = value.dtype
        stand_ins.append(np.arange(len(table), len(table) + array.size, dtype=np.int64).reshape(array.shape))
        table.extend(array.reshape(-1))
    names = tuple("" if value is None else f"i{index}" for index, value in enumerate(stand_ins))
    scope = Scope({f"i{index}": value for index, value in enumerate(stand_ins) if value is not None})
    try:
        run_node(Run(tracing=False), replace(node, inputs=names, outputs=("out",)), scope)
    except TransmuterError:
        return None
    out = scope.values["out"]
    return Sizes(object_array([table[int(i)] for i in out.reshape(-1)], out.shape), dtype)
