"""How weights are rearranged before programs use them: by name, so that the disk cache can name what a program takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.contrib_weights import columns_of_n_bits
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.registry import xp

__all__ = ["GROWING", "PREPARED_INPUTS", "RECIPES"]

PREPARED_INPUTS: frozenset[tuple[str, str, str]] = frozenset(
    {
        ("", "Gemm", "B"),
        *(("", name, weight) for name in ("RNN", "GRU", "LSTM") for weight in "WR"),
        *(("com.microsoft", "MatMulNBits", name) for name in ("B", "scales", "zero_points", "g_idx")),
        *(("com.microsoft", "DynamicQuantizeLSTM", name) for name in ("W", "R", "W_zero_point", "R_zero_point")),
        ("", "MatMulInteger", "B"),
        ("", "MatMulInteger", "b_zero_point"),
        *(("", name, weight) for name in ("ConvInteger", "QLinearConv") for weight in ("w", "w_zero_point")),
    }
)
"""Inputs, as (domain, operator, name), that a definition takes with `Context.prepared` itself where they are weights."""

Recipe = Callable[..., Any]


def _same(weight: Any) -> Any:
    return weight


def _filters_last(weight: Any) -> Any:
    """(M, C / group, *kernel) as (*kernel, C / group, M), narrow floats as float32."""
    return xp(weight).moveaxis(widen(weight), (0, 1), (-1, -2))


def _block_of_groups(weight: Any, first: int, each: int, together: int) -> Any:
    """The filters of some groups as (*kernel, together * C / group, together * each), zeros between the groups."""
    m = xp(weight)
    part = _filters_last(weight[first * each : (first + together) * each])
    if together == 1:
        return part
    *kernel, per_group, _ = part.shape
    spread = part.reshape(*kernel, 1, per_group, together, each)
    eye = m.eye(together, dtype=part.dtype).reshape(together, 1, together, 1)
    return (spread * eye).reshape(*kernel, together * per_group, together * each)


def _channels_last(value: Any, rank: int) -> Any:
    """What broadcasts against a value of that rank, with the channels as its last axis."""
    whole = value.reshape((1,) * (rank - value.ndim) + tuple(value.shape))
    return xp(value).moveaxis(whole, 1, -1)


def _gates_of_inputs(weight: Any) -> Any:
    """The W of a recurrent layer, (directions, width, inputs), as (inputs, directions * width)."""
    return widen(weight).reshape(weight.shape[0] * weight.shape[1], weight.shape[2]).T


def _gates_of_state(weight: Any) -> Any:
    """The R of a recurrent layer, (directions, width, hidden), as (directions, hidden, width)."""
    return widen(weight).swapaxes(1, 2)


def _less_origins(weights: Any, zero: Any) -> Any:
    """8-bit weights (directions, inputs, width) less the zero points of each direction or column, as float32 integers."""
    return weights.astype(np.float32) - zero.reshape(zero.shape[0], 1, -1).astype(np.float32)


def _less_zero_point(weights: Any, zero: Any, narrow: int) -> Any:
    """8-bit weights less a zero point for all or each column, as bfloat16 or float32 integers."""
    whole = weights.astype(np.int32)
    if zero is not None:
        whole = whole - (zero.reshape(()) if zero.shape == (1,) else zero).astype(np.int32)
    return whole.astype(jnp.bfloat16 if narrow else np.float32)


def _integer_filters(weights: Any, zero: Any) -> Any:
    """8-bit filters, (M, C / group, *kernel), less a zero point for all or each of them, as float32 integers."""
    whole = weights.astype(np.int32)
    if zero is not None:
        each = zero.reshape(()) if zero.size == 1 else zero.reshape(-1, *(1,) * (weights.ndim - 1))
        whole = whole - each.astype(np.int32)
    return whole.astype(np.float32)


def _column_sums(weights: Any) -> Any:
    """Of integers, (K, N), as int32."""
    return weights.sum(axis=0, dtype=np.int32)


def _deviation(scale: Any, var: Any, epsilon: float) -> Any:
    """What BatchNormalization multiplies the centred channels by."""
    wide = widen(var)
    return widen(scale) * (wide.dtype.type(1) / xp(wide).sqrt(wide + wide.dtype.type(epsilon)))


def _transposed(weight: Any) -> Any:
    return weight.T


def _wide(recipe: Recipe) -> Recipe:
    """The same of a weight that is float32 where it was narrower."""

    def made(weight: Any, *arguments: Any) -> Any:
        return recipe(widen(weight), *arguments)

    return made


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "same": _same,
        "transposed": _transposed,
        "block of groups": _block_of_groups,
        "column sums": _column_sums,
        "deviation": _deviation,
        "filters last": _filters_last,
        "gates of inputs": _gates_of_inputs,
        "gates of state": _gates_of_state,
        "integer filters": _integer_filters,
        "less origins": _less_origins,
        "less zero point": _less_zero_point,
        "n bits": columns_of_n_bits,
        "channels last": _channels_last,
        "wide same": _wide(_same),
        "wide transposed": _wide(_transposed),
        "wide channels last": _wide(_channels_last),
    }
)
"""What each recipe makes of a weight, host or traced."""

GROWING = frozenset(
    {
        *("integer filters", "less origins", "less zero point", "n bits"),
        *("wide same", "wide transposed", "wide channels last"),
    }
)
"""Recipes whose result is several times larger than the weight: only within the budget of constant folding."""
