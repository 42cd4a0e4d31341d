"""Tensors from nothing but attributes and a few numbers: constants, ranges, identity matrices, windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from transmuter_async.graph import STRING, SparseTensor, dtype_of
from transmuter_async.operators.arguments import is_floating, scalar_input
from transmuter_async.operators.cast import convert
from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.registry import operator, xp

# --- constants --------------------------------------------------------------------------------------------------------


def _strings(values: Any) -> np.ndarray:
    texts = [values] if isinstance(values, (str, bytes)) else list(values)
    result = np.empty(len(texts), STRING)
    result[:] = [text.decode() if isinstance(text, bytes) else text for text in texts]
    return result


@operator("Constant", since_version=12)
def constant_12(
    *,
    sparse_value=None,
    value=None,
    value_float=None,
    value_floats=None,
    value_int=None,
    value_ints=None,
    value_string=None,
    value_strings=None,
    context: Context,
):
    """The one attribute that is given, as a tensor: float32, int64 or strings where it is no tensor already."""
    forms = (sparse_value, value, value_float, value_floats, value_int, value_ints, value_string, value_strings)
    if sum(form is not None for form in forms) != 1:
        raise context.error("exactly one of the value attributes must be given")
    if value is not None:
        return value
    if sparse_value is not None:
        return _dense(sparse_value)
    if value_string is not None:
        return _strings(value_string).reshape(())
    if value_strings is not None:
        return _strings(value_strings)
    if value_int is not None or value_ints is not None:
        return np.asarray(value_ints if value_int is None else value_int, np.int64)
    return np.asarray(value_floats if value_float is None else value_float, np.float32)


def _dense(sparse: SparseTensor) -> np.ndarray:
    return sparse.dense()


@operator("Constant", since_version=11)
def constant_11(*, sparse_value=None, value=None, context: Context):
    return constant_12(sparse_value=sparse_value, value=value, context=context)


@operator("Constant", since_version=1)
def constant_1(*, value):
    return value


@operator("ConstantOfShape", since_version=9, static=("input",))
def constant_of_shape_9(input, /, *, value=None, context: Context):
    """A tensor of the shape `input`, filled with the one element of `value` (a float32 zero)."""
    fill = np.zeros((), np.float32) if value is None else np.asarray(value)
    if fill.size != 1:
        raise context.error(f"value must have one element, it has shape {fill.shape}")
    shape = context.budget(input.reshape(-1).tolist(), fill.dtype)
    return xp().full(shape, fill.reshape(()), fill.dtype)


# --- Range ------------------------------------------------------------------------------------------------------------


@operator("Range", since_version=27, static=("start", "limit", "delta"))
def range_27(start, limit, delta, /, *, stash_type=1, context: Context):
    """start, start + delta, ... short of limit; `max(ceil((limit - start) / delta), 0)` elements.

    16-bit floats are computed in float32 (`stash_type` 1); the count of floats is computed in float64, as in onnxruntime.
    """
    dtype = start.dtype
    first, last, step = (scalar_input(x, n, context) for x, n in ((start, "start"), (limit, "limit"), (delta, "delta")))
    if step == 0:
        raise context.error("delta is 0: the range never reaches its limit; give a step")
    if is_floating(dtype):
        steps = (np.float64(last) - np.float64(first)) / np.float64(step)
        if not math.isfinite(steps):
            raise context.error(f"a range from {first} to {last} by {step} has no finite number of elements")
        count = max(math.ceil(steps), 0)
    else:
        count = max(-((int(first) - int(last)) // int(step)), 0)
    context.budget((count,), dtype)
    module = xp()
    wide_first, wide_step = (widen(first), widen(step)) if stash_type == 1 else (first, step)
    places = module.arange(count).astype(wide_first.dtype)
    return (wide_first + places * wide_step).astype(dtype)


@operator("Range", since_version=11, static=("start", "limit", "delta"))
def range_11(start, limit, delta, /, *, context: Context):
    return range_27(start, limit, delta, context=context)


# --- EyeLike ----------------------------------------------------------------------------------------------------------


@operator("EyeLike", since_version=9)
def eye_like_9(input, /, *, dtype=None, k=0, context: Context):
    """Ones on the `k`-th diagonal of a matrix of the shape of `input`."""
    if input.ndim != 2:
        raise context.error(f"input must be a matrix, it has shape {tuple(input.shape)}")
    kind = np.dtype(input.dtype) if dtype is None else dtype_of(dtype)
    rows, columns = input.shape
    module = xp(input)
    return (module.arange(rows)[:, None] + k == module.arange(columns)[None, :]).astype(kind)


# --- windows ----------------------------------------------------------------------------------------------------------


def _window(size: Any, terms: tuple[float, ...], periodic: int, output_datatype: int, context: Context) -> np.ndarray:
    """The sum of `(-1)^i terms[i] cos(2 pi i n / N)`, computed in float64; a window of one element is 1."""
    count = int(scalar_input(size, "size", context))
    dtype = dtype_of(output_datatype)
    context.budget((count,), np.float64)
    span = count if periodic else count - 1
    if span <= 0:
        return convert(np.ones(count), dtype)
    orders = np.arange(len(terms))
    angles = 2 * np.pi * np.arange(count) / span
    return convert(np.cos(np.outer(angles, orders)) @ ((-1.0) ** orders * np.asarray(terms)), dtype)


@operator("HannWindow", since_version=17, static=("size",))
def hann_window_17(size, /, *, output_datatype=1, periodic=1, context: Context):
    """0.5 - 0.5 cos(2 pi n / N), N the size or, where not periodic, the size less one (onnxruntime: NaN for size 1)."""
    return _window(size, (0.5, 0.5), periodic, output_datatype, context)


@operator("HammingWindow", since_version=17, static=("size",))
def hamming_window_17(size, /, *, output_datatype=1, periodic=1, context: Context):
    """25/46 - 21/46 cos(2 pi n / N)."""
    return _window(size, (25 / 46, 21 / 46), periodic, output_datatype, context)


@operator("BlackmanWindow", since_version=17, static=("size",))
def blackman_window_17(size, /, *, output_datatype=1, periodic=1, context: Context):
    """0.42 - 0.5 cos(2 pi n / N) + 0.08 cos(4 pi n / N)."""
    return _window(size, (0.42, 0.5, 0.08), periodic, output_datatype, context)
