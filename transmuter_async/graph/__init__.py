"""ONNX bytes -> frozen values. Synchronous; no JAX, no event loop, no clock.

What is here: reading a model (`read_model`), the values it consists of (`Model`, `Graph`, `Node`, ...), the pre-flight
report, and passes Graph -> Graph. What is not: what an operator means (`operators`), and anything that runs.
"""

from __future__ import annotations

from .budget import Budget
from .dtypes import STRING, dtype_of, element_type_of, onnx_name, parse_dtype
from .model import (
    Dimension,
    Graph,
    MapType,
    Model,
    Node,
    OptionalType,
    SequenceType,
    Source,
    SparseTensor,
    TensorType,
    Type,
    Value,
)
from .reader import Observe, read_model

__all__ = [
    "Budget",
    "Dimension",
    "Graph",
    "MapType",
    "Model",
    "Node",
    "Observe",
    "OptionalType",
    "STRING",
    "SequenceType",
    "Source",
    "SparseTensor",
    "TensorType",
    "Type",
    "Value",
    "dtype_of",
    "element_type_of",
    "onnx_name",
    "parse_dtype",
    "read_model",
]
