"""Each pass keeps what the graph computes; onnxruntime runs the graph before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from tests.graph.build import INT64, model, read, same, to_proto, value
from transmuter_async.errors import InputError
from transmuter_async.graph import (
    PASSES,
    Graph,
    constants_to_initializers,
    deduplicate,
    prune,
    remove_identity,
    simplify,
)  # fmt: skip

X = np.linspace(-2, 2, 4, dtype=np.float32)


def run(proto: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(item) for item in session.run(None, {"x": X})]


def check(proto: onnx.ModelProto, *passes: Callable[[Graph], Graph]) -> Graph:
    """The graph after the passes, having computed the same before and after."""
    before = read(proto)
    graph = before.graph
    for apply in passes:
        graph = apply(graph)
    for one, other in zip(run(to_proto(replace(before, graph=graph))), run(proto), strict=True):
        np.testing.assert_array_equal(one, other)
    return graph


def kinds(graph: Graph) -> list[str]:
    return [node.op_type for node in graph.walk()]


def node(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, **attributes)


def tensor(name: str, held: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(held), name)


def condition() -> onnx.NodeProto:
    return node("Constant", [], ["flag"], value=tensor("", True))


def choose(then: onnx.GraphProto, other: onnx.GraphProto | None = None) -> onnx.NodeProto:
    return node("If", ["flag"], ["y"], then_branch=then, else_branch=other or then)


def branch(nodes: list[onnx.NodeProto], output: str, initializers: list[onnx.TensorProto] = ()) -> onnx.GraphProto:  # type: ignore[assignment]
    return helper.make_graph(nodes, "branch", [], [value(output, None)], list(initializers))


def test_prune_drops_dead_nodes_and_weights() -> None:
    inner = branch([node("Neg", ["used"], ["r"]), node("Abs", ["used"], ["dead inside"])], "r", [tensor("dead weight", X)])
    graph = check(
        model(
            [condition(), node("Relu", ["x"], ["used"]), node("Exp", ["x"], ["dead"]), node("Log", ["dead"], ["deader"]), choose(inner)],
            initializers=[tensor("unused", X)],
        ),
        prune,
    )  # fmt: skip
    assert kinds(graph) == ["Constant", "Relu", "If", "Neg", "Neg"]
    assert not graph.initializers
    assert not any(inner.initializers for item in graph.nodes for inner in item.subgraphs())
    assert [item.path for item in graph.nodes] == [(0,), (1,), (4,)]


def test_prune_to_chosen_outputs() -> None:
    proto = model(
        [node("Relu", ["x"], ["a"]), node("Neg", ["z"], ["b"]), node("Add", ["a", "b"], ["c"])], ["x", "z"], ["c", "b", "a"],
        value_info=[value("a", (4,))],
    )  # fmt: skip
    graph = read(proto).graph
    one = prune(graph, ["a"])
    assert (kinds(one), [item.name for item in one.inputs], [item.name for item in one.outputs]) == (["Relu"], ["x"], ["a"])
    assert [item.name for item in prune(graph, ["b", "c"]).outputs] == ["b", "c"]
    assert prune(graph).inputs == graph.inputs
    with pytest.raises(InputError, match=r"\['q'\]; its outputs are c, b, a"):
        prune(graph, ["q", "a"])
    with pytest.raises(InputError, match="twice"):
        prune(graph, ["a", "a"])
    with pytest.raises(InputError, match="no outputs"):
        prune(graph, [])
    inner = read(model([node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])], value_info=[value("a", (4,))])).graph
    [chosen] = prune(inner, ["a"]).outputs
    assert chosen.name == "a"
    assert chosen.type == inner.types["a"]


def test_identities_go_but_outputs_keep_their_names() -> None:
    inner = branch([node("Identity", ["t"], ["i"]), node("Neg", ["i"], ["j"]), node("Identity", ["j"], ["r"])], "r")
    graph = check(
        model(
            [condition(), node("Identity", ["x"], ["s"]), node("Identity", ["s"], ["t"]), choose(inner), node("Identity", ["x"], ["z"])],
            outputs=["y", "z"],
        ),
        remove_identity,
    )  # fmt: skip
    assert kinds(graph) == ["Constant", "If", "Neg", "Identity", "Neg", "Identity", "Identity"]
    assert [item.name for item in graph.outputs] == ["y", "z"]
    assert {inner.nodes[0].inputs for item in graph.nodes for inner in item.subgraphs()} == {("x",)}


def test_a_subgraph_that_gives_a_value_from_around() -> None:
    """onnxruntime refuses such a branch, the standard does not."""
    proto = model([condition(), node("Identity", ["x"], ["s"]), choose(branch([], "s"))])
    graph = prune(deduplicate(remove_identity(read(proto).graph)))
    assert kinds(graph) == ["Constant", "If"]
    assert all(inner.outputs[0].name == "x" for item in graph.nodes for inner in item.subgraphs())


def test_an_identity_in_another_domain_stays() -> None:
    proto = model([node("Identity", ["x"], ["a"], domain="d"), node("Neg", ["a"], ["y"])], imports={"d": 1})
    assert kinds(remove_identity(read(proto).graph)) == ["Identity", "Neg"]


def test_equal_weights_and_equal_nodes_are_merged() -> None:
    inner = branch([node("Add", ["p", "w3"], ["r"])], "r", [tensor("w3", X)])
    nodes = [
        condition(), node("Add", ["x", "w1"], ["a"]), node("Add", ["x", "w2"], ["b"]), node("Mul", ["a", "b"], ["p"]),
        node("Mul", ["b", "a"], ["q"]), node("LeakyRelu", ["q"], ["l"], alpha=0.5), node("LeakyRelu", ["q"], ["m"], alpha=0.25), choose(inner),
    ]  # fmt: skip
    graph = check(model(nodes, outputs=["y", "p", "q", "l", "m"], initializers=[tensor("w1", X), tensor("w2", X)]), deduplicate)
    assert list(graph.initializers) == ["w1"]
    # p = a * a, and q becomes the same node, but its name is an output's
    assert kinds(graph) == ["Constant", "Add", "Mul", "Mul", "LeakyRelu", "LeakyRelu", "If", "Add", "Add"]
    assert {inner.nodes[0].inputs for item in graph.nodes for inner in item.subgraphs()} == {("p", "w1")}


def test_what_is_not_merged() -> None:
    def merged(first: onnx.NodeProto, second: onnx.NodeProto, initializers: Any = (), **options: Any) -> int:
        sum_ = node("Concat", ["a", "b"], ["y"], axis=0)
        return len(kinds(deduplicate(read(model([first, second, sum_], initializers=initializers, **options)).graph)))

    assert merged(node("Neg", ["x"], ["a"]), node("Neg", ["x"], ["b"])) == 2
    for name in ("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Dropout"):
        assert merged(node(name, ["x"], ["a"]), node(name, ["x"], ["b"])) == 3
    assert merged(node("RandomNormal", [], ["a"], shape=[2], seed=1.0), node("RandomNormal", [], ["b"], shape=[2], seed=1.0)) == 3
    assert merged(node("Own", ["x"], ["a"], domain="d"), node("Own", ["x"], ["b"], domain="d"), imports={"d": 1}) == 3
    assert merged(node("Elu", ["x"], ["a"], alpha=0.0), node("Elu", ["x"], ["b"], alpha=-0.0)) == 3
    assert merged(node("Split", ["x"], ["a", "c"]), node("Split", ["x"], ["b", ""])) == 3
    zeros = [tensor("p", np.float32([0.0])), tensor("n", np.float32([-0.0])), tensor("i", np.int32([0])), tensor("m", np.float32([[0.0]]))]
    graph = read(model([node("Sum", ["x", "p", "n", "i", "m"], ["y"])], initializers=zeros)).graph
    assert deduplicate(graph).initializers.keys() == graph.initializers.keys()


def test_an_initializer_that_a_call_may_replace_is_not_merged() -> None:
    proto = model(
        [node("Add", ["x", "w1"], ["a"]), node("Add", ["a", "w2"], ["y"])], ["x", value("w1", (4,)), value("w2", (4,))],
        initializers=[tensor("w1", X), tensor("w2", X)], ir=8,
    )  # fmt: skip
    graph = simplify(read(proto).graph)
    assert graph.overridable == {"w1", "w2"}
    assert graph.initializers.keys() == {"w1", "w2"}


def test_large_weights_are_compared_whole() -> None:
    one = np.zeros(10_000_000, np.uint8)
    other = one.copy()
    other[5_000_000] = 1
    graph = read(model([node("Concat", ["a", "b", "c"], ["y"], axis=0)], initializers=[tensor("a", one), tensor("b", other), tensor("c", one)])).graph
    assert list(deduplicate(graph).initializers) == ["a", "b"]


def test_constants_become_initializers() -> None:
    sparse = helper.make_sparse_tensor(tensor("v", np.float32([5])), tensor("i", np.array([1])), [3])
    nodes = [
        node("Constant", [], ["t"], value=tensor("", X)), node("Constant", [], ["f"], value_float=0.5), node("Constant", [], ["fs"], value_floats=[1.0, 2.0]),
        node("Constant", [], ["i"], value_int=3), node("Constant", [], ["is"], value_ints=[4]), node("Constant", [], ["s"], value_string="a"),
        node("Constant", [], ["ss"], value_strings=["a", "b"]), node("Constant", [], ["sp"], sparse_value=sparse), node("Add", ["x", "t"], ["y"]),
    ]  # fmt: skip
    graph = constants_to_initializers(read(model(nodes)).graph)
    assert kinds(graph) == ["Add"]
    found = dict(graph.initializers)
    expected = {
        "t": X, "f": np.float32(0.5), "fs": np.float32([1, 2]), "i": np.int64(3), "is": np.int64([4]), "s": np.array("a", object),
        "ss": np.array(["a", "b"], object), "sp": np.float32([0, 5, 0]),
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for name, held in expected.items():
        assert same(found[name], np.asarray(held)), name
        assert not found[name].flags.writeable
    inner = branch([node("Constant", [], ["r"], value=tensor("", X))], "r")
    check(model([condition(), choose(inner)]), constants_to_initializers)


def test_all_passes_and_each_can_be_left_out() -> None:
    two = [node("Constant", [], ["k1"], value_int=1), node("Constant", [], ["k2"], value_int=1)]
    nodes = [
        *two, node("Gather", ["x", "k1"], ["a"]), node("Gather", ["x", "k2"], ["b"]), node("Identity", ["b"], ["c"]),
        node("Add", ["a", "c"], ["y"]), node("Neg", ["a"], ["dead"]),
    ]  # fmt: skip
    proto = model(nodes, outputs=[value("y", ())])
    assert kinds(check(proto, simplify)) == ["Gather", "Add"]
    graph = read(proto).graph
    assert kinds(simplify(graph, skip=PASSES)) == kinds(graph)
    for name in PASSES:
        left_out = check(proto, lambda held, name=name: simplify(held, skip=[name]))  # type: ignore[misc]
        assert len(kinds(left_out)) > 2
    with pytest.raises(KeyError):
        simplify(graph, skip=["nonsense"])


def test_a_loop_keeps_its_meaning() -> None:
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["going"]), node("Identity", ["w"], ["w2"]), node("Add", ["acc", "w2"], ["t"]), node("Identity", ["t"], ["next"]),
            node("Add", ["acc", "w"], ["seen"]),
        ],
        "body", [value("n", (), INT64), value("go", (), 9), value("acc", None)], [value("going", (), 9), value("next", None), value("seen", None)],
    )  # fmt: skip
    proto = model(
        [node("Constant", [], ["times"], value_int=3), condition(), node("Identity", ["weight"], ["w"]), node("Loop", ["times", "flag", "x"], ["y", "all"], body=body)],
        outputs=[value("y", None), value("all", None)], initializers=[tensor("weight", np.float32(2.5))],
    )  # fmt: skip
    assert len(kinds(check(proto, simplify))) < len(kinds(read(proto).graph))
