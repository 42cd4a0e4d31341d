"""Models whose graph really breaks, served: refused where an operator meets rows or padding, else right; onnxruntime is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import transmuter_async as tm
from transmuter_async.testing import Recorder

FLOAT, BOOL, INT64, STRING = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64, TensorProto.STRING

KEEP = np.array([True, False, True, True])


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(op, inputs, outputs, name=op.lower(), **attributes)


def model(nodes: list[Any], out: tuple[int, list[Any]], *, length: Any = "length", keep: bool = False) -> bytes:
    """From `x` (batch, length), and `keep`, which has no rows, to `y`."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["batch", length])]
    if keep:
        inputs.append(helper.make_tensor_value_info("keep", BOOL, [length]))
    numbers = {"zero": 0, "one": 1}
    used = {name for each in nodes for name in each.input}
    graph = helper.make_graph(
        nodes,
        "breaks",
        inputs,
        [helper.make_tensor_value_info("y", *out)],
        [helper.make_tensor(name, INT64, [1], [number]) for name, number in numbers.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()


def places() -> bytes:
    """Where `x` is not zero, over all rows."""
    return model([node("NonZero", ["x"], ["y"])], (INT64, [2, "count"]))


def scaled() -> bytes:
    """Each row times the sum of what NonZero finds in all of them: the shape of the output tells nothing."""
    nodes = [
        node("NonZero", ["x"], ["at"]),
        node("Transpose", ["at"], ["pairs"], perm=[1, 0]),
        node("GatherND", ["x", "pairs"], ["found"]),
        node("ReduceSum", ["found"], ["sum"], keepdims=0),
        node("Mul", ["x", "sum"], ["y"]),
    ]
    return model(nodes, (FLOAT, ["batch", "length"]))


def picked() -> bytes:
    """The rows that have something above zero."""
    nodes = [
        node("ReduceMax", ["x", "one"], ["most"], keepdims=0),
        node("Cast", ["most"], ["some"], to=BOOL),
        node("Compress", ["x", "some"], ["y"], axis=0),
    ]
    return model(nodes, (FLOAT, ["kept", "length"]))


def columns() -> bytes:
    """The sum of the columns that `keep` names; rows stay apart, but padding may be among them."""
    nodes = [node("Compress", ["x", "keep"], ["kept"], axis=1), node("ReduceSum", ["kept", "one"], ["y"], keepdims=0)]
    return model(nodes, (FLOAT, ["batch"]), keep=True)


def gathered() -> bytes:
    """To each row the sum of its columns that `keep` names, by way of NonZero: of an input without rows."""
    nodes = [
        node("NonZero", ["keep"], ["found"]),
        node("Squeeze", ["found", "zero"], ["at"]),
        node("Gather", ["x", "at"], ["kept"], axis=1),
        node("ReduceSum", ["kept", "one"], ["sum"], keepdims=1),
        node("Add", ["x", "sum"], ["y"]),
    ]
    return model(nodes, (FLOAT, ["batch", 4]), length=4, keep=True)


def spelled() -> bytes:
    """Through text and back: XLA knows none, so there is a program before it and one behind."""
    nodes = [
        node("Mul", ["x", "x"], ["square"]),
        node("Cast", ["square"], ["text"], to=STRING),
        helper.make_node("Cast", ["text"], ["number"], to=FLOAT),
        node("Add", ["number", "x"], ["y"]),
    ]
    return model(nodes, (FLOAT, ["batch", "length"]))


@pytest.mark.parametrize("buckets", [None, {"length": [4, 8]}], ids=["equal lengths", "buckets"])
@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (places, "NonZero 'nonzero'"),
        (scaled, "NonZero 'nonzero'"),
        (picked, r"(Compress 'compress'|ReduceMax 'reducemax')"),
        (columns, "Compress 'compress'"),
    ],
    ids=["places", "scaled", "picked", "columns"],
)
async def test_what_counts_rows_or_padding_is_refused(
    make: Callable[[], bytes], operator: str, buckets: dict[str, list[int]] | None
) -> None:
    batching = None if buckets is None else tm.Batching("batch", buckets)
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.BatchingRefused, match=operator):
            await runtime.serve(await runtime.compile(make(), batching=batching), batch_size=[1, 4])


@pytest.mark.parametrize(
    ("make", "buckets", "keep"),
    [
        (spelled, None, False),
        (spelled, {"length": [4, 8]}, False),
        (gathered, None, True),
    ],
    ids=["spelled", "spelled into buckets", "gathered"],
)
async def test_a_break_that_keeps_rows_apart_is_right(
    make: Callable[[], bytes], buckets: dict[str, list[int]] | None, keep: bool
) -> None:
    made = make()
    lengths = [4] * 10 if keep else [4, 1, 3, 8, 4, 2, 5, 4, 1, 7]
    random = np.random.default_rng(2)
    requests: list[dict[str, Any]] = [
        {"x": random.integers(0, 3, (1 + (number == 4), length)).astype(np.float32)}
        for number, length in enumerate(lengths)
    ]
    if keep:
        for number, each in enumerate(requests):  # of two kinds, which share no batch
            each["keep"] = KEEP if number % 3 else ~KEEP
    session = await anyio.to_thread.run_sync(onnxruntime.InferenceSession, made)
    wanted = [session.run(None, each)[0] for each in requests]
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter.break") as recorder:
        compiled = await runtime.compile(made, batching=None if buckets is None else tm.Batching("batch", buckets))
        async with runtime.serve(compiled, batch_size=[1, 4]) as serving:
            found = [each["y"] async for each in serving.map(requests)]
            statistics = await serving.statistics()
        breaks = recorder.named("transmuter.break.stop")
    assert [each.shape for each in found] == [each.shape for each in wanted]
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len(breaks) >= statistics.batches  # each batch met it
    assert statistics.retried == 0
    assert statistics.batches < len(requests)
