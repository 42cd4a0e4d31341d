"""The convolutional networks in the `onnx` wheel, at batch 1, with random weights of their real sizes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks.frame import Figure, each, only_in_full
from tests.benchmarks.versus import compare, figures
from tests.benchmarks.zoo import WORST

__all__ = ["NETWORKS", "filled"]

NETWORKS = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
QUICK = ("resnet50", "shufflenet", "squeezenet")
SECONDS = 3.0


def filled(name: str) -> onnx.ModelProto:
    """The network with weights in place of the zeros that the wheel's files make.

    What goes into the closing Softmax is an output as well: with random weights one class has all.
    """
    file = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"
    model = onnx.load(file)
    graph, rng = model.graph, np.random.default_rng(0)
    shapes = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    uses = {value: (node.op_type, place) for node in graph.node for place, value in enumerate(node.input)}
    behind = {node.input[0]: node.output[0] for node in graph.node if node.op_type == "Unsqueeze"}
    kept, weights, replaced = [], [], set()
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        [result] = node.output
        shape = tuple(map(int, shapes[node.input[0]]))
        weights.append(numpy_helper.from_array(_drawn(uses[behind.get(result, result)], shape, rng), result))
        replaced.add(node.input[0])
    weights += [each for each in graph.initializer if each.name not in replaced and each.name in uses]
    constants = {each.name for each in graph.initializer}
    inputs = [each for each in graph.input if each.name not in constants]
    for field, values in ((graph.node, kept), (graph.initializer, weights), (graph.input, inputs)):
        del field[:]
        field.extend(values)
    if kept[-1].op_type == "Softmax":
        graph.output.append(helper.make_tensor_value_info(kept[-1].input[0], TensorProto.FLOAT, None))
    return model


def _drawn(use: tuple[str, int], shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    operator, place = use
    if operator in ("Conv", "Gemm") and place == 1:
        drawn = rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / math.prod(shape[1:])))
    elif (operator, place) in (("BatchNormalization", 1), ("BatchNormalization", 4)) or operator == "Mul":
        drawn = rng.uniform(0.8, 1.2, shape)  # scales and variances
    else:
        drawn = rng.uniform(-0.1, 0.1, shape)
    return drawn.astype(np.float32)


@each({name: name for name in NETWORKS})
def network(name: str) -> Iterator[Figure]:
    """{} of the onnx wheel, random weights, against onnxruntime."""
    if name not in QUICK:
        only_in_full()
    model = filled(name)
    [value] = model.graph.input
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    image = np.random.default_rng(1).standard_normal(shape, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        onnx.save(model, path)
        del model
        found = compare(path, {value.name: image}, seconds=SECONDS)
    yield from figures("batch 1", found, bound=WORST)
