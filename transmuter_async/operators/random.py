"""Random numbers by the rule of the design: a key for each node, equal on both forms.

The bits are those of `jax.random` with its threefry generator in the partitionable form (the default of JAX), for numpy and
JAX from the same code. Uniform numbers are equal on both forms bit for bit, normal ones up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from transmuter_async.graph import dtype_of
from transmuter_async.operators.arguments import is_floating
from transmuter_async.operators.cast import convert
from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.threefry import threefry2x32

__all__ = ["normal", "random_bits", "uniform"]


def random_bits(key: Any, shape: Sequence[int], width: int = 32) -> Any:
    """Random unsigned integers of `width` bits, 32 or 64: the counters 0, 1, ... encrypted with the key.

    Args:
        key: (2,) uint32, host or traced.
        shape: Shape of the result.
        width: 32 or 64.
    """
    size = math.prod(shape)
    module = xp(key)
    counters = module.arange(size, dtype=np.uint64)
    high, low = (counters >> np.uint64(32)).astype(np.uint32), counters.astype(np.uint32)
    first, second = threefry2x32(key, high, low)
    if width == 32:
        return (first ^ second).reshape(shape)
    return ((first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)).reshape(shape)


def uniform(key: Any, shape: Sequence[int], dtype: Any = np.float32, low: float = 0.0, high: float = 1.0) -> Any:
    """Uniform numbers in `[low, high)`, float32 or float64, equal to `jax.random.uniform`."""
    dtype = np.dtype(dtype)
    width, mantissa = (32, 23) if dtype == np.float32 else (64, 52)
    unsigned = np.uint32 if width == 32 else np.uint64
    bits = random_bits(key, shape, width)
    # A float in [1, 2) has its random mantissa under the exponent of one.
    ones = (bits >> unsigned(width - mantissa)) | np.ones((), dtype).view(unsigned)
    floats = (np.asarray(ones).view(dtype) if is_host(ones) else lax.bitcast_convert_type(ones, dtype)) - dtype.type(1)
    low, high = dtype.type(low), dtype.type(high)
    return xp(floats).maximum(low, floats * (high - low) + low)


def normal(key: Any, shape: Sequence[int], dtype: Any = np.float32) -> Any:
    """Standard normal numbers, float32 or float64, as `jax.random.normal` has them."""
    dtype = np.dtype(dtype)
    drawn = uniform(key, shape, dtype, float(np.nextafter(dtype.type(-1), dtype.type(0))), 1.0)
    inverse = special.erfinv(drawn) if is_host(drawn) else lax.erf_inv(drawn)
    return inverse * dtype.type(math.sqrt(2))


def _compute_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _draw_normal(
    shape: Sequence[int], dtype: np.dtype, mean: float, scale: float, seed: float | None, context: Context
) -> Any:
    if not is_floating(dtype):
        raise context.error(f"dtype {dtype} is no float; give a floating `dtype`")
    wide = _compute_dtype(dtype)
    numbers = normal(context.random_key(seed), context.budget(shape, dtype), wide)
    return (numbers * wide.type(scale) + wide.type(mean)).astype(dtype)


def _draw_uniform(
    shape: Sequence[int], dtype: np.dtype, low: float, high: float, seed: float | None, context: Context
) -> Any:
    if not is_floating(dtype):
        raise context.error(f"dtype {dtype} is no float; give a floating `dtype`")
    wide = _compute_dtype(dtype)
    numbers = uniform(context.random_key(seed), context.budget(shape, dtype), wide, low, high)
    if dtype != wide and low < high:
        # Rounding to fewer bits must not reach the excluded end.
        below = np.nextafter(np.asarray(high, dtype), np.asarray(low, dtype)).astype(wide)
        numbers = xp(numbers).minimum(numbers, below)
    return numbers.astype(dtype)


@operator("RandomNormal", since_version=1, random=True)
def random_normal_1(*, dtype=1, mean=0.0, scale=1.0, seed=None, shape, context: Context):
    """Normal numbers with that mean and standard deviation."""
    return _draw_normal(shape, dtype_of(dtype), mean, scale, seed, context)


@operator("RandomNormalLike", since_version=1, random=True)
def random_normal_like_1(input, /, *, dtype=None, mean=0.0, scale=1.0, seed=None, context: Context):
    """As RandomNormal, with the shape of `input`, and its element type where `dtype` is not given."""
    kind = np.dtype(input.dtype) if dtype is None else dtype_of(dtype)
    return _draw_normal(input.shape, kind, mean, scale, seed, context)


@operator("RandomUniform", since_version=1, random=True)
def random_uniform_1(*, dtype=1, high=1.0, low=0.0, seed=None, shape, context: Context):
    """Uniform numbers in `[low, high)`."""
    return _draw_uniform(shape, dtype_of(dtype), low, high, seed, context)


@operator("RandomUniformLike", since_version=1, random=True)
def random_uniform_like_1(input, /, *, dtype=None, high=1.0, low=0.0, seed=None, context: Context):
    """As RandomUniform, with the shape of `input`, and its element type where `dtype` is not given."""
    kind = np.dtype(input.dtype) if dtype is None else dtype_of(dtype)
    return _draw_uniform(input.shape, kind, low, high, seed, context)


@operator("Multinomial", since_version=7, random=True)
def multinomial_7(input, /, *, dtype=6, sample_size=1, seed=None, context: Context):
    """`sample_size` classes for each row of unnormalised log-probabilities, drawn with replacement.

    The distribution's cumulative function is searched for uniform numbers, all in float64.
    """
    if input.ndim != 2:
        raise context.error(f"input must be (batch, classes), it has shape {tuple(input.shape)}")
    batch, classes = input.shape
    kind = dtype_of(dtype)
    context.budget((batch, sample_size), kind)
    if classes == 0 and batch:
        raise context.error("there are no classes to draw from; input has shape " + str(tuple(input.shape)))
    drawn = uniform(context.random_key(seed), (batch, sample_size), np.float64)
    module = xp(input, drawn)
    logits = input.astype(np.float64)
    weights = module.exp(logits - module.max(logits, axis=1, keepdims=True, initial=-np.inf))
    sums = module.cumsum(weights, axis=1)
    total = sums[:, -1:] if classes else sums
    # Below the total even after rounding, so that a class of probability zero is never drawn.
    wanted = module.minimum(drawn * total, module.nextafter(total, module.zeros_like(total)))
    # Binary search in all rows at once for the first sum that is above what is wanted.
    low = module.zeros(drawn.shape, np.int64)
    high = low + max(classes - 1, 0)
    for _ in range(max(classes - 1, 0).bit_length()):
        middle = (low + high) // 2
        above = module.take_along_axis(sums, middle, axis=1) > wanted
        high = module.where(above, middle, high)
        low = module.where(above, low, module.minimum(middle + 1, high))
    return low.astype(kind)


@operator("Bernoulli", since_version=15, random=True)
def bernoulli_15(input, /, *, dtype=None, seed=None, context: Context):
    """1 with the probability that `input` holds, else 0."""
    kind = np.dtype(input.dtype) if dtype is None else dtype_of(dtype)
    probability = widen(input)
    return convert(uniform(context.random_key(seed), input.shape, probability.dtype) < probability, kind)


# --- Dropout ----------------------------------------------------------------------------------------------------------


def _dropped(data: Any, ratio: Any, seed: float | None, context: Context) -> tuple[Any, Any]:
    """The data with a share of `ratio` of it set to 0 and the rest scaled up, and where it was kept."""
    wide = widen(data)
    ratio = ratio.astype(wide.dtype)
    kept = uniform(context.random_key(seed), data.shape, np.float32) >= ratio.astype(np.float32)
    module = xp(wide, ratio, kept)
    scaled = wide / (wide.dtype.type(1) - ratio)
    return module.where(kept, scaled, module.zeros_like(wide)).astype(data.dtype), kept


@operator("Dropout", since_version=12, random=True)
def dropout_12(data, ratio=None, training_mode=None, /, *, seed=None, n_outputs=1, context: Context):
    """In training mode drops a share of `ratio` (0.5) and scales the rest; else passes the data on. The mask is bool."""
    if training_mode is None or (is_host(training_mode) and not bool(training_mode.reshape(-1)[0])):
        return (data, xp(data).ones(data.shape, np.bool_)) if n_outputs > 1 else data
    share = np.asarray(0.5, np.float32) if ratio is None else widen(ratio.reshape(()))
    if is_host(share) and not 0 <= float(share) < 1:
        raise context.error(f"ratio is {float(share)}; it must be in [0, 1)")
    if not is_host(share):
        outside = ~((share >= 0) & (share < 1))
        context.refuse(outside & jnp.asarray(training_mode).reshape(()), "ratio is outside of [0, 1)")
    output, mask = _dropped(data, share, seed, context)
    if not is_host(training_mode):
        training = training_mode.reshape(())
        output, mask = jnp.where(training, output, data), mask | ~training
    return (output, mask) if n_outputs > 1 else output


@operator("Dropout", since_version=10)
def dropout_10(data, /, *, ratio=0.5, n_outputs=1):
    """Passes the data on; the mask is bool, all true."""
    return (data, xp(data).ones(data.shape, np.bool_)) if n_outputs > 1 else data


@operator("Dropout", since_version=7)
def dropout_7(data, /, *, ratio=0.5, n_outputs=1):
    """Passes the data on; the mask has the data's type until version 10, all ones."""
    return (data, xp(data).ones_like(data)) if n_outputs > 1 else data


@operator("Dropout", since_version=6, random=True)
def dropout_6(data, /, *, is_test=0, ratio=0.5, n_outputs=1, context: Context):
    """Until version 7 the attribute `is_test` says that nothing is dropped, and its default is to drop."""
    if is_test:
        return dropout_7(data, n_outputs=n_outputs)
    output, mask = _dropped(data, np.asarray(ratio, np.float32), None, context)
    return (output, mask.astype(data.dtype)) if n_outputs > 1 else output


@operator("Dropout", since_version=1, random=True)
def dropout_1(data, /, *, consumed_inputs=None, is_test=0, ratio=0.5, n_outputs=1, context: Context):
    return dropout_6(data, is_test=is_test, ratio=ratio, n_outputs=n_outputs, context=context)
