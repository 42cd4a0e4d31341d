"""What stands on padding may be out of an operator's domain, or refused by it: named in the proof, never met by a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from transmuter_async.compiler import Batching, Mixes
from transmuter_async.errors import BatchingRefused

from .support import Session, assert_same, by_onnxruntime, node, proto

HELD = {
    "f0": np.float32(0), "f1": np.float32(1), "f2": np.float32(2), "half": np.float32(-0.5), "eps": np.float32(1e-5), "zero": np.array(0),
    "one": np.array(1), "five": np.array(5), "a1": np.array([1]), "a2": np.array([2]), "low": np.float32(-1e4), "none": np.float32(-np.inf),
    "w": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4), "shift": np.array([-2, -1, 1, 2], np.float32),
    "table": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4),
}  # fmt: skip


def model(nodes: list[Any], inputs: list[str], outputs: list[str], opset: int = 18) -> onnx.ModelProto:
    used = {name for each in nodes for name in each.input}
    return proto(nodes, inputs, outputs, {name: array for name, array in HELD.items() if name in used}, opset=opset)


def refused(made: onnx.ModelProto, *, pad: dict[str, Any] | None = None, **options: Any) -> tuple[Mixes, ...]:
    with pytest.raises(BatchingRefused) as error:
        Session(made, batching=Batching(buckets={"s": [8]}, pad=pad), **options)
    return error.value.mixes


def safe(
    made: onnx.ModelProto, calls: list[dict[str, Any]], *, pad: dict[str, Any] | None = None, **options: Any
) -> None:
    session = Session(made, batching=Batching(buckets={"s": [8]}, pad=pad), **options)
    for call in calls:
        assert_same(session(call), by_onnxruntime(made, call), rtol=1e-5, atol=1e-5)


# --- what an operator refuses -----------------------------------------------------------------------------------------

WHOLE = ["a:int64[s]", "d:int64[s]"]
NUMBERS = {"a": np.array([7, -7, 9]), "d": np.array([2, 3, -4])}


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_a_divisor_that_padding_makes_zero_is_named_and_another_value_helps(op: str) -> None:
    made = model([node(op, ["a", "d"], ["y"], name="divide")], WHOLE, ["y:int64[s]"])
    [found] = refused(made)
    assert (found.node, found.op_type, found.axis) == ("divide", op, "s")
    assert "may be zero" in found.why and "pad the divisor" in found.why
    safe(made, [NUMBERS], pad={"d": 1})
    safe(made, [NUMBERS], pad={"d": -3, "a": 5})


def test_a_divisor_that_is_computed_from_padding_must_be_known_not_to_be_zero() -> None:
    more = [node("Add", ["d", "one"], ["e"]), node("Div", ["a", "e"], ["y"], name="divide")]
    made = model(more, WHOLE, ["y:int64[s]"])
    safe(made, [{"a": NUMBERS["a"], "d": np.array([2, 3, 4])}])  # 0 + 1
    [found] = refused(made, pad={"d": -1})
    assert found.node == "divide"
    rows = model([node("ReduceSum", ["x", "a1"], ["t"], keepdims=0), node("Cast", ["t"], ["d"], to=7), node("Div", ["a", "d"], ["y"])],
                 ["x:float[s,4]", "a:int64[s]"], ["y:int64[s]"])  # fmt: skip
    assert refused(rows, pad={"x": 3.0})[0].op_type == "Div"
    kept = model([node("Max", ["d", "one"], ["e"]), node("Mod", ["a", "e"], ["y"])], WHOLE, ["y:int64[s]"])
    safe(kept, [NUMBERS])


def test_a_float_divisor_of_zero_is_no_error_and_its_nan_is_followed() -> None:
    divided = [node("Div", ["x", "d"], ["y"])]
    made = model(divided, ["x:float[s,4]", "d:float[s,1]"], ["y:float[s,4]"])
    safe(made, [{"x": np.ones((3, 4), np.float32), "d": np.array([[1], [2], [4]], np.float32)}])
    leaks = [*divided, node("Mul", ["y", "d"], ["m"]), node("ReduceSum", ["m", "first"], ["t"])]  # 0 * NaN
    held = proto(leaks, ["x:float[s,4]", "d:float[s,1]"], ["t:float[1,4]"], {"first": np.array([0])})
    assert refused(held)[0].op_type == "ReduceSum"


@pytest.mark.parametrize(
    ("name", "nodes", "fine"),
    [
        ("as it is", [node("Gather", ["table", "ids"], ["y"])], False),
        ("held in range", [node("Max", ["ids", "zero"], ["i"]), node("Min", ["i", "five"], ["j"]), node("Gather", ["table", "j"], ["y"])], True),
        ("of a place", [node("Gather", ["table", "ids"], ["g"]), node("ArgMax", ["g"], ["i"], axis=1, keepdims=0), node("Gather", ["table", "i"], ["y"])], False),
        ("after arithmetic", [node("Mul", ["ids", "five"], ["i"]), node("Gather", ["table", "i"], ["y"])], False),
        ("a remainder", [node("Mod", ["ids", "five"], ["i"]), node("Gather", ["table", "i"], ["y"])], True),
    ],
)  # fmt: skip
def test_indices_on_padding_stay_in_range_or_are_named(name: str, nodes: list[Any], fine: bool) -> None:
    made = model(nodes, ["ids:int64[s]"], ["y:float[s,4]"])
    if fine:
        safe(made, [{"ids": np.array([1, 0, 1])}], pad={"ids": 9})
    else:
        assert refused(made, pad={"ids": 9})[0].op_type == "Gather", name
    safe(made, [{"ids": np.array([1, 0, 1])}])


def test_the_place_of_an_extreme_is_an_index_in_range() -> None:
    nodes = [node("ArgMax", ["x"], ["i"], axis=1, keepdims=0), node("Gather", ["table", "i"], ["y"])]
    made = model(nodes, ["x:float[s,4]"], ["y:float[s,4]"])
    safe(made, [{"x": np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)}], pad={"x": 2.0})


# --- what an operator is not defined for ------------------------------------------------------------------------------

POSITIVE = {
    "x": np.random.default_rng(1).uniform(2.5, 3, (2, 5, 4)).astype(np.float32),
    "mask": np.ones((2, 5), np.float32),
}
MASKED = [
    node("Unsqueeze", ["mask", "a2"], ["m"]),
    node("Mul", ["v", "m"], ["z"]),
    node("ReduceSum", ["z", "a1"], ["y"], keepdims=0),
]

DOMAINS: dict[str, tuple[list[Any], bool]] = {
    "log of a sum": ([node("Add", ["x", "shift"], ["u"]), node("Log", ["u"], ["v"])], False),
    "root of a sum": ([node("Add", ["x", "shift"], ["u"]), node("Sqrt", ["u"], ["v"])], False),
    "reciprocal of a sum": ([node("Add", ["x", "shift"], ["u"]), node("Reciprocal", ["u"], ["v"])], False),
    "log of zero": ([node("Log", ["x"], ["v"])], False),
    "a power below zero": ([node("Add", ["x", "shift"], ["u"]), node("Pow", ["u", "half"], ["v"])], False),
    "acosh": ([node("Acosh", ["x"], ["v"])], False),
    "a division": ([node("Add", ["x", "shift"], ["u"]), node("Div", ["x", "u"], ["v"])], False),
    "log of what is above zero": ([node("Add", ["x", "shift"], ["u"]), node("Abs", ["u"], ["p"]), node("Add", ["p", "eps"], ["q"]), node("Log", ["q"], ["v"])], True),
    "root of a square": ([node("Add", ["x", "shift"], ["u"]), node("Mul", ["u", "u"], ["q"]), node("Sqrt", ["q"], ["v"])], True),
    "root of a product": ([node("Add", ["x", "shift"], ["u"]), node("Add", ["x", "f1"], ["o"]), node("Mul", ["u", "o"], ["q"]), node("Sqrt", ["q"], ["v"])], False),
    "a square": ([node("Add", ["x", "shift"], ["u"]), node("Pow", ["u", "f2"], ["v"])], True),
    "softplus written out": ([node("Add", ["x", "shift"], ["u"]), node("Exp", ["u"], ["e"]), node("Add", ["e", "f1"], ["q"]), node("Log", ["q"], ["v"])], True),
    "reciprocal of a sigmoid and more": ([node("Sigmoid", ["x"], ["u"]), node("Add", ["u", "eps"], ["q"]), node("Reciprocal", ["q"], ["v"])], True),
    "norm over a row": ([node("LpNormalization", ["x"], ["v"], axis=2, p=2)], False),
    "logs of sums over a row": ([node("ReduceLogSum", ["x", "a2"], ["v"])], False),
    "root mean square": ([node("Add", ["x", "shift"], ["u"]), node("Pow", ["u", "f2"], ["q"]), node("ReduceMean", ["q", "a2"], ["r"]),
                          node("Add", ["r", "eps"], ["e"]), node("Pow", ["e", "half"], ["k"]), node("Mul", ["u", "k"], ["v"])], True),
}  # fmt: skip


@pytest.mark.parametrize("name", DOMAINS)
def test_what_may_be_nan_on_padding_is_not_hidden_by_a_product_with_zero(name: str) -> None:
    nodes, fine = DOMAINS[name]
    made = model([*nodes, *MASKED], ["x:float[b,s,4]", "mask:float[b,s]"], ["y:float[b,k]"])
    if fine:
        safe(made, [POSITIVE])
    else:
        found = refused(made)
        assert (found[0].op_type, found[0].axis) == ("ReduceSum", "s")


def test_a_selection_hides_what_a_product_does_not() -> None:
    nodes = [
        node("Add", ["x", "shift"], ["u"]), node("Log", ["u"], ["v"]), node("Unsqueeze", ["mask", "a2"], ["m"]),
        node("Cast", ["m"], ["live"], to=9), node("Where", ["live", "v", "f0"], ["z"]), node("ReduceSum", ["z", "a1"], ["y"], keepdims=0),
    ]  # fmt: skip
    safe(model(nodes, ["x:float[b,s,4]", "mask:float[b,s]"], ["y:float[b,4]"]), [POSITIVE])


def test_a_row_of_nothing_gives_nan_that_the_next_layer_would_spread() -> None:
    attended = [
        node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("MatMul", ["x", "t"], ["scores"]), node("Cast", ["mask"], ["live"], to=9),
        node("Unsqueeze", ["live", "a1"], ["across"]), node("Unsqueeze", ["live", "a2"], ["down"]), node("And", ["across", "down"], ["both"]),
        node("Where", ["both", "scores", "none"], ["masked"]), node("Softmax", ["masked"], ["p"], axis=-1), node("MatMul", ["p", "x"], ["v"]),
    ]  # fmt: skip
    alone = model(
        [*attended[:-1], node("MatMul", ["p", "x"], ["y"])], ["x:float[b,s,4]", "mask:float[b,s]"], ["y:float[b,s,4]"]
    )
    safe(alone, [POSITIVE])
    assert (
        refused(model([*attended, *MASKED], ["x:float[b,s,4]", "mask:float[b,s]"], ["y:float[b,4]"]))[0].op_type
        == "ReduceSum"
    )


def test_a_number_in_place_of_nan_is_none_in_place_of_infinity() -> None:
    """1 / 0 on the padding is no NaN: it stays, and times zero it becomes one."""
    nodes = [
        node("Add", ["x", "shifted"], ["u"]), node("Reciprocal", ["u"], ["r"]), node("IsNaN", ["r"], ["n"]),
        node("Where", ["n", "f0", "r"], ["v"]), *MASKED,
    ]  # fmt: skip
    held = {"shifted": np.float32([0, 1, 2, 3]), "f0": HELD["f0"], "a1": HELD["a1"], "a2": HELD["a2"]}
    made = proto(nodes, ["x:float[b,s,4]", "mask:float[b,s]"], ["y:float[b,4]"], held)
    assert refused(made)[0].op_type == "ReduceSum"


def test_the_alarm_does_not_see_what_is_put_back_before_a_maximum() -> None:
    pool = model(
        [node("MaxPool", ["x"], ["y"], kernel_shape=[3], pads=[1, 1], name="pool")],
        ["x:float[b,4,s]"],
        ["y:float[b,4,s]"],
    )
    assert refused(pool, nonfinite="error")[0].node == "pool"


def test_equal_extremes_are_taken_from_the_front() -> None:
    hidden = [node("Cast", ["mask"], ["live"], to=9), node("Where", ["live", "x", "none"], ["z"])]
    inputs, call = (
        ["x:float[b,s]", "mask:float[b,s]"],
        {"x": np.float32([[1, 3, 3]]), "mask": np.ones((1, 3), np.float32)},
    )
    safe(
        model([*hidden, node("ArgMax", ["z"], ["y"], axis=1, keepdims=0)], inputs, ["y:int64[b]"]),
        [call, {**call, "mask": 0 * call["mask"]}],
    )
    last = node("ArgMax", ["z"], ["y"], axis=1, keepdims=0, select_last_index=1, name="last")
    [found] = refused(model([*hidden, last], inputs, ["y:int64[b]"]))
    assert (found.node, found.axis) == ("last", "s") and "last of equal" in found.why
    [found] = refused(model([*hidden, node("TopK", ["z", "a1"], ["y", "i"], axis=1)], inputs, ["y:float[b,1]"]))
    assert found.op_type == "TopK"


def test_integers_that_wrap_on_padding_are_not_taken_for_bounded() -> None:
    """The square of a float is at least zero; that of an integer may wrap to below it."""
    for kind, fine in (("int32", False), ("float", True)):
        nodes = [
            node("Add", ["ids", "row"], ["j"]), node("Mul", ["j", "j"], ["q"]), node("Cast", ["q"], ["f"], to=1), node("Sqrt", ["f"], ["r"]),
            node("Mul", ["r", "mask"], ["z"]), node("ReduceSum", ["z", "first"], ["y"]),
        ]  # fmt: skip
        row = np.arange(1, 5, dtype=np.int32 if kind == "int32" else np.float32)[None]
        made = proto(
            nodes, [f"ids:{kind}[s,1]", "mask:float[s,1]"], ["y:float[1,4]"], {"row": row, "first": np.array([0])}
        )
        if fine:
            safe(made, [{"ids": np.float32([[1], [2]]), "mask": np.ones((2, 1), np.float32)}], pad={"ids": 50000})
        else:
            assert refused(made, pad={"ids": 50000})[0].op_type == "ReduceSum"


# --- the alarm for NaN and infinity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("alarm", ["warn", "error"])
def test_the_alarm_never_rings_for_padding(alarm: str) -> None:
    made = model([node("Log", ["x"], ["y"], name="log")], ["x:float[s]"], ["y:float[s]"])
    [found] = refused(made, nonfinite=alarm)
    assert (found.node, found.axis) == ("log", "s") and "nonfinite" in found.why
    call = {"x": np.float32([1, 2, 3])}
    safe(made, [call], pad={"x": 1.0}, nonfinite=alarm)
    safe(made, [call])  # without an alarm nothing is wrong: the output is cut
    masked = model([*MASKED[:1], node("Sub", ["f1", "m"], ["hole"]), node("Mul", ["hole", "low"], ["bias"]), node("Add", ["x", "bias"], ["z"]),
                    node("Softmax", ["z"], ["y"], axis=1)], ["x:float[b,s,4]", "mask:float[b,s]"], ["y:float[b,s,4]"])  # fmt: skip
    assert "mask=" in refused(masked, nonfinite=alarm)[0].why  # a mask of floats has to be named
    session = Session(masked, batching=Batching(buckets={"s": [8]}, mask="mask"), nonfinite=alarm)
    assert_same(session(POSITIVE), by_onnxruntime(masked, POSITIVE), rtol=1e-5, atol=1e-5)


# --- masks that hide data ---------------------------------------------------------------------------------------------

SCORED = [
    node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("MatMul", ["x", "t"], ["scores"]), node("Unsqueeze", ["live", "a1"], ["l"]),
    node("Where", ["l", "scores", "low"], ["masked"]), node("Softmax", ["masked"], ["p"], axis=-1, name="softmax"), node("MatMul", ["p", "x"], ["y"]),
]  # fmt: skip
MASKS: dict[str, tuple[list[Any], bool]] = {
    "as it is": ([node("Cast", ["mask"], ["live"], to=9)], True),
    "above a half": ([node("Cast", ["mask"], ["f"], to=1), node("Greater", ["f", "halved"], ["live"])], True),
    "not padding": ([node("Equal", ["mask", "zero"], ["e"]), node("Not", ["e"], ["live"])], True),
    "against itself": ([node("Cast", ["mask"], ["m"], to=9), node("Xor", ["m", "m"], ["live"])], False),
    "of twos": ([node("Equal", ["mask", "two"], ["live"])], False),
    "above five": ([node("Greater", ["mask", "five"], ["live"])], False),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_a_finite_mask_has_to_let_go_of_data(name: str) -> None:
    """Where it hides all of a row, the row is shared out among what is hidden, padding included."""
    nodes, fine = MASKS[name]
    used = {each for made in (*nodes, *SCORED) for each in made.input}
    held = {key: array for key, array in {**HELD, "two": np.array(2), "halved": np.float32(0.5)}.items() if key in used}
    made = proto([*nodes, *SCORED], ["x:float[b,s,4]", "mask:int64[b,s]"], ["y:float[b,s,4]"], held)
    call = {"x": POSITIVE["x"], "mask": np.array([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0]])}
    if fine:
        safe(made, [call])
        with pytest.raises(ValueError, match="a row of 'mask'"):
            Session(made, batching=Batching(buckets={"s": [8]}))({**call, "mask": 0 * call["mask"]})
    else:
        assert refused(made)[0].node == "softmax"


def test_two_masks_have_to_let_go_at_one_place() -> None:
    nodes = [
        node("Cast", ["mask"], ["m"], to=9),
        node("Cast", ["other"], ["o"], to=9),
        node("And", ["m", "o"], ["live"]),
        *SCORED,
    ]
    held = {key: HELD[key] for key in ("a1", "low")}
    made = proto(nodes, ["x:float[b,s,4]", "mask:int64[b,s]", "other:int64[b,s]"], ["y:float[b,s,4]"], held)
    both = {"x": POSITIVE["x"], "mask": np.array([[1, 1, 0, 0, 0]] * 2), "other": np.array([[1, 0, 0, 0, 1]] * 2)}
    safe(made, [both])
    with pytest.raises(ValueError, match="starts with 0"):  # each lets go of something, and both of nothing
        Session(made, batching=Batching(buckets={"s": [8]}))({**both, "mask": np.array([[0, 1, 0, 0, 0]] * 2)})


def test_a_causal_mask_that_hides_the_own_place_is_refused() -> None:
    """The first query sees nothing then."""
    for diagonal, fine in ((1, True), (0, False)):
        nodes = [
            node("Shape", ["x"], ["n"], start=1, end=2), node("Concat", ["n", "n"], ["nn"], axis=0), node("Expand", ["f1", "nn"], ["full"]),
            node("Trilu", ["full", "k"], ["later"], upper=1), node("Cast", ["later"], ["off"], to=9), node("Not", ["off"], ["seen"]),
            node("Cast", ["mask"], ["m"], to=9), node("Unsqueeze", ["m", "a1"], ["m3"]), node("And", ["m3", "seen"], ["l"]),
            *SCORED[:2], *SCORED[3:],
        ]  # fmt: skip
        held = {key: HELD[key] for key in ("a1", "f1", "low")} | {"k": np.array(diagonal)}
        made = proto(nodes, ["x:float[b,s,4]", "mask:int64[b,s]"], ["y:float[b,s,4]"], held)
        if fine:
            safe(made, [{"x": POSITIVE["x"], "mask": np.array([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])}])
        else:
            assert refused(made)[0].node == "softmax"
