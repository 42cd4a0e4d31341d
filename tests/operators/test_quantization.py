"""Quantisation, dequantisation and integer products against onnxruntime and exact integers, in both forms."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import agree, compare, host_outputs, traced_outputs
from transmuter_async.errors import OperatorError

rng = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_quantize_and_dequantize_as_onnxruntime(dtype, axis):
    x = (rng.standard_normal((3, 4, 5)) * 40).astype(np.float32)
    shape = () if axis is None else x.shape[axis]
    info = np.iinfo(dtype)
    scale = np.asarray(rng.uniform(0.1, 0.5, shape), np.float32)
    zero = np.asarray(rng.integers(info.min // 2, info.max // 2, shape), dtype)
    attributes = {"axis": 1 if axis is None else axis}
    compare("QuantizeLinear", [x, scale, zero], attributes, domain="", opset=21)
    q = rng.integers(info.min, info.max, x.shape).astype(dtype)
    compare("DequantizeLinear", [q, scale, zero], attributes, domain="", opset=21, rtol=1e-6)


def test_half_way_rounds_to_even_before_the_zero_point_is_added():
    """Xilinx/onnx-mlir#138."""
    for scale in (1.0, 0.3, 0.007, 1.7, 1 / 255):
        steps = np.arange(-40, 40) + 0.5
        x = (steps * scale).astype(np.float32)
        exact = np.rint(x.astype(np.float32) / np.float32(scale))
        for dtype, zero in ((np.uint8, 3), (np.int8, -5), (np.int8, 1)):
            info = np.iinfo(dtype)
            expected = np.clip(exact + zero, info.min, info.max).astype(dtype)
            inputs = [x, np.asarray(scale, np.float32), np.asarray(zero, dtype)]
            compare("QuantizeLinear", inputs, domain="", opset=13, expected=[expected])
            compare("QuantizeLinear", inputs, domain="", opset=13, static=(1, 2))


def test_quantize_saturates_and_nan_is_zero():
    x = np.float32([1e20, -1e20, np.inf, -np.inf, np.nan, 300, -300])
    compare("QuantizeLinear", [x, np.asarray(1, np.float32), np.asarray(3, np.uint8)], domain="", opset=21)
    expected = np.array([127, -128, 127, -128, 0, 127, -128], np.int8)
    zero = np.asarray(0, np.int8)
    compare("QuantizeLinear", [x, np.asarray(1, np.float32), zero], domain="", opset=21, expected=[expected])


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2])
def test_narrow_integers(dtype):
    info = ml_dtypes.iinfo(dtype)
    x = np.arange(-12, 12, dtype=np.float32).reshape(4, 6) / 2
    scale, zero = np.float32([0.5, 1, 2, 4]), np.array([0, 1, 0, 1], np.int8)
    expected = np.clip(np.rint(x / scale[:, None]) + zero[:, None], int(info.min), int(info.max)).astype(np.int8)
    inputs = [x, scale, zero.astype(dtype)]
    compare("QuantizeLinear", inputs, {"axis": 0}, domain="", opset=25, expected=[expected.astype(dtype)])
    wide = (expected - zero[:, None]).astype(np.float32) * scale[:, None]
    inputs = [expected.astype(dtype), scale, zero.astype(dtype)]
    compare("DequantizeLinear", inputs, {"axis": 0}, domain="", opset=25, expected=[wide])


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("block", [2, 3, 5])
def test_blocks_even_where_the_last_is_short(axis, block):
    x = (rng.standard_normal((5, 7)) * 30).astype(np.float32)
    shape = [-(-n // block) if i == axis % 2 else n for i, n in enumerate(x.shape)]
    scale = rng.uniform(0.1, 0.6, shape).astype(np.float32)
    zero = rng.integers(100, 150, shape).astype(np.uint8)
    wide = [np.repeat(p, block, axis)[: x.shape[0], : x.shape[1]] for p in (scale, zero)]
    expected = np.clip(np.rint(x / wide[0]) + wide[1], 0, 255).astype(np.uint8)
    attributes = {"axis": axis, "block_size": block}
    compare("QuantizeLinear", [x, scale, zero], attributes, domain="", opset=21, expected=[expected])
    back = (expected.astype(np.float32) - wide[1]) * wide[0]
    compare("DequantizeLinear", [expected, scale, zero], attributes, domain="", opset=21, expected=[back], rtol=1e-6)
    with pytest.raises(OperatorError, match="does not fit blocks"):
        host_outputs("QuantizeLinear", [x, scale, zero], {"axis": axis, "block_size": 1}, domain="", opset=21)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn])
def test_narrow_floats_are_cast_not_rounded_to_integers(dtype):
    x = np.float32([0.6, -1.3, 1000, 1e9, -1e9, 3.3])
    scale = np.asarray(2, np.float32)
    largest = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(x / 2, -largest, largest).astype(dtype)
    compare("QuantizeLinear", [x, scale, np.zeros((), dtype)], domain="", opset=25, expected=[expected])
    wide = expected.astype(np.float32) * 2
    compare("DequantizeLinear", [expected, scale], domain="", opset=25, expected=[wide])
    number = {"float8_e4m3fn": 17, "float8_e5m2": 19, "float4_e2m1fn": 23}[np.dtype(dtype).name]
    compare("QuantizeLinear", [x, scale], {"output_dtype": number}, domain="", opset=25, expected=[expected])


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_the_division_has_the_precision_of_the_scale_or_of_the_attribute(half):
    x = np.linspace(-20, 20, 400).astype(half)
    scale = np.asarray(0.3, half)
    quotient = x.astype(np.float32) / scale.astype(np.float32)
    zero = np.asarray(1, np.int8)
    narrow = (np.rint(quotient.astype(half).astype(np.float32)) + 1).astype(np.int8)
    compare("QuantizeLinear", [x, scale, zero], domain="", opset=23, expected=[narrow])
    wide = (np.rint(quotient) + 1).astype(np.int8)
    compare("QuantizeLinear", [x, scale, zero], {"precision": 1}, domain="", opset=23, expected=[wide])


def test_types_come_from_where_the_standard_says():
    x, scale = np.float32([1, 2]), np.asarray(1, np.float32)
    compare("QuantizeLinear", [x, scale], domain="", opset=13, expected=[np.array([1, 2], np.uint8)])
    compare(
        "QuantizeLinear", [x, scale], {"output_dtype": 5}, domain="", opset=21, expected=[np.array([1, 2], np.int16)]
    )
    with pytest.raises(OperatorError, match="output_dtype is int16, but y_zero_point is int8"):
        host_outputs("QuantizeLinear", [x, scale, np.zeros((), np.int8)], {"output_dtype": 5}, domain="", opset=21)
    q, half = np.array([1, 2], np.int8), np.asarray(0.5, np.float16)
    compare("DequantizeLinear", [q, half], domain="", opset=21, expected=[np.float16([0.5, 1])])
    compare("DequantizeLinear", [q, half], {"output_dtype": 1}, domain="", opset=23, expected=[np.float32([0.5, 1])])
    power = np.asarray(0.5, ml_dtypes.float8_e8m0fnu)
    compare("DequantizeLinear", [q, power], {"output_dtype": 1}, domain="", opset=28, expected=[np.float32([0.5, 1])])
    with pytest.raises(OperatorError, match="set output_dtype"):
        host_outputs("DequantizeLinear", [q, power], {}, domain="", opset=28)
    ints = np.array([2**31 - 1, -(2**31)], np.int32)
    compare("DequantizeLinear", [ints, scale], domain="", opset=21, expected=[ints.astype(np.float32)])
    compare("QuantizeLinear", [np.array([100, -7], np.int32), scale], domain="", opset=21,
            expected=[np.array([100, 0], np.uint8)])  # fmt: skip


@pytest.mark.parametrize("low", [-3.0, 0.5, -9.0, 0.0])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_dynamic_quantization_as_onnxruntime(low, size):
    x = rng.uniform(low, low + 5, size).astype(np.float32)
    compare("DynamicQuantizeLinear", [x], domain="", opset=11, outputs=3)


def test_dynamic_quantization_of_zeros_and_of_nothing():
    compare("DynamicQuantizeLinear", [np.zeros(3, np.float32)], domain="", opset=11, outputs=3)
    compare("DynamicQuantizeLinear", [np.zeros((0, 2), np.float32)], domain="", opset=11, outputs=3)


@pytest.mark.parametrize("shapes", [((5, 300), (300, 4)), ((20, 1000), (1000, 3)), ((2, 17, 40), (40, 3)),
                                    ((2, 3, 40), (2, 40, 5)), ((4, 0), (0, 3)), ((0, 4), (4, 3))])  # fmt: skip
@pytest.mark.parametrize("dtypes", [(np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8)])
def test_integer_products_are_exact(shapes, dtypes):
    a, b = (
        rng.integers(np.iinfo(d).min, np.iinfo(d).max + 1, s).astype(d) for d, s in zip(dtypes, shapes, strict=True)
    )
    zero_a, zero_b = np.asarray(7, dtypes[0]), rng.integers(0, 9, shapes[1][-1]).astype(dtypes[1])
    for zeros in ([], [zero_a], [zero_a, zero_b], [None, zero_b]):
        left = a.astype(np.int64) - (zeros[0].astype(np.int64) if zeros and zeros[0] is not None else 0)
        right = b.astype(np.int64) - (zeros[1].astype(np.int64) if len(zeros) > 1 else 0)
        expected = (left @ right).astype(np.int32)
        compare("MatMulInteger", [a, b, *zeros], domain="", opset=10, expected=[expected])
        compare("MatMulInteger", [a, b, *zeros], domain="", opset=10, expected=[expected], static=(1, 2, 3))


def test_the_largest_products_are_exact():
    """A float32 sum of more than 258 such products would be rounded."""
    a, b = np.full((20, 4000), 255, np.uint8), np.full((4000, 2), 255, np.uint8)
    a[:, ::7] = 254
    expected = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
    for static in ((), (1,)):
        for rows in (20, 1):
            compare("MatMulInteger", [a[:rows], b], domain="", opset=10, expected=[expected[:rows]], static=static)


def test_zero_points_for_each_row():
    a, b = rng.integers(0, 255, (4, 9)).astype(np.uint8), rng.integers(-128, 127, (9, 3)).astype(np.int8)
    zero = np.array([1, 2, 3, 4], np.uint8)
    expected = ((a.astype(np.int64) - zero[:, None]) @ b.astype(np.int64)).astype(np.int32)
    compare("MatMulInteger", [a, b, zero], domain="", opset=10, expected=[expected])


@pytest.mark.parametrize("column_wise", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_quantized_matrix_products_as_onnxruntime(column_wise, dtype):
    a, b = rng.integers(0, 100, (6, 50)).astype(dtype), rng.integers(0, 100, (50, 4)).astype(dtype)
    b_scale = np.float32(rng.uniform(0.01, 0.02, 4)) if column_wise else np.asarray(0.013, np.float32)
    b_zero = rng.integers(40, 60, 4).astype(dtype) if column_wise else np.asarray(50, dtype)
    inputs = [a, np.asarray(0.02, np.float32), np.asarray(48, dtype), b, b_scale, b_zero,
              np.asarray(0.1, np.float32), np.asarray(20, dtype)]  # fmt: skip
    compare("QLinearMatMul", inputs, domain="", opset=10, constant=(4, 5))


CONVOLUTIONS = [
    ((1, 2, 6, 6), (3, 2, 3, 3), {}),
    ((2, 4, 7, 5), (6, 2, 3, 2), {"group": 2, "pads": [1, 0, 1, 1]}),
    ((1, 3, 9, 9), (3, 1, 3, 3), {"group": 3, "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 64, 6, 6), (5, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 8, 4, 4), (4, 8, 1, 1), {"kernel_shape": [1, 1]}),
]


@pytest.mark.parametrize(("shape", "kernel", "attributes"), CONVOLUTIONS)
def test_integer_convolutions_as_onnxruntime(shape, kernel, attributes):
    x, w = rng.integers(0, 256, shape).astype(np.uint8), rng.integers(0, 256, kernel).astype(np.uint8)
    zeros = [np.asarray(131, np.uint8), np.asarray(120, np.uint8)]
    compare("ConvInteger", [x, w, *zeros], attributes, domain="", opset=10)
    compare("ConvInteger", [x, w, *zeros], attributes, domain="", opset=10, static=(1, 3))
    compare("ConvInteger", [x, w], attributes, domain="", opset=10)


def test_the_largest_convolutions_are_exact():
    x, w = np.full((1, 600, 3, 3), 255, np.uint8), np.full((2, 600, 3, 3), 255, np.uint8)
    x[:, ::3] = 254
    total = int((x.astype(np.int64) * 255).sum())
    expected = np.full((1, 2, 1, 1), total, np.int64).astype(np.int32)
    compare("ConvInteger", [x, w], domain="", opset=10, expected=[expected])


@pytest.mark.parametrize(("shape", "kernel", "attributes"), CONVOLUTIONS)
def test_quantized_convolutions_as_onnxruntime(shape, kernel, attributes):
    x, w = rng.integers(0, 256, shape).astype(np.uint8), rng.integers(-128, 128, kernel).astype(np.int8)
    filters = kernel[0]
    w_scale = rng.uniform(0.001, 0.002, filters).astype(np.float32)
    inputs = [x, np.asarray(0.02, np.float32), np.asarray(128, np.uint8), w, w_scale, np.zeros(filters, np.int8),
              np.asarray(0.03, np.float32), np.asarray(100, np.uint8),
              rng.integers(-500, 500, filters).astype(np.int32)]  # fmt: skip
    compare("QLinearConv", inputs, attributes, domain="", opset=10, constant=(3, 4, 5, 8), atol=0)
    for run in (host_outputs, traced_outputs):
        (whole,) = run("QLinearConv", inputs[:8], attributes, domain="", opset=10)
        (empty,) = run("QLinearConv", [x[:0], *inputs[1:8]], attributes, domain="", opset=10)
        agree(empty, np.zeros((0, *whole.shape[1:]), np.uint8))
