"""Dimensions that arise inside of a graph: padded under the name of their size, or refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from transmuter_async.compiler import Batching
from transmuter_async.errors import BatchingRefused, InputError

from .support import Session, assert_same, by_onnxruntime, node, proto

HELD = {
    "zero": np.array(0), "one": np.array(1), "ones": np.array([1]), "f0": np.float32(0), "f1": np.float32(1),
    "kernel": np.random.default_rng(0).uniform(-1, 1, (2, 4, 5)).astype(np.float32), "shift": np.array([1, -1], np.float32),
    "low": np.float32(-1e4),
}  # fmt: skip


def model(nodes: list[Any], inputs: list[str], outputs: list[str], **more: Any) -> onnx.ModelProto:
    used = {name for each in nodes for name in each.input}
    held = {**HELD, **more}
    return proto(nodes, inputs, outputs, {name: array for name, array in held.items() if name in used})


def safe(made: onnx.ModelProto, batching: Batching, calls: list[dict[str, Any]], programs: int) -> Session:
    """Equal to onnxruntime without padding, and the calls after the first round compile nothing."""
    session = Session(made, batching=batching)
    host = Session(made, batching=batching, compiler="eager")
    plain = Session(made, compiler="eager")
    for call in calls:
        want = by_onnxruntime(made, call)
        assert_same(session(call), want, rtol=1e-5, atol=1e-5)
        assert_same(host(call), want, rtol=1e-5, atol=1e-5)
        assert_same(plain(call), want, rtol=1e-5, atol=1e-5)
    assert len(session.cache.segments()) <= programs
    for call in calls:
        session(call)
        assert session.compiled() == 0
    return session


FRAMES = [  # durations to frames to a signal, as a speech model does it
    node("Ceil", ["durations"], ["whole"]), node("ReduceSum", ["whole", "ones"], ["total"], keepdims=0),
    node("Cast", ["total"], ["lengths"], to=7), node("ReduceMax", ["lengths"], ["frames"], keepdims=0),
    node("Range", ["zero", "frames", "one"], ["places"]), node("Unsqueeze", ["lengths", "ones"], ["column"]),
    node("Less", ["places", "column"], ["live"]), node("Cast", ["live"], ["mask"], to=1),
    node("Unsqueeze", ["mask", "ones"], ["wide"]), node("Mul", ["wide", "voice"], ["h"]),
]  # fmt: skip
SOUND = [node("Conv", ["h", "kernel", "shift"], ["c"], pads=[2, 2], name="conv"), node("Add", ["c", "f1"], ["y"])]


def frames(*counts: int) -> list[dict[str, np.ndarray]]:
    """Durations (1, 3) that add up to so many frames."""
    random = np.random.default_rng(counts)
    found = []
    for count in counts:
        parts = np.array([[0.5, 0.25, count - 2.5]], np.float32)
        found.append({"durations": parts, "voice": random.uniform(-1, 1, (1, 4, 1)).astype(np.float32)})
    return found


SPEECH = ["durations:float[1,3]", "voice:float[1,4,1]"]


@pytest.mark.parametrize("name", ["frames", "places"])
def test_the_limit_of_a_range_goes_to_a_bucket(name: str) -> None:
    made = model([*FRAMES, *SOUND], SPEECH, ["y:float[1,2,t]"])
    session = safe(made, Batching(buckets={name: [8, 16]}), frames(3, 5, 8, 9, 16), 3)
    assert "its windows" not in session.prepared.padding.describe()
    with pytest.raises(InputError, match=r"'frames' is 17 in this call, more than the largest bucket 16"):
        session(frames(17)[0])


def test_a_mask_of_lengths_is_zero_from_their_maximum_on() -> None:
    """A sum over the frames is right, since the mask is false on the padding; a mean would not be."""
    total = [*FRAMES, node("Mul", ["h", "h"], ["q"]), node("ReduceSum", ["q", "two"], ["y"], keepdims=0)]
    safe(
        model(total, SPEECH, ["y:float[1,4]"], two=np.array([2])),
        Batching(buckets={"frames": [8, 16]}),
        frames(3, 8, 9),
        3,
    )
    mean = [*FRAMES, node("ReduceMean", ["h", "two"], ["y"], keepdims=0, name="mean")]
    with pytest.raises(BatchingRefused) as refused:
        Session(model(mean, SPEECH, ["y:float[1,4]"], two=np.array([2])), batching=Batching(buckets={"frames": [8]}))
    assert [(each.node, each.axis) for each in refused.value.mixes] == [("mean", "frames")]


def test_a_float_range_up_to_a_size() -> None:
    nodes = [
        *FRAMES, node("Shape", ["h"], ["n"], start=2, end=3), node("Squeeze", ["n"], ["count"]), node("Cast", ["count"], ["f"], to=1),
        node("Range", ["f0", "f", "f1"], ["time"]), node("Mul", ["time", "h"], ["y"]),
    ]  # fmt: skip
    safe(model(nodes, SPEECH, ["y:float[1,4,t]"]), Batching(buckets={"frames": [8, 16]}), frames(3, 8, 9), 3)


MAKERS: dict[str, tuple[list[Any], list[str]]] = {
    "ConstantOfShape": (
        [node("Reshape", ["n", "ones"], ["flat"]), node("Concat", ["flat", "four"], ["shape"], axis=0),
         node("ConstantOfShape", ["shape"], ["c"], value=onnx.numpy_helper.from_array(np.array([2.5], np.float32))),
         node("Mul", ["c", "row"], ["y"])],
        ["y:float[t,4]"],
    ),
    "Expand": (
        [node("Reshape", ["n", "ones"], ["flat"]), node("Concat", ["flat", "four"], ["shape"], axis=0),
         node("Expand", ["row", "shape"], ["c"]), node("Tanh", ["c"], ["y"])],
        ["y:float[t,4]"],
    ),
    "Tile": (
        [node("Reshape", ["n", "ones"], ["flat"]), node("Concat", ["flat", "ones"], ["shape"], axis=0),
         node("Tile", ["row", "shape"], ["c"]), node("Tanh", ["c"], ["y"])],
        ["y:float[t,4]"],
    ),
    "Tile of more": (
        [node("Reshape", ["n", "ones"], ["flat"]), node("Concat", ["flat", "ones"], ["shape"], axis=0),
         node("Transpose", ["row"], ["column"]), node("Tile", ["column", "shape"], ["c"]), node("Tanh", ["c"], ["y"])],
        ["y:float[t,1]"],
    ),
    "Range": ([node("Range", ["zero", "n", "one"], ["r"]), node("Cast", ["r"], ["f"], to=1), node("Unsqueeze", ["f", "ones"], ["g"]),
               node("Mul", ["g", "row"], ["y"])], ["y:float[t,4]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("given", [True, False])
def test_a_count_that_is_an_input_or_is_computed(name: str, given: bool) -> None:
    nodes, outputs = MAKERS[name]
    if not given:
        nodes = [node("ReduceSum", ["counts"], ["sum"], keepdims=0), node("Cast", ["sum"], ["n"], to=7), *nodes]
    made = model(nodes, ["n:int64[]" if given else "counts:float[2]", "row:float[1,4]"], outputs, four=np.array([4]))
    row = np.linspace(-1, 1, 4, dtype=np.float32)[None]
    calls = [
        {("n" if given else "counts"): np.array(n) if given else np.array([n - 1, 1], np.float32), "row": row}
        for n in (1, 3, 4, 5, 8)
    ]
    session = safe(made, Batching(buckets={"n": [4, 8]}), calls, 2 if given else 3)
    with pytest.raises(InputError, match="more than the largest bucket 8"):
        session({**calls[0], **({"n": np.array(9)} if given else {"counts": np.array([8, 1], np.float32)})})


def test_a_count_of_zero_is_zero() -> None:
    nodes, outputs = MAKERS["Expand"]
    nodes = [node("Cast", ["count"], ["n"], to=7), *nodes]
    made = model(nodes, ["count:float[]", "row:float[1,4]"], outputs, four=np.array([4]))
    session = Session(made, batching=Batching(buckets={"n": [4]}))
    assert session({"count": np.float32(0), "row": np.ones((1, 4), np.float32)})["y"].shape == (0, 4)


def test_how_many_are_selected_may_bear_an_axis() -> None:
    nodes = [
        node("NonZero", ["x"], ["p"]), node("Shape", ["p"], ["all"]), node("Gather", ["all", "one"], ["count"]),
        node("Range", ["zero", "count", "one"], ["r"]), node("Cast", ["r"], ["y"], to=1),
    ]  # fmt: skip
    made = model(nodes, ["x:float[9]"], ["y:float[t]"])
    calls = [{"x": np.r_[np.ones(n), np.zeros(9 - n)].astype(np.float32)} for n in (0, 1, 3, 4, 5, 8)]
    safe(made, Batching(buckets={"count": [4, 8]}), calls, 6)


REFUSED: dict[str, tuple[list[Any], list[str], list[str], str, str]] = {
    "used as a number": (
        [node("Cast", ["n"], ["f"], to=1), node("Range", ["zero", "n", "one"], ["r"]), node("Cast", ["r"], ["g"], to=1),
         node("Div", ["g", "f"], ["y"], name="div")], ["n:int64[]"], ["y:float[t]"], "Cast", "size",
    ),
    "counted from its end": (
        [node("Range", ["n", "zero", "minus"], ["r"], name="range"), node("Cast", ["r"], ["y"], to=1)], ["n:int64[]"], ["y:float[t]"],
        "Range", "counts from its end",
    ),
    "given as an output": ([node("Identity", ["n"], ["m"]), node("Add", ["m", "one"], ["y"])], ["n:int64[]"], ["y:int64[]"], "Add", "size"),
    "meets what is not padded": (
        [node("Range", ["zero", "n", "one"], ["r"]), node("Cast", ["r"], ["f"], to=1), node("Add", ["f", "x"], ["y"], name="add")],
        ["n:int64[]", "x:float[k]"], ["y:float[k]"], "Add", "not the same dimension",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_hold_is_refused_with_the_reason(name: str) -> None:
    nodes, inputs, outputs, op_type, why = REFUSED[name]
    with pytest.raises(BatchingRefused) as refused:
        Session(model(nodes, inputs, outputs, minus=np.array(-1)), batching=Batching(buckets={"n": [4]}))
    assert any(each.op_type == op_type and why in each.why for each in refused.value.mixes), refused.value.mixes


def test_names_that_bear_no_axis_are_told_apart() -> None:
    made = model([*FRAMES, *SOUND], SPEECH, ["y:float[1,2,t]"])
    with pytest.raises(
        InputError, match=r"no input has a dimension 'frame'.*Limits of its Range nodes are \['frames'\]"
    ):
        Session(made, batching=Batching(buckets={"frame": [8]}))
    with pytest.raises(InputError, match="'total' is not known to be one integer"):
        Session(made, batching=Batching(buckets={"total": [8]}))
    with pytest.raises(InputError, match="two names stand for the size 'frames'"):
        Session(made, batching=Batching(buckets={"frames": [8], "places": [8]}))


def test_a_size_that_padding_changes_bears_no_axis() -> None:
    nodes = [
        node("Shape", ["x"], ["n"], start=0, end=1), node("Mul", ["n", "two"], ["m"]), node("Squeeze", ["m"], ["count"]),
        node("Range", ["zero", "count", "one"], ["r"]), node("Cast", ["r"], ["y"], to=1),
    ]  # fmt: skip
    made = model(nodes, ["x:float[s]"], ["y:float[t]"], two=np.array([2]))
    with pytest.raises(BatchingRefused, match="computed from a size that padding changes"):
        Session(made, batching=Batching(buckets={"s": [4], "count": [8]}))


LENGTHS = [
    node("Shape", ["x"], ["n"], start=1, end=2), node("Squeeze", ["n"], ["count"]), node("Range", ["zero", "count", "one"], ["r"]),
    node("Unsqueeze", ["lengths", "ones"], ["column"]), node("Less", ["r", "column"], ["live"]), node("Cast", ["live"], ["m"], to=1),
    node("Unsqueeze", ["m", "two"], ["wide"]), node("Mul", ["x", "wide"], ["h"]), node("ReduceSum", ["h", "ones"], ["y"], keepdims=0),
]  # fmt: skip


def test_lengths_of_the_caller_mask_an_axis_of_the_inputs() -> None:
    made = model(LENGTHS, ["x:float[b,s,2]", "lengths:int64[b]"], ["y:float[b,2]"], two=np.array([2]))
    batching = Batching(batch="b", buckets={"s": [8, 16], "b": [4]}, pad={"x": 5.0})
    random = np.random.default_rng(1)
    calls = [
        {"x": random.uniform(-1, 1, (b, s, 2)).astype(np.float32), "lengths": random.integers(0, s + 1, b)}
        for b, s in ((1, 3), (3, 8), (2, 11))
    ]
    session = safe(made, batching, calls, 2)
    more = {**calls[0], "lengths": np.array([5])}  # of three: all of them, and nothing of the padding
    assert_same(session(more), by_onnxruntime(made, more), rtol=1e-5, atol=1e-5)
    plan = session.prepared.padding
    with pytest.raises(InputError, match="lengths speak of more than there is"):
        plan.settled(more)  # where rows of several calls would share a bucket
