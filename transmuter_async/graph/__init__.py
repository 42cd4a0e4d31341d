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
from .passes import PASSES, constants_to_initializers, deduplicate, is_random, prune, remove_identity, simplify
from .reader import Observe, element_types, external_locations, read_model, reference_outputs, write_model
from .report import DynamicDimension, OperatorUse, Report, describe_type
from .storage import aligned_empty, freeze, lasting_empty

__all__ = [  # noqa: RUF022 - plain order, as in every layer
    "Budget",
    "Dimension",
    "DynamicDimension",
    "Graph",
    "MapType",
    "Model",
    "Node",
    "Observe",
    "OperatorUse",
    "OptionalType",
    "PASSES",
    "Report",
    "STRING",
    "SequenceType",
    "Source",
    "SparseTensor",
    "TensorType",
    "Type",
    "Value",
    "aligned_empty",
    "constants_to_initializers",
    "deduplicate",
    "describe_type",
    "dtype_of",
    "element_type_of",
    "element_types",
    "external_locations",
    "freeze",
    "is_random",
    "lasting_empty",
    "onnx_name",
    "parse_dtype",
    "prune",
    "read_model",
    "reference_outputs",
    "remove_identity",
    "simplify",
    "write_model",
]
