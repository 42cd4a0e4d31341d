"""com.microsoft: AttnLSTM, an LSTM that looks at a memory after each step and reads what it saw at the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import softmax
from transmuter_async.operators.recurrence import (
    clipper,
    finish,
    gate_functions,
    initial_state,
    project,
    recur,
    row_lengths,
    run,
)
from transmuter_async.operators.registry import operator, xp

MICROSOFT = "com.microsoft"


@operator("AttnLSTM", since_version=1, domain=MICROSOFT, loops=True)
def attn_lstm_1(
    X: Any,
    W: Any,
    R: Any,
    B: Any = None,
    sequence_lens: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    P: Any = None,
    QW: Any = None,
    MW: Any = None,
    V: Any = None,
    M: Any = None,
    memory_seq_lens: Any = None,
    AW: Any = None,
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
    """LSTM over `concat(X, what was attended to)`, with Bahdanau's additive attention to the memory M.

    W is `(directions, 4 * hidden, inputs + attention)`, M `(batch, steps, depth)` of which the first `memory_seq_lens`
    steps count. What is attended to is the memory's weighted sum, or with AW a layer over it and the hidden state.
    """
    if QW is None or MW is None or V is None or M is None:
        raise ValueError("QW, MW, V and M, the attention mechanism, have to be given")
    known = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
    if direction not in known:
        raise ValueError(f"direction {direction!r} is none of forward, reverse, bidirectional")
    backwards = known[direction]
    m = xp(X, W, R, M, QW, MW, V)
    directions, hidden = len(backwards), R.shape[2]
    time, batch, width = X.shape
    lengths, order = row_lengths(sequence_lens, time, batch, context)
    bias = None if B is None else B[:, : 4 * hidden] + B[:, 4 * hidden :]
    inputs = project(X, W[:, :, :width], bias, backwards, order, context)
    from_seen, from_state = m.swapaxes(W[:, :, width:], 1, 2), m.swapaxes(R, 1, 2)
    steps = M.shape[1]
    live = m.ones((batch, steps), bool)
    if memory_seq_lens is not None:
        live = np.arange(steps, dtype=memory_seq_lens.dtype) < memory_seq_lens[:, None]
    memory = m.where(live[..., None], M, m.zeros_like(M))
    keys = m.matmul(memory, MW[:, None])  # directions, batch, steps, size
    names = ("Sigmoid", "Tanh", "Tanh")
    gate, candidate, output = gate_functions(activations, activation_alpha, activation_beta, names, directions)
    bound = clipper(clip)
    peep = None if P is None else [P[:, None, i * hidden : (i + 1) * hidden] for i in range(3)]

    def attend(h: Any) -> Any:
        query = recur(h, QW)[:, :, None]
        scores = (xp(keys, h).tanh(keys + query) * V[:, None, None]).sum(-1)
        weights = softmax(xp(scores, live).where(live, scores, scores.dtype.type(-np.inf)))
        seen = xp(weights, memory).einsum("dbs,bsm->dbm", weights, memory)
        return seen if AW is None else recur(xp(h, seen).concatenate([h, seen], axis=-1), AW)

    def step(now: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        h, c, seen = states
        total = now + recur(h, from_state) + recur(seen, from_seen)
        i, o, f, g = (total[..., n * hidden : (n + 1) * hidden] for n in range(4))
        i = gate(bound(i if peep is None else i + peep[0] * c))
        f = 1 - i if input_forget else gate(bound(f if peep is None else f + peep[2] * c))
        new = f * c + i * candidate(bound(g))
        o = gate(bound(o if peep is None else o + peep[1] * new))
        state = o * output(new)
        return state, new, attend(state)

    start = [initial_state(s, directions, batch, hidden, 0, inputs) for s in (initial_h, initial_c)]
    start.append(m.zeros((directions, batch, from_seen.shape[1]), inputs.dtype))
    Y, states = run(inputs, tuple(start), step, lengths, backwards, order)
    Y, Y_h, Y_c = finish(Y, states[:2], 0, X.dtype)
    return Y, Y_h, Y_c
