"""Whole small models whose values decide what runs: detection, sequences, scans, loops in loops, decoders. Against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.compiler.support import Session, assert_right, assert_same, by_onnxruntime, graph, node, proto

RNG = np.random.default_rng(3)
BOTH = (1, 20)
"""`min_segment_nodes`: everything between breaks is a program, or small pieces run on the host."""


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(*shape: int) -> np.ndarray:
    return RNG.integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize("minimum", BOTH)
def test_boxes_that_survive_suppression_are_looked_up(minimum: int) -> None:
    made = proto(
        [
            node("Abs", ["raw"], ["corners"]),
            node("CumSum", ["corners", "two"], ["boxes"]),
            node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["kept"]),
            node("Gather", ["kept", "two"], ["which"], axis=1),
            node("Squeeze", ["boxes", "first"], ["all"]),
            node("Gather", ["all", "which"], ["found"], axis=0),
            node("Sin", ["found"], ["y"]),
        ],
        ["raw:float[1,n,4]", "scores:float[1,c,n]"],
        ["kept:int64[k,3]", "y:float[k,4]"],
        {
            "two": np.array(2),
            "first": np.array([0]),
            "most": np.array([3]),
            "overlap": np.array([0.5], np.float32),
            "least": np.array([0.2], np.float32),
        },
    )
    calls = [
        {"raw": floats(1, count, 4), "scores": RNG.random((1, 2, count), np.float32)} for count in (6, 6, 9, 1)
    ]
    calls.append({"raw": floats(1, 4, 4), "scores": np.zeros((1, 2, 4), np.float32)})  # none survives
    session = assert_right(made, calls, min_segment_nodes=minimum)
    assert session.prepared.graph_break is True


@pytest.mark.parametrize("minimum", BOTH)
def test_a_sequence_map(minimum: int) -> None:
    body = graph(
        [node("Mul", ["a", "scale"], ["b"]), node("ReduceSum", ["b"], ["s"], keepdims=1)],
        ["a:float[k]", "scale:float[]"],
        ["b:float[k]", "s:float[1]"],
    )
    made = proto(
        [
            node("SplitToSequence", ["x", "sizes"], ["parts"], axis=0),
            node("SequenceMap", ["parts", "f"], ["scaled", "sums"], body=body),
            node("ConcatFromSequence", ["scaled"], ["y"], axis=0),
            node("ConcatFromSequence", ["sums"], ["z"], axis=0),
        ],
        ["x:float[n]", "sizes:int64[p]", "f:float[]"],
        ["y:float[n]", "z:float[p]"],
    )
    calls = [
        {"x": whole(sum(sizes)), "sizes": np.array(sizes), "f": np.float32(2)} for sizes in ([2, 3], [1, 1, 4], [5])
    ]
    assert_right(made, calls, min_segment_nodes=minimum)


@pytest.mark.parametrize("minimum", BOTH)
@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_scan_whose_body_breaks_and_sees_outer_values(minimum: int, length: int) -> None:
    """Rows above the level are summed: what NonZero finds differs from row to row."""
    body = graph(
        [
            node("Greater", ["row", "level"], ["mask"]),
            node("NonZero", ["mask"], ["where"]),
            node("Squeeze", ["where", "first"], ["places"]),
            node("Gather", ["row", "places"], ["picked"]),
            node("ReduceSum", ["picked"], ["sum"], keepdims=0),
            node("Add", ["state", "sum"], ["after"]),
            node("Identity", ["after"], ["out"]),
        ],
        ["state:float[]", "row:float[4]"],
        ["after:float[]", "out:float[]"],
    )
    made = proto(
        [
            node("ReduceMean", ["x"], ["level"], keepdims=0),
            node("Scan", ["zero", "x"], ["last", "all"], body=body, num_scan_inputs=1),
        ],
        ["x:float[t,4]"],
        ["last:float[]", "all:float[t]"],
        {"zero": np.float32(0), "first": np.array([0])},
    )
    assert_right(made, [{"x": whole(length, 4)} for _ in range(2)], min_segment_nodes=minimum)


def loop(body: onnx.GraphProto, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
    return node("Loop", inputs, outputs, body=body)


@pytest.mark.parametrize("minimum", BOTH)
def test_a_loop_in_a_loop_that_breaks_inside_and_sees_values_of_all_graphs(minimum: int) -> None:
    inner = graph(
        [
            node("Add", ["b", "x"], ["b1"]),
            node("Greater", ["b1", "outer_i"], ["mask"]),
            node("Compress", ["b1", "mask"], ["some"], axis=0),
            node("ReduceSum", ["some"], ["total"], keepdims=0),
            node("Less", ["total", "limit"], ["more"]),
            node("Identity", ["b1"], ["b_out"]),
            node("Size", ["some"], ["count"]),
        ],
        ["j:int64[]", "cj:bool[]", "b:float[n]"],
        ["more:bool[]", "b_out:float[n]", "count:int64[]"],
    )
    outer = graph(
        [
            node("Cast", ["i"], ["outer_i"], to=TensorProto.FLOAT),
            node("Add", ["i", "one"], ["trips"]),
            loop(inner, ["trips", "", "a"], ["a_out", "counts"]),
            node("ReduceSum", ["counts"], ["seen"], keepdims=0),
            node("Identity", ["ci"], ["on"]),
        ],
        ["i:int64[]", "ci:bool[]", "a:float[n]"],
        ["on:bool[]", "a_out:float[n]", "seen:int64[]"],
    )
    made = proto(
        [loop(outer, ["m", "", "x"], ["y", "z"]), node("Neg", ["y"], ["w"])],
        ["x:float[n]", "m:int64[]"],
        ["w:float[n]", "z:int64[t]"],
        {"one": np.array(1), "limit": np.float32(6)},
    )
    calls = [{"x": whole(size), "m": np.array(trips)} for size, trips in ((3, 2), (3, 0), (5, 4), (0, 2), (3, 1))]
    assert_right(made, calls, min_segment_nodes=minimum)


@pytest.mark.parametrize("minimum", BOTH)
@pytest.mark.parametrize("where", ["then", "both", "nested"])
def test_breaks_inside_branches(where: str, minimum: int) -> None:
    def breaking(word: str) -> onnx.GraphProto:
        return graph(
            [
                node("NonZero", ["h"], [f"{word}w"]),
                node("Squeeze", [f"{word}w", "first"], [f"{word}p"]),
                node("Gather", ["h", f"{word}p"], [f"{word}g"]),
                *[node("Tanh", [f"{word}{'g' if i == 0 else i - 1}"], [f"{word}{i}"]) for i in range(22)],
            ],
            [],
            [f"{word}21:float[k]"],
        )

    plain = graph([node("Concat", ["h", "h"], ["pl"], axis=0)], [], ["pl:float[k]"])
    nested = graph(
        [
            node("Less", ["s", "low"], ["deep"]),
            node("If", ["deep"], ["nest"], then_branch=breaking("n"), else_branch=breaking("m")),
        ],
        [],
        ["nest:float[k]"],
    )
    branches: dict[str, Any] = {
        "then": {"then_branch": breaking("a"), "else_branch": plain},
        "both": {"then_branch": breaking("a"), "else_branch": breaking("b")},
        "nested": {"then_branch": breaking("a"), "else_branch": nested},
    }[where]
    made = proto(
        [
            node("Relu", ["x"], ["h"]),
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Greater", ["s", "zero"], ["c"]),
            node("If", ["c"], ["v"], **branches),
            node("Cos", ["v"], ["y"]),
        ],
        ["x:float[n]"],
        ["y:float[k]"],
        {"zero": np.float32(0), "low": np.float32(-3), "first": np.array([0])},
    )
    rows = [[1, 2, -1], [-1, -1, 1], [-5, 2, 0], [3, 0, 0], [0, 0, 0], [-5, 2, 1]]
    assert_right(made, [{"x": np.array(row, np.float32)} for row in rows], min_segment_nodes=minimum)


@pytest.mark.parametrize("minimum", BOTH)
def test_a_resize_to_sizes_that_the_data_decide(minimum: int) -> None:
    made = proto(
        [
            node("ReduceMax", ["x"], ["top"], keepdims=0),
            node("Cast", ["top"], ["side"], to=TensorProto.INT64),
            node("Unsqueeze", ["side", "first"], ["edge"]),
            node("Concat", ["ones", "edge", "edge"], ["sizes"], axis=0),
            node("Resize", ["x", "", "", "sizes"], ["big"], mode="linear"),
            node("Sin", ["big"], ["y"]),
        ],
        ["x:float[1,1,h,w]"],
        ["y:float[1,1,a,b]"],
        {"first": np.array([0]), "ones": np.array([1, 1])},
    )
    calls = []
    for top in (4, 7, 4, 2):
        x = RNG.integers(0, 2, (1, 1, 3, 5)).astype(np.float32)
        x[0, 0, 0, 0] = top
        calls.append({"x": x})
    assert_right(made, calls, min_segment_nodes=minimum)


def greedy(steps_after: int = 0) -> onnx.ModelProto:
    """A generation loop, as exporters write one: each trip embeds the last token, scores all, takes the best, stops at 0."""
    table = RNG.integers(-3, 4, (6, 4)).astype(np.float32)
    head = RNG.integers(-3, 4, (4, 6)).astype(np.float32)
    body = graph(
        [
            node("SequenceAt", ["tokens", "last"], ["token"]),
            node("Gather", ["table", "token"], ["embedded"], axis=0),
            node("Add", ["state", "embedded"], ["mixed"]),
            *[node("Neg", [f"m{i}" if i else "mixed"], [f"m{i + 1}"]) for i in range(steps_after)],
            node("MatMul", [f"m{steps_after}" if steps_after else "mixed", "head"], ["scores"]),
            node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
            node("SequenceInsert", ["tokens", "best"], ["more"]),
            node("Greater", ["best", "end"], ["alive"]),
            node("Squeeze", ["alive", "first"], ["goes_on"]),
            node("Identity", ["mixed"], ["state_out"]),
        ],
        [],
        [],
    )
    sequence = helper.make_tensor_sequence_value_info
    body.input.extend(
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [1, 4]),
            sequence("tokens", TensorProto.INT64, [1]),
        ]
    )
    body.output.extend(
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [1, 4]),
            sequence("more", TensorProto.INT64, [1]),
        ]
    )
    return proto(
        [
            node("SequenceConstruct", ["start"], ["begun"]),
            loop(body, ["most", "", "state0", "begun"], ["state1", "done"]),
            node("ConcatFromSequence", ["done"], ["ids"], axis=0),
            node("Cast", ["ids"], ["y"], to=TensorProto.FLOAT),
        ],
        ["start:int64[1]", "state0:float[1,4]", "most:int64[]"],
        ["ids:int64[k]", "y:float[k]"],
        {"table": table, "head": head, "last": np.array(-1), "end": np.array([0]), "first": np.array([0])},
    )


@pytest.mark.parametrize("steps_after", [0, 24])
def test_a_generation_loop_that_collects_its_tokens_in_a_sequence(steps_after: int) -> None:
    """Built here: random whole weights, so that the best token is the same for every runtime."""
    made = greedy(steps_after)
    calls = [
        {"start": np.array([token]), "state0": whole(1, 4), "most": np.array(most)}
        for token, most in ((1, 8), (2, 8), (3, 0), (4, 1), (5, 12))
    ]
    session = assert_right(made, calls)
    lengths = {by_onnxruntime(made, inputs)["ids"].shape for inputs in calls}
    assert len(lengths) >= 3, "the loops end after different trips"
    assert session.prepared.graph_break is True


def decoder() -> onnx.ModelProto:
    """A merged decoder as Optimum exports one: one If on `use_cache_branch` around everything, present = past + new."""

    def attend(word: str, cached: bool) -> list[Any]:
        keys = [node("MatMul", ["hidden", "wk"], [f"{word}k_new"])]
        if cached:
            keys.append(node("Concat", ["past", f"{word}k_new"], [f"{word}present"], axis=1))
        else:
            keys.append(node("Identity", [f"{word}k_new"], [f"{word}present"]))
        return [
            *keys,
            node("Transpose", [f"{word}present"], [f"{word}t"], perm=[0, 2, 1]),
            node("MatMul", ["hidden", f"{word}t"], [f"{word}raw"]),
            node("Softmax", [f"{word}raw"], [f"{word}weights"], axis=-1),
            node("MatMul", [f"{word}weights", f"{word}present"], [f"{word}mixed"]),
            *[node("Tanh", [f"{word}{'mixed' if i == 0 else i - 1}"], [f"{word}{i}"]) for i in range(20)],
            node("MatMul", [f"{word}19", "head"], [f"{word}logits"]),
        ]

    types = ("logits:float[b,s,6]", "present:float[b,t,4]")
    branches = {
        f"{name}_branch": graph(attend(word, cached), [], [f"{word}{kind}" for kind in types])
        for name, word, cached in (("then", "c_", True), ("else", "p_", False))
    }
    return proto(
        [
            node("Gather", ["table", "input_ids"], ["hidden"], axis=0),
            node("Squeeze", ["use_cache_branch"], ["use"]),
            node("If", ["use"], ["logits", "present"], **branches),
        ],
        ["input_ids:int64[b,s]", "past:float[b,p,4]", "use_cache_branch:bool[1]"],
        ["logits:float[b,s,6]", "present:float[b,t,4]"],
        {"table": floats(6, 4), "wk": floats(4, 4), "head": floats(4, 6)},
    )


@pytest.mark.parametrize("options", [{}, {"min_segment_nodes": 1}, {"force_breaks": range(1, 10_000, 2)}])
def test_a_merged_decoder_with_a_cache_branch_and_a_past_of_no_tokens(options: dict[str, Any]) -> None:
    made = decoder()
    session = Session(made, **options)
    for prompt in (3, 1, 5):
        ids, past, use = np.arange(prompt)[None] % 6, np.zeros((1, 0, 4), np.float32), False
        for _ in range(4):
            inputs = {"input_ids": ids, "past": past, "use_cache_branch": np.array([use])}
            want = by_onnxruntime(made, inputs)
            got = session(inputs)
            assert_same(got, want)
            ids = want["logits"][:, -1:].argmax(-1)
            past, use = want["present"], True
    if not options:
        assert session.prepared.graph_break is False
        # A static value where the branches differ in shape; one `cond` where they agree, as they do for a first token.
        by_value = {each.layout.values for each in session.cache.segments()}
        assert by_value == {("use_cache_branch",), ()}
        session(inputs)
        assert session.told() == ["CacheHit"]
