"""`jax.grad` through every operator of floats, as an application has it: `to_jax`, float32, x64 off.

One case of the suite for each operator; the judge is a difference quotient of the host form in float64.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transmuter_async as tm
from tests.compiler.support import node as make
from tests.compiler.support import proto
from tests.conformance.suite import Case, _by_name, single_nodes
from tests.operators.oracle import host_outputs
from transmuter_async.graph import Node, read_model
from transmuter_async.operators import known, resolve

STEP = 1e-6
TOLERANCE = 2e-3
"""Of the derivative along a direction, as a share of the lengths of gradient and direction. float32 has 1e-7 an operation."""

EXCEPT = {
    "Bernoulli": "draws; the gradient of a draw is none",
    "Multinomial": "draws",
    "RandomNormalLike": "does not read its input's values",
    "RandomUniformLike": "does not read its input's values",
    "ImageDecoder": "bytes",
}
"""Operators without a derivative to compare, and why."""


WITHOUT = {("RoiAlign", "rois"): "boxes place samples; as elsewhere they get no gradient"}
"""Inputs of floats that have none."""


def floats(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32


def chosen(op: str) -> tuple[Case, dict[str, Any], list[Any]] | None:
    """The smallest case of float32 inputs and outputs, its inputs by name, and what it expects."""
    best = None
    for case in single_nodes()[op]:
        proto = case.model()
        if any(attribute.HasField("g") for attribute in proto.graph.node[0].attribute):
            continue
        inputs, expected = case.pairs(proto)[0]
        model = read_model(case.source, known=known)
        given = _by_name(proto, model, [value.name for value in model.graph.inputs], inputs)
        if not any(map(floats, given.values())) or not any(map(floats, expected)):
            continue
        if not all(isinstance(value, np.ndarray) for value in given.values()):
            continue
        if not all(np.isfinite(value).all() for value in (*given.values(), *expected) if floats(value)):
            continue
        size = sum(value.size for value in given.values())
        if size and (best is None or size < best[0]):
            best = size, case, given, expected
    return None if best is None else best[1:]


@pytest.mark.compiles_itself
@pytest.mark.parametrize("op", sorted(set(single_nodes()) - set(EXCEPT)))
def test_the_gradient_is_a_difference_quotient(op: str) -> None:
    found = chosen(op)
    if found is None:
        pytest.skip("no case of float32 tensors")
    case, given, expected = found
    model = read_model(case.source, known=known)
    node: Node = model.graph.nodes[0]
    definition = resolve(node.domain, node.op_type, node.opset)
    assert definition is not None
    if definition.host:
        pytest.skip("host only")
    static = {name for k, name in enumerate(node.inputs) if definition.input_name(k) in definition.static}
    wanted = [name for name, value in given.items() if floats(value) and name not in static]
    wanted = [name for name in wanted if (op, name) not in WITHOUT]
    if not wanted:
        pytest.skip("its floats decide shapes")
    results = [k for k, value in enumerate(expected) if floats(value)]
    names = [value.name for value in model.graph.outputs]
    rng = np.random.default_rng(5)
    weights = {k: rng.standard_normal(expected[k].shape) for k in results}
    # The suite likes zeros, whole numbers and equal ones, where many operators have a kink.
    points = {name: given[name] + rng.uniform(0.01, 0.03, given[name].shape).astype(np.float32) for name in wanted}
    given = {**given, **points}
    fixed = {name: value for name, value in given.items() if name not in wanted}

    # As an application: float32 without x64.
    assert not jax.config.jax_enable_x64
    apply, params = tm.to_jax(model, static_inputs=fixed)

    def total(inputs: dict[str, Any]) -> Any:
        outputs = apply(params, inputs)
        return sum((outputs[names[k]] * weights[k].astype(np.float32)).sum() for k in results)

    gradients = jax.grad(total)({name: jnp.asarray(value) for name, value in points.items()})

    # The judge: the host form in float64.
    places = [node.outputs.index(names[k]) for k in results]

    def exact(moved: dict[str, np.ndarray]) -> float:
        whole = {**given, **moved}
        wide = [
            None
            if not name
            else whole[name].astype(np.float64)
            if floats(given[name]) and name not in static
            else whole[name]
            for name in node.inputs
        ]
        outputs = host_outputs(
            node.op_type, wide, dict(node.attributes), domain=node.domain, opset=node.opset, outputs=len(node.outputs)
        )
        return float(sum((outputs[place] * weights[k]).sum() for place, k in zip(places, results, strict=True)))

    for name in wanted:
        gradient = np.asarray(gradients[name], np.float64)
        assert gradient.shape == points[name].shape
        assert np.isfinite(gradient).all(), f"{case.name}: the gradient of {name} is not finite"
        direction = rng.standard_normal(gradient.shape)
        wide = points[name].astype(np.float64)
        ahead, behind = exact({name: wide + STEP * direction}), exact({name: wide - STEP * direction})
        quotient = (ahead - behind) / (2 * STEP)
        ours = float((gradient * direction).sum())
        scale = max(1.0, float(np.linalg.norm(gradient) * np.linalg.norm(direction)), abs(quotient))
        assert abs(ours - quotient) <= TOLERANCE * scale, (
            f"{case.name}: along a direction of {name} the gradient is {ours}, a difference quotient {quotient}"
        )


INDEXED: dict[str, tuple[list[str], list[str], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gather": (["x:float[4,5]", "i:int64[2]"], ["y:float[2,5]"], {"i": np.int32([1, 3])}, {}, {}),
    "GatherND": (["x:float[4,5]", "i:int64[2,2]"], ["y:float[2]"], {"i": np.int32([[1, 2], [0, 1]])}, {}, {}),
    "GatherElements": (["x:float[4,5]", "i:int64[2,5]"], ["y:float[2,5]"], {"i": np.ones((2, 5), np.int32)}, {}, {}),
    "ReverseSequence": (["x:float[4,5]", "i:int64[5]"], ["y:float[4,5]"], {"i": np.int32([1, 2, 3, 4, 1])}, {}, {}),
    "NegativeLogLikelihoodLoss": (["x:float[4,5]", "i:int64[4]"], ["y:float[]"], {"i": np.int32([1, 2, 3, 4])}, {}, {}),
    "Resize": (
        ["x:float[4,5]"],
        ["y:float[8,9]"],
        {},
        {"mode": "linear"},
        {"r": np.float32([]), "s": np.float32([2, 1.8])},
    ),
    "Pad": (["x:float[4,5]"], ["y:float[7,5]"], {}, {"mode": "reflect"}, {"p": np.int64([2, 0, 1, 0])}),
    "CumSum": (["x:float[4,5]"], ["y:float[4,5]"], {}, {}, {"axis": np.int64(1)}),
}
"""Operators that gather: inputs, outputs, their values, attributes, weights. Integers as an application without x64 has them."""


@pytest.mark.compiles_itself
@pytest.mark.parametrize("op", INDEXED)
def test_traced_indices_without_x64(op: str) -> None:
    """Nothing is cut to 32 bits behind the application's back, inside of its `jit` or outside; a warning would be an error."""
    inputs, outputs, given, attributes, weights = INDEXED[op]
    names = [each.partition(":")[0] for each in inputs]
    model = read_model(
        proto([make(op, [*names, *weights], ["y"], **attributes)], inputs, outputs, weights), known=known
    )
    apply, params = tm.to_jax(model)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)

    def total(x: Any) -> Any:
        return (apply(params, {"x": x, **given})["y"] ** 2).sum()

    plain, jitted = jax.grad(total)(x), jax.jit(jax.grad(total))(x)
    np.testing.assert_allclose(plain, jitted, rtol=1e-5)
    direction = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    step = np.float32(1e-2)  # the sum of squares is quadratic for these linear operators: any step is exact
    quotient = (total(x + step * direction) - total(x - step * direction)) / (2 * step)
    np.testing.assert_allclose((plain * direction).sum(), quotient, rtol=2e-3, atol=2e-3)
