"""Activations and Softmax against onnxruntime in both forms, their gradients and their extremes."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import Bench, compare, host_outputs, traced_outputs
from transmuter_async.operators import invoke, resolve

rng = np.random.default_rng(0)
X = np.concatenate([rng.standard_normal(50) * 3, [0.0, -0.0, 90.0, -90.0, np.inf, -np.inf]]).astype(np.float32)
ACTIVATIONS = [
    ("Relu", {}), ("LeakyRelu", {}), ("LeakyRelu", {"alpha": 0.3}), ("Elu", {}), ("Elu", {"alpha": 0.5}), ("Selu", {}),
    ("Celu", {"alpha": 2.0}), ("Sigmoid", {}), ("HardSigmoid", {}), ("HardSigmoid", {"alpha": 0.5, "beta": 0.4}),
    ("HardSwish", {}), ("Softplus", {}), ("Softsign", {}), ("ThresholdedRelu", {"alpha": 0.7}), ("Mish", {}),
    ("Shrink", {"lambd": 1.0, "bias": 0.3}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}),
]  # fmt: skip
OPSET = 21


@pytest.mark.parametrize(("op", "attributes"), ACTIVATIONS)
def test_activations_as_onnxruntime(op, attributes):
    x = X[np.isfinite(X)]
    compare(op, [x], attributes, domain="", opset=OPSET, rtol=2e-6, atol=1e-6)
    compare(op, [x[:0].reshape(0, 2)], attributes, domain="", opset=OPSET)


@pytest.mark.parametrize(("op", "attributes"), [*ACTIVATIONS, ("Swish", {"alpha": 0.8})])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_floats_are_computed_in_float32_and_cast_once(op, attributes, dtype):
    x = X[:50].astype(dtype)
    (wide,) = host_outputs(op, [x.astype(np.float32)], attributes, domain="", opset=28)
    step = float(ml_dtypes.finfo(dtype).eps)
    compare(op, [x], attributes, domain="", opset=28, expected=[wide.astype(dtype)], rtol=step, atol=step / 10)


@pytest.mark.parametrize("op", ["Relu", "Sigmoid", "HardSigmoid", "Softplus", "Elu", "Selu", "Celu", "LeakyRelu"])
def test_infinities_have_their_limits_and_nan_stays(op):
    x = np.array([np.inf, -np.inf, np.nan], np.float32)
    limits = {
        "Relu": (np.inf, 0), "Sigmoid": (1, 0), "HardSigmoid": (1, 0), "Softplus": (np.inf, 0), "Elu": (np.inf, -1),
        "Selu": (np.inf, -1.7580993), "Celu": (np.inf, -1), "LeakyRelu": (np.inf, -np.inf),
    }[op]  # fmt: skip
    compare(op, [x], domain="", opset=OPSET, rtol=1e-6, expected=[np.array([*limits, np.nan], np.float32)])


@pytest.mark.parametrize(("op", "attributes"), [*ACTIVATIONS, ("Swish", {"alpha": 0.8})])
def test_gradients_are_finite_differences_and_stay_finite(op, attributes):
    definition = resolve("", op, 28)
    runner = {"context": Bench(op, "", 28, 1, 1), "n_outputs": 1}

    def total(x):
        return invoke(definition, [x], attributes, runner)[0].sum()

    points = np.array([-5.3, -1.3, -0.31, 0.37, 1.21, 4.2])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        gradient = jax.grad(total)(points)
        extreme = jax.grad(total)(np.array([-800.0, 0.0, 800.0]))
    step = np.eye(6) * 1e-6
    numeric = [(total(points + row) - total(points - row)) / 2e-6 for row in step]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-7)
    assert np.isfinite(extreme).all()


def test_relu_of_integers_and_shrink_of_integers():
    x = np.array([-3, 0, 5], np.int32)
    compare("Relu", [x], domain="", opset=14, expected=[np.array([0, 0, 5], np.int32)])
    large = np.array([2**60 + 1, -(2**60) - 1, 1, 0], np.int64)
    expected = np.array([2**60, -(2**60), 0, 0], np.int64)
    compare("Shrink", [large], {"lambd": 1.5, "bias": 1.0}, domain="", opset=9, expected=[expected])
    small = np.array([3, 200], np.uint8)
    expected = np.array([0, 197], np.uint8)
    compare("Shrink", [small], {"lambd": 3.0, "bias": 2.5}, domain="", opset=9, expected=[expected])


def test_p_relu_broadcasts_by_numpys_rule_since_version_7_and_by_channel_before():
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    for slope in (np.float32([0.5]), np.float32([[0.1], [0.2], [0.3]]), np.float32([0.1, 0.2, 0.3, 0.4])):
        compare("PRelu", [x, slope], domain="", opset=16)
    slope = np.float32([0.1, 0.2, 0.3])
    expected = np.where(x < 0, x * slope[:, None], x)
    compare("PRelu", [x, slope], domain="", opset=6, expected=[expected])
    compare("PRelu", [np.array([-4, 4]), np.array([3])], domain="", opset=16, expected=[np.array([-12, 4])])


def test_swi_glu_is_swish_times_the_value():
    a, b = rng.standard_normal((2, 3, 4))
    expected = (a / (1 + np.exp(-1.5 * a)) * b).astype(np.float32)
    a, b = a.astype(np.float32), b.astype(np.float32)
    compare("SwiGLU", [a, b], {"alpha": 1.5}, domain="", opset=28, expected=[expected], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="does not broadcast"):
        host_outputs("SwiGLU", [a, b[:1]], {}, domain="", opset=28)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_softmax_and_kin_as_onnxruntime(op, opset, axis):
    x = rng.standard_normal((2, 3, 4)).astype(np.float32) * 5
    x[0, 0] = 1.0
    compare(op, [x], {"axis": axis}, domain="", opset=opset, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 2)])
def test_softmax_of_nothing(op, opset, shape):
    x = np.zeros(shape, np.float32)
    compare(op, [x], {"axis": 1}, domain="", opset=opset, expected=[x])


def test_softmax_does_not_overflow_and_keeps_masked_places_at_zero():
    x = np.array([[1e4, 1e4, -np.inf], [-1e4, -np.inf, -np.inf]], np.float32)
    compare("Softmax", [x], domain="", opset=13, expected=[np.float32([[0.5, 0.5, 0], [1, 0, 0]])])
    half = np.full((1, 4096), 10, np.float16)
    compare("Softmax", [half], domain="", opset=13, expected=[np.full((1, 4096), 1 / 4096, np.float16)])
    nothing = np.full((1, 2), -np.inf, np.float32)
    compare("Softmax", [nothing], domain="", opset=13)


def test_hardmax_marks_the_first_of_equals():
    x = np.array([[1, 3, 3], [2, 2, 2]], np.float32)
    compare("Hardmax", [x], domain="", opset=13, expected=[np.float32([[0, 1, 0], [1, 0, 0]])])


def test_softmax_gradient_is_finite_at_a_masked_place():
    definition = resolve("", "Softmax", 13)
    runner = {"context": Bench("Softmax", "", 13, 1, 1)}
    mask = np.float32([0, -np.inf, 0])

    def first(x):
        return invoke(definition, [x + mask], {}, runner)[0][0]

    gradient = jax.grad(first)(np.float32([1, 2, 1]))
    np.testing.assert_allclose(gradient, [0.25, 0, -0.25], atol=1e-7)
    (y,) = traced_outputs("Softmax", [np.float32([1, -np.inf, 1])], {}, domain="", opset=13)
    np.testing.assert_array_equal(y, np.float32([0.5, 0, 0.5]))
