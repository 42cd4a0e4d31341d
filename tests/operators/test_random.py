"""Random operators: the bits of jax.random in both forms, and what the numbers must be like."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import Bench, host_outputs, traced_outputs
from transmuter_async.errors import OperatorError
from transmuter_async.operators import invoke, resolve
from transmuter_async.operators.random import normal, random_bits, uniform

KEYS = [np.array(pair, np.uint32) for pair in ((0, 0), (0, 42), (123456789, 987654321), (2**32 - 1, 2**32 - 1))]
BOTH = (host_outputs, traced_outputs)


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_bits_and_uniform_numbers_are_those_of_jax(key, shape):
    with jax.enable_x64(True), jax.threefry_partitionable(True):
        wrapped = jax.random.wrap_key_data(key, impl="threefry2x32")
        for width, dtype in ((32, np.float32), (64, np.float64)):
            bits = np.asarray(jax.random.bits(wrapped, shape, f"uint{width}"))
            np.testing.assert_array_equal(random_bits(key, shape, width), bits)
            numbers = np.asarray(jax.random.uniform(wrapped, shape, dtype))
            np.testing.assert_array_equal(uniform(key, shape, dtype), numbers)
            np.testing.assert_array_equal(jax.jit(lambda k, dtype=dtype: uniform(k, shape, dtype))(key), numbers)
            # XLA fuses the scaling into one rounding.
            scaled = np.asarray(jax.random.uniform(wrapped, shape, dtype, -2.0, 3.0))
            np.testing.assert_allclose(uniform(key, shape, dtype, -2.0, 3.0), scaled, rtol=0, atol=5e-7)
            drawn = np.asarray(jax.random.normal(wrapped, shape, dtype))
            np.testing.assert_allclose(normal(key, shape, dtype), drawn, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("run", BOTH)
def test_uniform_numbers_fill_the_half_open_interval(dtype, run):
    (y,) = run("RandomUniformLike", [np.zeros((200, 200), dtype)], {"low": -1.0, "high": 2.0, "seed": 3.0}, domain="")
    assert y.dtype == dtype
    wide = y.astype(np.float64)
    assert wide.min() >= -1
    assert wide.max() < 2
    # The mean of n such numbers has a deviation of 3 / sqrt(12 n) = 0.0043.
    assert abs(wide.mean() - 0.5) < 0.02
    assert abs(wide.std() - 3 / np.sqrt(12)) < 0.02


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("run", BOTH)
def test_normal_numbers_have_their_moments(dtype, run):
    (y,) = run("RandomNormalLike", [np.zeros((200, 200), dtype)], {"mean": 3.0, "scale": 2.0, "seed": 5.0}, domain="")
    assert y.dtype == dtype
    wide = (y.astype(np.float64) - 3) / 2
    assert abs(wide.mean()) < 0.03
    assert abs(wide.std() - 1) < 0.02
    assert abs((wide**3).mean()) < 0.08
    assert abs((wide**4).mean() - 3) < 0.2


@pytest.mark.parametrize("op", ["RandomNormal", "RandomUniform"])
def test_shapes_and_types_come_from_the_attributes(op):
    for dtype, number in ((np.float32, 1), (np.float16, 10), (np.float64, 11)):
        for run in BOTH:
            (y,) = run(op, [], {"shape": (2, 0, 3), "dtype": number}, domain="")
            assert (y.shape, y.dtype) == ((2, 0, 3), dtype)
            (y,) = run(op, [], {"shape": (4, 3), "dtype": number, "seed": 1.0}, domain="")
            (again,) = run(op, [], {"shape": (4, 3), "dtype": number, "seed": 1.0}, domain="")
            (other,) = run(op, [], {"shape": (4, 3), "dtype": number, "seed": 2.0}, domain="")
            np.testing.assert_array_equal(y, again)
            assert (y != other).any()
    with pytest.raises(OperatorError, match="no float"):
        host_outputs(op, [], {"shape": (2,), "dtype": 6}, domain="")


def test_both_forms_draw_the_same():
    x = np.zeros((50, 3), np.float32)
    probabilities = np.random.default_rng(0).random((50, 3)).astype(np.float32)
    logits = np.log(probabilities)
    for op, inputs, attributes, tolerance in (
        ("RandomUniformLike", [x], {"seed": 1.0}, 0),
        ("RandomNormalLike", [x], {"seed": 1.0}, 1e-5),
        ("Bernoulli", [probabilities], {"seed": 1.0}, 0),
        ("Multinomial", [logits], {"seed": 1.0, "sample_size": 20}, 0),
    ):
        (host,), (traced,) = (run(op, inputs, attributes, domain="") for run in BOTH)
        assert host.dtype == traced.dtype
        np.testing.assert_allclose(traced, host, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", BOTH)
def test_bernoulli_has_the_rate_of_its_input(run):
    p = np.repeat(np.float32([[0.0], [0.25], [0.9], [1.0]]), 20000, axis=1)
    (y,) = run("Bernoulli", [p], {"seed": 7.0, "dtype": 7}, domain="")
    assert y.dtype == np.int64
    rates = y.mean(axis=1)
    assert rates[0] == 0
    assert rates[3] == 1
    np.testing.assert_allclose(rates[1:3], [0.25, 0.9], atol=0.015)
    (y,) = run("Bernoulli", [p.astype(np.float64)], {"seed": 7.0}, domain="")
    assert y.dtype == np.float64
    assert set(np.unique(y)) == {0, 1}


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("classes", [1, 2, 3, 8, 13])
def test_multinomial_has_the_frequencies_of_its_logits(run, classes):
    rng = np.random.default_rng(classes)
    weights = rng.random((2, classes))
    weights[0, 0] = 0 if classes > 1 else 1
    weights[1, -1] = 0 if classes > 1 else 1
    with np.errstate(divide="ignore"):
        logits = np.log(weights).astype(np.float32) + 50
    (y,) = run("Multinomial", [logits], {"seed": 3.0, "sample_size": 30000, "dtype": 7}, domain="")
    assert (y.shape, y.dtype) == ((2, 30000), np.int64)
    for row, weight in zip(y, weights, strict=True):
        counts = np.bincount(row, minlength=classes) / 30000
        np.testing.assert_allclose(counts, weight / weight.sum(), atol=0.015)
        assert (counts[weight == 0] == 0).all()


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("opset", [12, 13, 22])
def test_training_dropout_drops_its_share_and_scales_the_rest(run, opset):
    x = np.random.default_rng(0).uniform(1, 2, (100, 200)).astype(np.float32)
    inputs = [x, np.asarray(0.25, np.float32), np.asarray(True)]
    y, mask = run("Dropout", inputs, {"seed": 3}, domain="", opset=opset, outputs=2)
    assert mask.dtype == np.bool_
    assert abs(mask.mean() - 0.75) < 0.02
    np.testing.assert_allclose(y, np.where(mask, x / 0.75, 0), rtol=1e-6)
    again, _ = run("Dropout", inputs, {"seed": 3}, domain="", opset=opset, outputs=2)
    np.testing.assert_array_equal(y, again)
    y, mask = run("Dropout", [x, np.asarray(0.0, np.float32), np.asarray(True)], {}, domain="", opset=opset, outputs=2)
    np.testing.assert_array_equal(y, x)
    assert mask.all()


@pytest.mark.parametrize("run", BOTH)
def test_dropout_passes_on_where_it_does_not_train(run):
    x = np.float32([[1, 2, 3]])
    for opset, mask_type in ((7, np.float32), (10, np.bool_), (13, np.bool_)):
        y, mask = run("Dropout", [x], {}, domain="", opset=opset, outputs=2)
        np.testing.assert_array_equal(y, x)
        assert mask.dtype == mask_type
        assert mask.all()
    inputs = [x, np.asarray(0.9, np.float32), np.asarray(False)]
    y, mask = run("Dropout", inputs, {}, domain="", opset=13, outputs=2)
    np.testing.assert_array_equal(y, x)
    assert mask.all()
    for opset in (1, 6):
        (y,) = run("Dropout", [x], {"is_test": 1}, domain="", opset=opset)
        np.testing.assert_array_equal(y, x)
        y, mask = run("Dropout", [np.ones((50, 50), np.float32)], {"ratio": 0.5}, domain="", opset=opset, outputs=2)
        assert mask.dtype == np.float32
        np.testing.assert_array_equal(y, mask * 2)


def test_a_ratio_out_of_range_is_refused():
    inputs = [np.ones(3, np.float32), np.asarray(1.0, np.float32), np.asarray(True)]
    with pytest.raises(OperatorError, match=r"ratio is 1\.0"):
        host_outputs("Dropout", inputs, {}, domain="", opset=13)


def test_the_gradient_of_dropout_is_its_scaled_mask():
    definition = resolve("", "Dropout", 13)
    runner = {"context": Bench("Dropout", "", 13, 3, 2), "n_outputs": 2}

    def total(x):
        y, mask = invoke(definition, [x, np.asarray(0.5, np.float32), np.asarray(True)], {}, runner)
        return y.sum(), mask

    gradient, mask = jax.grad(total, has_aux=True)(np.ones(64, np.float32))
    np.testing.assert_array_equal(gradient, np.asarray(mask) * np.float32(2))
