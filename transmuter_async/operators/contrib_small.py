"""com.microsoft: the odds and ends — older names of standard operators, images, distances, matrices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.graph import SparseTensor
from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib import fused_mat_mul_1
from transmuter_async.operators.convolution import conv_transpose_1
from transmuter_async.operators.generator import range_11
from transmuter_async.operators.image import grid_sample_16
from transmuter_async.operators.indexing import gather_nd_11, unique_11
from transmuter_async.operators.layout import trilu_14
from transmuter_async.operators.numeric import narrow, widen
from transmuter_async.operators.padding import pad_18
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.windows import pad_spatial, taps, windows

MICROSOFT = "com.microsoft"


# --- operators that the standard has as well --------------------------------------------------------------------------


@operator("SampleOp", since_version=1, domain=MICROSOFT)
def sample_op_1(X: Any, /) -> Any:
    """The input."""
    return X


@operator("ExpandDims", since_version=1, domain=MICROSOFT, static=("axis",))
def expand_dims_1(X: Any, axis: np.ndarray, /) -> Any:
    """One more axis of size 1 at `axis`, negative ones counting from the end of the result."""
    at = int(axis.reshape(-1)[0])
    if not -X.ndim - 1 <= at <= X.ndim:
        raise ValueError(f"axis {at} is out of range for a result of rank {X.ndim + 1}")
    return xp(X).expand_dims(X, at)


@operator("GatherND", since_version=1, domain=MICROSOFT)
def gather_nd_1(data: Any, indices: Any, /, *, context: Context) -> Any:
    """GatherND-11."""
    return gather_nd_11(data, indices.astype(np.int64), context=context)


@operator("Trilu", since_version=1, domain=MICROSOFT)
def trilu_1(X: Any, k: Any = None, /, *, upper: int = 1) -> Any:
    """Trilu-14."""
    return trilu_14(X, k, upper=upper)


@operator("GridSample", since_version=1, domain=MICROSOFT)
def grid_sample_1(
    X: Any, Grid: Any, /, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Any:
    """GridSample-16."""
    return grid_sample_16(X, Grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@operator("Range", since_version=1, domain=MICROSOFT, static=("start", "limit", "delta"))
def range_1(start: np.ndarray, limit: np.ndarray, delta: np.ndarray | None = None, /, *, context: Context) -> Any:
    """Range-11, with a step of 1 where it is left out."""
    return range_11(start, limit, np.ones((), start.dtype) if delta is None else delta, context=context)


@operator("Pad", since_version=1, domain=MICROSOFT, static=("pads",))
def pad_contrib_1(
    data: Any, pads: np.ndarray, value: Any = None, /, *, mode: str = "constant", context: Context
) -> Any:
    """Pad-11; `pads` may be `(1, 2 * rank)`."""
    return pad_18(data, pads.reshape(-1), value, None, mode=mode, context=context)


@operator("Unique", since_version=1, domain=MICROSOFT, host=True)
def unique_1(x: np.ndarray, /) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct values in order of first occurrence, the place of each input among them, and the counts."""
    if x.ndim != 1:
        raise ValueError(f"x has shape {x.shape}, but has to be one-dimensional")
    values, _, inverse, counts = unique_11(x, sorted=0)
    return values, inverse, counts


@operator("UnfoldTensor", since_version=1, domain=MICROSOFT)
def unfold_tensor_1(input: Any, /, *, dim: int = -1, size: int, step: int = 1) -> Any:
    """All slices of `size` elements of an axis, `step` apart; their elements become the last axis."""
    if not -input.ndim <= dim < input.ndim:
        raise ValueError(f"dim {dim} is out of range for rank {input.ndim}")
    axis = dim % input.ndim
    if size < 1 or step < 1 or size > input.shape[axis]:
        raise ValueError(f"size {size} and step {step} do not fit an axis of {input.shape[axis]}")
    m = xp(input)
    count = (input.shape[axis] - size) // step + 1
    places = np.arange(count)[:, None] * step + np.arange(size)
    return m.moveaxis(m.take(input, places, axis=axis, mode="clip"), axis + 1, -1)


# --- matrices ---------------------------------------------------------------------------------------------------------


@operator("Inverse", since_version=1, domain=MICROSOFT, loops=True)
def inverse_1(X: Any, /) -> Any:
    """The inverse of each matrix; that of a singular one is not finite."""
    if X.ndim < 2 or X.shape[-1] != X.shape[-2]:
        raise ValueError(f"X has shape {tuple(X.shape)}, but has to hold square matrices")
    x = widen(X)
    if x.size == 0:
        return X
    if not is_host(x):
        return narrow(jnp.linalg.inv(x), X.dtype)
    try:
        y = np.linalg.inv(x)
    except np.linalg.LinAlgError:
        flat = x.reshape(-1, *x.shape[-2:])
        singular = np.linalg.matrix_rank(flat) < x.shape[-1]
        safe = np.where(singular[:, None, None], np.eye(x.shape[-1], dtype=x.dtype), flat)
        y = np.where(singular[:, None, None], np.asarray(np.nan, x.dtype), np.linalg.inv(safe)).reshape(x.shape)
    return narrow(y, X.dtype)


@operator("SparseToDenseMatMul", since_version=1, domain=MICROSOFT)
def sparse_to_dense_mat_mul_1(
    A: Any, B: Any, /, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, context: Context
) -> Any:
    """FusedMatMul of a sparse matrix, computed densely."""
    a = A.dense() if isinstance(A, SparseTensor) else A
    if a.dtype.kind == "f":
        return fused_mat_mul_1(a, B, alpha=alpha, transA=transA, transB=transB, context=context)
    m = xp(a, B)
    product = m.matmul(m.swapaxes(a, -1, -2) if transA else a, m.swapaxes(B, -1, -2) if transB else B)
    return product if alpha == 1 else (product.astype(np.float64) * alpha).astype(product.dtype)


@operator("CDist", since_version=1, domain=MICROSOFT, loops=True)
def c_dist_1(A: Any, B: Any, /, *, metric: str = "sqeuclidean") -> Any:
    """`(M, K)` distances between the rows of `(M, N)` and `(K, N)`: their differences' squares, summed (and rooted)."""
    if metric not in ("sqeuclidean", "euclidean"):
        raise ValueError(f"metric {metric!r} is neither 'sqeuclidean' nor 'euclidean'")
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[1]:
        raise ValueError(f"A and B have shapes {tuple(A.shape)} and {tuple(B.shape)}; (M, N) and (K, N) are needed")
    m = xp(A, B)

    def from_row(row: Any) -> Any:
        difference = row - B
        return (difference * difference).sum(-1)

    if A.shape[0] == 0 or B.shape[0] == 0:
        squares = m.zeros((A.shape[0], B.shape[0]), A.dtype)
    elif m is np:
        squares = np.stack([from_row(row) for row in A])
    else:
        squares = lax.map(from_row, jnp.asarray(A))
    return squares if metric == "sqeuclidean" else m.sqrt(squares)


@operator("DynamicTimeWarping", since_version=1, domain=MICROSOFT, host=True)
def dynamic_time_warping_1(input: np.ndarray, /) -> np.ndarray:
    """`(2, steps)` int32: the path of least cost through an `(M, N)` or `(1, M, N)` matrix, corner to corner.

    An empty matrix has a path without steps.
    """
    if input.ndim not in (2, 3) or (input.ndim == 3 and input.shape[0] != 1):
        raise ValueError(f"the input has shape {input.shape}, but has to be (M, N) or (1, M, N)")
    cost = input[0] if input.ndim == 3 else input
    if cost.size == 0:
        return np.zeros((2, 0), np.int32)
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    move = np.full((rows + 1, columns + 1), 2, np.int8)
    for diagonal in range(2, rows + columns + 1):  # entries of one diagonal do not depend on each other
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        across, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        best = np.where((across < down) & (across < right), 0, np.where((down < across) & (down < right), 1, 2))
        move[i, j] = best
        total[i, j] = cost[i - 1, j - 1] + np.choose(best, (across, down, right))
    move[0, :], move[:, 0] = 2, 1
    path, i, j = [], rows, columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = move[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return np.asarray(path[::-1], np.int32).T


# --- images -----------------------------------------------------------------------------------------------------------


@operator("CropAndResize", since_version=1, domain=MICROSOFT, static=("crop_size",))
def crop_and_resize_1(
    X: Any,
    rois: Any,
    batch_indices: Any,
    crop_size: np.ndarray,
    /,
    *,
    extrapolation_value: float = 0.0,
    mode: str = "bilinear",
    context: Context,
) -> Any:
    """Crops of (N, C, H, W) at normalised boxes (y1, x1, y2, x2), resized with their corners aligned."""
    if mode not in ("bilinear", "nearest"):
        raise ValueError(f"mode {mode!r} is neither 'bilinear' nor 'nearest'")
    m = xp(X, rois, batch_indices)
    image, valid = context.bounded(batch_indices, X.shape[0], input="batch_indices", axis=0)
    height, width = (int(d) for d in crop_size.reshape(-1))
    x, box = widen(X), widen(rois)

    def places(first: Any, last: Any, size: int, count: int) -> Any:
        span = np.float32(size - 1)
        if count == 1:
            return (np.float32(0.5) * (first + last) * span)[:, None]
        inner = (
            first[:, None] * span
            + np.arange(count, dtype=np.float32) * ((last - first) * span / np.float32(count - 1))[:, None]
        )
        ends = np.arange(count) == count - 1
        return m.where(ends, (last * span)[:, None], inner)

    y, z = places(box[:, 0], box[:, 2], X.shape[2], height), places(box[:, 1], box[:, 3], X.shape[3], width)
    inside = ((y >= 0) & (y <= X.shape[2] - 1))[:, :, None] & ((z >= 0) & (z <= X.shape[3] - 1))[:, None, :]

    def read(rows: Any, columns: Any) -> Any:
        r = m.clip(rows.astype(np.int64), 0, X.shape[2] - 1)[:, :, None]
        c = m.clip(columns.astype(np.int64), 0, X.shape[3] - 1)[:, None, :]
        return m.moveaxis(x[image[:, None, None], :, r, c], -1, 1)

    if mode == "nearest":  # halves go up, as C's roundf has it for the coordinates that are inside
        result = read(m.floor(y + np.float32(0.5)), m.floor(z + np.float32(0.5)))
    else:
        top, left = m.floor(y), m.floor(z)
        down, right = (y - top)[:, None, :, None], (z - left)[:, None, None, :]
        upper = read(top, left) + (read(top, m.ceil(z)) - read(top, left)) * right
        lower = read(m.ceil(y), left) + (read(m.ceil(y), m.ceil(z)) - read(m.ceil(y), left)) * right
        result = upper + (lower - upper) * down
    result = narrow(m.where(inside[:, None], result, np.float32(extrapolation_value)), X.dtype)
    return result if valid is None else context.fill_invalid(result, valid[:, None, None, None])


@operator("ConvTransposeWithDynamicPads", since_version=1, domain=MICROSOFT, static=("Pads",))
def conv_transpose_with_dynamic_pads_1(
    X: Any,
    W: Any,
    Pads: np.ndarray | None = None,
    B: Any = None,
    /,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """ConvTranspose whose pads are an input."""
    return conv_transpose_1(
        X,
        W,
        B,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        output_padding=output_padding,
        pads=None if Pads is None else tuple(int(p) for p in Pads.reshape(-1)),
        strides=strides,
        context=context,
    )


@operator("MaxpoolWithMask", since_version=1, domain=MICROSOFT)
def maxpool_with_mask_1(
    X: Any,
    M: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
) -> Any:
    """MaxPool that reads each innermost run of a window only up to its first element whose mask is 0.

    The very first element of an image is never masked, unless there is one spatial axis only. The mask is (1, 1, *sizes)
    or has the batch and channels of X. A window without elements gives the lowest float32.
    """
    if kernel_shape is None:
        raise ValueError("kernel_shape is left out")
    m = xp(X, M)
    if M.ndim != X.ndim or M.shape[2:] != X.shape[2:]:
        raise ValueError(f"M has shape {tuple(M.shape)}, but X {tuple(X.shape)}")
    w = windows(X.shape, kernel_shape, strides=strides, dilations=None, pads=pads, auto_pad=auto_pad)
    lowest = np.finfo(np.float32).min
    open_ = M != 0
    if len(w.kernel) > 1:
        first = np.zeros(X.shape[2:], bool)
        first[(0,) * first.ndim] = True
        open_ = open_ | first
    # Padding neither counts nor ends a run.
    masks = pad_spatial(open_.astype(np.int8), w.low, w.reach, 1)
    values = pad_spatial(X, w.low, w.reach, lowest)
    best = m.full((*X.shape[:2], *w.outputs), lowest, X.dtype)
    pairs = zip(taps(values, w), taps(masks, w), strict=True)
    for _, run in groupby(pairs, key=lambda pair: pair[0][0][:-1]):
        alive: Any = None
        for (_, value), (_, mask) in run:
            alive = mask if alive is None else alive * mask
            best = m.maximum(best, m.where(alive != 0, value, X.dtype.type(lowest)))
    return best


@operator("WordConvEmbedding", since_version=1, domain=MICROSOFT)
def word_conv_embedding_1(
    Sequence: Any,
    W: Any,
    B: Any,
    C: Any,
    /,
    *,
    char_embedding_size: int | None = None,
    conv_window_size: int | None = None,
    embedding_size: int | None = None,
    context: Context,
) -> Any:
    """A vector for each word `(words, characters)`: embedded characters, a convolution along them, tanh, maximum.

    Character 0 ends nothing but does not count: a word of `n` others uses its first `max(n, window)` characters; one
    that starts with 0 has none and gives zeros (onnxruntime leaves that row uninitialised).
    """
    m = xp(Sequence, W, B, C)
    length = Sequence.shape[1]
    filters, _, window, size = W.shape
    if C.shape[1] != size or window > length:
        raise ValueError(f"W has shape {tuple(W.shape)}, C {tuple(C.shape)}, and words have {length} characters")
    ids, _ = context.bounded(Sequence, C.shape[0], input="Sequence", axis=0)
    count = m.where(Sequence[:, 0] > 0, (Sequence > 0).sum(1), 0)
    used = m.maximum(count, window)
    chars = m.take(C, ids, axis=0, mode="clip")
    chars = m.where((np.arange(length) < used[:, None])[..., None], chars, m.zeros_like(chars))
    places = length - window + 1
    unfolded = m.concatenate([chars[:, i : i + places] for i in range(window)], axis=-1)
    scores = m.tanh(m.matmul(unfolded, W.reshape(filters, window * size).T) + B)
    inside = np.arange(places) < (used - window + 1)[:, None]
    best = m.where(inside[..., None], scores, np.float32(-1e12)).max(1)
    return m.where((count > 0)[:, None], best, m.zeros_like(best))
