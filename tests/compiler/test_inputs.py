"""What a caller may give, where it is odd: taken as it is meant, or refused with words that help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import transmuter_async as tm
from tests.compiler.support import node, proto, value
from transmuter_async.errors import InputError
from transmuter_async.graph import read_model
from transmuter_async.operators import known


def identity(kind: str) -> Any:
    return proto([node("Identity", ["x"], ["y"])], [f"x:{kind}[n]"], [f"y:{kind}[n]"])


@pytest.mark.compiles_itself
def test_a_masked_array_is_refused_and_one_without_masked_elements_is_an_array() -> None:
    data = np.array([1, 2], np.float32)
    with pytest.raises(InputError, match="'x': a masked array was given"):
        tm.run_sync(identity("float"), {"x": np.ma.masked_array(data, [False, True])})
    np.testing.assert_array_equal(tm.run_sync(identity("float"), {"x": np.ma.masked_array(data)})["y"], data)


@pytest.mark.compiles_itself
@pytest.mark.parametrize("kind", ["string", "int64", "bool", "float"])
def test_an_empty_list_is_of_any_dtype(kind: str) -> None:
    found = tm.run_sync(identity(kind), {"x": []})["y"]
    assert found.shape == (0,)
    assert found.dtype == {"string": object, "float": np.float32}.get(kind, kind)


async def test_a_value_of_the_file_is_replaced_only_where_compile_was_told() -> None:
    weight = numpy_helper.from_array(np.array([1, 2], np.float32), "w")
    graph = helper.make_graph(
        [node("Add", ["x", "w"], ["y"])], "g", [value("x:float[2]"), value("w:float[2]")], [value("y:float[2]")], [weight]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x, w = np.ones(2, np.float32), np.array([5, 6], np.float32)
    async with tm.Runtime() as runtime:
        plain = await runtime.compile(made)
        assert (await plain.run({"x": x}))["y"].tolist() == [2, 3]
        with pytest.raises(InputError, match=r"'w' is not an input of this compiled model .* specs of `compile`"):
            await plain.run({"x": x, "w": w})
        told = await runtime.compile(made, {"x": tm.Spec((2,), "float32"), "w": tm.Spec((2,), "float32")})
        assert (await told.run({"x": x, "w": w}))["y"].tolist() == [6, 7]


async def test_one_text_is_no_list_of_names() -> None:
    made = proto([node("Relu", ["x"], ["y"])], ["x:float[n]"], ["y:float[n]"])
    async with tm.Runtime() as runtime:
        wrong: Any  # on purpose
        for wrong in ({"outputs": "y"}, {"static_inputs": "x"}):
            with pytest.raises(InputError, match="is one text; give a list of names"):
                await runtime.compile(made, **wrong)
        for wrong in ({"donate": None}, {"static_inputs": None}, {"outputs": [1]}, {"donate": 3}):
            with pytest.raises(InputError, match="is no list of names; leave it out, or give one"):
                await runtime.compile(made, **wrong)


@pytest.mark.compiles_itself
def test_run_sync_draws_anew_unless_it_is_given_a_seed() -> None:
    made = proto([node("RandomNormalLike", ["x"], ["y"])], ["x:float[n]"], ["y:float[n]"])
    x = np.zeros(8, np.float32)
    first, second = (tm.run_sync(made, {"x": x})["y"] for _ in range(2))
    assert not np.array_equal(first, second)
    first, second = (tm.run_sync(made, {"x": x}, seed=3)["y"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_the_repr_of_a_model_is_short() -> None:
    weights = {f"w{number}": np.zeros(2, np.float32) for number in range(50)}
    nodes = [node("Add", ["x", name], [f"y{name}"]) for name in weights]
    model = read_model(proto(nodes, ["x:float[2]"], ["yw0:float[2]"], weights), known=known)
    assert repr(model) == "<Model 'bytes': 50 nodes>"
