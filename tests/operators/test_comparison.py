"""Comparisons, logic and bits against onnxruntime in both forms."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import compare, host_outputs

VALUES = np.array([[0.0, -0.0, 1.5, np.nan, np.inf, -np.inf]], np.float32)


@pytest.mark.parametrize("op", ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_comparisons_as_onnxruntime(op, dtype):
    values = VALUES.astype(dtype) if np.dtype(dtype).kind == "f" else np.array([[-3, 0, 0, 7, 2, 1]], dtype)
    compare(op, [values, values.T], domain="", opset=19)
    compare(op, [values[:, :0], values[:1, :1]], domain="", opset=19)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint64, np.float16, ml_dtypes.bfloat16])
def test_comparisons_of_other_dtypes(dtype):
    a, b = np.array([1, 2, 3], dtype), np.array([3, 2, 1], dtype)
    compare("Less", [a, b], domain="", opset=13, expected=[np.array([True, False, False])])
    compare("GreaterOrEqual", [a, b], domain="", opset=16, expected=[np.array([False, True, True])])
    compare("Equal", [a, b], domain="", opset=13, expected=[np.array([False, True, False])])


def test_strings_and_bools_are_equal_or_not():
    a, b = np.array(["a", "b", ""], object), np.array(["a", "c", ""], object)
    compare("Equal", [a, b], domain="", opset=19, traced=False, expected=[np.array([True, False, True])])
    compare("Equal", [a, a[:1]], domain="", opset=19, traced=False, expected=[np.array([True, False, False])])
    t = np.array([True, False])
    compare("Equal", [t, t[::-1]], domain="", opset=19)


@pytest.mark.parametrize("op", ["And", "Or", "Xor"])
def test_logic_as_onnxruntime(op):
    a = np.array([[True, False]])
    compare(op, [a, a.T], domain="", opset=7)


def test_legacy_logic_and_comparison_broadcast_only_when_asked():
    a, b = np.ones((2, 3), bool), np.array([True, False])
    expected = a & b[:, None]
    compare("And", [a, b], {"broadcast": 1, "axis": 0}, domain="", opset=1, expected=[expected])
    compare("Or", [a, a], {}, domain="", opset=1, expected=[a])
    compare("Xor", [a, b], {"broadcast": 1, "axis": 0}, domain="", opset=1, expected=[a ^ b[:, None]])
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1.0, 4.0], np.float32)
    for op, function in (("Less", np.less), ("Greater", np.greater)):
        compare(op, [x, y], {"broadcast": 1, "axis": 0}, domain="", opset=1, expected=[function(x, y[:, None])])
    with pytest.raises(ValueError, match="broadcast"):
        host_outputs("Equal", [np.zeros((2, 3), np.int32), np.zeros(2, np.int32)], {}, domain="", opset=1)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_bits_as_onnxruntime(dtype):
    a, b = np.array([[0, 1, 6, 100]], dtype), np.array([[3], [127]], dtype)
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        compare(op, [a, b], domain="", opset=18)
    compare("BitwiseNot", [a], domain="", opset=18)
    compare("Not", [a > 3], domain="", opset=18)


def test_is_nan_and_is_inf():
    compare("IsNaN", [VALUES], domain="", opset=20)
    for negative in (0, 1):
        for positive in (0, 1):
            attributes = {"detect_negative": negative, "detect_positive": positive}
            compare("IsInf", [VALUES], attributes, domain="", opset=20)
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16):
        narrow = VALUES.astype(dtype)
        wide = narrow.astype(np.float32)
        compare("IsNaN", [narrow], domain="", opset=20, expected=[np.isnan(wide)])
        compare("IsInf", [narrow], domain="", opset=20, expected=[np.isinf(wide)])


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, bool, ml_dtypes.float8_e5m2])
def test_where_broadcasts_three_ways(dtype):
    condition = np.array([[True], [False]])
    x, y = np.array([1, 0, 1], dtype), np.zeros((1, 1, 1), dtype)
    expected = np.where(condition, x, y)
    compare("Where", [condition, x, y], domain="", opset=16, expected=[expected])


def test_where_of_strings_is_done_on_the_host():
    x, y = np.array(["a", "b"], object), np.array("z", object)
    expected = np.array(["a", "z"], object)
    compare("Where", [np.array([True, False]), x, y], domain="", opset=16, traced=False, expected=[expected])
