"""Constants, ranges, identity matrices and windows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from scipy.signal import windows

from tests.operators.oracle import compare, host_outputs
from transmuter_async.errors import OperatorError
from transmuter_async.graph import SparseTensor


def test_every_form_of_a_constant():
    value = np.arange(6, dtype=np.int16).reshape(2, 3)
    forms = {
        "value": (value, value),
        "value_float": (1.5, np.asarray(1.5, np.float32)),
        "value_floats": ((1.5, 2.0), np.float32([1.5, 2.0])),
        "value_int": (2**40, np.asarray(2**40)),
        "value_ints": ((), np.zeros(0, np.int64)),
        "value_string": ("a", np.array("a", object)),
        "value_strings": (("a", "bc"), np.array(["a", "bc"], object)),
        "sparse_value": (
            SparseTensor(np.float32([5]), np.array([[0, 1]]), (2, 2)), np.float32([[0, 5], [0, 0]])
        ),
    }  # fmt: skip
    for name, (given, expected) in forms.items():
        (y,) = host_outputs("Constant", [], {name: given}, domain="", opset=13)
        assert y.dtype == expected.dtype
        assert y.shape == expected.shape
        np.testing.assert_array_equal(y, expected)
    with pytest.raises(OperatorError, match="exactly one"):
        host_outputs("Constant", [], {"value_int": 1, "value_float": 1.0}, domain="", opset=13)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int64, bool, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
)
@pytest.mark.parametrize("shape", [[], [0, 2], [3, 2]])
def test_a_filled_tensor_of_any_dtype(dtype, shape):
    value = np.array([1]).astype(dtype)
    expected = np.full(shape, value[0], dtype)
    compare("ConstantOfShape", [np.array(shape, np.int64)], {"value": value}, domain="", opset=21, expected=[expected])
    zeros = np.zeros(shape, np.float32)
    compare("ConstantOfShape", [np.array(shape, np.int64)], {}, domain="", opset=9, expected=[zeros])


@pytest.mark.parametrize(
    ("start", "limit", "delta"), [(0, 10, 3), (10, 4, -2), (4, 4, 1), (5, 1, 1), (-3, 3, 1), (0, -1, -7)]
)
@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.float32, np.float64])
def test_ranges_as_onnxruntime(start, limit, delta, dtype):
    compare("Range", [np.asarray(v, dtype) for v in (start, limit, delta)], domain="", opset=11)


def test_ranges_of_fractions_have_onnxruntimes_count():
    for start, limit, delta in ((0, 1, 0.1), (0, 0.3, 0.1), (1, 0, -0.25), (0, 1e-3, 1e-4)):
        values = [np.asarray(v, np.float32) for v in (start, limit, delta)]
        compare("Range", values, domain="", opset=11, rtol=1e-6)


def test_ranges_of_halves_are_computed_in_float32():
    values = [np.asarray(v, np.float16) for v in (0, 3000, 1)]
    expected = np.arange(3000, dtype=np.float32).astype(np.float16)
    compare("Range", values, domain="", opset=27, expected=[expected])


def test_ranges_that_do_not_end():
    for values in ((0, 5, 0), (0, np.inf, 1), (0, np.nan, 1)):
        with pytest.raises(OperatorError, match=r"delta is 0|no finite number"):
            host_outputs("Range", [np.asarray(v, np.float32) for v in values], {}, domain="", opset=11)


@pytest.mark.parametrize("k", [0, 1, -1, 5, -5])
@pytest.mark.parametrize("shape", [(3, 4), (4, 2), (0, 3)])
def test_identity_matrices_as_onnxruntime(k, shape):
    compare("EyeLike", [np.zeros(shape, np.int32)], {"k": k, "dtype": 1}, domain="", opset=9)
    compare("EyeLike", [np.zeros(shape, np.float64)], {"k": k}, domain="", opset=9)
    with pytest.raises(OperatorError, match="matrix"):
        host_outputs("EyeLike", [np.zeros(3)], {}, domain="", opset=9)


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("size", [0, 2, 7, 16])
def test_windows_as_onnxruntime(op, periodic, size):
    compare(op, [np.asarray(size, np.int64)], {"periodic": periodic}, domain="", opset=17, atol=1e-6)
    # onnxruntime's coefficients are float32 even then, so scipy judges.
    sym = not periodic
    exact = {
        "HannWindow": lambda: windows.hann(size, sym=sym),
        "HammingWindow": lambda: windows.general_hamming(size, 25 / 46, sym=sym),
        "BlackmanWindow": lambda: windows.blackman(size, sym=sym),
    }[op]()
    attributes = {"periodic": periodic, "output_datatype": 11}
    compare(op, [np.asarray(size, np.int32)], attributes, domain="", opset=17, atol=1e-12, expected=[exact])


def test_a_symmetric_window_of_one_element_is_one():
    for op in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        attributes = {"periodic": 0}
        compare(op, [np.asarray(1)], attributes, domain="", opset=17, expected=[np.ones(1, np.float32)])
