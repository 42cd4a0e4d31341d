"""Sizes, counts and nesting from strangers: a typed error before anything is allocated, on the host and in programs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.compiler.support import Session, assert_right, graph, node, proto
from transmuter_async.errors import OperatorError

HUGE = 10**12
WAYS: list[dict[str, Any]] = [{}, {"min_segment_nodes": 1}, {"compiler": "eager"}, {"optimize": False}]


def computed(nodes: list[onnx.NodeProto], output: str, weights: dict[str, Any] | None = None) -> onnx.ModelProto:
    """`n: int64[]` and `v: int64[1]` are the sum of x, times `k`: known only when the graph runs."""
    return proto(
        [
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Cast", ["s"], ["whole"], to=7),
            node("Mul", ["whole", "k"], ["n"]),
            node("Reshape", ["n", "minus"], ["v"]),
            *nodes,
        ],
        ["x:float[a]"],
        [output],
        {
            "k": np.array(HUGE),
            "minus": np.array([-1]),
            "zero": np.array(0),
            "one": np.array(1),
            "ones": np.array([1]),
            "pair": np.array([0, 1], np.float32),
            "image": np.ones((1, 1, 2, 2), np.float32),
            **(weights or {}),
        },
    )


SIZED: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "Range": ([node("Range", ["zero", "n", "one"], ["y"])], "y:int64[b]"),
    "ConstantOfShape": ([node("ConstantOfShape", ["v"], ["y"])], "y:float[b]"),
    "Expand": ([node("Expand", ["pair", "p"], ["y"])], "y:float[b,c]"),
    "Tile": ([node("Tile", ["pair", "v"], ["y"])], "y:float[b]"),
    "Pad": ([node("Concat", ["v", "v"], ["p"], axis=0), node("Pad", ["pair", "p"], ["y"])], "y:float[b]"),
    "OneHot": ([node("OneHot", ["ones", "n", "pair"], ["y"])], "y:float[b,c]"),
    "Resize": (
        [node("Concat", ["ones", "ones", "v", "v"], ["p"], axis=0), node("Resize", ["image", "", "", "p"], ["y"])],
        "y:float[b,c,d,e]",
    ),
    "HannWindow": ([node("HannWindow", ["n"], ["y"])], "y:float[b]"),
}
SIZED["Expand"] = ([node("Concat", ["v", "ones"], ["p"], axis=0), *SIZED["Expand"][0]], "y:float[b,c]")


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("operator", SIZED)
def test_a_size_computed_at_run_time_is_held_to_the_budget(operator: str, options: dict[str, Any]) -> None:
    nodes, output = SIZED[operator]
    with pytest.raises(OperatorError, match=r"more than the budget of 1073741824"):
        Session(computed(nodes, output), **options)({"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("operator", ["Add", "MatMul", "Where"])
def test_what_broadcasting_makes_is_held_to_the_budget(operator: str, options: dict[str, Any]) -> None:
    if operator == "Where":
        step = [node("Greater", ["c", "d"], ["m"]), node("Where", ["m", "c", "d"], ["y"])]
    else:
        step = [node(operator, ["d", "c"], ["y"])]
    made = proto(
        [node("Unsqueeze", ["x", "zeroth"], ["c"]), node("Unsqueeze", ["x", "first"], ["d"]), *step],
        ["x:float[n]"],
        ["y:float[a,b]"],
        {"zeroth": np.array([0]), "first": np.array([1])},
    )
    with pytest.raises(OperatorError, match=r"has 10000000000 elements, more than the budget"):
        Session(made, **options)({"x": np.ones(100_000, np.float32)})


def counted(condition: list[onnx.NodeProto], *, grows: bool, emits: bool) -> onnx.ModelProto:
    step = node("Concat", ["a", "x"], ["a2"], axis=0) if grows else node("Add", ["a", "x"], ["a2"])
    body = graph(
        [*condition, step, *([node("Neg", ["i"], ["o"])] if emits else [])],
        ["i:int64[]", "c:bool[]", "a:float[b]"],
        ["c2:bool[]", "a2:float[b]", *(["o:int64[]"] if emits else [])],
    )
    outputs = ["y", "z"] if emits else ["y"]
    return computed([node("Loop", ["n", "", "x"], outputs, body=body)], "y:float[b]")


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("emits", [False, True])
def test_a_trip_count_that_nothing_else_ends_is_held_to_a_limit(grows: bool, emits: bool, options: dict[str, Any]) -> None:
    same = [node("Identity", ["c"], ["c2"])]
    always = [node("Constant", [], ["c2"], value=onnx.numpy_helper.from_array(np.array(True)))]
    for condition in (same, always):
        with pytest.raises(OperatorError, match=r"Loop 'y': .*(trips|trip count is above)"):
            Session(counted(condition, grows=grows, emits=emits), **options)({"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_huge_trip_count_with_a_condition_that_ends_the_loop_is_fine(options: dict[str, Any]) -> None:
    made = counted([node("Less", ["i", "three"], ["c2"])], grows=True, emits=False)
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(3), "three"))
    got = Session(made, **options)({"x": np.ones(2, np.float32)})["y"]
    assert got.shape == (2 * 5,)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("value", ["constant", "given", "outer"])
def test_a_loop_without_an_end_is_refused_before_its_first_trip(value: str, options: dict[str, Any]) -> None:
    condition = {
        "constant": [node("Constant", [], ["c2"], value=onnx.numpy_helper.from_array(np.array(True)))],
        "given": [node("Identity", ["c"], ["c2"])],
        "outer": [node("Identity", ["yes"], ["c2"])],
    }[value]
    body = graph(
        [*condition, node("Concat", ["a", "x"], ["a2"], axis=0)],
        ["i:int64[]", "c:bool[]", "a:float[b]"],
        ["c2:bool[]", "a2:float[b]"],
    )
    made = proto([node("Loop", ["", "yes", "x"], ["y"], body=body)], ["x:float[n]"], ["y:float[b]"], {"yes": np.array(True)})
    with pytest.raises(OperatorError, match="neither a trip count nor a condition that ends it"):
        Session(made, **options)({"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_trip_count_or_condition_of_two_elements_is_refused_in_every_form(options: dict[str, Any]) -> None:
    body = graph(
        [node("Identity", ["c"], ["c2"]), node("NonZero", ["a"], ["w"]), node("Add", ["a", "a"], ["a2"])],
        ["i:int64[]", "c:bool[]", "a:float[b]"],
        ["c2:bool[]", "a2:float[b]"],
    )
    made = proto([node("Loop", ["m", "", "x"], ["y"], body=body)], ["x:float[n]", "m:int64[k]"], ["y:float[b]"])
    with pytest.raises(OperatorError, match=r"trip count has shape [\[(]2"):
        Session(made, **options)({"x": np.ones(2, np.float32), "m": np.array([2, 3])})


@pytest.mark.parametrize("depth", [6, 20])
def test_ifs_in_ifs_take_the_time_of_their_nodes(depth: int) -> None:
    """Each branch is traced once. Twice would be a million times at this depth."""
    inner = graph([node("Neg", ["x"], ["b0"])], [], ["b0:float[n]"])
    for level in range(1, depth):
        other = graph([node("Abs", ["x"], [f"e{level}"])], [], [f"e{level}:float[n]"])
        inner = graph(
            [
                node("Add", ["s", f"w{level}"], [f"s{level}"]),
                node("Greater", [f"s{level}", "zero"], [f"c{level}"]),
                node("If", [f"c{level}"], [f"b{level}"], then_branch=inner, else_branch=other),
            ],
            [],
            [f"b{level}:float[n]"],
        )
    made = proto(
        [
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Greater", ["s", "zero"], ["c"]),
            node("If", ["c"], ["y"], then_branch=inner, else_branch=graph([node("Sin", ["x"], ["z"])], [], ["z:float[n]"])),
        ],
        ["x:float[n]"],
        ["y:float[n]"],
        {"zero": np.float32(0), **{f"w{level}": np.float32(-level) for level in range(1, depth)}},
    )
    calls = [{"x": np.full(3, value, np.float32)} for value in (-1, 0.5, 2, 100)]
    session = assert_right(made, calls)
    assert session.prepared.graph_break is False


FOLD = """
import json, resource, sys
import numpy as np
from tests.compiler.support import Session, node, proto

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

bombs = {
    "filled": ([node("ConstantOfShape", ["size"], ["a"])], {"size": np.array([2**28])}),
    "counted": ([node("Range", ["zero", "many", "one"], ["r"]), node("Cast", ["r"], ["a"], to=1)],
        {"zero": np.array(0), "many": np.array(2**28), "one": np.array(1)}),
    "outer": ([node("Add", ["row", "column"], ["a"])],
        {"row": np.ones((1, 20_000), np.float32), "column": np.ones((20_000, 1), np.float32)}),
    "chain": ([node("Expand", ["f", "size"], ["e"]), node("Sin", ["e"], ["a"])],
        {"f": np.ones(1, np.float32), "size": np.array([2**28])}),
}
nodes, weights = bombs[sys.argv[1]]
made = proto([*nodes, node("ReduceMax", ["a"], ["m"], keepdims=0), node("Add", ["x", "m"], ["y"])],
    ["x:float[n]"], ["y:float[n]"], weights)
before = peak()
Session(made)
print(json.dumps(peak() - before))
"""


@pytest.mark.parametrize("bomb", ["filled", "counted", "outer", "chain"])
def test_folding_allocates_no_more_than_its_budget(bomb: str) -> None:
    """A few bytes of the file stand for a gigabyte of zeros: nothing of that size is made only to be thrown away."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FOLD, bomb],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30)),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 300, "MiB that preparing the model took"
