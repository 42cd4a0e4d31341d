"""Operators of the standard that its suite has no case for: a hundred drawn examples each.

Those of ai.onnx.ml are in test_ml.py. The judge is onnxruntime, `jax.random` for numbers, or numpy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import transmuter_async as tm
from tests.conformance.suite import evaluate
from tests.operators.cases import EXACT, FLOAT, Case, Draw, Tolerance, check, examples, few_examples
from tests.operators.oracle import ML, agree, host_outputs, traced_outputs
from transmuter_async.graph import read_model
from transmuter_async.graph.dtypes import element_type_of
from transmuter_async.operators import known

programs = settings(examples, max_examples=3)


# --- pools ------------------------------------------------------------------------------------------------------------


def GlobalLpPool(d: Draw) -> Case:
    shape = (d.size(0, 3), d.size(1, 3), *d.shape(d.size(1, 3), low=1))
    dtype = d.pick((np.float32, np.float64))
    x, p = d.floats(*shape, scale=d.pick((1.0, 30.0)), dtype=dtype), d.size(1, 4)
    opset = d.pick((2, 21))
    if dtype == np.float32 and x.size:
        return Case([x], {"p": p}, opset=opset)
    # onnxruntime has float32 alone, and refuses an empty batch.
    total = (np.abs(x.astype(np.float64)) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p)
    return Case([x], {"p": p}, opset=opset, expected=[total.astype(dtype)])


def MaxRoiPool(d: Draw) -> Case:
    n, c, h, w = d.size(1, 3), d.size(1, 3), d.size(1, 7), d.size(1, 7)
    count = d.size(0, 4)
    corners = d.integers(0, 8, count, 4).astype(np.float32) + d.pick((0.0, 0.25))
    boxes = np.concatenate([d.integers(0, n, count, 1).astype(np.float32), corners], axis=1)
    boxes[:, 3:] = np.maximum(boxes[:, 1:3], boxes[:, 3:])
    attributes = {"pooled_shape": [d.size(1, 3), d.size(1, 3)], "spatial_scale": d.pick((1.0, 0.5))}
    x = d.floats(n, c, h, w)
    if count == 0:
        return Case(
            [x, boxes], attributes, opset=21, expected=[np.zeros((0, c, *attributes["pooled_shape"]), np.float32)]
        )
    return Case([x, boxes], attributes, opset=21)


POOLS: dict[str, tuple[Callable[[Draw], Case], Tolerance]] = {
    "GlobalLpPool": (GlobalLpPool, FLOAT),
    "MaxRoiPool": (MaxRoiPool, EXACT),
}


@pytest.mark.parametrize("name", POOLS)
@examples
@given(data=st.data())
def test_pools(name: str, data: st.DataObject) -> None:
    make, tolerance = POOLS[name]
    check(name, make(Draw(data)), tolerance, domain="")


@pytest.mark.parametrize("name", POOLS)
@few_examples
@given(data=st.data())
def test_pools_in_a_program(name: str, data: st.DataObject) -> None:
    make, tolerance = POOLS[name]
    check(name, make(Draw(data)), tolerance, domain="", traced=True)


# --- sequences --------------------------------------------------------------------------------------------------------


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type_of(array.dtype), array.shape)


def _of_sequence(
    parts: list[np.ndarray], nodes: list[onnx.NodeProto], more: dict[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """`nodes` behind a SequenceConstruct `s` of the parts; the output is `y`."""
    feeds = {f"p{k}": part for k, part in enumerate(parts)} | more
    construct = helper.make_node("SequenceConstruct", [f"p{k}" for k in range(len(parts))], ["s"])
    output = helper.make_tensor_value_info("y", element_type_of(parts[0].dtype), None)
    graph = helper.make_graph([construct, *nodes], "g", [_info(*item) for item in feeds.items()], [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), feeds


def _onnxruntime(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def _parts(d: Draw, axis: int, *, new_axis: bool) -> list[np.ndarray]:
    dtype = d.pick((np.float32, np.int64, np.float64, np.int32, np.bool_))
    rank = d.size(1, 3)
    shape = list(d.shape(rank, low=0))
    parts = []
    for _ in range(d.size(1, 4)):
        if not new_axis:
            shape[axis % rank] = d.size(0, 3)
        parts.append(np.asarray(d.rng.integers(-9, 9, shape)).astype(dtype))
    return parts


def ConcatFromSequence(d: Draw) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    new_axis = d.flag()
    axis = d.pick((0, -1))
    parts = _parts(d, axis, new_axis=new_axis)
    node = helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=axis, new_axis=int(new_axis))
    return _of_sequence(parts, [node], {})


def SequenceErase(d: Draw) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    parts = _parts(d, 0, new_axis=True)
    parts.append(parts[0] + parts[0])
    place = d.pick([None, *range(-len(parts), len(parts))])
    more, names = {}, ["s"]
    if place is not None:
        dtype = d.pick((np.int64, np.int32))
        more, names = {"place": np.asarray(place, dtype)}, ["s", "place"]
    joined = helper.make_node("ConcatFromSequence", ["t"], ["y"], axis=0, new_axis=1)
    return _of_sequence(parts, [helper.make_node("SequenceErase", names, ["t"]), joined], more)


SEQUENCES = {"ConcatFromSequence": ConcatFromSequence, "SequenceErase": SequenceErase}


@pytest.mark.parametrize("name", SEQUENCES)
@examples
@given(data=st.data())
def test_sequences(name: str, data: st.DataObject) -> None:
    model, feeds = SEQUENCES[name](Draw(data))
    agree(tm.run_sync(model, feeds, compiler="eager")["y"], _onnxruntime(model, feeds)[0], what=name)


@pytest.mark.parametrize("name", SEQUENCES)
@programs
@given(data=st.data())
def test_sequences_in_a_program(name: str, data: st.DataObject) -> None:
    model, feeds = SEQUENCES[name](Draw(data))
    ours, _, breaks = evaluate(read_model(model, known=known), feeds, "compiled")
    assert breaks == 0
    agree(ours["y"], _onnxruntime(model, feeds)[0], what=name)


# --- maps -------------------------------------------------------------------------------------------------------------

CASTS = {"TO_FLOAT": TensorProto.FLOAT, "TO_INT64": TensorProto.INT64, "TO_STRING": TensorProto.STRING}


@examples
@given(data=st.data())
def test_cast_map(data: st.DataObject) -> None:
    """onnxruntime's Python takes maps from integers to floats; those to strings are in test_ml.py."""
    d = Draw(data)
    keys = d.rng.permutation(12)[: d.size(1, 6)]
    entries = {int(key): float(np.round(d.rng.normal() * 4, 3)) for key in keys}
    sparse = d.flag()
    cast = d.pick(list(CASTS))
    attributes = {"cast_to": cast, "map_form": "SPARSE" if sparse else "DENSE", "max_map": d.size(1, 14)}
    mapping = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    x = onnx.ValueInfoProto(name="x")
    x.type.CopyFrom(mapping)
    node = helper.make_node("CastMap", ["x"], ["y"], domain=ML, **attributes)
    graph = helper.make_graph([node], "g", [x], [helper.make_tensor_value_info("y", CASTS[cast], None)])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 1)]
    (theirs,) = _onnxruntime(helper.make_model(graph, opset_imports=imports, ir_version=8), {"x": entries})
    given_ = {key: np.float32(value) for key, value in entries.items()}
    (ours,) = host_outputs("CastMap", [given_], attributes, domain=ML)
    agree(ours, theirs)


# --- draws: those of jax.random ---------------------------------------------------------------------------------------

MOST = 64
FLOATS = {1: np.float32, 11: np.float64, 10: np.float16}


def _drawn(draw: Callable[..., jax.Array], seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Numbers of `jax.random`. The first ones do not depend on how many there are, so that it compiles but once."""
    with jax.enable_x64(True), jax.threefry_partitionable(True):
        key = jax.random.wrap_key_data(np.asarray([0, seed], np.uint32), impl="threefry2x32")
        return np.asarray(draw(key, (MOST,), dtype))[: math.prod(shape)].reshape(shape)


@pytest.mark.parametrize("op", ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"])
@examples
@given(data=st.data())
def test_numbers(op: str, data: st.DataObject) -> None:
    """Numbers of jax.random at the same key, moved to mean and scale, or between the limits; then rounded to the dtype."""
    d = Draw(data)
    shape, number, seed = d.shape(d.size(0, 3)), d.pick(list(FLOATS)), d.size(0, 1000)
    dtype = FLOATS[number]
    attributes: dict[str, Any] = {"dtype": number, "seed": float(seed)}
    inputs = []
    if op.endswith("Like"):
        kind = d.pick((np.float32, np.int64, np.float64))
        inputs = [np.zeros(shape, kind)]
        if kind != np.int64 and d.flag():
            attributes["dtype"], dtype = None, kind
    else:
        attributes["shape"] = list(shape)
    if "Normal" in op:
        mean, scale = d.pick((0.0, -3.0)), d.pick((1.0, 2.5))
        attributes |= {"mean": mean, "scale": scale}
        expected = (
            _drawn(jax.random.normal, seed, shape, np.float64 if dtype == np.float64 else np.float32).astype(np.float64)
            * scale
            + mean
        )
    else:
        low, high = d.pick(((0.0, 1.0), (-2.0, 3.0), (5.0, 5.5)))
        attributes |= {"low": low, "high": high}
        expected = (
            _drawn(jax.random.uniform, seed, shape, np.float64 if dtype == np.float64 else np.float32).astype(
                np.float64
            )
            * (high - low)
            + low
        )
    (ours,) = host_outputs(op, inputs, attributes, domain="")
    assert (ours.shape, ours.dtype) == (shape, dtype)
    exact = {np.float16: 2e-3, np.float32: 2e-5, np.float64: 1e-6}[dtype]
    np.testing.assert_allclose(ours.astype(np.float64), expected, rtol=exact, atol=exact)
    if "Uniform" in op:
        assert ((ours >= low) & (ours < high)).all()


@examples
@given(data=st.data())
def test_multinomial(data: st.DataObject) -> None:
    """The place of each uniform number in the running sums of the chances."""
    d = Draw(data)
    logits = d.floats(d.size(0, 3), d.size(1, 6), scale=d.pick((1.0, 20.0)), dtype=d.pick((np.float32, np.float64)))
    if d.flag() and logits.size:
        logits[:, d.size(0, logits.shape[1] - 1)] = -np.inf if logits.shape[1] > 1 else 0
    count, seed, number = d.size(0, 6), d.size(0, 1000), d.pick((6, 7))
    (ours,) = host_outputs(
        "Multinomial", [logits], {"sample_size": count, "dtype": number, "seed": float(seed)}, domain=""
    )
    assert (ours.shape, ours.dtype) == ((len(logits), count), {6: np.int32, 7: np.int64}[number])
    draws = _drawn(jax.random.uniform, seed, (len(logits), count), np.float64)
    for row, chances in enumerate(np.exp(logits.astype(np.float64))):
        edges = np.cumsum(chances) / chances.sum()
        near = np.abs(draws[row][:, None] - edges).min(axis=1, initial=1) < 1e-9
        expected = np.searchsorted(edges, draws[row], side="right")
        np.testing.assert_array_equal(ours[row][~near], expected[~near])
        assert (chances[ours[row]] > 0).all()


@pytest.mark.parametrize(
    "op", ["Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
@few_examples
@given(data=st.data())
def test_a_program_draws_the_same(op: str, data: st.DataObject) -> None:
    d = Draw(data)
    shape, seed = d.shape(2, low=1), float(d.size(0, 99))
    inputs = [] if op in ("RandomNormal", "RandomUniform") else [d.floats(*shape)]
    attributes: dict[str, Any] = {"seed": seed} if inputs else {"seed": seed, "shape": list(shape)}
    if op == "Multinomial":
        attributes["sample_size"] = 5
    (host,) = host_outputs(op, inputs, attributes, domain="")
    (traced,) = traced_outputs(op, inputs, attributes, domain="")
    agree(traced, host, rtol=2e-6, atol=2e-6)


# --- derivatives ------------------------------------------------------------------------------------------------------

UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Tanh": np.tanh,
    "Sin": np.sin,
    "Exp": np.exp,
    "Neg": np.negative,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softplus": lambda x: np.log1p(np.exp(x)),
}
BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Add": np.add,
    "Mul": np.multiply,
    "Sub": np.subtract,
}


@examples
@given(data=st.data())
def test_gradient(data: st.DataObject) -> None:
    """Against difference quotients in float64 of the same chain in numpy; `zs` are held."""
    d = Draw(data)
    shape = d.shape(d.size(0, 2), low=0, high=3)
    x, z = d.floats(*shape, dtype=np.float64), d.floats(*shape, dtype=np.float64)
    steps = [d.pick([*UNARY, *BINARY]) for _ in range(d.size(1, 3))]
    nodes, name = [], "x"
    for k, op in enumerate(steps):
        nodes.append(helper.make_node(op, [name, "z"] if op in BINARY else [name], [f"v{k}"]))
        name = f"v{k}"
    held = d.flag()
    names = {"xs": ["x"], "zs": ["z"]} if held else {"xs": ["x", "z"]}
    results = ["dx"] if held else ["dx", "dz"]
    domain = "ai.onnx.preview.training"
    nodes.append(helper.make_node("Gradient", ["x", "z"], results, domain=domain, y=name, **names))
    infos = [_info("x", x), _info("z", z)]
    outputs = [helper.make_tensor_value_info(result, TensorProto.DOUBLE, None) for result in results]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", infos, outputs), opset_imports=imports, ir_version=9)

    def total(x: np.ndarray, z: np.ndarray) -> np.ndarray:
        value = x
        for op in steps:
            value = BINARY[op](value, z) if op in BINARY else UNARY[op](value)
        return value

    # Element by element nothing mixes, so that all quotients come out of one pair of values.
    step = 1e-6
    expected = {
        "dx": (total(x + step, z) - total(x - step, z)) / (2 * step),
        "dz": (total(x, z + step) - total(x, z - step)) / (2 * step),
    }
    ours = tm.run_sync(model, {"x": x, "z": z}, compiler="eager")
    for result in results:
        assert ours[result].dtype == np.float64
        np.testing.assert_allclose(ours[result], expected[result], rtol=1e-5, atol=1e-6)
