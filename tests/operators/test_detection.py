"""NonMaxSuppression against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

from tests.operators.oracle import compare, host_outputs

rng = np.random.default_rng(0)


@pytest.mark.parametrize("center_point_box", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_boxes_as_onnxruntime(seed, center_point_box):
    rng = np.random.default_rng(seed)
    boxes = rng.integers(0, 12, (2, 60, 4)).astype(np.float32)  # a coarse grid: overlaps on the threshold, equal boxes
    scores = (rng.integers(0, 20, (2, 3, 60)) / 20).astype(np.float32)  # equal scores
    inputs = [boxes, scores, np.array([seed * 7], np.int64), np.array([0.5], np.float32)]
    if seed % 2:
        inputs.append(np.array([0.25], np.float32))
    attributes = {"center_point_box": center_point_box}
    compare("NonMaxSuppression", inputs, attributes, domain="", opset=11, traced=False)


def test_no_limit_means_no_boxes_and_no_boxes_are_no_error():
    boxes, scores = np.zeros((1, 0, 4), np.float32), np.zeros((1, 2, 0), np.float32)
    for inputs in (
        [boxes, scores, np.array(3, np.int64)],
        [np.ones((1, 4, 4), np.float32), np.ones((1, 1, 4), np.float32)],
    ):
        (got,) = host_outputs("NonMaxSuppression", inputs, {}, domain="", opset=11)
        assert got.shape == (0, 3) and got.dtype == np.int64


def test_a_nan_score_takes_no_part():
    boxes = np.array([[[0, 0, 1, 1], [5, 5, 6, 6]]], np.float32)
    scores = np.array([[[np.nan, 0.5]]], np.float32)
    (got,) = host_outputs("NonMaxSuppression", [boxes, scores, np.array(5, np.int64)], {}, domain="", opset=11)
    assert got.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("clusters", [3, 200, 1800])
@pytest.mark.parametrize("limit", [40, 300, 1800])
def test_more_boxes_than_are_compared_at_once_as_onnxruntime(clusters, limit):
    rng = np.random.default_rng(clusters)
    low = rng.uniform(0, 300, (clusters, 2))[rng.integers(0, clusters, 1800)] + rng.integers(-4, 4, (1800, 2))
    boxes = np.concatenate([low, low + rng.integers(20, 40, (1800, 2))], -1).astype(np.float32)[None]
    scores = np.stack([rng.random(1800), rng.integers(0, 3, 1800) / 4]).astype(np.float32)[None]  # one has equal scores
    inputs = [boxes, scores, np.array([limit], np.int64), np.array([0.4], np.float32), np.array([0.1], np.float32)]
    compare("NonMaxSuppression", inputs, {"center_point_box": 0}, domain="", opset=11, traced=False)
