"""Following axes through fused attention, embeddings, loops and scans: refused by name, or the same as without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from transmuter_async.compiler import Batching, Mixes
from transmuter_async.errors import BatchingRefused

from .support import Session, assert_same, by_onnxruntime, graph, node, value

HIDDEN, HEADS = 8, 2


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32) / 2


def contrib(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return node(op_type, inputs, outputs, domain="com.microsoft", **attributes)


def model(
    nodes: list[Any], inputs: list[str], outputs: list[str], held: dict[str, Any] | None = None, *, opset: int = 18
) -> onnx.ModelProto:
    tensors = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in (held or {}).items()]
    made = helper.make_graph(nodes, "g", [value(t) for t in inputs], [value(t) for t in outputs], tensors)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=domains, ir_version=10)


X = "x:float[b,s,8]"
Y = "y:float[b,s,8]"
KEYS = "mask:int32[b,s]"


def call(
    batch: int, length: int, *, lengths: bool = False, mask: bool = False, ids: bool = False
) -> dict[str, np.ndarray]:
    random = np.random.default_rng((batch, length))
    found: dict[str, np.ndarray] = {"x": random.standard_normal((batch, length, HIDDEN)).astype(np.float32)}
    kept = random.integers(1, length + 1, batch).astype(np.int32)
    if lengths:
        found["lengths"] = kept
    if mask:
        found["mask"] = (np.arange(length) < kept[:, None]).astype(np.int32)
    if ids:
        del found["x"]
        found["ids"] = random.integers(0, 11, (batch, length)).astype(np.int32)
        found["segments"] = random.integers(0, 2, (batch, length)).astype(np.int32)
    return found


CALLS = [(1, 1), (2, 3), (3, 8), (2, 11), (4, 16)]


def safe(made: onnx.ModelProto, batching: Batching, **kinds: bool) -> None:
    """Five calls equal to onnxruntime's without padding, in at most one program for each pair of buckets."""
    session = Session(made, batching=batching)
    host = Session(made, batching=batching, compiler="eager")
    for batch, length in CALLS:
        inputs = call(batch, length, **kinds)
        want = by_onnxruntime(made, inputs)
        assert_same(session(inputs), want, rtol=1e-5, atol=1e-5)
        assert_same(host(inputs), want, rtol=1e-5, atol=1e-5)
    assert len(session.cache.segments()) <= 2


def refused(made: onnx.ModelProto, batching: Batching) -> tuple[Mixes, ...]:
    with pytest.raises(BatchingRefused) as error:
        Session(made, batching=batching)
    return error.value.mixes


def buckets(**more: Any) -> Batching:
    return Batching(batch="b", buckets={"s": [8, 16], "b": [4]}, pad={"x": 3.0}, **more)


# --- attention --------------------------------------------------------------------------------------------------------

PROJECTION = {"w": weights(HIDDEN, 3 * HIDDEN), "wb": weights(3 * HIDDEN)}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("masked", ["mask", "causal", "both"])
def test_attention_with_projection(masked: str, layers: int) -> None:
    mask = "" if masked == "causal" else "mask"
    nodes, source = [], "x"
    for layer in range(layers):
        out = "y" if layer == layers - 1 else f"h{layer}"
        inputs = [source, "w", "wb", mask] if mask else [source, "w", "wb"]
        nodes.append(contrib("Attention", inputs, [out], num_heads=HEADS, unidirectional=int(masked != "mask")))
        source = out
    made = model(nodes, [X, *([KEYS] if mask else [])], [Y], PROJECTION)
    safe(made, buckets(mask="mask") if mask else buckets(), mask=bool(mask))


def test_attention_with_projection_without_a_mask_is_refused() -> None:
    made = model([contrib("Attention", ["x", "w", "wb"], ["y"], num_heads=HEADS, name="att")], [X], [Y], PROJECTION)
    found = refused(made, buckets())
    assert [(each.node, each.op_type, each.axis) for each in found] == [("att", "Attention", "s")]
    assert "no mask covers" in found[0].why
    weak = contrib("Attention", ["x", "w", "wb", "mask"], ["y"], num_heads=HEADS, mask_filter_value=-50.0)
    assert refused(model([weak], [X, KEYS], [Y], PROJECTION), buckets(mask="mask"))[0].op_type == "Attention"


def test_attention_whose_mask_is_lengths() -> None:
    nodes = [contrib("Attention", ["x", "w", "wb", "lengths"], ["y"], num_heads=HEADS)]
    made = model(nodes, [X, "lengths:int32[b]"], [Y], PROJECTION)
    safe(made, buckets(), lengths=True)
    session = Session(made, batching=buckets())
    beyond = call(2, 3, lengths=True) | {"lengths": np.array([2, 5], np.int32)}
    assert_same(
        session(beyond), by_onnxruntime(made, beyond), rtol=1e-5, atol=1e-5
    )  # not padded: it speaks of more keys
    with pytest.raises(ValueError, match="length below 1"):
        session(call(2, 3, lengths=True) | {"lengths": np.array([2, 0], np.int32)})


def test_a_past_that_is_padded_is_refused_and_rows_go_through() -> None:
    made = model(
        [contrib("Attention", ["x", "w", "wb", "", "past"], ["y", "present"], num_heads=HEADS, unidirectional=1)],
        [X, "past:float[2,b,2,p,4]"], [Y, "present:float[2,b,2,t,4]"], PROJECTION,
    )  # fmt: skip
    assert {each.axis for each in refused(made, Batching(buckets={"s": [8]}))} == {"s"}
    assert {each.axis for each in refused(made, Batching(buckets={"p": [8]}))} == {"p"}
    session = Session(made, batching=Batching(batch="b", buckets={"b": [4]}))
    for batch in (1, 3):
        inputs = call(batch, 1) | {"past": weights(2, batch, 2, 5, 4)}
        assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-5, atol=1e-5)


QKV = [node("MatMul", ["x", name], [name.upper()]) for name in ("q", "k", "v")]
QKV_WEIGHTS = {name: weights(HIDDEN, HIDDEN, seed=i) for i, name in enumerate(("q", "k", "v"))}


@pytest.mark.parametrize("masked", ["mask", "lengths", "causal"])
def test_multi_head_attention(masked: str) -> None:
    extra = {"mask": ["", "mask"], "lengths": ["", "lengths"], "causal": []}[masked]
    nodes = [
        *QKV,
        contrib(
            "MultiHeadAttention",
            ["Q", "K", "V", *extra],
            ["y"],
            num_heads=HEADS,
            unidirectional=int(masked == "causal"),
        ),
    ]
    given = {"mask": [KEYS], "lengths": ["lengths:int32[b]"], "causal": []}[masked]
    made = model(nodes, [X, *given], [Y], QKV_WEIGHTS)
    safe(
        made,
        buckets(mask="mask") if masked == "mask" else buckets(),
        mask=masked == "mask",
        lengths=masked == "lengths",
    )


def test_multi_head_attention_with_bias_and_added_mask() -> None:
    nodes = [
        *QKV, node("Cast", ["mask"], ["m"], to=1), node("Sub", ["one", "m"], ["hole"]), node("Mul", ["hole", "low"], ["h"]),
        node("Unsqueeze", ["h", "at"], ["h4"]), node("Shape", ["x"], ["n"], start=1, end=2),
        node("Concat", ["ones", "ones", "n", "ones"], ["to"], axis=0), node("Expand", ["h4", "to"], ["added"]),
        contrib("MultiHeadAttention", ["Q", "K", "V", "bias", "", "added"], ["y"], num_heads=HEADS),
    ]  # fmt: skip
    held = QKV_WEIGHTS | {
        "one": np.float32(1), "low": np.float32(-1e4), "at": np.array([1, 2]), "ones": np.array([1]), "bias": weights(24),
    }  # fmt: skip
    safe(model(nodes, [X, KEYS], [Y], held), buckets(mask="mask"), mask=True)


def test_multi_head_attention_without_a_mask_is_refused_and_cross_attention_needs_one_too() -> None:
    bare = model([*QKV, contrib("MultiHeadAttention", ["Q", "K", "V"], ["y"], num_heads=HEADS)], [X], [Y], QKV_WEIGHTS)
    assert refused(bare, buckets())[0].op_type == "MultiHeadAttention"
    cross = model(
        [node("MatMul", ["z", "q"], ["Q"]), *QKV[1:], contrib("MultiHeadAttention", ["Q", "K", "V"], ["y"], num_heads=HEADS)],
        ["z:float[b,t,8]", X], ["y:float[b,t,8]"], QKV_WEIGHTS,
    )  # fmt: skip
    assert {each.axis for each in refused(cross, Batching(buckets={"s": [8], "t": [8]}))} == {"s"}
    session = Session(cross, batching=Batching(batch="b", buckets={"t": [8]}))
    inputs = call(2, 5) | {"z": weights(2, 3, HIDDEN)}
    assert_same(session(inputs), by_onnxruntime(cross, inputs), rtol=1e-5, atol=1e-5)


def test_group_query_attention_keeps_rows_apart_and_refuses_a_padded_length() -> None:
    nodes = [
        contrib(
            "GroupQueryAttention",
            ["x", "k", "v", "pk", "pv", "ends", "total"],
            ["y", "nk", "nv"],
            num_heads=1,
            kv_num_heads=1,
        )
    ]
    made = model(
        nodes,
        [X, "k:float[b,s,8]", "v:float[b,s,8]", "pk:float[b,1,p,8]", "pv:float[b,1,p,8]", "ends:int32[b]", "total:int32[1]"],
        [Y, "nk:float[b,1,t,8]", "nv:float[b,1,t,8]"],
    )  # fmt: skip
    found = refused(made, Batching(buckets={"s": [8]}))
    assert {(each.op_type, each.axis) for each in found} == {("GroupQueryAttention", "s")}
    session = Session(made, batching=Batching(batch="b", buckets={"b": [4]}))
    for batch in (1, 3, 4):
        inputs = call(batch, 1) | {
            "k": weights(batch, 1, 8), "v": weights(batch, 1, 8, seed=1), "pk": weights(batch, 1, 5, 8), "pv": weights(batch, 1, 5, 8),
            "ends": np.full(batch, 5, np.int32), "total": np.array([6], np.int32),
        }  # fmt: skip
        assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", ["truth", "added", "causal"])
def test_attention_of_the_standard(masked: str) -> None:
    nodes = [
        *QKV, node("Cast", ["mask"], ["m"], to=9 if masked == "truth" else 1), node("Unsqueeze", ["m", "at"], ["m1"]),
        node("Shape", ["x"], ["n"], start=1, end=2), node("Concat", ["ones", "ones", "n", "ones"], ["to"], axis=0),
        node("Expand", ["m1", "to"], ["m4"]),  # onnxruntime wants a row for each query
    ]  # fmt: skip
    held = QKV_WEIGHTS | {"at": np.array([1, 2]), "ones": np.array([1])}
    if masked == "added":
        nodes += [node("Sub", ["one", "m4"], ["hole"]), node("Mul", ["hole", "low"], ["bias"])]
        held |= {"one": np.float32(1), "low": np.float32(-1e4)}
    extra = {"truth": ["m4"], "added": ["bias"], "causal": []}[masked]
    nodes = nodes if extra else QKV
    attention = node(
        "Attention",
        ["Q", "K", "V", *extra],
        ["y"],
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        is_causal=int(masked == "causal"),
    )
    made = model([*nodes, attention], [X, *([KEYS] if extra else [])], [Y], held if extra else QKV_WEIGHTS, opset=23)
    safe(made, buckets(mask="mask") if extra else buckets(), mask=bool(extra))


def test_attention_of_the_standard_without_a_mask_is_refused() -> None:
    attention = node("Attention", ["Q", "K", "V"], ["y"], q_num_heads=HEADS, kv_num_heads=HEADS)
    found = refused(model([*QKV, attention], [X], [Y], QKV_WEIGHTS, opset=23), buckets())
    assert {(each.op_type, each.axis) for each in found} == {("Attention", "s")}


EMBEDDING = {
    "words": weights(11, HIDDEN), "places": weights(16, HIDDEN), "kinds": weights(2, HIDDEN), "gamma": weights(HIDDEN),
    "beta": weights(HIDDEN),
}  # fmt: skip
TABLES = ["words", "places", "kinds", "gamma", "beta"]


def test_a_fused_encoder() -> None:
    """As onnxruntime's optimiser writes BERT: the mask reaches the attention as the number of its ones."""
    nodes = [
        contrib("EmbedLayerNormalization", ["ids", "segments", *TABLES, "mask"], ["e", "count"]),
        contrib("Attention", ["e", "w", "wb", "count"], ["a"], num_heads=HEADS),
        contrib("SkipLayerNormalization", ["a", "e", "gamma", "beta"], ["y"]),
    ]
    made = model(nodes, ["ids:int32[b,s]", "segments:int32[b,s]", KEYS], [Y], EMBEDDING | PROJECTION)
    batching = Batching(batch="b", buckets={"s": [8, 16], "b": [4]}, mask="mask")
    safe(made, batching, ids=True, mask=True)
    session = Session(made, batching=batching)
    for wrong in (0, 2):  # twos are no ones: nothing is counted in that row
        inputs = call(2, 3, ids=True, mask=True)
        inputs["mask"][1] = wrong
        with pytest.raises(ValueError, match="a row of 'mask'"):
            session(inputs)
    assert "positions" in refused(made, Batching(buckets={"s": [32]}, mask="mask"))[0].why


def test_skip_layer_normalization_goes_row_by_row() -> None:
    nodes = [contrib("SkipLayerNormalization", ["x", "x", "gamma", "beta"], ["y"])]
    safe(model(nodes, [X], [Y], EMBEDDING), buckets())
    over = model([node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), contrib("SkipLayerNormalization", ["t", "t", "g", "g"], ["y"])],
                 [X], ["y:float[b,8,s]"], {"g": weights(5)})  # fmt: skip
    assert refused(over, Batching(buckets={"s": [8]}))[0].op_type == "SkipLayerNormalization"


# --- loops ------------------------------------------------------------------------------------------------------------


def scan_body(*, mean: bool = False) -> onnx.GraphProto:
    """state (b, 8), slice (b, 8) to their sum after tanh, twice."""
    inner = [
        node("Add", ["state", "slice"], ["sum"]),
        node("Tanh", ["sum"], ["next"]),
        node("Identity", ["next"], ["out"]),
    ]
    if mean:
        inner[1:2] = [
            node("ReduceMean", ["sum"], ["mean"], axes=[0], keepdims=1),
            node("Sub", ["sum", "mean"], ["next"]),
        ]
    return graph(inner, ["state:float[b,8]", "slice:float[b,8]"], ["next:float[b,8]", "out:float[b,8]"])


def scanning(
    body: onnx.GraphProto, outputs: list[str], *, axis: int = 1, opset: int = 17, **more: Any
) -> onnx.ModelProto:
    nodes = [
        node("ReduceSum", ["x0", "second"], ["start"], keepdims=0),
        node("Scan", ["start", "x"], ["last", "steps"], body=body, num_scan_inputs=1, scan_input_axes=[axis],
             scan_output_axes=[axis], name="scan", **more),
    ]  # fmt: skip
    nodes.insert(0, node("Slice", ["x", "zero", "second", "second"], ["x0"]))
    return model(nodes, [X], outputs, {"zero": np.array([0]), "second": np.array([1])}, opset=opset)


STEPS = "steps:float[b,s,8]"


def test_the_steps_of_a_scan_go_forwards_through_padding() -> None:
    safe(scanning(scan_body(), [STEPS]), buckets())


def test_a_scan_whose_last_state_is_wanted_or_that_runs_backwards_is_refused() -> None:
    found = refused(scanning(scan_body(), [STEPS, "last:float[b,8]"]), buckets())
    assert [(each.node, each.axis) for each in found] == [("scan", "s")] and "last state" in found[0].why
    rows = Session(scanning(scan_body(), [STEPS, "last:float[b,8]"]), batching=Batching(batch="b", buckets={"b": [4]}))
    for batch in (1, 3):
        inputs = call(batch, 5)
        assert_same(
            rows(inputs),
            by_onnxruntime(scanning(scan_body(), [STEPS, "last:float[b,8]"]), inputs),
            rtol=1e-5,
            atol=1e-5,
        )
    backwards = scanning(scan_body(), [STEPS], scan_input_directions=[1])
    assert {each.axis for each in refused(backwards, buckets())} == {"s"}


def test_a_scan_whose_body_mixes_rows_names_the_operator_in_it() -> None:
    found = refused(scanning(scan_body(mean=True), [STEPS]), Batching(batch="b", buckets={"b": [4]}))
    assert [(each.op_type, each.axis) for each in found] == [("ReduceMean", "b")]
    along = scanning(graph(
        [node("Add", ["state", "slice"], ["next"]), node("Identity", ["next"], ["out"])],
        ["state:float[s,8]", "slice:float[s,8]"], ["next:float[s,8]", "out:float[s,8]"],
    ), ["steps:float[b,s,8]"], axis=0)  # fmt: skip
    assert "b" in {each.axis for each in refused(along, Batching(batch="b", buckets={"b": [4]}))}


def test_a_scan_whose_body_may_refuse_padding_is_refused() -> None:
    body = graph(
        [node("Cast", ["slice"], ["n"], to=7), node("Div", ["n", "n"], ["d"]), node("Cast", ["d"], ["out"], to=1),
         node("Add", ["state", "out"], ["next"])],
        ["state:float[b,8]", "slice:float[b,8]"], ["next:float[b,8]", "out:float[b,8]"],
    )  # fmt: skip
    found = refused(scanning(body, [STEPS]), Batching(buckets={"s": [8]}))
    assert found[0].node == "scan" and "Div" in found[0].why


def looping(
    body: list[Any], *, trips: Any = 3, carried: str = "float[b,s,8]", outputs: list[str] | None = None, **held: Any
) -> Any:
    inner = graph(
        body, ["i:int64[]", "on:bool[]", f"c:{carried}"],
        ["go:bool[]", f"d:{carried}", "e:float[b,s,8]"],
    )  # fmt: skip
    nodes = [node("Loop", ["trips", "", "x"], ["last", "each"], body=inner, name="loop")]
    if isinstance(trips, str):
        nodes = [
            node("Shape", ["x"], ["n"], start=int(trips), end=int(trips) + 1),
            node("Squeeze", ["n"], ["trips"]),
            *nodes,
        ]
    else:
        held["trips"] = np.array(trips)
    return model(nodes, [X], outputs or ["last:float[b,s,8]", "each:float[t,b,s,8]"], held)


BODY = [
    node("Identity", ["on"], ["go"]),
    node("MatMul", ["c", "w"], ["f"]),
    node("Tanh", ["f"], ["d"]),
    node("Identity", ["d"], ["e"]),
]
SQUARE = {"w": weights(HIDDEN, HIDDEN)}


def test_a_loop_of_row_by_row_work_carries_padding_along() -> None:
    safe(looping(BODY, **SQUARE), buckets())


def test_a_loop_that_mixes_is_named() -> None:
    mean = [node("Identity", ["on"], ["go"]), node("ReduceMean", ["c"], ["m"], axes=[1]), node("Sub", ["c", "m"], ["d"]),
            node("Identity", ["d"], ["e"])]  # fmt: skip
    found = refused(looping(mean), buckets())
    assert {(each.op_type, each.axis) for each in found} == {("ReduceMean", "s")}
    for dim, at in (("s", "1"), ("b", "0")):
        found = refused(looping(BODY, trips=at, **SQUARE), buckets())
        assert dim in {each.axis for each in found if each.op_type == "Loop"}
    ends = [node("ReduceSum", ["c"], ["t"], keepdims=0), node("Less", ["t", "limit"], ["go"]), *BODY[1:]]
    found = refused(looping(ends, **SQUARE, limit=np.float32(5)), Batching(batch="b", buckets={"b": [4]}))
    assert found[0].op_type == "ReduceSum"
    grows = [
        node("Identity", ["on"], ["go"]),
        node("Concat", ["c", "c"], ["d"], axis=1),
        node("Identity", ["c"], ["e"]),
    ]
    assert "s" in {each.axis for each in refused(looping(grows, outputs=["last:float[b,k,8]"]), buckets())}


def test_a_constant_that_a_loop_changes_is_no_constant_after_it() -> None:
    """The padding of x is 0 before the loop; after a trip it is not, and a sum over it would show that."""
    body = [node("Identity", ["on"], ["go"]), node("Add", ["c", "one"], ["d"]), node("Identity", ["d"], ["e"])]
    made = looping(body, outputs=["last:float[b,s,8]"], one=np.float32(1))
    total = helper.make_node("ReduceSum", ["last", "second"], ["y"], keepdims=0)
    made.graph.node.append(total)
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "second"))
    del made.graph.output[:]
    made.graph.output.append(value("y:float[b,8]"))
    assert refused(made, Batching(buckets={"s": [8]}))[0].op_type == "ReduceSum"
