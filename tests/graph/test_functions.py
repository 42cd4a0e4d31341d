"""Functions of the model and of the standard are expanded; whoever runs the result gets what the function means."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.loader
import onnx.defs
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.graph.build import INT64, everything, model, nothing, read, to_proto, value
from transmuter_async.errors import InvalidModel
from transmuter_async.graph import Budget

LOCAL = {"local": 1}


def function(
    name: str, inputs: list[str], outputs: list[str], nodes: list[onnx.NodeProto], *, opset: int = 17, **more: Any
) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs, outputs, nodes, imports, **more)


def call(name: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(name, inputs, outputs, f"call {name} {outputs[0]}", domain="local", **attributes)


def referring(op_type: str, inputs: list[str], outputs: list[str], **references: str) -> onnx.NodeProto:
    """A node whose attributes take the values of attributes of the function."""
    node = helper.make_node(op_type, inputs, outputs)
    for name, outer in references.items():
        node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=outer, type=onnx.AttributeProto.FLOAT))
    return node


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


X = np.array([-2.0, -1.0, 0.0, 3.0], np.float32)


def check_same_as_onnxruntime(proto: onnx.ModelProto) -> list[str]:
    found = read(proto)
    np.testing.assert_array_equal(run(to_proto(found), X), run(proto, X))
    return [node.name for node in found.graph.nodes]


def test_a_function_called_twice() -> None:
    body = function("Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["t"]), helper.make_node("Neg", ["t"], ["b"])])
    proto = model([call("Twice", ["x"], ["t"]), call("Twice", ["t"], ["y"])], functions=[body], imports=LOCAL)
    assert len(check_same_as_onnxruntime(proto)) == 4
    found = read(proto)
    assert found.node_count == 2
    assert [node.path for node in found.graph.nodes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    names = [name for node in found.graph.nodes for name in node.outputs]
    assert len(set(names)) == len(names)
    assert names[1] == "t"
    assert names[3] == "y"


def test_functions_in_functions_sorted_and_with_subgraphs() -> None:
    branch = helper.make_graph([helper.make_node("Mul", ["a", "k"], ["r"])], "branch", [], [value("r", None)])
    nodes = [
        helper.make_node("Constant", [], ["k"], value_float=3.0), helper.make_node("Cast", ["c"], ["flag"], to=9),
        helper.make_node("If", ["flag"], ["b"], then_branch=branch, else_branch=branch),
    ]  # fmt: skip
    inner = function("Inner", ["a", "c"], ["b"], nodes)
    first = [helper.make_node("Constant", [], ["zero"], value_int=0), helper.make_node("Gather", ["a", "zero"], ["f"])]
    outer = function("Outer", ["a"], ["b"], [*first, call("Inner", ["a", "f"], ["m"]), call("Inner", ["m", "f"], ["b"])])
    proto = model([call("Outer", ["x"], ["k"]), helper.make_node("Neg", ["k"], ["y"])], functions=[outer, inner], imports=LOCAL)
    check_same_as_onnxruntime(proto)
    paths = [node.path for node in read(proto).graph.walk()]
    assert len(set(paths)) == len(paths)
    # onnxruntime wants bodies sorted; here they need not be
    mixed = model(list(proto.graph.node), functions=[outer, function("Inner", ["a", "c"], ["b"], nodes[::-1])], imports=LOCAL)
    mixed_kinds = [node.op_type for node in read(mixed).graph.nodes]
    assert sorted(mixed_kinds) == sorted(node.op_type for node in read(proto).graph.nodes)
    assert mixed_kinds.index("Cast") < mixed_kinds.index("If")
    assert max(map(len, paths)) == 4


@pytest.mark.parametrize("attributes", [{}, {"slope": 0.5}])
def test_attributes_and_their_defaults(attributes: dict[str, float]) -> None:
    body = function(
        "Leaky", ["a"], ["b"], [referring("LeakyRelu", ["a"], ["b"], alpha="slope")],
        attribute_protos=[helper.make_attribute("slope", 0.25)],
    )  # fmt: skip
    check_same_as_onnxruntime(model([call("Leaky", ["x"], ["y"], **attributes)], functions=[body], imports=LOCAL))


@pytest.mark.parametrize("attributes", [{}, {"slope": 0.5}])
def test_an_attribute_without_a_default_is_left_out_when_it_is_not_given(attributes: dict[str, float]) -> None:
    body = function("Leaky", ["a"], ["b"], [referring("LeakyRelu", ["a"], ["b"], alpha="slope")], attributes=["slope"])
    [node] = read(model([call("Leaky", ["x"], ["y"], **attributes)], functions=[body], imports=LOCAL)).graph.nodes
    assert list(node.attributes.items()) == [("alpha", given) for given in attributes.values()]


def test_an_attribute_goes_down_through_a_subgraph() -> None:
    inner = referring("LeakyRelu", ["a"], ["r"], alpha="slope")
    branch = helper.make_graph([inner], "branch", [], [value("r", None)])
    body = function("F", ["a", "c"], ["b"], [helper.make_node("If", ["c"], ["b"], then_branch=branch, else_branch=branch)], attributes=["slope"])
    flag = helper.make_node("Constant", [], ["flag"], value=numpy_helper.from_array(np.array(True)))
    found = read(model([flag, call("F", ["x", "flag"], ["y"], slope=0.5)], functions=[body], imports=LOCAL))
    for graph in found.graph.nodes[1].subgraphs():
        assert graph.nodes[0].attributes["alpha"] == 0.5


def test_inputs_left_out_outputs_unwanted_values_handed_through() -> None:
    body = function(
        "F", ["a", "low", "high"], ["clipped", "same", "again", "unused"],
        [helper.make_node("Clip", ["a", "low", "high"], ["clipped"]), helper.make_node("Neg", ["a"], ["unused"])],
    )  # fmt: skip
    body.output[1:3] = ["a", "clipped"]
    high = numpy_helper.from_array(np.float32(1), "one")
    nodes = [call("F", ["x", "", "one"], ["p", "q", "r"]), helper.make_node("Sum", ["p", "q", "r"], ["y"])]
    found = read(model(nodes, initializers=[high], functions=[body], imports=LOCAL))
    np.testing.assert_array_equal(run(to_proto(found), X), np.minimum(X, 1) * 2 + X)
    clip = found.graph.nodes[0]
    assert clip.inputs == ("x", "", "one")


def test_each_function_has_its_own_opset() -> None:
    body = function("F", ["a"], ["b"], [helper.make_node("Softmax", ["a"], ["b"])], opset=11)
    found = read(model([call("F", ["x"], ["t"]), helper.make_node("Softmax", ["t"], ["y"])], functions=[body], imports=LOCAL))
    assert [node.opset for node in found.graph.nodes] == [11, 17]


def test_overloads() -> None:
    up = function("F", ["a"], ["b"], [helper.make_node("Abs", ["a"], ["b"])], overload="abs")
    down = function("F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], overload="neg")
    nodes = [call("F", ["x"], ["t"]), call("F", ["t"], ["y"])]
    nodes[0].overload, nodes[1].overload = "neg", "abs"
    assert [node.op_type for node in read(model(nodes, functions=[up, down], imports=LOCAL, ir=10)).graph.nodes] == ["Neg", "Abs"]


def test_a_function_that_the_names_of_the_file_collide_with() -> None:
    body = function("F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["t"]), helper.make_node("Abs", ["t"], ["b"])])
    nodes = [helper.make_node("Relu", ["x"], ["call F y/t"]), call("F", ["call F y/t"], ["y"])]
    check_same_as_onnxruntime(model(nodes, functions=[body], imports=LOCAL))


def test_functions_that_are_refused() -> None:
    def load(*bodies: onnx.FunctionProto, node: onnx.NodeProto | None = None, **options: Any) -> None:
        read(model([node or call("F", ["x"], ["y"])], functions=list(bodies), imports=LOCAL), **options)

    with pytest.raises(InvalidModel, match="'F' of domain 'local' calls itself: F -> G -> F"):
        load(function("F", ["a"], ["b"], [call("G", ["a"], ["b"])]), function("G", ["a"], ["b"], [call("F", ["a"], ["b"])]))
    plain = function("F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])])
    with pytest.raises(InvalidModel, match="function twice"):
        load(plain, plain)
    with pytest.raises(InvalidModel, match="with 2 inputs and 1 outputs"):
        load(plain, node=call("F", ["x", "x"], ["y"]))
    with pytest.raises(InvalidModel, match="refers to 'outside', which nothing defines"):
        load(function("F", ["a"], ["b"], [helper.make_node("Add", ["a", "outside"], ["b"])]))
    with pytest.raises(InvalidModel, match="refers to 'x'"):  # names of the caller are not visible in a function
        load(function("F", ["a"], ["b"], [helper.make_node("Add", ["a", "x"], ["b"])]))
    doubling = [
        function(f"F{n}", ["a"], ["b"], [call(f"F{n - 1}", ["a"], ["t"]), call(f"F{n - 1}", ["t"], ["b"])] if n else [])
        for n in range(40)
    ]
    doubling[0].output[0] = "a"
    with pytest.raises(InvalidModel, match="budget"):
        load(*doubling, node=call("F39", ["x"], ["y"]), budget=Budget(nodes=2000))
    with pytest.raises(InvalidModel, match="nested more than 10"):
        load(*doubling, node=call("F39", ["x"], ["y"]), budget=Budget(nesting=10))


def test_only_what_is_not_known_is_expanded() -> None:
    proto = model([helper.make_node("Softmax", ["x"], ["t"]), helper.make_node("HardSwish", ["t"], ["y"])])
    asked: set[tuple[str, str, int]] = set()

    def known(domain: str, name: str, opset: int) -> bool:
        asked.add((domain, name, opset))
        return name not in {"HardSwish", "Cosh"}

    assert [node.op_type for node in read(proto, known).graph.nodes] == ["Softmax", "HardSigmoid", "Mul"]
    assert ("", "Softmax", 13) in asked  # the version that counts at opset 17


def test_an_operator_without_a_body_stays_and_is_reported() -> None:
    found = read(model([helper.make_node("Cosh", ["x"], ["y"], "c")]), nothing)
    assert [use.op_type for use in found.check().missing] == ["Cosh"]


def test_a_body_that_depends_on_types_waits_for_them() -> None:
    """CastLike takes the type of its second input: without it the node stays as it is."""
    like = helper.make_node("CastLike", ["x", "t"], ["y"])
    typed = model([helper.make_node("Shape", ["x"], ["t"]), like], outputs=[value("y", None, INT64)])
    last = read(typed, lambda domain, name, opset: name != "CastLike").graph.nodes[-1]
    assert (last.op_type, last.attributes["to"]) == ("Cast", INT64)
    untyped = model([helper.make_node("Mystery", ["x"], ["t"], domain="d"), like], imports={"d": 1})
    assert read(untyped, nothing).graph.nodes[-1].op_type == "CastLike"


# -- the functions of the standard ---------------------------------------------------------------------------------

PER_OPERATOR = 3
UNTESTED = {"Bernoulli", "Dropout", "Gradient"}
"""Random ones, and what the suite has no case of a single node for."""


def bodies(schema: Any) -> list[int]:
    """Versions of the domain for which the operator has a body."""
    return [*schema.function_opset_versions, *schema.context_dependent_function_opset_versions]


OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if bodies(schema)} - UNTESTED)


@functools.cache
def cases() -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite makes its data on purpose with casts that overflow
        return tuple(case for case in onnx.backend.test.loader.load_model_tests(kind="node") if case.model is not None)


def cases_of(name: str) -> list[tuple[onnx.ModelProto, Any]]:
    """Up to three models of one node with this operator, at an opset for which it has a body, and their data."""
    chosen: list[tuple[onnx.ModelProto, Any]] = []
    for case in cases():
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].op_type != name or len(chosen) == PER_OPERATOR:
            continue
        proto = onnx.ModelProto.FromString(case.model.SerializeToString())
        [entry] = [item for item in proto.opset_import if item.domain == nodes[0].domain]
        schema = onnx.defs.get_schema(name, entry.version, entry.domain)
        if bodies(schema):  # the first body may belong to a later opset than the suite's model
            entry.version = max(entry.version, min(bodies(schema)))
            chosen.append((proto, case.data_sets[0]))
    return chosen


def plain(held: Any) -> Any:
    if isinstance(held, onnx.TensorProto):
        return numpy_helper.to_array(held)
    return np.asarray(held) if np.isscalar(held) else held


def run_anywhere(proto: onnx.ModelProto, inputs: dict[str, Any]) -> list[Any]:
    """By onnxruntime, or by the reference evaluator where it does not know an opset or a type yet."""
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return list(session.run(None, inputs))
    except Exception:
        return list(ReferenceEvaluator(proto).run(None, inputs))


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
        return
    found = np.asarray(found)
    assert found.dtype == expected.dtype
    if found.dtype == object:
        np.testing.assert_array_equal(found, expected)
        return
    narrow = expected.dtype.itemsize < 4
    np.testing.assert_allclose(
        found.reshape(expected.shape).astype(np.float64), expected.astype(np.float64), rtol=1e-2 if narrow else 1e-3, atol=1e-2 if narrow else 1e-5
    )


def test_enough_operators_are_looked_at() -> None:
    assert len(OPERATORS) >= 45


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_expanded_operators_of_the_standard(name: str) -> None:
    chosen = cases_of(name)
    assert chosen
    for proto, data in chosen:
        check_expanded(proto, *data)


def check_expanded(proto: onnx.ModelProto, inputs: list[Any], outputs: list[Any]) -> None:
    first = proto.graph.node[0]
    found = read(proto, lambda domain, name, opset: name != first.op_type)
    assert first.op_type not in {node.op_type for node in found.graph.walk()}
    given = {item.name: plain(held) for item, held in zip(found.inputs, inputs, strict=True)}
    for one, other in zip(run_anywhere(to_proto(found), given), outputs, strict=True):
        assert_close(one, plain(other))


def test_every_model_of_the_suite_is_read() -> None:
    read_in = 0
    for case in cases():
        for known in (everything, nothing):
            found = read(case.model, known)
            assert [item.name for item in found.outputs] == [item.name for item in case.model.graph.output], case.name
            read_in += 1
    assert read_in >= 2 * 1500
