"""com.microsoft's stateful layers and n-gram hashes against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operators.cases import EXACT, Case, Draw, Tolerance, check, examples, few_examples
from tests.operators.oracle import host_outputs

TOLERANCE = Tolerance(1e-3, 5e-5, "float32 recurrences in another order")
EXACTLY = frozenset({"NGramHashMapping", "VarlenNGramHashMapping"})
RULES = ("linear", "gated", "delta", "gated_delta")
CASES: dict[str, Callable[[Draw], Case]] = {}


def case(function: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
    CASES[function.__name__] = function
    return function


@case
def LinearAttention(d: Draw) -> Case:
    batch, length, rule = d.size(1, 2), d.size(1, 5), d.pick(RULES)
    queries, keys, stored = d.pick(((2, 2, 2), (4, 2, 2), (2, 4, 4), (2, 4, 2), (1, 1, 1)))
    size, width = d.size(1, 4), d.size(1, 4)
    decay = beta = None
    if rule.startswith("gated"):
        decay = -np.abs(d.floats(batch, length, keys * d.pick((1, size))))
    if rule.endswith("delta"):
        beta = d.positive(batch, length, keys)
    inputs = [
        d.floats(batch, length, queries * size),
        d.floats(batch, length, stored * size, scale=0.3),
        d.floats(batch, length, keys * width),
        d.floats(batch, keys, size, width) if d.flag() else None,
        decay,
        beta,
    ]
    attributes = {"q_num_heads": queries, "kv_num_heads": keys, "update_rule": rule, "scale": d.pick((0.0, 0.5))}
    return Case(inputs, attributes, outputs=2)


@case
def LinearAttentionGate(d: Draw) -> Case:
    heads = d.size(1, 4)
    shape = (d.size(1, 2), d.size(1, 4), heads)
    return Case([d.floats(*shape), d.floats(heads), d.floats(heads), d.floats(*shape)], outputs=2)


@case
def GatedDeltaNet(d: Draw) -> Case:
    heads = d.size(1, 2)
    values, size, width, rule = heads * d.size(1, 2), d.size(1, 4), d.size(1, 4), d.pick(RULES)
    lengths = [d.size(1, 4) for _ in range(2)]
    ragged = d.flag()
    if not ragged:
        lengths[1] = lengths[0]
    tokens = sum(lengths)
    gate, wide = d.pick(("none", "softplus", "sigmoid")), d.flag()
    per = (values, size) if wide else (values,)
    decay = beta = None
    if rule.startswith("gated"):
        decay = d.floats(tokens, *per)
        decay = -np.abs(decay) if gate == "none" else decay
    activation = d.pick(("none", "sigmoid"))
    if rule.endswith("delta"):
        beta = d.floats(tokens, values) if activation == "sigmoid" else d.positive(tokens, values)
    capacity = d.pick((0, 2))
    q: Any = d.floats(tokens, heads, size)
    k: Any = d.floats(tokens, heads, size, scale=0.5)
    v: Any = d.floats(tokens, values, width)
    packed = d.flag()
    if packed:
        q, k, v = np.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], axis=1), None, None
    inputs = [
        q,
        k,
        v,
        np.asarray([0, lengths[0], tokens], np.int32) if ragged else None,
        decay,
        beta,
        d.floats(2, values, width, size),
        d.floats(values) if decay is not None and gate != "none" else None,
        d.floats(*per) if decay is not None and gate != "none" else None,
        (counts := d.integers(0, 4, 2, dtype=np.int32)) if capacity else None,
    ]
    attributes = {
        "update_rule": rule,
        "gate_activation": gate if decay is not None else "none",
        "beta_activation": activation if beta is not None else "none",
        "qk_l2_norm": int(d.flag()),
        "state_update_capacity": capacity,
    }
    decays = values * (size if wide and decay is not None else 1)

    def view(value: Any, index: int) -> Any:
        """Of the captured transitions those that a consumer may read. Without a decay its factors are not defined."""
        if index != 2:
            return value
        parts = []
        for b in range(2):
            count = min(int(counts[b]), capacity, lengths[b])
            rest = value[b]
            for name, each in (("decay", decays), ("key", heads * size), ("delta", values * width)):
                rows, rest = rest[: capacity * each].reshape(capacity, each), rest[capacity * each :]
                if name != "decay" or decay is not None:
                    parts.append(rows[:count].reshape(-1))
        return np.concatenate(parts)

    return Case(inputs, attributes, outputs=3 if capacity else 2, view=view)


def _convolution(d: Draw) -> tuple[dict[str, Any], int, int]:
    taps, dilation = d.size(1, 4), d.size(1, 2)
    return {"activation": d.pick(("none", "silu", "swish")), "dilation": dilation}, taps, (taps - 1) * dilation


@case
def CausalConvWithState(d: Draw) -> Case:
    attributes, taps, kept = _convolution(d)
    batch, length, last = d.size(1, 2), d.size(1, 5), d.flag()
    inner = (2, d.size(1, 2)) if last else (d.size(1, 3),)
    channels = int(np.prod(inner))
    shape = (batch, length, *inner) if last else (batch, channels, length)
    state = (batch, kept, *inner) if last else (batch, channels, kept)
    inputs = [
        d.floats(*shape),
        d.floats(channels, 1, taps),
        d.floats(channels) if d.flag() else None,
        d.floats(*state) if d.flag() else None,
    ]
    return Case(inputs, attributes | {"channels_last": int(last)}, outputs=2)


@case
def VarlenCausalConvWithState(d: Draw) -> Case:
    attributes, taps, kept = _convolution(d)
    ends = np.cumsum([0, *(d.size(1, 4) for _ in range(d.size(1, 3)))]).astype(np.int32)
    requests, channels, capacity = len(ends) - 1, d.size(1, 3), d.pick((0, 2))
    inputs = [
        d.floats(int(ends[-1]), channels),
        d.floats(channels, 1, taps),
        ends,
        d.floats(channels) if d.flag() else None,
        d.floats(requests, channels, kept),
        d.integers(0, 4, requests, dtype=np.int32) if capacity else None,
    ]
    return Case(inputs, attributes | {"state_update_capacity": capacity}, outputs=3 if capacity else 2)


@case
def GatedRMSNorm(d: Draw) -> Case:
    size = d.size(1, 4)
    shape = (*d.shape(2, low=1), size * d.size(1, 3))
    return Case(
        [d.floats(*shape), d.floats(size), d.floats(*shape)], {"activation": d.pick(("silu", "swish", "sigmoid"))}
    )


@case
def GatedAdd(d: Draw) -> Case:
    shape = d.shape(3, low=1)
    return Case([d.floats(*shape), d.floats(*shape), d.floats(*shape[:-1], 1)])


@case
def BranchwiseRMSNorm(d: Draw) -> Case:
    lead, branches, size = d.shape(d.size(1, 2), low=1), d.size(1, 3), d.size(1, 4)
    flat = d.flag()
    scale = d.pick((None, (branches * size,), (branches, size), (size,)))
    x = d.floats(*lead, *((branches * size,) if flat else (branches, size)))
    return Case([x, None if scale is None else d.floats(*scale)], {"num_branches": branches} if flat else {})


@case
def HyperConnectionPreMix(d: Draw) -> Case:
    lead, branches, size, flat = d.shape(d.size(1, 2), low=1), d.size(2, 3), d.size(2, 4), d.flag()
    mix = d.pick(((branches,), (branches, 1), (branches, size)))
    x = d.floats(*lead, *((branches * size,) if flat else (branches, size)))
    return Case([x, d.floats(*lead, *mix)], {"reduction_scale": 0.5} | ({"num_branches": branches} if flat else {}))


@case
def HyperConnectionPostMix(d: Draw) -> Case:
    lead, branches, size, flat = d.shape(d.size(1, 2), low=1), d.size(2, 3), d.size(2, 4), d.flag()
    mix = d.pick(((branches,), (branches, 1), (branches, size)))
    x = d.floats(*lead, *((branches * size,) if flat else (branches, size)))
    inputs = [
        x,
        d.floats(*lead, size),
        d.floats(*lead, *mix),
        d.floats(*lead, branches, branches) if d.flag() else None,
    ]
    return Case(inputs, {"num_branches": branches} if flat else {})


@case
def EngramGate(d: Draw) -> Case:
    batch, length, count, size = d.size(1, 2), d.size(1, 3), d.size(1, 3), d.size(1, 4)
    inputs = [d.floats(batch, length, count, size) for _ in range(2)] + [d.floats(batch, length, size)]
    return Case(inputs + [d.floats(count, size) for _ in range(3)], outputs=2)


def _ngram(d: Draw) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray]:
    order, heads, dtype = d.size(2, 4), d.size(1, 2), d.pick((np.int32, np.int64))
    count = (order - 1) * heads
    attributes = {"max_ngram_size": order, "n_head_per_ngram": heads, "pad_id": 1, "reset_on_eos": int(d.flag())}
    return (
        attributes,
        d.integers(-(2**20), 2**20, order, dtype=dtype),
        d.integers(2, 99, count, dtype=dtype),
        d.integers(0, 99, count, dtype=dtype),
    )


@case
def NGramHashMapping(d: Draw) -> Case:
    attributes, multipliers, sizes, offsets = _ngram(d)
    dtype, batch, length, back = multipliers.dtype, d.size(1, 2), d.size(1, 7), attributes["max_ngram_size"] - 1
    inputs = [
        d.integers(0, 5, batch, length, dtype=dtype),
        multipliers,
        sizes,
        d.integers(0, 5, batch, back, dtype=dtype) if d.flag() else None,
        offsets if d.flag() else None,
        np.asarray(2, dtype) if d.flag() else None,
        np.sort(d.integers(0, 3, batch, length), axis=1).astype(np.int32) if d.flag() else None,
    ]
    return Case(inputs, attributes, outputs=2)


@case
def VarlenNGramHashMapping(d: Draw) -> Case:
    attributes, multipliers, sizes, offsets = _ngram(d)
    dtype, back = multipliers.dtype, attributes["max_ngram_size"] - 1
    ends = np.cumsum([0, *(d.size(1, 5) for _ in range(2))]).astype(np.int32)
    past, segments = d.flag(), d.flag()
    capacity = d.pick((0, 3)) if segments else 0
    inputs = [
        d.integers(0, 5, int(ends[-1]), dtype=dtype),
        multipliers,
        sizes,
        ends,
        d.integers(0, 5, 2, back, dtype=dtype) if past else None,
        offsets if d.flag() else None,
        np.asarray(2, dtype) if d.flag() else None,
        np.sort(d.integers(0, 3, int(ends[-1]))).astype(np.int32) if segments else None,
        d.integers(0, 2, 2, back, dtype=np.int32) if segments and past else None,
        d.integers(0, 4, 2, dtype=np.int32) if capacity else None,
    ]
    attributes["state_update_capacity"] = capacity
    return Case(inputs, attributes, outputs=4 if capacity else 3 if segments else 2)


@case
def AttnLSTM(d: Draw) -> Case:
    direction = d.pick(("forward", "reverse", "bidirectional"))
    count = 2 if direction == "bidirectional" else 1
    time, batch, width, hidden = d.size(1, 4), d.size(1, 2), d.size(1, 3), d.size(1, 3)
    steps, depth, size, layer = d.size(1, 4), d.size(1, 3), d.size(1, 3), d.pick((None, 2))
    seen = layer or depth
    inputs = [
        d.floats(time, batch, width),
        d.floats(count, 4 * hidden, width + seen, scale=0.5),
        d.floats(count, 4 * hidden, hidden, scale=0.5),
        d.floats(count, 8 * hidden) if d.flag() else None,
        d.integers(1, time + 1, batch, dtype=np.int32) if d.flag() else None,
        d.floats(count, batch, hidden) if d.flag() else None,
        d.floats(count, batch, hidden) if d.flag() else None,
        d.floats(count, 3 * hidden) if d.flag() else None,
        d.floats(count, hidden, size),
        d.floats(count, depth, size),
        d.floats(count, size),
        d.floats(batch, steps, depth),
        d.integers(1, steps + 1, batch, dtype=np.int32),
        None if layer is None else d.floats(count, depth + hidden, layer),
    ]
    return Case(inputs, {"direction": direction, "hidden_size": hidden}, outputs=3)


def _tolerance(name: str) -> Tolerance:
    return EXACT if name in EXACTLY else TOLERANCE


@pytest.mark.parametrize("name", CASES)
@examples
@given(data=st.data())
def test_equals_onnxruntime(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), _tolerance(name))


@pytest.mark.parametrize("name", CASES)
@few_examples
@given(data=st.data())
def test_program_equals_onnxruntime(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), _tolerance(name), traced=True)


def test_a_window_of_states_is_what_prefixes_leave() -> None:
    """`state_window`, which onnxruntime's CPU kernel has not: slot j is the state after token length - W + j."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 4, n)).astype(np.float32) for n in (4, 4, 6))
    attributes = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"}
    _, states = host_outputs("LinearAttention", [q, k, v], attributes | {"state_window": 6}, outputs=2)
    assert states.shape == (6, 2, 2, 2, 3)
    assert not states[:2].any()
    for length in range(1, 5):
        prefix = [x[:, :length] for x in (q, k, v)]
        _, state = host_outputs("LinearAttention", prefix, attributes, outputs=2)
        np.testing.assert_allclose(states[1 + length], state, rtol=1e-5, atol=1e-6)
    _, window = host_outputs("CausalConvWithState", [q, np.ones((4, 1, 3), np.float32)], {"state_window": 2}, outputs=2)
    np.testing.assert_array_equal(window[1], q[:, :, -2:])
    np.testing.assert_array_equal(window[0], q[:, :, -3:-1])
