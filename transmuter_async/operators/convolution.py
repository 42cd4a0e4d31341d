"""Convolutions: Conv, ConvTranspose, DeformConv, Col2Im, CausalConvWithState.

`convolve` is the one place that chooses how a convolution is computed; the quantised and fused ones use it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.convolution_forms import channels_first, plain
from transmuter_async.operators.numeric import narrow, sigmoid, spatial, wide_dtype, widen
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.transposed_forms import transposed_groups
from transmuter_async.operators.windows import Windows, pad_spatial, taps, view, windows

__all__ = ["convolve"]

# Elements of the unfolded input that the host form holds at once.
_HOST_CHUNK = 1 << 23


@operator("Conv", since_version=1)
def conv_1(
    X: Any,
    W: Any,
    B: Any = None,
    /,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Convolution (in fact correlation) over any number of spatial axes.

    X is (N, C, *sizes), W (M, C / group, *kernel), B (M,), the result (N, M, *outputs) in X's dtype; float16 and
    bfloat16 accumulate in float32.
    """
    if X.ndim < 3 or W.ndim != X.ndim:
        raise ValueError(f"X and W need the same rank of at least 3, got shapes {X.shape} and {W.shape}")
    if kernel_shape and tuple(kernel_shape) != tuple(W.shape[2:]):
        raise ValueError(f"kernel_shape {tuple(kernel_shape)} is not that of W, {tuple(W.shape[2:])}")
    w = windows(X.shape, W.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad=auto_pad)
    return _with_bias(convolve(X, W, w, group, context), B, X.dtype)


def _with_bias(y: Any, bias: Any, dtype: Any) -> Any:
    """`y` (in the accumulating dtype) plus a bias for each channel, as `dtype`."""
    if bias is not None:
        if bias.shape != (y.shape[1],):
            raise ValueError(f"the bias has shape {bias.shape}, but there are {y.shape[1]} output channels")
        y = y + widen(bias).reshape(-1, *(1,) * (y.ndim - 2))
    return narrow(y, dtype)


def convolve(x: Any, weights: Any, w: Windows, group: int, context: Context) -> Any:
    """The convolution itself: (N, C, *sizes) with (M, C / group, *kernel) gives (N, M, *outputs).

    The result has the dtype to accumulate in (float32 for narrow floats, else x's). On the CPU narrow floats are widened
    and the shapes for which XLA's convolution is slow there take another form, see `convolution_forms`.
    """
    channels, filters, per_group = x.shape[1], weights.shape[0], weights.shape[1]
    if group < 1 or channels != per_group * group or filters % group:
        raise ValueError(
            f"X of shape {tuple(x.shape)} and W of shape {tuple(weights.shape)} do not fit together with group={group}: "
            f"X must have group * {per_group} channels and W a multiple of group filters"
        )
    accumulate = wide_dtype(x.dtype)
    shape = (x.shape[0], filters, *w.outputs)
    if 0 in x.shape or 0 in weights.shape or 0 in shape:
        return xp(x, weights).zeros(shape, accumulate)
    if is_host(x, weights):
        with np.errstate(all="ignore"):
            return _host_convolve(widen(x), widen(weights), w, group)
    if context.platform == "cpu":
        x, weights = widen(jnp.asarray(x)), widen(jnp.asarray(weights))
        if jnp.issubdtype(accumulate, jnp.floating):
            return channels_first(x, weights, w, group, context)
    return plain(x, weights, w, group, accumulate)


def _host_convolve(x: np.ndarray, weights: np.ndarray, w: Windows, group: int) -> np.ndarray:
    batch, channels = x.shape[:2]
    filters, per_group = weights.shape[:2]
    places = math.prod(w.kernel)
    padded = pad_spatial(x, w.low, w.reach)
    if group > 1 and per_group == 1:
        y = np.zeros((batch, group, filters // group, *w.outputs), x.dtype)
        split = weights.reshape(group, filters // group, places)
        for number, (_, part) in enumerate(taps(padded, w)):
            y += part[:, :, None] * split[:, :, number].reshape(group, -1, *(1,) * len(w.kernel))
        return y.reshape(batch, filters, *w.outputs)
    # The product goes through the weights as they lie (`compiler/layouts.py`): else each call would copy them.
    kernel_first = group == 1 and places > 1 and weights.strides[1] < weights.strides[-1]
    lying = np.moveaxis(weights, 1, -1) if kernel_first else weights
    flat = lying.reshape(group, filters // group, per_group * places)
    if places == 1:
        _, part = next(taps(padded, w))
        y = np.matmul(flat, part.reshape(batch, group, per_group, -1))
        return y.reshape(batch, filters, *w.outputs)
    y = np.empty((batch, filters, *w.outputs), x.dtype)
    rank = len(w.kernel)
    within = range(2 + rank, 2 + 2 * rank)
    order = (0, *((*within, 1) if kernel_first else (1, *within)), *range(2, 2 + rank))
    all_windows = view(padded, w).transpose(order)
    rows = w.outputs[0]
    cost = batch * channels * places * math.prod(w.outputs[1:])
    step = max(1, min(rows, _HOST_CHUNK // max(1, cost)))
    for start in range(0, rows, step):
        part = all_windows[(slice(None),) * (2 + rank) + (slice(start, start + step),)]
        unfolded = part.reshape(batch, group, per_group * places, -1)
        y[:, :, start : start + step] = np.matmul(flat, unfolded).reshape(batch, filters, *part.shape[2 + rank :])
    return y


# --- transposed ---------------------------------------------------------------------------------------------------------


@operator("ConvTranspose", since_version=1)
def conv_transpose_1(
    X: Any,
    W: Any,
    B: Any = None,
    /,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """The transpose (gradient) of a convolution: each input element adds its scaled kernel to the output.

    `output_shape` (spatial axes; onnxruntime's form with batch and channels first is taken too) wins over `pads`; where
    it asks for more than the kernels cover, the rest at the end is bias only. SAME_* make the output size * stride
    (onnxruntime makes it smaller where the kernel is smaller than the stride).

    X is (N, C, *sizes), W (C, M / group, *kernel), B (M,), the result (N, M, *outputs).
    """
    if X.ndim < 3 or W.ndim != X.ndim or X.shape[1] != W.shape[0] or X.shape[1] % group:
        raise ValueError(f"X of shape {X.shape} and W of shape {W.shape} do not fit together with group={group}")
    rank = X.ndim - 2
    sizes, kernel = tuple(X.shape[2:]), tuple(W.shape[2:])
    if kernel_shape and tuple(kernel_shape) != kernel:
        raise ValueError(f"kernel_shape {tuple(kernel_shape)} is not that of W, {kernel}")
    steps = spatial(strides, rank, 1, "strides")
    dilate = spatial(dilations, rank, 1, "dilations")
    extra = spatial(output_padding, rank, 0, "output_padding")
    flat = spatial(pads, 2 * rank, 0, "pads")
    wanted = tuple(output_shape)[-rank:] if output_shape else None
    full = tuple((n - 1) * s + (k - 1) * d + 1 for n, k, s, d in zip(sizes, kernel, steps, dilate, strict=True))
    if auto_pad not in ("", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"):
        raise ValueError(f"auto_pad {auto_pad!r} is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID")
    if wanted is None and auto_pad.startswith("SAME"):
        wanted = tuple(n * s for n, s in zip(sizes, steps, strict=True))
    low, outputs = [], []
    for axis in range(rank):
        if wanted is not None:
            total = max(0, full[axis] + extra[axis] - wanted[axis])
            low.append(total // 2 if auto_pad == "SAME_UPPER" else total - total // 2)
            outputs.append(int(wanted[axis]))
        else:
            before, after = (0, 0) if auto_pad == "VALID" else (flat[axis], flat[rank + axis])
            low.append(before)
            outputs.append(full[axis] + extra[axis] - before - after)
    if min(outputs) < 0 and X.size:
        raise ValueError(f"the output would have the sizes {outputs}; the pads are larger than what the kernels cover")
    outputs = [max(0, n) for n in outputs]
    y = _transposed(X, W, group, steps, dilate, low, outputs, context)
    return _with_bias(y, B, X.dtype)


def _transposed(
    x: Any,
    weights: Any,
    group: int,
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    low: Sequence[int],
    outputs: Sequence[int],
    context: Context,
) -> Any:
    """Overlap-add of scaled kernels, cropped by `low` and to `outputs`; in the dtype to accumulate in."""
    batch, channels = x.shape[:2]
    per_group, kernel = weights.shape[1], tuple(weights.shape[2:])
    filters = per_group * group
    accumulate = wide_dtype(x.dtype)
    if 0 in x.shape or 0 in weights.shape or 0 in outputs:
        return xp(x, weights).zeros((batch, filters, *outputs), accumulate)
    rank = len(kernel)
    full = tuple(
        (n - 1) * s + (k - 1) * d + 1 for n, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True)
    )
    crop = [o - f + b for o, f, b in zip(outputs, full, low, strict=True)]
    if is_host(x, weights):
        with np.errstate(all="ignore"):
            flat = widen(weights).reshape(group, channels // group, -1)
            parts = np.matmul(flat.swapaxes(1, 2), widen(x).reshape(batch, group, channels // group, -1))
            parts = parts.reshape(batch, filters, *kernel, *x.shape[2:])
            y = np.zeros((batch, filters, *full), accumulate)
            for place in product(*(range(k) for k in kernel)):
                cut = tuple(
                    slice(p * d, p * d + (n - 1) * s + 1, s)
                    for p, d, s, n in zip(place, dilations, strides, x.shape[2:], strict=True)
                )
                y[(slice(None), slice(None), *cut)] += parts[(slice(None), slice(None), *place)]
        return pad_spatial(y, [-b for b in low], crop)
    if context.platform == "cpu":
        x, weights = widen(jnp.asarray(x)), widen(jnp.asarray(weights))
        if (y := transposed_groups(x, weights, group, strides, dilations, low, outputs, context)) is not None:
            return y
    turned = jnp.flip(weights, axis=tuple(range(2, 2 + rank)))
    turned = turned.reshape(group, channels // group, per_group, *kernel).swapaxes(1, 2)
    turned = turned.reshape(filters, channels // group, *kernel)
    extents = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    dims = "".join(chr(97 + i) for i in range(rank))
    return lax.conv_general_dilated(
        x,
        turned,
        window_strides=(1,) * rank,
        padding=[(e - b, e + c) for e, b, c in zip(extents, low, crop, strict=True)],
        lhs_dilation=strides,
        rhs_dilation=dilations,
        dimension_numbers=(f"NC{dims}", f"OI{dims}", f"NC{dims}"),
        feature_group_count=group,
        preferred_element_type=accumulate,
    )


# --- others -------------------------------------------------------------------------------------------------------------


@operator("DeformConv", since_version=19)
def deform_conv_19(
    X: Any,
    W: Any,
    offset: Any,
    B: Any = None,
    mask: Any = None,
    /,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """Convolution whose taps are moved by `offset` and read with linear interpolation, zero outside of the input.

    `offset` is (N, offset_group * taps * rank, *outputs), the axes of one tap in the order of the spatial axes; `mask`
    is (N, offset_group * taps, *outputs) and scales each tap.
    """
    m = xp(X, W, offset, mask)
    w = windows(X.shape, W.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad="NOTSET")
    batch, channels, rank, places = X.shape[0], X.shape[1], X.ndim - 2, math.prod(w.kernel)
    filters = W.shape[0]
    if channels % offset_group or channels != W.shape[1] * group or filters % group:
        raise ValueError(f"X {X.shape}, W {W.shape}, group={group} and offset_group={offset_group} do not fit together")
    expected = (batch, offset_group * places * rank, *w.outputs)
    if tuple(offset.shape) != expected:
        raise ValueError(f"offset has shape {offset.shape}, expected {expected}")
    if 0 in X.shape or 0 in W.shape or 0 in w.outputs:
        return _with_bias(m.zeros((batch, filters, *w.outputs), wide_dtype(X.dtype)), B, X.dtype)
    x = widen(m.asarray(X))
    moved = widen(m.asarray(offset)).reshape(batch, offset_group, places, rank, *w.outputs)
    grid = np.zeros((places, rank, *w.outputs), x.dtype)
    for number, place in enumerate(product(*(range(k) for k in w.kernel))):
        for axis in range(rank):
            line = np.arange(w.outputs[axis]) * w.strides[axis] + place[axis] * w.dilations[axis] - w.low[axis]
            grid[number, axis] = line.reshape(-1, *(1,) * (rank - axis - 1))
    points = m.moveaxis(moved + grid, 3, -1).reshape(batch * offset_group, -1, rank)
    sampled = sample_linear(x.reshape(batch * offset_group, channels // offset_group, *w.sizes), points)
    sampled = sampled.reshape(batch, offset_group, channels // offset_group, places, -1)
    if mask is not None:
        scale = widen(m.asarray(mask))
        if scale.shape[1] != offset_group * places:
            raise ValueError(f"mask has shape {scale.shape}, expected {offset_group * places} channels")
        sampled = sampled * scale.reshape(batch, offset_group, 1, places, -1)
    unfolded = sampled.reshape(batch, group, channels // group * places, -1)
    flat = widen(m.asarray(W)).reshape(group, filters // group, -1)
    return _with_bias(m.matmul(flat, unfolded).reshape(batch, filters, *w.outputs), B, X.dtype)


def sample_linear(x: Any, points: Any) -> Any:
    """`x` (N, C, *sizes) read at fractional `points` (N, P, rank), zero outside: (N, C, P)."""
    m = xp(x, points)
    sizes = x.shape[2:]
    rank = len(sizes)
    flat = x.reshape(*x.shape[:2], -1)
    limit = np.asarray([float(n) + 1 for n in sizes], points.dtype)
    points = m.clip(points, -limit, limit)  # nothing beyond reads data; keeps the cast to integers defined
    base = m.floor(points)
    part = points - base
    base = base.astype(np.int64)
    total: Any = None
    for corner in product((0, 1), repeat=rank):
        index: Any = None
        weight: Any = None
        for axis, (step, size) in enumerate(zip(corner, sizes, strict=True)):
            place = base[..., axis] + step
            factor = part[..., axis] if step else 1 - part[..., axis]
            factor = m.where((place >= 0) & (place < size), factor, m.zeros_like(factor))
            place = m.clip(place, 0, size - 1)
            index = place if index is None else index * size + place
            weight = factor if weight is None else weight * factor
        if m is np:
            value: Any = np.take_along_axis(flat, index[:, None, :], axis=2)
        else:
            value = jnp.take_along_axis(jnp.asarray(flat), index[:, None, :], axis=2, mode="clip")
        term = value * weight[:, None, :].astype(x.dtype)
        total = term if total is None else total + term
    return total


@operator("Col2Im", since_version=18, static=("image_shape", "block_shape"))
def col2_im_18(
    input: Any,
    image_shape: np.ndarray,
    block_shape: np.ndarray,
    /,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Add column blocks (N, C * block elements, blocks) to the places of the image that they were taken from."""
    kernel = tuple(int(k) for k in block_shape)
    sizes = tuple(int(n) for n in image_shape)
    w = windows((1, 1, *sizes), kernel, strides=strides, dilations=dilations, pads=pads, auto_pad="NOTSET")
    places, blocks = math.prod(kernel), math.prod(w.outputs)
    if input.ndim != 3 or input.shape[1] % places or input.shape[2] != blocks:
        raise ValueError(
            f"input of shape {input.shape} must be (N, C * {places}, {blocks}) for the image {sizes} and block {kernel}"
        )
    batch, channels = input.shape[0], input.shape[1] // places
    padded = tuple(n + a + b for n, a, b in zip(sizes, w.low, w.high, strict=True))
    context.budget((batch, channels, *padded), input.dtype)
    m = xp(input)
    x: Any = input.reshape(batch, channels, *kernel, *w.outputs)
    total: Any = np.zeros((batch, channels, *padded), input.dtype) if m is np else None
    for place in product(*(range(k) for k in kernel)):
        part: Any = x[(slice(None), slice(None), *place)]
        starts = [p * d for p, d in zip(place, w.dilations, strict=True)]
        if m is np:
            cut = tuple(
                slice(a, a + (o - 1) * s + 1 if o else a, s)
                for a, o, s in zip(starts, w.outputs, w.strides, strict=True)
            )
            total[(slice(None), slice(None), *cut)] += part
            continue
        config = [(0, 0, 0), (0, 0, 0)]
        for a, o, s, n in zip(starts, w.outputs, w.strides, padded, strict=True):
            config.append((a, n - a - ((o - 1) * s + 1 if o else 0), s - 1))
        spread = lax.pad(part, jnp.zeros((), input.dtype), config)
        total = spread if total is None else total + spread
    return pad_spatial(total, [-a for a in w.low], [-b for b in w.high])


@operator("CausalConvWithState", since_version=27)
def causal_conv_with_state_27(
    input: Any, weight: Any, bias: Any = None, past_state: Any = None, /, *, activation: str = "none", context: Context
) -> tuple[Any, Any]:
    """Depthwise convolution along the last axis that sees only the past, with the last k - 1 inputs as its state."""
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"activation {activation!r} is none of none, silu, swish")
    if input.ndim != 3 or weight.ndim != 3 or weight.shape[:2] != (input.shape[1], 1):
        raise ValueError(f"input {input.shape} must be (N, C, L) and weight {weight.shape} (C, 1, k)")
    m = xp(input, weight, past_state)
    batch, channels = input.shape[:2]
    before = weight.shape[2] - 1
    if past_state is None:
        past_state = m.zeros((batch, channels, before), input.dtype)
    if tuple(past_state.shape) != (batch, channels, before):
        raise ValueError(f"past_state has shape {past_state.shape}, expected {(batch, channels, before)}")
    padded = m.concatenate([past_state, input], axis=2)
    shape = (batch, channels, padded.shape[2])
    w = windows(shape, weight.shape[2:], strides=None, dilations=None, pads=None, auto_pad="NOTSET")
    y = convolve(padded, weight, w, channels, context)
    if bias is not None:
        y = y + widen(bias)[:, None]
    if activation != "none":
        y = y * sigmoid(y)
    return narrow(y, input.dtype), padded[:, :, padded.shape[2] - before :]
