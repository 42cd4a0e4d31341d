"""Pooling against onnxruntime and the standard's text, in both forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.compiler.support import Session, assert_same, by_onnxruntime, node, proto
from tests.operators.gradients import check_gradient
from tests.operators.oracle import compare, host_outputs
from transmuter_async.operators.windows import separable, view, windows

SHAPES = [((2, 3, 10), [3]), ((1, 2, 7, 9), [3, 2]), ((1, 2, 5, 6, 7), [2, 3, 2])]
GEOMETRIES = [
    {},
    {"strides": 3, "ceil_mode": 1},
    {"pads": 1, "strides": 2, "ceil_mode": 1},
    {"auto_pad": "SAME_UPPER", "strides": 2},
    {"auto_pad": "SAME_LOWER", "strides": 2},
    {"auto_pad": "VALID", "strides": 2},
    {"dilations": 2, "strides": 2},
]


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def spread(geometry, kernel):
    rank = len(kernel)
    many = {"strides": rank, "dilations": rank, "pads": 2 * rank}
    return {"kernel_shape": kernel, **{k: [v] * many[k] if k in many else v for k, v in geometry.items()}}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("shape", "kernel"), SHAPES)
def test_pooling(shape, kernel, geometry):
    x, attributes = random(*shape), spread(geometry, kernel)
    compare("MaxPool", [x], attributes, domain="", opset=12)
    for order in (0, 1):
        compare("MaxPool", [x], {**attributes, "storage_order": order}, domain="", opset=12, outputs=2)
    for padding in (0, 1):
        compare(
            "AveragePool", [x], {**attributes, "count_include_pad": padding}, domain="", opset=19, rtol=1e-5, atol=1e-6
        )
    compare("LpPool", [x], {**attributes, "p": 3}, domain="", opset=18, rtol=1e-4, atol=1e-5)


def test_ceil_mode_gives_valid_no_window_more():
    """The standard's formula: ceil((10 - 3 + 1) / 2) = 4. onnxruntime says 5."""
    attributes = {"kernel_shape": [3], "strides": [2], "auto_pad": "VALID", "ceil_mode": 1}
    x = np.arange(10, dtype=np.float32).reshape(1, 1, 10)
    compare("MaxPool", [x], attributes, domain="", opset=22, expected=[x[:, :, 2::2]])


@pytest.mark.parametrize("opset", [11, 19])
def test_the_last_window_is_divided_by_its_real_extent(opset):
    attributes = {"kernel_shape": [7], "strides": [3], "pads": [3, 3], "ceil_mode": 1, "count_include_pad": 1}
    x = random(1, 1, 20)
    padded = np.pad(x[0, 0], 3)
    starts = range(0, 26 - 3, 3)
    expected = [padded[s : s + 7].mean(dtype=np.float64) for s in starts]
    expected = np.asarray(expected, np.float32).reshape(1, 1, -1)
    compare("AveragePool", [x], attributes, domain="", opset=opset, rtol=1e-5, atol=1e-6, expected=[expected])


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_window_without_data_is_dropped(op):
    """The last window of ceil_mode would start in the padding: no NaN, no lowest float."""
    attributes = {"kernel_shape": [1], "strides": [2], "ceil_mode": 1, "pads": [0, 0]}
    x = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 4)
    compare(op, [x], attributes, domain="", opset=19, expected=[np.array([[[1, 3]]], np.float32)])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_max_pool_of_integers(dtype):
    x = np.random.default_rng(0).integers(0, 127, (1, 2, 7, 8)).astype(dtype)
    if dtype == np.int8:
        x = -x
    compare("MaxPool", [x], {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 2]}, domain="", opset=12)


def test_indices_of_equal_lowest_and_nan_elements():
    lowest = np.full((1, 1, 4), -np.inf, np.float32)
    attributes = {"kernel_shape": [2], "pads": [1, 0]}
    compare("MaxPool", [lowest], attributes, domain="", opset=12, outputs=2,
            expected=[lowest, np.array([[[0, 0, 1, 2]]])])  # fmt: skip
    x = np.array([[[1, np.nan, 3, 2]]], np.float32)
    compare("MaxPool", [x], {"kernel_shape": [2]}, domain="", opset=12, outputs=2,
            expected=[np.array([[[np.nan, np.nan, 3]]], np.float32), np.array([[[1, 1, 2]]])])  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_means_accumulate_in_float32(dtype):
    x = np.full((1, 1, 5000), 30000, dtype)
    compare("GlobalAveragePool", [x], domain="", opset=22, rtol=1e-3, expected=[x[:, :, :1]])
    compare("AveragePool", [x], {"kernel_shape": [5000]}, domain="", opset=22, rtol=1e-3, expected=[x[:, :, :1]])


def test_global_pools():
    x = random(2, 3, 4, 5)
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        compare(op, [x], domain="", opset=13, rtol=1e-5, atol=1e-6)
    compare("GlobalLpPool", [x], {"p": 3}, domain="", opset=13, rtol=1e-5, atol=1e-6)


def test_nothing_in_nothing_out():
    x = np.zeros((0, 3, 5, 5), np.float32)
    kernel = {"kernel_shape": [2, 2]}
    compare("MaxPool", [x], kernel, domain="", opset=12, expected=[np.zeros((0, 3, 4, 4), np.float32)])
    compare("AveragePool", [x], kernel, domain="", opset=19, expected=[np.zeros((0, 3, 4, 4), np.float32)])
    compare("GlobalMaxPool", [x], domain="", opset=13, expected=[np.zeros((0, 3, 1, 1), np.float32)])
    compare("GlobalAveragePool", [x], domain="", opset=13, expected=[np.zeros((0, 3, 1, 1), np.float32)])


def test_unpooling_undoes_pooling():
    x = random(2, 3, 6, 8)
    attributes = {"kernel_shape": (2, 2), "strides": (2, 2)}
    values, indices = host_outputs("MaxPool", [x], attributes, domain="", opset=12, outputs=2)
    expected = np.zeros_like(x)
    expected.reshape(-1)[indices.reshape(-1)] = values.reshape(-1)
    compare("MaxUnpool", [values, indices], attributes, domain="", opset=11, expected=[expected])
    larger = np.array([2, 3, 7, 9])
    compare("MaxUnpool", [values, indices, larger], attributes, domain="", opset=11,
            expected=[np.pad(expected, [(0, 0), (0, 0), (0, 1), (0, 1)])])  # fmt: skip
    with pytest.raises(Exception, match="out of range"):
        host_outputs("MaxUnpool", [values, indices + 10**6], attributes, domain="", opset=11)


def test_gradients():
    x = random(1, 2, 6, 7, dtype=np.float64)
    geometry = {"kernel_shape": (3, 2), "strides": (2, 1), "pads": (1, 0, 1, 1)}
    check_gradient("MaxPool", [x], geometry)
    check_gradient("AveragePool", [x], geometry)
    check_gradient("LpPool", [x], {**geometry, "p": 3})
    check_gradient("GlobalAveragePool", [x])
    check_gradient("GlobalLpPool", [x], {"p": 2})


def test_the_norm_of_zeros_has_gradient_zero():
    """check_gradient asks for finite gradients; differences of |x| around 0 cancel."""
    check_gradient("GlobalLpPool", [np.zeros((1, 1, 4))], {"p": 2})
    check_gradient("LpPool", [np.zeros((1, 1, 4))], {"p": 2, "kernel_shape": (2,)})


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(
    ("kernel", "strides", "pads"),
    [
        ((2, 2), (2, 2), (0, 0, 0, 0)),
        ((3, 2), (2, 2), (0, 0, 0, 0)),
        ((2, 2), (1, 1), (0, 0, 0, 0)),
        ((3, 3), (3, 3), (0, 0, 0, 0)),
        ((4, 3), (2, 2), (1, 0, 0, 0)),
        ((2, 7), (2, 4), (0, 0, 0, 0)),
    ],
)
def test_an_input_smaller_than_the_window_is_answered_as_onnxruntime_does(op, kernel, strides, pads):
    x = np.arange(30, dtype=np.float32).reshape(2, 3, 1, 5) - 7
    made = model_of(op, kernel, strides, pads)
    for compiler in ("xla", "eager"):
        assert_same(Session(made, compiler=compiler)({"x": x}), by_onnxruntime(made, {"x": x}))


def model_of(op, kernel, strides, pads):
    pool = node(op, ["x"], ["y"], kernel_shape=kernel, strides=strides, pads=pads)
    return proto([pool], ["x:float[a,b,c,d]"], ["y:float[e,f,g,h]"])


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_axis_after_axis_gives_what_all_at_once_gives(rank, last):
    """Also where a tap meets data in no window, and where strides leave elements over."""
    draw = np.random.default_rng(rank)
    for _ in range(25):
        kernel, strides, dilations = (tuple(int(n) for n in draw.integers(1, high, rank)) for high in (5, 4, 4))
        extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        low, high = ([int(draw.integers(0, e)) for e in extents] for _ in range(2))
        sizes = [int(draw.integers(max(1, e - a - b), e + 7)) for e, a, b in zip(extents, low, high, strict=True)]
        w = windows((2, 3, *sizes), kernel, strides=strides, dilations=dilations, pads=[*low, *high], auto_pad="")
        x = random(2, 3, *sizes)
        around = [(0, 0), (0, 0), *zip(low, high, strict=True)]
        for combine, fill, reduced in ((jnp.maximum, -np.inf, np.max), (jnp.add, 0, np.sum)):
            axes = tuple(range(-rank, 0))
            expected = reduced(view(np.pad(x, around, constant_values=fill), w), axis=axes)
            given = np.moveaxis(x, 1, -1) if last else x
            found = jax.jit(lambda x, w=w, c=combine, f=fill: separable(x, w, c, f, first=1 if last else 2))(given)
            on_host = separable(
                given, w, {jnp.maximum: np.maximum, jnp.add: np.add}[combine], fill, first=1 if last else 2
            )
            for each in (found, on_host):
                each = np.moveaxis(np.asarray(each), -1, 1) if last else each
                np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-5, err_msg=str(w))
