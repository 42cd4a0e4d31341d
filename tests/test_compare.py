"""Finding the node that makes a difference: a wrong definition is found, whatever comes before and after it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import transmuter_async as tm
from tests.compiler.support import graph, node, proto
from transmuter_async.cli import main
from transmuter_async.compare import difference
from transmuter_async.operators import registry

pytestmark = pytest.mark.compiles_itself

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable[[Any], Any]], None]]:
    """Make a definition give something else: `wrong("Tanh", lambda right: right + 1)`."""

    def patch(name: str, change: Callable[[Any], Any]) -> None:
        versions = registry._TABLE["", name]

        def broken(definition: registry.Operator) -> registry.Operator:
            def function(*inputs: Any, **attributes: Any) -> Any:
                return change(definition.function(*inputs, **attributes))

            return dataclasses.replace(definition, function=function)

        monkeypatch.setitem(registry._TABLE, ("", name), [broken(each) for each in versions])
        registry.resolve.cache_clear()

    yield patch
    registry.resolve.cache_clear()


def branched() -> onnx.ModelProto:
    """Two branches of several nodes, joined; what follows hides small differences."""
    nodes = [
        node("Relu", ["x"], ["a1"], name="a one"),
        node("Exp", ["a1"], ["a2"], name="a two"),
        node("Sigmoid", ["a2"], ["a3"], name="a three"),
        node("Neg", ["x"], ["b1"], name="b one"),
        node("Tanh", ["b1"], ["b2"], name="b two"),
        node("Softmax", ["b2"], ["b3"], name="b three", axis=1),
        node("Mul", ["b3", "scale"], ["b4"], name="b four"),
        node("Add", ["a3", "b4"], ["y"], name="joined"),
        node("ArgMax", ["y"], ["top"], name="top", axis=1, keepdims=0),
    ]
    return proto(nodes, ["x:float[n,4]"], ["y:float[n,4]", "top:int64[n]"], {"scale": np.float32(3)})


@pytest.mark.parametrize("oracle", ["onnxruntime", "reference", "host"])
def test_the_same(oracle: str) -> None:
    found = tm.compare(branched().SerializeToString(), {"x": X}, oracle=oracle)
    assert found.same
    assert found.first is None
    assert [each.name for each in found.outputs] == ["y", "top"]
    assert all(each.same for each in found.outputs)
    assert str(found).startswith(f"the same as {oracle}")
    assert found.runs == 1


@pytest.mark.parametrize("oracle", ["onnxruntime", "reference"])
@pytest.mark.parametrize(
    ("op", "name"),
    [("Relu", "a one"), ("Exp", "a two"), ("Sigmoid", "a three"), ("Neg", "b one"), ("Softmax", "b three"), ("Add", "joined")],
)
def test_the_wrong_node_is_found(wrong: Any, oracle: str, op: str, name: str) -> None:
    wrong(op, lambda right: right + np.float32(0.25))
    found = tm.compare(branched().SerializeToString(), {"x": X}, oracle=oracle)
    assert not found.same
    assert (found.node, found.operator, found.opset) == (name, f"ai.onnx:{op}", 18)
    assert found.first is not None
    assert found.first.largest == pytest.approx(0.25, rel=1e-4)
    assert found.first.count == 12
    assert found.first.ours == pytest.approx(found.first.theirs + 0.25)
    assert found.runs <= 6
    assert repr(name) in str(found)
    json.dumps(found.to_dict())


def test_an_output_that_hides_the_difference_is_not_needed(wrong: Any) -> None:
    """Only one element is wrong, and only one output shows it."""
    wrong("Neg", lambda right: right.at[1, 2].add(0.5) if isinstance(right, jax.Array) else right)
    model = proto(
        [
            node("Neg", ["x"], ["n"], name="it"),
            node("Slice", ["n", "zero", "one", "zero"], ["first"], name="cut"),
            node("Abs", ["n"], ["second"], name="last"),
        ],
        ["x:float[3,4]"],
        ["first:float[1,4]", "second:float[3,4]"],
        {"zero": np.int64([0]), "one": np.int64([1])},
    )
    found = tm.compare(model, {"x": X}, oracle="host")
    assert [each.same for each in found.outputs] == [True, False]
    assert (found.node, found.first.name, found.first.index) == ("it", "n", (1, 2))
    assert found.inputs == (f"x: float32(3, 4) from {X.min():.6g} to {X.max():.6g}",)


def test_a_difference_inside_of_a_branch_is_told_at_its_node(wrong: Any) -> None:
    wrong("Cos", lambda right: right * np.float32(2))
    model = proto(
        [
            node("ReduceSum", ["x"], ["s"], name="sum", keepdims=0),
            node("Greater", ["s", "limit"], ["c"], name="test"),
            node(
                "If",
                ["c"],
                ["t"],
                name="choice",
                then_branch=graph([node("Cos", ["x"], ["u"])], [], ["u:float[3,4]"]),
                else_branch=graph([node("Cos", ["x"], ["v"])], [], ["v:float[3,4]"]),
            ),
            node("Abs", ["t"], ["y"], name="after"),
        ],
        ["x:float[3,4]"],
        ["y:float[3,4]"],
        {"limit": np.float32(0)},
    )
    assert tm.compare(model, {"x": X}).node == "choice"


def test_a_wrong_shape_and_a_wrong_dtype(wrong: Any) -> None:
    model = proto([node("Neg", ["x"], ["y"], name="it")], ["x:float[3,4]"], ["y:float[3,4]"])
    wrong("Neg", lambda right: right.T)
    found = tm.compare(model, {"x": X})
    assert found.first.why == "float32(4, 3) against float32(3, 4)"


def test_functions_of_the_model_and_versions_between() -> None:
    """A body of an older opset than the model's keeps it, which onnxruntime cannot run."""
    body = helper.make_function(
        "own",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("ReduceSum", ["a"], ["s"], axes=[1], keepdims=1), helper.make_node("Add", ["s", "a"], ["b"])],
        [helper.make_opsetid("", 11)],
    )
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 4]) for name in "xy"]
    inside = helper.make_graph([helper.make_node("Twice", ["x"], ["t"], domain="own"), helper.make_node("Relu", ["t"], ["y"])], "g", info[:1], info[1:])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    model = helper.make_model(inside, opset_imports=imports, functions=[body], ir_version=9)
    assert tm.compare(model, {"x": X}, oracle="reference").same
    with pytest.raises(tm.InputError, match="onnxruntime refuses"):
        tm.compare(model, {"x": X})


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_dtypes_that_numpy_has_not(dtype: Any) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    info = [helper.make_tensor_value_info(name, kind, [3, 4]) for name in "xy"]
    inside = helper.make_graph([helper.make_node("Identity", ["x"], ["t"]), helper.make_node("Identity", ["t"], ["y"], "it")], "g", info[:1], info[1:])
    model = helper.make_model(inside, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    given = {"x": X.astype(dtype)}
    assert tm.compare(model, given).same


def test_sequences_and_texts() -> None:
    texts = helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])
    parts = helper.make_tensor_sequence_value_info("y", TensorProto.STRING, None)
    inside = helper.make_graph([helper.make_node("SplitToSequence", ["x"], ["y"])], "g", [texts], [parts])
    model = helper.make_model(inside, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert tm.compare(model, {"x": np.array(["a", "b"], object)}, oracle="reference").same


def test_weights_too_large_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = importlib.import_module("transmuter_async.graph.reader")
    monkeypatch.setattr(reader, "_INLINE_BYTES", 100)
    weight = np.random.default_rng(1).normal(size=(4, 500)).astype(np.float32)
    model = proto([node("MatMul", ["x", "w"], ["y"])], ["x:float[n,4]"], ["y:float[n,500]"], {"w": weight})
    assert tm.compare(model, {"x": X}).same


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = branched()
    with pytest.raises(tm.MisuseError, match="oracle='torch' is none of"):
        tm.compare(model, {"x": X}, oracle="torch")
    with pytest.raises(tm.MisuseError, match="reads local files only"):
        tm.compare("hf://a/b", {"x": X})
    info = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [3, 4]) for name in "xy"]
    inside = helper.make_graph([helper.make_node("Sin", ["x"], ["y"])], "g", info[:1], info[1:])
    without_kernel = helper.make_model(inside, opset_imports=[helper.make_opsetid("", 22)], ir_version=9)
    with pytest.raises(tm.InputError, match="onnxruntime refuses"):
        tm.compare(without_kernel, {"x": X.astype(ml_dtypes.bfloat16)})

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(tm.MisuseError, match="pip install onnxruntime"):
        tm.compare(model, {"x": X})


async def test_it_does_not_block_a_loop() -> None:
    with pytest.raises(tm.MisuseError, match="block"):
        tm.compare(branched(), {"x": X})


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ([1, 2], [1, 3], "1 of 2 elements differ, by up to 1"),
        ([1.0], [[1.0]], "float64(1,) against float64(1, 1)"),
        ([np.nan, 1.0], [np.nan, 1.0], ""),
        ([np.nan, 1.0], [1.0, 1.0], "1 of 2 elements differ, by up to 0"),
        ([np.inf], [np.inf], ""),
        (["a"], ["b"], "1 of 1 texts differ"),
        ([], [], ""),
    ],
)
def test_every_kind_of_difference(ours: Any, theirs: Any, why: str) -> None:
    found = difference("t", np.asarray(ours), np.asarray(theirs), 0, 0)
    assert (found.why, found.same) == (why, not why)


def test_lists_and_missing_values() -> None:
    assert difference("t", [X, X], [X, X]).same
    assert difference("t", [X, X], [X, X + 1]).name == "t[1]"
    assert difference("t", [X], []).why == "1 tensors against 0"
    assert difference("t", None, None).same
    assert not difference("t", None, X).same


@pytest.fixture
def file(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "branched.onnx"
    path.write_bytes(branched().SerializeToString())
    yield str(path)


def test_the_command_tells_the_node(wrong: Any, file: str, capsys: Any) -> None:
    arguments = ["compare", file, "--fill", "random", "--dim", "n=3"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    wrong("Softmax", lambda right: right + np.float32(0.25))
    assert main([*arguments, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["node"], told["operator"], told["oracle"]) == ("b three", "ai.onnx:Softmax", "onnxruntime")
    assert main(arguments) == 1
    assert "first at node 'b three', ai.onnx:Softmax" in capsys.readouterr().out
