"""com.microsoft's attention operators against onnxruntime. What its CPU kernel refuses is compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operators.cases import Case, Draw, Tolerance, check, examples, few_examples
from tests.operators.oracle import traced_outputs
from transmuter_async.errors import NeedsValue

TOLERANCE = Tolerance(1e-3, 2e-5, "softmax of float32 products in another order")
CASES: dict[str, Callable[[Draw], Case]] = {}


def case(function: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
    CASES[function.__name__] = function
    return function


def _mask(d: Draw, batch: int, queries: int, keys: int) -> Any:
    form = d.pick(("none", "lengths", "ends", "keys", "rows"))
    if form == "lengths":
        return d.integers(1, keys + 1, batch, dtype=np.int32)
    if form == "ends":
        starts = d.integers(0, keys, batch, dtype=np.int32)
        return np.concatenate([d.integers(1, keys + 1, batch, dtype=np.int32), starts])
    if form in ("keys", "rows"):
        mask = d.integers(0, 2, *((batch, keys) if form == "keys" else (batch, queries, keys)), dtype=np.int32)
        # A row without any key is a softmax of scores less 10000, of which float32 keeps three digits.
        mask[..., 0] = 1
        return mask
    return None


@case
def Attention(d: Draw) -> Case:
    batch, length, heads, size = d.size(1, 3), d.size(1, 4), d.size(1, 3), d.size(1, 4)
    hidden, width, before = heads * size, d.size(1, 5), d.pick((0, 2))
    past = d.floats(2, batch, heads, before, size) if before else None
    keys = length + before
    added = d.floats(d.pick((1, batch)), d.pick((1, heads)), length, keys) if not before and d.flag() else None
    values = heads * d.size(1, 4) if not before and d.flag() else hidden
    attributes = {
        "num_heads": heads,
        "unidirectional": int(d.flag()),
        "scale": d.pick((None, 0.3)),
        "mask_filter_value": d.pick((None, -5.0)),
        "qkv_hidden_sizes": None if values == hidden else [hidden, hidden, values],
    }
    total = 2 * hidden + values
    inputs = [
        d.floats(batch, length, width),
        d.floats(width, total),
        d.floats(total),
        _mask(d, batch, length, keys),
        past,
        added,
    ]
    return Case(inputs, attributes, outputs=2 if before else 1)


@case
def MultiHeadAttention(d: Draw) -> Case:
    batch, length, heads, size = d.size(1, 3), d.size(1, 4), d.size(1, 3), d.size(1, 4)
    hidden, before = heads * size, d.pick((0, 0, 2))
    keys = length if before else d.size(1, 5)
    total = keys + before
    form = d.pick(("plain", "cross", "values"))
    if form == "cross" and not before:
        key, value = d.floats(batch, heads, keys, size), d.floats(batch, heads, keys, size)
    else:
        key, value = d.floats(batch, keys, hidden), d.floats(batch, keys, hidden)
    mask = _mask(d, batch, length, total)
    if mask is not None and mask.ndim == 1 and (len(mask) != batch or before):
        mask = None
    past = [d.floats(batch, heads, before, size) for _ in range(2)] if before else [None, None]
    inputs = [
        d.floats(batch, length, hidden),
        key,
        value,
        d.floats(3 * hidden) if d.flag() else None,
        mask,
        d.floats(d.pick((1, batch)), d.pick((1, heads)), length, total) if d.flag() else None,
        *past,
    ]
    attributes = {
        "num_heads": heads,
        "unidirectional": int(d.flag() and (before > 0 or keys <= length)),
        "scale": d.pick((None, 0.4)),
    }
    return Case(inputs, attributes, outputs=3 if before else 1)


@case
def DecoderMaskedMultiHeadAttention(d: Draw) -> Case:
    beams, heads, size, longest = d.size(1, 2), d.size(1, 2), d.size(1, 4), d.size(4, 7)
    batch, hidden, before = 2 * beams, heads * size, d.size(0, 3)
    source = d.integers(0, beams, 2, beams, longest, dtype=np.int32) if d.flag() else None
    inputs = [
        d.floats(batch, 1, hidden),
        d.floats(batch, 1, hidden),
        d.floats(batch, 1, hidden),
        np.maximum(d.integers(0, 2, batch, before + 1, dtype=np.int32), np.arange(before + 1) == 0)
        if d.flag()
        else None,
        d.floats(1, heads, 1, before + 1) if d.flag() else None,
        d.floats(batch, heads, longest, size),
        d.floats(batch, heads, longest, size),
        np.asarray([before], np.int32),
        None if source is None else np.asarray([beams], np.int32),
        source,
        d.floats(3 * hidden) if d.flag() else None,
    ]
    return Case(inputs, {"num_heads": heads, "past_present_share_buffer": 1}, outputs=3, static=(7,))


@case
def RotaryEmbedding(d: Draw) -> Case:
    batch, length, heads, half = d.size(1, 3), d.size(1, 4), d.size(1, 3), d.size(1, 3)
    interleaved, partial, four = int(d.flag()), d.flag(), d.flag()
    size = 2 * half + (2 if partial else 0)
    x = d.floats(batch, heads, length, size) if four else d.floats(batch, length, heads * size)
    places = np.asarray([d.size(0, 4)]) if d.flag() else d.integers(0, 9, batch, length)
    attributes = {"interleaved": interleaved}
    if partial:
        attributes |= {"num_heads": heads, "rotary_embedding_dim": 2 * half}
    return Case([x, places, d.floats(9, half), d.floats(9, half)], attributes)


@case
def MRotaryEmbedding(d: Draw) -> Case:
    batch, length, heads, half = d.size(1, 2), d.size(1, 4), d.size(1, 2), 6
    layout = int(d.flag())
    sections = d.pick(((2, 2, 2), (4, 1, 1))) if layout else d.pick(((2, 1, 3), (6, 0, 0), (1, 2, 3)))
    x = d.floats(batch, heads, length, 2 * half) if d.flag() else d.floats(batch, length, heads * 2 * half)
    attributes = {
        "interleaved": int(d.flag()),
        "mrope_layout": layout,
        "mrope_section": list(sections),
        "num_heads": heads,
    }
    return Case([x, d.integers(0, 9, 3, batch, length), d.floats(9, half), d.floats(9, half)], attributes)


@case
def GroupQueryAttention(d: Draw) -> Case:
    groups, each, size = d.size(1, 2), d.size(1, 2), 16
    heads = groups * each
    kind = d.pick(("prompt", "decode", "chunk", "ragged-chunk", "window"))
    batch = 1 if kind in ("chunk", "window") else d.size(1, 3)
    length = 1 if kind == "decode" else d.size(1, 5)
    capacity, window = 0, d.pick((-1, -1, 1, 3))
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups}
    query_lengths = None
    if kind == "prompt":
        lengths = np.minimum(d.integers(1, length + 1, batch), length)
        lengths[0] = length
        capacity, total = d.pick((0, length + 3)), length
    elif kind == "ragged-chunk":
        query_lengths = d.integers(1, length + 1, batch, dtype=np.int32)
        lengths = query_lengths + d.integers(0, 4, batch)
        capacity = total = int(lengths.max()) + length + 3
    elif kind == "window":
        window = d.size(1, 4)
        capacity = window + d.size(0, 3)
        lengths = np.asarray([length + d.size(0, 9)])
        total = int(lengths[0])
        attributes["sliding_window_cache"] = 1
    else:
        lengths = length + d.integers(1, 5, batch)
        total = int(lengths.max())
        capacity = d.pick((total - length, total + 2))
    attributes["local_window_size"] = window
    if d.flag():
        attributes["softcap"] = 0.8
    if d.flag():
        attributes["scale"] = 0.5
    sink = d.floats(heads) if d.flag() and kind != "window" else None
    bias = (
        d.floats(d.pick((1, batch)), d.pick((1, heads)), length, total)
        if d.flag() and kind in ("prompt", "decode")
        else None
    )
    rotary = d.flag()
    if rotary:
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(d.flag())}
    packed = d.flag()
    query = d.floats(batch, length, (heads + 2 * groups if packed else heads) * size)
    key, value = (
        (None, None) if packed else (d.floats(batch, length, groups * size), d.floats(batch, length, groups * size))
    )
    inputs = [
        query,
        key,
        value,
        d.floats(batch, groups, capacity, size),
        d.floats(batch, groups, capacity, size),
        (lengths - 1).astype(np.int32),
        np.asarray(total, np.int32),
        d.floats(32, 8) if rotary else None,
        d.floats(32, 8) if rotary else None,
        None,
        bias,
        sink,
        None,
        None,
        None,
        None,
        query_lengths,
    ]
    fresh = np.minimum(lengths, length) if query_lengths is None else query_lengths
    held = lengths
    if kind == "window":
        slack = capacity - window + 1
        held = lengths - slack * np.maximum(0, -(-(lengths - capacity) // slack))

    def view(value: Any, index: int) -> Any:
        """The rows of real tokens: padding's are not defined."""
        if index == 0:
            return np.concatenate([row[:n].reshape(-1) for row, n in zip(value, fresh, strict=True)])
        return np.concatenate([row[:, :n].reshape(-1) for row, n in zip(value, held, strict=True)])

    return Case(inputs, attributes, outputs=3, static=(6,), view=view)


@case
def SparseAttention(d: Draw) -> Case:
    """Against float64: onnxruntime's kernel reads memory that it has not set (NaN now and then), and mixes up lengths."""
    groups, size, batch = d.size(1, 2), 16, d.size(1, 2)
    heads, capacity = 2 * groups, 64
    prompt = d.flag()
    length = d.size(1, 40) if prompt else 1
    lengths = np.full(batch, length) if prompt else d.integers(1, 60, batch)
    rows = np.asarray([[0, 1, 3, 5, 8], [0, 1, 3, 6, 9]], np.int32)
    columns = np.asarray([[0, 0, 1, 1, 2, 1, 2, 3, -1], [0, 0, 1, 0, 1, 2, 0, 2, 3]], np.int32)
    attributes = {"num_heads": heads, "kv_num_heads": groups, "sparse_block_size": 16}
    q, k, v = (d.floats(batch, length, n * size) for n in (heads, groups, groups))
    caches = [d.floats(batch, groups, capacity, size) for _ in range(2)]
    keys, values = (cache.copy() for cache in caches)
    expected = np.zeros((batch, length, heads * size), np.float32)
    for b in range(batch):
        before = lengths[b] - length
        for cache, new in ((keys, k), (values, v)):
            cache[b, :, before : lengths[b]] = new[b].reshape(length, groups, size).swapaxes(0, 1)
        for h in range(heads):
            layout = h % 2
            for s in range(length):
                place = before + s
                row = columns[layout, rows[layout, place // 16] : rows[layout, place // 16 + 1]]
                seen = [t for t in range(place + 1) if t // 16 in row]
                part = slice(h * size, (h + 1) * size)
                scores = keys[b, h // 2, seen].astype(float) @ q[b, s, part] / 4
                weights = np.exp(scores - scores.max())
                expected[b, s, part] = weights @ values[b, h // 2, seen] / weights.sum()
    inputs = [q, k, v, *caches, rows, columns, np.asarray(int(lengths.max()), np.int32), lengths.astype(np.int32)]
    return Case(inputs, attributes, outputs=3, static=(7,), expected=[expected, keys, values])


@pytest.mark.parametrize("name", CASES)
@examples
@given(data=st.data())
def test_equals_onnxruntime(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@few_examples
@given(data=st.data())
def test_program_equals_onnxruntime(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), TOLERANCE, traced=True)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("per", ["PER_TENSOR", "PER_CHANNEL"])
def test_quantised_caches(bits: int, per: str) -> None:
    rng = np.random.default_rng(bits)
    scale = [np.full((1,), 0.05, np.float32)] * 2
    if per == "PER_CHANNEL":
        scale = [rng.uniform(0.02, 0.1, (1, 2, 1, 16)).astype(np.float32) for _ in range(2)]
    dtype, width = (np.int8, 16) if bits == 8 else (np.uint8, 8)
    limits = np.iinfo(dtype)
    caches = [rng.integers(limits.min, limits.max + 1, (2, 2, 4, width)).astype(dtype) for _ in range(2)]
    inputs = [
        *(rng.normal(size=(2, 1, n * 16)).astype(np.float32) for n in (4, 2, 2)),
        *caches,
        np.asarray([4, 4], np.int32),
        np.asarray(5, np.int32),
        *[None] * 5,
        *scale,
    ]
    attributes = {
        "num_heads": 4,
        "kv_num_heads": 2,
        "k_quant_type": per,
        "v_quant_type": per,
        "kv_cache_bit_width": bits,
    }
    for traced in (False, True):
        check("GroupQueryAttention", Case(inputs, attributes, outputs=3, static=(6,)), TOLERANCE, traced=traced)


def _plain(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q.astype(float) @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = weights / weights.sum(-1, keepdims=True) @ v
    return np.asarray(y.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1), np.float32)


@pytest.mark.parametrize("traced", [False, True])
def test_packed_queries_and_keys(traced: bool) -> None:
    """The packed forms, which onnxruntime has on CUDA only."""
    rng = np.random.default_rng(0)
    qkv = rng.normal(size=(2, 5, 3, 3, 4)).astype(np.float32)
    q, k, v = (qkv[:, :, :, part].swapaxes(1, 2) for part in range(3))
    check("MultiHeadAttention", Case([qkv], {"num_heads": 3}, expected=[_plain(q, k, v)]), TOLERANCE, traced=traced)
    query = q.swapaxes(1, 2).reshape(2, 5, 12)
    check(
        "MultiHeadAttention",
        Case([query, qkv[:, :, :, 1:]], {"num_heads": 3}, expected=[_plain(q, k, v)]),
        TOLERANCE,
        traced=traced,
    )


def test_a_traced_cache_length_is_asked_for_by_name() -> None:
    x = np.ones((1, 1, 16), np.float32)
    past = np.ones((1, 1, 2, 16), np.float32)
    inputs = [x, x, x, past, past, np.asarray([2], np.int32), np.asarray(3, np.int32)]
    with pytest.raises(NeedsValue, match="length of the cache"):
        traced_outputs("GroupQueryAttention", inputs, {"num_heads": 1, "kv_num_heads": 1}, outputs=3)
