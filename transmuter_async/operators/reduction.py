"""Reductions over axes, positions of extremes, and running sums and products.

Floats narrower than 32 bits are accumulated in float32. Over an empty set a sum is 0, a product 1, a maximum -inf or the
smallest value of the dtype, a minimum the opposite; the standard leaves the mean open, it is 0 as in onnxruntime.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.arguments import (
    finite_limits,
    is_floating,
    is_integer,
    normalize_axes,
    normalize_axis,
    scalar_input,
)
from transmuter_async.operators.context import Context
from transmuter_async.operators.elementwise import truncating_divide
from transmuter_async.operators.numeric import safe_root, widen
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.rows import row_extreme, row_sum

__all__ = ["reduce_axes"]

Reduction = Callable[[Any, tuple[int, ...], bool, Context], Any]


def reduce_axes(
    compute: Reduction, data: Any, axes: Sequence[int] | np.ndarray | None, keepdims: int, noop: int, context: Context
) -> Any:
    """Apply a reduction as all of them share it.

    Args:
        compute: Takes the data (narrow floats as float32), axes counted from the front, keepdims and the context.
        data: The tensor to reduce.
        axes: Axes; None or none: all of them, or with `noop` none.
        keepdims: Whether reduced axes stay, with size 1.
        noop: The attribute `noop_with_empty_axes`: the steps around the reduction are still done.
        context: Of the node.

    Returns:
        The result in the dtype of `data`.
    """
    if axes is None or len(axes) == 0:
        over: tuple[int, ...] = () if noop else tuple(range(data.ndim))
    else:
        over = normalize_axes(np.asarray(axes).reshape(-1), data.ndim, context)
    return compute(widen(data), over, bool(keepdims), context).astype(data.dtype)


# --- what is computed -------------------------------------------------------------------------------------------------


def _sum(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    if axes == (x.ndim - 1,):
        total = row_sum(x, context)
        return total if keepdims else total[..., 0]
    return xp(x).sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _count(x: Any, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _mean(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    total = _sum(x, axes, keepdims, context)
    count = np.asarray(max(_count(x, axes), 1), x.dtype)
    return truncating_divide(total, count) if is_integer(x.dtype) else total / count


def _product(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    return xp(x).prod(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _extreme(x: Any, *, largest: bool) -> np.ndarray:
    """The value that loses every comparison: the maximum or minimum of nothing."""
    if x.dtype == np.bool_:
        return np.asarray(not largest)
    if is_floating(x.dtype):
        return np.asarray(-np.inf if largest else np.inf, x.dtype)
    return finite_limits(x.dtype)[0 if largest else 1]


def _maximum(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context, *, largest: bool = True) -> Any:
    initial = _extreme(x, largest=largest)
    if axes == (x.ndim - 1,):
        found = row_extreme(x, context, largest=largest, initial=initial)
        return found if keepdims else found[..., 0]
    module = xp(x)
    return (module.max if largest else module.min)(x, axis=axes, keepdims=keepdims, initial=initial)


_minimum = functools.partial(_maximum, largest=False)


def _l1(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    return _sum(xp(x).abs(x), axes, keepdims, context)


def _sum_square(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    return _sum(x * x, axes, keepdims, context)


def _l2(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    squares = _sum_square(x, axes, keepdims, context)
    return safe_root(squares if is_floating(x.dtype) else squares.astype(np.float64), 2)


def _as_float(x: Any) -> Any:
    # Until version 28 integers are allowed: logarithms of them are truncated.
    return x if is_floating(x.dtype) else x.astype(np.float64)


def _log_sum(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    return xp(x).log(_sum(_as_float(x), axes, keepdims, context))


def _log_sum_exp(x: Any, axes: tuple[int, ...], keepdims: bool, context: Context) -> Any:
    x = _as_float(x)
    module = xp(x)
    top = _maximum(x, axes, True, context)
    top = module.where(module.isfinite(top), top, module.zeros_like(top))
    if not is_host(x):
        top = lax.stop_gradient(top)
    result = module.log(_sum(module.exp(x - top), axes, True, context)) + top
    return result if keepdims else module.squeeze(result, axis=axes)


# --- definitions ------------------------------------------------------------------------------------------------------


@operator("ReduceSum", since_version=13, static=("axes",))
def reduce_sum_13(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Sum over axes; integers wrap."""
    return reduce_axes(_sum, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceSum", since_version=1)
def reduce_sum_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 13 the axes are an attribute."""
    return reduce_axes(_sum, data, axes, keepdims, 0, context)


@operator("ReduceMean", since_version=18, static=("axes",))
def reduce_mean_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Mean over axes; of integers the sum divided toward zero."""
    return reduce_axes(_mean, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceMean", since_version=1)
def reduce_mean_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_mean, data, axes, keepdims, 0, context)


@operator("ReduceProd", since_version=18, static=("axes",))
def reduce_prod_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Product over axes; integers wrap."""
    return reduce_axes(_product, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceProd", since_version=1)
def reduce_prod_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_product, data, axes, keepdims, 0, context)


@operator("ReduceMax", since_version=18, static=("axes",))
def reduce_max_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Largest value over axes, NaN where there is one; True wins among bools (version 20)."""
    return reduce_axes(_maximum, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceMax", since_version=1)
def reduce_max_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_maximum, data, axes, keepdims, 0, context)


@operator("ReduceMin", since_version=18, static=("axes",))
def reduce_min_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Smallest value over axes, NaN where there is one; False wins among bools (version 20)."""
    return reduce_axes(_minimum, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceMin", since_version=1)
def reduce_min_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_minimum, data, axes, keepdims, 0, context)


@operator("ReduceL1", since_version=18, static=("axes",))
def reduce_l1_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Sum of absolute values over axes."""
    return reduce_axes(_l1, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceL1", since_version=1)
def reduce_l1_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_l1, data, axes, keepdims, 0, context)


@operator("ReduceL2", since_version=18, static=("axes",))
def reduce_l2_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Root of the sum of squares over axes; the gradient at 0 is 0. Of integers it is truncated."""
    return reduce_axes(_l2, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceL2", since_version=1)
def reduce_l2_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_l2, data, axes, keepdims, 0, context)


@operator("ReduceSumSquare", since_version=18, static=("axes",))
def reduce_sum_square_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Sum of squares over axes."""
    return reduce_axes(_sum_square, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceSumSquare", since_version=1)
def reduce_sum_square_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_sum_square, data, axes, keepdims, 0, context)


@operator("ReduceLogSum", since_version=18, static=("axes",))
def reduce_log_sum_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Logarithm of the sum over axes; -inf over an empty set."""
    return reduce_axes(_log_sum, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceLogSum", since_version=1)
def reduce_log_sum_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_log_sum, data, axes, keepdims, 0, context)


@operator("ReduceLogSumExp", since_version=18, static=("axes",))
def reduce_log_sum_exp_18(data, axes=None, /, *, keepdims=1, noop_with_empty_axes=0, context: Context):
    """Logarithm of the sum of exponentials over axes, without overflow."""
    return reduce_axes(_log_sum_exp, data, axes, keepdims, noop_with_empty_axes, context)


@operator("ReduceLogSumExp", since_version=1)
def reduce_log_sum_exp_1(data, /, *, axes=None, keepdims=1, context: Context):
    """Until version 18 the axes are an attribute."""
    return reduce_axes(_log_sum_exp, data, axes, keepdims, 0, context)


# --- positions of extremes --------------------------------------------------------------------------------------------


def _arg(data: Any, axis: int, keepdims: int, last: int, largest: bool, context: Context) -> Any:
    """Index of the first (or last) extreme along an axis, int64. NaN counts as the extreme, as in numpy."""
    axis = normalize_axis(axis, data.ndim, context)
    size = data.shape[axis]
    if size == 0 and math.prod(s for i, s in enumerate(data.shape) if i != axis) != 0:
        raise context.error(f"axis {axis} of shape {tuple(data.shape)} is empty: there is no extreme to point at")
    x = widen(data)
    index: Any
    if is_host(x):
        if size == 0:
            index = np.zeros([s for i, s in enumerate(x.shape) if i != axis], np.int64)
        else:
            find = np.argmax if largest else np.argmin
            index = size - 1 - find(np.flip(x, axis), axis=axis) if last else find(x, axis=axis)
        index = np.expand_dims(index, axis)
    else:
        # jnp.argmax reduces pairs, which XLA's CPU backend does not vectorise; two plain reductions it does.
        extreme = (_maximum if largest else _minimum)(x, (axis,), True, context)
        hit = (x == extreme) | (x != x) if is_floating(x.dtype) else x == extreme
        places = lax.broadcasted_iota(np.int32 if size < 2**31 else np.int64, x.shape, axis)
        missed = np.asarray(-1 if last else size, places.dtype)
        index = (_maximum if last else _minimum)(jnp.where(hit, places, missed), (axis,), True, context)
    return (index if keepdims else xp(index).squeeze(index, axis=axis)).astype(np.int64)


@operator("ArgMax", since_version=12)
def arg_max_12(data, /, *, axis=0, keepdims=1, select_last_index=0, context: Context):
    """Index of the largest value, the first one of equals, or the last. NaN is taken for the largest (numpy's rule)."""
    return _arg(data, axis, keepdims, select_last_index, True, context)


@operator("ArgMax", since_version=1)
def arg_max_1(data, /, *, axis=0, keepdims=1, context: Context):
    return arg_max_12(data, axis=axis, keepdims=keepdims, context=context)


@operator("ArgMin", since_version=12)
def arg_min_12(data, /, *, axis=0, keepdims=1, select_last_index=0, context: Context):
    """Index of the smallest value, the first one of equals, or the last. NaN is taken for the smallest (numpy's rule)."""
    return _arg(data, axis, keepdims, select_last_index, False, context)


@operator("ArgMin", since_version=1)
def arg_min_1(data, /, *, axis=0, keepdims=1, context: Context):
    return arg_min_12(data, axis=axis, keepdims=keepdims, context=context)


# --- running sums and products ----------------------------------------------------------------------------------------


def _running(x: Any, axis: Any, exclusive: int, reverse: int, name: str, neutral: int, context: Context) -> Any:
    axis = normalize_axis(int(scalar_input(axis, "axis", context)), x.ndim, context)
    module, wide = xp(x), widen(x)
    if is_host(x):
        wide = np.flip(wide, axis) if reverse else wide
        run = (np.cumsum if name == "add" else np.cumprod)(wide, axis=axis, dtype=wide.dtype)
        run = np.flip(run, axis) if reverse else run
    elif x.shape[axis] == 0:
        run = wide
    else:
        # A tree of additions; XLA's own cumulative sum is about half as fast on the CPU.
        run = lax.associative_scan(getattr(jnp, name), wide, axis=axis, reverse=bool(reverse))
    if exclusive and x.shape[axis]:
        size = x.shape[axis]
        edge = module.full([1 if i == axis else s for i, s in enumerate(x.shape)], neutral, wide.dtype)
        kept = lax.slice_in_dim if module is jnp else _slice
        run = (
            module.concatenate([kept(run, 1, size, axis=axis), edge], axis=axis)
            if reverse
            else module.concatenate([edge, kept(run, 0, size - 1, axis=axis)], axis=axis)
        )
    return run.astype(x.dtype)


def _slice(x: np.ndarray, start: int, stop: int, axis: int) -> np.ndarray:
    return x[(slice(None),) * axis + (slice(start, stop),)]


@operator("CumSum", since_version=11, static=("axis",))
def cum_sum_11(x, axis, /, *, exclusive=0, reverse=0, context: Context):
    """Sum of an element and all before it on the axis; without itself (`exclusive`), of all after it (`reverse`)."""
    return _running(x, axis, exclusive, reverse, "add", 0, context)


@operator("CumProd", since_version=26, static=("axis",))
def cum_prod_26(x, axis, /, *, exclusive=0, reverse=0, context: Context):
    """Product of an element and all before it on the axis; without itself (`exclusive`), of all after it (`reverse`)."""
    return _running(x, axis, exclusive, reverse, "multiply", 1, context)
