"""Small graphs for the table of single operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

__all__ = ["Case", "Draft", "single"]

Arrays = dict[str, np.ndarray]
MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Case:
    """A graph and inputs for it.

    Attributes:
        name: What it is, with its sizes.
        tolerance: Share of the largest expected magnitude that outputs may be away.
    """

    name: str
    source: bytes
    inputs: Arrays
    tolerance: float = 1e-4


@dataclass
class Draft:
    """A graph in the making: its weights and inputs are drawn, names are made up."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    inputs: Arrays = field(default_factory=dict)

    def input(self, value: np.ndarray | Sequence[int]) -> str:
        """An input: the array, or float32 normal values of that shape."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = value if isinstance(value, np.ndarray) else self.rng.standard_normal(value, np.float32)
        return name

    def weight(self, value: np.ndarray | Sequence[int]) -> str:
        """A weight: the array, or float32 normal values of that shape, scaled by the square root of its first dimensions' product."""
        if not isinstance(value, np.ndarray):
            value = self.rng.standard_normal(value, np.float32) / np.float32(max(1.0, np.prod(value[1:]) ** 0.5))
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def __call__(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; its output's name, or their names where there are several."""
        names = [f"{operator.lower()}{len(self.nodes)}_{number}" for number in range(outputs)]
        domain = attributes.pop("domain", "")
        self.nodes.append(helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def case(
        self, name: str, *outputs: str, opset: int = 17, dtype: int = TensorProto.FLOAT, tolerance: float = 1e-4
    ) -> Case:
        """The graph as a case; `dtype` is that of the outputs."""
        types = {key: helper.np_dtype_to_tensor_dtype(value.dtype) for key, value in self.inputs.items()}
        given = [helper.make_tensor_value_info(key, types[key], value.shape) for key, value in self.inputs.items()]
        made = [helper.make_tensor_value_info(each, dtype, None) for each in outputs]
        graph = helper.make_graph(self.nodes, "case", given, made, self.weights)
        domains = {node.domain for node in self.nodes} - {""}
        versions = {"ai.onnx.ml": 3}
        opsets = [
            helper.make_opsetid("", opset),
            *(helper.make_opsetid(each, versions.get(each, 1)) for each in sorted(domains)),
        ]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return Case(name, model.SerializeToString(), self.inputs, tolerance)


def single(
    name: str,
    operator: str,
    inputs: Sequence[np.ndarray | Sequence[int]],
    weights: Sequence[np.ndarray | Sequence[int]] = (),
    *,
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
    tolerance: float = 1e-4,
    outputs: int = 1,
    **attributes: Any,
) -> Case:
    """One node: inputs first, then weights."""
    draft = Draft()
    names = [*map(draft.input, inputs), *map(draft.weight, weights)]
    found = draft(operator, *names, outputs=outputs, **attributes)
    kept = [found] if outputs == 1 else found[:1]
    return draft.case(name, *kept, opset=opset, dtype=dtype, tolerance=tolerance)
