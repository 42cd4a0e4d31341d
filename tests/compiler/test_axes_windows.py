"""Windows over a padded axis: the padding is put back to what stands beyond the edge, or the operator is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from transmuter_async.compiler import Batching, Mixes, explain
from transmuter_async.errors import BatchingRefused

from .support import Session, assert_same, by_onnxruntime, graph, node, proto

RANDOM = np.random.default_rng(3)


def weights(*shape: int) -> np.ndarray:
    return RANDOM.uniform(-1, 1, shape).astype(np.float32)


HELD = {
    "k3": weights(4, 4, 3), "k4": weights(4, 4, 4), "k8": weights(4, 4, 8), "k1": weights(4, 4, 1), "bias": weights(4) + 1,
    "near": np.ones((4, 1, 3), np.float32),
}  # fmt: skip


def model(
    nodes: list[Any], *, inputs: str = "x:float[b,4,s]", output: str = "y:float[b,4,t]", **more: Any
) -> onnx.ModelProto:
    used = {name for each in nodes for name in each.input}
    held = {name: array for name, array in HELD.items() if name in used}
    return proto(nodes, [inputs], [output], {**held, **more})


def batching(fill: float = 3.0) -> Batching:
    return Batching(batch="b", buckets={"s": [8, 16], "b": [3]}, pad={"x": fill})


def safe(made: onnx.ModelProto, fill: float = 3.0) -> Session:
    """Equal to onnxruntime's results without padding, whatever stands on the padding, in at most two programs."""
    session = Session(made, batching=batching(fill))
    host = Session(made, batching=batching(fill), compiler="eager")
    for rows, length in ((1, 1), (2, 3), (3, 8), (2, 9), (3, 16)):
        call = {"x": weights(rows, 4, length)}
        want = by_onnxruntime(made, call)
        assert_same(session(call), want, rtol=1e-5, atol=1e-5)
        assert_same(host(call), want, rtol=1e-5, atol=1e-5)
    assert len(session.cache.segments()) == 2
    return session


def refused(made: onnx.ModelProto, **more: Any) -> tuple[Mixes, ...]:
    with pytest.raises(BatchingRefused) as error:
        Session(made, batching=batching(), **more)
    return error.value.mixes


STACK = [
    node("Conv", ["x", "k3", "bias"], ["a"], pads=[1, 1], name="first"),
    node("Relu", ["a"], ["r"]),
    node("Conv", ["r", "k3", "bias"], ["c"], dilations=[3], pads=[3, 3], name="dilated"),
    node("Add", ["c", "r"], ["d"]),
    node("Conv", ["d", "near"], ["e"], auto_pad="SAME_UPPER", group=4, name="by channel"),
    node("Conv", ["e", "k1", "bias"], ["y"], name="of one"),
]
SAFE: dict[str, list[Any]] = {
    "a stack with biases": STACK,
    "looking back only": [node("Conv", ["x", "k3", "bias"], ["h"], pads=[2, 0]), node("Conv", ["h", "k3"], ["y"], pads=[2, 0])],
    "looking ahead only": [node("Conv", ["x", "k3", "bias"], ["h"], pads=[0, 2]), node("Conv", ["h", "k3"], ["y"], pads=[0, 2])],
    "same to the lower end": [node("Conv", ["x", "k4"], ["h"], auto_pad="SAME_LOWER"), node("Conv", ["h", "k4"], ["y"], auto_pad="SAME_UPPER")],
    "longer, as a vocoder does": [
        node("Conv", ["x", "k3", "bias"], ["h"], pads=[1, 1]),
        node("ConvTranspose", ["h", "k8", "bias"], ["u"], strides=[4], pads=[2, 2]), node("LeakyRelu", ["u"], ["v"]),
        node("Conv", ["v", "k3", "bias"], ["w"], dilations=[5], pads=[5, 5]),
        node("ConvTranspose", ["w", "k4"], ["y"], strides=[2], pads=[1, 1]),
    ],
    "longer with more at the end": [node("ConvTranspose", ["x", "k3"], ["h"], strides=[2], pads=[1, 1], output_padding=[1]),
                                    node("Conv", ["h", "k3"], ["y"], pads=[1, 1])],
    "longer and shorter again": [
        node("ConvTranspose", ["x", "k8"], ["u"], strides=[4], pads=[2, 2]), node("Tanh", ["u"], ["v"]),
        node("Conv", ["v", "k4", "bias"], ["h"], strides=[2], pads=[1, 1]), node("MaxPool", ["h"], ["y"], kernel_shape=[2], strides=[2]),
    ],
    "largest of neighbours": [
        node("Conv", ["x", "k3", "bias"], ["h"], pads=[1, 1]), node("MaxPool", ["h"], ["p"], kernel_shape=[3], pads=[1, 1]),
        node("Conv", ["p", "k3"], ["y"], pads=[1, 1]),
    ],
    "mean of neighbours, the edge counted": [
        node("AveragePool", ["x"], ["h"], kernel_shape=[3], pads=[1, 1], count_include_pad=1), node("Conv", ["h", "k3"], ["y"], pads=[1, 1]),
    ],
    "mean of what came before": [node("AveragePool", ["x"], ["y"], kernel_shape=[3], pads=[2, 0])],
    "length of neighbours": [node("LpPool", ["x"], ["y"], kernel_shape=[3], pads=[1, 1])],
}  # fmt: skip


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("fill", [0.0, 3.0, np.nan])
def test_windows_of_the_data_never_see_the_padding(name: str, fill: float) -> None:
    safe(model(SAFE[name]), fill)


def test_explain_tells_that_padding_is_put_back() -> None:
    session = safe(model(STACK))
    told = str(explain(session.prepared, session.cache))
    assert "Padding is put back to zero before 3 nodes" in told
    assert [mask.node for mask in session.prepared.padding.proof.masks] == ["first", "dilated", "by channel"]


def test_padding_that_is_zero_already_is_not_put_back() -> None:
    session = Session(model([node("Conv", ["x", "k3"], ["h"], pads=[1, 1]), node("Conv", ["h", "k3", "bias"], ["y"], pads=[1, 1])]),
                      batching=batching(0.0))  # fmt: skip
    assert [mask.op_type for mask in session.prepared.padding.proof.masks] == ["Conv"]


def test_two_axes_are_padded_at_once() -> None:
    nodes = [
        node("Conv", ["x", "k", "bias"], ["h"], pads=[1, 1, 1, 1]), node("Relu", ["h"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[3, 1], pads=[1, 0, 1, 0]),
        node("Conv", ["p", "k", "bias"], ["y"], dilations=[1, 2], pads=[1, 2, 1, 2]),
    ]  # fmt: skip
    made = model(nodes, inputs="x:float[b,4,h,w]", output="y:float[b,4,h,w]", k=weights(4, 4, 3, 3))
    session = Session(made, batching=Batching(buckets={"h": [8], "w": [8, 16]}, pad={"x": 2.0}))
    for height, width in ((1, 1), (5, 8), (8, 3), (7, 13)):
        call = {"x": weights(2, 4, height, width)}
        assert_same(session(call), by_onnxruntime(made, call), rtol=1e-5, atol=1e-5)
    assert len(session.cache.segments()) == 2


def test_integers_stand_for_zero_by_their_zero_point() -> None:
    nodes = [node("ConvInteger", ["x", "k", "z"], ["y"], pads=[1, 1])]
    made = proto(
        nodes,
        ["x:int32[s]"],
        ["y:int32[1,2,s]"],
        {"k": np.arange(-3, 3, dtype=np.int8).reshape(2, 1, 3), "z": np.uint8(7)},
    )
    del made.graph.input[:]
    made.graph.input.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, 1, "s"]))
    session = Session(made, batching=Batching(buckets={"s": [8]}, pad={"x": 9}))
    for length in (1, 5, 8):
        call = {"x": np.arange(10, 10 + length, dtype=np.uint8).reshape(1, 1, -1)}
        assert_same(session(call), by_onnxruntime(made, call))


REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "shorter": ([node("Conv", ["x", "k3"], ["y"], name="n")], "Conv", "change the length"),
    "every second": ([node("Conv", ["x", "k3"], ["y"], strides=[2], pads=[1, 1], name="n")], "Conv", "stride 2"),
    "half as long": ([node("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[2], name="n")], "MaxPool", "stride 2"),
    "more at the end than fits": (
        [node("MaxPool", ["x"], ["y"], kernel_shape=[3], pads=[1, 1], ceil_mode=1, name="n")], "MaxPool", "change the length"
    ),
    "longer by a rest": ([node("ConvTranspose", ["x", "k4"], ["y"], strides=[2], name="n")], "ConvTranspose", "not n times 2"),
    "of a fixed length": (
        [node("ConvTranspose", ["x", "k4"], ["y"], strides=[2], output_shape=[20], name="n")], "ConvTranspose", "fixed length"
    ),
    "edge by reflection": (
        [node("Pad", ["x", "pads"], ["h"], mode="reflect", name="n"), node("Conv", ["h", "k3"], ["y"])], "Pad", "adds elements"
    ),
    "edge of ones": ([node("Pad", ["x", "pads", "one"], ["h"], name="n"), node("Conv", ["h", "k3"], ["y"])], "Pad", "adds elements"),
    "mean of the elements there are": (
        [node("AveragePool", ["x"], ["y"], kernel_shape=[3], pads=[1, 1], name="n")], "AveragePool", "how many elements"
    ),
    "mean over all": ([node("GlobalAveragePool", ["x"], ["y"], name="n")], "GlobalAveragePool", "pools over it"),
    "statistics": ([node("InstanceNormalization", ["x", "bias", "bias"], ["y"], name="n")], "InstanceNormalization", "statistics"),
    "places of the largest": (
        [node("MaxPool", ["x"], ["p", "i"], kernel_shape=[3], pads=[1, 1], name="n"), node("Cast", ["i"], ["y"], to=1)],
        "MaxPool", "indices",
    ),
    "not at the end": (
        [node("Unsqueeze", ["x", "two"], ["u"]), node("Expand", ["u", "wide"], ["v"]),
         node("Reshape", ["v", "to"], ["h"]), node("Conv", ["h", "k3"], ["y"], pads=[1, 1], name="n")],
        "Conv", "does not stand at the end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_hold_is_refused_by_name(name: str) -> None:
    nodes, op_type, why = REFUSED[name]
    more = {
        "pads": np.array([0, 0, 1, 0, 0, 1]), "one": np.float32(1), "two": np.array([2]), "wide": np.array([1, 1, 3, 1]),
        "to": np.array([0, 4, -1]),
    }  # fmt: skip
    used = {name for each in nodes for name in each.input}
    found = refused(model(nodes, **{name: array for name, array in more.items() if name in used}))
    assert [(each.node, each.op_type, each.axis) for each in found] == [("n", op_type, "s")]
    assert why in found[0].why


def test_windows_over_channels_or_rows_are_refused() -> None:
    nodes = [node("Transpose", ["x"], ["t"], perm=[1, 2, 0]), node("Conv", ["t", "k"], ["y"], pads=[1, 1])]
    found = refused(model(nodes, output="y:float[4,4,b]", k=weights(4, 5, 3)))
    assert found[0].op_type == "Conv" and found[0].axis in ("b", "s")


def test_windows_in_a_body_are_refused_where_they_would_have_to_be_masked() -> None:
    body = graph(
        [node("Identity", ["on"], ["go"]), node("Conv", ["c", "k3"], ["d"], pads=[1, 1], name="inner")],
        ["i:int64[]", "on:bool[]", "c:float[b,4,s]"], ["go:bool[]", "d:float[b,4,s]"],
    )  # fmt: skip
    made = model(
        [node("Loop", ["trips", "", "x"], ["y"], body=body)], output="y:float[b,4,s]", trips=np.array(2), k3=HELD["k3"]
    )
    found = refused(made)
    assert found[0].node == "inner" and "bodies" in found[0].why


def test_rows_of_different_length_are_not_brought_to_one_bucket_where_windows_read_on() -> None:
    """A program knows one true length: rows that share a call must have the same."""
    plan = Session(model(STACK), batching=batching()).prepared.padding
    assert plan.targets({"s": 5, "b": 2}) == {"s": 5, "b": 3}
    free = Session(model([node("Relu", ["x"], ["y"])], output="y:float[b,4,s]"), batching=batching()).prepared.padding
    assert free.targets({"s": 5, "b": 2}) == {"s": 8, "b": 3}
