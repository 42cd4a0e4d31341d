"""Resize and Upsample.

Interpolation is separable: each axis gets, from host values only, the input elements that each output element reads and
their weights; the axes are then resized one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import device_index, is_float, narrow, widen
from transmuter_async.operators.registry import is_host, operator, xp


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """The attributes that decide how one axis is read. `fractional`: see `resize_19`."""

    mode: str = "nearest"
    transformation: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    fractional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """How one axis is read: `index` and `weight` (size, taps); `outside` marks what gets the extrapolation value."""

    index: np.ndarray
    weight: np.ndarray | None
    outside: np.ndarray | None = None


def _coordinates(
    rules: _Rules, size: int, out: int, scale: np.float32, width: np.float32, roi: tuple[float, float]
) -> np.ndarray:
    """The place in the input, float32 as in onnxruntime, of each element of the output."""
    one, half = np.float32(1), np.float32(0.5)
    x = np.arange(out, dtype=np.float32)
    length = width if rules.fractional else np.float32(out)
    last = np.float32(size - 1)
    match rules.transformation:
        case "half_pixel":
            return (x + half) / scale - half
        case "half_pixel_symmetric":
            offset = np.float32(size / 2) * (one - np.float32(out) / width)
            return offset + (x + half) / scale - half
        case "pytorch_half_pixel":
            return (x + half) / scale - half if out > 1 else np.zeros_like(x)
        case "align_corners":
            return x * last / (length - one) if length != 1 else np.zeros_like(x)
        case "asymmetric":
            return x / scale
        case "tf_half_pixel_for_nn":
            return (x + half) / scale
        case "tf_crop_and_resize":
            start, end = np.float32(roi[0]), np.float32(roi[1])
            if length == 1:
                return np.full_like(x, half * (start + end) * last)
            return start * last + x * (end - start) * last / (length - one)
        case other:
            raise ValueError(f"coordinate_transformation_mode {other!r} is not known")


def _nearest(x: np.ndarray, mode: str, scale: np.float32) -> np.ndarray:
    floor = np.floor(x)
    match mode:
        case "round_prefer_floor":
            return np.where(x - floor > 0.5, floor + 1, floor)
        case "round_prefer_ceil":
            return np.where(x - floor >= 0.5, floor + 1, floor)
        case "floor":
            return floor
        case "ceil":
            return np.ceil(x)
        case "simple":  # Resize-10 and Upsample in onnxruntime
            return np.ceil(x) if scale < 1 else floor
        case other:
            raise ValueError(f"nearest_mode {other!r} is not known")


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic kernel at a distance."""
    d = abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _plan(
    rules: _Rules, size: int, out: int, scale: np.float32, width: np.float32, roi: tuple[float, float]
) -> _Axis | None:
    """How to read an axis of `size` elements to get `out` of them; None where nothing changes."""
    crop = rules.transformation == "tf_crop_and_resize"
    if size == out and scale == 1 and not crop:
        return None
    if size == 0:
        raise ValueError(f"an axis of size 0 can't be resized to {out}")
    x = _coordinates(rules, size, out, scale, width, roi)
    outside = (x < 0) | (x > np.float32(size - 1)) if crop else None
    if rules.mode == "nearest":
        index = _nearest(x, rules.nearest, scale)
        return _Axis(np.clip(index, 0, size - 1).astype(np.int64)[:, None], None, outside)
    place = x.astype(np.float64)
    base = np.floor(place)
    ratio = (place - base)[:, None]
    stretch = min(float(scale), 1.0) if rules.antialias else 1.0
    support = 1 if rules.mode == "linear" else 2
    first = math.floor(-support / stretch) + 1
    taps = np.arange(first, 2 - first)[None, :]
    distance = (taps - ratio) * stretch
    weight = np.maximum(0.0, 1 - abs(distance)) if rules.mode == "linear" else _cubic(distance, rules.cubic)
    index = base.astype(np.int64)[:, None] + taps
    if rules.antialias:
        weight = weight / weight.sum(axis=1, keepdims=True)
    if rules.exclude_outside:
        weight = np.where((index >= 0) & (index < size), weight, 0.0)
        total = weight.sum(axis=1, keepdims=True)
        weight = weight / np.where(total == 0, 1.0, total)
    return _Axis(np.clip(index, 0, size - 1), weight, outside)


def _take(x: Any, index: np.ndarray, axis: int) -> Any:
    if is_host(x):
        return np.take(x, index, axis=axis)
    return jnp.take(x, jnp.asarray(device_index(index, x.shape[axis])), axis=axis, mode="clip")


def _read(x: Any, plan: _Axis, axis: int) -> Any:
    size, (out, taps) = x.shape[axis], plan.index.shape
    if plan.weight is None:
        index = plan.index[:, 0]
        factor = out // size
        if out == size * factor and np.array_equal(index, np.repeat(np.arange(size), factor)):
            if is_host(x):
                return np.repeat(x, factor, axis=axis)
            # A broadcast is several times faster than a gather.
            wide = lax.broadcast_in_dim(
                x,
                (*x.shape[: axis + 1], factor, *x.shape[axis + 1 :]),
                tuple(range(axis + 1)) + tuple(range(axis + 2, x.ndim + 1)),
            )
            return wide.reshape(*x.shape[:axis], out, *x.shape[axis + 1 :])
        return _take(x, index, axis)
    m = xp(x)
    weight = plan.weight.astype(x.dtype)
    if taps > 4:
        matrix = np.zeros((out, size), x.dtype)
        np.add.at(matrix, (np.arange(out)[:, None], plan.index), weight)
        return m.moveaxis(m.tensordot(x, m.asarray(matrix), axes=([axis], [1])), -1, axis)
    spread = (-1, *(1,) * (x.ndim - axis - 1))
    total: Any = None
    for tap in range(taps):
        term = _take(x, plan.index[:, tap], axis) * m.asarray(weight[:, tap].reshape(spread))
        total = term if total is None else total + term
    return total


def _cast_back(y: Any, dtype: Any) -> Any:
    """`y` as `dtype`; integers are truncated as in onnxruntime, and saturated."""
    dtype = np.dtype(dtype)
    if is_float(dtype) or dtype.kind == "c":
        return narrow(y, dtype)
    if dtype == np.bool_:
        return y != 0
    if dtype.itemsize <= 2:
        y = y.astype(np.float32)  # so that a whole number computed as a hair less is not truncated to the one below
    info = np.iinfo(dtype)
    low, high = float(info.min), float(info.max)
    if high > info.max:  # int64 and uint64: the largest float below
        high = float(np.nextafter(np.asarray(high, y.dtype), np.asarray(0, y.dtype)))
    return xp(y).clip(y, xp(y).asarray(low, y.dtype), xp(y).asarray(high, y.dtype)).astype(dtype)


def _resize(
    x: Any,
    roi: np.ndarray | None,
    scales: np.ndarray | None,
    sizes: np.ndarray | None,
    rules: _Rules,
    context: Context,
    *,
    axes: Sequence[int] | None = None,
    extrapolation: float = 0.0,
    policy: str = "stretch",
) -> Any:
    scales = None if scales is None or scales.size == 0 else scales
    sizes = None if sizes is None or sizes.size == 0 else sizes
    roi = None if roi is None or roi.size == 0 else roi
    if rules.mode not in ("nearest", "linear", "cubic"):
        raise ValueError(f"mode {rules.mode!r} is none of nearest, linear, cubic")
    if (scales is None) == (sizes is None):
        raise ValueError("exactly one of scales and sizes must be given")
    rank = x.ndim
    chosen = list(range(rank)) if axes is None else [int(a) % rank for a in axes]
    given = scales if scales is not None else sizes
    if given is not None and given.shape != (len(chosen),):
        raise ValueError(f"scales or sizes have the shape {given.shape}, expected one entry for each of axes {chosen}")
    crop = rules.transformation == "tf_crop_and_resize"
    if crop and (roi is None or roi.shape != (2 * len(chosen),)):
        raise ValueError(f"tf_crop_and_resize needs roi with {2 * len(chosen)} entries")
    outs, factors = list(x.shape), [np.float32(1)] * rank
    widths = [np.float32(n) for n in x.shape]
    regions = [(0.0, 1.0)] * rank
    common = None
    if sizes is not None and policy != "stretch":
        if policy not in ("not_larger", "not_smaller"):
            raise ValueError(f"keep_aspect_ratio_policy {policy!r} is none of stretch, not_larger, not_smaller")
        ratios = [np.float32(size) / np.float32(x.shape[axis]) for axis, size in zip(chosen, sizes, strict=True)]
        common = min(ratios) if policy == "not_larger" else max(ratios)
    for i, axis in enumerate(chosen):
        size = x.shape[axis]
        if crop and roi is not None:
            regions[axis] = float(roi[i]), float(roi[len(chosen) + i])
        if scales is not None:
            factors[axis] = np.float32(scales[i])
            if not factors[axis] > 0:
                raise ValueError(f"scales must be positive, got {scales}")
            widths[axis] = np.float32(size) * factors[axis]
            part = np.float32(regions[axis][1] - regions[axis][0]) if crop else np.float32(1)
            outs[axis] = math.floor(widths[axis] * part)
        elif common is not None:
            factors[axis] = common
            widths[axis] = np.float32(size) * common
            outs[axis] = math.floor(float(widths[axis]) + 0.5)
        elif sizes is not None:
            outs[axis] = int(sizes[i])
            widths[axis] = np.float32(outs[axis])
            factors[axis] = widths[axis] / np.float32(size) if size else np.float32(1)
    shape = context.budget(outs, x.dtype)
    if 0 in shape:
        return xp(x).zeros(shape, x.dtype)
    plans = {
        axis: plan
        for axis in chosen
        if (plan := _plan(rules, x.shape[axis], shape[axis], factors[axis], widths[axis], regions[axis])) is not None
    }
    if not plans:
        return x
    if rules.mode == "nearest":
        y = x
    elif is_float(x.dtype) or np.dtype(x.dtype).kind == "c":
        y = widen(x)
    else:
        y = x.astype(np.float64)
    # Axes that shrink first: less is left for the others.
    for axis in sorted(plans, key=lambda a: shape[a] / x.shape[a]):
        y = _read(y, plans[axis], axis)
    outside: Any = False
    for axis, plan in plans.items():
        if plan.outside is not None and plan.outside.any():
            outside = outside | plan.outside.reshape(-1, *(1,) * (rank - axis - 1))
    if outside is not False:
        y = xp(y).where(outside, xp(y).asarray(extrapolation, y.dtype), y)
    return y if rules.mode == "nearest" else _cast_back(y, x.dtype)


@operator("Resize", since_version=10, static=("scales",))
def resize_10(X: Any, scales: np.ndarray, /, *, mode: str = "nearest", context: Context) -> Any:
    """Until version 11 coordinates are asymmetric: x / scale.

    What "nearest" means is not said; as in onnxruntime it is the floor when growing and the ceiling when shrinking.
    """
    rules = _Rules(mode=mode, transformation="asymmetric", nearest="simple")
    return _resize(X, None, scales, None, rules, context)


@operator("Resize", since_version=11, static=("roi", "scales", "sizes"))
def resize_11(
    X: Any,
    roi: np.ndarray,
    scales: np.ndarray,
    sizes: np.ndarray | None = None,
    /,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    context: Context,
) -> Any:
    """Until version 13 roi and scales are required; where they are not meant they are empty."""
    return resize_13(
        X,
        roi,
        scales,
        sizes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        extrapolation_value=extrapolation_value,
        mode=mode,
        nearest_mode=nearest_mode,
        context=context,
    )


@operator("Resize", since_version=13, static=("roi", "scales", "sizes"))
def resize_13(
    X: Any,
    roi: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
    /,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    context: Context,
) -> Any:
    """Until version 18 there are no axes, no antialias filter and no aspect ratio policy."""
    return resize_18(
        X,
        roi,
        scales,
        sizes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        extrapolation_value=extrapolation_value,
        mode=mode,
        nearest_mode=nearest_mode,
        context=context,
    )


@operator("Resize", since_version=18, static=("roi", "scales", "sizes"))
def resize_18(
    X: Any,
    roi: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
    /,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    context: Context,
) -> Any:
    """Until version 19 `length_resized` is the integer length, also where scales give a fractional one."""
    rules = _Rules(
        mode=mode,
        transformation=coordinate_transformation_mode,
        nearest=nearest_mode,
        cubic=cubic_coeff_a,
        exclude_outside=bool(exclude_outside),
        antialias=bool(antialias),
    )
    return _resize(
        X,
        roi,
        scales,
        sizes,
        rules,
        context,
        axes=axes,
        extrapolation=extrapolation_value,
        policy=keep_aspect_ratio_policy,
    )


@operator("Resize", since_version=19, static=("roi", "scales", "sizes"))
def resize_19(
    X: Any,
    roi: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
    /,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    context: Context,
) -> Any:
    """Resize to scales or sizes, by nearest, linear or cubic interpolation.

    Sizes and coordinates are computed in float32, as in onnxruntime, so that ties fall on the same side. Version 19
    introduces the fractional output width; "align_corners" and "tf_crop_and_resize" divide by it, as the standard's
    tests have it (onnxruntime: by the integer length in every version). With "tf_crop_and_resize" and scales the region
    counts in the output's size, as the text says (onnxruntime leaves it out). Integers are truncated and saturated. An
    antialias filter that reaches beyond the data sees its edge repeated, or with `exclude_outside` nothing.
    """
    rules = _Rules(
        mode=mode,
        transformation=coordinate_transformation_mode,
        nearest=nearest_mode,
        cubic=cubic_coeff_a,
        exclude_outside=bool(exclude_outside),
        antialias=bool(antialias),
        fractional=True,
    )
    return _resize(
        X,
        roi,
        scales,
        sizes,
        rules,
        context,
        axes=axes,
        extrapolation=extrapolation_value,
        policy=keep_aspect_ratio_policy,
    )


@operator("Upsample", since_version=1)
def upsample_1(X: Any, /, *, height_scale: float, mode: str = "nearest", width_scale: float, context: Context) -> Any:
    """Until version 7 images only, with one scale for the height and one for the width."""
    if X.ndim != 4:
        raise ValueError(f"Upsample takes (N, C, H, W), got shape {X.shape}")
    return upsample_9(X, np.asarray([1, 1, height_scale, width_scale], np.float32), mode=mode, context=context)


@operator("Upsample", since_version=7)
def upsample_7(X: Any, /, *, mode: str = "nearest", scales: Sequence[float], context: Context) -> Any:
    """Until version 9 the scales are an attribute."""
    return upsample_9(X, np.asarray(scales, np.float32), mode=mode, context=context)


@operator("Upsample", since_version=9, static=("scales",))
def upsample_9(X: Any, scales: np.ndarray, /, *, mode: str = "nearest", context: Context) -> Any:
    """Resize with asymmetric coordinates and the floor as "nearest"; deprecated since version 10."""
    mode = "linear" if mode == "bilinear" else mode
    rules = _Rules(mode=mode, transformation="asymmetric", nearest="floor")
    return _resize(X, None, scales, None, rules, context)
