"""The loop over time that RNN, GRU and LSTM share, and the activation functions of their gates.

The projection of the inputs is one product before it; both directions of a
bidirectional layer run in the same loop. On the host the loop is Python's, traced it is one `lax.scan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import narrow, sigmoid, widen
from transmuter_async.operators.registry import is_host, xp

__all__ = ["clipper", "finish", "gate_functions", "initial_state", "prepare", "project", "recur", "row_lengths", "run"]

Step = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]
"""From one step's projected input and the states to the new states; the first one is the output."""

Activation = Callable[[Any], Any]


# --- activations --------------------------------------------------------------------------------------------------------

# Defaults of alpha and beta; None where the function does not take one, NaN where it must be given.
_PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "relu": (None, None),
    "tanh": (None, None),
    "sigmoid": (None, None),
    "softsign": (None, None),
    "softplus": (None, None),
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (math.nan, math.nan),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
}


def _apply(name: str, alpha: float | None, beta: float | None, x: Any) -> Any:
    m = xp(x)

    def c(value: float | None) -> Any:
        return m.asarray(0.0 if value is None else value, x.dtype)

    match name:
        case "relu":
            return m.maximum(x, c(0))
        case "tanh":
            return m.tanh(x)
        case "sigmoid":
            return sigmoid(x)
        case "softsign":
            return x / (c(1) + abs(x))
        case "softplus":
            return m.logaddexp(x, c(0))
        case "affine":
            return c(alpha) * x + c(beta)
        case "leakyrelu":
            return m.where(x >= 0, x, c(alpha) * x)
        case "thresholdedrelu":
            return m.where(x >= c(alpha), x, c(0))
        case "scaledtanh":
            return c(alpha) * m.tanh(c(beta) * x)
        case "hardsigmoid":
            return m.clip(c(alpha) * x + c(beta), c(0), c(1))
        case _:
            return m.where(x >= 0, x, c(alpha) * m.expm1(m.minimum(x, c(0))))


def gate_functions(
    names: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    defaults: tuple[str, ...],
    directions: int,
) -> list[Activation]:
    """One function for each gate kind, on values (directions, batch, …).

    The lists go through the directions one after the other; alpha and beta are consumed by the functions that take one,
    in order, and default where the list has ended.
    """
    wanted = tuple(names or defaults * directions)
    if len(wanted) == 2 * len(defaults) and directions == 1:
        wanted = wanted[: len(defaults)]  # the schema's default for RNN names both directions
    if len(wanted) != len(defaults) * directions:
        raise ValueError(
            f"activations {wanted} must name {len(defaults)} functions for each of {directions} directions"
        )
    left = list(alphas or ()), list(betas or ())
    chosen: list[tuple[str, float | None, float | None]] = []
    for name in wanted:
        if name.lower() not in _PARAMETERS:
            raise ValueError(f"activation {name!r} is none of {', '.join(sorted(_PARAMETERS))}")
        pair = list(_PARAMETERS[name.lower()])
        for i in range(2):
            if pair[i] is not None and left[i]:
                pair[i] = left[i].pop(0)
        if name.lower() == "scaledtanh" and any(value is not None and math.isnan(value) for value in pair):
            raise ValueError("ScaledTanh has no default; give it activation_alpha and activation_beta")
        chosen.append((name.lower(), pair[0], pair[1]))
    count = len(defaults)
    result: list[Activation] = []
    for i in range(count):
        each = [chosen[d * count + i] for d in range(directions)]
        result.append(_by_direction(each))
    return result


def _by_direction(each: list[tuple[str, float | None, float | None]]) -> Activation:
    first = each[0]
    if all(other == first for other in each):
        return lambda x: _apply(*first, x)
    return lambda x: xp(x).stack([_apply(*parameters, x[d]) for d, parameters in enumerate(each)])


# --- the loop -----------------------------------------------------------------------------------------------------------


def prepare(
    X: Any, W: Any, R: Any, direction: str, layout: int, gates: int, context: Context
) -> tuple[Any, Any, tuple[int, ...], int, int]:
    """X time-major, R as (directions, hidden, gates * hidden), which directions run backwards, hidden size, batch."""
    if X.ndim != 3 or W.ndim != 3 or R.ndim != 3:
        raise ValueError(f"X, W and R need three dimensions, got shapes {X.shape}, {W.shape}, {R.shape}")
    known = {"forward": (0,), "foward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
    if direction not in known:
        raise ValueError(f"direction {direction!r} is none of forward, reverse, bidirectional")
    backwards = known[direction]
    if layout:
        X = X.swapaxes(0, 1)
    hidden = R.shape[2]
    expected = (len(backwards), gates * hidden, X.shape[2]), (len(backwards), gates * hidden, hidden)
    if (tuple(W.shape), tuple(R.shape)) != expected:
        raise ValueError(f"W {W.shape} and R {R.shape} should have the shapes {expected[0]} and {expected[1]}")
    recurrent = widen(R).swapaxes(1, 2) if is_host(X, R) else context.prepared(R, "gates of state")
    return X, recurrent, backwards, hidden, X.shape[1]


def project(X: Any, W: Any, bias: Any, backwards: tuple[int, ...], order: Any, context: Context) -> Any:
    """The inputs' part of every gate, (time, directions, batch, gates * hidden), in the order of each direction."""
    m = xp(X, W, bias)
    time, batch, size = X.shape
    directions, width = W.shape[:2]
    rows = widen(X).reshape(time * batch, size)
    gates = widen(W).reshape(directions * width, size).T if is_host(X, W) else context.prepared(W, "gates of inputs")
    projected = m.matmul(rows, gates).reshape(time, batch, directions, width)
    if bias is not None:
        projected = projected + bias
    lanes = [_reorder(projected[:, :, d], order) if back else projected[:, :, d] for d, back in enumerate(backwards)]
    return m.stack(lanes, axis=1)


def _reorder(sequence: Any, order: Any) -> Any:
    """`sequence` (time, batch, …) backwards; with `order` (time, batch) only the first steps of each row."""
    if order is None:
        return xp(sequence).flip(sequence, axis=0)
    index = order.reshape(*order.shape, *(1,) * (sequence.ndim - 2))
    if is_host(sequence, order):
        return np.take_along_axis(sequence, index, axis=0)
    return jnp.take_along_axis(jnp.asarray(sequence), jnp.asarray(index), axis=0, mode="clip")


def row_lengths(sequence_lens: Any, time: int, batch: int, context: Context) -> tuple[Any, Any]:
    """(lengths, order): None where all rows are full; else lengths (batch,) and the reversing index (time, batch).

    A length outside of [0, time] raises.
    """
    if sequence_lens is None:
        return None, None
    if tuple(sequence_lens.shape) != (batch,):
        raise ValueError(f"sequence_lens has shape {sequence_lens.shape}, expected ({batch},)")
    m = xp(sequence_lens)
    known = f" {sequence_lens}" if m is np else ""
    context.refuse((sequence_lens < 0) | (sequence_lens > time), f"sequence_lens{known} are outside of [0, {time}]")
    if m is np and (sequence_lens == time).all():
        return None, None
    lengths = m.clip(sequence_lens, 0, time).astype(np.int32)
    steps = m.arange(time, dtype=np.int32)[:, None]
    return lengths, m.where(steps < lengths, lengths - 1 - steps, steps)


def run(
    projected: Any, states: tuple[Any, ...], step: Step, lengths: Any, backwards: tuple[int, ...], order: Any
) -> tuple[Any, tuple[Any, ...]]:
    """All outputs (time, directions, batch, hidden) in the order of X, and the states after each row's last step.

    The states of a row of length 0 are zeros, as onnxruntime has it; the standard does not say.
    """
    m = xp(projected, *states, lengths)

    def advance(inputs: Any, states: tuple[Any, ...], now: Any) -> tuple[tuple[Any, ...], Any]:
        new = step(inputs, states)
        if lengths is None:
            return new, new[0]
        alive = (now < lengths)[None, :, None]
        kept = tuple(m.where(alive, a, b) for a, b in zip(new, states, strict=True))
        return kept, m.where(alive, new[0], m.zeros_like(new[0]))

    time = projected.shape[0]
    if m is np:
        outputs: Any = np.empty((time, *states[0].shape), states[0].dtype)
        with np.errstate(all="ignore"):
            for now in range(time):
                states, outputs[now] = advance(projected[now], states, now)
    elif time == 1:  # a loop of one step costs more than the step
        states, only = advance(jnp.asarray(projected)[0], tuple(states), np.int32(0))
        outputs = only[None]
    else:
        places = jnp.arange(time, dtype=np.int32)
        states, outputs = lax.scan(
            lambda carry, item: advance(item[0], carry, item[1]), tuple(states), (jnp.asarray(projected), places)
        )
    if lengths is not None:
        some = (lengths > 0)[None, :, None]
        states = tuple(m.where(some, state, m.zeros_like(state)) for state in states)
    lanes = [_reorder(outputs[:, d], order) if back else outputs[:, d] for d, back in enumerate(backwards)]
    return m.stack(lanes, axis=1), states


def initial_state(initial: Any, directions: int, batch: int, hidden: int, layout: int, like: Any) -> Any:
    if initial is None:
        return xp(like).zeros((directions, batch, hidden), like.dtype)
    state = widen(initial).swapaxes(0, 1) if layout else widen(initial)
    if tuple(state.shape) != (directions, batch, hidden):
        raise ValueError(f"an initial state has the shape {initial.shape}, expected {(directions, batch, hidden)}")
    return xp(like, state).asarray(state)


def finish(Y: Any, states: Sequence[Any], layout: int, dtype: Any) -> tuple[Any, ...]:
    if layout:
        Y = Y.transpose(2, 0, 1, 3)
        states = [state.swapaxes(0, 1) for state in states]
    return (narrow(Y, dtype), *(narrow(state, dtype) for state in states))


def recur(state: Any, weights: Any) -> Any:
    """(directions, batch, hidden) times (directions, hidden, width); one plain product where there is one direction."""
    if state.shape[0] == 1:
        return xp(state, weights).matmul(state[0], weights[0])[None]
    return xp(state, weights).matmul(state, weights)


def clipper(clip: float | None) -> Activation:
    if not clip:
        return lambda x: x
    limit = float(clip)
    return lambda x: xp(x).clip(x, xp(x).asarray(-limit, x.dtype), xp(x).asarray(limit, x.dtype))
