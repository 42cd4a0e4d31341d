"""ai.onnx.ml: linear models and support vector machines. Computed in float32, as onnxruntime does."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.ml_scores import as_rows, labels_of, logistic, probit, second_class, transformed
from transmuter_async.operators.numeric import first_highest
from transmuter_async.operators.registry import is_host, operator, xp

ML = "ai.onnx.ml"

Floats = tuple[float, ...]


def _floats(values: Floats | None, name: str) -> np.ndarray:
    if not values:
        raise ValueError(f"the attribute {name} is missing or empty")
    return np.asarray(values, dtype=np.float32)


def _features(x: Any, expected: int) -> None:
    if x.shape[1] != expected:
        raise ValueError(f"X has {x.shape[1]} features, but the model has coefficients for {expected}")


@operator("LinearClassifier", since_version=1, domain=ML)
def linear_classifier_1(
    X: Any,
    /,
    *,
    classlabels_ints: tuple[int, ...] | None = None,
    classlabels_strings: tuple[str, ...] | None = None,
    coefficients: Floats,
    intercepts: Floats | None = None,
    multi_class: int = 0,
    post_transform: str = "NONE",
    context: Context,
) -> tuple[Any, Any]:
    """Label and scores of `X W^T + b`.

    With one row of coefficients the label is the second one where the score `s` is positive, and the two columns are
    its logistic and the rest, or `(1 - s, s)` for every transform but LOGISTIC and PROBIT, as in onnxruntime.
    `multi_class` has no effect there either.
    """
    x = as_rows(X)
    np_ = xp(x)
    weights = _floats(coefficients, "coefficients")
    labels = classlabels_strings or classlabels_ints or ()
    targets = len(intercepts) if intercepts else max(1, len(weights) // max(1, x.shape[1]))
    weights = weights.reshape(targets, -1)
    _features(x, weights.shape[1])
    scores = np_.matmul(x, weights.T)
    if intercepts:
        scores = scores + np.asarray(intercepts, np.float32)
    if targets == 1:
        positive = (scores[:, 0] > 0).astype(np.int64)
        if len(labels) != 2:
            raise ValueError(f"one row of coefficients tells two classes apart, but there are {len(labels)} labels")
        label = labels_of(positive, classlabels_strings, classlabels_ints, context)
        return label, second_class(scores, post_transform, mixed=post_transform == "LOGISTIC")
    label = labels_of(first_highest(scores, 1), classlabels_strings, classlabels_ints, context)
    return label, transformed(scores, post_transform)


def _single(scores: Any, name: str) -> Any:
    """A single column: onnxruntime applies PROBIT and none of the others."""
    return probit(scores) if name == "PROBIT" else scores


@operator("LinearRegressor", since_version=1, domain=ML)
def linear_regressor_1(
    X: Any,
    /,
    *,
    coefficients: Floats | None = None,
    intercepts: Floats | None = None,
    post_transform: str = "NONE",
    targets: int = 1,
) -> Any:
    """`X W^T + b`. With one target only PROBIT is applied, as in onnxruntime."""
    x = as_rows(X)
    weights = _floats(coefficients, "coefficients").reshape(targets, -1)
    _features(x, weights.shape[1])
    scores = xp(x).matmul(x, weights.T)
    if intercepts and len(intercepts) == targets:
        scores = scores + np.asarray(intercepts, np.float32)
    return _single(scores, post_transform) if targets == 1 else transformed(scores, post_transform)


# --- support vector machines ------------------------------------------------------------------------------------------


def _kernel(x: Any, vectors: np.ndarray, kind: str, params: Floats | None) -> Any:
    """`(rows, vectors)` of kernel values."""
    np_ = xp(x)
    gamma, coef0, degree = (np.float32(p) for p in params) if params else (np.float32(0),) * 3
    if kind == "RBF":
        # |x|^2 + |v|^2 - 2 x v loses the small distances that decide; differences, one feature axis at a time, do not.
        difference = x[:, None, :] - vectors
        return np_.exp(-gamma * (difference * difference).sum(-1))
    product = np_.matmul(x, vectors.T)
    if kind == "LINEAR":
        return product
    inner = gamma * product + coef0
    if kind == "POLY":
        return inner * inner if degree == 2 else inner * inner * inner if degree == 3 else inner**degree
    if kind == "SIGMOID":
        return np_.tanh(inner)
    raise ValueError(f"kernel_type {kind!r} is none of LINEAR, POLY, RBF, SIGMOID")


@operator("SVMRegressor", since_version=1, domain=ML)
def svm_regressor_1(
    X: Any,
    /,
    *,
    coefficients: Floats | None = None,
    kernel_params: Floats | None = None,
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    rho: Floats | None = None,
    support_vectors: Floats | None = None,
) -> Any:
    """`(rows, 1)`. Without support vectors a linear model. `one_class`: the sign. onnxruntime has no post_transform here."""
    x = as_rows(X)
    np_ = xp(x)
    weights = _floats(coefficients, "coefficients")
    offset = _floats(rho, "rho")[0]
    if n_supports > 0:
        vectors = _floats(support_vectors, "support_vectors").reshape(n_supports, -1)
        _features(x, vectors.shape[1])
        x = _kernel(x, vectors, kernel_type, kernel_params)
    _features(x, len(weights))
    scores = np_.matmul(x, weights[:, None]) + offset
    if one_class:
        one = np.float32(1)
        return np_.where(scores > 0, one, -one)
    return scores


@operator("SVMClassifier", since_version=1, domain=ML, loops=True)
def svm_classifier_1(
    X: Any,
    /,
    *,
    classlabels_ints: tuple[int, ...] | None = None,
    classlabels_strings: tuple[str, ...] | None = None,
    coefficients: Floats | None = None,
    kernel_params: Floats | None = None,
    kernel_type: str = "LINEAR",
    post_transform: str = "NONE",
    prob_a: Floats | None = None,
    prob_b: Floats | None = None,
    rho: Floats | None = None,
    support_vectors: Floats | None = None,
    vectors_per_class: tuple[int, ...] | None = None,
    context: Context,
) -> tuple[Any, Any]:
    """One-against-one voting over the pairs of classes; with `prob_a`, probabilities by pairwise coupling.

    Without probabilities the scores are those of the pairs, two columns for two classes; without support vectors a
    linear model with a score for each class.
    """
    x = as_rows(X)
    np_ = xp(x)
    classes = len(classlabels_strings or classlabels_ints or ())
    weights = _floats(coefficients, "coefficients")
    offsets = _floats(rho, "rho")
    if not vectors_per_class or not sum(vectors_per_class):
        weights = weights.reshape(classes, -1)
        _features(x, weights.shape[1])
        scores = np_.matmul(x, weights.T) + offsets[0]
        index = first_highest(scores, 1)
        if classes == 2:
            top = scores.max(axis=1)
            second = top >= np.float32(0.5) if bool((weights >= 0).all()) else top > 0
            index = np_.where(second, np.int64(1), index.astype(np.int64))
        label = labels_of(index, classlabels_strings, classlabels_ints, context)
        return label, transformed(scores, post_transform) if classes > 1 else _single(scores, post_transform)

    vectors = _floats(support_vectors, "support_vectors").reshape(sum(vectors_per_class), -1)
    _features(x, vectors.shape[1])
    kernel = _kernel(x, vectors, kernel_type, kernel_params)
    mixing, pairs = _pair_weights(weights.reshape(classes - 1, -1), vectors_per_class)
    margins = np_.matmul(kernel, mixing) + offsets[: len(pairs)]
    votes = _votes(margins, pairs, classes)
    label = labels_of(first_highest(votes, 1), classlabels_strings, classlabels_ints, context)
    if prob_a:
        chance = 1 - logistic(margins * _floats(prob_a, "prob_a") + _floats(prob_b, "prob_b"))
        scores = _coupled(np_.clip(chance, np.float32(1e-7), np.float32(1 - 1e-7)), pairs, classes)
        return label, transformed(scores, post_transform)
    if classes == 2:
        return label, second_class(margins, post_transform, mixed=post_transform in ("NONE", "LOGISTIC"))
    return label, transformed(margins, post_transform)


def _pair_weights(weights: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """A matrix `(vectors, pairs)` that turns kernel values into the margins of all pairs of classes, and the pairs."""
    ends = np.cumsum(sizes)
    pairs = [(i, j) for i in range(len(sizes)) for j in range(i + 1, len(sizes))]
    mixing = np.zeros((int(ends[-1]), len(pairs)), np.float32)
    for pair, (i, j) in enumerate(pairs):
        of_i, of_j = (slice(ends[k] - sizes[k], ends[k]) for k in (i, j))
        mixing[of_i, pair] = weights[j - 1, of_i]
        mixing[of_j, pair] = weights[i, of_j]
    return mixing, pairs


def _votes(margins: Any, pairs: list[tuple[int, int]], classes: int) -> Any:
    np_ = xp(margins)
    first, second = (np.zeros((len(pairs), classes), np.int32) for _ in range(2))
    for pair, (i, j) in enumerate(pairs):
        first[pair, i] = second[pair, j] = 1
    wins = (margins > 0).astype(np.int32)
    return np_.matmul(wins, first) + np_.matmul(1 - wins, second)


def _coupled(chance: Any, pairs: list[tuple[int, int]], classes: int) -> Any:
    """Probabilities `(rows, classes)` from those of the pairs (Wu, Lin, Weng 2004, second method), as libsvm iterates."""
    np_ = xp(chance)
    columns = [[np_.zeros_like(chance[:, 0])] * classes for _ in range(classes)]
    for pair, (i, j) in enumerate(pairs):
        columns[i][j] = chance[:, pair]
        columns[j][i] = 1 - chance[:, pair]
    r = np_.stack([np_.stack(row, axis=-1) for row in columns], axis=-2)  # r[row, i, j]: i against j
    swapped = np_.swapaxes(r, 1, 2)
    eye = np.eye(classes, dtype=np.float32)
    Q = eye * (swapped * swapped).sum(-1)[:, :, None] - (1 - eye) * (swapped * r)
    diagonal = (Q * eye).sum(-1)
    limit = np.float32(0.005 / classes)
    p = np_.full((chance.shape[0], classes), np.float32(1 / classes))

    def sweep(p: Any) -> Any:
        Qp = np_.einsum("nij,nj->ni", Q, p)
        pQp = (p * Qp).sum(-1)
        done = np_.abs(Qp - pQp[:, None]).max(-1) < limit
        old = p
        for i in range(classes):
            step = (pQp - Qp[:, i]) / diagonal[:, i]
            p = (p + step[:, None] * eye[i]) / (1 + step)[:, None]
            pQp = (pQp + step * (step * diagonal[:, i] + 2 * Qp[:, i])) / (1 + step) / (1 + step)
            Qp = (Qp + step[:, None] * Q[:, i]) / (1 + step)[:, None]
        return np_.where(done[:, None], old, p), done

    if chance.shape[0] == 0:
        return p
    if is_host(chance):
        for _ in range(100):
            p, done = sweep(p)
            if done.all():
                break
        return p
    state = lax.while_loop(
        lambda s: (s[0] < 100) & ~s[2].all(),
        lambda s: (s[0] + 1, *sweep(s[1])),
        (np_.int32(0), p, np_.zeros(chance.shape[0], bool)),
    )
    return state[1]
