"""Small models, ways to run them through the compiler, and onnxruntime beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from transmuter_async.compiler import Fact, Missing, Options, Prepared, SegmentCache, pinned, prepare
from transmuter_async.graph import Model, read_model
from transmuter_async.operators import known

onnxruntime.set_default_logger_severity(4)

KINDS = {
    "float": TensorProto.FLOAT,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
    "string": TensorProto.STRING,
    "double": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "uint8": TensorProto.UINT8,
    "uint64": TensorProto.UINT64,
}


def value(text: str) -> onnx.ValueInfoProto:
    """A value from `"name:dtype[dim,dim]"`; a dimension is a number or a name, `[...]` an unknown rank."""
    name, _, rest = text.partition(":")
    kind, _, dims = rest.partition("[")
    dims = dims.rstrip("]")
    shape: Any = None if dims == "..." else [int(d) if d.isdigit() else d for d in dims.split(",") if d]
    return helper.make_tensor_value_info(name, KINDS[kind], shape)


def proto(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[str],
    outputs: Sequence[str],
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 18,
) -> onnx.ModelProto:
    """A model."""
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", [value(t) for t in inputs], [value(t) for t in outputs], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def graph(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str], weights: Mapping[str, Any] | None = None
) -> onnx.GraphProto:
    """A subgraph."""
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    return helper.make_graph(list(nodes), "body", [value(t) for t in inputs], [value(t) for t in outputs], tensors)


node = helper.make_node


class Session:
    """A model prepared once, with a cache of its own, that tells what each call did."""

    def __init__(self, made: onnx.ModelProto | Model, **options: Any) -> None:
        self.model = made if isinstance(made, Model) else read_model(made, known=known)
        self.prepared: Prepared = prepare(self.model, Options(**options))
        self.cache = SegmentCache(self.prepared.options.cache_size)
        self.facts: list[Fact] = []

    def __call__(self, inputs: Mapping[str, Any], *, seed: int = 0, device: bool = False) -> dict[str, Any]:
        self.facts = []
        execution = self.prepared.start(self.prepared.take_inputs(inputs), seed=seed, device=device)
        with pinned():
            while isinstance(step := execution.advance(self.cache, self.facts.append), Missing):
                self.cache.put(step.job.run(self.facts.append), self.facts.append)
        return step.outputs

    def told(self) -> list[str]:
        """Names of the facts of the last call, in order."""
        return [type(fact).__name__ for fact in self.facts]

    def compiled(self) -> int:
        """Programs that the last call compiled."""
        return sum(type(f).__name__ == "SegmentReady" and f.compiled for f in self.facts)  # type: ignore[union-attr]


def by_onnxruntime(made: onnx.ModelProto, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """onnxruntime's outputs, nothing optimized."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {k: np.asarray(v) for k, v in inputs.items()}), strict=True))


def assert_same(got: Mapping[str, Any], want: Mapping[str, Any], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Same names, shapes, dtypes and values; integers and strings exactly."""
    assert list(got) == list(want)
    for name, expected in want.items():
        found = got[name]
        if isinstance(expected, list):
            assert isinstance(found, list) and len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
            continue
        assert found.shape == expected.shape and found.dtype == expected.dtype, (name, found.shape, expected.shape)
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=name)


def assert_right(made: onnx.ModelProto, calls: Sequence[Mapping[str, Any]], **options: Any) -> Session:
    """Every call equals onnxruntime, by programs (twice each) and on the host form."""
    session = Session(made, **options)
    host = Session(made, compiler="eager")
    for inputs in calls:
        want = by_onnxruntime(made, inputs)
        assert_same(session(inputs), want)
        assert_same(session(inputs), want)
        assert session.compiled() == 0, "an immediate second call compiles nothing"
        assert_same(host(inputs), want)
    return session
