"""Choosing among boxes."""

from __future__ import annotations

from typing import Any

import numpy as np

from transmuter_async.operators.registry import operator

__all__: list[str] = []


@operator("NonMaxSuppression", since_version=10, host=True)
def non_max_suppression_10(
    boxes: Any,
    scores: Any,
    max_output_boxes_per_class: Any = None,
    iou_threshold: Any = None,
    score_threshold: Any = None,
    /,
    *,
    center_point_box: int = 0,
) -> np.ndarray:
    """Greedy choice of boxes by score, leaving out those that overlap a chosen one too much.

    Args:
        boxes: (batch, count, 4) float32: two opposite corners [y, x, y, x], in any order, or centre and
            size [x, y, width, height].
        scores: (batch, classes, count) float32.
        max_output_boxes_per_class: 0, the default, gives no boxes at all.
        iou_threshold: A box goes when its overlap with a chosen one is *greater*; 0 by default.
        score_threshold: Only scores that are *greater* take part; all where left out.
        center_point_box: 1 for boxes given by centre and size.

    Returns:
        (chosen, 3) int64 rows of batch, class and box, by batch and class, then by falling score; equal scores by lower
        box index. A NaN score never takes part. Arithmetic in float32, as onnxruntime's, so that borderline overlaps agree.
    """
    if boxes.ndim != 3 or scores.ndim != 3 or boxes.shape[2] != 4 or center_point_box not in (0, 1):
        raise ValueError(f"boxes {list(boxes.shape)} and scores {list(scores.shape)} are not (b, n, 4) and (b, c, n)")
    if boxes.shape[0] != scores.shape[0] or boxes.shape[1] != scores.shape[2]:
        raise ValueError(f"boxes {list(boxes.shape)} and scores {list(scores.shape)} differ in batch or box count")
    limit = 0 if max_output_boxes_per_class is None else int(np.asarray(max_output_boxes_per_class).reshape(-1)[0])
    overlap = np.float32(0 if iou_threshold is None else np.asarray(iou_threshold).reshape(-1)[0])
    if not 0 <= overlap <= 1:
        raise ValueError(f"iou_threshold {overlap} is not within [0, 1]")
    least = None if score_threshold is None else np.asarray(score_threshold).reshape(-1)[0]
    chosen = []
    if limit > 0:
        for batch, (corners, rows) in enumerate(zip(boxes, scores, strict=True)):
            low, high = _corners(corners, centred=bool(center_point_box))
            with np.errstate(all="ignore"):
                area = np.prod(high - low, axis=1)
            for label, row in enumerate(rows):
                picked = _suppress(low, high, area, row, limit, overlap, least)
                chosen.append(np.stack([np.full_like(picked, batch), np.full_like(picked, label), picked], 1))
    return np.concatenate(chosen) if chosen else np.zeros((0, 3), np.int64)


def _corners(boxes: np.ndarray, *, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper corner of each box, (count, 2)."""
    if centred:
        half = boxes[:, 2:] / np.float32(2)
        return boxes[:, :2] - half, boxes[:, :2] + half
    return np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])


def _suppress(
    low: np.ndarray, high: np.ndarray, area: np.ndarray, scores: np.ndarray, limit: int, overlap: np.float32, least: Any
) -> np.ndarray:
    """The chosen boxes of one class, (chosen,) int64."""
    picked: list[int] = []
    with np.errstate(all="ignore"):
        left = np.flatnonzero(~np.isnan(scores) if least is None else scores > least)
        left = left[np.argsort(-scores[left], kind="stable")]
        (y0, x0), (y1, x1), size = low[left].T.copy(), high[left].T.copy(), area[left]
        while left.size:
            picked.append(int(left[0]))
            if len(picked) == limit:
                break
            height = np.minimum(y1[0], y1[1:]) - np.maximum(y0[0], y0[1:])
            width = np.minimum(x1[0], x1[1:]) - np.maximum(x0[0], x0[1:])
            common = height * width
            union = size[0] + size[1:] - common
            gone = (common / union > overlap) & (height > 0) & (width > 0) & (common > 0) & (union > 0)
            gone &= (size[1:] > 0) & (size[0] > 0)
            stay = np.flatnonzero(~gone) + 1
            left, size, y0, x0, y1, x1 = left[stay], size[stay], y0[stay], x0[stay], y1[stay], x1[stay]
    return np.array(picked, np.int64)
