"""Every form that programs take on a CPU gives what the plain form gives: alone, all together, in a chain, with gradients."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

from tests.compiler.support import Session, assert_same, by_onnxruntime, graph, node, proto
from transmuter_async.compiler import Options, SegmentReady, explain, to_jax
from transmuter_async.graph import read_model
from transmuter_async.operators import LOWERINGS, known, lowering, lowerings_for

ALL = tuple(LOWERINGS)


def random(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def dims(shape):
    return ",".join(map(str, shape))


ONLY = {
    "8-bit product": ("MatMulInteger",),
    "packed sort": ("TopK", "NonMax"),
    "small angles": ("Sin", "Cos"),
    "row product": ("Reduce", "Softmax", "Norm", "Mean"),
    "row lanes": ("Reduce", "Softmax", "Arg", "GlobalMax", "Dynamic"),
}
"""Parts of the names of operators that take a lowering; those of convolutions are not here, they go with all."""


def forms(made):
    """The same model in its plain form, with each lowering that its operators may take alone, and with all."""
    operators = {node.op_type for node in made.graph.node}
    names = [name for name in ALL if any(word in each for each in operators for word in ONLY.get(name, ("",)))]
    for chosen in ((), *((name,) for name in names), *(("channels last", name) for name in names[1:]), ALL):
        yield chosen, Session(made, lowerings=chosen)


def check(made, inputs, *, rtol=1e-4, atol=2e-5, some=False):
    """Every form equals onnxruntime; `some` takes only the plain one and all of them."""
    want = by_onnxruntime(made, inputs)
    taken = set()
    for chosen, session in forms(made):
        if some and chosen not in ((), ALL):
            continue
        assert_same(session(inputs), want, rtol=rtol, atol=atol)
        found = {name for segment in session.cache.segments() for _, _, name in segment.lowerings}
        assert found <= set(chosen)
        taken |= found
    return taken


def chain(w, group=1, x=None, tail=(), opset=18, **attributes):
    """A convolution that starts a chain, one of the wanted kind after it, and what `tail` says."""
    x = x or (2, 3, 9, 10)
    first = random(w[1] * group, x[1], *(3 for _ in x[2:]), seed=5)
    rank = len(x) - 2
    nodes = [
        node("Conv", ["x", "first"], ["a"], pads=[1] * 2 * rank, name="start"),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w", "bias"], ["c"], name="wanted", group=group, **attributes),
        *tail,
        node("Sigmoid", [tail[-1].output[0] if tail else "c"], ["y"]),
    ]
    weights = {"first": first, "w": random(*w, seed=1, scale=0.3), "bias": random(w[0], seed=2)}
    return proto(nodes, [f"x:float[{dims(x)}]"], ["y:float[...]"], weights, opset=opset), {"x": random(*x, seed=3)}


KINDS = {
    "dense": ((6, 8, 3, 3), 1),
    "one element": ((6, 8, 1, 1), 1),
    "a row": ((6, 8, 1, 3), 1),
    "depthwise": ((8, 1, 3, 3), 8),
    "depthwise, two filters": ((16, 1, 3, 3), 8),
    "thin groups": ((8, 2, 3, 3), 4),
    "thin groups of one element": ((12, 2, 1, 1), 4),
    "thick groups of one element": ((6, 20, 1, 1), 2),
    "depthwise of one element, two filters": ((8, 1, 1, 1), 4),
    "groups": ((12, 12, 3, 3), 2),
    "thick groups": ((8, 40, 3, 3), 2),
    "large depthwise": ((4, 1, 5, 5), 4),
}
GEOMETRIES = [
    {},
    {"strides": [2, 2]},
    {"strides": [1, 3], "pads": [0, 1, 2, 0]},
    {"pads": [2, 2, 2, 2], "dilations": [2, 2]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 1]},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_in_a_chain(kind, geometry):
    w, group = KINDS[kind]
    made, inputs = chain(w, group, **geometry)
    assert "channels last" in check(made, inputs, some=True)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "one element" in kind])
def test_convolutions_of_one_element_in_plain_values(kind, geometry):
    w, group = KINDS[kind]
    nodes = [node("Conv", ["x", "w"], ["y"], group=group, **geometry)]
    shape = (2, w[1] * group, 9, 10)
    made = proto(nodes, [f"x:float[{dims(shape)}]"], ["y:float[...]"], {"w": random(*w, seed=1)})
    taken = check(made, {"x": random(*shape, seed=3)})
    padded = geometry.get("pads", [0])[0] or geometry.get("pads", [0, 0])[1]
    assert ("pointwise product" in taken) == (w[1] > 1 and not padded)


@pytest.mark.slow  # together they are in the chains above
@pytest.mark.parametrize("kind", KINDS)
def test_each_lowering_alone(kind):
    w, group = KINDS[kind]
    made, inputs = chain(w, group, strides=[2, 2], pads=[1, 1, 1, 1])
    check(made, inputs)


@pytest.mark.parametrize(
    ("w", "group", "geometry"),
    [((6, 8, 3), 1, {"dilations": [2]}), ((8, 1, 7), 8, {"pads": [3, 3]}), ((4, 8, 1), 1, {"strides": [2]})],
)
def test_convolutions_of_sequences(w, group, geometry):
    made, inputs = chain(w, group, x=(2, 3, 20), **geometry)
    assert "channels last" in check(made, inputs)


@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"strides": [2, 1, 2], "pads": [1, 0, 1, 2, 1, 0]},
        {"dilations": [2, 1, 2], "pads": [2, 1, 2, 2, 1, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [3, 2, 2]},
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", [(3, 3, 3), (2, 1, 1), (1, 3, 2)])
def test_convolutions_in_space(kernel, geometry):
    made, inputs = chain((6, 8, *kernel), x=(2, 3, 7, 6, 9), **geometry)
    assert "depth in channels" in check(made, inputs, some=True)
    session = Session(made, lowerings=ALL)
    session(inputs)
    [segment] = session.cache.segments()
    assert {name for name, _, form in segment.lowerings if form == "depth in channels"} == {"start", "wanted"}


def test_a_deep_kernel_does_not_multiply_its_input():
    made, inputs = chain((6, 8, 8, 1, 1), x=(1, 3, 9, 4, 4))
    session = Session(made, lowerings=ALL)
    assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=2e-5)
    [segment] = session.cache.segments()
    assert {name for name, _, form in segment.lowerings if form == "depth in channels"} == {"start"}


@pytest.mark.parametrize("size", [63, 64, 83, 160])
@pytest.mark.parametrize("special", ["none", "last", "nan", "low"])
def test_extremes_in_lanes(size, special):
    """A remainder of sixteen, the extreme in it, NaN, and nothing but the lowest."""
    x = random(2, 3, 1, size, seed=size)
    if special == "last":
        x[..., -1] = 50
    if special == "nan":
        x[1, 2, 0, size // 2] = np.nan
    if special == "low":
        x[0, 1] = -np.inf
    for operator, outputs in (("GlobalMaxPool", ["y"]), ("DynamicQuantizeLinear", ["y", "scale", "zero"])):
        if operator == "DynamicQuantizeLinear" and special in ("nan", "low"):
            continue  # what is quantised is finite
        kinds = ["y:float[...]"] if len(outputs) == 1 else ["y:uint8[...]", "scale:float[]", "zero:uint8[]"]
        made = proto([node(operator, ["x"], outputs)], [f"x:float[{dims(x.shape)}]"], kinds)
        want = by_onnxruntime(made, {"x": x})
        if special == "nan":
            want["y"][1, 2] = np.nan  # onnxruntime passes it over; numpy and the reductions of the standard do not
        if special == "low":
            want["y"][0, 1] = -np.inf  # and starts from the lowest finite number
        for _, session in forms(made):
            assert_same(session({"x": x}), want, rtol=1e-6, atol=0)


def test_gradients_of_convolutions_in_space():
    made, inputs = chain((6, 8, 3, 2, 3), x=(2, 3, 5, 6, 4), strides=[2, 1, 1], pads=[1, 0, 1, 0, 1, 1])
    assert_same_gradients(made, inputs)


def test_unit_axes_in_a_chain():
    made, inputs = chain((6, 8, 1, 3), 1, x=(2, 3, 1, 20))
    weights = {i.name: i for i in made.graph.initializer}
    assert weights["first"].dims[2] == 3  # over one row of height 1, padded
    assert "unit axes" in check(made, inputs)


@pytest.mark.parametrize("kernel", [(3, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]])
@pytest.mark.parametrize("sizes", [(11, 12), (10, 15)])
def test_first_convolutions_with_strides(kernel, pads, sizes):
    nodes = [node("Conv", ["x", "w"], ["y"], strides=[2, 2], pads=pads)]
    made = proto(nodes, [f"x:float[2,3,{dims(sizes)}]"], ["y:float[...]"], {"w": random(5, 3, *kernel)})
    taken = check(made, {"x": random(2, 3, *sizes, seed=1)}, some=True)
    assert "space to depth" in taken


TAILS = {
    "constant of a channel": [node("Mul", ["c", "channel"], ["t"])],
    "scalar": [node("Add", ["c", "one"], ["t"])],
    "a map": [node("Sub", ["map", "c"], ["t"])],
    "batch norm": [node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["t"])],
    "max pool": [node("MaxPool", ["c"], ["t"], kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])],
    "max pool, ceil": [node("MaxPool", ["c"], ["t"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)],
    "max pool, indices": [node("MaxPool", ["c"], ["t", "indices"], kernel_shape=[2, 2])],
    "average pool": [node("AveragePool", ["c"], ["t"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])],
    "average pool with pads": [
        node("AveragePool", ["c"], ["t"], kernel_shape=[3, 2], pads=[1, 1, 0, 0], count_include_pad=1)
    ],
    "global mean": [node("GlobalAveragePool", ["c"], ["m"]), node("Mul", ["c", "m"], ["t"])],
    "global maximum": [node("GlobalMaxPool", ["c"], ["m"]), node("Mul", ["c", "m"], ["t"])],
    "mean over space": [node("ReduceMean", ["c", "space"], ["t"], keepdims=0)],
    "mean over space, kept": [node("ReduceMean", ["c", "space"], ["m"]), node("Sub", ["c", "m"], ["t"])],
    "mean over channels": [node("ReduceMean", ["c", "channels"], ["t"], keepdims=0)],
    "maximum along one axis": [node("ReduceMax", ["c", "last"], ["t"], keepdims=0)],
    "sum along one axis, kept": [node("ReduceSum", ["c", "last"], ["t"])],
    "concat": [node("Concat", ["c", "map"], ["t"], axis=1)],
    "concat along a row": [node("Concat", ["c", "c"], ["t"], axis=-1)],
    "split": [node("Split", ["c"], ["p", "q"], axis=1, num_outputs=2), node("Mul", ["p", "q"], ["t"])],
    "split of a row": [node("Split", ["c", "parts"], ["p", "t"], axis=3)],
    "slice": [node("Slice", ["c", "starts", "ends", "axes", "steps"], ["t"])],
    "slice without axes": [node("Slice", ["c", "starts", "ends"], ["t"])],
    "softmax of channels": [node("Softmax", ["c"], ["t"], axis=1)],
    "softmax of a row": [node("LogSoftmax", ["c"], ["t"], axis=-1)],
    "transpose": [node("Transpose", ["c"], ["t"], perm=[0, 2, 3, 1])],
    "any transpose": [node("Transpose", ["c"], ["t"])],
    "resize": [node("Resize", ["c", "", "scales"], ["t"], mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric")],
    "resize to sizes": [node("Resize", ["c", "", "", "sizes"], ["t"], mode="linear")],
    "pad": [node("Pad", ["c", "around"], ["t"])],
    "pad, reflected": [node("Pad", ["c", "around"], ["t"], mode="reflect")],
    "flatten": [node("Flatten", ["c"], ["t"])],
    "reshape": [node("Reshape", ["c", "flat"], ["t"])],
    "reshape to a row": [node("Reshape", ["c", "row"], ["r"]), node("Mul", ["r", "channel 1"], ["t"])],
    "reshape to rows that are moved": [node("Reshape", ["c", "row"], ["r"]), node("Transpose", ["r"], ["t"], perm=[0, 2, 1])],
    "reshape to more axes": [
        node("Reshape", ["c", "quarters"], ["r"]),
        node("MaxPool", ["r"], ["m"], kernel_shape=[1, 2, 2], strides=[1, 1, 2]),
        node("ReduceMean", ["m", "last"], ["t"], keepdims=0),
    ],
    "squeeze": [
        node("GlobalMaxPool", ["c"], ["m"]),
        node("Squeeze", ["m", "last"], ["s"]),
        node("Add", ["s", "channel 1"], ["t"]),
    ],
    "squeeze of all": [node("GlobalMaxPool", ["c"], ["m"]), node("Squeeze", ["m", "space"], ["s"]), node("Gemm", ["s", "square"], ["t"])],
    "two ranks": [  # (2, 6, 6, 8) and (1, 6, 1), whose 6 is of rows
        node("MaxPool", ["c"], ["p"], kernel_shape=[2, 1]),
        node("ReduceMax", ["c", "first axis"], ["n"]),
        node("GlobalMaxPool", ["n"], ["m"]),
        node("Squeeze", ["m", "last"], ["s"]),
        node("Mul", ["p", "s"], ["q"]),
        node("Where", ["sure", "s", "q"], ["t"]),
    ],
    "unsqueeze": [node("Unsqueeze", ["c", "third and last"], ["u"]), node("Mul", ["u", "channel 4"], ["t"])],
    "unsqueeze before channels": [node("Unsqueeze", ["c", "channels"], ["u"]), node("Mul", ["c", "u"], ["t"])],
    "shuffle": [
        node("Reshape", ["c", "split"], ["p"]),
        node("Transpose", ["p"], ["q"], perm=[0, 2, 1, 3, 4]),
        node("Reshape", ["q", "joined"], ["t"]),
    ],
    "shuffle of single channels": [
        node("Reshape", ["c", "singles"], ["p"]),
        node("Transpose", ["p"], ["q"], perm=[0, 2, 1, 3, 4]),
        node("Reshape", ["q", "joined"], ["t"]),
    ],
    "half a shuffle": [node("Reshape", ["c", "split"], ["p"]), node("Transpose", ["p"], ["t"], perm=[0, 1, 3, 2, 4])],
    "clip": [node("Clip", ["c", "low"], ["t"])],
    "slope": [node("PRelu", ["c", "channel"], ["t"])],
    "where": [node("Greater", ["c", "low"], ["g"]), node("Where", ["g", "c", "channel"], ["t"])],
    "cast": [node("Cast", ["c"], ["d"], to=11), node("Cast", ["d"], ["t"], to=1)],
    "shape": [node("Shape", ["c"], ["s"]), node("Reshape", ["c", "s"], ["t"])],
    "transposed": [node("ConvTranspose", ["c", "up"], ["t"], strides=[2, 2], pads=[1, 0, 0, 1], output_padding=[1, 0])],
    "transposed, blocks": [node("ConvTranspose", ["c", "double", "seven"], ["t"], strides=[2, 2])],
    "transposed, blocks, cropped": [node("ConvTranspose", ["c", "double"], ["t"], strides=[2, 2], pads=[1, 0, 0, 1])],
    "transposed, wanted": [node("ConvTranspose", ["c", "up"], ["t"], strides=[2, 2], output_shape=[14, 16])],
    "transposed, groups": [node("ConvTranspose", ["c", "up"], ["t"], group=2)],
    "instance norm": [node("InstanceNormalization", ["c", "scale", "shift"], ["t"])],
    "gather": [node("Gather", ["c", "picked"], ["t"], axis=1)],
    "two readers": [
        node("Transpose", ["c"], ["p"], perm=[0, 3, 2, 1]),
        node("ReduceMean", ["p", "space"], ["m"], keepdims=0),
        node("ReduceMax", ["c", "space"], ["n"], keepdims=0),
        node("MatMul", ["n", "square"], ["o"]),
        node("ReduceSum", ["m", "channels"], ["k"]),
        node("Add", ["o", "k"], ["t"]),
    ],
}  # fmt: skip
CONSTANTS = {
    "channel": random(6, 1, 1, seed=11),
    "channel 1": random(6, 1, seed=21),
    "channel 4": random(6, 1, 1, 1, 1, seed=22),
    "one": np.array([1.5], np.float32),
    "low": np.array(-0.1, np.float32),
    "map": random(2, 6, 7, 8, seed=12),
    "scale": random(6, seed=13),
    "shift": random(6, seed=14),
    "mean": random(6, seed=15),
    "var": np.abs(random(6, seed=16)) + 0.5,
    "space": np.array([2, 3]),
    "channels": np.array([1]),
    "last": np.array([-1]),
    "parts": np.array([3, 5]),
    "starts": np.array([0, 1, 1, -6]),
    "ends": np.array([2, 5, 100, 100]),
    "axes": np.array([0, 1, 2, 3]),
    "steps": np.array([1, 2, 1, 3]),
    "scales": np.array([1, 1, 2, 3], np.float32),
    "sizes": np.array([2, 6, 9, 5]),
    "around": np.array([0, 0, 1, 2, 0, 0, 2, 1]),
    "flat": np.array([0, -1]),
    "first axis": np.array([0]),
    "sure": np.arange(8) < 5,
    "row": np.array([0, 0, -1]),
    "quarters": np.array([2, 6, 7, -1, 4]),
    "third and last": np.array([2, -1]),
    "split": np.array([0, 2, 3, 7, 8]),
    "singles": np.array([0, 6, 1, 7, 8]),
    "joined": np.array([2, -1, 7, 8]),
    "up": random(6, 3, 3, 3, seed=17),
    "double": random(6, 7, 2, 2, seed=18),
    "seven": random(7, seed=19),
    "picked": np.array([3, 0, 5]),
    "square": random(6, 6, seed=20),
}


@pytest.mark.parametrize("tail", TAILS)
def test_what_lies_between_convolutions(tail):
    made, inputs = chain((6, 8, 3, 3), tail=TAILS[tail])
    used = {name for each in TAILS[tail] for name in each.input}
    made.graph.initializer.extend(
        proto([], [], [], {name: value for name, value in CONSTANTS.items() if name in used}).graph.initializer
    )
    assert "channels last" in check(made, inputs, some=True)


@pytest.mark.parametrize(
    ("opset", "x", "axes", "stays"),
    [
        (18, (2, 3, 4, 1), [3], True),
        (18, (2, 3, 4, 1), [-1], True),
        (11, (2, 3, 4, 1), [3], True),
        (18, (2, 3, 1, 5), [2], True),
        (18, (1, 3, 4, 1), [0, 3], False),  # the batch goes, so there is nothing left to keep channels behind
        (18, (1, 3, 4, 1), None, False),
        (18, (2, 3, 4, 1), [], False),  # no axes are all axes
        (11, (2, 3, 4, 1), [], False),
        (21, (2, 3, 1, 1), [], False),
    ],
)
def test_squeezed_images_keep_the_chain(opset, x, axes, stays):
    """What exporters make of sequences: an image of one column, which is one no more behind the convolution."""
    shape = [n for i, n in enumerate(x) if i == 1 or not (n == 1 if not axes else i - len(x) in axes or i in axes)]
    old = opset < 13
    given = [] if old or axes is None else ["axes"]
    nodes = [
        node("Conv", ["x", "v"], ["a"], pads=[1, 1, 1, 1]),
        node("Squeeze", ["a", *given], ["b"]),
        node("Relu", ["b"], ["c"], name="last"),
        node("Neg", ["c"], ["y"]),
    ]
    if old:
        nodes[1].attribute.append(onnx.helper.make_attribute("axes", axes, attr_type=onnx.AttributeProto.INTS))
    weights = {"v": random(3, 3, 3, 3, seed=1)} | ({"axes": np.array(axes, np.int64)} if given else {})
    made = proto(nodes, [f"x:float[{dims(x)}]"], ["y:float[...]"], weights, opset=opset)
    inputs = {"x": random(*x, seed=3)}
    assert list(by_onnxruntime(made, inputs)["y"].shape) == shape
    check(made, inputs, some=True)
    session = Session(made, lowerings=ALL)
    session(inputs)
    [segment] = session.cache.segments()
    assert (("last", "ai.onnx:Relu", "channels last") in segment.lowerings) == stays


@pytest.mark.parametrize(("opset", "training"), [(7, None), (10, None), (12, None), (18, None), (18, False)])
def test_a_dropout_that_drops_nothing_keeps_the_chain(opset, training):
    extra = [] if training is None else ["ratio", "training"]
    nodes = [
        node("Conv", ["x", "v"], ["a"], pads=[1, 1, 1, 1]),
        node("Dropout", ["a", *extra], ["b", "mask"], name="drop"),
        node("Conv", ["b", "w"], ["y"], name="last"),
    ]
    weights = {"v": random(8, 3, 3, 3, seed=1), "w": random(6, 8, 1, 1, seed=2)}
    if training is not None:
        weights |= {"ratio": np.float32(0.25), "training": np.bool_(training)}
    mask = "bool" if opset >= 10 else "float"
    made = proto(nodes, ["x:float[2,3,9,10]"], ["y:float[...]", f"mask:{mask}[2,8,9,10]"], weights, opset=opset)
    session = Session(made, lowerings=ALL)
    inputs = {"x": random(2, 3, 9, 10, seed=3)}
    got, want = session(inputs), by_onnxruntime(made, inputs)
    assert got["mask"].all()
    if opset < 12:  # what a mask is when nothing is dropped is said since then; onnxruntime has zeros
        del got["mask"], want["mask"]
    assert_same(got, want, rtol=1e-4, atol=2e-5)
    [segment] = session.cache.segments()
    found = {name for name, _, lowering in segment.lowerings if lowering == "channels last"}
    assert {"drop", "last"} <= found


def test_a_dropout_that_trains_draws_where_the_graph_says():
    weights = {"v": random(8, 3, 3, 3, seed=1), "ratio": np.float32(0.5), "training": np.bool_(True)}
    nodes = [
        node("Conv", ["x", "v"], ["a"], pads=[1, 1, 1, 1]),
        node("Dropout", ["a", "ratio", "training"], ["b", "mask"], seed=7),
        node("Relu", ["b"], ["y"]),
    ]
    outputs = ["y:float[...]", "mask:bool[2,8,9,10]", "a:float[2,8,9,10]"]
    made = proto(nodes, ["x:float[2,3,9,10]"], outputs, weights, opset=18)
    inputs = {"x": random(2, 3, 9, 10, seed=3)}
    y, mask, a = (Session(made, lowerings=ALL)(inputs)[name] for name in ("y", "mask", "a"))
    plain = Session(made, lowerings=())(inputs)
    np.testing.assert_array_equal(mask, plain["mask"])
    assert 0.3 < mask.mean() < 0.7
    np.testing.assert_allclose(y, np.where(mask, np.maximum(a, 0) * 2, 0), rtol=1e-5)


@pytest.mark.parametrize("name", ["MaxPool", "AveragePool"])
def test_pooling_of_plain_values(name):
    nodes = [node(name, ["x"], ["y"], kernel_shape=[3, 2], strides=[1, 2], pads=[1, 0, 0, 1])]
    made = proto(nodes, ["x:float[2,3,8,9]"], ["y:float[...]"])
    assert "separable" in check(made, {"x": random(2, 3, 8, 9)})


@pytest.mark.parametrize("transposed", [0, 1])
def test_weights_of_products_are_transposed_once(transposed):
    w = random(7, 100, seed=1)
    made = proto(
        [node("Gemm", ["x", "w", "b"], ["y"], transB=transposed)],
        ["x:float[3,100]"],
        ["y:float[3,7]"],
        {"w": w if transposed else np.ascontiguousarray(w.T), "b": random(7)},
    )
    session = Session(made)
    inputs = {"x": random(3, 100, seed=2)}
    assert_same(session(inputs), by_onnxruntime(made, inputs), atol=1e-5)
    (segment,) = session.cache.segments()
    assert "transpose(" not in segment.program.as_text()


def packed():
    """A product with 4-bit weights, and a recurrent layer."""
    random_bytes = np.random.default_rng(4).integers(0, 255, (64, 2, 16), dtype=np.uint8)
    made = proto(
        [
            node("MatMulNBits", ["x", "b", "scales"], ["m"], domain="com.microsoft", K=64, N=64, bits=4, block_size=32),
            node("LSTM", ["m", "w", "r"], ["y"], hidden_size=24),
            node("GRU", ["m", "w3", "r3"], ["z"], hidden_size=24, direction="reverse"),
        ],
        ["x:float[5,2,64]"],
        ["y:float[...]", "z:float[...]"],
        {
            "b": random_bytes,
            "scales": random(128, seed=5, scale=0.1),
            "w": random(1, 96, 64, seed=6, scale=0.1),
            "r": random(1, 96, 24, seed=7, scale=0.1),
            "w3": random(1, 72, 64, seed=8, scale=0.1),
            "r3": random(1, 72, 24, seed=9, scale=0.1),
        },
    )
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("fold_bytes", [0, 64 << 20])
def test_weights_are_made_once_within_the_budget(fold_bytes, steps):
    made = packed()
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = steps
    inputs = {"x": random(steps, 2, 64)}
    session = Session(made, fold_bytes=fold_bytes)
    assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-5)
    (segment,) = session.cache.segments()
    found = {(str(weight.dtype), weight.shape) for weight in segment.weights}
    assert {("float32", (64, 96)), ("float32", (1, 24, 96)), ("float32", (64, 72)), ("float32", (1, 24, 72))} <= found
    whole = ("float32", (64, 64)) in found
    assert whole == bool(fold_bytes)
    assert (("uint8", (64, 2, 16)) in found) == (not whole)


def test_weights_that_were_made_are_named_on_disk(tmp_path):
    """A program from the disk takes the same weights, made again from the graph's."""
    made = packed()
    inputs = {"x": random(5, 2, 64)}
    first = Session(made, cache_dir=str(tmp_path))
    want = first(inputs)
    again = Session(made, cache_dir=str(tmp_path))
    assert_same(again(inputs), want, rtol=0, atol=0)
    assert [fact.disk_cache for fact in again.facts if isinstance(fact, SegmentReady)] == ["hit"]
    (one,), (other,) = first.cache.segments(), again.cache.segments()
    assert one.lowerings == other.lowerings
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1 << 18


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("zero", [None, np.array(3, np.int8), np.arange(6, dtype=np.int8)], ids=["none", "one", "each"])
def test_integer_products_with_known_weights_are_exact(rows, zero):
    """Also where a column of the weights adds up to more than a float32 holds exactly."""
    depth = 2000
    w = np.random.default_rng(1).integers(-127, 127, (depth, 6), dtype=np.int8)
    w[:, 1] = 127
    names = ["x", "w", "", "zero"] if zero is not None else ["x", "w"]
    made = proto(
        [node("MatMulInteger", names, ["y"])],
        [f"x:uint8[{rows},{depth}]"],
        ["y:int32[...]"],
        {"w": w} | ({} if zero is None else {"zero": zero}),
    )
    x = np.random.default_rng(2).integers(200, 256, (rows, depth)).astype(np.uint8)
    shifted = w.astype(np.int32) - (0 if zero is None else zero.astype(np.int32))
    for chosen in ({}, {"fold_bytes": 0}):
        (found,) = Session(made, **chosen)({"x": x}).values()
        np.testing.assert_array_equal(found, x.astype(np.int32) @ shifted)


@pytest.mark.parametrize("channels", [3, 70, 1200])  # one convolution, two halves, float64
@pytest.mark.parametrize("zero", [None, np.int8(-100), np.array([-128, 0, 127, 5], np.int8)], ids=["none", "one", "each"])
def test_integer_convolutions_with_known_weights_are_exact(channels, zero):
    rng = np.random.default_rng(0)
    w = rng.integers(100, 128, (4, channels, 3, 3)).astype(np.int8)
    x = rng.integers(250, 256, (2, channels, 3, 4)).astype(np.uint8)
    weights = {"w": w, "none": np.uint8(3)} | ({} if zero is None else {"zero": zero})
    nodes = [node("ConvInteger", ["x", "w", "none", *([] if zero is None else ["zero"])], ["y"])]
    made = proto(nodes, [f"x:uint8[{dims(x.shape)}]"], ["y:int32[...]"], weights)
    less = w.astype(np.int64) - (0 if zero is None else zero.astype(np.int64).reshape(-1, *(1,) * (3 * zero.ndim)))
    parts = [np.einsum("nchw,mchw->nm", x[..., at : at + 3].astype(np.int64) - 3, less) for at in (0, 1)]
    want = np.stack(parts, axis=-1)[:, :, None]
    for _, session in forms(made):
        np.testing.assert_array_equal(session({"x": x})["y"], want)


def test_weights_of_branches_are_folded():
    """What a branch computes from weights alone, its own and those around it, is computed once, on the host."""
    own, around = random(60, 300, seed=1), random(300, 300, seed=2)

    def branch(scale):
        nodes = [
            node("Transpose", ["w"], ["turned"], perm=[1, 0]),
            node("MatMul", ["around", "turned"], ["both"]),
            node("MatMul", ["x", "both"], ["out"]),
        ]
        return graph(nodes, [], ["out:float[2,60]"], {"w": scale * own})

    made = proto(
        [node("If", ["on"], ["y"], then_branch=branch(1), else_branch=branch(np.float32(0.5)))],
        ["x:float[2,300]", "on:bool[]"],
        ["y:float[2,60]"],
        {"around": around},
    )
    session = Session(made)
    for on in (True, False):
        inputs = {"x": random(2, 300, seed=3), "on": np.array(on)}
        assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-3)
    (condition,) = session.prepared.graph.nodes
    for body in condition.subgraphs():
        assert [each.op_type for each in body.nodes] == ["MatMul"]
        assert list(body.initializers) == ["both"]


@pytest.mark.parametrize("shape", [(1, 300), (2, 300), (4, 8, 300), (33, 300)], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("zero", ["none", "one", "rows"])
def test_products_of_8_bits_are_exact(shape, dtype, zero):
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    w = rng.integers(-128, 127, (300, 40), endpoint=True).astype(np.int8)
    x[..., 0, :], w[:, :2] = info.max, np.array([-128, 127], np.int8)
    if zero == "rows" and len(shape) > 2:
        shape = (shape[0] * shape[1], shape[2])  # onnxruntime and the text of the standard agree on matrices only
        x = x.reshape(shape)
    zeros = {"none": None, "one": np.array(info.max, dtype), "rows": rng.integers(info.min, info.max, shape[0]).astype(dtype)}[zero]
    kind = np.dtype(dtype).name
    made = proto(
        [node("MatMulInteger", ["x", "w", *([] if zeros is None else ["zero"])], ["y"])],
        [f"x:{kind}[{dims(shape)}]", *([] if zeros is None else [f"zero:{kind}[{dims(zeros.shape)}]"])],
        ["y:int32[...]"],
        {"w": w},
    )
    inputs = {"x": x} | ({} if zeros is None else {"zero": zeros})
    less = 0 if zeros is None else zeros.astype(np.int64).reshape(-1, 1) if zeros.ndim else zeros.astype(np.int64)
    want = (x.astype(np.int64) - less) @ w.astype(np.int64)
    for chosen in ((), ("8-bit product",)):
        session = Session(made, lowerings=chosen)
        np.testing.assert_array_equal(session(inputs)["y"], want)
        [segment] = session.cache.segments()
        few = 2 <= int(np.prod(shape[:-1])) <= 32
        assert bool(segment.lowerings) is (few and bool(chosen))


def test_some_need_instructions_of_the_processor(monkeypatch):
    monkeypatch.setattr(lowering, "instructions", lambda: frozenset({"avx2", "avx_vnni"}))
    assert lowerings_for("cpu") == frozenset(LOWERINGS)
    monkeypatch.setattr(lowering, "instructions", lambda: frozenset({"avx2"}))
    assert lowerings_for("cpu") == frozenset(LOWERINGS) - {"8-bit product"}
    assert lowerings_for("cpu", forced=["8-bit product"]) == {"8-bit product"}


def test_chosen_by_platform_and_by_optimize():
    assert lowerings_for("cpu") >= frozenset(LOWERINGS) - {"8-bit product"}
    assert lowerings_for("gpu") == lowerings_for("tpu") == lowerings_for("cpu", optimize=False) == frozenset()
    assert lowerings_for("gpu", forced=["unit axes"]) == {"unit axes"}
    with pytest.raises(ValueError, match=r"'winograd'.*are no lowerings"):
        lowerings_for("cpu", forced=["winograd"])


def test_optimize_off_is_the_plain_form():
    made, inputs = chain((8, 1, 3, 3), 8)
    session = Session(made, optimize=False)
    assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=2e-5)
    assert all(not segment.lowerings for segment in session.cache.segments())


def test_explained_for_each_node():
    made, inputs = chain((8, 1, 3, 3), 8)
    session = Session(made)
    session(inputs)
    found = explain(session.prepared, session.cache)
    assert {row.node: row.names for row in found.lowerings}["wanted"] == ("shifted taps", "channels last")
    assert "shifted taps" not in str(found)
    assert "Conv 'wanted': shifted taps, channels last" in str(dataclasses.replace(found, verbose=True))
    plain = Session(made, optimize=False)
    plain(inputs)
    told = str(dataclasses.replace(explain(plain.prepared, plain.cache), verbose=True))
    assert "takes its plain form" in told


def test_a_break_inside_of_a_chain():
    """Values that cross a break are plain ones."""
    made, inputs = chain((6, 8, 3, 3), tail=[node("MaxPool", ["c"], ["t"], kernel_shape=[2, 2])])
    want = by_onnxruntime(made, inputs)
    for every in (1, 2, 3):
        session = Session(made, force_breaks=range(1, 10, every), min_segment_nodes=1)
        assert_same(session(inputs), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_form(kind):
    w, group = KINDS[kind]
    assert_same_gradients(*chain(w, group, strides=[2, 2], pads=[1, 1, 1, 1]))


def assert_same_gradients(made, inputs):
    """By every weight and by the input, against the plain form's own, which other tests hold to differences."""
    model = read_model(made, known=known)

    def gradients(**options):
        apply, params = to_jax(model, **options)
        loss = lambda params, inputs: (apply(params, inputs)["y"] ** 2).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(params, {k: jax.numpy.asarray(v) for k, v in inputs.items()})

    plain = gradients(lowerings=())
    ours = gradients()
    assert jax.tree.structure(plain) == jax.tree.structure(ours)
    for found, want in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        scale = float(abs(np.asarray(want)).max())
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-5 * max(1.0, scale))


def test_options_take_only_what_there_is():
    made, _ = chain((6, 8, 3, 3))
    with pytest.raises(ValueError, match="are no lowerings"):
        Session(made, lowerings=("fast",))
    assert {field.name for field in dataclasses.fields(Options)} >= {"lowerings"}
