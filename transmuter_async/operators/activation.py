"""Activations of one element, and Softmax with its kin.

16-bit and narrower floats are computed in float32 and cast once at the end. Branches that exp would overflow in are cut off
before it, so that gradients stay finite.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import lax
from scipy import special

from transmuter_async.operators.arguments import is_floating, normalize_axis
from transmuter_async.operators.context import Context
from transmuter_async.operators.elementwise import erf
from transmuter_async.operators.numeric import first_highest, widen
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.rows import row_extreme, row_sum

# --- linear pieces ----------------------------------------------------------------------------------------------------


@operator("Relu", since_version=6)
def relu_6(X, /):
    """max(0, x), with gradient 0 at 0; NaN stays NaN. Integers since version 14."""
    return np.maximum(X, np.zeros((), X.dtype)) if is_host(X) else jax.nn.relu(X)


@operator("Relu", since_version=1)
def relu_1(X, /, *, consumed_inputs=None):
    return relu_6(X)


@operator("LeakyRelu", since_version=6)
def leaky_relu_6(X, /, *, alpha=0.009999999776482582):
    """x, scaled by `alpha` below zero."""
    x = widen(X)
    return xp(X).where(x < 0, x * _as(alpha, x), x).astype(X.dtype)


@operator("LeakyRelu", since_version=1)
def leaky_relu_1(X, /, *, alpha=0.009999999776482582, consumed_inputs=None):
    return leaky_relu_6(X, alpha=alpha)


@operator("PRelu", since_version=7)
def p_relu_7(X, slope, /):
    """x, multiplied by `slope` below zero; `slope` broadcasts to the shape of X as numpy does."""
    return xp(X, slope).where(X < 0, X * slope, X)


@operator("PRelu", since_version=6)
def p_relu_6(X, slope, /):
    """Until version 7 a `slope` has one element, or one for each channel (axis 1)."""
    if slope.size == 1:
        slope = slope.reshape(())
    elif slope.ndim == 1 and X.ndim > 1:
        slope = slope.reshape(-1, *(1 for _ in X.shape[2:]))
    return p_relu_7(X, slope)


@operator("PRelu", since_version=1)
def p_relu_1(X, slope, /, *, consumed_inputs=None):
    return p_relu_6(X, slope)


@operator("ThresholdedRelu", since_version=10)
def thresholded_relu_10(X, /, *, alpha=1.0):
    """X above `alpha`, else 0."""
    module, x = xp(X), widen(X)
    return module.where(x > _as(alpha, x), x, module.zeros_like(x)).astype(X.dtype)


@operator("HardSigmoid", since_version=6)
def hard_sigmoid_6(X, /, *, alpha=0.20000000298023224, beta=0.5):
    """max(0, min(1, alpha * x + beta))."""
    return _hard_sigmoid(widen(X), alpha, beta).astype(X.dtype)


@operator("HardSigmoid", since_version=1)
def hard_sigmoid_1(X, /, *, alpha=0.20000000298023224, beta=0.5, consumed_inputs=None):
    return hard_sigmoid_6(X, alpha=alpha, beta=beta)


@operator("HardSwish", since_version=14)
def hard_swish_14(X, /):
    """X * max(0, min(1, x / 6 + 0.5))."""
    x = widen(X)
    return (x * _hard_sigmoid(x, 1 / 6, 0.5)).astype(X.dtype)


@operator("Shrink", since_version=9)
def shrink_9(input, /, *, bias=0.0, lambd=0.5):
    """X + bias below -lambd, x - bias above lambd, 0 between. Integers are shifted exactly by a whole bias."""
    module = xp(input)
    x = widen(input)
    if not is_floating(input.dtype) and not float(bias).is_integer():
        x = input.astype(np.float64)
    shift = _as(bias, x)
    # Bounds of integers are compared as floats: -lambd has no unsigned form.
    bounded = x if is_floating(x.dtype) else x.astype(np.float64)
    shrunk = module.where(bounded > _as(lambd, bounded), x - shift, module.zeros_like(x))
    return module.where(bounded < _as(-lambd, bounded), x + shift, shrunk).astype(input.dtype)


def _as(number: float, like: Any) -> np.ndarray:
    """A Python number in the dtype of an array, so that it never widens the array."""
    return np.asarray(number, like.dtype)


def _hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    module = xp(x)
    return module.maximum(_as(0, x), module.minimum(_as(1, x), x * _as(alpha, x) + _as(beta, x)))


# --- exponentials -----------------------------------------------------------------------------------------------------


def _sigmoid(x: Any) -> Any:
    return special.expit(x) if is_host(x) else lax.logistic(x)


def _softplus(x: Any) -> Any:
    if is_host(x):
        return np.maximum(x, _as(0, x)) + np.log1p(np.exp(-abs(x)))
    return jax.nn.softplus(x)


def _expm1_below_zero(x: Any) -> Any:
    module = xp(x)
    return module.expm1(module.minimum(x, _as(0, x)))


@operator("Sigmoid", since_version=6)
def sigmoid_6(X, /):
    """1 / (1 + exp(-x))."""
    return _sigmoid(widen(X)).astype(X.dtype)


@operator("Sigmoid", since_version=1)
def sigmoid_1(X, /, *, consumed_inputs=None):
    return sigmoid_6(X)


@operator("Elu", since_version=6)
def elu_6(X, /, *, alpha=1.0):
    """x, and alpha * (exp(x) - 1) below zero."""
    x = widen(X)
    return xp(X).where(x < 0, _as(alpha, x) * _expm1_below_zero(x), x).astype(X.dtype)


@operator("Elu", since_version=1)
def elu_1(X, /, *, alpha=1.0, consumed_inputs=None):
    return elu_6(X, alpha=alpha)


@operator("Celu", since_version=12)
def celu_12(X, /, *, alpha=1.0):
    """max(0, x) + min(0, alpha * (exp(x / alpha) - 1)). Other dtypes than float32 since version 28."""
    module, x = xp(X), widen(X)
    low = module.minimum(x, _as(0, x))
    return module.where(x < 0, _as(alpha, x) * module.expm1(low / _as(alpha, x)), x).astype(X.dtype)


@operator("Selu", since_version=6)
def selu_6(X, /, *, alpha=1.6732631921768188, gamma=1.0507010221481323):
    """Gamma * x, and gamma * alpha * (exp(x) - 1) at and below zero."""
    x = widen(X)
    branch = _as(alpha, x) * _expm1_below_zero(x)
    return (_as(gamma, x) * xp(X).where(x <= 0, branch, x)).astype(X.dtype)


@operator("Selu", since_version=1)
def selu_1(X, /, *, alpha=1.673200011253357, consumed_inputs=None, gamma=1.0506999492645264):
    """The defaults were rounded differently in version 1."""
    return selu_6(X, alpha=alpha, gamma=gamma)


@operator("Softplus", since_version=1)
def softplus_1(X, /):
    """log(1 + exp(x)), without overflow."""
    return _softplus(widen(X)).astype(X.dtype)


@operator("Softsign", since_version=1)
def softsign_1(input, /):
    """X / (1 + |x|)."""
    x = widen(input)
    return (x / (_as(1, x) + abs(x))).astype(input.dtype)


@operator("Mish", since_version=18)
def mish_18(X, /):
    """X * tanh(softplus(x))."""
    x = widen(X)
    return (x * xp(X).tanh(_softplus(x))).astype(X.dtype)


@operator("Gelu", since_version=20)
def gelu_20(X, /, *, approximate="none"):
    """X times the normal distribution's cumulative function, exact or (`approximate="tanh"`) through tanh."""
    module, x = xp(X), widen(X)
    half, one = _as(0.5, x), _as(1, x)
    if approximate == "tanh":
        inner = _as(math.sqrt(2 / math.pi), x) * (x + _as(0.044715, x) * (x * x * x))
        return (half * x * (one + module.tanh(inner))).astype(X.dtype)
    if approximate != "none":
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    scaled = x * _as(math.sqrt(0.5), x)
    return (half * x * (one + erf(scaled))).astype(X.dtype)


@operator("Swish", since_version=24)
def swish_24(X, /, *, alpha=1.0):
    """X * sigmoid(alpha * x)."""
    x = widen(X)
    return (x * _sigmoid(x * _as(alpha, x))).astype(X.dtype)


@operator("SwiGLU", since_version=28)
def swi_glu_28(A, B, /, *, alpha=1.0):
    """swish(A) * B; the shapes are equal, there is no broadcasting."""
    if A.shape != B.shape:
        raise ValueError(f"A has shape {tuple(A.shape)} and B {tuple(B.shape)}; SwiGLU does not broadcast")
    a = widen(A)
    return (a * _sigmoid(a * _as(alpha, a)) * widen(B)).astype(A.dtype)


# --- over an axis -----------------------------------------------------------------------------------------------------


def _shifted(x: Any, axis: int, context: Context) -> Any:
    """X less its maximum along the axis, which carries no gradient. An axis of size 0 is fine."""
    lowest = _as(-np.inf, x)
    if axis == x.ndim - 1:
        top = row_extreme(x, context, largest=True, initial=lowest)
    else:
        top = xp(x).max(x, axis=axis, keepdims=True, initial=lowest)
    return x - (top if is_host(x) else lax.stop_gradient(top))


@operator("Softmax", since_version=13)
def softmax_13(input, /, *, axis=-1, context: Context):
    """exp(x) / sum(exp(x)) along the axis; a row of nothing but -inf is NaN, as in onnxruntime."""
    axis = normalize_axis(axis, input.ndim, context)
    if input.dtype == np.float16:
        return _softmax_in_steps(input, axis, context)
    powers = xp(input).exp(_shifted(widen(input), axis, context))
    return (powers / _total(powers, axis, context)).astype(input.dtype)


def _total(powers: Any, axis: int, context: Context) -> Any:
    return row_sum(powers, context) if axis == powers.ndim - 1 else powers.sum(axis=axis, keepdims=True)


def _softmax_in_steps(x, axis, context):
    """Rounded to float16 after each step, as the function body of Softmax-13 says and the suite expects.

    The sum is accumulated in float32; one that float16 cannot hold divides in float32.
    """
    module = xp(x)
    powers = module.exp(_shifted(x, axis, context))
    total = _total(powers.astype(np.float32), axis, context)
    rounded = total.astype(np.float16)
    fine = module.isfinite(rounded)
    wide = (powers.astype(np.float32) / total).astype(np.float16)
    return module.where(fine, powers / module.where(fine, rounded, module.ones_like(rounded)), wide)


@operator("LogSoftmax", since_version=13)
def log_softmax_13(input, /, *, axis=-1, context: Context):
    """Logarithm of Softmax, computed without taking it of a rounded zero."""
    axis = normalize_axis(axis, input.ndim, context)
    module, shifted = xp(input), _shifted(widen(input), axis, context)
    return (shifted - module.log(_total(module.exp(shifted), axis, context))).astype(input.dtype)


@operator("Hardmax", since_version=13)
def hardmax_13(input, /, *, axis=-1, context: Context):
    """1 at the first maximum along the axis, else 0."""
    axis = normalize_axis(axis, input.ndim, context)
    if input.size == 0:
        return xp(input).zeros_like(input)
    first = first_highest(widen(input), axis, keepdims=True)
    places = np.arange(input.shape[axis]).reshape(-1, *(1 for _ in input.shape[axis + 1 :]))
    return (places.astype(first.dtype) == first).astype(input.dtype)


def _as_matrix(x: Any, axis: int, context: Context) -> Any:
    """Before version 13: the axes before `axis` are the rows of a matrix, the rest its columns."""
    # `axis` may be the rank itself there: one column.
    axis = x.ndim if axis == x.ndim else normalize_axis(axis, x.ndim, context)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Softmax", since_version=1)
def softmax_1(input, /, *, axis=1, context: Context):
    """Until version 13 over all axes from `axis` on, together."""
    return softmax_13(_as_matrix(input, axis, context), axis=1, context=context).reshape(input.shape)


@operator("LogSoftmax", since_version=1)
def log_softmax_1(input, /, *, axis=1, context: Context):
    """Until version 13 over all axes from `axis` on, together."""
    return log_softmax_13(_as_matrix(input, axis, context), axis=1, context=context).reshape(input.shape)


@operator("Hardmax", since_version=1)
def hardmax_1(input, /, *, axis=1, context: Context):
    """Until version 13 over all axes from `axis` on, together."""
    return hardmax_13(_as_matrix(input, axis, context), axis=1, context=context).reshape(input.shape)
