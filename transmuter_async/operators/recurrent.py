"""Recurrent layers: RNN, GRU, LSTM. Their loop over time is in `recurrence.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import widen
from transmuter_async.operators.recurrence import (
    clipper,
    finish,
    gate_functions,
    initial_state,
    prepare,
    project,
    recur,
    row_lengths,
    run,
)
from transmuter_async.operators.registry import operator, xp

# --- RNN ----------------------------------------------------------------------------------------------------------------


@operator("RNN", since_version=1, loops=True)
def rnn_1(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] = ("Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    output_sequence: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Until version 7 `output_sequence` tells whether Y is wanted; it is computed either way."""
    return rnn_14(
        X,
        W,
        R,
        B,
        sequence_lens,
        initial_h,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        context=context,
    )


@operator("RNN", since_version=7, loops=True)
def rnn_7(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] = ("Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    context: Context,
) -> tuple[Any, Any]:
    """Until version 14 there is no `layout`."""
    return rnn_14(
        X,
        W,
        R,
        B,
        sequence_lens,
        initial_h,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        context=context,
    )


@operator("RNN", since_version=14, loops=True)
def rnn_14(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] = ("Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """H = f(X W^T + H R^T + Wb + Rb). Y is zero after a row's end, Y_h is the state at its own last step."""
    x, recurrent, backwards, hidden, batch = prepare(X, W, R, direction, layout, 1, context)
    directions = len(backwards)
    lengths, order = row_lengths(sequence_lens, x.shape[0], batch, context)
    bias = None if B is None else widen(B)[:, :hidden] + widen(B)[:, hidden:]
    projected = project(x, W, bias, backwards, order, context)
    (activate,) = gate_functions(activations, activation_alpha, activation_beta, ("Tanh",), directions)
    bound = clipper(clip)

    def step(inputs: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        return (activate(bound(inputs + recur(states[0], recurrent))),)

    start = initial_state(initial_h, directions, batch, hidden, layout, projected)
    Y, states = run(projected, (start,), step, lengths, backwards, order)
    Y, Y_h = finish(Y, states, layout, X.dtype)
    return Y, Y_h


# --- GRU ----------------------------------------------------------------------------------------------------------------


@operator("GRU", since_version=1, loops=True)
def gru_1(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "foward",
    hidden_size: int | None = None,
    output_sequence: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Until version 3 there is no `linear_before_reset`. The default of `direction` is misspelt in the standard."""
    return gru_14(
        X,
        W,
        R,
        B,
        sequence_lens,
        initial_h,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        context=context,
    )


@operator("GRU", since_version=3, loops=True)
def gru_3(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    linear_before_reset: int = 0,
    output_sequence: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Until version 7 `output_sequence` tells whether Y is wanted; it is computed either way."""
    return gru_14(
        X,
        W,
        R,
        B,
        sequence_lens,
        initial_h,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        linear_before_reset=linear_before_reset,
        context=context,
    )


@operator("GRU", since_version=7, loops=True)
def gru_7(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    linear_before_reset: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Until version 14 there is no `layout`."""
    return gru_14(
        X,
        W,
        R,
        B,
        sequence_lens,
        initial_h,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        linear_before_reset=linear_before_reset,
        context=context,
    )


@operator("GRU", since_version=14, loops=True)
def gru_14(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Gates in the order z, r, h. Y is zero after a row's end, Y_h is the state at its own last step."""
    x, recurrent, backwards, hidden, batch = prepare(X, W, R, direction, layout, 3, context)
    directions = len(backwards)
    lengths, order = row_lengths(sequence_lens, x.shape[0], batch, context)
    m = xp(x, W, B)
    bias, inner = None, None
    if B is not None:
        wide = widen(B)
        outer, recurring = wide[:, : 3 * hidden], wide[:, 3 * hidden :]
        if linear_before_reset:
            inner = recurring[:, None, 2 * hidden :]
            recurring = m.concatenate([recurring[:, : 2 * hidden], m.zeros_like(recurring[:, 2 * hidden :])], axis=1)
        bias = outer + recurring
    projected = project(x, W, bias, backwards, order, context)
    gate, candidate = gate_functions(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), directions)
    bound = clipper(clip)
    recurrent_gates, recurrent_hidden = recurrent[:, :, : 2 * hidden], recurrent[:, :, 2 * hidden :]

    def step(inputs: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        h = states[0]
        if linear_before_reset:
            both = recur(h, recurrent)
            zr = gate(bound(inputs[..., : 2 * hidden] + both[..., : 2 * hidden]))
            linear = both[..., 2 * hidden :] if inner is None else both[..., 2 * hidden :] + inner
            new = candidate(bound(inputs[..., 2 * hidden :] + zr[..., hidden:] * linear))
        else:
            zr = gate(bound(inputs[..., : 2 * hidden] + recur(h, recurrent_gates)))
            new = candidate(bound(inputs[..., 2 * hidden :] + recur(zr[..., hidden:] * h, recurrent_hidden)))
        z = zr[..., :hidden]
        return (new + z * (h - new),)

    start = initial_state(initial_h, directions, batch, hidden, layout, projected)
    Y, states = run(projected, (start,), step, lengths, backwards, order)
    Y, Y_h = finish(Y, states, layout, X.dtype)
    return Y, Y_h


# --- LSTM ---------------------------------------------------------------------------------------------------------------


@operator("LSTM", since_version=1, loops=True)
def lstm_1(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    P: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    output_sequence: int = 0,
    context: Context,
) -> tuple[Any, Any, Any]:
    """Until version 7 `output_sequence` tells whether Y is wanted; it is computed either way."""
    return lstm_14(
        X,
        W,
        R,
        B,
        sequence_lens,
        initial_h,
        initial_c,
        P,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        input_forget=input_forget,
        context=context,
    )


@operator("LSTM", since_version=7, loops=True)
def lstm_7(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    P: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    context: Context,
) -> tuple[Any, Any, Any]:
    """Until version 14 there is no `layout`."""
    return lstm_14(
        X,
        W,
        R,
        B,
        sequence_lens,
        initial_h,
        initial_c,
        P,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        input_forget=input_forget,
        context=context,
    )


@operator("LSTM", since_version=14, loops=True)
def lstm_14(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    P: Any = None,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    context: Context,
) -> tuple[Any, Any, Any]:
    """Gates in the order i, o, f, c; peepholes P in the order i, o, f, the output gate's on the new cell.

    `clip` bounds the input of every activation, so also of h (onnxruntime leaves that one out); the cell that is
    carried on is not clipped. With `input_forget` the forget gate is 1 - i. Y is zero after a row's end, Y_h and Y_c are the states at its own last
    step.
    """
    x, recurrent, backwards, hidden, batch = prepare(X, W, R, direction, layout, 4, context)
    directions = len(backwards)
    lengths, order = row_lengths(sequence_lens, x.shape[0], batch, context)
    bias = None if B is None else widen(B)[:, : 4 * hidden] + widen(B)[:, 4 * hidden :]
    projected = project(x, W, bias, backwards, order, context)
    names = ("Sigmoid", "Tanh", "Tanh")
    gate, candidate, output = gate_functions(activations, activation_alpha, activation_beta, names, directions)
    bound = clipper(clip)
    peep: list[Any] = [None] * 3
    if P is not None:
        peep = [widen(P)[:, None, i * hidden : (i + 1) * hidden] for i in range(3)]

    def step(inputs: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        h, c = states
        total = inputs + recur(h, recurrent)
        if P is None:
            # One call for the three gates: three small ones cost more than their arithmetic.
            iof = gate(bound(total[..., : 3 * hidden]))
            i, o, f = (iof[..., n * hidden : (n + 1) * hidden] for n in range(3))
        else:
            i = gate(bound(total[..., :hidden] + peep[0] * c))
            f = gate(bound(total[..., 2 * hidden : 3 * hidden] + peep[2] * c))
            o = None
        if input_forget:
            f = 1 - i
        new = f * c + i * candidate(bound(total[..., 3 * hidden :]))
        if o is None:
            o = gate(bound(total[..., hidden : 2 * hidden] + peep[1] * new))
        return o * output(bound(new)), new

    start = tuple(initial_state(s, directions, batch, hidden, layout, projected) for s in (initial_h, initial_c))
    Y, states = run(projected, start, step, lengths, backwards, order)
    Y, Y_h, Y_c = finish(Y, states, layout, X.dtype)
    return Y, Y_h, Y_c
