"""Images: GridSample, AffineGrid, ImageDecoder. Resize is in `resize.py`, regions of interest in `regions.py`."""

from __future__ import annotations

import io
import math
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import is_float, narrow, wide_dtype, widen
from transmuter_async.operators.registry import operator, xp

# --- GridSample -----------------------------------------------------------------------------------------------------------


@operator("GridSample", since_version=16)
def grid_sample_16(
    X: Any, grid: Any, /, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Any:
    """Until version 20 images only, and the modes are called bilinear, nearest and bicubic."""
    if X.ndim != 4:
        raise ValueError(f"X must be (N, C, H, W) until version 20, got shape {X.shape}")
    names = {"bilinear": "linear", "bicubic": "cubic"}
    return grid_sample_20(X, grid, align_corners=align_corners, mode=names.get(mode, mode), padding_mode=padding_mode)


@operator("GridSample", since_version=20)
def grid_sample_20(
    X: Any, grid: Any, /, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Any:
    """Read X at the places of `grid`, whose last axis holds coordinates in [-1, 1], innermost axis of X first.

    X is (N, C, *sizes), grid (N, *outputs, rank), the result (N, C, *outputs) in X's dtype. Halfway "nearest" takes the
    even index. Integers are interpolated as floats and truncated. A NaN coordinate reads outside of X.
    """
    rank = X.ndim - 2
    if rank < 1 or grid.ndim != X.ndim or grid.shape[-1] != rank or grid.shape[0] != X.shape[0]:
        raise ValueError(f"X of shape {X.shape} and grid of shape {grid.shape} do not fit together")
    if mode not in ("linear", "nearest", "cubic") or padding_mode not in ("zeros", "border", "reflection"):
        raise ValueError(f"mode {mode!r} or padding_mode {padding_mode!r} is not known")
    m = xp(X, grid)
    batch, channels, sizes, outputs = X.shape[0], X.shape[1], X.shape[2:], grid.shape[1:-1]
    if 0 in X.shape or 0 in grid.shape:
        if 0 in sizes and math.prod((batch, channels, *outputs)):
            raise ValueError(f"there is nothing to read in X of shape {X.shape}")
        return m.zeros((batch, channels, *outputs), X.dtype)
    x = m.asarray(X)
    if mode != "nearest":
        wide = wide_dtype(x.dtype) if is_float(x.dtype) or x.dtype.kind == "c" else None
        x = x.astype(wide if wide is not None else np.float32 if x.dtype.itemsize <= 2 else np.float64)
    flat = x.reshape(batch, channels, -1)
    points = widen(m.asarray(grid)).reshape(batch, -1, rank)
    with np.errstate(all="ignore"):
        places = [
            _place(points[..., rank - 1 - axis], size, bool(align_corners), mode, padding_mode)
            for axis, size in enumerate(sizes)
        ]
        steps: tuple[int, ...] = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}[mode]
        reads = [
            [_tap(place, step, size, bool(align_corners), mode, padding_mode) for step in steps]
            for place, size in zip(places, sizes, strict=True)
        ]
        total: Any = None
        for taps in product(*reads):
            index: Any = None
            weight: Any = None
            valid: Any = None
            for (place, factor, inside), size in zip(taps, sizes, strict=True):
                index = place if index is None else index * size + place
                if factor is not None:
                    weight = factor if weight is None else weight * factor
                if inside is not None:
                    valid = inside if valid is None else valid & inside
            if m is np:
                value: Any = np.take_along_axis(flat, index[:, None, :], axis=2)
            else:
                value = jnp.take_along_axis(flat, index[:, None, :], axis=2, mode="clip")
            if valid is not None:
                value = m.where(valid[:, None, :], value, m.zeros_like(value))
            if weight is not None:
                real = np.float32 if value.dtype == np.complex64 else np.float64
                value = value * weight[:, None, :].astype(real if value.dtype.kind == "c" else value.dtype)
            total = value if total is None else total + value
    y = total.reshape(batch, channels, *outputs)
    if y.dtype == X.dtype:
        return y
    if not is_float(X.dtype):
        info = np.iinfo(X.dtype)
        y = m.clip(m.trunc(y), m.asarray(float(info.min), y.dtype), m.asarray(float(info.max), y.dtype))
    return narrow(y, X.dtype)


def _limits(size: int, align: bool) -> tuple[float, float]:
    return (0.0, size - 1.0) if align else (-0.5, size - 0.5)


def _reflect(x: Any, low: float, high: float) -> Any:
    """`x` reflected at both limits until it lies between them."""
    span = high - low
    m = xp(x)
    if span == 0:
        return m.full_like(x, low)
    distance = abs(x - np.asarray(low, x.dtype))
    turns = m.floor(distance / np.asarray(span, x.dtype))
    rest = distance - turns * np.asarray(span, x.dtype)
    even = turns - 2 * m.floor(turns / 2) == 0
    return m.where(even, rest + np.asarray(low, x.dtype), np.asarray(high, x.dtype) - rest)


def _place(g: Any, size: int, align: bool, mode: str, padding: str) -> Any:
    """From a normalised coordinate to a place along the axis; places outside are moved as the padding mode says.

    A cubic kernel near a border reads the border's value instead of what lies outside, tap by tap, as in onnxruntime and
    PyTorch.
    """
    m = xp(g)
    one, half = np.asarray(1, g.dtype), np.asarray(0.5, g.dtype)
    x = (
        (g + one) * half * np.asarray(size - 1, g.dtype)
        if align
        else ((g + one) * np.asarray(size, g.dtype) - one) * half
    )
    x = m.where(m.isnan(x), m.full_like(x, -3.0), x)
    if mode == "nearest":
        x = m.round(x)
    low, high = _limits(size, align)
    outside = (x < low) | (x > high)
    if padding == "border" and mode != "cubic":
        x = m.where(outside, m.clip(x, np.asarray(0, x.dtype), np.asarray(size - 1, x.dtype)), x)
    elif padding == "reflection":
        x = m.where(outside, _reflect(x, low, high), x)
    # What lies further out reads the same; the cast to an integer stays defined.
    return m.clip(x, np.asarray(-3, x.dtype), np.asarray(size + 2, x.dtype))


def _tap(x: Any, step: int, size: int, align: bool, mode: str, padding: str) -> tuple[Any, Any, Any]:
    """(index, weight or None, inside or None) of the element `step` from the one below the place `x`."""
    m = xp(x)
    base = m.floor(x)
    weight: Any = None
    if mode == "linear":
        weight = x - base if step else 1 - (x - base)
    elif mode == "cubic":
        a = np.asarray(-0.75, x.dtype)
        d = abs(x - base - step)
        weight = ((a + 2) * d - (a + 3)) * d * d + 1 if step in (0, 1) else ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    place = base + step
    inside = None
    if padding == "zeros":
        inside = (place >= 0) & (place <= size - 1)
    elif padding == "reflection":
        low, high = _limits(size, align)
        place = m.where((place < low) | (place > high), _reflect(place, low, high), place)
    return m.clip(place, 0, size - 1).astype(np.int64), weight, inside


# --- others -------------------------------------------------------------------------------------------------------------


@operator("AffineGrid", since_version=20, static=("size",))
def affine_grid_20(theta: Any, size: np.ndarray, /, *, align_corners: int = 0, context: Context) -> Any:
    """The grid for GridSample of an affine map: theta (N, rank, rank + 1) and size (N, C, *sizes) give (N, *sizes, rank).

    With `align_corners` an axis of one element has the coordinate 0, as in PyTorch.
    """
    shape = tuple(int(n) for n in size)
    rank = len(shape) - 2
    if rank not in (2, 3) or tuple(theta.shape) != (shape[0], rank, rank + 1):
        raise ValueError(f"theta of shape {theta.shape} and size {shape} do not fit together")
    sizes = shape[2:]
    context.budget((shape[0], *sizes, rank), theta.dtype)
    dtype = wide_dtype(theta.dtype)
    columns = []
    for axis in reversed(range(rank)):
        n = sizes[axis]
        if align_corners:
            line = np.linspace(-1, 1, n) if n > 1 else np.zeros(n)
        else:
            line = (2 * np.arange(n) + 1) / max(n, 1) - 1
        columns.append(np.broadcast_to(line.reshape(-1, *(1,) * (rank - 1 - axis)), sizes))
    columns.append(np.ones(sizes))
    base = np.stack(columns, axis=-1).reshape(-1, rank + 1).astype(dtype)
    m = xp(theta)
    # Each product is so small that sums of products beat a matrix product, and are exact in every precision mode.
    wide = widen(theta)
    grid = sum(m.asarray(base[None, :, None, k]) * wide[:, None, :, k] for k in range(rank + 1))
    return narrow(m.asarray(grid).reshape(shape[0], *sizes, rank), theta.dtype)


@operator("ImageDecoder", since_version=20, host=True)
def image_decoder_20(encoded_stream: Any, /, *, pixel_format: str = "RGB", context: Context) -> Any:
    """Decode an image file, (bytes,) uint8, to (height, width, channels) uint8, with Pillow.

    What can't be decoded gives an image of height and width 0, as the standard says.
    """
    if pixel_format not in ("RGB", "BGR", "Grayscale"):
        raise ValueError(f"pixel_format {pixel_format!r} is none of RGB, BGR, Grayscale")
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise context.error("ImageDecoder needs Pillow, which is not installed; pip install pillow") from error
    channels = 1 if pixel_format == "Grayscale" else 3
    data = np.asarray(encoded_stream, np.uint8).tobytes()
    try:
        with Image.open(io.BytesIO(data)) as picture:
            width, height = picture.size
            context.budget((height, width, channels), np.uint8)
            decoded = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        return np.zeros((0, 0, channels), np.uint8)
    if channels == 1:
        return np.ascontiguousarray(decoded[:, :, None])
    return np.ascontiguousarray(decoded[:, :, ::-1] if pixel_format == "BGR" else decoded)
