"""Conversions: every pair of dtypes in both forms, the tables of the standard, strings, bits."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import Bench, agree, compare, host_outputs, traced_outputs
from transmuter_async.errors import NeedsValue, OperatorError
from transmuter_async.graph.dtypes import element_type_of, parse_dtype
from transmuter_async.operators import invoke, resolve

rng = np.random.default_rng(0)
NAMES = [
    "float", "double", "float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
    "float8e8m0", "float4e2m1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int4",
    "uint4", "int2", "uint2", "bool",
]  # fmt: skip
WIDE = np.concatenate([
    rng.standard_normal(4000) * 10.0 ** rng.integers(-6, 12, 4000),
    [0, -0.0, np.nan, np.inf, -np.inf, 127.5, 128, -128.5, -129, 255.5, 256, 2147483647, -2147483648, 4294967295, 9.3e18,
     -9.3e18, 1.9e19, 448, 464, 465, 480, 57344, 61440, 61439, 240, 248, 65504, 65520, 7, 5, 0.25, 0.75, -6, 6.1e-5],
])  # fmt: skip


def example(name):
    """All values of an 8-bit dtype, and many of a wider one, those at the limits included."""
    dtype = parse_dtype(name)
    if dtype == np.bool_:
        return np.array([True, False])
    if name in {"float", "double", "float16", "bfloat16"}:
        with np.errstate(over="ignore"):
            return WIDE.astype(np.float32).astype(dtype)
    if dtype.itemsize > 1:
        info = np.iinfo(dtype)
        return np.concatenate(
            [np.array([info.min, info.max, 0, 1], dtype), rng.integers(info.min, info.max, 500, dtype)]
        )
    if dtype.kind == "V" and "int" in name:
        info = ml_dtypes.iinfo(dtype)
        return np.arange(int(info.min), int(info.max) + 1).astype(np.int8).astype(dtype)
    return np.arange(16 if name == "float4e2m1" else 256, dtype=np.uint8).view(dtype)


def every_target():
    """Attributes of Cast for each dtype, each way to saturate and to round."""
    for target in NAMES:
        for saturate in (1, 0) if target.startswith("float8") else (1,):
            for round_mode in ("up", "down", "nearest") if target == "float8e8m0" else ("up",):
                yield {"to": element_type_of(parse_dtype(target)), "saturate": saturate, "round_mode": round_mode}


@pytest.mark.parametrize("source", NAMES)
def test_both_forms_convert_every_pair_alike(source):
    x = example(source)
    definition = resolve("", "Cast", 25)
    runner = {"context": Bench("Cast", "", 25, 1, 1)}

    def cast_all(value):
        return [invoke(definition, [value], attributes, runner)[0] for attributes in every_target()]

    # One program for all: compiling is what takes the time.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        traced = [np.asarray(y) for y in jax.jit(cast_all)(x)]
    for attributes, one, other in zip(every_target(), cast_all(x), traced, strict=True):
        assert element_type_of(one.dtype) == attributes["to"]
        assert one.shape == x.shape
        agree(other, one, what=f"{source} by {attributes}")


@pytest.mark.parametrize(
    "target", ["float16", "bfloat16", "float8e4m3fn", "float8e5m2", "float8e4m3fnuz", "int4", "uint8"]
)
def test_values_in_range_are_rounded_to_nearest_even(target):
    dtype = parse_dtype(target)
    x = rng.uniform(-7, 7, 3000).astype(np.float32)
    if target == "uint8":
        x = abs(x)
    integer = target in {"int4", "uint8"}
    expected = np.trunc(x).astype(np.int8).astype(dtype) if integer else x.astype(dtype)
    compare("Cast", [x], {"to": element_type_of(dtype)}, domain="", opset=21, expected=[expected])


@pytest.mark.parametrize(
    ("target", "largest"),
    [("float8e4m3fn", 448), ("float8e4m3fnuz", 240), ("float8e5m2", 57344), ("float8e5m2fnuz", 57344)],
)
def test_the_table_of_float8(target, largest):
    dtype = parse_dtype(target)
    x = np.array([np.inf, -np.inf, largest * 2, -largest * 2, np.nan, largest], np.float32)
    to = {"to": element_type_of(dtype)}
    expected = np.array([largest, -largest, largest, -largest, np.nan, largest]).astype(dtype)
    compare("Cast", [x], to, domain="", opset=19, expected=[expected])
    over = np.inf if target == "float8e5m2" else np.nan
    expected = np.array([over, -over, over, -over, np.nan, largest]).astype(dtype)
    compare("Cast", [x], {**to, "saturate": 0}, domain="", opset=19, expected=[expected])
    compare("CastLike", [x, np.zeros(1, dtype)], {"saturate": 0}, domain="", opset=19, expected=[expected])


def test_powers_of_two_round_by_the_mode():
    x = np.array([1.0, 1.2, 1.5, 1.75, 3.0, 0.0, np.nan, np.inf, 2.0**127 * 1.9], np.float32)
    for mode, expected in {
        "up": [1, 2, 2, 2, 4, 2.0**-127, np.nan, 2.0**127, 2.0**127],
        "down": [1, 1, 1, 1, 2, 2.0**-127, np.nan, 2.0**127, 2.0**127],
        "nearest": [1, 1, 2, 2, 4, 2.0**-127, np.nan, 2.0**127, 2.0**127],
    }.items():
        result = np.array(expected).astype(ml_dtypes.float8_e8m0fnu)
        compare("Cast", [x], {"to": 24, "round_mode": mode}, domain="", opset=24, expected=[result])
    result = np.array([1, 1, 2, 2, 4, np.nan, np.nan, np.nan, np.nan]).astype(ml_dtypes.float8_e8m0fnu)
    attributes = {"to": 24, "round_mode": "nearest", "saturate": 0}
    compare("Cast", [x], attributes, domain="", opset=24, expected=[result])
    with pytest.raises(ValueError, match="round_mode"):
        host_outputs("Cast", [x], {"to": 24, "round_mode": "odd"}, domain="", opset=24)


def test_float6_is_known_on_the_host_and_asks_for_it():
    x = np.array([0.25, -1.0, 100, -100], np.float32)
    for number, dtype, largest in ((27, ml_dtypes.float6_e2m3fn, 7.5), (28, ml_dtypes.float6_e3m2fn, 28)):
        (y,) = host_outputs("Cast", [x], {"to": number}, domain="", opset=28)
        agree(y, np.array([0.25, -1, largest, -largest]).astype(dtype))
        with pytest.raises(NeedsValue, match="float6"):
            traced_outputs("Cast", [x], {"to": number}, domain="", opset=28)


def test_out_of_range_floats_to_narrow_integers_as_onnxruntime():
    x = np.array([-1.0, 300.0, 70000.0, -129.0], np.float32)
    for to in (2, 3, 4, 5):
        compare("Cast", [x], {"to": to}, domain="", opset=21)


def test_out_of_range_floats_to_wide_integers_are_the_nearest_and_nan_is_zero():
    x = np.array([1e20, -1e20, np.inf, -np.inf, np.nan])
    for dtype in (np.int32, np.int64):
        info = np.iinfo(dtype)
        expected = np.array([info.max, info.min, info.max, info.min, 0], dtype)
        compare("Cast", [x], {"to": element_type_of(np.dtype(dtype))}, domain="", opset=21, expected=[expected])


def test_integers_lose_their_high_bits():
    x = np.array([200, 2**40 + 7, -1], np.int64)
    compare("Cast", [x], {"to": 3}, domain="", opset=21, expected=[np.array([-56, 7, -1], np.int8)])
    compare("Cast", [x], {"to": 12}, domain="", opset=21, expected=[np.array([200, 7, 2**32 - 1], np.uint32)])


def test_64_bit_integers_are_never_wrapped():
    """jax#18385."""
    x = np.array([2**31 + 5, -(2**62) - 1, 2**63 - 1])
    compare("Cast", [x], {"to": 7}, domain="", opset=21, expected=[x])
    compare("Cast", [x.astype(np.uint64)], {"to": 13}, domain="", opset=21, expected=[x.astype(np.uint64)])


def test_strings_to_numbers():
    x = np.array(["1.5", "INF", "+inf", "-INF", "NaN", "1e-5", "1E8"], object)
    expected = np.float32([1.5, np.inf, np.inf, -np.inf, np.nan, 1e-5, 1e8])
    compare("Cast", [x], {"to": 1}, domain="", opset=21, traced=False, expected=[expected])
    whole = np.array(["100.5", "-7", "9223372036854775807"], object)
    compare("Cast", [whole], {"to": 7}, domain="", opset=21, traced=False, expected=[np.array([100, -7, 2**63 - 1])])
    bits = np.array(["1", "0"], object)
    compare("Cast", [bits], {"to": 9}, domain="", opset=21, traced=False, expected=[np.array([True, False])])
    for text in ("Hello World!", "1_000", ""):
        with pytest.raises(OperatorError, match="is no"):
            host_outputs("Cast", [np.array([text], object)], {"to": 1}, domain="", opset=21)
    with pytest.raises(OperatorError, match="outside of the range"):
        host_outputs("Cast", [np.array(["300"], object)], {"to": 2}, domain="", opset=21)


def test_numbers_to_strings():
    cases = [
        (
            np.float32([1.5, 314.15926, 10000, np.nan, np.inf, -np.inf]),
            ["1.5", "314.15927", "10000", "NaN", "INF", "-INF"],
        ),
        (np.array([1 / 3, 1e20]), ["0.3333333333333333", "100000000000000000000"]),
        (np.array([2**63 - 1, -5]), ["9223372036854775807", "-5"]),
        (np.array([True, False]), ["1", "0"]),
        (np.array([1.5], ml_dtypes.bfloat16), ["1.5"]),
        (np.array([-3], ml_dtypes.int4), ["-3"]),
    ]
    for x, texts in cases:
        (y,) = host_outputs("Cast", [x], {"to": 8}, domain="", opset=21)
        assert y.dtype == object
        assert y.tolist() == texts
    with pytest.raises(NeedsValue, match="text"):
        traced_outputs("Cast", [np.float32([1])], {"to": 8}, domain="", opset=21)


def test_older_versions():
    x = np.array([1.7, -1.7], np.float32)
    compare("Cast", [x], {"to": "INT32"}, domain="", opset=1, expected=[np.array([1, -1], np.int32)])
    compare("Cast", [x], {"to": 6}, domain="", opset=6, expected=[np.array([1, -1], np.int32)])
    compare("CastLike", [x, np.zeros(0, np.int64)], domain="", opset=15, expected=[np.array([1, -1])])
    with pytest.raises(OperatorError, match="element type 99"):
        host_outputs("Cast", [x], {"to": 99}, domain="", opset=13)


BITS = {1: ["bool", "int8", "uint8", "float8e4m3fn", "float8e8m0"], 2: ["float16", "bfloat16", "int16", "uint16"],
        4: ["float", "int32", "uint32"], 8: ["double", "int64", "uint64", "complex64"]}  # fmt: skip


@pytest.mark.parametrize(("width", "source"), [(w, name) for w, names in BITS.items() for name in names])
def test_bits_are_kept(width, source):
    dtype = parse_dtype(source)
    octets = rng.integers(0, 256, 24 * width).astype(np.uint8)
    if source == "bool":
        octets = octets % 2
    x = octets.view(dtype).reshape(2, 3, -1)
    for target in BITS[width]:
        expected = octets.view(parse_dtype(target)) if target != "bool" else octets != 0
        for run in (host_outputs, traced_outputs):
            (y,) = run("BitCast", [x], {"to": element_type_of(parse_dtype(target))}, domain="", opset=26)
            assert y.dtype == expected.dtype
            assert y.shape == x.shape
            assert y.tobytes() == expected.tobytes()


def test_narrow_bits_are_kept():
    x = np.arange(16, dtype=np.uint8).astype(ml_dtypes.uint4)
    signed = np.array([*range(8), *range(-8, 0)], np.int8).astype(ml_dtypes.int4)
    floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).astype(
        ml_dtypes.float4_e2m1fn
    )
    for a in (x, signed, floats):
        for b in (x, signed, floats):
            compare("BitCast", [a], {"to": element_type_of(b.dtype)}, domain="", opset=26, expected=[b])
    with pytest.raises(OperatorError, match="different widths"):
        host_outputs("BitCast", [x], {"to": 2}, domain="", opset=26)
