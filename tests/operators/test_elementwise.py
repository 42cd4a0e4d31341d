"""Arithmetic against onnxruntime in both forms, and the cases that others get wrong."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import Bench, agree, compare, host_outputs, traced_outputs
from transmuter_async.errors import OperatorError
from transmuter_async.operators import invoke, resolve

rng = np.random.default_rng(0)
UNARY = {
    "Abs": (-3, 3), "Neg": (-3, 3), "Reciprocal": (0.1, 3), "Sqrt": (0, 9), "Exp": (-5, 5), "Log": (0.01, 9),
    "Ceil": (-3, 3), "Floor": (-3, 3), "Tanh": (-4, 4), "Round": (-3, 3), "Erf": (-3, 3), "Sign": (-3, 3),
    "Sin": (-4, 4), "Cos": (-4, 4), "Tan": (-1, 1), "Asin": (-1, 1), "Acos": (-1, 1), "Atan": (-5, 5),
    "Sinh": (-3, 3), "Cosh": (-3, 3), "Asinh": (-3, 3), "Acosh": (1, 5), "Atanh": (-0.9, 0.9),
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 4)])
def test_unary_as_onnxruntime(op, shape):
    x = rng.uniform(*UNARY[op], shape).astype(np.float32)
    compare(op, [x], domain="", opset=21, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_unary_in_other_floats_is_the_rounded_float64_result(op, dtype):
    x = rng.uniform(*UNARY[op], (40,)).astype(dtype)
    (exact,) = host_outputs(op, [x.astype(np.float64)], {}, domain="", opset=21)
    # Narrow floats are rounded once; XLA's own float64 functions are some units in the last place from numpy's.
    step = 1e-14 if dtype is np.float64 else float(ml_dtypes.finfo(dtype).eps)
    for result in (host_outputs, traced_outputs):
        (y,) = result(op, [x], {}, domain="", opset=21)
        assert y.dtype == x.dtype
        np.testing.assert_allclose(y.astype(np.float64), exact, rtol=step, atol=step / 100)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Mod"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.float32, np.float64])
def test_binary_as_onnxruntime(op, dtype):
    if op == "Mod" and np.dtype(dtype).kind == "f":
        return
    info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.iinfo(np.int16)
    low, high = max(info.min // 2, -1000), min(info.max // 2, 1000)
    a = rng.integers(low, high, (3, 1, 5)).astype(dtype)
    b = rng.integers(1, min(high, 11), (4, 1)).astype(dtype)
    b = np.where(rng.random(b.shape) < 0.5, -b, b) if np.dtype(dtype).kind != "u" else b
    # onnxruntime has no kernel for 16-bit extremes.
    known = [{"Max": np.maximum, "Min": np.minimum}[op](a, b)] if dtype is np.int16 and op in {"Max", "Min"} else None
    # XLA divides by a broadcast divisor as a multiplication: one unit in the last place.
    compare(op, [a, b.astype(dtype)], domain="", opset=21, rtol=3e-7 if op == "Div" else 0, expected=known)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_integer_division_truncates(dtype):
    """onnxruntime#26997."""
    a, b = np.array([8, -8, 7, -7, 0], dtype), np.array([-3, 3, -2, 2, 5], dtype)
    compare("Div", [a, b], domain="", opset=14, expected=[np.array([-2, -2, -3, -3, 0], dtype)])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_the_smallest_integer_over_minus_one_does_not_trap(dtype):
    smallest = np.iinfo(dtype).min
    a, b = np.array([smallest], dtype), np.array([-1], dtype)
    compare("Div", [a, b], domain="", opset=14, expected=[a])
    compare("Mod", [a, b], domain="", opset=14, expected=[np.zeros(1, dtype)])
    compare("Mod", [a, b], {"fmod": 1}, domain="", opset=14, expected=[np.zeros(1, dtype)])


def test_mod_has_the_sign_of_the_divisor_and_fmod_of_the_dividend():
    """onnx#5564."""
    a, b = np.array([-4, 7, 5, 4, -7, 8], np.int32), np.array([2, -3, 8, -2, 3, 5], np.int32)
    compare("Mod", [a, b], domain="", opset=13, expected=[np.array([0, -2, 5, 0, 2, 3], np.int32)])
    compare("Mod", [a, b], {"fmod": 1}, domain="", opset=13, expected=[np.array([0, 1, 5, 0, -1, 3], np.int32)])
    x, y = np.array([-4.3, 7.2, 5.0, 4.3, -7.2, 8.0], np.float32), np.array([2.1, -3.4, 8, -2.1, 3.4, 5], np.float32)
    compare("Mod", [x, y], {"fmod": 1}, domain="", opset=13)


def test_mod_of_floats_follows_the_table_of_version_28():
    inf, nan = np.inf, np.nan
    a = np.array([0.0, -0.0, inf, 1.0, 1.0, -1.0, nan, 5.5, -5.5], np.float32)
    b = np.array([-2.0, 3.0, 2.0, 0.0, inf, inf, 1.0, -2.0, 2.0], np.float32)
    expected = np.array([-0.0, 0.0, nan, nan, 1.0, inf, nan, -0.5, 0.5], np.float32)
    for run in (host_outputs, traced_outputs):
        (y,) = run("Mod", [a, b], {}, domain="", opset=28)
        agree(y, expected)
        np.testing.assert_array_equal(np.signbit(y[:2]), np.signbit(expected[:2]))
        (y,) = run("Mod", [a, b], {"fmod": 1}, domain="", opset=28)
        with np.errstate(invalid="ignore"):
            agree(y, np.fmod(a, b))


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_a_known_integer_zero_divisor_is_refused(op):
    a, b = np.array([1, 2], np.int32), np.array([1, 0], np.int32)
    with pytest.raises(OperatorError, match="division by zero"):
        host_outputs(op, [a, b], {}, domain="", opset=14)
    with pytest.raises(OperatorError, match="division by zero"):
        traced_outputs(op, [a, b], {}, domain="", opset=14, static=(1,))


@pytest.mark.parametrize("base", [np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("exponent", [np.int32, np.int64, np.float32, np.float64])
def test_pow_of_mixed_dtypes_as_onnxruntime(base, exponent):
    x, y = np.array([[1, 2, 3, -2, 7]], base), np.array([[0], [1], [2], [3], [5]], exponent)
    compare("Pow", [x, y], domain="", opset=15, rtol=1e-6)


def test_integer_powers_are_exact_and_negative_ones_truncate():
    x, y = np.array([3, 1, -1, -1, 2, 10], np.int64), np.array([39, -5, -3, -2, -1, 18], np.int64)
    compare("Pow", [x, y], domain="", opset=15, expected=[np.array([3**39, 1, -1, 1, 0, 10**18], np.int64)])
    x, y = np.array([3, 2], np.int32), np.array([19, 63], np.uint64)
    compare("Pow", [x, y], domain="", opset=15, expected=[np.array([3**19, 0], np.int32)])


@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0, 0.5, -1.0])
def test_powers_by_a_constant(exponent):
    x = rng.uniform(0.1, 3, (2, 5)).astype(np.float32)
    compare("Pow", [x, np.asarray(exponent, np.float32)], domain="", opset=15, static=(1,), rtol=2e-6)
    compare("Pow", [x[0], np.full((1, 1), exponent, np.float32)], domain="", opset=15, static=(1,), rtol=2e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shifts_by_any_amount(dtype, direction):
    width = np.dtype(dtype).itemsize * 8
    signed = np.dtype(dtype).kind == "i"
    x = np.array([1, 5, 100, -1 if signed else 255, -77 if signed else 77], dtype)[:, None]
    amounts = [0, 1, 3, width - 1, width, width + 9, *([-1] if signed else [])]
    expected = []
    for value in x[:, 0].tolist():
        row = []
        for amount in amounts:
            fill = -1 if direction == "RIGHT" and value < 0 else 0
            shifted = fill if not 0 <= amount < width else value >> amount if direction == "RIGHT" else value << amount
            wrapped = shifted & ((1 << width) - 1)
            row.append(wrapped - (1 << width) if signed and wrapped >> (width - 1) else wrapped)
        expected.append(row)
    result = np.array(expected, dtype)
    compare("BitShift", [x, np.array(amounts, dtype)], {"direction": direction}, domain="", opset=28, expected=[result])


@pytest.mark.parametrize("op", ["Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_many_inputs_broadcast_and_nan_wins(op, count):
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in [(2, 3), (3,), (2, 1), ()][:count]]
    inputs[0][0, 1] = np.nan
    compare(op, inputs, domain="", opset=13, rtol=1e-6)


def test_sum_of_halves_is_rounded_once():
    inputs = [np.full(1, value, np.float16) for value in (2048, 1, 1)]
    compare("Sum", inputs, domain="", opset=13, expected=[np.full(1, 2050, np.float16)])


@pytest.mark.parametrize("bounds", [(None, None), (-1, None), (None, 1), (-1, 1), (2, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.uint8, np.int64])
def test_clip_as_onnxruntime(bounds, dtype):
    if np.dtype(dtype).kind == "u":
        bounds = tuple(abs(b) if b is not None else None for b in bounds)
    x = np.array([0, 1, 3, 100], dtype)
    if np.dtype(dtype).kind == "f":
        x = np.array([0, -3, 3, np.inf, -np.inf, np.nan], dtype)
    inputs = [x, *(None if b is None else np.asarray(b, dtype) for b in bounds)]
    while inputs[-1] is None:
        inputs.pop()
    compare("Clip", inputs, domain="", opset=13)


def test_clip_6_bounds_are_attributes():
    x = np.array([-3, 0.5, np.inf, -np.inf], np.float32)
    compare("Clip", [x], {"min": -1.0, "max": 1.0}, domain="", opset=6, expected=[np.float32([-1, 0.5, 1, -1])])
    largest = np.finfo(np.float32).max
    compare("Clip", [x], {}, domain="", opset=6, expected=[np.float32([-3, 0.5, largest, -largest])])
    half = x.astype(np.float16)
    compare("Clip", [half], {}, domain="", opset=6, expected=[np.float16([-3, 0.5, 65504, -65504])])


def test_legacy_broadcasting_places_the_second_shape_at_the_axis():
    a, b = np.zeros((2, 3, 4, 5), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    for op in ("Add", "Sub", "Mul", "Pow"):
        with np.errstate(all="ignore"):
            function = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Pow": np.power}[op]
            expected = function(a, b[None, :, :, None])
        compare(op, [a, b], {"broadcast": 1, "axis": 1}, domain="", opset=6, expected=[expected])
    compare("Add", [a, b[0, :1]], {"broadcast": 1}, domain="", opset=6, expected=[a])
    compare("Add", [a, np.arange(5, dtype=np.float32)], {"broadcast": 1}, domain="", opset=1,
            expected=[a + np.arange(5, dtype=np.float32)])  # fmt: skip
    thin = b[:, :1]
    compare("Add", [a, thin], {"broadcast": 1, "axis": 1}, domain="", opset=6, expected=[a + thin[None, :, :, None]])
    for attributes in ({}, {"broadcast": 1, "axis": 2}, {"broadcast": 1, "axis": 9}):
        with pytest.raises(ValueError, match="shape"):
            host_outputs("Add", [a, b], attributes, domain="", opset=6)


DIFFERENTIABLE = {
    "Abs": 1, "Neg": 1, "Reciprocal": 1, "Sqrt": 1, "Exp": 1, "Log": 1, "Tanh": 1, "Erf": 1, "Sin": 1, "Cos": 1,
    "Tan": 1, "Asinh": 1, "Atan": 1, "Add": 2, "Sub": 2, "Mul": 2, "Div": 2, "Pow": 2, "Max": 2, "Min": 2, "Mean": 2,
}  # fmt: skip


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_are_finite_differences(op):
    definition = resolve("", op, 21)
    inputs = [rng.uniform(0.3, 1.4, 6) for _ in range(DIFFERENTIABLE[op])]
    runner = {"context": Bench(op, "", 21, len(inputs), 1), "n_outputs": 1}

    def total(*values):
        return invoke(definition, values, {}, runner)[0].sum()

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        gradients = jax.grad(total, argnums=tuple(range(len(inputs))))(*inputs)
    for k, gradient in enumerate(gradients):
        for i in range(6):
            up, down = [x.copy() for x in inputs], [x.copy() for x in inputs]
            up[k][i] += 1e-6
            down[k][i] -= 1e-6
            np.testing.assert_allclose(gradient[i], (total(*up) - total(*down)) / 2e-6, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_square_is_finite_at_zero_and_below():
    definition = resolve("", "Pow", 15)

    def square(x):
        return invoke(definition, [x, np.asarray(2, np.float32)], {}, {})[0].sum()

    np.testing.assert_array_equal(jax.grad(square)(np.float32([-1, 0, 2])), np.float32([-2, 0, 4]))
