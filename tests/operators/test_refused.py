"""Values without an answer raise, on the host at once and from a program when it has run; never a number made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import transmuter_async as tm
from tests.compiler.support import graph, node, proto
from tests.conformance.suite import evaluate
from transmuter_async.errors import OperatorError
from transmuter_async.graph import Model, read_model
from transmuter_async.operators import known

X = np.int64([7, -7, 5])


def read(nodes: Sequence[Any], inputs: Sequence[str], outputs: Sequence[str], weights: Any = None) -> Model:
    return read_model(proto(nodes, inputs, outputs, weights), known=known)


def both(model: Model, given: dict[str, Any]) -> dict[str, Any]:
    """The outputs of both forms, which agree; the nodes were inside of one program."""
    host, _, _ = evaluate(model, given, "host")
    outputs, programs, breaks = evaluate(model, given, "compiled")
    assert (programs, breaks) == (1, 0)
    for name, value in host.items():
        np.testing.assert_array_equal(outputs[name], value)
    return outputs


def refused(model: Model, given: dict[str, Any], text: str) -> None:
    for way in ("host", "compiled"):
        with pytest.raises(OperatorError, match=text) as caught:
            evaluate(model, given, way)
        assert caught.value.node == "it"


@pytest.mark.parametrize(
    ("op", "attributes", "expected"),
    [
        ("Div", {}, [3, -3, 5]),
        ("Mod", {}, [1, 1, 0]),
        ("Mod", {"fmod": 1}, [1, -1, 0]),
    ],
)
def test_integer_division_by_zero(op: str, attributes: dict[str, int], expected: list[int]) -> None:
    model = read([node(op, ["x", "y"], ["z"], name="it", **attributes)], ["x:int64[n]", "y:int64[n]"], ["z:int64[n]"])
    assert both(model, {"x": X, "y": np.int64([2, 2, 1])})["z"].tolist() == expected
    assert both(model, {"x": X[:0], "y": X[:0]})["z"].shape == (0,)
    refused(model, {"x": X, "y": np.int64([2, 0, 1])}, "integer division by zero")


def test_division_by_zero_in_the_body_of_a_loop() -> None:
    """The alarm comes out of the compiled loop."""
    body = graph(
        [node("Div", ["a", "y"], ["b"], name="it"), node("Identity", ["c"], ["d"])],
        ["i:int64[]", "c:bool[]", "a:int64[3]"],
        ["d:bool[]", "b:int64[3]"],
    )
    model = read(
        [node("Loop", ["count", "", "x"], ["z"], body=body)],
        ["x:int64[3]", "y:int64[3]"],
        ["z:int64[3]"],
        {"count": np.int64(2)},
    )
    assert both(model, {"x": X, "y": np.int64([2, 2, 1])})["z"].tolist() == [1, -1, 5]
    refused(model, {"x": X, "y": np.int64([2, 2, 0])}, "integer division by zero")


def test_float_division_by_zero_has_an_answer() -> None:
    model = read([node("Div", ["x", "y"], ["z"])], ["x:float[n]", "y:float[n]"], ["z:float[n]"])
    z = both(model, {"x": np.float32([1, -1, 0]), "y": np.float32([0, 0, 0])})["z"]
    np.testing.assert_array_equal(z, [np.inf, -np.inf, np.nan])


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("lengths", [[2, -1], [2, 4]])
def test_lengths_outside_of_the_sequence(op: str, gates: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    weights = {
        "W": rng.normal(size=(1, gates * 2, 3)).astype(np.float32),
        "R": rng.normal(size=(1, gates * 2, 2)).astype(np.float32),
    }
    model = read(
        [node(op, ["x", "W", "R", "", "lengths"], ["y"], name="it", hidden_size=2)],
        ["x:float[3,2,3]", "lengths:int32[2]"],
        ["y:float[3,1,2,2]"],
        weights,
    )
    x = rng.normal(size=(3, 2, 3)).astype(np.float32)
    assert evaluate(model, {"x": x, "lengths": np.int32([3, 0])}, "compiled")[1:] == (1, 0)
    refused(model, {"x": x, "lengths": np.int32(lengths)}, r"are outside of \[0, 3\]")


@pytest.mark.parametrize("ratio", [1.0, -0.5, np.nan])
def test_a_ratio_of_dropout_out_of_range(ratio: float) -> None:
    model = read(
        [node("Dropout", ["x", "ratio", "training"], ["y"], name="it")],
        ["x:float[n]", "ratio:float[]", "training:bool[]"],
        ["y:float[n]"],
    )
    given = {"x": np.ones(4, np.float32), "ratio": np.float32(ratio)}
    assert both(model, {**given, "training": np.bool_(False)})["y"].tolist() == [1, 1, 1, 1]
    refused(model, {**given, "training": np.bool_(True)}, "ratio is ")


def test_a_pure_function_cannot_raise() -> None:
    """What it gives instead is XLA's; the elements beside it are right."""
    model = read([node("Div", ["x", "y"], ["z"])], ["x:int64[n]", "y:int64[n]"], ["z:int64[n]"])
    apply, params = tm.to_jax(model)
    z = apply(params, {"x": X, "y": np.int64([2, 0, 1])})["z"]
    assert isinstance(z, jax.Array)
    assert np.asarray(z)[[0, 2]].tolist() == [3, 5]
