"""Whether values are floats, integers or truth values, as far as operators tell. Sources: ai.onnx 1 to 24, com.microsoft 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.compiler.axes_spans import kind_of_dtype
from transmuter_async.compiler.axes_values import Tensor
from transmuter_async.compiler.sizes import Sizes
from transmuter_async.graph import Node, dtype_of

__all__ = ["kind_of", "result_kind"]

TRUTHS = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"}
)
INTEGERS = frozenset(
    {
        "Shape",
        "Size",
        "ArgMax",
        "ArgMin",
        "NonZero",
        "QuantizeLinear",
        "MatMulInteger",
        "ConvInteger",
        "QLinearMatMul",
        "QLinearConv",
    }
)
FLOATS = frozenset({"DequantizeLinear", "RandomNormal", "RandomUniform"})
BY_INPUT = {"CastLike": 1, "Where": 1, "OneHot": 2, "EmbedLayerNormalization": 5}
"""The input whose dtype the result has, where it is not the first."""
SECOND_IS_INTEGER = frozenset({"TopK", "MaxPool", "Unique"})
UNTOLD = frozenset({"If", "Loop", "Scan"})


def kind_of(value: Any) -> str:
    """Either "f", "i" or "b"; "" where it is something else or not known."""
    if isinstance(value, Tensor):
        return value.kind
    if isinstance(value, Sizes):
        return "b" if value.dtype.kind == "b" else "i"
    return kind_of_dtype(value.dtype) if isinstance(value, np.ndarray) else ""


def result_kind(node: Node, at: int, values: Sequence[Any], told: str) -> str:
    """The kind of a node's output `at`; `told` is what its rule says."""
    op = node.op_type
    if op in UNTOLD and not node.domain:
        return told
    if op in TRUTHS:
        return "b"
    if op in INTEGERS or (at and op in SECOND_IS_INTEGER):
        return "i"
    if op == "DynamicQuantizeLinear":
        return "f" if at == 1 else "i"
    if op in FLOATS:
        return "f"
    if op == "Cast" or (op.endswith("Like") and "dtype" in node.attributes):
        return kind_of_dtype(dtype_of(int(node.attributes["to" if op == "Cast" else "dtype"])))  # type: ignore[call-overload]
    if op == "ConstantOfShape":
        value = node.attributes.get("value")
        return kind_of(value) if isinstance(value, np.ndarray) else "f"
    index = BY_INPUT.get(op, 0)
    return kind_of(values[index]) if len(values) > index else ""
