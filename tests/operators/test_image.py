"""Resize, GridSample, AffineGrid, regions and ImageDecoder against onnxruntime and the text, in both forms."""

from __future__ import annotations

import io

import jax
import numpy as np
import pytest
from PIL import Image

from tests.operators.gradients import check_gradient
from tests.operators.oracle import Bench, compare, host_outputs, traced_outputs
from transmuter_async.operators import invoke, resolve


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def f32(*values):
    return np.array(values, np.float32)


RESIZES = [((4, 5), [1, 1, 2.5, 0.6], None), ((7, 9), [1, 1, 0.7, 1 / 3], None), ((5, 6), None, [1, 2, 3, 9]),
           ((5, 6), None, [1, 2, 1, 1]), ((3, 4), [1, 1, 2, 3], None)]  # fmt: skip
COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]


def resize(x, scales=None, sizes=None, attributes=None, opset=18, roi=None, **how):
    inputs = [x, roi, None if scales is None else f32(*scales), *([] if sizes is None else [np.array(sizes)])]
    return compare("Resize", inputs, attributes, domain="", opset=opset, **how)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(("size", "scales", "sizes"), RESIZES)
def test_resize(size, scales, sizes, coordinates):
    x = random(1, 2, *size)
    run = {"coordinate_transformation_mode": coordinates}
    close = {"rtol": 2e-5, "atol": 2e-5}
    for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
        resize(x, scales, sizes, {**run, "nearest_mode": nearest}, traced=nearest == "floor")
    resize(x, scales, sizes, {**run, "mode": "linear"}, **close)
    resize(x, scales, sizes, {**run, "mode": "linear", "antialias": 1}, traced=False, **close)
    for outside in (0, 1):
        resize(x, scales, sizes, {**run, "mode": "cubic", "exclude_outside": outside}, traced=outside == 0, **close)


def test_align_corners_uses_the_fractional_length_from_version_19_on():
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 2, 4)
    run = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    resize(x, [1, 1, 0.6, 0.6], None, run, opset=18, rtol=1e-6, expected=[f32(1, 4).reshape(1, 1, 1, 2)])
    resize(x, [1, 1, 0.6, 0.6], None, run, opset=19, rtol=1e-6, expected=[f32(1, 22 / 7).reshape(1, 1, 1, 2)])


def test_cubic_down_to_one_element():
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    for coordinates in ("half_pixel", "pytorch_half_pixel"):
        resize(x, None, [1, 1, 1, 1], {"mode": "cubic", "coordinate_transformation_mode": coordinates}, rtol=1e-6)


def test_crop_and_resize_extrapolates():
    x = random(1, 1, 4, 5)
    roi = f32(0, 0, 0.1, 0.2, 1, 1, 0.9, 1.3)
    run = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 2.5, "mode": "linear"}
    resize(x, None, [1, 1, 3, 6], run, roi=roi, rtol=1e-5, atol=1e-5)


def test_the_aspect_ratio_and_axes():
    x = random(2, 4, 8, 3)
    for policy in ("not_larger", "not_smaller"):
        run = {"keep_aspect_ratio_policy": policy, "axes": [1, 2], "mode": "linear"}
        resize(x, None, [7, 6], run, rtol=1e-5, atol=1e-5)


def test_resize_10_and_upsample():
    x = random(1, 2, 5, 6)
    for mode in ("nearest", "linear"):
        for scales in ([1, 1, 1.5, 2.7], [1, 1, 0.6, 0.7]):
            compare("Resize", [x, f32(*scales)], {"mode": mode}, domain="", opset=10, rtol=1e-5, atol=1e-5)
        compare("Upsample", [x, f32(1, 1, 1.5, 2.7)], {"mode": mode}, domain="", opset=9, rtol=1e-5, atol=1e-5)
        compare(
            "Upsample", [x], {"mode": mode, "scales": [1.0, 1.0, 1.5, 2.7]}, domain="", opset=7, rtol=1e-5, atol=1e-5
        )


def test_resize_of_integers_and_nothing():
    x = np.random.default_rng(0).integers(0, 255, (1, 1, 4, 5)).astype(np.uint8)
    run = {"mode": "linear"}
    resize(x, [1, 1, 2, 3], None, run)
    big = np.array([[2**53 + 1, -(2**40)]])
    compare("Resize", [big, None, f32(1, 2)], {"mode": "nearest"}, domain="", opset=18, expected=[big.repeat(2, 1)])
    resize(np.zeros((0, 2, 3, 3), np.float32), [1, 1, 2, 2], None, run, expected=[np.zeros((0, 2, 6, 6), np.float32)])
    with pytest.raises(ValueError, match="exactly one of scales and sizes"):
        host_outputs("Resize", [x], {}, domain="", opset=18)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample(mode, padding, align):
    run = {"mode": mode, "padding_mode": padding, "align_corners": align}
    close = {"domain": "", "rtol": 2e-5, "atol": 2e-5}
    compare("GridSample", [random(2, 3, 5, 6), 1.2 * random(2, 4, 7, 2, seed=1)], run, opset=20, **close)
    old = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    compare("GridSample", [random(2, 3, 5, 6), 1.2 * random(2, 4, 7, 2, seed=1)], {**run, "mode": old}, opset=16,
            traced=False, **close)  # fmt: skip
    if mode != "cubic":
        compare("GridSample", [random(1, 2, 3, 4, 5), 1.2 * random(1, 2, 3, 4, 3, seed=1)], run, opset=20, **close)


def test_grid_sample_far_outside_and_nan():
    x = np.ones((1, 1, 2, 2), np.float32)
    grid = np.array([[[[1e30, 0], [-1e30, 0], [np.nan, 0], [np.inf, 0]]]], np.float32)
    compare("GridSample", [x, grid], domain="", opset=20, expected=[np.zeros((1, 1, 1, 4), np.float32)])


@pytest.mark.parametrize("align", [0, 1])
def test_affine_grid(align):
    theta, size = random(2, 2, 3), np.array([2, 3, 4, 5])
    lines = [np.linspace(-1, 1, n) if align else (2 * np.arange(n) + 1) / n - 1 for n in (4, 5)]
    y, x = np.meshgrid(*lines, indexing="ij")
    expected = np.einsum("nrk,hwk->nhwr", theta, np.stack([x, y, np.ones_like(x)], -1)).astype(np.float32)
    compare("AffineGrid", [theta, size], {"align_corners": align}, domain="", opset=20, rtol=1e-5, atol=1e-6,
            expected=[expected])  # fmt: skip


BOXES = np.array(
    [[1, 2, 8, 7], [0, 0, 3, 3], [-4, -3, 20, 30], [5, 5, 5, 5], [2.2, 3.7, 10.9, 8.8], [7, 7, 3, 2], [30, 30, 40, 41], [-50, -60, 90, 100]],
    np.float32,
)  # fmt: skip
IMAGES = np.array([0, 1, 1, 0, 1, 0, 0, 1])


@pytest.mark.parametrize("ratio", [0, 2, 6])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode, ratio):
    """Regions that are empty, turned around, or beyond the image; the number of samples may depend on the region."""
    x = random(2, 3, 9, 11)
    run = {"mode": mode, "sampling_ratio": ratio, "output_height": 3, "output_width": 2, "spatial_scale": 0.7}
    for more in ({}, {"coordinate_transformation_mode": "output_half_pixel"}):
        compare("RoiAlign", [x, BOXES, IMAGES], {**run, **more}, domain="", opset=16, rtol=2e-5, atol=2e-5)
    compare("RoiAlign", [x, BOXES, IMAGES], run, domain="", opset=10, rtol=2e-5, atol=2e-5, traced=False)
    with pytest.raises(Exception, match="out of range"):
        host_outputs("RoiAlign", [x, BOXES, IMAGES + 1], run, domain="", opset=16)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_max_roi_pool(scale):
    rois = np.concatenate([IMAGES[:, None].astype(np.float32), BOXES], axis=1)
    run = {"pooled_shape": [3, 2], "spatial_scale": scale}
    compare("MaxRoiPool", [random(2, 3, 9, 11), rois], run, domain="", opset=13)


def encoded(kind, array):
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind)
    return np.frombuffer(stream.getvalue(), np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_image_decoder(kind):
    picture = np.random.default_rng(0).integers(0, 255, (5, 7, 3)).astype(np.uint8)
    data = encoded(kind, picture)
    grey = np.asarray(Image.fromarray(picture).convert("L"))[:, :, None]
    for pixels, expected in (("RGB", picture), ("BGR", picture[:, :, ::-1]), ("Grayscale", grey)):
        (decoded,) = host_outputs("ImageDecoder", [data], {"pixel_format": pixels}, domain="", opset=20)
        np.testing.assert_array_equal(decoded, expected)
        assert decoded.dtype == np.uint8


def test_what_is_no_image_gives_an_empty_one():
    (decoded,) = host_outputs("ImageDecoder", [np.arange(9, dtype=np.uint8)], {}, domain="", opset=20)
    assert decoded.shape == (0, 0, 3)


@pytest.mark.slow
def test_gradients():
    f = np.float64
    x = random(1, 2, 4, 5, dtype=f)
    for mode in ("linear", "cubic"):
        check_gradient("Resize", [x, None, f32(1, 1, 1.5, 0.7)], {"mode": mode}, opset=19)
        check_gradient("GridSample", [x, 0.7 * random(1, 3, 3, 2, dtype=f, seed=1)], {"mode": mode})
    check_gradient("AffineGrid", [random(1, 2, 3, dtype=f), np.array([1, 1, 3, 4])])
    boxes = np.array([[0.3, 0.2, 3.1, 3.3]])
    for ratio in (0, 2):
        check_gradient("RoiAlign", [x, boxes, np.array([0])], {"sampling_ratio": ratio, "output_height": 2}, wanted=[0])


def test_doubling_by_nearest_is_no_gather():
    """A gather is several times slower on CPUs."""
    definition = resolve("", "Resize", 19)
    runner = {"context": Bench("Resize", "", 19, 3, 1), "n_outputs": 1}
    run = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    x = random(1, 2, 4, 5)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        text = jax.jit(lambda v: invoke(definition, [v, None, f32(1, 1, 2, 2)], run, runner)[0]).lower(x).as_text()
    assert "gather" not in text and "broadcast" in text
    np.testing.assert_array_equal(
        traced_outputs("Resize", [x, None, f32(1, 1, 2, 2)], run, domain="", opset=19)[0], x.repeat(2, 2).repeat(2, 3)
    )
