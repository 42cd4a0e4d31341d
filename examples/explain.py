"""Where does a graph break, and why? Here the shape of a Reshape depends on how many elements are not zero.

python examples/explain.py
"""

from __future__ import annotations

import anyio
import numpy as np
from onnx import TensorProto, helper

import transmuter_async as tm


def positions() -> bytes:
    """x (n,) to the positions of its non-zero elements, doubled."""
    nodes = [
        helper.make_node("Abs", ["x"], ["absolute"], "abs"),
        helper.make_node("NonZero", ["absolute"], ["found"], "nonzero"),
        helper.make_node("Add", ["found", "found"], ["doubled"], "add"),
    ]
    graph = helper.make_graph(
        nodes,
        "positions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("doubled", TensorProto.INT64, [1, "count"])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


async def main() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(positions(), {"x": tm.Spec((5,), "float32")})
        outputs = await compiled.run({"x": np.array([0, 1, 0, 2, 3], np.float32)})
        print(outputs["doubled"])
        print(await compiled.explain())


anyio.run(main)
