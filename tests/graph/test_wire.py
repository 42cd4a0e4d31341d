"""The walk over the wire format: it cuts what is large and changes nothing else."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.graph.build import everything, model, read, same
from transmuter_async.errors import InvalidModel
from transmuter_async.graph import Graph, read_model, wire
from transmuter_async.graph.storage import BufferStorage

NONCE = b"n" * wire.MARKER_BYTES
BIG = np.arange(3000, dtype=np.float32)


def stripped(data: bytes) -> wire.Stripped:
    return wire.strip(BufferStorage(data), NONCE, most=1 << 30)


def test_field_numbers_are_those_of_onnx() -> None:
    messages = {
        "Model": onnx.ModelProto, "Graph": onnx.GraphProto, "Node": onnx.NodeProto, "Attribute": onnx.AttributeProto,
        "SparseTensor": onnx.SparseTensorProto, "Function": onnx.FunctionProto,
    }  # fmt: skip
    inner = {message.DESCRIPTOR.full_name: name for name, message in messages.items()}
    inner[onnx.TensorProto.DESCRIPTOR.full_name] = "Tensor"
    for name, message in messages.items():
        found = {
            field.number: inner[field.message_type.full_name]
            for field in message.DESCRIPTOR.fields
            if field.message_type is not None and field.message_type.full_name in inner
        }
        assert found == dict(wire._FIELDS[name]), name


def everywhere() -> onnx.ModelProto:
    """Large tensors in each place that can hold one."""
    big = numpy_helper.from_array(BIG, "big")
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(BIG, "sparse"), numpy_helper.from_array(np.arange(3000), "i"), [4000]
    )
    body = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=big)], "body", [], [helper.make_empty_tensor_value_info("c")], [big]
    )
    nodes = [
        helper.make_node("Constant", [], ["k"], value=big),
        helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body),
        helper.make_node("Custom", ["k"], ["z"], domain="own", tensors=[big, big], sparse=sparse),
        helper.make_node("Function", ["k"], ["f"], domain="local"),
    ]
    function = helper.make_function(
        "local", "Function", ["a"], ["b"],
        [helper.make_node("Constant", [], ["c"], value=big), helper.make_node("Add", ["a", "c"], ["b"])],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    big2 = numpy_helper.from_array(BIG, "big2")
    return model(
        nodes, outputs=["y", "z", "f"], initializers=[big2], functions=[function], imports={"own": 1, "local": 1},
        sparse_initializer=[sparse],
    )  # fmt: skip


def test_every_large_tensor_is_cut_and_read() -> None:
    proto = everywhere()
    data = proto.SerializeToString()
    assert len(stripped(data).cuts) == 13
    assert len(stripped(data).rest) < 3000
    graph = read(proto).graph
    assert same(graph.initializers["big2"], BIG)
    assert same(graph.initializers["sparse"][:3000], BIG)
    constant, branch, custom, *function = graph.nodes
    assert same(constant.attributes["value"], BIG)
    for inner in branch.subgraphs():
        assert isinstance(inner, Graph)
        [held] = inner.initializers.values()
        assert same(held, BIG)
        assert same(inner.nodes[0].attributes["value"], BIG)
    assert all(same(item, BIG) for item in custom.attributes["tensors"])
    assert same(custom.attributes["sparse"].values, BIG)
    assert same(function[0].attributes["value"], BIG)


def test_the_rest_parses_to_the_same_model_without_data() -> None:
    proto = everywhere()
    rest = onnx.ModelProto.FromString(stripped(proto.SerializeToString()).rest)
    rest.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data
    assert rest.graph.initializer[0] == proto.graph.initializer[0]
    assert rest.graph.node[0].attribute[0].t.dims == proto.graph.node[0].attribute[0].t.dims
    assert rest.opset_import == proto.opset_import


@pytest.mark.parametrize("size", [4096, 4100])
def test_only_what_is_larger_than_four_kib_is_cut(size: int) -> None:
    proto = model([helper.make_node("Identity", ["x"], ["y"])], initializers=[numpy_helper.from_array(np.zeros(size, np.int8), "w")])
    assert len(stripped(proto.SerializeToString()).cuts) == (size > 4096)


def test_large_typed_fields_are_cut() -> None:
    tensor = helper.make_tensor("w", onnx.TensorProto.DOUBLE, [2000], np.arange(2000.0).tolist())
    proto = model([helper.make_node("Identity", ["x"], ["y"])], initializers=[tensor])
    assert len(stripped(proto.SerializeToString()).cuts) == 1
    assert same(read(proto).graph.initializers["w"], np.arange(2000.0))


def field(number: int, content: bytes) -> bytes:
    return wire._encode(number << 3 | 2) + wire._encode(len(content)) + content


def test_a_repeated_field_means_what_protobuf_makes_of_it() -> None:
    """A singular message that occurs twice is merged, a singular value is the last one."""
    first = model([helper.make_node("Identity", ["x"], ["y"])], initializers=[numpy_helper.from_array(BIG, "w")])
    data = first.SerializeToString()
    more = onnx.GraphProto(initializer=[numpy_helper.from_array(BIG + 1, "w2")]).SerializeToString()
    merged = read(data + field(7, more))
    assert same(merged.graph.initializers["w"], BIG)
    assert same(merged.graph.initializers["w2"], BIG + 1)

    shape = onnx.TensorProto(name="v", data_type=1, dims=[3000]).SerializeToString()
    twice = data + field(7, field(5, shape + field(9, BIG.tobytes()) + field(9, (BIG + 2).tobytes())))
    assert same(read(twice).graph.initializers["v"], BIG + 2)
    pieces = data + field(7, field(5, shape + field(4, BIG[:2000].tobytes()) + field(4, BIG[2000:].tobytes())))
    assert same(read(pieces).graph.initializers["v"], BIG)


def test_odd_encodings_are_left_to_protobuf() -> None:
    data = model([helper.make_node("Identity", ["x"], ["y"])], initializers=[numpy_helper.from_array(BIG, "w")]).SerializeToString()
    overlong = data + b"\x28\x81\x00"  # model_version = 1 in two bytes
    group = data + b"\x9b\x06\x9c\x06"  # an unknown group, empty
    for odd in (overlong, group):
        with pytest.raises(wire.Odd):
            stripped(odd)
        facts: dict[str, object] = {}
        assert same(read_model(odd, known=everything, observe=facts.__setitem__).graph.initializers["w"], BIG)
        assert "parsed in one go" in str(facts["warning"])


def test_a_cut_off_model_is_named_so() -> None:
    data = everywhere().SerializeToString()
    for stop in (9, 100, 20_000, len(data) - 1):
        with pytest.raises(InvalidModel, match="not a whole ONNX model"):
            read(data[:stop])


def test_a_marker_can_not_be_forged() -> None:
    """Raw data that looks like a marker of another load is data."""
    forged = onnx.TensorProto(name="v", data_type=2, dims=[24], raw_data=NONCE + bytes(8))
    proto = model([helper.make_node("Identity", ["x"], ["y"])], initializers=[numpy_helper.from_array(BIG, "w"), forged])
    assert read(proto).graph.initializers["v"].tobytes() == NONCE + bytes(8)
