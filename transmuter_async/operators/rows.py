"""Reductions along rows, the last axis of a tensor, in the form that a program's platform does well.

XLA's CPU backend does not vectorise a reduction along the axis that is contiguous in memory: the order of its steps is fixed.
A product with ones it does, and sixteen running extremes beside each other, of which the last step takes the one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.registry import is_host, xp

__all__ = ["row_extreme", "row_sum"]

# Shorter rows gain nothing from another form.
_SHORTEST_DOT = 16
_SHORTEST_LANES = 64
_LANES = 16


def row_sum(x: Any, context: Context | None) -> Any:
    """Sums along the last axis, kept with size 1, in x's dtype; floats narrower than 32 bits are the caller's to widen.

    Args:
        x: (..., n).
        context: Of the node; None takes the plain form.
    """
    if (
        context is not None
        and not is_host(x)
        and x.dtype == np.float32
        and x.shape[-1] >= _SHORTEST_DOT
        and context.lowers("row product")
    ):
        return (x @ jnp.ones((x.shape[-1],), x.dtype))[..., None]
    return xp(x).sum(x, axis=-1, keepdims=True, dtype=x.dtype)


def row_extreme(x: Any, context: Context | None, *, largest: bool, initial: Any = None) -> Any:
    """Maxima (or minima) along the last axis, kept with size 1. NaN wins.

    Args:
        x: (..., n), numbers.
        context: Of the node; None takes the plain form.
        largest: Maxima, else minima.
        initial: Of an empty row; None: there is none.
    """
    if (
        context is not None
        and not is_host(x)
        and x.dtype != np.bool_
        and x.shape[-1] >= _SHORTEST_LANES
        and context.lowers("row lanes")
    ):
        return _in_lanes(largest, x)
    m = xp(x)
    more = {} if initial is None else {"initial": initial}
    return (m.max if largest else m.min)(x, axis=-1, keepdims=True, **more)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_lanes(largest: bool, x: Any) -> Any:
    """Sixteen extremes of every sixteenth element, then the extreme of these; and of what is left at the end of a row."""
    pick = jnp.maximum if largest else jnp.minimum
    reduce = jnp.max if largest else jnp.min
    count = x.shape[-1] // _LANES * _LANES
    lanes = reduce(x[..., :count].reshape(*x.shape[:-1], count // _LANES, _LANES), axis=-2)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = pick(lanes[..., :half], lanes[..., half:])
    if count < x.shape[-1]:
        lanes = pick(lanes, reduce(x[..., count:], axis=-1, keepdims=True))
    return lanes


@_in_lanes.defjvp
def _in_lanes_jvp(largest: bool, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    """That of the plain form, which divides it among equal extremes."""
    reduce = jnp.max if largest else jnp.min
    primal, tangent = jax.jvp(lambda x: reduce(x, axis=-1, keepdims=True), primals, tangents)
    return primal, tangent
