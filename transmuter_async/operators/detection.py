"""Choosing among boxes."""

from __future__ import annotations

from typing import Any, NamedTuple

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
            for label, row in enumerate(rows):
                picked = _suppress(corners, row, limit, overlap, least, centred=bool(center_point_box))
                chosen.append(np.stack([np.full_like(picked, batch), np.full_like(picked, label), picked], 1))
    return np.concatenate(chosen) if chosen else np.zeros((0, 3), np.int64)


MOST_AT_ONCE = 512
"""Candidates that are compared with each other at once: their pairs take memory."""

PIECE = 4096
"""Boxes that are compared with the chosen ones at once."""


class _Boxes(NamedTuple):
    """Boxes by corners, (count,) float32 each, and their areas."""

    y0: np.ndarray
    x0: np.ndarray
    y1: np.ndarray
    x1: np.ndarray
    area: np.ndarray

    def at(self, index: np.ndarray) -> _Boxes:
        """Those at `index`, a mask or places."""
        return _Boxes(*(part[index] for part in self))


def _corners(boxes: np.ndarray, *, centred: bool) -> _Boxes:
    """Boxes (count, 4) by their lower and upper corners."""
    a, b, c, d = np.ascontiguousarray(boxes.T)
    if centred:
        width, height = c / np.float32(2), d / np.float32(2)
        y0, x0, y1, x1 = a - width, b - height, a + width, b + height
    else:
        y0, x0, y1, x1 = np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)
    return _Boxes(y0, x0, y1, x1, (y1 - y0) * (x1 - x0))


def _suppress(
    boxes: np.ndarray, scores: np.ndarray, limit: int, overlap: np.float32, least: Any, *, centred: bool
) -> np.ndarray:
    """The chosen boxes of one class, (chosen,) int64.

    Candidates come in blocks of falling score, so what lies behind the last chosen box is neither sorted nor compared.
    """
    with np.errstate(all="ignore"):
        left = np.flatnonzero(~np.isnan(scores) if least is None else scores > least)
        falling = -scores[left]
        chosen: list[np.ndarray] = []
        wanted, count = limit, min(max(64, limit + limit // 4), MOST_AT_ONCE)
        while True:
            block, rest = _first(falling, count)
            corners = _corners(boxes[left[block]], centred=centred)
            gone = np.zeros(block.size, np.bool_)
            first, second = _pairs(corners, corners, overlap, later=True)
            # One after the other, since a box that is gone removes none.
            for one, other in zip(first.tolist(), second.tolist(), strict=True):
                if not gone[one]:
                    gone[other] = True
            stays = np.flatnonzero(~gone)[:wanted]
            chosen.append(left[block[stays]])
            wanted -= stays.size
            left, falling = left[rest], falling[rest]
            if wanted == 0 or left.size == 0:
                return np.concatenate(chosen)
            keep = _apart(corners.at(stays), boxes, left, overlap, centred=centred)
            left, falling = left[keep], falling[keep]
            count = min(2 * count, MOST_AT_ONCE)


def _first(falling: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of the `count` least of `falling` in their order, equal ones by place; and a mask of the others."""
    if falling.size <= count:
        return np.argsort(falling, kind="stable"), np.zeros(falling.size, np.bool_)
    edge = np.partition(falling, count - 1)[count - 1]
    now = falling < edge
    now[np.flatnonzero(falling == edge)[: count - np.count_nonzero(now)]] = True
    places = np.flatnonzero(now)
    return places[np.argsort(falling[places], kind="stable")], ~now


def _apart(kept: _Boxes, boxes: np.ndarray, left: np.ndarray, overlap: np.float32, *, centred: bool) -> np.ndarray:
    """Which of the boxes at `left` none of `kept` overlaps too much, as a mask."""
    keep = np.ones(left.size, np.bool_)
    for start in range(0, left.size, PIECE):
        piece = _corners(boxes[left[start : start + PIECE]], centred=centred)
        keep[_pairs(kept, piece, overlap)[1] + start] = False
    return keep


def _pairs(a: _Boxes, b: _Boxes, overlap: np.float32, *, later: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Places in `a` and `b` of boxes that overlap by more than `overlap`; with `later` only pairs in which b's is greater.

    Which touch is found by comparing corners alone; only of these the overlap is computed. Ordered by the place in `a`.
    """
    touch = b.y1 > a.y0[:, None]
    touch &= b.x1 > a.x0[:, None]
    touch &= b.y0 < a.y1[:, None]
    touch &= b.x0 < a.x1[:, None]
    one, other = np.divmod(np.flatnonzero(touch), b.area.size)
    if later:
        after = other > one
        one, other = one[after], other[after]
    if one.size == 0:
        return one, other
    p, q = a.at(one), b.at(other)
    height = np.minimum(p.y1, q.y1) - np.maximum(p.y0, q.y0)
    width = np.minimum(p.x1, q.x1) - np.maximum(p.x0, q.x0)
    common = height * width
    union = p.area + q.area - common
    over = (common / union > overlap) & (height > 0) & (width > 0) & (common > 0)
    over &= (union > 0) & (p.area > 0) & (q.area > 0)
    return one[over], other[over]
