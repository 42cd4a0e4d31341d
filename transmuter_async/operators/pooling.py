"""Pooling: MaxPool, AveragePool, LpPool, their global forms, MaxUnpool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import is_float, narrow, safe_root, spatial, widen
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.rows import row_extreme
from transmuter_async.operators.windows import Windows, isolate, pad_spatial, separable, taps, windows


def _lowest(dtype: Any) -> Any:
    """The value that no maximum picks over an element: -inf, or the least integer."""
    dtype = np.dtype(dtype)
    return np.asarray(-np.inf, dtype) if is_float(dtype) else np.asarray(np.iinfo(dtype).min, dtype)


# --- maximum ------------------------------------------------------------------------------------------------------------


@operator("MaxPool", since_version=1)
def max_pool_1(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Until version 8 there are no indices, until version 10 no dilations and no `ceil_mode`."""
    w = windows(X.shape, kernel_shape, strides=strides, dilations=None, pads=pads, auto_pad=auto_pad, partial=True)
    return _max_values(X, w, context)


@operator("MaxPool", since_version=8)
def max_pool_8(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
    n_outputs: int,
    context: Context,
) -> Any:
    """Until version 10 there are no dilations and no `ceil_mode`."""
    return max_pool_10(
        X,
        auto_pad=auto_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        storage_order=storage_order,
        strides=strides,
        n_outputs=n_outputs,
        context=context,
    )


@operator("MaxPool", since_version=10)
def max_pool_10(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
    n_outputs: int,
    context: Context,
) -> Any:
    """The greatest element of each window, and where it is. Padding is never picked; NaN wins.

    An index counts in the whole tensor, its spatial part in row-major order (`storage_order` 0) or column-major order;
    of equal elements the first in row-major order is taken.
    """
    w = windows(
        X.shape,
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        partial=True,
    )
    if n_outputs < 2:
        return _max_values(X, w, context)
    return _max_with_indices(X, w, storage_order)


def _max_values(x: Any, w: Windows, context: Context) -> Any:
    if 0 in x.shape or 0 in w.outputs:
        return xp(x).full((*x.shape[:2], *w.outputs), _lowest(x.dtype), x.dtype)
    if is_host(x):
        return separable(x, w, np.maximum, _lowest(x.dtype))
    if context.lowers("separable"):
        return separable(x, w, jnp.maximum, _lowest(x.dtype))
    return lax.reduce_window(x, jnp.asarray(_lowest(x.dtype)), lax.max, **_reduce_window(w))


def _reduce_window(w: Windows) -> dict[str, Any]:
    return {
        "window_dimensions": (1, 1, *w.kernel),
        "window_strides": (1, 1, *w.strides),
        "padding": [(0, 0), (0, 0), *zip(w.low, w.reach, strict=True)],
        "window_dilation": (1, 1, *w.dilations),
    }


def _max_with_indices(x: Any, w: Windows, storage_order: int) -> tuple[Any, Any]:
    m = xp(x)
    shape = (*x.shape[:2], *w.outputs)
    if 0 in x.shape or 0 in shape:
        return m.full(shape, _lowest(x.dtype), x.dtype), m.zeros(shape, np.int64)
    padded = isolate(pad_spatial(x, w.low, w.reach, _lowest(x.dtype)))
    rank = len(w.sizes)
    strides = [math.prod(w.sizes[:i]) if storage_order else math.prod(w.sizes[i + 1 :]) for i in range(rank)]
    best: Any = None
    index: Any = None
    for place, part in taps(padded, w):
        flat: Any = np.zeros((1,) * rank, np.int64)
        valid: Any = np.ones((1,) * rank, np.bool_)
        for axis in range(rank):
            line = np.arange(w.outputs[axis]) * w.strides[axis] + place[axis] * w.dilations[axis] - w.low[axis]
            line = line.reshape(-1, *(1,) * (rank - axis - 1))
            flat = flat + np.clip(line, 0, w.sizes[axis] - 1) * strides[axis]
            valid = valid & (line >= 0) & (line < w.sizes[axis])
        if best is None:
            best = part
            index = np.where(valid, flat, -1)
            index = m.broadcast_to(m.asarray(index), shape)
            continue
        better = (part > best) | (index < 0)
        if is_float(x.dtype):
            better = better | (m.isnan(part) & ~m.isnan(best))
        better = better & m.asarray(valid)
        best = m.where(better, part, best)
        index = m.where(better, m.asarray(flat), index)
    size = math.prod(w.sizes)
    planes = np.arange(x.shape[0] * x.shape[1], dtype=np.int64).reshape(*x.shape[:2], *(1,) * rank) * size
    return m.asarray(best), m.where(index < 0, m.zeros_like(index), index) + m.asarray(planes)


@operator("GlobalMaxPool", since_version=1)
def global_max_pool_1(X: Any, /, *, context: Context) -> Any:
    """The greatest element of each channel, the lowest value of the dtype where there is none."""
    rows = X.reshape(*X.shape[:2], math.prod(X.shape[2:]))
    highest = row_extreme(rows, context, largest=True, initial=_lowest(X.dtype))
    return highest.reshape(*X.shape[:2], *(1,) * (X.ndim - 2))


@operator("MaxUnpool", since_version=9, static=("output_shape",))
def max_unpool_9(
    X: Any,
    I: Any,
    output_shape: np.ndarray | None = None,
    /,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Put each element back to the place in the whole tensor that MaxPool's index names; zeros elsewhere.

    The indices count in the tensor of the size that `kernel_shape`, `strides` and `pads` give; a larger `output_shape`
    adds zeros at the end of the axes (as the standard's test has it).
    """
    rank = X.ndim - 2
    kernel = spatial(kernel_shape, rank, 1, "kernel_shape")
    steps = spatial(strides, rank, 1, "strides")
    flat = spatial(pads, 2 * rank, 0, "pads")
    sizes = [(n - 1) * s + k - flat[i] - flat[rank + i] for i, (n, s, k) in enumerate(zip(X.shape[2:], steps, kernel))]
    shape = tuple(context.budget((*X.shape[:2], *(max(0, n) for n in sizes)), X.dtype))
    m = xp(X, I)
    total = math.prod(shape)
    if total and X.size:
        places, valid = context.bounded(I.reshape(-1), total, input="I", axis=None)
        values = X.reshape(-1)
        if m is np:
            y: Any = np.zeros(total, X.dtype)
            y[places] = values
        else:
            y = jnp.zeros(total, X.dtype).at[places].set(jnp.asarray(values), mode="promise_in_bounds")
        y = y.reshape(shape)
        if valid is not None:
            y = context.fill_invalid(y, m.all(valid))
    else:
        y = m.zeros(shape, X.dtype)
    if output_shape is None or len(output_shape) == 0:
        return y
    wanted = tuple(context.budget([int(n) for n in output_shape], X.dtype))
    if len(wanted) != X.ndim or wanted[:2] != shape[:2] or any(a < b for a, b in zip(wanted, shape, strict=True)):
        raise ValueError(f"output_shape {wanted} is smaller than the unpooled shape {shape}")
    return pad_spatial(y, [0] * rank, [a - b for a, b in zip(wanted[2:], shape[2:], strict=True)])


# --- mean ---------------------------------------------------------------------------------------------------------------


def _sums(x: Any, w: Windows, context: Context) -> Any:
    """The sum of each window; x is in the dtype to accumulate in."""
    if 0 in x.shape or 0 in w.outputs:
        return xp(x).zeros((*x.shape[:2], *w.outputs), x.dtype)
    if is_host(x):
        return separable(x, w, np.add)
    if context.lowers("separable"):
        return separable(x, w, jnp.add)
    return lax.reduce_window(x, jnp.zeros((), x.dtype), lax.add, **_reduce_window(w))


@operator("AveragePool", since_version=1)
def average_pool_1(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Until version 7 padding never counts."""
    return average_pool_19(X, auto_pad=auto_pad, kernel_shape=kernel_shape, pads=pads, strides=strides, context=context)


@operator("AveragePool", since_version=7)
def average_pool_7(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    count_include_pad: int = 0,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Until version 10 there is no `ceil_mode`."""
    return average_pool_19(
        X,
        auto_pad=auto_pad,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )


@operator("AveragePool", since_version=10)
def average_pool_10(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Until version 19 there are no dilations."""
    return average_pool_19(
        X,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )


@operator("AveragePool", since_version=19)
def average_pool_19(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """The mean of each window, over its elements or (`count_include_pad`) over these and the stated padding.

    The part of a `ceil_mode` window that lies beyond the padding never counts. A window of padding only gives 0.
    """
    w = windows(
        X.shape,
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        partial=True,
    )
    total = _sums(widen(X), w, context)
    counts = np.maximum(w.counts(bool(count_include_pad)), 1).astype(total.dtype)
    return narrow(total / counts, X.dtype)


@operator("GlobalAveragePool", since_version=1)
def global_average_pool_1(X: Any, /) -> Any:
    """The mean of each channel; NaN where the spatial axes are empty."""
    x = widen(X)
    flat = x.reshape(*X.shape[:2], math.prod(X.shape[2:]))
    count = flat.shape[2]
    m = xp(X)
    if count == 0:
        mean = m.full((*X.shape[:2], 1), np.nan, x.dtype)
    elif m is np:
        mean = flat.sum(axis=2, keepdims=True) / np.asarray(count, x.dtype)
    else:
        # A product with a constant vector is vectorised by XLA, a reduction along the last axis is not.
        weights = jnp.full((count, 1), 1.0 / count, x.dtype)
        mean = jnp.matmul(flat, weights, precision=lax.Precision.HIGHEST)
    return narrow(mean.reshape(*X.shape[:2], *(1,) * (X.ndim - 2)), X.dtype)


# --- norm ---------------------------------------------------------------------------------------------------------------


def _power(x: Any, p: float) -> Any:
    if p == 1:
        return abs(x)
    return x * x if p == 2 else abs(x) ** xp(x).asarray(p, x.dtype)


@operator("LpPool", since_version=1)
def lp_pool_1(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int] | None = None,
    p: float = 2.0,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Until version 2 `p` is a float, and `kernel_shape` may be left out by the schema but not by the meaning."""
    if not kernel_shape:
        raise ValueError("LpPool needs kernel_shape; set the attribute")
    w = windows(X.shape, kernel_shape, strides=strides, dilations=None, pads=pads, auto_pad=auto_pad, partial=True)
    return narrow(safe_root(_sums(_power(widen(X), p), w, context), p), X.dtype)


@operator("LpPool", since_version=2)
def lp_pool_2(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int],
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Until version 18 there are no dilations and no `ceil_mode`."""
    return lp_pool_18(X, auto_pad=auto_pad, kernel_shape=kernel_shape, p=p, pads=pads, strides=strides, context=context)


@operator("LpPool", since_version=18)
def lp_pool_18(
    X: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """The p-norm of each window: (sum |x|^p)^(1/p)."""
    w = windows(
        X.shape,
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        partial=True,
    )
    return narrow(safe_root(_sums(_power(widen(X), p), w, context), p), X.dtype)


@operator("GlobalLpPool", since_version=1)
def global_lp_pool_1(X: Any, /, *, p: float = 2.0) -> Any:
    """The p-norm of each channel. Until version 2 `p` is a float."""
    total = _power(widen(X), p).sum(axis=tuple(range(2, X.ndim)), keepdims=True)
    return narrow(safe_root(total, p), X.dtype)


@operator("GlobalLpPool", since_version=2)
def global_lp_pool_2(X: Any, /, *, p: int = 2) -> Any:
    """The p-norm of each channel."""
    return global_lp_pool_1(X, p=p)
