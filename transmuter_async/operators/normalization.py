"""Normalisations: of a batch, an instance, a layer, groups of channels; RMS, LRN, Lp, mean and variance.

Statistics of floats narrower than float32 are taken in float32, whatever `stash_type` says beyond that; a variance is
the mean of squared deviations, never a difference of large numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.graph import dtype_of
from transmuter_async.operators.numeric import narrow, wide_dtype, widen
from transmuter_async.operators.registry import operator, xp


def _mean(x: Any, axes: tuple[int, ...]) -> Any:
    """The mean over `axes`, kept as size 1; NaN where there is nothing."""
    m = xp(x)
    count = math.prod(x.shape[axis] for axis in axes)
    if count == 0:
        return m.full([1 if i in axes else n for i, n in enumerate(x.shape)], np.nan, x.dtype)
    if m is jnp and axes == tuple(range(x.ndim - len(axes), x.ndim)):
        # A product with a constant vector is vectorised by XLA on the CPU, a reduction along the last axis is not.
        flat = x.reshape(*x.shape[: x.ndim - len(axes)], count)
        weights = jnp.full((count, 1), 1.0 / count, x.dtype)
        mean = jnp.matmul(flat, weights, precision=lax.Precision.HIGHEST)
        return mean.reshape(*x.shape[: x.ndim - len(axes)], *(1,) * len(axes))
    return x.sum(axis=axes, keepdims=True) / m.asarray(count, x.dtype)


def _inverse_deviation(variance: Any, epsilon: float) -> Any:
    m = xp(variance)
    return m.asarray(1, variance.dtype) / m.sqrt(variance + m.asarray(epsilon, variance.dtype))


def _standardise(x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """`x` with mean 0 and deviation 1 over `axes`; also the mean and the inverse deviation."""
    with np.errstate(all="ignore"):
        mean = _mean(x, axes)
        centred = x - mean
        inverse = _inverse_deviation(_mean(centred * centred, axes), epsilon)
        return centred * inverse, mean, inverse


# --- batch --------------------------------------------------------------------------------------------------------------


def _inference(x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float) -> Any:
    """Parameters hold one value for each channel, or (spatial=0) one for each element of a sample."""
    if scale.ndim == 1:
        shape: tuple[int, ...] = (1,) if x.ndim == 1 else (-1, *(1,) * (x.ndim - 2))
    else:
        shape = tuple(scale.shape)
    scale, bias, mean, var = (widen(p).astype(wide_dtype(x.dtype)).reshape(shape) for p in (scale, bias, mean, var))
    with np.errstate(all="ignore"):
        y = (widen(x) - mean) * (scale * _inverse_deviation(var, epsilon)) + bias
    return narrow(y, x.dtype)


def _statistics(x: Any, spatial: bool = True) -> tuple[Any, Any]:
    """Mean and population variance of each channel (or element of a sample) over the batch."""
    x = widen(x)
    axes = tuple(i for i in range(x.ndim) if i != 1) if spatial and x.ndim > 1 else (0,)
    with np.errstate(all="ignore"):
        mean = _mean(x, axes)
        deviation = x - mean
        var = _mean(deviation * deviation, axes)
    shape = (-1,) if spatial else tuple(x.shape[1:])
    return mean.reshape(shape), var.reshape(shape)


def _moving(old: Any, new: Any, momentum: float) -> Any:
    m = xp(old, new)
    wide = widen(old)
    mixed = wide * m.asarray(momentum, wide.dtype) + new.astype(wide.dtype) * m.asarray(1 - momentum, wide.dtype)
    return narrow(mixed, old.dtype)


def _training_old(
    x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float, momentum: float, spatial: bool
) -> tuple[Any, ...]:
    """The five outputs of versions 1 to 9 in training."""
    batch_mean, batch_var = _statistics(x, spatial)
    y = _inference(x, scale, bias, batch_mean, batch_var, epsilon)
    moved = _moving(mean, batch_mean, momentum), _moving(var, batch_var, momentum)
    return (y, *moved, narrow(batch_mean, x.dtype), narrow(batch_var, x.dtype))


@operator("BatchNormalization", since_version=1)
def batch_normalization_1(
    X: Any,
    scale: Any,
    B: Any,
    mean: Any,
    var: Any,
    /,
    *,
    consumed_inputs: Sequence[int],
    epsilon: float = 1e-5,
    is_test: int = 0,
    momentum: float = 0.9,
    spatial: int = 1,
) -> Any:
    """`consumed_inputs` was a hint about memory and means nothing."""
    return batch_normalization_6(
        X, scale, B, mean, var, epsilon=epsilon, is_test=is_test, momentum=momentum, spatial=spatial
    )


@operator("BatchNormalization", since_version=6)
def batch_normalization_6(
    X: Any,
    scale: Any,
    B: Any,
    mean: Any,
    var: Any,
    /,
    *,
    epsilon: float = 1e-5,
    is_test: int = 0,
    momentum: float = 0.9,
    spatial: int = 1,
) -> Any:
    """Until version 7 the attribute `is_test` tells whether the given statistics are used or the batch's own."""
    if is_test:
        return _inference(X, scale, B, mean, var, epsilon)
    return _training_old(X, scale, B, mean, var, epsilon, momentum, bool(spatial))


@operator("BatchNormalization", since_version=7)
def batch_normalization_7(
    X: Any,
    scale: Any,
    B: Any,
    mean: Any,
    var: Any,
    /,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    n_outputs: int,
) -> Any:
    """Until version 9 the statistics may be those of each element (`spatial` 0); more than one output is training."""
    if n_outputs > 1:
        return _training_old(X, scale, B, mean, var, epsilon, momentum, bool(spatial))
    return _inference(X, scale, B, mean, var, epsilon)


@operator("BatchNormalization", since_version=9)
def batch_normalization_9(
    X: Any,
    scale: Any,
    B: Any,
    mean: Any,
    var: Any,
    /,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    n_outputs: int,
) -> Any:
    """Until version 14 more than one output means training."""
    return batch_normalization_7(X, scale, B, mean, var, epsilon=epsilon, momentum=momentum, n_outputs=n_outputs)


@operator("BatchNormalization", since_version=14)
def batch_normalization_14(
    X: Any,
    scale: Any,
    B: Any,
    input_mean: Any,
    input_var: Any,
    /,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Any:
    """(X - mean) / sqrt(var + epsilon) * scale + B for each channel.

    With `training_mode` mean and population variance are the batch's, and the moving ones come out as well.
    """
    if not training_mode:
        return _inference(X, scale, B, input_mean, input_var, epsilon)
    mean, var = _statistics(X)
    y = _inference(X, scale, B, mean, var, epsilon)
    return y, _moving(input_mean, mean, momentum), _moving(input_var, var, momentum)


# --- instance, groups, layer --------------------------------------------------------------------------------------------


@operator("InstanceNormalization", since_version=1)
def instance_normalization_1(
    input: Any, scale: Any, B: Any, /, *, consumed_inputs: Sequence[int] | None = None, epsilon: float = 1e-5
) -> Any:
    """`consumed_inputs` was a hint about memory and means nothing."""
    return instance_normalization_6(input, scale, B, epsilon=epsilon)


@operator("InstanceNormalization", since_version=6)
def instance_normalization_6(input: Any, scale: Any, B: Any, /, *, epsilon: float = 1e-5) -> Any:
    """Each channel of each sample to mean 0 and deviation 1, then scaled and shifted."""
    normal, _, _ = _standardise(widen(input), tuple(range(2, input.ndim)), epsilon)
    shape = (-1, *(1,) * (input.ndim - 2))
    return narrow(normal * widen(scale).reshape(shape) + widen(B).reshape(shape), input.dtype)


def _grouped(x: Any, groups: int, epsilon: float) -> Any:
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(f"num_groups={groups} does not divide the {channels} channels of {tuple(x.shape)}")
    split = widen(x).reshape(x.shape[0], groups, channels // groups * math.prod(x.shape[2:]))
    return _standardise(split, (2,), epsilon)[0].reshape(x.shape)


@operator("GroupNormalization", since_version=18)
def group_normalization_18(X: Any, scale: Any, bias: Any, /, *, epsilon: float = 1e-5, num_groups: int) -> Any:
    """Deprecated by version 21: scale and bias hold one value for each *group*."""
    normal = _grouped(X, num_groups, epsilon)
    if scale.shape != (num_groups,) or bias.shape != (num_groups,):
        raise ValueError(
            f"scale {scale.shape} and bias {bias.shape} must hold one value for each of {num_groups} groups"
        )
    m = xp(X, scale, bias)
    shape = (-1, *(1,) * (X.ndim - 2))
    spread = [m.repeat(widen(p), X.shape[1] // num_groups).reshape(shape) for p in (scale, bias)]
    return narrow(normal * spread[0] + spread[1], X.dtype)


@operator("GroupNormalization", since_version=21)
def group_normalization_21(
    X: Any, scale: Any, bias: Any, /, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Any:
    """Each group of channels of each sample to mean 0 and deviation 1; scale and bias for each channel."""
    shape = (-1, *(1,) * (X.ndim - 2))
    normal = _grouped(X, num_groups, epsilon)
    return narrow(normal * widen(scale).reshape(shape) + widen(bias).reshape(shape), X.dtype)


def _trailing(x: Any, axis: int) -> tuple[int, ...]:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is outside of [-{x.ndim}, {x.ndim}) for an input of shape {tuple(x.shape)}")
    return tuple(range(axis % x.ndim, x.ndim))


@operator("LayerNormalization", since_version=17)
def layer_normalization_17(
    X: Any, Scale: Any, B: Any = None, /, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, n_outputs: int
) -> Any:
    """The axes from `axis` on to mean 0 and deviation 1, then scaled and shifted.

    Computed in float32, or float64 for such inputs; `stash_type` decides the dtype of Mean and InvStdDev.
    """
    normal, mean, inverse = _standardise(widen(X), _trailing(X, axis), epsilon)
    y = normal * widen(Scale)
    if B is not None:
        y = y + widen(B)
    y = narrow(y, X.dtype)
    if n_outputs == 1:
        return y
    stash = dtype_of(stash_type)
    return y, narrow(mean, stash), narrow(inverse, stash)


@operator("RMSNormalization", since_version=23)
def rms_normalization_23(X: Any, scale: Any, /, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Any:
    """X / sqrt(mean(X^2) + epsilon) over the axes from `axis` on, scaled; the result has scale's dtype."""
    x = widen(X)
    axes = _trailing(X, axis)
    wide = np.promote_types(x.dtype, wide_dtype(scale.dtype))
    with np.errstate(all="ignore"):
        y = (x * _inverse_deviation(_mean(x * x, axes), epsilon)).astype(wide) * scale.astype(wide)
    return narrow(y, scale.dtype)


# --- others -------------------------------------------------------------------------------------------------------------


@operator("LRN", since_version=1)
def lrn_1(X: Any, /, *, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0, size: int) -> Any:
    """X / (bias + alpha / size * sum of squares over `size` neighbouring channels) ^ beta."""
    m = xp(X)
    x = widen(X)
    channels = X.shape[1]
    before = (size - 1) // 2
    squares = m.pad(x * x, [(0, 0), (before, size - 1 - before), *((0, 0),) * (X.ndim - 2)])
    if m is jnp:
        squares = lax.optimization_barrier(squares)
    total = squares[:, :channels]
    for step in range(1, size):
        total = total + squares[:, step : step + channels]
    base = m.asarray(bias, x.dtype) + m.asarray(alpha / size, x.dtype) * total
    with np.errstate(all="ignore"):
        return narrow(x / base ** m.asarray(beta, x.dtype), X.dtype)


@operator("LpNormalization", since_version=1)
def lp_normalization_1(input: Any, /, *, axis: int = -1, p: int = 2) -> Any:
    """The input / its 1- or 2-norm along `axis`; 0 where the norm is 0 (gradient 0 there too)."""
    if p not in (1, 2):
        raise ValueError(f"LpNormalization has p 1 or 2, got {p}")
    m = xp(input)
    x = widen(input)
    with np.errstate(all="ignore"):
        total = (abs(x) if p == 1 else x * x).sum(axis=axis, keepdims=True)
        zero = total == 0
        safe = m.where(zero, m.ones_like(total), total)
        norm = safe if p == 1 else m.sqrt(safe)
        return narrow(m.where(zero, m.zeros_like(x), x / norm), input.dtype)


@operator("MeanVarianceNormalization", since_version=9)
def mean_variance_normalization_9(X: Any, /, *, axes: Sequence[int] = (0, 2, 3)) -> Any:
    """(X - mean) / (deviation + 1e-9) over `axes`; the standard's body adds 1e-9 to the deviation."""
    m = xp(X)
    x = widen(X)
    over = tuple(sorted({int(axis) % X.ndim for axis in axes}))
    with np.errstate(all="ignore"):
        centred = x - _mean(x, over)
        variance = _mean(centred * centred, over)
        zero = variance == 0
        deviation = m.where(zero, m.zeros_like(variance), m.sqrt(m.where(zero, m.ones_like(variance), variance)))
        return narrow(centred / (deviation + m.asarray(1e-9, x.dtype)), X.dtype)
