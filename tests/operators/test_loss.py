"""NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss against float64, in both forms."""

from __future__ import annotations

import numpy as np
import pytest

from tests.operators.gradients import check_gradient
from tests.operators.oracle import compare, host_outputs

rng = np.random.default_rng(0)
SCORES = rng.standard_normal((3, 5, 2)).astype(np.float32)
LABELS = np.array([[0, 4], [2, 2], [1, 3]])
WEIGHTS = np.array([0.5, 1, 2, 0.25, 3], np.float32)


def reference(log_p, labels, weights, ignore, reduction):
    loss, total = np.zeros(labels.shape), 0.0
    for place in np.ndindex(labels.shape):
        label = labels[place]
        if ignore is not None and label == ignore:
            continue
        weight = 1.0 if weights is None else float(weights[label])
        loss[place] = -weight * log_p[(place[0], label, *place[1:])]
        total += weight
    if reduction == "none":
        return loss.astype(np.float32)
    return np.asarray(loss.sum() / (total if reduction == "mean" else 1), np.float32)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignore", [None, 2, -7])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses(reduction, ignore, weighted):
    weights = WEIGHTS if weighted else None
    labels = LABELS.copy()
    if ignore == -7:
        labels[1, 0] = -7
    run = {"reduction": reduction, "ignore_index": ignore}
    close = {"domain": "", "opset": 13, "rtol": 1e-5, "atol": 1e-6}
    log_p = SCORES - np.log(np.exp(SCORES.astype(np.float64)).sum(axis=1, keepdims=True))
    expected = reference(SCORES, labels, weights, ignore, reduction)
    compare("NegativeLogLikelihoodLoss", [SCORES, labels, weights], run, expected=[expected], **close)
    expected = reference(log_p, labels, weights, ignore, reduction)
    compare("SoftmaxCrossEntropyLoss", [SCORES, labels, weights], run, outputs=2,
            expected=[expected, log_p.astype(np.float32)], **close)  # fmt: skip


@pytest.mark.parametrize("label", [5, -1])
def test_a_class_out_of_range_is_refused(label):
    """A negative class does not count from the end."""
    for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        with pytest.raises(Exception, match="out of range"):
            host_outputs(op, [SCORES, np.full((3, 2), label)], {}, domain="", opset=13)


def test_large_scores_do_not_overflow():
    scores = np.array([[3e4, 0, -3e4]], np.float16)
    compare("SoftmaxCrossEntropyLoss", [scores, np.array([0])], domain="", opset=13, expected=[np.float16(0)])


def test_gradients():
    scores = SCORES.astype(np.float64)
    check_gradient("NegativeLogLikelihoodLoss", [scores, LABELS, WEIGHTS.astype(np.float64)], {"ignore_index": 2})
    check_gradient("SoftmaxCrossEntropyLoss", [scores, LABELS], outputs=2, opset=13)
