"""Writing at indices: against onnxruntime in both forms."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import compare, host_outputs, traced_outputs
from transmuter_async.errors import OperatorError

REDUCTIONS = ["none", "add", "mul", "max", "min"]
rng = np.random.default_rng(0)


def i64(*values):
    return np.array(values, np.int64)


def f(*shape):
    return rng.uniform(-2, 2, shape).astype(np.float32)


def at(op, inputs, attributes=None, *, opset=18, **options):
    compare(op, inputs, attributes, domain="", opset=opset, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_scatter_elements_with_negative_and_repeated_indices(reduction):
    indices = i64(0, -1, 2, 2, -4, 3).reshape(2, 3)
    if reduction == "none":  # a place written twice is not defined
        indices = i64(0, -1, 2, 2, 0, 1).reshape(2, 3)
    at("ScatterElements", [f(4, 5), indices, f(2, 3)], {"reduction": reduction}, rtol=1e-6)
    at("ScatterElements", [f(2, 4), indices, f(2, 3)], {"reduction": reduction, "axis": 1}, rtol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd_of_every_depth(reduction, depth):
    data = f(3, 4, 2)
    rows = int(np.prod(data.shape[:depth]))
    linear = rng.permutation(rows)[:3] if reduction == "none" else rng.integers(0, rows, 6)
    tuples = np.stack(np.unravel_index(linear, data.shape[:depth]), -1).astype(np.int64)
    tuples[0] -= data.shape[:depth]  # the same place, counted from the end
    at("ScatterND", [data, tuples, f(len(linear), *data.shape[depth:])], {"reduction": reduction}, rtol=1e-6)


def test_repeated_sums_of_narrow_floats_accumulate_in_float32():
    data, tuples = np.array([2048, 0], np.float16), np.zeros((64, 1), np.int64)
    expected = [np.array([2048 + 64, 0], np.float16)]  # in float16 2048 + 1 is 2048
    at("ScatterND", [data, tuples, np.ones(64, np.float16)], {"reduction": "add"}, expected=expected)
    wide = [np.array([320, 0], ml_dtypes.bfloat16)]
    at("ScatterElements", [np.array([256, 0], ml_dtypes.bfloat16), tuples[:, 0][:2], np.ones(2, ml_dtypes.bfloat16)],
       {"reduction": "none"}, expected=[np.array([1, 0], ml_dtypes.bfloat16)])  # fmt: skip
    at("ScatterND", [np.array([256, 0], ml_dtypes.bfloat16), tuples, np.ones(64, ml_dtypes.bfloat16)],
       {"reduction": "add"}, expected=wide)  # fmt: skip


def test_booleans_reduce_by_or_and_and():
    data, index = np.array([True, False]), i64(0, 1)
    at(
        "ScatterElements",
        [data, index, np.array([False, True])],
        {"reduction": "add"},
        expected=[np.array([True, True])],
    )
    at(
        "ScatterElements",
        [data, index, np.array([False, True])],
        {"reduction": "mul"},
        expected=[np.array([False, False])],
    )


def test_nan_wins_max_and_min():
    data, update = np.array([1, 2], np.float32), np.array([np.nan, 1], np.float32)
    for reduction, second in (("max", 2), ("min", 1)):
        expected = [np.array([np.nan, second], np.float32)]
        at("ScatterElements", [data, i64(0, 1), update], {"reduction": reduction}, expected=expected)


def test_old_names_and_versions():
    data, indices, updates = f(3, 3), i64(1, 0, 2).reshape(1, 3), f(1, 3)
    at("Scatter", [data, indices, updates], {"axis": 0}, opset=9)
    at("ScatterElements", [data, indices, updates], {"axis": 0}, opset=13)
    at("ScatterND", [data, i64(1).reshape(1, 1), updates], {}, opset=11)


def test_nothing_to_write_and_nothing_to_write_into():
    at("ScatterElements", [f(3), np.zeros(0, np.int64), f(0)], {})
    at("ScatterND", [f(3, 2), np.zeros((0, 1), np.int64), f(0, 2)], {})
    at("ScatterND", [f(3, 0), i64(1).reshape(1, 1), f(1, 0)], {}, expected=[np.zeros((3, 0), np.float32)])


def test_strings_are_written():
    data = np.array(["a", "b", "c"], object)
    (got,) = host_outputs("ScatterElements", [data, i64(-1), np.array(["z"], object)], {}, domain="", opset=18)
    assert got.tolist() == ["a", "b", "z"] and data.tolist() == ["a", "b", "c"]


def test_the_input_is_not_changed():
    data = f(3)
    before = data.copy()
    for reduction in REDUCTIONS:
        host_outputs("ScatterND", [data, i64(0).reshape(1, 1), f(1)], {"reduction": reduction}, domain="", opset=18)
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize(
    ("op", "inputs", "error", "part"),
    [
        ("ScatterND", [f(3), i64(3).reshape(1, 1), f(1)], OperatorError, "out of range"),
        ("ScatterND", [f(3), i64(-4).reshape(1, 1), f(1)], OperatorError, "out of range"),
        ("ScatterElements", [f(3), i64(3), f(1)], OperatorError, "out of range"),
        ("ScatterND", [f(3), i64(1).reshape(1, 1), f(2)], ValueError, "updates have shape"),
        ("ScatterElements", [f(3), i64(1), f(2)], ValueError, "must agree"),
        ("ScatterElements", [f(2, 2), np.zeros((3, 3), np.int64), f(3, 3)], ValueError, "reach beyond"),
    ],
)
def test_what_is_refused_says_why(op, inputs, error, part):
    with pytest.raises(error, match=part):
        host_outputs(op, inputs, {}, domain="", opset=18)


@pytest.mark.parametrize("axis", [1, -2])
def test_tensor_scatter_writes_each_row_at_its_place(axis):
    cache, update = f(2, 3, 5, 2) if axis == -2 else f(2, 5, 3), None
    update = f(2, 3, 2, 2) if axis == -2 else f(2, 2, 3)
    expected = cache.copy()
    for row, start in enumerate((3, 0)):
        part = (row, slice(None), slice(start, start + 2)) if axis == -2 else (row, slice(start, start + 2))
        expected[part] = update[row]
    at("TensorScatter", [cache, update, i64(3, 0)], {"axis": axis}, opset=24, expected=[expected])


def test_tensor_scatter_goes_round_or_refuses():
    cache, update = f(1, 4, 1), f(1, 3, 1)
    expected = cache.copy()
    expected[0, [3, 0, 1]] = update[0]
    at("TensorScatter", [cache, update, i64(3)], {"mode": "circular"}, opset=24, expected=[expected])
    for start in (2, -1):
        with pytest.raises(OperatorError, match="out of range"):
            host_outputs("TensorScatter", [cache, update, i64(start)], {}, domain="", opset=24)
    at("TensorScatter", [cache, update], {}, opset=24, expected=[np.concatenate([update, cache[:, 3:]], 1)])
    (got,) = traced_outputs("TensorScatter", [cache, update, i64(1)], {}, domain="", opset=24)
    np.testing.assert_array_equal(got, np.concatenate([cache[:, :1], update], 1))
