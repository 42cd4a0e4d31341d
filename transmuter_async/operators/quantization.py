"""Quantise and dequantise, and products and convolutions of quantised tensors.

Integer products are computed exactly and still on floating-point units, which are several times faster than integer ones in
XLA: 8-bit values are exact in bfloat16 and float32, and a sum of products is exact in float32 while it stays below 2**24.
Longer sums are split, and the parts added as int32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from transmuter_async.graph import dtype_of, onnx_name
from transmuter_async.operators.arguments import finite_limits, is_floating, is_integer, normalize_axis, scalar_input
from transmuter_async.operators.cast import convert
from transmuter_async.operators.context import Context
from transmuter_async.operators.convolution import convolve
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.recipes import RECIPES
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.rows import row_extreme
from transmuter_async.operators.windows import windows

__all__ = ["dequantize", "integer_product", "quantize", "requantize", "shifted"]

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
# Integers up to this are exact in float32.
_EXACT = 1 << 24
# With fewer rows a product with bfloat16 is slower than one with float32.
_FEW_ROWS = 16
# With so many rows at least and at most, one of 8-bit integers is faster than both, where there are instructions for it.
_ROWS_OF_8_BITS = (2, 32)


# --- QuantizeLinear ---------------------------------------------------------------------------------------------------


def _spread(parameter: Any, shape: Sequence[int], axis: int, block_size: int, name: str, context: Context) -> Any:
    """A scale or zero point, shaped to broadcast against the tensor.

    One element: for the whole tensor. One axis: one for each index on `axis`. The tensor's rank: one for each block of
    `block_size` on `axis`.
    """
    if parameter.size == 1 and parameter.ndim <= 1:
        return parameter.reshape(())
    rank = len(shape)
    if block_size == 0 and parameter.ndim == 1:
        axis = normalize_axis(axis, rank, context)
        if parameter.shape[0] != shape[axis]:
            raise context.error(
                f"{name} has {parameter.shape[0]} elements, but axis {axis} of the tensor {shape[axis]}"
            )
        return parameter.reshape([-1 if i == axis else 1 for i in range(rank)])
    if parameter.ndim != rank:
        raise context.error(
            f"{name} of shape {tuple(parameter.shape)} is neither a scalar, nor a vector, nor of rank {rank}"
        )
    if tuple(parameter.shape) == tuple(shape):
        return parameter
    axis = normalize_axis(axis, rank, context)
    blocks = parameter.shape[axis]
    expected = [-(-size // block_size) if i == axis and block_size > 0 else size for i, size in enumerate(shape)]
    if block_size <= 0 or list(parameter.shape) != expected:
        raise context.error(
            f"{name} of shape {tuple(parameter.shape)} does not fit blocks of {block_size} on axis {axis} "
            f"of a tensor of shape {tuple(shape)}"
        )
    repeated = xp(parameter).broadcast_to(
        xp(parameter).expand_dims(parameter, axis + 1), (*shape[:axis], blocks, block_size, *shape[axis + 1 :])
    )
    flat = repeated.reshape(*shape[:axis], blocks * block_size, *shape[axis + 1 :])
    return flat[(slice(None),) * axis + (slice(0, shape[axis]),)]


def _rounded_to(x: Any, dtype: np.dtype) -> Any:
    """Float32 numbers rounded to the precision of a narrower float, kept as float32."""
    if dtype == np.float32 or not is_floating(dtype) or dtype.itemsize > 2:
        return x
    if is_host(x):
        return x.astype(dtype).astype(np.float32)
    # A cast there and back may be removed by XLA; this may not.
    info = ml_dtypes.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=int(info.nexp), mantissa_bits=int(info.nmant))


def _divide(x: Any, divisor: Any) -> Any:
    """Division that is rounded correctly: XLA replaces one by a constant or broadcast divisor by a multiplication.

    Numbers that should end in .5 would then be rounded to the wrong side.
    """
    if is_host(x, divisor):
        return x / divisor
    # A divisor that depends on every element, and yet gives NaN where x is NaN already.
    return x / jnp.where(x != x, np.asarray(np.nan, x.dtype), divisor)


def quantize(x: Any, scale: Any, zero_point: Any, dtype: np.dtype, precision: np.dtype, saturate: bool = True) -> Any:
    """`saturate(round(x / scale) + zero_point)` with ready-shaped parameters.

    Args:
        x: Float or int32 tensor.
        scale: Broadcasts against x.
        zero_point: The same, or None.
        dtype: Of the result: integers of up to 16 bits, float8, float4 or float6 (these are not rounded to integers).
        precision: The dtype to divide in; integers are divided in float64.
        saturate: For float8, see Cast.
    """
    module = xp(x, scale) if zero_point is None else xp(x, scale, zero_point)
    wide = np.float64 if is_integer(precision) or precision == np.float64 else np.float32
    quotient = _rounded_to(_divide(x.astype(wide), scale.astype(wide)), precision)
    if not is_integer(dtype):
        if zero_point is not None:
            quotient = quotient + zero_point.astype(wide)
        return convert(quotient, dtype, saturate=saturate)
    level = module.round(quotient)
    if zero_point is not None:
        level = level + zero_point.astype(wide)
    low, high = (float(limit) for limit in finite_limits(dtype))
    return convert(module.clip(level, wide(low), wide(high)), dtype)


@operator("QuantizeLinear", since_version=23)
def quantize_linear_23(
    x,
    y_scale,
    y_zero_point=None,
    /,
    *,
    axis=1,
    block_size=0,
    output_dtype=0,
    precision=0,
    saturate=1,
    context: Context,
):
    """`saturate(round(x / y_scale) + y_zero_point)`, rounding half to even before the zero point is added.

    The division has the precision of `y_scale`, or of the attribute; a float8e8m0 scale (version 28) divides in float32.
    NaN becomes 0 as an integer.
    """
    if y_zero_point is None:
        dtype = dtype_of(output_dtype) if output_dtype else np.dtype(np.uint8)
    else:
        dtype = np.dtype(y_zero_point.dtype)
        if output_dtype and dtype_of(output_dtype) != dtype:
            wanted = onnx_name(dtype_of(output_dtype))
            raise context.error(f"output_dtype is {wanted}, but y_zero_point is {onnx_name(dtype)}; make them equal")
        y_zero_point = _spread(_whole(y_zero_point), x.shape, axis, block_size, "y_zero_point", context)
    divide_in = dtype_of(precision) if precision else np.dtype(y_scale.dtype)
    if divide_in == _E8M0:
        divide_in = np.dtype(np.float32)
    scale = _spread(widen(y_scale), x.shape, axis, block_size, "y_scale", context)
    return quantize(x, scale, y_zero_point, dtype, divide_in, bool(saturate))


def _whole(zero_point: Any) -> Any:
    """A zero point in a dtype that can be added: int32 for integers, float32 for narrow floats."""
    return zero_point.astype(np.int32) if is_integer(zero_point.dtype) else widen(zero_point)


@operator("QuantizeLinear", since_version=21)
def quantize_linear_21(
    x, y_scale, y_zero_point=None, /, *, axis=1, block_size=0, output_dtype=0, saturate=1, context: Context
):
    return quantize_linear_23(
        x,
        y_scale,
        y_zero_point,
        axis=axis,
        block_size=block_size,
        output_dtype=output_dtype,
        saturate=saturate,
        context=context,
    )


@operator("QuantizeLinear", since_version=19)
def quantize_linear_19(x, y_scale, y_zero_point=None, /, *, axis=1, saturate=1, context: Context):
    return quantize_linear_23(x, y_scale, y_zero_point, axis=axis, saturate=saturate, context=context)


@operator("QuantizeLinear", since_version=13)
def quantize_linear_13(x, y_scale, y_zero_point=None, /, *, axis=1, context: Context):
    return quantize_linear_23(x, y_scale, y_zero_point, axis=axis, context=context)


@operator("QuantizeLinear", since_version=10)
def quantize_linear_10(x, y_scale, y_zero_point=None, /, *, context: Context):
    """Until version 13 there is one scale for the whole tensor."""
    return quantize_linear_23(x, scalar_input(y_scale, "y_scale", context), y_zero_point, context=context)


# --- DequantizeLinear -------------------------------------------------------------------------------------------------


def dequantize(x: Any, scale: Any, zero_point: Any) -> Any:
    """`(x - zero_point) * scale` in float32, with ready-shaped parameters; the difference of integers is exact."""
    if is_integer(x.dtype):
        if zero_point is None:
            return x.astype(np.float32) * scale
        # Two int32 may differ by more than one holds.
        wide = np.int64 if x.dtype.itemsize > 2 else np.int32
        return (x.astype(wide) - zero_point.astype(wide)).astype(np.float32) * scale
    wide = widen(x)
    return (wide if zero_point is None else wide - zero_point) * scale


@operator("DequantizeLinear", since_version=23)
def dequantize_linear_23(x, x_scale, x_zero_point=None, /, *, axis=1, block_size=0, output_dtype=0, context: Context):
    """`(x - x_zero_point) * x_scale`, computed in float32, in the dtype of `x_scale` or `output_dtype`."""
    dtype = dtype_of(output_dtype) if output_dtype else np.dtype(x_scale.dtype)
    if dtype == _E8M0:
        raise context.error("a float8e8m0 scale gives no type for the result; set output_dtype")
    if x_zero_point is not None:
        if x_zero_point.dtype != x.dtype:
            raise context.error(
                f"x is {onnx_name(x.dtype)}, but x_zero_point {onnx_name(x_zero_point.dtype)}; make them equal"
            )
        x_zero_point = _spread(_whole(x_zero_point), x.shape, axis, block_size, "x_zero_point", context)
    scale = _spread(widen(x_scale), x.shape, axis, block_size, "x_scale", context)
    return dequantize(x, scale, x_zero_point).astype(dtype)


@operator("DequantizeLinear", since_version=21)
def dequantize_linear_21(x, x_scale, x_zero_point=None, /, *, axis=1, block_size=0, context: Context):
    return dequantize_linear_23(x, x_scale, x_zero_point, axis=axis, block_size=block_size, context=context)


@operator("DequantizeLinear", since_version=13)
def dequantize_linear_13(x, x_scale, x_zero_point=None, /, *, axis=1, context: Context):
    return dequantize_linear_23(x, x_scale, x_zero_point, axis=axis, context=context)


@operator("DequantizeLinear", since_version=10)
def dequantize_linear_10(x, x_scale, x_zero_point=None, /, *, context: Context):
    """Until version 13 there is one scale for the whole tensor."""
    return dequantize_linear_23(x, scalar_input(x_scale, "x_scale", context), x_zero_point, context=context)


@operator("DynamicQuantizeLinear", since_version=11)
def dynamic_quantize_linear_11(x, /, *, context: Context):
    """Quantise to uint8 with the scale and zero point that the values ask for; 0 is always exact.

    Where every value is 0, or there is none, the scale is 1 (onnxruntime's rule; the formula would divide 0 by 0).
    """
    module = xp(x)
    zero = np.zeros((), x.dtype)
    row = x.reshape(1, -1)
    high = module.maximum(row_extreme(row, context, largest=True, initial=zero).reshape(()), zero)
    low = module.minimum(row_extreme(row, context, largest=False, initial=zero).reshape(()), zero)
    scale = _divide(high - low, x.dtype.type(255))
    scale = module.where(high == low, x.dtype.type(1), scale)
    zero_point = module.round(module.clip(_divide(-low, scale), x.dtype.type(0), x.dtype.type(255)))
    y = quantize(x, scale, zero_point, np.dtype(np.uint8), np.dtype(np.float32))
    if module is np:
        scale, zero_point = np.asarray(scale), np.asarray(zero_point)
    return y, scale, zero_point.astype(np.uint8)


# --- products ---------------------------------------------------------------------------------------------------------


def shifted(x: Any, zero_point: Any) -> tuple[Any, int]:
    """8-bit values less their zero point, and a bound of their magnitude.

    Args:
        x: int8 or uint8.
        zero_point: The same dtype, broadcasting against x, or None.

    Returns:
        x itself where there is nothing to subtract, else int32, and the bound: 128, 255.
    """
    if zero_point is None or (is_host(zero_point) and not np.any(zero_point)):
        return x, 128 if x.dtype == np.int8 else 255
    return x.astype(np.int32) - zero_point.astype(np.int32), 255


def integer_product(a: Any, b: Any, a_limit: int, b_limit: int) -> Any:
    """The exact matrix product of small integers, as `numpy.matmul`, int32 (wrapping only beyond that).

    Args:
        a: Integers of magnitude up to `a_limit`.
        b: Integers of magnitude up to `b_limit`.
        a_limit: At most 256, what bfloat16 holds exactly.
        b_limit: At most 256.
    """
    host = is_host(a, b)
    depth = a.shape[-1]
    kind = jnp.float32 if host or math.prod(a.shape[:-1]) < _FEW_ROWS else jnp.bfloat16
    step = _EXACT // (a_limit * b_limit)
    if is_host(b) and b.size and int(np.abs(b.astype(np.int32)).sum(axis=max(b.ndim - 2, 0)).max()) * a_limit < _EXACT:
        # No column of these weights can add up to more.
        step = max(depth, 1)
    total = None
    for start in range(0, max(depth, 1), step):
        left = a[..., start : start + step].astype(kind)
        right = (b[start : start + step] if b.ndim == 1 else b[..., start : start + step, :]).astype(kind)
        part = np.matmul(left, right) if host else jnp.matmul(left, right, preferred_element_type=jnp.float32)
        part = part.astype(np.int32)
        total = part if total is None else total + part
    return total


def _product_with_weights(a: Any, b: Any, a_limit: int, b_zero_point: Any, context: Context) -> Any:
    """`integer_product` with a weight known on the host: it is shifted and cast once, and its columns' sums are known."""
    few = math.prod(a.shape[:-1]) < _FEW_ROWS
    weights = context.prepared((b, b_zero_point), "less zero point", int(not few))
    whole = b.astype(np.int32)
    if b_zero_point is not None:
        whole = whole - _by_column(b_zero_point).astype(np.int32)
    largest = int(np.abs(whole).sum(axis=0).max(initial=0))
    depth = b.shape[0]
    step = max(depth, 1) if largest * a_limit < _EXACT else max(1, _EXACT // (a_limit * 255))
    total = None
    for start in range(0, max(depth, 1), step):
        left = a[..., start : start + step].astype(weights.dtype)
        part = jnp.matmul(left, weights[start : start + step], preferred_element_type=jnp.float32).astype(np.int32)
        total = part if total is None else total + part
    return total


def _stays_8_bit(a: Any, b: Any, b_zero_point: Any) -> bool:
    """Whether a factor of few rows meets a known int8 weight without zero point."""
    if is_host(a) or not is_host(b, b_zero_point) or b.ndim != 2 or b.dtype != np.int8 or not b.size or np.any(b_zero_point):
        return False
    fewest, most = _ROWS_OF_8_BITS
    return a.ndim >= 2 and a.shape[-1] == b.shape[0] and fewest <= math.prod(a.shape[:-1]) <= most


def _product_of_8_bits(a: Any, b: Any, zero_point: Any, context: Context) -> Any:
    """`(a - zero_point) @ b` as `a @ b - zero_point * sum(b)`, all in integers; uint8 is moved to int8 first."""
    moved = a.dtype == np.uint8
    signed = lax.bitcast_convert_type(a ^ np.uint8(128), jnp.int8) if moved else a
    total = jnp.matmul(signed, context.prepared(b, "same"), preferred_element_type=jnp.int32)
    if zero_point is None and not moved:
        return total
    origin = np.int32(128 if moved else 0) - (np.int32(0) if zero_point is None else zero_point.astype(np.int32))
    return total + origin * context.prepared(b, "column sums")


def _by_row(parameter: Any) -> Any:
    """A zero point or scale of the left factor: scalar, one for each row, or shaped already."""
    if parameter is None or parameter.ndim != 1:
        return parameter
    return parameter.reshape(()) if parameter.shape[0] == 1 else parameter[:, None]


def _by_column(parameter: Any) -> Any:
    """A zero point or scale of the right factor: scalar, one for each column, or shaped already."""
    return parameter.reshape(()) if parameter is not None and parameter.shape == (1,) else parameter


@operator("MatMulInteger", since_version=10)
def mat_mul_integer_10(A, B, a_zero_point=None, b_zero_point=None, /, *, context: Context):
    """`(A - a_zero_point) @ (B - b_zero_point)`, exact, int32; zero points for all, for each row of A or column of B."""
    if _stays_8_bit(A, B, b_zero_point) and context.lowers("8-bit product"):
        return _product_of_8_bits(A, B, _by_row(a_zero_point), context)
    a, a_limit = shifted(A, _by_row(a_zero_point))
    if is_host(B, b_zero_point) and not is_host(A) and B.ndim == 2:
        return _product_with_weights(a, B, a_limit, b_zero_point, context)
    b, b_limit = shifted(B, _by_column(b_zero_point))
    return integer_product(a, b, a_limit, b_limit)


def requantize(total: Any, multiplier: Any, zero_point: Any, dtype: np.dtype) -> Any:
    """An int32 (or float32) sum times a float32 multiplier, quantised as QuantizeLinear does with scale 1."""
    value = total.astype(np.float32) * multiplier
    return quantize(value, np.ones((), np.float32), _whole(zero_point), dtype, np.dtype(np.float32))


@operator("QLinearMatMul", since_version=10)
def q_linear_mat_mul_10(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point, /, *, context: Context):
    """MatMulInteger, scaled by `a_scale * b_scale / y_scale` in float32 and quantised. float8 since version 21."""
    scales = _by_row(widen(a_scale)) * _by_column(widen(b_scale)) / _by_row(widen(y_scale))
    dtype = np.dtype(y_zero_point.dtype)
    zero_point = _by_row(y_zero_point)
    if is_integer(a.dtype) and is_integer(b.dtype):
        total = mat_mul_integer_10(a, b, a_zero_point, b_zero_point, context=context)
    else:
        left = widen(a) - _by_row(widen(a_zero_point))
        right = widen(b) - _by_column(widen(b_zero_point))
        total = xp(left, right).matmul(left.astype(np.float32), right.astype(np.float32))
    return requantize(total, scales, zero_point, dtype)


# --- convolutions -----------------------------------------------------------------------------------------------------


def _integer_convolution(
    x: Any, w: Any, x_zero_point: Any, w_zero_point: Any, attributes: dict[str, Any], group: int, context: Context
) -> Any:
    """The exact convolution of 8-bit tensors less their zero points, int32; padding counts as the zero point."""
    kernel = attributes.pop("kernel_shape")
    if kernel and tuple(kernel) != tuple(w.shape[2:]):
        raise context.error(f"kernel_shape {tuple(kernel)} is not that of the weights, {tuple(w.shape[2:])}")
    if x.ndim < 3 or w.ndim != x.ndim:
        raise context.error(
            f"x and w need the same rank of at least 3, got shapes {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if x_zero_point is not None:
        x_zero_point = scalar_input(x_zero_point, "x_zero_point", context)
    if w_zero_point is not None and w_zero_point.size not in (1, w.shape[0]):
        raise context.error(
            f"w_zero_point has {w_zero_point.size} elements; give one for all of w, or one for each of its {w.shape[0]} filters"
        )
    data, x_limit = shifted(x, x_zero_point)
    places = windows(data.shape, w.shape[2:], **attributes)
    terms = math.prod(w.shape[1:])
    if is_host(w, w_zero_point):
        known = RECIPES["integer filters"](w, w_zero_point)
        largest = int(np.abs(known).sum(axis=tuple(range(1, w.ndim)), dtype=np.float64).max(initial=0))
        weights = known if is_host(data) else context.prepared((w, w_zero_point), "integer filters")
    else:
        symmetric = w_zero_point is None or (is_host(w_zero_point) and not np.any(w_zero_point))
        largest = terms * (128 if symmetric and w.dtype == np.int8 else 255)
        weights = RECIPES["integer filters"](w, w_zero_point)

    def run(part: Any, kind: Any) -> Any:
        return convolve(data.astype(kind), part.astype(kind), places, group, context).astype(np.int32)

    if is_host(data, weights):
        return run(weights, np.float64)
    if largest * x_limit < _EXACT:
        return run(weights, np.float32)
    if terms * 16 * x_limit < _EXACT:
        # Two convolutions, of the high and the low half of each weight, are exact where one is not.
        whole = weights.astype(np.int32)
        return run(whole >> np.int32(4), np.float32) * np.int32(16) + run(whole & np.int32(15), np.float32)
    return run(weights, np.float64)


@operator("ConvInteger", since_version=10)
def conv_integer_10(
    x,
    w,
    x_zero_point=None,
    w_zero_point=None,
    /,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
    context: Context,
):
    """Convolution of `x - x_zero_point` with `w - w_zero_point`, exact, int32; what is padded counts as 0 there."""
    attributes = {
        "auto_pad": auto_pad,
        "dilations": dilations,
        "kernel_shape": kernel_shape,
        "pads": pads,
        "strides": strides,
    }
    return _integer_convolution(x, w, x_zero_point, w_zero_point, attributes, group, context)


@operator("QLinearConv", since_version=10)
def q_linear_conv_10(
    x,
    x_scale,
    x_zero_point,
    w,
    w_scale,
    w_zero_point,
    y_scale,
    y_zero_point,
    B=None,
    /,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
    context: Context,
):
    """ConvInteger plus the int32 bias, scaled by `x_scale * w_scale / y_scale` in float32 and quantised."""
    total = conv_integer_10(
        x,
        w,
        x_zero_point,
        w_zero_point,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )
    spread = (1,) * (x.ndim - 2)
    if B is not None:
        total = total + B.reshape(-1, *spread)
    scales = scalar_input(x_scale, "x_scale", context) * w_scale / scalar_input(y_scale, "y_scale", context)
    scales = scales.reshape(()) if scales.size == 1 else scales.reshape(-1, *spread)
    zero_point = scalar_input(y_zero_point, "y_zero_point", context)
    return requantize(total, scales, zero_point, np.dtype(y_zero_point.dtype))
