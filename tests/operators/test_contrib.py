"""com.microsoft against onnxruntime: fused operators, norms, odds and ends, tokens; and those without a CPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operators.cases import EXACT, FLOAT, Case, Draw, Tolerance, check, examples, few_examples
from tests.operators.oracle import host_outputs, onnxruntime_outputs
from transmuter_async.operators import resolve, supported

HALF = Tolerance(4e-3, 4e-3, "float16 has 11 bits, and onnxruntime's kernels round sums in between")
DEEP = Tolerance(1e-3, 1e-4, "inverses, interpolations and distances amplify float32 rounding")

TOLERANCES = {
    "SkipLayerNormalization": HALF,
    "SkipSimplifiedLayerNormalization": HALF,
    "ScaledSiLU": HALF,
    "BiasAdd": FLOAT,
    "Inverse": Tolerance(5e-2, 5e-3, "a float32 inverse loses the digits of the condition number"),
    "GridSample": DEEP,
    "CDist": DEEP,
    "CropAndResize": DEEP,
    "GroupNorm": DEEP,
    "SkipGroupNorm": DEEP,
}
EXACTLY = frozenset(
    {
        "SampleOp",
        "ExpandDims",
        "GatherND",
        "Trilu",
        "Range",
        "Pad",
        "Unique",
        "UnfoldTensor",
        "DynamicTimeWarping",
        "MaxpoolWithMask",
        "MurmurHash3",
        "NGramRepeatBlock",
        "BifurcationDetector",
        "Tokenizer",
        "RemovePadding",
        "RestorePadding",
        "IsAllFinite",
        "RelativePositionBias",
    }
)
CASES: dict[str, Callable[[Draw], Case]] = {}


def case(function: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
    CASES[function.__name__] = function
    return function


def _dtype(d: Draw) -> Any:
    return d.pick((np.float32, np.float32, np.float16))


# --- activations ----------------------------------------------------------------------------------------------------------


@case
def Gelu(d: Draw) -> Case:
    return Case([d.floats(*d.shape(d.size(0, 3)), scale=3)])


@case
def BiasGelu(d: Draw) -> Case:
    hidden = d.size(1, 5)
    return Case([d.floats(*d.shape(d.size(0, 2)), hidden), d.floats(hidden)])


@case
def FastGelu(d: Draw) -> Case:
    hidden = d.size(1, 5)
    return Case([d.floats(*d.shape(d.size(0, 2)), hidden, scale=3), d.floats(hidden) if d.flag() else None])


@case
def QuickGelu(d: Draw) -> Case:
    return Case([d.floats(*d.shape(d.size(0, 3)))], {"alpha": d.pick((1.0, 1.702))})


@case
def ScaledSiLU(d: Draw) -> Case:
    dtype = _dtype(d)
    return Case([d.floats(*d.shape(2), dtype=dtype), np.asarray(0.7, np.float32) if d.flag() else None], {"alpha": 0.4})


# --- norms ----------------------------------------------------------------------------------------------------------------


def _skip(d: Draw, simplified: bool) -> Case:
    batch, length, hidden = d.size(1, 3), d.size(1, 4), d.size(1, 6)
    dtype = _dtype(d)
    scale = d.pick((1.0, 1.0, 3000.0)) if simplified else 1.0

    def vector(present: bool) -> Any:
        return d.floats(hidden, dtype=dtype) if present else None

    shape = d.pick(((batch, length, hidden), (1, length, hidden), (length, hidden)))
    inputs = [
        d.floats(batch, length, hidden, scale=scale, dtype=dtype),
        d.floats(*shape, scale=scale, dtype=dtype),
        vector(True),
    ]
    inputs += [vector(d.flag())] if simplified else [vector(d.flag()), vector(d.flag())]
    return Case(inputs, {"epsilon": d.pick((1e-5, 1e-3))}, outputs=4, skip=(1, 2))


@case
def SkipLayerNormalization(d: Draw) -> Case:
    return _skip(d, False)


@case
def SkipSimplifiedLayerNormalization(d: Draw) -> Case:
    return _skip(d, True)


@case
def EmbedLayerNormalization(d: Draw) -> Case:
    batch, length, hidden = d.size(1, 3), d.size(1, 4), d.size(1, 6)
    segments = d.flag()
    ids = d.integers(0, 5, batch, length, dtype=np.int32)
    mask = d.integers(0, 2, batch, length, dtype=np.int32) if d.flag() else None
    places = d.integers(0, 4, d.pick((1, batch)), length, dtype=np.int32) if d.flag() else None
    inputs = [
        ids,
        ids % 2 if segments else None,
        d.floats(5, hidden),
        d.floats(4, hidden),
        d.floats(2, hidden) if segments else None,
        d.floats(hidden),
        d.floats(hidden),
        mask,
        places,
    ]
    return Case(
        inputs,
        {"epsilon": 1e-5, "mask_index_type": 0 if mask is None else 1},
        outputs=3,
        skip=(1,) if mask is None else (),
    )


# --- products -------------------------------------------------------------------------------------------------------------


@case
def FusedMatMul(d: Draw) -> Case:
    rows, inner, columns, batch = d.size(0, 3), d.size(1, 4), d.size(1, 3), d.shape(d.size(0, 2), low=1, high=3)
    flip_a, flip_b, batch_a, batch_b = (int(d.flag()) for _ in range(4))
    a, b = d.floats(*batch, rows, inner), d.floats(*batch, inner, columns)
    if flip_a:
        a = np.swapaxes(a, -1, -2)
    if flip_b:
        b = np.swapaxes(b, -1, -2)
    if batch_a and len(batch):
        a = np.moveaxis(a, -2, 0)
    if batch_b and len(batch):
        b = np.moveaxis(b, -2, 0)
    attributes = {
        "transA": flip_a,
        "transB": flip_b,
        "transBatchA": batch_a if batch else 0,
        "transBatchB": batch_b if batch else 0,
        "alpha": d.pick((1.0, 0.5)),
    }
    return Case([np.ascontiguousarray(a), np.ascontiguousarray(b)], attributes)


@case
def TransposeMatMul(d: Draw) -> Case:
    rows, inner, columns = d.size(0, 3), d.size(1, 4), d.size(1, 3)
    flip = int(d.flag())
    return Case(
        [d.floats(*((inner, rows) if flip else (rows, inner))), d.floats(inner, columns)],
        {"transA": flip, "alpha": 0.3},
    )


@case
def FusedGemm(d: Draw) -> Case:
    rows, inner, columns = d.size(1, 3), d.size(1, 4), d.size(1, 3)
    name, params = d.pick(
        (
            ("Relu", ()),
            ("Elu", (0.3,)),
            ("LeakyRelu", (0.2,)),
            ("Sigmoid", ()),
            ("Tanh", ()),
            ("Softplus", ()),
            ("Softsign", ()),
        )
    )
    flip_a, flip_b = int(d.flag()), int(d.flag())
    attributes = {"activation": name, "alpha": 0.5, "beta": d.pick((0.0, 2.0)), "transA": flip_a, "transB": flip_b}
    attributes |= {"activation_alpha": params[0]} if params else {}
    a = d.floats(*((inner, rows) if flip_a else (rows, inner)))
    b = d.floats(*((columns, inner) if flip_b else (inner, columns)))
    return Case([a, b, d.floats(*d.pick(((columns,), (1, columns), (rows, columns))))], attributes)


@case
def FusedConv(d: Draw) -> Case:
    group, per, filters = d.pick(((1, 2, 3), (2, 1, 4))), 0, 0
    group, per, filters = group
    size, kernel = d.size(3, 6), d.size(1, 3)
    name, params = d.pick(
        (
            (None, None),
            ("Relu", None),
            ("Tanh", None),
            ("Sigmoid", None),
            ("LeakyRelu", [0.2]),
            ("Clip", [-0.5, 0.5]),
            ("HardSigmoid", [0.3, 0.4]),
        )
    )
    out = size + 2 - kernel + 1
    inputs = [
        d.floats(1, group * per, size, size),
        d.floats(filters, per, kernel, kernel),
        d.floats(filters),
        d.floats(1, filters, out, out) if d.flag() else None,
    ]
    return Case(inputs, {"activation": name, "activation_params": params, "group": group, "pads": [1, 1, 1, 1]})


# --- odds and ends --------------------------------------------------------------------------------------------------------


@case
def SampleOp(d: Draw) -> Case:
    return Case([d.floats(*d.shape(2))])


@case
def ExpandDims(d: Draw) -> Case:
    rank = d.size(0, 3)
    return Case([d.floats(*d.shape(rank)), np.asarray(d.size(-rank - 1, rank), np.int32)])


@case
def GatherND(d: Draw) -> Case:
    shape = d.shape(3, low=1)
    depth = d.size(1, 3)
    index = np.stack([d.integers(-n, n, 2, 2) for n in shape[:depth]], axis=-1)
    return Case([d.floats(*shape), index.astype(d.pick((np.int32, np.int64)))])


@case
def Trilu(d: Draw) -> Case:
    return Case(
        [d.floats(*d.shape(d.size(2, 3))), np.asarray(d.size(-4, 4)) if d.flag() else None], {"upper": int(d.flag())}
    )


@case
def GridSample(d: Draw) -> Case:
    attributes = {
        "mode": d.pick(("bilinear", "nearest", "bicubic")),
        "padding_mode": d.pick(("zeros", "border", "reflection")),
        "align_corners": int(d.flag()),
    }
    x = d.floats(2, d.size(1, 2), d.size(2, 5), d.size(2, 5))
    return Case([x, d.rng.uniform(-1.2, 1.2, (2, d.size(1, 3), d.size(1, 3), 2)).astype(np.float32)], attributes)


@case
def Range(d: Draw) -> Case:
    dtype = d.pick((np.int32, np.int64, np.float32, np.int16))
    shape = d.pick(((), (1,)))
    delta = d.pick((None, 1, 2, 3))
    return Case(
        [np.full(shape, value, dtype) for value in (d.size(-3, 3), d.size(-3, 8))]
        + [None if delta is None else np.full(shape, delta, dtype)]
    )


@case
def Pad(d: Draw) -> Case:
    mode = d.pick(("constant", "reflect", "edge"))
    shape = (d.size(3, 5), d.size(3, 5))
    pads = d.integers(0, 3, 4)
    if mode == "constant" and d.flag():
        pads[d.size(0, 3)] = -1
    return Case(
        [
            d.floats(*shape),
            pads.reshape(d.pick(((4,), (1, 4)))),
            np.asarray([1.5], np.float32) if mode == "constant" and d.flag() else None,
        ],
        {"mode": mode},
    )


@case
def Unique(d: Draw) -> Case:
    return Case([d.integers(0, 5, d.size(1, 9)).astype(np.float32)], outputs=3)


@case
def UnfoldTensor(d: Draw) -> Case:
    shape = d.shape(3, low=1, high=5)
    dim = d.size(-3, 2)
    return Case([d.floats(*shape)], {"dim": dim, "size": d.size(1, shape[dim]), "step": d.size(1, 3)})


@case
def Inverse(d: Draw) -> Case:
    n = d.size(1, 4)
    return Case([d.floats(*d.shape(d.size(0, 2), low=1), n, n) + 3 * np.eye(n, dtype=np.float32)])


@case
def CDist(d: Draw) -> Case:
    width = d.size(1, 5)
    dtype = d.pick((np.float32, np.float64))
    metric = d.pick(("sqeuclidean", "euclidean"))
    return Case(
        [d.floats(d.size(1, 4), width, dtype=dtype), d.floats(d.size(1, 4), width, dtype=dtype) + 3], {"metric": metric}
    )


@case
def DynamicTimeWarping(d: Draw) -> Case:
    shape = (d.size(1, 6), d.size(1, 6))
    cost = d.integers(0, 3, *shape).astype(np.float32) if d.flag() else d.floats(*shape)
    return Case([cost[None] if d.flag() else cost])


@case
def CropAndResize(d: Draw) -> Case:
    count = d.size(1, 3)
    boxes = d.rng.uniform(-0.1, 1.1, (count, 4)).astype(np.float32)
    inputs = [
        d.floats(2, 2, d.size(2, 5), d.size(2, 5)),
        boxes,
        d.integers(0, 2, count, dtype=np.int32),
        np.asarray([d.size(1, 4), d.size(1, 4)], np.int32),
    ]
    return Case(inputs, {"mode": d.pick(("bilinear", "nearest")), "extrapolation_value": 0.5})


@case
def ConvTransposeWithDynamicPads(d: Draw) -> Case:
    inputs = [
        d.floats(1, 2, d.size(2, 4), d.size(2, 4)),
        d.floats(2, 3, 3, 3),
        d.integers(0, 2, 4),
        d.floats(3) if d.flag() else None,
    ]
    return Case(inputs, {"strides": [d.size(1, 3), d.size(1, 2)]})


@case
def MaxpoolWithMask(d: Draw) -> Case:
    rank = d.size(1, 3)
    sizes = d.shape(rank, low=3, high=5)
    mask = (d.rng.random((1, 1, *sizes)) > 0.3).astype(np.int32)
    attributes = {
        "kernel_shape": [d.size(1, 3) for _ in range(rank)],
        "strides": [d.size(1, 2)] * rank,
        "pads": [d.size(0, 1)] * 2 * rank,
    }
    attributes["kernel_shape"] = [max(k, attributes["pads"][0] + 1) for k in attributes["kernel_shape"]]
    return Case([d.floats(2, 2, *sizes), mask], attributes)


@case
def WordConvEmbedding(d: Draw) -> Case:
    words, length, window = d.size(1, 4), d.size(3, 6), d.size(1, 3)
    sequence = d.integers(0, 5, words, length, dtype=np.int32)
    sequence[:, 0] = d.integers(1, 5, words)
    return Case([sequence, d.floats(4, 1, window, 3), d.floats(4), d.floats(5, 3)])


@case
def SparseToDenseMatMul(d: Draw) -> Case:
    a, b = d.floats(3, 4) * (d.rng.random((3, 4)) < 0.4), d.floats(4, d.size(1, 4))
    alpha = d.pick((1.0, 0.5))
    return Case(
        [a.astype(np.float32), b], {"alpha": alpha}, expected=[(alpha * (a.astype(float) @ b)).astype(np.float32)]
    )


# --- tokens ---------------------------------------------------------------------------------------------------------------


@case
def MurmurHash3(d: Draw) -> Case:
    attributes = {"positive": int(d.flag()), "seed": d.size(0, 9)}
    shape = d.shape(d.size(1, 2), low=1)
    kind = d.pick(("I", "i", "Q", "q", "f", "d", "O"))
    if kind == "O":
        texts = np.asarray(["", "a", "ab", "abc", "abcd", "hällo wörld", "x" * 13], object)
        return Case([d.rng.choice(texts, shape)], attributes)
    if kind in "fd":
        return Case([d.floats(*shape, dtype=kind)], attributes)
    return Case(
        [d.codes(np.dtype(kind), *shape) if kind != "Q" else d.integers(0, 2**62, *shape, dtype=np.uint64)], attributes
    )


@case
def NGramRepeatBlock(d: Draw) -> Case:
    batch = d.size(1, 3)
    return Case([d.integers(0, 4, batch, d.size(1, 9)), d.floats(batch, 4)], {"ngram_size": d.size(1, 4)})


@case
def BifurcationDetector(d: Draw) -> Case:
    source = d.integers(0, 4, d.size(2, 6))
    start = d.size(0, len(source))
    predicted = np.concatenate([source[start:], [3]])
    if d.flag():
        predicted[d.size(0, len(predicted) - 1)] = 2
    inputs = [source, d.integers(0, 4, d.size(1, 4)), np.asarray([start]), predicted if d.flag() else None]
    return Case(inputs, {"min_ngram_size": d.size(1, 2), "max_ngram_size": d.size(2, 4)}, outputs=2)


@case
def Tokenizer(d: Draw) -> Case:
    texts = d.rng.choice(
        np.asarray(["Hello World", "I love  it!", "aab xaba", "", "é b"], object), d.shape(d.size(1, 2), low=1)
    )
    how = d.pick(
        (
            {"separators": [" "]},
            {"separators": ["a|ab", " +"]},
            {"separators": ["[eo]", "l"]},
            {"tokenexp": "[a-z]+"},
            {"tokenexp": "(a|ab)(c|b)?"},
            {"separators": [""]},
            {"tokenexp": "."},
        )
    )
    return Case(
        [texts],
        how
        | {
            "mark": int(d.flag()),
            "mincharnum": d.size(1, 2) if how not in ({"separators": [""]}, {"tokenexp": "."}) else 1,
            "pad_value": "#",
        },
    )


# --- without a kernel of onnxruntime: float64 computations ----------------------------------------------------------------


@case
def BiasAdd(d: Draw) -> Case:
    x, bias, skip = d.floats(2, 3, 4), d.floats(4), d.floats(2, 3, 4)
    return Case([x, bias, skip], expected=[(x.astype(float) + bias + skip).astype(np.float32)])


@case
def BiasSplitGelu(d: Draw) -> Case:
    from math import erf

    half = d.size(1, 4)
    x, bias = d.floats(2, d.size(1, 3), 2 * half), d.floats(2 * half)
    both = x.astype(float) + bias
    gelu = both[..., half:] * 0.5 * (1 + np.vectorize(erf)(both[..., half:] / np.sqrt(2)))
    return Case([x, bias], expected=[(both[..., :half] * gelu).astype(np.float32)])


def _grouped(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, groups: int, silu: int) -> np.ndarray:
    parts = x.astype(float).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean = parts.mean((1, 3), keepdims=True)
    y = ((parts - mean) / np.sqrt(parts.var((1, 3), keepdims=True) + 1e-5)).reshape(x.shape) * gamma + beta
    return np.asarray(y / (1 + np.exp(-y)) if silu else y, np.float32)


@case
def GroupNorm(d: Draw) -> Case:
    groups, each, silu, last = d.size(1, 3), d.size(1, 3), int(d.flag()), int(d.flag())
    channels = groups * each
    x, gamma, beta = d.floats(2, 2, 3, channels), d.floats(channels), d.floats(channels)
    expected = _grouped(x, gamma, beta, groups, silu)
    if not last:
        x, expected = np.moveaxis(x, -1, 1), np.moveaxis(expected, -1, 1)
    return Case([x, gamma, beta], {"groups": groups, "activation": silu, "channels_last": last}, expected=[expected])


@case
def SkipGroupNorm(d: Draw) -> Case:
    groups, each, silu = d.size(1, 3), d.size(1, 3), int(d.flag())
    channels = groups * each
    x, gamma, beta, bias = d.floats(2, 2, 3, channels), d.floats(channels), d.floats(channels), d.floats(channels)
    skip = d.floats(*d.pick(((2, 2, 3, channels), (2, 1, 1, channels), (2, channels))))
    total = x.astype(float) + (skip[:, None, None] if skip.ndim == 2 else skip) + bias
    expected = [_grouped(total, gamma, beta, groups, silu), total.astype(np.float32)]
    return Case([x, gamma, beta, skip, bias], {"groups": groups, "activation": silu}, outputs=2, expected=expected)


@case
def NhwcConv(d: Draw) -> Case:
    x, w = d.floats(1, 2, d.size(3, 5), d.size(3, 5)), d.floats(3, 2, 2, 2)
    pads = [int(p) for p in d.integers(0, 2, 4)]
    expected = onnxruntime_outputs("Conv", [x, w], {"pads": pads}, domain="")
    return Case(
        [np.moveaxis(x, 1, -1), np.moveaxis(w, 1, -1)], {"pads": pads}, expected=[np.moveaxis(expected[0], 1, -1)]
    )


@case
def NhwcFusedConv(d: Draw) -> Case:
    x, w = d.floats(1, 2, d.size(3, 5), d.size(3, 5)), d.floats(3, 2, 2, 2)
    attributes = {"activation": d.pick(("Relu", "Tanh"))}
    expected = onnxruntime_outputs("FusedConv", [x, w], attributes)
    return Case([np.moveaxis(x, 1, -1), w], attributes, expected=[np.moveaxis(expected[0], 1, -1)])


@case
def GemmFastGelu(d: Draw) -> Case:
    x, w, bias = d.floats(2, 3), d.floats(3, d.size(1, 4)), None
    z = x.astype(float) @ w
    y = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return Case([x, w, bias], expected=[y.astype(np.float32)])


@case
def FusedMatMulActivation(d: Draw) -> Case:
    a, b = d.floats(2, 3), d.floats(3, d.size(1, 4))
    z = 0.5 * (a.astype(float) @ b)
    return Case(
        [a, b],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "alpha": 0.5},
        expected=[np.where(z >= 0, z, 0.2 * z).astype(np.float32)],
    )


@case
def ComplexMul(d: Draw) -> Case:
    a, b = d.floats(*d.shape(2, low=1), 2), d.floats(1, 2)
    z = (a[..., 0] + 1j * a[..., 1]) * (b[..., 0] + 1j * b[..., 1])
    return Case([a, b], expected=[np.stack([z.real, z.imag], -1).astype(np.float32)])


@case
def ComplexMulConj(d: Draw) -> Case:
    a, b = d.floats(*d.shape(2, low=1), 2), d.floats(1, 2)
    z = (a[..., 0] + 1j * a[..., 1]) * (b[..., 0] - 1j * b[..., 1])
    return Case([a, b], expected=[np.stack([z.real, z.imag], -1).astype(np.float32)])


@case
def Rfft(d: Draw) -> Case:
    x = d.floats(*d.shape(d.size(0, 2), low=1), 2 * d.size(1, 4))
    z = np.fft.rfft(x.astype(float))
    return Case([x], expected=[np.stack([z.real, z.imag], -1).astype(np.float32)])


@case
def Irfft(d: Draw) -> Case:
    x = d.floats(2, d.size(2, 5), 2)
    return Case(
        [x], {"signal_ndim": 1}, expected=[np.fft.irfft(x[..., 0] + 1j * x[..., 1].astype(float)).astype(np.float32)]
    )


@case
def IsAllFinite(d: Draw) -> Case:
    bad = d.pick((0.0, np.nan, np.inf, -np.inf))
    which = d.pick(({}, {"isnan_only": 1}, {"isinf_only": 1}))
    x = d.floats(2, 3)
    x[1, 1] = bad
    hit = np.isnan(bad) if "isnan_only" in which else np.isinf(bad) if "isinf_only" in which else not np.isfinite(bad)
    return Case([d.floats(2), x], which, expected=[np.asarray(not hit)])


@case
def RemovePadding(d: Draw) -> Case:
    batch, length = d.size(1, 3), d.size(1, 4)
    x, counts = d.floats(batch, length, 3), d.integers(0, length + 1, batch, dtype=np.int32)
    real = [b * length + t for b in range(batch) for t in range(counts[b])]
    rest = [b * length + t for b in range(batch) for t in range(counts[b], length)]
    expected = [
        x.reshape(-1, 3)[real].reshape(-1, 3),
        np.asarray([*real, *rest], np.int32).reshape(batch, length),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.asarray([counts.max()], np.int32),
    ]
    return Case([x, counts], outputs=4, expected=expected, static=(1,))


@case
def RestorePadding(d: Draw) -> Case:
    batch, length = d.size(1, 3), d.size(1, 4)
    order = d.rng.permutation(batch * length).astype(np.int32)
    rows = d.floats(d.size(0, batch * length), 3)
    flat = np.zeros((batch * length, 3), np.float32)
    flat[order[: len(rows)]] = rows
    return Case([rows, order.reshape(batch, length)], expected=[flat.reshape(batch, length, 3)])


@case
def RelativePositionBias(d: Draw) -> Case:
    buckets, longest, both = 2 * d.size(2, 8), d.pick((16, 128)), int(d.flag())
    table = d.floats(buckets, 2)
    queries, keys = d.size(1, 40), d.size(1, 40)
    expected = np.zeros((1, 2, queries, keys), np.float32)
    for i in range(queries):
        for j in range(
            keys
        ):  # the bucket rule of the T5 paper's code, in words: near ones exactly, far ones by logarithm
            back, offset, count = i - j, 0, buckets
            if both:
                count //= 2
                offset, back = (count if back < 0 else 0), abs(back)
            back, exact = max(back, 0), max(1, count // 2)
            if back >= exact:
                ratio = np.log(np.float32(back) / np.float32(exact)) / np.float32(np.log(longest / exact))
                back = min(exact + int(np.float32(ratio) * np.float32(count - exact)), count - 1)
            expected[0, :, i, j] = table[offset + back]
    inputs = [table, np.asarray([queries]), np.asarray([keys])]
    return Case(inputs, {"is_bidirectional": both, "max_distance": longest}, expected=[expected])


@case
def GatedRelativePositionBias(d: Draw) -> Case:
    batch, length, heads, size, width = d.size(1, 2), d.size(1, 3), d.size(1, 3), d.size(1, 3), d.size(1, 2)
    q, qb, pos = d.floats(batch, length, heads * size), d.floats(heads * size), d.floats(1, heads, length, length)
    w, b, eco = d.floats(size, 2 * width), d.floats(2 * width), d.floats(1, heads, 1, 1)
    split = (q.astype(float) + qb).reshape(batch, length, heads, size).swapaxes(1, 2)
    gates = 1 / (1 + np.exp(-(split @ w + b).reshape(batch, heads, length, 2, width).sum(-1)))
    gate = gates[..., :1] * (gates[..., 1:] * eco - 1) + 2
    return Case([q, qb, pos, w, b, eco], {"num_heads": heads}, expected=[(gate * pos).astype(np.float32)])


def _packed_attention(parts: list[np.ndarray], heads: int, ends: np.ndarray, bias: Any = None) -> np.ndarray:
    rows = []
    for b, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        q, k, v = (p[start:end].reshape(end - start, heads, -1).swapaxes(0, 1).astype(float) for p in parts)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
        if bias is not None:
            scores = scores + bias[0 if len(bias) == 1 else b, :, : end - start, : end - start]
        weights = np.exp(scores - scores.max(-1, keepdims=True)) if end > start else scores
        weights = weights / weights.sum(-1, keepdims=True)
        rows.append((weights @ v).swapaxes(0, 1).reshape(end - start, -1))
    return np.concatenate(rows).astype(np.float32)


@case
def PackedMultiHeadAttention(d: Draw) -> Case:
    heads, size = d.size(1, 2), d.size(1, 3)
    lengths = [d.size(1, 3) for _ in range(2)]
    ends = np.asarray([0, *np.cumsum(lengths)], np.int32)
    q, k, v = (d.floats(ends[-1], heads * size) for _ in range(3))
    added = d.floats(d.pick((1, 2)), heads, 3, 3) if d.flag() else None
    offsets = np.zeros((2, 3), np.int32)
    inputs = [q, k, v, None, offsets, ends, added]
    return Case(inputs, {"num_heads": heads}, expected=[_packed_attention([q, k, v], heads, ends, added)])


@case
def PackedAttention(d: Draw) -> Case:
    heads, size = d.size(1, 2), d.size(1, 3)
    ends = np.asarray([0, 2, 5], np.int32)
    x, w, b = d.floats(5, 4), d.floats(4, 3 * heads * size), d.floats(3 * heads * size)
    parts = np.split(x.astype(float) @ w + b, 3, axis=1)
    return Case(
        [x, w, b, np.zeros((2, 3), np.int32), ends],
        {"num_heads": heads},
        expected=[_packed_attention(parts, heads, ends)],
    )


def _tolerance(name: str) -> Tolerance:
    return EXACT if name in EXACTLY else TOLERANCES.get(name, FLOAT)


@pytest.mark.parametrize("name", CASES)
@examples
@given(data=st.data())
def test_equals_the_oracle(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), _tolerance(name))


def _traceable(name: str) -> bool:
    definition = resolve("com.microsoft", name, 1)
    return definition is not None and not definition.host


@pytest.mark.parametrize("name", [name for name in CASES if _traceable(name)])
@few_examples
@given(data=st.data())
def test_program_equals_the_oracle(name: str, data: st.DataObject) -> None:
    check(name, CASES[name](Draw(data)), _tolerance(name), traced=True)


@examples
@given(data=st.data())
def test_simplified_layer_normalization_of_the_default_domain(data: st.DataObject) -> None:
    d = Draw(data)
    hidden = d.size(1, 6)
    dtype = _dtype(d)
    inputs = [
        d.floats(*d.shape(d.size(1, 2)), hidden, scale=d.pick((1.0, 3000.0)), dtype=dtype),
        d.floats(hidden, dtype=dtype),
    ]
    check("SimplifiedLayerNormalization", Case(inputs, {"epsilon": 1e-5}), HALF, domain="")


def test_rms_norm_of_large_halves_does_not_collapse() -> None:
    """float16 squares overflow above 256; a sum in float32 does not."""
    x = np.full((1, 2, 8), 9000, np.float16)
    ones = np.ones(8, np.float16)
    y = host_outputs("SkipSimplifiedLayerNormalization", [x, x, ones], {}, outputs=4)[0]
    np.testing.assert_allclose(y.astype(np.float32), 1, rtol=1e-3)


def test_every_operator_of_the_domain_is_tested() -> None:
    """A definition without examples is found here, whichever of the files it belongs to."""
    from tests.operators import (
        test_contrib_attention,
        test_contrib_paged,
        test_contrib_quantized,
        test_contrib_search_examples,
        test_contrib_state,
    )

    modules = (test_contrib_attention, test_contrib_paged, test_contrib_quantized, test_contrib_state)
    tested = set(CASES).union(*(module.CASES for module in modules)) | set(test_contrib_search_examples.CASES)
    ours = {o.name for o in supported() if o.domain == "com.microsoft"}
    assert ours - tested == set()
