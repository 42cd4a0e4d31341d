"""Picking by index, by order and by mask: against onnxruntime in both forms, and the standard's odd cases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.operators.oracle import Bench, agree, compare, host_outputs, traced_outputs
from transmuter_async.compiler import pinned
from transmuter_async.errors import OperatorError

NAN, INF = float("nan"), float("inf")
rng = np.random.default_rng(0)


def i64(*values):
    return np.array(values, np.int64)


def f(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def at(op, inputs, attributes=None, *, opset=13, **options):
    compare(op, inputs, attributes, domain="", opset=opset, **options)


# --- Gather and its kin ---


@pytest.mark.parametrize("static", [(), (1,)])
@pytest.mark.parametrize(
    ("shape", "axis", "indices"),
    [
        ((4, 3), 0, i64(-1, 0, 2)),
        ((4, 3), 1, np.array(1, np.int64)),
        ((4, 3), 0, i64(1, 2, 3)),
        ((4, 3), -1, i64(2, -3, 0, 0).reshape(2, 2)),
        ((4, 3), 0, np.array([[1], [-4]], np.int32)),
        ((4, 0), 0, i64(1, 3)),
        ((4, 3), 0, np.zeros((0, 2), np.int64)),
        ((0, 3), 0, np.zeros((0,), np.int64)),
    ],
)
def test_gather_as_onnxruntime(shape, axis, indices, static):
    at("Gather", [f(*shape), indices], {"axis": axis}, static=static)


def test_gather_elements_as_onnxruntime():
    at("GatherElements", [f(3, 4), i64(1, 0, -1, 3).reshape(2, 2)], {"axis": 1})
    at("GatherElements", [f(3, 4), i64(1, 0, -3, 2, 1, 1).reshape(3, 2)], {"axis": 0})
    at("GatherElements", [f(3, 0), np.zeros((2, 0), np.int64)], {"axis": 0})
    with pytest.raises(ValueError, match="do not lie within"):
        host_outputs("GatherElements", [f(1, 4), i64(1, 0, 2, 1).reshape(2, 2)], {"axis": 1}, domain="", opset=13)


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_gather_nd_as_onnxruntime(batch_dims, depth):
    data = f(2, 3, 4, 5)
    sizes = data.shape[batch_dims : batch_dims + depth]
    tuples = np.stack([rng.integers(-size, size, (*data.shape[:batch_dims], 3, 2)) for size in sizes], -1)
    at("GatherND", [data, tuples.astype(np.int64)], {"batch_dims": batch_dims})


def test_gather_nd_of_nothing():
    at("GatherND", [f(2, 3), np.zeros((0, 1), np.int64)], {}, opset=11)
    at("GatherND", [f(2, 0), i64(1, 0).reshape(2, 1)], {}, expected=[f(2, 0)])


@pytest.mark.parametrize("index", [4, -5, 2**40])
def test_an_index_out_of_range_raises_on_the_host(index):
    for op, data, indices in (
        ("Gather", f(4), i64(index)),
        ("GatherElements", f(4), i64(index)),
        ("GatherND", f(4), i64(index).reshape(1, 1)),
        ("Gather", f(0), i64(index)),
    ):
        with pytest.raises(OperatorError, match="out of range"):
            host_outputs(op, [data, indices], {}, domain="", opset=13)


class Replacing(Bench):
    """A run that wants what a wrong index gives replaced."""

    def bounded(self, indices, size, *, input, axis, inclusive=False):
        normal = jnp.where(indices < 0, indices + size, indices)
        valid = (normal >= 0) & (normal < size + inclusive)
        return jnp.clip(normal, 0, np.maximum(np.asarray(size) + inclusive - 1, 0)), valid

    def fill_invalid(self, result, valid):
        return jnp.where(valid, result, jnp.nan)


def test_a_wrong_index_marks_exactly_what_it_reached(monkeypatch):
    monkeypatch.setattr("tests.operators.oracle.Bench", Replacing)
    rows = f(3, 2)
    for op, indices, expected in (
        ("Gather", i64(1, 7), [rows[1], [NAN, NAN]]),
        ("GatherND", i64(1, 7).reshape(2, 1), [rows[1], [NAN, NAN]]),
        ("GatherElements", i64(1, 7).reshape(1, 2), [[2, NAN]]),
    ):
        (got,) = traced_outputs(op, [rows, indices], {}, domain="", opset=13)
        np.testing.assert_array_equal(got, np.array(expected, np.float32))
    (got,) = traced_outputs("ScatterND", [rows, i64(7).reshape(1, 1), f(1, 2)], {}, domain="", opset=18)
    assert np.isnan(got).all()


def test_the_gradient_of_gather_sums_repeated_rows():
    def total(x):
        return host_outputs("Gather", [x, jnp.asarray([0, 2, 0])], {}, domain="", opset=13)[0].sum()

    with pinned():
        gradient = jax.grad(total)(jnp.asarray(f(3, 2)))
    np.testing.assert_array_equal(gradient, np.array([[2, 2], [0, 0], [1, 1]], np.float32))


# --- OneHot ---


def test_one_hot_wraps_negative_indices_and_leaves_others_off():
    values = np.array([-1, 5], np.float32)
    expected = np.full((4, 3), -1, np.float32)
    expected[0, 1] = expected[1, 2] = 5
    at("OneHot", [i64(1, -1, 3, -4), i64(3), values], {}, opset=11, expected=[expected])
    at("OneHot", [i64(1, -1, 3, -4), i64(3), values], {"axis": 0}, opset=11, expected=[expected.T])
    at(
        "OneHot",
        [np.array([1.7, -1.2, 3, -4], np.float32), i64(3).reshape(()), values],
        {},
        opset=11,
        expected=[expected],
    )


def test_one_hot_of_small_integers_with_a_large_depth():
    (got,) = host_outputs("OneHot", [np.array([-1], np.int8), i64(300), i64(0, 1)], {}, domain="", opset=11)
    assert got.dtype == np.int64 and got.argmax() == 299
    (text,) = host_outputs("OneHot", [i64(1), i64(2), np.array(["no", "yes"], object)], {}, domain="", opset=11)
    assert text.tolist() == [["no", "yes"]]


# --- TopK ---


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_orders_ties_zeros_and_nan_as_onnxruntime(largest):
    for values in ([1, NAN, 3, INF, NAN, -INF, 3, 1], [-0.0, 0.0, -0.0, 0.0, 1, -1, 0.0, 1], [2, 2, 2, 2, 2, 2, 2, 2]):
        for count in (0, 1, 5, 8):
            at("TopK", [np.array(values, np.float32), i64(count)], {"largest": largest}, opset=11, outputs=2)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "int32", "int64", "uint32", "uint64", "float16", "bfloat16", "float32", "float64"],
)
def test_top_k_in_every_dtype(dtype, largest):
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    x = rng.integers(0, 6, (3, 9, 2)).astype(kind)
    if np.dtype(kind).kind in "iu":
        x[0, :2, 0] = np.iinfo(kind).min, np.iinfo(kind).max
    exact = x.astype(object) if np.dtype(kind).kind in "iu" else x.astype(np.float64)
    order = np.array(
        [
            [sorted(range(9), key=lambda i: ((-1 if largest else 1) * exact[a, i, b], i))[:4] for b in range(2)]
            for a in range(3)
        ]
    )
    order = np.moveaxis(order, -1, 1).astype(np.int64)
    at(
        "TopK",
        [x, i64(4)],
        {"axis": 1, "largest": largest},
        opset=24,
        expected=[np.take_along_axis(x, order, 1), order],
        outputs=2,
    )


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("special", [None, NAN, INF, -INF])
def test_top_k_of_long_rows_keeps_the_rule_of_ties(largest, special):
    """The host form does not sort a long row; here nearly everything is equal to something else."""
    x = rng.integers(0, 5, (3, 400)).astype(np.float32)
    if special is not None:
        x[1, ::50] = special
    at("TopK", [x, i64(12)], {"largest": largest}, opset=11, outputs=2)
    at("TopK", [x.T.copy(), i64(12)], {"largest": largest, "axis": 0}, opset=11, outputs=2)


def test_top_k_of_old_versions_and_of_nothing():
    at("TopK", [f(2, 3)], {"k": 2}, opset=1, outputs=2, expected=[f(2, 3)[:, :0:-1], i64(2, 1, 2, 1).reshape(2, 2)])
    at("TopK", [f(0, 3), i64(2)], {}, opset=10, outputs=2)
    with pytest.raises(ValueError, match="not within"):
        host_outputs("TopK", [f(3), i64(4)], {}, domain="", opset=11)


def test_the_gradient_of_top_k_reaches_the_chosen():
    def total(x):
        return (
            host_outputs("TopK", [x, i64(2)], {"largest": 0}, domain="", opset=11)[0]
            * jnp.asarray([1.0, 10.0], x.dtype)
        ).sum()

    with pinned():
        gradient = jax.grad(total)(jnp.asarray(np.array([3, 1, 2], np.float32)))
    np.testing.assert_array_equal(gradient, np.array([0, 1, 10], np.float32))


# --- masks and sets ---


def test_non_zero():
    x = np.array([[1, 0], [NAN, -0.0]], np.float32)
    (got,) = host_outputs("NonZero", [x], {}, domain="", opset=13)
    agree(got, np.array([[0, 1], [0, 0]], np.int64))
    for x, shape in ((f(0, 3), (2, 0)), (np.array(3.0), (0, 1)), (np.array(False), (0, 0))):
        (got,) = host_outputs("NonZero", [x], {}, domain="", opset=13)
        assert got.shape == shape and got.dtype == np.int64


def test_compress_as_onnxruntime():
    at("Compress", [f(3, 2), np.array([False, True])], {"axis": 0}, opset=11)
    at("Compress", [f(3, 2), np.array([True, False, False, True])], {}, opset=11)
    at("Compress", [f(3), np.array([True, False, True, True, True])], {}, opset=11)  # beyond the end: dropped
    at("Compress", [f(3, 0), np.array([True, True])], {"axis": 0}, opset=11)


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_unique_as_onnxruntime(axis, ordered):
    x = rng.integers(0, 2, (4, 5, 2)).astype(np.int64)
    at("Unique", [x], {"axis": axis, "sorted": ordered}, opset=11, outputs=4, traced=False)


def test_unique_of_floats_strings_and_nothing():
    at("Unique", [np.array([2, -1, 2, 0.5], np.float32)], {"sorted": 0}, opset=11, outputs=4, traced=False)
    at("Unique", [np.array(["b", "a", "b"], object)], {}, opset=11, outputs=4, traced=False)
    values, first, inverse, counts = host_outputs(
        "Unique", [np.array([NAN, 1, NAN], np.float32)], {}, domain="", opset=11, outputs=4
    )
    agree(values, np.array([1, NAN], np.float32))
    assert (first.tolist(), inverse.tolist(), counts.tolist()) == ([1, 0], [1, 0, 1], [1, 2])
    values, *_ = host_outputs(
        "Unique", [np.array([["b", "x"], ["a", "x"], ["b", "x"]], object)], {"axis": 0}, domain="", opset=11
    )
    assert values.tolist() == [["a", "x"], ["b", "x"]]
    values, first, inverse, counts = host_outputs("Unique", [f(3, 0)], {"axis": 0}, domain="", opset=11, outputs=4)
    assert values.shape == (1, 0) and counts.tolist() == [3] and inverse.tolist() == [0, 0, 0]
    values, *others = host_outputs("Unique", [f(0)], {}, domain="", opset=11, outputs=4)
    assert values.shape == (0,) and all(other.shape == (0,) for other in others)
