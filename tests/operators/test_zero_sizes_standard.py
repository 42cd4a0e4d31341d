"""Sizes of zero in every operator of the standard: the suite's cases of one node, with one axis of what goes in cut to nothing.

Where onnxruntime answers, it is the judge. The program gives what the host form gives. What both refuse is no case: sizes
that do not fit one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from tests.conformance.suite import evaluate, single_nodes
from tests.operators.apart import Apart
from transmuter_async.errors import TransmuterError
from transmuter_async.graph import read_model
from transmuter_async.operators import known, resolve

CASES = 6
"""Cases of an operator at most: of different attributes, inputs, dtypes, ranks."""
PROGRAMS = 1
"""How many of them are compiled."""


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    found = Apart()
    yield found
    found.close()


def _cut(value: np.ndarray, axis: int) -> np.ndarray:
    return np.take(value, np.arange(0), axis)


def _cases(op: str) -> Iterator[tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """Models without declared shapes, and inputs of which one axis is empty wherever it is as long as the first one's."""
    seen = set()
    for case in single_nodes()[op]:
        proto = onnx.ModelProto.FromString(case.model().SerializeToString())
        node = proto.graph.node[0]
        definition = resolve(node.domain, node.op_type, proto.opset_import[0].version)
        if definition is None or len(seen) >= CASES:
            return
        values = case.pairs(proto)[0][0]
        if not values or not all(isinstance(v, np.ndarray) and v.dtype != object for v in values):
            continue
        first, names = values[0], [value.name for value in proto.graph.input]
        for value in (*proto.graph.input, *proto.graph.output):
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
        for axis in range(first.ndim):
            kind = (axis, first.ndim, first.dtype.name, len(values), *(a.name for a in node.attribute))
            if kind in seen or len(seen) >= CASES:
                continue
            seen.add(kind)
            given = dict(zip(names, values, strict=False))
            for index, (name, value) in enumerate(given.items()):
                fits = value.ndim > axis and value.shape[axis] == first.shape[axis]
                along = index == 0 or (value.dtype.kind == "f" and value.ndim == first.ndim)
                if fits and along and definition.input_name(index) not in definition.static:
                    given[name] = _cut(value, axis)
            yield proto, given


def _agree(ours: Any, theirs: Any, what: str) -> None:
    if not isinstance(theirs, np.ndarray) or theirs.dtype == object:
        return
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    wide = np.complex128 if theirs.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(ours.astype(wide), theirs.astype(wide), rtol=1e-3, atol=1e-3, err_msg=what)


@pytest.mark.compiles_itself
@pytest.mark.parametrize("op", sorted(single_nodes()))
def test_nothing_in(op: str, apart: Apart) -> None:
    compiled = 0
    for proto, given in _cases(op):
        what = f"{proto.graph.node[0].op_type} of {[value.shape for value in given.values()]}"
        model = read_model(proto, known=known)
        expected = apart.run(proto.SerializeToString(), given)
        try:
            ours, _, _ = evaluate(model, given, "host")
        except TransmuterError as error:
            assert expected is None, f"{what}: {error}"
            continue
        for one, other in zip(ours.values(), expected or (), strict=False):
            _agree(one, other, what)
        if compiled < PROGRAMS:
            compiled += 1
            programs, _, _ = evaluate(model, given, "compiled")
            for name, value in ours.items():
                _agree(programs[name], value, f"{what}, compiled")
