"""Which operators compute float16 as float32 where a program is asked to, and what becomes of their inputs and outputs.

A CPU has no float16 arithmetic: each operator widens its inputs and rounds its result. Under this policy results stay float32
from one such operator to the next, as `Half` values, and are rounded where they leave: as an output of the program or of a
body, and at operators that are not listed here. What an operator tells of values (comparisons, indices, integers) it
tells of the rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.graph import Graph, TensorType
from transmuter_async.operators.channels_last import ChannelsLast
from transmuter_async.operators.registry import Operator

__all__ = ["HALF", "Half", "uses_half", "widen_half"]

HALF = np.dtype(np.float16)
LARGEST = 65520.0
"""From here on float16 has infinity."""

_SMALL = 256  # bytes up to which a constant is widened where it is used


class Half:
    """A traced value that the graph declares as float16 and that is held as float32.

    Attributes:
        value: The float32 array, or a `ChannelsLast` of one.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def rounded(self) -> Any:
        """As the graph declares it; a `ChannelsLast` value stays one."""
        return _as(self.value, HALF)

    def overflows(self) -> Any:
        """Whether float16 could not hold it: traced bool."""
        array = self.value.array if isinstance(self.value, ChannelsLast) else self.value
        return ~jnp.all(jnp.abs(array) < LARGEST)


def _as(value: Any, dtype: Any) -> Any:
    if isinstance(value, ChannelsLast):
        return ChannelsLast(value.array.astype(dtype), value.width)
    return value.astype(dtype)


_COMPUTING: Mapping[tuple[str, str], frozenset[int] | None] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                ("", name)
                for name in (
                    *(
                        "Acos",
                        "Acosh",
                        "Add",
                        "Asin",
                        "Asinh",
                        "Atan",
                        "Atanh",
                        "AveragePool",
                        "BatchNormalization",
                        "Celu",
                    ),
                    *("Conv", "ConvTranspose", "Cos", "Cosh", "CumSum", "Div", "Einsum", "Elu", "Erf", "Exp", "Gelu"),
                    *(
                        "Gemm",
                        "GlobalAveragePool",
                        "GlobalLpPool",
                        "GridSample",
                        "GroupNormalization",
                        "GRU",
                        "HardSigmoid",
                    ),
                    *(
                        "HardSwish",
                        "InstanceNormalization",
                        "LeakyRelu",
                        "Log",
                        "LogSoftmax",
                        "LpNormalization",
                        "LpPool",
                    ),
                    *("LRN", "LSTM", "MatMul", "Mean", "MeanVarianceNormalization", "Mish", "Mul", "Pow", "PRelu"),
                    *(
                        "Reciprocal",
                        "ReduceL1",
                        "ReduceL2",
                        "ReduceLogSum",
                        "ReduceLogSumExp",
                        "ReduceMean",
                        "ReduceProd",
                    ),
                    *("ReduceSum", "ReduceSumSquare", "Resize", "RMSNormalization", "RNN", "RotaryEmbedding", "Selu"),
                    *(
                        "Sigmoid",
                        "Sin",
                        "Sinh",
                        "Softmax",
                        "Softplus",
                        "Softsign",
                        "Sqrt",
                        "Sub",
                        "Sum",
                        "Swish",
                        "Tan",
                    ),
                    *("Tanh",),
                )
            ),
            None,
        ),
        **dict.fromkeys(
            (
                ("com.microsoft", name)
                for name in ("BiasGelu", "FastGelu", "FusedConv", "FusedMatMul", "Gelu", "QuickGelu", "RotaryEmbedding")
            ),
            None,
        ),
        ("", "LayerNormalization"): frozenset({0}),
        ("", "SimplifiedLayerNormalization"): frozenset({0}),
        ("com.microsoft", "SkipLayerNormalization"): frozenset({0, 3}),
        ("com.microsoft", "SkipSimplifiedLayerNormalization"): frozenset({0, 3}),
    }
)
"""Operators that compute, with the outputs that have the dtype of the first input; None: all of them."""

_MOVING: frozenset[str] = frozenset(
    {
        *("Abs", "CenterCropPad", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements"),
        *(
            "GatherND",
            "GlobalMaxPool",
            "Identity",
            "Max",
            "MaxPool",
            "Min",
            "Neg",
            "Pad",
            "ReduceMax",
            "ReduceMin",
            "Relu",
        ),
        *("Reshape", "ReverseSequence", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu"),
        *("Unsqueeze", "Where"),
    }
)
"""Operators that round nothing: they take what they get as it is."""

_OWN: frozenset[tuple[str, str, str]] = frozenset(
    {
        *(("", operator, "W") for operator in ("Conv", "ConvTranspose", "RNN", "GRU", "LSTM")),
        *(("", operator, "R") for operator in ("RNN", "GRU", "LSTM")),
        ("", "Gemm", "B"),
    }
)
"""Weights, as (domain, operator, input), that the definition itself asks for in another layout, and wide."""

_FLOATS = (1, 11)  # TensorProto's float and double
_FLOAT16 = 10


def uses_half(graph: Graph) -> bool:
    """Whether something in a graph or its bodies is float16, as far as inputs, weights and attributes tell."""
    if any(isinstance(each.type, TensorType) and each.type.dtype == HALF for each in graph.inputs):
        return True
    if any(array.dtype == HALF for array in graph.initializers.values()):
        return True
    for node in graph.nodes:
        for name, value in node.attributes.items():
            if isinstance(value, np.ndarray) and value.dtype == HALF:
                return True
            if name in ("to", "dtype", "output_dtype") and value == _FLOAT16:
                return True
        if any(map(uses_half, node.subgraphs())):
            return True
    return False


def widen_half(
    definition: Operator,
    values: Sequence[Any],
    attributes: Mapping[str, Any],
    n_outputs: int,
    weights: Callable[[np.ndarray], Any],
) -> tuple[list[Any], frozenset[int]]:
    """The inputs as a node takes them under the policy.

    Args:
        definition: Of its operator.
        values: Of its inputs; those that are held wide are `Half`.
        attributes: Of the node.
        n_outputs: How many outputs it has.
        weights: Gives a large known float16 array as float32.

    Returns:
        The inputs without any `Half`, and which outputs are to be one where they are float32.
    """
    held = any(isinstance(value, Half) for value in values)
    outputs = _outputs(definition, values, attributes, n_outputs, held)
    if outputs is None:
        return [value.rounded() if isinstance(value, Half) else value for value in values], frozenset()
    wide: list[Any] = []
    for index, value in enumerate(values):
        if isinstance(value, Half):
            wide.append(value.value)
        elif getattr(value, "dtype", None) != HALF:
            wide.append(value)
        elif isinstance(value, np.ndarray) and value.nbytes > _SMALL:
            own = (definition.domain, definition.name, definition.input_name(index)) in _OWN
            wide.append(value if own else weights(value))
        else:
            wide.append(_as(value, np.float32))
    return wide, outputs


def _outputs(
    definition: Operator, values: Sequence[Any], attributes: Mapping[str, Any], n_outputs: int, held: bool
) -> frozenset[int] | None:
    """The outputs that are to be `Half`; None where the node computes as declared."""
    if not held and not any(
        isinstance(value, (jax.Array, ChannelsLast)) and getattr(value, "dtype", None) == HALF for value in values
    ):
        return None
    domain, name = definition.domain, definition.name
    if domain == "" and name == "Cast":
        return frozenset() if attributes.get("to") in _FLOATS else None
    moving = domain == "" and name in _MOVING
    if moving and (not held or (name == "MaxPool" and n_outputs > 1)):
        return None
    if not moving and (domain, name) not in _COMPUTING:
        return None
    lead = values[1 if name == "Where" else 0]
    if not isinstance(lead, Half) and getattr(lead, "dtype", None) != HALF:
        return None
    found = None if moving else _COMPUTING[domain, name]
    return frozenset(range(n_outputs)) if found is None else found
