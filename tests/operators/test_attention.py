"""Attention and its kin against float64, in both forms; the suite's cases cover the outputs' corners."""

from __future__ import annotations

import numpy as np
import pytest

from tests.operators.gradients import check_gradient
from tests.operators.oracle import compare, host_outputs


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def attention(q, k, v, allowed=None, bias=None, cap=0.0):
    """Row by row in float64: the definition, written out."""
    group = q.shape[1] // k.shape[1]
    y = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        scores = k[b, h // group].astype(np.float64) @ q[b, h, i] / np.sqrt(q.shape[3])
        if cap:
            scores = cap * np.tanh(scores / cap)
        if bias is not None:
            scores = scores + np.broadcast_to(bias, (*q.shape[:3], k.shape[2]))[b, h, i]
        keep = (
            np.ones(k.shape[2], bool)
            if allowed is None
            else np.broadcast_to(allowed, (*q.shape[:3], k.shape[2]))[b, h, i]
        )
        if keep.any():
            weights = np.exp(scores[keep] - scores[keep].max())
            y[b, h, i] = weights @ v[b, h // group][keep] / weights.sum()
    return y.astype(np.float32)


def check(inputs, expected, attributes=None, opset=24):
    compare("Attention", inputs, attributes, domain="", opset=opset, rtol=2e-5, atol=2e-5, expected=[expected])


Q, K, V = random(2, 4, 3, 8), random(2, 2, 5, 8, seed=1), random(2, 2, 5, 6, seed=2)


def test_shared_heads_masks_and_softcap():
    check([Q, K, V], attention(Q, K, V))
    mask = np.random.default_rng(3).random((2, 1, 3, 5)) > 0.4
    check([Q, K, V, mask], attention(Q, K, V, allowed=mask))
    bias = random(3, 5, seed=4)
    check([Q, K, V, bias], attention(Q, K, V, bias=bias, cap=2.0), {"softcap": 2.0})
    short = np.random.default_rng(5).random((3, 4)) > 0.3
    check([Q, K, V, short], attention(Q, K, V, allowed=np.pad(short, [(0, 0), (0, 1)])))


def test_packed_heads():
    q, k, v = (x.swapaxes(1, 2).reshape(2, x.shape[2], -1) for x in (Q, K, V))
    expected = attention(Q, K, V).swapaxes(1, 2).reshape(2, 3, -1)
    check([q, k, v], expected, {"q_num_heads": 4, "kv_num_heads": 2})


def test_causal_counts_from_the_past():
    past_k, past_v = random(2, 2, 4, 8, seed=6), random(2, 2, 4, 6, seed=7)
    k, v = K[:, :, :3], V[:, :, :3]
    all_k, all_v = np.concatenate([past_k, k], 2), np.concatenate([past_v, v], 2)
    allowed = np.arange(7) <= np.arange(3)[:, None] + 4
    results = host_outputs(
        "Attention", [Q, k, v, None, past_k, past_v], {"is_causal": 1}, domain="", opset=24, outputs=3
    )
    np.testing.assert_array_equal(results[1], all_k)
    np.testing.assert_array_equal(results[2], all_v)
    check([Q, k, v, None, past_k, past_v], attention(Q, all_k, all_v, allowed=allowed), {"is_causal": 1})


def test_an_outside_cache_has_its_own_length_for_each_row():
    lengths = np.array([5, 2])
    ahead = np.arange(5) - np.arange(3)[:, None] - (lengths - 3).reshape(2, 1, 1, 1)
    inside = np.arange(5) < lengths.reshape(2, 1, 1, 1)
    inputs = [Q, K, V, None, None, None, lengths]
    check(inputs, attention(Q, K, V, allowed=np.broadcast_to(inside, (2, 4, 3, 5))))
    expected = attention(Q, K, V, allowed=(ahead <= 0) & inside)
    assert not expected[1, :, 0].any(), "the case should have a row without any key"
    check(inputs, expected, {"is_causal": 1})
    check(inputs, attention(Q, K, V, allowed=(ahead >= -1) & (ahead <= 1) & inside),
          {"left_window_size": 1, "right_window_size": 1}, opset=25)  # fmt: skip


def test_a_row_without_keys_is_zero_not_nan():
    mask = np.ones((3, 5), bool)
    mask[1] = False
    check([Q, K, V, mask], attention(Q, K, V, allowed=mask))
    hard = np.where(mask, 0, -np.inf).astype(np.float32)
    check([Q, K, V, hard], attention(Q, K, V, allowed=mask))


def test_large_halves_do_not_overflow():
    q = np.full((1, 1, 2, 64), 60, np.float16)
    v = random(1, 1, 3, 4).astype(np.float16)
    k = np.full((1, 1, 3, 64), 60, np.float16)
    expected = np.broadcast_to(v.astype(np.float64).mean(2, keepdims=True), (1, 1, 2, 4)).astype(np.float16)
    compare("Attention", [q, k, v], {"scale": 1.0}, domain="", opset=24, rtol=1e-3, atol=1e-3, expected=[expected])


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("partial", [0, 4])
def test_rotary_embedding(interleaved, partial):
    x, width = random(2, 3, 5, 8), partial or 8
    angle = random(10, width // 2, seed=1)
    positions = np.random.default_rng(2).integers(0, 10, (2, 5))
    turn = np.exp(1j * angle.astype(np.float64))[positions][:, None]
    head = x[..., :width].astype(np.float64)
    pairs = (
        head[..., 0::2] + 1j * head[..., 1::2]
        if interleaved
        else head[..., : width // 2] + 1j * head[..., width // 2 :]
    )
    out = pairs * turn
    rotated = (
        np.stack([out.real, out.imag], -1).reshape(head.shape)
        if interleaved
        else np.concatenate([out.real, out.imag], -1)
    )
    expected = np.concatenate([rotated, x[..., width:]], -1).astype(np.float32)
    inputs = [x, np.cos(angle), np.sin(angle), positions]
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": partial}
    compare("RotaryEmbedding", inputs, attributes, domain="", opset=23, rtol=1e-5, atol=1e-5, expected=[expected])
    with pytest.raises(Exception, match="out of range"):
        host_outputs("RotaryEmbedding", [*inputs[:3], positions + 5], attributes, domain="", opset=23)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention_in_two_calls_is_one(rule):
    q, k, v = random(2, 5, 4 * 3), random(2, 5, 2 * 3, seed=1), random(2, 5, 2 * 4, seed=2)
    decay = -abs(random(2, 5, 2, seed=3)) if "gated" in rule else None
    beta = abs(random(2, 5, 2, seed=4)) / 2 if "delta" in rule else None
    attributes = {"update_rule": rule, "q_num_heads": 4, "kv_num_heads": 2}

    def part(cut, state=None):
        given = [None if x is None else x[:, cut] for x in (q, k, v, decay, beta)]
        return [*given[:3], state, *given[3:]]

    state = np.zeros((2, 2, 3, 4))
    expected = np.zeros((2, 5, 4, 4))
    for t in range(5):
        kt, vt = k[:, t].reshape(2, 2, 3).astype(np.float64), v[:, t].reshape(2, 2, 4).astype(np.float64)
        if decay is not None:
            state = state * np.exp(decay[:, t])[..., None, None]
        if beta is not None:
            vt = beta[:, t][..., None] * (vt - np.einsum("bhkv,bhk->bhv", state, kt))
        state = state + kt[..., None] * vt[..., None, :]
        expected[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t].reshape(2, 4, 3), np.repeat(state, 2, 1)) / np.sqrt(3)
    whole = [expected.reshape(2, 5, 16).astype(np.float32), state.astype(np.float32)]
    run = {"domain": "", "opset": 27, "outputs": 2, "rtol": 1e-4, "atol": 1e-5}
    compare("LinearAttention", part(slice(None)), attributes, expected=whole, **run)
    _, middle = host_outputs("LinearAttention", part(slice(2)), attributes, domain="", opset=27, outputs=2)
    compare("LinearAttention", part(slice(2, None), middle), attributes, expected=[whole[0][:, 2:], whole[1]], **run)


def test_gradients():
    f = np.float64
    q, k, v = random(1, 4, 3, 4, dtype=f), random(1, 2, 5, 4, dtype=f), random(1, 2, 5, 4, dtype=f)
    check_gradient("Attention", [q, k, v], {"is_causal": 1, "softcap": 3.0}, opset=24)
    mask = np.ones((3, 5), bool)
    mask[1] = False
    check_gradient("Attention", [q, k, v, mask], opset=24)
    x = random(1, 3, 4, dtype=f)
    check_gradient("LinearAttention", [x, x, x, None, -abs(random(1, 3, 2, dtype=f)), abs(random(1, 3, 2, dtype=f))],
                   {"q_num_heads": 2, "kv_num_heads": 2}, opset=27, outputs=2)  # fmt: skip
