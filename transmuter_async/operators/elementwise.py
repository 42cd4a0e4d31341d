"""Arithmetic, rounding, exponentials, trigonometry: results of one element from elements at the same place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special as jax_special
from numpy.polynomial import Chebyshev
from scipy import special

from transmuter_async.operators.arguments import (
    align_legacy,
    finite_limits,
    host_scalar,
    is_floating,
    is_integer,
    is_unsigned,
    scalar_input,
)
from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["erf", "truncating_divide"]

# Beyond this erf is 1 in float32.
_ERF_LIMIT = 3.92
_ERF_DEGREE = 16
# Elements from which the series pays.
_ERF_MANY = 4096


# --- one input: a table -----------------------------------------------------------------------------------------------


def _through_float(name: str) -> Callable[[Any], Any]:
    """The function `name` of numpy and jax.numpy; the 16-bit floats go through float32."""

    def compute(x: Any) -> Any:
        return getattr(xp(x), name)(widen(x)).astype(x.dtype)

    return compute


@cache
def _erf_series() -> np.ndarray:
    """Chebyshev coefficients of erf(x) / x over x**2 up to `_ERF_LIMIT` squared, good to 2e-7."""
    squares = np.linspace(-1, 1, 4001)
    x = np.sqrt((np.sin(squares * np.pi / 2) + 1) / 2) * _ERF_LIMIT
    values = np.where(x == 0, 2 / np.sqrt(np.pi), special.erf(x) / np.where(x == 0, 1, x))
    return Chebyshev.fit(x * x, values, _ERF_DEGREE, domain=[0, _ERF_LIMIT**2]).coef.astype(np.float32)


def _host_erf(x: np.ndarray) -> np.ndarray:
    if x.dtype != np.float32 or x.size < _ERF_MANY:
        return special.erf(x)
    # scipy takes an element at a time, some 40 ns each. Clenshaw's recurrence over whole arrays is five times as fast.
    clipped = np.clip(x, np.float32(-_ERF_LIMIT), np.float32(_ERF_LIMIT))
    place = clipped * clipped * np.float32(2 / _ERF_LIMIT**2) - np.float32(1)
    first, *rest = _erf_series()
    twice, last, before = place + place, np.zeros_like(place), np.zeros_like(place)
    for coefficient in rest[::-1]:
        # before <- coefficient + 2 place last - before, and the two change names: no new arrays.
        np.subtract(coefficient, before, out=before)
        before += twice * last
        last, before = before, last
    return np.clip(clipped * (first + place * last - before), np.float32(-1), np.float32(1))


def erf(x: Any) -> Any:
    """The error function of float32 or float64."""
    return _host_erf(x) if is_host(x) else jax_special.erf(x)


def _erf(x: Any) -> Any:
    return erf(widen(x)).astype(x.dtype)


# operator, name of its input, version with only that input, computation, what it is
_UNARY: tuple[tuple[str, str, int, Callable[[Any], Any], str], ...] = (
    ("Abs", "X", 6, _through_float("abs"), "|x|; the smallest signed integer stays as it is."),
    ("Neg", "X", 6, _through_float("negative"), "-x."),
    ("Reciprocal", "X", 6, _through_float("reciprocal"), "1 / x."),
    ("Sqrt", "X", 6, _through_float("sqrt"), "Square root; NaN below zero."),
    ("Exp", "input", 6, _through_float("exp"), "e to the power of x."),
    ("Log", "input", 6, _through_float("log"), "Natural logarithm; -inf at zero, NaN below."),
    ("Ceil", "X", 6, _through_float("ceil"), "The smallest integer that is not below x."),
    ("Floor", "X", 6, _through_float("floor"), "The largest integer that is not above x."),
    ("Tanh", "input", 6, _through_float("tanh"), "Hyperbolic tangent."),
    ("Round", "X", 11, _through_float("round"), "The nearest integer, ties to the even one."),
    ("Erf", "input", 9, _erf, "The error function."),
    ("Sign", "input", 9, _through_float("sign"), "-1, 0 or 1; NaN stays NaN."),
    ("Tan", "input", 7, _through_float("tan"), "Tangent of radians."),
    ("Asin", "input", 7, _through_float("arcsin"), "Inverse sine, in radians."),
    ("Acos", "input", 7, _through_float("arccos"), "Inverse cosine, in radians."),
    ("Atan", "input", 7, _through_float("arctan"), "Inverse tangent, in radians."),
    ("Sinh", "input", 9, _through_float("sinh"), "Hyperbolic sine."),
    ("Cosh", "input", 9, _through_float("cosh"), "Hyperbolic cosine."),
    ("Asinh", "input", 9, _through_float("arcsinh"), "Inverse hyperbolic sine."),
    ("Acosh", "input", 9, _through_float("arccosh"), "Inverse hyperbolic cosine."),
    ("Atanh", "input", 9, _through_float("arctanh"), "Inverse hyperbolic tangent."),
)


def _register_unary(name: str, parameter: str, version: int, compute: Callable[[Any], Any], text: str) -> None:
    current: Callable[..., Any]
    first: Callable[..., Any]
    if parameter == "X":

        def current(X, /):
            return compute(X)

        def first(X, /, *, consumed_inputs=None):
            return compute(X)
    else:

        def current(input, /):
            return compute(input)

        def first(input, /, *, consumed_inputs=None):
            return compute(input)

    current.__doc__ = text
    current.__name__ = f"{name.lower()}_{version}"
    operator(name, since_version=version)(current)
    # What entered the standard with version 1 had an attribute there that says nothing any more.
    if version == 6:
        first.__doc__ = text
        first.__name__ = f"{name.lower()}_1"
        operator(name, since_version=1)(first)


for _row in _UNARY:
    _register_unary(*_row)


# --- sine and cosine --------------------------------------------------------------------------------------------------

_MANY_ANGLES = 1024
"""Elements from which looking at the range first pays."""
_QUARTER = 1.57079632673412561417  # pi / 2 to 33 bits: times an integer below 2**20 it is exact
_QUARTER_REST = 6.07710050650619224932e-11
_ANGLE_LIMIT = 1e6


def _wave(x: Any, turned: int) -> Any:
    """The sine of float32 angles below `_ANGLE_LIMIT`, or with `turned` 1 the cosine; within 1.5 units of the last place.

    The angle less multiples of a quarter turn in float64, then one of two polynomials.
    """
    wide = x.astype(np.float64)
    quarters = jnp.round(wide * (2 / np.pi))
    rest = (wide - quarters * _QUARTER - quarters * _QUARTER_REST).astype(np.float32)
    square = rest * rest
    sine, cosine = np.float32(1 / math.factorial(9)), np.float32(1 / math.factorial(8))
    for order in (7, 5, 3):
        sine = square * sine + np.float32((-1) ** (order // 2) / math.factorial(order))
        cosine = square * cosine + np.float32((-1) ** (order // 2) / math.factorial(order - 1))
    sine, cosine = rest + rest * square * sine, np.float32(1) + square * cosine
    turns = quarters.astype(np.int32) + turned
    result = jnp.where(turns & 1 == 1, cosine, sine)
    return jnp.where(turns & 2 == 2, -result, result)


def _angles(x: Any, turned: int, context: Context) -> Any:
    """Sine or cosine. XLA calls a function for each element on a CPU, since an angle may be huge: most are not."""
    plain = "cos" if turned else "sin"
    angles = widen(x)
    if is_host(x) or angles.dtype != np.float32 or x.size < _MANY_ANGLES or not context.lowers("small angles"):
        return getattr(xp(x), plain)(angles).astype(x.dtype)

    def small(x: Any) -> Any:
        with jax.disable_jit():  # else jax keeps the traces of its own functions, for every shape
            return _wave(x, turned)

    with jax.disable_jit():
        fits = jnp.all(abs(angles) < np.float32(_ANGLE_LIMIT))
    y = lax.cond(fits, small, lambda x: lax.cos(x) if turned else lax.sin(x), angles)
    return lax.convert_element_type(y, x.dtype)


@operator("Sin", since_version=7, loops=True)
def sin_7(input, /, *, context: Context):
    """Sine of radians."""
    return _angles(input, 0, context)


@operator("Cos", since_version=7, loops=True)
def cos_7(input, /, *, context: Context):
    """Cosine of radians."""
    return _angles(input, 1, context)


# --- two inputs -------------------------------------------------------------------------------------------------------


@operator("Add", since_version=7)
def add_7(A, B, /):
    """A + B; integers wrap."""
    return xp(A, B).add(A, B)


@operator("Add", since_version=6)
def add_6(A, B, /, *, axis=None, broadcast=0):
    return add_7(*align_legacy(A, B, axis, broadcast))


@operator("Add", since_version=1)
def add_1(A, B, /, *, axis=None, broadcast=0, consumed_inputs=None):
    return add_6(A, B, axis=axis, broadcast=broadcast)


@operator("Sub", since_version=7)
def sub_7(A, B, /):
    """A - B; integers wrap."""
    return xp(A, B).subtract(A, B)


@operator("Sub", since_version=6)
def sub_6(A, B, /, *, axis=None, broadcast=0):
    return sub_7(*align_legacy(A, B, axis, broadcast))


@operator("Sub", since_version=1)
def sub_1(A, B, /, *, axis=None, broadcast=0, consumed_inputs=None):
    return sub_6(A, B, axis=axis, broadcast=broadcast)


@operator("Mul", since_version=7)
def mul_7(A, B, /):
    """A * B; integers wrap."""
    return xp(A, B).multiply(A, B)


@operator("Mul", since_version=6)
def mul_6(A, B, /, *, axis=None, broadcast=0):
    return mul_7(*align_legacy(A, B, axis, broadcast))


@operator("Mul", since_version=1)
def mul_1(A, B, /, *, axis=None, broadcast=0, consumed_inputs=None):
    return mul_6(A, B, axis=axis, broadcast=broadcast)


def _refuse_zero(context: Context, dividend: Any, divisor: Any) -> None:
    """Raise for an integer divisor of zero: there is no integer that could stand for the result."""
    if dividend.size and divisor.size:
        context.refuse(divisor == 0, "integer division by zero; give a divisor without zeros")


def truncating_divide(dividend: Any, divisor: Any) -> Any:
    """Integer division rounded toward zero, broadcasting. Zeros among the divisors are for the caller to refuse."""
    if not is_host(dividend, divisor):
        return lax.div(*jnp.broadcast_arrays(dividend, divisor))
    quotient = np.floor_divide(dividend, divisor)
    if is_unsigned(quotient.dtype):
        return quotient
    inexact = np.multiply(quotient, divisor) != dividend
    return quotient + (inexact & ((dividend < 0) != (divisor < 0))).astype(quotient.dtype)


@operator("Div", since_version=7)
def div_7(A, B, /, *, context: Context):
    """A / B; integers are rounded toward zero (version 14 of the standard says it; onnxruntime did so before).

    An integer zero in `B` raises, as in onnxruntime, also where `B` is computed on the device: then when the program has
    run. The standard leaves it open.
    """
    if is_integer(A.dtype):
        _refuse_zero(context, A, B)
        return truncating_divide(A, B)
    return xp(A, B).divide(A, B)


@operator("Div", since_version=6)
def div_6(A, B, /, *, axis=None, broadcast=0, context: Context):
    return div_7(*align_legacy(A, B, axis, broadcast), context=context)


@operator("Div", since_version=1)
def div_1(A, B, /, *, axis=None, broadcast=0, consumed_inputs=None, context: Context):
    return div_6(A, B, axis=axis, broadcast=broadcast, context=context)


@operator("Mod", since_version=10)
def mod_10(A, B, /, *, fmod=0, context: Context):
    """Remainder: `fmod=0` has the divisor's sign (Python's %), `fmod=1` the dividend's (C's fmod).

    Floats with `fmod=0` entered with version 28 and are computed at every version. There ±0 gets the divisor's sign and an
    infinite divisor of the other sign is itself the result. An integer zero in `B` raises, as in Div.
    """
    module = xp(A, B)
    if is_integer(A.dtype):
        _refuse_zero(context, A, B)
        return module.fmod(A, B) if fmod else module.mod(A, B)
    a, b = widen(A), widen(B)
    remainder = module.fmod(a, b) if is_host(A, B) else lax.rem(*jnp.broadcast_arrays(a, b))
    if not fmod:
        other_side = (remainder != 0) & ((remainder < 0) != (b < 0))
        remainder = module.where(other_side, remainder + b, remainder)
        remainder = module.where(remainder == 0, module.copysign(module.zeros_like(remainder), b), remainder)
    return remainder.astype(A.dtype)


def _integer_power(base: Any, exponent: Any) -> Any:
    """Whole powers of integers modulo 2**64, in the base's dtype; negative exponents truncate toward zero."""
    module = xp(base, exponent)
    dtype = base.dtype
    if is_unsigned(exponent.dtype):
        return module.power(base.astype(np.uint64), exponent.astype(np.uint64)).astype(dtype)
    base, exponent = base.astype(np.int64), exponent.astype(np.int64)
    powers = module.power(base, module.maximum(exponent, 0))
    # 1/b is 0 but for b of -1, 0 and 1; 1/0 is infinite, which onnxruntime casts to the smallest integer.
    odd = module.where(exponent % 2 == 0, module.ones_like(base), base)
    inverse = module.where(abs(base) == 1, odd, module.zeros_like(base))
    powers = module.where(exponent < 0, inverse, powers).astype(dtype)
    return module.where((exponent < 0) & (base == 0), np.asarray(np.iinfo(dtype).min, dtype), powers)


@operator("Pow", since_version=7)
def pow_7(X, Y, /):
    """X to the power of Y, in the dtype of X; from version 12 on Y may have another dtype than X.

    Integers with integers are exact and wrap; integers with floats are computed in float64 and truncated.
    """
    module = xp(X, Y)
    if is_integer(X.dtype):
        if is_integer(Y.dtype):
            return _integer_power(X, Y)
        return module.power(X.astype(np.float64), Y.astype(np.float64)).astype(X.dtype)
    exponent = host_scalar(Y)
    if exponent is not None and Y.ndim <= X.ndim and exponent in {1, 2, 3}:
        # Exact and fast, and its derivative has no logarithm in it.
        wide = widen(X)
        return reduce(module.multiply, [wide] * int(exponent)).astype(X.dtype)
    wide = np.float64 if X.dtype == np.float64 or Y.dtype == np.float64 else np.float32
    return module.power(X.astype(wide), Y.astype(wide)).astype(X.dtype)


@operator("Pow", since_version=1)
def pow_1(X, Y, /, *, axis=None, broadcast=0):
    return pow_7(*align_legacy(X, Y, axis, broadcast))


@operator("BitShift", since_version=11)
def bit_shift_11(X, Y, /, *, direction, context: Context):
    """Shift bits; a signed right shift copies the sign, a shift by the width or more leaves 0 (or -1) alone.

    Signed integers, and what a negative amount does (as the width or more), entered with version 28.
    """
    if direction not in {"LEFT", "RIGHT"}:
        raise context.error(f"direction is {direction!r}; it must be 'LEFT' or 'RIGHT'")
    module = xp(X, Y)
    X, Y = module.broadcast_arrays(X, Y)
    return module.left_shift(X, Y) if direction == "LEFT" else module.right_shift(X, Y)


# --- any number of inputs ---------------------------------------------------------------------------------------------


@operator("Max", since_version=6)
def max_6(*data_0):
    """The largest of the inputs at each place, broadcasting from version 8 on; NaN wins."""
    return reduce(xp(*data_0).maximum, data_0)


@operator("Max", since_version=1)
def max_1(*data_0, consumed_inputs=None):
    return max_6(*data_0)


@operator("Min", since_version=6)
def min_6(*data_0):
    """The smallest of the inputs at each place, broadcasting from version 8 on; NaN wins."""
    return reduce(xp(*data_0).minimum, data_0)


@operator("Min", since_version=1)
def min_1(*data_0, consumed_inputs=None):
    return min_6(*data_0)


@operator("Sum", since_version=6)
def sum_6(*data_0):
    """Sum of the inputs, broadcasting from version 8 on; 16-bit floats are added up in float32."""
    return reduce(xp(*data_0).add, [widen(x) for x in data_0]).astype(data_0[0].dtype)


@operator("Sum", since_version=1)
def sum_1(*data_0, consumed_inputs=None):
    return sum_6(*data_0)


@operator("Mean", since_version=6)
def mean_6(*data_0):
    """Mean of the inputs, broadcasting from version 8 on; 16-bit floats are added up in float32."""
    total = reduce(xp(*data_0).add, [widen(x) for x in data_0])
    return (total / len(data_0)).astype(data_0[0].dtype)


@operator("Mean", since_version=1)
def mean_1(*data_0, consumed_inputs=None):
    return mean_6(*data_0)


# --- Clip -------------------------------------------------------------------------------------------------------------


@operator("Clip", since_version=11)
def clip_11(input, min=None, max=None, /, *, context: Context):
    """`minimum(max, maximum(input, min))`: where min is above max the result is max. NaN stays NaN.

    A bound that is left out is the largest or smallest finite value: infinities become finite, as in onnxruntime.
    """
    lowest, highest = finite_limits(input.dtype)
    low = lowest if min is None else scalar_input(min, "min", context)
    high = highest if max is None else scalar_input(max, "max", context)
    module = xp(input, low, high)
    result = input
    if min is not None or is_floating(input.dtype):
        result = module.maximum(result, low)
    if max is not None or is_floating(input.dtype):
        result = module.minimum(result, high)
    return result


@operator("Clip", since_version=6)
def clip_6(input, /, *, max=3.4028234663852886e38, min=-3.4028234663852886e38, context: Context):
    """The bounds are attributes, brought into the range of the dtype of `input`."""
    lowest, highest = finite_limits(input.dtype)
    low, high = (np.clip(np.float64(bound), float(lowest), float(highest)) for bound in (min, max))
    return clip_11(input, low.astype(input.dtype), high.astype(input.dtype), context=context)


@operator("Clip", since_version=1)
def clip_1(input, /, *, consumed_inputs=None, max=None, min=None, context: Context):
    bounds = {name: value for name, value in (("max", max), ("min", min)) if value is not None}
    return clip_6(input, **bounds, context=context)
