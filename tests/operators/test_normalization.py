"""Normalisations against onnxruntime and float64, in both forms."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.operators.gradients import check_gradient
from tests.operators.oracle import compare, host_outputs


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def positive(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float32)


def parameters(n=3):
    return [random(n, seed=1), random(n, seed=2), random(n, seed=3), positive(n, seed=4)]


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 4, 5), (0, 3, 4)])
def test_batch_normalization(shape, opset):
    x, (scale, bias, mean, var) = random(*shape), parameters()
    spread = (3, *(1,) * (len(shape) - 2))
    s, b, u, v = (p.astype(np.float64).reshape(spread) for p in (scale, bias, mean, var))
    expected = ((x - u) / np.sqrt(v + 1e-3) * s + b).astype(np.float32)
    compare("BatchNormalization", [x, scale, bias, mean, var], {"epsilon": 1e-3}, domain="", opset=opset,
            rtol=1e-5, atol=1e-5, expected=[expected])  # fmt: skip


def test_batch_normalization_in_training():
    x, (scale, bias, mean, var) = random(4, 3, 5), parameters()
    wide = x.astype(np.float64)
    u, v = wide.mean(axis=(0, 2)), wide.var(axis=(0, 2))
    y = (wide - u[:, None]) / np.sqrt(v + 1e-5)[:, None] * scale[:, None] + bias[:, None]
    moved = [mean * 0.8 + u * 0.2, var * 0.8 + v * 0.2]
    inputs, tolerance = [x, scale, bias, mean, var], {"rtol": 1e-5, "atol": 1e-5}
    as32 = [np.asarray(a, np.float32) for a in (y, *moved)]
    compare("BatchNormalization", inputs, {"training_mode": 1, "momentum": 0.8}, domain="", opset=15, outputs=3,
            expected=as32, **tolerance)  # fmt: skip
    saved = [np.asarray(a, np.float32) for a in (u, v)]
    compare("BatchNormalization", inputs, {"momentum": 0.8}, domain="", opset=9, outputs=5,
            expected=[*as32, *saved], **tolerance)  # fmt: skip
    compare("BatchNormalization", inputs, {"momentum": 0.8, "is_test": 0}, domain="", opset=6, outputs=5,
            expected=[*as32, *saved], **tolerance)  # fmt: skip


def test_batch_normalization_7_for_each_element():
    x = random(2, 3, 4)
    scale, bias, mean, var = random(3, 4), random(3, 4, seed=1), random(3, 4, seed=2), positive(3, 4)
    expected = ((x - mean) / np.sqrt(var + 1e-5) * scale + bias).astype(np.float32)
    compare("BatchNormalization", [x, scale, bias, mean, var], {"spatial": 0}, domain="", opset=7,
            rtol=1e-5, atol=1e-5, expected=[expected])  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 7), (2, 3, 4, 5)])
def test_instance_normalization(shape):
    inputs = [random(*shape), random(3, seed=1), random(3, seed=2)]
    compare("InstanceNormalization", inputs, domain="", opset=6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 1, -3])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization(axis, bias):
    shape = (2, 3, 4, 5)
    rest = shape[axis % 4 :]
    inputs = [random(*shape), random(*rest, seed=1), *([random(*rest, seed=2)] if bias else [])]
    compare("LayerNormalization", inputs, {"axis": axis}, domain="", opset=17, outputs=3, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [8000.0, 30000.0])
def test_narrow_norms_of_large_values(dtype, size):
    """Squares of 8000 are beyond float16; the result must be that of float32."""
    x = (random(3, 64) * size / 4).astype(dtype)
    scale = np.ones(64, dtype)
    wide = x.astype(np.float64)
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    centred = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    tolerance = 2.0**-7 if dtype == ml_dtypes.bfloat16 else 2.0**-10
    compare("RMSNormalization", [x, scale], domain="", opset=23, rtol=tolerance, expected=[rms.astype(dtype)])
    compare("LayerNormalization", [x, scale], domain="", opset=17, rtol=tolerance, expected=[centred.astype(dtype)])


def test_the_variance_is_not_a_difference_of_large_numbers():
    x = (random(2, 3, 50) * 0.01 + 1000).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    compare("InstanceNormalization", [x, np.ones(3, np.float32), np.zeros(3, np.float32)], domain="", opset=6,
            rtol=0.02, atol=0.02, expected=[expected.astype(np.float32)])  # fmt: skip


def test_rms_normalization_has_the_dtype_of_scale():
    x, scale = random(2, 8).astype(np.float16), random(8, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * scale
    compare(
        "RMSNormalization",
        [x, scale],
        domain="",
        opset=23,
        rtol=1e-5,
        atol=1e-6,
        expected=[expected.astype(np.float32)],
    )


@pytest.mark.parametrize(("opset", "count"), [(18, 2), (21, 4)])
def test_group_normalization(opset, count):
    """Until version 21 scale and bias hold a value for each group, then one for each channel."""
    x = random(2, 4, 3, 5)
    scale, bias = random(count, seed=1), random(count, seed=2)
    groups = x.astype(np.float64).reshape(2, 2, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    s, b = (np.repeat(p, 4 // count).reshape(4, 1, 1) for p in (scale, bias))
    expected = (normal.reshape(x.shape) * s + b).astype(np.float32)
    compare("GroupNormalization", [x, scale, bias], {"num_groups": 2}, domain="", opset=opset,
            rtol=1e-5, atol=1e-5, expected=[expected])  # fmt: skip
    with pytest.raises(ValueError, match="does not divide"):
        host_outputs("GroupNormalization", [x, scale, bias], {"num_groups": 3}, domain="", opset=opset)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_lrn(size):
    """The region is floor((size - 1) / 2) channels before and the ceiling after; onnxruntime takes odd sizes only."""
    x = random(2, 6, 3, 4)
    squares = np.pad(x.astype(np.float64) ** 2, [(0, 0), ((size - 1) // 2, size // 2), (0, 0), (0, 0)])
    total = sum(squares[:, k : k + 6] for k in range(size))
    expected = (x / (0.7 + 0.1 / size * total) ** 0.75).astype(np.float32)
    attributes = {"size": size, "alpha": 0.1, "bias": 0.7}
    compare("LRN", [x], attributes, domain="", opset=13, rtol=1e-5, atol=1e-6, expected=[expected])
    if size % 2:
        compare("LRN", [x], attributes, domain="", opset=13, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_lp_normalization_leaves_zeros(p, axis):
    x = random(3, 4, 5)
    x[0], x[:, 1], x[:, :, 2] = 0, 0, 0
    norm = np.linalg.norm(x.astype(np.float64), p, axis, keepdims=True)
    expected = np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(np.float32)
    compare(
        "LpNormalization", [x], {"p": p, "axis": axis}, domain="", opset=22, rtol=1e-5, atol=1e-6, expected=[expected]
    )


def test_mean_variance_normalization():
    compare("MeanVarianceNormalization", [random(2, 3, 4, 5)], domain="", opset=13, rtol=1e-4, atol=1e-5)
    compare("MeanVarianceNormalization", [random(2, 3, 4)], {"axes": [-1]}, domain="", opset=13, rtol=1e-4, atol=1e-5,
            expected=host_outputs("InstanceNormalization",
                                  [random(2, 3, 4), np.ones(3, np.float32), np.zeros(3, np.float32)],
                                  {"epsilon": 1e-12}, domain="", opset=6))  # fmt: skip


def test_nothing_in_nothing_out():
    x = np.zeros((0, 4), np.float32)
    one = np.ones(4, np.float32)
    compare("LayerNormalization", [x, one], domain="", opset=17, expected=[x])
    compare("RMSNormalization", [x, one], domain="", opset=23, expected=[x])
    compare("LpNormalization", [x], domain="", opset=22, expected=[x])


def test_gradients():
    f = np.float64
    x, one = random(2, 4, 5, dtype=f), random(4, dtype=f, seed=1)
    last = random(5, dtype=f, seed=1)
    check_gradient("LayerNormalization", [x, last, last])
    check_gradient("RMSNormalization", [x, last], opset=23)
    check_gradient("InstanceNormalization", [x, one, one])
    check_gradient("GroupNormalization", [x, one, one], {"num_groups": 2})
    check_gradient("LRN", [x], {"size": 3})
    check_gradient("MeanVarianceNormalization", [x], {"axes": (0, 2)})
    check_gradient("LpNormalization", [random(2, 5, dtype=f)])
    check_gradient("BatchNormalization", [random(3, 4, dtype=f), one, one, one, abs(one)])
    check_gradient(
        "BatchNormalization", [random(3, 4, dtype=f), one, one, one, abs(one)], {"training_mode": 1}, outputs=3
    )
