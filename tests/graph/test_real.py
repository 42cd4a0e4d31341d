"""Real models: every weight as onnx.numpy_helper reads it, and passes that change no answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests import zoo
from tests.graph.build import everything, same
from transmuter_async.graph import Graph, Node, read_model, simplify

FILES = [(package, name) for package, entry in zoo.PACKAGES.items() for name in entry["files"] if name.endswith(".onnx")]


def compare(found: Graph, proto: onnx.GraphProto) -> int:
    """Compares initializers and nodes of a graph and its subgraphs; how many tensors there were."""
    count = 0
    for tensor in proto.initializer:
        assert same(found.initializers[tensor.name], numpy_helper.to_array(tensor)), tensor.name
        count += 1
    by_output = {node.outputs: node for node in found.nodes}
    assert len(found.nodes) == len(proto.node)
    for node in proto.node:
        count += compare_node(by_output[tuple(node.output)], node)
    return count


def compare_node(found: Node, proto: onnx.NodeProto) -> int:
    count = 0
    assert (found.op_type, found.inputs) == (proto.op_type, tuple(proto.input))
    for attribute in proto.attribute:
        held = found.attributes[attribute.name]
        if attribute.type == onnx.AttributeProto.GRAPH:
            assert isinstance(held, Graph)
            count += compare(held, attribute.g)
        elif attribute.type == onnx.AttributeProto.TENSOR:
            assert isinstance(held, np.ndarray)
            assert same(held, numpy_helper.to_array(attribute.t))
            count += 1
        else:
            expected = onnx.helper.get_attribute_value(attribute)
            if isinstance(expected, bytes):
                expected = expected.decode()
            assert held == (tuple(expected) if isinstance(expected, list) else expected)
    return count


@pytest.mark.parametrize(("package", "name"), FILES, ids=[name.rsplit("/", 1)[-1] for _, name in FILES])
def test_every_weight_and_node(package: str, name: str) -> None:
    path: Path = zoo.path(package, name)
    found = read_model(path, known=everything)
    assert compare(found.graph, onnx.load(path).graph) > 5
    for array in found.graph.initializers.values():
        assert not array.flags.writeable
        assert array.nbytes <= 64 or array.ctypes.data % 64 == 0
    simple = simplify(found.graph)
    assert simple.outputs == found.graph.outputs
    assert simple.inputs == found.graph.inputs
    assert simple.outer_names() == frozenset()
    assert str(found.check())
