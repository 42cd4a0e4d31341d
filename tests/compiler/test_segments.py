"""Segments and breaks: where a graph stops, what it keeps, and that every call is right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compiler.support import Session, assert_right, assert_same, by_onnxruntime, graph, node, proto
from transmuter_async.compiler import explain, pinned
from transmuter_async.errors import BreakRefused, InputError

RNG = np.random.default_rng(1)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def chain(start: str, stop: str, count: int, word: str) -> list[object]:
    """`count` nodes in a row, enough for a segment that is compiled."""
    names = [start, *(f"{word}{i}" for i in range(count - 1)), stop]
    ops = ["Tanh", "Neg", "Sin"]
    return [node(ops[i % 3], [names[i]], [names[i + 1]], name=f"{word}_{i}") for i in range(count)]


def broken(nodes_after: int = 25) -> object:
    """Rows of x whose mask is set, with enough before and after to be compiled."""
    return proto(
        [
            *chain("x", "h", 25, "before"),
            node("ReduceSum", ["h", "one"], ["t"], keepdims=0),
            node("Greater", ["t", "zero"], ["mask"]),
            node("NonZero", ["mask"], ["where"], name="find"),
            node("Transpose", ["where"], ["rows"]),
            node("GatherND", ["h", "rows"], ["picked"]),
            *chain("picked", "y", nodes_after, "after"),
        ],
        ["x:float[n,3]"],
        ["y:float[m,3]"],
        {"one": np.array([1]), "zero": np.array(0, np.float32)},
    )


def test_a_graph_without_breaks_is_one_program():
    session = assert_right(proto(chain("x", "y", 5, "n"), ["x:float[n]"], ["y:float[n]"]), [{"x": floats(3)}])
    assert session.told() == ["CacheHit"]
    assert session.prepared.graph_break is False


def test_a_break_splits_the_graph_and_the_second_call_follows_the_plan():
    session = Session(broken())
    x = floats(6, 3)
    want = by_onnxruntime(broken(), {"x": x})
    assert_same(session({"x": x}), want)
    assert session.told() == [
        *("CacheMiss", "SegmentStarted", "SegmentReady"),
        *("BreakStarted", "BreakDone"),
        *("CacheMiss", "SegmentStarted", "SegmentReady"),
    ]
    first = session.facts[2]
    assert (first.position, first.stop, first.compiled) == (0, 27, True)
    assert first.reason == "NonZero: output shape depends on values"
    assert_same(session({"x": x}), want)
    assert session.told() == ["CacheHit", "BreakStarted", "BreakDone", "CacheHit"]
    assert (session.facts[1].position, session.facts[1].node, session.facts[1].op_type) == (27, "find", "NonZero")


def test_other_values_are_right_and_compile_only_for_new_shapes():
    session = Session(broken())
    made = broken()
    seen = set()
    for _ in range(12):
        x = floats(5, 3)
        want = by_onnxruntime(made, {"x": x})
        assert_same(session({"x": x}), want)
        count = want["y"].shape[0]
        assert session.compiled() == (0 if count in seen else (2 if not seen else 1))
        seen.add(count)
    assert len(seen) > 2


def test_small_segments_after_a_break_run_on_the_host_and_never_compile():
    session = Session(broken(nodes_after=3))
    for _ in range(4):
        x = floats(7, 3)
        assert_same(session({"x": x}), by_onnxruntime(broken(3), {"x": x}))
    assert all(fact.compiled is False for fact in session.facts if type(fact).__name__ == "SegmentReady")
    assert sum(segment.program is not None for segment in session.cache.segments()) == 1


def test_breaks_can_be_refused():
    session = Session(broken(), breaks="error")
    with pytest.raises(BreakRefused, match=r"NonZero 'find'.*needs"):
        session({"x": floats(6, 3)})


def test_explain_tells_where_and_why():
    session = Session(broken())
    assert "Nothing is compiled yet" in str(explain(session.prepared, session.cache))
    session({"x": floats(6, 3)})
    told = explain(session.prepared, session.cache)
    [found] = told.breaks
    assert (found.id, found.position, found.node, found.op_type) == ("B1", 27, "find", "NonZero")
    assert found.value == "mask" and found.producer is not None
    assert [row.kind for row in told.segments] == ["program", "program"]
    assert "NonZero 'find'" in str(told)


def test_an_input_read_on_the_host_becomes_static_for_its_value():
    branch = {
        "then_branch": graph([node("Add", ["x", "x"], ["a"])], [], ["a:float[n]"]),
        "else_branch": graph([node("Concat", ["x", "x"], ["b"], axis=0)], [], ["b:float[m]"]),
    }
    made = proto(
        [node("Equal", ["sr", "k"], ["c"]), node("If", ["c"], ["y"], **branch)],
        ["x:float[n]", "sr:int64[]"],
        ["y:float[k]"],
        {"k": np.array(16000)},
    )
    x = floats(4)
    session = assert_right(made, [{"x": x, "sr": np.array(rate)} for rate in (16000, 8000, 16000, 48000)])
    assert session.prepared.graph_break is False
    session({"x": x, "sr": np.array(1)})
    ready = next(fact for fact in session.facts if type(fact).__name__ == "SegmentReady")
    assert ready.host_values == ()  # known since the first call
    assert {segment.layout.values for segment in session.cache.segments()} == {("sr",)}
    assert [name for name, _ in session.cache.segments()[0].shapes] == ["x"]


def test_a_static_input_that_is_named_from_the_start():
    made = proto([node("Reshape", ["x", "s"], ["y"])], ["x:float[n]", "s:int64[k]"], ["y:float[...]"])
    calls = [{"x": floats(12), "s": np.array(s)} for s in ([3, 4], [2, -1], [12])]
    # Of a vector of unknown length it is not plain that it holds a shape: the graph breaks there ...
    assert_right(made, calls)
    # ... unless the caller says so.
    session = assert_right(made, calls, static_inputs=("s",))
    assert session.prepared.graph_break is False


def test_the_least_recently_used_segment_goes():
    session = Session(proto(chain("x", "y", 3, "n"), ["x:float[n]"], ["y:float[n]"]), cache_size=2)
    for size in (1, 2):
        session({"x": floats(size)})
    session({"x": floats(1)})
    session({"x": floats(3)})
    evicted = [fact for fact in session.facts if type(fact).__name__ == "CacheEvict"]
    assert [(fact.shapes, fact.cache_size) for fact in evicted] == [((("x", ((2,), "float")),), 2)]
    session({"x": floats(1)})
    assert session.told() == ["CacheHit"]


@pytest.mark.parametrize(
    ("op", "attributes", "extra"),
    [
        ("NonZero", {}, {}),
        ("Compress", {"axis": 0}, {"c": np.array([True, False, True])}),
        ("Unique", {"axis": 0}, {}),
    ],
)
def test_operators_whose_output_shape_depends_on_values_break(op, attributes, extra):
    inputs = ["x:float[n,3]", *(f"{name}:bool[k]" for name in extra)]
    output = "y:int64[a,b]" if op == "NonZero" else "y:float[a,b]"
    made = proto(
        [node("Abs", ["x"], ["h"]), node(op, ["h", *extra], ["v"], **attributes), node("Identity", ["v"], ["y"])],
        inputs,
        [output],
    )
    session = assert_right(made, [{"x": np.round(floats(3, 3)), **extra} for _ in range(3)])
    assert session.prepared.graph_break is True


@pytest.mark.parametrize(
    ("nodes", "output"),
    [
        ([node("Range", ["zero", "n", "step"], ["y"])], "y:int64[k]"),
        ([node("ConstantOfShape", ["v"], ["y"])], "y:float[k]"),
        ([node("Expand", ["one", "v"], ["y"])], "y:float[k]"),
        ([node("Tile", ["f", "v"], ["y"])], "y:float[k]"),
        ([node("TopK", ["f", "v"], ["y", "i"])], "y:float[k]"),
        ([node("OneHot", ["v", "n", "pair"], ["y"])], "y:float[k,m]"),
        ([node("Slice", ["f", "zeros", "v"], ["y"])], "y:float[k]"),
        ([node("Pad", ["f", "twice"], ["y"])], "y:float[k]"),
        ([node("Split", ["f", "halves"], ["y", "z"])], "y:float[k]"),
        ([node("Reshape", ["f", "negative"], ["y"])], "y:float[k]"),
    ],
)
def test_computed_arguments_that_decide_shapes(nodes, output):
    """A count computed from the data ends the segment before the node that needs it, and every call is right."""
    made = proto(
        [
            node("Greater", ["x", "null"], ["g"]),
            node("Cast", ["g"], ["gi"], to=7),
            node("ReduceSum", ["gi"], ["n"], keepdims=0),
            node("Reshape", ["n", "minus"], ["v"]),
            node("Sub", ["size", "v"], ["others"]),
            node("Concat", ["v", "others"], ["halves"], axis=0),
            node("Concat", ["v", "v"], ["twice"], axis=0),
            node("Sub", ["v", "v"], ["zeros"]),
            node("Sub", ["zeros", "ones"], ["negative"]),
            node("Sin", ["x"], ["f"]),
            *nodes,
        ],
        ["x:float[8]"],
        [output],
        {
            "null": np.float32(0),
            "minus": np.array([-1]),
            "size": np.array([8]),
            "ones": np.array([1]),
            "zero": np.array(0),
            "step": np.array(1),
            "one": np.ones(1, np.float32),
            "pair": np.array([0, 1], np.float32),
        },
    )
    for minimum in (1, 20):
        session = Session(made, min_segment_nodes=minimum)
        host = Session(made, compiler="eager")
        for _ in range(6):
            x = floats(8)
            x[0] = 1
            want = by_onnxruntime(made, {"x": x})
            assert_same(session({"x": x}), want)
            assert_same(host({"x": x}), want)
        assert session.prepared.graph_break is True


@pytest.mark.parametrize("equal", [True, False])
def test_an_if_on_a_traced_condition(equal: bool):
    other = node("Neg", ["h"], ["b"]) if equal else node("Concat", ["h", "h"], ["b"], axis=0)
    made = proto(
        [
            node("Sin", ["x"], ["h"]),
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Greater", ["s", "zero"], ["c"]),
            node(
                "If",
                ["c"],
                ["v"],
                then_branch=graph([node("Add", ["h", "h"], ["a"])], [], ["a:float[n]"]),
                else_branch=graph([other], [], ["b:float[m]"]),
            ),
            node("Cos", ["v"], ["y"]),
        ],
        ["x:float[n]"],
        ["y:float[k]"],
        {"zero": np.float32(0)},
    )
    session = assert_right(made, [{"x": np.full(3, v, np.float32)} for v in (1, -1, 2)], min_segment_nodes=1)
    assert session.prepared.graph_break is not equal, "branches that agree become one program"


def loop_body(extra: list[object], outputs: list[str]) -> object:
    return graph(
        [
            node("Add", ["acc", "step"], ["next"]),
            node("ReduceSum", ["next"], ["total"], keepdims=0),
            node("Less", ["total", "limit"], ["going"]),
            *extra,
        ],
        ["i:int64[]", "c:bool[]", "acc:float[n]"],
        ["going:bool[]", "next:float[n]", *outputs],
    )


@pytest.mark.parametrize("trips", [0, 1, 5])
@pytest.mark.parametrize("scan", [False, True])
def test_loops_with_outer_values_early_stop_and_scan_outputs(trips: int, scan: bool):
    extra = [node("Mul", ["next", "acc"], ["out"])] if scan else []
    made = proto(
        [
            node("Abs", ["x"], ["step"]),
            node("Loop", ["n", "go", "x"], ["y", *(["all"] if scan else [])], body=loop_body(extra, ["out:float[n]"] * scan)),
        ],
        ["x:float[n]", "n:int64[]", "go:bool[]", "limit:float[]"],
        ["y:float[n]", *(["all:float[t,n]"] if scan else [])],
    )
    x = np.array([0.5, 1.5], np.float32)
    calls = [
        {"x": x, "n": np.array(trips), "go": np.array(go), "limit": np.array(limit, np.float32)}
        for go in (True, False)
        for limit in (100, 7)
    ]
    if not scan:
        for minimum in (1, 20):
            assert_right(made, calls, min_segment_nodes=minimum)
        return
    for options in ({"min_segment_nodes": 1}, {}, {"compiler": "eager"}):
        session = Session(made, **options)
        for inputs in calls:
            got, want = session(inputs), by_onnxruntime(made, inputs)
            if not len(want["all"]):  # onnxruntime says (0, 0) where a dimension has only a name
                want["all"] = np.zeros((0, 2), np.float32)
            assert_same(got, want)


def test_a_loop_whose_carried_shape_grows():
    body = graph(
        [node("Concat", ["acc", "x"], ["next"], axis=0), node("Identity", ["c"], ["going"])],
        ["i:int64[]", "c:bool[]", "acc:float[k]"],
        ["going:bool[]", "next:float[m]"],
    )
    made = proto([node("Loop", ["n", "", "x"], ["y"], body=body)], ["x:float[n]", "n:int64[]"], ["y:float[k]"])
    for minimum in (1, 20):
        assert_right(made, [{"x": floats(2), "n": np.array(n)} for n in (0, 1, 4)], min_segment_nodes=minimum)


def test_the_same_tensor_on_both_sides_of_three_breaks_and_outputs_that_are_inputs():
    nodes: list[object] = [node("Sin", ["x"], ["h"])]
    for step in range(3):
        nodes += [
            node("NonZero", ["h" if step == 0 else f"p{step - 1}"], [f"w{step}"]),
            node("Cast", [f"w{step}"], [f"f{step}"], to=1),
            node("ReduceSum", [f"f{step}"], [f"s{step}"], keepdims=0),
            node("Mul", ["h", f"s{step}"], [f"p{step}"]),
        ]
    nodes += [node("Identity", ["x"], ["same"]), node("Add", ["p2", "h"], ["y"])]
    made = proto(nodes, ["x:float[n]"], ["y:float[n]", "same:float[n]"])
    for minimum in (1, 20):
        session = assert_right(made, [{"x": floats(4)}, {"x": np.zeros(4, np.float32)}], min_segment_nodes=minimum)
        assert session.told().count("BreakStarted") == 3


def test_a_break_as_first_and_last_node():
    made = proto([node("NonZero", ["x"], ["w"])], ["x:float[n]"], ["w:int64[1,m]"])
    session = assert_right(made, [{"x": np.array([0, 1, 2], np.float32)}])
    assert session.told() == ["BreakStarted", "BreakDone"]


def test_strings_in_the_middle():
    made = proto(
        [
            node("Sin", ["x"], ["h"]),
            node("Cast", ["ids"], ["text"], to=8),
            node("StringConcat", ["text", "more"], ["y"]),
            node("Cos", ["h"], ["z"]),
        ],
        ["x:float[n]", "ids:int64[n]", "more:string[n]"],
        ["y:string[n]", "z:float[n]"],
        opset=20,
    )
    for minimum in (1, 20):
        session = Session(made, min_segment_nodes=minimum)
        for text in ("a", "b"):
            x = floats(2)
            got = session({"x": x, "ids": np.array([1, 2]), "more": [text, "ü"]})
            assert_same(got, {"y": np.array([f"1{text}", "2ü"], object), "z": np.cos(np.sin(x))})


def test_outputs_can_be_chosen_and_the_rest_is_not_computed():
    made = proto(
        [node("Sin", ["x"], ["a"]), node("NonZero", ["x"], ["w"])], ["x:float[n]"], ["a:float[n]", "w:int64[1,m]"]
    )
    x = floats(3)
    session = Session(made, outputs=("a",))
    assert_same(session({"x": x}), {"a": np.sin(x)})
    assert session.prepared.graph_break is False
    with pytest.raises(InputError, match=r"\['nope'\] are no outputs.*'a', 'w'"):
        Session(made, outputs=("nope",))


def test_random_nodes_draw_anew_on_each_call_and_again_by_seed_on_every_tier():
    made = proto(
        [node("RandomNormalLike", ["x"], ["r"], name="noise"), node("Add", ["x", "r"], ["y"])], ["x:float[n]"], ["y:float[n]"]
    )
    x = np.zeros(64, np.float32)
    session, host = Session(made), Session(made, compiler="eager")
    one, two, again = (session({"x": x}, seed=s)["y"] for s in (1, 2, 1))
    assert session.told() == ["CacheHit"], "the seed is an argument of the program"
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, two)
    np.testing.assert_allclose(host({"x": x}, seed=1)["y"], one, rtol=1e-5, atol=1e-6)


def test_a_cold_call_is_answered_on_the_host_and_tells_what_it_wants():
    made = broken()
    session = Session(made, cold="interpret")
    xs = [floats(6, 3) for _ in range(2)]
    want = [by_onnxruntime(made, {"x": x}) for x in xs]

    def call(x: np.ndarray) -> tuple[dict[str, np.ndarray], object]:
        session.facts = []
        execution = session.prepared.start(session.prepared.take_inputs({"x": x}), seed=0, device=False)
        with pinned():
            step = execution.advance(session.cache, session.facts.append)
        return step.outputs, step

    tiers = []
    for _ in range(3):
        got, step = call(xs[0])
        assert_same(got, want[0])
        tiers.append((step.tier, session.told(), len(step.wanted)))
        for job in step.wanted:  # compiled behind, swapped in for the next call
            session.cache.put(job.run(session.facts.append), session.facts.append)
    assert tiers == [
        ("interpreted", ["CacheMiss"], 1),
        ("mixed", ["CacheHit", "BreakStarted", "BreakDone", "CacheMiss"], 1),
        ("compiled", ["CacheHit", "BreakStarted", "BreakDone", "CacheHit"], 0),
    ]
    got, step = call(xs[1])
    assert_same(got, want[1])


def test_a_break_that_no_segment_leads_to_is_explained_and_can_be_refused():
    made = proto([node("NonZero", ["x"], ["w"], name="first")], ["x:float[n]"], ["w:int64[1,m]"])
    x = np.array([0, 1, 2], np.float32)
    session = Session(made)
    session({"x": x})
    [found] = explain(session.prepared, session.cache).breaks
    assert (found.id, found.node, found.value, found.producer) == ("B1", "first", "x", None)
    assert session.prepared.graph_break is True
    with pytest.raises(BreakRefused, match="NonZero 'first'"):
        Session(made, breaks="error")({"x": x})


def test_what_a_small_segment_knows_from_shapes_is_known_to_the_next_one():
    """The sizes come out of a segment too small for a program; the Reshape after the second break needs them."""
    made = proto(
        [
            node("NonZero", ["x"], ["w"]),
            node("Cast", ["w"], ["f"], to=1),
            node("Shape", ["f"], ["size"]),
            node("Gather", ["size", "turned"], ["shape"], axis=0),
            node("Unique", ["f"], ["u"]),
            node("Reshape", ["f", "shape"], ["r"]),
            *chain("r", "y", 25, "after"),
        ],
        ["x:float[n]"],
        ["y:float[a,b]", "u:float[k]"],
        {"turned": np.array([1, 0])},
    )
    session = assert_right(made, [{"x": np.array([0, 1, 2, 0][:size], np.float32)} for size in (3, 4, 2)])
    nodes = [fact.op_type for fact in session.facts if type(fact).__name__ == "BreakStarted"]
    assert nodes == ["NonZero", "Unique"], "the Reshape is part of a program"


def test_a_call_like_the_one_before_is_counted_and_keeps_its_place_in_the_order() -> None:
    made = proto([node("Relu", ["x"], ["y"])], ["x:float[n]"], ["y:float[n]"])
    session = Session(made, cache_size=2)
    for size in (1, 1, 2, 1, 1, 3):  # the third size pushes out the second one
        assert_same(session({"x": np.ones(size, np.float32)}), {"y": np.ones(size, np.float32)})
    statistics = session.cache.statistics()
    # A segment that was just compiled counts as a miss, what follows of its size as hits.
    assert (statistics.hits, statistics.misses, statistics.evictions) == (3, 3, 1)
    session({"x": np.ones(1, np.float32)})
    assert session.compiled() == 0
    session({"x": np.ones(2, np.float32)})
    assert session.compiled() == 1


def test_a_call_like_the_one_before_but_for_a_static_value() -> None:
    made = proto([node("Tile", ["x", "r"], ["y"])], ["x:float[n]", "r:int64[1]"], ["y:float[m]"])
    session = Session(made)
    for repeats in (2, 2, 3, 2, 3, 3):
        got = session({"x": np.arange(2, dtype=np.float32), "r": np.array([repeats])})["y"]
        assert got.tolist() == [0.0, 1.0] * repeats
    x = np.arange(2, dtype=np.float64)  # another dtype is no call like the one before
    with pytest.raises(InputError, match="dtype double was given"):
        session({"x": x, "r": np.array([3])})
