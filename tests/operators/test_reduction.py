"""Reductions, positions of extremes and running sums against onnxruntime in both forms."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import Bench, compare, host_outputs
from transmuter_async.errors import OperatorError
from transmuter_async.operators import invoke, resolve

rng = np.random.default_rng(0)
REDUCTIONS = [
    "ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSum", "ReduceLogSumExp",
]  # fmt: skip


def axes_input(axes):
    return [] if axes is None else [np.asarray(axes, np.int64)]


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize(("axes", "keepdims"), [(None, 0), ([], 1), ([1], 0), ([-1], 1), ([-1], 0), ([2, 0], 1)])
def test_reductions_as_onnxruntime(op, axes, keepdims):
    x = rng.uniform(0.1, 2, (2, 3, 20)).astype(np.float32)
    attributes = {"keepdims": keepdims}
    compare(op, [x, *axes_input(axes)], attributes, domain="", opset=18, rtol=2e-5, constant=(1,))
    compare(op, [x, *axes_input(axes)], {**attributes, "noop_with_empty_axes": 1}, domain="", opset=18, rtol=2e-5,
            constant=(1,), expected=None if axes else [_composite(op, x)])  # fmt: skip
    if op != "ReduceSum" and axes != []:
        compare(op, [x], {**attributes, "axes": axes}, domain="", opset=13, rtol=2e-5)


def _composite(op, x):
    """What is left of a reduction over no axes."""
    steps = {"ReduceL1": np.abs, "ReduceL2": np.abs, "ReduceSumSquare": np.square, "ReduceLogSum": np.log}
    return steps.get(op, np.asarray)(x)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64])
def test_reductions_of_other_dtypes_as_onnxruntime(op, dtype):
    x = rng.integers(-4, 5, (3, 4)).astype(dtype)
    compare(op, [x, np.array([1])], domain="", opset=18, rtol=1e-12)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("opset", [13, 18, 20])
def test_over_an_empty_set(op, opset):
    """onnxruntime#7563: a detector that found nothing."""
    x = np.zeros((0, 4), np.float32)
    expected = {
        "ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceProd": 1, "ReduceLogSum": -np.inf, "ReduceLogSumExp": -np.inf
    }.get(op, 0)  # fmt: skip
    result = np.full(4, expected, np.float32)
    if op == "ReduceSum" or opset >= 18:
        compare(op, [x, np.array([0])], {"keepdims": 0}, domain="", opset=opset, expected=[result])
    else:
        compare(op, [x], {"axes": [0], "keepdims": 0}, domain="", opset=opset, expected=[result])
    if op == "ReduceMax":
        integers = np.zeros((0, 2), np.int8)
        compare(
            op, [integers, np.array([0])], {"keepdims": 0}, domain="", opset=20, expected=[np.full(2, -128, np.int8)]
        )


def test_the_other_axes_may_be_empty():
    x = np.zeros((0, 4), np.float32)
    for op in REDUCTIONS:
        compare(op, [x, np.array([1])], {"keepdims": 0}, domain="", opset=20, expected=[np.zeros(0, np.float32)])


def test_scalars_reduce_to_themselves():
    x = np.asarray(3, np.float32)
    compare("ReduceSum", [x], domain="", opset=18)
    compare("ReduceMax", [x, np.zeros(0, np.int64)], domain="", opset=18, expected=[x])


def test_bools_have_an_order_and_nan_wins():
    x = np.array([[True, False], [False, False]])
    compare("ReduceMax", [x, np.array([1])], {"keepdims": 0}, domain="", opset=20, expected=[np.array([True, False])])
    compare("ReduceMin", [x, np.array([0])], {"keepdims": 0}, domain="", opset=20, expected=[np.array([False, False])])
    nan = np.array([1, np.nan, 3], np.float32)
    compare("ReduceMax", [nan], {"keepdims": 0}, domain="", opset=20, expected=[np.asarray(np.nan, np.float32)])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_accumulate_in_float32(dtype):
    x = np.ones((1, 5000), dtype)
    x[0, 0] = 3000
    total = np.asarray([7999], np.float32).astype(dtype)
    compare("ReduceSum", [x, np.array([1])], {"keepdims": 0}, domain="", opset=13, expected=[total])
    big = np.full((1, 4), 300, dtype)
    compare("ReduceL2", [big, np.array([1])], {"keepdims": 0}, domain="", opset=18, expected=[np.full(1, 600, dtype)])


def test_log_sum_exp_does_not_overflow():
    x = np.array([[1000, 1000], [-1000, -1000], [-np.inf, -np.inf], [np.inf, 1]], np.float32)
    expected = np.float32([1000 + np.log(2), -1000 + np.log(2), -np.inf, np.inf])
    compare("ReduceLogSumExp", [x, np.array([1])], {"keepdims": 0}, domain="", opset=18, rtol=1e-6, expected=[expected])


def test_bad_axes_are_named():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(OperatorError, match=r"axis 2 is outside of \[-2, 2\)"):
        host_outputs("ReduceSum", [x, np.array([2])], {}, domain="", opset=13)
    with pytest.raises(OperatorError, match="twice"):
        host_outputs("ReduceSum", [x, np.array([1, -1])], {}, domain="", opset=13)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_gradients_are_finite_differences(op):
    definition = resolve("", op, 20)
    runner = {"context": Bench(op, "", 20, 2, 1)}
    x = rng.uniform(0.4, 1.6, (2, 3))

    def total(x):
        return invoke(definition, [x, np.array([1])], {}, runner)[0].sum()

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        gradient = np.asarray(jax.grad(total)(x))
    numeric = np.empty_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = 1e-6
        numeric[i] = (total(x + step) - total(x - step)) / 2e-6
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5)


def test_the_gradient_of_a_norm_is_zero_at_zero():
    definition = resolve("", "ReduceL2", 18)
    runner = {"context": Bench("ReduceL2", "", 18, 1, 1)}
    gradient = jax.grad(lambda x: invoke(definition, [x], {}, runner)[0].sum())(np.zeros(3, np.float32))
    np.testing.assert_array_equal(gradient, np.zeros(3))


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize(("axis", "last"), [(0, 0), (1, 1), (-1, 0), (-1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_positions_of_extremes_as_onnxruntime(op, axis, last, dtype):
    x = rng.integers(0, 3, (4, 5, 6)).astype(dtype)
    compare(op, [x], {"axis": axis, "select_last_index": last, "keepdims": last}, domain="", opset=13)


def test_positions_with_nan_and_without_elements():
    x = np.array([[1, np.nan, 3, np.nan]], np.float32)
    compare("ArgMax", [x], {"axis": 1}, domain="", opset=13, expected=[np.array([[1]])])
    compare("ArgMin", [x], {"axis": 1, "select_last_index": 1}, domain="", opset=13, expected=[np.array([[3]])])
    empty = np.zeros((0, 3), np.float32)
    compare("ArgMax", [empty], {"axis": 1}, domain="", opset=13, expected=[np.zeros((0, 1), np.int64)])
    with pytest.raises(OperatorError, match="is empty"):
        host_outputs("ArgMax", [empty], {"axis": 0}, domain="", opset=13)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        compare("ArgMax", [np.array([1, 5, 5], dtype)], domain="", opset=13, expected=[np.array([1])])


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize(("axis", "dtype"), [(0, np.float32), (1, np.int32), (-1, np.float64)])
def test_running_sums_as_onnxruntime(exclusive, reverse, axis, dtype):
    x = rng.integers(-5, 6, (3, 7)).astype(dtype)
    attributes = {"exclusive": exclusive, "reverse": reverse}
    compare("CumSum", [x, np.asarray(axis, np.int64)], attributes, domain="", opset=14)
    product = np.flip(x, axis) if reverse else x
    product = np.cumprod(product, axis, dtype=dtype)
    if exclusive:
        edge = np.ones_like(np.take(product, [0], axis))
        product = np.concatenate([edge, np.take(product, range(x.shape[axis] - 1), axis)], axis)
    product = np.flip(product, axis) if reverse else product
    compare("CumProd", [x, np.asarray([axis], np.int32)], attributes, domain="", opset=26, expected=[product])


def test_running_sums_of_nothing_and_of_one():
    axis = np.asarray(0, np.int64)
    for shape in ((0,), (0, 2), (1,)):
        x = np.ones(shape, np.float32)
        compare("CumSum", [x, axis], {"exclusive": 1}, domain="", opset=14, expected=[np.zeros(shape, np.float32)])
        compare("CumSum", [x, axis], {}, domain="", opset=14, expected=[x])
    half = np.ones(3000, np.float16)
    (y,) = host_outputs("CumSum", [half, axis], {}, domain="", opset=14)
    assert y[-1] == 3000
