"""RNN, GRU and LSTM against onnxruntime, in both forms."""

from __future__ import annotations

import numpy as np
import pytest

from tests.operators.gradients import check_gradient
from tests.operators.oracle import compare, host_outputs

TIME, BATCH, SIZE, HIDDEN = 7, 3, 4, 5
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS = {"RNN": 1, "GRU": 2, "LSTM": 3}


def operands(op, directions, *, lengths=(4, 1, 3), dtype=np.float32, peepholes=True):
    rng = np.random.default_rng(0)

    def random(*shape):
        return (rng.standard_normal(shape) * 0.5).astype(dtype)

    width = GATES[op] * HIDDEN
    found = [random(TIME, BATCH, SIZE), random(directions, width, SIZE), random(directions, width, HIDDEN),
             random(directions, 2 * width), None if lengths is None else np.array(lengths, np.int32),
             random(directions, BATCH, HIDDEN)]  # fmt: skip
    if op == "LSTM":
        found += [random(directions, BATCH, HIDDEN), random(directions, 3 * HIDDEN) if peepholes else None]
    return found


def check(op, direction, inputs, **attributes):
    compare(op, inputs, {"hidden_size": HIDDEN, "direction": direction, **attributes}, domain="", opset=14,
            outputs=3 if op == "LSTM" else 2, rtol=2e-5, atol=2e-5)  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", list(GATES))
def test_directions_and_lengths(op, direction):
    """Zeros past each row's length, the states at its own last step; a row of length 0 gives zeros."""
    directions = 2 if direction == "bidirectional" else 1
    for lengths in ((4, 1, 3), None, (0, 7, 3), (7, 7, 7)):
        check(op, direction, operands(op, directions, lengths=lengths))


@pytest.mark.parametrize("op", ["RNN", "GRU"])
def test_clip(op):
    check(op, "bidirectional", operands(op, 2), clip=0.3)


def test_clip_bounds_the_input_of_every_activation():
    """The text's meaning, also for h (onnxruntime leaves that one out). The cell that goes on is not clipped."""
    x, w, r, b, _, h, c, p = operands("LSTM", 1, lengths=None)
    limit = 0.2

    def sigmoid(v):
        return 1 / (1 + np.exp(-np.clip(v, -limit, limit)))

    state, cell = h[0].astype(np.float64), c[0].astype(np.float64)
    pi, po, pf = np.split(p[0], 3)
    for step in x:
        i, o, f, g = np.split(step @ w[0].T + state @ r[0].T + b[0, : 4 * HIDDEN] + b[0, 4 * HIDDEN :], 4, axis=1)
        new = sigmoid(f + pf * cell) * cell + sigmoid(i + pi * cell) * np.tanh(np.clip(g, -limit, limit))
        state, cell = sigmoid(o + po * new) * np.tanh(np.clip(new, -limit, limit)), new
    expected = [np.asarray(v, np.float32)[None] for v in (state, cell)]
    inputs, attributes = [x, w, r, b, None, h, c, p], {"clip": limit}
    for outputs in (host_outputs("LSTM", inputs, attributes, domain="", opset=14, outputs=3),):
        np.testing.assert_allclose(outputs[1], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs[2], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_attributes_of_one_kind(direction):
    directions = 2 if direction == "bidirectional" else 1
    check("GRU", direction, operands("GRU", directions), linear_before_reset=1)
    check("LSTM", direction, operands("LSTM", directions), input_forget=1)
    check("LSTM", direction, operands("LSTM", directions, peepholes=False))


@pytest.mark.parametrize("op", list(GATES))
@pytest.mark.parametrize(
    ("names", "alpha", "beta"),
    [(["LeakyRelu", "HardSigmoid", "Elu"], [0.3, 0.25, 0.7], [0.4]), (["Softsign", "Softplus", "Relu"], None, None),
     (["HardSigmoid", "ScaledTanh", "ThresholdedRelu"], [0.3, 0.7, 0.1], [0.4, 0.9]), (["Sigmoid", "Affine", "Tanh"], [0.5], [0.1])],
)  # fmt: skip
def test_activations_and_their_parameters(op, names, alpha, beta):
    """Alpha and beta go to the functions that take one, in order."""
    takes_alpha = {"LeakyRelu", "HardSigmoid", "Elu", "ScaledTanh", "ThresholdedRelu", "Affine"}
    takes_beta = {"HardSigmoid", "ScaledTanh", "Affine"}
    used = names[: FUNCTIONS[op]]
    attributes = {"activations": used}
    if alpha and (count := sum(n in takes_alpha for n in used)):
        attributes["activation_alpha"] = alpha[:count]
    if beta and (count := sum(n in takes_beta for n in used)):
        attributes["activation_beta"] = beta[:count]
    check(op, "forward", operands(op, 1), **attributes)


def test_each_direction_may_have_its_own_activations():
    check("RNN", "bidirectional", operands("RNN", 2), activations=["Relu", "Tanh"])
    check("GRU", "bidirectional", operands("GRU", 2), activations=["Sigmoid", "Tanh", "HardSigmoid", "Softsign"])


def test_a_scaled_tanh_without_its_scales_is_refused():
    with pytest.raises(ValueError, match="ScaledTanh has no default"):
        host_outputs("RNN", operands("RNN", 1), {"activations": ("ScaledTanh",)}, domain="", opset=14, outputs=2)


@pytest.mark.parametrize("op", list(GATES))
def test_layout_one_is_batch_first(op):
    inputs = operands(op, 2)
    outputs = 3 if op == "LSTM" else 2
    run = {"direction": "bidirectional"}
    y, *states = host_outputs(op, inputs, run, domain="", opset=14, outputs=outputs)
    turned = list(inputs)
    turned[0] = inputs[0].swapaxes(0, 1)
    for k in (5, 6):
        if k < len(inputs):
            turned[k] = inputs[k].swapaxes(0, 1)
    compare(op, turned, {**run, "layout": 1}, domain="", opset=14, outputs=outputs, rtol=1e-5, atol=1e-6,
            expected=[y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in states)])  # fmt: skip


@pytest.mark.parametrize(("time", "batch"), [(0, 2), (3, 0)])
def test_nothing_in_nothing_out(time, batch):
    inputs = operands("LSTM", 1, lengths=None)
    inputs[0] = np.zeros((time, batch, SIZE), np.float32)
    inputs[5] = inputs[6] = np.ones((1, batch, HIDDEN), np.float32)
    results = host_outputs("LSTM", inputs, {}, domain="", opset=14, outputs=3)
    assert [r.shape for r in results] == [(time, 1, batch, HIDDEN), (1, batch, HIDDEN), (1, batch, HIDDEN)]
    if time == 0:
        np.testing.assert_array_equal(results[1], 1)
    compare("LSTM", inputs, domain="", opset=14, outputs=3, expected=results)


@pytest.mark.parametrize("op", list(GATES))
def test_gradients(op):
    inputs = operands(op, 2, dtype=np.float64)
    check_gradient(op, inputs, {"direction": "bidirectional"}, outputs=3 if op == "LSTM" else 2)
