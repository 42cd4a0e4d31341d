"""Nodes that a rewritten graph has beside those of its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.graph import Node

__all__ = ["Writer"]

_OPSET = 19


class Writer:
    """Makes nodes of `ai.onnx` 19 for the place of one node of a graph, and the constants that they read.

    Args:
        near: The node; those that are made continue its path.
        constants: Those of the whole graph, by name; what is equal is made once.

    Attributes:
        nodes: What was made, in order.
    """

    def __init__(self, near: Node, constants: dict[str, np.ndarray]) -> None:
        self.near = near
        self.constants = constants
        self.nodes: list[Node] = []

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """The name of a constant."""
        array = np.asarray(value, dtype)
        name = f"@{array.dtype.name}{array.tolist()}"
        if name not in self.constants:
            array.flags.writeable = False
            self.constants[name] = array
        return name

    def add(self, op_type: str, inputs: Sequence[str], output: str, *, named: str = "", **attributes: Any) -> str:
        """Make a node with one output.

        Args:
            op_type: Its operator.
            inputs: Names of values.
            output: The name of its output.
            named: Its own name; that of its output by default.
            attributes: As the operator has them.

        Returns:
            `output`.
        """
        path = (*self.near.path, len(self.nodes))
        self.nodes.append(Node(op_type, "", tuple(inputs), (output,), attributes, named or output, path, _OPSET))
        return output
