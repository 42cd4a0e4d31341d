"""Conversions between element types: by value (Cast, CastLike) and by bits (BitCast)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from transmuter_async.graph import STRING, dtype_of, onnx_name, parse_dtype
from transmuter_async.operators.arguments import is_floating, is_integer, is_unsigned
from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["convert"]

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_SATURATED = frozenset(
    np.dtype(t)
    for t in (
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
    )
)
# They have neither infinity nor NaN: what is too large becomes the largest whatever `saturate` says.
_ALWAYS_SATURATED = frozenset(
    np.dtype(t) for t in (ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn)
)
# XLA has no such types.
_HOST_ONLY = frozenset(np.dtype(t) for t in (ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn))


# --- numbers ----------------------------------------------------------------------------------------------------------


def convert(x: Any, dtype: np.dtype, *, saturate: bool = True, round_mode: str = "up") -> Any:
    """Numbers (or bools) as another numeric dtype, by Cast's rules, the same on the host and traced.

    What the standard leaves undefined is the same on every platform here: NaN is 0 as an integer; a float outside of the
    range of an integer of fewer than 32 bits loses its high bits, as in onnxruntime (300.0 is 44 as uint8), and so does
    a negative one that becomes unsigned; outside of a wider one it becomes the nearest integer (onnxruntime: what the
    processor has, on x86 the smallest).

    Args:
        x: The numbers.
        dtype: Numeric dtype or bool.
        saturate: Too large for float8: the largest finite value, else infinity or NaN.
        round_mode: "up", "down" or "nearest"; to float8e8m0 only.

    Raises:
        ValueError: `round_mode` is unknown, or `x` is traced and XLA has no such dtype.
    """
    if x.dtype == dtype:
        return x
    module = xp(x)
    if dtype in _HOST_ONLY and module is jnp:
        raise ValueError(f"XLA has no {onnx_name(dtype)}: compute this tensor on the host, or use float8")
    if dtype == np.bool_:
        return widen(x) != 0
    if dtype == _E8M0:
        return _to_e8m0(x, saturate, round_mode)
    if not is_floating(x.dtype):
        # Narrow floats know no way from some integers; all of those values are exact, or too large anyway, in float32.
        if is_floating(dtype) and dtype.itemsize == 1:
            return convert(x.astype(np.float32), dtype, saturate=saturate)
        # Nor has ml_dtypes casts from one narrow integer to another.
        return x.astype(np.int8).astype(dtype) if _bits(x.dtype) < 8 else x.astype(dtype)
    wide = widen(x)
    if is_integer(dtype):
        return _to_integer(wide, dtype)
    if (dtype in _SATURATED and saturate) or dtype in _ALWAYS_SATURATED:
        limit = np.asarray(float(ml_dtypes.finfo(dtype).max), wide.dtype)
        # Compared, not clipped: NaN stays NaN, and -0 stays -0.
        wide = module.where(wide > limit, limit, module.where(wide < -limit, -limit, wide))
    elif module is jnp and dtype in _SATURATED:
        wide = _overflow(wide, dtype)
    elif module is jnp and wide.dtype == np.float64 and dtype.itemsize == 2:
        wide = _rounded_once(wide, dtype)
    return wide.astype(dtype)


def _rounded_once(x: Any, dtype: np.dtype) -> Any:
    """Traced float64 rounded to a 16-bit float's mantissa: XLA would round to float32 on the way, and so twice."""
    info = ml_dtypes.finfo(dtype)
    rounded = lax.reduce_precision(x, exponent_bits=11, mantissa_bits=int(info.nmant))
    return jnp.where(abs(x) >= float(info.smallest_normal), rounded, x)


def _overflow(wide: Any, dtype: np.dtype) -> Any:
    """Traced values that round to more than the largest float8: infinite, so that XLA gives what the table of Cast says."""
    info = ml_dtypes.finfo(dtype)
    largest = float(info.max)
    step = largest - float(np.nextafter(np.asarray(largest, dtype), np.asarray(0, dtype)))
    # A tie rounds to even: the largest value of e4m3fn and e5m2 ends in 10 and 11 in binary.
    tie = largest + step / 2
    odd = bool(np.asarray(largest, dtype).view(np.uint8) & 1)
    beyond = abs(wide) >= tie if odd else abs(wide) > tie
    infinite = jnp.copysign(np.asarray(np.inf, wide.dtype), wide)
    return jnp.where(beyond, infinite, wide)


def _to_integer(x: Any, dtype: np.dtype) -> Any:
    """Floats truncated toward zero; what is out of range as `convert` says."""
    signed = not is_unsigned(dtype)
    if _bits(dtype) < 32:
        return _saturated(x, np.dtype(np.int32)).astype(dtype)
    if signed:
        return _saturated(x, dtype)
    return xp(x).where(x < 0, _saturated(x, np.dtype(np.int64)).astype(dtype), _saturated(x, dtype))


def _saturated(x: Any, dtype: np.dtype) -> Any:
    """Floats as a 32- or 64-bit integer: truncated, the nearest one where out of range, 0 for NaN. XLA converts so."""
    if not is_host(x):
        return x.astype(dtype)
    info = np.iinfo(dtype)
    # Powers of two, so exact in every float. What lies between low - 1 and low truncates to low as well.
    low, above = float(info.min), float(info.max + 1)
    inside = (x >= low) & (x < above)
    with np.errstate(all="ignore"):
        if np.all(inside):
            return np.asarray(x).astype(dtype)
        whole = np.where(inside, x, np.zeros((), x.dtype)).astype(dtype)
    result = np.where(x >= above, dtype.type(info.max), whole)
    return np.where(x < low, dtype.type(info.min), result)


def _to_e8m0(x: Any, saturate: bool, round_mode: str) -> Any:
    """Powers of two: only the exponent of the float32 is kept, rounded by the mantissa. Negative values give NaN."""
    if round_mode not in {"up", "down", "nearest"}:
        raise ValueError(f"round_mode is {round_mode!r}; it must be 'up', 'down' or 'nearest'")
    module = xp(x)
    wide = x.astype(np.float32)
    bits = wide.view(np.uint32) if is_host(x) else lax.bitcast_convert_type(wide, np.uint32)
    exponent = ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int32)
    mantissa = bits & np.uint32(0x7FFFFF)
    # Below 2**-126 float32 has no implicit one; 2**-127, the smallest e8m0, is the mantissa 0x400000.
    subnormal = exponent == 0
    half = np.uint32(0x400000)
    if round_mode == "up":
        more = module.where(subnormal, mantissa > half, mantissa > 0)
    elif round_mode == "down":
        more = module.zeros_like(subnormal)
    else:
        more = module.where(subnormal, mantissa >= np.uint32(0x600000), mantissa >= half)
    code = exponent + more.astype(np.int32)
    # What is less than the smallest value, after rounding.
    under = subnormal & (mantissa < (half if round_mode == "down" else np.uint32(0x200000)))
    if round_mode == "up":
        under = subnormal & (mantissa == 0)
    too_large = code > 254
    nan = np.int32(255)
    if saturate:
        code = module.where(too_large, np.int32(254), code)
    else:
        code = module.where(too_large | under, nan, code)
    # By the bits: XLA on the CPU takes subnormal numbers for zeros when it compares.
    negative = bits > np.uint32(0x80000000)
    code = module.where(negative | (exponent == 255) & (mantissa != 0), nan, code)
    code = code.astype(np.uint8)
    return code.view(_E8M0) if is_host(x) else lax.bitcast_convert_type(code, _E8M0)


# --- strings ----------------------------------------------------------------------------------------------------------


def _text_of(number: Any) -> str:
    """Plain notation with the shortest digits that give the number back; "NaN", "INF", "-INF"; bools are "1" and "0"."""
    if isinstance(number, (bool, np.bool_)):
        return str(int(number))
    if is_integer(number.dtype):
        return str(int(number))
    if np.isnan(number):
        return "NaN"
    if np.isinf(number):
        return "INF" if number > 0 else "-INF"
    return np.format_float_positional(number, unique=True, trim="-")


def _to_strings(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind == "V":
        x = widen(x) if is_floating(x.dtype) else x.astype(np.int64)
    result = np.empty(x.shape, STRING)
    result.reshape(-1)[:] = [_text_of(number) for number in x.reshape(-1)]
    return result


def _number_of(text: str, dtype: np.dtype) -> Any:
    if "_" in text:
        raise ValueError(text)
    if is_floating(dtype):
        return float(text)
    try:
        number = int(text)
    except ValueError:
        number = int(float(text))
    return number != 0 if dtype == np.bool_ else number


def _from_strings(x: np.ndarray, dtype: np.dtype, *, saturate: bool, round_mode: str, context: Context) -> np.ndarray:
    numbers = []
    for text in x.reshape(-1):
        try:
            numbers.append(_number_of(text, dtype))
        except (ValueError, OverflowError) as error:
            raise context.error(f"string {text!r} is no {onnx_name(dtype)}; give numbers, 'INF' or 'NaN'") from error
    if is_floating(dtype):
        exact = np.asarray(numbers, np.float64 if dtype == np.float64 else np.float32).reshape(x.shape)
        return convert(exact, dtype, saturate=saturate, round_mode=round_mode)
    if dtype == np.bool_:
        return np.asarray(numbers, np.bool_).reshape(x.shape)
    info = ml_dtypes.iinfo(dtype)
    outside = [number for number in numbers if not info.min <= number <= info.max]
    if outside:
        raise context.error(f"string '{outside[0]}' is outside of the range of {onnx_name(dtype)}; use a wider type")
    if dtype.kind == "V":
        return np.asarray(numbers, np.int8).astype(dtype).reshape(x.shape)
    return np.asarray(numbers, dtype).reshape(x.shape)


# --- Cast -------------------------------------------------------------------------------------------------------------


def _target(to: int, context: Context) -> np.dtype:
    try:
        return dtype_of(to)
    except KeyError:
        raise context.error(f"element type {to} is unknown; `to` must be a TensorProto.DataType") from None


def _cast(input: Any, dtype: np.dtype, saturate: int, round_mode: str, context: Context) -> Any:
    if input.dtype == dtype:
        return input
    if dtype == STRING:
        return _to_strings(context.needs(input, 0, "the numbers that become text"))
    if input.dtype == STRING:
        return _from_strings(input, dtype, saturate=bool(saturate), round_mode=round_mode, context=context)
    if dtype in _HOST_ONLY:
        input = context.needs(input, 0, f"the values, since XLA has no {onnx_name(dtype)}")
    return convert(input, dtype, saturate=bool(saturate), round_mode=round_mode)


@operator("Cast", since_version=24)
def cast_24(input, /, *, to, saturate=1, round_mode="up", context: Context):
    """Convert by value; see `convert` for numbers out of range.

    Strings: numbers in plain or scientific notation, "INF", "+INF", "-INF", "NaN" in any case; to an integer their whole
    part. Numbers become the shortest plain text that gives them back (onnxruntime writes 8 digits, "1e+20" for large ones).
    """
    return _cast(input, _target(to, context), saturate, round_mode, context)


@operator("Cast", since_version=19)
def cast_19(input, /, *, to, saturate=1, context: Context):
    return cast_24(input, to=to, saturate=saturate, context=context)


@operator("Cast", since_version=6)
def cast_6(input, /, *, to, context: Context):
    """Strings since version 9, bfloat16 since 13."""
    return cast_24(input, to=to, context=context)


@operator("Cast", since_version=1)
def cast_1(input, /, *, to, context: Context):
    """The type is a name there: "FLOAT"."""
    return _cast(input, parse_dtype(str(to).lower()), 1, "up", context)


@operator("CastLike", since_version=24)
def cast_like_24(input, target_type, /, *, saturate=1, round_mode="up", context: Context):
    """Cast to the element type of `target_type`, of which nothing else matters."""
    return _cast(input, np.dtype(target_type.dtype), saturate, round_mode, context)


@operator("CastLike", since_version=19)
def cast_like_19(input, target_type, /, *, saturate=1, context: Context):
    return cast_like_24(input, target_type, saturate=saturate, context=context)


@operator("CastLike", since_version=15)
def cast_like_15(input, target_type, /, *, context: Context):
    return cast_like_24(input, target_type, context=context)


# --- BitCast ----------------------------------------------------------------------------------------------------------


def _bits(dtype: np.dtype) -> int:
    """Width of an element as the standard counts it: bool has 8."""
    for digit in ("2", "4", "6"):
        if dtype.kind == "V" and dtype.name.startswith((f"int{digit}", f"uint{digit}", f"float{digit}")):
            return int(digit)
    return dtype.itemsize * 8


def _words(x: Any) -> Any:
    """A traced array as unsigned integers of its width."""
    if x.dtype == np.bool_:
        return x.astype(np.uint8)
    if x.dtype == np.complex64:
        real, imaginary = (lax.bitcast_convert_type(part, np.uint32).astype(np.uint64) for part in (x.real, x.imag))
        return (imaginary << np.uint64(32)) | real
    width = _bits(np.dtype(x.dtype))
    return lax.bitcast_convert_type(x, jnp.uint4 if width == 4 else jnp.uint2 if width == 2 else f"uint{width}")


def _from_words(words: Any, dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return words != 0
    if dtype == np.complex64:
        low, high = words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
        return lax.complex(lax.bitcast_convert_type(low, np.float32), lax.bitcast_convert_type(high, np.float32))
    return lax.bitcast_convert_type(words, dtype)


@operator("BitCast", since_version=26)
def bit_cast_26(input, /, *, to, context: Context):
    """The same bits as another type of the same width, little endian; a byte that is not 0 is a true bool."""
    dtype = _target(to, context)
    source = np.dtype(input.dtype)
    if STRING in {dtype, source} or _bits(dtype) != _bits(source):
        raise context.error(
            f"{onnx_name(source)} and {onnx_name(dtype)} have different widths; BitCast keeps every bit"
        )
    if source == dtype:
        return input
    if isinstance(input, jax.Array):
        return _from_words(_words(input), dtype)
    if _bits(dtype) < 8:
        # ml_dtypes keeps one narrow element in each byte; only its low bits count.
        low = np.ascontiguousarray(input).view(np.uint8) & np.uint8((1 << _bits(dtype)) - 1)
        if is_integer(dtype) and not dtype.name.startswith("u"):
            sign = 1 << (_bits(dtype) - 1)
            return ((low ^ np.uint8(sign)).astype(np.int8) - np.int8(sign)).astype(dtype)
        return low.astype(dtype) if is_integer(dtype) else low.view(dtype)
    if dtype == np.bool_:
        return np.ascontiguousarray(input).view(np.uint8) != 0
    return np.ascontiguousarray(input).view(dtype).reshape(input.shape)
