"""Pad and CenterCropPad: sizes that change at the ends of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.graph import STRING
from transmuter_async.operators.context import Context
from transmuter_async.operators.layout import concatenate, normal_axes, slice_axes
from transmuter_async.operators.numeric import device_index
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["pad"]

_MODES = ("constant", "reflect", "edge", "wrap")


@operator("Pad", since_version=1)
def pad_1(
    data: Any, /, *, mode: str = "constant", paddings: Sequence[int], value: float = 0.0, context: Context
) -> Any:
    """The amounts are the attribute `paddings`."""
    return pad_2(data, mode=mode, pads=paddings, value=value, context=context)


@operator("Pad", since_version=2)
def pad_2(data: Any, /, *, mode: str = "constant", pads: Sequence[int], value: float = 0.0, context: Context) -> Any:
    """Amounts and value are attributes."""
    return pad_18(data, np.asarray(pads, np.int64), np.asarray(value, data.dtype), None, mode=mode, context=context)


@operator("Pad", since_version=11, static=("pads",))
def pad_11(data: Any, pads: Any, constant_value: Any = None, /, *, mode: str = "constant", context: Context) -> Any:
    """The amounts are an input, the value too."""
    return pad_18(data, pads, constant_value, None, mode=mode, context=context)


@operator("Pad", since_version=18, static=("pads", "axes"))
def pad_18(
    data: Any,
    pads: Any,
    constant_value: Any = None,
    axes: Any = None,
    /,
    *,
    mode: str = "constant",
    context: Context,
) -> Any:
    """Add elements before and after each axis: `pads` is all amounts before, then all after, of `axes` or all axes.

    Negative amounts remove elements, first; then the modes look at what is left (as in onnxruntime). "wrap" exists from
    version 19. "reflect" beyond the size less one is refused, as in onnxruntime; "wrap" goes round as often as needed.
    """
    if mode not in _MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(_MODES)}")
    rank = data.ndim
    along = list(range(rank)) if axes is None else normal_axes(np.asarray(axes).reshape(-1), rank)
    amounts = np.asarray(pads).reshape(-1).tolist()
    if len(amounts) != 2 * len(along):
        raise ValueError(f"pads {amounts} must be two numbers for each of {len(along)} axes")
    pairs = [(0, 0)] * rank
    for index, axis in enumerate(along):
        pairs[axis] = (amounts[index], amounts[index + len(along)])
    if constant_value is not None and np.prod(constant_value.shape) != 1:
        raise ValueError(f"constant_value has shape {list(constant_value.shape)}, not that of one element")
    return pad(data, pairs, context, mode=mode, value=constant_value)


def pad(
    data: Any, pairs: Sequence[tuple[int, int]], context: Context, *, mode: str = "constant", value: Any = None
) -> Any:
    """`data` with `(before, after)` elements more, or fewer, on each axis. `value`: one element, None for zero."""
    sizes = [size + before + after for size, (before, after) in zip(data.shape, pairs, strict=True)]
    if any(size < 0 for size in sizes):
        raise ValueError(f"pads {list(pairs)} remove more than a tensor of shape {list(data.shape)} has")
    context.budget(sizes, data.dtype)
    kept = []
    for axis, (size, (before, after)) in enumerate(zip(data.shape, pairs, strict=True)):
        # More may be cut on one side than there is, when the other side adds: nothing of the data is left then.
        low = min(max(-before, 0), size)
        kept.append((axis, low, max(low, size - max(-after, 0)), 1))
    cut = slice_axes(data, kept)
    # What an overlong cut takes from the other side's padding.
    grow = []
    for axis, (before, _) in enumerate(pairs):
        size = cut.shape[axis]
        more = sizes[axis] - size
        low = min(max(before, 0), more)
        grow.append((low, more - low))
    if not any(low or high for low, high in grow):
        return cut
    if mode == "constant":
        return _constant(cut, grow, value)
    for axis, (low, high) in enumerate(grow):
        if low or high:
            cut = _extend(cut, axis, low, high, mode)
    return cut


def _constant(data: Any, pairs: Sequence[tuple[int, int]], value: Any) -> Any:
    if is_host(data, value):
        fill: Any = ("" if data.dtype == STRING else np.zeros((), data.dtype)) if value is None else value
        shape = [low + size + high for size, (low, high) in zip(data.shape, pairs, strict=True)]
        result = np.empty(shape, data.dtype)
        result[...] = fill if isinstance(fill, str) else np.asarray(fill).reshape(())
        result[tuple(slice(low, low + size) for size, (low, _) in zip(data.shape, pairs, strict=True))] = data
        return result
    fill = jnp.zeros((), data.dtype) if value is None else jnp.reshape(jnp.asarray(value), ())
    return lax.pad(jnp.asarray(data), fill.astype(data.dtype), [(low, high, 0) for low, high in pairs])


def _extend(data: Any, axis: int, low: int, high: int, mode: str) -> Any:
    """Add `low` and `high` elements that repeat those of the axis itself."""
    size = data.shape[axis]
    if size == 0:
        raise ValueError(f"mode {mode!r} cannot pad axis {axis}, which is empty: there is nothing to repeat")
    if mode == "reflect" and max(low, high) > size - 1:
        raise ValueError(
            f"mode 'reflect' cannot add {max(low, high)} to axis {axis} of size {size}; at most {size - 1}"
        )
    before, after = np.arange(-low, 0), np.arange(size, size + high)
    if mode == "edge":
        before, after = np.zeros_like(before), np.full_like(after, size - 1)
    elif mode == "reflect":
        before, after = -before, 2 * (size - 1) - after
    else:
        before, after = before % size, after % size
    parts = [_picked(data, axis, before), data, _picked(data, axis, after)]
    return concatenate([part for part in parts if part.shape[axis]], axis)


def _picked(data: Any, axis: int, index: np.ndarray) -> Any:
    """The elements at `index`, as a slice or broadcast where they lie in a row, since XLA joins those without a gather."""
    if index.size == 0:
        return slice_axes(data, [(axis, 0, 0, 1)])
    steps = np.diff(index)
    first, last = int(index[0]), int(index[-1])
    if (steps == 0).all():
        one = slice_axes(data, [(axis, first, first + 1, 1)])
        return xp(data).broadcast_to(one, (*data.shape[:axis], index.size, *data.shape[axis + 1 :]))
    if (steps == 1).all():
        return slice_axes(data, [(axis, first, last + 1, 1)])
    if (steps == -1).all():
        return slice_axes(data, [(axis, first, last - 1, -1)])
    return (
        np.take(data, index, axis)
        if is_host(data)
        else jnp.take(data, device_index(index, data.shape[axis]), axis, mode="clip")
    )


@operator("CenterCropPad", since_version=18, static=("shape",))
def center_crop_pad_18(input_data: Any, shape: Any, /, *, axes: Sequence[int] | None = None, context: Context) -> Any:
    """Crop or pad with zeros around the centre to `shape` along `axes`; an odd rest goes to the right side."""
    along = range(input_data.ndim) if axes is None else normal_axes(axes, input_data.ndim)
    wanted = np.asarray(shape).reshape(-1).tolist()
    if len(wanted) != len(along):
        raise ValueError(f"shape {wanted} names {len(wanted)} sizes for {len(along)} axes")
    pairs = [(0, 0)] * input_data.ndim
    for axis, size in zip(along, wanted, strict=True):
        more = size - input_data.shape[axis]
        low = more // 2 if more >= 0 else -(-more // 2)
        pairs[axis] = (low, more - low)
    return pad(input_data, pairs, context)
