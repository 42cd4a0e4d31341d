"""What the classifiers and regressors of ai.onnx.ml have in common: labels, score transforms, 2-D inputs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.registry import xp

__all__ = ["as_rows", "labels_of", "logistic", "probit", "second_class", "transformed"]

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def as_rows(value: Any, dtype: Any = np.float32) -> Any:
    """`value` as `(rows, features)` of `dtype`; rank 1 is one row, axes beyond the second are flattened."""
    np_ = xp(value)
    if value.ndim == 0:
        raise ValueError("the input is a scalar; it has to be (rows, features)")
    rows = 1 if value.ndim == 1 else value.shape[0]
    features = int(np.prod(value.shape if value.ndim == 1 else value.shape[1:], dtype=np.int64))
    return np_.reshape(value, (rows, features)).astype(dtype)


def labels_of(index: Any, strings: tuple[str, ...] | None, integers: tuple[int, ...] | None, context: Context) -> Any:
    """The class labels at `index`. Strings exist on the host only: a traced `index` then needs its value."""
    if strings:
        rows = context.needs(index, 0, "the class of each row, because the labels are strings")
        return np.asarray(strings, dtype=object)[rows]
    if not integers:
        raise ValueError("one of the class label attributes has to be given")
    table = np.asarray(integers, dtype=np.int64)
    return table[index] if xp(index) is np else xp(index).take(table, index, mode="clip")


def logistic(scores: Any) -> Any:
    """`1 / (1 + exp(-x))` without overflow, as onnxruntime's ML kernels compute it."""
    np_ = xp(scores)
    positive = 1 / (1 + np_.exp(-np_.abs(scores)))
    return np_.where(scores < 0, 1 - positive, positive)


def probit(scores: Any) -> Any:
    """`sqrt(2) * erfinv(2 x - 1)` with the closed approximation that onnxruntime and the reference evaluator use."""
    np_ = xp(scores)
    x = 2 * scores - 1
    sign = np_.where(x < 0, np_.asarray(-1, scores.dtype), np_.asarray(1, scores.dtype))
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np_.log((1 - x) * (1 + x))
        first = 2 / (3.14159 * 0.147) + 0.5 * log
        inverse = sign * np_.sqrt(np_.sqrt(first * first - log / 0.147) - first)
    return 1.41421356 * inverse


def _softmax(scores: Any, np_: ModuleType) -> Any:
    if scores.shape[-1] == 0:
        return scores
    powers = np_.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _softmax_zero(scores: Any, np_: ModuleType) -> Any:
    """Softmax over the scores that are not (nearly) zero; zeros stay zero."""
    if scores.shape[-1] == 0:
        return scores
    top = scores.max(-1, keepdims=True)
    live = np_.abs(scores) > scores.dtype.type(0.0000001)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        powers = np_.where(live, np_.exp(scores - top), np_.zeros_like(scores))
        total = powers.sum(-1, keepdims=True)
        return np_.where(live, powers, scores * np_.exp(-top)) / total


def transformed(scores: Any, name: str) -> Any:
    """Scores `(rows, classes)` after the attribute `post_transform`."""
    np_ = xp(scores)
    if name == "NONE":
        return scores
    if name == "LOGISTIC":
        return logistic(scores)
    if name == "SOFTMAX":
        return _softmax(scores, np_)
    if name == "SOFTMAX_ZERO":
        return _softmax_zero(scores, np_)
    if name == "PROBIT":
        return probit(scores)
    raise ValueError(f"post_transform {name!r} is none of {', '.join(TRANSFORMS)}")


def second_class(score: Any, transform: str, mixed: bool) -> Any:
    """Two columns out of the one score `(rows, 1)` of a two-class model, negative class first.

    `mixed`: the weights have both signs, so that the score is a margin around 0 and not a probability. The transform is
    applied where onnxruntime applies it: LOGISTIC to margins, PROBIT always, the others never.
    """
    np_ = xp(score)
    if transform == "PROBIT":
        return np_.concatenate([probit(score), np_.zeros_like(score)], axis=-1)
    if not mixed:
        return np_.concatenate([1 - score, score], axis=-1)
    if transform == "LOGISTIC":
        return np_.concatenate([logistic(-score), logistic(score)], axis=-1)
    return np_.concatenate([-score, score], axis=-1)
