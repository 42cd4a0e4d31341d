"""Arithmetic that several families share: accumulating in float32, matrix products, stable elementary functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.registry import is_host, xp
from transmuter_async.operators.rows import row_extreme, row_sum

__all__ = [
    "device_index",
    "first_highest",
    "is_float",
    "matmul",
    "narrow",
    "safe_root",
    "sigmoid",
    "softmax",
    "spatial",
    "wide_dtype",
    "widen",
]

_NARROW_FLOATS = frozenset({"float16", "bfloat16"})


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a real floating one, the narrow ones included."""
    return bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype to accumulate in: float32 for every float narrower than it, else the dtype itself."""
    return _wide(np.dtype(dtype))


@functools.cache
def _wide(dtype: np.dtype) -> np.dtype:
    if dtype.name in _NARROW_FLOATS or (is_float(dtype) and dtype.itemsize < 2):
        return np.dtype(np.float32)
    return dtype


def widen(x: Any) -> Any:
    """`x` in its `wide_dtype`: float16, bfloat16 and float8 become float32, everything else stays."""
    wide = wide_dtype(x.dtype)
    return x if x.dtype == wide else x.astype(wide)


def narrow(x: Any, dtype: Any) -> Any:
    """`x` as `dtype`; on the host always an array, and an overflow to infinity gives no warning."""
    dtype = np.dtype(dtype)
    if is_host(x):
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(dtype, copy=False)
    return x if x.dtype == dtype else x.astype(dtype)


def matmul(a: Any, b: Any, platform: str = "cpu") -> Any:
    """The product of `numpy.matmul`, in the dtype of `a`; floats narrower than float32 accumulate in float32.

    XLA on the CPU widens narrow operands itself, badly; other platforms multiply them natively.
    """
    dtype = a.dtype
    if is_host(a, b):
        with np.errstate(all="ignore"):
            return narrow(np.matmul(widen(a), widen(b)), dtype)
    if dtype != wide_dtype(dtype):
        if platform == "cpu":
            return jnp.matmul(widen(jnp.asarray(a)), widen(jnp.asarray(b))).astype(dtype)
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(dtype)
    return jnp.matmul(a, b)


def device_index(index: Any, size: int) -> Any:
    """Indices within `[0, size)`, for gathering on the device: int32 where that holds them.

    XLA gathers with it, and a gradient's transpose, which is traced outside of our 64-bit context, can't take more.
    """
    return index.astype(np.int32) if index.dtype == np.int64 and size < 2**31 else index


def first_highest(x: Any, axis: int, *, keepdims: bool = False) -> Any:
    """Where the highest along an axis is, the first of equals (NaN is the highest): int64, traced int32.

    A program is lowered outside of our 64-bit context where the caller's own jit surrounds it; jax then lowers a 64-bit
    argmax to a 32-bit one, which does not fit.
    """
    if is_host(x):
        return np.asarray(np.argmax(x, axis=axis, keepdims=keepdims))
    found = lax.argmax(x, axis % x.ndim, np.int32)
    return jnp.expand_dims(found, axis) if keepdims else found


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) without overflow, in x's dtype."""
    if is_host(x):
        half = np.asarray(0.5, x.dtype)
        return half * np.tanh(half * x) + half
    return lax.logistic(x)


def softmax(x: Any, axis: int = -1, *, context: Context | None = None) -> Any:
    """Softmax along `axis` in x's dtype; an axis of size 0 gives an empty result, a row of -inf gives zeros.

    Args:
        x: The tensor.
        axis: Counted from the front or the end.
        context: Of the node, which says how rows are reduced; None takes the plain form.
    """
    m = xp(x)
    if x.shape[axis] == 0:
        return x
    rows = axis % x.ndim == x.ndim - 1
    with np.errstate(all="ignore"):
        top = row_extreme(x, context, largest=True) if rows else m.max(x, axis=axis, keepdims=True)
        top = m.where(top == -np.inf, m.zeros_like(top), top)
        if m is jnp:
            top = lax.stop_gradient(top)
        weights = m.exp(x - top)
        total = row_sum(weights, context) if rows else weights.sum(axis=axis, keepdims=True)
        return weights / m.where(total == 0, m.ones_like(total), total)


def safe_root(x: Any, p: float) -> Any:
    """The `p`-th root of non-negative `x`, with gradient 0 (not NaN) where `x` is 0."""
    if p == 1:
        return x
    m = xp(x)
    zero = x == 0
    positive = m.where(zero, m.ones_like(x), x)
    root = m.sqrt(positive) if p == 2 else positive ** m.asarray(1.0 / p, x.dtype)
    return m.where(zero, m.zeros_like(x), root)


def spatial(values: Sequence[int] | None, rank: int, default: int, what: str) -> tuple[int, ...]:
    """An attribute with one entry for each of `rank` axes, or `default` for each where it is not given."""
    if values is None or len(values) == 0:
        return (default,) * rank
    if len(values) != rank:
        raise ValueError(f"{what} {tuple(values)} must have {rank} entries, one for each spatial axis")
    return tuple(int(value) for value in values)
