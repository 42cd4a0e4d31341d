"""Weights lie as programs read them: one copy of each, and every reader sees the elements of the file."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tests.compiler.support import Session, assert_same, by_onnxruntime, node, proto
from transmuter_async.compiler.common import LEAST


def random(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype) / 8


def gemm(dtype=np.float32):
    w = random(160, 130, seed=1, dtype=dtype)
    kind = "float" if dtype is np.float32 else "float16"
    nodes = [node("Gemm", ["x", "w"], ["y"], transB=1)]
    return proto(nodes, [f"x:{kind}[n,130]"], [f"y:{kind}[...]"], {"w": w}), {"x": random(3, 130, seed=2, dtype=dtype)}


def read_twice():
    nodes = [node("Gemm", ["x", "w"], ["a"], transB=1), node("MatMul", ["a", "w"], ["y"])]
    weights = {"w": random(160, 130, seed=1)}
    return proto(nodes, ["x:float[n,130]"], ["y:float[...]"], weights), {"x": random(3, 130, seed=2)}


def conv(kernel=3, group=1, channels=48):
    w = random(channels, channels // group, *(kernel,) * 2, seed=1)
    pads = [kernel // 2] * 4
    nodes = [node("Conv", ["x", "w"], ["a"], pads=pads, group=group), node("Relu", ["a"], ["y"])]
    return proto(nodes, [f"x:float[n,{channels},9,8]"], ["y:float[...]"], {"w": w}), {"x": random(2, channels, 9, 8)}


def recurrent(kind):
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    weights = {"W": random(2, gates * 140, 110, seed=1), "R": random(2, gates * 140, 140, seed=2)}
    nodes = [node(kind, ["x", "W", "R"], ["y"], hidden_size=140, direction="bidirectional")]
    return proto(nodes, ["x:float[t,b,110]"], ["y:float[...]"], weights), {"x": random(5, 2, 110, seed=3)}


MODELS = {"Gemm": gemm, "Conv": conv, **{kind: lambda kind=kind: recurrent(kind) for kind in ("RNN", "GRU", "LSTM")}}


@pytest.mark.parametrize("kind", MODELS)
def test_there_is_one_copy_of_a_weight_and_programs_read_it_where_it_lies(kind):
    made, inputs = MODELS[kind]()
    session = Session(made)
    assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)
    prepared = session.prepared
    held = prepared.graph.initializers
    assert all(prepared.model.graph.initializers[name] is array for name, array in held.items())
    places = [place for place in prepared._rearranged.values() if place is not None and place.nbytes >= LEAST]
    assert len(places) == sum(array.nbytes >= LEAST for array in held.values()) > 0
    for place in places:
        assert place.flags.c_contiguous
        assert any(np.shares_memory(place, array) for array in held.values())


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_is_changed_but_where_it_lies(kind):
    made, inputs = MODELS[kind]()
    optimized, plain = Session(made), Session(made, optimize=False)
    for name, array in plain.prepared.graph.initializers.items():
        moved = optimized.prepared.graph.initializers[name]
        np.testing.assert_array_equal(moved, array)
        assert moved.dtype == array.dtype
        assert moved.strides != array.strides
        assert not moved.flags.writeable
    assert_same(plain(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)
    assert_same(Session(made, compiler="eager")(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


def test_the_weight_as_it_was_read_is_dropped():
    made, _ = gemm()
    session = Session(made)
    read = weakref.ref(session.model.graph.initializers["w"])
    assert not np.shares_memory(session.prepared.graph.initializers["w"], read())
    del session.model
    gc.collect()
    assert read() is None


def test_two_models_have_it_in_common():
    made, inputs = gemm()
    first, second = Session(made), Session(made)
    assert first.prepared.graph.initializers["w"] is second.prepared.graph.initializers["w"]
    assert_same(second(inputs), first(inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    "made",
    [
        gemm(np.float16),
        read_twice(),
        conv(kernel=1, channels=160),
        conv(group=2, channels=96),
    ],
    ids=["widened", "another reader", "of one element", "in groups"],
)
def test_what_is_not_surely_read_so_stays(made):
    graph, inputs = made
    session = Session(graph, fold_bytes=0)
    assert session.prepared.graph.initializers["w"].flags.c_contiguous
    assert_same(session(inputs), by_onnxruntime(graph, inputs), rtol=2e-2, atol=2e-2)


def test_a_weight_that_a_call_may_replace_stays():
    made, inputs = gemm()
    made.graph.input.append(type(made.graph.input[0])())
    made.graph.input[-1].CopyFrom(made.graph.input[0])
    made.graph.input[-1].name = "w"
    for axis, size in enumerate((160, 130)):
        made.graph.input[-1].type.tensor_type.shape.dim[axis].Clear()
        made.graph.input[-1].type.tensor_type.shape.dim[axis].dim_value = size
    session = Session(made, overrides=("w",))
    other = random(160, 130, seed=9)
    assert_same(session({**inputs, "w": other}), {"y": inputs["x"] @ other.T}, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [(3,), (3, 3), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("geometry", [{}, {"strides": 2}, {"dilations": 2}], ids=str)
def test_numpy_goes_through_kernels_as_they_lie(kernel, geometry, monkeypatch):
    rank = len(kernel)
    w = random(96, 64, *kernel, seed=1)
    nodes = [node("Conv", ["x", "w"], ["y"], **{name: [number] * rank for name, number in geometry.items()})]
    shape = ",".join(map(str, (9, 8)[:rank]))
    made = proto(nodes, [f"x:float[n,64,{shape}]"], ["y:float[...]"], {"w": w})
    inputs = {"x": random(2, 64, *(9, 8)[:rank], seed=2)}
    factors = []
    product = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b: (factors.append(a), product(a, b))[1])
    session = Session(made, cold="interpret")
    assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)
    held = session.prepared.graph.initializers["w"]
    assert not held.flags.c_contiguous
    assert factors
    assert all(np.shares_memory(each, held) for each in factors)
