"""Following axes: what mixes is named, and whatever is called safe gives the same with padding as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transmuter_async.compiler import Batching, Mixes
from transmuter_async.errors import BatchingRefused

from .support import Session, assert_same, by_onnxruntime, node, proto

ROWS = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
BUCKETS = {"s": [8, 16], "b": [4]}


def model(
    nodes: list[Any], outputs: list[str], weights: dict[str, Any] | None = None, *, opset: int = 18
) -> onnx.ModelProto:
    """Over x (b, s, 4) and its mask (b, s)."""
    held = {"w": ROWS, "one": np.array([1]), "two": np.array([2]), "zero": np.array([0]), **(weights or {})}
    used = {name for each in nodes for name in each.input}
    return proto(
        nodes, ["x:float[b,s,4]", "mask:int64[b,s]"], outputs, {k: v for k, v in held.items() if k in used}, opset=opset
    )


def inputs(batch: int, length: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    mask = np.ones((batch, length), np.int64)
    mask[-1, 1 + length // 2 :] = 0
    return {"x": random.standard_normal((batch, length, 4)).astype(np.float32), "mask": mask}


def batching(**more: Any) -> Batching:
    return Batching(batch="b", buckets=BUCKETS, mask="mask", pad={"x": 3.0}, **more)


def mixes(made: onnx.ModelProto) -> tuple[Mixes, ...]:
    with pytest.raises(BatchingRefused) as refused:
        Session(made, batching=batching())
    return refused.value.mixes


def assert_safe(made: onnx.ModelProto, calls: list[dict[str, Any]] | None = None) -> None:
    session = Session(made, batching=batching())
    for call in calls or [inputs(1, 1), inputs(2, 5), inputs(3, 8), inputs(4, 9), inputs(3, 16)]:
        assert_same(session(call), by_onnxruntime(made, call), rtol=1e-5, atol=1e-5)
    assert len(session.cache.segments()) <= 2


SOFTMAX = [node("Cast", ["mask"], ["m"], to=1), node("Unsqueeze", ["m", "one"], ["m3"])]
SCORES = [node("Transpose", ["x"], ["xt"], perm=[0, 2, 1]), node("MatMul", ["x", "xt"], ["scores"])]
POOLED = [node("Softmax", ["masked"], ["p"], axis=-1), node("MatMul", ["p", "x"], ["y"])]
NEGATIVE = [
    node("Sub", ["f1", "m3"], ["hole"]),
    node("Mul", ["hole", "low"], ["bias"]),
    node("Add", ["scores", "bias"], ["masked"]),
]
F1 = {"f1": np.array(1, np.float32)}

MIXING: dict[str, tuple[list[Any], list[str], dict[str, Any], str, str]] = {
    "mean over rows": ([node("ReduceMean", ["x", "zero"], ["y"])], ["y:float[1,s,4]"], {}, "ReduceMean", "b"),
    "sum over rows": ([node("ReduceSum", ["x", "zero"], ["y"])], ["y:float[1,s,4]"], {}, "ReduceSum", "b"),
    "softmax over rows": ([node("Softmax", ["x"], ["y"], axis=0)], ["y:float[b,s,4]"], {}, "Softmax", "b"),
    "running sum over rows": (
        [node("CumSum", ["x", "at"], ["y"])], ["y:float[b,s,4]"], {"at": np.array(0)}, "CumSum", "b"
    ),
    "product over rows": (
        [node("Transpose", ["x"], ["t"], perm=[1, 2, 0]), node("Transpose", ["x"], ["u"], perm=[1, 0, 2]),
         node("MatMul", ["t", "u"], ["y"])],
        ["y:float[s,4,4]"], {}, "MatMul", "b",
    ),
    "batch statistics": (
        [node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
         node("BatchNormalization", ["t", "v", "v", "v", "v"], ["y", "m1", "m2"], training_mode=1)],
        ["y:float[b,4,s]"], {"v": np.ones(4, np.float32)}, "BatchNormalization", "b",
    ),
    "one scale for all": (
        [node("DynamicQuantizeLinear", ["x"], ["q", "a", "z"]), node("DequantizeLinear", ["q", "a", "z"], ["y"])],
        ["y:float[b,s,4]"], {}, "DynamicQuantizeLinear", "b",
    ),
    "last row": (
        [node("Gather", ["x", "last"], ["y"], axis=0)], ["y:float[1,s,4]"], {"last": np.array([-1])}, "Gather", "b"
    ),
    "place in the batch": (
        [node("Shape", ["x"], ["n"], start=0, end=1), node("Squeeze", ["n"], ["k"]),
         node("Range", ["z0", "k", "o1"], ["i"]), node("Cast", ["i"], ["f"], to=1), node("Unsqueeze", ["f", "ends"], ["g"]),
         node("Add", ["x", "g"], ["y"])],
        ["y:float[b,s,4]"], {"z0": np.array(0), "o1": np.array(1), "ends": np.array([1, 2])}, "Add", "b",
    ),
    "mean over the length": ([node("ReduceMean", ["x", "one"], ["y"])], ["y:float[b,1,4]"], {}, "ReduceMean", "s"),
    "maximum over the length": ([node("ReduceMax", ["x", "one"], ["y"])], ["y:float[b,1,4]"], {}, "ReduceMax", "s"),
    "no mask": (
        [*SCORES, node("Softmax", ["scores"], ["p"], axis=-1), node("MatMul", ["p", "x"], ["y"])],
        ["y:float[b,s,4]"], {}, "Softmax", "s",
    ),
    "a weak mask": (
        [*SOFTMAX, *SCORES, *NEGATIVE, *POOLED], ["y:float[b,s,4]"], F1 | {"low": np.array(-1000, np.float32)}, "Softmax", "s"
    ),
    "last position": (
        [node("Slice", ["x", "last", "far", "one"], ["y"])], ["y:float[b,k,4]"],
        {"last": np.array([-1]), "far": np.array([2**63 - 1])}, "Slice", "s",
    ),
    "reversed": (
        [node("Slice", ["x", "last", "far", "one", "last"], ["y"])], ["y:float[b,k,4]"],
        {"last": np.array([-1]), "far": np.array([-(2**63) + 1])}, "Slice", "s",
    ),
    "joined along it": ([node("Concat", ["x", "x"], ["y"], axis=1)], ["y:float[b,k,4]"], {}, "Concat", "s"),
    "sorted": (
        [node("TopK", ["x", "one"], ["y", "i"], axis=1)], ["y:float[b,1,4]"], {}, "TopK", "s"
    ),
    "windows": (
        [node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("Conv", ["t", "k"], ["y"], pads=[1, 0])],
        ["y:float[b,2,k]"], {"k": np.ones((2, 4, 3), np.float32)}, "Conv", "s",
    ),
    "its size as a number": (
        [node("Shape", ["x"], ["n"], start=1, end=2), node("Cast", ["n"], ["f"], to=1), node("Div", ["x", "f"], ["y"])],
        ["y:float[b,s,4]"], {}, "Cast", "s",
    ),
    "indices from padding": (
        [node("ReduceSum", ["x", "two"], ["t"], keepdims=0), node("Cast", ["t"], ["i"], to=7),
         node("Gather", ["w", "i"], ["y"])],
        ["y:float[b,s,4]"], {}, "Gather", "s",
    ),
    "flattened with it": (
        [node("Reshape", ["x", "to"], ["y"])], ["y:float[k,2]"], {"to": np.array([2, -1])}, "Reshape", "b"
    ),
    "no rule": ([node("Unique", ["mask"], ["y"], axis=0)], ["y:int64[k,s]"], {}, "Unique", "b"),
    "random": ([node("RandomNormalLike", ["x"], ["n"]), node("Add", ["x", "n"], ["y"])], ["y:float[b,s,4]"], {},
               "RandomNormalLike", "b"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_an_operator_that_mixes_is_named(name: str) -> None:
    nodes, outputs, weights, op_type, axis = MIXING[name]
    found = mixes(model(nodes, outputs, weights))
    assert (found[0].op_type, found[0].axis) == (op_type, axis), found
    assert found[0].why and found[0].node


def test_all_that_mix_are_named_at_once() -> None:
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "a", "z"], name="first"),
        node("DequantizeLinear", ["q", "a", "z"], ["v"]),
        node("MatMul", ["v", "w"], ["u"]),
        node("DynamicQuantizeLinear", ["u"], ["r", "c", "d"], name="second"),
        node("DequantizeLinear", ["r", "c", "d"], ["y"]),
    ]
    assert [each.node for each in mixes(model(nodes, ["y:float[b,s,4]"]))] == ["first", "second"]


LOW = {"low": np.array(-10000, np.float32)}
SAFE: dict[str, tuple[list[Any], list[str], dict[str, Any]]] = {
    "row by row": (
        [node("MatMul", ["x", "w"], ["u"]), node("Softmax", ["u"], ["v"], axis=-1), node("Tanh", ["v"], ["y"])],
        ["y:float[b,s,4]"], {},
    ),
    "additive mask": ([*SOFTMAX, *SCORES, *NEGATIVE, *POOLED], ["y:float[b,s,4]"], F1 | LOW),
    "additive mask of the lowest float": (
        [*SOFTMAX, *SCORES, *NEGATIVE, *POOLED], ["y:float[b,s,4]"], F1 | {"low": np.array(np.finfo(np.float32).min)}
    ),
    "subtracted mask": (
        [*SOFTMAX, *SCORES, node("Sub", ["f1", "m3"], ["hole"]), node("Mul", ["hole", "high"], ["bias"]),
         node("Sub", ["scores", "bias"], ["masked"]), *POOLED],
        ["y:float[b,s,4]"], F1 | {"high": np.array(1e9, np.float32)},
    ),
    "selected with -inf": (
        [*SCORES, node("Cast", ["mask"], ["m"], to=9), node("Unsqueeze", ["m", "one"], ["m3"]),
         node("Where", ["m3", "scores", "none"], ["masked"]), *POOLED],
        ["y:float[b,s,4]"], {"none": np.array(-np.inf, np.float32)},
    ),
    "softmax written out": (
        [*SOFTMAX, *SCORES, *NEGATIVE, node("ReduceMax", ["masked", "two"], ["top"]), node("Sub", ["masked", "top"], ["d"]),
         node("Exp", ["d"], ["e"]), node("ReduceSum", ["e", "two"], ["t"]), node("Div", ["e", "t"], ["p"]),
         node("MatMul", ["p", "x"], ["y"])],
        ["y:float[b,s,4]"], F1 | LOW,
    ),
    "mean pooling": (
        [node("Cast", ["mask"], ["m"], to=1), node("Unsqueeze", ["m", "two"], ["m3"]), node("Mul", ["x", "m3"], ["v"]),
         node("ReduceSum", ["v", "one"], ["t"], keepdims=0), node("ReduceSum", ["m3", "one"], ["n"], keepdims=0),
         node("Clip", ["n", "eps"], ["c"]), node("Div", ["t", "c"], ["y"])],
        ["y:float[b,4]"], {"eps": np.array(1e-9, np.float32)},
    ),
    "first position": (
        [node("Gather", ["x", "first"], ["u"], axis=1), node("Slice", ["x", "zero", "one", "one"], ["v"]),
         node("Squeeze", ["v", "one"], ["w2"]), node("Add", ["u", "w2"], ["y"])],
        ["y:float[b,4]"], {"first": np.array(0)},
    ),
    "positions from a table": (
        [node("Shape", ["x"], ["n"], start=1, end=2), node("Slice", ["ids", "zero", "n", "one"], ["i"]),
         node("Gather", ["table", "i"], ["e"]), node("Add", ["x", "e"], ["y"])],
        ["y:float[b,s,4]"],
        {"ids": np.arange(16)[None], "table": np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32)},
    ),
    "positions counted from the mask": (
        [node("CumSum", ["mask", "at"], ["c"]), node("Mul", ["c", "mask"], ["i"]), node("Gather", ["table", "i"], ["e"]),
         node("Add", ["x", "e"], ["y"])],
        ["y:float[b,s,4]"],
        {"at": np.array(1), "table": np.random.default_rng(1).standard_normal((17, 4)).astype(np.float32)},
    ),
    "heads and merged axes": (
        [node("Shape", ["x"], ["n"], start=0, end=2), node("Concat", ["n", "heads"], ["to"], axis=0),
         node("Reshape", ["x", "to"], ["h"]), node("Transpose", ["h"], ["t"], perm=[0, 2, 1, 3]),
         node("Reshape", ["t", "flat"], ["f"]), node("MatMul", ["f", "q"], ["y"])],
        ["y:float[k,2]"], {"heads": np.array([2, 2]), "flat": np.array([-1, 2]), "q": ROWS[:2, :2]},
    ),
    "own rows by index": (
        [node("Shape", ["x"], ["n"]), node("Gather", ["n", "i0"], ["nb"]), node("Gather", ["n", "i1"], ["ns"]),
         node("Range", ["i0", "nb", "i1"], ["rb"]), node("Range", ["i0", "ns", "i1"], ["rs"]),
         node("Unsqueeze", ["rb", "one"], ["cb"]), node("Concat", ["nb1", "ns1"], ["shape"], axis=0),
         node("Expand", ["cb", "shape"], ["eb"]), node("Expand", ["rs", "shape"], ["es"]),
         node("Unsqueeze", ["eb", "two"], ["fb"]), node("Unsqueeze", ["es", "two"], ["fs"]),
         node("Concat", ["fb", "fs"], ["index"], axis=-1), node("GatherND", ["mask", "index"], ["y"])],
        ["y:int64[b,s]"], {"i0": np.array(0), "i1": np.array(1)},
    ),
    "running sum forwards": ([node("CumSum", ["x", "at"], ["y"])], ["y:float[b,s,4]"], {"at": np.array(1)}),
    "steps of a recurrence": (
        [node("Transpose", ["x"], ["t"], perm=[1, 0, 2]), node("GRU", ["t", "gw", "gr"], ["y"], hidden_size=2)],
        ["y:float[s,1,b,2]"],
        {"gw": np.full((1, 6, 4), 0.1, np.float32), "gr": np.full((1, 6, 2), 0.2, np.float32)},
    ),
    "layer norm written out": (
        [node("ReduceMean", ["x", "two"], ["m1"]), node("Sub", ["x", "m1"], ["d"]), node("Mul", ["d", "d"], ["q"]),
         node("ReduceMean", ["q", "two"], ["v"]), node("Add", ["v", "eps"], ["e"]), node("Sqrt", ["e"], ["r"]),
         node("Div", ["d", "r"], ["y"])],
        ["y:float[b,s,4]"], {"eps": np.array(1e-6, np.float32)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFE)
def test_what_is_proved_safe_gives_the_same_with_padding(name: str) -> None:
    nodes, outputs, weights = SAFE[name]
    if name == "own rows by index":
        nodes = [
            nodes[0],
            node("Slice", ["n", "zero", "one"], ["nb1"]),
            node("Slice", ["n", "one", "two"], ["ns1"]),
            *nodes[1:],
        ]
    assert_safe(model(nodes, outputs, weights))


@pytest.mark.parametrize("low", [-10000.0, -65504.0, float(np.finfo(np.float32).min)])
def test_a_mask_of_ten_thousand_leaves_exactly_nothing(low: float) -> None:
    """The rule in numbers: exp underflows at a difference of 104, so scores may reach 4 900 in magnitude."""
    scores = np.array([4900.0, -4900.0], np.float32) + np.array([low, 0], np.float32)
    assert np.exp(scores - scores.max())[0] == 0


def test_a_row_that_is_masked_everywhere_is_refused_not_answered_wrong() -> None:
    made = model([*SOFTMAX, *SCORES, *NEGATIVE, *POOLED], ["y:float[b,s,4]"], F1 | LOW)
    session = Session(made, batching=batching())
    call = inputs(2, 5)
    call["mask"][1] = 0
    with pytest.raises(ValueError, match="a row of 'mask' holds nothing but 0"):
        session(call)


CAUSAL = [
    *SOFTMAX, *SCORES, node("Sub", ["f1", "m3"], ["hole"]), node("Shape", ["x"], ["n"], start=1, end=2),
    node("Concat", ["n", "n"], ["nn"], axis=0), node("Expand", ["f1", "nn"], ["full"]),
    node("Trilu", ["full", "k1"], ["later"], upper=1),
]  # fmt: skip
JOINED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "maximum of holes": (
        [node("Max", ["hole", "later"], ["off"]), node("Mul", ["off", "low"], ["bias"]), node("Add", ["scores", "bias"], ["masked"])],
        {},
    ),
    "sum of holes": (
        [node("Add", ["hole", "later"], ["off"]), node("Mul", ["off", "low"], ["bias"]), node("Add", ["scores", "bias"], ["masked"])],
        {},
    ),
    "minimum of biases": (
        [node("Mul", ["hole", "low"], ["one_bias"]), node("Mul", ["later", "low"], ["other_bias"]),
         node("Min", ["one_bias", "other_bias"], ["bias"]), node("Add", ["scores", "bias"], ["masked"])],
        {},
    ),
    "minimum of what counts": (
        [node("Sub", ["f1", "later"], ["before"]), node("Min", ["m3", "before"], ["on"]), node("Cast", ["on"], ["live"], to=9),
         node("Where", ["live", "scores", "low"], ["masked"])],
        {},
    ),
    "product of what counts": (
        [node("Sub", ["f1", "later"], ["before"]), node("Mul", ["m3", "before"], ["on"]), node("Cast", ["on"], ["live"], to=9),
         node("Where", ["live", "scores", "low"], ["masked"])],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_a_causal_mask_is_joined_to_that_of_the_padding_and_needs_data_at_the_front(name: str) -> None:
    nodes, weights = JOINED[name]
    made = model([*CAUSAL, *nodes, *POOLED], ["y:float[b,s,4]"], F1 | LOW | {"k1": np.array(1)} | weights)
    assert_safe(made)
    session = Session(made, batching=batching())
    call = inputs(2, 5)
    call["mask"][1, 0] = 0
    with pytest.raises(ValueError, match="a row of 'mask' starts with 0"):
        session(call)


def test_a_causal_mask_that_is_no_truth_value_does_not_hide_the_padding() -> None:
    """Joined by a maximum, something that may be above the mask's number could stand there instead."""
    nodes = [*CAUSAL, node("Mul", ["later", "two_f"], ["more"]), node("Max", ["hole", "more"], ["off"]),
             node("Sub", ["f1", "off"], ["on"]), node("Cast", ["on"], ["live"], to=9),
             node("Where", ["live", "scores", "low"], ["masked"]), *POOLED]  # fmt: skip
    found = mixes(model(nodes, ["y:float[b,s,4]"], F1 | LOW | {"k1": np.array(1), "two_f": np.array(2, np.float32)}))
    assert found[0].op_type == "Softmax"


def test_draws_that_stand_behind_all_of_the_data_change_none_of_it() -> None:
    made = proto(
        [node("RandomNormalLike", ["x"], ["n"]), node("Add", ["x", "n"], ["y"])], ["x:float[1,s,4]"], ["y:float[1,s,4]"]
    )
    padded = Session(made, batching=Batching(buckets={"s": [8, 16]}, pad={"x": 3.0}))
    plain = Session(made, compiler="eager")
    for length in (1, 5, 8, 11):
        call = {"x": inputs(1, length)["x"]}
        assert_same(padded(call, seed=3), plain(call, seed=3), rtol=1e-5, atol=1e-5)


STEPS = [
    "relu",
    "dense",
    "mask",
    "softmax",
    "mean",
    "shift",
    "attend",
    "center",
    "cumsum",
    "turn",
    "total",
    "pool",
    "double",
]


def _grown(steps: list[str]) -> list[Any]:
    """A chain of steps over (b, s, 4), some of which mix."""
    nodes: list[Any] = [node("Cast", ["mask"], ["m"], to=1), node("Unsqueeze", ["m", "two"], ["m3"])]
    nodes += [
        node("Unsqueeze", ["m", "one"], ["mk"]),
        node("Sub", ["f1", "mk"], ["hole"]),
        node("Mul", ["hole", "low"], ["bias"]),
    ]
    v = "x"
    for i, step in enumerate(steps):
        a, b, c, d, out = (f"{t}{i}" for t in "abcdv")
        nodes += {
            "relu": [node("Relu", [v], [out])],
            "dense": [node("MatMul", [v, "w"], [out])],
            "mask": [node("Mul", [v, "m3"], [out])],
            "softmax": [node("Softmax", [v], [out], axis=-1)],
            "mean": [node("ReduceMean", [v, "one"], [a]), node("Sub", [v, a], [out])],
            "shift": [node("Add", [v, "f1"], [out])],
            "attend": [
                node("Transpose", [v], [a], perm=[0, 2, 1]), node("MatMul", [v, a], [b]), node("Add", [b, "bias"], [c]),
                node("Softmax", [c], [d], axis=-1), node("MatMul", [d, v], [out]),
            ],
            "center": [node("ReduceMean", [v, "two"], [a]), node("Sub", [v, a], [out])],
            "cumsum": [node("CumSum", [v, "at"], [out])],
            "turn": [node("Transpose", [v], [a], perm=[1, 0, 2]), node("Transpose", [a], [out], perm=[1, 0, 2])],
            "total": [node("ReduceSum", [v, "one"], [a]), node("Add", [v, a], [out])],
            "pool": [node("Mul", [v, "m3"], [a]), node("ReduceSum", [a, "one"], [b]), node("Tanh", [b], [c]), node("Add", [v, c], [out])],
            "double": [node("Concat", [v, v], [a], axis=-1), node("Slice", [a, "one", "five", "two"], [out])],
        }[step]  # fmt: skip
        v = out
    return [*nodes, node("Identity", [v], ["y"])]


@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 8))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_chain_is_refused_or_unchanged_by_padding(steps: list[str], batch: int, length: int) -> None:
    weights = F1 | LOW | {"at": np.array(1), "five": np.array([5])}
    made = model(_grown(steps), ["y:float[b,s,4]"], weights)
    call = inputs(batch, length)
    try:
        session = Session(made, batching=batching(), compiler="eager")
    except BatchingRefused as refused:
        assert {each.op_type for each in refused.mixes} <= {"ReduceMean", "ReduceSum", "Softmax"}
        assert {"mean", "total"} & set(steps)
        return
    assert_same(session(call), by_onnxruntime(made, call), rtol=1e-4, atol=1e-4)
