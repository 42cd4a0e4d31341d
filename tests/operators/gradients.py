"""Gradients through one node, checked against central differences in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tests.operators.oracle import host_outputs


def check_gradient(
    op: str,
    inputs: Sequence[Any],
    attributes: dict[str, Any] | None = None,
    *,
    opset: int = 22,
    domain: str = "",
    outputs: int = 1,
    wanted: Sequence[int] | None = None,
    step: float = 1e-5,
    tolerance: float = 1e-6,
) -> None:
    """Fail unless `jax.grad` of a weighted sum of all outputs agrees with differences along a random direction.

    `wanted`: the inputs to differentiate, all float64 ones by default.
    """
    chosen = [k for k, x in enumerate(inputs) if isinstance(x, np.ndarray) and x.dtype == np.float64]
    chosen = list(wanted) if wanted is not None else chosen
    rng = np.random.default_rng(3)
    weights: list[np.ndarray] = []

    def total(values: Sequence[Any]) -> Any:
        given = list(inputs)
        for k, value in zip(chosen, values, strict=True):
            given[k] = value
        results = host_outputs(op, given, attributes or {}, domain=domain, opset=opset, outputs=outputs)[:outputs]
        if not weights:
            weights.extend(rng.standard_normal(np.shape(r)) for r in results)
        return sum((r * w).sum() for r, w in zip(results, weights, strict=True))

    points = [inputs[k] for k in chosen]
    total(points)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        gradients = jax.grad(lambda values: total(values))([jax.numpy.asarray(p) for p in points])
        gradients = [np.asarray(g) for g in gradients]
    for number, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all(), f"{op}: gradient of input {chosen[number]} is not finite"
        direction = rng.standard_normal(points[number].shape)
        ahead, behind = list(points), list(points)
        ahead[number] = points[number] + step * direction
        behind[number] = points[number] - step * direction
        difference = (total(ahead) - total(behind)) / (2 * step)
        ours = (gradient * direction).sum()
        assert abs(ours - difference) <= tolerance * max(1.0, abs(difference)), (
            f"{op}: gradient of input {chosen[number]} is {ours}, differences say {difference}"
        )
