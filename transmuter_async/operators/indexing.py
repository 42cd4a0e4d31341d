"""Operators that pick elements by index, by order or by a mask.

An index out of range never becomes a wrong value in silence: `Context.bounded` raises, or marks what is to be replaced.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.graph import STRING
from transmuter_async.operators.context import Context
from transmuter_async.operators.layout import normal_axis, slice_axes
from transmuter_async.operators.numeric import device_index
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["linear_indices", "to_float_key"]


# --- Gather and its kin -----------------------------------------------------------------------------------------------


def _zeros(shape: tuple[int, ...], data: Any, *others: Any) -> Any:
    """What an index into an empty axis gives, once its alarm is raised: nothing can be read."""
    if is_host(data, *others):
        return np.full(shape, "", STRING) if data.dtype == STRING else np.zeros(shape, data.dtype)
    return jnp.zeros(shape, data.dtype)


@operator("Gather", since_version=1)
def gather_1(data: Any, indices: Any, /, *, axis: int = 0, context: Context) -> Any:
    """The entries of `axis` at `indices`, of any shape. Negative indices exist from version 11, earlier in practice."""
    axis = normal_axis(axis, data.ndim)
    size, before, after = data.shape[axis], data.shape[:axis], data.shape[axis + 1 :]
    index, valid = context.bounded(indices, size, input="indices", axis=axis)
    if size == 0 or math.prod(index.shape) == 0:
        result = _zeros((*before, *index.shape, *after), data, index)
    elif is_host(data, index):
        result = np.asarray(np.take(data, index, axis))
    elif is_host(index) and index.ndim == 0:
        result = lax.index_in_dim(jnp.asarray(data), int(index), axis, keepdims=False)
    elif is_host(index) and index.ndim == 1 and (np.diff(index) == 1).all():
        result = slice_axes(jnp.asarray(data), [(axis, int(index[0]), int(index[-1]) + 1, 1)])
    else:
        # XLA's own mode would check every index again, and fill: nearly eight times slower (measured).
        result = jnp.take(jnp.asarray(data), device_index(index, size), axis, mode="clip")
    if valid is None:
        return result
    return context.fill_invalid(result, valid.reshape(*valid.shape, *[1] * len(after)))


@operator("GatherElements", since_version=11)
def gather_elements_11(data: Any, indices: Any, /, *, axis: int = 0, context: Context) -> Any:
    """`output[i][j] = data[indices[i][j]][j]` for axis 0. The other dimensions of `indices` may be smaller (onnxruntime)."""
    axis = normal_axis(axis, data.ndim)
    cut = _within(data, indices, axis, "indices")
    index, valid = context.bounded(indices, data.shape[axis], input="indices", axis=axis)
    if data.shape[axis] == 0 or math.prod(index.shape) == 0:
        result = _zeros(tuple(index.shape), data, index)
    elif is_host(data, index):
        result = np.take_along_axis(cut, index, axis)
    else:
        result = jnp.take_along_axis(jnp.asarray(cut), index, axis, mode="promise_in_bounds")
    return result if valid is None else context.fill_invalid(result, valid)


def _within(data: Any, indices: Any, axis: int, name: str) -> Any:
    """The part of `data` that `indices` reach in the axes other than `axis`."""
    shape, wanted = data.shape, indices.shape
    if len(wanted) != len(shape) or any(w > s for i, (w, s) in enumerate(zip(wanted, shape, strict=True)) if i != axis):
        raise ValueError(
            f"{name} of shape {list(wanted)} do not lie within data of shape {list(shape)} besides axis {axis}"
        )
    return slice_axes(data, [(i, 0, w, 1) for i, w in enumerate(wanted) if i != axis and w < shape[i]])


@operator("GatherND", since_version=11)
def gather_nd_11(data: Any, indices: Any, /, *, context: Context) -> Any:
    """The whole of `indices` addresses `data` from its first axis."""
    return gather_nd_12(data, indices, batch_dims=0, context=context)


@operator("GatherND", since_version=12)
def gather_nd_12(data: Any, indices: Any, /, *, batch_dims: int = 0, context: Context) -> Any:
    """The slices of `data` at index tuples: the last axis of `indices` addresses the axes after `batch_dims`."""
    depth = indices.shape[-1] if indices.ndim else 0
    if indices.ndim <= batch_dims or data.ndim < batch_dims + depth or depth < 1:
        raise ValueError(
            f"index tuples of length {depth} after {batch_dims} batch axes do not fit data of shape {list(data.shape)} "
            f"and indices of shape {list(indices.shape)}"
        )
    if tuple(data.shape[:batch_dims]) != tuple(indices.shape[:batch_dims]):
        raise ValueError(
            f"data of shape {list(data.shape)} and indices of shape {list(indices.shape)} differ in the first {batch_dims} axes"
        )
    index, valid = context.bounded(
        indices, np.asarray(data.shape[batch_dims : batch_dims + depth], np.int64), input="indices", axis=None
    )
    rows, rest = math.prod(data.shape[: batch_dims + depth]), tuple(data.shape[batch_dims + depth :])
    shape = (*index.shape[:-1], *rest)
    if rows == 0 or math.prod(shape) == 0:
        result = _zeros(shape, data, index)
    else:
        flat = xp(data).reshape(data, (rows, *rest))
        linear = linear_indices(index, data.shape, batch_dims)
        if is_host(flat, linear):
            result = flat[linear]
        else:
            result = jnp.take(jnp.asarray(flat), device_index(linear, rows), 0, mode="clip")
    return (
        result
        if valid is None
        else context.fill_invalid(result, valid.all(-1).reshape(*shape[: index.ndim - 1], *[1] * len(rest)))
    )


def linear_indices(index: Any, shape: tuple[int, ...], batch_dims: int = 0) -> Any:
    """Row numbers, in a tensor flattened up to the last addressed axis, of normalised index tuples.

    Args:
        index: (..., depth) integers within bounds; the first `batch_dims` axes are those of the tensor too.
        shape: The tensor's shape.
        batch_dims: How many leading axes the tuples do not address.
    """
    depth = index.shape[-1]
    addressed = shape[batch_dims : batch_dims + depth]
    strides = np.array([math.prod(addressed[i + 1 :]) for i in range(depth)], np.int64)
    linear = (index.astype(np.int64) * strides).sum(-1)
    if batch_dims:
        batch = np.arange(math.prod(shape[:batch_dims]), dtype=np.int64) * math.prod(addressed)
        linear = linear + batch.reshape(shape[:batch_dims] + (1,) * (index.ndim - 1 - batch_dims))
    return linear


# --- OneHot -----------------------------------------------------------------------------------------------------------


@operator("OneHot", since_version=9, static=("depth",))
def one_hot_9(indices: Any, depth: Any, values: Any, /, *, axis: int = -1, context: Context) -> Any:
    """`values[1]` where the new `axis` equals the index, `values[0]` elsewhere.

    Negative indices count from `depth` (version 11); one outside of [-depth, depth-1] gives a row of `values[0]`, which
    is the standard's text and no error. Indices that are no integers are cast to int64.
    """
    count = int(np.asarray(depth).reshape(-1)[0])
    at = normal_axis(axis, indices.ndim + 1)
    shape = (*indices.shape[:at], count, *indices.shape[at:])
    context.budget(shape, values.dtype)
    module = xp(indices, values)
    index = module.expand_dims(module.asarray(indices).astype(np.int64), at)
    index = module.where(index < 0, index + count, index)
    positions = np.arange(count, dtype=np.int64).reshape((-1,) + (1,) * (len(shape) - 1 - at))
    return module.asarray(module.where(index == positions, values[1], values[0]), dtype=values.dtype)


# --- TopK -------------------------------------------------------------------------------------------------------------


@operator("TopK", since_version=1)
def top_k_1(X: Any, /, *, axis: int = -1, k: int, context: Context) -> tuple[Any, Any]:
    """`k` is an attribute; the largest, sorted."""
    return top_k_11(X, np.asarray([k], np.int64), axis=axis, largest=1, sorted=1, context=context)


@operator("TopK", since_version=10, static=("K",))
def top_k_10(X: Any, K: Any, /, *, axis: int = -1, context: Context) -> tuple[Any, Any]:
    """`K` is an input; the largest, sorted."""
    return top_k_11(X, K, axis=axis, largest=1, sorted=1, context=context)


@operator("TopK", since_version=11, static=("K",))
def top_k_11(
    X: Any, K: Any, /, *, axis: int = -1, largest: int = 1, sorted: int = 1, context: Context
) -> tuple[Any, Any]:
    """The K largest or smallest entries and their positions (int64), in order also when `sorted` is 0.

    Equal values, -0 and 0 among them, come by lower index. NaN counts as larger than any number, as in onnxruntime.
    """
    axis, count = normal_axis(axis, X.ndim), int(np.asarray(K).reshape(-1)[0])
    if not 0 <= count <= X.shape[axis]:
        raise ValueError(f"K = {count} is not within [0, {X.shape[axis]}], the size of axis {axis} of {list(X.shape)}")
    if is_host(X):
        return _top_k_host(X, count, axis, bool(largest))
    last = jnp.moveaxis(jnp.asarray(X), axis, -1)
    if count == 0:
        index = jnp.zeros((*last.shape[:-1], 0), jnp.int64)
    else:
        index = _highest(_order_key(last, bool(largest)), count, context)
    index = jnp.moveaxis(index, -1, axis)
    return jnp.take_along_axis(jnp.asarray(X), index, axis, mode="promise_in_bounds"), index


def _highest(key: Any, count: int, context: Context) -> Any:
    """Positions (int64) of the `count` highest of each row in falling order, equal ones by lower index.

    XLA sorts pairs on a CPU by a function that it calls for each comparison, and one 64-bit integer five times faster: so
    where much of a row is wanted, 32-bit keys are sorted with their positions in the lower half.
    """
    if 6 * count > key.shape[-1] and key.dtype.itemsize <= 4 and context.lowers("packed sort"):
        bits = lax.bitcast_convert_type(key, jnp.int32) if key.dtype.itemsize == 4 else key.astype(jnp.int32)
        if key.dtype == np.uint32:
            bits = bits ^ np.int32(-(2**31))
        elif key.dtype == np.float32:
            bits = jnp.where(bits < 0, bits ^ np.int32(2**31 - 1), bits)
        places = lax.broadcasted_iota(jnp.int64, key.shape, key.ndim - 1)
        packed = lax.sort(((~bits).astype(jnp.int64) << 32) | places, dimension=-1, is_stable=False)
        return lax.slice_in_dim(packed, 0, count, axis=-1) & 0xFFFFFFFF
    return lax.top_k(key, count)[1].astype(jnp.int64)


def to_float_key(x: Any) -> Any:
    """Narrow floats and integers as a dtype that orders them alike and that sorting knows: float32, int32."""
    name = np.dtype(x.dtype).name
    if name in ("float16", "bfloat16") or name.startswith(("float8", "float4")):
        return x.astype(np.float32)
    if name in ("int4", "uint4", "int2", "uint2", "bool"):
        return x.astype(np.int32)
    return x


def _order_key(x: Any, largest: bool) -> Any:
    """What `lax.top_k`, which orders bits (-0 below 0, NaN by sign), sorts as the operator asks."""
    key = lax.stop_gradient(to_float_key(x))
    if jnp.issubdtype(key.dtype, jnp.floating):
        # One zero. By bits, since XLA drops an addition of 0, and on a CPU holds subnormal numbers to equal 0.
        integer = np.dtype(f"int{8 * key.dtype.itemsize}")
        negative_zero = lax.bitcast_convert_type(key, integer) == np.iinfo(integer).min
        key = jnp.where(negative_zero, jnp.zeros((), key.dtype), key)
        nan = jnp.full_like(key, jnp.nan)
        return jnp.where(jnp.isnan(key), nan if largest else -nan, key if largest else -key)
    return key if largest else ~key


def _top_k_host(x: np.ndarray, count: int, axis: int, largest: bool) -> tuple[np.ndarray, np.ndarray]:
    key = np.moveaxis(to_float_key(x), axis, -1)
    few = None
    if 0 < count * 16 < key.shape[-1] and not (key.dtype.kind == "f" and np.isnan(key).any()):
        few = _candidates(key, count, largest)
        key = np.take_along_axis(key, few, -1)
    # A stable ascending sort of the reversed axis, reversed: descending, equal values by lower index, NaN first.
    size = key.shape[-1]
    if largest:
        order = size - 1 - np.flip(np.argsort(np.flip(key, -1), axis=-1, kind="stable"), -1)[..., :count]
    else:
        order = np.argsort(key, axis=-1, kind="stable")[..., :count]
    order = order if few is None else np.take_along_axis(few, order, -1)
    order = np.moveaxis(order.astype(np.int64, copy=False), -1, axis)
    return np.take_along_axis(x, order, axis), order


def _candidates(key: np.ndarray, count: int, largest: bool) -> np.ndarray:
    """Ascending positions of the `count` best entries of each row, of equal ones the first, without sorting the row."""
    size = key.shape[-1]
    place = size - count if largest else count - 1
    last = np.partition(key, place, axis=-1)[..., place : place + 1]
    better = key > last if largest else key < last
    equal = key == last
    wanted = count - better.sum(-1, keepdims=True)
    chosen = better | (equal & (np.cumsum(equal, -1) <= wanted))
    return np.nonzero(chosen)[-1].reshape(*key.shape[:-1], count)


# --- Masks and sets: their output shapes depend on values -------------------------------------------------------------


@operator("NonZero", since_version=9, host=True)
def non_zero_9(X: Any, /) -> np.ndarray:
    """(rank, count) int64, the positions of what is not zero, in row-major order; (0, count) for a scalar."""
    if X.ndim == 0:
        return np.zeros((0, int(bool(X))), np.int64)
    return np.stack(np.nonzero(X)).astype(np.int64, copy=False)


@operator("Compress", since_version=9, static=("condition",))
def compress_9(input: Any, condition: Any, /, *, axis: int | None = None) -> Any:
    """The entries of `axis`, or of the flattened input, where the 1-D `condition` holds; entries beyond it are dropped.

    A condition longer than the axis is cut, as in onnxruntime.
    """
    data = xp(input).reshape(input, (-1,)) if axis is None else input
    at = 0 if axis is None else normal_axis(axis, input.ndim)
    index = np.flatnonzero(np.asarray(condition).reshape(-1)[: data.shape[at]])
    return (
        np.take(data, index, at)
        if is_host(data)
        else jnp.take(data, device_index(index, data.shape[at]), at, mode="clip")
    )


@operator("Unique", since_version=11, host=True)
def unique_11(
    X: Any,
    /,
    *,
    axis: int | None = None,
    sorted: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The distinct entries (subtensors of `axis`) in ascending order, or in order of first occurrence.

    Also the first occurrence of each, the number of its entry for each input, and the counts, all int64. Every NaN is
    the same value, the largest one, as in the reference evaluator; onnxruntime mixes NaN up with everything.
    """
    data = X.reshape(-1) if axis is None else np.moveaxis(X, normal_axis(axis, X.ndim), 0)
    rows = data.shape[0]
    # Ranks of the elements: integers order like the elements, whatever their dtype, strings included.
    _, rank = np.unique(to_float_key(data).reshape(-1), return_inverse=True)
    table: np.ndarray
    if data.ndim == 1:
        table = rank.reshape(-1)
        _, first, inverse, counts = np.unique(table, return_index=True, return_inverse=True, return_counts=True)
    else:
        table = rank.reshape(rows, math.prod(data.shape[1:]))
        if table.shape[1] == 0:  # numpy cannot compare rows without columns: they are all equal
            table = np.zeros((rows, 1), np.int64)
        _, first, inverse, counts = np.unique(table, axis=0, return_index=True, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        first, counts, inverse = first[order], counts[order], place[inverse]
    values = np.take(data, first, 0)
    if axis is not None:
        values = np.moveaxis(values, 0, normal_axis(axis, X.ndim))
    return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)
