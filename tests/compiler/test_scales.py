"""Factors and offsets of channels in the weights of convolutions: same results, and nothing changes where it may not."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.benchmarks.light import filled
from tests.compiler.support import Session, assert_same, by_onnxruntime, graph, node, proto
from transmuter_async.compiler import Options, explain, prepare, to_jax
from transmuter_async.compiler.scales import merged
from transmuter_async.errors import NonFiniteWarning
from transmuter_async.graph import read_model
from transmuter_async.operators import known


def random(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def normalization(channels, seed=7, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "scale": rng.uniform(-2, 2, channels).astype(dtype),
        "shift": rng.standard_normal(channels).astype(dtype),
        "mean": rng.standard_normal(channels).astype(dtype),
        "var": rng.uniform(0.05, 3, channels).astype(dtype),
    }


BATCH = ["scale", "shift", "mean", "var"]
KINDS = {np.float32: "float", np.float64: "double", np.float16: "float16"}


def model(
    weights, *, tail=None, op="Conv", bias=True, x=(2, 6, 9, 8), dtype=np.float32, outputs=(), opset=18, **attributes
):
    """A convolution, what follows it (a BatchNormalization where `tail` is None) and a Relu; its parameters at random."""
    channels = weights[1] * attributes.get("group", 1) if op == "ConvTranspose" else weights[0]
    given = {"w": random(*weights, seed=1, dtype=dtype), **normalization(channels, dtype=dtype)}
    if bias:
        given["b"] = random(channels, seed=2, dtype=dtype)
    tail = tail or [node("BatchNormalization", ["c", *BATCH], ["n"], name="norm")]
    nodes = [
        node(op, ["x", "w", *(["b"] if bias else [])], ["c"], name="conv", **attributes),
        *tail,
        node("Relu", ["n"], ["y"], name="relu"),
    ]
    kind = KINDS[dtype]
    made = proto(nodes, [f"x:{kind}[{','.join(map(str, x))}]"], [f"y:{kind}[...]", *outputs], given, opset=opset)
    return made, {"x": random(*x, seed=3, dtype=dtype)}


def operators(session):
    return [each.op_type for each in session.prepared.nodes]


def check(made, inputs, *, rtol=1e-4, atol=1e-4, left=("Conv", "Relu")):
    """Equal to onnxruntime and to the plain graph, in programs and on the host, with what is `left` of the graph."""
    session = Session(made)
    assert operators(session) == list(left)
    found = session(inputs)
    assert_same(found, by_onnxruntime(made, inputs), rtol=rtol, atol=atol)
    plain = Session(made, optimize=False)
    assert len(operators(plain)) > len(left)
    assert_same(found, plain(inputs), rtol=rtol, atol=atol)
    assert_same(Session(made, compiler="eager")(inputs), found, rtol=rtol, atol=atol)
    assert_same(Session(made, lowerings=())(inputs), found, rtol=rtol, atol=atol)


GEOMETRIES = [
    {},
    {"strides": [2, 1], "pads": [1, 0, 2, 1]},
    {"dilations": [2, 2], "pads": [2, 2, 2, 2]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("weights", "group"), [((8, 6, 3, 3), 1), ((8, 3, 3, 3), 2), ((6, 1, 3, 3), 6), ((12, 1, 1, 1), 6)]
)
def test_normalization_is_merged(weights, group, bias):
    for geometry in GEOMETRIES:
        check(*model(weights, bias=bias, group=group, **geometry))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("weights", "group"), [((6, 5, 3, 3), 1), ((6, 2, 3, 3), 3), ((6, 1, 2, 2), 6)])
def test_normalization_behind_a_transposed_convolution_is_merged(weights, group, bias):
    for geometry in ({}, {"strides": [3, 2], "output_padding": [1, 0], "pads": [1, 0, 0, 1]}, {"dilations": [2, 1]}):
        check(*model(weights, op="ConvTranspose", bias=bias, group=group, **geometry), left=("ConvTranspose", "Relu"))


@pytest.mark.parametrize(("weights", "x"), [((4, 6, 3), (2, 6, 9)), ((4, 6, 2, 2, 3), (1, 6, 4, 5, 6))])
def test_other_ranks(weights, x):
    check(*model(weights, x=x))


def test_double_is_computed_as_double():
    made, inputs = model((8, 6, 3, 3), dtype=np.float64)  # onnxruntime has no such convolution
    session = Session(made)
    assert operators(session) == ["Conv", "Relu"]
    assert_same(session(inputs), Session(made, optimize=False)(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("opset", "more"), [(6, {"is_test": 1}), (8, {}), (9, {}), (14, {}), (15, {}), (22, {})])
def test_every_version_of_normalization(opset, more):
    tail = [node("BatchNormalization", ["c", *BATCH], ["n"], epsilon=0.1, **more)]
    made, inputs = model((8, 6, 3, 3), tail=tail, opset=opset)
    session, plain = Session(made), Session(made, optimize=False)
    assert operators(session) == ["Conv", "Relu"]
    assert_same(session(inputs), plain(inputs), rtol=1e-4, atol=1e-4)
    if opset >= 7:
        assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


ARITHMETIC = {
    "factor and offset": [("Mul", ["c", "k"], (8, 1, 1)), ("Add", ["m0", "k"], (1, 8, 1, 1))],
    "constant first": [("Mul", ["k", "c"], (1, 8, 1, 1)), ("Sub", ["k", "m0"], (8, 1, 1))],
    "scalars": [("Div", ["c", "k"], ()), ("Sub", ["m0", "k"], (1,)), ("Mul", ["m1", "k"], (1, 1, 1, 1))],
    "offset only": [("Add", ["c", "k"], (8, 1, 1))],
}


def arithmetic(steps):
    """Nodes for `steps` of (operator, inputs, shape of the constant k), and their constants."""
    nodes, constants = [], {}
    for index, (op, inputs, shape) in enumerate(steps):
        constants[f"k{index}"] = random(*shape, seed=20 + index) + np.float32(3)
        result = "n" if index == len(steps) - 1 else f"m{index}"
        nodes.append(node(op, [f"k{index}" if each == "k" else each for each in inputs], [result], name=f"step{index}"))
    return nodes, constants


def with_constants(made, constants):
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    return made


@pytest.mark.parametrize("steps", ARITHMETIC.values(), ids=ARITHMETIC)
@pytest.mark.parametrize("bias", [True, False])
def test_arithmetic_by_channel_is_merged(steps, bias):
    nodes, constants = arithmetic(steps)
    made, inputs = model((8, 6, 3, 3), tail=nodes, bias=bias)
    check(with_constants(made, constants), inputs)


def test_a_chain_is_rounded_once():
    """Factors that float32 can't hold one after the other leave what their product is."""
    constants = {f"k{i}": np.full((8, 1, 1), value, np.float32) for i, value in enumerate((1e-30, 1e-30, 1e30, 1e30))}
    tail = [node("Mul", ["c", "k0"], ["m0"]), node("Mul", ["m0", "k1"], ["m1"]), node("Mul", ["m1", "k2"], ["m2"])]
    made, inputs = model((8, 6, 3, 3), tail=[*tail, node("Mul", ["m2", "k3"], ["n"])])
    session = Session(with_constants(made, constants))
    assert operators(session) == ["Conv", "Relu"]
    bare, _ = model((8, 6, 3, 3), tail=[node("Identity", ["c"], ["n"])])
    assert_same(session(inputs), by_onnxruntime(bare, inputs), rtol=1e-4, atol=1e-4)


def kept(made, **options):
    """Whether the nodes of a graph are all still there."""
    prepared = prepare(read_model(made, known=known), Options(**options))
    assert not merged(prepared.graph)
    return len(prepared.nodes) == len(made.graph.node)


def test_what_somebody_else_reads_stays():
    made, _ = model((8, 6, 3, 3), outputs=["c:float[...]"])
    assert kept(made)
    made, _ = model((8, 6, 3, 3), outputs=["z:float[...]"])
    made.graph.node.append(node("Sigmoid", ["c"], ["z"]))
    assert kept(made)
    made, _ = model((8, 6, 3, 3), outputs=["z:float[...]"])
    made.graph.node.insert(1, node("If", ["p"], ["z"], then_branch=graph([node("Neg", ["c"], ["t"])], [], ["t:float[...]"]),
                                   else_branch=graph([node("Abs", ["c"], ["e"])], [], ["e:float[...]"])))  # fmt: skip
    made.graph.input.append(helper.make_tensor_value_info("p", TensorProto.BOOL, []))
    assert kept(made)


def test_weights_that_another_node_reads_stay():
    made, inputs = model((6, 6, 3, 3), outputs=["z:float[...]"])
    made.graph.node.append(node("Conv", ["x", "w"], ["z"], name="second"))
    assert kept(made)
    assert_same(Session(made)(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["w", "b", "scale", "mean"])
def test_what_a_call_gives_stays(name):
    made, inputs = model((8, 6, 3, 3))
    array = next(onnx.numpy_helper.to_array(each) for each in made.graph.initializer if each.name == name)
    made.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(array.shape)))
    assert kept(made, overrides=(name,))
    given = {**inputs, name: array * np.float32(0.5)}
    assert_same(Session(made, overrides=(name,))(given), by_onnxruntime(made, given), rtol=1e-4, atol=1e-4)
    assert operators(Session(made)) == ["Conv", "Relu"], "nobody replaces it here"


def test_statistics_of_the_batch_stay():
    made, _ = model((8, 6, 3, 3), tail=[node("BatchNormalization", ["c", *BATCH], ["n", "m", "v"], training_mode=1)])
    assert kept(made)
    made, _ = model((8, 6, 3, 3), tail=[node("BatchNormalization", ["c", *BATCH], ["n"])], opset=6)
    assert kept(made), "is_test is 0 there"


@pytest.mark.parametrize("shape", [(9, 1), (1, 8, 9, 8), (2, 1, 1, 1), (1, 1, 1, 1, 1), (6,)])
def test_constants_of_other_shapes_stay(shape):
    made, inputs = model((8, 6, 3, 3), tail=[node("Mul", ["c", "k"], ["n"])], x=(2, 6, 11, 8), pads=[0, 1, 0, 1])
    with_constants(made, {"k": np.ones(tuple(8 if size == 6 else size for size in shape), np.float32)})
    assert kept(made)
    assert_same(Session(made)(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


def test_a_constant_that_makes_more_channels_stays():
    made, inputs = model((1, 6, 3, 3), tail=[node("Mul", ["c", "k"], ["n"])])
    with_constants(made, {"k": random(5, 1, 1, seed=4)})
    assert kept(made)
    assert_same(Session(made)(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


def test_what_is_no_number_stays():
    """No variance and no epsilon, or less than no variance: infinities and NaN remain what they are."""
    tail = [node("BatchNormalization", ["c", *BATCH], ["n"], epsilon=0.0)]
    made, inputs = model((8, 6, 3, 3), tail=tail, outputs=["n:float[...]"])
    for each in made.graph.initializer:
        if each.name == "var":
            each.CopyFrom(onnx.numpy_helper.from_array(np.array([0, 1, 1, 1, 1, 1, 1, -1], np.float32), "var"))
    assert kept(made)
    bare, _ = model((8, 6, 3, 3), tail=[node("Identity", ["c"], ["n"])], outputs=["c:float[...]"])
    scale, shift, mean, var = (
        onnx.numpy_helper.to_array(each).reshape(8, 1, 1) for each in made.graph.initializer if each.name in BATCH
    )
    with np.errstate(all="ignore"):
        found = Session(made)(inputs)["n"]
        want = (by_onnxruntime(bare, inputs)["c"] - mean) / np.sqrt(var) * scale + shift
    assert np.isinf(want[:, 0]).all()
    assert np.isnan(want[:, 7]).all()
    assert_same({"n": found}, {"n": want}, rtol=1e-4, atol=1e-4)


def test_no_variance_with_an_epsilon_is_merged():
    made, inputs = model((8, 6, 3, 3))
    for each in made.graph.initializer:
        if each.name == "var":
            each.CopyFrom(onnx.numpy_helper.from_array(np.zeros(8, np.float32), "var"))
    check(made, inputs, atol=2e-3)  # the results are in the thousands


def test_narrow_weights_stay():
    made, _ = model((8, 6, 3, 3), dtype=np.float16)
    assert kept(made)


def test_no_growth_where_memory_matters():
    assert kept(model((8, 6, 3, 3))[0], fold_bytes=0)


def test_an_alarm_names_the_node_it_named_before():
    made, inputs = model((8, 6, 3, 3), tail=[node("Mul", ["c", "k"], ["n"], name="far")])
    with_constants(made, {"k": np.full((8, 1, 1), 3e38, np.float32)})
    assert kept(made, nonfinite="warn")
    with pytest.warns(NonFiniteWarning, match="'far'"):
        Session(made, nonfinite="warn")(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Session(made)(inputs)


def test_gradients_are_by_the_weights_of_the_file():
    made, inputs = model((8, 6, 3, 3))
    apply, params = to_jax(read_model(made, known=known))
    assert params.keys() == {each.name for each in made.graph.initializer}
    found = jax.grad(lambda p: apply(p, inputs)["y"].sum())(params)
    assert all(np.abs(found[name]).max() > 0 for name in ("w", "b", "scale", "shift", "mean", "var"))
    assert_same({"y": np.asarray(apply(params, inputs)["y"])}, by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


def test_bodies_are_merged_as_well():
    weights = {"w": random(8, 6, 3, 3, seed=1), **normalization(8)}
    body = graph(
        [node("Conv", ["x", "w"], ["c"], name="conv"), node("BatchNormalization", ["c", *BATCH], ["t"], name="norm")],
        [],
        ["t:float[...]"],
        weights,
    )
    other = graph([node("Conv", ["x", "v"], ["e"])], [], ["e:float[...]"], {"v": random(8, 6, 3, 3, seed=2)})
    made = proto(
        [node("If", ["p"], ["y"], then_branch=body, else_branch=other)],
        ["p:bool[]", "x:float[2,6,9,8]"],
        ["y:float[...]"],
    )
    session = Session(made)
    assert merged(session.prepared.graph) == ("conv",)
    for chosen in (True, False):
        inputs = {"p": np.array(chosen), "x": random(2, 6, 9, 8, seed=3)}
        assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


def test_the_new_weights_are_the_only_ones_that_programs_hold():
    """With channels last they are read where they lie, and the old ones have left the prepared graph."""
    made, inputs = model((64, 6, 3, 3), group=1)
    session = Session(made)
    session(inputs)
    root = session.prepared
    assert {name for name in root.graph.initializers if not name.endswith("@scaled")} == set()
    assert root.weight_bytes() <= sum(array.nbytes for array in root.graph.initializers.values())
    (place,) = [array for array in root._rearranged.values() if array.ndim == 4]
    assert any(np.shares_memory(place, array) for array in root.graph.initializers.values())


def test_two_models_have_the_new_weights_in_common():
    made, _ = model((64, 64, 3, 3), x=(2, 64, 9, 8))
    first, second = Session(made), Session(made)
    (one,), (other,) = (
        [array for array in each.prepared.graph.initializers.values() if array.ndim == 4] for each in (first, second)
    )
    assert one is other


def test_the_disk_cache_tells_new_weights_from_old(tmp_path):
    made, inputs = model((8, 6, 3, 3))
    first, again = Session(made, cache_dir=str(tmp_path)), Session(made, cache_dir=str(tmp_path))
    want = first(inputs)
    assert_same(again(inputs), want, rtol=0, atol=0)
    assert [f.disk_cache for f in again.facts if type(f).__name__ == "SegmentReady"] == ["hit"]
    other, _ = model((8, 6, 3, 3), tail=[node("BatchNormalization", ["c", *BATCH], ["n"], name="norm", epsilon=0.5)])
    third = Session(other, cache_dir=str(tmp_path))
    assert_same(third(inputs), by_onnxruntime(other, inputs), rtol=1e-4, atol=1e-4)
    assert [f.disk_cache for f in third.facts if type(f).__name__ == "SegmentReady"] == ["miss"]


def test_it_is_told():
    session = Session(model((8, 6, 3, 3))[0])
    assert "1 convolution" in str(explain(session.prepared, session.cache))


@pytest.mark.parametrize("name", ["resnet50", "inception_v2"])
def test_real_networks(name):
    made = filled(name)
    inputs = {}
    for each in made.graph.input:
        inputs[each.name] = random(*(dim.dim_value for dim in each.type.tensor_type.shape.dim))
    session = Session(made)
    assert "BatchNormalization" not in operators(session) and merged(session.prepared.graph)
    assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-3, atol=1e-3)
