"""What the tests of the graph layer build models with, and how they turn a read graph back into one that others can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.defs
from onnx import TensorProto, helper, numpy_helper

from transmuter_async.graph import Graph, Model, Node, SparseTensor, TensorType, element_type_of, read_model

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def everything(domain: str, name: str, opset: int) -> bool:
    """A `known` for which nothing needs to be expanded."""
    return True


def nothing(domain: str, name: str, opset: int) -> bool:
    """A `known` for which all that has a body is expanded."""
    return False


def value(name: str, shape: Any = ("N",), kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[Any] = ("x",),  # type: ignore[assignment]
    outputs: list[Any] = ("y",),  # type: ignore[assignment]
    initializers: list[onnx.TensorProto] = (),  # type: ignore[assignment]
    *,
    opset: int = 17,
    ir: int = 8,
    functions: list[onnx.FunctionProto] = (),  # type: ignore[assignment]
    imports: dict[str, int] | None = None,
    **more: Any,
) -> onnx.ModelProto:
    """A model; inputs and outputs given by name alone are float vectors."""
    graph = helper.make_graph(
        nodes,
        "g",
        [value(item) if isinstance(item, str) else item for item in inputs],
        [value(item) if isinstance(item, str) else item for item in outputs],
        list(initializers),
        **more,
    )
    opsets = {"": opset, **(imports or {})}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        functions=list(functions),
        ir_version=ir,
    )


def read(proto: onnx.ModelProto | bytes, known: Any = everything, **options: Any) -> Model:
    """Reads by the wire, as from a file."""
    return read_model(proto if isinstance(proto, bytes) else proto.SerializeToString(), known=known, **options)


def with_initializer(tensor: onnx.TensorProto) -> onnx.ModelProto:
    return model([helper.make_node("Identity", ["x"], ["y"])], initializers=[tensor], ir=11)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal in dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool((one == other).all()) if one.dtype == object else one.tobytes() == other.tobytes()


def to_proto(read_in: Model) -> onnx.ModelProto:
    """A model file of what was read, so that somebody else can run it.

    A file has one version per domain, but bodies of functions may have others: a node whose operator has another
    signature by then becomes a call of a function of its own, which imports its version.
    """
    writer = _Writer({"": 17, **read_in.opsets})
    graph = writer.graph(read_in.graph)
    imports = {**writer.opsets, **{function.domain: 1 for function in writer.functions}}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in imports.items()],
        functions=writer.functions,
        ir_version=10,
    )


class _Writer:
    def __init__(self, opsets: dict[str, int]) -> None:
        self.opsets = opsets
        self.functions: list[onnx.FunctionProto] = []

    def graph(self, graph: Graph) -> onnx.GraphProto:
        tensors = [numpy_helper.from_array(array, name) for name, array in graph.initializers.items()]
        nodes = [self.node(node) for node in graph.nodes]
        inputs = [_value(item) for item in graph.inputs]
        return helper.make_graph(nodes, graph.name or "g", inputs, [_value(item) for item in graph.outputs], tensors)

    def node(self, node: Node) -> onnx.NodeProto:
        # without its name: onnxruntime wants names of nodes to be unique, the standard does not
        proto = helper.make_node(node.op_type, node.inputs, node.outputs, domain=node.domain)
        for name, held in node.attributes.items():
            if isinstance(held, Graph):
                held = self.graph(held)
            elif isinstance(held, np.ndarray):
                held = numpy_helper.from_array(held)
            elif isinstance(held, SparseTensor):
                held = numpy_helper.from_array(held.dense())
                name = "value"
            kind = onnx.AttributeProto.INTS if held == () else None
            proto.attribute.append(helper.make_attribute(name, held, attr_type=kind))
        main = self.opsets.setdefault(node.domain, node.opset)
        if any(True for _ in node.subgraphs()) or _signature(node, main) == _signature(node, node.opset):
            return proto
        name = f"{node.op_type}_{len(self.functions)}"
        used = list(dict.fromkeys(item for item in node.inputs if item))
        outputs = [item for item in node.outputs if item]
        imports = [helper.make_opsetid(node.domain, node.opset)]
        self.functions.append(helper.make_function("versions", name, used, outputs, [proto], imports))
        return helper.make_node(name, used, outputs, domain="versions")


def _signature(node: Node, opset: int) -> object:
    """Inputs and attributes of the operator that an opset means."""
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    return [item.name for item in schema.inputs], sorted(schema.attributes)


def _value(item: Any) -> onnx.ValueInfoProto:
    if isinstance(item.type, TensorType) and item.type.dtype is not None:
        return helper.make_tensor_value_info(item.name, element_type_of(item.type.dtype), item.type.shape)
    proto = onnx.ValueInfoProto()
    proto.name = item.name
    return proto
