"""Weights lie as programs read them: one copy of each, and every reader sees the elements of the file."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tests.compiler.support import Session, assert_same, by_onnxruntime, graph, node, proto
from transmuter_async.compiler import Options, lay_out_in_place, layouts, prepare, scales
from transmuter_async.compiler.common import LEAST
from transmuter_async.graph import lasting_empty, read_model
from transmuter_async.operators import known


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


# --- as they are read -----------------------------------------------------------------------------------------------------


def read(made):
    return read_model(made, known=known)


def laid_out(made):
    model = read(made)
    lay_out_in_place(model.graph)
    return model


def layers(count, seed, normalized=False):
    """Convolutions one after the other, with weights that no other model has, and what scales their channels behind them."""
    nodes, weights, value = [], {}, "x"
    for number in range(count):
        weights[f"w{number}"] = random(48, 48, 3, 3, seed=seed + number)
        nodes.append(node("Conv", [value, f"w{number}"], [f"c{number}"], pads=[1, 1, 1, 1]))
        value = f"c{number}"
        if normalized:
            weights[f"factor{number}"] = np.abs(random(48, 1, 1, seed=100 + number)) + 0.5
            nodes.append(node("Mul", [value, f"factor{number}"], [f"m{number}"]))
            value = f"m{number}"
    nodes.append(node("Relu", [value], ["y"]))
    return proto(nodes, ["x:float[n,48,5,6]"], ["y:float[...]"], weights), {"x": random(2, 48, 5, 6, seed=3)}


def living(model, monkeypatch, module):
    """How many of the large arrays that the model has now are there, each time that memory for another one is taken."""
    there = [weakref.ref(array) for array in model.graph.initializers.values() if array.nbytes >= LEAST]
    found = []

    def counted(count, dtype):
        if count * dtype.itemsize >= LEAST:
            found.append(sum(each() is not None for each in there))
        return lasting_empty(count, dtype)

    monkeypatch.setattr(module, "lasting_empty", counted)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_was_just_read_is_laid_out(kind, monkeypatch):
    made, inputs = MODELS[kind]()
    model, plain = laid_out(made), read(made)
    for name, array in plain.graph.initializers.items():
        moved = model.graph.initializers[name]
        np.testing.assert_array_equal(moved, array)
        assert moved.strides != array.strides
        assert not moved.flags.writeable
    found = living(model, monkeypatch, layouts)
    session = Session(model)
    assert not found, "it lies as programs read it already"
    assert_same(session(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)
    assert_same(Session(model, optimize=False)(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


def test_each_weight_goes_as_soon_as_it_lies_anew(monkeypatch):
    made, _ = layers(4, seed=1000)
    model = read(made)
    found = living(model, monkeypatch, layouts)
    lay_out_in_place(model.graph)
    assert found == [4, 3, 2, 1]


@pytest.mark.parametrize("options", [{}, {"optimize": False}, {"compiler": "eager"}], ids=str)
def test_each_weight_of_a_model_that_nobody_else_needs_goes(options, monkeypatch):
    made, inputs = layers(4, seed=3000)
    model = read(made)
    found = living(model, monkeypatch, layouts)
    prepared = prepare(model, Options(**options), sole=True)
    assert found == ([] if options else [4, 3, 2, 1])
    session = Session(made, **options)
    want = session(inputs)
    session.prepared = prepared
    assert_same(session(inputs), want, rtol=0, atol=0)


@pytest.mark.parametrize(("sole", "there"), [(True, [4, 3, 2, 1]), (False, [4, 4, 4, 4])])
def test_each_weight_goes_as_soon_as_another_holds_its_factors(sole, there, monkeypatch):
    made, inputs = layers(4, seed=2000 + 100 * sole, normalized=True)
    model = read(made)
    found, moved = living(model, monkeypatch, scales), living(model, monkeypatch, layouts)
    prepared = prepare(model, Options(), sole=sole)
    assert found == there
    assert not moved, "the new ones lie as programs read them"
    session = Session(made)
    want = session(inputs)
    session.prepared = prepared
    assert_same(session(inputs), want, rtol=0, atol=0)
    held = {id(array) for array in prepared.graph.initializers.values()}
    assert {id(array) for array in prepared.model.graph.initializers.values()} == held


def test_a_weight_of_two_names_stays_one():
    w = random(160, 160, seed=1)
    nodes = [node("Gemm", ["x", "a"], ["h"], transB=1), node("Gemm", ["h", "b"], ["y"], transB=1)]
    made = proto(nodes, ["x:float[n,160]"], ["y:float[...]"], {"a": w, "b": w})
    model = read(made)
    held = model.graph.initializers
    held["b"] = held["a"]
    lay_out_in_place(model.graph)
    assert held["a"] is held["b"]
    assert not held["a"].flags.c_contiguous
    inputs = {"x": random(3, 160, seed=2)}
    assert_same(Session(model)(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


def test_weights_of_bodies_are_laid_out():
    branches = {
        f"{name}_branch": graph([node("Gemm", ["x", name], ["z"], transB=1)], [], ["z:float[n,160]"], {name: random(160, 130, seed=seed)})
        for seed, name in enumerate(("then", "else"))
    }
    made = proto([node("If", ["c"], ["y"], **branches)], ["c:bool[]", "x:float[n,130]"], ["y:float[n,160]"])
    model = laid_out(made)
    [chosen] = model.graph.nodes
    assert not any(array.flags.c_contiguous for body in chosen.subgraphs() for array in body.initializers.values())
    for c in (True, False):
        inputs = {"c": np.array(c), "x": random(3, 130, seed=2)}
        assert_same(Session(model)(inputs), by_onnxruntime(made, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", [gemm(np.float16), read_twice(), conv(kernel=1, channels=160)], ids=["narrow", "twice", "one element"])
def test_what_is_not_surely_read_so_stays_as_it_was_read(made):
    model = read(made[0])
    before = dict(model.graph.initializers)
    lay_out_in_place(model.graph)
    assert all(model.graph.initializers[name] is array for name, array in before.items())
