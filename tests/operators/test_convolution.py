"""Conv, ConvTranspose, DeformConv, Col2Im and CausalConvWithState against onnxruntime, in both forms."""

from __future__ import annotations

import math

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.operators.gradients import check_gradient
from tests.operators.oracle import Bench, compare, host_outputs
from transmuter_async.operators import invoke, resolve


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def bound(w):
    """Rounding of a sum of as many products as a filter has elements, in float32 and in any order."""
    return 2e-6 * max(8.0, math.sqrt(math.prod(w[1:])))


SHAPES = [
    ((2, 4, 10), (6, 4, 3), 1),
    ((2, 4, 80), (8, 1, 31), 4),  # depthwise, two filters for each channel
    ((2, 8, 9, 7), (6, 8, 3, 3), 1),
    ((2, 8, 9, 7), (6, 8, 1, 1), 1),
    ((2, 8, 9, 7), (8, 4, 3, 3), 2),
    ((2, 8, 9, 7), (16, 1, 3, 3), 8),
    ((1, 20, 9, 7), (4, 10, 3, 3), 2),
    ((2, 3, 5, 6, 7), (4, 3, 2, 3, 2), 1),
    ((2, 3, 9, 1), (4, 3, 3, 1), 1),  # an axis of size one
    ((2, 4, 1, 9), (4, 1, 1, 3), 4),
    ((1, 1, 2000), (5, 1, 400), 1),
]
GEOMETRIES = [
    {},
    {"strides": 2},
    {"pads": 1},
    {"auto_pad": "SAME_UPPER", "strides": 2},
    {"auto_pad": "SAME_LOWER", "strides": 3},
    {"dilations": 2, "pads": 2},
]


def spread(geometry, rank):
    """One entry for each spatial axis."""
    many = {"strides": rank, "dilations": rank, "pads": 2 * rank, "output_padding": rank}
    return {key: [value] * many[key] if key in many else value for key, value in geometry.items()}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("x", "w", "group"), SHAPES)
def test_conv(x, w, group, geometry):
    inputs = [random(*x), random(*w, seed=1), random(w[0], seed=2)]
    compare("Conv", inputs, {"group": group, **spread(geometry, len(x) - 2)}, domain="", opset=11,
            rtol=1e-5, atol=bound(w))  # fmt: skip


def test_conv_with_different_padding_on_the_sides():
    inputs = [random(1, 2, 6, 7), random(3, 2, 3, 2, seed=1)]
    compare("Conv", inputs, {"pads": [2, 0, 1, 1], "strides": [2, 1]}, domain="", opset=11, rtol=1e-5, atol=1e-5)


def test_conv_of_a_large_map_in_parts():
    """The host form unfolds a part at a time; the parts must join."""
    inputs = [random(1, 32, 200, 180), random(4, 32, 5, 5, seed=1)]
    compare("Conv", inputs, {"pads": [2] * 4}, domain="", opset=11, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("group", [1, 256])
def test_narrow_convolutions_accumulate_in_float32(dtype, group):
    channels = 256
    x = np.ones((1, channels, 12), dtype)
    w = np.ones((group if group > 1 else 2, channels // group, 9), dtype)
    total = 9 * channels // group
    expected = np.full((1, w.shape[0], 4), total, np.float32).astype(dtype)
    compare("Conv", [x, w], {"group": group}, domain="", opset=22, expected=[expected])


@pytest.mark.parametrize(
    ("x", "w"), [((0, 3, 5, 5), (4, 3, 3, 3)), ((2, 0, 5, 5), (4, 0, 3, 3)), ((2, 3, 0, 5), (4, 3, 1, 3))]
)
def test_conv_of_nothing_is_the_bias(x, w):
    outputs = (x[0], 4, x[2] - w[2] + 1, x[3] - w[3] + 1)
    expected = np.broadcast_to(np.arange(4, dtype=np.float32).reshape(4, 1, 1), outputs)
    inputs = [np.zeros(x, np.float32), np.ones(w, np.float32), np.arange(4, dtype=np.float32)]
    compare("Conv", inputs, domain="", opset=11, expected=[expected])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="larger than the padded input"):
        host_outputs("Conv", [random(1, 3, 2, 2), random(4, 3, 3, 3)], {}, domain="", opset=11)
    with pytest.raises(ValueError, match="do not fit together with group=2"):
        host_outputs("Conv", [random(1, 3, 5, 5), random(4, 3, 3, 3)], {"group": 2}, domain="", opset=11)
    with pytest.raises(ValueError, match="kernel_shape"):
        host_outputs("Conv", [random(1, 3, 5, 5), random(4, 3, 3, 3)], {"kernel_shape": (2, 2)}, domain="", opset=11)


def test_other_platforms_use_the_plain_convolution():
    """The lowerings for CPUs and XLA's own convolution give the same."""
    definition = resolve("", "Conv", 22)
    for x, w, group in SHAPES:
        inputs = [random(*x), random(*w, seed=1)]
        bench = Bench("Conv", "", 22, 2, 1)
        bench.platform = "gpu"
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            runner = {"context": bench, "n_outputs": 1}
            (y,) = jax.jit(lambda *v, g=group: invoke(definition, v, {"group": g}, runner))(*inputs)  # noqa: B023
        (expected,) = host_outputs("Conv", inputs, {"group": group}, domain="", opset=22)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=10 * bound(w))


TRANSPOSED = [((2, 4, 6), (4, 2, 5), 2), ((2, 4, 5, 6), (4, 3, 3, 3), 1), ((2, 4, 5, 6), (4, 1, 4, 4), 4),
              ((1, 2, 3, 4, 5), (2, 2, 3, 3, 3), 1)]  # fmt: skip


@pytest.mark.parametrize(
    "geometry",
    [{}, {"strides": 2}, {"strides": 3, "output_padding": 1}, {"pads": 1, "strides": 2}, {"dilations": 2},
     {"auto_pad": "SAME_UPPER", "strides": 2}, {"auto_pad": "SAME_LOWER", "strides": 3},
     {"auto_pad": "SAME_UPPER", "strides": 2, "output_padding": 1}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("x", "w", "group"), TRANSPOSED)
def test_conv_transpose(x, w, group, geometry):
    inputs = [random(*x), random(*w, seed=1), random(w[1] * group, seed=2)]
    compare("ConvTranspose", inputs, {"group": group, **spread(geometry, len(x) - 2)}, domain="", opset=11,
            rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize(
    ("auto_pad", "extra"), [("NOTSET", [0, 0]), ("SAME_UPPER", [0, 0]), ("SAME_LOWER", [0, 0]), ("NOTSET", [1, 1])]
)
def test_output_shape_decides_the_padding(auto_pad, extra):
    attributes = {"strides": [2, 2], "output_shape": [9, 11], "output_padding": extra, "auto_pad": auto_pad}
    compare("ConvTranspose", [random(1, 2, 5, 6), random(2, 3, 3, 3, seed=1)], attributes, domain="", opset=11,
            rtol=1e-5, atol=1e-5)  # fmt: skip


def test_output_shape_beyond_the_kernels_is_zero_there():
    x, w = random(1, 1, 3, 3), random(1, 2, 3, 3, seed=1)
    attributes = {"strides": (3, 2), "output_shape": (10, 8)}
    (full,) = host_outputs("ConvTranspose", [x, w], {"strides": (3, 2)}, domain="", opset=11)
    expected = np.pad(full, [(0, 0), (0, 0), (0, 1), (0, 1)])
    compare("ConvTranspose", [x, w], attributes, domain="", opset=11, rtol=1e-5, atol=1e-6, expected=[expected])


@pytest.mark.parametrize("offset_group", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_deform_conv(offset_group, masked):
    x, w = random(2, 4, 7, 6), random(3, 2, 3, 2, seed=1)
    attributes = {
        "group": 2,
        "offset_group": offset_group,
        "pads": [1, 0, 1, 1],
        "strides": [2, 1],
        "kernel_shape": [3, 2],
    }
    outputs = (4, 6)
    w = random(4, 2, 3, 2, seed=1)
    offset = 1.5 * random(2, offset_group * 6 * 2, *outputs, seed=2)
    mask = random(2, offset_group * 6, *outputs, seed=3) if masked else None
    compare(
        "DeformConv", [x, w, offset, random(4, seed=4), mask], attributes, domain="", opset=19, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("attributes", [{}, {"strides": [2, 3]}, {"dilations": [2, 1], "pads": [1, 0, 2, 1]}], ids=str)
def test_col2im(attributes):
    image, block = np.array([8, 9]), np.array([2, 3])
    dilations, pads = attributes.get("dilations", [1, 1]), attributes.get("pads", [0] * 4)
    strides = attributes.get("strides", [1, 1])
    blocks = math.prod(
        (n + pads[i] + pads[i + 2] - (k - 1) * dilations[i] - 1) // strides[i] + 1
        for i, (n, k) in enumerate(zip(image, block, strict=True))
    )
    compare("Col2Im", [random(2, 3 * 6, blocks), image, block], attributes, domain="", opset=18, rtol=1e-5, atol=1e-5)


def test_a_causal_convolution_in_two_calls_is_one():
    x, w, b = random(2, 3, 9), random(3, 1, 4, seed=1), random(3, seed=2)
    run = {"activation": "silu"}
    whole, state = host_outputs("CausalConvWithState", [x, w, b], run, domain="", opset=27, outputs=2)
    first, middle = host_outputs("CausalConvWithState", [x[:, :, :2], w, b], run, domain="", opset=27, outputs=2)
    compare("CausalConvWithState", [x[:, :, 2:], w, b, middle], run, domain="", opset=27, outputs=2,
            rtol=1e-5, atol=1e-6, expected=[whole[:, :, 2:], state])  # fmt: skip
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (3, 0)])
    y = sum(padded[:, :, t : t + 9] * w[:, 0, t][:, None] for t in range(4)) + b[:, None]
    np.testing.assert_allclose(whole, y / (1 + np.exp(-y)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first, whole[:, :, :2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("x", "w", "group"), [SHAPES[1], SHAPES[2], SHAPES[3], SHAPES[5], SHAPES[8]])
def test_gradients(x, w, group):
    geometry = spread({"strides": 2, "pads": 0}, len(x) - 2)
    inputs = [random(*x, dtype=np.float64), random(*w, dtype=np.float64, seed=1), random(w[0], dtype=np.float64)]
    check_gradient("Conv", inputs, {"group": group, **geometry})


def test_gradients_of_the_others():
    f = np.float64
    check_gradient("ConvTranspose", [random(1, 2, 4, 5, dtype=f), random(2, 3, 3, 3, dtype=f)], {"strides": (2, 2)})
    check_gradient(
        "DeformConv",
        [random(1, 2, 5, 5, dtype=f), random(2, 2, 2, 2, dtype=f), 0.3 * random(1, 8, 4, 4, dtype=f, seed=5)],
    )
