"""Losses: NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import narrow, widen
from transmuter_async.operators.registry import operator, xp


def _likelihood(
    log_probabilities: Any, target: Any, weight: Any, ignore: int | None, reduction: str, name: str, context: Context
) -> Any:
    """The weighted negative log likelihood; `log_probabilities` is in the dtype to accumulate in."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction {reduction!r} is none of none, sum, mean")
    x = log_probabilities
    m = xp(x, target, weight)
    shape = (*x.shape[:1], *x.shape[2:])
    if x.ndim < 2 or tuple(target.shape) != shape:
        raise ValueError(f"scores of shape {tuple(x.shape)} need classes of shape {shape}, got {tuple(target.shape)}")
    classes = x.shape[1]
    if weight is not None and tuple(weight.shape) != (classes,):
        raise ValueError(f"the weights have shape {tuple(weight.shape)}, expected ({classes},)")
    ignored = None if ignore is None else target == np.asarray(ignore).astype(target.dtype)
    valid = None
    if classes == 0 or target.size == 0:
        index = m.zeros(shape, np.int64)
        picked = m.zeros(shape, x.dtype)
        if classes == 0 and target.size:
            raise ValueError("there is no class to choose from")
    else:
        # Unlike Gather's indices, a negative class does not count from the end: it is out of range.
        index = m.where(target < 0, m.full_like(target, classes), target)
        if ignored is not None:
            index = m.where(ignored, m.zeros_like(index), index)
        index, valid = context.bounded(index, classes, input=name, axis=1)
        if m is np:
            picked = np.take_along_axis(x, index[:, None], axis=1)[:, 0]
        else:
            picked = jnp.take_along_axis(jnp.asarray(x), jnp.asarray(index)[:, None], axis=1, mode="clip")[:, 0]
    scale = None
    if weight is not None and classes:
        wide = widen(weight).astype(x.dtype)
        scale = wide[index] if m is np else jnp.take(jnp.asarray(wide), jnp.asarray(index), mode="clip")
    if ignored is not None:
        kept = m.where(ignored, m.zeros_like(picked), m.ones_like(picked))
        scale = kept if scale is None else scale * kept
        picked = m.where(ignored, m.zeros_like(picked), picked)
    loss = -picked if scale is None else -picked * scale
    if valid is not None:
        loss = context.fill_invalid(loss, valid)
    if reduction == "none":
        return loss
    with np.errstate(all="ignore"):
        total = m.asarray(loss.sum())
        if reduction == "sum":
            return total
        count = m.asarray(loss.size, x.dtype) if scale is None else m.asarray(scale.sum())
        return m.asarray(total / count)


@operator("NegativeLogLikelihoodLoss", since_version=12)
def negative_log_likelihood_loss_12(
    input: Any,
    target: Any,
    weight: Any = None,
    /,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    context: Context,
) -> Any:
    """Minus the target class's log probability, (N, C, …) by (N, …), weighted by class.

    The mean divides by the sum of the weights that were applied; ignored targets have weight 0, so a mean over nothing
    but these is NaN.
    """
    loss = _likelihood(widen(input), target, weight, ignore_index, reduction, "target", context)
    return narrow(loss, input.dtype)


@operator("SoftmaxCrossEntropyLoss", since_version=12)
def softmax_cross_entropy_loss_12(
    scores: Any,
    labels: Any,
    weights: Any = None,
    /,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    n_outputs: int,
    context: Context,
) -> Any:
    """NegativeLogLikelihoodLoss of the log-softmax of the scores over axis 1, which is the second output."""
    x = widen(scores)
    m = xp(scores)
    if x.ndim < 2:
        raise ValueError(f"scores must have at least two dimensions, got shape {tuple(scores.shape)}")
    with np.errstate(all="ignore"):
        top = m.max(x, axis=1, keepdims=True, initial=-np.inf)
        shifted = x - (lax.stop_gradient(top) if m is jnp else top)
        log_probabilities = shifted - m.log(m.exp(shifted).sum(axis=1, keepdims=True))
    loss = _likelihood(log_probabilities, labels, weights, ignore_index, reduction, "labels", context)
    loss = narrow(loss, scores.dtype)
    return loss if n_outputs < 2 else (loss, narrow(log_probabilities, scores.dtype))
