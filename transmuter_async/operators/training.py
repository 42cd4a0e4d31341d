"""The domain ai.onnx.preview.training: steps of optimisers, and Gradient.

The variadic input of an optimiser holds groups of equal length: all tensors, all gradients, then the accumulators.
Gradient differentiates the graph before it: its context gives it that part of the graph as a function.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.registry import is_host, operator, xp
from transmuter_async.operators.xla import compile_program

TRAINING = "ai.onnx.preview.training"


def _groups(inputs: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], ...]:
    if not inputs or len(inputs) % count:
        raise ValueError(f"{len(inputs)} inputs do not fall into {count} groups of equal length")
    size = len(inputs) // count
    return tuple(inputs[part * size : (part + 1) * size] for part in range(count))


def _number(value: float, like: Any) -> Any:
    return np.asarray(value, like.dtype)


@operator("Adagrad", since_version=1, domain=TRAINING)
def adagrad_1(
    R: Any,
    T: Any,
    /,
    *inputs: Any,
    decay_factor: float = 0.0,
    epsilon: float = 9.999999974752427e-07,
    norm_coefficient: float = 0.0,
) -> tuple[Any, ...]:
    """Tensors, gradients, squared gradients to the new tensors and squared gradients."""
    tensors, squares = [], []
    for x, g, h in zip(*_groups(inputs, 3), strict=True):
        m = xp(R, T, x, g, h)
        rate = R.astype(x.dtype) / (1 + T.astype(x.dtype) * _number(decay_factor, x))
        regular = _number(norm_coefficient, x) * x + g
        square = h + regular * regular
        tensors.append(m.asarray(x - rate * regular / (m.sqrt(square) + _number(epsilon, x))))
        squares.append(m.asarray(square))
    return (*tensors, *squares)


@operator("Adam", since_version=1, domain=TRAINING)
def adam_1(
    R: Any,
    T: Any,
    /,
    *inputs: Any,
    alpha: float = 0.8999999761581421,
    beta: float = 0.9990000128746033,
    epsilon: float = 9.999999974752427e-07,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Any, ...]:
    """Tensors, gradients, their averages and those of their squares to the new tensors and averages."""
    tensors, averages, squares = [], [], []
    for x, g, v, h in zip(*_groups(inputs, 4), strict=True):
        m = xp(R, T, x, g, v, h)
        a, b, rate, step = _number(alpha, x), _number(beta, x), R.astype(x.dtype), T.astype(x.dtype)
        regular = _number(norm_coefficient, x) * x + g
        average = a * v + (1 - a) * regular
        square = b * h + (1 - b) * regular * regular
        # At step 0 nothing is corrected; the division is kept from meeting it.
        later = m.where(T > 0, step, m.ones_like(step))
        corrected = m.where(T > 0, rate * m.sqrt(1 - b**later) / (1 - a**later), rate)
        new = x - corrected * average / (m.sqrt(square) + _number(epsilon, x))
        tensors.append(m.asarray((1 - _number(norm_coefficient_post, x)) * new))
        averages.append(m.asarray(average))
        squares.append(m.asarray(square))
    return (*tensors, *averages, *squares)


@operator("Momentum", since_version=1, domain=TRAINING)
def momentum_1(
    R: Any, T: Any, /, *inputs: Any, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple[Any, ...]:
    """Tensors, gradients, momenta to the new tensors and momenta; `mode` is "standard" or "nesterov"."""
    if mode not in ("standard", "nesterov"):
        raise ValueError(f"mode {mode!r} is neither 'standard' nor 'nesterov'")
    tensors, momenta = [], []
    for x, g, v in zip(*_groups(inputs, 3), strict=True):
        m = xp(R, T, x, g, v)
        regular = _number(norm_coefficient, x) * x + g
        damping = m.where(T > 0, _number(beta, x), _number(1, x))
        momentum = _number(alpha, x) * v + damping * regular
        step = momentum if mode == "standard" else regular + _number(alpha, x) * momentum
        tensors.append(m.asarray(x - R.astype(x.dtype) * step))
        momenta.append(m.asarray(momentum))
    return (*tensors, *momenta)


@operator("Gradient", since_version=1, domain=TRAINING)
def gradient_1(*Inputs: Any, xs: tuple[str, ...], y: str, zs: tuple[str, ...] | None = None, context: Context) -> Any:
    """The derivatives of tensor `y` by the tensors `xs`, at the values given for them and for `zs`.

    By JAX's reverse mode through the nodes between; a `y` of several elements is summed first, as the standard says.
    The host form has no autodiff of its own: there it is one jitted function. Gradient-1.
    """
    names = (*xs, *(zs or ()))
    if len(Inputs) != len(names):
        raise ValueError(f"{len(Inputs)} inputs are given for the {len(names)} tensors of xs and zs")
    function = context.function(names, y)
    free, fixed = Inputs[: len(xs)], Inputs[len(xs) :]

    def derivatives(*values: Any) -> tuple[Any, ...]:
        result, pull = jax.vjp(lambda *moving: function(*moving, *fixed), *values)
        return tuple(pull(jnp.ones_like(result)))

    if is_host(*Inputs):
        program = compile_program(jax.jit(derivatives).lower(*free), "cpu")
        return tuple(np.asarray(value) for value in program(*free))
    return derivatives(*map(jnp.asarray, free))
