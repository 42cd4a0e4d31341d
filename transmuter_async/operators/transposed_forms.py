"""Transposed convolutions in groups, for CPUs: XLA computes one with `feature_group_count` and a dilated input about a hundred
times slower than its arithmetic takes.

The outputs of stride s fall into s phases for each axis; each phase is a plain sum of shifted inputs (or of products of them),
without the zeros that a stride puts between the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import lax

from transmuter_async.operators.context import Context

__all__ = ["transposed_groups"]

MOST_TAPS = 256
"""Elements of a kernel: each is an operation of the program, which XLA has to compile."""

Part = Callable[[tuple[int, ...], Sequence[int]], Any]
"""From a place in the kernel and how far it shifts, its part of a phase of the sizes wanted."""


def transposed_groups(
    x: Any,
    weights: Any,
    group: int,
    strides: Sequence[int],
    dilations: Sequence[int],
    low: Sequence[int],
    outputs: Sequence[int],
    context: Context,
) -> Any:
    """A transposed convolution in groups, or None where the plain form is to be taken.

    Args:
        x: (N, C, *sizes), traced, in the dtype to accumulate in; no size is 0.
        weights: (C, M / group, *kernel), traced, in the same dtype.
        group: How many groups the channels are in.
        strides: Of the outputs, by axis.
        dilations: Of the kernel.
        low: What is cropped from the front.
        outputs: Sizes of the result.
        context: Of the node; says which forms there are.
    """
    kernel = weights.shape[2:]
    if group == 1 or math.prod(kernel) > MOST_TAPS or math.prod(strides) > MOST_TAPS:
        return None
    depthwise = weights.shape[0] == group
    if not context.lowers("shifted taps" if depthwise else "overlapping products"):
        return None
    batch, sizes = x.shape[0], x.shape[2:]
    filters = weights.shape[1] * group
    counts = [-(-n // s) for n, s in zip(outputs, strides, strict=True)]
    # For each axis, by place in the kernel and phase, how many inputs the place lies ahead; None where it is in another phase.
    ahead = [
        [[(p * d - b - r) // s if (p * d - b - r) % s == 0 else None for r in range(s)] for p in range(k)]
        for k, s, d, b in zip(kernel, strides, dilations, low, strict=True)
    ]
    make = _multiplied if depthwise else _products
    part = make(x, weights, group, ahead, counts)
    phases = []
    for phase in product(*map(range, strides)):
        total = None
        for place in product(*map(range, kernel)):
            found = (by_place[p][r] for by_place, p, r in zip(ahead, place, phase, strict=True))
            shifts = [shift for shift in found if shift is not None]
            if len(shifts) < len(sizes):
                continue
            term = part(place, shifts)
            total = term if total is None else total + term
        phases.append(jnp.zeros((batch, filters, *counts), x.dtype) if total is None else total)
    return _interleaved(phases, strides, counts, outputs, len(sizes))


def _interleaved(
    phases: list[Any], strides: Sequence[int], counts: Sequence[int], outputs: Sequence[int], rank: int
) -> Any:
    """Phases (N, M, *counts) as one (N, M, *outputs)."""
    if len(phases) == 1:
        return phases[0]
    batch, filters = phases[0].shape[:2]
    y = jnp.stack(phases, axis=-1).reshape(batch, filters, *counts, *strides)
    order = [0, 1, *(axis for i in range(rank) for axis in (2 + i, 2 + rank + i))]
    y = y.transpose(order).reshape(batch, filters, *(n * s for n, s in zip(counts, strides, strict=True)))
    return lax.slice(y, (0,) * y.ndim, (batch, filters, *outputs))


def _multiplied(x: Any, weights: Any, group: int, ahead: Sequence[Any], counts: Sequence[int]) -> Part:
    """Groups of one channel: each part is a shifted input times one number for each filter."""
    batch, channels, *sizes = x.shape
    shifts = [[q for by_phase in by_place for q in by_phase if q is not None] for by_place in ahead]
    before = [max(0, *each) if each else 0 for each in shifts]
    after = [max(0, n - 1 - min(each) - (size - 1)) for n, size, each in zip(counts, sizes, shifts, strict=True)]
    padded = jnp.pad(x, [(0, 0), (0, 0), *zip(before, after, strict=True)])
    # Without the barrier XLA would compute what made x again for each place of the kernel.
    padded = lax.optimization_barrier(padded)[:, :, None]
    rank = len(sizes)

    def part(place: tuple[int, ...], by: Sequence[int]) -> Any:
        cut = tuple(slice(b - q, b - q + n) for b, q, n in zip(before, by, counts, strict=True))
        factor = weights[(slice(None), slice(None), *place)].reshape(1, channels, -1, *(1,) * rank)
        return (padded[(slice(None), slice(None), slice(None), *cut)] * factor).reshape(batch, -1, *counts)

    return part


def _products(x: Any, weights: Any, group: int, ahead: Sequence[Any], counts: Sequence[int]) -> Part:
    """Other groups: one batched product for all places of the kernel, of which each part is cut."""
    batch, channels, *sizes = x.shape
    kernel = weights.shape[2:]
    inner = channels // group
    flat = weights.reshape(group, inner, -1).swapaxes(1, 2)
    parts = jnp.matmul(flat, x.reshape(batch, group, inner, -1))
    parts = lax.optimization_barrier(parts.reshape(batch, -1, *kernel, *sizes))
    zero = jnp.zeros((), x.dtype)

    def part(place: tuple[int, ...], by: Sequence[int]) -> Any:
        one = parts[(slice(None), slice(None), *place)]
        ends = ((q, n - q - size, 0) for q, n, size in zip(by, counts, sizes, strict=True))
        return lax.pad(one, zero, [(0, 0, 0), (0, 0, 0), *ends])

    return part
