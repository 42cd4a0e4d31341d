"""Folding a chain of constants holds a few of its values at a time, not all of them."""

from __future__ import annotations

import tracemalloc

import numpy as np
from onnx import helper

from tests.test_runtime import model_bytes
from transmuter_async.compiler import Options, prepare
from transmuter_async.sources import read_local

SIZE = 1 << 20
"""Elements of the constant: 4 MB."""
LENGTH = 12


def test_what_folding_computes_on_the_way_is_let_go_of() -> None:
    names = ["w", *(f"t{index}" for index in range(LENGTH)), "end"]
    chain = [helper.make_node("Tanh", [before], [after]) for before, after in zip(names, names[1:], strict=False)]
    source = model_bytes(
        [*chain, helper.make_node("Add", ["x", "end"], ["y"])],
        {"x": [SIZE]},
        {"y": [SIZE]},
        w=np.ones(SIZE, np.float32),
    )
    model = read_local(source)
    tracemalloc.start()
    try:
        prepared = prepare(model, Options())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [node.op_type for node in prepared.nodes] == ["Add"]
    assert peak < 4 * 4 * SIZE
    found, expected = prepared.graph.initializers["end"], np.ones(SIZE, np.float32)
    for _ in range(LENGTH + 1):
        expected = np.tanh(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
