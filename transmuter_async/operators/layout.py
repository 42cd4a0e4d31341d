"""Operators that move elements around without looking at them: shapes, order, joining and cutting.

Shapes, axes and slice bounds are host values. Where two texts disagree the docstring says which one is followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["concatenate", "normal_axes", "normal_axis", "slice_axes", "split_sizes"]

_TWO_BITS = frozenset({"int2", "uint2"})


# --- shared with other families ---------------------------------------------------------------------------------------


def normal_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front. Raises ValueError outside of `[-rank, rank-1]`."""
    axis = int(axis)
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} lies outside of [{-rank}, {rank - 1}], the axes of a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def normal_axes(axes: Iterable[Any], rank: int) -> tuple[int, ...]:
    """Each of `axes` counted from the front. Raises ValueError for one out of range or named twice."""
    found = tuple(normal_axis(axis, rank) for axis in axes)
    if len(set(found)) != len(found):
        raise ValueError(f"axes {list(found)} name an axis twice")
    return found


def concatenate(parts: Sequence[Any], axis: int) -> Any:
    """Join tensors of one dtype along `axis`; host parts stay on the host.

    XLA's CPU compiler ends the process over a concatenation of 2-bit integers (jaxlib 0.10), so those go through int8.
    """
    if is_host(*parts):
        return np.concatenate(parts, axis)
    dtype = parts[0].dtype
    if dtype.name in _TWO_BITS:
        wide = [jnp.asarray(part).astype(jnp.int8) for part in parts]
        return jnp.concatenate(wide, axis).astype(dtype)
    return jnp.concatenate(parts, axis)


def slice_axes(data: Any, slices: Sequence[tuple[int, int, int, int]]) -> Any:
    """Cut `data` along axes by `(axis, start, stop, step)` as `range(start, stop, step)` within the axis."""
    if is_host(data):
        index = [slice(None)] * data.ndim
        for axis, start, stop, step in slices:
            index[axis] = slice(start, stop if stop >= 0 else None, step)
        return data[tuple(index)]
    low, high, stride, backwards = [0] * data.ndim, list(data.shape), [1] * data.ndim, []
    for axis, start, stop, step in slices:
        picked = range(start, stop, step)
        if len(picked) == 0:
            low[axis] = high[axis] = 0
        elif step > 0:
            low[axis], high[axis], stride[axis] = start, picked[-1] + 1, step
        else:
            low[axis], high[axis], stride[axis] = picked[-1], start + 1, -step
            backwards.append(axis)
    result = lax.slice(data, low, high, stride)
    return lax.rev(result, backwards) if backwards else result


def _ints(values: Any) -> list[int]:
    """A host tensor of any shape, or an attribute, as a list of Python ints."""
    return [int(value) for value in np.asarray(values).reshape(-1).tolist()]


# --- Reshape, Flatten, Squeeze, Unsqueeze -----------------------------------------------------------------------------


@operator("Reshape", since_version=1)
def reshape_1(data: Any, /, *, consumed_inputs: Any = None, shape: Sequence[int] | None = None) -> Any:
    """The shape is an attribute; `consumed_inputs` was an optimisation hint and means nothing."""
    if shape is None:
        raise ValueError("Reshape-1 has no `shape` attribute")
    return reshape_14(data, np.asarray(shape, np.int64), allowzero=0)


@operator("Reshape", since_version=5, static=("shape",))
def reshape_5(data: Any, shape: Any, /) -> Any:
    """A zero in `shape` always keeps that dimension."""
    return reshape_14(data, shape, allowzero=0)


@operator("Reshape", since_version=14, static=("shape",))
def reshape_14(data: Any, shape: Any, /, *, allowzero: int = 0) -> Any:
    """Give `data` another shape: 0 keeps the dimension at the same index (`allowzero`: is zero), -1 is what is left.

    Where the tensor is empty, -1 is still well defined when the kept dimensions cancel: (0, 4) with [0, -1] is (0, 4).
    onnxruntime refuses that case; an empty batch must not fail.
    """
    wanted = _ints(shape)
    if any(size < -1 for size in wanted) or wanted.count(-1) > 1:
        raise ValueError(f"shape {wanted} has a negative dimension other than one -1")
    if allowzero and 0 in wanted and -1 in wanted:
        raise ValueError(f"with allowzero=1 the shape {wanted} may not hold both 0 and -1")
    before = list(data.shape)
    rest, sizes = list(before), list(wanted)
    for index, size in enumerate(wanted):
        if size == 0 and not allowzero:
            if index >= len(before):
                raise ValueError(
                    f"shape {wanted} keeps dimension {index}, which a tensor of shape {before} does not have"
                )
            sizes[index] = before[index]
            rest[index] = 1
    if -1 in wanted:
        given = math.prod(size for size in wanted if size > 0) * (0 if allowzero and 0 in wanted else 1)
        left = math.prod(rest)
        if given == 0 or left % given:
            raise ValueError(
                f"a tensor of shape {before} cannot take the shape {wanted}: {left} is no multiple of {given}"
            )
        sizes[wanted.index(-1)] = left // given
    if math.prod(sizes) != math.prod(before):
        raise ValueError(f"a tensor of shape {before} cannot take the shape {wanted}: the element counts differ")
    return xp(data).reshape(data, tuple(sizes))


@operator("Flatten", since_version=1)
def flatten_1(input: Any, /, *, axis: int = 1) -> Any:
    """A matrix: the dimensions before `axis` times the rest. `axis` may be the rank; negative from version 11."""
    rank = len(input.shape)
    if not -rank <= axis <= rank:
        raise ValueError(f"axis {axis} lies outside of [{-rank}, {rank}]")
    cut = axis + rank if axis < 0 else axis
    return xp(input).reshape(input, (math.prod(input.shape[:cut]), math.prod(input.shape[cut:])))


@operator("Squeeze", since_version=1)
def squeeze_1(data: Any, /, *, axes: Sequence[int] | None = None) -> Any:
    """The axes are an attribute."""
    return squeeze_13(data, None if axes is None else np.asarray(axes, np.int64))


@operator("Squeeze", since_version=13, static=("axes",))
def squeeze_13(data: Any, axes: Any = None, /) -> Any:
    """Remove axes of size 1: `axes`, or all of them where it is left out or (as in onnxruntime) empty."""
    shape = list(data.shape)
    named = [] if axes is None else _ints(axes)
    gone = normal_axes(named, len(shape)) if named else tuple(i for i, size in enumerate(shape) if size == 1)
    for axis in gone:
        if shape[axis] != 1:
            raise ValueError(f"axis {axis} of a tensor of shape {shape} has size {shape[axis]}; only 1 can be squeezed")
    return xp(data).reshape(data, tuple(size for axis, size in enumerate(shape) if axis not in gone))


@operator("Unsqueeze", since_version=1)
def unsqueeze_1(data: Any, /, *, axes: Sequence[int]) -> Any:
    """The axes are an attribute."""
    return unsqueeze_13(data, np.asarray(axes, np.int64))


@operator("Unsqueeze", since_version=13, static=("axes",))
def unsqueeze_13(data: Any, axes: Any, /) -> Any:
    """Insert axes of size 1. `axes` count in the result, in any order."""
    named = _ints(axes)
    added = normal_axes(named, len(data.shape) + len(named))
    sizes = iter(data.shape)
    shape = tuple(1 if axis in added else next(sizes) for axis in range(len(data.shape) + len(named)))
    return xp(data).reshape(data, shape)


# --- Transpose, DepthToSpace, SpaceToDepth, ReverseSequence -----------------------------------------------------------


@operator("Transpose", since_version=1)
def transpose_1(data: Any, /, *, perm: Sequence[int] | None = None) -> Any:
    """Axes in the order of `perm`, reversed where it is left out."""
    order = tuple(reversed(range(len(data.shape)))) if perm is None else normal_axes(perm, len(data.shape))
    if len(order) != len(data.shape):
        raise ValueError(f"perm {list(order)} does not order the {len(data.shape)} axes of shape {list(data.shape)}")
    return xp(data).transpose(data, order)


@operator("DepthToSpace", since_version=1)
def depth_to_space_1(input: Any, /, *, blocksize: int) -> Any:
    """Only the depth-column-row order exists."""
    return depth_to_space_11(input, blocksize=blocksize, mode="DCR")


@operator("DepthToSpace", since_version=11)
def depth_to_space_11(input: Any, /, *, blocksize: int, mode: str = "DCR") -> Any:
    """(n, c*b*b, h, w) to (n, c, h*b, w*b); `mode` tells whether the channel is the inner (DCR) or outer (CRD) part."""
    n, depth, height, width = _image(input)
    if depth % (blocksize * blocksize):
        raise ValueError(f"depth {depth} is no multiple of blocksize² = {blocksize * blocksize}")
    channels, module = depth // (blocksize * blocksize), xp(input)
    if _depth_order(mode) == "DCR":
        blocks = module.reshape(input, (n, blocksize, blocksize, channels, height, width))
        blocks = module.transpose(blocks, (0, 3, 4, 1, 5, 2))
    else:
        blocks = module.reshape(input, (n, channels, blocksize, blocksize, height, width))
        blocks = module.transpose(blocks, (0, 1, 4, 2, 5, 3))
    return module.reshape(blocks, (n, channels, height * blocksize, width * blocksize))


@operator("SpaceToDepth", since_version=1)
def space_to_depth_1(input: Any, /, *, blocksize: int) -> Any:
    """Only the depth-column-row order exists."""
    return space_to_depth_28(input, blocksize=blocksize, mode="DCR")


@operator("SpaceToDepth", since_version=28)
def space_to_depth_28(input: Any, /, *, blocksize: int, mode: str = "DCR") -> Any:
    """(n, c, h*b, w*b) to (n, c*b*b, h, w), the inverse of DepthToSpace in the same `mode`."""
    n, channels, height, width = _image(input)
    if height % blocksize or width % blocksize:
        raise ValueError(f"height {height} and width {width} are no multiples of blocksize {blocksize}")
    module, order = xp(input), (0, 3, 5, 1, 2, 4) if _depth_order(mode) == "DCR" else (0, 1, 3, 5, 2, 4)
    blocks = module.reshape(input, (n, channels, height // blocksize, blocksize, width // blocksize, blocksize))
    depth = channels * blocksize * blocksize
    return module.reshape(module.transpose(blocks, order), (n, depth, height // blocksize, width // blocksize))


def _image(input: Any) -> tuple[int, int, int, int]:
    if len(input.shape) != 4:
        raise ValueError(f"the input has shape {list(input.shape)}, not (n, c, h, w)")
    n, channels, height, width = input.shape
    return n, channels, height, width


def _depth_order(mode: str) -> str:
    if mode not in ("DCR", "CRD"):
        raise ValueError(f"mode {mode!r} is neither 'DCR' nor 'CRD'")
    return mode


@operator("ReverseSequence", since_version=10)
def reverse_sequence_10(
    input: Any, sequence_lens: Any, /, *, batch_axis: int = 1, time_axis: int = 0, context: Context
) -> Any:
    """Reverse the first `sequence_lens[b]` steps of each sequence; the steps after them stay.

    A length outside of [0, size of the time axis] is an index out of range, as in onnxruntime.
    """
    batch_axis, time_axis = normal_axis(batch_axis, input.ndim), normal_axis(time_axis, input.ndim)
    if {batch_axis, time_axis} != {0, 1}:
        raise ValueError(f"batch_axis {batch_axis} and time_axis {time_axis} must be 0 and 1")
    steps, batch = input.shape[time_axis], input.shape[batch_axis]
    if tuple(sequence_lens.shape) != (batch,):
        raise ValueError(f"sequence_lens has shape {list(sequence_lens.shape)}, not ({batch},)")
    module = xp(input, sequence_lens)
    lens = module.asarray(sequence_lens).astype(np.int64)
    # A negative length must not count from the end: it is moved out of the range on the other side.
    lens, valid = context.bounded(
        module.where(lens < 0, steps + 1 - lens, lens), steps, input="sequence_lens", axis=time_axis, inclusive=True
    )
    lens = lens.astype(np.int64)
    step = np.arange(steps, dtype=np.int64)[:, None]
    source = module.where(step < lens, lens - 1 - step, step)
    source = source if time_axis == 0 else source.T
    source = module.reshape(source, source.shape + (1,) * (input.ndim - 2))
    if is_host(input, sequence_lens):
        return np.take_along_axis(input, source, time_axis)
    result = jnp.take_along_axis(jnp.asarray(input), source, time_axis, mode="promise_in_bounds")
    if valid is None:
        return result
    return context.fill_invalid(
        result, module.reshape(valid, [-1 if a == batch_axis else 1 for a in range(input.ndim)])
    )


@operator("Trilu", since_version=14)
def trilu_14(input: Any, k: Any = None, /, *, upper: int = 1) -> Any:
    """The triangle above (`upper`) or below the `k`-th diagonal of each matrix, zero elsewhere; `k` may be traced."""
    if input.ndim < 2:
        raise ValueError(f"a tensor of shape {list(input.shape)} holds no matrices")
    rows, columns = input.shape[-2:]
    module = xp(input, k)
    # How far right of the main diagonal an element lies.
    distance = np.arange(columns, dtype=np.int64) - np.arange(rows, dtype=np.int64)[:, None]
    shift = np.zeros((), np.int64) if k is None else module.reshape(module.asarray(k), ()).astype(np.int64)
    kept = distance >= shift if upper else distance <= shift
    return module.where(kept, input, np.zeros((), input.dtype))


@operator("Identity", since_version=1)
def identity_1(input: Any, /) -> Any:
    """The input: a tensor, from version 14 a sequence, from version 16 an optional."""
    return input


# --- Shape, Size ------------------------------------------------------------------------------------------------------


@operator("Shape", since_version=1)
def shape_1(data: Any, /) -> np.ndarray:
    """The whole shape."""
    return shape_15(data, end=None, start=0)


@operator("Shape", since_version=15)
def shape_15(data: Any, /, *, end: int | None = None, start: int = 0) -> np.ndarray:
    """The shape from `start` to `end`, both clamped, negative from the back: always a host value, (n,) int64."""
    rank = len(data.shape)
    low = min(max(start + rank if start < 0 else start, 0), rank)
    high = rank if end is None else min(max(end + rank if end < 0 else end, 0), rank)
    return np.array(data.shape[low : max(low, high)], np.int64)


@operator("Size", since_version=1)
def size_1(data: Any, /) -> np.ndarray:
    """The number of elements: always a host value, scalar int64."""
    return np.array(math.prod(data.shape), np.int64)


# --- Expand, Tile -----------------------------------------------------------------------------------------------------


@operator("Expand", since_version=8, static=("shape",))
def expand_8(input: Any, shape: Any, /, *, context: Context) -> Any:
    """Broadcast both ways: a 1 in `shape` keeps the input's dimension."""
    wanted = _ints(shape)
    if any(size < 0 for size in wanted):
        raise ValueError(f"shape {wanted} has a negative dimension")
    try:
        sizes = np.broadcast_shapes(tuple(input.shape), tuple(wanted))
    except ValueError:
        raise ValueError(f"shape {list(input.shape)} and {wanted} do not broadcast") from None
    return xp(input).broadcast_to(input, context.budget(sizes, input.dtype))


@operator("Tile", since_version=1, static=("tiles", "axis"))
def tile_1(input: Any, tiles: Any, axis: Any, /, *, context: Context) -> Any:
    """Repeat along one axis."""
    repeats = [1] * input.ndim
    repeats[normal_axis(_ints(axis)[0], input.ndim)] = _ints(tiles)[0]
    return tile_6(input, np.array(repeats, np.int64), context=context)


@operator("Tile", since_version=6, static=("repeats",))
def tile_6(input: Any, repeats: Any, /, *, context: Context) -> Any:
    """Repeat `repeats[i]` times along each axis i; 0 gives an empty axis."""
    times = _ints(repeats)
    if len(times) != input.ndim or any(time < 0 for time in times):
        raise ValueError(f"repeats {times} must be {input.ndim} numbers ≥ 0 for a tensor of shape {list(input.shape)}")
    context.budget([size * time for size, time in zip(input.shape, times, strict=True)], input.dtype)
    return xp(input).tile(input, tuple(times))


# --- Concat, Split, Slice ---------------------------------------------------------------------------------------------


@operator("Concat", since_version=1)
def concat_1(*inputs: Any, axis: int | None = None) -> Any:
    """The axis is 1 where it is left out."""
    return concat_4(*inputs, axis=1 if axis is None else axis)


@operator("Concat", since_version=4)
def concat_4(*inputs: Any, axis: int) -> Any:
    """Join along `axis`; the other dimensions are equal."""
    if not inputs:
        raise ValueError("Concat has no inputs")
    shapes = [list(part.shape) for part in inputs]
    at = normal_axis(axis, len(shapes[0]))
    if any(len(s) != len(shapes[0]) or s[:at] + s[at + 1 :] != shapes[0][:at] + shapes[0][at + 1 :] for s in shapes):
        raise ValueError(f"shapes {', '.join(map(str, shapes))} differ in more than axis {at}")
    return concatenate(inputs, at)


@operator("Split", since_version=1, static=("split",))
def split_1(
    input: Any, split_: Any = None, /, *, axis: int | None = None, split: Sequence[int] | None = None, n_outputs: int
) -> tuple[Any, ...]:
    """The sizes are an input or an attribute, both called `split`; equal parts without them. The axis is 0 by default."""
    sizes = split if split_ is None else split_
    return split_13(input, sizes, axis=0 if axis is None else axis, n_outputs=n_outputs)


@operator("Split", since_version=2)
def split_2(input: Any, /, *, axis: int = 0, split: Sequence[int] | None = None, n_outputs: int) -> tuple[Any, ...]:
    """The sizes are an attribute."""
    return split_13(input, split, axis=axis, n_outputs=n_outputs)


@operator("Split", since_version=13, static=("split",))
def split_13(input: Any, split: Any = None, /, *, axis: int = 0, n_outputs: int) -> tuple[Any, ...]:
    """Cut into parts of sizes `split`, or into equal parts, one for each output; the axis must divide evenly then."""
    size = input.shape[normal_axis(axis, input.ndim)]
    if split is None and size % n_outputs:
        raise ValueError(f"axis {axis} of size {size} does not divide into {n_outputs} equal parts; give `split`")
    return split_18(input, split, axis=axis, num_outputs=None if split is not None else n_outputs, n_outputs=n_outputs)


@operator("Split", since_version=18, static=("split",))
def split_18(
    input: Any, split: Any = None, /, *, axis: int = 0, num_outputs: int | None = None, n_outputs: int
) -> tuple[Any, ...]:
    """Cut into parts of sizes `split`, or into `num_outputs` parts of which the last may be smaller.

    Where rounding up leaves less than nothing for the last part (5 into 4) the split is refused, as in onnxruntime.
    """
    at = normal_axis(axis, input.ndim)
    if (split is None) == (num_outputs is None):
        raise ValueError("exactly one of the input `split` and the attribute `num_outputs` is needed")
    sizes = _ints(split) if split is not None else split_sizes(input.shape[at], num_outputs or 0)
    if sum(sizes) != input.shape[at] or len(sizes) != n_outputs or any(size < 0 for size in sizes):
        raise ValueError(f"parts {sizes} for {n_outputs} outputs do not make up axis {at} of size {input.shape[at]}")
    return tuple(_parts(input, sizes, at))


def split_sizes(size: int, parts: int) -> list[int]:
    """Sizes of `parts` parts, all of `ceil(size / parts)` but the last, which has what is left."""
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    each = -(-size // parts)
    if size - each * (parts - 1) < 0:
        raise ValueError(f"an axis of size {size} in {parts} parts of {each} leaves a negative last part")
    return [each] * (parts - 1) + [size - each * (parts - 1)]


def _parts(input: Any, sizes: Sequence[int], axis: int) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [slice_axes(input, [(axis, end - size, end, 1)]) for size, end in zip(sizes, ends, strict=True)]


@operator("Slice", since_version=1)
def slice_1(data: Any, /, *, axes: Sequence[int] | None = None, ends: Sequence[int], starts: Sequence[int]) -> Any:
    """Bounds and axes are attributes, the step is 1."""
    return slice_10(data, starts, ends, axes, None)


@operator("Slice", since_version=10, static=("starts", "ends", "axes", "steps"))
def slice_10(data: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None, /) -> Any:
    """numpy's basic slicing: bounds beyond the axis are clamped, so INT64_MAX and -(2**63-1) mean "to the end".

    After adding the size to negative ones, a start is clamped to [0, size] (negative step: [0, size-1]), an end to
    [0, size] (negative step: [-1, size-1]).
    """
    begin, finish = _ints(starts), _ints(ends)
    along = list(range(len(begin))) if axes is None else _ints(axes)
    by = [1] * len(begin) if steps is None else _ints(steps)
    if not len(begin) == len(finish) == len(along) == len(by):
        raise ValueError(f"starts {begin}, ends {finish}, axes {along} and steps {by} differ in length")
    slices = []
    for axis, low, high, step in zip(normal_axes(along, data.ndim), begin, finish, by, strict=True):
        size = data.shape[axis]
        if step == 0:
            raise ValueError(f"the step of axis {axis} is 0")
        least, most = (0, size) if step > 0 else (-1, size - 1)
        start = min(max(low + size if low < 0 else low, least, 0), most)
        stop = min(max(high + size if high < 0 else high, least), most)
        # range() would run on from a start of -1, which an empty axis gives; and stop -1 means "to the front" below.
        slices.append((axis, 0, 0, 1) if size == 0 or len(range(start, stop, step)) == 0 else (axis, start, stop, step))
    return slice_axes(data, slices)
