"""Regions of interest: RoiAlign, MaxRoiPool."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import narrow, widen
from transmuter_async.operators.registry import is_host, operator, xp

# --- RoiAlign -------------------------------------------------------------------------------------------------------------


@operator("RoiAlign", since_version=10, loops=True)
def roi_align_10(
    X: Any,
    rois: Any,
    batch_indices: Any,
    /,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    context: Context,
) -> Any:
    """Until version 16 coordinates are not moved by half a pixel."""
    return roi_align_16(
        X,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
        context=context,
    )


@operator("RoiAlign", since_version=16, loops=True)
def roi_align_16(
    X: Any,
    rois: Any,
    batch_indices: Any,
    /,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    context: Context,
) -> Any:
    """Pool each region, (x1, y1, x2, y2) in the image's coordinates, into bins of bilinear samples.

    X is (N, C, H, W), rois (R, 4), the result (R, C, output_height, output_width). With `sampling_ratio` 0 a bin takes
    as many samples along an axis as it is elements long, rounded up. "max" is the greatest *weighted corner* of all
    samples, as the standard's tests and onnxruntime have it. Differentiable in X.
    """
    if mode not in ("avg", "max") or coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise ValueError(
            f"mode {mode!r} or coordinate_transformation_mode {coordinate_transformation_mode!r} is not known"
        )
    regions = rois.shape[0]
    if X.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 4 or tuple(batch_indices.shape) != (regions,):
        raise ValueError(f"X {X.shape}, rois {rois.shape} and batch_indices {batch_indices.shape} do not fit together")
    m = xp(X, rois, batch_indices)
    shape = (regions, X.shape[1], output_height, output_width)
    if 0 in shape or 0 in X.shape:
        return m.zeros(shape, X.dtype)
    images, valid = context.bounded(batch_indices, X.shape[0], input="batch_indices", axis=0)
    x = m.asarray(widen(X))
    half = coordinate_transformation_mode == "half_pixel"
    boxes = widen(rois).astype(x.dtype)
    if m is jnp:
        boxes = lax.stop_gradient(jnp.asarray(boxes))
    boxes = boxes * np.asarray(spatial_scale, x.dtype) - np.asarray(0.5 if half else 0.0, x.dtype)
    vertical = _Samples(boxes[:, 1], boxes[:, 3], output_height, sampling_ratio, X.shape[2], half)
    horizontal = _Samples(boxes[:, 0], boxes[:, 2], output_width, sampling_ratio, X.shape[3], half)
    pool = _average if mode == "avg" else _greatest
    with np.errstate(all="ignore"):
        y = pool(x, images, vertical, horizontal)
    y = narrow(y, X.dtype)
    return y if valid is None else context.fill_invalid(y, valid.reshape(-1, 1, 1, 1))


class _Samples:
    """The samples of every region's bins along one axis.

    Samples that lie outside of the data count but add nothing; a region far larger than the data is thus not walked
    through: only samples from the first to the last inside are visited.
    """

    def __init__(self, start: Any, end: Any, bins: int, ratio: int, size: int, half: bool) -> None:
        m = xp(start, end)
        extent = end - start
        if not half:
            extent = m.maximum(extent, m.asarray(1, extent.dtype))
        self.m, self.size, self.bins = m, size, bins
        self.bin = extent / np.asarray(bins, extent.dtype)
        self.count = m.full_like(extent, ratio) if ratio > 0 else m.maximum(m.ceil(self.bin), m.zeros_like(self.bin))
        step = m.where(self.count > 0, self.bin / m.maximum(self.count, m.ones_like(self.count)), m.ones_like(self.bin))
        origin = start[:, None] + m.arange(bins).astype(start.dtype) * self.bin[:, None]
        self.step = step[:, None]
        self.origin = origin + self.step * np.asarray(0.5, step.dtype)  # (regions, bins): the first sample
        positive = self.step > 0
        safe = m.where(positive, self.step, m.ones_like(self.step))
        first = m.where(positive, m.ceil((-1 - self.origin) / safe), m.zeros_like(self.origin))
        last = m.where(positive, m.floor((size - self.origin) / safe), self.count[:, None] - 1 + 0 * self.origin)
        self.first = m.maximum(first - 1, m.zeros_like(first))  # one more on each side: rounding
        self.last = m.minimum(last + 1, self.count[:, None] - 1)
        steps = m.max(self.last - self.first) + 1
        self.fixed = ratio if ratio > 0 else int(max(0, float(steps))) if m is np else None
        # ratio > 0 visits all samples; else as many as the busiest bin needs, known when the program runs.
        self.steps = steps
        if ratio > 0:
            self.first, self.last = m.zeros_like(self.first), self.count[:, None] - 1 + m.zeros_like(self.last)

    def _place(self, number: Any) -> Any:
        return self.first + self.m.asarray(number).astype(self.first.dtype)

    def exists(self, number: Any) -> Any:
        """Whether each bin has a sample of this number."""
        return self._place(number) <= self.last

    def at(self, number: Any) -> tuple[Any, Any, Any, Any]:
        """The corners (low, high) and their weights of one sample in every bin, weights 0 where it does not exist."""
        m = self.m
        place = self._place(number)
        x = self.origin + place * self.step
        inside = (place <= self.last) & (x >= -1) & (x <= self.size)
        x = m.clip(x, np.asarray(0, x.dtype), np.asarray(self.size - 1, x.dtype))
        low = m.floor(x)
        part = x - low
        low = low.astype(np.int64)
        high = m.minimum(low + 1, np.asarray(self.size - 1, np.int64))
        zero = m.zeros_like(x)
        return low, high, m.where(inside, 1 - part, zero), m.where(inside, part, zero)

    def loop(self, body: Any, start: Any) -> Any:
        """`body(number, carry)` for each sample: unrolled where the number is small and known, else a loop."""
        if self.fixed is not None and (self.m is np or self.fixed <= 4):
            for number in range(self.fixed):
                start = body(number, start)
            return start
        limit = self.fixed if self.fixed is not None else jnp.maximum(self.steps, 0).astype(np.int32)
        return lax.fori_loop(0, limit, body, start)

    def matrix(self) -> Any:
        """(regions, bins, size): what each bin's samples take from each element, summed."""
        m = self.m
        places = np.arange(self.size)

        def body(number: Any, total: Any) -> Any:
            low, high, a, b = self.at(number)
            zero = m.zeros((), total.dtype)
            first = m.where(low[..., None] == places, a[..., None], zero)
            return total + first + m.where(high[..., None] == places, b[..., None], zero)

        return self.loop(body, m.zeros((*self.origin.shape, self.size), self.origin.dtype))


def _average(x: Any, images: Any, vertical: _Samples, horizontal: _Samples) -> Any:
    """Bilinear weights are a product of the axes', so the mean of a grid of samples is two small matrix products."""
    m = xp(x, images, vertical.origin)
    count = m.maximum(vertical.count * horizontal.count, m.ones_like(vertical.count))
    rows, columns = vertical.matrix(), horizontal.matrix()
    if m is np:
        y = np.empty((rows.shape[0], x.shape[1], rows.shape[1], columns.shape[1]), x.dtype)
        for region, image in enumerate(images):
            y[region] = np.matmul(np.matmul(rows[region], x[image]), columns[region].T)
    else:

        def one(item: tuple[Any, Any, Any]) -> Any:
            row, column, image = item
            picture = lax.dynamic_index_in_dim(jnp.asarray(x), image, keepdims=False)
            return jnp.matmul(jnp.matmul(row, picture), column.T)

        y = lax.map(one, (rows, columns, jnp.asarray(images)))
    return y / count.reshape(-1, 1, 1, 1)


def _greatest(x: Any, images: Any, vertical: _Samples, horizontal: _Samples) -> Any:
    m = xp(x, images, vertical.origin)
    height, width = x.shape[2:]
    regions, channels = vertical.origin.shape[0], x.shape[1]
    flat = m.moveaxis(m.asarray(x), 1, 3).reshape(-1, channels)
    base = m.asarray(images).astype(np.int64).reshape(-1, 1, 1) * (height * width)
    lowest = m.full((regions, vertical.bins, horizontal.bins, channels), -np.inf, x.dtype)

    def row(i: Any, best: Any) -> Any:
        top, bottom, a, b = (part[:, :, None] for part in vertical.at(i))

        def column(j: Any, best: Any) -> Any:
            left, right, c, d = (part[:, None, :] for part in horizontal.at(j))
            for y, wy in ((top, a), (bottom, b)):
                for z, wz in ((left, c), (right, d)):
                    index = base + y * width + z
                    value = flat[index] if m is np else jnp.take(flat, index, axis=0, mode="clip")
                    weight = (wy * wz)[..., None]
                    # A sample that the bin does not have must not win with its 0.
                    exists = vertical.exists(i)[:, :, None] & horizontal.exists(j)[:, None, :]
                    best = m.where(exists[..., None], m.maximum(best, value * weight), best)
            return best

        return horizontal.loop(column, best)

    best = vertical.loop(row, lowest)
    # No sample at all, or samples outside that were passed over, count as 0.
    empty = best == -np.inf
    skipped = (vertical.count[:, None] > vertical.last - vertical.first + 1)[:, :, None] | (
        horizontal.count[:, None] > horizontal.last - horizontal.first + 1
    )[:, None, :]
    zero = m.zeros_like(best)
    best = m.where(empty, zero, m.where(skipped[..., None], m.maximum(best, zero), best))
    return m.moveaxis(best, 3, 1)


# --- MaxRoiPool -----------------------------------------------------------------------------------------------------------


@operator("MaxRoiPool", since_version=1, loops=True)
def max_roi_pool_1(
    X: Any, rois: Any, /, *, pooled_shape: tuple[int, int], spatial_scale: float = 1.0, context: Context
) -> Any:
    """The greatest element of each bin of each region (batch, x1, y1, x2, y2), whose limits are rounded to elements.

    X is (N, C, H, W), rois (R, 5), the result (R, C, *pooled_shape). A bin without elements gives 0.
    """
    if X.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 5 or len(pooled_shape) != 2:
        raise ValueError(f"X {X.shape}, rois {rois.shape} and pooled_shape {pooled_shape} do not fit together")
    m = xp(X, rois)
    regions, channels = rois.shape[0], X.shape[1]
    shape = (regions, channels, int(pooled_shape[0]), int(pooled_shape[1]))
    if 0 in shape or 0 in X.shape:
        return m.zeros(shape, X.dtype)
    boxes = widen(rois)
    if m is jnp:
        boxes = lax.stop_gradient(jnp.asarray(boxes))
    images, valid = context.bounded(boxes[:, 0].astype(np.int64), X.shape[0], input="rois", axis=0)
    scaled = boxes[:, 1:] * np.asarray(spatial_scale, boxes.dtype)
    limits = m.where(scaled >= 0, m.floor(scaled + 0.5), m.ceil(scaled - 0.5))  # halves away from zero
    rows = _bins(limits[:, 1], limits[:, 3], shape[2], X.shape[2])
    columns = _bins(limits[:, 0], limits[:, 2], shape[3], X.shape[3])
    x = m.asarray(X)

    def one(item: tuple[Any, Any, Any]) -> Any:
        row, column, image = item  # (bins, H), (bins, W), scalar
        if is_host(x, image):
            picture = x[image]
        else:
            picture = lax.dynamic_index_in_dim(x, image, keepdims=False)
        lowest = m.asarray(-np.inf, x.dtype)
        tall = m.where(row[None, :, :, None], picture[:, None], lowest).max(axis=2)
        best = m.where(column[None, None], tall[:, :, None], lowest).max(axis=3)
        return m.where(row.any(axis=1)[:, None] & column.any(axis=1), best, m.zeros_like(best))

    if m is np:
        y: Any = np.stack([one((rows[r], columns[r], images[r])) for r in range(regions)])
    else:
        y = lax.map(one, (jnp.asarray(rows), jnp.asarray(columns), jnp.asarray(images)))
    return y if valid is None else context.fill_invalid(y, valid.reshape(-1, 1, 1, 1))


def _bins(start: Any, end: Any, bins: int, size: int) -> Any:
    """(regions, bins, size): which elements belong to which bin."""
    m = xp(start, end)
    extent = m.maximum(end - start + 1, m.ones_like(start))
    step = (extent / np.asarray(bins, extent.dtype))[:, None]
    number = m.arange(bins).astype(extent.dtype)
    low = m.clip(m.floor(number * step) + start[:, None], 0, size)
    high = m.clip(m.ceil((number + 1) * step) + start[:, None], 0, size)
    places = m.arange(size).astype(extent.dtype)
    return (places >= low[..., None]) & (places < high[..., None])
