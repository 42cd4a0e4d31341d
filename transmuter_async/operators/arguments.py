"""What an operator asks of its arguments: kinds of dtypes and their limits, axes, scalars, the old broadcasting."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.registry import is_host, xp

__all__ = [
    "align_legacy",
    "finite_limits",
    "host_scalar",
    "is_floating",
    "is_integer",
    "is_unsigned",
    "normalize_axes",
    "normalize_axis",
    "scalar_input",
]


def is_floating(dtype: Any) -> bool:
    """Whether the dtype is a float, the narrow ones of ml_dtypes included."""
    return bool(jnp.issubdtype(dtype, np.floating))


def is_integer(dtype: Any) -> bool:
    """Whether the dtype is an integer, the narrow ones of ml_dtypes included, and not bool."""
    return bool(jnp.issubdtype(dtype, np.integer))


def is_unsigned(dtype: Any) -> bool:
    """Whether the dtype is an unsigned integer."""
    return bool(jnp.issubdtype(dtype, np.unsignedinteger))


def finite_limits(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest finite value, of that dtype, for floats and integers."""
    limits = ml_dtypes.finfo(dtype) if is_floating(dtype) else ml_dtypes.iinfo(dtype)
    return np.asarray(limits.min, dtype), np.asarray(limits.max, dtype)


def host_scalar(x: Any) -> Any:
    """The Python number in a host array of one element, else None."""
    return x.reshape(-1)[0].item() if is_host(x) and x.size == 1 else None


def scalar_input(x: Any, name: str, context: Context) -> Any:
    """An input that the standard wants as a scalar; one element of any rank is accepted, as onnxruntime does.

    Raises:
        OperatorError: It has more or fewer elements.
    """
    if x.size != 1:
        raise context.error(f"{name} must be a scalar, it has shape {tuple(x.shape)}")
    return x.reshape(())


def normalize_axis(axis: int, rank: int, context: Context) -> int:
    """An axis counted from the front.

    Raises:
        OperatorError: It is not in `[-rank, rank)`.
    """
    if not -rank <= axis < rank:
        raise context.error(f"axis {axis} is outside of [{-rank}, {rank}) of a tensor of rank {rank}")
    return int(axis) % rank


def normalize_axes(axes: Any, rank: int, context: Context) -> tuple[int, ...]:
    """Axes counted from the front, in the given order.

    Raises:
        OperatorError: One is not in `[-rank, rank)`, or is given twice.
    """
    result = tuple(normalize_axis(int(axis), rank, context) for axis in axes)
    if len(set(result)) != len(result):
        raise context.error(f"axes {[int(a) for a in axes]} name the same axis twice")
    return result


def align_legacy(a: Any, b: Any, axis: int | None, broadcast: int) -> tuple[Any, Any]:
    """Shape `b` for the limited broadcasting before version 7: it is a contiguous part of the shape of `a`.

    Args:
        a: The input that has the shape of the result.
        b: The other input: one element, or a shape that appears in that of `a`, from `axis` on; axes of size 1 fit too.
        axis: First axis of `a` that `b` has; None: `b` has the last ones.
        broadcast: 0 demands equal shapes.

    Raises:
        ValueError: The shapes do not fit.
    """
    if a.shape == b.shape:
        return a, b
    if not broadcast:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ and the attribute `broadcast` is 0")
    if b.size == 1 and b.ndim <= a.ndim:
        return a, b.reshape(())
    # An equal rank leaves one way to align, whatever `axis` says.
    start = a.ndim - b.ndim if axis is None or a.ndim == b.ndim else axis + a.ndim * (axis < 0)
    part = a.shape[start : start + b.ndim] if start >= 0 else ()
    # Exporters of those days relied on axes of size 1 as well.
    if len(part) != b.ndim or any(size not in (1, whole) for size, whole in zip(b.shape, part, strict=True)):
        raise ValueError(f"shape {tuple(b.shape)} is no part of {tuple(a.shape)} from axis {start} on")
    return a, xp(b).reshape(b, (*b.shape, *(1 for _ in range(a.ndim - start - b.ndim))))
