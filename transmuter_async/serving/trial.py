"""Warming up: which programs there can be, and the trial of a batch against its rows.

That rows may share a batch, and that padding is not read, is proved from the graph. The trial computes it once, so that a
mistake in the proof, or in a compiler, is found before the first answer. Plain code on values; the worker runs the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transmuter_async.compiler import Prepared, Spec, describe_type
from transmuter_async.errors import BatchingRefused, InputError
from transmuter_async.graph import TensorType, Value
from transmuter_async.serving.decisions import Limits
from transmuter_async.serving.rows import Item, Piece, Rows, bucket_sizes, needs_true_size

__all__ = ["Bucket", "buckets", "compare", "specs"]

ROWS = 3
"""Rows of the batch that is tried for each bucket; of different lengths."""

TOLERANCE = 1e-5
"""Relative to the largest element of an output, and to 1: a program of another batch size adds in another order."""

HALF_TOLERANCE = 1e-2
"""For outputs of fewer than 24 bits of precision."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One combination of padded sizes, with inputs to try it.

    Attributes:
        items: Rows of different lengths that belong to it.
        sizes: The batch sizes that it is compiled for.
        longer: The first item as it would be in the next larger bucket; None where there is none.
    """

    items: tuple[Item, ...]
    sizes: tuple[int, ...]
    longer: Item | None


def buckets(prepared: Prepared, rows: Rows, limits: Limits, samples: Mapping[str, Any] | None) -> Iterator[Bucket]:
    """All combinations of buckets, with inputs made from `samples`, or made up.

    Raises:
        InputError: Something about the inputs can't be made up; a sample must say it.
    """
    plan = rows.plan
    dims = [dim.name for dim in plan.dims if dim.name != plan.batch]
    told = dict(plan.batching.buckets)
    make = _Maker(prepared, rows, samples)
    for combination in bucket_sizes(plan):
        largest = dict(zip(dims, combination, strict=True))
        below = {dim: max((size for size in told[dim] if size < n), default=0) + 1 for dim, n in largest.items()}
        middle = {dim: (below[dim] + n) // 2 for dim, n in largest.items()}
        lengths = [below, largest, middle]
        if needs_true_size(plan.proof):
            lengths = [below] * ROWS
        items = tuple(rows.admit(make({**each, rows.batch: 1}, seed)) for seed, each in enumerate(lengths))
        cap = limits.rows(items[0].elements)
        nexts = {dim: next((size for size in told[dim] if size > n), n) for dim, n in largest.items()}
        longer = None if nexts == largest or needs_true_size(plan.proof) else replace(items[0], targets=nexts)
        yield Bucket(items[: min(ROWS, cap)], tuple(size for size in limits.batch_sizes if size <= cap), longer)


def specs(bucket: Bucket, rows: Rows, size: int) -> dict[str, Any]:
    """What `Compiled.warm` is to compile for a batch of `size` rows: shapes, and values of inputs without rows."""
    item = bucket.items[0]
    return as_specs(rows, rows.build([Piece(item, 0, 1)], size))


def as_specs(rows: Rows, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes of a batch's inputs, and the values of those without rows."""
    return {
        name: Spec(value.shape, value.dtype) if rows.carries(name) else value
        for name, value in inputs.items()
        if value is not None
    }


def compare(alone: Sequence[Mapping[str, Any]], together: Sequence[Mapping[str, Any]], how: str) -> None:
    """Refuse a model whose rows depend on their batch.

    Raises:
        BatchingRefused: An output differs; it is named.
    """
    for row, (want, got) in enumerate(zip(alone, together, strict=True)):
        for name, value in want.items():
            problem = _differs(np.asarray(value), np.asarray(got[name]))
            if problem is not None:
                raise BatchingRefused(
                    f"the output {name!r} of row {row} {how} differs from the same row alone: {problem}. The graph looked "
                    "safe, so this is a defect: please report it, and call the model without serve"
                )


def _differs(want: np.ndarray, got: np.ndarray) -> str | None:
    if want.shape != got.shape:
        return f"shape {got.shape} instead of {want.shape}"
    if want.dtype.kind in "fcV" and want.dtype.names is None and want.size:
        precise = want.dtype.kind in "fc" and want.dtype.itemsize >= 4
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        left, right = want.astype(wide), got.astype(wide)
        finite = np.isfinite(left)
        scale = max(1.0, float(np.abs(left[finite]).max(initial=0)))
        if not np.array_equal(finite, np.isfinite(right)):
            return "other elements are finite"
        most = float(np.abs(left[finite] - right[finite]).max(initial=0))
        return None if most <= (TOLERANCE if precise else HALF_TOLERANCE) * scale else f"by {most:.3g}"
    return None if np.array_equal(want, got) else "other values"


class _Maker:
    """Makes inputs of given sizes: tiled from a sample, or made up."""

    def __init__(self, prepared: Prepared, rows: Rows, samples: Mapping[str, Any] | None) -> None:
        self._rows = rows
        self._declared = prepared.graph.inputs
        self._samples = {} if samples is None else prepared.take_inputs(samples, True)
        problems = [
            f"{value.name}: {describe_type(value.type)}" for value in self._declared if not self._makeable(value)
        ]
        if problems:
            raise InputError(
                f"inputs for the trial can't be made up for {'; '.join(problems)}: an open dimension that is no bucket, or a "
                "value that all rows share. Give an example of all inputs, as in warm({...})"
            )

    def _makeable(self, value: Value) -> bool:
        if value.name in self._samples:
            return True
        type = value.type
        if not isinstance(type, TensorType) or type.shape is None or type.dtype is None or type.dtype.hasobject:
            return False
        places = self._rows.plan.places.get(value.name, {})
        open_dims = [
            dim for at, dim in enumerate(type.shape) if at not in places and not (isinstance(dim, int) and dim >= 0)
        ]
        return self._rows.carries(value.name) and not open_dims

    def __call__(self, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        return {value.name: self._made(value, sizes, seed, random) for value in self._declared}

    def _made(self, value: Value, sizes: Mapping[str, int], seed: int, random: np.random.Generator) -> Any:
        places = self._rows.plan.places.get(value.name, {})
        if value.name in self._samples:
            array = self._samples[value.name]
            for at, dim in places.items():
                first = seed if dim == self._rows.batch else 0
                array = np.take(array, (first + np.arange(sizes[dim])) % array.shape[at], axis=at)
            return array
        assert isinstance(value.type, TensorType)
        assert value.type.shape is not None
        assert value.type.dtype is not None
        shape = [sizes[places[at]] if at in places else int(dim or 0) for at, dim in enumerate(value.type.shape)]
        dtype = value.type.dtype
        if value.name in self._rows.plan.batching.mask or (dtype.kind in "iu" and len(shape) < 2):
            return np.ones(shape, dtype)
        if dtype.kind in "iub":
            return random.integers(0, 2, shape).astype(dtype)
        return random.standard_normal(shape).astype(dtype)
