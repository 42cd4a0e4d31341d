"""com.microsoft's quantised operators, packed weights and experts against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operators.cases import EXACT, Case, Draw, Tolerance, check, examples, few_examples

LEVEL = Tolerance(0, 1, "onnxruntime folds the scales first, so that a value between two levels may fall to either")
PRODUCT = Tolerance(1e-3, 2e-3, "float32 sums of dequantised values in another order")
ATTENTION = Tolerance(1e-3, 1e-4, "softmax of float32 products in another order")
STATE = Tolerance(5e-3, 1e-2, "a hidden state on the border of two levels is quantised to either, at every step")

TOLERANCES = {
    "QuantizeLinear": LEVEL,
    "DequantizeLinear": Tolerance(1e-6, 1e-6, "one rounding of a float32 product"),
    "DynamicQuantizeMatMul": PRODUCT,
    "MatMulIntegerToFloat": PRODUCT,
    "QGemm": LEVEL,
    "QLinearConv": LEVEL,
    "QAttention": ATTENTION,
    "QEmbedLayerNormalization": ATTENTION,
    "DynamicQuantizeLSTM": STATE,
    "MatMulNBits": PRODUCT,
    "MatMulBnb4": PRODUCT,
    "MatMulFpQ4": PRODUCT,
    "GatherBlockQuantized": Tolerance(1e-5, 1e-5, "one rounding of a float32 product"),
    "GatherPacked": Tolerance(1e-3, 1e-3, "float16 results"),
    "MoE": PRODUCT,
    "QMoE": Tolerance(2e-3, 2e-2, "two float32 products of dequantised values, one after the other"),
}
EXACTLY = frozenset({"MatMulInteger16", "MulInteger", "ReduceSumInteger", "NhwcMaxPool"})
CASES: dict[str, Callable[[Draw], Case]] = {}


def case(function: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
    CASES[function.__name__] = function
    return function


def _scale(d: Draw) -> np.ndarray:
    return np.asarray(d.rng.uniform(0.01, 0.08), np.float32)


def _zero(d: Draw, dtype: Any) -> np.ndarray:
    return d.codes(dtype)


def _byte(d: Draw) -> Any:
    return d.pick((np.int8, np.uint8))


# --- elementwise ----------------------------------------------------------------------------------------------------------


def _binary(d: Draw) -> Case:
    dtype = _byte(d)
    shape = d.shape(d.size(1, 3), low=1)
    other = tuple(d.pick((1, n)) for n in shape)[d.size(0, len(shape) - 1) :]
    inputs = [
        d.codes(dtype, *shape),
        _scale(d),
        _zero(d, dtype),
        d.codes(dtype, *other),
        _scale(d),
        _zero(d, dtype),
        _scale(d),
        _zero(d, dtype),
    ]
    return Case(inputs)


@case
def QLinearAdd(d: Draw) -> Case:
    return _binary(d)


@case
def QLinearMul(d: Draw) -> Case:
    return _binary(d)


def _unary(d: Draw, *shape: int) -> list[Any]:
    dtype = _byte(d)
    return [
        d.codes(dtype, *(shape or d.shape(d.size(1, 3), low=1))),
        _scale(d),
        _zero(d, dtype),
        _scale(d),
        _zero(d, dtype),
    ]


@case
def QLinearSigmoid(d: Draw) -> Case:
    return Case(_unary(d), constant=(1, 2, 3, 4))


@case
def QLinearLeakyRelu(d: Draw) -> Case:
    return Case(_unary(d), {"alpha": d.pick((0.01, 0.3))}, constant=(1, 2, 3, 4))


@case
def QLinearSoftmax(d: Draw) -> Case:
    inputs = _unary(d, *d.shape(3, low=1))
    inputs[3], inputs[4] = (
        np.asarray(1 / 255, np.float32),
        np.asarray(0 if inputs[0].dtype == np.uint8 else -128, inputs[0].dtype),
    )
    return Case(inputs, {"axis": d.size(-3, 2), "opset": d.pick((12, 13))}, constant=(1, 2, 3, 4))


@case
def QLinearConcat(d: Draw) -> Case:
    dtype, axis = _byte(d), d.size(0, 1)
    inputs: list[Any] = [_scale(d), _zero(d, dtype)]
    for _ in range(d.size(1, 3)):
        shape = [2, 2]
        shape[axis] = d.size(1, 3)
        inputs += [d.codes(dtype, *shape), _scale(d), _zero(d, dtype)]
    return Case(inputs, {"axis": axis})


@case
def QLinearWhere(d: Draw) -> Case:
    dtype = _byte(d)
    shape = d.shape(2, low=1)
    inputs = [
        d.rng.random(shape) < 0.5,
        d.codes(dtype, *shape),
        _scale(d),
        _zero(d, dtype),
        d.codes(dtype, shape[1]),
        _scale(d),
        _zero(d, dtype),
        _scale(d),
        _zero(d, dtype),
    ]
    return Case(inputs, constant=(2, 3, 5, 6, 7, 8))


@case
def QLinearAveragePool(d: Draw) -> Case:
    last, pad = int(d.flag()), d.size(0, 1)
    kernel = [d.size(pad + 1, 3), d.size(pad + 1, 3)]
    sizes = (d.size(3, 6), d.size(3, 6))
    shape = (1, *sizes, 3) if last else (1, 3, *sizes)
    attributes = {
        "kernel_shape": kernel,
        "pads": [pad] * 4,
        "strides": [d.size(1, 2)] * 2,
        "ceil_mode": int(d.flag()),
        "count_include_pad": int(d.flag()),
        "channels_last": last,
    }
    return Case(_unary(d, *shape), attributes)


@case
def QLinearGlobalAveragePool(d: Draw) -> Case:
    return Case(_unary(d, *d.shape(4, low=1)), {"channels_last": int(d.flag())})


@case
def QLinearReduceMean(d: Draw) -> Case:
    inputs = _unary(d, *d.shape(3, low=1))
    x, scale, zero, out, out_zero = inputs
    axes, keep = d.pick(([0], [1, 2], [-1])), int(d.flag())
    mean = ((x.astype(float) - zero) * float(scale)).mean(tuple(axes), keepdims=bool(keep))
    limits = np.iinfo(x.dtype)
    expected = np.clip(np.round(mean / float(out)) + out_zero, limits.min, limits.max).astype(x.dtype)
    return Case(inputs, {"axes": axes, "keepdims": keep}, expected=[np.asarray(expected)])


@case
def NhwcMaxPool(d: Draw) -> Case:
    return Case(
        [d.codes(_byte(d), 1, d.size(3, 6), d.size(3, 6), 2)],
        {"kernel_shape": [d.size(2, 3), d.size(2, 3)], "pads": [d.size(0, 1)] * 4, "strides": [d.size(1, 2)] * 2},
    )


@case
def QuantizeLinear(d: Draw) -> Case:
    dtype = d.pick((np.int8, np.uint8, np.int16, np.uint16))
    x = d.floats(3, 4)
    if d.flag():
        return Case([x, _scale(d), _zero(d, dtype)])
    axis = d.size(0, 1)
    return Case([x, d.positive(x.shape[axis], scale=0.1), d.codes(dtype, x.shape[axis])], {"axis": axis})


@case
def DequantizeLinear(d: Draw) -> Case:
    dtype = d.pick((np.int8, np.uint8, np.int16, np.uint16, np.int32))
    x = d.codes(dtype, 3, 4)
    if d.flag() or dtype == np.int32:
        return Case([x, _scale(d)])
    axis = d.size(0, 1)
    return Case([x, d.positive(x.shape[axis], scale=0.1), d.codes(dtype, x.shape[axis])], {"axis": axis})


# --- products -------------------------------------------------------------------------------------------------------------


@case
def DynamicQuantizeMatMul(d: Draw) -> Case:
    dtype, inner, columns = _byte(d), d.size(1, 9), d.size(1, 4)
    per = d.flag()
    scale = d.positive(columns, scale=0.1) if per else _scale(d)
    zero = d.codes(dtype, columns) if per else _zero(d, dtype)
    return Case(
        [
            d.floats(*d.shape(d.size(1, 2), low=1), inner),
            d.codes(dtype, inner, columns),
            scale,
            zero,
            d.floats(columns) if d.flag() else None,
        ]
    )


@case
def MatMulIntegerToFloat(d: Draw) -> Case:
    left = _byte(d)
    right = np.int8 if left == np.int8 else _byte(d)
    inner, columns, per = d.size(1, 9), d.size(1, 4), d.flag()
    scale = d.positive(columns, scale=0.1) if per else _scale(d)
    zero = d.codes(right, columns) if per else _zero(d, right)
    return Case(
        [
            d.codes(left, *d.shape(d.size(1, 2), low=1), inner),
            d.codes(right, inner, columns),
            _scale(d),
            scale,
            _zero(d, left),
            zero,
            d.floats(columns) if d.flag() else None,
        ]
    )


@case
def MatMulInteger16(d: Draw) -> Case:
    inner = d.size(1, 5)
    return Case([d.codes(np.int16, d.size(1, 3), inner), d.codes(np.int16, inner, d.size(1, 3))])


@case
def MulInteger(d: Draw) -> Case:
    dtype = _byte(d)
    a, b, za, zb = d.codes(dtype, 2, 3), d.codes(dtype, 3), _zero(d, dtype), _zero(d, dtype)
    return Case([a, za, b, zb], expected=[((a.astype(int) - za) * (b.astype(int) - zb)).astype(np.int32)])


@case
def ReduceSumInteger(d: Draw) -> Case:
    x, keep = d.codes(_byte(d), 2, 3, 2), int(d.flag())
    expected = x.astype(int).sum((1,), keepdims=bool(keep)).astype(np.uint32 if x.dtype == np.uint8 else np.int32)
    return Case([x], {"axes": [1], "keepdims": keep}, expected=[expected])


@case
def QGemm(d: Draw) -> Case:
    left = _byte(d)
    right = np.int8 if left == np.int8 else _byte(d)
    rows, inner, columns = d.size(1, 4), d.size(1, 6), d.size(1, 4)
    flip_a, flip_b, per = int(d.flag()), int(d.flag()), d.flag()
    inputs = [
        d.codes(left, *((inner, rows) if flip_a else (rows, inner))),
        _scale(d),
        _zero(d, left),
        d.codes(right, *((columns, inner) if flip_b else (inner, columns))),
        d.positive(columns, scale=0.1) if per else _scale(d),
        d.codes(right, columns) if per else _zero(d, right),
        d.integers(-500, 500, columns, dtype=np.int32) if d.flag() else None,
        np.asarray(0.3, np.float32),
        _zero(d, left),
    ]
    return Case(inputs, {"transA": flip_a, "transB": flip_b, "alpha": d.pick((1.0, 0.5))})


@case
def QLinearConv(d: Draw) -> Case:
    left = _byte(d)
    right = np.int8 if left == np.int8 else _byte(d)
    group, per, filters = d.pick(((1, 2, 3), (2, 1, 4)))
    last = int(d.flag())
    sizes = (d.size(3, 5), d.size(3, 5))
    shape = (1, *sizes, group * per) if last else (1, group * per, *sizes)
    inputs = [
        d.codes(left, *shape),
        _scale(d),
        _zero(d, left),
        d.codes(right, filters, per, 2, 3),
        _scale(d),
        _zero(d, right),
        np.asarray(0.5, np.float32),
        _zero(d, left),
        d.integers(-100, 100, filters, dtype=np.int32) if d.flag() else None,
    ]
    return Case(inputs, {"group": group, "pads": [1, 1, 0, 1], "channels_last": last}, constant=(3, 4, 5))


@case
def QAttention(d: Draw) -> Case:
    batch, length, heads, size, width = d.size(1, 2), d.size(1, 4), d.size(1, 2), d.size(1, 3), d.size(1, 5)
    hidden, before, per = heads * size, d.pick((0, 2)), d.flag()
    right = _byte(d)
    inputs = [
        d.codes(np.uint8, batch, length, width),
        d.codes(right, width, 3 * hidden),
        d.floats(3 * hidden),
        _scale(d),
        d.positive(3 * hidden, scale=0.05) if per else _scale(d),
        d.integers(1, length + 1, batch, dtype=np.int32) if not before and d.flag() else None,
        _zero(d, np.uint8),
        d.codes(right, 3 * hidden) if per else _zero(d, right),
        d.floats(2, batch, heads, before, size) if before else None,
    ]
    return Case(inputs, {"num_heads": heads, "unidirectional": int(d.flag())}, outputs=2 if before else 1)


@case
def QEmbedLayerNormalization(d: Draw) -> Case:
    dtype, hidden, batch, length = _byte(d), d.size(2, 6), d.size(1, 2), d.size(1, 4)
    ids = d.integers(0, 5, batch, length, dtype=np.int32)
    tables = [d.codes(dtype, 5, hidden), d.codes(dtype, 4, hidden), d.codes(dtype, 2, hidden)]
    inputs = [
        ids,
        ids % 2,
        *tables,
        d.codes(dtype, hidden),
        d.codes(dtype, hidden),
        d.integers(0, 2, batch, length, dtype=np.int32),
    ]
    inputs += [_scale(d) for _ in range(5)] + [_zero(d, dtype) for _ in range(5)]
    return Case(inputs, {"epsilon": 1e-5}, outputs=2, constant=tuple(range(8, 18)))


@case
def DynamicQuantizeLSTM(d: Draw) -> Case:
    direction = d.pick(("forward", "reverse", "bidirectional"))
    count = 2 if direction == "bidirectional" else 1
    time, batch, width, hidden = d.size(1, 4), d.size(1, 2), d.size(1, 3), d.size(1, 4)
    dtype = _byte(d)
    # With ragged rows the ranges that onnxruntime quantises by hold what it computes after a row's end.
    lengths = None if batch > 1 else np.asarray([d.size(1, time)], np.int32) if d.flag() else None

    def zero() -> np.ndarray:
        return np.zeros(count, np.int8) if dtype == np.int8 else d.codes(dtype, count)

    inputs = [
        d.floats(time, batch, width),
        d.codes(dtype, count, width, 4 * hidden),
        d.codes(dtype, count, hidden, 4 * hidden),
        d.floats(count, 8 * hidden) if d.flag() else None,
        lengths,
        d.floats(count, batch, hidden, scale=0.3) if d.flag() else None,
        d.floats(count, batch, hidden, scale=0.3) if d.flag() else None,
        d.floats(count, 3 * hidden, scale=0.3) if d.flag() else None,
        d.positive(count, scale=0.02),
        zero(),
        d.positive(count, scale=0.02),
        zero(),
    ]
    return Case(inputs, {"direction": direction, "hidden_size": hidden}, outputs=3, constant=(1, 2, 8, 9, 10, 11))


# --- packed weights -------------------------------------------------------------------------------------------------------


@case
def MatMulNBits(d: Draw) -> Case:
    bits, block, columns = d.pick((2, 4, 8)), d.pick((16, 32)), d.size(1, 4)
    inner = d.size(1, 70)
    blocks = -(-inner // block)
    zeros = d.pick(("none", "packed", "plain" if bits == 4 else "none"))
    points = {
        "none": None,
        "packed": d.codes(np.uint8, columns, -(-blocks * bits // 8)),
        "plain": d.floats(columns, blocks, scale=3),
    }[zeros]
    groups = (
        d.integers(0, blocks, blocks * block, dtype=np.int32) if bits == 4 and zeros == "none" and d.flag() else None
    )
    inputs = [
        d.floats(*d.shape(d.size(1, 2), low=1), inner),
        d.codes(np.uint8, columns, blocks, block * bits // 8),
        d.positive(columns, blocks, scale=0.1),
        points,
        groups,
        d.floats(columns) if d.flag() else None,
    ]
    present = tuple(i for i in range(1, 6) if inputs[i] is not None)
    return Case(inputs, {"K": inner, "N": columns, "bits": bits, "block_size": block}, constant=present)


@case
def MatMulBnb4(d: Draw) -> Case:
    inner, columns, block = d.pick((16, 32, 48)), d.size(1, 4), d.pick((16, 32))
    total = inner * columns
    inputs = [d.floats(d.size(1, 3), inner), d.codes(np.uint8, (total + 1) // 2), d.positive(-(-total // block))]
    return Case(inputs, {"K": inner, "N": columns, "block_size": block, "quant_type": d.pick((0, 1))}, constant=(1, 2))


@case
def MatMulFpQ4(d: Draw) -> Case:
    kind, inner, columns = d.pick((0, 1)), 32 * d.size(1, 3), d.size(1, 4)
    blob = d.codes(np.uint8, columns, inner // 32, 20 + kind)
    blob[..., :4] = d.positive(columns, inner // 32, 1).view(np.uint8)
    if kind:
        blob[..., 4] %= 16
    return Case(
        [d.floats(d.size(1, 3), inner), blob.reshape(-1), np.asarray([inner, columns])],
        {"blk_quant_type": kind},
        constant=(1, 2),
    )


@case
def GatherBlockQuantized(d: Draw) -> Case:
    rows, inner, block = d.size(1, 5), 16 * d.size(1, 3), 16
    index = d.integers(-rows, rows, *d.shape(d.size(1, 2), low=1)).astype(d.pick((np.int32, np.int64)))
    blocks = inner // block
    if d.flag():
        bits = d.pick((2, 4, 8))
        zeros = d.codes(np.uint8, rows, -(-blocks * bits // 8)) if d.flag() else None
        inputs = [d.codes(np.uint8, rows, inner * bits // 8), index, d.floats(rows, blocks), zeros]
        return Case(inputs, {"bits": bits, "block_size": block}, constant=(0, 2, 3) if zeros is not None else (0, 2))
    dtype = d.pick((ml_dtypes.int4, ml_dtypes.uint4))
    data = d.integers(0, 8, rows, inner).astype(dtype)
    zeros = d.integers(0, 8, rows, blocks).astype(dtype) if d.flag() else None
    inputs = [data, index, d.floats(rows, blocks), zeros]
    return Case(inputs, {"block_size": block}, constant=(0, 2, 3) if zeros is not None else (0, 2))


@case
def GatherPacked(d: Draw) -> Case:
    kind, elements, size, halves = d.pick(
        (
            (1, 1, 2, ()),
            (2, 32, 18, (0,)),
            (6, 32, 22, (0,)),
            (8, 32, 34, (0,)),
            (13, 256, 176, (0, 2)),
            (14, 256, 210, (208,)),
            (20, 32, 18, (0,)),
            (23, 256, 136, (0,)),
        )
    )
    rows, blocks = d.size(1, 3), d.size(1, 2) * (1 if elements > 1 else 32)
    data = d.codes(np.uint8, rows, blocks, size)
    for place in (0,) if kind == 1 else halves:
        data[..., place : place + 2] = d.floats(rows, blocks, 1, scale=0.1, dtype=np.float16).view(np.uint8)
    index = d.integers(-1, rows + 1, *d.shape(d.size(1, 2), low=1))
    attributes = {"packed_type": kind, "K": blocks * elements, "output_dtype": d.pick((1, 10))}
    types = {0: np.float32 if attributes["output_dtype"] == 1 else np.float16}
    return Case([data.reshape(rows, -1), index], attributes, constant=(0,), types=types)


# --- experts --------------------------------------------------------------------------------------------------------------


@case
def MoE(d: Draw) -> Case:
    experts, hidden, inner, tokens = d.size(1, 5), d.size(1, 6), d.size(1, 5), d.size(1, 6)
    name = d.pick(("relu", "gelu", "silu", "identity", "swiglu"))
    wide = 2 * inner if name == "swiglu" else inner
    inputs = [
        d.floats(tokens, hidden),
        d.floats(tokens, experts),
        d.floats(experts, wide, hidden),
        d.floats(experts, wide) if d.flag() else None,
        d.floats(experts, hidden, inner),
        d.floats(experts, hidden) if d.flag() else None,
    ]
    attributes = {"activation_type": name, "k": d.size(1, experts), "normalize_routing_weights": int(d.flag())}
    if name == "swiglu":
        attributes |= {"swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 0.7}
    return Case(inputs, attributes)


@case
def QMoE(d: Draw) -> Case:
    experts, hidden, inner, tokens, bits = d.size(1, 4), 32, 32, d.size(1, 5), d.pick((2, 4, 8))
    name, block = d.pick(("silu", "swiglu")), d.pick((None, 16, 32))
    if bits == 8:  # onnxruntime quantises the activations of 8-bit blocks
        block = None
    wide = 2 * inner if name == "swiglu" else inner
    points = d.flag()

    def layer(rows: int, columns: int) -> tuple[Any, Any, Any]:
        scale = (
            d.positive(experts, rows, columns // block, scale=0.02) if block else d.positive(experts, rows, scale=0.02)
        )
        shape = (experts, rows, -(-(columns // block) * bits // 8)) if block else (experts, -(-rows * bits // 8))
        return (
            d.codes(np.uint8, experts, rows, columns * bits // 8),
            scale,
            d.codes(np.uint8, *shape) if points else None,
        )

    first, second = layer(wide, hidden), layer(hidden, inner)
    chosen = d.positive(tokens, experts) if d.flag() else None
    inputs = [
        d.floats(tokens, hidden),
        d.floats(tokens, experts),
        *first[:2],
        d.floats(experts, wide),
        *second[:2],
        None,
    ]
    inputs += [None, None, None, first[2], second[2], None, chosen]
    attributes = {
        "activation_type": name,
        "k": d.size(1, experts),
        "expert_weight_bits": bits,
        "block_size": block,
        "swiglu_fusion": 1 if name == "swiglu" else 0,
        "normalize_routing_weights": int(d.flag()),
    }
    constant = tuple(i for i in range(2, 13) if inputs[i] is not None)
    return Case(inputs, attributes, constant=constant)


@case
def MoEGroupRouter(d: Draw) -> Case:
    groups, each = d.size(1, 3), d.size(1, 4)
    experts = groups * each
    attributes = {
        "n_group": groups,
        "topk_group": d.size(1, groups),
        "group_topk": d.size(1, each),
        "top_k": d.size(1, experts),
    }
    attributes["top_k"] = min(attributes["top_k"], attributes["topk_group"] * each)
    return Case([d.floats(d.size(1, 4), experts), d.floats(experts)], attributes)


def _tolerance(name: str) -> Tolerance:
    if name == "MoEGroupRouter":
        return Tolerance(1e-5, 1e-5, "logarithm of a sigmoid")
    return EXACT if name in EXACTLY else TOLERANCES.get(name, LEVEL)


@pytest.mark.parametrize("name", CASES)
@examples
@given(data=st.data())
def test_equals_the_oracle(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), _tolerance(name))


@pytest.mark.parametrize("name", CASES)
@few_examples
@given(data=st.data())
def test_program_equals_the_oracle(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), _tolerance(name), traced=True)


@pytest.mark.parametrize("traced", [False, True])
def test_bnb4_without_transposition_follows_the_text(traced: bool) -> None:
    """`A (M, N)` times the weight `(N, K)`; onnxruntime reads it with the wrong strides. NF4 codes 15 and 7 are 1 and 0."""
    rng = np.random.default_rng(0)
    ones = rng.random((4, 16)) < 0.5
    codes = np.where(ones, 15, 7).astype(np.uint8).reshape(-1)
    packed = (codes[0::2] << 4) | codes[1::2]
    a = rng.normal(size=(2, 4)).astype(np.float32)
    scales = np.full(4, 0.5, np.float32)
    expected = (a.astype(float) @ (ones * 0.5)).astype(np.float32)
    attributes = {"K": 16, "N": 4, "block_size": 16, "quant_type": 1, "transB": 0}
    check("MatMulBnb4", Case([a, packed, scales], attributes, expected=[expected]), PRODUCT, traced=traced)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_nbits_of_odd_widths_are_a_stream_of_bits(bits: int, traced: bool) -> None:
    """Widths that onnxruntime's CPU kernel has not: codes one after the other, lowest bit first."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (3, 2, 16))
    packed = np.zeros((3, 2, 16 * bits // 8), np.uint8)
    for n, b, k, bit in np.ndindex(3, 2, 16, bits):
        place = k * bits + bit
        packed[n, b, place // 8] |= np.uint8(((codes[n, b, k] >> bit) & 1) << (place % 8))
    scales = rng.uniform(0.1, 1, (3, 2)).astype(np.float32)
    a = rng.normal(size=(2, 32)).astype(np.float32)
    weight = ((codes - (1 << (bits - 1))) * scales[..., None]).reshape(3, 32)
    attributes = {"K": 32, "N": 3, "bits": bits, "block_size": 16}
    expected = [(a.astype(float) @ weight.T).astype(np.float32)]
    check("MatMulNBits", Case([a, packed, scales], attributes, expected=expected), PRODUCT, traced=traced)


@pytest.mark.parametrize("traced", [False, True])
def test_experts_with_a_separate_gate(traced: bool) -> None:
    """FC3, which onnxruntime's CPU kernel has not: silu(x W1) * (x W3)."""
    rng = np.random.default_rng(0)
    x, router = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(6, 3)).astype(np.float32)
    one, two, three = (rng.normal(size=s).astype(np.float32) for s in ((3, 5, 4), (3, 4, 5), (3, 5, 4)))
    powers = np.exp(router.astype(float))
    expected = np.zeros((6, 4))
    for t in range(6):
        for e in np.argsort(-router[t])[:2]:
            h = one[e].astype(float) @ x[t]
            expected[t] += (
                powers[t, e] / powers[t].sum() * (two[e].astype(float) @ (h / (1 + np.exp(-h)) * (three[e] @ x[t])))
            )
    inputs = [x, router, one, None, two, None, three]
    attributes = {"activation_type": "silu", "k": 2}
    check("MoE", Case(inputs, attributes, expected=[expected.astype(np.float32)]), PRODUCT, traced=traced)
