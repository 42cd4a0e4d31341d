"""Operators that write updates into a copy of a tensor, at indices."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.indexing import linear_indices
from transmuter_async.operators.layout import normal_axis
from transmuter_async.operators.numeric import narrow, widen
from transmuter_async.operators.registry import is_host, operator, xp

__all__: list[str] = []

_HOST = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
_TRACED = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}
_BOOL = {"add": "max", "mul": "min"}


def _written(data: Any, index: Any, updates: Any, reduction: str) -> Any:
    """`data` with `updates` combined in at `index`, a tuple of integer arrays within bounds.

    Sums and products of narrow floats accumulate in float32. On booleans "add" is or, "mul" is and.
    """
    if reduction not in _TRACED:
        raise ValueError(f"reduction {reduction!r} is none of {', '.join(_TRACED)}")
    if data.dtype == np.bool_:
        reduction = _BOOL.get(reduction, reduction)
    wide = widen if reduction in ("add", "mul") else lambda x: x
    if is_host(data, updates, *index):
        result = np.array(wide(data))
        if reduction == "none":
            result[index] = updates
        else:
            with np.errstate(all="ignore"):
                _HOST[reduction].at(result, index, wide(updates))
        return narrow(result, data.dtype) if result.dtype != data.dtype else result
    at = wide(jnp.asarray(data)).at[index]
    result = getattr(at, _TRACED[reduction])(wide(jnp.asarray(updates)), mode="promise_in_bounds")
    return narrow(result, data.dtype)


@operator("Scatter", since_version=9)
def scatter_9(data: Any, indices: Any, updates: Any, /, *, axis: int = 0, context: Context) -> Any:
    """The old name of ScatterElements."""
    return scatter_elements_16(data, indices, updates, axis=axis, reduction="none", context=context)


@operator("ScatterElements", since_version=11)
def scatter_elements_11(data: Any, indices: Any, updates: Any, /, *, axis: int = 0, context: Context) -> Any:
    """Only writing, no reduction."""
    return scatter_elements_16(data, indices, updates, axis=axis, reduction="none", context=context)


@operator("ScatterElements", since_version=16)
def scatter_elements_16(
    data: Any, indices: Any, updates: Any, /, *, axis: int = 0, reduction: str = "none", context: Context
) -> Any:
    """`output[indices[i][j]][j] = updates[i][j]` for axis 0; "max" and "min" exist from version 18.

    For an index given twice and no reduction the standard promises nothing; the last one is written.
    """
    axis = normal_axis(axis, data.ndim)
    shape = tuple(indices.shape)
    if shape != tuple(updates.shape) or len(shape) != data.ndim:
        raise ValueError(
            f"indices {list(shape)} and updates {list(updates.shape)} must agree, in data's rank {data.ndim}"
        )
    if any(size > data.shape[i] for i, size in enumerate(shape) if i != axis):
        raise ValueError(f"indices of shape {list(shape)} reach beyond data of shape {list(data.shape)}")
    index, valid = context.bounded(indices, data.shape[axis], input="indices", axis=axis)
    if 0 in shape or 0 in data.shape:
        return data if valid is None else context.fill_invalid(data, valid.all())
    # An open mesh of the positions themselves, with the index in its axis.
    mesh: list[Any] = list(np.ogrid[tuple(slice(0, size) for size in shape)])
    mesh[axis] = index
    result = _written(data, tuple(mesh), updates, reduction)
    # A write without a place has no element to mark: the whole result is void.
    return result if valid is None else context.fill_invalid(result, valid.all())


@operator("ScatterND", since_version=11)
def scatter_nd_11(data: Any, indices: Any, updates: Any, /, *, context: Context) -> Any:
    """Only writing, no reduction."""
    return scatter_nd_16(data, indices, updates, reduction="none", context=context)


@operator("ScatterND", since_version=16)
def scatter_nd_16(data: Any, indices: Any, updates: Any, /, *, reduction: str = "none", context: Context) -> Any:
    """Write slices at index tuples, the last axis of `indices`; "max" and "min" exist from version 18.

    For an index given twice and no reduction the standard promises nothing; the last one is written.
    """
    depth = indices.shape[-1] if indices.ndim else 0
    if not 1 <= depth <= data.ndim:
        raise ValueError(f"index tuples of length {depth} do not address data of shape {list(data.shape)}")
    rest = tuple(data.shape[depth:])
    if tuple(updates.shape) != (*indices.shape[:-1], *rest):
        raise ValueError(f"updates have shape {list(updates.shape)}, not {[*indices.shape[:-1], *rest]}")
    sizes = np.asarray(data.shape[:depth], np.int64)
    index, valid = context.bounded(indices, sizes, input="indices", axis=None)
    if 0 in updates.shape or 0 in data.shape:
        return data if valid is None else context.fill_invalid(data, valid.all())
    # Rows by one number each: XLA scatters whole rows far faster than tuples.
    flat = xp(data).reshape(data, (math.prod(data.shape[:depth]), *rest))
    linear = linear_indices(index, data.shape).reshape(-1)
    result = _written(flat, (linear,), updates.reshape(-1, *rest), reduction).reshape(data.shape)
    return result if valid is None else context.fill_invalid(result, valid.all())


@operator("TensorScatter", since_version=24)
def tensor_scatter_24(
    past_cache: Any,
    update: Any,
    write_indices: Any = None,
    /,
    *,
    axis: int = -2,
    mode: str = "linear",
    context: Context,
) -> Any:
    """A cache (b, …, length, …) with `update` (b, …, n, …) written at `write_indices` (b,), zero where left out.

    "circular" goes on at the front after the end; in "linear" mode a write beyond the end is an index out of range.
    """
    axis = normal_axis(axis, past_cache.ndim)
    if axis == 0 or mode not in ("linear", "circular"):
        raise ValueError(f"axis {axis} must not be the batch axis, and mode {mode!r} must be 'linear' or 'circular'")
    shape, new = tuple(past_cache.shape), tuple(update.shape)
    if (
        shape[:axis] + shape[axis + 1 :] != new[:axis] + new[axis + 1 :]
        or len(shape) != len(new)
        or new[axis] > shape[axis]
    ):
        raise ValueError(f"an update of shape {list(new)} does not fit the cache of shape {list(shape)} at axis {axis}")
    length, count, batch = shape[axis], new[axis], shape[0]
    start = np.zeros(batch, np.int64) if write_indices is None else write_indices
    if tuple(start.shape) != (batch,):
        raise ValueError(f"write_indices has shape {list(start.shape)}, not ({batch},)")
    if 0 in new:
        return past_cache
    module = xp(start)
    start = module.asarray(start).astype(np.int64)
    valid = None
    if mode == "linear":
        # The last place that a write may start at; a negative start must not count from the end.
        start = module.where(start < 0, length + 1, start)
        start, valid = context.bounded(start, length - count, input="write_indices", axis=axis, inclusive=True)
        start = start.astype(np.int64)
    place = start[:, None] + np.arange(count, dtype=np.int64)
    place = place % length if mode == "circular" else place
    if is_host(past_cache, update, place):
        written = np.array(np.moveaxis(past_cache, axis, 1))
        written[np.arange(batch)[:, None], place] = np.moveaxis(update, axis, 1)
        return np.moveaxis(written, 1, axis)
    rows, moved = jnp.moveaxis(jnp.asarray(past_cache), axis, 1), jnp.moveaxis(jnp.asarray(update), axis, 1)
    result = rows.at[np.arange(batch)[:, None], place].set(moved, mode="promise_in_bounds")
    result = jnp.moveaxis(result, 1, axis)
    return result if valid is None else context.fill_invalid(result, valid.all())
