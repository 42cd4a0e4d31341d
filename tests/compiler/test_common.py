"""Weights that two models have in common are one array; weights that only look alike are not."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np

from tests.compiler.support import Session, assert_same, node, proto
from transmuter_async.compiler import common

W = np.random.default_rng(0).standard_normal((256, 128)).astype(np.float32)


def product(weights: np.ndarray, operator: str = "Relu") -> Session:
    made = proto(
        [node("MatMul", ["x", "w"], ["p"]), node(operator, ["p"], ["y"])],
        ["x:float[n,256]"],
        ["y:float[n,128]"],
        {"w": weights},
    )
    return Session(made)


def weight(session: Session) -> np.ndarray:
    return session.prepared.graph.initializers["w"]


def test_equal_weights_of_two_models_are_one_array_on_host_and_device() -> None:
    one, two = product(W), product(W.copy(), "Sigmoid")
    assert weight(one) is weight(two)
    assert weight(two) is two.prepared.model.graph.initializers["w"], "nor does the model keep its own"
    x = np.ones((2, 256), np.float32)
    assert_same(one({"x": x}), {"y": np.maximum(x @ W, 0)}, rtol=1e-4)
    assert_same(two({"x": x}), {"y": 1 / (1 + np.exp(-(x @ W)))}, rtol=1e-4)
    [first], [second] = (session.cache.segments()[0].weights for session in (one, two))
    assert first is second


def test_what_differs_in_one_number_where_no_sample_is_taken_stays_apart() -> None:
    other = W.copy()
    step = W.nbytes // common._SAMPLE
    assert step > 1
    other.reshape(-1).view(np.uint8)[step * 40 + 1] ^= 1
    one, two = product(W), product(other)
    assert weight(one) is not weight(two)
    np.testing.assert_array_equal(weight(two), other)


def test_dtype_and_shape_count() -> None:
    one = product(W)
    turned = proto(
        [node("MatMul", ["x", "w"], ["y"])], ["x:float[n,128]"], ["y:float[n,256]"], {"w": W.reshape(128, 256)}
    )
    two = Session(turned)
    assert weight(two).shape == (128, 256)
    assert weight(one).shape == (256, 128)


def test_nothing_is_kept_alive_and_the_other_model_goes_on() -> None:
    values = W + 1
    one, two = product(values), product(values.copy())
    x = np.ones((1, 256), np.float32)
    one({"x": x})
    two({"x": x})
    held = weakref.ref(weight(one))
    on_device: weakref.ref[jax.Array] = weakref.ref(one.cache.segments()[0].weights[0])
    del one
    gc.collect()
    assert_same(two({"x": x}), {"y": np.maximum(x @ values, 0)}, rtol=1e-4)
    del two
    gc.collect()
    assert held() is None
    assert on_device() is None
    assert not any(entry[0]() is None for entry in common._DEVICE.values())
