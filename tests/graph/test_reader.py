"""Sources, attributes, names, order, opsets, budgets, and files that are no models."""

from __future__ import annotations

import io
import itertools
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.graph.build import INT64, everything, model, nothing, read, same, value
from transmuter_async.errors import InvalidModel
from transmuter_async.graph import (
    Budget,
    Graph,
    Model,
    OptionalType,
    SequenceType,
    TensorType,
    read_model,
)  # fmt: skip

WEIGHT = numpy_helper.from_array(np.arange(2000, dtype=np.float32), "w")
PLAIN = model([helper.make_node("Add", ["x", "w"], ["y"], "sum")], initializers=[WEIGHT])


def test_all_sources_give_the_same_model(tmp_path: Path) -> None:
    data = PLAIN.SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    shifted = tmp_path / "shifted"
    shifted.write_bytes(b"header" + data)
    with path.open("rb") as file, path.open("rb", buffering=0) as raw, shifted.open("rb") as later:
        later.seek(6)
        sources: list[Any] = [path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), file, raw, later, PLAIN]
        for source in sources:
            found = read_model(source, known=everything)
            assert [node.op_type for node in found.graph.nodes] == ["Add"]
            assert same(found.graph.initializers["w"], np.arange(2000, dtype=np.float32)), source
            assert found.source == (str(path) if source is path or source == str(path) else None)


def test_a_spooled_file_and_a_text_file(tmp_path: Path) -> None:
    with tempfile.SpooledTemporaryFile() as spooled:
        spooled.write(PLAIN.SerializeToString())
        spooled.seek(0)
        assert read_model(spooled, known=everything).node_count == 1  # type: ignore[arg-type]
    (tmp_path / "t").write_text("hello")
    with (tmp_path / "t").open() as text, pytest.raises(TypeError, match="binary mode"):
        read_model(text, known=everything)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not int"):
        read_model(3, known=everything)  # type: ignore[arg-type]


def test_the_facts_of_a_model() -> None:
    proto = model(
        [helper.make_node("Identity", ["x"], ["y"])], [value("x", ("batch", 3, None))], [value("y", None)],
        imports={"ai.onnx.ml": 3, "unused.domain": 9}, value_info=[value("q", (2,), INT64)],
    )  # fmt: skip
    proto.producer_name, proto.producer_version = "maker", "1"
    helper.set_model_props(proto, {"author": "me"})
    found = read(proto)
    assert found.inputs[0].type == TensorType(np.dtype(np.float32), ("batch", 3, None))
    assert found.outputs[0].type == TensorType(np.dtype(np.float32), None)
    assert (found.opset, found.producer, dict(found.metadata)) == (17, "maker 1", {"author": "me"})
    assert found.graph.nodes[0].opset == 17
    assert found.opsets["unused.domain"] == 9


def test_types_that_are_no_tensors() -> None:
    inner = helper.make_tensor_type_proto(TensorProto.INT64, [None])
    given = [
        helper.make_value_info("s", helper.make_sequence_type_proto(inner)),
        helper.make_value_info("o", helper.make_optional_type_proto(inner)),
        helper.make_value_info("m", helper.make_map_type_proto(TensorProto.STRING, inner)),
    ]
    found = read(model([helper.make_node("Custom", ["s", "o", "m"], ["y"], domain="d")], given, imports={"d": 1}))
    plain = TensorType(np.dtype(np.int64), (None,))
    assert found.inputs[0].type == SequenceType(plain)
    assert found.inputs[1].type == OptionalType(plain)
    assert found.inputs[2].type.key == np.dtype(object)  # type: ignore[union-attr]


def attribute(name: str, kind: int, **held: Any) -> onnx.AttributeProto:
    return onnx.AttributeProto(name=name, type=kind, **held)


def test_every_kind_of_attribute() -> None:
    kinds = onnx.AttributeProto
    graph = helper.make_graph([helper.make_node("Constant", [], ["c"], value_int=1)], "inner", [], [value("c")])
    node = helper.make_node("Custom", ["x"], ["y"], domain="d")
    node.attribute.extend(
        [
            attribute("f", kinds.FLOAT, f=0.1), attribute("i", kinds.INT, i=-(2**63)), attribute("s", kinds.STRING, s="ä".encode()),
            attribute("raw", kinds.STRING, s=b"\xff\xfe"), attribute("t", kinds.TENSOR, t=WEIGHT), attribute("g", kinds.GRAPH, g=graph),
            attribute("fs", kinds.FLOATS, floats=[1, 2]), attribute("is", kinds.INTS, ints=[3]), attribute("ss", kinds.STRINGS, strings=[b"a"]),
            attribute("none", kinds.INTS), attribute("nofloats", kinds.FLOATS), attribute("zero", kinds.FLOAT),
            attribute("ts", kinds.TENSORS, tensors=[WEIGHT]), attribute("gs", kinds.GRAPHS, graphs=[graph, graph]),
            attribute("tp", kinds.TYPE_PROTO, tp=helper.make_tensor_type_proto(1, [2])), attribute("old", 0, ints=[5]),
        ]
    )  # fmt: skip
    held = read(model([node], imports={"d": 1})).graph.nodes[0].attributes
    assert held["f"] == float(np.float32(0.1))
    assert held["i"] == -(2**63)
    assert (held["s"], held["raw"]) == ("ä", b"\xff\xfe")
    assert same(held["t"], np.arange(2000, dtype=np.float32))  # type: ignore[arg-type]
    assert isinstance(held["g"], Graph)
    assert (held["fs"], held["is"], held["ss"], held["none"], held["nofloats"]) == ((1.0, 2.0), (3,), ("a",), (), ())
    assert held["zero"] == 0.0
    assert isinstance(held["ts"], tuple)
    assert held["tp"] == TensorType(np.dtype(np.float32), (2,))
    assert held["old"] == (5,)
    paths = [inner.path for item in read(model([node], imports={"d": 1})).graph.nodes[0].subgraphs() for inner in item.nodes]
    assert paths == [(0, 0), (0, 1), (0, 2)]


# -- names and order -----------------------------------------------------------------------------------------------


def chain(*order: int) -> list[onnx.NodeProto]:
    nodes = [helper.make_node("Relu", [a], [b], b) for a, b in itertools.pairwise("xabcy")]
    return [nodes[index] for index in order]


def test_nodes_are_sorted_and_keep_their_order_where_they_can() -> None:
    found = read(model(chain(3, 1, 0, 2)))
    assert [node.name for node in found.graph.nodes] == ["a", "b", "c", "y"]
    assert [node.path for node in found.graph.nodes] == [(0,), (1,), (2,), (3,)]
    wide = [helper.make_node("Relu", ["x"], [name], name) for name in "qpz"]
    kept = read(model([*wide, helper.make_node("Sum", ["q", "p", "z"], ["y"], "y")]))
    assert [node.name for node in kept.graph.nodes] == ["q", "p", "z", "y"]


def branches(name: str, inner: str = "b") -> onnx.NodeProto:
    """An If whose branches take `name` from around them."""
    graph = helper.make_graph(
        [helper.make_node("Relu", [inner + "0"], [inner], "second"), helper.make_node("Neg", [name], [inner + "0"], "first")],
        "branch", [], [value(inner)],
    )  # fmt: skip
    return helper.make_node("If", ["x"], ["y"], "if", then_branch=graph, else_branch=graph)


def test_what_a_subgraph_takes_from_around_counts_for_the_order() -> None:
    found = read(model([branches("late"), helper.make_node("Relu", ["x"], ["late"], "late")]))
    assert [node.name for node in found.graph.nodes] == ["late", "if"]
    then, other = found.graph.nodes[1].subgraphs()
    assert [node.name for node in then.nodes] == ["first", "second"]
    assert [node.path for node in (*then.nodes, *other.nodes)] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert then.outer_names() == {"late"}


def test_an_inner_name_that_hides_an_outer_one_is_renamed() -> None:
    found = read(model([helper.make_node("Relu", ["x"], ["b"], "outer"), branches("b", "c"), branches("x", "b")][:2]))
    assert found.graph.nodes[1].op_type == "If"
    hiding = helper.make_graph([helper.make_node("Neg", ["x"], ["b"])], "branch", [], [value("b")])
    proto = model([
        helper.make_node("Relu", ["x"], ["b"], "outer"),
        helper.make_node("If", ["b"], ["y"], then_branch=hiding, else_branch=hiding),
    ])  # fmt: skip
    for graph in read(proto).graph.nodes[1].subgraphs():
        assert graph.nodes[0].outputs[0] == graph.outputs[0].name != "b"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (chain(0, 1, 2), "an output of graph 'g' refers to 'y', which nothing defines"),
        (chain(1, 2, 3), "Relu node 'b' of graph 'g' refers to 'a'"),
        ([helper.make_node("Add", ["x", "b"], ["a"], "one"), helper.make_node("Relu", ["a"], ["b"], "two"),
          helper.make_node("Relu", ["b"], ["y"], "three")], "cycle.*'one'.*'two'"),
        ([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])], "defines 'y' twice"),
        ([helper.make_node("Relu", ["y"], ["x"]), helper.make_node("Neg", ["x"], ["y"])], "defines 'x' twice"),
        ([branches("nowhere")], "refers to 'nowhere'"),
        ([branches("y")], "cycle"),
        ([helper.make_node("Relu", ["x"], ["y"], "here", domain="other")], "'here' uses domain 'other', of which the model imports"),
        ([helper.make_node("", ["x"], ["y"], "here")], "'here' names no operator"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit(nodes: list[onnx.NodeProto], text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        read(model(nodes))


def test_graphs_that_do_not_fit() -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    cases = [
        (model(relu, ["x", "x"]), "two inputs named 'x'"),
        (model(relu, outputs=["y", "y"]), "outputs twice"),
        (model(relu, outputs=[]), "no outputs"),
        (model(relu, initializers=[WEIGHT, WEIGHT]), "two initializers named 'w'"),
        (model([*relu, helper.make_node("Neg", ["x"], ["w"])], initializers=[WEIGHT]), "defines 'w' twice"),
        (model(relu, initializers=[TensorProto(data_type=1, dims=[0])]), "without a name"),
    ]
    node = helper.make_node("LeakyRelu", ["x"], ["y"], alpha=1.0)
    node.attribute.append(node.attribute[0])
    cases.append((model([node]), "attribute 'alpha' twice"))
    node = helper.make_node("LeakyRelu", ["x"], ["y"])
    node.attribute.append(attribute("alpha", 1, ref_attr_name="a"))
    cases.append((model([node]), "from a function around it, but it is in none"))
    double = model(relu)
    double.opset_import.append(helper.make_opsetid("ai.onnx", 9))
    cases.append((double, "two versions"))
    for proto, text in cases:
        with pytest.raises(InvalidModel, match=text):
            read(proto)


def test_both_spellings_of_the_standard_domain() -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")])
    proto.opset_import[0].domain = "ai.onnx"
    [node] = read(proto).graph.nodes
    assert (node.domain, node.opset, node.operator) == ("", 17, "ai.onnx:Relu")


@pytest.mark.parametrize("ir", [3, 4])
def test_an_initializer_that_is_an_input(ir: int) -> None:
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], ["x", value("w", (2000,))], initializers=[WEIGHT], ir=ir)
    graph = read(proto).graph
    assert [item.name for item in graph.inputs] == ["x"]
    assert graph.overridable == (frozenset({"w"}) if ir >= 4 else frozenset())
    assert graph.types["w"] == TensorType(np.dtype(np.float32), (2000,))


def test_a_newer_ir_version_is_accepted_with_a_warning() -> None:
    facts: list[str] = []
    assert read(model(chain(0, 1, 2, 3), ir=99), observe=lambda name, held: facts.append(str(held))).ir_version == 99
    assert any("IR version 99" in fact for fact in facts)


# -- budgets -------------------------------------------------------------------------------------------------------


def test_budgets() -> None:
    with pytest.raises(InvalidModel, match="more than 3 nodes"):
        read(model(chain(0, 1, 2, 3)), budget=Budget(nodes=3))
    with pytest.raises(InvalidModel, match="more elements"):
        read(PLAIN, budget=Budget(elements=1999))
    with pytest.raises(InvalidModel, match="more elements"):
        read(model(chain(0, 1, 2, 3), initializers=[helper.make_tensor("s", 8, [3], [b"a"] * 3)]), budget=Budget(strings=2))
    deep = helper.make_graph([helper.make_node("Neg", ["x"], ["d"])], "deep", [], [value("d")])
    for level in range(5):
        inner = helper.make_node("If", ["x"], [f"d{level}"], then_branch=deep, else_branch=deep)
        deep = helper.make_graph([inner], f"deep{level}", [], [value(f"d{level}")])
    proto = model([helper.make_node("If", ["x"], ["y"], then_branch=deep, else_branch=deep)])
    assert len(list(read(proto).graph.walk())) == 2**7 - 1
    with pytest.raises(InvalidModel, match="nested more than 4"):
        read(proto, budget=Budget(nesting=4))
    with pytest.raises(InvalidModel, match="budget of 10 for that"):
        read(PLAIN, budget=Budget(rest_bytes=10))


# -- no models -----------------------------------------------------------------------------------------------------


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", "x")
    return file.getvalue()


SAFETENSORS = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", "Git-LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html>\n<html>", "web page.*/resolve/"),
        (b"\xef\xbb\xbf\n <HTML>", "web page"),
        (b'{"error": "Repository not found"}', "JSON"),
        (zipped(), "ZIP"),
        (len(SAFETENSORS).to_bytes(8, "little") + SAFETENSORS + b"0000", "safetensors"),
        (pickle.dumps({"a": 1}), "pickle"),
        (pickle.dumps([1], protocol=2), "pickle"),
        (b"GGUF\3\0\0\0", "GGUF"),
        (b"\x1f\x8b\x08\0\0\0", "gzip"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"Entry not found", "text file"),
        (b"\x08\x08", "no graph"),
        (b"\0\0\0\0", "not a whole ONNX model"),
        (b"\xff" * 100, "not a whole ONNX model"),
        (helper.make_tensor("t", 1, [2], [1, 2]).SerializeToString(), "ONNX model"),
    ],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        read_model(data, known=everything)
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(InvalidModel, match=text) as caught:
        read_model(path, known=everything)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.source == str(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.onnx").write_bytes(b"")
    with pytest.raises(InvalidModel, match=r"folder.*sub/model\.onnx"):
        read_model(tmp_path, known=everything)
    with pytest.raises(InvalidModel, match="no such file"):
        read_model(tmp_path / "none.onnx", known=everything)
    with pytest.raises(InvalidModel, match="hf://"):
        read_model("org/repository", known=everything)
    with pytest.raises(InvalidModel, match="no such file"):
        read_model(tmp_path / "sub" / "model.onnx" / "x", known=everything)
    with pytest.raises(InvalidModel, match="not a regular file"):
        read_model("/dev/null", known=everything)
    with pytest.raises(InvalidModel, match="can't be opened"):
        read_model("nul\0byte", known=everything)


def test_reading_twice_gives_equal_names(tmp_path: Path) -> None:
    """Names end up in digests of the disk cache: they must not depend on hash seeds or on earlier reads."""
    proto = model([helper.make_node("Softmax", ["x"], ["y"])])
    one, other = (read(proto, nothing) for _ in range(2))
    assert [node.outputs for node in one.graph.nodes] == [node.outputs for node in other.graph.nodes]
    assert isinstance(one, Model)
