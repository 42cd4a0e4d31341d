"""com.microsoft without a CPU kernel: weights of 4- and 8-bit floats, PagedAttention; against float64, by the schema's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operators.cases import Case, Draw, Tolerance, check, examples, few_examples
from tests.operators.oracle import host_outputs
from transmuter_async.errors import OperatorError

TOLERANCE = Tolerance(1e-2, 1e-2, "sums in float32, rounded to 16 bits")
E4M3 = ml_dtypes.float8_e4m3fn


def _activations(d: Draw) -> Any:
    return d.pick((np.float16, ml_dtypes.bfloat16))


def MatMulBlockQuantizedFp4Weight(d: Draw) -> Case:
    dtype, block = _activations(d), d.pick((4, 16))
    rows, inner, columns = d.size(0, 3), 2 * d.size(1, 12), d.size(1, 4)
    packed = d.codes(np.uint8, columns, inner // 2)
    scales = np.abs(d.floats(columns, -(-inner // block))).astype(E4M3)
    overall = np.asarray(d.pick((1.0, 0.25)), np.float32)
    bias = d.floats(columns, dtype=dtype) if d.flag() else None
    a = d.floats(*d.pick(((rows, inner), (2, rows, inner))), dtype=dtype)
    weight = np.zeros((columns, inner))
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for n in range(columns):
        for k in range(inner):
            code = (int(packed[n, k // 2]) >> (4 * (k % 2))) & 15
            value = magnitudes[code & 7] * (-1 if code & 8 else 1)
            weight[n, k] = np.float64(dtype(np.float32(value * float(overall) * float(scales[n, k // block]))))
    expected = a.astype(np.float64) @ weight.T + (0 if bias is None else bias.astype(np.float64))
    inputs = [a, packed, scales.view(np.uint8), overall, np.asarray(1.0, np.float32) if d.flag() else None, bias]
    return Case(inputs, {"block_size": block}, expected=[expected.astype(dtype)])


def MatMulBlockQuantizedFp8Weight(d: Draw) -> Case:
    dtype, block = _activations(d), d.pick((4, 128))
    rows, inner, columns = d.size(0, 3), d.size(1, 12), d.size(1, 4)
    a, b = d.floats(rows, inner, dtype=dtype), d.floats(columns, inner).astype(E4M3)
    scales = d.positive(columns, -(-inner // block))
    by = np.asarray(d.pick((0.05, 0.001)), np.float32) if d.flag() else None
    bias = d.floats(columns, dtype=dtype) if d.flag() else None
    weight = b.astype(np.float64) * np.repeat(scales, block, axis=1)[:, :inner]
    activations = a.astype(np.float64)
    if by is not None:  # above 448 there is no number
        levels = np.clip(a.astype(np.float32) / by, -448, 448).astype(E4M3)
        activations = levels.astype(np.float64) * float(by)
    expected = activations @ weight.T + (0 if bias is None else bias.astype(np.float64))
    return Case([a, b, scales, by, bias], {"block_size": block}, expected=[expected.astype(dtype)])


def _rms(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: int) -> np.ndarray:
    y, half = x.copy(), len(cos)
    for pair in range(half):
        one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        y[one] = x[one] * cos[pair] - x[two] * sin[pair]
        y[two] = x[one] * sin[pair] + x[two] * cos[pair]
    return y


def PagedAttention(d: Draw) -> Case:
    """Token after token, in float64, over caches that are plain dictionaries of slots."""
    groups, each, size, block = d.size(1, 2), d.size(1, 2), 8, d.size(1, 3)
    heads, latent = groups * each, False
    if d.flag() and d.flag():
        latent, heads, groups = True, each, 1
    width = d.pick((4, size)) if latent else size
    lengths = [d.size(0, 3) for _ in range(d.size(1, 3))]
    past = [d.size(0, 4) for _ in lengths]
    tokens = sum(lengths)
    most = max(-(-(p + n) // block) for p, n in zip(past, lengths, strict=True)) or 1
    blocks = len(lengths) * most + 1
    pages = d.rng.permutation(blocks)[: len(lengths) * most].reshape(len(lengths), most).astype(np.int32)
    for row, (p, n) in enumerate(zip(past, lengths, strict=True)):
        pages[row, -(-(p + n) // block) :] = -1
    kind = d.pick(("float", "int8")) if not latent else "float"
    dtype = np.float16
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups, "is_causal": d.size(0, 1)}
    attributes["local_window_size"] = d.pick((-1, 2))
    attributes |= {"scale": 0.4} if latent or d.flag() else {}
    attributes |= {"softcap": 0.9} if d.flag() else {}
    if latent:
        attributes |= {"kv_cache_layout": "LATENT", "v_head_size": width}
    query, key = d.floats(tokens, heads * size, dtype=dtype), d.floats(tokens, groups * size, dtype=dtype)
    value = None if latent else d.floats(tokens, groups * size, dtype=dtype)
    shape = (blocks, block, groups, size)
    scales: list[Any] = [None, None]
    if kind == "int8":
        caches = [d.integers(-90, 90, *shape, dtype=np.int8) for _ in range(2)]
        per = d.pick(("PER_TENSOR", "PER_CHANNEL"))
        scales = [d.positive(*((1,) if per == "PER_TENSOR" else (groups, 1, size)), scale=0.03) for _ in range(2)]
        attributes |= {"k_quant_type": per, "v_quant_type": per}
    else:
        caches = [d.floats(*shape, dtype=dtype) for _ in range(2)]
    rotary, normed = d.flag(), d.flag()
    cos, sin = (d.floats(16, size // 2, dtype=dtype) for _ in range(2))
    if rotary:
        attributes |= {"do_rotary": 1, "rotary_interleaved": d.size(0, 1)}
    norms = [d.floats(size, dtype=dtype) for _ in range(2)]
    sink = d.floats(heads, dtype=dtype) if d.flag() else None
    slots = None
    if d.flag():
        slots = np.asarray(
            [
                -1 if d.rng.random() < 0.2 else pages[row, place // block] * block + place % block
                for row, (p, n) in enumerate(zip(past, lengths, strict=True))
                for place in range(p, p + n)
            ],
            np.int32,
        )
    # --- the reference
    flat = [cache.reshape(-1, groups, size).copy() for cache in caches]
    wide = [
        None if s is None else np.broadcast_to(s.reshape(-1, s.shape[-1]), (groups, size)).astype(float) for s in scales
    ]

    def stored(x: np.ndarray, which: int) -> np.ndarray:
        if wide[which] is None:
            return x.astype(dtype)
        return np.clip(np.rint((x / wide[which]).astype(np.float32)), -128, 127).astype(np.int8)

    def loaded(which: int, slot: int) -> np.ndarray:
        found = flat[which][slot].astype(np.float64)
        return found if wide[which] is None else found * wide[which]

    queries = []
    token = 0
    for row, (p, n) in enumerate(zip(past, lengths, strict=True)):
        for place in range(p, p + n):
            q = query[token].astype(np.float64).reshape(heads, size)
            k = key[token].astype(np.float64).reshape(groups, size)
            if normed:
                q, k = _rms(q, norms[0].astype(float), 1e-6), _rms(k, norms[1].astype(float), 1e-6)
            if rotary:
                angle = (cos[place].astype(float), sin[place].astype(float), attributes["rotary_interleaved"])
                q, k = (np.stack([_rotated(head, *angle) for head in x]) for x in (q, k))
            queries.append(q)
            slot = pages[row, place // block] * block + place % block if slots is None else slots[token]
            if slot >= 0:
                flat[0][slot] = stored(k, 0)
                if value is not None:
                    flat[1][slot] = stored(value[token].astype(np.float64).reshape(groups, size), 1)
            token += 1
    expected = np.zeros((tokens, heads * width))
    token = 0
    for row, (p, n) in enumerate(zip(past, lengths, strict=True)):
        for place in range(p, p + n):
            seen = [t for t in range(p + n) if pages[row, t // block] >= 0]
            if attributes["is_causal"]:
                seen = [t for t in seen if t <= place]
            if attributes["local_window_size"] > 0:
                seen = [t for t in seen if t > place - attributes["local_window_size"]]
            for h in range(heads):
                group = h // (heads // groups)
                rows = [pages[row, t // block] * block + t % block for t in seen]
                scores = np.asarray([loaded(0, slot)[group] @ queries[token][h] for slot in rows])
                scores = scores * attributes.get("scale", size**-0.5)
                if "softcap" in attributes:
                    scores = 0.9 * np.tanh(scores / 0.9)
                extra = [] if sink is None else [float(sink[h])]
                powers = np.exp(np.asarray([*scores, *extra]) - max([*scores, *extra]))
                weights = powers[: len(scores)] / powers.sum()
                values = [loaded(0, slot)[group][:width] if latent else loaded(1, slot)[group] for slot in rows]
                expected[token, h * width : (h + 1) * width] = weights @ np.asarray(values)
            token += 1
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    inputs = [
        query,
        key,
        value,
        caches[0],
        None if latent else caches[1],
        edges,
        np.asarray(past, np.int32),
        pages,
        *((cos, sin) if rotary else (None, None)),
        slots,
        sink,
        *(norms if normed else (None, None)),
        *scales,
    ]
    out = [expected.astype(dtype), flat[0].reshape(shape), None if latent else flat[1].reshape(shape)]

    def view(value: Any, index: int) -> Any:
        """A value on the edge of a level may go to either."""
        return value.astype(np.float32) / 100 if value.dtype == np.int8 else value

    return Case(inputs, attributes, outputs=3, expected=out, view=view)


CASES: dict[str, Callable[[Draw], Case]] = {
    function.__name__: function
    for function in (MatMulBlockQuantizedFp4Weight, MatMulBlockQuantizedFp8Weight, PagedAttention)
}


@pytest.mark.parametrize("name", CASES)
@examples
@given(data=st.data())
def test_equals_float64(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@few_examples
@given(data=st.data())
def test_program_equals_float64(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), TOLERANCE, traced=True)


def test_caches_of_two_values_a_byte_are_refused() -> None:
    cache = np.zeros((2, 2, 1, 4), np.uint8)
    inputs = [np.zeros((1, 8), np.float16)] * 3 + [cache, cache, np.int32([0, 1]), np.int32([0]), np.int32([[0]])]
    with pytest.raises(OperatorError, match="two values a byte"):
        host_outputs("PagedAttention", inputs, {"num_heads": 1, "kv_num_heads": 1, "k_cache_dtype": "int4"}, outputs=3)
