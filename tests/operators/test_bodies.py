"""Operators that the standard defines by others: our definitions equal those bodies, on the suite's inputs, in both forms.

The body is the reader's: the model is read as if we had no definition of the operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest

from tests.conformance.suite import _by_name, evaluate, single_nodes
from transmuter_async.graph import Model, read_model
from transmuter_async.operators import known

COMPILED = 2
"""Cases of an operator that are compiled as well: that compiled and host form agree is for the conformance run."""

RANDOM = {"Bernoulli"}
"""The key of a random node comes from its place, which is another one inside of a body: test_random.py has its rate."""

TOLERANCE: dict[str, tuple[float, float]] = {"float16": (2e-3, 2e-3), "bfloat16": (2e-2, 2e-2)}
"""rtol and atol. Bodies round after each step, definitions accumulate in float32 and round once."""
DEFAULT = (2e-5, 2e-6)


def with_bodies() -> list[str]:
    """The operators that have a function body at some version."""
    return sorted(
        {
            schema.name
            for schema in onnx.defs.get_all_schemas_with_history()
            if schema.has_function or schema.has_context_dependent_function
        }
    )


def expanded(proto: onnx.ModelProto, op: str) -> Model | None:
    """The model without the operator; None where the standard gives no body for these attributes and types.

    A body may be of a later opset than the operator's version: then the model is read at that one.
    """
    imported = next(each for each in proto.opset_import if each.domain == proto.graph.node[0].domain)
    schema = onnx.defs.get_schema(op, imported.version, proto.graph.node[0].domain)
    versions = {*schema.function_opset_versions, *schema.context_dependent_function_opset_versions}
    for version in (imported.version, *sorted(versions)):
        imported.version = version
        model = read_model(proto, known=lambda domain, name, version: name != op and known(domain, name, version))
        if not any(node.op_type == op for node in model.graph.walk()):
            return model
    return None


def agree(ours: Any, theirs: Any, what: str) -> None:
    if isinstance(theirs, list):
        assert len(ours) == len(theirs), what
        for one, other in zip(ours, theirs, strict=True):
            agree(one, other, what)
        return
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    if ours.dtype == object or ours.dtype.kind in "iub":
        np.testing.assert_array_equal(ours, theirs, err_msg=what)
        return
    rtol, atol = TOLERANCE.get(ours.dtype.name, DEFAULT)
    np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol, atol, err_msg=what)


@pytest.mark.compiles_itself
@pytest.mark.parametrize("op", [op for op in with_bodies() if op not in RANDOM])
def test_the_definition_equals_the_body(op: str) -> None:
    compared = 0
    for case in single_nodes()[op]:
        proto = onnx.ModelProto.FromString(case.model().SerializeToString())
        body = expanded(proto, op)
        if body is None:
            continue
        own = read_model(proto, known=known)  # at the same opset
        for inputs, _ in case.pairs(proto):
            given = _by_name(proto, own, [value.name for value in own.graph.inputs], inputs)
            for way in ("host", "compiled") if compared < COMPILED else ("host",):
                ours, theirs = (evaluate(model, given, way)[0] for model in (own, body))
                for name, value in theirs.items():
                    agree(ours[name], value, f"{case.name}, {way}, {name}")
        compared += 1
    assert compared


def test_all_bodies_are_there() -> None:
    assert len(with_bodies()) == 49
