"""A damaged file gives InvalidModel, or a model: never another exception, a crash, a hang or a huge allocation."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from tests.graph.build import everything, model, nothing, value
from transmuter_async.errors import InvalidModel
from transmuter_async.graph import read_model, simplify


def seeds() -> list[bytes]:
    """Small models with something of everything in them."""
    big = numpy_helper.from_array(np.arange(1100, dtype=np.float32), "big")
    varints = helper.make_tensor("ints", onnx.TensorProto.INT64, [2000], list(range(2000)))
    small = [helper.make_tensor("four", onnx.TensorProto.INT4, [3], [1, -2, 3]), helper.make_tensor("text", 8, [2], [b"a", b"bc"])]
    sparse = helper.make_sparse_tensor(numpy_helper.from_array(np.float32([1, 2]), "sp"), numpy_helper.from_array(np.array([0, 3]), "i"), [2, 3])
    outside = onnx.TensorProto(name="out", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, held in (("location", "weights.bin"), ("offset", "4"), ("length", "16")):
        outside.external_data.add(key=key, value=held)
    inner = helper.make_graph([helper.make_node("Add", ["x", "c"], ["r"]), helper.make_node("Constant", [], ["k"], value=big)], "b", [], [value("r")])
    nodes = [
        helper.make_node("Constant", [], ["c"], value_floats=[1.0]), helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner),
        helper.make_node("F", ["x"], ["z"], domain="local", slope=0.5), helper.make_node("Softmax", ["z"], ["s"], axis=-1),
        helper.make_node("CastLike", ["x", "ints"], ["q"]), helper.make_node("Constant", [], ["sp2"], sparse_value=sparse),
    ]  # fmt: skip
    relu = helper.make_node("LeakyRelu", ["a"], ["b"])
    relu.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=1))
    function = helper.make_function("local", "F", ["a"], ["b"], [relu], [helper.make_opsetid("", 17)], attributes=["slope"])
    whole = model(
        nodes, outputs=["y", "z", "s", "q"], initializers=[big, varints, *small], sparse_initializer=[sparse], functions=[function],
        imports={"local": 1}, value_info=[value("c", (1,))],
    )  # fmt: skip
    external = model([helper.make_node("Add", ["x", "out"], ["y"])], initializers=[outside])
    return [whole.SerializeToString(), external.SerializeToString()]


SEEDS = seeds()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    (path / "weights.bin").write_bytes(bytes(64))
    return path


def attempt(data: bytes, folder: Path, known: object = everything) -> bool:
    """Whether the bytes are a model. Anything but InvalidModel comes out."""
    try:
        found = read_model(data, known=known, base_dir=folder)  # type: ignore[arg-type]
    except InvalidModel as error:
        assert str(error)
        return False
    str(found)
    str(found.check())
    simplify(found.graph)
    return True


def damage(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 30))):
        at = chance.randrange(len(out))
        kind = chance.randrange(6)
        if kind == 0:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif kind == 2:
            del out[at : at + chance.choice((1, 2, 50))]
        elif kind == 3:
            out[at:at] = chance.randbytes(chance.choice((1, 3, 9)))
        elif kind == 4:
            other = chance.randrange(len(out))
            out[at:at] = out[other : other + chance.choice((4, 40, 400))]
        else:
            out = out[: max(at, 1)]
        if not out:
            out = bytearray(b"\0")
    return bytes(out)


def headers(data: bytes) -> list[int]:
    """Positions outside of the large tensors, where damage matters most."""
    return [at for at in range(len(data)) if at < 200 or at > len(data) - 1500]


def test_the_seeds_are_models(folder: Path) -> None:
    assert all(attempt(data, folder, known) for data in SEEDS for known in (everything, nothing))


@pytest.mark.parametrize("start", range(4))
def test_damaged_models(start: int, folder: Path) -> None:
    chance = random.Random(start)
    tracemalloc.start()
    outcomes = set()
    slowest = 0.0
    for turn in range(800):
        data = damage(chance.choice(SEEDS), chance)
        began = time.process_time()
        outcomes.add(attempt(data, folder, nothing if turn % 2 else everything))
        slowest = max(slowest, time.process_time() - began)
    assert outcomes == {True, False}
    assert slowest < 5
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000


@pytest.mark.parametrize("data", SEEDS, ids=["whole", "external"])
def test_every_byte_flipped(data: bytes, folder: Path) -> None:
    for at in headers(data):
        for mask in (0x01, 0x80):
            attempt(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :], folder)


@pytest.mark.parametrize("data", SEEDS, ids=["whole", "external"])
def test_every_length(data: bytes, folder: Path) -> None:
    for stop in (*range(min(len(data), 600)), *range(600, len(data), 61)):
        attempt(data[:stop], folder)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    try:
        read_model(data, known=everything)
    except InvalidModel:
        return


def test_structures_made_to_hurt(folder: Path) -> None:
    """Few bytes that ask for a lot."""
    nested = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [], [value("y")])
    for level in range(30):
        nested = helper.make_graph([helper.make_node("If", ["x"], ["y"], then_branch=nested)], f"g{level}", [], [value("y")])
    kinds = helper.make_tensor_type_proto(1, [1])
    for _ in range(25):
        kinds = helper.make_sequence_type_proto(kinds)
    deep_type = model([helper.make_node("Neg", ["x"], ["y"])], [helper.make_value_info("x", kinds)])
    wide = onnx.TensorProto(name="w", data_type=9, dims=[1 << 50])
    began = time.process_time()
    for proto in (
        model([helper.make_node("If", ["x"], ["y"], then_branch=nested)]),
        deep_type,
        model([helper.make_node("Neg", ["x"], ["y"])], initializers=[wide]),
    ):
        attempt(proto.SerializeToString(), folder)
    assert time.process_time() - began < 5
