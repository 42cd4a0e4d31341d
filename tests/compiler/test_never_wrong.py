"""What must never happen to the numbers: shapes frozen, integers wrapped, indices clamped, inputs changed meanwhile."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.compiler.support import Session, assert_right, assert_same, by_onnxruntime, graph, node, proto
from transmuter_async.compiler import to_jax
from transmuter_async.errors import IndexOutOfRange, InputError, NonFiniteError, NonFiniteWarning
from transmuter_async.graph import read_model
from transmuter_async.operators import known

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_slice_with_starts_that_are_inputs_follows_them():
    made = proto(
        [node("Slice", ["x", "starts", "ends"], ["y"])],
        ["x:float[n,4]", "starts:int64[1]", "ends:int64[1]"],
        ["y:float[m,4]"],
    )
    x = floats(6, 4)
    calls = [
        {"x": x, "starts": np.array([s]), "ends": np.array([e])} for s, e in [(0, 3), (2, 5), (1, 2**63 - 1), (-2, 9)]
    ]
    session = assert_right(made, calls)
    assert len(session.cache.segments()) == 4, "each value has a program of its own"


def test_reshape_from_shape_arithmetic_at_a_batch_size_not_seen_before():
    made = proto(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["b"]),
            node("Concat", ["b", "rest"], ["shape"], axis=0),
            node("Reshape", ["x", "shape"], ["r"]),
            node("MatMul", ["r", "w"], ["y"]),
        ],
        ["x:float[b,2,6]"],
        ["y:float[b,5]"],
        {"zero": np.array([0]), "rest": np.array([12]), "w": floats(12, 5)},
    )
    session = assert_right(made, [{"x": floats(b, 2, 6)} for b in (1, 3, 7, 3)])
    assert session.prepared.graph_break is False


def test_int64_above_two_to_the_31_stays_exact():
    made = proto(
        [node("Mul", ["ids", "k"], ["p"]), node("Add", ["p", "ids"], ["y"])],
        ["ids:int64[n]"],
        ["y:int64[n]"],
        {"k": np.array(3)},
    )
    session = assert_right(made, [{"ids": np.array([2**31, 2**40 + 1, -(2**52) - 7])}])
    # A second call of the same shape takes another path through jax.
    session({"ids": np.array([1, 2, 3])})
    assert_same(session({"ids": np.array([2**45, 5, 6])}), {"y": np.array([2**47, 20, 24])})


@pytest.mark.parametrize("operator", ["MatMul", "Conv"])
@pytest.mark.parametrize("pure", [False, True], ids=["segments", "to_jax"])
def test_a_reduction_of_a_product_by_one_number_broadcast(operator: str, pure: bool) -> None:
    """XLA's own fusion of these reads past the number: jaxlib 0.10.2 and 0.12 give inf, or anything."""
    shapes = {"MatMul": ([2, 64, 256], [256, 128]), "Conv": ([1, 512, 7, 7], [512, 512, 1, 1])}[operator]
    made = proto(
        [
            node("Expand", ["c", "shape"], ["w"]),
            node(operator, ["x", "w"], ["p"]),
            node("Relu", ["p"], ["r"]),
            node("ReduceMax", ["r", "axes"], ["y"], keepdims=0),
        ],
        [f"x:float[{','.join(map(str, shapes[0]))}]", "c:float[]"],
        ["y:float[a,b]"],
        {"shape": np.array(shapes[1]), "axes": np.array([-1] if operator == "MatMul" else [2, 3])},
    )
    call = {"x": np.abs(floats(*shapes[0])), "c": np.float32(0.02)}
    if not pure:
        assert_right(made, [call])
        return
    apply, params = to_jax(read_model(made, known=known))
    np.testing.assert_allclose(apply(params, call)["y"], by_onnxruntime(made, call)["y"], rtol=1e-5)


def test_float64_stays_float64():
    made = proto([node("Sqrt", ["x"], ["y"])], ["x:double[n]"], ["y:double[n]"])
    assert_right(made, [{"x": np.array([2.0, 3.0 + 1e-12])}])


def test_int64_max_as_the_end_of_a_slice():
    made = proto(
        [node("Slice", ["x", "starts", "ends", "axes", "steps"], ["y"])],
        ["x:float[n,5]"],
        ["y:float[n,m]"],
        {"starts": np.array([-1]), "ends": np.array([-(2**63) + 1]), "axes": np.array([1]), "steps": np.array([-2])},
    )
    assert_right(made, [{"x": floats(3, 5)}])


@pytest.mark.parametrize("index", [4, 100, -5, 2**40])
@pytest.mark.parametrize("compiler", ["xla", "eager"])
def test_gather_out_of_range_raises_and_the_next_call_is_right(index: int, compiler: str):
    made = proto([node("Gather", ["x", "i"], ["y"], axis=1, name="pick")], ["x:float[n,4]", "i:int64[m]"], ["y:float[n,m]"])
    session = Session(made, compiler=compiler)
    x = floats(2, 4)
    with pytest.raises(IndexOutOfRange, match=r"'pick'.*axis 1 of size 4") as caught:
        session({"x": x, "i": np.array([0, index])})
    assert (caught.value.node, caught.value.input, caught.value.axis, caught.value.size) == ("pick", "indices", 1, 4)
    inputs = {"x": x, "i": np.array([-4, 3])}
    assert_same(session(inputs), by_onnxruntime(made, inputs))


@pytest.mark.parametrize("op", ["GatherElements", "GatherND", "ScatterElements", "ScatterND"])
def test_the_kin_of_gather_raise_too(op: str):
    shape = {"GatherElements": "i:int64[n,2]", "ScatterElements": "i:int64[n,2]"}.get(op, "i:int64[n,1]")
    scatter = op.startswith("Scatter")
    updates = "u:float[n,2]" if op == "ScatterElements" else "u:float[n,4]"
    made = proto(
        [node(op, ["x", "i", "u"] if scatter else ["x", "i"], ["y"], name="it")],
        ["x:float[3,4]", shape, *([updates] if scatter else [])],
        ["y:float[a,b]"],
    )
    width = 2 if "Elements" in op else 1
    inputs = {"x": floats(3, 4), "i": np.full((3, width), 3)}
    if scatter:
        inputs["u"] = floats(3, 2 if op == "ScatterElements" else 4)
    for compiler in ("xla", "eager"):
        with pytest.raises(IndexOutOfRange, match="'it'"):
            Session(made, compiler=compiler)(inputs)


def test_clamp_on_request():
    made = proto([node("Gather", ["x", "i"], ["y"])], ["x:float[n]", "i:int64[m]"], ["y:float[m]"])
    x = floats(4)
    for compiler in ("xla", "eager"):
        got = Session(made, bounds="clamp", compiler=compiler)({"x": x, "i": np.array([9, -9])})
        assert_same(got, {"y": x[[3, 0]]})


def test_an_index_out_of_range_inside_a_loop_body_raises():
    body = graph(
        [node("Gather", ["x", "i"], ["row"], name="inner"), node("Add", ["acc", "row"], ["out"]), node("Identity", ["c"], ["c2"])],
        ["i:int64[]", "c:bool[]", "acc:float[4]"],
        ["c2:bool[]", "out:float[4]"],
    )
    made = proto(
        [node("Loop", ["n", "", "start"], ["y"], body=body)],
        ["x:float[3,4]", "n:int64[]", "start:float[4]"],
        ["y:float[4]"],
    )
    session = Session(made)
    start, x = floats(4), floats(3, 4)
    assert_same(session({"x": x, "n": np.array(3), "start": start}), {"y": start + x[0] + x[1] + x[2]})
    with pytest.raises(IndexOutOfRange, match="'inner'"):
        session({"x": x, "n": np.array(9), "start": start})


def test_inputs_changed_after_the_call_do_not_change_its_outputs():
    made = proto([node("Identity", ["x"], ["y"]), node("Add", ["x", "x"], ["z"])], ["x:float[n]"], ["y:float[n]", "z:float[n]"])
    for compiler in ("xla", "eager"):
        session = Session(made, compiler=compiler)
        for size in (10, 100_000):
            x = floats(size)
            before = x.copy()
            outputs = session({"x": x})
            x[:] = 0
            assert_same(outputs, {"y": before, "z": before + before})


@pytest.mark.parametrize("compiler", ["xla", "eager"])
def test_outputs_are_read_only_and_nobody_elses_memory(compiler: str):
    w = floats(50, 50)
    made = proto(
        [
            node("Identity", ["x"], ["same"]),
            node("Identity", ["w"], ["weight"]),
            node("Transpose", ["x"], ["turned"]),
            node("Reshape", ["x", "flat"], ["reshaped"]),
        ],
        ["x:float[50,50]"],
        ["same:float[50,50]", "weight:float[50,50]", "turned:float[50,50]", "reshaped:float[2500]"],
        {"w": w, "flat": np.array([-1])},
    )
    session = Session(made, compiler=compiler)
    x = floats(50, 50)
    for name, array in session({"x": x}).items():
        assert not array.flags.writeable, name
        assert not np.shares_memory(array, x), name
        assert not any(np.shares_memory(array, weight) for weight in session.model.graph.initializers.values()), name


def test_the_non_finite_alarm_names_the_first_node():
    made = proto(
        [node("Exp", ["x"], ["e"], name="big"), node("Sub", ["e", "e"], ["y"], name="later")], ["x:float[n]"], ["y:float[n]"]
    )
    for compiler in ("xla", "eager"):
        session = Session(made, nonfinite="error", compiler=compiler)
        assert_same(session({"x": np.zeros(2, np.float32)}), {"y": np.zeros(2, np.float32)})
        with pytest.raises(NonFiniteError, match="'big'") as caught:
            session({"x": np.array([1000, 0], np.float32)})
        assert caught.value.node == "big"


def test_one_error_lists_everything_that_does_not_fit():
    made = proto(
        [node("Add", ["a", "b"], ["s"]), node("Mul", ["s", "c"], ["y"])],
        ["a:float[n,4]", "b:float[n,4]", "c:float[n,4]"],
        ["y:float[n,4]"],
    )
    session = Session(made)
    with pytest.raises(InputError) as caught:
        session({"a": np.zeros((2, 4)), "b": np.zeros((2, 5), np.float32), "d": 1, "y": 2})
    text = str(caught.value)
    for part in (
        "'c' is missing",
        "'a': dtype double was given, expected float",
        ".astype('float32')",
        "'b': shape (2, 5) was given, expected float[n, 4]",
        "'d' is not an input",
        "'y' is not an input (it is an output)",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("declared", "given", "wanted"),
    [
        ("int64", np.array([1, 2], np.int32), np.array([1, 2])),
        ("int64", [1, 2], np.array([1, 2])),
        ("float", [1, 2.5], np.array([1, 2.5], np.float32)),
        ("float", np.float16([1.5]), np.array([1.5], np.float32)),
        ("double", np.float32([1.5]), np.array([1.5])),
        ("int32", [5], np.array([5], np.int32)),
        ("string", ["a", "ü"], np.array(["a", "ü"], object)),
        ("string", np.array(["b"]), np.array(["b"], object)),
        ("bool", [True, False], np.array([True, False])),
    ],
)
def test_dtypes_that_widen_safely_are_taken(declared: str, given: object, wanted: np.ndarray):
    session = Session(proto([node("Identity", ["x"], ["y"])], [f"x:{declared}[n]"], [f"y:{declared}[n]"]))
    assert_same(session({"x": given}), {"y": wanted})


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        ("int32", np.array([1])),
        ("int32", [2**40]),
        ("float", np.array([1, 2])),
        ("float", np.array([1.0])),
        ("int64", [1.5]),
        ("int64", np.array([1], np.uint64)),
        ("bool", [1]),
        ("float", [[1, 2], [3]]),
        ("string", np.array([1, "a"], object)),
        ("float", None),
    ],
)
def test_what_could_lose_something_is_refused(declared: str, given: object):
    session = Session(proto([node("Identity", ["x"], ["y"])], [f"x:{declared}[n]"], [f"y:{declared}[n]"]))
    with pytest.raises(InputError, match="'x'"):
        session({"x": given})


@pytest.mark.parametrize("compiler", ["xla", "eager"])
def test_a_non_finite_warning_never_hides_an_index_error(compiler: str):
    made = proto(
        [node("Exp", ["x"], ["e"], name="big"), node("Gather", ["e", "i"], ["y"], name="pick")],
        ["x:float[n]", "i:int64[m]"],
        ["y:float[m]"],
    )
    session = Session(made, nonfinite="warn", compiler=compiler)
    with pytest.warns(NonFiniteWarning, match="'big'"):
        got = session({"x": np.array([1000, 0], np.float32), "i": np.array([1])})
    assert_same(got, {"y": np.ones(1, np.float32)})
    with pytest.raises(IndexOutOfRange, match="'pick'"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session({"x": np.array([1000, 0], np.float32), "i": np.array([2])})
