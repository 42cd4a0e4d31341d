"""The forms of a convolution in a program: XLA's own, and those that are faster on a CPU, by where the channels lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.windows import Windows, isolate, pad_spatial, taps

__all__ = ["Filters", "channels_first", "channels_last", "plain", "transposed_channels_last"]

# Above this many multiply-adds per output the unrolled forms compile for longer than they save.
_UNROLLED = 128
# Channels for each of the dense convolutions that stand for a grouped one.
_BLOCK = 32
# Fewer elements than this in one row of a kernel are too few for XLA's convolution.
_SHORT_ROW = 12
# Layers of a kernel that are laid beside each other: the input is held as many times.
_DEEP = 7
# With at most this many outputs XLA's convolution is slower than a product of the unfolded input.
_SMALL_MAP = 100


def high_padding(w: Windows) -> tuple[int, ...]:
    """Padding after (negative crops) with which exactly `outputs` windows fit, for lax and the shifted forms."""
    return tuple(
        (out - 1) * s + (k - 1) * d + 1 - size - low
        for size, k, s, d, low, out in zip(w.sizes, w.kernel, w.strides, w.dilations, w.low, w.outputs, strict=True)
    )


def _letters(rank: int) -> str:
    return "DHW"[-rank:] if rank <= 3 else "".join(chr(97 + i) for i in range(rank))


def plain(x: Any, weights: Any, w: Windows, group: int, accumulate: Any) -> Any:
    """XLA's own convolution.

    Args:
        x: (N, C, *sizes).
        weights: (M, C / group, *kernel).
        w: The windows.
        group: How many groups the channels are in.
        accumulate: The dtype of sums and of the result.

    Returns:
        (N, M, *outputs).
    """
    dims = _letters(len(w.kernel))
    return lax.conv_general_dilated(
        x,
        weights,
        window_strides=w.strides,
        padding=list(zip(w.low, high_padding(w), strict=True)),
        rhs_dilation=w.dilations,
        dimension_numbers=(f"NC{dims}", f"OI{dims}", f"NC{dims}"),
        feature_group_count=group,
        preferred_element_type=accumulate,
    )


def without_unit_axes(w: Windows) -> tuple[Windows, tuple[int, ...]] | None:
    """The windows without the spatial axes of size one, and which axes are left; None where there are none to drop."""
    rank = len(w.kernel)
    unit = [i for i in range(rank) if w.sizes[i] == 1 and w.kernel[i] == 1 and w.outputs[i] == 1 and w.low[i] == 0]
    if not unit or rank == 1:
        return None
    keep = tuple(i for i in range(rank) if i not in unit) or (0,)
    return Windows(*(tuple(getattr(w, name)[i] for i in keep) for name in Windows.__slots__)), keep


def channels_first(x: Any, weights: Any, w: Windows, group: int, context: Context) -> Any:
    """A convolution in the form that fits its shapes, of those that the platform takes; else XLA's own.

    Args:
        x: (N, C, *sizes), floats, traced.
        weights: (M, C / group, *kernel), of the same dtype.
        w: The windows.
        group: How many groups the channels are in.
        context: Of the node; says which forms there are.

    Returns:
        (N, M, *outputs), of the same dtype.
    """
    rank = len(w.kernel)
    batch, channels = x.shape[:2]
    filters, per_group = weights.shape[:2]
    dropped = without_unit_axes(w)
    if dropped is not None and context.lowers("unit axes"):
        thin, _ = dropped
        lead = x.reshape(*x.shape[:2], *thin.sizes)
        lower = channels_first(lead, weights.reshape(*weights.shape[:2], *thin.kernel), thin, group, context)
        return lower.reshape(*lower.shape[:2], *w.outputs)
    places = math.prod(w.kernel)
    pointwise = places == 1 and not any(w.low) and (group == 1 or per_group > 1)
    if pointwise and context.lowers("pointwise product"):
        _, x = next(taps(pad_spatial(x, w.low, high_padding(w)), w))
        lead = () if group == 1 else (group,)
        each = weights.reshape(*lead, filters // group, per_group)
        mixed = jnp.matmul(each, x.reshape(batch, *lead, per_group, -1))
        return mixed.reshape(batch, filters, *w.outputs)
    if group > 1 and per_group <= 8 and places * per_group <= _UNROLLED and context.lowers("shifted taps"):
        padded = isolate(pad_spatial(x, w.low, high_padding(w)))
        split = weights.reshape(group, filters // group, per_group, *w.kernel)
        spread = (1,) * rank
        y: Any = None
        for place, part in taps(padded, w):
            part = part.reshape(batch, group, 1, per_group, *w.outputs)
            for channel in range(per_group):
                factor = split[(slice(None), slice(None), channel, *place)].reshape(group, -1, *spread)
                term = part[:, :, :, channel] * factor
                y = term if y is None else y + term
        return y.reshape(batch, filters, *w.outputs)
    if group == 1 and rank == 2 and 1 < places <= 9 and max(w.strides) > 1 and context.lowers("unfolded"):
        padded = isolate(pad_spatial(x, w.low, high_padding(w)))
        # The barrier keeps XLA from splitting the product of a concatenation into a product for each part.
        unfolded = isolate(jnp.concatenate([part.reshape(batch, channels, -1) for _, part in taps(padded, w)], axis=1))
        flat = jnp.moveaxis(weights.reshape(filters, channels, places), 2, 1).reshape(filters, -1)
        return jnp.matmul(flat, unfolded).reshape(batch, filters, *w.outputs)
    if group == 1 and rank == 3 and places > 1 and w.kernel[0] <= _DEEP and context.lowers("depth in channels"):
        return _depth_in_channels(x, weights, w)
    return plain(x, weights, w, group, x.dtype)


def _depth_in_channels(x: Any, weights: Any, w: Windows) -> Any:
    """A 3-D convolution as one in 2-D: what meets the kernel along the depth lies beside each other as channels."""
    batch, channels = x.shape[:2]
    filters, depth = weights.shape[0], w.kernel[0]
    along, across = (Windows(*(getattr(w, name)[part] for name in Windows.__slots__)) for part in (slice(1), slice(1, 3)))
    padded = isolate(pad_spatial(jnp.moveaxis(x, 1, -1), along.low, high_padding(along), first=1))
    layers = jnp.concatenate([part for _, part in taps(padded, along, first=1)], axis=-1)
    flat = weights.transpose(3, 4, 2, 1, 0).reshape(*across.kernel, depth * channels, filters)
    y = _own_channels_last(layers.reshape(-1, *across.sizes, depth * channels), flat, across, 1)
    return jnp.moveaxis(y.reshape(batch, *w.outputs, filters), -1, 1)


# --- channels last ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filters:
    """The weights of a convolution as the graph has them, (M, C / group, *kernel), and as programs take them."""

    weights: Any
    context: Context

    def whole(self, kernel: Sequence[int]) -> Any:
        """(*kernel, C / group, M); `kernel` may lack axes of size one."""
        filters, per_group = self.weights.shape[:2]
        return self.context.prepared(self.weights, "filters last").reshape(*kernel, per_group, filters)

    def block(self, kernel: Sequence[int], first: int, each: int, together: int) -> Any:
        """Those of `together` groups of `each` filters from group `first` on, dense, with zeros between the groups."""
        made = self.context.prepared(self.weights, "block of groups", first, each, together)
        return made.reshape(*kernel, *made.shape[-2:])


def channels_last(x: Any, given: Filters, w: Windows, group: int, context: Context) -> Any:
    """The same of values that keep their channels last.

    Args:
        x: (N, *sizes, C), floats, traced.
        given: The weights.
        w: The windows, without batch and channels.
        group: How many groups the channels are in.
        context: Of the node; says which forms there are.

    Returns:
        (N, *outputs, M), of the same dtype.
    """
    rank = len(w.kernel)
    batch, channels = x.shape[0], x.shape[-1]
    filters, per_group = given.weights.shape[:2]
    dropped = without_unit_axes(w)
    if dropped is not None and context.lowers("unit axes"):
        thin, _ = dropped
        lower = channels_last(x.reshape(batch, *thin.sizes, channels), given, thin, group, context)
        return lower.reshape(batch, *w.outputs, filters)
    places = math.prod(w.kernel)
    narrow = group > 1 and per_group <= 8 and places * per_group <= _UNROLLED and (per_group == 1 or places > 1)
    if group > 1 and not narrow and context.lowers("block diagonal"):
        return _in_blocks(x, given, w, group)
    weights = given.whole(w.kernel)
    if group == 1 and places == 1 and not any(w.low) and context.lowers("pointwise product"):
        _, x = next(taps(pad_spatial(x, w.low, high_padding(w), first=1), w, first=1))
        mixed = jnp.matmul(x.reshape(-1, channels), weights.reshape(channels, filters))
        return mixed.reshape(batch, *w.outputs, filters)
    if narrow and context.lowers("shifted taps"):
        return _shifted(x, weights, w, group)
    if narrow and context.lowers("block diagonal"):
        return _in_blocks(x, given, w, group)
    if group == 1 and places > 1:
        halves = rank == 2 and w.strides == (2, 2) and w.dilations == (1, 1)
        if halves and channels <= 4 and w.kernel[-1] * channels < _SHORT_ROW and context.lowers("space to depth"):
            return _in_pixel_blocks(x, weights, w)
        if math.prod(w.outputs) * batch <= _SMALL_MAP and places <= 9 and context.lowers("unfolded"):
            padded = isolate(pad_spatial(x, w.low, high_padding(w), first=1))
            # The barrier keeps XLA from splitting the product of a concatenation into a product for each part.
            unfolded = isolate(jnp.concatenate([part for _, part in taps(padded, w, first=1)], axis=-1))
            mixed = jnp.matmul(unfolded.reshape(-1, places * channels), weights.reshape(-1, filters))
            return mixed.reshape(batch, *w.outputs, filters)
    return _own_channels_last(x, weights, w, group)


def _own_channels_last(x: Any, weights: Any, w: Windows, group: int) -> Any:
    dims = _letters(len(w.kernel))
    return lax.conv_general_dilated(
        x,
        weights,
        window_strides=w.strides,
        padding=list(zip(w.low, high_padding(w), strict=True)),
        rhs_dilation=w.dilations,
        dimension_numbers=(f"N{dims}C", f"{dims}IO", f"N{dims}C"),
        feature_group_count=group,
        preferred_element_type=x.dtype,
    )


def _shifted(x: Any, weights: Any, w: Windows, group: int) -> Any:
    """Multiply-adds of shifted inputs; each row of the kernel is summed by itself, which compiles to tighter loops."""
    batch = x.shape[0]
    per_group, filters = weights.shape[-2:]
    padded = isolate(pad_spatial(x, w.low, high_padding(w), first=1))
    each = filters // group
    y: Any = None
    row: Any = None
    last = w.kernel[-1] - 1
    for place, part in taps(padded, w, first=1):
        factors = weights[place]
        if per_group == 1 and each == 1:
            term = part * factors[0]
        else:
            part = part.reshape(batch, *w.outputs, group, 1, per_group)
            term = None
            for channel in range(per_group):
                scaled = part[..., channel] * factors[channel].reshape(group, each)
                term = scaled if term is None else term + scaled
        row = term if row is None else row + term
        if place[-1] == last:
            y = row if y is None else y + row
            row = None
    return y.reshape(batch, *w.outputs, filters)


def _in_blocks(x: Any, given: Filters, w: Windows, group: int) -> Any:
    """A few dense convolutions: of single groups where these are thick, else of neighbours with zeros between them."""
    filters, per_group = given.weights.shape[:2]
    each = filters // group
    together = max(n for n in range(1, group + 1) if group % n == 0 and n <= max(1, _BLOCK // per_group))
    x = isolate(x)
    parts = []
    for first in range(0, group, together):
        inner = given.block(w.kernel, first, each, together)
        lane = x[..., first * per_group : (first + together) * per_group]
        if math.prod(w.kernel) == 1 and not any(w.low):
            _, lane = next(taps(pad_spatial(lane, w.low, high_padding(w), first=1), w, first=1))
            mixed = jnp.matmul(lane.reshape(-1, lane.shape[-1]), inner.reshape(lane.shape[-1], -1))
            parts.append(mixed.reshape(x.shape[0], *w.outputs, -1))
        else:
            parts.append(_own_channels_last(lane, inner, w, 1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _in_pixel_blocks(x: Any, weights: Any, w: Windows) -> Any:
    """Strides of two over few channels: blocks of two by two pixels become channels, then the strides are one."""
    batch, channels, filters = x.shape[0], x.shape[-1], weights.shape[-1]
    kernel = tuple(-(-k // 2) for k in w.kernel)
    sizes = tuple(out - 1 + k for out, k in zip(w.outputs, kernel, strict=True))
    high = tuple(2 * n - size - low for n, size, low in zip(sizes, w.sizes, w.low, strict=True))
    padded = pad_spatial(x, w.low, high, first=1)
    blocks = padded.reshape(batch, sizes[0], 2, sizes[1], 2, channels).transpose(0, 1, 3, 2, 4, 5)
    grown = pad_spatial(weights, (0, 0), tuple(2 * n - k for n, k in zip(kernel, w.kernel, strict=True)), first=0)
    grown = grown.reshape(kernel[0], 2, kernel[1], 2, channels, filters).transpose(0, 2, 1, 3, 4, 5)
    inner = Windows(sizes, kernel, (1, 1), (1, 1), (0, 0), (0, 0), w.outputs)
    return _own_channels_last(
        blocks.reshape(batch, *sizes, 4 * channels), grown.reshape(*kernel, 4 * channels, filters), inner, 1
    )


def transposed_channels_last(
    x: Any,
    weights: Any,
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    low: tuple[int, ...],
    crop: tuple[int, ...],
) -> Any:
    """The transposed convolution of (N, *sizes, C) and (*kernel, M, C), floats, one group: (N, *outputs, M).

    Args:
        x: The input.
        weights: The kernels, not flipped.
        strides: Of the transposed convolution.
        dilations: Within the kernels.
        low: Cropped before.
        crop: Added after, negative where cropped.
    """
    rank = len(strides)
    kernel = weights.shape[:rank]
    if kernel == strides and set(dilations) == {1}:
        # The kernels do not overlap: each input element gives a block of the output.
        filters, channels = weights.shape[-2:]
        flat = jnp.matmul(x.reshape(-1, channels), weights.reshape(-1, channels).T)
        y = flat.reshape(x.shape[0], *x.shape[1:-1], *kernel, filters)
        order = (0, *(axis for i in range(rank) for axis in (1 + i, 1 + rank + i)), 1 + 2 * rank)
        whole = [n * s for n, s in zip(x.shape[1:-1], strides, strict=True)]
        y = y.transpose(order).reshape(x.shape[0], *whole, filters)
        return pad_spatial(y, [-n for n in low], crop, first=1)
    dims = _letters(rank)
    extents = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    return lax.conv_general_dilated(
        x,
        jnp.flip(weights, axis=tuple(range(rank))),
        window_strides=(1,) * rank,
        padding=[(e - b, e + c) for e, b, c in zip(extents, low, crop, strict=True)],
        lhs_dilation=strides,
        rhs_dilation=dilations,
        dimension_numbers=(f"N{dims}C", f"{dims}OI", f"N{dims}C"),
        preferred_element_type=x.dtype,
    )
