"""float16 computed as float32: declared dtypes wherever a value leaves, weights widened once, errors no larger than by node."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.compiler.support import Session, assert_same, by_onnxruntime, graph, node, proto
from tests.conformance.suite import cases
from transmuter_async.compiler import Options, explain, prepare, to_jax
from transmuter_async.errors import NonFiniteError, NonFiniteWarning
from transmuter_async.graph import read_model
from transmuter_async.operators import half, known, resolve


def random(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float16)


def chain(depth=6, width=64, rows=8):
    """Layers whose results each operator of float16 would round."""
    nodes, weights, last = [], {}, "x"
    for i in range(depth):
        weights[f"w{i}"] = random(width, width, seed=i, scale=1.2 / width**0.5)
        weights[f"b{i}"] = random(width, seed=50 + i, scale=0.2)
        nodes += [
            node("MatMul", [last, f"w{i}"], [f"m{i}"], name=f"product{i}"),
            node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], name=f"sum{i}"),
            node("Tanh", [f"a{i}"], [f"t{i}"], name=f"tanh{i}"),
        ]
        last = f"t{i}"
    made = proto(
        nodes, [f"x:float16[{rows},{width}]" if rows else f"x:float16[N,{width}]"], [f"{last}:float16[...]"], weights
    )
    return made, {"x": random(rows, width, seed=99)}


def exactly(made, inputs, dtype=np.float64):
    """The same graph in float64, or where onnxruntime lacks that float32, by onnxruntime."""
    wide = onnx.ModelProto()
    wide.CopyFrom(made)
    for each in wide.graph.initializer:
        array = onnx.numpy_helper.to_array(each)
        if array.dtype == np.float16:
            each.CopyFrom(onnx.numpy_helper.from_array(array.astype(dtype), each.name))
    for each in (*wide.graph.input, *wide.graph.output):
        if each.type.tensor_type.elem_type == TensorProto.FLOAT16:
            each.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return by_onnxruntime(wide, {name: value.astype(dtype) for name, value in inputs.items()})


def error(found, exact):
    return max(np.sqrt(np.mean((found[name].astype(np.float64) - exact[name]) ** 2)) for name in exact)


def test_errors_are_a_fraction_of_those_by_node():
    made, inputs = chain()
    exact = exactly(made, inputs)
    wide, narrow = Session(made)(inputs), Session(made, float16="float16")(inputs)
    assert [each.dtype for each in (*wide.values(), *narrow.values())] == [np.float16] * 2
    assert error(wide, exact) < 0.5 * error(narrow, exact)
    rounded = {name: value.astype(np.float16) for name, value in exact.items()}
    assert error(wide, exact) < 1.01 * error(rounded, exact), "one rounding, of the output"


@pytest.mark.parametrize(
    ("options", "wide"),
    [
        ({}, True),
        ({"float16": "float32"}, True),
        ({"float16": "float16"}, False),
        ({"optimize": False}, False),
        ({"optimize": False, "float16": "float32"}, True),
    ],
)
def test_which_graphs_are_wide(options, wide):
    made, inputs = chain(2)
    session = Session(made, **options)
    session(inputs)
    assert session.prepared.wide == wide
    assert ("float16 as float32" in str(explain(session.prepared, session.cache))) == wide


def test_a_graph_without_float16_knows_nothing_of_it():
    made = proto([node("Neg", ["x"], ["y"])], ["x:float[4]"], ["y:float[4]"])
    assert not prepare(read_model(made, known=known), Options(float16="float32")).wide


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="float16='half' is not one of"):
        Options(float16="half")


def test_weights_are_widened_once_and_no_others_are_on_the_device():
    made, _ = chain(3, rows=0)
    session = Session(made)
    session({"x": random(5, 64)})
    root = session.prepared
    narrow = sum(array.nbytes for array in root.graph.initializers.values())
    assert 2 * narrow - 3 * 256 <= root.weight_bytes() <= 2 * narrow
    made_once = dict(root._rearranged)
    session({"x": random(3, 64)})
    assert {key: id(value) for key, value in root._rearranged.items()} == {k: id(v) for k, v in made_once.items()}


def test_weights_stay_narrow_where_memory_matters():
    made, inputs = chain(3)
    session = Session(made, fold_bytes=0)
    found = session(inputs)
    assert session.prepared.weight_bytes() <= sum(a.nbytes for a in session.prepared.graph.initializers.values())
    assert_same(found, Session(made)(inputs), rtol=2e-3, atol=1e-3)


def test_values_leave_at_breaks_as_declared():
    made, inputs = chain(4)
    whole = Session(made)(inputs)
    for step in (1, 2, 5):
        session = Session(made, force_breaks=range(step, 12, 3), min_segment_nodes=1)
        assert_same(session(inputs), whole, rtol=4e-3, atol=2e-3)
        entered = [shape for segment in session.cache.segments() for _, shape in segment.shapes]
        assert entered
        assert all("float32" not in str(shape) for shape in entered)


def test_inner_values_as_outputs_are_rounded_and_the_rest_goes_on_wide():
    nodes = [node("Mul", ["x", "k"], ["a"]), node("Sub", ["a", "x"], ["b"]), node("Identity", ["a"], ["c"])]
    made = proto(
        nodes,
        ["x:float16[64]"],
        ["a:float16[...]", "b:float16[...]", "c:float16[...]"],
        {"k": np.float16(1.0009765625)},
    )
    x = random(64)
    found = Session(made)({"x": x})
    product = x.astype(np.float32) * np.float32(1.0009765625)
    assert_same(
        found,
        {
            "a": product.astype(np.float16),
            "b": (product - x.astype(np.float32)).astype(np.float16),
            "c": product.astype(np.float16),
        },
        rtol=0,
        atol=0,
    )


def rounding(*tail, output):
    """x * 1.001 + 1, whose float16 rounding matters to what `tail` makes of "s"."""
    nodes = [node("Mul", ["x", "k"], ["p"]), node("Add", ["p", "one"], ["s"]), *tail]
    weights = {"k": np.float16(1.001), "one": np.float16(1), "many": np.float16(1000)}
    made = proto(nodes, ["x:float16[256]"], [output], weights)
    x = random(256, scale=30)
    exact = (x.astype(np.float32) * np.float32(np.float16(1.001)) + 1).astype(np.float32)
    return Session(made)({"x": x})[output.partition(":")[0]], exact, exact.astype(np.float16)


def test_integers_and_comparisons_are_of_the_rounded_values():
    found, _, rounded = rounding(node("Cast", ["s"], ["y"], to=TensorProto.INT32), output="y:int32[...]")
    np.testing.assert_array_equal(found, rounded.astype(np.int32))
    found, exact, rounded = rounding(
        node("Cast", ["s"], ["f"], to=TensorProto.FLOAT16), node("Equal", ["s", "f"], ["y"]), output="y:bool[...]"
    )
    assert found.all(), "as in float16, where a value equals itself"
    found, exact, rounded = rounding(
        node("Mul", ["s", "many"], ["l"]), node("IsInf", ["l"], ["y"]), output="y:bool[...]"
    )
    np.testing.assert_array_equal(found, np.abs(exact * 1000) >= 65520)
    assert found.any()


def test_a_cast_to_float32_sees_the_wide_value_and_one_to_float16_rounds():
    found, exact, rounded = rounding(node("Cast", ["s"], ["y"], to=TensorProto.FLOAT), output="y:float[...]")
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert (found != rounded).any()
    found, _, rounded = rounding(
        node("Cast", ["s"], ["r"], to=TensorProto.FLOAT16),
        node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
        output="y:float[...]",
    )
    np.testing.assert_array_equal(found, rounded.astype(np.float32))


def test_alarms_are_about_float16():
    """Every result has to fit float16, also where it is held wider; the first that does not is named."""
    nodes = [
        node("Mul", ["x", "k"], ["a"], name="grows"),
        node("Mul", ["a", "k"], ["b"], name="overflows"),
        node("Div", ["b", "k"], ["y"], name="shrinks"),
    ]
    made = proto(nodes, ["x:float16[4]"], ["y:float16[4]"], {"k": np.float16(1000)})
    small, large = {"x": np.full(4, 0.01, np.float16)}, {"x": np.full(4, 1, np.float16)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Session(made, nonfinite="error")(small)
        assert np.isfinite(Session(made)(large)["y"]).all(), "the float32 between does not overflow"
    with pytest.raises(NonFiniteError, match="'overflows'"):
        Session(made, nonfinite="error")(large)
    with pytest.warns(NonFiniteWarning, match="'overflows'"):
        Session(made, nonfinite="warn")(large)
    assert np.isinf(Session(made, float16="float16")(large)["y"]).all()


def test_bodies_see_and_give_values_as_declared():
    then = graph([node("Mul", ["a", "k"], ["t"]), node("Exp", ["t"], ["u"])], [], ["u:float16[...]"])
    other = graph([node("Sub", ["a", "k"], ["e"])], [], ["e:float16[...]"])
    body = graph(
        [node("Mul", ["state", "k"], ["m"]), node("Sin", ["m"], ["next"]), node("Identity", ["go"], ["on"])],
        ["i:int64[]", "go:bool[]", "state:float16[8,16]"],
        ["on:bool[]", "next:float16[8,16]"],
    )
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("If", ["p"], ["b"], then_branch=then, else_branch=other),
        node("Loop", ["trips", "", "b"], ["c"], body=body),
        node("Add", ["c", "a"], ["y"]),
    ]
    weights = {"w": random(16, 16, scale=0.2), "k": np.float16(0.3), "trips": np.array(4)}
    made = proto(nodes, ["x:float16[8,16]", "p:bool[]"], ["y:float16[...]"], weights)
    session = Session(made)
    for chosen in (True, False):
        inputs = {"x": random(8, 16, seed=4), "p": np.array(chosen)}
        assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=5e-3, atol=5e-3)


def test_a_network_of_images():
    weights = {
        "w0": random(16, 3, 3, 3, seed=1, scale=0.3),
        "w1": random(16, 1, 3, 3, seed=2, scale=0.3),
        "w2": random(32, 16, 1, 1, seed=3, scale=0.3),
        "b": random(32, seed=4),
        "slope": random(32, 1, 1, seed=5),
        **{name: np.abs(random(16, seed=6 + i)) + np.float16(0.5) for i, name in enumerate("smv")},
        "h": random(16, seed=11),
        "w3": random(32, 8, 2, 2, seed=12, scale=0.3),
    }
    nodes = [
        node("Conv", ["x", "w0"], ["c0"], pads=[1] * 4),
        node("BatchNormalization", ["c0", "s", "h", "m", "v"], ["n0"]),
        node("Relu", ["n0"], ["r0"]),
        node("Conv", ["r0", "w1"], ["c1"], group=16, pads=[1] * 4),
        node("MaxPool", ["c1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p1", "w2", "b"], ["c2"]),
        node("PRelu", ["c2", "slope"], ["r2"]),
        node("ConvTranspose", ["r2", "w3"], ["c3"], strides=[2, 2]),
        node("Concat", ["c3", "c3"], ["k3"], axis=1),
        node("GlobalAveragePool", ["k3"], ["g"]),
        node("Flatten", ["g"], ["y"]),
    ]
    made = proto(nodes, ["x:float16[2,3,16,16]"], ["y:float16[...]", "r0:float16[...]"], weights)
    inputs = {"x": random(2, 3, 16, 16, seed=20)}
    want = by_onnxruntime(made, inputs)
    for lowerings in (None, (), ("channels last",)):
        assert_same(Session(made, lowerings=lowerings)(inputs), want, rtol=1e-2, atol=1e-2)
    assert_same(Session(made, fold_bytes=0)(inputs), want, rtol=1e-2, atol=1e-2)


RECURRENT = {
    "LSTM": (4, ["h", "c"], 3),
    "GRU": (3, ["h"], 2),
    "RNN": (1, ["h"], 2),
}


@pytest.mark.parametrize("op", RECURRENT)
def test_recurrent_layers(op):
    gates, states, n_outputs = RECURRENT[op]
    weights = {
        "w": random(1, gates * 16, 12, seed=1, scale=0.3),
        "r": random(1, gates * 16, 16, seed=2, scale=0.3),
        "b": random(1, 2 * gates * 16, seed=3),
        **{name: random(1, 4, 16, seed=4) for name in states},
    }
    outputs = ["s", "last", "cell"][:n_outputs]
    nodes = [
        node("Mul", ["x", "x"], ["z"]),
        node(op, ["z", "w", "r", "b", "", *states], outputs, hidden_size=16),
        node("Exp", ["s"], ["y"]),
    ]
    made = proto(nodes, ["x:float16[5,4,12]"], ["y:float16[...]", "last:float16[...]"], weights)
    inputs = {"x": random(5, 4, 12, seed=9)}
    found = Session(made)(inputs)
    assert error(found, exactly(made, inputs, np.float32)) < 1e-3
    assert_same(found, Session(made, float16="float16")(inputs), rtol=1e-2, atol=1e-2)


def attention():
    weights = {"q": random(24, 24, seed=1, scale=0.2), "k": random(24, 24, seed=2, scale=0.2), "v": random(24, 24, seed=3, scale=0.2),
               "scale": np.float16(0.2), "low": np.float16(-10000), "one": np.float16(1), "g": random(24, seed=4), "h": random(24, seed=5)}  # fmt: skip
    nodes = [
        node("LayerNormalization", ["x", "g", "h"], ["l"]),
        *(node("MatMul", ["l", name], [name.upper()]) for name in "qkv"),
        node("Transpose", ["K"], ["T"], perm=[0, 2, 1]),
        node("MatMul", ["Q", "T"], ["s"]),
        node("Mul", ["s", "scale"], ["t"]),
        node("Cast", ["mask"], ["m"], to=TensorProto.FLOAT16),
        node("Sub", ["one", "m"], ["n"]),
        node("Mul", ["n", "low"], ["o"]),
        node("Add", ["t", "o"], ["u"]),
        node("Softmax", ["u"], ["p"], axis=-1),
        node("MatMul", ["p", "V"], ["a"]),
        node("Add", ["a", "x"], ["y"]),
    ]
    made = proto(
        nodes, ["x:float16[N,S,24]", "mask:int64[N,1,S]"], ["y:float16[...]", "p:float16[...]"], weights, opset=17
    )
    return made


def test_attention_with_a_mask():
    made = attention()
    session = Session(made)
    for rows, length in ((1, 7), (3, 12)):
        mask = np.ones((rows, 1, length), np.int64)
        mask[:, :, length // 2 :] = 0
        inputs = {"x": random(rows, length, 24, seed=6), "mask": mask}
        assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=2e-3, atol=2e-3)


def test_the_disk_cache_knows_the_policy(tmp_path):
    made, inputs = chain(2)
    want = Session(made, cache_dir=str(tmp_path))(inputs)
    again, other = Session(made, cache_dir=str(tmp_path)), Session(made, cache_dir=str(tmp_path), float16="float16")
    assert_same(again(inputs), want, rtol=0, atol=0)
    other(inputs)
    told = [[f.disk_cache for f in each.facts if type(f).__name__ == "SegmentReady"] for each in (again, other)]
    assert told == [["hit"], ["miss"]]


def test_the_host_rounds_by_node_as_declared():
    made, inputs = chain(2)
    found = Session(made, compiler="eager")(inputs)
    assert_same(found, Session(made)(inputs), rtol=4e-3, atol=2e-3)


def test_params_of_to_jax_are_those_of_the_file():
    made, inputs = chain(2)
    apply, params = to_jax(read_model(made, known=known))
    assert {str(value.dtype) for value in params.values()} == {"float16"}
    assert_same({"t1": np.asarray(apply(params, inputs)["t1"])}, by_onnxruntime(made, inputs), rtol=4e-3, atol=2e-3)


def test_every_listed_operator_exists():
    named = {*half._COMPUTING, *(("", name) for name in half._MOVING)}
    assert [key for key in named if resolve(*key, 99) is None] == []
    for domain, name, weight in half._OWN:
        assert weight in resolve(domain, name, 99).inputs


def unary(op):
    """x * k -> op -> y of float16, where an operator takes one input and nothing else."""
    nodes = [node("Mul", ["x", "k"], ["z"]), node(op, ["z"], ["o"]), node("Add", ["o", "k"], ["y"])]
    made = proto(nodes, ["x:float16[2,3,8]"], ["y:float16[...]", "o:float16[...]"], {"k": np.float16(0.7)}, opset=20)
    return made, {"x": np.random.default_rng(1).uniform(0.1, 0.9, (2, 3, 8)).astype(np.float16)}


UNARY = sorted(
    name
    for (domain, name) in {*half._COMPUTING, *(("", name) for name in half._MOVING)}
    if not domain
    and onnx.defs.has(name, 20, "")
    and onnx.defs.get_schema(name, 20, "").min_input == 1
    and not any(a.required for a in onnx.defs.get_schema(name, 20, "").attributes.values())
    and name not in ("Einsum", "Resize", "Split", "Trilu")
)


@pytest.mark.parametrize("op", UNARY)
def test_one_operator_wide_and_by_node(op):
    made, inputs = unary(op)
    narrow, host = Session(made, float16="float16")(inputs), Session(made, compiler="eager")(inputs)
    wide = Session(made)(inputs)
    assert_same(wide, narrow, rtol=4e-3, atol=2e-3)
    assert_same(wide, host, rtol=4e-3, atol=2e-3)


def of_the_suite():
    """A case of one node for each listed operator, its float32 inputs made float16, the first one behind a product by one."""
    found = {}
    for case in cases():
        made = case.model()
        (*_, last) = made.graph.node
        listed = (last.domain, last.op_type) in half._COMPUTING or last.op_type in half._MOVING
        if case.kind != "node" or len(made.graph.node) != 1 or not listed or last.op_type in found:
            continue
        lead = last.input[last.op_type == "Where"]
        types = [value.type.tensor_type for value in (*made.graph.input, *made.graph.output)]
        names = [value.name for value in made.graph.input]
        floats = {
            name
            for name, type in zip(names, types, strict=False)
            if type.elem_type == TensorProto.FLOAT and name != "scales"
        }
        if lead not in floats or len({value.name for value in made.graph.input}) != len(names):
            continue
        changed = onnx.ModelProto()
        changed.CopyFrom(made)
        for value in (*changed.graph.input, *changed.graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name != "scales":
                value.type.tensor_type.elem_type = TensorProto.FLOAT16
        inner = changed.graph.node[0]
        inner.input[:] = ["held" if name == lead else name for name in inner.input]
        changed.graph.node.insert(0, node("Mul", [lead, "one"], ["held"]))
        changed.graph.initializer.append(onnx.numpy_helper.from_array(np.float16(1), "one"))
        inputs = dict(zip(names, case.pairs(made)[0][0], strict=True))
        given = {name: v.astype(np.float16) if name in floats else v for name, v in inputs.items()}
        for name in [name for name in names if name != lead]:
            changed.graph.initializer.append(onnx.numpy_helper.from_array(given.pop(name), name))
        for value in [value for value in changed.graph.input if value.name != lead]:
            changed.graph.input.remove(value)
        found[last.op_type] = changed, given
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cases_of_the_suite_wide_and_by_node():
    found = of_the_suite()
    assert len(found) > 80
    for op, (made, inputs) in found.items():
        wide, narrow = Session(made)(inputs), Session(made, float16="float16")(inputs)
        assert {name: value.dtype for name, value in wide.items()} == {n: v.dtype for n, v in narrow.items()}, op
        assert_same(wide, narrow, rtol=8e-3, atol=8e-3)
